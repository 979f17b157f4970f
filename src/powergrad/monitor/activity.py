"""What the units of a model do over given data: which fire, and which get a gradient."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from powergrad._head import find_head
from powergrad._units import transposed_groups
from powergrad.monitor.layers import (
    LAYERS,
    channel_dim,
    filter_norms,
    named_units,
    unwrap,
    weight_of,
)

# Functions with a flat region at zero: a unit that stays in it sends nothing on and learns nothing.
_RECTIFIERS = {
    torch.relu,
    torch.relu_,
    torch.Tensor.relu,
    torch.Tensor.relu_,
    F.relu,
    F.relu6,
    F.hardtanh,
    F.hardswish,
    F.threshold,
}
# Functions that make each channel from itself alone (in evaluation mode), in the same dimension.
_CHANNELWISE = {
    F.batch_norm,
    F.instance_norm,
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.max_pool1d,
    F.max_pool2d,
    F.max_pool3d,
    F.avg_pool1d,
    F.avg_pool2d,
    F.avg_pool3d,
}


@dataclass
class Activity:
    """What was seen, by layer name; a layer that is missing was not measured.

    Attributes:
        fired: Whether each unit was ever above zero after the rectifier that follows it.
        gradients: The largest norm over the batches of the gradient of each filter or gain.
        features: The largest absolute value of each channel that enters the classifier.
        classifier: The name of the classifier, if there is one.
        examples: How many examples were seen.
    """

    fired: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    features: Tensor | None = None
    classifier: str | None = None
    examples: int = 0


def observe(
    model: nn.Module,
    data: Iterable[Any],
    loss: Callable[[Any, Any], Tensor] | None,
    head: nn.Module | str | None,
) -> Activity:
    """Run `data` through `model` in evaluation mode, which is left as it was found."""
    model = unwrap(model)
    named = [(layer.name, module) for layer, module in named_units(model)]
    activity = Activity()
    classifier = _find_classifier(model, head)
    activity.classifier = next((name for name, m in named if m is classifier), None)
    with _evaluating(model), _hooked(named, classifier, activity) as firing:
        for batch in [data] if isinstance(data, Tensor) else data:
            inputs, target = _split(batch, model, loss is not None)
            activity.examples += len(inputs)
            with torch.set_grad_enabled(loss is not None):
                with firing:
                    output = model(inputs)
                if loss is not None:
                    _add_gradients(activity, named, loss(output, target))
    if activity.examples == 0:
        raise ValueError("Expected `data` to hold at least one example, but got none.")
    return activity


def _find_classifier(model: nn.Module, head: nn.Module | str | None) -> nn.Module | None:
    if head is not None:
        return find_head(model, head)
    try:
        return find_head(model)
    except ValueError:
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
            "Expected `data` to hold (input, target) where `loss` is given, but got inputs alone."
        )
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    inputs, *rest = (x.to(device) if isinstance(x, Tensor) else x for x in batch)
    return inputs, rest[0] if rest else None


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    # What is compiled runs as it is written. If dynamo was never loaded, which takes seconds,
    # nothing is.
    loaded = "torch._dynamo" in sys.modules
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager") if loaded else nullcontext():
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _hooked(
    named: list[tuple[str, nn.Module]],
    classifier: nn.Module | None,
    activity: Activity,
) -> Iterator[_Firing]:
    firing = _Firing(activity.fired)
    handles = [
        module.register_forward_hook(firing.made_by(name))
        for name, module in named
        if isinstance(module, (*LAYERS, nn.GroupNorm)) or type(module) in (nn.LayerNorm, nn.RMSNorm)
    ]

    def enter_classifier(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered = (args[0] if args else kwargs["input"]).detach()
        features = _by_channel(entered, channel_dim(module)).abs().amax(1).cpu()
        seen = activity.features
        activity.features = features if seen is None else torch.maximum(seen, features)

    if isinstance(classifier, LAYERS):
        handles.append(classifier.register_forward_pre_hook(enter_classifier, with_kwargs=True))
    try:
        yield firing
    finally:
        for handle in handles:
            handle.remove()


class _Firing(TorchFunctionMode):
    """Notes which channels of a layer's output are not zero after the rectifier that follows it.

    A tensor made by a layer is known by its identity and version, so that an addition to it, also
    one in place, makes it another: the sum of two branches belongs to neither. A batch
    normalisation in between leaves each channel to its layer; one over several channels makes them
    its own, since a channel that it silences still counts in the statistics of the others.
    """

    def __init__(self, fired: dict[str, Tensor]) -> None:
        super().__init__()
        self.fired = fired
        self._made: dict[int, tuple[weakref.ref[Tensor], int, str, int]] = {}

    def made_by(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(module, LAYERS):
                self._mark(output, name, channel_dim(module))
            elif isinstance(output, Tensor):
                grouped = isinstance(module, nn.GroupNorm)
                self._mark(output, name, 1 - output.dim() if grouped else -1)

        return hook

    def _mark(self, tensor: Any, name: str, dim: int) -> None:
        if isinstance(tensor, Tensor):
            self._made[id(tensor)] = (weakref.ref(tensor), tensor._version, name, dim)

    def _maker(self, tensor: Any) -> tuple[str, int] | None:
        ref, version, name, dim = self._made.get(id(tensor), (None, 0, "", 0))
        if ref is None or ref() is not tensor or tensor._version != version:
            return None
        return name, dim

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        maker = None
        if func in _RECTIFIERS or func in _CHANNELWISE:
            maker = self._maker(args[0] if args else kwargs.get("input"))
        output = func(*args, **kwargs)
        if maker is None:
            return output
        name, dim = maker
        if func in _RECTIFIERS:
            fires = (_by_channel(output.detach(), dim) != 0).any(1).cpu()
            self.fired[name] = fires | self.fired.get(name, torch.zeros_like(fires))
        else:
            self._mark(output, name, dim)
        return output

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._made.clear()


def _by_channel(tensor: Tensor, dim: int) -> Tensor:
    """``(channels, everything else)``."""
    return tensor.movedim(dim, 0).flatten(1) if tensor.dim() > 1 else tensor[:, None]


def _add_gradients(activity: Activity, named: list[tuple[str, nn.Module]], loss: Tensor) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"Expected `loss` to return a scalar that depends on the weights, but got {got}."
        )
    wanted = [
        (name, module)
        for name, module in named
        if isinstance(module.weight, nn.Parameter) and module.weight.requires_grad
    ]
    weights = [weight_of(module) for _, module in wanted]
    gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    for (name, module), gradient in zip(wanted, gradients, strict=True):
        if gradient is None:  # not used in this forward pass: nothing is known
            continue
        is_layer = isinstance(module, LAYERS)
        norms = filter_norms(gradient, transposed_groups(module)) if is_layer else gradient.abs()
        norms = norms.to("cpu", torch.float64)
        before = activity.gradients.get(name, torch.zeros_like(norms))
        activity.gradients[name] = torch.maximum(before, norms)
