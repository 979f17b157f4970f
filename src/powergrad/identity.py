r"""PowerGrad Transform is equivalent to ordinary training with two parameter groups.

With the head ``z = W a + b`` and ``V = alpha W``, ``c = alpha b``, PGT's gradient at the logits,
``softmax(alpha z) - q``, is that of plain cross-entropy on ``V a + c``. So W has the gradient of V,
and everything before it, through ``W^T = V^T / alpha``, 1 / alpha times the plain gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from itertools import compress
from typing import Any

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from powergrad.checks import check_number
from powergrad.head import scalable_heads, scale

__all__ = ["equivalent_training"]


def equivalent_training(
    model: nn.Module,
    optimizer: Optimizer,
    alpha: float,
    head: nn.Module | str | None = None,
) -> Optimizer:
    r"""Convert a training with PGT into the equivalent training with plain cross-entropy.

    The head of `model` is multiplied by alpha in place, and so are gradients of the backbone that
    are already accumulated. In the returned optimizer, each group is split in two. From then on,
    each step with plain cross-entropy gives the same weights as a step with PGT at this constant
    alpha (for the head: times alpha), up to rounding:

    =======================  ===========================  ==========================
    optimizer                backbone                     head
    =======================  ===========================  ==========================
    SGD, momentum, Nesterov  lr / alpha, decay * alpha    lr * alpha, decay / alpha
    Adam                     eps * alpha, decay * alpha   lr * alpha, decay / alpha
    AdamW                    eps * alpha                  lr * alpha, decay / alpha
    =======================  ===========================  ==========================

    The equivalence holds for a linear last layer with unshared parameters, a single loss term (an
    auxiliary head adds another), and a constant alpha. Attach AGC to the returned optimizer, with
    its threshold multiplied by alpha; other clipping needs one for the backbone and one for the
    head, and the norm of all gradients breaks the equivalence. A schedule must act on the returned
    optimizer and scale each group, including its warm-up start and its minimum. A ``softcap`` of
    the loss is multiplied as by :func:`fold_alpha`. The derivation is in `docs/theory.md`.

    Args:
        model: The network; its last layer computes the logits.
        optimizer: The optimizer of `model`: SGD, Adam or AdamW of `torch.optim`, new or in use. Its
            state is carried over. Do not use it afterwards.
        alpha: The exponent, above 0; the paper recommends at most 1.
        head: The last layer or its name, if it cannot be found automatically.

    Returns:
        A new optimizer of the same class, in which the backbone and the head have their own groups.

    Raises:
        ValueError: As :func:`fold_alpha`; or if the optimizer holds parameters that are not the
            model's, or has hooks, such as clipping.
        TypeError: If the optimizer is of another class.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-3)
        >>> optimizer = equivalent_training(model, optimizer, alpha=0.25)
        >>> [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
        [(0.4, 0.00025), (0.025, 0.004)]
    """
    alpha = check_number(alpha, positive=True)
    if type(optimizer) not in _BACKBONE:
        kind = type(optimizer).__name__
        raise TypeError(f"Expected `optimizer` to be SGD, Adam or AdamW of torch, but got {kind}.")
    heads = scalable_heads(model, head)
    own = {parameter for layer in heads for parameter in layer.parameters()}
    backbone = set(model.parameters()) - own
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    if hooks := [*before.values(), *after.values()]:
        got = getattr(hooks[0], "__qualname__", type(hooks[0]).__name__)
        raise ValueError(
            "Expected `optimizer` to have no step hooks, which would not move to the new one, but "
            f"got {got}; remove it, and attach clipping to the optimizer that is returned."
        )
    groups = []
    for group in optimizer.param_groups:
        if not (backbone | own).issuperset(group["params"]):
            raise ValueError(
                "Expected `optimizer` to hold only parameters of `model`, but got others."
            )
        kind = AdamW if group.get("decoupled_weight_decay") else type(optimizer)
        for powers, part in ((_BACKBONE[kind], backbone), (_HEAD, own)):
            if any(chosen := [parameter in part for parameter in group["params"]]):
                groups.append(_scaled(group, powers, alpha))
                for key in group.keys() & {"params", "param_names"}:
                    groups[-1][key] = list(compress(group[key], chosen))
    scale(heads, alpha, model)
    for parameter in backbone:
        if parameter.grad is not None:
            parameter.grad.detach().mul_(alpha)
    accepted = inspect.signature(type(optimizer)).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    result = type(optimizer)(groups, **defaults)
    for parameter, state in optimizer.state.items():
        result.state[parameter] = _scaled(state, {} if parameter in own else _MOMENTS, alpha)
    return result


# The power of alpha by which each option is multiplied, and each moment of the backbone's gradients
# (which are now alpha times as large).
_HEAD = {"lr": 1, "initial_lr": 1, "weight_decay": -1}
_BACKBONE: dict[type[Optimizer], dict[str, int]] = {
    SGD: {"lr": -1, "initial_lr": -1, "weight_decay": 1},
    Adam: {"eps": 1, "weight_decay": 1},
    AdamW: {"eps": 1},
}
_MOMENTS = {"momentum_buffer": 1, "exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2}


def _scaled(options: Mapping[str, Any], powers: Mapping[str, int], alpha: float) -> dict[str, Any]:
    known = {key: power for key, power in powers.items() if options.get(key) is not None}
    return {**options, **{key: options[key] * alpha**power for key, power in known.items()}}
