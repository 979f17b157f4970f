"""Batches of examples: small data sets in memory, folders of images from disk.

Order and augmentation are pure functions of (seed, epoch, index) and do not depend on the number of
workers or processes; see :mod:`powergrad.lab.data.streams`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from powergrad.lab.data.data_options import Data as Data
from powergrad.lab.data.listing import choose, open_folder
from powergrad.lab.data.listing import fingerprint as fingerprint
from powergrad.lab.data.sets import SETS, Examples

if TYPE_CHECKING:
    from torch import Tensor

    from powergrad.lab.data.split import MemorySplit, Split


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
    """Load the data of a recipe; which images are held out or left out depends on no seed."""
    from powergrad.lab.data.folder import FolderSplit  # imports torch, which is slow
    from powergrad.lab.data.split import MemorySplit

    if config.is_folder:
        images, size = open_folder(config, data_dir), config.size or 224
        listings = images.choose(config)
        train, test = (FolderSplit(part, config, size=size, workers=workers) for part in listings)
        return Datasets(train, test, images.classes, 3, size, images.test is not None)
    stored = SETS[config.name]
    train, test, mean, std = stored.load(data_dir)
    kept, held = choose(train.labels.numpy(), config)

    def split(examples: Examples) -> MemorySplit:
        images = _resized(examples.images, config.size)
        return MemorySplit(images, examples.labels, config, mean=mean, std=std)

    channels, size = train.images.shape[1:3]
    train, test = train.subset(kept), train.subset(held) if config.hold_out else test
    return Datasets(split(train), split(test), stored.classes, channels, config.size or size)


def _resized(images: Tensor, size: int | None) -> Tensor:
    """Resize images to a square of `size`, bilinear with antialiasing, if needed."""
    import torch
    import torch.nn.functional as F

    if size is None or images.shape[2:] == (size, size):
        return images
    resize = partial(F.interpolate, size=(size, size), mode="bilinear", antialias=True)
    return torch.cat([resize(part) for part in images.split(1024)])
