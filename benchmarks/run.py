"""What `powergrad run --alpha 0.3` costs per training step, against the same step without it.

The step is the usual one: zero_grad, forward, `F.cross_entropy`, backward, `optimizer.step()`. The
variants share one process, network and data, so that nothing else differs: what `powergrad run`
installs is switched on for its own turns (`run`) and off for the others: `plain`, `again`, which
is the same and shows the noise, and `hand`, which calls `powergrad.cross_entropy`. In each round
every variant has one turn, in random order: 2 steps untimed, then 6 timed, by CPU time. A
program is switched once, and switching empties Python's caches of attributes: steps timed right
after it were up to 3% slower, which is why a turn begins with others. A ratio is the median over
rounds of a turn's median step over that of the `plain` turn. The first steps, which `powergrad run`
watches to measure alpha, are over before the timing begins.

    python benchmarks/run.py [--rounds 40]     writes results/bench_run.csv
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from harness import save, warm_allocator
from torch import nn
from torch.nn import functional as F

import powergrad
from powergrad.lab.trainer.networks import create_model
from powergrad.mode import Enabled
from powergrad.run import Options
from powergrad.run.optimizers import ATTEMPTS, Optimizers

ALPHA = 0.3
WARM_UP, TIMED = 2, 6  # steps per turn
assert ATTEMPTS < WARM_UP + TIMED


def perceptron() -> nn.Module:
    layers = [nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(*layers)


CASES: list[tuple[str, Callable[[], nn.Module], tuple[int, ...], str]] = [
    ("mlp 784-512-512-10", perceptron, (128, 784), "SGD"),
    ("resnet8", lambda: create_model("resnet8", num_classes=10), (64, 3, 32, 32), "SGD"),
    ("resnet20", lambda: create_model("resnet20", num_classes=10), (64, 3, 32, 32), "AdamW"),
]


def measure(
    name: str, make: Callable[[], nn.Module], shape: tuple[int, ...], kind: str, rounds: int
) -> dict[str, Any]:
    torch.manual_seed(0)
    model, images, labels = make(), torch.randn(shape), torch.randint(0, 10, shape[:1])
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-3)

    def step(loss_fn: Callable[..., torch.Tensor]) -> None:
        optimizer.zero_grad()
        loss_fn(model(images), labels).backward()
        optimizer.step()

    def by_hand(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return powergrad.cross_entropy(logits, target, alpha=ALPHA)

    altered = 0
    optimizers = Optimizers(Options(alpha=ALPHA), Enabled())
    rounds_of: dict[str, list[float]] = {"plain": [], "again": [], "hand": [], "run": []}
    order, chance = list(rounds_of), random.Random(0)
    for number in range(rounds + 1):
        chance.shuffle(order)
        for variant in order:
            enabled = powergrad.enable(ALPHA) if variant == "run" else None
            if enabled is not None:
                optimizers.install()
            loss_fn = by_hand if variant == "hand" else F.cross_entropy
            seconds = []
            for _ in range(WARM_UP + TIMED):
                begin = time.process_time()
                step(loss_fn)
                seconds.append(time.process_time() - begin)
            if number:  # the first round's turns hold the watched steps
                rounds_of[variant].append(median(seconds[WARM_UP:]))
            if enabled is not None:
                altered += enabled.altered["cross_entropy"]
                powergrad.disable()
                optimizers.close()
    assert altered == (rounds + 1) * (WARM_UP + TIMED)

    def ratio(variant: str) -> float:
        pairs = zip(rounds_of[variant], rounds_of["plain"], strict=True)
        return round(median(turn / plain for turn, plain in pairs), 4)

    return {
        "model": name,
        "batch": shape[0],
        "optimizer": kind,
        "rounds": rounds,
        **{f"{variant}_ms": round(1e3 * median(turns), 4) for variant, turns in rounds_of.items()},
        **{f"ratio_{variant}": ratio(variant) for variant in ("run", "hand", "again")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    rows = []
    for name, make, shape, kind in CASES:
        rows.append(
            measure(name, make, shape, kind, rounds * 10 if name.startswith("mlp") else rounds)
        )
        print(rows[-1], flush=True)
    save("run", rows)


if __name__ == "__main__":
    warm_allocator()
    main()
