"""Training: against a loop written out, stopped, killed, resumed, and in several processes."""

import dataclasses
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tiny import TINY

import powergrad
import powergrad_cli
from powergrad.calibration import expected_calibration_error
from powergrad.lab.data import load_data
from powergrad.lab.signals import Interrupted
from powergrad.lab.trainer import training
from powergrad.lab.trainer.processes import Processes
from powergrad.lab.trainer.progress import Progress
from powergrad.lab.trainer.recipe import RecipeError, Schedule
from powergrad.lab.trainer.run_folder import COLUMNS, Run
from powergrad.lab.trainer.session import Session, learning_rate_at, score
from powergrad.lab.trainer.training import train, use_threads
from powergrad.monitor import Recording

# A process that begins at once, without importing anything.
FORK = multiprocessing.get_context("fork")
ALONE = Processes(0, 1, torch.device("cpu"))
DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"


def weights(run):
    return load_file(run.folder / "model.safetensors")


def assert_same_run(a, b):
    """Every file that the training decides is the same, bit for bit."""
    names = ["model.safetensors", "test.safetensors"]
    names += ["norms/records.npy"] if (a.folder / "norms").exists() else []
    for name in names:
        assert (a.folder / name).read_bytes() == (b.folder / name).read_bytes(), name
    rows = [[{**row, "seconds": None} for row in run.metrics()] for run in (a, b)]
    assert rows[0] == rows[1]
    first, second = a.result(), b.result()
    assert first.about == second.about
    for name in {*first.metrics, *second.metrics} - {"seconds"}:
        assert first.metrics[name] == second.metrics[name], name


def test_files_and_result_of_a_run(tiny_run):
    rows = tiny_run.metrics()
    assert [(row["epoch"], row["step"]) for row in rows] == [(1, 4), (2, 8), (3, 12)]
    outputs, result = tiny_run.test_outputs(), tiny_run.result()
    logits, labels = outputs["logits"], outputs["labels"]
    assert logits.shape == (len(load_data(TINY.data).test), 10)
    expected = {
        "test_accuracy": 100 * (logits.argmax(1) == labels).double().mean().item(),
        "nll": F.cross_entropy(logits, labels).item(),
        "nll_scaled": F.cross_entropy(0.5 * logits, labels).item(),
        "ece": expected_calibration_error(logits, labels),
        "ece_scaled": expected_calibration_error(0.5 * logits, labels),
        "test_top5": 500 * (logits.argsort(1)[:, -5:] == labels[:, None]).double().mean().item(),
        "logit_norm": logits.norm(dim=1).mean().item(),
        "dead_units": 0,
    }
    for name, value in expected.items():
        assert result.metrics[name] == rows[-1][name] == pytest.approx(value, rel=1e-6)
    about = {
        "diverged": False,
        "steps": 12,
        "classes": 10,
        "images": [len(load_data(TINY.data).train), len(load_data(TINY.data).test)],
    }
    assert result.about.items() >= about.items()
    assert {*result.metrics, *result.about} == {*COLUMNS, *about} - {"step"}


def test_monitor_and_tensorboard_write_their_files(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    changes = {"monitor.every": 2, "train.epochs": 2}
    train(TINY.override({**changes, "machine.tensorboard": True}), tmp_path / "a")
    assert powergrad.census(tmp_path / "a").steps == (0, 8)
    assert list((tmp_path / "a" / "tensorboard").iterdir())
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        train(TINY.override({"machine.tensorboard": True}), tmp_path / "b")


def test_weights_equal_those_of_a_plain_loop(tmp_path):
    recipe = TINY.override({"clip.norm": 0.5})
    run = train(recipe, tmp_path)
    data = load_data(recipe.data)
    model = Session(recipe, data, ALONE).model  # for its initial weights only
    optimizer = torch.optim.SGD(
        model.parameters(), lr=1.0, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    model.train()
    batches = [b for e in range(3) for b in data.train.train_batches(32, seed=0, epoch=e)]
    for step, (images, labels) in enumerate(batches):
        at = step / 4
        warm = 4e-4 + (0.05 - 4e-4) * at
        lr = warm if at < 1 else 0.05 * 0.5 * (1 + math.cos(math.pi * (at - 1) / 2))
        optimizer.param_groups[0]["lr"] = lr
        logits = model(images)
        p = logits.detach().softmax(1) ** 0.5
        gradient = (p / p.sum(1, keepdim=True) - F.one_hot(labels, 10)) / 32
        optimizer.zero_grad()
        logits.backward(gradient)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    for name, value in weights(run).items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-4, atol=1e-6)


def test_schedules():
    step, cosine = Schedule(name="step"), Schedule(warmup_start=0.0, floor=0.1)
    rates = [learning_rate_at(epoch, step, 0.4, 100) for epoch in (5, 29.9, 30, 60, 90)]
    assert rates == pytest.approx([0.4, 0.4, 0.04, 0.004, 0.0004])
    rates = [learning_rate_at(epoch, cosine, 0.4, 105) for epoch in (0, 2.5, 5, 55, 105)]
    assert rates == pytest.approx([0, 0.2, 0.4, 0.25, 0.1])
    assert learning_rate_at(50, Schedule(name="constant"), 0.4, 100) == 0.4


class StopAt(Progress):
    """Sends the signal that a person's Ctrl-C sends, after a step."""

    def __init__(self, at, number=signal.SIGINT):
        super().__init__(quiet=True)
        self.at, self.number = at, number

    def step(self, step, loss, lr):
        if step == self.at:
            os.kill(os.getpid(), self.number)


OPTIONS = {  # each is a part of one run
    "adamw": {"optimizer.name": "adamw", "optimizer.lr": 1e-3, "optimizer.decay_all": False},
    "adam": {"optimizer.name": "adam", "optimizer.head.eps": 2.0, "model.head_scale": 0.5},
    "agc, accumulation": {"clip.agc": 0.01, "train.accumulate": 2},
    "batch norm, bfloat16": {"model.norm": "batch", "train.precision": "bfloat16"},
    "float16, clipped": {"train.precision": "float16", "clip.value": 0.1},
    "smoothing": {"loss.label_smoothing": 0.1, "loss.smoothing": "paper", "schedule.name": "step"},
    "crops": {"data.crop_padding": 1, "data.flip": True, "train.channels_last": True},
    "records": {"monitor.every": 3, "monitor.gradients": True, "monitor.features": True},
}
TOGETHER = [
    ("adamw", "batch norm, bfloat16", "records"),
    ("adam", "agc, accumulation", "smoothing"),
    ("float16, clipped", "crops"),
]


@pytest.mark.parametrize("names", TOGETHER, ids=" + ".join)
def test_stopped_and_resumed_run_equals_an_undisturbed_one(tmp_path, names):
    recipe = TINY.override({key: value for name in names for key, value in OPTIONS[name].items()})
    whole = train(recipe, tmp_path / "whole")
    parts = Run(tmp_path / "parts")
    for at, number in ((2, signal.SIGINT), (8, signal.SIGTERM), (9, signal.SIGINT)):
        with pytest.raises(Interrupted, match=f"stopped at step {at} of 12"):
            train(recipe, parts.folder, progress=StopAt(at, number))
        assert parts.result() is None
    assert_same_run(whole, train(recipe, parts.folder))


def test_dropout_depends_on_seed_and_step_alone(tmp_path, monkeypatch):
    def with_dropout(name, *, num_classes, in_channels, **_):
        linear = torch.nn.Linear(64 * in_channels, num_classes)
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.5), linear)

    monkeypatch.setattr("powergrad.lab.trainer.session.create_model", with_dropout)
    whole = train(TINY, tmp_path / "whole")
    with pytest.raises(Interrupted):
        train(TINY, tmp_path / "parts", progress=StopAt(7))
    torch.rand(5)  # whatever else a process does with the generator
    assert_same_run(whole, train(TINY, tmp_path / "parts"))


def test_finished_run_is_returned_and_one_without_result_finishes(tiny_run, tmp_path):
    class NotCalled(Progress):
        def begin(self, recipe, step, steps, folder):
            raise AssertionError("trained again")

    again = train(TINY, tmp_path)
    assert_same_run(tiny_run, again)  # the same seed gives the same weights
    train(TINY, tmp_path, progress=NotCalled(quiet=True))
    for name in ("result.json", "model.safetensors", "test.safetensors"):
        (tmp_path / name).unlink()  # killed after its last checkpoint
    assert_same_run(tiny_run, train(TINY, tmp_path))


def test_initial_weights_depend_on_the_seed():
    data = load_data(TINY.data)
    first, other = (Session(TINY.override({"seed": s}), data, ALONE) for s in (0, 1))
    assert not torch.equal(first.initial["fc.weight"], other.initial["fc.weight"])


def test_rows_with_nan_are_wrong_answers():
    logits, labels = 2 * torch.eye(7)[:4], torch.tensor([0, 1, 6, 3])
    logits[0] = math.nan
    scores = score(logits, labels, alpha=0.5)
    assert scores["test_accuracy"] == 50.0
    assert scores["test_top5"] in (50.0, 75.0)  # never the row of NaN


def test_impossible_batches_and_devices_raise(tmp_path):
    with pytest.raises(ValueError, match=r"`machine.device`.* 'warp'"):
        train(TINY.override({"machine.device": "warp"}), tmp_path)
    with pytest.raises(ValueError, match=r"`train.batch_size` to be divisible by 3"):
        Session(TINY, load_data(TINY.data), dataclasses.replace(ALONE, world=3))


def test_progress_without_a_terminal_has_a_line_per_step(tmp_path, capsys):
    with Progress(every=0.0) as progress:
        train(TINY, tmp_path, progress=progress)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 + 12 + 1
    assert all("images/s" in line for line in lines[1:-1])
    assert "epoch 2, train" in lines[-2]


def command(folder, recipe, *options):
    file = folder.parent / f"{folder.name}.yaml"
    file.write_text(recipe.to_yaml())
    return ["train", str(file), "--folder", str(folder), *options]


def test_run_killed_at_random_moments_equals_an_undisturbed_one(tmp_path):
    """SIGKILL while it computes or writes a checkpoint, which here it does at every step."""
    kills, epochs = (20, 40) if DEEP else (3, 16)
    changes = {"train.epochs": epochs, "machine.checkpoint_steps": 1, "train.test_every": 8}
    recipe = TINY.override({**changes, "monitor.every": 5})
    whole, run = train(recipe, tmp_path / "whole"), Run(tmp_path / "parts")
    rng = random.Random(20)
    last = 0
    for _ in range(kills):
        process = FORK.Process(target=train, args=(recipe, run.folder))
        process.start()
        while not list(run.checkpoints.glob("step-*.pt")):  # it has saved nothing yet
            assert process.is_alive()
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.35))
        process.kill()
        process.join()
        saved = run.load_checkpoint() or {"step": -1}  # always readable, never behind
        assert saved["step"] >= last
        last = saved["step"]
    assert_same_run(whole, train(recipe, run.folder))


def hold(folder, held, done):
    with Run(folder).open(TINY):
        held.set()
        done.wait()


def test_command_refuses_a_folder_in_use(tmp_path, capsys):
    held, done = FORK.Event(), FORK.Event()
    process = FORK.Process(target=hold, args=(tmp_path / "run", held, done))
    process.start()
    try:
        held.wait()
        assert powergrad_cli.main(command(tmp_path / "run", TINY)) == 2
    finally:
        done.set()
        process.join()
    assert process.exitcode == 0
    text = f"powergrad: Another process is using the run folder '{tmp_path / 'run'}'."
    assert capsys.readouterr().err.replace("\n", " ").strip() == text


@pytest.mark.studies
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_train_as_one(tmp_path, parallel):
    """Without batch normalisation, the same global batch; tests with unequal numbers of batches."""
    changes = {"train.epochs": 3, "train.precision": "float64", "train.test_batch_size": 101}
    recipe = TINY.override({**changes, "clip.agc": 0.02, "train.accumulate": 2})
    one, two = train(recipe, tmp_path / "one"), Run(tmp_path / "two")
    options = ("--processes", "2", "--parallel", parallel)
    program = [sys.executable, "-m", "powergrad", *command(two.folder, recipe, *options)]
    subprocess.run(program, check=True)
    for name, value in weights(one).items():
        torch.testing.assert_close(weights(two)[name], value, rtol=0, atol=1e-12)
    for name in ("clip_rate", "dead_units", "train_accuracy", "test_accuracy", "nll"):
        values = [[row[name] for row in run.metrics()] for run in (one, two)]
        assert values[0] == pytest.approx(values[1], rel=1e-9), name


@pytest.mark.studies
def test_shards_killed_and_resumed_with_other_numbers_of_processes(tmp_path):
    """Two processes are killed, three continue and are killed, one finishes: float64."""
    recipe = TINY.override(
        {"train.epochs": 8, "train.precision": "float64", "train.batch_size": 24, "clip.agc": 0.02,
         "train.accumulate": 2, "monitor.every": 3, "monitor.gradients": True,
         "machine.checkpoint_steps": 2}
    )  # fmt: skip
    one, run = train(recipe, tmp_path / "one"), Run(tmp_path / "shards")
    for processes in (2, 3, 1):
        options = ("--processes", str(processes), "--parallel", "fsdp")
        before = set(run.checkpoints.glob("step-*.pt"))
        program = [sys.executable, "-m", "powergrad", *command(run.folder, recipe, *options)]
        with subprocess.Popen(program) as process:
            while processes > 1 and not set(run.checkpoints.glob("step-*.pt")) - before:
                assert process.poll() is None
                time.sleep(0.01)
            started = psutil.Process(process.pid).children(recursive=True) if processes > 1 else []
            for child in (*started, *([process] if started else [])):
                child.kill()
        assert process.returncode == (0 if processes == 1 else -signal.SIGKILL)
    for name, value in weights(one).items():
        torch.testing.assert_close(weights(run)[name], value, rtol=0, atol=1e-12)
    (steps, values), (others, norms) = (Recording(r.folder).load() for r in (one, run))
    assert steps.equal(others)
    torch.testing.assert_close(norms, values, rtol=1e-6, atol=0, equal_nan=True)
    assert one.metrics()[-1]["test_accuracy"] == run.metrics()[-1]["test_accuracy"]
    assert len(list(run.checkpoints.glob("step-*.shards"))) == 2


def test_what_shards_do_not_support_is_refused():
    with pytest.raises(RecipeError, match=r"`train\.compile`"):
        TINY.override({"machine.parallel": "fsdp", "train.compile": True})


@pytest.mark.parametrize(
    ("load", "told", "threads"),
    [(0.2, None, 8), (5.4, None, 3), (30, None, 1), (0, "2", 7), (30, 4, 4)],
)
def test_threads_are_the_free_cores_by_default(monkeypatch, load, told, threads):
    """Seven stay as they are if OMP_NUM_THREADS is set."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.delenv("OMP_NUM_THREADS")
    if isinstance(told, str):
        monkeypatch.setenv("OMP_NUM_THREADS", told)
    before = torch.get_num_threads()
    torch.set_num_threads(7)
    try:
        use_threads(told if isinstance(told, int) else None)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert torch.get_num_interop_threads() == 1


def test_resumed_run_keeps_its_threads(monkeypatch, tmp_path):
    """On which the rounding of sums depends, so that it ends with the same weights."""
    used: list[int | None] = []
    monkeypatch.setattr(training, "use_threads", used.append)
    recipe = TINY.override({"machine.threads": None})
    run = train(recipe, tmp_path / "run")
    run.folder.joinpath("result.json").unlink()
    train(recipe, tmp_path / "run")
    assert used == [None, run.environment()["threads"]]
