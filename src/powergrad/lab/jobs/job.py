"""What queue, study, statistics and page know of a run: a job, and the program that makes jobs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import Self

from powergrad.lab.config import RecipeError
from powergrad.lab.run import Run, RunError

__all__ = ["Changes", "Job", "JobError", "Metrics", "Program", "RunFailed"]

Changes = Mapping[str, Any]  # what an arm changes, by dotted key
Metrics = dict[str, Any]


class JobError(RunError):
    """A study that cannot be finished; its finished runs are kept."""


class RunFailed(RunError):  # noqa: N818
    """A run of somebody's own program that failed.

    Attributes:
        stops: Whether no other run can be of use, so that the study must end.
    """

    def __init__(self, message: str, *, stops: bool = False) -> None:
        super().__init__(message)
        self.stops = stops


@dataclass(frozen=True)
class Job(ABC):
    """One run of a study.

    Attributes:
        name: The name of its folder in the study's folder.
        is_foreign: Whether it runs somebody's own program: see :class:`Program`.
    """

    is_foreign: ClassVar[bool] = False
    name: str

    @abstractmethod
    def execute(self, folder: Path) -> Metrics:
        """Do the run in the study's `folder`, or continue it; returns the final metrics.

        Raises:
            Interrupted: If it was asked to stop. What it did is saved.
            RunFailed: If it is somebody's own program, and failed.
        """

    def result(self, folder: Path) -> Metrics | None:
        """The final metrics; None while the run is not finished."""
        return Run(folder / self.name).result()

    def progress(self, folder: Path) -> float:
        """The fraction of the run that is done, from 0 to 1; by default nothing before its end."""
        return float(self.result(folder) is not None)

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The job as JSON, for a worker in another process or on another machine."""

    @classmethod
    @abstractmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The job that :meth:`to_dict` described."""


class Program(ABC):
    """What a study runs: it makes the job of every arm and seed.

    Attributes:
        is_foreign: Whether it is somebody's own program. Then nothing is known of it before its
            first run, its metrics have any name, and a run that fails is left out of the study.
        hold_out: The fraction of the training data on which trials of a tuning are judged.
    """

    is_foreign: ClassVar[bool] = False
    hold_out: ClassVar[float] = 0.0

    @property
    @abstractmethod
    def key(self) -> str:
        """What tells this program from every other, for the name of a study's folder."""

    @property
    @abstractmethod
    def data_name(self) -> str:
        """The name of the data, for the name of a study's folder."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What is trained, in a few words."""

    @property
    def changing(self) -> str:
        """What ``data_fingerprint`` in :meth:`to_dict` is of, with its verb."""
        return f"The data of {self.title} have changed"

    @abstractmethod
    def job(self, arm: str, changes: Changes, seed: int) -> Job:
        """The run of an arm and a seed."""

    @abstractmethod
    def alpha(self, changes: Changes) -> float:
        """The alpha of an arm, 1 without PGT."""

    @abstractmethod
    def check_arms(self, arms: Mapping[str, Changes]) -> None:
        """Raise RecipeError for arms that cannot be compared with each other."""

    # Tuning: by default a point is what an arm changes, and a trial is a run like every other.

    def check_tuning(self, *, by_identity: bool) -> None:
        """Raise RecipeError where keys cannot be tuned, or not with ``--tune-map identity``."""
        if by_identity:
            raise RecipeError(
                "Expected --tune-map none, because the optimizer of your own program is not known, "
                "but got identity."
            )

    def at_point(self, changes: Changes, point: Changes, shared: Collection[str]) -> Metrics:
        """What an arm changes at a point of a tuning, beside its own `changes`.

        Args:
            changes: What the arm changes.
            point: The values of the tuned keys.
            shared: Those that are tuned for every arm.
        """
        return dict(point)

    def in_trial(self, changes: Changes) -> Changes:
        """The same changes for a trial, which must not see the test data."""
        return changes

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """What ``study.yaml`` says of it."""

    @classmethod
    @abstractmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The program that :meth:`to_dict` described."""
