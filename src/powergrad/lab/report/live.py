"""The page of a running study, with its progress and a provisional verdict."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from powergrad.lab.jobs.states import JobState, QueueReader
from powergrad.lab.report.collect import collect
from powergrad.lab.report.page import make_page
from powergrad.lab.report.runs import UNREADABLE
from powergrad.lab.study import Results, Study
from powergrad.lab.study.execute import queue_name
from powergrad.lab.trainer.run_folder import RunError
from powergrad.lab.words import duration

SHOWN = 60  # the maximal number of unfinished runs to list
ORDER = ("running", "failed", "waiting")
ENDS = ("finished", "failed")


class LiveStudy:
    """Reads the folder of a study while other processes write to it."""

    def __init__(self, folder: Path, storage: str | None = None) -> None:
        arms = folder / "arms"  # the runs of a decomposition, after cross-entropy is tuned
        self.folder = arms if not _has_study(folder) and _has_study(arms) else folder
        if not _has_study(self.folder):
            raise RunError(
                f"Expected {str(folder)!r} to be the folder of a study, which has a study.yaml, "
                "but got none."
            )
        study = Study.load(self.folder)
        self.queue = QueueReader(self.folder, queue_name(self.folder, study), storage)
        self.lock = threading.Lock()  # only one thread at a time may use the queue reader
        self.version, self.is_finished = "", False

    def page(self) -> str:
        """The complete page."""
        return make_page(self.data(), is_live=True)

    def data(self) -> dict[str, Any]:
        """The current data of the page."""
        with self.lock:
            states = self.queue.states()
            data = collect([self.folder], {name: run.state for name, run in states.items()})
            progress = self._progress(states)
        if progress["state"] != "finished":
            provisional = _provisional(Study.load(self.folder))
            data["studies"][0] |= {"provisional": provisional, "advice": []}
        return {**data, "live": progress}

    def progress(self) -> dict[str, Any]:
        """The progress of the runs and a version of the data, which the page polls."""
        with self.lock:
            return self._progress(self.queue.states())

    def _progress(self, states: Mapping[str, JobState]) -> dict[str, Any]:
        counts = Counter(run.state for run in states.values())
        version = self._version(states)
        if version != self.version:  # nothing else can end a study
            self.version, self.is_finished = version, _is_finished(self.folder)
        unfinished = [run for run in states.values() if run.state != "finished"]
        unfinished.sort(key=lambda run: ORDER.index(run.state))
        state = "running" if counts["running"] else "idle"
        return {
            "version": version,
            "state": "finished" if self.is_finished else state,
            "sentence": _sentence(states, counts),
            "finished": counts["finished"],
            "total": len(states),
            "runs": [asdict(run) for run in unfinished[:SHOWN]],
            "more": max(0, len(unfinished) - SHOWN),
        }

    def _version(self, states: Mapping[str, JobState]) -> str:
        """A string that changes when the page has new data besides progress."""
        parts = [f"{run.name} {run.state}" for run in states.values() if run.state in ENDS]
        for path in (self.folder / "study.yaml", self.folder / "study.json"):
            with contextlib.suppress(OSError):
                parts.append(f"{path.stat().st_mtime_ns} {path.stat().st_size}")
        parts += sorted(path.parent.name for path in self.folder.glob("*/result.json"))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _has_study(folder: Path) -> bool:
    return (folder / "study.yaml").is_file()


def _is_finished(folder: Path) -> bool:
    """Whether every arm is settled, or has all its runs."""
    try:
        results = Results.load(folder)
        assert results.study is not None
        usable = results.comparable()
        if usable is None:  # one arm, or one run each
            return not results.has_repeats and len(results.rows) == len(results.study.jobs())
        return set(usable.arms) == set(results.study.arms) and usable.is_settled
    except UNREADABLE:
        return False


def _provisional(study: Study) -> str:
    what = "repeats" if study.finals else "runs"
    looks = [str(look) for look in study.design.looks]
    if study.design.is_fixed:
        when = f"once all {looks[0]} {what} of every arm are finished"
    else:
        when = f"at the planned looks, at {', '.join(looks[:-1])} and {looks[-1]} {what} per arm"
    return (
        "Provisional: the study is not finished. The probability of a false verdict is "
        f"{100 * study.design.level:g}% only {when}. Do not stop the study because of earlier "
        "results."
    )


def _sentence(states: Mapping[str, JobState], counts: Mapping[str, int]) -> str:
    """A sentence with the number of runs per state and the remaining time."""
    if not states:
        return "No run is in the queue."
    parts = [f"{counts['finished']} of {len(states)} runs in the queue are finished"]
    parts += [f"{counts[state]} {state}" for state in ORDER if counts[state]]
    took = [run.seconds for run in states.values() if run.seconds is not None]
    if took and counts["running"]:
        left = sum(1 - run.done for run in states.values() if run.state in ("running", "waiting"))
        seconds = sum(took) / len(took) * left / counts["running"]
        parts.append(f"about {duration(seconds)} left for these")
    if not counts["running"] and counts["finished"] < len(states):
        return f"{', '.join(parts)}. No run is in progress: the same command continues the study."
    return f"{', '.join(parts)}."
