r"""The statistics of a comparison: does an arm differ from the baseline, by how much, how surely?

Runs are paired by seed: an arm and the baseline that share a seed share their data order and their
start, and what is tested is the difference within each pair. The verdict on ``m`` arms:

1. *better* or *worse*, by the sign of the mean difference, if the exact two-sided sign-flip test,
   corrected by Holm for ``m`` comparisons, gives ``p < 0.05``;
2. else *equivalent* within a margin, if two one-sided t tests say so;
3. else *underpowered*, with the smallest difference that this many seeds would have found, and the
   number of seeds that would settle it.

The sign-flip test has ``2^n`` outcomes, so its smallest p is ``2 / 2^n``: below
:func:`least_seeds` it cannot speak, and the verdict is *underpowered* whatever the numbers are.

References:
    Fisher, *The Design of Experiments*, 1935 (the sign-flip test). Holm, *A simple sequentially
    rejective multiple test procedure*, 1979. Schuirmann, *A comparison of the two one-sided tests
    procedure and the power approach*, 1987. Hartigan, *Using subsample values as typical values*,
    1969. Owen, *The pigeonhole bootstrap*, 2007. Agarwal et al., *Deep reinforcement learning at
    the edge of the statistical precipice*, 2021 (probability of improvement).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from powergrad.lab.plan import (
    CELLS,
    EXACT,
    check_fraction,
    check_positive,
    check_step,
    least_seeds,
    minimum_detectable_effect,
    seeds_to_settle,
    t_beyond,
    t_critical,
    t_shift,
)

__all__ = [
    "Comparison",
    "by_arm_and_seed",
    "compare",
    "crossed_bootstrap",
    "holm",
    "probability_of_improvement",
    "sign_flip_test",
    "signed",
    "span",
    "t_interval",
    "tost",
    "welch",
]

Array = NDArray[np.float64]
Verdict = Literal["better", "worse", "equivalent", "underpowered"]


# Tests -------------------------------------------------------------------------------------------


def sign_flip_test(differences: ArrayLike, *, draws: int = 99_999, seed: int = 0) -> Array:
    r"""Two-sided sign-flip test of paired differences, ``H0``: symmetric about 0.

    If the arm and the baseline are the same, swapping them within a pair changes nothing, so each
    difference is as likely as its negative. The p-value is the share of the ``2^n`` sign patterns
    ``s`` with ``|sum(s * d)| >= |sum(d)|``. It assumes no distribution, and is exact up to 20
    differences; beyond, ``draws`` random patterns give ``(b + 1) / (draws + 1)``.

    Args:
        differences: Shape (..., n): one study of n differences, or many.
        draws: Number of random patterns where there are more than 20 differences.
        seed: Seed of those patterns.

    Returns:
        One p-value a study: the shape of ``differences`` without its last dimension.

    Raises:
        ValueError: If there are no differences, or one is not finite.

    Example:
        >>> float(sign_flip_test([0.3, 0.1, 0.4, 0.2, 0.5, 0.3]))  # all of one sign: 2 / 2^6
        0.03125
    """
    d = _finite(differences, "differences")
    n = d.shape[-1]
    rows = d.reshape(-1, n)
    # Sums that are equal in the real numbers differ by rounding: this much counts as equal.
    least = np.abs(rows.sum(-1)) - 1e-9 * np.abs(rows).sum(-1)
    p = np.empty(len(rows))
    if n <= EXACT:
        step = max(1, CELLS >> n)
        for i in range(0, len(rows), step):
            part = rows[i : i + step]
            sums = part[:, :1]  # a pattern and its opposite count alike: the first sign stays
            for column in part.T[1:, :, None]:
                sums = np.concatenate([sums + column, sums - column], axis=1)
            p[i : i + step] = (np.abs(sums) >= least[i : i + step, None]).mean(1)
    else:
        signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=(n, draws))
        for i, row in enumerate(rows):
            p[i] = ((np.abs(row @ signs) >= least[i]).sum() + 1) / (draws + 1)
    return p.reshape(d.shape[:-1])


def holm(p_values: ArrayLike) -> Array:
    r"""Holm's step-down adjustment: reject where the result is below the level.

    With ``p_(1) <= ... <= p_(m)``, the adjusted ``p_(i)`` is the largest of
    ``(m - j + 1) p_(j)`` over ``j <= i``, at most 1. The chance of any false rejection stays below
    the level, whatever the dependence between the comparisons (they share the baseline).

    Args:
        p_values: Shape (..., m): the p-values of m comparisons.

    Returns:
        The adjusted p-values, in the same order and shape.

    Raises:
        ValueError: If a p-value is outside [0, 1].

    Example:
        >>> holm([0.01, 0.04, 0.03])
        array([0.03, 0.06, 0.06])
    """
    p = _finite(p_values, "p_values")
    if ((p < 0) | (p > 1)).any():
        raise ValueError(f"Expected `p_values` to be in [0, 1], but got {p_values}.")
    order = p.argsort(-1, kind="stable")
    factors = np.arange(p.shape[-1], 0, -1)
    stepped = np.maximum.accumulate(np.take_along_axis(p, order, -1) * factors, -1)
    adjusted = np.empty_like(p)
    np.put_along_axis(adjusted, order, np.minimum(stepped, 1), -1)
    return adjusted


class _Difference(NamedTuple):
    """A mean difference, its standard error, and that error's degrees of freedom."""

    mean: float
    error: float
    df: float
    sd: float  # of a difference between two runs

    def interval(self, level: float) -> tuple[float, float]:
        reach = t_critical(level / 2, self.df) * self.error
        return self.mean - reach, self.mean + reach

    def p(self) -> float:
        return min(1.0, 2 * self._beyond(abs(self.mean)))

    def tost(self, margin: float) -> float:
        return self._beyond(margin - abs(self.mean))  # the larger of the two one-sided p-values

    def _beyond(self, distance: float) -> float:
        """The chance that an estimate lies so far above its mean."""
        if self.error == 0:  # every pair differs by the same amount
            return 0.0 if distance > 0 else 1.0
        return t_beyond(distance / self.error, self.df)


def _paired(differences: Array) -> _Difference:
    n, mean, sd = len(differences), float(differences.mean()), float(differences.std(ddof=1))
    sd = sd if sd > 1e-9 * abs(mean) else 0.0  # a spread that is only rounding is none
    return _Difference(mean, sd / math.sqrt(n), n - 1, sd)


def _unpaired(arm: Array, baseline: Array) -> _Difference:
    n, k = len(arm), len(baseline)
    a, b = float(arm.var(ddof=1)), float(baseline.var(ddof=1))
    error2 = a / n + b / k
    # Welch and Satterthwaite; with no variance at all any number of degrees will do.
    df = error2**2 / ((a / n) ** 2 / (n - 1) + (b / k) ** 2 / (k - 1)) if error2 else 1.0
    mean = float(arm.mean() - baseline.mean())
    return _Difference(mean, math.sqrt(error2), df, math.sqrt(a + b))


def t_interval(differences: ArrayLike, level: float = 0.05) -> tuple[float, float]:
    r"""Student's interval for the mean of paired differences, ``mean +- t * sd / sqrt(n)``.

    Args:
        differences: Shape (n,), n at least 2.
        level: One minus the confidence: 0.05 gives a 95% interval.

    Returns:
        The two ends.

    Raises:
        ValueError: If there are fewer than 2 differences, or one is not finite.

    Example:
        >>> low, high = t_interval([0.3, 0.1, 0.4, 0.2])
        >>> round(low, 3), round(high, 3)
        (0.045, 0.455)
    """
    return _paired(_sample(differences, "differences")).interval(check_fraction(level, "level"))


def tost(differences: ArrayLike, margin: float) -> float:
    r"""Two one-sided paired t tests, ``H0``: the mean difference is ``margin`` or more either way.

    A small p says *equivalent*: the mean lies inside ``(-margin, margin)``. It is below 0.05
    exactly when the 90% t interval lies inside.

    Args:
        differences: Shape (n,), n at least 2. If all are equal the answer is certain: 0 or 1.
        margin: The largest difference that does not matter, positive.

    Returns:
        The larger of the two p-values.

    Raises:
        ValueError: If there are fewer than 2 differences, one is not finite, or ``margin`` is not
            positive.

    Example:
        >>> round(tost([0.02, -0.05, 0.04, 0.01, -0.03, 0.02], margin=0.1), 4)
        0.0005
    """
    return _paired(_sample(differences, "differences")).tost(check_positive(margin, "margin"))


def welch(arm: ArrayLike, baseline: ArrayLike) -> float:
    r"""Welch's t test of two unpaired samples, ``H0``: equal means; variances may differ.

    Args:
        arm: Shape (n,), n at least 2.
        baseline: Shape (k,), k at least 2.

    Returns:
        The two-sided p-value; where neither sample varies, 1 if they are equal and else 0.

    Raises:
        ValueError: If a sample has fewer than 2 values, or one that is not finite.

    Example:
        >>> round(welch([0.9, 1.1, 1.0], [0.5, 0.7, 0.6]), 4)
        0.008
    """
    return _unpaired(_sample(arm, "arm"), _sample(baseline, "baseline")).p()


# Resampling --------------------------------------------------------------------------------------


def crossed_bootstrap(
    arm: ArrayLike,
    baseline: ArrayLike,
    *,
    paired: bool = True,
    resamples: int = 2000,
    level: float = 0.05,
    seed: int = 0,
) -> tuple[float, float]:
    r"""Percentile interval of a mean difference, over other seeds *and* other test examples.

    The t interval asks what other seeds would give on the same test set. Here each resample draws
    seeds and examples, both with replacement and independently of each other, the same examples
    for all runs: Owen's pigeonhole bootstrap. It counts what seeds and examples share three times
    over, so it is too wide rather than too narrow there; with few seeds it is, like any bootstrap,
    narrower by about ``sqrt((n - 1) / n)`` than it should be.

    Args:
        arm: Shape (seeds, examples): what each example adds, 0 or 1 (or 0 or 100 for per cent).
        baseline: Shape (seeds, examples), the same examples in the same order.
        paired: Whether row i of both has the same seed. If not, the seeds of the two are drawn
            apart, and their numbers may differ.
        resamples: Number of resamples.
        level: One minus the confidence.
        seed: Seed of the resampling.

    Returns:
        The two ends, in the unit of the arrays.

    Raises:
        ValueError: If the shapes do not fit, or a value is not finite.

    Example:
        >>> wins, losses = [[1, 1, 1, 0], [1, 1, 0, 1]], [[0, 1, 0, 0], [1, 0, 0, 1]]
        >>> crossed_bootstrap(wins, losses)
        (0.0, 0.75)
    """
    a, b = _finite(arm, "arm"), _finite(baseline, "baseline")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or (paired and len(a) != len(b)):
        raise ValueError(
            "Expected `arm` and `baseline` to have shape (seeds, examples) with the same examples"
            f"{' and seeds' if paired else ''}, but got {a.shape} and {b.shape}."
        )
    rng = np.random.default_rng(seed)
    examples = a.shape[1]
    blocks = [a - b] if paired else [a, -b]
    rows = np.concatenate(blocks)
    means = np.empty(resamples)
    step = max(1, CELLS // examples)
    for i in range(0, resamples, step):
        size = min(step, resamples - i)
        # How often each example is drawn, then the mean of each run over them, (size, seeds).
        counts = _counts(rng, size, examples)
        of_run = counts @ rows.T / examples
        weights = np.concatenate(
            [_counts(rng, size, len(block)) / len(block) for block in blocks], axis=1
        )
        means[i : i + size] = (weights * of_run).sum(1)
    return _percentiles(means, level)


def probability_of_improvement(
    arm: ArrayLike,
    baseline: ArrayLike,
    *,
    higher_is_better: bool = True,
    paired: bool = True,
    resamples: int = 2000,
    level: float = 0.05,
    seed: int = 0,
) -> tuple[float, tuple[float, float]]:
    r"""``P(arm beats baseline)`` for two runs with any seeds, ties counting half.

    The share of all pairs (i, j) in which run i of the arm is better than run j of the baseline:
    Mann and Whitney's U over its maximum. The interval is a percentile bootstrap over seeds.

    Args:
        arm: Shape (n,).
        baseline: Shape (k,).
        higher_is_better: Whether the larger value wins.
        paired: Whether the two are in order of the same seeds, which are then drawn together.
        resamples: Number of resamples.
        level: One minus the confidence of the interval.
        seed: Seed of the resampling.

    Returns:
        The probability, and the two ends of its interval.

    Raises:
        ValueError: If a sample has fewer than 2 values or one that is not finite, or if paired
            ones differ in length.

    Example:
        >>> probability, interval = probability_of_improvement([3, 4, 5], [1, 2, 3])
        >>> round(probability, 3)  # 8 of 9 pairs are won, one is tied
        0.944
    """
    a, b = _sample(arm, "arm"), _sample(baseline, "baseline")
    if paired and len(a) != len(b):
        raise ValueError(f"Expected paired values, one of each a seed, but got {len(a)}, {len(b)}.")
    sign = 1 if higher_is_better else -1
    wins = (np.sign(sign * _subtract(a[:, None], b)) + 1) / 2
    rng = np.random.default_rng(seed)
    of_arm = _counts(rng, resamples, len(a)) / len(a)
    of_baseline = of_arm if paired else _counts(rng, resamples, len(b)) / len(b)
    return float(wins.mean()), _percentiles(((of_arm @ wins) * of_baseline).sum(1), level)


def _counts(rng: np.random.Generator, resamples: int, n: int) -> Array:
    """How often each of n things is drawn in n draws with replacement, (resamples, n)."""
    drawn = rng.integers(n, size=(resamples, n)) + n * np.arange(resamples)[:, None]
    return np.bincount(drawn.ravel(), minlength=resamples * n).reshape(resamples, n).astype(float)


def _percentiles(values: Array, level: float) -> tuple[float, float]:
    low, high = np.quantile(values, [level / 2, 1 - level / 2])
    return float(low), float(high)


# The verdict -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` says of one arm.

    Attributes:
        arm: Name of the arm.
        baseline: Name of what it is compared with.
        metric: What is compared, as the sentence calls it.
        paired: Whether the two share seeds. If not, Welch's test takes the place of the others.
        n: Number of pairs; of runs of the smaller arm where not paired.
        dropped: Number of runs without a partner of the same seed, which are left out.
        comparisons: Number of comparisons that Holm corrects for.
        difference: Mean of arm minus baseline, in the unit of the metric.
        interval: Its t interval, 95% at the level 0.05; not corrected for other comparisons.
        p: p-value of the sign-flip test.
        p_adjusted: The same after Holm's correction. The verdict uses this.
        tost_p: p-value of the two one-sided tests. Small: equivalent within the margin.
        welch_p: p-value of Welch's t test, as a check. It ignores the pairing.
        probability_of_improvement: Share of all pairs of runs in which the arm is better.
        probability_interval: Its bootstrap interval.
        bootstrap_interval: Interval of the difference, over seeds and test examples; None if no
            examples were given.
        margin: The largest difference that does not matter.
        level: The level of every test.
        sd: Standard deviation of a difference.
        error: Standard error of the mean difference.
        df: Its degrees of freedom.
        step: The steps in which the metric moves; 0 if it is continuous.
        power: The power that ``mde`` and ``seeds_needed`` are for.
        verdict: "better", "worse", "equivalent" or "underpowered".
    """

    arm: str
    baseline: str
    metric: str
    paired: bool
    n: int
    dropped: int
    comparisons: int
    difference: float
    interval: tuple[float, float]
    p: float
    p_adjusted: float
    tost_p: float
    welch_p: float
    probability_of_improvement: float
    probability_interval: tuple[float, float]
    bootstrap_interval: tuple[float, float] | None
    margin: float
    level: float
    sd: float
    error: float
    df: float
    step: float
    power: float
    verdict: Verdict

    @functools.cached_property
    def mde(self) -> float | None:
        """The smallest difference that would have been found at this n and noise.

        None if the seeds are too few to find any. Like ``seeds_needed`` it may take a simulation,
        so both wait until they are asked for.
        """
        if self.paired:
            return minimum_detectable_effect(self.sd, self.n, **self._test)
        return self.error * t_shift(self.df, self.level / self.comparisons, self.power)

    @functools.cached_property
    def seeds_needed(self) -> int:
        """Number of seeds that would settle it: see :func:`seeds_to_settle`."""
        return seeds_to_settle(self.sd, self.margin, **self._test)

    @property
    def _test(self) -> dict[str, Any]:
        return {
            "comparisons": self.comparisons,
            "power": self.power,
            "level": self.level,
            "step": self.step,
        }

    @property
    def sentence(self) -> str:
        """The verdict in plain words, with its numbers."""
        unit = f" {self.metric}" if self.metric else ""
        half = (self.interval[1] - self.interval[0]) / 2
        digits = self._decimals(half)
        mean = signed(self.difference, digits)
        within = f"{100 * (1 - self.level):g}% interval {span(self.interval, digits)}"
        corrected = f" after correction for {self.comparisons} comparisons"
        p = _p_words(self.p_adjusted) + (corrected if self.comparisons > 1 else "")
        margin = f"{self.margin:g}"

        if self.verdict in ("better", "worse"):
            words = (
                f"{self.arm} is {self.verdict} than {self.baseline}: {mean}{unit} "
                f"({within}, {p}, n = {self.n})."
            )
            if self.tost_p < self.level:
                words += f" The difference is smaller than the margin of {margin}."
        elif self.verdict == "equivalent":
            words = (
                f"{self.arm} is equivalent to {self.baseline} within {margin}{unit}: {mean} "
                f"({within}, two one-sided tests {_p_words(self.tost_p)}, n = {self.n})."
            )
        else:
            words = (
                f"{self.arm} against {self.baseline} is underpowered: {mean}{unit} "
                f"({within}, {p}, n = {self.n}). "
            )
            if self.mde is None:
                least = least_seeds(self.comparisons, self.level)
                of = "1 comparison" if self.comparisons == 1 else f"{self.comparisons} comparisons"
                words += (
                    f"With {of} the test needs at least {least} seeds to reach "
                    f"p < {self.level:g}, and there are {self.n}; "
                )
            else:
                found = f"{self.mde:.{self._decimals(self.mde)}f}"
                words += (
                    f"With {self.n} seeds a difference of {found} or more is found with "
                    f"{100 * self.power:g}% power; "
                )
            words += f"{self.seeds_needed} seeds would settle it for a margin of {margin}."
        if not self.paired:
            words += " The arms share too few seeds to be paired, so Welch's test decides."
        elif self.dropped:
            runs = "1 run" if self.dropped == 1 else f"{self.dropped} runs"
            words += f" {runs} without a partner of the same seed left out."
        return words

    def _decimals(self, size: float) -> int:
        """How many decimals show two digits of a number, down to a tenth of the margin."""
        return max(0, 1 - math.floor(math.log10(max(size, self.margin / 10))))

    def to_dict(self) -> dict[str, Any]:
        """Every field, the detectable difference, the seeds needed and the sentence, for JSON."""
        described = {**asdict(self), "mde": self.mde, "seeds_needed": self.seeds_needed}
        for name, value in described.items():
            if isinstance(value, tuple):
                described[name] = list(value)
        return {**described, "sentence": self.sentence}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Comparison:
        """What :meth:`to_dict` wrote; JSON has null for numbers that are not finite."""
        given: dict[str, Any] = {}
        for field in fields(cls):
            value = values.get(field.name)  # an early file lacks some
            if isinstance(value, list):
                value = tuple(math.nan if end is None else end for end in value)
            elif value is None and field.name != "bootstrap_interval":
                value = math.nan
            given[field.name] = value
        comparison = cls(**given)
        # Both may take a simulation, so what was computed once is kept.
        comparison.__dict__.update(mde=values["mde"], seeds_needed=values["seeds_needed"])
        return comparison


def compare(
    values: Mapping[str, Mapping[int, float]],
    baseline: str,
    *,
    margin: float,
    higher_is_better: bool = True,
    alpha_level: float = 0.05,
    power: float = 0.8,
    metric: str = "",
    step: float | None = None,
    examples: Mapping[str, Mapping[int, ArrayLike]] | None = None,
    resamples: int = 2000,
    seed: int = 0,
) -> list[Comparison]:
    r"""Compare every arm with the baseline, and say better, worse, equivalent or underpowered.

    The rule is at the head of this module. Arms are paired with the baseline by the seeds that
    both have; where that is fewer than two, Welch's t test stands for the sign-flip test, the
    interval and the one-sided tests.

    Args:
        values: For each arm, the metric of each seed at the end of its run.
        baseline: Name of the arm that the others are compared with.
        margin: The largest difference that does not matter, in the unit of the metric.
        higher_is_better: Whether a larger metric is better.
        alpha_level: The level of every test; 1 minus the confidence of every interval.
        power: The power for which the detectable difference and the seeds needed are given.
        metric: What the metric is, for the sentence: "points of test accuracy".
        step: The steps in which the metric moves, as 100 / 360 for the accuracy in per cent on 360
            examples, for the power of the test; 0 if it is continuous. None: as the values have it.
        examples: For each arm and seed of ``values``, what each test example adds: its mean is the
            metric (0 or 100 an example for per cent). With it, the crossed bootstrap is done.
        resamples: Number of bootstrap resamples.
        seed: Seed of the resampling.

    Returns:
        One comparison an arm, in the order of ``values``.

    Raises:
        ValueError: If there is no other arm, ``baseline`` is not among them, an arm has fewer than
            two seeds, a metric is not finite, or another argument is out of range.
        TypeError: If a metric is not a number.

    Example:
        >>> accuracy = {
        ...     "baseline": {0: 97.2, 1: 97.5, 2: 96.9, 3: 97.4, 4: 97.1, 5: 97.3},
        ...     "pgt": {0: 97.8, 1: 97.7, 2: 97.5, 3: 97.6, 4: 97.9, 5: 97.7},
        ... }
        >>> (result,) = compare(accuracy, "baseline", margin=0.2, metric="points of accuracy")
        >>> result.verdict
        'better'
        >>> print(result.sentence)  # doctest: +NORMALIZE_WHITESPACE
        pgt is better than baseline: +0.47 points of accuracy
        (95% interval +0.21 to +0.72, p = 0.031, n = 6).
    """
    runs = _checked(values, baseline)
    check_positive(margin, "margin")
    check_fraction(alpha_level, "alpha_level")
    check_fraction(power, "power")
    arms = [arm for arm in runs if arm != baseline]
    m = len(arms)
    if step is None:
        step = _step([value for of_arm in runs.values() for value in of_arm.values()])
    check_step(step)
    samples = [_match(runs[arm], runs[baseline]) for arm in arms]
    p_values = [
        float(sign_flip_test(s.differences, seed=seed)) if s.paired else s.summary.p()
        for s in samples
    ]
    results = []
    for arm, s, p, p_adjusted in zip(arms, samples, p_values, holm(p_values), strict=True):
        summary = s.summary
        can_speak = not s.paired or s.n >= least_seeds(m, alpha_level)
        tost_p = summary.tost(margin)
        improvement = (summary.mean > 0) == higher_is_better
        verdict: Verdict = "underpowered"
        if p_adjusted < alpha_level:
            verdict = "better" if improvement else "worse"
        elif tost_p < alpha_level and can_speak:
            verdict = "equivalent"
        chance, chance_interval = probability_of_improvement(
            s.arm,
            s.baseline,
            higher_is_better=higher_is_better,
            paired=s.paired,
            resamples=resamples,
            level=alpha_level,
            seed=seed,
        )
        bootstrap = None
        if examples is not None:
            bootstrap = crossed_bootstrap(
                _examples_of(examples, arm, s.arm_seeds, s.arm),
                _examples_of(examples, baseline, s.baseline_seeds, s.baseline),
                paired=s.paired,
                resamples=resamples,
                level=alpha_level,
                seed=seed,
            )
        results.append(
            Comparison(
                arm=arm,
                baseline=baseline,
                metric=metric,
                paired=s.paired,
                n=s.n,
                dropped=s.dropped,
                comparisons=m,
                difference=summary.mean,
                interval=summary.interval(alpha_level),
                p=p,
                p_adjusted=float(p_adjusted),
                tost_p=tost_p,
                welch_p=welch(s.arm, s.baseline),
                probability_of_improvement=chance,
                probability_interval=chance_interval,
                bootstrap_interval=bootstrap,
                margin=float(margin),
                level=alpha_level,
                sd=summary.sd,
                error=summary.error,
                df=summary.df,
                step=step,
                power=power,
                verdict=verdict,
            )
        )
    return results


def signed(value: float, digits: int = 2) -> str:
    """A difference with its sign, and zero always as +0.

    Example:
        >>> signed(0.524), signed(-0.004)
        ('+0.52', '+0.00')
    """
    return f"{round(value, digits) + 0.0:+.{digits}f}"


def span(interval: Sequence[float], digits: int = 2) -> str:
    """An interval in words. Its ends keep their signs: whether it holds 0 must be seen.

    Example:
        >>> span((-0.003, 2.01))
        '-0.00 to +2.01'
    """
    low, high = (f"{end + 0.0:+.{digits}f}" for end in interval)
    return f"{low} to {high}"


def by_arm_and_seed(rows: Iterable[tuple[str, int, float]]) -> dict[str, dict[int, float]]:
    """Gather rows of (arm, seed, metric), as a CSV file has them, into what `compare` takes.

    Args:
        rows: The rows, in any order.

    Returns:
        For each arm, the metric of each seed.

    Raises:
        ValueError: If an arm has a seed twice.

    Example:
        >>> by_arm_and_seed([("pgt", 0, 0.9), ("pgt", 1, 0.8), ("baseline", 0, 0.7)])
        {'pgt': {0: 0.9, 1: 0.8}, 'baseline': {0: 0.7}}
    """
    values: dict[str, dict[int, float]] = {}
    for arm, seed, value in rows:
        of_arm = values.setdefault(arm, {})
        if seed in of_arm:
            raise ValueError(
                f"Expected each seed once an arm, but got seed {seed} twice in {arm!r}."
            )
        of_arm[seed] = value
    return values


class _Matched(NamedTuple):
    """The runs of an arm and of the baseline that are compared."""

    paired: bool
    arm_seeds: list[int]
    baseline_seeds: list[int]
    arm: Array
    baseline: Array
    dropped: int

    @property
    def n(self) -> int:
        return min(len(self.arm), len(self.baseline))

    @property
    def differences(self) -> Array:
        return _subtract(self.arm, self.baseline)

    @property
    def summary(self) -> _Difference:
        return _paired(self.differences) if self.paired else _unpaired(self.arm, self.baseline)


def _match(arm: Mapping[int, float], baseline: Mapping[int, float]) -> _Matched:
    common = [seed for seed in baseline if seed in arm]
    paired = len(common) >= 2
    of_arm, of_baseline = (common, common) if paired else (list(arm), list(baseline))
    return _Matched(
        paired,
        of_arm,
        of_baseline,
        np.array([arm[seed] for seed in of_arm]),
        np.array([baseline[seed] for seed in of_baseline]),
        len(arm) + len(baseline) - len(of_arm) - len(of_baseline),
    )


def _subtract(a: Array, b: Array) -> Array:
    """``a - b``, where what is only rounding is 0: a sign test would take its sign for real."""
    difference = a - b
    return np.where(np.abs(difference) <= 1e-12 * np.maximum(np.abs(a), np.abs(b)), 0, difference)


def _step(values: list[float]) -> float:
    """The largest step of which all differences are multiples; 0 if there is none to speak of."""
    rounding = 1e-9 * max(map(abs, values))
    step = 0.0
    for gap in np.diff(np.unique(values)).tolist():
        while gap > rounding:  # Euclid's algorithm
            step, gap = gap, step % gap
    return step if step > 1e3 * rounding else 0.0


def _examples_of(
    examples: Mapping[str, Mapping[int, ArrayLike]], arm: str, seeds: list[int], metric: Array
) -> Array:
    rows = []
    for seed, value in zip(seeds, metric, strict=True):
        if seed not in examples.get(arm, {}):
            raise ValueError(f"Expected `examples` to have seed {seed} of {arm!r}, but it has not.")
        row = _finite(examples[arm][seed], "examples")
        if not math.isclose(row.mean(), value, rel_tol=1e-5, abs_tol=1e-9):
            raise ValueError(
                f"Expected `examples` of {arm!r} at seed {seed} to average to its metric, "
                f"{value:g}, but got {row.mean():g}."
            )
        rows.append(row)
    if len({len(row) for row in rows}) > 1:
        raise ValueError(f"Expected `examples` of {arm!r} to be equally many for every seed.")
    return np.stack(rows)


def _p_words(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


# Arguments ---------------------------------------------------------------------------------------


def _checked(
    values: Mapping[str, Mapping[int, float]], baseline: str
) -> dict[str, dict[int, float]]:
    if len(values) < 2:
        raise ValueError(
            f"Expected `values` to hold a baseline and at least one other arm, "
            f"but got {', '.join(map(repr, values)) or 'none'}."
        )
    if baseline not in values:
        names = ", ".join(map(repr, values))
        raise ValueError(f"Expected `baseline` to be one of {names}, but got {baseline!r}.")
    runs: dict[str, dict[int, float]] = {}
    for arm, of_arm in values.items():
        if len(of_arm) < 2:
            raise ValueError(f"Expected at least 2 seeds an arm, but got {len(of_arm)} of {arm!r}.")
        runs[arm] = {seed: _metric(value, arm, seed) for seed, value in of_arm.items()}
    return runs


def _metric(value: float, arm: str, seed: int) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"Expected the metric of {arm!r} at seed {seed} to be a number, but got {value!r}."
        ) from None
    if not math.isfinite(number):
        raise ValueError(
            f"Expected the metric of {arm!r} at seed {seed} to be finite, but got {number}."
        )
    return number


def _finite(values: ArrayLike, name: str) -> Array:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim == 0 or array.shape[-1] == 0:
        raise ValueError(f"Expected `{name}` to hold values, but got shape {array.shape}.")
    if not np.isfinite(array).all():
        raise ValueError(
            f"Expected `{name}` to be finite, but got {array[~np.isfinite(array)][0]}."
        )
    return array


def _sample(values: ArrayLike, name: str) -> Array:
    array = _finite(values, name)
    if array.ndim != 1 or len(array) < 2:
        raise ValueError(f"Expected `{name}` to be 2 values or more, but got shape {array.shape}.")
    return array
