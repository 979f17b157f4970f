"""A folder of JPEGs to train on: scikit-learn's digits, drawn large in two colours."""

from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits


def write_photos(
    root: Path, *, classes: int = 3, train: int = 30, val: int = 12, side: int = 40
) -> Path:
    """Make ``train/`` and ``val/``, one folder per class; the first image of each class is grey."""
    values, labels = load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    for k in range(classes):
        drawn = values[labels == k][: train + val].reshape(-1, 8, 8) / 16
        for i, ink in enumerate(drawn):
            paper, colour = rng.integers(0, 100, 3), rng.integers(150, 256, 3)
            pixels = (paper + ink[..., None] * (colour - paper)).astype(np.uint8)
            image = Image.fromarray(pixels)
            image = image.resize((side + 3 * (i % 5), side + i % 7), Image.Resampling.BICUBIC)
            folder = root / ("train" if i < train else "val") / "abcdefghij"[k]
            folder.mkdir(parents=True, exist_ok=True)
            (image.convert("L") if i == 0 else image).save(folder / f"{i:03d}.jpg", quality=90)
    return root
