"""The units of a network: the filters of its layers and the gains of its normalisations.

A layer is a convolution or a linear layer, a unit one of its output channels. Layers are numbered
from 1 in the order in which the model registers them, which for ResNet-18 is the numbering of the
paper: 20 convolutions (a block's downsampling convolution comes after its second one), of which
the 11th has 256 filters, and the classifier as 21.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from powergrad._units import by_unit, in_rows, transposed_groups, unit_norms

LAYERS = (_ConvNd, nn.Linear)
NORMALISATIONS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


@dataclass(frozen=True)
class Layer:
    """A convolution or linear layer, or a normalisation with one gain a channel.

    Attributes:
        number: Its place among the convolutions and linear layers, from 1; None for a
            normalisation, and where a file does not keep the order.
        name: Its name in the model.
        kind: The class of the module, or what the shape of a stored weight tells.
        units: How many output channels it has.
        weights: How many weights a filter has; 1 for a gain.
        normalised: Whether a normalisation of as many channels is registered next after it, which
            undoes the common scale of its filters.
    """

    number: int | None
    name: str
    kind: str
    units: int
    weights: int = 1
    normalised: bool = False


@dataclass(frozen=True)
class Filters:
    """A layer and the norms of its filters, ``(units,)``, in float64 on the CPU."""

    layer: Layer
    norms: Tensor


@dataclass(frozen=True)
class Gains:
    """A normalisation, its gains and biases, ``(units,)``, in float64 on the CPU.

    `untrained` says that its running statistics have seen no batch: its gains are as initialised.
    """

    layer: Layer
    gains: Tensor
    biases: Tensor | None
    untrained: bool


def filter_norms(weight: Tensor, groups: int | None = None) -> Tensor:
    """The L2 norm of each filter of `weight`, ``(out,)``, in float32 or wider.

    `groups` are those of a transposed convolution, None for any other layer.
    """
    weight, unit = by_unit(weight, groups)
    half = weight.dtype in (torch.float16, torch.bfloat16)
    dtype = torch.float32 if half else None
    return unit_norms([weight], [unit], dtype=dtype, rows=in_rows(unit, weight))


def norms_by_layer(weights: list[Tensor], groups: list[int | None]) -> list[Tensor]:
    """:func:`filter_norms` of each of `weights`, at once where the C kernel serves all."""
    views, units = zip(*map(by_unit, weights, groups), strict=True)
    if all(map(in_rows, units, views)):
        norms = unit_norms(list(views), list(units), rows=True)
        return list(norms.split([len(view) for view in views]))
    return list(map(filter_norms, weights, groups))


def channel_dim(layer: nn.Module) -> int:
    """Where the inputs and outputs of a layer have their channels, counted from the end."""
    return -1 if isinstance(layer, nn.Linear) else 1 - weight_of(layer).dim()


def weight_of(module: nn.Module) -> Tensor:
    """The weight of a layer as it is now, whole."""
    weight = module.weight
    if not isinstance(weight, Tensor) or isinstance(weight, nn.UninitializedParameter):
        raise ValueError(
            "Expected every layer of `model` to have its weight, but got a "
            f"{type(module).__name__} that has none yet; run one batch through the model first."
        )
    if hasattr(weight, "placements"):
        raise ValueError(
            "Expected whole weights, but got a sharded one (DTensor); monitor a model that is "
            "replicated on each rank, or the gathered state dict."
        )
    return weight


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, DataParallel and ``torch.compile``."""
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    while True:
        if isinstance(model, wrappers):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def plain_name(name: str) -> str:
    """`name` without the marks of ``torch.compile``; the root module is ``(model)``."""
    parts = [part for part in name.split(".") if part and part != "_orig_mod"]
    return ".".join(parts) or "(model)"


def named_units(model: nn.Module) -> list[tuple[Layer, nn.Module]]:
    """Every layer and every normalisation of `model`, in registration order, with its module."""
    layers: list[Layer] = []
    modules: list[nn.Module] = []
    number = 0
    for name, module in unwrap(model).named_modules():
        kind = type(module).__name__
        if isinstance(module, LAYERS):
            number += 1
            sizes = _sizes(weight_of(module), transposed_groups(module))
            layers.append(Layer(number, plain_name(name), kind, *sizes))
        elif isinstance(module, NORMALISATIONS) and _has_gains(module):
            layers.append(Layer(None, plain_name(name), kind, len(module.weight)))
        else:
            continue
        modules.append(module)
    gains = [isinstance(module, NORMALISATIONS) for module in modules]
    return list(zip(_mark_normalised(layers, gains), modules, strict=True))


def _sizes(weight: Tensor, groups: int | None) -> tuple[int, int]:
    """How many filters there are in `weight`, and of how many weights."""
    units = weight.shape[0] if groups is None else weight.shape[1] * groups
    return units, weight.numel() // max(units, 1)


def _has_gains(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 1


def _mark_normalised(layers: list[Layer], gains: list[bool]) -> list[Layer]:
    """Set `normalised` on each layer that a normalisation (`gains`) of its size comes after."""
    marked = list(layers)
    for place, layer in enumerate(layers[:-1]):
        after = place + 1
        if not gains[place] and gains[after] and layers[after].units == layer.units:
            marked[place] = replace(layer, normalised=True)
    return marked


# What a model or a checkpoint holds now -----------------------------------------------------------


def read_units(source: nn.Module | Mapping[str, Any]) -> tuple[list[Filters], list[Gains]]:
    """The filters and the gains of a model or of a state dict."""
    if isinstance(source, nn.Module):
        held = list(_held_by_model(source))
    else:
        held = list(_held_by_state(source))
    if not any(isinstance(units, Filters) for units in held):
        raise ValueError(
            "Expected a model or a state dict with a convolution or a linear layer, but got none."
        )
    return (
        [units for units in held if isinstance(units, Filters)],
        [units for units in held if isinstance(units, Gains)],
    )


@torch.no_grad()
def _held_by_model(model: nn.Module) -> Iterator[Filters | Gains]:
    for layer, module in named_units(model):
        weight = weight_of(module)
        if isinstance(module, NORMALISATIONS):
            bias, seen = getattr(module, "bias", None), getattr(module, "num_batches_tracked", None)
            yield _gains(layer, weight, bias, seen)
        else:
            yield Filters(layer, _host(filter_norms(weight, transposed_groups(module))))


@torch.no_grad()
def _held_by_state(state: Mapping[str, Any]) -> Iterator[Filters | Gains]:
    """What the names and shapes of a state dict tell.

    A weight of two or more dimensions is a layer; a vector is a gain if a bias or running
    statistics of its size stand beside it (alone it might be the slopes of a PReLU). A transposed
    convolution shows only by a bias whose size is not the weight's first. Where the names are in
    alphabetical order, as safetensors stores them, the order of registration is lost: the layers
    have no numbers, and any normalisation of its size may come after a layer.
    """
    tensors = {
        _state_name(key): value
        for key, value in state.items()
        if isinstance(value, Tensor) and (value.is_floating_point() or value.dim() == 0)
    }
    layers: list[Layer] = []
    weights: list[tuple[str, int | None]] = []
    gains: list[bool] = []
    number = 0
    for key, weight in tensors.items():
        name, _, leaf = key.rpartition(".")
        if leaf != "weight" or weight.numel() == 0:
            continue
        beside = key.removesuffix("weight")
        bias, mean = tensors.get(beside + "bias"), tensors.get(beside + "running_mean")
        if weight.dim() >= 2:
            number += 1
            groups = _groups_told_by_bias(weight, bias)
            kind = "linear" if weight.dim() == 2 else f"conv{weight.dim() - 2}d"
            kind = kind if groups is None else "transposed " + kind
            layers.append(Layer(number, name or "(model)", kind, *_sizes(weight, groups)))
            weights.append((key, groups))
            gains.append(False)
        elif any(t is not None and t.shape == weight.shape for t in (bias, mean)):
            kind = "norm" if mean is None else "batch norm"
            layers.append(Layer(None, name or "(model)", kind, weight.numel()))
            weights.append((key, None))
            gains.append(True)
    names = [key for key, tensor in tensors.items() if tensor.is_floating_point()]
    if names == sorted(names):
        sizes = {layer.units for layer, own in zip(layers, gains, strict=True) if own}
        layers = [
            replace(layer, number=None, normalised=not own and layer.units in sizes)
            for layer, own in zip(layers, gains, strict=True)
        ]
    else:
        layers = _mark_normalised(layers, gains)
    for layer, (key, groups), own in zip(layers, weights, gains, strict=True):
        if own:
            beside = key.removesuffix("weight")
            bias, seen = tensors.get(beside + "bias"), tensors.get(beside + "num_batches_tracked")
            yield _gains(layer, tensors[key], bias, seen)
        else:
            yield Filters(layer, _host(filter_norms(tensors[key], groups)))


def _gains(layer: Layer, gains: Tensor, biases: Tensor | None, seen: Tensor | None) -> Gains:
    return Gains(
        layer,
        _host(gains.flatten()),
        None if biases is None else _host(biases.flatten()),
        untrained=seen is not None and int(seen) == 0,
    )


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64)


def _state_name(key: str) -> str:
    """`key` without the marks that DistributedDataParallel and ``torch.compile`` leave in it."""
    return ".".join(part for part in key.removeprefix("module.").split(".") if part != "_orig_mod")


def _groups_told_by_bias(weight: Tensor, bias: Tensor | None) -> int | None:
    if weight.dim() < 3 or bias is None or bias.dim() != 1 or len(bias) == weight.shape[0]:
        return None
    groups, rest = divmod(len(bias), weight.shape[1])
    return groups if groups and not rest and weight.shape[0] % groups == 0 else None


def load_checkpoint(path: str | os.PathLike[str]) -> Mapping[str, Tensor]:
    """The state dict in a file of safetensors or of ``torch.save``; no pickle is executed.

    A file of ``torch.save`` may hold the state dict itself, or a dictionary with it under
    ``model``, ``state_dict`` or ``model_state_dict``, or as its only dictionary of tensors.
    """
    path = os.fspath(path)
    if path.endswith(".safetensors"):
        try:
            from safetensors import SafetensorError
            from safetensors.torch import load_file
        except ImportError as error:
            raise ValueError(
                f"Expected the package safetensors to be installed to read {path!r}; "
                "`pip install safetensors`."
            ) from error
        try:
            return dict(sorted(load_file(path).items()))  # not in the order of registration
        except SafetensorError as error:
            raise ValueError(f"Expected {path!r} to hold safetensors, but got: {error}.") from error
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"Expected {path!r} to be a checkpoint that torch.load(weights_only=True) reads, but "
            f"got {type(error).__name__}."
        ) from error
    if _holds_weights(loaded):
        return loaded
    inside = (
        {key: value for key, value in loaded.items() if _holds_weights(value)}
        if isinstance(loaded, Mapping)
        else {}
    )
    for key in ("model", "state_dict", "model_state_dict"):
        if key in inside:
            return inside[key]
    if len(inside) == 1:
        return next(iter(inside.values()))
    got = f"dictionaries {sorted(map(str, inside))}" if inside else f"a {type(loaded).__name__}"
    raise ValueError(f"Expected {path!r} to hold one state dict, but got {got}.")


def _holds_weights(value: object) -> bool:
    """Whether `value` is a state dict; one beside it may hold a loss or a step as a tensor."""
    return isinstance(value, Mapping) and any(
        isinstance(tensor, Tensor) and tensor.dim() >= 2 for tensor in value.values()
    )
