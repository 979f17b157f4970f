import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from powergrad.lab.trainer.recipe import (
    Recipe,
    RecipeError,
    describe_keys,
    flatten,
    header,
    load_recipe,
    nest,
    parse_overrides,
    recipe_names,
)


def test_the_default_is_the_papers_common_recipe():
    recipe = Recipe()
    assert recipe.optimizer.name == "sgd"
    assert recipe.optimizer.nesterov
    assert recipe.optimizer.momentum == 0.9
    assert recipe.optimizer.weight_decay == 5e-4
    assert recipe.optimizer.lr == 0.4
    assert recipe.schedule.warmup_epochs == 5
    assert recipe.schedule.warmup_start == 4e-4
    assert recipe.schedule.milestones == (30, 60, 90)
    assert recipe.schedule.gamma == 0.1
    assert recipe.train.epochs == 100
    assert recipe.train.batch_size == 1024
    assert recipe.loss.alpha == 1


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_loads_and_says_what_it_is_for(name):
    recipe = load_recipe(name, {"data.name": "folder:photos"} if name == "images" else {})
    assert Recipe.from_yaml(recipe.to_yaml(), "copy") == recipe
    text = header(name)
    for word in ("powergrad", "Hardware", "Expect"):
        assert word in text, f"{name}: no {word!r} in its header"


def test_a_recipe_refuses_data_that_it_is_not_made_for_unless_told_twice(tmp_path):
    for change in ({}, {"data.only": "any"}, {"data.size": 16}):
        assert load_recipe("zeroing-out", change).data.name == "digits"
    with pytest.raises(
        RecipeError,
        match=r"data: expected digits, for which this recipe is made, but got 'folder:pets'; for "
        r"photographs, use the recipe `images`; to use this recipe anyway, add `--data.only any`",
    ):
        load_recipe("zeroing-out", {"data.name": "folder:pets"})
    told_twice = load_recipe("zeroing-out", {"data.name": "folder:pets", "data.only": "any"})
    assert told_twice.data.name == "folder:pets"
    # Nothing of it is left in the recipe: neither in the run's name nor in its file.
    file = tmp_path / "plain.yaml"
    file.write_text("base: zeroing-out\ndata: {only: any}")
    assert load_recipe(file).key == load_recipe("zeroing-out").key
    assert "only" not in load_recipe("zeroing-out").to_yaml()
    assert told_twice.override({"seed": 1}).data.name == "folder:pets"


def test_the_recipe_for_photographs_asks_for_a_folder():
    with pytest.raises(RecipeError, match=r"`--data.name folder:PATH`, but got none"):
        load_recipe("images")
    with pytest.raises(RecipeError, match=r"expected folder:PATH, .* but got 'digits'; to use"):
        load_recipe("images", {"data.name": "digits"})
    recipe = load_recipe("images", {"data.name": "folder:pets"})
    assert (recipe.data.size, recipe.data.flip, recipe.model.norm) == (64, True, "batch")
    assert recipe.data.scale == (0.08, 1.0)  # the paper's


@given(
    alpha=st.floats(0, 1),
    lr=st.floats(1e-6, 10),
    seed=st.integers(0, 2**31 - 1),
    norm=st.sampled_from(["batch", "group", "none"]),
    clip=st.none() | st.floats(1e-3, 1e3),
)
def test_a_recipe_survives_yaml(alpha, lr, seed, norm, clip):
    recipe = Recipe().override(
        {
            "loss.alpha": alpha,
            "optimizer.lr": lr,
            "seed": seed,
            "model.norm": norm,
            "clip.norm": clip,
        }
    )
    again = Recipe.from_yaml(recipe.to_yaml(), "copy")
    assert again == recipe
    assert again.key == recipe.key


def test_the_key_tells_recipes_apart_and_ignores_the_machine():
    recipe = Recipe()
    assert recipe.override({"seed": 1}).key != recipe.key
    assert recipe.override({"optimizer.head.lr": 2.0}).key != recipe.key
    assert recipe.override({"machine.workers": 4, "machine.threads": 1}).key == recipe.key
    # Saying a default changes nothing, and 100 is 100.0.
    assert recipe.override({"schedule.warmup_epochs": 5, "loss.alpha": 1}).key == recipe.key


def test_the_key_is_the_same_in_every_process_and_version():
    """Run folders are named by it, so it may not depend on hash seeds or on newer fields."""
    assert Recipe(seed=3).key == "8c204c2cb867"
    changes = {"optimizer.lr": 0.1, "schedule.milestones": [1, 2], "loss.alpha": 0.3}
    assert Recipe().override(changes).key == "7f90c371ed97"


def test_all_faults_come_at_once_each_with_its_key():
    with pytest.raises(RecipeError) as caught:
        load_recipe(
            "digits",
            {
                "optimizer.lrr": 1,
                "loss.alpha": 1.3,
                "model.norm": "layer",
                "train.epochs": 2.5,
                "nonsense": 1,
            },
        )
    lines = str(caught.value).splitlines()
    assert lines[0] == "Found 5 errors in recipe 'digits':"
    text = "\n".join(lines)
    assert "optimizer.lrr: unknown key" in text
    assert "did you mean 'optimizer.lr'?" in text
    assert "loss.alpha: expected less than or equal to 1, but got 1.3" in text
    assert "model.norm: expected 'batch', 'group' or 'none', but got 'layer'" in text
    assert "train.epochs: expected" in text
    assert "nonsense: unknown key" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule.warmup_epochs": 200}, "schedule.warmup_epochs: expected less than"),
        ({"train.accumulate": 3}, "train.accumulate: expected a divisor"),
        ({"data.mixup": 0.2, "data.cutmix": 1.0}, "data.cutmix: expected 0"),
        (
            {"model.name": "timm:resnet18", "model.norm": "none"},
            "model.norm: expected the default",
        ),
        ({"optimizer.momentum": 0}, "expected momentum above 0 with nesterov"),
        ({"optimizer.lr": float("nan")}, "optimizer.lr: expected"),
        ({"optimizer.lr": 0}, "optimizer.lr: expected greater than 0, but got 0"),
        ({"seed": -1}, "seed: expected greater than or equal to 0, but got -1"),
        ({"loss": 3}, "loss: expected"),
        ({"clip.agc": 5e-4}, "clip.agc: expected more than optimizer.weight_decay of the backbone"),
        (
            {"clip.agc": 0.001, "optimizer.backbone.weight_decay": 4},
            "clip.agc: expected more than optimizer.weight_decay of the backbone, 0.002",
        ),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(changes, message):
    with pytest.raises(RecipeError) as caught:
        Recipe().override(changes)
    assert message in str(caught.value)


def test_clipping_under_the_decay_is_no_fault_where_the_backbone_has_less():
    changes = {"clip.agc": 4e-4, "optimizer.backbone.weight_decay": 0.25}
    assert Recipe().override(changes).clip.agc == 4e-4
    assert Recipe().override({"clip.agc": 1e-4, "optimizer.name": "adamw"}).clip.agc == 1e-4


def test_a_file_holds_only_what_it_changes(tmp_path):
    (tmp_path / "mine.yaml").write_text("# mine\nloss: {alpha: 0.25}\noptimizer: {lr: 1e-3}\n")
    recipe = load_recipe(tmp_path / "mine.yaml", {"seed": 5})
    assert recipe == Recipe().override({"loss.alpha": 0.25, "optimizer.lr": 0.001, "seed": 5})


def test_a_base_is_a_name_or_a_file_beside(tmp_path):
    (tmp_path / "one.yaml").write_text("loss: {alpha: 0.25}\nseed: 1\n")
    (tmp_path / "two.yaml").write_text("base: one.yaml\nseed: 2\n")
    assert load_recipe(tmp_path / "two.yaml") == Recipe().override({"loss.alpha": 0.25, "seed": 2})
    (tmp_path / "three.yaml").write_text("base: digits\nseed: 3\n")
    assert load_recipe(tmp_path / "three.yaml") == load_recipe("digits", {"seed": 3})
    (tmp_path / "one.yaml").write_text("base: two.yaml\n")
    with pytest.raises(RecipeError, match="no cycle of `base`"):
        load_recipe(tmp_path / "one.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [", "to be YAML"), ("- 1\n- 2\n", "keys and values"), ("", "keys and values")],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path, text, message):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(RecipeError, match=message):
        load_recipe(tmp_path / "x.yaml")


def test_a_recipe_that_is_not_there():
    with pytest.raises(RecipeError, match="did you mean 'digits'"):
        load_recipe("digitz")
    with pytest.raises(RecipeError, match="no such file"):
        load_recipe("nowhere/x.yaml")


def test_a_newer_format_is_refused():
    values = yaml.safe_load(Recipe().to_yaml()) | {"format": 99}
    with pytest.raises(RecipeError, match="a newer version of powergrad can read it"):
        Recipe.from_yaml(yaml.safe_dump(values), "config.yaml")


def test_overrides_from_a_command_line():
    changes = parse_overrides(
        ["--optimizer.lr", "1e-3", "--data.name=folder:/a=b", "train.compile=true", "--clip.agc",
         "null", "--schedule.milestones", "[1, 2]"]
    )  # fmt: skip
    assert changes == {
        "optimizer.lr": 1e-3,
        "data.name": "folder:/a=b",
        "train.compile": True,
        "clip.agc": None,
        "schedule.milestones": [1, 2],
    }


@pytest.mark.parametrize("tokens", [["--loss.alpha"], ["loss.alpha", "0.3"]])
def test_an_override_without_a_value_is_refused(tokens):
    with pytest.raises(RecipeError, match="Expected overrides as"):
        parse_overrides(tokens)


def test_every_key_is_described():
    keys = list(describe_keys())
    assert len({key for key, *_ in keys}) == len(keys)
    assert all(meaning and allowed for _, meaning, allowed, _ in keys)
    # Every key can be set to its own default.
    assert Recipe().override({key: default for key, *_, default in keys}) == Recipe()


@given(
    st.dictionaries(
        st.lists(st.sampled_from("abc"), min_size=3, max_size=3).map(".".join),
        st.integers() | st.none() | st.text(),
    )
)
def test_nesting_dotted_keys_and_flattening_them_are_inverse(values):
    assert dict(flatten(nest(values))) == values


def test_a_key_that_is_a_value_and_a_section_is_refused():
    with pytest.raises(RecipeError, match=r"either 'loss' or keys in it.*'loss.alpha'"):
        nest({"loss": 1, "loss.alpha": 0.3})
