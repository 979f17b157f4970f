"""Time and memory of the loss on a GPU, forward and backward, against `F.cross_entropy`.

    python benchmarks/gpu.py [--seconds 4] [--quick]       write results/bench_gpu.csv

Nobody has run it on a GPU yet. Variants, which take turns: `plain` is `F.cross_entropy`; `pytorch`
and `triton` are `powergrad.cross_entropy` without and with the Triton kernels; `copy` is a copy of
the logits. `ms` is the median time of a call between two synchronisations; `peak_units` the peak
memory above the logits, in units of the logits; `passes` the ratio to half of the copy's time,
which moves the logits once in each direction. `--device cpu` with POWERGRAD_TRITON=interpret tries
the program itself, and writes nothing.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import harness
import torch
import torch.nn.functional as F

import powergrad
from powergrad.kernels import gpu

SIZES = [(4096, 1000), (8192, 32000), (4096, 50257), (8192, 128256)]
CASES = ("labels", "smoothing", "softcap", "z_loss", "probabilities")


@contextmanager
def without_triton(device: torch.device) -> Iterator[None]:
    """The path that is taken where the kernels are switched off."""
    before = dict(gpu.BROKEN)
    gpu.BROKEN[device] = "switched off for comparison"
    try:
        yield
    finally:
        gpu.BROKEN.clear()
        gpu.BROKEN.update(before)


def variants(case: str, z: torch.Tensor, y: torch.Tensor) -> dict[str, Callable[[], object]]:
    options: dict[str, Any] = {
        "smoothing": {"label_smoothing": 0.1},
        "softcap": {"softcap": 30.0},
        "z_loss": {"z_loss": 1e-4},
    }.get(case, {})

    def ours() -> None:
        powergrad.cross_entropy(z, y, alpha=0.3, **options).backward()

    def without() -> None:
        with without_triton(z.device):
            ours()

    runs: dict[str, Callable[[], object]] = {"copy": lambda: z.detach().clone()}
    if case not in ("softcap", "z_loss"):
        runs["plain"] = lambda: F.cross_entropy(z, y, **options).backward()
    return {**runs, "pytorch": without, "triton": ours}


def seconds_of(run: Callable[[], object], synchronize: Callable[[], None]) -> float:
    synchronize()
    begin = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - begin


def measure(
    case: str, n: int, c: int, dtype: torch.dtype, device: torch.device, seconds: float
) -> list[dict[str, Any]]:
    z = torch.randn(n, c, device=device, dtype=dtype).requires_grad_()
    y = torch.randint(c, (n,), device=device)
    if case == "probabilities":
        y = torch.randn(n, c, device=device).softmax(1).to(dtype)
    cuda = device.type == "cuda"
    synchronize: Callable[[], None] = torch.cuda.synchronize if cuda else (lambda: None)
    runs, times, peaks, held = variants(case, z, y), {}, {}, 0
    for name, run in runs.items():  # compiles and checks the kernels
        run()
        z.grad = None
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
            held = torch.cuda.memory_allocated(device)
        times[name] = [seconds_of(run, synchronize)]
        if cuda:
            peaks[name] = torch.cuda.max_memory_allocated(device) - held
        z.grad = None
    rounds = max(5, min(200, int(seconds / sum(t[0] for t in times.values()))))
    order, chance = list(runs.items()), random.Random(0)
    for _ in range(rounds):
        chance.shuffle(order)
        for name, run in order:
            times[name].append(seconds_of(run, synchronize))
            z.grad = None
    medians = {name: median(values[1:]) for name, values in times.items()}
    size, rows = z.numel() * z.element_size(), []
    for name, value in medians.items():
        row = {"case": case, "dtype": str(dtype)[6:], "n": n, "c": c, "variant": name}
        row |= {"rounds": rounds, "ms": f"{1e3 * value:.4f}"}
        row["ratio"] = f"{value / medians['plain']:.3f}" if "plain" in medians else ""
        row["passes"] = f"{2 * value / medians['copy']:.2f}"
        row["peak_units"] = f"{peaks[name] / size:.3f}" if cuda else ""
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="for each size and case")
    parser.add_argument("--quick", action="store_true", help="the smallest size; write nothing")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU here.")
    device = torch.zeros(0, device=device).device  # with its index
    sizes = SIZES[:1] if given.quick else SIZES
    sizes = sizes if device.type == "cuda" else [(8, 1000)]
    rows = []
    for (n, c), dtype, case in itertools.product(sizes, (torch.bfloat16, torch.float32), CASES):
        rows += measure(case, n, c, dtype, device, given.seconds)
    if not given.quick and device.type == "cuda":
        about = {"triton": gpu.versions(), "gpu": gpu.describe_device(device)}
        harness.save("gpu", rows, device=device.type, **about)


if __name__ == "__main__":
    main()
