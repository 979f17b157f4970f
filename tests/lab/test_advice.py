"""What a verdict advises to do next, and the glossary."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powergrad.lab import glossary
from powergrad.lab.glossary import TERMS
from powergrad.lab.jobs import RecipeProgram
from powergrad.lab.stats import Design, parse_runs
from powergrad.lab.study import METRICS, Results, RunRow, Study, StudyKind, Tuning
from powergrad.lab.study.records import Choice, Trial
from powergrad.lab.trainer.recipe import load_recipe

ROOT = Path(__file__).parents[2]
PGT = {"loss.alpha": 0.25}


def results_of(
    baseline: list[float], pgt: list[float], *, seeds: str = "8", tuned: tuple[str, ...] = (),
    arms: dict[str, Any] | None = None, tuning: Tuning | None = None,
) -> Results:  # fmt: skip
    program = RecipeProgram(load_recipe("digits"))
    arms = {"baseline": {}, "pgt": PGT, **(arms or {})}
    design = Design(parse_runs(seeds))
    study = Study(StudyKind.COMPARE, program, arms, design, tuned=tuned)
    rows = [
        RunRow(arm, seed, {"test_accuracy": value})
        for arm, values in (("baseline", baseline), ("pgt", pgt))
        for seed, value in enumerate(values)
    ]
    return Results(METRICS["test_accuracy"], 0.5, "baseline", rows, study, tuning=tuning)


def noisy(mean: float, sd: float, n: int = 8, *, step: float = 0.0) -> list[float]:
    """Values with exactly this mean and standard deviation, or near it in steps."""
    shape = np.linspace(-1, 1, n)
    values = mean + sd * shape / shape.std(ddof=1)
    return [float(np.round(v / step) * step) if step else float(v) for v in values]


def test_worse_at_one_learning_rate_says_that_it_was_not_tuned() -> None:
    results = results_of(noisy(95, 0.2), noisy(93, 0.2))
    assert results.verdict() == "Here pgt is worse than baseline."
    (line,) = results.advice()
    assert "All arms used those of the recipe, 0.02 and 4e-05" in line
    assert "--tune lr=0.005:0.08 wd=1e-05:0.00016 --repeats 8" in line  # alpha and 1/alpha times
    assert results_of(noisy(95, 0.2), noisy(93, 0.2), tuned=("optimizer.lr",)).advice() == []


def test_better_without_a_control_names_it_first() -> None:
    control, tune = results_of(noisy(93, 0.2), noisy(95, 0.2)).advice()
    assert "add less-decay to --arms" in control
    assert "--tune lr" in tune
    less = {"less-decay": {"optimizer.weight_decay": 1e-5}}
    control, _ = results_of(noisy(93, 0.2), noisy(95, 0.2), arms=less).advice()
    assert "add head-lr to --arms" in control


def test_a_fixed_number_that_was_too_small_asks_for_more_seeds() -> None:
    results = results_of(noisy(95, 0.5), noisy(95.1, 0.5), tuned=("optimizer.lr",))
    (line,) = results.advice()
    needed = results.comparisons[0].runs_needed
    assert 8 < needed <= 48
    assert f"About {needed} per arm" in line
    assert "--seeds 8..24 --fresh" in line


def test_thousands_of_seeds_are_no_advice() -> None:
    # Few test images: 100, on which 80% scatter by 4 points by chance alone.
    few = results_of(
        noisy(80, 4, 24, step=1.0), noisy(80, 4, 24, step=1.0), seeds="24", tuned=("optimizer.lr",)
    )
    needed = few.comparisons[0].runs_needed
    assert needed > 1000
    images, margin = few.advice()
    assert "With 100 test images" in images
    count = int(images.partition("about ")[2].split()[0])
    assert count == pytest.approx(100 * needed / 24, abs=100)
    assert str(needed) not in images + margin
    # The margin that 24 seeds can settle: that at which as many are needed.
    wide = float(margin.partition("--margin ")[2].partition(")")[0])
    assert replace(few, margin=wide).comparisons[0].runs_needed <= 26
    assert replace(few, margin=0.9 * wide).comparisons[0].runs_needed > 24
    # Scatter that the number of images does not explain.
    other = noisy(80, 4, 24, step=0.01)
    (line,) = results_of(other, other[::-1], seeds="24", tuned=("optimizer.lr",)).advice()
    assert "a larger margin" in line


def test_nothing_is_advised_of_runs_that_are_still_to_come() -> None:
    results = results_of(noisy(95, 1), noisy(95.1, 1), seeds="8..24", tuned=("optimizer.lr",))
    assert results.comparisons[0].is_open
    assert results.advice() == []


@pytest.mark.parametrize(("chosen", "expected"), [(2, "lr=0.1:3.2"), (0, "lr=0.025:0.8")])
def test_a_range_is_widened_at_the_edge_that_was_chosen(chosen: int, expected: str) -> None:
    trials = tuple(
        Trial({"optimizer.lr": lr}, {"optimizer.lr": lr}, 90.0) for lr in (0.1, 0.3, 0.8)
    )
    edge, middle = Choice(trials, chosen, ("optimizer.lr",)), Choice(trials, 1)
    tuning = Tuning(("optimizer.lr",), 4, 0.2, ({"baseline": middle, "pgt": edge},))
    results = results_of(noisy(93, 0.2), noisy(95, 0.2), tuned=("optimizer.lr",), tuning=tuning)
    assert results.advice()[0].endswith(f"--tune {expected}.")
    assert "chosen lr of pgt" in results.advice()[0]


def test_terminal_page_and_file_have_the_same_advice(capsys: pytest.CaptureFixture[str]) -> None:
    from powergrad.lab.terminal import show_results

    results = results_of(noisy(93, 0.2), noisy(95, 0.2))
    show_results(results)
    told = capsys.readouterr().out
    assert len(results.advice()) == 2
    assert all(line in told for line in results.advice())
    assert results.to_dict()["advice"] == results.advice()


def test_runs_made_elsewhere_get_advice_too() -> None:
    results = replace(results_of(noisy(95, 3), noisy(95, 3)), study=None)
    (line,) = results.advice()
    assert "a larger margin" in line
    assert math.isfinite(results.comparisons[0].interval[0])


def test_the_glossary_of_the_docs_is_that_of_the_page() -> None:
    assert (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8") == glossary.markdown()
    words = [word.lower() for term in TERMS for word in (term.name, *term.words)]
    assert len(words) == len(set(words))
    assert {"better", "worse", "equivalent", "not settled"} <= set(words)
