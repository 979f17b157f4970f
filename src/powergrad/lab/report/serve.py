"""Serves the live page over HTTP, for this machine only."""

from __future__ import annotations

import json
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from typing_extensions import override

from powergrad.lab.files import json_safe
from powergrad.lab.report.live import LiveStudy
from powergrad.lab.report.runs import UNREADABLE

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
