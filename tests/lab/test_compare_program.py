"""``powergrad compare -- python train.py --seed {seed}``: somebody's own program, unchanged.

References: the program with its changes written in by hand, run without powergrad; ``compare
--from`` on the same numbers; the files that the programs themselves write.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from forking import Interpreter

import powergrad_cli
from powergrad.lab.cli.studies import StudyOptions
from powergrad.lab.jobs import CommandJob, CommandProgram, RunFailed, RunsFailed, process
from powergrad.lab.jobs.command import _Parts, placeholders
from powergrad.lab.jobs.devices import visible_devices
from powergrad.lab.jobs.queue import JobQueue
from powergrad.lab.jobs.sources import Missing, Sources
from powergrad.lab.report.collect import collect
from powergrad.lab.signals import Interrupted
from powergrad.lab.stats import Design
from powergrad.lab.study import Results, Study
from powergrad.lab.study.arms import command_arms, head_exponent
from powergrad.lab.study.first import announce
from powergrad.lab.trainer.recipe import RecipeError

FOREIGN = Path(__file__).parents[1] / "foreign_train.py"
ACCURACY = r"accuracy ([\d.]+)"


@pytest.fixture(scope="module")
def python():
    interpreter = Interpreter()
    yield interpreter
    interpreter.close()


def powergrad(*tokens: object) -> int:
    return powergrad_cli.main([str(token) for token in tokens])


@pytest.fixture
def in_process(monkeypatch):
    """Runs are started here, one after another; the queue and its workers have a test below."""
    done: list[str] = []

    def run(queue, jobs, watch=None):
        results, failed = {}, {}
        for job in jobs:
            if job.result(queue.folder) is None:
                done.append(job.name)
            try:
                results[job.name] = job.execute(queue.folder)
            except RunFailed as error:
                if error.stops:
                    raise
                failed[job.name] = str(error)
        if failed:
            raise RunsFailed(failed, results)
        return results

    monkeypatch.setattr(JobQueue, "run", run)
    return done


def script(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text("import json, os, sys, random\nseed = int(sys.argv[1])\n" + text)
    return path


def saved(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "study.json").read_text())


def run_folder(study: Path, arm: str, seed: int) -> Path:
    (found,) = study.glob(f"{arm}-seed{seed}-*")
    return found


# A foreign script, with workers -------------------------------------------------------------------


def kill_a_worker(folder: Path, killed: list[int]) -> None:
    """Kill a worker in the middle of one of its runs: the parent of that program."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not killed:
        for path in folder.glob("*-seed[1-9]*/output.txt"):
            report = os.fsencode(f"POWERGRAD_REPORT={path.resolve().with_name('report.json')}")
            for place in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    if not killed and report in (place / "environ").read_bytes().split(b"\0"):
                        kill_parent(int(place.name), killed)
        time.sleep(0.01)


def kill_parent(program: int, killed: list[int]) -> None:
    """Kill the worker of a program, which is stopped meanwhile, so that it does not end first."""
    os.kill(program, signal.SIGSTOP)
    try:
        status = Path(f"/proc/{program}/status").read_text()
        parent = int(re.findall(r"PPid:\s+(\d+)", status)[0])
        if b"powergrad.lab.jobs.worker" in Path(f"/proc/{parent}/cmdline").read_bytes():
            os.kill(parent, signal.SIGKILL)
            killed.append(parent)
    finally:
        os.kill(program, signal.SIGCONT)


@pytest.fixture(scope="module")
def study(python, tmp_path_factory):
    """3 arms x 8 seeds of the foreign script, with a worker killed in the middle."""
    out = tmp_path_factory.mktemp("runs")
    folder = out / f"foreign-{random.getrandbits(64):x}"
    killed: list[int] = []
    killer = threading.Thread(target=kill_a_worker, args=(folder, killed))
    killer.start()
    status = powergrad(
        "compare", "--arms", "baseline,pgt,head-lr", "--alpha", 0.3, "--seeds", 8, "--metric-regex",
        ACCURACY, "--workers", 2, "--out", out, "--name", folder.name, "--",
        python.path, FOREIGN, "--seed", "{seed}", "--save", "{out}/weights.pt",
    )  # fmt: skip
    killer.join()
    assert status == 0
    assert len(killed) == 1
    return folder


@pytest.mark.studies
def test_every_run_is_done_exactly_once(study):
    with sqlite3.connect(study / "jobs.db") as database:
        rows = database.execute(
            "select t.state, a.value_json from trials t join trial_user_attributes a "
            "using (trial_id) where a.key = 'name'"
        ).fetchall()
    complete = sorted(json.loads(name) for state, name in rows if state == "COMPLETE")
    assert len(complete) == len(set(complete)) == 3 * 8 + 1  # and the first one again
    with open(study / "study.csv") as file:
        runs = [(row["arm"], int(row["seed"])) for row in csv.DictReader(file)]
    assert sorted(runs) == sorted((a, s) for a in ("baseline", "pgt", "head-lr") for s in range(8))


@pytest.mark.studies
def test_the_numbers_are_those_that_the_script_prints(study):
    for row in saved(study)["rows"]:
        printed = (study / row["run"] / "output.txt").read_text()
        assert f"accuracy {row['accuracy']:.2f}\n" in printed
        assert row["first_loss"] > 0
    losses = {(row["arm"], row["seed"]): row["first_loss"] for row in saved(study)["rows"]}
    assert len(set(losses.values())) == 8  # one per seed, whatever the arm


@pytest.mark.studies
def test_the_verdict_is_that_of_the_same_numbers_in_a_table(study, capsys):
    told = saved(study)
    table = Results.from_csv(study / "study.csv", metric="accuracy")
    assert [c.to_dict() for c in table.comparisons] == told["comparisons"]
    assert powergrad("compare", "--from", study / "study.csv", "--metric", "accuracy") == 0
    said = capsys.readouterr().out
    for comparison in told["comparisons"]:
        assert comparison["n"] == 8
        assert f"- {comparison['sentence']}" in said


@pytest.mark.studies
def test_a_study_of_a_program_is_read_as_it_was_written(study):
    loaded = Results.load(study)
    assert loaded.to_dict() == saved(study) | {"environment": loaded.environment}
    assert isinstance(loaded.study, Study)
    assert Study.load(study).program == loaded.study.program
    again = Results.load(study / "study.json")
    assert again.comparisons == loaded.comparisons
    assert again.repeated[0]["accuracy"] == again.repeated[1]["accuracy"]


@pytest.mark.studies
def test_the_page_has_what_a_program_has(study):
    (page,) = collect([study])["studies"]
    assert page["foreign"]
    assert page["headline"] == saved(study)["verdict"]
    assert len(page["runs"]) == 24
    assert all(run["status"] == "finished" and not run["curve"] for run in page["runs"])
    (arm,) = [arm for arm in page["arms"] if arm["name"] == "pgt"]
    assert arm["changes"] == {"--alpha": 0.3}
    values = [row["accuracy"] for row in saved(study)["rows"] if row["arm"] == "pgt"]
    assert arm["summary"]["accuracy"]["mean"] == pytest.approx(sum(values) / 8)
    assert yaml.safe_load(page["recipe"])["command"][1] == str(FOREIGN)
    assert (study / "report.html").stat().st_size > 10_000
    assert (study / "study.png").read_bytes().startswith(b"\x89PNG")


LOSS = "F.cross_entropy(network(x.double()), y)"
STEP = "scaler.step(optimizer)"
HEAD = '[{"params": model.body.parameters()}, {"params": model.fc.parameters(), "lr": %s}], lr'
BY_HAND = {
    "pgt": (LOSS, "powergrad.cross_entropy(network(x.double()), y, alpha=0.3)"),
    "head-lr": ("model.parameters(), lr", HEAD % "args.lr * 0.3**2"),
    "less-decay": ("default=0.01", "default=0.01 * 0.3"),
    "agc": (STEP, f"powergrad.adaptive_clip_grad_(model, 0.01); {STEP}"),
}


def by_hand(python: Interpreter, folder: Path, arm: str, seed: int) -> dict[str, torch.Tensor]:
    """The weights of the foreign script with an arm's change written in."""
    old, new = BY_HAND[arm]
    text = FOREIGN.read_text()
    assert text.count(old) == 1
    path = folder / f"{arm}.py"
    path.write_text(
        text.replace(old, new).replace("import torch\n", "import powergrad, torch\n", 1)
    )
    python.run(path, "--seed", seed, "--save", folder / "weights.pt")
    return torch.load(folder / "weights.pt", weights_only=True)


def largest_difference(run: Path, expected: dict[str, torch.Tensor]) -> float:
    weights = torch.load(run / "out" / "weights.pt", weights_only=True)
    assert weights.keys() == expected.keys()
    assert all(weight.dtype == torch.float64 for weight in weights.values())
    return max(float((weights[name] - expected[name]).abs().max()) for name in expected)


@pytest.mark.studies
@pytest.mark.parametrize("arm", ["pgt", "head-lr"])
def test_an_arm_is_the_script_with_the_change_written_in(study, python, tmp_path, arm):
    expected = by_hand(python, tmp_path, arm, 3)
    assert largest_difference(run_folder(study, arm, 3), expected) <= 1e-14
    assert largest_difference(run_folder(study, "baseline", 3), expected) > 1e-4


@pytest.mark.studies
def test_decay_and_clipping_are_those_written_in(python, in_process, tmp_path):
    status = powergrad(
        "compare", "--arms", "baseline,less-decay,agc", "--alpha", 0.3, "--seeds", 2,
        "--metric-regex", ACCURACY, "--out", tmp_path, "--name", "s", "--",
        python.path, FOREIGN, "--seed", "{seed}", "--save", "{out}/weights.pt",
    )  # fmt: skip
    assert status == 0
    for arm in ("less-decay", "agc"):
        expected = by_hand(python, tmp_path, arm, 1)
        assert largest_difference(run_folder(tmp_path / "s", arm, 1), expected) <= 1e-14
        assert largest_difference(run_folder(tmp_path / "s", "baseline", 1), expected) > 1e-6


# Nothing is compared that was not altered ---------------------------------------------------------

NO_LOSS = """
import torch
weight = torch.nn.Parameter(torch.zeros(3))
optimizer = torch.optim.SGD([weight], 0.1)
((weight - seed) ** 2).sum().backward()
optimizer.step()
print("accuracy", random.Random(seed).random())
"""
OWN_KERNEL = """
import torch
class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, y):
        p = z.detach().exp() / z.detach().exp().sum(1, keepdim=True)
        ctx.p, ctx.y = p, y
        return -p[range(len(y)), y].log().mean()
    @staticmethod
    def backward(ctx, grad):
        return grad * (ctx.p - torch.eye(3)[ctx.y]) / len(ctx.y), None
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
Loss.apply(model(torch.randn(8, 4)), torch.randint(0, 3, (8,))).backward()
optimizer.step()
print("accuracy", random.Random(seed).random())
"""
NO_OPTIMIZER = """
import torch
model = torch.nn.Linear(4, 3)
loss = torch.nn.functional.cross_entropy(model(torch.randn(8, 4)), torch.randint(0, 3, (8,)))
loss.backward()
with torch.no_grad():
    for p in model.parameters(): p -= 0.1 * p.grad
print("accuracy", random.Random(seed).random())
"""


@pytest.mark.parametrize(
    ("text", "arm", "message"),
    [
        (NO_LOSS, "pgt", "--alpha 0.25 altered nothing: no cross-entropy"),
        (OWN_KERNEL, "pgt", "Its first backward pass began at LossBackward"),
        (NO_OPTIMIZER, "agc", "--agc changed nothing: no torch.optim.Optimizer"),
        (NO_OPTIMIZER, "less-decay", "--decay-scale changed nothing: no torch.optim"),
        (NO_LOSS, "less-decay", "--decay-scale changed nothing: no optimizer has a weight decay"),
        ("print('accuracy', 1); os._exit(0)", "pgt", "not known whether it was altered"),
    ],
)
def test_a_program_that_was_not_altered_gets_no_verdict(
    python, in_process, tmp_path, capsys, text, arm, message
):
    path = script(tmp_path, text)
    status = powergrad("compare", "--arms", f"baseline,{arm}", "--seeds", 2, "--metric-regex",
                       "accuracy (.+)", "--margin", 1, "--out", tmp_path, "--name", "s", "--",
                       python.path, path, "{seed}")  # fmt: skip
    assert status == 2
    said = capsys.readouterr()
    assert message in said.err
    assert "Here" not in said.out
    assert not (tmp_path / "s" / "study.json").exists()


@pytest.mark.parametrize(("code", "problems", "stops"), [(3, ["x"], True), (1, ["x"], True),
                                                         (3, [], None), (1, [], None)])  # fmt: skip
def test_under_torchrun_the_exit_code_is_another_one(tmp_path, code, problems, stops):
    """What stops a study is what `powergrad run` says; a program may have its exit code as well."""
    path = tmp_path / "powergrad.json"
    path.write_text(json.dumps({"problems": problems, "first_loss": 1.5, "optimizers": []}))
    job = CommandJob("run", ("torchrun",), {}, ("--alpha", "0.3"), Sources())
    if stops is None:
        assert job._check_altered(code, path)["first_loss"] == 1.5
        return
    with pytest.raises(RunFailed, match="was not altered as requested: x") as error:
        job._check_altered(code, path)
    assert error.value.stops


@pytest.mark.studies
def test_a_worker_stops_the_study_where_nothing_was_altered(python, tmp_path, capsys):
    path = script(tmp_path, NO_LOSS)
    status = powergrad("compare", "--seeds", 2, "--metric-regex", "accuracy (.+)", "--margin", 1,
                       "--out", tmp_path, "--name", "s", "--workers", 1, "--", python.path, path,
                       "{seed}")  # fmt: skip
    assert status == 2
    assert "--alpha 0.25 altered nothing" in capsys.readouterr().err
    assert not list((tmp_path / "s").glob("*-seed1-*"))


# What a program is given --------------------------------------------------------------------------


def test_arguments_reach_the_program_as_they_are(python, in_process, tmp_path, monkeypatch):
    """Spaces, quotes, braces and unicode, in arguments, flags, the script's name and the folder."""
    folder = tmp_path / "mein Ördner; $HOME"
    folder.mkdir()
    monkeypatch.chdir(folder)
    text = """
json.dump([sys.argv, os.getcwd()], open(sys.argv[2] + "/gegeben.json", "w"))
print("acc", 50 + random.Random(seed + len(sys.argv)).random())
"""
    name = "träin it's.py"
    script(folder, text, name)
    given = ["a \"b\" 'c'", "$(touch hacked)", "*", "{{lr}}", "日本語", "", "x{arm}y", "-x"]
    status = powergrad("compare", "--arms", "baseline", "--arm", "breit ü: --width '6 4' {seed}",
                       "--seeds", 2, "--metric-regex", "acc (.+)", "--out", "läufe x", "--name",
                       "s", "--", python.path, name, "{seed}", "{out}", *given)  # fmt: skip
    assert status == 0
    study = folder / "läufe x" / "s"
    for arm, place in (("baseline", "baseline"), ("breit ü", "breit-ü")):
        out = run_folder(study, place, 1) / "out"
        arguments, where = json.loads((out / "gegeben.json").read_text())
        filled = ["a \"b\" 'c'", "$(touch hacked)", "*", "{lr}", "日本語", "", f"x{arm}y", "-x"]
        flags = ["--width", "6 4", "1"] if arm != "baseline" else []
        assert arguments == [name, "1", str(out), *filled, *flags]
        assert where == str(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["läufe x", name]
    assert "läufe" not in (study / "study.yaml").read_text()


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python train.py --x 1", "python RUN train.py --x 1"),
        ("/a/python3.12 -u -W ignore t.py", "/a/python3.12 -u -W ignore RUN t.py"),
        ("python -m pkg.train -x", "python RUN -m pkg.train -x"),
        ("./train.py 1", f"{sys.executable} RUN ./train.py 1"),
        ("torchrun --nproc-per-node 2 t.py -m x", "torchrun --nproc-per-node 2 RUN t.py -m x"),
        ("torchrun --nproc-per-node 2 -m p a.py", "torchrun --nproc-per-node 2 RUN -m p a.py"),
        (
            "python -m torch.distributed.run --nnodes 1 train.py",
            "python -m torch.distributed.run --nnodes 1 RUN train.py",
        ),
        ("accelerate launch train.py", None),
        ("bash train.sh", None),
        ("python -c print(1)", None),
        ("python", None),
    ],
)  # fmt: skip
def test_how_a_command_is_altered(command, expected):
    parts = _Parts.of(command.split())
    altered = parts and " ".join(parts.altered(["--alpha", "0.3"]))
    run = "-m powergrad run --alpha 0.3 --"
    assert altered == (expected and expected.replace("RUN", run))
    assert parts is None or parts.is_distributed == ("torch" in command)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ("-- python train.py", "Expected the placeholder {seed} in the command"),
        ("-- python train.py {seed} {sede}", "or a key of --tune, but got {sede}; did you"),
        ('-- python train.py {seed} {"a":1}', "and {{ and }} for literal braces, but got '{"),
        ("-- python train.py {seed} }", "and {{ and }} for literal braces, but got '}'"),
        ("-- python train.py {seed:03d}", "Expected placeholders such as {seed}"),
        ("-- python lost.py {seed}", "Expected a script after `--`, but got 'lost.py': No such"),
        ("-- lost {seed}", "Expected a program after `--`, but got 'lost'"),
        ("-- ls {seed}", "because the arm 'pgt' alters gradients, but got 'ls {seed}'"),
        ("--arms baseline,pqt -- python train.py {seed}", "but got 'pqt'; did you mean 'pgt'?"),
        ("--arms baseline --arm x -- python train.py {seed}", "joined by +, but got 'x'"),
        ("--arms pgt,pgt -- python train.py {seed}", "different names, but got 'pgt' twice"),
        ("--arms baseline,a: -- python train.py {seed}", 'as "name: --flag value"'),
        ("--arms baseline --arm a:'x -- python train.py {seed}", "No closing quotation"),
        ("--arms pgt --arm p:pgt -- python train.py {seed}", "'pgt' and 'p', which are the same"),
        ("--metric-regex acc -- python train.py {seed}", "with one group in parentheses"),
        ("--metric-regex (.)(.) -- python train.py {seed}", "with one group in parentheses"),
        ("--metric-regex ( -- python train.py {seed}", "Expected --metric-regex to be a regular"),
        ("--metric-regex (.) -- python train.py {seed}", "name for the metric of --metric-regex"),
        ("--metric-regex foo(.) -- python train.py {seed}", "Expected --better higher or"),
        ("--metric-regex foo(.) --better lower -- python train.py {seed}", "Expected --margin"),
        ("--metric-regex seconds(.) -- python train.py {seed}", "not to be reserved, but got 'sec"),
        ("--metric-file x.json -- python train.py {seed}", "Expected --metric-file to be FILE:KEY"),
        ("--metric-file {x}.json:a -- python train.py {seed}", "but got {x}"),
        ("--tune lr=1,2 -- python train.py {seed} {lr}", "Expected --tune-metric, the metric by"),
        (
            "--tune lr=1,2 --tune-metric loss -- python train.py {seed} {lr}",
            "Expected --metric to be given and to differ from --tune-metric",
        ),
        (
            "--tune lr=1,2 --tune-metric acc --metric acc -- python train.py {seed} {lr}",
            "but got 'acc' for both",
        ),
        (
            "--tune lr=1,2 --tune-metric loss --metric acc -- python train.py {seed}",
            "Expected the placeholder {lr} in the command, because 'lr' is tuned",
        ),
        (
            "--tune lr=1 --tune-metric loss --metric acc -- python train.py {seed} {lr}",
            "several values or a range",
        ),
        (
            "--tune lr=1,2 --tune-map identity --tune-metric loss --metric acc -- python train.py "
            "{seed} {lr}",
            "Expected --tune-map none, because the optimizer of your own program is unknown",
        ),
        ("--tune-metric loss -- python train.py {seed}", "Expected --tune-metric only with --tune"),
        ("--agc 0.1 -- python train.py {seed}", "--agc only with an agc arm, but got base"),
        ("--agc 0 --arms baseline,agc -- python train.py {seed}", "`--agc` to be above 0, but got"),
        ("--agc 0.1 digits", "Expected --agc only with your own program"),
        ("--head fc digits", "Expected --head only with your own program"),
        ("digits -- python train.py {seed}", "Expected a recipe or a program, but got 'digits'"),
        ("--baseline x -- python train.py {seed}", "Expected --baseline only with --from"),
        ("--better lower digits", "Expected --better only with --from or your own program"),
        ("--budget soon -- python train.py {seed}", "--budget: Expected a time such as 90s"),
        ("--budget 1h --storage x:// -- python train.py {seed}", "but got both"),
        ("--threads 0 -- python train.py {seed}", "Expected `--threads` to be at least 1"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_any_run(tmp_path, monkeypatch, capsys, tokens, message):
    monkeypatch.chdir(tmp_path)
    script(tmp_path, "raise SystemExit('it was run')")
    monkeypatch.setattr(JobQueue, "run", lambda *_: pytest.fail("a run was started"))
    assert powergrad("compare", *tokens.split(" ")) == 2
    said = capsys.readouterr()
    assert message in " ".join((said.err + said.out).split())
    assert not (tmp_path / "runs").exists()


def test_placeholders_are_names_in_braces():
    assert placeholders(["a", "{seed}", "x={lr},{seed}", "{{no}}"]) == ["seed", "lr"]


def test_arms_are_options_of_run():
    texts = ["baseline", "agc+pgt", "less-decay", "head-lr", "gc", "w: pgt --w 1", "lr=3: lr=3"]
    arms = command_arms(texts, [0.5])
    assert arms == {
        "baseline": {},
        "agc+pgt": {"--agc": 0.01, "--alpha": 0.5},
        "less-decay": {"--decay-scale": 0.5},
        "head-lr": {"--head-lr-scale": 0.25},
        "gc": {"--clip-norm": 1.0},
        "w": {"--alpha": 0.5, "flags": ["--w", "1"]},
        "lr=3": {"flags": ["lr=3"]},
    }
    assert list(command_arms(["baseline", "pgt"], [0.1, 0.3])) == [
        "baseline",
        "pgt(0.1)",
        "pgt(0.3)",
    ]
    assert command_arms(["head-lr"], [0.5], exponent=1) == {"head-lr": {"--head-lr-scale": 0.5}}
    assert command_arms(["agc+pgt"], [0.5], agc=0.04) == {
        "agc+pgt": {"--agc": 0.04, "--alpha": 0.5}
    }


def test_pgts_ratio_of_rates_depends_on_the_optimizer():
    assert (head_exponent(["SGD", "SGD"]), head_exponent(["AdamW", "Adam"])) == (2, 1)
    for optimizers in (["Lion"], ["SGD", "Adam"], []):
        with pytest.raises(RecipeError, match="ratio of learning rates is unknown"):
            head_exponent(optimizers)


# Where metrics are --------------------------------------------------------------------------------


def job_of(path: Path, sources: Sources, python: str = sys.executable) -> CommandJob:
    """A run without ``powergrad run``, so that no torch is imported."""
    return CommandJob("run", (python, str(path), "{seed}", "{out}"), {"seed": 5}, None, sources)


def result_of(folder: Path, text: str, sources: Sources) -> dict[str, Any]:
    return job_of(script(folder, text), sources).execute(folder)


def test_a_metric_that_is_printed_a_thousand_times_counts_once(tmp_path):
    text = "for i in range(1000): print(f'step {i} acc {i / 8} loss {-i}', end='\\r')"
    result = result_of(tmp_path, text, Sources.parse([r"acc ([\d.]+)", r"loss (\S+)"], []))
    assert result["acc"] == 999 / 8
    assert result["loss"] == -999


def test_an_output_of_100_megabytes(tmp_path):
    text = """
line = "x" * 999 + "\\n"
for i in range(1000):
    sys.stdout.write(f"acc {i}\\n" + 100 * line)
sys.stderr.write("y" * 1_000_000 + "\\n")
"""
    began = time.monotonic()
    result = result_of(tmp_path, text, Sources.parse([r"^acc (\d+)$"], []))
    assert (tmp_path / "run" / "output.txt").stat().st_size > 100_000_000
    assert result["acc"] == 999
    assert time.monotonic() - began < 60
    sources = Sources.parse([r"^acc (\d+)$"], [])
    with open(tmp_path / "run" / "output.txt", "r+b") as file:
        file.truncate(
            20_000_000
        )  # which is what matters to memory, and traced allocations are slow
    tracemalloc.start()
    found = sources._matched(tmp_path / "run" / "output.txt")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found["acc"] == 199
    assert peak < 8_000_000


@pytest.mark.parametrize(
    ("text", "regexes", "files", "expected"),
    [
        ("print('val 0.5 test 0.7')", [r"val (?P<val>\S+) test (?P<test>\S+)"], [], (0.5, 0.7)),
        ("json.dump({'a': {'val': 1, 'test': [0, 2]}}, open(sys.argv[2] + '/r.json', 'w'))",
         [], ["r.json:a.val", "{out}/r.json:a.test.1"], (1, 2)),
        ("json.dump({'a.b': 3}, open(sys.argv[2] + '/r.json', 'w'))", [], ["r.json:a.b"], (3,)),
        ("open(sys.argv[2] + '/l.csv', 'w').write('e,acc\\n1,5\\n2,6.5\\n')", [], ["l.csv:acc"],
         (6.5,)),
        ("json.dump({'x': 4, 'y': 5}, open(os.environ['POWERGRAD_REPORT'], 'w')); print('acc 1')",
         ["acc (.)"], [], (1, 4, 5)),
        ("print('acc nan')", ["acc (.+)"], [], ("nan",)),
    ],
)  # fmt: skip
def test_metrics_from_the_output_a_file_or_a_report(tmp_path, text, regexes, files, expected):
    result = result_of(tmp_path, text, Sources.parse(regexes, files))
    values = [v for k, v in result.items() if k != "seconds"]
    assert sorted(map(str, map(float, values))) == sorted(str(float(v)) for v in expected)


def test_report_reaches_the_comparison(tmp_path):
    text = "from powergrad import report\nreport(accuracy=1.0)\nreport(accuracy=seed / 4, loss=2)"
    result = result_of(tmp_path, text, Sources())
    assert (result["accuracy"], result["loss"]) == (1.25, 2.0)


ACC = Sources.parse(["acc (.)"], [])
WRITE = "open(sys.argv[2] + '/%s', 'w').write('%s')"
REPORT_SEED = "json.dump({'seed': 1}, open(os.environ['POWERGRAD_REPORT'], 'w'))"


@pytest.mark.parametrize(
    ("text", "sources", "message"),
    [
        ("print('hello')", ACC, "match of --metric-regex 'acc (.)' in the output, but got none"),
        ("print('hello')", Sources(), "Expected a metric, but got none. Searched: powergrad.rep"),
        ("print('acc x')", ACC, "Expected a number from --metric-regex 'acc (.)', but got 'x'"),
        ("", Sources.parse([], ["r.json:acc"]), "r.json:acc, but got: No such file"),
        (WRITE % ("r.json", "{"), Sources.parse([], ["r.json:acc"]), "JSONDecodeError"),
        (WRITE % ("r.json", "{}"), Sources.parse([], ["r.json:a.b"]), "KeyError: 'a'"),
        (WRITE % ("r.csv", "a,b"), Sources.parse([], ["r.csv:a"]), "IndexError"),
        ("print('acc 1')", replace(ACC, wanted=("f1",)), "Expected the metric 'f1', but got 'acc'"),
        (REPORT_SEED, Sources(), "a metric not to be reserved, but got 'seed'"),
        ("print('a\\nb'); sys.exit(7)", Sources(), "exit code 7. The last lines"),
        ("os.abort()", Sources(), "ended by SIGABRT"),
    ],
)  # fmt: skip
def test_a_run_without_its_metric_failed(tmp_path, text, sources, message):
    with pytest.raises(RunFailed) as error:
        result_of(tmp_path, "print('one'); print('two', file=sys.stderr)\n" + text, sources)
    said = str(error.value)
    assert message in said
    assert "    one\n    two" in said
    assert not error.value.stops
    assert not (tmp_path / "run" / "result.json").exists()


def test_the_last_lines_are_the_last_twenty(tmp_path):
    text = "for i in range(1000): print('line', i)\nsys.stdout.write('z' * 5000)\n1 / 0"
    with pytest.raises(RunFailed) as error:
        result_of(tmp_path, text, Sources())
    lines = str(error.value).splitlines()[1:]
    assert len(lines) == 20
    assert lines[-1] == "    ZeroDivisionError: division by zero"
    assert all(len(line) < 450 for line in lines)


def test_a_metric_is_named_by_the_word_before_its_group():
    names = {
        r"acc ([\d.]+)": "acc", r"val loss: ([\d.]+)": "loss", r"Acc@1\s*=\s*(\S+)": "Acc@1",
        r"acc(?:uracy)? ([\d.]+)": "accuracy", r'"top1": (\S+)': "top1", r"(?i)f1=(\S+)": "f1",
    }  # fmt: skip
    for regex, name in names.items():
        assert Sources.parse([regex], []).names == [name]
    assert Sources.parse([r"(\S+)$"], [], "recall").names == ["recall"]
    assert Sources.parse([], ["r.json:val.acc"]).names == ["val.acc"]
    with pytest.raises(RecipeError, match="'acc' from two sources"):
        Sources.parse(["acc (.)", "(?P<acc>.)"], [])


# Failures, and what the runs show of the program --------------------------------------------------

NOISY = "print('accuracy', 90 + random.Random(f'{seed} {sys.argv[2:]}').gauss(0, 0.1))\n"


def compare_plain(folder: Path, path: Path, *tokens: object, seeds: object = 8) -> int:
    """Compare arms of flags: a shell is named, so that nothing imports torch."""
    arms = ["--arm", "b: two"] if "--arm" not in tokens else []
    return powergrad("compare", "--arms", "baseline", *arms, "--seeds", seeds, "--metric-regex",
                     "accuracy (.+)", "--margin", 0.5, "--out", folder, "--name", "s", *tokens,
                     "--", "env", sys.executable, path, "{seed}")  # fmt: skip


def test_a_run_that_fails_is_stated_and_left_out(in_process, tmp_path, capsys):
    text = "if seed == 3 and sys.argv[2:] == ['two']: sys.exit('no room')\n" + NOISY
    path = script(tmp_path, text)
    assert compare_plain(tmp_path, path) == 0
    said = capsys.readouterr().out
    assert "1 of 8 runs of b failed and do not count (seed 3): exit code 1." in said
    told = saved(tmp_path / "s")
    (comparison,) = told["comparisons"]
    assert (comparison["n"], comparison["n_baseline"], comparison["failed"]) == (7, 8, 1)
    assert comparison["verdict"] == "equivalent"  # seven are enough
    assert len([row for row in told["rows"] if "failed" in row]) == 1
    assert "no room" in next(row["failed"] for row in told["rows"] if "failed" in row)
    with open(tmp_path / "s" / "study.csv") as file:
        assert len(list(csv.DictReader(file))) == 15
    (page,) = collect([tmp_path / "s"])["studies"]
    assert [run["seed"] for run in page["runs"] if run["status"] == "failed"] == [3]
    assert page["headline"] == told["verdict"]
    in_process.clear()
    assert compare_plain(tmp_path, path) == 0  # the same command tries it again, and it alone
    assert [name.partition("-seed")[2][0] for name in in_process] == ["3"]


def test_an_arm_of_which_all_runs_fail_is_not_compared(in_process, tmp_path, capsys):
    path = script(tmp_path, "if 'bad' in sys.argv: sys.exit(5)\n" + NOISY)
    arms = ("--arm", "b: two", "--arm", "c: bad")
    assert compare_plain(tmp_path, path, *arms, seeds="6,8") == 0
    said = capsys.readouterr().out
    assert "6 of 6 runs of c failed and do not count" in said
    assert "This arm is not compared." in said
    assert [c["arm"] for c in saved(tmp_path / "s")["comparisons"]] == ["b"]
    assert not list((tmp_path / "s").glob("c-seed7-*"))


def test_a_study_of_which_all_runs_fail_is_stopped(in_process, tmp_path, capsys):
    path = script(tmp_path, "print('reading'); sys.exit('no data')")
    assert compare_plain(tmp_path, path) == 2
    said = capsys.readouterr().err
    assert "the first run failed: exit code 1. The last lines of" in said
    assert "    reading\n    no data" in said
    assert {name.rpartition("/")[2] for name in in_process} == {run_name(in_process[0])}


def run_name(name: str) -> str:
    return name.rpartition("/")[2]


def test_a_metric_that_is_not_finite_diverged(in_process, tmp_path, capsys):
    text = "if seed == 1 and len(sys.argv) > 2: print('accuracy nan'); sys.exit()\n" + NOISY
    assert compare_plain(tmp_path, script(tmp_path, text)) == 0
    said = capsys.readouterr().out
    told = saved(tmp_path / "s")
    worst = min(row["accuracy"] for row in told["rows"] if row["accuracy"] is not None)
    assert f"Diverged: 1 of 8 runs of b. A run that diverged counts as {worst:.4g}." in said
    assert told["comparisons"][0]["diverged"] == 1
    assert Results.load(tmp_path / "s").comparisons[0].diverged == 1


def test_a_program_that_does_not_use_its_seed_is_stopped_at_the_first_look(
    in_process, tmp_path, capsys
):
    path = script(tmp_path, "print('accuracy', 90 + len(sys.argv))")
    assert compare_plain(tmp_path, path, seeds="6,12") == 0
    said = capsys.readouterr().out
    assert (
        "All 6 seeds of baseline give the same accuracy (92), so your script does not use {seed}."
        in said
    )
    assert not list((tmp_path / "s").glob("*-seed6-*"))


def test_runs_that_do_not_repeat_are_said(in_process, tmp_path, capsys):
    path = script(tmp_path, "print('accuracy', 90 + random.random())")
    assert compare_plain(tmp_path, path) == 0
    assert "Runs are not repeatable: the first run gave accuracy 90." in capsys.readouterr().out
    (page,) = collect([tmp_path / "s"])["studies"]
    assert any("not repeatable" in note for note in page["notes"])
    assert compare_plain(tmp_path / "x", script(tmp_path, NOISY)) == 0
    assert "not repeatable" not in capsys.readouterr().out


@pytest.mark.studies
def test_another_first_loss_is_said(python, in_process, tmp_path, capsys):
    """An arm whose order of the data is another one: here by a flag, and by the arm itself."""
    path = tmp_path / "train.py"
    text = FOREIGN.read_text().replace('"--seed", type=int', '"--seed", type=eval')
    path.write_text(text)
    common = ["--seeds", 2, "--metric-regex", ACCURACY, "--out", tmp_path]
    status = powergrad(
        "compare", "--arms", "baseline,pgt", "--arm", "other: --seed 7+{seed}", *common, "--name",
        "s", "--", python.path, path, "--seed", "{seed}",
    )  # fmt: skip
    assert status == 0
    said = capsys.readouterr().out
    assert "The first loss of other differs from that of baseline (seed 0: " in said
    assert "its flags change the network, the data or their order." in said
    assert "The first loss of pgt" not in said
    status = powergrad("compare", "--arms", "baseline,pgt", *common, "--name", "t", "--",
                       python.path, path, "--seed", "{seed}+len('{arm}')")  # fmt: skip
    assert status == 0
    said = capsys.readouterr().out
    assert "The first loss of pgt differs from that of baseline" in said
    assert "the data order or the initialisation differs" in said


def test_the_whole_is_announced(in_process, tmp_path, capsys):
    assert compare_plain(tmp_path, script(tmp_path, NOISY), "--workers", 3, seeds=2) == 0
    said = capsys.readouterr().err
    assert re.search(
        r"^4 runs, about \d+ s with 3 at a time; Ctrl-C stops and saves.$", said, re.MULTILINE
    )
    study = Results.load(tmp_path / "s").study
    assert study is not None
    planned = replace(study, design=Design((8, 24)))
    assert announce(planned, None, 150.0, 2) == (
        "16 to 48 runs, about 20 min 00 s to 1 h 00 min with 2 at a time; Ctrl-C stops and saves."
    )


@pytest.mark.studies
def test_runs_of_a_changed_script_are_done_anew(python, in_process, tmp_path, capsys):
    path = script(tmp_path, NOISY)
    command = (
        "compare",
        "--arms",
        "baseline",
        "--arm",
        "b: two",
        "--seeds",
        2,
        "--metric-regex",
        "accuracy (.+)",
        "--out",
        tmp_path,
        "--name",
        "s",
        "--",
        python.path,
        path,
        "{seed}",
    )
    assert powergrad(*command) == 0
    assert len(in_process) == 5
    assert powergrad(*command) == 0
    assert len(in_process) == 5
    assert "changed since" not in capsys.readouterr().err
    path.write_text(path.read_text() + "# another one\n")
    assert powergrad(*command) == 0
    assert len(in_process) == 10
    assert (
        f"{path} has changed since the runs in {tmp_path / 's'} were made"
        in capsys.readouterr().err
    )
    assert len(saved(tmp_path / "s")["rows"]) == 4


def test_a_fresh_start_moves_the_earlier_runs_aside(in_process, tmp_path, capsys):
    path = script(tmp_path, NOISY)
    assert compare_plain(tmp_path, path, seeds=2) == 0
    earlier = (tmp_path / "s/study.csv").read_bytes()
    assert compare_plain(tmp_path, path, "--fresh", seeds=2) == 0
    assert len(in_process) == 10  # 2 arms x 2 seeds and one repeated, twice
    (aside,) = (folder for folder in tmp_path.glob("s*") if folder.name != "s" and folder.is_dir())
    assert (aside / "study.csv").read_bytes() == earlier
    assert str(aside) in capsys.readouterr().err


@pytest.mark.studies
def test_no_run_starts_after_the_budget(tmp_path, capsys):
    """A run takes longer than the budget; with more time the same command continues."""
    path = script(tmp_path, "import time; time.sleep(1.5)\n" + NOISY)
    assert compare_plain(tmp_path, path, "--budget", "1s", "--workers", 1, seeds=2) == 0
    said = capsys.readouterr().out
    assert "The time ran out before all runs were finished: 1 seed of b could not be run." in said
    assert len(list(tmp_path.glob("s/*/result.json"))) == 1
    assert compare_plain(tmp_path, path, "--budget", "10m", "--workers", 2, seeds=2) == 0
    said = capsys.readouterr().out
    assert "The time ran out" not in said
    assert " no interval " in said  # two runs have no interval
    assert "inf" not in said
    assert len(saved(tmp_path / "s")["rows"]) == 4


def test_tuned_keys_fill_their_placeholders(in_process, tmp_path, capsys):
    text = """
lr = float(sys.argv[2])
noise = random.Random(f"{sys.argv[1:]}").gauss(0, 0.05)
print("val_loss", abs(lr - (0.2 if sys.argv[3:] else 0.1)) + 0.001 * noise, "accuracy", 90 + noise)
json.dump(sys.argv, open(os.environ["POWERGRAD_REPORT"][:-11] + "out/argv.json", "w"))
"""
    path = script(tmp_path, text)
    status = powergrad(
        "compare", "--arms", "baseline", "--arm", "b: two", "--seeds", 6, "--metric", "accuracy",
        "--metric-regex", r"val_loss (?P<val_loss>\S+) accuracy (?P<accuracy>\S+)", "--margin", 1,
        "--tune", "lr=0.05,0.1,0.2,0.4", "--tune-metric", "val_loss", "--tune-seeds", 2, "--out",
        tmp_path, "--name", "s", "--", "env", sys.executable, path, "{seed}", "{lr}",
    )  # fmt: skip
    assert status == 0
    said = capsys.readouterr()
    assert "28 runs, about" in said.err  # 2 arms x (4 points x 2 seeds + 6 seeds)
    assert "baseline: lr 0.1 (" in said.out
    assert "b: lr 0.2 (" in said.out
    for arm, lr in (("baseline", "0.1"), ("b", "0.2")):
        argv = json.loads((run_folder(tmp_path / "s", arm, 4) / "out" / "argv.json").read_text())
        assert argv[1:3] == ["4", lr]
    loaded = Results.load(tmp_path / "s")
    assert loaded.tuning is not None
    assert loaded.tuning.metric == "val_loss"
    assert loaded.study is not None
    assert loaded.study.tuned == ("lr",)
    (page,) = collect([tmp_path / "s"])["studies"]
    assert page["tuning"]["metric"] == "val_loss"


# Processes ----------------------------------------------------------------------------------------

STUBBORN = """
import signal, subprocess, time
signal.signal(signal.SIGTERM, lambda *_: print("no", flush=True))
child = subprocess.Popen([sys.executable, "-c", "import signal, time; "
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('child', flush=True); time.sleep(99)"])
print(child.pid, flush=True)
time.sleep(99)
"""


def is_alive(pid: int) -> bool:
    try:
        return "zombie" not in (Path("/proc") / str(pid) / "status").read_text().split("\n")[2]
    except OSError:
        return False


def wait_for(condition: Any, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_program_that_ignores_sigterm_is_killed_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "PATIENCE", 0.5)
    output = tmp_path / "run" / "output.txt"

    def interrupt() -> None:
        wait_for(lambda: output.is_file() and "child" in output.read_text())
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt).start()
    with pytest.raises(Interrupted):
        result_of(tmp_path, STUBBORN, Sources())
    pid = int(next(line for line in output.read_text().split() if line.isdigit()))
    wait_for(lambda: not is_alive(pid))
    assert "no" in output.read_text().split()  # it was asked first
    assert not (tmp_path / "run" / "result.json").exists()


def test_what_a_killed_worker_left_is_ended_and_removed(tmp_path):
    """The program still runs and writes, as its worker was killed; the run is then done anew."""
    text = """
import time
if os.path.exists("WHERE/slow"):
    os.remove("WHERE/slow"); open(sys.argv[2] + "/half", "w").close()
    print(os.getpid(), flush=True)
    while True: time.sleep(0.05); open(sys.argv[2] + "/half", "a").write("x")
print("acc 3", os.listdir(sys.argv[2]))
""".replace("WHERE", str(tmp_path))
    job = job_of(script(tmp_path, text), Sources.parse(["acc (.)"], []))
    (tmp_path / "slow").touch()
    code = f"""
from pathlib import Path
from powergrad.lab.jobs import CommandJob
CommandJob.from_dict({job.to_dict()!r}).execute(Path({str(tmp_path)!r}))
"""
    worker = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    wait_for(lambda: (tmp_path / "run" / "out" / "half").exists(), 60)
    output = tmp_path / "run" / "output.txt"
    wait_for(lambda: output.read_text().strip())
    program = int(output.read_text())
    worker.kill()
    worker.wait()
    assert is_alive(program)
    assert job.execute(tmp_path)["acc"] == 3
    wait_for(lambda: not is_alive(program))
    assert output.read_text() == "acc 3 []\n"
    assert not (tmp_path / "run" / "out" / "half").exists()
    assert job.execute(tmp_path)["acc"] == 3  # it is finished, and is not run again
    assert not (tmp_path / "slow").exists()


def test_a_program_that_cannot_be_started_failed(tmp_path):
    path = tmp_path / "not executable"
    path.touch()
    job = CommandJob("run", (str(path),), {}, None, Sources())
    with pytest.raises(RunFailed, match=r"the program cannot be started: .*Permission denied"):
        job.execute(tmp_path)


def test_a_worker_has_one_gpu_where_there_are_some(monkeypatch, tmp_path):
    path = script(tmp_path, "")
    alone = CommandProgram.of([sys.executable, str(path), "{seed}"], Sources())
    together = CommandProgram.of(
        [sys.executable, "-m", "torch.distributed.run", str(path), "{seed}"], Sources()
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_devices() == ["0", "1"]
    execution = StudyOptions(threads=3).execution(alone)
    assert execution.workers == 2
    assert execution.environments == [
        {"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "0"},
        {"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "1"},
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-8")
    crowded = StudyOptions(workers=3).execution(alone).environments
    assert [each["CUDA_VISIBLE_DEVICES"] for each in crowded] == ["5", "GPU-8", "5"]
    assert StudyOptions().execution(together).environments == [{"OMP_NUM_THREADS": "1"}]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    execution = StudyOptions(threads=2).execution(alone)
    assert execution.workers == 4
    assert execution.environments == [{"OMP_NUM_THREADS": "2"}] * 4


@pytest.mark.studies
def test_workers_give_their_environment_to_the_program(tmp_path):
    path = script(tmp_path, "print('acc', os.environ['OMP_NUM_THREADS'] + os.environ['MINE'])")
    job = job_of(path, Sources.parse(["acc (.+)"], []))
    with JobQueue(
        tmp_path, study="x", workers=1, environments=[{"OMP_NUM_THREADS": "4", "MINE": "2"}]
    ) as queue:
        assert queue.run([job])["run"]["acc"] == 42


def test_a_missing_metric_is_told_by_where_it_was_looked_for(tmp_path):
    sources = Sources.parse([r"acc (\d)"], ["r.json:loss"], "f1", "loss")
    (tmp_path / "output.txt").write_text("acc 1\n")
    (tmp_path / "r.json").write_text('{"loss": 2}')
    with pytest.raises(
        Missing, match=r"'acc', 'loss'. Searched: .*regex 'acc \(.*r.json:loss, pow"
    ):
        sources.read(tmp_path / "output.txt", tmp_path / "report.json", tmp_path, str)
