"""The page without a browser: what is in it, also for runs that are not complete.

References: study.json; the calibration of all logits at once; a census; numpy for what the script
does to unpack norms.
"""

import base64
import json
import math
import os
import re
import shutil
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from small_study import RECIPE, run_of, small, spoiled, study_of, write_run, write_study
from studies import results_of

from powergrad import calibration, census
from powergrad.lab.report import filters, write_report
from powergrad.lab.report.content import describe_sources
from powergrad.lab.report.page import as_json, make_data
from powergrad.lab.runs import RecipeProgram
from powergrad.lab.study import Results, load, load_study, save
from powergrad.lab.study.saving import claim
from powergrad.lab.trainer.run_folder import Run, RunError
from powergrad.monitor import Recording

__all__ = ["small", "spoiled"]  # fixtures
ROOT = Path(__file__).parents[2]


def shown(*sources: Path | Results) -> dict[str, Any]:
    """The only study of a page, as its script gets it."""
    (study,) = json.loads(as_json(describe_sources(sources)))
    return study


def test_page_is_one_file_that_may_request_nothing(small: Path, tmp_path: Path) -> None:
    """The browser, which is the other half of this test, runs no script with another hash."""
    text = write_report([small], tmp_path / "deep" / "report.html").read_text(encoding="utf-8")
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', text)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    for name in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[\w+/]+='", rules.pop(name))
    nothing = dict.fromkeys(("default-src", "base-uri", "form-action"), "'none'")
    assert rules == {**nothing, "img-src": "data:"}
    outside = text.replace("http://www.w3.org/2000/svg", "")  # a name, never requested
    assert re.findall(r"https?://", outside) == []


VALUES = st.none() | st.booleans() | st.integers() | st.text()
VALUES |= st.floats(allow_nan=False, allow_infinity=False)


@given(st.recursive(VALUES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_json_keeps_every_value_and_cannot_end_its_element(value: Any) -> None:
    text = as_json(value)
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == value
    assert as_json([math.inf, math.nan]) == "[null,null]"


def test_folder_name_that_is_not_unicode(small: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run_of(small, "pgt", 0), tmp_path / os.fsdecode(b"run-\xff"))
    page = write_report([folder], tmp_path / "report.html").read_text(encoding="utf-8")
    assert '"name":"run-?"' in page


def test_glossary_of_the_docs_is_that_of_the_page() -> None:
    terms = make_data([])["glossary"]
    listed = [f"- **{term['name']}**: {term['meaning']}" for term in terms]
    assert (ROOT / "docs" / "glossary.md").read_text("utf-8").splitlines()[5:] == listed
    words = [word.lower() for term in terms for word in (term["name"], *term["words"])]
    assert len(words) == len(set(words))


def test_content_is_that_of_the_study(small: Path) -> None:
    saved, page = json.loads((small / "study.json").read_text()), shown(small)
    assert page == shown(load(small))  # in memory
    assert page["title"] == "PGT on digits: 200 images, 10 classes"
    assert page["scale"] == ["guessing: 10%", "60 test images"]
    assert page["tuned"].startswith("Nothing was tuned: every arm uses the learning rate 0.4")
    for key in ("comparisons", "notes", "advice"):
        assert page[key] == saved[key]
    assert page["command"] == saved["environment"]["command"]
    assert yaml.safe_load(page["recipe"])["model"]["width"] == 4
    for place, arm in enumerate(("baseline", "pgt")):
        rows = [row for row in saved["rows"] if row["arm"] == arm]
        values = [row["metrics"]["test_accuracy"] for row in rows]
        found = page["arms"][place]["summary"]["test_accuracy"]
        assert found["mean"] == pytest.approx(np.mean(values), rel=1e-12)
        assert found["sd"] == pytest.approx(np.std(values, ddof=1), rel=1e-9)
        assert (found["low"], found["high"]) == (None, None)  # there is none with two runs
    for run in page["runs"]:
        rows = Run(small / run["name"]).metrics()
        assert run["curve"]["epoch"] == [1, 2, 3]
        assert run["curve"]["nll"] == pytest.approx([row["nll"] for row in rows], rel=1e-5)


@pytest.mark.parametrize(
    ("gains", "headline"),
    [
        (
            {"pgt": 8.0, "agc": 9.0, "gc": 0.0},
            "pgt (+8.00 points of test accuracy) and agc (+9.00) are better than baseline; "
            "gc (+0.00) is not distinguishable from baseline with 6 runs per arm.",
        ),
        (
            dict.fromkeys("abcde", 8.0),
            "a (+8.00 points of test accuracy) and 4 others are better than baseline.",
        ),
    ],
)
def test_headline_has_the_numbers(gains: dict[str, float], headline: str) -> None:
    noise = np.array([-0.7, -0.2, 0.1, 0.3, 0.2, 0.3])
    values = {"baseline": 80 + noise, **{arm: 80 + gain - noise for arm, gain in gains.items()}}
    page = shown(results_of({arm: list(of_arm) for arm, of_arm in values.items()}))
    assert page["headline"] == f"Here {headline}"
    widths = [high - low for low, high in (c["interval"] for c in page["comparisons"])]
    assert page["scale"] == [f"differences below {min(widths) / 2:.2g} cannot be seen"]


def test_reliability_is_that_of_all_seeds_together(small: Path) -> None:
    arm = shown(small)["arms"][1]
    outputs = [Run(run_of(small, "pgt", seed)).test_outputs() or {} for seed in (0, 1)]
    logits, labels = (torch.cat([o[name] for o in outputs]) for name in ("logits", "labels"))
    for name, temperature in (("plain", 1.0), ("scaled", 4.0)):
        expected = calibration.expected_calibration_error(logits, labels, temperature=temperature)
        assert arm["reliability"][name]["ece"] == pytest.approx(expected, rel=1e-9)
        assert sum(arm["reliability"][name]["count"]) == len(labels)


def test_missing_and_unfinished_runs_are_listed(spoiled: Path) -> None:
    shutil.rmtree(run_of(spoiled, "pgt", 1))
    folder = run_of(spoiled, "baseline", 1)
    (folder / "result.json").unlink()
    lines = (folder / "metrics.csv").read_text().splitlines(keepends=True)
    (folder / "metrics.csv").write_text("".join(lines[:3]))
    page = shown(spoiled)
    states = [run["status"] for run in page["runs"]]
    assert states == ["finished", "unfinished", "finished", "missing"]
    assert "Runs without a result: baseline (seed 1), pgt (seed 1)." in page["notes"]
    assert "Too few finished runs to compare: baseline, pgt." in page["notes"]
    assert page["headline"].startswith("No verdict yet")
    assert page["comparisons"] == []
    assert page["runs"][1]["note"] == "at epoch 2"
    assert page["runs"][1]["curve"]["epoch"] == [1, 2]


def test_diverged_run_has_no_value_and_no_reliability(spoiled: Path) -> None:
    results = load(spoiled)
    lost = {"metrics": {"test_accuracy": math.nan}, "about": {"diverged": True, "classes": 10}}
    results.rows[-1] = results.rows[-1].model_copy(update=lost)
    page = shown(results)
    assert page["runs"][-1]["status"] == "diverged"
    assert page["runs"][-1]["final"]["test_accuracy"] is None
    assert page["arms"][1]["summary"]["test_accuracy"]["n"] == 1
    assert sum(page["arms"][1]["reliability"]["plain"]["count"]) == 60  # of the other seed
    assert any("Diverged: 1 of 2 runs of pgt" in note for note in page["notes"])


def test_unreadable_files_are_reported(spoiled: Path) -> None:
    (run_of(spoiled, "pgt", 1) / "metrics.csv").write_text("epoch,step\n1,many\n")
    (run_of(spoiled, "baseline", 0) / "test.safetensors").write_bytes(b"not this")
    (run_of(spoiled, "baseline", 1) / "norms" / "index.json").write_text("{}")
    (run_of(spoiled, "baseline", 1) / "result.json").write_text("{}")
    page = shown(spoiled)
    notes = "\n".join(page["notes"])
    for word in ("many", "norms", "header", "result.json"):
        assert word in notes
    assert [run["status"] for run in page["runs"]].count("finished") == 3
    (spoiled / "study.json").write_text("{")
    with pytest.raises(RunError, match=r"study\.json"):
        shown(spoiled)


def test_study_without_runs_has_a_page(tmp_path: Path) -> None:
    claim(study_of(), tmp_path)
    page = shown(tmp_path)
    assert [run["status"] for run in page["runs"]] == ["missing"] * 4
    assert [arm["name"] for arm in page["arms"]] == ["baseline", "pgt"]
    assert page["headline"].startswith("No verdict yet")


def test_runs_on_a_folder_of_images_are_found_without_its_path(tmp_path: Path) -> None:
    base = RECIPE.override({"data.name": f"folder:{tmp_path}/photos"})
    program = RecipeProgram(base=base, fingerprint="sha256:0123456789")
    study = replace(study_of(), program=program)
    results = write_study(study, tmp_path / "study")
    moved = program.model_copy(update={"base": base.override({"data.name": "folder:/x/photos"})})
    assert {job.name for job in replace(study, program=moved).jobs().values()} == {
        row.run for row in results.rows
    }
    save(replace(results, rows=[]), tmp_path / "study")  # no row tells their names
    found: Any = load_study(tmp_path / "study")
    assert str(tmp_path) not in found.study.base.data.name
    assert {row.run for row in found.rows} == {row.run for row in results.rows}


def test_folder_of_nothing_raises(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="run or a study"):
        write_report([tmp_path], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_one_run_has_a_page(small: Path) -> None:
    folder = run_of(small, "pgt", 0)
    page = shown(folder)
    assert (page["kind"], page["name"], page["comparisons"]) == ("run", folder.name, [])
    accuracy = json.loads((folder / "result.json").read_text())["metrics"]["test_accuracy"]
    assert page["headline"] == f"Test accuracy {accuracy:.2f}% after 3 epochs at alpha 0.25."
    assert page["runs"][0]["norms"] is not None
    assert page["arms"][0]["reliability"] is not None


def test_runs_that_differ_only_in_their_seed_are_one_arm(small: Path) -> None:
    folders = [run_of(small, arm, seed) for arm in ("baseline", "pgt") for seed in (0, 1)]
    page = shown(*folders, folders[0])
    assert [arm["name"] for arm in page["arms"]] == ["alpha=1.0", "alpha=0.25"]
    assert [(run["arm"], run["seed"]) for run in page["runs"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert page["comparisons"] == []


def test_studies_and_runs_below_a_folder_are_found(small: Path, tmp_path: Path) -> None:
    shutil.copytree(small, tmp_path / "study")
    write_run(tmp_path / "alone", RECIPE, 90)
    studies = describe_sources([small, tmp_path])
    assert [study["kind"] for study in studies] == ["compare", "compare", "run"]


def unpack(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def test_norms_and_events_survive_the_packing(small: Path) -> None:
    packed, folder = shown(small)["runs"][0]["norms"], run_of(small, "baseline", 0)
    recording = Recording(folder)
    assert packed["steps"] == recording.load()[0].tolist()
    body, start = np.frombuffer(unpack(packed["data"]), np.uint8), 0
    for column in packed["columns"]:
        size = column["units"] * len(packed["steps"])
        codes = body[start : start + size].reshape(column["units"], -1).cumsum(1, dtype=np.uint8)
        start += size
        ratio = column["high"] / column["low"]
        decoded = np.where(codes == 0, 0, column["low"] * ratio ** ((codes - 1.0) / 253))
        _, recorded = recording.read(column["layer"], column["quantity"])
        close = pytest.approx(recorded.T.numpy(), rel=math.log(ratio) / 253, abs=1e-4 * ratio)
        assert decoded == close
    assert start == len(body)
    odd = np.array([math.nan, math.inf, 0, 1e-30, 1, 2], np.float32)
    assert filters.quantise(odd)[0].tolist() == [255, 255, 0, 0, 1, 254]

    events, found = json.loads(unpack(packed["events"])), census(folder)
    names = {0: "died", 1: "revived", 2: "born"}
    happened = [
        (step, packed["columns"][column]["layer"], unit, names[what])
        for step, column, unit, what in events
        if what in names
    ]
    assert happened == [(e.step, e.layer, e.unit, e.what) for e in found.events]
    assert {what for *_, what in happened} == {"died", "revived", "born"}
    assert [event for event in events if event[3] == 3] == [[0, 0, 1, 3]]  # unborn at the start
    assert packed["dead"] == [(4 <= t < 8) + (t < 6) + (t >= 6) for t in range(13)]
    assert [row[3] for row in packed["census"] if row[0] == "conv1"] == [1]


def test_many_records_are_thinned_and_long_pages_more(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filters, "POINTS", 7)
    packed = shown(small)["runs"][0]["norms"]
    assert len(packed["steps"]) == 7
    assert (packed["steps"][0], packed["steps"][-1]) == (0, 12)
    monkeypatch.setattr(filters, "LEAST_POINTS", 3)
    monkeypatch.setattr(filters, "BUDGET", 10)
    assert shown(small)["runs"][0]["norms"]["steps"] == [0, 6, 12]
