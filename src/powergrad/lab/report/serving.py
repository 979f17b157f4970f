"""Serves the page of a study while it runs, with its progress; for this machine only."""

from __future__ import annotations

import json
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from typing_extensions import override

from powergrad.lab.files import json_safe
from powergrad.lab.report.content import describe_study, open_arms, planned_runs
from powergrad.lab.report.curves import UNREADABLE
from powergrad.lab.report.page import make_data, make_page
from powergrad.lab.runs.process import last_lines
from powergrad.lab.study import Study, load_study
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
HTML, JSON, TEXT = "text/html", "application/json", "text/plain"

SILENT = 60  # after this many seconds without an update, no run counts as running


def make_live_data(folder: Path) -> dict[str, Any]:
    """The data of the page of a study that may be running."""
    progress, results = read_progress(folder), load_study(folder)
    content = describe_study(results, {run["name"]: run["state"] for run in progress["runs"]})
    study, is_finished = results.study, True
    if study is not None and (
        study.kind == "tune" or (open_arms(results) if study.finals else planned_runs(results))
    ):
        is_finished = False
        content |= {"provisional": _describe_provisional(study), "advice": []}
    return {**make_data([content]), "live": {**progress, "is_finished": is_finished}}


def read_progress(folder: Path) -> dict[str, Any]:
    """The state of every run, and a version of study.json; the page asks for both regularly."""
    path = folder / "progress.json"
    progress = json.loads(path.read_bytes()) if path.is_file() else {"runs": {}, "updated": 0}
    is_silent = time.time() - progress["updated"] > SILENT  # its process was killed
    runs = []
    for name, run in progress["runs"].items():
        state = "waiting" if run["state"] == "running" and is_silent else run["state"]
        note, output = run.get("reason") or "", folder / name / "output.txt"
        if state == "running" and output.is_file():
            note = last_lines(output)
        runs.append({"name": name, "state": state, "done": run["done"], "note": note})
    left = progress.get("left")
    return {
        "version": str((folder / FILE).stat().st_mtime_ns),
        "left": None if left is None else duration(left),
        "runs": runs,
    }


def _describe_provisional(study: Study) -> str:
    what = "repeats" if study.finals else "runs"
    *looks, last = map(str, study.design.looks)
    when = f"once all {last} {what} of every arm are finished"
    if looks:
        when = f"at the planned looks, at {', '.join(looks)} and {last} {what} per arm"
    error = f"The probability of a false verdict is {100 * study.design.level:g}% only {when}."
    rule = "Do not stop the study because of earlier results."
    return f"Provisional: the study is not finished. {error} {rule}"


# The server ---------------------------------------------------------------------------------------


class LiveServer(ThreadingHTTPServer):
    """Serves the page of a study at :attr:`url`, and its data."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        load_study(folder)  # raises if there is none
        self.folder = folder
        self.lock = threading.Lock()  # one answer at a time
        super().__init__((ADDRESS, port), _Handler)

    @property
    def url(self) -> str:
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
        folder = self.server.folder
        answers = {
            "/": (HTML, lambda: make_page(make_live_data(folder))),
            "/data.json": (JSON, lambda: json.dumps(json_safe(make_live_data(folder)))),
            "/progress.json": (JSON, lambda: json.dumps(json_safe(read_progress(folder)))),
        }
        if self.headers.get("Host", "").partition(":")[0] not in HOSTS:
            self._answer(HTTPStatus.FORBIDDEN, TEXT, "Expected a request to this machine.\n")
        elif self.path not in answers:
            self._answer(HTTPStatus.NOT_FOUND, TEXT, "Expected the page of the study, at /.\n")
        else:
            kind, make = answers[self.path]
            try:
                with self.server.lock:
                    text = make()
            except UNREADABLE as error:  # a file is being written; the next request can read it
                self._answer(HTTPStatus.SERVICE_UNAVAILABLE, TEXT, f"{error}\n", Refresh="2")
            else:
                self._answer(HTTPStatus.OK, kind, text)

    def _answer(self, status: HTTPStatus, kind: str, text: str, **headers: str) -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        lengths = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
        for name, value in {**HEADERS, **lengths, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests: the page sends one every two seconds."""
