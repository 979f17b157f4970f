"""What FilterMonitor adds to the training of a ResNet-18 at 64x64, batch 32.

    python benchmarks/monitor.py [--steps 40] [--threads 1]     writes results/bench_monitor.csv

Only the monitor's own calls are timed (``step``, and the hook that sees the features), in a real
training loop, so that the weights come from where the optimizer left them. A row's `share` is the
time of these calls over the time of the training steps, both summed over the run; `share_median`
is the median call that records over `every` median steps.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from powergrad.monitor import FilterMonitor

SETTINGS: list[dict[str, Any]] = [
    {"every": 1, "gradients": False, "features": False},
    {"every": 10, "gradients": False, "features": False},
    {"every": 1, "gradients": True, "features": True},
    {"every": 10, "gradients": True, "features": True},
]


class TimedMonitor(FilterMonitor):
    """Keeps the seconds of each of its own calls."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.hook_seconds = 0.0
        self.seconds: list[float] = []
        super().__init__(*args, **kwargs)

    def step(self, step: int) -> None:
        """Record, timed."""
        begin = time.process_time()
        super().step(step)
        self.seconds.append(time.process_time() - begin)

    def _add_features(self, module: nn.Module, features: Tensor) -> None:
        begin = time.process_time()
        super()._add_features(module, features)
        self.hook_seconds += time.process_time() - begin


def measure(model: nn.Module, setting: dict[str, Any], steps: int) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    images, target = torch.randn(32, 3, 64, 64), torch.randint(1000, (32,))
    training: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        monitor = TimedMonitor(model, folder, **setting)
        monitor.step(0)
        for step in range(1, steps + 1):
            seen = monitor.hook_seconds
            begin = time.process_time()
            optimizer.zero_grad()
            F.cross_entropy(model(images), target).backward()
            optimizer.step()
            training.append(time.process_time() - begin - (monitor.hook_seconds - seen))
            monitor.step(step)
        monitor.close()
        size = np.load(Path(folder) / "records.npy").itemsize
    calls = monitor.seconds[1:]
    records = calls[setting["every"] - 1 :: setting["every"]]
    hook = monitor.hook_seconds / steps
    step_time, record_time = statistics.median(training), statistics.median(records)
    return {
        "model": "timm resnet18",
        "image": 64,
        "batch": 32,
        **setting,
        "steps": steps,
        "bytes_per_record": size,
        "step_ms": f"{1e3 * step_time:.1f}",
        "record_ms": f"{1e3 * record_time:.3f}",
        "share": f"{(sum(calls) + monitor.hook_seconds) / sum(training):.6f}",
        "share_median": f"{(record_time / setting['every'] + hook) / step_time:.6f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    harness.warm_allocator()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    model = harness.create_timm("resnet18", num_classes=1000)
    measure(model, SETTINGS[0], 3)  # warm up
    rows = [measure(model, setting, given.steps) for setting in SETTINGS]
    for row in rows:
        print(*row.values())
    harness.save("monitor", rows)


if __name__ == "__main__":
    main()
