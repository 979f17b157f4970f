"""Reads checkpoints, and infers layers from the names and shapes in a state dict."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from powergrad.monitor.layers import ROOT, Weight, effective_weight, plain_name


def state_weights(state: Mapping[str, Any]) -> tuple[list[Weight], bool]:
    """The weights in a state dict, and whether they are in the order of registration.

    A weight of two or more dimensions is a layer. A vector is a gain if there is a bias or running
    statistics of the same size (alone it could be the slopes of a PReLU). A transposed convolution
    is recognised by a bias whose size differs from the first dimension of the weight. Names in
    alphabetical order, as in safetensors, are not in the order of registration. Weights with
    weight or spectral normalisation, and pruned weights, are computed from the stored tensors.
    """
    tensors = {
        plain_name(key.removeprefix("module.")): value
        for key, value in state.items()
        if isinstance(value, Tensor) and (value.is_floating_point() or value.dim() == 0)
    }
    names = [key for key, tensor in tensors.items() if tensor.is_floating_point()]
    tensors = _with_effective_weights(tensors)
    weights = []
    for key, tensor in tensors.items():
        name, _, leaf = key.rpartition(".")
        if leaf != "weight" or tensor.numel() == 0:
            continue
        bias, mean, batches = (
            tensors.get(key.removesuffix("weight") + part)
            for part in ("bias", "running_mean", "num_batches_tracked")
        )
        name = name or ROOT
        if tensor.dim() >= 2:
            groups = _transposed_groups(tensor, bias)
            kind = "linear" if tensor.dim() == 2 else f"conv{tensor.dim() - 2}d"
            kind = kind if groups is None else f"transposed {kind}"
            weights.append(Weight(name, kind, tensor, groups=groups))
        elif any(t is not None and t.shape == tensor.shape for t in (bias, mean)):
            kind = "norm" if mean is None else "batch norm"
            weights.append(Weight(name, kind, tensor, True, None, bias, batches))
    return weights, names != sorted(names)


_STORED = re.compile(
    r"(?:^|(?<=\.))(weight_(?:g|v|u|orig|mask)|parametrizations\.weight\.(?:original[01]?|0\._[uv]))$"
)


def _with_effective_weights(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`tensors`, with the parts of normalised and pruned weights replaced by the weights."""
    result: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _STORED.search(key)
        prefix = key[: match.start()] if match else ""
        if match is None or f"{prefix}weight" in tensors:
            result[key] = tensor
        else:
            parts.setdefault(prefix, {})[match[1]] = tensor
            result.setdefault(f"{prefix}weight", tensor)  # keeps the order; replaced below
    for prefix, stored in parts.items():
        weight = effective_weight(stored)
        if weight is not None:
            result[f"{prefix}weight"] = weight
        elif "parametrizations.weight.original" in stored:
            raise ValueError(
                "Expected weights that can be computed from the state dict, but got an unknown "
                f"parametrisation of {prefix.removesuffix('.') or ROOT!r}; pass the model."
            )
        else:
            del result[f"{prefix}weight"]
    return result


def _transposed_groups(weight: Tensor, bias: Tensor | None) -> int | None:
    if weight.dim() < 3 or bias is None or bias.dim() != 1 or len(bias) == weight.shape[0]:
        return None
    groups, rest = divmod(len(bias), weight.shape[1])
    return groups if groups and not rest and weight.shape[0] % groups == 0 else None


def load_checkpoint(path: str | os.PathLike[str]) -> Mapping[str, Tensor]:
    """Load the state dict from a safetensors or ``torch.save`` file, without executing pickle code.

    A ``torch.save`` file may hold the state dict itself, or a dictionary that has it under
    ``model``, ``state_dict`` or ``model_state_dict``, or as its only dictionary of tensors.
    """
    path = os.fspath(path)
    if path.endswith(".safetensors"):
        return _load_safetensors(path)
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"Expected {path!r} to be a checkpoint that torch.load(weights_only=True) can read, "
            f"but got {type(error).__name__}."
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


def _load_safetensors(path: str) -> Mapping[str, Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise ValueError(
            f"Expected the package safetensors to be installed to read {path!r}, but got none; "
            "`pip install safetensors`."
        ) from error
    try:
        return dict(sorted(load_file(path).items()))  # not in the order of registration
    except SafetensorError as error:
        raise ValueError(f"Expected {path!r} to hold safetensors, but got: {error}.") from error


def _is_state_dict(value: object) -> bool:
    """Whether `value` holds weights; a loss or a step in a checkpoint may be a tensor too."""
    return isinstance(value, Mapping) and any(
        isinstance(tensor, Tensor) and tensor.dim() >= 2 for tensor in value.values()
    )
