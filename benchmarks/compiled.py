"""Time of the loss under `torch.compile`, forward and backward, against `F.cross_entropy`.

    python benchmarks/compiled.py [--seconds 8]       write results/bench_compiled.csv

Variants, which take turns in one process (see `harness.py`): `plain` is `F.cross_entropy` and `pgt`
is `powergrad.cross_entropy` with the C kernel, both eager; `compiled plain` and `compiled pgt` are
the same under `torch.compile`; `compiled module` is `powergrad.CrossEntropyLoss`, whose alpha is an
input of the graph, and `compiled mode` is `F.cross_entropy` inside `PowerGrad`. Alpha is 0.3,
reduction "mean", one thread. `ratio` is relative to `plain`, `to_compiled` to `compiled plain`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.nn.functional as F
from torch import Tensor

import powergrad

ALPHA = 0.3
SIZES = [(256, 10), (1024, 100), (256, 1000), (1024, 1000), (4096, 1000), (512, 32000)]


def losses() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    def plain(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y)

    def pgt(z: Tensor, y: Tensor) -> Tensor:
        return powergrad.cross_entropy(z, y, alpha=ALPHA)

    def inside(z: Tensor, y: Tensor) -> Tensor:
        with powergrad.PowerGrad(ALPHA):
            return F.cross_entropy(z, y)

    torch.compiler.reset()
    return {
        "plain": plain,
        "pgt": pgt,
        "compiled plain": torch.compile(plain),
        "compiled pgt": torch.compile(pgt),
        "compiled module": torch.compile(powergrad.CrossEntropyLoss(ALPHA)),
        "compiled mode": torch.compile(inside),
    }


def measure(n: int, c: int, dtype: torch.dtype, seconds: float) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    z = torch.randn(n, c).to(dtype).requires_grad_()
    target = torch.randint(0, c, (n,))

    def training(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], object]:
        return lambda: loss(z, target).backward()

    def clear() -> None:
        z.grad = None

    runs = {name: training(loss) for name, loss in losses().items()}
    for run in runs.values():
        run()  # compiles
    rounds = min(2000, harness.rounds_for(runs["plain"], seconds / len(runs) / 2))
    medians = harness.in_turns(runs, rounds, before=clear, calls=2)
    rows = [
        {
            "dtype": str(dtype).removeprefix("torch."),
            "n": n,
            "c": c,
            "variant": name,
            "rounds": rounds,
            "us": f"{1e6 * warm:.1f}",
            "ratio": f"{warm / medians['plain'][1]:.3f}",
            "to_compiled": f"{warm / medians['compiled plain'][1]:.3f}",
        }
        for name, (_, warm) in medians.items()
    ]
    print(rows[0]["dtype"], f"{n}x{c}", *(f"{r['variant']} {r['ratio']}," for r in rows))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=8.0, help="for each size")
    seconds = parser.parse_args().seconds
    harness.warm_allocator()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for n, c in SIZES:
        rows += measure(n, c, torch.float32, seconds)
    rows += measure(1024, 1000, torch.bfloat16, seconds)
    harness.save("compiled", rows)


if __name__ == "__main__":
    main()
