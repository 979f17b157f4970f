"""``powergrad paper``: list, show, run and draw the table rows and figures of the paper."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter
from rich.console import Console

from powergrad.lab.cli.common import Declined, Flag, Overrides, show_keys, stopped
from powergrad.lab.cli.studies import (
    StudyOptions,
    TuneOptions,
    make_study,
    run_and_report,
    show_tuning,
)
from powergrad.lab.environment import command_line
from powergrad.lab.paper.collect import collect, record_runs
from powergrad.lab.paper.cost import cost
from powergrad.lab.paper.evidence import Evidence, MissingRunsError, small_command
from powergrad.lab.paper.full import full_conditions, full_recipes
from powergrad.lab.paper.rows import Experiment, Row, Use, load_paper
from powergrad.lab.paper.show import hours_in_words, item_in_words, paper_table
from powergrad.lab.paper.small import DATA, plan_replica
from powergrad.lab.signals import Interrupted
from powergrad.lab.study import StudyKind
from powergrad.lab.study.execute import tune_once
from powergrad.lab.trainer.progress import Progress
from powergrad.lab.trainer.recipe import Recipe, parse_overrides
from powergrad.lab.trainer.training import train
from powergrad.lab.words import slug

app = App(name="paper", help="List, show, run and draw the table rows and figures of the paper.")

RESULTS = Path("results")
_OPTIONS = StudyOptions()
_TUNE = TuneOptions()


@app.command(name="list", sort_key=0)
def list_items(*, results: Path = RESULTS) -> int:
    """List every table row and figure: its id, published numbers, and measured results.

    The id in brackets stands for all rows that are compared with each other; it is an item, too.

    Args:
        results: The folder of measured results.
    """
    Console(width=None if sys.stdout.isatty() else 150).print(paper_table(Evidence(results)))
    return 0


@app.command(sort_key=1)
def show(item: str, *, data: str = "folder:/path/to/imagenet", results: Path = RESULTS) -> int:
    """Show one item: recipe, published numbers, commands, cost and open questions.

    Args:
        item: An id from `powergrad paper list`.
        data: The location of ImageNet, for the commands.
        results: The folder of measured results.
    """
    print(item_in_words(item, data, Evidence(results)))
    return 0


# Running ------------------------------------------------------------------------------------------


@app.command(sort_key=2)
def run(
    item: Annotated[str | None, Parameter(show_default=False)] = None,
    *overrides: Overrides,
    data: str | None = None,
    scale: Literal["full", "small"] = "full",
    arm: str | None = None,
    as_published: Annotated[bool, Flag] = False,
    only_plan: Annotated[bool, Parameter(name="--plan", negative="")] = False,
    keep: Annotated[bool, Parameter(name="--collect", negative="")] = False,
    results: Path = RESULTS,
    tuning: TuneOptions = _TUNE,
    options: StudyOptions = _OPTIONS,
) -> int:
    """Train an item as in the paper, or scaled down, over several seeds and with a verdict.

    At full scale, the rows of the item are trained once, with the first seed. With --scale small,
    the row that they are compared with is trained too, and all use --seeds seeds. The same command
    continues an interrupted one.

    Args:
        item: An id from `powergrad paper list`.
        overrides: Overrides of the recipe, for all arms.
        data: At full scale, folder:PATH of ImageNet. With --scale small, digits (the default),
            fashion-mnist, cifar10 or folder:PATH.
        scale: full or small.
        arm: Only this arm of the item.
        as_published: Train with the authors' hook instead of the equation, in float16.
        only_plan: Only print what would be done.
        keep: Store the data for figures and tables in --results.
        results: The folder of measured results.
        tuning: With --scale small, the tuning of the arms.
        options: The options of every study; --seeds is 8 by default.
    """
    if options.keys:
        return show_keys(Recipe())
    if item is None:
        raise ValueError(
            "Expected an item of the paper (an id from `powergrad paper list`), but got none."
        )
    if options.budget is not None:
        raise ValueError(
            "Expected no --budget for an item of the paper, whose replica has a fixed length, but "
            f"got {options.budget!r}."
        )
    experiment = load_paper().find(item)
    is_small = scale == "small"
    rows = experiment.with_baseline(item) if is_small else experiment.own_rows(item)
    arms = [row.arm for row in rows]
    if arm is not None and arm not in arms:
        raise ValueError(
            f"Expected --arm to be an arm of {item} ({', '.join(arms)}), but got {arm!r}."
        )
    if arm is not None:
        kept = (arm, experiment.baseline.arm) if is_small else (arm,)
        rows = [row for row in rows if row.arm in kept]
    if data is not None and data not in DATA and not data.startswith("folder:"):
        raise ValueError(
            "Expected --data to be digits, fashion-mnist, cifar10 or folder:PATH, but got "
            f"{data!r}."
        )
    changes = parse_overrides(overrides)
    if as_published:
        precision = changes.setdefault("train.precision", "float16")
        if precision != "float16":
            raise ValueError(
                "Expected train.precision to be float16 with --as-published, the only precision in "
                f"which the authors' hook was used, but got {precision!r}."
            )
        changes["loss.form"] = "as_published"
    if tuning.repeats is not None:
        raise ValueError(
            "Expected no --repeats for an item of the paper, whose arms are tuned once, but got "
            f"{tuning.repeats!r}."
        )
    wanted = _Wanted(item, experiment, rows, data, changes)
    try:
        if is_small:
            folder = _run_small(wanted, tuning, options, only_plan)
        else:
            _check_full(wanted, tuning, options)
            folder = _run_full(wanted, options, only_plan)
    except (Interrupted, Declined) as reason:
        return stopped(reason)
    if keep and not only_plan and _is_first_process():
        return collect_runs(folder, results=results, label=options.name)
    return 0


@dataclass(frozen=True)
class _Wanted:
    """The rows of an item to train, with the data and the overrides of the recipe."""

    item: str
    experiment: Experiment
    rows: Sequence[Row]
    data: str | None
    changes: Mapping[str, Any]


def _is_first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _check_full(wanted: _Wanted, tuning: TuneOptions, options: StudyOptions) -> None:
    """Refuse options that only a study has, and missing data."""
    names = ("seeds", "metric", "margin", "workers", "threads", "storage", "reuse", "fresh")
    given = {
        f"--{name.replace('_', '-')}": (getattr(group, name), getattr(default, name))
        for group, default, keys in (
            (tuning, _TUNE, ("tune", "trials", "tune_seeds", "tune_map")),
            (options, _OPTIONS, names),
        )
        for name in keys
    }
    for name, (value, default) in given.items():
        if value != default:
            raise ValueError(
                f"Expected {name} only with --scale small, but got {value!r} at full scale, where "
                "every row is trained once (--first-seed)."
            )
    rows = wanted.rows
    if wanted.data is None and rows[0].recipe.data.name != "cifar10":
        raise ValueError(
            f"Expected --data folder:PATH of ImageNet, to train {wanted.item} at full scale, or "
            "--scale small, but got neither."
        )
    if len(rows) > 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        arms = ", ".join(row.arm for row in rows)
        raise ValueError(f"Expected --arm under torchrun, one of {arms}, but got none.")


def _run_full(wanted: _Wanted, options: StudyOptions, only_plan: bool) -> Path:
    """Train every row once; return the folder of the runs."""
    experiment, rows, seed = wanted.experiment, wanted.rows, options.first_seed
    recipes = full_recipes(rows, wanted.data, wanted.changes, seed)
    folder = options.out / (options.name or f"paper-{experiment.id}")
    names = {row.arm: f"{slug(row.arm)}-seed{seed}" for row in rows}
    for row in rows:
        hours = [f"{part.hours:.0f} on {part.gpu}" for part in cost(recipes[row.arm])]
        cost_text = f" (GPU hours: {', '.join(hours)})" if hours else ""
        print(f"{row.id} {row.arm}: {folder / names[row.arm]}{cost_text}")
    if only_plan:
        return folder
    if _is_first_process():
        runs = {name: (arm, seed) for arm, name in names.items()}
        record_runs(folder, experiment, full_conditions(rows, recipes, command_line()), runs)
    for arm, recipe in recipes.items():
        with Progress() as progress:
            train(recipe, folder / names[arm], progress=progress)
    return folder


def _run_small(
    wanted: _Wanted, tuning: TuneOptions, options: StudyOptions, only_plan: bool
) -> Path:
    """Run the replica of some rows as a study; return its folder."""
    experiment, rows, data = wanted.experiment, wanted.rows, wanted.data or "digits"
    tuned, more = tuning.split()
    changes = {"machine.threads": options.threads, **wanted.changes, **parse_overrides(more)}
    replica = plan_replica(experiment, rows, data, changes)
    print(f"{wanted.item}, scaled down: {experiment.title}\n{replica.describe()}")
    options = options if options.seeds else replace(options, seeds="8")
    study = make_study(StudyKind.PAPER, replica.base, replica.arms, options)
    tuner = tuning.prepare(study, replica.arms, tuned) if tuned else None
    label = slug(data.rpartition("/")[2])
    folder = options.out / (options.name or f"paper-{experiment.id}-{label}")
    print(f"{len(rows)} arms x {study.design} seeds, in {folder}")
    if only_plan:
        return folder
    _, options = replace(options, name=folder.name).prepare(tuner.study if tuner else study, tuner)
    records: dict[str, Any] = {}
    if tuner is not None:
        study, results = tune_once(tuner, folder, options.execution())
        show_tuning(results)
        records = {"tuning": results.tuning, "trials": results.trials}
        replica = replace(replica, arms={arm: study.settings(arm) for arm in study.arms})
    runs = {job.name: arm_and_seed for arm_and_seed, job in study.jobs().items()}
    conditions = replica.conditions(command_line(), records.get("tuning"))
    record_runs(folder, experiment, conditions, runs)
    run_and_report(study, folder, options.execution(), **records)
    return folder


# Figures and status -------------------------------------------------------------------------------


@app.command(sort_key=3)
def figure(item: str, *, out: Path, formats: str = "png,svg,pdf", results: Path = RESULTS) -> int:
    """Draw one figure, or all figures, as PNG, SVG and PDF.

    Args:
        item: The id or name of a figure, or all.
        out: The folder for the files.
        formats: The formats, separated by commas.
        results: The folder of measured results.
    """
    from powergrad.lab.paper.draw import FORMATS, draw

    kinds = formats.split(",")
    if not set(kinds) <= set(FORMATS):
        raise ValueError(f"Expected --formats among {', '.join(FORMATS)}, but got {formats!r}.")
    paper, evidence = load_paper(), Evidence(results)
    chosen = paper.figure(item)
    if chosen is None and item != "all":
        names = ", ".join(drawn.name for drawn in paper.figures)
        raise ValueError(f"Expected the id or name of a figure ({names}), but got {item!r}.")
    wanted = paper.figures if chosen is None else (chosen,)
    failed = 0
    for drawn in wanted:
        title = f"{drawn.id} {drawn.name}"
        missing = evidence.missing(drawn.uses)
        try:
            if not missing:
                print(f"{title}: {draw(drawn, evidence, out, kinds)[0]}")
                continue
            print(f"{title}: not drawn; missing: {', '.join(map(str, missing))}")
        except MissingRunsError as reason:
            print(f"{title}: not drawn. {reason}")
        failed += 1
        for command in dict.fromkeys(map(small_command, missing)):
            print(f"    {command}")
    if failed:
        print(f"{failed} of {len(wanted)} figures lack runs; run the commands above first.")
    return 1 if failed else 0


@app.command(sort_key=4)
def status(*, results: Path = RESULTS) -> int:
    """Show what was measured, what is missing, and the commands to measure it.

    Args:
        results: The folder of measured results.
    """
    paper, evidence = load_paper(), Evidence(results)
    items = paper.items()
    left = [
        item
        for item, experiment in items
        if evidence.missing(Use(experiment.id, row.arm) for row in experiment.own_rows(item))
    ]
    drawable = [drawn for drawn in paper.figures if not evidence.missing(drawn.uses)]
    print(f"Rows, runs and grids measured: {len(items) - len(left)} of {len(items)}")
    for study in evidence.measurements:
        print(f"  {study.name}: {len(study.results.rows)} runs, {study.describe()}")
    print(f"Figures that can be drawn: {len(drawable)} of {len(paper.figures)}")
    if left:
        print("Not measured, with the command for the small scale:")
        for item in left:
            print(f"  {item}: powergrad paper run {item} --scale small --collect")
    print(
        f"GPU hours for everything at full scale, each run once: {hours_in_words()} (the last is "
        "for CIFAR-10, the others for ImageNet)"
    )
    return 0


@app.command(name="collect", sort_key=5)
def collect_runs(folder: Path, *, results: Path = RESULTS, label: str | None = None) -> int:
    """Store the data of finished runs that figures and tables need.

    Args:
        folder: A folder that `powergrad paper run` created.
        results: The folder of measured results.
        label: A label to distinguish studies of the same rows; by default the name of the data.
    """
    for file in collect(folder, results / "paper", label):
        print(f"wrote {file}")
    return 0
