"""Executes many runs at a time with Dask: on the cores of this machine, or on a cluster.

The folder of a run is the truth. A finished run is returned from it, an interrupted one continues
from its checkpoint, and only the process that has locked it executes it. So Dask may lose anything
and repeat anything. On this machine, Dask's scheduler and workers are threads of this process
without a connection to others; the runs have processes of their own, see
:mod:`powergrad.lab.runs.worker`. A cluster is whatever the user has started (``dask scheduler`` and
``dask worker``, dask-jobqueue, ...), and gets the same tasks.
"""

from __future__ import annotations

import contextlib
import logging
import math
import pickle
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import uuid4

from typing_extensions import Self

from powergrad.lab.files import FileError, is_disk_full, write_atomically, write_json
from powergrad.lab.runs.jobs import Job, JobError, RunFailed
from powergrad.lab.runs.worker import PATIENCE, PROGRESS, Call, Outcome, dismiss, progress_of
from powergrad.lab.signals import Interrupted, watching_signals

REACH = 5  # seconds to connect to the scheduler of a cluster
NO_WORKERS = 5  # seconds without workers until the user is told
SILENT = 10  # after this many seconds without a report, a run does not count as running
SHOWN = 8  # the maximal number of different failures to show


@dataclass(frozen=True)
class Snapshot:
    """The progress of the runs."""

    done: Mapping[str, float]  # the finished fraction of each run, by name
    results: Mapping[str, Any]
    seconds: float  # since this start
    left: float | None  # the estimated remaining seconds
    failed: Mapping[str, str] = field(default_factory=dict)  # the reasons


Watch = Callable[[Snapshot], None]


class RunsFailed(JobError):  # noqa: N818
    """Some runs of a study failed, for the reasons `failed`; the others have `results`."""

    def __init__(self, failed: Mapping[str, str], results: Mapping[str, Any]) -> None:
        self.failed, self.results = dict(failed), dict(results)
        lines = [f"{len(failed)} of {len(failed) + len(results)} runs failed:"]
        causes = by_cause(failed)
        for names in causes[:SHOWN]:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            lines.append(f"  {names[0]}{more}: {failed[names[0]]}")
        if len(causes) > SHOWN:
            lines.append(f"  and {len(causes) - SHOWN} other reasons")
        super().__init__("\n".join(lines))


def by_cause(failed: Mapping[str, str]) -> list[list[str]]:
    """The failed runs by reason, ignoring the name of the run in it."""
    causes: dict[str, list[str]] = {}
    for name, reason in failed.items():
        causes.setdefault(reason.replace(name, ""), []).append(name)
    return list(causes.values())


class Pool:
    """Executes runs, in one or several batches with the same workers."""

    def __init__(
        self,
        folder: Path,
        *,
        workers: int = 1,  # the number of runs at a time on this machine
        cluster: str | None = None,  # the address of a Dask scheduler, to use its workers instead
        known: Mapping[str, Any] = MappingProxyType({}),  # results of runs that are elsewhere
        deadline: float = math.inf,  # of ``time.monotonic()``
        run_seconds: float = 0.0,  # the expected time of a run, until the first one has finished
        environments: Sequence[Mapping[str, str]] = (),  # variables of each worker of this machine
    ) -> None:
        self.folder, self.workers, self.cluster = folder.absolute(), workers, cluster
        self.known, self.deadline, self.run_seconds = known, deadline, run_seconds
        self.environments = () if cluster else tuple(environments)
        self.longest: float | None = None  # the seconds of the slowest run that was executed
        self.id = f"powergrad-{uuid4().hex}"
        self.states: dict[str, dict[str, Any]] = {}  # of the runs of all batches
        self._client: Any = None
        self._had_workers = math.inf  # when the cluster last had workers; infinite if told
        self._reports: dict[str, tuple[float, float]] = {}  # finished fraction and time
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._stack.close()
        if is_disk_full(error) and not isinstance(error, JobError):
            raise self.disk_full() from error

    def disk_full(self) -> JobError:
        """The error of a study whose disk is full."""
        return JobError(
            f"The disk is full: nothing more can be written to {str(self.folder)!r}, so the study "
            "stops. Finished runs are kept. Free some space and run the same command to continue."
        )

    def run(self, jobs: Sequence[Job], watch: Watch = lambda snapshot: None) -> dict[str, Any]:
        """Execute the unfinished runs; return all results by name, for which there was time."""
        batch = _Batch(self, jobs)
        waiting = deque(job for job in jobs if job.name not in batch.results)
        if not waiting or self._is_too_late():
            return batch.results
        batch.write()  # the workers look for this file
        self._connect()
        futures: dict[str, tuple[Job, Any]] = {}
        woken = threading.Event()
        try:
            with watching_signals(second_interrupts=False) as stopped:
                while futures or (waiting and not self._is_too_late()):
                    slots = self._slots()
                    while waiting and len(futures) < slots and not self._is_too_late():
                        job = waiting.popleft()
                        call = Call(job, self.id, self.folder, self.environments)
                        future = self._client.submit(pickle.loads, pickle.dumps(call), pure=False)
                        future.add_done_callback(lambda _: woken.set())
                        futures[job.name] = job, future
                    woken.wait(0.4)
                    woken.clear()
                    for job, future in [pair for pair in futures.values() if pair[1].done()]:
                        outcome = self._outcome(job, future)
                        del futures[job.name]
                        if outcome is None:  # stopped, but not by this pool
                            waiting.appendleft(job)
                        else:
                            batch.add(job, outcome)
                    batch.show(watch, self._running())
                    if stopped():
                        finished = f"{len(batch.results)} of {len(jobs)} runs finished"
                        raise Interrupted(f"stopped with {finished}")
                    batch.check_hope()
        finally:
            self._cancel({name: future for name, (_, future) in futures.items()})
            with contextlib.suppress(FileError):
                batch.write()
        return batch.finish()

    def _is_too_late(self) -> bool:
        """Whether a run started now would end after the deadline."""
        longest = self.run_seconds if self.longest is None else self.longest
        return time.monotonic() + longest > self.deadline

    # Dask -----------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Start the workers of this machine, or connect to the cluster."""
        if self._client is not None:
            return
        import dask.config
        from distributed import Client, Scheduler, SpecCluster, Worker
        from distributed.comm.addressing import get_address_host_port
        from distributed.utils import silence_logging_cmgr

        enter = self._stack.enter_context
        enter(silence_logging_cmgr(logging.CRITICAL))  # errors of tasks come back with them
        if self.cluster is not None:
            try:
                place = get_address_host_port(self.cluster)
                socket.create_connection(place, timeout=REACH).close()  # says why it is not
                self._client = enter(Client(self.cluster, timeout=REACH, set_as_default=False))
                self._had_workers = time.monotonic()
            except (OSError, ValueError) as error:
                reason = f"The Dask scheduler at {self.cluster!r} cannot be reached: {error}"
                raise JobError(reason) from error
        else:
            scratch = enter(tempfile.TemporaryDirectory(prefix="powergrad-"))
            nobody = {"dashboard": False, "dashboard_address": "127.0.0.1:0"}
            options = {"nthreads": 1, "memory_limit": 0, "local_directory": scratch, **nobody}
            # Without a time to live, workers survive that this process is suspended.
            with dask.config.set({"distributed.scheduler.worker-ttl": None}):
                local = SpecCluster(
                    {place: {"cls": Worker, "options": options} for place in range(self.workers)},
                    {"cls": Scheduler, "options": {"protocol": "inproc://", **nobody}},
                    silence_logs=False,
                )
            self._client = enter(Client(enter(local), set_as_default=False))
        self._client.subscribe_topic(self.id, self._hear)
        self._stack.callback(self._dismiss)

    def _dismiss(self) -> None:
        with contextlib.suppress(OSError):  # the scheduler of a cluster may have been lost
            if self._client.status == "running":
                self._client.run(dismiss, self.id, on_error="ignore")

    def _hear(self, event: tuple[float, tuple[str, float | None]]) -> None:
        """Note the report of a worker about a run; None if it is no longer executed."""
        name, done = event[1]
        self._reports.pop(name, None)
        if done is not None:
            self._reports[name] = done, time.monotonic()

    def _running(self) -> dict[str, float]:
        """The finished fraction of the runs that are being executed."""
        recent = time.monotonic() - SILENT
        return {name: done for name, (done, at) in list(self._reports.items()) if at > recent}

    def _slots(self) -> int:
        """The number of runs to give to Dask; the others wait here, in their order."""
        if self.cluster is None:
            return self.workers
        try:
            if self._client.status != "running":  # it tries to connect again
                raise self._lost()
            threads = sum(self._client.nthreads().values())
        except OSError as error:
            raise self._lost() from error
        if threads:
            self._had_workers = time.monotonic()
        elif time.monotonic() - self._had_workers > NO_WORKERS:
            self._had_workers = math.inf
            print(
                f"The Dask scheduler at {self.cluster} has no workers, so the runs wait. To start "
                f"one: dask worker {self.cluster} --nthreads 1",
                file=sys.stderr,
                flush=True,
            )
        return threads + 1  # more than can be executed now, so that an adaptive cluster grows

    def _lost(self) -> JobError:
        return JobError(
            f"The Dask scheduler at {self.cluster!r} was lost. Finished runs are kept; the same "
            "command continues when it can be reached again."
        )

    def _outcome(self, job: Job, future: Any) -> Outcome | None:
        """How a run ended; None if it was stopped."""
        from distributed import CancelledError, KilledWorker

        try:
            return future.result()
        except KilledWorker:
            return Outcome(job.result(self.folder), "its worker was killed every time")
        except (CancelledError, OSError) as error:
            raise self._lost() from error
        except ModuleNotFoundError as error:
            reason = f"a worker of {self.cluster!r} has no {error.name}: {error}"
            return Outcome(reason=reason, stops=True)

    def _cancel(self, futures: Mapping[str, Any]) -> None:
        """Stop the runs that are being executed, and wait until they are saved."""
        if not futures or self._client.status != "running":
            return
        self._client.cancel(list(futures.values()))
        deadline = time.monotonic() + PATIENCE
        while futures.keys() & self._running().keys() and time.monotonic() < deadline:
            time.sleep(0.05)


class InlinePool(Pool):
    """Executes runs one after another in this process, if other processes cannot import them."""

    def run(self, jobs: Sequence[Job], watch: Watch = lambda snapshot: None) -> dict[str, Any]:
        batch = _Batch(self, jobs)
        for job in [job for job in jobs if job.name not in batch.results]:
            if self._is_too_late():
                break
            batch.show(watch, {job.name: 0.0})
            began = time.monotonic()
            try:
                outcome = Outcome(job.execute(self.folder), seconds=time.monotonic() - began)
            except RunFailed as error:
                outcome = Outcome(reason=str(error), stops=error.stops)
            batch.add(job, outcome)
            batch.show(watch, {})
        return batch.finish()


class _Batch:
    """The results and failures of the runs of one call, and what is shown of them."""

    def __init__(self, pool: Pool, jobs: Sequence[Job]) -> None:
        self.pool, self.jobs = pool, jobs
        results = {job.name: pool.known.get(job.name) or job.result(pool.folder) for job in jobs}
        self.results = {name: result for name, result in results.items() if result is not None}
        self.failed: dict[str, str] = {}
        self.done = {job.name: progress_of(job, pool.folder) for job in jobs}
        self.done |= dict.fromkeys(self.results, 1.0)
        self.at_start = len(self.results), sum(self.done.values())
        self.began, self.written = time.monotonic(), -math.inf
        self.first: tuple[float, float] | None = None  # the time and state of the first progress

    def add(self, job: Job, outcome: Outcome) -> None:
        """Add the outcome of a run."""
        folder = self.pool.folder / job.name
        for name in sorted(outcome.files, key=lambda name: name == "result.json"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / name, lambda file, name=name: file.write(outcome.files[name]))
        if outcome.result is not None:
            self.results[job.name], self.done[job.name] = outcome.result, 1.0
            self.pool.longest = max(self.pool.longest or 0.0, outcome.seconds) or None
        elif outcome.is_disk_full:
            raise self.pool.disk_full()
        elif outcome.stops:
            raise JobError(f"{job.name}: {outcome.reason}")
        else:
            self.failed[job.name] = outcome.reason

    def check_hope(self) -> None:
        """Raise JobError if the first runs of our own recipes all failed in the same way."""
        is_early = len(self.results) == self.at_start[0] and len(by_cause(self.failed)) == 1
        is_foreign = any(job.is_foreign for job in self.jobs)
        if is_early and len(self.failed) >= max(2, self.pool.workers) and not is_foreign:
            raise JobError(
                f"The first {len(self.failed)} of {len(self.jobs)} runs all failed in the same "
                f"way, so the study stops: {next(iter(self.failed.values()))}"
            )

    def finish(self) -> dict[str, Any]:
        """Write the final state; return the results, or raise RunsFailed."""
        self.write()
        if self.failed:
            raise RunsFailed(self.failed, self.results)
        return self.results

    def show(self, watch: Watch, running: Mapping[str, float]) -> None:
        """Call `watch` with the progress, and write it into the folder once per second."""
        self.done |= {name: done for name, done in running.items() if self.done.get(name, 1.0) < 1}
        seconds, total = time.monotonic() - self.began, sum(self.done.values())
        if self.first is None and total > self.at_start[1]:
            self.first = seconds, total
        shown = (dict(self.done), dict(self.results), seconds, self._left(), dict(self.failed))
        watch(Snapshot(*shown))
        if time.monotonic() - self.written > 1:
            self.write(running)

    def _left(self) -> float | None:
        """The remaining seconds, estimated from the pace since the first progress."""
        total = sum(self.done.values())
        if self.first is None or total <= self.first[1]:
            return None
        pace = (time.monotonic() - self.began - self.first[0]) / (total - self.first[1])
        return pace * (len(self.jobs) - total)

    def write(self, running: Collection[str] = ()) -> None:
        """Write the state of all runs of the pool, for whoever watches the folder."""
        for name, done in self.done.items():
            state = "running" if name in running else "waiting"
            state = "failed" if name in self.failed else "done" if name in self.results else state
            reason = {"reason": self.failed[name]} if name in self.failed else {}
            self.pool.states[name] = {"state": state, "done": done, **reason}
        content = {"runs": self.pool.states, "left": self._left(), "updated": time.time()}
        self.pool.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.pool.folder / PROGRESS, {**content, "pool": self.pool.id})
        self.written = time.monotonic()
