r"""The operators ``torch.ops.powergrad.*``, registered with ``torch.library``.

An operator is one node of a traced graph with a backward pass of its own, so exporting or compiling
the graph cannot replace it by the ordinary one. `powergrad.transform` calls the first under export,
`powergrad.loss` the second where a compiled graph is to use the C kernel, and the last two, the
Triton kernels, for CUDA and ROCm tensors; with ``POWERGRAD_TRITON=interpret``, for CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from powergrad.checks import Call
from powergrad.kernels import gpu
from powergrad.loss import Rows, loss_by_definition
from powergrad.rows import loss_and_gradient
from powergrad.transform import LogSoftmax, tell

__all__: list[str] = []

_LIBRARY = torch.library.Library("powergrad", "DEF")


def _define(
    schema: str,
    kernel: Callable[..., Any],
    backward: Any = None,
    setup_context: Any = None,
    fake: Any = None,
    on: Sequence[str] = ("CompositeExplicitAutograd",),
) -> None:
    """Register an operator; without `fake`, its `kernel` uses only what supports fake tensors."""
    name = f"powergrad::{schema.split('(')[0]}"
    _LIBRARY.define(schema, tags=[torch.Tag.pt2_compliant_tag])
    torch.library.impl(name, on, kernel, lib=_LIBRARY)
    if fake is not None:
        torch.library.register_fake(name, fake, lib=_LIBRARY)
    if backward is not None:
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
    ctx.save_for_backward(output[1].detach(), logits, *tensors)


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    return Rows.backward(ctx, *grads, owned=False)[0], *[None] * 6


_define(
    "cross_entropy(Tensor input, Tensor target, Tensor? weight, Tensor alpha, int ignore_index,"
    " float label_smoothing, str reduction) -> (Tensor, Tensor)",
    _cross_entropy,
    _backward,
    _setup_context,
    _fake,
)


# The Triton kernels ------------------------------------------------------------------------------


def _save_rows(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:6], output[1])
    ctx.options = gpu.Options(*inputs[6:-1])
    ctx.mark_non_differentiable(*output[1:])


def _row_losses_grad(ctx: Any, up: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    logits, *tensors, z_factor, kept = ctx.saved_tensors
    if not torch.is_grad_enabled():
        grad = torch.ops.powergrad.row_gradients(logits, *tensors, kept, up, *ctx.options)
        return grad, *[None] * 12
    (target, weight, alphas, g), options = tensors, ctx.options._asdict()
    options["alpha"] = options["alpha"] if alphas is None else alphas
    options["z_loss"] *= 1 if z_factor is None else z_factor
    g = None if g is None else g.expand(logits.shape[:1])
    call = Call(target, weight, **options, reduction="none", token_weight=g)
    losses = loss_by_definition(logits, call)
    return torch.autograd.grad(losses, logits, up, create_graph=True)[0], *[None] * 12


_ROWS = "(Tensor logits, Tensor target, Tensor? weight, Tensor? alphas, Tensor? g"
_NUMBERS = (
    "float alpha, int ignore_index, float label_smoothing, float? softcap, float logit_scale,"
    " float z_loss"
)
_ON = ("CUDA", "CPU") if gpu.setting() == "interpret" else ("CUDA",)
_define(
    f"row_losses{_ROWS}, Tensor? z_factor, {_NUMBERS}, bool stats) -> (Tensor, Tensor, Tensor)",
    lambda z, *a: gpu.row_losses(z, gpu.Tensors(*a[:4]), a[4], gpu.Options(*a[5:-1]), a[-1]),
    _row_losses_grad,
    _save_rows,
    lambda logits, *arguments: gpu.results_for(logits, arguments[-1]),
    on=_ON,
)
_define(
    f"row_gradients{_ROWS}, Tensor kept, Tensor up, {_NUMBERS}) -> Tensor",
    lambda z, *a: gpu.row_gradients(z, gpu.Tensors(*a[:4]), a[4], a[5], gpu.Options(*a[6:])),
    fake=lambda logits, *arguments: logits.new_empty(logits.shape),
    on=_ON,
)
