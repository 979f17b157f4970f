"""Tuning: values of some keys for every arm, chosen on held-out training data.

Every arm tries the same points, with the same budget. A *repeat* is one independent tuning, with
points and seeds of its own. The trials of all repeats are in the folder ``tuning`` of the study.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from powergrad.lab.config import RecipeError
from powergrad.lab.jobs import Changes, Job
from powergrad.lab.study.definition import Study
from powergrad.lab.study.records import Choice, Trial, Tuning, describe_point
from powergrad.lab.study.space import Point, Space

__all__ = ["HOLD_OUT", "Tuner"]

HOLD_OUT = 0.2  # of the training data, on which arms are tuned
FOLDER = "tuning"  # of the trials, in the study's folder
FIRST_SEED = 1000  # of the trials, or later, so that the study's own seeds are fresh

Map = Literal["none", "identity"]


@dataclass(frozen=True)
class Tuner:
    """How every arm of a study is tuned.

    Attributes:
        study: What is studied.
        space: What is tried.
        seeds: Seeds per point.
        map: ``identity`` moves the points of arms with PGT by the identity, so that each point has
            the backbone that it has without PGT; ``none`` leaves them.
    """

    study: Study
    space: Space
    seeds: int
    map: Map = "none"

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise RecipeError(f"Expected --tune-seeds to be at least 1, but got {self.seeds}.")
        clip = self.study.base.clip
        if self.map == "identity" and (clip.norm is not None or clip.value is not None):
            raise RecipeError(
                "Expected no clipping by norm or value with --tune-map identity, which cannot keep "
                "the backbone then, but got some."
            )
        if self.study.base.data.hold_out:
            raise RecipeError(
                "Expected data.hold_out to be 0 where arms are tuned, which holds out data of its "
                f"own, but got {self.study.base.data.hold_out:g}."
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for study.yaml."""
        return {**self.space.to_dict(), "seeds": self.seeds, "map": self.map}

    def seeds_of(self, repeat: int) -> range:
        """The seeds of a repeat's trials."""
        own = self.study.seeds
        first = max(FIRST_SEED + own.start, own.stop) + repeat * self.seeds
        return range(first, first + self.seeds)

    def changes(self, arm: str, point: Point) -> dict[str, Any]:
        """What an arm changes at a point.

        A key of every arm that this arm sets itself, such as the decay of less-decay, is scaled as
        the recipe's.
        """
        base, changes = self.study.base, self.study.arms[arm]
        chosen: dict[str, Any] = {}
        shared = {axis.key for axis in self.space.shared}
        for key, value in point.items():
            own = base.value(key)
            is_scaled = key in shared & changes.keys() and isinstance(own, (int, float)) and own
            chosen[key] = changes[key] * value / own if is_scaled else value
        alpha = self.study.program.alpha({**changes, **chosen})
        if self.map == "identity" and alpha < 1:
            chosen |= _by_identity({**changes, **chosen}, alpha, self.study)
        return chosen

    def jobs(self, repeat: int) -> dict[tuple[str, int, int], Job]:
        """The trials of a repeat: the run of every arm, point and seed that the recipe allows."""
        jobs = {}
        for arm in self.study.arms:
            for place, point in enumerate(self.space.points(arm, repeat)):
                changes = {**self.study.arms[arm], **self.changes(arm, point)}
                for seed in self.seeds_of(repeat):
                    try:
                        job = self.study.program.job(
                            arm, {**changes, "data.hold_out": HOLD_OUT}, seed
                        )
                    except RecipeError:
                        continue  # `choose` says so
                    jobs[arm, place, seed] = replace(job, name=f"{FOLDER}/{job.name}")
        return jobs

    def choose(
        self, repeat: int, results: Mapping[tuple[str, int, int], Mapping[str, Any]]
    ) -> dict[str, Choice]:
        """The best point of every arm.

        Args:
            repeat: Which tuning.
            results: The final metrics of its jobs.

        Raises:
            RecipeError: If an arm trains at no point.
        """
        metric = self.study.metric
        choices = {}
        for arm in self.study.arms:
            trials = []
            for place, point in enumerate(self.space.points(arm, repeat)):
                runs = [results.get((arm, place, seed)) for seed in self.seeds_of(repeat)]
                changes = self.changes(arm, point)
                trials.append(_trial(point, changes, runs, metric.name))
            usable = [place for place, trial in enumerate(trials) if trial.mean == trial.mean]
            if not usable:
                tried = "; ".join(f"{describe_point(t.point)}: {t.note}" for t in trials)
                raise RecipeError(
                    f"Expected a point of --tune at which {arm!r} trains, but got none: {tried}."
                )
            best = (max if metric.higher_is_better else min)(usable, key=lambda p: trials[p].mean)
            edges = self.space.edges(arm, trials[best].point)
            choices[arm] = Choice(tuple(trials), best, edges)
        return choices

    def record(self, repeats: Sequence[Mapping[str, Choice]]) -> Tuning:
        """What a study keeps of its tuning."""
        is_unit = bool(self.study.finals)
        return Tuning(self.space.keys, self.seeds, HOLD_OUT, tuple(repeats), is_unit)


def _trial(
    point: Point, changes: Changes, runs: list[Mapping[str, Any] | None], metric: str
) -> Trial:
    """A point, and the mean over its seeds. A run that diverged counts as it is recorded."""
    if any(run is None for run in runs):
        return Trial(point, changes, math.nan, "refused by the recipe")
    values = [run.get(metric) for run in runs if run is not None]
    numbers = [float(value) for value in values if isinstance(value, (int, float))]
    if len(numbers) < len(runs) or any(value != value for value in numbers):
        return Trial(point, changes, math.nan, "diverged")
    lost = sum(bool(run["diverged"]) for run in runs if run is not None and "diverged" in run)
    note = f"{lost} of {len(runs)} diverged" if lost else ""
    return Trial(point, changes, sum(numbers) / len(numbers), note)


def _by_identity(changes: Changes, alpha: float, study: Study) -> dict[str, Any]:
    """The settings with PGT whose backbone is that of `changes` without it.

    By the identity, SGD with PGT at (lr, wd) moves the backbone as plain cross-entropy at
    (lr / alpha, wd * alpha). Adam: (lr, wd * alpha); AdamW: (lr, wd).
    """

    def value(key: str) -> Any:  # the recipe may refuse them all together
        return changes[key] if key in changes else study.base.value(key)

    name = value("optimizer.name")
    if alpha == 0:
        raise RecipeError("Expected alpha above 0 with --tune-map identity, but got 0.")
    mapped = {}
    if name == "sgd":
        for key in ("optimizer.lr", "schedule.warmup_start", "schedule.floor"):
            mapped[key] = value(key) * alpha
        if value("clip.agc") is not None:  # the backbone's gradients are 1 / alpha times as large
            mapped["clip.agc"] = value("clip.agc") / alpha
    if name in ("sgd", "adam"):
        mapped["optimizer.weight_decay"] = value("optimizer.weight_decay") / alpha
    return mapped
