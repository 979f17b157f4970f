"""Order, augmentation, mixing and the small sets, against loops that take one example at a time."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy import stats

from powergrad.lab.data import load_data, memory, sets
from powergrad.lab.data.memory import MemorySplit
from powergrad.lab.data.split import Batch, Mixing, cutmix, mixup
from powergrad.lab.data.streams import (
    Stream,
    balanced_subset,
    hashed,
    held_out,
    permutation,
    uniform,
)
from powergrad.lab.trainer.recipe import Data

WORD = 2**64


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


def make_split(
    count: int = 50, shape: tuple[int, int, int] = (2, 5, 4), classes: int = 3, **options: Any
) -> tuple[MemorySplit, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    images = rng.integers(0, 256, (count, *shape), dtype=np.uint8)
    labels = rng.integers(0, classes, count)
    mixing = options.pop("mixing", Mixing(0, 0, classes))
    split = MemorySplit(
        torch.from_numpy(images),
        torch.from_numpy(labels),
        mean=[100.0, 120.0][: shape[0]],
        std=[50.0, 60.0][: shape[0]],
        mixing=mixing,
        **options,
    )
    return split, images, labels


def assert_same_batches(first: Any, second: Any) -> None:
    for a, b in itertools.zip_longest(first, second):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.labels, b.labels)


# Streams -----------------------------------------------------------------------------------------


def test_hash_is_splitmix64():
    # The first output of the published generator from state 0; stream 1 xor part 1 is state 0.
    assert hashed(Stream.ORDER, 1).tolist() == [0xE220A8397B1DCDAF]


@given(st.sampled_from(Stream), st.lists(st.integers(0, 2**31), min_size=1, max_size=4))
def test_hash_of_arrays_is_the_hash_of_each(stream: Stream, parts: list[int]):
    last = np.arange(parts[-1], parts[-1] + 3)
    got = hashed(stream, *parts[:-1], last)
    assert got.tolist() == [splitmix(stream, *parts[:-1], n) for n in last.tolist()]
    assert uniform(stream, *parts[:-1], last).tolist() == [
        draw(stream, *parts[:-1], n) for n in last.tolist()
    ]


def test_draws_are_uniform_and_streams_differ():
    draws = {s: uniform(s, 3, 1, np.arange(5000)[:, None], np.arange(3)) for s in Stream}
    for values in draws.values():
        assert stats.kstest(values.ravel(), "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(values.T) - np.eye(3)).max() < 0.05
    order, augment = draws[Stream.ORDER], draws[Stream.AUGMENT]
    assert abs(np.corrcoef(order.ravel(), augment.ravel())[0, 1]) < 0.03


def test_permutation_sorts_by_hash_and_changes_with_seed_and_epoch():
    expected = sorted(range(200), key=lambda i: splitmix(Stream.ORDER, 5, 2, i))
    assert permutation(200, 5, 2).tolist() == expected
    others = [permutation(200, s, e).tolist() for s, e in ((5, 3), (4, 2), (2, 5))]
    assert all(sorted(other) == list(range(200)) and other != expected for other in others)


labels_arrays = st.lists(st.integers(0, 4), min_size=1, max_size=60).map(np.array)


@given(labels_arrays, st.floats(0, 0.99))
def test_held_out_takes_the_fraction_of_each_class(labels: np.ndarray, fraction: float):
    held = held_out(labels, fraction)
    for label in set(labels.tolist()):
        assert held[labels == label].sum() == round(fraction * (labels == label).sum())


@given(labels_arrays, st.integers(1, 70))
def test_balanced_subset_takes_classes_in_turn(labels: np.ndarray, count: int):
    kept = balanced_subset(labels, count)
    assert len(kept) == min(count, len(labels))
    assert (np.diff(kept) > 0).all()
    taken = np.bincount(labels[kept], minlength=5)
    available = np.bincount(labels, minlength=5)
    # A class that is not exhausted has no fewer than any other, but for the turn that was cut.
    assert all(taken[c] == available[c] or taken[c] >= taken.max() - 1 for c in range(5))
    assert set(kept) <= set(balanced_subset(labels, count + 1))


# Batches in memory -------------------------------------------------------------------------------


@pytest.mark.parametrize(("padding", "flip"), [(0, False), (0, True), (2, False), (1, True)])
def test_train_batches_are_those_of_a_loop(padding: int, flip: bool):
    split, images, labels = make_split(padding=padding, flip=flip)
    order = sorted(range(50), key=lambda i: splitmix(Stream.ORDER, 11, 4, i))
    batches = list(split.train_batches(8, seed=11, epoch=4))
    assert len(batches) == split.steps(8) == 6
    mean, std = np.array([100.0, 120.0]), np.array([50.0, 60.0])
    for number, batch in enumerate(batches):
        assert batch.images.dtype == torch.float32
        assert batch.labels.dtype == torch.int64
        for place, i in enumerate(order[8 * number : 8 * number + 8]):
            mirror, y, x = (draw(Stream.AUGMENT, 11, 4, i, k) for k in range(3))
            top, left = math.floor(y * (2 * padding + 1)), math.floor(x * (2 * padding + 1))
            around = ((0, 0), (padding, padding), (padding, padding))
            crop = np.pad(images[i], around)[:, top : top + 5, left : left + 4]
            if flip and mirror < 0.5:
                crop = crop[:, :, ::-1]
            expected = (crop - mean[:, None, None]) / std[:, None, None]
            np.testing.assert_allclose(batch.images[place], expected, rtol=0, atol=1e-6)
            assert batch.labels[place] == labels[i]


def test_augmentation_leaves_the_order_alone():
    plain, _, _ = make_split()
    augmented, _, _ = make_split(padding=2, flip=True)
    labels = [
        torch.cat([b.labels for b in s.train_batches(8, seed=1, epoch=0)])
        for s in (plain, augmented)
    ]
    assert torch.equal(*labels)


def test_blocks_do_not_change_batches(monkeypatch: pytest.MonkeyPatch):
    split, _, _ = make_split(padding=1, flip=True)
    whole = list(split.train_batches(7, seed=0, epoch=0))
    monkeypatch.setattr(memory, "BLOCK", 2 * 7 * 40)
    assert_same_batches(split.train_batches(7, seed=0, epoch=0), whole)


@pytest.mark.parametrize("mixing", [Mixing(0, 0, 3), Mixing(0.4, 0, 3), Mixing(0, 1.0, 3)])
@pytest.mark.parametrize("world", [2, 3])
def test_parts_of_ranks_make_the_whole_batch(mixing: Mixing, world: int):
    split, _, _ = make_split(padding=1, flip=True, mixing=mixing)
    arguments: dict[str, Any] = {"batch_size": 12, "seed": 5, "epoch": 2}
    parts = zip(
        *(split.train_batches(**arguments, rank=r, world=world) for r in range(world)), strict=True
    )
    joined = (Batch(*map(torch.cat, zip(*part, strict=True))) for part in parts)
    assert_same_batches(joined, split.train_batches(**arguments))


@pytest.mark.parametrize("mixing", [Mixing(0, 0, 3), Mixing(0.4, 0, 3), Mixing(0, 1.0, 3)])
def test_an_epoch_can_begin_anywhere(mixing: Mixing):
    split, _, _ = make_split(padding=1, flip=True, mixing=mixing)
    whole = list(split.train_batches(8, seed=0, epoch=9))
    for start in range(len(whole) + 1):
        assert_same_batches(split.train_batches(8, seed=0, epoch=9, start=start), whole[start:])


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_test_batches_hold_each_example_once_in_order(world: int):
    split, images, labels = make_split(padding=2, flip=True)  # which testing leaves out
    results = [list(split.test_batches(8, rank=r, world=world)) for r in range(world)]
    assert max(map(len, results)) - min(map(len, results)) <= 1
    index = torch.cat([i for result in results for _, i in result])
    assert index.tolist() == list(range(50))
    batches = [batch for result in results for batch, _ in result]
    assert torch.cat([b.labels for b in batches]).tolist() == labels.tolist()
    mean, std = (np.reshape(v, (2, 1, 1)) for v in ([100.0, 120.0], [50.0, 60.0]))
    expected = (images - mean) / std
    np.testing.assert_allclose(torch.cat([b.images for b in batches]), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 51}, "`batch_size` to be at most the 50 training examples, but got 51"),
        ({"batch_size": 9, "world": 2}, "multiple of the 2 processes, but got 9"),
        ({"batch_size": 10, "start": 6}, r"`start` to be in \[0, 5\], but got 6"),
    ],
)
def test_batches_that_cannot_be_are_refused(arguments: dict[str, int], message: str):
    split, _, _ = make_split()
    with pytest.raises(ValueError, match=message):
        split.train_batches(**arguments, seed=0, epoch=0)


# Mixing ------------------------------------------------------------------------------------------


def plain_batch(count: int = 6, classes: int = 4) -> Batch:
    rng = np.random.default_rng(3)
    labels = np.eye(classes, dtype=np.float32)[rng.integers(0, classes, count)]
    images = rng.standard_normal((count, 3, 9, 7)).astype(np.float32)
    return Batch(torch.from_numpy(images), torch.from_numpy(labels))


@given(st.floats(0, 1))
def test_mixup_mixes_neighbours(lam: float):
    batch = plain_batch()
    mixed = mixup(batch, lam)
    for got, values in zip(mixed, batch, strict=True):
        for i in range(6):
            expected = lam * values[i].double() + (1 - lam) * values[i ^ 1].double()
            torch.testing.assert_close(got[i].double(), expected, rtol=0, atol=1e-6)


@given(st.floats(0, 1), st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True))
def test_cutmix_pastes_one_box_and_counts_its_pixels(lam: float, y: float, x: float):
    batch = plain_batch()
    mixed = cutmix(batch, lam, (y, x))
    for i in range(6):
        own, other = (mixed.images[i] == batch.images[k] for k in (i, i ^ 1))
        assert (own ^ other).all()
        pasted = other[0]
        assert (other == pasted).all()
        kept = 1 - pasted.double().mean().item()
        expected = kept * batch.labels[i] + (1 - kept) * batch.labels[i ^ 1]
        torch.testing.assert_close(mixed.labels[i], expected, rtol=0, atol=1e-6)
        rows, columns = pasted.any(1), pasted.any(0)
        assert torch.equal(pasted, rows[:, None] & columns)
        for side, length, centre in ((rows, 9, y), (columns, 7, x)):
            half = math.floor(length * math.sqrt(1 - lam)) // 2
            middle = math.floor(length * centre)
            expected = [middle - half <= k < middle + half for k in range(length)]
            if pasted.any():
                assert side.tolist() == expected


@pytest.mark.parametrize("parameter", [0.2, 1.0, 3.0])
def test_mixing_weights_follow_the_beta_distribution(parameter: float):
    labels = torch.tensor([0, 1] * 2000)
    split = MemorySplit(
        torch.zeros(4000, 1, 1, 1, dtype=torch.uint8),
        labels,
        mean=[0.0],
        std=[1.0],
        mixing=Mixing(parameter, 0, 2),
    )
    batches = split.train_batches(2, seed=0, epoch=0)
    weights = [b.labels for b in batches if b.labels[0, 0] != b.labels[1, 0] or b.labels[0, 0] < 1]
    weights = [w[0, 0].item() for w in weights if 0 < w[0, 0] < 1]
    assert 800 < len(weights) <= 2000  # about half of the pairs are of two classes
    assert stats.kstest(weights, stats.beta(parameter, parameter).cdf).pvalue > 1e-3


def test_mixed_labels_are_probabilities_and_odd_parts_are_refused():
    split, _, _ = make_split(mixing=Mixing(0, 1.0, 3))
    for batch in split.train_batches(4, seed=0, epoch=0):
        assert batch.labels.dtype == torch.float32
        torch.testing.assert_close(batch.labels.sum(1), torch.ones(4))
    with pytest.raises(ValueError, match=r"even number of examples .* but got 3"):
        split.train_batches(6, seed=0, epoch=0, world=2)
    ((batch, _), *_) = split.test_batches(4)
    assert batch.labels.dtype == torch.int64


# Digits, and what options do to any set ----------------------------------------------------------


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
    for digit in range(10):
        count = (labels == digit).sum()
        assert (test_labels == digit).sum() == round(0.2 * count)
        assert (train_labels == digit).sum() == count - round(0.2 * count)


def test_hold_out_replaces_the_test_data():
    whole = load_data(Data())
    data = load_data(Data(hold_out=0.25, crop_padding=1))
    images, labels = everything(whole.train)
    train, train_labels = everything(data.train)
    test, test_labels = everything(data.test)
    assert rows_of(torch.cat([train, test])) == rows_of(images)
    for digit in range(10):
        count = int((labels == digit).sum())
        assert (test_labels == digit).sum() == round(0.25 * count)
        assert (train_labels == digit).sum() == count - round(0.25 * count)
    with pytest.raises(
        ValueError, match=r"`data.hold_out` to leave .* got 0.0001, which leaves 1438 and 0"
    ):
        load_data(Data(hold_out=0.0001))


def test_limit_keeps_classes_alike():
    data = load_data(Data(limit=103, hold_out=0.5))
    counts = torch.bincount(data.train.labels)
    assert counts.sum() == 103
    assert counts.max() - counts.min() <= 1
    assert len(data.test) > 700
    assert len(load_data(Data(limit=5000)).train) == 1438


def test_images_are_resized_as_pillow_resizes_them():
    small, large = load_data(Data()), load_data(Data(size=13, crop_padding=2))
    assert large.size == 13
    (images, _), (resized, _) = everything(small.test), everything(large.test)
    low, high = images.min(), images.max()
    levels = lambda x: ((x - low) / (high - low) * 240).round().to(torch.uint8)  # noqa: E731
    for image, got in zip(levels(images[:40]), levels(resized[:40]), strict=True):
        expected = Image.fromarray(image[0].numpy()).resize((13, 13), Image.Resampling.BILINEAR)
        difference = np.asarray(expected).astype(int) - got[0].numpy().astype(int)
        assert abs(difference).max() <= 1  # PyTorch and Pillow round differently


def test_unknown_set_is_refused():
    with pytest.raises(ValueError, match=r"`data.name` to be digits, .* but got 'cifar11'"):
        load_data(Data(name="cifar11"))


# Files -------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_data_elsewhere(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("POWERGRAD_DATA", raising=False)


def idx(values: np.ndarray) -> bytes:
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()


def write_fashion(folder: Path) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    folder.mkdir(exist_ok=True)
    arrays = {}
    for part, count in (("train", 30), ("t10k", 20)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        arrays[f"{part}-images-idx3-ubyte.gz"] = images
        arrays[f"{part}-labels-idx1-ubyte.gz"] = (np.arange(count) % 10).astype(np.uint8)
    for name, values in arrays.items():
        (folder / name).write_bytes(gzip.compress(idx(values)))
    return arrays


def test_fashion_mnist_is_read_from_either_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    arrays = write_fashion(tmp_path / "fashion-mnist")
    data = load_data(Data(name="fashion-mnist"), data_dir=str(tmp_path / "fashion-mnist"))
    assert (data.channels, data.size, len(data.classes)) == (1, 28, 10)
    for split, part in ((data.train, "train"), (data.test, "t10k")):
        images, labels = everything(split)
        expected = (arrays[f"{part}-images-idx3-ubyte.gz"] / 255 - 0.2860) / 0.3530
        np.testing.assert_allclose(images[:, 0], expected, rtol=0, atol=1e-5)
        assert labels.tolist() == arrays[f"{part}-labels-idx1-ubyte.gz"].tolist()
    monkeypatch.setenv("POWERGRAD_DATA", str(tmp_path))
    again = load_data(Data(name="fashion-mnist"), data_dir=str(tmp_path / "nowhere"))
    assert torch.equal(everything(again.test)[0], everything(data.test)[0])


DAMAGES = {
    "cut": (lambda content: content[:-30], "to be a complete gzip file"),
    "text": (lambda _: b"<html>not found</html>", "to be a complete gzip file"),
    "magic": (lambda _: gzip.compress(b"\0\0\x0d\1\0\0\0\1aaaa"), "to hold bytes in IDX format"),
    "empty": (lambda _: gzip.compress(b""), "to hold bytes in IDX format"),
    "short": (
        lambda content: gzip.compress(gzip.decompress(content)[:-1]),
        r"to hold 30 values, of shape \(30,\), but got 29",
    ),
    "fewer": (
        lambda _: gzip.compress(idx(np.zeros(29, np.uint8))),
        r"the same number of 28x28 images and labels, but got shapes \(30, 28, 28\) and \(29,\)",
    ),
    "labels": (
        lambda _: gzip.compress(idx(np.full(30, 10, np.uint8))),
        r"labels of .* to be in \[0, 9\], but got 10 to 10",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_idx_files_are_refused(tmp_path: Path, damage: str):
    write_fashion(tmp_path)
    change, message = DAMAGES[damage]
    path = tmp_path / "train-labels-idx1-ubyte.gz"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=message) as caught:
        load_data(Data(name="fashion-mnist"), data_dir=str(tmp_path))
    assert str(path) in str(caught.value)


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
def test_cifar10_is_read_from_either_version(cifar: dict[str, Any], version: str):
    data = load_data(Data(name="cifar10"), data_dir=str(cifar[version].parent))
    assert (data.channels, data.size, data.classes[3]) == (3, 32, "cat")
    mean = np.reshape([0.4914, 0.4822, 0.4465], (3, 1, 1))
    std = np.reshape([0.2470, 0.2435, 0.2616], (3, 1, 1))
    for split, part in ((data.train, slice(5)), (data.test, slice(5, 6))):
        images, labels = everything(split)
        expected = (cifar["images"][part].reshape(-1, 3, 32, 32) / 255 - mean) / std
        np.testing.assert_allclose(images, expected, rtol=0, atol=1e-5)
        assert labels.tolist() == cifar["labels"][part].ravel().tolist()


@pytest.mark.parametrize(
    ("version", "name", "content", "message"),
    [
        ("binary", "data_batch_2.bin", b"\0" * 3073 * 11, "to have 36876 bytes .* got 33803"),
        ("sheets", "data_batch_3.png", None, "to be a complete PNG file"),
        ("sheets", "test_lables.json", b"[1, 2", "to be a JSON list"),
        ("sheets", "test_lables.json", b"[1, 2]", "to hold 12 integers"),
        ("sheets", "test_lables.json", b"[0.5" + b", 1" * 11 + b"]", "12 integers, .* float"),
        (
            "sheets",
            "test_lables.json",
            b"[12" + b", 1" * 11 + b"]",
            r"in \[0, 9\], but got 1 to 12",
        ),
    ],
)
def test_damaged_cifar10_is_refused(
    cifar: dict[str, Any], version: str, name: str, content: bytes | None, message: str
):
    path = cifar[version] / name
    path.write_bytes(path.read_bytes()[:-500] if content is None else content)
    with pytest.raises(ValueError, match=message) as caught:
        load_data(Data(name="cifar10"), data_dir=str(cifar[version]))
    assert str(path) in str(caught.value)


def test_sheet_of_another_size_is_refused(cifar: dict[str, Any]):
    Image.new("RGB", (1024, 11)).save(cifar["sheets"] / "data_batch_1.png")
    with pytest.raises(ValueError, match=r"data_batch_1.png to have 1024x12 pixels, .* 1024x11"):
        load_data(Data(name="cifar10"), data_dir=str(cifar["sheets"]))


def test_missing_files_say_where_they_were_looked_for_and_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("POWERGRAD_DATA", str(tmp_path / "other"))
    with pytest.raises(FileNotFoundError) as caught:
        load_data(Data(name="cifar10"), data_dir=str(tmp_path))
    for word in ("data_batch_1.bin", "test_batch.png", str(tmp_path), "other", "npm pack"):
        assert word in str(caught.value)
    assert "--machine.data_dir" in str(caught.value)
    monkeypatch.delenv("POWERGRAD_DATA")
    with pytest.raises(
        FileNotFoundError, match="searched folders: none, because no data folder is set"
    ):
        load_data(Data(name="cifar10"))


def test_missing_fashion_mnist_names_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_fashion(tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte.gz").unlink()
    monkeypatch.setattr(Path, "is_file", lambda path: path.parent == tmp_path and path.exists())
    with pytest.raises(FileNotFoundError, match="apt install dataset-fashion-mnist") as caught:
        load_data(Data(name="fashion-mnist"), data_dir=str(tmp_path))
    assert "/usr/share/datasets/fashion-mnist" in str(caught.value)
