"""Before the first run: the data, the network, the number of runs, and a budget of time.

:func:`check_recipe` finds errors that would make every run fail. A :class:`Plan` counts the runs of
a study; while they run, the display shows the time left. :class:`Fitting` chooses arms, epochs,
seeds, image size and width so that a study fits a given time and the baseline learns something.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from powergrad.lab.data import load_data
from powergrad.lab.data.listing import scan_folder
from powergrad.lab.files import write_json
from powergrad.lab.runs import Changes, RecipeProgram
from powergrad.lab.runs.pool import Pool
from powergrad.lab.stats import DEFAULT, LEAST, Design, parse_runs, smallest_difference
from powergrad.lab.study import Study
from powergrad.lab.study.tuning import Tuner
from powergrad.lab.trainer.recipe import Recipe
from powergrad.lab.words import duration

if TYPE_CHECKING:
    from powergrad.lab.trainer.session import Session

SIZES = (192, 128, 96, 64, 48, 32)  # pixels that a budget may choose, if the recipe has more
LEAST_WIDTH = 8
LEAST_STEPS = 100  # of a training that a budget chooses
LEAST_ARMS = 2
LEAST_BUDGET = 20.0  # seconds, which the start and the end of a study take
SPARE = 0.75  # the share of the remaining time that is planned, as step times vary
RESERVE = 10.0  # seconds at the end, for the last results and the page
TRY = 0.3  # the share of the budget in which the baseline must learn something
SURE = 0.001  # it has, if guessing were as good with less than this probability
STEPS = 8  # timed steps, after the first ones
PATIENCE = 0.7  # after this many seconds of timing, three steps are enough
FILES = 0.2  # seconds that a run takes to write its files
FILE = "budget.json"  # in the folder of a study: the choices for its budget


def say(text: str) -> None:
    """Print a message that is not a result."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def saying(text: str) -> Iterator[None]:
    """Print a message, and a dot for every further second and a half."""
    ended = threading.Event()

    def print_dots() -> None:
        while not ended.wait(1.5):
            print(".", end="", file=sys.stderr, flush=True)

    say(text)
    dots = threading.Thread(target=print_dots, daemon=True)
    dots.start()
    try:
        yield
    finally:
        ended.set()
        dots.join()


# Data and network ---------------------------------------------------------------------------------


class Found(NamedTuple):
    """The data and the network of a recipe."""

    size: int  # the side of a training image in pixels
    width: int  # channels of the network's first layer
    steps: int  # training steps per epoch
    tested: int  # test images


def check_recipe(recipe: Recipe, arms: Iterable[Recipe] = ()) -> Found:
    """Check a recipe for errors that would make every run fail, and print what was found.

    The networks are created without their weights.
    """
    place = recipe.machine.data_dir
    with saying("Checking the data and the network."):
        if recipe.data.is_folder:
            say("\n".join(scan_folder(recipe.data, place)))
        import torch  # slow to import

        from powergrad.lab.trainer.networks import create_model

        data = load_data(recipe.data, data_dir=place)
        steps = data.train.steps(recipe.train.batch_size)
        models = dict.fromkeys(variant.model for variant in (recipe, *arms))
        with torch.device("meta"):
            networks = [create_model(**model.arguments(data)) for model in models]
    first_layer = next(networks[0].parameters())
    return Found(data.size, first_layer.shape[0], steps, len(data.test))


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

    def announce(self, run: float | None = None) -> str:
        """The number of runs to the first and the last look, and perhaps their time."""
        looks, about = (self.design.looks[0], self.design.last), ""
        counts = dict.fromkeys(map(self.runs, looks))
        runs = "1 run" if list(counts) == [1] else f"{' to '.join(map(str, counts))} runs"
        if run is not None:
            times = dict.fromkeys(duration(self.seconds(n, run)) for n in looks)
            about = f", about {' to '.join(times)}"
        return f"{runs}{about}, {self.workers} at a time; Ctrl-C stops and saves."


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
    arms: list[str]  # those that are left
    changes: Changes = field(default_factory=dict)  # of the recipe
    seeds: str = ""  # the value of --seeds; empty if the seeds were given
    run_seconds: float = 0.0
    remark: str = ""  # what was given up, and what can still be seen


class Timing(NamedTuple):
    """The times of the parts of a run, in seconds."""

    start: float  # loading the data and creating the network
    step: float  # one training step, the median of several
    test: float
    steps: int  # training steps per epoch

    def run(self, epochs: int, test_every: int) -> float:
        tests = math.ceil(epochs / test_every)
        return FILES + self.start + epochs * self.steps * self.step + tests * self.test


class Learned(NamedTuple):
    """What the baseline learned in some steps, on held-out training images."""

    steps: int
    right: int
    images: int
    guessing: float  # the share that the most frequent class has

    @property
    def is_clear(self) -> bool:
        from scipy.stats import binom  # slow to import

        return bool(binom.sf(self.right - 1, self.images, self.guessing) < SURE)

    def __str__(self) -> str:
        return (
            f"the baseline is right about {100 * self.right / self.images:.0f}% of {self.images} "
            f"held-out training images after {self.steps} steps (guessing: "
            f"{100 * self.guessing:.0f}%)"
        )


@dataclass
class Fitting:
    """Chooses the settings of a study that must end before `deadline`.

    In this order, arms are left out (but not the first two), training is shortened, then the first
    look gets 6 seeds instead of 8, then images and network get smaller. The first look must fit,
    and a run keeps at least `floor` steps. Remaining time is used for more seeds, up to 24. Keys in
    `given`, arms if it has "arms", and seeds if it has "seeds", do not change.
    """

    study: Study
    plan: Plan
    seconds: float  # the budget
    deadline: float
    given: Collection[str]
    facts: Found
    floor: int = LEAST_STEPS
    known: dict[str, Timing] = field(default_factory=dict)

    def timing(self, changes: Changes) -> Timing:
        """The times of the baseline with `changes`, from a few real steps."""
        return measure(self.study.base.override(changes), self.facts.steps, self.facts.tested)

    def learn(self, changes: Changes) -> Learned:
        """Train the baseline with `changes` until it is clearly better than guessing."""
        until = time.monotonic() + TRY * (self.deadline - time.monotonic())
        return try_baseline(self.study.base.override(changes), until)

    def room(self, arms: int, units: int) -> float:
        """The seconds that a run may take."""
        runs = replace(self.plan, arms=arms, done=0).runs(units)
        available = SPARE * (self.deadline - time.monotonic())
        return available / max(1, math.ceil(runs / self.plan.workers))

    def least_epochs(self) -> int:
        """The smallest number of epochs with enough steps; not changed if it is given."""
        base = self.study.base
        least = math.floor(base.schedule.warmup_epochs) + 1
        enough = max(least, math.ceil(self.floor / self.facts.steps))
        return base.train.epochs if "train.epochs" in self.given else enough

    def cost(self, changes: Changes) -> float:
        """The seconds of a run."""
        train = self.study.base.override(changes).train
        key = json.dumps({**changes, "train.epochs": 0})
        if key not in self.known:
            self.known[key] = self.timing(changes)
        return self.known[key].run(train.epochs, train.test_every)

    def choose(self) -> tuple[Changes, int, int]:
        """The first choice that fits, or ValueError."""
        choices = list(self._choices())
        fitting = (c for c in choices if self.cost(c[0]) <= self.room(*c[1:]))
        if self.cost(choices[-1][0]) > self.room(*choices[-1][1:]):
            self._refuse(*choices[-1])
        return next(fitting, choices[-1])  # the last one, if the time has run on

    def _choices(self) -> Iterator[tuple[Changes, int, int]]:
        """The changes, the number of arms, and the seeds of the first look, the best first."""
        own, least = self.study.base.train.epochs, self.least_epochs()
        full, counts = max(own, least), [len(self.study.arms)]
        if "arms" not in self.given:
            counts = [*range(counts[0], LEAST_ARMS - 1, -1)] or counts
        firsts = [self.plan.design.looks[0], *([] if "seeds" in self.given else [LEAST])]
        pairs = [(full, count) for count in counts]
        pairs += [(epochs, counts[-1]) for epochs in range(full - 1, least - 1, -1)]
        for rung, first in itertools.product(self._rungs(), firsts):
            for epochs, count in pairs:
                changes = rung if epochs == own else {**rung, "train.epochs": epochs}
                yield changes, count, first

    def _refuse(self, changes: Changes, arms: int, units: int) -> None:
        runs, run = replace(self.plan, arms=arms, done=0).runs(units), self.cost(changes)
        spent = self.seconds - (self.deadline - time.monotonic())
        needed = spent + math.ceil(runs / self.plan.workers) * run / SPARE
        settings = ", ".join(f"{key} {value}" for key, value in changes.items())
        limit = "" if self.study.base.data.limit else " To train on fewer images: --data.limit."
        raise ValueError(
            f"Expected --budget to be at least {duration(1.1 * needed)}, but got "
            f"{duration(self.seconds)}: even {runs} runs with {settings or 'the recipe'} "
            f"({self.least_epochs() * self.facts.steps} steps) take {duration(run)} each.{limit}"
        )

    def _rungs(self) -> list[Changes]:
        """Changes that make a recipe cheaper and cheaper, starting with no change."""
        base, facts = self.study.base, self.facts
        sizes = SIZES if base.data.is_folder and "data.size" not in self.given else ()
        rungs: list[Changes] = [{}, *({"data.size": size} for size in sizes if size < facts.size)]
        smallest, width = rungs[-1], facts.width // 2
        if "model.width" not in self.given and not base.model.name.startswith("timm:"):
            while width >= LEAST_WIDTH:
                rungs.append({**smallest, "model.width": width})
                width //= 2
        return rungs

    def fit(self) -> Budget:
        """The choice, after the baseline has shown that it learns something."""
        while True:
            with saying("Trying the baseline."):
                changes, arms, first = self.choose()
                learned = self.learn(changes)
            if learned.is_clear or "train.epochs" in self.given:
                break
            say(f"Too short: {learned}.")
            self.floor = 2 * max(self.floor, learned.steps)
        run, seeds, looks = self.cost(changes), "", self.plan.design.looks
        if "seeds" not in self.given:
            fitting = [n for n in DEFAULT.looks if run <= self.room(arms, n)]
            looks = tuple(fitting) or (first,)
            seeds = str(Design(looks))
        kept = [*self.study.arms][:arms]
        remark = self._remark(changes, kept, looks[-1], learned)
        return Budget(self.seconds, kept, changes, seeds, run, remark)

    def _remark(self, changes: Changes, kept: list[str], seeds: int, learned: Learned) -> str:
        """What was given up, and what resolution remains."""
        base, lost = self.study.base, [arm for arm in self.study.arms if arm not in kept]
        given_up = [f"the arms {', '.join(lost)}"] if lost else []
        for key, value in changes.items():
            own = {"data.size": self.facts.size, "model.width": self.facts.width}
            given_up.append(f"{key} {own.get(key, base.train.epochs)} (now {value})")
        if seeds < self.plan.design.last and "seeds" not in self.given:
            given_up.append(f"seeds above {seeds}")
        share, images = learned.right / learned.images, self.facts.tested
        sd = 100 * math.sqrt(share * (1 - share) / images)
        least = smallest_difference(sd, seeds, comparisons=max(1, len(kept) - 1))
        return (
            f"Given up for --budget {duration(self.seconds)}: {'; '.join(given_up) or 'nothing'}. "
            f"In the trial, {learned}{'' if learned.is_clear else ': it has not learned enough'}. "
            f"With {images} test images and {seeds} seeds, differences "
            f"below about {least:.2g} points cannot be seen."
        )


def earlier_budget(folder: Path, seconds: float) -> Budget | None:
    """The choice of an earlier start with the same budget."""
    with contextlib.suppress(OSError, TypeError, ValueError):
        chosen = Budget(**json.loads((folder / FILE).read_text()))
        return chosen if chosen.seconds == seconds else None
    return None


def within_budget(study: Study, chosen: Budget, pool: Pool) -> Study:
    """The study with settings that fit a budget, which are kept for a second start."""
    pool.folder.mkdir(parents=True, exist_ok=True)
    write_json(pool.folder / FILE, asdict(chosen))
    options = [f"--arms {','.join(chosen.arms)}"]
    options += [f"--{key} {value}" for key, value in chosen.changes.items()]
    options += [f"--seeds {chosen.seeds}"] if chosen.seeds else []
    say(f"{chosen.remark}\nThe same without --budget: {' '.join(options)}")
    pool.run_seconds = chosen.run_seconds
    design = Design(parse_runs(chosen.seeds)) if chosen.seeds else study.design
    program = RecipeProgram.of(study.base.override(chosen.changes))
    arms = {arm: changes for arm, changes in study.arms.items() if arm in chosen.arms}
    return replace(study, program=program, design=design, arms=arms)


# Trials of the baseline ---------------------------------------------------------------------------


@contextlib.contextmanager
def _session(recipe: Recipe) -> Iterator[Session]:
    """A training in this process, which leaves no files."""
    from powergrad.lab.trainer.processes import join_processes
    from powergrad.lab.trainer.session import Session
    from powergrad.lab.trainer.training import use_threads

    use_threads(recipe.machine.threads)
    recipe = recipe.override({"train.compile": False})
    with join_processes(recipe.machine.device) as processes, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Skipped ")  # the report names such images
        yield Session(recipe, recipe.load_data(), processes)


def measure(recipe: Recipe, steps: int, tested: int) -> Timing:
    """Time a few steps of a run, with images that were decoded before."""
    few = recipe
    if recipe.load_data().train.is_kept:
        few = recipe.override({"data.limit": min(steps, 2) * recipe.train.batch_size})
    began = time.perf_counter()
    with _session(few) as session:
        times = [time.perf_counter()]
        start = times[0] - began
        epochs = (session.run_epoch() for _ in range(recipe.train.epochs))
        for loss in itertools.islice(itertools.chain.from_iterable(epochs), STEPS):
            loss.item()  # waits for the GPU
            times.append(time.perf_counter())
            if times[-1] - times[0] > PATIENCE and len(times) > 4:
                break
    each = [after - before for before, after in itertools.pairwise(times)]
    step = statistics.median(each[2:] or each)
    # A test is the forward pass, which takes less than half of a step.
    return Timing(start, step, step * tested / recipe.train.batch_size / 2, steps)


def try_baseline(recipe: Recipe, until: float) -> Learned:
    """Train until the network is clearly better than guessing, or until a time."""
    import torch

    with _session(recipe.override({"data.hold_out": recipe.data.hold_out or 0.2})) as session:
        said = time.monotonic()
        while True:
            for _ in session.run_epoch():
                if time.monotonic() > until:
                    break
            outputs = session.test()
            labels = outputs["labels"]
            right = int((outputs["logits"].argmax(1) == labels).sum())
            guessing = float(torch.bincount(labels).max()) / len(labels)
            learned = Learned(session.step, right, len(labels), guessing)
            if learned.is_clear or session.done or time.monotonic() > until:
                return learned
            if time.monotonic() - said > 2:
                said = time.monotonic()
                say(f"Trial: {learned}.")
