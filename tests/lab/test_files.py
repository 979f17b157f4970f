"""Files written whole or not at all, and small pieces of text."""

import doctest
import errno
import json

import pytest

from powergrad.lab import files, words
from powergrad.lab.files import FileError, write_atomically, write_csv, write_json


@pytest.mark.parametrize("module", [files, words])
def test_examples_run(module):
    outcome = doctest.testmod(module)
    assert outcome.attempted > 0
    assert outcome.failed == 0


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "the disk is full; existing files are intact"),
        (errno.EACCES, "Expected permission to write"),
        (errno.EIO, "Expected to write .*; existing files are intact"),
    ],
)
def test_a_failed_write_leaves_the_old_file_and_says_why(tmp_path, number, words):
    path = tmp_path / "file"
    path.write_bytes(b"before")

    def fail(file):
        file.write(b"half")
        raise OSError(number, "no")

    with pytest.raises(FileError, match=words):
        write_atomically(path, fail)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_in_the_writer_leaves_the_old_file(tmp_path):
    path = tmp_path / "x"
    path.write_text("before")

    def fail(file):
        file.write(b"half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_atomically(path, fail)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_json_has_null_for_what_json_lacks(tmp_path):
    write_json(tmp_path / "x.json", {1: (float("inf"), 0.5), "a": float("nan")})
    assert json.loads((tmp_path / "x.json").read_text()) == {"1": [None, 0.5], "a": None}


def test_csv_leaves_out_what_is_no_column(tmp_path):
    path = write_csv(tmp_path / "x.csv", ["a", "b"], [{"a": 1, "c": 2}, {"a": "x,y", "b": 3}])
    assert path.read_text() == 'a,b\n1,\n"x,y",3\n'
