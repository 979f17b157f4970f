"""The losses of a recipe: the paper's equation, and the hook that the authors published.

The authors' hook is here only to reproduce their runs. It recomputes the probabilities from the
gradient at the logits, and divides that gradient by the batch size where it should multiply. It is
correct only if the loss scale is the square of the rows per device, and in float16 it treats small
probabilities as 0 (see docs/audit.md). So it makes sense only with ``train.precision: float16``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import powergrad
from powergrad.lab.trainer.recipe import Loss


def training_loss(config: Loss, num_classes: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of a recipe, as a function of logits and labels."""
    smoothing = config.label_smoothing
    if config.smoothing == "paper":
        smoothing = float(powergrad.paper_smoothing(smoothing, num_classes))
    scale = config.logit_scale
    options: dict[str, Any] = {"alpha": config.alpha, "label_smoothing": smoothing}

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        if config.form == "as_published":
            return as_published_cross_entropy(logits, labels, **options)
        return powergrad.cross_entropy(logits if scale == 1 else logits * scale, labels, **options)

    return loss


def published_hook(grad: Tensor, targets: Tensor, alpha: float) -> Tensor:
    """The authors' hook, operation for operation."""
    rows = grad.shape[0]
    pred = (grad / rows + targets) ** alpha
    pred = pred / pred.sum(-1, keepdim=True)
    return (pred - targets) * rows


def as_published_cross_entropy(
    logits: Tensor, labels: Tensor, *, alpha: float, label_smoothing: float = 0.0
) -> Tensor:
    """Mean cross-entropy with the authors' hook on its gradient.

    As in the authors' code, the hook sees the gradient including the factors of a loss scaler and
    of gradient accumulation. 16-bit logits are widened for the loss, as autocast does on CUDA, so
    the gradient is rounded to 16 bits just before the hook.

    References:
        https://github.com/bishshoy/power-grad-transform, timm/models/resnet.py at f3f0983.
    """
    if not 0 < alpha <= 1:
        raise ValueError(f"Expected `alpha` to be above 0 and at most 1, but got {alpha}.")
    if labels.dim() != 1 or labels.is_floating_point():
        raise ValueError(
            "Expected `labels` to be class indices of shape (rows,), the only labels that the "
            f"authors' hook supports, but got {labels.dtype} of shape {tuple(labels.shape)}."
        )
    if alpha < 1 and logits.requires_grad:
        classes = logits.shape[-1]

        def hook(grad: Tensor) -> Tensor:
            one_hot = F.one_hot(labels, classes).to(grad.dtype)
            targets = (1 - label_smoothing) * one_hot + label_smoothing / classes
            return published_hook(grad, targets, alpha)

        logits = logits.view_as(logits)  # does not register the hook on the caller's tensor
        logits.register_hook(hook)
    with torch.autocast(logits.device.type, enabled=False):
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(wide, labels, label_smoothing=label_smoothing)
