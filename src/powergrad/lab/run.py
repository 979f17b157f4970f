"""The run folder: what a training run leaves, written so that a kill at any moment loses nothing.

    config.yaml           the recipe, complete
    environment.json      versions, commit, hardware, command; what it was resumed with
    metrics.csv           a row an epoch
    classes.json          the names of the classes
    norms/                the recording of a FilterMonitor, if asked for
    checkpoint/           step-NNNNNNNNNN.pt, the last two; best.safetensors
    model.safetensors     the final weights (the averaged ones, where there are any)
    test.safetensors      the final logits and labels of the test set
    result.json           the final metrics: the run is finished

A file is written under a temporary name, synced, and renamed: it is there whole, or not at all.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import json
import os
import pickle
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from powergrad.lab.config import Recipe, RecipeError, flatten
from powergrad.lab.environment import command_line, describe_machine  # noqa: F401 (moved)
from powergrad.lab.files import (
    FileError,
    explain_os_error,
    write_atomically,
    write_json,
    write_text,
)
from powergrad.lab.words import slug as plain_name  # noqa: F401 (moved)

__all__ = ["Run", "RunBusyError", "RunError", "open_run"]

FORMAT = 1
KEPT = 2  # checkpoints: the last, and the one before, should the last not be readable

# What metrics.csv has, in order. A cell is empty where nothing was measured.
COLUMNS = (
    "epoch",
    "step",
    "lr",
    "alpha",
    "train_loss",
    "train_accuracy",
    "test_accuracy",
    "test_top5",
    "nll",
    "nll_scaled",
    "ece",
    "ece_scaled",
    "logit_norm",
    "gradient_norm",
    "clip_rate",
    "dead_units",
    "loss_scale",
    "seconds",
    "images_per_second",
)


class RunError(FileError):
    """A run folder that cannot be used, or written; the message says what to do."""


class RunBusyError(RunError):
    """Another process is doing the run."""


class Run:
    """A run's folder.

    Args:
        folder: Where it is, or is to be.

    Example:
        >>> import tempfile
        >>> run = Run(tempfile.mkdtemp() + "/run")
        >>> with run.open(Recipe()):
        ...     run.save_checkpoint({"step": 10}, step=10)
        >>> run.recipe() == Recipe(), run.result() is None
        (True, True)
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.checkpoints = self.folder / "checkpoint"
        self._key: str | None = None

    # What anyone may read ------------------------------------------------------------------------

    def exists(self) -> bool:
        """Whether a run was begun here."""
        return (self.folder / "config.yaml").is_file()

    @property
    def key(self) -> str:
        """The key of the run's recipe."""
        if self._key is None:
            self._key = self.recipe().key
        return self._key

    def recipe(self) -> Recipe:
        """The recipe of the run."""
        path = self.folder / "config.yaml"
        try:
            text = path.read_text(encoding="utf-8")
        except OSError:
            raise RunError(
                f"Expected {str(self.folder)!r} to be a run's folder, but got no config.yaml in it."
            ) from None
        return Recipe.from_yaml(text, str(path))

    def result(self) -> dict[str, Any] | None:
        """The final metrics, or None where the run is not finished."""
        try:
            result = json.loads((self.folder / "result.json").read_text())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise RunError(f"Expected JSON in {self.folder / 'result.json'}: {error}") from None
        if not isinstance(result, dict):
            raise RunError(
                f"Expected a run's metrics in {self.folder / 'result.json'}, but got a "
                f"{type(result).__name__}."
            )
        if result.get("format", 0) > FORMAT:
            raise RunError(
                f"Expected a run of format {FORMAT} or earlier, but got {result['format']} in "
                f"{str(self.folder)!r}; a newer powergrad reads it."
            )
        return result

    def metrics(self) -> list[dict[str, float | None]]:
        """The rows of metrics.csv so far; a last line cut short is left out."""
        path = self.folder / "metrics.csv"
        if not path.exists():
            return []
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1].splitlines()
        return [
            {key: float(cell) if cell else None for key, cell in row.items()}
            for row in csv.DictReader(whole)
        ]

    def environment(self) -> dict[str, Any]:
        """What environment.json holds."""
        path = self.folder / "environment.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def test_outputs(self) -> dict[str, Tensor] | None:
        """The final ``logits`` and ``labels`` of the test set, if they were kept."""
        path = self.folder / "test.safetensors"
        return load_file(path) if path.exists() else None

    # What only the one process that holds the folder does ----------------------------------------

    @contextlib.contextmanager
    def open(self, recipe: Recipe) -> Iterator[Run]:
        """Hold the folder for the run of `recipe`: make it, or go on with what it has.

        Raises:
            RunError: If another process holds it, it holds another run, or cannot be written.
        """
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            lock = open(self.folder / "lock", "a")  # noqa: SIM115 (closed below)
        except OSError as error:
            raise RunError(explain_os_error(error, self.folder)) from error
        with lock:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RunBusyError(
                    f"Expected {str(self.folder)!r} to be free, but another process is running it."
                ) from None
            self._take(recipe)
            yield self

    def check_recipe(self, recipe: Recipe) -> None:
        """Refuse another run than this one.

        Raises:
            RunError: If the folder holds the run of another recipe.
        """
        found = self.recipe()
        if found.key != recipe.key:
            raise RunError(
                f"Expected {str(self.folder)!r} to hold the run of this recipe, but got "
                f"another one's, which differs in {_difference(found, recipe)}."
            )

    def _take(self, recipe: Recipe) -> None:
        for left_over in [*self.folder.glob(".*.tmp"), *self.checkpoints.glob(".*.tmp")]:
            left_over.unlink()
        if self.exists():
            self.check_recipe(recipe)
            environment = self.environment()
            environment.setdefault("resumed", []).append(describe_machine())
        else:
            environment = {"format": FORMAT, "seed": recipe.seed, **describe_machine()}
        write_json(self.folder / "environment.json", environment)
        write_text(self.folder / "config.yaml", recipe.to_yaml())

    def save_classes(self, names: Sequence[str]) -> None:
        """Keep the names of the classes."""
        write_json(self.folder / "classes.json", list(names))

    def save_checkpoint(self, state: Mapping[str, Any], *, step: int) -> None:
        """Keep `state`; of the earlier ones only the last stays."""
        state = {"format": FORMAT, "key": self.key, **state}
        path = self.checkpoints / f"step-{step:010d}.pt"
        write_atomically(path, lambda file: torch.save(state, file))
        for old in self._saved()[KEPT:]:
            old.unlink(missing_ok=True)

    def _saved(self) -> list[Path]:
        return sorted(self.checkpoints.glob("step-*.pt"), reverse=True)

    def load_checkpoint(self) -> dict[str, Any] | None:
        """The last good checkpoint, or None where none was written yet.

        Raises:
            RunError: If there are checkpoints, and none of them can be used.
        """
        faults = []
        for path in self._saved():
            try:
                state = _load(path, self.key)
            except RunError as error:
                faults.append(str(error))
                continue
            for fault in faults:
                warnings.warn(f"{fault} Going on from {path.name}.", stacklevel=2)
            return state
        if faults:
            raise RunError(" ".join(faults) + " No other checkpoint is left.")
        return None

    def save_weights(self, name: str, weights: Mapping[str, Tensor]) -> None:
        """Write tensors as the safetensors file `name` of the folder."""
        plain = {key: value.detach().cpu().contiguous() for key, value in weights.items()}
        write_atomically(self.folder / name, lambda file: file.write(save(plain)))

    def cut_metrics(self, step: int) -> None:
        """Drop the rows after `step`, which are going to be made again."""
        rows = [row for row in self.metrics() if (row["step"] or 0) <= step]
        lines = [",".join(COLUMNS)] + [_line(row) for row in rows]
        write_text(self.folder / "metrics.csv", "".join(f"{line}\n" for line in lines))

    def add_metrics(self, row: Mapping[str, float | None]) -> None:
        """Append a row."""
        try:
            with open(self.folder / "metrics.csv", "a", encoding="utf-8") as file:
                file.write(_line(row) + "\n")
        except OSError as error:
            raise RunError(explain_os_error(error, self.folder / "metrics.csv")) from error

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the final metrics: from now on the run is finished."""
        text = json.dumps(
            {"format": FORMAT, **result}, indent=1
        )  # with NaN, as earlier versions wrote it
        write_text(self.folder / "result.json", text + "\n")


def _line(row: Mapping[str, float | None]) -> str:
    cells = []
    for column in COLUMNS:
        value = row.get(column)
        if value is None:
            cells.append("")
        elif float(value).is_integer() and abs(value) < 1e15:
            cells.append(str(int(value)))
        else:
            cells.append(repr(float(value)))
    return ",".join(cells)


def _load(path: Path, key: str) -> dict[str, Any]:
    """A checkpoint, read without executing anything that is in it."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
        if broken is not None:
            raise RunError(f"Expected {str(path)!r} to be whole, but {broken!r} in it is damaged.")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, zipfile.BadZipFile) as error:
        raise RunError(f"Expected {str(path)!r} to be a checkpoint, but got: {error}.") from None
    except (pickle.UnpicklingError, RuntimeError) as error:
        if isinstance(error, RunError):
            raise
        why = str(error).splitlines()[0]
        raise RunError(
            f"Expected {str(path)!r} to hold tensors and numbers only, but refused: {why}"
        ) from None
    if not isinstance(state, dict) or not {"format", "key", "step"} <= state.keys():
        raise RunError(f"Expected {str(path)!r} to be a checkpoint of a run, but got another file.")
    if state["format"] > FORMAT:
        raise RunError(
            f"Expected a checkpoint of format {FORMAT} or earlier, but got {state['format']} in "
            f"{str(path)!r}; a newer powergrad reads it."
        )
    if state["key"] != key:
        raise RunError(
            f"Expected {str(path)!r} to be of run {key}, but got one of run {state['key']}."
        )
    return state


def _difference(found: Recipe, wanted: Recipe) -> str:
    """The dotted keys in which two recipes differ."""
    there = dict(flatten(found.model_dump(exclude={"machine"})))
    here = dict(flatten(wanted.model_dump(exclude={"machine"})))
    return ", ".join(
        f"{key} ({there[key]} there, {here[key]} here)" for key in here if here[key] != there[key]
    )


def open_run(folder: str | os.PathLike[str]) -> Run:
    """The run in `folder`, which must be there.

    Raises:
        RunError: If there is none.
    """
    run = Run(folder)
    try:
        run.recipe()
    except RecipeError as error:
        raise RunError(str(error)) from None
    return run
