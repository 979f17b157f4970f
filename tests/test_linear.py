"""`linear_cross_entropy` against linear + cross_entropy, in every combination of options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from powergrad import cross_entropy, linear_cross_entropy

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
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 20),
    width=st.integers(1, 8),
    classes=st.integers(1, 30),
    dtype=st.sampled_from(list(TOLERANCE)),
    soft=st.booleans(),
    biased=st.booleans(),
    weighted=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.1]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    chunk_rows=st.sampled_from([None, 1, 3, 7]),
    form=st.sampled_from(["number", "one", "zero", "0-d", "row"]),
)
def test_every_combination(
    device,
    seed,
    rows,
    width,
    classes,
    dtype,
    soft,
    biased,
    weighted,
    smoothing,
    reduction,
    chunk_rows,
    form,
):
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(device, dtype)

    hidden, head, bias = randn(rows, width), randn(classes, width), randn(classes)
    target: Tensor = randn(rows, classes).softmax(1)
    options: dict[str, Any] = {"label_smoothing": smoothing, "reduction": reduction}
    if weighted:
        options["weight"] = randn(classes).abs() + 0.1
    if not soft:
        target = torch.randint(0, classes, (rows,), generator=g).to(device)
        target[torch.rand(rows, generator=g) < 0.3] = -1
        target[0] = 0
        options["ignore_index"] = -1
    alpha: float | Tensor = {"number": 0.3, "one": 1.0, "zero": 0.0}.get(form, 0.0)
    if form in ("0-d", "row"):
        alpha = torch.rand(() if form == "0-d" else (rows,), generator=g).to(device)

    # What the library multiplies for float16 is float32, so the oracle is wide from the start.
    wide = [t.clone().double().requires_grad_() for t in (hidden, head, bias)]
    logits = F.linear(wide[0], wide[1], wide[2] if biased else None)
    doubles: dict[str, Any] = {
        k: v.double() if isinstance(v, Tensor) else v for k, v in options.items()
    }
    oracle = cross_entropy(logits, target.double() if soft else target, alpha=alpha, **doubles)
    upstream = torch.full_like(oracle, 1.5)
    oracle.backward(upstream)

    leaves = [t.clone().requires_grad_() for t in (hidden, head, bias)]
    loss = linear_cross_entropy(
        leaves[0],
        leaves[1],
        target,
        alpha=alpha,
        linear_bias=leaves[2] if biased else None,
        chunk_rows=chunk_rows,
        **options,
    )
    assert isinstance(loss, Tensor)
    assert loss.dtype == dtype
    loss.backward(upstream.to(dtype))
    # Rounded logits: an error of 2^-9 in a logit of size |z| is as large in its probability.
    loose = 1 + (logits.abs().max().item() if dtype in (torch.bfloat16, torch.float16) else 0)
    assert relative(loss, oracle.detach(), least=1.0) <= TOLERANCE[dtype] * loose
    for actual, expected in zip(leaves, wide, strict=True):
        if expected.grad is None:
            assert actual.grad is None
            continue
        assert actual.grad is not None
        # The rows' gradients, of size 1.5 / rows at least, may cancel in the sum.
        assert relative(actual.grad, expected.grad, least=0.1) <= TOLERANCE[dtype] * loose


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
def test_again_differentiated_and_frozen(device, reduction):
    hidden, head, target = case(device, 7)

    def ours(h: Tensor, w: Tensor) -> Tensor:
        loss = linear_cross_entropy(h, w, target, alpha=0.3, reduction=reduction, chunk_rows=3)
        assert isinstance(loss, Tensor)
        return loss.square().sum()

    def reference(h: Tensor, w: Tensor) -> Tensor:
        loss = cross_entropy(F.linear(h, w), target, alpha=0.3, reduction=reduction)
        return loss.square().sum()

    loss = ours(hidden, head)
    first = torch.autograd.grad(loss, [hidden, head], retain_graph=True)
    again = torch.autograd.grad(loss, [hidden, head])
    expected = torch.autograd.grad(reference(hidden, head), [hidden, head])
    for a, b, c in zip(first, again, expected, strict=True):
        assert torch.allclose(a, c, rtol=1e-12)
        assert torch.allclose(b, c, rtol=1e-12)

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


def test_without_gradients_and_under_transforms(device):
    hidden, head, target = case(device, 7)
    with torch.no_grad():
        value = linear_cross_entropy(hidden, head, target, alpha=0.3)
    expected = F.cross_entropy(F.linear(hidden, head), target)
    assert isinstance(value, Tensor)
    assert torch.allclose(value, expected)

    def loss(head: Tensor) -> Tensor:
        result = linear_cross_entropy(hidden.detach(), head, target, alpha=0.3)
        assert isinstance(result, Tensor)
        return result

    (reference,) = torch.autograd.grad(loss(head), head)
    assert torch.allclose(torch.func.grad(loss)(head.detach()), reference, rtol=1e-12)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert torch.allclose(torch.autograd.grad(compiled(head), head)[0], reference, rtol=1e-12)


@pytest.mark.parametrize("soft", [False, True])
def test_accuracy(device, soft):
    hidden, head, target = case(device, 40)
    target[::7] = -100
    logits = F.linear(hidden, head)
    counted = torch.ones(40, dtype=torch.bool, device=device) if soft else target != -100
    q = torch.randn(40, 9, dtype=torch.float64, device=device).softmax(1) if soft else target
    label = q.argmax(1) if soft else target
    expected = (logits.argmax(1) == label)[counted].double().mean()
    for chunk_rows in (None, 7):
        loss, accuracy = linear_cross_entropy(
            hidden, head, q, alpha=0.3, return_accuracy=True, chunk_rows=chunk_rows
        )
        assert accuracy.item() == pytest.approx(expected.item())
        assert not accuracy.requires_grad
        assert loss.requires_grad


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


def test_the_callers_tensors_are_not_written_to(device):
    hidden, head, target = case(device, 7)
    copies = [t.detach().clone() for t in (hidden, head, target)]
    loss = linear_cross_entropy(hidden, head, target, alpha=0.3)
    assert isinstance(loss, Tensor)
    loss.backward()
    for tensor, copied in zip((hidden, head, target), copies, strict=True):
        assert torch.equal(tensor, copied)


H, W, Y = torch.zeros(4, 3), torch.zeros(5, 3), torch.tensor([0, 1, 2, 3])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"alpha": 1.3}, ValueError, "`alpha`"),
        ({"alpha": torch.zeros(3)}, ValueError, r"`alpha` to have shape \(\) or \(4,\)"),
        ({"input": H.long()}, TypeError, "`input`"),
        ({"input": torch.tensor(0.0)}, ValueError, r"`input` to have shape \(..., H\)"),
        ({"linear_weight": torch.zeros(5, 4)}, ValueError, r"`linear_weight` .* \(C, 3\)"),
        ({"linear_weight": W.double()}, TypeError, "`linear_weight` to have the dtype"),
        ({"linear_bias": torch.zeros(4)}, ValueError, r"`linear_bias` to have shape \(5,\)"),
        ({"target": Y[:2]}, ValueError, r"`target` to have shape \(4,\), or \(4, 5\)"),
        ({"target": torch.zeros(4, 4)}, ValueError, r"`target` to have shape"),
        ({"target": Y + 3}, ValueError, "labels in `target`"),
        ({"target": Y.int()}, TypeError, "`target` to hold class indices"),
        ({"weight": torch.ones(4)}, ValueError, "`weight`"),
        ({"reduction": "avg"}, ValueError, "`reduction`"),
        ({"chunk_rows": 0}, ValueError, "`chunk_rows` to be at least 1, but got 0"),
    ],
)
def test_bad_input_is_named(change, error, message):
    arguments = {"input": H, "linear_weight": W, "target": Y, "alpha": 0.3, **change}
    with pytest.raises(error, match=message):
        linear_cross_entropy(**arguments)


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


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_several_gradients_at_once(reduction):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(*s, dtype=torch.float64, generator=generator) for s in ((6, 4), (5, 4))]
    target = torch.tensor([1, 4, 0, 2, 2, 3])

    def loss(hidden: Tensor, head: Tensor) -> Any:
        options: dict[str, Any] = {"reduction": reduction, "chunk_rows": 4}
        return linear_cross_entropy(hidden, head, target, alpha=0.3, **options)

    jacobian = torch.autograd.functional.jacobian
    torch.testing.assert_close(
        jacobian(loss, tuple(tensors), vectorize=True), jacobian(loss, tuple(tensors))
    )


def test_an_ignored_row_adds_nothing_where_class_0_is_masked():
    bias = torch.tensor([-torch.inf, 0.0, 1.0], dtype=torch.float64)
    hidden = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    head, target = torch.ones(3, 2, dtype=torch.float64), torch.tensor([1, -100, 2])
    loss = linear_cross_entropy(hidden, head, target, alpha=0.3, linear_bias=bias)
    torch.testing.assert_close(loss, F.cross_entropy(F.linear(hidden, head, bias), target))
