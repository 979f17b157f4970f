"""Estimates the time of a run from a few real steps, under the conditions of the study.

``python -m powergrad.lab.trainer.timing`` reads one recipe per line and prints its timing. As many
of these processes measure at the same time as runs will, because runs share caches and bandwidth.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

import powergrad
from powergrad.lab.data import Datasets, load_data
from powergrad.lab.trainer.processes import Processes, join_processes
from powergrad.lab.trainer.recipe import Recipe
from powergrad.lab.trainer.session import Session

STEPS = 12  # timed steps, after the first
PATIENCE = 1.0  # after this many seconds, three steps are enough
PROBE = 32  # batch size of a first step, if batches are larger
SLOW = 3.0  # if a step takes longer (in seconds), the time of the small step is extrapolated
FILES = 0.2  # seconds that a run takes to write its files


@dataclass(frozen=True)
class Timing:
    """The times of the parts of a run, in seconds.

    Attributes:
        start: Loading the data and creating the network.
        step: One training step, the median of several.
        test: One test.
        steps: The number of training steps per epoch.
    """

    start: float
    step: float
    test: float
    steps: int

    def seconds(self, recipe: Recipe) -> float:
        """The time of a run of `recipe`, whose steps must cost the same as the timed ones."""
        options = recipe.train
        tests = math.ceil(options.epochs / options.test_every)
        return FILES + self.start + options.epochs * self.steps * self.step + tests * self.test


def measure(recipe: Recipe) -> Timing:
    """Time the parts of a run in this process."""
    if recipe.machine.threads is not None:
        torch.set_num_threads(recipe.machine.threads)
    recipe = recipe.override({"train.compile": False})
    with join_processes(recipe.machine.device) as processes:
        _warm_up(recipe, processes)
        began = time.perf_counter()
        data, session = _begin(recipe, processes)
        start = time.perf_counter() - began
        step, factor = 0.0, recipe.train.batch_size / PROBE
        if factor > 1:
            smaller = recipe.override({"train.batch_size": PROBE, "train.accumulate": 1})
            step = factor * _median_step(Session(smaller, data, processes), steps=1)
        if step < SLOW:
            step = _median_step(session)
        return Timing(start, step, _test_seconds(session, data), session.steps_per_epoch)


def _begin(recipe: Recipe, processes: Processes) -> tuple[Datasets, Session]:
    machine = recipe.machine
    data = load_data(recipe.data, data_dir=machine.data_dir, workers=machine.workers)
    return data, Session(recipe, data, processes)


_is_warm = False


def _warm_up(recipe: Recipe, processes: Processes) -> None:
    """Run a first step untimed, because a worker imports libraries once, not for every run."""
    global _is_warm
    if not _is_warm:
        smaller = {"train.batch_size": min(PROBE, recipe.train.batch_size), "train.accumulate": 1}
        next(_begin(recipe.override(smaller), processes)[1].run_epoch())
        _is_warm = True


def _median_step(session: Session, steps: int = STEPS) -> float:
    """The median time of a step, without the first, which allocates memory."""
    times: list[float] = []
    began = last = time.perf_counter()
    while not session.done and len(times) <= steps:
        for loss in session.run_epoch():
            loss.item()  # waits for the GPU
            now = time.perf_counter()
            times.append(now - last)
            last = now
            if len(times) > steps or (len(times) > 3 and now - began > PATIENCE):
                return statistics.median(times[1:])
    return statistics.median(times[1:] or times)


@torch.no_grad()
def _test_seconds(session: Session, data: Datasets) -> float:
    """The time of a test of all images, extrapolated from its first batch, and of the census."""
    options = session.recipe.train
    model = session.tested.eval()
    began = time.perf_counter()
    batches = data.test.test_batches(options.test_batch_size or options.batch_size)
    (images, _), index = next(batches)
    with session.autocast:
        model(images.to(session.processes.device, session.dtype)).sum().item()
    batch = time.perf_counter() - began
    began = time.perf_counter()
    powergrad.census(model, initial=session.initial)
    return batch * len(data.test) / len(index) + time.perf_counter() - began


class Stopwatch:
    """Times recipes in several processes at once; a context manager.

    Attributes:
        boot: Seconds until a process is ready, which the workers of a study need too.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.members: list[subprocess.Popen[str]] = []
        self.boot = 0.0

    def __enter__(self) -> Stopwatch:
        command = [sys.executable, "-m", "powergrad.lab.trainer.timing"]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}  # as for the workers of a study
        began = time.monotonic()
        for _ in range(self.workers):
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
            )
            self.members.append(process)
        for member in self.members:
            self._answer(member)
        self.boot = time.monotonic() - began
        return self

    def __exit__(self, *exception: object) -> None:
        for member in self.members:
            member.kill()
            member.wait()
            for stream in (member.stdin, member.stdout):
                with contextlib.suppress(OSError):
                    stream.close()  # pyright: ignore[reportOptionalMemberAccess]

    def time(self, recipe: Recipe) -> Timing:
        """The timing of `recipe`, as the mean over the processes."""
        question = json.dumps(recipe.model_dump(mode="json")) + "\n"
        for member in self.members:
            assert member.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # `_answer` raises the error
                member.stdin.write(question)
                member.stdin.flush()
        answers = [self._answer(member) for member in self.members]
        for answer in answers:
            if "error" in answer:
                raise ValueError(answer["error"])
        means = {
            name: statistics.fmean(float(answer[name]) for answer in answers)
            for name in ("start", "step", "test")
        }
        return Timing(**means, steps=answers[0]["steps"])

    def _answer(self, member: subprocess.Popen[str]) -> Mapping[str, Any]:
        assert member.stdout is not None
        line = member.stdout.readline()
        if not line:
            raise ValueError(
                "Expected to time a training step, but got a process that ended with code "
                f"{member.wait()}; it may have run out of memory."
            )
        return json.loads(line)


def _answers() -> Iterator[Mapping[str, Any]]:
    yield {}  # ready
    for line in sys.stdin:
        try:
            yield asdict(measure(Recipe.model_validate_json(line)))
        except Exception as error:
            yield {"error": str(error) or type(error).__name__}


if __name__ == "__main__":
    for answer in _answers():
        print(json.dumps(answer), flush=True)
