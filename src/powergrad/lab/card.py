"""The model card of an export: recipe, data, results, and how each file is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from powergrad.lab.config import Recipe
from powergrad.lab.data import Datasets
from powergrad.lab.run import describe_machine
from powergrad.lab.trained import BINS, HeldOut, Trained

__all__ = ["model_card"]


def model_card(
    trained: Trained,
    data: Datasets,
    found: HeldOut,
    metadata: dict[str, str],
    results: dict[str, dict[str, float]],
    formats: list[str],
    unfitted: str,
) -> str:
    """The model card, as model hubs read it."""
    recipe, exported = trained.recipe, results["exported"]
    name = f"{recipe.model.name} on {_dataset(recipe)}"
    sections = [
        f"---\n{_front_matter(name, recipe, formats, exported)}---",
        f"# {name}",
        f"A classifier of {len(data.classes)} classes, trained with {_loss(recipe)}. "
        + _folding(exported["temperature"]),
        _provenance(trained),
        "## Input and output",
        f"Images of shape (batch, {data.channels}, {data.size}, {data.size}), float32. "
        "`model.pt2` and `model.onnx` take pixels from 0 to 255, and normalise them themselves. "
        "`model.safetensors` holds the weights alone, for images that are normalised: of pixels "
        f"from 0 to 255 subtract the mean {metadata['mean']}, and divide by the standard deviation "
        f"{metadata['std']}, a channel. What comes out is a logit a class; probabilities are their "
        "softmax. The classes, in order:",
        f"```json\n{metadata['classes']}\n```",
        "## Results",
        f"Measured on {found.report_on}. "
        + (unfitted or f"The fitted temperature has the least NLL on {found.fit_on}."),
        _results_table(results),
        "NLL is in nats; the Brier score is summed over the classes; the calibration errors (ECE) "
        f"are over {BINS} bins of equal width, and of equal mass. The last row is the exported "
        "network's, by its own softmax; those above are the trained network's at a temperature.",
        "## Loading",
        *_snippets(trained, data, metadata, formats),
        "## Recipe",
        f"{len(data.train):,} training images. The key of the recipe is `{recipe.key}`; this is "
        "all of it:",
        f"```yaml\n{_recipe_text(recipe)}```",
    ]
    return "\n\n".join(sections) + "\n"


def _recipe_text(recipe: Recipe) -> str:
    return yaml.safe_dump(recipe.model_dump(mode="json", exclude={"machine"}), sort_keys=False)


def _dataset(recipe: Recipe) -> str:
    return recipe.data.name.removeprefix("folder:").rstrip("/").rpartition("/")[2]


def _front_matter(name: str, recipe: Recipe, formats: list[str], exported: dict[str, float]) -> str:
    dataset = {"name": _dataset(recipe), "type": _dataset(recipe)}
    measured = [
        {"type": "accuracy", "value": exported["accuracy"] / 100},
        {"type": "nll", "name": "negative log-likelihood", "value": exported["nll"]},
        {"type": "brier_score", "value": exported["brier"]},
        {"type": "ece", "name": "ECE, bins of equal width", "value": exported["ece_width"]},
        {"type": "ece", "name": "ECE, bins of equal mass", "value": exported["ece_mass"]},
    ]
    task = {"type": "image-classification"}
    result = {"task": task, "dataset": dataset, "metrics": measured}
    values = {
        "library_name": "pytorch",
        "pipeline_tag": "image-classification",
        "tags": ["powergrad", recipe.model.name, *(each for each in formats if each != "torch")],
        "model-index": [{"name": name, "results": [result]}],
    }
    return yaml.safe_dump(values, sort_keys=False)


def _loss(recipe: Recipe) -> str:
    loss = recipe.loss
    if loss.alpha == 1:
        return "cross-entropy"
    changing = "" if loss.alpha_schedule == "constant" else f" ({loss.alpha_schedule} to 1)"
    return f"cross-entropy under PowerGrad Transform at alpha {loss.alpha:g}{changing}"


def _folding(temperature: float) -> str:
    if temperature == 1:
        return "Nothing was folded into its head: logits are those of the trained network."
    return (
        f"Its head was divided by the temperature {temperature:.6g}, so that the softmax of its "
        "logits is that of the trained network at this temperature; the predicted class stays."
    )


def _provenance(trained: Trained) -> str:
    def told(machine: dict[str, Any]) -> str:
        versions = ", ".join(f"{each} {machine.get(each)}" for each in ("powergrad", "torch"))
        return f"{str(machine.get('time'))[:10]} with {versions}, commit {machine.get('commit')}"

    trained_with = told(trained.run.environment())
    text = f"Trained on {trained_with}; exported on {told(describe_machine())}."
    if trained.path.name == "best.safetensors":
        text += (
            " These are not the weights that the run ended with, but those with the best accuracy "
            "on its test images: figures on the same images look better than they are."
        )
    elif trained.path.name != "model.safetensors":
        text += f" These are the weights of the checkpoint {trained.path.name}."
    return text


def _results_table(results: dict[str, dict[str, float]]) -> str:
    lines = [
        "| temperature | | accuracy % | NLL | Brier | ECE, width | ECE, mass |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in results.items():
        errors = [f"{row[key]:.4f}" for key in ("nll", "brier", "ece_width", "ece_mass")]
        cells = [name, f"{row['temperature']:.4g}", f"{row['accuracy']:.2f}", *errors]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _snippets(
    trained: Trained, data: Datasets, metadata: dict[str, str], formats: list[str]
) -> Iterator[str]:
    """Code that loads each file, beside which it runs."""

    def block(code: str) -> str:
        return f"```python\n{code}\n```"

    options = trained.options(data)
    arguments = ", ".join(f"{key}={value!r}" for key, value in options.items())
    shape = f"4, {data.channels}, {data.size}, {data.size}"
    yield block(f"import torch\n\npixels = 255 * torch.rand({shape})  # your images")
    if "safetensors" in formats:
        yield block(
            "from safetensors.torch import load_file\n"
            "from powergrad.lab.models import create_model\n\n"
            f"network = create_model({arguments})\n"
            'network.load_state_dict(load_file("model.safetensors"))\n'
            f"mean, std = torch.tensor([{metadata['mean']}, {metadata['std']}])[..., None, None]\n"
            "logits = network.eval()((pixels - mean) / std)"
        )
    if "torch" in formats:
        yield block('logits = torch.export.load("model.pt2").module()(pixels)')
    if "onnx" in formats:
        yield block(
            "import onnxruntime\n\n"
            'session = onnxruntime.InferenceSession("model.onnx")\n'
            'logits = torch.from_numpy(session.run(["logits"], {"pixels": pixels.numpy()})[0])'
        )
    yield block("probabilities = logits.softmax(1)")
