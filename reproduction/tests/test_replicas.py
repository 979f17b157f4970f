"""From a plan to runs, results and figures."""

import itertools
import json
import math
import re
import shutil
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch
from PIL import Image

import powergrad
import reproduction.__main__ as commands
from powergrad.lab.study.arms import arms_of
from powergrad.lab.trainer.networks import create_model
from powergrad.lab.trainer.recipe import Recipe, load_recipe
from powergrad.lab.trainer.run_folder import RunError
from powergrad.lab.trainer.session import learning_rate_at
from powergrad.lab.trainer.training import train
from powergrad.lab.words import slug
from powergrad.monitor import Recording, census
from reproduction import drawings
from reproduction.__main__ import main
from reproduction.collection import NORMS_BYTES, collect, record, thinned_norms
from reproduction.evidence import RESULTS, Evidence, KeptRun, MissingRunsError, Norms
from reproduction.published import Use, changes_of, load_paper
from reproduction.replicas import LEAST, decay_exponent, plan_replica

PAPER = load_paper()
TINY = {"data.limit": 160, "model.width": 2, "machine.threads": 1, "train.epochs": 2}
TINY_TOKENS = [f"--{key}={value}" for key, value in TINY.items()]


def about_of(trial):
    """What was kept of a study beside its rows."""
    return json.loads(trial.stem.with_name(f"{trial.name}.json").read_text())


# Plans --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "decay"), [(1, 1), (0.5, 1), (1, 0.25), (4, 0.25)])
def test_the_decay_exponent_is_what_sgd_does_to_a_filter_without_gradient(rate, decay):
    factors = {"backbone.lr": rate, "backbone.weight_decay": decay, "head.lr": 3}
    changes = {f"optimizer.{key}": value for key, value in factors.items()}
    recipe = Recipe().override({"train.epochs": 40, "train.batch_size": 32, **changes})
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    sgd = torch.optim.SGD([weight], lr=1, momentum=0.9, nesterov=True, weight_decay=5e-4 * decay)
    for step in range(40 * 50):
        sgd.param_groups[0]["lr"] = rate * learning_rate_at(
            step / 50, recipe.schedule, recipe.optimizer.lr, recipe.train.epochs
        )
        weight.grad = torch.zeros_like(weight)
        sgd.step()
    # Momentum remembers the weight of some 9 steps ago, larger by 9 * 0.002 at the peak rate.
    assert -math.log(weight.item()) == pytest.approx(decay_exponent(recipe, 50 * 32), rel=0.018)


@pytest.mark.parametrize("item", ["T1.6", "T1.7", "T2.2", "T2.10", "T3.8", "E60", "G20"])
def test_every_arm_of_a_replica_passes_7_and_differs_as_the_rows_do(item):
    experiment = PAPER.find(item)
    rows = experiment.with_baseline(item)
    replica = plan_replica(rows, "digits", {})
    assert min(replica.exponents.values()) >= LEAST == 7
    assert max(replica.exponents.values()) < 13
    base = rows[0].recipe
    for row in rows:
        changed = changes_of(row.recipe, base)
        if "clip.agc" in changed:  # its ratio to the decay stays
            decay = replica.base.optimizer.weight_decay / base.optimizer.weight_decay
            changed["clip.agc"] = pytest.approx(decay * changed["clip.agc"])
        if "train.epochs" in changed:  # 60 of 100, in whole epochs
            changed["train.epochs"] = pytest.approx(0.6 * replica.base.train.epochs, abs=0.5)
        assert replica.arms[row.arm] == changed
    words = replica.describe()
    assert "differs from the paper in the data: 1,438 examples (digits)" in words
    assert "WARNING" not in words


def test_batches_keep_their_ratios_and_the_schedule_its_parts():
    sizes, rates = [], []
    for item in ("T2-1024", "T2-512", "T2-256"):
        base = plan_replica(PAPER.find(item).rows[:1], "digits", {}).base
        sizes.append(base.train.batch_size)
        rates.append(base.optimizer.lr)
        warm_up = base.schedule.warmup_epochs / base.train.epochs
        assert warm_up == pytest.approx(0.05, abs=0.001)
        assert base.monitor.every > 0
    assert sizes == [128, 64, 32]
    assert rates == pytest.approx([0.08, 0.04, 0.02])


def test_a_replica_says_in_what_it_differs_and_that_it_is_too_short():
    replica = plan_replica(PAPER.find("E60").rows, "digits", {"train.epochs": 4})
    said = replica.describe()
    for words in ("model.width: 8", "train.batch_size: 128, not 1024", "train.epochs: 4, not 100"):
        assert f"  differs from the paper in {words}\n" in said
    assert "model.name" not in said
    assert "WARNING" in said


# Commands -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("item", ["T2-256", "T3-cosine", "E60", "G18"])
def test_a_replica_is_a_command_of_the_package(tmp_path, monkeypatch, item):
    """Its recipe and its arms reach ``powergrad compare`` as they were planned."""
    received = []
    monkeypatch.setattr(commands, "powergrad", lambda tokens: received.extend(tokens) or 0)
    tune = ["--tune", "lr=0.1,0.2"]
    options = ["--scale", "small", "--out", str(tmp_path), *TINY_TOKENS, *tune, "model.stem=small"]
    assert main(["run", item, *options]) == 0
    experiment = PAPER.find(item)
    replica = plan_replica(experiment.rows, "digits", {**TINY, "model.stem": "small"})
    command, recipe = received[:2]
    assert command == "compare"
    assert load_recipe(recipe) == replica.base
    arms = [text for flag, text in itertools.pairwise(received) if flag in ("--arms", "--arm")]
    parsed = list(arms_of(arms, replica.base, [0.25]).values())
    assert parsed == [pytest.approx(dict(changes)) for changes in replica.arms.values()]
    rest = received[received.index("--seeds") :]
    assert rest == ["--seeds", "8", *tune]


@pytest.mark.parametrize(
    ("tokens", "named"),
    [
        (["T2.8", "--scale", "small", "--arm", "AGC"], r"--arm .*\(baseline, PGT\)"),
        (["T2.8", "--data", "folder:x", "--arm", "AGC"], r"--arm .*\(PGT\)"),
        (["T1.7", "--scale", "small", "loss.form=as_published"], "precision"),
        (["T1.7", "--data", "/nowhere"], "--data"),
        (["T1.4"], "--data"),
        (["T1.7", "--scale", "small", "--data", "folder:/nowhere"], "nowhere"),
        (["T1.7", "--scale", "small", "--repeats", "8"], "--repeats"),
        (["F7"], "figure F7"),
        (["T1.8"], "did you mean"),
    ],
)
def test_run_names_a_bad_argument_before_it_trains(tmp_path, capsys, tokens, named):
    assert main(["run", *tokens, "--plan", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert re.search(named, said), said
    assert not list(tmp_path.iterdir())


def test_run_plans_both_scales(tmp_path, capsys):
    for tokens, words in {
        ("T2.8", "--scale", "small"): ["PGT: 7.", "--arm 'PGT: loss.alpha=0.25'", "--seeds 8"],
        ("T1.4", "--data", "folder:/x", "--arm", "PGT"): ["T1.4 PGT", "50 on V100 16GB"],
    }.items():
        assert main(["run", *tokens, "--plan", "--out", str(tmp_path)]) == 0
        printed = capsys.readouterr().out
        assert all(text in printed for text in words)
    assert not list(tmp_path.iterdir())


@pytest.mark.studies
def test_run_tunes_and_trains_a_replica_and_collects_it(tmp_path):
    options = ["--seeds", "2", "--workers", "1", "--out", str(tmp_path / "runs")]
    tune = ["--tune", "lr=0.01,0.02", "--tune-seeds", "1", "--metric", "nll"]
    results = ["--collect", "--results", str(tmp_path / "results")]
    assert main(["run", "T2.2", "--scale", "small", *TINY_TOKENS, *tune, *options, *results]) == 0
    (trial,) = Evidence(tmp_path / "results").of(Use("T2-1024"))
    assert [arm.name for arm in trial.arms] == ["baseline", "PGT"]
    assert [len(arm.rows) for arm in trial.arms] == [2, 2]
    about = about_of(trial)
    for arm in trial.arms:
        choice = about["tuning"]["repeats"][0][arm.name]
        means = [tried["mean"] for tried in choice["trials"]]
        assert means[choice["chosen"]] == min(means)  # of NLL
        chosen = choice["trials"][choice["chosen"]]["changes"]["optimizer.lr"]
        assert arm.recipe.optimizer.lr == chosen
        assert (arm.is_tuned, arm.at_edge) == (True, True)
        assert about["exponents"][arm.name] == pytest.approx(arm.exponent)


def test_run_at_full_scale_trains_the_rows_own_recipe(tmp_path):
    """On digits in the place of ImageNet, and short."""
    tiny = ["--train.epochs", "2", "--train.batch_size", "32", "--schedule.warmup_epochs", "1"]
    tiny += ["--data.limit", "64", "--model.width", "2", "--train.precision", "float32"]
    tiny += ["--machine.threads", "1", "--model.stem", "small"]
    where = ["--out", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    assert main(["run", "T2.2", *tiny, "--data", "digits", "--collect", *where]) == 0
    (trial,) = Evidence(tmp_path / "results").of(Use("T2-1024"))
    assert [arm.name for arm in trial.arms] == ["PGT"]
    assert Evidence(tmp_path / "results").trials == []  # it lacks the baseline
    assert (trial.recipe.loss.alpha, trial.recipe.optimizer.lr) == (0.92, 0.4)
    about = about_of(trial)
    assert about["scale"] == "full"
    # What is not the paper's is listed: other data, and every override that changes the training.
    assert about["lost"] == [
        "the data: 64 examples (digits)",
        "data.limit: 64",
        "model.width: 2",
        "model.stem: small",
        "schedule.warmup_epochs: 1.0, not 5.0",
        "train.epochs: 2, not 100",
        "train.batch_size: 32, not 1024",
        "train.precision: float32, not float16",
    ]


# Results and figures ------------------------------------------------------------------------------

NEEDED = {
    "T1.7": (["baseline", "PGT"], (0, 1)),
    "T2-256": (["baseline", "PGT", "AGC + PGT"], (0,)),
    "T2-1024": (["baseline"], (0,)),
    "G18": (["alpha=1", "alpha=0.25"], (0,)),
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A folder ``results`` with experiments that figures need, in tiny runs."""
    where = tmp_path_factory.mktemp("measured")
    for item, (arms, seeds) in NEEDED.items():
        experiment, folder = PAPER.find(item), where / "runs" / item
        rows = [row for row in experiment.rows if row.arm in arms]
        replica = plan_replica(rows, "digits", TINY)
        for arm, recipe in replica.recipes.items():
            for seed in seeds:
                train(recipe.override({"seed": seed}), folder / f"{slug(arm)}-seed{seed}-x")
        record(folder, experiment, "small", f"run {item}")
        collect(folder, where / "results" / "paper")
    return where


def test_collected_files_are_small_and_hold_every_run(measured):
    files = list((measured / "results" / "paper").iterdir())
    assert sum(file.stat().st_size for file in files) < 2_000_000
    evidence = Evidence(measured / "results")
    for item, (arms, seeds) in NEEDED.items():
        (trial,) = evidence.of(Use(item))
        assert [arm.name for arm in trial.arms] == arms
        assert [row.seed for arm in trial.arms for row in arm.rows] == [*seeds] * len(arms)
    curve = evidence.kept_run(Use("T1.7", "PGT")).curve()
    assert curve["epoch"].tolist() == [1, 2]
    assert np.isfinite(curve["test_accuracy"]).all()


def test_collected_norms_and_fates_are_those_of_the_run(measured):
    evidence = Evidence(measured / "results")
    norms = evidence.kept_run(Use("T2-256", "PGT")).norms()
    folder = measured / "runs" / "T2-256" / "PGT-seed0-x"
    recording = Recording(folder)
    assert len(norms.layers) == 21 + 1  # the head, and the features
    for number, quantity, layer in ((2, "weight", 2), (20, "weight", 20), (21, "feature", None)):
        steps, values = recording.read(number, quantity)
        assert norms.steps[-1] == steps[-1]
        np.testing.assert_allclose(norms.layers[layer][-1], values[-1].numpy(), rtol=1e-3)
    (trial,) = evidence.of(Use("T2-256"))
    (row,) = trial.results.of_arm("PGT")
    counts = census(folder)
    layers = [layer for layer in counts.layers if layer.kind in ("Conv2d", "Linear")]
    assert row.value("filters") == sum(layer.units for layer in layers)
    weights = [event for event in counts.events if event.quantity == "weight"]
    assert row.value("died") == len({(e.layer, e.unit) for e in weights if e.what == "died"})


def test_long_recordings_are_thinned_to_a_small_file(tmp_path):
    model = create_model("resnet18", num_classes=1000, norm="none")
    with powergrad.FilterMonitor(model, tmp_path / "norms", every=1) as monitor:
        for step in range(300):
            monitor.step(step)
    arrays = thinned_norms(Recording(tmp_path))
    assert (arrays["steps"][0], arrays["steps"][-1]) == (0, 299)
    sizes = {name: array.nbytes for name, array in arrays.items() if name.startswith("layer1")}
    assert 0 < sum(sizes.values()) <= NORMS_BYTES


def test_a_folder_holds_one_experiment_and_its_commands(measured, tmp_path):
    folder = shutil.copytree(measured / "runs" / "T2-1024", tmp_path / "runs")
    record(folder, PAPER.find("T2-1024"), "small", "another command")
    collect(folder, tmp_path / "results" / "paper", "again")
    about = json.loads((tmp_path / "results" / "paper" / "T2-1024-again.json").read_text())
    assert about["commands"] == ["run T2-1024", "another command"]
    with pytest.raises(RunError, match="T2-1024"):
        record(folder, PAPER.find("T1.7"), "small", "x")
    with pytest.raises(RunError, match=r"paper\.json"):
        collect(tmp_path, tmp_path)


def test_a_curve_is_of_the_study_that_was_tested_most():
    evidence, use = Evidence(RESULTS), Use("T1.7", "PGT")
    most, *others = evidence.of(Use("T1.7"))
    assert all(most.examples >= trial.examples for trial in others)
    assert evidence.best(use) is most
    tests = {t.name: len(KeptRun(t, "PGT").curve()) for t in (most, *others)}
    assert evidence.most_tested(use).trial.name == max(tests, key=lambda name: tests[name])
    assert tests[most.name] < max(tests.values())


@pytest.mark.studies
def test_all_figures_are_drawn_from_the_results_and_each_opens(tmp_path, capsys):
    assert main(["figure", "all", "--out", str(tmp_path), "--formats", "png"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 17
    assert {file.stem for file in tmp_path.iterdir()} == {figure.name for figure in PAPER.figures}
    for path in tmp_path.iterdir():
        with Image.open(path) as image:
            image.load()
            assert min(image.size) > 300
            assert len(image.convert("L").getcolors() or []) > 10  # not an empty page


def test_a_figure_has_three_formats_and_says_which_runs_it_shows(measured, tmp_path, capsys):
    where = ["--out", str(tmp_path), "--results", str(measured / "results")]
    assert main(["figure", "high_bs", *where]) == 0
    with Image.open(tmp_path / "high_bs.png") as image:
        image.load()
    assert ET.parse(tmp_path / "high_bs.svg").getroot().tag.endswith("svg")
    assert (tmp_path / "high_bs.pdf").read_bytes().startswith(b"%PDF")
    assert main(["figure", "high_bs", *where, "--formats", "gif"]) == 2
    assert "--formats" in capsys.readouterr().err
    evidence, figure = Evidence(measured / "results"), PAPER.figure("high_bs")
    assert figure is not None
    drawn = drawings.plot(figure, evidence)
    run = evidence.best(Use("T2-1024", "baseline")).results.rows[0].run
    assert f"run {run}: resnet18 of width 2" in drawn.get_supxlabel()
    drawings.plt.close(drawn)


def test_missing_runs_are_named_with_their_command(tmp_path, capsys):
    with pytest.raises(MissingRunsError, match=r"run T2\.10 --scale small"):
        Evidence(tmp_path).best(Use("T2-256", "AGC + PGT"))
    assert main(["figure", "agc_pgt", "--out", str(tmp_path), "--results", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    for item in ("T2.5", "T2.8", "T2.10"):
        assert f"python -m reproduction run {item} --scale small --collect" in printed
    assert main(["figure", "nothing", "--out", str(tmp_path)]) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("layer", "first", "last", "words"),
    [
        (1, [1.0, 1.0], [0.5, 0.004], "1 of 2"),
        (1, [1.0, 1.2], [1e-3, 9e-4], "2 of 2"),  # the layer vanished whole
        (1, [0.0, 0.0], [3.0, 2.0], "0 of 2"),
        (1, [0.1, 9.0], [0.02, 9.0], "0 of 2"),  # small from the start
        (1, [1.0, 1.0], [math.nan, 1.0], "diverged"),
        (None, [9.0, 9.0], [0.0, 0.01], "1 of 2"),
    ],
)
def test_who_is_dead_in_a_figure(layer, first, last, words):
    values = np.array([first, last], dtype=np.float32)
    assert Norms(np.arange(2), {layer: values}).dead_in_words(layer) == words


def test_the_kept_exponents_are_those_of_the_recipes():
    for trial in Evidence(RESULTS).replicas:
        kept = about_of(trial)["exponents"]
        assert {arm.name: arm.exponent for arm in trial.arms} == pytest.approx(kept)
