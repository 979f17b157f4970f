"""The interface of runs: a job, and the program that creates jobs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import Self

from powergrad.lab.trainer.recipe import RecipeError
from powergrad.lab.trainer.run_folder import Result, Run, RunError

Changes = Mapping[str, Any]  # the changes of an arm, by dotted key
Metrics = dict[str, Any]


def merge_result(result: Result) -> Metrics:
    """The metrics of a run and everything else, in one dict."""
    return {**result.metrics, **result.about}


def split_result(values: Metrics) -> Result:
    """The inverse of :func:`merge_result`."""
    numbers: dict[str, float | None] = {
        k: v for k, v in values.items() if isinstance(v, (int, float)) and k != "diverged"
    }
    return Result(metrics=numbers, about={k: v for k, v in values.items() if k not in numbers})


class JobError(RunError):
    """A study that cannot be finished; its finished runs are kept."""


class RunFailed(RunError):  # noqa: N818
    """The run of a user's program failed.

    Attributes:
        stops: Whether all other runs would fail too, so that the study must stop.
    """

    def __init__(self, message: str, *, stops: bool = False) -> None:
        super().__init__(message)
        self.stops = stops


@dataclass(frozen=True)
class Job(ABC):
    """One run of a study.

    Attributes:
        name: The name of its folder in the folder of the study.
        is_foreign: Whether it runs a user's program, see :class:`Program`.
    """

    is_foreign: ClassVar[bool] = False
    name: str

    @abstractmethod
    def execute(self, folder: Path) -> Metrics:
        """Execute or continue the run in the `folder` of the study; return the final metrics."""

    def result(self, folder: Path) -> Metrics | None:
        """The final metrics; None if the run is not finished."""
        result = Run(folder / self.name).result()
        return None if result is None else merge_result(result)

    def progress(self, folder: Path) -> float:
        """The finished fraction of the run, from 0 to 1; by default only 0 or 1."""
        return float(self.result(folder) is not None)

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The job as JSON, for a worker in another process or on another machine."""

    @classmethod
    @abstractmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_dict`."""


class Program(ABC):
    """The program of a study: creates the job of every arm and seed.

    Attributes:
        is_foreign: Whether it is a user's program. Then its metrics are unknown before its first
            run and may have any name, and failed runs are excluded from the study.
        hold_out: The fraction of the training data on which trials of a tuning are tested.
    """

    is_foreign: ClassVar[bool] = False
    hold_out: ClassVar[float] = 0.0

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
    def changing(self) -> str:
        """A clause that says that ``data_fingerprint`` in :meth:`to_dict` has changed."""
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

    # Tuning: by default a point is used as changes of an arm, and a trial is an ordinary run.

    def check_tuning(self, *, by_identity: bool) -> None:
        """Raise RecipeError if keys cannot be tuned, or not with ``--tune-map identity``."""
        if by_identity:
            raise RecipeError(
                "Expected --tune-map none, because the optimizer of your own program is unknown, "
                "but got identity."
            )

    def at_point(self, changes: Changes, point: Changes, shared: Collection[str]) -> Metrics:
        """The changes of an arm at a point of a tuning, in addition to its own `changes`."""
        return dict(point)

    def in_trial(self, changes: Changes) -> Changes:
        """The changes for a trial, which must not use the test data."""
        return changes

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The description of the program in ``study.yaml``."""

    @classmethod
    @abstractmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_dict`."""
