"""`powergrad export`: every file reloaded as its card says, against the run's own weights."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from photos import write_photos
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from scipy.optimize import minimize_scalar
from sklearn.datasets import load_digits
from torch import nn
from torchvision_shim import declare_torchvision_schemas

import powergrad_cli
from powergrad import __version__
from powergrad.lab.data import load_data
from powergrad.lab.data.streams import held_out
from powergrad.lab.trainer import export, trained
from powergrad.lab.trainer.networks import create_model
from powergrad.lab.trainer.recipe import Data, Recipe, load_recipe
from powergrad.lab.trainer.run_folder import Run, RunError
from powergrad.lab.trainer.training import train

ALPHA = 0.25
ALL = {"model.safetensors", "model.pt2", "model.onnx", "preprocessing.json", "README.md"}


def command(*tokens: object) -> int:
    return powergrad_cli.main(["export", *map(str, tokens)])


def train_small(folder: Path, **changes: Any) -> Path:
    small = {"train.epochs": 4, "train.batch_size": 32, "train.test_every": 1, "monitor.every": 0}
    named = {key.replace("__", "."): value for key, value in changes.items()}
    train(load_recipe("digits", {**small, "machine.threads": 1, **named}), folder)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return train_small(tmp_path_factory.mktemp("run") / "pgt", loss__alpha=ALPHA)


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
    text = Run(folder).recipe().override(named).to_yaml()
    (folder / "config.yaml").write_text(text)


def digits(test: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pixels, normalised images and labels, straight from scikit-learn."""
    values, labels = load_digits(return_X_y=True)
    chosen = held_out(labels, 0.2)
    pixels = 15.0 * values.reshape(-1, 1, 8, 8)
    known = pixels[~chosen]
    part = chosen if test else ~chosen
    images = (pixels[part] - known.mean()) / known.std()
    return (
        torch.tensor(pixels[part], dtype=torch.float32),
        torch.tensor(images, dtype=torch.float32),
        torch.tensor(labels[part]),
    )


@torch.no_grad()
def trained_logits(folder: Path, images: torch.Tensor) -> torch.Tensor:
    network = create_model("resnet8", num_classes=10, in_channels=1, width=8, norm="none")
    network.load_state_dict(load_file(folder / "model.safetensors"))
    return network.eval()(images)


def card_table(card: str) -> dict[str, dict[str, float]]:
    names = ("temperature", "accuracy", "nll", "brier", "ece_width", "ece_mass")
    rows = re.findall(r"^\| ([^|]+) \| ([\d.| ]+) \|$", card, re.MULTILINE)
    return {
        name: dict(zip(names, map(float, cells.split("|")), strict=True)) for name, cells in rows
    }


# What the files give ------------------------------------------------------------------------------


def test_the_folder_holds_these_files_and_no_others(run, exported):
    assert {path.name for path in exported.iterdir()} == ALL
    assert not [path.name for path in run.iterdir() if path.name.startswith(".")]


def test_every_file_loads_as_the_card_says(run, exported, monkeypatch):
    pixels, images, _ = digits(test=True)
    z = trained_logits(run, images)
    blocks = re.findall(r"^```python\n(.*?)^```", (exported / "README.md").read_text(), re.M | re.S)
    monkeypatch.chdir(exported)
    namespace: dict[str, Any] = {}
    exec(blocks[0], namespace)
    assert namespace["pixels"].shape == (4, 1, 8, 8)
    loaders = [block for block in blocks if "logits =" in block]
    assert len(loaders) == 3
    for block in loaders:
        for size in (1, 5, len(pixels)):
            namespace["pixels"] = pixels[:size]
            exec(block, namespace)
            exec(blocks[-1], namespace)
            expected = (ALPHA * z[:size]).softmax(1)
            torch.testing.assert_close(namespace["probabilities"], expected, atol=1e-5, rtol=0)
            assert torch.equal(namespace["logits"].argmax(1), z[:size].argmax(1))


def test_every_file_says_what_it_is(run, exported):
    import onnxruntime

    with safe_open(exported / "model.safetensors", "pt") as file:
        from_safetensors = file.metadata()
    extra = {"metadata.json": ""}
    torch.export.load(exported / "model.pt2", extra_files=extra)
    session = onnxruntime.InferenceSession(exported / "model.onnx")
    from_onnx = session.get_modelmeta().custom_metadata_map
    assert from_safetensors.pop("format") == "pt"
    assert from_safetensors == json.loads(extra["metadata.json"])
    assert from_safetensors.items() <= from_onnx.items()
    assert from_onnx["recipe_key"] == Run(run).recipe().key
    assert float(from_onnx["alpha"]) == ALPHA
    assert float(from_onnx["temperature_folded"]) == 1 / ALPHA
    assert json.loads(from_onnx["classes"]) == list("0123456789")
    assert from_onnx["powergrad_version"] == __version__
    (given,), (made,) = session.get_inputs(), session.get_outputs()
    assert (given.name, given.shape, given.type) == ("pixels", ["batch", 1, 8, 8], "tensor(float)")
    assert (made.name, made.shape) == ("logits", ["batch", 10])


def test_a_folder_of_images_is_normalised_by_the_graph(tmp_path):
    rng = np.random.default_rng(0)
    for part in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            pixels = rng.integers(0, 256, (9, 9, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / part / name / "1.png")
    data = load_data(Data(name=f"folder:{tmp_path}", size=8))
    (images, _), _ = next(data.test.test_batches(2))
    deployed = export.Deployed(nn.Identity(), *export.normalisation(data.test))
    pixels = deployed.pixels(images)
    assert torch.equal(pixels, pixels.byte().float())
    assert torch.equal(deployed(pixels), images)
    mean, std = (
        torch.tensor(v).view(3, 1, 1) for v in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    )
    torch.testing.assert_close(images, (pixels / 255 - mean) / std)


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


def prepared_by_hand(path: Path, prepared: dict[str, Any]) -> np.ndarray:
    """What preprocessing.json says, step by step."""
    (size, _), crop, resize = prepared["size"], prepared["crop"], prepared["resize"]
    assert prepared["steps"] == ["crop", "resize", "normalise"]
    assert prepared["channels"] == ["red", "green", "blue"]
    assert (crop["shape"], crop["at"]) == ("square", "centre")
    assert resize == {"filter": "bilinear", "antialias": True, "implementation": "Pillow"}
    assert prepared["range"] == [0, 255]
    with Image.open(path) as image:
        full = np.array(image.size)
        names: dict[str, Any] = {"width": image.width, "height": image.height, **crop}
        for name in ("side", "left", "top"):
            names[name] = eval(crop[name], dict(names))
        side = names["side"]
        k = max(
            k for k in (8, 4, 2, 1) if k == 1 or (k <= full // np.ceil(full * size / side)).all()
        )
        image.draft(None, tuple((full // k).tolist()))
        factor = np.array(image.size) / full
        assert (image.size == -(-full // k)).all()
        corner = np.array([names["left"], names["top"]])
        (left, top), (right, bottom) = (
            np.floor(edge * factor + 0.5).astype(int) for edge in (corner, corner + side)
        )
        rgb = np.asarray(image.convert("RGB"))[top:bottom, left:right]
    pixels = np.asarray(Image.fromarray(rgb).resize((size, size), Image.Resampling.BILINEAR))
    return np.moveaxis(pixels.astype(np.float32), 2, 0)


def test_images_prepared_as_the_export_says_have_the_recorded_accuracy(photo_run, monkeypatch):
    import onnxruntime

    assert command(photo_run) == 0
    monkeypatch.chdir(photo_run / "export")
    prepared = json.loads(Path("preprocessing.json").read_text())
    root = Path(Run(photo_run).recipe().data.name.removeprefix("folder:"))
    paths = sorted((root / "val").rglob("*.jpg"))
    classes = json.loads((photo_run / "classes.json").read_text())
    labels = np.array([classes.index(path.parent.name) for path in paths])
    result = Run(photo_run).result()
    assert result is not None
    assert 40 < result["test_accuracy"] < 100  # or the comparison would say little

    # By what preprocessing.json says, and the weights of the network alone.
    pixels = np.stack([prepared_by_hand(path, prepared) for path in paths])
    mean, std = (np.reshape(prepared["normalise"][key], (3, 1, 1)) for key in ("mean", "std"))
    network = create_model("resnet18", num_classes=4, width=8)
    network.load_state_dict(load_file("model.safetensors"))
    with torch.no_grad():
        logits = network.eval()(torch.tensor((pixels - mean) / std, dtype=torch.float32)).numpy()
    assert 100 * (logits.argmax(1) == labels).mean() == pytest.approx(result["test_accuracy"])

    # By the code of the card, and the graph that normalises by itself.
    card = Path("README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", card, re.M | re.S)
    namespace: dict[str, Any] = {}
    exec(blocks[0], namespace)
    same = np.stack([namespace["prepare"](path) for path in paths])
    assert np.array_equal(same, pixels)
    session = onnxruntime.InferenceSession("model.onnx")
    from_onnx = np.asarray(session.run(None, {"pixels": same})[0])
    np.testing.assert_allclose(from_onnx, logits, atol=1e-3)
    recorded = load_file(photo_run / "test.safetensors")["logits"].numpy()
    np.testing.assert_allclose(from_onnx, ALPHA * recorded, atol=1e-3)
    for block in blocks[1:]:
        exec(block.replace('"photo.jpg"', repr(str(paths[0]))), namespace)
    np.testing.assert_allclose(namespace["logits"].detach(), logits[:1], atol=1e-3)

    # What people do otherwise is not the same.
    plain = np.stack([np.moveaxis(np.asarray(load_rgb(path)), 2, 0) for path in paths])
    assert abs(plain.astype(np.float32) - pixels).mean() > 3
    extra = {"metadata.json": ""}
    torch.export.load("model.pt2", extra_files=extra)
    assert json.loads(json.loads(extra["metadata.json"])["preprocessing"]) == prepared


def load_rgb(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB").resize((32, 32))


def test_stored_sets_are_prepared_as_they_are(exported):
    prepared = json.loads((exported / "preprocessing.json").read_text())
    assert (prepared["crop"], prepared["resize"]) == (None, None)
    assert (prepared["channels"], prepared["size"]) == (["grey"], [8, 8])
    _, images, _ = digits(test=False)
    pixels = digits(test=False)[0]
    mean, std = prepared["normalise"]["mean"][0], prepared["normalise"]["std"][0]
    torch.testing.assert_close((pixels - mean) / std, images, atol=1e-5, rtol=0)
    assert "their 17 levels times 15" in (exported / "README.md").read_text()


def test_a_run_without_a_test_set_is_reported_on_half_of_what_it_held_out(tmp_path):
    photos = write_photos(tmp_path / "data", train=20, val=0)
    changes = {"train.epochs": 1, "train.batch_size": 16, "data.size": 16, "model.width": 8}
    data = {"data.name": f"folder:{photos}", "data.hold_out": 0.4, "machine.threads": 1}
    train(load_recipe("images", {**changes, **data, "schedule.warmup_epochs": 0}), tmp_path / "run")
    export.export_run(tmp_path / "run", formats=["safetensors"])
    card = (tmp_path / "run" / "export" / "README.md").read_text()
    assert "a fixed half of the training images that the run held out (`data.hold_out` 0.4)" in card
    assert "12 images not used for training or fitting" in card


# What the card says -------------------------------------------------------------------------------


def nll_at(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> float:
    return F.cross_entropy(logits.double() / temperature, labels).item()


def fit(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """The temperature of least NLL, by SciPy's search over its logarithm."""
    minimum: Any = minimize_scalar(
        lambda t: nll_at(logits, labels, math.exp(t)), bounds=(-4, 4), options={"xatol": 1e-9}
    )
    return math.exp(minimum.x)


def equal_mass_error(p: np.ndarray, labels: np.ndarray, bins: int) -> float:
    confidence, right = p.max(1), p.argmax(1) == labels
    order = confidence.argsort(kind="stable")
    ends = [math.ceil(k * len(p) / bins) for k in range(bins + 1)]
    gaps = [
        abs((confidence[part] - right[part]).sum())
        for part in (order[a:b] for a, b in itertools.pairwise(ends))
    ]
    return sum(gaps) / len(p)


def recomputed(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> dict[str, float]:
    with contextlib.suppress(ValueError):
        declare_torchvision_schemas()
    classification = pytest.importorskip("torchmetrics.functional.classification")
    p = (logits.double() / temperature).softmax(1)
    width = classification.multiclass_calibration_error(p, labels, 10, n_bins=15, norm="l1")
    return {
        "temperature": temperature,
        "accuracy": 100 * (logits.argmax(1) == labels).double().mean().item(),
        "nll": nll_at(logits, labels, temperature),
        "brier": (p - F.one_hot(labels, 10)).square().sum(1).mean().item(),
        "ece_width": width.item(),
        "ece_mass": equal_mass_error(p.numpy(), labels.numpy(), 15),
    }


def assert_card_shows(shown: dict[str, float], expected: dict[str, float]) -> None:
    for name, value in expected.items():
        digit = {"accuracy": 0.0051, "temperature": 5.1e-4 * value}.get(name, 5.1e-5)
        assert shown[name] == pytest.approx(value, abs=digit), name


def test_the_figures_of_the_card(run, exported):
    card = (exported / "README.md").read_text()
    _, images, labels = digits(test=True)
    z = trained_logits(run, images)
    half = torch.from_numpy(held_out(labels.numpy(), 0.5))
    table = card_table(card)
    assert list(table) == ["1", "1/alpha", "fitted", "exported"]
    t = fit(z[half], labels[half])
    for name, temperature in {"1": 1, "1/alpha": 4, "fitted": t, "exported": 4}.items():
        assert_card_shows(table[name], recomputed(z[~half], labels[~half], temperature))
    assert f"half of the test set, {int((~half).sum())} images" in card
    assert f"half of the test set, {int(half.sum())} images, because the run used all" in card


def test_hubs_read_the_card(exported):
    hub = pytest.importorskip("huggingface_hub")
    data = hub.ModelCard.load(exported / "README.md").data
    assert data.pipeline_tag == "image-classification"
    table = card_table((exported / "README.md").read_text())["exported"]
    values = {
        (entry.metric_type, entry.metric_name): entry.metric_value for entry in data.eval_results
    }
    assert values["accuracy", None] == pytest.approx(table["accuracy"] / 100, abs=1e-4)
    assert values["ece", "ECE, bins of equal width"] == pytest.approx(table["ece_width"], abs=1e-4)
    assert {entry.dataset_name for entry in data.eval_results} == {"digits"}


def test_the_card_has_the_recipe_but_not_the_machine(run, exported):
    import yaml

    text = (exported / "README.md").read_text()
    (block,) = re.findall(r"^```yaml\n(.*?)^```", text, re.M | re.S)
    assert Recipe.model_validate(yaml.safe_load(block)).key == Run(run).recipe().key
    assert "machine" not in yaml.safe_load(block)
    environment = Run(run).environment()
    for word in (environment["torch"], str(environment["commit"]), environment["time"][:10]):
        assert word in text


def test_held_out_training_data_is_fitted_on_and_the_test_set_reported(tmp_path):
    folder = train_small(tmp_path / "run", loss__alpha=ALPHA, data__hold_out=0.2)
    assert command(folder, "--temperature", "fitted", "--format", "safetensors") == 0
    assert {p.name for p in (folder / "export").iterdir()} == ALL - {"model.pt2", "model.onnx"}
    _, images, labels = digits(test=False)
    held = torch.from_numpy(held_out(labels.numpy(), 0.2))
    t = fit(trained_logits(folder, images[held]), labels[held])
    before, after = (load_file(p / "model.safetensors") for p in (folder, folder / "export"))
    for name, weight in before.items():
        factor = 1 / t if name.startswith("fc.") else 1
        torch.testing.assert_close(after[name], factor * weight, rtol=1e-5, atol=0)
    card = (folder / "export" / "README.md").read_text()
    assert f"the {int(held.sum())} training images that the run held out" in card
    assert "the test set, 359 images" in card
    _, images, labels = digits(test=True)
    assert_card_shows(
        card_table(card)["exported"], recomputed(trained_logits(folder, images), labels, t)
    )


# What can be chosen -------------------------------------------------------------------------------


@pytest.mark.parametrize(("temperature", "factor"), [("none", 1.0), ("2.5", 0.4), ("alpha", ALPHA)])
def test_the_head_is_divided_by_the_temperature(run, tmp_path, temperature, factor):
    made = export.export_run(
        run, tmp_path / "new" / "out", formats=["safetensors"], temperature=temperature
    )
    before, after = (load_file(p / "model.safetensors") for p in (run, made.folder))
    assert before.keys() == after.keys()
    for name, weight in before.items():
        expected = weight * factor if name.startswith("fc.") else weight
        torch.testing.assert_close(after[name], expected, rtol=1e-6, atol=0)
    assert made.temperature == pytest.approx(1 / factor)


def test_plain_cross_entropy_is_exported_as_it_is(tmp_path, capsys):
    folder = train_small(tmp_path / "run", train__epochs=2)
    assert command(folder, "--format", "safetensors", "--out", tmp_path / "out") == 0
    assert "temperature 1 is folded" in capsys.readouterr().out
    before, after = (load_file(p / "model.safetensors") for p in (folder, tmp_path / "out"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert "No temperature was folded" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("name", ["best.safetensors", "step-*.pt"])
def test_a_checkpoint_of_a_run(run, tmp_path, name):
    path = next(iter(sorted((run / "checkpoint").glob(name), reverse=True)))
    made = export.export_run(path, tmp_path / "out", formats=["safetensors"])
    saved = load_file(path) if path.suffix != ".pt" else torch.load(path)["model"]
    after = load_file(made.folder / "model.safetensors")
    torch.testing.assert_close(after["fc.weight"], ALPHA * saved["fc.weight"], rtol=1e-6, atol=0)
    remark = "are too optimistic" if name.startswith("best") else path.name
    assert remark in (made.folder / "README.md").read_text()


def test_the_scale_of_the_logits_is_folded_with_alpha(copied, tmp_path):
    change_recipe(copied, loss__logit_scale=2.0)
    made = export.export_run(copied, tmp_path / "out", formats=["safetensors"])
    assert made.temperature == 1 / (2 * ALPHA)
    assert "1/(alpha * logit_scale)" in made.results


def test_under_a_schedule_the_last_alpha_is_folded(copied, tmp_path):
    change_recipe(copied, loss__alpha_schedule="linear")
    result = json.loads((copied / "result.json").read_text())
    (copied / "result.json").write_text(json.dumps({**result, "alpha": 0.8}))
    made = export.export_run(copied, tmp_path / "out", formats=["safetensors"])
    assert made.temperature == 1 / 0.8
    with pytest.raises(
        ValueError,
        match="above 0 to fold it into the head, but got a checkpoint under the schedule linear",
    ):
        export.export_run(copied / "checkpoint" / "best.safetensors", tmp_path / "other")


def test_where_nothing_can_be_fitted_the_card_says_so(run, tmp_path, monkeypatch):
    def refuse(*_: object) -> float:
        raise ValueError("got all of them right")

    monkeypatch.setattr(trained.calibration, "fit_temperature", refuse)
    made = export.export_run(run, tmp_path / "out", formats=["safetensors"])
    assert "fitted" not in made.results
    assert "got all of them right" in (made.folder / "README.md").read_text()
    with pytest.raises(RunError, match="No temperature could be fitted"):
        export.export_run(run, tmp_path / "other", formats=["safetensors"], temperature="fitted")
    assert not (tmp_path / "other").exists()


# What is refused ----------------------------------------------------------------------------------


def test_an_export_that_is_there_is_kept(run, tmp_path, capsys):
    out = tmp_path / "out"
    assert command(run, "--format", "safetensors", "--out", out, "--temperature", "3") == 0
    card = (out / "README.md").read_text()
    assert command(run, "--format", "safetensors", "--out", out) == 2
    assert "--force" in capsys.readouterr().err
    assert (out / "README.md").read_text() == card
    assert command(run, "--format", "safetensors", "--out", out, "--force") == 0
    assert "temperature 4" in (out / "README.md").read_text()
    (out / "thesis.txt").write_text("mine")
    assert command(run, "--format", "safetensors", "--out", out, "--force") == 2
    assert "thesis.txt" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_file_that_disagrees_is_not_kept(run, tmp_path, monkeypatch):
    """In turn, each of the three; and what was there before stays."""

    class Program:
        def module(self):
            return lambda pixels: torch.zeros(len(pixels), 10)

    out = tmp_path / "out"
    export.export_run(run, out, formats=["safetensors"])
    before = (out / "model.safetensors").read_bytes()
    monkeypatch.setattr(torch.export, "export", lambda *_, **__: None)
    monkeypatch.setattr(torch.export, "save", lambda *_, **__: None)
    monkeypatch.setattr(torch.export, "load", lambda *_: Program())
    monkeypatch.setattr(
        export, "_write_onnx", lambda *_: lambda x: torch.full((len(x), 10), math.nan)
    )
    for name in ("torch", "onnx"):
        with pytest.raises(RunError, match=rf"logits of {export.FILES[name]} to equal.*difference"):
            export.export_run(run, out, formats=[name], force=True)
        with pytest.raises(RunError, match="nothing was written"):
            export.export_run(run, tmp_path / "fresh", formats=["safetensors", name])
    spoiled = {k: v * 1.001 for k, v in load_file(run / "model.safetensors").items()}
    monkeypatch.setattr(export, "load_file", lambda _: spoiled)
    with pytest.raises(RunError, match=r"logits of model\.safetensors to equal"):
        export.export_run(run, tmp_path / "fresh", formats=["safetensors"])
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (out / "model.safetensors").read_bytes() == before


def test_onnx_is_compared_to_five_digits(exported):
    pixels, _, _ = digits(test=True)
    runner = export._onnx_runner(exported / "model.onnx")
    logits = runner(pixels)
    export._check_logits("model.onnx", runner, pixels, logits)
    bound = 1e-5 * max(1.0, logits.abs().max().item())
    with pytest.raises(RunError, match=r"model\.onnx"):
        export._check_logits("model.onnx", runner, pixels, logits + 1.5 * bound)


def test_a_place_that_cannot_be_written(run, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert command(run, "--format", "safetensors", "--out", tmp_path / "file") == 2
    assert "Expected" in capsys.readouterr().err
    assert command(run, "--format", "safetensors", "--out", tmp_path / "file" / "out") == 2
    printed = capsys.readouterr().err
    assert "Expected to write" in printed
    assert "nothing was written" in printed


@pytest.mark.parametrize("package", export.ONNX_PACKAGES)
def test_onnx_packages_that_are_missing(run, tmp_path, monkeypatch, capsys, package):
    monkeypatch.setitem(sys.modules, package, None)
    assert command(run, "--out", tmp_path / "out") == 2
    printed = capsys.readouterr().err
    assert package in printed
    assert "pip install 'powergrad[export]'" in printed
    assert command(run, "--out", tmp_path / "out", "--format", "safetensors") == 0


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--format", "safetensor"], "did you mean 'safetensors'?"),
        (["--format", ","], "but got none"),
        (["--temperature", "hot"], "but got 'hot'"),
        (["--temperature", "0"], "a number above 0"),
        (["--temperature", "nan"], "a number above 0"),
    ],
)
def test_options_that_are_wrong(run, tmp_path, capsys, tokens, message):
    assert command(run, "--out", tmp_path / "out", *tokens) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_is_no_finished_run(copied, tmp_path, capsys):
    def error_of(source: Path) -> str:
        assert command(source, "--out", tmp_path / "out", "--format", "safetensors") == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    (tmp_path / "empty").mkdir()
    assert "no config.yaml" in error_of(tmp_path / "empty")
    assert "does not exist" in error_of(tmp_path / "nowhere")
    result = json.loads((copied / "result.json").read_text())
    (copied / "result.json").write_text(json.dumps({**result, "diverged": True}))
    assert "got a diverged one" in error_of(copied)
    (copied / "result.json").unlink()
    assert "finished run" in error_of(copied)
    made = export.export_run(copied / "checkpoint" / "best.safetensors", formats=["safetensors"])
    assert made.folder == copied / "export"  # a checkpoint may be of an unfinished one
    change_recipe(copied, model__width=4)
    assert "weights of resnet8" in error_of(copied / "checkpoint" / "best.safetensors")
    change_recipe(copied, train__ema=0.9)
    assert "two sets of weights" in error_of(next((copied / "checkpoint").glob("*.pt")))


def test_an_export_is_not_exported_again(exported, tmp_path, capsys):
    assert command(exported / "model.safetensors", "--out", tmp_path / "out") == 2
    assert "scaled twice" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_alpha_zero_has_no_temperature(copied, tmp_path, capsys):
    change_recipe(copied, loss__alpha=0.0)
    assert command(copied, "--out", tmp_path / "out", "--format", "safetensors") == 2
    assert "above 0 to fold it into the head, but got 0" in capsys.readouterr().err
    made = export.export_run(
        copied, tmp_path / "out", formats=["safetensors"], temperature="fitted"
    )
    assert list(made.results) == ["1", "fitted", "exported"]
