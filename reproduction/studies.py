"""All studies in one form: replicas of the paper's rows, and those that the paper does not have."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from powergrad.lab import stats
from powergrad.lab.jobs import Changes
from powergrad.lab.paper.evidence import MARGIN, Evidence, Measurement, Outcome, describe_runs
from powergrad.lab.paper.rows import changes_of
from powergrad.lab.paper.small import decay_exponent
from powergrad.lab.study import Results, RunRow, StudyKind, Tuning
from powergrad.lab.trainer.recipe import Recipe

__all__ = [
    "Arm",
    "Contrast",
    "Trial",
    "all_trials",
    "arm_label",
    "compare_arms",
    "contrasts_of",
    "decay_in_words",
    "exponent_of_steps",
    "fingerprint",
    "methods_of",
    "other_settings",
    "read_studies",
    "trial_of_study",
    "verdict_in_words",
]

PAPER_DECAY = 5e-4
KINDS = (StudyKind.COMPARE, StudyKind.SWEEP, StudyKind.DECOMPOSE)  # results/KIND_NAME.json
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


def methods_of(changes: Changes, base: Recipe) -> frozenset[str] | None:
    """What the paper calls the changes of an arm; None if one is none of its methods.

    Args:
        changes: What the arm changes.
        base: The recipe in which it does.

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


def other_settings(name: str, changes: Changes) -> str:
    """The values of an arm's methods, unless its name says no more and no less.

    Example:
        >>> other_settings("pgt", {"optimizer.lr": 0.1, "loss.alpha": 0.25, "clip.agc": 0.2})
        'alpha 0.25, AGC at 0.2'
        >>> other_settings("batch 64", {"train.batch_size": 64})
        ''
    """
    words = (METHODS[key][1].format(value) for key, value in changes.items() if key in METHODS)
    settings = ", ".join(filter(None, words))
    return "" if settings == name.lower().replace("-", "") else settings


def arm_label(name: str, changes: Changes) -> str:
    """An arm's name, with the settings that it does not say."""
    settings = other_settings(name, changes)
    return f"{name} ({settings})" if settings else name


# Studies ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """An arm of a study.

    Attributes:
        name: Its name.
        label: The same, with the id of its row if the paper has it, and its settings.
        changes: What it changes in the study's recipe.
        methods: What it does that plain cross-entropy does not; None if that is no method.
        measured_on: Network, data, batch size and steps.
        rate: Its learning rate, and how it was chosen.
        decay: Its weight decay as a multiple of the paper's, or that it was tuned.
        exponent: How far decay alone shrank a filter.
        rows: Its runs.
        test: The test accuracy of every run, or of every repeat, as the study compares it.
        at_edge: Whether its rate was chosen at the edge of what was tried.
    """

    name: str
    label: str
    changes: Changes
    methods: frozenset[str] | None
    measured_on: str
    rate: str
    decay: str
    exponent: float
    rows: tuple[RunRow, ...]
    test: Mapping[int, float]
    at_edge: bool = False

    @property
    def train(self) -> dict[int, float]:
        """The training accuracy of every run, or repeat, that did not diverge."""
        return _values(_finished(self.rows), "train_accuracy")

    @property
    def dead(self) -> dict[int, float]:
        """The dead filters of every run, or repeat, that did not diverge, where counted."""
        return _values(_finished(self.rows), "dead_units")

    @property
    def diverged(self) -> int:
        """How many runs diverged."""
        return len(self.rows) - len(_finished(self.rows))

    @functools.cached_property
    def runs(self) -> frozenset[tuple[Any, ...]]:
        """What tells each of its runs from every other."""
        return frozenset(map(fingerprint, self.rows))

    def agrees_with(self, other: Arm) -> bool:
        """Whether both change to the same values what both change, except for the rate."""
        both = (self.changes.keys() & other.changes.keys()) - {"optimizer.lr"}
        return all(self.changes[key] == other.changes[key] for key in both)


def _finished(rows: Sequence[RunRow]) -> list[RunRow]:
    return [row for row in rows if not row.diverged]


def _values(rows: Sequence[RunRow], metric: str) -> dict[int, float]:
    units: dict[int, list[float]] = {}
    for row in rows:
        if (value := row.value(metric)) is not None:
            units.setdefault(row.seed if row.unit is None else row.unit, []).append(value)
    return {unit: sum(values) / len(values) for unit, values in units.items()}


def fingerprint(row: RunRow) -> tuple[Any, ...]:
    """What no other training has, digit by digit; the loss of one that diverged is no number."""
    keys = ("steps", "train_loss", "train_accuracy")
    return row.seed, *(row.value(key) for key in keys)


# Verdicts that did not last: docs/choosing-alpha.md says more.
WITHDRAWN = {
    "compare_digits_tuned_lr": "the tuning chose a poor learning rate for the baseline",
    "compare_fashion_mnist": "the tried learning rates were too high for PGT",
}


@dataclass(frozen=True)
class Trial:
    """A study, the paper's or ours.

    Attributes:
        name: The name of its files.
        norm: The network's normalisation.
        is_grid: Whether it is a grid over alpha.
        arms: All of them, the one that the others are compared with first.
        comparisons: The comparisons with it, by arm.
        within: A larger study that has all its runs; it is the one to count.
        withdrawn: Why its verdicts are withdrawn, if they are.
    """

    name: str
    norm: str
    is_grid: bool
    arms: tuple[Arm, ...]
    comparisons: Mapping[str, stats.Comparison]
    within: str | None = None
    withdrawn: str = ""

    @property
    def counts(self) -> bool:
        """Whether its comparisons are counted."""
        return self.within is None and not self.withdrawn

    @functools.cached_property
    def runs(self) -> frozenset[tuple[Any, ...]]:
        """What tells its runs from those of other studies."""
        return frozenset().union(*(arm.runs for arm in self.arms))


def read_studies(results: Path) -> dict[str, Results]:
    """The studies of a folder ``results`` that the paper does not have, by kind and name."""
    paths = [path for kind in KINDS for path in sorted(results.glob(f"{kind.value}_*.json"))]
    return {path.stem: Results.load(path) for path in paths}


def all_trials(evidence: Evidence, studies: Mapping[str, Results]) -> list[Trial]:
    """Every study of which the first arm is plain cross-entropy."""
    trials = [_trial_of_measurement(study) for study in evidence.measurements]
    trials += [trial_of_study(name, results) for name, results in studies.items()]
    trials = [trial for trial in trials if trial.arms and trial.arms[0].methods == frozenset()]
    return [replace(trial, within=_holder(trial, trials)) for trial in trials]


def _holder(trial: Trial, trials: Sequence[Trial]) -> str | None:
    """A larger study that has all runs of this one, compared with the same baseline."""
    for other in trials:
        is_larger = trial.runs < other.runs and trial.arms[0].runs <= other.arms[0].runs
        if is_larger and other.is_grid == trial.is_grid:
            return other.name
    return None


def _trial_of_measurement(study: Measurement) -> Trial:
    experiment, recipe = study.experiment, study.recipe
    first = experiment.baseline
    rows = [experiment.row(arm) for arm in study.results.arms]
    if rows[0] is not first:
        rows = []
    changes = study.conditions.arms or {
        row.arm: changes_of(row.recipe, first.recipe) for row in rows
    }
    hook = {"loss.form": "as_published"} if recipe.loss.form == "as_published" else {}
    arms = tuple(
        _arm(
            row.arm,
            row.id if experiment.grid else f"{row.id} {row.arm}",
            {**changes[row.arm], **hook},
            recipe,
            study.conditions.tuning,
            study.conditions.exponents[row.arm],
            study.results,
        )
        for row in rows
    )
    return Trial(study.name, recipe.model.norm, bool(experiment.grid), arms, study.comparisons)


def trial_of_study(name: str, results: Results) -> Trial:
    """One of our studies in the common form, whatever its baseline does."""
    assert results.study is not None
    base = results.study.base
    arms = tuple(
        _arm(
            arm,
            arm,
            results.study.arms[arm],
            base,
            results.tuning,
            exponent_of_steps(
                base.override(results.study.arms[arm]),
                max(int(row.metrics["steps"]) for row in results.of_arm(arm)),
            ),
            results,
        )
        for arm in sorted(results.arms, key=lambda arm: arm != results.baseline)
    )
    comparisons = {comparison.arm: comparison for comparison in results.comparisons}
    is_grid = results.study.kind is StudyKind.SWEEP
    withdrawn = WITHDRAWN.get(name, "")
    return Trial(name, base.model.norm, is_grid, arms, comparisons, withdrawn=withdrawn)


def exponent_of_steps(recipe: Recipe, steps: int) -> float:
    """The decay exponent of a run of so many steps."""
    return decay_exponent(recipe, steps // recipe.train.epochs * recipe.train.batch_size)


def _arm(
    name: str,
    label: str,
    changes: Changes,
    base: Recipe,
    tuning: Tuning | None,
    exponent: float,
    results: Results,
) -> Arm:
    rows = results.of_arm(name)
    rate, at_edge = f"{changes.get('optimizer.lr', base.optimizer.lr):g}", False
    if tuning is not None and tuning.is_unit:
        rate = "tuned in every repeat"
    elif tuning is not None and name in tuning.arms:
        at_edge = tuning.arms[name].at_edge
        rate += ", tuned" + (" (edge)" if at_edge else "")
    # What it was measured on may differ from the study's recipe in these; the rest need not even be
    # a recipe (at full scale there are the paper's changes only).
    apart = {key: changes[key] for key in ("model.name", "train.batch_size") if key in changes}
    steps = (row.metrics["steps"] for row in _finished(rows) or rows)
    return Arm(
        name,
        arm_label(label, changes),
        changes,
        methods_of(changes, base),
        describe_runs(base.override(apart), steps),
        rate,
        decay_in_words(changes, base, tuning),
        exponent,
        tuple(rows),
        results.units(name),
        at_edge,
    )


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


# Comparisons --------------------------------------------------------------------------------------


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
    def words(self) -> str:
        """The verdict, with everything that limits it."""
        arm, against = self.arm, self.against
        verdict = verdict_in_words(self.comparison)
        if arm.rate.endswith(("tuned", "(edge)")) and self.verdict in ("better", "worse"):
            verdict += " at these rates"
        if arm.diverged or against.diverged:
            verdict += f"; diverged: {arm.diverged} against {against.diverged}"
        if self.trial.within:
            verdict += f"; not counted: its runs are part of `{self.trial.within}`"
        if self.trial.withdrawn:
            verdict += f"; withdrawn and not counted: {self.trial.withdrawn}"
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
            self.words,
        )


def verdict_in_words(comparison: stats.Comparison) -> str:
    """The verdict, and whether *better* is withheld because a value was chosen at an edge."""
    withheld = "; better withheld (edge)" if comparison.withheld else ""
    return Outcome.of(comparison).verdict + withheld


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
