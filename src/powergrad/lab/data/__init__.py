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
from torch import Tensor

from powergrad.lab.config import Data
from powergrad.lab.data import sets
from powergrad.lab.data.memory import MemorySplit
from powergrad.lab.data.split import Batch, Mixing, Split
from powergrad.lab.data.streams import balanced_subset, held_out

__all__ = ["Batch", "Datasets", "Split", "load_data"]


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

    With `hold_out`, a fixed fraction of each class of the training data takes the place of the test
    data, unaugmented. With `limit`, what is left is cut to a fixed subset with all classes alike.
    Neither depends on a seed.

    Args:
        config: The recipe's section.
        data_dir: Where files are looked for first; then ``$POWERGRAD_DATA``, then where packages
            install them.
        workers: Processes that decode a folder's images.

    Returns:
        The training and test splits.

    Raises:
        FileNotFoundError: If the files are not there; says where they were looked for and how to
            get them.
        ValueError: If the name is unknown, a file is not what it should be, or options do not fit.

    Example:
        >>> data = load_data(Data(name="digits"))
        >>> len(data.train), len(data.test), data.train.steps(64)
        (1438, 359, 22)
        >>> images, labels = next(data.train.train_batches(64, seed=0, epoch=0))
        >>> images.shape, labels.shape
        (torch.Size([64, 1, 8, 8]), torch.Size([64]))
    """
    if config.name == "digits":
        return _in_memory(config, sets.load_digits())
    if config.name == "fashion-mnist":
        return _in_memory(config, sets.load_fashion_mnist(data_dir))
    if config.name == "cifar10":
        return _in_memory(config, sets.load_cifar10(data_dir))
    if config.name.startswith("folder:"):
        return _from_folder(config, data_dir, workers)
    raise ValueError(
        "Expected `data.name` to be digits, fashion-mnist, cifar10 or folder:PATH, but got "
        f"{config.name!r}."
    )


def _in_memory(config: Data, stored: sets.ImageSet) -> Datasets:
    kept, tested = _choose(stored.train.labels, config)
    train = sets.Examples(*(each[kept] for each in stored.train))
    test = stored.test
    if config.hold_out:
        test = sets.Examples(*(each[tested] for each in stored.train))
    mixing = Mixing(config.mixup, config.cutmix, len(stored.classes))

    def split(examples: sets.Examples, *, padding: int = 0, flip: bool = False) -> MemorySplit:
        return MemorySplit(
            _resized(examples.images, config.size),
            examples.labels,
            mean=stored.mean,
            std=stored.std,
            mixing=mixing,
            padding=padding,
            flip=flip,
        )

    channels, size = stored.train.images.shape[1:3]
    return Datasets(
        split(train, padding=config.crop_padding, flip=config.flip),
        split(test),
        stored.classes,
        channels,
        config.size or size,
    )


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
    places = [path, *(root / path for root in sets.roots(data_dir))]
    root = next((place for place in places if place.is_dir()), None)
    if root is None:
        raise FileNotFoundError(
            f"Expected a folder with train/ and val/, but got none at "
            f"{' or '.join(repr(str(place)) for place in dict.fromkeys(places))}."
        )
    train, test, classes = folder.list_folder(root)
    kept, tested = _choose(torch.from_numpy(train.labels), config)
    if config.hold_out:
        test = train.subset(tested)
    size = config.size or 224
    mixing = Mixing(config.mixup, config.cutmix, len(classes))

    def split(listing: folder.Listing) -> folder.FolderSplit:
        return folder.FolderSplit(folder.Reader(listing, size, config), mixing, workers)

    return Datasets(split(train.subset(kept)), split(test), classes, 3, size)


def _choose(labels: Tensor, config: Data) -> tuple[np.ndarray, np.ndarray]:
    """The indices to train on, and those held out."""
    classes = labels.numpy()
    held = held_out(classes, config.hold_out)
    kept, tested = np.flatnonzero(~held), np.flatnonzero(held)
    if config.hold_out and not (len(kept) and len(tested)):
        raise ValueError(
            f"Expected `data.hold_out` to leave examples to train and to test on, but got "
            f"{config.hold_out}: {len(kept)} and {len(tested)} of {len(classes)}."
        )
    if config.limit is not None:
        kept = kept[balanced_subset(classes[kept], config.limit)]
    return kept, tested


def _resized(images: Tensor, size: int | None) -> Tensor:
    """Bytes resized to a square of `size`, bilinear with antialiasing, if they are not."""
    if size is None or images.shape[2:] == (size, size):
        return images
    shape = (size, size)
    parts = images.split(1024)
    return torch.cat([F.interpolate(p, shape, mode="bilinear", antialias=True) for p in parts])
