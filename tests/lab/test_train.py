import dataclasses
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import powergrad
import powergrad_cli
from powergrad.lab.data import load_data
from powergrad.lab.signals import Interrupted
from powergrad.lab.trainer.processes import Processes
from powergrad.lab.trainer.progress import Bar, Lines, Progress
from powergrad.lab.trainer.recipe import Recipe
from powergrad.lab.trainer.run_folder import Run, RunError
from powergrad.lab.trainer.session import Session, right_answers, score
from powergrad.lab.trainer.training import train

SMALL = Recipe().override(
    {
        "data.limit": 128,
        "model.width": 4,
        "model.norm": "none",
        "train.batch_size": 32,
        "train.epochs": 3,
        "schedule.warmup_epochs": 1,
        "optimizer.lr": 0.05,
        "loss.alpha": 0.5,
        "machine.threads": 1,
    }
)
# A process that begins at once, without importing anything; Python 3.12 and later warn of forks
# beside threads.
FORK = multiprocessing.get_context("fork")
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")

ALONE = Processes(0, 1, torch.device("cpu"))
DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"


def result_of(run):
    result = run.result()
    assert result is not None
    return result


def weights(folder):
    return load_file(folder / "model.safetensors")


def assert_same_run(a, b):
    """Every file that the training decides is the same, bit for bit."""
    for name in ("model.safetensors", "test.safetensors"):
        assert (a / name).read_bytes() == (b / name).read_bytes(), name
    timing = ("seconds", "images_per_second")
    rows = [
        [{k: v for k, v in row.items() if k not in timing} for row in Run(f).metrics()]
        for f in (a, b)
    ]
    assert rows[0] == rows[1]
    if (a / "norms").exists():
        assert (a / "norms/records.bin").read_bytes() == (b / "norms/records.bin").read_bytes()


def test_a_run_leaves_what_it_should(tmp_path):
    recipe = SMALL.override({"monitor.every": 2, "machine.tensorboard": True})
    run = train(recipe, tmp_path)
    assert run.recipe() == recipe
    rows = run.metrics()
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert [row["step"] for row in rows] == [4, 8, 12]
    result = result_of(run)
    assert result["test_accuracy"] == rows[-1]["test_accuracy"]
    outputs = run.test_outputs()
    assert outputs is not None
    assert outputs["logits"].shape == (len(load_data(recipe.data).test), 10)
    right = (outputs["logits"].argmax(1) == outputs["labels"]).double().mean()
    assert result["test_accuracy"] == pytest.approx(100 * right.item())
    plain = F.cross_entropy(outputs["logits"], outputs["labels"]).item()
    assert result["nll"] == pytest.approx(plain, rel=1e-6)
    scaled = F.cross_entropy(0.5 * outputs["logits"], outputs["labels"]).item()
    assert result["nll_scaled"] == pytest.approx(scaled, rel=1e-6)
    census = powergrad.census(tmp_path)
    assert census.steps == (0, 12)
    assert list((tmp_path / "tensorboard").iterdir())
    assert (tmp_path / "checkpoint/best.safetensors").exists()


def test_the_loop_is_the_plain_loop(tmp_path):
    """The weights of a run are those of a loop written out, with the paper's equation."""
    recipe = SMALL.override({"clip.norm": 0.5})
    run = train(recipe, tmp_path)

    data = load_data(recipe.data)
    session = Session(recipe, data, ALONE)  # for its initial weights only
    model = session.model
    optimizer = torch.optim.SGD(
        model.parameters(), lr=1.0, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    step = 0
    model.train()
    for epoch in range(3):
        for images, labels in data.train.train_batches(32, seed=0, epoch=epoch):
            at = step / 4
            if at < 1:
                lr = 4e-4 + (0.05 - 4e-4) * at
            else:
                lr = 0.05 * 0.5 * (1 + math.cos(math.pi * (at - 1) / 2))
            for group in optimizer.param_groups:
                group["lr"] = lr
            logits = model(images)
            p = logits.detach().softmax(1) ** 0.5
            gradient = (p / p.sum(1, keepdim=True) - F.one_hot(labels, 10)) / 32
            optimizer.zero_grad()
            logits.backward(gradient)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            step += 1
    for name, value in weights(run.folder).items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-4, atol=1e-6)


OPTIONS = {
    "adamw": {"optimizer.name": "adamw", "optimizer.lr": 1e-3, "optimizer.decay_all": False},
    "adam, two groups": {
        "optimizer.name": "adam",
        "optimizer.lr": 1e-3,
        "optimizer.head.lr": 0.5,
        "optimizer.head.eps": 2.0,
        "model.head_scale": 0.5,
    },
    "agc, average, accumulation": {"clip.agc": 0.01, "train.ema": 0.9, "train.accumulate": 2},
    "batch norm, bfloat16": {"model.norm": "batch", "train.precision": "bfloat16"},
    "float16, clipped": {"train.precision": "float16", "clip.value": 0.1},
    "mixup, smoothing of the paper": {
        "data.mixup": 0.2,
        "loss.label_smoothing": 0.1,
        "loss.smoothing": "paper",
        "loss.alpha_schedule": "cosine",
    },
    "cutmix, crops, channels last": {
        "data.cutmix": 1.0,
        "data.crop_padding": 1,
        "data.flip": True,
        "train.channels_last": True,
        "schedule.name": "step",
        "schedule.milestones": [2],
    },
    "records": {"monitor.every": 3, "monitor.gradients": True, "monitor.features": True},
}


class StopAt(Progress):
    """Sends the signal that a person's Ctrl-C sends, after a step."""

    def __init__(self, at, number=signal.SIGINT):
        self.at, self.number = at, number

    def step(self, step, loss, lr):
        if step == self.at:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_stopped_and_resumed_is_not_stopped_at_all(tmp_path, options):
    recipe = SMALL.override(options)
    train(recipe, tmp_path / "whole")
    for at, number in ((2, signal.SIGINT), (8, signal.SIGTERM), (9, signal.SIGINT)):
        with pytest.raises(Interrupted, match=f"stopped at step {at} of 12"):
            train(recipe, tmp_path / "parts", progress=StopAt(at, number))
        assert Run(tmp_path / "parts").result() is None
    train(recipe, tmp_path / "parts")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_dropout_is_a_function_of_seed_and_step(tmp_path, monkeypatch):
    def with_dropout(name, *, num_classes, in_channels, **_):
        return torch.nn.Sequential(
            torch.nn.Flatten(),
            torch.nn.Dropout(0.5),
            torch.nn.Linear(64 * in_channels, num_classes),
        )

    monkeypatch.setattr("powergrad.lab.trainer.session.create_model", with_dropout)
    train(SMALL, tmp_path / "whole")
    with pytest.raises(Interrupted):
        train(SMALL, tmp_path / "parts", progress=StopAt(7))
    torch.rand(5)  # whatever else a process does with the generator
    train(SMALL, tmp_path / "parts")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_network_of_timm(tmp_path):
    from torchvision_shim import declare_torchvision_schemas

    declare_torchvision_schemas()
    recipe = SMALL.override({"model.name": "timm:resnet10t", "model.norm": "batch",
                             "model.width": None, "data.size": 32, "train.epochs": 1,
                             "schedule.warmup_epochs": 0})  # fmt: skip
    run = train(recipe, tmp_path)
    assert weights(run.folder)["fc.weight"].shape[0] == 10


def test_the_same_seed_gives_the_same_weights_and_another_does_not(tmp_path):
    train(SMALL, tmp_path / "a")
    train(SMALL, tmp_path / "b")
    assert_same_run(tmp_path / "a", tmp_path / "b")
    train(SMALL.override({"seed": 1}), tmp_path / "c")
    assert not torch.equal(
        weights(tmp_path / "a")["fc.weight"], weights(tmp_path / "c")["fc.weight"]
    )


def test_a_finished_run_is_returned(tmp_path):
    train(SMALL, tmp_path)
    before = (tmp_path / "model.safetensors").stat().st_mtime_ns

    class NotCalled(Progress):
        def begin(self, recipe, step, steps, folder):
            raise AssertionError("trained again")

    assert result_of(train(SMALL, tmp_path, progress=NotCalled()))["steps"] == 12
    assert (tmp_path / "model.safetensors").stat().st_mtime_ns == before


def test_a_run_killed_after_its_last_checkpoint_finishes(tmp_path):
    train(SMALL, tmp_path / "a")
    train(SMALL, tmp_path / "b")
    for name in ("result.json", "model.safetensors", "test.safetensors"):
        (tmp_path / "b" / name).unlink()
    train(SMALL, tmp_path / "b")
    assert_same_run(tmp_path / "a", tmp_path / "b")
    a, b = result_of(Run(tmp_path / "a")), result_of(Run(tmp_path / "b"))
    assert a["test_accuracy"] == b["test_accuracy"]
    assert a["dead_units"] == b["dead_units"]


def test_two_group_training_is_pgt(tmp_path):
    """The identity, through recipes: PGT, and plain cross-entropy with two groups."""
    alpha = 0.25
    base = SMALL.override({"optimizer.weight_decay": 0.01, "train.epochs": 4})
    pgt = train(base.override({"loss.alpha": alpha}), tmp_path / "pgt")
    plain = base.override(
        {
            "loss.alpha": 1.0,
            "model.head_scale": alpha,
            "optimizer.backbone": {"lr": 1 / alpha, "weight_decay": alpha},
            "optimizer.head": {"lr": alpha, "weight_decay": 1 / alpha},
        }
    )
    equal = train(plain, tmp_path / "equal")
    a, b = weights(pgt.folder), weights(equal.folder)
    for name in a:
        factor = alpha if name.startswith("fc.") else 1.0
        torch.testing.assert_close(b[name], factor * a[name], rtol=2e-3, atol=1e-4)


def test_a_run_that_diverges_says_so_and_ends(tmp_path):
    recipe = SMALL.override({"optimizer.lr": 1e6, "schedule.warmup_epochs": 0, "loss.alpha": 1})
    run = train(recipe, tmp_path)
    result = result_of(run)
    assert result["diverged"]
    assert result["steps"] < 12 or math.isnan(result["nll"])
    assert math.isnan(run.metrics()[-1]["train_loss"] or 0)


def test_nan_is_no_answer_and_a_tie_is_one():
    logits = torch.full((4, 7), math.nan)
    logits[1:] = 0.0
    labels = torch.tensor([0, 0, 6, 3])
    right = right_answers(logits, labels)
    assert right.tolist() == [False, *(logits[1:].argmax(1) == labels[1:]).tolist()]
    scores = score(logits, labels, alpha=0.5)
    assert scores["test_accuracy"] == 100 * right.double().mean().item()
    assert scores["test_top5"] in (25.0, 50.0, 75.0)  # never the row of NaN


def test_scores_against_torchmetrics():
    from torchvision_shim import declare_torchvision_schemas

    declare_torchvision_schemas()
    from torchmetrics.functional.classification import (
        multiclass_accuracy,
        multiclass_calibration_error,
    )

    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(500, 12, generator=generator)
    labels = torch.randint(0, 12, (500,), generator=generator)
    labels[:250] = logits[:250].argmax(1)
    scores = score(logits, labels, alpha=0.3)
    for k, name in ((1, "test_accuracy"), (5, "test_top5")):
        wanted = multiclass_accuracy(logits, labels, 12, average="micro", top_k=k)
        assert scores[name] == pytest.approx(100 * wanted.item(), rel=1e-6)
    for factor, suffix in ((1.0, ""), (0.3, "_scaled")):
        p = (factor * logits).softmax(1)
        wanted = multiclass_calibration_error(p, labels, 12, n_bins=15, norm="l1")
        assert scores["ece" + suffix] == pytest.approx(wanted.item(), abs=1e-6)
        wanted = F.cross_entropy(factor * logits, labels)
        assert scores["nll" + suffix] == pytest.approx(wanted.item(), rel=1e-6)


def test_a_batch_that_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`batch_size` to be at most the 128"):
        train(SMALL.override({"train.batch_size": 512}), tmp_path)
    with pytest.raises(ValueError, match=r"divisible by 3, the number of processes times"):
        Session(SMALL, load_data(SMALL.data), dataclasses.replace(ALONE, world=3))


def test_a_device_that_is_not_here(tmp_path):
    with pytest.raises(ValueError, match=r"`machine.device` to be an available device, .* 'warp'"):
        train(SMALL.override({"machine.device": "warp"}), tmp_path)


def test_progress_in_lines(tmp_path, capsys):
    train(SMALL, tmp_path, progress=Lines(every=0.0))
    text = capsys.readouterr().err
    assert "resnet8 on digits, alpha 0.5, seed 0; steps: 12" in text
    assert "images/s" in text
    assert "left" in text
    assert "finished: epoch 3, train" in text


def test_progress_as_a_bar(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the output for a terminal
    monkeypatch.setattr(Bar, "every", 0.0)
    train(SMALL, tmp_path, progress=Bar())
    text = capsys.readouterr().err
    assert "resnet8 on digits, alpha 0.5, seed 0" in text
    assert "finished: epoch 3, train" in text


# Processes that are killed ------------------------------------------------------------------------


def command(folder, recipe, *options):
    file = folder.parent / f"{folder.name}.yaml"
    file.write_text(recipe.to_yaml())
    return ["-m", "powergrad", "train", str(file), "--folder", str(folder), *options]


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def start(arguments):
    return subprocess.Popen(
        [sys.executable, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_killed_at_random_moments_and_resumed(tmp_path):
    """SIGKILL while it computes or writes a checkpoint, which here it does at every step."""
    kills, epochs = (20, 40) if DEEP else (3, 16)
    recipe = SMALL.override({"train.epochs": epochs, "machine.checkpoint_steps": 1,
                             "train.test_every": 8, "monitor.every": 5})  # fmt: skip
    train(recipe, tmp_path / "whole")
    run = Run(tmp_path / "parts")
    rng = random.Random(20)
    last = -1
    for _ in range(kills):
        process = FORK.Process(target=train, args=(recipe, run.folder))
        process.start()
        wait_until(lambda: (run.folder / "metrics.csv").exists())  # it has begun
        time.sleep(rng.uniform(0, 0.35))
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        saved = run.load_checkpoint()  # always readable, never behind
        if saved is not None:
            assert saved["step"] >= last
            last = saved["step"]
    assert last > 0
    train(recipe, run.folder)
    assert_same_run(tmp_path / "whole", run.folder)


def hold(folder, held, done):
    with Run(folder).open(SMALL):
        held.set()
        done.wait(60)


def test_a_folder_in_use_is_refused_by_the_command(tmp_path, capsys):
    held, done = FORK.Event(), FORK.Event()
    process = FORK.Process(target=hold, args=(tmp_path / "run", held, done))
    process.start()
    assert held.wait(60)
    _, _, *arguments = command(tmp_path / "run", SMALL)
    assert powergrad_cli.main(arguments) == 2
    text = capsys.readouterr().err
    assert "another process is using" in text
    assert "Traceback" not in text
    done.set()
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.studies
def test_two_processes_are_one(tmp_path, monkeypatch):
    """Float32, without batch normalisation, the same global batch: 20 steps."""
    recipe = SMALL.override({"train.epochs": 5, "data.mixup": 0.2, "train.accumulate": 2})
    train(recipe, tmp_path / "one")
    _, _, *arguments = command(tmp_path / "two", recipe, "--processes", "2")
    monkeypatch.setattr(sys, "argv", ["powergrad", *arguments])
    assert powergrad_cli.main(arguments) == 0
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=0, atol=1e-5)
    a, b = Run(tmp_path / "one").metrics(), Run(tmp_path / "two").metrics()
    assert [r["train_accuracy"] for r in a] == pytest.approx([r["train_accuracy"] for r in b])
    assert [r["nll"] for r in a] == pytest.approx([r["nll"] for r in b], abs=1e-4)


def children(pid):
    command = ["ps", "-o", "pid=", "--ppid", str(pid)]
    listed = subprocess.run(command, capture_output=True, text=True)
    return [int(child) for child in listed.stdout.split()]


@pytest.mark.skipif(not DEEP, reason="gloo reconnects slowly: make test-deep runs it")
def test_a_killed_worker_starts_again_from_the_last_checkpoint(tmp_path):
    recipe = SMALL.override({"train.epochs": 60, "machine.checkpoint_steps": 5})
    whole = start(command(tmp_path / "whole", recipe, "--processes", "2"))
    _, errors = whole.communicate(timeout=240)
    assert whole.returncode == 0, errors
    arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
                 "--max-restarts=5", *command(tmp_path / "two", recipe)]  # fmt: skip
    process = start(arguments)
    try:
        run = Run(tmp_path / "two")
        wait_until(lambda: list(run.checkpoints.glob("step-*.pt")), seconds=200)
        victims = children(process.pid)
        assert len(victims) == 2
        os.kill(victims[1], signal.SIGKILL)
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
    finally:
        for pid in children(process.pid):  # in sessions of their own
            os.kill(pid, signal.SIGKILL)
        process.kill()
        process.communicate()
    assert run.environment()["resumed"]
    for name in ("model.safetensors", "test.safetensors"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    losses = [[row["train_loss"] for row in Run(tmp_path / n).metrics()] for n in ("whole", "two")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)  # a sum of halves of a sum


def test_a_poisoned_checkpoint_is_refused_by_the_command(tmp_path):
    class Malicious:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "pwned"),)

    run = Run(tmp_path / "run")
    with run.open(SMALL):
        torch.save({"format": 1, "step": 4, "x": Malicious()}, run.checkpoints / "step-04.pt")
    with pytest.raises(RunError, match="only tensors and numbers, but got"):
        train(SMALL, tmp_path / "run")
    assert not (tmp_path / "pwned").exists()
