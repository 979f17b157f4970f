"""All studies in one form: replicas of the paper's rows, and those that the paper does not have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from powergrad.lab import stats
from powergrad.lab.config import Recipe
from powergrad.lab.paper.evidence import MARGIN, Evidence, Measurement, describe_runs
from powergrad.lab.paper.rows import changes_of
from powergrad.lab.paper.small import decay_exponent
from powergrad.lab.plan import least_seeds

__all__ = [
    "Arm",
    "Finding",
    "Study",
    "Trial",
    "contrast",
    "fingerprint",
    "found_in",
    "labelled",
    "methods_of",
    "read_studies",
    "settings_of",
    "told",
    "trial_of",
    "trials",
]

Told = stats.Comparison | SimpleNamespace  # a comparison, fresh or read from a file
KINDS = ("compare", "sweep", "decompose")  # results/KIND_NAME.json
# What an arm does, by the key that it changes, and how its value is told. Where there are two
# names, the first is for less than the study's recipe has, the second for more. A rate of its own
# is no method.
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


def methods_of(changes: Mapping[str, Any], base: Recipe) -> frozenset[str] | None:
    """What the paper calls the changes of an arm; None if one is no method of its.

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
    found = set()
    for key, value in changes.items():
        name = METHODS[key][0]
        if isinstance(name, tuple):
            before, after = (_size(each) for each in (base.value(key), value))
            if after == before:
                continue
            name = name[after > before]
        if name is not None:
            found.add(name)
    return frozenset(found)


def _size(value: float | str) -> float:
    """A number, or the depth in a network's name."""
    if isinstance(value, str):
        depth = re.search(r"(\d+)$", value)
        return float(depth[1]) if depth else 0.0
    return value


def settings_of(changes: Mapping[str, Any]) -> str:
    """The values of its methods.

    Example:
        >>> settings_of({"optimizer.lr": 0.1, "loss.alpha": 0.25, "clip.agc": 0.2})
        'alpha 0.25, AGC at 0.2'
    """
    words = (METHODS[key][1].format(value) for key, value in changes.items() if key in METHODS)
    return ", ".join(each for each in words if each)


def labelled(name: str, changes: Mapping[str, Any]) -> str:
    """An arm's name with its settings, if it has any that the name does not say.

    Example:
        >>> labelled("pgt", {"loss.alpha": 0.25}), labelled("batch 64", {"train.batch_size": 64})
        ('pgt (alpha 0.25)', 'batch 64')
    """
    settings = settings_of(changes)
    is_said = settings == name.lower().replace("-", "")
    return f"{name} ({settings})" if settings and not is_said else name


# Studies ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Study:
    """What ``powergrad compare``, ``sweep`` or ``decompose`` left: its ``study.json``."""

    stem: Path
    about: Mapping[str, Any]

    def values(self, arm: str, key: str) -> dict[int, float]:
        """A metric of every seed of an arm that has it."""
        rows = (row for row in self.about["rows"] if row["arm"] == arm)
        return {row["seed"]: row[key] for row in rows if row.get(key) is not None}

    def mean(self, arm: str, key: str) -> float | None:
        """Its mean, if any seed has it."""
        values = self.values(arm, key)
        return sum(values.values()) / len(values) if values else None

    def describe(self) -> str:
        """What it was measured on: network, data, steps."""
        steps = (row["steps"] for row in self.about["rows"] if not row.get("diverged"))
        return describe_runs(self.about["recipe"], steps)

    def exponent(self, arm: str) -> float:
        """How far decay alone shrank a filter of an arm; see :func:`decay_exponent`."""
        recipe = Recipe.model_validate(self.about["recipe"]).override(self.about["changes"][arm])
        steps = {row["steps"] for row in self.about["rows"] if row["arm"] == arm}
        per_epoch = max(steps) // recipe.train.epochs
        return decay_exponent(recipe, per_epoch * recipe.train.batch_size)


def read_studies(results: Path) -> list[Study]:
    """All studies of a folder ``results``, in the order of their kinds and names."""
    paths = [path for kind in KINDS for path in sorted(results.glob(f"{kind}_*.json"))]
    return [Study(path.with_suffix(""), json.loads(path.read_text("utf-8"))) for path in paths]


@dataclass(frozen=True)
class Arm:
    """An arm of a study.

    Attributes:
        name: Its name.
        label: The same, with the id of its row if the paper has it, and its settings.
        changes: What it changes in the study's recipe.
        methods: What it does that plain cross-entropy does not; None if that is no method.
        on: What it was measured on.
        rate: Its learning rate, and how it was chosen.
        exponent: How far decay alone shrank a filter.
        test: The test accuracy of every seed, 0 of a run that diverged.
        train: The training accuracy of every seed that did not.
        dead: The dead filters of every seed that did not, where they were counted.
        diverged: How many runs did.
        runs: What tells each run from every other.
    """

    name: str
    label: str
    changes: Mapping[str, Any]
    methods: frozenset[str] | None
    on: str
    rate: str
    exponent: float
    test: Mapping[int, float]
    train: Mapping[int, float]
    dead: Mapping[int, float]
    diverged: int
    runs: frozenset[tuple[Any, ...]]

    def agrees_with(self, other: Arm) -> bool:
        """Whether what both change, but for the rate, they change alike."""
        both = (self.changes.keys() & other.changes.keys()) - {"optimizer.lr"}
        return all(self.changes[key] == other.changes[key] for key in both)


@dataclass(frozen=True)
class Trial:
    """A study, the paper's or ours.

    Attributes:
        name: The name of its files.
        norm: The network's normalisation.
        is_grid: Whether it is a grid over alpha.
        arms: All of them, the one that the others are compared with first.
        found: The comparisons with it, by arm.
        within: A larger study that has all its runs; it is the one to count.
    """

    name: str
    norm: str
    is_grid: bool
    arms: tuple[Arm, ...]
    found: Mapping[str, Told]
    within: str | None = None

    @property
    def runs(self) -> frozenset[tuple[Any, ...]]:
        """What tells its runs from those of other studies."""
        return frozenset().union(*(arm.runs for arm in self.arms))


def trials(evidence: Evidence, studies: Sequence[Study]) -> list[Trial]:
    """Every study of which the first arm is plain cross-entropy."""
    found = [*map(_of_the_paper, evidence.measurements), *map(trial_of, studies)]
    found = [each for each in found if each.arms and each.arms[0].methods == frozenset()]
    return [replace(each, within=_holder(each, found)) for each in found]


def _holder(mine: Trial, found: Sequence[Trial]) -> str | None:
    """A larger study that has all runs of this one, compared with the same baseline."""
    for other in found:
        is_larger = mine.runs < other.runs and mine.arms[0].runs <= other.arms[0].runs
        if is_larger and other.is_grid == mine.is_grid:
            return other.name
    return None


def _of_the_paper(study: Measurement) -> Trial:
    first = study.experiment.rows[0]
    rows = [study.experiment.row(arm) for arm in study.arms]
    if rows[0] is not first:
        rows = []
    changes = study.about.get("arms") or {
        row.arm: changes_of(row.recipe, first.recipe) for row in rows
    }
    is_hook = study.about["recipe"]["loss"].get("form") == "as_published"
    arms = tuple(
        _arm(
            row.arm,
            row.id if study.experiment.grid else f"{row.id} {row.arm}",
            {**changes[row.arm], **({"loss.form": "as_published"} if is_hook else {})},
            study.about,
            study.about["exponents"][row.arm],
            [each for each in study.rows if each["arm"] == row.arm],
        )
        for row in rows
    )
    found = {arm: each for arm in study.arms if (each := study.comparison(arm))}
    norm = study.about["recipe"]["model"]["norm"]
    is_grid = bool(study.experiment.grid)
    return Trial(study.stem.name, norm, is_grid, arms, found)


def trial_of(study: Study) -> Trial:
    """One of our studies in the common form, whatever its baseline does."""
    about = study.about
    names = sorted(about["arms"], key=lambda arm: arm != about["baseline"])
    arms = tuple(
        _arm(
            name,
            name,
            about["changes"][name],
            about,
            study.exponent(name),
            [row for row in about["rows"] if row["arm"] == name],
        )
        for name in names
    )
    found = {each["arm"]: SimpleNamespace(**each) for each in about["comparisons"]}
    norm = about["recipe"]["model"]["norm"]
    is_grid = about["kind"].startswith("sweep")
    return Trial(study.stem.name, norm, is_grid, arms, found)


def _arm(
    name: str,
    label: str,
    changes: Mapping[str, Any],
    about: Mapping[str, Any],
    exponent: float,
    rows: Sequence[Mapping[str, Any]],
) -> Arm:
    base = Recipe.model_validate(about["recipe"])
    tuned = about.get("tuning", {}).get("arms", {})
    rate = f"{changes.get('optimizer.lr', about['recipe']['optimizer']['lr']):g}"
    if name in tuned:
        rate += ", tuned" + (" (edge)" if tuned[name]["at_edge"] else "")
    lived = [row for row in rows if row.get("diverged") != 1]  # True, or 1 in a CSV

    def values(key: str, rows: Sequence[Mapping[str, Any]]) -> dict[int, float]:
        found = {row["seed"]: row.get(key) for row in rows}
        # NaN is what the CSV has for a value that is not there.
        return {
            seed: value for seed, value in found.items() if value is not None and value == value
        }

    # What it was measured on may differ from the study's recipe in these; the rest need not even be
    # a recipe (an old file has the paper's changes, not the replica's).
    apart = {key: changes[key] for key in ("model.name", "train.batch_size") if key in changes}
    recipe = base.override(apart).model_dump(mode="json")
    return Arm(
        name,
        labelled(label, changes),
        changes,
        methods_of(changes, base),
        describe_runs(recipe, (int(row["steps"]) for row in lived or rows)),
        rate,
        exponent,
        values("test_accuracy", rows),
        values("train_accuracy", lived),
        values("dead_units", lived),
        len(rows) - len(lived),
        frozenset(map(fingerprint, rows)),
    )


def fingerprint(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What no other training has, digit by digit; the loss of one that diverged is no number."""
    loss = row["train_loss"]
    return row["seed"], row["steps"], loss if loss == loss else None, row["train_accuracy"]


# Comparisons --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """An arm against another of its study."""

    trial: Trial
    arm: Arm
    against: Arm
    found: Told

    @property
    def verdict(self) -> str:
        """The verdict, without what diverged."""
        return told(self.found)[2]

    @property
    def cells(self) -> tuple[str, ...]:
        """Study, arm, what it was measured on, both rates, n, difference, and verdict."""
        difference, _, verdict = told(self.found)
        label, on = self.arm.label, self.arm.on
        if self.against.methods:
            label += f" against {self.against.label}"
        if self.against.on != on:
            on += f"; the other: {self.against.on}"
        lost = [each.diverged for each in (self.arm, self.against)]
        if any(lost):
            verdict += f"; diverged: {lost[0]} against {lost[1]}"
        if self.trial.within:
            verdict += f"; not counted, its runs are in `{self.trial.within}`"
        rates = f"{self.arm.rate}; {self.against.rate}"
        n = str(self.found.n)
        return (
            f"`{self.trial.name}`",
            label,
            on,
            rates,
            n,
            difference,
            verdict,
        )


def told(found: Told) -> tuple[str, str, str]:
    """Difference with its interval, p and verdict of a comparison.

    With fewer seeds than any verdict needs there is neither interval nor p.
    """
    difference = stats.signed(found.difference)
    if found.n < least_seeds(found.comparisons, found.level):
        return difference, "", "too few seeds"
    return f"{difference} ({stats.span(found.interval)})", f"{found.p_adjusted:.3f}", found.verdict


def found_in(trial: Trial) -> list[Finding]:
    """The comparisons of a study with its first arm."""
    arms = [arm for arm in trial.arms[1:] if arm.name in trial.found]
    return [Finding(trial, arm, trial.arms[0], trial.found[arm.name]) for arm in arms]


def contrast(
    trial: Trial,
    arm: Arm,
    against: Arm,
    values: Mapping[str, Mapping[int, float]],
    **options: Any,
) -> Iterator[Finding]:
    """Two arms of a study by some values of theirs, if both have two seeds or more."""
    both = {each.name: values[each.name] for each in (against, arm)}
    if min(map(len, both.values())) >= 2:
        (compared,) = stats.compare(both, against.name, **{"margin": MARGIN, **options})
        yield Finding(trial, arm, against, compared)
