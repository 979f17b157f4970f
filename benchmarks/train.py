"""The training loop against a bare PyTorch loop: the same network, data and optimizer.

The bare loop is what one writes by hand: index the tensors, forward, `F.cross_entropy`, backward,
`step`, a cosine schedule, and the sums of loss and right answers that a progress bar shows. Ours
does that and its bookkeeping: recipes, streams of random numbers, signals, checkpoints, progress.
Epochs of both are interleaved, each timed by CPU time; the ratio is of throughputs.

    python benchmarks/train.py [--rounds N]
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from harness import save
from torch import Tensor

from powergrad.lab.data import Data, Datasets, load_data
from powergrad.lab.data.split import MemorySplit
from powergrad.lab.trainer.networks import create_model
from powergrad.lab.trainer.processes import Processes
from powergrad.lab.trainer.progress import Progress
from powergrad.lab.trainer.recipe import Recipe, load_recipe
from powergrad.lab.trainer.session import Session

CIFAR = {
    "model.name": "resnet20",
    "train.batch_size": 128,
    "train.epochs": 1000,
    "optimizer.lr": 0.1,
    "machine.threads": 1,
}


class Bare:
    """The loop that one writes by hand."""

    def __init__(self, recipe: Recipe, images: Tensor, labels: Tensor, classes: int) -> None:
        self.images, self.labels, self.batch = images, labels, recipe.train.batch_size
        self.peak, self.steps = (
            recipe.optimizer.lr,
            recipe.train.epochs * (len(images) // self.batch),
        )
        model = recipe.model
        self.model = create_model(
            model.name,
            num_classes=classes,
            in_channels=images.shape[1],
            width=model.width,
            norm=model.norm,
            stem=model.stem,
        )
        self.layout = torch.contiguous_format
        if recipe.train.channels_last:
            self.layout = torch.channels_last
        self.model.to(memory_format=self.layout)  # pyright: ignore[reportCallIssue]
        options = recipe.optimizer
        self.optimizer = torch.optim.SGD(
            self.model.parameters(),
            lr=options.lr,
            momentum=options.momentum,
            nesterov=options.nesterov,
            weight_decay=options.weight_decay,
            fused=True,
        )
        self.step = 0

    def epoch(self) -> None:
        """One pass over the data."""
        order = torch.randperm(len(self.images))
        total, right = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        self.model.train()
        for start in range(0, len(order) - self.batch + 1, self.batch):
            index = order[start : start + self.batch]
            x, y = self.images[index].contiguous(memory_format=self.layout), self.labels[index]
            for group in self.optimizer.param_groups:
                group["lr"] = self.peak * (1 + math.cos(math.pi * self.step / self.steps)) / 2
            self.optimizer.zero_grad()
            logits = self.model(x)
            loss = F.cross_entropy(logits, y)
            loss.backward()
            self.optimizer.step()
            total += loss.detach()
            right += (logits.detach().argmax(1) == y).sum()
            self.step += 1


def measure(name: str, recipe: Recipe, rounds: int) -> dict[str, object]:
    torch.manual_seed(0)
    processes = Processes(0, 1, torch.device("cpu"))
    data = load_data(recipe.data)
    if name == "resnet20":  # 32x32 images of any kind take the same time
        data = _random_images(data, 1280)
    session = Session(recipe, data, processes)
    progress = Progress(every=1e9)
    progress.begin(recipe, 0, session.steps, Path(tempfile.gettempdir()))

    def ours() -> None:
        for loss in session.run_epoch():
            progress.step(session.step, loss, session.lr)

    batches = list(data.train.train_batches(recipe.train.batch_size, seed=0, epoch=0))
    images = torch.cat([batch.images for batch in batches])
    labels = torch.cat([batch.labels for batch in batches])
    bare = Bare(recipe, images, labels, len(data.classes))
    times: dict[str, list[float]] = {"ours": [], "bare": []}
    for number in range(rounds + 1):
        for who, work in (("ours", ours), ("bare", bare.epoch)):
            began = time.process_time()
            work()
            if number:  # the first round warms up
                times[who].append(time.process_time() - began)
    seen = {who: statistics.median(each) / len(batches) for who, each in times.items()}
    ratio = statistics.median(b / o for o, b in zip(times["ours"], times["bare"], strict=True))
    return {
        "what": name,
        "batch": recipe.train.batch_size,
        "rounds": rounds,
        "ours_ms": round(1000 * seen["ours"], 4),
        "bare_ms": round(1000 * seen["bare"], 4),
        "throughput_ratio": round(ratio, 4),
    }


def _random_images(data: Datasets, count: int) -> Datasets:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 10, (count,), generator=generator)
    split = MemorySplit(images, labels, Data(), mean=[0.5] * 3, std=[0.25] * 3)
    return replace(data, train=split, test=split, channels=3, size=32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=21)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    rows = [
        measure("digits", load_recipe("digits", {"machine.threads": 1}), rounds),
        measure("resnet20", Recipe().override(CIFAR), max(3, rounds // 3)),
    ]
    save("train", rows)


if __name__ == "__main__":
    main()
