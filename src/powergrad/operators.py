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
from powergrad.loss import loss_by_definition
from powergrad.rows import loss_and_gradient
from powergrad.transform import (
    altered_backward,
    plain_log_softmax,
    scores_to_save,
    tell,
)

__all__: list[str] = []

_LIBRARY = torch.library.Library("powergrad", "DEF")


def _define(schema: str, kernel: Callable[..., Any], backward: Any, setup_context: Any) -> None:
    """Register an operator; its `kernel` may use only operations that support fake tensors."""
    name = f"powergrad::{schema.split('(')[0]}"
    _LIBRARY.define(schema, tags=[torch.Tag.pt2_compliant_tag])
    torch.library.impl(name, "CompositeExplicitAutograd", kernel, lib=_LIBRARY)
    torch.library.register_autograd(name, backward, setup_context=setup_context, lib=_LIBRARY)


# The primitive -----------------------------------------------------------------------------------


def _log_softmax(input: Tensor, alpha: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
    return plain_log_softmax(input, dim, dtype)


def _log_softmax_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logits, alpha, ctx.dim, _ = inputs
    ctx.input_dtype = logits.dtype
    ctx.save_for_backward(scores_to_save(logits, output), alpha)


def _log_softmax_grad(ctx: Any, u: Tensor) -> tuple[Tensor | None, ...]:
    scores, alpha = ctx.saved_tensors
    return altered_backward(u, scores, alpha, ctx.dim, ctx.input_dtype), None, None, None


_define(
    "log_softmax(Tensor input, Tensor alpha, int dim, ScalarType? dtype) -> Tensor",
    _log_softmax,
    _log_softmax_grad,
    _log_softmax_setup,
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


def _cross_entropy_fake(input: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(input.dtype, torch.float32)
    value = input.new_empty(input.shape[:1] if arguments[-1] == "none" else (), dtype=wide)
    dtype = torch.float32 if input.dtype == torch.float16 else input.dtype
    return value, input.new_empty(input.shape, dtype=dtype)


def _cross_entropy_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], *inputs[:4])
    ctx.options = inputs[4:]


def _cross_entropy_grad(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    gradient, logits, target, weight, alpha = ctx.saved_tensors
    if torch.is_grad_enabled():  # the gradient is itself differentiated
        per_row = alpha.reshape(-1) if alpha.dim() else alpha
        loss = loss_by_definition(logits, Call(target, weight, per_row, *ctx.options))
        (result,) = torch.autograd.grad(loss, logits, grad.to(loss.dtype), create_graph=True)
    else:
        result = gradient * (grad.unsqueeze(1) if grad.dim() else grad)
    return result.to(logits.dtype), *[None] * 6


_define(
    "cross_entropy(Tensor input, Tensor target, Tensor? weight, Tensor alpha, int ignore_index,"
    " float label_smoothing, str reduction) -> (Tensor, Tensor)",
    _cross_entropy,
    _cross_entropy_grad,
    _cross_entropy_setup,
)
torch.library.register_fake("powergrad::cross_entropy", _cross_entropy_fake, lib=_LIBRARY)
