"""Batches of examples: small data sets in memory, folders of images from disk.

Order and augmentation are pure functions of (seed, epoch, index) and do not depend on the number of
workers or processes; see :mod:`powergrad.lab.data.streams`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from powergrad.lab.data import sets
from powergrad.lab.data.fingerprints import fingerprint, folder_fingerprint
from powergrad.lab.data.listing import Listing, choose, choose_images, open_folder
from powergrad.lab.data.memory import MemorySplit
from powergrad.lab.data.split import Batch, Mixing, Split
from powergrad.lab.trainer.recipe import Data

__all__ = ["Batch", "Datasets", "Split", "fingerprint", "folder_fingerprint", "load_data"]


@dataclass(frozen=True)
class Datasets:
    """The training and test data of a run: images of `channels` x `size` x `size`.

    `has_test` is whether the data have their own test set, even if it is not used (see `hold_out`).
    """

    train: Split
    test: Split
    classes: tuple[str, ...]
    channels: int
    size: int
    has_test: bool = True


def load_data(config: Data, *, data_dir: str | None = None, workers: int = 0) -> Datasets:
    """Load the data of a recipe.

    With `hold_out`, a fixed fraction of each class of the training data replaces the test data,
    unaugmented; images of the same group (`groups`) stay together. With `limit`, the remaining
    training data are reduced to a fixed subset that is balanced over the classes. Neither depends
    on a seed.

    Example:
        >>> data = load_data(Data(name="digits"))
        >>> len(data.train), len(data.test), data.train.steps(64)
        (1438, 359, 22)
        >>> images, labels = next(data.train.train_batches(64, seed=0, epoch=0))
        >>> images.shape, labels.shape
        (torch.Size([64, 1, 8, 8]), torch.Size([64]))
    """
    if config.name.startswith("folder:"):
        return _from_folder(config, data_dir, workers)
    return _from_memory(config, sets.find_set(config.name).load(data_dir))


def _from_memory(config: Data, stored: sets.ImageSet) -> Datasets:
    kept, held = choose(stored.train.labels.numpy(), config)
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
            "Expected `data.crop_padding` to be 0 for a folder, where `scale` and `ratio` set the "
            f"training crop, but got {config.crop_padding}."
        )
    for name, (low, high), most in (("scale", config.scale, 1.0), ("ratio", config.ratio, np.inf)):
        if not low <= high <= most:
            raise ValueError(
                f"Expected `data.{name}` to be the smallest and the largest value"
                f"{', at most 1' if most == 1 else ''}, but got {low} and {high}."
            )
    images = open_folder(config, data_dir)
    if images.problems:
        raise ValueError("\n".join(images.problems))
    size = config.size or 224

    def split(listing: Listing) -> folder.FolderSplit:
        mixing = Mixing(config.mixup, config.cutmix, len(images.classes))
        return folder.FolderSplit(folder.Reader(listing, size, config), mixing, workers)

    train, test = choose_images(images, config)
    return Datasets(split(train), split(test), images.classes, 3, size, images.test is not None)


def _resized(images: Tensor, size: int | None) -> Tensor:
    """Resize images to a square of `size`, bilinear with antialiasing, if needed."""
    if size is None or images.shape[2:] == (size, size):
        return images
    parts = (
        F.interpolate(part, (size, size), mode="bilinear", antialias=True)
        for part in images.split(1024)
    )
    return torch.cat(list(parts))
