"""The census: which units of a network are dead, how, since when, and whether they came back.

A unit is an output channel of a convolution or a linear layer, a gain of a normalisation, or a
feature that enters the classifier. It is dead if its norm or gain has vanished or is not finite; in
a recording, also if its gradient or feature is zero. A model or a checkpoint is examined like a
recording of one record.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from powergrad.head import unwrap
from powergrad.monitor.counts import HOW, Census, Event, LayerCount, State, Unit
from powergrad.monitor.layers import Column, Weight, arrange, measure, weights_of
from powergrad.monitor.recording import Recording

# A norm or gain has vanished at or below this fraction of its initial value. Weight decay alone
# takes a filter without gradient there once `sum(lr * wd) / (1 - momentum)` exceeds 4.6.
START = 0.01
# Without a known initial value: of the largest in its layer; living norms differ from the start.
LAYER = 0.001
# In any case: where living norms never are, but decay in float32 takes a whole layer.
ZERO = 1e-8
# Each record covers few examples, so gradients and features must be zero in so many in a row.
PATIENCE = 10


def census(
    source: nn.Module | Mapping[str, Any] | str | os.PathLike[str],
    *,
    initial: nn.Module | Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> Census:
    """Find the dead units in a model, a checkpoint or a recording.

    A norm or gain is dead at or below 1% of its initial value; if that is not known, 0.1% of the
    largest in its layer; and 1e-8 in any case. In a recording, each unit is followed from the first
    record (its initial value) to the last. A norm revives above twice its threshold, so that one
    that hovers around it is counted once; a gradient or feature is dead if it is zero in 10
    consecutive records.

    Args:
        source: A model; a state dict; the path of a checkpoint (safetensors, or ``torch.save``
            read with ``weights_only=True``); or the folder of a :class:`FilterMonitor`, or of a run
            with such a folder named ``norms``.
        initial: The model, state dict or checkpoint at the start of training, with which each norm
            is compared. Not for a recording.

    Returns:
        The dead units, the counts per layer, and the events of a recording.

    Raises:
        ValueError: If a path holds nothing that can be read, a state dict does not show the units
            of its layers, or `initial` does not fit.
        TypeError: If `source` has another type.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU())
        >>> with torch.no_grad():
        ...     _ = model[0].weight[2].zero_()
        >>> [(unit.layer, unit.unit, unit.how) for unit in census(model).dead]
        [('0', 2, ('weight',))]
    """
    with torch.device("cpu"), torch.no_grad():
        path = Path(source) if isinstance(source, (str, os.PathLike)) else None
        recording = Recording(path) if path is not None and path.is_dir() else None
        if recording is not None:
            if initial is not None:
                raise ValueError(
                    "Expected no `initial` for a recording, but got one; the first record is its "
                    "initial state."
                )
            name, columns = str(recording.directory), recording.columns
            if not (records := list(recording)):
                raise ValueError(f"Expected {name!r} to hold a record, but got none.")
            starts = records[0][1].double()
        else:
            name = str(path or type(unwrap(source)).__name__)  # type: ignore[arg-type]
            weights = weights_of(source, "source")
            columns = arrange([column for column, _ in weights])
            norms = torch.cat([_norms(weight) for weight in weights])
            records, starts = [(0, norms)], torch.full_like(norms, torch.nan)
            if initial is not None:
                known = {weight[0].layer: weight for weight in weights_of(initial, "initial")}
                for column in columns:
                    start = _norms(known[column.layer]) if column.layer in known else norms[:0]
                    if len(start) != column.units:
                        wanted = f"{column.units} units in {column.layer!r}"
                        raise ValueError(
                            f"Expected `initial` to have {wanted}, but got {len(start)}."
                        )
                    starts[column.place] = start
        lives = _Lives(columns, starts, records[0][0])
        for step, norms in records:
            lives.add_record(step, norms.double())
        return lives.count(name, (records[0][0], records[-1][0]) if recording is not None else None)


def _norms(weight: Weight) -> Tensor:
    return measure(*weight).to("cpu", torch.float64)


class _Lives:
    """Follows units from record to record.

    A unit dies when it has been under its line for `patience` records; the death is dated to the
    first of them. It revives in the first record in which it is over twice its line. Units in
    between, and units that were not measured, keep their state.
    """

    def __init__(self, columns: Sequence[Column], starts: Tensor, step: int) -> None:
        self.columns = columns
        counts = torch.tensor([column.units for column in columns])
        self.column_of = torch.arange(len(columns)).repeat_interleave(counts)
        is_norm = self._spread([column.quantity in ("weight", "gain") for column in columns])
        # A living filter of d weights is below a fraction e with a probability of about e^d. So
        # that this is no likelier for one or two weights than for three, their fractions are less.
        by_chance = self._spread([START ** (3 / max(column.weights, 1)) for column in columns])
        self.by_start, self.by_layer = (
            by_chance.clamp(max=fraction) * is_norm for fraction in (START, LAYER)
        )
        self.floor = ZERO * is_norm
        self.patience = torch.where(is_norm > 0, 1, PATIENCE)
        self.scale_free = self._spread([column.normalised for column in columns]) > 0
        self.starts = torch.where(is_norm > 0, starts, torch.nan)
        self.dead = self.starts <= ZERO
        self.lived = ~self.dead
        self.since = torch.full_like(self.column_of, step)
        self.rows_under, self.deaths, self.revivals = torch.zeros(3, len(starts)).long()
        self.events: list[Event] = []

    def _spread(self, values: list[Any]) -> Tensor:
        """A value per column as a value per unit."""
        return torch.tensor(values, dtype=torch.float64)[self.column_of]

    def _largest(self, values: Tensor) -> Tensor:
        """For each unit, the largest finite value in its column; values are not negative."""
        values = torch.where(values.isfinite(), values, 0)
        largest = torch.zeros_like(values).scatter_reduce(0, self.column_of, values, "amax")
        return largest[self.column_of]

    def _line(self, values: Tensor) -> Tensor:
        """The values at or below which units are dead."""
        shared = torch.where(self.scale_free, self._largest(values / self.starts).clamp(max=1), 1)
        by_start = self.by_start * self.starts * shared
        by_layer = self.by_layer * self._largest(values)
        return torch.where(self.starts > ZERO, by_start, by_layer).maximum(self.floor)

    def add_record(self, step: int, values: Tensor) -> None:
        self.values = values
        line = self._line(values)
        under, self.over = values <= line, values > 2 * line
        self.since = torch.where(under & (self.rows_under == 0) & ~self.dead, step, self.since)
        unknown = torch.where(values.isnan(), self.rows_under, 0)
        self.rows_under = torch.where(under, self.rows_under + 1, unknown)
        died = ~self.dead & (self.rows_under >= self.patience)
        back = self.dead & self.over
        self.deaths += died
        self.revivals += back & self.lived
        for unit in (died | back).nonzero().flatten().tolist():
            what = "died" if died[unit] else "revived" if self.lived[unit] else "born"
            since = int(self.since[unit]) if died[unit] else step
            column = self.columns[int(self.column_of[unit])]
            place, quantity = unit - column.start, column.quantity
            self.events.append(Event(since, column.number, column.layer, place, quantity, what))
        self.dead = (self.dead | died) & ~back
        self.lived = self.lived | back

    def count(self, source: str, steps: tuple[int, int] | None) -> Census:
        """Count the units that are dead in the last record; `steps` are of a recording."""
        gradients = {c.layer: c.place for c in self.columns if c.quantity == "gradient"}
        layers: list[LayerCount] = []
        units: list[Unit] = []
        counted = [column for column in self.columns if column.quantity != "gradient"]
        for column in sorted(counted, key=lambda column: column.quantity, reverse=True):
            own, number, layer = column.place, column.number, column.layer
            how = {column.quantity: self.dead[own], "nonfinite": ~self.values[own].isfinite()}
            since, learns = self.since[own], torch.zeros(column.units)
            if column.quantity == "feature":
                number, layer = None, f"input of {layer}"
                del how["nonfinite"]
            elif column.quantity == "weight" and layer in gradients:
                place = gradients[layer]
                how["gradient"], learns = self.dead[place], self.over[place]
                since = torch.where(how["weight"], since, self.since[place])
            how = {way: how[way] for way in HOW if way in how}
            states: Counter[State] = Counter()
            for unit in torch.stack(list(how.values())).any(0).nonzero().flatten().tolist():
                place = own.start + unit
                unborn = self.dead[place] and not self.lived[place]
                state: State = "unborn" if unborn else "recoverable" if learns[unit] else "dead"
                ways = tuple(way for way in how if how[way][unit])
                value = float(self.values[place])
                life = (int(since[unit]), int(self.revivals[place])) if steps else ()
                units.append(Unit(number, layer, unit, ways, state, value, *life))
                states[state] += 1
            counts = states["dead"], states["recoverable"], states["unborn"]
            totals = {way: int(is_dead.sum()) for way, is_dead in how.items()}
            changes = [int((x[own] > 0).sum()) for x in (self.deaths, self.revivals) if steps]
            count = LayerCount(number, layer, column.kind, column.units, *counts, totals, *changes)
            layers.append(count)
        events = sorted(self.events, key=lambda event: event.step) if steps else ()
        return Census(source, tuple(layers), tuple(units), tuple(events), steps)
