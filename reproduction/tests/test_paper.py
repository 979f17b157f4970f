"""The paper's rows and recipes, against a list that was made from the paper alone.

``paper_tables.csv`` has the three tables as printed, with the repeated baseline of Table 2
once; the figures are listed below by their labels, the four unlabelled pages by what they show.
"""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from powergrad.lab.trainer.objectives import as_published_cross_entropy
from powergrad.lab.trainer.recipe import Recipe, flatten
from powergrad.lab.trainer.training import train
from reproduction.__main__ import main
from reproduction.evidence import csv_rows
from reproduction.published import gpu_hours, load_paper

PAPER = load_paper()
PRINTED = csv_rows(Path(__file__).with_name("paper_tables.csv"))
FIGURES = [
    *("gradient_altering", "prob_plots", "simplenn", "metrics", "norm_plots", "high_bs"),
    *("agc_pgt", "stats", "code", "grid_searcha", "grid_searchb", "grid_searchc"),
    *("norms_baseline", "norms_large_batch", "norms_pgt", "norms_agc_pgt", "resnet18"),
]
OTHERS = ["E60", "G18", "G50", "G20"]


def row_of(printed):
    rows = [row for row in PAPER.find(printed["id"]).rows if row.id == printed["id"]]
    return rows[printed["id"].startswith("T1") and printed["method"] == "PGT"]


def test_every_row_and_figure_of_the_paper_is_listed(capsys, tmp_path):
    assert main(["list", "--results", str(tmp_path)]) == 0
    listed = capsys.readouterr().out
    ids = set(re.findall(r"^[│┃]\s+(\S+)\s+[│┃]", listed, re.M))
    items = [*dict.fromkeys(row["id"] for row in PRINTED), *OTHERS]
    assert list(PAPER.items()) == items
    numbers = [f"F{place}" for place in range(1, 18)]
    assert [(figure.id, figure.name) for figure in PAPER.figures] == [
        *zip(numbers, FIGURES, strict=True)
    ]
    assert {*items, *numbers} <= ids
    assert len(items) == 7 + 10 + 8 + 4
    assert all(name in listed for name in FIGURES)


@pytest.mark.parametrize("printed", PRINTED, ids=lambda row: f"{row['id']} {row['method']}")
def test_a_row_has_the_printed_numbers(printed):
    row, first = row_of(printed), PAPER.find(printed["id"]).baseline
    wanted = {key: float(printed[key]) for key in ("train", "test", "gap") if printed[key]}
    assert dict(row.published) == wanted
    for key in ("train", "test"):
        if printed[f"{key}_diff"]:
            difference = row.published[key] - first.published[key]
            assert difference == pytest.approx(float(printed[f"{key}_diff"]), abs=1e-9)
    if printed["gap"]:
        gap = row.published["train"] - row.published["test"]
        assert gap == pytest.approx(float(printed["gap"]), abs=1e-9)


# Recipes ------------------------------------------------------------------------------------------

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
    return dict(flatten(recipe.model_dump(mode="json")))


def rounded(values):
    """Numbers to 12 digits: 0.4 * 512 / 1024 need not be 0.2 to the last bit."""
    return {
        key: float(f"{value:.12g}") if type(value) in (int, float) else value
        for key, value in values.items()
    }


def assert_exactly(recipe, stated):
    """The recipe has what is given, and the package's defaults otherwise."""
    assert rounded(flat(recipe)) == rounded(flat(Recipe()) | COMMON | BY_CODE | stated)


@pytest.mark.parametrize("printed", PRINTED, ids=lambda row: f"{row['id']} {row['method']}")
def test_a_row_has_exactly_the_hyperparameters_that_the_paper_states(printed):
    model, share = printed["model"], int(printed["batch"]) / 1024
    methods = printed["method"].split("+")
    stated = {
        "model.name": model.removesuffix(" (non-BN)").replace("-", "").lower(),
        "model.norm": "none" if "non-BN" in model else "batch",
        "schedule.name": printed["scheduler"].lower(),
        "train.batch_size": int(printed["batch"]),
        "loss.alpha": float(printed["alpha"] or 1),
        "loss.label_smoothing": float(printed["smoothing"] or 0),
        # Unstated: the rate goes with the batch, and clipping has its usual thresholds.
        "optimizer.lr": 0.4 * share,
        "schedule.warmup_start": 4e-4 * share,
        "clip.norm": 1.0 if "GC" in methods else None,
        "clip.agc": 0.01 if "AGC" in methods else None,
    }
    if printed["scheduler"] == "Step":
        stated |= {"schedule.milestones": [30, 60, 90], "schedule.gamma": 0.1}
    assert_exactly(row_of(printed).recipe, stated)


CIFAR = {  # all but the first three are unstated
    "data.name": "cifar10",
    "model.name": "resnet20",
    "train.epochs": 360,
    "train.batch_size": 128,
    "optimizer.lr": 0.1,
    "schedule.warmup_start": 1e-4,
    "data.crop_padding": 4,
}


def test_the_other_runs_have_exactly_what_the_paper_states():
    baseline, pgt = PAPER.find("E60").rows
    assert_exactly(baseline.recipe, {"model.name": "resnet50"})
    # alpha is unstated
    assert_exactly(pgt.recipe, {"model.name": "resnet50", "train.epochs": 60, "loss.alpha": 0.3})
    grids = {name: {"model.name": name, "train.epochs": 50} for name in ("resnet18", "resnet50")}
    for item, stated in zip(("G18", "G50", "G20"), (*grids.values(), CIFAR), strict=True):
        for row, alpha in zip(PAPER.find(item).rows, PAPER.find(item).grid, strict=True):
            assert_exactly(row.recipe, stated | {"loss.alpha": alpha})
    # The alphas that the text names are on the grids.
    assert 0.25 in PAPER.find("G18").grid
    assert {0.05, 0.3} <= set(PAPER.find("G50").grid)


def test_what_is_chosen_is_listed_as_unstated_and_does_not_override_the_row():
    for experiment in PAPER.experiments:
        for row in experiment.rows:
            listed = {key for choice in PAPER.about(row.id)[1] for key in choice.choice}
            assert set(row.chosen) <= listed
            assert not set(row.chosen) & set(row.stated)
            assert {**flat(row.recipe), **row.stated, **row.chosen} == flat(row.recipe)


@pytest.mark.parametrize(
    ("item", "notes", "unstated"),
    [
        ("T2.4", {"rate", "hook-rows"}, "the learning rate at batch 512"),
        ("T2.10", {"gap", "rate", "hook-rows"}, "the threshold of adaptive"),
        ("E60", {"match", "rate"}, "alpha of the 60-epoch run"),
        ("metrics", {"curves-alpha", "log-linear"}, "the scheduler of the curves"),
    ],
)
def test_notes_and_what_is_unstated_stand_beside_their_rows(item, notes, unstated):
    found, choices = PAPER.about(item)
    assert {note.id for note in found} == notes
    assert any(choice.what.startswith(unstated) for choice in choices)


def test_remarks_and_figures_name_what_exists():
    known = {"all", *FIGURES, *PAPER.items()}
    for experiment in PAPER.experiments:
        known |= {experiment.id, *(f"{experiment.id}/{row.arm}" for row in experiment.rows)}
    named = {name for remark in (*PAPER.notes, *PAPER.unstated) for name in remark.about}
    named |= {str(use) for figure in PAPER.figures for use in figure.uses}
    assert named <= known


def test_cost_is_images_over_published_speed():
    # 8 GPUs did 8322 and 16621 images/s (NVIDIA), one 826.06 (timm); 1,281,167 images, 100 epochs.
    v100, a100, rtx = (128_116_700 / speed / 3600 for speed in (8322 / 8, 16621 / 8, 826.06))
    recipes = {item: PAPER.find(item).rows[0].recipe for item in ("T1.2", "T2.1", "T3.3", "G20")}
    assert [*gpu_hours([recipes["T1.2"]]).values()] == pytest.approx([v100, a100, rtx])
    ratio = 826.06 / 2764.22  # of ResNet-50's speed to ResNet-18's
    smaller = gpu_hours([recipes["T2.1"]]).values()
    assert [*smaller] == pytest.approx([ratio * v100, ratio * a100, ratio * rtx])
    (gtx,) = gpu_hours([recipes["G20"]]).values()  # Keras: 35 s per epoch
    assert gtx == pytest.approx(360 * 35 / 3600, rel=1e-4)
    assert gpu_hours([Recipe().override({"data.name": "digits"})]) == {}
    assert gpu_hours([recipes["T1.2"], recipes["T3.3"]]) == gpu_hours([recipes["T1.2"]])


def test_show_has_recipe_numbers_commands_cost_and_notes(capsys, tmp_path):
    def shown(item):
        assert main(["show", item, "--results", str(tmp_path)]) == 0
        return capsys.readouterr().out

    printed = shown("T3.8")
    for text in (
        "train 77.69, test 76.39, gap 1.3",
        "warmup_start: 0.0004",
        "V100 16GB: 34.2",
        "python -m reproduction run T3.8 --data folder:/path/to/imagenet --train.accumulate 4",
        "torchrun --standalone --nproc-per-node=4 -m reproduction run T3.8 --data",
        "K - 1 wrong classes",
        "which parameters have weight decay",
    ):
        assert text in printed
    assert "missing: T2-256/AGC + PGT" in shown("F7")
    assert "  PGT: loss.alpha: 0.3\n" in shown("T1.4")


# As published -------------------------------------------------------------------------------------


# The hook itself is tested in test_audit.py.


def test_alpha_1_is_cross_entropy_and_the_callers_tensor_keeps_no_hook():
    logits, labels = torch.randn(8, 4, dtype=torch.float64, requires_grad=True), torch.arange(8) % 4
    (want,) = torch.autograd.grad(F.cross_entropy(logits, labels), logits)
    (got,) = torch.autograd.grad(as_published_cross_entropy(logits, labels, alpha=1.0), logits)
    assert torch.equal(got, want)
    as_published_cross_entropy(logits, labels, alpha=0.3)
    assert not logits._backward_hooks


@pytest.mark.parametrize(
    ("alpha", "labels", "named"),
    [
        (0.0, torch.zeros(2, dtype=torch.long), "`alpha`"),
        (1.5, torch.zeros(2, dtype=torch.long), "`alpha`"),
        (0.5, torch.full((2, 3), 1 / 3), "class indices"),
    ],
)
def test_what_the_hook_does_not_know_is_refused(alpha, labels, named):
    with pytest.raises(ValueError, match=named):
        as_published_cross_entropy(torch.zeros(2, 3, requires_grad=True), labels, alpha=alpha)


def test_it_trains_under_a_scaler_that_settles_at_the_square_of_the_rows(tmp_path):
    """16 rows: the scale comes down from 65536 to 256, and the equation's accuracy is reached."""
    changes = {"data.limit": 320, "model.width": 4, "model.norm": "none", "machine.threads": 1}
    changes |= {"train.batch_size": 16, "train.epochs": 6, "train.precision": "float16"}
    changes |= {"schedule.warmup_epochs": 1, "optimizer.lr": 0.05, "loss.alpha": 0.5}
    run = train(Recipe().override({**changes, "loss.form": "as_published"}), tmp_path / "run")
    result = run.result()
    assert result is not None
    assert not result.about["diverged"]
    assert [row["loss_scale"] for row in run.metrics()] == [256] * 6
    assert (result.metrics["train_accuracy"] or 0) > 60
