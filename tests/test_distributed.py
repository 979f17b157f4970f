"""Two processes, each with half of the batch, get the gradients of one with all of it."""

from __future__ import annotations

import copy
import multiprocessing
import socket

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
    """The gradients of each loss; then each rank verifies a step of AdamW, and all is back."""
    x, y, rows = join(rank, port)
    gradients = []
    for loss in losses():
        model = DistributedDataParallel(network())
        loss(model(x[rows]), y[rows]).backward()
        gradients.append([p.grad for p in model.parameters()])
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
        torch.testing.assert_close((p, p.grad), (weight, grad), rtol=0, atol=0)
    step()
    if rank == 0:
        verified = (found.verdict, found.alpha, found.rows)
        torch.save({"gradients": gradients, "verified": verified}, f"{folder}/found.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_data_parallel_gradients_are_those_of_the_joined_batch(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    multiprocessing.set_forkserver_preload([__name__])  # imported once for all processes
    start_processes(worker, (port, str(tmp_path)), WORLD, start_method="forkserver")
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    x, y = data()
    for loss, joined in zip(losses(), found["gradients"], strict=True):
        model = network()
        loss(model(x), y).backward()
        for p, grad in zip(model.parameters(), joined, strict=True):
            assert p.grad is not None
            assert (p.grad - grad).abs().max() <= 1e-15
    verdict, alpha, rows = found["verified"]
    assert (verdict, rows) == ("pgt", 6)  # `verify` answers for the rows of its process
    assert abs(alpha - 0.3) <= 1e-5  # small logits, six rows
