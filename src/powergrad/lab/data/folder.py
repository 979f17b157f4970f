"""Folders of images, one folder per class, decoded with Pillow in worker processes.

An image is read once. `draft` lets libjpeg decode it at a half, a quarter or an eighth of its size
if the crop is that much larger than the result. Then the crop is resized in one step, bilinear with
antialiasing. Both PyTorch's and Pillow's resizing of bytes are within two levels (of 255) of the
exact filter. PyTorch's is faster on CPUs with AVX2, so it is used in training. Testing uses
Pillow's, so that others can prepare images in the same way without PyTorch. Bytes are sent between
processes; the receiving process normalises batches.

EXIF orientation is ignored, as in torchvision and timm. Transparency is dropped. Of several frames,
the first is used.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import math
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from powergrad.lab.data.listing import FORMATS, Listing
from powergrad.lab.data.split import Batch, Mixing, Split
from powergrad.lab.data.streams import Stream, uniform
from powergrad.lab.trainer.recipe import Data

MEAN = (0.485, 0.456, 0.406)  # the usual values for ImageNet
STD = (0.229, 0.224, 0.225)
CHUNK = 16  # images that a worker sends at once: 2.4 MB of shared memory at 224 pixels
ATTEMPTS = 10

Box = tuple[int, int, int, int]  # left, top, right, bottom


# One image ---------------------------------------------------------------------------------------


def random_box(
    width: int,
    height: int,
    draws: Sequence[float],
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> Box:
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
    """The square in the centre whose side is `fraction` of the shorter side.

    Resizing it to ``size`` equals resizing the shorter side to ``size / fraction`` and then
    cropping ``size`` from the centre.
    """
    side = max(1, round(min(width, height) * fraction))
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def open_image(path: bytes | str | Path) -> Image.Image:
    """Open an image in one of the :data:`~powergrad.lab.data.listing.FORMATS`, by its content."""
    return Image.open(path, formats=_formats())


@functools.cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)  # AVIF needs Pillow 11.3


def read_image(
    path: bytes | str | Path,
    choose: Callable[[int, int], Box],
    size: int,
    *,
    by_pillow: bool = False,
) -> Tensor:
    """The box ``choose(width, height)`` of an image, resized to `size` by PyTorch or by Pillow."""
    with open_image(path) as image:
        width, height = image.size
        left, top, right, bottom = choose(width, height)
        # Decode as small as possible with at least `size` pixels in the box.
        least = math.ceil(width * size / (right - left)), math.ceil(height * size / (bottom - top))
        image.draft(None, least)
        x, y = image.width / width, image.height / height
        edges = left * x, top * y, right * x, bottom * y
        left, top, right, bottom = (int(edge + 0.5) for edge in edges)
        crop = eight_bits(image).crop((left, top, right, bottom))
    crop = grey_or_rgb(crop)
    if by_pillow:
        crop = crop.resize((size, size), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.atleast_3d(np.array(crop))).permute(2, 0, 1)
    # A permuted batch of one, which PyTorch treats as channels-last without a copy.
    pixels = torch.from_numpy(np.atleast_3d(np.array(crop)))[None].permute(0, 3, 1, 2)
    return F.interpolate(pixels, (size, size), mode="bilinear", antialias=True)[0]


def eight_bits(image: Image.Image) -> Image.Image:
    """Convert an image of integers or floats to bytes; return any other image unchanged.

    The range that becomes 0 to 255 is the first of these that contains all values of the image: 0
    to 65535 for integers; 0 to 1, 0 to 255 and 0 to 65535 for floats; otherwise the range of the
    image itself. (Pillow's `convert` clips at 255.)
    """
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


def grey_or_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of bytes to mode L or RGB."""
    if image.mode == "P":  # its transparency may have a form that only RGBA supports
        image = image.convert("RGBA")
    return image if image.mode in ("L", "RGB") else image.convert("RGB")


# Many images -------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """The result of a worker: images, uint8 (n, 3, S, S), their indices, and unreadable ones."""

    images: Tensor
    indices: Tensor
    bad: list[tuple[int, str]]  # index and reason


class Task(NamedTuple):
    """Indices to read, and the (seed, epoch) of their augmentation (None for testing)."""

    indices: NDArray[np.int64]
    moment: tuple[int, int] | None


class Reader(Dataset[Chunk]):
    """Reads chunks. It is a pure function of the task, so any process can handle any task.

    In testing, unreadable images are skipped. In training, if `data.bad_images` is "skip", the next
    readable image of the listing, usually of the same class, replaces an unreadable one, with the
    augmentation of the latter.
    """

    def __init__(self, listing: Listing, size: int, config: Data) -> None:
        self.listing, self.size, self.config = listing, size, config
        self.skip = config.bad_images == "skip"

    def __getitem__(self, task: Task) -> Chunk:
        images = torch.empty(len(task.indices), 3, self.size, self.size, dtype=torch.uint8)
        indices: list[int] = []
        bad: list[tuple[int, str]] = []
        count = len(self.listing.labels)
        attempts = count if task.moment and self.skip else 1
        for index, choose, mirrored in self._plans(task):
            for candidate in (i % count for i in range(index, index + attempts)):
                try:
                    image = read_image(
                        self.listing.path(candidate),
                        choose,
                        self.size,
                        by_pillow=task.moment is None,
                    )
                except MemoryError:
                    raise
                except Exception as error:  # decoders raise all kinds of errors for damaged files
                    bad.append((candidate, f"{type(error).__name__}: {error}"))
                else:
                    images[len(indices)] = image.flip(2) if mirrored else image
                    indices.append(candidate)
                    break
        return Chunk(images[: len(indices)], torch.tensor(indices, dtype=torch.int64), bad)

    def _plans(self, task: Task) -> Iterator[tuple[int, Callable[[int, int], Box], bool]]:
        """For each index: the function that chooses the box, and whether to mirror."""
        if task.moment is None:
            choose = functools.partial(centre_box, fraction=self.config.test_crop)
            yield from ((index, choose, False) for index in task.indices.tolist())
            return
        scale, ratio = self.config.scale, self.config.ratio
        columns = np.arange(3 + 2 * ATTEMPTS)
        draws = uniform(Stream.AUGMENT, *task.moment, task.indices[:, None], columns)
        for index, (mirror, *row) in zip(task.indices.tolist(), draws.tolist(), strict=True):
            choose = functools.partial(random_box, draws=row, scale=scale, ratio=ratio)
            yield index, choose, self.config.flip and mirror < 0.5


class FolderSplit(Split):
    """Images in files, read by `workers` processes, or by this process if that is 0.

    The processes exist as long as the iterator of an epoch, and end when this process ends.
    """

    def __init__(self, reader: Reader, mixing: Mixing, workers: int) -> None:
        super().__init__(torch.from_numpy(reader.listing.labels), mixing)
        self.reader, self.workers = reader, workers
        self._reported: set[int] = set()

    def _train(self, rows: NDArray[np.int64], seed: int, epoch: int) -> Iterator[Batch]:
        for images, index in self._read(list(rows), (seed, epoch)):
            if len(index) < rows.shape[1]:
                folder = os.fsdecode(self.reader.listing.root)
                raise ValueError(f"Expected readable images in {folder!r}, but got none.")
            yield Batch(images, self.labels[index])

    def _test(self, rows: Sequence[NDArray[np.int64]]) -> Iterator[tuple[Batch, Tensor]]:
        for images, index in self._read(rows, None):
            if len(index):
                yield Batch(images, self.labels[index]), index

    def _read(
        self, rows: Sequence[NDArray[np.int64]], moment: tuple[int, int] | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The normalised images of each row of indices, and the indices that could be read."""
        tasks = [
            [Task(row[i : i + CHUNK], moment) for i in range(0, len(row), CHUNK)] for row in rows
        ]
        loader = DataLoader(
            self.reader,
            sampler=list(itertools.chain.from_iterable(tasks)),
            batch_size=None,
            num_workers=self.workers,
            collate_fn=unchanged,
            worker_init_fn=functools.partial(begin_worker, os.getpid()),
            generator=torch.Generator(),  # otherwise it draws a seed from the global generator
        )
        held = [iter(loader)]
        atexit.register(held.clear)  # ends the workers if they still run at exit
        mean = 255 * torch.tensor(MEAN).view(3, 1, 1)
        factor = 1 / (255 * torch.tensor(STD).view(3, 1, 1))
        try:
            for row, row_tasks in zip(rows, tasks, strict=True):
                images = torch.empty(len(row), 3, self.reader.size, self.reader.size)
                indices, count = [], 0
                for chunk in itertools.islice(held[0], len(row_tasks)):
                    self._report(chunk.bad)
                    rows_read = images[count : count + len(chunk.indices)]
                    rows_read.copy_(chunk.images).sub_(mean).mul_(factor)
                    count += len(chunk.indices)
                    indices.append(chunk.indices)
                yield images[:count], torch.cat(indices)
        finally:
            atexit.unregister(held.clear)
            held.clear()

    def _report(self, bad: list[tuple[int, str]]) -> None:
        for index, reason in bad:
            path = os.fsdecode(self.reader.listing.path(index))
            if not self.reader.skip:
                raise ValueError(
                    f"Expected a readable image at {path!r}, but got {reason}. To skip such "
                    "images, set `data.bad_images: skip`."
                )
            if index not in self._reported:
                self._reported.add(index)
                warnings.warn(f"Skipped {path!r}: {reason}", stacklevel=2)


def unchanged(chunk: Any) -> Any:
    """The identity, as a collate function that can be pickled."""
    return chunk


def begin_worker(main: int, worker: int) -> None:
    """Let the main process handle signals.

    If a worker dies immediately, PyTorch raises in the main process, which may be saving its state.
    So a worker ignores Ctrl-C, and exits ten seconds after SIGTERM, which an exiting main process
    sends too. If the main process was killed before this worker started, PyTorch's watchdog would
    never notice, so the worker exits here.
    """
    if multiprocessing.get_start_method() == "fork" and os.getppid() != main:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(10))
