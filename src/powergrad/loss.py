"""Cross-entropy as in `torch.nn.functional`, with PowerGrad Transform in its backward pass.

Each loss here is an ordinary function of the log-probabilities of `powergrad.log_softmax`, the
primitive that alters the gradient. For rows of logits, a faster path computes the same result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powergrad import _native
from powergrad._check import (
    PLAIN,
    REDUCTIONS,
    Arguments,
    autocasting,
    check_alpha,
    check_broadcasts,
    check_cross_entropy,
    check_floating,
    check_labels,
    check_number,
    check_reduction,
    check_smoothing,
    is_batched,
    is_one,
    is_plain,
    shape_of,
    values_readable,
)
from powergrad._compat import direct_apply, in_transform
from powergrad._rows import loss_and_gradient, reduced
from powergrad.transform import log_sigmoid, log_softmax

__all__ = ["CrossEntropyLoss", "binary_cross_entropy_with_logits", "cross_entropy"]

SMALL = 1 << 18  # with fewer elements of logits, `nll_loss` checks the labels
OPERATOR = 1 << 16  # with at least this many elements, a compiled graph calls the C kernel


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    alpha: float | Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
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
        alpha: A number in [0, 1]; or a tensor of them: 0-d, one per example (N), or one per
            position (N, d1, ..., dk). The float 1.0 calls PyTorch's own function.
        ignore_index: Positions with this class index contribute to neither value nor gradient.
        reduction: "mean", "sum" or "none".
        label_smoothing: The probability mass that is spread evenly over all classes.

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
    return loss_of(input, (target, weight, alpha, ignore_index, label_smoothing, reduction))


def loss_of(input: Tensor, arguments: tuple[Any, ...]) -> Tensor:
    """:func:`cross_entropy` with `arguments` in the order of `Arguments`."""
    if _is_common_case(input, arguments):  # `Arguments` would take 1% of the time of a small loss
        return _fused_loss(input, arguments)
    class_dim, arguments = check_cross_entropy(input, arguments)
    target, weight, alpha, ignore_index, label_smoothing, reduction = arguments
    compute, one = by_primitive, is_one(alpha)
    if not one and _can_fuse(input, target, weight):
        if is_plain(input, target):
            compute = _fused_loss
        elif _has_operator(input, target):
            compute = _fused_operator
    if compute is not _fused_loss:
        check_labels(target, input.shape[class_dim], ignore_index)
    if one:
        return torch.ops.aten.cross_entropy_loss(
            input, target, weight, REDUCTIONS[reduction], ignore_index, label_smoothing
        )
    loss = compute(input, arguments)
    soft = target.is_floating_point()
    dtype = torch.promote_types(input.dtype, target.dtype) if soft else input.dtype
    return loss if loss.dtype == dtype or autocasting(input) else loss.to(dtype)


# The reference: an ordinary loss of log p, correct for every option and under every transform -----


def by_primitive(input: Tensor, arguments: Arguments) -> Tensor:
    class_dim = 0 if input.dim() == 1 else 1
    # 16-bit logits are widened here, once: 1/N and the 1/C of smoothing then fit into
    # u = dL/dlog p, and p'/N is rounded to 16 bits only after multiplication by the loss scale.
    wide = torch.promote_types(input.dtype, torch.float32)
    log_p = log_softmax(input, class_dim, alpha=arguments.alpha, dtype=wide)
    if arguments.weight is not None:
        arguments = arguments._replace(weight=arguments.weight.to(wide))
    soft = arguments.target.is_floating_point()
    return (_of_probabilities if soft else _of_labels)(log_p, class_dim, arguments)


def _of_labels(log_p: Tensor, class_dim: int, arguments: Arguments) -> Tensor:
    target, weight, _, ignore_index, eps, reduction = arguments
    if eps == 0:
        return F.nll_loss(log_p, target, weight, ignore_index=ignore_index, reduction=reduction)
    ignored = target == ignore_index
    at_label = F.nll_loss(log_p, target, weight, ignore_index=ignore_index, reduction="none")
    at_all = -_weighted(log_p, weight, class_dim).sum(class_dim).masked_fill(ignored, 0)
    loss = (1 - eps) * at_label + eps / log_p.shape[class_dim] * at_all
    if reduction != "mean":
        return reduced(loss, reduction)
    if weight is None:
        return loss.sum() / (~ignored).sum()
    label = target.masked_fill(ignored, 0)
    mass = weight[label].masked_fill(ignored, 0).sum()
    return loss.sum() / mass.masked_fill(mass == 0, torch.nan)


def _of_probabilities(log_p: Tensor, class_dim: int, arguments: Arguments) -> Tensor:
    target, weight, _, _, eps, reduction = arguments
    target = target.to(torch.promote_types(target.dtype, log_p.dtype))
    if eps > 0:
        target = target * (1 - eps) + eps / log_p.shape[class_dim]
    loss = -_weighted(log_p * target, weight, class_dim).sum(class_dim)
    return reduced(loss, reduction)


def _weighted(values: Tensor, weight: Tensor | None, class_dim: int) -> Tensor:
    if weight is None:
        return values
    return values * weight.reshape(-1, *[1] * (values.dim() - class_dim - 1))


# The fast path: in eager mode, for rows of logits, the gradient is computed with the value --------


def _is_common_case(input: Tensor, arguments: tuple[Any, ...]) -> bool:
    """Whether all arguments except the labels are known to be valid, as in most calls.

    The individual checks with their error messages take 5% of the time of a small loss.
    """
    target, weight, alpha, _, label_smoothing, reduction = arguments
    return (
        weight is None
        and type(alpha) is float
        and 0 <= alpha < 1
        and reduction == "mean"
        and label_smoothing == 0
        and is_plain(input, target)
        and input.dtype == torch.float32
        and target.dtype == torch.int64
        and len(shape := input.shape) == 2
        and shape[1] > 0
        and shape[:1] == target.shape
        and input.requires_grad
        and torch.is_grad_enabled()
    )


def _can_fuse(input: Tensor, target: Tensor, weight: Tensor | None) -> bool:
    """Whether `input` is rows of logits, and only they need a gradient."""
    if input.dim() != 2 or not (torch.is_grad_enabled() and input.requires_grad):
        return False
    wider = target.is_floating_point() and target.dtype.itemsize > input.dtype.itemsize
    return not (wider or target.requires_grad or (weight is not None and weight.requires_grad))


class _FusedLoss(torch.autograd.Function):
    """Computes the gradient in the forward pass, and scales it in the backward pass.

    The buffer from the C kernel or `powergrad._rows` is used once: a second backward pass through
    the same graph, or one that is itself differentiated, uses the primitive.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, arguments: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(input, *arguments[:2])
        factor = divisor = None
        native = _native.cross_entropy(input, *arguments)
        if native is not None:
            value, buffer = native
        else:
            value, buffer, factor, divisor = _loss_and_gradient(input, Arguments(*arguments))
        ctx.options = arguments[2:]
        ctx.gradient = buffer, factor, divisor, input.dtype
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,), once = grads, ctx.gradient
        ctx.gradient = None
        if once is None or torch.is_grad_enabled():
            return _gradient_by_primitive(ctx, grad), None
        gradient, factor, divisor, dtype = once
        scale = grad.unsqueeze(1) if grad.dim() else grad
        if divisor is not None:
            scale = scale / divisor
        if factor is not None:
            scale = scale * factor
        if is_batched(grad):  # no in-place operation takes a batch of gradients
            gradient = gradient * scale
        # `loss.backward()` passes in 1, which saves a pass over the gradient.
        elif scale.dim() or not values_readable(scale) or scale.item() != 1:
            gradient.mul_(scale)
        return gradient if gradient.dtype == dtype else gradient.to(dtype), None


_fused_loss: Callable[[Tensor, tuple[Any, ...]], Tensor] = direct_apply(_FusedLoss)  # if `is_plain`


def _loss_and_gradient(
    input: Tensor, arguments: Arguments
) -> tuple[Tensor, Tensor, Tensor | None, float | Tensor | None]:
    """Check the labels, then call `loss_and_gradient`."""
    target, ignore_index, classes = arguments.target, arguments.ignore_index, input.shape[1]
    # Checking the labels takes a tenth of the time of a small loss. For small inputs, `nll_loss`
    # detects invalid labels, and they are checked here only after that.
    plain = target.is_cpu and not target.is_floating_point() and arguments.label_smoothing == 0
    if plain and input.numel() < SMALL and not 0 <= ignore_index < classes:
        try:
            return loss_and_gradient(input, arguments, all_valid=True)
        except IndexError:
            pass
    all_valid = check_labels(target, classes, ignore_index)
    return loss_and_gradient(input, arguments, all_valid=all_valid)


def _gradient_by_primitive(ctx: Any, grad: Tensor) -> Tensor:
    logits, target, weight = ctx.saved_tensors
    differentiated = torch.is_grad_enabled()
    with torch.enable_grad():
        leaf = logits if differentiated else logits.detach().requires_grad_()
        loss = by_primitive(leaf, Arguments(target, weight, *ctx.options))
        return torch.autograd.grad(loss, leaf, grad, create_graph=differentiated)[0]


# The C kernel as an operator, under `torch.compile` ----------------------------------------------


def _has_operator(input: Tensor, target: Tensor) -> bool:
    """Whether the C kernel is faster in a compiled graph than operations that can be fused."""
    return (
        torch.compiler.is_compiling()
        and type(input) in PLAIN
        and input.is_cpu
        and input.dtype in (torch.float32, torch.bfloat16)
        and target.dtype == torch.int64
        and input.numel() >= OPERATOR
        and not torch.compiler.is_exporting()
        and not in_transform()
        and _native.available()
    )


def _fused_operator(input: Tensor, arguments: Arguments) -> Tensor:
    target, weight, alpha, *options = arguments
    exponent = check_alpha(alpha, input, 1)
    return torch.ops.powergrad.cross_entropy(input, target, weight, exponent, *options)[0]


def loss_and_scaled_gradient(input: Tensor, arguments: Arguments) -> tuple[Tensor, Tensor]:
    """The loss and its gradient, for inputs that the C kernel does not support."""
    value, gradient, factor, divisor = _loss_and_gradient(input, arguments)
    if factor is not None:
        gradient.mul_(factor)
    if divisor is not None:
        gradient.div_(divisor)
    # In float16 a small p' would underflow before it is multiplied by the loss scale.
    return value, gradient.to(torch.float32 if input.dtype == torch.float16 else input.dtype)


class CrossEntropyLoss(nn.CrossEntropyLoss):
    r"""``nn.CrossEntropyLoss`` with PowerGrad Transform, see :func:`cross_entropy`.

    ``loss.alpha`` may be changed between steps. A graph compiled by ``torch.compile`` uses the new
    value without recompilation.

    Args:
        alpha: As in :func:`cross_entropy`.
        weight: As in :func:`cross_entropy`; a buffer, as in PyTorch.
        ignore_index: As in :func:`cross_entropy`.
        reduction: As in :func:`cross_entropy`.
        label_smoothing: As in :func:`cross_entropy`.

    Raises:
        ValueError: If ``alpha``, ``reduction`` or ``label_smoothing`` is out of range.

    Example:
        >>> criterion = CrossEntropyLoss(alpha=0.3, label_smoothing=0.1)
        >>> criterion(torch.zeros(4, 10), torch.arange(4))
        tensor(2.3026)
        >>> criterion.alpha = 0.5
    """

    def __init__(
        self,
        alpha: float | Tensor,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        check_reduction(reduction)
        check_smoothing(label_smoothing)
        super().__init__(
            weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
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

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss of `input` for `target`, see :func:`cross_entropy`."""
        return cross_entropy(
            input,
            target,
            self.weight,
            alpha=self._alpha_input if torch.compiler.is_compiling() else self._alpha,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )

    def extra_repr(self) -> str:
        """The alpha of the loss."""
        return f"alpha={self._alpha}"


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
        alpha: A number in [0, 1]; or a tensor of them: 0-d, one per example, or one per element.
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
    check_floating(target, "target")
    check_reduction(reduction)
    if shape_of(target) != shape_of(input):
        raise ValueError(
            f"Expected `target` to have the shape of `input`, {shape_of(input)}, "
            f"but got {shape_of(target)}."
        )
    for name, factor in (("weight", weight), ("pos_weight", pos_weight)):
        check_broadcasts(factor, input, name)
    exponent = check_alpha(alpha, input, None)
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
    loss = reduced(loss if weight is None else loss * weight, reduction)
    if autocasting(input):
        return loss
    dtypes = (t.dtype for t in (target, weight, pos_weight) if t is not None)
    return loss.to(functools.reduce(torch.promote_types, dtypes, input.dtype))
