"""Time and memory of head and loss together, forward and backward.

    python benchmarks/linear.py [--rounds 5]        write results/bench_linear.csv

2,048 tokens, width 512, 32,000 classes, float32, one thread; the variants take turns in one process
(see `harness.py`). `plain` is `F.linear` and `F.cross_entropy`; `chunked` is
`F.linear_cross_entropy` with blocks of its own choice, `chunked-256` with blocks of 256 rows;
`powergrad` is `linear_cross_entropy` at alpha 0.3, `powergrad-eager` the same without the C kernel,
`powergrad-ignored` with half of the rows ignored, and `powergrad-ROWS` with blocks of ROWS rows.
`products` and `products-176` are the three products of matrices alone, logits, dh and dW, whole and
in blocks of 176 rows: the least that plain and ours could take.
Peak memory is what PyTorch's allocator handed out at a time above the inputs; `gradients` is the
part of it that any of them needs, dW + dh. `rss` is the growth of the resident set in a process of
its own, with the allocator's defaults, in MB.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
import torch.nn as nn
import torch.nn.functional as F
from loss import without_kernel
from torch import Tensor

import powergrad

TOKENS, WIDTH, CLASSES, ALPHA = 2048, 512, 32000, 0.3
FRONTIER = [64, 128, 256, 512, 1024]  # rows per block


def variants(hidden: Tensor, head: Tensor, target: Tensor) -> dict[str, Callable[[], object]]:
    def training(loss: Callable[[], Any]) -> Callable[[], object]:
        return lambda: loss().backward()

    half = target.clone()
    half[::2] = -100

    def ours(target: Tensor = target, rows: int | None = None) -> Any:
        return powergrad.linear_cross_entropy(hidden, head, target, alpha=ALPHA, chunk_rows=rows)

    runs = {"plain": training(lambda: F.cross_entropy(F.linear(hidden, head), target))}
    if hasattr(F, "linear_cross_entropy"):
        for name, options in {
            "chunked": nn.LinearCrossEntropyOptions(),
            "chunked-256": nn.LinearCrossEntropyOptions(batch_chunk_size=256, chunking_method=None),
        }.items():
            runs[name] = training(
                lambda options=options: F.linear_cross_entropy(
                    hidden, head, target, options=options
                )
            )
    runs["powergrad"] = training(ours)
    runs["powergrad-eager"] = without_kernel(training(ours))
    runs["powergrad-ignored"] = training(lambda: ours(half))
    for size in FRONTIER:
        runs[f"powergrad-{size}"] = training(lambda size=size: ours(rows=size))
    runs["products"] = products(hidden.detach(), head.detach(), TOKENS)
    runs["products-176"] = products(hidden.detach(), head.detach(), 176)
    return runs


def products(hidden: Tensor, head: Tensor, rows: int) -> Callable[[], object]:
    def run() -> object:
        d_hidden, d_head = torch.empty_like(hidden), torch.zeros_like(head)
        block = hidden.new_empty(rows, head.shape[0])
        for h, dh in zip(hidden.split(rows), d_hidden.split(rows), strict=True):
            logits = torch.mm(h, head.t(), out=block[: h.shape[0]])
            torch.mm(logits, head, out=dh)
            d_head.addmm_(logits.t(), h)
        return d_hidden, d_head

    return run


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH).requires_grad_()
    head = (0.05 * torch.randn(CLASSES, WIDTH)).requires_grad_()
    return hidden, head, torch.randint(0, CLASSES, (TOKENS,))


def resident(name: str) -> None:
    """Print by how many bytes the resident set grows, at its largest, above the inputs."""
    torch.set_num_threads(1)
    run = variants(*inputs())[name]

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024

    begin = status("VmRSS")
    run()
    print(status("VmHWM") - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--resident", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.resident:
        resident(given.resident)
        return
    harness.warm_allocator()
    torch.set_num_threads(1)
    hidden, head, target = inputs()
    runs = variants(hidden, head, target)

    def clear() -> None:
        hidden.grad = head.grad = None

    medians = harness.interleaved(runs, given.rounds, before=clear)
    needed = 4 * (hidden.numel() + head.numel())
    environment = {k: v for k, v in os.environ.items() if k not in harness.KEPT}
    rows = []
    for name, run in runs.items():
        peak = harness.peak_bytes(run, clear)
        command = [sys.executable, __file__, "--resident", name]
        process = subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True
        )
        rows.append(
            {
                "tokens": TOKENS,
                "width": WIDTH,
                "classes": CLASSES,
                "variant": name,
                "rounds": given.rounds,
                "median_s": f"{medians[name]:.3f}",
                "ratio": f"{medians[name] / medians['plain']:.3f}",
                "peak_mb": f"{peak / 2**20:.1f}",
                "gradients_mb": f"{needed / 2**20:.1f}",
                "peak_to_gradients": f"{peak / needed:.3f}",
                "rss_mb": f"{int(process.stdout) / 2**20:.0f}",
            }
        )
        print(rows[-1])
    harness.save("linear", rows)


if __name__ == "__main__":
    main()
