"""How often cross-entropy is called better or worse than itself, when both are tuned.

python benchmarks/self_comparison.py              train what is missing, then draw studies
python benchmarks/self_comparison.py --draw       draw studies from the runs in results/

Real trainings of the recipe `digits`: 96 points of learning rate and weight decay (the space of
docs/protocol.md), each with 4 runs on held-out data for the tuning; the 64 best of them also with 6
runs on all training data. They are trained once, into results/self_comparison.csv, with one row per
run; a second start continues. Each study is then drawn from them: 8 repeats of 6 points, both arms
with the same points but with other runs, and the winner of each repeat with 3 final runs, also
others for the two arms. Nothing differs between the arms, so better or worse is a false verdict.
For comparison, studies with one tuning are drawn as well: both arms choose once among the same 6
points, with 2 tuning runs per point, and the two winners are compared over 8 or 16 final seeds.
That is more than the 6 runs of a point, so these final runs are simulated (`final_runs`).
The shares are written to results/bench_self_comparison.csv, with one row per kind of study.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import numpy as np
from numpy.typing import NDArray

from powergrad.lab.files import csv_text, write_text
from powergrad.lab.stats import VERDICTS, Design, compare
from powergrad.lab.study.space import Space
from powergrad.lab.trainer.recipe import load_recipe
from powergrad.lab.trainer.training import train

PATH = harness.RESULTS / "self_comparison.csv"
TUNE = ["lr=0.006:0.4", "wd=1e-5:3e-2"]
POINTS, TUNING, KEPT, FINAL = 96, 4, 64, 6
REPEATS, TRIALS, SEEDS = 8, 6, 3
ONE_TUNING_RUNS, ONE_TUNING_SEEDS = 2, (8, 16)  # per point and arm in the tuning; of each winner
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
    metrics, diverged = result.metrics, result.about["diverged"]
    accuracy = 10.0 if diverged else metrics["test_accuracy"]
    return {**job, "test_accuracy": accuracy, "diverged": diverged,
            "seconds": round(metrics["seconds"] or 0, 2), "commit": harness.commit()}  # fmt: skip


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
                write_text(PATH, csv_text(COLUMNS, rows))
                print(f"{len(rows)} runs, {row['phase']} {row['test_accuracy']:.2f}", flush=True)
    return rows


Units = dict[str, dict[int, float]]
Accuracies = dict[int, list[float]]


def verdicts(draw: Callable[[np.random.Generator], Units | None]) -> dict[str, float]:
    """The share of each verdict in the studies that `draw` returns."""
    rng = np.random.default_rng(0)
    counts: Counter[str] = Counter()
    while counts.total() < STUDIES:
        units = draw(rng)
        if units is None:  # a winner outside of the best points: about one study in a hundred
            continue
        design = Design((len(units["CE"]),))
        (found,) = compare(units, "CE", margin=0.5, design=design, step=0.0)
        counts[found.verdict] += 1
    return {verdict: counts[verdict] / STUDIES for verdict in VERDICTS}


def with_repeats(rng: np.random.Generator, tuning: Accuracies, final: Accuracies) -> Units | None:
    """A study that tunes both arms anew in every repeat."""
    units: Units = {"CE": {}, "CE again": {}}
    tried = rng.permutation(POINTS)[: REPEATS * TRIALS].reshape(REPEATS, TRIALS)
    for repeat, points_tried in enumerate(tried):
        winners = _winners(rng, tuning, points_tried, runs=1)
        finals = {int(p): rng.permutation(FINAL) for p in points_tried}
        for place, (arm, winner) in enumerate(zip(units, winners, strict=True)):
            if winner not in final:
                return None
            own = finals[winner][SEEDS * place : SEEDS * (place + 1)]
            units[arm][repeat] = float(np.mean([final[winner][i] for i in own]))
    return units


def final_runs(final: Accuracies) -> dict[int, NDArray[np.float64]]:
    """What a simulated final run of each point can be.

    A final run is the expected accuracy of its point plus a residual of one of the point's runs.
    The means of the points vary more than their expectations do, by the noise of 6 runs. So they
    are moved towards their common mean until only the variance of the expectations is left.
    """
    means = {point: float(np.mean(values)) for point, values in final.items()}
    centre, spread = np.mean(list(means.values())), np.var(list(means.values()), ddof=1)
    noise = np.mean([np.var(values, ddof=1) for values in final.values()]) / FINAL
    shrink = np.sqrt(max(0.0, 1 - noise / spread))
    widen = np.sqrt(FINAL / (FINAL - 1))
    return {
        point: centre + shrink * (mean - centre) + widen * (np.array(final[point]) - mean)
        for point, mean in means.items()
    }


def with_one_tuning(
    rng: np.random.Generator,
    tuning: Accuracies,
    finals: dict[int, NDArray[np.float64]],
    seeds: int,
) -> Units | None:
    """A study that tunes each arm once; its final runs are drawn from those of `final_runs`."""
    winners = _winners(rng, tuning, rng.permutation(POINTS)[:TRIALS], runs=ONE_TUNING_RUNS)
    units: Units = {}
    for arm, winner in zip(("CE", "CE again"), winners, strict=True):
        if winner not in finals:
            return None
        units[arm] = dict(enumerate(rng.choice(finals[winner], seeds).tolist()))
    return units


def _winners(
    rng: np.random.Generator, tuning: Accuracies, tried: NDArray[np.int64], runs: int
) -> list[int]:
    """The best of the points `tried` for each of two arms, by other tuning runs for each."""
    order = {int(p): rng.permutation(TUNING) for p in tried}

    def mean(point: int, place: int) -> float:
        own = order[point][runs * place : runs * (place + 1)]
        return float(np.mean([tuning[point][i] for i in own]))

    return [max(order, key=lambda p: mean(p, place)) for place in (0, 1)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--draw", action="store_true", help="train nothing")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    rows = read() if given.draw else fill(given.processes)
    tuning, final = accuracies(rows, "tuning"), accuracies(rows, "final")
    about = {"runs": len(rows), "studies": STUDIES, "trials": TRIALS}
    repeats = {"repeats": REPEATS, "tuning_seeds": 1, "seeds": SEEDS}
    table = [{**about, **repeats, **verdicts(lambda rng: with_repeats(rng, tuning, final))}]
    finals = final_runs(final)
    for seeds in ONE_TUNING_SEEDS:
        one = {"repeats": 1, "tuning_seeds": ONE_TUNING_RUNS, "seeds": seeds}
        shares = verdicts(lambda rng, n=seeds: with_one_tuning(rng, tuning, finals, n))
        table.append({**about, **one, **shares})
    harness.save("self_comparison", table)
    for row in table:
        false = 100 * (row["better"] + row["worse"])
        print(f"{row['repeats']} repeats, {row['seeds']} seeds: better or worse {false:.1f}%")


if __name__ == "__main__":
    main()
