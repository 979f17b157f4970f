"""The units of a weight, each of which makes one output, and their norms."""

from __future__ import annotations

import torch
from torch import Tensor, _foreach_norm, nn  # pyright: ignore[reportPrivateImportUsage]
from torch.linalg import vector_norm
from torch.nn.modules.conv import _ConvTransposeNd

from powergrad._native import norms as native

Dims = tuple[int, ...]


def transposed_groups(module: nn.Module | None) -> int | None:
    """The groups of a transposed convolution, None for any other module."""
    return module.groups if isinstance(module, _ConvTransposeNd) else None


def by_unit(tensor: Tensor, groups: int | None = None) -> tuple[Tensor, Dims]:
    """A view of a weight or of its gradient, and the dimensions in it that one unit spans.

    Args:
        tensor: ``(out, in / groups, *kernel)``, or ``(out, in)``; for a transposed convolution
            ``(in, out / groups, *kernel)``.
        groups: The groups of a transposed convolution, None for any other layer.
    """
    if groups is None:
        return tensor, tuple(range(1, tensor.dim()))
    # A transposed convolution lists the inputs of one group after those of another. Seen as
    # (groups, in / groups, out / groups, ...), an output is an entry of dimensions 0 and 2.
    tensor = tensor.unflatten(0, (groups, -1))
    return tensor, (1, *range(3, tensor.dim()))


def in_rows(unit: Dims | None, *tensors: Tensor) -> bool:
    """Whether the C kernel serves `tensors`: each is a unit (None), or each of its rows is."""
    return (unit is None or len(unit) == tensors[0].dim() - 1) and native.serves(*tensors)


def unit_norms(
    tensors: list[Tensor],
    units: list[Dims] | None,
    order: float = 2,
    dtype: torch.dtype | None = None,
    *,
    rows: bool = False,
) -> Tensor:
    """The norms of all units of the tensors in one vector; without `units`, of each tensor.

    `rows` says that the units are rows, and their L2 norm wanted, see :func:`in_rows`.
    """
    if rows:
        counts = [1 if units is None else len(tensor) for tensor in tensors]
        return native.unit_norms(tensors, counts)
    if units is not None:
        norms = [
            vector_norm(tensor, order, unit, dtype=dtype).flatten()
            for tensor, unit in zip(tensors, units, strict=True)
        ]
        return torch.cat(norms)
    if tensors[0].device.type == "cpu":
        return torch.stack(_foreach_norm(tensors, order, dtype))
    return torch.stack([vector_norm(tensor, order, dtype=dtype) for tensor in tensors])
