"""The progress of a run on standard error: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich import progress
from rich.console import Console

from powergrad.lab.trainer.recipe import Recipe
from powergrad.lab.words import duration

if TYPE_CHECKING:
    from torch import Tensor

Row = Mapping[str, float | None]  # the metrics of an epoch


class Progress:
    """Shows the events of a run, or nothing if it is `quiet`; a context manager."""

    def __init__(self, *, quiet: bool = False, every: float | None = None) -> None:
        self.console = Console(stderr=True, quiet=quiet)
        has_bar = self.console.is_terminal and not quiet
        self.every = math.inf if quiet else every if every is not None else 0.2 if has_bar else 10.0
        self.results = ""
        self.bar = progress.Progress(
            progress.TextColumn("{task.percentage:>3.0f}%"),
            progress.BarColumn(bar_width=24),
            progress.TextColumn("{task.description}", markup=False),
            console=self.console,
            transient=True,
            disable=not has_bar,
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if not self.bar.disable:
            self.bar.stop()

    def begin(self, recipe: Recipe, step: int, steps: int, folder: Path) -> None:
        """The run goes from `step` to `steps`."""
        self.batch_size, self.first, self.steps = recipe.train.batch_size, step, steps
        self.began = self.shown = time.monotonic()
        alpha = "" if recipe.loss.alpha == 1 else f", alpha {recipe.loss.alpha:g}"
        resumed = f"resuming at step {step} of" if step else "steps:"
        self._print(
            f"{recipe.model.name} on {recipe.data.name}{alpha}, seed {recipe.seed}; {resumed} "
            f"{steps}; {folder}"
        )
        self.task = self.bar.add_task("", total=steps, completed=step)
        self.bar.start()

    def step(self, step: int, loss: Tensor, lr: float) -> None:
        now = time.monotonic()
        if now - self.shown < self.every:
            return
        self.shown = now
        seconds = (now - self.began) / max(step - self.first, 1)  # per step
        text = (
            f"step {step}/{self.steps}  loss {float(loss):.4f}  lr {lr:.4g}  "
            f"{self.batch_size / seconds:.0f} images/s  "
            f"{duration(seconds * (self.steps - step))} left  {self.results}"
        )
        if self.bar.disable:
            self._print(text.rstrip())
        else:
            self.bar.update(self.task, completed=step, description=text)

    def epoch(self, row: Row) -> None:
        parts = [f"epoch {row['epoch']:.0f}", f"train {row['train_accuracy']:.2f}%"]
        if row.get("test_accuracy") is not None:
            parts.append(f"test {row['test_accuracy']:.2f}%")
        parts.append(f"loss {row['train_loss']:.4f}")
        if row.get("dead_units"):
            parts.append(f"{row['dead_units']:.0f} dead")
        self.results = ", ".join(parts)

    def end(self, row: Row) -> None:
        self.__exit__()
        self.epoch(row)
        took = duration(row["seconds"] or 0)
        if math.isfinite(row["train_loss"] or 0):
            self._print(f"finished: {self.results}, {took}")
        else:
            self._print(
                f"diverged: the loss was not finite in epoch {row['epoch']:.0f} (step "
                f"{row['step']:.0f} of {self.steps}), {took}; the run ends here. To avoid this, "
                "try a lower optimizer.lr, a longer warm-up or clipping."
            )

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
