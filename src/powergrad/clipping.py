r"""Gradient clipping, the paper's Type I methods: gradients altered after the backward pass.

With ``g`` a gradient, ``w`` its weight and ``t`` a threshold, the methods differ in what they
bound:

    norm          all gradients together     |g| <= t
    tensor_norm   each tensor                |g| <= t               (the paper's equation for GC)
    value         each element               -t <= g <= t
    agc           each unit, say a filter    |g| <= t * max(|w|, eps)

:func:`adaptive_clip_grad_` and :func:`clip_grad_norm_per_tensor_` clip once, where they are called;
for the other two, ``torch.nn.utils`` has such a function. :func:`clip_grads_before_step` attaches
any of the four to an optimizer.

References:
    Pascanu, Mikolov, Bengio, *On the difficulty of training recurrent neural networks*, 2013.
    Brock, De, Smith, Simonyan, *High-Performance Large-Scale Image Recognition Without
    Normalization*, 2021. Their code is ``nfnets/`` in google-deepmind/deepmind-research; the
    arithmetic here is that of ``timm/utils/agc.py``, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from powergrad._check import check_eps, check_threshold
from powergrad._clip import ClipHandle, ClippingHook, ClipReport, Guard, LayerClip, clip_units
from powergrad._head import find_head, find_heads
from powergrad._units import gradients_of, parameters_of

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
    r"""Adaptive gradient clipping (AGC): bound each unit's gradient by its weight, in place.

    With Frobenius norms, the gradient of each unit ``i`` becomes

        g_i * clip * max(|w_i|, eps) / |g_i|    where |g_i| > clip * max(|w_i|, eps).

    A unit is what makes one output: a row of ``Linear`` and of attention's projections, a filter
    of ``ConvNd`` and of ``ConvTransposeNd`` (whose outputs are in its weight's second dimension, by
    group), a row of ``Embedding`` and ``EmbeddingBag``. A gain or a bias is one unit as a whole,
    and so is a scalar. Other parameters have one unit per entry of their first dimension.

    If any of the gradients to be clipped is not finite, none is changed, so that a later check for
    non-finite gradients still finds it.

    Args:
        module_or_parameters: The model, whose modules say what a unit is and which layer is the
            head. Or bare parameters: then all are clipped, and their shapes say what a unit is
            (vectors and scalars are one, all else goes by the first dimension), as in timm.
        clip: The largest ratio of gradient to weight, positive; infinity clips nothing.
        eps: The least norm that a weight is taken to have, so that weights at 0 can move.
        head: The classifier, which is left alone: ``"auto"`` finds it (what the model's
            ``get_classifier()`` returns, else its last layer, if no other might be it). Or the
            module, or its name, or None to clip it too.

    Returns:
        What was clipped, by parameter; those without a gradient are left out.

    Raises:
        ValueError: If ``clip`` or ``eps`` is out of range, if the head is not found or several
            layers might be it, or if a gradient is sparse in another way than an embedding's.
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
    gradients = gradients_of(parameters_of(module_or_parameters), whole=True)
    return clip_units(gradients, max_norm, Guard())


def _head_parameters(source: object, head: Head) -> set[Tensor]:
    if head is None or (head == "auto" and not isinstance(source, nn.Module)):
        return set()
    if isinstance(source, nn.Module):
        try:
            heads = find_heads(source) if head == "auto" else [find_head(source, head)]
        except ValueError as error:
            raise ValueError(f"{error} With `head=None` every layer is clipped.") from None
    elif isinstance(head, nn.Module):
        heads = [head]
    else:
        raise ValueError(f"Expected a module to find the head {head!r} in, but got parameters.")
    return {parameter for module in heads for parameter in module.parameters()}


# Attached to an optimizer -------------------------------------------------------------------------


def clip_grads_before_step(
    optimizer: torch.optim.Optimizer,
    module: nn.Module | None = None,
    *,
    eps: float = 1e-3,
    head: Head = "auto",
    **thresholds: Unpack[ClipThresholds],
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
        optimizer: Any ``torch.optim.Optimizer``, also in a wrapper, such as timm's Lookahead or
            accelerate's ``AcceleratedOptimizer``: the hook is that of the optimizer inside.
        module: The model, for ``agc``: it says what a unit is and which layer is the head.
        eps: For ``agc``, the least norm that a weight is taken to have.
        head: For ``agc``, the layer that is left alone, as in :func:`adaptive_clip_grad_`.
        thresholds: One or more of ``agc``, ``norm``, ``tensor_norm`` and ``value``, each positive.

    Returns:
        A handle: ``remove()`` detaches, ``last_report`` says what was clipped.

    Raises:
        ValueError: If a threshold or ``eps`` is out of range, if the head is not found or several
            layers might be it, or if ``optimizer`` has no parameter of ``module``.
        TypeError: If ``optimizer`` is not one or does not run its hooks, or if there is no
            threshold or one of another name.

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
                "it, or `head=None` to clip every parameter, with units by shape."
            )
        spared = _head_parameters(module, head)
    in_model = {} if module is None else {p.tensor: p for p in parameters_of(module)}
    if in_model and all(p.tensor not in in_model for p in parameters_of(optimizer)):
        raise ValueError(
            "Expected `optimizer` to hold parameters of `module`, but got none of them; pass the "
            "model that it trains."
        )
    return ClippingHook(methods, eps, spared, in_model).attach(optimizer)


def _stepping_optimizer(optimizer: object) -> Optimizer:
    """The optimizer whose step runs in the end, inside of any wrappers; if that runs its hooks."""
    # timm's Lookahead, accelerate's and Lightning's optimizers, SAM. A wrapper need not run hooks,
    # and those inside it run closest to the step.
    names = ("optimizer", "base_optimizer", "_optimizer", "_base_optimizer")
    while isinstance(optimizer, Optimizer):
        inside = (getattr(optimizer, name, None) for name in names)
        inner = next((each for each in inside if hasattr(each, "step")), None)
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
            "Expected `optimizer` to run the hooks of its step, but got "
            f"{type(optimizer).__name__}, which does not; clip before its step, by "
            "`adaptive_clip_grad_` or what torch.nn.utils has."
        )
    return optimizer
