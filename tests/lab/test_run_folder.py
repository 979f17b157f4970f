"""The run folder: its files, its lock, and checkpoints that were damaged."""

import math
import os
import pickle
import resource
import signal
import sys
import zipfile

import pytest
import torch

from powergrad.lab.environment import describe_machine
from powergrad.lab.files import FileError
from powergrad.lab.trainer.recipe import Recipe
from powergrad.lab.trainer.run_folder import COLUMNS, FORMAT, Result, Run, RunError

STATE = {"step": 5, "model": {"weight": torch.arange(6.0)}}


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path / "run")
    with run.open(Recipe()):
        yield run


def test_new_run_has_recipe_and_environment_and_records_resumptions(tmp_path):
    run = Run(tmp_path)
    for _ in range(3):
        with run.open(Recipe()):
            assert run.recipe() == Recipe()
            (run.checkpoints / ".step-5.pt.1.tmp").write_text("left by a killed process")
    with run.open(Recipe()):
        assert list(run.checkpoints.iterdir()) == []
    environment = run.environment()
    assert (environment["torch"], environment["seed"]) == (torch.__version__, 0)
    assert {"python", "powergrad", "processor", "threads", "command", "time"} <= environment.keys()
    assert len(environment["resumed"]) == 3


def test_folder_of_another_recipe_raises(run):
    with pytest.raises(RunError, match=r"loss.alpha \(1.0 there, 0.3 here\)\."):
        run.check_recipe(Recipe().override({"loss.alpha": 0.3}))
    assert run.recipe() == Recipe()


def test_last_checkpoint_is_loaded_and_two_are_kept(run):
    assert run.load_checkpoint() is None
    for step in (5, 10, 15):
        run.save_checkpoint({**STATE, "step": step}, step=step)
    names = sorted(path.name for path in run.checkpoints.iterdir())
    assert names == ["step-0000000010.pt", "step-0000000015.pt"]
    state = run.load_checkpoint()
    assert state["step"] == 15
    assert torch.equal(state["model"]["weight"], torch.arange(6.0))


def flip_a_bit(path):
    with zipfile.ZipFile(path) as archive:
        info = next(info for info in archive.infolist() if info.filename.endswith("data/0"))
    data = bytearray(path.read_bytes())
    place = data.index(torch.arange(6.0).numpy().tobytes(), info.header_offset)
    data[place + 5] ^= 1
    path.write_bytes(data)


class Malicious:
    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return os.mkdir, (str(self.proof),)


KEY = Recipe().key
HARMS = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "empty": lambda path: path.write_bytes(b""),
    "bit": flip_a_bit,
    "code": lambda path: torch.save({**STATE, "x": Malicious(path.parent / "pwned")}, path),
    "pickle": lambda path: path.write_bytes(pickle.dumps(Malicious(path.parent / "pwned"))),
    "other run": lambda path: torch.save({"format": FORMAT, "key": "ab", "step": 10}, path),
    "other format": lambda path: torch.save({"format": FORMAT + 1, "key": KEY, "step": 10}, path),
    "other file": lambda path: torch.save(torch.zeros(3), path),
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_damaged_checkpoint_is_skipped_and_never_started_over(run, harm):
    run.save_checkpoint(STATE, step=5)
    run.save_checkpoint({**STATE, "step": 10}, step=10)
    harm(run.checkpoints / "step-0000000010.pt")
    with pytest.warns(UserWarning, match=r"step-0000000010\.pt.*Resuming from step-0000000005\.pt"):
        assert run.load_checkpoint()["step"] == 5
    (run.checkpoints / "step-0000000005.pt").unlink()
    with pytest.raises(RunError, match=r"step-0000000010\.pt.*no other checkpoint"):
        run.load_checkpoint()
    assert not (run.checkpoints / "pwned").exists()


@pytest.fixture
def full_disk():
    """No file may grow above 64 kB: the system's own error, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_full_disk_keeps_the_last_good_checkpoint(run, full_disk):
    run.save_checkpoint(STATE, step=5)
    with pytest.raises(FileError, match="disk is full"):
        run.save_checkpoint({"step": 10, "model": torch.zeros(100_000)}, step=10)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-0000000005.pt"]
    assert run.load_checkpoint()["step"] == 5


def test_metrics_are_cut_at_the_step_to_resume_from(run):
    run.cut_metrics(0)
    for epoch in (1, 2, 3):
        run.add_metrics({"epoch": epoch, "step": 10 * epoch, "lr": 0.1 / epoch, "nll": None})
    with open(run.folder / "metrics.csv", "a") as file:
        file.write("4,40,0.0")  # a kill in the middle of a line
    assert [row["step"] for row in run.metrics()] == [10, 20, 30]
    run.cut_metrics(20)
    rows = run.metrics()
    assert [row["epoch"] for row in rows] == [1, 2]
    assert (rows[1]["lr"], rows[1]["nll"]) == (0.1 / 2, None)
    assert tuple(rows[0]) == COLUMNS
    assert (run.folder / "metrics.csv").read_text().splitlines()[1].startswith("1,10,0.1,")


def test_run_is_finished_when_it_has_a_result(run):
    assert run.result() is None
    result = Result(metrics={"nll": math.nan, "top5": None, "ece": 1e-17}, about={"classes": 10})
    run.finish(result)
    stored = run.result()
    assert math.isnan(stored.metrics.pop("nll") or 0)
    assert (stored.metrics, stored.about) == ({"top5": None, "ece": 1e-17}, {"classes": 10})


@pytest.mark.parametrize("text", ['{"format": 1, "diverged": false, "nll": 0.2}', "[]", "{"])
def test_result_of_another_version_raises(run, text):
    (run.folder / "result.json").write_text(text)
    with pytest.raises(RunError, match="this version of powergrad"):
        run.result()


def test_folder_without_a_readable_recipe_raises(tmp_path):
    with pytest.raises(RunError, match=r"config\.yaml"):
        Run(tmp_path).recipe()
    for text, word in (("format: 1\nnonsense: 3\n", "nonsense"), ("format: 99\n", "format 99")):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(RunError, match=word):
            Run(tmp_path).recipe()


@pytest.mark.parametrize("program", ["/somewhere/bin/powergrad", "/lib/powergrad/__main__.py"])
def test_recorded_command_can_be_given_again(monkeypatch, program):
    monkeypatch.setattr(sys, "argv", [program, "compare", "--arm", "fast: lr=0.2"])
    assert describe_machine()["command"] == "powergrad compare --arm 'fast: lr=0.2'"
