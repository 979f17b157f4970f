r"""One visit to each row of logits: its loss, and its gradient in one buffer.

`powergrad.loss` and `powergrad.linear` share this. From logits (N, C) it makes the losses (N) and
the gradients ``m p' - w q`` with ``m = sum(w q)``, in place:

    log p                    the value is taken here
    e = p^alpha              as 2^(alpha log2 p): faster than softmax, and not less exact
    e - onehot sum(e)        p' - onehot, but for the divisor sum(e)

No power overflows, since p is at most 1, and sum(e) is between 1 and C. The divisor waits for what
else multiplies a row in the backward pass, and costs no pass of its own. Where it cannot wait, as
with label smoothing, the 1/N of a mean goes with it: then nothing is left to do if 1 arrives, as it
does from ``loss.backward()``. The buffer has the range of float32, also for float16: neither 1/N
nor a loss scale, which comes later, can push it below the smallest number.
"""

from __future__ import annotations

import math
from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor

from powergrad._check import Arguments, nonzero, without_autocast
from powergrad._compat import unaltered_log_softmax

# A large tensor is worked on in blocks, of which so many elements stay in the cache from the first
# operation to the last. Below `LARGE` that saves less than the splitting costs.
BLOCK = 1 << 19
LARGE = 1 << 21

LOG2_E = math.log2(math.e)
NEVER = -(1 << 62)  # a label to be ignored that does not occur


def loss_and_gradient(
    logits: Tensor, arguments: Arguments, *, out: Tensor | None = None, all_count: bool = False
) -> tuple[Tensor, Tensor, Tensor | None, float | Tensor | None]:
    """The loss of logits (N, C), for class indices (N) or probabilities (N, C); and its gradient.

    A tensor alpha has one element, or N. `out` is the buffer to use, and may be `logits` itself;
    sum(e) is not left to the divisor then. `all_count` says that every label is a class and none is
    `ignore_index`; if that is not so, and nothing is smoothed, an IndexError on CPU.

    Returns:
        The loss, reduced; the buffer; factors and divisors: the gradient of row i is
        ``factor[i] / divisor[i] * buffer[i]``. Both are (N, 1) or one number, or None for 1.
    """
    target, weight, alpha, ignore_index, label_smoothing, reduction = arguments
    if isinstance(alpha, Tensor):
        arguments = arguments._replace(alpha=_column(alpha, logits))
    if target.is_floating_point() or (all_count and weight is None):
        count = max(1, logits.shape[0]) if reduction == "mean" else 1
        loss, buffer, divisor = _visit(logits, arguments, out, count)
        return loss, buffer, None, divisor

    kept = None if all_count else target != ignore_index
    labels = target if kept is None else target.where(kept, 0)
    weight = None if weight is None else weight.to(_wide(logits))
    arguments = arguments._replace(target=labels, weight=weight, reduction="none")
    losses, buffer, divisor = _visit(logits, arguments, out, 1)
    factor = torch.ones_like(losses) if kept is None else kept.to(losses.dtype)
    counted = factor if weight is None else factor * weight[labels]
    if label_smoothing == 0:  # else the weights are in the buffer and the losses
        factor = counted
    if kept is not None:  # where class 0 is masked, an ignored row has an infinite loss so far
        losses = losses.masked_fill(~kept, 0)
    loss, mass = losses * factor, counted.sum()
    if reduction != "none":
        loss = loss.sum()
    if reduction == "mean":
        loss = loss / mass
        divisor = nonzero(mass) if divisor is None else divisor * nonzero(mass)
    return loss, buffer, factor.unsqueeze(1), divisor


def _column(alpha: Tensor, logits: Tensor) -> Tensor:
    """One alpha per row. It is rounded to log p's dtype only after its product with log2(e)."""
    exact = alpha.to(logits.device, torch.promote_types(alpha.dtype, _wide(logits)))
    return exact.reshape(-1, 1).expand(logits.shape[0], 1)


# A loss, reduced if all rows count alike; the buffer; and divisors of its rows, if there are.
Visited = tuple[Tensor, Tensor, "Tensor | None"]


def _visit(logits: Tensor, arguments: Arguments, out: Tensor | None, count: int) -> Visited:
    """All rows, in blocks if they are many.

    The gradient is also divided by `count`, in the buffer or in the divisors.
    """
    target, alpha = arguments.target, arguments.alpha
    if target.is_floating_point():
        work = _of_probabilities
    else:
        work = _of_labels if arguments.label_smoothing == 0 else _of_smoothed_labels
    n, c = logits.shape
    if out is None and n * c < LARGE:
        return work(_log_p(logits, None), arguments, count)
    # float16 would lose a p' of 1e-8, so its buffer is wider; bfloat16 has float32's range.
    kept = torch.float32 if logits.dtype == torch.float16 else logits.dtype
    buffer = logits.new_empty(n, c, dtype=kept) if out is None else out
    divided = out is not None or kept == torch.bfloat16
    narrow = logits.dtype.itemsize < 4  # then a block is a wider copy
    rows = max(1, (BLOCK // 2 if narrow else BLOCK) // c)
    alphas = alpha.split(rows) if isinstance(alpha, Tensor) else repeat(alpha)
    losses: list[Tensor] = []
    divisors: list[Tensor] = []
    tensors = (t.split(rows) for t in (logits, target, buffer))
    for z, y, block, a in zip(*tensors, alphas, strict=False):
        part = arguments._replace(target=y, alpha=a, reduction="none")
        values, grad, sums = work(_log_p(z, block), part, count)
        losses.append(values)
        if sums is not None and divided:
            grad.mul_(sums.reciprocal_())  # in half the time of div_
        elif sums is not None:
            divisors.append(sums)
        if grad is not block:
            block.copy_(grad)
    loss = reduced(torch.cat(losses), arguments.reduction)
    return loss, buffer, torch.cat(divisors) if divisors else None


def mass_of(arguments: Arguments, all_count: bool) -> float | Tensor:
    """What a mean is divided by."""
    target, weight = arguments.target, arguments.weight
    if target.is_floating_point() or (all_count and weight is None):
        return target.shape[0]
    kept = target != arguments.ignore_index
    if weight is None:
        return kept.sum()
    return (weight.to(_wide(weight))[target.where(kept, 0)] * kept).sum()


def reduced(losses: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    return losses.mean() if reduction == "mean" else losses.sum()


# One block. In each, log p (N, C) becomes the gradient, in place.


def _of_labels(log_p: Tensor, arguments: Arguments, count: int) -> Visited:
    """Without smoothing and weights: these are factors of the rows."""
    y, label = arguments.target, arguments.target.unsqueeze(1)
    loss = F.nll_loss(log_p, y, ignore_index=NEVER, reduction=arguments.reduction)
    e, own, others = _powers(log_p, label, arguments.alpha)
    divisor = own.add_(others)
    if count > 1:  # in half the time of mul_, which would make a tensor of the number
        divisor.add_(divisor, alpha=count - 1)
    # At the label, p' - 1 is minus the others' sum: p' may round to 1, and nothing would be left.
    return loss, e.scatter_(1, label, -others), divisor


def _of_smoothed_labels(log_p: Tensor, arguments: Arguments, count: int) -> Visited:
    label, weight = arguments.target.unsqueeze(1), arguments.weight
    classes, label_smoothing = log_p.shape[1], arguments.label_smoothing
    share = label_smoothing / classes
    if weight is None:
        w, own_w, total, every = 1.0, 1.0, classes, log_p.sum(1)
    else:
        w, own_w, total = weight, weight[label], weight.sum()
        with without_autocast(log_p):
            every = log_p @ weight
    of_label = own_w * (1 - label_smoothing)
    losses = every.mul_(-share).sub_((log_p.gather(1, label) * of_label).squeeze(1))
    e, own, others = _powers(log_p, label, arguments.alpha)
    sums = own + others
    share, of_label = share / count, of_label / count
    scale = (of_label + share * total) / sums
    # At the label, m p' - w_y q_y: by the others' sum where p' is nearly 1.
    direct = scale * own - (of_label + share * own_w)
    by_others = share * (total - own_w) - scale * others
    grad = e.mul_(scale).sub_(share * w)
    grad.scatter_(1, label, torch.where(own < others, direct, by_others))
    return reduced(losses, arguments.reduction), grad, None


def _of_probabilities(log_p: Tensor, arguments: Arguments, count: int) -> Visited:
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
    """``p^alpha`` in place of log p, with 0 at the label; what it is there; and the sum of it."""
    e = _power(log_p, alpha)
    own = e.gather(1, label)
    return e.scatter_(1, label, 0.0), own, e.sum(1, keepdim=True)


def _power(log_p: Tensor, alpha: float | Tensor) -> Tensor:
    """``p^alpha = 2^(alpha log2(e) log p)`` in place of log p."""
    exponent = alpha * LOG2_E
    if isinstance(exponent, Tensor) or exponent == 0:  # a masked class stays masked at alpha 0
        masked = log_p == -torch.inf
        log_p.mul_(exponent).masked_fill_(masked, -torch.inf)
    else:
        F.leaky_relu_(log_p, exponent)  # a product, as log p <= 0; mul_ makes a tensor of a number
    return log_p.exp2_()


def _log_p(z: Tensor, out: Tensor | None) -> Tensor:
    """The log-probabilities in float32 or wider: in `out`, if there is one that suits."""
    if z.dtype.itemsize < 4:
        return unaltered_log_softmax(z.float(), 1, False)
    if out is None:
        return unaltered_log_softmax(z, 1, False)
    return torch.log_softmax(z, 1, out=out)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
