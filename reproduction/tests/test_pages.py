"""The generated regions of README.md and docs/, and the pages as they are."""

import doctest
import importlib
import json
import pkgutil
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from scipy.stats import linregress, ttest_ind

import reproduction
from reproduction.drawings import plot
from reproduction.evidence import RESULTS, Evidence, csv_rows
from reproduction.marks import fill, region_names
from reproduction.pages import all_regions, generated_pages
from reproduction.published import load_paper

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def regions():
    return all_regions()


@pytest.fixture(scope="module")
def replicas():
    """The rows of every file in results/paper, by its name."""
    paths = (RESULTS / "paper").glob("*.json")
    return {path.stem: csv_rows(path.with_name(f"{path.stem}.csv")) for path in paths}


def test_pages_are_what_the_results_make_of_them(regions):
    named = set()
    for page in generated_pages():
        text = page.read_text("utf-8")
        named |= set(region_names(text))
        assert fill(text, regions) == text, f"run `make pages` and look at {page.name}"
    assert named == set(regions)


MODULES = [module.name for module in pkgutil.iter_modules(reproduction.__path__)]


@pytest.mark.parametrize("name", [name for name in MODULES if name not in ("tests", "decisive")])
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
    "page",
    [
        PAGE.replace("table a", "table b"),
        PAGE.replace("end table a", "end table b"),
        PAGE.replace("<!-- end table a -->", ""),
        PAGE.replace("<!-- table a -->", ""),
    ],
)
def test_a_mark_that_is_wrong_is_refused(page):
    with pytest.raises(ValueError, match="Expected"):
        fill(page, {"a": lambda: "new"})


# The tables of docs/reproduction.md, against the files --------------------------------------------


def interval(arm, baseline, comparisons):
    """Sidak's interval of the difference of two samples, by scipy."""
    test: Any = ttest_ind(arm, baseline, equal_var=False)
    return test.confidence_interval(0.95 ** (1 / comparisons))


def test_the_tables_have_every_replica_with_its_numbers(regions, replicas):
    tables, last = {}, []
    for region in ("table-1", "table-2", "table-3", "epochs"):
        for line in regions[region]().splitlines()[2:]:
            study, *cells = (cell.strip() for cell in line[1:-1].split(" | "))
            if study:
                last = tables[study.split("`")[1]] = [study]
            last.append(cells)
    assert tables.keys() == {name for name in replicas if not name.startswith("G")}
    for name, (study, *lines) in tables.items():
        about = json.loads((RESULTS / "paper" / f"{name}.json").read_text())
        rows = load_paper().find(about["experiment"]).rows
        printed = {row.arm: row.published["test"] for row in rows}
        arms = {}
        for row in replicas[name]:
            arms.setdefault(row["arm"], []).append(float(row["test_accuracy"]))
        (baseline, first), *others = arms.items()
        assert f"; baseline {fmean(first):.2f}%" in study
        for (arm, values), cells in zip(others, lines, strict=True):
            assert cells[0].split(" (")[0].endswith(arm)
            assert cells[1:3] == [f"{printed[arm] - printed[baseline]:+.3f}", str(len(values))]
            found = [float(number) for number in re.findall(r"[+-][\d.]+", cells[3])]
            wanted = [fmean(values) - fmean(first)]
            if len(values) >= 6:
                wanted += interval(values, first, len(others))
            assert found == pytest.approx(wanted, abs=0.0051), (name, arm)


def test_the_other_studies_are_listed_and_with_several_looks_have_the_saved_numbers(regions):
    beyond, thresholds = regions["beyond"](), regions["thresholds"]()
    files = [*RESULTS.glob("compare_*.json"), *RESULTS.glob("decompose_*.json")]
    listed = {line.split("`")[1] for line in beyond.splitlines() if line.startswith("| `")}
    assert listed == {path.stem for path in files}
    for name, table in {"compare_digits": beyond, "clipping_thresholds": thresholds}.items():
        for comparison in json.loads((RESULTS / f"{name}.json").read_text())["comparisons"]:
            low, high = comparison["interval"]
            words = f"{comparison['difference']:+.2f} ({low:+.2f} to {high:+.2f})"
            assert f"| {words} | {comparison['verdict']} |" in table


def test_filters_that_died_and_came_back_are_those_of_the_rows(regions, replicas):
    followed = [row for rows in replicas.values() for row in rows if row["died"]]
    for arm in {row["arm"] for row in followed}:
        own = [row for row in followed if row["arm"] == arm]
        died, back = (sum(float(row[key]) for row in own) for key in ("died", "came_back"))
        line = f"| {arm} | {len(own)} | {died:,.0f} | {back:,.0f} | {100 * back / died:.1f} |"
        assert line in regions["recovery"]()
    rows = [row for row in replicas["T2-256-fashion-mnist"] if row["arm"] in ("PGT", "baseline")]
    dead = {
        arm: fmean(float(row["dead_units"]) for row in rows if row["arm"] == arm)
        for arm in ("PGT", "baseline")
    }
    assert f"| {dead['PGT']:.0f} ({dead['baseline']:.0f}) |" in regions["table-2"]()


def test_layers_and_features_that_died_are_those_of_the_recordings(regions):
    lines = regions["layers"]().splitlines()[2:]
    files = sorted((RESULTS / "paper").glob("*.npz"))
    assert len(lines) == len(files) > 0
    for path in files:
        study, _, arm = path.stem.partition("--")
        with np.load(path) as file:
            ends = {key: file[key][[0, -1]].astype(float) for key in file.files if key != "layers"}
        whole = [k[5:] for k, v in ends.items() if k[:5] == "layer" and (v[1] < 0.01 * v[0]).all()]
        dead = int((ends["feature"][1] == 0).sum())
        words = rf"\| `{study}` \| T2\.\d+ {re.escape(arm.replace('-', ' + '))} \| "
        words += rf"{', '.join(whole) or 'none'} \| {dead} of 64 \|"
        assert [line for line in lines if re.fullmatch(words, line)], words


def test_the_grids_are_those_of_the_rows(regions, replicas):
    text = regions["grids"]()
    rows = replicas["G18-digits-resnet8"]
    by_alpha = {}
    for row in rows:
        numbers = [float(row[key]) for key in ("test_accuracy", "logit_norm", "nll")]
        by_alpha.setdefault(row["arm"].removeprefix("alpha="), []).append(numbers)
    means = {alpha: np.mean(values, 0) for alpha, values in by_alpha.items()}
    best = max(means, key=lambda alpha: means[alpha][0])
    lowest = min(means, key=lambda alpha: means[alpha][2])
    one, least = means["1"], means["0.05"]
    norms, losses = ([float(row[key]) for row in rows] for key in ("logit_norm", "nll"))
    fit: Any = linregress(norms, losses)
    assert (
        f"| {one[0]:.2f}; {means[best][0]:.2f} at {best} | {least[1] / one[1]:.1f} (20) | "
        f"{one[2]:.3f}; {least[2]:.3f}; {means[lowest][2]:.3f} at {lowest} | "
        f"{fit.slope:.5f} (r = {fit.rvalue:.2f}) |"
    ) in text
    page = (ROOT / "docs" / "reproduction.md").read_text("utf-8")
    paper = load_paper().numbers
    loss, with_pgt = paper["loss-baseline"], paper["loss-pgt"]
    assert f"of ResNet-50 is {loss} without PGT and {with_pgt} at alpha 0.05" in page
    assert f"along a line of slope {paper['regression-slope']}." in page


def test_the_figure_of_fewer_epochs_shows_every_study_with_its_control():
    def mean(study, arm):
        rows = [row for row in csv_rows(RESULTS / f"{study}.csv") if row["arm"] == arm]
        return fmean(float(row["test_accuracy"]) for row in rows)

    (described,) = (f for f in load_paper().figures if f.id == "F4")
    figure = plot(described, Evidence(RESULTS))
    shown = [bars.lines[0].get_xdata()[0] for bars in figure.axes[2].containers]
    plt.close(figure)
    studies = ("compare_e60_control", "compare_e60_fashion_mnist")
    wanted = [
        mean("paper/E60-digits-resnet8", "PGT") - mean("paper/E60-digits-resnet8", "baseline")
    ]
    arms = ("CE, 60%", "PGT, 60%")
    wanted += [mean(study, arm) - mean(study, "baseline") for study in studies for arm in arms]
    assert shown == pytest.approx(wanted)


def test_what_the_page_says_of_all_studies():
    """Widths and weight decays, in the words around the tables."""
    decays, widths = {}, {}
    paths = [*(RESULTS / "paper").glob("*.json"), *RESULTS.glob("compare_*.json")]
    for path in [*paths, *RESULTS.glob("decompose_*.json")]:
        values = json.loads(path.read_text())
        recipe = values["recipe"] if "recipe" in values else values["study"]["program"]["base"]
        widths[path.stem] = recipe["model"]["width"]
        decays[path.stem] = recipe["optimizer"]["weight_decay"] / 5e-4
    page = (ROOT / "docs" / "reproduction.md").read_text("utf-8")
    assert widths.pop("compare_digits") == 16
    assert {*widths.values()} == {8}
    tuned = json.loads((RESULTS / "compare_digits.json").read_text())["study"]["arms"]
    assert all("optimizer.weight_decay" in changes for changes in tuned.values())
    del decays["compare_digits"]
    assert (
        "All networks have width 8 (the paper's 64; 16 on CIFAR-10 and in `compare_digits`)" in page
    )
    low, high = min(decays.values()), max(decays.values())
    assert f"they are {low:.2g} to {high:.2g} times the paper's 5e-4" in page
