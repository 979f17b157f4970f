"""The options of studies; their texts are the help of the commands."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from powergrad.lab.cli.common import Flag, Words, put_aside, refuse
from powergrad.lab.cli.planning import noise_of
from powergrad.lab.environment import visible_devices, worker_environments
from powergrad.lab.preflight import (
    LEAST_BUDGET,
    RESERVE,
    Fitting,
    Plan,
    check_recipe,
    count_reused,
    earlier_budget,
    say,
    within_budget,
)
from powergrad.lab.runs import CommandProgram, Program, RecipeProgram
from powergrad.lab.runs.pool import Pool
from powergrad.lab.stats import DEFAULT, Design, Noise, check_positive, least_runs, parse_runs
from powergrad.lab.study import Execution, Metric, Results, Study, StudyKind, metric_named
from powergrad.lab.study.execute import known_runs
from powergrad.lab.study.metrics import parse_second
from powergrad.lab.study.notes import MORE_SEEDS
from powergrad.lab.study.records import USUAL, Question
from powergrad.lab.study.saving import summarise
from powergrad.lab.study.space import Space, split_overrides
from powergrad.lab.study.tuning import Map, Tuner
from powergrad.lab.terminal import Watch
from powergrad.lab.trainer.recipe import Recipe, flatten, load_recipe, parse_overrides
from powergrad.lab.words import duration, parse_duration


@Parameter(name="*")
@dataclass(frozen=True)
class TuneOptions:
    """Options for the tuning of arms.

    Attributes:
        tune: Keys to tune for every arm in the same way, on held-out training data. lr=0.006:0.4
            is a logarithmic range, lr=0.1,0.2 is a list, lr alone means five values around that of
            the recipe; "ARM: key=..." adds a key for one arm.
        trials: The number of points per arm and tuning; by default 6 with a range, otherwise all
            combinations.
        tune_seeds: The number of seeds per point; by default 4, or 1 with --repeats.
        tune_map: With identity, the points of arms with PGT are mapped so that the backbone is
            trained as without PGT.
        repeats: The number of independent tunings per arm, each with its own points and seeds.
            Their best settings are compared, so the verdict is about the methods, not about one
            choice of values.
    """

    tune: Annotated[tuple[str, ...], Parameter(negative="", consume_multiple=True)] = ()
    trials: int | None = None
    tune_seeds: int | None = None
    tune_map: Map = "none"
    repeats: str | None = None

    def split(self) -> tuple[list[str], list[str]]:
        """The keys to tune, and overrides of the recipe that follow them."""
        tuned, changes = split_overrides(self.tune)
        if self.tune and not tuned:
            wanted = "several values or a range, such as lr=0.1,0.2 or lr=0.01:1"
            raise ValueError(f"Expected --tune with {wanted}, but got {' '.join(self.tune)!r}.")
        if not tuned:
            refuse(self, ("trials", "tune_seeds", "repeats", "tune_map"), "--tune")
        return tuned, changes

    def tuner(
        self,
        study: Study,
        arms: Mapping[str, dict[str, Any]],
        tuned: Sequence[str],
        metric: Metric | None = None,
    ) -> Tuner:
        """The tuner of `arms` for a study, which need not have these arms yet."""
        program, common = study.program, (list(arms), self.trials, study.first_seed)
        if isinstance(program, CommandProgram):
            space = Space.parse(tuned, dict.fromkeys(program.tuned), *common, expand=str)
            for name, changes in arms.items():
                program.check_tuned(name, changes, [axis.key for axis in space.axes(name)])
        else:
            space = Space.parse(tuned, dict(flatten(study.base.model_dump())), *common)
        seeds = (1 if self.repeats else 4) if self.tune_seeds is None else self.tune_seeds
        tuner = Tuner(study, space, seeds, self.tune_map, metric)
        tuned_study = replace(study, arms=dict(arms), tuned=space.keys, tuning=tuner.to_dict())
        return replace(tuner, study=tuned_study)


@Parameter(name="*")
@dataclass(frozen=True)
class StudyOptions:
    """The options of every study.

    Attributes:
        seeds: Runs per arm. 8..24 tests after 8, 12, 16, 20 and 24 seeds and stops an arm once it
            is settled (better, worse or equivalent); 12 is a fixed number; 8,16,24 lists the seed
            counts at which to test. By default 8..24, or 3 per repeat with --repeats.
        first_seed: The first seed.
        metric: The metric to compare, at the last epoch; by default test_accuracy. For your own
            program: its only metric; required if there are several.
        margin: The largest difference that does not matter to you; by default 0.5 points of
            accuracy, 0.05 of NLL, 0.01 of ECE, 1 dead unit.
        workers: The number of runs at a time on this machine; by default the number of cores. For
            your own program: one per GPU, if there are GPUs.
        threads: The number of threads per run.
        out: The folder in which the study's folder is created.
        name: The name of the study's folder; by default derived from its recipe.
        cluster: The address of a Dask scheduler, such as tcp://host:8786, whose workers execute the
            runs.
        reuse: A study.csv of an earlier start, here or elsewhere, whose runs are not repeated.
        budget: The time that the study may take, such as 10m, 90s or 1h30m. Arms, epochs, seeds,
            image size and width are chosen to fit, unless given, so that the baseline learns
            something, and no run is started that would finish too late. For your own program
            nothing is chosen.
        fresh: Do not reuse an earlier start; its folder is renamed.
        json: Print one JSON object with the results to standard output, and everything else to
            standard error.
        quiet: Print only the results and errors.
        fail_unless: Exit with code 4 unless every arm except the baseline is better, equivalent, or
            not-worse (by more than the margin).
        sigma: The known standard deviation of a run. The verdict uses it instead of an estimate, so
            that 2 runs per arm are enough for one.
        sigma_from: An earlier study (its folder, or study.csv) whose noise is used instead.
        target: A value of the metric, with which every arm, also the baseline, is compared.
        and_: A second metric, and what must hold for "better": "seconds: better" (and the first not
            worse by the margin), or "memory: not worse 100" (by that margin; and the first better).
            A last word, higher or lower, says which is better.
    """

    seeds: str | None = None
    first_seed: int = 0
    metric: str | None = None
    margin: float | None = None
    workers: int | None = None
    threads: int = 1
    out: Path = Path("runs")
    name: str | None = None
    cluster: str | None = None
    reuse: Path | None = None
    budget: str | None = None
    fresh: Annotated[bool, Flag] = False
    json: Annotated[bool, Flag] = False
    quiet: Annotated[bool, Flag] = False
    fail_unless: Literal["better", "not-worse", "equivalent"] | None = None
    sigma: float | None = None
    sigma_from: Path | None = None
    target: float | None = None
    and_: Annotated[str | None, Parameter(name="--and")] = None

    @property
    def usual_margin(self) -> float | None:
        """The margin; with a target, which needs none, one that only sets the digits."""
        has_none = self.margin is None and self.target is not None
        return abs(self.target or 1) / 1000 if has_none else self.margin

    def question(self) -> Question:
        """What is asked about the metric."""
        if self.sigma is not None and self.sigma_from is not None:
            raise ValueError("Expected --sigma or --sigma-from, but got both.")
        if self.target is not None and self.and_ is not None:
            raise ValueError("Expected --target or --and, but got both.")
        noise = None if self.sigma is None else Noise(check_positive(self.sigma, "sigma"), 0)
        if self.sigma_from is not None:
            noise, _ = noise_of(self.sigma_from, self.metric)
        second, claim = parse_second(self.and_) if self.and_ else (None, "")
        if second and second.name == self.metric:
            raise ValueError(f"Expected --and with another metric, but got {self.metric!r} again.")
        asked = {"noise": noise, "target": self.target, "second": second, "claim": claim}
        return USUAL.model_copy(update=asked)

    def base(self, recipe: str, overrides: Sequence[str], *, is_plain: bool = True) -> Recipe:
        """The recipe of every run; if it must be plain, the arms set alpha."""
        given = parse_overrides(overrides)
        if "seed" in given:
            got = f"seed = {given['seed']!r}; every run has its own seed"
            raise ValueError(f"Expected --seeds and --first-seed, but got {got}.")
        changes: dict[str, Any] = {"machine.threads": self.threads}
        if self.cluster is not None:  # file times differ between copies on several machines
            changes["machine.fingerprint"] = "sizes"
        base = load_recipe(recipe, {**changes, **given})
        if is_plain and base.loss.alpha != 1:
            wanted = "Expected loss.alpha to be 1 in the recipe, because the arms set it (--alpha)"
            raise ValueError(f"{wanted}, but got {base.loss.alpha:g}.")
        return base

    def study(
        self,
        kind: StudyKind,
        program: Program,
        arms: Mapping[str, dict[str, Any]],
        repeats: str | None = None,
    ) -> Study:
        """A study of a recipe or a program; the metric of a program is unknown before its run."""
        metric = Metric(name=self.metric or "", higher_is_better=True, unit="", margin=1.0)
        margin = 1.0
        if not program.is_foreign:
            metric = metric_named(self.metric or "test_accuracy", self.margin)
            margin = metric.margin if self.margin is None else self.margin
        _ = seconds_of(self.budget)  # raises before torch is imported
        runs, finals = self.seeds or ("8" if kind == "sweep" else None), 0
        if repeats is not None:
            if self.seeds is not None and (not self.seeds.isdigit() or self.seeds == "0"):
                wanted = "Expected --seeds to be a number with --repeats (the seeds per repeat)"
                raise ValueError(f"{wanted}, but got {self.seeds!r}.")
            runs, finals = repeats, int(self.seeds or 3)
        try:
            design = DEFAULT if runs is None else Design(parse_runs(runs))
        except ValueError as error:
            raise ValueError(f"--repeats: {error}" if repeats else str(error)) from None
        made = Study(kind, program, dict(arms), design, metric, margin, self.first_seed, finals)  # pyright: ignore[reportArgumentType]
        question = self.question()
        if getattr(program, "unseeded", False):
            question = question.model_copy(update={"pairs": False})
        made = replace(made, question=question)
        least = least_runs(made.question.noise)
        if design.last < least and kind != "tune":
            reason = f"a verdict needs at least {least} per arm"
            reason += "" if made.question.noise else ", or the noise (--sigma)"
            if self.fail_unless:
                got = f"got {design.last} runs per arm"
                raise ValueError(
                    f"Expected --fail-unless only with a verdict, but {got}; {reason}."
                )
            say(f"No verdict is possible with {design.last} runs per arm: {reason}.\n{MORE_SEEDS}")
        return made

    def free_folder(self, study: Study) -> Path:
        """The folder of the study; with --fresh, the folder of an earlier start is renamed."""
        budget = f"-{self.budget.replace(' ', '')}" if self.budget else ""
        folder = self.out / (self.name or study.name + budget)
        if self.fresh:
            put_aside(folder)
        return folder

    def pool(self, folder: Path, program: Program) -> Pool:
        """The pool that executes the runs of a program."""
        is_distributed = isinstance(program, CommandProgram) and program.is_distributed
        # Recipes choose their device themselves, and a run with torchrun uses all GPUs.
        devices = visible_devices() if program.is_foreign and not is_distributed else []
        usual = 1 if is_distributed else None
        environments = worker_environments(self.workers, self.threads, devices, usual)
        shared = {"cluster": self.cluster, "known": known_runs(self.reuse)}
        return Pool(folder, workers=len(environments), environments=environments, **shared)


def seconds_of(budget: str | None) -> float:
    """The seconds of ``--budget``."""
    return math.inf if budget is None else parse_duration(budget)


@dataclass(frozen=True)
class Prepared:
    """A study of a recipe that was checked, with the settings that fit its budget."""

    study: Study
    tuner: Tuner | None
    folder: Path
    execution: Execution
    remarks: list[str]


@contextlib.contextmanager
def prepare(
    study: Study,
    tuner: Tuner | None,
    options: StudyOptions,
    given: Collection[str],
) -> Iterator[Prepared]:
    """Check a study of a recipe, choose settings for its budget, and open its pool.

    `given` are the keys that the user has set; a budget does not change them.
    """
    began, folder, base = time.monotonic(), options.free_folder(study), study.base
    assert isinstance(study.program, RecipeProgram)
    with options.pool(folder, study.program) as pool:
        plan, remarks = Plan.of(study, tuner, pool.workers), []
        if (seconds := seconds_of(options.budget)) < LEAST_BUDGET:
            wanted = f"Expected --budget to be at least {duration(LEAST_BUDGET)}"
            raise ValueError(f"{wanted}, but got {options.budget!r}.")
        pool.deadline = began + seconds - RESERVE
        chosen = earlier_budget(folder, seconds)
        are_given = {"seeds": options.seeds or study.finals, "arms": tuner}
        fixed = {*given, *(name for name, is_given in are_given.items() if is_given)}
        arms = [base.override(changes) for changes in study.arms.values()]
        facts = check_recipe(base, arms)
        done = count_reused(study, folder, tuner, pool.known.keys())
        if options.budget is not None and chosen is None:
            chosen = Fitting(study, plan, seconds, pool.deadline, fixed, facts).fit()
        if chosen is not None:
            study = within_budget(study, chosen, pool)
            if tuner is not None:
                tuned = replace(tuner.study, program=study.program, design=study.design)
                tuner = replace(tuner, study=tuned)
            remarks.append(chosen.remark)
        elif (plan := replace(plan, done=done)).runs(plan.design.last):
            say(plan.announce())
        yield Prepared(study, tuner, folder, Execution(pool, Watch), remarks)


DEFAULTS = StudyOptions()


def answering(command: Callable[..., Results]) -> Callable[..., int]:
    """The command with the options ``--json``, ``--quiet`` and ``--fail-unless``."""

    @functools.wraps(command)
    def answer(*given: Any, options: StudyOptions = DEFAULTS, **others: Any) -> int:
        with contextlib.ExitStack() as stack:
            if options.quiet:
                nowhere = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context(contextlib.redirect_stderr(nowhere))
            if options.json:
                stack.enter_context(contextlib.redirect_stdout(sys.stderr))
            results = command(*given, options=options, **others)
        if options.json:
            print(json.dumps(summarise(results), indent=1))
        goal = options.fail_unless
        missed = lacking(results, goal) if goal else {}
        for arm, verdict in missed.items():
            say(f"powergrad: Expected {arm} to be {goal}, but got {verdict}.")
        return 4 if missed else 0

    return answer


def lacking(results: Results, goal: str) -> dict[str, str]:
    """The arms, with their verdicts, that are not `goal`: better, not-worse or equivalent."""
    compared = results.comparable()
    found = {c.arm: c for c in compared.comparisons} if compared else {}
    missed, arms = {}, [*(results.study.arms if results.study else results.arms)]
    for arm in arms:
        comparison = found.get(arm)
        verdict = comparison.verdict if comparison else "no verdict"
        is_reached = verdict == goal
        if comparison is not None and goal == "not-worse":
            ends = comparison.interval
            worst = ends[0] if results.metric.higher_is_better else -ends[1]
            has_lost = comparison.failed or comparison.diverged
            is_above = verdict == "not settled" and worst > -comparison.margin and not has_lost
            is_reached = verdict in ("better", "equivalent") or is_above
        if (arm != results.baseline or len(arms) == 1) and not is_reached:
            missed[arm] = verdict
    return missed


@Parameter(name="*", group="Your own program")
@dataclass(frozen=True)
class ProgramOptions:
    r"""Options for your own program.

    Attributes:
        metric_regex: A regular expression for the lines of its output, such as 'acc (\S+)'. The
            last match counts. Named groups give several metrics. May be repeated.
        metric_file: A number in a file, such as results.json:val.acc or log.csv:accuracy (the last
            row), relative to {out}. May be repeated. A program that calls
            powergrad.report(accuracy=...) needs neither.
        tune_metric: With --tune: the metric by which values are chosen. It must be computed on
            validation data and differ from --metric, because test data must not be used to choose.
        head: The name of the classifier head in the model, for agc and head-lr, if it cannot be
            found.
        agc: The threshold of agc; 0.01 by default.
        seed_env: The environment variable from which your program reads its seed, instead of
            {seed}.
        seed_all: `powergrad run` seeds torch, numpy and random, and adds the seed to those that
            your program sets itself.
        unseeded: Your program has no seed; its runs differ by themselves.
        timeout: The time after which a run is ended and counts as failed, such as 10m or 2h.
        reuse_anyway: Reuse the finished runs of an earlier start although the code has changed.
    """

    metric_regex: Words = ()
    metric_file: Words = ()
    tune_metric: str | None = None
    head: str | None = None
    agc: float | None = None
    seed_env: str | None = None
    seed_all: Annotated[bool, Flag] = False
    unseeded: Annotated[bool, Flag] = False
    timeout: str | None = None
    reuse_anyway: Annotated[bool, Flag] = False


@Parameter(name="*")
@dataclass(frozen=True)
class TableOptions:
    """Options for the comparison of runs made elsewhere.

    Attributes:
        from_: Compare the runs of this CSV file (one line per run) instead of training. Exports of
            W&B and MLflow are supported.
        columns: With --from: the columns of arm and seed, such as arm=group seed=config.seed, if
            they are not found. The column of the metric is --metric.
        baseline: With --from: the arm to compare with.
        better: With --from, or for your own program: whether a higher or a lower metric is better,
            if its name does not show it.
    """

    from_: Annotated[Path | None, Parameter(name="--from")] = None
    columns: Annotated[tuple[str, ...], Parameter(negative="", consume_multiple=True)] = ()
    baseline: str | None = None
    better: Literal["higher", "lower"] | None = None
