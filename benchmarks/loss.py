"""Time and memory of the loss, forward and backward, against `F.cross_entropy`.

    python benchmarks/loss.py [--seconds 8] [--quick]       write results/bench_loss.csv
    python benchmarks/loss.py --options                     write results/bench_options.csv

Variants, which take turns in one process (see `harness.py`): `plain` is `F.cross_entropy`; `eager`
and `native` are `powergrad.cross_entropy` without and with the C kernel; `hook` is the published
form, a hook that recovers the probabilities from the gradient (corrected, since as printed it is
wrong: docs/audit.md); `copy` is a copy of the logits, the least that any loss could take. Alpha is
0.3, reduction "mean", one thread. A turn is two calls: `us` and `ratio` are of the second, and
`cold_us` and `cold_ratio` of the first. `error` is the largest error of the gradient against
float64, relative to the largest entry of its row. With `--options`, the ratio is to our own time
without the option. In the case "scaled" the loss is multiplied by 3
before `backward`; elsewhere the gradient that arrives is 1, for which ours has nothing left to do.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.nn.functional as F
from torch import Tensor

import powergrad
from powergrad import kernels

ALPHA = 0.3
SIZES = [
    (256, 10),
    (1024, 100),
    (256, 1000),
    (1024, 1000),
    (4096, 1000),
    (512, 32000),
    (128, 128000),
]
CASES = ["smoothing", "weights", "probabilities", "scaled"]
GROWTH = [1 << 20, 1 << 22, 1 << 24, 1 << 26]  # elements: 1M to 64M


def without_kernel(run: Callable[[], Any]) -> Callable[[], Any]:
    """`run`, as it is where the C kernel was not built."""
    library = kernels.library

    def eager() -> Any:
        kernels.library = lambda: None
        try:
            return run()
        finally:
            kernels.library = library

    return eager


def hooked(z: Tensor, y: Tensor) -> Tensor:
    """The paper's listing, with its division turned into a multiplication."""
    n = z.shape[0]
    q = F.one_hot(y, z.shape[1]).to(z.dtype)

    def transform(grad: Tensor) -> Tensor:
        p = (grad * n + q) ** ALPHA
        return (p / p.sum(-1, keepdim=True) - q) / n

    z = z.view_as(z)
    z.register_hook(transform)
    return F.cross_entropy(z, y)


def variants(
    z: Tensor, target: Tensor, options: dict[str, Any], scale: float
) -> dict[str, Callable[[], object]]:
    def training(loss: Callable[[], Tensor]) -> Callable[[], object]:
        if scale == 1:
            return lambda: loss().backward()
        return lambda: (loss() * scale).backward()

    def ours() -> Tensor:
        return powergrad.cross_entropy(z, target, alpha=ALPHA, **options)

    runs: dict[str, Callable[[], object]] = {
        "plain": training(lambda: F.cross_entropy(z, target, **options)),
        "eager": without_kernel(training(ours)),
    }
    if kernels.available() and not target.is_floating_point():
        runs["native"] = training(ours)
    if not options and not target.is_floating_point() and scale == 1:
        runs["hook"] = training(lambda: hooked(z, target))
    runs["copy"] = lambda: z.detach().clone()
    return runs


def error_of(
    run: Callable[[], object], z: Tensor, target: Tensor, options: dict[str, Any], scale: float
) -> float:
    z.grad = None
    run()
    assert z.grad is not None
    worst = 0.0
    rows = max(1, (1 << 22) // z.shape[1])
    for start in range(0, z.shape[0], rows):
        part = slice(start, start + rows)
        leaf = z.detach()[part].double().requires_grad_()
        y = target[part].double() if target.is_floating_point() else target[part]
        wide: dict[str, Any] = {
            k: v.double() if isinstance(v, Tensor) else v for k, v in options.items()
        }
        loss = F.cross_entropy(ALPHA * leaf, y, **wide, reduction="sum") / ALPHA
        (oracle,) = torch.autograd.grad(loss, leaf)
        mass = z.shape[0]
        if "weight" in wide and not target.is_floating_point():
            mass = float(wide["weight"][target].sum())
        grad = z.grad[part].double() * (mass / scale)
        error = (grad - oracle).abs() / oracle.abs().amax(1, keepdim=True)
        worst = max(worst, float(error.max()))
    return worst


def measure(n: int, c: int, dtype: torch.dtype, case: str, seconds: float) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    z = torch.randn(n, c).to(dtype).requires_grad_()
    target: Tensor = torch.randint(0, c, (n,))
    options: dict[str, Any] = {}
    if case == "smoothing":
        options["label_smoothing"] = 0.1
    elif case == "weights":
        options["weight"] = (torch.rand(c) + 0.5).to(dtype)
    elif case == "probabilities":
        target = torch.randn(n, c).softmax(1).to(dtype)
    scale = 3.0 if case == "scaled" else 1.0
    runs = variants(z, target, options, scale)

    def clear() -> None:
        z.grad = None

    rounds = min(2000, harness.rounds_for(runs["plain"], seconds / len(runs) / 3))
    medians = harness.in_turns(runs, rounds, before=clear, calls=2)
    rows = []
    for name, run in runs.items():
        peak = harness.peak_bytes(run, clear)
        cold, warm = medians[name]
        exact = name in ("plain", "copy") or n * c > 1 << 24
        rows.append(
            {
                "case": case,
                "dtype": str(dtype).removeprefix("torch."),
                "n": n,
                "c": c,
                "variant": name,
                "rounds": rounds,
                "us": f"{1e6 * warm:.1f}",
                "ratio": f"{warm / medians['plain'][1]:.3f}",
                "cold_us": f"{1e6 * cold:.1f}",
                "cold_ratio": f"{cold / medians['plain'][0]:.3f}",
                "peak_units": f"{peak / (n * c * dtype.itemsize):.3f}",
                "error": "" if exact else f"{error_of(run, z, target, options, scale):.1e}",
            }
        )
        clear()
    shown = (f"{r['variant']} {r['ratio']} ({r['cold_ratio']})" for r in rows)
    print(case, rows[0]["dtype"], f"{n}x{c}", *shown)
    return rows


def options(seconds: float) -> list[dict[str, Any]]:
    """The time of our loss with an option, relative to its time without."""
    rows = []
    for n, c in [(1024, 1000), (512, 32000)]:
        torch.manual_seed(0)
        z, y = torch.randn(n, c).requires_grad_(), torch.randint(0, c, (n,))
        extra = {
            "none": {},
            "z_loss": {"z_loss": 1e-4},
            "token_weight": {"token_weight": torch.rand(n)},
            "softcap": {"softcap": 30.0},
        }

        def training(given: dict[str, Any], z: Tensor = z, y: Tensor = y) -> Callable[[], object]:
            return lambda: powergrad.cross_entropy(z, y, alpha=ALPHA, **given).backward()

        runs = {(name, "native"): training(given) for name, given in extra.items()}
        runs |= {(name, "eager"): without_kernel(run) for (name, _), run in [*runs.items()]}
        named = {"/".join(key): run for key, run in runs.items()}
        rounds = harness.rounds_for(runs["none", "eager"], seconds / len(runs))

        def clear(z: Tensor = z) -> None:
            z.grad = None

        medians = harness.interleaved(named, rounds, before=clear)
        for name, variant in runs:
            ratio = medians[f"{name}/{variant}"] / medians[f"none/{variant}"]
            rows.append({"n": n, "c": c, "option": name, "variant": variant, "rounds": rounds})
            rows[-1]["ratio"] = f"{ratio:.3f}"
            print(rows[-1])
    return rows


def growth(seconds: float) -> list[dict[str, Any]]:
    """From 1M to 64M elements, in N at 1,000 classes and in C at 256 rows."""
    rows = []
    for direction in ("N", "C"):
        for total in GROWTH:
            n, c = (total // 1000, 1000) if direction == "N" else (256, total // 256)
            for row in measure(n, c, torch.float32, f"growth in {direction}", seconds):
                rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=8.0, help="for each size and case")
    parser.add_argument("--options", action="store_true", help="the options of our loss alone")
    parser.add_argument("--quick", action="store_true", help="without growth, nothing is written")
    given = parser.parse_args()
    harness.warm_allocator()
    torch.set_num_threads(1)
    if given.options:
        harness.save("options", options(given.seconds))
        return
    rows: list[dict[str, Any]] = []
    for (n, c), dtype in itertools.product(SIZES, (torch.float32, torch.bfloat16)):
        rows += measure(n, c, dtype, "labels", given.seconds)
    for (n, c), case in itertools.product(SIZES[2:5], CASES):
        rows += measure(n, c, torch.float32, case, given.seconds)
    if given.quick:
        return
    rows += growth(given.seconds)
    harness.save("loss", rows)


if __name__ == "__main__":
    main()
