"""Executes many runs at a time, on the cores of one machine or on several machines.

The runs are trials in an Optuna storage (SQLite in the folder of the study, or any database by its
URL). Workers take one run after another, and send heartbeats. If a worker is killed, another one
continues its run from the last checkpoint. Only one process can open the folder of a run, and
finished runs are returned directly, so no run is executed twice.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import override

from powergrad.lab.jobs.failures import (
    DISK_FULL,
    RunsFailed,
    disk_full_error,
    is_disk_full,
    same_failure,
)
from powergrad.lab.jobs.job import Job, JobError, RunFailed
from powergrad.lab.signals import Interrupted, watching_signals
from powergrad.lab.trainer.run_folder import RunError

HEARTBEAT = 2  # seconds
GRACE = 12  # after this many seconds without a heartbeat, a worker counts as dead
RETRIES = 20  # the maximal number of retries of a run that kills its worker
ALIVE = ("WAITING", "RUNNING")
DEATHS = 20  # the maximal number of dead workers without a finished run in between


@dataclass(frozen=True)
class Snapshot:
    """The progress of the runs.

    Attributes:
        done: The finished fraction of each run, by name.
        results: The final metrics of the finished runs.
        seconds: The time since this start.
        left: The estimated remaining time in seconds; None if there is no estimate yet.
        failed: The reasons of failed runs, by name.
    """

    done: Mapping[str, float]
    results: Mapping[str, Mapping[str, Any]]
    seconds: float
    left: float | None
    failed: Mapping[str, str] = field(default_factory=dict)


class JobQueue:
    """Executes runs on this machine, in one or several batches with the same workers."""

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
        environments: Sequence[Mapping[str, str]] = (),
    ) -> None:
        self.deadline, self.run_seconds = deadline, run_seconds
        self.folder, self.study, self.workers = folder, study, workers
        self.url = storage or local_storage(folder)
        self.is_shared = storage is not None
        self.known = dict(known or {})
        self.environments = environments
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
        """Execute the unfinished runs; return the final metrics of all, by name.

        With a deadline, runs that could not be started are missing.
        """
        results = {job.name: result for job in jobs if (result := self._result(job)) is not None}
        missing = [job for job in jobs if job.name not in results]
        if not missing:
            return results
        self.folder.mkdir(parents=True, exist_ok=True)
        queue = open_queue(self.url, self.study)
        if self._is_too_late(queue):
            return results
        # A finished run has its folder here, unless several machines share the queue. If its
        # folder was deleted, it is repeated.
        enqueue(queue, missing, done_too=not self.is_shared)
        if self.crew is None:
            arguments = [self.url, self.study, str(self.folder)]
            self.crew = _Crew(self.workers, arguments, self.environments)
        self.crew.grow(len(missing))
        clock = _Clock()
        is_closed = False  # True after the deadline
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
                        if tried[-1].user_attrs.get("stops"):
                            self.crew.stop()
                            raise JobError(f"{job.name}: {failed[job.name]}")
                    elif len(tried) > RETRIES:
                        failed[job.name] = "its worker was killed every time"
                    elif is_closed:
                        left.add(job.name)
                    elif time.monotonic() - lost_since.setdefault(job.name, time.monotonic()) > (
                        HEARTBEAT
                    ):
                        # The worker that should have enqueued it again was killed, too.
                        enqueue(queue, [job], done_too=not self.is_shared)
                done = {
                    job.name: 1.0 if job.name in results else job.progress(self.folder)
                    for job in jobs
                }
                clock.update(sum(done.values()))
                remaining = clock.left(len(jobs))
                watch(Snapshot(done, dict(results), clock.seconds, remaining, failed))
                if len(results) + len(failed) + len(left) == len(jobs):
                    break
                is_hopeless = len(results) == at_start and len(failed) >= max(2, self.workers)
                is_hopeless = is_hopeless and not any(job.is_foreign for job in missing)
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
            raise RunsFailed(failed, results)
        return results

    def _is_too_late(self, queue: Any) -> bool:
        """Whether a run started now would end after the deadline."""
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
        """The final metrics of a run, from its folder or from `known`."""
        if job.name in self.known:
            return dict(self.known[job.name])
        return job.result(self.folder)


class InlineQueue(JobQueue):
    """Executes runs one after another in this process, if other processes cannot import them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, study="", workers=1)

    @override
    def run(
        self,
        jobs: Sequence[Job],
        watch: Callable[[Snapshot], None] = lambda snapshot: None,
    ) -> dict[str, dict[str, Any]]:
        results: dict[str, dict[str, Any]] = {}
        failed: dict[str, str] = {}
        clock = _Clock()
        for job in jobs:
            try:
                results[job.name] = job.execute(self.folder)
            except RunFailed as error:
                if error.stops:
                    raise JobError(f"{job.name}: {error}") from None
                failed[job.name] = str(error)
            ended = results.keys() | failed.keys()
            clock.update(len(ended))
            done = {name: float(name in ended) for name in (planned.name for planned in jobs)}
            watch(Snapshot(done, dict(results), clock.seconds, clock.left(len(jobs)), failed))
        if failed:
            raise RunsFailed(failed, results)
        return results


class _Clock:
    """Estimates the remaining time from the pace since the first progress."""

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
    """The URL of the queue of a study on a single machine."""
    return f"sqlite:///{folder.resolve() / 'jobs.db'}"


def open_queue(url: str, study: str, attempts: int = 3) -> Any:
    """Open the Optuna study that holds the queue; create it if missing."""
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
            raise RunError(f"Expected a driver for the storage {url!r}, but got: {error}") from None
        except Exception as error:
            if type(error).__module__.partition(".")[0] not in ("sqlalchemy", "optuna"):
                raise
            reason = str(error).splitlines()[0]
    if attempts == 1:
        raise RunError(f"Expected to reach the storage {url!r}, but got: {reason}")
    time.sleep(1)  # another machine may be creating the tables at the same moment
    return open_queue(url, study, attempts - 1)


def enqueue(queue: Any, jobs: Sequence[Job], *, done_too: bool = False) -> None:
    """Enqueue jobs that are neither waiting nor running; with `done_too`, also finished ones."""
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
    """Remove the waiting runs from the queue; running ones continue."""
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # `ask` sends no heartbeat
        for trial in queue.get_trials(deepcopy=False):
            if trial.state.name == "WAITING":
                queue.tell(queue.ask(), state=optuna.trial.TrialState.FAIL)


class _Crew:
    """The worker processes of this machine, which wait for work until they are dismissed."""

    def __init__(
        self, most: int, arguments: list[str], environments: Sequence[Mapping[str, str]]
    ) -> None:
        self.most, self.arguments, self.environments = most, arguments, environments
        self.members: list[subprocess.Popen[str]] = []
        self.deaths = self.finished = 0

    def grow(self, jobs: int) -> None:
        """Start workers until there is one per job, up to the maximal number."""
        while len(self.members) < min(self.most, jobs):
            self.members.append(self._hire(len(self.members)))

    def _hire(self, place: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "powergrad.lab.jobs.worker", *self.arguments]
        own = self.environments[place % len(self.environments)] if self.environments else {}
        # In its own session, so that Ctrl-C reaches only the parent, which then stops the workers.
        # A worker exits when its standard input is closed and there is nothing left to do.
        return subprocess.Popen(
            command,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, **own},
            text=True,
        )

    def keep_up(self, finished: int) -> None:
        """Replace the workers that were killed."""
        if finished > self.finished:
            self.finished, self.deaths = finished, 0
        for place, member in enumerate(self.members):
            if member.poll() is not None:  # a worker does not exit before it is dismissed
                _close(member)
                if member.returncode == DISK_FULL:
                    self.stop()
                    raise disk_full_error(Path(self.arguments[-1]))
                self.deaths += 1
                if self.deaths > DEATHS:
                    raise JobError(
                        f"{DEATHS} workers died in a row without finishing a run; the last one had "
                        f"exit code {member.returncode}."
                    )
                self.members[place] = self._hire(place)

    def stop(self) -> None:
        """Ask the workers to save and stop, and wait for them."""
        for member in self.members:
            with contextlib.suppress(ProcessLookupError):
                member.send_signal(signal.SIGTERM)
        self._join()

    def dismiss(self) -> None:
        """Tell the workers that there is no more work, wait for them, and kill the remaining."""
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
    """Close the standard input of a worker."""
    assert member.stdin is not None
    with contextlib.suppress(OSError):
        member.stdin.close()
