"""The data of the arms for the page: summaries, reliability, test examples, environments."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from powergrad import calibration
from powergrad.lab import stats
from powergrad.lab.report.norms import encode_norms, evenly_spaced
from powergrad.lab.report.runs import ShownRun, is_finite, try_read
from powergrad.lab.trainer.run_folder import COLUMNS as CURVES
from powergrad.lab.trainer.run_folder import Run

ROWS = 400  # the maximal number of rows of metrics.csv to show per run
BINS = 15  # bins of a reliability diagram
EXAMPLE_ARMS = 6  # the number of arms with test examples in the playground

Array = NDArray[np.float64]


def describe_arms(
    runs: Sequence[ShownRun],
    arms: Mapping[str, Mapping[str, Any]],
    notes: list[str],
    metrics: Sequence[str],
) -> dict[str, Any]:
    """The data of the runs for the page, by arm; remarks are appended to `notes`."""
    order = list(arms)
    for status in ("missing", "unfinished", "diverged"):  # failed runs are in the notes already
        if affected := [run for run in runs if run.status == status]:
            listed = ", ".join(f"{run.arm} seed {run.seed} ({run.note})" for run in affected[:8])
            more = f" and {len(affected) - 8} more" if len(affected) > 8 else ""
            count = "1 run is" if len(affected) == 1 else f"{len(affected)} runs are"
            notes.append(f"{count} {status}: {listed}{more}.")
    started = [run for run in runs if run.status != "missing"]
    norms, faults = encode_norms([run.folder for run in started])
    notes += faults
    if any(len(run.rows) > ROWS for run in runs):
        notes.append(f"Curves show {ROWS} epochs of each run.")
    return {
        "arms": [
            _arm(arm, changes, [run for run in runs if run.arm == arm], notes, metrics)
            for arm, changes in arms.items()
        ],
        "runs": [
            {
                "arm": order.index(run.arm),
                "seed": run.seed,
                "name": run.folder.name if run.status != "missing" else "",
                "alpha": run.alpha,
                "status": run.status,
                "note": run.note,
                "final": {name: run.final.get(name) for name in metrics},
                "curve": _curve(run.rows),
                "norms": norms.get(run.folder) if run.status != "missing" else None,
            }
            for run in runs
        ],
        "examples": _examples(runs, order),
        "classes": _classes(started, notes),
        "environments": _environments(started, notes),
    }


def _arm(
    arm: str,
    changes: Mapping[str, Any],
    runs: Sequence[ShownRun],
    notes: list[str],
    metrics: Sequence[str],
) -> dict[str, Any]:
    finished = [run for run in runs if run.status == "finished"]
    summary = {}
    for metric in metrics:
        values = [float(run.final[metric]) for run in finished if is_finite(run.final.get(metric))]
        if not values or metric == "diverged":
            continue
        several = len(values) > 1
        low, high = stats.t_interval(values) if several else (None, None)
        summary[metric] = {
            "mean": sum(values) / len(values),
            "sd": float(np.std(values, ddof=1)) if several else None,
            "low": low,
            "high": high,
            "n": len(values),
        }
    return {
        "name": arm,
        "changes": dict(changes),
        "alpha": runs[0].alpha if runs else None,
        "summary": summary,
        "reliability": _reliability(finished, notes),
    }


def _curve(rows: list[dict[str, float | None]]) -> dict[str, list[float | None]]:
    """The non-empty columns of metrics.csv, thinned out, with six digits."""
    kept = [rows[place] for place in evenly_spaced(len(rows), ROWS)]
    return {
        name: [_six_digits(row.get(name)) for row in kept]
        for name in CURVES
        if any(row.get(name) is not None for row in kept)
    }


def _reliability(runs: Sequence[ShownRun], notes: list[str]) -> dict[str, Any] | None:
    """The reliability diagrams of the test examples of an arm, over all seeds."""
    sums = {"plain": np.zeros((3, BINS)), "scaled": np.zeros((3, BINS))}
    for run in runs:
        outputs = run.outputs(notes)
        if outputs is None:
            continue
        for name, factor in (("plain", 1.0), ("scaled", run.alpha)):
            if factor == 0:  # all predictions would have the same confidence
                continue
            bins = calibration.reliability(*outputs, bins=BINS, temperature=1 / factor)
            sums[name] += [
                bins.count.numpy(),
                (bins.count * bins.confidence.nan_to_num()).numpy(),
                (bins.count * bins.accuracy.nan_to_num()).numpy(),
            ]
    return {name: _diagram(*bins) for name, bins in sums.items() if bins.any()} or None


def _diagram(count: Array, confidence: Array, accuracy: Array) -> dict[str, Any]:
    """A reliability diagram from the sums over its bins."""
    divisor = np.maximum(count, 1)
    return {
        "count": count.astype(int).tolist(),
        "confidence": [_six_digits(value) for value in confidence / divisor],
        "accuracy": [_six_digits(value) for value in accuracy / divisor],
        "ece": float(np.abs(confidence - accuracy).sum() / count.sum()),
    }


def _examples(runs: Sequence[ShownRun], order: list[str]) -> list[dict[str, Any]]:
    """Some test examples of the first run of each arm, from correct to confidently wrong."""
    examples = []
    for arm in order[:EXAMPLE_ARMS]:
        run = next((run for run in runs if run.arm == arm and run.status == "finished"), None)
        outputs = run.outputs([]) if run is not None else None
        if run is None or outputs is None:
            continue
        logits, labels = outputs[0].double(), outputs[1]
        confidence, answer = logits.softmax(1).max(1)
        ranked = confidence.argsort(stable=True)
        right = ranked[(answer == labels)[ranked]].tolist()
        wrong = ranked[(answer != labels)[ranked]].tolist()
        middle = len(right) // 2
        picks = {
            "typical, correct": right[middle : middle + 1],
            "barely correct": right[:1],
            "barely wrong": wrong[:1],
            "confidently wrong": wrong[-1:],
        }
        examples += [
            {
                "arm": arm,
                "words": words,
                "index": place,
                "label": int(labels[place]),
                "alpha": run.alpha,
                "logits": [_six_digits(value) for value in logits[place].tolist()],
            }
            for words, places in picks.items()
            for place in places
        ]
    return examples


def _classes(runs: Sequence[ShownRun], notes: list[str]) -> list[str] | None:
    """The names of the classes, if a run has stored them."""
    for run in runs:
        path = run.folder / "classes.json"
        if path.is_file():
            names = try_read(lambda path=path: json.loads(path.read_text("utf-8")), None, notes)
            return None if names is None else [str(name) for name in names]
    return None


def _environments(runs: Sequence[ShownRun], notes: list[str]) -> list[dict[str, Any]]:
    """The distinct machines and versions of the runs."""
    counts: Counter[str] = Counter()
    for run in runs:
        environment = try_read(Run(run.folder).environment, {}, notes)
        for name in ("format", "seed", "time", "command", "resumed"):
            environment.pop(name, None)
        if environment:
            counts[json.dumps(environment)] += 1
    return [{"runs": count, **json.loads(text)} for text, count in counts.most_common()]


def _six_digits(value: float | None) -> float | None:
    """`value` with six digits, which keeps the page small."""
    return None if value is None else float(f"{value:.6g}")
