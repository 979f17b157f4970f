"""A worker process: ``python -m powergrad.lab.jobs.worker URL STUDY FOLDER``."""

from __future__ import annotations

import contextlib
import math
import os
import select
import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from powergrad.lab.jobs import RunFailed, job_from_dict
from powergrad.lab.jobs.failures import DISK_FULL, is_disk_full
from powergrad.lab.jobs.queue import HEARTBEAT, local_storage, open_queue
from powergrad.lab.signals import Interrupted
from powergrad.lab.trainer.run_folder import RunBusyError


class _Failed(Exception):  # noqa: N818
    """A run failed: the parent reports it, and the worker continues."""


def work(url: str, study: str, folder: Path) -> None:
    """Take runs from the queue until none is waiting or running, and none will be added.

    The parent keeps the standard input of this process open as long as it may add runs.
    """
    import optuna

    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    queue = open_queue(url, study)
    is_shared = url != local_storage(folder)  # finished runs may have their folder elsewhere

    def do_one(trial: Any) -> float:
        if "name" not in trial.user_attrs:  # another worker took the last run
            raise optuna.TrialPruned
        job = job_from_dict(trial.user_attrs)
        for other in queue.get_trials(deepcopy=False):  # two machines may have enqueued it
            is_same = other.user_attrs.get("name") == job.name and other.number < trial.number
            is_done = other.state.name == "COMPLETE" and (
                is_shared or job.result(folder) is not None
            )
            if is_same and (other.state.name == "RUNNING" or is_done):
                raise optuna.TrialPruned
        try:
            trial.set_user_attr("result", job.execute(folder))
            return 0.0  # Optuna needs a value; the metrics are in the attribute
        except Interrupted:
            queue.enqueue_trial({}, user_attrs=dict(trial.user_attrs))
            raise
        except (optuna.exceptions.UpdateFinishedTrialError, RunBusyError):
            # The heartbeat of a worker was late: one of the two workers continues the run, and the
            # retry finds it finished.
            time.sleep(HEARTBEAT)
            queue.enqueue_trial({}, user_attrs=dict(trial.user_attrs))
            raise _Failed from None
        except RunFailed as error:
            trial.set_user_attr("stops", error.stops)
            trial.set_user_attr("error", str(error))
            raise _Failed from error
        except Exception as error:
            if is_disk_full(error):  # nothing can be written here; the parent reports it
                raise
            trial.set_user_attr("error", f"{type(error).__name__}: {error}")
            raise _Failed from error

    running_since: dict[int, float] = {}
    while True:
        trials = queue.get_trials(deepcopy=False)
        states = [trial.state.name for trial in trials]
        if "WAITING" in states:
            try:
                queue.optimize(do_one, n_trials=1, catch=(_Failed,))
            except optuna.exceptions.UpdateFinishedTrialError:
                pass
            except ValueError as error:  # Optuna's error if another worker was faster
                if "Cannot tell a" not in str(error):
                    raise
        elif "RUNNING" in states:
            optuna.storages.fail_stale_trials(queue)
            _start_heartbeats(queue, trials, running_since)
            time.sleep(1)
        elif _is_dismissed():
            return
        else:
            time.sleep(0.3)


def _start_heartbeats(queue: Any, trials: Iterable[Any], running_since: dict[int, float]) -> None:
    """Send one heartbeat for each run of another worker, so that it can become stale.

    Optuna never fails a run that has no heartbeat, as of a worker that was killed before its first.
    """
    now = time.monotonic()
    for trial in trials:
        if trial.state.name != "RUNNING":
            continue
        since = running_since.setdefault(trial._trial_id, now)
        if now - since > HEARTBEAT:
            queue._storage.record_heartbeat(trial._trial_id)
            running_since[trial._trial_id] = math.inf  # once


def _is_dismissed() -> bool:
    """Whether the standard input is closed: the parent adds no more runs, or was killed."""
    readable, _, _ = select.select([sys.stdin], [], [], 0)
    return bool(readable) and not sys.stdin.readline()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warnings.filterwarnings("ignore", "Skipped ")  # such images are listed before the first run
    try:
        with contextlib.suppress(Interrupted):
            work(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    except Exception as error:
        if is_disk_full(error):
            sys.exit(DISK_FULL)
        raise
