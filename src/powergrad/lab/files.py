"""Files that are written whole or not at all, and JSON without NaN."""

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

__all__ = ["FileError", "json_safe", "write_atomically", "write_csv", "write_json", "write_text"]


class FileError(RuntimeError):
    """A file that cannot be written; the message says why, and what is still intact."""


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Make `path` hold what `write` writes, or leave it as it was.

    Args:
        path: The file.
        write: Called with a file that is open for writing bytes.

    Raises:
        FileError: If the disk is full, or the folder may not be written.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(fresh, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as error:
        # torch.save fails once more while it closes, and so hides the system's own error.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise FileError(explain_os_error(cause, path)) from error
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def explain_os_error(error: OSError, path: Path) -> str:
    """An error of the operating system as a message for the user."""
    intact = "what was there before is intact"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"Expected room for {str(path)!r}, but the disk is full; {intact}."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"Expected to be allowed to write {str(path)!r}, but got: {error.strerror}."
    return f"Expected to write {str(path)!r}, but got: {error}; {intact}."


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8; characters that UTF-8 lacks (from odd file names) become ``?``."""
    data = text.encode("utf-8", "replace")
    write_atomically(path, lambda file: file.write(data))


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, with null for NaN and infinity."""
    write_text(path, json.dumps(json_safe(value), indent=1, allow_nan=False) + "\n")


def json_safe(value: Any) -> Any:
    """`value` with None in place of NaN and infinity, which JSON does not have.

    Example:
        >>> json_safe({"loss": [1.0, float("nan")]})
        {'loss': [1.0, None]}
    """
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as CSV; what is not among the columns is left out."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write rows as CSV; returns `path`."""
    write_text(path, csv_text(columns, rows))
    return path
