"""``powergrad paper``: list, show, run and draw everything in the paper."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from cyclopts import App

from powergrad.lab.cli import Flag, Overrides, StudyOptions, stopped, tune_arms
from powergrad.lab.config import Recipe, parse_overrides
from powergrad.lab.paper.cost import cost, examples_of, total_hours
from powergrad.lab.paper.evidence import Evidence, Measurement, MissingRunsError, small_command
from powergrad.lab.paper.page import published_words
from powergrad.lab.paper.rows import Experiment, Figure, Row, changes_of, load_paper
from powergrad.lab.paper.studies import told
from powergrad.lab.run import command_line, plain_name
from powergrad.lab.train import Interrupted

app = App(name="paper", help="The paper: list, show, run and draw every table row and figure.")

RESULTS = Path("results")
TUNE_SEEDS = 2
_OPTIONS = StudyOptions()


@app.command(name="list", sort_key=0)
def list_items(*, results: Path = RESULTS) -> int:
    """Every table row and figure: its id, its published numbers, what was measured.

    In brackets is the id of all rows that are compared with each other, which is an item, too.

    Args:
        results: The folder of measured results.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    paper, evidence = load_paper(), Evidence(results)
    table = Table(title=paper.title, title_justify="left")
    for name in ("id", "what", "arm", "published (%)", "measured here: test (%)"):
        table.add_column(name)
    for item, experiment in paper.items():
        for number, row in enumerate(each for each in experiment.rows if each.id == item):
            if experiment.grid and number:
                continue
            arm = f"{len(experiment.grid)} alphas" if experiment.grid else row.arm
            studies = evidence.of(experiment.id)
            measured = "\n".join(
                f"{each.about['label']}: {len(each.rows)} runs"
                if experiment.grid
                else _measured(each, row)
                for each in studies
            )
            group = "" if item == experiment.id else f" ({experiment.id})"
            cells = ("", "") if number else (item, experiment.title + group)
            words = (*cells, arm, published_words(row), measured.strip() or "-")
            table.add_row(*map(Text, words))
    for figure in paper.figures:
        state = _state(evidence, figure)
        table.add_row(figure.id, Text(figure.title), figure.name, "figure", Text(state))
    Console(width=None if sys.stdout.isatty() else 150).print(table)
    return 0


def _measured(study: Measurement, row: Row) -> str:
    """What a study has of a row, in a few words."""
    values = study.values(row.arm)
    if not values:
        return ""
    words = f"{study.about['label']}: {study.mean(row.arm):.2f} (n = {len(values)})"
    compared = study.comparison(row.arm)
    if compared is not None:
        difference, _, verdict = told(compared)
        words += f", {difference.partition(' ')[0]}, {verdict}"
    return words


def _missing(evidence: Evidence, figure: Figure) -> list[str]:
    """The runs that a figure needs and does not have."""
    missing = []
    for use in figure.uses:
        try:
            evidence.best(use)
        except MissingRunsError:
            missing.append(use)
    return missing


def _state(evidence: Evidence, figure: Figure) -> str:
    if not figure.uses:
        return "needs no run"
    missing = _missing(evidence, figure)
    return f"needs {', '.join(missing)}" if missing else "can be drawn"


@app.command(sort_key=1)
def show(item: str, *, data: str = "folder:/path/to/imagenet", results: Path = RESULTS) -> int:
    """Everything about one item: recipe, published numbers, commands, cost, open questions.

    Args:
        item: An id of `powergrad paper list`.
        data: Where ImageNet is, for the commands.
        results: The folder of measured results.
    """
    paper = load_paper()
    figure = paper.figure(item)
    if figure is not None:
        _show_figure(figure, Evidence(results))
    else:
        _show_rows(item, paper.find(item), data, Evidence(results))
    notes, unstated = paper.about(item)
    if notes:
        print("\nWhere the paper disagrees with itself or its code, or leaves a doubt:")
        for note in notes:
            print(f"  - {note.text}")
    if unstated:
        print("\nUnstated in the paper:")
        for each in unstated:
            chosen = ", ".join(f"{key}: {value}" for key, value in each.choice.items())
            print(f"  - {each.what}. {each.reason}" + (f" [{chosen}]" if chosen else ""))
    return 0


def _show_figure(figure: Figure, evidence: Evidence) -> None:
    print(f"{figure.id} {figure.name}: {figure.title}\n")
    print(f"Draw it:\n  powergrad paper figure {figure.name} --out figures")
    if figure.uses:
        print(f"\nIt shows runs of {', '.join(figure.uses)}.")
    for use in _missing(evidence, figure):
        print(f"  missing: {use}\n    {small_command(use)}")


def _show_rows(item: str, experiment: Experiment, data: str, evidence: Evidence) -> None:
    rows = _own_rows(experiment, item)
    print(f"{item} ({experiment.where}): {experiment.title}\n\nPublished (%):")
    for row in rows if not experiment.grid else rows[:1]:
        print(f"  {'all' if experiment.grid else row.arm}: {published_words(row)}")
    base = rows[0].recipe
    whose = f", of {rows[0].arm}" if rows[1:] else ""
    print(f"\nRecipe, as the paper states it{whose}:\n{_indented(rows[0].stated)}")
    if rows[0].chosen:
        print(f"Chosen here, for the paper does not state it:\n{_indented(rows[0].chosen)}")
    if rows[1:]:
        print("What the others change:")
    for row in rows[1:]:
        changes = changes_of(row.recipe, base)
        print(f"  {row.arm}: {', '.join(f'{key}: {value}' for key, value in changes.items())}")
    total = total_hours(row.recipe for row in rows)
    print(f"\nCost of training ({len(rows)} {'run' if len(rows) == 1 else 'runs'}), in GPU hours:")
    for each in cost(base):
        print(f"  {each.gpu}: {total[each.gpu]:.1f}")
        print(f"    at {each.images_per_second:,.0f} images/s: {each.how}\n    {each.source}")
    if not total:
        print("  not known: no published training speed of this network on this data was found")
    where = "" if base.data.name == "cifar10" else f" --data {data}"
    print("\nOn one machine with one GPU:")
    parts = base.train.batch_size // 256
    spread = f" --train.accumulate {parts}" if parts > 1 else ""
    print(f"  powergrad paper run {item}{where}{spread} --machine.workers 8")
    print("\nOn four GPUs, an arm at a time:")
    for row in rows:
        arm = f" --arm {_quoted(row.arm)}" if len(rows) > 1 else ""
        print(
            "  torchrun --standalone --nproc-per-node=4 -m powergrad paper run "
            f"{item}{arm}{where} --machine.workers 8"
        )
    print(f"\nScaled down, on this machine:\n  powergrad paper run {item} --scale small")
    for study in evidence.of(experiment.id):
        print(f"\nMeasured: {study.describe()}")
        for row in rows:
            if words := _measured(study, row):
                print(f"  {row.arm}: {words}")


def _own_rows(experiment: Experiment, item: str) -> list[Row]:
    """The rows of an item, without the one that they are compared with."""
    return [row for row in experiment.rows if item in (row.id, experiment.id)]


def _indented(changes: Mapping[str, Any]) -> str:
    text = yaml.safe_dump(_nested(changes), sort_keys=False)
    return "\n".join(f"  {line}" for line in text.splitlines())


def _nested(changes: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        if name:
            nested.setdefault(section, {}).update(_nested({name: value}))
        else:
            nested[key] = value
    return nested


def _quoted(arm: str) -> str:
    return f"'{arm}'" if " " in arm else arm


# Running ------------------------------------------------------------------------------------------


@app.command(sort_key=2)
def run(
    item: str,
    *overrides: Overrides,
    data: str | None = None,
    scale: Literal["full", "small"] = "full",
    arm: str | None = None,
    as_published: Annotated[bool, Flag] = False,
    tune: str | None = None,
    tune_seeds: int = TUNE_SEEDS,
    plan: Annotated[bool, Flag] = False,
    collect: Annotated[bool, Flag] = False,
    results: Path = RESULTS,
    options: StudyOptions = _OPTIONS,
) -> int:
    """Train an item: as the paper did it, or scaled down, over seeds and with a verdict.

    At full scale the item's own rows are trained, with the first seed. With --scale small the row
    that they are compared with is trained too, all over --seeds seeds. The same command goes on
    where an interrupted one stopped.

    Args:
        item: An id of `powergrad paper list`.
        overrides: Changes of the recipe, for all arms.
        data: Full scale: folder:PATH of ImageNet. Small: digits (the default), fashion-mnist,
            cifar10 or folder:PATH.
        scale: full or small.
        arm: Only this arm of the item.
        as_published: Train with the authors' hook instead of the equation, in float16.
        tune: Small: a key to tune for every arm alike, as lr or lr=0.1,0.2,0.4.
        tune_seeds: Seeds of each value that is tried.
        plan: Only say what would be done.
        collect: Keep what figures and tables need, in --results.
        results: The folder of measured results.
        options: What every study takes.
    """
    from powergrad.lab.paper import evidence

    experiment = load_paper().find(item)
    _check_run(experiment, item, arm, data, scale, tune, tune_seeds, options)
    changes = parse_overrides(overrides)
    if as_published:
        precision = changes.setdefault("train.precision", "float16")
        if precision != "float16":
            raise ValueError(
                "Expected train.precision to be float16 with --as-published, the only one in which "
                f"the authors' hook was run, but got {precision!r}."
            )
        changes["loss.form"] = "as_published"
    command = command_line()
    try:
        if scale == "small":
            folder = _run_small(
                experiment, item, arm, data or "digits", changes, tune, tune_seeds, plan,
                command, options,
            )  # fmt: skip
        else:
            folder = _run_full(experiment, item, arm, data, changes, plan, command, options)
    except Interrupted as reason:
        return stopped(reason)
    if collect and not plan and int(os.environ.get("RANK", "0")) == 0:
        for file in evidence.collect(folder, results / "paper", options.name):
            print(f"wrote {file}")
    return 0


def _check_run(
    experiment: Experiment,
    item: str,
    arm: str | None,
    data: str | None,
    scale: str,
    tune: str | None,
    tune_seeds: int,
    options: StudyOptions,
) -> None:
    from powergrad.lab.compare import check_tune_seeds

    rows = experiment.pick(item) if scale == "small" else _own_rows(experiment, item)
    arms = [row.arm for row in rows]
    if arm is not None and arm not in arms:
        raise ValueError(f"Expected --arm to be of {item} ({', '.join(arms)}), but got {arm!r}.")
    if scale == "full":
        given = {"--tune": tune, "--tune-seeds": None if tune_seeds == TUNE_SEEDS else tune_seeds}
        given |= {
            f"--{name}": getattr(options, name)
            for name in ("seeds", "metric", "margin", "workers", "threads", "storage")
            if getattr(options, name) != getattr(_OPTIONS, name)
        }
        for name, value in given.items():
            if value is not None:
                raise ValueError(
                    f"Expected {name} with --scale small only, but got {value!r} at full scale, "
                    "where every row is trained once (--first-seed)."
                )
    known = (None, "digits", "fashion-mnist", "cifar10")
    if data not in known and not str(data).startswith("folder:"):
        raise ValueError(
            "Expected --data to be digits, fashion-mnist, cifar10 or folder:PATH, but got "
            f"{data!r}."
        )
    check_tune_seeds(tune_seeds)


def _run_full(
    experiment: Experiment,
    item: str,
    arm: str | None,
    data: str | None,
    changes: Mapping[str, Any],
    plan: bool,
    command: str,
    options: StudyOptions,
) -> Path:
    from powergrad.lab.data import load_data
    from powergrad.lab.paper.evidence import describe
    from powergrad.lab.paper.small import decay_exponent
    from powergrad.lab.progress import for_terminal
    from powergrad.lab.train import train

    rows = [row for row in _own_rows(experiment, item) if arm in (None, row.arm)]
    if data is None and rows[0].recipe.data.name != "cifar10":
        raise ValueError(
            f"Expected --data folder:PATH, where ImageNet is, to train {item} at full scale, or "
            "--scale small, but got neither."
        )
    if len(rows) > 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"Expected --arm under torchrun, one of {', '.join(row.arm for row in rows)}."
        )
    given: dict[str, Any] = {} if data is None else {"data.name": data}
    if rows[0].recipe.model.norm == "none":  # what the figures of zeroing out show
        given |= {"monitor.every": 1000, "monitor.features": True}
    seed = options.first_seed
    recipes = [row.recipe.override({**given, "seed": seed, **changes}) for row in rows]
    folder = options.out / (options.name or f"paper-{experiment.id}")
    runs = {
        f"{plain_name(r.arm)}-seed{seed}": (r, recipe)
        for r, recipe in zip(rows, recipes, strict=True)
    }
    for name, (row, recipe) in runs.items():
        hours = ", ".join(f"{each.hours:.0f} on {each.gpu}" for each in cost(recipe))
        print(f"{row.id} {row.arm}: {folder / name}" + (f" (GPU hours: {hours})" if hours else ""))
    if plan:
        return folder
    if int(os.environ.get("RANK", "0")) == 0:
        loaded = load_data(recipes[0].data, data_dir=recipes[0].machine.data_dir)
        examples = len(loaded.train)
        about = {
            "data": recipes[0].data.name,
            "examples": examples,
            "scale": "full",
            "exponents": {
                row.arm: decay_exponent(recipe, examples) for row, recipe in runs.values()
            },
            "lost": _departures(rows[0].recipe, recipes[0], examples),
            "command": command,
            "runs": {name: [row.arm, seed] for name, (row, _) in runs.items()},
        }
        describe(folder, experiment, about)
    for name, (_, recipe) in runs.items():
        progress = for_terminal()
        try:
            train(recipe, folder / name, progress=progress)
        finally:
            progress.close()
    return folder


def _departures(stated: Recipe, recipe: Recipe, examples: int) -> list[str]:
    """In what a run at full scale is not the row's: its data, and what was overridden."""
    lost = []
    if examples != examples_of(stated):
        lost.append(f"the data: {examples:,} examples ({recipe.data.name})")
    free = ("data.name", "seed", "machine.", "monitor.", "train.accumulate")
    changes = changes_of(recipe, stated)
    lost += [f"{key}: {value}" for key, value in changes.items() if not key.startswith(free)]
    return lost


def _run_small(
    experiment: Experiment,
    item: str,
    arm: str | None,
    data: str,
    changes: Mapping[str, Any],
    tune: str | None,
    tune_seeds: int,
    plan: bool,
    command: str,
    options: StudyOptions,
) -> Path:
    from powergrad.lab.compare import tuning_grid
    from powergrad.lab.paper.evidence import describe
    from powergrad.lab.paper.small import plan_replica
    from powergrad.lab.study import Study
    from powergrad.lab.terminal import Watch

    rows = experiment.pick(item)
    if arm is not None:
        rows = tuple(row for row in rows if row is rows[0] or row.arm == arm)
    threads = {"machine.threads": options.threads}
    replica = plan_replica(experiment, rows, data, {**threads, **changes})
    print(f"{item}, scaled down: {experiment.title}\n{replica.describe()}")
    study = Study(
        "paper",
        replica.base,
        replica.arms,
        options.seed_list(len(replica.arms)),
        *options.compared(),
    )
    if tune is not None:
        tuning_grid(study.base, tune)
    label = plain_name(data.rpartition("/")[2])
    folder = options.out / (options.name or f"paper-{experiment.id}-{label}")
    print(f"{len(study.arms)} arms x {len(study.seeds)} seeds, in {folder}")
    if plan:
        return folder
    tuned: dict[str, Any] = {}
    if tune is not None:
        study, tuned["tuning"] = tune_arms(study, tune, tune_seeds, folder, options)
        replica = replace(replica, arms=study.arms)
    with Watch(f"{item} on {data}", study.jobs(), study.metric) as watch:
        found = study.run(folder, workers=options.crew(), storage=options.storage, watch=watch)
    about = {
        "data": data,
        "examples": replica.examples,
        "scale": "small",
        "exponents": replica.exponents,
        "lost": list(replica.lost),
        "command": command,
        "arms": {name: dict(changes) for name, changes in study.arms.items()},
        "runs": {row["run"]: [row["arm"], row["seed"]] for row in found.rows},
        **tuned,
    }
    describe(folder, experiment, about)
    if len(study.arms) > 1 and len(study.seeds) > 1:
        found.save(folder)
        print(found.verdict())
    return folder


# Looking ------------------------------------------------------------------------------------------


@app.command(sort_key=3)
def figure(item: str, *, out: Path, formats: str = "png,svg,pdf", results: Path = RESULTS) -> int:
    """Draw a figure, or all, as PNG, SVG and PDF.

    Args:
        item: The id or name of a figure, or all.
        out: The folder for the files.
        formats: Which of the three, separated by commas.
        results: The folder of measured results.
    """
    from powergrad.lab.paper.draw import FORMATS, draw

    kinds = formats.split(",")
    if not set(kinds) <= set(FORMATS):
        raise ValueError(f"Expected --formats of {', '.join(FORMATS)}, but got {formats!r}.")

    paper, evidence = load_paper(), Evidence(results)
    wanted = paper.figures
    if item != "all":
        found = paper.figure(item)
        if found is None:
            names = ", ".join(each.name for each in paper.figures)
            raise ValueError(f"Expected the id or name of a figure ({names}), but got {item!r}.")
        wanted = (found,)
    missing = 0
    for each in wanted:
        lacking = _missing(evidence, each)
        try:
            if not lacking:
                print(f"{each.id} {each.name}: {draw(each.name, evidence, out, kinds)[0]}")
                continue
            print(f"{each.id} {each.name}: not drawn, for want of {', '.join(lacking)}")
            commands = [small_command(use) for use in lacking]
        except MissingRunsError as reason:
            print(f"{each.id} {each.name}: not drawn. {reason}")
            commands = []
        missing += 1
        for command in dict.fromkeys(commands):
            print(f"    {command}")
    if missing:
        print(f"{missing} of {len(wanted)} figures lack runs; the commands above make them.")
    return 1 if missing else 0


@app.command(sort_key=4)
def status(*, results: Path = RESULTS) -> int:
    """What was measured, what was not, and which command comes next.

    Args:
        results: The folder of measured results.
    """
    paper, evidence = load_paper(), Evidence(results)
    measured, left = [], []
    for item, experiment in paper.items():
        studies = evidence.of(experiment.id)
        arms = {arm for study in studies for arm in study.arms}
        mine = {row.arm for row in _own_rows(experiment, item)}
        (measured if mine <= arms else left).append(item)
    drawn = [each for each in paper.figures if not _missing(evidence, each)]
    print(f"Rows, runs and grids measured: {len(measured)} of {len(measured) + len(left)}")
    for study in evidence.measurements:
        print(f"  {study.stem.name}: {len(study.rows)} runs, {study.describe()}")
    print(f"Figures that can be drawn: {len(drawn)} of {len(paper.figures)}")
    if left:
        print("Not measured, with the command that does it in small:")
        for item in left:
            print(f"  {item}: powergrad paper run {item} --scale small --collect")
    hours = total_hours(row.recipe for each in paper.experiments for row in each.rows)
    words = ", ".join(f"{value:,.0f} on {gpu}" for gpu, value in hours.items())
    print(
        f"All of it at full scale, each run once, in GPU hours: {words} (the last is of the runs "
        "on CIFAR-10, the others of those on ImageNet)"
    )
    return 0


@app.command(name="collect", sort_key=5)
def collect_runs(folder: Path, *, results: Path = RESULTS, label: str | None = None) -> int:
    """Keep what figures and tables need of finished runs.

    Args:
        folder: The folder that `powergrad paper run` made.
        results: The folder of measured results.
        label: What tells this study from others of the same rows; by default its data.
    """
    from powergrad.lab.paper.evidence import collect

    for file in collect(folder, results / "paper", label):
        print(f"wrote {file}")
    return 0


@app.command(sort_key=6)
def page(*, results: Path = RESULTS, out: Path = Path("docs")) -> int:
    """Write the pages of published and measured numbers, and of where PGT does not help.

    Args:
        results: The folder of measured results.
        out: The folder.
    """
    from powergrad.lab.paper.page import write_pages

    for path in write_pages(results, out):
        print(f"wrote {path}")
    return 0
