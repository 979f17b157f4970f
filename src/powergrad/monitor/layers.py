"""The layers of a network, their numbers, and the norms of their filters.

A layer is a convolution or a linear layer, and a unit is one of its output channels. Layers are
numbered from 1 in the order in which the model registers them. For ResNet-18 this is the numbering
of the paper: 20 convolutions (the downsampling convolution of a block comes after its second
convolution; the 11th has 256 filters), and the classifier as layer 21.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from powergrad.head import evaluating, unwrap
from powergrad.units import by_unit, unit_norms

LAYERS = (_ConvNd, nn.Linear)
NORMALISATIONS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


@dataclass(frozen=True)
class Column:
    """A quantity of the units of one layer, and where it is in a record."""

    quantity: str  # weight, gradient, feature (that enters the layer) or gain (of a normalisation)
    layer: str
    number: int | None  # None for a normalisation, or if a file does not keep the order
    kind: str  # the class of the module, or what the shape of a stored weight shows
    units: int
    weights: int = 1  # of one unit
    # Whether a normalisation with the same number of channels is registered directly after the
    # layer, which cancels the common scale of its filters.
    normalised: bool = False
    start: int = 0

    @property
    def place(self) -> slice:
        """The positions of its values."""
        return slice(self.start, self.start + self.units)


Source = nn.Module | Tensor  # a module, or its weight as it is stored
Weight = tuple[Column, Source]


def arrange(columns: Sequence[Column]) -> tuple[Column, ...]:
    """Place the columns one after the other."""
    starts = itertools.accumulate((column.units for column in columns), initial=0)
    return tuple(map(lambda column, start: replace(column, start=start), columns, starts))


def measure(column: Column, source: Source) -> Tensor:
    """The norms of the filters or their gradients (NaN if there is none), or the absolute gains."""
    tensor = gradient_of(source) if column.quantity == "gradient" else weight_of(source)
    if tensor is None:
        return torch.full((column.units,), torch.nan, device="cpu")
    if column.quantity == "gain":
        return tensor.abs()
    return unit_norms([by_unit(tensor, source)])[0].flatten()


def gradient_of(source: Source) -> Tensor | None:
    """The gradient of a weight; None if that is computed from other parameters."""
    return getattr(vars(source)["_parameters"].get("weight"), "grad", None)


def weight_of(source: Source) -> Tensor:
    """The current, unsharded weight of a layer."""
    if isinstance(source, Tensor):
        return source
    if "weight" in source._parameters:
        weight = source._parameters["weight"]
    else:  # it is computed from others: by a parametrization, or by hooks before the next call
        with evaluating(source), torch.no_grad():  # no power iteration
            for hook in source._forward_pre_hooks.values():
                if type(hook).__module__.startswith("torch.nn.utils."):
                    hook(source, ())
            weight = source.weight
    if not isinstance(weight, Tensor) or isinstance(weight, nn.UninitializedParameter):
        raise ValueError(
            "Expected every layer of `model` to have an initialised weight, but got a "
            f"{type(source).__name__} without one; run one batch through the model first."
        )
    if hasattr(weight, "placements"):
        raise ValueError(
            "Expected whole weights, but got a sharded one (DTensor); monitor a model that is "
            "replicated on each rank, or the gathered state dict."
        )
    return weight


def plain_name(name: str) -> str:
    """`name` without the prefix that ``torch.compile`` adds; that of the whole model."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod") or "(model)"


def model_weights(model: nn.Module) -> list[Weight]:
    """Every layer and normalisation of `model`, in registration order."""
    found = []
    for name, module in unwrap(model).named_modules():
        gain = getattr(module, "weight", None) if isinstance(module, NORMALISATIONS) else None
        if isinstance(module, LAYERS) or (isinstance(gain, Tensor) and gain.dim() == 1):
            found.append((name, type(module).__name__, module))
    return number_layers(found)


def number_layers(found: Iterable[tuple[str, str, Source]], ordered: bool = True) -> list[Weight]:
    """Describe weights and gains, given by name, kind and source; vectors are gains.

    If they are not `ordered` as registered, layers have no number, and any normalisation of the
    same size counts as the one after a layer.
    """
    weights = []
    for name, kind, source in found:
        tensor = weight_of(source)
        units = getattr(source, "out_channels", len(tensor))
        quantity, size = "gain" if tensor.dim() == 1 else "weight", tensor.numel() // max(units, 1)
        weights.append((Column(quantity, plain_name(name), None, kind, units, size), source))
    gains = [column.units if column.quantity == "gain" else None for column, _ in weights]
    numbers = itertools.count(1)
    for place, (column, source) in enumerate(weights):
        if column.quantity == "weight":
            number = next(numbers) if ordered else None
            normalised = column.units in (gains[place + 1 : place + 2] if ordered else gains)
            weights[place] = replace(column, number=number, normalised=normalised), source
    return weights
