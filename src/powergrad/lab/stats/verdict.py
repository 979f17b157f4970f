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
from collections.abc import Collection, Mapping, Sequence
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
    pooled_sd,
    rank_p,
    step_of,
    welch,
)

Verdict = Literal["better", "worse", "equivalent", "not settled"]
VERDICTS: tuple[Verdict, ...] = ("better", "worse", "equivalent", "not settled")


@dataclass(frozen=True)
class Comparison:
    """The comparison of one arm with the baseline."""

    arm: str
    baseline: str
    unit: str  # unit of a difference, such as "points of test accuracy"
    n: int  # compared runs of the arm
    n_baseline: int  # compared runs of the baseline
    looks: tuple[int, ...]  # runs per arm at each look of the design
    comparisons: int  # arms that share the error
    level: float  # probability of any false verdict, over all looks and arms
    difference: float  # mean of the arm minus the mean of the baseline
    interval: tuple[float, float]  # its interval
    p: float  # p-value, corrected in the same way
    p_alone: float  # uncorrected p-value of Welch's test
    sd: float  # standard deviation of one run, pooled over both arms
    margin: float  # largest difference that does not matter
    step: float  # resolution of the metric; 0 if it is continuous
    diverged: int  # diverged runs of the arm
    diverged_baseline: int  # diverged runs of the baseline
    verdict: Verdict  # "better", "worse", "equivalent" or "not settled"
    withheld: str = ""  # why a verdict of "better" is withheld; empty if it is not
    doubt: str = ""  # a sentence if tests with other assumptions disagree; otherwise empty
    counted: str = "runs"  # what is compared, "runs" or "repeats"
    failed: int = 0  # failed runs of the arm: planned runs without a value
    failed_baseline: int = 0  # failed runs of the baseline

    @property
    def done(self) -> int:  # including failed runs
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
        numbers = " ".join(filter(None, [self._number, self.unit, f"({self._evidence})"]))
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
            text = f"{self._cannot_tell(self.n)}: {numbers}."
        return " ".join(filter(None, [text, self.doubt, self._failures]))

    @property
    def _why_none(self) -> str:
        """Why there is no interval."""
        least = min(self.n, self.n_baseline)
        if least < 2:
            reason = f"the noise cannot be estimated from one {self.counted[:-1]}"
            return f"{self.arm} has no verdict yet: {reason}."
        if self.sd == 0 and (self.step == 0 or self.difference == 0):
            same = f"all {self.n} {self.counted} of each arm give the same number"
            return f"{self.arm} has no verdict: {same}, so their noise is unknown."
        needed = f"A verdict needs at least {LEAST} {self.counted} per arm."
        return f"{self._cannot_tell(least)} ({self._number} between the means). {needed}"

    def _cannot_tell(self, n: int) -> str:
        whether = f"whether {self.arm} differs from {self.baseline}"
        return f"{n} {self.counted} per arm cannot tell {whether}"

    @property
    def _number(self) -> str:
        return format_signed(self.difference, self._digits)

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
        interval = format_interval(self.interval, self._digits)
        return f"{100 * (1 - self.level):g}% interval {interval}, {format_p(self.p)}, {sizes}"

    @property
    def _failures(self) -> str:
        """The number of diverged runs and a bound of the rate; empty if it does not matter."""
        if not self.diverged and not self.diverged_baseline and self.verdict != "equivalent":
            return ""
        bound = f"up to {100 * failure_bound(self.diverged, self.n):.0f}% might (95% confidence)"
        text = f"{self.diverged} of {self.n} {self.counted} diverged, so {bound}."
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
    diverged: Mapping[str, Collection[int]] = {},
    failed: Mapping[str, Collection[int]] = {},
    withhold: Mapping[str, str] = {},
    counted: str = "runs",
) -> list[Comparison]:
    r"""Compare every arm with the baseline.

    The docstring of this module explains the procedure. An arm is judged at the first look at which
    it is settled. Later runs do not count, so a verdict does not change afterwards.
    """
    _check_arms(values, baseline)
    margin = float(check_positive(margin, "margin"))
    arms = [arm for arm in values if arm != baseline]
    if step is None:
        step = step_of([value for runs in values.values() for value in runs.values()])
    planned = {arm: sorted({*values[arm], *failed.get(arm, ())}) for arm in values}
    results = []
    for arm in arms:
        pair = (arm, baseline)
        counts = [len(planned[name]) for name in pair]
        plan = design or Design((min(counts),))
        # The numbers of runs of arm and baseline at each look that is reached; at least one.
        looks = [(n, n) for n in plan.looks if n <= min(counts)] or [(min(counts),) * 2]
        judged, seeds = None, planned
        for look, sizes in enumerate(looks if design else [counts]):
            is_early = min(sizes) < plan.looks[0]
            seeds = {name: planned[name][:size] for name, size in zip(pair, sizes, strict=True)}
            if any(values[name].keys().isdisjoint(seeds[name]) for name in pair):
                seeds, is_early = planned, True  # all of them failed
            first, second = (
                np.array([values[name][seed] for seed in seeds[name] if seed in values[name]])
                for name in pair
            )
            level = 0.0 if is_early else plan.nominal(look, len(arms))
            judged = _Judged(first, second, look, level).judge(margin, step, higher_is_better)
            if judged.verdict != "not settled":
                break
        assert judged is not None  # there is always one look
        lost = [len({*seeds[name]}.intersection(diverged.get(name, ()))) for name in pair]
        missing = [len({*seeds[name]} - values[name].keys()) for name in pair]
        withheld = withhold.get(arm, "") if judged.verdict == "better" else ""
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
                margin=margin,
                step=step,
                diverged=lost[0],
                diverged_baseline=lost[1],
                verdict="not settled" if withheld else judged.verdict,
                withheld=withheld,
                doubt=judged.doubt(),
                counted=counted,
                failed=missing[0],
                failed_baseline=missing[1],
            )
        )
    return results


class _Judged(NamedTuple):
    """The result of one look; without a verdict if its nominal level is 0."""

    arm: Array
    baseline: Array
    look: int
    level: float
    difference: float = math.nan
    sd: float = math.nan
    verdict: Verdict = "not settled"
    interval: tuple[float, float] = (-math.inf, math.inf)
    p: float = 1.0

    def judge(self, margin: float, step: float, higher_is_better: bool) -> _Judged:
        least = min(len(self.arm), len(self.baseline))
        difference = float(self.arm.mean() - self.baseline.mean())
        judged = self._replace(difference=difference)
        if least < 2:
            return judged
        judged = judged._replace(sd=pooled_sd([self.arm, self.baseline]))
        summary = welch(self.arm, self.baseline, step=step)
        if summary.error == 0 or not self.level or least < LEAST:
            return judged
        sign, is_equivalent = summary.judge(self.level, margin)
        verdict: Verdict = "equivalent" if is_equivalent else "not settled"
        if sign:
            verdict = "better" if (sign > 0) == higher_is_better else "worse"
        reach = float(summary.reach(self.level))
        interval = difference - reach, difference + reach
        return judged._replace(verdict=verdict, interval=interval, p=float(summary.p()))

    def doubt(self) -> str:
        """A sentence if tests with other assumptions disagree; otherwise empty."""
        if not math.isfinite(self.interval[0]):
            return ""
        others = {
            "a permutation test": permutation_p(tuple(self.arm), tuple(self.baseline)),
            "a rank test": rank_p(self.arm, self.baseline),
        }
        is_different = self.verdict in ("better", "worse")
        disagree = {name: p for name, p in others.items() if (p < self.level) != is_different}
        which = " and ".join(f"{name} (p = {p:.2g})" for name, p in disagree.items())
        if not which:
            return ""
        if is_different:
            return f"But {which} would not find a difference: it may depend on a few extreme runs."
        return f"But {which}, uncorrected, would find a difference: the noise is not symmetric."


def format_signed(value: float, digits: int = 2) -> str:
    """Format a difference with its sign; zero is always +0."""
    return f"{round(value, digits) + 0.0:+.{digits}f}"


def format_p(p: float, digits: int = 2) -> str:
    """Format a p-value with so many significant digits."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.{digits}g}"


def format_interval(interval: Sequence[float], digits: int = 2) -> str:
    """Format an interval. Its ends keep their signs, to show whether it contains 0."""
    if not all(map(math.isfinite, interval)):
        return "no interval"
    low, high = (f"{end + 0.0:+.{digits}f}" for end in interval)
    return f"{low} to {high}"


def _check_arms(values: Mapping[str, Mapping[int, float]], baseline: str) -> None:
    names = ", ".join(map(repr, values)) or "none"
    if len(values) < 2:
        raise ValueError(f"Expected a baseline and at least one other arm, but got {names}.")
    if baseline not in values:
        raise ValueError(f"Expected `baseline` to be one of {names}, but got {baseline!r}.")
    for arm in (arm for arm, runs in values.items() if not runs):
        raise ValueError(f"Expected runs of every arm, but got none of {arm!r}.")
