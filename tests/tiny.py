"""The smallest recipe that still learns: 12 steps of a ResNet-8 on 128 digits."""

from __future__ import annotations

from powergrad.lab.trainer.recipe import Recipe

CHANGES = {
    "data.limit": 128,
    "model.width": 4,
    "model.norm": "none",
    "train.batch_size": 32,
    "train.epochs": 3,
    "schedule.warmup_epochs": 1,
    "optimizer.lr": 0.05,
    "machine.threads": 1,
}
TINY = Recipe().override({**CHANGES, "loss.alpha": 0.5})
