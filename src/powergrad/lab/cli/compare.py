"""``powergrad compare``: does a change help?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from cyclopts import Parameter

from powergrad.lab.cli.common import (
    Flag,
    Overrides,
    RecipeName,
    Words,
    recipe_and_overrides,
    refuse,
)
from powergrad.lab.cli.conclude import compare_table, tune_and_run
from powergrad.lab.cli.study_options import (
    ProgramOptions,
    StudyOptions,
    TableOptions,
    TuneOptions,
    answering,
    prepare,
    seconds_of,
)
from powergrad.lab.preflight import Plan, say
from powergrad.lab.runs import CommandProgram, RecipeProgram
from powergrad.lab.runs.sources import Sources
from powergrad.lab.study import Execution, Results
from powergrad.lab.study.arms import Fair, arms_of, command_arms, head_exponent, parse_grid
from powergrad.lab.study.execute import run_first
from powergrad.lab.study.metrics import choose_metric, guess_metric
from powergrad.lab.study.saving import check_folder, reuse_anyway
from powergrad.lab.terminal import Watch
from powergrad.lab.trainer.recipe import parse_overrides, tuned_settings
from powergrad.lab.words import parse_duration

_OPTIONS = StudyOptions()
_TUNE = TuneOptions()
_PROGRAM = ProgramOptions()
_TABLE = TableOptions()
ARMS = "baseline,pgt,head-lr,agc,agc+pgt"
ARMS_OF_PROGRAM = "baseline,pgt"  # possible for every program with a cross-entropy


@answering
def compare(
    recipe: RecipeName = None,
    *overrides: Overrides,
    arms: str | None = None,
    arm: Words = (),
    alpha: str = "0.25",
    untuned: Annotated[bool, Flag] = False,
    command: Annotated[tuple[str, ...], Parameter(negative="", show=False)] = (),
    program: ProgramOptions = _PROGRAM,
    table: TableOptions = _TABLE,
    tuning: TuneOptions = _TUNE,
    options: StudyOptions = _OPTIONS,
) -> Results:
    """Find out whether PGT helps: run several arms over the same seeds and give a verdict.

    For your own program: `powergrad compare [OPTIONS] -- python train.py --seed {seed}`. It runs
    unmodified, once per arm and seed. {seed}, {arm}, {out} (a folder for the run) and every key of
    --tune are replaced by their values; write {{ and }} for braces.

    Starting the same comparison again runs only what is missing.

    Args:
        recipe: The name of a recipe, or a YAML file.
        overrides: Overrides of the recipe.
        arms: The arms, separated by commas; methods can be combined with +. The methods are
            baseline, pgt, pgt-same-rate, gc, agc, label-smoothing, less-decay (alpha times the
            weight decay, without PGT) and head-lr (the learning rates of head and backbone in the
            same ratio as with PGT, without PGT). All others are compared with the first. By default
            baseline,pgt,head-lr,agc,agc+pgt; for your own program baseline,pgt (there,
            label-smoothing is not available), or only baseline with arms of your own.
        arm: One more arm, such as "name: key=value, key=value"; may be repeated. For your own
            program: "name: --flag value", "name: @GIT-REF", "name: VARIABLE=value", "name: --
            COMMAND", or several, such as "name: pgt @GIT-REF VARIABLE=value --flag value".
        alpha: The alpha of pgt, less-decay and head-lr. Several values, separated by commas, give
            one arm each.
        untuned: All arms have the settings of the recipe. Otherwise an arm has those that were
            tuned for it, if the recipe has any and is not changed; and else pgt has the learning
            rate times alpha and the weight decay divided by alpha, which train the backbone as
            without PGT.
        command: The program and its arguments.
        program: Your own program.
        table: The comparison of runs made elsewhere.
        tuning: The tuning of the arms.
        options: The options of every study.
    """
    if table.from_ is not None:
        free = ("metric", "margin", "out", "name", "sigma", "sigma_from", "target", "and_")
        free += ("json", "quiet", "fail_unless")
        kept = replace(_OPTIONS, **{name: getattr(options, name) for name in free})
        rest = (recipe, overrides, arms, arm, alpha, command, program, tuning, options)
        if rest != (None, (), None, (), "0.25", (), _PROGRAM, _TUNE, kept):
            others = "--metric, --margin, --better, --baseline, --columns, --out, --name, --sigma, "
            others += "--sigma-from, --target, --and, --json, --quiet and --fail-unless"
            raise ValueError(f"Expected --from only with {others}, but got options for new runs.")
        return compare_table(table, options)
    refuse(table, ("columns", "baseline"), "--from")
    texts = [name.strip() for name in (arms or "").split(",") if name.strip()]
    alphas = [float(value) for value in parse_grid([f"alpha={alpha}"]).values["loss.alpha"]]
    if command:
        if recipe is not None or overrides:
            recipe_and_overrides(recipe, overrides, compare)  # names a mistyped option
            got = recipe or overrides[0]
            raise ValueError(f"Expected a recipe or a program, but got {got!r} and a program.")
        texts = [*(texts or (["baseline"] if arm else ARMS_OF_PROGRAM.split(","))), *arm]
        return _compare_program(command, texts, alphas, table.better, program, tuning, options)
    refuse(program, vars(program), "your own program (`compare -- COMMAND`)")
    refuse(table, ("better",), "--from or your own program")
    name, typed = recipe_and_overrides(recipe, overrides, compare)
    tuned, changes = tuning.split()
    base, given = options.base(name, [*typed, *changes]), {*parse_overrides([*typed, *changes])}
    is_changed = any(not key.startswith(("machine.", "monitor.")) for key in given)
    fair = Fair(None if is_changed else tuned_settings(name))
    if fair.tuned and not (tuned or options.metric or options.margin):
        options = replace(options, margin=fair.tuned.margin)
    chosen = [*(texts or ARMS.split(",")), *arm]
    all_arms = arms_of(chosen, base, alphas, None if tuned or untuned else fair)
    repeats = tuning.repeats
    study = options.study("compare", RecipeProgram.of(base), all_arms if not tuned else {}, repeats)
    tuner = tuning.tuner(study, all_arms, tuned) if tuned else None
    if untuned:  # another study of the same recipe
        options = replace(options, name=options.name or f"{study.name}-untuned")
    given |= {*(tuner.space.keys if tuner else ()), *(["arms"] if texts or arm else [])}
    with prepare(tuner.study if tuner else study, tuner, options, given) as ready:
        if settings := fair.sentence(ready.study.arms):
            say(settings)
        remarks = [*([settings] if settings else []), *ready.remarks]
        place = ready.folder, ready.execution
        return tune_and_run(ready.study, ready.tuner, *place, remarks=remarks)


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
        wanted = "Expected --tune with several values or a range, such as lr=0.1,0.2"
        raise ValueError(f"{wanted}, but got {changes[0]!r}.")
    _check_tune_metric(given.tune_metric, options.metric, bool(tuned))
    # A program has no keys that could be chosen to fit into the time.
    deadline = time.monotonic() + seconds_of(options.budget)
    wanted = (options.metric, given.tune_metric)
    sources = Sources.parse(given.metric_regex, given.metric_file, *wanted)
    keys = [part.partition("=")[0] for text in tuned for part in text.rpartition(": ")[2].split()]
    if given.agc is not None and not given.agc > 0:
        raise ValueError(f"Expected `--agc` to be above 0, but got {given.agc:g}.")
    if given.reuse_anyway and (tuned or options.fresh):
        got = "--tune" if tuned else "--fresh"
        raise ValueError(f"Expected --reuse-anyway without --tune and --fresh, but got {got}.")
    arms = command_arms(texts, alphas, agc=given.agc)
    program = CommandProgram(
        command=tuple(command),
        sources=sources,
        head=given.head,
        tuned=tuple(dict.fromkeys(keys)),
        seed_env=given.seed_env,
        seed_all=given.seed_all,
        unseeded=given.unseeded,
        timeout=parse_duration(given.timeout, "--timeout") if given.timeout else None,
    ).with_arms(arms)
    usual = [name for name in sources.names if name != given.tune_metric]
    known = options.metric or (usual[0] if len(usual) == 1 else None)
    options = replace(options, metric=known)
    study = options.study("compare", program, arms, tuning.repeats)
    if known is None and usual:
        raise ValueError(f"Expected --metric, one of {', '.join(usual)}, but got none.")
    if known is not None:  # raises before any run if an option is missing
        guess_metric(known, [100.0], margin=options.usual_margin, better=better)
    elif usual:
        choose_metric([dict.fromkeys(usual, 0.0)], None, margin=options.usual_margin, better=better)
    tuner = None
    if given.tune_metric is not None:
        judging = guess_metric(given.tune_metric, [], margin=1.0, better=None)
        tuner = tuning.tuner(study, arms, tuned, judging)
        study = tuner.study
    folder, remarks = options.free_folder(study), []
    check_folder(study, folder)
    with options.pool(folder, program) as pool:
        if given.reuse_anyway:
            known_runs, remarks = reuse_anyway(study, folder)
            pool.known = {**pool.known, **known_runs}
        execution = Execution(pool, Watch)
        first = run_first(study, tuner, execution)
        pool.deadline = deadline  # only now, because the time of a run must be known
        if any("--head-lr-scale" in changes for changes in arms.values()):
            exponent = head_exponent(first[0].about.get("optimizers", []))
            arms = command_arms(texts, alphas, exponent=exponent, agc=given.agc)
        runs = [row.metrics for row in first]
        metric = choose_metric(runs, known, usual, margin=options.usual_margin, better=better)
        if (second := study.question.second) and second.name not in runs[0]:
            wanted = f"Expected --and with one of {', '.join(runs[0])}"
            raise ValueError(f"{wanted}, but got {second.name!r}.")
        study = replace(study, arms=arms, metric=metric, margin=metric.margin)
        tuner = replace(tuner, study=study) if tuner else None
        say(Plan.of(study, tuner, pool.workers).announce(max(run["seconds"] for run in runs)))
        repeated = [] if remarks else first  # earlier code need not give the same number
        return tune_and_run(study, tuner, folder, execution, repeated=repeated, remarks=remarks)


def _check_tune_metric(name: str | None, compared: str | None, is_tuned: bool) -> None:
    rule = "it must be computed on validation data, because test data must not be used to choose"
    if is_tuned and name is None:
        raise ValueError(f"Expected --tune-metric with --tune, but got none; {rule}.")
    if not is_tuned and name is not None:
        raise ValueError(f"Expected --tune-metric only with --tune, but got {name!r}.")
    if name is not None and compared in (None, name):
        got = "none" if compared is None else f"{compared!r} for both"
        raise ValueError(f"Expected --metric to differ from --tune-metric, but got {got}; {rule}.")
