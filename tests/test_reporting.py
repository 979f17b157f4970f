"""`report`: metrics of a script, as JSON in the file that the environment names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import powergrad


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("POWERGRAD_REPORT", str(tmp_path / "ünï code.json"))
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path / "ünï code.json"


def test_the_last_value_of_each_name_counts(file):
    half: Any = np.float32(0.5)
    powergrad.report(accuracy=90, loss=half)
    last: Any = np.int64(91)
    powergrad.report(accuracy=last)
    assert json.loads(file.read_text()) == {"accuracy": 91.0, "loss": 0.5}
    assert list(file.parent.iterdir()) == [file]  # nothing half-written is left


def test_what_is_not_finite_stays_so(file):
    powergrad.report(loss=float("nan"))
    assert np.isnan(json.loads(file.read_text())["loss"])


def test_only_rank_0_writes(file, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    powergrad.report(accuracy=1.0)
    assert not file.exists()


def test_without_the_variable_nothing_happens(tmp_path, monkeypatch):
    monkeypatch.delenv("POWERGRAD_REPORT", raising=False)
    monkeypatch.chdir(tmp_path)
    powergrad.report(accuracy=1.0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", ["97", True, None, 1j, torch.ones(()), np.ones(2)])
@pytest.mark.parametrize("asked", [True, False])
def test_only_numbers(value, asked, file, monkeypatch):
    if not asked:
        monkeypatch.delenv("POWERGRAD_REPORT")
    kind = type(value).__name__
    with pytest.raises(TypeError, match=rf"Expected `accuracy` to be a number, but got {kind}"):
        powergrad.report(accuracy=value)
    assert not file.exists()
