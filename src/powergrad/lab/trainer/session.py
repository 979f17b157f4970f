"""The network in training: its steps, its tests, and the state that a checkpoint holds."""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import powergrad
from powergrad import calibration
from powergrad._head import find_head
from powergrad.clipping import ClipHandle
from powergrad.lab.data import Datasets, Split
from powergrad.lab.trainer.networks import create_model
from powergrad.lab.trainer.objectives import training_loss
from powergrad.lab.trainer.processes import Processes
from powergrad.lab.trainer.recipe import Recipe
from powergrad.lab.trainer.schedules import alpha_at, learning_rate_at

AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}
AGREE_EVERY = 10  # steps between two synchronisations of flags among several processes


class Session:
    """The network in training: the state that a checkpoint holds, and the steps."""

    def __init__(self, recipe: Recipe, data: Datasets, processes: Processes) -> None:
        self.recipe, self.data, self.processes = recipe, data, processes
        options, device = recipe.train, processes.device
        self.steps_per_epoch = data.train.steps(options.batch_size)
        parts = processes.world * options.accumulate
        if options.batch_size % parts:
            raise ValueError(
                f"Expected `train.batch_size` to be divisible by {parts}, the number of processes "
                f"times `train.accumulate`, but got {options.batch_size}."
            )
        self.steps = self.steps_per_epoch * options.epochs

        torch.manual_seed(_stream(recipe.seed, "weights"))
        self.dtype = torch.float64 if options.precision == "float64" else torch.float32
        self.model = _make_model(recipe, data, device, self.dtype)
        self.initial = {
            name: value.cpu().clone() for name, value in self.model.state_dict().items()
        }
        if options.channels_last:
            self.model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self.average = None
        if options.ema is not None:
            rule = get_ema_multi_avg_fn(options.ema)
            self.average = AveragedModel(self.model, multi_avg_fn=rule, use_buffers=True)

        self.loss = training_loss(recipe.loss, len(data.classes))
        self.optimizer, self.lr_factors = _make_optimizer(recipe, self.model)
        self.clip = _attach_clipping(recipe, self.optimizer, self.model)
        self.scaler = torch.amp.GradScaler(  # pyright: ignore[reportPrivateImportUsage]
            device.type, enabled=options.precision == "float16"
        )
        self.autocast: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if options.precision in AUTOCAST:
            self.autocast = torch.autocast(device.type, dtype=AUTOCAST[options.precision])
        self.distributed = DistributedDataParallel(self.model) if processes.world > 1 else None
        self.forward: Callable[[Tensor], Tensor] = self.distributed or self.model
        if options.compile:
            self.forward = torch.compile(self.forward)

        self.step, self.seconds, self.best = 0, 0.0, -1.0
        self.diverged = self.is_best = False
        self.lr = self.alpha = self.gradient_norm = 0.0
        self.losses, self.right = torch.zeros(2, device=device)  # sums over this epoch
        self.monitor: powergrad.FilterMonitor | None = None
        self.monitor_state: dict[str, Tensor] = {}

    @property
    def tested(self) -> nn.Module:
        """The network that is tested: the averaged one if there is one."""
        return self.model if self.average is None else self.average.module

    def weights(self) -> dict[str, Tensor]:
        """The weights of the network that is tested."""
        return dict(self.tested.state_dict())

    @property
    def done(self) -> bool:
        """Whether the last step was taken, or training has diverged."""
        return self.step == self.steps or self.diverged

    @property
    def at_end_of_epoch(self) -> bool:
        """Whether the last step was the last of its epoch."""
        return self.step % self.steps_per_epoch == 0

    def any_process(self, flag: bool) -> bool:
        """Whether `flag` is set in any process, so that all stop or save after the same step."""
        if self.processes.world == 1:
            return flag
        return self.step % AGREE_EVERY == 0 and self.processes.any(flag)

    # Checkpoints ----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything that resuming needs."""
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            "losses": self.processes.sum(self.losses.clone()) / self.processes.world,
            "right": self.processes.sum(self.right.clone()) / self.processes.world,
            "seconds": self.seconds,
            "best": self.best,
            "diverged": self.diverged,
            "monitor": {} if self.monitor is None else self.monitor.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from what :meth:`state` returned."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self.losses.copy_(state["losses"])
        self.right.copy_(state["right"])
        self.step, self.seconds, self.best = state["step"], state["seconds"], state["best"]
        self.diverged, self.monitor_state = state["diverged"], state["monitor"]

    # Training -------------------------------------------------------------------------------------

    def run_epoch(self) -> Iterator[Tensor]:
        """Run the remaining steps of this epoch, and yield the loss of each."""
        options, processes = self.recipe.train, self.processes
        epoch, start = divmod(self.step, self.steps_per_epoch)
        batches = self.data.train.train_batches(
            options.batch_size,
            seed=self.recipe.seed,
            epoch=epoch,
            rank=processes.rank,
            world=processes.world,
            start=start,
        )
        dropout = _stream(self.recipe.seed, "dropout", processes.rank)
        layout = torch.channels_last if options.channels_last else torch.contiguous_format
        self.model.train()
        began = time.perf_counter() - self.seconds
        for images, labels in batches:
            self._set_rates()
            _seed(dropout + self.step, processes.device)
            images = images.to(
                processes.device, self.dtype, non_blocking=True, memory_format=layout
            )
            labels = labels.to(processes.device, non_blocking=True)
            self.optimizer.zero_grad()
            loss = self._backward(images, labels)
            self.scaler.unscale_(self.optimizer)
            if (self.step + 1) % self.steps_per_epoch == 0:
                self.gradient_norm = self._gradient_norm()
            self.scaler.step(self.optimizer)  # the clipping hook acts first
            self.scaler.update()
            if self.average is not None:
                self.average.update_parameters(self.model)
            self.step += 1
            self.seconds = time.perf_counter() - began
            yield loss

    def _set_rates(self) -> None:
        recipe, epoch = self.recipe, self.step / self.steps_per_epoch
        epochs = recipe.train.epochs
        self.lr = learning_rate_at(epoch, recipe.schedule, recipe.optimizer.lr, epochs)
        self.alpha = alpha_at(epoch, recipe.loss, epochs)
        for group, factor in zip(self.optimizer.param_groups, self.lr_factors, strict=True):
            group["lr"] = self.lr * factor

    def _backward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Forward and backward pass of the batch, or of its parts in turn; return the mean loss."""
        parts = self.recipe.train.accumulate
        losses = []
        for part, labels_part in zip(images.chunk(parts), labels.chunk(parts), strict=True):
            is_last = len(losses) == parts - 1
            with contextlib.nullcontext() if is_last else self._without_sync():
                with self.autocast:
                    logits = self.forward(part)
                    loss = self.loss(logits, labels_part, self.alpha) / parts
                self.scaler.scale(loss).backward()
            losses.append(loss.detach())
            classes = labels_part if labels_part.dim() == 1 else labels_part.argmax(1)
            self.losses.add_(losses[-1])
            self.right.add_((logits.detach().argmax(1) == classes).sum())
        return losses[0] if parts == 1 else torch.stack(losses).sum()

    def _without_sync(self) -> contextlib.AbstractContextManager[Any]:
        """Do not synchronise gradients: only the backward pass of the last part does."""
        return self.distributed.no_sync() if self.distributed else contextlib.nullcontext()

    def _gradient_norm(self) -> float:
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(grads))

    # The end of an epoch --------------------------------------------------------------------------

    def finish_epoch(self) -> tuple[dict[str, float | None], dict[str, Tensor] | None]:
        """The metrics of the epoch, and the logits and labels of the test set, if it was tested."""
        options = self.recipe.train
        epoch = self.step // self.steps_per_epoch
        losses = float(self.processes.sum(self.losses))
        right = float(self.processes.sum(self.right))
        self.losses.zero_()
        self.right.zero_()
        self.diverged = not math.isfinite(losses)
        row: dict[str, float | None] = {
            "epoch": epoch,
            "step": self.step,
            "lr": self.lr,
            "alpha": self.alpha,
            "train_loss": losses / self.steps_per_epoch / self.processes.world,
            "train_accuracy": 100 * right / (self.steps_per_epoch * options.batch_size),
            "gradient_norm": self.gradient_norm,
            "clip_rate": self._clip_rate(),
            "loss_scale": self.scaler.get_scale() if self.scaler.is_enabled() else None,
            "seconds": self.seconds,
            "images_per_second": self.step * options.batch_size / self.seconds,
        }
        self.is_best = False
        if not self.done and epoch % options.test_every:
            return row, None
        outputs = self.test(self.data.test)
        row |= score(outputs["logits"], outputs["labels"], self.alpha)
        row["dead_units"] = len(powergrad.census(self.tested, initial=self.initial).dead)
        accuracy = row["test_accuracy"] or 0
        self.is_best, self.best = accuracy > self.best, max(self.best, accuracy)
        return row, outputs

    @torch.no_grad()
    def test(self, split: Split) -> dict[str, Tensor]:
        """The logits and labels of every example of `split`, in order."""
        options, processes = self.recipe.train, self.processes
        model = self.tested.eval()
        size = options.test_batch_size or options.batch_size
        outputs = []
        batches = split.test_batches(size, rank=processes.rank, world=processes.world)
        for (images, labels), index in batches:
            with self.autocast:
                logits = model(images.to(processes.device, self.dtype))
            outputs.append((logits.float(), labels.to(logits.device), index.to(logits.device)))
        logits, labels, index = (
            processes.concatenate(torch.cat(tensors)) for tensors in zip(*outputs, strict=True)
        )
        order = index.argsort()
        return {"logits": logits[order].cpu(), "labels": labels[order].cpu()}

    def _clip_rate(self) -> float | None:
        """The fraction of units clipped in the last step, by the last clipping method."""
        if self.clip is None or not self.clip.last_report:
            return None
        report = list(self.clip.last_report.values())[-1]
        return report.clipped / report.units if report.units else 0.0


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


def _seed(number: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)


# The parts of a session ---------------------------------------------------------------------------


def _make_model(
    recipe: Recipe, data: Datasets, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    options = recipe.model.model_dump(exclude={"head_scale"})
    model = create_model(**options, num_classes=len(data.classes), in_channels=data.channels)
    model.to(device, dtype)
    if recipe.model.head_scale != 1:
        with torch.no_grad():
            for parameter in find_head(model, None).parameters():
                parameter.mul_(recipe.model.head_scale)
    return model


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
    # If a scaler skips the first step, fused SGD leaves its momentum uninitialised (2.13.0).
    is_scaled = recipe.train.precision == "float16"
    fused = next(model.parameters()).device.type in ("cpu", "cuda") and not is_scaled
    if options.name == "sgd":
        momentum, nesterov = options.momentum, options.nesterov
        optimizer = torch.optim.SGD(
            groups, lr=options.lr, momentum=momentum, nesterov=nesterov, fused=fused
        )
        return optimizer, lr_factors
    kind = torch.optim.Adam if options.name == "adam" else torch.optim.AdamW
    return kind(groups, lr=options.lr, betas=options.betas, fused=fused), lr_factors


def _attach_clipping(
    recipe: Recipe, optimizer: torch.optim.Optimizer, model: nn.Module
) -> ClipHandle | None:
    thresholds = recipe.clip.model_dump(exclude_none=True)
    eps = thresholds.pop("agc_eps")
    if not thresholds:
        return None
    return powergrad.clip_grads_before_step(optimizer, model, eps=eps, **thresholds)
