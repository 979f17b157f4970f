"""The paper's claim that altering every gradient (Type I) costs more than altering one (Type II).

    python benchmarks/altering.py [--rounds 15]     write results/bench_altering.csv

What each method adds to a training step of timm's ResNet-18 at 64x64, batch 32, 1,000 classes, SGD,
one thread. Type I acts on all gradients before the step: `value`, `tensor-norm` (the paper's GC),
`norm` and `agc`, by `clip_grads_before_step`. Type II acts at the logits: `pgt` is the difference
between `powergrad.cross_entropy` and `F.cross_entropy`, forward and backward, on the step's logits,
and `alter` is `alter_gradient` with a function that doubles. `step` is the whole step without any.
All take turns in one process (see `harness.py`); `share` is relative to the step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.nn.functional as F

import powergrad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    harness.warm_allocator()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = harness.create_timm("resnet18", num_classes=1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    images, target = torch.randn(32, 3, 64, 64), torch.randint(0, 1000, (32,))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), target).backward()
        optimizer.step()

    step()
    logits = model(images).detach().requires_grad_()

    def at_the_logits(loss: Callable[[], torch.Tensor]) -> Callable[[], object]:
        def run() -> None:
            logits.grad = None
            loss().backward()

        return run

    def clipping(**threshold: float) -> Callable[[], object]:
        handle = powergrad.clip_grads_before_step(optimizer, model, **threshold)  # pyright: ignore
        (hook,) = optimizer._optimizer_step_pre_hooks.values()
        handle.remove()
        return lambda: hook(optimizer, (optimizer,), {})

    runs: dict[str, Callable[[], object]] = {
        "step": step,
        "plain loss": at_the_logits(lambda: F.cross_entropy(logits, target)),
        "pgt": at_the_logits(lambda: powergrad.cross_entropy(logits, target, alpha=0.3)),
        "alter": at_the_logits(
            lambda: F.cross_entropy(powergrad.alter_gradient(logits, lambda g: 2 * g), target)
        ),
        "value": clipping(value=1e-3),
        "tensor-norm": clipping(tensor_norm=1e-2),
        "norm": clipping(norm=1e-2),
        "agc": clipping(agc=1e-2),
    }
    medians = harness.interleaved(runs, rounds)
    rows: list[dict[str, Any]] = []
    for name, kind in {
        "step": "0",
        "pgt": "II",
        "alter": "II",
        "value": "I",
        "tensor-norm": "I",
        "norm": "I",
        "agc": "I",
    }.items():
        seconds = medians[name] - (medians["plain loss"] if kind == "II" else 0)
        rows.append(
            {
                "method": name,
                "type": kind,
                "rounds": rounds,
                "added_ms": f"{1e3 * seconds:.4f}",
                "share": f"{seconds / medians['step']:.6f}",
            }
        )
        print(rows[-1])
    harness.save("altering", rows)


if __name__ == "__main__":
    main()
