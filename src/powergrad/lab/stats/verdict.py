r"""The verdict on each arm: better, worse, equivalent, or not settled.

One procedure gives interval, p-value and verdict, so they cannot contradict each other. At each
look of the study's design, every arm has a *repeated confidence interval* for its mean difference
from the baseline: Welch's t interval at the nominal level of the look, corrected for the other
arms. With 95% confidence, all intervals of all arms at all looks contain the true differences. So

1. an arm is *better* or *worse* as soon as its interval excludes 0;
2. otherwise it is *equivalent* as soon as its interval lies inside the margin;
3. otherwise it is *not settled*, and gets more runs until the last look.

The p-value is the smallest error at which the interval would exclude 0. It is below 0.05 exactly if
the verdict is *better* or *worse*.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from powergrad.lab.files import json_safe
from powergrad.lab.stats.looks import LEAST, Design
from powergrad.lab.stats.tests import (
    Array,
    check_positive,
    failure_bound,
    permutation_p,
    rank_p,
    step_of,
    welch,
)

Verdict = Literal["better", "worse", "equivalent", "not settled"]
VERDICTS: tuple[Verdict, ...] = ("better", "worse", "equivalent", "not settled")


@dataclass(frozen=True)
class Comparison:
    """The comparison of one arm with the baseline.

    Attributes:
        arm: The name of the arm.
        baseline: The name of the baseline.
        unit: The unit of a difference, such as "points of test accuracy".
        n: The number of compared runs of the arm.
        n_baseline: The number of compared runs of the baseline.
        looks: The number of runs per arm at each look of the design.
        comparisons: The number of arms that share the error.
        level: The probability of any false verdict, over all looks and arms.
        difference: The mean of the arm minus the mean of the baseline.
        interval: Its interval, corrected for all looks and arms; infinite before the first look.
        p: The p-value, corrected in the same way.
        p_alone: The uncorrected p-value of Welch's test.
        sd: The standard deviation of one run, pooled over both arms.
        margin: The largest difference that does not matter.
        step: The resolution of the metric; 0 if it is continuous.
        diverged: The number of diverged runs of the arm.
        diverged_baseline: The number of diverged runs of the baseline.
        verdict: "better", "worse", "equivalent" or "not settled".
        withheld: Why a verdict of "better" is withheld; empty if it is not.
        doubt: A sentence if tests with other assumptions disagree; otherwise empty.
        counted: What is compared, "runs" or "repeats".
        failed: The number of failed runs of the arm: planned runs without a value.
        failed_baseline: The number of failed runs of the baseline.
    """

    arm: str
    baseline: str
    unit: str
    n: int
    n_baseline: int
    looks: tuple[int, ...]
    comparisons: int
    level: float
    difference: float
    interval: tuple[float, float]
    p: float
    p_alone: float
    sd: float
    margin: float
    step: float
    diverged: int
    diverged_baseline: int
    verdict: Verdict
    withheld: str = ""
    doubt: str = ""
    counted: str = "runs"
    failed: int = 0
    failed_baseline: int = 0

    @property
    def done(self) -> int:
        """The number of finished runs of the arm, including failed ones."""
        return self.n + self.failed

    @property
    def is_open(self) -> bool:
        """Whether more runs are planned for this arm."""
        return self.verdict == "not settled" and not self.withheld and self.done < self.looks[-1]

    @functools.cached_property
    def runs_needed(self) -> int:
        """The number of runs per arm that would probably settle it, see :func:`runs_to_settle`."""
        from powergrad.lab.stats.power import runs_to_settle

        return runs_to_settle(self.sd, self.margin, comparisons=self.comparisons, level=self.level)

    @property
    def sentence(self) -> str:
        """The verdict as a sentence, with its numbers."""
        unit = f" {self.unit}" if self.unit else ""
        numbers = f"{self._number}{unit} ({self._evidence})"
        if self.done < self.looks[0]:
            finished = f"{self.done} of {self.looks[0]} {self.counted} are finished"
            text = f"{self.arm} has no verdict yet: {finished}."
        elif not math.isfinite(self.interval[0]):
            text = self._why_none
        elif self.withheld:
            text = f"{self.arm} against {self.baseline}: {numbers}. {self.withheld}"
        elif self.verdict == "equivalent":
            text = f"{self.arm} is equivalent to {self.baseline} within {self.margin:g}: {numbers}."
        elif self.verdict != "not settled":
            text = f"{self.arm} is {self.verdict} than {self.baseline}: {numbers}."
            if max(map(abs, self.interval)) < self.margin:
                text += f" The difference is smaller than the margin of {self.margin:g}."
        else:
            text = (
                f"{self.n} {self.counted} per arm cannot tell whether {self.arm} differs from "
                f"{self.baseline}: {numbers}."
            )
        return " ".join(filter(None, [text, self.doubt, self._failures]))

    @property
    def _why_none(self) -> str:
        """Why there is no interval."""
        least = min(self.n, self.n_baseline)
        if least < 2:
            reason = f"the noise cannot be estimated from one {self.counted[:-1]}"
            return f"{self.arm} has no verdict yet: {reason}."
        if self.sd == 0 and (self.step == 0 or self.difference == 0):
            return (
                f"{self.arm} has no verdict: all {self.n} {self.counted} of each arm give the same "
                "number, so their noise is unknown."
            )
        return (
            f"{least} {self.counted} per arm cannot tell whether {self.arm} differs from "
            f"{self.baseline} ({self._number} between the means). A verdict needs at least {LEAST} "
            f"{self.counted} per arm."
        )

    @property
    def _number(self) -> str:
        return signed(self.difference, self._digits)

    @property
    def _digits(self) -> int:
        """The decimals for two digits of the interval's width, and at least one of the margin."""
        half = (self.interval[1] - self.interval[0]) / 2
        size = half if math.isfinite(half) else abs(self.difference)
        return max(0, 1 - math.floor(math.log10(max(size, self.margin / 10))))

    @property
    def _evidence(self) -> str:
        is_same = self.n == self.n_baseline
        counts = f"{self.n}" if is_same else f"{self.n} and {self.n_baseline}"
        sizes = f"{counts} {self.counted}{' per arm' if is_same else ''}"
        confidence = f"{100 * (1 - self.level):g}% interval {span(self.interval, self._digits)}"
        return f"{confidence}, {p_in_words(self.p)}, {sizes}"

    @property
    def _failures(self) -> str:
        """The number of diverged runs and a bound of the rate; empty if it does not matter."""
        if not self.diverged and not self.diverged_baseline and self.verdict != "equivalent":
            return ""
        bound = failure_bound(self.diverged, self.n)
        text = f"{self.diverged} of {self.n} {self.counted} diverged"
        text += f", so up to {100 * bound:.0f}% might (95% confidence)."
        if self.diverged_baseline:
            text += f" Of {self.baseline}, {self.diverged_baseline} of {self.n_baseline} diverged."
        return text

    def to_dict(self) -> dict[str, Any]:
        """Every field and the sentence, for JSON."""
        return json_safe({**asdict(self), "open": self.is_open, "sentence": self.sentence})


def compare(
    values: Mapping[str, Mapping[int, float]],
    baseline: str,
    *,
    margin: float,
    design: Design | None = None,
    higher_is_better: bool = True,
    unit: str = "",
    step: float | None = None,
    diverged: Mapping[str, Collection[int]] | None = None,
    failed: Mapping[str, Collection[int]] | None = None,
    withhold: Mapping[str, str] | None = None,
    counted: str = "runs",
) -> list[Comparison]:
    r"""Compare every arm with the baseline.

    The docstring of this module explains the procedure. An arm is judged at the first look at which
    it is settled. Later runs do not count, so a verdict does not change afterwards.

    Example:
        >>> accuracy = {
        ...     "baseline": {0: 97.2, 1: 97.5, 2: 96.9, 3: 97.4, 4: 97.1, 5: 97.3},
        ...     "pgt": {0: 97.8, 1: 97.7, 2: 97.5, 3: 97.6, 4: 97.9, 5: 97.7},
        ... }
        >>> (result,) = compare(accuracy, "baseline", margin=0.2, unit="points of accuracy")
        >>> result.verdict
        'better'
        >>> print(result.sentence)  # doctest: +NORMALIZE_WHITESPACE
        pgt is better than baseline: +0.47 points of accuracy
        (95% interval +0.23 to +0.71, p = 0.0018, 6 runs per arm).
    """
    runs = _checked(values, baseline)
    check_positive(margin, "margin")
    arms = [arm for arm in runs if arm != baseline]
    if step is None:
        step = step_of([value for metrics in runs.values() for value in metrics.values()])
    lost = {arm: set(seeds) for arm, seeds in (diverged or {}).items()}
    planned = {arm: sorted({*runs[arm], *(failed or {}).get(arm, ())}) for arm in runs}
    results = []
    for arm in arms:
        plan = design or Design((min(len(planned[arm]), len(planned[baseline])),))
        judged, first, first_baseline = None, [], []
        for look, (n, k) in enumerate(_sizes(plan, design, planned[arm], planned[baseline])):
            first, first_baseline = planned[arm][:n], planned[baseline][:k]
            is_early = min(n, k) < plan.looks[0]
            if runs[arm].keys().isdisjoint(first) or runs[baseline].keys().isdisjoint(
                first_baseline
            ):  # all of them failed
                first, first_baseline, is_early = planned[arm], planned[baseline], True
            judged = _Judged.at(
                _values(runs[arm], first),
                _values(runs[baseline], first_baseline),
                plan,
                look,
                is_early=is_early,
                comparisons=len(arms),
                margin=margin,
                higher_is_better=higher_is_better,
                step=step,
            )
            if judged.verdict != "not settled":
                break
        assert judged is not None  # there is always one look
        seeds, seeds_baseline = set(first), set(first_baseline)  # of the look that was judged
        withheld = (withhold or {}).get(arm, "") if judged.verdict == "better" else ""
        results.append(
            Comparison(
                arm=arm,
                baseline=baseline,
                unit=unit,
                n=len(judged.arm),
                n_baseline=len(judged.baseline),
                looks=plan.looks,
                comparisons=len(arms),
                level=plan.level,
                difference=judged.difference,
                interval=judged.interval,
                p=plan.overall(judged.p, judged.look, len(arms)),
                p_alone=judged.p,
                sd=judged.sd,
                margin=float(margin),
                step=step,
                diverged=len(lost.get(arm, set()) & seeds),
                diverged_baseline=len(lost.get(baseline, set()) & seeds_baseline),
                verdict="not settled" if withheld else judged.verdict,
                withheld=withheld,
                doubt=judged.doubt(),
                counted=counted,
                failed=len(seeds - runs[arm].keys()),
                failed_baseline=len(seeds_baseline - runs[baseline].keys()),
            )
        )
    return results


def _sizes(
    plan: Design, design: Design | None, arm: Sized, baseline: Sized
) -> Iterator[tuple[int, int]]:
    """The numbers of runs of arm and baseline at each look that is reached; at least one."""
    least = min(len(arm), len(baseline))
    if design is None:
        yield len(arm), len(baseline)
    elif least < plan.looks[0]:
        yield least, least
    else:
        yield from ((look, look) for look in plan.looks if look <= least)


class _Judged(NamedTuple):
    """The result of one look."""

    arm: Array
    baseline: Array
    look: int
    difference: float
    sd: float
    verdict: Verdict
    nominal: float = 0.0
    interval: tuple[float, float] = (-math.inf, math.inf)
    p: float = 1.0

    @classmethod
    def at(
        cls,
        arm: Array,
        baseline: Array,
        design: Design,
        look: int,
        *,
        is_early: bool,
        comparisons: int,
        margin: float,
        higher_is_better: bool,
        step: float,
    ) -> _Judged:
        n, k = len(arm), len(baseline)
        difference = float(arm.mean() - baseline.mean())
        if min(n, k) < 2:
            return cls(arm, baseline, look, difference, math.nan, "not settled")
        squares = arm.var(ddof=1) * (n - 1) + baseline.var(ddof=1) * (k - 1)
        sd = math.sqrt(squares / (n + k - 2))
        summary = welch(arm, baseline, step=step)
        if summary.error == 0 or is_early or min(n, k) < LEAST:
            return cls(arm, baseline, look, difference, sd, "not settled")
        nominal = design.nominal(look, comparisons)
        reach, p = float(summary.reach(nominal)), float(summary.p())
        low, high = difference - reach, difference + reach
        verdict: Verdict = "not settled"
        if p < nominal:
            verdict = "better" if (difference > 0) == higher_is_better else "worse"
        elif -margin < low and high < margin:
            verdict = "equivalent"
        return cls(arm, baseline, look, difference, sd, verdict, nominal, (low, high), p)

    def doubt(self) -> str:
        """A sentence if tests with other assumptions disagree; otherwise empty."""
        if not self.nominal or len(self.arm) < LEAST:
            return ""
        samples = self.arm, self.baseline
        others = {"a permutation test": permutation_p(*samples), "a rank test": rank_p(*samples)}
        is_different = self.verdict in ("better", "worse")
        which = " and ".join(
            f"{name} (p = {p:.2g})"
            for name, p in others.items()
            if (p < self.nominal) != is_different
        )
        if not which:
            return ""
        if is_different:
            return f"But {which} would not find a difference: it may depend on a few extreme runs."
        return f"But {which}, uncorrected, would find a difference: the noise is not symmetric."


def _values(runs: Mapping[int, float], seeds: Sequence[int]) -> Array:
    return np.array([runs[seed] for seed in seeds if seed in runs])


def signed(value: float, digits: int = 2) -> str:
    """Format a difference with its sign; zero is always +0.

    Example:
        >>> signed(0.524), signed(-0.004)
        ('+0.52', '+0.00')
    """
    return f"{round(value, digits) + 0.0:+.{digits}f}"


def p_in_words(p: float, digits: int = 2) -> str:
    """Format a p-value with so many significant digits.

    Example:
        >>> p_in_words(0.0256), p_in_words(1e-5)
        ('p = 0.026', 'p < 0.001')
    """
    return "p < 0.001" if p < 0.001 else f"p = {p:.{digits}g}"


def span(interval: Sequence[float], digits: int = 2) -> str:
    """Format an interval. Its ends keep their signs, to show whether it contains 0.

    Example:
        >>> span((-0.003, 2.01)), span((-math.inf, math.inf))
        ('-0.00 to +2.01', 'no interval')
    """
    if not all(map(math.isfinite, interval)):
        return "no interval"
    low, high = (f"{end + 0.0:+.{digits}f}" for end in interval)
    return f"{low} to {high}"


def by_arm_and_seed(rows: Iterable[tuple[str, int, float]]) -> dict[str, dict[int, float]]:
    """Convert rows of (arm, seed, metric), such as those of a CSV file, for `compare`.

    Example:
        >>> by_arm_and_seed([("pgt", 0, 0.9), ("pgt", 1, 0.8), ("baseline", 0, 0.7)])
        {'pgt': {0: 0.9, 1: 0.8}, 'baseline': {0: 0.7}}
    """
    values: dict[str, dict[int, float]] = {}
    for arm, seed, value in rows:
        metrics = values.setdefault(arm, {})
        if seed in metrics:
            raise ValueError(
                f"Expected each seed once per arm, but got seed {seed} twice in {arm!r}."
            )
        metrics[seed] = value
    return values


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
    for arm, metrics in values.items():
        if not metrics:
            raise ValueError(f"Expected runs of every arm, but got none of {arm!r}.")
        runs[arm] = {seed: _metric(value, arm, seed) for seed, value in metrics.items()}
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
