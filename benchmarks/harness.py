"""What the benchmarks share: how time and memory are measured, and what a row of results says.

Time is CPU time (`time.process_time`) of a whole call, the variants taking turns in one process,
and a figure is the ratio of two medians: neighbours on the machine and its clock cancel out. The
allocator keeps what is freed (`warm_allocator`), because page faults of large buffers would
otherwise be most of what is measured.

Each variant may be called several times per turn. The first call is cold: it pays for what the
other variants evicted from the caches, and the cheapest of them pays for the largest. The second is
warm: it finds what the first left. A training step is between the two. The logits are as a rule in
the cache, since the head has just written them; the gradient's buffer and the code are not, after
all the other layers.

Memory is the peak of what PyTorch's allocator has handed out and not got back since the call began,
from the profiler's allocation events: exact, and the same in every run.
"""

from __future__ import annotations

import importlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from powergrad.lab.environment import describe_machine
from powergrad.lab.files import csv_text, write_text

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}


def warm_allocator() -> None:
    """Start this program again with an allocator that keeps its memory, unless it does already."""
    if any(os.environ.get(key) != value for key, value in KEPT.items()):
        os.environ.update(KEPT)
        os.execv(sys.executable, [sys.executable, *sys.argv])


def conditions() -> dict[str, Any]:
    """What a figure depends on, beside the code."""
    machine = describe_machine()
    return {
        "threads": machine["threads"],
        "device": "cpu",
        "cpu": machine["processor"],
        "python": machine["python"],
        "torch": machine["torch"],
        "commit": commit(),
        "date": machine["time"][:10],
    }


def commit() -> str:
    """The commit of the code; a result or a page that was written since does not make it dirty."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.check_output([*git, "rev-parse", "--short=12", "HEAD"], text=True).strip()
    code = [*git, "status", "--porcelain", "--", "src", "benchmarks", "pyproject.toml"]
    return f"{head}-dirty" if subprocess.check_output(code) else head


def in_turns(
    variants: dict[str, Callable[[], object]],
    rounds: int,
    before: Callable[[], object] = lambda: None,
    calls: int = 1,
) -> dict[str, list[float]]:
    """The median CPU seconds of every call of a variant's turn; it has one turn per round.

    Every round has another order, because what a variant finds in the caches and the allocator
    depends on its predecessor. `before` runs ahead of each call and is not timed.
    """
    seconds: dict[str, list[list[float]]] = {n: [[] for _ in range(calls)] for n in variants}
    order, chance = list(variants.items()), random.Random(0)
    for i in range(rounds + 1):  # the first warms up
        chance.shuffle(order)
        for name, run in order:
            for values in seconds[name]:
                before()
                begin = time.process_time()
                run()
                if i:
                    values.append(time.process_time() - begin)
    return {name: [median(values) for values in lists] for name, lists in seconds.items()}


def interleaved(
    variants: dict[str, Callable[[], object]],
    rounds: int,
    before: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """The median CPU seconds of each variant, in turns of one call: for calls of milliseconds."""
    return {name: times[0] for name, times in in_turns(variants, rounds, before).items()}


def create_timm(name: str, **options: Any) -> torch.nn.Module:
    """A model of timm's, also where its torchvision does not fit a CPU-only torch."""
    sys.path.insert(0, str(ROOT / "tests"))
    importlib.import_module("torchvision_shim").declare_torchvision_schemas()
    return importlib.import_module("timm").create_model(name, **options)


def rounds_for(run: Callable[[], object], budget: float, least: int = 7) -> int:
    """How many times `run` fits into `budget` seconds."""
    run()
    begin = time.process_time()
    run()
    return max(least, int(budget / max(time.process_time() - begin, 1e-6)))


def peak_bytes(run: Callable[[], object], before: Callable[[], object]) -> int:
    """The peak of what PyTorch's allocator has handed out during `run`, after `before`."""
    run()
    before()
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        run()
    results: Any = profile.kineto_results  # pyright: ignore[reportOptionalMemberAccess]
    events = [e for e in results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def save(name: str, rows: Sequence[dict[str, Any]], **others: Any) -> Path:
    """Write `rows` with the conditions, and with `others`, to ``results/bench_<name>.csv``."""
    path = RESULTS / f"bench_{name}.csv"
    shared = conditions() | others
    write_text(path, csv_text([*rows[0], *shared], ({**row, **shared} for row in rows)))
    print(f"wrote {path.relative_to(ROOT)}")
    return path
