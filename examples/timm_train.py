"""PowerGrad Transform with timm: a timm network, loss, mixup and AGC on scikit-learn's digits.

    python examples/timm_train.py

Needs ``pip install timm scikit-learn``.
"""

from __future__ import annotations

import argparse

import timm
import torch
from sklearn.datasets import load_digits
from timm.data import Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.models import model_parameters
from timm.optim import create_optimizer_v2
from timm.utils import dispatch_clip_grad

from powergrad import PowerGrad

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--alpha", type=float, default=0.3)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--mixup", type=float, default=0.0, help="mixup's alpha, 0 for none")
args = parser.parse_args()

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
images = torch.nn.functional.interpolate(images, scale_factor=4)  # 32 x 32
labels = torch.tensor(digits.target)
train, test = slice(0, 1400), slice(1400, None)

model = timm.create_model("test_resnet", num_classes=10, in_chans=1)
optimizer = create_optimizer_v2(model, opt="sgd", lr=0.05, momentum=0.9)
mixup = Mixup(args.mixup, num_classes=10, label_smoothing=0.1) if args.mixup else None
loss_fn = SoftTargetCrossEntropy() if mixup else LabelSmoothingCrossEntropy(0.1)

loss_fn.forward = PowerGrad(alpha=args.alpha)(loss_fn.forward)  # the only line for powergrad

for epoch in range(args.epochs):
    model.train()
    total = 0.0
    for rows in torch.randperm(1400).split(100):
        x, y = images[train][rows], labels[train][rows]
        if mixup:
            x, y = mixup(x, y)
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        dispatch_clip_grad(model_parameters(model, exclude_head=True), 0.05, "agc")
        optimizer.step()
        total += loss.item() / 14
    model.eval()
    with torch.no_grad():
        accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
    print(f"epoch {epoch}: loss {total:.3f}, test accuracy {accuracy:.1%}")
