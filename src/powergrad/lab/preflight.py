"""Before and at the first run: the data, the disk space, and the time that a study takes.

:func:`check_recipe` finds errors that would make every run fail. A :class:`Plan` counts the runs of
a study. Its time is estimated from the first real runs in the real workers. :func:`fit_budget`
chooses image size, width, epochs and seeds so that a study fits a given time, from a few steps that
the workers time.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from powergrad.lab.data import load_data
from powergrad.lab.data.scan import Scan, scan_folder
from powergrad.lab.files import write_json
from powergrad.lab.runs import Changes, Job, RecipeProgram
from powergrad.lab.runs.pool import Pool, Snapshot
from powergrad.lab.stats import DEFAULT, LEAST, Design, parse_runs
from powergrad.lab.study import Study
from powergrad.lab.study.execute import Watching
from powergrad.lab.study.tuning import Tuner
from powergrad.lab.trainer.networks import create_model
from powergrad.lab.trainer.recipe import Recipe
from powergrad.lab.trainer.timing import Timing, measure
from powergrad.lab.words import bytes_in_words, duration, parse_duration, slug, spans

SIZES = (192, 128, 96, 64, 48, 32)  # pixels that a budget may choose, if the recipe has more
LEAST_WIDTH = 8
LEAST_EPOCHS = 3
SPARE = 0.9  # the share of the remaining time that is planned, as step times vary
LOGITS = 5_000_000  # a run stores its test logits up to this number
LONG = 600.0  # above this many seconds, the user is asked
FILE = "budget.json"  # in the folder of a study: the choices for its budget


class Declined(Exception):  # noqa: N818 (it is not an error)
    """The user was asked and declined to go on."""


def say(text: str) -> None:
    """Print a message that is not a result."""
    print(text, file=sys.stderr, flush=True)


# Data and network ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """The data and the network of a recipe."""

    scan: Scan | None  # of a folder of images
    train: int  # images
    test: int
    classes: int
    size: int  # the side of a training image in pixels
    parameters: int
    width: int  # channels of the network's first layer

    def run_bytes(self, recipe: Recipe) -> int:
        """The approximate number of bytes of a run: checkpoints, weights, test outputs, norms."""
        train, machine = recipe.train, recipe.machine
        copies = 2 if recipe.optimizer.name == "sgd" else 3  # the weights and the optimizer state
        copies += train.ema is not None
        weights = 2 * copies + 1 + machine.keep_best  # two checkpoints; the final and best weights
        norms = 0
        if recipe.monitor.every:
            records = train.epochs * (self.train // train.batch_size) // recipe.monitor.every + 1
            norms = records * 4 * math.isqrt(self.parameters)
        width = 8 if train.precision == "float64" else 4
        outputs = self.test * (self.classes + 2) if self.test * self.classes <= LOGITS else 0
        return width * (weights * self.parameters + outputs + norms) + 100_000


def check_recipe(recipe: Recipe, arms: Iterable[Recipe] = ()) -> Found:
    """Check a recipe for errors that would make every run fail, and print what was found.

    Raises FileNotFoundError if the data are missing, and ValueError if the network is unknown or
    does not fit the data, or if the data cannot be used; arms may have other networks.
    """
    machine, scan = recipe.machine, None
    if recipe.data.name.startswith("folder:"):
        scan = scan_folder(recipe.data, machine.data_dir, progress=_Scanning())
        summary = scan.summary()
        say("\n  ".join([f"{scan.root}: {summary[0]}", *summary[1:]]))
        for warning in scan.warnings:
            say(f"Warning: {warning}")
        if scan.problems:
            raise ValueError("\n".join(scan.problems))
    data = load_data(recipe.data, data_dir=machine.data_dir)
    data.train.steps(recipe.train.batch_size)  # raises if the batch is larger than the data
    models = {}
    for model in dict.fromkeys(variant.model for variant in (recipe, *arms)):
        with torch.device("meta"):
            models[model] = create_model(**model.arguments(data))
    tensors = list(models[recipe.model].parameters())
    counts = len(data.train), len(data.test), len(data.classes), data.size
    return Found(scan, *counts, sum(t.numel() for t in tensors), tensors[0].shape[0])


class _Scanning:
    """Shows the progress of a scan that takes longer than a moment."""

    def __init__(self) -> None:
        self.shown = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        is_terminal = sys.stderr.isatty()
        if time.monotonic() - self.shown > (0.5 if is_terminal else 10):
            self.shown = time.monotonic()
            end = "\r" if is_terminal else "\n"
            print(f"checking images: {done:,} of {total:,}", end=end, file=sys.stderr, flush=True)


def check_disk(folder: Path, needed: int, runs: int) -> None:
    """Check that there is enough disk space for the runs."""
    path = folder.absolute()
    place = next(place for place in (path, *path.parents) if place.exists())
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
    """The runs of a study."""

    arms: int
    design: Design  # the numbers of units per arm (seeds or repeats) at which results are tested
    workers: int = 1
    extra: int = 0  # runs before the first unit, for all arms: those of a single tuning
    per_unit: int = 1  # runs per arm and unit: one, or those of a repeat with its tuning
    done: int = 0  # runs that are already finished

    @classmethod
    def of(cls, study: Study, tuner: Tuner | None, workers: int, done: int = 0) -> Plan:
        arms, trials = len(study.arms), len(tuner.jobs(0)) if tuner else 0
        extra, per_unit = (0, study.finals + trials // arms) if study.finals else (trials, 1)
        return cls(arms, study.design, workers, extra, per_unit, done)

    def runs(self, units: int) -> int:
        """The number of remaining runs until every arm has `units` units."""
        return max(0, self.extra + units * self.per_unit * self.arms - self.done)

    def seconds(self, units: int, run: float) -> float:
        """The time of these runs in seconds, if one takes `run` seconds."""
        return math.ceil(self.runs(units) / self.workers) * run

    def describe(self) -> str:
        """The number of runs until the first and until the last look."""
        counts = dict.fromkeys(self.runs(n) for n in (self.design.looks[0], self.design.last))
        return "1 run" if list(counts) == [1] else f"{' to '.join(map(str, counts))} runs"

    def announce(self, run: float) -> str:
        """A sentence with the number of runs and their expected time."""
        looks = (self.design.looks[0], self.design.last)
        times = " to ".join(dict.fromkeys(duration(self.seconds(n, run)) for n in looks))
        how = f"{self.workers} at a time; Ctrl-C stops and saves."
        return f"{self.describe()}, about {times} with {how}"


def announcing(watching: Watching, plan: Plan, *, ask: bool) -> Watching:
    """A progress display that announces the time of a study when its first run shows it."""
    is_announced = plan.runs(plan.design.last) == 0

    def announce(snapshot: Snapshot, before: Mapping[str, float]) -> None:
        nonlocal is_announced
        new = [snapshot.results[name] for name in snapshot.results if before[name] < 1]
        share = max((done - before[name] for name, done in snapshot.done.items()), default=0.0)
        if not new and (share <= 0 or snapshot.seconds <= 30):
            return
        seconds = snapshot.seconds
        run = new[0].metrics.get("seconds", seconds) if new else seconds / share
        is_announced = True
        say(plan.announce(run))
        if plan.seconds(plan.design.looks[0], run) > LONG:
            say("--budget 10m chooses a shorter training; fewer arms or --data.limit help, too.")
            if ask and sys.stdin.isatty() and sys.stderr.isatty():
                print("Continue? [y/N] ", end="", file=sys.stderr, flush=True)
                if sys.stdin.readline().strip().lower() not in ("y", "yes"):
                    raise Declined

    @contextlib.contextmanager
    def start(
        title: str, jobs: Mapping[tuple[str, int], Job], metric: str
    ) -> Iterator[Callable[[Snapshot], None]]:
        before: dict[str, float] = {}
        with watching(title, jobs, metric) as watch:

            def show(snapshot: Snapshot) -> None:
                watch(snapshot)
                if not before:
                    before.update(snapshot.done)
                if not is_announced:
                    announce(snapshot, before)

            yield show

    return start


def count_reused(study: Study, folder: Path, tuner: Tuner | None, known: Collection[str]) -> int:
    """Print which finished runs are reused; return their number."""
    trials = 0
    if tuner is None:
        jobs = study.jobs().items()
        finished = [key for key, job in jobs if job.name in known or job.result(folder)]
    else:  # the chosen values, and so the names of the runs, are not known yet
        paths = [*folder.glob("*/result.json"), *folder.glob("*/*/result.json")]
        names = {*known, *(str(path.parent.relative_to(folder)) for path in paths)}
        trials = sum(name.startswith("tuning/") for name in names)
        by_slug = {slug(arm)[:40]: arm for arm in study.arms}
        split = (name.removeprefix("arms/").rpartition("-seed") for name in names)
        seeds = [(by_slug.get(arm), rest.partition("-")[0]) for arm, _, rest in split]
        finished = [(arm, int(seed)) for arm, seed in seeds if arm and seed.isdigit()]
    by_arm = {arm: [seed for name, seed in finished if name == arm] for arm in study.arms}
    parts = [f"{arm} seeds {spans(seeds)}" for arm, seeds in by_arm.items() if seeds]
    parts += [f"{trials} tuning runs"] if trials else []
    if count := len(finished) + trials:
        runs = "1 finished run" if count == 1 else f"{count} finished runs"
        remedy = " (To start over, use --fresh.)" if folder.is_dir() else ""
        where = f" in {folder}" if not known else ""
        say(f"Reusing {runs}{where}: {'; '.join(parts)}.{remedy}")
    return count


# Fitting a study to a time budget -----------------------------------------------------------------


@dataclass(frozen=True)
class Budget:
    """The settings that were chosen so that a study fits a given time."""

    seconds: float  # the given time
    changes: dict[str, Any] = field(default_factory=dict)  # of the recipe
    seeds: str = ""  # the value of --seeds; empty if the seeds were given
    run_seconds: float = 0.0
    reserve: float = 0.0  # the part of the time that is not for runs, but for starting and the page

    @property
    def options(self) -> str:
        """The choice as command-line options."""
        options = [f"--{key} {value}" for key, value in self.changes.items()]
        options += [f"--seeds {self.seeds}"] if self.seeds else []
        return " ".join(options) or "the recipe unchanged"


class Clock:
    """Measures the time of a run in all workers at once, once for recipes with equal steps."""

    def __init__(self, pool: Pool, base: Recipe, arms: Iterable[Changes]) -> None:
        self.pool, self.base, self.arms = pool, base, list(arms)
        self.known: dict[str, Timing] = {}
        self.boot = 0.0  # seconds until the workers were ready

    def run_seconds(self, changes: Changes) -> float:
        """The mean time of a run over the arms, with `changes` applied to the recipe."""
        recipes = [self.base.override({**changes, **arm}) for arm in self.arms]
        return statistics.fmean(self._timing(recipe).seconds(recipe) for recipe in recipes)

    def _timing(self, recipe: Recipe) -> Timing:
        sections = recipe.model_dump(mode="json", include={"data", "model", "clip", "train"})
        del sections["train"]["epochs"], sections["train"]["test_every"]
        key = json.dumps([sections, recipe.optimizer.name, recipe.monitor.every])
        if key not in self.known:
            began = time.monotonic()
            jobs = [TimingJob(f"timing-{place}", recipe) for place in range(self.pool.workers)]
            timings = list(self.pool.run(jobs).values())
            self.boot = self.boot or time.monotonic() - began - max(t.took for t in timings)
            self.known[key] = Timing.mean(timings)
        return self.known[key]


@dataclass(frozen=True)
class TimingJob:
    """Times some steps of a recipe in a worker of the pool."""

    name: str
    recipe: Recipe
    is_foreign: bool = False

    def execute(self, folder: Path) -> Timing:
        return measure(self.recipe)

    def result(self, folder: Path) -> None:
        """It is never finished before."""

    def progress(self, folder: Path) -> float:
        return 0.0


def choose_budget(
    study: Study, plan: Plan, facts: Found, pool: Pool, text: str, began: float, **given: Any
) -> tuple[Study, Budget]:
    """The study with settings that fit a budget; a second start uses the choice of the first."""
    assert isinstance(study.program, RecipeProgram)
    seconds, path, chosen = parse_budget(text), pool.folder / FILE, None
    with contextlib.suppress(OSError, TypeError, ValueError):
        chosen = Budget(**json.loads(path.read_text()))
    if chosen is not None and chosen.seconds == seconds:
        say(f"--budget {duration(seconds)}: as before, {chosen.options}.")
    else:
        clock = Clock(pool, study.base, study.arms.values())
        left = began + seconds - time.monotonic()
        fresh = replace(plan, done=0)  # no run can be reused with other settings
        chosen = fit_budget(fresh, study.base, facts, clock, budget=seconds, left=left, **given)
        if chosen.seeds:
            fresh = replace(fresh, design=Design(parse_runs(chosen.seeds)))
        say(
            f"--budget {duration(seconds)} chose {chosen.options}: {fresh.describe()} of about "
            f"{duration(chosen.run_seconds)}, {plan.workers} at a time."
        )
        pool.folder.mkdir(parents=True, exist_ok=True)
        write_json(path, vars(chosen))
    pool.deadline = began + seconds - chosen.reserve / 2
    pool.run_seconds = chosen.run_seconds
    design = Design(parse_runs(chosen.seeds)) if chosen.seeds else study.design
    program = RecipeProgram.of(study.base.override(chosen.changes))
    return replace(study, program=program, design=design), chosen


def parse_budget(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise ValueError(f"--budget: {error}") from None


def fit_budget(
    plan: Plan,
    base: Recipe,
    facts: Found,
    clock: Clock,
    *,
    budget: float,
    left: float,
    given: Collection[str] = (),
    seeds_given: bool = False,
) -> Budget:
    """Choose image size, width, epochs and seeds so that a study fits `left` of `budget` seconds.

    The first look must fit. The recipe is changed as little as possible, in this order: fewer seeds
    (at least 8), fewer epochs (at least half), smaller images, a narrower network, still fewer
    epochs, and finally 6 seeds. Remaining time is used for more seeds, up to 24. Every candidate is
    measured. Keys in `given`, and seeds if `seeds_given`, do not change.
    """
    first = plan.design.looks[0] if seeds_given else DEFAULT.looks[0]
    most = base.train.epochs
    least = min(most, max(LEAST_EPOCHS, math.floor(base.schedule.warmup_epochs) + 1))
    if "train.epochs" in given:
        least = most
    clock.run_seconds({})
    reserve = 5 + 3 * clock.boot  # imports of this process and the workers, the page
    available = SPARE * (left - reserve)

    def epochs_that_fit(changes: Changes, units: int) -> int:
        one, two = (clock.run_seconds({**changes, "train.epochs": n}) for n in (most, least))
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
        run = clock.run_seconds({**changes, "train.epochs": enough})
        share = available / plan.seconds(first, run)
    if chosen is None and not seeds_given and (epochs := epochs_that_fit(rungs[-1], LEAST)):
        chosen = rungs[-1], epochs, LEAST
    if chosen is None:
        smallest = {**rungs[-1], "train.epochs": least}
        run = clock.run_seconds(smallest)
        needed = plan.seconds(first, run) / SPARE + budget - left + reserve
        limit = "" if base.data.limit else " To train on fewer images, use --data.limit."
        settings = ", ".join(f"{key} {value}" for key, value in smallest.items())
        raise ValueError(
            f"Expected --budget to be at least {duration(needed)} for {plan.runs(first)} runs, but "
            f"got {duration(budget)}: even with {settings}, a run takes {duration(run)}. Fewer "
            f"arms need less time (--arms baseline,pgt).{limit}"
        )
    changes, epochs, first = chosen
    if epochs < most:
        changes = {**changes, "train.epochs": epochs}
    run = clock.run_seconds(changes)
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
    sizes = SIZES if facts.scan is not None and "data.size" not in given else ()
    by_size = [{}, *({"data.size": size} for size in sizes if size < facts.size)]
    yield from by_size
    width = facts.width // 2
    if "model.width" not in given and not base.model.name.startswith("timm:"):
        while width >= LEAST_WIDTH:
            yield {**by_size[-1], "model.width": width}
            width //= 2
