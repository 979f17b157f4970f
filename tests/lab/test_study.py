import csv
import inspect
import io
import json
import math
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
import torch
import yaml
from torch import nn

import powergrad_cli
from powergrad import equivalent_training
from powergrad.lab import figures
from powergrad.lab.cli.studies import StudyOptions, compare, tune_arms
from powergrad.lab.config import Recipe, RecipeError, load_recipe
from powergrad.lab.jobs import JobError, RecipeJob, RecipeProgram
from powergrad.lab.jobs.queue import enqueue, open_queue, run_jobs
from powergrad.lab.jobs.worker import work
from powergrad.lab.run import Run, RunError
from powergrad.lab.study import METRICS, Grid, Results, RunRow, Study, StudyKind, run_study
from powergrad.lab.study import results as results_module
from powergrad.lab.study import tuning as tuning_module
from powergrad.lab.study.advice import missing_control
from powergrad.lab.study.arms import METHODS, arms_of, decomposition, parse_arm, parse_grid
from powergrad.lab.study.decompose import (
    check_identity,
    describe_identity,
    explain_decomposition,
)
from powergrad.lab.study.tuning import Space
from powergrad.lab.terminal import chart, result_tables

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
TOKENS = [f"--{key}={json.dumps(value)}" for key, value in CHANGES.items()]


def powergrad(*tokens):
    return powergrad_cli.main([str(token) for token in tokens])


def study_of(base, arms, seeds, kind=StudyKind.COMPARE, **options):
    return Study(kind, RecipeProgram(base), arms, seeds, **options)


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
        (["pgt"], {}, {}, True),
        (["agc"], {}, {"agc": {"clip.agc": 0.2}}, False),
        (["pgt"], {"optimizer.weight_decay": 0}, {}, False),
        (["pgt"], {"optimizer.name": "adam"}, {}, True),
        (["pgt"], {"optimizer.name": "adamw"}, {}, False),  # there PGT moves no decay
        (["pgt"], {}, {"half": {"optimizer.backbone.weight_decay": 0.5}}, False),
        (["pgt"], {}, {"less-decay": {"optimizer.weight_decay": 0.001}}, False),  # it was tried
        (["pgt"], {}, {"both": {"optimizer.weight_decay": 0.001, "loss.alpha": 0.25}}, True),
        (["pgt"], {}, {"more": {"optimizer.weight_decay": 0.1}}, True),
    ],
)
def test_the_control_is_named_where_pgt_is_better_without_it(better, changes, more, expected):
    base = SMALL.override({"optimizer.weight_decay": 0.02, **changes})
    arms = {"baseline": {}, "pgt": {"loss.alpha": 0.25}, **more}
    study = study_of(base, arms, [0, 1], tuned=("optimizer.lr",))
    advice = missing_control(study, better)
    assert bool(advice) == expected
    if advice:
        assert "Before you keep pgt:" in advice
        assert "less-decay" in advice
    # These have it themselves.
    assert missing_control(replace(study, kind=StudyKind.DECOMPOSE), better) is None
    assert missing_control(replace(study, tuned=("optimizer.weight_decay",)), better) is None


def test_an_unknown_arm_is_refused_with_the_nearest():
    with pytest.raises(RecipeError, match="'pgtt'; did you mean 'pgt'"):
        parse_arm("agc+pgtt", SMALL, 0.3)


def test_an_arm_twice_is_refused():
    with pytest.raises(RecipeError, match="'pgt' twice"):
        arms_of(["pgt", "pgt"], SMALL, [0.3])
    with pytest.raises(RecipeError, match="'a' and 'b' are the same run"):
        study_of(SMALL, {"a": {}, "b": {"loss.alpha": 1.0}}, [0, 1])


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
    assert unstable.endswith("the same training, though one so unstable that rounding grows.")
    assert "WARNING" in describe_identity({1: 1e-16, 10: 1e-2, 50: 0.1})
    assert "WARNING" in describe_identity({1: math.nan, 10: math.nan})


def test_an_unstable_training_is_the_same_at_first_and_then_another():
    gaps = check_identity(load_recipe("digits").override({"optimizer.lr": 0.1}), alpha=0.25)
    assert gaps[10] < 1e-13
    assert not gaps[200] < 1e-6


def test_a_grid_around_the_recipes_own_value():
    assert Space.parse("lr", SMALL).values == (0.0125, 0.025, 0.05, 0.1, 0.2)
    with pytest.raises(RecipeError, match=r"Expected the values to try for 'clip.agc'"):
        Space.parse("agc", SMALL)


# Studies ------------------------------------------------------------------------------------------


@pytest.fixture
def in_process(monkeypatch):
    """Runs are executed here, one after another; other tests are of the queue and its workers."""

    def execute(jobs, folder, **options):
        return {job.name: job.execute(folder) for job in jobs}

    monkeypatch.setattr(results_module, "run_jobs", execute)


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
    assert told["comparisons"][0]["verdict"] == "underpowered"
    with open(study / "study.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["arm"], row["seed"]) for row in rows] == [
        ("baseline", "0"), ("pgt", "0"), ("baseline", "1"), ("pgt", "1")
    ]  # fmt: skip
    for row in rows:
        result = Run(study / row["run"]).result()
        assert result is not None
        assert float(row["test_accuracy"]) == result["test_accuracy"]
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
    assert "pgt against baseline is underpowered" in said
    assert "Here pgt is not told apart from baseline" in said


def test_an_arm_that_diverges_is_compared_all_the_same(in_process, tmp_path, capsys):
    tokens = ["--arms", "baseline", "--arm", "fatal: lr=1e6", "--seeds", 6, "--out", tmp_path]
    assert powergrad("compare", "digits", *tokens, *TOKENS) == 0, capsys.readouterr()
    said = capsys.readouterr().out
    assert "Diverged, which counts as no right answer: 6 of 6 runs of fatal." in said
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
    assert "got one of another recipe; give another --name" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in study.glob("study.*")} == before
    status = powergrad("compare", "digits", *TOKENS, "--arms", "baseline,pgt", "--alpha", "0.5",
                       "--seeds", 2, "--out", study.parent, "--name", "small")  # fmt: skip
    assert status == 2
    assert "Expected the arm 'pgt'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--arms", "baseline,pgtt"], "did you mean 'pgt'?"),
        (["--seeds", "1"], "Expected at least 2 seeds"),
        (["--seeds", "0"], "Expected `seeds` to be at least 1"),
        (["--arms", "baseline"], "Expected at least 2 arms"),
        (["--alpha", "1.5"], "loss.alpha: expected less than or equal to 1, but got 1.5"),
        (["--alpha", "x"], "could not convert"),
        (["--metric", "beauty"], "Expected `metric` to be one of"),
        (["--margin", "0"], "Expected `margin` to be positive"),
        (["--loss.alpha", "0.1"], "the baseline would have PGT"),
        (["--seed", "7"], "Expected --seeds and --first-seed, but got seed = 7"),
        (["--arm", ": lr=0.2"], "Expected a name before the colon"),
        (["--arm", "x: data.hold_out=0.1"], "tested on the same examples"),
        (["--tune", "lr=0.1,0.2", "--data.hold_out", "0.2"], "data.hold_out to be 0 where arms"),
        (["loss=1", "loss.alpha=0.3"], "Expected either 'loss' or keys in it"),
        (["--tune", "lrr=1,2"], "Expected a known key, but got 'lrr'"),
        (["--tune", "optimizer.lrr"], "did you mean 'optimizer.lr'?"),
        (["--optimizer.lrr", "1"], "did you mean 'optimizer.lr'?"),
        (["--workers", "0"], "Expected `workers` to be at least 1"),
        (["--storage", "nonsense://x"], "storage"),
        (["--tune", "lr", "--tune-seeds", "0"], "--tune-seeds to be at least 1"),
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
    assert {arm: tuned.chosen for arm, tuned in results.tuning.arms.items()} == {
        "baseline": 0.1,
        "pgt": 0.05,
    }
    assert [comparison.to_dict() for comparison in results.comparisons] == saved["comparisons"]
    assert results.verdict() == saved["verdict"]
    assert powergrad("report", folder) == 0
    # The command that made it has nothing to do again, and writes the present format.
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("result.json")}
    tokens = ["--arms", "baseline,pgt", "--seeds", 2, "--tune", "lr=0.05,0.1", "--tune-seeds", 1,
              "--train.epochs", 2, "--model.width", 2, "--monitor.every", 20]  # fmt: skip
    name = ["--out", tmp_path, "--name", "tuned-compare"]
    assert powergrad("compare", "digits", *tokens, *name) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("result.json")} == before
    assert yaml.safe_load((folder / "study.yaml").read_text())["format"] == 2
    again = json.loads((folder / "study.json").read_text())
    assert (again["kind"], again["tuned"]) == ("compare", ["optimizer.lr"])
    assert again["rows"] == saved["rows"]
    assert again["comparisons"] == saved["comparisons"]


def test_a_study_of_a_later_format_is_refused(study, tmp_path):
    later = shutil.copytree(study, tmp_path / "later")
    for name in ("study.json", "study.yaml"):
        path = later / name
        text = path.read_text()
        path.write_text(re.sub(r"(\W?format\W*: )2", r"\g<1>3", text, count=1))
        with pytest.raises(RunError, match="a newer powergrad reads"):
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


def test_a_csv_from_elsewhere(tmp_path, capsys):
    assert powergrad("compare", "--from", write(tmp_path / "r.csv", GOOD)) == 0
    said = capsys.readouterr().out
    assert "new is better than baseline: +1.00" in said
    assert "Here new is better than baseline." in said


@pytest.mark.parametrize("column", ["loss", "test_error", "val_NLL"])
def test_more_of_a_loss_is_worse(tmp_path, column):
    path = write(tmp_path / "r.csv", GOOD.replace("metric", column))
    with pytest.raises(RecipeError, match=r"Expected --margin, .* none is usual"):
        Results.from_csv(path)
    assert Results.from_csv(path, margin=0.5).comparisons[0].verdict == "worse"
    turned = Results.from_csv(path, margin=0.5, better="higher")
    assert turned.comparisons[0].verdict == "better"


def test_which_is_better_is_asked_where_the_name_does_not_tell(tmp_path, capsys):
    path = write(tmp_path / "r.csv", GOOD.replace("metric", "beauty"))
    tokens = ("compare", "--from", path, "--margin", "0.5")
    assert powergrad(*tokens) == 2
    assert "Expected --better higher or --better lower" in capsys.readouterr().err
    assert powergrad(*tokens, "--better", "lower") == 0
    assert "Here new is worse than baseline." in capsys.readouterr().out


def test_fractions_have_no_usual_margin(tmp_path):
    """Half a point is 0.005 of them, and 0.5 is nearly everything."""
    rows = (
        f"{arm},{seed},{value + 0.01 * math.sin(7 * seed)}\n"
        for arm, value in (("baseline", 0.89), ("new", 0.92))
        for seed in range(8)
    )
    path = write(tmp_path / "r.csv", "arm,seed,accuracy\n" + "".join(rows))
    with pytest.raises(RecipeError, match=r"Expected --margin, .* fractions, not per cent"):
        Results.from_csv(path)
    assert Results.from_csv(path, margin=0.005).comparisons[0].verdict == "better"


def test_a_metric_that_was_asked_for_must_be_there(tmp_path, capsys):
    path = write(tmp_path / "r.csv", GOOD.replace("metric", "loss"))
    assert powergrad("compare", "--from", path, "--metric", "test_accuracy") == 2
    assert "to have the columns arm, seed and test_accuracy" in capsys.readouterr().err


def test_an_arm_whose_name_has_a_comma_is_quoted_in_the_verdict(tmp_path):
    twice = GOOD + re.sub("^new,", '"new, twice",', GOOD[GOOD.index("new,") :], flags=re.M)
    results = Results.from_csv(write(tmp_path / "r.csv", twice))
    assert results.verdict() == 'Here new and "new, twice" are better than baseline.'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arm,metric\na,1\n", "to have the columns arm, seed and metric"),
        ("arm,seed,x,y\na,1,2,3\n", "a metric (name it with --metric)"),
        ("", "but got none"),
        (f"arm,seed,metric\na,1,{'1' * 140_000}\n", "to be a CSV"),
        (GOOD + "new,9,nan\n", "NaN"),
        (GOOD + "new,9,many\n", "in line 18"),
        (GOOD + "new,3,5\n", "seed 3"),
        ("arm,seed,metric\na,1,2\nb,1,2\n", "seed"),
        ("arm,seed,metric\na,1,2\na,2,2\n", "arm"),
    ],
)
def test_a_csv_that_cannot_be_used(tmp_path, capsys, text, message):
    path = write(tmp_path / "r.csv", text)
    assert powergrad("compare", "--from", path) == 2
    assert message.lower() in capsys.readouterr().err.lower()
    assert [file.name for file in tmp_path.iterdir()] == ["r.csv"]


def test_a_baseline_by_name(tmp_path):
    results = Results.from_csv(write(tmp_path / "r.csv", GOOD), baseline="new")
    assert results.comparisons[0].verdict == "worse"


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


def test_sweep_arms_are_the_whole_grid():
    assert len(Grid({"loss.alpha": (1, 0.5, 0.1), "optimizer.lr": (0.1, 0.2)}).arms()) == 6


def test_tuning_gives_every_arm_the_same_grid_on_held_out_data(in_process, tmp_path, capsys):
    tokens = ["compare", "digits", *TOKENS, "--train.epochs=2", "--arms", "baseline,pgt",
              "--tune", "lr=0.0001,0.1", "--tune-seeds", 1, "--seeds", 2, "--out", tmp_path,
              "--name", "t"]  # fmt: skip
    assert powergrad(*tokens) == 0
    told = json.loads((tmp_path / "t/study.json").read_text())
    tuning = told["tuning"]
    assert tuning["seeds"] == [1000]
    for arm in ("baseline", "pgt"):
        tried = tuning["arms"][arm]["means"]
        assert [point["value"] for point in tried] == [0.0001, 0.1]
        best = max(tried, key=lambda point: point["mean"])["value"]
        assert tuning["arms"][arm]["chosen"] == best
        assert told["changes"][arm]["optimizer.lr"] == best
    for folder in (tmp_path / "t/tuning").glob("*-seed*"):
        recipe = Run(folder).recipe()
        assert recipe.data.hold_out == 0.2
        assert recipe.seed == 1000
    for folder in (tmp_path / "t").glob("*-seed*"):
        assert Run(folder).recipe().data.hold_out == 0
        assert Run(folder).recipe().seed in (0, 1)


def test_a_decomposition_by_the_command(in_process, tmp_path, capsys):
    tokens = ["decompose", "digits", *TOKENS, "--train.epochs=2", "--tune", "lr=0.05,0.1",
              "--tune-seeds", 1, "--seeds", 2, "--out", tmp_path, "--name", "d"]  # fmt: skip
    assert powergrad(*tokens) == 0
    said = capsys.readouterr().out
    assert "they are the same training" in said
    assert "At alpha 0.25, PGT" in said
    told = json.loads((tmp_path / "d/arms/study.json").read_text())
    assert max(told["identity_gaps"].values()) < 1e-9
    tuned = told["tuning"]["arms"]["CE"]["chosen"]
    assert {row["arm"] for row in told["rows"]} == set(decomposition(SMALL, 0.25))
    for folder in (tmp_path / "d/arms").glob("PGT-seed*"):
        assert Run(folder).recipe().optimizer.lr == tuned
    assert (tmp_path / "d/arms/report.html").exists()


def test_there_are_as_many_seeds_as_the_verdict_needs():
    options = StudyOptions()
    assert len(options.seed_list(2)) == 8
    assert len(options.seed_list(10)) == 9  # log2(40 * 9) = 8.5
    assert len(StudyOptions(seeds=3).seed_list(10)) == 3


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
    assert "Alone, these parts of it help: backbone lr / alpha +1." in text
    assert "These do harm: head lr * alpha -" in text
    assert "Instead of PGT one could change this here: backbone lr / alpha." in text


# Workers ------------------------------------------------------------------------------------------


def test_a_job_that_cannot_be_done_is_told_and_the_others_are(tmp_path):
    good = RecipeJob("good", SMALL)
    bad = RecipeJob("bad", SMALL.override({"data.name": "folder:/nowhere"}))
    with pytest.raises(JobError, match=r"1 of 2 runs could not be done:\n  bad: .*nowhere"):
        run_jobs([bad, good], tmp_path, study="x", workers=1)
    assert Run(tmp_path / "good").result() is not None


def test_a_run_that_another_process_is_doing_is_waited_for(tmp_path):
    """As when a worker was too slow to show that it lives, and its run was given to another."""
    folder = tmp_path / "busy"
    code = (
        "import time\nfrom powergrad.lab.run import Run\n"
        "from powergrad.lab.config import Recipe\n"
        f"recipe = Recipe.from_yaml(open({str(tmp_path / 'r.yaml')!r}).read(), 'r')\n"
        f"with Run({str(folder / 'a')!r}).open(recipe):\n"
        "    print('open', flush=True); time.sleep(12)"
    )
    (tmp_path / "r.yaml").write_text(SMALL.to_yaml())
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        results = run_jobs([RecipeJob("a", SMALL)], folder, study="x", workers=1)
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
    work(url, "x", tmp_path)
    assert [trial.state.name for trial in queue.get_trials()] == ["COMPLETE"]


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

    results = run_jobs(jobs, folder, study="killed", workers=2, watch=watch)
    assert kills == 5
    assert sorted(results) == sorted(job.name for job in jobs)
    with sqlite3.connect(folder / "jobs.db") as database:
        done = database.execute(
            "select a.value_json from trials t join trial_user_attributes a using (trial_id) "
            "where t.state = 'COMPLETE' and a.key = 'name'"
        ).fetchall()
    assert sorted(json.loads(name) for (name,) in done) == sorted(results)
    alone = run_jobs(jobs[:2], tmp_path / "alone", study="alone", workers=1)
    for name, result in alone.items():
        assert result["test_accuracy"] == results[name]["test_accuracy"]
        assert (tmp_path / "alone" / name / "model.safetensors").read_bytes() == (
            folder / name / "model.safetensors"
        ).read_bytes()


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
    assert "the same command goes on from there" in said
    again = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    for folder in tmp_path.glob("s/*-seed*"):
        assert Run(folder).result() is not None
    resumed = [Run(f).environment().get("resumed") for f in tmp_path.glob("s/*-seed*")]
    assert any(resumed)


# The plan -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("delta", "seeds"), [(0.09, 29), (0.14, 14), (0.30, 6)])
def test_plan_by_the_command(capsys, delta, seeds):
    assert powergrad("plan", "--delta", delta, "--sigma", 0.118) == 0
    said = capsys.readouterr().out
    assert f"Run {seeds}:" in said
    if delta == 0.30:
        assert "needs 5 seeds" in said
    assert powergrad("plan", "--delta", delta, "--sigma", "imagenet-resnet18") == 0
    assert f"Run {seeds}:" in capsys.readouterr().out


def test_plan_from_a_study(study, capsys):
    assert powergrad("plan", "--delta", 0.3, "--study", study) == 0
    said = capsys.readouterr().out
    assert "uncertain" in said
    seconds = [Run(f).result()["seconds"] for f in study.glob("*-seed*")]  # pyright: ignore
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


@pytest.fixture
def made_up(monkeypatch):
    """Studies whose runs are not trained: a run is better the higher its rate, or normalised."""

    def run(study, folder, **options):
        rows = []
        for (arm, seed), job in study.jobs().items():
            score = 10 * job.recipe.optimizer.lr + (job.recipe.model.norm == "batch")
            rows.append(RunRow(arm, seed, {"test_accuracy": score}))
        return Results(study.metric, study.margin, study.baseline, rows, study)

    monkeypatch.setattr(tuning_module, "run_study", run)


PAIR = {"baseline": {}, "pgt": {"loss.alpha": 0.5}}


def test_tuning_uses_seeds_that_the_study_does_not(made_up, tmp_path, capsys):
    """And finds the edge of a grid in whatever order it was given."""
    study = study_of(SMALL, PAIR, [1000, 1001])
    space = Space.parse("lr=0.1,0.4,0.2", SMALL)
    tuned, tuning = tune_arms(study, space, 2, tmp_path, StudyOptions())
    assert tuning.seeds == (1002, 1003)
    assert all(arm.at_edge for arm in tuning.arms.values())
    assert tuned.arms["pgt"] == {"loss.alpha": 0.5, "optimizer.lr": 0.4}
    assert "pgt: optimizer.lr = 0.4 (0.1: 1.00, 0.4: 4.00, 0.2: 2.00; at" in capsys.readouterr().out
    fresh = replace(study, seeds=[0, 1])
    assert tune_arms(fresh, space, 1, tmp_path, StudyOptions())[1].seeds == (1000,)


def test_words_can_be_tuned(made_up, tmp_path, capsys):
    space = Space.parse("model.norm=none,batch", SMALL)
    tuned, tuning = tune_arms(study_of(SMALL, PAIR, [0, 1]), space, 1, tmp_path, StudyOptions())
    assert tuned.arms["baseline"] == {"model.norm": "batch"}
    assert not tuning.arms["baseline"].at_edge
    assert "baseline: model.norm = batch (none: 0.50, batch: 1.50)" in capsys.readouterr().out


def test_a_name_with_dollar_signs_is_drawn(tmp_path):
    names = ("baseline", "cost $x_$ <b>")
    rows = [(arm, seed, 90 + math.sin(9 * seed + len(arm))) for arm in names for seed in range(4)]
    figure = figures.study_figure(results_of("baseline", rows), "$s_$: 8 runs")
    figures.save(figure, tmp_path / "study.png")
    assert (tmp_path / "study.png").stat().st_size > 10_000


def test_a_metric_that_a_run_has_not_is_told_with_a_page(in_process, tmp_path, capsys):
    tokens = ["compare", "digits", *TOKENS, "--arms", "baseline", "--arm", "fatal: lr=1e6",
              "--seeds", 2, "--metric", "nll", "--out", tmp_path, "--name", "s"]  # fmt: skip
    assert powergrad(*tokens) == 2
    assert "finite" in capsys.readouterr().err
    assert {"study.csv", "report.html"} <= {path.name for path in (tmp_path / "s").iterdir()}


def test_two_studies_of_one_name_do_not_mix_in_a_storage(monkeypatch, tmp_path):
    queues = []

    def run_jobs(jobs, folder, *, study, **options):
        queues.append(study)
        return {job.name: {"test_accuracy": 90.0} for job in jobs}

    monkeypatch.setattr(results_module, "run_jobs", run_jobs)
    for epochs, folder in ((2, "a/tuning"), (2, "c/tuning"), (3, "b/tuning")):
        base = SMALL.override({"train.epochs": epochs})
        study = study_of(base, {"x": {}, "y": {"loss.alpha": 0.5}}, [0], StudyKind.TUNE)
        run_study(study, tmp_path / folder, workers=1, storage="sqlite:///shared.db")
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
    with pytest.raises(RunError, match="but got a list"):
        Run(run).result()


def test_noise_is_of_the_metric_that_a_study_compares(tmp_path, capsys):
    rows = "".join(f"a,{seed},{90 + seed},{0.005 * seed}\n" for seed in range(8))
    path = write(tmp_path / "study.csv", "arm,seed,test_accuracy,nll\n" + rows)  # one arm will do
    said = []
    for tokens in ([], ["--metric", "nll"]):
        assert powergrad("plan", "--delta", "0.02", "--study", path, *tokens) == 0
        said.append(capsys.readouterr().out)
    write(tmp_path / "study.json", json.dumps({"metric": "nll"}))
    assert powergrad("plan", "--delta", "0.02", "--study", path) == 0
    assert capsys.readouterr().out == said[1] != said[0]
