"""The thresholds of the census, and the value at or below which each unit is dead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from powergrad.monitor.layers import Layer


@dataclass(frozen=True)
class Thresholds:
    """The values below which :func:`powergrad.census` counts a unit as dead.

    Attributes:
        start: A norm or gain is dead at or below this fraction of its initial value, if that is
            known and not zero.
        layer: Otherwise, it is dead at or below this fraction of the largest value of its layer.
        chance: A gain, or a filter with few weights, may be near zero by chance while it is alive.
            For a filter of `d` weights, both fractions are at most ``chance ** (1 / d)``: 1e-6 for
            a gain, 1e-3 for two weights.
        zero: At or below this value, a norm or gain is always dead.
        gradient: A gradient counts as zero at or below this fraction of the largest of its layer;
            with 0, only an exact zero does.
        output: A feature counts as zero at or below this fraction of the largest feature; with 0,
            only an exact zero does.
        revival: In a recording, a dead unit revives above this multiple of its threshold, so that a
            norm that hovers around the threshold is counted once.
        patience: In a recording, the number of consecutive records in which a gradient or feature
            must be zero, because each record covers only the examples since the previous one.
    """

    start: float = 0.01
    layer: float = 0.001
    chance: float = 1e-6
    zero: float = 1e-8
    gradient: float = 0.0
    output: float = 0.0
    revival: float = 2.0
    patience: int = 10

    def __post_init__(self) -> None:
        fractions = dict.fromkeys(("start", "layer", "chance", "gradient", "output"), (0, 1))
        others = {"zero": (0, math.inf), "revival": (1, math.inf), "patience": (1, math.inf)}
        for name, (low, high) in {**fractions, **others}.items():
            if not low <= (value := getattr(self, name)) < high:
                raise ValueError(f"Expected `{name}` to be in [{low}, {high}), but got {value}.")


class DeathLine:
    """The values at or below which the units of `layers` are dead."""

    def __init__(self, layers: Sequence[Layer], thresholds: Thresholds) -> None:
        self.layer_of = layer_of([layer.units for layer in layers])
        normalised = torch.tensor([layer.normalised for layer in layers], device="cpu")
        self.scale_free = normalised[self.layer_of]
        # By chance, a live filter of d weights has e times its usual norm with probability ~ e^d.
        sizes = [max(layer.weights, 1) for layer in layers]
        exponents = 1 / torch.tensor(sizes, dtype=torch.float64, device="cpu")[self.layer_of]
        by_chance = thresholds.chance**exponents
        self.start = by_chance.clamp(max=thresholds.start)
        self.layer = by_chance.clamp(max=thresholds.layer)
        self.zero = thresholds.zero

    def __call__(self, values: Tensor, starts: Tensor | None) -> Tensor:
        """The thresholds for `values` (norms or absolute gains) with initial values `starts`."""
        line = self.layer * largest_in_layer(values, self.layer_of)
        if starts is not None:
            kept = largest_in_layer(values / starts, self.layer_of).clamp(max=1)
            scale = torch.where(self.scale_free, kept, 1)
            line = torch.where(starts > self.zero, self.start * starts * scale, line)
        return line.clamp(min=self.zero)


def layer_of(counts: Sequence[int]) -> Tensor:
    """For each unit, the index of its layer; `counts` has the number of units per layer."""
    layers = torch.arange(len(counts), device="cpu")
    return layers.repeat_interleave(torch.tensor(counts, dtype=torch.int64, device="cpu"))


def largest_in_layer(values: Tensor, layer_of: Tensor) -> Tensor:
    """For each unit, the largest finite value in its layer; values are not negative."""
    values = torch.where(values.isfinite(), values, 0)
    largest = torch.zeros_like(values).scatter_reduce(0, layer_of, values, "amax")
    return largest[layer_of]
