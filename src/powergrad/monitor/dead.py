"""The census: which units of a network are dead, how, since when, and whether they came back.

A unit is an output channel of a convolution or a linear layer, a gain of a normalisation, or a
feature that enters the classifier. It is dead if its norm or gain has vanished or is not finite; in
a recording, also if its gradient or feature is zero. A model or a checkpoint is examined like a
recording of one record.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from powergrad.head import unwrap
from powergrad.monitor.counts import Census, Event, LayerCount, State, Unit
from powergrad.monitor.layers import Column, Weight, measure, weights_of
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

    If a model or a state dict has sharded weights (DTensors), all processes call this function, and
    all get the census of the whole.

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
        if path is None or not path.is_dir():
            weights = weights_of(source, "source")
            columns, values = [column for column, _ in weights], _norms(weights)
            starts = [torch.full_like(norms, torch.nan) for norms in values]
            if initial is not None:
                before = weights_of(initial, "initial")
                pairs = zip(before, _norms(before), strict=True)
                known = {column.layer: norms for (column, _), norms in pairs}
                starts = [known.get(column.layer, torch.empty(0)) for column in columns]
            for column, start in zip(columns, starts, strict=True):
                if len(start) != column.units:
                    wanted = f"{column.units} units in {column.layer!r}"
                    raise ValueError(f"Expected `initial` to have {wanted}, but got {len(start)}.")
            name = str(path or type(unwrap(source)).__name__)  # type: ignore[arg-type]
            return _count(name, columns, [norms[None] for norms in values], starts)
        recording = Recording(path)
        name, (steps, table) = str(recording.directory), recording.load()
        if initial is not None:
            raise ValueError(
                "Expected no `initial` for a recording, but got one; the first record is its "
                "initial state."
            )
        if not len(steps):
            raise ValueError(f"Expected {name!r} to hold a record, but got none.")
        values = (table[:, column.place].double() for column in recording.columns)
        starts = (table[0, column.place].double() for column in recording.columns)
        return _count(name, recording.columns, values, starts, steps.tolist())


def _norms(weights: Sequence[Weight]) -> list[Tensor]:
    return [norms.to("cpu", torch.float64) for norms in measure(weights)]


def _largest(values: Tensor) -> Tensor:
    """The largest finite value of each row, or 0; values are not negative."""
    return pad(torch.where(values.isfinite(), values, 0), (0, 1)).amax(1, keepdim=True)


class _Life(NamedTuple):
    """What happened to the units of a column."""

    last: Tensor  # their values in the last record
    dead: Tensor  # those that are dead in it
    unborn: Tensor  # and those that have been dead from the start
    events: list[Event]
    since: dict[int, int]  # by unit, the step of its last event


def _follow(column: Column, values: Tensor, start: Tensor, steps: Sequence[int]) -> _Life:
    """Follow units from their `start` through their `values` in all records, a row each.

    A unit dies when it has been under its line for `patience` records; the death is dated to the
    first of them. It revives in the first record in which it is over twice its line. Units in
    between keep their state, and records without any value are left out.
    """
    is_norm, patience, last = column.quantity in ("weight", "gain"), PATIENCE, values[-1].clone()
    if is_norm:
        # A living filter of d weights is below a fraction e with a probability of about e^d. So
        # that this is no likelier for one or two weights than for three, their fractions are less.
        patience, by_chance = 1, START ** (3 / max(column.weights, 1))
        shared = _largest(values / start).clamp(max=1) if column.normalised else 1
        by_layer = min(LAYER, by_chance) * _largest(values)
        line = torch.where(start > ZERO, min(START, by_chance) * start * shared, by_layer)
        line = line.clamp(min=ZERO)
    else:
        start, line = torch.ones_like(start), torch.zeros(())
        measured = ~values.isnan().all(1)
        steps = [step for step, known in zip(steps, measured.tolist(), strict=True) if known]
        values = values[measured]
    # Row 0 is the start. A cumulative maximum finds the last row of a kind so far.
    row = torch.arange(1, len(values) + 2, dtype=torch.int32)[:, None]
    alive = torch.cat([~(start <= ZERO)[None], values > 2 * line])
    under = torch.cat([torch.zeros_like(alive[:1]), values <= line])
    for_patience = row - (row * ~under).cummax(0).values >= patience
    for_patience[0] = ~alive[0]
    dead = (row * for_patience).cummax(0).values > (row * alive).cummax(0).values
    at, unit = (dead[1:] != dead[:-1]).nonzero().T
    died, born = dead[at + 1, unit], (~dead).int().argmax(0)[unit] == at + 1
    changes = zip(*(x.tolist() for x in (at, unit, died, born)), strict=True) if steps else ()
    events = [
        Event(
            steps[at + 1 - patience if died else at],
            *(column.number, column.layer, unit, column.quantity),
            "died" if died else "born" if born else "revived",
        )
        for at, unit, died, born in changes
    ]
    since = {event.unit: event.step for event in events}
    return _Life(last, dead[-1].clone(), dead.all(0), events, since)


def _count(
    source: str,
    columns: Sequence[Column],
    values: Iterable[Tensor],
    starts: Iterable[Tensor],
    steps: Sequence[int] = (),
) -> Census:
    """Count the units that are dead in the last record; `steps` are those of a recording."""
    lives = {
        (column.quantity, column.layer): _follow(column, rows, start, steps)
        for column, rows, start in zip(columns, values, starts, strict=True)
    }
    layers: list[LayerCount] = []
    units: list[Unit] = []
    for column in sorted(columns, key=lambda column: column.quantity, reverse=True):
        number, layer, life = column.number, column.layer, lives[column.quantity, column.layer]
        how, gradient = {column.quantity: life.dead}, None
        if column.quantity == "gradient":
            continue
        if column.quantity == "weight" and (gradient := lives.get(("gradient", layer))):
            how["gradient"] = gradient.dead
        if column.quantity == "feature":
            number, layer = None, f"input of {layer}"
        else:
            how["nonfinite"] = ~life.last.isfinite()
        states: Counter[State] = Counter()
        for unit in torch.stack(list(how.values())).any(0).nonzero().flatten().tolist():
            learns = gradient is not None and gradient.last[unit] > 0
            state: State = "unborn" if life.unborn[unit] else "recoverable" if learns else "dead"
            ways = tuple(way for way in how if how[way][unit])
            shown = gradient if gradient is not None and not life.dead[unit] else life
            since = shown.since.get(unit, steps[0]) if steps else None
            units.append(Unit(number, layer, unit, ways, state, float(life.last[unit]), since))
            states[state] += 1
        changed = Counter(what for _, what in {(event.unit, event.what) for event in life.events})
        counts = states["dead"], states["recoverable"], states["unborn"]
        totals = {way: int(is_dead.sum()) for way, is_dead in how.items()}
        over_time = changed["died"], changed["revived"]
        kind = column.kind, column.units
        layers.append(LayerCount(number, layer, *kind, *counts, totals, *over_time))
    events = sorted((e for x in lives.values() for e in x.events), key=lambda event: event.step)
    ends = (steps[0], steps[-1]) if steps else None
    return Census(source, tuple(layers), tuple(units), tuple(events), ends)
