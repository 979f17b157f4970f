r"""What PowerGrad Transform is made of: an ordinary training with two parameter groups.

Let the last layer be linear with parameters of its own, ``z = W a + b``, and put ``V = alpha W``,
``c = alpha b``, so that ``u = V a + c = alpha z``. PGT's gradient at the logits is
``softmax(alpha z) - q = softmax(u) - q``: that of plain cross-entropy on ``u``. Hence

    the gradient of W is the plain gradient of V;
    the gradient of every other parameter, W^T(...) = V^T(...) / alpha, is the plain one / alpha;
    a step dW of the head is a step alpha * dW of V.

So one multiplies the head's rate by alpha and the backbone's gradient by 1/alpha. Where the update
is linear in the gradient (SGD) the latter is a rate times 1/alpha; where it is not changed by its
scale (Adam) it is an eps times alpha. Decay that is added to the gradient has to follow it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import SGD, Adam, AdamW, Optimizer

from powergrad._check import check_number
from powergrad._head import LINEAR_LAYERS, find_head

__all__ = ["equivalent_training"]

Group = dict[str, Any]


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

    It holds for a linear last layer with parameters of its own, one loss term, and an alpha that
    stays. Clipping by the global norm breaks it; per-tensor and adaptive clipping keep it with the
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
    rescale = _RESCALE.get(type(optimizer))
    if rescale is None:
        raise TypeError(
            "Expected `optimizer` to be torch.optim.SGD, Adam or AdamW, "
            f"but got {type(optimizer).__name__}."
        )
    own = set(_own_parameters(model, head))
    groups, states = _split(optimizer, own, set(model.parameters()))
    for group, is_head in groups:
        rescale(group, alpha, is_head)
    with torch.no_grad():
        for parameter in own:
            parameter.mul_(alpha)
    accepted = inspect.signature(type(optimizer)).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    result = type(optimizer)([group for group, _ in groups], **defaults)
    for parameter, state in states.items():
        if parameter not in own:
            state = {key: _rescaled_state(key, value, alpha) for key, value in state.items()}
        result.state[parameter] = state
    return result


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
    optimizer: Optimizer, own: set[nn.Parameter], known: Iterable[nn.Parameter]
) -> tuple[list[tuple[Group, bool]], dict[nn.Parameter, dict[str, Any]]]:
    known = set(known)
    groups = []
    states = {}
    for group in optimizer.param_groups:
        foreign = [p for p in group["params"] if p not in known]
        if foreign:
            raise ValueError(
                "Expected `optimizer` to hold parameters of `model` only, but got one of shape "
                f"{tuple(foreign[0].shape)} that is not."
            )
        for is_head in (False, True):
            params = [p for p in group["params"] if (p in own) == is_head]
            if params:
                part = {**group, "params": params}
                if "param_names" in group:
                    named = zip(group["param_names"], group["params"], strict=True)
                    part["param_names"] = [name for name, p in named if (p in own) == is_head]
                groups.append((part, is_head))
                states.update({p: dict(optimizer.state[p]) for p in params if p in optimizer.state})
    return groups, states


def _rescale_sgd(group: Group, alpha: float, is_head: bool) -> None:
    _multiply(group, ("lr", "initial_lr"), alpha if is_head else 1 / alpha)
    _multiply(group, ("weight_decay",), 1 / alpha if is_head else alpha)


def _rescale_adamw(group: Group, alpha: float, is_head: bool) -> None:
    if is_head:
        _multiply(group, ("lr", "initial_lr"), alpha)
        _multiply(group, ("weight_decay",), 1 / alpha)
    else:
        _multiply(group, ("eps",), alpha)


def _rescale_adam(group: Group, alpha: float, is_head: bool) -> None:
    _rescale_adamw(group, alpha, is_head)
    if not is_head and not group.get("decoupled_weight_decay", False):
        _multiply(group, ("weight_decay",), alpha)


_RESCALE: dict[type[Optimizer], Callable[[Group, float, bool], None]] = {
    SGD: _rescale_sgd,
    Adam: _rescale_adam,
    AdamW: _rescale_adamw,
}


def _multiply(group: Group, keys: tuple[str, ...], factor: float) -> None:
    for key in keys:
        if key in group:
            group[key] = group[key] * factor


def _rescaled_state(key: str, value: Any, alpha: float) -> Any:
    """The backbone's moments, of a gradient that is now alpha times what it was."""
    if key in ("momentum_buffer", "exp_avg") and isinstance(value, Tensor):
        return value * alpha
    if key in ("exp_avg_sq", "max_exp_avg_sq"):
        return value * alpha**2
    return value
