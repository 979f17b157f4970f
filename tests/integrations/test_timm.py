"""PowerGrad around timm's losses, in its training task, with its mixup."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import pytest
import torch
from references import row_error
from torchvision_shim import declare_torchvision_schemas

from powergrad import PowerGrad, cross_entropy

declare_torchvision_schemas()
timm = pytest.importorskip("timm", reason="needs timm: make test-integrations")
losses = importlib.import_module("timm.loss")
mixup_target = importlib.import_module("timm.data.mixup").mixup_target

UPSTREAM = torch.tensor(3.7, dtype=torch.float64)
ALPHAS = [0.0, 0.05, 0.3, 1.0]


def batch(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(8, 10, generator=generator, dtype=dtype)).requires_grad_()
    return logits, torch.randint(0, 10, (8,), generator=generator)


def altered(loss, alpha):
    """As docs/integrations.md does it."""
    loss.forward = PowerGrad(alpha)(loss.forward)
    return loss


def gradient(loss, logits, target):
    (result,) = torch.autograd.grad(UPSTREAM * loss(logits, target), logits)
    return result


LABELS = batch()[1]
MIXED = mixup_target(LABELS, 10, lam=0.3, smoothing=0.1).double()
# For each name: timm's loss, its target, and the options of ours.
LOSSES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    f"smoothing {eps}": (
        partial(losses.LabelSmoothingCrossEntropy, eps),
        LABELS,
        {"label_smoothing": eps},
    )
    for eps in (0.0, 0.1, 0.9)
}
LOSSES["mixup"] = (losses.SoftTargetCrossEntropy, MIXED, {})


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_timm_equals_ours(alpha, name):
    make, target, options = LOSSES[name]
    logits, loss = batch()[0], altered(make(), alpha)
    ours = gradient(loss, logits, target)
    expected = gradient(lambda z, y: cross_entropy(z, y, alpha=alpha, **options), logits, target)
    assert row_error(ours, expected, 1) < 1e-12
    torch.testing.assert_close(loss(logits, target), make()(logits, target))


def test_binary_cross_entropy_is_not_altered():
    """timm's loss for --bce-loss is another one; the page says so."""
    logits, target = batch()
    plain = losses.BinaryCrossEntropy()
    wrapped = altered(losses.BinaryCrossEntropy(), 0.3)
    with pytest.warns(UserWarning, match="altered no cross-entropy"):
        actual = gradient(wrapped, logits, target)
    torch.testing.assert_close(actual, gradient(plain, logits, target))
