"""The run folder: the files of a training run, which survive a kill at any moment.

    config.yaml           the complete recipe
    environment.json      versions, commit, hardware and command; again for every resumption
    metrics.csv           one row per epoch
    norms/                the recording of a FilterMonitor, if enabled
    checkpoint/           the last two step-NNNNNNNNNN.pt (shards in the folder beside each, written
                          before it)
    model.safetensors     the final weights
    test.safetensors      the final logits and labels of the test set
    result.json           the final metrics; it exists if the run is finished (see `Result`)

Files are written under a temporary name, synced, and renamed, so they are complete or absent.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import functools
import json
import os
import pickle
import shutil
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from powergrad.lab.environment import describe_machine
from powergrad.lab.files import (
    FileError,
    csv_text,
    explain_os_error,
    write_atomically,
    write_json,
    write_text,
)
from powergrad.lab.trainer.recipe import Recipe, RecipeError, flatten

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 2  # of checkpoints
LOCK = "lock"  # the file that the process of the run locks
KEPT = 2  # checkpoints to keep; the older one is used if the last cannot be read

# The columns of metrics.csv, in order. A cell is empty if nothing was measured.
COLUMNS = (
    *("epoch", "step", "lr", "alpha", "train_loss", "train_accuracy", "test_accuracy", "test_top5"),
    *("nll", "nll_scaled", "ece", "ece_scaled", "logit_norm", "clip_rate", "dead_units"),
    *("loss_scale", "seconds"),
)


class RunError(FileError):
    """A run folder that cannot be used; the message states what to do."""


class RunBusyError(RunError):
    """Another process has locked the folder of the run."""


class Result(BaseModel):
    """The result of a run: the metrics, which can be compared, and everything else."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    metrics: Mapping[str, int | float | None]
    about: dict[str, Any] = {}


class Run:
    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.checkpoints = self.folder / "checkpoint"

    def exists(self) -> bool:
        return (self.folder / "config.yaml").is_file()

    @functools.cached_property
    def key(self) -> str:
        return self.recipe().key

    def recipe(self) -> Recipe:
        path = self.folder / "config.yaml"
        try:
            return Recipe.from_yaml(path.read_text(encoding="utf-8"), str(path))
        except OSError:
            raise RunError(f"{str(self.folder)!r} is no run: it has no config.yaml.") from None
        except RecipeError as error:
            raise RunError(str(error)) from None

    def result(self) -> Result | None:
        """The final metrics, or None if the run is not finished."""
        path = self.folder / "result.json"
        try:
            return Result.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError:
            reason = "was not written by this version of powergrad, or it is damaged"
            raise RunError(f"{str(path)!r} {reason}. Repeat the run in another folder.") from None

    def metrics(self) -> list[dict[str, float | None]]:
        """The rows of metrics.csv so far, without an incomplete last line."""
        path = self.folder / "metrics.csv"
        if not path.exists():
            return []
        complete_lines, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
        return [
            {key: float(cell) if cell else None for key, cell in row.items()}
            for row in csv.DictReader(complete_lines.splitlines())
        ]

    def environment(self) -> dict[str, Any]:
        path = self.folder / "environment.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def test_outputs(self) -> dict[str, Tensor] | None:
        """The final ``logits`` and ``labels`` of the test set, if they were kept."""
        from safetensors.torch import load_file  # imports torch, which is slow

        path = self.folder / "test.safetensors"
        return load_file(path) if path.exists() else None

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Create the folder if missing, and lock it."""
        with _explaining(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = open(self.folder / LOCK, "a")  # noqa: SIM115 (closed below)
        with lock:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                text = f"Another process is using the run folder {str(self.folder)!r}."
                raise RunBusyError(text) from None
            yield

    def clear(self) -> None:
        """Remove the files of an earlier start; the folder must be locked."""
        for path in self.folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()

    @contextlib.contextmanager
    def open(self, recipe: Recipe, data: str = "") -> Iterator[Run]:
        """Lock the folder for the run of `recipe`, to start or resume it."""
        with self.hold():
            with _explaining(self.folder):
                self.checkpoints.mkdir(exist_ok=True)
            for temporary in [*self.folder.glob(".*.tmp"), *self.checkpoints.glob(".*.tmp")]:
                temporary.unlink()
            if self.exists():
                self.check_recipe(recipe)
                environment = self.environment()
                if environment.get("data", data) != data:
                    text = f"The images of the run in {str(self.folder)!r} have changed"
                    raise RunError(f"{text} since it was started. Use another folder.")
                environment.setdefault("resumed", []).append(describe_machine())
            else:
                environment = {"format": FORMAT, "seed": recipe.seed, **describe_machine()}
                environment |= {"data": data} if data else {}
            write_json(self.folder / "environment.json", environment)
            write_text(self.folder / "config.yaml", recipe.to_yaml())
            yield self

    def check_recipe(self, recipe: Recipe) -> None:
        """Check that the folder holds the run of `recipe`."""
        stored = self.recipe()
        if stored.key != recipe.key:
            before, now = (flatten(r.model_dump(exclude={"machine"})) for r in (stored, recipe))
            differences = ", ".join(
                f"{key} ({there} there, {here} here)"
                for (key, there), (_, here) in zip(before, now, strict=True)
                if there != here
            )
            other = f"{str(self.folder)!r} holds the run of another recipe"
            raise RunError(f"{other}, which differs in {differences}.")

    def save_checkpoint(self, state: Mapping[str, Any], *, step: int) -> None:
        """Write a checkpoint and remove all earlier ones except the last."""
        import torch

        state = {"format": FORMAT, "key": self.key, **state}
        path = self.checkpoints / f"step-{step:010d}.pt"
        write_atomically(path, lambda file: torch.save(state, file))
        for old in self._checkpoint_paths()[KEPT:]:
            old.unlink(missing_ok=True)
        kept = {path.stem for path in self._checkpoint_paths()}
        for shards in self.checkpoints.glob("step-*.shards"):
            if shards.stem not in kept:
                shutil.rmtree(shards)

    def shards(self, step: int) -> Path:
        """The folder for the shards of a checkpoint."""
        return self.checkpoints / f"step-{step:010d}.shards"

    def load_checkpoint(self) -> dict[str, Any] | None:
        """The last usable checkpoint, or None if none was written yet."""
        faults = []
        for path in self._checkpoint_paths():
            try:
                state = _load(path, self.key)
                for fault in faults:
                    warnings.warn(f"{fault} Resuming from {path.name}.", stacklevel=2)
                return state
            except RunError as error:
                faults.append(str(error))
        if faults:
            raise RunError(" ".join(faults) + " There is no other checkpoint.")
        return None

    def _checkpoint_paths(self) -> list[Path]:
        """The checkpoints, the latest first."""
        return sorted(self.checkpoints.glob("step-*.pt"), reverse=True)

    def save_weights(self, name: str, weights: Mapping[str, Tensor]) -> None:
        from safetensors.torch import save

        data = save({key: value.detach().cpu().contiguous() for key, value in weights.items()})
        write_atomically(self.folder / name, lambda file: file.write(data))

    def cut_metrics(self, step: int) -> None:
        """Drop the rows after `step`, the step from which the run resumes."""
        rows = [_cells(row) for row in self.metrics() if (row["step"] or 0) <= step]
        write_text(self.folder / "metrics.csv", csv_text(COLUMNS, rows))

    def add_metrics(self, row: Mapping[str, float | None]) -> None:
        path = self.folder / "metrics.csv"
        _, _, line = csv_text(COLUMNS, [_cells(row)]).partition("\n")
        with _explaining(path), open(path, "a", encoding="utf-8") as file:
            file.write(line)

    def finish(self, result: Result) -> None:
        """Write the result, which marks the run as finished."""
        write_text(self.folder / "result.json", result.model_dump_json(indent=1) + "\n")


@contextlib.contextmanager
def _explaining(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(explain_os_error(error, path)) from error


def _cells(row: Mapping[str, float | None]) -> dict[str, float | None]:
    """A row for metrics.csv, with integers instead of whole floats."""
    return {
        key: int(value) if value is not None and value % 1 == 0 and abs(value) < 1e15 else value
        for key, value in row.items()
    }


def _load(path: Path, key: str) -> dict[str, Any]:
    """Load a checkpoint without executing code from it."""
    import torch

    try:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(f"{damaged!r} is damaged")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise RunError(f"{str(path)!r} is not a complete checkpoint: {reason}.") from None
    if not isinstance(state, dict) or (state.get("format"), state.get("key")) != (FORMAT, key):
        raise RunError(f"{str(path)!r} is not a checkpoint of run {key} in format {FORMAT}.")
    return state
