"""What is counted for each claim, in made-up studies and in the paper's own tables."""

import zlib
from typing import Any

import numpy as np
import pytest
from scipy.stats import ttest_ind
from studies import study_of

from powergrad.lab.files import write_json
from powergrad.lab.study import METRICS, Results, RunRow, Tuning
from powergrad.lab.study.records import Choice, Trial
from powergrad.lab.study.saving import to_json
from powergrad.lab.trainer.recipe import Recipe
from reproduction.claims import CLAIMS, against_controls, published_gains
from reproduction.evidence import RESULTS, Evidence, csv_rows
from reproduction.pages import study_regions
from reproduction.trials import NOT_COUNTED, contrasts_of, methods_of

SMALL = {"data.name": "digits", "model.name": "resnet8", "model.width": 8, "model.norm": "none"}
RECIPE = Recipe().override(
    {**SMALL, "optimizer.lr": 0.1, "train.batch_size": 16, "train.epochs": 10}
)
PGT, LESS = {"loss.alpha": 0.25}, {"optimizer.weight_decay": 1e-4}
TWO = {"baseline": {}, "pgt": PGT}


def write_study(
    folder, changes, accuracy, name="x", dead=None, edges=None, diverged=(), recipe=None, train=None
):
    """What ``powergrad compare`` leaves, of made-up runs; `edges` are the arms tuned to an edge."""
    rows = [
        RunRow(
            arm=arm,
            seed=seed,
            about={"steps": 1000, "classes": 10, "diverged": (arm, seed) in diverged},
            metrics={
                "test_accuracy": value,
                "train_accuracy": (train or accuracy)[arm][seed],
                "train_loss": zlib.crc32(f"{name} {arm} {seed}".encode()) / 2**32,
                "nll": 1.0,
                "seconds": 3.6,
                **({"dead_units": dead[arm][seed]} if dead else {}),
            },
        )
        for arm, values in accuracy.items()
        for seed, value in values.items()
    ]
    tuning = None
    if edges is not None:
        point = {"optimizer.lr": 0.1}
        tried = (Trial(point=point, changes=point, mean=90.0),)
        choices = {
            arm: Choice(trials=tried, chosen=0, edges=tuple(point) if arm in edges else ())
            for arm in changes
        }
        tuning = Tuning(keys=("optimizer.lr",), seeds=1, hold_out=0.2, repeats=(choices,))
    baseline = next(iter(changes))
    study = study_of(recipe or RECIPE, changes, str(len(accuracy[baseline])))
    made = {"torch": "2", "commit": "c0ffee", "command": "powergrad compare"}
    metric = METRICS["test_accuracy"]
    results = Results(metric, 0.5, baseline, rows, study, tuning=tuning, environment=made)
    write_json(folder / f"compare_{name}.json", to_json(results))


def spread(mean, n=8):
    """`n` seeds with the given mean and a small spread."""
    return {seed: mean + 0.01 * (seed - (n - 1) / 2) for seed in range(n)}


def cell(arm, baseline, comparisons=1):
    """The difference of two samples with scipy's interval, corrected by Sidak's inequality."""
    arm, baseline = list(arm.values()), list(baseline.values())
    low, high = ttest_ind(arm, baseline, equal_var=False).confidence_interval(
        0.95 ** (1 / comparisons)
    )
    return f"{np.mean(arm) - np.mean(baseline):+.2f} ({low:+.2f} to {high:+.2f})"


def glance(folder, claim):
    """Confirmed, within 0.5, contradicted, not settled, and against the control."""
    lines = study_regions(folder)["claims"]().splitlines()
    (line,) = (line for line in lines if line.startswith(f"| {claim}"))
    return line.removeprefix("| ").removesuffix(" |").split(" | ")[2:]


def lines_of(folder, region, start=""):
    lines = study_regions(folder)[region]().splitlines()[2:]
    return [line for line in lines if line.startswith(start)]


@pytest.mark.parametrize(
    ("changes", "methods"),
    [
        ({}, set()),
        ({"optimizer.lr": 0.1}, set()),
        ({"loss.alpha": 0.3, "loss.label_smoothing": 0.1}, {"PGT", "LS"}),
        ({"optimizer.weight_decay": 1e-4, "optimizer.lr": 0.1}, {"less decay"}),
        ({"optimizer.weight_decay": 0.1}, {"more decay"}),
        ({"optimizer.backbone.weight_decay": 0.25}, {"less decay"}),
        ({"optimizer.weight_decay": 5e-4}, set()),  # as it was
        ({"train.batch_size": 8}, {"smaller batch"}),
        ({"train.batch_size": 64, "train.epochs": 5}, {"larger batch", "fewer epochs"}),
        ({"model.name": "resnet18"}, {"deeper network"}),  # than resnet8
        ({"loss.alpha": 0.3, "loss.form": "as_published"}, None),
        ({"optimizer.head.lr": 0.25}, None),
    ],
)
def test_methods_are_told_by_what_an_arm_changes(changes, methods):
    assert methods_of(changes, RECIPE) == methods


def test_every_kind_of_claim_is_counted(tmp_path):
    smooth, low = {"loss.label_smoothing": 0.1}, {"loss.alpha": 0.05}
    pgt = {"loss.alpha": 0.3}
    arms = {  # what each changes, and its mean
        "baseline": ({}, 0),
        "pgt": (pgt, 2),
        "low": (low, 9),
        "pgt+ls": ({**pgt, **smooth}, 3),
        "low+ls": ({**low, **smooth}, 8),
        "short": ({**pgt, "train.epochs": 7}, 0),
        "wide": ({"train.batch_size": 64}, -5),
        "deep": ({"model.name": "resnet50"}, -80),
        "decay": (LESS, 4),
        "both": ({**pgt, **LESS}, 9),
        "gc": ({"clip.norm": 1.0}, -3),
        "agc+pgt": ({**pgt, "clip.agc": 1.0}, 1),
        "ls": (smooth, None),  # as noisy as it is better
        "fast": ({"optimizer.lr": 0.4}, 5),  # is no other baseline
    }
    around = {seed: 90 + (seed % 2 - 0.5) / 5 for seed in range(10)}
    accuracy = {
        arm: {seed: value + (mean or 0) for seed, value in around.items()}
        for arm, (_, mean) in arms.items()
    }
    accuracy["ls"] = {seed: value + (-3) ** (seed % 2) for seed, value in around.items()}
    accuracy["short"] = {9 - seed: value for seed, value in around.items()}
    write_study(tmp_path, {arm: changes for arm, (changes, _) in arms.items()}, accuracy)
    controls = "PGT alone: 1 better, 1 worse; PGT with it: 1 better"
    for claim, cells in {
        "PGT raises accuracy without": ["2", "", "", "", controls],
        "PGT does better than GC": ["2", "", "", "", ""],  # both alphas
        "AGC with PGT raises": ["1", "", "", "", ""],
        "AGC with PGT does better": ["", "", "1", "", ""],  # than PGT at the same alpha
        "Label smoothing improves PGT": ["1", "", "", "", ""],
        "Label smoothing hurts PGT": ["1", "", "", "", ""],  # worse, as it says
        "PGT reaches in 60%": ["1", "", "", "", ""],  # equivalent is what it says
        "Without normalisation large": ["1", "", "", "", ""],
        "Networks deeper": ["1", "", "", "", ""],
        "GC raises": ["", "", "1", "", ""],
        "Label smoothing raises": ["", "", "", "1", ""],
        "AGC raises": ["", "", "", "not measured", ""],
        "PGT raises accuracy with batch": ["", "", "", "not measured", ""],
    }.items():
        assert glance(tmp_path, claim) == cells, claim
    (line,) = lines_of(tmp_path, "beyond", "|  | gc (norm 1) | ")
    assert f"| 10 | {cell(accuracy['gc'], accuracy['baseline'], 13)} | worse |" in line
    instead, _, on_top = against_controls(Evidence(tmp_path).trials)
    assert (on_top.arm.name, on_top.against.name) == ("both", "decay")
    loss = cell(accuracy["pgt"], accuracy["decay"])
    label = "pgt (alpha 0.3) against decay (decay 0.0001)"
    assert instead.cells == (label, "1x; 0.2x", "10", loss, "worse")


@pytest.mark.parametrize("edge", ["pgt", "baseline", "agc", None])
def test_a_gain_at_the_edge_of_the_rates_is_not_counted_as_one(tmp_path, edge):
    changes = {**TWO, "agc": {"clip.agc": 1.0}}
    accuracy = {"baseline": spread(90), "pgt": spread(92), "agc": spread(88)}
    write_study(tmp_path, changes, accuracy, edges={edge})
    is_gain = edge not in ("pgt", "baseline")
    assert glance(tmp_path, "PGT raises accuracy without")[:4] == [
        *(["1", "", "", ""] if is_gain else ["", "", "", "1"])
    ]
    is_better = edge not in ("pgt", "agc")
    assert glance(tmp_path, "PGT does better than AGC")[0] == ("1" if is_better else "")
    assert glance(tmp_path, "AGC raises")[2] == "1"  # a loss is a loss
    (line,) = lines_of(tmp_path, "beyond", "| `compare_x`: resnet8 without normalisation on digits")
    words = "better at these rates" if is_gain else "not settled; better withheld (edge)"
    assert line.endswith(f"| pgt (alpha 0.25) | 8 | +2.00 (+1.97 to +2.03) | {words} |")
    assert ("PGT was better in 1" in study_regions(tmp_path)["not-better"]()) == is_gain


@pytest.mark.parametrize(("decays", "words"), [((0.01, 0.01), "all"), ((0.01, 5e-4), "1")])
def test_gains_at_an_inflated_decay_are_marked(tmp_path, decays, words):
    for place, decay in enumerate(decays):
        recipe = RECIPE.override({"optimizer.weight_decay": decay})
        accuracy = {"baseline": spread(90 + place), "pgt": spread(92 + place)}
        write_study(tmp_path, TWO, accuracy, f"x{place}", recipe=recipe)
    assert f"PGT was better in 2, {words} of them at a weight decay that was not tuned" in (
        study_regions(tmp_path)["not-better"]()
    )
    assert "; decay 20x; baseline 90.00%" in lines_of(tmp_path, "beyond")[0]


def test_runs_that_diverged_count_as_guessing_and_only_in_the_test_accuracy(tmp_path):
    accuracy = {"baseline": spread(80), "pgt": {**spread(81), 3: 0.0}}
    train = {"baseline": spread(90), "pgt": {**spread(93), 3: 0.0}}
    train = {arm: {s: v + 0.01 * (s % 3) for s, v in runs.items()} for arm, runs in train.items()}
    write_study(tmp_path, TWO, accuracy, diverged={("pgt", 3)}, train=train)
    assert glance(tmp_path, "Training accuracy")[0] == "1"
    assert glance(tmp_path, "The gap")[0] == "1"
    (line,) = lines_of(tmp_path, "beyond")
    as_guessed = cell({**accuracy["pgt"], 3: 10.0}, accuracy["baseline"])
    assert f"| 8 | {as_guessed} | not settled; diverged: 1 against 0 |" in line


def test_a_study_whose_baseline_has_pgt_is_no_evidence_for_it(tmp_path):
    changes = {"pgt": PGT, "less": {"loss.alpha": 0.05}}
    write_study(tmp_path, changes, {"pgt": spread(90), "less": spread(80)})
    hook = {"baseline": {}, "hook": {**PGT, "loss.form": "as_published"}}
    half = RECIPE.override({"train.precision": "float16"})
    write_study(tmp_path, hook, {"baseline": spread(90), "hook": spread(80)}, "y", recipe=half)
    assert [trial.name for trial in Evidence(tmp_path).trials] == ["compare_y"]
    assert all(glance(tmp_path, claim.title)[3] == "not measured" for claim in CLAIMS)
    assert len(lines_of(tmp_path, "beyond")) == 2  # they are listed


@pytest.mark.parametrize(
    ("accuracy", "cells"),
    [
        (spread(20), ["1", "", "", ""]),
        (spread(80), ["", "", "1", ""]),  # worse, but trained
        ({**spread(80), 3: 0.0}, ["", "", "", "1"]),
    ],
)
def test_a_network_that_is_only_worse_can_be_trained(tmp_path, accuracy, cells):
    changes = {"baseline": {}, "deep": {"model.name": "resnet50"}}
    write_study(tmp_path, changes, {"baseline": spread(90), "deep": accuracy})
    assert glance(tmp_path, "Networks deeper")[:4] == cells


@pytest.mark.parametrize(
    ("count", "decay", "cells"),
    [
        (3, 0.02, ["1", "", "", ""]),
        (40, 0.02, ["", "", "1", ""]),
        (20, 0.02, ["", "", "", "1"]),
        (3, 0.005, ["", "", "", "1"]),  # too little decay
    ],
)
def test_dead_filters_are_compared_by_the_same_tests(tmp_path, count, decay, cells):
    dead = {"baseline": {s: 20 + s for s in range(8)}, "pgt": {s: count + 7 - s for s in range(8)}}
    recipe = RECIPE.override({"optimizer.weight_decay": decay})
    write_study(tmp_path, TWO, {arm: spread(90) for arm in TWO}, dead=dead, recipe=recipe)
    assert glance(tmp_path, "With PGT fewer")[:4] == cells
    assert glance(tmp_path, "With AGC fewer")[3] == "not measured"
    # 1,000 steps at a mean rate a little under 0.05, momentum 0.9
    (trial,) = Evidence(tmp_path).trials
    assert trial.arms[0].exponent == pytest.approx(1000 * 0.05 * decay / 0.1, rel=0.3)


@pytest.mark.studies
def test_studies_that_are_not_counted_are_listed_with_the_reason(monkeypatch):
    def counted():
        return sum(len(contrasts_of(trial)) for trial in trials if not trial.not_counted)

    trials = Evidence(RESULTS).trials
    before = counted()
    listed = study_regions(RESULTS)["beyond"]() + study_regions(RESULTS)["table-1"]()
    for name, reason in NOT_COUNTED.items():
        (line,) = (line for line in listed.splitlines() if line.startswith(f"| `{name}`:"))
        assert f"; {reason} |" in line
    # A study whose runs are all in a larger one would be counted twice.
    runs = {trial.name: set.union(*(set(arm.runs) for arm in trial.arms)) for trial in trials}
    parts = {name for name in runs if any(runs[name] < runs[other] for other in runs)}
    assert parts <= NOT_COUNTED.keys()
    monkeypatch.setattr("reproduction.trials.NOT_COUNTED", {})
    assert counted() == before + 6


def test_published_differences_are_the_papers():
    gains = {claim.id: published_gains(claim) for claim in CLAIMS}
    assert {name: (found[0], found[-1]) for name, found in gains.items() if len(found) > 1} == {
        "pgt-bn": ((0.09, "T1.7"), (0.734, "T1.1")),
        "pgt": ((0.682, "T2.2"), (1.018, "T2.8")),
        "train": ((0.15, "T1.7"), (1.48, "T2.4")),
        "gap": ((-0.332, "T2.2"), (0.796, "T2.4")),
        "ls-pgt-gap": ((-1.164, "T3.8"), (-1.042, "T3.6")),
    }
    one = {"agc": "0.502 T2.7", "pgt-over-agc": "0.516 T2.8", "agc-pgt": "2.06 T2.10"}
    one |= {"agc-pgt-over-pgt": "1.042 T2.10", "gc": "0.268 T2.6", "pgt-over-gc": "0.75 T2.8"}
    one |= {"gc-pgt": "0.292 T2.9", "ls": "0.138 T3.4", "ls-0.3": "0.082 T3.6"}
    one |= {"ls-0.05": "-0.826 T3.8", "ls-gap": "-0.508 T3.4", "epochs": "0.0 E60"}
    printed = {name: f"{f[0][0]} {f[0][1]}" for name, f in gains.items() if len(f) == 1}
    assert printed == one
    assert gains["batch"] == []  # whose rows are in several parts of Table 2


def test_cosine_schedules_are_compared_with_step_schedules():
    """Both pairs of baselines are significant; one rate was at the edge of what was tried."""
    pairs = [("T1.2-fashion-mnist", "T1.3-fashion-mnist")]
    pairs += [("T3-cosine-fashion-mnist-resnet18", "T3-step-fashion-mnist-resnet18")]
    for names in pairs:
        values = []
        for name in names:
            rows = csv_rows(RESULTS / "paper" / f"{name}.csv")
            values.append([float(r["test_accuracy"]) for r in rows if r["arm"] == "baseline"])
        found: Any = ttest_ind(*values, equal_var=False)
        assert found.statistic > 0
        assert found.pvalue < 0.05
    assert glance(RESULTS, "The cosine schedule does better than the step schedule")[:4] == [
        *("1", "", "", "1")
    ]
