"""How one arm is judged: its failures, and its runs by one or two metrics, look by look.

The rules are those of :mod:`powergrad.lab.stats.verdict`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from powergrad.lab.stats.looks import LEAST, Design, least_runs
from powergrad.lab.stats.tests import (
    Array,
    Noise,
    compare_means,
    correlation,
    failures_p,
    permutation_p,
    pooled_sd,
    rank_p,
    should_pair,
    variance,
)

Verdict = Literal["better", "worse", "equivalent", "not settled"]
VERDICTS: tuple[Verdict, ...] = ("better", "worse", "equivalent", "not settled")
By = Literal["mean", "failures", "identity"]
Claim = Literal["", "better", "not worse"]


class Arm(NamedTuple):
    """The runs of an arm by one metric."""

    name: str
    values: Mapping[int, float]  # by seed
    failed: Collection[int] = ()  # the seeds of runs without a value
    diverged: Collection[int] = ()  # the seeds of runs whose value is that of guessing

    @property
    def seeds(self) -> list[int]:
        return sorted({*self.values, *self.failed})

    @property
    def rate(self) -> float:  # of failures
        return len(self.failed) / max(1, len(self.seeds))

    @property
    def is_constant(self) -> bool:
        """Whether its runs do not vary, apart from rounding; not if all of them diverged."""
        values = [*self.values.values()]
        if len(values) < 2 or len(self.diverged) == len(values):
            return False
        return max(values) - min(values) <= 1e-12 * max(map(abs, values))

    def first(self, size: int) -> Arm:
        """Its runs with the smallest seeds."""
        seeds = self.seeds[:size]
        values = {seed: self.values[seed] for seed in seeds if seed in self.values}
        lost = [seed for seed in values if seed in self.diverged]
        return Arm(self.name, values, [seed for seed in seeds if seed not in values], lost)


@dataclass(frozen=True)
class Rule:
    """How a metric is judged."""

    margin: float
    higher_is_better: bool = True
    step: float = 0.0  # the resolution of the metric; 0 if it is continuous
    noise: Noise | None = None  # the known noise; None if it is estimated
    target: float | None = None  # compared with instead of the baseline
    pairs: bool = False  # whether runs are compared in pairs where that pays
    claim: Claim = ""  # with two metrics, what must be shown of this one for "better"

    def pairing(self, arm: Arm, baseline: Arm) -> tuple[float | None, bool]:
        """The correlation of the runs of the same seed, and whether they are compared in pairs."""
        a, b = arm.values, baseline.values
        seeds = sorted(a.keys() & b.keys())
        if not self.pairs or self.noise or self.target is not None or len(seeds) < LEAST:
            return None, False
        found = float(correlation([a[seed] for seed in seeds], [b[seed] for seed in seeds]))
        return found, should_pair(found, len(seeds))

    def judge(self, arm: Arm, baseline: Arm, level: float, is_paired: bool, is_last: bool) -> Part:
        """Judge the runs of a look; without an interval if `level` is 0."""
        a, b = arm.values, baseline.values
        seeds = sorted(a.keys() & b.keys())
        is_paired = is_paired and bool(variance([a[seed] - b[seed] for seed in seeds]) > 0)
        x = np.array([a[seed] for seed in (seeds if is_paired else a)])
        y = np.array([b[seed] for seed in (seeds if is_paired else b)])
        samples = [x, y] if self.target is None else [x]
        least = min(map(len, samples))
        part = Part(samples, pairs=least if is_paired else 0)
        if not least:
            return part
        other = y if self.target is None else np.array(self.target)
        part = part._replace(difference=float(x.mean() - other.mean()))
        if least < 2:
            return part
        both = [arm, baseline][: len(samples)]
        part = part._replace(sd=pooled_sd(samples))
        part = part._replace(constant=tuple(one.name for one in both if one.is_constant))
        if not level or least < least_runs(self.noise) or part.constant:
            return part
        if a == b and self.target is None:
            return part._replace(interval=(0.0, 0.0), is_identical=True, is_equivalent=True)
        found = compare_means(x, other, step=self.step, noise=self.noise, is_paired=is_paired)
        if found.error == 0:
            return part
        is_decisive = is_last or self.claim != "" or self.target is not None
        sign, is_equivalent = found.judge(level, self.margin, is_decisive)
        reach = float(found.reach(level))
        if is_paired or self.noise or self.target is not None:
            part = part._replace(sd=float(found.error) * math.sqrt(least / len(samples)))
        return part._replace(
            interval=(part.difference - reach, part.difference + reach),
            p=float(found.p()),
            sign=int(sign) if self.higher_is_better else -int(sign),
            is_equivalent=bool(is_equivalent) and self.target is None,
        )

    def is_shown(self, part: Part) -> bool:
        """Whether the claim holds."""
        worst = part.interval[0] if self.higher_is_better else -part.interval[1]
        return worst > -self.margin if self.claim == "not worse" else part.sign > 0

    def doubt(self, part: Part, level: float) -> str:
        """A sentence if tests with other assumptions disagree; otherwise empty."""
        if not math.isfinite(part.interval[0]) or part.is_identical or part.pairs:
            return ""
        if self.noise is not None:
            sd, df = pooled_sd(part.samples), sum(len(sample) - 1 for sample in part.samples)
            if not self.noise.is_exceeded(sd, df):
                return ""
            return f"But the runs vary by {sd:.2g}, which is more than the known noise."
        if self.target is not None:
            return ""
        a, b = map(tuple, part.samples)
        others = {"a permutation test": permutation_p(a, b), "a rank test": rank_p(a, b)}
        disagree = {name: p for name, p in others.items() if (p < level) != (part.p < level)}
        which = " and ".join(f"{name} (p = {p:.2g})" for name, p in disagree.items())
        if not which:
            return ""
        if part.p < level:
            return f"But {which} would not find a difference: it may depend on a few extreme runs."
        return f"But {which}, uncorrected, would find a difference: the noise is not symmetric."


class Part(NamedTuple):
    """The result of one metric at one look."""

    samples: list[Array]  # the compared runs of arm and baseline; with a target, of the arm
    pairs: int = 0  # compared pairs of runs of the same seed; 0 if runs are not paired
    difference: float = math.nan
    sd: float = math.nan
    interval: tuple[float, float] = (-math.inf, math.inf)
    p: float = 1.0
    sign: int = 0  # +1 if it is better, -1 if it is worse, as `Difference.judge` says
    is_equivalent: bool = False  # whether the interval is inside the margin
    is_identical: bool = False
    constant: tuple[str, ...] = ()  # the names of arms that do not vary
    correlation: float | None = None  # of the runs of the same seed, at the first look


class Settled(NamedTuple):
    """The result at the look at which an arm is settled, or else at the last look so far."""

    plan: Design
    arm: Arm
    baseline: Arm
    parts: list[Part]  # one per metric
    verdict: Verdict
    by: By  # what decides the verdict, or prevents one
    look: int
    tests: int  # that share the error
    level: float  # of each of them at this look


def settle(
    arm: Sequence[Arm],
    baseline: Sequence[Arm],
    rules: Sequence[Rule],
    design: Design | None,
    arms: int = 1,
) -> Settled:
    """Judge one of several arms by its metrics, at the look at which it is settled."""
    is_target = rules[0].target is not None
    sizes = [len(side[0].seeds) for side in ([arm] if is_target else [arm, baseline])]
    plan, looks = design or Design((min(sizes),)), [max(sizes)]
    if design:
        looks = [n for n in plan.looks if n <= min(sizes)] or [min(sizes)]
    pairing: list[tuple[float | None, bool]] = []
    found = None
    for look, size in enumerate(looks):
        first = [one.first(size) for one in arm], [one.first(size) for one in baseline]
        both = list(zip(rules, *first, strict=True))
        pairing = pairing or [rule.pairing(a, b) for rule, a, b in both]
        _, mine, theirs = both[0]
        has_failures = not is_target and bool(mine.failed or theirs.failed)
        tests = arms * (len(rules) + has_failures)
        level = plan.nominal(look, tests) if min(sizes) >= plan.looks[0] else 0.0
        is_last = look == len(plan.looks) - 1
        parts = [
            rule.judge(a, b, level, is_paired, is_last)._replace(correlation=correlation)
            for (rule, a, b), (correlation, is_paired) in zip(both, pairing, strict=True)
        ]
        verdict = combine(rules, parts)
        by = "identity" if all(part.is_identical for part in parts) else "mean"
        excess = mine.rate - theirs.rate
        too_good = ("better", "equivalent") if excess > 0 else ("worse",) if excess < 0 else ()
        if verdict in too_good:
            verdict, by = "not settled", "failures"
        counts = (n for one in (mine, theirs) for n in (len(one.failed), len(one.seeds)))
        if has_failures and (p := failures_p(*counts)) < level:
            verdict, by = "worse" if excess > 0 else "better", "failures"
            parts[0] = parts[0]._replace(p=p)
        found = Settled(plan, mine, theirs, parts, verdict, by, look, tests, level)
        if verdict != "not settled":
            break
    assert found is not None  # there is always one look
    return found


def combine(rules: Sequence[Rule], parts: Sequence[Part]) -> Verdict:
    """The verdict by one metric, or by two with a claim each."""
    shown = [rule.is_shown(part) for rule, part in zip(rules, parts, strict=True)]
    if all(shown):
        return "better"
    if any(part.sign < 0 and not is_shown for part, is_shown in zip(parts, shown, strict=True)):
        return "worse"
    return "equivalent" if all(part.is_equivalent for part in parts) else "not settled"
