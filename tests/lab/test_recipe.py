"""Recipes: their keys, files and overrides, and the errors of each."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powergrad.lab.trainer.recipe import (
    Recipe,
    RecipeError,
    describe_keys,
    header,
    load_recipe,
    parse_overrides,
    recipe_names,
)


@pytest.mark.parametrize("name", recipe_names())
def test_shipped_recipes_load_and_have_a_header(name):
    recipe = load_recipe(name, {"data.name": "folder:photos"} if name == "images" else {})
    assert Recipe.from_yaml(recipe.to_yaml(), "copy") == recipe
    assert all(word in header(name) for word in ("powergrad", "Hardware", "Expect"))


@given(
    alpha=st.floats(0, 1),
    lr=st.floats(1e-6, 10),
    seed=st.integers(0, 2**31 - 1),
    norm=st.sampled_from(["batch", "group", "none"]),
    clip=st.none() | st.floats(1e-3, 1e3),
)
def test_yaml_round_trip_keeps_recipe_and_key(alpha, lr, seed, norm, clip):
    changes = {"loss.alpha": alpha, "optimizer.lr": lr, "model.norm": norm, "clip.norm": clip}
    recipe = Recipe().override({**changes, "seed": seed})
    again = Recipe.from_yaml(recipe.to_yaml(), "copy")
    assert (again, again.key) == (recipe, recipe.key)


def test_key_depends_on_the_training_and_not_on_the_machine():
    recipe = Recipe()
    assert recipe.override({"seed": 1}).key != recipe.key
    assert recipe.override({"optimizer.head.lr": 2.0}).key != recipe.key
    assert recipe.override({"machine.workers": 4, "machine.threads": 1}).key == recipe.key
    assert recipe.override({"schedule.warmup_epochs": 5, "loss.alpha": 1}).key == recipe.key
    # Run folders are named by it, so it may not depend on hash seeds or on newer fields.
    assert Recipe(seed=3).key == "8c204c2cb867"
    changes = {"optimizer.lr": 0.1, "schedule.milestones": [1, 2], "loss.alpha": 0.3}
    assert Recipe().override(changes).key == "7f90c371ed97"


def test_all_errors_are_reported_together():
    wrong = {"optimizer.lrr": 1, "loss.alpha": 1.3, "model.norm": "layer", "data.size": 2.5}
    wrong["nonsense"] = 1
    with pytest.raises(RecipeError) as caught:
        load_recipe("digits", wrong)
    first, *lines = str(caught.value).splitlines()
    assert first == "Found 5 errors in recipe 'digits':"
    assert {line.strip().partition(":")[0] for line in lines} == wrong.keys()
    assert "did you mean 'optimizer.lr'?" in str(caught.value)
    assert "loss.alpha: expected less than or equal to 1, but got 1.3" in str(caught.value)


def test_keys_of_earlier_versions_are_read_if_they_were_off():
    recipe = load_recipe("digits", {"data.mixup": 0.0, "train.ema": None})
    assert recipe == load_recipe("digits")
    text = Recipe().to_yaml().replace("data:\n", "data:\n  cutmix: 0.0\n")
    assert Recipe.from_yaml(text, "copy") == Recipe()
    with pytest.raises(RecipeError, match=r"train\.ema: unknown key"):
        load_recipe("digits", {"train.ema": 0.9})


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("schedule.warmup_epochs", {"schedule.warmup_epochs": 200}),
        ("train.accumulate", {"train.accumulate": 3}),
        ("loss.form", {"loss.form": "as_published"}),
        ("optimizer", {"optimizer.momentum": 0}),
        ("optimizer.lr", {"optimizer.lr": float("nan")}),
        ("optimizer.lr", {"optimizer.lr": 0}),
        ("seed", {"seed": -1}),
        ("loss", {"loss": 3}),
        ("clip.agc", {"clip.agc": 5e-4}),
        ("clip.agc", {"clip.agc": 0.001, "optimizer.backbone.weight_decay": 4}),
        ("data.scale", {"data.scale": [0.5, 0.2]}),
        ("data.scale.1", {"data.scale": [0.5, 1.2]}),
        ("data.ratio", {"data.ratio": [2, 1]}),
        ("data.groups", {"data.name": "folder:x", "data.groups": "("}),
        ("data", {"data.groups": "x"}),
        ("data", {"data.name": "folder:x", "data.crop_padding": 4}),
    ],
)
def test_invalid_values_name_their_key(key, changes):
    with pytest.raises(RecipeError) as caught:
        Recipe().override(changes)
    assert f"\n  {key}: expected" in str(caught.value)


def test_agc_below_the_decay_is_allowed_where_the_backbone_has_less():
    changes = {"clip.agc": 4e-4, "optimizer.backbone.weight_decay": 0.25}
    assert Recipe().override(changes).clip.agc == 4e-4
    assert Recipe().override({"clip.agc": 1e-4, "optimizer.name": "adamw"}).clip.agc == 1e-4


def test_recipe_file_holds_only_its_changes_and_may_have_a_base(tmp_path):
    files = {
        "mine": "# mine\nloss: {alpha: 0.25}\noptimizer: {lr: 1e-3}\n",
        "child": "base: mine.yaml\nseed: 2\n",
        "named": "base: digits\nseed: 3\n",
        "loop": "base: loop.yaml\n",
    }
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    changes = {"loss.alpha": 0.25, "optimizer.lr": 0.001}
    assert load_recipe(tmp_path / "mine.yaml", {"seed": 5}) == Recipe(seed=5).override(changes)
    assert load_recipe(tmp_path / "child.yaml") == Recipe(seed=2).override(changes)
    assert load_recipe(tmp_path / "named.yaml") == load_recipe("digits", {"seed": 3})
    with pytest.raises(RecipeError, match="base"):
        load_recipe(tmp_path / "loop.yaml")


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2\n", "", None])
def test_file_that_is_no_recipe_raises(tmp_path, text):
    if text is not None:
        (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(RecipeError, match=r"x\.yaml"):
        load_recipe(tmp_path / "x.yaml")
    with pytest.raises(RecipeError, match="did you mean 'digits'"):
        load_recipe("digitz")


def test_overrides_of_a_command_line():
    tokens = ["--optimizer.lr", "1e-3", "--data.name=folder:/a=b", "train.compile=true"]
    tokens += ["--clip.agc", "null", "--schedule.milestones", "[1, 2e1]", "--model.name", "[x"]
    assert parse_overrides(tokens) == {
        "optimizer.lr": 1e-3,
        "data.name": "folder:/a=b",
        "train.compile": True,
        "clip.agc": None,
        "schedule.milestones": [1, 20.0],
        "model.name": "[x",
    }
    for tokens in (["--loss.alpha"], ["loss.alpha", "0.3"]):
        with pytest.raises(RecipeError, match=r"loss\.alpha"):
            parse_overrides(tokens)


def test_every_key_is_described_and_can_be_set_to_its_default():
    keys = list(describe_keys())
    assert len({key for key, *_ in keys}) == len(keys)
    assert all(meaning and allowed for _, meaning, allowed, _ in keys)
    assert Recipe().override({key: default for key, *_, default in keys}) == Recipe()
    allowed = {key: text for key, _, text, _ in keys}
    assert allowed["loss.label_smoothing"] == "a number from 0 below 1"
    assert allowed["train.test_batch_size"] == "a whole number from 1 or null"
    assert Recipe().value("optimizer.head.lr") == 1.0
