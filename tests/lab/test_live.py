"""``powergrad watch``: the page of a study while it runs, over HTTP and without a browser."""

import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_study import RECIPE, study_of, write_run

import powergrad_cli
from powergrad.lab.report.content import describe_study
from powergrad.lab.report.page import as_json
from powergrad.lab.report.serving import LiveServer, make_live_data, read_progress
from powergrad.lab.runs import Job
from powergrad.lab.study import Results, load_study, save
from powergrad.lab.study.saving import claim
from powergrad.lab.trainer.run_folder import Run


class StudyInProgress:
    """A study, and the files that its pool writes."""

    def __init__(self, folder: Path, looks: tuple[int, ...] = (6, 8)) -> None:
        self.folder = folder
        self.study = claim(study_of({"baseline": {}, "pgt": {"loss.alpha": 0.25}}, *looks), folder)
        self.jobs = list(self.study.jobs().values())
        self.states: dict[str, dict[str, Any]] = {}

    def recipe(self, job: Job) -> Any:
        return RECIPE.override({**job.changes, "seed": job.seed})

    def report(self, *names: str, state: str, done: float = 0.0, **others: Any) -> None:
        """Write progress.json, in which some runs have another state."""
        reason = others.pop("reason", None)
        self.states |= {n: {"state": state, "done": done, "reason": reason} for n in names}
        content = {"runs": self.states, "left": 90.0, "updated": time.time(), **others}
        (self.folder / "progress.json").write_text(json.dumps(content))

    def start(self, job: Job) -> str:
        """Start a run, which then has one epoch."""
        run = Run(self.folder / job.name)
        with run.open(self.recipe(job)):
            run.cut_metrics(0)
            run.add_metrics({"epoch": 1, "step": 4, "train_loss": 1.0, "test_accuracy": 20.0})
        self.report(job.name, state="running", done=1 / 3)
        return job.name

    def finish(self, *jobs: Job) -> None:
        """Finish runs, in which PGT is better by about two points."""
        for job in jobs:
            accuracy = 90 + 0.37 * job.seed % 1 + (2 if job.arm == "pgt" else 0)
            write_run(self.folder / job.name, self.recipe(job), accuracy)
            self.report(job.name, state="done", done=1.0)
        save(load_study(self.folder), self.folder)


@pytest.fixture
def running(tmp_path: Path) -> StudyInProgress:
    """A study of which one run is running, one failed, and ten wait."""
    study = StudyInProgress(tmp_path / "live")
    study.report(*(job.name for job in study.jobs[:12]), state="waiting")
    study.start(study.jobs[0])
    study.report(study.jobs[1].name, state="failed", reason="RuntimeError: no memory\n  in line 3")
    return study


@contextmanager
def serving(folder: Path) -> Iterator[LiveServer]:
    with LiveServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server: LiveServer, path: str = "/", host: str | None = None, method: str = "GET") -> Any:
    """The answer to a request, and its text."""
    port = server.server_address[1]
    with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        connection.putrequest(method, path, skip_host=True)
        if host != "":
            connection.putheader("Host", host or f"127.0.0.1:{port}")
        connection.endheaders()
        answer = connection.getresponse()
        return answer, answer.read().decode()


def test_state_of_every_run(running: StudyInProgress) -> None:
    first, second, *others = read_progress(running.folder)["runs"]
    assert (first["state"], first["done"], first["note"]) == ("running", 1 / 3, "")
    assert (second["state"], second["note"]) == ("failed", "RuntimeError: no memory\n  in line 3")
    assert {run["state"] for run in others} == {"waiting"}
    assert read_progress(running.folder)["left"] == "1 min 30 s"
    # A running program shows the end of its output.
    output = running.folder / first["name"] / "output.txt"
    output.write_text("".join(f"step {step}\n" for step in range(10_000)) + "step 10")
    note = read_progress(running.folder)["runs"][0]["note"]
    assert note.split() == " ".join(f"step {step}" for step in (*range(9981, 10_000), 10)).split()
    # If the pool was killed, nothing runs.
    running.report(state="waiting", updated=time.time() - 3600)
    assert read_progress(running.folder)["runs"][0]["state"] == "waiting"


def test_verdict_is_provisional_until_the_study_is_finished(running: StudyInProgress) -> None:
    running.finish(*running.jobs[2:6])
    data = make_live_data(running.folder)
    (study,) = data["studies"]
    assert not data["live"]["is_finished"]
    assert "at 6 and 8 runs" in study["provisional"]
    assert study["advice"] == []
    states = {run["status"] for run in study["runs"]}
    assert states == {"finished", "running", "waiting", "failed", "planned"}
    assert not any("without a result" in note for note in study["notes"])
    running.finish(*running.jobs[:12])
    data = make_live_data(running.folder)
    assert data["live"]["is_finished"]  # settled at the first look: 8 are not needed
    assert data["studies"][0]["provisional"] is None
    assert as_json(data["studies"][0]) == as_json(describe_study(load_study(running.folder)))


def test_fixed_number_of_runs_and_repeats(tmp_path: Path) -> None:
    fixed = StudyInProgress(tmp_path / "fixed", looks=(2,))
    fixed.finish(*fixed.jobs[:3])
    data = make_live_data(fixed.folder)
    assert "once all 2 runs" in data["studies"][0]["provisional"]
    fixed.finish(fixed.jobs[3])
    assert make_live_data(fixed.folder)["live"]["is_finished"]
    repeats = replace(study_of(), finals=2, tuned=("optimizer.lr",))
    save(Results.of(repeats), tmp_path / "fixed")
    assert not make_live_data(fixed.folder)["live"]["is_finished"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The server of a study in which nothing happens."""
    with serving(StudyInProgress(tmp_path_factory.mktemp("served") / "live").folder) as server:
        yield server


def test_server_answers_with_page_data_and_progress(server: LiveServer) -> None:
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", server.url)
    answer, page = ask(server)
    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert answer.headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert answer.headers["Cache-Control"] == "no-store"
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', page)
    rules = dict(part.split(" ", 1) for part in policy.split("; "))
    assert (rules["default-src"], rules["connect-src"]) == ("'none'", "'self'")
    assert "unsafe" not in policy
    answer, text = ask(server, "/data.json")
    assert answer.headers["Content-Type"].startswith("application/json")
    progress = json.loads(ask(server, "/progress.json")[1])
    assert json.loads(text)["live"] == {**progress, "is_finished": False}
    assert progress["runs"] == []  # the study has not begun
    for path in ("/study.json", "/../live/study.json", "/%2e%2e/", "/data.json/", "/?x=1", "*"):
        answer, text = ask(server, path)
        assert (answer.status, "format" in text) == (404, False)
    assert ask(server, "/", method="POST")[0].status == 501


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("localhost:9000", 200), ("127.0.0.1", 200)]
    + [(host, 403) for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example")]
    + [(host, 403) for host in ("", "[::1]:80", "localhost.", "127.0.0.2:80")],
)
def test_only_requests_to_this_machine(server: LiveServer, host: str, status: int) -> None:
    """Another site whose name resolves to 127.0.0.1 sends that name; a tunnel, another port."""
    for path in ("/", "/progress.json"):
        assert ask(server, path, host)[0].status == status


def test_half_written_files(running: StudyInProgress) -> None:
    running.finish(*running.jobs[:4])
    run = running.folder / running.jobs[0].name
    with serving(running.folder) as server:
        for path in (run / "result.json", run / "metrics.csv", run / "classes.json"):
            whole = path.read_bytes()
            path.write_bytes(whole[: len(whole) // 2])
            assert ask(server)[0].status == 200, path
            path.write_bytes(whole)
        for path in (running.folder / "study.json", running.folder / "progress.json"):
            whole = path.read_bytes()
            path.write_bytes(whole[: len(whole) // 2])
            answer, _ = ask(server)
            assert (answer.status, answer.headers["Refresh"]) == (503, "2")
            path.write_bytes(whole)
            assert ask(server)[0].status == 200


def test_command_serves_until_it_is_interrupted(running: StudyInProgress) -> None:
    command = [sys.executable, "-m", "powergrad", "watch", str(running.folder), "--no-open"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # it may be ignored here
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        port = int(re.findall(r"http://127\.0\.0\.1:(\d+)/", line)[0])
        with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
            connection.request("GET", "/progress.json")
            assert len(json.loads(connection.getresponse().read())["runs"]) == 12
        taken = ["watch", str(running.folder), "--port", str(port), "--no-open"]
        assert powergrad_cli.main(taken) == 2
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
        assert (process.returncode, out.strip(), err) == (0, "", "")
    finally:
        process.kill()


@pytest.mark.parametrize("kind", ["nothing", "run", "file"])
def test_folder_that_is_no_study(tmp_path: Path, capsys: Any, kind: str) -> None:
    folder = tmp_path / kind
    if kind == "run":
        write_run(folder, RECIPE, 90)
    if kind == "file":
        folder.write_text("x")
    assert powergrad_cli.main(["watch", str(folder), "--no-open"]) == 2
    assert str(folder) in capsys.readouterr().err
    assert powergrad_cli.main(["watch", str(folder), "--port", "70000"]) == 2
    assert "--port" in capsys.readouterr().err
