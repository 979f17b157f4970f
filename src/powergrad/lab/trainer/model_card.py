"""The model card of an export, from the template `model_card.md.jinja`."""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any

import jinja2
import yaml

from powergrad.lab.data import Datasets
from powergrad.lab.environment import describe_machine
from powergrad.lab.trainer.recipe import Recipe
from powergrad.lab.trainer.trained import BINS, Trained


def preprocessing(recipe: Recipe, data: Datasets, metadata: dict[str, str]) -> dict[str, Any]:
    """The preparation of images for an exported network, as JSON values."""
    crop = resize = None
    if recipe.data.is_folder:
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


def model_card(trained: Trained, data: Datasets, **context: Any) -> str:
    """The model card, in the format of model hubs; `context` has other values of the template."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.filters["repr"] = repr
    environment.filters["yaml"] = functools.partial(yaml.safe_dump, sort_keys=False)
    template = resources.files("powergrad.lab.trainer") / "model_card.md.jinja"
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        trained=trained, data=data, bins=BINS, exported_on=describe_machine(), **context
    )
