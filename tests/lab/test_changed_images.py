"""Runs and studies notice that their images have changed."""

import os
from pathlib import Path
from typing import Any

import pytest

from powergrad.lab.runs.recipes import RecipeProgram
from powergrad.lab.stats import Design
from powergrad.lab.study import Study
from powergrad.lab.study.saving import claim, load_study
from powergrad.lab.trainer.recipe import Recipe
from powergrad.lab.trainer.run_folder import RunError
from powergrad.lab.trainer.training import train
from powergrad_cli import main


def recipe(photos: Path, **changes: Any) -> Recipe:
    changes |= {"data.name": f"folder:{photos}", "data.size": 8, "model.width": 8}
    changes |= {"train.epochs": 1, "train.batch_size": 4, "schedule.warmup_epochs": 0}
    return Recipe().override(changes)


def touch(photos: Path, when: int) -> None:
    os.utime(next(photos.glob("train/*/*.jpg")), (when, when))


def test_study_of_changed_images_says_so_and_keeps_the_old_results(photos, capsys):
    def study() -> Study:
        arms = {"baseline": {}, "pgt": {"loss.alpha": 0.3}}
        return Study("compare", RecipeProgram.of(recipe(photos)), arms, Design((2,)))

    folder = photos.parent / "study"
    sizes = recipe(photos, **{"machine.fingerprint": "sizes"})
    by_sizes = RecipeProgram.of(sizes).job("pgt", {}, 0).name
    first = claim(study(), folder)
    before = (folder / "study.json").read_bytes()
    assert claim(study(), folder) == first
    assert capsys.readouterr().err == ""
    touch(photos, 1)
    assert RecipeProgram.of(sizes).job("pgt", {}, 0).name == by_sizes
    again = claim(study(), folder)
    told = capsys.readouterr().err
    assert str(folder) in told
    assert "images" in told
    names = [{job.name for job in each.jobs().values()} for each in (first, again)]
    assert not names[0] & names[1]
    (kept,) = folder.glob("study-*.json")
    assert kept.read_bytes() == before  # nothing is lost
    stored: Any = load_study(folder).study
    assert stored.program == again.program.public()


@pytest.mark.studies
def test_training_on_changed_images_starts_anew(photos, capsys):
    tokens = [f"--data.name=folder:{photos}", "--data.size=8", "--model.width=8"]
    tokens += ["--train.epochs=1", "--train.batch_size=4", "--schedule.warmup_epochs=0"]
    folder = photos.parent / "run"
    command = ["train", "images", *tokens, "--folder", str(folder)]
    train(recipe(photos), photos.parent / "other")
    assert main(command) == 0
    assert main(command) == 0
    assert "is finished" in capsys.readouterr().out
    touch(photos, 1)
    with pytest.raises(RunError, match="other"):
        train(recipe(photos), photos.parent / "other")
    assert main(command) == 0
    assert str(folder) in capsys.readouterr().err
    assert len(list(photos.parent.glob("run*/result.json"))) == 2
