"""What a scan of an image folder finds and says, and its cache."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from photos import write_photos
from PIL import Image

from powergrad.lab.data import load_data, scan
from powergrad.lab.data.scan import Scan, scan_folder
from powergrad.lab.trainer.recipe import Data

# Python 3.12 and later warn of forks beside threads, which is how PyTorch starts its workers.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POWERGRAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_photos(tmp_path / "photos", train=12, val=4)


def look(root: Path, workers: int | None = None, progress: Any = None, **options: Any) -> Scan:
    config = Data(name=f"folder:{root}", **options)
    return scan_folder(config, workers=workers, progress=progress)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


# What is found -----------------------------------------------------------------------------------


def test_a_good_folder_has_no_problems(photos: Path):
    found = look(photos)
    assert (found.train, found.test, found.classes) == (36, 12, ("a", "b", "c"))
    assert (found.problems, found.warnings, found.unreadable) == ([], [], [])
    assert found.formats == {"JPEG": 48}
    sizes = []
    for path in photos.rglob("*.jpg"):
        with Image.open(path) as image:
            sizes.append(image.size)
    for k, spread in enumerate((found.widths, found.heights)):
        values = sorted(size[k] for size in sizes)
        assert spread == (values[0], int(np.median(values)), values[-1])
    assert found.summary() == [
        "36 training images, 12 test images, 3 classes",
        "48 JPEG; 40x40 to 52x46 pixels, median 46x42",
    ]


def spoil(photos: Path) -> None:
    """Everything that may be wrong with a folder and does not stop the scan."""
    cut_short(photos / "train" / "a" / "003.jpg")
    (photos / "train" / "b" / "004.jpg").write_text("<html>not found</html>")
    (photos / "val" / "c" / "013.jpg").write_bytes(b"")
    (photos / "val" / "c" / "lost.jpg").symlink_to("nowhere")
    image = Image.open(photos / "train" / "a" / "001.jpg")
    image.save(photos / "train" / "a" / "one.tif")
    image.save(photos / "train" / "a" / "two.ppm")
    image.save(photos / "train" / "b" / "three.dat", format="PNG")
    (photos / "train" / "b" / "other.dat").write_text("a,b")
    (photos / "train" / "d").mkdir()
    image.save(photos / "train" / "d" / "only.jpg")
    (photos / "train" / "itself").symlink_to(photos / "train")
    (photos / "train" / "notes.txt").write_text("")
    (photos / "train" / ".DS_Store").write_text("")
    image.save(photos / "train" / "lonely.jpg")
    dark = np.arange(0, 4000, 40).astype(np.uint16).reshape(10, 10)
    Image.fromarray(dark).save(photos / "train" / "c" / "dark.png")


@pytest.mark.parametrize("workers", [0, 2])
def test_everything_that_is_wrong_is_found_at_once(photos: Path, workers: int):
    spoil(photos)
    found = look(photos, workers)
    assert found.formats == {"JPEG": 46, "TIFF": 1, "PPM": 1, "PNG": 1}
    assert found.classes == ("a", "b", "c", "d")
    reasons = dict(found.unreadable)
    assert set(reasons) == {
        *("train/a/003.jpg", "train/b/004.jpg", "val/c/013.jpg", "val/c/lost.jpg"),
    }
    assert "Truncated" in reasons["train/a/003.jpg"]
    assert reasons["train/b/004.jpg"] == "not an image of a known format"
    assert reasons["val/c/013.jpg"] == "empty file"
    assert reasons["val/c/lost.jpg"] == "broken link"
    (problem,) = found.problems
    assert "but got 4 unreadable ones; to skip them, use `--data.bad_images skip`" in problem
    for path, reason in found.unreadable:
        assert f"  {path!r}: {reason}" in problem
    said = "\n".join(found.warnings)
    for words in (
        "Links that are not followed: 'train/itself (link to a folder above it)'",
        "Images outside class folders are not used (1): 'train/lonely.jpg'",
        "Files with extension .dat are not used (2), although some of them are images (PNG): ",
        "16-bit images that use less than a 16th of their range",
        "Classes without test images (1 of 4): 'd'",
        "Classes with fewer than 10 training images (1 of 4): 'd'",
    ):
        assert words in said
    assert len(found.warnings) == 6
    ignored = dict(found.ignored)
    assert ignored["train/notes.txt"] == "not in a class folder"
    assert ignored["train/.DS_Store"] == "hidden"
    assert "ignored (hidden): 1, 'train/.DS_Store'" in found.summary()
    as_json = json.loads(json.dumps(found.to_dict()))
    assert {item["path"] for item in as_json["unreadable"]} == set(reasons)
    assert as_json["train"] == found.train


def test_skipped_images_are_a_warning(photos: Path):
    spoil(photos)
    found = look(photos, bad_images="skip")
    assert found.problems == []
    assert sum("Unreadable images are skipped (4):" in text for text in found.warnings) == 1


def test_twenty_unreadable_images_are_shown_and_the_rest_counted(photos: Path):
    for path in list((photos / "train").rglob("*.jpg"))[:23]:
        path.write_bytes(b"x")
    found = look(photos)
    assert len(found.unreadable) == 23
    assert len(found.problems[0].splitlines()) == 22
    assert found.problems[0].endswith("and 3 more")


def remove_classes(photos: Path) -> None:
    for part in ("train", "val"):
        shutil.rmtree(photos / part / "b")
        shutil.rmtree(photos / part / "c")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove_classes, "at least two classes in .* but got only 'a'"),
        (
            lambda photos: shutil.rmtree(photos / "train" / "b"),
            "among those of train/, but got also 'b'",
        ),
        (lambda photos: (photos / "train" / "e").mkdir(), "every class of .* but got none in 'e'"),
    ],
)
def test_what_stops_a_run_stops_it_in_the_scan(
    photos: Path, change: Callable[[Path], object], message: str
):
    change(photos)
    cut_short(photos / "train" / "a" / "003.jpg")
    structure, unreadable = look(photos).problems
    with pytest.raises(ValueError, match=message) as caught:
        load_data(Data(name=f"folder:{photos}"))
    assert str(caught.value) == structure
    assert "train/a/003.jpg" in unreadable


def test_a_folder_without_images(tmp_path: Path):
    for part in ("train", "val"):
        (tmp_path / part / "a").mkdir(parents=True)
    found = look(tmp_path)
    assert len(found.problems) == 2
    assert "no readable images" in found.summary()[1]
    with pytest.raises(FileNotFoundError, match="none at"):
        look(tmp_path / "nowhere")


def test_a_held_out_part_is_counted_and_its_errors_are_problems(photos: Path):
    shutil.rmtree(photos / "val")
    found = look(photos, hold_out=0.25)
    assert (found.train, found.test, found.problems) == (27, 9, [])
    assert look(photos / "train", hold_out=0.25).test == 9
    (problem,) = look(photos, hold_out=0.25, groups="track").problems
    assert "such as 'a/000.jpg'" in problem


def test_testing_on_the_training_images_is_said(photos: Path):
    shutil.rmtree(photos / "val")
    (photos / "val").symlink_to("train")
    assert look(photos).warnings == [
        "train and val are the same folder, so tests would use training images."
    ]


def test_bombs_are_not_decoded(photos: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    found = look(photos, workers=0)
    assert len(found.unreadable) == 48
    assert "DecompressionBombError" in found.unreadable[0][1]


# The cache ---------------------------------------------------------------------------------------


def test_a_second_scan_decodes_what_has_changed(photos: Path, monkeypatch: pytest.MonkeyPatch):
    spoil(photos)
    steps: list[tuple[int, int]] = []
    first = look(photos, progress=lambda *step: steps.append(step))
    assert (first.cached, steps[-1]) == (2, (51, 51))  # an empty file and a link are not decoded
    decoded: list[str] = []
    look_at = scan._look_at
    monkeypatch.setattr(scan, "_look_at", lambda path: decoded.append(path.name) or look_at(path))
    again = look(Path(os.path.relpath(photos)))
    assert decoded == []
    assert again.cached == 53
    assert (again.unreadable, again.warnings) == (first.unreadable, first.warnings)
    path = photos / "train" / "a" / "003.jpg"
    shutil.copy(photos / "train" / "a" / "002.jpg", path)
    Image.new("RGB", (9, 9)).save(photos / "train" / "a" / "new.png")
    status = (photos / "val" / "a" / "012.jpg").stat()
    os.utime(photos / "val" / "a" / "012.jpg", ns=(0, status.st_mtime_ns + 1))
    mended = look(photos)
    assert sorted(decoded) == ["003.jpg", "012.jpg", "new.png"]
    assert "train/a/003.jpg" not in dict(mended.unreadable)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 1}', '{"format": 99, "images": {}}'])
def test_a_cache_that_cannot_be_used_is_ignored(photos: Path, cache: Path, text: str):
    first = look(photos)
    (file,) = cache.iterdir()
    stored = file.read_text()
    file.write_text(text)
    again = look(photos)
    assert (again.cached, again.formats) == (0, first.formats)
    assert json.loads(file.read_text()) == json.loads(stored)


def test_a_cache_that_cannot_be_written_costs_time_only(photos: Path, cache: Path):
    cache.write_text("a file")
    assert look(photos).problems == []
    assert look(photos).cached == 0


def test_an_interrupted_scan_keeps_what_it_has(photos: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scan, "CHUNK", 10)

    def stop(done: int, total: int) -> None:
        if done == 30:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        look(photos, progress=stop)
    assert look(photos).cached == 30


def test_where_the_cache_is(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, value, place in (
        ("HOME", tmp_path / "home", tmp_path / "home" / ".cache" / "powergrad"),
        ("XDG_CACHE_HOME", tmp_path / "xdg", tmp_path / "xdg" / "powergrad"),
        ("POWERGRAD_CACHE", tmp_path / "own", tmp_path / "own"),
    ):
        for other in ("POWERGRAD_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(other, raising=False)
        monkeypatch.setenv(name, str(value))
        look(photos)
        assert len(list(place.iterdir())) == 1
