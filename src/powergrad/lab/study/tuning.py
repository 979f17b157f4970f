"""Tuning: a value of a key for every arm, chosen on held-out training data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from powergrad.lab.config import Recipe, RecipeError
from powergrad.lab.jobs import Changes, Job
from powergrad.lab.jobs.queue import Snapshot
from powergrad.lab.study.arms import expand_key, parse_grid
from powergrad.lab.study.definition import Study, StudyKind
from powergrad.lab.study.records import TriedValue, TunedArm, Tuning
from powergrad.lab.study.results import run_study
from powergrad.lab.words import number, short_key

__all__ = ["Space", "tune"]

HOLD_OUT = 0.2  # of the training data, on which arms are tuned
FIRST_SEED = 1000  # of the trials, or later, so that the study's own seeds are fresh

Show = Callable[
    [str, Mapping[tuple[str, int], Job], str], AbstractContextManager[Callable[[Snapshot], None]]
]


@dataclass(frozen=True)
class Space:
    """A key to tune, and the values to try."""

    key: str
    values: tuple[Any, ...]

    @classmethod
    def parse(cls, text: str, recipe: Recipe) -> Space:
        """The space of ``lr`` (around the recipe's own value) or ``lr=0.1,0.2``.

        Raises:
            RecipeError: If there is no such key, or no values.

        Example:
            >>> Space.parse("lr=0.1,0.2", Recipe())
            Space(key='optimizer.lr', values=(0.1, 0.2))
        """
        key = expand_key(text.partition("=")[0].strip())
        own = recipe.value(key)
        if "=" in text:
            return cls(key, parse_grid([text]).values[key])
        if not isinstance(own, (int, float)) or isinstance(own, bool) or own == 0:
            raise RecipeError(
                f"Expected the values to try for {key!r}, as {key}=value,value, because the "
                f"recipe's own is {own!r}."
            )
        return cls(key, tuple(own * factor for factor in (0.25, 0.5, 1, 2, 4)))


def tune(
    study: Study,
    space: Space,
    folder: Path,
    *,
    seeds: int,
    workers: int,
    storage: str | None,
    show: Show,
) -> tuple[Study, Tuning]:
    """Choose a value for every arm, from the same space for all, on held-out training data.

    An arm that sets the key itself has its own value multiplied as the recipe's is.

    Args:
        study: What is studied.
        space: The key and the values to try.
        folder: The study's folder; the trials go to ``tuning`` in it.
        seeds: Seeds per value.
        workers: Runs at a time.
        storage: See :func:`powergrad.lab.jobs.queue.run_jobs`.
        show: Makes what shows the progress.

    Returns:
        The study with the arms' choices, and what led to them.
    """
    if seeds < 1:
        raise ValueError(f"Expected --tune-seeds to be at least 1, but got {seeds}.")
    if study.base.data.hold_out:
        raise RecipeError(
            "Expected data.hold_out to be 0 where arms are tuned, which holds out data of its own, "
            f"but got {study.base.data.hold_out:g}."
        )
    first = max(FIRST_SEED, max(study.seeds) + 1)
    points = {arm: _points(space, changes, study.base) for arm, changes in study.arms.items()}
    trials = {
        name: {**study.arms[arm], space.key: value, "data.hold_out": HOLD_OUT}
        for arm, tried in points.items()
        for name, value in ((f"{arm} {label}", value) for label, value in tried.items())
    }
    seed_list = tuple(range(first, first + seeds))
    trial = replace(study, kind=StudyKind.TUNE, arms=trials, seeds=seed_list, tuned=())
    with show(f"tuning {space.key}", trial.jobs(), study.metric.name) as watch:
        results = run_study(trial, folder / "tuning", workers=workers, storage=storage, watch=watch)
    tuned_arms = {}
    for arm, tried in points.items():
        means = tuple(
            TriedValue(value, results.mean(f"{arm} {label}")) for label, value in tried.items()
        )
        tuned_arms[arm] = _choose(arm, space.key, means, study.metric.higher_is_better)
    tuning = Tuning(space.key, seed_list, HOLD_OUT, tuned_arms)
    arms = {
        arm: {**changes, space.key: tuned_arms[arm].chosen} for arm, changes in study.arms.items()
    }
    return replace(study, arms=arms), tuning


def _points(space: Space, changes: Changes, base: Recipe) -> dict[str, Any]:
    """The values to try for an arm, by a label that is the same for all arms."""
    own = base.value(space.key)
    is_scaled = space.key in changes and isinstance(own, (int, float)) and own
    return {
        f"{short_key(space.key)}={number(value)}": (
            changes[space.key] * value / own if is_scaled else value
        )
        for value in space.values
    }


def _choose(arm: str, key: str, means: tuple[TriedValue, ...], higher_is_better: bool) -> TunedArm:
    usable = [tried for tried in means if tried.mean == tried.mean]
    if not usable:
        raise RecipeError(f"Expected a value of {key!r} at which {arm!r} trains, but got none.")
    best = (max if higher_is_better else min)(usable, key=lambda tried: tried.mean)
    numbers = [tried.value for tried in means if isinstance(tried.value, (int, float))]
    at_edge = len(numbers) > 1 and best.value in (min(numbers), max(numbers))
    return TunedArm(best.value, at_edge, means)
