r"""PowerGrad Transform is equal to ordinary training with two parameter groups.

Let the last layer be linear with parameters of its own, ``z = W a + b``, and put ``V = alpha W``,
``c = alpha b``, so that ``u = V a + c = alpha z``. PGT's gradient at the logits is
``softmax(alpha z) - q = softmax(u) - q``: that of plain cross-entropy on ``u``. Hence

    the gradient of W is the plain gradient of V;
    the gradient of every other parameter, W^T(...) = V^T(...) / alpha, is the plain one / alpha;
    a step dW of the head is a step alpha * dW of V.

So the head's learning rate is multiplied by alpha and the backbone's gradient by 1/alpha. Where the
update is linear in the gradient (SGD) the latter is a learning rate times 1/alpha; where the update
does not depend on the gradient's scale (Adam) it is an eps times alpha. Weight decay that is added
to the gradient is scaled with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from itertools import compress
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim import SGD, Adam, AdamW, Optimizer

from powergrad._check import check_number
from powergrad._head import LINEAR_LAYERS, find_head

__all__ = ["equivalent_training"]


def equivalent_training(
    model: nn.Module,
    optimizer: Optimizer,
    alpha: float,
    head: nn.Module | str | None = None,
) -> Optimizer:
    r"""Turn a training with PGT into the training with plain cross-entropy that equals it.

    The head of `model` is multiplied by alpha, in place; the optimizer returned has each group of
    `optimizer` split in two. From there, plain cross-entropy gives, step by step, the weights that
    PGT at this constant alpha would have given (the head's times alpha), up to rounding:

    =======================  ===========================  ==========================
    optimizer                backbone                     head
    =======================  ===========================  ==========================
    SGD, momentum, Nesterov  lr / alpha, decay * alpha    lr * alpha, decay / alpha
    Adam                     eps * alpha, decay * alpha   lr * alpha, decay / alpha
    AdamW                    eps * alpha                  lr * alpha, decay / alpha
    =======================  ===========================  ==========================

    It holds for a linear last layer with parameters of its own, one loss term, and a constant
    alpha. Clipping by the global norm breaks it; per-tensor and adaptive clipping keep it with the
    backbone's threshold times alpha. A learning-rate schedule must act on the returned optimizer
    and scale each group, its warm-up start and its floor included. The derivation is in
    `docs/theory.md`.

    Args:
        model: The network; its last layer makes the logits.
        optimizer: Its optimizer: `torch.optim`'s SGD, Adam or AdamW, new or in use. Its state is
            carried over. It must not be used afterwards.
        alpha: The exponent, in (0, 1].
        head: The last layer or its name, where it cannot be found.

    Returns:
        A new optimizer of the same class, with two groups for each group of `optimizer`, the head's
        after the backbone's (one, where a group holds only parameters of one kind).

    Raises:
        ValueError: If the head is not found, not linear, tied or parametrised; if alpha is not in
            (0, 1]; if the optimizer holds parameters that are not the model's.
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
            "Expected `alpha` to be in (0, 1], but got 0: no plain training equals it."
        )
    if type(optimizer) not in _BACKBONE:
        raise TypeError(
            "Expected `optimizer` to be torch.optim.SGD, Adam or AdamW, "
            f"but got {type(optimizer).__name__}."
        )
    own = set(_own_parameters(model, head))
    groups = _split(optimizer, own, set(model.parameters()), alpha)
    with torch.no_grad():
        for parameter in own:
            parameter.mul_(alpha)
    accepted = inspect.signature(type(optimizer)).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    result = type(optimizer)(groups, **defaults)
    for parameter, state in optimizer.state.items():
        powers = {} if parameter in own else _MOMENTS
        result.state[parameter] = _scaled(state, powers, alpha)
    return result


# The power of alpha that multiplies each option, and each moment of the backbone's gradients, which
# are alpha times what they were.
_HEAD = {"lr": 1, "initial_lr": 1, "weight_decay": -1}
_BACKBONE: dict[type[Optimizer], dict[str, int]] = {
    SGD: {"lr": -1, "initial_lr": -1, "weight_decay": 1},
    Adam: {"eps": 1, "weight_decay": 1},
    AdamW: {"eps": 1},
}
_MOMENTS = {"momentum_buffer": 1, "exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2}


def _scaled(options: Mapping[str, Any], powers: Mapping[str, int], alpha: float) -> dict[str, Any]:
    factors = {-1: 1 / alpha, 1: alpha, 2: alpha**2}
    return {
        key: value * factors[powers[key]] if key in powers and value is not None else value
        for key, value in options.items()
    }


def _own_parameters(model: nn.Module, head: nn.Module | str | None) -> list[nn.Parameter]:
    """The head's parameters, if it is a plain linear layer that shares none of them."""
    layer = find_head(model, head)
    if not isinstance(layer, LINEAR_LAYERS):
        raise ValueError(
            "Expected `head` to be a linear layer or a convolution, but got a "
            f"{type(layer).__name__}."
        )
    if parametrize.is_parametrized(layer) or "weight" not in dict(layer.named_parameters()):
        raise ValueError("Expected `head` to hold its weight itself, but got one parametrised.")
    own = list(layer.parameters())
    for parameter in own:
        names = [n for n, p in model.named_parameters(remove_duplicate=False) if p is parameter]
        if len(names) > 1:
            raise ValueError(
                "Expected `head` to have parameters of its own, but got one shared by "
                f"{' and '.join(names)}: a tied head has no equal plain training."
            )
    return own


def _split(
    optimizer: Optimizer, own: set[nn.Parameter], known: set[nn.Parameter], alpha: float
) -> list[dict[str, Any]]:
    """The groups of the new optimizer."""
    groups = []
    for group in optimizer.param_groups:
        foreign = [p for p in group["params"] if p not in known]
        if foreign:
            raise ValueError(
                "Expected `optimizer` to hold parameters of `model` only, but got one of shape "
                f"{tuple(foreign[0].shape)} that is not."
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
