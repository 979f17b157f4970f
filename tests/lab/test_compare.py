"""``powergrad compare``, ``sweep``, ``decompose`` and ``plan`` of recipes."""

import json
import math
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import ttest_ind
from studies import SMALL, TOKENS, powergrad

from powergrad.lab.report.serving import make_live_data
from powergrad.lab.signals import Interrupted
from powergrad.lab.stats import error_of_looks, plan
from powergrad.lab.study import execute, load_study
from powergrad.lab.study.arms import decomposition
from powergrad.lab.trainer.recipe import Recipe
from powergrad.lab.trainer.run_folder import Result, Run


@pytest.fixture
def compare(made_up, tmp_path, capsys):
    """Runs the command with made-up runs; returns study.json, which the terminal must repeat."""

    def run(*tokens: object, arms: str = "baseline,pgt", out: Path = tmp_path) -> dict[str, Any]:
        command = ["compare", "digits", *TOKENS, "--arms", arms, "--out", out, "--name", "s"]
        assert powergrad(*command, *tokens) == 0, capsys.readouterr().err
        said = capsys.readouterr().out
        saved = json.loads((out / "s/study.json").read_text())
        sentences = [comparison["sentence"] for comparison in saved["comparisons"]]
        for text in (saved["verdict"], *sentences, *saved["notes"], *saved["advice"]):
            assert text in said
        assert (out / "s/study.png").read_bytes().startswith(b"\x89PNG")
        return saved

    return run


def runs_of(saved: dict[str, Any]) -> Counter[str]:
    return Counter(row["arm"] for row in saved["rows"])


def one_is_better(made_up):
    """At alpha 0.5 runs are clearly better; otherwise they only vary."""

    def accuracy(recipe: Recipe) -> float:
        noise = made_up.noise(recipe)
        return 100 + 0.1 * noise if recipe.loss.alpha == 0.5 else 97 + 1.5 * noise

    made_up.accuracy = accuracy


def test_arm_stops_at_the_look_that_settles_it(made_up, compare):
    one_is_better(made_up)
    saved = compare("--alpha", "0.5,0.25")
    verdicts = {c["arm"]: c["verdict"] for c in saved["comparisons"]}
    assert verdicts == {"pgt(0.5)": "better", "pgt(0.25)": "not settled"}
    assert {c["arm"]: c["n"] for c in saved["comparisons"]} == {"pgt(0.5)": 8, "pgt(0.25)": 24}
    assert runs_of(saved) == {"baseline": 24, "pgt(0.5)": 8, "pgt(0.25)": 24}
    assert len(made_up.done) == 56
    assert any("pgt(0.5) after 8 seeds" in note for note in saved["notes"])
    assert saved["comparisons"][0]["n_baseline"] == 8  # as many runs as the stopped arm has


def test_other_numbers_of_seeds_are_noted_and_runs_are_reused(made_up, compare):
    settings, note = compare("--seeds", 8)["notes"]
    assert settings.startswith("Settings: pgt at lr * alpha and weight decay / alpha")
    assert "Correlation" in note
    fewer = compare("--seeds", 6)
    assert runs_of(fewer) == {"baseline": 6, "pgt": 6}
    assert len(made_up.done) == 16
    more = compare("--seeds", 12)
    (note,) = [n for n in more["notes"] if "Correlation" not in n and n != settings]
    assert "6 and 8 and 12 seeds" in note
    assert f"is {100 * error_of_looks((6, 8, 12), 1):.1f}%, not 5%" in note
    assert compare("--seeds", 12)["notes"] == more["notes"]  # the same command changes nothing
    assert len(made_up.done) == 24
    assert any("up to 20%" in note for note in compare("--seeds", "8..16")["notes"])


def test_rows_are_stored_while_runs_are_executed(made_up, compare, monkeypatch, tmp_path):
    monkeypatch.setattr(execute, "EVERY", -1.0)
    stored = []

    def accuracy(recipe: Recipe) -> float:
        stored.append(json.loads((tmp_path / "s/study.json").read_text()))
        return made_up.noise(recipe)

    made_up.accuracy = accuracy
    assert compare("--seeds", 6)["verdict"]
    assert [len(partial["rows"]) for partial in stored] == list(range(12))
    assert not any("verdict" in partial or "notes" in partial for partial in stored)


def test_known_runs_are_not_repeated_and_keep_their_commits(made_up, compare, tmp_path):
    first = compare("--seeds", 8, out=tmp_path / "one")
    table = tmp_path / "one/s/study.csv"
    table.write_text(table.read_text().replace("c0ffee", "0ddba11"))
    made_up.done.clear()
    again = compare("--seeds", 8, "--reuse", table, out=tmp_path / "two")
    assert made_up.done == []
    assert again["comparisons"] == first["comparisons"]
    assert {row["commit"] for row in again["rows"]} == {"0ddba11"}
    more = compare("--seeds", 12, "--reuse", table, out=tmp_path / "two")
    assert len(made_up.done) == 8
    assert Counter(row["commit"] for row in more["rows"]) == {"0ddba11": 16, "c0ffee": 8}


def test_run_without_the_metric_is_an_error_and_has_a_page(made_up, monkeypatch, tmp_path, capsys):
    execute = made_up.execute

    def without(recipe, run):
        result = execute(recipe, run)
        if len(made_up.done) == 1:
            run.finish(Result(metrics={"seconds": 1.0, "test_accuracy": None}, about=result.about))
        return run.result()

    monkeypatch.setattr(made_up, "execute", without)
    tokens = ["compare", "digits", *TOKENS, "--arms", "baseline,pgt", "--seeds", 2]
    assert powergrad(*tokens, "--out", tmp_path, "--name", "s") == 2
    assert "'baseline' at seed 0" in capsys.readouterr().err
    assert {"study.csv", "report.html"} <= {path.name for path in (tmp_path / "s").iterdir()}


REPEATS = ["--tune", "lr=0.006:0.4", "--trials", 3, "--repeats", 6, "--seeds", 2]


def test_repeats_are_compared_by_their_means(made_up, compare, tmp_path):
    saved = compare(*REPEATS)
    values = {arm: [] for arm in ("pgt", "baseline")}
    for row in saved["rows"]:
        values[row["arm"]].append(row["metrics"]["test_accuracy"])
    (comparison,) = saved["comparisons"]
    means = (np.reshape(own, (6, 2)).mean(1) for own in values.values())
    test: Any = ttest_ind(*means, equal_var=False)
    assert comparison["p"] == pytest.approx(test.pvalue)
    assert comparison["interval"] == pytest.approx([*test.confidence_interval(0.95)])
    assert (comparison["n"], comparison["counted"]) == (6, "repeats")
    # 6 repeats x 2 arms x (3 points + 2 seeds); seeds are fresh everywhere.
    assert len(made_up.done) == 60
    finals = {row["seed"] for row in saved["rows"]}
    trials = {row["seed"] for row in saved["trials"]}
    assert finals == set(range(12))
    assert len(trials) == 6
    assert not trials & finals
    for row in saved["rows"]:  # every repeat runs its own winner
        choice = saved["tuning"]["repeats"][row.get("unit", 0)][row["arm"]]
        best = max(choice["trials"], key=lambda trial: trial["mean"])
        assert choice["trials"][choice["chosen"]] == best
        assert (
            Run(tmp_path / "s" / row["run"]).recipe().optimizer.lr == best["point"]["optimizer.lr"]
        )


def test_settled_arms_are_not_tuned_again(made_up, compare):
    one_is_better(made_up)
    tokens = ["--tune", "lr=0.006:0.4", "--trials", 3, "--repeats", "6,8", "--seeds", 1]
    saved = compare(*tokens, "--alpha", "0.5,0.25")
    assert runs_of(saved) == {"baseline": 8, "pgt(0.5)": 6, "pgt(0.25)": 8}
    trials = Counter(row["arm"] for row in saved["trials"])
    assert trials == {"baseline": 24, "pgt(0.5)": 18, "pgt(0.25)": 24}


def test_interrupted_study_continues(made_up, compare, tmp_path, monkeypatch, capsys):
    whole = compare(*REPEATS, out=tmp_path / "whole")
    made_up.done.clear()
    execute = made_up.execute

    def interrupted(recipe, run):
        if len(made_up.done) == 33:
            raise Interrupted("stopped")
        return execute(recipe, run)

    tokens = ["compare", "digits", *TOKENS, "--arms", "baseline,pgt", *REPEATS]
    with monkeypatch.context() as patch:
        patch.setattr(made_up, "execute", interrupted)
        assert powergrad(*tokens, "--out", tmp_path / "parts", "--name", "s") == 130
    assert "the same command continues" in capsys.readouterr().err
    resumed = compare(*REPEATS, out=tmp_path / "parts")
    assert len(made_up.done) == len(set(made_up.done)) == 60
    for part in ("rows", "trials", "comparisons", "tuning", "notes", "verdict"):
        assert resumed[part] == whole[part], part


def test_choice_at_the_edge_is_not_called_better(made_up, compare, tmp_path):
    tokens, best = ["--seeds", 8, "--tune-seeds", 1, "--tune"], 0.3
    made_up.accuracy = lambda recipe: (
        90
        - 50 * abs(recipe.optimizer.lr - best)
        - 3 * recipe.loss.alpha
        + made_up.noise(recipe) / 9
    )
    for name, values in (("list", ["lr=0.1,0.2,0.3"]), ("range", ["lr=0.01:0.3", "--trials", 16])):
        (comparison,) = compare(*tokens, *values, out=tmp_path / name)["comparisons"]
        assert comparison["interval"][0] > 0
        assert comparison["verdict"] == "not settled"
    best = 0.2
    saved = compare(*tokens, "lr=0.1,0.2,0.3", out=tmp_path / "inner")
    assert saved["comparisons"][0]["verdict"] == "better"
    assert any("chosen values of lr" in note for note in saved["notes"])


def test_trials_use_held_out_data(in_process, tmp_path):
    tokens = ["compare", "digits", *TOKENS, "--train.epochs=2", "--arms", "baseline,pgt",
              "--tune", "lr=0.0001,0.1", "model.width=6", "--tune-seeds", 1, "--seeds", 2,
              "--out", tmp_path, "--name", "t"]  # fmt: skip
    assert powergrad(*tokens) == 0
    results: Any = load_study(tmp_path / "t")
    assert results.study.base.model.width == 6  # a single value behind --tune is an override
    trials = [Run(folder).recipe() for folder in (tmp_path / "t/tuning").glob("*-seed*")]
    assert {(recipe.data.hold_out, recipe.seed) for recipe in trials} == {(0.2, 1000)}
    assert len(trials) == 4
    finals = [Run(folder).recipe() for folder in (tmp_path / "t").glob("*-seed*")]
    assert {(recipe.data.hold_out, recipe.seed) for recipe in finals} == {(0, 0), (0, 1)}
    for recipe in finals:
        arm = "pgt" if recipe.loss.alpha < 1 else "baseline"
        assert recipe.optimizer.lr == results.settings(arm)["optimizer.lr"]


def test_study_is_not_continued_with_another_tuning(made_up, compare, tmp_path, capsys):
    compare("--tune", "lr=0.1,0.2", "--seeds", 2)
    tokens = ["compare", "digits", *TOKENS, "--arms", "baseline,pgt", "--out", tmp_path]
    for other in (["--tune", "lr=0.1,0.4"], []):
        assert powergrad(*tokens, "--name", "s", "--seeds", 2, *other) == 2
        assert "choose another --name" in capsys.readouterr().err


@pytest.mark.studies
def test_comparison_with_worker_processes(tmp_path, capsys):
    tokens = ["compare", "digits", *TOKENS, "--arms", "baseline,pgt", "--seeds", 2, "--workers", 2,
              "--out", tmp_path, "--name", "s"]  # fmt: skip
    assert powergrad(*tokens) == 0
    assert "4 runs, 2 at a time" in capsys.readouterr().err
    results = load_study(tmp_path / "s")
    for row in results.rows:
        result: Any = Run(tmp_path / "s" / row.run).result()
        assert row.metrics["test_accuracy"] == result.metrics["test_accuracy"]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("s/*/model.safetensors")}
    assert len(before) == 4
    assert powergrad(*tokens) == 0
    assert "Reusing 4 finished runs" in capsys.readouterr().err
    assert before == {path: path.stat().st_mtime_ns for path in before}
    (delta,) = [2 * abs(c.difference) + 1 for c in results.comparisons]
    assert powergrad("plan", "--delta", delta, "--study", tmp_path / "s") == 0
    variances = [np.var(list(results.values(arm).values()), ddof=1) for arm in results.arms]
    assert f"at sigma {math.sqrt(np.mean(variances)):.3g}" in capsys.readouterr().out


def test_sweep_runs_its_grid_and_another_grid_is_added(made_up, tmp_path):
    tokens = ["sweep", "digits", *TOKENS, "--seeds", 2, "--out", tmp_path, "--name", "s", "--grid"]
    for grids in (["alpha=1,0.5"], ["alpha=0.25,0.1"], ["lr=0.1,0.2", "--grid", "alpha=1,0.5"]):
        assert powergrad(*tokens, *grids) == 0
        assert (tmp_path / "s/study.png").stat().st_size > 5000
    arms = load_study(tmp_path / "s").arms
    assert arms[:5] == ["alpha=1", "alpha=0.5", "alpha=0.25", "alpha=0.1", "lr=0.1, alpha=1"]


def test_decomposition_tunes_cross_entropy_for_all_arms(made_up, tmp_path, capsys):
    made_up.accuracy = lambda recipe: 90 + recipe.optimizer.lr + 0.1 * made_up.noise(recipe)
    tokens = ["decompose", "digits", *TOKENS, "--tune", "lr=0.05,0.1", "--tune-seeds", 1,
              "--seeds", 2, "--out", tmp_path, "--name", "d"]  # fmt: skip
    assert powergrad(*tokens) == 0
    said = capsys.readouterr().out
    assert "they are the same training" in said
    assert "PGT at alpha 0.25: " in said
    results: Any = load_study(tmp_path / "d")
    assert max(results.identity.gaps.values()) < 1e-9
    assert results.arms == list(decomposition(SMALL, 0.25))
    for folder in (tmp_path / "d").glob("PGT-seed*"):
        assert Run(folder).recipe().optimizer.lr == 0.1
    assert powergrad("inspect", tmp_path / "d") == 0
    assert powergrad(*tokens, "--repeats", 2) == 2


def test_an_unfinished_tuning_of_a_decomposition_can_be_looked_at(made_up, tmp_path, capsys):
    def stop(recipe):
        raise Interrupted("stopped")

    made_up.accuracy = stop
    tokens = ["decompose", "digits", *TOKENS, "--tune", "lr=0.05,0.1", "--tune-seeds", 1,
              "--seeds", 1, "--out", tmp_path, "--name", "d"]  # fmt: skip
    assert powergrad(*tokens) == 130
    assert powergrad("inspect", tmp_path / "d") == 0
    live = make_live_data(tmp_path / "d")
    assert not live["live"]["is_finished"]
    assert live["studies"][0]["runs"] == []
    made_up.accuracy = lambda recipe: 90.0
    assert powergrad(*tokens) == 0  # continues
    assert "Next: --seeds 8..24 instead. It continues" in capsys.readouterr().out
    assert load_study(tmp_path / "d").study.kind == "decompose"  # pyright: ignore


@pytest.mark.parametrize("seeds", [1, 4])
def test_too_few_seeds_are_told_what_to_do_and_can_be_continued(made_up, tmp_path, capsys, seeds):
    tokens = ["compare", "digits", *TOKENS, "--arms", "baseline,pgt", "--out", tmp_path]
    assert powergrad(*tokens, "--seeds", seeds) == 0
    said = capsys.readouterr()
    before = said.err.partition("runs")[0] + said.err
    assert f"{seeds} runs per arm: a verdict needs at least 6 per arm, or the noise" in before
    assert "Next: --seeds 8..24 instead" in said.err
    assert "Next: --seeds 8..24 instead" in said.out
    assert powergrad(*tokens) == 0
    said = capsys.readouterr().out
    assert "without planning it" not in said  # no verdict was possible
    assert len(made_up.done) == len(set(made_up.done))  # nothing was repeated


@pytest.mark.parametrize(
    ("tokens", "word"),
    [
        (["--seeds", "0"], "'0'"),
        (["--arm", "other: model.name=resnet19"], "'resnet19'"),
        (["--alpha", "1.5"], "loss.alpha"),
        (["--metric", "beauty"], "`metric`"),
        (["--margin", "0"], "`margin`"),
        (["--loss.alpha", "0.1"], "loss.alpha"),
        (["--seed", "7"], "--first-seed"),
        (["--arm", "x: data.hold_out=0.1"], "tested on the same examples"),
        (["--tune", "lr=0.1,0.2", "--data.hold_out", "0.2"], "data.hold_out"),
        (["loss=1", "loss.alpha=0.3"], "'loss'"),
        (["--tune", "lrr=1,2"], "'lrr'"),
        (["--workers", "0"], "`workers`"),
        (["--threads", "0"], "`threads`"),
        (["--tune", "lr", "--tune-seeds", "0"], "--tune-seeds"),
        (["--repeats", "8"], "--repeats only with --tune"),
        (["--tune", "lr", "--repeats", "few"], "--repeats"),
        (["--tune", "lr", "--repeats", "8", "--seeds", "8..24"], "seeds per repeat"),
        (["--tune", "lr=0.1:1", "--trials", "1"], "--trials"),
        (["--tune", "lr=1:0.1"], "low < high"),
        (["--tune", "lr=0.1,0.2", "optimizer.lr=1,2"], "each key of --tune once"),
        (["--tune", "lr", "nobody: wd=0.1:1"], "'nobody'"),
        (["--tune", "pgt: lr=0.1:1"], "none for baseline"),
        (["--tune", "optimizer.lr=0.1"], "several values or a range"),
        (["--reuse", "nowhere.csv"], "nowhere.csv"),
        (["--head", "fc"], "--head only with your own program"),
        (["--better", "lower"], "--better only with"),
        (["--cluster", "tcp://127.0.0.1:1"], "127.0.0.1:1"),
    ],
)
def test_bad_input_is_named_before_any_run(tmp_path, capsys, tokens, word):
    assert powergrad("compare", "digits", *TOKENS, "--out", tmp_path / "runs", *tokens) == 2
    assert word in capsys.readouterr().err
    assert not list(tmp_path.glob("runs/*/*/model.safetensors"))


@pytest.mark.parametrize("sigma", [0.118, "imagenet-resnet18"])
def test_plan_is_that_of_the_library(capsys, sigma):
    assert powergrad("plan", "--delta", 0.14, "--sigma", sigma) == 0
    assert capsys.readouterr().out.startswith(f"{plan(0.14, 0.118).seeds} runs per arm ")


def test_plan_with_known_noise_needs_fewer_runs(capsys):
    assert powergrad("plan", "--delta", 0.4, "--sigma", 0.118, "--known") == 0
    n = int(capsys.readouterr().out.split()[0])
    assert n == plan(0.4, 0.118, known=True).seeds < 6
    power = [statistics.NormalDist().cdf(0.4 / (0.118 * (2 / k) ** 0.5) - 1.96) for k in (n - 1, n)]
    assert power[1] > 0.79  # and with fewer runs it is smaller, unless two are the least
    assert n == 2 or power[0] < 0.81


@pytest.mark.parametrize("tokens", [[], ["--delta", "0", "--sigma", "0.1"], ["--sigma", "mnist"]])
def test_plan_with_bad_input(capsys, tokens):
    assert powergrad("plan", "--delta", "0.1", *tokens) == 2
    assert capsys.readouterr().err


def test_plan_uses_the_metric_of_a_table(tmp_path, capsys):
    rows = "".join(f"a,{seed},{90 + seed},{0.005 * seed}\n" for seed in range(8))
    (tmp_path / "study.csv").write_text("arm,seed,test_accuracy,nll\n" + rows)  # one arm will do
    said = []
    for tokens in ([], ["--metric", "nll"]):
        command = ["plan", "--delta", "1", "--study", tmp_path / "study.csv", *tokens]
        assert powergrad(*command) == 0
        said.append(capsys.readouterr().out)
    assert said[0] != said[1]
