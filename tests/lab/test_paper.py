"""The paper's rows and figures, against a list that was made from the paper alone.

``paper_tables.csv`` has the three tables as printed, with the repeated baseline of Table 2
once; the figures are listed below by their labels, the four unlabelled pages by what they show.
"""

import csv
import json
import math
import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from powergrad.lab.jobs import RecipeProgram

import powergrad
from powergrad.lab.cli.paper import app
from powergrad.lab.paper import draw as drawing
from powergrad.lab.paper.collect import NORMS_BYTES, collect, record_runs, thinned_norms
from powergrad.lab.paper.cost import cost, total_hours
from powergrad.lab.paper.evidence import Evidence, MissingRunsError, Norms, Outcome
from powergrad.lab.paper.rows import Use, changes_of, load_paper
from powergrad.lab.paper.small import LEAST, decay_exponent, plan_replica
from powergrad.lab.stats import Design, compare
from powergrad.lab.study import Results, Study, StudyKind
from powergrad.lab.trainer.networks import create_model
from powergrad.lab.trainer.objectives import as_published_cross_entropy
from powergrad.lab.trainer.recipe import Recipe, RecipeError
from powergrad.lab.trainer.run_folder import RunError
from powergrad.lab.trainer.schedules import learning_rate_at
from powergrad.lab.trainer.training import train
from powergrad.monitor import Recording, census

PAPER = load_paper()
ROOT = Path(__file__).parents[2]
with open(Path(__file__).with_name("paper_tables.csv"), newline="") as _file:
    PRINTED = list(csv.DictReader(_file))
FIGURES = [
    *("gradient_altering", "prob_plots", "simplenn", "metrics", "norm_plots", "high_bs"),
    *("agc_pgt", "stats", "code", "grid_searcha", "grid_searchb", "grid_searchc"),
    *("norms_baseline", "norms_large_batch", "norms_pgt", "norms_agc_pgt", "resnet18"),
]
OTHERS = ["E60", "G18", "G50", "G20"]


def call(*tokens):
    """The command's exit code, as ``powergrad paper`` gives it."""
    return app(list(tokens), exit_on_error=False, result_action="return_value")


def rows_of(item):
    return [row for row in PAPER.find(item).rows if row.id == item]


# The lists ---------------------------------------------------------------------------------------


def test_every_row_and_figure_of_the_paper_is_listed(capsys, tmp_path):
    assert call("list", "--results", str(tmp_path)) == 0
    printed = capsys.readouterr().out
    listed = set(re.findall(r"^[│┃]\s+(\S+)\s+[│┃]", printed, re.M))
    wanted = {row["id"] for row in PRINTED} | set(OTHERS)
    wanted |= {f"F{place}" for place in range(1, 18)}
    assert len(wanted) == 7 + 10 + 8 + 4 + 17
    assert wanted <= listed
    assert [figure.name for figure in PAPER.figures] == FIGURES
    assert all(name in printed for name in FIGURES)
    items = [item for item, _ in PAPER.items()]
    assert items == [*dict.fromkeys(row["id"] for row in PRINTED), *OTHERS]
    assert [figure.id for figure in PAPER.figures] == [f"F{place}" for place in range(1, 18)]


@pytest.mark.parametrize("printed", PRINTED, ids=lambda row: f"{row['id']} {row['method']}")
def test_a_row_has_the_printed_numbers(printed):
    place = 1 if printed["id"].startswith("T1") and printed["method"] == "PGT" else 0
    row = rows_of(printed["id"])[place]
    wanted = {key: float(printed[key]) for key in ("train", "test", "gap") if printed[key]}
    assert dict(row.published) == wanted


@pytest.mark.parametrize("printed", PRINTED, ids=lambda row: f"{row['id']} {row['method']}")
def test_the_printed_differences_are_those_of_the_printed_numbers(printed):
    experiment = PAPER.find(printed["id"])
    place = 1 if printed["id"].startswith("T1") and printed["method"] == "PGT" else 0
    row, first = rows_of(printed["id"])[place], experiment.rows[0]
    for key in ("train", "test"):
        if printed[f"{key}_diff"]:
            difference = row.published[key] - first.published[key]
            assert difference == pytest.approx(float(printed[f"{key}_diff"]), abs=1e-9)
    if printed["gap"]:
        gap = row.published["train"] - row.published["test"]
        assert gap == pytest.approx(float(printed["gap"]), abs=1e-9)


# The recipes -------------------------------------------------------------------------------------

# Section 5.1 of the paper, in full; the rest of a recipe must be what the row says or be listed as
# unstated.
COMMON = {
    "data.name": "folder:IMAGENET",
    "train.epochs": 100,
    "schedule.warmup_epochs": 5,
    "schedule.warmup_start": 4e-4,
    "optimizer.lr": 0.4,
    "optimizer.momentum": 0.9,
    "optimizer.weight_decay": 5e-4,
    "optimizer.name": "sgd",
    "optimizer.nesterov": True,
    "train.batch_size": 1024,
    "train.precision": "float16",
    "loss.alpha": 1,
    "loss.label_smoothing": 0,
    "model.norm": "batch",
    "clip.norm": None,
    "clip.agc": None,
}
BY_CODE = {"data.flip": True, "optimizer.decay_all": False}  # unstated, as the authors' code


def flat(recipe):
    """Every dotted key of a recipe."""

    def walk(values, prefix):
        for key, value in values.items():
            if isinstance(value, dict):
                yield from walk(value, f"{prefix}{key}.")
            else:
                yield prefix + key, value

    return dict(walk(recipe.model_dump(mode="json"), ""))


def assert_exactly(recipe, stated):
    """The recipe has what is given, and the package's defaults otherwise."""
    wanted = flat(Recipe()) | COMMON | BY_CODE | stated
    assert rounded(flat(recipe)) == rounded(wanted)


def rounded(values):
    """Numbers to 12 digits: 0.4 * 512 / 1024 need not be 0.2 to the last bit."""
    numbers = (int, float)
    return {
        key: float(f"{value:.12g}") if type(value) in numbers else value
        for key, value in values.items()
    }


@pytest.mark.parametrize("printed", PRINTED, ids=lambda row: f"{row['id']} {row['method']}")
def test_a_row_has_exactly_the_hyperparameters_that_the_paper_states(printed):
    place = 1 if printed["id"].startswith("T1") and printed["method"] == "PGT" else 0
    model = printed["model"]
    stated = {
        "model.name": model.removesuffix(" (non-BN)").replace("-", "").lower(),
        "schedule.name": printed["scheduler"].lower(),
        "train.batch_size": int(printed["batch"]),
    }
    if "non-BN" in model:
        stated["model.norm"] = "none"
    if printed["scheduler"] == "Step":
        stated |= {"schedule.milestones": [30, 60, 90], "schedule.gamma": 0.1}
    if printed["alpha"]:
        stated["loss.alpha"] = float(printed["alpha"])
    if printed["smoothing"]:
        stated["loss.label_smoothing"] = float(printed["smoothing"])
    # Unstated: the rate goes with the batch, and clipping has its usual thresholds.
    share = int(printed["batch"]) / 1024
    stated |= {"optimizer.lr": 0.4 * share, "schedule.warmup_start": 4e-4 * share}
    methods = printed["method"].split("+")
    if "GC" in methods:
        stated["clip.norm"] = 1.0
    if "AGC" in methods:
        stated["clip.agc"] = 0.01
    assert_exactly(rows_of(printed["id"])[place].recipe, stated)


def test_the_other_runs_have_exactly_what_the_paper_states():
    baseline, pgt = PAPER.find("E60").rows
    assert_exactly(baseline.recipe, {"model.name": "resnet50"})
    # alpha is unstated
    assert_exactly(pgt.recipe, {"model.name": "resnet50", "train.epochs": 60, "loss.alpha": 0.3})
    for item, name in (("G18", "resnet18"), ("G50", "resnet50")):
        for row, alpha in zip(PAPER.find(item).rows, PAPER.find(item).grid, strict=True):
            stated = {"model.name": name, "train.epochs": 50, "loss.alpha": alpha}
            assert_exactly(row.recipe, stated)
    cifar = {
        "data.name": "cifar10",
        "model.name": "resnet20",
        "train.epochs": 360,
        # unstated
        "train.batch_size": 128,
        "optimizer.lr": 0.1,
        "schedule.warmup_start": 1e-4,
        "data.crop_padding": 4,
    }
    for row, alpha in zip(PAPER.find("G20").rows, PAPER.find("G20").grid, strict=True):
        assert_exactly(row.recipe, cifar | {"loss.alpha": alpha})
    # The alphas that the text names are on the grids.
    assert 0.25 in PAPER.find("G18").grid
    assert {0.05, 0.3} <= set(PAPER.find("G50").grid)


def test_what_is_chosen_is_listed_as_unstated_and_does_not_override_the_row():
    for experiment in PAPER.experiments:
        for row in experiment.rows:
            _, unstated = PAPER.about(row.id)
            listed = {key for choice in unstated for key in choice.choice}
            assert set(row.chosen) <= listed
            assert not set(row.chosen) & set(row.stated)
            assert {**flat(row.recipe), **row.stated, **row.chosen} == flat(row.recipe)


def test_the_same_run_in_two_tables_is_one_run():
    def key(item, arm):
        return PAPER.find(item).row(arm).recipe.key

    assert key("T1.2", "baseline") == key("T3.3", "baseline") == key("E60", "baseline")
    assert key("T1.2", "PGT") == key("T3.7", "PGT 0.05")
    assert key("T1.3", "baseline") == key("T3.1", "baseline")
    assert key("T1.3", "PGT") != key("T3.2", "PGT 0.3")  # as printed; see the note


def test_notes_and_what_is_unstated_stand_beside_their_rows():
    def notes(item):
        return {note.id for note in PAPER.about(item)[0]}

    def unstated(item):
        return " / ".join(choice.what for choice in PAPER.about(item)[1])

    assert "step-alpha" in notes("T1.3") & notes("T3.2")
    assert "curves-alpha" in notes("T1.2") & notes("metrics")
    assert "abstract" in notes("T1.1") & notes("T1.2")
    assert "gap" in notes("T3.7")
    assert "smoothing" in notes("T3.4") & notes("T3.6") & notes("T3.8")
    assert "clip-by-value" in notes("T2.6") & notes("T2.9")
    assert "clip-by-value" not in notes("T2.7")
    assert "listing" in notes("code")
    assert "threshold of gradient clipping" in unstated("T2.6")
    assert "threshold of adaptive" in unstated("T2.10")
    assert "threshold of adaptive" not in unstated("T2.9")
    assert "learning rate at batch 512" in unstated("T2.4")
    assert "alpha of the 60-epoch run" in unstated("E60")
    assert "recipe on CIFAR-10" in unstated("G20")
    known = {"all", *FIGURES}
    known |= {name for item, experiment in PAPER.items() for name in (item, experiment.id)}
    known |= {f"{e.id}/{row.arm}" for e in PAPER.experiments for row in e.rows}
    for remark in (*PAPER.notes, *PAPER.unstated):
        assert set(remark.about) <= known
    for figure in PAPER.figures:
        assert {str(use) for use in figure.uses} <= known


@pytest.mark.parametrize("word", ["T2.11", "T9", "f1x"])
def test_an_unknown_id_is_refused(word):
    with pytest.raises(RecipeError, match=f"paper list.*{word}"):
        PAPER.find(word)


# As published ------------------------------------------------------------------------------------


def batch(rows, classes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    return logits, torch.randint(classes, (rows,), generator=generator)


def gradient(logits, labels, scale, **options):
    logits = logits.clone().requires_grad_()
    loss = as_published_cross_entropy(logits, labels, **options)
    (grad,) = torch.autograd.grad(scale * loss, logits)
    return loss.detach(), grad


@given(
    rows=st.integers(1, 40),
    classes=st.integers(2, 12),
    alpha=st.floats(0.05, 0.99),
    eps=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**31),
)
def test_at_the_square_of_the_rows_the_hook_is_the_equation(rows, classes, alpha, eps, seed):
    logits, labels = batch(rows, classes, seed)
    value, got = gradient(logits, labels, rows**2, alpha=alpha, label_smoothing=eps)
    assert value.item() == F.cross_entropy(logits, labels, label_smoothing=eps).item()
    q = torch.full_like(logits, eps / classes)
    q[torch.arange(rows), labels] += 1 - eps
    want = rows * ((alpha * logits).softmax(-1) - q)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10 * rows)


def test_the_hook_sees_the_loss_scale_and_the_division_by_parts():
    logits, labels = batch(16, 5)
    options = {"alpha": 0.3}
    at_1, at_2, right = (gradient(logits, labels, s, **options)[1] for s in (1, 2, 256))
    equation = powergrad.cross_entropy
    exact = logits.clone().requires_grad_()
    equation(exact, labels, alpha=0.3).backward()
    assert exact.grad is not None
    torch.testing.assert_close(right / 256, exact.grad)
    assert not torch.allclose(at_2, 2 * at_1, rtol=0.1)  # the sign of the listing's mistake
    assert at_1.norm() > 20 * exact.grad.norm()


def test_half_precision_loses_classes_under_2_to_the_minus_25():
    rows = 256
    logits = torch.zeros(rows, 3)
    logits[:, 1], logits[:, 2] = -24.5 * math.log(2), -26 * math.log(2)
    labels = torch.zeros(rows, dtype=torch.long)
    _, got = gradient(logits.half(), labels, rows**2, alpha=0.3)
    assert got.dtype == torch.float16
    assert got[0, 1] > 0
    assert got[0, 2] == 0


def test_alpha_1_is_cross_entropy_and_the_callers_tensor_keeps_no_hook():
    logits, labels = batch(8, 4)
    _, got = gradient(logits, labels, 3.0, alpha=1.0)
    plain = logits.clone().requires_grad_()
    (want,) = torch.autograd.grad(3.0 * F.cross_entropy(plain, labels), plain)
    assert torch.equal(got, want)
    as_published_cross_entropy(plain, labels, alpha=0.3)
    assert not plain._backward_hooks


@pytest.mark.parametrize(
    ("options", "labels", "match"),
    [
        ({"alpha": 0.0}, torch.zeros(2, dtype=torch.long), "`alpha` to be above 0"),
        ({"alpha": 1.5}, torch.zeros(2, dtype=torch.long), r"but got 1\.5"),
        ({"alpha": 0.5}, torch.full((2, 3), 1 / 3), "class indices"),
    ],
)
def test_what_the_hook_does_not_know_is_refused(options, labels, match):
    with pytest.raises(ValueError, match=match):
        as_published_cross_entropy(torch.zeros(2, 3, requires_grad=True), labels, **options)


def test_it_trains_under_a_scaler_that_settles_at_the_square_of_the_rows(tmp_path, monkeypatch):
    """16 rows: the scale comes down from 65536 to 256, and the equation's accuracy is reached."""
    recipe = Recipe().override(
        {
            "data.limit": 320,
            "model.width": 4,
            "model.norm": "none",
            "train.batch_size": 16,
            "train.epochs": 6,
            "train.precision": "float16",
            "schedule.warmup_epochs": 1,
            "optimizer.lr": 0.05,
            "loss.alpha": 0.5,
            "machine.threads": 1,
        }
    )

    run = train(recipe.override({"loss.form": "as_published"}), tmp_path / "run")
    result = run.result()
    assert result is not None
    assert not result.about["diverged"]
    assert [row["loss_scale"] for row in run.metrics()] == [256] * 6
    assert (result.metrics["train_accuracy"] or 0) > 60


# Cost --------------------------------------------------------------------------------------------


def test_cost_is_images_over_published_speed():
    (v100, a100, rtx) = cost(PAPER.find("T1.2").rows[0].recipe)
    # 8 GPUs did 8322 and 16621 images/s (NVIDIA), one 826.06 (timm); 1,281,167 images, 100 epochs.
    assert v100.hours == pytest.approx(128_116_700 / (8322 / 8) / 3600)
    assert a100.hours == pytest.approx(128_116_700 / (16621 / 8) / 3600)
    assert rtx.hours == pytest.approx(128_116_700 / 826.06 / 3600)
    assert all(part.source.startswith("https://github.com/") for part in (v100, a100, rtx))
    (v100, *_, rtx) = cost(PAPER.find("T2.1").rows[0].recipe)
    assert rtx.hours == pytest.approx(128_116_700 / 2764.22 / 3600)
    assert v100.hours == pytest.approx(128_116_700 / (8322 / 8 * 2764.22 / 826.06) / 3600)
    assert "estimated" in v100.how
    assert "upper bound" in v100.how
    (gtx,) = cost(PAPER.find("G20").rows[0].recipe)  # Keras: 35 s an epoch
    assert gtx.hours == pytest.approx(360 * 35 / 3600, rel=1e-4)
    assert cost(Recipe().override({"data.name": "digits"})) == []


def test_a_run_of_two_tables_is_paid_once():
    shared = [PAPER.find("T1.2").rows[0].recipe, PAPER.find("T3.3").rows[0].recipe]
    assert total_hours(shared) == total_hours(shared[:1])


# Replicas ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "decay"), [(1, 1), (0.5, 1), (1, 0.25), (4, 0.25)])
def test_the_decay_exponent_is_what_sgd_does_to_a_filter_without_gradient(rate, decay):
    changes = {"train.epochs": 40, "train.batch_size": 32}
    factors = {"backbone.lr": rate, "backbone.weight_decay": decay, "head.lr": 3}
    changes |= {f"optimizer.{key}": value for key, value in factors.items()}
    recipe = Recipe().override(changes)
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    options = recipe.optimizer
    sgd = torch.optim.SGD([weight], lr=1, momentum=0.9, nesterov=True, weight_decay=5e-4 * decay)
    for step in range(40 * 50):
        sgd.param_groups[0]["lr"] = rate * learning_rate_at(
            step / 50, recipe.schedule, options.lr, recipe.train.epochs
        )
        weight.grad = torch.zeros_like(weight)
        sgd.step()
    # Momentum remembers the weight of some 9 steps ago, larger by 9 * 0.002 at the peak rate.
    assert -math.log(weight.item()) == pytest.approx(decay_exponent(recipe, 50 * 32), rel=0.018)


def test_the_papers_own_exponent_is_about_125():
    for item in ("T2.1", "T2.5"):  # at batch 1024 and 256: the rate goes with the batch
        recipe = PAPER.find(item).rows[0].recipe
        assert decay_exponent(recipe, 1_281_167) == pytest.approx(125.5, abs=1)


@pytest.mark.parametrize("item", ["T1.6", "T1.7", "T2.2", "T2.10", "T3.8", "E60", "G20"])
def test_every_arm_of_a_replica_passes_7_and_differs_as_the_rows_do(item):
    experiment = PAPER.find(item)
    rows = experiment.with_baseline(item)
    replica = plan_replica(experiment, rows, "digits")
    assert min(replica.exponents.values()) >= LEAST == 7
    assert max(replica.exponents.values()) < 13
    base = rows[0].recipe
    for row in rows:
        changed = changes_of(row.recipe, base)
        if item == "E60" and row.arm == "PGT":
            epochs = replica.arms["PGT"]["train.epochs"]
            assert epochs / replica.base.train.epochs == pytest.approx(0.6, abs=0.005)
            assert replica.arms["PGT"]["loss.alpha"] == 0.3
        else:
            if "clip.agc" in changed:  # its ratio to the decay stays
                decay = replica.base.optimizer.weight_decay / base.optimizer.weight_decay
                changed["clip.agc"] = pytest.approx(decay * changed["clip.agc"])
            assert replica.arms[row.arm] == changed
    words = replica.describe()
    assert "lost: the data: 1,438 examples of 10 classes" in words
    assert "WARNING" not in words


def test_batches_keep_their_ratios_and_the_schedule_its_parts():
    sizes, rates = [], []
    for item in ("T2-1024", "T2-512", "T2-256"):
        replica = plan_replica(PAPER.find(item), PAPER.find(item).rows[:1], "digits")
        sizes.append(replica.base.train.batch_size)
        rates.append(replica.base.optimizer.lr)
        whole = replica.base.train.epochs
        assert replica.base.schedule.warmup_epochs / whole == pytest.approx(0.05, abs=0.001)
        assert replica.base.monitor.every > 0
    assert sizes == [128, 64, 32]
    assert rates == pytest.approx([0.08, 0.04, 0.02])


def test_a_replica_says_what_it_lost_and_only_that():
    experiment = PAPER.find("E60")
    smaller = {"model.name": "resnet18", "train.epochs": 4}
    words = plan_replica(experiment, experiment.rows, "digits", smaller).describe()
    assert "lost: the network: resnet18, not resnet50" in words
    assert "kept: the network's depth" not in words
    grid = PAPER.find("G20")
    words = plan_replica(grid, grid.rows, "digits", {"train.epochs": 4}).describe()
    assert "kept: the network's depth and blocks (resnet20" in words
    assert "lost: channels of the first stage: 8, not 16" in words
    assert "lost: the batch" not in words  # 128 both here and there
    assert "lost: the stem" not in words  # small in both
    table = PAPER.find("T2-256")
    words = plan_replica(table, table.rows, "digits", {"train.epochs": 4}).describe()
    assert "lost: the stem: 3x3" in words
    assert "kept: the ratios between the three batch sizes" in words
    same = {"train.epochs": 4, "model.stem": "imagenet", "train.batch_size": 64}
    words = plan_replica(table, table.rows, "digits", same).describe()
    assert "the stem" not in words
    assert "kept: the ratios" not in words


def test_a_replica_that_is_too_short_says_so():
    experiment = PAPER.find("T1.7")
    replica = plan_replica(experiment, experiment.rows, "digits", {"train.epochs": 4})
    assert replica.base.train.epochs == 4
    assert "WARNING" in replica.describe()


# From runs to figures ----------------------------------------------------------------------------

TINY = {"data.limit": 160, "model.width": 2, "machine.threads": 1, "train.epochs": 2}
NEEDED = {
    "T1.7": (None, (0, 1)),
    "T2-256": (["baseline", "PGT", "AGC + PGT"], (0,)),
    "T2-1024": (["baseline"], (0,)),
    "G18": (["alpha=1", "alpha=0.25"], (0,)),
}


def make_runs(folder, experiment, arms, seeds):
    """What ``powergrad paper run`` does, in this process and tiny."""
    rows = [row for row in experiment.rows if arms is None or row.arm in arms]
    replica = plan_replica(experiment, rows, "digits", TINY)
    study = Study(StudyKind.PAPER, RecipeProgram(replica.base), replica.arms, Design((len(seeds),)))
    jobs = study.jobs()
    for job in jobs.values():
        job.execute(folder)
    command = f"powergrad paper run {experiment.id} --scale small"
    runs = {job.name: arm_and_seed for arm_and_seed, job in jobs.items()}
    record_runs(folder, experiment, replica.conditions(command, None), runs)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A folder ``results`` with experiments that figures need, in tiny runs."""
    where = tmp_path_factory.mktemp("measured")
    for item, (arms, seeds) in NEEDED.items():
        make_runs(where / "runs" / item, PAPER.find(item), arms, seeds)
        collect(where / "runs" / item, where / "results" / "paper")
    return where


def test_all_figures_are_drawn_from_the_results_and_each_opens(tmp_path, capsys):
    """Those of the checkout, as PNG, for time; the next test has the other formats."""
    where = ["--out", str(tmp_path), "--results", str(ROOT / "results")]
    assert call("figure", "all", *where, "--formats", "png") == 0
    assert len(capsys.readouterr().out.splitlines()) == 17
    assert {file.name for file in tmp_path.iterdir()} == {f"{name}.png" for name in FIGURES}
    for name in FIGURES:
        with Image.open(tmp_path / f"{name}.png") as image:
            image.load()
            assert min(image.size) > 300
            assert len(image.convert("L").getcolors() or []) > 10  # not an empty page


@pytest.mark.parametrize("name", ["resnet18", "high_bs"])
def test_a_figure_is_written_in_three_formats(measured, tmp_path, name):
    where = ["--out", str(tmp_path), "--results", str(measured / "results")]
    assert call("figure", name, *where) == 0
    with Image.open(tmp_path / f"{name}.png") as image:
        image.load()
    assert ET.parse(tmp_path / f"{name}.svg").getroot().tag.endswith("svg")
    pdf = (tmp_path / f"{name}.pdf").read_bytes()
    assert pdf.startswith(b"%PDF")
    assert pdf.rstrip().endswith(b"%%EOF")
    with pytest.raises(ValueError, match="png, svg, pdf, but got 'gif'"):
        call("figure", name, *where, "--formats", "gif")


def test_a_figure_says_which_runs_it_came_from(measured):
    evidence = Evidence(measured / "results")
    wanted = PAPER.figure("high_bs")
    assert wanted is not None
    figure = drawing.plot(wanted, evidence)
    study = evidence.best(Use("T2-1024", "baseline"))
    assert study.results.rows[0].run in figure.get_supxlabel()
    assert "digits" in figure.get_supxlabel()
    drawing.plt.close(figure)


def test_collected_norms_are_those_of_the_run(measured):
    evidence = Evidence(measured / "results")
    norms = evidence.kept_run(Use("T2-256", "PGT")).norms()
    (folder,) = (measured / "runs" / "T2-256").glob("PGT-seed0-*")
    recording = Recording(folder)
    assert len(norms.layers) == 21  # the head is one
    for number in (2, 11, 20):
        steps, values = recording.read(number)
        assert norms.steps[-1] == steps[-1]
        last = norms.layers[number][-1]
        np.testing.assert_allclose(last, values[-1].numpy(), rtol=1e-3)
    _, features = recording.read(21, "feature")
    np.testing.assert_allclose(norms.values(None)[-1], features[-1].numpy(), rtol=1e-3)


def test_long_recordings_are_thinned_to_a_small_file(tmp_path):
    model = create_model("resnet18", num_classes=1000, norm="none")
    with powergrad.FilterMonitor(model, tmp_path / "norms", every=1) as monitor:
        for step in range(300):
            monitor.step(step)
    arrays = thinned_norms(Recording(tmp_path))
    assert arrays["steps"][0] == 0
    assert arrays["steps"][-1] == 299
    assert sum(array.nbytes for name, array in arrays.items() if "layer1" in name) > 0
    assert sum(a.nbytes for k, a in arrays.items() if k not in ("steps", "layers")) <= NORMS_BYTES


def test_collected_files_are_small_and_hold_every_run(measured):
    files = list((measured / "results" / "paper").iterdir())
    assert sum(file.stat().st_size for file in files) < 2_000_000
    evidence = Evidence(measured / "results")
    for item, (arms, seeds) in NEEDED.items():
        (study,) = evidence.of(Use(item))
        rows = PAPER.find(item).rows
        assert study.results.arms == [r.arm for r in rows if arms is None or r.arm in arms]
        assert len(study.results.rows) == len(study.results.arms) * len(seeds)
    curve = evidence.kept_run(Use("T1.7", "PGT")).curve()
    assert curve["epoch"].tolist() == [1, 2]
    assert np.isfinite(curve["test_accuracy"]).all()


def test_a_curve_is_of_the_study_that_was_tested_most(measured, tmp_path):
    results = tmp_path / "results"
    shutil.copytree(measured / "results", results)
    (few,) = Evidence(results).of(Use("T1.7"))
    for path in (results / "paper").glob(f"{few.name}*"):
        more = path.with_name(path.name.replace(few.name, "T1.7-more"))
        text = path.read_text()
        if path.suffix == ".json":
            more.write_text(json.dumps({**json.loads(text), "examples": 10**6, "label": "more"}))
        else:  # one test fewer
            more.write_text(
                "".join(text.splitlines(keepends=True)[:-1]) if "--" in more.name else text
            )
    both, use = Evidence(results), Use("T1.7", "PGT")
    assert [study.label for study in both.of(Use("T1.7"))] == ["more", few.label]
    assert both.best(use).label == "more"
    run = both.most_tested(use)
    assert (run.study.label, run.curve()["epoch"].tolist()) == (few.label, [1, 2])


def test_collect_counts_what_became_of_the_filters(measured):
    studies = Evidence(measured / "results").measurements
    rows = [row for study in studies for row in study.results.rows if row.value("filters")]
    assert {row.arm for row in rows} == {"baseline", "PGT", "AGC + PGT"}
    for row in rows:
        counts = census(next(measured.rglob(f"*{row.run}")))
        layers = [layer for layer in counts.layers if layer.kind in ("Conv2d", "Linear")]
        assert row.value("filters") == sum(layer.units for layer in layers)
        weights = [event for event in counts.events if event.quantity == "weight"]
        assert row.value("died") == len({(e.layer, e.unit) for e in weights if e.what == "died"})


def test_runs_added_later_are_collected_with_the_first(tmp_path):
    experiment = PAPER.find("T2-1024")
    make_runs(tmp_path / "runs", experiment, ["baseline"], (0,))
    make_runs(tmp_path / "runs", experiment, None, (0, 1))
    collect(tmp_path / "runs", tmp_path / "results" / "paper", "again")
    (study,) = Evidence(tmp_path / "results").of(Use("T2-1024"))
    assert [(row.arm, row.seed) for row in study.results.rows] == [
        *(("baseline", 0), ("baseline", 1)),
        *(("PGT", 0), ("PGT", 1)),
    ]
    assert study.label == "again"
    assert set(study.conditions.arms) == {"baseline", "PGT"}
    with pytest.raises(RunError, match=r"to hold runs of T1\.7"):
        make_runs(tmp_path / "runs", PAPER.find("T1.7"), ["baseline"], (0,))


def test_missing_runs_are_named_with_their_command(tmp_path, capsys):
    with pytest.raises(MissingRunsError, match=r"paper run T2\.10 --scale small"):
        Evidence(tmp_path).best(Use("T2-256", "AGC + PGT"))
    assert call("figure", "agc_pgt", "--out", str(tmp_path), "--results", str(tmp_path)) == 1
    printed = capsys.readouterr().out
    assert "powergrad paper run T2.5 --scale small --collect" in printed
    assert "powergrad paper run T2.8 --scale small --collect" in printed
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="name of a figure"):
        call("figure", "nothing", "--out", str(tmp_path))
    with pytest.raises(RunError, match=r"no paper\.json"):
        collect(tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("layer", "first", "last", "words"),
    [
        (1, [1.0, 1.0], [0.5, 0.004], "1 of 2 dead"),
        (1, [1.0, 1.2], [1e-3, 9e-4], "2 of 2 dead"),  # the layer vanished whole
        (1, [0.0, 0.0], [3.0, 2.0], "0 of 2 dead"),
        (1, [0.1, 9.0], [0.02, 9.0], "0 of 2 dead"),  # small from the start
        (1, [1.0, 1.0], [math.nan, 1.0], "diverged"),
        (None, [9.0, 9.0], [0.0, 0.01], "1 of 2 dead"),
    ],
)
def test_who_is_dead_in_a_figure(layer, first, last, words):
    values = np.array([first, last], dtype=np.float32)
    assert drawing.dead_in_words(Norms(np.arange(2), {1: values}, values), layer) == words


def test_too_few_seeds_have_neither_interval_nor_verdict():
    def spread(mean, seeds=8, step=0.01):
        return {seed: mean + step * (seed - (seeds - 1) / 2) for seed in range(seeds)}

    (few,) = compare({"a": spread(90, 3), "b": spread(91, 3)}, "a", margin=0.5)
    assert Outcome.of(few) == ("+1.00", "", "", "too few seeds")
    assert Outcome.of(few).with_interval == "+1.00"
    (none,) = compare({"a": spread(90, step=1e-4), "b": spread(89.999, step=1e-4)}, "a", margin=0.5)
    assert Outcome.of(none).with_interval.startswith("+0.00 (-0.00 to ")


# The commands ------------------------------------------------------------------------------------


def test_show_has_recipe_numbers_commands_cost_and_notes(capsys, tmp_path):
    assert call("show", "T3.8", "--data", "folder:/imagenet", "--results", str(tmp_path)) == 0
    printed = capsys.readouterr().out
    for text in (
        "train 77.69, test 76.39, gap 1.3",
        "lr: 0.4",
        "epochs: 100",
        "warmup_start: 0.0004",
        "alpha: 0.05",
        "label_smoothing: 0.1",
        "precision: float16",
        "V100 16GB: 34.2",
        "https://github.com/NVIDIA/DeepLearningExamples",
        "powergrad paper run T3.8 --data folder:/imagenet --train.accumulate 4",
        "torchrun --standalone --nproc-per-node=4 -m powergrad paper run T3.8 --data",
        "K - 1 wrong classes",
        "which parameters have weight decay",
    ):
        assert text in printed
    assert call("show", "F7", "--results", str(tmp_path)) == 0
    assert "missing: T2-256/AGC + PGT" in capsys.readouterr().out
    assert call("show", "T1.4", "--results", str(tmp_path)) == 0
    printed = capsys.readouterr().out
    assert "--arm PGT" in printed
    assert "  PGT: loss.alpha: 0.3\n" in printed


def test_status_counts_what_is_there(measured, tmp_path, capsys):
    assert call("status", "--results", str(tmp_path)) == 0
    assert "measured: 0 of 29" in capsys.readouterr().out
    assert call("status", "--results", str(measured / "results")) == 0
    printed = capsys.readouterr().out
    # T1.7, T2.1, T2.5, T2.8 and T2.10; the grid here lacks most alphas
    assert "measured: 5 of 29" in printed
    # those without runs, with norms, and of the first grid
    assert "can be drawn: 14 of 17" in printed


def test_run_plans_both_scales(tmp_path, capsys):
    out = ("--out", str(tmp_path))
    assert call("run", "T2.8", "--scale", "small", "--plan", *out) == 0
    printed = capsys.readouterr().out
    assert "PGT: 7." in printed
    assert "2 arms x 8 seeds" in printed
    assert call("run", "T1.4", "--data", "folder:/x", "--plan", "--arm", "PGT", *out) == 0
    printed = capsys.readouterr().out
    assert "T1.4 PGT" in printed
    assert "50 on V100 16GB" in printed
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="--data folder:PATH"):
        call("run", "T1.4", "--plan", *out)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (
            ("T2.8", "--scale", "small", "--arm", "AGC"),
            r"--arm to be an arm of T2\.8 \(baseline, PGT\)",
        ),
        (("T2.8", "--data", "folder:x", "--arm", "AGC"), r"--arm to be an arm of T2\.8 \(PGT\)"),
        (("T1.7", "--data", "folder:x", "--tune", "lr"), "--tune only with --scale small"),
        (("T1.7", "--data", "folder:x", "--seeds", "3"), "--seeds only with --scale small"),
        (("T1.7", "--data", "folder:x", "--metric", "nll"), "--metric only with --scale small"),
        (("T1.7", "--data", "folder:x", "--threads", "3"), "--threads only with --scale small"),
        (
            ("T1.7", "--data", "folder:x", "--tune-seeds", "5"),
            "--tune-seeds only with --scale small",
        ),
        (
            ("T1.7", "--scale", "small", "--as-published", "train.precision=float32"),
            "train.precision to be float16 with --as-published, .* got 'float32'",
        ),
        (("T1.7", "--data", "/nowhere"), "--data to be digits, fashion-mnist, cifar10 or folder"),
        (("T1.7", "--scale", "small", "--data", "folder:/nowhere"), "nowhere"),
        (("T1.7", "--scale", "small", "--tune", "nokey=1,2"), "nokey"),
        (
            ("T1.7", "--scale", "small", "--tune", "lr", "--tune-seeds", "0"),
            "--tune-seeds to be at least 1",
        ),
        (("T1.7", "--scale", "small", "--tune-seeds", "5"), "--tune-seeds only with --tune"),
        (("T1.7", "--data", "folder:x", "--trials", "5"), "--trials only with --scale small"),
        (
            ("T1.7", "--data", "folder:x", "--tune-map", "identity"),
            "--tune-map only with --scale small",
        ),
        (
            ("T1.7", "--scale", "small", "--tune", "lr", "--repeats", "8"),
            "no --repeats for an item of the paper",
        ),
        (("T1.7", "--scale", "small", "--metric", "nonsense"), "nonsense"),
        (("F7",), r"a figure; draw it with `powergrad paper figure F7"),
        (("T1.8",), r"did you mean 'T\d\.\d'"),
    ],
)
def test_run_names_a_bad_argument_before_it_trains(tmp_path, tokens, message):
    with pytest.raises(Exception, match=message):
        call("run", *tokens, "--plan", "--out", str(tmp_path))
    assert not list(tmp_path.iterdir())


def execute_here(queue, jobs, watch):
    """What the queue does, without its processes; test_study.py tests the queue."""
    return {job.name: job.execute(queue.folder) for job in jobs}


def test_run_tunes_and_trains_a_replica_reports_and_collects_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("powergrad.lab.jobs.queue.JobQueue.run", execute_here)
    small = ["--data.limit", "160", "--model.width", "2", "--train.epochs", "2"]
    options = ["--seeds", "2", "--workers", "1", "--out", str(tmp_path / "runs")]
    tune = ["--tune", "lr=0.01,0.02", "--tune-seeds", "1", "--metric", "nll"]
    results = ["--collect", "--results", str(tmp_path / "results")]
    assert call("run", "T2.2", *small, *tune, "--scale", "small", *options, *results) == 0
    printed = capsys.readouterr().out
    assert "WARNING" in printed  # two epochs are no replica
    (study,) = Evidence(tmp_path / "results").of(Use("T2-1024"))
    assert study.results.arms == ["baseline", "PGT"]
    assert "PGT" in study.comparisons
    conditions = study.conditions
    assert conditions.tuning is not None
    winners = {arm: choice.winner for arm, choice in conditions.tuning.arms.items()}
    rates = sorted(winner.changes["optimizer.lr"] for winner in winners.values())
    words = f"{rates[0]:g}" if rates[0] == rates[1] else f"{rates[0]:g} to {rates[1]:g}"
    assert f"the rate: {words}, not 0.4" in conditions.lost
    for arm, choice in conditions.tuning.arms.items():
        assert choice.winner is min(choice.trials, key=lambda trial: trial.mean)  # of NLL
        ratio = conditions.exponents[arm] / choice.winner.changes["optimizer.lr"]
        pgt = conditions.exponents["PGT"] / conditions.arms["PGT"]["optimizer.lr"]
        assert ratio == pytest.approx(pgt, rel=0.05)
    # As every study it leaves its results, a figure and a page.
    folder = tmp_path / "runs" / "paper-T2-1024-digits"
    assert Results.load(folder).verdict() in " ".join(printed.split())
    assert {"study.csv", "study.json", "study.png", "report.html"} <= {
        path.name for path in folder.iterdir()
    }


def test_run_at_full_scale_trains_the_rows_own_recipe(tmp_path):
    """On digits in the place of ImageNet, and short."""
    tiny = ["--train.epochs", "2", "--train.batch_size", "32", "--schedule.warmup_epochs", "1"]
    tiny += ["--data.limit", "64", "--model.width", "2", "--train.precision", "float32"]
    tiny += ["--machine.threads", "1", "--model.stem", "small"]
    where = ["--out", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    assert call("run", "T2.2", *tiny, "--data", "digits", "--collect", *where) == 0
    (study,) = Evidence(tmp_path / "results").of(Use("T2-1024"))
    assert study.results.arms == ["PGT"]
    assert study.conditions.scale == "full"
    assert study.recipe.loss.alpha == 0.92
    assert study.recipe.optimizer.lr == 0.4
    # What is not the paper's is listed: other data, and every override that changes the training.
    assert study.conditions.lost == [
        "the data: 64 examples (digits)",
        "data.limit: 64",
        "model.width: 2",
        "model.stem: small",
        "schedule.warmup_epochs: 1.0",
        "train.epochs: 2",
        "train.batch_size: 32",
        "train.precision: float32",
    ]
