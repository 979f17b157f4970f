"""All studies in one form: replicas of the paper's rows, and those that the paper does not have.

`load_study` is the only function that reads the file of a study, and `Trial` and `Arm` are the only
classes that ask its results: claims, tables and figures use these two.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from powergrad.lab import stats
from powergrad.lab.runs import Changes
from powergrad.lab.study import METRICS, Results, RunRow, Tuning, load
from powergrad.lab.study.tables import read_rows
from powergrad.lab.trainer.recipe import Recipe
from reproduction.published import Experiment, changes_of, load_paper
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
# Verdicts that did not last: docs/choosing-alpha.md says more.
WITHDRAWN = {
    "compare_digits_tuned_lr": "the tuning chose a poor learning rate for the baseline",
    "compare_fashion_mnist": "the tried learning rates were too high for PGT",
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
    is_said = not settings or settings == name.lower().replace("-", "")
    return name if is_said else f"{name} ({settings})"


def decay_in_words(changes: Changes, base: Recipe, tuning: Tuning | None) -> str:
    """The weight decay of an arm as a multiple of the paper's, or that it was tuned.

    Example:
        >>> base = Recipe().override({"optimizer.weight_decay": 0.01})
        >>> decay_in_words({}, base, None)
        '20x, inflated'
        >>> decay_in_words({"optimizer.backbone.weight_decay": 0.25}, base, None)
        '5x in the backbone, inflated'
    """
    key = "optimizer.weight_decay"
    if tuning is not None and key in tuning.keys:
        return "tuned"
    factor = changes.get("optimizer.backbone.weight_decay", base.optimizer.backbone.weight_decay)
    times = changes.get(key, base.optimizer.weight_decay) * factor / PAPER_DECAY
    where = " in the backbone" if factor != 1 else ""
    return f"{times:.2g}x{where}" + (", inflated" if times > 1 else "")


def describe_runs(recipe: Recipe, steps: Iterable[float]) -> str:
    """A description of the runs of a recipe: network, data, batch size, steps."""
    model = recipe.model
    data = recipe.data.name.rpartition("/")[2].removeprefix("folder:")
    if recipe.data.limit:
        data = f"{recipe.data.limit:,} images of {data}"
    network = model.name + (f" of width {model.width}" if model.width else "")
    network += {"none": " without normalisation", "group": ", group norm"}.get(model.norm, "")
    lengths = [f"{int(length):,}" for length in sorted(set(steps))]
    if len(lengths) > 3:  # runs that diverged at different times
        lengths = [f"{lengths[0]} to {lengths[-1]}"]
    return f"{network} on {data}, batch {recipe.train.batch_size}, {' or '.join(lengths)} steps"


def exponent_of_steps(recipe: Recipe, steps: int) -> float:
    """The decay exponent of a run of so many steps."""
    return decay_exponent(recipe, steps // recipe.train.epochs * recipe.train.batch_size)


# Studies ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """An arm of a study."""

    name: str
    label: str  # with the id of its row if the paper has it, and its settings
    changes: Changes  # of the study's recipe
    methods: frozenset[str] | None  # none for plain cross-entropy; None if one is no method
    measured_on: str  # network, data, batch size and steps
    rate: str  # its learning rate, and how it was chosen
    decay: str  # its weight decay as a multiple of the paper's, or that it was tuned
    recipe: Recipe
    rows: tuple[RunRow, ...]
    test: Mapping[int, float]  # the accuracy of every run, or repeat, as the study compares it
    at_edge: bool = False  # whether its rate was chosen at the edge of what was tried

    def finished(self, metric: str) -> dict[int, float]:
        """A metric of every run, or the mean of every repeat, without runs that diverged."""
        units: dict[int, list[float]] = {}
        for row in self.rows:
            if not row.diverged and (value := row.value(metric)) is not None:
                units.setdefault(row.seed if row.unit is None else row.unit, []).append(value)
        return {unit: mean(values) for unit, values in units.items()}

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
    within: str | None = None  # a larger study that has all its runs; it is the one to count

    @property
    def name(self) -> str:
        """The name of its files."""
        return self.stem.name

    @property
    def is_grid(self) -> bool:
        """Whether it is a grid over alpha."""
        return bool(self.experiment and self.experiment.grid)

    @property
    def withdrawn(self) -> str:
        """Why its verdicts are withdrawn, if they are."""
        return WITHDRAWN.get(self.name, "")

    @property
    def not_counted(self) -> str:
        """Why its comparisons are not counted; empty if they are."""
        if self.withdrawn:
            return f"withdrawn and not counted: {self.withdrawn}"
        return f"not counted: its runs are part of `{self.within}`" if self.within else ""

    @property
    def counts(self) -> bool:
        """Whether its comparisons are counted."""
        return not self.not_counted

    @functools.cached_property
    def arms(self) -> tuple[Arm, ...]:
        """All arms, the one that the others are compared with first."""
        names = sorted(self.results.arms, key=lambda arm: arm != self.results.baseline)
        return tuple(map(self._arm, names))

    def _arm(self, name: str) -> Arm:
        changes, tuning = self.changes[name], self.results.tuning
        rows, label = self.results.of_arm(name), name
        if self.experiment is not None:
            row = self.experiment.row(name)
            label = row.id if self.is_grid else f"{row.id} {name}"
        rate, at_edge = f"{changes.get('optimizer.lr', self.recipe.optimizer.lr):g}", False
        if tuning is not None and tuning.is_unit:
            rate = "tuned in every repeat"
        elif tuning is not None and name in tuning.arms:
            at_edge = bool(tuning.arms[name].edges)
            rate += ", tuned" + (" (edge)" if at_edge else "")
        recipe = self.recipe.override(changes)
        finished = [row for row in rows if not row.diverged] or rows
        return Arm(
            name,
            arm_label(label, changes),
            changes,
            methods_of(changes, self.recipe),
            describe_runs(recipe, (row.about["steps"] for row in finished)),
            rate,
            decay_in_words(changes, self.recipe, tuning),
            recipe,
            tuple(rows),
            self.results.units(name),
            at_edge,
        )

    @functools.cached_property
    def comparisons(self) -> dict[str, stats.Comparison]:
        """The comparison of every arm with at least two seeds, by arm."""
        comparable = self.results.comparable()
        comparisons = comparable.comparisons if comparable else []
        return {comparison.arm: comparison for comparison in comparisons}

    @functools.cached_property
    def runs(self) -> frozenset[tuple[Any, ...]]:
        """What tells its runs from those of other studies."""
        return frozenset().union(*(arm.runs for arm in self.arms))

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
    changes = values.get("arms") or {  # at full scale there are the paper's changes only
        row.arm: changes_of(row.recipe, first.recipe) for row in experiment.rows
    }
    if recipe.loss.form == "as_published":
        hook = {"loss.form": "as_published"}
        changes = {arm: {**changed, **hook} for arm, changed in changes.items()}
    return Trial(stem, recipe, changes, results, experiment, values["label"], values["examples"])


def plain_trials(trials: Iterable[Trial]) -> list[Trial]:
    """The studies whose baseline was run and is plain cross-entropy; `within` is set in them."""
    firsts = ((trial, trial.arms[0]) for trial in trials)
    kept = [t for t, arm in firsts if arm.name == t.results.baseline and arm.methods == frozenset()]
    for trial in kept:
        trial.within = _holder(trial, kept)
    return kept


def _holder(trial: Trial, trials: Sequence[Trial]) -> str | None:
    """A larger study that has all runs of this one, compared with the same baseline."""
    for other in trials:
        is_larger = trial.runs < other.runs and trial.arms[0].runs <= other.arms[0].runs
        if is_larger and other.is_grid == trial.is_grid:
            return other.name
    return None


# Comparisons --------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """A comparison as text; without interval and p if there are too few seeds for a verdict."""

    difference: str
    interval: str
    p: str
    verdict: str

    @classmethod
    def of(cls, comparison: stats.Comparison) -> Outcome:
        difference = stats.format_signed(comparison.difference)
        if comparison.n < stats.LEAST:
            return cls(difference, "", "", "too few seeds")
        interval, p = stats.format_interval(comparison.interval), f"{comparison.p:.3f}"
        return cls(difference, interval, p, comparison.verdict)

    @property
    def with_interval(self) -> str:
        """The difference, and its interval in brackets if there is one."""
        return f"{self.difference} ({self.interval})" if self.interval else self.difference


def verdict_in_words(comparison: stats.Comparison) -> str:
    """The verdict, and whether *better* is withheld because a value was chosen at an edge."""
    withheld = "; better withheld (edge)" if comparison.withheld else ""
    return Outcome.of(comparison).verdict + withheld


@dataclass(frozen=True)
class Contrast:
    """An arm against another of its study."""

    trial: Trial
    arm: Arm
    against: Arm
    comparison: stats.Comparison

    @property
    def verdict(self) -> str:
        """The verdict, without what diverged."""
        return Outcome.of(self.comparison).verdict

    @property
    def limited_verdict(self) -> str:
        """The verdict, with what limits it in the runs of both arms."""
        arm, against = self.arm, self.against
        verdict = verdict_in_words(self.comparison)
        if arm.rate.endswith(("tuned", "(edge)")) and self.verdict in ("better", "worse"):
            verdict += " at these rates"
        if arm.diverged or against.diverged:
            verdict += f"; diverged: {arm.diverged} against {against.diverged}"
        return verdict

    @property
    def cells(self) -> tuple[str, ...]:
        """Study, arm, what it was measured on, rates, decays, n, difference, and verdict."""
        arm, against = self.arm, self.against
        outcome = Outcome.of(self.comparison)
        other = f" against {against.label}" if against.methods else ""
        is_alike = against.measured_on == arm.measured_on
        return (
            f"`{self.trial.name}`",
            arm.label + other,
            arm.measured_on + ("" if is_alike else f"; the other arm: {against.measured_on}"),
            f"{arm.rate}; {against.rate}",
            arm.decay if arm.decay == against.decay else f"{arm.decay}; {against.decay}",
            str(self.comparison.n),
            outcome.with_interval,
            "; ".join(filter(None, (self.limited_verdict, self.trial.not_counted))),
        )


def contrasts_of(trial: Trial) -> list[Contrast]:
    """The comparisons of a study with its first arm."""
    return [
        Contrast(trial, arm, trial.arms[0], trial.comparisons[arm.name])
        for arm in trial.arms[1:]
        if arm.name in trial.comparisons
    ]


def compare_arms(
    trial: Trial,
    arm: Arm,
    against: Arm,
    values: Mapping[str, Mapping[int, float]],
    **options: Any,
) -> Iterator[Contrast]:
    """Two arms of a study by some values of theirs, if both have two seeds or more."""
    both = {name: values[name] for name in (against.name, arm.name)}
    if min(map(len, both.values())) >= 2:
        (compared,) = stats.compare(both, against.name, **{"margin": MARGIN, **options})
        yield Contrast(trial, arm, against, compared)
