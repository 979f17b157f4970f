"""Fingerprints: equal for equal data, wherever they are; different where they were changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from photos import write_photos

from powergrad.lab.data import fingerprint, sets
from powergrad.lab.jobs import RecipeProgram
from powergrad.lab.stats import Design
from powergrad.lab.study import Study, StudyKind
from powergrad.lab.trainer.recipe import Data, Recipe
from powergrad_cli import main


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_photos(tmp_path / "photos", train=12, val=4)


def prints(root: Path | str, **options: Any) -> list[str]:
    config = Data(name=f"folder:{root}", **options)
    kinds: list[dict[str, Any]] = [{}, {"times": False}, {"contents": True}]
    return [fingerprint(config, **kind) for kind in kinds]


def test_a_fingerprint_follows_the_files_and_not_the_path(photos: Path, tmp_path: Path):
    before = prints(photos)
    assert [text.partition(":")[0] for text in before] == ["times", "sizes", "contents"]
    assert prints(os.path.relpath(photos)) == prints(f"{photos}/") == before
    assert prints(photos, hold_out=0.2, limit=3, size=9) == before  # the same images
    (photos / "val" / "notes.txt").write_text("not an image")
    assert prints(photos) == before
    copy = Path(shutil.copytree(photos, tmp_path / "copy"))
    assert prints(copy) == before
    program = (
        "import sys; from powergrad.lab.trainer.recipe import Data; from powergrad.lab.data import "
        "fingerprint; print(fingerprint(Data(name='folder:' + sys.argv[1])))"
    )
    command = [sys.executable, "-c", program, str(photos)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed.strip() == before[0]


def test_a_fingerprint_differs_where_the_data_do(photos: Path):
    before = prints(photos)
    path = photos / "val" / "b" / "013.jpg"
    content, status = path.read_bytes(), path.stat()

    def same() -> list[bool]:
        return [a == b for a, b in zip(prints(photos), before, strict=True)]

    os.utime(path, ns=(0, status.st_mtime_ns + 1))
    assert same() == [False, True, True]
    path.write_bytes(content[:-1] + b"\0")
    os.utime(path, ns=(0, status.st_mtime_ns))
    assert same() == [True, True, False]
    path.write_bytes(content + b"\0")
    assert same() == [False, False, False]
    path.write_bytes(content)
    os.utime(path, ns=(0, status.st_mtime_ns))
    assert same() == [True, True, True]
    path.rename(path.with_name("014.jpeg"))
    assert same() == [False, False, False]


def test_fingerprints_of_stored_sets(tmp_path: Path):
    assert fingerprint(Data(name="digits")) == fingerprint(Data(), contents=True) == "digits:1"
    for name in sets.FASHION_FILES:
        (tmp_path / name).write_bytes(name.encode())
    file = tmp_path / sets.FASHION_FILES[0]
    config = Data(name="fashion-mnist")
    before = [fingerprint(config, str(tmp_path), contents=c) for c in (False, True)]
    assert [text.partition(":")[0] for text in before] == ["sizes", "contents"]
    os.utime(file, ns=(0, 0))
    assert fingerprint(config, str(tmp_path)) == before[0]
    file.write_bytes(file.name.upper().encode())
    assert fingerprint(config, str(tmp_path)) == before[0]
    assert fingerprint(config, str(tmp_path), contents=True) != before[1]
    with pytest.raises(ValueError, match="but got 'mnist'"):
        fingerprint(Data(name="mnist"))
    with pytest.raises(FileNotFoundError, match="none at 'nowhere'"):
        fingerprint(Data(name="folder:nowhere"))


def program(photos: Path, **machine: Any) -> RecipeProgram:
    changes = {"data.name": f"folder:{photos}", "data.size": 8, "model.width": 8}
    machine = {f"machine.{key}": value for key, value in machine.items()}
    return RecipeProgram.of(Recipe().override({**changes, **machine}))


def test_runs_of_changed_images_are_other_runs(photos: Path):
    before = program(photos).job("pgt", {}, 0).name
    assert program(photos).job("pgt", {}, 0).name == before
    os.utime(next(photos.glob("train/*/*.jpg")), (1, 1))
    assert program(photos).job("pgt", {}, 0).name != before
    by_size = program(photos, fingerprint="sizes").job("pgt", {}, 0).name
    os.utime(next(photos.glob("train/*/*.jpg")), (2, 2))
    assert program(photos, fingerprint="sizes").job("pgt", {}, 0).name == by_size
    with pytest.raises(FileNotFoundError, match="Expected a folder"):
        program(photos / "missing")


def test_a_study_says_that_its_images_changed_and_keeps_the_old_results(photos: Path, capsys: Any):
    def study() -> Study:
        arms = {"baseline": {}, "pgt": {"loss.alpha": 0.3}}
        return Study(StudyKind.COMPARE, program(photos), arms, Design((2,)))

    folder = photos.parent / "study"
    first = study().claim(folder)
    (folder / "study.json").write_text("{}")
    assert study().claim(folder) == first
    assert capsys.readouterr().err == ""
    os.utime(next(photos.glob("train/*/*.jpg")), (1, 1))
    again = study().claim(folder)
    assert "changed since the runs in" in capsys.readouterr().err
    assert {job.name for job in again.jobs().values()}.isdisjoint(
        job.name for job in first.jobs().values()
    )
    assert [path.name for path in folder.glob("study-*.json")]  # nothing is lost
    assert not (folder / "study.json").exists()
    assert Study.load(folder).program == again.program


@pytest.mark.studies
def test_training_again_on_changed_images_starts_anew(photos: Path, capsys: Any):
    tokens = [f"--data.name=folder:{photos}", "--data.size=8", "--model.width=8"]
    tokens += ["--train.epochs=1", "--train.batch_size=4", "--schedule.warmup_epochs=0"]
    command = ["train", "images", *tokens, "--folder", str(photos.parent / "run")]
    assert main(command) == 0
    assert main(command) == 0
    assert "is finished" in capsys.readouterr().out
    os.utime(next(photos.glob("train/*/*.jpg")), (1, 1))
    assert main(command) == 0
    told = capsys.readouterr().out
    assert "The images have changed since the run in" in told
    assert "is finished" not in told
    assert len(list(photos.parent.glob("run*/result.json"))) == 2
