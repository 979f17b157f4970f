import errno
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from studies import powergrad

import powergrad_cli
from powergrad.lab.trainer.recipe import describe_keys, recipe_names
from powergrad.lab.trainer.run_folder import Run

SMALL = ["--data.limit=128", "--model.width=4", "--train.epochs=2", "--train.batch_size=32",
         "--schedule.warmup_epochs=1", "--monitor.every=2", "--machine.threads=1"]  # fmt: skip


def test_help_needs_no_torch():
    code = (
        "import sys, powergrad_cli; powergrad_cli.main(['--help']); "
        "assert not {'torch', 'cyclopts', 'dask'} & sys.modules.keys()"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    for command in powergrad_cli.COMMANDS:
        assert command in found.stdout


TYPED_WRONG = {  # the exit code is 2
    *("compare --form x.csv", "compare --arms pgtt", "compare --seeds x", "sweep --grid lr"),
    *("compare -- python lost.py {seed}", "decompose --alpha 3", "plan --delta much"),
    *("train digits --lis 1", "train digits --loss.alfa 1", "inspect", "watch --port x", "export"),
    *("train digits --learning_rate 1", "compare photos", "compare --data.name photos"),
    *("compare --tran.epochs 3", "compare --alpha x", "compare --budget soon", "compare --seed 3"),
    *("compare --tune lrr=1,2", "compare --arm x", "compare --margin x", "sweep --grid alfa=1"),
    *("compare --from lost.csv", "report", "report lost", "watch lost", "train lost", "lost"),
    *("compare --metric beauty", "compare --workers x", "decompose --repeats 3", "plan", "run -x"),
}


def test_help_and_typing_errors_need_no_torch():
    """Its import takes most of the time of such a command; afterwards the core is as always."""
    helps = [f"{name} --help" for name in powergrad_cli.COMMANDS]
    code = f"""
import sys, powergrad_cli
for commands, expected in (({helps}, 0), ({sorted(TYPED_WRONG)}, 2)):
    for command in commands:
        assert powergrad_cli.main(command.split()) == expected, command
        assert "torch" not in sys.modules, command
from powergrad.monitor import census
import powergrad, torch
assert powergrad.cross_entropy(torch.zeros(1, 2), torch.tensor([0]), alpha=0.5) > 0.6
assert powergrad.operators
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("command", ["train --keys", "train --list"])  # long and short
def test_a_reader_that_has_gone_gets_no_traceback(command):
    reader, writer = os.pipe()
    os.close(reader)
    whole = [sys.executable, "-m", "powergrad", *command.split()]
    found = subprocess.run(whole, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (found.returncode, found.stderr) == (141, "")


def test_the_lists(capsys):
    assert powergrad("train", "--list") == 0
    said = capsys.readouterr().out
    assert all(name in said for name in recipe_names())
    assert powergrad("train", "--keys") == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines.keys() == {f"--{key}" for key, *_ in describe_keys()}
    assert "batch or group or none" in lines["--model.norm"]


def test_train_then_resume(tmp_path, capsys):
    assert powergrad("train", "digits", *SMALL, "--out", tmp_path, "--resume") == 2
    assert "Expected a run to resume" in capsys.readouterr().err
    assert powergrad("train", "digits", *SMALL, "--out", tmp_path) == 0
    assert "finished: epoch 2, train" in " ".join(capsys.readouterr().err.split())
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("digits-resnet8-seed0-")
    assert folder.name.endswith(Run(folder).recipe().key)
    assert powergrad("train", "digits", *SMALL, "--out", tmp_path, "--resume") == 0
    assert "is finished" in capsys.readouterr().out
    assert powergrad("train", folder) == 0  # a run's folder is a recipe too
    assert "is finished" in capsys.readouterr().out


def test_a_short_training_has_a_short_warm_up(tmp_path, capsys):
    tokens = ["train", "digits", *SMALL[:2], "--train.batch_size=32", "--train.epochs=1"]
    assert powergrad(*tokens, "--folder", tmp_path) == 0
    assert "warm-up is shortened from 1 to 0.125 epochs" in capsys.readouterr().err
    assert Run(tmp_path).recipe().schedule.warmup_epochs == 0.125  # 1 of 8 in the recipe
    assert powergrad(*tokens, "--schedule.warmup_epochs=1", "--folder", tmp_path) == 2


@pytest.mark.parametrize("command", ["compare --seeds 6", "sweep --grid lr=1,2", "train digits"])
def test_a_read_only_disk_is_named(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)

    def mkdir(path, *_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert powergrad(*command.split(), *SMALL) == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "Read-only" in line]
    assert "Errno" not in said
    assert "Expected permission to write 'runs/" in said
    assert "choose another folder with --out" in said


@pytest.mark.parametrize("bar", [False, True])
def test_train_says_that_it_diverged(tmp_path, capsys, monkeypatch, bar):
    if bar:
        monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    command = ("train", "digits", *SMALL, "--optimizer.lr", "1e30", "--out", tmp_path)
    assert powergrad(*command) == 0
    (folder,) = tmp_path.iterdir()
    result: Any = Run(folder).result()
    assert result.about["diverged"]
    assert math.isnan(Run(folder).metrics()[-1]["train_loss"] or 0)
    said = " ".join(capsys.readouterr().err.split())
    assert f"diverged: the loss was not finite in epoch 1 (step {result.about['steps']} of " in said
    assert "try a lower optimizer.lr" in said
    assert "finished:" not in said
    assert powergrad(*command) == 0
    assert capsys.readouterr().out.strip() == f"{folder} is finished: it diverged."


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["train"], "Expected a recipe"),
        (["compare", "--form", "x.csv"], "did you mean '--from'?"),
        (["train", "digits", "--lis", "1"], "did you mean '--list'?"),
        (["train", "digits", "--learning_rate", "1"], "did you mean '--optimizer.lr'?"),
        (["train", "digits", "optimizer.learning_rate=1"], "did you mean 'optimizer.lr'?"),
        (["compare", "--tune", "learning_rate=1,2"], "did you mean 'optimizer.lr'?"),
        (["compare", "digits", "--tran.epochs", "3"], "tran.epochs: unknown key; did you mean "
                                                      "'train.epochs'?"),
        (["compare", "digits", "--tran", "3"], "but got '--tran'."),
        (["compare", "--data.name", "photos"], "did you mean folder:photos?"),
        (["train", "images", "--data.name", "photos"], "did you mean folder:photos?"),
        (["compare", "photos"], "for its images, use --data.name folder:photos"),
        (["compare", "--data.name", "digit"], "did you mean 'digits'?"),
        (["paper", "list"], "Expected a command"),
        (["trian"], 'Did you mean "train"'),
    ],
)  # fmt: skip
def test_bad_input(tmp_path, monkeypatch, capsys, tokens, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    assert powergrad(*tokens) == 2
    said = capsys.readouterr()
    assert message in said.err + said.out
    assert "Traceback" not in said.err
    assert not list(tmp_path.glob("runs/*/model.safetensors"))
