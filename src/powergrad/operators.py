r"""The operators ``torch.ops.powergrad.*``, registered with ``torch.library``.

An operator is one node of a traced graph with a backward pass of its own, so exporting or compiling
the graph cannot replace it by the ordinary one. `powergrad.transform` calls the first under export,
`powergrad.loss` the second where a compiled graph is to use the C kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from powergrad.checks import Call
from powergrad.loss import Rows
from powergrad.rows import loss_and_gradient
from powergrad.transform import LogSoftmax, tell

__all__: list[str] = []

_LIBRARY = torch.library.Library("powergrad", "DEF")


def _define(schema: str, kernel: Callable[..., Any], backward: Any, setup_context: Any) -> None:
    """Register an operator; its `kernel` may use only operations that support fake tensors."""
    name = f"powergrad::{schema.split('(')[0]}"
    _LIBRARY.define(schema, tags=[torch.Tag.pt2_compliant_tag])
    torch.library.impl(name, "CompositeExplicitAutograd", kernel, lib=_LIBRARY)
    torch.library.register_autograd(name, backward, setup_context=setup_context, lib=_LIBRARY)


_define(
    "log_softmax(Tensor input, Tensor alpha, int dim, ScalarType? dtype) -> Tensor",
    LogSoftmax.forward,
    LogSoftmax.backward,
    LogSoftmax.setup_context,
)


# The fused loss ----------------------------------------------------------------------------------


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    alpha: Tensor,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    """The loss of rows of logits, and its gradient at the logits."""
    number = alpha.item() if alpha.numel() == 1 and alpha.is_cpu else alpha
    call = Call(target, weight, number, ignore_index, label_smoothing, reduction)
    tell("torch.ops.powergrad.cross_entropy", input, number)
    return loss_and_gradient(input, call)


def _fake(input: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(input.dtype, torch.float32)
    value = input.new_empty(input.shape[:1] if arguments[-1] == "none" else (), dtype=wide)
    dtype = torch.float32 if input.dtype == torch.float16 else input.dtype
    return value, input.new_empty(input.shape, dtype=dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target, weight, alpha, *options = inputs
    alpha = alpha.reshape(-1) if alpha.dim() else alpha
    tensors, ctx.options = Call(target, weight, alpha, *options).split()
    ctx.save_for_backward(output[1].detach(), logits, None, *tensors)


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    return Rows.backward(ctx, *grads)[0], *[None] * 6


_define(
    "cross_entropy(Tensor input, Tensor target, Tensor? weight, Tensor alpha, int ignore_index,"
    " float label_smoothing, str reduction) -> (Tensor, Tensor)",
    _cross_entropy,
    _backward,
    _setup_context,
)
torch.library.register_fake("powergrad::cross_entropy", _fake, lib=_LIBRARY)
