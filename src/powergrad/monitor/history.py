"""The census of a recording: which units died, when, and which recovered."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from powergrad.monitor.counts import Census, Event, LayerState, What, count
from powergrad.monitor.layers import Layer
from powergrad.monitor.recording import QUANTITIES, Column, Recording
from powergrad.monitor.thresholds import DeathLine, Thresholds, largest_in_layer, layer_of


class Follower:
    """Follows the units of some adjacent columns from row to row.

    A unit dies when it has been under its threshold for `patience` rows; the death is dated to the
    first of them. It revives in the first row in which it is over the revival threshold. Units
    between the two thresholds, and units that were not measured, keep their state.
    """

    def __init__(self, columns: list[Column], patience: int) -> None:
        self.columns = columns
        self.place = slice(columns[0].start, columns[-1].place.stop)
        self.patience = patience
        self.layer_of = layer_of([column.count for column in columns])
        zeros = torch.zeros_like(self.layer_of)
        self.rows_under, self.since, self.deaths, self.revivals = (zeros.clone() for _ in range(4))
        self.values = torch.full_like(zeros, torch.nan, dtype=torch.float64)
        self.dead, self.over, self.lived = zeros.bool(), ~zeros.bool(), ~zeros.bool()
        self.changes: list[tuple[int, int, What]] = []

    def begin(self, step: int, unborn: Tensor) -> None:
        """Declare, before the first row, which units start dead."""
        self.dead, self.lived = unborn, ~unborn
        self.since = torch.full_like(self.since, step)

    def add_row(self, step: int, values: Tensor, under: Tensor, over: Tensor) -> None:
        """Add a row: its values, and which of them are under and over their thresholds."""
        self.values, self.over = values, over
        rows = self.rows_under
        self.since = torch.where(under & (rows == 0) & ~self.dead, step, self.since)
        self.rows_under = torch.where(under, rows + 1, torch.where(values.isnan(), rows, 0))
        died = ~self.dead & (self.rows_under >= self.patience)
        back = self.dead & over
        self.deaths += died
        self.revivals += back & self.lived
        for unit in died.nonzero().flatten().tolist():
            self.changes.append((int(self.since[unit]), unit, "died"))
        for unit in back.nonzero().flatten().tolist():
            self.changes.append((step, unit, "revived" if self.lived[unit] else "born"))
        self.dead = (self.dead | died) & ~back
        self.lived = self.lived | back

    def events(self, numbers: dict[str, int | None]) -> Iterator[Event]:
        """The deaths, revivals and births, with the names and numbers of the layers."""
        for step, unit, what in self.changes:
            column = self.columns[int(self.layer_of[unit])]
            place = unit + self.place.start - column.start
            number = numbers.get(column.layer)
            yield Event(step, number, column.layer, place, column.quantity, what)

    def layer_state(self, index: int, layer: Layer, way: str) -> LayerState:
        """The state of the units of one layer."""
        own = self.layer_of == index
        return LayerState(
            layer,
            {way: self.dead[own]},
            self.values[own],
            since=self.since[own],
            deaths=self.deaths[own],
            revivals=self.revivals[own],
        )


def follow(recording: Recording, thresholds: Thresholds) -> Census:
    """The census of a recording at its last row, with all events before."""
    held = {"weight": recording.layers, "gain": recording.normalisations}
    death_lines = {way: DeathLine(layers, thresholds) for way, layers in held.items() if layers}
    parts = {"gradient": thresholds.gradient, "feature": thresholds.output}
    followers = {
        quantity: Follower(columns, thresholds.patience if quantity in parts else 1)
        for quantity in QUANTITIES
        if (columns := [c for c in recording.columns if c.quantity == quantity])
    }
    steps: list[int] = []
    starts: dict[str, Tensor] = {}
    for step, row in recording:
        for quantity, follower in followers.items():
            values = row[follower.place].double()
            if quantity in parts:
                line = parts[quantity] * largest_in_layer(values, follower.layer_of)
                over = values > line
            else:
                if not steps:
                    starts[quantity] = values
                    follower.begin(step, values <= thresholds.zero)
                line = death_lines[quantity](values, starts[quantity])
                over = values > thresholds.revival * line
            follower.add_row(step, values, values <= line, over)
        steps = [*steps[:1], step]
    if not steps:
        raise ValueError(f"Expected {str(recording.directory)!r} to hold a record, but got none.")
    numbers = {layer.name: layer.number for layer in recording.layers}
    events = [event for follower in followers.values() for event in follower.events(numbers)]
    events.sort(key=lambda event: event.step)
    states = _layer_states(recording, followers)
    return count(str(recording.directory), states, events, (steps[0], steps[-1]))


def _layer_states(recording: Recording, followers: dict[str, Follower]) -> Iterator[LayerState]:
    gradients = followers.get("gradient")
    for way, layers in (("weight", recording.layers), ("gain", recording.normalisations)):
        for index, layer in enumerate(layers):
            follower = followers[way]
            state, own = follower.layer_state(index, layer, way), follower.layer_of == index
            state.how["nonfinite"] = ~state.values.isfinite()
            state.unborn = state.how[way] & ~follower.lived[own]
            if way == "weight" and gradients is not None:
                state.how["gradient"] = gradients.dead[own]
                state.gradients = gradients.values[own]
                state.learns = gradients.over[own]
                state.since = torch.where(follower.dead, follower.since, gradients.since)[own]
            yield state
    if (follower := followers.get("feature")) is not None:
        (column,) = follower.columns
        layer = Layer(None, f"input of {column.layer}", "features", column.count)
        yield follower.layer_state(0, layer, "feature")
