"""Observes which units of a model fire and which get a gradient on given data."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from powergrad._head import evaluating, find_head, unwrap
from powergrad.monitor.layers import (
    LAYERS,
    channel_dim,
    filter_norms,
    named_units,
    on_host,
    weight_of,
)
from powergrad.units import transposed_groups

# Functions with a flat region at zero: a unit that stays in it outputs 0 and learns nothing.
_RECTIFIERS = {
    *(torch.relu, torch.relu_, Tensor.relu, Tensor.relu_),
    *(F.relu, F.relu6, F.hardtanh, F.hardswish, F.threshold),
}
# Functions that compute each channel from itself alone (in evaluation mode), in the same dimension.
_CHANNELWISE = {
    *(F.batch_norm, F.instance_norm),
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d),
    *(F.max_pool1d, F.max_pool2d, F.max_pool3d),
    *(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
}


@dataclass
class Activity:
    """The observations, by layer name; a layer that is missing was not measured."""

    # Whether each unit was ever above zero after the rectifier that follows it.
    fired: dict[str, Tensor] = field(default_factory=dict)
    # The largest gradient norm of each filter or gain over the batches.
    gradients: dict[str, Tensor] = field(default_factory=dict)
    # The largest absolute value of each channel that enters the classifier.
    features: Tensor | None = None
    classifier: str | None = None
    examples: int = 0


def observe(
    model: nn.Module,
    data: Iterable[Any],
    loss: Callable[[Any, Any], Tensor] | None,
    head: nn.Module | str | None,
) -> Activity:
    """Run `data` through `model` in evaluation mode, and restore the model afterwards."""
    model = unwrap(model)
    modules = {layer.name: module for layer, module in named_units(model)}
    classifier = _find_classifier(model, head)
    activity = Activity(classifier=next((n for n, m in modules.items() if m is classifier), None))
    firing = _Firing(activity.fired)
    with evaluating(model), ExitStack() as hooks:
        for name, module in modules.items():
            # Subclasses of LayerNorm may have their channels in another dimension.
            exact = type(module) in (nn.LayerNorm, nn.RMSNorm)
            if exact or isinstance(module, (*LAYERS, nn.GroupNorm)):
                mark = partial(firing.mark_output, name)
                hooks.enter_context(module.register_forward_hook(mark))
        if isinstance(classifier, LAYERS):
            note = partial(_note_features, activity)
            hooks.enter_context(classifier.register_forward_pre_hook(note, with_kwargs=True))
        for batch in [data] if isinstance(data, Tensor) else data:
            inputs, target = _split(batch, model, loss is not None)
            activity.examples += len(inputs)
            with torch.set_grad_enabled(loss is not None):
                with firing:
                    output = model(inputs)
                if loss is not None:
                    _add_gradients(activity, modules, loss(output, target))
    if activity.examples == 0:
        raise ValueError("Expected `data` to hold at least one example, but got none.")
    return activity


def _find_classifier(model: nn.Module, head: nn.Module | str | None) -> nn.Module | None:
    try:
        return find_head(model, head)
    except ValueError:
        if head is not None:
            raise
        return None


def _split(batch: Any, model: nn.Module, needs_target: bool) -> tuple[Tensor, Any]:
    if isinstance(batch, Tensor):
        batch = (batch,)
    if not isinstance(batch, (tuple, list)) or not batch or not isinstance(batch[0], Tensor):
        raise TypeError(
            "Expected each batch of `data` to be a tensor or a tuple (input, target), but got "
            f"{type(batch).__name__}."
        )
    if needs_target and len(batch) < 2:
        raise ValueError(
            "Expected `data` to hold (input, target) if `loss` is given, but got only inputs."
        )
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    inputs, *rest = (x.to(device) if isinstance(x, Tensor) else x for x in batch)
    return inputs, rest[0] if rest else None


def _note_features(activity: Activity, module: nn.Module, args: Any, kwargs: Any) -> None:
    """Forward pre-hook of the classifier."""
    inputs = (args[0] if args else kwargs["input"]).detach()
    largest = _by_channel(inputs, channel_dim(module)).abs().amax(1).cpu()
    before = activity.features
    activity.features = largest if before is None else torch.maximum(before, largest)


class _Firing(TorchFunctionMode):
    """Notes which channels of a layer's output are not zero after the rectifier that follows it.

    A layer's output is recognised by its identity and version, so an addition to it, also in place,
    makes it another tensor: the sum of two branches belongs to neither. After a batch
    normalisation, channels still belong to their layer. After a normalisation over several
    channels, they belong to the normalisation, because a channel that it silences still
    contributes to the statistics of the others.
    """

    def __init__(self, fired: dict[str, Tensor]) -> None:
        super().__init__()
        self.fired = fired
        self._marks: dict[int, tuple[weakref.ref[Tensor], int, str, int]] = {}

    def mark_output(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of a layer, or of a normalisation over several channels."""
        if isinstance(module, LAYERS):
            self._mark(output, name, channel_dim(module))
        elif isinstance(output, Tensor):
            self._mark(output, name, 1 - output.dim() if isinstance(module, nn.GroupNorm) else -1)

    def _mark(self, tensor: Any, name: str, dim: int) -> None:
        if isinstance(tensor, Tensor):
            self._marks[id(tensor)] = (weakref.ref(tensor), tensor._version, name, dim)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        mark = None
        if func in _RECTIFIERS or func in _CHANNELWISE:
            tensor = args[0] if args else kwargs.get("input")
            mark = self._marks.get(id(tensor))
            if mark is not None and (mark[0]() is not tensor or mark[1] != tensor._version):
                mark = None
        output = func(*args, **kwargs)
        if mark is not None:
            _, _, name, dim = mark
            if func in _CHANNELWISE:
                self._mark(output, name, dim)
            else:
                fires = (_by_channel(output.detach(), dim) != 0).any(1).cpu()
                self.fired[name] = fires | self.fired.get(name, torch.zeros_like(fires))
        return output

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._marks.clear()


def _by_channel(tensor: Tensor, dim: int) -> Tensor:
    """``(channels, everything else)``."""
    return tensor.movedim(dim, 0).flatten(1) if tensor.dim() > 1 else tensor[:, None]


def _add_gradients(activity: Activity, modules: dict[str, nn.Module], loss: Tensor) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"Expected `loss` to return a scalar that depends on the weights, but got {got}."
        )
    trained = {
        name: module
        for name, module in modules.items()
        if isinstance(module.weight, nn.Parameter) and module.weight.requires_grad
    }
    weights = [weight_of(module) for module in trained.values()]
    gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    for (name, module), gradient in zip(trained.items(), gradients, strict=True):
        if gradient is not None:  # None: not used in this forward pass, so nothing is known
            if isinstance(module, LAYERS):
                (gradient,) = filter_norms([gradient], [transposed_groups(module)])
            norms = on_host(gradient.abs())
            before = activity.gradients.get(name, torch.zeros_like(norms))
            activity.gradients[name] = torch.maximum(before, norms)
