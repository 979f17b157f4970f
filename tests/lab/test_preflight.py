"""What is said and checked before the first run, what a budget chooses, and a new user's path."""

from __future__ import annotations

import errno
import io
import json
import math
import re
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from photos import write_photos
from PIL import Image

import powergrad_cli
from powergrad.lab import preflight
from powergrad.lab.cli import preflight as said
from powergrad.lab.cli.common import Declined, explain, recipe_and_overrides
from powergrad.lab.cli.studies import StudyOptions
from powergrad.lab.files import FileError
from powergrad.lab.jobs import JobError, RecipeJob, RecipeProgram
from powergrad.lab.jobs import queue as queues
from powergrad.lab.jobs.failures import describe_failures, is_disk_full
from powergrad.lab.jobs.queue import JobQueue
from powergrad.lab.preflight import Clock, Found, Plan, check_disk, check_recipe, fit_budget
from powergrad.lab.stats import DEFAULT, LEAST, Design, parse_runs
from powergrad.lab.study import Execution, Results, Study, StudyKind, run_study
from powergrad.lab.study.execute import Watching
from powergrad.lab.terminal import Watch
from powergrad.lab.trainer.recipe import Recipe, load_recipe
from powergrad.lab.trainer.timing import Stopwatch, Timing, measure
from powergrad.lab.trainer.training import train

SMALL = {
    "data.limit": 64,
    "model.width": 4,
    "train.batch_size": 32,
    "train.epochs": 2,
    "machine.threads": 1,
    "machine.keep_best": False,
}
TOKENS = [f"--{key}={json.dumps(value)}" for key, value in SMALL.items()]


def powergrad(*tokens: object) -> int:
    return powergrad_cli.main([str(token) for token in tokens])


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POWERGRAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def small() -> Recipe:
    return load_recipe("digits", SMALL)


# What a budget chooses ----------------------------------------------------------------------------

IMAGES = load_recipe("images", {"data.name": "folder:x"})
FOLDER: Any = SimpleNamespace()  # the scan of a folder, of which nothing is asked
FOUND = Found(FOLDER, 5000, 1000, 10, 64, 700_000, 16)
ARMS: dict[str, dict[str, Any]] = {
    "baseline": {},
    "pgt": {"loss.alpha": 0.25},
    "agc": {"clip.agc": 0.01},
    "head": {"optimizer.head.lr": 0.1},
}


def machine(step: float) -> Clock:
    """A machine whose steps take `step` seconds at 64 pixels and width 16, and less for less."""

    def time_of(recipe: Recipe) -> Timing:
        size, width = recipe.data.size or 224, recipe.model.width or 64
        return Timing(0.1, step * (size / 64) ** 2 * (width / 16), 10 * step, 78)

    return Clock(time_of)


def fit(step: float, budget: float, **options: Any) -> tuple[preflight.Budget, Plan]:
    plan = Plan(IMAGES, ARMS, options.pop("design", DEFAULT), workers=2)
    return fit_budget(plan, FOUND, machine(step), budget=budget, left=budget, **options), plan


@given(
    step=st.floats(1e-4, 1.0),
    budget=st.floats(10, 1e5),
    given=st.sets(st.sampled_from(["data.size", "model.width", "train.epochs"])),
)
def test_what_a_budget_chooses_fits(step: float, budget: float, given: set[str]) -> None:
    smallest = {"data.size": 32, "model.width": 8, "train.epochs": 3}
    changes = {key: value for key, value in smallest.items() if key not in given}
    least = machine(step).run_seconds(plan_of(LEAST), changes) * 4 * LEAST / 2
    if least > 0.9 * budget:
        with pytest.raises(ValueError, match="Expected --budget to be at least"):
            fit(step, budget, given=given)
        return
    chosen, plan = fit(step, budget, given=given)
    assert not given & chosen.changes.keys()
    run = machine(step).run_seconds(plan, chosen.changes)
    assert chosen.run_seconds == pytest.approx(run)
    design = Design(parse_runs(chosen.seeds))
    # Every look that is planned fits, and the first gives a verdict.
    assert design.looks[0] >= LEAST
    assert math.ceil(4 * design.last / 2) * run <= budget
    # Nothing is given away: a recipe is kept, or eight seeds of it would not have fitted.
    if chosen.changes:
        assert 16 * machine(step).run_seconds(plan, {}) > 0.9 * budget


def plan_of(units: int) -> Plan:
    return Plan(IMAGES, ARMS, Design((units,)), workers=2)


@pytest.mark.parametrize(
    ("budget", "changes", "seeds"),
    [
        (1e5, {}, "8..24"),  # room for all
        (15 * 60, {}, "8"),  # 16 rounds of 50 s: eight seeds of the recipe
        (10 * 60, {"train.epochs": 6}, "8"),  # rather than smaller images
        (5 * 60, {"data.size": 48, "train.epochs": 5}, "8"),
        (70, {"data.size": 32, "model.width": 8, "train.epochs": 3}, "8"),
        (57, {"data.size": 32, "model.width": 8, "train.epochs": 4}, "6"),
    ],
)
def test_the_recipe_is_kept_as_far_as_possible(
    budget: float, changes: dict[str, Any], seeds: str
) -> None:
    chosen, _ = fit(0.06, budget)
    assert (chosen.changes, chosen.seeds) == (changes, seeds)


def test_given_seeds_stay_and_their_first_look_fits() -> None:
    chosen, plan = fit(0.06, 600, design=Design((12, 24)), seeds_given=True)
    assert chosen.seeds == ""
    assert plan.seconds(12, chosen.run_seconds) <= 600
    with pytest.raises(ValueError, match=r"Expected --budget to be at least .* for 48 runs"):
        fit(0.06, 60, design=Design((12, 24)), seeds_given=True)


def test_runs_of_a_tuning_and_of_repeats_are_counted() -> None:
    plan = Plan(IMAGES, ARMS, DEFAULT, workers=3, extra=80, done=5)
    assert (plan.fewest, plan.most) == (80 + 32 - 5, 80 + 96 - 5)
    assert plan.seconds(8, 2.0) == 2 * math.ceil(107 / 3)
    assert Plan(IMAGES, ARMS, Design((8,)), per_unit=9).most == 8 * 9 * 4


def test_steps_of_equal_cost_are_measured_once() -> None:
    measured = []
    clock = Clock(lambda recipe: measured.append(recipe) or Timing(0, 1.0, 0, 10))
    clock.run_seconds(plan_of(8), {})
    assert [recipe.clip.agc for recipe in measured] == [None, 0.01]
    assert clock.run_seconds(plan_of(8), {"train.epochs": 3}) == pytest.approx(30.2)
    assert len(measured) == 2


# What is measured ---------------------------------------------------------------------------------


def test_a_few_steps_are_measured(small: Recipe) -> None:
    timing = measure(small)
    assert timing.steps == 2
    assert 0 < timing.step < 10
    assert timing.seconds(small) == pytest.approx(
        0.2 + timing.start + 4 * timing.step + timing.test
    )
    # A step that takes long is measured on a part of its batch.
    whole = measure(small.override({"data.limit": 1024, "train.batch_size": 1024}))
    assert whole.steps == 1
    assert whole.step > timing.step


@pytest.mark.studies
def test_processes_measure_together_and_say_what_is_wrong(small: Recipe) -> None:
    with Stopwatch(2) as stopwatch:
        assert stopwatch.boot > 0
        assert stopwatch.time(small).steps == 2
        with pytest.raises(ValueError, match="resnet19"):
            stopwatch.time(small.override({"model.name": "resnet19"}))
        members = stopwatch.members
    assert all(member.poll() is not None for member in members)


def test_the_disk_space_of_a_run_is_foreseen(
    small: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small.override({"model.width": 32, "machine.checkpoint_steps": 1, "monitor.every": 1})
    train(recipe, tmp_path / "run")
    written = sum(path.stat().st_size for path in (tmp_path / "run").rglob("*") if path.is_file())
    needed = check_recipe(recipe).run_bytes(recipe)
    assert written / 2 < needed < 2 * written
    free = SimpleNamespace(free=3 * needed)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    check_disk(tmp_path / "not" / "yet", 3 * needed, 3)
    with pytest.raises(ValueError, match=r"MB of disk space for 4 runs in .*, but got .* MB free"):
        check_disk(tmp_path / "not" / "yet", 4 * needed, 4)


# What fails before the first run, once ------------------------------------------------------------


@pytest.mark.parametrize("command", ["compare", "sweep", "decompose", "train"])
@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--data.name", "folder:nowhere"], "There is no folder with train/ and val/"),
        (["--data.name", "mnist"], "expected digits, for which this recipe is made"),
        (["--data.name", "mnist", "--data.only", "any"], "Expected `--data.name` to be digits,"),
        (["--model.name", "resnet19"], "Expected `--model.name` to be one of"),
        (["nothing"], "Expected the name of a recipe or a YAML file, but got 'nothing'"),
        (["--train.batch_size", "5000"], "5000"),
        (["--sedes", "4"], "but got '--sedes'; did you mean '--seed"),
        (["--data.size", "0"], "--data.size: expected greater than or equal to 1, but got 0"),
        (["digits", "images"], "Expected one recipe"),
    ],
)
def test_one_message_and_nothing_is_started(
    command: str,
    tokens: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert powergrad(command, *tokens) == 2
    told = capsys.readouterr().err
    assert message in told
    assert sum(map(told.count, ("Expected", "Found an error", "There is no"))) == 1
    assert not (tmp_path / "runs").exists()


def test_a_full_disk_is_foreseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert powergrad("compare", *TOKENS) == 2
    assert re.search(
        r"MB of disk space for 32 runs in 'runs/compare-digits-\w+', but got 1.0 kB free",
        capsys.readouterr().err,
    )
    assert not (tmp_path / "runs").exists()


def test_arms_with_an_unknown_network_fail_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert powergrad("compare", *TOKENS, "--arm", "other: model.name=resnet19") == 2
    assert "Expected `model.name` to be one of" in capsys.readouterr().err


# The command line ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "recipe", "changes"),
    [
        ([], "digits", []),
        (["--data.name", "folder:x"], "images", ["--data.name", "folder:x"]),
        (["--data.name=folder:x", "seed=3"], "images", ["--data.name=folder:x", "seed=3"]),
        (["--data.name", "cifar10"], "cifar10", ["--data.name", "cifar10"]),
        (["--train.epochs", "3", "zeroing-out"], "zeroing-out", ["--train.epochs", "3"]),
        (["digits", "--data.name", "folder:x"], "digits", ["--data.name", "folder:x"]),
    ],
)
def test_keys_need_no_recipe(tokens: list[str], recipe: str, changes: list[str]) -> None:
    first, *others = tokens or [None]
    assert recipe_and_overrides(first, others) == (recipe, changes)  # pyright: ignore


@pytest.mark.parametrize("command", ["compare", "sweep", "decompose", "train", "paper run"])
def test_keys_are_shown_with_allowed_values(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert powergrad(*command.split(), "--keys") == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "batch or group or none" in lines["--model.norm"]
    assert "a number from 0 up to 1" in lines["--loss.alpha"]
    assert "a whole number from 1 or null" in lines["--data.size"]
    assert "true or false" in lines["--data.flip"]
    assert "2 of: a number above 0" in lines["--data.scale"]


def test_an_error_names_the_option_that_was_typed() -> None:
    error = ValueError("Expected `tune_seeds` and `margin`; data.size: expected 1; no data.sizes:")
    typed = ["--tune-seeds", "0", "--data.size=0"]
    assert explain(error, typed) == (
        "Expected `--tune-seeds` and `margin`; --data.size: expected 1; no data.sizes:"
    )
    assert explain(KeyError("x")) is None


@pytest.mark.studies
def test_a_second_start_lists_what_it_reuses(capsys: pytest.CaptureFixture[str]) -> None:
    tokens = ["compare", *TOKENS, "--arms", "baseline,pgt", "--name", "x", "--workers", "1"]
    assert powergrad(*tokens, "--seeds", "2") == 0
    assert "Reusing" not in capsys.readouterr().err
    assert powergrad(*tokens, "--seeds", "3") == 0
    told = capsys.readouterr().err
    assert "Reusing 4 finished runs in runs/x: baseline seeds 0-1; pgt seeds 0-1." in told
    assert "2 runs of a few seconds each" in told
    # What it holds, without a page.
    assert powergrad("inspect", "runs/x") == 0
    shown = capsys.readouterr().out
    assert "compare of resnet8 on digits, 3 seeds per arm" in shown
    assert re.search(r"pgt +3 +0-2 ", shown)
    assert powergrad("inspect", "runs/x", "--csv", "units.csv") == 2
    # The same from its table alone.
    tokens[tokens.index("x")] = "y"
    assert powergrad(*tokens, "--seeds", "3", "--reuse", "runs/x/study.csv") == 0
    told = capsys.readouterr().err
    assert "Reusing 6 finished runs: baseline seeds 0-2; pgt seeds 0-2." in told
    assert "of a few seconds" not in told


def test_fresh_moves_an_earlier_start_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "x"
    assert powergrad("train", *TOKENS, "--folder", folder) == 0
    assert powergrad("train", *TOKENS, "--folder", folder, "--fresh") == 0
    (aside,) = folder.parent.glob("x-*")
    assert f"{folder} was moved to {aside} and is not used" in capsys.readouterr().err
    results = [json.loads((each / "result.json").read_text()) for each in (folder, aside)]
    assert results[0]["metrics"]["seconds"] != results[1]["metrics"]["seconds"]  # it was done again
    assert powergrad("train", *TOKENS, "--folder", folder, "--fresh", "--resume") == 2
    shutil.rmtree(aside)
    # A study as well: it has nothing left to reuse.
    study = Study(StudyKind.COMPARE, RecipeProgram(load_recipe("digits", SMALL)), ARMS, DEFAULT)
    StudyOptions(name="x", fresh=True).prepare(study)
    assert not folder.exists()
    assert [path.name[:2] for path in folder.parent.iterdir()] == ["x-"]
    with pytest.raises(ValueError, match="Expected no --fresh with --storage"):
        StudyOptions(fresh=True, storage="postgresql://x").prepare(study)


# The time -----------------------------------------------------------------------------------------


class SlowMachine:
    """A stopwatch that has measured long steps, which depend much on the width."""

    boot = 1.0

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def __enter__(self) -> SlowMachine:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def time(self, recipe: Recipe) -> Timing:
        return Timing(0.1, 10 * ((recipe.model.width or 16) / 16) ** 6, 0.1, 45)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(said, "Stopwatch", SlowMachine)
    monkeypatch.setattr(preflight, "SHORT_WORK", 0.0)


@pytest.mark.usefixtures("slow")
def test_a_long_study_is_announced_and_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for answer in ("n", ""):  # the last is the end of the input
        told = Terminal()
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        monkeypatch.setattr(sys, "stderr", told)
        assert powergrad("compare", "--workers", "2") == 1
        text = told.getvalue()
        assert "32 to 96 runs, about 15 min 08 s to 45 min 24 s with 2 at a time" in text
        assert "[y/N]" in text
        assert "nothing was started" in text
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("slow")
def test_options_are_named_that_fit_ten_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Terminal()
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    monkeypatch.setattr(sys, "stderr", told)
    assert powergrad("compare", "--workers", "2") == 1
    (options,) = re.findall(r"These options fit into ten minutes: (.*)", told.getvalue())
    assert options == "--train.epochs 4 --seeds 8"
    four, five = (load_recipe("digits", {"train.epochs": epochs}) for epochs in (4, 5))
    seconds = [16 * SlowMachine(2).time(recipe).seconds(recipe) for recipe in (four, five)]
    assert seconds[0] < 0.9 * (600 - 8) < seconds[1]  # 8 seconds are for starting, and the page


@pytest.mark.parametrize(
    ("is_terminal", "answer", "asks"), [(True, "y\n", True), (False, "", False)]
)
def test_a_question_needs_somebody_to_answer(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, answer: str, asks: bool
) -> None:
    told = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stdin", Terminal(answer) if is_terminal else io.StringIO(answer))
    monkeypatch.setattr(sys, "stderr", told)
    said._ask("Start?")
    assert ("[y/N]" in told.getvalue()) == asks
    if is_terminal:
        monkeypatch.setattr(sys, "stdin", Terminal("no\n"))
        with pytest.raises(Declined):
            said._ask("Start?")


def test_a_short_recipe_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(said, "Stopwatch", None)  # would fail
    recipe = load_recipe("digits")
    study = Study(StudyKind.COMPARE, RecipeProgram(recipe), ARMS, DEFAULT)
    ready = said.prepare(study, Path("x"), workers=2)
    assert (ready.changes, ready.deadline) == ({}, math.inf)


# Runs that fail, and time that is over ------------------------------------------------------------


def jobs_of(recipe: Recipe, count: int) -> list[RecipeJob]:
    return [RecipeJob(f"a-seed{i}", recipe.override({"seed": i})) for i in range(count)]


@pytest.mark.studies
def test_the_same_failure_is_told_once(small: Recipe, tmp_path: Path) -> None:
    bad = small.override({"model.name": "resnet19"})
    with (
        JobQueue(tmp_path / "study", study="x", workers=2) as queue,
        pytest.raises(
            JobError, match=r"The first \d of 32 runs all failed in the same way"
        ) as told,
    ):
        queue.run(jobs_of(bad, 32))
    assert str(told.value).count("resnet19") == 1
    assert len(list((tmp_path / "study").glob("a-seed*"))) < 32


def test_failures_are_listed_by_reason() -> None:
    failed = {"a": "no room in 'a'", "b": "no room in 'b'", "c": "no memory"}
    assert describe_failures(failed, 9).splitlines() == [
        "3 of 9 runs failed:",
        "  a and 1 more: no room in 'a'",
        "  c: no memory",
    ]


def test_a_full_disk_is_called_so(
    small: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = FileError("Expected room for 'x', but the disk is full; it is intact.")
    for error, expected in (
        (OSError(errno.ENOSPC, "no space"), True),
        (full, True),
        (RuntimeError("(sqlite3.OperationalError) database or disk is full"), True),
        (OSError(errno.EACCES, "no"), False),
        (None, False),
    ):
        assert is_disk_full(error) == expected
    chained = RuntimeError("while closing")
    chained.__context__ = OSError(errno.ENOSPC, "no space")
    assert is_disk_full(chained)

    popen = queues.subprocess.Popen

    def dies(command: Any, **options: Any) -> Any:
        return popen([sys.executable, "-c", "raise SystemExit(28)"], **options)

    monkeypatch.setattr(queues.subprocess, "Popen", dies)
    with (
        pytest.raises(JobError, match=r"The disk is full: .*study.*Finished runs are kept"),
        JobQueue(tmp_path / "study", study="x", workers=2) as queue,
    ):
        queue.run(jobs_of(small, 4))
    # What this process cannot write itself.
    with (
        pytest.raises(JobError, match="The disk is full"),
        JobQueue(tmp_path / "other", study="x", workers=1),
    ):
        raise OSError(errno.ENOSPC, "no space")


@pytest.mark.studies
def test_no_run_is_started_that_would_end_too_late(small: Recipe, tmp_path: Path) -> None:
    deadline = time.monotonic() + 60
    late = JobQueue(tmp_path / "s", study="x", workers=1, deadline=deadline, run_seconds=61)
    with late:
        assert late.run(jobs_of(small, 3)) == {}
    assert not list((tmp_path / "s").glob("a-seed*"))
    with JobQueue(tmp_path / "s", study="x", workers=1, deadline=deadline) as queue:
        queue._is_too_late = lambda queue: len(list((tmp_path / "s").glob("*/result.json"))) >= 2  # type: ignore[method-assign]
        finished = queue.run(jobs_of(small, 12))
    assert 2 <= len(finished) < 12
    with JobQueue(tmp_path / "s", study="x", workers=1) as queue:  # a second start goes on
        assert len(queue.run(jobs_of(small, 12))) == 12


class Pretending(JobQueue):
    """A queue that has time for some runs, and makes up their results."""

    most = 0
    gain, noise = 5.0, 0.1

    def run(self, jobs: Any, watch: Any = None) -> dict[str, dict[str, Any]]:
        done = {}
        for job in jobs[: max(0, self.most)]:
            gain = self.gain if job.recipe.loss.alpha < 1 else 0.0
            accuracy = 90 + gain + self.noise * (job.recipe.seed * 7 % 5)
            done[job.name] = {"test_accuracy": accuracy, "diverged": False}
        type(self).most -= len(done)
        return done


def cut_study(
    small: Recipe,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    most: int,
    seeds: str = "8..24",
    others: tuple[float, ...] = (),
) -> Results:
    monkeypatch.setattr(Pretending, "most", most)
    monkeypatch.setattr("powergrad.lab.study.execute.JobQueue", Pretending)
    changes = {"baseline": {}, "pgt": {"loss.alpha": 0.25}}
    changes |= {f"pgt({alpha})": {"loss.alpha": alpha} for alpha in others}
    study = Study(StudyKind.COMPARE, RecipeProgram(small), changes, Design(parse_runs(seeds)))
    watching: Watching = Watch
    return run_study(study, folder, Execution(1, watching))


def test_what_is_finished_is_judged_and_the_rest_is_stated(
    small: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = cut_study(small, tmp_path, monkeypatch, 13)  # 7 of baseline, 6 of pgt
    assert results.study is not None
    assert results.study.design.looks == (6, *DEFAULT.looks)
    (comparison,) = results.comparisons
    assert (comparison.n, comparison.verdict) == (6, "better")
    # The error that this look spends is its share: 6 of 24.
    assert results.study.design.nominal(0, 1) == pytest.approx(0.05 * 6 / 24)
    (note,) = results.remarks
    assert "1 seed of baseline, 2 seeds of pgt could not be run" in note
    assert note in results.notes()
    results.save(tmp_path)
    assert list(Results.load(tmp_path / "study.json").remarks) == [note]


def test_an_arm_that_ran_out_of_time_is_not_called_settled(
    small: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pretending, "gain", 0.0)
    monkeypatch.setattr(Pretending, "noise", 2.0)
    results = cut_study(small, tmp_path, monkeypatch, 23, "8", others=(0.9,))  # 8, 8 and 7
    found = [(comparison.n, comparison.verdict) for comparison in results.comparisons]
    assert found == [(8, "not settled"), (7, "not settled")]
    assert not any("An arm stops" in note for note in results.notes())


def test_a_cut_study_goes_on_as_planned(
    small: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_study(small, tmp_path, monkeypatch, 13, "8").save(tmp_path)
    results = cut_study(small, tmp_path, monkeypatch, 99, "8")
    assert results.study is not None
    assert results.study.design.looks == (6, 8)
    assert not any("without planning it" in note for note in results.notes())
    assert results.remarks == ()


def test_too_few_runs_for_a_verdict_are_said(
    small: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = cut_study(small, tmp_path, monkeypatch, 7)
    (comparison,) = results.comparisons
    assert comparison.sentence == "pgt has no verdict yet: 3 of 8 runs are finished."


# A new user's path --------------------------------------------------------------------------------


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
def test_from_a_folder_of_photos_to_a_verdict_and_a_page(
    photos: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # So short that it is done long before five minutes are over, on any machine.
    tokens = ["--seeds", "6", "--train.epochs", "2", "--train.batch_size", "16"]
    tokens += ["--arms", "baseline,pgt", "--data.size", "32"]
    command = ["compare", "--data.name", f"folder:{photos}", "--budget", "5m", *tokens]
    began = time.monotonic()
    assert powergrad(*command) == 0
    assert time.monotonic() - began < 300
    told = capfd.readouterr()
    before, _, after = told.err.partition("--budget 5 min 00 s chose")
    for words in (
        "73 training images, 24 test images, 3 classes",
        "95 JPEG, 1 TIFF; 24x24 to",
        "'train/a/003.jpg': ",
        "Classes without test images (1 of 3): 'c'",
        "ignored (extension .txt): 1, 'train/b/notes.txt'",
    ):
        assert words in before
    assert "12 runs of about" in after
    assert "Skipped" not in told.err  # not once more for every run
    assert "Here pgt " in told.out
    assert "Next: " in told.out
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("compare-photos-")
    assert folder.name.endswith("-5m")
    study = Study.load(folder)
    assert study.base.model.norm == "batch"  # the recipe for photographs
    for name in ("report.html", "study.json", "study.csv"):
        text = (folder / name).read_text()
        assert "private" not in text  # pages are shared
    page = (folder / "report.html").read_text()
    assert "resnet18 on photos" in page
    assert "folder:photos" in page
    # The same command chooses the same, and has nothing left to do.
    assert powergrad(*command) == 0
    told = capfd.readouterr()
    assert "--budget 5 min 00 s: as before" in told.err
    assert "Reusing 12 finished runs" in told.err


@pytest.mark.deep
def test_five_minutes_with_nothing_else_given(
    photos: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    assert powergrad("compare", "--data.name", f"folder:{photos}", "--budget", "5m") == 0
    assert time.monotonic() - began < 310  # the last run may be slower than those before it
    told = capfd.readouterr()
    before, _, after = told.err.partition("--budget 5 min 00 s chose")
    assert "'train/a/003.jpg': " in before
    assert "Classes without test images (1 of 3): 'c'" in before
    assert re.search(r"\d+ runs of about", after)
    for arm in ("pgt", "head-lr", "agc+pgt"):
        assert re.search(rf"^ {re.escape(arm)} +[6-9]", told.out, re.MULTILINE)  # has a verdict
    assert "Next: " in told.out
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize("command", ["compare", "train"])
def test_problems_stop_before_the_first_run(
    command: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(photos / "train" / "b")
    tokens = [command, "--data.name", f"folder:{photos}", "--data.bad_images", "refuse"]
    assert powergrad(*tokens) == 2
    told = capsys.readouterr().err
    assert "classes of" in told
    assert "got also 'b'" in told
    assert "1 unreadable images" in told
    assert "'train/a/003.jpg'" in told
    assert not (tmp_path / "runs").exists()
