"""``powergrad.compare(train, arms, seeds)``: a Python function, here and in worker processes.

References: what the function returns when it is called by hand, and ``compare --from`` on the same
numbers.
"""

import html
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import powergrad
from powergrad.lab.runs.functions import FunctionProgram, place_of
from powergrad.lab.study import load
from powergrad.lab.study.notes import notes
from powergrad.lab.study.saving import compare_rows

ROOT = Path(__file__).parents[2]


def noisy(seed, arm, shift=0.0):
    return 90 + shift + random.Random(f"{seed} {arm}").gauss(0, 0.1)


def with_process(seed, arm, shift=0.0):
    return {"accuracy": noisy(seed, arm, shift), "pid": os.getpid()}


def test_in_this_process(tmp_path, capsys):
    arms = {"baseline": {}, "up": {"shift": 1.0}, "same": {"shift": 0.0}}
    results = powergrad.compare(
        lambda seed, arm, **settings: noisy(seed, arm, **settings), arms, 8, metric="accuracy"
    )
    assert "24 runs, about 0 s, 1 at a time" in capsys.readouterr().err
    for row in results.results.rows:
        assert row.metrics["accuracy"] == noisy(row.seed, row.arm, **arms[row.arm])
    assert [c.verdict for c in results.comparisons] == ["better", "equivalent"]
    assert results.verdict == (
        "Here up is better than baseline; same is equivalent to baseline within 0.5."
    )
    for text in (str(results), html.unescape(results._repr_html_())):
        assert results.verdict in text
        assert all(comparison.sentence in text for comparison in results.comparisons)
    page = results.save(tmp_path / "page")
    assert page == tmp_path / "page" / "report.html"
    assert page.stat().st_size > 10_000
    table = compare_rows(tmp_path / "page" / "study.csv", metric="accuracy")
    assert [vars(c) for c in table.comparisons] == [vars(c) for c in results.comparisons]
    again: Any = load(tmp_path / "page" / "study.json")
    assert again.study.program.kind == "function"


@pytest.mark.studies
def test_in_worker_processes(tmp_path):
    assert place_of(with_process) == f"{__name__}:with_process"
    arguments = {"metric": "accuracy", "workers": 2, "out": tmp_path, "name": "s"}
    results = powergrad.compare(with_process, ["a", "b"], 6, **arguments)
    rows = results.results.rows
    assert {row.metrics["accuracy"] for row in rows} == {
        noisy(seed, arm) for seed in range(6) for arm in ("a", "b")
    }
    assert os.getpid() not in {row.metrics["pid"] for row in rows}
    assert (tmp_path / "s" / "report.html").is_file()
    again = powergrad.compare(with_process, ["a", "b"], 6, **arguments)  # nothing is done twice
    assert [row.metrics for row in again.results.rows] == [row.metrics for row in rows]


SCRIPT = """
import powergrad
def train(seed, arm):
    return {"accuracy": 90 + seed + 100 * (arm == "b"), "main": float(__name__ == "__main__")}
if __name__ == "__main__":
    results = powergrad.compare(train, ["a", "b"], 2, metric="accuracy", workers=1)
    print([row.metrics["main"] for row in results.results.rows])
"""


@pytest.mark.studies
def test_a_script_and_its_main_guard(tmp_path, monkeypatch):
    path = tmp_path / "my script.py"
    command = [sys.executable, str(path)]
    path.write_text(SCRIPT)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.stdout.strip() == "[0.0, 0.0, 0.0, 0.0]", ended.stderr
    monkeypatch.setenv("POWERGRAD_WORKER", "1")  # as where a worker imports a script without it
    with pytest.raises(RuntimeError, match="__main__"):
        powergrad.compare(noisy, ["a", "b"], 2, metric="accuracy")


def inner():
    def function(seed, arm):
        return 1.0

    return function


def test_what_another_process_can_find(monkeypatch):
    assert place_of(noisy) == f"{__name__}:noisy"
    assert place_of(inner()) is None
    assert place_of(lambda seed, arm: 1.0) is None
    assert place_of(SimpleNamespace) is None
    programs = [FunctionProgram.of(function, "x") for function in (noisy, inner())]
    assert programs[0].fingerprint != programs[1].fingerprint
    main = SimpleNamespace(__name__="__main__", __file__="/a/train.py")

    def train(seed, arm):
        return 1.0

    train.__module__, train.__qualname__, main.train = "__main__", "train", train
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.delattr(sys, "ps1", raising=False)
    assert place_of(train) == "/a/train.py:train"
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)  # an interactive session
    assert place_of(train) is None


def test_runs_that_fail_or_diverge(capsys):
    def train(seed, arm):
        if arm == "b" and seed == 2:
            raise ArithmeticError("no room")
        return float("nan") if arm == "b" and seed == 3 else noisy(seed, arm)

    results = powergrad.compare(train, ["a", "b"], 8, metric="accuracy")
    said = " ".join(notes(results.results))
    assert "2 of 8 runs of b failed (seed 2, 3): ArithmeticError: no room" in said
    assert results.comparisons[0].n == 6
    with pytest.raises(Exception, match="the first run failed: ZeroDivisionError"):
        powergrad.compare(lambda seed, arm: 1 / 0, ["a", "b"], 6, metric="accuracy")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"arms": ["a"]}, "`arms`"),
        ({"arms": ["a", "a"]}, "`arms`"),
        ({"arms": "ab"}, "`arms`"),
        ({"arms": {"a": {}, "b": {"x": object()}}}, "'b'"),
        ({"arms": {"a": {}, "b": {"seed": 1}}}, "'seed'"),
        ({"train": 3}, "`train`"),
        ({"train": lambda seed, arm: "x"}, "str"),
        ({"train": lambda seed, arm: {"a": 1, "b": 2}, "metric": None}, "a, b"),
        ({"metric": None}, "`metric`"),
        ({"metric": "f1"}, "`better`"),
        ({"metric": "loss"}, "`margin`"),
        ({"better": "more"}, "'more'"),
        ({"seeds": "many"}, "'many'"),
        ({"workers": 0}, "`workers`"),
        ({"name": "x"}, "`out`"),
    ],
)  # fmt: skip
def test_bad_input(arguments, message, capsys):
    given = {"train": lambda seed, arm, **_: noisy(seed, arm), "arms": ["a", "b"], "seeds": 6}
    with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
        powergrad.compare(**{**given, "metric": "accuracy", **arguments})
    assert message in str(error.value)


def test_frame_has_a_row_per_run_and_html_is_escaped(capsys):
    results = powergrad.compare(lambda seed, arm: noisy(seed, arm), ["a<b>", "b"], 6, metric="acc")
    assert "<b>" not in results._repr_html_()
    assert "a&lt;b&gt;" in results._repr_html_()
    frame = results.to_frame()
    assert len(frame) == 12
    row = frame[(frame.arm == "b") & (frame.seed == 1)].iloc[0]
    assert row.acc == noisy(1, "b")
    assert not row.diverged


def test_without_the_workbench(monkeypatch):
    monkeypatch.setitem(sys.modules, "powergrad.lab.compare_function", None)
    exec("from powergrad import *", scope := {})
    for compare in (powergrad.compare, scope["compare"]):
        with pytest.raises(ImportError, match=r"pip install 'powergrad\[lab\]'"):
            compare(noisy, ["a", "b"], 6)


def test_the_workbench_is_imported_when_compare_is_used():
    code = (
        "import pickle, sys, powergrad; assert 'compare' in dir(powergrad); lab = 'powergrad.lab';"
        "assert lab not in sys.modules; compare = powergrad.compare; assert lab in sys.modules;"
        "assert pickle.loads(pickle.dumps(compare)) is compare; assert 'seeds' in compare.__doc__"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    """Its cells in order, as a kernel executes them; in one process, as in a notebook."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "examples" / "compare.ipynb").read_text())
    scope: dict[str, Any] = {"__name__": "notebook"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec(compile("".join(cell["source"]), "compare.ipynb", "exec"), scope)
    results = scope["results"]
    assert [c.n for c in results.comparisons] == [8, 8]
    assert results.verdict in capsys.readouterr().out
    assert (tmp_path / "comparison" / "report.html").is_file()
