"""``powergrad watch``: the page of a study while it runs, over HTTP and without a browser.

The study is pretended: its queue is a real one, and the tests do what workers would do.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_report import ARMS, RECIPE

import powergrad_cli
from powergrad.lab.jobs import RecipeJob, RecipeProgram
from powergrad.lab.jobs.job import split_result
from powergrad.lab.jobs.queue import enqueue, local_storage, open_queue
from powergrad.lab.jobs.states import QueueReader
from powergrad.lab.report.collect import collect
from powergrad.lab.report.live import LiveStudy
from powergrad.lab.report.page import as_json
from powergrad.lab.report.serve import LiveServer
from powergrad.lab.stats import Design
from powergrad.lab.study import Results, Study, StudyKind
from powergrad.lab.study.execute import queue_name
from powergrad.lab.trainer.run_folder import Run, RunError

# The tests take runs from the queue by themselves, one after another.
pytestmark = pytest.mark.filterwarnings("ignore:Heartbeat of storage")


class Pretended:
    """A study, and what its workers do."""

    def __init__(self, folder: Path, looks: tuple[int, ...] = (6, 8)) -> None:
        self.folder = folder
        study = Study(StudyKind.COMPARE, RecipeProgram(RECIPE), ARMS, Design(looks))
        self.study = study.claim(folder)
        self.queue = open_queue(local_storage(folder), queue_name(folder, study))
        self.jobs = list(self.study.jobs().values())
        self.add(2 * looks[0])

    def add(self, count: int) -> None:
        """Put the first runs into the queue."""
        enqueue(self.queue, self.jobs[:count], done_too=False)

    def take(self) -> Any:
        """Begin the next run that waits."""
        trial = self.queue.ask()
        run = Run(self.folder / trial.user_attrs["name"])
        with run.open(self._job(trial).recipe):
            run.cut_metrics(0)
            run.add_metrics({"epoch": 1, "step": 4, "train_loss": 1.0, "test_accuracy": 20.0})
        return trial

    def finish(self, trial: Any) -> None:
        """End a run: PGT is better by about two points."""
        job = self._job(trial)
        noise = int(hashlib.sha256(job.name.encode()).hexdigest()[:4], 16) / 65536
        accuracy = 90 + noise + (2 if job.recipe.loss.alpha < 1 else 0)
        row = {"epoch": 3, "step": 12, "train_loss": 0.5, "test_accuracy": accuracy}
        run = Run(self.folder / job.name)
        run.add_metrics(row)
        run.finish(split_result({**row, "diverged": False, "steps": 12, "seconds": 1.0}))
        self.queue.tell(trial, 0.0)

    def fail(self, trial: Any, error: str) -> None:
        trial.set_user_attr("error", error)
        self.queue.tell(trial, state=_failed())

    def _job(self, trial: Any) -> RecipeJob:
        (job,) = (job for job in self.jobs if job.name == trial.user_attrs["name"])
        assert isinstance(job, RecipeJob)
        return job

    def do(self, count: int) -> None:
        for _ in range(count):
            self.finish(self.take())


def _failed() -> Any:
    from optuna.trial import TrialState

    return TrialState.FAIL


@pytest.fixture
def pretended(tmp_path: Path) -> Pretended:
    return Pretended(tmp_path / "s")


@contextmanager
def serving(folder: Path) -> Iterator[LiveServer]:
    with LiveServer(LiveStudy(folder)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server: LiveServer, path: str = "/", host: str | None = None, method: str = "GET") -> Any:
    """A request, and its answer with its text."""
    port = server.server_address[1]
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.putrequest(method, path, skip_host=True)
        if host != "":
            connection.putheader("Host", host or f"127.0.0.1:{port}")
        connection.endheaders()
        answer = connection.getresponse()
        return answer, answer.read().decode()


# Where the runs are -------------------------------------------------------------------------------


def test_where_every_run_is(pretended):
    finished, running, failed, killed = (pretended.take() for _ in range(4))
    pretended.finish(finished)
    pretended.fail(failed, "RuntimeError: no\nmore lines")
    for trial in (running, killed):
        pretended.queue._storage.record_heartbeat(trial._trial_id)
    with sqlite3.connect(pretended.folder / "jobs.db") as database:
        old = "update trial_heartbeats set heartbeat = '2020-01-01' where trial_id = ?"
        database.execute(old, (killed._trial_id,))
    before = {path: path.stat().st_mtime_ns for path in pretended.folder.rglob("*")}
    states = QueueReader(pretended.folder, "").states()
    assert {path: path.stat().st_mtime_ns for path in pretended.folder.rglob("*")} == before
    where = {name: (run.state, run.done, run.note) for name, run in states.items()}
    names = [job.name for job in pretended.jobs]
    assert list(where) == names[:12]
    assert where.pop(names[0]) == ("finished", 1.0, "")
    assert where.pop(names[1]) == ("running", pytest.approx(1 / 3), "")
    assert where.pop(names[2]) == ("failed", pytest.approx(1 / 3), "RuntimeError: no\nmore lines")
    assert where.pop(names[3]) == ("waiting", pytest.approx(1 / 3), "")  # its worker is dead
    assert set(where.values()) == {("waiting", 0.0, "")}


def test_the_end_of_what_a_running_program_writes(pretended):
    trial = pretended.take()
    output = pretended.folder / trial.user_attrs["name"] / "output.txt"
    output.write_text("".join(f"step {step}\n" for step in range(10_000)) + "step 10")
    (note,) = (r.note for r in QueueReader(pretended.folder, "").states().values() if r.note)
    assert note.startswith("step 9")
    assert note.endswith("step 9999\nstep 10")
    assert len(note) < 2000


def test_no_queue_and_half_a_queue(tmp_path):
    assert QueueReader(tmp_path, "").states() == {}
    (tmp_path / "jobs.db").write_bytes(b"")  # made by another process a moment ago
    assert QueueReader(tmp_path, "").states() == {}
    assert (tmp_path / "jobs.db").read_bytes() == b""


# The page -----------------------------------------------------------------------------------------


def test_the_verdict_is_provisional_until_the_study_is_finished(pretended):
    live = LiveStudy(pretended.folder)
    progress = live.progress()
    assert progress["state"] == "idle"
    assert (
        "0 of 12 runs in the queue are finished, 12 waiting. No run is in progress"
        in (progress["sentence"])
    )
    pretended.do(5)
    trial = pretended.take()
    progress = live.progress()
    assert (progress["state"], progress["finished"], progress["total"]) == ("running", 5, 12)
    counts = r"5 of 12 runs in the queue are finished, 1 running, 6 waiting, about \d+ s left"
    assert re.match(counts, progress["sentence"])
    (study,) = live.data()["studies"]
    assert "The probability of a false verdict is 5% only at the planned looks, at 6 and 8 runs " \
        "per arm. Do not stop the study" in study["provisional"]  # fmt: skip
    assert study["headline"] == "Here pgt is not settled."
    assert "2 of 6 runs are finished" in study["comparisons"][0]["sentence"]
    states = {run["status"] for run in study["runs"]}
    assert states == {"finished", "running", "waiting", "planned"}
    assert not any("missing" in note or "unfinished" in note for note in study["notes"])
    pretended.finish(trial)
    pretended.do(6)
    assert live.progress()["state"] == "finished"  # settled at the first look: 8 are not needed
    data = live.data()
    assert data["studies"][0]["provisional"] is None
    assert data["studies"][0]["headline"] == "Here pgt is better than baseline."
    Results.load(pretended.folder).save(pretended.folder)
    (plain,) = collect([pretended.folder])["studies"]  # what report.html shows
    (study,) = live.data()["studies"]
    assert as_json(study) == as_json(plain)


def test_a_fixed_number_of_runs(tmp_path):
    pretended = Pretended(tmp_path / "s", looks=(2,))
    live = LiveStudy(pretended.folder)
    (study,) = live.data()["studies"]
    assert "only once all 2 runs of every arm are finished" in study["provisional"]
    pretended.do(3)
    assert live.progress()["state"] == "idle"
    pretended.do(1)
    assert live.progress()["state"] == "finished"


def test_the_version_changes_when_there_is_something_to_show(pretended):
    live = LiveStudy(pretended.folder)
    versions = [live.progress()["version"]]
    trial = pretended.take()
    assert live.progress()["version"] == versions[0]  # progress is sent every time
    pretended.finish(trial)
    versions.append(live.progress()["version"])
    pretended.fail(pretended.take(), "no")
    versions.append(live.progress()["version"])
    Results.load(pretended.folder).comparable()
    (pretended.folder / "study.json").write_text("{}")
    versions.append(live.progress()["version"])
    assert len(set(versions)) == 4
    assert versions[-1] == live.progress()["version"]


# The server ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """That of a study in which nothing happens."""
    pretended = Pretended(tmp_path_factory.mktemp("served") / "s")
    with serving(pretended.folder) as server:
        yield server


def test_what_the_server_answers(pretended):
    pretended.do(3)
    with serving(pretended.folder) as server:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", server.url)
        answer, page = ask(server)
        assert (answer.status, answer.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert answer.headers["Content-Security-Policy"] == "frame-ancestors 'none'"
        assert answer.headers["Cache-Control"] == "no-store"
        (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', page)
        directives = dict(part.split(" ", 1) for part in policy.split("; "))
        assert directives["default-src"] == "'none'"
        assert directives["connect-src"] == "'self'"
        assert "unsafe" not in policy
        answer, text = ask(server, "/data.json")
        assert json.loads(text)["live"] == json.loads(ask(server, "/progress.json")[1])
        assert answer.headers["Content-Type"].startswith("application/json")
        answer, text = ask(server, method="HEAD")
        assert (answer.status, text) == (200, "")


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("localhost:9000", 200), ("127.0.0.1", 200)]
    + [(host, 403) for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example")]
    + [(host, 403) for host in ("", "[::1]:80", "localhost.", "127.0.0.2:80")],
)
def test_only_this_machine_may_ask(server, host, status):
    """A page elsewhere whose name leads to 127.0.0.1 sends that name; a tunnel, another port."""
    for path in ("/", "/progress.json"):
        assert ask(server, path, host)[0].status == status


@pytest.mark.parametrize(
    "path", ["/study.yaml", "/../s/study.yaml", "/?x=1", "/data.json/", "http://evil/", "*"]
)
def test_no_other_path(server, path):
    answer, text = ask(server, path)
    assert (answer.status, "study.yaml" in text) == (404, False)
    assert ask(server, "/", method="POST")[0].status == 501


def test_half_written_files(pretended):
    pretended.do(12)
    Results.load(pretended.folder).save(pretended.folder)
    run = pretended.folder / pretended.jobs[0].name
    with serving(pretended.folder) as server:
        for path in (run / "result.json", run / "metrics.csv", run / "config.yaml",
                     run / "environment.json", pretended.folder / "study.json"):  # fmt: skip
            whole = path.read_bytes()
            path.write_bytes(whole[: len(whole) // 2])
            assert ask(server)[0].status == 200, path
            assert ask(server, "/progress.json")[0].status == 200, path
            path.write_bytes(whole)
        path = pretended.folder / "study.yaml"
        whole = path.read_bytes()
        path.write_bytes(b"kind: [")
        answer, text = ask(server)
        assert (answer.status, answer.headers["Refresh"]) == (503, "2")
        assert "to hold a study" in text
        path.write_bytes(whole)
        assert ask(server)[0].status == 200


# The command --------------------------------------------------------------------------------------


def test_the_command(pretended):
    command = [sys.executable, "-m", "powergrad", "watch", str(pretended.folder), "--no-open"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    port = int(re.findall(r"http://127\.0\.0\.1:(\d+)/", line)[0])
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", "/progress.json")
        assert json.loads(connection.getresponse().read())["total"] == 12
    taken = powergrad_cli.main(["watch", str(pretended.folder), "--port", str(port), "--no-open"])
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out.strip(), err) == (0, "", "")
    assert taken == 2


@pytest.mark.parametrize("made", [None, "folder", "run", "table", "file"])
def test_a_folder_that_is_no_study(tmp_path, capsys, made):
    folder = tmp_path / "x"
    if made in ("folder", "run", "table"):
        folder.mkdir()
    if made == "run":
        with Run(folder).open(RECIPE):
            pass
    if made == "table":
        (folder / "study.json").write_text("{}")
    if made == "file":
        folder.write_text("x")
    assert powergrad_cli.main(["watch", str(folder), "--no-open"]) == 2
    said = capsys.readouterr().err
    assert f"Expected {str(folder)!r} to be the folder of a study, which has a study.yaml" in said
    assert powergrad_cli.main(["watch", str(folder), "--port", "70000"]) == 2
    assert "Expected --port to be from 0 to 65535, but got 70000." in capsys.readouterr().err


def test_the_arms_of_a_decomposition_are_below_its_folder(pretended, tmp_path):
    whole = tmp_path / "decompose"
    shutil.copytree(pretended.folder, whole / "arms")
    assert LiveStudy(whole).folder == whole / "arms"
    (whole / "arms" / "study.yaml").write_text("kind: [")
    with pytest.raises(RunError, match="to hold a study"):
        LiveStudy(whole)
