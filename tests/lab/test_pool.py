"""The pool: runs in processes of their own, executed by Dask on this machine or on a cluster."""

import contextlib
import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from studies import LONG, is_alive, wait_for

from powergrad.lab.files import write_text
from powergrad.lab.runs import JobError, RunFailed
from powergrad.lab.runs.pool import Pool, RunsFailed
from powergrad.lab.runs.worker import SCRATCH
from powergrad.lab.signals import Interrupted, watching_signals
from powergrad.lab.trainer.run_folder import Result, Run


@dataclass(frozen=True)
class Pretended:
    """A job that saves every step, continues from the last one, and does at its end as told."""

    name: str
    steps: int = 2
    end: str = ""
    is_foreign: bool = False

    def execute(self, folder: Path) -> Result:
        run = Run(folder / self.name)
        with run.hold(), watching_signals(second_interrupts=False) as stopped:
            if (result := self.result(folder)) is not None:
                return result
            first = round(self.progress(folder) * self.steps)
            with open(run.folder / "starts.txt", "a") as file:
                file.write(f"{os.getpid()} {first}\n")
            for step in range(first, self.steps):
                time.sleep(0.02)
                if stopped():
                    raise Interrupted("stopped")
                write_text(run.folder / "step.txt", str(step + 1))
            self._end()
            about = {"threads": os.environ["OMP_NUM_THREADS"]}
            result = Result(metrics={"value": self.steps}, about=about)
            (run.folder / "checkpoint").mkdir(exist_ok=True)
            write_text(run.folder / "checkpoint" / "last.json", "large")
            run.finish(result)
            with open(run.folder / "ends.txt", "a") as file:
                file.write("end\n")
            return result

    def _end(self) -> None:
        if self.end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.end == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        elif self.end == "program":
            subprocess.run(["sleep", "999"], start_new_session=True)
        elif self.end:
            raise RunFailed(self.end, stops=self.end == "stops")

    def result(self, folder: Path) -> Result | None:
        return Run(folder / self.name).result()

    def progress(self, folder: Path) -> float:
        count = folder / self.name / "step.txt"
        return int(count.read_text()) / self.steps if count.exists() else 0.0


def pretended(name: str, **options: Any) -> Any:
    """A job, as far as a pool can see."""
    return Pretended(name, **options)


def starts(folder: Path) -> dict[str, list[int]]:
    """The step at each start of every run."""
    texts = {file.parent.name: file.read_text() for file in folder.glob("*/starts.txt")}
    return {name: list(map(int, text.split()[1::2])) for name, text in texts.items()}


def executing(*folders: Path) -> list[int]:
    """The processes that have begun runs in some folders of studies."""
    texts = [file.read_text() for folder in folders for file in folder.glob("*/starts.txt")]
    return [int(text.split()[-2]) for text in texts if text]


def workers() -> list[psutil.Process]:
    """The processes of this process that execute runs."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it has ended
            if "lab.runs.worker" in " ".join(child.cmdline()):
                found.append(child)
    return found


@contextlib.contextmanager
def started(*command: str | Path, **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A Python process that is killed with all its children at the end."""
    with subprocess.Popen([sys.executable, *command], **options) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
            process.kill()


@pytest.fixture(autouse=True)
def nothing_left(tmp_path, monkeypatch) -> Iterator[None]:
    """Kill what a test has left running, which is an error."""
    monkeypatch.setenv("STARTED_BY", str(tmp_path))
    yield
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("STARTED_BY") == str(tmp_path):
                process.kill()
                left.append(process)
    assert not left


@pytest.mark.studies
def test_runs_are_executed_and_their_results_kept(tmp_path):
    jobs = [pretended(f"run{n}", steps=5) for n in range(4)]
    own = [{"OMP_NUM_THREADS": "3"}, {"OMP_NUM_THREADS": "4"}]
    shown = []
    with Pool(
        tmp_path, workers=2, known={"known": Result(metrics={"value": 7})}, environments=own
    ) as pool:
        assert pool.longest is None
        results = pool.run([*jobs, pretended("known")], shown.append)
        places = [place.laddr.ip for place in psutil.Process().net_connections()]
        assert set(places) <= {"127.0.0.1"}
        again = pool.run([*jobs, pretended("a/later")])
        assert (pool.longest or 0) > 0.1
    assert [results[name].metrics["value"] for name in sorted(results)] == [7, 5, 5, 5, 5]
    assert {results[job.name].about["threads"] for job in jobs} == {"3", "4"}
    assert all(again[job.name] == results[job.name] for job in jobs)
    assert (shown[-1].results, set(shown[-1].done.values())) == (results, {1.0})
    state = json.loads((tmp_path / "progress.json").read_text())["runs"]
    assert state == {name: {"state": "done", "done": 1.0} for name in [*results, "a/later"]}
    assert starts(tmp_path) == {job.name: [0] for job in jobs}


@pytest.mark.studies
def test_failures(tmp_path, capfd):
    with Pool(tmp_path, workers=2) as pool:
        with pytest.raises(RunsFailed) as failure:
            pool.run([pretended("bad", end="no metric"), pretended("good")])
        assert failure.value.failed == {"bad": "no metric"}
        assert failure.value.results["good"].metrics["value"] == 2
        state = json.loads((tmp_path / "progress.json").read_text())["runs"]["bad"]
        assert (state["state"], state["reason"]) == ("failed", "no metric")
        with pytest.raises(JobError, match="bad: stops"):
            pool.run([pretended("bad", end="stops"), pretended("long", steps=9999)])
        with pytest.raises(JobError, match=r"The first 2 of 9 runs .* so the study stops: no$"):
            pool.run([pretended(f"bad{n}", end="no") for n in range(9)])
        with pytest.raises(JobError, match="The disk is full"):
            pool.run([pretended("full", end="full")])
        assert "Traceback" not in "".join(capfd.readouterr())
        assert pool.run([pretended("after")])["after"].metrics["value"] == 2


@pytest.mark.studies
def test_no_run_is_started_that_would_end_after_the_deadline(tmp_path):
    jobs = [pretended(f"run{n}", steps=50) for n in range(30)]
    with Pool(tmp_path, workers=2, deadline=time.monotonic() + 999, run_seconds=1000) as pool:
        assert pool.run(jobs) == {}
        pool.run_seconds = 0

        def close(snapshot):
            pool.deadline = 0.0 if snapshot.results else math.inf

        pool.deadline = math.inf
        results = pool.run(jobs, close)
    assert 1 <= len(results) <= 4
    assert results.keys() == starts(tmp_path).keys()


@pytest.mark.studies
def test_killed_workers_lose_nothing_and_double_nothing(tmp_path):
    """One of two workers is killed three times, then both at once."""
    killed: list[int] = []
    killed_at = [-1]

    def kill(snapshot):
        begun = [file.parent for file in tmp_path.glob("*/step.txt")]
        runs = [run for run in begun if not (run / "result.json").exists()]
        pids = {int((run / "starts.txt").read_text().split()[-2]) for run in runs} - set(killed)
        if pids and len(killed) < 5 and len(snapshot.results) > killed_at[-1]:
            killed_at.append(len(snapshot.results))
            for pid in [worker.pid for worker in workers()] if len(killed) == 3 else [pids.pop()]:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    with Pool(tmp_path, workers=2) as pool:
        results = pool.run([pretended(f"run{n}", steps=30) for n in range(30)], kill)
    assert len(killed) == 5
    assert results.keys() == starts(tmp_path).keys() == {f"run{n}" for n in range(30)}
    assert all(steps == sorted(steps) for steps in starts(tmp_path).values())
    assert max(max(steps) for steps in starts(tmp_path).values()) > 0  # continued
    assert {file.read_text() for file in tmp_path.glob("*/ends.txt")} == {"end\n"}


@pytest.mark.studies
def test_a_run_whose_worker_is_killed_every_time_fails(tmp_path):
    programs: set[int] = set()

    def kill(snapshot):
        for worker in workers():
            with contextlib.suppress(psutil.Error):
                for program in worker.children():
                    programs.add(program.pid)
                    worker.kill()

    jobs = [pretended("killer", end="kill"), pretended("killed", end="program")]
    with Pool(tmp_path, workers=2) as pool, pytest.raises(RunsFailed) as failure:
        pool.run([*jobs, *(pretended(f"run{n}") for n in range(4))], kill)
    reason = "its worker was killed every time (ended by SIGKILL)"
    assert failure.value.failed == {"killer": reason, "killed": reason}
    assert sorted(failure.value.results) == [f"run{n}" for n in range(4)]
    assert len(programs) >= 4
    assert not any(map(is_alive, programs))


@pytest.mark.studies
def test_a_run_of_another_process_is_waited_for(tmp_path):
    shown = []
    with contextlib.ExitStack() as stack, Pool(tmp_path, workers=1) as pool:
        stack.enter_context(Run(tmp_path / "run").hold())

        def release(snapshot):
            shown.append(snapshot)
            if len(shown) == 15:
                stack.close()

        assert pool.run([pretended("run")], release)["run"].metrics["value"] == 2
    assert starts(tmp_path) == {"run": [0]}


CLIENT = """
import sys
from pathlib import Path
from test_pool import Interrupted, Pool, pretended

folder, steps, address = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] or None
with open(folder / "imports.txt", "a") as file:
    file.write("once ")
with Pool(folder / "study", workers=2, cluster=address) as pool:  # without a main guard
    try:
        pool.run([pretended(f"run{n}", steps=steps) for n in range(4)])
    except Interrupted as error:
        sys.exit(str(error))
"""


def client(folder: Path, steps: int = 9999, address: str = "", **options: Any) -> Any:
    """A script that executes four runs, two at a time."""
    (folder / "script.py").write_text(CLIENT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = (folder / "script.py", folder, str(steps), address)
    return started(*command, env=environment, stderr=subprocess.PIPE, **options)


@pytest.mark.studies
@pytest.mark.parametrize("way", ["client", "group", "ignored", "terminate"])
def test_interrupted_runs_are_saved_and_continue(tmp_path, way):
    study = tmp_path / "study"
    ignore = (lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if way == "ignored" else None
    with client(tmp_path, preexec_fn=ignore, start_new_session=True) as process:
        wait_for(lambda: len(list(study.glob("*/step.txt"))) == 2)
        number = signal.SIGTERM if way == "terminate" else signal.SIGINT
        (os.killpg if way == "group" else os.kill)(process.pid, number)
        assert process.communicate(timeout=LONG)[1] == b"stopped with 0 of 4 runs finished\n"
    assert not any(map(is_alive, executing(study)))
    assert (tmp_path / "imports.txt").read_text() == "once "  # the workers do not import it
    assert json.loads((study / "progress.json").read_text())["runs"]["run0"]["state"] == "waiting"
    if way == "client":
        reached = {file.parent.name: int(file.read_text()) for file in study.glob("*/step.txt")}
        with client(tmp_path, steps=max(reached.values()) + 1) as process:
            assert process.communicate(timeout=LONG)[1] == b""
        assert starts(study) == {f"run{n}": [0] for n in range(4)} | {
            name: [0, step] for name, step in reached.items()
        }


@contextlib.contextmanager
def cluster(folder: Path, count: int = 2, preload: str = "") -> Iterator[tuple[str, Any, Any]]:
    """A scheduler and workers as a user would start them, each worker with its own folder."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    file, scratch = folder / "scheduler.json", folder / "scratch"
    (folder / "no_powergrad.py").write_text("import sys; sys.modules['powergrad'] = None")
    (folder / "preload.py").write_text(preload)
    with contextlib.ExitStack() as stack:
        command = ("-m", "dask", "scheduler", "--host", "127.0.0.1", "--port", "0")
        only_dask = ("--preload", folder / "no_powergrad.py", "--no-dashboard")
        options = (*only_dask, "--scheduler-file", file)
        scheduler = stack.enter_context(started(*command, *options, **quiet))
        wait_for(lambda: file.exists() and file.read_text().rstrip().endswith("}"))
        address = json.loads(file.read_text())["address"]

        def start_worker(number: int) -> None:
            command = ("-m", "dask", "worker", address, "--nthreads", "1", "--no-dashboard")
            options = ("--local-directory", scratch, "--preload", folder / "preload.py")
            own = {**environment, SCRATCH: str(folder / f"machine{number}")}
            stack.enter_context(started(*command, *options, env=own, **quiet))

        for number in range(count):
            start_worker(number)
        yield address, scheduler, start_worker


@pytest.mark.studies
def test_a_cluster_without_a_shared_folder(tmp_path):
    study, killed = tmp_path / "client" / "study", []

    def kill(snapshot):
        """Kill a Dask worker in the middle of a run; its nanny starts another one."""
        busy = [pid for pid in executing(*tmp_path.glob("machine?/study")) if is_alive(pid)]
        if not killed and len(snapshot.results) >= 2 and busy:
            killed.append(psutil.Process(busy[0]).ppid())
            os.kill(killed[0], signal.SIGKILL)

    jobs = [pretended(f"run{n}", steps=20) for n in range(12)]
    with cluster(tmp_path) as (address, *_), Pool(study, cluster=address) as pool:
        results = pool.run(jobs, kill)
    assert len(killed) == 1
    assert results.keys() == starts(study).keys() == {job.name for job in jobs}
    assert all(job.result(study) == results[job.name] for job in jobs)
    assert len(list(tmp_path.glob("machine?/study/*/checkpoint/last.json"))) >= 12
    assert not list(study.glob("*/checkpoint"))


@pytest.mark.studies
def test_a_cluster_without_workers_is_waited_for_with_a_message(tmp_path, capsys):
    with cluster(tmp_path, 0) as (address, _, start_worker):
        said = []

        def start(snapshot):
            said.append(capsys.readouterr().err)
            if f"dask worker {address}" in said[-1]:
                start_worker(0)

        with Pool(tmp_path, cluster=address) as pool:
            assert pool.run([pretended("run")], start)["run"].metrics["value"] == 2
    assert "".join(said).count("has no workers") == 1


@pytest.mark.studies
@pytest.mark.parametrize("where", ["here", "cluster"])
def test_a_killed_client_leaves_nothing_running(tmp_path, where):
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(cluster(tmp_path))[0] if where == "cluster" else ""
        process = stack.enter_context(client(tmp_path, address=address))
        studies = [tmp_path / name / "study" for name in (".", "machine0", "machine1")]
        pids = wait_for(lambda: len(pids := executing(*studies)) == 2 and pids)
        process.kill()
        wait_for(lambda: not any(map(is_alive, pids)))
        assert executing(*studies) == pids  # no other run was begun


@pytest.mark.studies
def test_a_scheduler_that_dies_or_cannot_be_reached(tmp_path):
    jobs = [pretended("long", steps=9999), pretended("later")]
    with cluster(tmp_path, 1) as (address, scheduler, _):

        def kill(snapshot):
            if max(snapshot.done.values()) > 0:
                scheduler.kill()

        for message in ("was lost", "cannot be reached"):
            wanted = pytest.raises(JobError, match=f"{address}.* {message}")
            with Pool(tmp_path, cluster=address) as pool, wanted:
                pool.run(jobs, kill)
        pids = executing(tmp_path / "machine0" / tmp_path.name)
        wait_for(lambda: pids and not any(map(is_alive, pids)))


@pytest.mark.studies
@pytest.mark.parametrize(
    ("preload", "message"),
    [
        ("import powergrad; powergrad.__version__ = '0.0.1'", "powergrad 0.0.1 instead of"),
        ("import sys; sys.modules['powergrad'] = None", "has no powergrad"),
    ],
)
def test_a_worker_with_another_powergrad_is_an_error(tmp_path, preload, message):
    with (
        cluster(tmp_path, 1, preload) as (address, *_),
        Pool(tmp_path, cluster=address) as pool,
        pytest.raises(JobError, match=message),
    ):
        pool.run([pretended("run")])
