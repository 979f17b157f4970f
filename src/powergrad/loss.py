"""Cross-entropy as in `torch.nn.functional`, with PowerGrad Transform in its backward pass.

Each loss here is an ordinary function of the log-probabilities that `powergrad.log_softmax`
returns. That primitive alters the gradient. A faster path computes the same for rows of logits.
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

SMALL = 1 << 18  # elements of logits, below which labels are checked by `nll_loss`
OPERATOR = 1 << 16  # elements, from which a compiled graph calls the C kernel


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
    r"""``F.cross_entropy``, whose gradient at the logits is PowerGrad Transform's ``p' - q``.

    The value is ordinary cross-entropy. The gradient of example ``i`` is

        s_i * (sum(w * q) * p' - w * q),      p' = softmax(alpha * z),

    with class weights ``w``, targets ``q`` and ``s_i`` whatever the reduction, a loss scaler,
    gradient accumulation or data parallelism multiply in. For ``alpha > 0`` it is the gradient of
    ``cross_entropy(alpha * z, q) / alpha``, and so are second derivatives.

    Args:
        input: Logits, of shape (C), (N, C) or (N, C, d1, ..., dk).
        target: Class indices, of the shape of ``input`` without C; or class probabilities, of the
            shape of ``input``.
        weight: One weight per class, of shape (C).
        alpha: A number in [0, 1]; or a tensor of them: 0-d, one per example (N), or one per
            position (N, d1, ..., dk). The float 1.0 calls PyTorch's own function.
        ignore_index: Class index whose positions are left out of value and gradient.
        reduction: "mean", "sum" or "none".
        label_smoothing: The mass of the target that is spread evenly over all classes.

    Returns:
        The loss: 0-d, or for "none" of the shape of ``input`` without C.

    Raises:
        ValueError: If a shape, a range, a label or an option is not as above.
        TypeError: If a dtype is not as above.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0, -1.0]], requires_grad=True)
        >>> loss = cross_entropy(logits, torch.tensor([1]), alpha=0.25)
        >>> loss.backward()
        >>> logits.grad
        tensor([[ 0.4810, -0.7082,  0.2272]])
    """
    return loss_of(input, (target, weight, alpha, ignore_index, label_smoothing, reduction))


def loss_of(input: Tensor, arguments: tuple[Any, ...]) -> Tensor:
    """:func:`cross_entropy` of `arguments`, in the order of `Arguments`."""
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
    # 16-bit logits are widened here, once: 1/N and smoothing's 1/C then fit into u = dL/dlog p, and
    # p'/N is rounded to 16 bits only after it was multiplied by the loss scale.
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
    """Whether nothing but the labels is left to be checked, as in most calls.

    Checking one by one, with an error for each, takes 5% of the time of a small loss.
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
    """Whether `input` is rows of logits, and only their gradient is wanted."""
    if input.dim() != 2 or not (torch.is_grad_enabled() and input.requires_grad):
        return False
    wider = target.is_floating_point() and target.dtype.itemsize > input.dtype.itemsize
    return not (wider or target.requires_grad or (weight is not None and weight.requires_grad))


class _FusedLoss(torch.autograd.Function):
    """Computes the gradient in the forward pass, and scales it in the backward pass.

    In between, the gradient is as the C kernel or `powergrad._rows` return it. The buffer is used
    once: a second backward pass through the same graph, or one that is itself differentiated, goes
    through the primitive.
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
    """`loss_and_gradient`, after a check of the labels."""
    target, ignore_index, classes = arguments.target, arguments.ignore_index, input.shape[1]
    # Checking the labels takes a tenth of the time of a small loss. There, `nll_loss` finds labels
    # that are not classes, and only then are they checked here.
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


# Under `torch.compile`, the C kernel as an operator ----------------------------------------------


def _has_operator(input: Tensor, target: Tensor) -> bool:
    """Whether a compiled graph is faster with the C kernel than with operations it can fuse."""
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
    """The loss, and its gradient, where the C kernel does not serve `input`."""
    value, gradient, factor, divisor = _loss_and_gradient(input, arguments)
    if factor is not None:
        gradient.mul_(factor)
    if divisor is not None:
        gradient.div_(divisor)
    # float16 would lose a small p' before it is multiplied by a loss scale.
    return value, gradient.to(torch.float32 if input.dtype == torch.float16 else input.dtype)


class CrossEntropyLoss(nn.CrossEntropyLoss):
    r"""``nn.CrossEntropyLoss`` over :func:`cross_entropy`, with an `alpha` that may change.

    ``loss.alpha = 0.5`` between two steps takes effect at the next one, also in a graph made by
    ``torch.compile``, which is not compiled again.

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
        # buffer: `.half()` would round it, and an option need not be saved.
        self._alpha = value if isinstance(value, Tensor) else check_number(value)
        self._alpha_input = self._alpha
        if not isinstance(self._alpha, Tensor):
            self._alpha_input = torch.tensor(self._alpha, dtype=torch.float64, device="cpu")

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss of `input` against `target`, as :func:`cross_entropy` returns it."""
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
        """The option that PyTorch's loss does not have."""
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
    r"""``F.binary_cross_entropy_with_logits``, whose gradient is ``sigmoid(alpha * z) - y``.

    Each logit is a softmax over the two classes (z, 0): ``p = sigmoid(z)`` becomes
    ``p^alpha / (p^alpha + (1 - p)^alpha) = sigmoid(alpha * z)`` in the backward pass. With
    ``pos_weight`` w the gradient is ``(w * y + 1 - y) * sigmoid(alpha * z) - w * y``.

    Args:
        input: Logits, of any shape.
        target: Labels between 0 and 1, of the shape of ``input``.
        weight: A weight for each element; broadcasts over ``input``, as in PyTorch.
        alpha: A number in [0, 1]; or a tensor of them: 0-d, one per example, or one per element.
            The float 1.0 calls PyTorch's own function.
        reduction: "mean", "sum" or "none".
        pos_weight: A weight for the positive labels; broadcasts over ``input``, as in PyTorch.

    Returns:
        The loss: 0-d, or for "none" of the shape of ``input``.

    Raises:
        ValueError: If a shape, a range or an option is not as above.
        TypeError: If a dtype is not as above.

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
