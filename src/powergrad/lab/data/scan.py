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
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL
from PIL import UnidentifiedImageError

from powergrad.lab.data.data_options import Data
from powergrad.lab.data.folder import eight_bits, grey_or_rgb, in_workers, open_image
from powergrad.lab.data.listing import BROKEN, ImageFolder, file_stamp, open_folder, some
from powergrad.lab.environment import usable_cores
from powergrad.lab.files import FileError, write_text
from powergrad.lab.words import show_progress

FORMAT = 2  # of the cache
CHUNK = 64  # images that a process decodes at a time
FEW = 10  # warn about classes with fewer training images
SHOWN = 20  # the maximal number of unreadable images to list
ALONE = 512  # up to this many images, starting processes takes longer than decoding
DARK = 16  # warn about 16-bit images whose largest value is below a 16th of the range


class Checked(NamedTuple):
    """The findings about a file; `error` is the reason why it cannot be read, if any."""

    bytes: int
    time: int  # modification time in nanoseconds
    format: str = ""
    width: int = 0
    height: int = 0
    largest: float | None = None  # the largest value, for images with more than 8 bits
    error: str = ""


class Scan(NamedTuple):
    """The result of a scan, as lines of text; `problems` are reasons why a run would fail."""

    summary: list[str]
    warnings: list[str]
    problems: list[str]


def scan_folder(config: Data, data_dir: str | None = None) -> Scan:
    """Scan the folder of images of a recipe, and decode every image."""
    folder = open_folder(config, data_dir)
    images = _check_all(folder)
    problems, cautions = list(folder.problems), list(_warnings(folder, images))
    if bad := [f"  {name!r}: {image.error}" for name, image in images.items() if image.error]:
        skips = config.bad_images == "skip"
        remedy = "they are skipped" if skips else "to skip them, use `--data.bad_images skip`"
        text = f"{str(folder.root)!r} has {len(bad):,} unreadable images; {remedy}:"
        more = [f"  and {len(bad) - SHOWN:,} more"] if len(bad) > SHOWN else []
        (cautions if skips else problems).append("\n".join([text, *bad[:SHOWN], *more]))
    used = f"{len(images):,} images"
    if not folder.problems:
        try:
            train, test = (listing.labels for listing in folder.choose(config))
        except ValueError as error:
            problems.append(str(error))
        else:
            used = f"{len(train):,} training images, {len(test):,} test images"
            fewer = f"with fewer than {FEW} training images"
            for text, labels, least in (("without test images", test, 1), (fewer, train, FEW)):
                counts = np.bincount(labels, minlength=len(folder.classes))
                if names := [folder.classes[k] for k in np.flatnonzero(counts < least).tolist()]:
                    rare = f"({len(names):,} of {len(folder.classes):,}): {some(names)}"
                    cautions.append(f"Classes {text} {rare}.")
    first = f"{folder.root}: {used}, {len(folder.classes):,} classes"
    ignored = folder.ignored.items()
    lines = [f"ignored ({why}): {len(paths):,}, {some(paths, 3)}" for why, paths in ignored]
    return Scan([first, _describe(images), *lines], cautions, problems)


def _describe(images: Mapping[str, Checked]) -> str:
    """The formats and sizes of the readable images."""
    readable = [image for image in images.values() if not image.error]
    if not readable:
        return "no readable images"
    counts = collections.Counter(image.format for image in readable).most_common()
    formats = ", ".join(f"{count:,} {name}" for name, count in counts)
    sizes = [(image.width, image.height) for image in readable]
    quantiles = np.percentile(sizes, (0, 50, 100), axis=0).tolist()
    low, median, high = (f"{width:.0f}x{height:.0f}" for width, height in quantiles)
    if low == high:
        return f"{formats}; all {low} pixels"
    return f"{formats}; {low} to {high} pixels, median {median}"


def _warnings(folder: ImageFolder, images: Mapping[str, Checked]) -> Iterator[str]:
    splits = folder.splits()
    if len({os.path.realpath(listing.root) for listing in splits.values()}) < len(splits):
        yield f"{' and '.join(splits)} are the same folder, so tests would use training images."
    dark = [p for p, i in images.items() if i.largest is not None and 1 < i.largest < 65536 / DARK]
    if dark:
        yield (
            f"16-bit images that use less than a {DARK}th of their range are nearly black after "
            f"conversion to 8 bits ({len(dark):,}): {some(dark)}."
        )


def _check_all(folder: ImageFolder) -> dict[str, Checked]:
    """The findings about each image, by its name in the folder."""
    cache = _cache_file(folder.root)
    known = _read_cache(cache)
    images: dict[str, Checked] = {}
    for name, path in folder.images():
        size, changed = file_stamp(path)
        image = known.get(name)
        if image is None or (image.bytes, image.time) != (size, changed):
            error = BROKEN if size < 0 else "" if size else "empty file"
            image = Checked(size, changed, error=error)
        images[name] = image
    todo = [name for name, image in images.items() if not image.format and not image.error]
    workers = 0 if len(todo) <= ALONE else usable_cores()
    chunks = [todo[i : i + CHUNK] for i in range(0, len(todo), CHUNK)]
    found = in_workers(functools.partial(_look_at_all, folder.root), chunks, workers)
    try:
        shown = show_progress(found, "checking images", len(chunks))
        for chunk, findings in zip(chunks, shown, strict=True):
            for name, fields in zip(chunk, findings, strict=True):
                images[name] = images[name]._replace(**fields)
    finally:
        if todo:
            _write_cache(cache, images)
    return images


def _look_at_all(root: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about odd metadata; undecodable images are errors
        return [_look_at(root / name) for name in names]


def _look_at(path: Path) -> dict[str, Any]:
    """Decode an image completely, because training may need every pixel."""
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


def _cache_file(root: Path) -> Path:
    """The cache of a folder, for this version of Pillow."""
    given, base = (os.environ.get(name) for name in ("POWERGRAD_CACHE", "XDG_CACHE_HOME"))
    place = Path(given) if given else Path(base or "~/.cache") / "powergrad"
    key = f"{FORMAT} {PIL.__version__} ".encode() + os.fsencode(os.path.realpath(root))
    return place.expanduser() / f"scan-{hashlib.sha256(key).hexdigest()[:16]}.json"


def _read_cache(path: Path) -> dict[str, Checked]:
    """The findings of an earlier scan; empty if the file is missing or damaged."""
    try:
        stored = json.loads(path.read_bytes())
        return {name: Checked(*fields) for name, fields in stored.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write_cache(path: Path, images: Mapping[str, Checked]) -> None:
    known = {name: image for name, image in images.items() if image.format or image.error}
    with contextlib.suppress(OSError, FileError):  # a scan without a cache is only slower
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(known))
