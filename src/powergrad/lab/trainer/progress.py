"""Progress of a run: a bar in a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from torch import Tensor
from typing_extensions import override

from powergrad.lab.trainer.recipe import Recipe
from powergrad.lab.words import duration

Row = Mapping[str, float | None]  # the metrics of an epoch


class Progress:
    """Receives the events of a run. The methods are called in this order."""

    def begin(self, recipe: Recipe, step: int, steps: int, folder: Path) -> None:
        """The run goes from `step` to `steps`."""

    def step(self, step: int, loss: Tensor, lr: float) -> None:
        """A step was done."""

    def epoch(self, row: Row) -> None:
        """An epoch was done."""

    def end(self, row: Row) -> None:
        """The run is finished."""

    def close(self) -> None:
        """No more events follow, whether or not the run is finished."""


class Silent(Progress):
    """Shows nothing."""


class _Text(Progress):
    """Progress as text, at most once per `every` seconds."""

    every: float

    def _print(self, text: str) -> None:
        raise NotImplementedError

    def _show(self, step: int, text: str) -> None:
        raise NotImplementedError

    @override
    def begin(self, recipe: Recipe, step: int, steps: int, folder: Path) -> None:
        self.batch_size, self.first, self.steps = recipe.train.batch_size, step, steps
        self.began = self.shown = time.monotonic()
        alpha = "" if recipe.loss.alpha == 1 else f", alpha {recipe.loss.alpha:g}"
        resumed = f"resuming at step {step} of" if step else "steps:"
        self._print(
            f"{recipe.model.name} on {recipe.data.name}{alpha}, seed {recipe.seed}; {resumed} "
            f"{steps}; {folder}"
        )

    @override
    def step(self, step: int, loss: Tensor, lr: float) -> None:
        now = time.monotonic()
        if now - self.shown < self.every:
            return
        self.shown = now
        seconds = (now - self.began) / max(step - self.first, 1)  # per step
        left = duration(seconds * (self.steps - step))
        self._show(
            step,
            f"step {step}/{self.steps}  loss {float(loss):.4f}  lr {lr:.4g}  "
            f"{self.batch_size / seconds:.0f} images/s  {left} left",
        )

    @override
    def end(self, row: Row) -> None:
        self.close()
        took = duration(row["seconds"] or 0)
        if math.isfinite(row["train_loss"] or 0):
            self._print(f"finished: {_results(row)}, {took}")
        else:
            self._print(
                f"diverged: the loss was not finite in epoch {row['epoch']:.0f} (step "
                f"{row['step']:.0f} of {self.steps}), {took}; the run ends here. To avoid this, "
                "try a lower optimizer.lr, a longer warm-up or clipping."
            )


def _results(row: Row) -> str:
    parts = [f"epoch {row['epoch']:.0f}", f"train {row['train_accuracy']:.2f}%"]
    if row.get("test_accuracy") is not None:
        parts.append(f"test {row['test_accuracy']:.2f}%")
    parts.append(f"loss {row['train_loss']:.4f}")
    if row.get("dead_units"):
        parts.append(f"{row['dead_units']:.0f} dead")
    return ", ".join(parts)


class Lines(_Text):
    """A line every few seconds, for files and pipes."""

    def __init__(self, every: float = 10.0, file: TextIO | None = None) -> None:
        self.every, self.file = every, file

    @override
    def _print(self, text: str) -> None:
        print(text, file=self.file or sys.stderr, flush=True)

    @override
    def _show(self, step: int, text: str) -> None:
        self._print(text)

    @override
    def epoch(self, row: Row) -> None:
        if row.get("test_accuracy") is not None and time.monotonic() - self.shown >= 1:
            self._print(_results(row))


class Bar(_Text):
    """A progress bar of rich."""

    every = 0.2

    @override
    def begin(self, recipe: Recipe, step: int, steps: int, folder: Path) -> None:
        from rich import progress
        from rich.console import Console

        self.console = Console(stderr=True)
        super().begin(recipe, step, steps, folder)
        self.bar: Any = progress.Progress(
            progress.TextColumn("{task.percentage:>3.0f}%"),
            progress.BarColumn(bar_width=24),
            progress.TextColumn("{task.fields[text]}", markup=False),
            console=self.console,
            transient=True,
        )
        self.task = self.bar.add_task("", total=steps, completed=step, text="")
        self.results = ""
        self.bar.start()

    @override
    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)

    @override
    def _show(self, step: int, text: str) -> None:
        self.bar.update(self.task, completed=step, text=f"{text}  {self.results}")

    @override
    def epoch(self, row: Row) -> None:
        self.results = _results(row)

    @override
    def close(self) -> None:
        if hasattr(self, "bar"):
            self.bar.stop()


def for_terminal() -> Progress:
    """A bar if standard error is a terminal, else lines."""
    return Bar() if sys.stderr.isatty() else Lines()
