"""The layers of a network, their numbers, and the norms of their filters.

A layer is a convolution or a linear layer, and a unit is one of its output channels. Layers are
numbered from 1 in the order in which the model registers them. For ResNet-18 this is the numbering
of the paper: 20 convolutions (the downsampling convolution of a block comes after its second
convolution; the 11th has 256 filters), and the classifier as layer 21.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from powergrad.head import evaluating, unwrap
from powergrad.units import by_unit, transposed_groups, unit_norms

LAYERS = (_ConvNd, nn.Linear)
NORMALISATIONS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
ROOT = "(model)"  # the name of a layer that is the whole model


@dataclass(frozen=True)
class Column:
    """A quantity of the units of one layer, and where it is in a record.

    Attributes:
        quantity: ``"weight"``, ``"gradient"``, ``"feature"`` (at the input of the layer) or
            ``"gain"`` (of a normalisation with one gain per channel).
        layer: The name of the layer in the model.
        number: Its position among the convolutions and linear layers, from 1; None for a
            normalisation, or if a file does not keep the order.
        kind: The class of the module, or the kind inferred from the shape of a stored weight.
        units: The number of values.
        weights: The number of weights per filter; 1 for a gain.
        normalised: Whether a normalisation with the same number of channels is registered directly
            after the layer, which cancels the common scale of its filters.
        start: The position of the first value.
    """

    quantity: str
    layer: str
    number: int | None
    kind: str
    units: int
    weights: int = 1
    normalised: bool = False
    start: int = 0

    @property
    def place(self) -> slice:
        """The positions of the values."""
        return slice(self.start, self.start + self.units)


def arrange(columns: Sequence[Column]) -> tuple[Column, ...]:
    """Place the columns one after the other."""
    starts = itertools.accumulate((column.units for column in columns), initial=0)
    places = zip(columns, starts, strict=False)
    return tuple(replace(column, start=start) for column, start in places)


@dataclass(frozen=True)
class Weight:
    """The weight of a layer, or the gains of a normalisation."""

    column: Column
    tensor: Tensor
    groups: int | None = None  # of a transposed convolution
    module: nn.Module = field(default_factory=nn.Module)

    @property
    def is_gain(self) -> bool:
        """Whether it has the gains of a normalisation."""
        return self.column.quantity == "gain"

    @torch.no_grad()
    def values(self) -> Tensor:
        """The norms of the filters, or the absolute gains: float64 on the CPU."""
        values = self.tensor.abs() if self.is_gain else filter_norms(self.tensor, self.groups)
        return values.to("cpu", torch.float64)


def filter_norms(weight: Tensor, groups: int | None) -> Tensor:
    """The L2 norm of each filter, in float32 or wider; `groups` is of a transposed convolution."""
    return unit_norms(*by_unit(weight, groups)).flatten()


def channel_dim(layer: nn.Module) -> int:
    """The dimension of the channels in a layer's inputs and outputs, counted from the end."""
    return -1 - len(layer.kernel_size) if isinstance(layer, _ConvNd) else -1


def weight_of(module: nn.Module) -> Tensor:
    """The current, unsharded weight of a layer."""
    if parametrize.is_parametrized(module, "weight"):
        with evaluating(module.get_submodule("parametrizations.weight")):  # no power iteration
            weight = module.weight
    else:
        if "weight" not in module._parameters:  # old weight_norm and spectral_norm, pruning
            with evaluating(module), torch.no_grad():
                for hook in module._forward_pre_hooks.values():
                    if type(hook).__module__.startswith("torch.nn.utils."):
                        hook(module, ())  # updates `weight`, as at the next call of the layer
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
    """`name` without the prefix that ``torch.compile`` adds."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def model_weights(model: nn.Module) -> list[Weight]:
    """The weight of every layer and normalisation of `model`, in registration order."""
    weights = []
    for name, module in unwrap(model).named_modules():
        gain = getattr(module, "weight", None) if isinstance(module, NORMALISATIONS) else None
        is_gain = isinstance(gain, Tensor) and gain.dim() == 1
        if is_gain or isinstance(module, LAYERS):
            tensor, groups = weight_of(module), transposed_groups(module)
            units = len(tensor) if groups is None else groups * tensor.shape[1]
            column = Column(
                "gain" if is_gain else "weight",
                plain_name(name) or ROOT,
                None,
                type(module).__name__,
                units,
                tensor.numel() // max(units, 1),
            )
            weights.append(Weight(column, tensor, groups, module))
    return number_layers(weights)


def number_layers(weights: Sequence[Weight], ordered: bool = True) -> list[Weight]:
    """Number the layers, and note which of them a normalisation follows.

    If the weights are not `ordered` as registered, layers have no number, and any normalisation of
    the same size counts as the one after a layer.
    """
    numbers, numbered = itertools.count(1), []
    gains = [weight.column if weight.is_gain else None for weight in weights]
    for place, weight in enumerate(weights):
        if not weight.is_gain:
            followers = gains[place + 1 : place + 2] if ordered else gains
            normalised = any(gain and gain.units == weight.column.units for gain in followers)
            number = next(numbers) if ordered else None
            column = replace(weight.column, number=number, normalised=normalised)
            weight = replace(weight, column=column)
        numbered.append(weight)
    return numbered
