"""The definition of a study: a program, arms, seeds and a metric."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from powergrad.lab.runs import AnyProgram, Job, RecipeProgram
from powergrad.lab.stats import Design, check_positive
from powergrad.lab.study.metrics import METRICS, Metric
from powergrad.lab.study.records import Question, RunRow
from powergrad.lab.trainer.recipe import Recipe
from powergrad.lab.trainer.run_folder import Result, Run
from powergrad.lab.words import short_key

StudyKind = Literal["compare", "sweep", "decompose", "tune", "paper"]


@dataclass(frozen=True)
class Study:
    """The definition of a study.

    A unit of the comparison is a run with one seed. With `finals`, it is a repeat: one independent
    tuning, whose best settings are then run with `finals` new seeds.
    """

    kind: StudyKind
    program: AnyProgram
    arms: dict[str, dict[str, Any]]  # the changes of each arm; the first is the baseline
    design: Design  # the numbers of units per arm at which the results are tested
    metric: Metric = METRICS["test_accuracy"]
    margin: float = 0.5
    first_seed: int = 0
    finals: int = 0
    tuned: tuple[str, ...] = ()  # the keys that are tuned for every arm
    tuning: dict[str, Any] = field(default_factory=dict)  # its settings, which must stay the same
    chosen: dict[str, dict[str, Any]] = field(default_factory=dict)  # by a single tuning
    earlier: tuple[int, ...] = ()  # sizes at which results were looked at without planning it
    question: Question = field(default_factory=Question)

    def __post_init__(self) -> None:
        check_positive(self.margin, "margin")
        # Arms with their own tuned keys may have equal changes.
        own = self.tuning.get("own", {})
        self.program.check_arms({arm: c for arm, c in self.arms.items() if arm not in own})

    @property
    def baseline(self) -> str:
        return next(iter(self.arms))

    @property
    def base(self) -> Recipe:
        if not isinstance(self.program, RecipeProgram):
            raise TypeError(f"Expected a study of a recipe, but got {self.program.title}.")
        return self.program.base

    @property
    def name(self) -> str:
        """A folder name that depends on the kind and the program."""
        parts = [self.kind, *(["tuned", *map(short_key, self.tuned)] if self.tuned else [])]
        kind = "-".join([*parts, *(["repeats"] if self.finals else [])])
        digest = hashlib.sha256(f"{kind}:{self.program.key}".encode()).hexdigest()[:8]
        data = "".join(c if c.isalnum() else "-" for c in self.program.data_name)
        return f"{kind}-{data}-{digest}"

    @property
    def seeds(self) -> range:
        """Every seed that the study may need."""
        return self.seeds_of(range(self.design.last))

    def seeds_of(self, units: range) -> range:
        size = self.finals or 1
        return range(self.first_seed + size * units.start, self.first_seed + size * units.stop)

    def unit_of(self, seed: int) -> int:
        """The unit that a seed belongs to: the seed itself, or the number of its repeat."""
        return (seed - self.first_seed) // self.finals if self.finals else seed

    def settings(self, arm: str) -> dict[str, Any]:
        """The changes of an arm, with the values that were chosen for it."""
        return {**self.arms[arm], **self.chosen.get(arm, {})}

    def job(self, arm: str, seed: int, changes: Mapping[str, Any] = {}) -> Job:
        """The run of an arm and a seed, perhaps with further changes."""
        return self.program.job(arm, {**self.settings(arm), **changes}, seed)

    def jobs(self, units: range | None = None) -> dict[tuple[str, int], Job]:
        """The runs of every arm; seeds are the outer loop, so that all arms advance together."""
        seeds = self.seeds if units is None else self.seeds_of(units)
        return {(arm, seed): self.job(arm, seed) for seed in seeds for arm in self.arms}

    def row(self, job: Job, result: Result, folder: Path) -> RunRow:
        """The row of a run that has ended; its files are in `folder`, or on another machine."""
        run, about = Run(folder / job.name), dict(result.about)
        is_here, commit = run.folder.is_dir(), about.pop("commit", "")
        value = result.metrics.get(self.metric.name)
        if self.program.is_foreign and value is not None:
            about["diverged"] = not math.isfinite(value)
        return RunRow(
            arm=job.arm,
            seed=job.seed,
            metrics=dict(result.metrics),
            about=about,
            run=job.name,
            commit=(run.environment().get("commit") or "") if is_here else commit,
            unit=self.unit_of(job.seed) if self.finals else None,
            is_elsewhere=not is_here,
        )
