r"""One gradient for every loss: statistics of a row of logits, coefficients, one pass that writes.

The value is the plain loss at ``z``; the gradient is the plain loss's gradient at ``alpha z``. For
a row of logits x with target t (its mass per class, class weights and label smoothing included),

    z    = c tanh(s x / c)                          soft cap c and logit scale s, usually z = x
    loss = g (-sum(t log p) + lambda lse(z)^2)      lambda: z-loss
    dz_c = g (A p'_c - t_c)                         A = sum(t) + 2 lambda lse(alpha z)
    dx_c = dz_c s (1 - tanh^2)

with ``p' = softmax(alpha z)``. The weight g of a row holds the reduction, ignored rows, token
weights and gates, and is known before, so one pass over a block of rows, in one buffer, is enough:
log p gives the loss; ``e = p^alpha``, as 2^(alpha log2 p), is faster than a softmax and equally
accurate, and cannot overflow, since p is at most 1; ``lse(alpha z) = alpha lse(z) + log sum(e)``.

The z-loss follows the same rule: at ``u = alpha z``, plain training has the gradient
``2 lambda lse(u) softmax(u)``. So PGT stays equal to plain training of a scaled head. With the
gradient of ``lambda lse(z)^2`` itself, or with p' written for p in it, that would not be so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from powergrad import kernels
from powergrad.checks import Call, check_labels, without_autocast
from powergrad.compat import log_softmax_of_rows
from powergrad.kernels import gpu

# Rows are processed in blocks of `BLOCK` elements, which stay in the cache from the first operation
# to the last. Tensors below `LARGE` elements are one block: for them, splitting does not pay off.
BLOCK = 1 << 19
LARGE = 1 << 21
SMALL = 1 << 18  # elements: below, checking the labels takes several percent of the time
FEW = 16  # classes
NEVER = -(1 << 62)  # an `ignore_index` that no label has

LOG2_E = math.log2(math.e)

# Statistics, for gates and for the caller ---------------------------------------------------------


class RowStatistics:
    """What a softmax says of each row of logits; without gradient.

    Each is computed when it is first read. Rows that are ignored have a loss of 0, and are neither
    counted nor correct. Sums and counts, unlike means, add up over micro-batches and processes.
    """

    NAMES = ("loss", "lse", "p_target", "entropy", "prediction", "correct", "counted")

    def __init__(self, logits: Tensor, call: Call) -> None:
        self.logits, self.call = logits, call

    def __repr__(self) -> str:
        return f"RowStatistics({', '.join(self.NAMES)}; of {tuple(self.counted.shape)} rows)"

    @classmethod
    def zeros(cls, call: Call, dtype: torch.dtype) -> RowStatistics:
        """Statistics of all rows of a call, to be stored block by block."""
        rows = cls(torch.empty(0), call)
        dtypes = {"prediction": torch.int64, "correct": torch.bool}
        for name in cls.NAMES[:-1]:
            vars(rows)[name] = torch.zeros_like(rows.counted, dtype=dtypes.get(name, dtype))
        return rows

    def store(self, part: slice | Tensor, block: RowStatistics) -> None:
        """Keep the statistics of a block of rows."""
        for name in self.NAMES[:-1]:
            vars(self)[name][part] = getattr(block, name)

    def reshape(self, shape: tuple[int, ...]) -> RowStatistics:
        """All of them, in another shape."""
        rows = RowStatistics(self.logits, self.call)
        vars(rows).update({name: getattr(self, name).reshape(shape) for name in self.NAMES})
        return rows

    @cached_property
    def lse(self) -> Tensor:
        """``log sum exp(z)``."""
        return self.logits.logsumexp(-1)

    @cached_property
    def counted(self) -> Tensor:
        """Whether the row is not ignored."""
        if self.call.soft():
            return torch.ones_like(self.call.target[..., 0], dtype=torch.bool)
        return self.call.target != self.call.ignore_index

    @cached_property
    def p_target(self) -> Tensor:
        """The probability of the target, ``sum(q * p)`` for class probabilities ``q``; or 0."""
        if self.call.soft():
            return (self._p() * self.call.target).sum(-1)
        return self.loss.neg().exp().masked_fill(~self.counted, 0)

    @cached_property
    def loss(self) -> Tensor:
        """Cross-entropy with the target, without weights, smoothing or further terms."""
        if self.call.soft():
            return -((self.logits - self.lse.unsqueeze(-1)) * self.call.target).sum(-1)
        label = self.call.target.masked_fill(~self.counted, 0).unsqueeze(-1)
        own = self.logits.gather(-1, label).squeeze(-1)
        return (self.lse - own).masked_fill(~self.counted, 0)

    @cached_property
    def entropy(self) -> Tensor:
        """``-sum(p log p)``."""
        return torch.special.entr(self._p()).sum(-1)

    @cached_property
    def prediction(self) -> Tensor:
        """The most likely class."""
        return self.logits.argmax(-1)

    @cached_property
    def correct(self) -> Tensor:
        """Whether the prediction is the target, or its most likely class."""
        target = self.call.target.argmax(-1) if self.call.soft() else self.call.target
        return (self.prediction == target) & self.counted

    def _p(self) -> Tensor:
        return (self.logits - self.lse.unsqueeze(-1)).exp()


# The map of logits --------------------------------------------------------------------------------


def mapped(x: Tensor, call: Call) -> Tensor:
    """``c tanh(s x / c)``, or ``s x`` without a soft cap."""
    if call.softcap is None:
        return x * call.logit_scale if call.logit_scale != 1 else x
    return torch.tanh(x * (call.logit_scale / call.softcap)) * call.softcap


# Coefficients -------------------------------------------------------------------------------------


@dataclass  # not frozen, which would take a microsecond
class Coefficients:
    """The weights of all rows, and what their blocks have in common."""

    labels: Tensor  # those of ignored rows are 0; or class probabilities
    alpha: float | Tensor  # one number, or (1,) or (N,)
    g: float | Tensor  # one number, or (N, 1)
    ignored: Tensor | None
    z_loss: float | Tensor  # lambda, relative to g
    empty: bool | Tensor  # whether no row is counted
    own: Tensor | None = None  # the class weights of the labels, (N, 1)
    whole: bool = True  # whether these are all rows

    def of(self, part: slice | Tensor | None) -> Coefficients:
        """Those of a block of rows."""
        if part is None:
            return self
        g = self.g[part] if isinstance(self.g, Tensor) else self.g
        ignored, own = (None if t is None else t[part] for t in (self.ignored, self.own))
        alpha = self.alpha
        if isinstance(alpha, Tensor) and alpha.numel() > 1:
            alpha = alpha[part]
        further = ignored, self.z_loss, self.empty, own, False
        return Coefficients(self.labels[part], alpha, g, *further)


def coefficients(
    call: Call,
    dtype: torch.dtype,
    all_valid: bool,
    over_processes: Callable[[Tensor], Tensor] | None = None,
) -> Coefficients:
    """The coefficients of rows whose gradients are computed in `dtype`.

    `over_processes` sums a number over the processes that have further rows of the same mean.

    A mean over weights that count and sum to 0 is NaN, as in PyTorch; if no row is counted, the
    gradients are 0. With class weights, a mean divides the z-loss by the number of counted rows.
    """
    target, rows, mean = call.target, call.target.shape[0], call.reduction == "mean"
    ignored = None if call.soft() or all_valid else target == call.ignore_index
    labels = target if ignored is None else target.masked_fill(ignored, 0)
    kept = None if ignored is None else (~ignored).to(dtype)
    count: float | Tensor = rows if kept is None else kept.sum()
    if mean and over_processes is not None:
        count = over_processes(torch.as_tensor(count, dtype=dtype, device=target.device))
    empty = count == 0 if isinstance(count, Tensor) else not rows
    z_loss: float | Tensor = call.z_loss
    divisor: float | Tensor = 1
    own = None
    if call.weight is not None and not call.soft():
        own = call.weight.to(dtype)[labels].unsqueeze(1)
    if mean:
        divisor = count or 1 if isinstance(count, (int, float)) else count.clamp(min=1)
        if own is not None:
            mass = own.sum() if kept is None else (own.squeeze(1) * kept).sum()
            mass = mass if over_processes is None else over_processes(mass)
            count, divisor = divisor, mass.masked_fill(mass == 0, math.nan)
            if empty is not False:
                divisor = divisor.masked_fill(torch.as_tensor(empty, device=mass.device), 1)
            if call.z_loss:
                z_loss = call.z_loss * divisor / count
    g: float | Tensor = 1 / divisor  # a number only if all rows count alike
    for factor in (kept, call.token_weight):
        if factor is not None:
            g = g * factor.to(dtype)
    if isinstance(g, Tensor):
        g = g.reshape(-1, 1).expand(rows, 1)
    alpha = call.alpha.reshape(-1) if isinstance(call.alpha, Tensor) else call.alpha
    return Coefficients(labels, alpha, g, ignored, z_loss, empty, own)


def reduced(losses: Tensor, call: Call, common: Coefficients) -> Tensor:
    """The value, of losses as `write` returns them; the mean of no rows is NaN, as in PyTorch."""
    if call.reduction == "none" or losses.dim() == 0:
        return losses
    if call.reduction == "sum":
        return losses.sum()
    if isinstance(common.g, float) and common.empty is False:
        return losses.mean()
    value = losses.sum()
    if call.zero_empty or common.empty is False:
        return value
    return value.masked_fill(torch.as_tensor(common.empty, device=value.device), math.nan)


# All rows -----------------------------------------------------------------------------------------


def loss_and_gradient(logits: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """The loss of logits (N, C), checked, and its gradient, for an incoming gradient of 1.

    A tensor alpha has 1 or N elements. The gradient of float16 logits is float32, so that neither
    1/N nor a loss scale can make it underflow; otherwise it has the dtype of the logits.
    """
    native = kernels.cross_entropy(logits, call)
    if native is not None:
        return native
    small = logits.numel() < SMALL and logits.is_cpu and not call.soft()
    if small and not 0 <= call.ignore_index < logits.shape[1]:
        try:
            return _by_operations(logits, call, True)
        except (IndexError, RuntimeError):  # not all labels are valid, say `nll_loss` and `gather`
            pass
    all_valid = check_labels(call.target, logits.shape[1], call.ignore_index)
    return _by_operations(logits, call, all_valid)


def _by_operations(logits: Tensor, call: Call, all_valid: bool) -> tuple[Tensor, Tensor]:
    """:func:`loss_and_gradient` in PyTorch; `all_valid` states that every label is a class."""
    dtype = torch.float32 if logits.dtype == torch.float16 else logits.dtype
    wide = torch.promote_types(dtype, torch.float32)
    common = coefficients(call, wide, all_valid)
    if common.own is not None and not (call.label_smoothing or call.z_loss):
        common.g, call = common.g * common.own, call.replace(weight=None)  # they weight rows
    n, c = logits.shape
    if n * c < LARGE:
        losses, gradient = write(logits, call, common)
        gradient = gradient if gradient.dtype == dtype else gradient.to(dtype)
        return reduced(losses, call, common), gradient
    gradient = logits.new_empty(n, c, dtype=dtype)
    losses = logits.new_empty(n, dtype=wide)
    buffers = 2 if dtype.itemsize < 4 or call.maps_logits() else 1
    size = max(1, BLOCK // buffers // c)
    for start in range(0, n, size):
        part = slice(start, start + size)
        losses[part], _ = write(logits[part], call, common, part, gradient[part])
    return reduced(losses, call, common), gradient


def write(
    logits: Tensor,
    call: Call,
    common: Coefficients,
    part: slice | Tensor | None = None,
    out: Tensor | None = None,
    factor: Tensor | None = None,
    compute: Callable[..., tuple[Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Tensor]:
    """The losses of a block of rows, weighted unless g is a number, and their gradients.

    If they are the losses of all rows, they may be reduced already. The gradients are written to
    `out`, if given, perhaps `logits` itself. `part` says which rows of the call they are; `factor`
    multiplies their weights; `compute` replaces the computation, where the classes are split.
    """
    block = common.of(part)
    wide = torch.promote_types(logits.dtype, torch.float32)
    if factor is not None:
        block = replace(block, g=block.g * factor.reshape(-1, 1).to(wide))
    # Where g is a number, or all rows are one block, the kernel was asked before.
    if out is not None and compute is None and isinstance(block.g, Tensor):
        own = call.replace(target=call.target[part], alpha=block.alpha, token_weight=block.g)
        own, native = own.replace(z_loss=block.z_loss, reduction="none"), None
        if gpu.runs_on(out.device):
            native = gpu.cross_entropy(logits, own, out)
        elif out.is_cpu and kernels.available():
            own = own.replace(z_loss=float(block.z_loss))
            native = kernels.cross_entropy(logits, own, out=out)
        if native is not None:
            return native
    z, tanh = logits if logits.dtype == wide else logits.to(wide), None
    buffer = out if out is not None and out.dtype == wide else None
    if call.maps_logits():
        z, tanh = _mapped_with_tanh(z, call, buffer)
        buffer = z
    compute = compute or (_of_probabilities if call.soft() else _of_labels)
    losses, grad = compute(z, call, block, buffer)
    if block.ignored is not None:  # if class 0 is masked, an ignored row has a loss of NaN here
        losses = losses.masked_fill(block.ignored, 0)
    losses = losses * block.g.squeeze(1) if isinstance(block.g, Tensor) else losses
    if tanh is not None:
        torch.ops.aten.tanh_backward.grad_input(grad, tanh, grad_input=grad)
    if call.logit_scale != 1:
        grad.mul_(call.logit_scale)
    if out is not None and grad is not out:
        out.copy_(grad)
    return losses, grad if out is None else out


def _mapped_with_tanh(x: Tensor, call: Call, out: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """:func:`mapped`, written to `out` if it is given; and its tanh with a soft cap."""
    if call.softcap is None:
        return torch.mul(x, call.logit_scale, out=out), None
    z = torch.mul(x, call.logit_scale / call.softcap, out=out)
    if z.is_cpu and z.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        tanh = z.to_mkldnn().tanh_().to_dense()  # a third of the time, and as exact
    else:
        tanh = z.tanh()
    return torch.mul(tanh, call.softcap, out=z), tanh


def _of_labels(
    z: Tensor, call: Call, block: Coefficients, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Losses and gradients for class indices."""
    label, eps, weight, g = block.labels.unsqueeze(1), call.label_smoothing, call.weight, block.g
    log_p, lse = _log_p(z, call, out, label)
    share, total = eps / z.shape[1], float(z.shape[1])
    own_w: float | Tensor = 1.0
    if weight is not None and block.own is not None:
        weight, own_w = weight.to(log_p.dtype), block.own
        total = weight.sum()
    # Statistics
    plain = weight is None and not (eps or call.z_loss) and block.empty is False
    plain = plain and block.whole and isinstance(g, float)  # the losses of all rows count alike
    reduction = call.reduction if plain else "none"
    losses = F.nll_loss(log_p, block.labels, weight, ignore_index=NEVER, reduction=reduction)
    losses = losses * (1 - eps) if eps else losses
    if eps and weight is None:
        losses = losses - log_p.sum(1) * share
    elif eps:
        with without_autocast(log_p):
            losses = losses - (log_p @ weight) * share  # pyright: ignore
    alpha = column(block.alpha, log_p)
    e = power(log_p, alpha)
    own = e.gather(1, label)
    # A tensor of zeros: a number would take twice the time.
    rest = e.scatter_(1, label, torch.zeros_like(own)).sum(1, keepdim=True)
    sums = own + rest
    # Coefficients
    if lse is None and not eps and weight is None:
        return losses, e.scatter_(1, label, rest.neg_()).mul_(_quotient(g, sums))
    level = None
    if lse is not None:
        losses = _plus(losses, lse.squeeze(1).square(), block.z_loss)
        level = _plus(sums.log(), lse, alpha)
    weights = (own_w, total, share)
    scale, at_label = label_coefficients(call, own, rest, weights, g, block.z_loss, level)
    # Write
    e.mul_(scale)
    if eps:
        e.sub_(g * share * (1.0 if weight is None else weight))
    return losses, e.scatter_(1, label, at_label.to(e.dtype))


def label_coefficients(
    call: Call,
    own: Tensor,
    rest: Tensor,
    weights: tuple[float | Tensor, float | Tensor, float],
    g: float | Tensor,
    z_loss: float | Tensor,
    level: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """What e is multiplied by, and the gradient at the label.

    `own` is e at the label and `rest` the sum of e over the other classes; `weights` are the
    label's, that of all classes, and what smoothing gives to each; `level` is lse(alpha z), for the
    z-loss. With the mass ``m = sum(t)``,

        A p'_y - t_y = (A - m) p'_y + (m - t_y) - m rest / sum(e)

    loses nothing where p'_y rounds to 1; it is used where p'_y is above a half.
    """
    (own_w, total, share), eps = weights, call.label_smoothing
    of_label = own_w * (1 - eps)
    unit = scale = _quotient(g, own + rest)
    if not isinstance(own_w, float):  # without weights, the mass is 1
        scale = unit * (of_label + share * total)
    at_label = (rest * scale).neg_()
    if level is not None:
        of_z, twice = level * unit, 2 * z_loss
        at_label, scale = _plus(at_label, of_z * own, twice), _plus(scale, of_z, twice)
    if eps:
        direct = scale * own - g * (of_label + share * own_w)
        at_label = torch.where(own < rest, direct, at_label + g * share * (total - own_w))
    return scale, at_label


def _of_probabilities(
    z: Tensor, call: Call, block: Coefficients, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    g = block.g
    log_p, lse = _log_p(z, call, out)
    t = target_mass(block.labels.to(log_p.dtype), call, z.shape[1], call.weight)
    losses = (log_p * t).sum(1, keepdim=True).neg_()
    alpha = column(block.alpha, log_p)
    e = power(log_p, alpha)
    sums = e.sum(1, keepdim=True)
    mass = t.sum(1, keepdim=True)
    if lse is not None:
        losses = losses + block.z_loss * lse.square()
        mass = mass + 2 * block.z_loss * (alpha * lse + sums.log())
    e.mul_(mass.mul_(g) / sums if isinstance(g, float) else g * mass / sums)
    e = e.sub_(t, alpha=g) if isinstance(g, float) else e.sub_(t * g)
    return losses.squeeze(1), e


def target_mass(q: Tensor, call: Call, classes: int, weight: Tensor | None) -> Tensor:
    """The mass per class of class probabilities: smoothed over so many classes, and weighted."""
    if call.label_smoothing > 0:
        q = q * (1 - call.label_smoothing) + call.label_smoothing / classes
    return q if weight is None else q * weight.to(q.dtype)


def _plus(a: Tensor, b: Tensor, factor: float | Tensor) -> Tensor:
    """``a + factor * b``, where a number is not first converted to a tensor."""
    return a + b * factor if isinstance(factor, Tensor) else torch.add(a, b, alpha=factor)


def _quotient(numerator: float | Tensor, sums: Tensor) -> Tensor:
    """``numerator / sums``; `sums` may be overwritten."""
    if isinstance(numerator, Tensor):
        return numerator / sums
    # Half the time of dividing a number, which PyTorch first converts to a tensor.
    return sums.add_(sums, alpha=1 / numerator - 1).reciprocal_()


def column(alpha: float | Tensor, like: Tensor) -> float | Tensor:
    """One alpha per row, not rounded to the dtype of log p before it is multiplied by log2(e)."""
    if not isinstance(alpha, Tensor):
        return alpha
    exact = alpha.to(like.device, torch.promote_types(alpha.dtype, like.dtype))
    return exact.reshape(-1, 1).expand(like.shape[0], 1)


def power(log_p: Tensor, alpha: float | Tensor) -> Tensor:
    """Overwrite log p with ``p^alpha = 2^(alpha log2(e) log p)``."""
    exponent = alpha * LOG2_E
    if isinstance(exponent, Tensor) or exponent == 0:  # a masked class stays masked at alpha 0
        masked = log_p == -torch.inf
        log_p.mul_(exponent).masked_fill_(masked, -torch.inf)
    else:
        F.leaky_relu_(log_p, exponent)  # multiplies, since log p <= 0; faster than mul_ by a number
    return log_p.exp2_()


def _log_p(
    z: Tensor, call: Call, out: Tensor | None, label: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The log-probabilities, written to `out` if it is given; and their lse with a z-loss.

    That is ``max z - max log p``, or, in less time, ``z_y - log p_y`` where these are not large.
    """
    if z.is_cpu and z.shape[1] < FEW:  # PyTorch's function takes four times as long
        top = z.amax(1, keepdim=True)
        log_p = torch.sub(z, top, out=out)
        log_sum = log_p.exp().sum(1, keepdim=True).log_()
        return log_p.sub_(log_sum), top + log_sum if call.z_loss else None
    own = None
    if call.z_loss and label is not None and out is not z and z.is_cpu and z.numel():
        own = z.gather(1, label)
    top = z.amax(1, keepdim=True) if call.z_loss and own is None else None
    if out is None:
        log_p = log_softmax_of_rows(z)
    else:
        log_p = torch.ops.aten.log_softmax.int_out(z, 1, None, out=out)
    if label is not None and own is not None:
        own_log_p = log_p.gather(1, label)
        if own_log_p.amin().item() > -16:
            return log_p, own - own_log_p
        top = z.amax(1, keepdim=True)
    return log_p, None if top is None else top - log_p.amax(1, keepdim=True)
