"""What is said of an image folder before a run, and the fingerprints of data."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from powergrad.lab.data import Data, fingerprint, load_data
from powergrad.lab.data.listing import scan_folder


def look(root: Path, **options: Any) -> list[str]:
    return list(scan_folder(Data(name=f"folder:{root}", **options)))


def test_good_folder_has_no_warnings(photos):
    assert look(photos) == [f"{photos}: 36 training images, 12 test images, 3 classes"]
    shutil.copy(photos / "train/a/001.jpg", photos / "train/a/new.jpg")
    assert look(photos) == [f"{photos}: 37 training images, 12 test images, 3 classes"]


def test_ignored_files_and_rare_classes_are_named(photos):
    (photos / "train" / "d").mkdir()
    image = photos / "train" / "a" / "001.jpg"
    for name in ("d/only.jpg", "lonely.jpg", "b/three.dat"):
        shutil.copy(image, photos / "train" / name)
    (photos / "train" / "itself").symlink_to(photos / "train")
    _, *lines = look(photos)
    assert lines == [
        "  ignored (not in a class folder): 1, 'train/lonely.jpg'",
        "  ignored (folder above, or already included): 1, 'train/itself'",
        "  ignored (extension .dat): 1, 'train/b/three.dat'",
        "Warning: Classes without test images (1 of 4): 'd'.",
        "Warning: Classes with fewer than 10 training images (1 of 4): 'd'.",
    ]


def test_what_stops_a_run_stops_the_scan(photos):
    (photos / "train" / "e").mkdir()
    for act in (look, lambda root: load_data(Data(name=f"folder:{root}"))):
        with pytest.raises(ValueError, match="'e'"):
            act(photos)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        look(photos / "nowhere")


def test_held_out_images_are_counted_and_bad_groups_raise(photos):
    shutil.rmtree(photos / "val")
    line, *_ = look(photos, hold_out=0.25)
    assert "27 training images, 9 test images" in line
    with pytest.raises(ValueError, match=r"data\.groups"):
        look(photos, hold_out=0.25, groups="track")
    (photos / "val").symlink_to("train")
    _, warning = look(photos)
    assert warning.startswith("Warning: train and val are the same folder")


KINDS = ("times", "sizes")


def fingerprints(root: Path | str, **options: Any) -> list[str]:
    return [fingerprint(Data(name=f"folder:{root}", **options), kind=kind) for kind in KINDS]


def test_fingerprint_depends_on_the_files_and_not_on_the_path(photos, tmp_path):
    before = fingerprints(photos)
    assert tuple(text.partition(":")[0] for text in before) == KINDS
    assert fingerprints(os.path.relpath(photos)) == fingerprints(f"{photos}/") == before
    assert fingerprints(photos, hold_out=0.2, limit=3, size=9) == before  # the same images
    (photos / "val" / "notes.txt").write_text("not an image")
    assert fingerprints(photos) == before
    assert fingerprints(shutil.copytree(photos, tmp_path / "copy")) == before


def test_fingerprint_changes_with_the_data(photos):
    before = fingerprints(photos)
    path = photos / "val" / "b" / "013.jpg"
    content, changed = path.read_bytes(), path.stat().st_mtime_ns

    def is_same(data: bytes, later: int) -> list[bool]:
        path.write_bytes(data)
        os.utime(path, ns=(0, changed + later))
        return [a == b for a, b in zip(fingerprints(photos), before, strict=True)]

    assert is_same(content, 1) == [False, True]
    assert is_same(content + b"\0", 0) == [False, False]
    assert is_same(content, 0) == [True, True]
    path.rename(path.with_name("014.jpeg"))
    assert not {*fingerprints(photos)} & {*before}
