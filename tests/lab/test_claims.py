"""What the page says of each claim, against the CSV files and the paper's own tables."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from powergrad.lab import stats
from powergrad.lab.paper.claims import claim_by_claim
from powergrad.lab.paper.evidence import Evidence
from powergrad.lab.paper.studies import find_all, methods_of, read_studies

RESULTS = Path(__file__).parents[2] / "results"
RECIPE = {
    "model": {"name": "resnet8", "width": 8, "norm": "none"},
    "data": {"name": "digits"},
    "train": {"batch_size": 16},
}


def section(lines, start):
    """The lines of the section whose title begins so."""
    found, inside = [], False
    for line in lines:
        if line.startswith("### "):
            inside = line.startswith(f"### {start}")
        if inside:
            found.append(line)
    assert found, f"no section {start!r}"
    return found


def write_study(folder, name, changes, baseline, accuracy, dead=None, tuning=None):
    """A ``study.json`` as ``powergrad compare`` leaves it, of made-up runs."""
    compared = stats.compare(accuracy, baseline, margin=0.5)
    rows = [
        {"arm": arm, "seed": seed, "steps": 100, "test_accuracy": value}
        | ({"dead_units": dead[arm][seed]} if dead else {})
        for arm, values in accuracy.items()
        for seed, value in values.items()
    ]
    about = {
        "kind": "compare-x",
        "baseline": baseline,
        "arms": list(accuracy),
        "changes": changes,
        "comparisons": [each.to_dict() for each in compared],
        "rows": rows,
        "recipe": RECIPE,
    }
    if tuning:
        about["tuning"] = {"key": "optimizer.lr", "arms": tuning}
    (folder / f"compare_{name}.json").write_text(json.dumps(about))


def spread(mean, n=8):
    """`n` seeds with the given mean and a small spread."""
    return {seed: mean + 0.01 * (seed - (n - 1) / 2) for seed in range(n)}


def test_methods_are_told_by_the_keys_that_an_arm_changes():
    assert methods_of({}) == methods_of({"optimizer.lr": 0.1}) == frozenset()
    assert methods_of({"loss.alpha": 0.3, "loss.label_smoothing": 0.1}) == {"PGT", "LS"}
    assert methods_of({"loss.alpha": 0.3, "loss.form": "as_published"}) is None
    assert methods_of({"optimizer.head.lr": 0.25}) is None


def test_a_claim_counts_verdicts_and_says_how_rates_were_chosen(tmp_path):
    changes = {
        "baseline": {},
        "pgt": {"loss.alpha": 0.25},
        "agc+pgt": {"loss.alpha": 0.25, "clip.agc": 1},
    }
    accuracy = {"baseline": spread(90), "pgt": spread(92), "agc+pgt": spread(87)}
    write_study(tmp_path, "one", changes, "baseline", accuracy)
    tuning = {arm: {"chosen": 0.1, "at_edge": False} for arm in changes}
    same = {**accuracy, "pgt": {7 - seed: value for seed, value in spread(90).items()}}
    write_study(tmp_path, "two", changes, "baseline", same, tuning=tuning)
    lines = list(claim_by_claim(Evidence(tmp_path), read_studies(tmp_path)))
    told = section(lines, "PGT raises accuracy without normalisation")
    assert told[2].endswith("Measured: 1 better, 1 equivalent.")
    on = "resnet8 of width 8 without normalisation on digits, batch 16, 100 steps"
    first = f"| `compare_one` | pgt | {on} | one for all | 8 | +2.00 (+2.00 to +2.00) | better |"
    assert first in told
    assert any(line.startswith("| `compare_two` | pgt |") and "| tuned |" in line for line in told)
    together = section(lines, "AGC and PGT together")
    assert together[2] == "Published: +2.060 (T2.10). Measured: 2 worse."
    assert section(lines, "AGC raises it too")[2].endswith("Not measured here.")


def test_a_study_whose_baseline_has_pgt_is_no_evidence_for_it(tmp_path):
    changes = {"pgt": {"loss.alpha": 0.25}, "less": {"loss.alpha": 0.05}}
    write_study(tmp_path, "x", changes, "pgt", {"pgt": spread(90), "less": spread(80)})
    assert find_all(Evidence(tmp_path), read_studies(tmp_path)) == []


@pytest.mark.parametrize(("count", "told"), [(3, "fewer"), (40, "more"), (20, "not told apart")])
def test_dead_filters_are_told_apart_by_the_same_tests(tmp_path, count, told):
    changes = {"baseline": {}, "gc": {"clip.norm": 1}, "pgt": {"loss.alpha": 0.25}}
    accuracy = {arm: spread(90) for arm in changes}
    dead = {"baseline": {s: 20 + s for s in range(8)}, "gc": dict.fromkeys(range(8), 0)}
    dead["pgt"] = {s: count + 7 - s for s in range(8)}
    write_study(tmp_path, "x", changes, "baseline", accuracy, dead)
    lines = section(claim_by_claim(Evidence(tmp_path), read_studies(tmp_path)), "Fewer filters")
    (row,) = (line for line in lines if line.startswith("| `"))  # gc is none of PGT's
    assert row.endswith(f"| 8 | {count + 3.5:.1f} | 23.5 | {told} |")


@pytest.mark.parametrize(
    ("claim", "printed"),
    [
        ("PGT raises accuracy with batch", "+0.090 (T1.7) to +0.734 (T1.1)"),
        ("PGT raises accuracy without", "+0.682 (T2.2) to +1.018 (T2.8)"),
        ("AGC raises", "+0.502 (T2.7)"),
        ("AGC and PGT", "+2.060 (T2.10)"),
        ("Clipping by norm", "+0.268 (T2.6)"),
        ("GC and PGT", "+0.292 (T2.9)"),
        ("Label smoothing raises", "+0.138 (T3.4)"),
        ("Label smoothing and PGT", "-0.170 (T3.8) to +0.408 (T3.6)"),
        ("PGT reaches in 60%", "+0.000 (E60)"),
    ],
)
def test_what_was_published_is_the_paper_s(tmp_path, claim, printed):
    lines = list(claim_by_claim(Evidence(tmp_path), []))
    assert section(lines, claim)[2] == f"Published: {printed}. Not measured here."


def test_recovery_and_logits_are_those_of_the_csv_files():
    lines = list(claim_by_claim(Evidence(RESULTS), read_studies(RESULTS)))
    rows = []
    for path in (RESULTS / "paper").glob("*.json"):
        with open(path.with_name(path.stem + ".csv")) as file:
            rows += csv.DictReader(file)
    followed = [row for row in rows if row["died"]]
    died, back = (sum(float(row[key]) for row in followed) for key in ("died", "came_back"))
    told = section(lines, "A filter that was zeroed out")[2]
    assert f"of {died:,.0f} filters that died at some time in {len(followed)} runs" in told
    assert f"{back:,.0f} came back" in told
    with open(RESULTS / "paper" / "G18-digits-resnet8.csv") as file:
        grid = list(csv.DictReader(file))
    one, least = (
        np.mean([float(row["logit_norm"]) for row in grid if row["arm"] == arm])
        for arm in ("alpha=1", "alpha=0.05")
    )
    line = next(line for line in section(lines, "Logits grow") if "G18-digits-resnet8" in line)
    assert f"| 20 | {one:.1f} to {least:.1f} | {least / one:.1f} |" in line
