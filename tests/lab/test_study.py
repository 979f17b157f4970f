import csv
import inspect
import io
import json
import math
import os
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import threading
import time
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
import yaml
from scipy.stats import multivariate_normal, norm, ttest_ind
from torch import nn

import powergrad_cli
from powergrad import equivalent_training
from powergrad.lab import figures
from powergrad.lab.cli.studies import compare
from powergrad.lab.jobs import JobError, RecipeJob, RecipeProgram
from powergrad.lab.jobs.job import merge_result, split_result
from powergrad.lab.jobs.queue import JobQueue, enqueue, open_queue
from powergrad.lab.jobs.worker import work
from powergrad.lab.report.collect import collect
from powergrad.lab.report.page import as_json
from powergrad.lab.signals import Interrupted
from powergrad.lab.stats import Design, parse_runs
from powergrad.lab.study import (
    METRICS,
    Execution,
    Grid,
    Results,
    RunRow,
    Study,
    StudyKind,
    Tuning,
    run_study,
)
from powergrad.lab.study.advice import missing_control
from powergrad.lab.study.arms import METHODS, arms_of, decomposition, parse_arm, parse_grid
from powergrad.lab.study.decompose import (
    check_identity,
    describe_identity,
    explain_decomposition,
)
from powergrad.lab.study.execute import tune_once
from powergrad.lab.study.space import Axis, Space
from powergrad.lab.study.tuning import Tuner
from powergrad.lab.terminal import Watch, chart, result_tables
from powergrad.lab.trainer.recipe import Recipe, RecipeError, flatten, load_recipe
from powergrad.lab.trainer.run_folder import Result, Run, RunError

CHANGES = {
    "data.limit": 128,
    "model.width": 4,
    "model.norm": "none",
    "train.batch_size": 32,
    "train.epochs": 3,
    "schedule.warmup_epochs": 1,
    "optimizer.lr": 0.05,
    "machine.threads": 1,
    "machine.keep_best": False,
}
SMALL = Recipe().override(CHANGES)
RESULTS = Path(__file__).parents[2] / "results"
TOKENS = [f"--{key}={json.dumps(value)}" for key, value in CHANGES.items()]


def powergrad(*tokens):
    return powergrad_cli.main([str(token) for token in tokens])


def study_of(base, arms, seeds="2", kind=StudyKind.COMPARE, **options):
    return Study(kind, RecipeProgram(base), arms, Design(parse_runs(seeds)), **options)


def results_of(baseline, rows):
    """Results of accuracies by arm and seed."""
    metric = METRICS["test_accuracy"]
    made = [RunRow(arm, seed, {"test_accuracy": value}) for arm, seed, value in rows]
    return Results(metric, 0.5, baseline, made)


# Arms ---------------------------------------------------------------------------------------------


def test_named_arms_are_the_papers_methods():
    arms = arms_of(
        ["baseline", "pgt", "gc", "agc", "gc+pgt", "agc+pgt", "label-smoothing",
         "pgt+label-smoothing"], Recipe(), [0.3]
    )  # fmt: skip
    assert arms["baseline"] == {}
    assert arms["agc+pgt"] == {"clip.agc": 0.01, "loss.alpha": 0.3}
    assert arms["pgt+label-smoothing"] == {"loss.alpha": 0.3, "loss.label_smoothing": 0.1}
    assert arms["gc+pgt"] == {"clip.norm": 1.0, "loss.alpha": 0.3}
    for changes in arms.values():
        Recipe().override(changes)  # each is a recipe


def test_the_help_names_every_method():
    words = inspect.getdoc(compare) or ""
    assert [name for name in METHODS if not re.search(rf"\b{name}\b", words)] == []


def test_agc_clips_above_the_decay():
    recipe = SMALL.override({"optimizer.weight_decay": 0.02})
    _, changes = parse_arm("agc", recipe, 0.3)
    assert changes == {"clip.agc": 0.16}
    recipe.override(changes)
    with pytest.raises(RecipeError, match=r"clip.agc: expected more than optimizer.weight_decay"):
        recipe.override({"clip.agc": 0.01})


def test_less_decay_is_what_pgt_leaves_the_backbone():
    recipe = SMALL.override({"optimizer.weight_decay": 0.02})
    arms = arms_of(["baseline", "pgt", "less-decay"], recipe, [0.25, 0.5])
    assert arms["less-decay(0.25)"] == {"optimizer.weight_decay": 0.005}
    assert arms["less-decay(0.5)"] == {"optimizer.weight_decay": 0.01}
    backbone = decomposition(recipe, 0.25)["backbone decay * alpha"]
    assert backbone == {"optimizer.backbone.weight_decay": 0.25}  # the same, for the backbone
    with pytest.raises(RecipeError, match="weight_decay above 0 for less-decay, but got 0"):
        parse_arm("less-decay", recipe.override({"optimizer.weight_decay": 0}), 0.25)


@pytest.mark.parametrize(("name", "expected"), [("sgd", 1 / 16), ("adam", 1 / 4), ("adamw", 1 / 4)])
def test_head_lr_is_pgts_ratio_of_rates_and_nothing_else(name, expected):
    recipe = SMALL.override({"optimizer.name": name})
    arm = arms_of(["baseline", "head-lr"], recipe, [0.25])["head-lr"]
    assert arm == {"optimizer.head.lr": expected}  # decays, eps and the head's start stay
    groups = decomposition(recipe, 0.25)["two-group CE"]
    assert expected == groups["optimizer.head.lr"] / groups.get("optimizer.backbone.lr", 1)

    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
    equal = equivalent_training(model, kind(model.parameters(), lr=0.1), alpha=0.25)
    backbone, head = equal.param_groups
    assert expected == pytest.approx(head["lr"] / backbone["lr"], rel=1e-15)


def test_head_lr_multiplies_the_recipes_own_factor_once_for_each_alpha():
    recipe = SMALL.override({"optimizer.head.lr": 2.0})
    arms = arms_of(["baseline", "head-lr"], recipe, [0.5, 0.25])
    assert arms["head-lr(0.5)"] == {"optimizer.head.lr": 0.5}
    assert arms["head-lr(0.25)"] == {"optimizer.head.lr": 0.125}


def test_head_lr_refuses_an_optimizer_whose_ratio_is_not_known():
    other = SMALL.optimizer.model_copy(update={"name": "lion"})  # which no recipe accepts today
    with pytest.raises(RecipeError, match=r"one of sgd, adam, adamw for head-lr, but got 'lion'"):
        parse_arm("head-lr", SMALL.model_copy(update={"optimizer": other}), 0.25)
    with pytest.raises(RecipeError, match=r"optimizer\.head\.lr"):  # a head that does not learn
        SMALL.override(parse_arm("head-lr", SMALL, 0.0)[1])


@pytest.mark.parametrize(
    ("better", "changes", "more", "expected"),
    [
        (["pgt"], {}, {}, "less-decay"),
        (["agc"], {}, {"agc": {"clip.agc": 0.2}}, ""),
        (["pgt"], {"optimizer.weight_decay": 0}, {}, "head-lr"),
        (["pgt"], {"optimizer.name": "adam"}, {}, "less-decay"),
        (["pgt"], {"optimizer.name": "adamw"}, {}, "head-lr"),  # there PGT moves no decay
        (["pgt"], {}, {"half": {"optimizer.backbone.weight_decay": 0.5}}, "head-lr"),
        (["pgt"], {}, {"less-decay": {"optimizer.weight_decay": 0.001}}, "head-lr"),
        (["pgt"], {}, {"less": {"optimizer.weight_decay": 0.001, "optimizer.head.lr": 0.1}}, ""),
        (["pgt"], {}, {"both": {"optimizer.weight_decay": 1e-3, "loss.alpha": 0.2}}, "less-decay"),
        (["pgt"], {}, {"more": {"optimizer.weight_decay": 0.1}}, "less-decay"),
    ],
)
def test_the_control_is_named_where_pgt_is_better_without_it(better, changes, more, expected):
    base = SMALL.override({"optimizer.weight_decay": 0.02, **changes})
    arms = {"baseline": {}, "pgt": {"loss.alpha": 0.25}, **more}
    study = study_of(base, arms, tuned=("optimizer.lr",))
    advice = missing_control(study, better)
    assert bool(advice) == bool(expected)
    if advice:
        assert advice.startswith("Before you keep pgt:")
        assert f"add {expected} to --arms" in advice
    # These have it themselves.
    assert missing_control(replace(study, kind=StudyKind.DECOMPOSE), better) is None
    tuned = missing_control(replace(study, tuned=("optimizer.weight_decay",)), better)
    assert "less-decay" not in (tuned or "")


def test_an_unknown_arm_is_refused_with_the_nearest():
    with pytest.raises(RecipeError, match="'pgtt'; did you mean 'pgt'"):
        parse_arm("agc+pgtt", SMALL, 0.3)


def test_an_arm_twice_is_refused():
    with pytest.raises(RecipeError, match="'pgt' twice"):
        arms_of(["pgt", "pgt"], SMALL, [0.3])
    with pytest.raises(RecipeError, match="'a' and 'b', which are the same run"):
        study_of(SMALL, {"a": {}, "b": {"loss.alpha": 1.0}})


@pytest.mark.parametrize("text", ["lr", "lr=", "lr=1,1"])
def test_a_grid_that_is_none(text):
    with pytest.raises(RecipeError):
        parse_grid([text])


def test_every_arm_of_the_decomposition_is_a_factor_of_the_identity():
    arms = decomposition(SMALL, 0.25)
    assert len(arms) == 10  # CE, PGT, their equal, five factors, CE(alpha z), CE at lr / alpha
    together = arms["two-group CE"]
    alone = [changes for arm, changes in arms.items() if "alpha" in arm and "CE" not in arm]
    assert len(alone) == 5
    assert {k: v for changes in alone for k, v in changes.items()} == together
    assert together == {
        "optimizer.backbone.lr": 4.0,
        "optimizer.backbone.weight_decay": 0.25,
        "optimizer.head.lr": 0.25,
        "optimizer.head.weight_decay": 4.0,
        "model.head_scale": 0.25,
    }
    with pytest.raises(RecipeError, match="above 0 and below 1"):
        decomposition(SMALL, 1.0)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_the_equal_training_is_equal(optimizer):
    changes = {"optimizer.name": optimizer, "optimizer.weight_decay": 0.01, "train.epochs": 8}
    if optimizer != "sgd":
        changes |= {"optimizer.lr": 2e-3, "schedule.warmup_start": 1e-4}
    gaps = check_identity(SMALL.override(changes), alpha=0.3)
    assert list(gaps) == [1, 10]  # of 32 steps
    assert gaps[10] < 1e-12
    assert describe_identity(gaps).endswith("they are the same training.")


def test_the_identity_is_not_claimed_where_it_is_not_seen():
    assert describe_identity({1: 1e-16, 10: 1e-14, 50: 1e-12, 200: 1e-9}).endswith("same training.")
    unstable = describe_identity({1: 1e-16, 10: 1e-13, 50: 1e-7, 200: 0.56})
    assert unstable.endswith("the same training, but it is unstable, so rounding errors grow.")
    assert "WARNING" in describe_identity({1: 1e-16, 10: 1e-2, 50: 0.1})
    assert "WARNING" in describe_identity({1: math.nan, 10: math.nan})


def test_an_unstable_training_is_the_same_at_first_and_then_another():
    gaps = check_identity(load_recipe("digits").override({"optimizer.lr": 0.1}), alpha=0.25)
    assert gaps[10] < 1e-13
    assert not gaps[200] < 1e-6


def test_a_grid_around_the_recipes_own_value():
    assert Axis.parse("lr", 0.05).values == (0.0125, 0.025, 0.05, 0.1, 0.2)
    with pytest.raises(RecipeError, match=r"Expected the values to try for 'clip.agc'"):
        Axis.parse("agc", None)


# Studies ------------------------------------------------------------------------------------------


@pytest.fixture
def in_process(monkeypatch):
    """Runs are executed here, one after another; other tests are of the queue and its workers."""

    def run(queue, jobs, watch=None):
        return {job.name: queue.known.get(job.name) or job.execute(queue.folder) for job in jobs}

    monkeypatch.setattr(JobQueue, "run", run)


def noise(recipe):
    """Standard normal, another number for every alpha, rate and seed."""
    words = [recipe.seed, *np.array([recipe.loss.alpha, recipe.optimizer.lr]).view(np.uint32)]
    return np.random.default_rng(words).standard_normal()


class MadeUpRuns:
    """Runs without training: a folder has the recipe, and a result by `accuracy`."""

    def __init__(self):
        self.done = []
        self.accuracy = lambda recipe: 97 + 0.3 * noise(recipe)

    def execute(self, job, folder):
        run = Run(folder / job.name)
        if run.result() is None:
            self.done.append(job.name)
            run.folder.mkdir(parents=True, exist_ok=True)
            write(run.folder / "config.yaml", job.recipe.to_yaml())
            write(run.folder / "environment.json", '{"commit": "c0ffee"}')
            accuracy = float(self.accuracy(job.recipe))
            ended = {"epoch": job.recipe.train.epochs, "steps": 12, "classes": 10, "seconds": 1.0}
            ended |= {"train_loss": 0.1, "train_accuracy": 99.0, "diverged": math.isnan(accuracy)}
            run.finish(split_result({**ended, "test_accuracy": accuracy}))
        return merge_result(run.result() or Result(metrics={}))


@pytest.fixture
def made_up(in_process, monkeypatch):
    runs = MadeUpRuns()
    monkeypatch.setattr(RecipeJob, "execute", lambda job, folder: runs.execute(job, folder))
    return runs


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A comparison of two arms over two seeds, made by the command."""
    out = tmp_path_factory.mktemp("runs")
    status = powergrad("compare", "digits", *TOKENS, "--arms", "baseline,pgt", "--seeds", 2,
                       "--out", out, "--name", "small", "--workers", 2)  # fmt: skip
    assert status == 0
    return out / "small"


def test_what_a_comparison_leaves(study):
    told = json.loads((study / "study.json").read_text())
    assert told["arms"] == ["baseline", "pgt"]
    assert told["kind"] == "compare"
    assert told["changes"]["pgt"] == {"loss.alpha": 0.25}
    assert told["comparisons"][0]["verdict"] == "not settled"
    with open(study / "study.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["arm"], row["seed"]) for row in rows] == [
        ("baseline", "0"), ("pgt", "0"), ("baseline", "1"), ("pgt", "1")
    ]  # fmt: skip
    for row in rows:
        result = Run(study / row["run"]).result()
        assert result is not None
        assert float(row["test_accuracy"]) == result.metrics["test_accuracy"]
    means = [
        sum(float(r["test_accuracy"]) for r in rows if r["arm"] == arm) / 2
        for arm in ("pgt", "baseline")
    ]
    assert told["comparisons"][0]["difference"] == pytest.approx(means[0] - means[1])
    assert (study / "study.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_again_does_nothing_again(study, capsys):
    before = {path: path.stat().st_mtime_ns for path in study.glob("*/model.safetensors")}
    assert len(before) == 4
    powergrad("compare", "digits", *TOKENS, "--arms", "baseline,pgt", "--seeds", 2,
              "--out", study.parent, "--name", "small")  # fmt: skip
    assert {path: path.stat().st_mtime_ns for path in study.glob("*/model.safetensors")} == before
    said = capsys.readouterr().out
    assert "2 runs per arm cannot tell whether pgt differs from baseline" in said
    assert "Here pgt is not settled." in said


@pytest.mark.studies
def test_an_arm_that_diverges_is_compared_all_the_same(in_process, tmp_path, capsys):
    tokens = ["--arms", "baseline", "--arm", "fatal: lr=1e6", "--seeds", 6, "--out", tmp_path]
    assert powergrad("compare", "digits", *tokens, *TOKENS) == 0, capsys.readouterr()
    said = capsys.readouterr().out
    assert "Diverged: 6 of 6 runs of fatal. A run that diverged counts as 10." in said
    (folder,) = tmp_path.iterdir()
    rows = json.loads((folder / "study.json").read_text())["rows"]
    assert {row["test_accuracy"] for row in rows if row["arm"] == "fatal"} == {0.0}
    assert all(row["diverged"] == (row["arm"] == "fatal") for row in rows)
    # The page agrees, also where it has to find it out by itself.
    assert "Here fatal is worse than baseline." in said
    (folder / "study.json").unlink()
    assert powergrad("report", folder) == 0
    assert "Here fatal is worse than baseline." in (folder / "report.html").read_text()


def test_a_folder_of_another_recipe_is_refused_and_left_alone(study, capsys):
    before = {path: path.read_bytes() for path in study.glob("study.*")}
    status = powergrad("compare", "digits", *TOKENS, "--train.epochs=4", "--seeds", 2,
                       "--out", study.parent, "--name", "small")  # fmt: skip
    assert status == 2
    assert "got one of another program or tuning; choose another --name" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in study.glob("study.*")} == before
    status = powergrad("compare", "digits", *TOKENS, "--arms", "baseline,pgt", "--alpha", "0.5",
                       "--seeds", 2, "--out", study.parent, "--name", "small")  # fmt: skip
    assert status == 2
    assert "Expected the arm 'pgt'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--arms", "baseline,pgtt"], "did you mean 'pgt'?"),
        (
            ["--seeds", "0"],
            "Expected a number of runs per arm such as 12, 8..24 or 8,16,24, but got '0'",
        ),
        (["--alpha", "1.5"], "loss.alpha: expected less than or equal to 1, but got 1.5"),
        (["--alpha", "x"], "could not convert"),
        (["--metric", "beauty"], "Expected `--metric` to be one of"),
        (["--margin", "0"], "Expected `--margin` to be positive"),
        (["--loss.alpha", "0.1"], "the baseline would use PGT"),
        (["--seed", "7"], "Expected --seeds and --first-seed, but got seed = 7"),
        (["--arm", ": lr=0.2"], "Expected a name before the colon"),
        (["--arm", "x: data.hold_out=0.1"], "tested on the same examples"),
        (["--tune", "lr=0.1,0.2", "--data.hold_out", "0.2"], "data.hold_out to be 0 with --tune"),
        (["loss=1", "loss.alpha=0.3"], "Expected either 'loss' or keys in it"),
        (["--tune", "lrr=1,2"], "Expected --tune with a known key, but got 'lrr'"),
        (["--tune", "optimizer.lrr"], "did you mean 'optimizer.lr'?"),
        (["--optimizer.lrr", "1"], "did you mean 'optimizer.lr'?"),
        (["--workers", "0"], "Expected `--workers` to be at least 1"),
        (["--storage", "nonsense://x"], "storage"),
        (["--tune", "lr", "--tune-seeds", "0"], "--tune-seeds to be at least 1"),
        (["--seeds", "many"], "as 12, 8..24 or 8,16,24, but got 'many'"),
        (["--seeds", "24..8"], "as 12, 8..24 or 8,16,24, but got '24..8'"),
        (["--seeds", "8,8"], "as 12, 8..24 or 8,16,24, but got '8,8'"),
        (["--seeds=-3"], "as 12, 8..24 or 8,16,24, but got '-3'"),
        (["--repeats", "8"], "Expected --repeats only with --tune, but got '8'"),
        (["--trials", "4"], "Expected --trials only with --tune, but got 4"),
        (["--tune-map", "identity"], "Expected --tune-map only with --tune, but got 'identity'"),
        (["--tune", "lr", "--repeats", "few"], "as 12, 8..24 or 8,16,24, but got 'few'"),
        (["--tune", "lr", "--repeats", "0"], "as 12, 8..24 or 8,16,24, but got '0'"),
        (
            ["--tune", "lr", "--repeats", "8", "--seeds", "8..24"],
            "(the seeds per repeat), but got",
        ),
        (
            ["--tune", "lr", "--repeats", "8", "--seeds", "0"],
            "(the seeds per repeat), but got '0'",
        ),
        (["--tune", "lr=0.1:1", "--trials", "1"], "Expected --trials to be at least 2, but got 1"),
        (["--tune", "lr=1:0.1"], "with 0 < low < high, but got '1:0.1'"),
        (["--tune", "lr=0:1"], "with 0 < low < high, but got '0:1'"),
        (["--tune", "lr=a:b"], "with 0 < low < high, but got 'a:b'"),
        (["--tune", "lr=0.1,0.1"], "lr"),
        (["--tune", "lr=0.1,0.2", "optimizer.lr=1,2"], "Expected each key of --tune once"),
        (["--tune", "lr", "nobody: wd=0.1:1"], "Expected an arm before the colon of --tune"),
        (["--tune", "pgt: lr=0.1:1"], "a key for every arm, but got none for baseline"),
        (["--tune", "optimizer.lr=0.1"], "Expected --tune with several values or a range"),
        (["--tune", "clip.agc"], "Expected the values to try for 'clip.agc'"),
        (["--reuse", "nowhere.csv"], "Expected to read 'nowhere.csv'"),
    ],
)
def test_bad_input_to_compare(tmp_path, capsys, tokens, message):
    assert powergrad("compare", "digits", *TOKENS, "--out", tmp_path / "runs", *tokens) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("runs/*/*/model.safetensors"))


def test_tables_and_figures_of_a_study(study, tmp_path):
    from rich.console import Console

    results = Results.load(study / "study.csv")
    assert results.study is None  # a table of numbers, as from elsewhere
    assert results.mean("pgt") == Results.load(study).mean("pgt")
    console = Console(width=120, record=True, file=io.StringIO())
    for table in result_tables(results):
        console.print(table)
    text = console.export_text()
    assert "baseline" in text
    assert "pgt" in text
    assert "difference from baseline" in chart(results)
    figures.save(figures.study_figure(results, "a note"), tmp_path / "x.svg")
    assert "a note" in (tmp_path / "x.svg").read_text() or (tmp_path / "x.svg").stat().st_size


@pytest.mark.studies
def test_a_study_of_format_1_is_read_and_resumed(tmp_path, capsys):
    """A folder that version 0.1.0.dev0 wrote when kind and tuned key were one string."""
    archive = Path(__file__).parent / "fixtures" / "study-format-1.tar.gz"
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    folder = tmp_path / "tuned-compare"
    saved = json.loads((folder / "study.json").read_text())
    assert saved["kind"] == "compare-tuned-optimizer.lr"
    results = Results.load(folder)
    assert results.study is not None
    assert (results.study.kind, results.study.tuned) == (StudyKind.COMPARE, ("optimizer.lr",))
    assert list(results.study.seeds) == [0, 1]
    assert results.tuning is not None
    chosen = {arm: choice.winner.changes for arm, choice in results.tuning.arms.items()}
    assert chosen == {"baseline": {"optimizer.lr": 0.1}, "pgt": {"optimizer.lr": 0.05}}
    (comparison,) = results.comparisons
    assert comparison.difference == pytest.approx(saved["comparisons"][0]["difference"], rel=1e-12)
    assert comparison.verdict == "not settled"  # two runs per arm
    assert powergrad("report", folder) == 0
    # The command that made it does no final run again, and writes the present format.
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/result.json")}
    assert len(before) == 4
    base = yaml.safe_load((folder / "study.yaml").read_text())["base"]  # today's digits is another
    recipe = write(tmp_path / "base.yaml", yaml.safe_dump(base))
    tokens = ["--arms", "baseline,pgt", "--seeds", 2, "--tune", "lr=0.05,0.1", "--tune-seeds", 1]
    name = ["--out", tmp_path, "--name", "tuned-compare"]
    assert powergrad("compare", recipe, *tokens, *name) == 0, capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*/result.json")} == before
    assert yaml.safe_load((folder / "study.yaml").read_text())["format"] == 3
    again = json.loads((folder / "study.json").read_text())
    assert (again["kind"], again["tuned"]) == ("compare", ["optimizer.lr"])
    rows = [{k: v for k, v in row.items() if k != "commit"} for row in again["rows"]]
    assert rows == saved["rows"]  # which had no commit
    assert again["comparisons"] == [comparison.to_dict()]


def test_a_study_of_format_2_is_read_and_resumed(study, tmp_path, capsys):
    """Its study.yaml had a list of seeds, and its study.json neither design nor notes."""
    folder = shutil.copytree(study, tmp_path / "small")
    described = yaml.safe_load((folder / "study.yaml").read_text())
    for key in ("first_seed", "seeds_per_repeat", "tuning", "chosen", "looked_at"):
        del described[key]
    described |= {"format": 2, "seeds": [0, 1]}
    write(folder / "study.yaml", yaml.safe_dump(described, sort_keys=False))
    saved = json.loads((folder / "study.json").read_text())
    now = saved["comparisons"]
    for key in ("seeds", "first_seed", "seeds_per_repeat", "looked_at", "notes"):
        del saved[key]
    saved |= {"format": 2, "comparisons": [{"arm": "pgt", "verdict": "underpowered"}]}
    write(folder / "study.json", json.dumps(saved))
    for path in (folder, folder / "study.json"):
        results = Results.load(path)
        assert results.study is not None
        assert (list(results.study.seeds), results.study.design.looks) == ([0, 1], (2,))
        assert [comparison.to_dict() for comparison in results.comparisons] == now
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/result.json")}
    assert powergrad("compare", "digits", *TOKENS, "--arms", "baseline,pgt", "--seeds", 2,
                     "--out", tmp_path, "--name", "small") == 0  # fmt: skip
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*/result.json")} == before
    assert json.loads((folder / "study.json").read_text())["comparisons"] == now


@pytest.mark.parametrize("path", sorted(RESULTS.glob("compare_*.json")), ids=lambda p: p.stem)
def test_studies_that_earlier_versions_wrote_are_read(path):
    results = Results.load(path)
    saved = json.loads(path.read_text())
    assert saved.get("format", 1) < 3 or results.study is not None
    for comparison in results.comparisons:
        arm, base = (
            list(results.values(name).values()) for name in (comparison.arm, results.baseline)
        )
        arm, base = arm[: comparison.n], base[: comparison.n_baseline]
        assert comparison.difference == pytest.approx(np.mean(arm) - np.mean(base))
        assert comparison.n >= 2


def test_a_study_of_a_later_format_is_refused(study, tmp_path):
    later = shutil.copytree(study, tmp_path / "later")
    for name in ("study.json", "study.yaml"):
        path = later / name
        text = path.read_text()
        path.write_text(re.sub(r"(\W?format\W*: )3", r"\g<1>4", text, count=1))
        with pytest.raises(RunError, match="newer version of powergrad"):
            Results.load(later)
        path.write_text(text)


# Runs made elsewhere ------------------------------------------------------------------------------


def write(path, text):
    path.write_text(text)
    return path


GOOD = "arm,seed,metric\n" + "".join(
    f"{arm},{seed},{value + 0.1 * seed}\n"
    for arm, value in (("baseline", 90.0), ("new", 91.0))
    for seed in range(8)
)


def from_csv(path, *options):
    """``powergrad compare --from``, in the folder of the file."""
    return powergrad("compare", "--from", path, "--out", path.parent / "runs", *options)


def test_a_csv_from_elsewhere(tmp_path, capsys):
    assert from_csv(write(tmp_path / "r.csv", GOOD)) == 0
    said = capsys.readouterr().out
    assert "new is better than baseline: +1.00" in said
    assert "Here new is better than baseline." in said


@pytest.mark.parametrize("column", ["loss", "test_error", "val_NLL"])
def test_more_of_a_loss_is_worse(tmp_path, column):
    path = write(tmp_path / "r.csv", GOOD.replace("metric", column))
    with pytest.raises(RecipeError, match=r"Expected --margin, .* has no default"):
        Results.from_csv(path)
    assert Results.from_csv(path, margin=0.5).comparisons[0].verdict == "worse"
    turned = Results.from_csv(path, margin=0.5, better="higher")
    assert turned.comparisons[0].verdict == "better"


def test_which_is_better_is_asked_where_the_name_does_not_tell(tmp_path, capsys):
    path = write(tmp_path / "r.csv", GOOD.replace("metric", "beauty"))
    assert from_csv(path, "--margin", "0.5") == 2
    assert "Expected --better higher or --better lower" in capsys.readouterr().err
    assert from_csv(path, "--margin", "0.5", "--better", "lower") == 0
    assert "Here new is worse than baseline." in capsys.readouterr().out


def test_fractions_have_no_usual_margin(tmp_path):
    """Half a point is 0.005 of them, and 0.5 is nearly everything."""
    rows = (
        f"{arm},{seed},{value + 0.01 * math.sin(7 * seed)}\n"
        for arm, value in (("baseline", 0.89), ("new", 0.92))
        for seed in range(8)
    )
    path = write(tmp_path / "r.csv", "arm,seed,accuracy\n" + "".join(rows))
    with pytest.raises(RecipeError, match=r"Expected --margin, .* fractions, not percentages"):
        Results.from_csv(path)
    assert Results.from_csv(path, margin=0.005).comparisons[0].verdict == "better"


def test_a_metric_that_was_asked_for_must_be_there(tmp_path, capsys):
    path = write(tmp_path / "r.csv", GOOD.replace("metric", "loss"))
    assert from_csv(path, "--metric", "test_accuracy") == 2
    assert "to have the columns arm, seed and test_accuracy" in capsys.readouterr().err


def test_an_arm_whose_name_has_a_comma_is_quoted_in_the_verdict(tmp_path):
    twice = GOOD + re.sub("^new,", '"new, twice",', GOOD[GOOD.index("new,") :], flags=re.M)
    results = Results.from_csv(write(tmp_path / "r.csv", twice))
    assert results.verdict() == 'Here new and "new, twice" are better than baseline.'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "arm,metric\na,1\n",
            "choose it with --columns seed=COLUMN",
        ),
        ("arm,seed,x,y\na,1,2,3\n", "a metric (choose it with --metric)"),
        ("", "but got none"),
        (f"arm,seed,metric\na,1,{'1' * 140_000}\n", "to be a CSV"),
        (GOOD + "new,9,many\n", "in line 18"),
        (GOOD + "new,3,5\n", "seed 3"),
        ("arm,seed,metric\na,1,2\na,2,2\n", "arm"),
    ],
)
def test_a_csv_that_cannot_be_used(tmp_path, capsys, text, message):
    path = write(tmp_path / "r.csv", text)
    assert from_csv(path) == 2
    assert message.lower() in capsys.readouterr().err.lower()
    assert [file.name for file in tmp_path.iterdir()] == ["r.csv"]


def test_two_runs_without_spread_have_no_verdict(tmp_path, capsys):
    text = "arm,seed,metric\nbaseline,0,97\nbaseline,1,97\nnew,0,98\nnew,1,98\n"
    assert from_csv(write(tmp_path / "r.csv", text)) == 0
    said = capsys.readouterr().out
    assert "Here new is not settled." in said
    assert "A verdict needs at least 6 runs per arm." in said
    (alone,) = Results.from_csv(
        write(tmp_path / "one.csv", "arm,seed,metric\na,0,97\nb,0,98\n")
    ).comparisons
    assert alone.sentence == "b has no verdict yet: the noise cannot be estimated from one run."


def test_every_run_counts_whether_it_shares_its_seed_or_not(tmp_path, capsys):
    values = {"baseline": {}, "new": {}}
    for number in range(8):  # seeds 6 and 7 are common
        values["baseline"][number] = 97 + 0.5 * math.sin(9 * number)
        values["new"][number + 6] = 97.6 + 0.5 * math.sin(5 * number)
    rows = [f"{arm},{seed},{v}\n" for arm, runs in values.items() for seed, v in runs.items()]
    path = write(tmp_path / "r.csv", "arm,seed,metric\n" + "".join(rows))
    (comparison,) = Results.from_csv(path).comparisons
    arm, base = ([*values[name].values()] for name in ("new", "baseline"))
    assert (comparison.n, comparison.n_baseline) == (8, 8)
    assert comparison.p == pytest.approx(welch(arm, base).pvalue)
    assert from_csv(path) == 0
    assert "8 runs per arm" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("column", "more", "counts_as"),
    [("metric", "", "90"), ("test_accuracy", ",classes", "4"), ("loss", "", "91.7")],
)
def test_a_run_without_a_number_diverged(tmp_path, capsys, column, more, counts_as):
    """It counts as guessing, or as the worst run where the number of classes is not known."""
    head, *lines = GOOD.replace("metric", column).splitlines()
    cells = ",25" if more else ""
    text = "\n".join([head + more, *(line + cells for line in lines), f"new,9,nan{cells}\n"])
    path = write(tmp_path / "r.csv", text)
    assert from_csv(path, "--margin", "0.5") == 0
    said = capsys.readouterr().out
    assert f"Diverged: 1 of 9 runs of new. A run that diverged counts as {counts_as}." in said
    assert "1 of 9 runs diverged, so up to 43% might (95% confidence)." in said
    (comparison,) = Results.from_csv(path, margin=0.5).comparisons
    assert (comparison.n, comparison.n_baseline, comparison.diverged) == (9, 8, 1)
    runs = [*(91 + 0.1 * seed for seed in range(8)), float(counts_as)]
    assert comparison.difference == pytest.approx(sum(runs) / 9 - 90.35)


@pytest.mark.studies
def test_a_table_of_repeats_is_compared_by_repeats(made_up, tmp_path, capsys):
    saved = compare_made_up(tmp_path, capsys, *REPEATS)
    (comparison,) = Results.from_csv(tmp_path / "s/study.csv").comparisons
    assert (comparison.n, comparison.n_baseline) == (6, 6)
    assert comparison.p == pytest.approx(saved["comparisons"][0]["p"], rel=1e-9)


def test_a_baseline_by_name(tmp_path):
    results = Results.from_csv(write(tmp_path / "r.csv", GOOD), baseline="new")
    assert results.comparisons[0].verdict == "worse"


# Looks, further commands, missing runs ------------------------------------------------------------


def look_at(folder):
    """What study.json and the page say of a study: headline, sentences, notes, sizes."""
    saved = json.loads((folder / "study.json").read_text())
    (page,) = collect([folder])["studies"]
    assert page["headline"] == saved["verdict"]
    assert page["comparisons"] == json.loads(as_json(saved["comparisons"]))
    assert set(saved["notes"]) <= set(page["notes"])
    return saved


def compare_made_up(tmp_path, capsys, *tokens, arms="baseline,pgt"):
    """The command; returns study.json, which terminal and page must agree with."""
    assert powergrad("compare", "digits", *TOKENS, "--arms", arms, "--out", tmp_path,
                     "--name", "s", *tokens) == 0, capsys.readouterr().err  # fmt: skip
    said = capsys.readouterr().out
    saved = look_at(tmp_path / "s")
    assert f"\n{saved['verdict']}\n" in said
    for text in [*(comparison["sentence"] for comparison in saved["comparisons"]), *saved["notes"]]:
        assert text in said
    return saved


def sizes(saved):
    return {comparison["arm"]: comparison["n"] for comparison in saved["comparisons"]}


def runs_of(saved):
    return Counter(row["arm"] for row in saved["rows"])


@pytest.mark.studies
def test_an_arm_stops_at_the_look_that_settles_it(made_up, tmp_path, capsys):
    made_up.accuracy = lambda recipe: (
        97 + (3 + 0.1 * noise(recipe) if recipe.loss.alpha == 0.5 else 1.5 * noise(recipe))
    )
    saved = compare_made_up(tmp_path, capsys, "--alpha", "0.5,0.25")
    verdicts = {c["arm"]: c["verdict"] for c in saved["comparisons"]}
    assert verdicts == {"pgt(0.5)": "better", "pgt(0.25)": "not settled"}
    assert sizes(saved) == {"pgt(0.5)": 8, "pgt(0.25)": 24}
    assert runs_of(saved) == {"baseline": 24, "pgt(0.5)": 8, "pgt(0.25)": 24}
    assert len(made_up.done) == 56
    assert saved["seeds"] == "8..24"
    note = "An arm stops once it is settled: pgt(0.5) after 8 seeds."
    assert any(text.startswith(note) for text in saved["notes"])
    # The stopped arm is compared with as many runs of the baseline, in one procedure.
    values = {
        arm: [row["test_accuracy"] for row in saved["rows"] if row["arm"] == arm][:8]
        for arm in ("pgt(0.5)", "baseline")
    }
    test = welch(values["pgt(0.5)"], values["baseline"])
    assert saved["comparisons"][0]["p_alone"] == pytest.approx(test.pvalue)
    assert saved["comparisons"][0]["n_baseline"] == 8


def test_a_study_ends_where_every_arm_is_settled(made_up, tmp_path, capsys):
    made_up.accuracy = lambda recipe: 97 + 3 * (recipe.loss.alpha < 1) + 0.1 * noise(recipe)
    saved = compare_made_up(tmp_path, capsys, "--seeds", "6,9,20")
    assert runs_of(saved) == {"baseline": 6, "pgt": 6}
    (page,) = collect([tmp_path / "s"])["studies"]
    assert {run["status"] for run in page["runs"]} == {"finished"}  # nothing is missing
    assert yaml.safe_load((tmp_path / "s/study.yaml").read_text())["seeds"] == "6,9,20"


def welch(arm, baseline) -> Any:  # scipy's stubs do not know its result
    return ttest_ind(arm, baseline, equal_var=False)


def error_by_normal_integrals(looks, comparisons=1):
    """The chance that any look at 5% rejects, by scipy's multivariate normal distribution."""
    each = 1 - 0.95 ** (1 / comparisons)
    bound = -norm.ppf(each / 2)
    n = np.array(looks, float)
    covariance = np.sqrt(np.minimum.outer(n, n) / np.maximum.outer(n, n))
    limits = np.full(len(n), bound)
    normal: Any = multivariate_normal
    inside = normal(cov=covariance).cdf(limits, lower_limit=-limits)
    return 1 - inside**comparisons


@pytest.mark.studies
def test_other_numbers_of_seeds_are_said_with_their_error(made_up, tmp_path, capsys):
    saved = compare_made_up(tmp_path, capsys, "--seeds", 8)
    assert saved["notes"] == []
    assert sizes(saved) == {"pgt": 8}
    fewer = compare_made_up(tmp_path, capsys, "--seeds", 6)
    assert sizes(fewer) == {"pgt": 6}
    assert runs_of(fewer) == {"baseline": 6, "pgt": 6}
    assert "Seeds 0 to 5 are used; the folder contains 2 more, which are not." in fewer["notes"]
    assert len(made_up.done) == 16
    more = compare_made_up(tmp_path, capsys, "--seeds", 12)
    assert sizes(more) == {"pgt": 12}
    (note,) = more["notes"]
    error = 100 * error_by_normal_integrals([6, 8, 12])
    assert 9 < error < 10
    assert note.startswith(
        "The results were looked at with 6 and 8 and 12 seeds without planning it, so the "
        f"probability of any false verdict is {error:.1f}%, not 5%."
    )
    again = compare_made_up(tmp_path, capsys, "--seeds", 12)  # the same command changes nothing
    assert again["notes"] == more["notes"]
    assert len(made_up.done) == 24
    looks = compare_made_up(tmp_path, capsys, "--seeds", "8..16")
    assert any("probability of any false verdict is up to 20%, not 5%" in n for n in looks["notes"])


def test_a_number_of_seeds_that_nobody_saw_is_no_look(made_up, tmp_path, capsys):
    folder = tmp_path / "s"
    base = load_recipe("digits", CHANGES)
    study_of(base, {"baseline": {}, "pgt": {"loss.alpha": 0.25}}, "8").claim(folder)
    assert compare_made_up(tmp_path, capsys, "--seeds", 12)["notes"] == []


@pytest.mark.studies
def test_arms_of_a_further_command_are_compared_with_the_earlier(made_up, tmp_path, capsys):
    first = compare_made_up(tmp_path, capsys, "--seeds", 8)
    both = compare_made_up(tmp_path, capsys, "--seeds", 8, arms="baseline,agc")
    assert both["arms"] == ["baseline", "pgt", "agc"]
    assert [c["comparisons"] for c in both["comparisons"]] == [2, 2]
    alone, together = first["comparisons"][0], both["comparisons"][0]
    assert together["p"] == pytest.approx(1 - (1 - alone["p"]) ** 2)  # Sidak
    assert together["difference"] == alone["difference"]
    assert len(made_up.done) == 24


@pytest.mark.studies
def test_what_was_compared_earlier_counts_for_the_advice(made_up, tmp_path, capsys):
    """Less decay was tried by the first command, so the second does not ask for it."""
    made_up.accuracy = lambda recipe: 97 + (recipe.loss.alpha < 1) + 0.1 * noise(recipe)
    tokens = ["--seeds", 8, "--optimizer.weight_decay", 0.01]
    compare_made_up(tmp_path, capsys, *tokens, arms="baseline,less-decay")
    assert powergrad("compare", "digits", *TOKENS, *tokens, "--arms", "baseline,pgt",
                     "--out", tmp_path, "--name", "s") == 0  # fmt: skip
    assert "add less-decay" not in capsys.readouterr().out
    (page,) = collect([tmp_path / "s"])["studies"]
    assert [line.partition(" to --arms")[0][-11:] for line in page["advice"][:1]] == ["add head-lr"]


def test_a_run_whose_folder_was_deleted_is_said_and_done_again(made_up, tmp_path, capsys):
    whole = compare_made_up(tmp_path, capsys, "--seeds", 8)
    (gone,) = (tmp_path / "s").glob("pgt-seed3-*")
    shutil.rmtree(gone)
    assert powergrad("report", tmp_path / "s") == 0
    capsys.readouterr()
    page = (tmp_path / "s/report.html").read_text()
    assert "1 run is missing: pgt seed 3 (not started)." in page
    assert "pgt has no verdict yet: 7 of 8 runs are finished." in page
    made_up.done.clear()
    assert compare_made_up(tmp_path, capsys, "--seeds", 8)["rows"] == whole["rows"]
    assert made_up.done == [gone.name]


@pytest.mark.studies
def test_a_deleted_run_is_done_again_by_workers(tmp_path):
    jobs = [RecipeJob("a", SMALL), RecipeJob("b", SMALL.override({"seed": 1}))]
    first = do_jobs(jobs, tmp_path, workers=2)
    kept = (tmp_path / "b/result.json").stat().st_mtime_ns
    shutil.rmtree(tmp_path / "a")
    again = do_jobs(jobs, tmp_path)
    assert again["a"]["test_accuracy"] == first["a"]["test_accuracy"]
    assert (tmp_path / "a/model.safetensors").exists()
    assert (tmp_path / "b/result.json").stat().st_mtime_ns == kept


def test_one_run_per_arm_is_shown_without_a_comparison(made_up, tmp_path, capsys):
    tokens = ["compare", "digits", *TOKENS, "--out", tmp_path, "--name"]
    assert powergrad(*tokens, "r", "--arms", "baseline,pgt", "--seeds", 1) == 0
    said = capsys.readouterr().out
    assert "Nothing is compared: a comparison needs two arms with two runs each." in said
    assert powergrad(*tokens, "s", "--arms", "baseline", "--seeds", 2) == 0
    said = capsys.readouterr().out
    assert (tmp_path / "s/study.csv").exists()
    assert "verdict" not in said


@pytest.mark.studies
def test_known_runs_are_not_done_again_and_keep_their_commits(made_up, tmp_path, capsys):
    first = compare_made_up(tmp_path / "one", capsys, "--seeds", 8)
    csv_file = tmp_path / "one/s/study.csv"
    csv_file.write_text(csv_file.read_text().replace("c0ffee", "0ddba11"))
    made_up.done.clear()
    elsewhere = tmp_path / "two"
    tokens = ["--reuse", csv_file]
    again = compare_made_up(elsewhere, capsys, "--seeds", 8, *tokens)
    assert made_up.done == []
    assert not list((elsewhere / "s").glob("*-seed*"))
    assert {row["commit"] for row in again["rows"]} == {"0ddba11"}
    assert again["comparisons"] == first["comparisons"]
    (page,) = collect([elsewhere / "s"])["studies"]
    assert page["notes"] == []
    more = compare_made_up(elsewhere, capsys, "--seeds", 12, *tokens)  # and does what is missing
    assert len(made_up.done) == 8
    commits = Counter(row["commit"] for row in more["rows"])
    assert commits == {"0ddba11": 16, "c0ffee": 8}


# Repeats ------------------------------------------------------------------------------------------


REPEATS = ["--tune", "lr=0.006:0.4", "--trials", 3, "--repeats", 6, "--seeds", 2]


def test_the_mean_of_a_repeat_is_what_is_compared(made_up, tmp_path, capsys):
    saved = compare_made_up(tmp_path, capsys, *REPEATS)
    means = {
        arm: [
            np.mean([r["test_accuracy"] for r in saved["rows"] if (r["arm"], r["repeat"]) == key])
            for key in ((arm, repeat) for repeat in range(6))
        ]
        for arm in ("baseline", "pgt")
    }
    (comparison,) = saved["comparisons"]
    test = welch(means["pgt"], means["baseline"])
    assert comparison["p_alone"] == pytest.approx(test.pvalue)
    assert comparison["p"] == pytest.approx(test.pvalue)
    low, high = test.confidence_interval(0.95)
    assert comparison["interval"] == pytest.approx([low, high])
    assert (comparison["n"], comparison["n_baseline"]) == (6, 6)
    assert "6 repeats per arm" in comparison["sentence"]
    assert runs_of(saved) == {"baseline": 12, "pgt": 12}
    # 6 repeats x 2 arms x (3 points + 2 seeds); seeds are fresh everywhere.
    assert len(made_up.done) == 60
    finals = [row["seed"] for row in saved["rows"] if row["arm"] == "pgt"]
    trials = {row["seed"] for row in saved["trials"] if row["arm"] == "pgt"}
    assert finals == list(range(12))
    assert not trials & set(finals)
    assert len(trials) == 6


@pytest.mark.studies
def test_points_are_shared_by_arms_and_not_by_repeats(made_up, tmp_path, capsys):
    saved = compare_made_up(tmp_path, capsys, *REPEATS)
    repeats = saved["tuning"]["repeats"]
    points = [
        {arm: [trial["point"] for trial in choice["trials"]] for arm, choice in repeat.items()}
        for repeat in repeats
    ]
    assert all(len(of_arm["pgt"]) == 3 for of_arm in points)
    assert all(of_arm["pgt"] == of_arm["baseline"] for of_arm in points)
    rates = [point["optimizer.lr"] for of_arm in points for point in of_arm["pgt"]]
    assert len(set(rates)) == 18
    assert all(0.006 <= rate <= 0.4 for rate in rates)
    # Every repeat runs its own winner.
    for row in saved["rows"]:
        choice = repeats[row["repeat"]][row["arm"]]
        best = max(choice["trials"], key=lambda trial: trial["mean"])
        assert choice["trials"][choice["chosen"]] == best
        rate = Run(tmp_path / "s" / row["run"]).recipe().optimizer.lr
        assert rate == best["point"]["optimizer.lr"]
    (page,) = collect([tmp_path / "s"])["studies"]
    assert json.loads(as_json(page["tuning"])) == saved["tuning"]


@pytest.mark.studies
def test_settled_arms_are_not_tuned_on(made_up, tmp_path, capsys):
    made_up.accuracy = lambda recipe: (
        97 + (3 + 0.1 * noise(recipe) if recipe.loss.alpha == 0.5 else 1.5 * noise(recipe))
    )
    tokens = ["--tune", "lr=0.006:0.4", "--trials", 3, "--repeats", "6,8", "--seeds", 1]
    saved = compare_made_up(tmp_path, capsys, *tokens, "--alpha", "0.5,0.25")
    stopped, _ = saved["comparisons"]
    assert stopped["n"] == 6
    assert runs_of(saved) == {"baseline": 8, "pgt(0.5)": 6, "pgt(0.25)": 8}
    trials = Counter(row["arm"] for row in saved["trials"])
    assert trials == {"baseline": 24, "pgt(0.5)": 18, "pgt(0.25)": 24}


@pytest.mark.studies
def test_an_interrupted_study_with_repeats_goes_on(made_up, tmp_path, capsys, monkeypatch):
    whole = compare_made_up(tmp_path / "whole", capsys, *REPEATS)
    made_up.done.clear()
    execute = MadeUpRuns.execute

    def interrupted(job, folder):
        if len(made_up.done) == 33:
            raise Interrupted("stopped with 33 of 60 runs finished")
        return execute(made_up, job, folder)

    folder = tmp_path / "parts"
    tokens = ["compare", "digits", *TOKENS, "--arms", "baseline,pgt", *REPEATS]
    tokens += ["--out", folder, "--name", "s"]
    with monkeypatch.context() as patch:
        patch.setattr(RecipeJob, "execute", interrupted)
        assert powergrad(*tokens) == 130
    assert "the same command continues from there" in capsys.readouterr().err
    assert powergrad("report", folder / "s") == 0  # it has a page, though nothing to say yet
    capsys.readouterr()
    resumed = compare_made_up(folder, capsys, *REPEATS)
    assert len(made_up.done) == len(set(made_up.done)) == 60
    for part in ("rows", "trials", "comparisons", "tuning", "notes", "verdict"):
        assert resumed[part] == whole[part], part


def test_a_repeat_that_is_not_whole_waits(made_up, tmp_path, capsys):
    saved = compare_made_up(tmp_path, capsys, *REPEATS)
    rows = [row for row in saved["rows"] if not (row["arm"] == "pgt" and row["seed"] % 2)]
    path = write(tmp_path / "s/study.json", json.dumps({**saved, "rows": rows}))
    results = Results.load(path)
    assert results.units("pgt") == {}  # each has one of its two seeds
    assert len(results.units("baseline")) == 6


def test_the_identity_maps_points_of_pgt_to_the_baselines_backbone():
    arms = {"baseline": {}, "pgt": {"loss.alpha": 0.25}}
    point = {"optimizer.lr": 0.1, "optimizer.weight_decay": 0.001}
    expected = {"sgd": (0.025, 0.004), "adam": (0.1, 0.004), "adamw": (0.1, 0.001)}
    for name, (rate, decay) in expected.items():
        base = SMALL.override({"optimizer.name": name, "schedule.warmup_start": 0.002})
        tuner = tuner_of(study_of(base, arms), "lr=0.01:1", "wd=1e-4:1e-2", map="identity")
        assert tuner.changes("baseline", point) == point
        recipe = base.override({**arms["pgt"], **tuner.changes("pgt", point)})
        assert recipe.optimizer.lr == pytest.approx(rate, rel=1e-15)
        assert recipe.optimizer.weight_decay == pytest.approx(decay, rel=1e-15)
        start = 0.002 * rate / 0.1
        assert recipe.schedule.warmup_start == pytest.approx(start, rel=1e-15)
        # The two-group training that equals it has the point's own rate and decay.
        backbone = decomposition(recipe.override({"loss.alpha": 1.0}), 0.25)["two-group CE"]
        lr = recipe.optimizer.lr * backbone.get("optimizer.backbone.lr", 1)
        wd = recipe.optimizer.weight_decay * backbone.get("optimizer.backbone.weight_decay", 1)
        assert (lr, wd) == pytest.approx((0.1, 0.001), rel=1e-15)
        plain = tuner_of(study_of(base, arms), "lr=0.01:1", "wd=1e-4:1e-2")
        assert plain.changes("pgt", point) == point


@pytest.mark.studies
def test_a_choice_at_the_edge_is_not_called_better(made_up, tmp_path, capsys):
    made_up.accuracy = lambda recipe: (
        90 + 5 * recipe.optimizer.lr + 3 * (recipe.loss.alpha < 1) + 0.1 * noise(recipe)
    )
    tokens = ["--seeds", 8, "--tune-seeds", 1, "--tune"]
    for name, values in (("list", ["lr=0.1,0.2,0.3"]), ("range", ["lr=0.01:0.4", "--trials", 16])):
        saved = compare_made_up(tmp_path / name, capsys, *tokens, *values)
        (comparison,) = saved["comparisons"]
        assert comparison["interval"][0] > 0
        assert comparison["verdict"] == "not settled"
        assert not comparison["open"]  # more seeds would not help
        assert comparison["withheld"].startswith("Not called better, because ")
        assert comparison["withheld"].endswith("widen the range of --tune lr.")
        assert comparison["withheld"] in comparison["sentence"]
    made_up.accuracy = lambda recipe: (
        90 - 50 * abs(recipe.optimizer.lr - 0.2) + 3 * (recipe.loss.alpha < 1) + 0.1 * noise(recipe)
    )
    saved = compare_made_up(tmp_path / "inner", capsys, *tokens, "lr=0.1,0.2,0.3")
    assert saved["comparisons"][0]["verdict"] == "better"
    assert any(
        "holds for the chosen values of lr, not for the methods" in n for n in saved["notes"]
    )


def test_points_that_the_recipe_refuses_are_recorded_and_cannot_win(made_up, tmp_path, capsys):
    """AGC must clip above the decay: with more decay a point of agc is no recipe."""
    made_up.accuracy = lambda recipe: 90 + 100 * recipe.optimizer.weight_decay
    for options in ([], ["--tune-map", "identity"]):
        saved = compare_made_up(
            tmp_path / str(len(options)), capsys, "--tune", "wd=0.001,0.01,0.1", "--seeds", 2,
            "--tune-seeds", 1, "--arm", "clipped: clip.agc=0.05,alpha=0.5", *options,
        )  # fmt: skip
        (repeat,) = saved["tuning"]["repeats"]
        trials = repeat["clipped"]["trials"]
        assert [trial["note"] for trial in trials] == ["", "", "not a valid recipe"]
        assert trials[2]["mean"] is None
        assert repeat["clipped"]["chosen"] == 1
        assert repeat["baseline"]["chosen"] == 2
        again = Tuning.from_dict(saved["tuning"])
        assert math.isnan(again.arms["clipped"].trials[2].mean)


def test_an_arm_that_trains_at_no_point_is_an_error(made_up, tmp_path, capsys):
    tokens = ["compare", "digits", *TOKENS, "--out", tmp_path, "--arms", "baseline", "--arm",
              "clipped: clip.agc=0.05", "--tune", "wd=0.1,0.2", "--seeds", 2]  # fmt: skip
    assert powergrad(*tokens) == 2
    assert "Expected a point of --tune at which 'clipped' can be trained" in capsys.readouterr().err


def test_a_key_can_be_tuned_for_one_arm(made_up, tmp_path, capsys):
    saved = compare_made_up(
        tmp_path, capsys, "--seeds", 2, "--tune-seeds", 1, "--tune", "lr=0.01:0.4",
        "pgt: loss.alpha=0.1:0.9", "--trials", 4,
    )  # fmt: skip
    (repeat,) = saved["tuning"]["repeats"]
    points = {arm: [t["point"] for t in choice["trials"]] for arm, choice in repeat.items()}
    assert [set(point) for point in points["baseline"]] == [{"optimizer.lr"}] * 4
    assert [set(point) for point in points["pgt"]] == [{"optimizer.lr", "loss.alpha"}] * 4
    assert [p["optimizer.lr"] for p in points["pgt"]] == [
        p["optimizer.lr"] for p in points["baseline"]
    ]
    assert len({point["loss.alpha"] for point in points["pgt"]}) == 4
    alpha = points["pgt"][repeat["pgt"]["chosen"]]["loss.alpha"]
    (folder,) = (tmp_path / "s").glob("pgt-seed0-*")
    assert Run(folder).recipe().loss.alpha == alpha


def test_a_change_behind_what_is_tuned_is_a_change(made_up, tmp_path, capsys):
    saved = compare_made_up(
        tmp_path, capsys, "--seeds", 2, "--tune-seeds", 1, "--tune", "lr=0.1:0.4", "model.width=6"
    )
    assert saved["tuned"] == ["optimizer.lr"]
    assert saved["recipe"]["model"]["width"] == 6


def test_a_study_is_not_continued_with_another_tuning(made_up, tmp_path, capsys):
    compare_made_up(tmp_path, capsys, "--tune", "lr=0.1,0.2", "--seeds", 2)
    tokens = ["compare", "digits", *TOKENS, "--arms", "baseline,pgt", "--out", tmp_path]
    tokens += ["--name", "s", "--seeds", 2]
    assert powergrad(*tokens, "--tune", "lr=0.1,0.4") == 2
    assert "got one of another program or tuning; choose another --name" in capsys.readouterr().err
    assert powergrad(*tokens) == 2


# Sweep, tuning, decomposition ---------------------------------------------------------------------


def test_a_sweep_and_its_figure(in_process, tmp_path, capsys):
    tokens = ["sweep", "digits", *TOKENS, "--train.epochs=2", "--grid", "alpha=1,0.5",
              "--grid", "lr=0.05,0.1", "--seeds", 2, "--out", tmp_path, "--name", "s"]  # fmt: skip
    assert powergrad(*tokens) == 0
    told = json.loads((tmp_path / "s/study.json").read_text())
    assert told["arms"] == [
        "alpha=1, lr=0.05", "alpha=1, lr=0.1", "alpha=0.5, lr=0.05", "alpha=0.5, lr=0.1"
    ]  # fmt: skip
    assert len(told["rows"]) == 8
    assert (tmp_path / "s/study.png").stat().st_size > 5000


def test_a_further_grid_in_the_same_folder_is_drawn(made_up, tmp_path, capsys):
    tokens = ["sweep", "digits", *TOKENS, "--seeds", 2, "--out", tmp_path, "--name", "s", "--grid"]
    assert powergrad(*tokens, "alpha=1,0.5") == 0
    assert powergrad(*tokens, "alpha=0.25,0.1") == 0
    assert json.loads((tmp_path / "s/study.json").read_text())["arms"] == [
        f"alpha={alpha}" for alpha in (1, 0.5, 0.25, 0.1)
    ]
    assert powergrad(*tokens, "lr=0.1,0.2") == 0, capsys.readouterr().err
    assert (tmp_path / "s/study.png").stat().st_size > 5000


def test_sweep_arms_are_the_whole_grid():
    assert len(Grid({"loss.alpha": (1, 0.5, 0.1), "optimizer.lr": (0.1, 0.2)}).arms()) == 6


def test_tuning_gives_every_arm_the_same_grid_on_held_out_data(in_process, tmp_path, capsys):
    tokens = ["compare", "digits", *TOKENS, "--train.epochs=2", "--arms", "baseline,pgt",
              "--tune", "lr=0.0001,0.1", "--tune-seeds", 1, "--seeds", 2, "--out", tmp_path,
              "--name", "t"]  # fmt: skip
    assert powergrad(*tokens) == 0
    told = json.loads((tmp_path / "t/study.json").read_text())
    (tuning,) = told["tuning"]["repeats"]
    assert told["tuning"]["seeds"] == 1
    for arm in ("baseline", "pgt"):
        tried = tuning[arm]["trials"]
        assert [trial["point"] for trial in tried] == [{"optimizer.lr": r} for r in (0.0001, 0.1)]
        best = max(tried, key=lambda trial: trial["mean"])
        assert tried[tuning[arm]["chosen"]] == best
        assert told["changes"][arm]["optimizer.lr"] == best["point"]["optimizer.lr"]
    assert len([*(tmp_path / "t/tuning").glob("*-seed*")]) == 4
    for folder in (tmp_path / "t/tuning").glob("*-seed*"):
        recipe = Run(folder).recipe()
        assert recipe.data.hold_out == 0.2
        assert recipe.seed == 1000
    for folder in (tmp_path / "t").glob("*-seed*"):
        assert Run(folder).recipe().data.hold_out == 0
        assert Run(folder).recipe().seed in (0, 1)


@pytest.mark.studies
def test_a_decomposition_by_the_command(in_process, tmp_path, capsys):
    tokens = ["decompose", "digits", *TOKENS, "--train.epochs=2", "--tune", "lr=0.05,0.1",
              "--tune-seeds", 1, "--seeds", 2, "--out", tmp_path, "--name", "d"]  # fmt: skip
    assert powergrad(*tokens) == 0
    said = capsys.readouterr().out
    assert "they are the same training" in said
    assert "At alpha 0.25, PGT" in said
    told = json.loads((tmp_path / "d/arms/study.json").read_text())
    assert max(told["identity_gaps"].values()) < 1e-9
    choice = told["tuning"]["repeats"][0]["CE"]
    tuned = choice["trials"][choice["chosen"]]["point"]["optimizer.lr"]
    assert {row["arm"] for row in told["rows"]} == set(decomposition(SMALL, 0.25))
    for folder in (tmp_path / "d/arms").glob("PGT-seed*"):
        assert Run(folder).recipe().optimizer.lr == tuned
    assert (tmp_path / "d/arms/report.html").exists()


def test_a_decomposition_says_what_the_gain_is_made_of():
    arms = list(decomposition(SMALL, 0.25))
    gains = {"PGT": 1.0, "two-group CE": 1.0, "backbone lr / alpha": 1.2, "head lr * alpha": -1.0}
    rows = [
        (arm, seed, 90 + gains.get(arm, 0) + 0.05 * (seed * n % 7))
        for n, arm in enumerate(arms)
        for seed in range(12)
    ]
    text = explain_decomposition(results_of("CE", rows), 0.25)
    assert "At alpha 0.25, PGT +1." in text
    assert "These parts help on their own: backbone lr / alpha +1." in text
    assert "These parts do harm: head lr * alpha -" in text
    assert "Instead of PGT, this single change could be used here: backbone lr / alpha." in text


# Workers ------------------------------------------------------------------------------------------


def do_jobs(jobs, folder, workers=1, **options):
    with JobQueue(folder, study="x", workers=workers) as queue:
        return queue.run(jobs, **options)


@pytest.mark.studies
def test_a_job_that_cannot_be_done_is_told_and_the_others_are(tmp_path):
    good = RecipeJob("good", SMALL)
    bad = RecipeJob("bad", SMALL.override({"data.name": "folder:/nowhere"}))
    with pytest.raises(JobError, match=r"1 of 2 runs failed:\n  bad: .*nowhere"):
        do_jobs([bad, good], tmp_path)
    assert Run(tmp_path / "good").result() is not None


@pytest.mark.studies
def test_a_run_that_another_process_is_doing_is_waited_for(tmp_path):
    """As when a worker was too slow to show that it lives, and its run was given to another."""
    folder = tmp_path / "busy"
    code = (
        "import time\nfrom powergrad.lab.trainer.run_folder import Run\n"
        "from powergrad.lab.trainer.recipe import Recipe\n"
        f"recipe = Recipe.from_yaml(open({str(tmp_path / 'r.yaml')!r}).read(), 'r')\n"
        f"with Run({str(folder / 'a')!r}).open(recipe):\n"
        "    print('open', flush=True); time.sleep(12)"
    )
    (tmp_path / "r.yaml").write_text(SMALL.to_yaml())
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        results = do_jobs([RecipeJob("a", SMALL)], folder)
    assert results["a"]["steps"] == 12


def test_a_run_that_another_worker_told_first_is_no_error(tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path / 'jobs.db'}"
    queue = open_queue(url, "x")
    enqueue(queue, [RecipeJob("a", SMALL)])

    set_user_attr = optuna.trial.Trial.set_user_attr

    def set_and_tell(trial, key, value):  # after the result, before Optuna is told
        set_user_attr(trial, key, value)
        queue.tell(trial.number, 12.0)

    monkeypatch.setattr(RecipeJob, "execute", lambda job, folder: {"steps": 12})
    monkeypatch.setattr(optuna.trial.Trial, "set_user_attr", set_and_tell)
    with open(os.devnull) as nobody:  # whose end tells a worker that no more runs will come
        monkeypatch.setattr(sys, "stdin", nobody)
        work(url, "x", tmp_path)
    assert [trial.state.name for trial in queue.get_trials()] == ["COMPLETE"]


def test_a_worker_killed_before_its_first_heartbeat_is_replaced(tmp_path, monkeypatch):
    """Its run is marked as running, and Optuna takes no run for stale that has no heartbeat."""
    url = f"sqlite:///{tmp_path / 'jobs.db'}"
    monkeypatch.setattr("powergrad.lab.jobs.queue.GRACE", 2)
    queue = open_queue(url, "x")
    enqueue(queue, [RecipeJob("a", SMALL)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `ask` sends no heartbeat, as here
        queue.ask()
    monkeypatch.setattr(RecipeJob, "execute", lambda job, folder: {"steps": 12})
    with open(os.devnull) as nobody:
        monkeypatch.setattr(sys, "stdin", nobody)
        worker = threading.Thread(target=work, args=(url, "x", tmp_path), daemon=True)
        worker.start()
        worker.join(60)
    assert not worker.is_alive()
    assert [trial.state.name for trial in queue.get_trials()] == ["FAIL", "COMPLETE"]


def kill_a_worker(folder, rng):
    """One of the processes that work on `folder`, killed where it stands."""
    found = subprocess.run(
        ["pgrep", "-f", f"powergrad.lab.jobs.worker .*{folder.name}"],
        capture_output=True,
        text=True,
    )
    pids = [int(pid) for pid in found.stdout.split()]
    if pids:
        subprocess.run(["kill", "-9", str(rng.choice(pids))])
    return bool(pids)


@pytest.mark.studies
def test_killed_workers_lose_nothing_and_double_nothing(tmp_path):
    folder = tmp_path / f"study-{random.getrandbits(64):x}"
    recipe = SMALL.override({"train.epochs": 60, "machine.checkpoint_steps": 8})
    jobs = [RecipeJob(f"run{seed}", recipe.override({"seed": seed})) for seed in range(6)]
    rng = random.Random(5)
    kills = 0
    next_kill = None

    def watch(snapshot):
        nonlocal kills, next_kill
        now = time.monotonic()
        if next_kill is None and sum(snapshot.done.values()) > 0:
            next_kill = now
        if next_kill is not None and kills < 5 and now >= next_kill and len(snapshot.results) < 6:
            kills += kill_a_worker(folder, rng)
            next_kill = now + rng.uniform(0.5, 2)

    results = do_jobs(jobs, folder, workers=2, watch=watch)
    assert kills == 5
    assert sorted(results) == sorted(job.name for job in jobs)
    with sqlite3.connect(folder / "jobs.db") as database:
        done = database.execute(
            "select a.value_json from trials t join trial_user_attributes a using (trial_id) "
            "where t.state = 'COMPLETE' and a.key = 'name'"
        ).fetchall()
    assert sorted(json.loads(name) for (name,) in done) == sorted(results)
    alone = do_jobs(jobs[:2], tmp_path / "alone")
    for name, result in alone.items():
        assert result["test_accuracy"] == results[name]["test_accuracy"]
        assert (tmp_path / "alone" / name / "model.safetensors").read_bytes() == (
            folder / name / "model.safetensors"
        ).read_bytes()


@pytest.mark.studies
def test_interrupted_and_started_again(tmp_path):
    """Ctrl-C in the middle of a study: exit code 130, then only what is missing is done."""
    command = [sys.executable, "-m", "powergrad", "compare", "digits", *TOKENS,
               "--train.epochs=40", "--arms", "baseline,pgt", "--seeds", "2", "--out",
               str(tmp_path), "--name", "s", "--workers", "2"]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("s/*/metrics.csv")) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.5)
    process.send_signal(2)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "the same command continues from there" in said
    again = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    for folder in tmp_path.glob("s/*-seed*"):
        assert Run(folder).result() is not None
    resumed = [Run(f).environment().get("resumed") for f in tmp_path.glob("s/*-seed*")]
    assert any(resumed)


# The plan -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("delta", "seeds"), [(0.09, 28), (0.14, 13), (0.30, 6)])
def test_plan_by_the_command(capsys, delta, seeds):
    """Numbers by the noncentral t distribution, at least 6; a simulation may need one more."""
    assert powergrad("plan", "--delta", delta, "--sigma", 0.118) == 0
    said = capsys.readouterr().out
    planned = re.match(r"(\d+) runs per arm find a difference of \S+ at sigma 0.118 with", said)
    assert planned is not None
    assert int(planned[1]) in (seeds, seeds + 1)
    assert "With looks at 8, 12, 16, 20, 24 runs per arm (--seeds 8..24)" in said
    head = ["true", "difference", "found", "equivalent", "not", "settled", "runs", "per", "arm"]
    lines = [line.split() for line in said.splitlines()]
    shown = [line for line in lines[lines.index(head) + 2 :] if line]
    assert [float(line[0]) for line in shown] == [0, delta, 2 * delta]
    assert all(8 <= float(line[-1]) <= 24 for line in shown)
    assert powergrad("plan", "--delta", delta, "--sigma", "imagenet-resnet18") == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{planned[1]} runs per arm ")
    assert ("because sigma is uncertain" in said) == (delta < 0.3)  # 6 is the least in any case


def test_plan_from_a_study(study, capsys):
    results = Results.load(study)
    variances = [np.var(list(results.values(arm).values()), ddof=1) for arm in results.arms]
    sigma = math.sqrt(np.mean(variances))
    assert powergrad("plan", "--delta", 2 * sigma, "--study", study) == 0
    said = capsys.readouterr().out
    assert f"at sigma {sigma:.3g}" in said
    assert "uncertain" in said
    seconds = [Run(f).result().metrics["seconds"] or 0 for f in study.glob("*-seed*")]  # pyright: ignore
    assert math.isfinite(sum(seconds))
    assert any(unit in said for unit in (" h", " min", " s", "hours", "minutes", "seconds"))


@pytest.mark.parametrize("tokens", [["--delta", "0.1"], ["--delta", "0", "--sigma", "0.1"],
                                    ["--delta", "0.1", "--sigma", "mnist"]])  # fmt: skip
def test_plan_with_bad_input(capsys, tokens):
    assert powergrad("plan", *tokens) == 2
    assert capsys.readouterr().err.startswith("powergrad: ")


# What users ran into ------------------------------------------------------------------------------


def test_a_finished_run_of_another_recipe_is_not_taken_for_this_one(tmp_path, capsys):
    short = [*TOKENS, "--train.epochs=1", "--schedule.warmup_epochs=0", "--folder", tmp_path / "r"]
    assert powergrad("train", "digits", *short) == 0
    assert powergrad("train", "digits", *short) == 0
    assert "is finished" in capsys.readouterr().out
    assert powergrad("train", "digits", *short, "--loss.alpha", "0.3") == 2
    assert "which differs in loss.alpha" in capsys.readouterr().err


PAIR = {"baseline": {}, "pgt": {"loss.alpha": 0.5}}


def tuner_of(study, *texts, seeds=1, trials=None, **options):
    values = dict(flatten(study.base.model_dump()))
    return Tuner(study, Space.parse(texts, values, list(study.arms), trials), seeds, **options)


def test_tuning_uses_seeds_that_the_study_does_not(made_up, tmp_path):
    """And finds the edge of a grid in whatever order it was given."""
    made_up.accuracy = lambda recipe: 10 * recipe.optimizer.lr
    study = study_of(SMALL, PAIR, first_seed=1000)
    tuner = tuner_of(study, "lr=0.1,0.4,0.2", seeds=2)
    tuned, results = tune_once(tuner, tmp_path, Execution(1, Watch))
    assert {row.seed for row in results.trials} == {2000, 2001}
    assert results.tuning is not None
    assert all(choice.at_edge for choice in results.tuning.arms.values())
    assert tuned.settings("pgt") == {"loss.alpha": 0.5, "optimizer.lr": 0.4}
    line = results.tuning.describe("pgt")
    assert line == "pgt: lr 0.4 (lr 0.1: 1.00, lr 0.4: 4.00, lr 0.2: 2.00; lr at the edge)"
    assert list(tuner_of(study_of(SMALL, PAIR), "lr=0.1,0.4").seeds_of(0)) == [1000]
    many = study_of(SMALL, PAIR, "2000")
    assert list(tuner_of(many, "lr=0.1,0.4", seeds=2).seeds_of(3)) == [2006, 2007]


def test_words_can_be_tuned(made_up, tmp_path):
    made_up.accuracy = lambda recipe: 0.5 + (recipe.model.norm == "batch")
    tuner = tuner_of(study_of(SMALL, PAIR), "model.norm=none,batch")
    tuned, results = tune_once(tuner, tmp_path, Execution(1, Watch))
    assert tuned.settings("baseline") == {"model.norm": "batch"}
    assert results.tuning is not None
    assert not results.tuning.arms["baseline"].at_edge
    line = results.tuning.describe("baseline")
    assert line == "baseline: norm batch (norm none: 0.50, norm batch: 1.50)"


def test_a_name_with_dollar_signs_is_drawn(tmp_path):
    names = ("baseline", "cost $x_$ <b>")
    rows = [(arm, seed, 90 + math.sin(9 * seed + len(arm))) for arm in names for seed in range(4)]
    figure = figures.study_figure(results_of("baseline", rows), "$s_$: 8 runs")
    figures.save(figure, tmp_path / "study.png")
    assert (tmp_path / "study.png").stat().st_size > 10_000


@pytest.mark.parametrize("lost", [1, 4])
def test_a_metric_that_a_run_has_not_is_told_with_a_page(
    made_up, monkeypatch, tmp_path, capsys, lost
):
    execute = MadeUpRuns.execute

    def without(job, folder):
        ended = execute(made_up, job, folder) or {}
        if len(made_up.done) <= lost:
            Run(folder / job.name).finish(split_result({**ended, "test_accuracy": None}))
        return merge_result(Run(folder / job.name).result() or Result(metrics={}))

    monkeypatch.setattr(RecipeJob, "execute", without)
    tokens = ["compare", "digits", *TOKENS, "--arms", "baseline,pgt", "--seeds", 2]
    assert powergrad(*tokens, "--out", tmp_path, "--name", "s") == 2
    message = (
        "Expected test_accuracy of every run to be a number, but got None for 'baseline' at seed 0"
    )
    assert message in capsys.readouterr().err
    assert {"study.csv", "report.html"} <= {path.name for path in (tmp_path / "s").iterdir()}


def test_two_studies_of_one_name_do_not_mix_in_a_storage(monkeypatch, tmp_path):
    queues = []

    def run(queue, jobs, watch):
        queues.append(queue.study)
        return {job.name: {"test_accuracy": 90.0} for job in jobs}

    monkeypatch.setattr(JobQueue, "run", run)
    for epochs, folder in ((2, "a/same"), (2, "c/same"), (3, "b/same")):
        base = SMALL.override({"train.epochs": epochs})
        execution = Execution(1, Watch, storage="sqlite:///shared.db")
        run_study(study_of(base, PAIR, "1"), tmp_path / folder, execution)
    assert queues[0] == queues[1] != queues[2]


def test_a_key_of_a_grid_is_given_once():
    with pytest.raises(RecipeError, match=r"each key of a grid once, but got 'optimizer.lr' again"):
        parse_grid(["lr=0.1,0.2", "optimizer.lr=0.3"])


def test_what_the_system_refuses_is_told_without_a_traceback(tmp_path, capsys):
    file = write(tmp_path / "file", "")
    assert powergrad("train", "digits", *TOKENS, "--out", file) == 2
    assert powergrad("report", tmp_path, "--out", file / "x.html") == 2
    assert "Traceback" not in capsys.readouterr().err
    run = tmp_path / "run"
    run.mkdir()
    write(run / "result.json", "[]")
    with pytest.raises(RunError, match="this version"):
        Run(run).result()


def test_noise_is_of_the_metric_that_a_study_compares(tmp_path, capsys):
    rows = "".join(f"a,{seed},{90 + seed},{0.005 * seed}\n" for seed in range(8))
    path = write(tmp_path / "study.csv", "arm,seed,test_accuracy,nll\n" + rows)  # one arm will do
    said = []
    for tokens in ([], ["--metric", "nll"]):
        assert powergrad("plan", "--delta", "1", "--study", path, *tokens) == 0
        said.append(capsys.readouterr().out)
    write(tmp_path / "study.json", json.dumps({"metric": "nll"}))
    assert powergrad("plan", "--delta", "1", "--study", path) == 0
    assert capsys.readouterr().out == said[1] != said[0]
