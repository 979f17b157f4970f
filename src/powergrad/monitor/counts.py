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
    """

    number: int | None
    layer: str
    unit: int
    how: tuple[str, ...]
    state: State
    value: float
    since: int | None = None


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
    """The `units` of one layer, and how many of them are dead, recoverable and unborn.

    Attributes:
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


_COUNTS = ("units", "dead", "recoverable", "unborn")


def _table(census: Census) -> Iterator[str]:
    """The layers in which something is or was dead, in aligned columns."""
    affected = [c for c in census.layers if c.dead or c.recoverable or c.unborn or c.died]
    ways = [way for way in HOW if any(layer.how.get(way) for layer in affected)]
    names = ["layer", "kind", *_COUNTS, *ways, *(["died", "revived"] if census.steps else [])]
    rows: list[list[Any]] = [["#", *names]] if affected else []
    for layer in affected:
        cells = {**vars(layer), **layer.how}
        rows.append([layer.number or "", *(cells.get(name, "-") for name in names)])
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip([">", "<", "<"] + [">"] * len(row), row, widths, strict=False)
        yield "  ".join(f"{cell!s:{side}{width}}" for side, cell, width in cells)


def _totals(census: Census) -> Iterator[str]:
    for way, what in (("weight", "filters"), ("gain", "gains"), ("feature", "features")):
        if layers := [layer for layer in census.layers if way in layer.how]:
            totals = {count: sum(getattr(layer, count) for layer in layers) for count in _COUNTS}
            more = [f", {totals[x]:,} {x}" for x in ("recoverable", "unborn") if totals[x]]
            yield f"{totals['dead']:,} of {totals['units']:,} {what} dead{''.join(more)}."
    if census.whole_layers:
        yield f"Dead as a whole: {', '.join(census.whole_layers)}."
    if census.steps:
        yield f"Over steps {census.steps[0]:,} to {census.steps[1]:,}:"
        changes = Counter((event.quantity, event.what) for event in census.events)
        for quantity in [way for way in HOW if any(way == changed for changed, _ in changes)]:
            died, revived, born = (changes[quantity, x] for x in ("died", "revived", "born"))
            yield f"  {quantity}: {died:,} deaths, {revived:,} revivals, {born:,} births."
        if not changes:
            yield "  nothing died, nothing came back."
