"""How far the probabilities of networks trained with PGT can be trusted, read in four ways.

python benchmarks/calibration.py

Eight seeds of the recipe `digits`, with PGT at the alpha of `powergrad compare` and with plain
cross-entropy. A fifth of the training data is held out, and the temperature fitted there; figures
are of the test set. After `fold_alpha` the network is run again, and read by its own softmax.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness

from powergrad import fold_alpha
from powergrad.calibration import fit_temperature, reliability
from powergrad.lab.trainer.export import Answers, answers, measures, open_trained
from powergrad.lab.trainer.recipe import load_recipe
from powergrad.lab.trainer.training import train

ARMS = {"CE": 1.0, "PGT": 0.25}
SEEDS = range(8)
HOLD_OUT = 0.2
PATH = harness.RESULTS / "calibration_digits.csv"


def scores(found: Answers, temperature: float) -> dict[str, float]:
    """What a card has, and the mean confidence in percent: above the accuracy is overconfident."""
    whole = reliability(*found, bins=1, temperature=temperature)
    confidence = 100 * whole.confidence.item()
    return {"confidence": confidence, **measures(found, temperature=temperature)}


def read(arm: str, alpha: float, seed: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Train a network; a row for each way of reading it."""
    changes = {"loss.alpha": alpha, "seed": seed, "data.hold_out": HOLD_OUT}
    recipe = load_recipe("digits", {**changes, "machine.threads": 1, "machine.keep_best": False})
    train(recipe, folder)
    trained = open_trained(folder)
    data = recipe.load_data()
    network = trained.network(data)
    found = answers(network, trained, data)
    temperatures = {"T = 1": 1.0, "T = 1/alpha": 1 / alpha, "T fitted": fit_temperature(*found.fit)}
    shared = {"arm": arm, "alpha": alpha, "seed": seed}
    counts = {"fitted_on": len(found.fit.labels), "test_images": len(found.report.labels)}
    for reading, t in temperatures.items():
        told = {"reading": reading, "temperature": t, **scores(found.report, t)}
        yield {**shared, **told, **counts}
    fold_alpha(None, alpha, model=network)
    again = answers(network, trained, data).report
    yield {**shared, "reading": "fold_alpha", "temperature": 1.0, **scores(again, 1.0), **counts}


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for arm, alpha in ARMS.items():
            for seed in SEEDS:
                rows += read(arm, alpha, seed, Path(scratch) / f"{arm}-{seed}")
                print(arm, seed, *(f"{row['ece_width']:.4f}" for row in rows[-4:]), flush=True)
    shared = {"command": "python benchmarks/calibration.py", **harness.conditions()}
    with PATH.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *shared], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **shared} for row in rows)
    print(f"wrote {PATH.relative_to(harness.ROOT)}")


if __name__ == "__main__":
    main()
