"""Collects runs into ``results/paper``, from which `evidence` reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from powergrad.lab.files import write_atomically, write_csv, write_json
from powergrad.lab.paper.evidence import FORMAT, Conditions, file_part, read_json
from powergrad.lab.paper.rows import Experiment, Use, load_paper
from powergrad.lab.report.norms import evenly_spaced
from powergrad.lab.study.metrics import COLUMNS
from powergrad.lab.trainer.run_folder import Run, RunError
from powergrad.monitor import Recording, census

ABOUT = "paper.json"  # in a folder of runs: the experiment, and the arm and seed of each run
NORMS_BYTES = 400_000  # the maximal size of the norms of one run, before compression
POINTS = 200  # the maximal number of rows of metrics or norms per run
FATES = ("filters", "died", "came_back")  # counts for runs with recorded norms
CURVE = (
    *("epoch", "step", "lr", "train_loss", "train_accuracy", "test_accuracy", "nll"),
    *("logit_norm", "dead_units", "loss_scale"),
)


def record_runs(
    folder: Path,
    experiment: Experiment,
    conditions: Conditions,
    runs: Mapping[str, tuple[str, int]],
) -> None:
    """Record the runs of an experiment in a folder; earlier entries are kept."""
    path = folder / ABOUT
    before: dict[str, Any] = read_json(path) if path.exists() else {"experiment": experiment.id}
    if before["experiment"] != experiment.id:
        raise RunError(
            f"Expected {str(folder)!r} to hold runs of {experiment.id}, but got those of "
            f"{before['experiment']}."
        )
    values: dict[str, Any] = {
        "format": FORMAT,
        "experiment": experiment.id,
        **conditions.to_dict(),
        "runs": runs,
    }
    for key in {"runs", "exponents", "arms"} & values.keys():
        values[key] = {**before.get(key, {}), **values[key]}
    values["commands"] = list(dict.fromkeys([*before.get("commands", []), *conditions.commands]))
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, values)


def collect(folder: Path, out: Path, label: str | None = None) -> list[Path]:
    """Extract the data for figures and pages from a folder of finished runs."""
    path = folder / ABOUT
    if not path.exists():
        raise RunError(
            f"Expected {str(folder)!r} to be a folder of `powergrad paper run`, but got no {ABOUT} "
            "in it."
        )
    values = read_json(path)
    experiment = load_paper().find(values["experiment"])
    order = [row.arm for row in experiment.rows]
    runs = [
        (arm, seed, Run(folder / name), result)
        for name, (arm, seed) in values.pop("runs").items()
        if (result := Run(folder / name).result()) is not None
    ]
    if not runs:
        raise RunError(f"Expected finished runs in {str(folder)!r}, but got none.")
    runs.sort(key=lambda run: (order.index(run[0]), run[1]))
    label = label or file_part(values["data"].rpartition("/")[2])
    stem = out / f"{experiment.id}-{label}"
    out.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "arm": arm,
            "seed": seed,
            "run": run.key,
            "commit": run.environment().get("commit") or "",
            **result.metrics,
            **result.about,
            **_fates(run),
        }
        for arm, seed, run, result in runs
    ]
    columns = ("arm", "seed", "run", "commit", *COLUMNS, *FATES)
    files = [write_csv(stem.with_name(f"{stem.name}.csv"), columns, rows)]
    first = runs[0][2]
    machine = first.environment()
    values |= {
        "label": label,
        "recipe": first.recipe().model_dump(mode="json", exclude={"machine", "seed"}),
        "machine": {key: machine.get(key) for key in ("powergrad", "torch", "processor", "time")},
    }
    files.append(stem.with_name(f"{stem.name}.json"))
    write_json(files[-1], values)
    drawn = {use for figure in load_paper().figures for use in figure.uses}
    first_runs = {arm: run for arm, _, run, _ in reversed(runs)}
    for arm in order:
        if arm in first_runs and Use(experiment.id, arm) in drawn:
            files += _collect_run(first_runs[arm], f"{stem}--{file_part(arm)}")
    return files


def _collect_run(run: Run, stem: str) -> list[Path]:
    tested = [row for row in run.metrics() if row.get("test_accuracy") is not None]
    thinned = [tested[place] for place in evenly_spaced(len(tested), POINTS)]
    files = [write_csv(Path(f"{stem}.csv"), CURVE, thinned)]
    if Recording.exists(run.folder):
        arrays: dict[str, Any] = {**thinned_norms(Recording(run.folder))}
        files.append(Path(f"{stem}.npz"))
        write_atomically(files[-1], lambda file: np.savez_compressed(file, **arrays))
    return files


def _fates(run: Run) -> dict[str, int]:
    """The numbers of filters, of those that died at some time, and of those that came back."""
    if not Recording.exists(run.folder):
        return {}
    recorded = {layer.name for layer in Recording(run.folder).layers}
    layers = [layer for layer in census(run.folder).layers if layer.layer in recorded]
    return {
        "filters": sum(layer.units for layer in layers),
        "died": sum(layer.died for layer in layers),
        "came_back": sum(layer.revived for layer in layers),
    }


def thinned_norms(recording: Recording) -> dict[str, NDArray[Any]]:
    """The norms of the weights of every layer, and of the features, thinned to `NORMS_BYTES`."""
    columns = [c for c in recording.columns if c.quantity in ("weight", "feature")]
    units = sum(column.count for column in columns)
    steps, rows = zip(*((step, values.numpy()) for step, values in recording), strict=True)
    keep = evenly_spaced(len(steps), min(POINTS, max(2, NORMS_BYTES // (2 * units))))
    table = np.stack(rows)[keep]
    names = [layer.name for layer in recording.layers]
    arrays: dict[str, NDArray[Any]] = {
        "steps": np.array(steps, dtype=np.int64)[keep],
        "layers": np.array(names),
    }
    for column in columns:
        number = names.index(column.layer) + 1
        name = "feature" if column.quantity == "feature" else f"layer{number}"
        # Half precision keeps three digits; norms below 6e-8 become 0.
        with np.errstate(over="ignore"):
            arrays[name] = table[:, column.place].astype(np.float16)
    return arrays
