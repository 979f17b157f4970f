r"""Loss and gradient of each row of logits in one pass and one buffer, in eager PyTorch.

`powergrad.loss` and `powergrad.linear` share this module. From logits (N, C) it computes the losses
(N) and, in one buffer, the gradients ``m p' - w q`` with ``m = sum(w q)``:

    log p                    gives the loss
    e = p^alpha              as 2^(alpha log2 p): faster than softmax, and as accurate
    e - onehot sum(e)        (p' - onehot) * sum(e)

No power overflows, since p is at most 1, and sum(e) is between 1 and C. The division by sum(e) is
left to the backward pass, which multiplies each row by a factor anyway. With label smoothing the
division happens here, together with the 1/N of a mean. Then ``loss.backward()``, which passes in 1,
has nothing left to do. The buffer has the range of float32, also for float16 logits, so that
neither 1/N nor a loss scale can make it underflow.
"""

from __future__ import annotations

import math
from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor

from powergrad._check import Arguments, without_autocast
from powergrad._compat import unaltered_log_softmax

# Tensors of at least `LARGE` elements are processed in blocks of `BLOCK` elements, which stay in
# the cache from the first operation to the last. For smaller tensors, splitting does not pay off.
BLOCK = 1 << 19
LARGE = 1 << 21

LOG2_E = math.log2(math.e)
NEVER = -(1 << 62)  # an `ignore_index` that no label has


def loss_and_gradient(
    logits: Tensor, arguments: Arguments, *, out: Tensor | None = None, all_valid: bool = False
) -> tuple[Tensor, Tensor, Tensor | None, float | Tensor | None]:
    """The loss of logits (N, C) for class indices (N) or probabilities (N, C), and its gradient.

    A tensor alpha has 1 or N elements. `out` is the buffer to use, which may be `logits` itself; it
    is then divided by sum(e). `all_valid` states that every label is a class and none is
    `ignore_index`. If that is wrong, an IndexError is raised on CPU (without label smoothing).

    Returns:
        The reduced loss, the buffer, factors and divisors: the gradient of row i is
        ``factor[i] / divisor[i] * buffer[i]``. Factors and divisors are (N, 1), one number, or None
        for 1.
    """
    target, weight, alpha, ignore_index, label_smoothing, reduction = arguments
    if isinstance(alpha, Tensor):
        arguments = arguments._replace(alpha=_column(alpha, logits))
    if target.is_floating_point() or (all_valid and weight is None):
        count = max(1, logits.shape[0]) if reduction == "mean" else 1
        loss, buffer, divisor = _compute(logits, arguments, out, count)
        return loss, buffer, None, divisor

    kept = None if all_valid else target != ignore_index
    labels = target if kept is None else target.where(kept, 0)
    weight = None if weight is None else weight.to(_wide(logits))
    arguments = arguments._replace(target=labels, weight=weight, reduction="none")
    losses, buffer, divisor = _compute(logits, arguments, out, 1)
    rows = factor = torch.ones_like(losses) if kept is None else kept.to(losses.dtype)
    counted = rows if weight is None else rows * weight[labels]
    if label_smoothing == 0:  # otherwise the weights are in the buffer and the losses
        factor = counted
    if kept is not None:  # if class 0 is masked, the loss of an ignored row is infinite here
        losses = losses.masked_fill(~kept, 0)
    loss, mass = losses * factor, counted.sum()
    if reduction != "none":
        loss = loss.sum()
    if reduction == "mean":
        of_value, of_gradient = _divisors(mass, rows)
        loss = loss / of_value
        divisor = of_gradient if divisor is None else divisor * of_gradient
    return loss, buffer, factor.unsqueeze(1), divisor


def _column(alpha: Tensor, logits: Tensor) -> Tensor:
    """One alpha per row, not rounded to the dtype of log p before it is multiplied by log2(e)."""
    exact = alpha.to(logits.device, torch.promote_types(alpha.dtype, _wide(logits)))
    return exact.reshape(-1, 1).expand(logits.shape[0], 1)


# The loss, the buffer, and the divisors of its rows (None for 1).
Result = tuple[Tensor, Tensor, "Tensor | None"]


def _compute(logits: Tensor, arguments: Arguments, out: Tensor | None, count: int) -> Result:
    """All rows, in blocks if there are many; the gradients are also divided by `count`."""
    target, alpha = arguments.target, arguments.alpha
    if target.is_floating_point():
        compute = _of_probabilities
    else:
        compute = _of_labels if arguments.label_smoothing == 0 else _of_smoothed_labels
    n, c = logits.shape
    if out is None and n * c < LARGE:
        return compute(_log_p(logits, None), arguments, count)
    # float16 cannot represent a p' of 1e-8, so its buffer is wider; bfloat16 has float32's range.
    dtype = torch.float32 if logits.dtype == torch.float16 else logits.dtype
    buffer = logits.new_empty(n, c, dtype=dtype) if out is None else out
    divide = out is not None or dtype == torch.bfloat16
    narrow = logits.dtype.itemsize < 4  # a block is then copied to a wider dtype
    rows = max(1, (BLOCK // 2 if narrow else BLOCK) // c)
    alphas = alpha.split(rows) if isinstance(alpha, Tensor) else repeat(alpha)
    losses: list[Tensor] = []
    divisors: list[Tensor] = []
    tensors = (t.split(rows) for t in (logits, target, buffer))
    for z, y, block, a in zip(*tensors, alphas, strict=False):
        part = arguments._replace(target=y, alpha=a, reduction="none")
        values, grad, sums = compute(_log_p(z, block), part, count)
        losses.append(values)
        if sums is not None and divide:
            grad.mul_(sums.reciprocal_())  # takes half the time of div_
        elif sums is not None:
            divisors.append(sums)
        if grad is not block:
            block.copy_(grad)
    loss = reduced(torch.cat(losses), arguments.reduction)
    return loss, buffer, torch.cat(divisors) if divisors else None


def divisors_of_mean(
    arguments: Arguments, all_valid: bool
) -> tuple[float | Tensor, float | Tensor]:
    """The divisors of a mean: of the sum of the losses, and of their gradient."""
    target, weight = arguments.target, arguments.weight
    if target.is_floating_point() or (all_valid and weight is None):
        return target.shape[0] or math.nan, target.shape[0] or 1
    kept = target != arguments.ignore_index
    if weight is None:
        return _divisors(kept.sum(), kept)
    return _divisors((weight.to(_wide(weight))[target.where(kept, 0)] * kept).sum(), kept)


def _divisors(mass: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Both are NaN if all counted rows have weight 0; with no counted rows, gradients are 0."""
    of_value = torch.where(mass != 0, mass, math.nan)
    return of_value, torch.where(kept.any(), of_value, 1)


def reduced(losses: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    return losses.mean() if reduction == "mean" else losses.sum()


# One block: log p (N, C) becomes the gradient, in place.


def _of_labels(log_p: Tensor, arguments: Arguments, count: int) -> Result:
    """Without label smoothing; the caller applies class weights as factors of the rows."""
    y, label = arguments.target, arguments.target.unsqueeze(1)
    loss = F.nll_loss(log_p, y, ignore_index=NEVER, reduction=arguments.reduction)
    e, own, others = _powers(log_p, label, arguments.alpha)
    divisor = own.add_(others)
    if count > 1:  # twice as fast as mul_, which would convert the number to a tensor
        divisor.add_(divisor, alpha=count - 1)
    # At the label, p' - 1 is computed as minus the sum of the others, because p' may round to 1.
    return loss, e.scatter_(1, label, -others), divisor


def _of_smoothed_labels(log_p: Tensor, arguments: Arguments, count: int) -> Result:
    label, weight = arguments.target.unsqueeze(1), arguments.weight
    classes, label_smoothing = log_p.shape[1], arguments.label_smoothing
    share = label_smoothing / classes
    if weight is None:
        w, own_w, total, log_p_sum = 1.0, 1.0, classes, log_p.sum(1)
    else:
        w, own_w, total = weight, weight[label], weight.sum()
        with without_autocast(log_p):
            log_p_sum = log_p @ weight
    of_label = own_w * (1 - label_smoothing)
    losses = log_p_sum.mul_(-share).sub_((log_p.gather(1, label) * of_label).squeeze(1))
    e, own, others = _powers(log_p, label, arguments.alpha)
    sums = own + others
    share, of_label = share / count, of_label / count
    scale = (of_label + share * total) / sums
    # At the label, m p' - w_y q_y is computed from the sum of the others if p' is nearly 1.
    direct = scale * own - (of_label + share * own_w)
    by_others = share * (total - own_w) - scale * others
    grad = e.mul_(scale).sub_(share * w)
    grad.scatter_(1, label, torch.where(own < others, direct, by_others))
    return reduced(losses, arguments.reduction), grad, None


def _of_probabilities(log_p: Tensor, arguments: Arguments, count: int) -> Result:
    q, weight, alpha, _, label_smoothing, reduction = arguments
    q = q.to(log_p.dtype)
    if label_smoothing > 0:
        q = q * (1 - label_smoothing) + label_smoothing / log_p.shape[1]
    if weight is not None:
        q = q * weight.to(q.dtype)
    losses = (log_p * q).sum(1).neg_()
    e = _power(log_p, alpha)
    share = 1 / count
    e.mul_(q.sum(1, keepdim=True).mul_(share) / e.sum(1, keepdim=True))
    grad = e.sub_(q, alpha=share)
    return reduced(losses, reduction), grad, None


def _powers(log_p: Tensor, label: Tensor, alpha: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Overwrite log p with ``p^alpha`` and 0 at the label; also return its label value and sum."""
    e = _power(log_p, alpha)
    own = e.gather(1, label)
    return e.scatter_(1, label, 0.0), own, e.sum(1, keepdim=True)


def _power(log_p: Tensor, alpha: float | Tensor) -> Tensor:
    """Overwrite log p with ``p^alpha = 2^(alpha log2(e) log p)``."""
    exponent = alpha * LOG2_E
    if isinstance(exponent, Tensor) or exponent == 0:  # a masked class stays masked at alpha 0
        masked = log_p == -torch.inf
        log_p.mul_(exponent).masked_fill_(masked, -torch.inf)
    else:
        F.leaky_relu_(log_p, exponent)  # multiplies, since log p <= 0; faster than mul_ by a number
    return log_p.exp2_()


def _log_p(z: Tensor, out: Tensor | None) -> Tensor:
    """The log-probabilities in float32 or wider; written to `out` if its dtype matches."""
    if z.dtype.itemsize < 4:
        return unaltered_log_softmax(z.float(), 1, False)
    if out is None:
        return unaltered_log_softmax(z, 1, False)
    return torch.log_softmax(z, 1, out=out)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
