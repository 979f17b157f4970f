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
from powergrad.lab.words import markdown_table
from reproduction.decisive.data import (
    FURTHER,
    RECIPES,
    REGIMES,
    Rows,
    differences,
    read,
    units,
)
from reproduction.decisive.rule import (
    LEVEL,
    Decision,
    decide,
    holm,
    interval,
    sign_flip,
)
from reproduction.studies import exponent_of_steps

__all__ = ["AXES", "NAMES", "Findings", "chosen_settings"]

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

    @property
    def is_last(self) -> bool:
        """Whether the experiment ends here."""
        return self.decision.verdict != "not settled" or self.repeats == LOOKS[-1]


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
        rows = {regime: read(results, regime) for regime in (*REGIMES, *FURTHER)}
        return cls(rows, read(results, "null"))

    def arms(self, regime: str) -> list[str]:
        """The arms of a regime that have rows, in the protocol's order."""
        found = {row["arm"] for row in self.rows[regime]}
        return [arm for arm in NAMES if arm in found]

    def pairs(self, arm: str, against: str = "baseline") -> dict[str, list[float]]:
        """The differences of two arms in every regime that decides."""
        return {regime: differences(self.rows[regime], arm, against) for regime in REGIMES}

    @functools.cached_property
    def repeats(self) -> dict[str, int]:
        """How many repeats have both arms of the primary comparison, by regime."""
        return {regime: len(pairs) for regime, pairs in self.pairs("pgt").items()}

    @functools.cached_property
    def look(self) -> Look | None:
        """The look at which the rule has ended, or else the latest; None before the first."""
        latest = None
        for size in LOOKS:
            if min(self.repeats.values()) >= size and not (latest and latest.is_last):
                pairs = {regime: pairs[:size] for regime, pairs in self.pairs("pgt").items()}
                latest = Look(size, decide(pairs))
        return latest

    @functools.cached_property
    def secondary(self) -> dict[str, Secondary]:
        """The secondary comparisons, corrected by Holm's method, where the primary has ended."""
        if self.look is None or not self.look.is_last:
            return {}
        size = self.look.repeats
        pairs = {
            "PGT2 - CE3": self.pairs("pgt", "ce3"),
            "AGC+PGT2 - CE2": {"plain": self.pairs("agc+pgt")["plain"]},
        }
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

    @functools.cached_property
    def null_pairs(self) -> list[float]:
        """Further repeats of CE2 minus those of the first regime."""
        again, first = units(self.null, "baseline"), units(self.rows["norm"], "baseline")
        return [again[repeat] - first[repeat] for repeat in again if repeat in first]

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

    def diverged(self, regime: str, arm: str, phase: str) -> tuple[int, int]:
        """How many runs of a phase diverged, of how many."""
        runs = self.runs(regime, arm, phase)
        return sum(row["diverged"] == "True" for row in runs), len(runs)

    # In words -------------------------------------------------------------------------------------

    def answer(self) -> str:
        """The answer in three sentences, or how far the runs are."""
        if self.look is None or not self.look.is_last:
            return self._status()
        decision = self.look.decision
        words = [
            f"**{ANSWERS[decision.verdict]}**",
            f"After {self.look.repeats} independent tunings of each method, {_in_words(decision)}.",
            self._secondary_sentence(),
        ]
        return " ".join(filter(None, words))

    def _status(self) -> str:
        done = ", ".join(
            f"{count} {'repeats' if count != 1 else 'repeat'} {REGIMES[regime]}"
            for regime, count in self.repeats.items()
        )
        wanted = LOOKS[0] if self.look is None else LOOKS[1]
        words = f"**Not decided yet.** The next analysis is planned after {wanted} repeats in each "
        words += f"regime. So far there are {done}."
        if self.look is not None:
            words += f" The analysis after {self.look.repeats} was not settled: "
            words += f"{_in_words(self.look.decision)}."
        return words

    def _secondary_sentence(self) -> str:
        parts = []
        for name, found in self.secondary.items():
            means = " and ".join(
                f"{format_signed(mean)} points {REGIMES[regime]}"
                for regime, mean in found.means.items()
            )
            parts.append(f"{SECONDARY[name]} by {means} ({format_p(found.p, 3)})")
        opening = "In further tests, corrected for their number by Holm's method, "
        return f"{opening}{', and '.join(parts)}." if parts else ""

    def figure_line(self) -> str:
        """The figure of :mod:`reproduction.decisive.figure`, once there is an analysis."""
        if self.look is None:
            return "The figure is drawn after the first analysis."
        return (
            "![Differences from tuned cross-entropy in each regime, with 90% intervals, beside the "
            "gains that the paper reports](images/decisive.png)"
        )

    def null_sentence(self) -> str:
        """What the null says: cross-entropy against itself by the same test."""
        pairs = self.null_pairs
        check = "As a check, further repeats of CE2 with batch normalisation, with other points "
        check += "and seeds, are compared with the first ones by the same test"
        if len(pairs) < LOOKS[0]:
            return f"{check}. {len(pairs)} of {LOOKS[0]} repeats are done."
        p = sign_flip([pairs])[0]
        verdict = (
            "The test finds a difference, so do not trust the analysis."
            if p < LEVEL
            else "The test finds no difference, as it should; an error that is much smaller than "
            "the interval would not be noticed."
        )
        return (
            f"{check}: further minus first is {format_signed(float(np.mean(pairs)))} points over "
            f"{len(pairs)} repeats (90% interval {format_interval(interval(pairs))}), "
            f"{format_p(p, 3)}. {verdict}"
        )

    def table(self) -> str:
        """Every arm of every regime."""
        lines = []
        for regime in self.rows:
            base = units(self.rows[regime], "baseline")
            for arm in self.arms(regime):
                own = units(self.rows[regime], arm)
                if not own:
                    continue
                values = list(own.values())
                spread = f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
                pairs = [own[repeat] - base[repeat] for repeat in own if repeat in base]
                gap = ""
                if arm != "baseline" and len(pairs) >= LOOKS[0]:
                    mean = format_signed(float(np.mean(pairs)))
                    gap = f"{mean} ({format_interval(interval(pairs))})"
                lost = [
                    f"{count} of {total}"
                    for count, total in (self.diverged(regime, arm, p) for p in ("tuning", "final"))
                ]
                edge = f"{self.at_edge(regime, arm)} of {len(values)}"
                mean = f"{np.mean(values):.2f}{spread}"
                lines.append((TITLES[regime], NAMES[arm], str(len(values)), mean, gap, edge, *lost))
        head = ("regime", "arm", "repeats", "test %", "difference from CE2 (90% interval)")
        more = ("at an edge", "diverged in tuning", "diverged in final runs")
        return markdown_table((*head, *more), lines)

    def choices_table(self) -> str:
        """What the tuning chose for every arm, and what it led to: medians over the repeats."""
        lines = []
        for regime in self.rows:
            for arm in self.arms(regime):
                if not (chosen := self.chosen(regime, arm)):
                    continue
                values = [_median([c[a.key] for c in chosen if a.key in c]) for a in AXES]
                runs = self.runs(regime, arm, "final")
                unit = _unit_exponent(regime, max(int(row["steps"]) for row in runs))
                exponents = [unit * c["optimizer.lr"] * c["optimizer.weight_decay"] for c in chosen]
                dead = [float(row["dead_units"]) for row in runs if row["dead_units"]]
                cells = (*values, _median(exponents), _dead_filters(dead))
                lines.append((TITLES[regime], NAMES[arm], *cells))
        head = ("regime", "arm", "learning rate", "weight decay")
        more = (
            "head's learning rate / backbone's",
            "AGC's threshold",
            "decay exponent",
            "dead filters",
        )
        return markdown_table((*head, *more), lines)


def _in_words(decision: Decision) -> str:
    """The numbers of the primary comparison."""
    shown = " and by ".join(
        f"{format_signed(decision.means[regime])} points {title} "
        f"(90% interval {format_interval(decision.intervals[regime])})"
        for regime, title in REGIMES.items()
    )
    return (
        f"PGT differed from cross-entropy by {shown}; the test over both gives "
        f"{format_p(decision.p, 3)}, and the rule asks for less than {LEVEL:g}"
    )


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
