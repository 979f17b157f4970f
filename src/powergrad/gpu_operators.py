"""The operators ``torch.ops.powergrad.row_losses`` and ``row_gradients``: the Triton kernels.

They are opaque: a traced graph has one node for the losses and one for the gradient. They have an
implementation for CUDA (and ROCm) tensors, and with ``POWERGRAD_TRITON=interpret`` for CPU tensors.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from powergrad.checks import Call
from powergrad.kernels.gpu import Options, row_gradients, row_losses, setting
from powergrad.loss import loss_by_definition

__all__: list[str] = []


def _losses_fake(logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    empty, rows = functools.partial(logits.new_empty, dtype=torch.float32), logits.shape[0]
    return empty(rows), empty(3, rows), empty(5 if arguments[-1] else 0, rows)


def _losses_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:6], output[1])
    ctx.options = Options(*inputs[6:-1])
    ctx.mark_non_differentiable(*output[1:])


def _losses_grad(ctx: Any, up: Tensor, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    logits, target, weight, alphas, g, z_factor, kept = ctx.saved_tensors
    options: Options = ctx.options
    if torch.is_grad_enabled():  # the gradient is itself differentiated
        call = Call(
            target,
            weight,
            options.alpha if alphas is None else alphas,
            ignore_index=options.ignore_index,
            label_smoothing=options.label_smoothing,
            reduction="none",
            softcap=options.softcap,
            logit_scale=options.logit_scale,
            z_loss=options.z_loss if z_factor is None else options.z_loss * z_factor,  # pyright: ignore
            token_weight=None if g is None else g.expand(logits.shape[:1]),
        )
        losses = loss_by_definition(logits, call)
        (grad,) = torch.autograd.grad(losses, logits, up, create_graph=True)
    else:
        grad = torch.ops.powergrad.row_gradients(
            logits, target, weight, alphas, g, kept, up, *options
        )
    return grad, *[None] * 12


def _register() -> torch.library.Library:
    library = torch.library.Library("powergrad", "FRAGMENT")
    rows = "Tensor logits, Tensor target, Tensor? weight, Tensor? alphas, Tensor? g, "
    numbers = (
        "float alpha, int ignore_index, float label_smoothing, float? softcap, "
        "float logit_scale, float z_loss"
    )
    outputs = "(Tensor, Tensor, Tensor)"
    schemas = {
        "row_losses": f"({rows}Tensor? z_factor, {numbers}, bool stats) -> {outputs}",
        "row_gradients": f"({rows}Tensor kept, Tensor up, {numbers}) -> Tensor",
    }

    def losses(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        return row_losses(*arguments[:-1], stats=arguments[-1])

    def gradients_fake(logits: Tensor, *arguments: Any) -> Tensor:
        return logits.new_empty(logits.shape)

    functions = {"row_losses": losses, "row_gradients": row_gradients}
    fakes = {"row_losses": _losses_fake, "row_gradients": gradients_fake}
    for name, schema in schemas.items():
        library.define(name + schema, tags=[torch.Tag.pt2_compliant_tag])
        for key in ("CUDA", "CPU") if setting() == "interpret" else ("CUDA",):
            library.impl(name, functions[name], key)
        torch.library.register_fake(f"powergrad::{name}", fakes[name], lib=library)
    torch.library.register_autograd(
        "powergrad::row_losses", _losses_grad, setup_context=_losses_setup, lib=library
    )
    return library


_LIBRARY = _register()
