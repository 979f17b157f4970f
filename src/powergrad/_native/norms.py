"""The norms of units, bitwise equal to PyTorch's but faster, and scaling by unit.

A unit is a row of a contiguous float32 tensor on CPU. PyTorch reads one row at a time and makes one
operator call per tensor. Here several rows are read at once, which uses the memory bandwidth
better, and only units that change are written.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from powergrad._check import values_readable
from powergrad._native import library

__all__ = ["scale_units_", "serves", "unit_norms"]

# The last elements of a row do not fill a vector. Depending on the compiler, their squares are
# rounded before they are added: in whole groups of 4, always, or never.
_GROUPS = (4, 1, 1 << 62)
# The shapes on which the results are compared with PyTorch's: one row and several; every number of
# last elements; no whole vector, one, many; more elements than PyTorch leaves to one thread.
_SHAPES = [(64, size) for size in (*range(1, 34), 63, 147, 1003)] + [(1, 577), (1, 70_001)]


def serves(*tensors: Tensor) -> bool:
    """Whether the kernel is available and supports `tensors`."""
    for tensor in tensors:
        if tensor.dtype is not torch.float32 or not tensor.is_contiguous() or tensor.is_inference():
            return False
    if not values_readable(*tensors):
        return False
    # A tensor whose storage was freed (address 0) is left to PyTorch, which raises.
    return all(tensor.data_ptr() for tensor in tensors) and bool(_order())


def unit_norms(tensors: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """The norms of the `counts[i]` units of each tensor, concatenated.

    Bitwise equal to ``torch.linalg.vector_norm(tensor.view(count, -1), dim=1)``.
    """
    return _norms(tensors, counts, *_order())


def scale_units_(tensors: Sequence[Tensor], counts: Sequence[int], factors: Tensor) -> None:
    """Multiply each unit by its factor, in place; the factors are in the order of `unit_norms`."""
    level, _ = _order()
    # If norms were just computed, the last tensors are still in the cache.
    _call("powergrad_scale", _describe(tensors, counts, factors)[::-1], level)
    increment_version(tensors)


@functools.cache
def _order() -> tuple[int, ...]:
    """The instruction set and group that reproduce the norms of this PyTorch; () if none does."""
    kernel = library()
    if kernel is None:
        return ()
    generator = torch.Generator("cpu").manual_seed(0)
    options = {"dtype": torch.float32, "device": "cpu"}
    tensors = [torch.randn(shape, generator=generator, **options) for shape in _SHAPES]
    tensors.append(torch.tensor([[1e-30], [1e30]], **options))  # whose squares are out of range
    counts = [len(tensor) for tensor in tensors]
    expected = torch.cat([torch.linalg.vector_norm(tensor, dim=1) for tensor in tensors])
    for level in range(kernel.powergrad_best_level(), -1, -1):
        for group in _GROUPS:
            if torch.equal(_norms(tensors, counts, level, group), expected):
                return level, group
    return ()


def _norms(tensors: Sequence[Tensor], counts: Sequence[int], level: int, group: int) -> Tensor:
    norms = torch.empty(sum(counts), dtype=torch.float32, device="cpu")
    _call("powergrad_norms", _describe(tensors, counts, norms), level, group)
    return norms


def _describe(
    tensors: Sequence[Tensor], counts: Sequence[int], units: Tensor
) -> list[tuple[int, int, int, int]]:
    """The fields of norms.c's struct Tensor, for each of `tensors`."""
    fields, address = [], units.data_ptr()
    for tensor, count in zip(tensors, counts, strict=True):
        fields.append((tensor.data_ptr(), count, tensor.numel() // count, address))
        address += 4 * count
    return fields


def _call(name: str, tensors: list[tuple[int, int, int, int]], *arguments: int) -> None:
    fields = array("q", chain.from_iterable(tensors))
    function = getattr(library(), name)
    function(fields.tobytes(), len(tensors), *arguments, torch.get_num_threads())
