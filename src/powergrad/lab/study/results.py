"""The results of a study: reads and writes the files of a study.

study.yaml     the definition (see `powergrad.lab.study.definition`)
<run>/         one folder per run (see `powergrad.lab.trainer.run_folder`)
tuning/        the runs of the tuning
jobs.db        which runs are waiting, running, done
study.csv      one row per run, including the tuning: arm, seed, final metrics
study.json     the definition, all rows, and the comparisons

The comparisons are always computed from the rows. Terminal, figures, page and files all show the
same object, :class:`Results`.
"""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from powergrad.lab import stats
from powergrad.lab.environment import describe_machine
from powergrad.lab.files import csv_text, write_json, write_text
from powergrad.lab.jobs import Program, RecipeProgram, program_from_dict
from powergrad.lab.study.advice import advise
from powergrad.lab.study.definition import FILE, Study, read_kind
from powergrad.lab.study.metrics import (
    COLUMNS,
    METRICS,
    Metric,
    chance_of,
    guess_metric,
    metric_names,
    saved_metric,
)
from powergrad.lab.study.records import Decomposition, Grid, RunRow, Tuning
from powergrad.lab.study.tables import Source, read_table
from powergrad.lab.trainer.recipe import Recipe
from powergrad.lab.trainer.run_folder import Run, RunError
from powergrad.lab.words import hide_folders, short_key, slug

FORMAT = 3
CLASSES = {"digits": 10, "fashion-mnist": 10, "cifar10": 10}  # for rows without a class count


@dataclass(frozen=True)
class Results:
    """The final metrics of every run, and the comparisons.

    Attributes:
        metric: The metric that is compared.
        margin: The largest difference that does not matter.
        baseline: The arm with which the others are compared.
        rows: One row per run.
        study: The definition; None for runs made elsewhere.
        folder: The folder of the runs; None for results without run folders.
        tuning: The tuning of the arms, if any.
        trials: The runs of the tuning.
        grid: The grid of a sweep.
        decomposition: The check of a decomposition.
        repeated: The metrics of the first run of a user's program, and of its repetition.
        environment: Versions, hardware and command of the process that wrote the results.
        remarks: Further notes for the reader, such as runs that did not fit into the given time.
        source: The table from which they were read, if any.
    """

    metric: Metric
    margin: float
    baseline: str
    rows: Sequence[RunRow]
    study: Study | None = None
    folder: Path | None = None
    tuning: Tuning | None = None
    trials: Sequence[RunRow] = ()
    grid: Grid | None = None
    decomposition: Decomposition | None = None
    repeated: Sequence[Mapping[str, Any]] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    remarks: Sequence[str] = ()
    source: Source | None = None

    @property
    def arms(self) -> list[str]:
        """The arms that have runs, in order."""
        return list(dict.fromkeys(row.arm for row in self.rows))

    def of_arm(self, arm: str) -> list[RunRow]:
        """The runs of an arm."""
        return [row for row in self.rows if row.arm == arm]

    def values(self, arm: str, metric: str | None = None) -> dict[int, float]:
        """A metric of an arm by seed; by default the compared metric.

        A run that diverged has the value of random guessing or, if that is not known, the worst
        value of all runs.
        """
        name = metric or self.metric.name
        values = {row.seed: self._value(row, name) for row in self.of_arm(arm)}
        return {seed: value for seed, value in values.items() if value is not None}

    def units(self, arm: str) -> dict[int, float]:
        """The compared values: the metric of each seed, or its mean over each repeat."""
        units: dict[int, list[float]] = {}
        counts: Counter[int] = Counter()
        for row in self.of_arm(arm):
            value = self._value(row, self.metric.name)
            if value is not None:
                units.setdefault(row.seed if row.unit is None else row.unit, []).append(value)
            if value is not None or row.failed:
                counts[row.seed if row.unit is None else row.unit] += 1
        finals = self.study.finals if self.study else 0
        whole = finals or max(counts.values(), default=0)  # unfinished repeats are excluded
        return {unit: sum(v) / len(v) for unit, v in units.items() if counts[unit] == whole}

    def _failed_units(self, arm: str) -> set[int]:
        """The units of an arm whose runs all failed."""
        rows = [(row.seed if row.unit is None else row.unit, row) for row in self.of_arm(arm)]
        return {unit for unit, row in rows if row.failed} - {
            unit for unit, row in rows if not row.failed
        }

    def _value(self, row: RunRow, metric: str) -> float | None:
        if row.failed:
            return None
        return self._lost.get(metric) if row.is_lost(metric) else row.value(metric)

    @functools.cached_property
    def _lost(self) -> Mapping[str, float | None]:
        """The value of a run that diverged, by metric."""
        classes = next((c for row in self.rows if (c := row.value("classes"))), None)
        if classes is None and self.study and isinstance(self.study.program, RecipeProgram):
            classes = CLASSES.get(self.study.base.data.name)
        names = dict.fromkeys(name for row in self.rows for name in row.metrics)
        return {name: self._lost_value(name, classes) for name in (*names, self.metric.name)}

    def _lost_value(self, metric: str, classes: float | None) -> float | None:
        if classes and (chance := chance_of(metric, int(classes))) is not None:
            return chance
        known = METRICS.get(metric)
        higher = known.higher_is_better if known else self.metric.higher_is_better
        values = [
            value
            for row in self.rows
            if not row.is_lost(metric) and (value := row.value(metric)) is not None
        ]
        return (min if higher else max)(values) if values else None

    def mean(self, arm: str, metric: str | None = None) -> float:
        """The mean over the seeds of an arm; NaN if no run has the metric."""
        values = self.values(arm, metric).values()
        return sum(values) / len(values) if values else math.nan

    @functools.cached_property
    def columns(self) -> tuple[str, ...]:
        """The metrics in tables; for runs made elsewhere, the columns that vary within an arm."""
        if self.source is None:
            return COLUMNS
        names = dict.fromkeys((self.metric.name, *(n for row in self.rows for n in row.metrics)))
        return tuple(n for n in names if n == self.metric.name or self._is_measured(n))

    def _is_measured(self, name: str) -> bool:
        cells = [(row.arm, row.metrics.get(name)) for row in self.rows]
        numbers = [(arm, value) for arm, value in cells if value is not None]
        is_numeric = all(isinstance(value, float) for _, value in numbers)
        return (
            is_numeric
            and not name.startswith("_")
            and len(set(numbers)) > len({arm for arm, _ in numbers})
        )

    def settings(self, arm: str) -> dict[str, Any]:
        """The changes of an arm; in a table, the columns that differ only between arms."""
        if self.study is not None:
            return self.study.settings(arm)
        changes = {}
        for name in dict.fromkeys(n for row in self.rows for n in row.metrics):
            values = {a: {row.metrics.get(name) for row in self.of_arm(a)} for a in self.arms}
            is_setting = all(len(cells) == 1 for cells in values.values())
            if is_setting and len(set().union(*values.values())) > 1 and name != self.metric.name:
                (changes[name],) = values[arm]
        return changes

    @property
    def has_repeats(self) -> bool:
        """Whether repeats are compared instead of single runs."""
        return any(row.unit is not None for row in self.rows)

    @property
    def design(self) -> stats.Design | None:
        """The design of the study; None if it is not known."""
        return self.study.design if self.study else None

    @functools.cached_property
    def comparisons(self) -> list[stats.Comparison]:
        """The comparison of each arm with the baseline."""
        name = self.metric.name
        stats.by_arm_and_seed((row.arm, row.seed, 0.0) for row in self.rows)  # checks the seeds
        # An arm whose runs all failed is not compared; the notes mention it.
        arms = [arm for arm in self.arms if not all(row.failed for row in self.of_arm(arm))]
        values = {arm: self.units(arm) for arm in arms}
        without = [row for row in self.rows if not row.failed and self._value(row, name) is None]
        if without:
            row = without[0]
            raise ValueError(
                f"Expected {name} of every run to be a number, but got {row.metrics.get(name)!r} "
                f"for {row.arm!r} at seed {row.seed}."
            )
        diverged = {
            arm: {
                row.seed if row.unit is None else row.unit
                for row in self.of_arm(arm)
                if row.is_lost(name)
            }
            for arm in arms
        }
        return stats.compare(
            values,
            self.baseline,
            margin=self.margin,
            design=self.design,
            higher_is_better=self.metric.higher_is_better,
            unit=self.metric.unit,
            step=0.0 if self.has_repeats else None,
            diverged=diverged,
            failed={arm: self._failed_units(arm) for arm in arms},
            withhold=self.tuning.doubts(self.baseline) if self.tuning else None,
            counted="repeats" if self.has_repeats else "runs",
        )

    def comparison(self, arm: str) -> stats.Comparison | None:
        """The comparison of one arm; None for the baseline."""
        return next((c for c in self.comparisons if c.arm == arm), None)

    def with_verdict(self, verdict: str) -> list[str]:
        """The arms with a given verdict."""
        return [c.arm for c in self.comparisons if c.verdict == verdict]

    @property
    def is_settled(self) -> bool:
        """Whether no arm waits for more runs."""
        return not any(comparison.is_open for comparison in self.comparisons)

    def verdict(self) -> str:
        """The conclusion, in one sentence."""
        phrases = []
        for verdict, one, many in (
            ("better", f"is better than {self.baseline}", f"are better than {self.baseline}"),
            ("worse", f"is worse than {self.baseline}", f"are worse than {self.baseline}"),
            (
                "equivalent",
                f"is equivalent to {self.baseline} within {self.margin:g}",
                f"are equivalent to {self.baseline} within {self.margin:g}",
            ),
            ("not settled", "is not settled", "are not settled"),
        ):
            arms = [f'"{arm}"' if "," in arm else arm for arm in self.with_verdict(verdict)]
            if arms:
                listed = arms[0] if len(arms) == 1 else f"{', '.join(arms[:-1])} and {arms[-1]}"
                phrases.append(f"{listed} {one if len(arms) == 1 else many}")
        return f"Here {'; '.join(phrases)}."

    def notes(self) -> list[str]:
        """Notes for the reader; they are shown wherever the verdict is shown."""
        about = [*self.remarks, *(self.source.notes() if self.source else ())]
        notes = [*about, self.diverged(), *self._about_runs()]
        notes += [*self._about_design(), *self._about_tuning()]
        return [note for note in notes if note]

    def advice(self) -> list[str]:
        """Advice on what to do next, in one or two lines."""
        is_accuracy = self.metric.name in ("test_accuracy", "train_accuracy")
        accuracy = self.mean(self.baseline) if is_accuracy else math.nan
        return advise(self.study, self.comparisons, self.tuning, accuracy=accuracy)

    def diverged(self) -> str:
        """A sentence about the arms with diverged runs; empty if there are none."""
        counts = []
        for arm in self.arms:
            runs = self.of_arm(arm)
            if lost := sum(row.is_lost(self.metric.name) for row in runs):
                counts.append(f"{lost} of {len(runs)} runs of {arm}")
        if not counts:
            return ""
        value = self._lost[self.metric.name]
        counts_as = "no value" if value is None else f"{value:.4g}"
        return f"Diverged: {', '.join(counts)}. A run that diverged counts as {counts_as}."

    def _about_runs(self) -> list[str]:
        """Notes about the runs of a user's program."""
        notes, name = [], self.metric.name
        for arm in self.arms:
            runs = self.of_arm(arm)
            if failed := [row for row in runs if row.failed]:
                seeds = ", ".join(str(row.seed) for row in failed[:6])
                more = ", ..." if len(failed) > 6 else ""
                rest = "" if len(failed) < len(runs) else " This arm is not compared."
                notes.append(
                    f"{len(failed)} of {len(runs)} runs of {arm} failed and do not count (seed "
                    f"{seeds}{more}): {failed[0].failed.splitlines()[0]}{rest}"
                )
        if self.study is None or not self.study.program.is_foreign:
            return notes
        for arm in self.arms:
            values = [value for row in self.of_arm(arm) if (value := row.value(name)) is not None]
            if len(values) > 1 and len(set(values)) == 1:
                notes.append(
                    f"All {len(values)} seeds of {arm} give the same {name} ({values[0]:g}), so "
                    "your script does not use {seed}."
                )
        if len(self.repeated) == 2:
            first, second = (metrics.get(name) for metrics in self.repeated)
            if first != second and not (first != first and second != second):
                notes.append(
                    f"Runs are not repeatable: the first run gave {name} {first}, and the same run "
                    f"again {second}. So the noise between runs is not only due to the seeds."
                )
        return [*notes, *self._about_first_losses()]

    def _about_first_losses(self) -> list[str]:
        """Notes about arms whose first loss differs from the baseline's at the same seed."""
        assert self.study is not None
        base = {row.seed: row.value("first_loss") for row in self.of_arm(self.baseline)}
        own = self.study.settings(self.baseline)
        notes = []
        for arm in self.arms:
            for row in self.of_arm(arm):
                loss, other = row.value("first_loss"), base.get(row.seed)
                if loss is None or other is None or math.isclose(loss, other, rel_tol=1e-5):
                    continue
                settings = self.study.settings(arm)
                altered = {key for key in settings.keys() | own.keys() if key.startswith("--")}
                is_altered_only = all(
                    settings.get(key) == own.get(key)
                    for key in (settings.keys() | own.keys()) - altered
                )
                why = (
                    "the data order or the initialisation differs, because altered gradients and "
                    "scaled learning rates do not change the first loss"
                    if is_altered_only
                    else "its flags change the network, the data or their order"
                )
                notes.append(
                    f"The first loss of {arm} differs from that of {self.baseline} (seed "
                    f"{row.seed}: {loss:.6g} and {other:.6g}): {why}."
                )
                break
        return notes

    def _about_design(self) -> list[str]:
        study = self.study
        what = "repeats" if self.has_repeats else "seeds"
        if study is None:
            if self.source is None or not self.source.earlier:
                return []
            return [self._unplanned({*self.source.earlier, self.size}, what)]
        notes = []
        if study.earlier:
            note = self._unplanned({*study.earlier, study.design.last}, what)
            notes.append(f"{note} To plan the looks, use --{what} 8..24.")
        if not study.design.is_fixed and self.arms:
            most = max((comparison.n for comparison in self.comparisons), default=0)
            stopped = [
                f"{comparison.arm} after {comparison.n}"
                for comparison in self.comparisons
                if comparison.n < most and comparison.verdict != "not settled"
            ]
            if stopped:
                notes.append(
                    f"An arm stops once it is settled: {', '.join(stopped)} {what}. It is compared "
                    f"with as many {what} of {self.baseline}."
                )
        used = set(study.seeds)
        if self.folder is not None and not self.has_repeats:
            spare = sorted(_existing_seeds(study, self.folder) - used)
            if spare:
                notes.append(
                    f"Seeds {study.seeds[0]} to {study.seeds[-1]} are used; the folder contains "
                    f"{len(spare)} more, which are not."
                )
        return notes

    @property
    def size(self) -> int:
        """The number of units of the baseline."""
        return len(self.units(self.baseline))

    def _unplanned(self, sizes: Collection[int], what: str) -> str:
        looks, design = sorted(sizes), self.design
        if design is None or design.is_fixed:
            error = stats.error_of_looks(looks, max(1, len(self.arms) - 1))
            chance = f"{100 * error:.1f}%"
        else:
            chance = f"up to {100 * design.level * len(looks):g}%"
        return (
            f"The results were looked at with {' and '.join(map(str, looks))} {what} without "
            f"planning it, so the probability of any false verdict is {chance}, not 5%."
        )

    def _about_tuning(self) -> list[str]:
        if self.tuning is None or not self.tuning.repeats:
            return []
        keys = " and ".join(map(short_key, self.tuning.keys))
        if not self.tuning.is_unit:
            return [
                f"Every arm was tuned once, so the verdict holds for the chosen values of {keys}, "
                "not for the methods: another tuning may choose other values. To compare the "
                "methods, use --repeats 8."
            ]
        edges = {
            arm: sum(repeat[arm].at_edge for repeat in self.tuning.repeats if arm in repeat)
            for arm in self.tuning.arms
        }
        listed = ", ".join(f"{arm} {count}" for arm, count in edges.items())
        return [
            f"Every repeat tuned {keys} independently. Choices at the edge of the range, out of "
            f"{len(self.tuning.repeats)}: {listed}."
        ]

    def comparable(self) -> Results | None:
        """The results of the arms with at least two units; None if there is nothing to compare.

        For a study that is not finished.
        """
        rows = [
            row for row in self.rows if row.failed or self._value(row, self.metric.name) is not None
        ]
        kept = self if len(rows) == len(self.rows) else replace(self, rows=rows)
        enough = [arm for arm in kept.arms if len(kept.units(arm)) > 1]
        if self.baseline not in enough or len(enough) < 2:
            return None
        enough += [arm for arm in kept.arms if all(row.failed for row in kept.of_arm(arm))]
        if len(enough) == len(self.arms) and kept is self:
            return self
        return replace(self, rows=[row for row in rows if row.arm in enough])

    # Writing -------------------------------------------------------------------------------------

    def to_csv(self) -> str:
        """A CSV with one row per run; the runs of the tuning have the phase ``tuning``."""
        rows = [row for row in self.rows if not row.failed]
        all_rows = [*rows, *self.trials]
        kept = {name: None for row in all_rows for name in row.metrics}
        named = list(kept) if self.source else [name for name in COLUMNS if name in kept]
        if self.metric.name not in named:
            named.insert(0, self.metric.name)
        if self.study and self.study.program.is_foreign:
            named = metric_names([row.metrics for row in all_rows], self.metric.name)
        about = ["arm", "seed"]
        about += ["run"] if self.study or any(row.run for row in all_rows) else []
        about += ["repeat"] if self.has_repeats else []
        about += ["commit"] if any(row.commit for row in all_rows) else []
        keys = list(self.tuning.keys) if self.trials and self.tuning else []
        about += ["phase", *keys] if self.trials else []
        lines = [{**row.to_dict(), **self._settings(row, keys), "phase": "final"} for row in rows]
        lines += [{**row.to_dict(), "phase": "tuning"} for row in self.trials]
        left_out = self.source.left_out if self.source else ()
        lines += [{"arm": run.arm, "seed": run.seed} for run in left_out]
        return csv_text([*about, *(name for name in named if name not in keys)], lines)

    def _settings(self, row: RunRow, keys: Sequence[str]) -> dict[str, Any]:
        """The values of the tuned keys in a run."""
        if not keys or self.tuning is None or self.study is None:
            return {}
        repeats = self.tuning.repeats
        repeat = row.unit if row.unit is not None else 0
        choice = repeats[repeat].get(row.arm) if repeat < len(repeats) else None
        chosen = choice.winner.changes if choice else {}
        return {key: chosen[key] for key in keys if key in chosen}

    def to_dict(self) -> dict[str, Any]:
        """All results as JSON values."""
        values: dict[str, Any] = {
            "format": FORMAT,
            "metric": self.metric.name,
            "better": self.metric.better,
            "margin": self.margin,
            "baseline": self.baseline,
            "arms": self.arms,
            "verdict": self.verdict(),
            "notes": self.notes(),
            "advice": self.advice(),
            "comparisons": [comparison.to_dict() for comparison in self.comparisons],
            "rows": [row.to_dict() for row in self.rows],
            "environment": _shared(self.environment or describe_machine()),
        }
        if self.remarks:
            values["remarks"] = list(self.remarks)
        if self.source is not None:
            values["source"] = self.source.to_dict()
        if self.tuning is not None:
            values["tuning"] = self.tuning.to_dict()
            values["trials"] = [row.to_dict() for row in self.trials]
        if self.grid is not None:
            values["grid"] = self.grid.values
        if self.decomposition is not None:
            values["alpha"] = self.decomposition.alpha
            values["identity_gaps"] = self.decomposition.gaps
        if self.study is not None:
            values["kind"] = self.study.kind.value
            values["tuned"] = list(self.study.tuned)
            values["seeds"] = str(self.study.design)
            values["first_seed"] = self.study.first_seed
            values["seeds_per_repeat"] = self.study.finals
            values["looked_at"] = list(self.study.earlier)
            values["changes"] = {arm: self.study.settings(arm) for arm in self.study.arms}
            if isinstance(self.study.program, RecipeProgram):
                values["recipe"] = self.study.base.without_paths().model_dump(mode="json")
            else:
                values["program"] = self.study.program.to_dict()
        if self.repeated:
            values["repeated"] = list(self.repeated)
        return values

    def save(self, folder: Path) -> None:
        """Write study.csv and study.json."""
        write_text(folder / "study.csv", self.to_csv())
        write_json(folder / "study.json", self.to_dict())

    # Reading -------------------------------------------------------------------------------------

    @classmethod
    def load(cls, path: Path, metric: str | None = None) -> Results:
        """Load the results of the folder of a study, of a study.json, or of a CSV.

        For a folder, the finished runs are read; study.json adds the tuning.
        """
        if path.is_dir() and (path / FILE).is_file():
            return _load_folder(path)
        if path.suffix == ".json":
            return _from_json(_read_json(path))
        file = path / "study.csv" if path.is_dir() else path
        about = file.with_name("study.json")
        saved = _read_json(about) if about.is_file() else {}
        if path.is_dir() and "source" in saved:
            return replace(_from_json(saved), folder=path)
        table = read_table(file, saved.get("metric") if metric is None else metric)
        known = METRICS.get(table.metric) or Metric(table.metric, True, table.metric, 0.5)
        return cls(known, known.margin, _usual_baseline(table.rows), table.rows)

    @classmethod
    def of_runs(cls, study: Study, folder: Path) -> Results:
        """The results of the finished runs of a study, from their folders."""
        rows = []
        for (arm, seed), job in study.jobs().items():
            try:
                result = job.result(folder)
            except RunError:
                continue  # the page lists unreadable runs
            if result is not None:
                rows.append(RunRow(arm, seed, judged(result, study), job.name))
        return cls(study.metric, study.margin, study.baseline, rows, study, folder)

    @classmethod
    def from_csv(
        cls,
        path: Path,
        *,
        metric: str | None = None,
        columns: Mapping[str, str] | None = None,
        baseline: str | None = None,
        margin: float | None = None,
        better: str | None = None,
    ) -> Results:
        """The results of runs made elsewhere, from a table with one line per run."""
        table = read_table(path, metric, columns=columns)
        values = [value for row in table.rows if (value := row.value(table.metric)) is not None]
        chosen = guess_metric(table.metric, values, margin=margin, better=better)
        arm = baseline or _usual_baseline(table.rows)
        results = cls(chosen, chosen.margin, arm, table.rows, source=table.source)
        _ = results.comparisons  # raises if there is nothing to compare
        return results


def _shared(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The environment for shared files: its command without paths."""
    command = environment.get("command")
    return {**environment, **({"command": hide_folders(command)} if command else {})}


def _load_folder(folder: Path) -> Results:
    """The results of the folder of a study: its runs, and further information in study.json."""
    study = Study.load(folder)
    if not (folder / "study.json").is_file():
        return Results.of_runs(study, folder)
    saved = _from_json(_read_json(folder / "study.json"))
    finished = [
        row
        for row in saved.rows
        if row.is_elsewhere or row.failed or _is_finished(folder / row.run)
    ]
    rows = finished
    if saved.tuning is None:
        newer = Results.of_runs(study, folder).rows
        done = {row.run for row in newer}
        finished = [row for row in finished if not row.failed or row.run not in done]
        known = {row.run for row in finished}
        newer = [row for row in newer if row.run not in known]
        order = list(study.arms)
        rows = sorted([*finished, *newer], key=lambda row: (row.seed, order.index(row.arm)))
    study = replace(study, metric=saved.metric, margin=saved.margin)
    return replace(saved, rows=rows, study=study, folder=folder)


def judged(metrics: Mapping[str, Any], study: Study) -> dict[str, Any]:
    """The final metrics of a run, including whether it diverged.

    The run of a user's program has diverged if the compared metric is not finite.
    """
    if not study.program.is_foreign:
        return dict(metrics)
    kept = {key: value for key, value in metrics.items() if key not in ("format", "optimizers")}
    value = kept.get(study.metric.name)
    is_number = isinstance(value, (int, float))
    return {**kept, "diverged": not math.isfinite(value)} if is_number else kept


def _is_finished(folder: Path) -> bool:
    try:
        return Run(folder).result() is not None
    except RunError:
        return False  # the page lists unreadable runs


def _existing_seeds(study: Study, folder: Path) -> set[int]:
    """The seeds of the finished runs in the folder of a study."""
    known = {slug(arm)[:40] for arm in study.arms}
    seeds = set()
    for path in folder.glob("*-seed*/result.json"):
        arm, _, rest = path.parent.name.rpartition("-seed")
        seed, _, _ = rest.partition("-")
        if arm in known and seed.isdigit():
            seeds.add(int(seed))
    return seeds


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
        if not isinstance(values, dict):
            raise ValueError(f"a {type(values).__name__}")
    except (OSError, ValueError) as error:
        raise RunError(f"Expected {str(path)!r} to hold a study, but got: {error}") from None
    if values.get("format", 1) > FORMAT:
        raise RunError(
            f"Expected {str(path)!r} to have format {FORMAT} or earlier, but got "
            f"{values['format']}; a newer version of powergrad can read it."
        )
    return values


def _from_json(values: Mapping[str, Any]) -> Results:
    name = values["metric"]
    metric = saved_metric(name, values.get("better"), values["margin"])
    rows = [RunRow.from_dict(row) for row in values["rows"]]
    study = None
    if "recipe" in values or "program" in values:
        kind, tuned = read_kind(values)
        if "recipe" in values:
            program: Program = RecipeProgram(Recipe.model_validate(values["recipe"]))
        else:
            program = program_from_dict(values["program"])
        study = Study(
            kind,
            program,
            values["changes"],
            _design_of(values, rows),
            metric,
            values["margin"],
            values.get("first_seed", min((row.seed for row in rows), default=0)),
            values.get("seeds_per_repeat", 0),
            tuned,
            earlier=tuple(values.get("looked_at", ())),
        )
    decomposition = None
    if "identity_gaps" in values:
        gaps = {int(step): gap for step, gap in values["identity_gaps"].items()}
        decomposition = Decomposition(values["alpha"], gaps)
    grid = values.get("grid")
    return Results(
        metric,
        values["margin"],
        values["baseline"],
        rows,
        study,
        tuning=Tuning.from_dict(values["tuning"]) if "tuning" in values else None,
        trials=[RunRow.from_dict(row) for row in values.get("trials", ())],
        grid=Grid({key: tuple(points) for key, points in grid.items()}) if grid else None,
        decomposition=decomposition,
        repeated=values.get("repeated", ()),
        environment=values.get("environment", {}),
        remarks=values.get("remarks", ()),
        source=Source.from_dict(values["source"]) if "source" in values else None,
    )


def _design_of(values: Mapping[str, Any], rows: Sequence[RunRow]) -> stats.Design:
    """The design in a file; in formats 1 and 2, as many seeds as the smallest arm."""
    if "seeds" in values:
        return stats.Design(stats.parse_runs(values["seeds"]))
    counts = [sum(row.arm == arm for row in rows) for arm in {row.arm for row in rows}]
    return stats.Design((max(2, min(counts, default=2)),))


def _usual_baseline(rows: Iterable[RunRow]) -> str:
    arms = [row.arm for row in rows]
    return "baseline" if "baseline" in arms or not arms else arms[0]
