"""Reads checkpoints, and infers layers from the names and shapes in a state dict."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from powergrad.monitor.layers import Weight, number_layers, plain_name


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
    return number_layers(found, ordered=list(tensors) != sorted(tensors))


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
