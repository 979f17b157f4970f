"""`powergrad inspect`: the census of a recording or a checkpoint, and the contents of a study."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from small_study import small
from torch import nn
from torch.nn import functional as F

import powergrad_cli
from powergrad.lab.study import load
from powergrad.lab.study.notes import verdict
from powergrad.lab.study.saving import compare_rows, save
from powergrad.monitor import FilterMonitor, census

__all__ = ["small"]  # a fixture


def inspect(*tokens: object) -> int:
    return powergrad_cli.main(["inspect", *map(str, tokens)])


def save_layer(path: Path, norms: list[float]) -> Path:
    """A checkpoint of one linear layer whose filters have these norms."""
    torch.manual_seed(0)
    directions = F.normalize(torch.randn(len(norms), 50))
    torch.save({"weight": directions * torch.tensor(norms)[:, None]}, path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a run in which one filter dies, and another dies and revives."""
    layer = nn.Linear(50, 4)
    with FilterMonitor(layer, tmp_path / "norms", every=1) as monitor, torch.no_grad():
        monitor.step(0)
        row = layer.weight[1].clone()
        layer.weight[1] = 0
        monitor.step(1)
        layer.weight[1] = row
        layer.weight[3] = 0
        monitor.step(2)
    return tmp_path


def test_a_recording_is_printed_and_written(folder: Path, capsys: Any) -> None:
    outputs = {"--csv": 2, "--layers-csv": 2, "--events-csv": 4}  # lines, with the header
    paths = {option: folder / f"{option[2:]}.csv" for option in outputs}
    assert inspect(folder, *(token for pair in paths.items() for token in pair)) == 0
    assert capsys.readouterr().out == f"{census(folder)}\n"
    assert {option: path.read_text().count("\n") for option, path in paths.items()} == outputs


@pytest.mark.parametrize(
    ("options", "dead"),
    [([], 0), (["--initial", "start.pt"], 1)],
)
def test_a_checkpoint_with_and_without_its_start(
    options: list[str], dead: int, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    save_layer(tmp_path / "start.pt", [1.0, 1.0])
    save_layer(tmp_path / "now.pt", [1.0, 0.005])
    assert inspect("now.pt", *options) == 0
    assert f"{dead} of 2 filters dead." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["nowhere.pt"], "nowhere.pt"),
        (["."], "recording"),
        (["text.pt"], "checkpoint"),
        (["one.pt", "--start", "2"], "start"),
        (["one.pt", "--initial", "nowhere.pt"], "nowhere.pt"),
        (["one.pt", "--csv", "no/x.csv"], "no/x.csv"),
    ],
)
def test_errors_name_the_cause(
    tokens: list[str], message: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.pt").write_text("not a checkpoint")
    save_layer(tmp_path / "one.pt", [1.0])
    assert inspect(*tokens) == 2
    printed = capsys.readouterr()
    assert message in printed.err + printed.out
    assert "Traceback" not in printed.err


def test_study_of_runs_and_study_of_a_table(small: Path, tmp_path: Path, capsys: Any) -> None:
    assert inspect(small) == 0
    printed = capsys.readouterr().out
    assert verdict(load(small)) in printed
    assert re.search(r"baseline +2 +0-1 .* 0\.5 \(0 to 1\) +12 +0", printed)  # dead filters
    assert inspect(small, "--csv", tmp_path / "x.csv") == 2
    assert "--csv" in capsys.readouterr().err
    table = tmp_path / "mine.csv"
    rows = [f"{arm},{seed},{80 + seed}\n" for arm in "ab" for seed in range(6)]
    table.write_text("arm,seed,acc\n" + "".join(rows))
    results = compare_rows(table)
    save(results, tmp_path)
    assert inspect(tmp_path) == 0
    assert verdict(results) in capsys.readouterr().out
