"""The checks and messages of a command before its first run, and the question to start."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from powergrad.lab.cli.common import Declined
from powergrad.lab.data.scan import Scan
from powergrad.lab.files import write_text
from powergrad.lab.preflight import (
    Budget,
    Clock,
    Found,
    Plan,
    check_disk,
    check_recipe,
    fit_budget,
)
from powergrad.lab.stats import Design, parse_runs
from powergrad.lab.study import Study
from powergrad.lab.study.tuning import Tuner
from powergrad.lab.trainer.recipe import Recipe
from powergrad.lab.trainer.timing import Stopwatch
from powergrad.lab.words import duration, parse_duration, slug, spans

__all__ = ["Ready", "check_run", "prepare"]

LONG = 600.0  # above this many seconds, the user is asked
FILE = "budget.yaml"  # in the folder of a study: the choices for its budget


@dataclass(frozen=True)
class Ready:
    """The settings with which a study is started.

    Attributes:
        changes: The changes of the recipe by the budget.
        seeds: The value of ``--seeds``, if the budget chose it; otherwise None.
        deadline: The time at which to finish, as of `time.monotonic`.
        run_seconds: The time of a run; 0 if it was not measured.
        remarks: Remarks for the results.
    """

    changes: Mapping[str, Any]
    seeds: str | None = None
    deadline: float = math.inf
    run_seconds: float = 0.0
    remarks: tuple[str, ...] = ()


# Studies ------------------------------------------------------------------------------------------


def prepare(
    study: Study,
    folder: Path,
    *,
    workers: int,
    tuner: Tuner | None = None,
    budget: str | None = None,
    given: Collection[str] = (),
    seeds_given: bool = False,
    known: Collection[str] = (),
    ask: bool = True,
) -> Ready:
    """Check a study before its first run, and print the findings.

    Args:
        study: The study.
        folder: Its folder.
        workers: The number of runs at a time.
        tuner: The tuner of its arms, if any.
        budget: The value of --budget.
        given: The keys of the recipe that the user has set.
        seeds_given: Whether the user has set the number of seeds.
        known: The names of runs that were made elsewhere and are not repeated.
        ask: Whether to ask before a long study, if there is a terminal.

    Raises:
        Declined: If the user declines to start.
        ValueError: If there is an error that would affect every run.
        FileNotFoundError: If the data are missing.
    """
    began = time.monotonic()
    seconds = 0.0 if budget is None else parse_budget(budget)
    arms = [study.base.override(changes) for changes in study.arms.values()]
    facts = _look_at_data(study.base, arms)
    done = _reused(study, folder, tuner, known)
    extra = len(tuner.jobs(0)) if tuner else 0
    plan = Plan(study.base, study.arms, study.design, workers, extra, done=done)
    if study.finals:
        per_unit = study.finals + extra // len(study.arms)
        plan = replace(plan, extra=0, per_unit=per_unit)
    check_disk(folder, plan.fewest * facts.run_bytes(study.base), plan.fewest)
    if budget is not None:
        return _with_budget(
            plan, facts, folder, seconds, began + seconds, given, seeds_given or bool(study.finals)
        )
    if plan.most == 0:
        return Ready({})
    if facts.is_short(study.base):
        _say(f"{_runs(plan)} of a few seconds each, {workers} at a time.")
        return Ready({})
    with Stopwatch(min(workers, plan.most)) as stopwatch:
        clock = Clock(stopwatch.time)
        run = clock.run_seconds(plan, {})
        first, last = (plan.seconds(n, run) for n in (plan.design.looks[0], plan.design.last))
        times = _about(first, last)
        _say(f"{_runs(plan)}, {times} with {workers} at a time ({duration(run)} each).")
        if first > LONG:
            fresh = replace(plan, done=0)  # no run can be reused with other settings
            try:
                fits = fit_budget(
                    fresh,
                    facts,
                    clock,
                    budget=LONG,
                    left=LONG,
                    reserve=_reserve(stopwatch),
                    given=given,
                    seeds_given=bool(study.finals),
                )
                _say(f"These options fit into ten minutes: {fits.options}")
            except ValueError:
                _say(
                    "No choice of image size, width, epochs and seeds fits into ten minutes. Fewer "
                    "arms (--arms baseline,pgt) or fewer images (--data.limit) take less time."
                )
    if first > LONG and ask:
        _ask(f"Start {_runs(plan)}?")
    return Ready({}, run_seconds=run)


def _reserve(stopwatch: Stopwatch) -> float:
    """The time in seconds besides the runs: imports of this process and the workers, the page."""
    return 5 + 3 * stopwatch.boot


def _with_budget(
    plan: Plan,
    facts: Found,
    folder: Path,
    seconds: float,
    deadline: float,
    given: Collection[str],
    seeds_given: bool,
) -> Ready:
    """The settings that fit a budget; a second start uses the choice of the first."""
    chosen = _earlier_choice(folder, seconds)
    if chosen is not None:
        options = chosen.options or "the recipe unchanged"
        _say(f"--budget {duration(seconds)}: as before, {options}.")
    else:
        with Stopwatch(min(plan.workers, plan.most)) as stopwatch:
            chosen = fit_budget(
                replace(plan, done=0),
                facts,
                Clock(stopwatch.time),
                budget=seconds,
                left=deadline - time.monotonic(),
                reserve=_reserve(stopwatch),
                given=given,
                seeds_given=seeds_given,
            )
        plan = replace(plan, base=plan.base.override(chosen.changes), done=0)
        if chosen.seeds:
            plan = replace(plan, design=Design(parse_runs(chosen.seeds)))
        _say(
            f"--budget {duration(seconds)} chose {chosen.options or 'the recipe unchanged'}: "
            f"{_runs(plan)} of about {duration(chosen.run_seconds)}, {plan.workers} at a time."
        )
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / FILE, yaml.safe_dump(asdict(chosen), sort_keys=False))
    remark = (
        f"To fit the budget of {duration(seconds)}, these options were chosen: {chosen.options}. "
        "The verdict is about this shorter training."
    )
    return Ready(
        chosen.changes,
        chosen.seeds or None,
        deadline - chosen.reserve / 2,
        chosen.run_seconds,
        (remark,) if chosen.changes else (),
    )


def parse_budget(text: str) -> float:
    """The seconds of --budget."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise ValueError(f"--budget: {error}") from None


def _earlier_choice(folder: Path, seconds: float) -> Budget | None:
    try:
        chosen = Budget(**yaml.safe_load((folder / FILE).read_text(encoding="utf-8")))
    except (OSError, TypeError, yaml.YAMLError):
        return None
    return chosen if chosen.seconds == seconds else None


def _reused(study: Study, folder: Path, tuner: Tuner | None, known: Collection[str]) -> int:
    """Print which finished runs are reused; return their number."""
    if tuner is None:
        jobs = study.jobs()
        finished = [
            key for key, job in jobs.items() if job.name in known or job.result(folder) is not None
        ]
        trials = 0
    else:  # the chosen values, and so the names of the runs, are not known yet
        names = {slug(arm)[:40]: arm for arm in study.arms}
        paths = [*folder.glob("*/result.json"), *folder.glob("arms/*/result.json")]
        runs = {path.parent.name for path in paths}
        runs |= {name.removeprefix("arms/") for name in known if not name.startswith("tuning/")}
        places = [name.rpartition("-seed") for name in runs]
        finished = [
            (names[arm], int(rest.partition("-")[0]))
            for arm, _, rest in places
            if arm in names and rest.partition("-")[0].isdigit()
        ]
        tried = {path.parent.name for path in folder.glob("tuning/*/result.json")}
        tried |= {name.removeprefix("tuning/") for name in known if name.startswith("tuning/")}
        trials = len(tried)
    parts = [
        f"{arm} seeds {spans(seeds)}"
        for arm in study.arms
        if (seeds := [seed for name, seed in finished if name == arm])
    ]
    if trials:
        parts.append(f"{trials} tuning runs")
    count = len(finished) + trials
    if count:
        runs = "1 finished run" if count == 1 else f"{count} finished runs"
        remedy = " (To start over, use --fresh.)" if folder.is_dir() else ""
        where = f" in {folder}" if not known else ""
        _say(f"Reusing {runs}{where}: {'; '.join(parts)}.{remedy}")
    return count


# One run ------------------------------------------------------------------------------------------


def check_run(recipe: Recipe, folder: Path, *, ask: bool = True) -> None:
    """Check a single run before it starts.

    Raises:
        Declined: If the user declines to start.
        ValueError: If there is an error.
        FileNotFoundError: If the data are missing.
    """
    facts = _look_at_data(recipe)
    check_disk(folder, facts.run_bytes(recipe), 1)
    if facts.is_short(recipe):
        return
    plan = Plan(recipe, {"run": {}}, Design((1,)))
    with Stopwatch(1) as stopwatch:
        seconds = Clock(stopwatch.time).run_seconds(plan, {})
    _say(f"The run takes about {duration(seconds)}.")
    if seconds > LONG and ask:
        _ask("Start it?")


# Messages -----------------------------------------------------------------------------------------


def _look_at_data(recipe: Recipe, arms: Sequence[Recipe] = ()) -> Found:
    facts = check_recipe(recipe, arms=arms, progress=_Scanning())
    if facts.scan is not None:
        _show_scan(facts.scan)
        if facts.scan.problems:
            raise ValueError("\n".join(facts.scan.problems))
    return facts


def _show_scan(scan: Scan) -> None:
    title = f"{scan.root}: "
    _say("\n  ".join([title + scan.summary()[0], *scan.summary()[1:]]))
    for warning in scan.warnings:
        _say(f"Warning: {warning}")


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


def _runs(plan: Plan) -> str:
    if plan.fewest == plan.most:
        return "1 run" if plan.most == 1 else f"{plan.most} runs"
    return f"{plan.fewest} to {plan.most} runs"


def _about(first: float, last: float) -> str:
    times = [duration(first), duration(last)]
    return f"about {times[0]}" if times[0] == times[1] else f"about {times[0]} to {times[1]}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _ask(question: str) -> None:
    """Ask the user, if there is a terminal."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Declined
