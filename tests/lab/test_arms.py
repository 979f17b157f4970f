"""Arms, grids, search spaces and tuning."""

import csv
import math
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from studies import SMALL, results_of, study_of
from torch import nn

from powergrad import equivalent_training
from powergrad.lab.runs.pool import InlinePool
from powergrad.lab.study import Execution, Grid
from powergrad.lab.study.arms import (
    Fair,
    arms_of,
    command_arms,
    decomposition,
    head_exponent,
    identity_image,
    parse_arm,
    parse_grid,
)
from powergrad.lab.study.decompose import check_identity, describe_identity, explain_decomposition
from powergrad.lab.study.execute import tune_once
from powergrad.lab.study.space import Axis, Space
from powergrad.lab.study.tuning import Tuner
from powergrad.lab.terminal import Watch
from powergrad.lab.trainer.recipe import (
    Recipe,
    RecipeError,
    Tuned,
    flatten,
    load_recipe,
    tuned_settings,
)

PAIR = {"baseline": {}, "pgt": {"loss.alpha": 0.5}}
RECIPE_ARMS = partial(arms_of, recipe=SMALL)


def test_named_arms_are_the_papers_methods():
    texts = ["baseline", "pgt", "gc+pgt", "agc+pgt", "pgt+label-smoothing", "fast: lr=0.4, wd=0"]
    arms = arms_of(texts, Recipe(), [0.3])
    assert arms == {
        "baseline": {},
        "pgt": {"loss.alpha": 0.3},
        "gc+pgt": {"clip.norm": 1.0, "loss.alpha": 0.3},
        "agc+pgt": {"clip.agc": 0.01, "loss.alpha": 0.3},
        "pgt+label-smoothing": {"loss.alpha": 0.3, "loss.label_smoothing": 0.1},
        "fast": {"optimizer.lr": 0.4, "optimizer.weight_decay": 0},
    }
    several = arms_of(["baseline", "agc+pgt"], Recipe(), [0.1, 0.3])
    assert list(several) == ["baseline", "agc+pgt(0.1)", "agc+pgt(0.3)"]
    for changes in arms.values():
        Recipe().override(changes)  # each is a recipe


def test_arms_of_programs_are_options_of_run_and_flags():
    texts = ["baseline", "gc+agc+pgt", "head-lr", "less-decay", "wide: pgt --width '6 4'", "z: -x"]
    assert command_arms(texts, [0.5], exponent=1, agc=0.2) == {
        "baseline": {},
        "gc+agc+pgt": {"--clip-norm": 1.0, "--agc": 0.2, "--alpha": 0.5},
        "head-lr": {"--head-lr-scale": 0.5},
        "less-decay": {"--decay-scale": 0.5},
        "wide": {"--alpha": 0.5, "flags": ["--width", "6 4"]},
        "z": {"flags": ["-x"]},
    }
    assert list(command_arms(["baseline", "pgt"], [0.5, 0.2]))[1:] == ["pgt(0.5)", "pgt(0.2)"]
    assert command_arms(["head-lr"], [0.5])["head-lr"] == {"--head-lr-scale": 0.25}


@pytest.mark.parametrize(
    ("parse", "texts", "word"),
    [
        (RECIPE_ARMS, ["agc+pgtt"], "'pgt'"),
        (RECIPE_ARMS, ["pgt", "pgt"], "twice"),
        (RECIPE_ARMS, [": lr=1"], "name before the colon"),
        (command_arms, ["pgtt"], "'pgt'"),
        (command_arms, ["label-smoothing"], "--flag value"),
        (command_arms, ["a: --x 'y"], "quoted"),
        (command_arms, ["a:"], "--flag value"),
        (command_arms, ["pgt", "pgt"], "twice"),
        (partial(command_arms, agc=0.1), ["pgt"], "--agc only with an agc arm"),
        (lambda _, alphas: study_of(SMALL, {"a": {}, "b": {"loss.alpha": 1.0}}), [], "'a' and 'b'"),
    ],
)
def test_bad_arms_raise(parse, texts, word):
    with pytest.raises(RecipeError, match=word):
        parse(texts, alphas=[0.3])


def test_agc_and_less_decay_depend_on_the_decay():
    recipe = SMALL.override({"optimizer.weight_decay": 0.02})
    _, changes = parse_arm("agc", recipe, 0.3)
    assert changes == {"clip.agc": 0.16}
    recipe.override(changes)
    assert parse_arm("less-decay", recipe, 0.25)[1] == {"optimizer.weight_decay": 0.005}
    backbone = decomposition(recipe, 0.25)["backbone decay * alpha"]
    assert backbone == {"optimizer.backbone.weight_decay": 0.25}  # the same, for the backbone
    with pytest.raises(RecipeError, match="weight_decay above 0"):
        parse_arm("less-decay", recipe.override({"optimizer.weight_decay": 0}), 0.25)


@pytest.mark.parametrize(("name", "expected"), [("sgd", 1 / 16), ("adam", 1 / 4), ("adamw", 1 / 4)])
def test_head_lr_is_pgts_ratio_of_rates(name, expected):
    recipe = SMALL.override({"optimizer.name": name})
    assert parse_arm("head-lr", recipe, 0.25)[1] == {"optimizer.head.lr": expected}
    doubled = recipe.override({"optimizer.head.lr": 2.0})
    assert parse_arm("head-lr", doubled, 0.25)[1] == {"optimizer.head.lr": 2 * expected}
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
    equal = equivalent_training(model, kind(model.parameters(), lr=0.1), alpha=0.25)
    backbone, head = equal.param_groups
    assert expected == pytest.approx(head["lr"] / backbone["lr"], rel=1e-15)
    assert 0.25 ** head_exponent(2 * [kind.__name__]) == expected
    for names in (["Lion"], [], ["SGD", "Adam"]):
        with pytest.raises(RecipeError, match="head-lr"):
            head_exponent(names)


TUNED = Tuned(
    alpha=0.25,
    keys=("lr=0.1:1",),
    trials=32,
    seeds=3,
    arms={
        name: {"optimizer.lr": rate} for name, rate in (("baseline", 0.1), ("pgt", 0.3), ("agc", 1))
    },
)


def test_arms_have_the_settings_that_were_tuned_for_them():
    fair = Fair(TUNED)
    arms = arms_of(["baseline", "pgt", "agc"], SMALL, [0.25], fair)
    assert {arm: changes["optimizer.lr"] for arm, changes in arms.items()} == {
        "baseline": 0.1, "pgt": 0.3, "agc": 1}  # fmt: skip
    assert arms["pgt"]["loss.alpha"] == 0.25
    assert fair.sentence(arms).startswith("Every arm is at settings tuned for it, 32 points each. ")
    # At another alpha, only those without PGT; never an arm of the same name with other changes.
    fair = Fair(TUNED)
    arms = arms_of(["baseline", "pgt", "agc: lr=7"], SMALL, [0.5], fair)
    own = SMALL.optimizer.lr
    assert [changes["optimizer.lr"] for changes in arms.values()] == [0.1, own * 0.5, 7]
    for words in ("baseline at settings tuned for each, 32 points", "pgt at lr * alpha", "agc at"):
        assert words in fair.sentence(arms)
    assert "agc" not in fair.sentence(["baseline", "pgt"])  # after a budget left it out


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_without_tuned_settings_pgt_trains_the_backbone_as_the_baseline(optimizer):
    recipe = SMALL.override({"optimizer.name": optimizer, "optimizer.weight_decay": 0.01})
    fair = Fair(None)
    arms = arms_of(["baseline", "agc+pgt", "pgt-same-rate", "x: alpha=0.5"], recipe, [0.5], fair)
    assert arms["baseline"] == {}
    assert (arms["pgt-same-rate"], arms["x"]) == ({"loss.alpha": 0.5}, {"loss.alpha": 0.5})
    image = recipe.override(arms["agc+pgt"])
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    options = {"lr": image.optimizer.lr, "weight_decay": image.optimizer.weight_decay}
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[optimizer]
    backbone, _ = equivalent_training(model, kind(model.parameters(), **options), 0.5).param_groups
    assert backbone["lr"] == pytest.approx(recipe.optimizer.lr)
    assert backbone["weight_decay"] == pytest.approx(0.01)
    clip = max(0.01, 8 * 0.01)
    assert image.clip.agc == pytest.approx(clip / 0.5 if optimizer == "sgd" else clip)
    assert "agc+pgt at lr * alpha and weight decay / alpha" in fair.sentence(arms)
    assert Fair(None).sentence(arms) == ""
    with pytest.raises(RecipeError, match="alpha above 0"):
        arms_of(["pgt"], recipe, [0], Fair(None))


def test_tuned_settings_are_those_of_the_best_points():
    """In `noisy-digits`, by the runs in results/."""
    tuned, rows = tuned_settings("noisy-digits"), defaultdict(list)
    assert tuned is not None
    table = Path(__file__).parents[2] / "results" / "tuned_noisy_digits.csv"
    for row in csv.DictReader(table.read_text().splitlines()):
        values = {key: row[key] for key in ("optimizer.lr", "optimizer.weight_decay", "clip.agc")}
        point = tuple((key, float(value)) for key, value in values.items() if value)
        rows[row["arm"], point].append(float(row["held_out_accuracy"]))
        assert "dirty" not in row["commit"]
    for arm, settings in tuned.arms.items():
        means = {point: sum(v) / len(v) for (name, point), v in rows.items() if name == arm}
        assert len(means) == tuned.trials == 32
        assert dict(max(means, key=lambda point: means[point])) == settings
    assert {len(values) for values in rows.values()} == {tuned.seeds}
    recipe = load_recipe("noisy-digits")
    assert recipe.override(tuned.arms["baseline"]) == recipe


def test_decomposition_has_every_factor_of_the_identity():
    arms = decomposition(SMALL, 0.25)
    assert len(arms) == 10  # CE, PGT, their equal, five factors, CE(alpha z), CE at lr / alpha
    alone = [changes for arm, changes in arms.items() if "alpha" in arm and "CE" not in arm]
    assert len(alone) == 5
    assert {k: v for changes in alone for k, v in changes.items()} == arms["two-group CE"]
    with pytest.raises(RecipeError, match="alpha"):
        decomposition(SMALL, 1.0)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_equivalent_training_has_the_same_weights(optimizer):
    changes = {"optimizer.name": optimizer, "optimizer.weight_decay": 0.01, "train.epochs": 8}
    if optimizer != "sgd":
        changes |= {"optimizer.lr": 2e-3, "schedule.warmup_start": 1e-4}
    gaps = check_identity(SMALL.override(changes), alpha=0.3)
    assert list(gaps) == [1, 10]  # of 32 steps
    assert gaps[10] < 1e-12


@pytest.mark.parametrize(
    ("gaps", "words"),
    [
        ({1: 1e-16, 10: 1e-14, 200: 1e-9}, "they are the same training."),
        ({1: 1e-16, 10: 1e-13, 200: 0.56}, "unstable"),
        ({1: 1e-16, 10: 1e-2, 50: 0.1}, "WARNING"),
        ({1: math.nan, 10: math.nan}, "WARNING"),
    ],
)
def test_identity_is_claimed_only_where_it_is_seen(gaps, words):
    assert words in describe_identity(gaps)


@pytest.mark.parametrize(
    ("gains", "conclusion"),
    [
        ({"PGT": 1.0, "backbone lr / alpha": 1.2, "head lr * alpha": -1.5}, "backbone lr / alpha."),
        ({"PGT": 1.0, "CE(alpha z)": 2.0}, "PGT or its two groups are needed."),
        ({"head lr * alpha": 1.0}, "no gain to decompose."),
    ],
)
def test_decomposition_names_the_change_that_would_do(gains, conclusion):
    values = {
        arm: [90 + gains.get(arm, 0) + 0.05 * ((seed + n) % 4) for seed in range(12)]
        for n, arm in enumerate(decomposition(SMALL, 0.25))
    }
    assert explain_decomposition(results_of(values), 0.25).endswith(conclusion)


def test_grid_arms_are_all_points():
    grid = parse_grid(["alpha=1,0.5,0.1", "lr=0.1,0.2"])
    assert len(grid.arms()) == 6
    assert grid.arms()["alpha=0.5, lr=0.2"] == {"loss.alpha": 0.5, "optimizer.lr": 0.2}
    assert grid == Grid(values={"loss.alpha": (1, 0.5, 0.1), "optimizer.lr": (0.1, 0.2)})


@pytest.mark.parametrize("texts", [["lr"], ["lr="], ["lr=1,1"], ["lr=0.1", "optimizer.lr=0.3"]])
def test_bad_grids_raise(texts):
    with pytest.raises(RecipeError):
        parse_grid(texts)


def test_axis_without_values_is_around_the_recipes_own():
    assert Axis.parse("lr", 0.05).values == (0.0125, 0.025, 0.05, 0.1, 0.2)
    with pytest.raises(RecipeError, match=r"clip\.agc"):
        Axis.parse("agc", None)
    assert not Axis.parse("model.norm=none,batch").is_edge("batch")  # words have no edge


@given(st.floats(1e-6, 1e3), st.floats(1.01, 1e4), st.floats(0, 1))
def test_range_is_logarithmic_and_its_outer_tenths_are_edges(low, factor, place):
    axis = Axis("x", (), low, low * factor)
    value = axis.at(place)
    assert value == pytest.approx(low * factor**place, rel=1e-5)
    if abs(place - 0.1) > 1e-3 < abs(place - 0.9) and factor > 2:
        assert axis.is_edge(value) == (not 0.1 <= place <= 0.9)


def tuner_of(study, *texts, seeds=1, trials=None, **settings):
    values = dict(flatten(study.base.model_dump()))
    return Tuner(study, Space.parse(texts, values, list(study.arms), trials), seeds, **settings)


def tune(tuner: Tuner, folder: Path) -> Any:
    return tune_once(tuner, Execution(InlinePool(folder), Watch))


def test_points_are_shared_by_arms_and_differ_between_repeats():
    space = tuner_of(study_of(SMALL, PAIR), "lr=0.006:0.4", "pgt: wd=1e-4:1e-2", trials=4).space
    points = [[space.points(arm, repeat) for arm in PAIR] for repeat in range(3)]
    for plain, pgt in points:
        assert [p["optimizer.lr"] for p in plain] == [p["optimizer.lr"] for p in pgt]
        assert all(set(p) == {"optimizer.lr", "optimizer.weight_decay"} for p in pgt)
        assert all(set(p) == {"optimizer.lr"} for p in plain)
    rates = [p["optimizer.lr"] for plain, _ in points for p in plain]
    assert len(set(rates)) == 12
    assert all(0.006 <= rate <= 0.4 for rate in rates)


def test_identity_map_converts_the_points_of_arms_with_pgt():
    """As `Fair` does, whose settings are compared with `equivalent_training` above."""
    point, texts = {"optimizer.lr": 0.1, "optimizer.weight_decay": 1e-3}, ("lr=0.01:1", "wd=1e-4:1")
    study = study_of(SMALL, PAIR)
    tuner = tuner_of(study, *texts, map="identity")
    assert tuner.changes("baseline", point) == point
    image = identity_image({**dict(flatten(SMALL.model_dump())), **point}, 0.5)
    assert tuner.changes("pgt", point) == {**point, **image}
    assert (image["optimizer.lr"], image["optimizer.weight_decay"]) == (0.05, 2e-3)
    assert tuner_of(study, *texts).changes("pgt", point) == point


def test_trials_have_seeds_of_their_own_and_the_best_point_wins(made_up, tmp_path):
    made_up.accuracy = lambda recipe: 10 * recipe.optimizer.lr
    tuner = tuner_of(study_of(SMALL, PAIR, first_seed=1000), "lr=0.1,0.4,0.2", seeds=2)
    tuned, results = tune(tuner, tmp_path)
    assert {row.seed for row in results.trials} == {2000, 2001}
    assert tuned.settings("pgt") == {"loss.alpha": 0.5, "optimizer.lr": 0.4}
    line = results.tuning.describe("pgt")
    assert line == "pgt: lr 0.4 (lr 0.1: 1.00, lr 0.4: 4.00, lr 0.2: 2.00; lr at the edge)"
    many = study_of(SMALL, PAIR, "2000")
    assert list(tuner_of(many, "lr=0.1,0.4", seeds=2).seeds_of(3)) == [2006, 2007]


def test_points_that_are_no_recipe_cannot_win(made_up, tmp_path):
    """AGC must clip above the decay: with more decay, a point of agc is no recipe."""
    made_up.accuracy = lambda recipe: 90 + 100 * recipe.optimizer.weight_decay
    arms = {"baseline": {}, "clipped": {"clip.agc": 0.05}}
    tuner = tuner_of(study_of(SMALL, arms), "wd=0.001,0.01,0.1")
    _, results = tune(tuner, tmp_path)
    clipped = results.tuning.arms["clipped"]
    assert [bool(trial.note) for trial in clipped.trials] == [False, False, True]
    assert math.isnan(clipped.trials[2].mean)
    assert (clipped.chosen, results.tuning.arms["baseline"].chosen) == (1, 2)
    hopeless = tuner_of(study_of(SMALL, arms), "wd=0.1,0.2")
    with pytest.raises(RecipeError, match="'clipped'"):
        tune(hopeless, tmp_path)
