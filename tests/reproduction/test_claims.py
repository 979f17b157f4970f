"""What the pages say of each claim, against the CSV files and the paper's own tables."""

import csv
import json
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
from powergrad.lab.jobs import RecipeProgram
from scipy.stats import ttest_ind

from powergrad.lab.files import write_json
from powergrad.lab.paper.evidence import Evidence
from powergrad.lab.paper.rows import load_paper
from powergrad.lab.stats import Design
from powergrad.lab.study import METRICS, Results, RunRow, Study, StudyKind, Tuning
from powergrad.lab.study.records import Choice, Trial
from powergrad.lab.trainer.recipe import Recipe
from reproduction.claims import CLAIMS
from reproduction.pages import study_regions
from reproduction.studies import (
    WITHDRAWN,
    all_trials,
    contrasts_of,
    methods_of,
    read_studies,
)

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
CHANGED = {
    "data.name": "digits",
    "model.name": "resnet8",
    "model.width": 8,
    "model.norm": "none",
    "optimizer.lr": 0.1,
    "train.batch_size": 16,
    "train.epochs": 10,
}
RECIPE = Recipe().override(CHANGED)


def lines_of(regions, start):
    """The lines below the claim whose title begins so, or of the region of that name."""
    (name,) = [f"claim-{claim.id}" for claim in CLAIMS if claim.title.startswith(start)] or [start]
    return regions[name]().splitlines()


def trials_of(results):
    return all_trials(Evidence(results), read_studies(results))


def write_study(
    folder, name, changes, accuracy, dead=None, tuned=None, diverged=(), recipe=RECIPE, train=None
):
    """What ``powergrad compare`` leaves, of made-up runs."""
    rows = [
        RunRow(
            arm,
            seed,
            {
                "steps": 1000,
                "test_accuracy": value,
                "train_accuracy": (train or accuracy)[arm][seed],
                "train_loss": zlib.crc32(f"{name} {arm} {seed}".encode()) / 2**32,
                "nll": 1.0,
                "seconds": 3.6,
                "diverged": (arm, seed) in diverged,
                **({"dead_units": dead[arm][seed]} if dead else {}),
            },
        )
        for arm, values in accuracy.items()
        for seed, value in values.items()
    ]
    metric, baseline = METRICS["test_accuracy"], next(iter(changes))
    design = Design((len(accuracy[baseline]),))
    study = Study(StudyKind.COMPARE, RecipeProgram(recipe), changes, design)
    tuning = Tuning(("optimizer.lr",), 1, 0.2, (tuned,)) if tuned else None
    made = {"torch": "2", "commit": "c0ffee", "command": "powergrad compare"}
    results = Results(metric, 0.5, baseline, rows, study, tuning=tuning, environment=made)
    write_json(folder / f"compare_{name}.json", results.to_dict())


def lost(row):
    """What a row of Table 2 has less than the baseline at batch 256."""
    with open(ROOT / "tests" / "lab" / "paper_tables.csv") as file:
        test = {printed["id"]: float(printed["test"] or "nan") for printed in csv.DictReader(file)}
    return f"{test[row] - test['T2.5']:+.4g}"


def spread(mean, n=8):
    """`n` seeds with the given mean and a small spread."""
    return {seed: mean + 0.01 * (seed - (n - 1) / 2) for seed in range(n)}


def cell(arm, baseline, comparisons=1):
    """The difference of two samples with scipy's interval, corrected by Sidak's inequality."""
    arm, baseline = list(arm.values()), list(baseline.values())
    test = ttest_ind(arm, baseline, equal_var=False)
    low, high = test.confidence_interval(0.95 ** (1 / comparisons))
    return f"{np.mean(arm) - np.mean(baseline):+.2f} ({low:+.2f} to {high:+.2f})"


def at_rate(rate, *, is_edge):
    """The choice of a rate."""
    point = {"optimizer.lr": rate}
    return Choice((Trial(point, point, 90.0),), 0, ("optimizer.lr",) if is_edge else ())


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
        ({"model.name": "resnet50"}, {"deeper network"}),
        ({"model.name": "resnet18"}, {"deeper network"}),  # than resnet8
        ({"loss.alpha": 0.3, "loss.form": "as_published"}, None),
        ({"optimizer.head.lr": 0.25}, None),
    ],
)
def test_methods_are_told_by_what_an_arm_changes(changes, methods):
    assert methods_of(changes, RECIPE) == methods


def test_a_claim_counts_verdicts_and_says_how_rates_were_chosen(tmp_path):
    pgt = {"loss.alpha": 0.25}
    changes = {"baseline": {}, "pgt": pgt, "agc+pgt": {**pgt, "clip.agc": 1.0}}
    accuracy = {"baseline": spread(90), "pgt": spread(92), "agc+pgt": spread(87)}
    write_study(tmp_path, "one", changes, accuracy)
    choices = {arm: at_rate(0.2, is_edge=arm == "pgt") for arm in changes}
    same = {**accuracy, "pgt": {7 - seed: value for seed, value in spread(90).items()}}
    faster = {arm: {**change, "optimizer.lr": 0.2} for arm, change in changes.items()}
    write_study(tmp_path, "two", faster, same, tuned=choices)
    regions = study_regions(tmp_path)
    lines = lines_of(regions, "PGT raises accuracy without normalisation")
    assert lines[0].endswith(" Measured: 1 better, 1 equivalent.")
    on = "resnet8 of width 8 without normalisation on digits, batch 16, 1,000 steps"
    gain = cell(accuracy["pgt"], accuracy["baseline"], 2)
    assert gain == "+2.00 (+1.97 to +2.03)"
    first = f"| pgt (alpha 0.25) | {on} | 0.1; 0.1 | 1x | 8 | {gain} | better |"
    assert f"| `compare_one` {first}" in lines
    (second,) = (line for line in lines if line.startswith("| `compare_two` "))
    assert "| 0.2, tuned (edge); 0.2, tuned | 1x | 8 | +0.00 (" in second
    both = lines_of(regions, "AGC with PGT raises")
    assert both[0] == "Published: +2.06 (T2.10). Measured: 2 worse."
    assert lines_of(regions, "AGC raises")[0].endswith("Not measured here.")
    # One arm against another, not against the baseline.
    alone = lines_of(regions, "AGC with PGT does better than PGT alone")
    assert alone[0] == "Published: +1.042 (T2.10). Measured: 2 worse."
    loss = cell(accuracy["agc+pgt"], accuracy["pgt"])
    assert any(f"| 8 | {loss} | worse |" in line for line in alone)


def test_a_decay_above_the_papers_is_marked_and_verdicts_after_one_tuning_say_so(tmp_path):
    changes = {"baseline": {}, "pgt": {"loss.alpha": 0.25}}
    accuracy = {"baseline": spread(90), "pgt": spread(92)}
    strong = RECIPE.override({"optimizer.weight_decay": 0.01})
    write_study(tmp_path, "strong", changes, accuracy, recipe=strong)
    choices = {arm: at_rate(0.1, is_edge=False) for arm in changes}
    write_study(tmp_path, "tuned", changes, accuracy, tuned=choices)
    lines = lines_of(study_regions(tmp_path), "PGT raises accuracy without normalisation")
    (strong_row,) = (line for line in lines if line.startswith("| `compare_strong`"))
    assert "| 20x, inflated | 8 |" in strong_row
    assert strong_row.endswith("| better |")
    (tuned_row,) = (line for line in lines if line.startswith("| `compare_tuned`"))
    assert tuned_row.endswith("| better at these rates |")


def test_a_gain_at_the_edge_of_the_rates_is_not_counted_as_one(tmp_path):
    changes = {"baseline": {}, "pgt": {"loss.alpha": 0.25}}
    accuracy = {"baseline": spread(90), "pgt": spread(92)}
    for arm in changes:  # whose rate is at the edge
        tuned = {name: at_rate(0.1, is_edge=name == arm) for name in changes}
        write_study(tmp_path, arm, changes, accuracy, tuned=tuned)
    regions = study_regions(tmp_path)
    lines = lines_of(regions, "PGT raises accuracy without")
    assert lines[0].endswith("Measured: 2 not settled.")
    assert sum(line.endswith("| not settled; better withheld (edge) |") for line in lines) == 2
    assert "PGT was better in 0. In 2 more, *better* was withheld" in regions["not-better"]()
    assert "| not settled; better withheld (edge) |" in regions["beyond"]()
    assert "`optimizer.lr` tuned for every arm separately" in regions["beyond"]()
    assert "(1 seed per value): baseline 0.1, pgt 0.1 (edge of the grid)." in regions["beyond"]()


@pytest.mark.parametrize("edge", ["pgt", "agc", None])
def test_a_gain_over_another_method_needs_rates_inside_the_grid(tmp_path, edge):
    changes = {"baseline": {}, "agc": {"clip.agc": 1.0}, "pgt": {"loss.alpha": 0.25}}
    accuracy = {"baseline": spread(95), "agc": spread(90), "pgt": spread(92)}
    tuned = {name: at_rate(0.1, is_edge=name == edge) for name in changes}
    write_study(tmp_path, "x", changes, accuracy, tuned=tuned)
    lines = lines_of(study_regions(tmp_path), "PGT does better than AGC")
    assert lines[0].endswith("Measured: 1 not settled." if edge else "Measured: 1 better.")
    assert lines_of(study_regions(tmp_path), "AGC raises")[0].endswith("Measured: 1 worse.")


def test_repeats_are_compared_not_their_runs(tmp_path):
    changes = {"baseline": {}, "pgt": {"loss.alpha": 0.25}}
    accuracy = {"baseline": spread(90, 12), "pgt": spread(92, 12)}
    tuned = {arm: at_rate(0.1, is_edge=False) for arm in changes}
    write_study(tmp_path, "x", changes, accuracy, tuned=tuned, train=accuracy)
    path = tmp_path / "compare_x.json"
    values = json.loads(path.read_text())
    values["rows"] = [{**row, "repeat": row["seed"] // 2} for row in values["rows"]]
    values["tuning"] |= {"repeats": 6 * values["tuning"]["repeats"], "is_unit": True}
    path.write_text(json.dumps({**values, "seeds": "6", "seeds_per_repeat": 2}))
    means = {
        arm: {repeat: (runs[2 * repeat] + runs[2 * repeat + 1]) / 2 for repeat in range(6)}
        for arm, runs in accuracy.items()
    }
    gain = cell(means["pgt"], means["baseline"])
    regions = study_regions(tmp_path)
    for title in ("PGT raises accuracy without", "Training accuracy"):
        (row,) = (line for line in lines_of(regions, title) if line.startswith("| `"))
        assert f"| tuned in every repeat; tuned in every repeat | 1x | 6 | {gain} | better |" in row
    assert "in each of 6 repeats): baseline: lr 0.1; lr 0.1;" in regions["beyond"]()


def glance(regions, claim):
    """The cells of a claim at the head of the page."""
    (line,) = (line for line in regions["claims"]().splitlines() if line.startswith(f"| [{claim}"))
    return line.removeprefix("| ").removesuffix(" |").split(" | ")[1:]


def test_claims_at_a_glance(tmp_path):
    smooth = {"loss.label_smoothing": 0.1}
    short, less = {"train.epochs": 7}, {"optimizer.weight_decay": 1e-4}
    changes = {
        "baseline": {},
        "pgt": {"loss.alpha": 0.3},
        "low": {"loss.alpha": 0.05},
        "pgt+ls": {"loss.alpha": 0.3, **smooth},
        "low+ls": {"loss.alpha": 0.05, **smooth},
        "short": {"loss.alpha": 0.3, **short},
        "wide": {"train.batch_size": 64},
        "decay": less,
        "gc": {"clip.norm": 1.0},
        "ls": smooth,
    }
    around = {seed: 90 + (seed % 2 - 0.5) / 5 for seed in range(10)}
    means = {"baseline": 0, "pgt": 2, "low": 9, "pgt+ls": 3, "low+ls": 8, "wide": -5, "decay": 4}
    means["gc"] = -3
    accuracy = {arm: {s: v + by for s, v in around.items()} for arm, by in means.items()}
    accuracy["ls"] = {seed: value + (-3) ** (seed % 2) for seed, value in around.items()}
    accuracy["short"] = {9 - seed: value for seed, value in around.items()}
    write_study(tmp_path, "x", changes, accuracy)
    regions = study_regions(tmp_path)
    # Published; confirmed, within 0.5, contradicted, not settled; against the control.
    table = {
        "PGT raises accuracy without": ["2", "", "", "", "PGT alone: 1 better, 1 worse"],
        "Label smoothing improves PGT": ["1", "", "", "", ""],
        "Label smoothing hurts PGT": ["1", "", "", "", ""],  # worse, as it says
        "PGT reaches in 60%": ["1", "", "", "", ""],  # equivalent is what it says
        "Without normalisation large": ["1", "", "", "", ""],
        "GC raises": ["", "", "1", "", ""],
        "Label smoothing raises": ["", "", "", "1", ""],
        "AGC raises": ["", "", "", "not measured", ""],
    }
    for claim, cells in table.items():
        assert glance(regions, claim)[1:] == cells, claim


def test_a_study_whose_runs_are_all_in_a_larger_one_is_shown_and_not_counted(tmp_path):
    changes = {"baseline": {}, "pgt": {"loss.alpha": 0.25}, "agc": {"clip.agc": 1.0}}
    accuracy = {"baseline": spread(90), "pgt": spread(92), "agc": spread(91)}
    write_study(tmp_path, "large", changes, accuracy)
    two = {arm: accuracy[arm] for arm in ("baseline", "pgt")}
    write_study(tmp_path, "part", {arm: changes[arm] for arm in two}, two)
    part = tmp_path / "compare_part.json"
    title = "PGT raises accuracy without normalisation"
    counted = "Measured: 2 better."
    assert counted in lines_of(study_regions(tmp_path), title)[0]

    # Now the same runs, seed by seed.
    about = json.loads(part.read_text())
    large = json.loads((tmp_path / "compare_large.json").read_text())
    about["rows"] = [row for row in large["rows"] if row["arm"] in two]
    part.write_text(json.dumps(about))
    regions = study_regions(tmp_path)
    lines = lines_of(regions, title)
    assert "Measured: 1 better." in lines[0]
    (row,) = (line for line in lines if line.startswith("| `compare_part`"))
    assert row.endswith("| better; not counted: its runs are part of `compare_large` |")
    assert glance(regions, title)[1] == "1"
    assert "Of 1 comparisons (0 of them" in regions["not-better"]()

    # Another run among them, even one that diverged: a study of its own again.
    lost = {"train_loss": None, "steps": 9, "diverged": True}  # which is noise in its baseline
    for change, verdicts in (
        ({"train_loss": 7.0}, counted),
        (lost, "Measured: 1 better, 1 not settled."),
    ):
        other = {**about, "rows": [{**about["rows"][0], **change}, *about["rows"][1:]]}
        part.write_text(json.dumps(other))
        assert verdicts in lines_of(study_regions(tmp_path), title)[0]


def test_training_accuracy_and_gap_are_compared_without_the_runs_that_diverged(tmp_path):
    changes = {"baseline": {}, "pgt": {"loss.alpha": 0.25}}
    accuracy = {"baseline": spread(80), "pgt": {**spread(81), 3: 0.0}}
    train = {"baseline": spread(90), "pgt": {**spread(93), 3: 0.0}}
    write_study(tmp_path, "x", changes, accuracy, diverged={("pgt", 3)}, train=train)
    regions = study_regions(tmp_path)
    (row,) = (line for line in lines_of(regions, "Training accuracy") if "`compare_x`" in line)
    kept = {seed: value for seed, value in train["pgt"].items() if seed != 3}
    gain = cell(kept, train["baseline"])
    assert f"| 7 | {gain} | better; diverged: 1 against 0 |" in row
    (row,) = (line for line in lines_of(regions, "The gap") if "`compare_x`" in line)
    assert "| 7 | +2.00 (" in row
    # The test accuracy counts it as guessing.
    (row,) = (line for line in lines_of(regions, "PGT raises accuracy without") if "`comp" in line)
    assert f"| 8 | {cell({**accuracy['pgt'], 3: 10.0}, accuracy['baseline'])} |" in row


def test_a_study_whose_baseline_has_pgt_is_no_evidence_for_it(tmp_path):
    changes = {"pgt": {"loss.alpha": 0.25}, "less": {"loss.alpha": 0.05}}
    write_study(tmp_path, "x", changes, {"pgt": spread(90), "less": spread(80)})
    hook = {"baseline": {}, "hook": {"loss.alpha": 0.25, "loss.form": "as_published"}}
    half = RECIPE.override({"train.precision": "float16"})
    write_study(tmp_path, "y", hook, {"baseline": spread(90), "hook": spread(80)}, recipe=half)
    (trial,) = trials_of(tmp_path)
    (contrast,) = contrasts_of(trial)
    assert (contrast.arm.name, contrast.arm.methods) == ("hook", None)
    regions = study_regions(tmp_path)
    assert not any("| `compare" in regions[f"claim-{claim.id}"]() for claim in CLAIMS)


def test_fewer_epochs_have_their_control(tmp_path):
    changes = {
        "baseline": {},
        "CE, 60%": {"train.epochs": 6},
        "PGT, 60%": {"loss.alpha": 0.3, "train.epochs": 6},
    }
    accuracy = {arm: spread(90) for arm in changes}
    write_study(tmp_path, "x", changes, accuracy)
    lines = lines_of(study_regions(tmp_path), "PGT reaches")
    rows = [line for line in lines if line.startswith("| `")]
    assert "PGT, 60% (alpha 0.3, 6 epochs)" in rows[0]
    assert "CE, 60% (6 epochs)" in rows[1]
    assert "PGT, 60% (alpha 0.3, 6 epochs) against CE, 60% (6 epochs)" in rows[2]
    assert len(rows) == 3
    assert "Measured: 1 equivalent." in lines[0]  # the control is not counted


@pytest.mark.parametrize(("decays", "words"), [((0.01, 0.01), "all"), ((0.01, 5e-4), "1")])
def test_gains_at_an_inflated_decay_are_marked(tmp_path, decays, words):
    changes = {"baseline": {}, "pgt": {"loss.alpha": 0.25}}
    for place, decay in enumerate(decays):
        recipe = RECIPE.override({"optimizer.weight_decay": decay, "seed": place})
        accuracy = {"baseline": spread(90 + place), "pgt": spread(92 + place)}
        write_study(tmp_path, f"x{place}", changes, accuracy, recipe=recipe)
    regions = study_regions(tmp_path)
    assert (
        f"Of 2 comparisons (0 of them points of grids over alpha), PGT was better in 2, {words} of "
        "them at a weight decay that was not tuned and is larger than the paper's. In 0 more"
    ) in regions["not-better"]()
    beyond = regions["beyond"]()
    assert "| arm | n | train | test | dead filters | decay / paper's | decay exponent |" in beyond
    rows = [line for line in beyond.splitlines() if line.startswith("| pgt (alpha 0.25) | 8 |")]
    assert "| 20x, inflated |" in rows[0]
    assert all(row.endswith("| better |") for row in rows)


def test_a_withdrawn_verdict_is_marked_wherever_it_is_listed(tmp_path):
    changes = {"baseline": {}, "pgt": {"loss.alpha": 0.25}}
    accuracy = {"baseline": spread(90), "pgt": spread(92)}
    write_study(tmp_path, "digits_tuned_lr", changes, accuracy)
    marked = "| better; withdrawn and not counted: the tuning chose a poor learning rate for the "
    assert marked + "baseline |" in study_regions(tmp_path)["beyond"]()


@pytest.mark.parametrize(("norm", "words"), [("none", "without"), ("batch", "with batch")])
def test_less_decay_is_the_control_of_pgt(tmp_path, norm, words):
    changes = {
        "baseline": {},
        "pgt": {"loss.alpha": 0.25, "optimizer.lr": 0.05},
        "less": {"optimizer.weight_decay": 1e-4},
        "both": {"loss.alpha": 0.25, "optimizer.weight_decay": 1e-4},
        "both, even less": {"loss.alpha": 0.25, "optimizer.weight_decay": 1e-5},
        "more": {"optimizer.weight_decay": 0.1},  # is no control
        "fast": {"optimizer.lr": 0.4},  # nor another baseline
    }
    means = {"baseline": 90, "pgt": 92, "less": 93, "both": 96, "both, even less": 10}
    means |= {"more": 50, "fast": 20}
    accuracy = {arm: spread(mean) for arm, mean in means.items()}
    write_study(tmp_path, "x", changes, accuracy, recipe=RECIPE.override({"model.norm": norm}))
    regions = study_regions(tmp_path)
    lines = lines_of(regions, f"PGT raises accuracy {words}")
    assert "Measured: 1 better." in lines[0]
    pgt, less, direct, both = (line for line in lines if line.startswith("| `"))
    kind = " without normalisation" if norm == "none" else ""
    on = f"resnet8 of width 8{kind} on digits, batch 16, 1,000 steps"
    assert f"| pgt (alpha 0.25) | {on} | 0.05; 0.1 | 1x | 8 | +2.00 (" in pgt
    assert f"| less (decay 0.0001) | {on} | 0.1; 0.1 | 0.2x; 1x | 8 | +3.00 (" in less
    assert "| pgt (alpha 0.25) against less (decay 0.0001) |" in direct
    loss = cell(accuracy["pgt"], accuracy["less"])
    assert f"| 0.05; 0.1 | 1x; 0.2x | 8 | {loss} | worse |" in direct
    assert "| both (alpha 0.25, decay 0.0001) against less (decay 0.0001) |" in both
    assert "| 0.1; 0.1 | 0.2x | 8 | +3.00 (" in both
    summary = "Of 1 comparisons (0 of them points of grids over alpha), PGT was better in 1."
    assert summary in regions["not-better"]()
    simpler = regions["simpler"]()
    assert f"| pgt (alpha 0.25) against less (decay 0.0001) | 1x; 0.2x | 8 | {loss} |" in simpler
    assert "both (alpha 0.25" not in simpler + regions["not-better"]()


def test_batch_and_depth_without_normalisation_have_their_claims(tmp_path):
    changes = {
        "baseline": {},
        "large": {"train.batch_size": 64, "optimizer.lr": 0.2},
        "deep": {"model.name": "resnet50"},
        "small": {"train.batch_size": 8},
        "shallow": {"model.name": "resnet18"},
    }
    means = {"baseline": 90, "large": 88, "deep": 10, "small": 95, "shallow": 80}
    accuracy = {arm: spread(mean) for arm, mean in means.items()}
    recipe = RECIPE.override({"model.name": "resnet34"})
    write_study(tmp_path, "x", changes, accuracy, recipe=recipe)
    regions = study_regions(tmp_path)
    lines = lines_of(regions, "Without normalisation large")
    assert "Measured: 1 worse." in lines[0]
    (row,) = (line for line in lines if line.startswith("| `"))
    assert "| large (batch 64)" in row
    assert "; the other arm: resnet34 of width 8 without normalisation on digits, batch 16," in row
    assert "| 0.2; 0.1 | 1x | 8 | -2.00 (" in row
    (row,) = (line for line in lines_of(regions, "depth") if line.startswith("| `"))
    assert "| deep (resnet50) | resnet50 of width 8 without" in row
    assert row.endswith("| 0.1; 0.1 | 1x | 8 | 10.00 (9.96 to 10.04) | 90.00 | all failed |")


@pytest.mark.parametrize(
    ("accuracy", "outcome", "cells"),
    [
        (spread(20), "all failed", ["1", "", "", "", ""]),
        (spread(80), "none failed", ["", "", "1", "", ""]),  # worse, but trained
        ({**spread(80), 3: 0.0}, "1 failed", ["", "", "", "1", ""]),
    ],
)
def test_a_network_that_is_only_worse_can_be_trained(tmp_path, accuracy, outcome, cells):
    changes = {"baseline": {}, "deep": {"model.name": "resnet50"}}
    write_study(tmp_path, "x", changes, {"baseline": spread(90), "deep": accuracy})
    regions = study_regions(tmp_path)
    assert glance(regions, "Networks deeper")[1:] == cells
    (row,) = (line for line in lines_of(regions, "depth") if line.startswith("| `"))
    assert row.endswith(f"| {outcome} |")


def test_dead_filters_and_controls_at_a_glance(tmp_path):
    changes = {"baseline": {}, "pgt": {"loss.alpha": 0.25}, "agc": {"clip.agc": 1.0}}
    less = {"optimizer.weight_decay": 0.01}
    changes |= {"less": less, "both": {"loss.alpha": 0.25, **less}}
    means = {"baseline": 90, "pgt": 91, "agc": 90, "less": 92, "both": 93}
    accuracy = {arm: spread(mean) for arm, mean in means.items()}
    dead = {arm: {seed: 20.0 + seed % 2 for seed in range(8)} for arm in changes}
    dead["pgt"] = {seed: 40.0 + seed for seed in range(8)}
    recipe = RECIPE.override({"optimizer.weight_decay": 0.02})
    write_study(tmp_path, "x", changes, accuracy, dead, diverged={("less", 1)}, recipe=recipe)
    regions = study_regions(tmp_path)
    assert glance(regions, "With PGT fewer")[1:] == ["", "", "1", "", ""]
    assert glance(regions, "With AGC fewer")[1:] == ["", "1", "", "", ""]
    assert glance(regions, "With AGC + PGT fewer")[1:] == ["", "", "", "not measured", ""]
    control = glance(regions, "PGT raises accuracy without")[-1]
    one = "(1 of them with runs that diverged)"
    assert control == f"PGT alone: 1 not settled {one}; PGT with it: 1 not settled {one}"


@pytest.mark.parametrize(
    ("count", "decay", "verdict"),
    [
        (3, 0.02, "fewer"),
        (40, 0.02, "more"),
        (20, 0.02, "not settled"),
        (3, 0.005, "too little decay"),
    ],
)
def test_dead_filters_are_told_apart_by_the_same_tests(tmp_path, count, decay, verdict):
    changes = {"baseline": {}, "gc": {"clip.norm": 1.0}, "pgt": {"loss.alpha": 0.25}}
    accuracy = {arm: spread(90) for arm in changes}
    dead = {"baseline": {s: 20 + s for s in range(8)}, "gc": dict.fromkeys(range(8), 0)}
    dead["pgt"] = {s: count + 7 - s for s in range(8)}
    recipe = RECIPE.override({"optimizer.weight_decay": decay})
    write_study(tmp_path, "x", changes, accuracy, dead, recipe=recipe)
    (trial,) = trials_of(tmp_path)
    # 1,000 steps at a mean rate a little under 0.05, momentum 0.9
    assert trial.arms[0].exponent == pytest.approx(1000 * 0.05 * decay / 0.1, rel=0.3)
    lines = lines_of(study_regions(tmp_path), "dead-filters")
    (row,) = (line for line in lines if line.startswith("| `"))  # gc is none of these
    assert row.endswith(f"| 8 | {count + 3.5:.1f} | 23.5 | {verdict} |")


@pytest.fixture(scope="module")
def unmeasured(tmp_path_factory):
    """The regions without any results."""
    return study_regions(tmp_path_factory.mktemp("none"))


@pytest.mark.parametrize(
    ("claim", "printed"),
    [
        ("PGT raises accuracy with batch", "+0.09 (T1.7) to +0.734 (T1.1)"),
        ("PGT raises accuracy without", "+0.682 (T2.2) to +1.018 (T2.8)"),
        ("AGC raises", "+0.502 (T2.7)"),
        ("AGC with PGT raises", "+2.06 (T2.10)"),
        ("GC raises", "+0.268 (T2.6)"),
        ("GC with PGT", "+0.292 (T2.9)"),
        ("Label smoothing raises", "+0.138 (T3.4)"),
        ("Label smoothing improves PGT", "+0.082 (T3.6)"),
        ("Label smoothing hurts PGT", "-0.826 (T3.8)"),
        ("PGT does better than AGC", "+0.516 (T2.8)"),
        ("PGT does better than GC", "+0.75 (T2.8)"),
        ("AGC with PGT does better", "+1.042 (T2.10)"),
        ("Training accuracy", "+0.15 (T1.7) to +1.48 (T2.4)"),
        ("The gap", "-0.332 (T2.2) to +0.796 (T2.4)"),
        ("PGT reaches in 60%", "+0 (E60)"),
        (
            "Without normalisation large batches",
            f"{lost('T2.1')} at batch 1024 (T2.1) and {lost('T2.3')} at 512 (T2.3), against 256 "
            "(T2.5)",
        ),
    ],
)
def test_what_was_published_is_the_paper_s(unmeasured, claim, printed):
    assert lines_of(unmeasured, claim) == [f"Published: {printed}. Not measured here."]


def test_recovery_and_logits_are_those_of_the_csv_files():
    regions = study_regions(RESULTS)
    rows = []
    for path in (RESULTS / "paper").glob("*.json"):
        with open(path.with_name(path.stem + ".csv")) as file:
            rows += csv.DictReader(file)
    lines = lines_of(regions, "recovery")
    followed = [row for row in rows if row["died"]]
    assert {row["arm"] for row in followed} >= {"baseline", "PGT", "AGC + PGT"}
    for arm in {row["arm"] for row in followed}:
        own = [row for row in followed if row["arm"] == arm]
        died, back = (sum(float(row[key]) for row in own) for key in ("died", "came_back"))
        line = f"| {arm} | {len(own)} | {died:,.0f} | {back:,.0f} | {100 * back / died:.1f} |"
        assert line in lines
    with open(RESULTS / "paper" / "G18-digits-resnet8.csv") as file:
        grid = list(csv.DictReader(file))
    one, least = (
        np.mean([float(row["logit_norm"]) for row in grid if row["arm"] == arm])
        for arm in ("alpha=1", "alpha=0.05")
    )
    line = next(line for line in lines_of(regions, "logits") if "G18-digits-resnet8" in line)
    assert f"| {one:.1f} to {least:.1f} at 0.05 | {least / one:.1f} (20) |" in line
    losses = {}
    for row in grid:
        losses.setdefault(row["arm"].removeprefix("alpha="), []).append(float(row["nll"]))
    means = {alpha: np.mean(values) for alpha, values in losses.items()}
    lowest = min(means, key=lambda alpha: means[alpha])
    assert f"| {means[lowest]:.3f} at {lowest} |" in line


def test_layers_and_features_that_died_are_those_of_the_recordings():
    lines = lines_of(study_regions(RESULTS), "layers")
    files = sorted((RESULTS / "paper").glob("*.npz"))
    assert sum(line.startswith("| `") for line in lines) == len(files) > 0
    for path in files:
        study, _, arm = path.stem.partition("--")
        with np.load(path) as file:
            layers = [key for key in file.files if re.fullmatch(r"layer\d+", key)]
            last = {key: file[key][-1].astype(float) for key in layers}
            start = {key: file[key][0].astype(float) for key in last}
            features = int((file["feature"][-1] == 0).sum())
        whole = [key[5:] for key in last if (last[key] < 0.01 * start[key]).all()]
        whose = re.compile(rf"\| `{study}` \| T2\.\d+ {re.escape(arm.replace('-', ' + '))}, seed 0")
        (row,) = filter(whose.match, lines)
        cells = row.strip("| ").split(" | ")
        assert cells[3] == (", ".join(whole) or "none")
        assert cells[5] == f"{features} of 64"


def test_the_published_numbers_in_the_text_are_the_paper_s():
    """The one explanation of a claim that has numbers of its own."""
    page = (ROOT / "docs" / "reproduction.md").read_text()
    paper = load_paper()
    names = ("loss-baseline", "loss-pgt", "regression-slope")
    loss, with_pgt, slope = (paper.number(name) for name in names)
    assert f"the loss of ResNet-50 is {loss} without PGT and {with_pgt} at alpha 0.05" in page
    assert f"along a line of slope {slope}." in page


def test_the_runs_behind_the_page_are_counted(tmp_path):
    changes = {"baseline": {}, "pgt": {"loss.alpha": 0.25}}
    accuracy = {"baseline": spread(90), "pgt": spread(92)}
    limited = RECIPE.override({"data.limit": 6000})
    write_study(tmp_path, "one", changes, accuracy, recipe=limited)
    regions = study_regions(tmp_path)
    # 16 x 3.6 seconds
    assert regions["runs"]() == "The 16 runs behind this page took 0.0 core-hours."
    on = "resnet8 of width 8 without normalisation on 6,000 images of digits, batch 16"
    assert on in regions["beyond"]()


def test_withdrawn_studies_are_listed_and_not_counted(monkeypatch):
    def lines_and_count():
        lines = lines_of(study_regions(RESULTS), "PGT raises accuracy without")
        (counts,) = [line for line in lines if "Measured: " in line]
        return lines, sum(map(int, re.findall(r"(\d+) [a-z]", counts.partition("Measured")[2])))

    lines, count = lines_and_count()
    named = [line for line in lines if "; withdrawn and not counted: " in line]
    assert sorted(line.split("`")[1] for line in named) == sorted(WITHDRAWN)
    monkeypatch.setattr("reproduction.studies.WITHDRAWN", {})
    assert lines_and_count()[1] == count + len(WITHDRAWN)
