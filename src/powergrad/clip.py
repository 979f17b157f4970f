r"""Gradient clipping: the paper's Type I methods, which alter gradients after the backward pass.

For a gradient ``g``, its weight ``w`` and a threshold ``t``, the methods bound different norms:

    norm          all gradients together     |g| <= t
    tensor_norm   each tensor                |g| <= t               (the paper's equation for GC)
    value         each element               -t <= g <= t
    agc           each unit, say a filter    |g| <= t * max(|w|, eps)

References: Pascanu et al., *On the difficulty of training recurrent neural networks*, 2013. Brock
et al., *High-Performance Large-Scale Image Recognition Without Normalization*, 2021.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.linalg import vector_norm
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from powergrad import units
from powergrad.checks import check_number, check_threshold, is_dtensor
from powergrad.head import find_head, find_heads

__all__ = [
    "ClipHandle",
    "ClipReport",
    "adaptive_clip_grad_",
    "clip_grads_before_step",
]

Head = nn.Module | str | None
METHODS = ("agc", "norm", "tensor_norm", "value")
TINY = torch.finfo(torch.float32).tiny


class ClipTotal(NamedTuple):
    """What clipping did in all processes of a group."""

    clipped: int
    units: int
    largest: float


@dataclass(frozen=True)
class ClipReport:
    """What clipping at a threshold did. Its tensors stay on the device until they are read.

    Of sharded parameters it has the units of this process; :meth:`total` adds up all of them.

    Attributes:
        threshold: The threshold.
        finite: Whether all gradients were finite; otherwise, none was changed.
    """

    threshold: float
    finite: Tensor
    # By parameter its name, its number of units, and how many processes have these units.
    _units: list[tuple[str, int, int]]
    _ratios: Tensor  # of all units, in this order

    @property
    def ratios(self) -> dict[str, Tensor]:
        """What was compared with the threshold, before clipping, by the name of the parameter.

        One value per unit (of a sparse gradient, per unit that has one): ``|g| / max(|w|, eps)``
        for AGC, otherwise the norm or the absolute value. ``norm`` has one value, ``"total"``.
        """
        ratios = self._ratios.cpu().split([count for _, count, _ in self._units])
        return {name: ratio for (name, *_), ratio in zip(self._units, ratios, strict=True)}

    @property
    def units(self) -> int:
        """The number of units."""
        return len(self._ratios)

    @property
    def clipped(self) -> Tensor:
        """The number of units that were clipped."""
        return self.finite * (self._ratios > self.threshold).sum()

    @property
    def largest(self) -> Tensor:
        """The largest value that was compared with the threshold; 0 if there are no units."""
        return self._ratios.amax() if self.units else 0.0 * self.finite

    def total(self, group: Any = None) -> ClipTotal:
        """The report on all processes of `group` (by default, on all), each of which calls this.

        Each unit of a DTensor counts once per device mesh that has it, so under tensor parallelism
        a parameter that only FSDP2 shards counts several times. Others count once per process.
        """
        if self._units and self._units[0][0] == "total":  # the same in all of them
            return ClipTotal(int(self.clipped), 1, float(self.largest))
        shares = [1 / copies for _, count, copies in self._units for _ in range(count)]
        share = torch.tensor(shares, dtype=torch.float64, device=self._ratios.device)
        clipped = (share * (self._ratios > self.threshold)).sum() * self.finite
        sums, largest = torch.stack([clipped, share.sum()]), self.largest.double()
        distributed.all_reduce(sums, group=group)
        distributed.all_reduce(largest, distributed.ReduceOp.MAX, group=group)
        clipped, units = sums.round().int().tolist()
        return ClipTotal(clipped, units, float(largest))

    def __repr__(self) -> str:
        done = f"{self.clipped} of {self.units} units clipped at {self.threshold:g}"
        return f"ClipReport({done}, largest {self.largest:.3g}, in {len(self._units)} parameters)"


# By parameter its name and, in a model, the module that it is for, if that decides on its units.
Parameters = dict[Tensor, tuple[str, nn.Module | None]]


class _Gradient(NamedTuple):
    name: str
    parameter: Tensor
    weight: Tensor  # of a sparse gradient, the rows that it has
    tensor: Tensor
    dims: units.Dims  # that a unit spans, in both
    sharing: units.Sharing = units.Sharing()
    gathered: Tensor | None = None  # the whole gradient, of which `tensor` is a view


@torch.no_grad()
def clip_gradients(
    parameters: Parameters,
    thresholds: Mapping[str, float],
    eps: float,
    spared: Collection[Tensor] = (),
    scale: Tensor | None = None,
    finite: Tensor | None = None,
    group: Any = None,
) -> dict[str, ClipReport]:
    """Clip by one or more methods, unless a gradient is not finite.

    AGC leaves out the parameters that are `spared`; `scale` is a factor of all gradients. The
    processes of `group` have further parameters.
    """
    reports = {}
    for method, threshold in thresholds.items():
        gradients, apart = [], []
        for g in _gradients_of(parameters, method):
            (apart if method == "agc" and g.parameter in spared else gradients).append(g)
        weights = []
        if method == "agc":  # first, so that the gradients, to be read again, are in the cache
            weights = units.norms((g.weight, g.dims) for g in gradients)
        norms, others = _sizes(method, gradients), units.norms((g.tensor, None) for g in apart)
        device = next((x.device for x in norms + others if not x.is_cpu), torch.device("cpu"))
        if finite is None:
            finite = _flat(norms + others, device).isfinite().all()
            if not (finite.is_cpu and finite):  # a norm may have overflowed
                nonempty = [g.tensor for g in gradients + apart if g.tensor.numel()]
                finite = get_total_norm(nonempty, math.inf).isfinite()
        owners = [*gradients, *(gradients if weights else []), *apart]
        pairs = zip([*norms, *weights, *others], owners, strict=True)
        shared = [(norm, g.sharing) for norm, g in pairs]
        finite = units.add_up(shared, finite, largest=method == "value").to(device)
        pairs = zip(gradients, norms, strict=True)
        counts = [(g.name, norm.numel(), g.sharing.copies) for g, norm in pairs]
        if method == "norm" or group is not None:
            total = vector_norm(_flat(norms if method == "norm" else [], device))
            if group is not None:
                finite = units.add_up([(total, units.Sharing([group], [group]))], finite)
            if method == "norm" and norms:
                norms, counts = [total], [("total", 1, 1)]
        sizes = _flat(norms, device)
        floors = torch.ones_like(sizes)
        if weights:
            floors = _flat(weights, device).clamp_(min=max(eps, TINY))
        if scale is not None:
            floors = floors * scale.to(device)
        reports[method] = ClipReport(threshold, finite, counts, sizes / floors)
        if norms and math.isfinite(threshold):
            _clip(method, threshold, gradients, norms, sizes, floors, finite)
    return reports


def _sizes(method: str, gradients: list[_Gradient]) -> list[Tensor]:
    """What is compared with the threshold, by unit."""
    if method == "value":  # not vector_norm(inf), which takes 14 times as long on CPU
        nonempty = (g.tensor if g.tensor.numel() else g.tensor.new_zeros(1) for g in gradients)
        return [torch.stack(x.aminmax()).abs().amax() for x in nonempty]
    return units.norms((g.tensor, g.dims) for g in gradients)


def _flat(tensors: list[Tensor], device: torch.device) -> Tensor:
    """All values, in one tensor on `device`."""
    return torch.cat([torch.empty(0, device=device), *(x.to(device).flatten() for x in tensors)])


def parameters_of(source: nn.Module | Optimizer | Tensor | Iterable[Tensor]) -> Parameters:
    """The parameters of a model, of an optimizer, or of an iterable."""
    owners: dict[Tensor, nn.Module] = {}
    if isinstance(source, nn.Module):
        for module in source.modules():
            if isinstance(module, (*units.TRANSPOSED, *units.WHOLE)):
                inside = getattr(module, "parametrizations", nn.Module())
                own = [*module.parameters(recurse=False), *inside.parameters()]
                owners |= dict.fromkeys(own, module)
        named = source.named_parameters()
    elif isinstance(source, Optimizer):
        named = (
            (group["param_names"][j] if "param_names" in group else f"{i}.{j}", parameter)
            for i, group in enumerate(source.param_groups)
            for j, parameter in enumerate(group["params"])
        )
    else:
        named = enumerate([source] if isinstance(source, Tensor) else source)
    found: Parameters = {}
    for name, parameter in named:
        if not isinstance(parameter, Tensor):
            kind = type(parameter).__name__
            raise TypeError(f"Expected parameters to be tensors, but got {kind}.")
        found.setdefault(parameter, (str(name), owners.get(parameter)))
    return found


def _gradients_of(parameters: Parameters, method: str) -> list[_Gradient]:
    """The existing gradients of `parameters`, by unit; except for AGC, each tensor is one unit."""
    units.refuse_flat(parameters, "parameters")
    gradients = []
    parameter: Any
    for parameter, (name, owner) in parameters.items():
        grad: Any = parameter.grad
        if grad is None:
            continue
        weight: Any = parameter
        if grad.layout is not torch.strided:
            if grad.layout is not torch.sparse_coo or grad.sparse_dim() > 1 or not grad.dense_dim():
                raise ValueError(
                    f"Expected the gradient of `{name}` to be dense, or sparse by rows as for an "
                    f"embedding, but got {grad.layout} of shape {tuple(grad.shape)}."
                )
            parameter.grad = grad = grad.coalesce()  # a row may occur several times
            weight, grad = parameter[grad.indices()[0]], grad.values()
        if grad.numel() == 0:
            continue
        sharded, gathered = is_dtensor(grad), None
        if sharded and grad.placements != parameter.placements:  # such as a sum still partial
            parameter.grad = grad = grad.redistribute(placements=parameter.placements)
        if sharded and method == "agc" and isinstance(owner, units.TRANSPOSED) and grad.dim() > 1:
            gathered, weight = grad.full_tensor(), weight.full_tensor()  # units along dimension 1
        view, dims = units.by_unit(units.local_part(grad if gathered is None else gathered), owner)
        dims = dims if method == "agc" else None
        sharing = units.sharing_of(grad, whole=dims is None)
        if gathered is not None:
            sharing = units.Sharing(copies=grad.device_mesh.size())
        weight, _ = units.by_unit(units.local_part(weight), owner)
        gradients.append(_Gradient(name, parameter, weight, view, dims, sharing, gathered))
    return gradients


def _clip(
    method: str,
    threshold: float,
    gradients: list[_Gradient],
    norms: list[Tensor],
    sizes: Tensor,
    floors: Tensor,
    finite: Tensor,
) -> None:
    """Clip the gradients whose `sizes`, those of `norms`, are above ``threshold * floors``."""
    limits = floors * threshold
    over = sizes > limits
    if method == "norm":
        total = (sizes / floors).amax().where(finite, -1e-6)  # its factor is 1
        local: Any = [SimpleNamespace(grad=g.tensor) for g in gradients]
        clip_grads_with_norm_(local, threshold, total)
    elif over.is_cpu and not over.any():
        return
    elif method == "value":
        limit = limits.amax().where(finite, math.inf)  # they are all the same
        for g in gradients:
            g.tensor.clamp_(-limit.to(g.tensor.device), limit.to(g.tensor.device))
    else:
        factors = (limits / sizes).where(over & finite, 1)
        counts = [norm.numel() for norm in norms]
        columns = gradients, norms, factors.split(counts), over.split(counts)
        for g, norm, factor, clipped in zip(*columns, strict=True):
            if not clipped.is_cpu or clipped.any():
                g.tensor.mul_(factor.to(g.tensor.device).view_as(norm))
                if g.gathered is not None:
                    grad: Any = g.parameter.grad
                    grad.to_local().copy_(units.own_part(g.gathered, grad))


def adaptive_clip_grad_(
    module_or_parameters: nn.Module | Tensor | Iterable[Tensor],
    clip: float = 0.01,
    eps: float = 1e-3,
    *,
    head: Head = "auto",
    group: Any = None,
) -> ClipReport:
    r"""Adaptive gradient clipping (AGC): clip each unit relative to its weight, in place.

    Where the norm of a unit's gradient is above ``clip * max(|w|, eps)``, it is scaled to that. A
    unit is the part of a weight that computes one output: a filter of a convolution, a row of
    ``Linear``, of attention projections and of ``Embedding``. A gain, a bias or a scalar is a
    single unit. Other parameters have one unit per entry of their first dimension. If any of the
    gradients to be clipped is not finite, none is changed.

    The parameters may be DTensors, as under ``fully_shard`` (FSDP2) and tensor parallelism. Then
    all processes call it. Units that are whole in one process are clipped there; what the others
    need is exchanged in one all-reduce per mesh dimension.

    Args:
        module_or_parameters: The model, whose modules determine the units and the head. Or
            parameters: then all are clipped, and their shapes determine the units, as in timm.
        clip: The largest ratio of gradient norm to weight norm, positive; infinity clips nothing.
        eps: The lower bound of the weight norm, so that weights at 0 can change.
        head: The classifier, which is not clipped: the module, its name, or ``"auto"`` to find it
            in the model. None clips it too.
        group: The processes that hold the other parts of the model, such as pipeline stages. They
            also refrain from clipping if a gradient of one of them is not finite.

    Returns:
        The report on all parameters that have a gradient; of a DTensor, on the units of this
        process.

    Raises:
        ValueError: If ``clip`` or ``eps`` is out of range, there is not one layer that could be the
            head, or a gradient is sparse in a way other than by rows.
        TypeError: If a parameter is not a tensor, or belongs to ``FullyShardedDataParallel``.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        >>> model(torch.ones(1, 4)).sum().mul(1e6).backward()
        >>> adaptive_clip_grad_(model).clipped
        tensor(4)
    """
    check_threshold(clip, "clip")
    check_number(eps, "eps")
    alone = head == "auto" and not isinstance(module_or_parameters, nn.Module)
    parameters = parameters_of(module_or_parameters)
    for parameter in _head_parameters(module_or_parameters, None if alone else head):
        parameters.pop(parameter, None)
    return clip_gradients(parameters, {"agc": clip}, eps, group=group)["agc"]


def _head_parameters(source: object, head: Head) -> set[Tensor]:
    try:
        if isinstance(source, nn.Module) and head is not None:
            heads = find_heads(source) if head == "auto" else [find_head(source, head)]
        elif isinstance(head, str):
            raise ValueError(
                f"Expected `module`, the model in which to find `head` {head!r}, but got none; "
                "pass the model."
            )
        else:
            heads = [] if head is None else [head]
    except ValueError as error:
        raise ValueError(f"{error} Pass `head=None` to clip every layer.") from None
    return {parameter for module in heads for parameter in module.parameters()}


@dataclass(eq=False)
class ClipHandle(AbstractContextManager["ClipHandle"]):
    """Clips before each step, until it is removed; as a context manager it removes itself.

    Attributes:
        thresholds: The methods, each with its threshold.
        last_report: The report of each method at the last step.
    """

    thresholds: Mapping[str, float]
    _eps: float
    _spared: Collection[Tensor]
    _in_model: Parameters
    _group: Any = None
    last_report: dict[str, ClipReport] = field(default_factory=dict)
    _attached: RemovableHandle | None = None

    def remove(self) -> None:
        """Stop clipping."""
        if self._attached is not None:
            self._attached.remove()

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if "grad_scaler" in kwargs:
            raise RuntimeError(
                f"The step() of {type(optimizer).__name__} takes a `grad_scaler`, so the scale of "
                "its gradients is unknown; remove this clipping, and clip after "
                "`scaler.unscale_(optimizer)`."
            )
        closure = closure_of(args, kwargs)
        if closure is None:
            return self._clip_gradients_of(optimizer)

        def closure_then_clip() -> Any:
            loss = closure()
            self._clip_gradients_of(optimizer)
            return loss

        return args[:1], {**kwargs, "closure": closure_then_clip}

    def _clip_gradients_of(self, optimizer: Optimizer) -> None:
        # A fused optimizer unscales and skips by itself, so its gradients are still scaled. For any
        # other one the scaler has already unscaled them, or there is no scaler.
        scale, found_inf = (getattr(optimizer, x, None) for x in ("grad_scale", "found_inf"))
        finite = None if found_inf is None else found_inf == 0
        known = parameters_of(optimizer)
        parameters = {p: self._in_model.get(p, named) for p, named in known.items()}
        how = self.thresholds, self._eps, self._spared
        self.last_report.update(clip_gradients(parameters, *how, scale, finite, self._group))


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The closure of a step with these arguments, if any."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def clip_grads_before_step(
    optimizer: torch.optim.Optimizer,
    module: nn.Module | None = None,
    *,
    eps: float = 1e-3,
    head: Head = "auto",
    group: Any = None,
    **thresholds: float,
) -> ClipHandle:
    r"""Clip the gradients of an optimizer before each of its steps.

    ``agc=0.01`` clips like :func:`adaptive_clip_grad_`, ``norm=1.0`` like
    ``torch.nn.utils.clip_grad_norm_``, ``tensor_norm=1.0`` like that for each tensor alone,
    ``value=0.5`` like ``torch.nn.utils.clip_grad_value_``. Several are applied in the given order.

    Under a ``GradScaler`` the result is the same as without one, also with a fused optimizer. If a
    gradient of the optimizer is not finite, none is changed. With a closure, gradients are clipped
    after each evaluation. On an accelerator, nothing waits for the device.

    Args:
        optimizer: Any ``torch.optim.Optimizer``, also inside a wrapper such as timm's Lookahead.
        module: The model, for ``agc``: its modules determine the units and the head.
        eps: For ``agc``, the lower bound of the weight norm.
        head: For ``agc``, the layer that is not clipped, as in :func:`adaptive_clip_grad_`.
        group: As in :func:`adaptive_clip_grad_`; ``norm`` is the norm over all of its processes.
        thresholds: One or more of ``agc``, ``norm``, ``tensor_norm`` and ``value``, each positive;
            infinity clips nothing.

    Returns:
        A handle: ``remove()`` detaches the hook, ``last_report`` holds the last reports.

    Raises:
        ValueError: As :func:`adaptive_clip_grad_`, or ``optimizer`` has no parameter of ``module``.
        TypeError: If ``optimizer`` does not run step hooks, or a threshold is missing or unknown.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> handle = clip_grads_before_step(optimizer, model, agc=0.01, norm=1.0)
        >>> model(torch.ones(1, 4)).sum().mul(1e6).backward()
        >>> optimizer.step()
        >>> handle.last_report["agc"].clipped
        tensor(4)
        >>> handle.remove()
    """
    optimizer = stepping_optimizer(optimizer)
    if not thresholds or thresholds.keys() - set(METHODS):
        got = ", ".join(f"`{method}`" for method in thresholds) or "none"
        raise TypeError(f"Expected thresholds for some of {', '.join(METHODS)}, but got {got}.")
    methods = {name: check_threshold(value, name) for name, value in thresholds.items()}
    check_number(eps, "eps")
    spared = _head_parameters(module, head) if "agc" in methods else set()
    in_model = {} if module is None else parameters_of(module)
    if in_model and in_model.keys().isdisjoint(parameters_of(optimizer)):
        raise ValueError(
            "Expected `optimizer` to hold parameters of `module`, but got none of them; pass the "
            "model that the optimizer trains."
        )
    handle = ClipHandle(methods, eps, spared, in_model, group)
    handle._attached = optimizer.register_step_pre_hook(handle._before_step)
    return handle


def stepping_optimizer(optimizer: object) -> Optimizer:
    """The innermost optimizer inside any wrappers; an error if it does not run step hooks."""
    # The wrappers are timm's Lookahead, accelerate's and Lightning's optimizers, and SAM. A wrapper
    # need not run hooks, and those of the inner optimizer run closest to the step.
    names = ("optimizer", "base_optimizer", "_optimizer", "_base_optimizer")
    while isinstance(optimizer, Optimizer):
        inside = [getattr(optimizer, name, None) for name in names]
        inner = [wrapped for wrapped in inside if hasattr(wrapped, "step")]
        if not inner:
            # Optimizer.__init__ sets `hooked`. ZeroRedundancyOptimizer can step before its step().
            hooked = getattr(getattr(type(optimizer), "step", None), "hooked", False)
            if not hooked or getattr(optimizer, "_overlap_with_ddp", False):
                break
            return optimizer
        optimizer = inner[0]
    raise TypeError(
        "Expected `optimizer` to be a torch.optim.Optimizer that runs step hooks, or a wrapper of "
        f"one, but got {type(optimizer).__name__}; clip before each step with "
        "`adaptive_clip_grad_` or a function of torch.nn.utils."
    )
