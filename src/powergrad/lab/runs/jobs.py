"""What a run is: a job, and the program that executes it."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict
from typing_extensions import Self

from powergrad.lab.trainer.recipe import RecipeError
from powergrad.lab.trainer.run_folder import Result, Run, RunError
from powergrad.lab.words import slug

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
    """One run of a study: a program, an arm's changes, and a seed. This is what a pool executes."""

    name: str  # its folder in the folder of the study
    arm: str
    seed: int
    changes: Changes
    program: Program

    @property
    def is_foreign(self) -> bool:
        return self.program.is_foreign

    def execute(self, folder: Path) -> Result:
        return self.program.execute(self, folder)

    def result(self, folder: Path) -> Result | None:
        return Run(folder / self.name).result()

    def progress(self, folder: Path) -> float:
        return self.program.progress(self, folder)

    def within(self, folder: str) -> Job:
        """The same run in another folder of the study."""
        return replace(self, name=f"{folder}/{self.name}")


class Record(BaseModel):
    """Plain data that is stored in files."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Program(Record):
    """What a study runs for every arm and seed; `fingerprint` identifies its code or data."""

    is_foreign: ClassVar[bool] = False  # a user's program: any metrics; failed runs are left out
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

    def changed_since(self, earlier: Program) -> str:
        """What has changed since the runs of `earlier`, as a clause; empty if nothing."""
        is_same = earlier.fingerprint in ("", self.fingerprint)
        return "" if is_same else f"{self.title} has changed"

    def with_arms(self, arms: Mapping[str, Changes]) -> Self:
        """The program with what follows from its arms; raises RecipeError for impossible arms."""
        return self

    @abstractmethod
    def identity(self, arm: str, changes: Changes, seed: int) -> str:
        """A key of the run of an arm and a seed."""

    def job(self, arm: str, changes: Changes, seed: int) -> Job:
        """The run of an arm and a seed."""
        name = f"{slug(arm)[:40]}-seed{seed}-{self.identity(arm, changes, seed)}"
        return Job(name, arm, seed, changes, self)

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
            reason = "because the optimizer of your own program is unknown"
            raise RecipeError(f"Expected --tune-map none, {reason}, but got identity.")

    def at_point(self, changes: Changes, point: Changes, shared: Collection[str]) -> dict[str, Any]:
        """The changes of an arm at a point of a tuning; `shared` are the keys of every arm."""
        return dict(point)

    def in_trial(self, changes: Changes) -> Changes:
        """The changes for a trial, which must not use the test data."""
        return changes

    def public(self) -> Program:
        """The program as it is stored in files that are shared."""
        return self


class ForeignProgram(Program):
    """A user's program: its runs begin again if they were interrupted."""

    is_foreign: ClassVar[bool] = True

    def execute(self, job: Job, folder: Path) -> Result:
        run = Run(folder.resolve() / job.name)
        with run.hold():
            result = run.result()
            if result is None:
                result = self.perform(job, run)
                run.finish(result)
        return result

    @abstractmethod
    def perform(self, job: Job, run: Run) -> Result:
        """Execute a run in its locked folder."""


def check_distinct(runs: Mapping[str, str]) -> None:
    """Raise RecipeError if two arms, which are given with their runs, are the same."""
    arm_by_run: dict[str, str] = {}
    for arm, run in runs.items():
        if (other := arm_by_run.setdefault(run, arm)) != arm:
            raise RecipeError(f"Expected different arms, but {other!r} and {arm!r} are the same.")


def digest(content: str | bytes) -> str:
    """The SHA-256 of a text or a file."""
    data = content.encode() if isinstance(content, str) else content
    return hashlib.sha256(data).hexdigest()
