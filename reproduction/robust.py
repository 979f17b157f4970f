"""The experiment of docs/protocol-2.md: does PGT train where cross-entropy dies?

python -m reproduction.robust pilot [FOLDER]  cross-entropy alone at 15 points, tested every epoch
python -m reproduction.robust run [FOLDER]    trains what is missing; rows go to results/robust.csv
python -m reproduction.robust power           simulates what the rule can find
python -m reproduction.robust                 prints what the rule says

A run in FOLDER (by default runs/robust) that was interrupted goes on from its checkpoint.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from powergrad.lab.environment import commit_of
from powergrad.lab.files import csv_text, write_text
from powergrad.lab.trainer.recipe import load_recipe
from powergrad.lab.trainer.training import train
from reproduction.decisive.findings import Findings
from reproduction.decisive.points import paired_points
from reproduction.decisive.rule import holm
from reproduction.evidence import RESULTS
from reproduction.marks import markdown_table

RECIPE = Path(__file__).parent / "decisive" / "fashion_plain.yaml"
ROWS, PILOT = RESULTS / "robust.csv", RESULTS / "robust_pilot.csv"
RATES, DECAYS, BATCHES = (0.05, 0.8), (1e-5, 3e-3), (64, 256, 1024)
POINTS, PILOT_POINTS, NULL_POINTS = 128, 15, 64
EPOCHS = 6
ALPHA, CLIP = 0.25, 0.04
LEARNED = 30.0  # per cent of test accuracy
LEVEL = 0.05
ARMS = ("ce", "pgt", "head-lr", "agc", "ce-again", "pgt-same-rate")

Row = Mapping[str, str]


class Point(NamedTuple):
    """A training: rate and decay of the backbone, and the batch size."""

    rate: float
    decay: float
    batch: int


def sobol_points(count: int, seed: int) -> list[Point]:
    """The first points of a scrambled Sobol sequence; one coordinate chooses the batch size."""
    sequence = stats.qmc.Sobol(3, rng=seed).random(2 ** math.ceil(math.log2(count)))
    return [
        Point(
            float(f"{_log_uniform(RATES, u):.4g}"),
            float(f"{_log_uniform(DECAYS, v):.4g}"),
            BATCHES[int(len(BATCHES) * w)],
        )
        for u, v, w in sequence[:count]
    ]


def _log_uniform(bounds: tuple[float, float], u: float) -> float:
    low, high = bounds
    return low * (high / low) ** u


def changes_of(arm: str, point: Point) -> dict[str, Any]:
    """What an arm changes of the recipe at a point; the backbone trains alike in all arms.

    By the identity (docs/theory.md), PGT at ``alpha * rate`` and ``decay / alpha`` gives the
    backbone the point's rate and decay. Only ``pgt-same-rate`` is PGT switched on as a user would.
    """
    rate, decay = point.rate, point.decay
    changes: dict[str, Any] = {"train.batch_size": point.batch}
    if arm == "pgt":
        rate, decay = ALPHA * rate, decay / ALPHA
    if arm.startswith("pgt"):
        changes["loss.alpha"] = ALPHA
    if arm == "head-lr":
        changes["optimizer.head.lr"] = ALPHA**2
    if arm == "agc":
        changes["clip.agc"] = CLIP
    return changes | {"optimizer.lr": rate, "optimizer.weight_decay": decay}


# Running --------------------------------------------------------------------------------------


def jobs() -> list[tuple[int, str, Point]]:
    """All runs: point by point, so that what has been run can be compared at any time."""
    points = sobol_points(POINTS, seed=2)
    return [
        (number, arm, point)
        for number, point in enumerate(points)
        for arm in ARMS
        if arm != "ce-again" or number < NULL_POINTS
    ]


def run_missing(folder: Path, path: Path, jobs: Sequence[tuple[int, str, Point]]) -> None:
    """Train every run without a row; each row is written when its run ends."""
    commit = commit_of(Path(__file__))
    if commit is None or commit.endswith("-dirty"):
        raise SystemExit("Commit all changes first: every row names the commit that made it.")
    rows = read(path)
    known = {(int(row["point"]), row["arm"]) for row in rows}
    for number, arm, point in jobs:
        if (number, arm) in known:
            continue
        seed = (4000 if path == PILOT else 5000) + number + (1000 if arm == "ce-again" else 0)
        changes = changes_of(arm, point) | {"seed": seed, "train.epochs": EPOCHS}
        # The pilot is tested after each epoch, to see when failures are decided.
        changes |= {"train.test_every": 1 if path == PILOT else EPOCHS, "monitor.every": 0}
        changes |= {"machine.threads": 1, "machine.keep_best": False}
        run = train(load_recipe(RECIPE, changes), folder / f"{number:03}-{arm}")
        result = run.result()
        assert result is not None
        by_epoch = [epoch.get("test_accuracy") for epoch in run.metrics()]
        row = {
            "point": number,
            "arm": arm,
            **point._asdict(),
            "seed": seed,
            "commit": commit,
            "diverged": result.about["diverged"],
            "epochs": result.about["epoch"],
            **{key: result.metrics[key] for key in ("test_accuracy", "train_loss", "dead_units")},
            "by_epoch": " ".join(f"{a:.2f}" for a in by_epoch if a is not None),
            "seconds": round(float(result.metrics["seconds"] or 0), 1),
        }
        rows.append({key: str(value) for key, value in row.items()})
        write_text(path, csv_text(list(row), rows))
        print(f"{number:03} {arm:14} {point} {row['test_accuracy']}", flush=True)


def read(path: Path) -> list[Row]:
    """The rows of a file, or none."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# The rule -------------------------------------------------------------------------------------


def failed(row: Row) -> bool:
    """Whether the loss became infinite or NaN, or the test accuracy stayed below the limit."""
    return row["diverged"] == "True" or not float(row["test_accuracy"]) >= LEARNED


def mcnemar(first_only: int, second_only: int) -> float:
    """The exact two-sided p of McNemar's test, of points where only one of two arms failed.

    Example:
        >>> mcnemar(1, 7)
        0.0703125
    """
    both = first_only + second_only
    return float(stats.binomtest(first_only, both).pvalue) if both else 1.0


class Pairs(NamedTuple):
    """Two arms at the points that both have."""

    points: int
    first_failed: int
    second_failed: int
    first_only: int  # points where only the first failed
    second_only: int

    @property
    def p(self) -> float:
        """Of McNemar's test."""
        return mcnemar(self.first_only, self.second_only)


def compare(rows: Sequence[Row], first: str, second: str) -> Pairs:
    """Failures of two arms at the same points."""
    of = {arm: {r["point"]: r for r in rows if r["arm"] == arm} for arm in (first, second)}
    both = [p for p in of[first] if p in of[second]]
    fails = [(failed(of[first][p]), failed(of[second][p])) for p in both]
    return Pairs(
        len(both),
        sum(a for a, _ in fails),
        sum(b for _, b in fails),
        sum(a and not b for a, b in fails),
        sum(b and not a for a, b in fails),
    )


def fewer_dead(rows: Sequence[Row], first: str, second: str) -> tuple[int, int, float]:
    """At points where both trained: where the first, and the second, has fewer dead filters; p."""
    of = {
        arm: {r["point"]: float(r["dead_units"]) for r in rows if r["arm"] == arm and not failed(r)}
        for arm in (first, second)
    }
    gaps = [of[first][p] - of[second][p] for p in of[first] if p in of[second]]
    wins = sum(gap < 0 for gap in gaps), sum(gap > 0 for gap in gaps)
    return *wins, mcnemar(*wins)


def conclude(rows: Sequence[Row]) -> str:
    """What the rule says, and the table of all arms."""
    primary = compare(rows, "ce", "pgt")
    if primary.points < POINTS:
        verdict = f"not decided: {primary.points} of {POINTS} points have been run"
    elif primary.p < LEVEL:
        fewer = primary.second_failed < primary.first_failed
        verdict = f"PGT fails at {'fewer' if fewer else 'more'} points than cross-entropy"
    else:
        verdict = "no difference in failures was shown"
    head_ce, pgt_head = compare(rows, "ce", "head-lr"), compare(rows, "head-lr", "pgt")
    *dead, dead_p = fewer_dead(rows, "pgt", "ce")
    adjusted = holm({"head": head_ce.p, "pgt": pgt_head.p, "dead": dead_p})
    null = compare(rows, "ce", "ce-again")
    lines = [
        f"**{verdict}** (only CE failed: {primary.first_only}, only PGT failed: "
        f"{primary.second_only}, of {primary.points}; exact McNemar p = {primary.p:.4f}).",
        f"head-lr against CE: only CE failed {head_ce.first_only}, only head-lr "
        f"{head_ce.second_only}; Holm p = {adjusted['head']:.4f}.",
        f"PGT against head-lr: only head-lr failed {pgt_head.first_only}, only PGT "
        f"{pgt_head.second_only}; Holm p = {adjusted['pgt']:.4f}.",
        f"Dead filters where both trained: PGT has fewer at {dead[0]}, CE at {dead[1]} points; "
        f"Holm p = {adjusted['dead']:.4f}.",
        f"Null, CE against CE with other seeds: {null.first_only} against {null.second_only} of "
        f"{null.points}; p = {null.p:.4f}.",
    ]
    return "\n\n".join([*lines, table(rows)])


def table(rows: Sequence[Row]) -> str:
    """Every arm: its failures, and the largest rate at which it trained, per batch size."""
    cells = []
    for arm in ARMS:
        own = [row for row in rows if row["arm"] == arm]
        trained = [row for row in own if not failed(row)]
        largest = [
            max((float(r["rate"]) for r in trained if r["batch"] == str(batch)), default=0)
            for batch in BATCHES
        ]
        shown = [f"{rate:.3g}" if rate else "" for rate in largest]
        cells.append((arm, str(len(own)), str(sum(map(failed, own))), *shown))
    head = ("arm", "points", "failed", *(f"largest rate, batch {b}" for b in BATCHES))
    return markdown_table(head, cells)


def power(studies: int = 10_000, seed: int = 0) -> dict[int, float]:
    """The power of the primary test if points like those of the first experiment are so many.

    They are its 31 points without normalisation with rates of at least 0.0987, a third of its
    range, drawn with replacement. Half of the new range lies there.
    """
    points = paired_points(Findings.read(RESULTS).rows["plain"])
    fails = [(p.baseline is None, p.other is None) for p in points if p.lr >= 0.0987]
    pairs = np.array([(a and not b, b and not a) for a, b in fails])
    rng = np.random.default_rng(seed)
    found = {}
    for count in (POINTS // 4, POINTS // 2, POINTS):
        draws = pairs[rng.integers(len(pairs), size=(studies, count))].sum(1)
        found[count] = float(np.mean([mcnemar(int(a), int(b)) < LEVEL for a, b in draws]))
    return found


def main(arguments: list[str]) -> None:
    """Run, simulate, or print what the rule says."""
    command, *rest = arguments or [""]
    folder = Path(rest[0]) if rest else RESULTS.parent / "runs" / "robust"
    if command == "pilot":
        points = enumerate(sobol_points(PILOT_POINTS, seed=1))
        run_missing(folder / "pilot", PILOT, [(n, "ce", point) for n, point in points])
    elif command == "run":
        run_missing(folder, ROWS, jobs())
    elif command == "power":
        print(power())
    else:
        print(conclude(read(ROWS)))


if __name__ == "__main__":
    main(sys.argv[1:])
