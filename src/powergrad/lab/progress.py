"""How far a run is: a bar in a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from torch import Tensor
from typing_extensions import override

from powergrad.lab.config import Recipe
from powergrad.lab.words import duration

__all__ = ["Bar", "Lines", "Progress", "Silent", "for_terminal"]

Row = Mapping[str, float | None]


class Progress:
    """Told what a run does, in this order."""

    def begin(self, recipe: Recipe, step: int, steps: int, folder: Path) -> None:
        """The run goes from `step` to `steps`."""

    def step(self, step: int, loss: Tensor, lr: float) -> None:
        """A step was done."""

    def epoch(self, row: Row) -> None:
        """An epoch was done."""

    def end(self, row: Row) -> None:
        """The run is finished."""

    def close(self) -> None:
        """Nothing more will be told, whether or not the run is finished."""


class Silent(Progress):
    """Says nothing."""


def _title(recipe: Recipe) -> str:
    alpha = "" if recipe.loss.alpha == 1 else f", alpha {recipe.loss.alpha:g}"
    return f"{recipe.model.name} on {recipe.data.name}{alpha}, seed {recipe.seed}"


def _results(row: Row) -> str:
    parts = [f"epoch {row['epoch']:.0f}", f"train {row['train_accuracy']:.2f}%"]
    if row.get("test_accuracy") is not None:
        parts.append(f"test {row['test_accuracy']:.2f}%")
    parts.append(f"loss {row['train_loss']:.4f}")
    if row.get("dead_units"):
        parts.append(f"{row['dead_units']:.0f} dead")
    return ", ".join(parts)


class _Speed(Progress):
    """Keeps what both kinds of progress show."""

    @override
    def begin(self, recipe: Recipe, step: int, steps: int, folder: Path) -> None:
        self.recipe, self.folder = recipe, folder
        self.first, self.steps = step, steps
        self.began = self.shown = time.monotonic()

    def rate(self, step: int) -> tuple[float, float]:
        """Images a second, and the seconds that are left."""
        each = (time.monotonic() - self.began) / max(step - self.first, 1)
        return self.recipe.train.batch_size / each, each * (self.steps - step)


class Lines(_Speed):
    """A line every so many seconds, for files and pipes.

    Args:
        every: Seconds between lines.
        file: Where they go; standard error by default.
    """

    def __init__(self, every: float = 10.0, file: TextIO | None = None) -> None:
        self.every, self.file = every, file

    def _say(self, text: str) -> None:
        print(text, file=self.file or sys.stderr, flush=True)

    @override
    def begin(self, recipe: Recipe, step: int, steps: int, folder: Path) -> None:
        super().begin(recipe, step, steps, folder)
        doing = f"going on at step {step} of" if step else "steps:"
        self._say(f"{_title(recipe)}; {doing} {steps}; {folder}")

    @override
    def step(self, step: int, loss: Tensor, lr: float) -> None:
        now = time.monotonic()
        if now - self.shown >= self.every:
            self.shown = now
            speed, left = self.rate(step)
            self._say(
                f"step {step}/{self.steps}  loss {float(loss):.4f}  lr {lr:.4g}  "
                f"{speed:.0f} images/s  {duration(left)} left"
            )

    @override
    def epoch(self, row: Row) -> None:
        if row.get("test_accuracy") is not None and time.monotonic() - self.shown >= 1:
            self._say(_results(row))

    @override
    def end(self, row: Row) -> None:
        self._say(f"finished: {_results(row)}, {duration(row['seconds'] or 0)}")


class Bar(_Speed):
    """A bar of rich."""

    @override
    def begin(self, recipe: Recipe, step: int, steps: int, folder: Path) -> None:
        from rich import progress
        from rich.console import Console

        super().begin(recipe, step, steps, folder)
        self.console = Console(stderr=True)
        self.console.print(f"{_title(recipe)}  ->  {folder}", markup=False, highlight=False)
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
    def step(self, step: int, loss: Tensor, lr: float) -> None:
        now = time.monotonic()
        if now - self.shown >= 0.2:
            self.shown = now
            speed, left = self.rate(step)
            text = (
                f"{step}/{self.steps}  loss {float(loss):.3f}  lr {lr:.3g}  {speed:.0f} images/s  "
                f"{duration(left)} left  {self.results}"
            )
            self.bar.update(self.task, completed=step, text=text)

    @override
    def epoch(self, row: Row) -> None:
        self.results = _results(row)

    @override
    def end(self, row: Row) -> None:
        self.close()
        text = f"finished: {_results(row)}, {duration(row['seconds'] or 0)}"
        self.console.print(text, markup=False, highlight=False)

    @override
    def close(self) -> None:
        if hasattr(self, "bar"):
            self.bar.stop()


def for_terminal() -> Progress:
    """A bar where a person looks, lines where not."""
    return Bar() if sys.stderr.isatty() else Lines()
