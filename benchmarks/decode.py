"""Time decoding, random resized crop, mirroring and normalising of JPEGs against timm's transforms.

    python benchmarks/decode.py [--rounds 31]     write results/bench_decode.csv (a minute or two)

One thread, CPU time an image, medians over rounds in which every variant has its turn on the same
files: 32 JPEGs of 500x375, quality 90, 4:2:0, about 100 KB each (ImageNet's training images are
138 GB in 1,281,167 files: 108 KB). They are not photographs, but noise of which the coarse octaves
are the strongest, as in photographs. Every variant opens the files by name and ends with a batch of
normalised float32 images (32, 3, 224, 224):

    ours           what a folder's training batches do, in this process (`FolderSplit`)
    timm, same     ``create_transform(224, is_training=True, color_jitter=None)``: the same
                   augmentations, on ``Image.open(path).convert("RGB")`` as timm's dataset does
    timm, default  ``create_transform(224, is_training=True)``, which jitters colours too
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from PIL import Image

from powergrad.lab.data import load_data
from powergrad.lab.trainer.recipe import Data

IMAGES = 32
BARS = {"ours": None, "timm, same": 1.25, "timm, default": 1.6}


def photograph(rng: np.random.Generator) -> Image.Image:
    """Noise of which each octave below the finest has 1.23 times the amplitude of the last."""
    pixels = np.zeros((375, 500, 3), np.float32)
    for octave in range(7):
        for channel in range(3):
            shape = (max(2, 375 >> octave), max(2, 500 >> octave))
            noise = Image.fromarray(rng.standard_normal(shape, np.float32))
            grown = np.asarray(noise.resize((500, 375), Image.Resampling.BICUBIC))
            pixels[:, :, channel] += 1.23**octave * grown
    pixels = 120 + 60 * (pixels - pixels.mean()) / pixels.std()
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def write_images(root: Path) -> list[Path]:
    rng = np.random.default_rng(0)
    paths = [root / "train" / "class" / f"{i}.jpg" for i in range(IMAGES)]
    for part in ("train", "val"):
        (root / part / "class").mkdir(parents=True)
    for path in paths:
        photograph(rng).save(path, quality=90)
    photograph(rng).save(root / "val" / "class" / "0.jpg", quality=90)
    return paths


def measure(root: Path, rounds: int) -> list[dict[str, Any]]:
    paths = write_images(root)
    harness.create_timm("resnet18")  # makes timm importable
    create_transform = importlib.import_module("timm.data").create_transform
    same = create_transform(224, is_training=True, color_jitter=None)
    default = create_transform(224, is_training=True)
    train = load_data(Data(name=f"folder:{root}", flip=True)).train
    epochs = iter(range(10**9))

    def ours() -> torch.Tensor:
        return next(train.train_batches(IMAGES, seed=0, epoch=next(epochs))).images

    def timm(transform: Callable[[Image.Image], torch.Tensor]) -> torch.Tensor:
        return torch.stack([transform(Image.open(path).convert("RGB")) for path in paths])

    variants: dict[str, Callable[[], Any]] = {
        "ours": ours,
        "timm, same": lambda: timm(same),
        "timm, default": lambda: timm(default),
    }
    for run in variants.values():
        batch = run()
        if batch.shape != (IMAGES, 3, 224, 224) or batch.dtype != torch.float32:
            raise RuntimeError(f"Expected float32 images, but got {batch.dtype} {batch.shape}.")
    medians = harness.interleaved(variants, rounds)
    size = sum(path.stat().st_size for path in paths) / IMAGES
    return [
        {
            "variant": name,
            "images": IMAGES,
            "mean_kilobytes": f"{size / 1e3:.1f}",
            "rounds": rounds,
            "ms_an_image": f"{1e3 * medians[name] / IMAGES:.3f}",
            "ratio_to_ours": f"{medians[name] / medians['ours']:.3f}",
            "bar": bar or "",
            "pillow": importlib.import_module("PIL").__version__,
            "timm": importlib.import_module("timm").__version__,
        }
        for name, bar in BARS.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=31)
    rounds = parser.parse_args().rounds
    harness.warm_allocator()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), rounds)
    for row in rows:
        print(*row.values())
    harness.save("decode", rows)


if __name__ == "__main__":
    main()
