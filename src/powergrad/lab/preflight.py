"""What is known before the first run: the data, the time and the disk space that runs need.

:func:`check_recipe` finds what would make every run fail. A :class:`Plan` counts the runs of a
study; with the measured times of its recipes it says how long the study takes, and
:func:`fit_budget` chooses image size, width, epochs and seeds so that it fits a given time.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from powergrad.lab.config import Recipe
from powergrad.lab.data import load_data
from powergrad.lab.data.scan import Progress, Scan, scan_folder
from powergrad.lab.jobs import Changes
from powergrad.lab.models import create_model
from powergrad.lab.stats import DEFAULT, LEAST, Design
from powergrad.lab.timing import Timing
from powergrad.lab.words import bytes_in_words, duration

__all__ = ["Budget", "Found", "Plan", "check_disk", "check_recipe", "fit_budget"]

SHORT_WORK = 5e10  # parameters x pixels x images x epochs: about ten seconds of one core
SIZES = (192, 128, 96, 64, 48, 32)  # pixels that a budget may choose, if the recipe has more
LEAST_WIDTH = 8
LEAST_EPOCHS = 3
SPARE = 0.9  # of the time that is left is planned: a measured step is not every step
LOGITS = 5_000_000  # a run keeps up to so many


# What a run would find ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """What a recipe's data and network are.

    Attributes:
        scan: What the folder of images holds; None for other data.
        train: Images to train on.
        test: Images to test on.
        classes: How many classes.
        size: Side of an image, as it is trained on.
        parameters: Of the network.
        width: Channels of the network's first layer.
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
        """About how many bytes a run writes: checkpoints, weights, test outputs, norms."""
        train, machine = recipe.train, recipe.machine
        copies = 2 if recipe.optimizer.name == "sgd" else 3  # the weights, and the optimizer's
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
    """Look for everything that would make a run fail: data that are missing, a wrong name.

    Args:
        recipe: What every run does.
        arms: Recipes of arms, which may have other networks.
        progress: Of the scan of a folder; see :func:`powergrad.lab.data.scan.scan_folder`.

    Raises:
        FileNotFoundError: If the data are missing.
        ValueError: If the network is not known or does not fit the data, or options of the data do
            not fit. Problems of a folder of images are in the scan, so that all can be shown.
    """
    machine, scan = recipe.machine, None
    if recipe.data.name.startswith("folder:"):
        scan = scan_folder(recipe.data, machine.data_dir, progress=progress)
        if scan.problems:
            return Found(scan, scan.train, scan.test, len(scan.classes), 0, 0, 0)
    data = load_data(recipe.data, data_dir=machine.data_dir)
    data.train.steps(recipe.train.batch_size)  # raises where the batch is larger than the data
    models = {}
    for model in dict.fromkeys(each.model for each in (recipe, *arms)):
        options = model.model_dump(exclude={"head_scale"})
        options |= {"num_classes": len(data.classes), "in_channels": data.channels}
        try:
            with torch.device("meta"):
                models[model] = create_model(**options)
        except ValueError as error:  # which names the argument, not the key
            raise ValueError(
                re.sub(r"^Expected `(\w+)`", r"Expected `model.\1`", str(error))
            ) from None
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
    """Check that there is room for what runs will write.

    Raises:
        ValueError: If there is not.
    """
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ValueError(
            f"Expected room for {runs} runs in {str(folder)!r}, about {bytes_in_words(needed)}, "
            f"but got {bytes_in_words(free)} free on the disk of {str(place)!r}; --out names "
            "another place."
        )


# How long a study takes ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The runs of a study.

    Attributes:
        base: The recipe.
        arms: What each arm changes.
        design: At how many units per arm the results are looked at.
        workers: Runs at a time.
        extra: Runs before the first unit, of all arms together: those of a single tuning.
        per_unit: Runs per arm and unit: one, or those of a repeat and its tuning.
        done: Runs that are finished already.
    """

    base: Recipe
    arms: Mapping[str, Changes]
    design: Design
    workers: int = 1
    extra: int = 0
    per_unit: int = 1
    done: int = 0

    def runs(self, units: int) -> int:
        """Runs that are left until every arm has so many units."""
        return max(0, self.extra + units * self.per_unit * len(self.arms) - self.done)

    @property
    def fewest(self) -> int:
        """Runs until the first look."""
        return self.runs(self.design.looks[0])

    @property
    def most(self) -> int:
        """Runs until the last look."""
        return self.runs(self.design.last)

    def seconds(self, units: int, run: float) -> float:
        """How long the runs take, if one takes `run` seconds."""
        return math.ceil(self.runs(units) / self.workers) * run

    def recipes(self, changes: Changes) -> Iterator[Recipe]:
        """The recipe of every arm, with `changes` of the base."""
        for arm in self.arms.values():
            yield self.base.override({**changes, **arm})


class Clock:
    """The measured time of recipes; those whose steps cost the same are measured once.

    Args:
        time: Measures a recipe.
    """

    def __init__(self, time: Callable[[Recipe], Timing]) -> None:
        self.time = time
        self.known: dict[str, Timing] = {}

    def run_seconds(self, plan: Plan, changes: Changes) -> float:
        """The mean time of a run over the arms of a plan, with `changes` of its base."""
        times = [self._timing(recipe).seconds(recipe) for recipe in plan.recipes(changes)]
        return sum(times) / len(times)

    def _timing(self, recipe: Recipe) -> Timing:
        sections = recipe.model_dump(mode="json", include={"data", "model", "clip", "train"})
        del sections["train"]["epochs"], sections["train"]["test_every"]
        key = json.dumps([sections, recipe.optimizer.name, recipe.monitor.every])
        if key not in self.known:
            self.known[key] = self.time(recipe)
        return self.known[key]


# What fits a budget -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Budget:
    """What was chosen so that a study fits a given time.

    Attributes:
        seconds: The time.
        changes: What is changed in the recipe.
        seeds: The design, as ``--seeds`` takes it; empty if it was not to be chosen.
        run_seconds: How long a run takes.
        reserve: Seconds of it that are not for runs: for starting, and for the page.
    """

    seconds: float
    changes: dict[str, Any] = field(default_factory=dict)
    seeds: str = ""
    run_seconds: float = 0.0
    reserve: float = 0.0

    @property
    def options(self) -> str:
        """The choice as options of a command; empty if the recipe stays as it is."""
        words = [f"--{key} {value}" for key, value in self.changes.items()]
        return " ".join([*words, f"--seeds {self.seeds}"] if self.seeds else words)


def fit_budget(
    plan: Plan,
    found: Found,
    clock: Clock,
    *,
    budget: float,
    left: float,
    reserve: float = 0.0,
    given: Collection[str] = (),
    seeds_given: bool = False,
) -> Budget:
    """Choose image size, width, epochs and seeds so that a study fits `budget`.

    The first look must fit. The recipe is kept as far as possible: first it is given fewer seeds,
    at least 8, then fewer epochs, at least half, then smaller images, a narrower network, still
    fewer epochs, and at last 6 seeds. What is left over goes to more seeds, up to 24. Every
    candidate is measured.

    Args:
        plan: The study. Its design is that of `seeds_given`, or else not used.
        found: What its data are.
        clock: Measures.
        budget: The time that was asked for, in seconds.
        left: What is left of it.
        reserve: What of that is not for runs.
        given: Keys of the recipe that must stay as they are.
        seeds_given: Whether the design must stay as it is.

    Raises:
        ValueError: If nothing fits.
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
    rungs = list(_rungs(base, found, given))
    share = math.inf  # of the last measured time that would fit
    measured: Changes = {}
    for changes in rungs:
        if changes is not rungs[-1] and _work(found, changes) > share * _work(found, measured):
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


def _work(found: Found, changes: Changes) -> float:
    """The work of a step, up to a factor, as far as a smaller image or width can reduce it."""
    size, width = changes.get("data.size", found.size), changes.get("model.width", found.width)
    return (size * width) ** 2


def _rungs(base: Recipe, found: Found, given: Collection[str]) -> Iterator[dict[str, Any]]:
    """Ever cheaper changes of a recipe, the first of which is none."""
    changes: dict[str, Any] = {}
    yield changes
    if found.scan is not None and "data.size" not in given:
        for size in (size for size in SIZES if size < found.size):
            changes = {"data.size": size}
            yield changes
    if "model.width" not in given and not base.model.name.startswith("timm:"):
        width = found.width // 2
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
        limit = " --data.limit trains on fewer images."
    return ValueError(
        f"Expected --budget to be at least {duration(needed)} for {plan.runs(units)} runs, but got "
        f"{duration(budget)}: even with {smallest} a run takes {duration(run)}. Fewer arms need "
        f"less time (--arms baseline,pgt).{limit}"
    )
