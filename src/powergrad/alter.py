"""Alter a gradient anywhere in the graph: identity in the forward pass, any function backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from powergrad.checks import check_floating, shape_of
from powergrad.compat import graph_recorded, in_transform, is_exporting, tree_map

__all__ = ["alter_gradient", "alter_output"]


def alter_gradient(tensor: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    r"""Return `tensor` unchanged, and apply `fn` to its gradient in the backward pass.

    Everything before this point of the graph receives ``fn(grad)`` instead of ``grad``; other uses
    of `tensor` are not affected.

    Args:
        tensor: A floating-point tensor.
        fn: Takes the gradient and returns a tensor of the same shape and dtype. Higher derivatives
            pass through it if its operations are differentiable.

    Returns:
        A view of `tensor`. PyTorch does not allow in-place changes to it; ``clone()`` it first.

    Raises:
        TypeError: If `tensor` is not floating-point, `fn` not callable, or its result not a tensor.
        ValueError: In the backward pass, if `fn` returns another shape or dtype.
        RuntimeError: In a graph that cannot contain `fn`: ``torch.export``, ``make_fx``, and
            ``torch.compile`` of a ``torch.func`` transform.

    Example:
        >>> x = torch.tensor([1.0, -2.0], requires_grad=True)
        >>> y = alter_gradient(x, lambda grad: grad.clamp(-1, 1))
        >>> (5 * y).sum().backward()
        >>> x.grad
        tensor([1., 1.])
    """
    check_floating(tensor, "tensor")
    _check_callable(fn)
    compiling = torch.compiler.is_compiling()
    if (in_transform() or is_exporting() is not False) if compiling else graph_recorded():
        raise RuntimeError(
            "Expected `fn` to become part of the backward pass, but got a call traced by "
            "`torch.export`, `make_fx`, or `torch.compile` of a `torch.func` transform; use "
            "`torch.compile` and `torch.func` one without the other."
        )
    return _Alter.apply(tensor, fn)


def alter_output(model: nn.Module, name: str, fn: Callable[[Tensor], Tensor]) -> RemovableHandle:
    r"""Alter the gradient at the output of the module `name` of a model.

    Args:
        model: The network.
        name: The name of the module, as in ``model.named_modules()``; "" is `model` itself.
        fn: As in :func:`alter_gradient`; applied to every floating-point tensor of the output,
            also in nested tuples, lists and dictionaries.

    Returns:
        A context manager with ``remove()``. Outputs from before its removal stay altered.

    Raises:
        ValueError: If no module has that name.
        TypeError: If `fn` is not callable.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
        >>> with alter_output(model, "1", lambda grad: 0 * grad):
        ...     loss = model(torch.ones(1, 2)).sum()
        >>> loss.backward()
        >>> float(model[0].weight.grad.abs().sum())
        0.0
    """
    _check_callable(fn)
    modules = dict(model.named_modules())
    if name not in modules:
        raise ValueError(f"Expected `name` to be one of {list(modules)}, but got {name!r}.")

    def alter(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return alter_gradient(value, fn).clone()  # an in-place ReLU may follow

    return modules[name].register_forward_hook(lambda _, __, output: tree_map(alter, output))


def _check_callable(fn: Any) -> None:
    if not callable(fn):
        raise TypeError(f"Expected `fn` to be callable, but got {type(fn).__name__}.")


class _Alter(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.fn = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        if not isinstance(altered := ctx.fn(grad), Tensor):
            raise TypeError(f"Expected `fn` to return a tensor, but got {type(altered).__name__}.")
        if altered.shape != grad.shape or altered.dtype != grad.dtype:
            wanted, got = (f"shape {shape_of(x)} and {x.dtype}" for x in (grad, altered))
            raise ValueError(f"Expected `fn` to return {wanted}, but got {got}.")
        return altered, None
