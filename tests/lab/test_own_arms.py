"""Any change of any program: arms of flags, git refs, variables and commands, in a repository.

References: what the program prints, and what git says.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_study import run_of
from studies import is_alive, powergrad, wait_for

from powergrad.lab.runs.code import imported_files
from powergrad.lab.study import load_study
from powergrad.lab.study.saving import FILE

# A program in a subfolder of its repository, without torch. Its "training" draws from a normal
# distribution, whose mean and duration are those of the imported module.
TRAIN = """
import argparse, os, random, sys, time
import model
from tools.log import log

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=int(os.environ.get("SEED", "0")))
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--config")
parser.add_argument("--out")
args = parser.parse_args()
assert "torch" not in sys.modules
gain = float(os.environ.get("GAIN", "0"))
gain += float(open(args.config).read()) if args.config else 0
draw = random.Random(str((args.seed, args.width, gain, model.NAME)))
for _ in range(3):
    time.sleep(model.SECONDS / 3)
    log(f"accuracy {model.MEAN + gain + draw.gauss(0, 0.3):.4f}")
if args.out:
    open(os.path.join(args.out, "place"), "w").write(os.getcwd())
"""
MODEL = 'NAME, MEAN, SECONDS = "{}", {}, {}\n'
BRANCHES = {"good": (92, 0.0), "same": (90, 0.0), "bad": (88, 0.0), "fast": (90, 0.0)}
METRIC = ("--metric-regex", r"accuracy (\S+)", "--margin", 1)


def git(*arguments: object) -> str:
    command = ["git", "-c", "user.name=x", "-c", "user.email=x@x", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def write_model(name: str, mean: float, seconds: float = 0.0) -> None:
    Path("model.py").write_text(MODEL.format(name, mean, seconds))


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder is `work/` of a repository with a branch for each of `BRANCHES`."""
    folder = tmp_path / "repository" / "work"
    (folder / "tools").mkdir(parents=True)
    monkeypatch.chdir(folder)
    Path("train.py").write_text(TRAIN)
    Path("tools/log.py").write_text("def log(text):\n    print(text, flush=True)\n")
    Path(".gitignore").write_text("__pycache__\nruns\n")
    Path("notes.py").write_text("# not imported\n")
    write_model("main", 90, 0.2)
    git("init", "--initial-branch=main", "..")
    for branch, settings in {"main": (90, 0.2), **BRANCHES}.items():
        if branch != "main":
            git("checkout", "-b", branch, "main")
        write_model(branch, *settings)
        git("add", ".")
        git("commit", "-m", branch)
    git("checkout", "main")
    return folder


def compare(
    *tokens: object, seeds: object = 2, seeded: tuple[str, ...] = ("--seed", "{seed}")
) -> int:
    options = (*METRIC, "--seeds", seeds, "--out", "runs", "--name", "s", *tokens)
    return powergrad("compare", *options, "--", sys.executable, "train.py", *seeded)


def results() -> Any:
    return load_study(Path("runs/s"))


def runs() -> set[str]:
    return {path.parent.name for path in Path("runs/s").glob("*/result.json")}


def test_branches_get_the_verdicts_of_their_distributions(in_process, repository, capsys):
    arms = [token for name in BRANCHES for token in ("--arm", f"{name}: @{name}")]
    before = git("status", "--porcelain"), git("worktree", "list"), git("for-each-ref")
    assert compare(*arms, seeds="8,16") == 0
    verdicts = {c.arm: c.verdict for c in results().comparisons}
    expected = {"good": "better", "same": "equivalent", "bad": "worse", "fast": "equivalent"}
    assert verdicts == expected  # and no arm `pgt`
    times = {arm: min(results().values(arm, "seconds").values()) for arm in ("baseline", "fast")}
    assert times["fast"] < times["baseline"]  # without the time of the checkout
    for row in results().rows:
        branch = "main" if row.arm == "baseline" else row.arm
        assert row.commit == git("rev-parse", branch)[:12]
    assert (git("status", "--porcelain"), git("worktree", "list"), git("for-each-ref")) == before
    assert not list(Path("runs").rglob("train.py"))


def test_arms_of_every_kind(in_process, repository):
    Path("other.py").write_text("import sys; print('accuracy', 7 + int(sys.argv[1]))")
    arms = {
        "wide": "--width 64",
        "new": "@good",
        "gain": "GAIN=3",
        "other": "-- python other.py {seed}".replace("python", sys.executable),
        "all": "@good GAIN=3 --width 64",
    }
    tokens = [token for name, text in arms.items() for token in ("--arm", f"{name}: {text}")]
    assert compare(*tokens, seeded=("--seed", "{seed}", "--out", "{out}")) == 0

    def printed(arm: str, *command: str, **variables: str) -> None:
        (row,) = (row for row in results().rows if (row.arm, row.seed) == (arm, 1))
        script = [sys.executable, *(command or ["train.py", "--seed", "1"])]
        done = subprocess.run(
            script, check=True, capture_output=True, text=True, env={**os.environ, **variables}
        )
        assert row.metrics["accuracy"] == float(done.stdout.split()[-1])

    printed("baseline")
    printed("wide", "train.py", "--seed", "1", "--width", "64")
    printed("gain", GAIN="3")
    printed("other", "other.py", "1")
    git("checkout", "good")
    printed("new")
    printed("all", "train.py", "--seed", "1", "--width", "64", GAIN="3")
    place = Path((run_of(Path("runs/s"), "new", 1) / "out/place").read_text())
    assert place.name == "work"  # the same subfolder, of the checkout
    assert place != repository


def test_changed_files_are_noticed_and_unused_ones_do_not_matter(in_process, repository, capsys):
    Path("config.txt").write_text("0.5")
    tokens = ("--arm", "config: --config config.txt", "--arm", "new: @good")
    assert compare(*tokens) == 0
    first = runs()
    Path("notes.py").write_text("# changed, and not imported\n")
    capsys.readouterr()
    assert compare(*tokens) == 0
    assert runs() == first
    assert "changed since" not in capsys.readouterr().err

    def repeated() -> set[str]:
        """The arms whose runs are repeated."""
        before = runs()
        assert compare(*tokens) == 0
        return {name.partition("-seed")[0] for name in runs() - before}

    Path("config.txt").write_text("25")  # a file that is only named in an argument
    assert repeated() == {"config"}
    assert "config.txt has changed" in capsys.readouterr().err
    Path("tools/log.py").write_text("def log(text):\n    print(text + ' ', flush=True)\n")
    assert repeated() == {"config", "baseline"}
    assert "log.py has changed" in capsys.readouterr().err
    git("stash")
    git("checkout", "good")
    write_model("good", 95)
    git("commit", "-am", "better still")
    git("checkout", "main")
    git("stash", "pop")
    assert repeated() == {"new"}
    assert "@good has changed" in capsys.readouterr().err
    assert results().mean("new") > 94


def test_uncommitted_changes_are_part_of_the_baseline_and_recorded(in_process, repository):
    write_model("main", 80)
    assert compare("--arm", "committed: @HEAD") == 0
    assert results().mean("baseline") < 82
    assert results().mean("committed") > 88
    (dirty, clean) = (run_of(Path("runs/s"), arm, 1) for arm in ("baseline", "committed"))
    assert json.loads((dirty / "environment.json").read_text())["commit"].endswith("-dirty")
    assert "+NAME, MEAN, SECONDS" in (dirty / "uncommitted.diff").read_text()
    commit = json.loads((clean / "environment.json").read_text())["commit"]
    assert commit == git("rev-parse", "HEAD")[:12]
    assert not (clean / "uncommitted.diff").exists()


def test_earlier_runs_are_reused_anyway_only_if_asked(in_process, repository, capsys):
    tokens = ("--arm", "wide: --width 64")
    assert compare(*tokens, seeds=6) == 0
    earlier, values = runs(), {(r.arm, r.seed): r.metrics["accuracy"] for r in results().rows}
    write_model("main", 70)
    for _ in range(2):  # the second start finds them again
        capsys.readouterr()
        assert compare(*tokens, "--reuse-anyway", seeds=6) == 0
        said = capsys.readouterr().out
        assert "12 runs of earlier code are reused" in said
        assert "not repeatable" not in said
        reused = {(row.arm, row.seed): row.metrics["accuracy"] for row in results().rows}
        assert reused == values
    assert "model.py has changed" in " ".join(json.loads(Path("runs/s", FILE).read_text())["notes"])
    assert compare(*tokens, seeds=6) == 0
    assert results().mean("wide") < 72
    assert "earlier code" not in capsys.readouterr().out
    assert len(runs() - earlier) == 12


def test_files_that_count(repository):
    files = {
        "run.py": "import a, part.b; from c import d; exec(open('e.py').read()); 'lost.py'",
        "a.py": "def late():\n    import f",
        "part/b.py": "from part import g; from .h import x",  # a folder without __init__.py
        "part/g.py": "", "part/unused.py": "", "c.py": "syntax error", "e.py": "",
        "f.py": "import a", "part/h.py": "",
        "../src/pack/__init__.py": "from .. import x", "../src/pack/computed.py": "import json",
        "d.py": "import pack.inner", "unused.py": "",
    }  # fmt: skip
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    found = {os.path.relpath(path) for path in imported_files(Path("run.py"))}
    in_part = {"part/b.py", "part/g.py", "part/h.py"}
    assert found == {"run.py", "a.py", "c.py", "e.py", "f.py", *in_part}
    found = {os.path.relpath(path) for path in imported_files("d")}
    assert found == {"d.py", "../src/pack/__init__.py", "../src/pack/computed.py"}


EDITS = """
import pathlib, sys
seed = int(sys.argv[1])
if seed == 2 and not pathlib.Path("edited").exists():
    pathlib.Path("edited").touch()
    with open("model.py", "a") as file: file.write("# edited\\n")
import model
print("accuracy", 90 + seed / 10)
"""


def test_code_that_changes_during_a_study_stops_it(in_process, repository, capsys):
    Path("train.py").write_text(EDITS)
    assert compare("--arm", "b: b", seeds=6, seeded=("{seed}",)) == 2
    assert "model.py changed during the study" in capsys.readouterr().err
    kept = runs()
    assert not any("seed2" in name for name in kept)  # the run that mixes both versions
    assert compare("--arm", "b: b", seeds=6, seeded=("{seed}",)) == 0
    assert len(runs() - kept) == 12


@pytest.mark.parametrize(
    ("arm", "words"),
    [
        ("new: @goood", "'good'"),
        ("new: @gone", "@gone"),
        ("new: @good GAIN=3 --width {widht}", "{widht}"),
        ("new: @good -- python lost.py {seed}", "no such file"),
        ("new: @good -- python HERE/train.py {seed}", "relative to the current folder"),
        ("a: @good --x}", "braces"),
        ("a: -- lost {seed}", "'lost'"),
    ],
)
def test_impossible_arms_are_refused_before_any_run(repository, capsys, arm, words):
    git("branch", "-D", "fast")
    arm = arm.replace("HERE", str(repository)).replace("-- python", f"-- {sys.executable}")
    assert compare("--arm", arm) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not Path("runs").exists()


def test_two_arms_of_one_commit_are_the_same(repository, capsys):
    git("branch", "twin", "good")
    assert compare("--arm", "a: @good", "--arm", "b: @twin") == 2
    assert "'a' and 'b' are the same" in capsys.readouterr().err


def test_deleted_branch_is_named_and_its_commit_still_works(in_process, repository, capsys):
    commit = git("rev-parse", "good")
    assert compare("--arm", "new: @good") == 0
    git("branch", "-D", "good")
    for tokens in (("--arm", "new: @good"), ("--arm", "wide: --width 9")):  # it is in study.json
        assert compare(*tokens) == 2
        assert "@good" in capsys.readouterr().err
    shutil.rmtree("runs")
    assert compare("--arm", f"new: @{commit}") == 0


def test_installed_project_does_not_shadow_the_checkout(in_process, repository, monkeypatch):
    """As with an editable install, the user's tree is in the path of the program."""
    package = Path("../src/pack")
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("VALUE = 50\n")
    Path("../pyproject.toml").touch()
    Path("train.py").write_text(
        "import pack, sys; print('accuracy', pack.VALUE + int(sys.argv[1]))"
    )
    git("add", "..")
    git("commit", "-m", "package")
    (package / "__init__.py").write_text("VALUE = 60\n")
    monkeypatch.setenv("PYTHONPATH", str(package.parent.resolve()))
    assert compare("--arm", "new: @HEAD", seeded=("{seed}",)) == 0
    assert (results().mean("baseline"), results().mean("new")) == (60.5, 50.5)


# Seeds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "seeded"), [(("--seed-env", "SEED"), ()), ((), ("--seed", "{seed}"))]
)
def test_seed_reaches_the_program(in_process, repository, option, seeded):
    assert compare("--arm", "wide: --width 64", *option, seeded=seeded, seeds=3) == 0
    found = {row.seed: row.metrics["accuracy"] for row in results().of_arm("baseline")}
    assert len(set(found.values())) == 3
    environment = {**os.environ, "SEED": "2"}
    done = subprocess.run([sys.executable, "train.py"], capture_output=True, env=environment)
    assert found[2] == float(done.stdout.split()[-1])


def test_unseeded_program_differs_by_itself(in_process, repository, capsys):
    Path("train.py").write_text("import random; print('accuracy', 90 + random.gauss(0, 0.1))")
    assert compare("--arm", "b: b", "--unseeded", seeds=6, seeded=()) == 0
    assert results().comparisons[0].verdict == "equivalent"
    said = capsys.readouterr().out
    assert "not repeatable" not in said
    assert "same seed" not in said


CONSTANT = """
import sys, torch
torch.manual_seed(1337)
print("accuracy", 90 + torch.rand(1).item(), "torch", len(sys.argv))
"""


@pytest.mark.studies
def test_constant_seed_of_a_program_is_shifted(in_process, repository):
    Path("train.py").write_text(CONSTANT)
    assert compare("--arm", "b: b", "--seed-all", seeds=2, seeded=()) == 0
    found = [row.metrics["accuracy"] for row in results().of_arm("baseline")]
    assert len(set(found)) == 2
    output = (run_of(Path("runs/s"), "baseline", 1) / "output.txt").read_text()
    assert "seed 1, added to torch.manual_seed(1337)" in output


# Other programs -----------------------------------------------------------------------------------

C = """
#include <stdio.h>
#include <stdlib.h>
int main(int count, char **words) {
    srand(atoi(words[1]));
    printf("accuracy %f\\n", 90 + atof(words[2]) + 0.1 * rand() / RAND_MAX);
}
"""
FOREST = """
import sys
if "torch" in sys.modules: raise SystemExit("torch was imported")
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
x, y = load_digits(return_X_y=True)
forest = RandomForestClassifier(int(sys.argv[2]), random_state=int(sys.argv[1]), max_depth=4)
print("accuracy", 100 * forest.fit(x[:900], y[:900]).score(x[900:], y[900:]))
"""


@pytest.mark.parametrize(
    "kind", ["compiled", "pipeline", pytest.param("sklearn", marks=pytest.mark.studies)]
)
def test_programs_without_torch(in_process, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    Path("forest.py").write_text(FOREST)
    Path("mean.sh").write_text("echo $1 $2 | awk '{print \"accuracy\", 90 + $2 + $1 * 5 % 7 / 7}'")
    programs = {
        "compiled": ("./mean", "{seed}"),
        "pipeline": ("sh", "mean.sh", "{seed}"),
        "sklearn": (sys.executable, "forest.py", "{seed}"),
    }
    low, high = ("1", "20") if kind == "sklearn" else ("0", "4")
    if kind == "compiled":
        if shutil.which("cc") is None:
            pytest.skip("there is no C compiler")
        Path("mean.c").write_text(C)
        subprocess.run(["cc", "mean.c", "-o", "mean"], check=True)
    arm = f"high: -- {' '.join((*programs[kind], high))}"
    status = powergrad("compare", *METRIC, "--seeds", 6, "--out", "runs", "--name", "s", "--arm",
                       arm, "--", *programs[kind], low)  # fmt: skip
    assert status == 0
    assert [c.verdict for c in results().comparisons] == ["better"]
    source = {"compiled": "mean", "pipeline": "mean.sh", "sklearn": "forest.py"}[kind]
    assert source in "".join(results().study.program.code["high"])


# Messages, and studies that end early -------------------------------------------------------------


def test_run_that_takes_too_long_fails(in_process, repository):
    slow = f"slow: -- {sys.executable} -c 'import time; time.sleep(60 + {{seed}})'"
    assert compare("--arm", slow, "--timeout", "3s", seeds=1) == 2
    (row,) = results().of_arm("slow")
    assert "--timeout 3s" in row.failed


def test_long_commands_are_shortened_in_progress(in_process, repository, capsys):
    long = [f"--x={'y' * 300}"]
    Path("train.py").write_text("print('accuracy', 90)")
    assert compare("--arm", "b: b", seeded=(*long, "{seed}")) == 0
    assert max(map(len, capsys.readouterr().err.splitlines())) < 120


def test_changed_pattern_is_refused_before_any_run(in_process, repository, capsys):
    assert compare("--arm", "b: --width 2") == 0
    before = sorted(Path("runs").rglob("*"))
    more = ("--metric-regex", "lost (.)", "--metric", "lost", "--better", "lower")
    assert compare("--arm", "b: --width 2", *more) == 2
    assert "to hold this study" in capsys.readouterr().err
    assert sorted(Path("runs").rglob("*")) == before


@pytest.mark.parametrize("scheme", ["postgresql", "tcp"])
def test_passwords_are_not_printed(repository, capsys, scheme):
    compare("--arm", "b: b", "--cluster", f"{scheme}://me:secret@127.0.0.1:1")
    said = capsys.readouterr().err
    assert "127.0.0.1" in said
    assert "secret" not in said


def start(name: str, *tokens: object) -> subprocess.Popen[str]:
    """A study with worker processes, in a process of its own."""
    options = (*METRIC, "--seeds", 6, "--workers", 2, "--out", "runs", "--name", name, *tokens)
    program = (sys.executable, "train.py", "--seed", "{seed}")
    words = ("-m", "powergrad", "compare", *options, "--", *program)
    path = Path(__file__).parents[2] / "src"
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


SLOW = "import os, time; print(os.getpid(), flush=True); time.sleep(120)"


@pytest.mark.studies
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_a_study_ends_in_a_checkout(repository, number):
    git("checkout", "-b", "slow")
    Path("train.py").write_text(SLOW)
    git("commit", "-am", "slow")
    git("checkout", "main")
    before = git("worktree", "list"), git("for-each-ref"), git("status", "--porcelain")
    study = start("s", "--arm", "slow: @slow")
    outputs = Path("runs/s").glob
    pid = int(wait_for(lambda: "".join(p.read_text() for p in outputs("slow-*/output.txt"))))
    assert is_alive(pid)
    assert list(outputs("slow-*/code"))
    study.send_signal(number)
    said, _ = study.communicate(timeout=120)
    wait_for(lambda: not is_alive(pid))
    wait_for(lambda: not list(outputs("slow-*/code")))
    assert (git("worktree", "list"), git("for-each-ref"), git("status", "--porcelain")) == before
    if number == signal.SIGINT:
        assert study.returncode == 130
        assert "the same command continues" in said
    started = len(list(Path("runs").rglob("output.txt")))
    assert started == 3  # the first run twice, and one of the branch: not the whole queue


@pytest.mark.studies
def test_two_studies_at_once_in_one_repository(repository):
    studies = [start(name, "--arm", "good: @good", "--arm", "bad: @bad") for name in ("s", "t")]
    for study in studies:
        said, _ = study.communicate(timeout=240)
        assert study.returncode == 0, said
    for name in ("s", "t"):
        verdicts = {c.arm: c.verdict for c in load_study(Path("runs", name)).comparisons}
        assert verdicts == {"good": "better", "bad": "worse"}
    assert len(git("worktree", "list").splitlines()) == 1
