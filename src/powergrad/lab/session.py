"""The network in training: its steps, its tests, and everything that a checkpoint holds."""

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
from powergrad.clipping import ClipHandle, ClipThresholds
from powergrad.lab.config import Recipe
from powergrad.lab.data import Datasets, Split
from powergrad.lab.distributed import Processes
from powergrad.lab.models import create_model
from powergrad.lab.schedules import alpha_at, learning_rate_at

__all__ = ["Session", "right_answers", "score"]

AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}
Autocast = contextlib.AbstractContextManager[Any]
AGREE_EVERY = 10  # steps after which several processes ask each other


class Session:
    """The network in training: everything that a checkpoint holds, and the steps themselves.

    Args:
        recipe: What to do.
        data: The examples.
        processes: This process among the others.
    """

    def __init__(self, recipe: Recipe, data: Datasets, processes: Processes) -> None:
        self.recipe, self.data, self.processes = recipe, data, processes
        options = recipe.train
        self.per_epoch = data.train.steps(options.batch_size)
        _check_batches(recipe, data, self.per_epoch, processes.world)
        self.steps = self.per_epoch * options.epochs
        self.step = 0
        self.diverged = self.is_best = False
        self.best = -1.0

        torch.manual_seed(_stream(recipe.seed, "weights"))
        self.dtype = torch.float64 if options.precision == "float64" else torch.float32
        self.model = _make_model(recipe, data, processes.device, self.dtype)
        self.initial = {
            name: value.cpu().clone() for name, value in self.model.state_dict().items()
        }
        if options.channels_last:
            self.model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self.optimizer, self.factors = _make_optimizer(recipe, self.model)
        self.clip = _attach_clipping(recipe, self.optimizer, self.model)
        self.scaler = torch.amp.GradScaler(  # pyright: ignore[reportPrivateImportUsage]
            processes.device.type, enabled=options.precision == "float16"
        )
        self.average = None
        if options.ema is not None:
            rule = get_ema_multi_avg_fn(options.ema)
            self.average = AveragedModel(self.model, multi_avg_fn=rule, use_buffers=True)
        self.distributed = DistributedDataParallel(self.model) if processes.world > 1 else None
        self.forward: Callable[[Tensor], Tensor] = self.distributed or self.model
        if options.compile:
            self.forward = torch.compile(self.forward)
        smoothing = recipe.loss.label_smoothing
        if recipe.loss.smoothing == "paper":
            smoothing = powergrad.paper_smoothing(smoothing, len(data.classes))
        self.smoothing = float(smoothing)
        self.losses, self.right = torch.zeros(2, device=processes.device)  # sums of this epoch
        self.monitor: powergrad.FilterMonitor | None = None
        self.monitor_state: dict[str, Tensor] = {}
        self.seconds = 0.0
        self.lr = self.alpha = self.gradient_norm = 0.0

    # What a checkpoint holds ----------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything that going on needs."""
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
        """Go on from :meth:`state`."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self.losses.copy_(state["losses"])
        self.right.copy_(state["right"])
        self.diverged = state["diverged"]
        self.monitor_state = state["monitor"]
        self.step = state["step"]
        self.seconds = state["seconds"]
        self.best = state["best"]

    def weights(self) -> dict[str, Tensor]:
        """The weights that are tested: the averaged ones, where there are any."""
        return dict(self.tested.state_dict())

    @property
    def tested(self) -> nn.Module:
        """The network that is tested."""
        return self.model if self.average is None else self.average.module

    @property
    def done(self) -> bool:
        """Whether no step is left, or none makes sense."""
        return self.step == self.steps or self.diverged

    def all_agree(self, wish: bool) -> bool:
        """Whether any process has the wish: several must stop, or save, after the same step."""
        if self.processes.world == 1:
            return wish
        return self.step % AGREE_EVERY == 0 and self.processes.any(wish)

    @property
    def at_end_of_epoch(self) -> bool:
        """Whether the last step was the last of its epoch."""
        return self.step % self.per_epoch == 0

    # Training -------------------------------------------------------------------------------------

    def run_epoch(self) -> Iterator[Tensor]:
        """The steps that are left of this epoch; gives the loss of each."""
        options, device = self.recipe.train, self.processes.device
        epoch, start = divmod(self.step, self.per_epoch)
        batches = self.data.train.train_batches(
            options.batch_size,
            seed=self.recipe.seed,
            epoch=epoch,
            rank=self.processes.rank,
            world=self.processes.world,
            start=start,
        )
        autocast, scaled = self._autocast(), self.scaler.is_enabled()
        dropout = _stream(self.recipe.seed, "dropout", self.processes.rank)
        layout = torch.channels_last if options.channels_last else torch.contiguous_format
        self.model.train()
        began = time.perf_counter() - self.seconds
        for images, labels in batches:
            self._set_rates(self.step / self.per_epoch)
            _seed(dropout + self.step, device)
            images = images.to(device, self.dtype, non_blocking=True, memory_format=layout)
            labels = labels.to(device, non_blocking=True)
            self.optimizer.zero_grad(set_to_none=True)
            loss = self._backward(images, labels, autocast)
            if scaled:
                self.scaler.unscale_(self.optimizer)
            if self.step % self.per_epoch == self.per_epoch - 1:
                self.gradient_norm = self._gradient_norm()
            if scaled:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()
            if self.average is not None:
                self.average.update_parameters(self.model)
            self.step += 1
            self.seconds = time.perf_counter() - began
            yield loss

    def _backward(self, images: Tensor, labels: Tensor, autocast: Autocast) -> Tensor:
        """Forward and backward, in as many parts as asked for; the mean loss."""
        parts = self.recipe.train.accumulate
        if parts == 1:
            return self._part(images, labels, autocast, 1)
        pairs = list(zip(images.chunk(parts), labels.chunk(parts), strict=True))
        with self._without_sync():
            losses = [self._part(*pair, autocast, parts) for pair in pairs[:-1]]
        losses.append(self._part(*pairs[-1], autocast, parts))
        return torch.stack(losses).sum()

    def _part(self, images: Tensor, labels: Tensor, autocast: Autocast, of: int) -> Tensor:
        """The gradients of one of so many parts; its share of the loss."""
        with autocast:
            logits = self.forward(images)
            loss = self._loss(logits, labels)
        if of > 1:
            loss = loss / of
        self.scaler.scale(loss).backward()
        loss = loss.detach()
        answers = labels if labels.dim() == 1 else labels.argmax(1)
        self.losses.add_(loss)
        self.right.add_((logits.detach().argmax(1) == answers).sum())
        return loss

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.recipe.loss.form == "as_published":
            from powergrad.lab.paper.as_published import as_published_cross_entropy

            return as_published_cross_entropy(
                logits, labels, alpha=self.alpha, label_smoothing=self.smoothing
            )
        scale = self.recipe.loss.logit_scale
        return powergrad.cross_entropy(
            logits if scale == 1 else logits * scale,
            labels,
            alpha=self.alpha,
            label_smoothing=self.smoothing,
        )

    def _without_sync(self) -> contextlib.AbstractContextManager[Any]:
        if self.distributed is not None:
            return self.distributed.no_sync()
        return contextlib.nullcontext()

    def _autocast(self) -> Autocast:
        dtype = AUTOCAST.get(self.recipe.train.precision)
        if dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.processes.device.type, dtype=dtype)

    def _set_rates(self, epoch: float) -> None:
        recipe = self.recipe
        epochs = recipe.train.epochs
        self.lr = learning_rate_at(epoch, recipe.schedule, recipe.optimizer.lr, epochs)
        self.alpha = alpha_at(epoch, recipe.loss, epochs)
        for group, factor in zip(self.optimizer.param_groups, self.factors, strict=True):
            group["lr"] = self.lr * factor

    def _gradient_norm(self) -> float:
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(grads))

    # The end of an epoch --------------------------------------------------------------------------

    def finish_epoch(self) -> tuple[dict[str, float | None], dict[str, Tensor] | None]:
        """The epoch's row of metrics; what the network said on the test set, if it was tested."""
        options = self.recipe.train
        epoch = self.step // self.per_epoch
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
            "train_loss": losses / self.per_epoch / self.processes.world,
            "train_accuracy": 100 * right / (self.per_epoch * options.batch_size),
            "gradient_norm": self.gradient_norm,
            "clip_rate": self._clip_rate(),
            "loss_scale": self.scaler.get_scale() if self.scaler.is_enabled() else None,
            "seconds": self.seconds,
            "images_per_second": self.step * options.batch_size / self.seconds,
        }
        if not self.done and epoch % options.test_every:
            self.is_best = False
            return row, None
        outputs = self.test(self.data.test)
        row |= score(outputs["logits"], outputs["labels"], self.alpha)
        row["dead_units"] = len(powergrad.census(self.tested, initial=self.initial).dead)
        self.is_best = (row["test_accuracy"] or 0) > self.best
        self.best = max(self.best, row["test_accuracy"] or 0)
        return row, outputs

    @torch.no_grad()
    def test(self, split: Split) -> dict[str, Tensor]:
        """The logits and labels of every example of `split`, in order."""
        options, device = self.recipe.train, self.processes.device
        model = self.tested
        model.eval()
        autocast = self._autocast()
        size = options.test_batch_size or options.batch_size
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for (images, labels), index in split.test_batches(
            size, rank=self.processes.rank, world=self.processes.world
        ):
            with autocast:
                logits = model(images.to(device, self.dtype))
            found.append((logits.float(), labels.to(device), index.to(device)))
        logits, labels, index = (
            self.processes.concatenate(torch.cat(part)) for part in zip(*found, strict=True)
        )
        order = index.argsort()
        return {"logits": logits[order].cpu(), "labels": labels[order].cpu()}

    def _clip_rate(self) -> float | None:
        """The part of the units that the last step clipped, by the last of the methods."""
        if self.clip is None or not self.clip.last_report:
            return None
        report = list(self.clip.last_report.values())[-1]
        return report.clipped / report.units if report.units else 0.0


def score(logits: Tensor, labels: Tensor, alpha: float) -> dict[str, float | None]:
    """The metrics of a test: accuracies in percent, NLL and ECE at temperature 1 and 1/alpha."""
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
    """Which rows have their largest logit at the label: (N), boolean. NaN is no answer."""
    return (logits.argmax(1) == labels) & ~logits.isnan().any(1)


def _stream(seed: int, *what: str | int) -> int:
    """Where the random numbers of one kind begin: separate streams of one seed."""
    named = "/".join(str(each) for each in (seed, *what))
    return int.from_bytes(hashlib.sha256(named.encode()).digest()[:7], "big")


def _seed(number: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)


# What a session is made of ------------------------------------------------------------------------


def _check_batches(recipe: Recipe, data: Datasets, per_epoch: int, world: int) -> None:
    batch = recipe.train.batch_size
    if per_epoch < 1:
        raise ValueError(
            f"Expected `train.batch_size` to be at most the {len(data.train)} training examples, "
            f"but got {batch}."
        )
    parts = world * recipe.train.accumulate
    if batch % parts:
        raise ValueError(
            f"Expected `train.batch_size` to be divided by {world} processes times "
            f"`train.accumulate`, {parts}, but got {batch}."
        )


def _make_model(
    recipe: Recipe, data: Datasets, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    options = recipe.model
    model = create_model(
        options.name,
        num_classes=len(data.classes),
        in_channels=data.channels,
        width=options.width,
        norm=options.norm,
        stem=options.stem,
        zero_init_residual=options.zero_init_residual,
    ).to(device, dtype)
    if options.head_scale != 1:
        with torch.no_grad():
            for parameter in find_head(model, None).parameters():
                parameter.mul_(options.head_scale)
    return model


def _make_optimizer(recipe: Recipe, model: nn.Module) -> tuple[torch.optim.Optimizer, list[float]]:
    """The optimizer, and what each of its groups multiplies the learning rate by."""
    options = recipe.optimizer
    plain = options.backbone == options.head
    head = set() if plain else set(find_head(model, None).parameters())
    members: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            decays = options.decay_all or parameter.dim() > 1
            members.setdefault((parameter in head, decays), []).append(parameter)
    groups, factors = [], []
    for (in_head, decays), parameters in members.items():
        factor = options.head if in_head else options.backbone
        group: dict[str, Any] = {
            "params": parameters,
            "weight_decay": options.weight_decay * factor.weight_decay if decays else 0.0,
        }
        if options.name != "sgd":
            group["eps"] = options.eps * factor.eps
        groups.append(group)
        factors.append(factor.lr)
    # Where a scaler skips the first step, fused SGD leaves its momentum uninitialised (2.13.0).
    scaled = recipe.train.precision == "float16"
    fused = next(model.parameters()).device.type in ("cpu", "cuda") and not scaled
    if options.name == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            groups,
            lr=options.lr,
            momentum=options.momentum,
            nesterov=options.nesterov,
            fused=fused,
        )
    else:
        kind = torch.optim.Adam if options.name == "adam" else torch.optim.AdamW
        optimizer = kind(groups, lr=options.lr, betas=options.betas, fused=fused)
    return optimizer, factors


def _attach_clipping(
    recipe: Recipe, optimizer: torch.optim.Optimizer, model: nn.Module
) -> ClipHandle | None:
    options = recipe.clip
    wanted: ClipThresholds = {}
    if options.value is not None:
        wanted["value"] = options.value
    if options.tensor_norm is not None:
        wanted["tensor_norm"] = options.tensor_norm
    if options.norm is not None:
        wanted["norm"] = options.norm
    if options.agc is not None:
        wanted["agc"] = options.agc
    if not wanted:
        return None
    return powergrad.clip_grads_before_step(optimizer, model, eps=options.agc_eps, **wanted)
