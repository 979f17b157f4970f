"""``powergrad compare -- python train.py --seed {seed}``: a user's own program, unchanged.

References: the output and the files that the programs themselves write.
"""

import json
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_study import run_of
from studies import is_alive, powergrad, wait_for

from powergrad.lab.cli import study_options
from powergrad.lab.cli.study_options import StudyOptions
from powergrad.lab.environment import visible_devices
from powergrad.lab.runs import CommandProgram, Job, RunFailed, process
from powergrad.lab.runs.commands import _check_altered, _Parts
from powergrad.lab.runs.sources import Missing, Sources, _number, _widened
from powergrad.lab.signals import Interrupted
from powergrad.lab.study import load_study
from powergrad.lab.study.metrics import guess_metric
from powergrad.lab.trainer.recipe import RecipeError

FOREIGN = Path(__file__).parents[1] / "foreign_train.py"
ACCURACY = r"accuracy ([\d.]+)"


def script(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text("import json, os, sys, random\nseed = int(sys.argv[1])\n" + text)
    return path


@pytest.mark.studies
def test_study_of_a_foreign_script(in_process, tmp_path):
    """tests/test_run.py compares each option of `powergrad run` with a change written by hand."""
    status = powergrad(
        "compare", "--arms", "baseline,pgt,head-lr", "--alpha", 0.3, "--seeds", 2,
        "--metric-regex", ACCURACY, "--out", tmp_path, "--name", "s", "--",
        sys.executable, FOREIGN, "--seed", "{seed}", "--optimizer", "Adam", "--lr", 0.01,
    )  # fmt: skip
    assert status == 0
    results = load_study(tmp_path / "s")
    assert len(results.rows) == 6
    for row in results.rows:
        printed = (tmp_path / "s" / row.run / "output.txt").read_text()
        assert f"accuracy {row.metrics['accuracy']:.2f}\n" in printed
    losses = {round(row.about["first_loss"], 10) for row in results.rows}
    assert len(losses) == 2  # one per seed, whatever the arm
    first, again = results.repeated
    assert first.metrics["accuracy"] == again.metrics["accuracy"]
    # The ratio of rates is that of Adam, which the first run has shown.
    assert results.settings("head-lr") == {"--head-lr-scale": 0.3}


NO_LOSS = """
import torch
weight = torch.nn.Parameter(torch.zeros(3))
optimizer = torch.optim.SGD([weight], 0.1)
((weight - seed) ** 2).sum().backward()
optimizer.step()
print("accuracy", random.Random(seed).random())
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param(NO_LOSS, "--alpha 0.25 altered nothing", marks=pytest.mark.studies),
        ("print('accuracy', 1); os._exit(0)", "not known whether it was altered"),
    ],
)
def test_unaltered_program_stops_the_study(in_process, tmp_path, capsys, text, words):
    status = powergrad("compare", "--seeds", 2, "--metric-regex", "accuracy (.+)", "--margin", 1,
                       "--out", tmp_path, "--name", "s", "--",
                       sys.executable, script(tmp_path, text), "{seed}")  # fmt: skip
    assert status == 2
    said = capsys.readouterr()
    assert words in said.err
    assert "Here" not in said.out
    assert not list((tmp_path / "s").glob("*-seed1-*"))


@pytest.mark.parametrize(("code", "problems"), [(3, ["x"]), (1, ["x"]), (3, [])])
def test_summary_of_run_decides_whether_a_study_stops(tmp_path, code, problems):
    """Under torchrun the exit code is another one, and a program may have exit code 3 as well."""
    path = tmp_path / "powergrad.json"
    path.write_text(json.dumps({"problems": problems, "first_loss": 1.5, "optimizers": []}))
    if not problems:
        assert _check_altered(code, path, is_altered=True)["first_loss"] == 1.5
        return
    with pytest.raises(RunFailed, match="not altered as requested") as error:
        _check_altered(code, path, is_altered=True)
    assert error.value.stops
    assert pickle.loads(pickle.dumps(error.value)).stops


def test_arguments_reach_the_program_as_they_are(in_process, tmp_path, monkeypatch):
    """Spaces, quotes, braces and unicode, in arguments, flags, the script's name and the folder."""
    folder = tmp_path / "mein Ördner; $HOME"
    folder.mkdir()
    monkeypatch.chdir(folder)
    name = "träin it's.py"
    script(folder, """
json.dump([sys.argv, os.getcwd()], open(sys.argv[2] + "/gegeben.json", "w"))
print("acc", 50 + random.Random(seed + len(sys.argv)).random())
""", name)  # fmt: skip
    given = ["a \"b\" 'c'", "$(touch hacked)", "*", "{{lr}}", "日本語", "", "x{arm}y", "-x"]
    program = ["env", sys.executable, name, "{seed}", "{out}", *given]
    status = powergrad("compare", "--arms", "baseline", "--arm", "breit ü: --width '6 4' {seed}",
                       "--seeds", 2, "--metric-regex", "acc (.+)", "--out", "läufe x", "--name",
                       "s", "--", *program)  # fmt: skip
    assert status == 0
    study = folder / "läufe x" / "s"
    for arm, place in (("baseline", "baseline"), ("breit ü", "breit-ü")):
        out = run_of(study, place, 1) / "out"
        arguments, where = json.loads((out / "gegeben.json").read_text())
        filled = [*given[:3], "{lr}", *given[4:6], f"x{arm}y", "-x"]
        flags = ["--width", "6 4", "1"] if arm != "baseline" else []
        assert arguments == [name, "1", str(out), *filled, *flags]
        assert where == str(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["läufe x", name]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python train.py --x 1", "python RUN train.py --x 1"),
        ("/a/python3.12 -u -W ignore t.py", "/a/python3.12 -u -W ignore RUN t.py"),
        ("python -m pkg.train -x", "python RUN -m pkg.train -x"),
        ("./train.py 1", f"{sys.executable} RUN ./train.py 1"),
        ("torchrun --nproc-per-node 2 t.py -m x", "torchrun --nproc-per-node 2 RUN t.py -m x"),
        ("torchrun --nproc-per-node 2 -m p a.py", "torchrun --nproc-per-node 2 RUN -m p a.py"),
        ("python -m torch.distributed.run t.py", "python -m torch.distributed.run RUN t.py"),
        ("accelerate launch --cpu train.py", "accelerate launch --cpu RUN train.py"),
        ("accelerate launch -m torchy", "accelerate launch RUN -m torchy"),
        ("bash train.sh", None),
        ("python -c print(1)", None),
        ("python", None),
    ],
)  # fmt: skip
def test_command_with_altered_gradients(command, expected):
    parts = _Parts.of(command.split())
    altered = parts and " ".join(parts.altered(["--alpha", "0.3"]))
    assert altered == (expected and expected.replace("RUN", "-m powergrad run --alpha 0.3 --"))
    starts = ("torchrun", "python -m torch", "accelerate")
    assert parts is None or parts.is_distributed == command.startswith(starts)


TRAIN = "-- python train.py {seed}"


@pytest.mark.parametrize(
    ("tokens", "word"),
    [
        ("-- python train.py", "{seed}"),
        ("-- python train.py", "--seed-env NAME"),
        ("-- python train.py", "--seed-all"),
        ("-- python train.py", "--unseeded"),
        (f"--unseeded {TRAIN}", "--unseeded"),
        ("--seed-all -- ls", "--seed-all"),
        (f"--timeout soon {TRAIN}", "--timeout"),
        (f"--reuse-anyway --fresh {TRAIN}", "--reuse-anyway without"),
        (f"--metric-regex (?P<a>.)(?P<b>.) --better lower {TRAIN}", "one of a, b"),
        (f"--arm x:@main {TRAIN}", "no git repository"),
        (f"--arm x:-- {TRAIN}", "no command"),
        ("--seed-env S digits", "--seed-env only with your own program"),
        (f"{TRAIN} {{sede}}", "{sede}"),
        (f'{TRAIN} {{"a":1}}', "literal braces"),
        ("-- python train.py {seed:03d}", "{seed:03d}"),
        ("-- python lost.py {seed}", "'lost.py'"),
        ("-- lost {seed}", "'lost'"),
        ("-- ls {seed}", "'pgt' alters gradients"),
        (f"--arms pgt --arm p:pgt {TRAIN}", "'pgt' and 'p'"),
        (f"--metric-regex acc {TRAIN}", "--metric-regex"),
        (f"--metric-regex (.)(.) {TRAIN}", "--metric-regex"),
        (f"--metric-regex (.) {TRAIN}", "name for the metric"),
        (f"--metric-regex foo(.) {TRAIN}", "`better`"),
        (f"--metric-regex foo(.) --better lower {TRAIN}", "`margin`"),
        (f"--metric-file x.json {TRAIN}", "--metric-file"),
        (f"--metric-file {{x}}.json:a {TRAIN}", "{x}"),
        (f"--tune lr=1,2 {TRAIN} {{lr}}", "--tune-metric"),
        (f"--tune lr=1,2 --tune-metric loss {TRAIN} {{lr}}", "--metric"),
        (f"--tune lr=1,2 --tune-metric acc --metric acc {TRAIN} {{lr}}", "'acc' for both"),
        (f"--tune lr=1,2 --tune-metric loss --metric acc {TRAIN}", "{lr}"),
        (f"--tune lr=1 --tune-metric loss --metric acc {TRAIN} {{lr}}", "several values"),
        (
            f"--tune lr=1,2 --tune-map identity --tune-metric loss --metric acc {TRAIN} {{lr}}",
            "--tune-map",
        ),
        (f"--tune-metric loss {TRAIN}", "--tune-metric only with --tune"),
        (f"{TRAIN} {{lr}}", "{lr}"),
        (f"--agc 0 --arms baseline,agc {TRAIN}", "--agc"),
        (f"digits {TRAIN}", "'digits'"),
        (f"--baseline x {TRAIN}", "--baseline only with --from"),
        (f"--budget soon {TRAIN}", "--budget"),
    ],
)
def test_bad_input_is_named_before_any_run(tmp_path, monkeypatch, capsys, tokens, word):
    monkeypatch.chdir(tmp_path)
    script(tmp_path, "raise SystemExit('it was run')")
    monkeypatch.setattr(study_options.Pool, "run", lambda *_: pytest.fail("a run was started"))
    given = [sys.executable if token == "python" else token for token in tokens.split(" ")]
    assert powergrad("compare", *given) == 2
    said = capsys.readouterr()
    assert word in " ".join((said.err + said.out).split())
    assert not (tmp_path / "runs").exists()


def job_of(path: Path, sources: Sources) -> Job:
    """A run without ``powergrad run``, so that no torch is imported."""
    command = ("env", sys.executable, str(path), "{seed}", "{out}")
    return CommandProgram(command=command, sources=sources).job("a", {}, 5)


def metrics_of(folder: Path, text: str, sources: Sources) -> Any:
    return job_of(script(folder, text), sources).execute(folder).metrics


@pytest.mark.parametrize(
    ("text", "regexes", "files", "expected"),
    [
        ("for i in range(999): print(f'{i} acc {i / 8}', end='\\r')", [r"acc (\S+)"], [],
         {"acc": 124.75}),
        ("print('seconds 0.125')", [r"seconds (\S+)"], [], {"seconds": 0.125}),
        ("print('val 0.5 test 0.7')", [r"val (?P<val>\S+) test (?P<test>\S+)"], [],
         {"val": 0.5, "test": 0.7}),
        ("json.dump({'a': {'val': 1, 'test': [0, 2]}}, open(sys.argv[2] + '/r.json', 'w'))",
         [], ["r.json:a.val", "{out}/r.json:a.test.1"], {"a.val": 1, "a.test.1": 2}),
        ("json.dump({'a.b': 3}, open(sys.argv[2] + '/r.json', 'w'))", [], ["r.json:a.b"],
         {"a.b": 3}),
        ("open(sys.argv[2] + '/l.csv', 'w').write('e,acc\\n1,5\\n2,6.5\\n')", [], ["l.csv:acc"],
         {"acc": 6.5}),
        ("from powergrad import report; report(x=4); report(x=seed / 4, y=2); print('acc 1')",
         ["acc (.)"], [], {"acc": 1, "x": 1.25, "y": 2}),
    ],
)  # fmt: skip
def test_metrics_come_from_output_files_and_reports(tmp_path, text, regexes, files, expected):
    found = metrics_of(tmp_path, text, Sources.parse(regexes, files))
    assert found == {"seconds": found["seconds"], "memory": found["memory"], **expected}


CHILD = """
import subprocess, time
held = bytearray(40 << 20)
subprocess.run([sys.executable, "-c", "import time; x = bytearray(80 << 20); time.sleep(1)"])
"""


def test_time_and_memory_need_no_source(tmp_path):
    """The process and its child hold 120 MiB together, beside two interpreters."""
    found = metrics_of(tmp_path, CHILD, Sources.parse([], [], "memory"))
    assert 120 < found["memory"] < 200
    assert found["seconds"] >= 1
    for name in ("seconds", "memory"):
        assert Sources.parse([r"acc (\S+)"], [], name).names == ["acc"]
        metric = guess_metric(name, [], margin=1, better=None)
        assert not metric.higher_is_better


LOSS = [r"loss ([\d.]+)"]


@pytest.mark.parametrize(
    ("printed", "regexes", "expected"),
    [
        ("loss 9.481e-03", LOSS, 0.009481),
        ("loss 9.481e-03, lr 0.1", [r"loss ([\d.]+), lr"], 0.009481),
        ("loss 2\nloss -0.5", LOSS, -0.5),
        ("loss 2\nloss \N{MINUS SIGN}0.5", LOSS, -0.5),
        ("loss 1\nloss 1,234.5 end", [r"loss ([\d.]+) end"], 1234.5),
        ("loss 1,234.5", [r"loss (\S+)"], 1234.5),
        ("loss 12,345", [r"loss (.+)"], 12345),
        ("loss 1_000.5", [r"loss (\d+)"], 1000.5),
        ("loss 97.5%, lr 3", [r"loss (\S+)"], 97.5),
        ("loss: -.5.", [r"loss.*?([\d.]+)"], -0.5),
        ("loss -12.5", [r"loss.*([\d.]+)"], -12.5),  # the group has only the last digit
        ("loss .5", [r"loss.*([\d.]+)"], 0.5),
        ("nll -0.5 loss 3", [r"nll -([\d.]+)"], 0.5),  # the sign is part of the pattern
        ("step-12 loss 3", [r"step-(\d+)"], 12),
        ("2026-11", [r"(?P<loss>\d+)$"], 11),
        ("12% 0.5%\n100%", [r"(?P<loss>\d+\.\d+)%"], 0.5),  # only numbers of this shape
        ("3,0.25,97.5", [r"^\d+,(?P<loss>[\d.]+),"], 0.25),
        ("loss (0.5)", [r"loss \(((?:[0-9]|[)(.])+)\)"], 0.5),
        ("loss 2\nloss nan", LOSS, math.nan),
        ("loss 2\nloss -NaN, lr 1", [r"loss ([\d.]+), lr"], math.nan),
        ("loss 2\nloss inf", LOSS, math.inf),
        ("loss 2\nloss -Infinity", LOSS, -math.inf),
        ("loss 2\nloss info", LOSS, 2),
    ],
)
def test_numbers_are_read_whole(tmp_path, printed, regexes, expected):
    output = tmp_path / "output.txt"
    output.write_text(printed)
    names = Sources.parse(regexes, [], "loss")
    found = names.read(output, tmp_path / "report.json", tmp_path, {})["loss"]
    assert found == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


@given(st.floats(allow_subnormal=False), st.sampled_from(["{}", "{:.3e}", "{:+.2f}", "{:,.1f}"]))
def test_every_number_that_python_prints_is_read(value, form):
    """Reference: Python's own `float`."""
    text = form.format(value)
    for pattern in (r"loss (\S+)", *([r"loss ([\d.]+)", r"loss.*?([\d.]+) "] * ("," not in text))):
        match = re.search(_widened(pattern), f"loss {text} 7")
        expected = float(text.replace(",", ""))
        found = _number(match, 1, "")  # pyright: ignore[reportArgumentType]
        assert found == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


@pytest.mark.parametrize(
    ("line", "regex"),
    [
        ("loss 0.5s", r"loss (\S+)"),
        ("loss 0.5/0.6", r"loss (\S+)"),
        ("loss 1.2.3", r"loss ([\d.]+)"),
        ("loss 1,234.5", r"loss ([\d.]+)"),  # a list, or one number?
        ("loss 12,100", r"loss \d+,(\d+)"),
        ("loss none", r"loss (\S+)"),
        ("loss .", r"loss ([\d.]+)"),
    ],
)
def test_a_match_that_is_not_one_number_shows_its_line(tmp_path, line, regex):
    output = tmp_path / "output.txt"
    output.write_text(f"loss 7\nx {line} y\n")
    with pytest.raises(Missing, match=re.escape(f"x {line} y")):
        Sources.parse([regex], [], "loss").read(output, tmp_path / "r.json", tmp_path, {})


def test_large_output_needs_little_memory(tmp_path):
    path = tmp_path / "output.txt"
    with open(path, "w") as file:
        for i in range(200):
            file.write(f"acc {i}\n" + 100 * ("x" * 999 + "\n"))
        file.write("y" * 1_000_000 + "\n")
    tracemalloc.start()
    found = Sources.parse([r"^acc (\d+)$"], []).read(path, tmp_path / "report.json", tmp_path, {})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found["acc"] == 199
    assert peak < 8_000_000


ACC = Sources.parse(["acc (.)"], [])
WRITE = "open(sys.argv[2] + '/%s', 'w').write('%s')"


@pytest.mark.parametrize(
    ("text", "sources", "word"),
    [
        ("print('hello')", ACC, "--metric-regex"),
        ("print('hello')", Sources(), "powergrad.report"),
        ("print('acc x')", ACC, "'x'"),
        ("", Sources.parse([], ["r.json:acc"]), "No such file"),
        (WRITE % ("r.json", "{"), Sources.parse([], ["r.json:acc"]), "JSONDecodeError"),
        (WRITE % ("r.json", "{}"), Sources.parse([], ["r.json:a.b"]), "KeyError"),
        (WRITE % ("r.csv", "a,b"), Sources.parse([], ["r.csv:a"]), "IndexError"),
        ("print('acc 1')", ACC.model_copy(update={"wanted": ("f1",)}), "'f1'"),
        ("print('z' * 5000); sys.exit(7)", Sources(), "exit code 7"),
        ("os.abort()", Sources(), "SIGABRT"),
    ],
)
def test_run_without_its_metric_fails_with_the_last_lines(tmp_path, text, sources, word):
    with pytest.raises(RunFailed) as error:
        metrics_of(tmp_path, "print('one'); print('two', file=sys.stderr)\n" + text, sources)
    assert word in str(error.value)
    assert "    one\n    two" in str(error.value)
    assert len(str(error.value)) < 1000
    assert not error.value.stops
    assert not list(tmp_path.glob("*/result.json"))


def test_metric_is_named_by_the_word_before_its_group():
    names = {
        r"acc ([\d.]+)": "acc", r"val loss: ([\d.]+)": "loss", r"Acc@1\s*=\s*(\S+)": "Acc@1",
        r"acc(?:uracy)? ([\d.]+)": "accuracy", r'"top1": (\S+)': "top1", r"(?i)f1=(\S+)": "f1",
    }  # fmt: skip
    for regex, name in names.items():
        assert Sources.parse([regex], []).names == [name]
    assert Sources.parse([r"(\S+)$"], [], "recall").names == ["recall"]
    with pytest.raises(RecipeError, match="'acc'"):
        Sources.parse(["acc (.)", "(?P<acc>.)"], [])


NOISY = "print('accuracy', 90 + random.Random(str(sys.argv)).gauss(0, 0.4))\n"
AT = "if seed == 1 and len(sys.argv) > 2: "


def compare_plain(
    folder: Path, path: Path, *tokens: object, seeds: object = 8, start: tuple[str, ...] = ("env",)
) -> int:
    return powergrad(
        "compare", "--arms", "baseline", "--arm", "b: two", "--seeds", seeds, "--metric-regex",
        "accuracy (.+)", "--margin", 1, "--out", folder, "--name", "s", *tokens, "--", *start,
        sys.executable, path, "{seed}",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "seeds", "words"),
    [
        (f"{AT}sys.exit(9)\n{NOISY}", 8, "1 of 8 runs of b failed (seed 1)"),
        (
            f"if len(sys.argv) > 2: sys.exit(9)\n{NOISY}",
            6,
            "b is worse than baseline, by its failures",
        ),
        (
            f"{AT}print('accuracy', 'nan'); sys.exit()\n{NOISY}",
            8,
            "1 of 8 runs of b failed (seed 1): accuracy is nan",
        ),
        ("print('accuracy 92')", "6,8", "the program does not use its seed"),
        ("print('accuracy', 90 + random.random())", 6, "Runs are not repeatable"),
    ],
)
def test_odd_programs_are_noted(in_process, tmp_path, capsys, text, seeds, words):
    status = compare_plain(tmp_path, script(tmp_path, text), seeds=seeds)
    assert status == (2 if "not compared" in words else 0)
    assert words in capsys.readouterr().out
    assert not list((tmp_path / "s").glob("*-seed6-*")) or seeds == 8  # constant ones stop early
    states = json.loads((tmp_path / "s/progress.json").read_text())["runs"].values()
    assert any(state["state"] == "failed" for state in states) == ("sys.exit(9)" in text)


def test_other_questions_about_a_program(in_process, tmp_path, capsys):
    path = script(tmp_path, NOISY)
    assert compare_plain(tmp_path, path, "--sigma", 0.4, seeds=2) == 0
    assert "known noise 0.4" in capsys.readouterr().out
    assert compare_plain(tmp_path, path, "--sigma", 0.4, seeds=2) == 0  # the same study
    assert compare_plain(tmp_path, path, "--sigma", 0.5, seeds=2) == 2
    assert "choose another --name" in capsys.readouterr().err
    assert compare_plain(tmp_path / "t", path, "--target", 80, seeds=6) == 0
    said = capsys.readouterr()
    assert "baseline and b are better than the target 80" in said.out
    assert "No verdict is possible" not in said.err
    assert compare_plain(tmp_path / "a", path, "--and", "seconds: not worse 9", seeds=3) == 0
    assert "at least 6 per arm" in capsys.readouterr().err
    assert compare_plain(tmp_path / "b", path, "--and", "speed: better higher", seeds=6) == 2
    assert "--and with one of seconds, memory, accuracy" in capsys.readouterr().err
    earlier = (tmp_path / "s/study.csv").read_bytes()
    assert compare_plain(tmp_path, path, "--fresh", seeds=2) == 0
    (aside,) = (folder for folder in tmp_path.glob("s-*") if folder.is_dir())
    assert (aside / "study.csv").read_bytes() == earlier
    assert str(aside) in capsys.readouterr().err


def test_no_run_starts_after_the_budget(in_process, tmp_path, capsys):
    """A run takes longer than the budget; with more time the same command continues."""
    path = script(tmp_path, "import time; time.sleep(1.1)\n" + NOISY)
    assert compare_plain(tmp_path, path, "--budget", "1s", seeds=2) == 0
    assert "The time ran out" in capsys.readouterr().out
    assert len(list(tmp_path.glob("s/*/result.json"))) == 1
    assert compare_plain(tmp_path, path, "--budget", "1h", seeds=2) == 0
    said = capsys.readouterr().out
    assert "The time ran out" not in said
    assert "inf" not in said  # two runs have no interval
    assert len(load_study(tmp_path / "s").rows) == 4


def test_tuned_keys_fill_their_placeholders(in_process, tmp_path, capsys):
    path = script(tmp_path, """
lr = float(sys.argv[2])
noise = random.Random(f"{sys.argv[1:]}").gauss(0, 0.05)
print("val_loss", abs(lr - (0.2 if sys.argv[3:] else 0.1)) + 0.001 * noise, "accuracy", 90 + noise)
json.dump(sys.argv, open(os.environ["POWERGRAD_REPORT"][:-11] + "out/argv.json", "w"))
""")  # fmt: skip
    status = powergrad(
        "compare", "--arms", "baseline", "--arm", "b: two", "--seeds", 6, "--metric", "accuracy",
        "--metric-regex", r"val_loss (?P<val_loss>\S+) accuracy (?P<accuracy>\S+)", "--margin", 1,
        "--tune", "lr=0.05,0.1,0.2,0.4", "--tune-metric", "val_loss", "--tune-seeds", 2, "--out",
        tmp_path, "--name", "s", "--", "env", sys.executable, path, "{seed}", "{lr}",
    )  # fmt: skip
    assert status == 0
    said = capsys.readouterr()
    assert "28 runs, about" in said.err  # 2 arms x (4 points x 2 seeds + 6 seeds)
    results: Any = load_study(tmp_path / "s")
    for arm, lr in (("baseline", "0.1"), ("b", "0.2")):
        assert f"{arm}: lr {lr} (" in said.out
        argv = json.loads((run_of(tmp_path / "s", arm, 4) / "out/argv.json").read_text())
        assert argv[1:3] == ["4", lr]
        assert results.settings(arm)["lr"] == float(lr)
    assert results.tuning.metric == "val_loss"


STUBBORN = """
import signal, subprocess, time
signal.signal(signal.SIGTERM, lambda *_: print("no", flush=True))
child = subprocess.Popen([sys.executable, "-c", "import signal, time; "
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('child', flush=True); time.sleep(99)"])
print(child.pid, flush=True)
time.sleep(99)
"""


def output_of(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("*/output.txt"))


def test_program_that_ignores_sigterm_is_killed_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "PATIENCE", 0.5)

    def interrupt() -> None:
        wait_for(lambda: "child" in output_of(tmp_path))
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt).start()
    with pytest.raises(Interrupted):
        metrics_of(tmp_path, STUBBORN, Sources())
    pid = int(next(line for line in output_of(tmp_path).split() if line.isdigit()))
    wait_for(lambda: not is_alive(pid))
    assert "no" in output_of(tmp_path).split()  # it was asked first
    assert not list(tmp_path.glob("*/result.json"))


def test_leftovers_of_a_killed_worker_are_ended(tmp_path):
    """The program still runs and writes, as its worker was killed; the run is then repeated."""
    text = """
import time
if os.path.exists("WHERE/slow"):
    os.remove("WHERE/slow"); open(sys.argv[2] + "/half", "w").close()
    print(os.getpid(), flush=True)
    while True: time.sleep(0.05); open(sys.argv[2] + "/half", "a").write("x")
print("acc 3", os.listdir(sys.argv[2]))
""".replace("WHERE", str(tmp_path))
    job = job_of(script(tmp_path, text), ACC)
    (tmp_path / "slow").touch()
    (tmp_path / "job").write_bytes(pickle.dumps(job))
    code = f"""
import pickle; from pathlib import Path
pickle.loads(Path({str(tmp_path / "job")!r}).read_bytes()).execute(Path({str(tmp_path)!r}))
"""
    worker = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    wait_for(lambda: output_of(tmp_path).strip())
    program = int(output_of(tmp_path))
    worker.kill()
    worker.wait()
    assert is_alive(program)
    assert job.execute(tmp_path).metrics["acc"] == 3
    wait_for(lambda: not is_alive(program))
    assert output_of(tmp_path) == "acc 3 []\n"
    assert job.execute(tmp_path).metrics["acc"] == 3  # it is finished, and is not run again


def test_program_that_cannot_be_started_fails(tmp_path):
    (tmp_path / "not executable").touch()
    job = CommandProgram(command=(str(tmp_path / "not executable"),)).job("a", {}, 0)
    with pytest.raises(RunFailed, match="cannot be started"):
        job.execute(tmp_path)


def test_each_worker_has_a_gpu_if_there_are_some(monkeypatch, tmp_path):
    path = script(tmp_path, "")
    alone = CommandProgram(command=(sys.executable, str(path), "{seed}")).with_arms({"a": {}})
    torchrun = (sys.executable, "-m", "torch.distributed.run", str(path), "{seed}")
    together = CommandProgram(command=torchrun).with_arms({"a": {}})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_devices() == ["0", "1"]
    pool = StudyOptions(threads=3).pool(tmp_path, alone)
    assert pool.workers == 2
    assert list(pool.environments) == [
        {"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": device} for device in ("0", "1")
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-8")
    crowded = StudyOptions(workers=3).pool(tmp_path, alone).environments
    assert [variables["CUDA_VISIBLE_DEVICES"] for variables in crowded] == ["5", "GPU-8", "5"]
    assert list(StudyOptions().pool(tmp_path, together).environments) == [{"OMP_NUM_THREADS": "1"}]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert StudyOptions(threads=2).pool(tmp_path, alone).workers == 4
