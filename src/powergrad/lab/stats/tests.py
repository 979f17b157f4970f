r"""Tests for the difference between two samples of runs.

The verdict uses Welch's t test, which allows different variances; or Student's for the differences
within pairs of runs with the same seed, if these are correlated; or the normal distribution, if the
noise is known. If the assumptions of Welch's test are doubtful, the sentence of a verdict also
reports a permutation test and a rank test. Numbers of failed runs are compared by Fisher's test.

References:
    Welch, *The generalization of Student's problem when several different population variances are
    involved*, 1947. Clopper and Pearson, *The use of confidence or fiducial limits*, 1934. Fisher,
    *The logic of inductive inference*, 1935.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


class Difference(NamedTuple):
    """A mean difference, its standard error and degrees of freedom, one of each per study."""

    mean: Array
    error: Array
    df: Array

    def p(self) -> Array:
        """The two-sided p-value; 1 if neither sample varies."""
        from scipy.special import stdtr  # slow to import

        t = np.divide(self.mean, self.error, out=np.zeros_like(self.mean), where=self.error > 0)
        return 2 * stdtr(self.df, -np.abs(t))

    def reach(self, level: float) -> Array:
        """Half of the width of the interval with confidence ``1 - level``."""
        from scipy.special import stdtrit  # slow to import

        return -stdtrit(self.df, level / 2) * self.error

    def judge(
        self, level: float, margin: float, is_last: bool = True
    ) -> tuple[Array, NDArray[np.bool_]]:
        """The sign if the interval excludes 0, otherwise 0; and whether it is inside the margin.

        Before the last look, the sign of a difference that does not exceed the margin is 0, too.
        """
        size, reach = np.abs(self.mean), self.reach(level)
        differs = (self.error > 0) & (size > reach) & (is_last | (size > margin))
        is_equivalent = (self.error > 0) & (size + reach < margin)
        return np.where(differs, np.sign(self.mean), 0), is_equivalent


@dataclass(frozen=True)
class Noise:
    """The variation of runs that differ only in their seed."""

    sigma: float  # standard deviation of a run
    runs: int  # runs from which it was estimated; 0 if it was given
    df: int = 0  # degrees of freedom of the estimate
    source: str = ""  # where it is from, for people

    def interval(self) -> tuple[float, float]:
        """The 95% interval of sigma, by the chi-square distribution of a normal variance."""
        from scipy.special import chdtri  # slow to import

        df = self.df or self.runs - 1
        low, high = chdtri(df, [0.025, 0.975])
        return self.sigma * math.sqrt(df / low), self.sigma * math.sqrt(df / high)

    def is_exceeded(self, sd: float, df: int) -> bool:
        """Whether runs vary more, at the level of 1% (chi-square test, or F test)."""
        from scipy.special import chdtrc, fdtrc  # slow to import

        ratio = (sd / self.sigma) ** 2
        return (fdtrc(df, self.df, ratio) if self.df else chdtrc(df, df * ratio)) < 0.01


def compare_means(
    arm: ArrayLike,
    baseline: ArrayLike,
    *,
    step: float = 0.0,
    noise: Noise | None = None,
    is_paired: bool = False,
) -> Difference:
    """The comparison of two samples, or of a sample with a number, by the test that fits them."""
    a, b = np.asarray(arm, float), np.asarray(baseline, float)
    if noise is not None:
        each = 1 / a.shape[-1] + (1 / b.shape[-1] if b.ndim else 0.0)
        mean = a.mean(-1) - (b.mean(-1) if b.ndim else b)
        df = np.full_like(mean, noise.df or math.inf)
        return Difference(mean, np.full_like(mean, noise.sigma * math.sqrt(each)), df)
    if not is_paired and b.ndim:
        return welch(a, b, step=step)
    d = a - b
    squared = np.maximum(variance(d), step**2 / 6) / d.shape[-1]
    return Difference(d.mean(-1), np.sqrt(squared), np.full_like(squared, d.shape[-1] - 1))


def correlation(arm: ArrayLike, baseline: ArrayLike) -> Array:
    """The correlation of paired samples; 0 if one of them does not vary."""
    a, b = (x - x.mean(-1, keepdims=True) for x in (np.asarray(arm), np.asarray(baseline)))
    size = np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
    varies = (variance(arm) > 0) & (variance(baseline) > 0)
    return np.divide((a * b).sum(-1), size, out=np.zeros_like(size), where=varies)


def should_pair(correlation: float, pairs: int) -> bool:
    """Whether samples are compared in pairs: their correlation is above 0 (1%, one-sided)."""
    from scipy.special import stdtrit  # slow to import

    t = float(stdtrit(pairs - 2, 0.99))
    return correlation > t / math.sqrt(pairs - 2 + t * t)


def welch(arm: ArrayLike, baseline: ArrayLike, *, step: float = 0.0) -> Difference:
    r"""Welch's comparison of two means with different variances."""
    a, b = np.asarray(arm, float), np.asarray(baseline, float)
    va, vb = (np.maximum(variance(x), step**2 / 12) / x.shape[-1] for x in (a, b))
    squared = va + vb
    # Welch and Satterthwaite; if nothing varies, the degrees of freedom do not matter.
    below = va**2 / (a.shape[-1] - 1) + vb**2 / (b.shape[-1] - 1)
    df = np.divide(squared**2, below, out=np.ones_like(squared), where=below > 0)
    return Difference(a.mean(-1) - b.mean(-1), np.sqrt(squared), df)


def variance(x: ArrayLike) -> Array:
    """The variance of each sample; 0 if it is only rounding error."""
    values = np.asarray(x, float)
    found = values.var(-1, ddof=1)
    return np.where(found > (1e-12 * np.abs(values).max(-1)) ** 2, found, 0.0)


def pooled_sd(samples: Sequence[Array]) -> float:
    """The standard deviation within samples of two or more runs."""
    squares = sum(float(sample.var(ddof=1)) * (len(sample) - 1) for sample in samples)
    return math.sqrt(squares / sum(len(sample) - 1 for sample in samples))


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """Student's 95% interval for a mean."""
    found = compare_means(values, 0.0)
    reach = found.reach(0.05)
    return float(found.mean - reach), float(found.mean + reach)


@functools.lru_cache(maxsize=1024)  # a report asks several times for the same two samples
def permutation_p(arm: tuple[float, ...], baseline: tuple[float, ...]) -> float:
    """The two-sided p-value of a permutation test of the means, with at most 9,999 divisions."""
    from scipy.stats import permutation_test  # slow to import

    def statistic(a: Array, b: Array, axis: int) -> Array:
        return np.abs(a.mean(axis) - b.mean(axis))

    result = permutation_test(
        (np.array(arm), np.array(baseline)),
        statistic,
        alternative="greater",
        n_resamples=9_999,
        rng=np.random.default_rng(0),
    )
    return float(result.pvalue)


def rank_p(arm: ArrayLike, baseline: ArrayLike) -> float:
    """The two-sided p-value of the Mann-Whitney rank test."""
    from scipy.stats import mannwhitneyu  # slow to import

    return float(mannwhitneyu(arm, baseline, alternative="two-sided").pvalue)


def failure_bound(failures: int, runs: int) -> float:
    """The one-sided upper 95% confidence bound of Clopper and Pearson for a failure rate."""
    from scipy.special import betaincinv  # slow to import

    return 1.0 if failures >= runs else float(betaincinv(failures + 1, runs - failures, 0.95))


@functools.lru_cache(maxsize=4096)
def failures_p(failed: int, runs: int, failed_baseline: int, runs_baseline: int) -> float:
    """The two-sided p-value of Fisher's exact test of two numbers of failed runs."""
    from scipy.stats import fisher_exact  # slow to import

    table = [[failed, runs - failed], [failed_baseline, runs_baseline - failed_baseline]]
    result: Any = fisher_exact(table)
    return float(result.pvalue)


def step_of(values: Sequence[float]) -> float:
    """The largest step of which all differences are multiples; 0 for a continuous metric."""
    rounding, step = 1e-9 * max(map(abs, values), default=0.0), 0.0
    for gap in np.diff(np.unique(values)).tolist():
        while gap > rounding:  # Euclid's algorithm
            step, gap = gap, step % gap
    return step if step > 1e3 * rounding else 0.0


def check_positive(value: float, name: str) -> float:
    """Return `value`; raise ValueError if it is not positive and finite."""
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"Expected `{name}` to be positive and finite, but got {value}.")
    return value
