"""Fingerprints of data: short strings that change when the data change."""

from __future__ import annotations

import hashlib
import os

from powergrad.lab.data.listing import open_folder
from powergrad.lab.data.sets import find_set
from powergrad.lab.trainer.recipe import Data, Recipe


def fingerprint(
    config: Data, data_dir: str | None = None, *, contents: bool = False, times: bool = True
) -> str:
    """A string that is the same for the same data, and changes when the data change.

    For a folder, it is a hash of the names, sizes and modification times of all images of both
    splits. Names are relative to the folder, so its location does not matter. For data sets that
    are stored in a few files, it is a hash of the names and sizes of these files. Options that
    select images, such as ``hold_out``, do not change it.

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
        digest.update(b"%b\0%b\0" % (name, _describe(path, kind)))  # names have no zero bytes
    return f"{kind}:{digest.hexdigest()[:32]}"


def folder_fingerprint(recipe: Recipe) -> str:
    """The fingerprint of a folder, of the kind `machine.fingerprint`; empty for other data."""
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
    except FileNotFoundError:  # a broken link
        return b"missing"
    size = b"%d" % status.st_size
    return size if kind == "sizes" else b"%b %d" % (size, status.st_mtime_ns)
