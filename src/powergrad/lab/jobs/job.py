"""What queue, study, statistics and page know of a run: a job, and the program that makes jobs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import Self

from powergrad.lab.run import RunError

__all__ = ["Changes", "Job", "JobError", "Program"]

Changes = Mapping[str, Any]  # what an arm changes, by dotted key
Metrics = dict[str, Any]


class JobError(RunError):
    """Some runs of a study failed; the others are finished."""


@dataclass(frozen=True)
class Job(ABC):
    """One run of a study.

    Attributes:
        name: The name of its folder in the study's folder.
    """

    name: str

    @abstractmethod
    def execute(self, folder: Path) -> Metrics:
        """Do the run in the study's `folder`, or continue it; returns the final metrics.

        Raises:
            Interrupted: If it was asked to stop. What it did is saved.
        """

    @abstractmethod
    def result(self, folder: Path) -> Metrics | None:
        """The final metrics; None while the run is not finished."""

    @abstractmethod
    def progress(self, folder: Path) -> float:
        """The fraction of the run that is done, from 0 to 1."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The job as JSON, for a worker in another process or on another machine."""

    @classmethod
    @abstractmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The job that :meth:`to_dict` described."""


class Program(ABC):
    """What a study runs: it makes the job of every arm and seed."""

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

    @abstractmethod
    def job(self, arm: str, changes: Changes, seed: int) -> Job:
        """The run of an arm and a seed."""

    @abstractmethod
    def alpha(self, changes: Changes) -> float:
        """The alpha of an arm, 1 without PGT."""

    @abstractmethod
    def check_arms(self, arms: Mapping[str, Changes]) -> None:
        """Raise RecipeError for arms that cannot be compared with each other."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """What ``study.yaml`` says of it."""

    @classmethod
    @abstractmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The program that :meth:`to_dict` described."""
