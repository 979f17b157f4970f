"""``powergrad train`` and ``powergrad export``: one network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from powergrad.lab.cli.common import (
    Flag,
    Overrides,
    RecipeName,
    put_aside,
    recipe_and_overrides,
    show_keys,
)
from powergrad.lab.preflight import check_recipe
from powergrad.lab.trainer.progress import Progress
from powergrad.lab.trainer.recipe import header, load_recipe, parse_overrides, recipe_names
from powergrad.lab.trainer.run_folder import Run
from powergrad.lab.words import slug


def train(
    recipe: RecipeName = None,
    *overrides: Overrides,
    out: Path = Path("runs"),
    folder: Path | None = None,
    resume: Annotated[bool, Flag] = False,
    fresh: Annotated[bool, Flag] = False,
    processes: int = 1,
    parallel: Literal["ddp", "fsdp"] | None = None,
    list_recipes: Annotated[bool, Parameter(name="--list", negative="")] = False,
    keys: Annotated[bool, Flag] = False,
) -> int:
    """Train one network from a recipe.

    The folder of the run is named after its recipe, so the same command continues an interrupted
    run, and does nothing if it is finished. If the loss becomes infinite or NaN, the run stops and
    is reported as diverged. This is a result, so the exit code is 0.

    Args:
        recipe: The name of a recipe, or a YAML file.
        overrides: Overrides of the recipe.
        out: The folder in which the run's folder is created.
        folder: The folder of the run itself.
        resume: Only continue an existing run; fail if there is none.
        fresh: Do not reuse an earlier start; its folder is renamed.
        processes: The number of processes on this machine, started by torchrun.
        parallel: How several processes train: ddp, with copies of the network, or fsdp, with
            shards of it and of its checkpoints. A run is resumed with any number of processes.
        list_recipes: List the recipes with their descriptions.
        keys: List every key of the recipe, with its meaning, allowed values and default.
    """
    if list_recipes:
        for name in recipe_names():
            print(name, *(f"    {line}" for line in header(name).splitlines()), sep="\n")
        return 0
    if recipe is None and not keys:
        raise ValueError("Expected a recipe (see --list) or overrides (see --keys), but got none.")
    name, typed = recipe_and_overrides(recipe, overrides, train)
    changes = parse_overrides(typed) | ({"machine.parallel": parallel} if parallel else {})
    if (Path(name) / "config.yaml").is_file():
        run = Run(name)
        chosen = run.recipe().override(changes)
    else:
        chosen = load_recipe(name, changes)
        title = f"{chosen.data.title}-{chosen.model.name}-seed{chosen.seed}"
        run = Run(folder or out / f"{slug(title)}-{chosen.key}")
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
    data = chosen.folder_fingerprint()
    if run.environment().get("data", data) != data:
        put_aside(run.folder, "The images have changed since")
    result = run.result()
    if result is not None:
        run.check_recipe(chosen)
        print(f"{run.folder} is finished{': it diverged' if result.about['diverged'] else ''}.")
        return 0
    if not run.exists() and "RANK" not in os.environ:
        check_recipe(chosen)
    from powergrad.lab.trainer.training import train as run_recipe  # imports torch, which is slow

    with Progress() as progress:
        run_recipe(chosen, run.folder, progress=progress)
    if chosen.machine.parallel == "fsdp" and "RANK" in os.environ:
        # FSDP2 holds the group of processes to the end of the interpreter, where a thread of gloo
        # that is still alive sometimes aborts it (in 1 of 12 runs with torch 2.13).
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0


def _launch(processes: int, arguments: list[str]) -> int:
    """Run the same command in several processes with torchrun."""
    pairs = zip(["", *arguments], arguments, strict=False)  # with the argument before each
    rest = [a for b, a in pairs if b != "--processes" and a.partition("=")[0] != "--processes"]
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
    """Export a trained network for deployment, with a calibrated head and a model card.

    Args:
        source: The folder of a finished run, or one of its weight files.
        out: The folder to write; by default export/ in the folder of the run.
        formats: The formats to write, separated by commas: safetensors, torch (torch.export), onnx.
        temperature: The temperature to fold into the head: alpha (for 1/alpha), fitted (on images
            not used for training), none, or a number.
        data_dir: The folder of the data files, if it differs from the recipe.
        force: Replace an existing export.
    """
    from powergrad.lab.trainer.export import export_run  # imports torch, which is slow

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
        f"The temperature {exported.temperature:.4g} is folded into the head. The exported softmax "
        f"has NLL {after['nll']:.4f} and ECE {after['ece_width']:.4f} (before: "
        f"{before['nll']:.4f} and {before['ece_width']:.4f})."
    )
    return 0
