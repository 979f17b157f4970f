"""Files that are written completely or not at all."""

import errno
import json

import pytest

from powergrad.lab.files import FileError, write_atomically, write_csv, write_json


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


def test_json_has_null_for_numbers_that_it_lacks(tmp_path):
    write_json(tmp_path / "x.json", {1: (float("inf"), 0.5), "a": float("nan")})
    assert json.loads((tmp_path / "x.json").read_text()) == {"1": [None, 0.5], "a": None}


def test_csv_ignores_keys_without_a_column(tmp_path):
    path = write_csv(tmp_path / "x.csv", ["a", "b"], [{"a": 1, "c": 2}, {"a": "x,y", "b": 3}])
    assert path.read_text() == 'a,b\n1,\n"x,y",3\n'
