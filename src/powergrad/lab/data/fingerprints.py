"""Which data a run used, as a short text that changes when the data change."""

from __future__ import annotations

import hashlib
import os

from powergrad.lab.config import Data, Recipe
from powergrad.lab.data.listing import open_folder
from powergrad.lab.data.sets import find_set

__all__ = ["fingerprint", "folder_fingerprint"]


def fingerprint(
    config: Data, data_dir: str | None = None, *, contents: bool = False, times: bool = True
) -> str:
    """A text that is equal for equal data, and differs where the data were changed.

    Of a folder, it is a hash over the names, sizes and modification times of all images of both
    splits, relative to the folder: where the folder is, and how its path is written, does not
    matter. Of the sets that are stored in a few files, it is a hash over the names and sizes of
    these files. Options that choose among the images, such as ``hold_out``, do not change it.

    Args:
        config: The recipe's section.
        data_dir: Where files are looked for, as in :func:`powergrad.lab.data.load_data`.
        contents: Hash the contents of the files in place of sizes and times: slow, and equal for
            copies that do not keep the times.
        times: Whether modification times count, in nanoseconds (folders only).

    Returns:
        What was hashed (``times``, ``sizes`` or ``contents``), a colon, and 32 hexadecimal digits;
        for digits, which come with scikit-learn, a constant.

    Raises:
        FileNotFoundError: If the data are missing.
        ValueError: If the name is unknown.

    Example:
        >>> fingerprint(Data(name="digits"))
        'digits:1'
    """
    if config.name.startswith("folder:"):
        files = [
            (os.path.join(os.fsencode(split), path), os.path.join(listing.root, path))
            for split, listing in open_folder(config, data_dir).splits().items()
            for path in listing.paths.tolist()
        ]
    else:
        paths = find_set(config.name).files(data_dir)
        files = [(path.name.encode(), os.fsencode(path)) for path in paths]
        times = False
        if not files:
            return f"{config.name}:1"
    kind = "contents" if contents else "times" if times else "sizes"
    digest = hashlib.sha256()
    for name, path in files:
        digest.update(b"%b\0%b\0" % (name, _describe(path, kind)))  # no name has a zero byte
    return f"{kind}:{digest.hexdigest()[:32]}"


def folder_fingerprint(recipe: Recipe) -> str:
    """The fingerprint of a recipe's folder, as its machine asks for it; empty for stored sets."""
    if not recipe.data.name.startswith("folder:"):
        return ""
    kind = recipe.machine.fingerprint
    return fingerprint(
        recipe.data,
        recipe.machine.data_dir,
        contents=kind == "contents",
        times=kind == "times",
    )


def _describe(path: bytes, kind: str) -> bytes:
    try:
        if kind == "contents":
            with open(path, "rb") as file:
                return hashlib.sha256(file.read()).hexdigest().encode()
        status = os.stat(path)
    except FileNotFoundError:  # a link that leads nowhere
        return b"missing"
    size = b"%d" % status.st_size
    return size if kind == "sizes" else b"%b %d" % (size, status.st_mtime_ns)
