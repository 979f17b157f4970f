r"""How many runs a claim needs, by simulating the procedure of the verdict.

Simulated studies have normal noise and, if the number of test images is given, accuracies in steps
of one image. They are judged by the same intervals as real studies, so a plan agrees with
:mod:`powergrad.lab.stats.verdict`. The correction for several arms does not depend on the results
of the other arms, so it is enough to simulate one arm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from powergrad.lab.stats.looks import DEFAULT, LEAST, Design, least_runs, sidak
from powergrad.lab.stats.tests import Array, Noise, check_positive, compare_means, pooled_sd
from powergrad.lab.words import duration

STUDIES = 4_000
MOST = 3_000  # the maximal number of runs per arm in a plan


# Simulated studies -------------------------------------------------------------------------------


class Judged(NamedTuple):
    """The verdicts on many studies."""

    sign: NDArray[np.int64]  # +1 for better, -1 for worse, otherwise 0
    is_equivalent: NDArray[np.bool_]
    n: NDArray[np.int64]  # runs per arm at which the study stopped


def judge(
    arm: Array,
    baseline: Array,
    design: Design,
    *,
    margin: float,
    comparisons: int = 1,
    step: float = 0.0,
    noise: Noise | None = None,
) -> Judged:
    """Judge many studies as :func:`powergrad.lab.stats.compare` judges one."""
    sign, is_equivalent = np.zeros(len(arm), int), np.zeros(len(arm), bool)
    n = np.full(len(arm), design.last)
    for look, size in enumerate(design.looks):
        if size >= least_runs(noise):
            samples = arm[:, :size], baseline[:, :size]
            difference = compare_means(*samples, step=step, noise=noise)
            level, is_last = design.nominal(look, comparisons), size == design.last
            signs, equal = difference.judge(level, margin, is_last)
            equal &= signs == 0
            is_settled = (sign == 0) & ~is_equivalent & ((signs != 0) | equal)
            sign[is_settled], is_equivalent[is_settled] = signs[is_settled], equal[is_settled]
            n[is_settled] = size
    return Judged(sign, is_equivalent, n)


@dataclass(frozen=True)
class Outcome:
    """The expected outcome of a design if an arm truly differs by `effect`."""

    effect: float  # true difference
    found: float  # probability that the verdict is "different", in the correct direction
    equivalent: float  # probability that the verdict is "equivalent"
    runs: float  # expected number of runs per arm


@lru_cache(maxsize=256)
def simulate(
    effect: float,
    sigma: float,
    design: Design,
    *,
    margin: float,
    comparisons: int = 1,
    step: float = 0.0,
    known: Noise | None = None,
    seed: int = 0,
) -> Outcome:
    """The outcome of a design in simulated studies with normal noise."""
    rng = np.random.default_rng(seed)
    # Rounding adds step^2 / 12 to the variance of a run, so the noise before it is smaller.
    noise = math.sqrt(max(0.0, sigma**2 - step**2 / 12))
    arm, baseline = noise * rng.standard_normal((2, STUDIES, design.last))
    arm += abs(effect)
    if step:
        between = step * rng.random((STUDIES, 1))  # position of the baseline between two steps
        arm, baseline = (step * np.round((x + between) / step) for x in (arm, baseline))
    rule = {"margin": margin, "comparisons": comparisons, "step": step}
    judged = judge(arm, baseline, design, **rule, noise=known)
    shares = (judged.sign > 0, judged.is_equivalent, judged.n)
    return Outcome(effect, *(float(share.mean()) for share in shares))


def runs_to_settle(sd: float, margin: float, *, comparisons: int = 1, level: float = 0.05) -> int:
    """The fixed number of runs per arm at which an arm equal to the baseline is equivalent.

    The verdict is "equivalent" with probability 0.8; a true difference of the margin is found with
    a higher probability. By the normal distribution, the half-width of the interval plus the
    deviation of the estimate must be smaller than the margin.
    """
    if not sd > 0:
        return LEAST
    quantile = NormalDist().inv_cdf
    reach = -quantile(sidak(level, comparisons) / 2) - quantile(0.1)
    # One more run compensates for the wider tails of the t distribution.
    return max(LEAST, math.ceil(2 * (reach * sd / margin) ** 2) + 1)


def smallest_difference(
    sd: float, runs: int, *, comparisons: int = 1, level: float = 0.05
) -> float:
    """The difference that a fixed number of runs per arm finds with probability 0.8."""
    quantile = NormalDist().inv_cdf
    reach = quantile(0.8) - quantile(sidak(level, comparisons) / 2)
    return reach * sd * math.sqrt(2 / runs)


# Noise -------------------------------------------------------------------------------------------


# In points of test accuracy: Keller Jordan, On the Variance of Neural Network Training with respect
# to Test Sets and Distributions, ICLR 2024, arXiv:2304.01910, appendix C and section 3.2.
KNOWN_NOISE = {"imagenet-resnet18": Noise(0.118, 1_000), "cifar10-resnet": Noise(0.149, 60_000)}


def estimate_noise(arms: Sequence[Mapping[int, float]]) -> Noise:
    """The noise of a finished study: the pooled standard deviation within arms, by seed."""
    usable = [runs for runs in arms if len(runs) > 1]
    if not usable:
        raise ValueError("Expected an arm with 2 or more runs to estimate the noise, but got none.")
    samples = [np.array([*runs.values()]) for runs in usable]
    sigma = check_positive(pooled_sd(samples), "standard deviation of the runs")
    # Runs of one seed may be alike in several arms, which then count less (Satterthwaite).
    gaps = [
        {seed: runs[seed] - float(np.mean([*runs.values()])) for seed in runs} for runs in usable
    ]
    products = [[sum(a[s] * b[s] for s in a.keys() & b.keys()) for a in gaps] for b in gaps]
    ratio = np.trace(products) ** 2 / np.square(products).sum()
    sizes = [len(sample) for sample in samples]
    df = min(sum(sizes) - len(sizes), math.floor(ratio * (max(sizes) - 1) + 1e-9))
    return Noise(sigma, sum(sizes), df)


# The plan ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The result of :func:`plan`."""

    difference: float  # difference to detect
    noise: Noise  # noise of the runs
    comparisons: int  # arms compared with the baseline
    margin: float  # largest difference that does not matter
    images: int | None  # test images; None for a continuous metric
    seeds: int  # fixed number of runs per arm that has this power
    seeds_interval: tuple[int, int]  # same at the two ends of the interval of sigma
    fixed: Outcome  # outcome with this fixed number
    design: Design  # a design with looks
    sequential: tuple[Outcome, ...]  # its outcomes if the arms do not differ
    time: float | None  # seconds of the fixed number of runs, if the time of a run is known

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
        claim = f"a difference of {self.difference:g} at sigma {self.noise.sigma:.3g}{on}"
        cost = f"{100 * self.fixed.found:.0f}% power: {self.runs} runs"
        cost += f", {duration(self.time)}" if self.time is not None else ""
        return f"{self.seeds} runs per arm{between} find {claim} with {cost}."


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
    known: bool = False,
) -> Plan:
    """The number of runs that detect a difference, with a fixed number and with looks."""
    check_positive(abs(difference), "difference")
    if not 0 < power < 1:
        raise ValueError(f"Expected `power` to be between 0 and 1, but got {power}.")
    check_positive(workers, "workers")
    margin = check_positive(abs(difference) if margin is None else margin, "margin")
    if images is not None and images < 2:
        raise ValueError(f"Expected `images` to be at least 2, but got {images}.")
    if isinstance(noise, str) and noise not in KNOWN_NOISE:
        names = ", ".join(map(repr, KNOWN_NOISE))
        raise ValueError(f"Expected `noise`, a number or one of {names}, but got {noise!r}.")
    noise = KNOWN_NOISE[noise] if isinstance(noise, str) else noise
    noise = noise if isinstance(noise, Noise) else Noise(check_positive(noise, "noise"), 0)
    looks = Design((design or DEFAULT).looks, level)
    step = 100 / images if images else 0.0
    rule = {"margin": margin, "comparisons": comparisons, "step": step}
    outcome = partial(simulate, **rule, known=noise if known else None)

    def at(n: int, sigma: float) -> Outcome:
        return outcome(difference, sigma, Design((n,), level))

    def fewest(sigma: float) -> int | None:  # with this power; None if too large
        high = least_runs(known)
        low = high - 1
        while at(high, sigma).found < power:
            if high > MOST:
                return None
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if at(middle, sigma).found >= power else (middle, high)
        return high

    seeds = fewest(noise.sigma)
    if seeds is None:
        wanted = f"Expected a difference that {MOST:,} runs per arm can find"
        raise ValueError(f"{wanted}, but got {difference:g}.")
    # A given sigma has no uncertainty.
    low, high = noise.interval() if noise.runs else (noise.sigma, noise.sigma)
    rounds = math.ceil(seeds * (comparisons + 1) / workers)
    time = None if seconds is None else rounds * check_positive(seconds, "seconds")
    effects = dict.fromkeys((0.0, margin, 2 * margin, abs(difference)))
    return Plan(
        difference=difference,
        noise=noise,
        comparisons=comparisons,
        margin=margin,
        images=images,
        seeds=seeds,
        seeds_interval=(fewest(low) or MOST, fewest(high) or MOST),
        fixed=at(seeds, noise.sigma),
        design=looks,
        sequential=tuple(outcome(effect, noise.sigma, looks) for effect in effects),
        time=time,
    )
