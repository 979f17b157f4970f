"""Encodes recordings of filter norms, small enough for a page.

A value is one byte: 0 if the norm is zero (or below a ten-thousandth of the layer's largest), 255
if it is not finite, otherwise its logarithm in 254 equal steps from the layer's smallest to its
largest norm. For each filter, the differences of consecutive bytes are deflated; norms change
slowly, so most differences are 0.
"""

from __future__ import annotations

import base64
import contextlib
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from powergrad.monitor import Census, Recording

POINTS = 100  # the maximal number of times to show of a recording
LEAST_POINTS = 12
BUDGET = 6_000_000  # the maximal number of norms of all recordings together, about one byte each
FLOOR = 1e-4  # norms below this fraction of the layer's largest are shown as zero
ZERO, SMALLEST, LARGEST, NOT_FINITE = 0, 1, 254, 255
CENSUS = ("layer", "kind", "units", "dead", "recoverable", "unborn", "died", "revived")
EVENTS = {"died": 0, "revived": 1, "born": 2}
UNBORN = 3  # the state of a unit at the first step, among the events


def encode_norms(folders: Sequence[Path]) -> tuple[dict[Path, dict[str, Any]], list[str]]:
    """Encode the recordings of some runs, with as many points in time as fit."""
    from powergrad.monitor import Recording, census  # imports torch, which is slow

    recordings: dict[Path, tuple[Recording, Census]] = {}
    faults = []
    for folder in filter(Recording.exists, folders):
        try:
            with _one_thread():
                recordings[folder] = Recording(folder), census(folder)
        except (ValueError, OSError, TypeError, KeyError) as error:
            faults.append(f"The filter norms of {folder.name} could not be read: {error}")
    units = sum(c.units for recording, _ in recordings.values() for c in recording.columns)
    points = min(POINTS, max(LEAST_POINTS, BUDGET // max(1, units)))
    return {folder: _encode(*pair, points) for folder, pair in recordings.items()}, faults


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread, because synchronising threads takes longer than processing a row."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _encode(recording: Recording, counts: Census, points: int) -> dict[str, Any]:
    steps, table = recording.load()
    kept = evenly_spaced(len(steps), points)
    steps, values = steps[kept].tolist(), table[kept].T.numpy()  # (units, times)
    columns, bodies = [], []
    for column in recording.columns:
        codes, low, high = quantise(values[column.place])
        bodies.append(np.diff(codes, axis=1, prepend=np.uint8(0)).tobytes())
        columns.append(
            {
                "quantity": column.quantity,
                "layer": column.layer,
                "number": column.number,
                "units": column.units,
                "low": low,
                "high": high,
            }
        )
    events = _events(recording, counts, steps[0])
    deaths = [  # and the opposite, as -1
        (step, -1 if what in (EVENTS["revived"], EVENTS["born"]) else 1)
        for step, column, _, what in events
        if recording.columns[column].quantity == "weight"
    ]
    return {
        "steps": steps,
        "columns": columns,
        "data": _pack(b"".join(bodies)),
        "events": _pack(json.dumps(events, separators=(",", ":")).encode()),
        "dead": [sum(dead for at, dead in deaths if at <= step) for step in steps],
        "census": [[getattr(layer, name) for name in CENSUS] for layer in counts.layers],
    }


def evenly_spaced(count: int, most: int) -> list[int]:
    """Up to `most` evenly spaced indices of `count`, including the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)).tolist()


def quantise(values: NDArray[np.float32]) -> tuple[NDArray[np.uint8], float, float]:
    """Norms as bytes, and the norms represented by the bytes 1 and 254."""
    finite = np.isfinite(values)
    high = float(values.max(where=finite, initial=0.0))
    shown = finite & (values > FLOOR * high)
    low = float(values.min(where=shown, initial=high))
    codes = np.where(finite, ZERO, NOT_FINITE).astype(np.uint8)
    span = np.log(high / low) if low < high else 1.0
    place = np.log(values[shown].astype(np.float64) / low) / span
    codes[shown] = SMALLEST + np.rint(place * (LARGEST - SMALLEST)).astype(np.uint8)
    return codes, low, high


def _events(recording: Recording, counts: Census, start: int) -> list[list[int]]:
    """The events (step, column, unit, kind), after the units that were zero at the start."""
    places = {(c.quantity, c.layer): i for i, c in enumerate(recording.columns)}
    happened = [
        [event.step, places[event.quantity, event.layer], event.unit, EVENTS[event.what]]
        for event in counts.events
    ]
    unborn = {(column, unit) for _, column, unit, what in happened if what == EVENTS["born"]}
    for unit in counts.units:
        place = ("gain" if "gain" in unit.how else "weight", unit.layer)
        unborn |= {(places[place], unit.unit)} if unit.state == "unborn" else set()
    return [[start, column, unit, UNBORN] for column, unit in sorted(unborn)] + happened


def _pack(body: bytes) -> str:
    """Deflate with run-length encoding only: smaller for noisy norms, and 40 times faster."""
    packer = zlib.compressobj(strategy=zlib.Z_RLE)
    return base64.b64encode(packer.compress(body) + packer.flush()).decode()
