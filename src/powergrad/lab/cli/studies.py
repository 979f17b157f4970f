"""``powergrad compare``, ``sweep`` and ``decompose``: studies with several arms and seeds."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from powergrad.lab.cli.common import (
    Declined,
    Flag,
    Overrides,
    RecipeName,
    check_options,
    option_names,
    put_aside,
    recipe_and_overrides,
    show_keys,
    stopped,
)
from powergrad.lab.cli.preflight import Ready, parse_budget, prepare
from powergrad.lab.cli.tables import TableOptions, compare_table
from powergrad.lab.files import write_text
from powergrad.lab.jobs import Changes, CommandProgram, RecipeProgram
from powergrad.lab.jobs.command import OWN, placeholders
from powergrad.lab.jobs.devices import default_workers, visible_devices, worker_environments
from powergrad.lab.jobs.sources import Sources
from powergrad.lab.report import write_report
from powergrad.lab.signals import Interrupted
from powergrad.lab.stats import DEFAULT, Design, parse_runs
from powergrad.lab.study import (
    Decomposition,
    Execution,
    Metric,
    Results,
    Study,
    StudyKind,
    metric_named,
    run_study,
)
from powergrad.lab.study.arms import (
    arms_of,
    command_arms,
    decomposition,
    head_exponent,
    parse_grid,
)
from powergrad.lab.study.decompose import (
    check_identity,
    describe_identity,
    explain_decomposition,
)
from powergrad.lab.study.execute import tune_once
from powergrad.lab.study.first import announce, run_first
from powergrad.lab.study.metrics import guess_metric
from powergrad.lab.study.space import Space, split_overrides
from powergrad.lab.study.tuning import Map, Tuner
from powergrad.lab.terminal import Watch, show_results, show_runs
from powergrad.lab.trainer.recipe import Recipe, flatten, load_recipe, parse_overrides

__all__ = [
    "StudyOptions",
    "TuneOptions",
    "compare",
    "decompose",
    "make_study",
    "run_and_report",
    "show_tuning",
    "sweep",
]


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
        storage: The URL of a database through which several machines share the runs.
        reuse: A study.csv of an earlier start, here or elsewhere, whose runs are not repeated.
        budget: The time that the study may take, such as 10m, 90s or 1h30m. Image size, width,
            epochs and seeds are chosen to fit, unless given, and no run is started that would
            finish too late. For your own program nothing is chosen.
        fresh: Do not reuse an earlier start; its folder is renamed.
        yes: Start without asking, even if the runs take long.
        keys: List every key of the recipe, with its meaning, allowed values and default.
    """

    seeds: str | None = None
    first_seed: int = 0
    metric: str | None = None
    margin: float | None = None
    workers: int | None = None
    threads: int = 1
    out: Path = Path("runs")
    name: str | None = None
    storage: str | None = None
    reuse: Path | None = None
    budget: str | None = None
    fresh: Annotated[bool, Flag] = False
    yes: Annotated[bool, Flag] = False
    keys: Annotated[bool, Flag] = False

    def design(self) -> Design:
        """The numbers of runs per arm at which the results are tested."""
        return DEFAULT if self.seeds is None else Design(parse_runs(self.seeds))

    def finals(self) -> int:
        """The number of seeds per repeat."""
        if self.seeds is None:
            return 3
        if not self.seeds.isdigit() or self.seeds == "0":
            raise ValueError(
                "Expected --seeds to be a single number with --repeats (the seeds per repeat), but "
                f"got {self.seeds!r}."
            )
        return int(self.seeds)

    def compared(self) -> tuple[Metric, float]:
        """The metric to compare, and the margin."""
        metric = metric_named(self.metric or "test_accuracy")
        return metric, metric.margin if self.margin is None else self.margin

    def execution(self, program: CommandProgram | None = None) -> Execution:
        """The execution options, for a recipe or for a user's program."""
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"Expected `workers` to be at least 1, but got {self.workers}.")
        if self.threads < 1:
            raise ValueError(f"Expected `threads` to be at least 1, but got {self.threads}.")
        if program is None:
            workers = self.workers or default_workers([], self.threads)
            return Execution(workers, Watch, self.storage, self.reuse)
        # A run with torchrun uses all GPUs.
        devices = [] if program.is_distributed else visible_devices()
        usual = 1 if program.is_distributed else default_workers(devices, self.threads)
        workers = self.workers or usual
        environments = worker_environments(workers, devices, self.threads)
        return Execution(workers, Watch, self.storage, self.reuse, environments=environments)

    def folder(self, study: Study) -> Path:
        """The folder of the study."""
        budget = f"-{self.budget.replace(' ', '')}" if self.budget else ""
        return self.out / (self.name or study.name + budget)

    def free_folder(self, study: Study) -> Path:
        """The folder of the study; with --fresh, the folder of an earlier start is renamed.

        Raises:
            ValueError: If other machines share the runs, and an option would affect them.
        """
        for name, value in (("--budget", self.budget), ("--fresh", self.fresh or None)):
            if value is not None and self.storage is not None:
                raise ValueError(
                    f"Expected no {name} with --storage, whose runs other machines share, but got "
                    f"both{'; choose another --name' if name == '--fresh' else ''}."
                )
        folder = self.folder(study)
        if self.fresh:
            put_aside(folder)
        return folder

    def prepare(
        self,
        study: Study,
        tuner: Tuner | None = None,
        *,
        given: Collection[str] = (),
        seeds_given: bool | None = None,
    ) -> tuple[Recipe, PreparedOptions]:
        """Check a study before its first run; return the recipe and options to start with.

        Args:
            study: The study.
            tuner: The tuner of its arms, if any.
            given: The keys of the recipe that the user has set.
            seeds_given: Whether the user has set the seeds; by default, whether --seeds is set.
        """
        folder, execution = self.free_folder(study), self.execution()
        ready = prepare(
            study,
            folder,
            workers=execution.workers,
            tuner=tuner,
            budget=self.budget,
            given=given,
            seeds_given=self.seeds is not None if seeds_given is None else seeds_given,
            known=execution.known_runs,
            ask=not self.yes,
        )
        values = {field.name: getattr(self, field.name) for field in fields(StudyOptions)}
        values |= {"name": folder.name, "seeds": ready.seeds or self.seeds}
        return study.base.override(ready.changes), PreparedOptions(**values, ready=ready)

    def recipe(
        self, recipe: str | None, overrides: Sequence[str], command: Callable[..., int]
    ) -> tuple[str, list[str]]:
        """The name and the overrides of the recipe, from the arguments of `command`."""
        name, changes = recipe_and_overrides(recipe, overrides)
        check_options(changes, option_names(command))
        return name, changes

    def base(self, recipe: str, overrides: Sequence[str]) -> Recipe:
        """The recipe of every run, without files that a study does not need."""
        given = parse_overrides(overrides)
        if "seed" in given:
            raise ValueError(
                f"Expected --seeds and --first-seed, but got seed = {given['seed']!r}; every run "
                "has its own seed."
            )
        changes = {"machine.threads": self.threads, "machine.keep_best": False}
        if self.storage is not None:  # file times differ between copies on several machines
            changes["machine.fingerprint"] = "sizes"
        changes |= given
        return load_recipe(recipe, changes)

    def plain_base(self, recipe: str, overrides: Sequence[str]) -> Recipe:
        """The recipe of every run, for a study whose arms set alpha."""
        base = self.base(recipe, overrides)
        if base.loss.alpha != 1:
            raise ValueError(
                "Expected loss.alpha to be 1 in the recipe, because the arms set it (--alpha), but "
                f"got {base.loss.alpha:g}, with which the baseline would use PGT."
            )
        return base


_READY = Ready({})


@dataclass(frozen=True)
class PreparedOptions(StudyOptions):
    """The options of a study after the checks, with their findings."""

    ready: Ready = _READY

    def execution(self, program: CommandProgram | None = None) -> Execution:
        """The execution options, with the deadline."""
        ready = self.ready
        deadline, seconds = ready.deadline, ready.run_seconds
        return replace(super().execution(program), deadline=deadline, run_seconds=seconds)


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
            raise ValueError(
                "Expected --tune with several values or a range, such as lr=0.1,0.2 or lr=0.01:1, "
                f"but got {' '.join(self.tune)!r}."
            )
        if not tuned:
            given = {
                "--trials": self.trials,
                "--tune-seeds": self.tune_seeds,
                "--repeats": self.repeats,
                "--tune-map": None if self.tune_map == "none" else self.tune_map,
            }
            for name, value in given.items():
                if value is not None:
                    raise ValueError(f"Expected {name} only with --tune, but got {value!r}.")
        return tuned, changes

    def prepare(
        self,
        study: Study,
        arms: Mapping[str, Changes],
        tuned: Sequence[str],
        metric: Metric | None = None,
    ) -> Tuner:
        """The tuner of `arms` for a study, which need not have these arms yet."""
        if isinstance(study.program, CommandProgram):
            space = Space.parse(
                tuned, dict.fromkeys(study.program.tuned), list(arms), self.trials,
                study.first_seed, expand=str,
            )  # fmt: skip
            for name, changes in arms.items():
                study.program.check_tuned(name, changes, [axis.key for axis in space.axes(name)])
        else:
            values = dict(flatten(study.base.model_dump()))
            space = Space.parse(tuned, values, list(arms), self.trials, study.first_seed)
        seeds = (1 if self.repeats else 4) if self.tune_seeds is None else self.tune_seeds
        tuner = Tuner(study, space, seeds, self.tune_map, metric)
        tuned_study = replace(study, arms=arms, tuned=space.keys, tuning=tuner.to_dict())
        return replace(tuner, study=tuned_study)


@Parameter(name="*", group="Your own program")
@dataclass(frozen=True)
class ProgramOptions:
    """Options for your own program.

    Attributes:
        metric_regex: A regular expression for the lines of its output, such as 'acc (.+)'. The
            last match counts. Named groups give several metrics. May be repeated.
        metric_file: A number in a file, such as results.json:val.acc or log.csv:accuracy (the last
            row), relative to {out}. May be repeated. A program that calls
            powergrad.report(accuracy=...) needs neither.
        tune_metric: With --tune: the metric by which values are chosen. It must be computed on
            validation data and differ from --metric, because test data must not be used to choose.
        head: The name of the classifier head in the model, for agc and head-lr, if it cannot be
            found.
        agc: The threshold of agc; 0.01 by default.
    """

    metric_regex: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    metric_file: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    tune_metric: str | None = None
    head: str | None = None
    agc: float | None = None

    def check_unused(self) -> None:
        """Raise ValueError if an option was given without a program."""
        for name in ("metric_regex", "metric_file", "tune_metric", "head", "agc"):
            if (value := getattr(self, name)) not in (None, ()):
                option = f"--{name.replace('_', '-')}"
                given = value[0] if isinstance(value, tuple) else value
                raise ValueError(
                    f"Expected {option} only with your own program (`compare ... -- python "
                    f"train.py --seed {{seed}}`), but got {given!r} without one."
                )


_OPTIONS = StudyOptions()
_TUNE = TuneOptions()
_PROGRAM = ProgramOptions()
_TABLE = TableOptions()
ARMS = "baseline,pgt,head-lr,agc+pgt"
ARMS_OF_PROGRAM = "baseline,pgt"  # possible for every program with a cross-entropy


def compare(
    recipe: RecipeName = None,
    *overrides: Overrides,
    arms: str | None = None,
    arm: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    alpha: str = "0.25",
    command: Annotated[tuple[str, ...], Parameter(negative="", show=False)] = (),
    program: ProgramOptions = _PROGRAM,
    table: TableOptions = _TABLE,
    tuning: TuneOptions = _TUNE,
    options: StudyOptions = _OPTIONS,
) -> int:
    """Find out whether PGT helps: run several arms over the same seeds and give a verdict.

    For your own program: `powergrad compare [OPTIONS] -- python train.py --seed {seed}`. It runs
    unmodified, once per arm and seed. {seed}, {arm}, {out} (a folder for the run) and every key of
    --tune are replaced by their values; write {{ and }} for braces.

    Starting the same comparison again runs only what is missing.

    Args:
        recipe: The name of a recipe, or a YAML file. The default depends on data.name: images for
            folder:PATH, otherwise the recipe with the name of the data, or digits.
        overrides: Overrides of the recipe, for all arms.
        arms: The arms, separated by commas; methods can be combined with +. The methods are
            baseline, pgt, gc, agc, label-smoothing, less-decay (alpha times the weight decay,
            without PGT) and head-lr (the learning rates of head and backbone in the same ratio as
            with PGT, without PGT). All others are compared with the first. By default
            baseline,pgt,head-lr,agc+pgt; for your own program baseline,pgt (there,
            label-smoothing is not available).
        arm: One more arm, such as "name: key=value, key=value"; may be repeated. For your own
            program: "name: --flag value", or "name: pgt --flag value".
        alpha: The alpha of pgt, less-decay and head-lr. Several values, separated by commas, give
            one arm each.
        command: The program and its arguments.
        program: Your own program.
        table: The comparison of runs made elsewhere.
        tuning: The tuning of the arms.
        options: The options of every study.
    """
    if table.from_ is not None:
        kept = replace(_OPTIONS, metric=options.metric, margin=options.margin)
        kept = replace(kept, out=options.out, name=options.name)
        rest = (recipe, overrides, arms, arm, alpha, command, program, tuning, options)
        if rest != (None, (), None, (), "0.25", (), _PROGRAM, _TUNE, kept):
            raise ValueError(
                "Expected --from only with --metric, --margin, --better, --baseline, --columns, "
                "--out and --name, but got options for new runs."
            )
        return compare_table(table, options.out, options.name, options.metric, options.margin)
    table.refuse(has_program=bool(command))
    texts = [name.strip() for name in (arms or "").split(",") if name.strip()]
    alphas = [float(value) for value in parse_grid([f"alpha={alpha}"]).values["loss.alpha"]]
    name, typed = "", list[str]()
    if not command:
        name, typed = options.recipe(recipe, overrides, compare)
        if options.keys:
            return show_keys(load_recipe(name, parse_overrides(typed)))
    elif recipe is not None or overrides or options.keys:
        got = recipe or next(iter(overrides), "--keys")
        raise ValueError(f"Expected a recipe or a program, but got {got!r} and a program.")
    try:
        if command:
            texts = [*(texts or ARMS_OF_PROGRAM.split(",")), *arm]
            _compare_program(command, texts, alphas, table.better, program, tuning, options)
            return 0
        program.check_unused()
        tuned, changes = tuning.split()
        base = options.plain_base(name, [*typed, *changes])
        all_arms = arms_of([*(texts or ARMS.split(",")), *arm], base, alphas)

        def define(base: Recipe, options: StudyOptions) -> tuple[Study, Tuner | None]:
            study = make_study(StudyKind.COMPARE, base, {} if tuned else all_arms, options, tuning)
            tuner = tuning.prepare(study, all_arms, tuned) if tuned else None
            return tuner.study if tuner else study, tuner

        study, tuner = define(base, options)
        given = {*parse_overrides([*typed, *changes]), *(tuner.space.keys if tuner else ())}
        base, prepared = options.prepare(study, tuner, given=given)
        study, tuner = define(base, prepared)
        remarks = prepared.ready.remarks
        _tune_and_run(study, tuner, prepared, prepared.execution(), remarks=remarks)
    except (Interrupted, Declined) as reason:
        return stopped(reason)
    return 0


def make_study(
    kind: StudyKind,
    base: Recipe | CommandProgram,
    arms: Mapping[str, Changes],
    options: StudyOptions,
    tuning: TuneOptions = _TUNE,
) -> Study:
    """Create a study of a recipe or a program, with the seeds and the metric of the options.

    The metric of a program is only known after its first run.
    """
    if isinstance(base, Recipe):
        metric, margin = options.compared()
        program = RecipeProgram.of(base)
    else:
        metric, margin, program = Metric(options.metric or "", True, "", 1.0), 1.0, base
    if tuning.repeats is None:
        design, finals = options.design(), 0
    else:
        try:
            design, finals = Design(parse_runs(tuning.repeats)), options.finals()
        except ValueError as error:
            raise ValueError(f"--repeats: {error}") from None
    return Study(kind, program, arms, design, metric, margin, options.first_seed, finals)


def _tune_and_run(
    study: Study,
    tuner: Tuner | None,
    options: StudyOptions,
    execution: Execution,
    **records: Any,
) -> Results:
    """Run a comparison (tuned once, tuned in every repeat, or not tuned), and report it."""
    if tuner is None:
        return run_and_report(study, options.folder(study), execution, **records)
    folder = options.folder(tuner.study)
    tuner = replace(tuner, study=tuner.study.claim(folder))
    if tuner.study.finals:
        return run_and_report(tuner.study, folder, execution, tuner=tuner, **records)
    study, results = tune_once(tuner, folder, execution)
    show_tuning(results)
    records |= {"tuning": results.tuning, "trials": results.trials}
    return run_and_report(study, folder, execution, **records)


def _compare_program(
    command: Sequence[str],
    texts: Sequence[str],
    alphas: Sequence[float],
    better: str | None,
    given: ProgramOptions,
    tuning: TuneOptions,
    options: StudyOptions,
) -> Results:
    """Compare the arms of a user's program."""
    tuned, changes = tuning.split()
    if changes:
        raise ValueError(
            "Expected --tune with several values or a range, such as lr=0.1,0.2, but got "
            f"{changes[0]!r}."
        )
    _check_tune_metric(given.tune_metric, options.metric, bool(tuned))
    # A program has no keys that could be chosen to fit into the time.
    budget = math.inf if options.budget is None else parse_budget(options.budget)
    deadline = time.monotonic() + budget
    sources = Sources.parse(
        given.metric_regex, given.metric_file, options.metric, given.tune_metric
    )
    keys = [part.partition("=")[0] for text in tuned for part in text.rpartition(": ")[2].split()]
    program = CommandProgram.of(command, sources, head=given.head, tuned=dict.fromkeys(keys))
    if given.agc is not None and not given.agc > 0:
        raise ValueError(f"Expected `--agc` to be above 0, but got {given.agc:g}.")
    arms = command_arms(texts, alphas, agc=given.agc)
    study = make_study(StudyKind.COMPARE, program, arms, options, tuning)
    usual = [name for name in sources.names if name != given.tune_metric]
    known = options.metric or (usual[0] if len(usual) == 1 else None)
    if known is not None:  # raises before any run if an option is missing
        guess_metric(known, [100.0], margin=options.margin, better=better)
    tuner = None
    if tuned:
        assert given.tune_metric is not None
        judging = guess_metric(given.tune_metric, [], margin=1.0, better=None)
        tuner = tuning.prepare(study, arms, tuned, judging)
        study = tuner.study
    elif names := [n for n in placeholders(command) if n not in OWN]:
        raise ValueError(
            f"Expected --tune for {names[0]!r}, because the command has {{{names[0]}}}, but got "
            "none."
        )
    folder = options.free_folder(study)
    execution = options.execution(program)
    with execution.queue(folder, study) as queue:
        execution = replace(execution, opened=queue)
        first = run_first(study, tuner, folder, execution)
        queue.deadline = deadline  # only now, because the time of a run must be known
        if any("--head-lr-scale" in changes for changes in arms.values()):
            exponent = head_exponent(first.optimizers)
            arms = command_arms(texts, alphas, exponent=exponent, agc=given.agc)
        metric = first.metric(known, usual=usual, margin=options.margin, better=better)
        study = replace(study, arms=arms, metric=metric, margin=metric.margin)
        tuner = replace(tuner, study=study) if tuner else None
        print(announce(study, tuner, first.seconds, execution.workers), file=sys.stderr)
        records = {"repeated": first.repeated}
        return _tune_and_run(study, tuner, options, execution, **records)


def _check_tune_metric(name: str | None, compared: str | None, is_tuned: bool) -> None:
    if is_tuned and name is None:
        raise ValueError(
            "Expected --tune-metric, the metric by which values are chosen, but got none; it must "
            "be computed on validation data and differ from --metric, because test data must not "
            "be used to choose."
        )
    if not is_tuned and name is not None:
        raise ValueError(f"Expected --tune-metric only with --tune, but got {name!r}.")
    if name is not None and (compared is None or compared == name):
        got = "none" if compared is None else f"{compared!r} for both"
        raise ValueError(
            "Expected --metric to be given and to differ from --tune-metric, because the compared "
            f"metric must not be used to choose, but got {got}."
        )


def show_tuning(results: Results) -> None:
    """Print the chosen values of each arm."""
    if results.tuning is not None:
        for arm in results.tuning.arms:
            print(results.tuning.describe(arm))


def sweep(
    recipe: RecipeName = None,
    *overrides: Overrides,
    grid: Annotated[tuple[str, ...], Parameter(negative="")] = ("alpha=1,0.75,0.5,0.25,0.1,0.05",),
    options: StudyOptions = _OPTIONS,
) -> int:
    """Run a grid over alpha, or over any other key, with several seeds.

    Args:
        recipe: The name of a recipe, or a YAML file. The default depends on data.name: images for
            folder:PATH, otherwise the recipe with the name of the data, or digits.
        overrides: Overrides of the recipe, for all points.
        grid: A key and its values, such as alpha=1,0.5,0.25; may be repeated. All other points
            are compared with the first.
        options: The options of every study; --seeds is 8 by default.
    """
    name, typed = options.recipe(recipe, overrides, sweep)
    if options.keys:
        return show_keys(load_recipe(name, parse_overrides(typed)))
    points = parse_grid(grid)
    has_seeds = options.seeds is not None
    options = options if options.seeds else replace(options, seeds="8")
    base = options.base(name, typed)
    study = make_study(StudyKind.SWEEP, base, points.arms(), options)
    given = {*parse_overrides(typed), *points.values}
    try:
        base, prepared = options.prepare(study, given=given, seeds_given=has_seeds)
        study = make_study(StudyKind.SWEEP, base, points.arms(), prepared)
        records = {"grid": points, "remarks": prepared.ready.remarks}
        run_and_report(study, prepared.folder(study), prepared.execution(), **records)
    except (Interrupted, Declined) as reason:
        return stopped(reason)
    return 0


def decompose(
    recipe: RecipeName = None,
    *overrides: Overrides,
    alpha: float = 0.25,
    tuning: TuneOptions = _TUNE,
    options: StudyOptions = _OPTIONS,
) -> int:
    """Find out which part of PGT makes a difference, by the equivalent two-group training.

    Cross-entropy is tuned once, and its settings are used for every arm.

    Args:
        recipe: The name of a recipe, or a YAML file. The default depends on data.name: images for
            folder:PATH, otherwise the recipe with the name of the data, or digits.
        overrides: Overrides of the recipe, for all arms.
        alpha: The alpha of PGT.
        tuning: The tuning of cross-entropy; lr by default, `--tune none` for no tuning.
        options: The options of every study.
    """
    name, typed = options.recipe(recipe, overrides, decompose)
    if options.keys:
        return show_keys(load_recipe(name, parse_overrides(typed)))
    texts = tuning.tune or ("lr",)
    tuning = replace(tuning, tune=() if texts == ("none",) else texts)
    if tuning.repeats is not None:
        raise ValueError(
            f"Expected no --repeats, because decompose tunes cross-entropy once, but got "
            f"{tuning.repeats!r}."
        )
    tuned, changes = tuning.split()
    base = options.plain_base(name, [*typed, *changes])
    study = make_study(StudyKind.DECOMPOSE, base, decomposition(base, alpha), options)
    records: dict[str, Any] = {}

    def prepare_tuner(base: Recipe) -> Tuner:
        return tuning.prepare(make_study(StudyKind.TUNE, base, {}, options), {"CE": {}}, tuned)

    try:
        tuner = prepare_tuner(base) if tuned else None
        given = {*parse_overrides([*typed, *changes]), *(tuner.space.keys if tuner else ())}
        base, prepared = options.prepare(study, tuner, given=given)
        study = make_study(StudyKind.DECOMPOSE, base, decomposition(base, alpha), prepared)
        folder = prepared.folder(study)
        if tuned:
            tuner = prepare_tuner(base)
            chosen, results = tune_once(tuner, folder, prepared.execution())
            show_tuning(results)
            records = {"tuning": results.tuning, "trials": results.trials}
            base = base.override(chosen.settings("CE"))
            study = make_study(StudyKind.DECOMPOSE, base, decomposition(base, alpha), prepared)
            folder = folder / "arms"
        gaps = check_identity(base, alpha)
        print(describe_identity(gaps))
        checked = Decomposition(alpha, gaps)
        records |= {"decomposition": checked, "remarks": prepared.ready.remarks}
        run_and_report(study, folder, prepared.execution(), **records)
    except (Interrupted, Declined) as reason:
        return stopped(reason)
    return 0


def run_and_report(
    study: Study,
    folder: Path,
    execution: Execution,
    *,
    tuner: Tuner | None = None,
    **records: Any,
) -> Results:
    """Run a study, save it and write its page after every look, and print its verdict.

    Args:
        study: The study.
        folder: The folder of the study.
        execution: The execution options.
        tuner: Tunes every repeat, if the study has repeats.
        records: ``tuning``, ``trials``, ``grid``, ``decomposition``, ``repeated`` and ``remarks``
            for :class:`Results`.
    """
    page = folder / "report.html"

    def save(results: Results) -> None:
        write_text(folder / "study.csv", results.to_csv())
        if results.comparable() is results:
            results.save(folder)
            write_report([results], page)

    execution = replace(execution, saved=save)
    results = run_study(study, folder, execution, tuner=tuner, **records)
    has_metric = all(
        len(results.values(arm)) == sum(not row.failed for row in results.of_arm(arm))
        for arm in results.arms
    )
    if results.comparable() is None and has_metric:  # one arm, or one run each
        show_tuning(results)
        show_runs(results)
        return results
    try:
        results.save(folder)
    except ValueError:  # a run does not have the metric; the page shows which
        write_report([results], page)
        raise
    from powergrad.lab.figures import draw_study

    draw_study(results, folder / "study.png", f"{folder.name}: {len(results.rows)} runs")
    write_report([results], page)
    if results.has_repeats:
        show_tuning(results)
    show_results(results)
    if results.decomposition is not None:
        print(explain_decomposition(results, results.decomposition.alpha))
    print(
        f"\nThe page is {page}; study.csv, study.json, study.png and the runs are in the same "
        "folder."
    )
    return results
