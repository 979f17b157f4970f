"""Fingerprints of data: short strings that change when the data change."""

from __future__ import annotations

import hashlib
import os

from powergrad.lab.data.listing import open_folder
from powergrad.lab.data.options import Data
from powergrad.lab.data.sets import find_set


def fingerprint(config: Data, data_dir: str | None = None, *, kind: str = "times") -> str:
    """A string that is the same for the same data, and changes when the data change.

    For a folder, it is a hash of the names of all images of both splits with their sizes and
    modification times ("times"), sizes ("sizes") or contents ("contents"). Names are relative to
    the folder, so its location does not matter. The times of the files of a stored data set are
    ignored. Options that select images, such as ``hold_out``, do not change it.
    """
    if config.is_folder:
        files = open_folder(config, data_dir).images()
    else:
        paths = find_set(config.name).files(data_dir)
        if not paths:
            return f"{config.name}:1"
        files = [(path.name, os.fsencode(path)) for path in paths]
        kind = "sizes" if kind == "times" else kind
    digest = hashlib.sha256()
    for name, path in files:
        content = _contents(path) if kind == "contents" else b"%d %d" % file_stamp(path)
        content = content.partition(b" ")[0] if kind == "sizes" else content
        digest.update(b"%b\0%b\0" % (os.fsencode(name), content))  # names have no zero bytes
    return f"{kind}:{digest.hexdigest()[:32]}"


def file_stamp(path: bytes) -> tuple[int, int]:
    """The size in bytes and the modification time in nanoseconds; -1 for a broken link."""
    try:
        status = os.stat(path)
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns


def _contents(path: bytes) -> bytes:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest().encode()
    except FileNotFoundError:  # a broken link
        return b"missing"
