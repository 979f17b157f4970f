r"""Gradient clipping: the paper's Type I methods, which alter gradients after the backward pass.

For a gradient ``g``, its weight ``w`` and a threshold ``t``, the methods bound different norms:

    norm          all gradients together     |g| <= t
    tensor_norm   each tensor                |g| <= t               (the paper's equation for GC)
    value         each element               -t <= g <= t
    agc           each unit, say a filter    |g| <= t * max(|w|, eps)

:func:`adaptive_clip_grad_` and :func:`clip_grad_norm_per_tensor_` clip once, when called;
``torch.nn.utils`` has such functions for the other two. :func:`clip_grads_before_step` attaches any
of the four to an optimizer.

References:
    Pascanu, Mikolov, Bengio, *On the difficulty of training recurrent neural networks*, 2013.
    Brock, De, Smith, Simonyan, *High-Performance Large-Scale Image Recognition Without
    Normalization*, 2021. Their code is ``nfnets/`` in google-deepmind/deepmind-research. The
    results here are bitwise equal to those of ``timm/utils/agc.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from powergrad._check import check_eps, check_threshold
from powergrad._clip import ClipHandle, ClippingHook, ClipReport, Guard, LayerClip, clip_units
from powergrad._units import gradients_of, parameters_of
from powergrad.head import find_head, find_heads

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


class ClipThresholds(TypedDict, total=False):
    """The methods of :func:`clip_grads_before_step`, each with its threshold."""

    agc: float
    norm: float
    tensor_norm: float
    value: float


# The functions ------------------------------------------------------------------------------------


@torch.no_grad()
def adaptive_clip_grad_(
    module_or_parameters: nn.Module | Tensor | Iterable[Tensor],
    clip: float = 0.01,
    eps: float = 1e-3,
    *,
    head: Head = "auto",
) -> ClipReport:
    r"""Adaptive gradient clipping (AGC): clip each unit relative to its weight, in place.

    With Frobenius norms, the gradient of each unit ``i`` becomes

        g_i * clip * max(|w_i|, eps) / |g_i|    where |g_i| > clip * max(|w_i|, eps).

    A unit is the part of a weight that computes one output: a row of ``Linear`` and of attention
    projections, a filter of ``ConvNd`` and of ``ConvTransposeNd`` (whose outputs are in the second
    dimension of its weight, by group), a row of ``Embedding`` and ``EmbeddingBag``. A gain, a bias
    or a scalar is a single unit. Other parameters have one unit per entry of their first dimension.

    If any of the gradients to be clipped is not finite, none is changed, so that a later check for
    non-finite gradients still finds it.

    Args:
        module_or_parameters: The model, whose modules determine the units and the head. Or
            parameters: then all are clipped, and their shapes determine the units, as in timm
            (vectors and scalars are one unit, others have one per entry of the first dimension).
        clip: The largest ratio of gradient norm to weight norm, positive; infinity disables
            clipping.
        eps: The lower bound of the weight norm, so that weights at 0 can change.
        head: The classifier, which is not clipped. ``"auto"`` finds it: the model's
            ``get_classifier()``, otherwise its last layer if no other could be the head. Or the
            module, or its name, or None to clip it too.

    Returns:
        The report, by parameter; parameters without a gradient are not included.

    Raises:
        ValueError: If ``clip`` or ``eps`` is out of range, if the head is not found or several
            layers could be the head, or if a gradient is sparse in a way other than by rows.
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
    parameters = [p for p in parameters_of(module_or_parameters) if p.tensor not in spared]
    return clip_units(gradients_of(parameters), clip, Guard(), eps)


@torch.no_grad()
def clip_grad_norm_per_tensor_(
    module_or_parameters: nn.Module | Tensor | Iterable[Tensor], max_norm: float
) -> ClipReport:
    r"""Clip each gradient tensor by its own norm, in place: the paper's equation for clipping.

    Each tensor ``g`` becomes ``max_norm * g / |g|`` where ``|g| > max_norm``. The paper's text
    calls this clip by value. To clip the norm of all gradients together, use
    ``torch.nn.utils.clip_grad_norm_``. If any gradient is not finite, none is changed.

    Args:
        module_or_parameters: The model, or parameters.
        max_norm: The largest norm, positive; infinity disables clipping.

    Returns:
        The report, by parameter; each parameter is one unit.

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
    gradients = gradients_of(parameters_of(module_or_parameters), whole=True)
    return clip_units(gradients, max_norm, Guard())


def _head_parameters(source: object, head: Head) -> set[Tensor]:
    if head is None or (head == "auto" and not isinstance(source, nn.Module)):
        return set()
    if isinstance(source, nn.Module):
        try:
            heads = find_heads(source) if head == "auto" else [find_head(source, head)]
        except ValueError as error:
            raise ValueError(f"{error} Pass `head=None` to clip every layer.") from None
    elif isinstance(head, nn.Module):
        heads = [head]
    else:
        raise ValueError(f"Expected a module in which to find `head` {head!r}, but got parameters.")
    return {parameter for module in heads for parameter in module.parameters()}


# The optimizer hook -------------------------------------------------------------------------------


def clip_grads_before_step(
    optimizer: torch.optim.Optimizer,
    module: nn.Module | None = None,
    *,
    eps: float = 1e-3,
    head: Head = "auto",
    **thresholds: Unpack[ClipThresholds],
) -> ClipHandle:
    r"""Clip the gradients of an optimizer before each of its steps.

    ``agc=0.01`` clips like :func:`adaptive_clip_grad_`, ``norm=1.0`` like
    ``torch.nn.utils.clip_grad_norm_``, ``tensor_norm=1.0`` like :func:`clip_grad_norm_per_tensor_`,
    ``value=0.5`` like ``torch.nn.utils.clip_grad_value_``. Several are applied in the given order.

    Under a ``GradScaler`` the result is the same as without one, also with a fused optimizer, whose
    gradients are still scaled when it steps. If any gradient of the optimizer is not finite, none
    is changed, and the scaler skips the step; on an accelerator this check does not synchronise.
    With a closure, gradients are clipped after each evaluation.

    Args:
        optimizer: Any ``torch.optim.Optimizer``, also inside a wrapper such as timm's Lookahead or
            accelerate's ``AcceleratedOptimizer``: the hook is attached to the inner optimizer.
        module: The model, for ``agc``: its modules determine the units and the head.
        eps: For ``agc``, the lower bound of the weight norm.
        head: For ``agc``, the layer that is not clipped, as in :func:`adaptive_clip_grad_`.
        thresholds: One or more of ``agc``, ``norm``, ``tensor_norm`` and ``value``, each positive.

    Returns:
        A handle: ``remove()`` detaches the hook, ``last_report`` holds the last reports.

    Raises:
        ValueError: If a threshold or ``eps`` is out of range, if the head is not found or several
            layers could be the head, or if ``optimizer`` has no parameter of ``module``.
        TypeError: If ``optimizer`` is not an optimizer or does not run step hooks, or if there is
            no threshold or an unknown one.

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
    optimizer = _stepping_optimizer(optimizer)
    known = ", ".join(ClipThresholds.__annotations__)
    for method in thresholds:
        if method not in ClipThresholds.__annotations__:
            raise TypeError(f"Expected thresholds for {known}, but got `{method}`.")
    if not thresholds:
        raise TypeError(f"Expected one or more thresholds for {known}, but got none.")
    methods = {name: check_threshold(value, name) for name, value in thresholds.items()}
    check_eps(eps)

    spared: set[Tensor] = set()
    if "agc" in methods:
        if module is None and head is not None:
            raise ValueError(
                "Expected `module`, the model in which `agc` finds the head, but got None; pass "
                "the model, or `head=None` to clip every parameter with units by shape."
            )
        spared = _head_parameters(module, head)
    in_model = {} if module is None else {p.tensor: p for p in parameters_of(module)}
    if in_model and all(p.tensor not in in_model for p in parameters_of(optimizer)):
        raise ValueError(
            "Expected `optimizer` to hold parameters of `module`, but got none of them; pass the "
            "model that the optimizer trains."
        )
    return ClippingHook(methods, eps, spared, in_model).attach(optimizer)


def _stepping_optimizer(optimizer: object) -> Optimizer:
    """The innermost optimizer inside any wrappers; an error if it does not run step hooks."""
    # The wrappers are timm's Lookahead, accelerate's and Lightning's optimizers, and SAM. A wrapper
    # need not run hooks, and those of the inner optimizer run closest to the step.
    names = ("optimizer", "base_optimizer", "_optimizer", "_base_optimizer")
    while isinstance(optimizer, Optimizer):
        inside = (getattr(optimizer, name, None) for name in names)
        inner = next((wrapped for wrapped in inside if hasattr(wrapped, "step")), None)
        if inner is None:
            break
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            "Expected `optimizer` to be a torch.optim.Optimizer, or a wrapper of one, but got "
            f"{type(optimizer).__name__}."
        )
    hooked = getattr(type(optimizer).step, "hooked", False)  # set by Optimizer.__init__
    # ZeroRedundancyOptimizer can step while gradients are reduced, before its own step().
    if not hooked or getattr(optimizer, "_overlap_with_ddp", False):
        raise TypeError(
            "Expected `optimizer` to run step hooks, but got "
            f"{type(optimizer).__name__}, which does not; clip before each step with "
            "`adaptive_clip_grad_` or a function of torch.nn.utils."
        )
    return optimizer
