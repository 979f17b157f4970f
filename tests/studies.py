"""What the tests of studies share: a small recipe, runs in this process, and made-up runs."""

import contextlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tiny import CHANGES

import powergrad_cli
from powergrad.lab.cli import study_options
from powergrad.lab.files import write_text
from powergrad.lab.runs import RecipeProgram
from powergrad.lab.runs.pool import InlinePool
from powergrad.lab.stats import Design, parse_runs
from powergrad.lab.study import METRICS, Results, RunRow, Study
from powergrad.lab.trainer.recipe import Recipe
from powergrad.lab.trainer.run_folder import Result, Run

SMALL = Recipe().override(CHANGES)
TOKENS = [f"--{key}={json.dumps(value)}" for key, value in CHANGES.items()]
LONG = 240  # seconds; a limit only against hanging


def powergrad(*tokens: object) -> int:
    """The command, in this process."""
    return powergrad_cli.main([str(token) for token in tokens])


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + LONG
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return value


def is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def study_of(base: Recipe, arms: dict[str, Any], seeds: str = "2", **settings: Any) -> Study:
    kind = settings.pop("kind", "compare")
    return Study(kind, RecipeProgram(base=base), arms, Design(parse_runs(seeds)), **settings)


def results_of(values: dict[str, list[float]], **settings: Any) -> Results:
    """Results of accuracies by arm; the seeds are their places."""
    rows = [
        RunRow(arm=arm, seed=seed, metrics={"test_accuracy": value})
        for arm, accuracies in values.items()
        for seed, value in enumerate(accuracies)
    ]
    return Results(METRICS["test_accuracy"], 0.5, next(iter(values)), rows, **settings)


def spread(mean: float, sd: float, n: int = 8, *, step: float = 0.0) -> list[float]:
    """Values with exactly this mean and standard deviation, or close to it in steps."""
    shape = np.linspace(-1, 1, n)
    values = mean + sd * shape / shape.std(ddof=1)
    return [float(np.round(v / step) * step) if step else float(v) for v in values]


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are executed here, one after another; test_pool has the tests of workers."""
    monkeypatch.setattr(study_options, "Pool", InlinePool)


class MadeUpRuns:
    """Runs without training: a folder has the recipe, and a result by `accuracy`."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.accuracy: Callable[[Recipe], float] = lambda recipe: 97 + 0.3 * self.noise(recipe)

    def noise(self, recipe: Recipe) -> float:
        """A standard normal number, another one for every alpha, rate and seed."""
        words = [recipe.seed, *np.array([recipe.loss.alpha, recipe.optimizer.lr]).view(np.uint32)]
        return float(np.random.default_rng(words).standard_normal())

    def execute(self, recipe: Recipe, run: Run) -> Result:
        self.done.append(run.folder.name)
        run.folder.mkdir(parents=True, exist_ok=True)
        write_text(run.folder / "config.yaml", recipe.to_yaml())
        write_text(run.folder / "environment.json", '{"commit": "c0ffee"}')
        accuracy = float(self.accuracy(recipe))
        metrics = {"train_accuracy": 99.0, "test_accuracy": accuracy, "seconds": 1.0}
        about = {"diverged": math.isnan(accuracy), "classes": 10, "steps": 12}
        result = Result(metrics=metrics, about=about)
        run.finish(result)
        return result


@pytest.fixture
def made_up(in_process: None, monkeypatch: pytest.MonkeyPatch) -> MadeUpRuns:
    runs = MadeUpRuns()

    def execute(program: RecipeProgram, job: Any, folder: Path) -> Result:
        run = Run(folder / job.name)
        return run.result() or runs.execute(program.recipe(job.changes, job.seed), run)

    monkeypatch.setattr(RecipeProgram, "execute", execute)
    return runs
