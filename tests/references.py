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
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    extra: dict[str, Any] | None = None,
    offset: float | Tensor = 0.0,
    **options: Any,
) -> Tensor:
    """PyTorch's cross-entropy in float64, with the z-loss and the token weights of `extra`.

    `offset` was subtracted from the logits before, which matters to the z-loss alone.
    """
    target = target.double() if target.is_floating_point() else target.long()
    weight, logits = None if weight is None else weight.double(), logits.double()
    soft = target.is_floating_point()
    counted = torch.ones_like(target) if soft else target != options.get("ignore_index", -100)
    if not extra or not counted.any():
        return F.cross_entropy(logits, target, weight, **options)
    dim = 0 if logits.dim() == 1 else 1
    reduction = options.pop("reduction", "mean")
    losses = F.cross_entropy(logits, target, weight, **options, reduction="none")
    counted = torch.ones_like(losses).bool() if soft else counted
    lse = (logits + offset).logsumexp(dim)
    further = extra.get("z_loss", 0.0) * lse.square() * counted
    if reduction == "mean":
        hard_weights = weight is not None and not soft
        mass = weight[target * counted] * counted if hard_weights else counted  # pyright: ignore
        losses, further = losses / mass.sum(), further / counted.sum()
    losses = (losses + further) * extra.get("token_weight", torch.ones(())).double()
    return losses if reduction == "none" else losses.sum()


def mapped(logits: Tensor, extra: dict[str, Any]) -> Tensor:
    """Logits after scale and soft cap, in float64."""
    z = logits.double() * extra.get("logit_scale", 1.0)
    cap = extra.get("softcap")
    return z if cap is None else cap * torch.tanh(z / cap)


def potential(logits: Tensor, target: Tensor, alpha: float | Tensor, **options: Any) -> Tensor:
    """The function of which PGT's gradient is the gradient, for alpha > 0, in float64.

    `alpha` is a number, or one per example, or one per position (the shape of `logits` without C).
    """
    losses = plain_loss(scaled(logits, alpha), target, **{**options, "reduction": "none"})
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
    logits: Tensor,
    target: Tensor,
    alpha: float | Tensor,
    upstream: Tensor,
    *,
    extra: dict[str, Any] | None = None,
    **options: Any,
) -> Tensor:
    """PGT's gradient at the logits, in float64, for every alpha from 0 up.

    It is that of the plain loss at ``alpha z``, times the derivative of the map of the logits.
    Autograd forms ``p' - 1`` at the label and loses what is below 1e-16; for labels without
    smoothing that entry is taken as minus the sum of the others, because a row sums to 0.
    """
    extra = extra or {}
    x = logits.detach().double().requires_grad_()
    z = mapped(x, extra)
    leaf = scaled(z.detach(), alpha).requires_grad_()
    dim = 0 if logits.dim() == 1 else 1
    offset = by_position(alpha, z) * z.detach().amax(dim, keepdim=True)  # what `scaled` subtracted
    loss = plain_loss(leaf, target, extra=extra, offset=offset, **options)
    (gradient,) = torch.autograd.grad(loss, leaf, upstream.double())
    sums_to_0 = not (options.get("label_smoothing") or extra.get("z_loss"))
    if not target.is_floating_point() and sums_to_0:
        label = target.long().clamp(0, logits.shape[dim] - 1).unsqueeze(dim)
        others = gradient.scatter(dim, label, 0.0).sum(dim, keepdim=True)
        gradient = gradient.scatter(dim, label, -others)
    return torch.autograd.grad(z, x, gradient)[0]


def scaled(logits: Tensor, alpha: float | Tensor) -> Tensor:
    """``alpha (z - max z)``: alpha times a common offset of 1e4 would lose 1e-12."""
    logits = logits.double()
    dim = 0 if logits.dim() == 1 else 1
    alpha = by_position(alpha, logits)
    masked = logits == -torch.inf
    shifted = logits - logits.detach().amax(dim, keepdim=True)
    return (alpha * shifted).masked_fill(masked, -torch.inf)


def by_position(alpha: float | Tensor, logits: Tensor) -> float | Tensor:
    if not isinstance(alpha, Tensor) or not alpha.dim():
        return alpha
    alpha = alpha.double().reshape(alpha.shape + (1,) * (logits.dim() - 1 - alpha.dim()))
    return alpha.unsqueeze(0 if logits.dim() == 1 else 1)


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
