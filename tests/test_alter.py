"""`alter_gradient`: identity forward, any function backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from powergrad import alter_gradient, alter_output


def squash(grad: Tensor) -> Tensor:
    return grad / (1 + grad.abs())


def test_forward_is_identity_and_backward_is_the_function(device):
    x = torch.tensor([1.0, -2.0, 3.0], device=device, requires_grad=True)
    y = alter_gradient(x, squash)
    assert torch.equal(y, x)
    assert y is not x
    (grad,) = torch.autograd.grad(y, x, torch.tensor([4.0, -0.5, 0.0], device=device))
    assert grad.tolist() == pytest.approx([0.8, -1 / 3, 0.0])


def test_what_is_before_sees_the_altered_gradient_and_other_uses_do_not(device):
    w = torch.tensor([2.0], device=device, requires_grad=True)
    x = w.square()
    (3 * alter_gradient(x, lambda g: g * 10) + 5 * x).backward()
    assert w.grad == 35 * 4


def test_higher_derivatives_go_through_the_function(device):
    x = torch.tensor(0.7, dtype=torch.float64, device=device, requires_grad=True)
    (first,) = torch.autograd.grad(alter_gradient(x, squash) ** 3, x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    # first = g / (1 + g) with g = 3 x^2. Its own gradient, 6 x / (1 + g)^2, passes there as well.
    g = 3 * 0.7**2
    h = 6 * 0.7 / (1 + g) ** 2
    assert first.item() == pytest.approx(g / (1 + g), rel=1e-14)
    assert second.item() == pytest.approx(h / (1 + h), rel=1e-14)


@pytest.mark.parametrize(
    ("call", "error", "name"),
    [
        (lambda x: alter_gradient(x, 3), TypeError, "`fn`"),  # type: ignore
        (lambda x: alter_gradient(x.long(), squash), TypeError, "`tensor`"),
        (lambda x: alter_gradient(x, lambda g: None).sum().backward(), TypeError, "`fn`"),  # type: ignore
        (lambda x: alter_gradient(x, torch.sum).sum().backward(), ValueError, "`fn`"),
        (lambda x: alter_gradient(x, Tensor.double).sum().backward(), ValueError, "`fn`"),
        (lambda x: alter_output(nn.ReLU(), "fc", squash), ValueError, "`name` .*''.* 'fc'"),
        (lambda x: alter_output(nn.ReLU(), "", None), TypeError, "`fn`"),  # type: ignore
    ],
)
def test_a_bad_argument_is_named(call, error, name):
    with pytest.raises(error, match=name):
        call(torch.zeros(2, requires_grad=True))


def network(device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().to(device)


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def test_a_modules_output_by_name(device):
    """Type II: what is before the point changes, what is after it does not."""
    model, x = network(device), torch.randn(5, 3, dtype=torch.float64, device=device)
    plain = gradients(model, model(x).square().sum())
    with alter_output(model, "1", lambda g: 10 * g):
        loss = model(x).square().sum()
    altered = gradients(model, loss)  # after the block
    for before, after, factor in zip(plain, altered, [10, 10, 1, 1], strict=True):
        assert torch.allclose(factor * before, after, rtol=1e-13)
    assert torch.equal(gradients(model, model(x).square().sum())[0], plain[0])
    with alter_output(model, "", lambda g: -g):
        loss = model(x).square().sum()
    assert torch.allclose(gradients(model, loss)[3], -plain[3])


def test_it_is_removed_after_an_exception_and_by_hand(device):
    model, x = network(device), torch.ones(1, 3, dtype=torch.float64, device=device)
    with pytest.raises(ZeroDivisionError), alter_output(model, "1", torch.zeros_like):
        _ = 1 / 0
    assert gradients(model, model(x).sum())[0].any()
    handle = alter_output(model, "1", torch.zeros_like)
    assert not gradients(model, model(x).sum())[0].any()
    handle.remove()
    assert gradients(model, model(x).sum())[0].any()


def test_outputs_with_structure_and_nesting(device):
    class Two(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"a": (x, [2 * x]), "index": torch.arange(3), "none": None}

    x = torch.ones(2, device=device, requires_grad=True)
    module = Two()
    with alter_output(module, "", lambda g: g * 3), alter_output(module, "", lambda g: g + 1):
        out = module(x)
    (out["a"][0].sum() * 5 + out["a"][1][0].sum()).backward()
    assert x.grad is not None
    # The later hook is nearer to the loss: (g + 1) * 3.
    assert x.grad.tolist() == [(5 + 1) * 3 + 2 * (1 + 1) * 3] * 2
    assert out["none"] is None


def test_an_operation_in_place_may_follow_the_altered_module(device):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)).to(device)
    images = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(0)).to(device)
    plain = gradients(model, model(images).sum())
    with alter_output(model, "1", lambda grad: 2 * grad):
        altered = gradients(model, model(images).sum())
    torch.testing.assert_close(altered[2], 2 * plain[2])
