"""Folders of images, one folder per class, decoded with Pillow in threads.

`draft` lets libjpeg decode an image at a half, a quarter or an eighth of its size if the crop is
that much larger than the result. Then the crop is resized, bilinear with antialiasing: in training
by PyTorch, which is faster; in testing by Pillow, so that others can prepare images in the same way
without PyTorch.

EXIF orientation is ignored, as in torchvision and timm. Transparency is dropped. Of several frames,
the first is used.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from powergrad.lab.data.data_options import Data
from powergrad.lab.data.listing import FORMATS, Listing, file_stamp
from powergrad.lab.data.split import Batch, Split
from powergrad.lab.data.streams import Stream, uniform

MEAN, STD = 255 * torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])  # ImageNet's
AHEAD = 32  # images per thread that are read before they are used
ATTEMPTS = 10
MOST_KEPT = 512 << 20  # bytes of decoded images that a process keeps

Box = tuple[int, int, int, int]  # left, top, right, bottom
Chooser = Callable[[int, int], Box]  # of a box, by width and height
Ends = tuple[float, float]
T = TypeVar("T")


def random_box(width: int, height: int, draws: Sequence[float], scale: Ends, ratio: Ends) -> Box:
    """The box of a random resized crop, with uniform area and log-uniform aspect ratio."""
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for area, aspect in zip(draws[2::2], draws[3::2], strict=True):
        area = width * height * (scale[0] + area * (scale[1] - scale[0]))
        aspect = math.exp(low + aspect * (high - low))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(draws[0] * (width - w + 1)), int(draws[1] * (height - h + 1))
            return left, top, left + w, top + h
    w = max(1, min(width, round(height * ratio[1])))
    h = max(1, min(height, round(width / ratio[0])))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def centre_box(width: int, height: int, fraction: float) -> Box:
    """The square in the centre whose side is `fraction` of the shorter side."""
    side = max(1, round(min(width, height) * fraction))
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


class Picture(NamedTuple):
    """A decoded image of mode L or RGB, perhaps smaller than in its file."""

    image: Image.Image
    width: int  # in the file
    height: int


def decode(path: bytes | str | Path, least: Callable[[int, int], tuple[int, int]]) -> Picture:
    """Decode an image as small as possible, but not below ``least(width, height)``.

    Its format is that of its content, and one of :data:`~powergrad.lab.data.listing.FORMATS`.
    """
    Image.init()
    known = [name for name in FORMATS if name in Image.OPEN]  # AVIF needs Pillow 11.3
    with Image.open(path, formats=known) as image:
        width, height = image.size
        image.draft(None, least(width, height))
        image.load()
        pixels = eight_bits(image)
        if pixels.mode == "P":  # its transparency may have a form that only RGBA supports
            pixels = pixels.convert("RGBA")
        plain = pixels if pixels.mode in ("L", "RGB") else pixels.convert("RGB")
        return Picture(plain, width, height)


def cut(picture: Picture, box: Box, size: int, *, by_pillow: bool) -> Tensor:
    """A box of an image, in pixels of its file, resized to `size` by PyTorch or by Pillow."""
    image, (left, top, right, bottom) = picture.image, box
    x, y = image.width / picture.width, image.height / picture.height
    edges = left * x, top * y, right * x, bottom * y
    left, top, right, bottom = (int(edge + 0.5) for edge in edges)
    crop = image.crop((left, top, right, bottom))
    if by_pillow:
        crop = crop.resize((size, size), Image.Resampling.BILINEAR)
    # A permuted batch of one, which PyTorch treats as channels-last without a copy.
    pixels = torch.from_numpy(np.atleast_3d(np.array(crop)))[None].permute(0, 3, 1, 2)
    if not by_pillow:
        pixels = F.interpolate(pixels, (size, size), mode="bilinear", antialias=True)
    return pixels[0]


def read_image(
    path: bytes | str | Path, choose: Chooser, size: int, *, by_pillow: bool = False
) -> Tensor:
    """The box ``choose(width, height)`` of an image, resized to `size` by PyTorch or by Pillow."""

    def least(width: int, height: int) -> tuple[int, int]:  # at least `size` pixels in the box
        left, top, right, bottom = choose(width, height)
        return math.ceil(width * size / (right - left)), math.ceil(height * size / (bottom - top))

    picture = decode(path, least)
    box = choose(picture.width, picture.height)
    return cut(picture, box, size, by_pillow=by_pillow)


def eight_bits(image: Image.Image) -> Image.Image:
    """Scale integers or floats to bytes: from 0..65535, 0..1, 0..255, or the image's own range."""
    if image.mode[0] not in "IF":
        return image
    values = np.asarray(image, np.float64)
    least, largest = values.min(), values.max()
    if not np.isfinite([least, largest]).all():
        raise ValueError("the image has pixels that are not finite")
    highs = (1.0, 255.0, 65535.0) if image.mode == "F" else (65535.0,)
    low, high = 0.0, next((high for high in highs if largest <= high), math.inf)
    if least < 0 or high == math.inf:
        low, high = least, max(largest, least + 1)
    return Image.fromarray(np.rint((values - low) * (255 / (high - low))).astype(np.uint8))


Moment = tuple[int, int] | None  # the seed and the epoch of the augmentation; None for testing
Plan = tuple[int, Chooser, bool]  # the index of an image, its box, and whether it is mirrored
Bad = tuple[int, str]  # the index of an image that cannot be read, and the reason


# What this process has decoded, by path and time of the file: reduced images for training, finished
# ones for testing; all for splits with the settings `_kept_for`.
_kept: dict[Any, Picture | Tensor] = {}
_kept_for: list[Any] = []


class FolderSplit(Split):
    """Images in files, read by `workers` threads, or by the caller's if that is 0.

    If all images fit into :data:`MOST_KEPT` bytes after they are reduced, this process keeps them,
    so that further epochs and runs decode nothing.

    In testing, unreadable images are skipped. In training, if `data.bad_images` is "skip", the next
    readable image of the listing, usually of the same class, replaces an unreadable one, with the
    augmentation of the latter.
    """

    def __init__(self, listing: Listing, config: Data, *, size: int, workers: int) -> None:
        labels, mean, std = torch.from_numpy(listing.labels), MEAN.tolist(), STD.tolist()
        super().__init__(labels, config, mean=mean, std=std)
        self.listing, self.size, self.workers = listing, size, workers
        self.skips = config.bad_images == "skip"
        self._area = size**2 / config.scale[0] / min(config.ratio[0], 1 / config.ratio[1])
        self.is_kept = 3 * self._area * len(listing.paths) <= MOST_KEPT
        if _kept_for != (settings := [size, config.scale, config.ratio, config.test_crop]):
            _kept.clear()
            _kept_for[:] = settings

    def _train(self, rows: NDArray[np.int64], seed: int, epoch: int) -> Iterator[Batch]:
        for images, index in self._read(list(rows), (seed, epoch)):
            if len(index) < rows.shape[1]:
                raise ValueError(f"No image in {os.fsdecode(self.listing.root)!r} can be read.")
            yield Batch(images, self.labels[index])

    def _test(self, rows: Sequence[NDArray[np.int64]]) -> Iterator[tuple[Batch, Tensor]]:
        for images, index in self._read(rows, None):
            if len(index):
                yield Batch(images, self.labels[index]), index

    def _read(
        self, rows: Sequence[NDArray[np.int64]], moment: Moment
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The normalised images of each row of indices, and the indices that could be read."""
        plans = itertools.chain.from_iterable(self._plans(row, moment) for row in rows)
        read = functools.partial(self._read_one, is_test=moment is None)
        results = in_threads(read, plans, self.workers)
        for row in rows:
            images = torch.empty(len(row), 3, self.size, self.size)
            indices: list[int] = []
            for image, index, bad in itertools.islice(results, len(row)):
                self._report(bad)
                if image is not None:
                    images[len(indices)] = image
                    indices.append(index)
            images = images[: len(indices)].sub_(self.mean).mul_(self.scale)
            yield images, torch.tensor(indices, dtype=torch.int64)

    def _read_one(self, plan: Plan, is_test: bool) -> tuple[Tensor | None, int, list[Bad]]:
        """The image of a plan and its index, and those that cannot be read."""
        (index, choose, mirrored), count = plan, len(self.labels)
        bad: list[Bad] = []
        attempts = count if self.skips and not is_test else 1
        for candidate in (i % count for i in range(index, index + attempts)):
            try:
                image = self._image(self.listing.path(candidate), choose, is_test)
                return image.flip(2) if mirrored else image, candidate, bad
            except MemoryError:
                raise
            except Exception as error:  # decoders raise all kinds of errors for damaged files
                bad.append((candidate, f"{type(error).__name__}: {error}"))
        return None, index, bad

    def _image(self, path: bytes, choose: Chooser, is_test: bool) -> Tensor:
        """An image for training or testing, decoded now or before."""
        if not self.is_kept:
            return read_image(path, choose, self.size, by_pillow=is_test)
        key = path, file_stamp(path), is_test
        image = _kept.get(key)
        if image is None:
            exact = functools.partial(read_image, path, choose, self.size, by_pillow=True)
            image = exact() if is_test else self._reduced(path)
            _kept[key] = image
        if isinstance(image, Tensor):
            return image
        return cut(image, choose(image.width, image.height), self.size, by_pillow=False)

    def _reduced(self, path: bytes) -> Picture:
        """An image for training, just large enough that no random crop has to be enlarged."""
        picture = decode(path, self._least)
        least = self._least(picture.width, picture.height)
        if least[0] >= picture.image.width:
            return picture
        return picture._replace(image=picture.image.resize(least, Image.Resampling.BILINEAR))

    def _least(self, width: int, height: int) -> tuple[int, int]:
        """The size at which the smallest random crop has about `size` pixels per side."""
        factor = min(1.0, math.sqrt(self._area / (width * height)))
        return math.ceil(width * factor), math.ceil(height * factor)

    def _plans(self, indices: NDArray[np.int64], moment: Moment) -> Iterator[Plan]:
        config = self.config
        if moment is None:
            choose = functools.partial(centre_box, fraction=config.test_crop)
            yield from ((index, choose, False) for index in indices.tolist())
            return
        draws = uniform(Stream.AUGMENT, *moment, indices[:, None], np.arange(3 + 2 * ATTEMPTS))
        box = functools.partial(random_box, scale=config.scale, ratio=config.ratio)
        for index, (mirror, *row) in zip(indices.tolist(), draws.tolist(), strict=True):
            yield index, functools.partial(box, draws=row), config.flip and mirror < 0.5

    def _report(self, bad: list[Bad]) -> None:
        for index, reason in bad:
            path = os.fsdecode(self.listing.path(index))
            if not self.skips:
                remedy = "To skip such images, set `data.bad_images: skip`."
                raise ValueError(f"The image {path!r} cannot be read: {reason}. {remedy}")
            if path not in self.unreadable:
                self.unreadable[path] = reason
                warnings.warn(f"Skipped {path!r}: {reason}", stacklevel=2)


def in_threads(function: Callable[[Any], T], tasks: Iterable[Any], workers: int) -> Iterator[T]:
    """``function(task)`` of each task, in order; ahead of their use, if there are `workers`."""
    if not workers:
        yield from map(function, tasks)
        return
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for task in tasks:
            waiting.append(pool.submit(function, task))
            if len(waiting) > AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
