"""Scans a folder of images before training.

Every image is decoded once, in parallel, and the findings are cached (in ``$POWERGRAD_CACHE``, or
in ``powergrad/`` in ``$XDG_CACHE_HOME`` or ``~/.cache``): a second scan decodes only the files
whose size or modification time has changed.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL
import torch
from PIL import UnidentifiedImageError
from torch.utils.data import DataLoader, Dataset

from powergrad.lab.data.folder import begin_worker, eight_bits, grey_or_rgb, open_image, unchanged
from powergrad.lab.data.listing import (
    BROKEN,
    EXTENSIONS,
    LOOP,
    LOOSE,
    Ignored,
    ImageFolder,
    Listing,
    choose_images,
    open_folder,
    some,
)
from powergrad.lab.files import FileError, write_text
from powergrad.lab.trainer.recipe import Data

FORMAT = 1  # of the cache
CHUNK = 64  # images that a process decodes at a time
FEW = 10  # warn about classes with fewer training images
SHOWN = 20  # the maximal number of unreadable images to list
ALONE = 512  # up to this many images, starting processes takes longer than decoding
DARK = 16  # warn about 16-bit images whose largest value is below a 16th of the range

Progress = Callable[[int, int], None]


class Checked(NamedTuple):
    """The findings about a file; `error` is the reason why it cannot be read, if any."""

    bytes: int
    time: int  # modification time in nanoseconds
    format: str = ""
    width: int = 0
    height: int = 0
    largest: float | None = None  # the largest value, for images with more than 8 bits
    error: str = ""


@dataclass(frozen=True)
class Scan:
    """The result of a scan.

    Attributes:
        root: The folder.
        train: The number of training images.
        test: The number of test images.
        classes: The names of the classes.
        formats: The number of images per format, the most frequent first.
        widths: The smallest, median and largest width, in pixels.
        heights: The smallest, median and largest height, in pixels.
        ignored: Files and folders that are not used, with the reasons.
        unreadable: The path of every image that cannot be decoded, with the reason.
        problems: The reasons why a run would fail, if any.
        warnings: Warnings for the user.
        cached: The number of images that were not decoded, because they have not changed since the
            last scan.
        seconds: The duration of the scan.
    """

    root: str
    train: int
    test: int
    classes: tuple[str, ...]
    formats: dict[str, int]
    widths: tuple[int, int, int]
    heights: tuple[int, int, int]
    ignored: list[Ignored]
    unreadable: list[tuple[str, str]]
    problems: list[str]
    warnings: list[str]
    cached: int
    seconds: float

    def summary(self) -> list[str]:
        """Lines for the terminal: images, classes, formats, sizes and ignored files."""
        formats = ", ".join(f"{count:,} {name}" for name, count in self.formats.items())
        lines = [
            f"{self.train:,} training images, {self.test:,} test images, "
            f"{len(self.classes):,} classes",
            f"{formats or 'no readable images'}; {self._sizes()}",
        ]
        by_reason = collections.defaultdict(list)
        for path, reason in self.ignored:
            by_reason[reason].append(path)
        lines += [
            f"ignored ({reason}): {len(paths):,}, {some(paths, 3)}"
            for reason, paths in by_reason.items()
        ]
        return lines

    def _sizes(self) -> str:
        (low, width, high), (flat, height, tall) = self.widths, self.heights
        if (low, flat) == (high, tall):
            return f"all {width}x{height} pixels"
        return f"{low}x{flat} to {high}x{tall} pixels, median {width}x{height}"

    def to_dict(self) -> dict[str, Any]:
        """The scan as JSON values."""
        ignored = [item._asdict() for item in self.ignored]
        unreadable = [{"path": path, "reason": reason} for path, reason in self.unreadable]
        return {**asdict(self), "ignored": ignored, "unreadable": unreadable}


def scan_folder(
    config: Data,
    data_dir: str | None = None,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Scan:
    """Scan the folder of images of a recipe, and decode every image."""
    began = time.perf_counter()
    folder = open_folder(config, data_dir)
    images, cached = _check_all(folder, workers, progress)
    readable = [image for image in images.values() if not image.error]
    unreadable = [(path, image.error) for path, image in images.items() if image.error]
    problems, cautions = list(folder.problems), list(_warnings(folder, images))
    if unreadable:
        _add_unreadable(folder, config, unreadable, problems, cautions)
    train, test = 0, 0
    if not folder.problems:
        try:
            chosen = choose_images(folder, config)
        except ValueError as error:
            problems.append(str(error))
        else:
            train, test = (len(listing.labels) for listing in chosen)
            cautions += _rare_classes(folder.classes, *chosen)
    formats = collections.Counter(image.format for image in readable)
    return Scan(
        str(folder.root),
        train,
        test,
        folder.classes,
        dict(formats.most_common()),
        _spread([image.width for image in readable]),
        _spread([image.height for image in readable]),
        folder.ignored,
        unreadable,
        problems,
        cautions,
        cached,
        time.perf_counter() - began,
    )


def _spread(values: Sequence[int]) -> tuple[int, int, int]:
    if not values:
        return 0, 0, 0
    return min(values), int(np.median(values)), max(values)


# Problems and warnings ---------------------------------------------------------------------------


def _add_unreadable(
    folder: ImageFolder,
    config: Data,
    unreadable: Sequence[tuple[str, str]],
    problems: list[str],
    cautions: list[str],
) -> None:
    lines = [f"  {path!r}: {reason}" for path, reason in unreadable[:SHOWN]]
    if len(unreadable) > SHOWN:
        lines.append(f"  and {len(unreadable) - SHOWN:,} more")
    if config.bad_images == "skip":
        text = f"Unreadable images are skipped ({len(unreadable):,}):"
        cautions.append("\n".join([text, *lines]))
    else:
        text = (
            f"Expected readable images in {str(folder.root)!r}, but got {len(unreadable):,} "
            "unreadable ones; to skip them, use `--data.bad_images skip`:"
        )
        problems.append("\n".join([text, *lines]))


def _warnings(folder: ImageFolder, images: Mapping[str, Checked]) -> Iterator[str]:
    links = [item for item in folder.ignored if item.reason in (LOOP, BROKEN)]
    if links:
        shown = [f"{item.path} ({item.reason})" for item in links]
        yield f"Links that are not followed: {some(shown)}."
    loose = [item.path for item in folder.ignored if item.reason == LOOSE]
    if loose := [path for path in loose if path.lower().endswith(EXTENSIONS)]:
        yield f"Images outside class folders are not used ({len(loose):,}): {some(loose)}."
    yield from _unnamed_images(folder)
    splits = folder.splits()
    if len({os.path.realpath(listing.root) for listing in splits.values()}) < len(splits):
        yield f"{' and '.join(splits)} are the same folder, so tests would use training images."
    dark = [p for p, i in images.items() if i.largest is not None and 1 < i.largest < 65536 / DARK]
    if dark:
        yield (
            f"16-bit images that use less than a {DARK}th of their range are nearly black after "
            f"conversion to 8 bits ({len(dark):,}): {some(dark)}."
        )


def _unnamed_images(folder: ImageFolder) -> Iterator[str]:
    """Warn about images among the files with other extensions, by opening some of them."""
    by_reason = collections.defaultdict(list)
    for path, reason in folder.ignored:
        if reason.startswith("extension ") or reason == "no extension":
            by_reason[reason].append(path)
    for reason, paths in by_reason.items():
        kinds = [_kind(folder.root / path) for path in paths[:SHOWN]]
        if any(kinds):
            kind = next(filter(None, kinds))
            yield (
                f"Files with {reason} are not used ({len(paths):,}), although "
                f"{'they' if all(kinds) else 'some of them'} are images ({kind}): {some(paths)}. "
                "Rename them to use them."
            )


def _kind(path: Path) -> str | None:
    with contextlib.suppress(Exception), open_image(path) as image:
        return image.format
    return None


def _rare_classes(classes: Sequence[str], train: Listing, test: Listing) -> Iterator[str]:
    counts, tested = (
        np.bincount(listing.labels, minlength=len(classes)) for listing in (train, test)
    )
    for text, chosen in (
        ("without test images", tested == 0),
        (f"with fewer than {FEW} training images", counts < FEW),
    ):
        names = [classes[int(k)] for k in np.flatnonzero(chosen)]
        if names:
            yield f"Classes {text} ({len(names):,} of {len(classes):,}): {some(names)}."


# Decoding ----------------------------------------------------------------------------------------


def _check_all(
    folder: ImageFolder, workers: int | None, progress: Progress | None
) -> tuple[dict[str, Checked], int]:
    """The findings about each image, by path, and the number of images found in the cache."""
    cache = _cache_file(folder.root)
    known = _read_cache(cache)
    images: dict[str, Checked] = {}
    for split, listing in folder.splits().items():
        prefix = "" if split == "." else os.path.join(split, "")
        for path, stamp in zip(listing.paths.tolist(), listing.stamps().tolist(), strict=True):
            name = prefix + os.fsdecode(path)
            image = known.get(name)
            if image is None or [image.bytes, image.time] != stamp:
                error = BROKEN if stamp[0] < 0 else "" if stamp[0] else "empty file"
                image = Checked(*stamp, error=error)
            images[name] = image
    todo = [name for name, image in images.items() if not image.format and not image.error]
    done = 0
    try:
        for chunk in _decode(folder.root, todo, workers):
            for image in chunk:
                images[todo[done]] = images[todo[done]]._replace(**image)
                done += 1
            if progress is not None:
                progress(done, len(todo))
    finally:
        if done:
            _write_cache(cache, images)
    return images, len(images) - len(todo)


def _decode(
    root: Path, names: Sequence[str], workers: int | None
) -> Iterator[list[dict[str, Any]]]:
    """The fields of each image, in chunks, decoded by several processes."""
    if workers is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        workers = 0 if len(names) <= ALONE else cores or 1
    loader = DataLoader(
        _Images(root),
        sampler=[names[i : i + CHUNK] for i in range(0, len(names), CHUNK)],
        batch_size=None,
        num_workers=workers,
        collate_fn=unchanged,
        worker_init_fn=functools.partial(begin_worker, os.getpid()),
        generator=torch.Generator(),  # otherwise it draws a seed from the global generator
    )
    yield from loader


class _Images(Dataset[list[dict[str, Any]]]):
    """The findings about images, for lists of their paths."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __getitem__(self, names: Sequence[str]) -> list[dict[str, Any]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd metadata; undecodable images are errors
            return [_look_at(self.root / name) for name in names]


def _look_at(path: Path) -> dict[str, Any]:
    """Decode an image completely, because training may need every pixel.

    Pillow's limit applies: an image of more than twice `Image.MAX_IMAGE_PIXELS` is an error.
    """
    try:
        with open_image(path) as image:
            fields = {"format": image.format, "width": image.width, "height": image.height}
            image.load()
            if image.mode[0] == "I":
                fields["largest"] = float(image.getextrema()[1])  # pyright: ignore
            grey_or_rgb(eight_bits(image))
            return fields
    except MemoryError:
        raise
    except UnidentifiedImageError:
        return {"error": "not an image of a known format"}
    except Exception as error:  # decoders raise all kinds of errors for damaged files
        return {"error": f"{type(error).__name__}: {error}"}


# The cache ---------------------------------------------------------------------------------------


def _cache_file(root: Path) -> Path:
    given, base = (os.environ.get(name) for name in ("POWERGRAD_CACHE", "XDG_CACHE_HOME"))
    folder = Path(given) if given else Path(base or "~/.cache") / "powergrad"
    key = hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()[:16]
    return Path(os.path.expanduser(folder)) / f"scan-{key}.json"


def _read_cache(path: Path) -> dict[str, Checked]:
    """The findings of an earlier scan; empty if the file is missing, damaged or incompatible."""
    try:
        stored = json.loads(path.read_bytes())
        if stored["format"] != FORMAT or stored["pillow"] != PIL.__version__:
            return {}
        return {name: Checked(*fields) for name, fields in stored["images"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _write_cache(path: Path, images: Mapping[str, Checked]) -> None:
    known = {name: image for name, image in images.items() if image.format or image.error}
    text = json.dumps({"format": FORMAT, "pillow": PIL.__version__, "images": known})
    with contextlib.suppress(OSError, FileError):  # a scan without a cache is only slower
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
