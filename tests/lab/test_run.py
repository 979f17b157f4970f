import multiprocessing
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
from powergrad.lab.trainer.run_folder import COLUMNS, Run, RunBusyError, RunError, open_run

# Python 3.12 and later warn of forks beside threads.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")

STATE = {"step": 5, "model": {"weight": torch.arange(6.0)}}


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path / "run")
    with run.open(Recipe()):
        yield run


def test_a_new_run_has_its_recipe_and_environment(run):
    assert open_run(run.folder).recipe() == Recipe()
    environment = run.environment()
    assert environment["torch"] == torch.__version__
    assert environment["seed"] == 0
    assert {"python", "powergrad", "processor", "threads", "command", "time"} <= environment.keys()


def test_every_resumption_is_recorded(tmp_path):
    for _ in range(3):
        with Run(tmp_path).open(Recipe()):
            pass
    assert len(Run(tmp_path).environment()["resumed"]) == 2


def test_the_folder_of_another_recipe_is_refused(tmp_path):
    with Run(tmp_path).open(Recipe()):
        pass
    with (
        pytest.raises(RunError, match=r"differs in loss.alpha \(1.0 there, 0.3 here\)"),
        Run(tmp_path).open(Recipe().override({"loss.alpha": 0.3})),
    ):
        pass
    assert Run(tmp_path).recipe() == Recipe()


def open_and_report(folder, report):
    try:
        with Run(folder).open(Recipe()):
            report.send("opened")
    except RunBusyError as error:
        report.send(str(error))


def test_a_second_process_is_refused(run):
    fork = multiprocessing.get_context("fork")  # which does not inherit locks
    receiver, sender = fork.Pipe()
    process = fork.Process(target=open_and_report, args=(run.folder, sender))
    process.start()
    process.join(60)
    assert "another process is using" in receiver.recv()


def test_the_last_checkpoint_is_loaded_and_two_are_kept(run):
    for step in (5, 10, 15):
        run.save_checkpoint({**STATE, "step": step}, step=step)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [
        "step-0000000010.pt",
        "step-0000000015.pt",
    ]
    state = run.load_checkpoint()
    assert state["step"] == 15
    assert torch.equal(state["model"]["weight"], torch.arange(6.0))


def test_no_checkpoint_is_none(run):
    assert run.load_checkpoint() is None


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def empty(path):
    path.write_bytes(b"")


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


def poison(path):
    torch.save({**STATE, "format": 1, "evil": Malicious(path.parent / "pwned")}, path)


def poison_old_style(path):
    path.write_bytes(pickle.dumps(Malicious(path.parent / "pwned")))


def take_another_runs(path):
    torch.save({"format": 1, "key": "0123456789ab", "step": 10}, path)


def write_something_else(path):
    torch.save(torch.zeros(3), path)


def come_from_the_future(path):
    torch.save({"format": 99, "key": Recipe().key, "step": 10}, path)


HARMS = [
    (cut, "to be a checkpoint"),
    (empty, "to be a checkpoint"),
    (flip_a_bit, "damaged data"),
    (poison, "only tensors and numbers, but got"),
    (poison_old_style, "to be a checkpoint"),
    (take_another_runs, "but got one of run 0123456789ab"),
    (write_something_else, "but got another file"),
    (come_from_the_future, "a newer version of powergrad can read it"),
]


@pytest.mark.parametrize(("harm", "message"), HARMS)
def test_the_last_good_checkpoint_is_used(run, harm, message):
    run.save_checkpoint(STATE, step=5)
    run.save_checkpoint({**STATE, "step": 10}, step=10)
    harm(run.checkpoints / "step-0000000010.pt")
    with pytest.warns(UserWarning, match=message):
        state = run.load_checkpoint()
    assert state["step"] == 5
    assert not (run.checkpoints / "pwned").exists()


@pytest.mark.parametrize(("harm", "message"), HARMS)
def test_without_a_good_checkpoint_nothing_starts_over(run, harm, message):
    run.save_checkpoint(STATE, step=5)
    harm(run.checkpoints / "step-0000000005.pt")
    with pytest.raises(RunError, match=message):
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


def test_a_full_disk_keeps_the_last_good_checkpoint(run, full_disk):
    run.save_checkpoint(STATE, step=5)
    with pytest.raises(FileError, match=r"but the disk is full; existing files are intact"):
        run.save_checkpoint({"step": 10, "model": torch.zeros(100_000)}, step=10)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-0000000005.pt"]
    assert run.load_checkpoint()["step"] == 5


def test_a_folder_that_may_not_be_written(tmp_path, monkeypatch):
    # Root may write everywhere, so the system's answer is given by hand.
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    with (
        pytest.raises(RunError, match=r"permission to write .* but got: Permission denied"),
        Run(tmp_path / "x").open(Recipe()),
    ):
        pass


def test_temporary_files_of_a_killed_process_are_removed(tmp_path):
    with Run(tmp_path).open(Recipe()) as run:
        (run.checkpoints / ".step-5.pt.1.tmp").write_text("half")
    with run.open(Recipe()):
        assert list(run.checkpoints.iterdir()) == []


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
    assert rows[1]["lr"] == 0.1 / 2
    assert rows[1]["nll"] is None
    assert tuple(rows[0]) == COLUMNS


def test_a_run_is_finished_when_it_has_a_result(run):
    assert run.result() is None
    run.finish({"test_accuracy": 98.0})
    assert run.result() == {"format": 1, "test_accuracy": 98.0}
    run.finish({"nll": float("nan")})
    assert (run.folder / "result.json").read_text() == '{\n "format": 1,\n "nll": NaN\n}\n'


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(RunError, match=r"to be the folder of a run, but got no config.yaml"):
        open_run(tmp_path)


@pytest.mark.parametrize("program", ["/somewhere/bin/powergrad", "/lib/powergrad/__main__.py"])
def test_the_command_can_be_given_again(monkeypatch, program):
    monkeypatch.setattr(sys, "argv", [program, "compare", "--arm", "fast: lr=0.2"])
    assert describe_machine()["command"] == "powergrad compare --arm 'fast: lr=0.2'"
