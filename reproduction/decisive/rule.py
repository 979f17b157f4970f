"""The rule of docs/protocol.md, and its power. It knows numbers, not runs.

A regime's data are the units of each arm: the mean test accuracy of each repeat's winner over its
fresh seeds. Units of one repeat are paired: all arms tried the same points with the same seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Array = NDArray[np.float64]

LEVEL = 0.025  # of each of the two looks
MARGIN = 0.3  # points of test accuracy


class Decision(NamedTuple):
    """What the rule says, with the mean difference and the 90% interval of each regime."""

    verdict: str  # helps, hurts, makes no difference that matters, or not settled
    p: float  # of the stratified sign-flip test
    means: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]


def decide(differences: Mapping[str, Sequence[float]], level: float = LEVEL) -> Decision:
    """The verdict on the differences of some regimes, at one look."""
    p, direction = sign_flip(list(differences.values()))
    intervals = {name: interval(d) for name, d in differences.items()}
    if p < level:
        verdict = "helps" if direction > 0 else "hurts"
    elif all(low > -MARGIN and high < MARGIN for low, high in intervals.values()):
        verdict = "makes no difference that matters"
    else:
        verdict = "not settled"
    means = {name: float(np.mean(d)) for name, d in differences.items()}
    return Decision(verdict, p, means, intervals)


def sign_flip(strata: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The two-sided p of a stratified sign-flip test, and the sign of its statistic.

    Each stratum is divided by its root mean square, which flipping signs does not change, so that
    regimes count alike whatever their noise is. All patterns of signs are counted.

    Example:
        >>> sign_flip([[0.1, 0.2, 0.3], [1.0, 2.0, 3.0]])  # all of one sign: 2 of 64 patterns
        (0.03125, 1.0)
    """
    scaled = []
    for stratum in strata:
        d = np.asarray(stratum, float)
        rms = math.sqrt(float((d**2).mean()))
        scaled.append(d / rms if rms else d)
    values = np.concatenate(scaled)
    observed = float(values.sum())
    # A pattern is one of the first half's and one of the second half's. For each of the first, the
    # sorted sums of the second say how many reach the bound with it.
    middle = len(values) // 2
    first, second = _sums(values[:middle]), np.sort(_sums(values[middle:]))
    bound = abs(observed) - 1e-9
    above = len(second) - np.searchsorted(second, bound - first, "left")
    reached = 2 * int(above.sum()) if bound > 0 else 2 ** len(values)
    return reached / 2 ** len(values), float(np.sign(observed))


def _sums(values: Array) -> Array:
    """The sum of the values under every pattern of signs."""
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums + value, sums - value])
    return sums


def interval(differences: Sequence[float], confidence: float = 0.9) -> tuple[float, float]:
    """Student's interval of a mean difference."""
    found = stats.ttest_1samp(np.asarray(differences, float), 0).confidence_interval(confidence)
    return float(found.low), float(found.high)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p-values.

    Example:
        >>> holm({"a": 0.01, "b": 0.04})
        {'a': 0.02, 'b': 0.04}
    """
    adjusted: dict[str, float] = {}
    largest = 0.0
    for place, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, (len(p_values) - place) * p))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}


def power(
    effect: float, spreads: Sequence[float], studies: int = 400, seed: int = 0
) -> dict[str, float]:
    """How often each verdict is reached over both looks, for a true difference in every regime.

    `spreads` are the standard deviations of a pair's difference, one per regime.
    """
    rng = np.random.default_rng(seed)
    counts: dict[str, int] = {}
    for _ in range(studies):
        pairs = [effect + spread * rng.standard_normal(16) for spread in spreads]
        decision = decide({str(i): d[:8].tolist() for i, d in enumerate(pairs)})
        if decision.verdict == "not settled":
            decision = decide({str(i): d.tolist() for i, d in enumerate(pairs)})
        counts[decision.verdict] = counts.get(decision.verdict, 0) + 1
    return {verdict: count / studies for verdict, count in counts.items()}
