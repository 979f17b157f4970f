"""PowerGrad Transform in Lightning: one callback adds PGT, AGC and the filter monitor.

    python examples/lightning_train.py

Needs ``pip install lightning scikit-learn``.
"""

from __future__ import annotations

import argparse
import tempfile

import lightning
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from powergrad.lightning import PowerGradCallback
from powergrad.monitor import Recording


class Digits(lightning.LightningModule):
    """An ordinary module without any powergrad code."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(),
            nn.Linear(512, 10),
        )  # fmt: skip

    def training_step(self, batch, batch_idx):
        """Ordinary cross-entropy."""
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def test_step(self, batch, batch_idx):
        """Accuracy."""
        self.log("accuracy", (self.network(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        """SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--alpha", type=float, default=0.3)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--precision", default="32-true", help="for example bf16-mixed")
args = parser.parse_args()

lightning.seed_everything(0, verbose=False)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
dataset = TensorDataset(images, torch.tensor(digits.target))
train = torch.utils.data.Subset(dataset, range(1400))
test = torch.utils.data.Subset(dataset, range(1400, len(dataset)))

folder = tempfile.mkdtemp()
callback = PowerGradCallback(args.alpha, agc=0.1, monitor=folder, every=5)  # powergrad

trainer = lightning.Trainer(
    accelerator="cpu", max_epochs=args.epochs, precision=args.precision, callbacks=[callback],
    logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)  # fmt: skip
model = Digits()
trainer.fit(model, DataLoader(train, batch_size=50, shuffle=True))
(result,) = trainer.test(model, DataLoader(test, batch_size=397), verbose=False)
print(
    f"test accuracy {result['accuracy']:.1%}; {len(Recording(folder).read(1)[0])} records of norms"
)
