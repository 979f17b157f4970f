"""Units, the slices of a weight or gradient that belong to one output, and their norms."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

Dims = tuple[int, ...] | None  # the dimensions of a tensor that one unit spans; None: all
HALF = (torch.float16, torch.bfloat16)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
WHOLE = (nn.LayerNorm, nn.RMSNorm)  # whose weight is one unit, of any dimension


def by_unit(tensor: Tensor, owner: object) -> tuple[Tensor, Dims]:
    """A view of a weight or its gradient by unit; `owner` is its module, if known."""
    if tensor.dim() < 2 or isinstance(owner, WHOLE):
        return tensor, None
    if not isinstance(owner, TRANSPOSED):  # (out, in / groups, *kernel), or (out, in)
        return tensor, tuple(range(1, tensor.dim()))
    # A transposed convolution has (in, out / groups, *kernel), viewed as
    # (groups, in / groups, out / groups, *kernel): dimensions 0 and 2 index the outputs.
    tensor = tensor.unflatten(0, (owner.groups, -1))
    return tensor, (1, *range(3, tensor.dim()))


def unit_norms(tensors: Iterable[tuple[Tensor, Dims]]) -> list[Tensor]:
    """The L2 norms of the units of each tensor in float32 or wider, which broadcast over it."""
    norms = []
    for tensor, dims in tensors:
        dtype = torch.float32 if tensor.dtype in HALF else None
        norms.append(vector_norm(tensor, dim=dims, keepdim=dims is not None, dtype=dtype))
    return norms
