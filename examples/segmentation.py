"""Segmentation with K-dimensional targets: which digit does each pixel belong to?

    python examples/segmentation.py

Each canvas of 16 x 16 pixels contains four of scikit-learn's digits (8 x 8 pixels, real
handwriting) and noise. The target is one class per pixel: background, or one of ten digits. A small
convolutional network without normalisation is trained with AdamW. The script compares cross-entropy
with PowerGrad Transform; the learning rate is tuned for both. Needs ``pip install scikit-learn``.
"""

from __future__ import annotations

import functools
import itertools

import torch
from comparison import arguments, compare
from sklearn.datasets import load_digits
from torch import Tensor, nn

from powergrad import CrossEntropyLoss

SIZE, CLASSES, BATCH = 16, 11, 16
PARTS = {"train": slice(0, 1100), "val": slice(1100, 1400), "test": slice(1400, None)}


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """Images in [0, 1] and their labels."""
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32) / 16, torch.tensor(data.target)


def canvases(count: int, part: str, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy canvases (N, 1, H, W) and the class of each pixel (N, H, W)."""
    generator = torch.Generator().manual_seed(seed)
    images, labels = digits()
    images, labels = images[PARTS[part]], labels[PARTS[part]]
    canvas = torch.zeros(count, SIZE, SIZE)
    target = torch.zeros(count, SIZE, SIZE, dtype=torch.long)
    for y, x in itertools.product(range(0, SIZE, 8), repeat=2):
        chosen = torch.randint(len(images), (count,), generator=generator)
        ink = images[chosen] > 0.25
        canvas[:, y : y + 8, x : x + 8] = images[chosen]
        target[:, y : y + 8, x : x + 8] = torch.where(ink, labels[chosen, None, None] + 1, 0)
    noise = 0.1 * torch.randn(canvas.shape, generator=generator)
    return (canvas + noise).unsqueeze(1), target


class Network(nn.Module):
    """A small U-Net: two downsampling steps, two upsampling steps, and skip connections."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, width, 3, padding=1)
        self.down1 = nn.Conv2d(width, 2 * width, 4, stride=2, padding=1)
        self.down2 = nn.Conv2d(2 * width, 4 * width, 4, stride=2, padding=1)
        self.middle = nn.Conv2d(4 * width, 4 * width, 3, padding=1)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.head = nn.Conv2d(width, CLASSES, 1)
        for layer in (self.enter, self.down1, self.down2, self.middle):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, C, H, W) of images (N, 1, H, W)."""
        fine = self.enter(x).relu()
        coarse = self.down1(fine).relu()
        deep = self.middle(self.down2(coarse).relu()).relu()
        return self.head((fine + self.up1((coarse + self.up2(deep)).relu())).relu())


def mean_iou(predicted: Tensor, target: Tensor) -> float:
    """Intersection over union, averaged over the classes."""
    confusion = torch.bincount(
        target.flatten() * CLASSES + predicted.flatten(), minlength=CLASSES**2
    )
    confusion = confusion.view(CLASSES, CLASSES).double()
    shared = confusion.diagonal()
    return float((shared / (confusion.sum(0) + confusion.sum(1) - shared).clamp(min=1)).mean())


@functools.cache
def held_out(split: str) -> tuple[Tensor, Tensor]:
    """The same canvases for every run."""
    return canvases(200, split, seed=10_000)


@functools.cache
def training_set() -> tuple[Tensor, Tensor]:
    """A thousand canvases."""
    return canvases(1000, "train", seed=20_000)


def run(alpha: float, rate: float, seed: int, split: str) -> dict[str, float]:
    """Train one network and score it."""
    torch.manual_seed(seed)
    model = Network()
    criterion = CrossEntropyLoss(alpha)  # (N, C, H, W) against (N, H, W), as nn.CrossEntropyLoss
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, args.steps)
    images, targets = training_set()
    for _ in range(args.steps):
        rows = torch.randint(len(images), (BATCH,))
        loss = criterion(model(images[rows]), targets[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    x, y = held_out(split)
    with torch.no_grad():
        predicted = model(x).argmax(1)
    return {
        "mIoU": mean_iou(predicted, y),
        "pixel accuracy": float((predicted == y).float().mean()),
    }


args = arguments(__doc__.splitlines()[0], alpha=0.3, seeds=6, steps=180)
compare(
    run,
    args,
    rates=(0.003, 0.01, 0.03, 0.1),
    metrics={"mIoU": 1, "pixel accuracy": 1},
    command=f"python examples/segmentation.py --alpha {args.alpha} --steps {args.steps}",
)
