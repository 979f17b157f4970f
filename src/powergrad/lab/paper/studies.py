"""The studies that the paper does not have, and every comparison of theirs and of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powergrad.lab.paper.evidence import Evidence, describe_runs
from powergrad.lab.paper.rows import changes_of

__all__ = ["Finding", "Study", "find_all", "methods_of", "rates_of", "read_studies"]

KINDS = ("compare", "sweep", "decompose")  # results/KIND_NAME.json
# What an arm does, by the keys that it changes; a rate of its own is not a method.
METHODS = {
    "loss.alpha": "PGT",
    "clip.agc": "AGC",
    "clip.norm": "GC",
    "loss.label_smoothing": "LS",
    "train.epochs": "other length",
    "optimizer.lr": None,
}


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


def read_studies(results: Path) -> list[Study]:
    """All studies of a folder ``results``, in the order of their kinds and names."""
    paths = [path for kind in KINDS for path in sorted(results.glob(f"{kind}_*.json"))]
    return [Study(path.with_suffix(""), json.loads(path.read_text("utf-8"))) for path in paths]


@dataclass(frozen=True)
class Finding:
    """An arm against the plain baseline of its study.

    Attributes:
        study: The study's name.
        arm: The arm, with the id of its row if the paper has it.
        methods: What it does that the baseline does not; None if that is no method of the paper.
        norm: The network's normalisation.
        is_grid: Whether it is a point of a grid over alpha.
        rates: How the learning rates were chosen.
        on: What it was measured on.
        found: The comparison, as :meth:`powergrad.lab.stats.Comparison.to_dict` has it.
    """

    study: str
    arm: str
    methods: frozenset[str] | None
    norm: str
    is_grid: bool
    rates: str
    on: str
    found: Mapping[str, Any]

    @property
    def cells(self) -> tuple[str, ...]:
        """Study, arm, what it was measured on, rates, n, difference with interval, and verdict."""
        low, high = self.found["interval"]
        difference = f"{self.found['difference']:+.2f} ({low:+.2f} to {high:+.2f})"
        told = (str(self.found["n"]), difference, self.found["verdict"])
        return (f"`{self.study}`", self.arm, self.on, self.rates, *told)


def find_all(evidence: Evidence, studies: Sequence[Study]) -> list[Finding]:
    """Every comparison of every study whose baseline is plain cross-entropy."""
    return [*_of_the_paper(evidence), *_of_others(studies)]


def rates_of(about: Mapping[str, Any]) -> str:
    """How a study's learning rates were chosen: for every arm alike, or for one or none."""
    tuned = about.get("tuning", {}).get("arms", ())
    return "tuned" if len(tuned) > 1 else "one for all"


def methods_of(changes: Mapping[str, Any]) -> frozenset[str] | None:
    """What the paper calls the changes of an arm.

    Example:
        >>> sorted(methods_of({"loss.alpha": 0.25, "clip.agc": 0.2, "optimizer.lr": 0.1}))
        ['AGC', 'PGT']
        >>> methods_of({"model.head_scale": 0.25}) is None
        True
    """
    if not set(changes) <= set(METHODS):
        return None
    return frozenset(name for key in changes if (name := METHODS[key]) is not None)


def _of_the_paper(evidence: Evidence) -> Iterator[Finding]:
    for study in evidence.measurements:
        first = study.experiment.rows[0].recipe
        for arm in study.arms:
            compared, row = study.comparison(arm), study.experiment.row(arm)
            if compared is not None:
                yield Finding(
                    study.stem.name,
                    f"{row.id} {arm}",
                    methods_of(changes_of(row.recipe, first)),
                    study.about["recipe"]["model"]["norm"],
                    bool(study.experiment.grid),
                    rates_of(study.about),
                    study.describe(arm),
                    compared.to_dict(),
                )


def _of_others(studies: Sequence[Study]) -> Iterator[Finding]:
    for study in studies:
        about = study.about
        if methods_of(about["changes"][about["baseline"]]) != frozenset():
            continue
        for each in about["comparisons"]:
            yield Finding(
                study.stem.name,
                each["arm"],
                methods_of(about["changes"][each["arm"]]),
                about["recipe"]["model"]["norm"],
                about["kind"].startswith("sweep"),
                rates_of(about),
                study.describe(),
                each,
            )
