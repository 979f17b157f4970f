"""`alter_gradient`: identity forward, any function backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from powergrad import alter_gradient, alter_output, cross_entropy


def squash(grad: Tensor) -> Tensor:
    return grad / (1 + grad.abs())


def test_forward_is_identity_and_backward_is_the_function(device):
    x = torch.tensor([1.0, -2.0, 3.0], device=device, requires_grad=True)
    y = alter_gradient(x, squash)
    assert torch.equal(y, x)
    assert y is not x
    (grad,) = torch.autograd.grad(y, x, torch.tensor([4.0, -0.5, 0.0], device=device))
    assert grad.tolist() == pytest.approx([0.8, -1 / 3, 0.0])


def test_other_uses_of_the_tensor_keep_their_gradient(device):
    x = torch.tensor([2.0], device=device, requires_grad=True)
    (3 * alter_gradient(x, lambda g: g * 10) + 5 * x).backward()
    assert x.grad == 35


def test_everything_before_sees_the_altered_gradient(device):
    w = torch.tensor([2.0], device=device, requires_grad=True)
    (alter_gradient(w.square(), lambda g: -g) * 3).backward()
    assert w.grad == -12


def test_higher_derivatives_go_through_the_function(device):
    x = torch.tensor(0.7, dtype=torch.float64, device=device, requires_grad=True)
    (first,) = torch.autograd.grad(alter_gradient(x, squash) ** 3, x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    # first = g / (1 + g) with g = 3 x^2. Its own gradient, 6 x / (1 + g)^2, passes there as well.
    g = 3 * 0.7**2
    h = 6 * 0.7 / (1 + g) ** 2
    assert first.item() == pytest.approx(g / (1 + g), rel=1e-14)
    assert second.item() == pytest.approx(h / (1 + h), rel=1e-14)


def test_pgt_is_one_alteration(device):
    """The paper's Type II at the logits, written with the labels that `cross_entropy` needs not."""
    z = torch.randn(4, 5, dtype=torch.float64, device=device, requires_grad=True)
    y = torch.tensor([0, 2, 4, 1], device=device)
    q = torch.nn.functional.one_hot(y, 5).double()
    flat = torch.softmax(0.3 * z.detach(), 1)
    altered = alter_gradient(z, lambda g: (flat - q) / 4 * 7)
    (actual,) = torch.autograd.grad(7 * torch.nn.functional.cross_entropy(altered, y), z)
    (expected,) = torch.autograd.grad(7 * cross_entropy(z, y, alpha=0.3), z)
    assert (actual - expected).abs().max() <= 1e-15


def test_transforms_and_compile(device):
    x = torch.randn(4, 3, dtype=torch.float64, device=device)

    def loss(x: Tensor) -> Tensor:
        return (alter_gradient(x, squash) ** 2).sum()

    expected = squash(2 * x)
    assert torch.allclose(torch.func.grad(loss)(x), expected)
    assert torch.allclose(torch.func.vmap(torch.func.grad(loss))(x), expected)
    leaf = x.clone().requires_grad_()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert torch.allclose(torch.autograd.grad(compiled(leaf), leaf)[0], expected)
    for reentrant in (True, False):
        leaf.grad = None
        value = checkpoint(loss, leaf, use_reentrant=reentrant)
        assert isinstance(value, Tensor)
        value.backward()
        assert leaf.grad is not None
        assert torch.allclose(leaf.grad, expected)


def test_bad_input_is_named():
    x = torch.zeros(2, requires_grad=True)
    with pytest.raises(TypeError, match="`fn` to be callable, but got int"):
        alter_gradient(x, 3)  # pyright: ignore
    with pytest.raises(TypeError, match="`tensor` to be a floating-point tensor"):
        alter_gradient(torch.zeros(2, dtype=torch.long), squash)
    for fn, error, message in [
        (lambda g: None, TypeError, "`fn` to return a tensor, but got NoneType"),
        (lambda g: g.sum(), ValueError, r"`fn` to return shape \(2,\) .* got \(\)"),
        (lambda g: g.double(), ValueError, "torch.float32, but got .* torch.float64"),
    ]:
        with pytest.raises(error, match=message):
            alter_gradient(x, fn).sum().backward()


# At a module's output -----------------------------------------------------------------------------


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
    handle = alter_output(model, "1", torch.zeros_like)
    assert gradients(model, model(x).sum())[0].abs().sum() == 0
    handle.remove()
    assert gradients(model, model(x).sum())[0].abs().sum() > 0


def test_outputs_with_structure_and_nesting(device):
    class Two(nn.Module):
        def forward(self, x: Tensor) -> dict:
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


def test_bad_names_are_named(device):
    model = network(device)
    with pytest.raises(
        ValueError, match=r"`name` to be a module .* got 'fc'; the modules are: '', '0'"
    ):
        alter_output(model, "fc", squash)
    with pytest.raises(TypeError, match="`fn` to be callable"):
        alter_output(model, "1", None)  # pyright: ignore


def test_an_operation_in_place_may_follow_the_altered_module(device):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)).to(device)
    images = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(0)).to(device)
    actual = []
    for factor in (1, 2):
        model.zero_grad()
        with alter_output(model, "1", lambda grad, factor=factor: grad * factor):
            model(images).sum().backward()
        (_, _, gain, _) = model.parameters()
        assert gain.grad is not None
        actual.append(gain.grad.clone())
    torch.testing.assert_close(actual[1], 2 * actual[0])
