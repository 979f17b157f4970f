"""The census: which units of a network are dead, how, since when, and whether they came back.

A unit is an output channel of a convolution or a linear layer, a gain of a normalisation, or a
feature that enters the classifier. The ways to be dead are

    weight      the norm of its filter has vanished
    gain        the gain of its normalisation has vanished
    gradient    its filter gets no gradient (in a recording)
    feature     it is zero where it enters the classifier (in a recording)
    nonfinite   its weights are NaN or infinite

A model or a checkpoint is examined like a recording of one record.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from powergrad.head import unwrap
from powergrad.monitor.checkpoint import load_checkpoint, state_weights
from powergrad.monitor.counts import HOW, Census, Event, LayerCount, State, Unit
from powergrad.monitor.layers import Column, Weight, arrange, model_weights
from powergrad.monitor.recording import Recording

__all__ = ["census"]

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
    is_path = isinstance(source, (str, os.PathLike))
    if is_path and Path(source).is_dir():
        if initial is not None:
            raise ValueError(
                "Expected no `initial` for a recording, but got one; the first record is its "
                "initial state."
            )
        with torch.device("cpu"):
            return _of_recording(Recording(source))
    weights = _read(source, "source")
    columns = arrange([weight.column for weight in weights])
    values = [weight.values() for weight in weights]
    starts = [torch.full_like(norms, torch.nan) for norms in values]
    if initial is not None:
        known = {weight.column.layer: weight.values() for weight in _read(initial, "initial")}
        for column in columns:
            got = len(known[column.layer]) if column.layer in known else "none"
            if got != column.units:
                raise ValueError(
                    f"Expected `initial` to have {column.units} units in {column.layer!r}, but got "
                    f"{got}."
                )
        starts = [known[column.layer] for column in columns]
    with torch.device("cpu"):
        lives = _Lives(columns, torch.cat(starts), 0)
        lives.add_record(0, torch.cat(values))
        name = str(source) if is_path else type(unwrap(source)).__name__  # type: ignore[arg-type]
        return lives.count(name)


def _read(source: Any, argument: str) -> list[Weight]:
    """The weights in a model, a state dict or a checkpoint; the gains come last."""
    if isinstance(source, (str, os.PathLike)):
        if not Path(source).is_file():
            raise ValueError(f"Expected {os.fspath(source)!r} to exist, but got no such file.")
        source = load_checkpoint(source)
    if isinstance(source, nn.Module):
        weights = model_weights(source)
    elif isinstance(source, Mapping):
        weights = state_weights(source)
    else:
        raise TypeError(
            f"Expected `{argument}` to be a model, a state dict or a path, but got "
            f"{type(source).__name__}."
        )
    if all(weight.is_gain for weight in weights):
        raise ValueError(
            "Expected a model or a state dict with a convolution or a linear layer, but got none."
        )
    return sorted(weights, key=lambda weight: weight.is_gain)


def _of_recording(recording: Recording) -> Census:
    lives, steps = None, []
    for step, record in recording:
        record = record.double()
        lives = lives or _Lives(recording.columns, record, step)
        lives.add_record(step, record)
        steps = [*steps[:1], step]
    if lives is None:
        raise ValueError(f"Expected {str(recording.directory)!r} to hold a record, but got none.")
    return lives.count(str(recording.directory), (steps[0], steps[-1]))


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
        by_chance = [START ** (3 / max(column.weights, 1)) for column in columns]
        self.by_start, self.by_layer = (
            self._spread([min(limit, chance) for chance in by_chance]) * is_norm
            for limit in (START, LAYER)
        )
        self.floor = ZERO * is_norm
        self.patience = torch.where(is_norm > 0, 1, PATIENCE)
        self.scale_free = self._spread([column.normalised for column in columns]) > 0
        self.starts = torch.where(is_norm > 0, starts, torch.nan)
        self.dead = self.starts <= ZERO
        self.lived = ~self.dead
        self.over = self.lived
        self.since = torch.full_like(self.column_of, step)
        self.rows_under, self.deaths, self.revivals = torch.zeros(3, len(starts)).long()
        self.values = starts
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

    def count(self, source: str, steps: tuple[int, int] | None = None) -> Census:
        """Count the units that are dead in the last record; `steps` are of a recording."""
        gradients = {c.layer: c.place for c in self.columns if c.quantity == "gradient"}
        order = ("weight", "gain", "feature")
        layers: list[LayerCount] = []
        units: list[Unit] = []
        for column in (c for quantity in order for c in self.columns if c.quantity == quantity):
            own, number, layer = column.place, column.number, column.layer
            how = {column.quantity: self.dead[own]}
            since, learns = self.since[own], torch.zeros(column.units)
            if column.quantity == "feature":
                number, layer = None, f"input of {layer}"
            else:
                how["nonfinite"] = ~self.values[own].isfinite()
            if column.quantity == "weight" and layer in gradients:
                how["gradient"] = self.dead[gradients[layer]]
                since = torch.where(how["weight"], since, self.since[gradients[layer]])
                learns = self.over[gradients[layer]]
            states: list[State] = []
            for unit in torch.stack(list(how.values())).any(0).nonzero().flatten().tolist():
                place = own.start + unit
                unborn = self.dead[place] and not self.lived[place]
                states.append("unborn" if unborn else "recoverable" if learns[unit] else "dead")
                ways = tuple(way for way in HOW if way in how and how[way][unit])
                life = (int(since[unit]), int(self.revivals[place])) if steps else ()
                value = float(self.values[place])
                units.append(Unit(number, layer, unit, ways, states[-1], value, *life))
            counts = (states.count("dead"), states.count("recoverable"), states.count("unborn"))
            totals = {way: int(how[way].sum()) for way in HOW if way in how}
            changes = [
                int((x[own] > 0).sum()) if steps else 0 for x in (self.deaths, self.revivals)
            ]
            found = LayerCount(number, layer, column.kind, column.units, *counts, totals, *changes)
            layers.append(found)
        events = sorted(self.events, key=lambda event: event.step) if steps else ()
        return Census(source, tuple(layers), tuple(units), tuple(events), steps)
