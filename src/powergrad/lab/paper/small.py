"""Scaled-down replicas: what a small machine can do of a row, and what is lost on the way.

A filter whose gradient has stopped shrinks by weight decay alone, as ``exp(-x)`` with
``x = sum(lr * wd) / (1 - momentum)``. The paper's recipe takes ``x`` to about 125. A replica is
planned so that ``x`` passes 7 in every arm: below that, neither zeroing out nor the equilibrium of
weight norms can be seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from powergrad.lab.config import Recipe
from powergrad.lab.data import load_data
from powergrad.lab.paper.cost import IMAGENET
from powergrad.lab.paper.rows import Experiment, Row, changes_of
from powergrad.lab.schedules import learning_rate_at

__all__ = ["Replica", "decay_exponent", "plan_replica"]

LEAST = 7.0  # the decay exponent that a replica must pass
GOAL = 7.5  # what it is planned for
RECORDS = 400  # of filter norms over a run
# The peak rate at batch 128, other batches in proportion, and the decay. Without normalisation a
# ResNet-18 of width 8 diverges on digits with PGT at alpha 0.25 and twice this rate.
RATES = {"batch": (0.1, 0.005), "group": (0.1, 0.005), "none": (0.08, 0.01)}
SETS: dict[str, dict[str, Any]] = {
    "digits": {"data.flip": False, "model.stem": "small"},
    "fashion-mnist": {"data.flip": True, "data.crop_padding": 2, "model.stem": "small"},
    "cifar10": {"data.flip": True, "data.crop_padding": 4, "model.stem": "small"},
    "folder": {"data.flip": True, "data.size": 64},
}


@dataclass(frozen=True)
class Replica:
    """A plan.

    Attributes:
        base: The recipe of the first arm.
        arms: What every arm changes in it.
        examples: How many training examples there are.
        exponents: The decay exponent of every arm.
        kept: What is as in the paper.
        lost: What is not.
    """

    base: Recipe
    arms: Mapping[str, Mapping[str, Any]]
    examples: int
    exponents: Mapping[str, float]
    kept: tuple[str, ...]
    lost: tuple[str, ...]

    def describe(self) -> str:
        """The plan, in words."""
        lines = [f"  kept: {each}" for each in self.kept]
        lines += [f"  lost: {each}" for each in self.lost]
        lines.append("Decay exponent sum(lr * wd) / (1 - momentum), at least 7 wanted:")
        lines += [f"  {arm}: {value:.2f}" for arm, value in self.exponents.items()]
        under = [arm for arm, value in self.exponents.items() if value < LEAST]
        if under:
            lines.append(
                f"WARNING: {', '.join(under)} stays under {LEAST:g}: dead filters will not reach "
                "zero, and the run says nothing of the paper's equilibrium."
            )
        return "\n".join(lines)


def decay_exponent(recipe: Recipe, examples: int) -> float:
    """How far decay alone shrinks a weight over a run, as ``-log``.

    Args:
        recipe: The run.
        examples: The training examples of an epoch.

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
    return math.fsum(rates) * options.weight_decay / (1 - momentum)


def plan_replica(
    experiment: Experiment,
    rows: Sequence[Row],
    data: str,
    changes: Mapping[str, Any] | None = None,
) -> Replica:
    """Plan the replica of some rows of an experiment.

    Epochs, warm-up and milestones shrink or grow by one factor, the least that takes the decay
    exponent of every arm past 7.

    Args:
        experiment: The experiment.
        rows: Its rows, the first one to compare with.
        data: ``digits``, ``fashion-mnist``, ``cifar10`` or ``folder:PATH``.
        changes: Dotted keys that are changed in every arm; with ``train.epochs``, those of the
            longest arm.

    Raises:
        ValueError: If there is no such data set.
    """
    given = dict(changes or {})
    epochs = given.pop("train.epochs", None)
    longest = max(row.recipe.train.epochs for row in rows)
    probe = _scaled(rows[0], data, given, 1.0)
    loaded = load_data(probe.data, data_dir=probe.machine.data_dir)
    examples = len(loaded.train)

    def arms_at(factor: float) -> list[Recipe]:
        return [_scaled(row, data, given, factor) for row in rows]

    def least(factor: float) -> float:
        return min(decay_exponent(recipe, examples) for recipe in arms_at(factor))

    if epochs is not None:
        factor = epochs / longest
    else:
        factor = max(GOAL / least(1.0), 10 / longest)
        while least(factor) < LEAST:  # rounding to whole epochs may cost a little
            factor *= 1.05
    recipes = arms_at(factor)
    # A record of the norms every so many steps, and a test every so many epochs, suffice.
    steps = max(r.train.epochs for r in recipes) * (examples // recipes[0].train.batch_size)
    watch = {
        "train.test_every": max(1, max(r.train.epochs for r in recipes) // 100),
        "monitor.every": max(1, steps // RECORDS) if probe.model.norm == "none" else 0,
        "monitor.features": probe.model.norm == "none",
    }
    recipes = [recipe.override({**watch, **given}) for recipe in recipes]
    base = recipes[0]
    pairs = list(zip(rows, recipes, strict=True))
    full = rows[0].recipe
    before = decay_exponent(full, 50_000 if full.data.name == "cifar10" else IMAGENET)
    return Replica(
        base,
        {row.arm: changes_of(recipe, base) for row, recipe in pairs},
        examples,
        {row.arm: decay_exponent(recipe, examples) for row, recipe in pairs},
        _kept(base, full, experiment),
        _lost(pairs, examples, len(loaded.classes), (decay_exponent(base, examples), before)),
    )


def _scaled(row: Row, data: str, given: Mapping[str, Any], factor: float) -> Recipe:
    """The recipe of a row at small scale, its epochs times `factor`."""
    full = row.recipe
    batch = _small_batch(full)
    peak, decay = RATES[full.model.norm]
    rate = peak * batch / 128
    kind = "folder" if data.startswith("folder:") else data
    small: dict[str, Any] = {
        "data.name": data,
        "data.crop_padding": 0,
        **SETS.get(kind, {}),
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
        "schedule.milestones": [each * factor for each in full.schedule.milestones],
    }
    if full.model.name == "resnet20":
        small.pop("model.stem", None)
    if full.clip.agc is not None:
        # AGC lets a gradient through up to its threshold times the weight; decay takes away the
        # decay times the weight. What can be held against decay is the ratio of the two.
        ratio = full.clip.agc / full.optimizer.weight_decay
        small.setdefault("clip.agc", ratio * small["optimizer.weight_decay"])
    return full.override(small)


def _small_batch(full: Recipe) -> int:
    """An eighth, but for the one on CIFAR-10, which is small already."""
    return full.train.batch_size // (8 if full.train.batch_size > 128 else 1)


def _kept(base: Recipe, full: Recipe, experiment: Experiment) -> tuple[str, ...]:
    kept = [
        f"the network's depth and blocks ({base.model.name}, normalisation: {base.model.norm})"
        if base.model.name == full.model.name
        else f"the kind of network (normalisation: {base.model.norm})",
        "SGD with Nesterov's momentum 0.9, the schedule's shape, 5 parts in 100 of warm-up",
        "what the arms differ in: alpha, clipping, label smoothing, length",
    ]
    if experiment.id.startswith("T2") and base.train.batch_size == _small_batch(full):
        kept.append("the ratios between the three batch sizes (1024, 512, 256)")
    return tuple(kept)


def _lost(
    pairs: Sequence[tuple[Row, Recipe]],
    examples: int,
    classes: int,
    exponents: tuple[float, float],
) -> tuple[str, ...]:
    base, full = pairs[0][1], pairs[0][0].recipe
    before_steps = (50_000 if full.data.name == "cifar10" else IMAGENET) // full.train.batch_size
    steps = examples // base.train.batch_size * base.train.epochs
    lost = [f"the data: {examples:,} examples of {classes} classes ({base.data.name})"]
    for what, ours, theirs in (
        ("the network", base.model.name, full.model.name),
        (
            "channels of the first stage",
            base.model.width,
            16 if full.model.name == "resnet20" else 64,
        ),
        ("the batch", base.train.batch_size, full.train.batch_size),
        ("the rate", f"{base.optimizer.lr:g}", f"{full.optimizer.lr:g}"),
        ("the decay", f"{base.optimizer.weight_decay:g}", f"{full.optimizer.weight_decay:g}"),
    ):
        if ours != theirs:
            lost.append(f"{what}: {ours}, not {theirs}")
    if base.model.stem == "small" and base.model.name == full.model.name:
        lost.append("the stem: 3x3 of stride 1, not 7x7 of stride 2 with a max-pooling")
    lost.append(
        f"the length: {steps:,} steps and a decay exponent of {exponents[0]:.1f}, not "
        f"{before_steps * full.train.epochs:,} and {exponents[1]:.0f}"
    )
    for row, recipe in pairs:
        if recipe.clip.agc != row.recipe.clip.agc:
            lost.append(
                f"AGC's threshold: {recipe.clip.agc:g}, not {row.recipe.clip.agc:g}, so that its "
                "ratio to the decay is kept"
            )
            break
    if base.train.precision != full.train.precision:
        lost.append("mixed precision, and with it the float16 of the authors' hook")
    if base.data.name == "digits":
        lost.append(
            "under-fitting: training accuracy comes near 100%, where the paper finds no effect"
        )
    return tuple(lost)
