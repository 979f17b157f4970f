"""The page without a browser: what is in it, and what becomes of runs that are not whole.

Oracles: Python's own HTML parser and JSON; `study.json`; the calibration of all logits at once; a
census; and numpy for what the page's script does to unpack norms.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import shutil
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from powergrad import calibration, census
from powergrad.lab import stats
from powergrad.lab.jobs import RecipeProgram
from powergrad.lab.report import norms, write_report
from powergrad.lab.report.collect import collect
from powergrad.lab.report.page import as_json, make_page
from powergrad.lab.stats import Design
from powergrad.lab.study import Results, Study, StudyKind
from powergrad.lab.trainer.recipe import Recipe
from powergrad.lab.trainer.run_folder import Run, RunError
from powergrad.monitor import Recording

RECIPE = Recipe.model_validate(
    {
        "model": {"width": 4, "norm": "none"},
        "data": {"limit": 256},
        "optimizer": {"lr": 0.05},
        "schedule": {"warmup_epochs": 0.5},
        "train": {"epochs": 3, "batch_size": 64},
        "monitor": {"every": 1},
        "machine": {"keep_best": False, "threads": 1},
    }
)
ARMS: dict[str, dict[str, Any]] = {"baseline": {}, "pgt": {"loss.alpha": 0.25}}


def make_study(folder: Path, seeds: int = 2) -> Study:
    """A real study of a small network, done here rather than by workers."""
    study = Study(StudyKind.COMPARE, RecipeProgram(RECIPE), ARMS, Design((seeds,)))
    study.claim(folder)
    for job in study.jobs().values():
        job.execute(folder)
    Results.of_runs(study, folder).save(folder)
    return study


def rewrite_norms(folder: Path, change: Any) -> None:
    """Change the recorded norms, an array of (rows, units), in place."""
    index = json.loads((folder / "norms" / "index.json").read_text())
    kind = np.dtype([("step", "<i8"), ("values", "<f4", index["width"])])
    rows = np.fromfile(folder / "norms" / "records.bin", kind)
    change(rows["values"])
    rows.tofile(folder / "norms" / "records.bin")


def die_and_return(values: np.ndarray) -> None:
    """Of the first layer, filter 0 dies and comes back, 1 is born late, 2 dies for good."""
    count = len(values)
    values[count // 3 : 2 * count // 3, 0] = 0
    values[: count // 2, 1] = 0
    values[count // 2 :, 2] = 1e-12


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "small"
    make_study(folder)
    return folder


@pytest.fixture
def study(made: Path, tmp_path: Path) -> Path:
    """A study that a test may spoil."""
    return shutil.copytree(made, tmp_path / "small")


def shown(*paths: Path) -> dict[str, Any]:
    """The only study of a page, as the page's script gets it."""
    page = Page(make_page(collect(paths)))
    (one,) = page.data["studies"]
    return one


def run_of(study: Path, arm: str, seed: int) -> Path:
    (found,) = study.glob(f"{arm}-seed{seed}-*")
    return found


class Page(HTMLParser):
    """A page, taken apart as a browser does it."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.bodies: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.bodies.append((self.tags[-1][0] if self.tags else "", data))

    def body(self, tag: str, place: int = 0) -> str:
        """The text of the element of a tag that is the `place`-th of those that have any."""
        return [text for of, text in self.bodies if of == tag and text.strip()][place]

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.body("script", 0))


# The file ----------------------------------------------------------------------------------------


def test_the_page_is_one_file_that_may_ask_for_nothing(made: Path, tmp_path: Path) -> None:
    out = write_report([made], tmp_path / "deep" / "report.html")
    text = out.read_text(encoding="utf-8")
    page = Page(text)
    (policy,) = [
        attrs["content"] or ""
        for tag, attrs in page.tags
        if tag == "meta" and attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    for name, body in (("script-src", page.body("script", 1)), ("style-src", page.body("style"))):
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert rules[name] == f"'sha256-{digest}'"
    assert rules["img-src"] == "data:"
    assert set(rules) <= {
        "default-src", "script-src", "style-src", "img-src", "base-uri", "form-action"
    }  # fmt: skip
    for tag, attrs in page.tags:
        for name in ("src", "href", "action", "srcset"):
            assert (attrs.get(name) or "#").startswith(("#", "data:")), (tag, attrs)
        assert not [name for name in attrs if name.startswith("on")]
    outside = text.replace("http://www.w3.org/2000/svg", "").lower()  # a name, never fetched
    assert "http://" not in outside
    assert "https://" not in outside


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    )
)
def test_json_keeps_every_value_and_cannot_end_its_element(value: Any) -> None:
    text = as_json(value)
    assert not set("<>&\u2028\u2029") & set(text)

    def finite(each: Any) -> Any:
        if isinstance(each, float) and math.isinf(each):
            return None
        if isinstance(each, list):
            return [finite(one) for one in each]
        return {k: finite(v) for k, v in each.items()} if isinstance(each, dict) else each

    assert json.loads(text) == finite(value)


def test_names_of_users_are_text(study: Path) -> None:
    name = "</script><script>alert(1)</script>&amp;\u2028\"'"
    described = yaml.safe_load((study / "study.yaml").read_text())
    described["arms"] = {name: {}, "\u202e\U0001f600": {"loss.alpha": 0.25}}
    (study / "study.yaml").write_text(yaml.safe_dump(described, sort_keys=False))
    (study / "study.json").unlink()
    page = Page(make_page(collect([study])))
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert [arm["name"] for arm in page.data["studies"][0]["arms"]] == list(described["arms"])
    # Where no script runs, too.
    assert any(tag == "p" and name in text.replace("\n", "") for tag, text in page.bodies)


def test_a_folder_whose_name_is_not_unicode_has_a_page(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"run-\xff")
    shutil.copytree(run_of(made, "pgt", 0), folder)
    page = Page(write_report([folder], tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.data["studies"][0]["name"] == "run-?"


# What it shows -----------------------------------------------------------------------------------


def test_verdict_and_numbers_are_those_of_the_study(made: Path) -> None:
    saved = json.loads((made / "study.json").read_text())
    page = shown(made)
    assert page["headline"] == saved["verdict"]
    assert page["comparisons"] == saved["comparisons"]
    assert page["notes"] == []
    assert page["command"] == saved["environment"]["command"]
    assert yaml.safe_load(page["recipe"])["model"]["width"] == 4
    for arm, place in (("baseline", 0), ("pgt", 1)):
        values = [row["test_accuracy"] for row in saved["rows"] if row["arm"] == arm]
        found = page["arms"][place]["summary"]["test_accuracy"]
        assert found["mean"] == pytest.approx(np.mean(values), rel=1e-12)
        assert found["sd"] == pytest.approx(np.std(values, ddof=1), rel=1e-9)
        assert (found["low"], found["high"]) == pytest.approx(stats.t_interval(values))
    for run in page["runs"]:
        rows = Run(made / run["name"]).metrics()
        assert run["curve"]["epoch"] == [1, 2, 3]
        assert run["curve"]["nll"] == pytest.approx([row["nll"] for row in rows], rel=1e-5)


def test_the_control_that_is_missing_is_named(study: Path) -> None:
    for folder in study.glob("*-seed*"):
        shutil.rmtree(folder)
    saved = json.loads((study / "study.json").read_text())
    saved["rows"] = [
        {"arm": arm, "seed": seed, "elsewhere": True, "test_accuracy": mean + 0.1 * seed}
        for seed in range(8)
        for arm, mean in (("baseline", 90.0), ("pgt", 92.0))
    ]
    (study / "study.json").write_text(json.dumps(saved))
    described = yaml.safe_load((study / "study.yaml").read_text())
    (study / "study.yaml").write_text(yaml.safe_dump({**described, "seeds": "8"}))
    page = shown(study)
    assert page["headline"] == "Here pgt is better than baseline."
    assert page["notes"] == []
    control, tune = page["advice"]
    assert control.startswith("Before you keep pgt:")
    assert "less-decay" in control
    assert "--tune lr=" in tune
    assert control in write_report([study], study / "report.html").read_text()


def test_reliability_is_that_of_all_seeds_together(made: Path) -> None:
    arm = shown(made)["arms"][1]
    outputs = [Run(run_of(made, "pgt", seed)).test_outputs() for seed in (0, 1)]
    logits = torch.cat([each["logits"] for each in outputs if each])
    labels = torch.cat([each["labels"] for each in outputs if each])
    for name, temperature in (("plain", 1.0), ("scaled", 4.0)):
        expected = calibration.expected_calibration_error(logits, labels, temperature=temperature)
        assert arm["reliability"][name]["ece"] == pytest.approx(expected, rel=1e-9)
        assert sum(arm["reliability"][name]["count"]) == len(labels)


def test_examples_are_of_the_test_set(made: Path) -> None:
    page = shown(made)
    assert {each["arm"] for each in page["examples"]} == {"baseline", "pgt"}
    for each in page["examples"]:
        outputs = Run(run_of(made, each["arm"], 0)).test_outputs()
        assert outputs is not None
        assert each["label"] == outputs["labels"][each["index"]]
        assert each["logits"] == pytest.approx(outputs["logits"][each["index"]].tolist(), rel=1e-5)
        right = max(each["logits"]) == each["logits"][each["label"]]
        assert right == ("correct" in each["words"])


def test_classes_have_the_names_that_a_run_kept(study: Path) -> None:
    assert shown(study)["classes"] == [str(digit) for digit in range(10)]
    (run_of(study, "baseline", 0) / "classes.json").write_text('["cat", "dog"]')
    assert shown(study)["classes"] == ["cat", "dog"]


# Runs that are not as they should be --------------------------------------------------------------


def test_a_missing_run_is_named_and_the_others_are_compared(study: Path) -> None:
    shutil.rmtree(run_of(study, "pgt", 1))
    page = shown(study)
    assert [run["status"] for run in page["runs"]] == ["finished"] * 3 + ["missing"]
    assert "1 run is missing: pgt seed 1 (not started)." in page["notes"]
    assert page["comparisons"] == []  # one seed says nothing of the noise
    assert page["headline"].startswith("No verdict yet")
    assert "Too few finished runs to compare: pgt." in page["notes"]


def test_an_unfinished_run_is_shown_as_far_as_it_is(study: Path) -> None:
    folder = run_of(study, "baseline", 1)
    (folder / "result.json").unlink()
    lines = (folder / "metrics.csv").read_text().splitlines(keepends=True)
    (folder / "metrics.csv").write_text("".join(lines[:3]))
    page = shown(study)
    assert "Only 3 of 4 runs count: the others have no result." in page["notes"]
    assert "Too few finished runs to compare: baseline." in page["notes"]
    assert page["comparisons"] == []
    run = page["runs"][1]
    assert (run["status"], run["note"]) == ("unfinished", "at epoch 2 of 3")
    assert run["curve"]["epoch"] == [1, 2]


def accuracy_of(run: Path) -> float:
    result = Run(run).result()
    assert result is not None
    return result.metrics["test_accuracy"] or 0.0


def test_a_diverged_run_counts_as_guessing(tmp_path: Path) -> None:
    third = tmp_path / "three"
    make_study(third, seeds=3)
    folder = run_of(third, "pgt", 2)
    result = json.loads((folder / "result.json").read_text())
    result["about"] |= {"diverged": True}
    result["metrics"] |= {"train_loss": math.nan, "test_accuracy": math.nan}
    (folder / "result.json").write_text(json.dumps(result))
    outputs = Run(folder).test_outputs()
    assert outputs is not None
    Run(folder).save_weights(
        "test.safetensors", {**outputs, "logits": torch.full_like(outputs["logits"], math.nan)}
    )
    (third / "study.json").unlink()  # which has what was there before
    page = shown(third)
    assert page["runs"][-1]["status"] == "diverged"
    assert page["runs"][-1]["final"]["test_accuracy"] is None
    assert any("diverged: pgt seed 2" in note for note in page["notes"])
    values = {
        arm: {s: accuracy_of(run_of(third, arm, s)) for s in range(3)}
        for arm in ("baseline", "pgt")
    }
    values["pgt"][2] = 10.0  # of ten classes
    (expected,) = stats.compare(
        values,
        "baseline",
        margin=0.5,
        design=Design((3,)),
        unit="points of test accuracy",
        diverged={"pgt": [2]},
    )
    assert page["comparisons"] == [json.loads(as_json(expected.to_dict()))]
    assert "Diverged: 1 of 3 runs of pgt. A run that diverged counts as 10." in page["notes"]
    assert make_page(collect([third]))


def test_what_cannot_be_read_is_told(study: Path) -> None:
    (run_of(study, "pgt", 0) / "config.yaml").write_text("model: {width: [}")
    (run_of(study, "pgt", 1) / "metrics.csv").write_text("epoch,step\n1,many\n")
    (run_of(study, "baseline", 0) / "test.safetensors").write_bytes(b"not this")
    (run_of(study, "baseline", 1) / "norms" / "index.json").write_text("{}")
    (study / "study.json").write_text("{")
    page = shown(study)
    told = "\n".join(page["notes"])
    for word in ("config.yaml", "many", "norms", "header"):
        assert word in told, (word, told)
    assert [run["status"] for run in page["runs"]].count("finished") == 3


def test_a_study_without_any_run_has_a_page(tmp_path: Path) -> None:
    Study(StudyKind.COMPARE, RecipeProgram(RECIPE), ARMS, Design((2,))).claim(tmp_path)
    page = shown(tmp_path)
    assert [run["status"] for run in page["runs"]] == ["missing"] * 4
    assert [arm["name"] for arm in page["arms"]] == ["baseline", "pgt"]
    assert page["headline"].startswith("No verdict yet")
    assert any("not finished" in note for note in page["notes"])


def test_a_folder_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"Expected '.*' to be the folder of a run or a study"):
        write_report([tmp_path], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


# Runs and folders ---------------------------------------------------------------------------------


def test_one_run_has_a_page(made: Path) -> None:
    folder = run_of(made, "pgt", 0)
    page = shown(folder)
    result = Run(folder).result()
    assert result is not None
    assert (page["kind"], page["name"], page["comparisons"]) == ("run", folder.name, [])
    assert page["headline"].startswith(
        f"Test accuracy {result.metrics['test_accuracy']:.2f}% after 3"
    )
    assert page["runs"][0]["norms"] is not None
    assert page["arms"][0]["reliability"] is not None


def test_runs_that_differ_in_their_seed_only_are_one_arm(made: Path) -> None:
    folders = [run_of(made, arm, seed) for arm in ("baseline", "pgt") for seed in (0, 1)]
    page = shown(*folders, folders[0])
    assert [arm["name"] for arm in page["arms"]] == ["alpha=1.0", "alpha=0.25"]
    assert [(run["arm"], run["seed"]) for run in page["runs"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert page["comparisons"] == []


def test_studies_below_a_folder_are_found_but_not_their_tuning(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "decomposed" / "arms")
    shutil.copytree(made, tmp_path / "decomposed" / "tuning")
    assert shown(tmp_path / "decomposed")["name"] == "decomposed"
    both = collect([made, tmp_path / "decomposed", run_of(made, "pgt", 0)])
    assert [each["kind"] for each in both["studies"]] == ["compare", "compare", "run"]


# Norms --------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.floats(0, 1e6, width=32) | st.sampled_from([0.0, math.nan, math.inf, 1e-30]),
        min_size=1,
        max_size=30,
    )
)
@example([1.0, 2e-4, 1.1e-4, 0.9e-4, 0.0])
def test_a_norm_is_kept_to_half_a_step(values: list[float]) -> None:
    norm = np.array(values, dtype=np.float32)
    codes, low, high = norms.quantise(norm)
    for value, code in zip(norm.tolist(), codes.tolist(), strict=True):
        if not math.isfinite(value):
            assert code == 255
        elif value <= 1e-4 * high:
            assert code == 0
        else:
            step = math.log(high / low) / 253 if high > low else 0.0
            decoded = low * math.exp((code - 1) * step)
            assert abs(math.log(decoded / value)) <= step / 2 + 1e-5  # low is float32's


def unpack(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def test_norms_and_events_survive_the_packing(study: Path) -> None:
    folder = run_of(study, "baseline", 0)
    rewrite_norms(folder, die_and_return)
    packed = shown(study)["runs"][0]["norms"]
    recording = Recording(folder)
    assert packed["steps"] == [step for step, _ in recording]
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

    events = json.loads(unpack(packed["events"]))
    found = census(folder)
    names = {0: "died", 1: "revived", 2: "born"}
    told = [
        (step, packed["columns"][column]["layer"], unit, names[what])
        for step, column, unit, what in events
        if what in names
    ]
    assert told == [(e.step, e.layer, e.unit, e.what) for e in found.events]
    assert {what for *_, what in told} == {"died", "revived", "born"}
    first = packed["columns"][0]["layer"]
    assert [event for event in events if event[3] == 3] == [[0, 0, 1, 3]]
    count = len(packed["steps"])
    expected = [
        (count // 3 <= t < 2 * count // 3) + (t < count // 2) + (t >= count // 2)
        for t in range(count)
    ]
    assert packed["dead"] == expected
    assert [row[3] for row in packed["census"] if row[0] == first] == [1]


def test_many_records_are_thinned_and_long_pages_more(
    study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norms, "POINTS", 7)
    packed = shown(study)["runs"][0]["norms"]
    assert len(packed["steps"]) == 7
    assert (packed["steps"][0], packed["steps"][-1]) == (0, 12)
    monkeypatch.setattr(norms, "LEAST_POINTS", 3)
    monkeypatch.setattr(norms, "BUDGET", 10)
    packed = shown(study)["runs"][0]["norms"]
    assert packed["steps"] == [0, 6, 12]


def test_a_study_without_recordings_has_a_page(study: Path) -> None:
    for folder in study.glob("*/norms"):
        shutil.rmtree(folder)
    assert [run["norms"] for run in shown(study)["runs"]] == [None] * 4
