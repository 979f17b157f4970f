"""What a run is: a job, and the program that executes it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from powergrad.lab.trainer.recipe import RecipeError
from powergrad.lab.trainer.run_folder import Result, Run, RunError

Changes = Mapping[str, Any]  # the changes of an arm, by key


class JobError(RunError):
    """A study that cannot be finished; its finished runs are kept."""


class RunFailed(RunError):  # noqa: N818
    """The run of a user's program failed; `stops` says that all other runs would fail too."""

    def __init__(self, message: str, stops: bool = False) -> None:
        super().__init__(message, stops)
        self.stops = stops

    def __str__(self) -> str:
        return self.args[0]


@dataclass(frozen=True)
class Job:
    """One run of a study: a program, an arm with its changes, and a seed."""

    name: str  # the run's folder in the folder of the study
    arm: str
    seed: int
    changes: Changes
    program: Program

    @property
    def is_foreign(self) -> bool:
        """Whether it runs a user's program."""
        return self.program.is_foreign

    def execute(self, folder: Path) -> Result:
        """Execute or continue the run in the `folder` of the study."""
        return self.program.execute(self, folder)

    def result(self, folder: Path) -> Result | None:
        """The final result; None if the run is not finished."""
        return Run(folder / self.name).result()

    def progress(self, folder: Path) -> float:
        """The finished fraction of the run, from 0 to 1."""
        return self.program.progress(self, folder)

    def within(self, folder: str) -> Job:
        """The same run in another folder of the study."""
        return replace(self, name=f"{folder}/{self.name}")


class Record(BaseModel):
    """Plain data that is stored in files."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Program(Record):
    """What a study runs for every arm and seed; `fingerprint` identifies its code or data."""

    is_foreign: ClassVar[bool] = (
        False  # a user's program: any metrics, and failed runs are left out
    )
    hold_out: ClassVar[float] = 0.0  # the fraction of the training data on which trials are tested
    fingerprint: str = ""

    @property
    @abstractmethod
    def key(self) -> str:
        """A unique key of this program, for the name of the study's folder."""

    @property
    @abstractmethod
    def data_name(self) -> str:
        """The name of the data, for the name of the study's folder."""

    @property
    @abstractmethod
    def title(self) -> str:
        """A short description of the training."""

    @property
    @abstractmethod
    def changing(self) -> str:
        """A clause that says that `fingerprint` has changed."""

    @abstractmethod
    def job(self, arm: str, changes: Changes, seed: int) -> Job:
        """The run of an arm and a seed."""

    @abstractmethod
    def execute(self, job: Job, folder: Path) -> Result:
        """Execute or continue a run; raises Interrupted, or RunFailed for a user's program."""

    def progress(self, job: Job, folder: Path) -> float:
        """The finished fraction of a run; by default only 0 or 1."""
        return float(job.result(folder) is not None)

    @abstractmethod
    def alpha(self, changes: Changes) -> float:
        """The alpha of an arm, 1 without PGT."""

    def check_arms(self, arms: Mapping[str, Changes]) -> None:
        """Raise RecipeError for arms that cannot be compared with each other."""

    def check_tuning(self, *, by_identity: bool) -> None:
        """Raise RecipeError if keys cannot be tuned, or not with ``--tune-map identity``."""
        if by_identity:
            raise RecipeError(
                "Expected --tune-map none, because the optimizer of your own program is unknown, "
                "but got identity."
            )

    def at_point(self, changes: Changes, point: Changes, shared: Collection[str]) -> dict[str, Any]:
        """The changes of an arm at a point of a tuning; `shared` are the keys of every arm."""
        return dict(point)

    def in_trial(self, changes: Changes) -> Changes:
        """The changes for a trial, which must not use the test data."""
        return changes

    def public(self) -> Program:
        """The program as it is stored in files that are shared."""
        return self
