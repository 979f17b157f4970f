"""The results of a census, as Python objects, as a table and as CSV."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from powergrad.monitor.layers import Layer

HOW = ("weight", "gain", "silent", "gradient", "feature", "nonfinite")
State = Literal["dead", "recoverable", "unborn"]
What = Literal["died", "revived", "born"]


@dataclass(frozen=True)
class Unit:
    """A unit that is dead in at least one way.

    Attributes:
        number: The number of its layer, if it has one.
        layer: The name of its layer.
        unit: Its index in the layer, from 0.
        how: The ways in which it is dead (weight, gain, silent, gradient, feature, nonfinite).
        state: ``"dead"``; ``"recoverable"`` if it still gets a gradient; ``"unborn"`` if its
            weights or gain were already zero at the start of training and never grew.
        value: The norm of its filter, its gain, or the largest value of the feature.
        bias: The bias of a channel with a vanished gain, which is its constant output.
        gradient: The largest norm of its gradient over the data, if measured.
        since: The step since which it is dead, in a recording.
        revivals: The number of earlier revivals, in a recording.
    """

    number: int | None
    layer: str
    unit: int
    how: tuple[str, ...]
    state: State
    value: float | None = None
    bias: float | None = None
    gradient: float | None = None
    since: int | None = None
    revivals: int = 0


@dataclass(frozen=True)
class Event:
    """A change in a recording.

    At `step` the `quantity` (weight, gain, gradient or feature) of a unit ``died``, ``revived``, or
    was ``born``: it was zero at the start of training and grew for the first time.
    """

    step: int
    number: int | None
    layer: str
    unit: int
    quantity: str
    what: What


@dataclass(frozen=True)
class LayerCount:
    """The counts of one layer.

    Attributes:
        number: Its number, if it has one.
        layer: Its name.
        kind: The kind of layer, such as ``"Conv2d"``.
        units: The number of units.
        dead: The number of dead units.
        recoverable: The number of recoverable units: they would count as dead, but get a gradient.
        unborn: The number of units that were zero at the start and never grew.
        how: The number of units per way of being dead; a way that is missing was not measured.
        died: The number of units that died at some time in a recording.
        revived: The number of those that revived at some time.
    """

    number: int | None
    layer: str
    kind: str
    units: int
    dead: int
    recoverable: int
    unborn: int
    how: Mapping[str, int]
    died: int = 0
    revived: int = 0

    @property
    def whole(self) -> bool:
        """Whether all units of the layer are dead or recoverable."""
        return self.dead + self.recoverable == self.units


@dataclass(frozen=True)
class Census:
    """The result of :func:`census`. ``print(census)`` shows a table of the affected layers.

    Attributes:
        source: The name of the model, or the path, that was examined.
        layers: Every layer, normalisation and set of features, with its counts.
        units: Every dead, recoverable or unborn unit, in order.
        events: Deaths, revivals and births, by step, from a recording.
        steps: The first and the last recorded step.
        examples: The number of examples that were run through the model.
    """

    source: str
    layers: tuple[LayerCount, ...]
    units: tuple[Unit, ...]
    events: tuple[Event, ...] = ()
    steps: tuple[int, int] | None = None
    examples: int = 0

    @property
    def dead(self) -> tuple[Unit, ...]:
        """The dead units."""
        return tuple(unit for unit in self.units if unit.state == "dead")

    @property
    def recoverable(self) -> tuple[Unit, ...]:
        """The units that would count as dead, but get a gradient."""
        return tuple(unit for unit in self.units if unit.state == "recoverable")

    @property
    def unborn(self) -> tuple[Unit, ...]:
        """The units that were zero at the start of training and never grew."""
        return tuple(unit for unit in self.units if unit.state == "unborn")

    @property
    def whole_layers(self) -> tuple[str, ...]:
        """The layers in which no unit is alive."""
        return tuple(layer.layer for layer in self.layers if layer.whole)

    def to_csv(
        self,
        path: str | os.PathLike[str],
        rows: Literal["units", "layers", "events"] = "units",
    ) -> None:
        """Write the units, the counts per layer, or the events to a CSV file, one per row.

        Raises:
            ValueError: If `rows` is none of these.
        """
        kinds = {"units": Unit, "layers": LayerCount, "events": Event}
        if rows not in kinds:
            raise ValueError(f"Expected `rows` to be one of {', '.join(kinds)}, but got {rows!r}.")
        names = [field.name for field in fields(kinds[rows])]
        with open(path, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(names)
            writer.writerows(
                [_cell(getattr(row, name)) for name in names] for row in getattr(self, rows)
            )

    def __str__(self) -> str:
        over = f", over {self.examples:,} examples" if self.examples else ""
        lines = [self.source + over, *_table(self), *_summary(self), *_changes(self)]
        return "\n".join(lines)


# From the states of layers to a census -----------------------------------------------------------


@dataclass
class LayerState:
    """The state of one layer, as tensors of ``(units,)``; None for quantities not measured.

    `how` has the dead units for each way that was measured, `learns` the units that get a gradient.
    The others are explained at :class:`Unit`.
    """

    layer: Layer
    how: dict[str, Tensor]
    values: Tensor
    biases: Tensor | None = None
    gradients: Tensor | None = None
    learns: Tensor | None = None
    unborn: Tensor | None = None
    since: Tensor | None = None
    deaths: Tensor | None = None
    revivals: Tensor | None = None


def count(
    source: str,
    states: Iterable[LayerState],
    events: Iterable[Event] = (),
    steps: tuple[int, int] | None = None,
    examples: int = 0,
) -> Census:
    """The census of layers in these states."""
    layers: list[LayerCount] = []
    units: list[Unit] = []
    for state in states:
        dead = _dead_units(state)
        units += dead
        kinds = [unit.state for unit in dead]
        layers.append(
            LayerCount(
                state.layer.number,
                state.layer.name,
                state.layer.kind,
                state.layer.units,
                dead=kinds.count("dead"),
                recoverable=kinds.count("recoverable"),
                unborn=kinds.count("unborn"),
                how={way: int(state.how[way].sum()) for way in HOW if way in state.how},
                died=0 if state.deaths is None else int((state.deaths > 0).sum()),
                revived=0 if state.revivals is None else int((state.revivals > 0).sum()),
            )
        )
    return Census(source, tuple(layers), tuple(units), tuple(events), steps, examples)


def _dead_units(state: LayerState) -> list[Unit]:
    def item(tensor: Tensor | None, unit: int) -> Any:
        return None if tensor is None else tensor[unit].item()

    def life(unit: int) -> State:
        if item(state.unborn, unit):
            return "unborn"
        return "recoverable" if item(state.learns, unit) else "dead"

    return [
        Unit(
            state.layer.number,
            state.layer.name,
            unit,
            how=tuple(way for way in HOW if way in state.how and state.how[way][unit]),
            state=life(unit),
            value=item(state.values, unit),
            bias=item(state.biases, unit),
            gradient=item(state.gradients, unit),
            since=item(state.since, unit),
            revivals=item(state.revivals, unit) or 0,
        )
        for unit in torch.stack(list(state.how.values())).any(0).nonzero().flatten().tolist()
    ]


# The table ----------------------------------------------------------------------------------------


def _cell(value: Any) -> Any:
    if isinstance(value, tuple):
        return "+".join(value)
    if isinstance(value, Mapping):
        return " ".join(f"{way}={number}" for way, number in value.items())
    return "" if value is None else value


def _table(census: Census) -> list[str]:
    """The layers in which something is or was dead, in aligned columns."""
    affected = [c for c in census.layers if c.dead or c.recoverable or c.unborn or c.died]
    if not affected:
        return []
    ways = [way for way in HOW if any(layer.how.get(way) for layer in affected)]
    states, timed = ["dead", "recoverable", "unborn"], ["died", "revived"] if census.steps else []
    rows = [["#", "layer", "kind", "units", *states, *ways, *timed]]
    for layer in affected:
        name = layer.layer + (" (whole)" if layer.whole else "")
        counts = [layer.units, *(getattr(layer, state) for state in states)]
        counts += [layer.how.get(way, "-") for way in ways]
        counts += [getattr(layer, change) for change in timed]
        rows.append([str(_cell(layer.number)), name, layer.kind, *map(str, counts)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = {1, 2}  # names are aligned at the left, numbers at the right
    return [
        "  ".join(
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _summary(census: Census) -> Iterator[str]:
    for way, what in (("weight", "filters"), ("gain", "gains"), ("feature", "features")):
        layers = [layer for layer in census.layers if way in layer.how]
        if layers:
            dead, recoverable, unborn, units = (
                sum(getattr(layer, name) for layer in layers)
                for name in ("dead", "recoverable", "unborn", "units")
            )
            line = f"{dead:,} of {units:,} {what} dead"
            line += f", {recoverable:,} recoverable" if recoverable else ""
            yield line + (f", {unborn:,} unborn." if unborn else ".")
    constant = sum("gain" in unit.how and bool(unit.bias) for unit in census.units)
    if constant:
        yield f"{constant:,} channels with a vanished gain output a constant, their bias."
    if census.whole_layers:
        yield f"Dead as a whole: {', '.join(census.whole_layers)}."


def _changes(census: Census) -> Iterator[str]:
    if census.steps is None:
        return
    yield f"Over steps {census.steps[0]:,} to {census.steps[1]:,}:"
    if not census.events:
        yield "  nothing died, nothing came back."
    for quantity in ("weight", "gain", "gradient", "feature"):
        units: dict[str, set[tuple[str, int]]] = {"died": set(), "revived": set(), "born": set()}
        last = {}
        for event in census.events:
            if event.quantity == quantity:
                unit = (event.layer, event.unit)
                units[event.what].add(unit)
                last[unit] = event.what
        if last:
            line = f"  {quantity}: {len(units['died']):,} died, {len(units['revived']):,} of these "
            line += f"came back, {list(last.values()).count('died'):,} dead at the end"
            yield line + (f"; {len(units['born']):,} born." if units["born"] else ".")
