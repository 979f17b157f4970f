r"""Group-sequential designs: how often a study may test its results, and at which levels.

A study that stops as soon as its result is clear tests several times, and each test may be wrong.
So the allowed error is divided over the looks in advance: by the look at ``n`` of at most ``N``
runs per arm, ``level * n / N`` of it is spent (Lan and DeMets' spending in proportion to the
information). The *nominal* level of a look, which is the level of its own test, follows from the
joint normal distribution of the looks by numerical integration (Armitage, McPherson and Rowe). The
nominal level is then applied to the p-value of a t test, which accounts for small numbers of runs.

Several arms share the error by Sidak's inequality: each has ``1 - (1 - level)^(1/m)``. This holds
for any correlation of the comparisons, which share the baseline.

References:
    Armitage, McPherson and Rowe, *Repeated significance tests on accumulating data*, 1969.
    Lan and DeMets, *Discrete sequential boundaries for clinical trials*, 1983.
    Jennison and Turnbull, *Group Sequential Methods*, 1999, chapters 7 to 9 (repeated confidence
    intervals). Sidak, *Rectangular confidence regions*, 1967.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEAST = 6  # with fewer runs per arm, no verdict is given
# Gauss-Legendre quadrature over the region in which a study continues.
NODES, WEIGHTS = np.polynomial.legendre.leggauss(96)


def least_runs(known_noise: object) -> int:
    """The smallest number of runs per arm for a verdict."""
    return 2 if known_noise else LEAST


@dataclass(frozen=True)
class Design:
    """The numbers of runs per arm at which a study tests its results."""

    looks: tuple[int, ...]  # runs per arm at each look, ascending; a single number is a fixed size
    level: float = 0.05  # probability of any false verdict, over all looks and arms

    def __post_init__(self) -> None:
        if not self.looks or not all(a < b for a, b in pairwise((0, *self.looks))):
            raise ValueError(f"Expected the looks to increase from 1, but got {self.looks}.")
        if not 0 < self.level < 1:
            raise ValueError(f"Expected `level` to be between 0 and 1, but got {self.level}.")

    @property
    def last(self) -> int:  # the maximal number of runs per arm
        return self.looks[-1]

    @property
    def is_fixed(self) -> bool:
        return len(self.looks) == 1

    def nominal(self, look: int, comparisons: int) -> float:
        """The level of the test at one look, for each of `comparisons` arms."""
        return _nominal_level(self.looks, look, sidak(self.level, comparisons))

    def overall(self, p: float, look: int, comparisons: int) -> float:
        """The p-value of a test at one look, corrected for all looks and comparisons.

        It is the smallest `level` of a design with these looks that would reject at this look. So
        it is below `level` exactly if `p` is below :meth:`nominal`.
        """

        def above(log_level: float) -> float:
            return _nominal_level(self.looks, look, math.exp(log_level)) - p

        if not self.is_fixed and 0 < p < 1:
            low, high = math.log(min(p, 1e-12)) - 12, math.log1p(-1e-9)
            p = math.exp(_root(above, low, high)) if above(high) > 0 else 1.0
        return _any_of(p, comparisons)

    def __str__(self) -> str:
        """The design as a value of the option ``--seeds``."""
        text = f"{self.looks[0]}..{self.last}"
        is_regular = not self.is_fixed and parse_runs(text) == self.looks
        return text if is_regular else ",".join(map(str, self.looks))


def parse_runs(text: str) -> tuple[int, ...]:
    """Parse the looks of ``12`` (one look), ``8..24`` (a look every four runs) or ``8,16,24``."""
    first, dots, last = text.partition("..")
    try:
        if dots:
            low, high = int(first), int(last)
            looks = [*range(low, high, max(1, low // 2)), high] if low < high else []
        else:
            looks = [int(part) for part in text.split(",")]
        return Design(tuple(looks)).looks
    except ValueError:
        wanted = "Expected a number of runs per arm such as 12, 8..24 or 8,16,24"
        raise ValueError(f"{wanted}, but got {text!r}.") from None


def error_of_looks(looks: Sequence[int], comparisons: int) -> float:
    """The probability of any false verdict if each look is made at 5%, as if alone."""
    from scipy.special import ndtri  # slow to import

    bound = -float(ndtri(sidak(0.05, comparisons) / 2))
    path, crossed = _Path(), 0.0
    for n in looks:
        crossed += path.crossing(n, bound)
        path.go_on(n, bound)
    return _any_of(crossed, comparisons)


DEFAULT = Design((8, 12, 16, 20, 24))


def sidak(level: float, comparisons: int) -> float:
    """Sidak's level for each of several comparisons."""
    if comparisons < 1:
        raise ValueError(f"Expected `comparisons` to be at least 1, but got {comparisons}.")
    return _any_of(level, 1 / comparisons)


def _any_of(p: float, count: float) -> float:
    """The probability of any of `count` independent events with the probability `p`."""
    return -math.expm1(count * math.log1p(-p)) if p < 1 else 1.0


@functools.lru_cache(maxsize=4096)
def _nominal_level(looks: tuple[int, ...], look: int, level: float) -> float:
    """The two-sided level of a look, if ``level * n / N`` is spent by the look at n."""
    from scipy.special import ndtri  # slow to import

    if len(looks) == 1:
        return level
    path = _Path()
    spent = bound = 0.0
    for n in looks[: look + 1]:
        spend = level * n / looks[-1] - spent
        spent += spend

        def excess(bound: float, n: int = n, spend: float = spend) -> float:
            return path.crossing(n, bound) - spend

        # The upper end of the bracket is the bound of a first look; the bound is never larger.
        bound = _root(excess, 0.0, 1e-9 - float(ndtri(spend / 2)))
        path.go_on(n, bound)
    return 2 * float(_tail(bound))


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    from scipy.optimize import brentq  # slow to import

    root: Any = brentq(function, low, high, xtol=1e-10)
    return float(root)


class _Path:
    """The distribution of a sum of n standard normal numbers, over studies that continue."""

    def __init__(self) -> None:
        self.n = 0
        self.at: NDArray[np.float64] = np.zeros(1)
        self.mass: NDArray[np.float64] = np.ones(1)  # density times quadrature weight

    def crossing(self, n: int, bound: float) -> float:
        """The probability of continuing until n and then exceeding `bound` standard deviations."""
        edge, step = bound * math.sqrt(n), math.sqrt(n - self.n)
        beyond = _tail((edge - self.at) / step) + _tail((edge + self.at) / step)
        return float(self.mass @ beyond)

    def go_on(self, n: int, bound: float) -> None:
        """Keep the studies that are within `bound` standard deviations at n."""
        edge, step = bound * math.sqrt(n), math.sqrt(n - self.n)
        at = edge * NODES
        kernel = np.exp(-0.5 * ((at[:, None] - self.at) / step) ** 2)
        density = kernel @ self.mass / (step * math.sqrt(2 * math.pi))
        self.n, self.at, self.mass = n, at, density * edge * WEIGHTS


def _tail(z: NDArray[np.float64] | float) -> NDArray[np.float64] | float:
    from scipy.special import ndtr  # slow to import

    return ndtr(-z)
