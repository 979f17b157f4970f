"""Examples in batches: small sets in memory, folders of images from disk.

Order and augmentation are pure functions of (seed, epoch, index), whatever the number of workers or
processes; see :mod:`powergrad.lab.data.streams`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from powergrad.lab.config import Data
from powergrad.lab.data import sets
from powergrad.lab.data.memory import MemorySplit
from powergrad.lab.data.split import Batch, Mixing, Split
from powergrad.lab.data.streams import balanced_subset, held_out

__all__ = ["Batch", "Datasets", "Split", "load_data"]

SETS = {
    "digits": sets.load_digits,
    "fashion-mnist": sets.load_fashion_mnist,
    "cifar10": sets.load_cifar10,
}


@dataclass(frozen=True)
class Datasets:
    """What a run trains and tests on: images of `channels` x `size` x `size`."""

    train: Split
    test: Split
    classes: tuple[str, ...]
    channels: int
    size: int


def load_data(config: Data, *, data_dir: str | None = None, workers: int = 0) -> Datasets:
    """The examples that a recipe names.

    With `hold_out`, a fixed fraction of each class of the training data replaces the test data,
    unaugmented. With `limit`, what is left is cut to a fixed, balanced subset of all classes.
    Neither depends on a seed.

    Args:
        config: The recipe's section.
        data_dir: Where files are looked for first; then ``$POWERGRAD_DATA``, then where packages
            install them.
        workers: Processes that decode a folder's images.

    Returns:
        The training and test splits.

    Raises:
        FileNotFoundError: If the files are missing; says where they were looked for and how to get
            them.
        ValueError: If the name is unknown, a file is not what it should be, or options do not fit.

    Example:
        >>> data = load_data(Data(name="digits"))
        >>> len(data.train), len(data.test), data.train.steps(64)
        (1438, 359, 22)
        >>> images, labels = next(data.train.train_batches(64, seed=0, epoch=0))
        >>> images.shape, labels.shape
        (torch.Size([64, 1, 8, 8]), torch.Size([64]))
    """
    if config.name in SETS:
        return _from_memory(config, SETS[config.name](data_dir))
    if config.name.startswith("folder:"):
        return _from_folder(config, data_dir, workers)
    raise ValueError(
        f"Expected `data.name` to be {', '.join(SETS)} or folder:PATH, but got {config.name!r}."
    )


def _from_memory(config: Data, stored: sets.ImageSet) -> Datasets:
    kept, held = _choose(stored.train.labels.numpy(), config)
    test = stored.train.subset(held) if config.hold_out else stored.test

    def split(examples: sets.Examples, *, padding: int = 0, flip: bool = False) -> MemorySplit:
        return MemorySplit(
            _resized(examples.images, config.size),
            examples.labels,
            mean=stored.mean,
            std=stored.std,
            mixing=Mixing(config.mixup, config.cutmix, len(stored.classes)),
            padding=padding,
            flip=flip,
        )

    channels, size = stored.train.images.shape[1:3]
    train = split(stored.train.subset(kept), padding=config.crop_padding, flip=config.flip)
    return Datasets(train, split(test), stored.classes, channels, config.size or size)


def _from_folder(config: Data, data_dir: str | None, workers: int) -> Datasets:
    from powergrad.lab.data import folder

    if config.crop_padding:
        raise ValueError(
            "Expected `data.crop_padding` to be 0 for a folder, whose training crop is `scale` and "
            f"`ratio`, but got {config.crop_padding}."
        )
    for name, (low, high), most in (("scale", config.scale, 1.0), ("ratio", config.ratio, np.inf)):
        if not low <= high <= most:
            raise ValueError(
                f"Expected `data.{name}` to be the least and the largest"
                f"{', at most 1' if most == 1 else ''}, but got {low} and {high}."
            )
    path = Path(config.name.removeprefix("folder:")).expanduser()
    candidates = [path, *(root / path for root in sets.roots(data_dir))]
    root = next((candidate for candidate in candidates if candidate.is_dir()), None)
    if root is None:
        places = " or ".join(repr(str(candidate)) for candidate in dict.fromkeys(candidates))
        raise FileNotFoundError(
            f"Expected a folder with train/ and val/, but got none at {places}."
        )
    train, test, classes = folder.list_folder(root)
    kept, held = _choose(train.labels, config)
    size = config.size or 224

    def split(listing: folder.Listing) -> folder.FolderSplit:
        mixing = Mixing(config.mixup, config.cutmix, len(classes))
        return folder.FolderSplit(folder.Reader(listing, size, config), mixing, workers)

    test = train.subset(held) if config.hold_out else test
    return Datasets(split(train.subset(kept)), split(test), classes, 3, size)


def _choose(labels: NDArray[np.int64], config: Data) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The indices to train on, and those held out."""
    is_held = held_out(labels, config.hold_out)
    kept, held = np.flatnonzero(~is_held), np.flatnonzero(is_held)
    if config.hold_out and not (len(kept) and len(held)):
        raise ValueError(
            f"Expected `data.hold_out` to leave examples to train and to test on, but got "
            f"{config.hold_out}: {len(kept)} and {len(held)} of {len(labels)}."
        )
    if config.limit is not None:
        kept = kept[balanced_subset(labels[kept], config.limit)]
    return kept, held


def _resized(images: Tensor, size: int | None) -> Tensor:
    """Bytes resized to a square of `size`, bilinear with antialiasing, if they are not."""
    if size is None or images.shape[2:] == (size, size):
        return images
    parts = (
        F.interpolate(part, (size, size), mode="bilinear", antialias=True)
        for part in images.split(1024)
    )
    return torch.cat(list(parts))
