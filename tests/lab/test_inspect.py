"""`powergrad inspect`: the census of a recording or a checkpoint, and the contents of a study."""

import math
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from small_study import small
from studies import powergrad
from torch import nn
from torch.nn import functional as F

from powergrad.lab.study import load
from powergrad.lab.study.notes import verdict
from powergrad.lab.study.saving import compare_rows, save
from powergrad.lab.trainer.networks import create_model
from powergrad.monitor import FilterMonitor, census

__all__ = ["small"]  # a fixture


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
    assert powergrad("inspect", folder, *(token for pair in paths.items() for token in pair)) == 0
    assert capsys.readouterr().out == f"{census(folder)}\n"
    assert {option: path.read_text().count("\n") for option, path in paths.items()} == outputs


def test_a_checkpoint_of_timms_training_has_the_layers_of_the_paper(tmp_path, capsys):
    """Its parameters are named as in timm, and its arguments are stored beside them."""
    state = create_model("resnet18", num_classes=1000, norm="none").state_dict()
    state["layer3.0.conv1.weight"][:40] = 0
    state["layer4.1.conv2.weight"] *= math.exp(-125)  # what decay alone leaves in the paper
    wrapped = {"module." + name: tensor for name, tensor in state.items()}
    path = tmp_path / "model_best.pth.tar"
    torch.save({"arch": "resnet18", "state_dict": wrapped, "args": Namespace(lr=0.4)}, path)
    assert powergrad("inspect", path) == 0
    said = capsys.readouterr().out
    assert re.search(r"^11 +layer3\.0\.conv1 +conv2d +256 +40 ", said, re.M), said
    assert re.search(r"^20 +layer4\.1\.conv2 +conv2d +512 +512 ", said, re.M), said
    assert "552 of 5,800 filters dead" in said


@pytest.mark.parametrize(
    ("options", "dead"),
    [([], 0), (["--initial", "start.safetensors"], 1)],
)
def test_a_checkpoint_with_and_without_its_start(options, dead, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    weight = F.normalize(torch.randn(2, 50))
    save_file({"weight": weight}, "start.safetensors")
    save_file({"weight": weight * torch.tensor([[1.0], [0.005]])}, "model.safetensors")
    for source in ("model.safetensors", "."):
        assert powergrad("inspect", source, *options) == 0
        assert f"{dead} of 2 filters dead." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["nowhere.pt"], "nowhere.pt"),
        (["."], "recording"),
        (["text.pt"], "checkpoint"),
        (["one.safetensors", "--start", "2"], "start"),
        (["one.safetensors", "--initial", "nowhere.pt"], "nowhere.pt"),
        (["one.safetensors", "--csv", "no/x.csv"], "no/x.csv"),
    ],
)
def test_errors_name_the_cause(tokens, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.pt").write_text("not a checkpoint")
    save_file({"weight": torch.ones(1, 50)}, "one.safetensors")
    assert powergrad("inspect", *tokens) == 2
    printed = capsys.readouterr()
    assert message in printed.err + printed.out
    assert "Traceback" not in printed.err


def test_study_of_runs_and_study_of_a_table(small: Path, tmp_path: Path, capsys: Any) -> None:
    assert powergrad("inspect", small) == 0
    printed = capsys.readouterr().out
    assert verdict(load(small)) in printed
    assert re.search(r"baseline +2 .* ± \d", printed)
    assert powergrad("inspect", small, "--csv", tmp_path / "x.csv") == 2
    assert "--csv" in capsys.readouterr().err
    table = tmp_path / "mine.csv"
    rows = [f"{arm},{seed},{80 + seed}\n" for arm in "ab" for seed in range(6)]
    table.write_text("arm,seed,acc\n" + "".join(rows))
    results = compare_rows(table)
    save(results, tmp_path)
    assert powergrad("inspect", tmp_path) == 0
    assert verdict(results) in capsys.readouterr().out
