"""What is studied: a program, arms, seeds and a metric."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from powergrad.lab.config import Recipe, RecipeError
from powergrad.lab.files import write_text
from powergrad.lab.jobs import Changes, Job, Program, RecipeProgram, program_from_dict
from powergrad.lab.plan import check_positive
from powergrad.lab.run import Run, RunError
from powergrad.lab.study.metrics import METRICS, Metric

__all__ = ["Study", "StudyKind", "read_kind"]

FORMAT = 2
FILE = "study.yaml"


class StudyKind(str, enum.Enum):
    """What a study is for."""

    COMPARE = "compare"
    SWEEP = "sweep"
    DECOMPOSE = "decompose"
    TUNE = "tune"
    PAPER = "paper"


def read_kind(values: Mapping[str, Any]) -> tuple[StudyKind, tuple[str, ...]]:
    """Kind and tuned keys of a study's file; format 1 had both in one string."""
    kind, _, tuned = str(values["kind"]).partition("-tuned-")
    return StudyKind(kind), (tuned,) if tuned else tuple(values.get("tuned", ()))


@dataclass(frozen=True)
class Study:
    """What is studied.

    Attributes:
        kind: What it is for.
        program: What every run does.
        arms: What each arm changes; the first is the baseline that the others are compared with.
        seeds: The seeds of every arm.
        metric: What is compared at the end of each run.
        margin: The largest difference that does not matter.
        tuned: The keys that were tuned for every arm.
    """

    kind: StudyKind
    program: Program
    arms: Mapping[str, Changes]
    seeds: Sequence[int]
    metric: Metric = METRICS["test_accuracy"]
    margin: float = 0.5
    tuned: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_positive(self.margin, "margin")
        if len(set(self.seeds)) < len(self.seeds):
            raise RecipeError(f"Expected different seeds, but got {list(self.seeds)}.")
        self.program.check_arms(self.arms)

    @property
    def baseline(self) -> str:
        """The arm that the others are compared with."""
        return next(iter(self.arms))

    @property
    def base(self) -> Recipe:
        """The recipe that every arm changes.

        Raises:
            TypeError: If the runs are of another kind.
        """
        if not isinstance(self.program, RecipeProgram):
            raise TypeError(f"Expected a study of a recipe, but got {self.program.title}.")
        return self.program.base

    @property
    def name(self) -> str:
        """A folder name that differs for other kinds and programs."""
        kind = "-tuned-".join([self.kind.value, *self.tuned])
        digest = hashlib.sha256(f"{kind}:{self.program.key}".encode()).hexdigest()[:8]
        data = "".join(c if c.isalnum() else "-" for c in self.program.data_name)
        return f"{kind}-{data}-{digest}"

    def jobs(self) -> dict[tuple[str, int], Job]:
        """The run of every arm and seed; seeds in the outer loop, so that arms fill evenly."""
        return {
            (arm, seed): self.program.job(arm, changes, seed)
            for seed in self.seeds
            for arm, changes in self.arms.items()
        }

    def claim(self, folder: Path) -> None:
        """Write the definition into `folder`, or check that it holds the same study.

        Arms and seeds may be added to a study; what is there already must agree.

        Raises:
            RecipeError: If the folder holds another study.
        """
        path = folder / FILE
        arms = {arm: dict(changes) for arm, changes in self.arms.items()}
        seeds = set(self.seeds)
        if path.exists():
            try:
                earlier = Study.load(folder)
            except RunError:
                raise RecipeError(
                    f"Expected {str(path)!r} to be a study, but got another file."
                ) from None
            is_same = (earlier.kind, earlier.tuned) == (self.kind, self.tuned)
            if not is_same or earlier.program.to_dict() != self.program.to_dict():
                raise RecipeError(
                    f"Expected {str(folder)!r} to hold this study, but got one of another recipe; "
                    "give another --name."
                )
            for arm in arms:
                if arm in earlier.arms and earlier.arms[arm] != arms[arm]:
                    raise RecipeError(
                        f"Expected the arm {arm!r} of {str(folder)!r} to change {arms[arm]}, but "
                        f"got {earlier.arms[arm]}; give another --name."
                    )
            arms = {**earlier.arms, **arms}
            seeds |= set(earlier.seeds)
        folder.mkdir(parents=True, exist_ok=True)
        values = {
            "format": FORMAT,
            "kind": self.kind.value,
            "tuned": list(self.tuned),
            **self.program.to_dict(),
            "arms": arms,
            "seeds": sorted(seeds),
            "metric": self.metric.name,
            "margin": self.margin,
        }
        write_text(path, yaml.safe_dump(values, sort_keys=False))

    @classmethod
    def load(cls, folder: Path) -> Study:
        """The study that `folder` holds, as far as it was started.

        Raises:
            RunError: If it holds none, or one that only a newer powergrad reads.
        """
        try:
            values = yaml.safe_load((folder / FILE).read_text(encoding="utf-8"))
            if values.get("format", 1) > FORMAT:
                raise ValueError(f"format {values['format']}, which a newer powergrad reads")
            kind, tuned = read_kind(values)
            study = cls(kind, program_from_dict(values), values["arms"], (), tuned=tuned)
            if "seeds" not in values:  # format 1: the seeds are those of the runs
                return replace(study, seeds=_seeds_of_runs(folder))
            metric = METRICS[values["metric"]]
            return replace(study, seeds=values["seeds"], metric=metric, margin=values["margin"])
        except (OSError, yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise RunError(f"Expected {str(folder)!r} to hold a study, but got: {error}") from None


def _seeds_of_runs(folder: Path) -> list[int]:
    seeds = set()
    for config in folder.glob("*/config.yaml"):
        try:
            seeds.add(Run(config.parent).recipe().seed)
        except (RunError, RecipeError):
            continue  # the page says what cannot be read
    return sorted(seeds)
