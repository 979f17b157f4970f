"""Where the line is drawn between the living and the dead."""

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
        for name in ("start", "layer", "chance", "gradient", "output"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"Expected `{name}` to be in [0, 1), but got {value}.")
        if not 0 <= self.zero < math.inf:
            raise ValueError(f"Expected `zero` to be at least 0 and finite, but got {self.zero}.")
        if not 1 <= self.revival < math.inf:
            raise ValueError(
                f"Expected `revival` to be at least 1 and finite, but got {self.revival}."
            )
        if self.patience < 1:
            raise ValueError(f"Expected `patience` to be at least 1, but got {self.patience}.")


class DeathLine:
    """The value at which each unit of some layers is dead, given all their values.

    Args:
        layers: The layers, in the order of the values.
        thresholds: The fractions.
    """

    def __init__(self, layers: Sequence[Layer], thresholds: Thresholds) -> None:
        self.layer_of = layer_of([layer.units for layer in layers])
        self.scale_free = torch.tensor([layer.normalised for layer in layers], device="cpu")
        self.scale_free = self.scale_free[self.layer_of]
        # A living filter of d weights comes within e of its usual norm with a chance near e^d.
        weights = torch.tensor(
            [max(layer.weights, 1) for layer in layers], dtype=torch.float64, device="cpu"
        )
        least = thresholds.chance ** (1 / weights[self.layer_of])
        self.start = least.clamp(max=thresholds.start)
        self.layer = least.clamp(max=thresholds.layer)
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
    """For each unit of layers with so many units, which layer it is of, counted from 0."""
    layers = torch.arange(len(counts), device="cpu")
    return layers.repeat_interleave(torch.tensor(counts, dtype=torch.int64, device="cpu"))


def largest_in_layer(values: Tensor, layer_of: Tensor) -> Tensor:
    """For each unit, the largest finite value in its layer; values are not negative."""
    values = torch.where(values.isfinite(), values, 0)
    largest = torch.zeros_like(values).scatter_reduce(0, layer_of, values, "amax")
    return largest[layer_of]
