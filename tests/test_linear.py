"""`linear_cross_entropy`: gradients of head and hidden states, shapes, accuracy, precision."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from cases import build, forms
from hypothesis import given, settings
from hypothesis import strategies as st
from references import gradient_of_potential, mapped, plain_loss
from torch import Tensor

from powergrad import LinearCrossEntropyLoss, cross_entropy, kernels, linear_cross_entropy

# Relative to the largest entry. 16-bit logits are rounded once by either; a sum of rounded products
# differs by a few units in the last place.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 3e-6,
    torch.bfloat16: 4 * 2**-8,
    torch.float16: 4 * 2**-11,
}


def relative(actual: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """The largest error, relative to the largest entry, or to `least` where all are smaller."""
    largest = expected.double().abs().max().clamp(min=max(least, 1e-12))
    return ((actual.double() - expected.double()).abs().max() / largest).item()


@settings(max_examples=4 * settings().max_examples)
@given(
    form=forms().filter(lambda form: len(form.shape) == 2 and not form.masked),
    width=st.integers(1, 8),
    biased=st.booleans(),
    chunk_rows=st.sampled_from([None, 1, 3, 7]),
    native=st.booleans(),
)
def test_gradients_of_hidden_states_head_and_bias(device, form, width, biased, chunk_rows, native):
    example, dtype = build(form, device), form.dtype
    g = torch.Generator().manual_seed(form.seed)
    rows, classes = form.shape
    hidden, head, bias = (
        torch.randn(shape, generator=g, dtype=torch.float64).to(device, dtype)
        for shape in ((rows, width), (classes, width), (classes,))
    )
    leaves = [
        t.clone().requires_grad_() for t in ((hidden, head, bias) if biased else (hidden, head))
    ]
    options = {"linear_bias": leaves[2] if biased else None, **example.options, **example.extra}
    with nullcontext() if native else patch.object(kernels, "library", lambda: None):
        loss = linear_cross_entropy(
            leaves[0],
            leaves[1],
            example.target,
            alpha=example.alpha,
            chunk_rows=chunk_rows,
            **options,  # pyright: ignore[reportArgumentType]
        )
    actual = torch.autograd.grad(loss, leaves, example.upstream)

    # What the library multiplies for float16 is float32, so the reference is wide from the start.
    logits = F.linear(hidden.double(), head.double(), bias.double() if biased else None)
    options = {**example.options, "extra": example.extra}
    expected = plain_loss(mapped(logits, example.extra), example.target, **options)
    at_logits = gradient_of_potential(
        logits, example.target, example.alpha, example.upstream, **options
    )
    products = [at_logits @ head.double(), at_logits.T @ hidden.double(), at_logits.sum(0)]
    # Rounded logits: an error of 2^-9 in a logit of size |z| is as large in its probability.
    loose = 1 + (logits.abs().max().item() if dtype.itemsize < 4 else 0)
    assert loss.dtype == dtype
    assert torch.equal(loss.isnan(), expected.isnan())
    assert relative(loss.nan_to_num(), expected.nan_to_num(), least=1.0) <= TOLERANCE[dtype] * loose
    # The rows' gradients may cancel in the sum, and p' and q in a row.
    least = max(0.1, float(at_logits.abs().max()))
    for gradient, product, leaf in zip(actual, products, leaves, strict=False):
        assert gradient.dtype == dtype
        assert relative(gradient, product, least) <= TOLERANCE[dtype] * loose
        assert any(torch.equal(leaf, tensor) for tensor in (hidden, head, bias))  # as it was


def case(device, *leading: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(*leading, 6, generator=g, dtype=torch.float64).to(device)
    head = torch.randn(9, 6, generator=g, dtype=torch.float64).to(device)
    target = torch.randint(0, 9, leading, generator=g).to(device)
    return hidden.requires_grad_(), head.requires_grad_(), target


@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (0,)])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_leading_dimensions(device, leading, reduction):
    hidden, head, target = case(device, *leading)
    loss = linear_cross_entropy(hidden, head, target, alpha=0.3, reduction=reduction)
    assert isinstance(loss, Tensor)
    logits = F.linear(hidden, head).reshape(-1, 9)
    expected = cross_entropy(logits, target.reshape(-1), alpha=0.3, reduction=reduction)
    assert loss.shape == (() if reduction == "sum" else leading)
    assert torch.allclose(loss.reshape(expected.shape), expected)
    actual = torch.autograd.grad(loss.sum(), [hidden, head])
    for a, b in zip(actual, torch.autograd.grad(expected.sum(), [hidden, head]), strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivatives_and_frozen_parts(device, reduction):
    hidden, head, target = case(device, 7)

    def ours(h: Tensor, w: Tensor) -> Tensor:
        loss = linear_cross_entropy(h, w, target, alpha=0.3, reduction=reduction, chunk_rows=3)
        assert isinstance(loss, Tensor)
        return loss.square().sum()

    def reference(h: Tensor, w: Tensor) -> Tensor:
        loss = cross_entropy(F.linear(h, w), target, alpha=0.3, reduction=reduction)
        return loss.square().sum()

    expected = torch.autograd.grad(reference(hidden, head), [hidden, head])

    def second(function) -> Tensor:
        (g,) = torch.autograd.grad(function(hidden, head), hidden, create_graph=True)
        return torch.autograd.grad(g.square().sum(), head)[0]

    assert torch.allclose(second(ours), second(reference), rtol=1e-10, atol=1e-13)
    for frozen in (hidden, head):
        frozen.requires_grad_(False)
        other = head if frozen is hidden else hidden
        (actual,) = torch.autograd.grad(ours(hidden, head), other)
        assert torch.allclose(actual, expected[1 if frozen is hidden else 0], rtol=1e-12)
        frozen.requires_grad_(True)


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gates_and_statistics_are_those_of_the_logits(device, soft, reduction):
    hidden, head, target = case(device, 5, 8)
    target[:, ::3] = -100
    q = torch.randn(5, 8, 9, dtype=torch.float64, device=device).softmax(2) if soft else target
    flat = q.reshape(40, -1).squeeze(1)
    options: Any = {"alpha": 0.3, "softcap": 4.0, "z_loss": 0.1, "reduction": reduction}
    tokens = torch.rand(5, 8, device=device)
    results = []
    for function, shape in (
        (lambda **k: linear_cross_entropy(hidden, head, q, **k), (5, 8)),
        (lambda **k: linear_cross_entropy(hidden, head, q, chunk_rows=7, **k), (5, 8)),
        (lambda **k: cross_entropy(F.linear(hidden, head).reshape(40, 9), flat, **k), (40,)),
    ):
        loss, rows = function(
            **options,
            token_weight=tokens.reshape(shape),
            gate=lambda rows: (1 - rows.p_target) ** 2,
            return_stats=True,
        )
        gradients = torch.autograd.grad(loss.square().sum(), [hidden, head])
        results.append((loss, *gradients, *(getattr(rows, name) for name in rows.NAMES)))
    for result in results[:2]:
        for actual, expected in zip(result, results[2], strict=True):
            counts = actual.shape == (5, 8)
            expected = expected.reshape(actual.shape)
            if counts and not soft:  # ignored rows are not computed
                actual, expected = actual[target != -100], expected[target != -100]
            torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


def test_statistics_of_ignored_rows_are_zero(device):
    hidden, head, target = case(device, 3, 2)
    target.fill_(-100)
    _, rows = linear_cross_entropy(hidden, head, target, alpha=0.3, return_stats=True)
    for name in rows.NAMES:
        assert getattr(rows, name).shape == (3, 2)
        assert not getattr(rows, name).any()


def test_a_bias_may_depend_on_the_head(device):
    hidden, head, target = case(device, 7)
    expected, actual = (
        torch.autograd.grad(loss, head, create_graph=True)[0]
        for loss in (
            cross_entropy(F.linear(hidden, head, head.sum(1)), target, alpha=0.3),
            linear_cross_entropy(hidden, head, target, alpha=0.3, linear_bias=head.sum(1)),
        )
    )
    torch.testing.assert_close(actual, expected)


def test_shift_predicts_the_next_token(device):
    hidden, head, target = case(device, 3, 7)
    target[1, 4:] = -100
    tokens = torch.rand(3, 7, device=device)
    loss = linear_cross_entropy(hidden, head, target, alpha=0.3, shift=True, token_weight=tokens)
    logits = F.linear(hidden[:, :-1], head).reshape(18, 9)
    expected = cross_entropy(
        logits, target[:, 1:].reshape(18), alpha=0.3, token_weight=tokens[:, 1:].reshape(18)
    )
    torch.testing.assert_close(loss, expected)
    pairs = (torch.autograd.grad(value, [hidden, head]) for value in (loss, expected))
    torch.testing.assert_close(*pairs)
    with pytest.raises(ValueError, match="shift"):
        linear_cross_entropy(hidden[0, 0], head, target[0, 0], alpha=0.3, shift=True)


@pytest.mark.parametrize("soft", [False, True])
def test_constants_that_are_negated_lazily(device, soft):
    hidden, head, target = (t.detach() for t in case(device, 7))
    leaves = [hidden.float().requires_grad_(), head.float().requires_grad_()]
    weight, name = torch.rand(9, device=device), "target" if soft else "weight"
    target = torch.rand(7, 9, device=device).softmax(1) if soft else target
    constants = {"target": target, "weight": weight}
    results = []
    lazily = torch.complex(constants[name], -constants[name]).conj().imag
    for changes in ({}, {name: lazily}):
        loss = linear_cross_entropy(*leaves, alpha=0.3, **{**constants, **changes})
        results.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


def test_under_autocast(device):
    hidden, head, target = case(device, 64)
    hidden, head = hidden.detach().float(), head.detach().float().requires_grad_()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, head, target, alpha=0.3)
    assert isinstance(loss, Tensor)
    assert loss.dtype == torch.float32
    (actual,) = torch.autograd.grad(loss, head)
    (expected,) = torch.autograd.grad(
        cross_entropy(F.linear(hidden, head), target, alpha=0.3), head
    )
    assert actual.dtype == torch.float32
    assert relative(actual, expected) <= 0.02  # 8 bits in hidden states, weights and logits


def test_the_bias_of_a_rare_class_learns_under_autocast():
    """Its gradient is under what float16 can hold, before the loss scale has met it."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(8, 4, generator=generator)
    head = torch.randn(5000, 4, generator=generator)
    bias = torch.zeros(5000)
    bias[4000:] = -40
    target = torch.arange(8)
    actual = []
    for low in (torch.float16, None):
        leaf = bias.clone().requires_grad_()
        with torch.autocast("cpu", dtype=low or torch.float16, enabled=low is not None):
            loss = linear_cross_entropy(hidden, head, target, alpha=0.3, linear_bias=leaf)
        assert isinstance(loss, Tensor)
        actual += torch.autograd.grad(65536 * loss, leaf)
    assert (actual[0][4000:] > 0).all()
    assert relative(actual[0][4000:], actual[1][4000:]) < 2e-2  # the logits had 11 bits


def test_an_ignored_row_adds_nothing_where_class_0_is_masked():
    bias = torch.tensor([-torch.inf, 0.0, 1.0], dtype=torch.float64)
    hidden = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    head, target = torch.ones(3, 2, dtype=torch.float64), torch.tensor([1, -100, 2])
    loss = linear_cross_entropy(hidden, head, target, alpha=0.3, linear_bias=bias)
    torch.testing.assert_close(loss, F.cross_entropy(F.linear(hidden, head, bias), target))


def test_the_module_passes_every_option_on(device):
    """With the parameters of PyTorch's module; alpha may change."""
    hidden, _, target = case(device, 2, 5)
    target[0, 1] = 3
    weight, tokens = torch.rand(9).double().to(device), torch.rand(2, 5).double().to(device)
    options: Any = {
        "weight": weight, "ignore_index": 3, "reduction": "sum", "label_smoothing": 0.1,
        "softcap": 4.0, "logit_scale": 0.5, "z_loss": 0.1, "zero_empty": True, "shift": True,
        "gate": lambda rows: rows.p_target, "chunk_rows": 2,
    }  # fmt: skip
    module = LinearCrossEntropyLoss(
        6, 9, alpha=0.5, bias=True, device=device, dtype=torch.float64, **options
    )
    module.alpha = 0.3
    head = list(module.parameters())
    loss, rows = module(hidden, target, tokens, return_stats=True)
    expected = linear_cross_entropy(
        hidden, head[0], target, alpha=0.3, linear_bias=head[1], token_weight=tokens, **options
    )
    assert isinstance(expected, Tensor)
    assert torch.equal(loss, expected)
    assert rows.correct.shape == target.shape
    leaves = [hidden, *head]
    for a, b in zip(*(torch.autograd.grad(x, leaves) for x in (loss, expected)), strict=True):
        assert torch.equal(a, b)
    if hasattr(torch.nn, "LinearCrossEntropyLoss"):  # since 2.13
        theirs = torch.nn.LinearCrossEntropyLoss(6, 9, bias=True, weight=weight)
        assert set(theirs.state_dict()) == set(module.state_dict())
    assert "softcap=4.0" in repr(module)
    with pytest.raises(ValueError, match="`alpha`"):
        LinearCrossEntropyLoss(6, 9, alpha=-1.0)
