r"""How many runs a claim needs, by simulating the procedure of the verdict.

Simulated studies have normal noise and, if the number of test images is given, accuracies in steps
of one image. They are judged by the same intervals as real studies, so a plan agrees with
:mod:`powergrad.lab.stats.verdict`. The correction for several arms does not depend on the results
of the other arms, so it is enough to simulate one arm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from powergrad.lab.stats.looks import DEFAULT, LEAST, Design
from powergrad.lab.stats.tests import Array, check_fraction, check_positive, welch

STUDIES = 4_000
MOST = 3_000  # the maximal number of runs per arm in a plan


# Simulated studies -------------------------------------------------------------------------------


class Judged(NamedTuple):
    """The verdicts on many studies.

    Attributes:
        sign: +1 or -1 if the interval excludes 0, otherwise 0.
        is_equivalent: Whether the interval contains 0 and lies inside the margin.
        n: The number of runs per arm at which the study stopped.
    """

    sign: NDArray[np.int64]
    is_equivalent: NDArray[np.bool_]
    n: NDArray[np.int64]


def judge(
    arm: Array,
    baseline: Array,
    design: Design,
    *,
    margin: float,
    comparisons: int = 1,
    step: float = 0.0,
) -> Judged:
    """Judge many studies as :func:`powergrad.lab.stats.compare` judges one."""
    studies = len(arm)
    sign = np.zeros(studies, int)
    is_equivalent = np.zeros(studies, bool)
    n = np.full(studies, design.last)
    is_open = np.ones(studies, bool)
    for look, size in enumerate(design.looks):
        difference = welch(arm[:, :size], baseline[:, :size], step=step)
        reach = difference.reach(design.nominal(look, comparisons))
        can_judge = is_open & (difference.error > 0) & (size >= LEAST)
        differs = can_judge & (np.abs(difference.mean) > reach)
        equal = can_judge & ~differs & (np.abs(difference.mean) + reach < margin)
        sign[differs] = np.sign(difference.mean[differs])
        is_equivalent |= equal
        n[differs | equal] = size
        is_open &= ~(differs | equal)
    return Judged(sign, is_equivalent, n)


@dataclass(frozen=True)
class Outcome:
    """The expected outcome of a design if an arm truly differs by `effect`.

    Attributes:
        effect: The true difference.
        found: The probability that the verdict is "different", in the correct direction.
        equivalent: The probability that the verdict is "equivalent".
        runs: The expected number of runs per arm.
    """

    effect: float
    found: float
    equivalent: float
    runs: float

    @property
    def settled(self) -> float:
        """The probability of any verdict except *not settled*."""
        return self.found + self.equivalent


@lru_cache(maxsize=256)
def simulate(
    effect: float,
    sigma: float,
    design: Design,
    *,
    margin: float,
    comparisons: int = 1,
    step: float = 0.0,
    studies: int = STUDIES,
    seed: int = 0,
) -> Outcome:
    """The outcome of a design in simulated studies with normal noise.

    Example:
        >>> outcome = simulate(1.0, 0.4, Design((8,)), margin=0.5)
        >>> outcome.found > 0.95, outcome.runs
        (True, 8.0)
    """
    rng = np.random.default_rng(seed)
    # Rounding adds step^2 / 12 to the variance of a run, so the noise before it is smaller.
    noise = math.sqrt(max(0.0, sigma**2 - step**2 / 12))
    arm, baseline = noise * rng.standard_normal((2, studies, design.last))
    arm += abs(effect)
    if step:
        between = step * rng.random((studies, 1))  # position of the baseline between two steps
        arm, baseline = (step * np.round((x + between) / step) for x in (arm, baseline))
    judged = judge(arm, baseline, design, margin=margin, comparisons=comparisons, step=step)
    return Outcome(
        effect,
        float((judged.sign > 0).mean()),
        float(judged.is_equivalent.mean()),
        float(judged.n.mean()),
    )


def runs_to_settle(
    sd: float, margin: float, *, comparisons: int = 1, level: float = 0.05, power: float = 0.8
) -> int:
    """The fixed number of runs per arm at which an arm equal to the baseline is equivalent.

    The verdict is "equivalent" with probability `power`; a true difference of the margin is found
    with a higher probability. By the normal distribution, the half-width of the interval plus the
    deviation of the estimate must be smaller than the margin.

    Example:
        >>> runs_to_settle(0.4, 0.5)
        15
    """
    from scipy.special import ndtri  # slow to import

    check_positive(margin, "margin")
    if not sd > 0:
        return LEAST
    alone = -math.expm1(math.log1p(-level) / comparisons)  # Sidak's level of one comparison
    reach = -float(ndtri(alone / 2)) - float(ndtri((1 - power) / 2))
    # One more run compensates for the wider tails of the t distribution.
    return max(LEAST, math.ceil(2 * (reach * sd / margin) ** 2) + 1)


# Noise -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noise:
    """The variation of runs that differ only in their seed.

    Attributes:
        sigma: The standard deviation of a run.
        runs: The number of runs from which it was estimated; 0 if it was given.
        source: The source of the estimate.
        df: The degrees of freedom of the estimate.
    """

    sigma: float
    runs: int
    source: str
    df: int = 0

    def interval(self, level: float = 0.05) -> tuple[float, float]:
        """The confidence interval of sigma, by the chi-square distribution of a normal variance."""
        from scipy.special import chdtri  # slow to import

        df = self.df or self.runs - 1
        low, high = chdtri(df, [check_fraction(level, "level") / 2, 1 - level / 2])
        return self.sigma * math.sqrt(df / low), self.sigma * math.sqrt(df / high)


_JORDAN = (
    "Keller Jordan, On the Variance of Neural Network Training with respect to Test Sets and "
    "Distributions, ICLR 2024, arXiv:2304.01910"
)
KNOWN_NOISE = {
    "imagenet-resnet18": Noise(0.118, 1_000, f"{_JORDAN}, appendix C: top-1 accuracy in percent"),
    "cifar10-resnet": Noise(0.149, 60_000, f"{_JORDAN}, section 3.2: 64 epochs, in percent"),
}
"""Published values, in points of test accuracy."""


def estimate_noise(samples: Sequence[Sequence[float]]) -> Noise:
    """The noise of a finished study: the pooled standard deviation within its arms.

    Example:
        >>> noise = estimate_noise([[97.2, 97.5, 96.9, 97.4]])
        >>> round(noise.sigma, 3), [round(end, 2) for end in noise.interval()]
        (0.265, [0.15, 0.99])
    """
    usable = [np.asarray(sample, float) for sample in samples if len(sample) > 1]
    df = sum(len(sample) - 1 for sample in usable)
    if not df:
        raise ValueError("Expected an arm with 2 or more runs to estimate the noise, but got none.")
    variance = sum(float(sample.var(ddof=1)) * (len(sample) - 1) for sample in usable) / df
    runs = df + len(usable)
    sigma = check_positive(math.sqrt(variance), "standard deviation of the runs")
    return Noise(sigma, runs, f"{runs} runs of {len(usable)} arms", df)


# The plan ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The result of :func:`plan`.

    Attributes:
        difference: The difference to detect.
        noise: The noise of the runs.
        comparisons: The number of arms compared with the baseline.
        power: The requested probability of detecting the difference.
        margin: The largest difference that does not matter.
        images: The number of test images; None for a continuous metric.
        seeds: The fixed number of runs per arm that has this power.
        seeds_interval: The same at the two ends of the interval of sigma.
        fixed: The outcome with this fixed number.
        design: A design with looks.
        sequential: Its outcomes if the arms do not differ, differ by the margin, by twice the
            margin, and by the difference.
        hours: The time of the fixed number of runs; None if the time of a run is not known.
    """

    difference: float
    noise: Noise
    comparisons: int
    power: float
    margin: float
    images: int | None
    seeds: int
    seeds_interval: tuple[int, int]
    fixed: Outcome
    design: Design
    sequential: tuple[Outcome, ...]
    hours: float | None

    @property
    def runs(self) -> int:
        """The total number of runs with the fixed number per arm, including the baseline."""
        return self.seeds * (self.comparisons + 1)

    @property
    def sentence(self) -> str:
        """The fixed number of runs as a sentence."""
        low, high = self.seeds_interval
        between = f" ({low} to {high}, because sigma is uncertain)" if low < high else ""
        on = f" on {self.images} test images" if self.images else ""
        text = (
            f"{self.seeds} runs per arm{between} find a difference of {self.difference:g} at sigma "
            f"{self.noise.sigma:.3g}{on} with {100 * self.fixed.found:.0f}% power: {self.runs} runs"
        )
        return text + (f", {_duration(self.hours)}." if self.hours is not None else ".")


def plan(
    difference: float,
    noise: float | str | Noise,
    *,
    comparisons: int = 1,
    power: float = 0.8,
    level: float = 0.05,
    margin: float | None = None,
    images: int | None = None,
    design: Design | None = None,
    seconds: float | None = None,
    workers: int = 1,
) -> Plan:
    r"""The number of runs that detect a difference, with a fixed number and with looks.

    Example:
        >>> p = plan(0.30, "imagenet-resnet18", seconds=7200, workers=4)
        >>> p.seeds, p.runs, p.hours
        (6, 12, 6.0)
    """
    check_positive(abs(difference), "difference")
    check_fraction(power, "power")
    check_fraction(level, "level")
    check_positive(workers, "workers")
    margin = check_positive(abs(difference) if margin is None else margin, "margin")
    if images is not None and images < 2:
        raise ValueError(f"Expected `images` to be at least 2, but got {images}.")
    noise = _as_noise(noise)
    step = 100 / images if images else 0.0
    looks = Design((design or DEFAULT).looks, level)

    def at(n: int, sigma: float) -> Outcome:
        return simulate(
            difference,
            sigma,
            Design((n,), level),
            margin=margin,
            comparisons=comparisons,
            step=step,
        )

    def fewest(sigma: float) -> int:
        return _fewest(lambda n: at(n, sigma).found >= power, LEAST)

    seeds = fewest(noise.sigma)
    # A given sigma has no uncertainty.
    low, high = noise.interval() if noise.runs else (noise.sigma, noise.sigma)
    hours = None
    if seconds is not None:
        runs = seeds * (comparisons + 1)
        hours = math.ceil(runs / workers) * check_positive(seconds, "seconds") / 3600
    effects = dict.fromkeys((0.0, margin, 2 * margin, abs(difference)))
    return Plan(
        difference=difference,
        noise=noise,
        comparisons=comparisons,
        power=power,
        margin=margin,
        images=images,
        seeds=seeds,
        seeds_interval=(fewest(low), _at_most(lambda: fewest(high))),
        fixed=at(seeds, noise.sigma),
        design=looks,
        sequential=tuple(
            simulate(effect, noise.sigma, looks, margin=margin, comparisons=comparisons, step=step)
            for effect in effects
        ),
        hours=hours,
    )


def _fewest(holds: Callable[[int], bool], start: int) -> int:
    """The smallest n >= `start` for which `holds`, which must be monotonic."""
    if holds(start):
        return start
    low, high = start, 2 * start
    while not holds(high):
        if high > MOST:
            raise ValueError(
                f"Expected a difference that {MOST:,} runs per arm can find, but got a smaller one."
            )
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _at_most(fewest: Callable[[], int]) -> int:
    """The result of `fewest`, or the maximal number of runs."""
    try:
        return fewest()
    except ValueError:
        return MOST


def _as_noise(noise: float | str | Noise) -> Noise:
    if isinstance(noise, Noise):
        return noise
    if isinstance(noise, str):
        if noise not in KNOWN_NOISE:
            names = ", ".join(map(repr, KNOWN_NOISE))
            raise ValueError(
                f"Expected `noise` to be a number or one of {names}, but got {noise!r}."
            )
        return KNOWN_NOISE[noise]
    return Noise(check_positive(noise, "noise"), 0, "given")


def _duration(hours: float) -> str:
    if hours >= 1:
        return f"{hours:.1f} hours"
    return f"{60 * hours:.0f} minutes" if hours >= 1 / 60 else f"{3600 * hours:.0f} seconds"
