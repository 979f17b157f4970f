"""The processes of a run: one by default, many under torchrun."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, rendezvous  # pyright: ignore[reportPrivateImportUsage]


@dataclass(frozen=True)
class Processes:
    """This process among those of the run."""

    rank: int  # from 0
    world: int  # the number of processes
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def wait(self) -> None:
        """Wait until all processes call this."""
        if self.world > 1:
            dist.barrier()

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give all processes the tensors of the first."""
        for tensor in tensors:
            dist.broadcast(tensor, 0)

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set in any process."""
        return bool(self.sum(torch.tensor(float(flag), device=self.device)) > 0)

    def concatenate(self, tensor: Tensor) -> Tensor:
        """The rows of all processes, one after another, in the memory of the CPU."""
        if self.world == 1:
            return tensor.cpu()
        parts = [tensor] * self.world
        dist.all_gather_object(parts, tensor.cpu())
        return torch.cat(parts)


@contextlib.contextmanager
def join_processes(device: str) -> Iterator[Processes]:
    """Join the processes that torchrun started; without torchrun, there is only this one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        wanted, reason = "`machine.device` to be available", str(error).splitlines()[0]
        raise ValueError(f"Expected {wanted}, but got {device!r}: {reason}") from None
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1 or "RANK" not in os.environ:
        yield Processes(0, 1, chosen)
        return
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(chosen)
    # torchrun keeps one store over its restarts, from which gloo would read the addresses of dead
    # processes (torch 2.13). So every attempt uses its own prefix.
    store, rank, world = next(iter(rendezvous("env://")))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own_store = PrefixStore(f"powergrad/{attempt}", store)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=own_store, rank=rank, world_size=world)
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), chosen)
    finally:
        dist.destroy_process_group()
