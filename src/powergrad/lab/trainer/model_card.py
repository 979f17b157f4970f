"""The model card of an export: recipe, data, results, image preparation, code to load the files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import yaml

from powergrad.lab.data import Datasets
from powergrad.lab.environment import describe_machine
from powergrad.lab.trainer.recipe import Recipe
from powergrad.lab.trainer.trained import BINS, HeldOut, Trained
from powergrad.lab.words import markdown_table

# For each metric: its column heading, its type on model hubs, and its name there if it needs one.
MEASURES = {
    "accuracy": ("accuracy %", "accuracy", None),
    "nll": ("NLL", "nll", "negative log-likelihood"),
    "brier": ("Brier", "brier_score", None),
    "ece_width": ("ECE, width", "ece", "ECE, bins of equal width"),
    "ece_mass": ("ECE, mass", "ece", "ECE, bins of equal mass"),
}

# The test-time preparation of `powergrad.lab.data.folder.read_image`, with only Pillow and numpy.
PREPARE = """\
import math

import numpy as np
from PIL import Image

SIZE, FRACTION = {size}, {fraction}


def prepare(path):
    \"\"\"Pixels from 0 to 255, float32 (3, SIZE, SIZE), in the order red, green, blue.\"\"\"
    with Image.open(path) as image:
        width, height = image.size
        side = max(1, round(FRACTION * min(width, height)))  # of the centre crop
        left, top = (width - side) // 2, (height - side) // 2
        # Large JPEGs are decoded at a half, a quarter or an eighth of their size.
        image.draft(None, (math.ceil(width * SIZE / side), math.ceil(height * SIZE / side)))
        x, y = image.width / width, image.height / height
        box = (left * x, top * y, (left + side) * x, (top + side) * y)
        square = image.crop([int(edge + 0.5) for edge in box]).convert("RGB")
    square = square.resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    return np.asarray(square, np.float32).transpose(2, 0, 1)"""


def preprocessing(recipe: Recipe, data: Datasets, metadata: dict[str, str]) -> dict[str, Any]:
    """The preparation of images for an exported network, as JSON values."""
    crop = resize = None
    if recipe.data.name.startswith("folder:"):
        crop = {
            "shape": "square",
            "at": "centre",
            "fraction_of_shorter_side": recipe.data.test_crop,
            "side": "max(1, round(fraction_of_shorter_side * min(width, height)))",
            "left": "(width - side) // 2",
            "top": "(height - side) // 2",
            "jpeg_decoded_at": "1/k of its size, with the largest k of 8, 4, 2, 1 for which k is "
            "at most width // ceil(width * size / side) and height // ceil(height * size / side)",
            "edges_if_k_above_1": "floor(edge * decoded size / size + 0.5)",
        }
    if crop or recipe.data.size:
        by = "Pillow" if crop else "PyTorch"
        resize = {"filter": "bilinear", "antialias": True, "implementation": by}
    return {
        "steps": ["crop", "resize", "normalise"],
        "channels": ["grey"] if data.channels == 1 else ["red", "green", "blue"],
        "layout": "batch, channel, height, width",
        "dtype": "float32",
        "size": [data.size, data.size],
        "crop": crop,
        "resize": resize,
        "range": [0, 255],
        "normalise": {
            "mean": json.loads(metadata["mean"]),
            "std": json.loads(metadata["std"]),
            "by_the_caller": ["model.safetensors"],
            "by_the_file": ["model.pt2", "model.onnx"],
        },
        "exif_orientation": "ignored",
        "transparency": "dropped",
    }


def model_card(
    trained: Trained,
    data: Datasets,
    outputs: HeldOut,
    metadata: dict[str, str],
    results: dict[str, dict[str, float]],
    formats: list[str],
    unfitted: str,
) -> str:
    """The model card, in the format of model hubs."""
    recipe, exported = trained.recipe, results["exported"]
    dataset = recipe.data.name.removeprefix("folder:").rstrip("/").rpartition("/")[2]
    name = f"{recipe.model.name} on {dataset}"
    front_matter = {
        "library_name": "pytorch",
        "pipeline_tag": "image-classification",
        "tags": ["powergrad", recipe.model.name, *(file for file in formats if file != "torch")],
        "model-index": [{"name": name, "results": [_hub_result(dataset, exported)]}],
    }
    sections = [
        f"---\n{yaml.safe_dump(front_matter, sort_keys=False)}---",
        f"# {name}",
        f"A classifier of {len(data.classes)} classes, trained with {_loss(recipe)}. "
        + _folding(exported["temperature"]),
        _provenance(trained),
        "## Input and output",
        f"Images of shape (batch, {data.channels}, {data.size}, {data.size}), float32, "
        f"{'grey' if data.channels == 1 else 'in the order red, green, blue'}. "
        "`model.pt2` and `model.onnx` take pixels from 0 to 255 and normalise them. "
        "`model.safetensors` holds only the weights and needs normalised images: from pixels "
        f"between 0 and 255, subtract the mean {metadata['mean']} and divide by the standard "
        f"deviation {metadata['std']}, per channel. The output is one logit per class; its softmax "
        "gives the probabilities. The classes, in order:",
        f"```json\n{metadata['classes']}\n```",
        "## Preparing images",
        *_preparation(recipe, data),
        "## Results",
        f"Measured on {outputs.report_on}. "
        + (unfitted or f"The fitted temperature minimises the NLL on {outputs.fit_on}."),
        _results_table(results),
        "NLL is in nats. The Brier score is summed over the classes. The calibration errors (ECE) "
        f"use {BINS} bins of equal width or of equal mass. The last row is the exported network "
        "with its own softmax; the rows above are the trained network at different temperatures.",
        "## Loading",
        *(f"```python\n{code}\n```" for code in _snippets(trained, data, metadata, formats)),
        "## Recipe",
        f"The network was trained on {len(data.train):,} images. The complete recipe, with key "
        f"`{recipe.key}`:",
        f"```yaml\n{_recipe_text(recipe)}```",
    ]
    return "\n\n".join(sections) + "\n"


def _recipe_text(recipe: Recipe) -> str:
    return yaml.safe_dump(recipe.model_dump(mode="json", exclude={"machine"}), sort_keys=False)


def _hub_result(dataset: str, measured: dict[str, float]) -> dict[str, Any]:
    """The metrics in the ``model-index`` format of model hubs."""
    metrics = []
    for key, (_, kind, name) in MEASURES.items():
        value = measured[key] / 100 if key == "accuracy" else measured[key]
        metrics.append({"type": kind, **({"name": name} if name else {}), "value": value})
    return {
        "task": {"type": "image-classification"},
        "dataset": {"name": dataset, "type": dataset},
        "metrics": metrics,
    }


def _loss(recipe: Recipe) -> str:
    loss = recipe.loss
    if loss.alpha == 1:
        return "cross-entropy"
    changing = "" if loss.alpha_schedule == "constant" else f" ({loss.alpha_schedule} to 1)"
    return f"cross-entropy with PowerGrad Transform at alpha {loss.alpha:g}{changing}"


def _folding(temperature: float) -> str:
    if temperature == 1:
        return "No temperature was folded into its head: the logits are those of the training."
    return (
        f"Its head was divided by the temperature {temperature:.6g}, so the softmax of its logits "
        "is that of the trained network at this temperature. The predicted classes are unchanged."
    )


def _provenance(trained: Trained) -> str:
    def describe(machine: dict[str, Any]) -> str:
        versions = ", ".join(f"{name} {machine.get(name)}" for name in ("powergrad", "torch"))
        return f"{str(machine.get('time'))[:10]} with {versions}, commit {machine.get('commit')}"

    text = f"Trained on {describe(trained.run.environment())}; exported on "
    text += f"{describe(describe_machine())}."
    if trained.path.name == "best.safetensors":
        text += (
            " These are not the final weights of the run, but those with the best accuracy on its "
            "test images, so the results on the same images are too optimistic."
        )
    elif trained.path.name != "model.safetensors":
        text += f" These are the weights of the checkpoint {trained.path.name}."
    return text


def _results_table(results: dict[str, dict[str, float]]) -> str:
    header = ["temperature", "", *(heading for heading, *_ in MEASURES.values())]
    rows = []
    for name, row in results.items():
        numbers = [f"{row[key]:.{2 if key == 'accuracy' else 4}f}" for key in MEASURES]
        rows.append([name, f"{row['temperature']:.4g}", *numbers])
    return markdown_table(header, rows)


def _preparation(recipe: Recipe, data: Datasets) -> Iterator[str]:
    size, fraction = data.size, recipe.data.test_crop
    exactly = "The results below hold for images that are prepared as in the tests of the run"
    if not recipe.data.name.startswith("folder:"):
        resized = f", resized to {size}x{size} pixels (bilinear, antialiased)"
        yield (
            f"{exactly}: the images of {recipe.data.name} as they are stored"
            f"{resized if recipe.data.size else ''}"
            f"{', with their 17 levels times 15' if recipe.data.name == 'digits' else ''}. "
            "`preprocessing.json` describes the same for programs."
        )
        return
    yield (
        f"{exactly}: a square in the centre, with {fraction:g} of the shorter side of the image, "
        f"is cropped and resized to {size}x{size} pixels by Pillow's bilinear filter, which is "
        "antialiased. EXIF orientation is ignored, and transparency is dropped. Other ways to "
        "resize or crop reduce the accuracy. `preprocessing.json` describes the same for programs, "
        "and the following code implements it for images with 8 bits per channel (divide 16-bit "
        "grey values by 257):"
    )
    yield f"```python\n{PREPARE.format(size=size, fraction=fraction)}\n```"


def _snippets(
    trained: Trained, data: Datasets, metadata: dict[str, str], formats: list[str]
) -> Iterator[str]:
    """Code that loads each file, to be run in the folder of the export."""
    arguments = ", ".join(f"{key}={value!r}" for key, value in trained.options(data).items())
    shape = f"4, {data.channels}, {data.size}, {data.size}"
    if trained.recipe.data.name.startswith("folder:"):
        yield (
            'import torch\n\npaths = ["photo.jpg"]  # your images\n'
            "pixels = torch.from_numpy(np.stack([prepare(path) for path in paths]))"
        )
    else:
        yield f"import torch\n\npixels = 255 * torch.rand({shape})  # your images"
    if "safetensors" in formats:
        yield (
            "from safetensors.torch import load_file\n"
            "from powergrad.lab.trainer.networks import create_model\n\n"
            f"network = create_model({arguments})\n"
            'network.load_state_dict(load_file("model.safetensors"))\n'
            f"mean, std = torch.tensor([{metadata['mean']}, {metadata['std']}])[..., None, None]\n"
            "logits = network.eval()((pixels - mean) / std)"
        )
    if "torch" in formats:
        yield 'logits = torch.export.load("model.pt2").module()(pixels)'
    if "onnx" in formats:
        yield (
            "import onnxruntime\n\n"
            'session = onnxruntime.InferenceSession("model.onnx")\n'
            'logits = torch.from_numpy(session.run(["logits"], {"pixels": pixels.numpy()})[0])'
        )
    yield "probabilities = logits.softmax(1)"
