"""What a scan of an image folder finds, its cache, and the fingerprints of data."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from test_folder import cut_short

from powergrad.lab.data import Data, fingerprint, load_data, scan
from powergrad.lab.data.scan import Scan, scan_folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POWERGRAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def look(root: Path, **options: Any) -> Scan:
    return scan_folder(Data(name=f"folder:{root}", **options))


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the decoded files; in this process, as there are few."""
    names: list[str] = []
    look_at = scan._look_at
    monkeypatch.setattr(scan, "_look_at", lambda path: names.append(path.name) or look_at(path))
    return names


def test_good_folder_has_no_problems(photos):
    lines = ["48 JPEG; 40x40 to 52x46 pixels, median 46x42"]
    first = f"{photos}: 36 training images, 12 test images, 3 classes"
    assert look(photos) == Scan([first, *lines], [], [])


def spoil(photos: Path) -> None:
    """Do everything wrong that does not stop the scan."""
    cut_short(photos / "train" / "a" / "003.jpg")
    (photos / "train" / "b" / "004.jpg").write_text("<html>not found</html>")
    (photos / "val" / "c" / "013.jpg").write_bytes(b"")
    (photos / "val" / "c" / "lost.jpg").symlink_to("nowhere")
    (photos / "train" / "d").mkdir()
    with Image.open(photos / "train" / "a" / "001.jpg") as image:
        for name in ("a/one.tif", "a/two.ppm", "d/only.jpg", "lonely.jpg"):
            image.save(photos / "train" / name)
        image.save(photos / "train" / "b" / "three.dat", format="PNG")
    (photos / "train" / "notes.txt").write_text("")
    (photos / "train" / "itself").symlink_to(photos / "train")
    dark = np.arange(0, 4000, 40).astype(np.uint16).reshape(10, 10)
    Image.fromarray(dark).save(photos / "train" / "c" / "dark.png")


@pytest.mark.parametrize("alone", [0, 512])
def test_all_problems_and_warnings_are_found_at_once(photos, alone, monkeypatch):
    monkeypatch.setattr(scan, "ALONE", alone)
    spoil(photos)
    found = look(photos)
    assert "46 JPEG, 1 TIFF, 1 PPM, 1 PNG; " in found.summary[1]
    assert found.summary[2:] == [
        "ignored (not in a class folder): 2, 'train/lonely.jpg', 'train/notes.txt'",
        "ignored (folder above, or already included): 1, 'train/itself'",
        "ignored (extension .dat): 1, 'train/b/three.dat'",
    ]
    (problem,) = found.problems
    first, *lines = problem.splitlines()
    assert "4 unreadable images; to skip them, use `--data.bad_images skip`" in first
    assert "  'train/a/003.jpg': OSError: " in lines[0]
    assert lines[1:] == [
        "  'train/b/004.jpg': not an image of a known format",
        "  'val/c/013.jpg': empty file",
        "  'val/c/lost.jpg': broken link",
    ]
    expected = [
        ("16-bit", "'train/c/dark.png'"),
        ("without test images", "(1 of 4): 'd'"),
        ("fewer than 10 training images", "(1 of 4): 'd'"),
    ]
    for text, words in zip(found.warnings, expected, strict=True):
        assert all(word in text for word in words)
    skipped = look(photos, bad_images="skip")
    assert skipped.problems == []
    assert any("4 unreadable images; they are skipped" in text for text in skipped.warnings)


def test_what_stops_a_run_is_a_problem_of_the_scan(photos):
    (photos / "train" / "e").mkdir()
    cut_short(photos / "train" / "a" / "003.jpg")
    structure, unreadable = look(photos).problems
    with pytest.raises(ValueError, match="'e'") as caught:
        load_data(Data(name=f"folder:{photos}"))
    assert str(caught.value) == structure
    assert "train/a/003.jpg" in unreadable
    for path in photos.rglob("*.jpg"):
        path.unlink()
    empty = look(photos)
    assert len(empty.problems) == 2
    assert empty.summary[1] == "no readable images"
    with pytest.raises(FileNotFoundError, match="nowhere"):
        look(photos / "nowhere")


def test_held_out_images_are_counted_and_bad_groups_are_problems(photos):
    shutil.rmtree(photos / "val")
    found = look(photos, hold_out=0.25)
    assert ("27 training images, 9 test images" in found.summary[0], found.problems) == (True, [])
    (problem,) = look(photos, hold_out=0.25, groups="track").problems
    assert "data.groups" in problem
    (photos / "val").symlink_to("train")
    (warning,) = look(photos).warnings
    assert warning.startswith("train and val are the same folder")


def test_bombs_are_not_decoded(photos, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    (problem,) = look(photos).problems
    assert "48 unreadable" in problem
    assert "DecompressionBombError" in problem
    assert problem.endswith("and 28 more")


def test_second_scan_decodes_only_changed_files(photos, decoded):
    spoil(photos)
    first = look(photos)
    assert len(decoded) == 51  # an empty file and a broken link are not decoded
    decoded.clear()
    again = look(Path(os.path.relpath(photos)))
    assert (decoded, again.warnings) == ([], first.warnings)
    assert again.summary[1:] == first.summary[1:]
    shutil.copy(photos / "train" / "a" / "002.jpg", photos / "train" / "a" / "003.jpg")
    Image.new("RGB", (9, 9)).save(photos / "train" / "a" / "new.png")
    touched = photos / "val" / "a" / "012.jpg"
    os.utime(touched, ns=(0, touched.stat().st_mtime_ns + 1))
    assert "train/a/003.jpg" not in look(photos).problems[0]
    assert sorted(decoded) == ["003.jpg", "012.jpg", "new.png"]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"train/a/000.jpg": 1}'])
def test_unusable_cache_is_ignored(photos, cache, decoded, text):
    first = look(photos)
    (file,) = cache.iterdir()
    stored = file.read_text()
    file.write_text(text)
    assert look(photos) == first
    assert len(decoded) == 2 * 48
    assert file.read_text() == stored
    shutil.rmtree(cache)
    cache.write_text("a file")  # so nothing can be stored
    assert look(photos) == first


KINDS = ("times", "sizes", "contents")


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

    assert is_same(content, 1) == [False, True, True]
    assert is_same(content[:-1] + b"\0", 0) == [True, True, False]
    assert is_same(content + b"\0", 0) == [False, False, False]
    assert is_same(content, 0) == [True, True, True]
    path.rename(path.with_name("014.jpeg"))
    assert not {*fingerprints(photos)} & {*before}
