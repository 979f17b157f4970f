"""``powergrad.compare(train, arms, seeds)``: a Python function, here and in worker processes.

References: what the function returns when it is called by hand, and ``compare --from`` on the same
numbers.
"""

from __future__ import annotations

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
from powergrad.lab.jobs.function import place_of
from powergrad.lab.report.collect import collect
from powergrad.lab.study import Results

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
    assert "24 runs, about 0 s with 1 at a time" in capsys.readouterr().err
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
    told = json.loads((tmp_path / "page" / "study.json").read_text())
    table = Results.from_csv(tmp_path / "page" / "study.csv", metric="accuracy")
    assert [c.to_dict() for c in table.comparisons] == told["comparisons"]
    again = Results.load(tmp_path / "page" / "study.json")
    assert again.study is not None
    assert again.study.program.to_dict()["program"] == "function"
    (shown,) = collect([results.results])["studies"]
    assert shown["foreign"]
    assert {run["status"] for run in shown["runs"]} == {"finished"}


def test_what_users_named_is_escaped(capsys):
    arms = ["a<b>", "c & d"]
    results = powergrad.compare(lambda seed, arm: noisy(seed, arm), arms, 6, metric="accuracy")
    assert "<b>" not in results._repr_html_()
    assert "a&lt;b&gt;" in results._repr_html_()


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
    message = r"under `if __name__ == '__main__':`, but got a call while a worker"
    with pytest.raises(RuntimeError, match=message):
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
    notes = " ".join(results.results.notes())
    assert "1 of 8 runs of b failed and do not count (seed 2): ArithmeticError: no room" in notes
    assert "Diverged: 1 of 8 runs of b." in notes
    assert results.comparisons[0].n == 7
    with pytest.raises(Exception, match="the first run failed: ZeroDivisionError"):
        powergrad.compare(lambda seed, arm: 1 / 0, ["a", "b"], 6, metric="accuracy")


def test_a_changed_function_is_called_again(tmp_path, capsys):
    calls = []

    def first(seed, arm):
        calls.append(1)
        return noisy(seed, arm)

    def second(seed, arm):
        calls.append(2)
        return noisy(seed, arm) + 1

    second.__qualname__ = first.__qualname__
    for train, total in ((first, 13), (first, 13), (second, 26)):
        powergrad.compare(train, ["a", "b"], 6, metric="accuracy", out=tmp_path, name="s")
        assert len(calls) == total
    assert "changed since the runs" in capsys.readouterr().err


def two(seed, arm):
    return {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"arms": ["a"]}, "Expected `arms` to have at least two different names"),
        ({"arms": ["a", "a"]}, "Expected `arms` to have at least two different names"),
        ({"arms": "ab"}, "Expected `arms` to be a list or a mapping"),
        ({"arms": {"a": {}, "b": {"x": object()}}}, "Expected plain values"),
        ({"arms": {"a": {}, "b": {"seed": 1}}}, "the settings of 'b' not to contain 'seed'"),
        ({"train": 3}, "Expected `train` to be a function, but got int"),
        ({"train": lambda seed, arm: "x"}, "return a number or a mapping of numbers, but got str"),
        ({"train": lambda seed, arm: {"seed": 1}}, "not to be reserved, but got 'seed'"),
        ({"train": lambda *_: two(*_), "metric": None}, "Expected `metric`, one of a, b, but got"),
        ({"metric": None}, "Expected `metric`, the name of the number that `train` returns"),
        (
            {"metric": "f1"},
            "Expected `better` higher or `better` lower, because the name 'f1' does not",
        ),
        ({"metric": "loss"}, "Expected `margin`, the largest difference"),
        ({"better": "more"}, "Expected `better` to be 'higher' or 'lower', but got 'more'"),
        ({"seeds": "many"}, "Expected"),
        ({"workers": 0}, "Expected `workers` to be at least 1, but got 0"),
        ({"name": "x"}, "Expected `out` to be given with `name`, but got only 'x'"),
    ],
)  # fmt: skip
def test_bad_input(arguments, message, capsys):
    given = {"train": lambda seed, arm, **_: noisy(seed, arm), "arms": ["a", "b"], "seeds": 6}
    with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
        powergrad.compare(**{**given, "metric": "accuracy", **arguments})
    assert message in str(error.value)


def test_a_frame_needs_pandas(monkeypatch, capsys):
    results = powergrad.compare(lambda seed, arm: noisy(seed, arm), ["a", "b"], 6, metric="acc")
    made = SimpleNamespace(DataFrame=list)
    monkeypatch.setitem(sys.modules, "pandas", made)
    frame = results.to_frame()
    assert len(frame) == 12
    row = {"arm": "b", "seed": 1, "diverged": False, "acc": noisy(1, "b")}
    assert {key: frame[3][key] for key in row} == row
    assert frame[3].keys() - row.keys() == {"run", "commit", "seconds"} & frame[3].keys()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"Expected pandas to be installed for `to_frame`"):
        results.to_frame()


def test_without_the_workbench(monkeypatch):
    monkeypatch.setitem(sys.modules, "powergrad.lab.comparing", None)
    with pytest.raises(ImportError, match=r"pip install 'powergrad\[lab\]'"):
        powergrad.compare(noisy, ["a", "b"], 6)


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
