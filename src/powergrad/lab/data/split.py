"""Batches: the order of examples, the part of each process, images in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from powergrad.lab.data.data_options import Data
from powergrad.lab.data.streams import Stream, permutation, uniform

BLOCK = 2**20  # pixel values prepared at once (4 MB), to reduce the overhead of small batches


class Batch(NamedTuple):
    """Normalised images (B, C, H, W), and labels (B,)."""

    images: Tensor
    labels: Tensor


class Split(ABC):
    """Labelled images, normalised, in batches that depend only on (seed, epoch, index)."""

    is_kept = True  # whether the images are in memory after the first epoch

    def __init__(
        self, labels: Tensor, config: Data, *, mean: list[float], std: list[float]
    ) -> None:
        self.labels, self.config = labels, config
        self.unreadable: dict[str, str] = {}  # the paths of images that were skipped, with reasons
        self.mean = torch.tensor(mean).view(-1, 1, 1)
        self.scale = 1 / torch.tensor(std).view(-1, 1, 1)

    def __len__(self) -> int:
        return len(self.labels)

    def steps(self, batch_size: int) -> int:
        """The number of batches in a training epoch."""
        if batch_size > len(self):
            wanted = f"at most the {len(self)} training examples"
            raise ValueError(f"Expected `train.batch_size` to be {wanted}, but got {batch_size}.")
        return len(self) // batch_size

    def train_batches(
        self,
        batch_size: int,
        *,
        seed: int,
        epoch: int,
        rank: int = 0,
        world: int = 1,
        start: int = 0,
    ) -> Iterator[Batch]:
        """The augmented batches of an epoch, without an incomplete last one."""
        steps, part = self.steps(batch_size), batch_size // world
        order = permutation(len(self), seed, epoch)[: steps * batch_size]
        rows = order.reshape(steps, batch_size)[start:, rank * part : (rank + 1) * part]
        return self._train(rows, seed, epoch)

    def test_batches(
        self, batch_size: int, *, rank: int = 0, world: int = 1
    ) -> Iterator[tuple[Batch, Tensor]]:
        """Every readable example once, in order and unaugmented, with its index in this split.

        Each rank has a contiguous range of the split, so the numbers of batches may differ by one.
        """
        low, high = (r * len(self) // world for r in (rank, rank + 1))
        part = -(-batch_size // world)
        return self._test([np.arange(i, min(i + part, high)) for i in range(low, high, part)])

    @abstractmethod
    def _train(self, rows: NDArray[np.int64], seed: int, epoch: int) -> Iterator[Batch]:
        """The augmented batch of each row of indices."""

    @abstractmethod
    def _test(self, rows: Sequence[NDArray[np.int64]]) -> Iterator[tuple[Batch, Tensor]]:
        """The unaugmented batch of each array of indices, with the indices that could be read."""


class MemorySplit(Split):
    """Images as bytes, (N, C, H, W).

    In training they are padded by `crop_padding` pixels of 0 and randomly cropped to their size,
    and with `flip` mirrored with probability 1/2.
    """

    def __init__(self, images: Tensor, labels: Tensor, config: Data, **options: Any) -> None:
        super().__init__(labels, config, **options)
        self.shape, self.padding, self.flip = images.shape[1:], config.crop_padding, config.flip
        self._pixels = F.pad(images, 4 * [self.padding]).flatten()

    def _train(self, rows: NDArray[np.int64], seed: int, epoch: int) -> Iterator[Batch]:
        size = rows.shape[1]
        block = max(1, BLOCK // (size * self.shape.numel()))  # batches
        for first in range(0, len(rows), block):
            index = torch.from_numpy(rows[first : first + block].reshape(-1))
            images = self._normalised(self._augmented(index, seed, epoch)).split(size)
            labels = self.labels.index_select(0, index).split(size)
            yield from map(Batch, images, labels)

    def _test(self, rows: Sequence[NDArray[np.int64]]) -> Iterator[tuple[Batch, Tensor]]:
        centre = torch.tensor(self.padding)
        for row in rows:
            index = torch.from_numpy(row)
            images = self._normalised(self._crops(index, centre, centre))
            yield Batch(images, self.labels[index]), index

    def _augmented(self, index: Tensor, seed: int, epoch: int) -> Tensor:
        if not (self.padding or self.flip):
            return self._crops(index, torch.tensor(0), torch.tensor(0))
        draws = uniform(Stream.AUGMENT, seed, epoch, index.numpy()[:, None], np.arange(3))
        mirror, top, left = torch.from_numpy(draws).unbind(1)
        top, left = ((draw * (2 * self.padding + 1)).long() for draw in (top, left))
        images = self._crops(index, top, left)
        if not self.flip:
            return images
        both = torch.stack([images, images.flip(3)], 1).flatten(0, 1)
        return both.index_select(0, 2 * torch.arange(len(index)) + (mirror < 0.5))

    def _crops(self, index: Tensor, top: Tensor, left: Tensor) -> Tensor:
        """Crops of the padded images at offsets of shape (B,) or ().

        A row of a crop is `width` consecutive pixels of the flat pixel array, and so a row of an
        overlapping view of it; `index_select` copies whole rows.
        """
        channels, height, width = self.shape
        high, wide = height + 2 * self.padding, width + 2 * self.padding
        row = torch.arange(channels)[:, None] * high + torch.arange(height)
        row = (index * channels * high + top).view(-1, 1, 1) + row
        begin = row * wide + left.view(-1, 1, 1)
        windows = self._pixels.as_strided((self._pixels.numel() - width + 1, width), (1, 1))
        return windows.index_select(0, begin.flatten()).view(-1, channels, height, width)

    def _normalised(self, images: Tensor) -> Tensor:
        return images.float().sub_(self.mean).mul_(self.scale)
