"""Folders of images: which files, which pixels, bad ones, and worker processes."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image, JpegImagePlugin, UnidentifiedImageError
from scipy import stats

from powergrad.lab.data import Datasets, load_data
from powergrad.lab.data.folder import begin_worker, centre_box, random_box, read_image
from powergrad.lab.data.listing import list_folder
from powergrad.lab.data.streams import Stream, held_out_groups, permutation, uniform
from powergrad.lab.trainer.recipe import Data

# Python 3.12 and later warn of forks beside threads, which is how PyTorch starts its workers.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")

MEAN = np.reshape([0.485, 0.456, 0.406], (3, 1, 1))
STD = np.reshape([0.229, 0.224, 0.225], (3, 1, 1))


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth noise, so that neighbouring pixels have something to do with each other."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def put(path: Path, image: Image.Image | None = None, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    (image or picture(20, 16)).save(path, **options)
    return path


def make_folder(root: Path, train: int = 6, val: int = 3, classes: str = "ab") -> Path:
    """One class per letter; each image has its own seed."""
    for part, count in (("train", train), ("val", val)):
        for k, name in enumerate(classes):
            for i in range(count):
                put(root / part / name / f"{i}.png", picture(24, 18, seed=100 * k + i))
    return root


def load(root: Path, workers: int = 0, **options: Any) -> Datasets:
    return load_data(Data(name=f"folder:{root}", **{"size": 12, **options}), workers=workers)


def whole(width: int, height: int) -> tuple[int, int, int, int]:
    return 0, 0, width, height


def all_batches(data: Datasets) -> list[torch.Tensor]:
    train = [t for batch in data.train.train_batches(4, seed=3, epoch=2) for t in batch]
    test = [t for (batch, index) in data.test.test_batches(4) for t in (*batch, index)]
    return train + test


# Which files -------------------------------------------------------------------------------------


def names_of(root: Path) -> list[bytes]:
    return [path.tobytes().rstrip(b"\0") for path in list_folder(root).train.paths]


def test_names_may_hold_anything(tmp_path: Path):
    names = [b"a b.png", b"two\nlines.png", b"\xff\xfe.png", "été.png".encode(), b"'\"$;*.png"]
    put(tmp_path / "val" / "sp ace" / "x.png")
    for name in names:
        path = os.fsencode(tmp_path) + b"/train/sp ace/" + name
        put(tmp_path / "train" / "sp ace" / "x.png").rename(os.fsdecode(path))
    put(tmp_path / "train" / "z" / "1.png")
    assert names_of(tmp_path) == [*sorted(b"sp ace/" + name for name in names), b"z/1.png"]
    (batch,) = load(tmp_path).train.train_batches(6, seed=0, epoch=0)
    assert batch.images.shape == (6, 3, 12, 12)
    (tmp_path / os.fsdecode(b"train/sp ace/\xff\xfe.png")).write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"udcff.*UnidentifiedImageError") as caught:
        list(load(tmp_path).train.train_batches(6, seed=0, epoch=0))
    str(caught.value).encode()  # can be printed


def test_extensions_hidden_files_links_and_depth(tmp_path: Path):
    train = tmp_path / "train" / "a"
    put(tmp_path / "val" / "a" / "x.png")
    for name in ("1.JPG", "2.jpeg", "3.Png", "4.webp", "5.BMP", "deep/er/6.png"):
        put(train / name)
    put(train / ".hidden.png")
    put(train / ".cache" / "7.png")
    put(tmp_path / "elsewhere" / "8.png")
    (train / "notes.txt").write_text("not an image")
    (train / "9.png").symlink_to(tmp_path / "elsewhere" / "8.png")
    (train / "linked").symlink_to(tmp_path / "elsewhere")
    (train / "circle").symlink_to(train)
    (tmp_path / "train" / ".git").mkdir()
    (tmp_path / "train" / "b").symlink_to(tmp_path / "elsewhere")
    expected = ["1.JPG", "2.jpeg", "3.Png", "4.webp", "5.BMP", "9.png"]
    expected += ["deep/er/6.png", "linked/8.png"]
    assert names_of(tmp_path) == [*(f"a/{name}".encode() for name in expected), b"b/8.png"]
    assert list_folder(tmp_path).train.labels.tolist() == [0] * 8 + [1]
    (batch,) = load(tmp_path).train.train_batches(9, seed=0, epoch=0)
    assert len(batch.images) == 9


def ignored(root: Path, **options: Any) -> dict[str, str]:
    return dict(list_folder(root, **options).ignored)


def test_links_that_lead_back_are_neither_classes_nor_images(tmp_path: Path):
    make_folder(tmp_path)
    train = tmp_path / "train"
    (train / "itself").symlink_to("itself")
    (train / "same").symlink_to(".")
    (train / "parent").symlink_to(tmp_path)
    (train / "nowhere").symlink_to("gone")
    (train / "a" / "up").symlink_to(train)
    (train / "a" / "further").symlink_to(tmp_path.parent)
    (tmp_path / "other").mkdir()
    (train / "b" / "out").symlink_to(tmp_path / "other")
    (tmp_path / "other" / "back").symlink_to(train / "b")
    assert load(tmp_path).classes == ("a", "b")
    assert len(load(tmp_path).train) == 12
    above, broken = "link to a folder above it", "broken link"
    assert ignored(tmp_path) == {
        "train/itself": broken,
        "train/nowhere": broken,
        "train/same": above,
        "train/parent": above,
        "train/a/up": above,
        "train/a/further": above,
        "train/b/out/back": above,
    }


def test_what_is_left_out_is_noted_with_its_reason(tmp_path: Path):
    make_folder(tmp_path)
    for name in ("val/.DS_Store", "train/a/notes.TXT", "val/b/LICENSE", "train/list.csv"):
        (tmp_path / name).write_text("")
    put(tmp_path / "train" / "lonely.png")
    put(tmp_path / "train" / "a" / "more" / "1.png")
    (tmp_path / "train" / "a" / "twice").symlink_to(tmp_path / "train" / "a" / "more")
    assert ignored(tmp_path) == {
        "val/.DS_Store": "hidden",
        "train/a/notes.TXT": "extension .txt",
        "val/b/LICENSE": "no extension",
        "train/list.csv": "not in a class folder",
        "train/lonely.png": "not in a class folder",
        "train/a/twice": "folder that is already included by a link",
    }
    assert len(load(tmp_path).train) == 13


@pytest.mark.parametrize("layout", ["train", "direct"])
def test_hold_out_needs_neither_val_nor_train(tmp_path: Path, layout: str):
    make_folder(tmp_path, train=8)
    expected = load(tmp_path, hold_out=0.25)
    shutil.rmtree(tmp_path / "val")
    root = tmp_path if layout == "train" else tmp_path / "train"
    data = load(root, hold_out=0.25)
    assert (expected.has_test, data.has_test) == (True, False)
    assert data.classes == ("a", "b")
    assert torch.equal(data.train.labels, expected.train.labels)
    ((batch, _),), ((same, _),) = (d.test.test_batches(9) for d in (data, expected))
    assert torch.equal(batch.images, same.images)
    (tmp_path / "train").rename(tmp_path / "val")
    with pytest.raises(FileNotFoundError, match="Expected a folder train/"):
        load(tmp_path, hold_out=0.25)


def test_test_folder_stands_in_for_val(tmp_path: Path):
    make_folder(tmp_path)
    (tmp_path / "val").rename(tmp_path / "test")
    data = load(tmp_path)
    assert (len(data.train), len(data.test), data.classes) == (12, 6, ("a", "b"))
    assert (data.channels, data.size) == (3, 12)


def test_relative_folder_is_looked_for_in_the_data_folder(tmp_path: Path):
    make_folder(tmp_path / "pets")
    config = Data(name="folder:pets")
    assert len(load_data(config, data_dir=str(tmp_path)).train) == 12
    with pytest.raises(FileNotFoundError, match=r"none at 'pets' or '.*other/pets'"):
        load_data(config, data_dir=str(tmp_path / "other"))


def test_folders_that_cannot_be_used_are_refused(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"Expected a folder train/ in.*data.hold_out 0.2"):
        load(tmp_path)
    (tmp_path / "train" / "a").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"Expected a folder val/ or test/ .*hold_out 0.2"):
        load(tmp_path)
    (tmp_path / "val").mkdir()
    (tmp_path / "train" / "a" / "1.psd").write_text("")
    with pytest.raises(ValueError, match=r"train'.* 'train/a/1.psd \(extension .psd\)'\.\n.*val'"):
        load(tmp_path)
    put(tmp_path / "train" / "a" / "1.png")
    with pytest.raises(ValueError, match=r"(?s)only 'a'\..*Expected images .*val'"):
        load(tmp_path)
    put(tmp_path / "val" / "a" / "1.png")
    (tmp_path / "train" / "b").mkdir()
    with pytest.raises(ValueError, match=r"in every class of .* but got none in 'b'"):
        load(tmp_path)
    put(tmp_path / "train" / "b" / "1.png")
    assert load(tmp_path).classes == ("a", "b")  # val need not have it
    (tmp_path / "val" / "dragon").mkdir()
    with pytest.raises(ValueError, match="among those of train/, but got also 'dragon'"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"crop_padding": 4}, "`data.crop_padding` to be 0 for a folder"),
        (
            {"scale": (0.5, 0.2)},
            "`data.scale` to be the smallest and the largest value.* got 0.5 and 0.2",
        ),
        ({"scale": (0.5, 1.2)}, "`data.scale` .* at most 1, but got 0.5 and 1.2"),
        (
            {"ratio": (2, 1)},
            "`data.ratio` to be the smallest and the largest value, but got 2.0 and 1.0",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, options: Any, message: str):
    make_folder(tmp_path)
    with pytest.raises(ValueError, match=message):
        load(tmp_path, **options)


def test_hold_out_and_limit_of_a_folder(tmp_path: Path):
    make_folder(tmp_path, train=8)
    data = load(tmp_path, hold_out=0.25, limit=6)
    assert torch.bincount(data.train.labels).tolist() == [3, 3]
    assert torch.bincount(data.test.labels).tolist() == [2, 2]
    train, test = (
        {bytes(path) for path in split.reader.listing.paths}  # pyright: ignore
        for split in (data.train, data.test)
    )
    assert not train & test
    images = torch.cat([batch.images for batch, _ in data.test.test_batches(3)])
    assert images.shape == (4, 3, 12, 12)


def make_tracks(root: Path, tracks: int = 10, frames: int = 3, classes: str = "ab") -> Path:
    """Frames of tracks, whose numbers begin anew in each class, as in GTSRB."""
    for name in classes:
        for track in range(tracks):
            for frame in range(frames):
                put(root / name / f"{track:05d}_{frame:02d}.ppm")
    return root


def paths_of(split: Any) -> set[str]:
    return {os.fsdecode(path) for path in split.reader.listing.paths}


@pytest.mark.parametrize("pattern", [r"(.+)_\d+\.ppm", r".+/\d{5}"])
def test_frames_of_a_track_stay_on_one_side(tmp_path: Path, pattern: str):
    make_tracks(tmp_path)
    data = load(tmp_path, hold_out=0.2, groups=pattern)
    kept, held = paths_of(data.train), paths_of(data.test)
    assert (len(kept), len(held)) == (48, 12)
    tracks = [{path[:7] for path in side} for side in (kept, held)]
    assert not tracks[0] & tracks[1]
    assert sorted(track[0] for track in tracks[1]) == ["a", "a", "b", "b"]
    assert paths_of(load(tmp_path, hold_out=0.2, groups=pattern).test) == held
    plain = paths_of(load(tmp_path, hold_out=0.2).test)
    assert len({path[:7] for path in plain}) > 4  # which images alone would have been torn apart


def test_a_group_may_span_classes(tmp_path: Path):
    make_tracks(tmp_path, tracks=5)
    held = paths_of(load(tmp_path, hold_out=0.4, groups=r"(\d+)_").test)
    assert len(held) == 12
    assert len({path[2:7] for path in held}) == 2


def test_groups_that_cannot_be_used_are_refused(tmp_path: Path):
    make_tracks(tmp_path, tracks=2)
    put(tmp_path / "b" / "extra.png")
    with pytest.raises(ValueError, match=r"not match 1 of 13, such as 'b/extra.png'"):
        load(tmp_path, hold_out=0.5, groups=r"(.+)_\d+")
    with pytest.raises(ValueError, match=r"not match 13 of 13, such as 'a/00000_00.ppm'"):
        load(tmp_path, hold_out=0.5, groups="patient")
    with pytest.raises(ValueError, match=r"expected a regular expression, but got '\(': missing"):
        Data(name="folder:x", groups="(")
    with pytest.raises(ValueError, match="expected no groups for digits, whose images have no"):
        Data(name="digits", groups="x")
    with pytest.raises(
        ValueError, match=r"`data.hold_out` to leave examples for training and testing"
    ):
        load(tmp_path, hold_out=0.2, groups="^[ab]")  # each class is one group


def imbalance(labels: np.ndarray, is_held: np.ndarray, fraction: float) -> float:
    parts = [is_held[labels == k] for k in np.unique(labels)]
    return sum((part.sum() - fraction * len(part)) ** 2 / len(part) for part in parts)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=60),
    st.floats(0, 0.9),
)
def test_held_out_groups_are_whole_and_no_other_choice_of_one_group_is_better(
    pairs: list[tuple[int, int]], fraction: float
):
    labels, groups = np.array(pairs).T
    is_held = held_out_groups(labels, groups, fraction)
    best = imbalance(labels, is_held, fraction)
    for group in np.unique(groups):
        members = groups == group
        assert len(set(is_held[members])) == 1
        assert imbalance(labels, is_held ^ members, fraction) >= best - 1e-6


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.floats(0, 0.99))
def test_groups_of_one_are_held_out_as_without_groups(labels: list[int], fraction: float):
    given_labels = np.array(labels)
    is_held = held_out_groups(given_labels, np.arange(len(labels)), fraction)
    for k in set(labels):
        count = (given_labels == k).sum()
        assert abs(is_held[given_labels == k].sum() - fraction * count) <= 0.5 + 1e-6


# Which pixels ------------------------------------------------------------------------------------


# How far a resize of bytes may be from the exact filter, in levels. Each of its two passes rounds
# the result to a whole level (0.5) and the weights to steps of 2**-14 times the largest weight. A
# row of weights sums to 1 and has at most 4 / (largest weight) entries, so the second rounding
# costs at most 255 * 4 * 2**-15 per pass. Pillow's weights are finer, its levels are rounded alike.
# So two implementations may differ by 2 levels, and they do.
RESIZE_ERROR = 2 * (0.5 + 255 * 4 * 2**-15)


def triangle_weights(length: int, size: int) -> np.ndarray:
    """Bilinear filter with antialiasing from `length` pixels to `size`: (size, length)."""
    scale = length / size
    centres = scale * (np.arange(size)[:, None] + 0.5)
    weights = 1 - abs(np.arange(length) + 0.5 - centres) / max(scale, 1)
    weights = weights.clip(min=0)
    return weights / weights.sum(1, keepdims=True)


@st.composite
def crops(draw: st.DrawFn) -> tuple[tuple[int, int], tuple[int, int, int, int], int]:
    """The size of an image, a box in it, and the size of the result."""
    width, height = draw(st.integers(1, 90)), draw(st.integers(1, 90))
    left, top = draw(st.integers(0, width - 1)), draw(st.integers(0, height - 1))
    right, bottom = draw(st.integers(left + 1, width)), draw(st.integers(top + 1, height))
    return (width, height), (left, top, right, bottom), draw(st.integers(1, 40))


@given(crops())
@example(((30, 36), (0, 0, 8, 35), 36))  # exactly 148; we give 149 there and Pillow 147
def test_crop_and_resize_are_the_exact_filter_rounded_twice_as_in_pillow(
    tmp_path_factory: pytest.TempPathFactory,
    crop: tuple[tuple[int, int], tuple[int, int, int, int], int],
):
    shape, box, size = crop
    image = picture(*shape)
    path = put(tmp_path_factory.getbasetemp() / "crop.png", image)
    got = read_image(path, lambda w, h: box, size).numpy()
    part = image.crop(box)
    pillows = np.asarray(part.resize((size, size), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    rows, columns = (triangle_weights(length, size) for length in (part.height, part.width))
    exact = np.einsum("ih,hwc,jw->cij", rows, np.asarray(part, float), columns, optimize=True)
    assert abs(got - exact).max() <= RESIZE_ERROR
    assert abs(pillows - exact).max() <= RESIZE_ERROR


@given(
    st.integers(1, 600),
    st.integers(1, 600),
    st.integers(0, 10**6),
    st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)).map(sorted).map(tuple),
    st.tuples(st.floats(0.1, 9), st.floats(0.1, 9)).map(sorted).map(tuple),
)
def test_random_box_is_inside_and_as_asked(
    width: int, height: int, seed: int, scale: tuple[float, float], ratio: tuple[float, float]
):
    draws = uniform(Stream.AUGMENT, seed, np.arange(22)).tolist()
    left, top, right, bottom = random_box(width, height, draws, scale, ratio)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    w, h = right - left, bottom - top
    # The sides are rounded to whole pixels.
    assert (w - 0.51) / (h + 0.51) <= ratio[1] or w == 1
    assert (w + 0.51) / (h - 0.51) >= ratio[0] or h == 1


def test_random_box_is_drawn_as_torchvision_draws_it():
    draws = uniform(Stream.AUGMENT, 0, np.arange(4000)[:, None], np.arange(22)).tolist()
    boxes = np.array([random_box(4000, 4000, d, (0.1, 0.5), (0.5, 2.0)) for d in draws])
    w, h = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    area = w * h / 4000**2
    assert stats.kstest(area, stats.uniform(0.1, 0.4).cdf).pvalue > 1e-3
    aspect = np.log(w / h) / np.log(2)
    assert stats.kstest(aspect, stats.uniform(-1, 2).cdf).pvalue > 1e-3
    for begin, room in ((boxes[:, 0], 4000 - w), (boxes[:, 1], 4000 - h)):
        assert stats.kstest((begin + 0.5) / (room + 1), "uniform").pvalue > 1e-3


@pytest.mark.parametrize(
    ("size", "box"), [((300, 30), (130, 0, 170, 30)), ((30, 300), (0, 130, 30, 170))]
)
def test_where_no_crop_fits_the_centre_is_taken(size: tuple[int, int], box: tuple[int, ...]):
    draws = [0.3] * 22
    assert random_box(*size, draws, (0.9, 1.0), (3 / 4, 4 / 3)) == box


def test_centre_box_is_the_centre():
    assert centre_box(500, 375, 0.875) == (86, 23, 414, 351)
    assert centre_box(1, 9, 0.1) == (0, 4, 1, 5)


def test_training_images_are_those_of_a_loop(tmp_path: Path):
    make_folder(tmp_path)
    data = load(tmp_path, flip=True, scale=(0.2, 0.9))
    batches = list(data.train.train_batches(5, seed=9, epoch=1))
    assert len(batches) == 2
    order = permutation(12, 9, 1)
    mirrored = 0
    for place, i in enumerate(order[:10].tolist()):
        draws = uniform(Stream.AUGMENT, 9, 1, i, np.arange(23)).tolist()
        box = random_box(24, 18, draws[1:], (0.2, 0.9), (3 / 4, 4 / 3))
        image = picture(24, 18, seed=100 * (i // 6) + i % 6).crop(box)
        expected = np.asarray(image.resize((12, 12), Image.Resampling.BILINEAR))
        if draws[0] < 0.5:
            expected, mirrored = expected[:, ::-1], mirrored + 1
        expected = (expected.transpose(2, 0, 1) / 255 - MEAN) / STD
        got = batches[place // 5].images[place % 5]
        assert abs(got.numpy() - expected).max() <= 1.01 / 255 / STD.min()  # a level of 255
        assert batches[place // 5].labels[place % 5] == i // 6
    assert 0 < mirrored < 10


def test_testing_resizes_the_shorter_side_and_cuts_the_centre(tmp_path: Path):
    image = picture(80, 64)
    for part in ("train/a", "train/b", "val/a"):
        put(tmp_path / part / "x.png", image)
    ((batch, index),) = load(tmp_path, size=28).test.test_batches(1)
    resized = image.resize((40, 32), Image.Resampling.BILINEAR).crop((6, 2, 34, 30))
    expected = (np.asarray(resized).transpose(2, 0, 1) / 255 - MEAN) / STD
    assert index.tolist() == [0]
    # At the border the crop that comes first does not see its neighbours.
    inside = (slice(None), slice(1, -1), slice(1, -1))
    difference = abs(batch.images[0].numpy() - expected)[inside]
    assert difference.max() <= 1.01 / 255 / STD.min()
    # Cropped first, it is Pillow's result to the bit.
    centre = image.crop((12, 4, 68, 60)).resize((28, 28), Image.Resampling.BILINEAR)
    expected = (np.asarray(centre).transpose(2, 0, 1) / 255 - MEAN) / STD
    assert abs(batch.images[0].numpy() - expected).max() < 1e-5


def test_large_jpegs_are_decoded_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    image = picture(80, 60).resize((640, 480), Image.Resampling.BICUBIC)
    path = put(tmp_path / "x.jpg", image, quality=95)
    decoded = []
    draft = JpegImagePlugin.JpegImageFile.draft

    def spy(self: Any, mode: Any, size: Any) -> Any:
        result = draft(self, mode, size)
        decoded.append(self.size)
        return result

    monkeypatch.setattr(JpegImagePlugin.JpegImageFile, "draft", spy)
    for box, size, expected in (
        ((0, 0, 640, 480), 60, (80, 60)),
        ((0, 0, 640, 480), 61, (160, 120)),
        ((100, 40, 421, 361), 160, (320, 240)),
        ((100, 40, 260, 200), 160, (640, 480)),
    ):
        got = read_image(path, lambda w, h, box=box: box, size).numpy()
        assert decoded[-1] == expected
        reference = image.crop(box).resize((size, size), Image.Resampling.BILINEAR)
        difference = got - np.asarray(reference).transpose(2, 0, 1).astype(float)
        assert abs(difference).mean() < 1.5  # of 255: two ways to shrink, and JPEG


def test_every_kind_of_image_becomes_what_it_shows(tmp_path: Path):
    grey = np.linspace(0, 255, 256).astype(np.uint8).reshape(16, 16)
    colour = np.stack([grey, grey.T, 255 - grey], 2)
    image = Image.fromarray(colour)
    wide = np.random.default_rng(0).integers(0, 65536, (16, 16), dtype=np.uint16)
    alpha = Image.fromarray(np.full((16, 16), 77, np.uint8))
    palette = image.quantize(16)
    both = Image.merge("RGBA", (*image.split(), alpha))
    cases: dict[str, tuple[Image.Image, str, dict[str, Any], np.ndarray]] = {
        "grey": (Image.fromarray(grey), "png", {}, grey),
        "16 bits": (Image.fromarray(wide), "png", {}, np.rint(wide / 257)),
        "colour": (image, "bmp", {}, colour),
        "transparent": (both, "png", {}, colour),
        "grey, transparent": (
            Image.merge("LA", (Image.fromarray(grey), alpha)),
            "png",
            {},
            grey,
        ),
        "palette": (palette, "png", {}, np.asarray(palette.convert("RGB"))),
        "transparent palette": (
            palette,
            "png",
            {"transparency": bytes(range(16))},
            np.asarray(palette.convert("RGB")),
        ),
        "two levels": (
            Image.fromarray(grey > 99),
            "png",
            {},
            255 * (grey > 99),
        ),
        "lossless": (image, "webp", {"lossless": True}, colour),
        "print": (
            image.convert("CMYK"),
            "jpg",
            {"quality": 100, "subsampling": 0},
            colour,
        ),
        "frames": (palette, "gif", {}, np.asarray(palette.convert("RGB"))),
        "TIFF": (image, "tif", {"compression": "tiff_lzw"}, colour),
        "TIFF of 16 bits": (Image.fromarray(wide), "tiff", {}, np.rint(wide / 257)),
        "TIFF of print": (image.convert("CMYK"), "tif", {}, colour),
    }
    for name, (picture, extension, options, expected) in cases.items():
        path = put(tmp_path / f"{name}.{extension}", picture, **options)
        with Image.open(path) as stored:
            assert stored.mode[0] == picture.mode[0]
        got = read_image(path, whole, 16)
        planes = expected.transpose(2, 0, 1) if expected.ndim == 3 else expected[None]
        tolerance = 6 if extension == "jpg" else 0
        assert abs(got.numpy() - planes.astype(float)).max() <= tolerance, name


def netpbm(path: Path, kind: str, values: np.ndarray, largest: int) -> Path:
    """A PGM or PPM file, byte by byte: the header, then the values from the top left."""
    height, width = values.shape[:2]
    header = f"{kind}\n# by hand\n{width} {height}\n{largest}\n".encode()
    path.write_bytes(header + values.astype(">u2" if largest > 255 else "u1").tobytes())
    return path


@pytest.mark.parametrize("largest", [100, 255, 1023, 65535])
@pytest.mark.parametrize("kind", ["P5", "P6"])
def test_netpbm_of_any_depth(tmp_path: Path, kind: str, largest: int):
    shape = (5, 7) if kind == "P5" else (5, 7, 3)
    values = np.random.default_rng(0).integers(0, largest + 1, shape)
    path = netpbm(tmp_path / "x.pnm", kind, values, largest)
    got = read_image(path, whole, 7).numpy()
    exact = values * 255 / largest
    rows, columns = triangle_weights(5, 7), triangle_weights(7, 7)
    exact = np.einsum("ih,hwc,jw->cij", rows, np.atleast_3d(exact), columns)
    assert abs(got - exact).max() <= RESIZE_ERROR + 0.5


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        (np.array([[0, 70_000], [9, 140_000]], np.int32), 0, 140_000),
        (np.array([[-1000, 3000], [0, 1000]], np.int32), -1000, 3000),
        (np.array([[0, 255], [700, 4095]], np.int32), 0, 65535),
        (np.array([[0, 0.25], [0.5, 1]], np.float32), 0, 1),
        (np.array([[0, 1], [128.25, 200]], np.float32), 0, 255),
        (np.array([[0, 256], [30_000, 60_000]], np.float32), 0, 65535),
        (np.array([[-1, 0], [0.5, 1]], np.float32), -1, 1),
        (np.full((2, 2), -5, np.float32), -5, -4),
    ],
)
def test_wide_values_are_scaled_by_the_whole_image(
    tmp_path: Path, values: np.ndarray, low: float, high: float
):
    path = put(tmp_path / "x.tif", Image.fromarray(values))
    expected = np.rint(255 * (values.astype(float) - low) / (high - low))
    assert np.array_equal(read_image(path, whole, 2)[0].numpy(), expected)
    corner = read_image(path, lambda w, h: (0, 0, 1, 1), 1)  # of a crop: the same level
    assert corner.item() == expected[0, 0]


def test_values_that_are_not_finite_are_refused(tmp_path: Path):
    path = put(tmp_path / "x.tif", Image.fromarray(np.array([[0, np.nan]], np.float32)))
    with pytest.raises(ValueError, match="not finite"):
        read_image(path, whole, 2)


def test_content_counts_more_than_the_extension_but_only_safe_formats(tmp_path: Path):
    grey = Image.fromarray(np.full((4, 4), 9, np.uint8))
    for name, kind in (("1.png", "GIF"), ("2.jpg", "TIFF"), ("3.bmp", "PPM")):
        assert read_image(put(tmp_path / name, grey, format=kind), whole, 4).max() == 9
    for kind in ("EPS", "ICO", "PDF", "PCX"):
        with pytest.raises(UnidentifiedImageError):
            read_image(put(tmp_path / "4.png", grey, format=kind), whole, 4)


def test_exif_orientation_is_ignored(tmp_path: Path):
    exif = Image.Exif()
    exif[0x0112] = 6
    plain, turned = put(tmp_path / "a.jpg"), put(tmp_path / "b.jpg", exif=exif)
    assert torch.equal(read_image(plain, whole, 9), read_image(turned, whole, 9))


# Bad images --------------------------------------------------------------------------------------


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("extension", ["jpg", "png", "webp", "bmp"])
def test_bad_image_is_refused_with_its_path(tmp_path: Path, extension: str, workers: int):
    make_folder(tmp_path, train=2, val=2)
    bad = put(tmp_path / "val" / "b" / f"9.{extension}", picture(64, 64))
    assert sum(len(i) for _, i in load(tmp_path).test.test_batches(2)) == 5
    cut_short(bad)
    with pytest.raises(ValueError, match=f"readable image at '{bad}', but got .*bad_images: skip"):
        list(load(tmp_path, workers).test.test_batches(2))


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_images_are_skipped_with_one_warning_each(tmp_path: Path, workers: int):
    make_folder(tmp_path, train=6, val=6)
    bad = {part: [tmp_path / part / f for f in ("a/2.png", "b/5.png")] for part in ("train", "val")}
    cut_short(bad["train"][0])
    bad["train"][1].write_bytes(b"")
    cut_short(bad["val"][0])
    bad["val"][1].unlink()
    bad["val"][1].symlink_to("nowhere")
    data = load(tmp_path, workers, bad_images="skip", scale=(1, 1), ratio=(4 / 3, 4 / 3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)  # after JAX
        batches = [b for e in (0, 1) for b in data.train.train_batches(4, seed=0, epoch=e)]
        tested = [b for _ in range(2) for b in data.test.test_batches(5)]
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 4
    for path in (*bad["train"], *bad["val"]):
        assert sum(f"Skipped {str(path)!r}" in message for message in messages) == 1
    # In training 2 becomes 3, and the last becomes the first, each with its own label.
    good = load(make_folder(tmp_path / "good"), scale=(1, 1), ratio=(4 / 3, 4 / 3))
    ((expected, _),) = good.train.test_batches(12)
    whole_image = {
        i: read_image(tmp_path / "good" / "train" / "ab"[i // 6] / f"{i % 6}.png", whole, 12)
        for i in range(12)
    }
    order = [i for e in (0, 1) for i in permutation(12, 0, e).tolist()]
    for place, i in enumerate(order):
        actual = {2: 3, 11: 0}[i] if i in (2, 11) else i
        batch = batches[place // 4]
        pixels = (whole_image[actual] / 255 - torch.from_numpy(MEAN)) / torch.from_numpy(STD)
        torch.testing.assert_close(batch.images[place % 4].double(), pixels, rtol=0, atol=1e-5)
        assert batch.labels[place % 4] == expected.labels[actual]
    # In testing they are left out.
    left = [i for i in range(12) if i not in (2, 11)]
    assert torch.cat([index for _, index in tested]).tolist() == left * 2
    assert [len(index) for _, index in tested[:3]] == [4, 5, 1]
    assert torch.cat([b.labels for b, _ in tested[:3]]).tolist() == [i // 6 for i in left]


def test_folder_without_one_good_image(tmp_path: Path):
    make_folder(tmp_path, train=1, val=1)
    for path in tmp_path.rglob("*.png"):
        path.write_bytes(b"")
    data = load(tmp_path, bad_images="skip")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert list(data.test.test_batches(2)) == []
        with pytest.raises(ValueError, match=r"readable images in .* but got none"):
            list(data.train.train_batches(2, seed=0, epoch=0))


# Processes ---------------------------------------------------------------------------------------


def test_workers_change_nothing_and_leave_nothing_behind(tmp_path: Path):
    make_folder(tmp_path, train=20)
    options = {"flip": True, "cutmix": 1.0}
    expected = all_batches(load(tmp_path, **options))
    state = torch.get_rng_state()
    for workers in (0, 1, 2):
        got = all_batches(load(tmp_path, workers, **options))
        assert all(map(torch.equal, got, expected)), workers
        assert len(got) == len(expected)
    assert torch.equal(torch.get_rng_state(), state)
    abandoned = load(tmp_path, 2).train.train_batches(4, seed=0, epoch=0)
    next(abandoned)
    assert len(multiprocessing.active_children()) == 2
    del abandoned
    assert not multiprocessing.active_children()


def test_parts_of_ranks_and_later_starts(tmp_path: Path):
    make_folder(tmp_path, train=20)
    train = load(tmp_path, flip=True, mixup=0.5).train
    whole_batches = list(train.train_batches(8, seed=1, epoch=1))
    parts = [
        list(train.train_batches(8, seed=1, epoch=1, rank=r, world=2, start=2)) for r in (0, 1)
    ]
    for batch, first, second in zip(whole_batches[2:], *parts, strict=True):
        assert torch.equal(batch.images, torch.cat([first.images, second.images]))
        assert torch.equal(batch.labels, torch.cat([first.labels, second.labels]))


def test_signals_to_all_processes_leave_the_workers_working(tmp_path: Path):
    make_folder(tmp_path, train=40)
    batches = load(tmp_path, 1).train.train_batches(16, seed=0, epoch=0)
    next(batches)
    (worker,) = multiprocessing.active_children()
    assert worker.pid
    os.kill(worker.pid, signal.SIGINT)
    os.kill(worker.pid, signal.SIGTERM)
    assert len(list(batches)) == 4


SCRIPT = """
import multiprocessing, sys, time
import torch.utils.data._utils.worker
from powergrad.lab.trainer.recipe import Data
from powergrad.lab.data import load_data

torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 0.2  # how often a worker looks
train = load_data(Data(name="folder:" + sys.argv[1], size=12), workers=2).train
batches = train.train_batches(4, seed=0, epoch=0)
next(batches)
print(*[child.pid for child in multiprocessing.active_children()], flush=True)
if sys.argv[2] == "kill":
    time.sleep(600)
raise SystemExit("stopped")
"""


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_workers_end_with_the_main_process(tmp_path: Path, end: str):
    make_folder(tmp_path, train=20)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), end]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as main:
        assert main.stdout
        workers = [int(pid) for pid in main.stdout.readline().split()]
        begin = time.monotonic()
        if end == "kill":
            main.kill()
        _, errors = main.communicate(timeout=60)
    assert len(workers) == 2
    if end == "exit":
        assert errors == "stopped\n"
        assert time.monotonic() - begin < 9  # not by the time limit of a worker that is terminated
    while any(is_running(pid) for pid in workers):
        assert time.monotonic() - begin < 60
        time.sleep(0.1)


def test_a_worker_whose_main_process_has_gone_before_it_began_ends():
    """PyTorch's own watch takes whoever is its parent by then for the main process."""
    if multiprocessing.get_start_method() != "fork":
        pytest.skip("workers are forked where that is the default")
    fork = multiprocessing.get_context("fork")
    for parent, code in ((1, 1), (os.getpid(), 0)):
        process = fork.Process(target=begin_worker, args=(parent, 0))
        process.start()
        process.join(60)
        assert process.exitcode == code


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
