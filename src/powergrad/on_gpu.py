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

__all__ = ["cross_entropy", "losses_of", "reduced", "usable"]


def usable(logits: Tensor, call: Call, stats: bool = False) -> bool:
    """Whether the kernels compute the loss of rows (N, C); checks them at their first use."""
    flags = _flags(call)
    rows = logits.dim() == 2 and logits.shape[1] > 0
    target = call.target.dtype
    return (
        rows
        and (target == torch.int64 or call.target.is_floating_point())
        and gpu.usable(logits.device, logits.dtype, target, logits.shape[1], *flags, stats)
    )


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


def cross_entropy(logits: Tensor, call: Call) -> Tensor:
    """The loss of logits (N, C), checked; of shape (N) for "none"."""
    losses, divisor, _ = losses_of(logits, call)
    return reduced(losses, call, divisor)


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
    number, alphas = call.alpha, None
    if isinstance(number, Tensor):
        number, alphas = 1.0, number.to(logits.device, torch.float32).reshape(-1)
    losses, _, found = torch.ops.powergrad.row_losses(
        logits,
        call.target,
        None if call.weight is None else call.weight.contiguous(),
        alphas,
        None if call.token_weight is None else call.token_weight.reshape(-1),
        z_factor,
        number,
        call.ignore_index,
        call.label_smoothing,
        call.softcap,
        call.logit_scale,
        call.z_loss,
        stats,
    )
    if not stats:
        return losses, divisor, {}
    names = ("lse", "loss", "p_target", "entropy", "prediction")
    statistics = dict(zip(names, found.unbind(), strict=True))
    return losses, divisor, {**statistics, "prediction": statistics["prediction"].long()}
