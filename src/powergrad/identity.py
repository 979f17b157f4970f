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

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from powergrad.checks import check_number
from powergrad.clip import Clipping
from powergrad.head import scalable_heads, scale

__all__ = ["equivalent_training"]


def equivalent_training(
    model: nn.Module,
    optimizer: Optimizer,
    alpha: float,
    head: nn.Module | str | None = None,
    *,
    example_inputs: Any = None,
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
    auxiliary head adds another), and a constant alpha. Clipping by the norm of all gradients breaks
    it. The other methods of :func:`clip_grads_before_step`, if attached to `optimizer`, move to the
    returned optimizer, and clip and report as they would with PGT; if you clip with your own code,
    multiply the backbone's threshold by alpha. A schedule must act on the returned optimizer and
    scale each group, including its warm-up start and its minimum. A ``softcap`` of the loss must be
    multiplied by alpha: this is done for each :class:`CrossEntropyLoss` that is a module of
    `model`, and left to you elsewhere. The derivation is in `docs/theory.md`.

    Args:
        model: The network; its last layer computes the logits.
        optimizer: The optimizer of `model`: SGD, Adam or AdamW of `torch.optim`, new or in use. Its
            state is carried over. Do not use it afterwards.
        alpha: The exponent, above 0; the paper recommends at most 1.
        head: The last layer or its name, if it cannot be found automatically.
        example_inputs: The arguments of `model`: a tensor, a tuple of positional arguments, or a
            dict of keyword arguments. `model` is run in evaluation mode to find the head or to
            check that the logits scale with it, and restored.

    Returns:
        A new optimizer of the same class. Each group becomes two, the backbone's and the head's (or
        one, if it holds only parameters of one kind).

    Raises:
        ValueError: If the head is not found, not linear, tied or parametrised; if the model's
            configuration or the example shows that the logits do not scale with it; if alpha is
            not above 0; if the optimizer holds parameters that are not the model's, clips by the
            norm of all gradients, or has other hooks.
        TypeError: If the optimizer is of another class.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-3)
        >>> optimizer = equivalent_training(model, optimizer, alpha=0.25)
        >>> [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
        [(0.4, 0.00025), (0.025, 0.004)]
    """
    alpha = check_number(alpha)
    if alpha == 0:
        raise ValueError(
            "Expected `alpha` to be above 0, but got 0, which equals no plain training."
        )
    if type(optimizer) not in _BACKBONE:
        raise TypeError(
            "Expected `optimizer` to be torch.optim.SGD, Adam or AdamW, "
            f"but got {type(optimizer).__name__}."
        )
    heads = scalable_heads(model, head, example_inputs)
    own = {parameter for layer in heads for parameter in layer.parameters()}
    clippings = _attached_clippings(optimizer)
    groups = _split(optimizer, own, set(model.parameters()), alpha)
    scale(heads, alpha, model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None and parameter not in own:
                parameter.grad.mul_(alpha)
    accepted = inspect.signature(type(optimizer)).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    result = type(optimizer)(groups, **defaults)
    for parameter, state in optimizer.state.items():
        powers = {} if parameter in own else _MOMENTS
        result.state[parameter] = _scaled(state, powers, alpha)
    for clipping in clippings:
        clipping.alpha *= alpha
        clipping.heads = set(own)
        clipping.attach(result)
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


def _attached_clippings(optimizer: Optimizer) -> list[Clipping]:
    """The clipping hooks of `optimizer`; any other step hook is an error."""
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    hooks: list[Any] = [*before.values(), *after.values()]
    for hook in hooks:
        clips = isinstance(hook, Clipping)
        if not clips or "norm" in hook.thresholds:
            other = getattr(hook, "__qualname__", hook)
            raise ValueError(
                "Expected `optimizer` to have no hooks except `clip_grads_before_step` by unit, "
                f"tensor or value, but got {'the norm of all gradients' if clips else other}; "
                "remove it first."
            )
    return hooks


def _split(
    optimizer: Optimizer, own: set[nn.Parameter], known: set[nn.Parameter], alpha: float
) -> list[dict[str, Any]]:
    """The groups of the new optimizer."""
    groups = []
    for group in optimizer.param_groups:
        if foreign := [p for p in group["params"] if p not in known]:
            raise ValueError(
                "Expected `optimizer` to hold only parameters of `model`, but got another one, of "
                f"shape {tuple(foreign[0].shape)}."
            )
        kind = AdamW if group.get("decoupled_weight_decay") else type(optimizer)
        for is_head in (False, True):
            chosen = [(p in own) == is_head for p in group["params"]]
            if any(chosen):
                part = _scaled(group, _HEAD if is_head else _BACKBONE[kind], alpha)
                for key in part.keys() & {"params", "param_names"}:
                    part[key] = list(compress(group[key], chosen))
                groups.append(part)
    return groups
