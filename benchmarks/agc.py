"""Time adaptive gradient clipping on ResNet-50's parameters against timm's.

    python benchmarks/agc.py [--rounds 101]     write results/bench_agc.csv (a few minutes)

One thread, CPU time, medians over rounds. In each round every variant has its turn on the same
gradients, with none, half or all of the units over the threshold, and leaves the same bits as timm:

    timm       ``timm.utils.agc.adaptive_clip_grad`` on the list of parameters without the head
    function   ``adaptive_clip_grad_`` on the model, which finds units and head by itself
    hook       what ``clip_grads_before_step`` does before a step

timm allocates two tensors of the size of each gradient. The process runs with glibc told to keep
freed memory, without which timm's time depends on what was allocated before, up to twofold.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from typing import Any

import harness
import torch

from powergrad import adaptive_clip_grad_, clip_grads_before_step


def gradients(parameters: list[torch.nn.Parameter], case: str) -> list[torch.Tensor]:
    """Gradients of which none, half (every second) or all units are over the threshold."""
    result = []
    for i, p in enumerate(parameters):
        unit = torch.arange(len(p)) if p.dim() > 1 else torch.tensor([i])
        over = {"none": unit < 0, "some": unit % 2 == 0, "all": unit >= 0}[case]
        size = torch.where(over, 1.0, 1e-9).view(-1, *[1] * (p.dim() - 1))
        result.append(torch.randn_like(p) * size)
    return result


def measure(case: str, rounds: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = harness.create_timm("resnet50")
    agc = importlib.import_module("timm.utils.agc")
    body = [p for name, p in model.named_parameters() if not name.startswith("fc.")]
    grads = [torch.empty_like(p) for p in body]
    for p, grad in zip(body, grads, strict=True):
        p.grad = grad
    for p in model.get_submodule("fc").parameters():
        p.grad = torch.zeros_like(p)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handle = clip_grads_before_step(optimizer, model, agc=0.01)
    (hook,) = optimizer._optimizer_step_pre_hooks.values()
    variants: dict[str, Callable[[], object]] = {
        "timm": lambda: agc.adaptive_clip_grad(body),
        "function": lambda: adaptive_clip_grad_(model),
        "hook": lambda: hook(optimizer, (optimizer,), {}),
    }
    given = gradients(body, case)

    def put_back() -> None:
        for grad, value in zip(grads, given, strict=True):
            grad.copy_(value)

    results = {}
    for name, clip in variants.items():
        put_back()
        clip()
        results[name] = [grad.clone() for grad in grads]
    medians = harness.interleaved(variants, rounds, before=put_back)
    report = handle.last_report["agc"]
    return [
        {
            "case": case,
            "variant": name,
            "rounds": rounds,
            "median_ms": f"{1e3 * medians[name]:.2f}",
            "ratio_to_timm": f"{medians[name] / medians['timm']:.3f}",
            "bit_equal": all(map(torch.equal, results[name], results["timm"])),
            "units": report.units,
            "clipped": int(report.clipped),
        }
        for name in variants
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=101)
    rounds = parser.parse_args().rounds
    harness.warm_allocator()
    torch.set_num_threads(1)
    rows = [row for case in ("none", "some", "all") for row in measure(case, rounds)]
    for row in rows:
        print(*row.values())
    harness.save("agc", rows)


if __name__ == "__main__":
    main()
