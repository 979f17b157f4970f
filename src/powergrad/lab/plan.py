r"""How many seeds a claim needs: the power of the tests, before a study and after it.

Two questions, and two tests. :func:`seeds_needed` is the textbook's: a paired t test of runs that
differ by ``difference`` and scatter by ``sigma``. The verdict of :mod:`powergrad.lab.stats` uses a
sign-flip test, which assumes no distribution and needs :func:`least_seeds` to be able to speak;
:func:`detection_power` and its inverses are for that one. :func:`plan` puts them together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "KNOWN_NOISE",
    "Noise",
    "Plan",
    "detection_power",
    "estimate_noise",
    "least_seeds",
    "minimum_detectable_effect",
    "plan",
    "seeds_needed",
    "seeds_to_settle",
]

Array = NDArray[np.float64]

EXACT = 20  # seeds up to which all 2^n sign flips are counted
CELLS = 2**22  # numbers held at once
_FEW = 64  # sign patterns up to which the power is simulated


# The paired t test -------------------------------------------------------------------------------


def seeds_needed(
    difference: float,
    sigma: float,
    *,
    power: float = 0.8,
    level: float = 0.05,
    correlation: float = 0.0,
) -> int:
    r"""Seeds an arm for a two-sided paired t test to find a difference, by the noncentral t.

    A difference of two runs has the standard deviation ``sigma * sqrt(2 (1 - correlation))``.

    Args:
        difference: The true difference; its sign does not matter.
        sigma: Standard deviation between runs that differ by their seed alone.
        power: The chance of finding it.
        level: The level of the test.
        correlation: Correlation of two runs that share a seed: 0 if sharing does not help.

    Returns:
        The smallest number of seeds, at least 2.

    Raises:
        ValueError: If ``difference`` is 0, or another argument is out of range.

    Example:
        >>> [seeds_needed(difference, 0.118) for difference in (0.09, 0.14, 0.30)]
        [29, 14, 5]
    """
    check_positive(abs(difference), "difference")
    check_positive(sigma, "sigma")
    check_fraction(power, "power")
    check_fraction(level, "level")
    if not -1 <= correlation < 1:
        raise ValueError(f"Expected `correlation` to be in [-1, 1), but got {correlation}.")
    effect = abs(difference) / (sigma * math.sqrt(2 * (1 - correlation)))
    return _fewest(lambda n: t_power(effect * math.sqrt(n), n - 1, level) >= power, 2)


def t_power(shift: float, df: float, level: float) -> float:
    """Power of a two-sided t test if the true difference is `shift` standard errors."""
    from scipy.stats import nct  # slow to import

    critical = t_critical(level / 2, df)
    # The chance of the wrong sign; scipy says NaN where it is below 1e-200.
    wrong = np.nan_to_num(nct.cdf(-critical, df, shift))
    return _beyond(critical, df, shift) + float(wrong)


def _beyond(critical: float, df: float, shift: float) -> float:
    """Chance that a noncentral t exceeds `critical`; where scipy says NaN it is certain."""
    from scipy.stats import nct  # slow to import

    return float(nct.sf(critical, df, min(shift, 1e6)))


def t_critical(level: float, df: float) -> float:
    """What Student's t exceeds with the chance `level`."""
    from scipy.special import stdtrit  # slow to import

    return -float(stdtrit(df, level))


def t_beyond(value: float, df: float) -> float:
    """The chance that Student's t exceeds `value`."""
    from scipy.special import stdtr  # slow to import

    return float(stdtr(df, -value))


def t_shift(df: float, level: float, power: float) -> float:
    """The true difference, in standard errors, that a two-sided t test finds with this power."""
    return _where(lambda x: t_power(x, df, level), power)


def _where(power_at: Callable[[float], float], power: float, within: float = 1e-10) -> float:
    """Where a rising power reaches `power`."""
    from scipy.optimize import brentq  # slow to import

    if power_at(0.0) >= power:
        return 0.0
    high = 1.0
    while power_at(high) < power:
        high *= 2
    root: Any = brentq(lambda x: power_at(x) - power, 0.0, high, xtol=within)
    return float(root)


def _fewest(holds: Callable[[int], bool], start: int) -> int:
    """The smallest n from `start` on at which `holds`, which stays true from there on."""
    if holds(start):
        return start
    low, high = start, 2 * start
    while not holds(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


# The verdict's test ------------------------------------------------------------------------------


def least_seeds(comparisons: int = 1, level: float = 0.05) -> int:
    r"""The fewest seeds with which the corrected sign-flip test can reject: ``2 m / 2^n < level``.

    At the level 0.05 that is ``ceil(log2(40 m))``.

    Args:
        comparisons: ``m``, the number of arms compared with the baseline.
        level: The level of the test.

    Returns:
        The number of seeds.

    Raises:
        ValueError: If ``comparisons`` is under 1 or ``level`` outside (0, 1).

    Example:
        >>> [least_seeds(m) for m in (1, 2, 3, 4)]
        [6, 7, 7, 8]
    """
    if comparisons < 1:
        raise ValueError(f"Expected `comparisons` to be at least 1, but got {comparisons}.")
    check_fraction(level, "level")
    n = 1
    while not 2 * comparisons / 2**n < level:
        n += 1
    return n


def detection_power(
    effect: float, n: int, *, comparisons: int = 1, level: float = 0.05, step: float = 0.0
) -> float:
    r"""The chance that the verdict's test finds a true difference, for normal noise.

    The difference has to pass the strictest step of Holm's correction, ``level / m``: exact for
    one comparison, and a lower bound for more. How it is computed: let ``x_i = effect + z_i``. A
    sign pattern that flips the set ``F`` reaches the observed sum if and only if
    ``sum(x_i, i in F) <= 0``, that is, if ``effect <= -mean(z_i, i in F)``. The test rejects if
    fewer than ``K`` sets do, where ``2 (1 + K - 1) / 2^n`` is the largest p below the level. So
    each sample ``z`` has one critical effect, the K-th largest of the subset means, and the power
    is the share of samples whose critical effect lies below ``effect``. The samples are simulated,
    with a fixed seed; where ``K > 64`` the noncentral t at the level ``2 K / 2^n`` agrees with
    them within half a per cent of the effect, and is used.

    Accuracies move in steps of one test example. Where that is not small beside the noise, many
    sign patterns tie with the observed one, ties count against it, and the power falls. Rounded
    studies are simulated then, up to 12 seeds; beyond, a tie costs ``step / n`` of the effect
    (half the distance between two sums that differ by one flip).

    Args:
        effect: The true mean difference, in standard deviations of a paired difference.
        n: Number of seeds.
        comparisons: ``m``, the number of arms compared with the baseline.
        level: The level of the test.
        step: The steps in which the metric moves, in the same unit; 0 if it is continuous.

    Returns:
        The power.

    Raises:
        ValueError: If ``n`` is under 2, or another argument is out of range.

    Example:
        >>> round(detection_power(1.2, 8), 2)
        0.8
    """
    check_seeds(n)
    check_step(step)
    if n < least_seeds(comparisons, level):
        return 0.0
    patterns, attained = _rule(n, level / comparisons)
    if _coarse(step, n):
        return _coarse_power(abs(effect), n, patterns, step)
    effect = max(0.0, abs(effect) - step / n)
    if patterns > _FEW:
        return t_power(effect * math.sqrt(n), n - 1, attained)
    return float((_critical_effects(n, patterns) < effect).mean())


def minimum_detectable_effect(
    sd: float,
    n: int,
    *,
    comparisons: int = 1,
    power: float = 0.8,
    level: float = 0.05,
    step: float = 0.0,
) -> float | None:
    r"""The smallest true difference that the verdict's test finds with the given power.

    The inverse of :func:`detection_power`.

    Args:
        sd: Standard deviation of a paired difference.
        n: Number of seeds.
        comparisons: ``m``, the number of arms compared with the baseline.
        power: The chance of finding it.
        level: The level of the test.
        step: The steps in which the metric moves, in the unit of ``sd``; 0 if it is continuous.

    Returns:
        The difference, in the unit of ``sd``; None if the seeds are too few to find any.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> round(minimum_detectable_effect(0.3, 8), 2)
        0.36
        >>> round(minimum_detectable_effect(0.3, 8, step=100 / 360), 2)  # 360 test examples
        0.42
        >>> minimum_detectable_effect(0.3, 5) is None
        True
    """
    check_seeds(n)
    check_step(step)
    check_fraction(power, "power")
    if n < least_seeds(comparisons, level):
        return None
    if check_spread(sd) == 0:
        return 0.0
    step /= sd
    patterns, attained = _rule(n, level / comparisons)
    if _coarse(step, n):
        return sd * _where(lambda x: _coarse_power(x, n, patterns, step), power, within=1e-3)
    if patterns > _FEW:
        effect = t_shift(n - 1, attained, power) / math.sqrt(n)
    else:
        effect = float(np.quantile(_critical_effects(n, patterns), power))
    return sd * (effect + step / n)


def seeds_to_settle(
    sd: float,
    margin: float,
    *,
    comparisons: int = 1,
    power: float = 0.8,
    level: float = 0.05,
    step: float = 0.0,
) -> int:
    r"""The number of seeds at which the verdict is no longer expected to be *underpowered*.

    With so many, a true difference of ``margin`` is found with the given power, and no difference
    at all is called *equivalent* with the same. It depends on the noise and on what matters, not
    on the difference that happened to be observed.

    Args:
        sd: Standard deviation of a paired difference.
        margin: The largest difference that does not matter, positive.
        comparisons: ``m``, the number of arms compared with the baseline.
        power: The chance of a verdict in each of the two cases.
        level: The level of the tests.
        step: The steps in which the metric moves, in the unit of ``sd``; 0 if it is continuous.

    Returns:
        The number of seeds.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> seeds_to_settle(0.4, margin=0.3)
        17
    """
    check_positive(margin, "margin")
    check_fraction(power, "power")
    least = least_seeds(comparisons, level)
    if check_spread(sd) == 0:
        return least

    def settles(n: int) -> bool:
        found = detection_power(
            margin / sd, n, comparisons=comparisons, level=level, step=step / sd
        )
        error = sd / math.sqrt(n)
        return min(found, _equivalence_power(margin, error, n - 1, level)) >= power

    return _fewest(settles, least)


def _rule(n: int, level: float) -> tuple[int, float]:
    """K, where a study is rejected if fewer than K sets of flips reach it; the level that gives."""
    if n > EXACT:
        return 2**EXACT, level
    patterns = math.ceil(level * 2 ** (n - 1)) - 1
    return patterns, 2 * patterns / 2**n


@lru_cache(maxsize=256)
def _critical_effects(n: int, patterns: int) -> Array:
    """For simulated studies of unit noise, the effect above which each is rejected."""
    studies = min(20_000, max(1_000, 2**24 >> n))
    noise = np.random.default_rng(0).standard_normal((studies, n))
    step = max(1, CELLS >> n)
    sizes = _subset_sums(np.ones((1, n)))[:, 1:]
    critical = [
        np.partition(_subset_sums(noise[i : i + step])[:, 1:] / sizes, -patterns)[:, -patterns]
        for i in range(0, studies, step)
    ]
    return np.concatenate(critical)


def _subset_sums(rows: NDArray[Any]) -> NDArray[Any]:
    """Sums over all subsets of each row, the empty one first: from (studies, n) to (..., 2^n)."""
    sums = np.zeros((len(rows), 1), rows.dtype)
    for column in rows.T[:, :, None]:
        sums = np.concatenate([sums, sums + column], axis=1)
    return sums


def _coarse(step: float, n: int) -> bool:
    """Whether steps of a metric, in standard deviations, are so wide that they are simulated."""
    return step > 0.1 and n <= 12


def _coarse_power(effect: float, n: int, patterns: int, step: float) -> float:
    """The share of simulated studies that are rejected, where both arms move in steps.

    Rounding adds ``step^2 / 12`` to the variance of a run: the noise before it is smaller by that.
    """
    studies = min(4_000, 2**23 >> n)
    rng = np.random.default_rng(0)
    noise = math.sqrt(max(0.0, 1 / 2 - step**2 / 12)) * rng.standard_normal((2, studies, n))
    level = rng.random((studies, 1))  # of the baseline, between two steps
    arm, baseline = np.round((effect + noise[0]) / step + level), np.round(noise[1] / step + level)
    steps = (arm - baseline).astype(np.int16)
    reached = (_subset_sums(steps)[:, 1:] <= 0).sum(1)
    return float((reached < patterns).mean())


def _equivalence_power(margin: float, error: float, df: float, level: float) -> float:
    """The chance that two one-sided tests say equivalent if the true difference is 0.

    Both must reject. That is at least 1 minus the chances that each does not, and close to it.
    """
    return max(0.0, 2 * _beyond(t_critical(level, df), df, margin / error) - 1)


# Noise -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noise:
    """The scatter between runs that differ by their seed alone.

    Attributes:
        sigma: Standard deviation of a run. A difference of two has ``sqrt(2)`` times that.
        runs: Number of runs, or of differences between runs, that it was estimated from.
        source: Where it comes from.
    """

    sigma: float
    runs: int
    source: str

    def interval(self, level: float = 0.05) -> tuple[float, float]:
        """Where the true sigma may be, by the chi-square distribution of a normal variance.

        Args:
            level: One minus the confidence.

        Returns:
            The two ends.
        """
        from scipy.special import chdtri  # slow to import

        df = self.runs - 1
        low, high = chdtri(df, [check_fraction(level, "level") / 2, 1 - level / 2])
        return self.sigma * math.sqrt(df / low), self.sigma * math.sqrt(df / high)


_JORDAN = (
    "Keller Jordan, On the Variance of Neural Network Training with respect to Test Sets and "
    "Distributions, ICLR 2024, arXiv:2304.01910"
)
KNOWN_NOISE = {
    "imagenet-resnet18": Noise(0.118, 1_000, f"{_JORDAN}, appendix C: top-1 accuracy in per cent"),
    "cifar10-resnet": Noise(0.149, 60_000, f"{_JORDAN}, section 3.2: 64 epochs, in per cent"),
}
"""Published figures, in points of test accuracy."""


def estimate_noise(runs: Mapping[int, float], baseline: Mapping[int, float] | None = None) -> Noise:
    r"""The noise of a finished study, from the metric of each seed.

    With a baseline, from the differences of runs that share a seed, so that what pairing gains is
    in it: ``sigma = sd(difference) / sqrt(2)``.

    Args:
        runs: The metric of each seed of one arm.
        baseline: The same of the arm that it is compared with.

    Returns:
        The noise, whose interval says how uncertain it is.

    Raises:
        ValueError: If there are fewer than 2 seeds (in common), or the metric is not finite or
            does not vary.

    Example:
        >>> noise = estimate_noise({0: 97.2, 1: 97.5, 2: 96.9, 3: 97.4})
        >>> round(noise.sigma, 3), [round(end, 2) for end in noise.interval()]
        (0.265, [0.15, 0.99])
    """
    seeds = [seed for seed in runs if baseline is None or seed in baseline]
    if len(seeds) < 2:
        raise ValueError(f"Expected `runs` to have 2 seeds or more to use, but got {len(seeds)}.")
    values = np.array([runs[seed] - (baseline[seed] if baseline else 0) for seed in seeds])
    sd = float(values.std(ddof=1))
    what = f"{len(seeds)} {'differences' if baseline else 'runs'} of this study"
    sigma = check_positive(sd, "standard deviation") / (math.sqrt(2) if baseline else 1)
    return Noise(sigma, len(seeds), what)


# The plan ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What :func:`plan` says.

    Attributes:
        difference: The difference to be found.
        noise: The noise it is to be found in.
        comparisons: Number of arms compared with the baseline.
        power: The chance of finding it that was asked for.
        level: The level of the tests.
        t_seeds: Seeds an arm that the paired t test needs.
        t_seeds_interval: The same at the two ends of the interval of sigma.
        least_seeds: Seeds below which the verdict's test cannot speak.
        seeds: Seeds an arm to run: as many as both need, and the verdict's test for that power.
        verdict_power: The chance that the verdict's test finds the difference with so many.
        runs: Number of runs in all, the baseline's included.
        hours: How long they take; None if the time of a run was not given.
    """

    difference: float
    noise: Noise
    comparisons: int
    power: float
    level: float
    t_seeds: int
    t_seeds_interval: tuple[int, int]
    least_seeds: int
    seeds: int
    verdict_power: float
    runs: int
    hours: float | None

    @property
    def sentence(self) -> str:
        """The plan in plain words."""
        low, high = self.t_seeds_interval
        between = f" ({low} to {high}, as sigma is uncertain)" if low < high else ""
        words = (
            f"To find a difference of {self.difference:g} at sigma {self.noise.sigma:.3g} with "
            f"{100 * self.power:g}% power a paired t test needs {self.t_seeds} seeds an "
            f"arm{between}. "
        )
        if self.least_seeds > self.t_seeds:
            words += f"The verdict's test cannot speak with fewer than {self.least_seeds}. "
        if self.seeds > max(self.t_seeds, self.least_seeds):
            words += f"It has that power with {self.seeds}. "
        words += f"Run {self.seeds}: {self.runs} runs"
        return words + (f", {_duration(self.hours)}." if self.hours is not None else ".")

    def to_dict(self) -> dict[str, Any]:
        """Every field and the sentence, as plain values for JSON."""
        fields = asdict(self)
        return {
            **fields,
            "t_seeds_interval": list(self.t_seeds_interval),
            "sentence": self.sentence,
        }


def plan(
    difference: float,
    noise: float | str | Noise,
    *,
    comparisons: int = 1,
    power: float = 0.8,
    level: float = 0.05,
    correlation: float = 0.0,
    seconds: float | None = None,
    workers: int = 1,
) -> Plan:
    r"""How many seeds to run so that a difference is found, and how long that takes.

    With several comparisons each test is at ``level / m``, the strictest step of Holm's
    correction.

    Args:
        difference: The difference to be found, in the unit of the noise.
        noise: Standard deviation of a run; the name of a published figure, a key of
            ``KNOWN_NOISE``; or what :func:`estimate_noise` found in a study.
        comparisons: Number of arms compared with the baseline.
        power: The chance of finding the difference.
        level: The level of the tests.
        correlation: Correlation of two runs that share a seed. Keep 0 for a noise that was
            estimated from differences: it is in there.
        seconds: Seconds that one run takes.
        workers: Number of runs at a time.

    Returns:
        The plan.

    Raises:
        ValueError: If ``noise`` is an unknown name, or an argument is out of range.

    Example:
        >>> p = plan(0.30, "imagenet-resnet18", seconds=7200, workers=4)
        >>> p.t_seeds, p.least_seeds, p.seeds, p.hours
        (5, 6, 6, 6.0)
    """
    noise = _as_noise(noise)
    least = least_seeds(comparisons, level)
    check_positive(workers, "workers")

    def at(sigma: float) -> int:
        return seeds_needed(
            difference,
            sigma,
            power=power,
            level=level / comparisons,
            correlation=correlation,
        )

    # A sigma that was simply given is taken as it is.
    low, high = noise.interval() if noise.runs else (noise.sigma, noise.sigma)
    t_seeds = at(noise.sigma)
    effect = difference / (noise.sigma * math.sqrt(2 * (1 - correlation)))

    def found_by_verdict(n: int) -> float:
        return detection_power(effect, n, comparisons=comparisons, level=level)

    seeds = max(t_seeds, least)
    while found_by_verdict(seeds) < power:
        seeds += 1
    runs = seeds * (comparisons + 1)
    hours = None
    if seconds is not None:
        hours = math.ceil(runs / workers) * check_positive(seconds, "seconds") / 3600
    return Plan(
        difference=difference,
        noise=noise,
        comparisons=comparisons,
        power=power,
        level=level,
        t_seeds=t_seeds,
        t_seeds_interval=(at(low), at(high)),
        least_seeds=least,
        seeds=seeds,
        verdict_power=found_by_verdict(seeds),
        runs=runs,
        hours=hours,
    )


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


# Arguments ---------------------------------------------------------------------------------------


def check_positive(value: float, name: str) -> float:
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"Expected `{name}` to be positive and finite, but got {value}.")
    return value


def check_fraction(value: float, name: str) -> float:
    if not 0 < value < 1:
        raise ValueError(f"Expected `{name}` to be between 0 and 1, but got {value}.")
    return value


def check_seeds(n: int) -> int:
    if n < 2:
        raise ValueError(f"Expected `n` to be at least 2, but got {n}.")
    return n


def check_step(step: float) -> float:
    if not (step >= 0 and math.isfinite(step)):
        raise ValueError(f"Expected `step` to be finite and not negative, but got {step}.")
    return step


def check_spread(sd: float) -> float:
    if not (sd >= 0 and math.isfinite(sd)):
        raise ValueError(f"Expected `sd` to be finite and not negative, but got {sd}.")
    return sd
