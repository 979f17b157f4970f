"""The progress of the runs in a queue, read without writing anything."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from powergrad.lab.jobs import job_from_dict
from powergrad.lab.jobs.job import Job
from powergrad.lab.jobs.queue import ALIVE, GRACE, HEARTBEAT
from powergrad.lab.trainer.recipe import RecipeError
from powergrad.lab.trainer.run_folder import RunError

UNREADABLE = (RunError, RecipeError, OSError, ValueError, KeyError, TypeError)  # half-written files
OUTPUT = "output.txt"  # the output of a program, in the folder of its run
TAIL = 2000  # the number of its last characters to show


@dataclass(frozen=True)
class JobState:
    """The state of a run.

    Attributes:
        name: The name of its folder.
        state: ``waiting``, ``running``, ``finished`` or ``failed``.
        done: The finished fraction, from 0 to 1.
        note: Why it failed; for a running program, the end of its output.
        seconds: The time that it took, if known.
    """

    name: str
    state: Literal["waiting", "running", "finished", "failed"]
    done: float
    note: str = ""
    seconds: float | None = None


class QueueReader:
    """Reads the queue of a study."""

    def __init__(self, folder: Path, study: str, storage: str | None = None) -> None:
        self.folder, self.study, self.url = folder, study, storage
        self.queues: list[Any] = []
        self.finished: dict[str, JobState] = {}

    def states(self) -> dict[str, JobState]:
        """Every run that was ever in the queue, by name; empty while there is no queue."""
        trials: dict[str, list[tuple[Any, bool]]] = {}
        for queue in self._open():
            stale = set(queue._storage._get_stale_trial_ids(queue._study_id))
            for trial in queue.get_trials(deepcopy=False):
                if name := trial.user_attrs.get("name"):
                    is_stale = trial._trial_id in stale
                    trials.setdefault(name, []).append((trial, is_stale))
        return {name: self._state(name, attempts) for name, attempts in trials.items()}

    def _open(self) -> list[Any]:
        """The Optuna studies, opened read-only."""
        path = self.folder.resolve() / "jobs.db"
        if self.queues or (self.url is None and not path.is_file()):
            return self.queues
        import optuna
        from sqlalchemy.exc import SQLAlchemyError

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        url = self.url or f"sqlite:///file:{quote(str(path))}?mode=ro&uri=true"
        expected = (SQLAlchemyError, optuna.exceptions.OptunaError, KeyError)  # being created
        with warnings.catch_warnings(), contextlib.suppress(*expected):
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            storage = optuna.storages.RDBStorage(
                url, heartbeat_interval=HEARTBEAT, grace_period=GRACE
            )
            names = [self.study] if self.url else optuna.get_all_study_names(storage)
            self.queues = [optuna.load_study(study_name=name, storage=storage) for name in names]
        return self.queues

    def _state(self, name: str, trials: list[tuple[Any, bool]]) -> JobState:
        last, alive = trials[-1][0], [trial for trial, _ in trials if trial.state.name in ALIVE]
        if name in self.finished and not alive:
            return self.finished[name]
        done = 0.0
        with contextlib.suppress(*UNREADABLE):
            job = job_from_dict(last.user_attrs)
            if self._is_finished(job, trials):
                took = last.duration.total_seconds() if last.duration else None
                state = JobState(name, "finished", 1.0, seconds=took)
                return self.finished.setdefault(name, state)
            done = job.progress(self.folder)
        if any(trial.state.name == "RUNNING" and not is_stale for trial, is_stale in trials):
            return JobState(name, "running", done, self._output(name))
        if not alive and "error" in last.user_attrs:
            return JobState(name, "failed", done, last.user_attrs["error"])
        return JobState(name, "waiting", done)

    def _is_finished(self, job: Job, trials: list[tuple[Any, bool]]) -> bool:
        if job.result(self.folder) is not None:
            return True
        is_shared = self.url is not None  # its folder may be on another machine
        return is_shared and any(trial.state.name == "COMPLETE" for trial, _ in trials)

    def _output(self, name: str) -> str:
        """The end of the output of a program, starting with a complete line."""
        with contextlib.suppress(OSError):
            path = self.folder / name / OUTPUT
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - TAIL))
                text = file.read(TAIL).decode("utf-8", "replace")
            return text if len(text) < TAIL else text.partition("\n")[2]
        return ""
