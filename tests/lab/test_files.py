"""Files that are written completely or not at all."""

import errno
from pathlib import Path

import pytest

from powergrad.lab import words
from powergrad.lab.files import FileError, write_atomically


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([words.parse_duration(t) for t in ("90s", "10m", "1h30m")], [90, 600, 5400]),
        (
            words.hide_folders("--data.name folder:/home/ann/photos --out='/home/ann/my runs'"),
            "--data.name folder:photos --out='my runs'",
        ),
        (words.portable(f"powergrad compare --data.name folder:{Path.cwd()}/a/b --out /c/d"),
         "powergrad compare --data.name folder:a/b --out /path/to/d"),
        (words.portable(words.portable("x folder:/c/d")), "x folder:/path/to/d"),
        (words.did_you_mean("digit", ["digits", "cifar10"]), "; did you mean 'digits'?"),
        (words.did_you_mean("x", ["digits"]), "."),
    ],
)  # fmt: skip
def test_text_for_people(found, expected):
    assert found == expected


@pytest.mark.parametrize(
    ("error", "kind", "word"),
    [
        (OSError(errno.ENOSPC, "no"), FileError, "disk is full"),
        (OSError(errno.EACCES, "no"), FileError, "permission"),
        (OSError(errno.EIO, "no"), FileError, "intact"),
        (ZeroDivisionError("no"), ZeroDivisionError, "no"),
    ],
)
def test_failed_write_keeps_the_old_file(tmp_path, error, kind, word):
    path = tmp_path / "file"
    path.write_bytes(b"before")

    def fail(file):
        file.write(b"half")
        raise error

    with pytest.raises(kind, match=word):
        write_atomically(path, fail)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
