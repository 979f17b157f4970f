r"""Tests for the difference between two samples of runs.

Runs are not paired: two runs with the same seed are hardly more similar than two with different
seeds (correlation 0.08 over the studies in ``results/``), so a paired test would only lose degrees
of freedom. The verdict uses Welch's t test, which allows different variances. If its assumptions
are doubtful, the sentence of a verdict also reports a permutation test and a rank test.

References:
    Welch, *The generalization of Student's problem when several different population variances are
    involved*, 1947. Clopper and Pearson, *The use of confidence or fiducial limits*, 1934.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

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

    def judge(self, level: float, margin: float) -> tuple[Array, NDArray[np.bool_]]:
        """The sign if the interval excludes 0, otherwise 0; whether it is equivalent otherwise."""
        size, reach = np.abs(self.mean), self.reach(level)
        differs = (self.error > 0) & (size > reach)
        is_equivalent = (self.error > 0) & ~differs & (size + reach < margin)
        return np.where(differs, np.sign(self.mean), 0), is_equivalent


def welch(arm: ArrayLike, baseline: ArrayLike, *, step: float = 0.0) -> Difference:
    r"""Welch's comparison of two means with different variances."""
    a, b = np.asarray(arm, float), np.asarray(baseline, float)
    va, vb = (np.maximum(_variance(x), step**2 / 12) / x.shape[-1] for x in (a, b))
    squared = va + vb
    # Welch and Satterthwaite; if nothing varies, the degrees of freedom do not matter.
    below = va**2 / (a.shape[-1] - 1) + vb**2 / (b.shape[-1] - 1)
    df = np.divide(squared**2, below, out=np.ones_like(squared), where=below > 0)
    return Difference(a.mean(-1) - b.mean(-1), np.sqrt(squared), df)


def _variance(x: Array) -> Array:
    """The variance of each sample; 0 if it is only rounding error."""
    variance = np.var(x, axis=-1, ddof=1)
    return np.where(variance > (1e-12 * np.abs(x).max(-1)) ** 2, variance, 0.0)


def pooled_sd(samples: Sequence[Array]) -> float:
    """The standard deviation within samples of two or more runs."""
    squares = sum(float(sample.var(ddof=1)) * (len(sample) - 1) for sample in samples)
    return math.sqrt(squares / sum(len(sample) - 1 for sample in samples))


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """Student's 95% interval for a mean."""
    x = np.asarray(values, float)
    error, df = x.std(ddof=1) / math.sqrt(len(x)), np.array(len(x) - 1.0)
    reach = float(Difference(x.mean(), error, df).reach(0.05))
    return float(x.mean()) - reach, float(x.mean()) + reach


@functools.lru_cache(maxsize=1024)  # a report asks several times for the same two samples
def permutation_p(arm: tuple[float, ...], baseline: tuple[float, ...]) -> float:
    """The two-sided p-value of a permutation test of the means.

    All divisions of the runs into two groups are counted if there are few, otherwise 9,999 random
    ones.
    """
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
