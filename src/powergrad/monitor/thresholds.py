"""The thresholds of the census, and the value at which each unit is dead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from powergrad.monitor.layers import Layer


@dataclass(frozen=True)
class Thresholds:
    """Where the line is drawn between the living and the dead.

    Attributes:
        start: A norm or gain is dead at this fraction of its start, or less, if that is known and
            was not zero.
        layer: Otherwise, at this fraction of the largest of its layer.
        chance: A filter of few weights, like a gain, may live and be near zero by chance. For one
            of `d` weights both fractions are at most ``chance ** (1 / d)``: 1e-6 for a gain, 1e-3
            for two weights.
        zero: In any case, at this value.
        gradient: A unit gets no gradient at this fraction of the largest of its layer; 0 asks for
            exactly none.
        output: A feature is zero at this fraction of the largest of all; 0 asks for exactly zero.
        revival: In a recording, what died lives again above this multiple of the line it fell
            under, so that a norm on the line is not counted twice.
        patience: In a recording, how many records in a row a gradient or feature must be zero:
            each has seen only the examples since the one before.
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
    """The value at which each unit is dead, for all the units of `layers`, in their order."""

    def __init__(self, layers: Sequence[Layer], thresholds: Thresholds) -> None:
        self.layer_of = layer_of([layer.units for layer in layers])
        normalised = torch.tensor([layer.normalised for layer in layers], device="cpu")
        self.scale_free = normalised[self.layer_of]
        # A living filter of d weights comes within e of its usual norm with a chance near e^d.
        sizes = [max(layer.weights, 1) for layer in layers]
        exponents = 1 / torch.tensor(sizes, dtype=torch.float64, device="cpu")[self.layer_of]
        by_chance = thresholds.chance**exponents
        self.start = by_chance.clamp(max=thresholds.start)
        self.layer = by_chance.clamp(max=thresholds.layer)
        self.zero = thresholds.zero

    def __call__(self, values: Tensor, starts: Tensor | None) -> Tensor:
        """The lines for `values`, norms or absolute gains, that were `starts` at the start."""
        line = self.layer * largest_in_layer(values, self.layer_of)
        if starts is not None:
            kept = largest_in_layer(values / starts, self.layer_of).clamp(max=1)
            scale = torch.where(self.scale_free, kept, 1)
            line = torch.where(starts > self.zero, self.start * starts * scale, line)
        return line.clamp(min=self.zero)


def layer_of(counts: Sequence[int]) -> Tensor:
    """For each unit of layers with these counts of units, the index of its layer."""
    layers = torch.arange(len(counts), device="cpu")
    return layers.repeat_interleave(torch.tensor(counts, dtype=torch.int64, device="cpu"))


def largest_in_layer(values: Tensor, layer_of: Tensor) -> Tensor:
    """For each unit, the largest finite value in its layer; values are not negative."""
    values = torch.where(values.isfinite(), values, 0)
    largest = torch.zeros_like(values).scatter_reduce(0, layer_of, values, "amax")
    return largest[layer_of]
