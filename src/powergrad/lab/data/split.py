"""The common parts of all splits: the order of examples, the part of each process, mixing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from powergrad.lab.data.options import Data
from powergrad.lab.data.streams import Stream, permutation, uniform


class Batch(NamedTuple):
    """Normalised images (B, C, H, W), and labels (B,) or, if mixed, probabilities (B, K)."""

    images: Tensor
    labels: Tensor


class Split(ABC):
    """Labelled images, in batches that depend only on (seed, epoch, index).

    Pixels from 0 to 255 are normalised: `mean` is subtracted, and the result multiplied by `scale`.
    """

    def __init__(
        self,
        labels: Tensor,
        config: Data,
        *,
        classes: int,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        self.labels, self.config, self.classes = labels, config, classes
        self.mean = torch.tensor(mean).view(-1, 1, 1)
        self.scale = 1 / torch.tensor(std).view(-1, 1, 1)

    def __len__(self) -> int:
        return len(self.labels)

    def steps(self, batch_size: int) -> int:
        """The number of batches in a training epoch."""
        if batch_size > len(self):
            raise ValueError(
                f"Expected `train.batch_size` to be at most the {len(self)} training examples, but "
                f"got {batch_size}."
            )
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
            raise ValueError(
                "Expected an even number of examples per batch and process, because mixup and "
                f"cutmix mix neighbours, but got {part}."
            )
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
