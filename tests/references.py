"""The reference of PGT's gradient, written another way than the library, and how errors are judged.

The library computes ``u - p' * sum(u)``. The reference is the gradient of PyTorch's own
cross-entropy at ``alpha z``, by autograd in float64: the gradient of the potential
``CE(alpha z, q) / alpha``. `literal_gradient` is the paper's equation in 80 digits.
"""

from __future__ import annotations

from typing import Any

import mpmath
import torch
import torch.nn.functional as F
from torch import Tensor


def plain_loss(
    logits: Tensor, target: Tensor, *, weight: Tensor | None = None, **options: Any
) -> Tensor:
    """PyTorch's cross-entropy in float64."""
    target = target.double() if target.is_floating_point() else target.long()
    weight = None if weight is None else weight.double()
    return F.cross_entropy(logits.double(), target, weight, **options)


def potential(logits: Tensor, target: Tensor, alpha: float | Tensor, **options: Any) -> Tensor:
    """The function of which PGT's gradient is the gradient, for alpha > 0, in float64.

    `alpha` is a number, or one per example, or one per position (the shape of `logits` without C).
    """
    losses = plain_loss(_scaled(logits, alpha), target, **{**options, "reduction": "none"})
    if isinstance(alpha, Tensor) and alpha.dim():
        alpha = alpha.double().reshape(alpha.shape + (1,) * (losses.dim() - alpha.dim()))
    losses = losses / alpha
    reduction = options.get("reduction", "mean")
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    if target.is_floating_point():
        return losses.mean()
    weight, ignored = options.get("weight"), target == options.get("ignore_index", -100)
    mass = torch.ones_like(losses) if weight is None else weight.double()[target * ~ignored]
    return losses.sum() / (mass * ~ignored).sum()


def gradient_of_potential(
    logits: Tensor, target: Tensor, alpha: float | Tensor, upstream: Tensor, **options: Any
) -> Tensor:
    """PGT's gradient at the logits, in float64, for every alpha from 0 up.

    Autograd forms ``p' - 1`` at the label and loses what is below 1e-16; for labels without
    smoothing that entry is taken as minus the sum of the others, because a row sums to 0.
    """
    leaf = _scaled(logits.detach(), alpha).requires_grad_()
    loss = plain_loss(leaf, target, **options)
    (gradient,) = torch.autograd.grad(loss, leaf, upstream.double())
    if not target.is_floating_point() and not options.get("label_smoothing"):
        dim = 0 if logits.dim() == 1 else 1
        label = target.long().clamp(0, logits.shape[dim] - 1).unsqueeze(dim)
        others = gradient.scatter(dim, label, 0.0).sum(dim, keepdim=True)
        gradient = gradient.scatter(dim, label, -others)
    return gradient


def _scaled(logits: Tensor, alpha: float | Tensor) -> Tensor:
    """``alpha (z - max z)``: alpha times a common offset of 1e4 would lose 1e-12."""
    logits = logits.double()
    dim = 0 if logits.dim() == 1 else 1
    if isinstance(alpha, Tensor) and alpha.dim():
        alpha = alpha.double().reshape(alpha.shape + (1,) * (logits.dim() - 1 - alpha.dim()))
        alpha = alpha.unsqueeze(dim)
    masked = logits == -torch.inf
    shifted = logits - logits.detach().amax(dim, keepdim=True)
    return (alpha * shifted).masked_fill(masked, -torch.inf)


def literal_gradient(logits: list[float], q: list[float], alpha: float) -> list[float]:
    """``p^alpha / sum(p^alpha) - q`` as the paper prints it.

    In 80 digits: where ``p'`` is nearly 1, ``p' - 1`` may be 1e-52, and is needed to 1e-12.
    """
    with mpmath.workdps(80):
        exps = [mpmath.exp(mpmath.mpf(z)) for z in logits]
        p = [e / mpmath.fsum(exps) for e in exps]
        powered = [x ** mpmath.mpf(alpha) for x in p]
        total = mpmath.fsum(powered)
        return [float(x / total - mpmath.mpf(y)) for x, y in zip(powered, q, strict=True)]


def row_error(
    gradient: Tensor, oracle: Tensor, class_dim: int, scale: Tensor | None = None
) -> float:
    """The largest error of `gradient`, relative to the largest entry of its row in `oracle`.

    `scale`, one per row, replaces that entry where it is larger. A row whose entries are all below
    1e-300 counts as 0.
    """
    if oracle.numel() == 0:
        return 0.0
    largest = oracle.abs().amax(class_dim, keepdim=True)
    if scale is not None:
        largest = torch.maximum(largest, scale)
    error = (gradient.double() - oracle).abs() / largest.clamp(min=1e-300)
    return float(error.max())
