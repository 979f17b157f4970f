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


def welch(arm: ArrayLike, baseline: ArrayLike, *, step: float = 0.0) -> Difference:
    r"""Welch's comparison of two means with different variances.

    Example:
        >>> difference = welch([0.9, 1.1, 1.0], [0.5, 0.7, 0.6])
        >>> round(float(difference.mean), 3), round(float(difference.p()), 4)
        (0.4, 0.008)
    """
    a, b = np.asarray(arm, float), np.asarray(baseline, float)
    n, k = a.shape[-1], b.shape[-1]
    floor = step**2 / 12
    va, vb = (np.maximum(_variance(x), floor) / x.shape[-1] for x in (a, b))
    squared = va + vb
    # Welch and Satterthwaite; if nothing varies, the degrees of freedom do not matter.
    below = va**2 / (n - 1) + vb**2 / (k - 1)
    df = np.divide(squared**2, below, out=np.ones_like(squared), where=below > 0)
    return Difference(a.mean(-1) - b.mean(-1), np.sqrt(squared), df)


def _variance(x: Array) -> Array:
    """The variance of each sample; 0 if it is only rounding error."""
    variance = np.var(x, axis=-1, ddof=1)
    return np.where(variance > (1e-12 * np.abs(x).max(-1)) ** 2, variance, 0.0)


def t_interval(values: Sequence[float], level: float = 0.05) -> tuple[float, float]:
    """Student's interval for a mean.

    Example:
        >>> low, high = t_interval([0.3, 0.1, 0.4, 0.2])
        >>> round(low, 3), round(high, 3)
        (0.045, 0.455)
    """
    from scipy.special import stdtrit  # slow to import

    x = np.asarray(values, float)
    reach = -float(stdtrit(len(x) - 1, level / 2)) * float(x.std(ddof=1)) / math.sqrt(len(x))
    return float(x.mean()) - reach, float(x.mean()) + reach


def permutation_p(arm: ArrayLike, baseline: ArrayLike) -> float:
    """The two-sided p-value of a permutation test of the means.

    All divisions of the runs into two groups are counted if there are few, otherwise 9,999 random
    ones.

    Example:
        >>> permutation_p([5.0, 6.0, 7.0], [1.0, 2.0, 3.0])  # 2 of 20 divisions
        0.1
    """
    samples = np.asarray(arm, float), np.asarray(baseline, float)
    return _permutation_p(*(tuple(sample.tolist()) for sample in samples))


@functools.lru_cache(maxsize=1024)  # a report asks several times for the same two samples
def _permutation_p(arm: tuple[float, ...], baseline: tuple[float, ...]) -> float:
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
    """The two-sided p-value of the Mann-Whitney rank test.

    Example:
        >>> round(rank_p([5.0, 6.0, 7.0, 8.0], [1.0, 2.0, 3.0, 4.0]), 3)
        0.029
    """
    from scipy.stats import mannwhitneyu  # slow to import

    return float(mannwhitneyu(arm, baseline, alternative="two-sided").pvalue)


def failure_bound(failures: int, runs: int, level: float = 0.05) -> float:
    """The one-sided upper confidence bound of Clopper and Pearson for a failure rate.

    Example:
        >>> round(failure_bound(0, 8), 2)  # no failure in 8 runs: up to 31%
        0.31
    """
    from scipy.special import betaincinv  # slow to import

    return 1.0 if failures >= runs else float(betaincinv(failures + 1, runs - failures, 1 - level))


def step_of(values: Sequence[float]) -> float:
    """The largest step of which all differences are multiples; 0 for a continuous metric.

    Example:
        >>> step_of([97.5, 98.0, 99.5]), step_of([0.1, 2**0.5, 3**0.5])
        (0.5, 0.0)
    """
    if not len(values):
        return 0.0
    rounding = 1e-9 * max(map(abs, values))
    step = 0.0
    for gap in np.diff(np.unique(values)).tolist():
        while gap > rounding:  # Euclid's algorithm
            step, gap = gap, step % gap
    return step if step > 1e3 * rounding else 0.0


def check_positive(value: float, name: str) -> float:
    """Return `value`; raise ValueError if it is not positive and finite."""
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"Expected `{name}` to be positive and finite, but got {value}.")
    return value


def check_fraction(value: float, name: str) -> float:
    """Return `value`; raise ValueError if it is not between 0 and 1."""
    if not 0 < value < 1:
        raise ValueError(f"Expected `{name}` to be between 0 and 1, but got {value}.")
    return value
