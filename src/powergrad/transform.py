r"""PowerGrad Transform (PGT): the paper's equations, and the primitive that implements them.

The paper changes one thing. In the backward pass of softmax cross-entropy, the predicted
probabilities ``p = softmax(z)`` are replaced by

    p' = p^alpha / sum(p^alpha),        0 <= alpha <= 1 (above 1, it is sharpened),

so that the gradient at the logits is ``p' - q`` instead of ``p - q``.

Two facts reduce this to a primitive. First, ``p^alpha / sum(p^alpha) = softmax(alpha * z)``, so
``p'`` is computed from the logits and never from a gradient. Second, cross-entropy is linear in
``log p``, so it is enough to change the backward of ``log_softmax``: for any loss of ``log p``,
with ``u = dL / dlog p``,

    ordinary      dL/dz = u - p  * sum(u)
    PGT           dL/dz = u - p' * sum(u)

No labels appear. Class weights, label smoothing, mixup targets, ignored positions, reductions and
loss scales are all contained in ``u``.

`definition` says this in ordinary operations, which every tracer, transform, checkpoint and
parallelism of PyTorch differentiates correctly. Everything else in the core computes the same
gradient faster, where nothing but ordinary autograd looks on.

Reference: Das, Mondal, Lall, Joshi, Dutta Roy, *Altering Backward Pass Gradients improves
Convergence*.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from powergrad.checks import (
    PLAIN,
    Call,
    check_alpha,
    check_dim,
    check_floating,
    check_number,
    check_probabilities,
    is_dtensor,
    is_plain,
    splits_classes,
)
from powergrad.compat import in_loss_parallel, in_transform, is_exporting

__all__ = ["log_softmax", "paper_smoothing", "power_transform", "stationary_threshold"]


# The paper's equations ---------------------------------------------------------------------------


def power_transform(p: Tensor, alpha: float | Tensor, dim: int = -1) -> Tensor:
    r"""Flatten a distribution: ``p' = p^alpha / sum(p^alpha)``, the paper's equation 1.

    At ``alpha=1`` the distribution is unchanged; at ``alpha=0`` it is uniform. A probability of 0
    stays 0 for ``alpha > 0`` and becomes ``1/C`` at ``alpha=0``, as in the paper.

    Args:
        p: Probabilities; each slice along ``dim`` sums to 1.
        alpha: A number, at least 0; or a tensor of them, 0-d, of the shape of ``p`` without
            ``dim``, or one per example (the first dimension of ``p``).
        dim: The class dimension.

    Returns:
        The transformed probabilities, of the shape and dtype of ``p``.

    Raises:
        ValueError: If ``alpha`` is negative or has another shape, or ``p`` is negative.
        TypeError: If ``p`` is not a floating-point tensor.

    Example:
        >>> p = torch.tensor([0.81, 0.16, 0.03])
        >>> power_transform(p, 0.5)
        tensor([0.6109, 0.2715, 0.1176])
    """
    dim = check_dim(check_probabilities(p, "p"), dim, "p")
    wide = p.to(torch.promote_types(p.dtype, torch.float32))  # float16 overflows at 65,504 classes
    powered = wide ** check_alpha(alpha, p, dim).to(p.device)
    return (powered / powered.sum(dim, keepdim=True)).to(p.dtype)


def stationary_threshold(p: Tensor, alpha: float | Tensor, dim: int = -1) -> Tensor:
    r"""The probability that the transform leaves unchanged: ``(sum p^alpha)^(1 / (alpha - 1))``.

    Probabilities above it decrease, those below it increase (the paper's lemma 1). It equals
    ``exp(-H_alpha)``, where ``H_alpha`` is the Renyi entropy of order alpha. So it is ``1/C`` at
    ``alpha=0`` and tends to ``exp(-H)``, with the Shannon entropy ``H``, as alpha tends to 1.

    Args:
        p: Probabilities; each slice along ``dim`` sums to 1.
        alpha: As in :func:`power_transform`.
        dim: The class dimension.

    Returns:
        One threshold per distribution: the shape of ``p`` without ``dim``.

    Raises:
        ValueError: If ``alpha`` is negative or has another shape, or ``p`` is negative.
        TypeError: If ``p`` is not a floating-point tensor.

    Example:
        >>> p = torch.tensor([0.81, 0.16, 0.03])
        >>> stationary_threshold(p, 0.5)
        tensor(0.4608)
    """
    dim = check_dim(check_probabilities(p, "p"), dim, "p")
    alpha = check_alpha(alpha, p, dim).to(p.device, torch.float64)
    wide = p.double()
    # log sum p^alpha = log(1 + sum(p^alpha - p)) stays accurate as alpha tends to 1 if each
    # difference p^alpha - p = p * expm1((alpha - 1) log p) is computed without cancellation.
    exponent = (alpha - 1) * wide.log()
    small = exponent.abs() < 1
    excess = torch.where(
        small, wide * torch.where(small, exponent, 0).expm1(), wide**alpha - wide
    ).sum(dim, keepdim=True)
    shannon = torch.special.entr(wide).sum(dim, keepdim=True)
    at_one = alpha == 1
    renyi = torch.where(at_one, shannon, excess.log1p() / torch.where(at_one, 1, 1 - alpha))
    return renyi.neg().exp().squeeze(dim).to(p.dtype)


def paper_smoothing(eps: float, num_classes: int) -> float:
    r"""The ``label_smoothing`` for PyTorch that equals the paper's ``eps``: ``eps * K / (K - 1)``.

    The paper gives the true class ``1 - eps`` and each of the ``K - 1`` others ``eps / (K - 1)``.
    PyTorch spreads its ``label_smoothing`` over all ``K`` classes, including the true one.

    Args:
        eps: The paper's smoothing, the probability mass of the other classes, in [0, (K - 1) / K].
        num_classes: ``K``, at least 2.

    Returns:
        The value to pass as ``label_smoothing``.

    Raises:
        ValueError: If ``num_classes`` is below 2 or ``eps`` is out of range.

    Example:
        >>> round(paper_smoothing(0.1, 10), 6)
        0.111111
    """
    if num_classes < 2:
        raise ValueError(f"Expected `num_classes` to be at least 2, but got {num_classes}.")
    most = (num_classes - 1) / num_classes
    if not 0 <= eps <= most:
        raise ValueError(f"Expected `eps` to be in [0, {most:g}], but got {eps}.")
    return eps * num_classes / (num_classes - 1)


# What the losses tell `powergrad.verify` and `PowerGrad` -----------------------------------------


class Notice(NamedTuple):
    """A call of a loss: its logits, or the hidden states if it has the `weight` of the head."""

    name: str
    input: Tensor
    alpha: float | Tensor
    call: Call | None = None
    weight: Tensor | None = None

    @property
    def rows(self) -> int:
        """The number of rows, of logits or hidden states with the classes in dimension 1."""
        return self.input.numel() // max(1, self.input.shape[1 if self.weight is None else -1])

    @property
    def special(self) -> bool:
        """Whether its gradient is not ``m (p' - q)`` of all classes, one alpha for all rows."""
        call, per_row = self.call, isinstance(self.alpha, Tensor) and self.alpha.numel() > 1
        maps = call is not None and (call.maps_logits() or call.z_loss > 0)
        return maps or per_row or "binary" in self.name or "parallel" in self.name


LISTENERS: list[Callable[[Notice], None]] = []
# How `powergrad.parallel` computes losses of DTensors whose classes are split, by function.
OF_DTENSORS: dict[str, Callable[..., Any]] = {}
TRACED: set[str] = set()  # options that traced programs may use, which do not say so when they run


def note_traced(option: str) -> None:
    """Remember that a program with `option` was traced."""
    TRACED.add(option)


# TorchDynamo calls it while it traces, see `compat`.
note_traced._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def tell(*notice: Any) -> None:
    """Tell the listeners of an eager call, in the thread of the call."""
    if not torch.compiler.is_compiling():
        for listener in tuple(LISTENERS):
            listener(Notice(*notice))


# The primitive -----------------------------------------------------------------------------------


TINY = 1e-30


def log_softmax(
    input: Tensor,
    dim: int = -1,
    *,
    alpha: float | Tensor,
    dtype: torch.dtype | None = None,
) -> Tensor:
    r"""``torch.log_softmax`` with the backward pass of PowerGrad Transform.

    The value is ``log p``. For ``u = dL / dlog p``, the gradient is ``u - p' * sum(u)`` with
    ``p' = softmax(alpha * z)``; the ordinary gradient has ``p`` instead of ``p'``.

    Args:
        input: Logits, of any shape.
        dim: The class dimension.
        alpha: A number, at least 0; or a tensor of them, 0-d, of the shape of ``input`` without
            ``dim``, or one per example (the first dimension of ``input``). The float 1.0 calls
            PyTorch's own function.
        dtype: Cast ``input`` to this dtype first, as in ``torch.log_softmax``.

    Returns:
        Log-probabilities, of the shape of ``input``.

    Raises:
        ValueError: If ``alpha`` is negative or has another shape.
        TypeError: If ``input`` is not a floating-point tensor.

    Example:
        >>> z = torch.tensor([2.0, 0.0, -1.0], requires_grad=True)
        >>> log_p = log_softmax(z, alpha=0.25)
        >>> (-log_p[0]).backward()
        >>> z.grad  # softmax(0.25 * z) - [1, 0, 0]
        tensor([-0.5190,  0.2918,  0.2272])
    """
    dim = check_dim(check_floating(input, "input"), dim, "input")
    tell("powergrad.log_softmax", input, alpha)
    if not isinstance(alpha, Tensor):
        alpha = check_number(alpha)
        if alpha == 1:
            return plain_log_softmax(input, dim, dtype)
    exponent = check_alpha(alpha, input, dim)
    if type(input) not in PLAIN and in_loss_parallel():
        raise RuntimeError(
            "Expected `input` to be used outside `loss_parallel()`, but got a "
            f"{type(input).__name__} inside it, where PyTorch itself computes the gradient of the "
            "logits of `F.nll_loss`, without PowerGrad Transform. Call it outside "
            "`loss_parallel()`; or call `powergrad.cross_entropy`, which may be inside if it is "
            "not compiled."
        )
    if splits_classes(input, dim):
        return OF_DTENSORS["log_softmax"](input, exponent, dim, dtype)
    if is_plain(input):
        return LogSoftmax.apply(input, exponent, dim, dtype)
    if needs_operator():
        return torch.ops.powergrad.log_softmax(input, exponent, dim, dtype)
    return definition(input, alpha if isinstance(alpha, float) else exponent, dim, dtype)


def definition(
    input: Tensor, alpha: float | Tensor, dim: int, dtype: torch.dtype | None = None
) -> Tensor:
    r"""``log p``, plus a term that is always 0 and has the derivative of the potential.

    The potential is ``s = z - logsumexp(alpha * z) / alpha``. Its derivative in a direction t is
    ``t - sum(p' * t)``, the transpose of PGT's backward. At alpha 0, the logsumexp is replaced by
    its limit, the mean of ``z`` over the classes that are not masked.
    """
    log_p = plain_log_softmax(input, dim, dtype).detach()
    shifted, level = potential(
        input.to(torch.promote_types(log_p.dtype, torch.float32)), alpha, dim
    )
    s = shifted - level
    return log_p + (s - s.detach()).to(log_p.dtype)


def potential(z: Tensor, alpha: float | Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """``z - max z`` and ``logsumexp(alpha * (z - max z)) / alpha``, the maximum being constant.

    The maximum is subtracted first, because ``alpha * z`` would lose precision for logits with a
    large common offset. A class at ``-inf`` is masked: it has no part in the sum, also at alpha 0
    (where ``0 * -inf`` would be NaN). An alpha below `TINY` counts as 0: 1 / alpha would overflow.
    """
    shifted = z - z.detach().amax(dim, keepdim=True)
    masked = shifted == -torch.inf
    shifted = shifted.masked_fill(masked, 0)  # -inf - -inf is NaN

    def mean() -> Tensor:
        return shifted.sum(dim, keepdim=True) / (~masked).sum(dim, keepdim=True)

    def level(alpha: float | Tensor) -> Tensor:
        scaled = (alpha * shifted).masked_fill(masked, -torch.inf)
        return scaled.logsumexp(dim, keepdim=True) / alpha

    if not isinstance(alpha, Tensor):
        return shifted, level(alpha) if alpha > TINY else mean()
    alpha = alpha.to(z.device, z.dtype)
    positive = alpha > TINY
    return shifted, torch.where(positive, level(alpha.where(positive, 1)), mean())


def needs_operator() -> bool:
    """Whether the caller may be exported: decompositions remove the `detach` of the definition."""
    return is_exporting() is not False and not in_transform()


# An active `PowerGrad` does not alter this operator, unlike `torch.log_softmax`.
plain_log_softmax = torch.ops.aten.log_softmax.int


def altered_backward(
    u: Tensor, scores: Tensor, alpha: Tensor, dim: int, dtype: torch.dtype
) -> Tensor:
    """``u - p' * sum(u)`` in `dtype`; `scores` is ``z`` or ``log p``."""
    if u.numel() == 0:
        return torch.empty_like(u, dtype=dtype)
    # As in `potential`. `torch.softmax` would sum term by term: an error of 1e-6 for 1000 classes.
    wide = torch.promote_types(scores.dtype, torch.float32)
    u, shifted = u.to(wide), scores.to(wide) - scores.detach().to(wide).amax(dim, keepdim=True)
    exps = (alpha * shifted).masked_fill(shifted == -torch.inf, -torch.inf).to(wide).exp()
    p = exps / exps.sum(dim, keepdim=True)
    grad = u - p * u.sum(dim, keepdim=True)
    # At the most likely class p' may round to 1, and u - p' u to 0. There, 1 - p' is computed as
    # the sum of the other classes' p', and sum(u) - u as the sum of their u.
    top = scores.argmax(dim, keepdim=True)

    def put(x: Tensor, value: Any) -> Tensor:
        """`x` with another value at the most likely class."""
        if type(x) in PLAIN or is_dtensor(x):
            return x.scatter(dim, top, value)
        # Traced. Inductor of PyTorch 2.10 may write what is scattered into `x` itself.
        shape = [-1 if i == dim else 1 for i in range(x.dim())]
        is_top = torch.arange(x.shape[dim], device=x.device).reshape(shape) == top
        return torch.where(is_top, value, x)

    others_p, others_u = (put(x, 0.0).sum(dim, keepdim=True) for x in (p, u))
    at_top = u.gather(dim, top) * others_p - p.gather(dim, top) * others_u
    return put(grad, at_top).to(dtype)


class LogSoftmax(torch.autograd.Function):
    """The definition for plain eager tensors, and the operator: precise where p' rounds to 1."""

    @staticmethod
    def forward(input: Tensor, alpha: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        return plain_log_softmax(input, dim, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        z, alpha, ctx.dim, _ = inputs
        ctx.input_dtype = z.dtype
        # softmax(alpha * z) = softmax(alpha * log p), and log p is in memory anyway. In 16 bits,
        # however, its rounding, unlike that of z, would change the gradient by 6%.
        ctx.save_for_backward(output if output.dtype.itemsize >= 4 else z, alpha)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scores, alpha = ctx.saved_tensors
        return altered_backward(grads[0], scores, alpha, ctx.dim, ctx.input_dtype), *[None] * 3


# Two classes -------------------------------------------------------------------------------------


def log_sigmoid(input: Tensor, alpha: Tensor) -> Tensor:
    """``log sigmoid(z)``, the log-softmax of (z, 0), with backward ``u * sigmoid(-alpha z)``.

    `alpha` broadcasts over `input`.
    """
    if needs_operator():
        # Along the first dimension: along the last, inductor of PyTorch 2.6 to 2.9 gets it wrong.
        two = torch.stack([input, torch.zeros_like(input)])
        return torch.ops.powergrad.log_softmax(two, alpha, 0, None).select(0, 0)
    positive = alpha > TINY
    nonzero = alpha.where(positive, 1)
    # Not `logsigmoid`, whose backward DTensor does not know. Above 40, 1 + e^x is e^x.
    s = torch.where(positive, -softplus(-nonzero * input, 1, 40) / nonzero, input / 2)
    return -softplus(-input, 1, 40).detach() + (s - s.detach())
