"""Reads the measured results of the paper from ``results/paper/``.

The study LABEL of an experiment has these files:

    EXPERIMENT-LABEL.csv           one row per run: arm, seed, run, commit, final metrics
    EXPERIMENT-LABEL.json          recipe, arms, decay exponents, departures, machine, commands
    EXPERIMENT-LABEL--ARM.csv      metrics by epoch of the arm's first seed       } for the arms
    EXPERIMENT-LABEL--ARM.npz      filter norms by step of that run, thinned out  } in figures

`powergrad.lab.paper.collect` writes them from finished run folders. Figures and pages read only
these files.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from powergrad.lab import stats
from powergrad.lab.jobs import Changes
from powergrad.lab.paper.rows import Experiment, Use, load_paper
from powergrad.lab.study import METRICS, Results, Tuning
from powergrad.lab.study.results import CLASSES
from powergrad.lab.study.tables import read_rows
from powergrad.lab.trainer.recipe import Recipe
from powergrad.lab.trainer.run_folder import RunError
from powergrad.lab.words import slug

FORMAT = 1
METRIC = METRICS["test_accuracy"]
MARGIN = METRIC.margin


class MissingRunsError(RunError):
    """A figure needs runs that are missing; the message names the command that makes them."""


def small_command(use: Use) -> str:
    """The command that makes a figure's data at small scale."""
    experiment = load_paper().find(use.experiment)
    item = experiment.id if use.arm is None else experiment.row(use.arm).id
    return f"powergrad paper run {item} --scale small --collect"


def file_part(text: str) -> str:
    """`text` as part of a file name in ``results/paper``.

    Example:
        >>> file_part("AGC + PGT")
        'AGC-PGT'
    """
    return re.sub("-+", "-", slug(text)).strip("-")


@dataclass(frozen=True)
class Conditions:
    """The conditions of the runs of an experiment.

    Attributes:
        data: The name of the data set, as in a recipe.
        examples: The number of training examples.
        scale: Full scale, or scaled down.
        exponents: The decay exponent of every arm.
        lost: The departures from the paper, in words.
        commands: The commands of the runs.
        arms: The changes of every arm; empty at full scale.
        tuning: The tuning of the arms, if any.
    """

    data: str
    examples: int
    scale: Literal["full", "small"]
    exponents: Mapping[str, float]
    lost: Sequence[str]
    commands: Sequence[str]
    arms: Mapping[str, Changes] = field(default_factory=dict)
    tuning: Tuning | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {key: value for key, value in asdict(self).items() if value not in ({}, None)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_dict`; other keys are ignored."""
        known = {key.name: values[key.name] for key in fields(cls) if key.name in values}
        if "tuning" in known:
            known["tuning"] = Tuning.from_dict(known["tuning"])
        return cls(**known)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file; raise RunError if it has a newer format."""
    values = json.loads(path.read_text(encoding="utf-8"))
    if values.get("format", 0) > FORMAT:
        raise RunError(
            f"Expected {str(path)!r} to have format {FORMAT} or earlier, but got "
            f"{values['format']}; a newer version of powergrad can read it."
        )
    return values


class Outcome(NamedTuple):
    """A comparison as text; without interval and p if there are too few seeds for a verdict."""

    difference: str
    interval: str
    p: str
    verdict: str

    @classmethod
    def of(cls, comparison: stats.Comparison) -> Outcome:
        """The outcome of a comparison."""
        difference = stats.format_signed(comparison.difference)
        if comparison.n < stats.LEAST:
            return cls(difference, "", "", "too few seeds")
        interval, p = stats.format_interval(comparison.interval), f"{comparison.p:.3f}"
        return cls(difference, interval, p, comparison.verdict)

    @property
    def with_interval(self) -> str:
        """The difference, and its interval in brackets if there is one."""
        return f"{self.difference} ({self.interval})" if self.interval else self.difference


def describe_runs(recipe: Recipe, steps: Iterable[float]) -> str:
    """A description of the runs of a recipe: network, data, batch size, steps."""
    model = recipe.model
    data = recipe.data.name.rpartition("/")[2].removeprefix("folder:")
    if recipe.data.limit:
        data = f"{recipe.data.limit:,} images of {data}"
    network = model.name + (f" of width {model.width}" if model.width else "")
    network += {"none": " without normalisation", "group": ", group norm"}.get(model.norm, "")
    lengths = [f"{int(length):,}" for length in sorted(set(steps))]
    if len(lengths) > 3:  # runs that diverged at different times
        lengths = [f"{lengths[0]} to {lengths[-1]}"]
    return f"{network} on {data}, batch {recipe.train.batch_size}, {' or '.join(lengths)} steps"


@dataclass(frozen=True)
class Norms:
    """Filter norms over the steps of a run.

    Attributes:
        steps: ``(points,)``.
        layers: By the number of a layer, ``(points, units)``.
        features: The features after pooling, ``(points, features)``, if recorded.
    """

    steps: NDArray[np.int64]
    layers: Mapping[int, NDArray[np.float32]]
    features: NDArray[np.float32] | None = None

    def values(self, layer: int | None) -> NDArray[np.float32]:
        """The norms of a layer, or of the features for None."""
        values = self.features if layer is None else self.layers[layer]
        if values is None:
            raise MissingRunsError("Expected a recording with features, but got one without.")
        return values

    def dead(self, layer: int | None) -> NDArray[np.bool_] | None:
        """Which units are dead at the end, as in the census; None if the run diverged."""
        first, last = self.values(layer)[[0, -1]]
        if not np.isfinite(last).all():
            return None
        return last == 0 if layer is None else last < 0.01 * first


@dataclass(frozen=True)
class Measurement:
    """A study of an experiment.

    Attributes:
        experiment: The experiment.
        conditions: The conditions of the runs.
        label: The label that distinguishes it from other studies of the experiment.
        recipe: The recipe of its first run.
        torch: The version of PyTorch.
        results: Its runs.
        stem: The path of its files, without suffix.
    """

    experiment: Experiment
    conditions: Conditions
    label: str
    recipe: Recipe
    torch: str
    results: Results
    stem: Path

    @classmethod
    def load(cls, path: Path) -> Measurement:
        """Load the study of a JSON file."""
        values = read_json(path)
        experiment = load_paper().find(values["experiment"])
        stem = path.with_suffix("")
        _, rows = read_rows(stem.with_name(f"{stem.name}.csv"), METRIC.name)
        conditions = Conditions.from_dict(values)
        recipe = Recipe.model_validate(values["recipe"])
        if classes := CLASSES.get(recipe.data.name):  # for the value of diverged runs
            rows = [replace(row, metrics={"classes": classes, **row.metrics}) for row in rows]
        return cls(
            experiment,
            conditions,
            values["label"],
            recipe,
            values["machine"]["torch"],
            Results(METRIC, MARGIN, experiment.baseline.arm, rows, tuning=conditions.tuning),
            stem,
        )

    @property
    def name(self) -> str:
        """The name of its files, without suffix."""
        return self.stem.name

    @functools.cached_property
    def comparisons(self) -> dict[str, stats.Comparison]:
        """The comparison of every arm with at least two seeds, by arm."""
        comparable = self.results.comparable()
        comparisons = comparable.comparisons if comparable else []
        return {comparison.arm: comparison for comparison in comparisons}

    def alpha(self, arm: str) -> float:
        """The alpha of an arm."""
        return self.experiment.row(arm).recipe.loss.alpha

    def pairs(self, first: str, second: str) -> NDArray[np.float64]:
        """Two metrics of every run that has both: ``(2, runs)``."""
        pairs = [(row.value(first), row.value(second)) for row in self.results.rows]
        array = np.array(pairs, dtype=np.float64)  # None becomes NaN
        return array[np.isfinite(array).all(1)].T

    def describe(self, arm: str | None = None) -> str:
        """A description of the study or of one arm: network, data, batch size, steps."""
        rows = self.results.rows if arm is None else self.results.of_arm(arm)
        return describe_runs(self.recipe, (row.metrics["steps"] for row in rows))


@dataclass(frozen=True)
class KeptRun:
    """The first run of an arm, whose curve and filter norms are shown in figures.

    If they were not stored, MissingRunsError names the command that makes them.
    """

    study: Measurement
    arm: str

    @property
    def name(self) -> str:
        """Its row and arm."""
        return f"{self.study.experiment.row(self.arm).id} {self.arm}"

    @property
    def caption(self) -> str:
        """Which run it is."""
        row = self.study.results.of_arm(self.arm)[0]
        return f"{self.name}, seed {row.seed}, run {row.run}"

    @property
    def measured_on(self) -> str:
        """Network, data, batch size and steps."""
        return self.study.describe(self.arm)

    def file(self, ending: str) -> Path:
        """The file of its curve (.csv) or norms (.npz), which need not exist."""
        return self.study.stem.with_name(f"{self.study.name}--{file_part(self.arm)}{ending}")

    def curve(self) -> NDArray[np.void]:
        """The metrics over its epochs, by the names of their columns."""
        return np.atleast_1d(np.genfromtxt(self._existing(".csv"), delimiter=",", names=True))

    def norms(self) -> Norms:
        """The filter norms over its steps."""
        with np.load(self._existing(".npz"), allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
        layers = {
            int(match[1]): values.astype(np.float32)
            for key, values in arrays.items()
            if (match := re.fullmatch(r"layer(\d+)", key))
        }
        features = arrays["feature"].astype(np.float32) if "feature" in arrays else None
        return Norms(arrays["steps"], layers, features)

    def _existing(self, ending: str) -> Path:
        path = self.file(ending)
        if not path.exists():
            command = small_command(Use(self.study.experiment.id, self.arm))
            raise MissingRunsError(f"No {path.name} in {path.parent}; run `{command}`.")
        return path


class Evidence:
    """The contents of ``results/paper``.

    If nothing is found, `best`, `kept_run` and `most_tested` raise MissingRunsError.
    """

    def __init__(self, results: Path) -> None:
        paths = sorted((results / "paper").glob("*.json"))
        self.measurements = [Measurement.load(path) for path in paths]

    def of(self, use: Use) -> list[Measurement]:
        """The studies with an arm or an experiment, sorted by the number of examples."""
        studies = [
            study
            for study in self.measurements
            if study.experiment.id == use.experiment
            and (use.arm is None or use.arm in study.results.arms)
        ]
        return sorted(studies, key=lambda study: (-study.conditions.examples, study.label))

    def missing(self, uses: Iterable[Use]) -> list[Use]:
        """The uses that no study has."""
        return [use for use in uses if not self.of(use)]

    def best(self, use: Use) -> Measurement:
        """The first of the studies that have a use."""
        for study in self.of(use):
            return study
        raise MissingRunsError(f"No run of {use} was measured; run `{small_command(use)}`.")

    def kept_run(self, use: Use) -> KeptRun:
        """The run of the first of these studies."""
        study = self.best(use)
        return KeptRun(study, use.arm or study.results.baseline)

    def most_tested(self, use: Use) -> KeptRun:
        """The run of these studies whose curve has the most points."""
        arm = self.kept_run(use).arm
        runs = [KeptRun(study, arm) for study in self.of(use)]
        return max(runs, key=lambda run: len(run.curve()))
