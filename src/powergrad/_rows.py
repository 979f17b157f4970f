r"""One visit to each row of logits: its loss, and its gradient in one buffer.

`powergrad.loss` and `powergrad.linear` share this. From logits (N, C) it makes the losses (N) and
the gradients ``m p' - w q`` with ``m = sum(w q)``, in place:

    log p            the value is taken here
    alpha log p      log p' up to a constant
    p'               by softmax
    p' - q

Nothing is scaled yet. 1/N, a loss scale and the incoming gradient meet this buffer in the backward
pass, so that none of them can push it below the smallest number.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from powergrad._check import check_labels

# So many elements stay in a core's cache from the first operation on them to the last.
BLOCK = 1 << 18


class Rows(NamedTuple):
    """The gradient of row i is ``factor[i] * buffer[i]``; a mean is divided by ``mass``."""

    losses: Tensor
    factor: Tensor | None
    mass: float | Tensor


def buffer_dtype(dtype: torch.dtype) -> torch.dtype:
    """Float16 would lose a p' of 1e-8, so its buffer is wider; bfloat16 has float32's range."""
    return torch.float32 if dtype == torch.float16 else dtype


def loss_and_gradient(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    alpha: float | Tensor,
    ignore_index: int,
    label_smoothing: float,
    buffer: Tensor,
) -> Rows:
    """Fill `buffer` (N, C), which may be `logits` itself.

    `alpha` is a number, or a tensor of one or of N.
    """
    n, c = logits.shape
    wide = torch.promote_types(logits.dtype, torch.float32)
    losses = logits.new_empty((n, 1), dtype=wide)
    weight = None if weight is None else weight.to(wide)
    rows = max(1, BLOCK // c)
    alphas = itertools.repeat(alpha)
    if isinstance(alpha, Tensor):
        alphas = alpha.to(logits.device).reshape(-1, 1).expand(n, 1).split(rows)
    blocks = zip(logits.split(rows), buffer.split(rows), losses.split(rows), alphas, strict=False)
    if target.is_floating_point():
        for (z, out, loss, a), q in zip(blocks, target.split(rows), strict=True):
            _of_probabilities(z, out, loss, q.to(wide), weight, a, label_smoothing)
        return Rows(losses.squeeze(1), None, n)

    all_count = check_labels(target, c, ignore_index)
    kept = None if all_count else target != ignore_index
    labels = (target if kept is None else target.where(kept, 0)).long().unsqueeze(1)
    for (z, out, loss, a), y in zip(blocks, labels.split(rows), strict=True):
        _of_labels(z, out, loss, y, weight, a, label_smoothing)
    losses = losses.squeeze(1)
    if weight is None and kept is None:
        return Rows(losses, None, n)
    factor = torch.ones_like(losses) if kept is None else kept.to(wide)
    counted = factor if weight is None else factor * weight[labels.squeeze(1)]
    if label_smoothing == 0:  # else the weights are in the buffer and the losses
        factor = counted
    return Rows(losses * factor, factor, counted.sum())


def _of_labels(
    z: Tensor,
    out: Tensor,
    losses: Tensor,
    y: Tensor,
    weight: Tensor | None,
    alpha: float | Tensor,
    label_smoothing: float,
) -> None:
    log_p = _log_p(z, out)
    torch.gather(log_p, 1, y, out=losses).neg_()
    if label_smoothing == 0:
        grad = _minus_label(log_p, y, alpha)
    else:  # m p' - w q = m (p' - onehot) + (m - (1 - eps) w_y) onehot - eps/C w
        share = label_smoothing / z.shape[1]
        w = losses.new_ones(z.shape[1]) if weight is None else weight
        of_label, of_all = w[y] * (1 - label_smoothing), share * w.sum()
        losses.mul_(of_label).sub_((log_p @ w).unsqueeze(1), alpha=share)
        grad = _minus_label(log_p, y, alpha).mul_(of_label + of_all).sub_(share * w)
        grad.scatter_add_(1, y, of_all.expand_as(y))
    if grad is not out:
        out.copy_(grad)


def _minus_label(log_p: Tensor, y: Tensor, alpha: float | Tensor) -> Tensor:
    """``p' - onehot`` in place. At the label it is minus the sum of the others.

    There, p' may round to 1, and nothing would be left of the difference.
    """
    p = _flatten(log_p, alpha)
    p.scatter_(1, y, 0.0)
    return p.scatter_(1, y, p.sum(1, keepdim=True).neg_())


def _of_probabilities(
    z: Tensor,
    out: Tensor,
    losses: Tensor,
    q: Tensor,
    weight: Tensor | None,
    alpha: float | Tensor,
    label_smoothing: float,
) -> None:
    if label_smoothing > 0:
        q = q * (1 - label_smoothing) + label_smoothing / z.shape[1]
    if weight is not None:
        q = q * weight
    log_p = _log_p(z, out)
    torch.sum(log_p * q, 1, keepdim=True, out=losses).neg_()
    grad = _flatten(log_p, alpha).mul_(q.sum(1, keepdim=True)).sub_(q)
    if grad is not out:
        out.copy_(grad)


def _flatten(log_p: Tensor, alpha: float | Tensor) -> Tensor:
    """``p'`` in place of log p."""
    if isinstance(alpha, Tensor) or alpha == 0:  # a masked class stays masked at alpha 0
        masked = log_p == -torch.inf
        log_p.mul_(alpha).masked_fill_(masked, -torch.inf)
    else:
        log_p.mul_(alpha)
    return torch.softmax(log_p, 1, out=log_p)


def _log_p(z: Tensor, out: Tensor) -> Tensor:
    """The log-probabilities, in `out` if that is wide enough, else in a block of their own."""
    wide = torch.promote_types(z.dtype, torch.float32)
    if out.dtype != wide:
        return torch.ops.aten.log_softmax.int(z, 1, wide)
    if z.dtype != wide:
        return out.copy_(z).copy_(torch.ops.aten.log_softmax.int(out, 1))
    return torch.log_softmax(z, 1, out=out)
