r"""The verdict on each arm: better, worse, equivalent, or not settled.

One procedure gives interval, p-value and verdict, so they cannot contradict each other. At each
look of the study's design, every arm has a *repeated confidence interval* for its mean difference
from the baseline: a t interval at the nominal level of the look, corrected for the other arms. With
95% confidence, all intervals of all arms at all looks contain the true differences. So

1. an arm is *better* or *worse* if its interval excludes 0;
2. otherwise it is *equivalent* if its interval lies inside the margin;
3. otherwise it is *not settled*, and gets more runs until the last look.

Before the last look, a study stops for what matters: an arm is better or worse only if its mean
difference also exceeds the margin, and is equivalent also if its interval excludes 0 inside the
margin. Otherwise luck would often choose between two verdicts that are both true.

The p-value is the smallest error at which the interval would exclude 0: it is below 0.05 exactly if
the interval does. Further rules:

- Where runs failed, Fisher's test of their numbers shares the error like another arm. If they
  differ, that is the verdict. Otherwise the side that failed more often is never called better.
- Without variation between the runs of the arm or of the baseline, there is no verdict. An arm that
  equals the baseline at every seed is equivalent.
- At the first look it is decided whether runs of the same seed are compared in pairs.
- A known noise replaces the estimate; a target replaces the baseline.
- A second metric shares the error like another arm. An arm is better if both claims are shown:
  better in the one metric, and in the other not worse by the margin.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from powergrad.lab.files import json_safe
from powergrad.lab.stats.looks import LEAST, Design
from powergrad.lab.stats.settle import Arm, By, Claim, Rule, Verdict, settle
from powergrad.lab.stats.tests import Noise, check_positive, failure_bound, step_of


@dataclass(frozen=True)
class Comparison:
    """The comparison of one arm with the baseline."""

    arm: str
    baseline: str
    unit: str  # unit of a difference, such as "points of test accuracy"
    n: int  # compared runs of the arm
    n_baseline: int  # compared runs of the baseline
    looks: tuple[int, ...]  # runs per arm at each look of the design
    comparisons: int  # tests that share the error: arms, their second metrics and failures
    level: float  # probability of any false verdict, over all looks and arms
    difference: float  # mean of the arm minus the mean of the baseline
    interval: tuple[float, float]  # its interval
    p: float  # p-value, corrected in the same way
    p_alone: float  # uncorrected p-value; of the failures if they decide the verdict
    sd: float  # standard deviation of one run; of pairs, that of a difference / sqrt(2)
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
    by: By = "mean"  # what decides the verdict, or prevents one
    constant: tuple[str, ...] = ()  # which of the two do not vary, so that there is no verdict
    correlation: float | None = None  # of the runs of the same seed, at the first look
    pairs: int = 0  # compared pairs of runs of the same seed; 0 if runs are not paired
    noise: Noise | None = None  # the known noise of a run; None if it is estimated
    target: float | None = None  # compared with instead of the baseline
    claim: Claim = ""  # with a second metric, what must be shown of this one for "better"
    second: Comparison | None = None  # the same by the second metric, at the same look

    @property
    def done(self) -> int:  # including failed runs
        return self.n + self.failed

    @property
    def is_open(self) -> bool:
        """Whether more runs are planned for this arm."""
        has_ended = self.withheld or (self.constant and self.done >= max(LEAST, self.looks[0]))
        is_settled = self.verdict != "not settled"
        return not is_settled and not has_ended and self.done < self.looks[-1]

    @functools.cached_property
    def runs_needed(self) -> int:
        """The number of runs per arm that would probably settle it, see :func:`runs_to_settle`."""
        from powergrad.lab.stats.power import runs_to_settle

        return runs_to_settle(self.sd, self.margin, comparisons=self.comparisons, level=self.level)

    @property
    def ending(self) -> str:
        """What the arm is, such as ``better than baseline``."""
        if self.by == "identity":
            return f"without effect ({self.counted} are those of {self.baseline})"
        if self.verdict == "equivalent":
            also = f" and {self.second.margin:g}" if self.second else ""
            return f"equivalent to {self.baseline} within {self.margin:g}{also}"
        if self.verdict == "not settled":
            return "without a verdict" if self.constant else self.verdict
        what = self.claims if self.second and self.verdict == "better" else self.verdict
        by = ", by its failures" if self.by == "failures" else ""
        return f"{what} than {self.baseline}{by}"

    @property
    def claims(self) -> str:
        """What must be shown of two metrics for "better"."""
        return " and ".join(
            f"{part.claim} in {part.unit}" + f" by {part.margin:g}" * (part.claim == "not worse")
            for part in (self, self.second)
            if part
        )

    @property
    def sentence(self) -> str:
        """The verdict as a sentence, with its numbers."""
        numbers = self._numbers + (f" and {self.second._numbers}" if self.second else "")
        is_simple = self.second is None and self.target is None
        text = f"{self.arm} is {self.ending}: {numbers}."
        if self.done < self.looks[0]:
            finished = f"{self.done} of {self.looks[0]} {self.counted} are finished"
            text = f"{self.arm} has no verdict yet: {finished}."
        elif self.verdict != "not settled" and self.by == "failures":
            text = f"{self.arm} is {self.ending} ({format_p(self.p)}, exact test)."
        elif self.by == "identity":
            text = f"{self.arm} is {self.ending} at every seed, to the last digit."
        elif self.withheld or (self.by == "failures" and math.isfinite(self.interval[0])):
            who = self.arm if self.fails_more else self.baseline
            why = self.withheld or f"No verdict, because more {self.counted} of {who} failed."
            text = f"{self.arm} against {self.baseline}: {numbers}. {why}"
        elif self.verdict == "not settled":
            has_interval = math.isfinite(self.interval[0]) and not self.constant
            text = f"{self._cannot_tell(self.n)}: {numbers}." if has_interval else self._why_none
        elif self.p < self.level and is_simple and max(map(abs, self.interval)) < self.margin:
            text += f" The difference is not 0, but smaller than the margin of {self.margin:g}."
        return " ".join(filter(None, [text, self.doubt, self._failures]))

    @property
    def fails_more(self) -> bool:
        """Whether a larger part of the runs of the arm failed than of the baseline."""
        done_baseline = self.n_baseline + self.failed_baseline
        return self.failed * done_baseline > self.failed_baseline * self.done

    @property
    def _why_none(self) -> str:
        """Why there is no interval."""
        least = self.n if self.target is not None else min(self.n, self.n_baseline)
        if self.constant:
            same = f"all {self.counted} of {' and of '.join(self.constant)} give the same number"
            return f"{self.arm} has no verdict: {same}, so their noise is unknown."
        if least < 2:
            reason = f"the noise cannot be estimated from {least} finished {self.counted}"
            return f"{self.arm} has no verdict yet: {reason}."
        needed = f"A verdict needs at least {LEAST} {self.counted} per arm."
        return f"{self._cannot_tell(least)} ({self.signed} between the means). {needed}"

    def _cannot_tell(self, n: int) -> str:
        whether = f"whether {self.arm} differs from {self.baseline}"
        if self.second:
            whether = f"whether {self.arm} is {self.claims} than {self.baseline}"
        elif self.p < self.level:
            whether += f" by more than {self.margin:g}"
        return f"{n} {self.counted} per arm cannot tell {whether}"

    @property
    def signed(self) -> str:
        """The difference with its sign."""
        return format_signed(self.difference, self._digits)

    @property
    def _numbers(self) -> str:
        return " ".join(filter(None, [self.signed, self.unit, f"({self._evidence})"]))

    @property
    def _digits(self) -> int:
        """The decimals for two digits of the interval's width, and at least one of the margin."""
        half = (self.interval[1] - self.interval[0]) / 2
        size = half if math.isfinite(half) else abs(self.difference)
        return max(0, 1 - math.floor(math.log10(max(self.margin / 10, size) or 1)))

    @property
    def _evidence(self) -> str:
        is_same = self.n == self.n_baseline or self.target is not None
        counts = f"{self.n}" if is_same else f"{self.n} and {self.n_baseline}"
        sizes = f"{counts} {self.counted}{' per arm' if is_same else ''}"
        if self.pairs:
            sizes = f"{self.pairs} pairs of {self.counted}"
        if self.noise:
            sizes += f", known noise {self.noise.sigma:g} {self.noise.source}".rstrip()
        interval = format_interval(self.interval, self._digits)
        return f"{100 * (1 - self.level):g}% interval {interval}, {format_p(self.p)}, {sizes}"

    @property
    def _failures(self) -> str:
        """The number of lost runs and a bound of the rate; empty if it does not matter."""
        what, lost, lost_baseline = "diverged", self.diverged, self.diverged_baseline
        runs, runs_baseline = self.n, self.n_baseline
        if self.failed or self.failed_baseline:
            what, lost, lost_baseline = "failed", self.failed, self.failed_baseline
            runs, runs_baseline = self.done, self.n_baseline + lost_baseline
        if not lost and not lost_baseline and self.verdict != "equivalent":
            return ""
        bound = f"up to {100 * failure_bound(lost, runs):.0f}% might (95% confidence)"
        text = f"{lost} of {runs} {self.counted} {what}, so {bound}."
        if lost_baseline or (what == "failed" and self.target is None):
            text += f" Of {self.baseline}, {lost_baseline} of {runs_baseline} {what}."
        return text

    def to_dict(self) -> dict[str, Any]:
        """Every field and the sentence, for JSON."""
        return json_safe({**asdict(self), "open": self.is_open, "sentence": self.sentence})


@dataclass(frozen=True)
class Second:
    """A second metric, and the values of its runs."""

    values: Mapping[str, Mapping[int, float]]
    claim: Claim  # what must be shown of it for "better"; of the first metric, the other claim
    margin: float
    higher_is_better: bool
    unit: str


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
    noise: Noise | None = None,
    target: float | None = None,
    pairs: bool = False,
    second: Second | None = None,
) -> list[Comparison]:
    r"""Compare every arm with the baseline, or with a target.

    The docstring of this module explains the procedure. An arm is judged at the first look at which
    it is settled. Later runs do not count, so a verdict does not change afterwards.
    """
    names = ", ".join(map(repr, values)) or "none"
    if len(values) < (2 if target is None else 1):
        raise ValueError(f"Expected a baseline and at least one other arm, but got {names}.")
    if baseline not in values:
        raise ValueError(f"Expected `baseline` to be one of {names}, but got {baseline!r}.")
    for arm in (arm for arm in values if not values[arm] and not failed.get(arm)):
        raise ValueError(f"Expected runs of every arm, but got none of {arm!r}.")
    arms = [arm for arm in values if arm != baseline or target is not None]
    check_positive(margin, "margin")
    measured, units, claim = [values], [unit], ""
    if second is not None:
        measured, units = [values, second.values], [unit, second.unit]
        claim = "not worse" if second.claim == "better" else "better"
    every = [[v for arm in runs.values() for v in arm.values()] for runs in measured]
    steps = [step_of(one) if step is None else step for one in every]
    rules = [Rule(margin, higher_is_better, steps[0], noise, target, pairs, claim)]
    if second is not None:
        about = second.margin, second.higher_is_better, steps[1]
        rules.append(Rule(*about, pairs=pairs, claim=second.claim))

    def runs_of(name: str) -> list[Arm]:
        lost = failed.get(name, ()), diverged.get(name, ())
        return [Arm(name, metric.get(name, {}), *lost) for metric in measured]

    results = []
    for name in arms:
        against = runs_of(baseline if target is None else "")
        found = settle(runs_of(name), against, rules, design, len(arms))
        arm, other, plan = found.arm, found.baseline, found.plan
        withheld = withhold.get(name, "") if found.verdict == "better" else ""
        verdict: Verdict = "not settled" if withheld else found.verdict
        compared = None
        for place in reversed(range(len(rules))):  # the first metric holds the second
            rule, part = rules[place], found.parts[place]
            compared = Comparison(
                arm=name,
                baseline=baseline if target is None else f"the target {target:g}",
                unit=units[place],
                n=len(arm.values),
                n_baseline=len(other.values) if target is None else 0,
                looks=plan.looks,
                comparisons=found.tests,
                level=plan.level,
                difference=part.difference,
                interval=part.interval,
                p=plan.overall(part.p, found.look, found.tests),
                p_alone=part.p,
                sd=part.sd,
                margin=rule.margin,
                step=rule.step,
                diverged=len(arm.diverged),
                diverged_baseline=len(other.diverged),
                verdict=verdict,
                withheld=withheld,
                doubt=rule.doubt(part, found.level),
                counted=counted,
                failed=len(arm.failed),
                failed_baseline=len(other.failed),
                by=found.by,
                constant=tuple(dict.fromkeys(n for p in found.parts[place:] for n in p.constant)),
                correlation=part.correlation,
                pairs=part.pairs,
                noise=rule.noise,
                target=rule.target,
                claim=rule.claim,
                second=compared,
            )
        assert compared is not None
        results.append(compared)
    return results


def format_signed(value: float, digits: int = 2) -> str:
    """Format a difference with its sign; zero is always +0, and NaN is a dash."""
    return "-" if math.isnan(value) else f"{round(value, digits) + 0.0:+.{digits}f}"


def format_p(p: float, digits: int = 2) -> str:
    """Format a p-value with so many significant digits."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.{digits}g}"


def format_interval(interval: Sequence[float], digits: int = 2) -> str:
    """Format an interval. Its ends keep their signs, to show whether it contains 0."""
    if not all(map(math.isfinite, interval)):
        return "no interval"
    low, high = (f"{end + 0.0:+.{digits}f}" for end in interval)
    return f"{low} to {high}"
