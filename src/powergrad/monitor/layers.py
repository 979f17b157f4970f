"""The layers of a model or a checkpoint, their numbers, and the norms of their filters.

A layer is a convolution or a linear layer, and a unit is one of its output channels. Layers are
numbered from 1 in the order in which the model registers them. For ResNet-18 this is the numbering
of the paper: 20 convolutions (the downsampling convolution of a block comes after its second
convolution; the 11th has 256 filters), and the classifier as layer 21.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from powergrad import units
from powergrad.checks import is_dtensor
from powergrad.head import evaluating, unwrap

LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *units.TRANSPOSED, nn.Linear)
BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
NORMALISATIONS = (*BATCH, *INSTANCE, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


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


def measure(weights: Sequence[Weight]) -> list[Tensor]:
    """The norms of filters or their gradients (NaN if there is none), or the absolute gains.

    If some are sharded, all processes call this, and each gets all values.
    """
    values: list[tuple[Tensor, units.Sharing]] = []
    for column, source in weights:
        tensor: Any = gradient_of(source) if column.quantity == "gradient" else weight_of(source)
        if tensor is None:
            values.append((torch.full((column.units,), torch.nan, device="cpu"), units.Sharing()))
            continue
        if is_dtensor(tensor) and isinstance(source, units.TRANSPOSED):
            tensor = tensor.full_tensor()
        own = units.local_part(tensor).detach()
        is_gain, view = own.dim() < 2, units.by_unit(own, source)
        own = own.abs() if is_gain else units.norms([view])[0].flatten()
        sharing = units.sharing_of(tensor, whole=False)
        if sharing.groups:  # the units of the other processes are 0 here
            rows = units.own_part(torch.arange(len(tensor), device=own.device), tensor)
            own = own.new_zeros(column.units).index_copy_(0, rows, own)
        values.append((own, sharing._replace(split=sharing.groups)))
    units.add_up(values, torch.tensor(True))
    return [norms for norms, _ in values]


def gradient_of(source: Source) -> Tensor | None:
    """The gradient of a weight; None if that is computed from other parameters."""
    return getattr(vars(source)["_parameters"].get("weight"), "grad", None)


def weight_of(source: Source) -> Tensor:
    """The current weight of a layer."""
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
    return weight


def plain_name(name: str) -> str:
    """`name` without the prefix that ``torch.compile`` adds; that of the whole model."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod") or "(model)"


def weights_of(source: Any, argument: str) -> list[Weight]:
    """The weights in a model, a state dict or a checkpoint."""
    if isinstance(source, (str, os.PathLike)):
        if not os.path.isfile(source):
            raise ValueError(f"Expected {os.fspath(source)!r} to exist, but got no such file.")
        source = load_checkpoint(source)
    if not isinstance(source, (nn.Module, Mapping)):
        raise TypeError(
            f"Expected `{argument}` to be a model, a state dict or a path, but got "
            f"{type(source).__name__}."
        )
    return model_weights(source) if isinstance(source, nn.Module) else state_weights(source)


def model_weights(model: nn.Module) -> list[Weight]:
    """Every layer and normalisation of `model`, in registration order."""
    units.refuse_flat(model.parameters(), "model")
    found = []
    for name, module in unwrap(model).named_modules():
        gain = getattr(module, "weight", None) if isinstance(module, NORMALISATIONS) else None
        if isinstance(module, LAYERS) or (isinstance(gain, Tensor) and gain.dim() == 1):
            names = (kind.__name__ for kind in type(module).__mro__)  # FSDP2 changes the class
            found.append((name, next(n for n in names if not n.startswith("FSDP")), module))
    return number_layers(found, model)


def state_weights(state: Mapping[str, Any]) -> list[Weight]:
    """The weights in a state dict.

    A weight of two or more dimensions is a layer. A vector is a gain if there is a bias or running
    statistics of the same size (alone it could be the slopes of a PReLU). Names in alphabetical
    order, as in safetensors, are not in the order of registration.
    """
    tensors = {
        plain_name(key.removeprefix("module.")): value
        for key, value in state.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    found = []
    for key, tensor in tensors.items():
        name, _, leaf = key.rpartition(".")
        beside = key.removesuffix("weight")
        bias, mean = (tensors.get(beside + part) for part in ("bias", "running_mean"))
        is_gain = any(t is not None and t.shape == tensor.shape for t in (bias, mean))
        computed = leaf in ("weight_g", "weight_orig") or name.endswith("parametrizations.weight")
        is_weight = leaf == "weight" and tensor.numel() > 0 and tensor.dim() > 0
        is_weight = is_weight and is_gain == (tensor.dim() == 1)
        # The biases of a transposed convolution may be another number than its first dimension.
        unclear = is_weight and bias is not None and bias.numel() != len(tensor)
        if computed or unclear:
            raise ValueError(
                "Expected a state dict whose tensors show the units of every layer, but got "
                f"{key!r} of shape {tuple(tensor.shape)}; pass the model."
            )
        if is_weight:
            kind = "linear" if tensor.dim() == 2 else f"conv{tensor.dim() - 2}d"
            found.append((name, "norm" if is_gain else kind, tensor))
    return number_layers(found, state, ordered=list(tensors) != sorted(tensors))


def number_layers(
    found: Iterable[tuple[str, str, Source]], of: object, *, ordered: bool = True
) -> list[Weight]:
    """Describe the weights and gains `of` a model, by name, kind and source; vectors are gains.

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
    if all(column.quantity == "gain" for column, _ in weights):
        raise ValueError(
            "Expected a model or a state dict with a convolution or a linear layer, but got a "
            f"{type(of).__name__} with none."
        )
    return weights


# Files --------------------------------------------------------------------------------------------


def load_checkpoint(path: str | os.PathLike[str]) -> Mapping[str, Tensor]:
    """Load the state dict from a safetensors or ``torch.save`` file, without executing pickle code.

    A ``torch.save`` file may hold the state dict itself, or a dictionary that has it under
    ``model``, ``state_dict`` or ``model_state_dict``, or as its only dictionary of tensors.
    """
    path = os.fspath(path)
    try:
        if path.endswith(".safetensors"):
            from safetensors.torch import load_file

            return dict(sorted(load_file(path).items()))  # not in the order of registration
        # timm stores the arguments of the training beside the weights; a Namespace is only values.
        with torch.serialization.safe_globals([argparse.Namespace]):
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # each format has errors of its own
        raise ValueError(
            f"Expected {path!r} to be a checkpoint, in safetensors or as torch.load("
            f"weights_only=True) can read it, but got {type(error).__name__}: {error}"
        ) from error
    if _is_state_dict(loaded):
        return loaded
    inside = loaded if isinstance(loaded, Mapping) else {}
    states = {key: value for key, value in inside.items() if _is_state_dict(value)}
    known = [key for key in ("model", "state_dict", "model_state_dict") if key in states]
    if not known and len(states) != 1:
        got = f"dictionaries {sorted(map(str, states))}" if states else type(loaded).__name__
        raise ValueError(f"Expected {path!r} to hold one state dict, but got {got}.")
    return states[[*known, *states][0]]


def _is_state_dict(value: object) -> bool:
    """Whether `value` holds weights; a loss or a step in a checkpoint may be a tensor too."""
    tensors = value.values() if isinstance(value, Mapping) else ()
    return any(isinstance(tensor, Tensor) and tensor.dim() >= 2 for tensor in tensors)
