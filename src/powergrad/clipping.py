r"""Gradient clipping, the paper's Type I methods: gradients altered after the backward pass.

With ``g`` a gradient, ``w`` its weight and ``t`` a threshold, the methods differ in what they
bound:

    norm          all gradients together     |g| <= t
    tensor_norm   each tensor                |g| <= t               (the paper's equation for GC)
    value         each element               -t <= g <= t
    agc           each unit, say a filter    |g| <= t * max(|w|, eps)

:func:`adaptive_clip_grad_` and :func:`clip_grad_norm_per_tensor_` act once, where they are called;
for the other two ``torch.nn.utils`` has such a function. :func:`clip_grads_before_step` attaches
any of the four to an optimizer.

References:
    Pascanu, Mikolov, Bengio, *On the difficulty of training recurrent neural networks*, 2013.
    Brock, De, Smith, Simonyan, *High-Performance Large-Scale Image Recognition Without
    Normalization*, 2021. Their code is ``nfnets/`` in google-deepmind/deepmind-research; the
    arithmetic here is that of ``timm/utils/agc.py``, to the bit.
"""

from __future__ import annotations

import math
import numbers
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
from torch import Tensor, _foreach_mul_, nn  # pyright: ignore[reportPrivateImportUsage]
from torch.linalg import vector_norm
from torch.nn.utils.parametrize import ParametrizationList

from powergrad._head import find_head, find_heads
from powergrad._native.norms import scale_units_
from powergrad._units import Dims, by_unit, in_rows, transposed_groups, unit_norms

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "ClipHandle",
    "ClipReport",
    "LayerClip",
    "adaptive_clip_grad_",
    "clip_grad_norm_per_tensor_",
    "clip_grads_before_step",
]

Head = nn.Module | str | None


class Thresholds(TypedDict, total=False):
    """The methods that :func:`clip_grads_before_step` knows, each with its threshold."""

    agc: float
    norm: float
    tensor_norm: float
    value: float


# What was done ------------------------------------------------------------------------------------


class LayerClip(NamedTuple):
    """What clipping did to one parameter.

    Attributes:
        units: How many units it has; if its gradient is sparse, how many that reaches.
        clipped: How many of them were clipped.
        largest: The largest of what was compared with the threshold, before clipping: the ratio
            ``|g| / max(|w|, eps)`` for AGC, else the norm or the absolute value.
    """

    units: int
    clipped: int
    largest: float


class ClipReport(Mapping[str, LayerClip]):
    """What one clipping did: a mapping from the parameter's name to :class:`LayerClip`.

    The numbers stay on the device of the gradients until they are asked for, so that making a
    report does not make the host wait.

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
        """Whether nothing was changed because some gradient was not finite."""
        return self._finite is not None and not bool(self._finite)

    @cached_property
    def _layers(self) -> dict[str, LayerClip]:
        layers: dict[str, LayerClip] = {}
        for part in self._parts:
            norms, floors = part.norms.cpu(), part.floors.cpu()
            over = norms > floors * self.threshold
            ratio = torch.where(norms == 0, 0, norms / floors)  # 0 also where both are 0
            for name, units, clipped, ratios in zip(
                part.names,
                part.units,
                over.split(part.units),
                ratio.split(part.units),
                strict=True,
            ):
                count = 0 if self.skipped else int(clipped.sum())
                layers[name] = LayerClip(units, count, ratios.max().item())
        return {name: layers[name] for name in self._names}

    def __getitem__(self, name: str) -> LayerClip:
        return self._layers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def units(self) -> int:
        """The number of units, over all layers."""
        return sum(layer.units for layer in self.values())

    @property
    def clipped(self) -> int:
        """The number of units clipped, over all layers."""
        return sum(layer.clipped for layer in self.values())

    @property
    def largest(self) -> float:
        """The largest of what was compared with the threshold, over all layers; 0 without any."""
        return max((layer.largest for layer in self.values()), default=0.0)

    def __repr__(self) -> str:
        return (
            f"ClipReport({self.clipped} of {self.units} units clipped at {self.threshold:g}, "
            f"largest {self.largest:.3g}, in {len(self)} layers)"
        )


# The functions ------------------------------------------------------------------------------------


@torch.no_grad()
def adaptive_clip_grad_(
    module_or_parameters: nn.Module | Tensor | Iterable[Tensor],
    clip: float = 0.01,
    eps: float = 1e-3,
    *,
    head: Head = "auto",
) -> ClipReport:
    r"""Adaptive gradient clipping (AGC): bound each unit's gradient by its weight, in place.

    With Frobenius norms, the gradient of each unit ``i`` becomes

        g_i * clip * max(|w_i|, eps) / |g_i|    where |g_i| > clip * max(|w_i|, eps).

    A unit is what makes one output: a row of ``Linear`` and of attention's projections, a filter
    of ``ConvNd`` and of ``ConvTransposeNd`` (whose outputs are in its weight's second dimension, by
    group), a row of ``Embedding`` and ``EmbeddingBag``. A gain or a bias is one unit as a whole,
    and so is a scalar. Other parameters have a unit for each entry of their first dimension.

    If any of the gradients to be clipped is not finite, none is changed, so that whoever looks for
    that later still finds it.

    Args:
        module_or_parameters: The model, whose modules say what a unit is and which layer is the
            head. Or bare parameters: then all are clipped, and their shapes say what a unit is
            (vectors and scalars are one, all else goes by the first dimension), as in timm.
        clip: The largest ratio of gradient to weight, positive; infinity clips nothing.
        eps: The least norm that a weight is taken to have, so that weights at 0 can move.
        head: The classifier, which is left alone: ``"auto"`` finds it (what the model's
            ``get_classifier()`` returns, else its last layer). Or the module, or its name, or None
            to clip it too.

    Returns:
        What was clipped, by parameter; those without a gradient are left out.

    Raises:
        ValueError: If ``clip`` or ``eps`` is out of range, if the head is not found, or if a
            gradient is sparse in another way than an embedding's.
        TypeError: If a parameter is not a tensor, or its gradient is a ``DTensor``.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        >>> model(torch.ones(1, 4)).sum().mul(1e6).backward()
        >>> adaptive_clip_grad_(model)["0.weight"].clipped
        3

    References:
        Brock, De, Smith, Simonyan, *High-Performance Large-Scale Image Recognition Without
        Normalization*, 2021, equation 3.
    """
    check_threshold(clip, "clip")
    check_eps(eps)
    spared = _head_parameters(module_or_parameters, head)
    parameters = [p for p in _parameters(module_or_parameters) if p.tensor not in spared]
    return _clip_units(_layers(parameters), clip, eps, _Guard())


@torch.no_grad()
def clip_grad_norm_per_tensor_(
    module_or_parameters: nn.Module | Tensor | Iterable[Tensor], max_norm: float
) -> ClipReport:
    r"""Clip each gradient by its own norm, in place: the paper's equation for gradient clipping.

    Each tensor ``g`` becomes ``max_norm * g / |g|`` where ``|g| > max_norm``. The paper's text
    calls this clip by value. The norm of all gradients together is for
    ``torch.nn.utils.clip_grad_norm_``. If any gradient is not finite, none is changed.

    Args:
        module_or_parameters: The model, or parameters.
        max_norm: The largest norm, positive; infinity clips nothing.

    Returns:
        What was clipped, by parameter; each is one unit.

    Raises:
        ValueError: If ``max_norm`` is not positive.
        TypeError: If a parameter is not a tensor, or its gradient is a ``DTensor``.

    Example:
        >>> w = torch.nn.Parameter(torch.zeros(2))
        >>> w.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_per_tensor_([w], 1.0)
        ClipReport(1 of 1 units clipped at 1, largest 5, in 1 layers)
        >>> w.grad
        tensor([0.6000, 0.8000])
    """
    check_threshold(max_norm, "max_norm")
    layers = _layers(_parameters(module_or_parameters), whole=True)
    return _clip_units(layers, max_norm, None, _Guard())


# Attached to an optimizer -------------------------------------------------------------------------


class ClipHandle:
    """What :func:`clip_grads_before_step` returns; also a context manager that detaches at its end.

    Attributes:
        last_report: What each method did at the last step, by the method's name.
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


def clip_grads_before_step(
    optimizer: torch.optim.Optimizer,
    module: nn.Module | None = None,
    *,
    eps: float = 1e-3,
    head: Head = "auto",
    **thresholds: Unpack[Thresholds],
) -> ClipHandle:
    r"""Clip the gradients of an optimizer each time that it steps, just before it does.

    ``agc=0.01`` clips as :func:`adaptive_clip_grad_`, ``norm=1.0`` as
    ``torch.nn.utils.clip_grad_norm_``, ``tensor_norm=1.0`` as :func:`clip_grad_norm_per_tensor_`,
    ``value=0.5`` as ``torch.nn.utils.clip_grad_value_``. Several act in the order of writing.

    What is clipped under a ``GradScaler`` is what a run without one would clip, also with a fused
    optimizer, whose gradients are still scaled when it steps. If any gradient of the optimizer is
    not finite, none is changed, and skipping the step is left to the scaler; on an accelerator the
    host does not wait to learn that. With a closure, gradients are clipped after each evaluation.

    Args:
        optimizer: Any optimizer of ``torch.optim``.
        module: The model, for ``agc``: it says what a unit is and which layer is the head.
        eps: For ``agc``, the least norm that a weight is taken to have.
        head: For ``agc``, the layer that is left alone, as in :func:`adaptive_clip_grad_`.
        thresholds: One or more of ``agc``, ``norm``, ``tensor_norm`` and ``value``, each positive.

    Returns:
        A handle: ``remove()`` detaches, ``last_report`` says what was clipped.

    Raises:
        ValueError: If a threshold or ``eps`` is out of range, or if the head is not found.
        TypeError: If ``optimizer`` is not one, or if there is no threshold or one of another name.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> handle = clip_grads_before_step(optimizer, model, agc=0.01, norm=1.0)
        >>> model(torch.ones(1, 4)).sum().mul(1e6).backward()
        >>> optimizer.step()
        >>> handle.last_report["agc"]["0.weight"].clipped
        3
        >>> handle.remove()
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            "Expected `optimizer` to be a torch.optim.Optimizer, but got "
            f"{type(optimizer).__name__}."
        )
    known_methods = ", ".join(Thresholds.__annotations__)
    for method in thresholds:
        if method not in Thresholds.__annotations__:
            raise TypeError(f"Expected thresholds for {known_methods}, but got `{method}`.")
    if not thresholds:
        raise TypeError(f"Expected one or more thresholds for {known_methods}, but got none.")
    methods = [(name, check_threshold(value, name)) for name, value in thresholds.items()]
    check_eps(eps)

    spared: set[Tensor] = set()
    if "agc" in thresholds:
        if module is None and head is not None:
            raise ValueError(
                "Expected `module`, the model in which `agc` finds the head, but got None; pass "
                "it, or `head=None` to clip every parameter, with units by shape."
            )
        spared = _head_parameters(module, head)
    known = {} if module is None else {p.tensor: p for p in _parameters(module)}
    handle = ClipHandle()

    @torch.no_grad()
    def clip() -> None:
        parameters = [known.get(p.tensor, p) for p in _optimizer_parameters(optimizer)]
        guard = _Guard(optimizer)
        for method, threshold in methods:
            if method == "agc":
                units = _layers(p for p in parameters if p.tensor not in spared)
                others = _layers((p for p in parameters if p.tensor in spared), whole=True)
                report = _clip_units(units, threshold, eps, guard, others)
            elif method == "tensor_norm":
                report = _clip_units(_layers(parameters, whole=True), threshold, None, guard)
            elif method == "norm":
                report = _clip_total(_layers(parameters, whole=True), threshold, guard)
            else:
                report = _clip_values(_layers(parameters, whole=True), threshold, guard)
            handle.last_report[method] = report

    def before_step(
        _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if "grad_scaler" in kwargs:
            raise RuntimeError(
                f"Expected {type(optimizer).__name__} to find its scale in `grad_scale`, but its "
                "step() takes a `grad_scaler`, so it is not known at which scale its gradients "
                "are; detach this clipping, and clip after `scaler.unscale_(optimizer)`."
            )
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            return clip()

        def closure_then_clip() -> Any:
            loss = closure()
            clip()
            return loss

        if len(args) > 1:
            return (args[0], closure_then_clip, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_then_clip}

    handle._detach = optimizer.register_step_pre_hook(before_step).remove
    return handle


# Parameters, layers and their units ---------------------------------------------------------------


class _Parameter(NamedTuple):
    name: str
    tensor: Tensor
    owner: nn.Module | None


class _Layer(NamedTuple):
    """A parameter that has a gradient, seen by unit."""

    name: str
    weight: Tensor
    grad: Tensor
    unit: Dims | None  # the dimensions that one unit spans; None: the whole is one
    rows: bool  # whether the C kernel serves it


def _parameters(source: nn.Module | Tensor | Iterable[Tensor]) -> Iterable[_Parameter]:
    """Each parameter once, with its name and, in a model, the module that it belongs to."""
    if isinstance(source, nn.Module):
        found = _module_parameters(source)
    else:
        tensors = [source] if isinstance(source, Tensor) else source
        found = (_Parameter(str(i), p, None) for i, p in enumerate(tensors))
    once: dict[Tensor, _Parameter] = {}
    for p in found:
        if not isinstance(p.tensor, Tensor):
            kind = type(p.tensor).__name__
            raise TypeError(f"Expected parameters to be tensors, but got {kind}.")
        once.setdefault(p.tensor, p)
    return once.values()


def _module_parameters(module: nn.Module) -> Iterator[_Parameter]:
    for path, child in module.named_modules():
        owner = child
        if isinstance(child, ParametrizationList):  # of weight_norm and its like
            owner = module.get_submodule(path.rpartition("parametrizations.")[0].rstrip("."))
        for name, p in child._parameters.items():
            if p is not None:
                yield _Parameter(f"{path}.{name}" if path else name, p, owner)


def _optimizer_parameters(optimizer: torch.optim.Optimizer) -> Iterator[_Parameter]:
    for i, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"{i}.{j}" for j in range(len(group["params"]))]
        for name, p in zip(names, group["params"], strict=True):
            yield _Parameter(name, p, None)


def _head_parameters(source: object, head: Head) -> set[Tensor]:
    if head is None or (head == "auto" and not isinstance(source, nn.Module)):
        return set()
    if isinstance(source, nn.Module):
        try:
            found = find_heads(source) if head == "auto" else [find_head(source, head)]
        except ValueError as error:
            raise ValueError(f"{error} With `head=None` every layer is clipped.") from None
    elif isinstance(head, nn.Module):
        found = [head]
    else:
        raise ValueError(f"Expected a module to find the head {head!r} in, but got parameters.")
    return {p for module in found for p in module.parameters()}


def _layers(parameters: Iterable[_Parameter], whole: bool = False) -> list[_Layer]:
    """The parameters that have a gradient, by unit or each as a whole."""
    layers = []
    for name, weight, owner in parameters:
        grad = weight.grad
        if grad is None:
            continue
        if hasattr(grad, "placements"):  # a DTensor's units may be spread over processes
            raise TypeError(
                f"Expected the gradient of `{name}` to be a whole tensor, but got a DTensor; for "
                "those, torch.nn.utils has clip_grad_norm_."
            )
        if grad.layout is not torch.strided:
            weight, grad = _rows(name, weight, grad)
        if grad.numel() > 0:
            unit = None
            one = whole or weight.dim() < 2 or isinstance(owner, (nn.LayerNorm, nn.RMSNorm))
            if not one:
                groups = transposed_groups(owner)
                (weight, unit), (grad, _) = by_unit(weight, groups), by_unit(grad, groups)
            layers.append(_Layer(name, weight, grad, unit, in_rows(unit, grad, weight)))
    return layers


def _rows(name: str, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that a sparse gradient reaches: of the weight, and of the gradient in place."""
    if grad.layout is not torch.sparse_coo or grad.sparse_dim() != 1 or grad.dense_dim() == 0:
        raise ValueError(
            f"Expected the gradient of `{name}` to be dense, or sparse by rows as an embedding's, "
            f"but got {grad.layout} of shape {tuple(grad.shape)}."
        )
    weight.grad = grad = grad.coalesce()  # a row may have come several times
    return weight[grad.indices()[0]], grad.values()


# The arithmetic -----------------------------------------------------------------------------------


class _Measured(NamedTuple):
    """The units of some layers: one is clipped where its norm exceeds the threshold * its floor."""

    names: list[str]
    units: list[int]
    norms: Tensor
    floors: Tensor


class _Guard:
    """The scale that an optimizer's gradients are at, and whether they are finite.

    A scaler hands ``grad_scale`` and ``found_inf`` to those optimizers (the fused ones) that
    unscale and skip by themselves. For all others it has unscaled by now, or there is none.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.scale: Tensor | None = getattr(optimizer, "grad_scale", None)
        found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
        self.finite = None if found_inf is None else found_inf == 0

    def look(self, batches: list[list[_Layer]], parts: list[_Measured]) -> Tensor:
        """Whether all gradients are finite, in a 0-d tensor; `parts` are what was measured."""
        if self.finite is None:
            flags = [_all_finite(*pair) for pair in zip(batches, parts, strict=True)]
            together = [flag.to(flags[0].device) for flag in flags]
            self.finite = torch.stack(together).all() if flags else torch.tensor(True, device="cpu")
        return self.finite


def _all_finite(layers: list[_Layer], part: _Measured) -> Tensor:
    grads = [layer.grad for layer in layers]
    if part.norms.device.type != "cpu":
        return unit_norms(grads, None, math.inf).isfinite().all()
    # Here an infinity norm is slow, and one may look: only where the norm is not finite are the
    # elements read, since a norm can overflow.
    finite = part.norms.isfinite().all()
    return finite if finite else torch.stack([grad.isfinite().all() for grad in grads]).all()


def _batches(layers: Iterable[_Layer]) -> list[list[_Layer]]:
    """The layers of one kind, device and dtype together."""
    groups: dict[object, list[_Layer]] = defaultdict(list)
    for layer in layers:
        whole = layer.unit is None
        # A norm of whole tensors' norms is rounded by their order, so these stay together.
        rows = layer.rows and not whole
        groups[whole, rows, layer.grad.device, layer.grad.dtype, layer.weight.dtype].append(layer)
    return list(groups.values())


def _measure(layers: list[_Layer], eps: float | None, scale: Tensor | None) -> _Measured:
    """The norms of a batch's gradients, unscaled, and of its weights if there is an `eps`."""
    grads = [layer.grad for layer in layers]
    units = None if layers[0].unit is None else [layer.unit or () for layer in layers]
    rows = all(layer.rows for layer in layers)
    floors = None
    if eps is not None:  # first, so that the gradients, to be read again, are in the cache
        weights = [layer.weight for layer in layers]
        floors = unit_norms(weights, units, rows=rows).clamp_(min=eps)
    # At a scale, elements of float16 may be in range while their norm is not.
    half = scale is not None and grads[0].dtype is torch.float16
    norms = unit_norms(grads, units, dtype=torch.float32 if half else None, rows=rows)
    if scale is not None:
        norms = norms / scale.to(norms.device)
    if floors is None:
        floors = torch.ones_like(norms)
    counts = [math.prod(_shape(layer)) for layer in layers]
    return _Measured([layer.name for layer in layers], counts, norms, floors)


def _shape(layer: _Layer) -> list[int]:
    """The shape in which the layer's units broadcast over it."""
    if layer.unit is None:
        return []
    return [1 if dim in layer.unit else n for dim, n in enumerate(layer.grad.shape)]


def _clip_units(
    layers: list[_Layer],
    threshold: float,
    eps: float | None,
    guard: _Guard,
    others: Iterable[_Layer] = (),
) -> ClipReport:
    """Clip by unit: with an `eps` relative to the weights, else by the gradient's norm alone.

    The gradients of `others` have to be finite too, and are left as they are.
    """
    batches, unclipped = _batches(layers), _batches(others)
    parts = [_measure(batch, eps, guard.scale) for batch in batches]
    seen = [_measure(batch, None, guard.scale) for batch in unclipped]
    finite = guard.look(batches + unclipped, parts + seen)
    for batch, part in zip(batches, parts, strict=True):
        limits = part.floors * threshold
        clipped = (part.norms >= limits) & finite.to(part.norms.device)
        if math.isinf(threshold) or (clipped.device.type == "cpu" and not clipped.any()):
            continue
        # timm's arithmetic. Its floor of 1e-6 is felt only where clip * eps is less.
        factors = limits / (part.norms if eps is None else part.norms.clamp(min=1e-6))
        factors = torch.where(clipped, factors, 1)
        grads = [layer.grad for layer in batch]
        if all(layer.rows for layer in batch):
            scale_units_(grads, part.units, factors)
        elif batch[0].unit is None:
            _foreach_mul_(grads, factors.unbind())
        else:
            pairs = zip(batch, factors.split(part.units), strict=True)
            _foreach_mul_(grads, [factor.view(_shape(layer)) for layer, factor in pairs])
    return ClipReport(threshold, [layer.name for layer in layers], parts, finite)


def _clip_total(layers: list[_Layer], threshold: float, guard: _Guard) -> ClipReport:
    """``torch.nn.utils.clip_grad_norm_``, at a scale and with a guard."""
    batches = _batches(layers)
    parts = [_measure(batch, None, guard.scale) for batch in batches]
    if not parts:
        return ClipReport(threshold, [], [])
    device = parts[0].norms.device
    total = vector_norm(torch.cat([part.norms.to(device) for part in parts]))
    finite = guard.look(batches, parts)
    if not math.isinf(threshold):
        factor = (threshold / (total + 1e-6)).clamp(max=1)
        factor = torch.where(finite.to(device), factor, 1)
        for batch in batches:
            grads = [layer.grad for layer in batch]
            _foreach_mul_(grads, factor.to(grads[0].device))
    total = total.view(1)
    part = _Measured(["total"], [1], total, torch.ones_like(total))
    return ClipReport(threshold, part.names, [part], finite)


def _clip_values(layers: list[_Layer], threshold: float, guard: _Guard) -> ClipReport:
    """``torch.nn.utils.clip_grad_value_``, at a scale and with a guard."""
    batches = _batches(layers)
    parts = []
    for batch in batches:
        extremes = [layer.grad.aminmax() for layer in batch]
        largest = torch.stack([torch.maximum(-low, high) for low, high in extremes])
        if guard.scale is not None:
            largest = largest / guard.scale.to(largest.device)
        names, units = [layer.name for layer in batch], [1] * len(batch)
        parts.append(_Measured(names, units, largest, torch.ones_like(largest)))
    finite = guard.look(batches, parts)
    for batch, part in zip(batches, parts, strict=True):
        dtype = torch.promote_types(part.norms.dtype, torch.float32)
        bound = torch.full((), threshold, dtype=dtype, device=part.norms.device)
        if guard.scale is not None:
            bound = bound * guard.scale.to(bound.device)
        bound = torch.where(finite.to(bound.device), bound, math.inf)
        for layer in batch:
            layer.grad.clamp_(-bound, bound)
    return ClipReport(threshold, [layer.name for layer in layers], parts, finite)


# Checks -------------------------------------------------------------------------------------------


def check_threshold(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"Expected `{name}` to be a number, but got {type(value).__name__}.")
    threshold = float(value)
    if not threshold > 0:  # NaN is not
        raise ValueError(
            f"Expected `{name}` to be positive (infinity clips nothing), but got {value}."
        )
    return threshold


def check_eps(eps: float) -> None:
    if not 0 <= eps < math.inf:
        raise ValueError(f"Expected `eps` to be finite and at least 0, but got {eps}.")
