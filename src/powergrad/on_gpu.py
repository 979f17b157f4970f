"""The loss of rows of logits on a GPU: two operators, and the coefficients between them.

``torch.ops.powergrad.row_losses`` reads the logits in the forward pass; ``row_gradients`` reads
them again in the backward pass and writes the gradient, times the incoming one. Reductions and
gates are ordinary operations on vectors of one number per row, differentiated by autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor

from powergrad.checks import Call
from powergrad.kernels import gpu

__all__ = ["losses_of", "reduced", "serves", "usable"]


def serves(device: torch.device) -> bool:
    """Whether there are kernels for tensors on this device."""
    return gpu.runs_on(device)


serves._dynamo_marked_constant = True  # pyright: ignore  # see powergrad.compat


def usable(input: Tensor, call: Call, stats: bool = False) -> bool:
    """Whether the kernels compute the loss of `input`; at their first use, they are checked."""
    target = call.target.dtype
    if not serves(input.device) or not (target == torch.int64 or call.soft()):
        return False
    # A traced number of classes may be symbolic; it is only that of the check.
    classes = 1000 if torch.compiler.is_compiling() else input.shape[min(1, input.dim() - 1)]
    return gpu.usable(input.device, input.dtype, target, classes, *_flags(call), stats)


def _flags(call: Call) -> tuple[bool, ...]:
    """All of `gpu.FLAGS` but the last."""
    soft = call.target.is_floating_point()
    by_weight = call.weight is not None and call.reduction == "mean" and not soft
    return (
        call.weight is not None,
        isinstance(call.alpha, Tensor),
        call.token_weight is not None,
        by_weight and call.z_loss != 0,
        call.label_smoothing > 0,
        call.softcap is not None,
    )


def reduced(losses: Tensor, call: Call, divisor: Tensor | float) -> Tensor:
    """The value. The mean of no rows is 0 / 0, NaN as in PyTorch, unless the call says 0."""
    if call.reduction == "none":
        return losses
    return losses.sum() / divisor if call.reduction == "mean" else losses.sum()


def losses_of(
    logits: Tensor, call: Call, stats: bool = False
) -> tuple[Tensor, Tensor | float, dict[str, Tensor]]:
    """The losses (N) of logits (N, C), the divisor of their mean, and statistics of the rows.

    Statistics are those of :class:`powergrad.rows.RowStatistics`, without gradient; of ignored
    rows, which are not read, they are 0. With class weights, a mean divides the z-loss by the
    number of counted rows.
    """
    soft = call.target.is_floating_point()
    divisor: Tensor | float = float(logits.shape[0])
    z_factor = None
    if call.reduction == "mean" and not soft:
        kept = call.target != call.ignore_index
        divisor = count = kept.sum()
        if call.weight is not None:
            own = call.weight.float()[call.target.where(kept, 0)]
            divisor = (own * kept).sum()
            z_factor = divisor / count if call.z_loss else None
        if call.zero_empty:
            divisor = torch.where(count == 0, 1, divisor)
    elif call.reduction == "mean" and not logits.shape[0]:
        divisor = 1.0 if call.zero_empty else torch.nan
    tensors, options = _arguments(logits, call, call.token_weight)
    losses, _, found = torch.ops.powergrad.row_losses(logits, *tensors, z_factor, *options, stats)
    if not stats:
        return losses, divisor, {}
    names = ("lse", "loss", "p_target", "entropy", "prediction")
    statistics = dict(zip(names, found.unbind(), strict=True))
    return losses, divisor, {**statistics, "prediction": statistics["prediction"].long()}


def losses_and_gradient(
    logits: Tensor, call: Call, g: Tensor, out: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Both at once for a block of rows with weights g, written to `out`, perhaps the logits.

    None if the kernels are not usable. The z-loss of the call may be a tensor.
    """
    z_factor = call.z_loss if isinstance(call.z_loss, Tensor) else None
    if z_factor is not None:
        call = call.replace(z_loss=1.0)
    flags = (*_flags(call)[:2], True, z_factor is not None, *_flags(call)[4:], False)
    shape = (logits.device, logits.dtype, call.target.dtype, logits.shape[1])
    if not gpu.usable(*shape, *flags):
        return None
    tensors, options = _arguments(logits, call, g)
    losses, kept, _ = gpu.row_losses(logits, *tensors, z_factor, *options)
    one = losses.new_ones(1).expand(losses.shape)
    return losses, gpu.row_gradients(logits, *tensors, kept, one, *options, out=out)


def _arguments(
    logits: Tensor, call: Call, g: Tensor | None
) -> tuple[tuple[Tensor, Tensor | None, Tensor | None, Tensor | None], gpu.Options]:
    """Target, class weights, alphas, row weights, and the numbers, as the operators take them."""
    alpha, alphas = call.alpha, None
    if isinstance(alpha, Tensor):
        alpha, alphas = 1.0, alpha.to(logits.device, torch.float32).reshape(-1)
    weight = None if call.weight is None else call.weight.contiguous()
    g = None if g is None else g.reshape(-1)
    options = gpu.Options(
        alpha,
        call.ignore_index,
        call.label_smoothing,
        call.softcap,
        call.logit_scale,
        call.z_loss,
    )
    return (call.target, weight, alphas, g), options
