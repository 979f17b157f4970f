"""The rows of docs/protocol.md: kept in results/decisive_REGIME.csv, and read from there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from powergrad.lab.files import csv_text, write_text
from reproduction.evidence import csv_rows

Rows = list[dict[str, str]]

# The regimes that the rule decides on, and those that are only described.
REGIMES = {"norm": "with batch normalisation", "plain": "without normalisation"}
FURTHER = {
    "tiny": "Tiny-ImageNet, with batch normalisation",
    "cifar": "CIFAR-10, without normalisation",
}
FILES = {
    "norm": "fashion_norm",
    "plain": "fashion_plain",
    "tiny": "tiny_norm",
    "cifar": "cifar_plain",
}
RECIPES = {regime: Path(__file__).with_name(f"{name}.yaml") for regime, name in FILES.items()}
FINALS = 3  # seeds per repeat
ABOUT = ("arm", "seed", "run", "repeat", "commit", "phase")


def collect(runs: Path, results: Path) -> list[Path]:
    """Copy the rows of all studies to `results`; values that are there already stay."""
    written = []
    for regime in (*REGIMES, *FURTHER, "null", "pilot-norm", "pilot-plain"):
        study = runs / f"decisive-{regime}" / "study.csv"
        path = results / f"decisive_{regime.replace('-', '_')}.csv"
        if not study.is_file():
            continue
        rows = {row["run"]: row for row in csv_rows(path)}
        for row in csv_rows(study):
            known = {key: value for key, value in rows.get(row["run"], {}).items() if value}
            rows[row["run"]] = {**row, **known}
        columns = dict.fromkeys([*ABOUT, *(key for row in rows.values() for key in row)])
        order = sorted(
            rows.values(), key=lambda r: (r["phase"], int(r["repeat"] or 999), r["arm"], r["run"])
        )
        write_text(path, csv_text(list(columns), order))
        written.append(path)
    return written


def read(results: Path, regime: str) -> Rows:
    """The rows of a regime."""
    return csv_rows(results / f"decisive_{regime}.csv")


def chance(row: Mapping[str, str]) -> float:
    """The accuracy of guessing in a run, in per cent."""
    return 100 / float(row["classes"])


def units(rows: Rows, arm: str) -> dict[int, float]:
    """The mean test accuracy of each complete repeat of an arm.

    A run that diverged counts as chance accuracy.
    """
    repeats: dict[int, list[float]] = {}
    for row in rows:
        if row["phase"] == "final" and row["arm"] == arm and row["repeat"]:
            value = chance(row) if row["diverged"] == "True" else float(row["test_accuracy"])
            repeats.setdefault(int(row["repeat"]), []).append(value)
    return {n: sum(v) / len(v) for n, v in sorted(repeats.items()) if len(v) == FINALS}


def differences(rows: Rows, arm: str, baseline: str) -> list[float]:
    """Arm minus baseline in every repeat that both have."""
    a, b = units(rows, arm), units(rows, baseline)
    return [a[repeat] - b[repeat] for repeat in a if repeat in b]
