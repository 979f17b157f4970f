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
import torch.nn.functional as F
from torch import Tensor

# A large tensor is worked on in blocks, of which so many elements stay in a core's cache from the
# first operation to the last. Below `LARGE` that saves less than the splitting costs.
BLOCK = 1 << 18
LARGE = 1 << 21


class Rows(NamedTuple):
    """The gradient of row i is ``factor[i] * buffer[i]``; a mean is divided by ``mass``."""

    losses: Tensor
    buffer: Tensor
    factor: Tensor | None
    mass: float | Tensor


def loss_and_gradient(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    alpha: float | Tensor,
    ignore_index: int,
    label_smoothing: float,
    *,
    out: Tensor | None = None,
    all_count: bool = False,
) -> Rows:
    """Losses and gradients of logits (N, C), for class indices (N) or probabilities (N, C).

    `alpha` is a number, or a tensor of one or of N. `out` is the buffer to use, and may be `logits`
    itself. `all_count` says that every label is a class and none is `ignore_index`.
    """
    n = logits.shape[0]
    wide = torch.promote_types(logits.dtype, torch.float32)
    weight = None if weight is None else weight.to(wide)
    if isinstance(alpha, Tensor):
        alpha = alpha.to(logits.device).reshape(-1, 1).expand(n, 1)
    if target.is_floating_point():
        losses, buffer = _in_blocks(logits, target, weight, alpha, label_smoothing, out)
        return Rows(losses, buffer, None, n)

    kept = None if all_count else target != ignore_index
    labels = target.long() if kept is None else target.long().where(kept, 0)
    losses, buffer = _in_blocks(logits, labels, weight, alpha, label_smoothing, out)
    if weight is None and kept is None:
        return Rows(losses, buffer, None, n)
    factor = torch.ones_like(losses) if kept is None else kept.to(wide)
    counted = factor if weight is None else factor * weight[labels]
    if label_smoothing == 0:  # else the weights are in the buffer and the losses
        factor = counted
    return Rows(losses * factor, buffer, factor, counted.sum())


def _in_blocks(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    alpha: float | Tensor,
    label_smoothing: float,
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    work = _of_probabilities if target.is_floating_point() else _of_labels
    n, c = logits.shape
    if out is None and n * c < LARGE:
        return work(logits, target, weight, alpha, label_smoothing, None)
    # float16 would lose a p' of 1e-8, so its buffer is wider; bfloat16 has float32's range.
    wide = torch.promote_types(logits.dtype, torch.float32)
    kept_dtype = wide if logits.dtype == torch.float16 else logits.dtype
    buffer = logits.new_empty(n, c, dtype=kept_dtype) if out is None else out
    losses = logits.new_empty(n, dtype=wide)
    rows = max(1, BLOCK // c)
    alphas = alpha.split(rows) if isinstance(alpha, Tensor) else itertools.repeat(alpha)
    tensors = (t.split(rows) for t in (logits, target, losses, buffer))
    for z, y, loss, block, a in zip(*tensors, alphas, strict=False):
        values, grad = work(z, y, weight, a, label_smoothing, block)
        loss.copy_(values)
        if grad is not block:
            block.copy_(grad)
    return losses, buffer


def _of_labels(
    z: Tensor,
    y: Tensor,
    weight: Tensor | None,
    alpha: float | Tensor,
    label_smoothing: float,
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    log_p = _log_p(z, out)
    losses = F.nll_loss(log_p, y, reduction="none")
    label = y.unsqueeze(1)
    if label_smoothing == 0:
        return losses, _minus_label(log_p, label, alpha)
    share = label_smoothing / z.shape[1]
    w = losses.new_ones(z.shape[1]) if weight is None else weight
    total, of_label = w.sum(), w[y] * (1 - label_smoothing)
    losses.mul_(of_label).sub_(log_p @ w, alpha=share)
    mass = (of_label + share * total).unsqueeze(1)
    p = _flatten(log_p, alpha)
    own = p.gather(1, label)
    others = p.scatter_(1, label, 0.0).sum(1, keepdim=True)
    # At the label, m p' - w_y q_y: by the other classes' sum where p' is nearly 1.
    own_weight = w[label]
    direct = mass * own - (of_label.unsqueeze(1) + share * own_weight)
    by_others = share * (total - own_weight) - mass * others
    grad = p.mul_(mass).sub_(share * w)
    return losses, grad.scatter_(1, label, torch.where(own < 0.5, direct, by_others))


def _minus_label(log_p: Tensor, label: Tensor, alpha: float | Tensor) -> Tensor:
    """``p' - onehot`` in place. At the label it is minus the sum of the others.

    There, p' may round to 1, and nothing would be left of the difference.
    """
    p = _flatten(log_p, alpha)
    p.scatter_(1, label, 0.0)
    return p.scatter_(1, label, p.sum(1, keepdim=True).neg_())


def _of_probabilities(
    z: Tensor,
    q: Tensor,
    weight: Tensor | None,
    alpha: float | Tensor,
    label_smoothing: float,
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    log_p = _log_p(z, out)
    q = q.to(log_p.dtype)
    if label_smoothing > 0:
        q = q * (1 - label_smoothing) + label_smoothing / z.shape[1]
    if weight is not None:
        q = q * weight
    losses = (log_p * q).sum(1).neg_()
    return losses, _flatten(log_p, alpha).mul_(q.sum(1, keepdim=True)).sub_(q)


def _flatten(log_p: Tensor, alpha: float | Tensor) -> Tensor:
    """``p'`` in place of log p."""
    if isinstance(alpha, Tensor) or alpha == 0:  # a masked class stays masked at alpha 0
        masked = log_p == -torch.inf
        log_p.mul_(alpha).masked_fill_(masked, -torch.inf)
    else:
        log_p.mul_(alpha)
    return torch.softmax(log_p, 1, out=log_p)


def _log_p(z: Tensor, out: Tensor | None) -> Tensor:
    """The log-probabilities in float32 or wider: in `out`, if there is one that suits."""
    wide = torch.promote_types(z.dtype, torch.float32)
    if out is None or z.dtype != wide:
        return torch._log_softmax(z.to(wide), 1, False)  # pyright: ignore
    return torch.log_softmax(z, 1, out=out)
