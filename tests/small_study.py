"""A small study for the tests of the page: its runs are written, not trained."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from powergrad import FilterMonitor
from powergrad.lab.files import write_json
from powergrad.lab.runs import RecipeProgram
from powergrad.lab.stats import Design
from powergrad.lab.study import Results, RunRow, Study, save
from powergrad.lab.trainer.recipe import Recipe
from powergrad.lab.trainer.run_folder import Result, Run

RECIPE = Recipe().override(
    {"model.width": 4, "train.epochs": 3, "schedule.warmup_epochs": 0, "monitor.every": 1}
)
ARMS: dict[str, dict[str, Any]] = {"baseline": {}, "pgt": {"loss.alpha": 0.25}}
CLASSES = [str(digit) for digit in range(10)]
STEPS = 12


def study_of(arms: dict[str, Any] = ARMS, *looks: int, **options: Any) -> Study:
    """A study with some looks, of the recipe `base` or of a `program`."""
    program = options.pop("program", None) or RecipeProgram(base=options.pop("base", RECIPE))
    return Study(options.pop("kind", "compare"), program, arms, Design(looks or (2,)), **options)


def write_run(folder: Path, recipe: Recipe, accuracy: float, epochs: int = 3) -> Result:
    """The files of a finished run, without outputs of the test set and norms."""
    run = Run(folder)
    row: dict[str, float | None] = {}
    with run.open(recipe):
        run.cut_metrics(0)
        for epoch in range(1, epochs + 1):
            left = math.exp(-5 * epoch / epochs)
            row = {"test_accuracy": accuracy * (1 - left), "train_accuracy": 99 * (1 - left)}
            row |= {"train_loss": 0.1 + 2 * left, "nll": 0.2 + left, "nll_scaled": 0.1 + left}
            row |= {"ece": 0.1, "ece_scaled": 0.05, "logit_norm": accuracy / 4}
            run.add_metrics({"epoch": epoch, "step": 4 * epoch, **row})
        write_json(folder / "classes.json", CLASSES)
        about = {"diverged": False, "classes": 10, "steps": 4 * epochs, "epoch": epochs}
        about |= {"images": [140, 60]}
        result = Result(metrics=row, about={**about, "alpha": recipe.loss.alpha})
        run.finish(result)
    return result


def write_outputs(folder: Path, seed: int) -> None:
    """The logits of a test set, most of them right."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (60,), generator=generator)
    logits = 3 * torch.randn(60, 10, generator=generator)
    logits[torch.arange(60), labels] += 5
    Run(folder).save_weights("test.safetensors", {"logits": logits, "labels": labels})


def write_norms(folder: Path, *, dying: bool) -> None:
    """A recording; if `dying`, filter 0 dies and revives, 1 is born late, and 2 dies for good."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("conv1", nn.Conv2d(1, 4, 3))
    model.add_module("conv2", nn.Conv2d(4, 8, 3))
    weight = model.get_parameter("conv1.weight")
    start = weight.detach().clone()
    with FilterMonitor(model, folder / "norms", every=1) as monitor, torch.no_grad():
        for step in range(STEPS + 1):
            weight.copy_(start)
            if dying:
                weight[0] *= not 4 <= step < 8
                weight[1] *= step >= 6
                weight[2] *= 1 if step < 6 else 1e-12
            monitor.step(step)


def write_study(study: Study, folder: Path, **records: Any) -> Results:
    """A finished study without outputs and norms, saved in `folder`."""
    rows = []
    for place, ((arm, seed), job) in enumerate(study.jobs().items()):
        assert isinstance(study.program, RecipeProgram)
        recipe = study.program.recipe(job.changes, seed)
        result = write_run(folder / job.name, recipe, 80 + 7 * place % 11)
        unit = study.unit_of(seed) if study.finals else None
        rows.append(RunRow(arm=arm, seed=seed, run=job.name, unit=unit, **result.model_dump()))
    environment = {"command": "powergrad compare digits", "torch": torch.__version__}
    results = Results.of(study, rows, folder=folder, environment=environment, **records)
    save(results, folder)
    return results


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two arms and two seeds; in the recording of the first run, filters die."""
    folder = tmp_path_factory.mktemp("studies") / "small"
    for row in write_study(study_of(), folder).rows:
        write_outputs(folder / row.run, row.seed)
        write_norms(folder / row.run, dying=(row.arm, row.seed) == ("baseline", 0))
    return folder


@pytest.fixture
def spoiled(small: Path, tmp_path: Path) -> Path:
    """A copy of the small study, which a test may change."""
    return shutil.copytree(small, tmp_path / "small")


def run_of(study: Path, arm: str, seed: int) -> Path:
    (found,) = study.glob(f"{arm}-seed{seed}-*")
    return found
