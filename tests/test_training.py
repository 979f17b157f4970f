"""Real training on scikit-learn's digits: the methods together."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powergrad import PowerGrad, clip_grads_before_step

datasets = pytest.importorskip("sklearn.datasets")


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    data = datasets.load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order], torch.tensor(data.target)[order]


def network() -> nn.Sequential:
    """Without normalisation, as the paper's table 2."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


METHODS = {
    "PGT": {},
    "AGC + PGT": {"agc": 0.05},
    "GC + PGT": {"tensor_norm": 0.2},
    "AGC + global norm + PGT": {"agc": 0.05, "norm": 1.0},
}


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("PGT", "float16 and a scaler"),
        ("AGC + PGT", "float32"),
        ("GC + PGT", "float16 and a scaler"),
        ("AGC + global norm + PGT", "float16 and a scaler"),
    ],
)
def test_the_methods_train_together(digits, name, precision):
    images, target = digits
    train, test = slice(0, 1400), slice(1400, None)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    scaled = precision != "float32"
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
    thresholds = METHODS[name]
    handle = clip_grads_before_step(optimizer, model, **thresholds) if thresholds else None
    clipped = dict.fromkeys(thresholds, 0)
    for step in range(300):
        rows = torch.randint(0, 1400, (64,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, enabled=scaled):
            logits = model(images[train][rows])
        with PowerGrad(0.3):
            loss = F.cross_entropy(logits.float(), target[train][rows])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if handle is not None:
            for method, report in handle.last_report.items():
                clipped[method] += int(report.clipped)
    model.eval()
    with torch.no_grad():
        accuracy = (model(images[test]).argmax(1) == target[test]).float().mean()
    assert accuracy > 0.9
    assert all(count > 0 for count in clipped.values())  # each method did something
    assert all(p.isfinite().all() for p in model.parameters())
