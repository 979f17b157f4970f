r"""Measures the effective alpha from logits and their gradient, without knowing the loss.

With PGT the gradient of a softmax cross-entropy at a row of logits ``z`` is

    g = m * (p - s),      p = softmax(alpha z),      s = (1 - e) q + e / C,

for a target ``q`` of ``C`` classes, with label smoothing ``e`` and a factor ``m`` per row: the
product of reduction, class weight and loss scale. With class weights ``w`` and soft targets it is

    g = sum(w s) p - w s.

Both are linear in ``m`` or ``w``, which linear least squares eliminates; Gauss-Newton steps find
alpha and ``e``, which all rows share. Without a target, ``q`` is assumed to be a label, which the
gradient shows: it is negative there. A verdict needs three things: residuals no larger than
rounding errors, an alpha that the data determine (a small standard error, with ``e`` free), and
factors ``m`` that are possible for a cross-entropy, because a focal loss, or the paper's listing,
changes nothing else.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

__all__ = ["Rows", "Verdict", "Verification", "measure"]

Verdict = Literal["pgt", "plain", "neither", "cannot tell"]

SAME = 1e-3  # alphas closer than this count as equal
WIDEST = 0.02  # above this uncertainty of alpha the verdict is "cannot tell"
SIGMAS = 10.0  # standard errors per uncertainty: rounding errors are correlated
SIXTEEN = 2.0**-9  # unit roundoff of bfloat16, the coarsest dtype of a loss


@dataclass(frozen=True)
class Verification:
    r"""The result of :func:`powergrad.verify`. ``str()`` of it is one sentence.

    It has no truth value; compare ``verdict`` with the one that you expect.

    Args:
        verdict: "pgt"; "plain", cross-entropy without PGT; "neither", some other gradient; or
            "cannot tell", if the data do not determine the answer.
        alpha: The effective alpha if the verdict is "pgt" or "plain"; the mean over the rows if
            each row has its own.
        uncertainty: How far `alpha` may be from the true value: ten standard errors.
        deviation: The largest difference between the gradient and the fitted one, relative to the
            largest entry of its row; for "neither", that of the best fit, if there is one.
        rows: The number of rows of logits that were measured.
        classes: The number of classes.
        lowest: The smallest alpha of a row; equal to `alpha` if all rows have the same.
        highest: The largest alpha of a row.
        reason: Why the verdict is not "pgt" or "plain"; for these, a remark, if there is one.

    Example:
        >>> print(Verification("pgt", 0.3, 1e-6, 2e-7, 64, 10, 0.3, 0.3))
        PGT at alpha 0.300 (measured on 64 rows of 10 classes; largest deviation 2e-07)
    """

    verdict: Verdict
    alpha: float | None = None
    uncertainty: float | None = None
    deviation: float | None = None
    rows: int = 0
    classes: int = 0
    lowest: float | None = None
    highest: float | None = None
    reason: str = ""

    def __bool__(self) -> bool:
        raise TypeError(
            "Expected a comparison of `verdict`, such as `verification.verdict == 'pgt'`, but got "
            f"a Verification used as a bool: {self}"
        )

    def __str__(self) -> str:
        if self.verdict == "cannot tell":
            return f"cannot tell: {self.reason}"
        text = "plain cross-entropy, alpha 1"
        if self.verdict == "neither":
            text = f"neither PGT nor plain cross-entropy: {self.reason}"
        elif self.verdict == "pgt":
            text = f"PGT at {self._alpha()}"
        measured = f"measured on {counted(self.rows, 'row')} of {counted(self.classes, 'class')}"
        if self.deviation is not None:
            measured += f"; largest deviation {self.deviation:.0e}"
        if self.reason and self.verdict != "neither":
            measured += f"; {self.reason}"
        return f"{text} ({measured})"

    def _alpha(self) -> str:
        lowest, highest = self.lowest, self.highest
        if lowest is not None and highest is not None and highest - lowest > SAME:
            return f"alphas from {lowest:.3f} to {highest:.3f}, one per row"
        if self.uncertainty is not None and self.uncertainty > SAME / 2:
            return f"alpha {self.alpha:.3f} ± {self.uncertainty:.3f}"
        return f"alpha {self.alpha:.3f}"


def counted(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number:,} {noun if number == 1 else plural}"


@dataclass(frozen=True)
class Rows:
    """Rows of logits and their gradient, in float64 on the CPU, without ignored rows."""

    logits: Tensor  # (n, C)
    gradient: Tensor  # (n, C)
    precision: float  # unit roundoff of logits and gradient
    noise: Tensor  # (n, C), additional error of the gradient
    call: Tensor  # (n,), the call of the head that the row is from
    example: Tensor  # (n,), the index of the row in the first dimension of that call
    target: Tensor | None = None  # (n, C), probabilities
    indirect: bool = False  # whether the rows were computed from the gradient of the head's weight

    @functools.cached_property
    def finite(self) -> Tensor:
        """Where logits are not masked with -inf; only these entries have a gradient."""
        return self.logits.isfinite()

    @functools.cached_property
    def shifted(self) -> Tensor:
        """The logits minus the maximum of their row; 0 where masked."""
        return (self.logits - self.logits.amax(1, keepdim=True)).masked_fill(~self.finite, 0.0)

    @functools.cached_property
    def log_p(self) -> Tensor:
        """``log_softmax`` of the logits; rounding errors are proportional to it."""
        return self.logits.log_softmax(1)

    @property
    def in_16_bits(self) -> bool:
        return self.precision > 2.0**-20

    def select(self, rows: Tensor | slice, classes: Tensor | slice) -> Rows:
        entries = {
            name: None if tensor is None else tensor[rows][:, classes]
            for name in ("logits", "gradient", "noise", "target")
            for tensor in (getattr(self, name),)
        }
        return replace(self, call=self.call[rows], example=self.example[rows], **entries)


def measure(rows: Rows) -> Verification:
    """The verdict on `rows`, which must not be empty."""
    used = (rows.gradient != 0).any(0)  # the other classes are padding of the head
    if rows.target is not None:
        used |= (rows.target != 0).any(0)
    rows = rows.select(slice(None), used)
    result = _measure(rows)
    if rows.indirect and result.verdict == "neither" and rows.in_16_bits:
        result = _cannot_tell(
            "the 16-bit gradient of the head's weight is not precise enough to recover the "
            "gradient at the logits; run the step in float32"
        )
    return replace(result, rows=len(rows.logits), classes=int(used.sum()))


def _cannot_tell(reason: str) -> Verification:
    return Verification("cannot tell", reason=reason)


def _measure(rows: Rows) -> Verification:
    count, classes = rows.logits.shape
    size = f"{counted(count, 'row')} of {counted(classes, 'class')}"
    if rows.target is None and classes < 3:
        return _cannot_tell(f"{size} fit every alpha if the labels are unknown; pass `target`")
    if not bool((rows.shifted < 0).any()):
        return _cannot_tell(
            "the logits of each row are all equal, as for a new head with zero weights, so the "
            "softmax is the same at every alpha; train for a few steps first"
        )
    # Each row loses two degrees of freedom: it sums to zero and has a factor. With two classes, one
    # number per row remains, and the factors are common to all rows.
    freedom = int(rows.finite.sum()) - 2 * count if classes > 2 else count - 2
    if freedom < (10 if rows.in_16_bits else 3):  # alpha, smoothing, and something to check
        return _cannot_tell(f"{size} are too few; measure on a larger batch")
    q = _one_hot_labels(rows) if rows.target is None else rows.target
    fits = []
    if classes > 2:  # else a factor per row explains everything
        fits.append(_best_fit(rows, q))
        if fits[0].grade == "exact":
            return _verdict(rows, q, fits[0])
    if classes >= (10 if rows.in_16_bits else 5):
        own = _fit(rows, q, _slopes(rows), torch.zeros(()).double(), free=False)
        if own.grade == "exact":
            return _verdict(rows, q, own)
    if rows.target is not None and classes <= 256 and count * (classes - 1) >= 3 * (classes + 3):
        fits.append(_best_fit(rows, q, class_weights=True))
        if fits[-1].grade == "exact":
            return _verdict(rows, q, fits[-1])
    best = min(fits, key=lambda fit: (fit.grade == "no", fit.deviation), default=None)
    close = ""
    if best is not None and (best.grade == "close" or best.deviation < 0.02):
        close = (
            f"the gradient is close to that of alpha {float(best.alpha):.3f}, but deviates by "
            f"{best.deviation:.0e}, which is more than rounding in the dtype of the logits explains"
        )
    if rows.target is None:  # other targets could explain any gradient: too early for "neither"
        reason = close or "no alpha explains the gradient for labels that are class indices"
        return _cannot_tell(f"{reason}; pass `target`, the class indices or probabilities")
    if close and not (best and best.grade == "close" and _is_systematic(rows, q, best)):
        return _cannot_tell(f"{close}; the loss may be computed in 16 bits")
    if len(fits) < 2:
        return _cannot_tell(
            f"{size} are not enough to rule out class weights or other factors per row; measure on "
            "more rows, with 3 to 256 classes"
        )
    assert best is not None
    reason = close or (
        "no alpha explains the gradient at the logits with this `target`, not even with class "
        "weights or example weights"
    )
    return Verification("neither", deviation=best.deviation, reason=reason)


def _one_hot_labels(rows: Rows) -> Tensor:
    """The class where the gradient is negative, or the predicted class if that is not clear.

    It is not clear for confident rows: with smoothing their gradient is positive at the label, and
    without smoothing it may round to 0 there.
    """
    g = rows.gradient
    clear = g.amin(1) < 0.5 * g.clamp(max=0).sum(1)
    labels = torch.where(clear, g.argmin(1), rows.logits.argmax(1))
    return torch.nn.functional.one_hot(labels, g.shape[1]).double()


# Fits --------------------------------------------------------------------------------------------


class Fit(NamedTuple):
    """The alpha that explains the rows best, and how well it does."""

    alpha: Tensor  # one, or one per row (n, 1)
    uncertainty: float
    factor: Tensor  # (n, 1), the m of the rows; 1 if class weights explain them
    grade: Literal["exact", "close", "no"]
    deviation: float
    misses: Tensor  # (n, C), residuals in units of the rounding error


def _explained(
    rows: Rows, q: Tensor, alpha: Tensor, e: Tensor, weight: Tensor, class_weights: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The residual of the gradient, its rounding error, the factors ``m``, and ``m s`` or ``w s``.

    `weight` weights the squared residuals in the linear least squares.
    """
    g = rows.gradient
    p = (alpha * rows.shifted).masked_fill(~rows.finite, -math.inf).softmax(1)
    s = torch.where(rows.finite, (1 - e) * q + e / q.shape[1], 0.0)
    if class_weights:  # normal equations of g_ic = sum_k w_k (s_ik p_ic - [k = c] s_ic)
        cross = s.T @ (weight * p * s)
        matrix = (s.T * (weight * p * p).sum(1)) @ s - cross - cross.T
        matrix += torch.diag((weight * s * s).sum(0))
        right = s.T @ (weight * p * g).sum(1) - (weight * s * g).sum(0)
        ridge = 1e-13 * float(matrix.diagonal().max()) * torch.eye(len(matrix)).double()
        w = torch.linalg.solve(matrix + ridge, right)  # the ridge is for classes without a weight
        factor, pull = (s @ w).unsqueeze(1), w * s
    else:
        norm = (weight * (p - s) ** 2).sum(1, keepdim=True).clamp(min=1e-300)
        factor = (weight * (p - s) * g).sum(1, keepdim=True) / norm
        pull = factor * s
    left = torch.where(rows.finite, g - factor * p + pull, 0.0)
    size = factor.abs() * p * (1 - rows.log_p.masked_fill(~rows.finite, 0.0)) + pull.abs()
    return left, rows.precision * size + rows.noise, factor, pull


def _fit(
    rows: Rows,
    q: Tensor,
    alpha: Tensor,
    e: Tensor,
    *,
    free: bool = True,
    class_weights: bool = False,
) -> Fit:
    """Gauss-Newton steps from `alpha` and smoothing `e`; with `free=False`, `e` stays fixed.

    Residuals are first weighted by the size of the gradient, then by the rounding error.
    """
    h, largest = 1e-5, rows.gradient.abs().amax(1, keepdim=True)

    def total(entries: Tensor) -> Tensor:
        return entries.sum(1, keepdim=True) if alpha.dim() else entries.sum()

    weight = 1 / (rows.gradient.abs() + 1e-3 * largest) ** 2
    for _ in range(3):

        def residual(alpha: Tensor, e: Tensor, weight: Tensor = weight) -> Tensor:
            return weight.sqrt() * _explained(rows, q, alpha, e, weight, class_weights)[0]

        best, state, step = math.inf, (alpha, e), (torch.zeros(()), torch.zeros(()))
        for _ in range(40):
            r = residual(*state)
            cost = float((r * r).sum())
            if cost < best * (1 - 1e-6):
                best, (alpha, e) = cost, state
                by_alpha = (residual(alpha + h, e) - residual(alpha - h, e)) / (2 * h)
                by_e = (residual(alpha, e + h) - residual(alpha, e - h)) / (2 * h)
                aa, ae, a = total(by_alpha**2), total(by_alpha * by_e), total(by_alpha * r)
                # Smoothing is in [0, 1]: a prior on `e` with a standard deviation of 1 / SIGMAS.
                scatter = (r * r).mean().clamp(min=0.01 if rows.in_16_bits else 1.0)
                ee, b = total(by_e**2) + SIGMAS**2 * scatter, total(by_e * r)
                information = (aa - ae * ae / ee).clamp(min=1e-300)
                d_alpha = -((a - ae * b / ee) / information if free else a / aa.clamp(min=1e-300))
                d_alpha = d_alpha.clamp(-0.5, 0.5)
                step = d_alpha, -(b + ae * d_alpha) / ee if free else torch.zeros(())
            elif max(float(part.abs().max()) for part in step) < 1e-10:
                break
            else:
                step = step[0] / 8, step[1] / 8
            state = alpha + step[0], (e + step[1]).clamp(0, 0.9)
        error = _explained(rows, q, alpha, e, weight, class_weights)[1]
        weight = 1 / error.clamp(min=1e-300) ** 2
    left, error, factor, pull = _explained(rows, q, alpha, e, weight, class_weights)
    sound = bool((factor > 0).all()) and float(pull.min()) >= -1e-3 * float(pull.max())
    exact = bool((left.abs() <= (4 if rows.in_16_bits else 64) * error).all())
    close = bool((left.abs() <= 4 * error * max(1.0, SIXTEEN / rows.precision)).all())
    uncertainty = SIGMAS * float((scatter / information).max()) ** 0.5  # pyright: ignore
    return Fit(
        alpha,
        max(uncertainty, rows.precision / 4, 1e-6),
        torch.ones_like(factor) if class_weights else factor,
        "no" if not sound else "exact" if exact else "close" if close else "no",
        float((left.abs() / largest).max()),
        left / error.clamp(min=1e-300),
    )


def _best_fit(rows: Rows, q: Tensor, *, class_weights: bool = False) -> Fit:
    """The fit without smoothing, started at the slope of ``log g``; with smoothing if better."""
    none = torch.zeros((), dtype=torch.float64)
    plain = _fit(rows, q, _slopes(rows, pooled=True), none, free=False, class_weights=class_weights)
    if plain.grade == "exact":
        smoothed = _fit(rows, q, plain.alpha, none, class_weights=class_weights)
        if smoothed.grade != "exact":
            return plain
        costs = [float(fit.misses.square().sum()) for fit in (plain, smoothed)]
        if costs[0] - costs[1] > SIGMAS**2 * max(costs[1] / plain.misses.numel(), 0.01):
            return smoothed
        apart = float((plain.alpha - smoothed.alpha).abs())
        return plain._replace(uncertainty=max(plain.uncertainty, apart))
    count = len(rows.logits)
    part = torch.linspace(0, count - 1, count if class_weights else min(32, count)).long()
    few, q_few = rows.select(part, slice(None)), q[part]
    sizes = few.gradient.abs()
    weight = 1 / (sizes + 1e-3 * sizes.amax(1, keepdim=True)) ** 2

    def cost(start: Tensor) -> float:
        left = _explained(few, q_few, start[0], start[1], weight, class_weights)[0]
        return float((weight * left * left).sum())

    alphas, smoothings = torch.linspace(0, 1.2, 9), torch.tensor([0, 0.02, 0.1, 0.3, 0.6])
    grid = torch.cartesian_prod(alphas, smoothings).double()
    alpha, e = min(grid, key=cost)
    return _fit(rows, q, alpha, e, class_weights=class_weights)


def _slopes(rows: Rows, *, pooled: bool = False) -> Tensor:
    """The slope of ``log g`` over ``z``, per row or pooled; without smoothing, this is alpha."""
    keep = rows.finite & (rows.gradient > 0)
    mean = torch.where(keep, rows.shifted, 0.0).sum(1, keepdim=True) / keep.sum(1, keepdim=True)
    z = torch.where(keep, rows.shifted - mean, 0.0)
    log_g = torch.where(keep, rows.gradient, 1.0).log()
    over, under = (z * log_g).sum(1, keepdim=True), (z * z).sum(1, keepdim=True)
    if pooled:
        over, under = over.sum(), under.sum()
    return over / under.clamp(min=1e-300)


# The verdict -------------------------------------------------------------------------------------


def _verdict(rows: Rows, q: Tensor, fit: Fit) -> Verification:
    """The verdict on a fit whose residuals are no larger than rounding errors."""
    alphas = fit.alpha.expand(len(rows.logits), 1)
    alpha, low, high = float(alphas.mean()), float(alphas.min()), float(alphas.max())
    about = f"{alpha:.3f} ± {min(fit.uncertainty, 9.99):.3f}"
    if not fit.uncertainty <= WIDEST:
        return _cannot_tell(
            f"{counted(len(rows.logits), 'row')} of logits do not determine alpha (about {about}): "
            "the logits differ too little for the precision of the gradient, or there are too few "
            "rows; measure later in training, in float32, or on a larger batch"
        )
    tolerance = max(fit.uncertainty, SAME)
    neither = Verification("neither", deviation=fit.deviation)
    if low < -tolerance or high > 1 + tolerance:
        if low >= -4 * tolerance and high <= 1 + 4 * tolerance:
            return _cannot_tell(
                f"alpha is about {about}, slightly outside [0, 1]; measure in float32, or on a "
                "larger batch"
            )
        slope = f"{alpha:.3f}" if high - low <= tolerance else f"{low:.3f} to {high:.3f}"
        return replace(
            neither,
            reason=f"the effective alpha is {slope}, not in [0, 1]; if the logits are scaled after "
            "this module, pass as `head` the module that returns the scaled logits",
        )
    plain = (alphas - 1).abs() <= tolerance
    if bool(plain.any()) and not bool(plain.all()):
        return replace(
            neither,
            reason=f"{int(plain.sum())} of {counted(len(plain), 'row')} are plain cross-entropy, "
            f"the others PGT at alphas from {low:.3f} to {float(alphas[~plain].max()):.3f}",
        )
    result = Verification(
        "plain" if bool(plain.all()) else "pgt",
        max(alpha, 0.0),
        fit.uncertainty,
        fit.deviation,
        lowest=max(low, 0.0),
        highest=max(high, 0.0),
    )
    return _judged_by_factors(rows, q, fit, result)


def _judged_by_factors(rows: Rows, q: Tensor, fit: Fit, result: Verification) -> Verification:
    """`result`, if the factors of the rows are possible for a cross-entropy.

    Without class weights the factors are equal within a call; with class weights, equal for equal
    labels; if each example is averaged separately, equal within the example. Otherwise they may be
    example weights, which cannot depend on the logits, or the loss is not a cross-entropy.
    """
    tolerance = 0.1 if rows.in_16_bits else 2e-3
    tolerance = max(tolerance, 20 * float((rows.noise / fit.factor).max()))
    factor, label = fit.factor.squeeze(1).log(), q.argmax(1)

    def constant(*keys: Tensor) -> bool:
        groups = torch.stack(keys, 1).unique(dim=0, return_inverse=True)[1]
        count = int(groups.max()) + 1
        if 1 < count == len(groups):
            return False
        high, low = (
            torch.zeros(count).double().scatter_reduce(0, groups, factor, how, include_self=False)
            for how in ("amax", "amin")
        )
        return bool((high - low <= tolerance).all())

    if constant(rows.call) or constant(rows.call, label) or constant(rows.call, rows.example):
        return result
    spread = factor.max() - factor.min()
    ratio = math.exp(min(float(spread), 700))
    differ = f"the factors of the rows differ by up to {ratio:.3g}x"
    alpha = float(fit.alpha.mean())
    deviation = float((factor - factor.median()).exp().sub(1).abs().max().clamp(max=1e300))
    # The factors of a loss that is not a cross-entropy may depend on these.
    label = label.unsqueeze(1)
    log_p, powers = rows.log_p, torch.where(rows.finite, alpha * rows.log_p, -math.inf)
    of_label, others = log_p.gather(1, label), log_p.scatter(1, label, -math.inf).logsumexp(1)
    if len(rows.call.unique()) == 1 and len(factor) > 4:
        a = powers.scatter(1, label, -math.inf).logsumexp(1).exp()
        b = powers.gather(1, label).squeeze(1).exp()
        if _is_listing(factor, alpha, a, b, others.exp(), tolerance):
            reason = "this is the hook of the paper's listing, which is correct at one loss scale "
            reason += f"only: {differ} (docs/audit.md)"
            return Verification("neither", deviation=deviation, reason=reason)
    share = _explained_share(factor, [of_label.squeeze(1), others, powers.logsumexp(1)])
    if share is None or 0.5 < share <= 0.9:
        return _cannot_tell(
            f"each row fits alpha {alpha:.3f}, but {differ}: these may be example weights, or the "
            "loss may not be a cross-entropy; measure on more rows, or without example weights"
        )
    if share > 0.9:
        reason = f"each row fits alpha {alpha:.3f}, but {differ} and depend on the predicted "
        reason += "probabilities, as in a focal loss"
        return Verification("neither", deviation=deviation, reason=reason)
    return replace(result, reason=f"{differ}, as with example weights")


def _is_listing(
    factor: Tensor, alpha: float, a: Tensor, b: Tensor, others: Tensor, tolerance: float
) -> bool:
    r"""Whether `factor`, logarithms, are those of the hook in the authors' listing.

    It gives ``N * (p^ - q)`` with ``p^`` proportional to ``(k p_c)^alpha``, at the label to
    ``(1 - k (1 - p_t))^alpha``, where k is the loss scale / N^2. Relative to PGT the factor is

        k^alpha (a + b) / (k^alpha a + (1 - k (1 - p_t))^alpha),

    where `a` is the sum of ``p^alpha`` over the other classes, `b` its value at the label, and
    `others` is ``1 - p_t``. The unknown ``log k`` is searched on successively finer grids.
    """
    middle, reach, spread = -14.0, 26.0, math.inf
    for _ in range(4):
        log_k = torch.linspace(middle - reach, middle + reach, 513).double().unsqueeze(1)
        top = (1 - log_k.exp() * others).clamp(min=0)
        left = factor - (a + b).log() + ((alpha * log_k).exp() * a + top**alpha).log()
        spreads = torch.where((top > 0).all(1), left.amax(1) - left.amin(1), math.inf)
        best = int(spreads.argmin())
        middle, reach, spread = float(log_k[best]), reach / 128, float(spreads[best])
    return spread <= tolerance


def _is_systematic(rows: Rows, q: Tensor, fit: Fit) -> bool:
    """Whether logits and target explain most of the residual of `fit`: then it is not rounding."""
    features = [part[rows.finite] for part in (rows.shifted, rows.log_p, rows.log_p.exp(), q)]
    share = _explained_share(fit.misses[rows.finite], features)
    return fit.deviation > 1e-4 and share is not None and share > 0.5


def _explained_share(values: Tensor, features: list[Tensor]) -> float | None:
    """The share of the variance that a quadratic in `features` explains; None if too few rows."""
    x = torch.stack(features, 1)
    x = torch.cat([torch.ones(len(x), 1).double(), x - x.mean(0)], 1)
    pairs = itertools.combinations_with_replacement(x.unbind(1), 2)
    columns = torch.stack([a * b for a, b in pairs], 1)
    if len(columns) < 3 * columns.shape[1]:
        return None
    columns = columns / columns.norm(dim=0).clamp(min=1e-300)
    y = values - values.mean()
    solution = torch.linalg.lstsq(columns, y.unsqueeze(1), driver="gelsd").solution
    return 1 - float((y - (columns @ solution).squeeze(1)).square().sum() / y.square().sum())
