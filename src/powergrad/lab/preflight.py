"""Before the first run: the data, the network, the number of runs, and a budget of time.

:func:`check_recipe` finds errors that would make every run fail. A :class:`Plan` counts the runs of
a study; while they run, the display shows the time left. :func:`fit_budget`
chooses image size, width, epochs and seeds so that a study fits a given time, from a few steps that
the workers time.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import math
import statistics
import sys
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from powergrad.lab.data import load_data
from powergrad.lab.files import write_json
from powergrad.lab.runs import Changes, RecipeProgram
from powergrad.lab.runs.pool import Pool
from powergrad.lab.stats import DEFAULT, LEAST, Design, parse_runs
from powergrad.lab.study import Study
from powergrad.lab.study.tuning import Tuner
from powergrad.lab.trainer.recipe import Recipe
from powergrad.lab.words import duration, parse_duration

if TYPE_CHECKING:
    from powergrad.lab.trainer.session import Session

SIZES = (192, 128, 96, 64, 48, 32)  # pixels that a budget may choose, if the recipe has more
LEAST_WIDTH = 8
LEAST_EPOCHS = 3
SPARE = 0.9  # the share of the remaining time that is planned, as step times vary
RESERVE = 10.0  # seconds at the end, for the last results and the page
STEPS = 12  # timed steps, after the first
PATIENCE = 1.0  # after this many seconds, three steps are enough
SLOW = 3.0  # after this many seconds, one step is enough
FILES = 0.2  # seconds that a run takes to write its files
FILE = "budget.json"  # in the folder of a study: the choices for its budget


def say(text: str) -> None:
    """Print a message that is not a result."""
    print(text, file=sys.stderr, flush=True)


# Data and network ---------------------------------------------------------------------------------


class Found(NamedTuple):
    """The data and the network of a recipe."""

    size: int  # the side of a training image in pixels
    width: int  # channels of the network's first layer


def check_recipe(recipe: Recipe, arms: Iterable[Recipe] = ()) -> Found:
    """Check a recipe for errors that would make every run fail, and print what was found."""
    data_dir = recipe.machine.data_dir
    if recipe.data.is_folder:
        from powergrad.lab.data.scan import scan_folder  # imports torch, which is slow

        scan = scan_folder(recipe.data, data_dir)
        say("\n  ".join(scan.summary))
        for warning in scan.warnings:
            say(f"Warning: {warning}")
        if scan.problems:
            raise ValueError("\n".join(scan.problems))
    data = load_data(recipe.data, data_dir=data_dir)
    data.train.steps(recipe.train.batch_size)  # raises if the batch is larger than the data
    import torch  # slow to import

    from powergrad.lab.trainer.networks import create_model

    models = dict.fromkeys(variant.model for variant in (recipe, *arms))
    with torch.device("meta"):
        networks = [create_model(**model.arguments(data)) for model in models]
    first_layer = next(networks[0].parameters())
    return Found(data.size, first_layer.shape[0])


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

    def announce(self, run: float | None = None) -> str:
        """A sentence with the number of runs and, if the time of one is known, their time."""
        looks, about = (self.design.looks[0], self.design.last), ""
        if run is not None:
            times = dict.fromkeys(duration(self.seconds(n, run)) for n in looks)
            about = f", about {' to '.join(times)}"
        return f"{self.describe()}{about}, {self.workers} at a time; Ctrl-C stops and saves."


def count_reused(study: Study, folder: Path, tuner: Tuner | None, known: Collection[str]) -> int:
    """Print how many finished runs are reused; return their number."""
    if tuner is None:
        jobs = study.jobs().values()
        count = sum(job.name in known or job.result(folder) is not None for job in jobs)
    else:  # the chosen values, and so the names of the runs, are not known yet
        count = len([*folder.glob("*/result.json"), *folder.glob("*/*/result.json")])
    if count:
        runs = "1 finished run" if count == 1 else f"{count} finished runs"
        say(f"Reusing {runs}. (To start over, use --fresh.)")
    return count


# Fitting a study to a time budget -----------------------------------------------------------------


@dataclass(frozen=True)
class Budget:
    """The settings that were chosen so that a study fits a given time."""

    seconds: float  # the given time
    changes: Changes = field(default_factory=dict)  # of the recipe
    seeds: str = ""  # the value of --seeds; empty if the seeds were given
    run_seconds: float = 0.0

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
        self.known: dict[str, list[Timing]] = {}

    def run_seconds(self, changes: Changes) -> float:
        """The mean time of a run over the arms, with `changes` applied to the recipe."""
        recipes = [self.base.override({**changes, **arm}) for arm in self.arms]
        times = [t.seconds(recipe) for recipe in recipes for t in self._timings(recipe)]
        return statistics.fmean(times)

    def _timings(self, recipe: Recipe) -> list[Timing]:
        sections = recipe.model_dump(mode="json", include={"data", "model", "clip", "train"})
        del sections["train"]["epochs"], sections["train"]["test_every"]
        key = json.dumps([sections, recipe.optimizer.name, recipe.monitor.every])
        if key not in self.known:
            jobs = [TimingJob(f"timing-{place}", recipe) for place in range(self.pool.workers)]
            self.known[key] = list(self.pool.run(jobs).values())
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
    seconds, path, chosen = parse_duration(text), pool.folder / FILE, None
    deadline = began + seconds - RESERVE
    with contextlib.suppress(OSError, TypeError, ValueError):
        chosen = Budget(**json.loads(path.read_text()))
    if chosen is not None and chosen.seconds == seconds:
        say(f"--budget {duration(seconds)}: as before, {chosen.options}.")
    else:
        clock = Clock(pool, study.base, study.arms.values())
        fresh = replace(plan, done=0)  # no run can be reused with other settings
        options = {"budget": seconds, "deadline": deadline, **given}
        chosen = fit_budget(fresh, study.base, facts, clock, **options)
        if chosen.seeds:
            fresh = replace(fresh, design=Design(parse_runs(chosen.seeds)))
        say(
            f"--budget {duration(seconds)} chose {chosen.options}: {fresh.describe()} of about "
            f"{duration(chosen.run_seconds)}, {plan.workers} at a time."
        )
        pool.folder.mkdir(parents=True, exist_ok=True)
        write_json(path, vars(chosen))
    pool.deadline, pool.run_seconds = deadline, chosen.run_seconds
    design = Design(parse_runs(chosen.seeds)) if chosen.seeds else study.design
    program = RecipeProgram.of(study.base.override(chosen.changes))
    return replace(study, program=program, design=design), chosen


def fit_budget(
    plan: Plan,
    base: Recipe,
    facts: Found,
    clock: Clock,
    *,
    budget: float,
    deadline: float,
    given: Collection[str] = (),
    seeds_given: bool = False,
) -> Budget:
    """Choose image size, width, epochs and seeds so that a study ends before the deadline.

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
    rungs = _rungs(base, facts, given)

    def available() -> float:
        return SPARE * (deadline - time.monotonic())

    def epochs_that_fit(changes: Changes, units: int) -> int:
        one, two = (clock.run_seconds({**changes, "train.epochs": n}) for n in (most, least))
        slope = (one - two) / (most - least) if most > least else 0.0
        room = available() / max(1, math.ceil(plan.runs(units) / plan.workers))
        if room >= one:
            return most
        return least + math.floor((room - two) / slope) if slope and room >= two else 0

    enough = max(least, math.ceil(most / 2))
    place = bisect.bisect_left(
        rungs, True, hi=len(rungs) - 1, key=lambda rung: epochs_that_fit(rung, first) >= enough
    )
    changes, epochs = rungs[place], epochs_that_fit(rungs[place], first)
    if not epochs and not seeds_given:
        first, epochs = LEAST, epochs_that_fit(changes, LEAST)
    if not epochs:
        smallest = {**changes, "train.epochs": least}
        run = clock.run_seconds(smallest)
        needed = budget + (plan.seconds(first, run) - available()) / SPARE
        limit = "" if base.data.limit else " To train on fewer images, use --data.limit."
        settings = ", ".join(f"{key} {value}" for key, value in smallest.items())
        raise ValueError(
            f"Expected --budget to be at least {duration(needed)} for {plan.runs(first)} runs, but "
            f"got {duration(budget)}: even with {settings}, a run takes {duration(run)}. Fewer "
            f"arms need less time (--arms baseline,pgt).{limit}"
        )
    if epochs < most:
        changes = {**changes, "train.epochs": epochs}
    run = clock.run_seconds(changes)
    seeds = ""
    if not seeds_given:
        rounds = math.floor(available() / run)
        fitting = [n for n in DEFAULT.looks if math.ceil(plan.runs(n) / plan.workers) <= rounds]
        seeds = str(Design(tuple(fitting) or (first,)))
    return Budget(budget, changes, seeds, run)


def _rungs(base: Recipe, facts: Found, given: Collection[str]) -> list[Changes]:
    """Changes that make a recipe cheaper and cheaper, starting with no change."""
    sizes = SIZES if base.data.is_folder and "data.size" not in given else ()
    rungs: list[Changes] = [{}, *({"data.size": size} for size in sizes if size < facts.size)]
    smallest, width = rungs[-1], facts.width // 2
    if "model.width" not in given and not base.model.name.startswith("timm:"):
        while width >= LEAST_WIDTH:
            rungs.append({**smallest, "model.width": width})
            width //= 2
    return rungs


# The time of a run, from a few real steps ---------------------------------------------------------


class Timing(NamedTuple):
    """The times of the parts of a run, in seconds."""

    start: float  # loading the data and creating the network
    step: float  # one training step, the median of several
    test: float
    steps: int  # training steps per epoch

    def seconds(self, recipe: Recipe) -> float:
        """The time of a run of `recipe`, whose steps must cost the same as the timed ones."""
        options = recipe.train
        tests = math.ceil(options.epochs / options.test_every)
        return FILES + self.start + options.epochs * self.steps * self.step + tests * self.test


def measure(recipe: Recipe) -> Timing:
    """Time the parts of a run in this process."""
    import torch

    from powergrad.lab.trainer.processes import join_processes
    from powergrad.lab.trainer.session import Session

    if recipe.machine.threads is not None:
        torch.set_num_threads(recipe.machine.threads)
    recipe = recipe.override({"train.compile": False})
    with join_processes(recipe.machine.device) as processes:
        recipe.load_data()  # imports libraries, which a worker does once, not for every run
        began = time.perf_counter()
        session = Session(recipe, recipe.load_data(), processes)
        start = time.perf_counter() - began
        step, test = _median_step(session), _test_seconds(session)
        return Timing(start, step, test, session.steps_per_epoch)


def _median_step(session: Session) -> float:
    """The median time of a step, without the first, which allocates memory, unless it is slow."""
    times: list[float] = []
    began = last = time.perf_counter()
    while not session.done and len(times) <= STEPS:
        for loss in session.run_epoch():
            loss.item()  # waits for the GPU
            now = time.perf_counter()
            times.append(now - last)
            last = now
            if len(times) > STEPS or now - began > (PATIENCE if len(times) > 3 else SLOW):
                return statistics.median(times[1:] or times)
    return statistics.median(times[1:] or times)


def _test_seconds(session: Session) -> float:
    """The time of a test of all images, extrapolated from its first batch, and of the census."""
    import torch

    from powergrad import census

    options, model, split = session.recipe.train, session.tested.eval(), session.data.test
    began = time.perf_counter()
    (images, _), index = next(split.test_batches(options.test_batch_size or options.batch_size))
    with torch.no_grad(), session.autocast:
        model(images.to(session.processes.device, session.dtype)).sum().item()
    batch = time.perf_counter() - began
    began = time.perf_counter()
    census(model, initial=session.initial)
    return batch * len(split) / len(index) + time.perf_counter() - began
