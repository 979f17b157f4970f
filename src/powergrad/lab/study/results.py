"""The results of a study: the one reader and the one writer of what a study leaves.

study.yaml     what is studied (see `powergrad.lab.study.definition`)
<run>/         every run (see `powergrad.lab.run`)
jobs.db        which runs are waiting, running, done
study.csv      one row per run: arm, seed, final metrics
study.json     the definition, all rows, and the comparisons
"""

from __future__ import annotations

import csv
import functools
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from powergrad.lab import stats
from powergrad.lab.config import Recipe, RecipeError
from powergrad.lab.environment import describe_machine
from powergrad.lab.files import csv_text, write_json, write_text
from powergrad.lab.jobs import RecipeProgram
from powergrad.lab.jobs.queue import Snapshot, run_jobs
from powergrad.lab.run import Run, RunError
from powergrad.lab.session import right_answers
from powergrad.lab.study.definition import FILE, Study, read_kind
from powergrad.lab.study.metrics import COLUMNS, METRICS, Metric, guess_metric
from powergrad.lab.study.records import Decomposition, Grid, Tuning

__all__ = ["Results", "RunRow", "read_rows", "run_study"]

FORMAT = 2


@dataclass(frozen=True)
class RunRow:
    """The end of one run.

    Attributes:
        arm: Its arm.
        seed: Its seed.
        metrics: The final metrics.
        run: The name of its folder; empty for runs made elsewhere.
        commit: The commit that made it, where that was kept.
    """

    arm: str
    seed: int
    metrics: Mapping[str, Any]
    run: str = ""
    commit: str = ""

    def value(self, metric: str) -> float | None:
        """A metric as a number; None where the run does not have it, or it is not a number."""
        value = self.metrics.get(metric)
        return float(value) if isinstance(value, (int, float)) and value == value else None

    @property
    def diverged(self) -> bool:
        """Whether its loss became infinite or NaN."""
        return bool(self.metrics.get("diverged"))

    def to_dict(self) -> dict[str, Any]:
        """One flat mapping, as study.json and study.csv have it."""
        run = {"run": self.run} if self.run else {}
        return {"arm": self.arm, "seed": self.seed, **run, **self.metrics}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunRow:
        """What :meth:`to_dict` wrote."""
        named = {key: values[key] for key in ("arm", "seed", "run", "commit") if key in values}
        metrics = {key: value for key, value in values.items() if key not in named}
        return cls(metrics=metrics, **named)


@dataclass(frozen=True)
class Results:
    """The final metrics of every run, and the comparisons.

    Attributes:
        metric: What is compared.
        margin: The largest difference that does not matter.
        baseline: The arm that the others are compared with.
        rows: One per run.
        study: What was studied; None for runs made elsewhere.
        folder: Where the runs are; None for results without run folders.
        tuning: How the arms were tuned, if they were.
        grid: The grid of a sweep.
        decomposition: What a decomposition checked.
        environment: Versions, hardware and command of the process that wrote the results.
        saved: The comparisons that were read from a file, if they are of these rows.
    """

    metric: Metric
    margin: float
    baseline: str
    rows: Sequence[RunRow]
    study: Study | None = None
    folder: Path | None = None
    tuning: Tuning | None = None
    grid: Grid | None = None
    decomposition: Decomposition | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    saved: tuple[stats.Comparison, ...] | None = None

    @property
    def arms(self) -> list[str]:
        """The arms that have runs, in order."""
        return list(dict.fromkeys(row.arm for row in self.rows))

    def of_arm(self, arm: str) -> list[RunRow]:
        """The runs of an arm."""
        return [row for row in self.rows if row.arm == arm]

    def values(self, arm: str, metric: str | None = None) -> dict[int, float]:
        """A metric of every seed of an arm that has it; by default the one that is compared."""
        name = metric or self.metric.name
        values = {row.seed: row.value(name) for row in self.of_arm(arm)}
        return {seed: value for seed, value in values.items() if value is not None}

    def mean(self, arm: str, metric: str | None = None) -> float:
        """The mean over an arm's seeds; NaN where no run has it."""
        values = self.values(arm, metric).values()
        return sum(values) / len(values) if values else math.nan

    @functools.cached_property
    def comparisons(self) -> list[stats.Comparison]:
        """Every arm against the baseline.

        Raises:
            ValueError: If there are too few runs, or one has no number to compare.
        """
        if self.saved is not None:
            return list(self.saved)
        name = self.metric.name
        values = stats.by_arm_and_seed((row.arm, row.seed, row.metrics[name]) for row in self.rows)
        examples = self._examples()
        step = None
        if examples is not None:
            step = 100 / max(len(right) for runs in examples.values() for right in runs.values())
        return stats.compare(
            values,
            self.baseline,
            margin=self.margin,
            higher_is_better=self.metric.higher_is_better,
            metric=self.metric.unit,
            step=step,
            examples=examples,
        )

    def _examples(self) -> dict[str, dict[int, Any]] | None:
        """Which test examples each run got right, where all runs kept their logits."""
        if self.folder is None or self.metric.name != "test_accuracy":
            return None
        examples: dict[str, dict[int, Any]] = {}
        for row in self.rows:
            try:
                outputs = Run(self.folder / row.run).test_outputs()
            except (OSError, SafetensorError):
                return None
            if outputs is None:
                return None
            right = right_answers(outputs["logits"], outputs["labels"])
            examples.setdefault(row.arm, {})[row.seed] = 100.0 * right.double().numpy()
        return examples

    def comparison(self, arm: str) -> stats.Comparison | None:
        """The comparison of one arm; None for the baseline."""
        return next((c for c in self.comparisons if c.arm == arm), None)

    def with_verdict(self, verdict: str) -> list[str]:
        """The arms that a verdict was given to."""
        return [c.arm for c in self.comparisons if c.verdict == verdict]

    def verdict(self) -> str:
        """The conclusion, in one sentence."""
        phrases = []
        for verdict, words in (
            ("better", f"better than {self.baseline}"),
            ("worse", f"worse than {self.baseline}"),
            ("equivalent", f"as good as {self.baseline}, within {self.margin:g}"),
            ("underpowered", f"not told apart from {self.baseline} by so few seeds"),
        ):
            arms = [f'"{arm}"' if "," in arm else arm for arm in self.with_verdict(verdict)]
            if arms:
                listed = arms[0] if len(arms) == 1 else f"{', '.join(arms[:-1])} and {arms[-1]}"
                phrases.append(f"{listed} {'is' if len(arms) == 1 else 'are'} {words}")
        return f"Here {'; '.join(phrases)}."

    def diverged(self) -> str:
        """Which arms lost runs, in a sentence; empty if none did."""
        counts = []
        for arm in self.arms:
            runs = self.of_arm(arm)
            if lost := sum(row.diverged for row in runs):
                counts.append(f"{lost} of {len(runs)} runs of {arm}")
        return f"Diverged, which counts as no right answer: {', '.join(counts)}." if counts else ""

    def comparable(self) -> Results | None:
        """The arms with two runs or more whose metric is finite; None if none is left to compare.

        For a study that is not finished.
        """
        values = [(row, row.value(self.metric.name)) for row in self.rows]
        rows = [row for row, value in values if value is not None and math.isfinite(value)]
        counts = {arm: sum(row.arm == arm for row in rows) for arm in self.arms}
        enough = [arm for arm in counts if counts[arm] > 1]
        if self.baseline not in enough or len(enough) < 2:
            return None
        rows = [row for row in rows if row.arm in enough]
        return self if len(rows) == len(self.rows) else replace(self, rows=rows, saved=None)

    # Writing -------------------------------------------------------------------------------------

    def to_csv(self) -> str:
        """One row per run."""
        known = [name for name in COLUMNS if any(name in row.metrics for row in self.rows)]
        if self.metric.name not in known:
            known.insert(0, self.metric.name)
        columns = ["arm", "seed", *(["run"] if self.study else []), *known]
        return csv_text(columns, (row.to_dict() for row in self.rows))

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        values: dict[str, Any] = {
            "format": FORMAT,
            "metric": self.metric.name,
            "margin": self.margin,
            "baseline": self.baseline,
            "arms": self.arms,
            "verdict": self.verdict(),
            "comparisons": [comparison.to_dict() for comparison in self.comparisons],
            "rows": [row.to_dict() for row in self.rows],
            "environment": self.environment or describe_machine(),
        }
        if self.tuning is not None:
            values["tuning"] = self.tuning.to_dict()
        if self.grid is not None:
            values["grid"] = self.grid.values
        if self.decomposition is not None:
            values["alpha"] = self.decomposition.alpha
            values["identity_gaps"] = self.decomposition.gaps
        if self.study is not None:
            values["kind"] = self.study.kind.value
            values["tuned"] = list(self.study.tuned)
            values["changes"] = {arm: dict(changes) for arm, changes in self.study.arms.items()}
            if isinstance(self.study.program, RecipeProgram):
                values["recipe"] = self.study.base.model_dump(mode="json")
        return values

    def save(self, folder: Path) -> None:
        """Write study.csv and study.json."""
        write_text(folder / "study.csv", self.to_csv())
        write_json(folder / "study.json", self.to_dict())

    # Reading -------------------------------------------------------------------------------------

    @classmethod
    def load(cls, path: Path, metric: str | None = None) -> Results:
        """The results of a study's folder, of a study.json, or of a CSV with one row per run.

        In a folder the runs themselves count, finished or not yet; study.json adds how they were
        tuned, and the comparisons if they are of the same runs.

        Args:
            path: The folder or the file.
            metric: For a CSV: the column to compare.

        Raises:
            RunError: If it cannot be read, or only by a newer powergrad.
            RecipeError: If a CSV lacks a column, or a number.
        """
        if path.is_dir() and (path / FILE).is_file():
            return _load_folder(path)
        if path.suffix == ".json":
            return _from_json(_read_json(path))
        file = path / "study.csv" if path.is_dir() else path
        about = file.with_name("study.json")
        if metric is None and about.is_file():
            metric = _read_json(about).get("metric")
        name, rows = read_rows(file, metric)
        known = METRICS.get(name) or Metric(name, True, name, 0.5)
        return cls(known, known.margin, _usual_baseline(rows), rows)

    @classmethod
    def of_runs(cls, study: Study, folder: Path) -> Results:
        """The runs of a study that are finished, from their folders."""
        rows = []
        for (arm, seed), job in study.jobs().items():
            try:
                result = job.result(folder)
            except RunError:
                continue  # the page says what cannot be read
            if result is not None:
                rows.append(RunRow(arm, seed, result, job.name))
        return cls(study.metric, study.margin, study.baseline, rows, study, folder)

    @classmethod
    def from_csv(
        cls,
        path: Path,
        *,
        metric: str | None = None,
        baseline: str | None = None,
        margin: float | None = None,
        better: str | None = None,
    ) -> Results:
        """The results of runs made elsewhere: a CSV with columns arm, seed and a metric.

        Args:
            path: The file.
            metric: The column to compare; see :func:`read_rows`.
            baseline: The arm to compare with; ``baseline`` or the first one by default.
            margin: See :func:`powergrad.lab.study.metrics.guess_metric`.
            better: The same.

        Raises:
            RecipeError: If columns or numbers are missing, or the metric is not known.
        """
        name, rows = read_rows(path, metric)
        values = [value for row in rows if (value := row.value(name)) is not None]
        chosen = guess_metric(name, values, margin=margin, better=better)
        results = cls(chosen, chosen.margin, baseline or _usual_baseline(rows), rows)
        _ = results.comparisons  # raises where they cannot be made
        return results


def run_study(
    study: Study,
    folder: Path,
    *,
    workers: int,
    storage: str | None = None,
    watch: Callable[[Snapshot], None] = lambda snapshot: None,
) -> Results:
    """Do every run of a study that is not done yet, in `folder`."""
    study.claim(folder)
    jobs = study.jobs()
    finished = run_jobs(
        list(jobs.values()),
        folder,
        study=f"{folder.name}-{study.name}",  # as a storage may hold studies of one name
        workers=workers,
        storage=storage,
        watch=watch,
    )
    rows = [RunRow(arm, seed, finished[job.name], job.name) for (arm, seed), job in jobs.items()]
    environment = describe_machine()
    return Results(
        study.metric,
        study.margin,
        study.baseline,
        rows,
        study,
        folder,
        environment=environment,
    )


def _load_folder(folder: Path) -> Results:
    results = Results.of_runs(Study.load(folder), folder)
    if not (folder / "study.json").is_file():
        return results
    saved = _from_json(_read_json(folder / "study.json"))
    is_same = {row.run for row in results.rows} == {row.run for row in saved.rows}
    assert results.study is not None
    return replace(
        saved,
        rows=saved.rows if is_same else results.rows,
        study=replace(results.study, metric=saved.metric, margin=saved.margin),
        folder=folder,
        saved=saved.saved if is_same else None,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
        if not isinstance(values, dict):
            raise ValueError(f"a {type(values).__name__}")
    except (OSError, ValueError) as error:
        raise RunError(f"Expected {str(path)!r} to hold a study, but got: {error}") from None
    if values.get("format", 1) > FORMAT:
        raise RunError(
            f"Expected {str(path)!r} to be of format {FORMAT} or earlier, but got "
            f"{values['format']}; a newer powergrad reads it."
        )
    return values


def _from_json(values: Mapping[str, Any]) -> Results:
    name = values["metric"]
    metric = METRICS.get(name) or Metric(name, True, name, values["margin"])
    rows = [RunRow.from_dict(row) for row in values["rows"]]
    study = None
    if "recipe" in values:
        kind, tuned = read_kind(values)
        program = RecipeProgram(Recipe.model_validate(values["recipe"]))
        seeds = list(dict.fromkeys(row.seed for row in rows))
        study = Study(kind, program, values["changes"], seeds, metric, values["margin"], tuned)
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
        grid=Grid({key: tuple(points) for key, points in grid.items()}) if grid else None,
        decomposition=decomposition,
        environment=values.get("environment", {}),
        saved=tuple(map(stats.Comparison.from_dict, values["comparisons"])),
    )


def _usual_baseline(rows: Iterable[RunRow]) -> str:
    arms = [row.arm for row in rows]
    return "baseline" if "baseline" in arms or not arms else arms[0]


def read_rows(path: Path, metric: str | None = None) -> tuple[str, list[RunRow]]:
    """The rows of a CSV with columns arm, seed and a metric, and the name of the metric.

    Args:
        path: The file.
        metric: The column to compare; by default ``test_accuracy``, ``metric``, or the only one
            beside arm and seed.

    Raises:
        RecipeError: If columns are missing, or a cell of the metric is not a number.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        reader = csv.DictReader(io.StringIO(text, newline=""))
        columns = list(reader.fieldnames or [])
        lines = list(reader)
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"Expected to read {str(path)!r}, but got: {error}") from None
    except csv.Error as error:
        raise RecipeError(f"Expected {str(path)!r} to be a CSV, but got: {error}") from None
    others = [name for name in columns if name not in ("arm", "seed")]
    if metric is None:
        usual = [name for name in ("test_accuracy", "metric") if name in others]
        metric = (usual or (others if len(others) == 1 else [None]))[0]
    if not {"arm", "seed"} <= set(columns) or metric not in others:
        wanted = metric if metric is not None else "a metric (name it with --metric)"
        raise RecipeError(
            f"Expected {str(path)!r} to have the columns arm, seed and {wanted}, but got "
            f"{', '.join(columns) or 'none'}."
        )
    rows = []
    for number, line in enumerate(lines, start=2):
        try:
            seed, value = int(line["seed"]), float(line[metric])
        except (TypeError, ValueError):
            raise RecipeError(
                f"Expected a whole number as seed and a number as {metric} in line {number} of "
                f"{str(path)!r}, but got {line['seed']!r} and {line[metric]!r}."
            ) from None
        cells = {name: _cell(line[name]) for name in others if name not in ("run", "commit")}
        kept = {name: line[name] or "" for name in ("run", "commit") if name in others}
        rows.append(RunRow(line["arm"], seed, {**cells, metric: value}, **kept))
    return metric, rows


def _cell(text: str | None) -> float | bool | str | None:
    """A cell of a CSV: a number, True, False, text, or None where it is empty."""
    if not text:
        return None
    if text in ("True", "False"):
        return text == "True"
    try:
        return float(text)
    except ValueError:
        return text
