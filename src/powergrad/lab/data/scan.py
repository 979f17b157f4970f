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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL
from PIL import UnidentifiedImageError

from powergrad.lab.data.data_options import Data
from powergrad.lab.data.folder import eight_bits, grey_or_rgb, in_workers, open_image
from powergrad.lab.data.listing import (
    BROKEN,
    EXTENSIONS,
    LOOP,
    LOOSE,
    ImageFolder,
    Listing,
    file_stamp,
    open_folder,
    some,
)
from powergrad.lab.files import FileError, write_text

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

    `train` and `test` are numbers of images; `widths` and `heights` are the smallest, median and
    largest, in pixels; `ignored` and `unreadable` are paths with reasons; `problems` are the
    reasons why a run would fail; `cached` is the number of images that have not changed since the
    last scan, so they were not decoded.
    """

    root: str
    train: int
    test: int
    classes: tuple[str, ...]
    formats: dict[str, int]  # the most frequent first
    widths: tuple[int, int, int]
    heights: tuple[int, int, int]
    ignored: list[tuple[str, str]]
    unreadable: list[tuple[str, str]]
    problems: list[str]
    warnings: list[str]
    cached: int

    def summary(self) -> list[str]:
        """Lines for the terminal: images, classes, formats, sizes and ignored files."""
        formats = ", ".join(f"{count:,} {name}" for name, count in self.formats.items())
        images = f"{self.train:,} training images, {self.test:,} test images"
        reasons = _by_reason(self.ignored).items()
        (low, width, high), (flat, height, tall) = self.widths, self.heights
        sizes = f"{low}x{flat} to {high}x{tall} pixels, median {width}x{height}"
        if (low, flat) == (high, tall):
            sizes = f"all {width}x{height} pixels"
        return [
            f"{images}, {len(self.classes):,} classes",
            f"{formats or 'no readable images'}; {sizes}",
            *(f"ignored ({why}): {len(paths):,}, {some(paths, 3)}" for why, paths in reasons),
        ]


def scan_folder(
    config: Data,
    data_dir: str | None = None,
    *,
    progress: Progress = lambda done, total: None,
) -> Scan:
    """Scan the folder of images of a recipe, and decode every image."""
    folder = open_folder(config, data_dir)
    images, cached = _check_all(folder, progress)
    readable = [image for image in images.values() if not image.error]
    unreadable = [(path, image.error) for path, image in images.items() if image.error]
    problems, cautions = list(folder.problems), list(_warnings(folder, images))
    if unreadable:
        skips = config.bad_images == "skip"
        (cautions if skips else problems).append(_describe(folder, unreadable, skips=skips))
    train = test = 0
    if not folder.problems:
        try:
            chosen = folder.choose(config)
            train, test = (len(listing.labels) for listing in chosen)
            cautions += _rare_classes(folder.classes, *chosen)
        except ValueError as error:
            problems.append(str(error))
    formats = collections.Counter(image.format for image in readable)
    return Scan(
        root=str(folder.root),
        train=train,
        test=test,
        classes=folder.classes,
        formats=dict(formats.most_common()),
        widths=_spread([image.width for image in readable]),
        heights=_spread([image.height for image in readable]),
        ignored=folder.ignored,
        unreadable=unreadable,
        problems=problems,
        warnings=cautions,
        cached=cached,
    )


def _spread(values: Sequence[int]) -> tuple[int, int, int]:
    return (min(values), int(np.median(values)), max(values)) if values else (0, 0, 0)


def _by_reason(ignored: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    paths = collections.defaultdict(list)
    for path, reason in ignored:
        paths[reason].append(path)
    return paths


def _describe(folder: ImageFolder, unreadable: Sequence[tuple[str, str]], *, skips: bool) -> str:
    text = f"{str(folder.root)!r} has {len(unreadable):,} unreadable images; to skip them, use "
    text += "`--data.bad_images skip`:"
    if skips:
        text = f"Unreadable images are skipped ({len(unreadable):,}):"
    lines = [f"  {path!r}: {reason}" for path, reason in unreadable[:SHOWN]]
    more = [f"  and {len(unreadable) - SHOWN:,} more"] if len(unreadable) > SHOWN else []
    return "\n".join([text, *lines, *more])


def _warnings(folder: ImageFolder, images: Mapping[str, Checked]) -> Iterator[str]:
    ignored = _by_reason(folder.ignored)
    if links := [f"{p} ({reason})" for reason in (LOOP, BROKEN) for p in ignored.get(reason, ())]:
        yield f"Links that are not followed: {some(links)}."
    if loose := [path for path in ignored.get(LOOSE, ()) if path.lower().endswith(EXTENSIONS)]:
        yield f"Images outside class folders are not used ({len(loose):,}): {some(loose)}."
    for reason, paths in ignored.items():
        if reason.startswith("extension ") or reason == "no extension":
            kinds = [_kind(folder.root / path) for path in paths[:SHOWN]]
            if kind := next(filter(None, kinds), None):
                are = f"{'they' if all(kinds) else 'some of them'} are images ({kind})"
                unused = f"Files with {reason} are not used ({len(paths):,})"
                yield f"{unused}, although {are}: {some(paths)}. Rename them to use them."
    splits = folder.splits()
    if len({os.path.realpath(listing.root) for listing in splits.values()}) < len(splits):
        yield f"{' and '.join(splits)} are the same folder, so tests would use training images."
    dark = [p for p, i in images.items() if i.largest is not None and 1 < i.largest < 65536 / DARK]
    if dark:
        yield (
            f"16-bit images that use less than a {DARK}th of their range are nearly black after "
            f"conversion to 8 bits ({len(dark):,}): {some(dark)}."
        )


def _kind(path: Path) -> str | None:
    with contextlib.suppress(Exception), open_image(path) as image:
        return image.format
    return None


def _rare_classes(classes: Sequence[str], train: Listing, test: Listing) -> Iterator[str]:
    fewer = f"with fewer than {FEW} training images"
    for text, listing, least in (("without test images", test, 1), (fewer, train, FEW)):
        counts = np.bincount(listing.labels, minlength=len(classes))
        if names := [classes[int(k)] for k in np.flatnonzero(counts < least)]:
            yield f"Classes {text} ({len(names):,} of {len(classes):,}): {some(names)}."


def _check_all(folder: ImageFolder, progress: Progress) -> tuple[dict[str, Checked], int]:
    """The findings about each image, by name, and the number of images found in the cache."""
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
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = 0 if len(todo) <= ALONE else cores or 1
    chunks = [todo[i : i + CHUNK] for i in range(0, len(todo), CHUNK)]
    done = 0
    try:
        for found in in_workers(functools.partial(_look_at_all, folder.root), chunks, workers):
            for fields in found:
                images[todo[done]] = images[todo[done]]._replace(**fields)
                done += 1
            progress(done, len(todo))
    finally:
        if done:
            _write_cache(cache, images)
    return images, len(images) - len(todo)


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
