"""Files that are written completely or not at all."""

import errno
import json

import pytest

from powergrad.lab import words
from powergrad.lab.files import FileError, csv_text, write_atomically, write_json


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([words.duration(s) for s in (4.2, 200, 7500)], ["4 s", "3 min 20 s", "2 h 05 min"]),
        ([words.parse_duration(t) for t in ("90s", "10m", "1h30m")], [90, 600, 5400]),
        (words.spans([0, 1, 2, 3, 7, 9, 10]), "0-3, 7, 9-10"),
        (
            words.hide_folders("--data.name folder:/home/ann/photos --out='/home/ann/my runs'"),
            "--data.name folder:photos --out='my runs'",
        ),
        (words.did_you_mean("digit", ["digits", "cifar10"]), "; did you mean 'digits'?"),
        (words.did_you_mean("x", ["digits"]), "."),
        (words.slug("alpha=0.3"), "alpha-0.3"),
        ([words.short_key(k) for k in ("optimizer.head.lr", "seed")], ["head.lr", "seed"]),
        (words.number(0.10000), "0.1"),
    ],
)
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


def test_json_has_null_for_numbers_that_it_lacks(tmp_path):
    write_json(tmp_path / "x.json", {1: (float("inf"), 0.5), "a": float("nan")})
    assert json.loads((tmp_path / "x.json").read_text()) == {"1": [None, 0.5], "a": None}


def test_csv_ignores_keys_without_a_column():
    assert csv_text(["a", "b"], [{"a": 1, "c": 2}, {"a": "x,y", "b": 3}]) == 'a,b\n1,\n"x,y",3\n'
