"""Collects runs into ``results/paper``, from which `evidence` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from powergrad.lab.data import load_data
from powergrad.lab.files import csv_text, write_atomically, write_json, write_text
from powergrad.lab.report.filters import evenly_spaced
from powergrad.lab.study.metrics import COLUMNS
from powergrad.lab.trainer.run_folder import Run, RunError
from powergrad.lab.words import slug
from powergrad.monitor import Recording, census
from reproduction.evidence import file_part
from reproduction.published import Experiment, Use, changes_of, load_paper
from reproduction.replicas import decay_exponent, departures

ABOUT = "paper.json"  # in a folder of runs: the experiment, the scale, and the commands
NORMS_BYTES = 400_000  # the maximal size of the norms of one run, before compression
POINTS = 200  # the maximal number of rows of metrics or norms per run
FATES = ("filters", "died", "came_back")  # counts for runs with recorded norms
CURVE = (
    *("epoch", "step", "lr", "train_loss", "train_accuracy", "test_accuracy", "nll"),
    *("logit_norm", "dead_units", "loss_scale"),
)


def record(folder: Path, experiment: Experiment, scale: str, command: str) -> None:
    """Note in a folder what its runs are; earlier commands are kept."""
    path = folder / ABOUT
    before = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if before.get("experiment", experiment.id) != experiment.id:
        raise RunError(
            f"Expected {str(folder)!r} to hold runs of {experiment.id}, but got those of "
            f"{before['experiment']}."
        )
    commands = list(dict.fromkeys([*before.get("commands", []), command]))
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, {"experiment": experiment.id, "scale": scale, "commands": commands})


def collect(folder: Path, out: Path, label: str | None = None) -> list[Path]:
    """Extract the data for figures and pages from a folder of finished runs."""
    path = folder / ABOUT
    if not path.exists():
        raise RunError(
            f"Expected {str(folder)!r} to be a folder of `python -m reproduction run`, but got no "
            f"{ABOUT} in it."
        )
    about = json.loads(path.read_text("utf-8"))
    experiment = load_paper().find(about["experiment"])
    runs = _finished_runs(folder, experiment)
    if not runs:
        raise RunError(f"Expected finished runs in {str(folder)!r}, but got none.")
    first, *_ = next(iter(runs.values()))
    recipe, machine = first.recipe(), first.environment()
    label = label or file_part(recipe.data.name.rpartition("/")[2])
    stem = out / f"{experiment.id}-{label}"
    out.mkdir(parents=True, exist_ok=True)
    files = [stem.with_name(f"{stem.name}.csv"), stem.with_name(f"{stem.name}.json")]
    rows = [_row(arm, run) for arm, seeds in runs.items() for run in seeds]
    columns = ("arm", "seed", "run", "commit", *COLUMNS, *FATES)
    write_text(files[0], csv_text(columns, rows))
    seed = {"seed": recipe.seed}
    recipes = {arm: seeds[0].recipe().override(seed) for arm, seeds in runs.items()}
    examples = len(load_data(recipe.data, data_dir=recipe.machine.data_dir).train)
    study = folder / "study.json"
    tuning = json.loads(study.read_text("utf-8")).get("tuning") if study.exists() else None
    values = {
        "data": recipe.data.name,
        "examples": examples,
        "scale": about["scale"],
        "exponents": {arm: decay_exponent(own, examples) for arm, own in recipes.items()},
        "lost": [*departures(experiment.row(next(iter(runs))), recipe, examples)],
        "arms": {arm: changes_of(own, recipe) for arm, own in recipes.items()},
        **({"tuning": tuning} if tuning else {}),
        "commands": about["commands"],
        "label": label,
        "recipe": recipe.model_dump(mode="json", exclude={"machine", "seed"}),
        "machine": {key: machine.get(key) for key in ("powergrad", "torch", "processor", "time")},
    }
    write_json(files[1], {"format": 1, "experiment": experiment.id, **values})
    drawn = {use for figure in load_paper().figures for use in figure.uses}
    for arm, seeds in runs.items():
        if Use(experiment.id, arm) in drawn:
            files += _collect_run(seeds[0], f"{stem}--{file_part(arm)}")
    return files


def _finished_runs(folder: Path, experiment: Experiment) -> dict[str, list[Run]]:
    """The finished runs of every arm, in the paper's order, by seed."""
    names = {slug(row.arm): row.arm for row in experiment.rows}
    names["baseline"] = experiment.baseline.arm
    runs: dict[str, list[Run]] = {arm: [] for arm in names.values()}
    for path in folder.glob("*-seed*/result.json"):
        if (arm := path.parent.name.rpartition("-seed")[0]) in names:
            runs[names[arm]].append(Run(path.parent))
    order = [row.arm for row in experiment.rows if runs[row.arm]]
    return {arm: sorted(runs[arm], key=lambda run: run.recipe().seed) for arm in order}


def _row(arm: str, run: Run) -> dict[str, Any]:
    about = {"arm": arm, "seed": run.recipe().seed, "run": run.key}
    commit, result = run.environment().get("commit") or "", run.result()
    ended = {**result.about, **result.metrics} if result else {}
    return {**about, "commit": commit, **ended, **_fates(run)}


def _collect_run(run: Run, stem: str) -> list[Path]:
    tested = [row for row in run.metrics() if row.get("test_accuracy") is not None]
    thinned = [tested[place] for place in evenly_spaced(len(tested), POINTS)]
    files = [Path(f"{stem}.csv")]
    write_text(files[0], csv_text(CURVE, thinned))
    if Recording.exists(run.folder):
        arrays: dict[str, Any] = {**thinned_norms(Recording(run.folder))}
        files.append(Path(f"{stem}.npz"))
        write_atomically(files[-1], lambda file: np.savez_compressed(file, **arrays))
    return files


def _fates(run: Run) -> dict[str, int]:
    """The numbers of filters, of those that died at some time, and of those that came back."""
    if not Recording.exists(run.folder):
        return {}
    columns = Recording(run.folder).columns
    recorded = {column.layer for column in columns if column.quantity == "weight"}
    layers = [layer for layer in census(run.folder).layers if layer.layer in recorded]
    counts = [(layer.units, layer.died, layer.revived) for layer in layers]
    return dict(zip(FATES, map(sum, zip(*counts, strict=True)), strict=True))


def thinned_norms(recording: Recording) -> dict[str, NDArray[Any]]:
    """The norms of the weights of every layer, and of the features, thinned to `NORMS_BYTES`."""
    columns = [c for c in recording.columns if c.quantity in ("weight", "feature")]
    units = sum(column.units for column in columns)
    steps, rows = recording.load()
    keep = evenly_spaced(len(steps), min(POINTS, max(2, NORMS_BYTES // (2 * units))))
    table = rows[keep].numpy()
    names = [column.layer for column in columns if column.quantity == "weight"]
    arrays: dict[str, NDArray[Any]] = {"steps": steps[keep].numpy(), "layers": np.array(names)}
    for column in columns:
        number = names.index(column.layer) + 1
        name = "feature" if column.quantity == "feature" else f"layer{number}"
        # Half precision keeps three digits; norms below 6e-8 become 0.
        with np.errstate(over="ignore"):
            arrays[name] = table[:, column.place].astype(np.float16)
    return arrays
