"""What machines read: exit codes, ``--json``, ``--quiet``; and what is said before the runs."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pages import ROOT, blocks_of
from studies import TOKENS, powergrad, spread

from powergrad.lab.cli import study_options

ORDER = (0, 3, 5, 4, 2, 1)


@pytest.fixture
def train(in_process, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    """A program with exactly known results: each arm has the standard deviation 0.5.

    Its arguments are the seed, and how much the mean of an arm differs from 90. The values of the
    arm are those of the baseline in another order, so that they are not correlated.
    """
    monkeypatch.chdir(tmp_path)
    path, values = tmp_path / "train.sh", spread(90, 0.5, 6)
    lines = [f"0:{seed}) v={value} ;;" for seed, value in enumerate(values)]
    lines += [f"1:{seed}) v={values[other]} ;;" for seed, other in enumerate(ORDER)]
    cases = "\n".join(lines)
    path.write_text(f"""
case $(($# - 1)):$1 in
{cases}
esac
awk "BEGIN {{ printf \\"accuracy %.6f\\", $v + ${{2:-0}} }}"
""")
    return path


def compare(path: Path, *tokens: object, shift: object = 2) -> int:
    return powergrad(
        "compare", "--arms", "baseline", "--arm", f"b: {shift}", "--seeds", 6, "--margin", 1,
        "--metric-regex", r"accuracy (\S+)", *tokens, "--", "sh", path, "{seed}",
    )  # fmt: skip


SHIFTS = {"better": 2, "worse": -2, "equivalent": 0.01, "not settled": 0.5}


@pytest.mark.parametrize("verdict", SHIFTS)
def test_json_and_exit_codes_say_what_was_found(train, capsys, verdict):
    """Reference: the numbers that the program prints, and study.json."""
    assert compare(train, "--json", "--name", "s", shift=SHIFTS[verdict]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["format"] == 1
    assert [arm["arm"] for arm in found["arms"]] == ["baseline", "b"]
    for arm in found["arms"]:
        shift = SHIFTS[verdict] if arm["arm"] == "b" else 0
        assert (arm["n"], arm["failed"]) == (6, 0)
        assert arm["mean"] == pytest.approx(90 + shift, abs=1e-4)
        assert arm["sd"] == pytest.approx(0.5, abs=1e-4)
    (comparison,) = found["comparisons"]
    assert comparison["verdict"] == verdict
    assert comparison["difference"] == pytest.approx(SHIFTS[verdict], abs=1e-4)
    low, high = comparison["interval"]
    assert (low + high) / 2 == pytest.approx(comparison["difference"])
    assert (comparison["p"] < 0.05) == (verdict in ("better", "worse"))
    assert (found["metric"], found["better"], found["margin"]) == ("accuracy", "higher", 1)
    assert found["unit"] == comparison["unit"] == "accuracy"
    saved = json.loads(Path(found["files"]["study.json"]).read_text())
    assert saved["comparisons"] == found["comparisons"]
    assert all(Path(path).exists() for path in found["files"].values())
    fulfilled = {"better": {"better", "not-worse"}, "equivalent": {"equivalent", "not-worse"},
                 "worse": set(), "not settled": {"not-worse"}}[verdict]  # fmt: skip
    for goal in ("better", "not-worse", "equivalent"):
        tokens = ("--name", "s", "--fail-unless", goal)
        status = compare(train, *tokens, shift=SHIFTS[verdict])
        assert status == (0 if goal in fulfilled else 4)
        said = capsys.readouterr()
        assert (f"Expected b to be {goal}" in said.err) == (status == 4)
        assert "powergrad: " not in said.out


def test_a_lower_metric_is_not_worse(train):
    tokens = ("--better", "lower", "--fail-unless", "not-worse")
    assert compare(train, *tokens, "--name", "a", shift=-0.5) == 0
    assert compare(train, *tokens, "--name", "b", shift=0.5) == 4


def test_the_time_of_a_recipe_needs_a_margin(made_up, tmp_path, capsys):
    tokens = ("compare", "digits", *TOKENS, "--arms", "baseline,pgt", "--seeds", 6, "--metric")
    assert powergrad(*tokens, "seconds", "--out", tmp_path) == 2
    assert "`margin`" in capsys.readouterr().err
    assert powergrad(*tokens, "seconds", "--out", tmp_path, "--margin", 1, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["metric"], found["better"], found["unit"]) == ("seconds", "lower", "seconds")
    assert [arm["mean"] for arm in found["arms"]] == [1, 1]


def test_every_arm_must_fulfil_the_condition(train, capsys):
    tokens = ("--arm", "c: 0.01", "--fail-unless", "better", "--json")
    assert compare(train, *tokens) == 4
    said = capsys.readouterr()
    verdicts = {c["arm"]: c["verdict"] for c in json.loads(said.out)["comparisons"]}
    assert verdicts == {"b": "better", "c": "equivalent"}
    assert "Expected c to be better, but got equivalent" in said.err
    assert "Expected b" not in said.err


def test_quiet_prints_only_the_results_and_errors(train, capsys, monkeypatch):
    assert compare(train, "--quiet") == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "b is better than baseline" in said.out
    assert "\x1b" not in said.out
    assert compare(train, "--quiet", "--json", "--fail-unless", "equivalent") == 4
    said = capsys.readouterr()
    assert json.loads(said.out)["comparisons"]
    assert said.err.count("\n") == 1
    train.write_text("exit 9")
    assert compare(train, "--quiet", "--fresh") == 2
    assert "exit code 9" in capsys.readouterr().err


def test_a_table_is_answered_in_the_same_way(tmp_path, capsys):
    values = {"baseline": spread(90, 0.5, 6), "b": spread(92, 0.5, 6)}
    rows = [f"{arm},{seed},{v}" for arm, vs in values.items() for seed, v in enumerate(vs)]
    path = tmp_path / "results.csv"
    path.write_text("\n".join(["arm,seed,accuracy", *rows]))
    tokens = ("--from", path, "--out", tmp_path, "--json", "--fail-unless")
    assert powergrad("compare", *tokens, "better") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["arms"][1]["sd"] == pytest.approx(statistics.stdev(values["b"]))
    assert powergrad("compare", *tokens, "equivalent") == 4


def test_a_baseline_alone_must_reach_its_target(train):
    words = ("compare", "--arms", "baseline", "--seeds", 6, "--fail-unless", "better")
    words += ("--margin", 1, "--metric-regex", r"accuracy (\S+)")
    for name, status, options in (
        ("reached", 0, ("--target", 88)),
        ("missed", 4, ("--target", 92)),
        ("alone", 4, ()),
    ):
        tokens = ("--name", name, "--", "sh", train, "{seed}")
        assert powergrad(*words, *options, *tokens) == status


NAN = "echo accuracy nan; exit"
FAILING = {  # the condition, and how often the output is shown: once per batch of runs
    "the first run": ("true", 1),
    "all but the first run": ("[ $1$2 != 0 ]", 1),
    "all but the first run, by NaN": ("[ $1$2 != 0 ]", 0),
}


@pytest.mark.parametrize("which", FAILING)
def test_a_study_with_nothing_to_compare_fails(train, capsys, which):
    condition, count = FAILING[which]
    ends, reason = ("echo boom; exit 9", "exit code 9") if count else (NAN, "accuracy is nan")
    failing = f"if {condition}; then {ends}; fi"
    train.write_text(f"{failing}\necho accuracy $((90 + $1))\n")
    assert compare(train, "--json") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("boom") == count
    assert reason in "".join(said.err.splitlines()[-3:])


@pytest.mark.parametrize("how", ["exit 9", NAN])
def test_an_arm_that_always_fails_is_worse(train, capsys, how):
    """Both kinds of failure are counted in the same way in the arms and in the comparison."""
    train.write_text(f"if [ $2 ]; then {how}; fi\necho accuracy $((90 + $1))\n")
    assert compare(train, "--json", "--fail-unless", "not-worse") == 4
    found = json.loads(capsys.readouterr().out)
    (comparison,) = found["comparisons"]
    assert (comparison["verdict"], comparison["by"]) == ("worse", "failures")
    assert [(arm["n"], arm["failed"], arm["diverged"]) for arm in found["arms"]] == [
        (6, 0, 0),
        (0, comparison["failed"], comparison["diverged"]),
    ]
    assert not any(note.endswith(":") for note in found["notes"])


def test_more_seeds_are_not_advised_where_failures_prevent_a_verdict(train, capsys):
    failing = "if [ $2 ] && [ $1 = 3 ]; then exit 9; fi\n"
    train.write_text(failing + train.read_text())
    assert compare(train, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["comparisons"][0]["verdict"], found["advice"]) == ("not settled", [])


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (("--metrc", "x"), "'--metrc'; did you mean '--metric'"),
        (("--and", "accuracy: better"), "another metric"),
        (("--metric", "seconds", "--seeds", 4, "--fail-unless", "better"), "at least 6"),
    ],
)
def test_what_can_be_refused_is_refused_before_any_run(train, capsys, monkeypatch, tokens, words):
    monkeypatch.setattr(study_options.Pool, "run", lambda *_: pytest.fail("a run was started"))
    arguments: list[Any] = ["compare", "--arms", "baseline", "--arm", "b: 2", "--metric-regex"]
    arguments += [r"accuracy (\S+)", *tokens, "--", "sh", train, "{seed}"]
    assert powergrad(*arguments) == 2
    assert words in capsys.readouterr().err


def test_the_noise_of_another_metric_is_refused(train, capsys, monkeypatch):
    """Reference: the standard deviation of the metric that is compared, not of another."""
    rows = [f"{arm},{seed},{seed % 5},1" for arm in ("a", "b") for seed in range(8)]
    Path("earlier.csv").write_text("\n".join(["arm,seed,speed,loss", *rows]))
    monkeypatch.setattr(study_options.Pool, "run", lambda *_: pytest.fail("a run was started"))
    assert compare(train, "--sigma-from", "earlier.csv") == 2
    assert "accuracy" in capsys.readouterr().err


PAGE = ROOT / "docs/programs.md"
STUB = """
import random, sys
arguments = " ".join(sys.argv[1:])
gains = {"--lr 0.2": 3, "--width 64": 0, "--dropout 0.1": -3, "--fast": 0}
gain = sum(value for flag, value in gains.items() if flag in arguments)
print("accuracy", 90 + gain + random.Random(arguments).gauss(0, 0.2))
"""


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """Run a script of the page where `train.py` is a stub; returns its exit code and its output."""
    (tmp_path / "train.py").write_text(STUB)
    command = tmp_path / "bin/powergrad"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m powergrad "$@"\n')
    command.chmod(0o755)
    (command.parent / "python").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))

    def run(text: str) -> tuple[int, str]:
        text = text.replace("-- python train", "-- env python train")  # without torch: in no time
        arguments = ["bash", "-e", "-c", text]
        ended = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True)
        return ended.returncode, ended.stdout

    return run


@pytest.mark.studies
def test_the_workflow_of_the_page_runs(shell, tmp_path):
    (workflow,) = (block.code for block in blocks_of(PAGE.read_text()) if block.language == "yaml")
    steps = yaml.safe_load(workflow)["jobs"]["compare"]["steps"]
    install, compare, summary = (step["run"] for step in steps if "run" in step)
    assert install.startswith("pip install")
    assert shell(compare)[0] == 0
    assert shell(summary)[0] == 0
    assert "fast is equivalent to baseline" in (tmp_path / "summary.md").read_text()
    (tmp_path / "train.py").write_text(STUB.replace('"--fast": 0', '"--fast": -3'))
    assert shell(compare.replace("--json", "--fresh --json"))[0] == 4
    assert (
        json.loads((tmp_path / "result.json").read_text())["comparisons"][0]["verdict"] == "worse"
    )


@pytest.mark.studies
def test_the_loop_of_the_page_keeps_what_helps(shell):
    blocks = blocks_of(PAGE.read_text())
    (loop,) = (block.code for block in blocks if block.language == "bash")
    status, said = shell(loop)
    assert status == 0
    assert said.splitlines()[-1] == "kept: --lr 0.2"
