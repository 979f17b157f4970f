"""Two processes, each with half of the batch, get the gradients of one with all of it."""

from __future__ import annotations

import copy
import multiprocessing
import socket
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

from powergrad import PowerGrad, cross_entropy, verify

WORLD = 2
pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed, gloo"
)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(12, 6, generator=g, dtype=torch.float64)
    return x, torch.randint(0, 5, (12,), generator=g)


def losses():
    yield lambda z, y: cross_entropy(z, y, alpha=0.3)
    yield lambda z, y: cross_entropy(z, y, alpha=0.3, label_smoothing=0.1)
    yield PowerGrad(0.3)(F.cross_entropy)


def join(rank: int, port: int) -> tuple[torch.Tensor, torch.Tensor, slice]:
    """Enter the group of processes; return the data, and which rows of it are this rank's."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD
    )
    return *data(), slice(rank * 6, (rank + 1) * 6)


def worker(rank: int, port: int, folder: str) -> None:
    x, y, rows = join(rank, port)
    for i, loss in enumerate(losses()):
        model = DistributedDataParallel(network())
        loss(model(x[rows]), y[rows]).backward()
        if rank == 0:
            torch.save([p.grad for p in model.parameters()], f"{folder}/{i}.pt")
    dist.barrier()
    dist.destroy_process_group()


def verifying_worker(rank: int, port: int, folder: str) -> None:
    """Each rank verifies a step of AdamW; rank 0 writes what it found, and whether all is back."""
    x, y, rows = join(rank, port)
    model = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(x[rows]), y[rows], alpha=0.3).backward()
        optimizer.step()

    step()
    before = copy.deepcopy([(p, p.grad) for p in model.parameters()])
    found = verify(step, model)
    for p, (weight, grad) in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, weight)
        assert p.grad is not None
        assert grad is not None
        assert torch.equal(p.grad, grad)
    step()
    if rank == 0:
        torch.save((found.verdict, found.alpha, found.rows), f"{folder}/found.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_processes(function: Callable[[int, int, str], None], folder: str) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    multiprocessing.set_forkserver_preload([__name__])  # imported once for all processes
    start_processes(function, (port, folder), WORLD, start_method="forkserver")


def test_verify_answers_for_the_rows_of_its_process(tmp_path):
    run_processes(verifying_worker, str(tmp_path))
    verdict, alpha, rows = torch.load(tmp_path / "found.pt", weights_only=True)
    assert (verdict, rows) == ("pgt", 6)
    assert abs(alpha - 0.3) <= 1e-5  # small logits, six rows


def test_data_parallel_gradients_are_those_of_the_joined_batch(tmp_path):
    run_processes(worker, str(tmp_path))
    x, y = data()
    for i, loss in enumerate(losses()):
        model = network()
        loss(model(x), y).backward()
        joined = torch.load(tmp_path / f"{i}.pt", weights_only=True)
        for p, grad in zip(model.parameters(), joined, strict=True):
            assert p.grad is not None
            assert (p.grad - grad).abs().max() <= 1e-15
