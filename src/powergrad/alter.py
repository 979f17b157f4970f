"""Alter a gradient anywhere in the graph: identity in the forward pass, any function backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from powergrad.checks import check_floating, shape_of
from powergrad.compat import graph_recorded, in_transform, is_exporting

__all__ = ["alter_gradient"]


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
    if not callable(fn):
        raise TypeError(f"Expected `fn` to be callable, but got {type(fn).__name__}.")
    compiling = torch.compiler.is_compiling()
    if (in_transform() or is_exporting() is not False) if compiling else graph_recorded():
        raise RuntimeError(
            "Expected `fn` to become part of the backward pass, but got a call traced by "
            "`torch.export`, `make_fx`, or `torch.compile` of a `torch.func` transform; use "
            "`torch.compile` and `torch.func` one without the other."
        )
    return _Alter.apply(tensor, fn)


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
