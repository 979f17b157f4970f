"""Reads a run from its folder for the page."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from safetensors import SafetensorError
from torch import Tensor

from powergrad.lab.trainer.recipe import Recipe
from powergrad.lab.trainer.run_folder import Run, RunError

UNREADABLE = (RunError, ValueError, TypeError, KeyError, OSError, SafetensorError, yaml.YAMLError)

T = TypeVar("T")


def try_read(read: Callable[[], T], otherwise: T, notes: list[str]) -> T:
    """The result of `read`; if it fails, `otherwise`, with a note about the reason."""
    try:
        return read()
    except UNREADABLE as error:
        notes.append(f"A file could not be read: {error}")
        return otherwise


def is_finite(value: Any) -> bool:
    """Whether `value` is a finite number."""
    return isinstance(value, (int, float)) and math.isfinite(value)


@dataclass
class ShownRun:
    """A run on the page.

    Attributes:
        folder: Its folder.
        arm: Its arm.
        seed: Its seed.
        alpha: The alpha at the end.
        status: ``finished``, ``unfinished``, ``diverged``, ``failed`` or ``missing``.
        note: The reason for the status.
        final: Its last metrics.
        rows: Its metrics, one row per epoch.
    """

    folder: Path
    arm: str
    seed: int
    alpha: float
    status: str = "finished"
    note: str = ""
    final: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, float | None]] = field(default_factory=list)

    @classmethod
    def missing(cls, folder: Path, arm: str, seed: int, alpha: float) -> ShownRun:
        """A run that has not been started."""
        return cls(folder, arm, seed, alpha, "missing", "not started")

    @classmethod
    def read(cls, folder: Path, arm: str, recipe: Recipe, notes: list[str]) -> ShownRun:
        """Read the run in `folder`; messages about unreadable files are appended to `notes`."""
        run = Run(folder)
        rows = try_read(run.metrics, [], notes)
        result = try_read(run.result, None, notes)
        final: dict[str, Any] = dict(rows[-1]) if rows else {}
        if result is not None:
            final = {**result.metrics, **result.about}
        alpha = final.get("alpha")
        shown = cls(folder, arm, recipe.seed, recipe.loss.alpha if alpha is None else float(alpha))
        shown.final, shown.rows = final, rows
        epoch = final.get("epoch") or 0
        if result is None:
            shown.status, shown.note = "unfinished", f"at epoch {epoch:g} of {recipe.train.epochs}"
        if final.get("diverged") or not is_finite(final.get("train_loss", 0.0)):
            shown.status, shown.note = "diverged", f"its loss is not finite at epoch {epoch:g}"
        return shown

    def outputs(self, notes: list[str]) -> tuple[Tensor, Tensor] | None:
        """Logits and labels of the test set, if they were stored, are finite and can be read."""
        outputs = try_read(Run(self.folder).test_outputs, None, notes)
        if outputs is None or not bool(outputs["logits"].isfinite().all()):
            return None
        return outputs["logits"], outputs["labels"]
