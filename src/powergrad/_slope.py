r"""The effective alpha that logits and the gradient at them show, without knowing the loss.

For a row of logits ``z`` with label ``t``, the gradient of every cross-entropy with PGT is

    g_c = m * (p'_c - r)   for c != t,      p' = softmax(alpha z),

with a factor ``m`` per row (reduction, class weight, loss scale) and an offset ``r = eps / C`` for
label smoothing, else 0. So without smoothing ``log g_c`` is a straight line over ``z_c``, whose
slope is alpha: 1 for plain cross-entropy. The label is the class whose gradient is most negative.
With known soft targets ``q`` all classes count, and smoothing mixes ``q`` with ``1 / C``:

    g_c = m * (p'_c - (1 - e) q_c - e / C).

Both are fitted by least squares: the ``m`` of each row is eliminated (they are linear), and
Gauss-Newton steps find alpha and ``r`` or ``e``, which all rows share. An answer needs three
things: residuals that rounding explains, an alpha that the data determine (its standard error,
with the offset free), and factors ``m`` that can be those of a cross-entropy. The last one matters
because a loss such as the focal loss, or the paper's listing, only changes the factors of the rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

__all__ = ["Rows", "Verdict", "Verification", "measure"]

Verdict = Literal["pgt", "plain", "neither", "cannot tell"]

SAME = 1e-3  # alphas closer than this are one
WIDEST = 0.02  # the largest uncertainty of alpha with which an answer is given
SIGMAS = 5.0  # standard errors in the uncertainty
SIXTEEN = 2.0**-9  # unit roundoff of bfloat16, the coarsest format of a loss


@dataclass(frozen=True)
class Verification:
    r"""What :func:`powergrad.verify` measured. ``str()`` of it is one sentence.

    It has no truth value: compare ``verdict`` with what you expect.

    Args:
        verdict: "pgt"; "plain", which is cross-entropy without PGT; "neither", a gradient that is
            none of both; or "cannot tell", where the data do not determine the answer.
        alpha: The effective alpha, where the verdict is "pgt" or "plain"; the mean over the rows,
            if each has its own.
        uncertainty: How far `alpha` may be from the true one: five standard errors, ten in 16 bits.
        deviation: The largest difference between the gradient and the fitted one, relative to the
            largest entry of its row; for "neither" that of the best fit, if there is one.
        rows: How many rows of logits were measured.
        classes: How many classes they have.
        lowest: The smallest alpha of a row, which is `alpha` if all rows have the same.
        highest: The largest alpha of a row.
        reason: Why the verdict is not "pgt" or "plain"; with these, what else is to be known.

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
            f"the truth of a whole verification: {self}"
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
    """Rows of logits and of the gradient at them, in float64 on the CPU, without those ignored."""

    logits: Tensor  # (n, C)
    gradient: Tensor  # (n, C)
    precision: float  # the unit roundoff of the two
    noise: Tensor  # (n, C), further error of the gradient
    call: Tensor  # (n,), in which call of the head the row was
    example: Tensor  # (n,), in which example of that call, its first dimension
    target: Tensor | None = None  # (n, C), probabilities
    indirect: bool = False  # whether they were computed from the gradient of the head's weight

    @functools.cached_property
    def finite(self) -> Tensor:
        """Where logits are not masked with -inf; only there is a gradient to explain."""
        return self.logits.isfinite()

    @functools.cached_property
    def shifted(self) -> Tensor:
        """The logits minus the largest of their row; 0 where masked."""
        top = self.logits.masked_fill(~self.finite, -math.inf).amax(1, keepdim=True)
        return (self.logits - top).masked_fill(~self.finite, 0.0)

    @functools.cached_property
    def surprise(self) -> Tensor:
        """``-log p``, the size of what rounding multiplies."""
        z = self.shifted
        return z.masked_fill(~self.finite, -math.inf).logsumexp(1, keepdim=True) - z

    def __getitem__(self, index: Tensor) -> Rows:
        fields = ("logits", "gradient", "noise", "call", "example", "target")
        tensors = {name: getattr(self, name) for name in fields}
        return replace(self, **{k: v if v is None else v[index] for k, v in tensors.items()})


def measure(rows: Rows) -> Verification:
    """The verdict on `rows`, of which there is at least one."""
    rows, used = _used_classes(rows)
    found = _measure(rows)
    if rows.indirect and found.verdict == "neither" and _in_16_bits(rows):
        reason = (
            "the gradient of the head's weight in 16 bits is too coarse to recover the gradient at "
            "the logits; run the step in float32"
        )
        found = Verification("cannot tell", reason=reason)
    return replace(found, rows=len(rows.logits), classes=used)


def _used_classes(rows: Rows) -> tuple[Rows, int]:
    """`rows` without the classes that have no gradient anywhere, such as padding of a head."""
    used = (rows.gradient != 0).any(0)
    if rows.target is not None:
        used |= (rows.target != 0).any(0)
    fields = ("logits", "gradient", "noise", "target")
    tensors = {name: getattr(rows, name) for name in fields}
    rows = replace(rows, **{k: v if v is None else v[:, used] for k, v in tensors.items()})
    return rows, int(used.sum())


def _measure(rows: Rows) -> Verification:
    classes = rows.logits.shape[1]
    if rows.target is None and classes < 3:
        return _cannot_tell(
            f"{counted(classes, 'class')} with a gradient leave a single point per row, through "
            "which a line of every slope goes; pass `target`"
        )
    if not bool((rows.shifted < 0).any()):
        return _cannot_tell(
            "all logits of a row are equal, as those of a new head with zero weights are: their "
            "softmax is the same at every alpha; train for a few steps first"
        )
    # A row sums to zero and has a factor; two classes, whose factors are common, a number per row.
    freedom = int(rows.finite.sum()) - 2 * len(rows.logits) if classes > 2 else len(rows.logits) - 2
    if freedom < (10 if _in_16_bits(rows) else 3):  # alpha, the offset, and something to check
        return _cannot_tell(
            f"{counted(len(rows.logits), 'row')} of {counted(classes, 'class')} are too few; "
            "measure on a larger batch"
        )
    fits = _fits_of_target(rows) if rows.target is not None else _fits_of_labels(rows)
    best: Fit | None = None
    deviations = []
    for fit in fits:
        if fit.grade == "exact":
            return _verdict_of(rows, fit)
        deviations.append(fit.deviation)
        if best is None or (best.grade == "no" and fit.deviation < best.deviation):
            best = fit
    if best is not None and (best.grade == "close" or best.deviation < 0.02):
        close = f"the gradient is close to that of alpha {best.alpha:.3f}, but with a deviation of "
        close += f"{best.deviation:.0e}, which is more than rounding in the dtype of the logits"
    else:
        close = ""
    if rows.target is None:
        # Other targets could explain any gradient, so it is too early for "neither".
        reason = close or "no alpha explains the gradient for labels that are class indices"
        return _cannot_tell(f"{reason}; pass `target`, the class indices or probabilities")
    if best is None or (classes > 2 and len(deviations) < 2):
        return _cannot_tell(
            f"{counted(len(rows.logits), 'row')} of {counted(classes, 'class')} do not rule out "
            "class weights; measure on more rows, of at most 256 classes"
        )
    if classes == 2:
        return _cannot_tell("with two classes, the factors of the rows must be equal to say more")
    clear = best.grade == "close" and min(deviations) > 1e-4 and not _in_16_bits(rows)
    if close and not (clear and _is_systematic(rows, best)):
        return _cannot_tell(f"{close}; the loss may be computed in 16 bits")
    reason = close or "no alpha explains the gradient at the logits with this `target`"
    return Verification("neither", deviation=best.deviation, reason=reason)


def _cannot_tell(reason: str) -> Verification:
    return Verification("cannot tell", reason=reason)


def _in_16_bits(rows: Rows) -> bool:
    return rows.precision > 2.0**-20


def _sigmas(rows: Rows) -> float:
    """Standard errors in the uncertainty; twice as many in 16 bits, whose errors go together."""
    return SIGMAS * (2 if _in_16_bits(rows) else 1)


def _is_systematic(rows: Rows, fit: Fit) -> bool:
    """Whether the logits explain most of what the fit leaves, which is then not rounding.

    The regression is on ``z``, ``z^2``, ``p`` and ``p'``, each relative to its mean in the row.
    """
    z, surprise = rows.shifted, rows.surprise
    p, _ = _softmax(rows, torch.tensor(fit.alpha, dtype=torch.float64))
    features = torch.stack([z, z * z, (-surprise).exp(), p], 2)
    kept = (fit.misses != 0) & rows.finite
    weight = (1 / (p * (1 + surprise) + fit.offset)).masked_fill(~kept, 0.0)
    count = kept.sum(1, keepdim=True).clamp(min=1).unsqueeze(2)
    features = features - (features * kept.unsqueeze(2)).sum(1, keepdim=True) / count
    columns = torch.cat([features, torch.ones_like(features[..., :1])], 2)
    columns = (columns * weight.unsqueeze(2))[kept]
    misses = fit.misses[kept]
    if len(misses) < 50:
        return False
    columns = columns / columns.norm(dim=0).clamp(min=1e-300)
    solution = torch.linalg.lstsq(columns, misses.unsqueeze(1), driver="gelsd").solution
    left = misses - (columns @ solution).squeeze(1)
    return float((left**2).sum()) < 0.5 * float((misses**2).sum())


# Fits --------------------------------------------------------------------------------------------


class Fit(NamedTuple):
    """Alpha and offset that explain rows best, and how well they do."""

    alpha: float
    uncertainty: float
    offset: float
    factor: Tensor  # (n,), the m of the rows
    grade: Literal["exact", "close", "no"]
    deviation: float
    alphas: Tensor  # (n,)
    label: Tensor  # (n,), the class of the most negative gradient
    misses: Tensor  # (n, C), residuals in units of the rounding error; 0 where not fitted


class Problem(NamedTuple):
    """What is fitted: `rows`, at the entries in `keep`, one alpha for all rows or one for each."""

    rows: Rows
    keep: Tensor  # (n, C)
    per_row: bool = False


class Point(NamedTuple):
    """The model at one alpha and offset."""

    factor: Tensor  # (n, 1)
    residual: Tensor  # (n, C), of the gradient; 0 where not kept
    error: Tensor  # (n, C), what rounding by one unit would change
    jacobian: tuple[Tensor, Tensor]  # of the weighted residuals, projected; each (n, C)
    weighted: Tensor  # (n, C)


def _softmax(rows: Rows, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """``p'`` and its derivative by alpha, both (n, C)."""
    z = rows.shifted
    p = (alpha * z).masked_fill(~rows.finite, -math.inf).softmax(1)
    return p, p * (z - (p * z).sum(1, keepdim=True))


def _point(problem: Problem, alpha: Tensor, offset: Tensor, sigma: Tensor | None = None) -> Point:
    rows, keep = problem.rows, problem.keep
    p, by_alpha = _softmax(rows, alpha)
    surprise = rows.surprise
    if rows.target is None:
        shape, by_offset, terms = p - offset, -torch.ones_like(p), p * (1 + surprise) + offset
    else:
        classes = rows.logits.shape[1]
        q = (1 - offset) * rows.target + offset / classes
        shape, by_offset = p - q, rows.target - 1 / classes
        terms = p * (1 + surprise) + q
    g = rows.gradient
    if sigma is None:  # by the gradient, as long as the factors are unknown
        sigma = g.abs() + 1e-3 * g.abs().amax(1, keepdim=True)
    weight = keep / sigma.clamp(min=1e-300)
    phi = weight * shape
    norm = (phi * phi).sum(1, keepdim=True).clamp(min=1e-300)
    factor = (phi * weight * g).sum(1, keepdim=True) / norm
    residual = torch.where(keep, g - factor * shape, 0.0)
    error = rows.precision * factor.abs() * terms + rows.noise

    def projected(derivative: Tensor) -> Tensor:
        column = weight * factor * derivative
        return column - phi * (phi * column).sum(1, keepdim=True) / norm

    jacobian = projected(by_alpha), projected(by_offset)
    return Point(factor, residual, error, jacobian, weight * residual)


def _solve(
    problem: Problem, alpha: Tensor, offset: Tensor, *, free_offset: bool, stages: int = 4
) -> tuple[Tensor, Tensor, Tensor]:
    """Gauss-Newton from (`alpha`, `offset`); both at the end, and the variance of alpha there.

    Weights are by the gradient at first, then by the rounding errors of the model.
    """
    most = 1.0 if problem.rows.target is not None else 1 / problem.rows.logits.shape[1]

    def total(entries: Tensor) -> Tensor:
        return entries.sum(1, keepdim=True) if problem.per_row else entries.sum()

    def advance(alpha: Tensor, offset: Tensor, point: Point) -> tuple[Tensor, Tensor, Tensor]:
        by_alpha, by_offset = point.jacobian
        aa, ao = total(by_alpha * by_alpha), total(by_alpha * by_offset)
        oo = total(by_offset * by_offset)
        a, o = total(by_alpha * point.weighted), total(by_offset * point.weighted)
        usable = free_offset and bool((oo > 0).all())
        shared = ao * ao / oo if usable else torch.zeros_like(aa)
        curvature = (aa - shared).clamp(min=0)
        step = (a - ao * o / oo if usable else a) / curvature.clamp(min=1e-300)
        step = torch.where(curvature > 1e-12 * aa, step, 0.0).clamp(-0.5, 0.5)
        alpha = alpha + step
        if usable:
            offset = (offset + (o - ao * step) / oo).clamp(0, most)
        return alpha, offset, curvature

    error = None
    for stage in range(stages):
        best = math.inf
        state = alpha, offset
        for _ in range(40):
            point = _point(problem, *state, error)
            loss = float((point.weighted**2).sum())
            if not loss < best * (1 - 1e-6):
                break
            best, alpha, offset = loss, *state
            following = advance(alpha, offset, point)[:2]
            change = (following[0] - alpha).abs().max() + (following[1] - offset).abs().max()
            state = following
            if float(change) < 1e-14:
                break
        error = _point(problem, alpha, offset, error).error
        if stage == 0 and not bool(error.isfinite().all()):
            break
    point = _point(problem, alpha, offset, error)
    curvature = advance(alpha, offset, point)[2]
    kept = problem.keep.sum()
    scatter = ((point.weighted**2).sum() / kept.clamp(min=1)).sqrt().clamp(min=0.1)
    variance = scatter**2 / curvature.clamp(min=1e-300)
    return alpha, offset, variance


def _finished(problem: Problem, alpha: Tensor, offset: Tensor, variance: Tensor) -> Fit:
    rows = problem.rows
    point = _point(problem, alpha, offset)
    point = _point(problem, alpha, offset, point.error)
    size = point.residual.abs()
    exact = bool((size <= (4 if _in_16_bits(rows) else 64) * point.error).all())
    coarse = point.error * max(1.0, SIXTEEN / rows.precision)
    close = bool((size <= 4 * coarse).all())
    sound = bool((point.factor > 0).all())
    largest = rows.gradient.abs().amax(1, keepdim=True)
    if rows.target is None:
        # With an offset of nearly p' and a huge factor, rounding errors would explain anything.
        p = torch.where(problem.keep, _softmax(rows, alpha)[0], 0.0).amax(1, keepdim=True)
        kept = torch.where(problem.keep, rows.gradient.abs(), 0.0).amax(1, keepdim=True)
        sound = sound and float((kept / (point.factor * p)).median()) > 1e-3
    return Fit(
        alpha=float(alpha.mean()),
        # An alpha in float32 is 0.3 only to 1e-8.
        uncertainty=max(_sigmas(rows) * float(variance.max()) ** 0.5, 1e-7),
        offset=float(offset.mean()),
        factor=point.factor.squeeze(1),
        grade="no" if not sound else "exact" if exact else "close" if close else "no",
        deviation=float((size / largest).max()),
        alphas=alpha.expand(len(rows.logits), 1).squeeze(1),
        label=_labels(rows),
        misses=point.weighted,
    )


def _slope(problem: Problem) -> Tensor:
    """The slope of ``log g`` over ``z``: alpha, if there is no offset. The start of the fit."""
    rows = problem.rows
    keep = problem.keep & (rows.gradient > 0)
    count = keep.sum(1, keepdim=True).clamp(min=1)
    z = torch.where(keep, rows.logits, 0.0)
    z = torch.where(keep, z - z.sum(1, keepdim=True) / count, 0.0)
    log_g = torch.where(keep, rows.gradient.clamp(min=1e-300).log(), 0.0)
    over, under = (z * log_g).sum(1, keepdim=True), (z * z).sum(1, keepdim=True)
    if not problem.per_row:
        over, under = over.sum(), under.sum()
    return over / under.clamp(min=1e-300)


def _best(problem: Problem, *, with_offset: bool = True) -> Fit:
    """The fit without an offset if it is as good, else with one; uncertain as with one.

    A small offset and a slightly different alpha are much alike where logits hardly differ. So the
    uncertainty is that of the fit with an offset, even if there is none.
    """
    start, none = _slope(problem), torch.zeros((), dtype=torch.float64)
    fit = _finished(problem, *_solve(problem, start, none, free_offset=False))
    if not with_offset:
        return fit
    if fit.grade != "no":
        alpha = torch.tensor(fit.alpha, dtype=torch.float64)
        smoothed = _finished(problem, *_solve(problem, alpha, none, free_offset=True))
        cost, with_offset_cost = (float((f.misses**2).sum()) for f in (fit, smoothed))
        scatter = max(with_offset_cost / max(int(problem.keep.sum()), 1), 0.01)
        if smoothed.grade == "exact" and cost > with_offset_cost + SIGMAS**2 * scatter:
            return smoothed
        far = abs(fit.alpha - smoothed.alpha) if smoothed.grade == fit.grade else 0.0
        free = max(smoothed.uncertainty, far)
        if free > WIDEST:  # the offset is undetermined; within its bounds alpha may still be
            free = min(free, _reach(problem, fit))
        return fit._replace(uncertainty=max(free, fit.uncertainty))
    few = torch.linspace(0, len(problem.keep) - 1, min(32, len(problem.keep))).long()
    small = Problem(problem.rows[few], problem.keep[few])
    share = 1.0 if problem.rows.target is not None else 1 / problem.rows.logits.shape[1]
    starts = []
    for begin in (0.0, 0.3, 1.0):
        for smoothing in (0.02, 0.2):
            at = torch.tensor([begin, smoothing * share], dtype=torch.float64)
            alpha, offset, _ = _solve(small, at[0], at[1], free_offset=True, stages=2)
            error = _point(small, alpha, offset).error
            cost = float((_point(small, alpha, offset, error).weighted ** 2).mean())
            starts.append((cost if math.isfinite(cost) else math.inf, alpha, offset))
    _, alpha, offset = min(starts, key=lambda start: start[0])
    return _finished(problem, *_solve(problem, alpha, offset, free_offset=True))


def _reach(problem: Problem, fit: Fit) -> float:
    """How far from that of `fit` an alpha is that fits with any offset."""
    most = 1.0 if problem.rows.target is not None else 1 / problem.rows.logits.shape[1]
    farthest = 0.0
    for smoothing in (0.1, 0.25, 0.5, 0.75, 0.95):
        offset = torch.tensor(smoothing * most, dtype=torch.float64)
        start = torch.tensor(fit.alpha, dtype=torch.float64)
        other = _finished(problem, *_solve(problem, start, offset, free_offset=False))
        if other.grade == "exact":
            farthest = max(farthest, abs(other.alpha - fit.alpha) + other.uncertainty)
    return farthest


# The kinds of targets ----------------------------------------------------------------------------


def _labels(rows: Rows) -> Tensor:
    """The class of the most negative gradient, or the likeliest one where none is negative.

    The latter is a row whose ``p_t - 1`` is rounded to 0.
    """
    least = rows.gradient.min(1)
    return torch.where(least.values < 0, least.indices, _likeliest(rows))


def _likeliest(rows: Rows) -> Tensor:
    return rows.logits.nan_to_num(-math.inf, neginf=-math.inf).argmax(1)


def _without(entries: Tensor, label: Tensor) -> Tensor:
    return entries.scatter(1, label.unsqueeze(1), False)


def _fits_of_labels(rows: Rows) -> Iterator[Fit]:
    """Fits under one assumption after another, the most common one first."""
    label = _labels(rows)
    entries = rows.finite
    first = _best(Problem(rows, _without(entries, label)))
    clear = _clear(rows)
    if first.grade == "exact" and first.offset > 0 and not bool(clear.all()):
        # In confident rows with smoothing the label may also be the likeliest class.
        likely = torch.where(clear, label, _likeliest(rows))
        other = _best(Problem(rows, _without(entries, likely)))
        if other.grade == "exact":
            apart = abs(other.alpha - first.alpha)
            first = first._replace(uncertainty=max(first.uncertainty, other.uncertainty, apart))
    yield first
    smoothed = _fit_of_clear_rows(rows, label)
    if smoothed is not None:
        yield smoothed
    if rows.logits.shape[1] >= (10 if _in_16_bits(rows) else 6):
        sparse = _fit_of_sparse_targets(rows)
        if sparse is not None:
            yield sparse
    weighted = _fit_of_weighted_smoothing(rows, label)
    if weighted is not None:
        yield weighted
    if rows.logits.shape[1] >= (10 if _in_16_bits(rows) else 5):
        problem = Problem(rows, _without(entries, label), per_row=True)
        fit = _finished(
            problem,
            *_solve(
                problem, _slope(problem), torch.zeros((), dtype=torch.float64), free_offset=False
            ),
        )
        if fit.grade == "exact":
            yield fit


def _clear(rows: Rows) -> Tensor:
    """The rows whose negative gradient is nearly all at one class, which then is their label."""
    return rows.gradient.amin(1) <= 0.8 * rows.gradient.clamp(max=0).sum(1)


def _fit_of_clear_rows(rows: Rows, label: Tensor) -> Fit | None:
    """Labels with smoothing, where a confident row's gradient is not most negative at its label.

    Alpha and offset come from the rows that are clear; the others must then agree with them, with
    the likeliest class as their label.
    """
    clear = _clear(rows)
    if bool(clear.all()) or int(clear.sum()) < 2:
        return None
    entries = rows.finite
    keep = _without(entries, label)
    first = _best(Problem(rows[clear], keep[clear]))
    if first.grade != "exact":
        return None
    alpha = torch.tensor(first.alpha, dtype=torch.float64)
    offset = torch.tensor(first.offset, dtype=torch.float64)
    likeliest = _likeliest(rows)
    ratios = []
    for candidate in (label, likeliest):
        problem = Problem(rows, _without(entries, candidate))
        point = _point(problem, alpha, offset, _point(problem, alpha, offset).error)
        ratios.append((point.residual.abs() / point.error.clamp(min=1e-300)).amax(1))
    label = torch.where(ratios[1] < ratios[0], likeliest, label)
    problem = Problem(rows, _without(entries, label))
    fit = _finished(problem, *_solve(problem, alpha, offset, free_offset=True))
    return fit._replace(label=label, uncertainty=max(fit.uncertainty, first.uncertainty))


def _fit_of_sparse_targets(rows: Rows) -> Fit | None:
    """Soft targets of two classes, as of mixup: the others are on the line, wherever these are.

    Alpha and offset are searched on a grid by the median of the residuals, which outliers do not
    move; then the two classes farthest below the line are left out.
    """
    few = rows[torch.linspace(0, len(rows.logits) - 1, min(32, len(rows.logits))).long()]
    entries, best = few.finite, (math.inf, 0.0, 0.0)
    classes = rows.logits.shape[1]
    for alpha in torch.linspace(0, 1, 21, dtype=torch.float64):
        p, _ = _softmax(few, alpha)
        for smoothing in (0.0, 0.1, 0.2):
            shape = p - smoothing / classes
            ratio = torch.where(entries & (shape > 0), few.gradient / shape, torch.nan)
            factor = ratio.nanmedian(1, keepdim=True).values
            miss = ((few.gradient - factor * shape) / (factor * p)).abs()
            cost = float(miss.masked_fill(~entries, torch.nan).nanmedian())
            best = min(best, (cost, float(alpha), smoothing))
    at = torch.tensor([best[1], best[2] / classes], dtype=torch.float64)
    keep = rows.finite
    alpha, offset = at[0], at[1]
    for _ in range(3):
        p, _ = _softmax(rows, alpha)
        shape = p - offset
        ratio = torch.where(keep & (shape > 0), rows.gradient / shape, torch.nan)
        factor = ratio.nanmedian(1, keepdim=True).values.nan_to_num(1.0)
        below = (factor * shape - rows.gradient).masked_fill(~rows.finite, -math.inf)
        mask = rows.finite.scatter(1, below.topk(2, dim=1).indices, False)
        problem = Problem(rows, mask)
        alpha, offset, variance = _solve(problem, alpha, offset, free_offset=best[2] > 0)
        if _finished(problem, alpha, offset, variance).grade == "exact":
            return _best(problem)
    return None


def _fit_of_weighted_smoothing(rows: Rows, label: Tensor) -> Fit | None:
    """Class weights and smoothing together: one offset per class, which all rows of a call share.

    For one alpha, ``g_ic = m_i p'_ic - o_c`` is linear in all ``m`` and ``o``. They come from the
    rows whose label is clear; the others must agree with them.
    """
    classes, clear = rows.logits.shape[1], _clear(rows)
    count = int(clear.sum())
    if len(rows.call.unique()) > 1 or not 3 <= classes <= 256 or count < 4:
        return None
    entries = rows.finite
    if count * (classes - 2) < 2 * (count + classes):
        return None
    scale = rows.gradient.abs().amax(1, keepdim=True)

    def solved(alpha: float, keep: Tensor, given: Tensor | None) -> tuple[Tensor, ...]:
        """Offsets, factors, residuals and rounding errors at the entries in `keep`."""
        p, _ = _softmax(rows, torch.tensor(alpha, dtype=torch.float64))
        weight = keep / scale
        wp, wg = weight * p, weight * rows.gradient
        norm = (wp * wp).sum(1, keepdim=True).clamp(min=1e-300)
        if given is not None:
            offset = given
        else:
            u = weight * wp / norm.sqrt()
            matrix = torch.diag((weight * weight).sum(0)) - u.T @ u
            projected = wg - wp * (wp * wg).sum(1, keepdim=True) / norm
            right = -(weight * projected).sum(0)
            offset = torch.linalg.pinv(matrix, rtol=1e-13, hermitian=True) @ right
        factor = (wp * (wg + weight * offset)).sum(1, keepdim=True) / norm
        residual = torch.where(keep, rows.gradient - factor * p + offset, 0.0)
        error = factor.abs() * p * (1 + rows.surprise) + offset.abs()
        return offset, factor, residual, rows.precision * error + rows.noise

    kept = _without(entries, label) & clear.unsqueeze(1)

    def cost(alpha: float) -> float:
        return float(((solved(alpha, kept, None)[2] / scale) ** 2).sum())

    alpha, curvature = _lowest(cost)
    offset = solved(alpha, kept, None)[0]
    candidates = []
    for candidate in (label, _likeliest(rows)):
        _, factor, residual, error = solved(alpha, _without(entries, candidate), offset)
        candidates.append((residual / error.clamp(min=1e-300), factor, residual, error))
    other = candidates[1][0].abs().amax(1) < candidates[0][0].abs().amax(1)
    misses, factor, residual, error = (
        torch.where(other.unsqueeze(1), b, a) for a, b in zip(*candidates, strict=True)
    )
    exact = bool((misses.abs() <= (4 if _in_16_bits(rows) else 64)).all())
    sound = bool((factor > 0).all()) and float(offset.min()) >= -1e-3 * float(offset.abs().max())
    if not exact or not sound:
        return None
    scatter = max(float(((error / scale) ** 2).mean()), float(((residual / scale) ** 2).mean()))
    return Fit(
        alpha,
        max(_sigmas(rows) * math.sqrt(2 * scatter / max(curvature, 1e-300)), 1e-7),
        0.0,
        factor.squeeze(1),
        "exact",
        float((residual.abs() / scale).max()),
        torch.full((len(label),), alpha, dtype=torch.float64),
        torch.where(other, _likeliest(rows), label),
        misses,
    )


def _lowest(cost: Callable[[float], float]) -> tuple[float, float]:
    """The alpha of the lowest `cost`, and the curvature there."""
    alpha = min((step / 10 for step in range(13)), key=cost)
    h, curvature = 0.05, 0.0
    for _ in range(8):  # parabolas through three points, ever closer
        low, middle, high = cost(alpha - h), cost(alpha), cost(alpha + h)
        curvature = (low - 2 * middle + high) / h**2
        if curvature <= 0:
            break
        alpha += max(-2 * h, min(2 * h, (low - high) / (2 * h * curvature)))
        h = max(h / 4, 1e-4)
    return alpha, curvature


def _fits_of_target(rows: Rows) -> Iterator[Fit]:
    # Two classes leave one number per row: only with a common factor do several rows say more.
    if rows.logits.shape[1] > 2:
        yield _best(Problem(rows, rows.finite))
    weighted = _fit_of_class_weights(rows)
    if weighted is not None:
        yield weighted


def _fit_of_class_weights(rows: Rows) -> Fit | None:
    """Soft targets with class weights ``w``: for one alpha, ``g = sum(w q) p' - w q`` is linear.

    The factor of the rows, which must be the same for all, is in ``w``. Smoothing mixes ``q``.
    None: the rows are too few for so many weights, or the classes too many.
    """
    classes, target = rows.logits.shape[1], rows.target
    assert target is not None
    if classes > 256 or len(rows.logits) * (classes - 1) < 3 * (classes + 3):
        return None
    scale = rows.gradient.abs().max()  # one for all: p' - q has the same rounding error everywhere
    g = rows.gradient / scale

    def solved(alpha: float, smoothing: float) -> tuple[Tensor, Tensor, Tensor]:
        q = ((1 - smoothing) * target + smoothing / classes) / scale
        p, _ = _softmax(rows, torch.tensor(alpha, dtype=torch.float64))
        matrix = (q.T * (p * p).sum(1)) @ q - q.T @ (p * q) - (p * q).T @ q
        matrix = matrix + torch.diag((q * q).sum(0))
        right = q.T @ (p * g).sum(1) - (q * g).sum(0)
        weight = torch.linalg.pinv(matrix, rtol=1e-13, hermitian=True) @ right
        mass = (q @ weight).unsqueeze(1)
        error = mass.abs() * p * (1 + rows.surprise) + (weight * q).abs()
        return g - mass * p + weight * q, rows.precision * error + rows.noise / scale, weight

    def cost(alpha: float, smoothing: float) -> float:
        return float((solved(alpha, smoothing)[0] ** 2).sum())

    def finished(alpha: float, smoothing: float, curvature: float) -> Fit:
        residual, error, weight = solved(alpha, smoothing)
        exact = bool((residual.abs() <= (4 if _in_16_bits(rows) else 64) * error).all())
        exact = exact and float(weight.min()) >= -1e-3 * float(weight.abs().max())
        scatter = max(float((error**2).mean()), float((residual**2).mean()))
        return Fit(
            alpha,
            max(_sigmas(rows) * math.sqrt(2 * scatter / max(curvature, 1e-300)), 1e-7),
            smoothing,
            torch.ones(len(g), dtype=torch.float64),
            "exact" if exact else "no",
            float(residual.abs().max()),
            torch.full((len(g),), alpha, dtype=torch.float64),
            g.argmin(1),
            residual / error.clamp(min=1e-300),
        )

    def at(smoothing: float) -> Fit:
        alpha, curvature = _lowest(functools.partial(cost, smoothing=smoothing))
        return finished(alpha, smoothing, curvature)

    fit, smoothed = at(0.0), [at(smoothing) for smoothing in (0.02, 0.1, 0.3, 0.6, 0.9)]
    if fit.grade == "exact":  # as uncertain as smoothing, which may be there, makes it
        reach = [abs(f.alpha - fit.alpha) + f.uncertainty for f in smoothed if f.grade == "exact"]
        return fit._replace(uncertainty=max(fit.uncertainty, *reach, 0.0))
    start = min(smoothed, key=lambda fit: cost(fit.alpha, fit.offset))
    found = finished(*_lowest_of_two(cost, start.alpha, start.offset))
    return found if found.grade == "exact" else min(fit, found, key=lambda fit: fit.deviation)


def _lowest_of_two(
    cost: Callable[[float, float], float], alpha: float, smoothing: float
) -> tuple[float, float, float]:
    """The lowest `cost` near a start, and its curvature along alpha with smoothing free."""
    h, curvature = 0.02, 0.0
    for _ in range(14):
        middle = cost(alpha, smoothing)
        a, e = (
            [cost(alpha + s * h, smoothing) for s in (1, -1)],
            [cost(alpha, smoothing + s * h) for s in (1, -1)],
        )
        corners = cost(alpha + h, smoothing + h) + cost(alpha - h, smoothing - h)
        aa, ee = (sum(a) - 2 * middle) / h**2, (sum(e) - 2 * middle) / h**2
        ae = (corners - sum(a) - sum(e) + 2 * middle) / (2 * h**2)
        da, de = (a[0] - a[1]) / (2 * h), (e[0] - e[1]) / (2 * h)
        determinant = aa * ee - ae**2
        if not (determinant > 0 and ee > 0):
            break
        curvature = determinant / ee
        alpha -= max(-0.1, min(0.1, (ee * da - ae * de) / determinant))
        smoothing -= max(-0.1, min(0.1, (aa * de - ae * da) / determinant))
        smoothing = max(0.0, min(1.0, smoothing))
        h = max(h / 3, 1e-4)
    return alpha, smoothing, curvature


# The verdict -------------------------------------------------------------------------------------


def _verdict_of(rows: Rows, fit: Fit) -> Verification:
    """The verdict on a fit whose residuals are rounding errors."""
    low, high = float(fit.alphas.min()), float(fit.alphas.max())
    if not fit.uncertainty <= WIDEST:
        return _cannot_tell(
            f"{counted(len(rows.logits), 'row')} of logits leave alpha undetermined (about "
            f"{fit.alpha:.2f} ± {min(fit.uncertainty, 9.99):.2f}): the logits differ too little "
            "for the precision of the gradient, or there are too few rows; measure later in "
            "training, in float32, or on a larger batch"
        )
    tolerance = max(fit.uncertainty, SAME)
    found = Verification(
        "pgt",
        max(fit.alpha, 0.0),
        fit.uncertainty,
        fit.deviation,
        lowest=max(low, 0.0),
        highest=max(high, 0.0),
    )
    if low < -tolerance or high > 1 + tolerance:
        if low >= -4 * tolerance and high <= 1 + 4 * tolerance:
            return _cannot_tell(
                f"alpha is about {fit.alpha:.3f} ± {fit.uncertainty:.3f}, a little outside of "
                "[0, 1]; measure in float32, or on a larger batch"
            )
        slope = f"{fit.alpha:.3f}" if high - low <= tolerance else f"{low:.3f} to {high:.3f}"
        return Verification(
            "neither",
            deviation=fit.deviation,
            reason=(
                f"the slope is {slope}, not in [0, 1]; if the logits are scaled after this module, "
                "pass `head`, the module after which they are not"
            ),
        )
    plain = (fit.alphas - 1).abs() <= tolerance
    if bool(plain.all()):
        found = replace(found, verdict="plain")
    elif bool(plain.any()):
        return Verification(
            "neither",
            deviation=fit.deviation,
            reason=(
                f"{int(plain.sum())} of {counted(len(plain), 'row')} are plain cross-entropy, the "
                f"others PGT at alphas from {low:.3f} to {float(fit.alphas[~plain].max()):.3f}"
            ),
        )
    return _judged_by_factors(rows, fit, found)


def _judged_by_factors(rows: Rows, fit: Fit, found: Verification) -> Verification:
    """`found`, if the factors of the rows can be those of a cross-entropy.

    Without class weights they are equal within a call; with them, equal for equal labels; where
    each example is averaged by itself, equal within the example. Otherwise they may be weights of
    the examples, which cannot depend on the logits, or belong to a loss that is no cross-entropy.
    """
    tolerance = 0.1 if _in_16_bits(rows) else 2e-3
    tolerance = max(tolerance, 20 * float((rows.noise / fit.factor.unsqueeze(1)).max()))
    factor = fit.factor.log()

    def constant(*keys: Tensor) -> bool:
        groups = torch.stack(keys, 1).unique(dim=0, return_inverse=True)[1]
        count = int(groups.max()) + 1
        if count > 1 and count == len(groups):
            return False
        high = torch.full((count,), -math.inf, dtype=torch.float64)
        low = -high
        high = high.scatter_reduce(0, groups, factor, "amax")
        low = low.scatter_reduce(0, groups, factor, "amin")
        return bool((high - low <= tolerance).all())

    example = (rows.call, rows.example)
    if constant(rows.call) or constant(rows.call, fit.label) or constant(*example):
        return found
    ratio = math.exp(min(float(factor.max() - factor.min()), 700))
    differ = f"the factors of the rows differ up to {ratio:.3g} times"
    if _is_listing(rows, fit, tolerance):
        return Verification(
            "neither",
            deviation=_listing_deviation(factor),
            reason=(
                f"this is the hook of the paper's listing, which is right at one loss scale only: "
                f"{differ} (docs/audit.md)"
            ),
        )
    share = _explained_by_prediction(rows, fit)
    if share is None or 0.5 < share <= 0.9:
        return _cannot_tell(
            f"each row fits alpha {fit.alpha:.3f}, but {differ}: they may be weights of the "
            "examples, or the loss may be no cross-entropy; measure on more rows, or without "
            "weights of the examples"
        )
    if share > 0.9:
        return Verification(
            "neither",
            deviation=_listing_deviation(factor),
            reason=(
                f"each row has the slope {fit.alpha:.3f}, but {differ}, depending on the predicted "
                "probabilities, as in a focal loss"
            ),
        )
    return replace(found, reason=f"{differ}, as with weights of the examples")


def _listing_deviation(factor: Tensor) -> float:
    """How far the factors are from one for all rows."""
    common = factor.median()
    return float((factor - common).exp().sub(1).abs().max().clamp(max=1e300))


def _is_listing(rows: Rows, fit: Fit, tolerance: float) -> bool:
    r"""Whether the factors are those of the authors' hook (`powergrad.lab.losses`).

    It gives ``N * (p^ - q)`` with ``p^`` proportional to ``(k p_c)^alpha``, at the label to
    ``(1 - k (1 - p_t))^alpha``, where k is the loss scale / N^2. Relative to PGT the factor is

        k^alpha (A + B) / (k^alpha A + (1 - k (1 - p_t))^alpha),

    with A the sum of ``p^alpha`` over the other classes and B that of the label.
    """
    if len(fit.factor) < 5 or len(rows.call.unique()) > 1:
        return False
    finite = rows.finite
    log_p = torch.where(finite, -rows.surprise, -math.inf)
    label = fit.label.unsqueeze(1)
    powered = torch.where(finite, (fit.alpha * log_p).exp(), 0.0)
    b = powered.gather(1, label).squeeze(1)
    a = powered.scatter(1, label, 0.0).sum(1)
    others = log_p.exp().scatter(1, label, 0.0).sum(1)

    def spread(log_k: float) -> float:
        k = math.exp(log_k)
        top = 1 - k * others
        if float(top.min()) <= 0:
            return math.inf
        expected = (a + b).log() - (k**fit.alpha * a + top**fit.alpha).log()
        left = fit.factor.log() - expected
        return float(left.max() - left.min())

    grid = torch.linspace(-40, 12, 521).tolist()
    best = min(grid, key=spread)
    low, high = best - 0.1, best + 0.1
    for _ in range(60):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        if spread(left) < spread(right):
            high = right
        else:
            low = left
    return min(spread(best), spread((low + high) / 2)) <= tolerance


def _explained_by_prediction(rows: Rows, fit: Fit) -> float | None:
    """The share of the variance of the factors that the predictions explain; None: too few rows.

    The regression is on a quadratic in ``log p_t``, ``log (1 - p_t)`` and ``log sum p^alpha``.
    """
    finite = rows.finite
    log_p = torch.where(finite, -rows.surprise, -math.inf)
    label = fit.label.unsqueeze(1)
    others = log_p.scatter(1, label, -math.inf).logsumexp(1)
    powers = (fit.alpha * log_p).masked_fill(~finite, -math.inf).logsumexp(1)
    features = torch.stack([log_p.gather(1, label).squeeze(1), others, powers], 1)
    features = features - features.mean(0)
    squares = [features[:, i] * features[:, j] for i in range(3) for j in range(i, 3)]
    matrix = torch.cat([torch.ones_like(others).unsqueeze(1), features], 1)
    matrix = torch.cat([matrix, torch.stack(squares, 1)], 1)
    if len(matrix) < 3 * matrix.shape[1]:
        return None
    matrix = matrix / matrix.norm(dim=0).clamp(min=1e-300)
    y = fit.factor.log()
    y = y - y.mean()
    solution = torch.linalg.lstsq(matrix, y.unsqueeze(1), driver="gelsd").solution
    left = y - (matrix @ solution).squeeze(1)
    return 1 - float((left**2).sum() / (y**2).sum())
