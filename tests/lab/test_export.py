"""`powergrad export`: every file reloaded as its card says, against the run's own weights."""

import itertools
import json
import math
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from photos import write_photos
from safetensors import safe_open
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from studies import powergrad

from powergrad import calibration
from powergrad.lab.data.streams import held_out
from powergrad.lab.trainer import export
from powergrad.lab.trainer.networks import create_model
from powergrad.lab.trainer.recipe import Recipe, load_recipe
from powergrad.lab.trainer.run_folder import Run, RunError
from powergrad.lab.trainer.training import train

command = partial(powergrad, "export")
ALPHA = 0.25
ALL = {"model.safetensors", "model.pt2", "model.onnx", "preprocessing.json", "README.md"}


def export_weights(source: Path, out: Path, **options: Any) -> export.Exported:
    return export.export_run(source, out, formats=["safetensors"], **options)


def train_small(folder: Path, **changes: Any) -> Path:
    small = {"train.epochs": 4, "train.batch_size": 32, "monitor.every": 0, "machine.threads": 1}
    train(load_recipe("digits", {**small, "loss.alpha": ALPHA, **changes}), folder)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return train_small(tmp_path_factory.mktemp("run") / "pgt", **{"train.test_every": 1})


@pytest.fixture(scope="module")
def exported(run) -> Path:
    assert command(run) == 0
    return run / "export"


@pytest.fixture
def copied(run, tmp_path) -> Path:
    """A run to spoil."""
    return Path(shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("export")))


def change_recipe(folder: Path, **changes: Any) -> None:
    named = {key.replace("__", "."): value for key, value in changes.items()}
    (folder / "config.yaml").write_text(Run(folder).recipe().override(named).to_yaml())


def change_result(folder: Path, **about: Any) -> None:
    result: Any = Run(folder).result()
    Run(folder).finish(result.model_copy(update={"about": {**result.about, **about}}))


def digits(test: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pixels, normalised images and labels, straight from scikit-learn."""
    values, labels = load_digits(return_X_y=True)
    chosen = held_out(np.array(labels), 0.2)
    pixels = 15.0 * values.reshape(-1, 1, 8, 8)
    part = chosen if test else ~chosen
    images = (pixels[part] - pixels[~chosen].mean()) / pixels[~chosen].std()
    tensors = (torch.tensor(array, dtype=torch.float32) for array in (pixels[part], images))
    return *tensors, torch.tensor(labels[part])  # pyright: ignore[reportReturnType]


@torch.no_grad()
def trained_logits(folder: Path, images: torch.Tensor) -> torch.Tensor:
    network = create_model("resnet8", num_classes=10, in_channels=1, width=8, norm="none")
    network.load_state_dict(load_file(folder / "model.safetensors"))
    return network.eval()(images)


def assert_head_scaled(before: Any, folder: Path, factor: float, rtol: float = 1e-6) -> None:
    """The export has the weights `before`, with the head times `factor`."""
    after = load_file(folder / "model.safetensors")
    assert before.keys() == after.keys()
    for name, weight in before.items():
        expected = weight * factor if name.startswith("fc.") else weight
        torch.testing.assert_close(after[name], expected, rtol=rtol, atol=0)


def python_blocks(folder: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (folder / "README.md").read_text(), re.M | re.S)


def card_table(folder: Path) -> dict[str, dict[str, float]]:
    names = ("temperature", "accuracy", "nll", "brier", "ece_width", "ece_mass")
    card = (folder / "README.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| ([\d.| ]+) \|$", card, re.MULTILINE)
    return {
        name: dict(zip(names, map(float, cells.split("|")), strict=True)) for name, cells in rows
    }


def test_every_file_loads_as_the_card_says(run, exported, monkeypatch):
    assert {path.name for path in exported.iterdir()} == ALL
    assert not [path.name for path in run.iterdir() if path.name.startswith(".")]
    pixels, images, _ = digits(test=True)
    z = trained_logits(run, images)
    first, *loaders, last = python_blocks(exported)
    monkeypatch.chdir(exported)
    namespace: dict[str, Any] = {}
    exec(first, namespace)
    assert namespace["pixels"].shape == (4, 1, 8, 8)
    prepared = json.loads(Path("preprocessing.json").read_text())
    assert (prepared["crop"], prepared["resize"]) == (None, None)  # a stored set
    mean, std = prepared["normalise"]["mean"][0], prepared["normalise"]["std"][0]
    torch.testing.assert_close((pixels - mean) / std, images, atol=1e-5, rtol=0)
    assert len(loaders) == 3
    for block, size in itertools.product(loaders, (1, 5, len(pixels))):
        namespace["pixels"] = pixels[:size]
        exec(block, namespace)
        exec(last, namespace)
        expected = (ALPHA * z[:size]).softmax(1)
        torch.testing.assert_close(namespace["probabilities"], expected, atol=1e-5, rtol=0)


def test_every_file_has_the_metadata(run, exported):
    import onnxruntime

    with safe_open(exported / "model.safetensors", "pt") as file:
        from_safetensors = file.metadata()
    extra = {"metadata.json": ""}
    torch.export.load(exported / "model.pt2", extra_files=extra)
    session = onnxruntime.InferenceSession(exported / "model.onnx")
    assert from_safetensors.pop("format") == "pt"
    assert from_safetensors == json.loads(extra["metadata.json"])
    assert from_safetensors.items() <= session.get_modelmeta().custom_metadata_map.items()
    assert from_safetensors["recipe_key"] == Run(run).recipe().key
    assert float(from_safetensors["temperature_folded"]) == 1 / ALPHA
    assert json.loads(from_safetensors["classes"]) == list("0123456789")
    (given,), (made,) = session.get_inputs(), session.get_outputs()
    assert (given.name, given.shape, given.type) == ("pixels", ["batch", 1, 8, 8], "tensor(float)")
    assert (made.name, made.shape) == ("logits", ["batch", 10])


@pytest.fixture(scope="module")
def photo_run(tmp_path_factory) -> Path:
    """A run on JPEGs of several sizes; in the larger ones, `draft` decodes a smaller image."""
    root = tmp_path_factory.mktemp("photos")
    write_photos(root / "data", classes=4, train=40, val=40, side=60)
    write_photos(root / "large", classes=4, train=40, val=40, side=150)
    for path in (root / "large").glob("*/*/*[05].jpg"):
        path.replace(root / "data" / path.relative_to(root / "large"))
    changes = {"train.epochs": 10, "train.batch_size": 16, "data.size": 32, "loss.alpha": ALPHA}
    data = {"data.name": f"folder:{root / 'data'}", "optimizer.lr": 0.05, "machine.threads": 1}
    train(load_recipe("images", {**changes, **data, "model.width": 8}), root / "run")
    return root / "run"


def test_images_prepared_as_the_card_says_have_the_recorded_logits(photo_run, monkeypatch):
    import onnxruntime

    assert command(photo_run) == 0
    monkeypatch.chdir(photo_run / "export")
    prepare, *blocks = python_blocks(photo_run / "export")
    namespace: dict[str, Any] = {}
    exec(prepare, namespace)
    paths = sorted((Run(photo_run).recipe().data.path / "val").rglob("*.jpg"))
    pixels = np.stack([namespace["prepare"](path) for path in paths])
    expected = ALPHA * load_file(photo_run / "test.safetensors")["logits"].numpy()
    session = onnxruntime.InferenceSession("model.onnx")
    from_onnx = np.asarray(session.run(None, {"pixels": pixels})[0])
    np.testing.assert_allclose(from_onnx, expected, atol=1e-3)
    for block in blocks:
        exec(block.replace('"photo.jpg"', repr(str(paths[0]))), namespace)
    np.testing.assert_allclose(namespace["logits"].detach(), expected[:1], atol=1e-3)
    prepared = json.loads(Path("preprocessing.json").read_text())
    crop = {"shape": "square", "at": "centre", "fraction_of_shorter_side": 0.875}
    assert (prepared["crop"], prepared["size"], prepared["range"]) == (crop, [32, 32], [0, 255])
    assert np.round(prepared["normalise"]["mean"], 3).tolist() == [123.675, 116.28, 103.53]
    extra = {"metadata.json": ""}
    torch.export.load("model.pt2", extra_files=extra)
    assert json.loads(json.loads(extra["metadata.json"])["preprocessing"]) == prepared


def assert_row(row: dict[str, float], logits: Any, labels: Any, temperature: float) -> None:
    """A row of the card against the functions that tests/test_calibration.py checks."""
    error = partial(calibration.expected_calibration_error, logits / temperature, labels, bins=15)
    expected = {
        "temperature": temperature,
        "accuracy": 100 * (logits.argmax(1) == labels).double().mean().item(),
        "nll": F.cross_entropy(logits.double() / temperature, labels).item(),
        "brier": calibration.brier_score(logits / temperature, labels),
        "ece_width": error(),
        "ece_mass": error(binning="mass"),
    }
    for name, value in expected.items():
        digit = {"accuracy": 0.0051, "temperature": 5.1e-4 * value}.get(name, 5.1e-5)
        assert row[name] == pytest.approx(value, abs=digit), name


def test_numbers_of_the_card(run, exported):
    _, images, labels = digits(test=True)
    z = trained_logits(run, images)
    half = torch.from_numpy(held_out(labels.numpy(), 0.5))
    table, t = card_table(exported), calibration.fit_temperature(z[half], labels[half])
    assert list(table) == ["1", "1/alpha", "fitted", "exported"]
    about = yaml.safe_load((exported / "README.md").read_text().split("---")[1])  # for hubs
    (entry,) = about["model-index"][0]["results"]
    measured = {found.get("name", found["type"]): found["value"] for found in entry["metrics"]}
    assert 100 * measured["accuracy"] == pytest.approx(table["exported"]["accuracy"], abs=0.01)
    assert measured["negative log-likelihood"] == pytest.approx(table["exported"]["nll"], abs=1e-4)
    for name, temperature in {"1": 1, "1/alpha": 4, "fitted": t, "exported": 4}.items():
        assert_row(table[name], z[~half], labels[~half], temperature)
    card = (exported / "README.md").read_text()
    assert f"half of the test set, {int((~half).sum())} images" in card
    assert f"half of the test set, {int(half.sum())} images, because the run used all" in card


def test_card_has_the_recipe_but_not_the_machine(run, exported):
    text = (exported / "README.md").read_text()
    (block,) = re.findall(r"^```yaml\n(.*?)^```", text, re.M | re.S)
    assert Recipe.model_validate(yaml.safe_load(block)).key == Run(run).recipe().key
    assert "machine" not in yaml.safe_load(block)
    environment = Run(run).environment()
    for word in (environment["torch"], str(environment["commit"]), environment["time"][:10]):
        assert word in text
    assert "{" not in re.sub(r"```.*?```|^---.*?^---", "", text, flags=re.M | re.S)


def test_temperature_is_fitted_on_held_out_images_and_reported_on_the_test_set(tmp_path):
    folder = train_small(tmp_path / "run", **{"data.hold_out": 0.2})
    assert command(folder, "--temperature", "fitted", "--format", "safetensors") == 0
    out = folder / "export"
    assert {p.name for p in out.iterdir()} == ALL - {"model.pt2", "model.onnx"}
    _, images, labels = digits(test=False)
    held = torch.from_numpy(held_out(labels.numpy(), 0.2))
    t = calibration.fit_temperature(trained_logits(folder, images[held]), labels[held])
    assert_head_scaled(load_file(folder / "model.safetensors"), out, 1 / t, rtol=1e-5)
    card = (out / "README.md").read_text()
    assert f"the {int(held.sum())} training images that the run held out" in card
    assert "the test set, 359 images" in card
    _, images, labels = digits(test=True)
    assert_row(card_table(out)["exported"], trained_logits(folder, images), labels, t)


def test_run_without_a_test_set_is_reported_on_half_of_the_held_out_images(tmp_path):
    photos = write_photos(tmp_path / "data", train=20, val=0)
    changes = {"train.epochs": 1, "train.batch_size": 16, "data.size": 16, "model.width": 8}
    data = {"data.name": f"folder:{photos}", "data.hold_out": 0.4, "machine.threads": 1}
    train(load_recipe("images", {**changes, **data, "schedule.warmup_epochs": 0}), tmp_path / "run")
    made = export_weights(tmp_path / "run", tmp_path / "out")
    card = (made.folder / "README.md").read_text()
    assert "a fixed half of the training images that the run held out (`data.hold_out` 0.4)" in card
    assert "12 images not used for training or fitting" in card


@pytest.mark.parametrize(("temperature", "factor"), [("none", 1.0), ("2.5", 0.4), ("alpha", ALPHA)])
def test_head_is_divided_by_the_temperature(run, tmp_path, temperature, factor):
    made = export_weights(run, tmp_path / "new" / "out", temperature=temperature)
    assert_head_scaled(load_file(run / "model.safetensors"), made.folder, factor)
    assert made.temperature == pytest.approx(1 / factor)


def test_checkpoint_can_be_exported(run, tmp_path):
    path = max((run / "checkpoint").glob("step-*.pt"))
    made = export_weights(path, tmp_path / "out")
    assert_head_scaled(torch.load(path)["model"], made.folder, ALPHA)
    assert path.name in (made.folder / "README.md").read_text()


def test_alpha_and_logit_scale_are_folded(copied, tmp_path):
    change_recipe(copied, loss__alpha=1.0)
    made = export_weights(copied, tmp_path / "plain")
    assert_head_scaled(load_file(copied / "model.safetensors"), made.folder, 1.0, rtol=0)
    change_recipe(copied, loss__alpha=ALPHA, loss__logit_scale=2.0)
    made = export_weights(copied, tmp_path / "scaled")
    assert made.temperature == 1 / (2 * ALPHA)
    assert "1/(alpha * logit_scale)" in made.results


def test_what_has_no_temperature(copied, tmp_path, monkeypatch):
    change_recipe(copied, loss__alpha=0.0)
    with pytest.raises(ValueError, match="above 0"):
        export_weights(copied, tmp_path / "out")
    made = export_weights(copied, tmp_path / "out", temperature="fitted")
    assert list(made.results) == ["1", "fitted", "exported"]

    def refuse(*_: object) -> float:
        raise ValueError("got all of them right")

    monkeypatch.setattr(export.calibration, "fit_temperature", refuse)
    made = export_weights(copied, tmp_path / "plain", temperature="none")
    assert list(made.results) == ["1", "exported"]
    assert "got all of them right" in (made.folder / "README.md").read_text()
    with pytest.raises(RunError, match="got all of them right"):
        export_weights(copied, tmp_path / "other", temperature="fitted")
    assert not (tmp_path / "other").exists()


def test_existing_export_is_replaced_only_by_force(run, tmp_path, capsys):
    out = tmp_path / "out"
    options = (run, "--format", "safetensors", "--out", out)
    assert command(*options, "--temperature", "3") == 0
    card = (out / "README.md").read_text()
    assert command(*options) == 2
    assert "--force" in capsys.readouterr().err
    assert (out / "README.md").read_text() == card
    assert command(*options, "--force") == 0
    assert "temperature 4" in (out / "README.md").read_text()
    (out / "thesis.txt").write_text("mine")
    assert command(*options, "--force") == 2
    assert "thesis.txt" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    for place in (out / "thesis.txt", out / "thesis.txt" / "out"):
        assert command(run, "--format", "safetensors", "--out", place) == 2
        assert repr(str(place)) in capsys.readouterr().err


@pytest.mark.parametrize("name", ["safetensors", "torch", "onnx"])
def test_file_with_other_logits_is_not_kept(run, tmp_path, monkeypatch, name):
    out = tmp_path / "out"
    export_weights(run, out)
    before = (out / "model.safetensors").read_bytes()
    monkeypatch.setattr(torch.export, "export", lambda *_, **__: None)
    for logits in (math.nan, 0.0):
        wrong = lambda pixels, logits=logits: torch.full((len(pixels), 10), logits)  # noqa: E731
        monkeypatch.setitem(export.WRITERS, name, lambda *_, wrong=wrong: wrong)
        for place in (out, tmp_path / "fresh"):
            with pytest.raises(RunError, match=export.FILES[name]):
                export.export_run(run, place, formats=[name], force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (out / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("package", export.ONNX_PACKAGES)
def test_missing_onnx_packages_are_named(run, tmp_path, monkeypatch, capsys, package):
    monkeypatch.setitem(sys.modules, package, None)
    assert command(run, "--out", tmp_path / "out") == 2
    printed = capsys.readouterr().err
    assert package in printed
    assert "pip install 'powergrad[export]'" in printed
    assert command(run, "--out", tmp_path / "out", "--format", "safetensors") == 0


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--format", "safetensor", "did you mean 'safetensors'"),
        ("--format", ",", "format`.*none"),
        *(("--temperature", value, f"temperature`.*{value}") for value in ("hot", "0", "nan")),
    ],
)
def test_wrong_options_raise(run, tmp_path, capsys, option, value, message):
    assert command(run, "--out", tmp_path / "out", option, value) == 2
    assert re.search(message, capsys.readouterr().err.replace("\n", " "))
    assert not list(tmp_path.iterdir())


def test_only_weights_of_converged_runs_are_exported(run, exported, copied, tmp_path, capsys):
    def error_of(source: Path) -> str:
        assert command(source, "--out", tmp_path / "out", "--format", "safetensors") == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    (tmp_path / "empty").mkdir()
    assert "no config.yaml" in error_of(tmp_path / "empty")
    assert "does not exist" in error_of(tmp_path / "nowhere")
    assert "scaled twice" in error_of(exported / "model.safetensors")
    change_result(copied, diverged=True)
    assert "diverged" in error_of(copied)
    (copied / "result.json").unlink()
    assert "not finished" in error_of(copied)
    last = max((copied / "checkpoint").glob("step-*.pt"))
    made = export.export_run(last, formats=["safetensors"])
    assert made.folder == copied / "export"  # a checkpoint may be of an unfinished one
    change_recipe(copied, model__width=4)
    assert "weights of resnet8" in error_of(last)
