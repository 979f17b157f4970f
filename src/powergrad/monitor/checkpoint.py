"""Reads checkpoints, and infers layers from the names and shapes in a state dict."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from powergrad.monitor.layers import ROOT, Column, Weight, number_layers, plain_name

_COMPUTED = ("weight_g", "weight_orig", "parametrizations.weight.")


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
    weights = []
    for key, tensor in tensors.items():
        for part in _COMPUTED:
            name, found, _ = key.rpartition(part)
            if found and (not name or name.endswith(".")) and f"{name}weight" not in tensors:
                raise _ambiguous(name, "a weight that is computed from other tensors")
        name, _, leaf = key.rpartition(".")
        if leaf != "weight" or tensor.numel() == 0 or tensor.dim() == 0:
            continue
        bias, mean = (
            tensors.get(key.removesuffix("weight") + part) for part in ("bias", "running_mean")
        )
        units, is_gain = len(tensor), tensor.dim() == 1
        if is_gain:
            if not any(t is not None and t.shape == tensor.shape for t in (bias, mean)):
                continue
            kind = "norm" if mean is None else "batch norm"
        else:
            if bias is not None and bias.shape == tensor.shape:  # a normalisation of several axes
                continue
            kind = "linear" if tensor.dim() == 2 else f"conv{tensor.dim() - 2}d"
            if bias is not None and bias.numel() != units:  # as of a transposed convolution
                raise _ambiguous(name, f"{bias.numel()} biases beside {units} filters")
        quantity, size = "gain" if is_gain else "weight", tensor.numel() // units
        column = Column(quantity, name or ROOT, None, kind, units, size)
        weights.append(Weight(column, tensor))
    return number_layers(weights, ordered=list(tensors) != sorted(tensors))


def _ambiguous(name: str, got: str) -> ValueError:
    return ValueError(
        "Expected a state dict whose tensors show the units of every layer, but got "
        f"{got} in {name.removesuffix('.') or ROOT!r}; pass the model."
    )


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
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # each format has errors of its own
        raise ValueError(
            f"Expected {path!r} to be a checkpoint, in safetensors or as torch.load("
            f"weights_only=True) can read it, but got {type(error).__name__}: {error}"
        ) from error
    if _is_state_dict(loaded):
        return loaded
    entries = loaded.items() if isinstance(loaded, Mapping) else ()
    states = {key: value for key, value in entries if _is_state_dict(value)}
    for key in ("model", "state_dict", "model_state_dict"):
        if key in states:
            return states[key]
    if len(states) == 1:
        return next(iter(states.values()))
    got = f"dictionaries {sorted(map(str, states))}" if states else f"a {type(loaded).__name__}"
    raise ValueError(f"Expected {path!r} to hold one state dict, but got {got}.")


def _is_state_dict(value: object) -> bool:
    """Whether `value` holds weights; a loss or a step in a checkpoint may be a tensor too."""
    return isinstance(value, Mapping) and any(
        isinstance(tensor, Tensor) and tensor.dim() >= 2 for tensor in value.values()
    )
