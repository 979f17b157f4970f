"""All studies in one form: replicas of the paper's rows, and those that the paper does not have.

`load_study` is the only function that reads the file of a study, and `Trial` and `Arm` are the only
classes that ask its results: claims, tables and figures use these two.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from powergrad.lab import stats
from powergrad.lab.runs import Changes
from powergrad.lab.study import METRICS, Results, RunRow, Tuning, load
from powergrad.lab.study.tables import read_rows
from powergrad.lab.trainer.recipe import Recipe
from reproduction.published import Experiment, load_paper
from reproduction.replicas import decay_exponent

CLASSES = {"digits": 10, "fashion-mnist": 10, "cifar10": 10}  # for rows without a class count
MARGIN = METRICS["test_accuracy"].margin
PAPER_DECAY = 5e-4
# What an arm does, by the key that it changes, and how its value is written. Where there are two
# names, the first is for less than the study's recipe has, the second for more. A learning rate of
# its own is no method.
METHODS: dict[str, tuple[str | tuple[str, str] | None, str]] = {
    "loss.alpha": ("PGT", "alpha {:g}"),
    "clip.agc": ("AGC", "AGC at {:g}"),
    "clip.norm": ("GC", "norm {:g}"),
    "loss.label_smoothing": ("LS", "smoothing {:g}"),
    "train.epochs": (("fewer epochs", "more epochs"), "{:g} epochs"),
    "train.batch_size": (("smaller batch", "larger batch"), "batch {:g}"),
    "optimizer.weight_decay": (("less decay", "more decay"), "decay {:g}"),
    "optimizer.backbone.weight_decay": (("less decay", "more decay"), ""),
    "model.name": (("shallower network", "deeper network"), "{}"),
    "optimizer.lr": (None, ""),
}
# Studies whose comparisons are listed and not counted; docs/choosing-alpha.md says more of those
# that are withdrawn.
NOT_COUNTED = {
    "compare_digits_tuned_lr": "withdrawn and not counted: the tuning chose a poor learning rate "
    "for the baseline",
    "compare_fashion_mnist": "withdrawn and not counted: the tried learning rates were too high "
    "for PGT",
    "T1.7-tiny-imagenet-100": "not counted: its runs are part of `compare_tiny_imagenet_decay`",
}


def methods_of(changes: Changes, base: Recipe) -> frozenset[str] | None:
    """What the paper calls the changes of an arm; None if one is none of its methods.

    Example:
        >>> changes = {"loss.alpha": 0.25, "clip.agc": 0.2, "optimizer.weight_decay": 1e-4}
        >>> sorted(methods_of(changes, Recipe()))
        ['AGC', 'PGT', 'less decay']
        >>> methods_of({"model.head_scale": 0.25}, Recipe()) is None
        True
    """
    if not set(changes) <= set(METHODS):
        return None
    methods = set()
    for key, value in changes.items():
        name = METHODS[key][0]
        if isinstance(name, tuple):
            before, after = _size(base.value(key)), _size(value)
            name = name[after > before] if after != before else None
        if name is not None:
            methods.add(name)
    return frozenset(methods)


def _size(value: float | str) -> float:
    """A number, or the depth in a network's name."""
    if isinstance(value, str):
        depth = re.search(r"(\d+)$", value)
        return float(depth[1]) if depth else 0.0
    return value


def arm_label(name: str, changes: Changes) -> str:
    """An arm's name, with the values of its methods that it does not say.

    Example:
        >>> arm_label("pgt", {"optimizer.lr": 0.1, "loss.alpha": 0.25, "clip.agc": 0.2})
        'pgt (alpha 0.25, AGC at 0.2)'
        >>> arm_label("batch 64", {"train.batch_size": 64})
        'batch 64'
    """
    words = (METHODS[key][1].format(value) for key, value in changes.items() if key in METHODS)
    settings = ", ".join(filter(None, words))
    is_said = settings.lower() in ("", name.lower().replace("-", ""))
    return name if is_said else f"{name} ({settings})"


def describe_runs(recipe: Recipe, steps: Iterable[float]) -> str:
    """A description of the runs of a recipe: network, data, batch size, steps."""
    model = recipe.model
    data = recipe.data.name.rpartition("/")[2].removeprefix("folder:")
    if recipe.data.limit:
        data = f"{recipe.data.limit:,} images of {data}"
    network = model.name + (f" of width {model.width}" if model.width else "")
    network += {"none": " without normalisation", "group": ", group norm"}.get(model.norm, "")
    lengths = [f"{int(length):,}" for length in sorted(set(steps))]
    return f"{network} on {data}, batch {recipe.train.batch_size}, {' or '.join(lengths)} steps"


def exponent_of_steps(recipe: Recipe, steps: int) -> float:
    """The decay exponent of a run of so many steps."""
    return decay_exponent(recipe, steps // recipe.train.epochs * recipe.train.batch_size)


# Studies ------------------------------------------------------------------------------------------


class Arm:
    """An arm of a study.

    Attributes:
        label: Its name with the id of its row, if the paper has it, and its settings.
        changes: What it changes of the study's recipe.
        methods: What the paper calls its changes: none for plain cross-entropy; None if one of them
            is no method of the paper.
        measured_on: Network, data, batch size and steps.
        decay: Its weight decay as a multiple of the paper's, or that it was tuned.
        is_inflated: Whether its weight decay was not tuned and is larger than the paper's.
        test: The accuracy by seed, as the study compares it.
        is_tuned: Whether its learning rate was chosen, by one tuning.
        at_edge: Whether a value was chosen at the edge of what was tried.
    """

    def __init__(self, trial: Trial, name: str) -> None:
        results, tuning = trial.results, trial.results.tuning
        self.trial, self.name = trial, name
        self.changes = trial.changes[name]
        self.recipe = trial.recipe.override(self.changes)
        self.methods = methods_of(self.changes, trial.recipe)
        self.label = arm_label(trial.row_name(name), self.changes)
        self.rows = results.of_arm(name)
        self.test = results.units(name)
        finished = [row for row in self.rows if not row.diverged] or self.rows
        self.measured_on = describe_runs(self.recipe, (row.about["steps"] for row in finished))
        decay = self.recipe.optimizer.backbone_decay / PAPER_DECAY
        has_tuned_decay = tuning is not None and "optimizer.weight_decay" in tuning.keys
        where = " in the backbone" if self.recipe.optimizer.backbone.weight_decay != 1 else ""
        self.decay = "tuned" if has_tuned_decay else f"{decay:.2g}x{where}"
        self.is_inflated = decay > 1 and not has_tuned_decay
        choice = tuning.arms.get(name) if tuning else None
        self.is_tuned = choice is not None
        self.at_edge = choice is not None and bool(choice.edges)

    def values(self, metric: str) -> Mapping[int, float]:
        """A metric by seed, without runs that diverged.

        `test` is the accuracy that the study compares, and `gap` training minus test accuracy.
        """
        if metric == "test":
            return self.test
        if metric == "gap":
            return {seed: train - self.test[seed] for seed, train in self.values("train").items()}
        name = "train_accuracy" if metric == "train" else metric
        values = {row.seed: row.value(name) for row in self.rows if not row.diverged}
        return {seed: value for seed, value in values.items() if value is not None}

    @functools.cached_property
    def exponent(self) -> float:
        """The decay exponent: how far decay alone shrank a filter."""
        return exponent_of_steps(self.recipe, max(int(row.about["steps"]) for row in self.rows))

    @property
    def diverged(self) -> int:
        """How many runs diverged."""
        return sum(row.diverged for row in self.rows)

    @functools.cached_property
    def runs(self) -> frozenset[tuple[Any, ...]]:
        """What tells each of its runs from every other."""
        return frozenset(map(fingerprint, self.rows))

    def agrees_with(self, other: Arm) -> bool:
        """Whether both change to the same values what both change, except for the rate."""
        both = (self.changes.keys() & other.changes.keys()) - {"optimizer.lr"}
        return all(self.changes[key] == other.changes[key] for key in both)


def mean(values: Iterable[float]) -> float:
    """The mean; NaN of nothing."""
    listed = list(values)
    return sum(listed) / len(listed) if listed else math.nan


def fingerprint(row: RunRow) -> tuple[Any, ...]:
    """What no other training has, digit by digit; the loss of one that diverged is no number."""
    values = row.value("train_loss"), row.value("train_accuracy")
    return row.seed, float(row.about.get("steps", 0)), *values


@dataclass(eq=False)
class Trial:
    """A study, the paper's or ours."""

    stem: Path  # of its files, without suffix
    recipe: Recipe
    changes: Mapping[str, Changes]  # of the recipe, by arm
    results: Results
    experiment: Experiment | None = None  # what it replicates, if anything
    label: str = ""  # distinguishes it from other replicas of the experiment
    examples: int = 0  # the number of training images of a replica

    @property
    def name(self) -> str:
        """The name of its files."""
        return self.stem.name

    @property
    def is_grid(self) -> bool:
        """Whether it is a grid over alpha."""
        return bool(self.experiment and self.experiment.grid)

    @property
    def is_evidence(self) -> bool:
        """Whether its baseline was run and is plain cross-entropy, and PGT is the equation."""
        first, is_exact = self.arms[0], self.recipe.loss.form == "exact"
        return first.name == self.results.baseline and first.methods == frozenset() and is_exact

    @property
    def not_counted(self) -> str:
        """Why its comparisons are not counted; empty if they are."""
        return NOT_COUNTED.get(self.name, "")

    @functools.cached_property
    def arms(self) -> tuple[Arm, ...]:
        """All arms, the one that the others are compared with first."""
        names = sorted(self.results.arms, key=lambda arm: arm != self.results.baseline)
        return tuple(Arm(self, name) for name in names)

    def row_name(self, arm: str) -> str:
        """The name of an arm with the id of its row, if the paper has it."""
        if self.experiment is None:
            return arm
        row = self.experiment.row(arm)
        return row.id if self.is_grid else f"{row.id} {arm}"

    @functools.cached_property
    def comparisons(self) -> dict[str, stats.Comparison]:
        """The comparison of every arm with at least two seeds, by arm."""
        comparable = self.results.comparable()
        comparisons = comparable.comparisons if comparable else []
        return {comparison.arm: comparison for comparison in comparisons}

    def alpha(self, arm: str) -> float:
        return self.changes[arm].get("loss.alpha", self.recipe.loss.alpha)

    def pairs(self, first: str, second: str) -> NDArray[np.float64]:
        """Two metrics of every run that has both: ``(2, runs)``."""
        pairs = [(row.value(first), row.value(second)) for row in self.results.rows]
        array = np.array(pairs, dtype=np.float64)  # None becomes NaN
        return array[np.isfinite(array).all(1)].T


def load_study(path: Path) -> Trial:
    """The study of a file: ``paper/EXPERIMENT-LABEL.json``, or what ``powergrad compare`` wrote."""
    stem = path.with_suffix("")
    values = json.loads(path.read_text("utf-8"))
    if "experiment" not in values:
        results = load(path)
        assert results.study is not None
        assert not results.has_repeats, "compare runs here, not repeats"
        return Trial(stem, results.study.base, results.study.arms, results)
    experiment = load_paper().find(values["experiment"])
    recipe = Recipe.model_validate(values["recipe"])
    rows = read_rows(stem.with_name(f"{stem.name}.csv"))
    if classes := CLASSES.get(recipe.data.name):  # for the value of diverged runs
        about = {"classes": classes}
        rows = [row.model_copy(update={"about": {**about, **row.about}}) for row in rows]
    tuning = Tuning.model_validate(values["tuning"]) if "tuning" in values else None
    metric, first = METRICS["test_accuracy"], experiment.baseline
    results = Results(metric, MARGIN, first.arm, rows, tuning=tuning)
    about = (experiment, values["label"], values["examples"])
    return Trial(stem, recipe, values["arms"], results, *about)


# Comparisons --------------------------------------------------------------------------------------


def difference_in_words(comparison: stats.Comparison) -> str:
    """The difference, and its interval in brackets if there are enough seeds for one."""
    difference = stats.format_signed(comparison.difference)
    if comparison.n < stats.LEAST:
        return difference
    return f"{difference} ({stats.format_interval(comparison.interval)})"


def verdict_of(comparison: stats.Comparison) -> str:
    """The verdict, or that there are too few seeds for one."""
    return comparison.verdict if comparison.n >= stats.LEAST else "too few seeds"


@dataclass(frozen=True)
class Contrast:
    """An arm against another of its study."""

    arm: Arm
    against: Arm
    comparison: stats.Comparison

    @property
    def trial(self) -> Trial:
        """The study of the arm."""
        return self.arm.trial

    @property
    def verdict(self) -> str:
        """The verdict, without what limits it."""
        return verdict_of(self.comparison)

    @property
    def limited_verdict(self) -> str:
        """The verdict, with what limits it in the runs of both arms."""
        arm, against, verdict = self.arm, self.against, self.verdict
        if self.comparison.withheld:
            verdict += "; better withheld (edge)"
        if arm.is_tuned and self.verdict in ("better", "worse"):
            verdict += " at these rates"
        if arm.diverged or against.diverged:
            verdict += f"; diverged: {arm.diverged} against {against.diverged}"
        return verdict

    @property
    def cells(self) -> tuple[str, ...]:
        """Arm, decays, n, difference, and verdict."""
        arm, against = self.arm, self.against
        return (
            arm.label + (f" against {against.label}" if against.methods else ""),
            arm.decay if arm.decay == against.decay else f"{arm.decay}; {against.decay}",
            str(self.comparison.n),
            difference_in_words(self.comparison),
            "; ".join(filter(None, (self.limited_verdict, self.trial.not_counted))),
        )


def contrasts_of(trial: Trial) -> list[Contrast]:
    """The comparisons of a study with its first arm."""
    return [
        Contrast(arm, trial.arms[0], trial.comparisons[arm.name])
        for arm in trial.arms[1:]
        if arm.name in trial.comparisons
    ]


def compare_arms(arm: Arm, against: Arm, metric: str, **options: Any) -> Iterator[Contrast]:
    """Two arms by a metric of theirs, if both have two seeds or more."""
    both = {"against": against.values(metric), "arm": arm.values(metric)}
    is_doubtful = metric == "test" and (arm.at_edge or against.at_edge)
    withhold = {"arm": "A rate was chosen at the edge."} if is_doubtful else {}
    if min(map(len, both.values())) >= 2:
        options = {"margin": MARGIN, "withhold": withhold, **options}
        (compared,) = stats.compare(both, "against", **options)
        yield Contrast(arm, against, compared)
