"""`report`: metrics of a script, as JSON in the file that the environment names."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import powergrad


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POWERGRAD_REPORT", str(tmp_path / "ünï code.json"))
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path / "ünï code.json"


def test_the_last_value_of_each_name_counts(file):
    half: Any = np.float32(0.5)
    powergrad.report(accuracy=90, loss=half, error=math.nan)
    last: Any = np.int64(91)
    powergrad.report(accuracy=last)
    reported = json.loads(file.read_text())
    assert math.isnan(reported.pop("error"))
    assert reported == {"accuracy": 91.0, "loss": 0.5}
    assert list(file.parent.iterdir()) == [file]  # nothing half-written is left


@pytest.mark.parametrize("change", [{"RANK": "1"}, {"POWERGRAD_REPORT": ""}])
def test_other_ranks_and_other_programs_write_nothing(change, file, monkeypatch):
    for name, value in change.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    powergrad.report(accuracy=1.0)
    assert not list(file.parent.iterdir())


@pytest.mark.parametrize("value", ["97", True, None, 1j, torch.ones(()), np.ones(2)])
@pytest.mark.parametrize("asked", [True, False])
def test_only_numbers_are_reported(value, asked, file, monkeypatch):
    if not asked:
        monkeypatch.delenv("POWERGRAD_REPORT")
    with pytest.raises(TypeError, match=f"`accuracy` .* {type(value).__name__}"):
        powergrad.report(accuracy=value)
    assert not file.exists()
