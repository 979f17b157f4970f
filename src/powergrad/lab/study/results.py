"""The results of a study: its rows, the units that are compared, and the comparisons.

The comparisons are always computed from the rows. Terminal, figures, page and files all show the
same object, :class:`Results`.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from powergrad.lab import stats
from powergrad.lab.study.definition import Study
from powergrad.lab.study.metrics import COLUMNS, Metric, chance_of
from powergrad.lab.study.records import Grid, IdentityCheck, Question, RunRow, Source, Tuning


@dataclass(frozen=True)
class Results:
    """The final metrics of every run, and the comparisons."""

    metric: Metric  # which is compared
    margin: float  # the largest difference that does not matter
    baseline: str  # the arm with which the others are compared
    rows: list[RunRow]
    study: Study | None = None  # None for runs made elsewhere
    folder: Path | None = None  # of the runs; None for results without run folders
    tuning: Tuning | None = None
    trials: list[RunRow] = field(default_factory=list)  # the runs of the tuning
    grid: Grid | None = None  # of a sweep
    identity: IdentityCheck | None = None  # of a decomposition
    repeated: list[RunRow] = field(default_factory=list)  # a program's first run, made twice
    environment: dict[str, Any] = field(default_factory=dict)  # of the process that made them
    remarks: list[str] = field(default_factory=list)  # further notes for the reader
    source: Source | None = None  # the table from which they were read

    @classmethod
    def of(cls, study: Study, rows: Iterable[RunRow] = (), **records: Any) -> Results:
        return cls(study.metric, study.margin, study.baseline, list(rows), study, **records)

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(row.arm for row in self.rows))

    def of_arm(self, arm: str) -> list[RunRow]:
        return [row for row in self.rows if row.arm == arm]

    @property
    def question(self) -> Question:
        asked = self.study or self.source
        return asked.question if asked else Question()

    @property
    def compared(self) -> tuple[str, ...]:
        """The names of the compared metrics."""
        second = self.question.second
        return (self.metric.name, second.name) if second else (self.metric.name,)

    def values(self, arm: str, metric: str | None = None) -> dict[int, float]:
        """A metric of an arm by seed, without failed runs; by default the compared metric."""
        name = metric or self.metric.name
        values = {row.seed: self.value(row, name) for row in self.of_arm(arm)}
        return {seed: value for seed, value in values.items() if value is not None}

    def value(self, row: RunRow, metric: str) -> float | None:
        """A metric of one run, as it is compared."""
        if row.failed:
            return None
        return self.chance(metric) if row.is_lost(metric) else row.value(metric)

    @functools.cached_property
    def _classes(self) -> int | None:
        found = (row.about.get("classes") for row in self.rows)
        return next((int(count) for count in found if count), None)

    def chance(self, metric: str) -> float | None:
        """The value of random guessing; None if it is not known."""
        return chance_of(metric, self._classes) if self._classes else None

    def why_failed(self, row: RunRow) -> str:
        """Why a run has no value to compare; empty if it did not fail."""
        lost = [name for name in self.compared if row.is_lost(name) and self.chance(name) is None]
        return row.failed or (f"{lost[0]} is {row.metrics.get(lost[0])}" if lost else "")

    def has_ended(self, row: RunRow) -> bool:
        """Whether a run failed or has the compared metrics."""
        values = [self.value(row, name) for name in self.compared]
        return None not in values or bool(self.why_failed(row))

    def units(self, arm: str, metric: str | None = None) -> dict[int, float]:
        """The compared values: the metric of each seed, or its mean over each repeat."""
        name, units = metric or self.metric.name, {}
        for unit, rows in self._groups(arm).items():
            values = [v for row in rows if (v := self.value(row, name)) is not None]
            if not any(map(self.why_failed, rows)):
                units[unit] = sum(values) / len(values)
        return units

    def failed_units(self, arm: str) -> set[int]:
        """The seeds, or the repeats, of which a run failed."""
        groups = self._groups(arm)
        return {unit for unit, rows in groups.items() if any(map(self.why_failed, rows))}

    def _groups(self, arm: str) -> dict[int, list[RunRow]]:
        """The runs of every unit, without unfinished repeats."""
        groups: dict[int, list[RunRow]] = {}
        for row in filter(self.has_ended, self.of_arm(arm)):
            groups.setdefault(_unit(row), []).append(row)
        finals = self.study.finals if self.study else 0
        whole = finals or max(map(len, groups.values()), default=0)
        return {unit: rows for unit, rows in groups.items() if len(rows) == whole}

    def mean(self, arm: str, metric: str | None = None) -> float:
        """The mean over the seeds of an arm; NaN if no run has the metric."""
        values = self.values(arm, metric).values()
        return sum(values) / len(values) if values else math.nan

    @property
    def size(self) -> int:
        """The number of units of the baseline."""
        return len(self.units(self.baseline))

    @functools.cached_property
    def columns(self) -> tuple[str, ...]:
        """The metrics in tables; for runs made elsewhere, the columns of the file."""
        if self.source is None:
            return COLUMNS
        names = (self.metric.name, *(name for row in self.rows for name in row.metrics))
        return tuple(dict.fromkeys(name for name in names if not name.startswith("_")))

    def settings(self, arm: str) -> dict[str, Any]:
        """The changes of an arm; for runs made elsewhere, those in which their recipes differ."""
        if self.study is not None:
            return self.study.settings(arm)
        return next((dict(row.settings) for row in self.of_arm(arm)), {})

    @property
    def has_repeats(self) -> bool:
        """Whether repeats are compared instead of single runs."""
        return any(row.unit is not None for row in self.rows)

    @property
    def counted(self) -> str:
        """The name of the units for people."""
        return "repeats" if self.has_repeats else "seeds"

    @functools.cached_property
    def comparisons(self) -> list[stats.Comparison]:
        """The comparison of each arm with the baseline; ValueError if a run has no number."""
        name = self.metric.name
        counts = Counter((row.arm, row.seed) for row in self.rows)
        for arm, seed in (key for key, count in counts.items() if count > 1):
            raise ValueError(f"Expected each seed of {arm!r} once, but got seed {seed} twice.")
        for row in self.rows:
            if not self.has_ended(row):
                missing = next(n for n in self.compared if self.value(row, n) is None)
                raise ValueError(
                    f"Expected {missing} of every run to be a number, but got "
                    f"{row.metrics.get(missing)!r} for {row.arm!r} at seed {row.seed}."
                )
        arms, question, second = self.arms, self.question, None
        if (other := question.second) is not None:
            measured = {arm: self.units(arm, other.name) for arm in arms}
            about = (other.margin, other.higher_is_better, other.unit)
            second = stats.Second(measured, question.claim, *about)
        return stats.compare(
            {arm: self.units(arm) for arm in arms},
            self.baseline,
            margin=self.margin,
            design=self.study.design if self.study else None,
            higher_is_better=self.metric.higher_is_better,
            unit=self.metric.unit,
            step=0.0 if self.has_repeats else None,
            diverged={a: {_unit(r) for r in self.of_arm(a) if r.is_lost(name)} for a in arms},
            failed={arm: self.failed_units(arm) for arm in arms},
            withhold=self.tuning.doubts(self.baseline) if self.tuning else {},
            counted="repeats" if self.has_repeats else "runs",
            noise=question.noise,
            target=question.target,
            pairs=question.pairs,
            second=second,
        )

    def comparison(self, arm: str) -> stats.Comparison | None:
        return next((c for c in self.comparisons if c.arm == arm), None)

    def comparable(self) -> Results | None:
        """The results of the arms with two or more units; None if there is nothing to compare."""
        rows = [row for row in self.rows if self.has_ended(row)]
        enough = [arm for arm in self.arms if len(self._groups(arm)) > 1]
        has_target = self.question.target is not None
        if not enough or (not has_target and (self.baseline not in enough or len(enough) < 2)):
            return None
        if len(enough) == len(self.arms) and len(rows) == len(self.rows):
            return self
        return replace(self, rows=[row for row in rows if row.arm in enough])

    def unfinished_arms(self) -> list[str]:
        """The baseline, and the arms of the study that are not settled yet."""
        assert self.study is not None
        so_far = self.comparable()
        if so_far is None:
            return list(self.study.arms)
        settled = {c.arm for c in so_far.comparisons if not c.is_open}
        return [arm for arm in self.study.arms if arm not in settled]


def _unit(row: RunRow) -> int:
    return row.seed if row.unit is None else row.unit


def usual_baseline(arms: Iterable[str]) -> str:
    """The arm to compare with, if none was named."""
    names = list(arms)
    return "baseline" if "baseline" in names or not names else names[0]
