"""Cross-entropy with PowerGrad Transform in its backward pass: `torch.nn.functional`'s, altered.

Everything here is an ordinary loss of the log-probabilities that `powergrad.log_softmax` returns.
That primitive alters the gradient, whatever is done with its output.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn._reduction import get_enum

from powergrad._check import (
    autocasting,
    check_alpha,
    check_broadcasts,
    check_cross_entropy,
    check_floating,
    check_number,
    check_reduction,
    check_smoothing,
    is_one,
    shape_of,
)
from powergrad.transform import LogSigmoid, log_softmax

__all__ = ["CrossEntropyLoss", "binary_cross_entropy_with_logits", "cross_entropy"]


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
        weight: One weight a class, of shape (C).
        alpha: A number in [0, 1]; or a tensor of them: 0-d, one an example (N), or one a position
            (N, d1, ..., dk). The float 1.0 calls PyTorch's own function.
        ignore_index: Class index whose positions count for nothing.
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
    class_dim = check_cross_entropy(input, target, weight, ignore_index, reduction, label_smoothing)
    check_alpha(alpha, input, class_dim)
    if is_one(alpha):
        return torch.ops.aten.cross_entropy_loss(
            input, target, weight, get_enum(reduction), ignore_index, label_smoothing
        )
    # 16-bit logits are widened here, once: 1/N and smoothing's 1/C then fit into u = dL/dlog p, and
    # p'/N is rounded to 16 bits only after the incoming loss scale has met it.
    wide = torch.promote_types(input.dtype, torch.float32)
    log_p = log_softmax(input, class_dim, alpha=alpha, dtype=wide)
    weight = None if weight is None else weight.to(wide)
    if target.is_floating_point():
        loss = _of_probabilities(log_p, target, weight, class_dim, reduction, label_smoothing)
        narrow = torch.promote_types(input.dtype, target.dtype)
    else:
        loss = _of_labels(
            log_p, target, weight, class_dim, ignore_index, reduction, label_smoothing
        )
        narrow = input.dtype
    return loss if autocasting(input) else loss.to(narrow)


def _of_labels(
    log_p: Tensor,
    target: Tensor,
    weight: Tensor | None,
    class_dim: int,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> Tensor:
    if label_smoothing == 0:
        return F.nll_loss(log_p, target, weight, ignore_index=ignore_index, reduction=reduction)
    ignored = target == ignore_index
    true = F.nll_loss(log_p, target, weight, ignore_index=ignore_index, reduction="none")
    every = -_weighted(log_p, weight, class_dim).sum(class_dim).masked_fill(ignored, 0)
    eps = label_smoothing
    loss = (1 - eps) * true + eps / log_p.shape[class_dim] * every
    if reduction != "mean":
        return loss if reduction == "none" else loss.sum()
    if weight is None:
        return loss.sum() / (~ignored).sum()
    label = target.long().masked_fill(ignored, 0)
    return loss.sum() / weight[label].masked_fill(ignored, 0).sum()


def _of_probabilities(
    log_p: Tensor,
    target: Tensor,
    weight: Tensor | None,
    class_dim: int,
    reduction: str,
    label_smoothing: float,
) -> Tensor:
    target = target.to(torch.promote_types(target.dtype, log_p.dtype))
    if label_smoothing > 0:
        target = target * (1 - label_smoothing) + label_smoothing / log_p.shape[class_dim]
    loss = -_weighted(log_p * target, weight, class_dim).sum(class_dim)
    return _reduce(loss, reduction)


def _weighted(values: Tensor, weight: Tensor | None, class_dim: int) -> Tensor:
    if weight is None:
        return values
    return values * weight.reshape(-1, *[1] * (values.dim() - class_dim - 1))


def _reduce(loss: Tensor, reduction: str) -> Tensor:
    return {"none": loss.clone, "sum": loss.sum, "mean": loss.mean}[reduction]()


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
        # A compiled graph takes a number as a constant, and a tensor as an input. The tensor is
        # neither a buffer (`.half()` would round it) nor saved (it is an option, as reduction is).
        self._alpha = value if isinstance(value, Tensor) else check_number(value)
        self._alpha_input = torch.as_tensor(self._alpha, dtype=torch.float64)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss of `input` against `target`, as :func:`cross_entropy` has it."""
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
        """What distinguishes this loss from PyTorch's."""
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
        alpha: A number in [0, 1]; or a tensor of them: 0-d, one an example, or one an element. The
            float 1.0 calls PyTorch's own function.
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
        positive * LogSigmoid.apply(logits, exponent)
        + (1 - target) * LogSigmoid.apply(-logits, exponent)
    )
    loss = _reduce(loss if weight is None else loss * weight, reduction)
    return loss if autocasting(input) else loss.to(input.dtype)
