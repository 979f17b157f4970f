"""The pool: runs in processes of their own, executed by Dask on this machine or on a cluster.

The jobs are pretended ones with the interface of real ones: they hold the lock of their folder,
save their steps, stop when asked to, and continue from the last step.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from powergrad.lab.runs import JobError, RunFailed
from powergrad.lab.runs.failures import RunsFailed
from powergrad.lab.runs.pool import InlinePool, Pool
from powergrad.lab.runs.worker import MARK
from powergrad.lab.signals import Interrupted, watching_signals
from powergrad.lab.trainer.run_folder import Run

LONG = 120  # seconds; a limit only against hanging


@dataclass(frozen=True)
class Pretended:
    """A run that takes some steps and then does what `end` says."""

    is_foreign: ClassVar[bool] = False
    name: str
    steps: int = 2
    end: str = ""
    wait: float = 0.02

    def execute(self, folder: Path) -> dict[str, Any]:
        run = Run(folder / self.name)
        with run.hold(), watching_signals(second_interrupts=False) as stopped:
            if (result := run.result()) is not None:
                return result
            count = run.folder / "step.txt"
            first = int(count.read_text()) if count.exists() else 0
            with open(run.folder / "starts.txt", "a") as file:
                file.write(f"{os.getpid()} {first}\n")
            for step in range(first, self.steps):
                time.sleep(self.wait)
                if stopped():
                    raise Interrupted("stopped")
                fresh = run.folder / "fresh"
                fresh.write_text(str(step + 1))
                fresh.replace(count)
            self._end(run)
            result = {"value": self.steps, "threads": os.environ["OMP_NUM_THREADS"]}
            with open(run.folder / "ends.txt", "a") as file:
                file.write("end\n")
            (run.folder / "checkpoint").mkdir(exist_ok=True)
            (run.folder / "checkpoint" / "large.json").write_text("not sent")
            (run.folder / "fresh").write_text(json.dumps(result))
            (run.folder / "fresh").replace(run.folder / "result.json")
            return result

    def _end(self, run: Run) -> None:
        if self.end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.end == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        elif self.end == "program":
            program = [sys.executable, "-c", "import time; time.sleep(999)"]
            process = subprocess.Popen(program, start_new_session=True)
            (run.folder / "program.txt").write_text(str(process.pid))
            process.wait()
        elif self.end:
            raise RunFailed(self.end, stops=self.end == "stops")

    def result(self, folder: Path) -> dict[str, Any] | None:
        return Run(folder / self.name).result()

    def progress(self, folder: Path) -> float:
        count = folder / self.name / "step.txt"
        return int(count.read_text()) / self.steps if count.exists() else 0.0


# Processes ----------------------------------------------------------------------------------------


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + LONG
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return value


def processes_of_runs(parent: int | None = None) -> list[psutil.Process]:
    """The processes that execute runs below a process, by default this one."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(parent).children(recursive=True)
        return [child for child in children if "lab.runs.worker" in command_of(child)]
    return []


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Fail if a test leaves processes, and end them."""
    before = {process.pid for process in psutil.process_iter()}
    yield
    mark = f"{MARK}="
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid not in before and MARK in process.environ():
                left.append(command_of(process))
                process.kill()
    assert not left, mark


@contextlib.contextmanager
def started(*command: str | Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is killed with all its children at the end."""
    with subprocess.Popen([sys.executable, *command], **options) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
            process.kill()


def numbers(folder: Path, name: str, file: str = "starts") -> list[int]:
    """The last number of each line of a file of a run: the step at each of its starts."""
    path = folder / name / f"{file}.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [int(line.split()[-1]) for line in lines]


# On this machine ----------------------------------------------------------------------------------


@pytest.mark.studies
def test_runs_are_executed_and_their_results_kept(tmp_path):
    jobs = [Pretended(f"group/run{n}", steps=5) for n in range(4)]
    shown = []
    own = [{"OMP_NUM_THREADS": "3"}, {"OMP_NUM_THREADS": "4"}]
    with Pool(tmp_path, workers=2, known={"known": {"value": 7}}, environments=own) as pool:
        assert pool.longest is None
        results = pool.run([*jobs, Pretended("known")], shown.append)
        listening = [
            place.laddr.ip for place in psutil.Process().net_connections() if not place.raddr
        ]
        assert set(listening) <= {"127.0.0.1"}
        again = pool.run([*jobs, Pretended("later")])
        assert pool.longest >= 5 * jobs[0].wait
    assert {result.get("value") for result in results.values()} == {5, 7}
    assert {results[job.name]["threads"] for job in jobs} == {"3", "4"}
    assert {name: again[name] for name in (job.name for job in jobs)} == {
        job.name: results[job.name] for job in jobs
    }
    assert shown[-1].done == dict.fromkeys(results, 1.0)
    assert shown[-1].results == results
    state = json.loads((tmp_path / "progress.json").read_text())
    assert state["runs"] == dict.fromkeys([*results, "later"], {"state": "done", "done": 1.0})
    assert all(numbers(tmp_path, job.name) == [0] for job in jobs)


@pytest.mark.studies
def test_failures(tmp_path):
    with Pool(tmp_path, workers=2) as pool:
        bad, good = Pretended("bad", end="no metric"), Pretended("good", steps=20)
        with pytest.raises(RunsFailed) as failure:
            pool.run([bad, good])
        assert failure.value.failed == {"bad": "no metric"}
        assert failure.value.results["good"]["value"] == 20
        state = json.loads((tmp_path / "progress.json").read_text())["runs"]["bad"]
        assert (state["state"], state["reason"]) == ("failed", "no metric")
        with pytest.raises(JobError, match="bad: stops"):
            pool.run([Pretended("bad", end="stops"), Pretended("long", steps=1000)])
        assert not (tmp_path / "long" / "result.json").exists()
        with pytest.raises(JobError, match=r"The first 2 of 9 runs .* way, so the study stops: no"):
            pool.run([Pretended(f"bad{n}", end="no") for n in range(9)])
        with pytest.raises(JobError, match="The disk is full"):
            pool.run([Pretended("full", end="full")])
        assert pool.run([Pretended("after")])["after"]["value"] == 2


@pytest.mark.studies
def test_no_run_is_started_that_would_end_after_the_deadline(tmp_path):
    jobs = [Pretended(f"run{n}", steps=50) for n in range(30)]
    with Pool(tmp_path, workers=2, deadline=time.monotonic() + 60, run_seconds=61) as pool:
        assert pool.run(jobs) == {}
    with Pool(tmp_path, workers=2) as pool:

        def close(snapshot):
            if snapshot.results:
                pool.deadline = time.monotonic()

        results = pool.run(jobs, close)
    assert 1 <= len(results) <= 4
    assert sorted(results) == sorted(path.parent.name for path in tmp_path.glob("*/starts.txt"))


@pytest.mark.studies
def test_killed_workers_lose_nothing_and_double_nothing(tmp_path):
    jobs = [Pretended(f"run{n}", steps=20) for n in range(30)]
    killed_at: list[int] = []

    def kill(snapshot):
        count = len(snapshot.results)
        is_busy = any(
            not (path.parent / "ends.txt").exists() for path in tmp_path.glob("*/starts*")
        )
        if is_busy and len(killed_at) < 3 and count > max(killed_at, default=-1):
            random.choice(processes_of_runs()).kill()
            killed_at.append(count)

    with Pool(tmp_path, workers=2) as pool:
        results = pool.run(jobs, kill)
    assert len(killed_at) == 3
    assert sorted(results) == sorted(job.name for job in jobs)
    for job in jobs:
        assert len((tmp_path / job.name / "ends.txt").read_text().split()) == 1
        assert numbers(tmp_path, job.name) == sorted(numbers(tmp_path, job.name))


@pytest.mark.studies
def test_all_workers_killed_at_once(tmp_path):
    killed: list[int] = []

    def kill(snapshot):
        if not killed and min(snapshot.done.values()) > 0.1:
            killed.extend(process.pid for process in processes_of_runs())
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    jobs = [Pretended(f"run{n}", steps=100) for n in range(2)]
    with Pool(tmp_path, workers=2) as pool:
        assert len(pool.run(jobs, kill)) == 2
    assert len(killed) == 2
    for job in jobs:
        first, second = numbers(tmp_path, job.name)
        assert first == 0 < second


@pytest.mark.studies
def test_a_run_that_kills_its_worker_every_time_fails(tmp_path):
    jobs = [Pretended("killer", end="kill"), *(Pretended(f"run{n}") for n in range(6))]
    with Pool(tmp_path, workers=2) as pool, pytest.raises(RunsFailed) as failure:
        pool.run(jobs)
    assert failure.value.failed == {"killer": "its worker was killed every time (ended by SIGKILL)"}
    assert sorted(failure.value.results) == [f"run{n}" for n in range(6)]


@pytest.mark.studies
def test_the_program_of_a_killed_worker_dies_with_it(tmp_path):
    killed: dict[int, int] = {}  # the program of each killed worker

    def kill(snapshot):
        file = tmp_path / "run" / "program.txt"
        program = int(file.read_text() or 0) if file.exists() else 0
        for process in processes_of_runs():
            if (
                program
                and program not in killed
                and program in map(lambda child: child.pid, process.children())
            ):
                killed[program] = process.pid
                process.kill()

    with Pool(tmp_path, workers=1) as pool, pytest.raises(RunsFailed):
        pool.run([Pretended("run", end="program")], kill)
    assert len(killed) > 1
    assert not any(is_alive(program) for program in killed)


@pytest.mark.studies
def test_a_run_of_another_process_is_waited_for(tmp_path):
    waits = []
    with contextlib.ExitStack() as stack, Pool(tmp_path, workers=1) as pool:
        stack.enter_context(Run(tmp_path / "run").hold())

        def release(snapshot):
            waits.append(snapshot)
            if len(waits) == 20:
                assert processes_of_runs()
                stack.close()

        results = pool.run([Pretended("run", steps=1)], release)
    assert results["run"]["value"] == 1
    assert numbers(tmp_path, "run") == [0]


# The client ---------------------------------------------------------------------------------------

CLIENT = """
import sys
from pathlib import Path
from test_pool import Interrupted, Pool, Pretended

folder, address, steps = Path(sys.argv[1]), sys.argv[2] or None, int(sys.argv[3])
with open(folder / "imports.txt", "a") as file:
    file.write("once\\n")
with Pool(folder / "study", workers=2, cluster=address) as pool:  # without a main guard
    try:
        pool.run([Pretended(f"run{n}", steps=steps) for n in range(4)])
    except Interrupted as error:
        sys.exit(str(error))
"""


def client(folder: Path, address: str = "", steps: int = 5000, **options: Any) -> Any:
    """A script that executes four runs, two at a time."""
    script = folder / "script.py"
    script.write_text(CLIENT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = (script, folder, address, str(steps))
    return started(*arguments, env=environment, stderr=subprocess.PIPE, **options)


def running(folder: Path) -> list[int]:
    """The processes of the runs that have begun."""
    texts = [path.read_text() for path in folder.glob("*/starts.txt")]
    return [int(text.split()[-2]) for text in texts if text]


@pytest.mark.studies
@pytest.mark.parametrize("way", ["client", "group", "ignored", "terminate"])
def test_interrupted_runs_are_saved_and_continue(tmp_path, way):
    study = tmp_path / "study"
    ignore = (lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if way == "ignored" else None
    with client(tmp_path, preexec_fn=ignore, start_new_session=True) as process:
        pids = wait_for(lambda: len(found := running(study)) == 2 and found)
        wait_for(lambda: sum(1 for path in study.glob("*/step.txt") if path.read_text() > "0") == 2)
        number = signal.SIGTERM if way == "terminate" else signal.SIGINT
        (os.killpg if way == "group" else os.kill)(process.pid, number)
        _, said = process.communicate(timeout=LONG)
    assert said.decode() == "stopped with 0 of 4 runs finished\n"
    assert not any(is_alive(pid) for pid in pids)
    assert (tmp_path / "imports.txt").read_text() == "once\n"  # the workers do not import it
    names = [path.parent.name for path in study.glob("*/step.txt")]
    reached = {name: int((study / name / "step.txt").read_text()) for name in names}
    assert json.loads((study / "progress.json").read_text())["runs"]["run0"]["state"] == "waiting"
    with client(tmp_path, steps=max(reached.values()) + 1) as process:
        assert process.communicate(timeout=LONG)[1] == b""
    assert {name: numbers(study, name) for name in names} == {
        name: [0, step] for name, step in reached.items()
    }
    assert len(list(study.glob("*/result.json"))) == 4


@pytest.mark.studies
def test_a_killed_client_leaves_nothing_running(tmp_path):
    study = tmp_path / "study"
    with client(tmp_path) as process:
        pids = wait_for(lambda: len(found := running(study)) == 2 and found)
        process.kill()
        wait_for(lambda: not any(is_alive(pid) for pid in pids))
    assert len(running(study)) == 2  # no other run was begun
    assert not list(study.glob("*/result.json"))


# On a cluster -------------------------------------------------------------------------------------


@contextlib.contextmanager
def cluster(folder: Path, workers: int = 2, preload: str = "") -> Iterator[tuple[str, Any]]:
    """A scheduler and workers, started as a user would, each worker with a folder of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    dask = ("-m", "dask")
    with contextlib.ExitStack() as stack:
        port = address.rpartition(":")[2]
        command = (*dask, "scheduler", "--host", "127.0.0.1", "--port", port, "--no-dashboard")
        (folder / "preload.py").write_text("import sys; sys.modules['powergrad'] = None")
        command = (*command, "--preload", folder / "preload.py")  # it needs only Dask
        scheduler = stack.enter_context(started(*command, **quiet))
        for number in range(workers):
            own = folder / f"machine{number}"
            (own / "preload.py").parent.mkdir()
            (own / "preload.py").write_text(preload)
            options = ("--nthreads", "1", "--no-dashboard", "--preload", own / "preload.py")
            command = (*dask, "worker", address, *options, "--local-directory", own / "scratch")
            environment = {**environment, "POWERGRAD_RUNS": str(own / "runs")}
            stack.enter_context(started(*command, env=environment, **quiet))
        yield address, scheduler


@pytest.mark.studies
def test_a_cluster_without_a_shared_folder(tmp_path):
    study, killed = tmp_path / "client" / "study", []

    def kill(snapshot):
        """Kill a Dask worker, which its nanny restarts."""
        if not killed and len(snapshot.results) == 2:
            parents = [psutil.Process(pid).ppid() for pid in running(runs) if is_alive(pid)]
            killed.extend(parents[:1])
            psutil.Process(killed[0]).kill()

    runs = tmp_path / "machine0" / "runs" / "study"
    jobs = [Pretended(f"run{n}", steps=20) for n in range(12)]
    with cluster(tmp_path) as (address, _), Pool(study, workers=1, cluster=address) as pool:
        results = pool.run(jobs, kill)
        assert len(killed) == 1
        wait_for(lambda: len(list(tmp_path.glob("machine*/runs/study"))) == 2)
    assert sorted(results) == sorted(job.name for job in jobs)
    for job in jobs:
        assert job.result(study) == results[job.name]
        (own,) = tmp_path.glob(f"machine*/runs/study/{job.name}/result.json")
        assert (own.parent / "checkpoint" / "large.json").exists()
        assert (study / job.name / "starts.txt").exists()
        assert not (study / job.name / "checkpoint").exists()


@pytest.mark.studies
def test_a_killed_client_stops_the_runs_of_a_cluster(tmp_path):
    with cluster(tmp_path) as (address, _), client(tmp_path, address) as process:
        found = lambda: [
            pid for n in range(2) for pid in running(tmp_path / f"machine{n}/runs/study")
        ]
        pids = wait_for(lambda: len(pids := found()) == 2 and pids)
        process.kill()
        wait_for(lambda: not any(is_alive(pid) for pid in pids))
        assert len(found()) == 2


@pytest.mark.studies
def test_a_scheduler_that_dies_or_cannot_be_reached(tmp_path):
    with cluster(tmp_path, workers=1) as (address, scheduler):

        def kill(snapshot):
            if max(snapshot.done.values()) > 0:
                scheduler.kill()

        jobs = [Pretended("long", steps=5000), Pretended("later")]
        with Pool(tmp_path / "study", workers=1, cluster=address) as pool:
            with pytest.raises(JobError, match=f"{address}.*was lost"):
                pool.run(jobs, kill)
        pids = running(tmp_path / "machine0/runs/study")
        wait_for(lambda: not any(is_alive(pid) for pid in pids))
        with Pool(tmp_path / "study", workers=1, cluster=address) as pool:
            with pytest.raises(JobError, match=f"{address}.*cannot be reached"):
                pool.run(jobs)


@pytest.mark.studies
@pytest.mark.parametrize(
    ("preload", "message"),
    [
        ("import powergrad; powergrad.__version__ = '0.0.1'", "the same version"),
        ("import sys; sys.modules['powergrad'] = None", "has no powergrad"),
    ],
)
def test_a_worker_with_another_powergrad_is_an_error(tmp_path, preload, message):
    with cluster(tmp_path, 1, preload) as (address, _):
        with (
            Pool(tmp_path / "study", cluster=address) as pool,
            pytest.raises(JobError, match=message),
        ):
            pool.run([Pretended("run")])


def test_runs_in_this_process(tmp_path):
    shown = []
    with InlinePool(tmp_path) as pool:
        with pytest.raises(RunsFailed) as failure:
            pool.run([Pretended("bad", end="no metric"), Pretended("good")], shown.append)
        assert failure.value.failed == {"bad": "no metric"}
        assert pool.longest > 0
        with pytest.raises(JobError, match="stops"):
            pool.run([Pretended("worse", end="stops")])
    assert numbers(tmp_path, "good") == [0]
    assert shown[-1].done["good"] == 1
    state = json.loads((tmp_path / "progress.json").read_text())["runs"]
    assert [state[name]["state"] for name in ("bad", "good")] == ["failed", "done"]
