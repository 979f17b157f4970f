"""`alter_gradient`: identity forward, any function backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from powergrad import alter_gradient


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
    ],
)
def test_a_bad_argument_is_named(call, error, name):
    with pytest.raises(error, match=name):
        call(torch.zeros(2, requires_grad=True))


def test_in_a_forward_hook_what_is_before_the_module_changes(device):
    """Type II: what is after the point does not change. An operation in place may follow."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 1)
    model = nn.Sequential(*layers).double().to(device)
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64, device=device)

    def gradients() -> list[Tensor]:
        return list(torch.autograd.grad(model(x).square().sum(), list(model.parameters())))

    def altered(module: nn.Module, args: object, output: Tensor) -> Tensor:
        return alter_gradient(output, lambda grad: 10 * grad).clone()

    plain = gradients()
    with model[1].register_forward_hook(altered):
        changed = gradients()
    for before, after, factor in zip(plain, changed, [10] * 4 + [1] * 2, strict=True):
        torch.testing.assert_close(after, factor * before, rtol=1e-12, atol=1e-12)
