"""Several machines on one study, through a real PostgreSQL server."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

CHANGES = ["--data.limit=128", "--model.width=4", "--train.epochs=6", "--train.batch_size=32",
           "--schedule.warmup_epochs=1", "--optimizer.lr=0.05"]  # fmt: skip


def find_binary(name):
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return shutil.which(name, path=os.pathsep.join([os.environ["PATH"], *map(str, places)]))


@pytest.fixture(scope="module")
def database():
    """The URL of a server on a socket of its own; it does not run as root."""
    initdb, postgres = find_binary("initdb"), find_binary("postgres")
    if not initdb or not postgres:
        pytest.skip("PostgreSQL's initdb and postgres are not installed")
    pytest.importorskip("psycopg")
    user = "nobody" if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="pg"))  # a socket's path must be short
    if user:
        shutil.chown(folder, user)
    environment = {**os.environ, "LC_ALL": "C"}
    made = subprocess.run(
        [initdb, "-D", folder / "data", "-U", "lab", "--auth=trust", "--no-sync", "-E", "UTF8"],
        user=user, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    server = subprocess.Popen(
        [postgres, "-D", folder / "data", "-k", folder, "-c", "listen_addresses="],
        user=user, env=environment, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_for(folder / ".s.PGSQL.5432")
        yield f"postgresql://lab@/postgres?host={folder}"
    finally:
        server.terminate()
        server.wait(timeout=30)
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(path):
    import time

    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.1)
    time.sleep(0.5)


@pytest.mark.studies
def test_two_machines_share_a_sweep(database, tmp_path):
    """Two commands with folders of their own: each run is done once, both know all results."""
    command = [sys.executable, "-m", "powergrad", "sweep", "digits", *CHANGES,
               "--grid", "alpha=1,0.5", "--seeds", "3", "--workers", "1",
               "--storage", database, "--name", "shared"]  # fmt: skip
    machines = [
        subprocess.Popen(
            [*command, "--out", str(tmp_path / name)], stderr=subprocess.PIPE, text=True
        )
        for name in ("one", "two")
    ]
    said = [machine.communicate(timeout=300)[1] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], said
    done = [sorted(f.parent.name for f in (tmp_path / name / "shared").glob("*/result.json"))
            for name in ("one", "two")]  # fmt: skip
    assert len(done[0]) + len(done[1]) == 6
    assert len(set(done[0] + done[1])) == 6
    told = [json.loads((tmp_path / n / "shared/study.json").read_text()) for n in ("one", "two")]
    for part in ("comparisons", "verdict", "notes"):
        assert told[0][part] == told[1][part]
    assert len(told[0]["rows"]) == 6
    for one, two in zip(told[0]["rows"], told[1]["rows"], strict=True):
        assert [one.pop("elsewhere", False), two.pop("elsewhere", False)].count(True) == 1
        for row in (one, two):
            row.pop("commit", None)  # only the machine that has the run's folder knows it
        assert one == two


@pytest.mark.deep
def test_two_machines_share_the_runs_of_a_program(database, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import random, sys, time\ntime.sleep(0.5)\n"
        "print('accuracy', random.Random(sys.argv[1]).gauss(90, 1) + len(sys.argv))\n"
    )
    command = [sys.executable, "-m", "powergrad", "compare", "--arms", "baseline",
               "--arm", "other: more", "--seeds", "3", "--workers", "1", "--metric-regex",
               "accuracy (.+)", "--storage", database, "--name", "program"]  # fmt: skip
    machines = [
        subprocess.Popen(
            [*command, "--out", str(tmp_path / name), "--", sys.executable, str(script), "{seed}"],
            stderr=subprocess.PIPE, text=True,
        )
        for name in ("one", "two")
    ]  # fmt: skip
    said = [machine.communicate(timeout=300)[1] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], said
    folders = [tmp_path / name / "program" for name in ("one", "two")]
    done = [[file.parent.name for file in folder.glob("*/result.json")] for folder in folders]
    assert len(set(done[0]) | set(done[1])) == len(done[0]) + len(done[1]) == 6
    assert done[0]
    assert done[1]
    studies = [json.loads((folder / "study.json").read_text()) for folder in folders]
    assert studies[0]["comparisons"] == studies[1]["comparisons"]
    assert studies[0]["comparisons"][0]["difference"] == pytest.approx(1)
    assert [len(study["rows"]) for study in studies] == [6, 6]


def test_a_server_that_is_not_there(tmp_path):
    nowhere = "postgresql://lab@/none?host=/nowhere"
    command = [sys.executable, "-m", "powergrad", "sweep", "digits", *CHANGES, "--seeds", "2",
               "--storage", nowhere, "--out", str(tmp_path)]  # fmt: skip
    pytest.importorskip("psycopg")
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == 2
    assert "Expected to reach the storage" in found.stderr
    assert "Traceback" not in found.stderr
