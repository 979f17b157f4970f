"""The rows of docs/protocol.md: kept in results/decisive_REGIME.csv, and read from there."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from powergrad.lab.files import csv_text, write_text
from powergrad.lab.study import load_study
from powergrad.lab.trainer.run_folder import Run
from powergrad.lab.words import slug

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
# What result.json has of the last step alone; the file study.csv leaves it out as well.
OF_LAST_STEP = {"format", "epoch", "step", "lr", "alpha", "gradient_norm", "clip_rate"}
OF_LAST_STEP |= {"images_per_second", "loss_scale"}


def collect(runs: Path, results: Path) -> list[Path]:
    """Copy the rows of all finished runs to `results`; values that are there already stay.

    Runs of a repeat that is not complete yet have no number of a repeat: they are only reused.
    """
    written = []
    for regime in (*REGIMES, *FURTHER, "null", "pilot-norm", "pilot-plain"):
        folder = runs / f"decisive-{regime}"
        if not folder.is_dir():
            continue
        path = results / f"decisive_{regime.replace('-', '_')}.csv"
        kept = _csv_rows(path)
        rows = {row["run"]: row for row in kept}
        study = load_study(folder).study
        arms = {slug(arm): arm for arm in study.arms} if study else {}
        for result in sorted(folder.glob("**/result.json")):
            name = str(result.parent.relative_to(folder))
            rows.setdefault(name, _row(name, result.parent, arms))
        for row in _csv_rows(folder / "study.csv"):  # adds the repeat and the tuned values
            known = {key: value for key, value in rows.get(row["run"], {}).items() if value != ""}
            rows[row["run"]] = {**row, **known, "arm": row["arm"]}
        columns = [*ABOUT, *(key for row in (*kept, *rows.values()) for key in row)]
        order = sorted(
            rows.values(), key=lambda r: (r["phase"], int(r["repeat"] or 999), r["arm"], r["run"])
        )
        write_text(path, csv_text(list(dict.fromkeys(columns)), order))
        written.append(path)
    return written


def _csv_rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _row(name: str, folder: Path, arms: Mapping[str, str]) -> dict[str, Any]:
    run = Run(folder)
    phase, _, last = name.rpartition("/")
    result = run.result()
    values = {**result.metrics, **result.about} if result else {}
    metrics = {key: value for key, value in values.items() if key not in OF_LAST_STEP}
    return {
        "arm": arms[last.rpartition("-seed")[0]],
        "seed": run.recipe().seed,
        "run": name,
        "repeat": "",
        "commit": run.environment().get("commit") or "",
        "phase": phase or "final",
        "optimizer.lr": run.recipe().optimizer.lr,
        "optimizer.weight_decay": run.recipe().optimizer.weight_decay,
        **metrics,
    }


def read(results: Path, regime: str) -> Rows:
    """The rows of a regime."""
    return _csv_rows(results / f"decisive_{regime}.csv")


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
