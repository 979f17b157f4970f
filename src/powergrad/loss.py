"""Cross-entropy as in `torch.nn.functional`, with PowerGrad Transform in its backward pass.

`loss_by_definition` is an ordinary function of the log-probabilities of `powergrad.log_softmax`,
the primitive that alters the gradient. `way_of` says where a faster computation of it is safe.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powergrad import kernels
from powergrad.checks import (
    INTERPRETED,
    PLAIN,
    REDUCTIONS,
    Call,
    check_alpha,
    check_broadcasts,
    check_call,
    check_floating,
    check_labels,
    check_number,
    check_options,
    check_reduction,
    is_dtensor,
    is_one,
    is_plain,
    shape_of,
)
from powergrad.compat import in_transform, is_autocasting, is_exporting, keeps_graph
from powergrad.kernels import gpu
from powergrad.rows import RowStatistics, loss_and_gradient, mapped
from powergrad.transform import (
    LISTENERS,
    OF_DTENSORS,
    log_sigmoid,
    log_softmax,
    needs_operator,
    note_traced,
    potential,
    tell,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["CrossEntropyLoss", "binary_cross_entropy_with_logits", "cross_entropy"]

OPERATOR = 1 << 16  # with at least this many elements, a compiled graph calls the C kernel
Gate = Callable[[RowStatistics], Tensor]


class LossOptions(TypedDict, total=False):
    """The options of :func:`cross_entropy`, for what passes them on."""

    ignore_index: int
    reduction: str
    label_smoothing: float
    softcap: float | None
    logit_scale: float
    z_loss: float
    token_weight: Tensor | None
    gate: Gate | None
    zero_empty: bool


@overload
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    alpha: float | Tensor,
    return_stats: Literal[False] = False,
    **options: Unpack[LossOptions],
) -> Tensor: ...


@overload
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    alpha: float | Tensor,
    return_stats: Literal[True],
    **options: Unpack[LossOptions],
) -> tuple[Tensor, RowStatistics]: ...


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    alpha: float | Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,
    gate: Gate | None = None,
    zero_empty: bool = False,
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, RowStatistics]:
    r"""``F.cross_entropy`` with PowerGrad Transform's gradient ``p' - q`` at the logits.

    The value is ordinary cross-entropy. The gradient of example ``i`` is

        s_i * (sum(w * q) * p' - w * q),      p' = softmax(alpha * z),

    with class weights ``w`` and targets ``q``. The scale ``s_i`` comes from the reduction, loss
    scaling, gradient accumulation and data parallelism, as for any loss. For ``alpha > 0``,
    gradient and second derivatives are those of ``cross_entropy(alpha * z, q) / alpha``.

    Args:
        input: Logits, of shape (C), (N, C) or (N, C, d1, ..., dk).
        target: Class indices, of the shape of ``input`` without C; or class probabilities, of the
            shape of ``input``.
        weight: One weight per class, of shape (C).
        alpha: A number, at least 0; or a tensor of them: 0-d, one per example (N), or one per
            position (N, d1, ..., dk). The paper's range is [0, 1]; above 1, the softmax is
            sharpened. The float 1.0 calls PyTorch's own function, unless an option below is used.
        ignore_index: Positions with this class index contribute to neither value nor gradient.
        reduction: "mean", "sum" or "none".
        label_smoothing: The probability mass that is spread evenly over all classes.
        softcap: The cap c of the logits ``z = c * tanh(input / c)``.
        logit_scale: A factor of the logits, applied before the cap.
        z_loss: The factor lambda of ``lambda * logsumexp(z)^2``, which is added to the loss of each
            row. Its gradient is ``2 * lambda * logsumexp(alpha * z) * p'``, unlike that of a term
            added by hand, so that PGT stays equal to plain training of a scaled head.
        token_weight: One factor per row of logits, of the shape of ``input`` without C. A mean is
            still divided by the number of rows (or the sum of their class weights).
        gate: A function that takes the :class:`~powergrad.rows.RowStatistics` and returns such
            factors, which are constants for the gradient. ``lambda rows: rows.p_target`` is dynamic
            fine-tuning (DFT); ``lambda rows: (1 - rows.p_target) ** 2`` weights rows as a focal
            loss does.
        zero_empty: Whether a mean of no rows is 0 instead of PyTorch's NaN.
        return_stats: Whether to also return the :class:`~powergrad.rows.RowStatistics`.

    Returns:
        The loss: 0-d, or of the shape of ``input`` without C for "none".

    Raises:
        ValueError: If a shape, range, label or option is not as described above.
        TypeError: If a dtype is not as described above.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0, -1.0]], requires_grad=True)
        >>> loss = cross_entropy(logits, torch.tensor([1]), alpha=0.25)
        >>> loss.backward()
        >>> logits.grad
        tensor([[ 0.4810, -0.7082,  0.2272]])
    """
    call = Call(
        target,
        weight,
        alpha,
        ignore_index,
        label_smoothing,
        reduction,
        softcap,
        logit_scale,
        z_loss,
        zero_empty,
        gate,
        token_weight,
    )
    if gate is None and not return_stats:
        return loss_of(input, call)
    loss, rows = loss_and_statistics(input, call)
    return (loss, rows) if return_stats else loss


def loss_and_statistics(input: Tensor, call: Call) -> tuple[Tensor, RowStatistics]:
    """The loss, with the weights of its gate, and the statistics of its rows."""
    if _is_parallel(input, call):
        return OF_DTENSORS["cross_entropy"](input, call, True)
    class_dim, call = check_call(input, call)
    check_labels(call.target, input.shape[class_dim], call.ignore_index)
    if way_of(input, call, stats=True) == "kernels":
        loss, rows = _loss_of_kernels(input, call, class_dim, stats=True)
        return in_dtype(loss, input, call), rows
    rows = statistics(input, call, class_dim)
    if call.gate is not None:
        call = call.replace(token_weight=gated(call, rows), gate=None)
    return loss_of(input, call), rows


def statistics(input: Tensor, call: Call, class_dim: int) -> RowStatistics:
    """The statistics of the rows, computed when they are first read."""
    if call.soft():
        call = call.replace(target=call.target.detach().movedim(class_dim, -1))
    wide = torch.promote_types(input.dtype, torch.float32)
    return RowStatistics(mapped(input.detach().to(wide), call).movedim(class_dim, -1), call)


def gated(call: Call, rows: RowStatistics) -> Tensor:
    """The weights of the rows: those of the gate, times the token weights, if there are any."""
    weights: Any = cast(Gate, call.gate)(rows)
    got = shape_of(weights) if isinstance(weights, Tensor) else type(weights).__name__
    if got != shape_of(rows.counted):
        raise ValueError(
            f"Expected `gate` to return a tensor of shape {shape_of(rows.counted)}, one weight per "
            f"row, but got {got}."
        )
    return weights.detach() * (1 if call.token_weight is None else call.token_weight)


def loss_of(input: Tensor, call: Call) -> Tensor:
    """:func:`cross_entropy` without gate and statistics."""
    if _is_common_case(input, call):
        if LISTENERS:
            tell("powergrad.cross_entropy", input, call.alpha, call)
        loss = _rows_loss(input, call)
        return loss if input.dtype == torch.float32 else in_dtype(loss, input, call)
    if _is_parallel(input, call):
        return OF_DTENSORS["cross_entropy"](input, call, False)[0]
    class_dim, call = check_call(input, call)
    tell("powergrad.cross_entropy", input, call.alpha, call)
    way = way_of(input, call)
    if way == "rows":
        loss = _rows_loss(*as_rows(input, call))
        if call.reduction == "none" and input.dim() != 2:
            loss = loss.reshape(input.shape[:class_dim] + input.shape[class_dim + 1 :])
    else:
        check_labels(call.target, input.shape[class_dim], call.ignore_index)
        target, weight, alpha, ignore_index, label_smoothing, reduction, *_ = call
        if way == "pytorch":
            return torch.ops.aten.cross_entropy_loss(
                input, target, weight, REDUCTIONS[reduction], ignore_index, label_smoothing
            )
        if way == "operator":
            alpha = check_alpha(alpha, input, 1)
            loss, _ = torch.ops.powergrad.cross_entropy(
                input, target, weight, alpha, ignore_index, label_smoothing, reduction
            )
        elif way == "kernels":
            loss, _ = _loss_of_kernels(input, call, class_dim)
        else:
            loss = loss_by_definition(input, call)
    return in_dtype(loss, input, call)


def _is_parallel(input: Tensor, call: Call) -> bool:
    """Whether `powergrad.parallel` computes the loss: that of a DTensor, except PyTorch's own."""
    if not is_dtensor(input):
        return False
    return call.extended() or call.gate is not None or not is_one(call.alpha)


def in_dtype(loss: Tensor, input: Tensor, call: Call) -> Tensor:
    """The dtype of PyTorch's loss; under autocast, float32."""
    dtype = torch.promote_types(input.dtype, call.target.dtype)
    return loss if loss.dtype == dtype or is_autocasting(input.device.type) else loss.to(dtype)


def way_of(input: Tensor, call: Call, stats: bool = False) -> str:
    """How the loss of checked arguments is computed; all ways have the same gradient.

    - "pytorch": alpha is the number 1, and no option is used that PyTorch does not have;
    - "kernels": on a GPU, eager or in a compiled graph: the two Triton kernels, as operators;
    - "rows": plain eager tensors: the gradient is computed with the value, by the C kernel where
      it supports the tensors, otherwise in blocks that stay in the cache;
    - "operator": a compiled graph calls the C kernel, where that is faster than fused operations;
    - "definition": everything else: ordinary operations (with an operator for the log-softmax under
      export), right under every tracer, transform, checkpoint and parallelism.
    """
    if is_one(call.alpha) and not call.extended():
        return "pytorch"
    target = call.target
    others = [t for t in (target, call.weight, call.token_weight) if t is not None]
    differentiated = torch.is_grad_enabled() and input.requires_grad
    if not differentiated or any(t.requires_grad for t in others):
        return "definition"
    plain = is_plain(input, *others)
    compiled = (
        torch.compiler.is_compiling()
        and type(input) in PLAIN
        and is_exporting() is not True
        and not in_transform()
    )
    if (plain or compiled) and gpu.usable(input, call, stats):
        return "kernels"
    if call.soft() and target.dtype.itemsize > input.dtype.itemsize:
        return "definition"
    if plain:
        return "rows"
    operator = (
        compiled
        and input.dim() == 2
        and input.is_cpu
        and input.dtype in (torch.float32, torch.bfloat16)
        and target.dtype == torch.int64
        and input.numel() >= OPERATOR
        and not call.extended()
        and kernels.available()
    )
    return "operator" if operator else "definition"


# The definition: an ordinary loss of log p, right for every option and under every transform ------


def loss_by_definition(input: Tensor, call: Call) -> Tensor:
    if (call.maps_logits() or call.z_loss) and not is_plain(input):
        note_traced("softcap, logit_scale or z_loss")
    class_dim = 0 if input.dim() == 1 else 1
    # 16-bit logits are widened here, once: 1/N and the 1/C of smoothing then fit into
    # u = dL/dlog p, and p'/N is rounded to 16 bits only after multiplication by the loss scale.
    wide = torch.promote_types(input.dtype, torch.float32)
    z = mapped(input.to(wide), call)
    log_p = log_softmax(z, class_dim, alpha=call.alpha, dtype=wide)
    weight = None if call.weight is None else call.weight.to(wide)
    target, eps, ignore_index = call.target, call.label_smoothing, call.ignore_index
    if not (call.soft() or eps or call.extended()):
        return F.nll_loss(
            log_p, target, weight, ignore_index=ignore_index, reduction=call.reduction
        )
    weighted = log_p
    if weight is not None:
        weighted = log_p * weight.reshape(-1, *[1] * (log_p.dim() - class_dim - 1))
    if call.soft():
        losses = -(weighted * target.to(torch.promote_types(target.dtype, wide))).sum(class_dim)
        counted = torch.ones_like(losses, dtype=torch.bool)
    else:
        losses = F.nll_loss(log_p, target, weight, ignore_index=ignore_index, reduction="none")
        counted = target != ignore_index
    if eps:
        at_all = -weighted.sum(class_dim).masked_fill(~counted, 0)
        losses = (1 - eps) * losses + eps / z.shape[class_dim] * at_all
    further = _z_loss(z, class_dim, call).masked_fill(~counted, 0) if call.z_loss else None
    if call.reduction == "mean":
        count = mass = counted.sum().to(losses.dtype)
        if weight is not None and not call.soft():
            mass = weight[target.masked_fill(~counted, 0)].masked_fill(~counted, 0).sum()
        if call.zero_empty:
            mass, count = (n.masked_fill(count == 0, 1) for n in (mass, count))
        losses = losses / mass.masked_fill(mass == 0, math.nan)
        further = None if further is None else further / count
    losses = losses if further is None else losses + further
    if call.token_weight is not None:
        losses = losses * call.token_weight.to(wide)
    if call.reduction == "none":
        return losses
    empty = call.reduction == "mean" and not call.zero_empty and not losses.numel()
    return losses.sum() * math.nan if empty else losses.sum()


def _z_loss(z: Tensor, class_dim: int, call: Call) -> Tensor:
    """``lambda lse(z)^2``, plus 0 with the derivative of ``lambda lse(alpha z)^2 / alpha``."""
    if needs_operator():
        raise RuntimeError(
            "A z-loss with PowerGrad Transform cannot be exported with its gradient: export the "
            "model without its loss."
        )
    alpha: Any = call.alpha
    if isinstance(alpha, Tensor):
        alpha = check_alpha(alpha, z, class_dim).to(z.device, z.dtype)
    top = z.detach().amax(class_dim, keepdim=True)
    _, level = potential(z, alpha, class_dim)
    phi = alpha * (level + top).square()
    value = z.detach().logsumexp(class_dim, keepdim=True).square()
    return call.z_loss * (value + (phi - phi.detach())).squeeze(class_dim)


# Plain eager tensors: the gradient is computed with the value -------------------------------------


_DEFAULTS = tuple(Call._field_defaults.values())[1:-1]


def _is_common_case(input: Tensor, call: Call) -> bool:
    """Whether all arguments except the labels are known to be valid, as in most calls.

    The individual checks with their error messages take 5% of the time of a small loss.
    """
    target, alpha = call.target, call.alpha
    return (
        call.weight is None
        and call.token_weight is None
        and is_plain(input, target)  # TorchDynamo of PyTorch 2.6 takes no slice of a call
        and call[4:-1] == _DEFAULTS
        and type(alpha) is float
        and 0 <= alpha < 1
        and input.is_floating_point()
        and target.dtype == torch.int64
        and len(shape := input.shape) == 2
        and shape[1] > 0
        and target.dim() == 1
        and target.numel() == shape[0]
        and input.requires_grad
        and torch.is_grad_enabled()
        and input.is_cpu
        and not INTERPRETED
    )


def as_rows(input: Tensor, call: Call) -> tuple[Tensor, Call]:
    """Logits of any shape as rows (N, C), and the call for them."""
    if input.dim() == 2:
        return input, call
    class_dim = 0 if input.dim() == 1 else 1
    call = call_for_rows(input, call, class_dim)
    return input.movedim(class_dim, -1).unsqueeze(0).flatten(0, -2), call


def call_for_rows(logits: Tensor, call: Call, class_dim: int) -> Call:
    """The call for logits as rows, of which only the shape is needed."""
    target, alpha, tokens = call.target, call.alpha, call.token_weight
    if call.soft():
        target = target.movedim(class_dim, -1).unsqueeze(0).flatten(0, -2)
    else:
        target = target.flatten()
    if isinstance(alpha, Tensor) and alpha.dim():
        positions = logits.shape[:class_dim] + logits.shape[class_dim + 1 :]
        alpha = check_alpha(alpha, logits, class_dim).squeeze(class_dim).expand(positions).flatten()
    tokens = None if tokens is None else tokens.flatten()
    return call.replace(target=target, alpha=alpha, token_weight=tokens)


def _loss_of_kernels(
    input: Tensor, call: Call, class_dim: int, stats: bool = False
) -> tuple[Tensor, RowStatistics]:
    """The loss on a GPU, and its statistics; a gate is computed between the two kernels.

    Reductions are ordinary operations on one number per row. Statistics of ignored rows, which are
    not read, are 0. With class weights, a mean divides the z-loss by the number of counted rows.
    """
    shape = input.shape[:class_dim] + input.shape[class_dim + 1 :]
    logits, by_row = as_rows(input, call)
    divisor: Any = float(logits.shape[0])
    z_factor = None
    if call.reduction == "mean" and not call.soft():
        kept = by_row.target != call.ignore_index
        divisor = count = kept.sum()
        if call.weight is not None:
            divisor = (call.weight.float()[by_row.target.where(kept, 0)] * kept).sum()
            z_factor = divisor / count if call.z_loss else None
        if call.zero_empty:
            divisor = torch.where(count == 0, 1, divisor)
    elif call.zero_empty:
        divisor = divisor or 1.0
    tensors, options = gpu.arguments(by_row)
    losses, _, found = torch.ops.powergrad.row_losses(logits, *tensors, z_factor, *options, stats)
    losses, rows = losses.reshape(shape), RowStatistics(torch.empty(0), call)
    if stats:
        names = ("lse", "loss", "p_target", "entropy", "prediction")
        vars(rows).update(zip(names, found.reshape(5, *shape).unbind(), strict=True))
        vars(rows)["prediction"] = rows.prediction.long()
    if call.gate is not None:
        weights, tokens = gated(call.replace(token_weight=None), rows), call.token_weight
        losses = losses * weights
        call = call.replace(token_weight=weights if tokens is None else weights * tokens, gate=None)
    if stats:  # otherwise `loss_of` has told
        tell("powergrad.cross_entropy", input, call.alpha, call)
    if call.reduction == "none":
        return losses, rows
    return losses.sum() / divisor if call.reduction == "mean" else losses.sum(), rows


class Rows(torch.autograd.Function):
    """Computes the gradient in the forward pass, and multiplies it in the backward pass.

    A backward pass that is itself differentiated uses the definition.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, call: Call) -> Tensor:
        value, gradient = loss_and_gradient(input, call)
        tensors, ctx.options = call.split()
        ctx.save_for_backward(gradient, input, *tensors)
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor, owned: bool = True) -> tuple[Tensor, None]:
        grad, (gradient, logits, *tensors) = grads[0], ctx.saved_tensors
        if torch.is_grad_enabled():
            loss = loss_by_definition(logits, Call.joined(tensors, ctx.options))
            grad = grad.to(loss.dtype)
            return torch.autograd.grad(loss, logits, grad, create_graph=True)[0], None
        gradient = multiplied(gradient, grad, owned)
        return gradient if gradient.dtype == logits.dtype else gradient.to(logits.dtype), None


def multiplied(gradient: Tensor, grad: Tensor, owned: bool) -> Tensor:
    """The gradient times the incoming one; in its own memory, if no one else will read it."""
    in_place = owned and is_plain(grad) and not keeps_graph()
    if grad.dim():
        grad = grad.unsqueeze(1)
    elif in_place and grad.is_cpu and grad.item() == 1:
        return gradient
    return gradient.mul_(grad) if in_place else gradient * grad


# Without the Python layer for transforms, which takes 5% of the time of a small loss; `is_plain`.
_rows_loss = getattr(super(torch.autograd.Function, Rows), "apply", Rows.apply)


class CrossEntropyLoss(nn.CrossEntropyLoss):
    r"""``nn.CrossEntropyLoss`` with PowerGrad Transform, see :func:`cross_entropy`.

    ``loss.alpha`` may be changed between steps. A graph compiled by ``torch.compile`` uses the new
    value without recompilation.

    Args:
        alpha: As in :func:`cross_entropy`.
        weight: As in :func:`cross_entropy`; a buffer, as in PyTorch.
        **options: Those of :func:`cross_entropy`: ``ignore_index``, ``reduction``,
            ``label_smoothing``, ``softcap``, ``logit_scale``, ``z_loss``, ``gate`` and
            ``zero_empty``. ``token_weight`` is an argument of each call.

    Raises:
        ValueError: If ``alpha``, ``reduction`` or another option is out of range.

    Example:
        >>> criterion = CrossEntropyLoss(alpha=0.3, label_smoothing=0.1)
        >>> criterion(torch.zeros(4, 10), torch.arange(4))
        tensor(2.3026)
        >>> criterion.alpha = 0.5
    """

    def __init__(
        self, alpha: float | Tensor, weight: Tensor | None = None, **options: Unpack[LossOptions]
    ) -> None:
        call = Call(torch.empty(0), None, 1.0, **options)
        check_options(call)
        super().__init__(
            weight,
            ignore_index=call.ignore_index,
            reduction=call.reduction,
            label_smoothing=call.label_smoothing,
        )
        names = ("softcap", "logit_scale", "z_loss", "gate", "zero_empty")
        self.options: dict[str, Any] = {name: getattr(call, name) for name in names}
        self.alpha = alpha

    @property
    def alpha(self) -> float | Tensor:
        """The exponent; set it at any time."""
        return self._alpha

    @alpha.setter
    def alpha(self, value: float | Tensor) -> None:
        # In a compiled graph a number is a constant, and a tensor is an input. The tensor is not a
        # buffer, because `.half()` would round it and it would be saved in the state dict.
        self._alpha = value if isinstance(value, Tensor) else check_number(value)
        self._alpha_input = self._alpha
        if not isinstance(self._alpha, Tensor):
            self._alpha_input = torch.tensor(self._alpha, dtype=torch.float64, device="cpu")

    def forward(self, input: Tensor, target: Tensor, token_weight: Tensor | None = None) -> Tensor:
        """The loss of `input` for `target`, see :func:`cross_entropy`."""
        return cross_entropy(input, target, **self._arguments(token_weight))

    def _arguments(self, token_weight: Tensor | None) -> dict[str, Any]:
        return {
            "weight": self.weight,
            "alpha": self._alpha_input if torch.compiler.is_compiling() else self._alpha,
            "ignore_index": self.ignore_index,
            "reduction": self.reduction,
            "label_smoothing": self.label_smoothing,
            "token_weight": token_weight,
            **self.options,
        }

    def extra_repr(self) -> str:
        """Alpha, and the options that are used."""
        used = [f"alpha={self._alpha}"]
        used += [f"{k}={v}" for k, v in self.options.items() if v not in (None, 0.0, 1.0, False)]
        return ", ".join(used)


def binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    alpha: float | Tensor,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Tensor:
    r"""``F.binary_cross_entropy_with_logits`` with the gradient ``sigmoid(alpha * z) - y``.

    Each logit is a softmax over the two classes (z, 0): ``p = sigmoid(z)`` becomes
    ``p^alpha / (p^alpha + (1 - p)^alpha) = sigmoid(alpha * z)`` in the backward pass. With
    ``pos_weight`` w the gradient is ``(w * y + 1 - y) * sigmoid(alpha * z) - w * y``.

    Args:
        input: Logits, of any shape.
        target: Labels between 0 and 1, of the shape of ``input``.
        weight: Weights of the elements; broadcast over ``input``, as in PyTorch.
        alpha: A number, at least 0; or a tensor of them: 0-d, one per example, or one per element.
            The float 1.0 calls PyTorch's own function.
        reduction: "mean", "sum" or "none".
        pos_weight: Weights of the positive labels; broadcast over ``input``, as in PyTorch.

    Returns:
        The loss: 0-d, or of the shape of ``input`` for "none".

    Raises:
        ValueError: If a shape, range or option is not as described above.
        TypeError: If a dtype is not as described above.

    Example:
        >>> z = torch.tensor([4.0, -4.0], requires_grad=True)
        >>> y = torch.tensor([0.0, 0.0])
        >>> binary_cross_entropy_with_logits(z, y, alpha=0.5, reduction="sum").backward()
        >>> z.grad  # sigmoid(0.5 * z) - y
        tensor([0.8808, 0.1192])
    """
    check_floating(input, "input")
    check_floating(target, "target", input.shape)
    check_reduction(reduction)
    for name, factor in (("weight", weight), ("pos_weight", pos_weight)):
        if factor is not None:
            check_broadcasts(factor, input, name)
    exponent = check_alpha(alpha, input, None)
    tell("powergrad.binary_cross_entropy_with_logits", input, alpha)
    if is_one(alpha):
        return F.binary_cross_entropy_with_logits(
            input, target, weight, reduction=reduction, pos_weight=pos_weight
        )
    wide = torch.promote_types(input.dtype, torch.float32)
    logits, exponent = input.to(wide), exponent.to(wide)
    positive = target if pos_weight is None else target * pos_weight
    loss = -(
        positive * log_sigmoid(logits, exponent) + (1 - target) * log_sigmoid(-logits, exponent)
    )
    loss = loss if weight is None else loss * weight
    if reduction != "none":
        loss = loss.mean() if reduction == "mean" else loss.sum()
    if is_autocasting(input.device.type):
        return loss
    dtypes = (t.dtype for t in (target, weight, pos_weight) if t is not None)
    return loss.to(functools.reduce(torch.promote_types, dtypes, input.dtype))
