"""Units, the slices of a weight or gradient that belong to one output, and their norms.

A sharded tensor (`DTensor`) is measured without gathering it: a unit that is whole in one process
needs no other; of all others, the sums of squares are added up in one all-reduce per group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.linalg import vector_norm

from powergrad.checks import is_dtensor

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


def norms(tensors: Iterable[tuple[Tensor, Dims]]) -> list[Tensor]:
    """The L2 norms of the units of each tensor in float32 or wider, which broadcast over it."""
    norms = []
    for tensor, dims in tensors:
        dtype = torch.float32 if tensor.dtype in HALF else None
        norms.append(vector_norm(tensor, dim=dims, keepdim=dims is not None, dtype=dtype))
    return norms


# Sharded tensors ----------------------------------------------------------------------------------


class Sharing(NamedTuple):
    """How processes share a tensor."""

    groups: Sequence[Any] = ()  # the process groups whose members hold different parts of it
    split: Sequence[Any] = ()  # those whose members hold parts of the same units
    copies: int = 1  # the number of processes that have the same units


def local_part(tensor: Any) -> Tensor:
    """What this process has of a tensor."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def own_part(whole: Tensor, like: Any) -> Tensor:
    """What this process has of a tensor that all have as a whole, if it is sharded as another is.

    Dimensions that it does not have are not sharded.
    """
    from torch.distributed.tensor import DTensor, Replicate

    mesh, dims = like.device_mesh, whole.dim()
    same = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    own = [p if getattr(p, "dim", dims) < dims else Replicate() for p in like.placements]
    return same.redistribute(placements=own).to_local()


def sharing_of(tensor: Any, *, whole: bool) -> Sharing:
    """How processes share a tensor, of which dimension 0 indexes the units; or which is one unit.

    ``is_shard()`` is not asked: it denies that of FSDP2 over tensor parallelism (_StridedShard).
    """
    groups, split, copies = [], [], 1
    for dim, placement in enumerate(getattr(tensor, "placements", ())):
        mesh = tensor.device_mesh
        if not placement.is_replicate():
            groups.append(mesh.get_group(dim))
        if placement.is_replicate() or whole or placement.dim != 0:
            copies *= mesh.size(dim)
            split += [] if placement.is_replicate() else groups[-1:]
    return Sharing(groups, split, copies)


def add_up(
    norms: Iterable[tuple[Tensor, Sharing]], finite: Tensor, *, largest: bool = False
) -> Tensor:
    """Complete norms of parts of units, in place; whether `finite` is true in every process.

    With `largest`, the norms are largest values.
    """
    by_ranks: dict[tuple[int, ...], tuple[Any, list[Tensor]]] = {}
    for norm, sharing in norms:
        finite = finite.to(norm.device) if sharing.groups else finite
        for group in sharing.groups:
            ranks = tuple(distributed.get_process_group_ranks(group))
            partial = by_ranks.setdefault(ranks, (group, []))[1]
            partial += [norm] if group in sharing.split else []
    for group, partial in by_ranks.values():
        flag = finite.logical_not().double().reshape(1)
        packed = torch.cat([flag, *(x.to(flag).flatten() for x in partial)])
        if largest:
            distributed.all_reduce(packed, distributed.ReduceOp.MAX, group)
        else:
            distributed.all_reduce(packed.square_(), group=group)
            packed.sqrt_()
        finite = packed[0] == 0
        totals = packed[1:].split([x.numel() for x in partial])
        for norm, total in zip(partial, totals, strict=True):
            norm.copy_(total.view_as(norm))
    return finite


def refuse_flat(parameters: Iterable[Tensor], name: str) -> None:
    """Refuse the parameters of the older FullyShardedDataParallel, which hide their shapes."""
    if any(getattr(parameter, "_fsdp_flattened", False) for parameter in parameters):
        raise TypeError(
            f"Expected `{name}` to be sharded by `fully_shard` (FSDP2) or not at all, but got "
            "parameters of FullyShardedDataParallel, the older class, which are not supported."
        )
