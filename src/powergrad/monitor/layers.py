"""The layers of a network, their numbers, and the norms of their filters.

A layer is a convolution or a linear layer, and a unit is one of its output channels. Layers are
numbered from 1 in the order in which the model registers them. For ResNet-18 this is the numbering
of the paper: 20 convolutions (the downsampling convolution of a block comes after its second
convolution; the 11th has 256 filters), and the classifier as layer 21.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from powergrad._head import evaluating, unwrap
from powergrad.units import by_unit, transposed_groups, unit_norms

LAYERS = (_ConvNd, nn.Linear)
NORMALISATIONS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
ROOT = "(model)"  # the name of a layer that is the whole model


@dataclass(frozen=True)
class Layer:
    """A convolution or linear layer, or a normalisation with one gain per channel.

    Attributes:
        number: Its position among the convolutions and linear layers, from 1; None for a
            normalisation, or if a file does not keep the order.
        name: Its name in the model.
        kind: The class of the module, or the kind inferred from the shape of a stored weight.
        units: The number of output channels.
        weights: The number of weights per filter; 1 for a gain.
        normalised: Whether a normalisation with the same number of channels is registered directly
            after it, which cancels the common scale of its filters.
    """

    number: int | None
    name: str
    kind: str
    units: int
    weights: int = 1
    normalised: bool = False


@dataclass(frozen=True)
class Weight:
    """The weight of a layer, or the gains of a normalisation, with related tensors.

    `groups` is the number of groups of a transposed convolution, and `batches` is the number of
    batches in the running statistics; both are None for any other layer.
    """

    name: str
    kind: str
    tensor: Tensor
    is_gain: bool = False
    groups: int | None = None
    bias: Tensor | None = None
    batches: Tensor | None = None

    @property
    def units(self) -> int:
        """The number of output channels."""
        if self.is_gain:
            return self.tensor.numel()
        return len(self.tensor) if self.groups is None else self.tensor.shape[1] * self.groups

    @torch.no_grad()
    def values(self) -> Tensor:
        """The norms of the filters, or the absolute gains: float64 on the CPU."""
        norms = self.tensor if self.is_gain else filter_norms([self.tensor], [self.groups])[0]
        return on_host(norms).abs()


def on_host(tensor: Tensor) -> Tensor:
    """A vector in float64 on the CPU."""
    return tensor.detach().flatten().to("cpu", torch.float64)


def filter_norms(weights: Sequence[Tensor], groups: Sequence[int | None]) -> list[Tensor]:
    """The L2 norm of each filter of each weight, in float32 or wider.

    `groups` is the number of groups of a transposed convolution; None for any other layer.
    """
    return [unit_norms(*by_unit(*pair)).flatten() for pair in zip(weights, groups, strict=True)]


def channel_dim(layer: nn.Module) -> int:
    """The dimension of the channels in a layer's inputs and outputs, counted from the end."""
    return -1 - len(layer.kernel_size) if isinstance(layer, _ConvNd) else -1


def weight_of(module: nn.Module) -> Tensor:
    """The current, unsharded weight of a layer; reading it has no side effects."""
    weight = _current_weight(module)
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


def _current_weight(module: nn.Module) -> Any:
    if parametrize.is_parametrized(module, "weight"):
        with evaluating(module.get_submodule("parametrizations.weight")):  # no power iteration
            return module.weight
    stored = {**module._parameters, **module._buffers}
    # A hook of torch.nn.utils updates the attribute only when the layer is called.
    computed = None if "weight" in stored else effective_weight(stored)
    return module.weight if computed is None else computed


@torch.no_grad()
def effective_weight(stored: Mapping[str, Tensor | None]) -> Tensor | None:
    """Compute the weight of a layer that stores other tensors instead; None if unknown.

    Weight normalisation stores g and v; the weight is ``g * v / |v|``, with one norm per entry of
    g. Spectral normalisation stores W, u and v; the weight is ``W / (u . W v)``, with W as a
    matrix. Pruning stores W and a mask. The first two have an older and a newer form in PyTorch.
    """
    inside = "parametrizations.weight."
    for g, v in ((f"{inside}original0", f"{inside}original1"), ("weight_g", "weight_v")):
        if (gain := stored.get(g)) is not None and (direction := stored.get(v)) is not None:
            kept = [dim for dim, size in enumerate(gain.shape) if size != 1]
            others = [dim for dim in range(direction.dim()) if dim not in kept]
            direction = _wide(direction)
            return direction * gain / torch.linalg.vector_norm(direction, dim=others, keepdim=True)
    for original, left, right in (
        (f"{inside}original", f"{inside}0._u", f"{inside}0._v"),
        ("weight_orig", "weight_u", "weight_v"),
    ):
        weight, u, v = stored.get(original), stored.get(left), stored.get(right)
        if weight is not None and u is not None and v is not None:
            weight = _wide(weight)
            matrix = weight if len(u) == len(weight) else weight.transpose(0, 1)
            return weight / torch.dot(u.to(weight), matrix.flatten(1) @ v.to(weight))
    weight, mask = stored.get("weight_orig"), stored.get("weight_mask")
    return None if weight is None or mask is None else weight * mask


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def plain_name(name: str) -> str:
    """`name` without the prefix that ``torch.compile`` adds."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def model_weights(model: nn.Module) -> Iterator[tuple[Weight, nn.Module]]:
    """The weight of every layer and normalisation of `model`, in registration order."""
    for name, module in unwrap(model).named_modules():
        is_gain = isinstance(module, NORMALISATIONS)
        if isinstance(module, LAYERS) or (is_gain and _has_gain_per_channel(module)):
            weight = Weight(
                plain_name(name) or ROOT,
                type(module).__name__,
                weight_of(module),
                is_gain,
                transposed_groups(module),
                getattr(module, "bias", None),
                getattr(module, "num_batches_tracked", None),
            )
            yield weight, module


def _has_gain_per_channel(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 1


def named_units(model: nn.Module) -> list[tuple[Layer, nn.Module]]:
    """Every layer and every normalisation of `model`, in registration order, with its module."""
    pairs = list(model_weights(model))
    layers = describe_layers([weight for weight, _ in pairs])
    return [(layer, module) for layer, (_, module) in zip(layers, pairs, strict=True)]


def describe_layers(weights: Sequence[Weight], ordered: bool = True) -> list[Layer]:
    """The layer of each weight.

    If the weights are not `ordered` as registered, layers have no number, and any normalisation of
    the same size counts as the one after a layer.
    """
    numbers = itertools.count(1)
    gain_sizes = {weight.units for weight in weights if weight.is_gain}
    layers = []
    for weight, after in itertools.zip_longest(weights, weights[1:]):
        number, normalised, size = None, False, weight.units
        if not weight.is_gain and ordered:
            number = next(numbers)
            normalised = after is not None and after.is_gain and after.units == size
        elif not weight.is_gain:
            normalised = size in gain_sizes
        filter_size = weight.tensor.numel() // max(size, 1)
        layers.append(Layer(number, weight.name, weight.kind, size, filter_size, normalised))
    return layers
