"""Serves the page of a study while it runs, with its progress; for this machine only."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from typing_extensions import override

from powergrad.lab.files import json_safe
from powergrad.lab.report.content import describe_study
from powergrad.lab.report.curves import UNREADABLE
from powergrad.lab.report.page import make_data, make_page
from powergrad.lab.study import Results, Study, load_study
from powergrad.lab.study.saving import FILE
from powergrad.lab.words import duration

ADDRESS = "127.0.0.1"
# Another site may resolve its name to this machine (DNS rebinding); its requests carry that name.
HOSTS = (ADDRESS, "localhost")
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the rest is in the page itself
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
HTML, JSON, TEXT = (
    f"{kind}; charset=utf-8" for kind in ("text/html", "application/json", "text/plain")
)

SHOWN = 60  # the maximal number of unfinished runs to list
STATES = ("running", "failed", "waiting")
SILENT = 60  # after this many seconds without an update, no run counts as running
TAIL = 2000  # bytes of the output of a running program to show


# The page -----------------------------------------------------------------------------------------


class LiveStudy:
    """Reads the folder of a study while other processes write to it."""

    def __init__(self, folder: Path) -> None:
        load_study(folder)  # raises if there is none
        self.folder = folder
        self.lock = threading.Lock()  # torch and its number of threads are shared
        self.version, self.is_finished = "", False

    def page(self) -> str:
        """The complete page."""
        return make_page(self.data())

    def data(self) -> dict[str, Any]:
        """The current data of the page."""
        with self.lock:
            results, progress, runs = load_study(self.folder), self.progress(), self._runs()[0]
            states = {name: run["state"] for name, run in runs.items()}
            study = describe_study(results, states)
        if progress["state"] != "finished" and results.study is not None:
            study |= {"provisional": _describe_provisional(results.study), "advice": []}
        return {**make_data([study]), "live": progress}

    def progress(self) -> dict[str, Any]:
        """The progress of the runs and a version of the data, which the page polls."""
        runs, left = self._runs()
        version = self._version(runs)
        if version != self.version:  # nothing else can end a study
            self.is_finished = _is_finished(load_study(self.folder))
            self.version = version
        counts = Counter(run["state"] for run in runs.values())
        unfinished = [{"name": n, **run} for n, run in runs.items() if run["state"] in STATES]
        unfinished.sort(key=lambda run: STATES.index(run["state"]))
        state = "running" if counts["running"] else "idle"
        return {
            "version": version,
            "state": "finished" if self.is_finished else state,
            "sentence": _describe_progress(counts, left),
            "finished": counts["finished"],
            "total": len(runs),
            "runs": unfinished[:SHOWN],
            "more": max(0, len(unfinished) - SHOWN),
        }

    def _runs(self) -> tuple[dict[str, dict[str, Any]], float | None]:
        """The state of every run in progress.json, and the estimated time that is left."""
        path = self.folder / "progress.json"
        progress = json.loads(path.read_bytes()) if path.is_file() else {"runs": {}, "updated": 0}
        is_silent = time.time() - progress["updated"] > SILENT  # its process was killed
        runs = {}
        for name, run in progress["runs"].items():
            state = {"done": "finished"}.get(run["state"], run["state"])
            state = "waiting" if state == "running" and is_silent else state
            note = run.get("reason") or (self._output(name) if state == "running" else "")
            runs[name] = {"state": state, "done": run["done"], "note": note}
        return runs, progress.get("left")

    def _output(self, name: str) -> str:
        """The last lines that the program of a run has written."""
        with contextlib.suppress(OSError), open(self.folder / name / "output.txt", "rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL))
            text = file.read().decode("utf-8", "replace")
            return text if file.tell() <= TAIL else text.partition("\n")[2]
        return ""

    def _version(self, runs: Mapping[str, Mapping[str, Any]]) -> str:
        """A string that changes when the page has new data besides progress."""
        study = (self.folder / FILE).stat()
        parts = [f"{study.st_mtime_ns} {study.st_size}"]
        parts += [f"{n} {run['state']}" for n, run in runs.items() if run["state"] == "failed"]
        parts += sorted(path.parent.name for path in self.folder.glob("*/result.json"))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _is_finished(results: Results) -> bool:
    """Whether every arm is settled, or has all its runs."""
    study, usable = results.study, results.comparable()
    if study is None:
        return True
    if usable is None:  # one arm, or one run each
        return not study.finals and len(results.rows) == len(study.arms) * len(study.seeds)
    is_complete = set(usable.arms) == set(study.arms)
    return is_complete and not any(comparison.is_open for comparison in usable.comparisons)


def _describe_provisional(study: Study) -> str:
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


def _describe_progress(counts: Mapping[str, int], left: float | None) -> str:
    """A sentence with the number of runs per state and the remaining time."""
    total = sum(counts.values())
    if not total:
        return "No run has been started yet."
    parts = [f"{counts['finished']} of {total} runs are finished"]
    parts += [f"{counts[state]} {state}" for state in STATES if counts[state]]
    if counts["running"] and left is not None:
        parts.append(f"about {duration(left)} left")
    if not counts["running"] and counts["finished"] < total:
        return f"{', '.join(parts)}. No run is in progress: the same command continues the study."
    return f"{', '.join(parts)}."


# The server ---------------------------------------------------------------------------------------


class LiveServer(ThreadingHTTPServer):
    """Serves the page of a study at :attr:`url`, and its data."""

    daemon_threads = True

    def __init__(self, live: LiveStudy, port: int = 0) -> None:
        self.live = live
        super().__init__((ADDRESS, port), _Handler)

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{ADDRESS}:{self.server_address[1]}/"

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore closed connections."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version, sys_version = "powergrad", ""

    def do_GET(self) -> None:
        """Answer with the page, its data, or its progress."""
        live = self.server.live
        answers = {
            "/": (HTML, live.page),
            "/data.json": (JSON, lambda: json.dumps(json_safe(live.data()))),
            "/progress.json": (JSON, lambda: json.dumps(json_safe(live.progress()))),
        }
        if self.headers.get("Host", "").partition(":")[0] not in HOSTS:
            self._answer(HTTPStatus.FORBIDDEN, TEXT, "Expected a request to this machine.\n")
        elif self.path not in answers:
            self._answer(HTTPStatus.NOT_FOUND, TEXT, "Expected the page of the study, at /.\n")
        else:
            kind, make = answers[self.path]
            try:
                text = make()
            except UNREADABLE as error:  # a file is being written; the next request can read it
                self._answer(HTTPStatus.SERVICE_UNAVAILABLE, TEXT, f"{error}\n", Refresh="2")
            else:
                self._answer(HTTPStatus.OK, kind, text)

    do_HEAD = do_GET  # noqa: N815

    def _answer(self, status: HTTPStatus, kind: str, text: str, **headers: str) -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        lengths = {"Content-Type": kind, "Content-Length": str(len(body))}
        for name, value in {**HEADERS, **lengths, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests: the page sends one every two seconds."""
