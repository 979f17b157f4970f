"""Lists the images of a folder by class, and selects those for training and testing.

A folder contains ``train/`` and ``val/`` (or ``test/``), each with one folder per class. With
`data.hold_out`, which tests on training images, ``val/`` may be missing, and the class folders may
be directly in the folder.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from powergrad.lab.data.sets import roots
from powergrad.lab.data.streams import balanced_subset, held_out, held_out_groups
from powergrad.lab.trainer.recipe import Data

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

HIDDEN = "hidden"
LOOP = "link to a folder above it"
BROKEN = "broken link"
LOOSE = "not in a class folder"
TWICE = "folder that is already included by a link"


class Listing(NamedTuple):
    """The images below a folder.

    Paths are in one array of fixed-width bytes, so that names may contain any byte, and worker
    processes share a million paths without copying.
    """

    root: bytes
    paths: NDArray[np.bytes_]
    labels: NDArray[np.int64]

    def path(self, index: int) -> bytes:
        """The path of an image."""
        return os.path.join(self.root, self.paths[index])

    def subset(self, indices: NDArray[np.int64]) -> Listing:
        """The images of the given indices."""
        return Listing(self.root, self.paths[indices], self.labels[indices])

    def stamps(self) -> NDArray[np.int64]:
        """Size in bytes and modification time in nanoseconds, (N, 2); -1 if the file is missing."""
        stamps = np.empty((len(self.paths), 2), np.int64)
        for row, path in zip(stamps, self.paths.tolist(), strict=True):
            try:
                status = os.stat(os.path.join(self.root, path))
            except OSError:  # a broken link
                row[:] = -1
            else:
                row[:] = status.st_size, status.st_mtime_ns
        return stamps

    def groups(self, pattern: str) -> NDArray[np.int64]:
        """The group number of each image: group 1 of the match in its path, or the whole match."""
        compiled = re.compile(pattern)
        names = [os.fsdecode(path) for path in self.paths]
        matches = [compiled.search(name) for name in names]
        unmatched = [name for name, match in zip(names, matches, strict=True) if match is None]
        if unmatched:
            raise ValueError(
                f"Expected `data.groups` to match the path of every training image below "
                f"{os.fsdecode(self.root)!r}, but got {pattern!r}, which does not match "
                f"{len(unmatched):,} of {len(names):,}, such as {unmatched[0]!r}."
            )
        keys = [match[1 if compiled.groups else 0] or "" for match in matches if match]
        return np.unique(np.array(keys), return_inverse=True)[1]


class Ignored(NamedTuple):
    """A file or folder that is not used: its path relative to the data folder, and the reason."""

    path: str
    reason: str


@dataclass(frozen=True)
class ImageFolder:
    """The content of a folder of images.

    Attributes:
        root: The folder.
        train: The training images.
        test: The images of ``val/`` or ``test/``; None if there is no such folder.
        classes: The names of the classes, which are the folders of train, sorted.
        ignored: The files and folders that are not used.
        problems: The reasons why the folder cannot be used for training, if any.
    """

    root: Path
    train: Listing
    test: Listing | None
    classes: tuple[str, ...]
    ignored: list[Ignored]
    problems: list[str]

    def splits(self) -> dict[str, Listing]:
        """The listings by the names of their folders; ``.`` if the classes are in the root."""
        listings = (self.train, self.test)
        return {
            os.path.relpath(os.fsdecode(listing.root), self.root): listing
            for listing in listings
            if listing is not None
        }


def open_folder(config: Data, data_dir: str | None) -> ImageFolder:
    """List the images of the folder ``data.name``, which may be relative to a data folder."""
    path = Path(config.name.removeprefix("folder:")).expanduser()
    candidates = [path, *(root / path for root in roots(data_dir))]
    root = next((candidate for candidate in candidates if candidate.is_dir()), None)
    if root is None:
        places = " or ".join(repr(str(candidate)) for candidate in dict.fromkeys(candidates))
        raise FileNotFoundError(
            f"Expected a folder with train/ and val/, but got none at {places}."
        )
    return list_folder(root, needs_test=not config.hold_out)


def list_folder(root: Path, *, needs_test: bool = True) -> ImageFolder:
    """List the images of a folder.

    Images are files with one of the :data:`EXTENSIONS`, in upper or lower case, at any depth below
    their class. Names that start with a dot are ignored. Links are followed, unless they lead to a
    folder above themselves. A class may be missing from val.
    """
    train_folder = root / "train"
    test_folder = root / "val" if (root / "val").is_dir() else root / "test"
    has_test = test_folder.is_dir()
    if not train_folder.is_dir():
        if needs_test or has_test:
            raise FileNotFoundError(
                f"Expected a folder train/ in {str(root)!r}, with one folder per class, but got "
                f"none. If the class folders are directly in {str(root)!r}, use `--data.hold_out "
                "0.2` to test on a fifth of their images."
            )
        train_folder = root
    if needs_test and not has_test:
        raise FileNotFoundError(
            f"Expected a folder val/ or test/ in {str(root)!r}, with one folder per class, but got "
            "none. Use `--data.hold_out 0.2` to test on a fifth of the training images instead."
        )
    walk = _Walk(root)
    classes = walk.class_folders(train_folder)
    train = walk.images(train_folder, classes)
    problems = list(_train_problems(train_folder, train, classes, walk.ignored))
    test = None
    if has_test:
        unknown = sorted(set(walk.class_folders(test_folder)) - set(classes))
        if unknown:
            problems.append(
                f"Expected the classes of {str(test_folder)!r} to be among those of train/, but "
                f"got also {some(unknown)}."
            )
        test = walk.images(test_folder, classes)
        if needs_test and not len(test.labels):
            problems.append(_no_images(test_folder, walk.ignored))
    return ImageFolder(root, train, test, tuple(classes), walk.ignored, problems)


def _train_problems(
    folder: Path, train: Listing, classes: Sequence[str], ignored: Sequence[Ignored]
) -> Iterator[str]:
    counts = np.bincount(train.labels, minlength=len(classes))
    empty = [name for name, count in zip(classes, counts, strict=True) if not count]
    if not len(train.labels):
        yield _no_images(folder, ignored)
    elif empty:
        yield (
            f"Expected images in every class of {str(folder)!r}, but got none in {some(empty)}; "
            "remove the folder if there is no such class."
        )
    elif len(classes) == 1:
        yield (f"Expected at least two classes in {str(folder)!r}, but got only {classes[0]!r}.")


def _no_images(folder: Path, ignored: Sequence[Ignored]) -> str:
    others = [f"{item.path} ({item.reason})" for item in ignored if item.reason != HIDDEN]
    ending = f" Ignored: {some(others)}." if others else ""
    return (
        f"Expected images ({', '.join(EXTENSIONS)}) in {str(folder)!r}, in one folder per class, "
        f"but got none.{ending}"
    )


def some(names: Sequence[str], most: int = 5) -> str:
    """The first of `names`, quoted with `repr`, and the number of the others."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more


class _Walk:
    """Walks through the folders of a data set, and collects skipped entries in `ignored`."""

    def __init__(self, root: Path) -> None:
        self.root, self.ignored = root, list[Ignored]()

    def class_folders(self, split: Path) -> list[str]:
        """The names of the folders in a split, which are its classes."""
        folders, files = self._look(str(split), [os.path.realpath(split)])
        for entry in files:
            self._ignore(entry, LOOSE)
        return [entry.name for entry in folders]

    def images(self, split: Path, classes: Sequence[str]) -> Listing:
        """The images of `classes` in a split."""
        start = len(os.path.join(split, ""))
        paths = []
        for name in classes:
            folder = split / name
            above = [os.path.realpath(split), os.path.realpath(folder)]
            images = self._below(str(folder), above, {above[-1]}) if folder.is_dir() else ()
            paths.append(sorted(os.fsencode(path[start:]) for path in images))
        labels = np.repeat(np.arange(len(classes)), [len(group) for group in paths])
        all_paths = list(itertools.chain.from_iterable(paths))
        return Listing(os.fsencode(split), np.array(all_paths, np.bytes_), labels)

    def _below(self, folder: str, above: list[str], seen: set[str]) -> Iterator[str]:
        """The images below a folder."""
        folders, files = self._look(folder, above)
        for entry in files:
            if entry.name.lower().endswith(EXTENSIONS):
                yield entry.path
            else:
                extension = os.path.splitext(entry.name)[1].lower()
                self._ignore(entry, f"extension {extension}" if extension else "no extension")
        for entry in folders:
            place = os.path.realpath(entry.path)
            if place in seen:
                self._ignore(entry, TWICE)
                continue
            seen.add(place)
            yield from self._below(entry.path, [*above, place], seen)

    def _look(
        self, folder: str, above: Sequence[str]
    ) -> tuple[list[os.DirEntry[str]], list[os.DirEntry[str]]]:
        """The folders and files in a folder, sorted, without hidden entries and loops."""
        folders, files = [], []
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                is_link = entry.is_symlink()  # `entry.is_dir` raises for a link to itself
                if entry.name.startswith("."):
                    self._ignore(entry, HIDDEN)
                elif not (os.path.isdir(entry.path) if is_link else entry.is_dir()):
                    files.append(entry)
                elif is_link and _leads_above(entry.path, above):
                    self._ignore(entry, LOOP)
                else:
                    folders.append(entry)
        return folders, files

    def _ignore(self, entry: os.DirEntry[str], reason: str) -> None:
        broken = entry.is_symlink() and not os.path.exists(entry.path)
        path = os.path.relpath(entry.path, self.root)
        self.ignored.append(Ignored(path, BROKEN if broken else reason))


def _leads_above(link: str, above: Sequence[str]) -> bool:
    """Whether a link leads to one of the folders `above`, or to a parent of one of them."""
    target = os.path.join(os.path.realpath(link), "")
    return any(os.path.join(place, "").startswith(target) for place in above)


def choose(
    labels: NDArray[np.int64], config: Data, groups: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The indices for training, and those held out; images of one group stay together."""
    if groups is None:
        is_held = held_out(labels, config.hold_out)
    else:
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


def choose_images(folder: ImageFolder, config: Data) -> tuple[Listing, Listing]:
    """The training and the test images of a run."""
    groups = None
    if config.hold_out and config.groups is not None:
        groups = folder.train.groups(config.groups)
    kept, held = choose(folder.train.labels, config, groups)
    test = folder.train.subset(held) if config.hold_out else folder.test
    assert test is not None  # `list_folder` raises if it is needed and missing
    return folder.train.subset(kept), test
