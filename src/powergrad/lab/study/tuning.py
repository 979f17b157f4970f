"""Tuning: chooses the values of some keys for every arm, on data that the verdict does not use.

Every arm tries the same points in the keys that all arms tune, with the same budget. A *repeat* is
one independent tuning, with its own points and seeds. The trials of all repeats are in the folder
``tuning`` of the study.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from powergrad.lab.runs import Job
from powergrad.lab.study.arms import identity_image
from powergrad.lab.study.definition import Study
from powergrad.lab.study.metrics import Metric
from powergrad.lab.study.records import Choice, Trial, Tuning, describe_point
from powergrad.lab.study.space import Point, Space
from powergrad.lab.trainer.recipe import RecipeError, flatten
from powergrad.lab.trainer.run_folder import Result

FOLDER = "tuning"  # the folder of the trials, in the folder of the study
FIRST_SEED = 1000  # the smallest seed of trials, so that the study has other seeds

Map = Literal["none", "identity"]


@dataclass(frozen=True)
class Tuner:
    """Tunes every arm of a study; the map ``identity`` converts the points of arms with PGT."""

    study: Study
    space: Space
    seeds: int  # per point
    map: Map = "none"
    metric: Metric | None = None  # of the choice, if it is not the compared metric

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise RecipeError(f"Expected --tune-seeds to be at least 1, but got {self.seeds}.")
        self.study.program.check_tuning(by_identity=self.map == "identity")

    @property
    def judging(self) -> Metric:
        return self.metric or self.study.metric

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for study.yaml."""
        chosen_by = {"metric": self.metric.name} if self.metric else {}
        return {**self.space.to_dict(), "seeds": self.seeds, "map": self.map, **chosen_by}

    def seeds_of(self, repeat: int) -> range:
        """The seeds of the trials of a repeat."""
        own = self.study.seeds
        first = max(FIRST_SEED + own.start, own.stop) + repeat * self.seeds
        return range(first, first + self.seeds)

    def changes(self, arm: str, point: Point) -> dict[str, Any]:
        """The changes of an arm at a point."""
        changes, program = self.study.arms[arm], self.study.program
        chosen = program.at_point(changes, point, {axis.key for axis in self.space.shared})
        both = {**changes, **chosen}
        if self.map == "identity" and (alpha := program.alpha(both)) < 1:
            # The changes as a whole may not be a valid recipe.
            own = dict(flatten(self.study.base.model_dump()))
            chosen |= identity_image({**own, **both}, alpha)
        return chosen

    def jobs(self, repeat: int) -> dict[tuple[str, int, int], Job]:
        """The trials of a repeat: one run per arm, point and seed, if the recipe is valid."""
        jobs, program = {}, self.study.program
        for arm in self.study.arms:
            for place, point in enumerate(self.space.points(arm, repeat)):
                changes = {**self.study.arms[arm], **self.changes(arm, point)}
                for seed in self.seeds_of(repeat):
                    with contextlib.suppress(RecipeError):  # `choose` reports it
                        job = program.job(arm, program.in_trial(changes), seed)
                        jobs[arm, place, seed] = job.within(FOLDER)
        return jobs

    def choose(
        self, repeat: int, results: Mapping[tuple[str, int, int], Result]
    ) -> dict[str, Choice]:
        """The best point of every arm."""
        metric = self.judging
        refusal = "failed" if self.study.program.is_foreign else "not a valid recipe"
        choices = {}
        for arm in self.study.arms:
            trials = []
            for place, point in enumerate(self.space.points(arm, repeat)):
                runs = [results.get((arm, place, seed)) for seed in self.seeds_of(repeat)]
                changes = self.changes(arm, point)
                trials.append(_trial(point, changes, runs, metric.name, refusal))
            usable = [place for place, trial in enumerate(trials) if trial.mean == trial.mean]
            if not usable:
                tried = "; ".join(f"{describe_point(t.point)}: {t.note}" for t in trials)
                raise RecipeError(
                    f"Expected a point of --tune at which {arm!r} can be trained, but got none: "
                    f"{tried}."
                )
            best = (max if metric.higher_is_better else min)(usable, key=lambda p: trials[p].mean)
            edges = self.space.edges(arm, trials[best].point)
            choices[arm] = Choice(trials=tuple(trials), chosen=best, edges=edges)
        return choices

    def record(self, repeats: Sequence[dict[str, Choice]]) -> Tuning:
        """The record of the tuning for the results of the study."""
        return Tuning(
            keys=self.space.keys,
            seeds=self.seeds,
            hold_out=self.study.program.hold_out,
            repeats=tuple(repeats),
            is_unit=bool(self.study.finals),
            metric=self.metric.name if self.metric else "",
        )


def _trial(
    point: Point, changes: dict[str, Any], runs: list[Result | None], metric: str, refusal: str
) -> Trial:
    """A point and the mean over its seeds. A run that diverged counts with its recorded value."""
    usable = [run for run in runs if run is not None]
    values = [run.metrics.get(metric) for run in usable]
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    lost = sum(bool(run.about.get("diverged")) for run in usable)
    mean, note = math.nan, f"{lost} of {len(runs)} diverged" if lost else ""
    if len(usable) < len(runs):
        note = refusal
    elif len(numbers) < len(runs):
        note = "diverged"
    else:
        mean = sum(numbers) / len(numbers)
    return Trial(point=point, changes=changes, mean=mean, note=note)
