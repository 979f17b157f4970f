"""Oracles, each written another way than the library: autograd, mpmath, and plain loops.

The library computes PGT's gradient as ``u - p' * sum(u)``. Here it is the gradient of the potential
``CE(alpha z, q) / alpha`` by PyTorch's own autograd in float64, or the literal equation of the
paper, ``p^alpha / sum(p^alpha) - q``, in 80 digits.
"""

from __future__ import annotations

import mpmath
import torch
import torch.nn.functional as F
from torch import Tensor


def potential(
    logits: Tensor,
    target: Tensor,
    alpha: float | Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """The function of which PGT's gradient is the gradient, for alpha > 0, in float64.

    `alpha` is a number, or one per example, or one per position (the shape of `logits` without C).
    """
    logits = logits.double()
    target = target.double() if target.is_floating_point() else target
    weight = None if weight is None else weight.double()
    class_dim = 0 if logits.dim() == 1 else 1
    # A common offset changes nothing, but alpha times 1e4 would lose 1e-12.
    logits = logits - logits.detach().amax(class_dim, keepdim=True)
    if isinstance(alpha, Tensor) and alpha.dim():
        alpha = alpha.double().reshape(alpha.shape + (1,) * (logits.dim() - 1 - alpha.dim()))
        inner = alpha.unsqueeze(class_dim)
    else:
        alpha = inner = float(alpha)
    losses = F.cross_entropy(
        inner * logits,
        target,
        weight,
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    losses = losses / alpha
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    if target.is_floating_point():
        return losses.mean()
    mass = torch.ones_like(losses) if weight is None else weight[target.clamp(min=0).long()]
    return losses.sum() / torch.where(target == ignore_index, 0.0, mass).sum()


def gradient_of_potential(
    logits: Tensor, target: Tensor, alpha: float | Tensor, upstream: Tensor, **options
) -> Tensor:
    """PGT's gradient at the logits, in float64, by autograd of the potential.

    Autograd forms ``p' - 1`` at the label and loses what is below 1e-16; for labels without
    smoothing that entry is taken as minus the sum of the others, because a row sums to 0.
    """
    leaf = logits.detach().double().requires_grad_()
    loss = potential(leaf, target, alpha, **options)
    (gradient,) = torch.autograd.grad(loss, leaf, upstream.double())
    if not target.is_floating_point() and not options.get("label_smoothing"):
        dim = 0 if logits.dim() == 1 else 1
        label = target.long().clamp(0, logits.shape[dim] - 1).unsqueeze(dim)
        others = gradient.scatter(dim, label, 0.0).sum(dim, keepdim=True)
        gradient = gradient.scatter(dim, label, -others)
    return gradient


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
