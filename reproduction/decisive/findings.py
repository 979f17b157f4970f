"""What the rows of docs/protocol.md say: the rule's verdict, and everything that is descriptive."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from powergrad.lab.stats import format_interval, format_p, format_signed
from powergrad.lab.study.space import Axis
from powergrad.lab.trainer.recipe import load_recipe
from reproduction.decisive.observed import FURTHER, RECIPES, REGIMES, Rows, differences, read, units
from reproduction.decisive.rule import LEVEL, Decision, decide, holm, interval, sign_flip
from reproduction.marks import markdown_table
from reproduction.trials import exponent_of_steps

ALPHA = 0.25
LOOKS = (8, 16)
TITLES = {**REGIMES, **FURTHER}
NAMES = {"baseline": "CE2", "pgt": "PGT2", "ce3": "CE3", "agc": "AGC2", "agc+pgt": "AGC+PGT2"}
AXES = (
    Axis("optimizer.lr", (), 0.006, 0.4),
    Axis("optimizer.weight_decay", (), 1e-5, 3e-2),
    Axis("optimizer.head.lr", (), 1 / 32, 2.0),
    Axis("clip.agc", (), 0.005, 0.16),
)
ANSWERS = {
    "helps": "PGT helps beyond a tuned learning rate and weight decay, at this scale.",
    "hurts": "PGT hurts once learning rate and weight decay are tuned, at this scale.",
    "makes no difference that matters": "PGT makes no difference that matters once learning rate "
    "and weight decay are tuned, at this scale.",
    "not settled": "Whether PGT helps beyond a tuned learning rate and weight decay is not settled "
    "at this scale.",
}
SECONDARY = {
    "PGT2 - CE3": "PGT differed from cross-entropy whose last layer has a tuned learning rate of "
    "its own",
    "AGC+PGT2 - CE2": "PGT with adaptive gradient clipping differed from plain cross-entropy",
}


class Look(NamedTuple):
    """What the rule says after so many repeats per regime."""

    repeats: int
    decision: Decision


class Secondary(NamedTuple):
    """A secondary comparison: its mean difference in each regime, and Holm's p."""

    means: Mapping[str, float]
    p: float


@dataclass(frozen=True)
class Findings:
    """What the rows of a folder ``results`` say.

    Attributes:
        rows: The rows of each regime; those of :data:`REGIMES` decide.
        null: The rows of the further repeats of CE2.
    """

    rows: Mapping[str, Rows]
    null: Rows

    @classmethod
    def read(cls, results: Path) -> Findings:
        """The findings of a folder."""
        return cls({regime: read(results, regime) for regime in TITLES}, read(results, "null"))

    def arms(self, regime: str) -> list[str]:
        """The arms of a regime that have rows, in the protocol's order."""
        found = {row["arm"] for row in self.rows[regime]}
        return [arm for arm in NAMES if arm in found]

    def pairs(self, arm: str, against: str = "baseline") -> dict[str, list[float]]:
        """The differences of two arms in every regime that decides."""
        return {regime: differences(self.rows[regime], arm, against) for regime in REGIMES}

    @functools.cached_property
    def look(self) -> Look:
        """The look at which the rule ends: the first that is settled, or the last.

        Raises:
            ValueError: If a regime has fewer repeats than that look needs.
        """
        first, last = LOOKS
        look = self._look_at(first)
        return look if look.decision.verdict != "not settled" else self._look_at(last)

    def _look_at(self, size: int) -> Look:
        pairs = self.pairs("pgt")
        if (fewest := min(map(len, pairs.values()))) < size:
            raise ValueError(f"Expected {size} repeats in each regime, but got {fewest}.")
        return Look(size, decide({regime: found[:size] for regime, found in pairs.items()}))

    @functools.cached_property
    def secondary(self) -> dict[str, Secondary]:
        """The secondary comparisons, corrected by Holm's method."""
        pairs = {
            "PGT2 - CE3": self.pairs("pgt", "ce3"),
            "AGC+PGT2 - CE2": {"plain": self.pairs("agc+pgt")["plain"]},
        }
        size = self.look.repeats
        strata = {
            name: {regime: found[:size] for regime, found in by_regime.items()}
            for name, by_regime in pairs.items()
            if all(by_regime.values())
        }
        p_values = holm({name: sign_flip(list(s.values()))[0] for name, s in strata.items()})
        return {
            name: Secondary({regime: float(np.mean(d)) for regime, d in s.items()}, p_values[name])
            for name, s in strata.items()
        }

    def runs(self, regime: str, arm: str, phase: str) -> Rows:
        """The rows of an arm in a phase."""
        return [r for r in self.rows[regime] if (r["phase"], r["arm"]) == (phase, arm)]

    def chosen(self, regime: str, arm: str) -> list[dict[str, float]]:
        """What each repeat chose; for PGT, as settings of the backbone."""
        rows = self.runs(regime, arm, "final")
        final = {row["repeat"]: row for row in rows if row["repeat"]}
        return [chosen_settings(row) for row in final.values()]

    def at_edge(self, regime: str, arm: str) -> int:
        """Repeats with a chosen value in the outer tenth of its range."""
        return sum(
            any(axis.is_edge(choice[axis.key]) for axis in AXES if axis.key in choice)
            for choice in self.chosen(regime, arm)
        )

    def diverged(self, regime: str, arm: str, phase: str) -> str:
        """How many runs of a phase diverged, of how many."""
        runs = self.runs(regime, arm, phase)
        return f"{sum(row['diverged'] == 'True' for row in runs)} of {len(runs)}"

    # In words -------------------------------------------------------------------------------------

    def answer(self) -> str:
        """The answer, in the one wording of README.md and docs/."""
        decision = self.look.decision
        shown = " and by ".join(
            f"{format_signed(decision.means[regime])} points {title} "
            f"(90% interval {format_interval(decision.intervals[regime])})"
            for regime, title in REGIMES.items()
        )
        words = ANSWERS[decision.verdict]
        if max(decision.means.values()) <= 0:
            words += " No gain was seen."
        return (
            f"**{words}** After {self.look.repeats} independent tunings of each method, PGT "
            f"differed from cross-entropy by {shown}; the test over both gives "
            f"{format_p(decision.p, 3)}, and the rule, fixed in advance, asks for less than "
            f"{LEVEL:g}."
        )

    def secondary_sentence(self) -> str:
        """The secondary comparisons."""
        parts = []
        for name, found in self.secondary.items():
            means = " and ".join(
                f"{format_signed(mean)} points {REGIMES[regime]}"
                for regime, mean in found.means.items()
            )
            parts.append(f"{SECONDARY[name]} by {means} ({format_p(found.p, 3)})")
        words = "In further tests, corrected for their number by Holm's method,"
        return f"{words} {', and '.join(parts)}." if parts else ""

    def null_sentence(self) -> str:
        """What the null says: cross-entropy against itself by the same test."""
        again, first = units(self.null, "baseline"), units(self.rows["norm"], "baseline")
        pairs = [again[repeat] - first[repeat] for repeat in again if repeat in first]
        p = sign_flip([pairs])[0]
        verdict = (
            "The test finds a difference, so do not trust the analysis."
            if p < LEVEL
            else "The test finds no difference, as it should; an error that is much smaller than "
            "the interval would not be noticed."
        )
        return (
            "As a check, further repeats of CE2 with batch normalisation, with other points and "
            "seeds, are compared with the first ones by the same test: further minus first is "
            f"{format_signed(float(np.mean(pairs)))} points over {len(pairs)} repeats (90% "
            f"interval {format_interval(interval(pairs))}), {format_p(p, 3)}. {verdict}"
        )

    def table(self) -> str:
        """Every arm of every regime."""
        lines = []
        for regime, rows in self.rows.items():
            for arm in self.arms(regime):
                values = [*units(rows, arm).values()]
                if not values:
                    continue
                spread = f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
                pairs, gap = differences(rows, arm, "baseline"), ""
                if arm != "baseline" and len(pairs) >= LOOKS[0]:
                    gap = format_signed(float(np.mean(pairs)))
                    gap += f" ({format_interval(interval(pairs))})"
                edge = f"{self.at_edge(regime, arm)} of {len(values)}"
                mean = f"{np.mean(values):.2f}{spread}"
                lost = [self.diverged(regime, arm, phase) for phase in ("tuning", "final")]
                title = "" if lines and arm != "baseline" else TITLES[regime]
                lines.append((title, NAMES[arm], str(len(values)), mean, gap, edge, *lost))
        head = ("regime", "arm", "repeats", "test %", "difference from CE2 (90% interval)")
        more = ("at an edge", "diverged in tuning", "diverged in final runs")
        return markdown_table((*head, *more), lines)

    def choices_table(self) -> str:
        """What the tuning chose for every arm, and what it led to: medians over the repeats."""
        lines = []
        for regime in REGIMES:
            for arm in self.arms(regime):
                chosen = self.chosen(regime, arm)
                values = [_median([c[a.key] for c in chosen if a.key in c]) for a in AXES]
                runs = self.runs(regime, arm, "final")
                unit = _unit_exponent(regime, max(int(row["steps"]) for row in runs))
                exponents = [unit * c["optimizer.lr"] * c["optimizer.weight_decay"] for c in chosen]
                dead = [float(row["dead_units"]) for row in runs if row["dead_units"]]
                cells = (*values, _median(exponents), _dead_filters(dead))
                title = "" if lines and arm != "baseline" else TITLES[regime]
                lines.append((title, NAMES[arm], *cells))
        head = ("regime", "arm", "learning rate", "weight decay")
        head += ("head's learning rate / backbone's", "AGC's threshold", "decay exponent")
        return markdown_table((*head, "dead filters"), lines)


def chosen_settings(row: Mapping[str, str]) -> dict[str, float]:
    """The tuned settings of a run, by key.

    For PGT, these are the backbone's settings in the equivalent plain training: the learning rate
    is divided by alpha, and the weight decay and AGC's threshold are multiplied by it.
    """
    factors = {"optimizer.lr": 1 / ALPHA, "optimizer.weight_decay": ALPHA, "clip.agc": ALPHA}
    has_pgt = "pgt" in row["arm"]
    return {
        axis.key: float(row[axis.key]) * (factors.get(axis.key, 1.0) if has_pgt else 1.0)
        for axis in AXES
        if row.get(axis.key)
    }


def _median(values: Sequence[float]) -> str:
    """The median with the range; empty without values."""
    if not values:
        return ""
    low, middle, high = (f"{value:.2g}" for value in np.quantile(values, [0, 0.5, 1]))
    return f"{middle} ({low} to {high})" if len(values) > 1 else middle


def _dead_filters(counts: Sequence[float]) -> str:
    """The mean number of dead filters, and in how many runs there are any."""
    if not any(counts):
        return "0" if counts else ""
    some = sum(map(bool, counts))
    return f"{np.mean(counts):.1f} (in {some} of {len(counts)} runs, 0 in the others)"


@functools.cache
def _unit_exponent(regime: str, steps: int) -> float:
    """The decay exponent of a run of so many steps, per learning rate times weight decay."""
    options = {"optimizer.lr": 1.0, "optimizer.weight_decay": 1.0}
    return exponent_of_steps(load_recipe(RECIPES[regime]).override(options), steps)
