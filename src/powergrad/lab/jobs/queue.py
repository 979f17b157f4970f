"""Many runs at once: over the cores of a machine, or over several machines.

The wanted runs are trials in a storage of Optuna (SQLite in the study's folder, or any database by
its URL). Workers take one after another; each shows by a heartbeat that it is alive. The run of a
worker that was killed is taken up by another, from its last checkpoint. Only one process can open a
run's folder, and a finished run is returned as it is, so no run is done twice.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powergrad.lab.jobs.failures import (
    DISK_FULL,
    describe_failures,
    disk_full_error,
    is_disk_full,
    same_failure,
)
from powergrad.lab.jobs.job import Job, JobError
from powergrad.lab.run import RunError
from powergrad.lab.signals import Interrupted, watching_signals

__all__ = ["JobQueue", "Snapshot", "enqueue", "local_storage", "open_queue"]

HEARTBEAT = 2  # seconds
GRACE = 12  # seconds without a heartbeat after which a worker is taken for dead
RETRIES = 20  # of one run: a run that kills its worker every time must end some time
ALIVE = ("WAITING", "RUNNING")
DEATHS = 20  # of workers, with no run finished in between


@dataclass(frozen=True)
class Snapshot:
    """How far the runs are.

    Attributes:
        done: The fraction of each run that is done, by name.
        results: The final metrics of those that are finished.
        seconds: How long it has taken since it was started this time.
        left: The estimated seconds that are left; None while there is no estimate.
    """

    done: Mapping[str, float]
    results: Mapping[str, Mapping[str, Any]]
    seconds: float
    left: float | None


class JobQueue:
    """Does runs on this machine, in several batches if asked to, with the same workers.

    Args:
        folder: The study's folder, which holds the folder of each run.
        study: The name of the study in the storage.
        workers: How many runs at a time on this machine.
        storage: The URL of a database that several machines reach; a file in `folder` by default.
        known: Final metrics of runs that were made elsewhere, by name; they are not done again.
        deadline: When to be done, as `time.monotonic` has it: no run is started that would end
            later. Runs that were never started are then missing from the results.
        run_seconds: How long a run takes, as far as that is known before one is finished.
    """

    def __init__(
        self,
        folder: Path,
        *,
        study: str,
        workers: int,
        storage: str | None = None,
        known: Mapping[str, Mapping[str, Any]] | None = None,
        deadline: float = math.inf,
        run_seconds: float = 0.0,
    ) -> None:
        self.deadline, self.run_seconds = deadline, run_seconds
        self.folder, self.study, self.workers = folder, study, workers
        self.url = storage or local_storage(folder)
        self.is_shared = storage is not None
        self.known = dict(known or {})
        self.crew: _Crew | None = None

    def __enter__(self) -> JobQueue:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self.crew is not None:
            self.crew.dismiss()
        if is_disk_full(error) and not isinstance(error, JobError):
            raise disk_full_error(self.folder) from error

    def run(
        self,
        jobs: Sequence[Job],
        watch: Callable[[Snapshot], None] = lambda snapshot: None,
    ) -> dict[str, dict[str, Any]]:
        """Do the runs that are not done yet; returns the final metrics of all, by name.

        Where there is a deadline, runs that could not be started are left out.

        Args:
            jobs: The runs.
            watch: Called about twice a second.

        Raises:
            Interrupted: If SIGINT or SIGTERM came. Every run is saved.
            JobError: If some runs failed.
        """
        results = {job.name: result for job in jobs if (result := self._result(job)) is not None}
        missing = [job for job in jobs if job.name not in results]
        if not missing:
            return results
        self.folder.mkdir(parents=True, exist_ok=True)
        queue = open_queue(self.url, self.study)
        if self._is_too_late(queue):
            return results
        # A run that is done has its folder here, unless several machines share the queue. One
        # whose folder was deleted is done again.
        enqueue(queue, missing, done_too=not self.is_shared)
        if self.crew is None:
            self.crew = _Crew(self.workers, [self.url, self.study, str(self.folder)])
        self.crew.grow(len(missing))
        clock = _Clock()
        is_closed = False  # once the time is over
        at_start = len(results)
        lost_since: dict[str, float] = {}
        with watching_signals(second_interrupts=False) as stopped:
            while True:
                trials: dict[str, list[Any]] = {job.name: [] for job in jobs}
                for trial in queue.get_trials(deepcopy=False):
                    if trial.user_attrs.get("name") in trials:
                        trials[trial.user_attrs["name"]].append(trial)
                failed: dict[str, str] = {}
                left: set[str] = set()
                for job in missing:
                    if job.name in results:
                        continue
                    tried = trials[job.name]
                    is_alive = any(trial.state.name in ALIVE for trial in tried)
                    result = self._result(job) if not is_alive else None
                    if result is None and self.is_shared:
                        done = [trial for trial in tried if trial.state.name == "COMPLETE"]
                        result = done[-1].user_attrs["result"] if done else None
                    if result is not None:
                        results[job.name] = result
                    if result is not None or is_alive:
                        lost_since.pop(job.name, None)
                    elif tried and "error" in tried[-1].user_attrs:
                        failed[job.name] = tried[-1].user_attrs["error"]
                    elif len(tried) > RETRIES:
                        failed[job.name] = "its worker was killed each time"
                    elif is_closed:
                        left.add(job.name)
                    elif time.monotonic() - lost_since.setdefault(job.name, time.monotonic()) > (
                        HEARTBEAT
                    ):
                        # The worker that should have done so was killed as well.
                        enqueue(queue, [job], done_too=not self.is_shared)
                done = {
                    job.name: 1.0 if job.name in results else job.progress(self.folder)
                    for job in jobs
                }
                clock.update(sum(done.values()))
                watch(Snapshot(done, dict(results), clock.seconds, clock.left(len(jobs))))
                if len(results) + len(failed) + len(left) == len(jobs):
                    break
                is_hopeless = len(results) == at_start and len(failed) >= max(2, self.workers)
                if is_hopeless and (reason := same_failure(failed)) is not None:
                    _cancel_waiting(queue)
                    self.crew.stop()
                    raise JobError(
                        f"The first {len(failed)} of {len(jobs)} runs all failed in the same way, "
                        f"so the study stops: {reason}"
                    )
                if not is_closed and self._is_too_late(queue):
                    is_closed = True
                    _cancel_waiting(queue)
                if stopped():
                    self.crew.stop()
                    raise Interrupted(f"stopped with {len(results)} of {len(jobs)} runs finished")
                self.crew.keep_up(finished=len(results))
                time.sleep(0.4)
        if failed:
            raise JobError(describe_failures(failed, len(jobs)))
        return results

    def _is_too_late(self, queue: Any) -> bool:
        """Whether a run that is started now would end after the deadline."""
        if self.deadline == math.inf:
            return False
        took = [
            trial.duration.total_seconds()
            for trial in queue.get_trials(deepcopy=False)
            if trial.state.name == "COMPLETE" and trial.duration is not None
        ]
        longest = max(took, default=self.run_seconds)
        return time.monotonic() + longest > self.deadline

    def _result(self, job: Job) -> dict[str, Any] | None:
        """The final metrics of a run that has its folder here, or is known from elsewhere."""
        if job.name in self.known:
            return dict(self.known[job.name])
        return job.result(self.folder)


class _Clock:
    """Estimates the time left by the pace since the first progress."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.first: tuple[float, float] | None = None
        self.at_start: float | None = None
        self.done = 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def update(self, done: float) -> None:
        self.done = done
        if self.at_start is None:
            self.at_start = done
        elif self.first is None and done > self.at_start:
            self.first = self.seconds, done

    def left(self, total: int) -> float | None:
        if self.first is None or self.done <= self.first[1]:
            return None
        pace = (self.seconds - self.first[0]) / (self.done - self.first[1])
        return pace * (total - self.done)


def local_storage(folder: Path) -> str:
    """The URL of the queue of a study that one machine does alone."""
    return f"sqlite:///{folder.resolve() / 'jobs.db'}"


def open_queue(url: str, study: str, attempts: int = 3) -> Any:
    """The study of Optuna that holds the queue, made if missing."""
    import optuna

    if url.startswith("postgresql://") and not importlib.util.find_spec("psycopg2"):
        url = url.replace("postgresql://", "postgresql+psycopg://", 1)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        retry = optuna.storages.RetryHeartbeatStaleTrialCallback(RETRIES)
        try:
            storage = optuna.storages.RDBStorage(
                url,
                engine_kwargs={"connect_args": {"timeout": 60}} if "sqlite" in url else None,
                heartbeat_interval=HEARTBEAT,
                grace_period=GRACE,
                heartbeat_stale_trial_callback=retry,
            )
            return optuna.create_study(
                storage=storage,
                study_name=study,
                load_if_exists=True,
                sampler=optuna.samplers.RandomSampler(),
            )
        except ImportError as error:
            raise RunError(f"Expected a driver for the storage {url!r}: {error}") from None
        except Exception as error:
            if type(error).__module__.partition(".")[0] not in ("sqlalchemy", "optuna"):
                raise
            reason = str(error).splitlines()[0]
    if attempts == 1:
        raise RunError(f"Expected to reach the storage {url!r}, but got: {reason}")
    time.sleep(1)  # two machines that make the tables at the same moment get in each other's way
    return open_queue(url, study, attempts - 1)


def enqueue(queue: Any, jobs: Sequence[Job], *, done_too: bool = False) -> None:
    """Add the jobs that are neither waiting nor running; those that are done if `done_too`."""
    states = ALIVE if done_too else (*ALIVE, "COMPLETE")
    known = {
        trial.user_attrs.get("name")
        for trial in queue.get_trials(deepcopy=False)
        if trial.state.name in states
    }
    for job in jobs:
        if job.name not in known:
            queue.enqueue_trial({}, user_attrs=job.to_dict())


def _cancel_waiting(queue: Any) -> None:
    """Take the waiting runs out of the queue; those that are running go on."""
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that `ask` sends no heartbeat
        for trial in queue.get_trials(deepcopy=False):
            if trial.state.name == "WAITING":
                queue.tell(queue.ask(), state=optuna.trial.TrialState.FAIL)


class _Crew:
    """The worker processes of this machine. They wait for work until they are dismissed."""

    def __init__(self, most: int, arguments: list[str]) -> None:
        self.most, self.arguments = most, arguments
        self.members: list[subprocess.Popen[str]] = []
        self.deaths = self.finished = 0

    def grow(self, jobs: int) -> None:
        """Have as many workers as there are jobs, at most the number that was asked for."""
        while len(self.members) < min(self.most, jobs):
            self._hire()

    def _hire(self) -> None:
        command = [sys.executable, "-m", "powergrad.lab.jobs.worker", *self.arguments]
        # A group of its own: Ctrl-C reaches the parent alone, which then asks the workers to stop.
        # A worker leaves when its standard input ends and nothing is left to do.
        process = subprocess.Popen(
            command,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        self.members.append(process)

    def keep_up(self, finished: int) -> None:
        """Replace the workers that were killed."""
        if finished > self.finished:
            self.finished, self.deaths = finished, 0
        for member in list(self.members):
            if member.poll() is not None:  # none leaves by itself before it is dismissed
                self.members.remove(member)
                _close(member)
                if member.returncode == DISK_FULL:
                    self.stop()
                    raise disk_full_error(Path(self.arguments[-1]))
                self.deaths += 1
                if self.deaths > DEATHS:
                    raise JobError(
                        f"{DEATHS} workers died one after another with no run finished; the last "
                        f"with exit code {member.returncode}."
                    )
                self._hire()

    def stop(self) -> None:
        """Ask the workers to save and stop, and wait for them."""
        for member in self.members:
            with contextlib.suppress(ProcessLookupError):
                member.send_signal(signal.SIGTERM)
        self._join()

    def dismiss(self) -> None:
        """Tell the workers that nothing more will come, and wait for them; kill who stays."""
        for member in self.members:
            _close(member)
        self._join()
        for member in self.members:
            if member.poll() is None:
                member.kill()
                member.wait()

    def _join(self) -> None:
        for member in self.members:
            with contextlib.suppress(subprocess.TimeoutExpired):
                member.wait(timeout=60)


def _close(member: subprocess.Popen[str]) -> None:
    """End the standard input of a worker."""
    assert member.stdin is not None
    with contextlib.suppress(OSError):
        member.stdin.close()
