"""How often cross-entropy is called better or worse than itself, when both are tuned.

python benchmarks/self_comparison.py              train what is missing, then draw studies
python benchmarks/self_comparison.py --draw       draw studies from the runs in results/

Real trainings of the recipe `digits`: 96 points of learning rate and weight decay (the space of
docs/protocol.md), each with 4 runs on held-out data for the tuning; the 64 best of them also with 6
runs on all training data. They are trained once, into results/self_comparison.csv, with one row per
run; a second start continues. Each study is then drawn from them: 8 repeats of 6 points, both arms
with the same points but with other runs, and the winner of each repeat with 3 final runs, also
others for the two arms. Nothing differs between the arms, so better or worse is a false verdict.
The shares are written to results/bench_self_comparison.csv.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import numpy as np

from powergrad.lab.config import load_recipe
from powergrad.lab.files import write_csv
from powergrad.lab.stats import VERDICTS, Design, compare
from powergrad.lab.study.space import Space
from powergrad.lab.train import train

PATH = harness.RESULTS / "self_comparison.csv"
TUNE = ["lr=0.006:0.4", "wd=1e-5:3e-2"]
POINTS, TUNING, KEPT, FINAL = 96, 4, 64, 6
REPEATS, TRIALS, SEEDS = 8, 6, 3
STUDIES = 2_000
COLUMNS = ("point", "optimizer.lr", "optimizer.weight_decay", "phase", "seed", "test_accuracy",
           "diverged", "seconds", "commit")  # fmt: skip


def points() -> list[dict[str, Any]]:
    values = {"optimizer.lr": 0.05, "optimizer.weight_decay": 5e-4}
    return Space.parse(TUNE, values, ["CE"], POINTS).points("CE", 0)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One training; its row."""
    hold_out = 0.2 if job["phase"] == "tuning" else 0.0
    keys = ("optimizer.lr", "optimizer.weight_decay", "seed")
    changes = {key: job[key] for key in keys}
    changes |= {"data.hold_out": hold_out, "machine.threads": 1, "machine.keep_best": False}
    with tempfile.TemporaryDirectory() as scratch:
        result = train(load_recipe("digits", changes), Path(scratch) / "run").result()
    assert result is not None
    accuracy = 10.0 if result["diverged"] else result["test_accuracy"]
    return {**job, "test_accuracy": accuracy, "diverged": result["diverged"],
            "seconds": round(result["seconds"], 2), "commit": harness.commit()}  # fmt: skip


def read() -> list[dict[str, Any]]:
    if not PATH.exists():
        return []
    with PATH.open(newline="") as file:
        rows = list(csv.DictReader(file))
    numbers = ("point", "seed", "test_accuracy", "optimizer.lr", "optimizer.weight_decay")
    return [{**row, **{key: float(row[key]) for key in numbers}} for row in rows]


def accuracies(rows: list[dict[str, Any]], phase: str) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for row in rows:
        if row["phase"] == phase:
            found.setdefault(int(row["point"]), []).append(row["test_accuracy"])
    return found


def jobs(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """What is still to be trained: first the tuning of every point, then the finals of the best."""
    done = {(int(row["point"]), row["phase"], int(row["seed"])) for row in rows}
    tuning = accuracies(rows, "tuning")
    is_tuned = len(tuning) == POINTS and all(len(v) == TUNING for v in tuning.values())
    best = sorted(tuning, key=lambda p: -float(np.mean(tuning[p])))[:KEPT] if is_tuned else []
    for place, point in enumerate(points()):
        wanted = [("tuning", 1000 + seed) for seed in range(TUNING)]
        wanted += [("final", seed) for seed in range(FINAL) if place in best]
        for phase, seed in wanted:
            if (place, phase, seed) not in done:
                yield {"point": place, **point, "phase": phase, "seed": seed}


def fill(processes: int) -> list[dict[str, Any]]:
    """Train what is missing; rows are saved as they arrive."""
    rows = read()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        while missing := list(jobs(rows)):
            for row in pool.imap_unordered(run, missing):
                rows.append(row)
                write_csv(PATH, COLUMNS, rows)
                print(f"{len(rows)} runs, {row['phase']} {row['test_accuracy']:.2f}", flush=True)
    return rows


def draw(rows: list[dict[str, Any]], studies: int = STUDIES) -> dict[str, float]:
    """The share of studies with each verdict."""
    tuning, final = accuracies(rows, "tuning"), accuracies(rows, "final")
    rng = np.random.default_rng(0)
    verdicts: Counter[str] = Counter()
    while verdicts.total() < studies:
        units = _study(rng, tuning, final)
        if units is None:  # a winner outside of the best points: about one study in a hundred
            continue
        (found,) = compare(units, "CE", margin=0.5, design=Design((REPEATS,)), step=0.0)
        verdicts[found.verdict] += 1
    return {verdict: count / studies for verdict, count in verdicts.items()}


def _study(
    rng: np.random.Generator, tuning: dict[int, list[float]], final: dict[int, list[float]]
) -> dict[str, dict[int, float]] | None:
    units: dict[str, dict[int, float]] = {"CE": {}, "CE again": {}}
    tried = rng.permutation(POINTS)[: REPEATS * TRIALS].reshape(REPEATS, TRIALS)
    for repeat, chosen in enumerate(tried):
        order = {int(p): rng.permutation(TUNING) for p in chosen}
        finals = {int(p): rng.permutation(FINAL) for p in chosen}
        for place, arm in enumerate(units):
            winner = max(order, key=lambda p: tuning[p][order[p][place]])
            if winner not in final:
                return None
            own = finals[winner][SEEDS * place : SEEDS * (place + 1)]
            units[arm][repeat] = float(np.mean([final[winner][i] for i in own]))
    return units


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--draw", action="store_true", help="train nothing")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    rows = read() if given.draw else fill(given.processes)
    shares = draw(rows)
    design = {"runs": len(rows), "repeats": REPEATS, "trials": TRIALS, "seeds": SEEDS}
    verdicts = {name: shares.get(name, 0.0) for name in VERDICTS}
    harness.save("self_comparison", [{**design, "studies": STUDIES, **verdicts}])
    print(f"better or worse {100 * (verdicts['better'] + verdicts['worse']):.1f}%, of {verdicts}")


if __name__ == "__main__":
    main()
