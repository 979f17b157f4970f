"""`verify` in two processes, each with half of the batch.

The gradients there are those of one process with all of it: see DISTRIBUTED in never_plain.py.
"""

from __future__ import annotations

import copy
import multiprocessing

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

from powergrad import cross_entropy, verify

WORLD = 2
pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed, gloo"
)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()


def worker(rank: int, folder: str) -> None:
    """Each rank verifies a step of AdamW, and all is back."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=WORLD)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(WORLD, 6, 6, generator=g, dtype=torch.float64)[rank]
    y = torch.randint(0, 5, (WORLD, 6), generator=g)[rank]
    model = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(x), y, alpha=0.3).backward()
        optimizer.step()

    step()
    before = copy.deepcopy([(p, p.grad) for p in model.parameters()])
    found = verify(step, model)
    for p, (weight, grad) in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close((p, p.grad), (weight, grad), rtol=0, atol=0)
    step()
    if rank == 0:
        torch.save((found.verdict, found.alpha, found.rows), f"{folder}/found.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.matrix
def test_verify_answers_for_the_rows_of_its_process(tmp_path):
    multiprocessing.set_forkserver_preload([__name__])  # imported once for all processes
    start_processes(worker, (str(tmp_path),), WORLD, start_method="forkserver")
    verdict, alpha, rows = torch.load(tmp_path / "found.pt", weights_only=True)
    assert (verdict, rows) == ("pgt", 6)
    assert abs(alpha - 0.3) <= 1e-5  # small logits, six rows
