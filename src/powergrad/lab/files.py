"""Atomic writing of files, and JSON without NaN."""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

FULL = (errno.ENOSPC, errno.EDQUOT)


class FileError(RuntimeError):
    """A file that cannot be written; the message states why, and what is still intact."""


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file completely, or leave it unchanged."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(fresh, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except (OSError, RuntimeError) as error:
        # torch.save fails again while closing, which hides the error of the operating system.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise FileError(explain_os_error(cause, path)) from error
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink()


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error or its cause is a full disk."""
    while error is not None and getattr(error, "errno", None) not in FULL:
        error = error.__cause__ or error.__context__
    return error is not None


def explain_os_error(error: OSError, path: Path) -> str:
    """An error of the operating system as a message for the user."""
    intact = "existing files are intact"
    if error.errno in (*FULL, errno.EFBIG):
        return f"Expected disk space for {str(path)!r}, but the disk is full; {intact}."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        got = f"{error.strerror}; choose another folder with --out"
        return f"Expected permission to write {str(path)!r}, but got: {got}."
    return f"Expected to write {str(path)!r}, but got: {error}; {intact}."


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8; characters that cannot be encoded become ``?``."""
    data = text.encode("utf-8", "replace")
    write_atomically(path, lambda file: file.write(data))


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, with null for NaN and infinity."""
    write_text(path, json.dumps(json_safe(value), indent=1, allow_nan=False) + "\n")


def json_safe(value: Any) -> Any:
    """`value` with None for NaN and infinity, which JSON does not have."""
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as CSV; keys that are not among the columns are ignored."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
