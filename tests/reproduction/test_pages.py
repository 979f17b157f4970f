"""The generated regions of README.md and docs/, and the pages as they are."""

import csv
import doctest
import importlib
import json
import pkgutil
import re
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from scipy.stats import ttest_ind

import reproduction
from powergrad.lab.paper.evidence import Evidence
from powergrad.lab.paper.rows import Use, load_paper
from reproduction.marks import fill, region_names
from reproduction.pages import all_regions, generated_pages, study_regions

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
PAPER = load_paper()


@pytest.fixture(scope="module")
def regions():
    return all_regions()


# Pages --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", generated_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_what_the_results_make_of_it(regions, page):
    text = page.read_text("utf-8")
    assert fill(text, regions) == text, "run `make pages` and look at what changed"


def test_every_region_is_on_a_page(regions):
    named = [name for page in generated_pages() for name in region_names(page.read_text("utf-8"))]
    assert set(named) == set(regions)


def test_a_page_has_the_experiments_under_their_own_headings():
    page = (ROOT / "docs" / "reproduction.md").read_text()
    for experiment in PAPER.experiments:
        heading = page.partition(f"<!-- table {experiment.id} -->")[0].strip().splitlines()[-1]
        assert heading.startswith(f"### {experiment.rows[0].id}")
        assert heading.endswith(f": {experiment.title}")


MODULES = [module.name for module in pkgutil.iter_modules(reproduction.__path__)]


@pytest.mark.parametrize("name", [name for name in MODULES if name != "__main__"])
def test_examples_in_docstrings_run(name):
    assert doctest.testmod(importlib.import_module(f"reproduction.{name}")).failed == 0


# Marks --------------------------------------------------------------------------------------------

PAGE = "Before.\n\n<!-- table a -->\n\n{}\n\n<!-- end table a -->\n\nAfter.\n"


def test_regions_are_filled_and_the_rest_stays():
    page = PAGE.format("old") + PAGE.replace("table a", "table b.2-c").format("| x |\n|---|")
    regions = {"a": lambda: "new", "b.2-c": lambda: "| y |"}
    assert region_names(page) == ["a", "b.2-c"]
    filled = fill(page, regions)
    assert filled == PAGE.format("new") + PAGE.replace("table a", "table b.2-c").format("| y |")
    assert fill(filled, regions) == filled
    assert fill(PAGE.replace("\n{}\n\n", "").format(), regions) == PAGE.format("new")


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (PAGE.replace("table a", "table b"), r"but got \['b'\]"),
        (PAGE.replace("end table a", "end table b"), "to have its partner"),
        (PAGE.replace("<!-- end table a -->", ""), "to have its partner"),
        (PAGE.replace("<!-- table a -->", ""), "to have its partner"),
    ],
)
def test_a_mark_that_is_wrong_is_refused(page, message):
    with pytest.raises(ValueError, match=message):
        fill(page, {"a": lambda: "new"})


# Regions ------------------------------------------------------------------------------------------


def test_an_experiment_has_the_measured_numbers(regions):
    (study,) = Evidence(RESULTS).of(Use("T2-1024"))
    with open(RESULTS / "paper" / f"{study.name}.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["arm"] == "PGT"]
    train, test = (
        sum(float(row[key]) for row in rows) / len(rows)
        for key in ("train_accuracy", "test_accuracy")
    )
    difference = study.comparisons["PGT"].difference
    # Three seeds are too few for an interval, let alone a verdict.
    assert (
        f"| T2.2 | PGT (alpha 0.92) | 66.62 | 65.498 | +0.682 | 3 | {train:.2f} | {test:.2f} "
        f"| {difference:+.2f} |  | too few seeds |"
    ) in regions["T2-1024"]()
    assert f"| {difference:+.2f} | too few seeds |" in regions["not-better"]()


def test_a_study_at_full_scale_of_some_arms_says_so(tmp_path):
    shutil.copytree(RESULTS / "paper", tmp_path / "paper")
    stem = tmp_path / "paper" / "T2-256-digits"
    values = json.loads(stem.with_suffix(".json").read_text())
    stem.with_suffix(".json").write_text(json.dumps({**values, "scale": "full"}))
    lines = stem.with_suffix(".csv").read_text().splitlines(keepends=True)
    stem.with_suffix(".csv").write_text("".join(line for line in lines if "GC" not in line))
    region = study_regions(tmp_path)["T2-256"]()
    table = region.partition("**Measured at full scale (digits)**")[2]
    assert "| T2.6 | GC | 69.04 | 67.064 | +0.268 |  |  |  |  |  | not measured |" in table
    assert "| T2.8 | PGT (alpha 0.25) | 69.97 | 67.814 | +1.018 | 2 | 100.00 |" in table


def test_the_filters_of_every_followed_run_are_counted(regions):
    table = regions["zeroing-out"]()
    for path in (RESULTS / "paper").glob("*.json"):
        with open(path.with_suffix(".csv")) as file:
            rows = list(csv.DictReader(file))
        for arm in {row["arm"] for row in rows if row["filters"]}:
            died = [float(row["died"]) for row in rows if row["arm"] == arm]
            (line,) = re.findall(rf"\| {path.stem} \| \S+ \| {re.escape(arm)} \| .*", table)
            counts = f"{sum(died) / len(died):.1f} ({min(died):.0f} to {max(died):.0f})"
            assert line.strip("| ").split(" | ")[6] == counts


def test_the_page_has_the_other_studies_too(regions):
    beyond, not_better = regions["beyond"](), regions["not-better"]()
    values = json.loads((RESULTS / "compare_digits_20_epochs.json").read_text())
    assert "### `compare_digits_20_epochs`: compare" in beyond
    assert f"- Command: `{values['environment']['command']}`" in beyond
    arms = {arm: [] for arm in values["arms"]}
    for row in values["rows"]:
        arms[row["arm"]].append(row["test_accuracy"])
    confidence = 0.95 ** (1 / (len(arms) - 1))  # Sidak
    for arm in values["arms"][1:]:
        test: Any = ttest_ind(arms[arm], arms["baseline"], equal_var=False)
        low, high = test.confidence_interval(confidence)
        gain = fmean(arms[arm]) - fmean(arms["baseline"])
        p = 1 - (1 - test.pvalue) ** (len(arms) - 1)
        verdict = "better" if low > 0 else "worse" if high < 0 else None
        verdict = verdict or ("equivalent" if max(-low, high) < 0.5 else "not settled")
        words = f"{gain + 0.0:+.2f} ({low:+.2f} to {high:+.2f})"
        assert f"{words} | {p:.3f} | {verdict} |" in beyond
        if "pgt" in arm:
            assert (f"{words} | {verdict} |" in not_better) == (verdict != "better")


def test_a_study_with_looks_has_the_numbers_that_it_saved(regions):
    values = json.loads((RESULTS / "compare_digits.json").read_text())
    section = regions["beyond"]().partition("### `compare_digits`")[2].partition("###")[0]
    for comparison in values["comparisons"]:
        low, high = comparison["interval"]
        words = f"{comparison['difference']:+.2f} ({low:+.2f} to {high:+.2f})"
        assert f"{words} | {comparison['p']:.3f} | {comparison['verdict']} |" in section


def test_a_replica_with_too_little_decay_is_marked(regions):
    for path in (RESULTS / "paper").glob("*.json"):
        values = json.loads(path.read_text())
        least = min(values["exponents"].values())
        lines = regions[values["experiment"]]().splitlines()
        (line,) = (line for line in lines if f"{path.stem}.csv`, torch" in line)
        assert f"{least:.1f} or more" in line
        assert ("(under 7, so it says nothing" in line) == (least < 7), path.stem


def test_filters_of_diverged_runs_are_not_counted(regions):
    values = json.loads((RESULTS / "decompose_digits_tuned_lr.json").read_text())
    rows = [row for row in values["rows"] if row["arm"] == "two-group CE"]
    finished = [row["dead_units"] for row in rows if not row["diverged"]]
    assert len(finished) < len(rows)
    section = regions["beyond"]().partition("### `decompose_digits_tuned_lr`")[2]
    (row,) = (line for line in section.splitlines() if line.startswith("| two-group CE |"))
    assert row.split(" | ")[4] == f"{sum(finished) / len(finished):.1f}"


def test_without_results_the_regions_say_so(tmp_path):
    regions = study_regions(tmp_path)
    experiments = [regions[experiment.id]() for experiment in PAPER.experiments]
    assert all("Not measured here." in text for text in experiments)
    assert regions["not-better"]() == "Nothing was measured yet."
    with open(ROOT / "tests" / "lab" / "paper_tables.csv") as file:
        for printed in csv.DictReader(file):
            assert f"| {printed['id']} |" in "".join(experiments)
    for figure in PAPER.figures:
        assert f"`{figure.name}`" in regions["figures"]()
