"""The results of a census, as Python objects and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

HOW = ("weight", "gain", "gradient", "feature", "nonfinite")
State = Literal["dead", "recoverable", "unborn"]
What = Literal["died", "revived", "born"]


@dataclass(frozen=True)
class Unit:
    """A unit that is dead in at least one way.

    Attributes:
        number: The number of its layer, if it has one.
        layer: The name of its layer.
        unit: Its index in the layer, from 0.
        how: The ways in which it is dead (weight, gain, gradient, feature, nonfinite).
        state: ``"dead"``; ``"recoverable"`` if it still gets a gradient; ``"unborn"`` if its
            weights or gain were already zero at the start of training and never grew.
        value: The norm of its filter, its gain, or the feature.
        since: The step since which it is dead, in a recording.
        revivals: The number of earlier revivals, in a recording.
    """

    number: int | None
    layer: str
    unit: int
    how: tuple[str, ...]
    state: State
    value: float
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


@dataclass(frozen=True)
class Census:
    """The result of :func:`census`. ``print(census)`` shows a table of the affected layers.

    Attributes:
        source: The name of the model, or the path, that was examined.
        layers: Every layer, normalisation and set of features, with its counts.
        units: Every dead, recoverable or unborn unit, in order.
        events: Deaths, revivals and births, by step, from a recording.
        steps: The first and the last recorded step.
    """

    source: str
    layers: tuple[LayerCount, ...]
    units: tuple[Unit, ...]
    events: tuple[Event, ...] = ()
    steps: tuple[int, int] | None = None

    @property
    def dead(self) -> tuple[Unit, ...]:
        """The dead units, without the recoverable and the unborn ones."""
        return tuple(unit for unit in self.units if unit.state == "dead")

    @property
    def whole_layers(self) -> tuple[str, ...]:
        """The layers in which every unit is dead or recoverable."""
        return tuple(x.layer for x in self.layers if x.dead + x.recoverable == x.units)

    def __str__(self) -> str:
        return "\n".join([self.source, *_table(self), *_totals(self)])


def _table(census: Census) -> list[str]:
    """The layers in which something is or was dead, in aligned columns."""
    affected = [c for c in census.layers if c.dead or c.recoverable or c.unborn or c.died]
    if not affected:
        return []
    counts = ["units", "dead", "recoverable", "unborn"]
    ways = [way for way in HOW if any(layer.how.get(way) for layer in affected)]
    changes = ["died", "revived"] if census.steps else []
    rows: list[list[Any]] = [["#", "layer", "kind", *counts, *ways, *changes]]
    for layer in affected:
        row = ["" if layer.number is None else layer.number, layer.layer, layer.kind]
        row += [getattr(layer, count) for count in counts]
        row += [layer.how.get(way, "-") for way in ways]
        rows.append(row + [getattr(layer, change) for change in changes])
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
    sides = [">", "<", "<"] + [">"] * len(rows[0])  # names are aligned at the left
    lines = [zip(row, sides, widths, strict=False) for row in rows]
    return ["  ".join(f"{cell!s:{side}{width}}" for cell, side, width in line) for line in lines]


def _totals(census: Census) -> Iterator[str]:
    for way, what in (("weight", "filters"), ("gain", "gains"), ("feature", "features")):
        layers = [layer for layer in census.layers if way in layer.how]
        if layers:
            states = ("units", "dead", "recoverable", "unborn")
            units, dead, *more = (sum(getattr(x, state) for x in layers) for state in states)
            line = f"{dead:,} of {units:,} {what} dead"
            for count, state in zip(more, states[2:], strict=True):
                line += f", {count:,} {state}" if count else ""
            yield f"{line}."
    if census.whole_layers:
        yield f"Dead as a whole: {', '.join(census.whole_layers)}."
    if census.steps:
        yield f"Over steps {census.steps[0]:,} to {census.steps[1]:,}:"
        changes = Counter((event.quantity, event.what) for event in census.events)
        for quantity in (way for way in HOW if any(way == changed for changed, _ in changes)):
            deaths, revivals, births = (
                changes[quantity, what] for what in ("died", "revived", "born")
            )
            yield f"  {quantity}: {deaths:,} deaths, {revivals:,} revivals, {births:,} births."
        if not changes:
            yield "  nothing died, nothing came back."
