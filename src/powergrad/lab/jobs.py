"""Many runs at once: over the cores of a machine, or over several machines.

The runs that are wanted are trials in a storage of Optuna (SQLite in the study's folder, or any
database by its URL). Workers take one after another; each shows by a heartbeat that it lives. The
run of a worker that was killed is taken up by another, from its last checkpoint. A run's folder
admits one process, and a finished run is returned as it is, so no run is done twice.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powergrad.lab.config import Recipe
from powergrad.lab.run import Run, RunBusyError, RunError
from powergrad.lab.signals import watching_signals
from powergrad.lab.train import Interrupted, train

__all__ = ["Job", "JobError", "Snapshot", "run_jobs", "work"]

HEARTBEAT = 2  # seconds
GRACE = 12  # seconds without a heartbeat after which a worker is taken for dead
RETRIES = 20  # of one run: a run that kills its worker every time must end some time
ALIVE = ("WAITING", "RUNNING")
DEATHS = 20  # of workers, with no run finished in between


class JobError(RunError):
    """Some runs of a study could not be done; the others are finished."""


@dataclass(frozen=True)
class Job:
    """A run that is wanted.

    Attributes:
        name: Its folder in the study's folder.
        recipe: What it does.
    """

    name: str
    recipe: Recipe


@dataclass(frozen=True)
class Snapshot:
    """How far the runs are.

    Attributes:
        done: The fraction of each run that is done, by name.
        results: The final metrics of those that are finished.
        seconds: How long it has taken since it was started this time.
        left: How long it will take yet, as far as one can tell.
    """

    done: Mapping[str, float]
    results: Mapping[str, Mapping[str, Any]]
    seconds: float
    left: float | None


def run_jobs(
    jobs: Sequence[Job],
    folder: Path,
    *,
    study: str,
    workers: int,
    storage: str | None = None,
    watch: Callable[[Snapshot], None] = lambda snapshot: None,
) -> dict[str, dict[str, Any]]:
    """Do the runs that are not done yet; returns the final metrics of all, by name.

    Args:
        jobs: The runs.
        folder: The study's folder: each run's folder is in it.
        study: The name of the study in the storage.
        workers: How many runs at a time on this machine.
        storage: The URL of a database that several machines reach; a file in `folder` by default.
        watch: Called about twice a second.

    Raises:
        Interrupted: If SIGINT or SIGTERM came. Every run is saved.
        JobError: If some runs could not be done.
    """
    results = {job.name: result for job in jobs if (result := Run(folder / job.name).result())}
    missing = [job for job in jobs if job.name not in results]
    if not missing:
        return results
    folder.mkdir(parents=True, exist_ok=True)
    url = storage or f"sqlite:///{folder.resolve() / 'jobs.db'}"
    queue = _open_queue(url, study)
    _enqueue(queue, missing)
    arguments = [url, study, str(folder)]
    crew = _Crew(min(workers, len(missing)), arguments)
    clock = _Clock()
    lost: dict[str, float] = {}
    with watching_signals(second_interrupts=False) as stopped, crew:
        while True:
            trials: dict[str, list[Any]] = {job.name: [] for job in jobs}
            for trial in queue.get_trials(deepcopy=False):
                if trial.user_attrs.get("name") in trials:
                    trials[trial.user_attrs["name"]].append(trial)
            failed: dict[str, str] = {}
            for job in missing:
                tried = trials[job.name]
                for trial in tried:
                    if trial.state.name == "COMPLETE":
                        results[job.name] = trial.user_attrs["result"]
                if job.name in results or any(t.state.name in ALIVE for t in tried):
                    lost.pop(job.name, None)
                elif tried and "error" in tried[-1].user_attrs:
                    failed[job.name] = tried[-1].user_attrs["error"]
                elif len(tried) > RETRIES:
                    failed[job.name] = "its worker was killed each time"
                elif time.monotonic() - lost.setdefault(job.name, time.monotonic()) > HEARTBEAT:
                    _enqueue(queue, [job])  # who should have done so was killed as well
            done = {job.name: _fraction(job, folder, results) for job in jobs}
            clock.tell(sum(done.values()))
            watch(Snapshot(done, dict(results), clock.seconds, clock.left(len(jobs))))
            if len(results) + len(failed) == len(jobs):
                break
            if stopped():
                crew.stop()
                raise Interrupted(f"{len(results)} of {len(jobs)} runs are finished")
            crew.keep_up(finished=len(results))
            time.sleep(0.4)
        crew.join()
    if failed:
        listed = "\n".join(f"  {name}: {why}" for name, why in failed.items())
        raise JobError(f"{len(failed)} of {len(jobs)} runs could not be done:\n{listed}")
    return results


class _Clock:
    """How long the rest will take, by the pace since something moved for the first time."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.first: tuple[float, float] | None = None
        self.at_start: float | None = None
        self.done = 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def tell(self, done: float) -> None:
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


def _fraction(job: Job, folder: Path, results: Mapping[str, Any]) -> float:
    if job.name in results:
        return 1.0
    rows = Run(folder / job.name).metrics()
    return (rows[-1]["epoch"] or 0) / job.recipe.train.epochs if rows else 0.0


# The queue ----------------------------------------------------------------------------------------


def _open_queue(url: str, study: str, attempts: int = 3) -> Any:
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
            why = str(error).splitlines()[0]
    if attempts == 1:
        raise RunError(f"Expected to reach the storage {url!r}, but got: {why}")
    time.sleep(1)  # two machines that make the tables at the same moment get in each other's way
    return _open_queue(url, study, attempts - 1)


def _enqueue(queue: Any, jobs: Sequence[Job]) -> None:
    """Add the jobs that are neither waiting, running nor done."""
    known = {
        trial.user_attrs.get("name")
        for trial in queue.get_trials(deepcopy=False)
        if trial.state.name in (*ALIVE, "COMPLETE")
    }
    for job in jobs:
        if job.name not in known:
            recipe = job.recipe.model_dump(mode="json")
            queue.enqueue_trial({}, user_attrs={"name": job.name, "recipe": recipe})


def work(url: str, study: str, folder: Path) -> None:
    """Take runs from the queue until none is waiting or running.

    Args:
        url: The storage.
        study: The name of the study in it.
        folder: Where the runs' folders are made.
    """
    import optuna

    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    queue = _open_queue(url, study)

    def do_one(trial: Any) -> float:
        if "recipe" not in trial.user_attrs:  # another worker was faster: there was nothing left
            raise optuna.TrialPruned
        job = Job(trial.user_attrs["name"], Recipe.model_validate(trial.user_attrs["recipe"]))
        for other in queue.get_trials(deepcopy=False):  # two machines may have asked for it
            same = other.user_attrs.get("name") == job.name and other.number < trial.number
            if same and other.state.name in ("RUNNING", "COMPLETE"):
                raise optuna.TrialPruned
        try:
            run = train(job.recipe, folder / job.name)
            result = run.result()
            assert result is not None  # train returns finished runs
            trial.set_user_attr("result", result)
            return float(result["steps"])
        except Interrupted:
            queue.enqueue_trial({}, user_attrs=dict(trial.user_attrs))
            raise
        except (optuna.exceptions.UpdateFinishedTrialError, RunBusyError):
            # A worker that was too slow to show that it lives: one of the two does the run, and
            # whoever asks again finds it finished.
            time.sleep(HEARTBEAT)
            queue.enqueue_trial({}, user_attrs=dict(trial.user_attrs))
            raise _Failed from None
        except Exception as error:
            trial.set_user_attr("error", f"{type(error).__name__}: {error}")
            raise _Failed from error

    while True:
        states = [trial.state.name for trial in queue.get_trials(deepcopy=False)]
        if "WAITING" in states:
            try:
                queue.optimize(do_one, n_trials=1, catch=(_Failed,))
            except optuna.exceptions.UpdateFinishedTrialError:
                pass
            except ValueError as error:  # so Optuna says it where another worker was faster
                if "Cannot tell a" not in str(error):
                    raise
        elif "RUNNING" in states:
            optuna.storages.fail_stale_trials(queue)
            time.sleep(1)
        else:
            return


class _Failed(Exception):  # noqa: N818
    """A run that raised: it is told to the parent, and the worker goes on."""


# The workers --------------------------------------------------------------------------------------


class _Crew:
    """The worker processes of this machine."""

    def __init__(self, size: int, arguments: list[str]) -> None:
        self.size, self.arguments = size, arguments
        self.members: list[subprocess.Popen[str]] = []
        self.deaths = self.finished = 0

    def __enter__(self) -> _Crew:
        for _ in range(self.size):
            self._hire()
        return self

    def _hire(self) -> None:
        command = [sys.executable, "-m", "powergrad.lab.jobs", *self.arguments]
        # A group of its own: Ctrl-C reaches the parent alone, which then asks the workers to stop.
        process = subprocess.Popen(
            command, start_new_session=True, stdout=subprocess.DEVNULL, text=True
        )
        self.members.append(process)

    def keep_up(self, finished: int) -> None:
        """Replace the workers that were killed."""
        if finished > self.finished:
            self.finished, self.deaths = finished, 0
        for member in list(self.members):
            if member.poll() not in (None, 0):
                self.members.remove(member)
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
        self.join()

    def join(self) -> None:
        for member in self.members:
            with contextlib.suppress(subprocess.TimeoutExpired):
                member.wait(timeout=60)

    def __exit__(self, *exception: object) -> None:
        for member in self.members:
            if member.poll() is None:
                member.kill()
                member.wait()


def _main() -> int:
    url, study, folder = sys.argv[1:]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        work(url, study, Path(folder))
    except Interrupted:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(_main())
