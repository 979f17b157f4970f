"""Before the first run: data, time, budgets, and what a command line means."""

import json
import math
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from photos import write_photos
from PIL import Image
from scipy import stats
from studies import SMALL, powergrad, study_of

from powergrad.lab import environment, preflight
from powergrad.lab.cli.common import recipe_and_overrides
from powergrad.lab.cli.compare import compare
from powergrad.lab.preflight import Fitting, Found, Learned, Plan, Timing
from powergrad.lab.runs import RecipeProgram
from powergrad.lab.runs.pool import InlinePool, Snapshot
from powergrad.lab.stats import DEFAULT, LEAST, Design, parse_runs
from powergrad.lab.study import Execution, load_study, run_study
from powergrad.lab.study.notes import notes
from powergrad.lab.terminal import Watch
from powergrad.lab.trainer.recipe import load_recipe
from powergrad.lab.trainer.run_folder import Result


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


IMAGES = load_recipe("images", {"data.name": "folder:x"})
FOUND = Found(size=64, width=16, steps=78, tested=200)
ARMS: dict[str, Any] = {
    "baseline": {},
    "pgt": {"loss.alpha": 0.25},
    "agc": {"clip.agc": 0.01},
    "head-lr": {"optimizer.head.lr": 0.1},
}


class Machine(Fitting):
    """A machine whose steps take `step` seconds at 64 pixels and width 16, and less for less.

    The baseline learns in `needed` steps.
    """

    step, needed = 1.0, 50

    def timing(self, changes: Any) -> Timing:
        size, width = changes.get("data.size", 64), changes.get("model.width", 16)
        step = self.step * (size / 64) ** 2 * (width / 16)
        return Timing(0.1, step, 10 * step, self.facts.steps)

    def learn(self, changes: Any) -> Learned:
        steps = changes.get("train.epochs", 10) * self.facts.steps
        return Learned(steps, 60 if steps >= self.needed else 12, 100, 0.1)


def machine(step: float, budget: float, seeds: str = "8..24", **settings: Any) -> Machine:
    study = study_of(IMAGES, settings.pop("arms", ARMS), seeds)
    plan = Plan(len(study.arms), study.design, workers=2)
    deadline = time.monotonic() + budget
    made = Machine(study, plan, budget, deadline, **{"facts": FOUND, "given": (), **settings})
    made.step, made.needed = step, 50
    return made


@given(
    step=st.floats(1e-4, 1.0),
    budget=st.floats(10, 1e5),
    kept=st.sets(st.sampled_from(["data.size", "model.width", "train.epochs", "arms", "seeds"])),
)
def test_chosen_settings_fit_the_budget(step, budget, kept):
    smallest = {"data.size": 32, "model.width": 8}
    changes = {key: value for key, value in smallest.items() if key not in kept}
    tried = machine(step, budget, given=kept)
    arms, first = 4 if "arms" in kept else 2, 8 if "seeds" in kept else LEAST
    least = tried.timing(changes).run(10 if "train.epochs" in kept else 2, 2)
    if least * arms * first / 2 > 0.7499 * budget:
        with pytest.raises(ValueError, match="--budget to be at least"):
            tried.fit()
        return
    chosen = tried.fit()
    assert not kept & chosen.changes.keys()
    assert (len(chosen.arms) == 4) or "arms" not in kept
    assert (chosen.seeds == "") == ("seeds" in kept)
    epochs = chosen.changes.get("train.epochs", 10)
    assert epochs * FOUND.steps >= 100
    run = tried.timing(chosen.changes).run(epochs, 2)
    assert chosen.run_seconds == pytest.approx(run)
    # Every look that is planned fits, and the first gives a verdict.
    looks = parse_runs(chosen.seeds or "8")
    assert looks[0] >= LEAST
    assert math.ceil(len(chosen.arms) * looks[-1] / 2) * run <= budget


@pytest.mark.parametrize(
    ("budget", "arms", "changes", "seeds"),
    [
        (1e5, 4, {}, "8..24"),  # room for all
        (19 * 60, 4, {}, "8"),  # 16 rounds of 51 s: eight seeds of every arm
        (15 * 60, 3, {}, "8"),  # rather than shorter training
        (10 * 60, 2, {}, "8"),
        (6 * 60, 2, {"train.epochs": 6}, "8"),  # rather than six seeds
        (100, 2, {"train.epochs": 2}, "6"),  # rather than smaller images
        (60, 2, {"data.size": 48, "train.epochs": 2}, "6"),
        (20, 2, {"data.size": 32, "model.width": 8, "train.epochs": 2}, "8"),
    ],
)
def test_budget_gives_up_arms_then_epochs_then_seeds_then_size(budget, arms, changes, seeds):
    chosen = machine(0.06, budget).fit()
    assert (len(chosen.arms), chosen.changes, chosen.seeds) == (arms, changes, seeds)
    for words in ["agc, head-lr" if arms == 2 else "", *changes, "200 test images"]:
        assert words in chosen.remark


def test_training_becomes_longer_until_the_baseline_learns():
    small = {"facts": FOUND._replace(steps=10), "arms": {"baseline": {}, "pgt": ARMS["pgt"]}}
    tried = machine(0.01, 1e4, **small)
    tried.needed = 350  # the recipe has 10 epochs
    assert tried.fit().changes == {"train.epochs": 40}
    tried = machine(0.01, 25, **small)
    tried.needed = 10**6
    with pytest.raises(ValueError, match=r"--budget .* but got 25 s"):
        tried.fit()


def test_what_is_said_about_the_resolution():
    chosen = machine(0.06, 600).fit()
    # 60% of 200 images: a standard deviation of 3.46 points; 2 x 8 runs, one comparison.
    least = (1.95996 + 0.84162) * 3.4641 * math.sqrt(2 / 8)
    assert f"differences below about {least:.2g} points cannot be seen" in chosen.remark


@pytest.mark.parametrize(("right", "images", "is_clear"), [(15, 100, False), (23, 100, True)])
def test_learning_is_a_binomial_test(right, images, is_clear):
    tail = sum(math.comb(images, k) * 0.1**k * 0.9 ** (images - k) for k in range(right, images))
    assert (tail < 0.001) == is_clear
    assert Learned(5, right, images, 0.1).is_clear == is_clear


def test_plan_counts_runs_of_tuning_and_repeats():
    plan = Plan(4, DEFAULT, workers=3, extra=80, done=5)
    assert (plan.runs(8), plan.runs(24)) == (80 + 32 - 5, 80 + 96 - 5)
    assert plan.seconds(8, 2.0) == 2 * math.ceil(107 / 3)
    assert Plan(4, Design((8,)), per_unit=9).runs(8) == 8 * 9 * 4


def test_time_left_is_estimated_from_the_finished_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(RecipeProgram, "execute", lambda *_: time.sleep(0.05) or Result(metrics={}))
    shown: list[Snapshot] = []
    jobs = [*study_of(SMALL, {"baseline": {}}, "6").jobs().values()]
    InlinePool(tmp_path).run(jobs, shown.append)
    assert [snapshot.left for snapshot in shown[:2]] == [None, None]  # no run shows the pace yet
    for snapshot in shown[3:]:
        remaining = 6 - len(snapshot.results)
        assert 0.9 * 0.05 * remaining <= (snapshot.left or 0) <= snapshot.seconds * remaining


def cut_study(folder: Path, most: int, seeds: str = "8..24", gain: float = 5.0, noise: float = 0.1,
              others: tuple[float, ...] = ()) -> Any:  # fmt: skip
    """A study with time for `most` runs, whose results are made up."""

    class Hurried(InlinePool):
        left = most

        def run(self, jobs: Any, watch: Any = None) -> dict[str, Result]:
            done = {}
            for job in jobs[: max(0, self.left)]:
                better = gain if job.changes.get("loss.alpha", 1) < 1 else 0.0
                metrics = {"test_accuracy": 90 + better + noise * (job.seed * 7 % 5)}
                done[job.name] = Result(metrics=metrics)
            self.left -= len(done)
            return done

    arms = {"baseline": {}, "pgt": {"loss.alpha": 0.25}}
    arms |= {f"pgt({alpha})": {"loss.alpha": alpha} for alpha in others}
    return run_study(study_of(SMALL, arms, seeds), folder, Execution(Hurried(folder), Watch))


def test_finished_runs_are_judged_and_the_rest_is_stated(tmp_path):
    results = cut_study(tmp_path, 13)  # 7 of baseline, 6 of pgt
    assert results.study.design.looks == (6, *DEFAULT.looks)
    (comparison,) = results.comparisons
    assert (comparison.n, comparison.verdict) == (6, "better")
    # The error that this look spends is its share: 6 of 24.
    assert results.study.design.nominal(0, 1) == pytest.approx(0.05 * 6 / 24)
    (remark,) = results.remarks
    assert "1 seed of baseline, 2 seeds of pgt could not be run" in remark
    assert remark in notes(results)


def test_cut_study_continues_as_planned(tmp_path):
    cut_study(tmp_path, 13, "8")
    results = cut_study(tmp_path, 99, "8")
    assert results.study.design.looks == (6, 8)
    assert not any("without planning it" in note for note in notes(results))
    assert results.remarks == []


def test_arm_that_ran_out_of_time_is_not_settled(tmp_path):
    results = cut_study(tmp_path, 23, "8", 0.1, 2.0, (0.9,))  # 8, 8 and 7
    found = [(comparison.n, comparison.verdict) for comparison in results.comparisons]
    assert found == [(8, "not settled"), (7, "not settled")]
    assert not any("An arm stops" in note for note in notes(results))
    (comparison,) = cut_study(tmp_path / "few", 7).comparisons
    assert "no verdict yet: 3 of 8" in comparison.sentence


@pytest.mark.parametrize("command", ["compare", "sweep", "decompose", "train"])
@pytest.mark.parametrize(
    ("tokens", "word"),
    [
        (["--data.name", "folder:nowhere"], "train/ and val/"),
        (["--data.name", "mnist"], "digits"),
        (["images"], "--data.name folder:PATH"),
        (["--model.name", "resnet19"], "`model.name`"),
        (["nothing"], "'nothing'"),
        (["--train.batch_size", "5000"], "5000"),
        (["--sedes", "4"], "'--seed"),
        (["--data.size", "0"], "data.size"),
        (["digits", "images"], "one recipe"),
    ],
)
def test_one_message_and_nothing_is_started(command, tokens, word, tmp_path, capsys):
    assert powergrad(command, *tokens) == 2
    told = capsys.readouterr().err
    assert word in told
    assert told.count("powergrad: ") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("tokens", "recipe", "changes"),
    [
        ([], "noisy-digits", []),
        (["--data.name", "folder:x"], "images", ["--data.name", "folder:x"]),
        (["--data.name=folder:x", "seed=3"], "images", ["--data.name=folder:x", "seed=3"]),
        (["--data.name", "cifar10"], "cifar10", ["--data.name", "cifar10"]),
        (["--train.epochs", "3", "zeroing-out"], "zeroing-out", ["--train.epochs", "3"]),
        (["digits", "--data.name", "folder:x"], "digits", ["--data.name", "folder:x"]),
    ],
)
def test_recipe_follows_from_its_data(tokens, recipe, changes):
    assert recipe_and_overrides(None, tokens, compare) == (recipe, changes)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Real JPEGs, one of them corrupt, one TIFF, and one class on one side only."""
    folder = write_photos(tmp_path / "private" / "photos", train=24, val=12, side=24)
    path = folder / "train" / "a" / "003.jpg"
    path.write_bytes(path.read_bytes()[:300])
    with Image.open(folder / "train" / "a" / "004.jpg") as image:
        image.save(folder / "train" / "b" / "five.tif")
    shutil.rmtree(folder / "val" / "c")
    (folder / "train" / "b" / "notes.txt").write_text("")
    return folder


@pytest.mark.studies
def test_from_photographs_to_a_verdict_within_a_budget(photos, tmp_path, capfd):
    # So short that it is done long before the hour is over, on any machine.
    tokens = ["--seeds", "6", "--train.epochs", "2", "--train.batch_size", "16"]
    tokens += ["--arms", "baseline,pgt", "--data.size", "32"]
    command = ["compare", "--data.name", f"folder:{photos}", "--budget", "1h", *tokens]
    assert powergrad(*command) == 0
    told = capfd.readouterr()
    before, _, after = told.err.partition("Given up for --budget 1 h 00 min: nothing. In the trial")
    for words in (
        "73 training images, 24 test images, 3 classes",
        "Classes without test images (1 of 3): 'c'",
        "ignored (extension .txt): 1, 'train/b/notes.txt'",
    ):
        assert words in before
    assert "24 test images and 6 seeds, differences below" in after
    assert "Skipped" not in told.err  # not once for every run
    assert "Unreadable images, which were skipped: 1, such as 'train/a/003.jpg'." in told.out
    assert "Here pgt " in told.out
    assert "Next: " in told.out
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"compare-photos-\w+-1h", folder.name)
    results: Any = load_study(folder)
    assert results.study.base.model.norm == "batch"  # the recipe for photographs
    for name in ("report.html", "study.json", "study.csv"):
        assert "private" not in (folder / name).read_text()  # pages are shared
    # The same command chooses the same, and has nothing left to do.
    assert powergrad(*command) == 0
    told = capfd.readouterr()
    assert "In the trial, " in told.err
    assert "Timing" not in told.err
    assert "Reusing 12 finished runs" in told.err
    assert json.loads((folder / preflight.FILE).read_text())["seconds"] == 3600


def test_impossible_budgets_are_refused_before_torch_is_imported():
    code = """
import sys, powergrad_cli
assert powergrad_cli.main(["compare", "--budget", "5s"]) == 2
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    assert "Expected --budget to be at least 20 s, but got '5s'." in done.stderr


def test_budget_that_nothing_fits_is_refused(photos, monkeypatch, capsys):
    monkeypatch.setattr(preflight, "measure", lambda recipe, steps, tested: Timing(1, 1, 1, steps))
    tokens = ["--data.name", f"folder:{photos}", "--train.batch_size", "16", "--budget", "4m"]
    assert powergrad("compare", *tokens) == 2
    told = capsys.readouterr().err
    assert told.startswith("Checking the data and the network.\n")
    assert "Expected --budget to be at least " in told
    assert "(100 steps)" in told
    wanted = re.search(r"at least (\d+) min (\d+) s, but got 4 min 00 s", told)
    assert wanted
    # 12 runs, two at a time, of 100 steps, with their tests, start and files; a quarter to spare.
    least = math.ceil(12 / environment.usable_cores()) * (0.2 + 1 + 100 + 13) / 0.75
    assert least < 60 * int(wanted[1]) + int(wanted[2]) < 1.2 * (least + 20)


@pytest.mark.deep
def test_four_minutes_for_800_photographs(tmp_path):
    folder = write_photos(tmp_path / "photos", classes=10, train=64, val=16, side=380)
    command = [sys.executable, "-m", "powergrad", "compare", "--data.name", f"folder:{folder}"]
    began = time.monotonic()
    with subprocess.Popen([*command, "--budget", "4m"], stderr=subprocess.PIPE, text=True) as done:
        assert done.stderr
        first, until_first = done.stderr.readline(), time.monotonic() - began
        told = first + done.stderr.read()
    assert time.monotonic() - began < 240
    assert until_first < 2
    if done.returncode:
        assert "Expected --budget to be at least" in told
        assert time.monotonic() - began < 30
        return
    results = load_study(next((tmp_path / "runs").iterdir()))
    right = round(1.6 * sum(results.values("baseline").values()))  # of 160 images per run
    images = 160 * len(results.values("baseline"))
    assert stats.binomtest(right, images, 0.1, "greater").pvalue < 1e-6
    assert "160 test images" in notes(results)[1]


@pytest.mark.parametrize("command", ["compare", "train"])
def test_problems_of_the_images_stop_before_the_first_run(command, photos, tmp_path, capsys):
    shutil.rmtree(photos / "train" / "b")
    assert powergrad(command, "--data.name", f"folder:{photos}") == 2
    assert "'b'" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
