"""Batches: the order of examples, the part of each process, images in memory, mixing."""

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
    """Normalised images (B, C, H, W), and labels (B,) or, if mixed, probabilities (B, K)."""

    images: Tensor
    labels: Tensor


class Split(ABC):
    """Labelled images, normalised, in batches that depend only on (seed, epoch, index)."""

    is_kept = True  # whether the images are in memory after the first epoch

    def __init__(
        self, labels: Tensor, config: Data, *, classes: int, mean: list[float], std: list[float]
    ) -> None:
        self.labels, self.config, self.classes = labels, config, classes
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
        is_mixed = self.config.mixup or self.config.cutmix
        if is_mixed and part % 2:
            wanted = "an even number of examples per batch and process for mixup and cutmix"
            raise ValueError(f"Expected {wanted}, which mix neighbours, but got {part}.")
        order = permutation(len(self), seed, epoch)[: steps * batch_size]
        rows = order.reshape(steps, batch_size)[start:, rank * part : (rank + 1) * part]
        batches = self._train(rows, seed, epoch)
        return self._mixed(batches, seed, epoch, range(start, steps)) if is_mixed else batches

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

    def _mixed(
        self, batches: Iterator[Batch], seed: int, epoch: int, numbers: range
    ) -> Iterator[Batch]:
        from scipy.special import betaincinv  # slow to import

        number = np.array(numbers, np.int64)[:, None]
        draws = uniform(Stream.MIX, seed, epoch, number, np.arange(3))
        parameter = self.config.mixup or self.config.cutmix
        draws[:, 0] = betaincinv(parameter, parameter, draws[:, 0])  # Beta's inverse distribution
        for batch, (lam, y, x) in zip(batches, draws.tolist(), strict=True):
            labels = torch.zeros(len(batch.labels), self.classes)
            whole = Batch(batch.images, labels.scatter_(1, batch.labels[:, None], 1.0))
            yield mixup(whole, lam) if self.config.mixup else cutmix(whole, lam, (y, x))


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


def mixup(batch: Batch, lam: float) -> Batch:
    """``lam x_i + (1 - lam) x_j`` of images and of probabilities, with ``j = i ^ 1``.

    Neighbours are mixed, so that each process can mix its own part of a batch; the order is random.
    There is one ``lam ~ Beta(a, a)`` per batch, as in Zhang et al., *mixup*, ICLR 2018.
    """
    return Batch(*(torch.lerp(_partners(tensor), tensor, lam) for tensor in batch))


def cutmix(batch: Batch, lam: float, centre: tuple[float, float]) -> Batch:
    """Paste a box of image ``j = i ^ 1`` with ``1 - lam`` of the area into image ``i``.

    Probabilities are mixed in proportion to the areas, after the box is clipped at the border.
    There is one ``lam`` and one box per batch; its `centre` (y, x) is uniform, as in the code of
    Yun et al., *CutMix*, ICCV 2019.
    """
    height, width = batch.images.shape[2:]
    top, bottom = _side(height, lam, centre[0])
    left, right = _side(width, lam, centre[1])
    box = (..., slice(top, bottom), slice(left, right))
    images = batch.images.clone()
    images[box] = _partners(batch.images[box])
    kept = 1 - (bottom - top) * (right - left) / (height * width)
    return Batch(images, torch.lerp(_partners(batch.labels), batch.labels, kept))


def _partners(values: Tensor) -> Tensor:
    """`values` with neighbours exchanged: ``i ^ 1`` for ``i``."""
    return values.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def _side(length: int, lam: float, centre: float) -> tuple[int, int]:
    """The ends of a side of ``sqrt(1 - lam)`` times `length`, clipped at the border."""
    half = int(length * (1 - lam) ** 0.5) // 2
    middle = int(length * centre)
    return max(middle - half, 0), min(middle + half, length)
