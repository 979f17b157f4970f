"""What was measured, as small files that are kept with the code.

``results/paper/`` has, for a study called LABEL of an experiment:

    EXPERIMENT-LABEL.csv           a row a run: arm, seed, run, commit, final metrics
    EXPERIMENT-LABEL.json          recipe, arms, decay exponents, what is lost, machine, commands
    EXPERIMENT-LABEL--ARM.csv      metrics over the epochs of the arm's first seed  } of the arms
    EXPERIMENT-LABEL--ARM.npz      filter norms over its steps, thinned             } in figures

:func:`collect` makes them from finished run folders; figures and the page read nothing else.
"""

from __future__ import annotations

import csv
import functools
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from powergrad.lab import stats
from powergrad.lab.paper.rows import Experiment, load_paper
from powergrad.lab.run import Run, RunError, write_atomically
from powergrad.lab.study import COLUMNS
from powergrad.monitor import Recording, census

__all__ = [
    "Evidence",
    "Measurement",
    "MissingRunsError",
    "Norms",
    "collect",
    "describe",
    "describe_runs",
    "small_command",
]

FORMAT = 1
ABOUT = "paper.json"  # in a folder of runs: which experiment, and which run is which
NORMS_BYTES = 400_000  # of one run, before compression
POINTS = 200  # rows of one run's metrics or norms at the most
MARGIN = 0.5  # points of accuracy that do not matter
FATES = ("filters", "died", "came_back")  # of the runs that recorded norms
CURVE = (
    *("epoch", "step", "lr", "train_loss", "train_accuracy", "test_accuracy", "nll"),
    *("logit_norm", "dead_units", "loss_scale"),
)


class MissingRunsError(RunError):
    """A figure needs runs that nobody has made here; the message says which command makes them."""


def small_command(use: str) -> str:
    """The command that makes a figure's data at small scale."""
    experiment, _, arm = use.partition("/")
    found = load_paper().find(experiment)
    item = found.row(arm).id if arm else experiment
    return f"powergrad paper run {item} --scale small --collect"


# Folders of runs ----------------------------------------------------------------------------------


def describe(folder: Path, experiment: Experiment, about: Mapping[str, Any]) -> None:
    """Write which experiment a folder of runs belongs to; runs told earlier stay.

    Args:
        folder: The folder that has the runs' folders.
        experiment: The experiment.
        about: ``data``, ``examples``, ``scale``, ``exponents``, ``lost``, ``command`` and ``runs``:
            the name of each run's folder, with its arm and seed.
    """
    path = folder / ABOUT
    before = json.loads(path.read_text()) if path.exists() else {}
    if before and before["experiment"] != experiment.id:
        raise RunError(
            f"Expected {str(folder)!r} to hold runs of {experiment.id}, but got those of "
            f"{before['experiment']}."
        )
    merged = {"format": FORMAT, "experiment": experiment.id, **about}
    for key in ("runs", "exponents"):
        merged[key] = {**before.get(key, {}), **about[key]}
    merged["commands"] = list(dict.fromkeys([*before.get("commands", []), about["command"]]))
    del merged["command"]
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(merged, indent=1).encode() + b"\n"
    write_atomically(path, lambda file: file.write(text))


def collect(folder: Path, out: Path, label: str | None = None) -> list[Path]:
    """Extract from a folder of finished runs what figures and page need.

    Args:
        folder: What ``powergrad paper run`` made.
        out: Where the files go: ``results/paper``.
        label: What tells this study from others of the experiment; by default its data.

    Returns:
        The files written.

    Raises:
        RunError: If the folder has no finished run of an experiment.
    """
    path = folder / ABOUT
    if not path.exists():
        raise RunError(
            f"Expected {str(folder)!r} to be made by `powergrad paper run`, but got no {ABOUT}."
        )
    about = json.loads(path.read_text())
    experiment = load_paper().find(about["experiment"])
    order = {row.arm: place for place, row in enumerate(experiment.rows)}
    runs = []
    for name, (arm, seed) in about.pop("runs").items():
        run = Run(folder / name)
        result = run.result()
        if result is not None:
            runs.append((order[arm], seed, arm, run, result))
    if not runs:
        raise RunError(f"Expected finished runs in {str(folder)!r}, but got none.")
    runs.sort(key=lambda each: each[:2])
    label = label or _slug(about["data"].rpartition("/")[2])
    stem = f"{experiment.id}-{label}"
    out.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "arm": arm,
            "seed": seed,
            "run": run.key,
            "commit": run.environment().get("commit") or "",
            **{key: result.get(key) for key in COLUMNS},
            **_fates(run),
        }
        for _, seed, arm, run, result in runs
    ]
    columns = ("arm", "seed", "run", "commit", *COLUMNS, *FATES)
    files = [_write_csv(out / f"{stem}.csv", columns, rows)]
    first = runs[0][3]
    machine = first.environment()
    about |= {
        "label": label,
        "recipe": first.recipe().model_dump(mode="json", exclude={"machine", "seed"}),
        "machine": {key: machine.get(key) for key in ("powergrad", "torch", "processor", "time")},
    }
    whole = json.dumps(about, indent=1).encode() + b"\n"
    write_atomically(out / f"{stem}.json", lambda file: file.write(whole))
    files.append(out / f"{stem}.json")
    wanted = {use for figure in load_paper().figures for use in figure.uses}
    done: set[str] = set()
    for _, _, arm, run, _ in runs:
        if f"{experiment.id}/{arm}" in wanted and arm not in done:
            done.add(arm)
            files += _collect_run(run, out / f"{stem}--{_slug(arm)}")
    return files


def _collect_run(run: Run, stem: Path) -> list[Path]:
    tested = [row for row in run.metrics() if row.get("test_accuracy") is not None]
    files = [_write_csv(stem.with_name(stem.name + ".csv"), CURVE, _thin(tested, POINTS))]
    if Recording.exists(run.folder):
        target = stem.with_name(stem.name + ".npz")
        arrays = _norms(Recording(run.folder))
        write_atomically(target, lambda file: _save_arrays(file, arrays))
        files.append(target)
    return files


def _fates(run: Run) -> dict[str, int]:
    """How many filters there are, how many died at some time, how many of these came back."""
    if not Recording.exists(run.folder):
        return {}
    found = census(run.folder)
    layers = {layer.name for layer in Recording(run.folder).layers}
    counts = [layer for layer in found.layers if layer.layer in layers]
    return {
        "filters": sum(layer.units for layer in counts),
        "died": sum(layer.died for layer in counts),
        "came_back": sum(layer.revived for layer in counts),
    }


def _save_arrays(file: IO[bytes], arrays: Mapping[str, Any]) -> None:
    np.savez_compressed(file, **arrays)


def _norms(recording: Recording) -> dict[str, NDArray[Any]]:
    """The weights' norms of every layer, and the features', thinned to `NORMS_BYTES`."""
    columns = [each for each in recording.columns if each.quantity in ("weight", "feature")]
    units = sum(column.count for column in columns)
    steps, rows = [], []
    for step, values in recording:
        steps.append(step)
        rows.append(values.numpy())
    keep = _thin(range(len(steps)), min(POINTS, max(2, NORMS_BYTES // (2 * units))))
    table = np.stack(rows)[keep]
    arrays: dict[str, NDArray[Any]] = {
        "steps": np.array(steps, dtype=np.int64)[keep],
        "layers": np.array([layer.name for layer in recording.layers]),
    }
    for column in columns:
        number = next(i for i, each in enumerate(recording.layers) if each.name == column.layer)
        name = "feature" if column.quantity == "feature" else f"layer{number + 1}"
        # Half precision keeps three digits; under 6e-8 a norm is 0.
        with np.errstate(over="ignore"):
            arrays[name] = table[:, column.place].astype(np.float16)
    return arrays


def _thin(values: Sequence[Any], most: int) -> list[Any]:
    """At most so many of the values, evenly, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    places = np.unique(np.linspace(0, len(values) - 1, most).round().astype(int))
    return [values[place] for place in places]


def _write_csv(path: Path, names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Path:
    text = io.StringIO()
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    data = text.getvalue().encode()
    write_atomically(path, lambda file: file.write(data))
    return path


def _slug(text: str) -> str:
    plain = "".join(c if c.isalnum() or c in "._" else "-" for c in text)
    return "-".join(part for part in plain.split("-") if part)


# What is there ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """A study of an experiment.

    Attributes:
        experiment: The experiment.
        about: What its JSON has.
        rows: Its runs.
        stem: Its files' path, without their endings.
    """

    experiment: Experiment
    about: Mapping[str, Any]
    rows: tuple[Mapping[str, Any], ...]
    stem: Path

    @property
    def arms(self) -> list[str]:
        """The arms that have runs, in order."""
        return list(dict.fromkeys(row["arm"] for row in self.rows))

    def values(self, arm: str, metric: str = "test_accuracy") -> dict[int, float]:
        """A metric of every seed of an arm, where it is a number."""
        found = {row["seed"]: row[metric] for row in self.rows if row["arm"] == arm}
        return {seed: value for seed, value in found.items() if math.isfinite(value)}

    def mean(self, arm: str, metric: str = "test_accuracy") -> float:
        """Its mean; NaN where there is none."""
        values = self.values(arm, metric)
        return sum(values.values()) / len(values) if values else math.nan

    def comparison(self, arm: str) -> stats.Comparison | None:
        """An arm against the experiment's first one; None where the seeds are too few.

        Holm's correction is over all arms of the study that can be compared.
        """
        return self._comparisons.get(arm)

    @functools.cached_property
    def _comparisons(self) -> dict[str, stats.Comparison]:
        baseline = self.experiment.rows[0].arm
        values = {arm: self.values(arm) for arm in self.arms}
        values = {arm: found for arm, found in values.items() if len(found) >= 2}
        if baseline not in values or len(values) < 2:
            return {}
        return {each.arm: each for each in stats.compare(values, baseline, margin=MARGIN)}

    @property
    def follows_filters(self) -> bool:
        """Whether it is known what became of the filters."""
        return any(not math.isnan(row["filters"]) for row in self.rows)

    def describe(self, arm: str | None = None) -> str:
        """What it, or one arm of it, was measured on: data, network, steps."""
        steps = (int(row["steps"]) for row in self.rows if arm in (None, row["arm"]))
        return describe_runs(self.about["recipe"], steps)


def describe_runs(recipe: Mapping[str, Any], steps: Iterable[int]) -> str:
    """What runs of a recipe, as JSON has it, were made on: network, data, batch, steps."""
    model, data = recipe["model"], recipe["data"]["name"].rpartition("/")[2]
    data = data.removeprefix("folder:")
    if limit := recipe["data"].get("limit"):
        data = f"{limit:,} images of {data}"
    network = model["name"] + (f" of width {model['width']}" if model["width"] else "")
    network += {"none": " without normalisation", "group": ", group norm"}.get(model["norm"], "")
    lengths = [f"{each:,}" for each in sorted(set(steps))]
    if len(lengths) > 3:  # runs that diverged, each at its own time
        lengths = [f"{lengths[0]} to {lengths[-1]}"]
    batch = recipe["train"]["batch_size"]
    return f"{network} on {data}, batch {batch}, {' or '.join(lengths)} steps"


@dataclass(frozen=True)
class Norms:
    """Filter norms over the steps of a run.

    Attributes:
        steps: ``(points,)``.
        layers: The names of the layers, in order.
        values: ``layer1``, ... and ``feature``: ``(points, units)``.
        caption: Which run it is.
    """

    steps: NDArray[np.int64]
    layers: tuple[str, ...]
    values: Mapping[str, NDArray[np.float32]]
    caption: str

    def dead(self, key: str) -> NDArray[np.bool_] | None:
        """Which units are dead at the end, as the census has it; None where it diverged."""
        first, last = self.values[key][[0, -1]]
        if not np.isfinite(last).all():
            return None
        return last == 0 if key == "feature" else last < 0.01 * first


class Evidence:
    """What ``results/paper`` has.

    Args:
        results: The folder ``results``.
    """

    def __init__(self, results: Path) -> None:
        self.folder = results / "paper"
        self.measurements = [
            _read(path) for path in sorted(self.folder.glob("*.json")) if path.is_file()
        ]

    def of(self, experiment: str) -> list[Measurement]:
        """The studies of an experiment, that of the most examples first."""
        found = [each for each in self.measurements if each.experiment.id == experiment]
        return sorted(found, key=lambda each: (-each.about["examples"], each.about["label"]))

    def best(self, use: str) -> Measurement:
        """The first study that has an experiment's arm, or the whole experiment.

        Raises:
            MissingRunsError: If there is none.
        """
        return self._having(use)[0]

    def curve(self, use: str) -> tuple[dict[str, NDArray[np.float64]], Measurement, str]:
        """The metrics over the epochs of an arm's first seed; its study; which run it is.

        Of several studies it is the one that was tested most often.
        """
        found = [(self._tests(study, use), study) for study in self._having(use)]
        rows, study = max(found, key=lambda each: len(each[0]))
        curve = {name: np.array([_float(row[name]) for row in rows]) for name in CURVE}
        return curve, study, self._caption(study, use)

    def norms(self, use: str) -> Norms:
        """The filter norms of an arm's first seed."""
        return self._norms(self.best(use), use)

    def recordings(self) -> Iterator[tuple[Measurement, str, Norms]]:
        """All filter norms that were kept, with their study and arm."""
        for study in self.measurements:
            for arm in study.arms:
                try:
                    yield study, arm, self._norms(study, f"{study.experiment.id}/{arm}")
                except MissingRunsError:
                    continue

    def _norms(self, study: Measurement, use: str) -> Norms:
        with np.load(self._file(study, use, ".npz"), allow_pickle=False) as file:
            values = {
                name: file[name].astype(np.float32)
                for name in file.files
                if name not in ("steps", "layers")
            }
            layers = tuple(str(name) for name in file["layers"])
            return Norms(file["steps"], layers, values, self._caption(study, use))

    def _having(self, use: str) -> list[Measurement]:
        experiment, _, arm = use.partition("/")
        found = [each for each in self.of(experiment) if not arm or arm in each.arms]
        if not found:
            raise MissingRunsError(
                f"No run of {use} was measured: `{small_command(use)}` makes one."
            )
        return found

    def _tests(self, study: Measurement, use: str) -> list[dict[str, str]]:
        with open(self._file(study, use, ".csv"), encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    def _file(self, study: Measurement, use: str, ending: str) -> Path:
        arm = use.partition("/")[2]
        path = study.stem.with_name(f"{study.stem.name}--{_slug(arm)}{ending}")
        if not path.exists():
            raise MissingRunsError(
                f"No {path.name} in {self.folder}: `{small_command(use)}` makes it."
            )
        return path

    def _caption(self, study: Measurement, use: str) -> str:
        arm = use.partition("/")[2]
        row = next(row for row in study.rows if row["arm"] == arm)
        return f"{study.experiment.row(arm).id} {arm}, seed {row['seed']}, run {row['run']}"


def _read(path: Path) -> Measurement:
    about = json.loads(path.read_text(encoding="utf-8"))
    if about.get("format", 0) > FORMAT:
        raise RunError(
            f"Expected {str(path)!r} to be of format {FORMAT} or earlier, but got "
            f"{about['format']}; a newer powergrad reads it."
        )
    stem = path.with_suffix("")
    with open(stem.with_name(stem.name + ".csv"), encoding="utf-8", newline="") as file:
        rows = tuple(
            {
                **{key: row[key] for key in ("arm", "run", "commit")},
                "seed": int(row["seed"]),
                **{key: _float(row.get(key) or "") for key in (*COLUMNS, *FATES)},
            }
            for row in csv.DictReader(file)
        )
    return Measurement(load_paper().find(about["experiment"]), about, rows, stem)


def _float(cell: str) -> float:
    words = {"": math.nan, "False": 0.0, "True": 1.0}
    return words[cell] if cell in words else float(cell)
