"""The experiment of docs/protocol-2.md: does PGT train where cross-entropy dies?

python -m reproduction.robust pilot [FOLDER]  cross-entropy alone at 15 points, tested every epoch
python -m reproduction.robust run [FOLDER]    trains what is missing; rows go to results/robust.csv
python -m reproduction.robust power           simulates what the rule can find
python -m reproduction.robust                 prints what the rule says

A run in FOLDER (by default runs/robust) that was interrupted goes on from its checkpoint.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from scipy import stats

from powergrad.lab.environment import commit_of
from powergrad.lab.figures import COLOURS, save
from powergrad.lab.files import csv_text, write_text
from powergrad.lab.trainer.recipe import load_recipe
from powergrad.lab.trainer.training import train
from reproduction.decisive.findings import Findings
from reproduction.decisive.points import paired_points
from reproduction.decisive.rule import holm
from reproduction.evidence import RESULTS, csv_rows
from reproduction.marks import markdown_table

RECIPE = Path(__file__).parent / "decisive" / "fashion_plain.yaml"
ROWS, PILOT = RESULTS / "robust.csv", RESULTS / "robust_pilot.csv"
RATES, DECAYS, BATCHES = (0.05, 0.8), (1e-5, 3e-3), (64, 256, 1024)
POINTS, PILOT_POINTS, NULL_POINTS = 128, 15, 64
EPOCHS = 6
ALPHA, CLIP = 0.25, 0.04
LEARNED = 30.0  # per cent of test accuracy
LEVEL = 0.05
TITLES = {
    "ce": "cross-entropy",
    "pgt": "PGT",
    "head-lr": "PGT's head rate only",
    "agc": "AGC",
    "ce-again": "cross-entropy, other seeds",
    "pgt-same-rate": "PGT, same rate",
}
ARMS = tuple(TITLES)

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
    rows = csv_rows(path)
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


def pair(rows: Sequence[Row], first: str, second: str) -> list[tuple[Row, Row]]:
    """The rows of two arms at the same points."""
    of = {arm: {r["point"]: r for r in rows if r["arm"] == arm} for arm in (first, second)}
    return [(row, of[second][point]) for point, row in of[first].items() if point in of[second]]


def compare(rows: Sequence[Row], first: str, second: str) -> Pairs:
    """Failures of two arms at the same points."""
    fails = [(failed(a), failed(b)) for a, b in pair(rows, first, second)]
    return Pairs(
        len(fails),
        sum(a for a, _ in fails),
        sum(b for _, b in fails),
        sum(a and not b for a, b in fails),
        sum(b and not a for a, b in fails),
    )


def fewer_dead(rows: Sequence[Row], first: str, second: str) -> tuple[int, int, float]:
    """At points where both trained: where the first, and the second, has fewer dead filters; p."""
    both = [(a, b) for a, b in pair(rows, first, second) if not failed(a) and not failed(b)]
    gaps = [float(a["dead_units"]) - float(b["dead_units"]) for a, b in both]
    wins = sum(gap < 0 for gap in gaps), sum(gap > 0 for gap in gaps)
    return *wins, mcnemar(*wins)


def conclude(rows: Sequence[Row]) -> str:
    """What the rule says; before all points have been run, counts and nothing else."""
    primary = compare(rows, "ce", "pgt")
    head_ce, pgt_head = compare(rows, "ce", "head-lr"), compare(rows, "head-lr", "pgt")
    null = compare(rows, "ce", "ce-again")
    *dead, dead_p = fewer_dead(rows, "pgt", "ce")
    planned = len(jobs())
    is_complete = len(rows) == planned
    adjusted = holm({"head": head_ce.p, "pgt": pgt_head.p, "dead": dead_p})
    if not is_complete:
        verdict = f"Not decided yet: {len(rows)} of {planned} runs have been made"
    elif primary.p < LEVEL:
        fewer = primary.second_failed < primary.first_failed
        verdict = f"PGT fails at {'fewer' if fewer else 'more'} points than cross-entropy"
    else:
        verdict = "No difference between the failures of PGT and of cross-entropy was shown"

    def tested(p: float, test: str = "by Holm's method, ") -> str:
        return f" ({test}p = {p:.4f})" if is_complete else ""

    return (
        f"**{verdict}.** Of {primary.points} points, cross-entropy fails at "
        f"{primary.first_failed} and PGT at {primary.second_failed}; only cross-entropy fails at "
        f"{primary.first_only}, only PGT at {primary.second_only}"
        f"{tested(primary.p, 'exact McNemar test, ')}. Of cross-entropy and head-lr, only the "
        f"first fails at {head_ce.first_only} points, only the second at {head_ce.second_only}"
        f"{tested(adjusted['head'])}; of head-lr and PGT, only the first at "
        f"{pgt_head.first_only}, only the second at {pgt_head.second_only}"
        f"{tested(adjusted['pgt'])}. Where PGT and cross-entropy both train, PGT has fewer dead "
        f"filters at {dead[0]} points and more at {dead[1]}{tested(adjusted['dead'])}. As a check, "
        f"cross-entropy was repeated with other seeds: of {null.points} points, only the first "
        f"fails at {null.first_only}, only the second at {null.second_only}{tested(null.p, '')}."
    )


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
        cells.append((TITLES[arm], str(len(own)), str(sum(map(failed, own))), *shown))
    head = ("arm", "points", "failed", *(f"largest rate, batch {b}" for b in BATCHES))
    return markdown_table(head, cells)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Where each arm trained: a map of learning rate and weight decay, one panel per arm."""
    arms = [arm for arm in ARMS if arm != "ce-again"]
    figure, panels = plt.subplots(
        1, len(arms), figsize=(2.3 * len(arms), 3.2), sharex=True, sharey=True, layout="constrained"
    )
    for axes, arm in zip(panels, arms, strict=True):
        own = [row for row in rows if row["arm"] == arm]
        for batch, marker in zip(BATCHES, ("o", "s", "^"), strict=True):
            for trains, look in ((True, {"mfc": COLOURS[0]}), (False, {"mfc": "none"})):
                of = [r for r in own if r["batch"] == str(batch) and failed(r) != trains]
                places = ([float(r[key]) for r in of] for key in ("rate", "decay"))
                colour = COLOURS[0] if trains else COLOURS[4]
                label = f"batch {batch} {'trained' if trains else 'failed'}"
                axes.plot(*places, marker, ms=5, mec=colour, label=label, **look)
        trained = sum(not failed(row) for row in own)
        axes.set_title(f"{TITLES[arm]}\n{trained} of {len(own)} trained", fontsize="small")
        axes.set(xscale="log", yscale="log", xlim=(0.9 * RATES[0], RATES[1] / 0.9))
        axes.set_ylim(0.8 * DECAYS[0], DECAYS[1] / 0.8)
        axes.set_xticks([0.1, 0.4], ["0.1", "0.4"], minor=False)
        axes.tick_params(axis="x", which="minor", labelbottom=False)
    panels[0].set_ylabel("weight decay of the backbone")
    panels[len(arms) // 2].set_xlabel("learning rate of the backbone")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    save(figure, path)


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
        print(conclude(rows := csv_rows(ROWS)), table(rows), sep="\n\n")


if __name__ == "__main__":
    main(sys.argv[1:])
