"""Reads checkpoints, and infers layers from the names and shapes in a state dict."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from powergrad.monitor.layers import Weight, number_layers, plain_name

_COMPUTED = re.compile(r"((?:.*\.)?)(weight_g|weight_orig|parametrizations\.weight\..+)")


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
        if (computed := _COMPUTED.fullmatch(key)) and f"{computed[1]}weight" not in tensors:
            raise _unclear(computed[1], "a weight that is computed from other tensors")
        name, _, leaf = key.rpartition(".")
        if leaf != "weight" or tensor.numel() == 0 or tensor.dim() == 0:
            continue
        beside = key.removesuffix("weight")
        bias, mean = (tensors.get(beside + part) for part in ("bias", "running_mean"))
        is_gain = any(t is not None and t.shape == tensor.shape for t in (bias, mean))
        if is_gain != (tensor.dim() == 1):  # a vector of another kind, or gains of several axes
            continue
        kind = "linear" if tensor.dim() == 2 else f"conv{tensor.dim() - 2}d"
        if is_gain:
            kind = "norm" if mean is None else "batch norm"
        elif bias is not None and bias.numel() != len(tensor):  # as of a transposed convolution
            raise _unclear(name, f"{bias.numel()} biases beside {len(tensor)} filters")
        found.append((name, kind, tensor, tensor))
    return number_layers(found, ordered=list(tensors) != sorted(tensors))


def _unclear(name: str, got: str) -> ValueError:
    return ValueError(
        "Expected a state dict whose tensors show the units of every layer, but got "
        f"{got} in {plain_name(name.removesuffix('.'))!r}; pass the model."
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
    inside = loaded.items() if isinstance(loaded, Mapping) else ()
    states = {key: value for key, value in inside if _is_state_dict(value)}
    known = [key for key in ("model", "state_dict", "model_state_dict") if key in states]
    if not known and len(states) != 1:
        got = f"dictionaries {sorted(map(str, states))}" if states else type(loaded).__name__
        raise ValueError(f"Expected {path!r} to hold one state dict, but got {got}.")
    return states[[*known, *states][0]]


def _is_state_dict(value: object) -> bool:
    """Whether `value` holds weights; a loss or a step in a checkpoint may be a tensor too."""
    return isinstance(value, Mapping) and any(
        isinstance(tensor, Tensor) and tensor.dim() >= 2 for tensor in value.values()
    )
