"""``powergrad train`` and ``powergrad export``: one network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

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
from powergrad.lab.cli.preflight import check_run
from powergrad.lab.config import Recipe, header, load_recipe, parse_overrides, recipe_names
from powergrad.lab.data import folder_fingerprint
from powergrad.lab.export import export_run
from powergrad.lab.progress import for_terminal
from powergrad.lab.run import Run, open_run
from powergrad.lab.signals import Interrupted
from powergrad.lab.train import train as run_recipe
from powergrad.lab.words import slug

__all__ = ["export", "train"]


def train(
    recipe: RecipeName = None,
    *overrides: Overrides,
    out: Path = Path("runs"),
    folder: Path | None = None,
    resume: Annotated[bool, Flag] = False,
    fresh: Annotated[bool, Flag] = False,
    processes: int = 1,
    yes: Annotated[bool, Flag] = False,
    list_recipes: Annotated[bool, Parameter(name="--list", negative="")] = False,
    keys: Annotated[bool, Flag] = False,
) -> int:
    """Train one network as a recipe says.

    The run's folder is named by its recipe, so the same command goes on where an interrupted run
    stopped, and does nothing where it is finished. A run whose loss is no longer finite ends early
    and says that it diverged; that is a result, so the exit code is 0.

    Args:
        recipe: The name of a recipe (see --list), a YAML file, or the folder of a run. Where keys
            are given without it: images for folder:PATH, the recipe of the data's name, or digits.
        overrides: Changes of the recipe.
        out: Where the run's folder is made.
        folder: The run's folder itself.
        resume: Only go on with a run that is there; fail if there is none.
        fresh: Do not reuse what an earlier start left: it is moved aside.
        processes: Train in so many processes on this machine, by torchrun.
        yes: Start without a question, also where the run will take long.
        list_recipes: Show the recipes, and what each is for.
        keys: Show every key of the recipe, with its meaning, allowed values and default.
    """
    if list_recipes:
        for name in recipe_names():
            print(name, *(f"    {line}" for line in header(name).splitlines()), sep="\n")
        return 0
    if recipe is None and not keys:
        raise ValueError("Expected a recipe: its name (see --list), a YAML file, or keys (--keys).")
    name, typed = recipe_and_overrides(recipe, overrides)
    check_options(typed, option_names(train))
    changes = parse_overrides(typed)
    if (Path(name) / "config.yaml").is_file():
        run = open_run(name)
        chosen = run.recipe().override(changes)
    else:
        chosen = load_recipe(name, changes)
        run = Run(folder or out / run_name(chosen))
    if keys:
        return show_keys(chosen)
    if fresh and resume:
        raise ValueError("Expected either --fresh or --resume, but got both.")
    if fresh and "RANK" not in os.environ:
        put_aside(run.folder)
    if resume and not run.exists():
        raise ValueError(f"Expected a run to resume at {str(run.folder)!r}, but got none.")
    if processes > 1:
        return _launch(processes, [token for token in sys.argv[1:] if token != "--fresh"])
    _put_aside(run, folder_fingerprint(chosen))
    result = run.result()
    if result is not None:
        run.check_recipe(chosen)
        print(f"{run.folder} is finished{': it diverged' if result['diverged'] else ''}.")
        return 0
    progress = for_terminal()
    try:
        if not run.exists() and "RANK" not in os.environ:
            check_run(chosen, run.folder, ask=not yes)
        run_recipe(chosen, run.folder, progress=progress)
    except (Interrupted, Declined) as reason:
        progress.close()
        return stopped(reason)
    finally:
        progress.close()
    return 0


def _put_aside(run: Run, data: str) -> None:
    """Move a run of images that were changed since out of the way, and say so."""
    before = run.environment().get("data", data)
    if before != data:
        moved = run.folder.with_name(f"{run.folder.name}-{before.partition(':')[2][:8]}")
        run.folder.rename(moved)
        print(f"The images changed since the run in {run.folder}, which is now {moved}.")


def run_name(recipe: Recipe) -> str:
    """The folder's name of a recipe's run: readable, and ending in its key."""
    words = f"{recipe.data.title}-{recipe.model.name}-seed{recipe.seed}"
    return f"{slug(words)}-{recipe.key}"


def _launch(processes: int, arguments: list[str]) -> int:
    """The same command in several processes of torchrun."""
    rest = []
    tokens = iter(arguments)
    for token in tokens:
        if token == "--processes":
            next(tokens, None)
        elif not token.startswith("--processes="):
            rest.append(token)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", "-m", "powergrad", *rest]
    return subprocess.run(command).returncode


def export(
    source: Path,
    *,
    out: Path | None = None,
    formats: Annotated[str, Parameter(name="--format")] = "safetensors,torch,onnx",
    temperature: str = "alpha",
    data_dir: str | None = None,
    force: Annotated[bool, Flag] = False,
) -> int:
    """Write a trained network for deployment: its head calibrated, with a model card.

    Args:
        source: The folder of a finished run, or one of its files of weights.
        out: The folder to write; by default export/ in the run's folder.
        formats: Files to write, separated by commas: safetensors, torch (torch.export), onnx.
        temperature: What is folded into the head: alpha (the temperature 1/alpha), fitted (on
            images that were not trained on), none, or a number.
        data_dir: Where the data files are, if not where the recipe says.
        force: Replace an export that is there.
    """
    exported = export_run(
        source,
        out,
        formats=[name.strip() for name in formats.split(",") if name.strip()],
        temperature=temperature,
        force=force,
        data_dir=data_dir,
    )
    before, after = exported.results["1"], exported.results["exported"]
    print(
        f"{exported.folder}: {', '.join(exported.files)}\n"
        f"Temperature {exported.temperature:.4g} is folded into the head: by its own softmax, NLL "
        f"{after['nll']:.4f} and ECE {after['ece_width']:.4f} (as trained, {before['nll']:.4f} and "
        f"{before['ece_width']:.4f})."
    )
    return 0
