"""What all splits share: the order of examples, the part of each process, mixing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from powergrad.lab.data.streams import Stream, permutation, uniform


class Batch(NamedTuple):
    """Normalised images (B, C, H, W) and labels (B,), or probabilities (B, K) if mixed."""

    images: Tensor
    labels: Tensor


class Mixing(NamedTuple):
    """mixup's or cutmix's Beta parameter (0 is off), and the number of classes."""

    mixup: float
    cutmix: float
    classes: int


class Split(ABC):
    """Labelled images, in batches that are functions of (seed, epoch, index) alone."""

    def __init__(self, labels: Tensor, mixing: Mixing) -> None:
        self.labels, self.mixing = labels, mixing

    def __len__(self) -> int:
        return len(self.labels)

    def steps(self, batch_size: int) -> int:
        """The number of batches of a training epoch.

        Raises:
            ValueError: If `batch_size` is more than the examples.
        """
        if batch_size > len(self):
            raise ValueError(
                f"Expected `batch_size` to be at most the {len(self)} training examples, but got "
                f"{batch_size}."
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
        """The augmented batches of an epoch from number `start` on, without an incomplete last one.

        Args:
            batch_size: Examples per batch, over all processes.
            seed: The seed of order and augmentation, which are separate streams.
            epoch: Counted from 0.
            rank: Which contiguous part of each batch to return.
            world: The number of parts.
            start: The first batch's number within the epoch.

        Returns:
            This rank's part of each batch.

        Raises:
            ValueError: If `batch_size` is more than the examples or not a multiple of `world`, if a
                part is odd and mixed, or if `start` is beyond the epoch.
        """
        steps, part = self.steps(batch_size), batch_size // world
        is_mixed = self.mixing.mixup or self.mixing.cutmix
        if batch_size % world:
            raise ValueError(
                f"Expected `batch_size` to be a multiple of the {world} processes, but got "
                f"{batch_size}."
            )
        if not 0 <= start <= steps:
            raise ValueError(f"Expected `start` to be in [0, {steps}], but got {start}.")
        if is_mixed and part % 2:
            raise ValueError(
                "Expected an even number of examples in each process's part of a batch, since "
                f"mixup and cutmix mix neighbours, but got {part}."
            )
        order = permutation(len(self), seed, epoch)[: steps * batch_size]
        rows = order.reshape(steps, batch_size)[start:, rank * part : (rank + 1) * part]
        batches = self._train(rows, seed, epoch)
        return self._mixed(batches, seed, epoch, range(start, steps)) if is_mixed else batches

    def test_batches(
        self, batch_size: int, *, rank: int = 0, world: int = 1
    ) -> Iterator[tuple[Batch, Tensor]]:
        """Every example once, in order and unaugmented, with its index in this split.

        Ranks have contiguous ranges of the whole split, so their numbers of batches may differ by
        one. The last batch may be smaller, and so may be batches with unreadable images, which are
        left out.

        Args:
            batch_size: Examples per batch, over all processes.
            rank: Which range to return.
            world: The number of ranges.

        Returns:
            Batches with their indices (B,).
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
        parameter = self.mixing.mixup or self.mixing.cutmix
        draws[:, 0] = betaincinv(parameter, parameter, draws[:, 0])  # Beta's inverse distribution
        for batch, (lam, y, x) in zip(batches, draws.tolist(), strict=True):
            labels = torch.zeros(len(batch.labels), self.mixing.classes)
            whole = Batch(batch.images, labels.scatter_(1, batch.labels[:, None], 1.0))
            yield mixup(whole, lam) if self.mixing.mixup else cutmix(whole, lam, (y, x))


def mixup(batch: Batch, lam: float) -> Batch:
    """``lam x_i + (1 - lam) x_j`` of images and of probabilities, with ``j = i ^ 1``.

    Neighbours mix, so that processes can mix their parts of a batch; since the order is random, so
    are the partners. There is one ``lam ~ Beta(a, a)`` per batch, as in the paper.

    References:
        Zhang, Cisse, Dauphin, Lopez-Paz, *mixup: Beyond Empirical Risk Minimization*, ICLR 2018.
    """
    return Batch(*(torch.lerp(_partners(tensor), tensor, lam) for tensor in batch))


def cutmix(batch: Batch, lam: float, centre: tuple[float, float]) -> Batch:
    """Paste a box of image ``j = i ^ 1``, of ``1 - lam`` of the area, into image ``i``.

    Probabilities mix in proportion to the areas, after the box is cut at the border. There is one
    ``lam`` and one box per batch, its `centre` (y, x) uniform, as in the paper's code.

    References:
        Yun et al., *CutMix: Regularization Strategy to Train Strong Classifiers with Localizable
        Features*, ICCV 2019.
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
    """The ends of a side of ``sqrt(1 - lam)`` of `length`, cut at the border."""
    half = int(length * (1 - lam) ** 0.5) // 2
    middle = int(length * centre)
    return max(middle - half, 0), min(middle + half, length)
