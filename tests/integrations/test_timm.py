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


def in_context(loss, alpha):
    def inside(logits, target):
        with PowerGrad(alpha):
            return loss(logits, target)

    return inside


def its_forward(loss, alpha):
    loss.forward = PowerGrad(alpha)(loss.forward)
    return loss


WAYS = {"with": in_context, "decorated": lambda loss, a: PowerGrad(a)(loss), "forward": its_forward}


def gradient(loss, logits, target):
    (result,) = torch.autograd.grad(UPSTREAM * loss(logits, target), logits)
    return result


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_label_smoothing(way, alpha, smoothing):
    logits, target = batch()
    loss = WAYS[way](losses.LabelSmoothingCrossEntropy(smoothing), alpha)
    ours = gradient(loss, logits, target)
    options = {"label_smoothing": smoothing}
    expected = gradient(lambda z, y: cross_entropy(z, y, alpha=alpha, **options), logits, target)
    assert row_error(ours, expected, 1) < 1e-12
    if alpha:
        oracle = gradient_of_potential(logits, target, alpha, UPSTREAM, **options)
        assert row_error(ours, oracle, 1) < 1e-12
    torch.testing.assert_close(
        loss(logits, target), losses.LabelSmoothingCrossEntropy(smoothing)(logits, target)
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_soft_targets_of_mixup(way, alpha):
    logits, target = batch()
    mixed = mixup_target(target, 10, lam=0.3, smoothing=0.1).double()
    assert ((mixed > 0.2).sum(1) == 2).any()  # two classes at once
    loss = WAYS[way](losses.SoftTargetCrossEntropy(), alpha)
    ours = gradient(loss, logits, mixed)
    expected = gradient(lambda z, q: cross_entropy(z, q, alpha=alpha), logits, mixed)
    assert row_error(ours, expected, 1) < 1e-12
    if alpha:
        oracle = gradient_of_potential(logits, mixed, alpha, UPSTREAM)
        assert row_error(ours, oracle, 1) < 1e-12


def test_the_wrapped_loss_is_still_a_module():
    """What timm's training script does with it: ``loss_fn.to(device=device)``."""
    loss = its_forward(losses.LabelSmoothingCrossEntropy(0.1), 0.3).to(device="cpu")
    assert isinstance(loss, nn.Module)
    assert loss.smoothing == 0.1
    assert loss.state_dict() == {}


def test_binary_cross_entropy_is_not_altered():
    """timm's loss for --bce-loss is another one; the page says so."""
    logits, target = batch()
    plain = losses.BinaryCrossEntropy()
    wrapped = in_context(losses.BinaryCrossEntropy(), 0.3)
    named = r"F\.binary_cross_entropy_with_logits, which PowerGrad does not alter"
    with pytest.warns(UserWarning, match=named):
        actual = gradient(wrapped, logits, target)
    torch.testing.assert_close(actual, gradient(plain, logits, target))


@pytest.mark.parametrize("alpha", [0.05, 1.0])
def test_in_the_slot_of_its_training_task(alpha):
    task_type = getattr(pytest.importorskip("timm.task"), "ClassificationTask")  # noqa: B009
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=10, in_chans=1)
    ours, by_hand = copy.deepcopy(model), copy.deepcopy(model)
    images, labels = torch.randn(8, 1, 32, 32), torch.arange(8)
    task = task_type(ours, its_forward(losses.LabelSmoothingCrossEntropy(0.1), alpha))
    task(images, labels)["loss"].backward()
    cross_entropy(by_hand(images), labels, alpha=alpha, label_smoothing=0.1).backward()
    scale = max(p.grad.abs().max() for p in by_hand.parameters())
    for one, other in zip(ours.parameters(), by_hand.parameters(), strict=True):
        assert (one.grad - other.grad).abs().max() < 1e-6 * scale
