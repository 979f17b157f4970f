"""Shared code of the comparisons: tune the learning rate of each arm, then run fresh seeds.

Both arms (cross-entropy and PowerGrad Transform) try the same learning rates. The best one, by the
mean score of the tuning seeds on validation data, is run with fresh seeds and scored on test data.
Seeds are paired between the arms. The p-value is that of an exact sign-flip test; with n seeds it
is at least 2 / 2**n.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import mean, stdev

import torch

Scores = Mapping[str, float]


def arguments(description: str, alpha: float, seeds: int, steps: int) -> argparse.Namespace:
    """The command line of a comparison."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--alpha", type=float, default=alpha)
    parser.add_argument("--seeds", type=int, default=seeds, help="fresh seeds per arm")
    parser.add_argument("--tuning-seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--save", type=Path, help="write every run to this CSV file")
    args = parser.parse_args()
    torch.set_num_threads(1)  # these tensors are too small for more
    return args


def compare(
    run: Callable[[float, float, int, str], Scores],
    args: argparse.Namespace,
    rates: Sequence[float],
    metrics: Mapping[str, int],
    command: str,
) -> None:
    """Tune both arms, compare them and print the results.

    Args:
        run: ``run(alpha, rate, seed, split)`` trains and returns its scores on "val" or "test".
        args: What :func:`arguments` returned.
        rates: The learning rates that both arms try.
        metrics: The scores to report, each with 1 if higher is better, else -1. The first one is
            used for tuning.
        command: The command that is written to the CSV file.
    """
    first, sign = next(iter(metrics.items()))
    arms = {"CE": 1.0, "PGT": args.alpha}
    rows, begin = [], time.process_time()

    def record(arm: str, rate: float, seed: int, split: str) -> Scores:
        scores = run(arms[arm], rate, seed, split)
        rows.append({"arm": arm, "alpha": arms[arm], "rate": rate, "seed": seed, "split": split}
                    | {name: f"{value:.5g}" for name, value in scores.items()})  # fmt: skip
        return scores

    tuning = range(1000, 1000 + args.tuning_seeds)
    results: dict[str, list[Scores]] = {}
    for arm in arms:
        tuned = {r: mean(record(arm, r, s, "val")[first] for s in tuning) for r in rates}
        best = max(tuned, key=lambda rate: sign * tuned[rate])
        edge = " (at the edge of the grid)" if best in (rates[0], rates[-1]) else ""
        listed = ", ".join(f"{rate:g}: {score:.4f}" for rate, score in tuned.items())
        print(f"{arm:>3}  validation {first} by learning rate: {listed}; chosen {best:g}{edge}")
        results[arm] = [record(arm, best, seed, "test") for seed in range(args.seeds)]

    print(f"\nTest, {args.seeds} fresh seeds, PGT at alpha {args.alpha:g}")
    for name in metrics:
        ce, pgt = ([scores[name] for scores in results[arm]] for arm in arms)
        differences = [b - a for a, b in zip(ce, pgt, strict=True)]
        print(f"{name:>24}:  CE {spread(ce)}   PGT {spread(pgt)}   "
              f"difference {spread(differences)}, p = {sign_flip(differences):.3f}")  # fmt: skip
    seconds = time.process_time() - begin
    print(f"{len(rows)} runs in {seconds:.0f} s of CPU time")
    if args.save:
        save(args.save, rows, {"command": command})


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation."""
    return f"{mean(values):.4f} ± {stdev(values) if len(values) > 1 else float('nan'):.4f}"


def sign_flip(differences: Sequence[float]) -> float:
    """The fraction of sign patterns whose mean is at least as far from 0."""
    observed = abs(sum(differences)) * (1 - 1e-9)
    flips = itertools.product((1, -1), repeat=len(differences))
    sums = [abs(sum(s * d for s, d in zip(f, differences, strict=True))) for f in flips]
    return sum(total >= observed for total in sums) / len(sums)


def save(path: Path, rows: Sequence[Mapping[str, object]], conditions: dict[str, object]) -> None:
    """Write the runs and their conditions."""
    conditions |= {
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *conditions], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **conditions} for row in rows)
