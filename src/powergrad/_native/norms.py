"""The norms of units with the bits of PyTorch's, in less time, and scaling by unit.

A unit is a row of a contiguous float32 tensor on CPU. PyTorch reads one row at a time and hands
each to a dispatched operator with temporaries; here several rows are read at once, which gets more
out of the memory, and only units that change are written.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from powergrad._check import values_readable
from powergrad._native import library

__all__ = ["scale_units_", "serves", "unit_norms"]

# The last elements of a row, which do not fill a vector: compilers fuse each square with its sum,
# but for whole groups of 4, or none, or all.
_GROUPS = (4, 1, 1 << 62)
# A row alone and several; each number of elements that do not fill a vector; no whole vector, one,
# many; more elements than PyTorch leaves to one thread. (And elements whose squares underflow.)
_SHAPES = [(64, size) for size in (*range(1, 34), 63, 147, 1003)] + [(1, 577), (1, 70_001)]


def serves(*tensors: Tensor) -> bool:
    """Whether `tensors` are such as the functions below take, and the kernel is there."""
    for t in tensors:
        if t.dtype is not torch.float32 or not t.is_contiguous() or t.is_inference():
            return False
    # Without storage (0, say because it was freed) PyTorch has to say what is wrong.
    return values_readable(*tensors) and all(t.data_ptr() for t in tensors) and bool(_order())


def unit_norms(tensors: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """The norms of `counts[i]` units of each tensor, one tensor after the other.

    The bits are those of ``torch.linalg.vector_norm(tensor.view(count, -1), dim=1)``.
    """
    return _norms(tensors, counts, *_order())


def scale_units_(tensors: Sequence[Tensor], counts: Sequence[int], factors: Tensor) -> None:
    """Multiply each unit by its factor, in place; these are in the order of `unit_norms`."""
    level, _ = _order()
    # Of gradients whose norms were just taken, the last are still in the cache.
    _call("powergrad_scale", _describe(tensors, counts, factors)[::-1], level)
    increment_version(tensors)


@functools.cache
def _order() -> tuple[int, ...]:
    """The instruction set and the group that give the norms of this PyTorch; () if none does."""
    kernel = library()
    if kernel is None:
        return ()
    generator = torch.Generator("cpu").manual_seed(0)
    made = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    tensors = [torch.randn(shape, **made) for shape in _SHAPES]
    tensors.append(torch.tensor([[1e-30], [1e30]], dtype=torch.float32, device="cpu"))
    counts = [len(t) for t in tensors]
    wanted = torch.cat([torch.linalg.vector_norm(t, dim=1) for t in tensors])
    for level in range(kernel.powergrad_best_level(), -1, -1):
        for group in _GROUPS:
            if torch.equal(_norms(tensors, counts, level, group), wanted):
                return level, group
    return ()


def _norms(tensors: Sequence[Tensor], counts: Sequence[int], level: int, group: int) -> Tensor:
    norms = torch.empty(sum(counts), dtype=torch.float32, device="cpu")
    _call("powergrad_norms", _describe(tensors, counts, norms), level, group)
    return norms


def _describe(
    tensors: Sequence[Tensor], counts: Sequence[int], units: Tensor
) -> list[tuple[int, int, int, int]]:
    """What norms.c calls a Tensor, for each of `tensors`."""
    described, place = [], units.data_ptr()
    for tensor, count in zip(tensors, counts, strict=True):
        described.append((tensor.data_ptr(), count, tensor.numel() // count, place))
        place += 4 * count
    return described


def _call(name: str, described: list[tuple[int, int, int, int]], *arguments: int) -> None:
    fields = array("q", [field for tensor in described for field in tensor])
    function = getattr(library(), name)
    function(fields.tobytes(), len(described), *arguments, torch.get_num_threads())
