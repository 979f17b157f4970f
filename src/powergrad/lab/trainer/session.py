"""The network in training: its steps, its tests, and the state that a checkpoint holds."""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import powergrad
from powergrad import calibration
from powergrad.head import find_head
from powergrad.lab.data import Datasets
from powergrad.lab.trainer.networks import create_model
from powergrad.lab.trainer.objectives import training_loss
from powergrad.lab.trainer.processes import Processes
from powergrad.lab.trainer.recipe import Recipe, Schedule

AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}
CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # which have no forward
AGREE_EVERY = 10  # steps between two synchronisations of flags among several processes


class Session:
    def __init__(self, recipe: Recipe, data: Datasets, processes: Processes) -> None:
        self.recipe, self.data, self.processes = recipe, data, processes
        options, device = recipe.train, processes.device
        self.steps_per_epoch = data.train.steps(options.batch_size)
        parts = processes.world * options.accumulate
        if options.batch_size % parts:
            wanted = f"divisible by {parts}, the number of processes times `train.accumulate`"
            got = options.batch_size
            raise ValueError(f"Expected `train.batch_size` to be {wanted}, but got {got}.")
        self.steps = self.steps_per_epoch * options.epochs

        torch.manual_seed(_stream(recipe.seed, "weights"))
        self.dtype = torch.float64 if options.precision == "float64" else torch.float32
        self.model = create_model(**recipe.model.arguments(data)).to(device, self.dtype)
        if recipe.model.head_scale != 1:
            with torch.no_grad():
                for parameter in find_head(self.model, None).parameters():
                    parameter.mul_(recipe.model.head_scale)
        weights = self.model.state_dict()
        self.initial = {name: value.cpu().clone() for name, value in weights.items()}
        if options.channels_last:
            self.model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self.shards = recipe.machine.parallel == "fsdp"  # also if one process has all of them
        self.sharded = self.shards and processes.world > 1
        if self.sharded:
            mesh = init_device_mesh(device.type, (processes.world,))
            for part in (*self.model.children(), self.model):
                if any(True for _ in part.parameters()) and not isinstance(part, CONTAINERS):
                    fully_shard(part, mesh=mesh)
        self.loss = training_loss(recipe.loss, len(data.classes))
        self.optimizer, self.lr_factors = _make_optimizer(recipe, self.model)
        self.clip = None
        if clips := recipe.clip.model_dump(exclude_none=True, exclude={"agc_eps"}):
            clips["eps"] = recipe.clip.agc_eps
            self.clip = powergrad.clip_grads_before_step(self.optimizer, self.model, **clips)
        self.scaler = torch.amp.GradScaler(  # pyright: ignore[reportPrivateImportUsage]
            device.type, enabled=options.precision == "float16"
        )
        self.autocast: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if options.precision in AUTOCAST:
            self.autocast = torch.autocast(device.type, dtype=AUTOCAST[options.precision])
        copies = processes.world > 1 and not self.sharded
        self.distributed = DistributedDataParallel(self.model) if copies else None
        self.forward: Callable[[Tensor], Tensor] = self.distributed or self.model
        if options.compile:
            self.forward = torch.compile(self.forward)

        self.step, self.seconds, self.diverged = 0, 0.0, False
        self.lr = 0.0
        self.sums = torch.zeros(2, device=device)  # losses and right answers in this epoch
        self.monitor: powergrad.FilterMonitor | None = None
        self.monitor_state: dict[str, Tensor] = {}

    @property
    def done(self) -> bool:
        """Whether the last step was taken, or training has diverged."""
        return self.step == self.steps or self.diverged

    @property
    def at_end_of_epoch(self) -> bool:
        return self.step % self.steps_per_epoch == 0

    def any_process(self, flag: bool) -> bool:
        """Whether `flag` is set in any process, so that all stop or save after the same step."""
        if self.processes.world == 1:
            return flag
        return self.step % AGREE_EVERY == 0 and self.processes.any(flag)

    def state(self) -> dict[str, Any]:
        """Everything that resuming needs, without shards."""
        return {
            "step": self.step,
            "model": None if self.shards else self.model.state_dict(),
            "optimizer": None if self.shards else self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "sums": self.processes.sum(self.sums.clone()) / self.processes.world,
            "seconds": self.seconds,
            "diverged": self.diverged,
            "monitor": {} if self.monitor is None else self.monitor.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from what :meth:`state` returned."""
        if state["model"] is not None:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.sums.copy_(state["sums"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.diverged, self.monitor_state = state["diverged"], state["monitor"]

    def save_shards(self, folder: Path) -> None:
        """Write network and optimizer, a file per process."""
        alone = self.processes.world == 1
        checkpoint.state_dict_saver.save(self._shards(), checkpoint_id=folder, no_dist=alone)

    def load_shards(self, folder: Path) -> None:
        """Read what any number of processes wrote."""
        state, alone = self._shards(), self.processes.world == 1
        checkpoint.state_dict_loader.load(state, checkpoint_id=folder, no_dist=alone)
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts)

    def _shards(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def weights(self) -> dict[str, Tensor]:
        """The whole weights of the network; all processes must call this."""
        return {name: _whole(tensor) for name, tensor in self.model.state_dict().items()}

    @contextlib.contextmanager
    def _gathered(self) -> Iterator[None]:
        """Keep all shards in each process, which may then make any number of forward passes."""
        parts = [m for m in self.model.modules() if isinstance(m, FSDPModule)]
        for part in parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        yield
        for part in parts:
            part.set_reshard_after_forward(True, recurse=False)
            part.reshard()

    def run_epoch(self) -> Iterator[Tensor]:
        """Run the remaining steps of this epoch, and yield the loss of each."""
        options, processes = self.recipe.train, self.processes
        device, seed = processes.device, self.recipe.seed
        epoch, start = divmod(self.step, self.steps_per_epoch)
        share = {"start": start, "rank": processes.rank, "world": processes.world}
        batches = self.data.train.train_batches(options.batch_size, seed=seed, epoch=epoch, **share)
        dropout = _stream(seed, "dropout", processes.rank)
        layout = torch.channels_last if options.channels_last else torch.contiguous_format
        self.model.train()
        began = time.perf_counter() - self.seconds
        for images, labels in batches:
            self._set_rates()
            torch.default_generator.manual_seed(dropout + self.step)
            if device.type == "cuda":
                torch.cuda.manual_seed(dropout + self.step)
            images = images.to(device, self.dtype, non_blocking=True, memory_format=layout)
            labels = labels.to(device, non_blocking=True)
            self.optimizer.zero_grad()
            if self.sharded:  # as DistributedDataParallel does
                self.processes.broadcast(self.model.buffers())
            loss = self._backward(images, labels)
            self.scaler.unscale_(self.optimizer)
            self.scaler.step(self.optimizer)  # the clipping hook acts first
            self.scaler.update()
            self.step += 1
            self.seconds = time.perf_counter() - began
            yield loss

    def _set_rates(self) -> None:
        recipe, epoch = self.recipe, self.step / self.steps_per_epoch
        peak, epochs = recipe.optimizer.lr, recipe.train.epochs
        self.lr = learning_rate_at(epoch, recipe.schedule, peak, epochs)
        for group, factor in zip(self.optimizer.param_groups, self.lr_factors, strict=True):
            group["lr"] = self.lr * factor

    def _backward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Forward and backward pass of the batch, or of its parts in turn; return the mean loss."""
        parts = self.recipe.train.accumulate
        losses = []
        for part, labels_part in zip(images.chunk(parts), labels.chunk(parts), strict=True):
            is_last = len(losses) == parts - 1  # only its backward pass synchronises gradients
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(is_last)
            no_sync = None if is_last or self.distributed is None else self.distributed.no_sync()
            with no_sync or contextlib.nullcontext():
                with self.autocast:
                    logits = self.forward(part)
                    loss = self.loss(logits, labels_part) / parts
                self.scaler.scale(loss).backward()
            losses.append(loss.detach())
            self.sums[0].add_(losses[-1])
            self.sums[1].add_((logits.detach().argmax(1) == labels_part).sum())
        return losses[0] if parts == 1 else torch.stack(losses).sum()

    def finish_epoch(self) -> tuple[dict[str, float | None], dict[str, Tensor] | None]:
        """The metrics of the epoch, and the logits and labels of the test set, if it was tested."""
        options, alpha = self.recipe.train, self.recipe.loss.alpha
        epoch = self.step // self.steps_per_epoch
        losses, right = self.processes.sum(self.sums).tolist()
        self.sums.zero_()
        self.diverged = not math.isfinite(losses)
        row: dict[str, float | None] = {
            "epoch": epoch,
            "step": self.step,
            "lr": self.lr,
            "alpha": alpha,
            "train_loss": losses / self.steps_per_epoch / self.processes.world,
            "train_accuracy": 100 * right / (self.steps_per_epoch * options.batch_size),
            "clip_rate": None,
            "loss_scale": self.scaler.get_scale() if self.scaler.is_enabled() else None,
            "seconds": self.seconds,
        }
        if self.clip is not None and self.clip.last_report:
            report = list(self.clip.last_report.values())[-1]  # of the last step and method
            total = report.total() if self.sharded else report
            row["clip_rate"] = float(total.clipped) / max(total.units, 1)
        if not self.done and epoch % options.test_every:
            return row, None
        outputs = self.test()
        row |= score(outputs["logits"], outputs["labels"], alpha)
        row["dead_units"] = len(powergrad.census(self.model, initial=self.initial).dead)
        return row, outputs

    @torch.no_grad()
    def test(self) -> dict[str, Tensor]:
        """The logits and labels of every test example, in order."""
        options, processes = self.recipe.train, self.processes
        model = self.model.eval()
        size = options.test_batch_size or options.batch_size
        outputs = []
        batches = self.data.test.test_batches(size, rank=processes.rank, world=processes.world)
        with self._gathered():
            for (images, labels), index in batches:
                with self.autocast:
                    logits = model(images.to(processes.device, self.dtype))
                outputs.append((logits.float(), labels, index))
        logits, labels, index = (
            processes.concatenate(torch.cat(tensors)) for tensors in zip(*outputs, strict=True)
        )
        order = index.argsort()
        return {"logits": logits[order], "labels": labels[order]}


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def score(logits: Tensor, labels: Tensor, alpha: float) -> dict[str, float | None]:
    """The metrics of a test: accuracies in percent, NLL and ECE at temperatures 1 and 1/alpha."""
    logits = logits.float()
    top5 = None
    if logits.shape[1] > 5:
        among = (logits.topk(5).indices == labels[:, None]).any(1) & ~logits.isnan().any(1)
        top5 = 100 * among.double().mean().item()
    scores: dict[str, float | None] = {
        "test_accuracy": 100 * right_answers(logits, labels).double().mean().item(),
        "test_top5": top5,
        "logit_norm": torch.linalg.vector_norm(logits, dim=1).mean().item(),
    }
    finite = bool(logits.isfinite().all())
    for suffix, factor in (("", 1.0), ("_scaled", alpha)):
        nll = ece = math.nan
        if finite and factor > 0:
            nll = calibration.negative_log_likelihood(logits, labels, temperature=1 / factor)
            ece = calibration.expected_calibration_error(logits, labels, temperature=1 / factor)
        scores |= {"nll" + suffix: nll, "ece" + suffix: ece}
    return scores


def right_answers(logits: Tensor, labels: Tensor) -> Tensor:
    """Which rows are classified correctly: (N), boolean. Rows with NaN never are."""
    return (logits.argmax(1) == labels) & ~logits.isnan().any(1)


def _stream(seed: int, *purpose: str | int) -> int:
    """The seed of an independent random stream for one purpose."""
    name = "/".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


def _make_optimizer(recipe: Recipe, model: nn.Module) -> tuple[torch.optim.Optimizer, list[float]]:
    """The optimizer, and the factor of the learning rate for each of its groups."""
    options = recipe.optimizer
    is_plain = options.backbone == options.head
    head = set() if is_plain else set(find_head(model, None).parameters())
    members: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            decays = options.decay_all or parameter.dim() > 1
            members.setdefault((parameter in head, decays), []).append(parameter)
    groups, lr_factors = [], []
    for (in_head, decays), parameters in members.items():
        factors = options.head if in_head else options.backbone
        decay = options.weight_decay * factors.weight_decay if decays else 0.0
        adam = {} if options.name == "sgd" else {"eps": options.eps * factors.eps}
        groups.append({"params": parameters, "weight_decay": decay, **adam})
        lr_factors.append(factors.lr)
    # If a scaler skips the first step, fused SGD leaves its momentum uninitialised (2.13.0). For
    # shards, PyTorch has no fused SGD.
    unfused = recipe.train.precision == "float16" or recipe.machine.parallel == "fsdp"
    fused = next(model.parameters()).device.type in ("cpu", "cuda") and not unfused
    if options.name == "sgd":
        own = {"momentum": options.momentum, "nesterov": options.nesterov}
        return torch.optim.SGD(groups, lr=options.lr, fused=fused, **own), lr_factors
    kind = torch.optim.Adam if options.name == "adam" else torch.optim.AdamW
    return kind(groups, lr=options.lr, betas=options.betas, fused=fused), lr_factors


def learning_rate_at(epoch: float, schedule: Schedule, peak: float, epochs: int) -> float:
    """The learning rate: a linear warm-up to `peak`, then the schedule."""
    warmup = schedule.warmup_epochs
    if epoch < warmup:
        return schedule.warmup_start + (peak - schedule.warmup_start) * epoch / warmup
    if schedule.name == "constant":
        return peak
    if schedule.name == "step":
        return peak * schedule.gamma ** bisect.bisect_right(schedule.milestones, epoch)
    done = (epoch - warmup) / (epochs - warmup)
    return schedule.floor + (peak - schedule.floor) * (1 + math.cos(math.pi * done)) / 2
