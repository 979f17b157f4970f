"""``python -m reproduction``: the rows and figures of the paper, and the pages of this repository.

``run`` trains with ``powergrad compare`` (replicas) and ``powergrad train`` (full scale).
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from cyclopts import App, CycloptsError, Parameter
from rich.console import Console

from powergrad.lab.files import FileError, csv_text, write_text
from powergrad.lab.study import load
from powergrad.lab.trainer.recipe import RECIPES, Recipe, parse_overrides, tuned_settings
from powergrad.lab.words import slug
from powergrad_cli import main as powergrad
from reproduction.collection import collect, record
from reproduction.evidence import RESULTS, Evidence, MissingRunsError
from reproduction.published import Experiment, Row, gpu_hours, load_paper
from reproduction.replicas import DATA, full_recipe, plan_replica
from reproduction.show import item_in_words, paper_table

app = App(
    name="python -m reproduction", help="The paper: list, show, run and draw it.", version_flags=()
)

Step = tuple[list[str], Path, Recipe]  # a command of the package, and the recipe that it reads
Tokens = Annotated[str, Parameter(allow_leading_hyphen=True)]


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
def show(item: str, *, results: Path = RESULTS) -> int:
    """Show one item: recipe, published numbers, commands, cost and open questions.

    Args:
        item: An id from `list`.
        results: The folder of measured results.
    """
    print(item_in_words(item, Evidence(results)))
    return 0


# Running ------------------------------------------------------------------------------------------


@app.command(sort_key=2)
def run(
    item: str,
    *tokens: Tokens,
    data: str | None = None,
    scale: Literal["full", "small"] = "full",
    arm: str | None = None,
    only_plan: Annotated[bool, Parameter(name="--plan", negative="")] = False,
    keep: Annotated[bool, Parameter(name="--collect", negative="")] = False,
    out: Path = Path("runs"),
    name: str | None = None,
    results: Path = RESULTS,
) -> int:
    """Train an item as in the paper, or scaled down, over several seeds and with a verdict.

    At full scale, the rows of the item are trained once. With --scale small, the row that they are
    compared with is trained too, with 8 seeds each. The same command continues an interrupted one.

    Args:
        item: An id from `list`.
        tokens: Overrides of the recipe, for all arms, and options of `powergrad compare` (with
            --scale small) or `powergrad train`, such as --seeds 4 and --tune lr=0.1,0.2.
        data: At full scale, folder:PATH of ImageNet. With --scale small, digits (the default),
            fashion-mnist, cifar10 or folder:PATH.
        scale: full or small.
        arm: Only this arm of the item.
        only_plan: Only print what would be done.
        keep: Store the data for figures and tables in --results, also of runs made before.
        out: The folder in which the folder of the runs is created.
        name: The name of the folder of the runs.
        results: The folder of measured results.
    """
    experiment = load_paper().find(item)
    is_small = scale == "small"
    rows = experiment.with_baseline(item) if is_small else experiment.own_rows(item)
    if arm is not None:
        arms = [row.arm for row in rows]
        if arm not in arms:
            known = ", ".join(arms)
            raise ValueError(f"Expected --arm to be an arm of {item} ({known}), but got {arm!r}.")
        chosen = (arm, experiment.baseline.arm) if is_small else (arm,)
        rows = [row for row in rows if row.arm in chosen]
    if data is not None and data not in DATA and not data.startswith("folder:"):
        known = ", ".join(DATA)
        raise ValueError(f"Expected --data to be {known} or folder:PATH, but got {data!r}.")
    changes, options = split_tokens(tokens)
    given = {option.partition("=")[0] for option in options}
    if "--repeats" in given:
        raise ValueError("Expected no --repeats: the arms of a replica are tuned once.")
    if is_small:
        data = data or "digits"
        folder = out / (name or f"paper-{experiment.id}-{slug(data.rpartition('/')[2])}")
        steps = _small_steps(experiment, rows, data, changes, folder)
        options = [*([] if "--seeds" in given else ["--seeds", "8"]), *options]
    else:
        folder = out / (name or f"paper-{experiment.id}")
        steps = _full_steps(rows, data, changes, folder)
    is_first = os.environ.get("RANK", "0") == "0"
    typed = shlex.join(["python", "-m", "reproduction", *sys.argv[1:]])
    for command, path, recipe in steps:
        print(f"powergrad {shlex.join([*command, *options])}")
        if only_plan:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))
        if is_first and folder.exists():  # raises if it has runs of other rows
            record(folder, experiment, scale, typed)
        code = powergrad([*command, *options])
        if is_first and folder.exists():  # a new one, or after --fresh
            record(folder, experiment, scale, typed)
        if code:
            return code
    if keep and is_first and not only_plan:
        for file in collect(folder, results / "paper", name):
            print(f"wrote {file}")
    return 0


def split_tokens(tokens: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Overrides of the recipe, and the options of the command that trains.

    Example:
        >>> split_tokens(["--tune", "lr=0.1,0.2", "model.width=8", "--train.epochs", "2"])
        ({'model.width': 8, 'train.epochs': 2}, ['--tune', 'lr=0.1,0.2'])
    """
    overrides, options = [], list[str]()
    remaining = iter(tokens)
    for token in remaining:
        key, equals, value = token.partition("=")
        is_key = re.fullmatch(r"(--)?\w+(\.\w+)+|--seed", key) is not None
        if not is_key or ("--tune" in options and {",", ":"} & set(value)):
            options.append(token)
        else:
            overrides += [token] if equals else [token, *([next(remaining, "")])]
    return parse_overrides(overrides), options


def _full_steps(
    rows: Sequence[Row], data: str | None, changes: Mapping[str, Any], folder: Path
) -> Iterator[Step]:
    """The commands that train every row once."""
    if data is None and rows[0].recipe.data.name != "cifar10":
        raise ValueError(
            "Expected --data folder:PATH of ImageNet, to train at full scale, or --scale small, "
            "but got neither."
        )
    if len(rows) > 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        arms = ", ".join(row.arm for row in rows)
        raise ValueError(f"Expected --arm under torchrun, one of {arms}, but got none.")
    for row in rows:
        recipe = full_recipe(row, data, changes)
        hours = [f"{value:.0f} on {gpu}" for gpu, value in gpu_hours([recipe]).items()]
        print(f"{row.id} {row.arm}, GPU hours: {', '.join(hours) or 'unknown'}")
        name = f"{slug(row.arm)}-seed{recipe.seed}"
        path = folder / f"{name}.yaml"
        yield ["train", str(path), "--folder", str(folder / name)], path, recipe


def _small_steps(
    experiment: Experiment, rows: Sequence[Row], data: str, changes: Mapping[str, Any], folder: Path
) -> Iterator[Step]:
    """The command that runs the replica of some rows."""
    replica = plan_replica(rows, data, changes)
    print(f"{experiment.id}, scaled down: {experiment.title}\n{replica.describe()}\n")
    path = folder.with_name(f"{folder.name}.yaml")
    command = ["compare", str(path), "--arms", "baseline"]
    for row in rows[1:]:
        settings = ", ".join(f"{key}={value}" for key, value in replica.arms[row.arm].items())
        command += ["--arm", f"{row.arm.replace('=', ' ')}: {settings}"]
    yield [*command, "--out", str(folder.parent), "--name", folder.name], path, replica.base


# Figures and pages ------------------------------------------------------------------------


@app.command(sort_key=3)
def figure(item: str, *, out: Path, formats: str = "png,svg,pdf", results: Path = RESULTS) -> int:
    """Draw one figure, or all figures, as PNG, SVG and PDF.

    Args:
        item: The id or name of a figure, or all.
        out: The folder for the files.
        formats: The formats, separated by commas.
        results: The folder of measured results.
    """
    from reproduction.drawings import FORMATS, draw

    kinds = formats.split(",")
    if not set(kinds) <= set(FORMATS):
        raise ValueError(f"Expected --formats among {', '.join(FORMATS)}, but got {formats!r}.")
    paper, evidence = load_paper(), Evidence(results)
    chosen = paper.figure(item)
    if chosen is None and item != "all":
        names = ", ".join(drawn.name for drawn in paper.figures)
        raise ValueError(f"Expected the id or name of a figure ({names}), but got {item!r}.")
    failed = 0
    for drawn in paper.figures if chosen is None else (chosen,):
        try:
            print(f"{drawn.id} {drawn.name}: {draw(drawn, evidence, out, kinds)[0]}")
        except MissingRunsError as reason:
            failed += 1
            print(f"{drawn.id} {drawn.name}: not drawn; {reason}")
    if failed:
        print(f"{failed} figures lack runs; run the commands above first.")
    return 1 if failed else 0


@app.command(sort_key=7)
def tune(
    recipe: str = "noisy-digits", *tokens: Tokens, out: Path = Path("runs"), results: Path = RESULTS
) -> int:
    """Tune every arm of a recipe with the same budget, on held-out training data.

    The keys, the number of points and of seeds are those of `tuned` in the recipe. The winners are
    written there, and every run into tuned_<recipe>.csv. The same command continues an interrupted
    one.

    Args:
        recipe: The name of a recipe that comes with the package.
        tokens: Options of `powergrad compare`, such as --workers 1.
        out: The folder in which the folder of the runs is created.
        results: The folder of measured results.
    """
    path, plan = Path(str(RECIPES / f"{recipe}.yaml")), tuned_settings(recipe)
    if plan is None:
        raise ValueError(f"Expected a recipe with the key `tuned`, but got {recipe!r}.")
    name = f"tune-{recipe}"
    command = ["compare", recipe, "--untuned", "--alpha", f"{plan.alpha:g}", "--seeds", "1"]
    command += ["--tune", *plan.keys, "--trials", str(plan.trials)]
    command += ["--tune-seeds", str(plan.seeds), "--out", str(out), "--name", name]
    if code := powergrad([*command, *tokens]):
        return code
    found = load(out / name)
    assert found.tuning is not None
    choices = {arm: choice.winner for arm, choice in found.tuning.arms.items()}
    rows = [
        {
            "arm": row.arm,
            **{key: row.settings.get(key, "") for key in found.tuning.keys},
            "seed": row.seed,
            "held_out_accuracy": found.value(row, "test_accuracy"),
            "diverged": row.diverged,
            "chosen": row.settings == choices[row.arm].changes,
            "commit": row.commit,
        }
        for row in found.trials
    ]
    write_text(results / f"tuned_{recipe.replace('-', '_')}.csv", csv_text([*rows[0]], rows))
    tuned = {**plan.model_dump(mode="json"), "arms": {a: c.changes for a, c in choices.items()}}
    text = path.read_text(encoding="utf-8").partition("tuned:\n")[0]
    write_text(path, text + yaml.safe_dump({"tuned": tuned}, sort_keys=False, width=100))
    return 0


@app.command(sort_key=6)
def pages() -> int:
    """Fill the generated parts of README.md and docs/ from results/ (`make pages`)."""
    from reproduction.pages import write_pages

    write_pages()
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 2 where the user must change something."""
    try:
        code = app(arguments, exit_on_error=False, result_action="return_value") or 0
        sys.stdout.flush()
    except CycloptsError:  # already printed
        return 2
    except BrokenPipeError:  # the reader, such as head, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, FileError, OSError) as error:
        print(f"reproduction: {error}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
