"""What the page reads from the folder of a run: curves and test outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml
from numpy.typing import NDArray
from safetensors import SafetensorError

from powergrad.lab.report.filters import evenly_spaced
from powergrad.lab.trainer.run_folder import COLUMNS, Run, RunError

UNREADABLE = (RunError, ValueError, TypeError, KeyError, OSError, SafetensorError, yaml.YAMLError)
ROWS = 400  # the maximal number of rows of metrics.csv to show per run
BINS = 15  # bins of a reliability diagram

T = TypeVar("T")


def try_read(read: Callable[[], T], otherwise: T, notes: list[str]) -> T:
    """The result of `read`; if it fails, `otherwise`, with a note about the reason."""
    try:
        return read()
    except UNREADABLE as error:
        notes.append(f"A file could not be read: {error}")
        return otherwise


def read_curve(path: Path, notes: list[str]) -> dict[str, list[float | None]]:
    """The non-empty columns of metrics.csv, thinned out, with six digits."""
    rows = try_read(Run(path).metrics, [], notes)
    kept = [rows[place] for place in evenly_spaced(len(rows), ROWS)] if rows else []
    return {
        name: [_six_digits(row.get(name)) for row in kept]
        for name in COLUMNS
        if any(row.get(name) is not None for row in kept)
    }


def describe_outputs(runs: Sequence[tuple[Path, float]], notes: list[str]) -> dict[str, Any] | None:
    """The reliability diagrams of an arm over its runs (folder, alpha)."""
    from powergrad import calibration  # imports torch, which is slow

    sums = {"plain": np.zeros((3, BINS)), "scaled": np.zeros((3, BINS))}
    for path, alpha in runs:
        outputs = try_read(Run(path).test_outputs, None, notes)
        if outputs is None or not bool(outputs["logits"].isfinite().all()):
            continue
        logits, labels = outputs["logits"], outputs["labels"]
        for name, factor in (("plain", 1.0), ("scaled", alpha)):
            if factor == 0:  # all predictions would have the same confidence
                continue
            bins = calibration.reliability(logits, labels, bins=BINS, temperature=1 / factor)
            sums[name] += [
                bins.count.numpy(),
                (bins.count * bins.confidence.nan_to_num()).numpy(),
                (bins.count * bins.accuracy.nan_to_num()).numpy(),
            ]
    return {name: _diagram(bins) for name, bins in sums.items() if bins.any()} or None


def _diagram(sums: NDArray[np.float64]) -> dict[str, Any]:
    """A reliability diagram from the number, confidence and accuracy summed over each bin."""
    count, confidence, accuracy = sums
    divisor = np.maximum(count, 1)
    return {
        "count": count.astype(int).tolist(),
        "confidence": [_six_digits(value) for value in confidence / divisor],
        "accuracy": [_six_digits(value) for value in accuracy / divisor],
        "ece": float(np.abs(confidence - accuracy).sum() / count.sum()),
    }


def _six_digits(value: float | None) -> float | None:
    """`value` with six digits, which keeps the page small."""
    return None if value is None else float(f"{value:.6g}")
