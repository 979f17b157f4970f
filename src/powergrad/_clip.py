"""Gradient clipping: the arithmetic, the report, and the optimizer hook."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from powergrad._native.norms import scale_units_
from powergrad._units import Gradient, Parameter, gradients_of, parameters_of, unit_norms
from powergrad.compat import foreach_mul_

# Reports ------------------------------------------------------------------------------------------


class LayerClip(NamedTuple):
    """What clipping did to one parameter.

    Attributes:
        units: The number of units; for a sparse gradient, the number of units with a gradient.
        clipped: The number of units that were clipped.
        largest: The largest value compared with the threshold, before clipping: the ratio
            ``|g| / max(|w|, eps)`` for AGC, otherwise the norm or the absolute value.
    """

    units: int
    clipped: int
    largest: float


class _Measured(NamedTuple):
    """The units of some layers. A unit is clipped if its norm exceeds threshold * floor."""

    names: list[str]
    units: list[int]
    norms: Tensor
    floors: Tensor


class ClipReport(Mapping[str, LayerClip]):
    """The result of one clipping: a mapping from parameter names to :class:`LayerClip`.

    The numbers stay on the device of the gradients until they are read, so creating a report does
    not force a synchronisation.

    Attributes:
        threshold: The threshold that was used.
    """

    def __init__(
        self,
        threshold: float,
        names: list[str],
        parts: list[_Measured],
        finite: Tensor | None = None,
    ) -> None:
        self.threshold = threshold
        self._names = names
        self._parts = parts
        self._finite = finite

    @cached_property
    def skipped(self) -> bool:
        """Whether clipping was skipped because a gradient was not finite."""
        return self._finite is not None and not bool(self._finite)

    @cached_property
    def _layers(self) -> dict[str, LayerClip]:
        layers: dict[str, LayerClip] = {}
        for names, units, norms, floors in self._parts:
            norms, floors = norms.cpu(), floors.cpu()
            over = (norms > floors * self.threshold) & (not self.skipped)
            ratios = torch.where(norms == 0, 0, norms / floors)  # 0 also where both are 0
            rows = zip(names, units, over.split(units), ratios.split(units), strict=True)
            for name, count, clipped, ratio in rows:
                layers[name] = LayerClip(count, int(clipped.sum()), ratio.max().item())
        return {name: layers[name] for name in self._names}

    def __getitem__(self, name: str) -> LayerClip:
        return self._layers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def units(self) -> int:
        """The number of units in all layers."""
        return sum(layer.units for layer in self.values())

    @property
    def clipped(self) -> int:
        """The number of clipped units in all layers."""
        return sum(layer.clipped for layer in self.values())

    def _count(self) -> tuple[int, Tensor | int]:
        """`units` and `clipped`; the latter stays on the device of the gradients."""
        over = [(part.norms > part.floors * self.threshold).sum() for part in self._parts]
        clipped = sum(number.to(over[0].device) for number in over)
        if over and self._finite is not None:
            clipped = clipped * self._finite.to(over[0].device)
        return sum(sum(part.units) for part in self._parts), clipped

    @property
    def largest(self) -> float:
        """The largest value compared with the threshold in any layer; 0 if there are no layers."""
        return max((layer.largest for layer in self.values()), default=0.0)

    def __repr__(self) -> str:
        return (
            f"ClipReport({self.clipped} of {self.units} units clipped at {self.threshold:g}, "
            f"largest {self.largest:.3g}, in {len(self)} layers)"
        )


# The arithmetic -----------------------------------------------------------------------------------


@dataclass
class Guard:
    """The loss scale and finiteness of the gradients at the time of a step.

    A fused optimizer unscales and skips by itself, so its gradients are still scaled. For any other
    optimizer the scaler has already unscaled them, or there is no scaler.
    """

    scale: Tensor | None = None  # of the gradients; None means 1
    finite: Tensor | None = None  # 0-d, whether all gradients are finite; None: not known yet

    def unscaled(self, norms: Tensor) -> Tensor:
        return norms if self.scale is None else norms / self.scale.to(norms.device)

    def check(self, gradients: Sequence[Gradient], norms: Sequence[Tensor]) -> Tensor:
        """Whether all gradients are finite; `norms` are their norms, which may overflow.

        On an accelerator no value is read, to avoid a synchronisation.
        """
        if self.finite is None and all(norm.is_cpu and norm.isfinite().all() for norm in norms):
            self.finite = torch.tensor(True, device="cpu")
        if self.finite is None:
            self.finite = get_total_norm([g.tensor for g in gradients], math.inf).isfinite()
        return self.finite


def clip_units(
    gradients: Sequence[Gradient],
    threshold: float,
    guard: Guard,
    eps: float | None = None,
    others: Sequence[Gradient] = (),
) -> ClipReport:
    """Clip each unit: relative to its weight if `eps` is given, else by the gradient's norm alone.

    Nothing is clipped if a gradient in `gradients` or `others` is not finite. `others` are never
    changed.
    """
    batches = _batches(gradients)
    parts = [_measure(batch, guard, eps) for batch in batches]
    norms = [part.norms for part in parts] + [get_total_norm(g.tensor) for g in others]
    finite = guard.check([*gradients, *others], norms)
    for batch, part in zip(batches, parts, strict=True):
        limits = part.floors * threshold
        clipped = (part.norms >= limits) & finite.to(part.norms.device)
        if math.isinf(threshold) or (clipped.is_cpu and not clipped.any()):
            continue
        # timm's arithmetic. Its floor of 1e-6 matters only where clip * eps is less.
        factors = limits / (part.norms if eps is None else part.norms.clamp(min=1e-6))
        factors = torch.where(clipped, factors, 1)
        if batch[0].rows:
            scale_units_([g.tensor for g in batch], part.units, factors)
        else:
            for g, factor in zip(batch, factors.split(part.units), strict=True):
                g.tensor.mul_(factor.view(g.unit_shape))
    return ClipReport(threshold, [g.name for g in gradients], parts, finite)


def clip_total(gradients: Sequence[Gradient], threshold: float, guard: Guard) -> ClipReport:
    """``torch.nn.utils.clip_grad_norm_`` for gradients that may be scaled or not finite."""
    if not gradients:
        return ClipReport(threshold, [], [])
    tensors = [g.tensor for g in gradients]
    if guard.scale is not None:  # as in `_measure`
        tensors = [t.float() if t.dtype is torch.float16 else t for t in tensors]
    total = guard.unscaled(get_total_norm(tensors))
    finite = guard.check(gradients, [total])
    factor = torch.where(finite.to(total.device), (threshold / (total + 1e-6)).clamp(max=1), 1)
    for batch in _batches(gradients) if threshold < math.inf else ():
        foreach_mul_([g.tensor for g in batch], factor.to(batch[0].tensor.device))
    part = _Measured(["total"], [1], total.view(1), torch.ones_like(total).view(1))
    return ClipReport(threshold, part.names, [part], finite)


def clip_values(gradients: Sequence[Gradient], threshold: float, guard: Guard) -> ClipReport:
    """``torch.nn.utils.clip_grad_value_`` for gradients that may be scaled or not finite."""
    batches, parts = _batches(gradients), []
    for batch in batches:  # not vector_norm(inf), which takes 14 times as long on CPU
        extremes = torch.stack([torch.stack(g.tensor.aminmax()) for g in batch])
        largest = guard.unscaled(extremes.abs().amax(1))
        names, units = [g.name for g in batch], [1] * len(batch)
        largest = _divided(largest, [g.scale for g in batch], units)
        parts.append(_Measured(names, units, largest, torch.ones_like(largest)))
    finite = guard.check(gradients, [part.norms for part in parts])
    for batch, part in zip(batches, parts, strict=True):
        dtype = torch.promote_types(part.norms.dtype, torch.float32)
        bound = torch.full((), threshold, dtype=dtype, device=part.norms.device)
        if guard.scale is not None:
            bound = bound * guard.scale.to(bound.device)
        bound = torch.where(finite.to(bound.device), bound, math.inf)
        for g in batch:
            g.tensor.clamp_(-bound * g.scale, bound * g.scale)
    return ClipReport(threshold, [g.name for g in gradients], parts, finite)


def _batches(gradients: Sequence[Gradient]) -> list[list[Gradient]]:
    """Group the gradients by kind, device and dtype."""
    batches: dict[object, list[Gradient]] = defaultdict(list)
    for g in gradients:
        batches[g.unit is None, g.rows, g.tensor.device, g.tensor.dtype, g.weight.dtype].append(g)
    return list(batches.values())


def _measure(batch: list[Gradient], guard: Guard, eps: float | None) -> _Measured:
    """The unscaled gradient norms of a batch's units and, if `eps` is given, their weight norms."""
    units, rows = [g.unit for g in batch], batch[0].rows
    counts = [math.prod(g.unit_shape) for g in batch]
    floors = None
    if eps is not None:  # first, so that the gradients, to be read again, are in the cache
        floors = unit_norms([g.weight for g in batch], units, rows=rows)
        floors = _divided(floors, [g.weight_scale for g in batch], counts).clamp_(min=eps)
    # The elements of scaled float16 gradients may be in range while their norm is not.
    half = guard.scale is not None and batch[0].tensor.dtype is torch.float16
    dtype = torch.float32 if half else None
    norms = guard.unscaled(unit_norms([g.tensor for g in batch], units, dtype, rows=rows))
    norms = _divided(norms, [g.scale for g in batch], counts)
    floors = torch.ones_like(norms) if floors is None else floors
    return _Measured([g.name for g in batch], counts, norms, floors)


def _divided(norms: Tensor, scales: Sequence[float], counts: Sequence[int]) -> Tensor:
    """Divide the norms of each tensor's units by the scale of that tensor."""
    if all(scale == 1 for scale in scales):
        return norms
    parts = norms.split(list(counts))
    return torch.cat([part / scale for part, scale in zip(parts, scales, strict=True)])


# Before each step ---------------------------------------------------------------------------------


class ClipHandle:
    """The handle that :func:`clip_grads_before_step` returns; as a context manager it detaches.

    Attributes:
        last_report: The report of each method at the last step, by the name of the method.
    """

    def __init__(self) -> None:
        self.last_report: dict[str, ClipReport] = {}
        self._detach: Callable[[], None] = lambda: None

    def remove(self) -> None:
        """Stop clipping."""
        self._detach()

    def __enter__(self) -> ClipHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


_WHOLE_TENSORS = {"norm": clip_total, "tensor_norm": clip_units, "value": clip_values}


@dataclass
class ClippingHook:
    """Clips the gradients of the optimizer it is attached to, before each step."""

    thresholds: dict[str, float]
    eps: float
    spared: set[Tensor]  # parameters that AGC does not clip
    in_model: dict[Tensor, Parameter]
    handle: ClipHandle = field(default_factory=ClipHandle)
    # After `equivalent_training`, the backbone's gradients and the weights of the heads are alpha
    # times what they would be with PGT. They are divided by alpha before they are compared.
    alpha: float = 1.0
    heads: set[Tensor] = field(default_factory=set)

    def attach(self, optimizer: Optimizer) -> ClipHandle:
        self.handle.remove()
        self.handle._detach = optimizer.register_step_pre_hook(self).remove
        return self.handle

    @torch.no_grad()
    def clip(self, optimizer: Optimizer) -> None:
        parameters = [self.in_model.get(p.tensor, p) for p in parameters_of(optimizer)]
        found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
        finite = None if found_inf is None else found_inf == 0
        guard = Guard(getattr(optimizer, "grad_scale", None), finite)
        for method, threshold in self.thresholds.items():
            if method == "agc":
                gradients = self.gradients(p for p in parameters if p.tensor not in self.spared)
                others = gradients_of(
                    (p for p in parameters if p.tensor in self.spared), whole=True
                )
                report = clip_units(gradients, threshold, guard, self.eps, others)
            else:
                gradients = self.gradients(parameters, whole=True)
                report = _WHOLE_TENSORS[method](gradients, threshold, guard)
            self.handle.last_report[method] = report

    def gradients(self, parameters: Iterable[Parameter], whole: bool = False) -> list[Gradient]:
        if self.alpha == 1:
            return gradients_of(parameters, whole=whole)
        return [
            gradient._replace(weight_scale=self.alpha)
            if parameter.tensor in self.heads
            else gradient._replace(scale=self.alpha)
            for parameter in parameters
            for gradient in gradients_of([parameter], whole=whole)
        ]

    def __call__(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if "grad_scaler" in kwargs:
            raise RuntimeError(
                f"Expected {type(optimizer).__name__} to take its loss scale from `grad_scale`, "
                "but got an optimizer whose step() takes a `grad_scaler`, so the scale of its "
                "gradients is unknown; detach this clipping and clip after "
                "`scaler.unscale_(optimizer)`."
            )
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            return self.clip(optimizer)

        def closure_then_clip() -> Any:
            loss = closure()
            self.clip(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], closure_then_clip, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_then_clip}
