"""What a census finds, as Python objects, as a table and as CSV."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Mapping
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
    """A unit that the census found.

    Attributes:
        number: The number of its layer, if it has one.
        layer: The name of its layer.
        unit: Its place in the layer, from 0.
        how: The ways in which it was found.
        state: ``"dead"``; ``"recoverable"`` if a gradient reaches it all the same; ``"unborn"`` if
            its weights or gain are as they were at the start, and have not vanished since.
        value: The norm of its filter, its gain, or the largest value of the feature.
        bias: The bias beside a vanished gain: the constant that the channel sends on.
        gradient: The largest norm of its gradient over the data, where measured.
        since: The step from which it is dead, in a recording.
        revivals: How often it came back before, in a recording.
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

    At `step` the `quantity` (weight, gain, gradient or feature) of a unit ``died``,
    ``revived``, or was ``born``: it had vanished at the start, and lives for the first time.
    """

    step: int
    number: int | None
    layer: str
    unit: int
    quantity: str
    what: What


@dataclass(frozen=True)
class LayerCount:
    """What the census found in one layer.

    Attributes:
        number: Its number, if it has one.
        layer: Its name.
        kind: What it is.
        units: How many units it has.
        dead: How many are dead.
        recoverable: How many were found, but get a gradient.
        unborn: How many have not lived yet.
        how: In how many units each way was found; a way that is missing was not measured.
        died: How many units died at some time of a recording.
        revived: How many of those came back at some time.
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
        """Whether no unit of the layer is alive, though it was not born so."""
        return self.dead + self.recoverable == self.units


@dataclass(frozen=True)
class Census:
    """What :func:`census` found. ``print(census)`` shows a table of the layers concerned.

    Attributes:
        source: What was examined.
        layers: Every layer, normalisation and set of features, with its counts.
        units: Every unit found, in order.
        events: Deaths, revivals and births, by step, from a recording.
        steps: The first and the last recorded step.
        examples: How many examples were run through a model.
    """

    source: str
    layers: tuple[LayerCount, ...]
    units: tuple[Unit, ...]
    events: tuple[Event, ...] = ()
    steps: tuple[int, int] | None = None
    examples: int = 0

    @property
    def dead(self) -> tuple[Unit, ...]:
        """The units that are dead."""
        return tuple(unit for unit in self.units if unit.state == "dead")

    @property
    def recoverable(self) -> tuple[Unit, ...]:
        """The units that were found, but get a gradient."""
        return tuple(unit for unit in self.units if unit.state == "recoverable")

    @property
    def unborn(self) -> tuple[Unit, ...]:
        """The units that had vanished at the start, and have not lived since."""
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
        """Write the units found, the counts of every layer, or the events, one a row.

        Raises:
            ValueError: If `rows` is none of these.
        """
        kinds = {"units": Unit, "layers": LayerCount, "events": Event}
        if rows not in kinds:
            raise ValueError(f"Expected `rows` to be one of {', '.join(kinds)}, but got {rows!r}.")
        names = [each.name for each in fields(kinds[rows])]
        with open(path, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(names)
            for row in getattr(self, rows):
                writer.writerow([_cell(getattr(row, name)) for name in names])

    def __str__(self) -> str:
        return _table(self)


# From findings to a census ------------------------------------------------------------------------


@dataclass
class Finding:
    """One layer, with tensors of ``(units,)``: for each way of being found, which units were.

    Attributes:
        layer: The layer.
        how: By way, which units were found; a way that is missing was not measured.
        values: The norms, the gains, or the largest values of the features.
        biases: The biases beside the gains.
        gradients: The norms of the gradients, where measured.
        learns: Which units get a gradient, where measured.
        unborn: Which units had vanished at the start and have not lived since.
        since: The step from which each unit is dead.
        deaths: How often each unit died.
        revivals: How often each unit came back.
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
    findings: Iterable[Finding],
    events: Iterable[Event] = (),
    steps: tuple[int, int] | None = None,
    examples: int = 0,
) -> Census:
    """The census of `findings`."""
    layers: list[LayerCount] = []
    units: list[Unit] = []
    for finding in findings:
        found = _units(finding)
        units += found
        layer = finding.layer
        states = [unit.state for unit in found]
        layers.append(
            LayerCount(
                number=layer.number,
                layer=layer.name,
                kind=layer.kind,
                units=layer.units,
                dead=states.count("dead"),
                recoverable=states.count("recoverable"),
                unborn=states.count("unborn"),
                how={way: int(finding.how[way].sum()) for way in HOW if way in finding.how},
                died=_positive(finding.deaths),
                revived=_positive(finding.revivals),
            )
        )
    return Census(source, tuple(layers), tuple(units), tuple(events), steps, examples)


def _positive(counts: Tensor | None) -> int:
    return 0 if counts is None else int((counts > 0).sum())


def _units(finding: Finding) -> list[Unit]:
    found: list[Unit] = []
    anyhow = torch.stack(list(finding.how.values())).any(0)
    for u in anyhow.nonzero().flatten().tolist():
        state: State = "dead"
        if finding.unborn is not None and finding.unborn[u]:
            state = "unborn"
        elif finding.learns is not None and finding.learns[u]:
            state = "recoverable"
        found.append(
            Unit(
                number=finding.layer.number,
                layer=finding.layer.name,
                unit=u,
                how=tuple(way for way in HOW if way in finding.how and finding.how[way][u]),
                state=state,
                value=_item(finding.values, u),
                bias=_item(finding.biases, u),
                gradient=_item(finding.gradients, u),
                since=_item(finding.since, u),
                revivals=_item(finding.revivals, u) or 0,
            )
        )
    return found


def _item(tensor: Tensor | None, unit: int) -> Any:
    return None if tensor is None else tensor[unit].item()


# The table ----------------------------------------------------------------------------------------


def _cell(value: Any) -> Any:
    if isinstance(value, tuple):
        return "+".join(value)
    if isinstance(value, Mapping):
        return " ".join(f"{way}={number}" for way, number in value.items())
    return "" if value is None else value


def _table(census: Census) -> str:
    concerned = [
        layer
        for layer in census.layers
        if layer.dead or layer.recoverable or layer.unborn or layer.died
    ]
    over = f", over {census.examples:,} examples" if census.examples else ""
    lines = [census.source + over]
    if concerned:
        ways = [way for way in HOW if any(layer.how.get(way) for layer in concerned)]
        timed = ["died", "revived"] if census.steps else []
        header = ["#", "layer", "kind", "units", "dead", "recoverable", "unborn", *ways, *timed]
        rows = [header] + [
            [
                "" if layer.number is None else str(layer.number),
                layer.layer + (" (whole)" if layer.whole else ""),
                layer.kind,
                *(str(getattr(layer, name)) for name in header[3:7]),
                *(str(layer.how.get(way, "-")) for way in ways),
                *(str(getattr(layer, name)) for name in timed),
            ]
            for layer in concerned
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += [
            "  ".join(
                cell.ljust(width) if 0 < place < 3 else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
    lines += _summary(census)
    return "\n".join(lines)


def _summary(census: Census) -> list[str]:
    lines = []
    for what, chosen in (
        ("filters", [layer for layer in census.layers if "weight" in layer.how]),
        ("gains", [layer for layer in census.layers if "gain" in layer.how]),
        ("features", [layer for layer in census.layers if "feature" in layer.how]),
    ):
        if chosen:
            line = f"{sum(layer.dead for layer in chosen):,} of "
            line += f"{sum(layer.units for layer in chosen):,} {what} dead"
            for state in ("recoverable", "unborn"):
                number = sum(getattr(layer, state) for layer in chosen)
                line += f", {number:,} {state}" if number else ""
            lines.append(line + ".")
    constant = sum("gain" in unit.how and bool(unit.bias) for unit in census.units)
    if constant:
        lines.append(f"{constant:,} channels of vanished gain send on a constant, their bias.")
    if census.whole_layers:
        lines.append(f"Whole layers: {', '.join(census.whole_layers)}.")
    if census.steps:
        lines.append(f"Over steps {census.steps[0]:,} to {census.steps[1]:,}:")
        for quantity in ("weight", "gain", "gradient", "feature"):
            happened = [event for event in census.events if event.quantity == quantity]
            if not happened:
                continue
            last = {(event.layer, event.unit): event.what for event in happened}
            died = {(e.layer, e.unit) for e in happened if e.what == "died"}
            back = {(e.layer, e.unit) for e in happened if e.what == "revived"}
            born = sum(event.what == "born" for event in happened)
            line = f"  {quantity}: {len(died):,} died, {len(back):,} of these came back, "
            line += f"{list(last.values()).count('died'):,} dead at the end"
            lines.append(line + (f"; {born:,} born." if born else "."))
        if not census.events:
            lines.append("  nothing died, nothing came back.")
    return lines
