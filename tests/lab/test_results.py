"""Results: what is compared, what is said of it, and what is written and read."""

import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from studies import SMALL, results_of, spread, study_of

from powergrad.lab.files import write_json
from powergrad.lab.runs.functions import FunctionProgram
from powergrad.lab.study import Metric, RunRow, Tuning, load, load_study, save
from powergrad.lab.study.notes import advice, missing_control, notes, verdict
from powergrad.lab.study.records import Choice, IdentityCheck, Source, Trial
from powergrad.lab.study.saving import claim, to_csv, to_json
from powergrad.lab.trainer.recipe import RecipeError, load_recipe
from powergrad.lab.trainer.run_folder import Result, Run, RunError

RESULTS = Path(__file__).parents[2] / "results"
ARMS = {"baseline": {}, "pgt": {"loss.alpha": 0.25}}
TUNED: dict[str, Any] = {"tuned": ("optimizer.lr",)}


def compared(baseline: list[float], pgt: list[float], seeds: str = "8", **settings: Any) -> Any:
    """Results of a study of digits."""
    records = {"tuning": settings.pop("tuning", None)}
    arms = {**ARMS, **settings.pop("arms", {})}
    study = study_of(load_recipe("digits"), arms, seeds, **settings)
    return results_of({"baseline": baseline, "pgt": pgt}, study=study, **records)


def lost(arm: str, seed: int, **about: Any) -> RunRow:
    return RunRow(arm=arm, seed=seed, metrics={"test_accuracy": math.nan}, about=about)


def test_diverged_run_counts_as_chance_or_as_failed():
    results = results_of({"a": [90.0, 91.0], "b": [80.0, 92.0]})
    unknown = replace(results, rows=[*results.rows, lost("b", 2, diverged=True)])
    assert (list(unknown.values("b")), unknown.failed_units("b")) == ([0, 1], {2})
    assert "1 of 3 runs of b failed (seed 2): test_accuracy is nan" in notes(unknown)
    assert unknown.comparable() is unknown
    known = replace(results, rows=[*results.rows, lost("b", 2, diverged=True, classes=4)])
    assert known.values("b")[2] == 25.0
    assert "1 of 3 runs of b" in notes(known)[0]
    assert "counts as 25" in notes(known)[0]
    infinite = RunRow(arm="b", seed=2, metrics={"test_accuracy": math.inf})
    assert replace(results, rows=[*results.rows, infinite]).failed_units("b") == {2}


def test_arm_without_variation_is_explained():
    stuck = results_of({"a": spread(90, 0.1), "b": [10.0] * 8})
    assert "stuck, for example at chance level" in " ".join(notes(stuck))
    assert "b is without a verdict" in verdict(stuck)
    ignored = results_of({"a": [90.0] * 8, "b": [91.0] * 8})
    assert "the program does not use its seed" in " ".join(notes(ignored))
    assert not advice(ignored)


def test_correlation_is_in_the_report():
    values = {"a": spread(90, 1), "b": [value + 0.01 * value % 0.02 for value in spread(90, 1)]}
    old = results_of(values)
    assert "Correlation" not in " ".join(notes(old))  # of an earlier version: never in pairs
    source = Source(file="r.csv", digest="", columns={"metric": "test_accuracy"})
    assert "b 1.00 (in pairs)" in " ".join(notes(replace(old, source=source)))


def test_unit_of_a_repeat_is_the_mean_over_its_seeds():
    rows = [
        RunRow(arm=arm, seed=seed, metrics={"test_accuracy": 90.0 + seed}, unit=seed // 2)
        for arm in ("a", "b")
        for seed in range(4)
    ]
    results = replace(results_of({"a": [1.0]}), rows=rows)
    assert results.units("a") == {0: 90.5, 1: 92.5}
    failed = [*rows[:-1], rows[-1].model_copy(update={"about": {"failed": "no memory"}})]
    assert replace(results, rows=failed).units("b") == {0: 90.5}
    assert replace(results, rows=failed).failed_units("b") == {1}
    assert replace(results, rows=rows[:-1]).units("b") == {0: 90.5}  # the other is not complete


@pytest.mark.parametrize(("rates", "is_noted"), [((0.99, 0.95), True), ((0.99, 0.7), False)])
def test_arm_that_is_nearly_always_clipped_is_noted(rates, is_noted):
    results = results_of({"baseline": [90.0, 91.0], "agc": [80.0, 81.0]})
    rows = [
        row.model_copy(update={"metrics": {**row.metrics, "clip_rate": rates[row.seed]}})
        if row.arm == "agc"
        else row
        for row in results.rows
    ]
    found = [note for note in notes(replace(results, rows=rows)) if "clips" in note]
    assert [note[:26] for note in found] == ["agc clips 97% of the units"] * is_noted


def test_untuned_comparison_advises_tuning():
    results = compared(spread(95, 0.2), spread(93, 0.2))
    (line,) = advice(results)
    assert "--tune lr=0.005:0.08 wd=1e-05:0.00016 --repeats 8" in line  # alpha and 1/alpha times
    assert advice(compared(spread(95, 0.2), spread(93, 0.2), **TUNED)) == []


def test_too_few_fixed_seeds_advise_more():
    results = compared(spread(95, 0.5), spread(95.1, 0.5), **TUNED)
    (line,) = advice(results)
    assert f"About {results.comparisons[0].runs_needed} per arm" in line
    assert "--seeds 8..24 --fresh" in line
    still_open = compared(spread(95, 1), spread(95.1, 1), "8..24", **TUNED)
    assert still_open.comparisons[0].is_open
    assert advice(still_open) == []


def test_impossible_numbers_of_seeds_advise_images_or_a_margin():
    # 100 test images, on which 80% scatter by 4 points by chance alone.
    coarse = spread(80, 4, 24, step=1.0)
    few = compared(coarse, coarse[::-1], "24", **TUNED)
    needed = few.comparisons[0].runs_needed
    images, margin = advice(few)
    assert "With 100 test images" in images
    assert int(images.partition("about ")[2].split()[0]) == pytest.approx(
        100 * needed / 24, abs=100
    )
    wide = float(margin.partition("--margin ")[2].partition(")")[0])
    assert replace(few, margin=wide).comparisons[0].runs_needed <= 26
    assert replace(few, margin=0.9 * wide).comparisons[0].runs_needed > 24
    fine = spread(80, 4, 24, step=0.01)  # the number of images does not explain this scatter
    (line,) = advice(compared(fine, fine[::-1], "24", **TUNED))
    assert "margin" in line
    assert advice(replace(compared(fine, fine[::-1]), study=None))  # runs made elsewhere, too


@pytest.mark.parametrize(("chosen", "expected"), [(2, "lr=0.1:3.2"), (0, "lr=0.025:0.8")])
def test_choice_at_the_edge_advises_a_wider_range_and_withholds_better(chosen, expected):
    trials = tuple(
        Trial(point={"optimizer.lr": lr}, changes={"optimizer.lr": lr}, mean=90.0)
        for lr in (0.1, 0.3, 0.8)
    )
    edge = Choice(trials=trials, chosen=chosen, edges=("optimizer.lr",))
    choices = {"baseline": Choice(trials=trials, chosen=1), "pgt": edge}
    tuning = Tuning(keys=("optimizer.lr",), seeds=4, hold_out=0.2, repeats=(choices,))
    results = compared(spread(93, 0.2), spread(95, 0.2), tuning=tuning, **TUNED)
    assert advice(results)[0].endswith(f"--tune {expected}.")
    assert "of pgt is at the edge" in results.comparisons[0].withheld


@pytest.mark.parametrize(
    ("better", "changes", "more", "expected"),
    [
        (["pgt"], {}, {}, "less-decay"),
        (["agc"], {}, {"agc": {"clip.agc": 0.2}}, ""),
        (["pgt"], {"optimizer.weight_decay": 0}, {}, "head-lr"),
        (["pgt"], {"optimizer.name": "adam"}, {}, "less-decay"),
        (["pgt"], {"optimizer.name": "adamw"}, {}, "head-lr"),  # there PGT moves no decay
        (["pgt"], {}, {"half": {"optimizer.backbone.weight_decay": 0.5}}, "head-lr"),
        (["pgt"], {}, {"less": {"optimizer.weight_decay": 0.001, "optimizer.head.lr": 0.1}}, ""),
        (["pgt"], {}, {"both": {"optimizer.weight_decay": 1e-3, "loss.alpha": 0.2}}, "less-decay"),
        (["pgt"], {}, {"more": {"optimizer.weight_decay": 0.1}}, "less-decay"),
    ],
)
def test_missing_control_is_advised(better, changes, more, expected):
    base = SMALL.override({"optimizer.weight_decay": 0.02, **changes})
    study = study_of(base, {**ARMS, **more}, tuned=("optimizer.lr",))
    found = missing_control(study, better)
    assert bool(found) == bool(expected)
    assert not expected or f"add {expected} to --arms" in (found or "")
    assert missing_control(replace(study, kind="decompose"), better) is None
    tuned = missing_control(replace(study, tuned=("optimizer.weight_decay",)), better)
    assert "less-decay" not in (tuned or "")


def full_results() -> Any:
    """Results that have every record."""
    results = compared(spread(93, 0.2), spread(95, 0.2), chosen={"pgt": {"optimizer.lr": 0.1}})
    trial = Trial(point={"optimizer.lr": 0.1}, changes={"optimizer.lr": 0.1}, mean=math.nan)
    choice = {"pgt": Choice(trials=(trial,), chosen=0)}
    trials = [RunRow(arm="pgt", seed=1000, settings={"optimizer.lr": 0.1}, run="tuning/x")]
    return replace(
        results,
        tuning=Tuning(keys=("optimizer.lr",), seeds=1, hold_out=0.2, repeats=(choice,)),
        trials=trials,
        identity=IdentityCheck(alpha=0.25, gaps={1: 0.0, 10: 1e-15}),
        environment={"torch": "2.13", "command": "powergrad compare --out /home/ann/runs"},
        remarks=["A remark."],
    )


def test_study_json_is_read_as_it_was_written(tmp_path):
    results = full_results()
    save(results, tmp_path)
    again: Any = load(tmp_path / "study.json")
    assert math.isnan(again.tuning.repeats[0]["pgt"].trials[0].mean)  # null in the file
    assert to_json(again) == to_json(results)
    assert again.rows == results.rows
    assert again.study == results.study
    assert "/home/ann" not in (tmp_path / "study.json").read_text()
    assert replace(again, folder=tmp_path) == load_study(tmp_path)


def test_study_csv_has_a_row_per_run():
    text = to_csv(full_results())
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == 17
    assert [row["phase"] for row in rows] == ["final"] * 16 + ["tuning"]
    assert rows[-1]["optimizer.lr"] == "0.1"
    assert float(rows[0]["test_accuracy"]) == full_results().rows[0].metrics["test_accuracy"]


STUDIES = sorted(path for path in RESULTS.glob("*.json") if path.stem.startswith(("comp", "dec")))


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_committed_studies_give_the_conclusions_in_their_files(path):
    def rounded(text: str | bytes) -> Any:  # other processors differ in the last digit
        return json.loads(text, parse_float=lambda digits: f"{float(digits):.12g}")

    saved, again = rounded(path.read_bytes()), rounded(json.dumps(to_json(load(path))))
    for now, before in zip(again["comparisons"], saved["comparisons"], strict=True):
        assert {name: now[name] for name in before} == before  # later versions have more fields
    for name in ("verdict", "advice"):
        assert again[name] == saved[name]


@pytest.mark.parametrize(
    ("content", "word"),
    [("{", "JSON|Expecting"), ('{"format": 3}', "earlier version"), ("[]", "study"),
     ('{"format": 99}', "newer version"), ('{"format": 4, "margin": 1}', "metric")],
)  # fmt: skip
def test_unreadable_study_raises(tmp_path, content, word):
    path = tmp_path / "study.json"
    path.write_text(content)
    with pytest.raises(RunError, match=word):
        load(path)
    with pytest.raises(RunError, match=r"study\.json"):
        load_study(tmp_path / "nowhere")


def test_rows_whose_folder_was_deleted_are_dropped(tmp_path):
    results = compared([90.0, 91.0], [92.0, 93.0])
    rows = [row.model_copy(update={"run": f"r{n}"}) for n, row in enumerate(results.rows)]
    rows[1] = rows[1].model_copy(update={"is_elsewhere": True})
    save(replace(results, rows=rows), tmp_path)
    (tmp_path / "r0").mkdir()
    write_json(tmp_path / "r0/result.json", {"metrics": {}, "about": {}})
    assert [row.run for row in load_study(tmp_path).rows] == ["r0", "r1"]


def test_run_that_finished_after_the_last_save_has_a_complete_row(tmp_path):
    program = FunctionProgram(place="train.py:train", metric="acc")
    metric = Metric(name="acc", higher_is_better=True, unit="acc", margin=1.0)
    study = replace(study_of(SMALL, {}), program=program, arms={"a": {}, "b": {}}, metric=metric)
    job = claim(study, tmp_path).job("b", 1)
    with (run := Run(tmp_path / job.name)).hold():
        write_json(run.folder / "environment.json", {"commit": "c0ffee"})
        run.finish(Result(metrics={"acc": math.nan}))
    (row,) = load_study(tmp_path).rows
    assert (row.arm, row.seed, row.run, row.commit, row.diverged) == (
        *("b", 1, job.name, "c0ffee", True),
    )


def test_claimed_folder_keeps_its_study(tmp_path):
    study = study_of(SMALL, ARMS, "8")
    assert claim(study, tmp_path) == study
    more = replace(study, arms={"baseline": {}, "agc": {"clip.agc": 0.1}})
    assert list(claim(more, tmp_path).arms) == ["baseline", "pgt", "agc"]
    for other in (
        replace(study, kind="sweep"),
        replace(study, finals=2),
        replace(study, arms={"baseline": {}, "pgt": {"loss.alpha": 0.5}}),
        study_of(SMALL.override({"train.epochs": 9}), ARMS, "8"),
    ):
        with pytest.raises(RecipeError, match="choose another --name"):
            claim(other, tmp_path)
    # A number of seeds that was never shown is no look; one that was shown is.
    assert claim(replace(study, design=study_of(SMALL, ARMS, "12").design), tmp_path).earlier == ()
    shown = replace(results_of({"baseline": spread(90, 1), "pgt": spread(91, 1)}), study=study)
    save(shown, tmp_path)
    assert claim(study_of(SMALL, ARMS, "12"), tmp_path).earlier == (8,)
