"""Checks before the first run: the data, the time and the disk space that runs need.

:func:`check_recipe` finds errors that would make every run fail. A :class:`Plan` counts the runs of
a study; with the measured times of its recipes it estimates the duration of the study, and
:func:`fit_budget` chooses image size, width, epochs and seeds so that it fits a given time.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from powergrad.lab.data import load_data
from powergrad.lab.data.scan import Progress, Scan, scan_folder
from powergrad.lab.jobs import Changes
from powergrad.lab.stats import DEFAULT, LEAST, Design
from powergrad.lab.trainer.networks import create_model
from powergrad.lab.trainer.recipe import Recipe
from powergrad.lab.trainer.timing import Timing
from powergrad.lab.words import bytes_in_words, duration

SHORT_WORK = 5e10  # parameters x pixels x images x epochs: about ten seconds of one core
SIZES = (192, 128, 96, 64, 48, 32)  # pixels that a budget may choose, if the recipe has more
LEAST_WIDTH = 8
LEAST_EPOCHS = 3
SPARE = 0.9  # the share of the remaining time that is planned, as step times vary
LOGITS = 5_000_000  # a run stores its test logits up to this number


# Data and network ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """The data and the network of a recipe.

    Attributes:
        scan: The scan of the folder of images; None for other data.
        train: The number of training images.
        test: The number of test images.
        classes: The number of classes.
        size: The side of a training image in pixels.
        parameters: The number of parameters of the network.
        width: The number of channels of the network's first layer.
    """

    scan: Scan | None
    train: int
    test: int
    classes: int
    size: int
    parameters: int
    width: int

    def is_short(self, recipe: Recipe) -> bool:
        """Whether a run is known to take seconds: a small network on small images in memory."""
        work = self.parameters * self.size**2 * self.train * recipe.train.epochs
        return self.scan is None and work < SHORT_WORK

    def run_bytes(self, recipe: Recipe) -> int:
        """The approximate number of bytes of a run: checkpoints, weights, test outputs, norms."""
        train, machine = recipe.train, recipe.machine
        copies = 2 if recipe.optimizer.name == "sgd" else 3  # the weights and the optimizer state
        copies += train.ema is not None
        weights = 2 * copies + 1 + machine.keep_best  # two checkpoints; the final and best weights
        outputs = self.test * (self.classes + 2)
        norms = 0
        if recipe.monitor.every:
            records = train.epochs * (self.train // train.batch_size) // recipe.monitor.every + 1
            norms = records * 4 * math.isqrt(self.parameters)
        width = 8 if train.precision == "float64" else 4
        kept = outputs if self.test * self.classes <= LOGITS else 0
        return width * (weights * self.parameters + kept + norms) + 100_000


def check_recipe(
    recipe: Recipe, *, arms: Iterable[Recipe] = (), progress: Progress | None = None
) -> Found:
    """Check a recipe for errors that would make every run fail, such as missing data."""
    machine, scan = recipe.machine, None
    if recipe.data.name.startswith("folder:"):
        scan = scan_folder(recipe.data, machine.data_dir, progress=progress)
        if scan.problems:
            return Found(scan, scan.train, scan.test, len(scan.classes), 0, 0, 0)
    data = load_data(recipe.data, data_dir=machine.data_dir)
    data.train.steps(recipe.train.batch_size)  # raises if the batch is larger than the data
    models = {}
    for model in dict.fromkeys(variant.model for variant in (recipe, *arms)):
        with torch.device("meta"):
            models[model] = create_model(**model.arguments(data))
    tensors = list(models[recipe.model].parameters())
    return Found(
        scan,
        len(data.train),
        len(data.test),
        len(data.classes),
        data.size,
        sum(tensor.numel() for tensor in tensors),
        tensors[0].shape[0],
    )


def check_disk(folder: Path, needed: int, runs: int) -> None:
    """Check that there is enough disk space for the runs."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ValueError(
            f"Expected about {bytes_in_words(needed)} of disk space for {runs} runs in "
            f"{str(folder)!r}, but got {bytes_in_words(free)} free on the disk of {str(place)!r}; "
            "choose another place with --out."
        )


# How long a study takes ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The runs of a study.

    Attributes:
        base: The recipe.
        arms: The changes of each arm.
        design: The numbers of units per arm (seeds or repeats) at which results are tested.
        workers: The number of runs at a time.
        extra: The number of runs before the first unit, for all arms: those of a single tuning.
        per_unit: The number of runs per arm and unit: one, or those of a repeat with its tuning.
        done: The number of runs that are already finished.
    """

    base: Recipe
    arms: Mapping[str, Changes]
    design: Design
    workers: int = 1
    extra: int = 0
    per_unit: int = 1
    done: int = 0

    def runs(self, units: int) -> int:
        """The number of remaining runs until every arm has `units` units."""
        return max(0, self.extra + units * self.per_unit * len(self.arms) - self.done)

    @property
    def fewest(self) -> int:
        """The number of runs until the first look."""
        return self.runs(self.design.looks[0])

    @property
    def most(self) -> int:
        """The number of runs until the last look."""
        return self.runs(self.design.last)

    def seconds(self, units: int, run: float) -> float:
        """The time of these runs in seconds, if one takes `run` seconds."""
        return math.ceil(self.runs(units) / self.workers) * run

    def recipes(self, changes: Changes) -> Iterator[Recipe]:
        """The recipe of every arm, with `changes` applied to the base."""
        for arm in self.arms.values():
            yield self.base.override({**changes, **arm})


class Clock:
    """Measures the time of recipes, once for all recipes whose steps cost the same."""

    def __init__(self, time: Callable[[Recipe], Timing]) -> None:
        self.time = time
        self.known: dict[str, Timing] = {}

    def run_seconds(self, plan: Plan, changes: Changes) -> float:
        """The mean time of a run over the arms of a plan, with `changes` applied to its base."""
        times = [self._timing(recipe).seconds(recipe) for recipe in plan.recipes(changes)]
        return sum(times) / len(times)

    def _timing(self, recipe: Recipe) -> Timing:
        sections = recipe.model_dump(mode="json", include={"data", "model", "clip", "train"})
        del sections["train"]["epochs"], sections["train"]["test_every"]
        key = json.dumps([sections, recipe.optimizer.name, recipe.monitor.every])
        if key not in self.known:
            self.known[key] = self.time(recipe)
        return self.known[key]


# Fitting a study to a time budget -----------------------------------------------------------------


@dataclass(frozen=True)
class Budget:
    """The settings that were chosen so that a study fits a given time.

    Attributes:
        seconds: The given time.
        changes: The changes of the recipe.
        seeds: The value of ``--seeds``; empty if the seeds were given.
        run_seconds: The time of a run.
        reserve: The part of the time that is not for runs, but for starting and for the page.
    """

    seconds: float
    changes: dict[str, Any] = field(default_factory=dict)
    seeds: str = ""
    run_seconds: float = 0.0
    reserve: float = 0.0

    @property
    def options(self) -> str:
        """The choice as command-line options; empty if nothing changes."""
        options = [f"--{key} {value}" for key, value in self.changes.items()]
        return " ".join([*options, f"--seeds {self.seeds}"] if self.seeds else options)


def fit_budget(
    plan: Plan,
    facts: Found,
    clock: Clock,
    *,
    budget: float,
    left: float,
    reserve: float = 0.0,
    given: Collection[str] = (),
    seeds_given: bool = False,
) -> Budget:
    """Choose image size, width, epochs and seeds so that a study fits `budget`.

    The first look must fit. The recipe is changed as little as possible, in this order: fewer seeds
    (at least 8), fewer epochs (at least half), smaller images, a narrower network, still fewer
    epochs, and finally 6 seeds. Remaining time is used for more seeds, up to 24. Every candidate is
    measured.
    """
    base, available = plan.base, SPARE * (left - reserve)
    first = plan.design.looks[0] if seeds_given else DEFAULT.looks[0]
    most = base.train.epochs
    least = min(most, max(LEAST_EPOCHS, math.floor(base.schedule.warmup_epochs) + 1))
    if "train.epochs" in given:
        least = most

    def epochs_that_fit(changes: Changes, units: int) -> int:
        one, two = (
            clock.run_seconds(plan, {**changes, "train.epochs": epochs}) for epochs in (most, least)
        )
        slope = (one - two) / (most - least) if most > least else 0.0
        room = available / max(1, math.ceil(plan.runs(units) / plan.workers))
        if room >= one:
            return most
        return least + math.floor((room - two) / slope) if slope and room >= two else 0

    enough = max(least, math.ceil(most / 2))
    chosen: tuple[dict[str, Any], int, int] | None = None
    rungs = list(_rungs(base, facts, given))
    share = math.inf  # the share of the last measured time that would fit
    measured: Changes = {}
    for changes in rungs:
        if changes is not rungs[-1] and _work(facts, changes) > share * _work(facts, measured):
            continue  # it cannot be that much faster
        epochs, measured = epochs_that_fit(changes, first), changes
        if epochs:
            chosen = changes, epochs, first
        if epochs >= enough:
            break
        run = clock.run_seconds(plan, {**changes, "train.epochs": enough})
        share = available / plan.seconds(first, run)
    if chosen is None and not seeds_given and (epochs := epochs_that_fit(rungs[-1], LEAST)):
        chosen = rungs[-1], epochs, LEAST
    if chosen is None:
        smallest = {**rungs[-1], "train.epochs": least}
        spent = budget - left + reserve
        raise _too_short(plan, clock, smallest, first, budget, spent)
    changes, epochs, first = chosen
    if epochs < most:
        changes = {**changes, "train.epochs": epochs}
    run = clock.run_seconds(plan, changes)
    seeds = ""
    if not seeds_given:
        rounds = math.floor(available / run)
        fitting = [n for n in DEFAULT.looks if math.ceil(plan.runs(n) / plan.workers) <= rounds]
        seeds = str(Design(tuple(fitting) or (first,)))
    return Budget(budget, changes, seeds, run, reserve)


def _work(facts: Found, changes: Changes) -> float:
    """The work of a step, up to a constant factor, as a function of image size and width."""
    size, width = changes.get("data.size", facts.size), changes.get("model.width", facts.width)
    return (size * width) ** 2


def _rungs(base: Recipe, facts: Found, given: Collection[str]) -> Iterator[dict[str, Any]]:
    """Changes that make a recipe cheaper and cheaper, starting with no change."""
    changes: dict[str, Any] = {}
    yield changes
    if facts.scan is not None and "data.size" not in given:
        for size in (size for size in SIZES if size < facts.size):
            changes = {"data.size": size}
            yield changes
    if "model.width" not in given and not base.model.name.startswith("timm:"):
        width = facts.width // 2
        while width >= LEAST_WIDTH:
            yield {**changes, "model.width": width}
            width //= 2


def _too_short(
    plan: Plan, clock: Clock, changes: Changes, units: int, budget: float, spent: float
) -> ValueError:
    run = clock.run_seconds(plan, changes)
    needed = plan.seconds(units, run) / SPARE + spent
    smallest = ", ".join(f"{key} {value}" for key, value in changes.items())
    limit = ""
    if plan.base.data.limit is None:
        limit = " To train on fewer images, use --data.limit."
    return ValueError(
        f"Expected --budget to be at least {duration(needed)} for {plan.runs(units)} runs, but got "
        f"{duration(budget)}: even with {smallest}, a run takes {duration(run)}. Fewer arms need "
        f"less time (--arms baseline,pgt).{limit}"
    )
