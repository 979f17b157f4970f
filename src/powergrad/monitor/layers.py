"""The layers of a network, their numbers, and the norms of their filters.

A layer is a convolution or a linear layer, and a unit is one of its output channels. Layers are
numbered from 1 in the order in which the model registers them. For ResNet-18 this is the numbering
of the paper: 20 convolutions (the downsampling convolution of a block comes after its second
convolution; the 11th has 256 filters), and the classifier as layer 21.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from powergrad.head import evaluating, unwrap
from powergrad.units import unit_norms, by_unit

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


def arrange(columns: Sequence[Column]) -> tuple[Column, ...]:
    """Place the columns one after the other."""
    starts = itertools.accumulate((column.units for column in columns), initial=0)
    return tuple(map(lambda column, start: replace(column, start=start), columns, starts))


@dataclass(frozen=True)
class Weight:
    """The weight of a layer or the gains of a normalisation: of a module, or as they are stored."""

    column: Column
    source: nn.Module | Tensor

    @property
    def tensor(self) -> Tensor:
        """Its current value."""
        return self.source if isinstance(self.source, Tensor) else weight_of(self.source)

    @property
    def gradient(self) -> Tensor | None:
        """None for a weight that is computed from other parameters."""
        own = self.source._parameters if isinstance(self.source, nn.Module) else {}
        return getattr(own.get("weight"), "grad", None)

    def norms(self) -> Tensor:
        """The norms of the filters, or the absolute gains."""
        return self.tensor.abs() if self.column.quantity == "gain" else self._norms_of(self.tensor)

    def gradient_norms(self) -> Tensor:
        """The norms of the filters' gradients; NaN without a gradient."""
        if self.gradient is None:
            return torch.full((self.column.units,), torch.nan, device=self.tensor.device)
        return self._norms_of(self.gradient)

    def _norms_of(self, tensor: Tensor) -> Tensor:
        return unit_norms([by_unit(tensor, self.source)])[0].flatten()


def weight_of(module: nn.Module) -> Tensor:
    """The current, unsharded weight of a layer."""
    if "weight" in module._parameters:
        weight = module._parameters["weight"]
    else:  # it is computed from others: by a parametrization, or by hooks before the next call
        with evaluating(module), torch.no_grad():  # no power iteration
            for hook in module._forward_pre_hooks.values():
                if type(hook).__module__.startswith("torch.nn.utils."):
                    hook(module, ())
            weight = module.weight
    if not isinstance(weight, Tensor) or isinstance(weight, nn.UninitializedParameter):
        raise ValueError(
            "Expected every layer of `model` to have an initialised weight, but got a "
            f"{type(module).__name__} without one; run one batch through the model first."
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
    """The weight of every layer and normalisation of `model`, in registration order."""
    found = []
    for name, module in unwrap(model).named_modules():
        gain = getattr(module, "weight", None) if isinstance(module, NORMALISATIONS) else None
        if isinstance(module, LAYERS) or (isinstance(gain, Tensor) and gain.dim() == 1):
            found.append((name, type(module).__name__, weight_of(module), module))
    return number_layers(found)


def number_layers(
    found: Sequence[tuple[str, str, Tensor, nn.Module | Tensor]], ordered: bool = True
) -> list[Weight]:
    """Describe weights and gains, given by name, kind, value and source; vectors are gains.

    If they are not `ordered` as registered, layers have no number, and any normalisation of the
    same size counts as the one after a layer.
    """
    gains = [len(tensor) if tensor.dim() == 1 else None for _, _, tensor, _ in found]
    numbers, weights = itertools.count(1), []
    for place, (name, kind, tensor, source) in enumerate(found):
        view, spanned = by_unit(tensor, source)
        units = (
            math.prod(size for dim, size in enumerate(view.shape) if spanned and dim not in spanned)
            if spanned
            else len(tensor)
        )
        number, normalised, quantity = None, False, "gain"
        if gains[place] is None:
            followers = gains[place + 1 : place + 2] if ordered else gains
            normalised, quantity = units in followers, "weight"
            number = next(numbers) if ordered else None
        size = tensor.numel() // max(units, 1)
        column = Column(quantity, plain_name(name), number, kind, units, size, normalised)
        weights.append(Weight(column, source))
    return weights
