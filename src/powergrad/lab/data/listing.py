"""Lists the images of a folder by class, and selects those of a run; fingerprints of data.

A folder contains ``train/`` and ``val/`` (or ``test/``), each with one folder per class. With
`data.hold_out`, which tests on training images, ``val/`` may be missing, and the class folders may
be directly in the folder.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from powergrad.lab.data.data_options import Data
from powergrad.lab.data.sets import roots
from powergrad.lab.data.streams import balanced_subset, held_out, held_out_groups

# The formats that Pillow decodes itself or with a library made for untrusted files (EPS, for
# example, would run Ghostscript). Files are selected by extension, and read in the format of their
# content: ImageNet has a PNG that is named .JPEG.
FORMATS = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif"),
    "PNG": (".png",),
    "WEBP": (".webp",),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm", ".pfm"),
    "JPEG2000": (".jp2", ".j2k"),
    "AVIF": (".avif",),
}
EXTENSIONS = tuple(itertools.chain.from_iterable(FORMATS.values()))

FEW = 10  # warn about classes with fewer training images

# Why a file or folder is not used.
HIDDEN, BROKEN, LOOSE = "hidden", "broken link", "not in a class folder"
AGAIN = "folder above, or already included"

_Images = dict[str, list[bytes]]  # the paths of images by class


class Listing(NamedTuple):
    """The images below a folder.

    Paths are in one array of fixed-width bytes, so that names may contain any byte, and worker
    processes share a million paths without copying.
    """

    root: bytes
    paths: NDArray[np.bytes_]
    labels: NDArray[np.int64]

    def path(self, index: int) -> bytes:
        return os.path.join(self.root, self.paths[index])

    def subset(self, indices: NDArray[np.int64]) -> Listing:
        return Listing(self.root, self.paths[indices], self.labels[indices])

    def groups(self, pattern: re.Pattern[str]) -> NDArray[np.int64]:
        """The group number of each image: group 1 of the match in its path, or the whole match."""
        matches = {name: pattern.search(name) for name in map(os.fsdecode, self.paths)}
        if unmatched := [name for name, match in matches.items() if match is None]:
            raise ValueError(
                f"Expected `data.groups` to match the path of every training image below "
                f"{os.fsdecode(self.root)!r}, but got {pattern.pattern!r}, which does not match "
                f"{len(unmatched):,} of {len(matches):,}, such as {unmatched[0]!r}."
            )
        keys = [match[1 if pattern.groups else 0] or "" for match in matches.values() if match]
        return np.unique(np.array(keys), return_inverse=True)[1]


@dataclass(frozen=True)
class ImageFolder:
    """The content of a folder of images.

    `classes` are the folders of train, sorted. `ignored` has the relative paths of unused files and
    folders by the reason. `problems` are the reasons why the folder cannot be used for training.
    """

    root: Path
    train: Listing
    test: Listing | None
    classes: tuple[str, ...]
    ignored: dict[str, list[str]]
    problems: list[str]

    def splits(self) -> dict[str, Listing]:
        """The listings by the names of their folders; ``.`` if the classes are in the root."""
        listings = [listing for listing in (self.train, self.test) if listing is not None]
        return {os.path.relpath(os.fsdecode(each.root), self.root): each for each in listings}

    def images(self) -> Iterator[tuple[str, bytes]]:
        """The name relative to the root, and the path, of every image of both splits."""
        for split, listing in self.splits().items():
            for path in listing.paths.tolist():
                name = os.path.normpath(os.path.join(split, os.fsdecode(path)))
                yield name, os.path.join(listing.root, path)

    def choose(self, config: Data) -> tuple[Listing, Listing]:
        """The training and the test images of a run; ValueError if the folder cannot be used."""
        if self.problems:
            raise ValueError("\n".join(self.problems))
        groups = self.train.groups(config.groups) if config.hold_out and config.groups else None
        kept, held = choose(self.train.labels, config, groups)
        test = self.train.subset(held) if config.hold_out else self.test
        assert test is not None  # `list_folder` raises if it is needed and missing
        return self.train.subset(kept), test


def open_folder(config: Data, data_dir: str | None = None) -> ImageFolder:
    """List the images of the folder ``data.name``, which may be relative to a data folder.

    A process lists a folder once, and again for every :func:`fingerprint`.
    """
    candidates = [config.path, *(root / config.path for root in roots(data_dir))]
    root = next((candidate for candidate in candidates if candidate.is_dir()), None)
    if root is None:
        places = " or ".join(repr(str(candidate)) for candidate in dict.fromkeys(candidates))
        remedy = "name it with --data.name folder:PATH"
        raise FileNotFoundError(f"There is no folder with train/ and val/ at {places}; {remedy}.")
    return list_folder(root.absolute(), not config.hold_out)


@functools.cache
def list_folder(root: Path, needs_test: bool) -> ImageFolder:
    """List a folder.

    Images are files with one of the :data:`EXTENSIONS`, in upper or lower case, at any depth below
    their class. Names that start with a dot are ignored. Links are followed, unless they lead to a
    folder above the classes, or to one that the class already has. A class may be missing from val.
    """
    test_folder = root / "val" if (root / "val").is_dir() else root / "test"
    has_train, has_test = (root / "train").is_dir(), test_folder.is_dir()
    train_folder = root / "train" if has_train else root
    if (needs_test and not (has_train and has_test)) or (has_test and not has_train):
        missing, where = "val/ or test/", "the training images instead"
        if not has_train:
            missing, where = "train/", "the images, also if the class folders are directly in it"
        raise FileNotFoundError(
            f"{str(root)!r} has no folder {missing} with one folder per class. Use "
            f"`--data.hold_out 0.2` to test on a fifth of {where}."
        )
    ignored: dict[str, list[str]] = {}
    in_train = _walk(root, train_folder, ignored)
    in_test = _walk(root, test_folder, ignored) if has_test else {}

    def no_images(folder: Path) -> str:
        others = [
            f"{p} ({reason})" for reason in ignored.keys() - {HIDDEN} for p in ignored[reason]
        ]
        wanted = f"images ({', '.join(EXTENSIONS)}) in {str(folder)!r}, in one folder per class"
        ending = f" Ignored: {some(others)}." if others else ""
        return f"Expected {wanted}, but got none.{ending}"

    problems, inside = [], f"{str(train_folder)!r}, but got"
    empty = [name for name, paths in in_train.items() if not paths]
    if len(empty) == len(in_train):
        problems.append(no_images(train_folder))
    elif empty:
        got = f"none in {some(empty)}; remove the folder if there is no such class"
        problems.append(f"Expected images in every class of {inside} {got}.")
    elif len(in_train) == 1:
        problems.append(f"Expected at least two classes in {inside} only {some([*in_train])}.")
    if unknown := sorted(in_test.keys() - in_train.keys()):
        wanted = f"the classes of {str(test_folder)!r} to be among those of train/"
        problems.append(f"Expected {wanted}, but got also {some(unknown)}.")
    if needs_test and not any(in_test[name] for name in in_test.keys() & in_train.keys()):
        problems.append(no_images(test_folder))

    def listing(folder: Path, images: _Images) -> Listing:
        parts = [images.get(name, []) for name in in_train]
        labels = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        paths = np.array(list(itertools.chain.from_iterable(parts)), np.bytes_)
        return Listing(os.fsencode(folder), paths, labels)

    train = listing(train_folder, in_train)
    test = listing(test_folder, in_test) if has_test else None
    return ImageFolder(root, train, test, tuple(in_train), ignored, problems)


def some(names: Sequence[str], most: int = 5) -> str:
    """The first of `names`, quoted with `repr`, and the number of the others."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more


def _walk(root: Path, split: Path, ignored: dict[str, list[str]]) -> _Images:
    """The sorted paths of each class of a split; adds to `ignored`."""
    found: _Images = {}
    start = len(os.path.join(split, ""))
    place = Path(os.path.realpath(split))
    above = {str(place), *map(str, place.parents)}
    seen: set[tuple[str, str]] = set()  # the class and the place of each folder
    for folder, folders, files in os.walk(split, onerror=_raise, followlinks=True):
        label = folder[start:].partition(os.sep)[0]
        reasons: dict[str, str] = {}
        for path in (os.path.join(folder, name) for name in sorted(files)):
            reasons[path] = _why_not_used(path, is_loose=not label)
            if not reasons[path]:
                found[label].append(os.fsencode(path[start:]))
        entries, folders[:] = sorted(folders), []
        for name in entries:
            path = os.path.join(folder, name)
            key = label or name, os.path.realpath(path)
            if name.startswith(".") or key in seen or key[1] in above:
                reasons[path] = HIDDEN if name.startswith(".") else AGAIN
            else:
                seen.add(key)
                folders.append(name)
                found.setdefault(key[0], [])
        for path, reason in reasons.items():
            if reason:
                ignored.setdefault(reason, []).append(os.path.relpath(path, root))
    return {name: sorted(paths) for name, paths in found.items()}


def _raise(error: OSError) -> None:
    raise error


def _why_not_used(path: str, *, is_loose: bool) -> str:
    """The reason why a file is not used, or an empty string."""
    name = os.path.basename(path).lower()
    if name.endswith(EXTENSIONS) and not is_loose and not name.startswith("."):
        return ""
    if os.path.islink(path) and not os.path.exists(path):
        return BROKEN
    extension = os.path.splitext(name)[1]
    other = f"extension {extension}" if extension else "no extension"
    return HIDDEN if name.startswith(".") else LOOSE if is_loose else other


def choose(
    labels: NDArray[np.int64], config: Data, groups: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The indices for training, and those held out; images of one group stay together."""
    is_held = held_out(labels, config.hold_out)
    if groups is not None:
        is_held = held_out_groups(labels, groups, config.hold_out)
    kept, held = np.flatnonzero(~is_held), np.flatnonzero(is_held)
    if config.hold_out and not (len(kept) and len(held)):
        raise ValueError(
            f"Expected `data.hold_out` to leave examples for training and testing, but got "
            f"{config.hold_out}, which leaves {len(kept)} and {len(held)} of {len(labels)}."
        )
    if config.limit is not None:
        kept = kept[balanced_subset(labels[kept], config.limit)]
    return kept, held


def scan_folder(config: Data, data_dir: str | None = None) -> Iterator[str]:
    """What a run uses of a folder, what it ignores, and warnings; raises if it cannot be used.

    Nothing is decoded. The first epoch finds the images that cannot be read, see `data.bad_images`.
    """
    list_folder.cache_clear()  # it may have changed
    folder = open_folder(config, data_dir)
    train, test = folder.choose(config)
    images = f"{len(train.labels):,} training images, {len(test.labels):,} test images"
    yield f"{folder.root}: {images}, {len(folder.classes):,} classes"
    for why, paths in folder.ignored.items():
        yield f"  ignored ({why}): {len(paths):,}, {some(paths, 3)}"
    splits = folder.splits()
    if len({os.path.realpath(listing.root) for listing in splits.values()}) < len(splits):
        names = " and ".join(splits)
        yield f"Warning: {names} are the same folder, so tests would use training images."
    fewer = f"with fewer than {FEW} training images"
    for text, part, least in (("without test images", test, 1), (fewer, train, FEW)):
        counts = np.bincount(part.labels, minlength=len(folder.classes))
        if rare := [folder.classes[k] for k in np.flatnonzero(counts < least).tolist()]:
            share = f"({len(rare):,} of {len(folder.classes):,})"
            yield f"Warning: Classes {text} {share}: {some(rare)}."


def fingerprint(config: Data, data_dir: str | None = None, *, kind: str = "times") -> str:
    """A string that is the same for the same images, and changes when a folder of images changes.

    It is a hash of the names of all images of both splits with their sizes ("sizes"), and their
    modification times ("times"). Names are relative to the folder, so its location does not matter.
    Options that select images, such as ``hold_out``, do not change it.
    """
    list_folder.cache_clear()
    digest = hashlib.sha256()
    for name, path in open_folder(config, data_dir).images():
        size, changed = file_stamp(path)
        content = b"%d" % size if kind == "sizes" else b"%d %d" % (size, changed)
        digest.update(b"%b\0%b\0" % (os.fsencode(name), content))  # names have no zero bytes
    return f"{kind}:{digest.hexdigest()[:32]}"


def file_stamp(path: bytes) -> tuple[int, int]:
    """The size in bytes and the modification time in nanoseconds; -1 for a broken link."""
    try:
        status = os.stat(path)
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns
