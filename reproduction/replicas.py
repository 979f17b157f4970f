"""Rows at full scale, scaled-down replicas of rows, and how both depart from the paper.

A filter without gradient shrinks by weight decay alone, as ``exp(-x)`` with
``x = sum(lr * wd) / (1 - momentum)``. In the paper's recipe ``x`` reaches about 125. A replica is
planned so that ``x`` exceeds 7 in every arm: below that, neither zeroing out nor the equilibrium of
weight norms can be observed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from powergrad.lab.data import load_data
from powergrad.lab.trainer.recipe import Recipe
from powergrad.lab.trainer.session import learning_rate_at
from reproduction.published import Row, changes_of, examples_of

LEAST = 7.0  # the decay exponent that a replica must exceed
GOAL = 7.5  # the decay exponent for which it is planned
RECORDS = 400  # records of filter norms per run
# The peak rate at batch 128, other batches in proportion, and the decay. Without normalisation a
# ResNet-18 of width 8 diverges on digits with PGT at alpha 0.25 and twice this rate.
RATES = {"batch": (0.1, 0.005), "group": (0.1, 0.005), "none": (0.08, 0.01)}
DATA: dict[str, dict[str, Any]] = {
    "digits": {"data.flip": False, "model.stem": "small"},
    "fashion-mnist": {"data.flip": True, "data.crop_padding": 2, "model.stem": "small"},
    "cifar10": {"data.flip": True, "data.crop_padding": 4, "model.stem": "small"},
}
FOLDER = {"data.flip": True, "data.size": 64}
# Keys that may differ from the paper without being a departure from it; milestones go with epochs.
FREE = ("data.name", "seed", "machine.", "monitor.", "train.accumulate", "schedule.milestones")


def decay_exponent(recipe: Recipe, examples: int) -> float:
    """The negative logarithm of the factor by which decay alone shrinks a filter in a run.

    Example:
        >>> round(decay_exponent(Recipe(), 1_281_167))
        125
    """
    options = recipe.optimizer
    per_epoch = examples // recipe.train.batch_size
    rates = (
        learning_rate_at(step / per_epoch, recipe.schedule, options.lr, recipe.train.epochs)
        for step in range(per_epoch * recipe.train.epochs)
    )
    momentum = options.momentum if options.name == "sgd" else 0.0
    return math.fsum(rates) * options.backbone.lr * options.backbone_decay / (1 - momentum)


@dataclass(frozen=True)
class Replica:
    """A replica of some rows of an experiment, the baseline first."""

    rows: Sequence[Row]
    base: Recipe  # the recipe of the first arm
    arms: Mapping[str, Mapping[str, Any]]  # the changes of every arm
    examples: int

    @functools.cached_property
    def recipes(self) -> dict[str, Recipe]:
        """The recipe of every arm."""
        return {arm: self.base.override(changes) for arm, changes in self.arms.items()}

    @functools.cached_property
    def exponents(self) -> dict[str, float]:
        """The decay exponent of every arm."""
        return {arm: decay_exponent(recipe, self.examples) for arm, recipe in self.recipes.items()}

    def describe(self) -> str:
        """The plan as text."""
        lost = departures(self.rows[0], self.base, self.examples)
        lines = [f"  differs from the paper in {words}" for words in lost]
        lines.append(f"Decay exponent sum(lr * wd) / (1 - momentum), at least {LEAST:g} wanted:")
        lines += [f"  {arm}: {exponent:.2f}" for arm, exponent in self.exponents.items()]
        if under := [arm for arm, exponent in self.exponents.items() if exponent < LEAST]:
            lines.append(
                f"WARNING: {', '.join(under)} stays below {LEAST:g}: dead filters will not reach "
                "zero, and the run cannot show the equilibrium of the paper."
            )
        return "\n".join(lines)


def plan_replica(rows: Sequence[Row], data: str, changes: Mapping[str, Any]) -> Replica:
    """Plan the replica of some rows of an experiment.

    Epochs, warm-up and milestones are multiplied by the smallest factor with which the decay
    exponent of every arm exceeds 7, unless `changes` has the number of epochs.
    """
    given = dict(changes)
    epochs = given.pop("train.epochs", None)
    longest = max(row.recipe.train.epochs for row in rows)
    probe = _scaled(rows[0], data, given, 1.0)
    examples = len(load_data(probe.data, data_dir=probe.machine.data_dir).train)

    def recipes_at(factor: float) -> list[Recipe]:
        return [_scaled(row, data, given, factor) for row in rows]

    def least_exponent(factor: float) -> float:
        return min(decay_exponent(recipe, examples) for recipe in recipes_at(factor))

    if epochs is not None:
        factor = epochs / longest
    else:
        factor = max(GOAL / least_exponent(1.0), 10 / longest)
        while least_exponent(factor) < LEAST:  # rounding to whole epochs may reduce it a little
            factor *= 1.05
    recipes = recipes_at(factor)
    most_epochs = max(recipe.train.epochs for recipe in recipes)
    steps = most_epochs * (examples // recipes[0].train.batch_size)
    is_watched = probe.model.norm == "none"
    watch = {
        "train.test_every": max(1, most_epochs // 100),
        "monitor.every": max(1, steps // RECORDS) if is_watched else 0,
        "monitor.features": is_watched,
    }
    recipes = [recipe.override({**watch, **given}) for recipe in recipes]
    arms = {
        row.arm: changes_of(recipe, recipes[0]) for row, recipe in zip(rows, recipes, strict=True)
    }
    return Replica(rows, recipes[0], arms, examples)


def _scaled(row: Row, data: str, given: Mapping[str, Any], factor: float) -> Recipe:
    """The recipe of a row at small scale, its epochs times `factor`."""
    full = row.recipe
    # An eighth of the batch, except on CIFAR-10, where it is already small.
    batch = full.train.batch_size // (8 if full.train.batch_size > 128 else 1)
    peak, decay = RATES[full.model.norm]
    rate = peak * batch / 128
    small: dict[str, Any] = {
        "data.name": data,
        "data.crop_padding": 0,
        **DATA.get(data, FOLDER),
        "model.width": 8,
        "optimizer.lr": rate,
        "optimizer.weight_decay": decay,
        "schedule.warmup_start": rate / 1000,
        "train.batch_size": batch,
        "train.precision": "float32",
        "machine.keep_best": False,
        **given,
        "train.epochs": max(2, round(full.train.epochs * factor)),
        "schedule.warmup_epochs": full.schedule.warmup_epochs * factor,
        "schedule.milestones": [epoch * factor for epoch in full.schedule.milestones],
    }
    if full.model.name == "resnet20":
        small.pop("model.stem", None)
    if full.clip.agc is not None:
        # AGC limits a gradient to its threshold times the weight; decay subtracts the decay times
        # the weight. So the ratio of threshold to decay is preserved.
        ratio = full.clip.agc / full.optimizer.weight_decay
        small.setdefault("clip.agc", ratio * small["optimizer.weight_decay"])
    return full.override(small)


def full_recipe(row: Row, data: str | None, changes: Mapping[str, Any]) -> Recipe:
    """The recipe of a row at full scale."""
    given: dict[str, Any] = {} if data is None else {"data.name": data}
    if row.recipe.model.norm == "none":  # for the figures of zeroing out
        given |= {"monitor.every": 1000, "monitor.features": True}
    return row.recipe.override({**given, **changes})


def departures(row: Row, recipe: Recipe, examples: int) -> Iterator[str]:
    """How a run differs from its row: in its data and its recipe."""
    if examples != examples_of(row.recipe):
        yield f"the data: {examples:,} examples ({recipe.data.name})"
    for key, value in changes_of(recipe, row.recipe).items():
        if not key.startswith(FREE):
            printed = row.recipe.value(key)
            yield f"{key}: {value}" + ("" if printed is None else f", not {printed}")
