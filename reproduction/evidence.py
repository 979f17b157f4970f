"""The measured results in ``results/``.

The replica LABEL of an experiment has these files in ``results/paper``, which
`reproduction.collection` writes from finished run folders:

    EXPERIMENT-LABEL.csv           one row per run: arm, seed, run, commit, final metrics
    EXPERIMENT-LABEL.json          recipe, arms, decay exponents, departures, machine, commands
    EXPERIMENT-LABEL--ARM.csv      metrics by epoch of the arm's first seed       } for the arms
    EXPERIMENT-LABEL--ARM.npz      filter norms by step of that run, thinned out  } in figures

The studies that the paper does not have are ``results/compare_*.json`` and ``decompose_*.json``.
"""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from powergrad.lab.trainer.run_folder import RunError
from powergrad.lab.words import slug
from reproduction.published import Use, load_paper
from reproduction.trials import Trial, load_study

RESULTS = Path(__file__).parents[1] / "results"


def csv_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file; none if there is no such file."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


class MissingRunsError(RunError):
    """A figure needs runs that are missing; the message names the command that makes them."""


def small_command(use: Use) -> str:
    """The command that makes a figure's data at small scale."""
    experiment = load_paper().find(use.experiment)
    item = experiment.id if use.arm is None else experiment.row(use.arm).id
    return f"python -m reproduction run {item} --scale small --collect"


def file_part(text: str) -> str:
    """`text` as part of a file name in ``results/paper``.

    Example:
        >>> file_part("AGC + PGT")
        'AGC-PGT'
    """
    return re.sub("-+", "-", slug(text)).strip("-")


@dataclass(frozen=True)
class Norms:
    """Filter norms over the steps of a run.

    Attributes:
        steps: ``(points,)``.
        layers: By the number of a layer, ``(points, units)``; the features after pooling, if they
            were recorded, have the number None.
    """

    steps: NDArray[np.int64]
    layers: Mapping[int | None, NDArray[np.float32]]

    def dead(self, layer: int | None) -> NDArray[np.bool_] | None:
        """Which units are dead at the end, as in the census; None if the run diverged."""
        first, last = self.layers[layer][[0, -1]]
        if not np.isfinite(last).all():
            return None
        return last == 0 if layer is None else last < 0.01 * first

    def is_all_dead(self, layer: int | None) -> bool:
        dead = self.dead(layer)
        return dead is not None and bool(dead.all())

    def dead_in_words(self, layer: int | None) -> str:
        """The number of dead units at the end."""
        dead = self.dead(layer)
        return "diverged" if dead is None else f"{int(dead.sum())} of {dead.size}"


@dataclass(frozen=True)
class KeptRun:
    """The first run of an arm, whose curve and filter norms are shown in figures."""

    trial: Trial
    arm: str

    @property
    def name(self) -> str:
        """Its row and arm."""
        assert self.trial.experiment is not None
        return f"{self.trial.experiment.row(self.arm).id} {self.arm}"

    @property
    def caption(self) -> str:
        """Which run it is, and on what it was measured."""
        (arm,) = (arm for arm in self.trial.arms if arm.name == self.arm)
        first = arm.rows[0]
        return f"{self.name}, seed {first.seed}, run {first.run}: {arm.measured_on}"

    def file(self, ending: str) -> Path:
        """The file of its curve (.csv) or norms (.npz), which need not exist."""
        return self.trial.stem.with_name(f"{self.trial.name}--{file_part(self.arm)}{ending}")

    def curve(self) -> NDArray[np.void]:
        """The metrics over its epochs, by the names of their columns."""
        return np.atleast_1d(np.genfromtxt(self.file(".csv"), delimiter=",", names=True))

    def norms(self) -> Norms:
        """The filter norms over its steps."""
        with np.load(self.file(".npz"), allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
        layers: dict[int | None, NDArray[np.float32]] = {
            int(match[1]): values.astype(np.float32)
            for key, values in arrays.items()
            if (match := re.fullmatch(r"layer(\d+)", key))
        }
        if "feature" in arrays:
            layers[None] = arrays["feature"].astype(np.float32)
        return Norms(arrays["steps"], layers)


class Evidence:
    """The contents of a folder ``results``.

    If nothing is found, `best`, `kept_run` and `most_tested` raise MissingRunsError.

    Attributes:
        replicas: The studies in ``paper``.
        others: The studies that the paper does not have.
    """

    def __init__(self, results: Path) -> None:
        names = [*results.glob("compare_*.json"), *results.glob("decompose_*.json")]
        self.replicas = [load_study(path) for path in sorted((results / "paper").glob("*.json"))]
        self.others = [load_study(path) for path in sorted(names)]

    @functools.cached_property
    def trials(self) -> list[Trial]:
        """The studies whose first arm is plain cross-entropy: evidence on the paper's claims."""
        return [trial for trial in (*self.replicas, *self.others) if trial.is_evidence]

    def of(self, use: Use) -> list[Trial]:
        """The replicas with an arm or an experiment, sorted by the number of examples."""
        replicas = [
            trial
            for trial in self.replicas
            if trial.experiment
            and trial.experiment.id == use.experiment
            and (use.arm is None or use.arm in trial.results.arms)
        ]
        return sorted(replicas, key=lambda trial: (-trial.examples, trial.label))

    def missing(self, uses: Iterable[Use]) -> list[Use]:
        """The uses that no replica has."""
        return [use for use in uses if not self.of(use)]

    def require(self, uses: Iterable[Use]) -> None:
        """Raise MissingRunsError, with the commands, if uses have no replica."""
        if missing := self.missing(uses):
            commands = dict.fromkeys(f"\n    {small_command(use)}" for use in missing)
            raise MissingRunsError(f"missing: {', '.join(map(str, missing))}{''.join(commands)}")

    def best(self, use: Use) -> Trial:
        """The first of the replicas that have a use."""
        self.require([use])
        return self.of(use)[0]

    def kept_run(self, use: Use) -> KeptRun:
        """The run of the first of these replicas."""
        trial = self.best(use)
        return KeptRun(trial, use.arm or trial.results.baseline)

    def most_tested(self, use: Use) -> KeptRun:
        """The run of these replicas whose curve has the most points."""
        arm = self.kept_run(use).arm
        runs = [KeptRun(trial, arm) for trial in self.of(use)]
        return max(runs, key=lambda run: len(run.curve()))
