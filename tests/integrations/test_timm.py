"""PowerGrad around timm's losses, in its training task, with its mixup."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from references import gradient_of_potential, row_error
from torch import nn
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
LOSSES = {  # timm's loss, its target, and the options of ours
    "smoothing 0": (lambda: losses.LabelSmoothingCrossEntropy(0.0), LABELS, {}),
    "smoothing 0.1": (
        lambda: losses.LabelSmoothingCrossEntropy(0.1),
        LABELS,
        {"label_smoothing": 0.1},
    ),
    "smoothing 0.9": (
        lambda: losses.LabelSmoothingCrossEntropy(0.9),
        LABELS,
        {"label_smoothing": 0.9},
    ),
    "mixup": (losses.SoftTargetCrossEntropy, MIXED, {}),
}


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_timm_equals_ours(alpha, name):
    make, target, options = LOSSES[name]
    logits, loss = batch()[0], altered(make(), alpha)
    ours = gradient(loss, logits, target)
    expected = gradient(lambda z, y: cross_entropy(z, y, alpha=alpha, **options), logits, target)
    assert row_error(ours, expected, 1) < 1e-12
    if alpha:
        oracle = gradient_of_potential(logits, target, alpha, UPSTREAM, **options)
        assert row_error(ours, oracle, 1) < 1e-12
    torch.testing.assert_close(loss(logits, target), make()(logits, target))


def test_the_wrapped_loss_is_still_a_module():
    """What timm's training script does with it: ``loss_fn.to(device=device)``."""
    loss = altered(losses.LabelSmoothingCrossEntropy(0.1), 0.3).to(device="cpu")
    assert isinstance(loss, nn.Module)
    assert loss.smoothing == 0.1
    assert loss.state_dict() == {}


def test_binary_cross_entropy_is_not_altered():
    """timm's loss for --bce-loss is another one; the page says so."""
    logits, target = batch()
    plain = losses.BinaryCrossEntropy()
    wrapped = altered(losses.BinaryCrossEntropy(), 0.3)
    with pytest.warns(UserWarning, match=r"F\.binary_cross_entropy_with_logits"):
        actual = gradient(wrapped, logits, target)
    torch.testing.assert_close(actual, gradient(plain, logits, target))


@pytest.mark.parametrize("alpha", [0.05, 1.0])
def test_in_the_slot_of_its_training_task(alpha):
    task_type = getattr(pytest.importorskip("timm.task"), "ClassificationTask")  # noqa: B009
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=10, in_chans=1)
    ours, by_hand = copy.deepcopy(model), copy.deepcopy(model)
    images, labels = torch.randn(8, 1, 32, 32), torch.arange(8)
    task = task_type(ours, altered(losses.LabelSmoothingCrossEntropy(0.1), alpha))
    task(images, labels)["loss"].backward()
    cross_entropy(by_hand(images), labels, alpha=alpha, label_smoothing=0.1).backward()
    scale = max(p.grad.abs().max() for p in by_hand.parameters())
    for one, other in zip(ours.parameters(), by_hand.parameters(), strict=True):
        assert (one.grad - other.grad).abs().max() < 1e-6 * scale
