"""The scripts of examples/ run, and what they train learns."""

from __future__ import annotations

import csv
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torchvision_shim import declare_torchvision_schemas

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.filterwarnings("default")  # the other libraries' own
declare_torchvision_schemas()


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run a script in this process, as `python examples/...` does, and return what it prints."""

    def script(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        monkeypatch.syspath_prepend(str(EXAMPLES))  # as for any script that is run by its path
        monkeypatch.chdir(tmp_path)
        state = torch.random.get_rng_state()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        torch.random.set_rng_state(state)
        return capsys.readouterr().out

    return script


TRAININGS = [  # the script, its options, the libraries it needs, and the accuracy it exceeds
    ("timm_train.py", "--epochs 5", ["timm"], 60),
    ("timm_train.py", "--epochs 4 --mixup 0.2", ["timm"], 60),
    ("lightning_train.py", "--epochs 3 --precision 32-true", ["lightning"], 80),
    ("lightning_train.py", "--epochs 3 --precision bf16-mixed", ["lightning"], 80),
    ("jax_train.py", "--steps 150", ["jax", "optax"], 80),
]


@pytest.mark.parametrize(("name", "options", "libraries", "least"), TRAININGS)
def test_a_training_learns(run, name, options, libraries, least):
    for library in libraries:
        pytest.importorskip(library, reason=f"needs {library}: make test-integrations")
    printed = run(name, *options.split())
    assert float(re.findall(r"accuracy ([\d.]+)%", printed)[-1]) > least
    if name == "lightning_train.py":
        assert "17 records" in printed  # at the start, and every 5th of 84 steps


@pytest.mark.parametrize("through", ["model", "compute_loss_func"])
def test_a_language_model_learns_and_is_calibrated(run, through):
    for library in ("transformers", "accelerate"):
        pytest.importorskip(library, reason=f"needs {library}: make test-integrations")
    printed = run("transformers_trainer.py", "--steps", "60", "--through", through)
    at_one, calibrated = map(float, re.findall(r"temperature [\d.]+: ([\d.]+)", printed))
    assert calibrated < at_one
    assert calibrated < 3.5  # 4.85 is guessing


COMPARISONS = {"segmentation.py": "mIoU", "language_model.py": "bits at 1/alpha"}


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons(run, name, tmp_path):
    """Few steps of each: it tunes both arms on the same rates, and writes every run."""
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    options = ["--steps", "8", "--seeds", "2", "--tuning-seeds", "1", "--save", "runs.csv"]
    printed = run(name, *options)
    with (tmp_path / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    for arm in ("CE", "PGT"):
        tuned = [row["rate"] for row in rows if (row["arm"], row["split"]) == (arm, "val")]
        tested = [row for row in rows if (row["arm"], row["split"]) == (arm, "test")]
        assert len(set(tuned)) == len(tuned) == 4
        assert [row["seed"] for row in tested] == ["0", "1"]
        assert {row["rate"] for row in tested} <= set(tuned)
    assert f"{COMPARISONS[name]}:  CE" in printed
    assert f"{len(rows)} runs" in printed


@pytest.mark.parametrize("name", COMPARISONS)
def test_the_kept_figures_are_complete(name):
    """results/example_*.csv holds every run that the page speaks of, and its command."""
    path = EXAMPLES.parent / "results" / f"example_{Path(name).stem}.csv"
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * (4 * 2 + 6)
    assert {row["command"] for row in rows} == {rows[0]["command"]}
    assert name in rows[0]["command"]


def test_sign_flip():
    sign_flip = runpy.run_path(str(EXAMPLES / "comparison.py"))["sign_flip"]
    assert sign_flip([1.0, 2.0, 3.0]) == 2 / 8
    assert sign_flip([1.0, -1.0]) == 1.0
    assert sign_flip([0.0, 0.0]) == 1.0
