"""The execution of a run by a Dask worker, in a process that is kept for the next run.

Dask executes tasks in threads of a process that must answer its scheduler. A run does not belong
there: it handles signals (main thread only), starts processes (not allowed in Dask's daemonic
workers), locks its folder (per process), may hold Python's lock for minutes, and may crash. So the
task only watches a process that executes the run. That process stops its run, saved, when their
connection is closed: because the run was cancelled, or because the worker was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from uuid import uuid4

import powergrad
from powergrad.lab.files import is_disk_full
from powergrad.lab.runs.jobs import Job, RunFailed
from powergrad.lab.runs.process import describe_exit, end_leftovers
from powergrad.lab.signals import Interrupted
from powergrad.lab.trainer.run_folder import RunBusyError

ATTEMPTS = 4  # of a run whose process is killed every time without progress in between
PATIENCE = 60  # seconds from the request to stop until a process is killed
IDLE = 60  # after this many seconds without a run, a process ends
PROGRESS = "progress.json"  # in the folder of the study
SCRATCH = "POWERGRAD_RUNS"  # the variable with a worker's own folder for runs
MARK = "POWERGRAD_WORKER"  # the variable with a unique value in all processes of a run

SENT = {".yaml", ".json", ".csv", ".txt", ".bin"}  # what comes back from other machines
NOT_SENT = {"out", "checkpoint"}
MOST_SENT = 8 << 20  # bytes per run


@dataclass(frozen=True)
class Call:
    """A call of :func:`perform`, made by ``pickle.loads``: so only workers need powergrad."""

    job: Job
    pool: str
    folder: Path
    environments: tuple[Mapping[str, str], ...] = ()
    version: str = field(default_factory=lambda: powergrad.__version__)
    paths: list[str] = field(default_factory=lambda: list(sys.path))
    directory: Path = field(default_factory=Path.cwd)

    def __reduce__(self) -> Any:
        return _perform, (vars(self),)


@dataclass
class Outcome:
    """How a run ended: with a result, or with the reason why it failed."""

    result: Any = None
    reason: str = ""
    stops: bool = False  # whether all other runs would fail, too
    is_disk_full: bool = False
    seconds: float = 0.0
    files: dict[str, bytes] = field(default_factory=dict)  # if the client does not see them


def progress_of(job: Job, folder: Path) -> float:
    """The finished fraction of a run; 0 while its files cannot be read."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        return job.progress(folder)
    return 0.0


# In the process of the Dask worker ----------------------------------------------------------------

_processes: dict[tuple[str, str, int], _Process] = {}  # by pool, worker and thread


def _perform(values: dict[str, Any]) -> Outcome | None:
    """Execute a run and report its progress, as a task of Dask; None if it was stopped."""
    from distributed import get_worker

    call, worker = Call(**values), get_worker()
    if call.version != powergrad.__version__:
        versions = f"powergrad {powergrad.__version__} instead of {call.version}"
        reason = f"the worker {worker.address} has {versions}; install the same version there"
        return Outcome(reason=reason, stops=True)
    job, key = call.job, worker.get_current_task()
    folder = _local_folder(call, Path(worker.local_directory).parent)
    place = (call.pool, worker.id, threading.get_ident())

    def is_cancelled() -> bool:
        state = getattr(worker.state.tasks.get(key), "state", None)
        return state != "executing" or worker.status.name.startswith("clos")

    deaths, reached, code = 0, progress_of(job, folder), 0
    worker.log_event(call.pool, [job.name, reached])
    try:
        while deaths < ATTEMPTS:
            process = _processes.get(place)
            if process is None or not process.is_alive():
                process = _processes[place] = _Process(call, worker.name)
            process.send(call, folder)
            while not process.connection.poll(0.5) and process.is_alive():
                if is_cancelled():
                    _processes.pop(place).close()
                    return None
                done = progress_of(job, folder)
                worker.log_event(call.pool, [job.name, done])
                if done > reached:
                    deaths, reached = 0, done
            outcome = process.receive()
            if outcome is not None:
                outcome.files = {} if folder == call.folder else _small_files(folder / job.name)
                return outcome
            deaths, code = deaths + 1, _processes.pop(place).close()
        return Outcome(reason=f"its worker was killed every time ({describe_exit(code)})")
    finally:
        worker.log_event(call.pool, [job.name, None])


def _local_folder(call: Call, scratch: Path) -> Path:
    """The client's folder, or one of this machine if the client's cannot be seen here."""
    own = os.environ.get(SCRATCH)
    if own is None:
        with contextlib.suppress(OSError, ValueError):
            if json.loads((call.folder / PROGRESS).read_text())["pool"] == call.pool:
                return call.folder
    return Path(own or scratch / "powergrad").absolute() / call.folder.name


def _small_files(folder: Path) -> dict[str, bytes]:
    """The small files of a run by relative path, the smallest first, up to a limit."""
    paths = sorted((path.stat().st_size, path) for path in folder.rglob("*") if path.is_file())
    files, left = {}, MOST_SENT
    for size, path in paths:
        name = path.relative_to(folder)
        if path.suffix in SENT and name.parts[0] not in NOT_SENT and size <= left:
            left -= size
            files[name.as_posix()] = path.read_bytes()
    return files


def dismiss(pool: str) -> None:
    """End the processes of a pool in this worker."""
    for place in [place for place in _processes if place[0] == pool]:
        _processes.pop(place).close()


class _Process:
    """A process that executes one run after another."""

    def __init__(self, call: Call, place: Any) -> None:
        self.mark = uuid4().hex
        own = call.environments[place % len(call.environments)] if call.environments else {}
        self.connection, other = Pipe()
        with other:
            # In a session of its own, so that Ctrl-C reaches only the client.
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import serve; serve({other.fileno()})"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                start_new_session=True,
                env={"OMP_NUM_THREADS": "1", **os.environ, **own, MARK: self.mark},
                cwd=call.directory if call.directory.is_dir() else None,
            )

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def send(self, call: Call, folder: Path) -> None:
        with contextlib.suppress(OSError):  # it was killed: there will be no answer
            self.connection.send((call.paths, pickle.dumps(call.job), folder))

    def receive(self) -> Outcome | None:
        """The answer; None if the process was killed, or the run was stopped."""
        with contextlib.suppress(EOFError, OSError):
            return self.connection.recv() if self.connection.poll() else None
        return None

    def close(self) -> int:
        """Stop the run, end the process and all that it has started; return its exit code."""
        self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE)
        end_leftovers(MARK, self.mark)
        self.process.kill()
        return self.process.wait()


# In the process of the runs -----------------------------------------------------------------------


def serve(handle: int) -> None:
    """Execute the runs that are sent through a connection, in the main thread."""
    warnings.filterwarnings("ignore", "Skipped ")  # the report names such images
    connection: Connection = Connection(handle)
    received: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, received), daemon=True).start()
    with contextlib.suppress(queue.Empty, OSError):
        while (request := received.get(timeout=IDLE)) is not None:
            paths, job, folder = request
            sys.path.extend(path for path in paths if path not in sys.path)
            connection.send(_execute(job, folder))


def _receive(connection: Connection, received: queue.SimpleQueue[Any]) -> None:
    """Pass requests on; at their end, ask the run of this process to stop."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            received.put(connection.recv())
    received.put(None)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PATIENCE)  # the process usually ends meanwhile
    os._exit(1)


def _execute(pickled: bytes, folder: Path) -> Outcome | None:
    """Execute a run; None if it was stopped."""
    try:
        job = pickle.loads(pickled)
        while True:
            began = time.monotonic()
            try:
                result = job.execute(folder)
                return Outcome(result, seconds=time.monotonic() - began)
            except RunBusyError:  # another process executes it: wait, then return its result
                time.sleep(1)
    except Interrupted:
        return None
    except RunFailed as error:
        return Outcome(reason=str(error), stops=error.stops)
    except Exception as error:
        return Outcome(None, f"{type(error).__name__}: {error}", is_disk_full=is_disk_full(error))
