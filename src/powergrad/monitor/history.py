"""Following the units of a recording: who died, when, and who came back."""

from __future__ import annotations

import torch
from torch import Tensor

from powergrad.monitor.layers import Layer
from powergrad.monitor.recording import QUANTITIES, Column, Recording
from powergrad.monitor.results import Census, Event, Finding, What, count
from powergrad.monitor.thresholds import DeathLine, Thresholds, largest_in_layer, layer_of


class Follower:
    """Follows the units of some columns from row to row.

    A unit dies when it has been under its line for `patience` rows, counted from the first of
    them, and comes back in the first row in which it is over it. What is neither (between the line
    and the one for revivals, or not measured) stays as it is.
    """

    def __init__(self, columns: list[Column], patience: int) -> None:
        self.columns = columns
        self.place = slice(columns[0].start, columns[-1].place.stop)
        self.patience = patience
        self.layer_of = layer_of([column.count for column in columns])
        self.values = torch.full_like(self.layer_of, torch.nan, dtype=torch.float64)
        self.dead = torch.zeros_like(self.layer_of, dtype=torch.bool)
        self.over = ~self.dead
        self.lived = ~self.dead
        self.run = torch.zeros_like(self.layer_of)
        self.since = torch.zeros_like(self.layer_of)
        self.deaths = torch.zeros_like(self.layer_of)
        self.revivals = torch.zeros_like(self.layer_of)
        self.changes: list[tuple[int, int, What]] = []

    def begin(self, step: int, unborn: Tensor) -> None:
        """Say which units have not lived yet, before the first row."""
        self.dead, self.lived = unborn, ~unborn
        self.since = torch.full_like(self.since, step)

    def see(self, step: int, values: Tensor, under: Tensor, over: Tensor) -> None:
        """Take a row: its values, and which of them are under and over their line."""
        self.values, self.over = values, over
        self.since = torch.where(under & (self.run == 0) & ~self.dead, step, self.since)
        self.run = torch.where(under, self.run + 1, torch.where(values.isnan(), self.run, 0))
        died = ~self.dead & (self.run >= self.patience)
        back = self.dead & over
        self.deaths += died
        self.revivals += back & self.lived
        for u in died.nonzero().flatten().tolist():
            self.changes.append((int(self.since[u]), u, "died"))
        for u in back.nonzero().flatten().tolist():
            self.changes.append((step, u, "revived" if self.lived[u] else "born"))
        self.dead = (self.dead | died) & ~back
        self.lived = self.lived | back

    def events(self, quantity: str, numbers: dict[str, int | None]) -> list[Event]:
        """What happened, with the layers' names and numbers."""
        found = []
        for step, unit, what in self.changes:
            column = self.columns[int(self.layer_of[unit])]
            place = unit - (column.start - self.place.start)
            number = numbers.get(column.layer)
            found.append(Event(step, number, column.layer, place, quantity, what))
        return found


def follow(recording: Recording, thresholds: Thresholds) -> Census:
    """The census of a recording at its last row, with what happened on the way."""
    death_lines = {
        quantity: DeathLine(layers, thresholds)
        for quantity, layers in (
            ("weight", recording.layers),
            ("gain", recording.normalisations),
        )
        if layers
    }
    followers = {
        quantity: Follower(columns, 1 if quantity in death_lines else thresholds.patience)
        for quantity in QUANTITIES
        if (columns := [c for c in recording.columns if c.quantity == quantity])
    }
    steps: list[int] = []
    starts: dict[str, Tensor] = {}
    for step, row in recording:
        for quantity, follower in followers.items():
            values = row[follower.place].double()
            if quantity in death_lines:
                if not steps:
                    starts[quantity] = values
                    follower.begin(step, values <= thresholds.zero)
                line = death_lines[quantity](values, starts[quantity])
                over = values > thresholds.revival * line
            else:
                part = thresholds.gradient if quantity == "gradient" else thresholds.output
                line = part * largest_in_layer(values, follower.layer_of)
                over = values > line
            follower.see(step, values, values <= line, over)
        steps = [*steps[:1], step]
    if not steps:
        raise ValueError(f"Expected {str(recording.directory)!r} to hold a record, but got none.")
    numbers = {layer.name: layer.number for layer in recording.layers}
    events = [e for q, follower in followers.items() for e in follower.events(q, numbers)]
    events.sort(key=lambda event: event.step)
    findings = _findings(recording, followers)
    return count(str(recording.directory), findings, events, (steps[0], steps[-1]))


def _findings(recording: Recording, followers: dict[str, Follower]) -> list[Finding]:
    weights, gradients = followers["weight"], followers.get("gradient")
    findings = []
    for place, layer in enumerate(recording.layers):
        own = weights.layer_of == place
        finding = _vanished(layer, "weight", weights, own)
        if gradients is not None:
            finding.how["gradient"] = gradients.dead[own]
            finding.gradients = gradients.values[own]
            finding.learns = gradients.over[own]
            finding.since = torch.where(weights.dead, weights.since, gradients.since)[own]
        findings.append(finding)
    for place, layer in enumerate(recording.normalisations):
        gains = followers["gain"]
        findings.append(_vanished(layer, "gain", gains, gains.layer_of == place))
    if "feature" in followers:
        features = followers["feature"]
        name = f"input of {features.columns[0].layer}"
        findings.append(
            Finding(
                Layer(None, name, "features", features.columns[0].count),
                {"feature": features.dead},
                features.values,
                since=features.since,
                deaths=features.deaths,
                revivals=features.revivals,
            )
        )
    return findings


def _vanished(layer: Layer, way: str, follower: Follower, own: Tensor) -> Finding:
    """The units of a layer whose norm or gain has vanished, or is not finite."""
    values, dead = follower.values[own], follower.dead[own]
    return Finding(
        layer,
        {way: dead, "nonfinite": ~values.isfinite()},
        values,
        unborn=dead & ~follower.lived[own],
        since=follower.since[own],
        deaths=follower.deaths[own],
        revivals=follower.revivals[own],
    )
