"""Estimates the time of a run from a few real steps, in the process that would execute it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import powergrad
from powergrad.lab.data import Datasets
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
    """The times of the parts of a run, in seconds."""

    start: float  # loading the data and creating the network
    step: float  # one training step, the median of several
    test: float
    steps: int  # training steps per epoch
    took: float  # the measurement itself

    @classmethod
    def mean(cls, timings: Sequence[Timing]) -> Timing:
        """The mean over several workers."""
        columns = ([getattr(t, name) for t in timings] for name in ("start", "step", "test"))
        start, step, test = map(statistics.fmean, columns)
        return cls(start, step, test, timings[0].steps, max(t.took for t in timings))

    def seconds(self, recipe: Recipe) -> float:
        """The time of a run of `recipe`, whose steps must cost the same as the timed ones."""
        options = recipe.train
        tests = math.ceil(options.epochs / options.test_every)
        return FILES + self.start + options.epochs * self.steps * self.step + tests * self.test


def measure(recipe: Recipe) -> Timing:
    """Time the parts of a run in this process."""
    entered = time.perf_counter()
    if recipe.machine.threads is not None:
        torch.set_num_threads(recipe.machine.threads)
    recipe = recipe.override({"train.compile": False})
    with join_processes(recipe.machine.device) as processes:
        _warm_up(recipe, recipe.load_data(), processes)
        began = time.perf_counter()
        data = recipe.load_data()
        session = Session(recipe, data, processes)
        start = time.perf_counter() - began
        step, factor = 0.0, recipe.train.batch_size / PROBE
        if factor > 1:
            smaller = recipe.override({"train.batch_size": PROBE, "train.accumulate": 1})
            step = factor * _median_step(Session(smaller, data, processes), steps=1)
        if step < SLOW:
            step = _median_step(session)
        test = _test_seconds(session, data)
        took = time.perf_counter() - entered
        return Timing(start, step, test, session.steps_per_epoch, took)


_is_warm = False


def _warm_up(recipe: Recipe, data: Datasets, processes: Processes) -> None:
    """Run a first step untimed, because a worker imports libraries once, not for every run."""
    global _is_warm
    if not _is_warm:
        smaller = {"train.batch_size": min(PROBE, recipe.train.batch_size), "train.accumulate": 1}
        next(Session(recipe.override(smaller), data, processes).run_epoch())
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
    options, model = session.recipe.train, session.tested.eval()
    began = time.perf_counter()
    batches = data.test.test_batches(options.test_batch_size or options.batch_size)
    (images, _), index = next(batches)
    with session.autocast:
        model(images.to(session.processes.device, session.dtype)).sum().item()
    batch = time.perf_counter() - began
    began = time.perf_counter()
    powergrad.census(model, initial=session.initial)
    return batch * len(data.test) / len(index) + time.perf_counter() - began
