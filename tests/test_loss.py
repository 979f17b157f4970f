"""`cross_entropy` and its relatives: values and gradients against oracles, in every combination."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import shutil
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from references import gradient_of_potential, literal_gradient, potential, row_error
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from powergrad import (
    CrossEntropyLoss,
    _native,
    _rows,
    binary_cross_entropy_with_logits,
    cross_entropy,
    linear_cross_entropy,
)
from powergrad import loss as loss_module

# (dtype, error of the gradient relative to its row's largest entry, error of the value).
# bfloat16 has 8 bits and may be rounded twice: where it is kept, and where it is scaled. float16
# has 11 bits and is rounded once.
TOLERANCE = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (1e-6, 1e-6),
    torch.bfloat16: (2**-7, 2**-8),
    torch.float16: (2**-11, 2**-10),
}
SHAPES = ["C", "NC", "NCd", "NCdd"]


@dataclass
class Case:
    """A random call of cross_entropy."""

    logits: Tensor
    target: Tensor
    alpha: float | Tensor
    options: dict[str, Any]
    upstream: Tensor

    def __repr__(self) -> str:
        return (
            f"Case({tuple(self.logits.shape)} {self.logits.dtype}, target {self.target.dtype}, "
            f"{self.options}, alpha {self.alpha}, upstream {self.upstream.tolist()})"
        )

    @property
    def class_dim(self) -> int:
        return 0 if self.logits.dim() == 1 else 1


@st.composite
def cases(draw) -> Case:
    """Shapes x dtypes x targets x options x alphas; the numbers come from a seed."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=g, dtype=torch.float64)

    dtype = draw(st.sampled_from(list(TOLERANCE)))
    c = draw(st.one_of(st.integers(1, 40), st.sampled_from([127, 1000])))
    n = draw(st.integers(1, 6))
    dims = draw(st.lists(st.integers(1, 4), min_size=2, max_size=2))
    shape = {"C": (c,), "NC": (n, c), "NCd": (n, c, dims[0]), "NCdd": (n, c, *dims)}[
        draw(st.sampled_from(SHAPES))
    ]
    positions = shape[:0] + shape[1:] if len(shape) == 1 else (shape[0], *shape[2:])

    spread = draw(st.sampled_from([0.1, 1.0, 10.0, 60.0]))
    offset = draw(st.sampled_from([0.0, -100.0, 1e4]))
    logits = (torch.randn(shape, generator=g, dtype=torch.float64) * spread + offset).to(dtype)

    options: dict = {
        "reduction": draw(st.sampled_from(["mean", "sum", "none"])),
        "label_smoothing": draw(st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0])),
        "weight": (rand(c) + 0.1).to(dtype) if draw(st.booleans()) else None,
    }
    if draw(st.booleans()):
        target = (rand(*positions) * c).long()
        if draw(st.booleans()):
            options["ignore_index"] = draw(st.sampled_from([-100, -1, 0]))
            target[rand(*positions) < 0.3] = options["ignore_index"]
    else:
        target = (rand(*shape) * 5).softmax(0 if len(shape) == 1 else 1).to(dtype)

    numbers = st.one_of(
        st.sampled_from([0.05, 0.25, 0.3, 0.999]), st.floats(1e-3, 1.0, exclude_max=True)
    )
    alpha: float | Tensor = draw(numbers)
    form = draw(st.sampled_from(["number", "0-d", "example", "position"]))
    if form == "0-d":
        alpha = torch.tensor(alpha, dtype=torch.float64)
    elif form == "example" and len(shape) > 1:
        alpha = rand(n) * 0.999 + 0.001
    elif form == "position" and positions:
        alpha = rand(*positions) * 0.999 + 0.001

    upstream_shape = positions if options["reduction"] == "none" else ()
    upstream = 2.0 ** torch.randint(-3, 4, upstream_shape, generator=g) * 1.5
    return Case(logits, target, alpha, options, upstream.to(dtype))


def to(case: Case, device: torch.device) -> Case:
    def move(x):
        return x.to(device) if isinstance(x, Tensor) and x.dim() else x

    return Case(
        case.logits.to(device),
        case.target.to(device),
        move(case.alpha),
        {key: move(value) for key, value in case.options.items()},
        case.upstream.to(device),
    )


def gradient(case: Case) -> tuple[Tensor, Tensor]:
    leaf = case.logits.clone().requires_grad_()
    loss = cross_entropy(leaf, case.target, alpha=case.alpha, **case.options)
    loss.backward(case.upstream)
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


@settings(max_examples=12 * settings().max_examples)
@given(cases())
def test_gradient_is_that_of_the_potential(device, case):
    case = to(case, device)
    _, actual = gradient(case)
    oracle = gradient_of_potential(
        case.logits, case.target, case.alpha, case.upstream, **case.options
    )
    assert actual.dtype == case.logits.dtype
    if not torch.isfinite(oracle).all():  # all targets ignored: 0 / 0, as in PyTorch
        assert actual.isnan().equal(oracle.isnan())
        return
    assert row_error(actual, oracle, case.class_dim, allowance(case, oracle)) <= tolerance(case)


@settings(max_examples=2 * settings().max_examples)
@given(cases())
def test_in_blocks(device, case):
    """As large tensors are worked on, where there is no C kernel."""
    case = to(case, device)
    with (
        patch.object(_native, "library", lambda: None),
        patch.multiple(_rows, LARGE=0, BLOCK=80),
        patch.object(loss_module, "SMALL", 0),
    ):
        value, actual = gradient(case)
    expected, _ = gradient(case)
    assert torch.allclose(value, expected, *2 * [TOLERANCE[value.dtype][1]], equal_nan=True)
    oracle = gradient_of_potential(
        case.logits, case.target, case.alpha, case.upstream, **case.options
    )
    error = row_error(actual, oracle, case.class_dim, allowance(case, oracle))
    assert not error > tolerance(case)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}])
def test_a_vocabulary_of_128_000(device, generator, native, options):
    """A sum that adds one class after the other would be off by 2e-6."""
    z = torch.randn(3, 128_000, generator=generator).to(device)
    y = torch.tensor([0, 5, 127_999], device=device)
    with nullcontext() if native else patch.object(_native, "library", lambda: None):
        _, actual = gradients_of(cross_entropy, z, y, alpha=0.3, **options)
    oracle = gradient_of_potential(z, y, 0.3, torch.tensor(1.0), **options)
    assert row_error(actual, oracle, 1) <= 2e-7


@pytest.mark.parametrize("ignore_index", [-100, 3, 7])
def test_ignored_labels_among_few(device, generator, ignore_index):
    """Where `nll_loss` finds out about them (see `powergrad.loss._loss_and_gradient`)."""
    z, y = logits(generator).to(device), LABELS.clone().to(device)
    y[1] = ignore_index
    with patch.object(_native, "library", lambda: None):
        value, actual = gradients_of(cross_entropy, z, y, alpha=0.3, ignore_index=ignore_index)
    expected, oracle = gradients_of(
        cross_entropy, z[[0, 2, 3]], y[[0, 2, 3]], alpha=0.3, ignore_index=ignore_index
    )
    assert torch.allclose(value, expected, rtol=1e-14)
    assert torch.allclose(actual[[0, 2, 3]], oracle, rtol=1e-14)
    assert (actual[1] == 0).all()


def tolerance(case: Case) -> float:
    return TOLERANCE[case.logits.dtype][0]


def allowance(case: Case, oracle: Tensor) -> Tensor:
    """What the error of a row is relative to: its largest entry, with three exceptions.

    1. ``p' - q`` of soft targets may cancel. What is rounded is then p' and q, not the difference.
    2. In a confident row, right to e^-x, even the largest entry is some ``exp(-x)``. An exponent of
       size x that is rounded to float32, four times, is off by 4 * x * 2^-24, and so is its
       exponential. Up to x = 4 that is below 1e-6.
    3. What is below the smallest number of the dtype (2^-24 in float16) is 0.
    """
    largest = oracle.abs().amax(case.class_dim, keepdim=True)
    terms = row_scale(case)
    if case.target.is_floating_point() or case.options["label_smoothing"] > 0:
        largest = torch.maximum(largest, terms)
    else:
        x = -(largest / terms).clamp(min=1e-300).log()
        largest = largest * (x / 4).clamp(min=1)
    dtype = case.logits.dtype
    smallest = 2**-24 if dtype == torch.float16 else torch.finfo(dtype).smallest_normal
    return largest.clamp(min=smallest / tolerance(case))


def row_scale(case: Case) -> Tensor:
    """The larger of the two terms, ``s * sum(w q) * p'`` and ``s * w * q``, in each row."""
    dim, target = case.class_dim, case.target
    c = case.logits.shape[dim]
    kept = torch.ones(case.logits.select(dim, 0).shape, dtype=torch.bool, device=target.device)
    if target.is_floating_point():
        q = target.double()
    else:
        kept = target != case.options.get("ignore_index", -100)
        q = F.one_hot(target * kept, c).movedim(-1, dim).double()
    eps = case.options["label_smoothing"]
    w = case.options["weight"]
    w = torch.ones(c, dtype=torch.float64) if w is None else w.double()
    w = w.reshape(-1, *[1] * (q.dim() - dim - 1)).to(q.device)
    wq = w * ((1 - eps) * q + eps / c)

    s = case.upstream.double().abs()
    if case.options["reduction"] == "mean":
        labels = not target.is_floating_point()
        mass = (w * q).sum(dim) if labels else torch.ones_like(kept, dtype=torch.float64)
        s = s / (mass * kept).sum()
    elif case.options["reduction"] == "none":
        s = s.unsqueeze(dim)

    alpha = case.alpha
    if isinstance(alpha, Tensor) and alpha.dim():
        alpha = alpha.reshape(alpha.shape + (1,) * (q.dim() - 1 - alpha.dim())).unsqueeze(dim)
    p = torch.softmax(alpha * case.logits.double(), dim)
    return s * torch.maximum(wq.sum(dim, keepdim=True) * p, wq).amax(dim, keepdim=True)


@settings(max_examples=4 * settings().max_examples)
@given(cases())
def test_value_is_ordinary_cross_entropy(device, case):
    case = to(case, device)
    value, _ = gradient(case)
    options: dict[str, Any] = {
        k: v.double() if isinstance(v, Tensor) else v for k, v in case.options.items()
    }
    target = case.target.double() if case.target.is_floating_point() else case.target
    expected = F.cross_entropy(case.logits.double(), target, **options)
    assert value.dtype == case.logits.dtype
    # Logits of 1e4 in 32 bits leave a loss of the size of their spread, with their rounding.
    largest = case.logits.double().abs().max() if case.logits.dtype == torch.float32 else 1.0
    scale = expected.abs().clamp(min=1).maximum(torch.as_tensor(largest * 0.1))
    error = (value.double() - expected).abs() / scale
    assert torch.equal(value.isnan(), expected.isnan())
    assert not (error > 2 * TOLERANCE[case.logits.dtype][1]).any()


@settings(max_examples=4 * settings().max_examples)
@given(cases())
def test_alpha_one_is_pytorch_bit_for_bit(device, case):
    case = to(case, device)
    case.alpha = 1.0
    value, actual = gradient(case)
    leaf = case.logits.clone().requires_grad_()
    expected = F.cross_entropy(leaf, case.target, **case.options)
    expected.backward(case.upstream)
    assert torch.equal(value.nan_to_num(), expected.detach().nan_to_num())
    assert leaf.grad is not None
    assert torch.equal(actual.nan_to_num(), leaf.grad.nan_to_num())


@settings(max_examples=2 * settings().max_examples)
@given(cases())
def test_a_tensor_alpha_of_one_is_pytorch_to_rounding(device, case):
    case = to(case, device)
    case.alpha = torch.tensor(1.0)
    _, actual = gradient(case)
    oracle = gradient_of_potential(case.logits, case.target, 1.0, case.upstream, **case.options)
    scale = row_scale(case).clamp(min=2**-24 / tolerance(case))
    assert not row_error(actual, oracle, case.class_dim, scale) > tolerance(case)


@settings(max_examples=2 * settings().max_examples)
@given(cases())
def test_alpha_zero_is_uniform_minus_target(device, case):
    case = to(case, device)
    case.alpha = 0.0 if case.upstream.sum() > 3 else torch.tensor(0.0)
    _, actual = gradient(case)
    # At constant logits every alpha gives the uniform distribution.
    flat = torch.zeros_like(case.logits)
    oracle = gradient_of_potential(flat, case.target, 1.0, case.upstream, **case.options)
    scale = row_scale(case).clamp(min=2**-24 / tolerance(case))
    assert not row_error(actual, oracle, case.class_dim, scale) > tolerance(case)


@given(
    st.lists(st.floats(-60, 60), min_size=2, max_size=6), st.floats(0.0, 0.99), st.integers(0, 5)
)
@example([-58.0, 35.0], 0.96875, 1)
@example([-60.0, 60.0], 0.99, 1)
def test_gradient_is_the_papers_equation(logits, alpha, label):
    """Also where ``p' - q`` is 1e-40, far below what float64 holds beside 1."""
    label %= len(logits)
    z = torch.tensor([logits], dtype=torch.float64, requires_grad=True)
    (actual,) = torch.autograd.grad(cross_entropy(z, torch.tensor([label]), alpha=alpha), z)
    q = [float(i == label) for i in range(len(logits))]
    expected = torch.tensor([literal_gradient(logits, q, alpha)], dtype=torch.float64)
    assert row_error(actual, expected, 1) <= 1e-12


def test_confident_examples_keep_their_gradient():
    # 1 - p' = 4e-18 is 0 if formed as a difference, in any precision here.
    z = torch.tensor([[80.0, 0.0]], requires_grad=True)
    cross_entropy(z, torch.tensor([0]), alpha=0.5).backward()
    assert z.grad is not None
    assert z.grad.tolist()[0] == pytest.approx([-4.248354e-18, 4.248354e-18], rel=1e-6)


# Derivatives of other kinds -----------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1},
    {"weight": torch.tensor([0.5, 2.0, 1.0, 0.1, 3.0], dtype=torch.float64)},
    {"reduction": "sum", "ignore_index": 2},
    {
        "label_smoothing": 0.2,
        "weight": torch.tensor([0.5, 2.0, 1.0, 0.1, 3.0], dtype=torch.float64),
        "ignore_index": 2,
    },
]
LABELS = torch.tensor([0, 2, 4, 1])


def logits(generator, *shape: int) -> Tensor:
    return 3 * torch.randn(shape or (4, 5), generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("alpha", [0.3, torch.tensor([0.1, 0.5, 0.9, 1.0])])
def test_second_derivatives_are_the_potentials(generator, alpha, options):
    z = logits(generator).requires_grad_()
    v = logits(generator)

    def twice(loss: Tensor) -> Tensor:
        (g,) = torch.autograd.grad(loss, z, create_graph=True)
        return torch.autograd.grad((g * v).sum(), z)[0]

    actual = twice(cross_entropy(z, LABELS, alpha=alpha, **options))
    assert (actual - twice(potential(z, LABELS, alpha, **options))).abs().max() <= 1e-13


@pytest.mark.parametrize("options", OPTIONS)
def test_functional_transforms(generator, options):
    z = logits(generator)

    def ours(z: Tensor) -> Tensor:
        return cross_entropy(z, LABELS, alpha=0.3, **options)

    def oracle(z: Tensor) -> Tensor:
        return potential(z, LABELS, 0.3, **options)

    for transform in (torch.func.grad, torch.func.hessian, torch.func.jacfwd, torch.func.jacrev):
        assert (transform(ours)(z) - transform(oracle)(z)).abs().max() <= 1e-13
    tangent = logits(generator)
    actual = torch.func.jvp(ours, (z,), (tangent,))[1]
    assert (actual - torch.func.jvp(oracle, (z,), (tangent,))[1]).abs() <= 1e-13


def test_functional_transforms_of_something_else(generator):
    """The logits that a transformed function closes over are constants to the transform."""
    z = logits(generator).float().requires_grad_()
    loss = cross_entropy(z, LABELS, alpha=0.3)
    (expected,) = torch.autograd.grad(loss, z)

    def weighted(factor: Tensor) -> Tensor:
        return factor * cross_entropy(z, LABELS, alpha=0.3)

    for transform in (torch.func.vmap, torch.func.grad):
        factor = torch.ones(3) if transform is torch.func.vmap else torch.ones(())
        value = transform(weighted)(factor)
        assert torch.allclose(value, loss.expand_as(value))
        (grad,) = torch.autograd.grad(value.mean(), z)
        assert torch.allclose(grad, expected)


@pytest.mark.parametrize("soft", [False, True])
def test_gradients_of_single_examples_by_vmap(generator, soft):
    z = logits(generator)
    target = logits(generator).softmax(1) if soft else LABELS
    alphas = torch.tensor([0.0, 0.2, 0.7, 1.0], dtype=torch.float64)

    def single(z: Tensor, target: Tensor, alpha: Tensor) -> Tensor:
        return cross_entropy(z, target, alpha=alpha)

    actual = torch.func.vmap(torch.func.grad(single))(z, target, alphas)
    expected = [torch.func.grad(single)(*row) for row in zip(z, target, alphas, strict=True)]
    assert (actual - torch.stack(expected)).abs().max() <= 1e-15


def test_soft_targets_and_weights_get_their_ordinary_gradient(generator):
    z = logits(generator)
    for eps in (0.0, 0.1):
        grads = []
        for function in (F.cross_entropy, lambda *a, **k: cross_entropy(*a, **k, alpha=0.3)):
            q = logits(torch.Generator().manual_seed(1)).softmax(1).requires_grad_()
            w = torch.arange(1.0, 6.0, dtype=torch.float64).requires_grad_()
            grads.append(torch.autograd.grad(function(z, q, w, label_smoothing=eps), (q, w)))
        for a, b in zip(*grads, strict=True):
            assert (a - b).abs().max() <= 1e-14


# Training machinery -------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("soft", [False, True])
def test_compiles_whole(generator, device, options: dict[str, Any], soft):
    options = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
    if soft:
        options.pop("ignore_index", None)
    z = logits(generator).to(device).requires_grad_()
    target = (logits(generator).softmax(1) if soft else LABELS).to(device)
    # AOTAutograd takes most of the time, and only the operators matter to it: one alpha is enough.
    for alpha, backend in (
        (0.3, "eager"),
        (torch.tensor(0.3), "eager"),
        (torch.tensor([0.1, 0.5, 0.9, 1.0], device=device), "aot_eager"),
    ):
        torch.compiler.reset()

        def loss(z: Tensor, alpha=alpha) -> Tensor:
            return cross_entropy(z, target, alpha=alpha, **options)

        value, expected = torch.compile(loss, fullgraph=True, backend=backend)(z), loss(z)
        assert torch.allclose(value, expected, rtol=1e-14)
        (actual,) = torch.autograd.grad(value * 3, z)
        assert (actual - torch.autograd.grad(expected * 3, z)[0]).abs().max() <= 1e-14


def test_compiled_with_two_alphas_of_the_same_logits(generator):
    z = logits(generator).requires_grad_()

    def losses(z: Tensor) -> list[Tensor]:
        return [cross_entropy(z, LABELS, alpha=alpha) for alpha in (0.1, 0.9)]

    torch.compiler.reset()
    compiled = torch.compile(losses, backend="aot_eager")(z)
    for value, expected in zip(compiled, losses(z), strict=True):
        (actual,) = torch.autograd.grad(value, z, retain_graph=True)
        assert (actual - torch.autograd.grad(expected, z)[0]).abs().max() <= 1e-14


@pytest.mark.matrix
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_compiles_with_inductor(generator, device):
    torch.compiler.reset()
    z, y = logits(generator).to(device).requires_grad_(), LABELS.to(device)

    def loss(z: Tensor, alpha: Tensor) -> Tensor:
        return cross_entropy(z, y, alpha=alpha, label_smoothing=0.1)

    compiled = torch.compile(loss, fullgraph=True)
    for alpha in (0.3, 0.0):
        exponent = torch.tensor(alpha, device=device)
        (actual,) = torch.autograd.grad(compiled(z, exponent) * 3, z)
        (expected,) = torch.autograd.grad(loss(z, exponent) * 3, z)
        assert (actual - expected).abs().max() <= 1e-14


def test_module_alpha_changes_without_recompilation(device, generator):
    torch.compiler.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    criterion = CrossEntropyLoss(0.3)
    compiled = torch.compile(criterion, fullgraph=True, backend=backend)
    z, y = logits(generator).to(device).requires_grad_(), LABELS.to(device)
    for alpha in (0.3, 0.5, 0.0, 1.0, 0.05):
        criterion.alpha = alpha
        (actual,) = torch.autograd.grad(compiled(z, y), z)
        (expected,) = torch.autograd.grad(cross_entropy(z, y, alpha=alpha), z)
        assert (actual - expected).abs().max() <= 1e-15
    assert len(graphs) == 1


def test_float16_gradients_are_formed_after_the_loss_scale_arrives(device):
    # p'/N is 1.5e-8 for most classes: below half of the smallest float16, 6e-8.
    n, c, scale = 64, 1000, 2.0**14
    g = torch.Generator().manual_seed(0)
    z = torch.randn(n, c, generator=g).half()
    y = torch.randint(0, c, (n,), generator=g)
    oracle = gradient_of_potential(z, y, 0.05, torch.tensor(1.0))
    assert oracle[oracle > 0].median() < 2**-16 / 0.9
    leaf = z.to(device).requires_grad_()
    for eps in (0.0, 0.1):
        oracle = gradient_of_potential(z, y, 0.05, torch.tensor(1.0), label_smoothing=eps)
        loss = cross_entropy(leaf, y.to(device), alpha=0.05, label_smoothing=eps)
        (actual,) = torch.autograd.grad(loss * scale, leaf)
        error = (actual.cpu().double() / scale - oracle).abs() / oracle.abs()
        assert error.max() <= 2**-10


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_under_autocast_with_a_gradient_scaler(device, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 10)).to(device)
    x, y = torch.randn(64, 16, device=device), torch.randint(0, 10, (64,), device=device)

    def gradients(scaled: bool) -> list[Tensor]:
        model.zero_grad()
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**12, enabled=scaled)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with torch.autocast(device.type, dtype=dtype):
            out = model(x)
            loss = cross_entropy(out, y, alpha=0.1)
        assert out.dtype == dtype
        assert loss.dtype == torch.float32
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = copy.deepcopy(model)
    cross_entropy(plain(x), y, alpha=0.1).backward()
    for scaled in (True, False):
        for actual, p in zip(gradients(scaled), plain.parameters(), strict=True):
            assert p.grad is not None
            # 16-bit activations and weights: about 8 bits of the largest entry survive.
            assert (actual - p.grad).abs().max() <= 0.02 * p.grad.abs().max()


def test_gradient_accumulation_and_retained_graphs(device, generator):
    z = logits(generator, 12, 5).to(device).requires_grad_()
    y = (torch.arange(12) % 5).to(device)
    loss = cross_entropy(z, y, alpha=0.3)
    (whole,) = torch.autograd.grad(loss, z, retain_graph=True)
    (again,) = torch.autograd.grad(loss, z)
    assert (whole - again).abs().max() <= 1e-16  # the second time by another path
    for i in range(0, 12, 4):
        (cross_entropy(z[i : i + 4], y[i : i + 4], alpha=0.3) / 3).backward()
    assert z.grad is not None
    assert (z.grad - whole).abs().max() <= 1e-15


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [*OPTIONS, {"soft": True}])
def test_what_arrives_multiplies_the_gradient(device, generator, dtype, options):
    """To the bit for a power of 2, and also where it is 1 and nothing is multiplied."""
    z = logits(generator).to(device, dtype).requires_grad_()
    y = logits(generator).softmax(1).to(device, dtype) if "soft" in options else LABELS.to(device)
    given: dict[str, Any] = {k: v for k, v in options.items() if k != "soft"}
    if "weight" in given:
        given["weight"] = given["weight"].to(device, dtype)

    def gradient(scale: float | None) -> Tensor:
        loss = cross_entropy(z, y, alpha=0.3, **given)
        return torch.autograd.grad(loss if scale is None else loss * scale, z)[0]

    unscaled = gradient(None)
    assert torch.equal(gradient(4.0), 4 * unscaled)
    assert torch.equal(gradient(-1.0), -unscaled)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(device, generator, reentrant):
    z = logits(generator).to(device).requires_grad_()
    y = LABELS.to(device)

    def loss(z: Tensor) -> Tensor:
        return cross_entropy(z.sin(), y, alpha=0.3)

    value = checkpoint(loss, z, use_reentrant=reentrant)
    assert isinstance(value, Tensor)
    (expected,) = torch.autograd.grad(loss(z), z)
    value.backward()
    assert z.grad is not None
    assert torch.equal(z.grad, expected)


@pytest.mark.parametrize("strict", [True, False])
def test_exports_with_the_model_around_it(generator, strict):
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 5, dtype=torch.float64)
            self.criterion = CrossEntropyLoss(0.3, label_smoothing=0.1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.criterion(self.layer(x), y)

    model, x = Network(), logits(generator)
    exported = torch.export.export(model, (x, LABELS), strict=strict)
    buffer = io.BytesIO()
    torch.export.save(exported, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    assert torch.allclose(loaded(x, LABELS), model(x, LABELS), rtol=1e-12)


def test_the_module_is_a_store_of_arguments(device, generator):
    weight = torch.arange(1.0, 6.0, dtype=torch.float64)
    module = CrossEntropyLoss(0.3, weight, ignore_index=2, reduction="sum", label_smoothing=0.1).to(
        device
    )
    z = logits(generator).to(device).requires_grad_()
    y = LABELS.to(device)
    expected = cross_entropy(
        z, y, weight.to(device), alpha=0.3, ignore_index=2, reduction="sum", label_smoothing=0.1
    )
    for copied in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(copied(z, y), expected)
        assert copied.alpha == 0.3
    assert isinstance(module, nn.CrossEntropyLoss)
    assert set(module.state_dict()) == set(nn.CrossEntropyLoss(weight).state_dict())
    assert module.half().alpha == 0.3
    assert "alpha=0.3" in repr(module)
    module.alpha = torch.tensor(0.5)
    assert torch.equal(module.alpha, torch.tensor(0.5))


# Bad input and edges ------------------------------------------------------------------------------

Z, Y = torch.zeros(4, 5), torch.tensor([0, 1, 2, 3])
BAD = [
    ({"alpha": 1.3}, ValueError, r"Expected `alpha` to be in \[0, 1\], but got 1.3"),
    ({"alpha": -0.1}, ValueError, "`alpha` .* got -0.1"),
    ({"alpha": float("nan")}, ValueError, "`alpha` .* got nan"),
    ({"alpha": "0.3"}, TypeError, "`alpha` to be a number, but got str"),
    ({"alpha": True}, TypeError, "`alpha` to be a number, but got bool"),
    ({"alpha": None}, TypeError, "`alpha` to be a number, but got NoneType"),
    ({"alpha": torch.tensor(1)}, TypeError, "`alpha` to be floating-point, but got torch.int64"),
    ({"alpha": torch.tensor(1.5)}, ValueError, "`alpha` .* got 1.5"),
    ({"alpha": torch.tensor([0.1, 0.2, 2.0, 0.3])}, ValueError, "got values from 0.1 to 2"),
    ({"alpha": torch.tensor(float("nan"))}, ValueError, "`alpha` .* got NaN"),
    ({"alpha": torch.zeros(5)}, ValueError, r"`alpha` to have shape \(\) or \(4,\), .* \(5,\)"),
    ({"alpha": torch.zeros(1)}, ValueError, r"`alpha` to have shape .* got \(1,\)"),
    ({"alpha": torch.zeros(4, 1)}, ValueError, r"`alpha` to have shape .* got \(4, 1\)"),
    ({"alpha": torch.tensor(0.3, requires_grad=True)}, ValueError, "`alpha` not to require grad"),
    ({"input": Z.long()}, TypeError, "`input` to be a floating-point tensor, but got torch.int64"),
    ({"input": [[0.0]]}, TypeError, "`input` to be a tensor, but got list"),
    ({"input": torch.tensor(0.0)}, ValueError, "`input` to have a class dimension"),
    ({"input": torch.zeros(4, 0)}, ValueError, r"`input` to have classes, .* \(4, 0\)"),
    ({"target": [0, 1, 2, 3]}, TypeError, "`target` to be a tensor, but got list"),
    ({"target": Y[:3]}, ValueError, r"`target` of class indices to have shape \(4,\) .* \(3,\)"),
    ({"target": Y[:, None]}, ValueError, r"`target` .* \(4,\) .* got \(4, 1\)"),
    ({"target": Y.int()}, TypeError, "`target` to hold class indices .* got torch.int32"),
    ({"target": Y + 2}, ValueError, r"`target` to be in \[0, 4\] .* got values from 2 to 5"),
    ({"target": Y - 1}, ValueError, r"`target` to be in \[0, 4\] .* got values from -1 to 2"),
    ({"target": Z[:, :4]}, ValueError, r"probabilities .* shape of `input`, \(4, 5\), .* \(4, 4\)"),
    ({"target": Z[:1]}, ValueError, r"probabilities .* shape of `input`, \(4, 5\), .* \(1, 5\)"),
    ({"target": Z, "ignore_index": 1}, ValueError, "`ignore_index` to be negative .* got 1"),
    ({"weight": torch.ones(4)}, ValueError, r"`weight` to have shape \(5,\), .* \(4,\)"),
    ({"weight": torch.ones(5).double()}, TypeError, "`weight` .* torch.float32, .* torch.float64"),
    ({"weight": torch.ones(5).long()}, TypeError, "`weight` to be a floating-point tensor"),
    (
        {"reduction": "average"},
        ValueError,
        "`reduction` to be 'mean', 'sum' or 'none', .*'average'",
    ),
    ({"label_smoothing": 1.2}, ValueError, r"`label_smoothing` to be in \[0, 1\], but got 1.2"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_is_named(change, error, message):
    for logits in (Z, Z.clone().requires_grad_()):
        arguments = {"input": logits, "target": Y, "alpha": 0.3, **change}
        with pytest.raises(error, match=message):
            cross_entropy(**arguments)


@pytest.mark.parametrize(
    "change", [{"alpha": 2.0}, {"reduction": "average"}, {"label_smoothing": -1.0}]
)
def test_the_module_checks_where_it_is_made(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        CrossEntropyLoss(**{"alpha": 0.3, **change})
    with pytest.raises(ValueError, match="alpha"):
        CrossEntropyLoss(0.3).alpha = 2.0


def test_no_value_is_read_where_there_is_none():
    """Meta tensors have no values: what works on them synchronises with no accelerator."""
    for options in OPTIONS:
        options = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in options.items()}
        z = torch.zeros(4, 5, dtype=torch.float64, device="meta", requires_grad=True)
        alpha = torch.zeros(4, device="meta")
        cross_entropy(z, LABELS.to("meta"), alpha=alpha, **options).sum().backward()
        assert z.grad is not None
        assert z.grad.shape == (4, 5)


def gradients_of(function, z: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
    leaf = z.clone().requires_grad_()
    value = function(leaf, *args, **kwargs)
    value.sum().backward()
    assert leaf.grad is not None
    return value.detach(), leaf.grad


@pytest.mark.parametrize("alpha", [0.0, 0.3, torch.tensor(0.0), torch.tensor([0.0, 0.3])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_classes(device, alpha, dtype):
    inf = float("inf")
    z = torch.tensor([[1.0, -inf, 0.0, -inf], [-inf, -inf, 2.0, -inf]], device=device).to(dtype)
    y = torch.tensor([0, 2], device=device)
    alpha = alpha.to(device) if isinstance(alpha, Tensor) else alpha
    value, grad = gradients_of(cross_entropy, z, y, alpha=alpha, reduction="sum")
    a = torch.as_tensor(alpha, device=device).expand(2)
    p = torch.softmax(torch.stack([a[0], torch.zeros_like(a[0])]), 0)
    expected = torch.tensor([[float(p[0]) - 1, 0, float(p[1]), 0], [0, 0, 0, 0]], device=device)
    assert (grad.float() - expected).abs().max() <= (1e-7 if dtype == torch.float32 else 2e-3)
    # The kernel does not round log p to 16 bits, PyTorch does.
    tolerated = 1e-6 if dtype == torch.float32 else 2**-8
    assert torch.allclose(value, F.cross_entropy(z, y, reduction="sum"), rtol=tolerated)

    # Target mass on a masked class, a row of masked classes only: as in PyTorch.
    y = torch.tensor([1, 2], device=device)
    value, grad = gradients_of(cross_entropy, z, y, alpha=alpha, reduction="sum")
    plain, plain_grad = gradients_of(F.cross_entropy, z, y, reduction="sum")
    assert value == plain == inf
    assert torch.equal(grad.isfinite(), plain_grad.isfinite())
    value, grad = gradients_of(cross_entropy, torch.full_like(z, -inf), y, alpha=alpha)
    plain, plain_grad = gradients_of(F.cross_entropy, torch.full_like(z, -inf), y)
    assert value.isnan()
    assert torch.equal(grad.isnan(), plain_grad.isnan())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_stay_in_their_row(device, bad):
    z = torch.zeros(2, 3, device=device)
    z[0, 1] = bad
    y = torch.tensor([0, 1], device=device)
    value, grad = gradients_of(cross_entropy, z, y, alpha=0.3, reduction="none")
    plain, plain_grad = gradients_of(F.cross_entropy, z, y, reduction="none")
    assert torch.equal(value.isnan(), plain.isnan())
    assert grad[0].isnan().all()
    assert grad[1].tolist() == pytest.approx([1 / 3, -2 / 3, 1 / 3], rel=1e-6)
    assert plain_grad[0].isnan().all()


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"reduction": "sum"}])
@pytest.mark.parametrize("soft", [False, True])
def test_empty_batches_and_ignored_ones_are_pytorchs(device, options, soft):
    z = torch.zeros(0, 5, device=device)
    target = z if soft else torch.zeros(0, dtype=torch.long, device=device)
    value, grad = gradients_of(cross_entropy, z, target, alpha=0.3, **options)
    plain, plain_grad = gradients_of(F.cross_entropy, z, target, **options)
    assert torch.equal(value.nan_to_num(), plain.nan_to_num())
    assert value.isnan() == plain.isnan()
    assert grad.shape == plain_grad.shape

    z, y = torch.zeros(3, 5, device=device), torch.full((3,), -100, device=device)
    value, grad = gradients_of(cross_entropy, z, y, alpha=0.3, **options)
    plain, plain_grad = gradients_of(F.cross_entropy, z, y, **options)
    assert value.isnan() == plain.isnan()
    assert torch.equal(grad.isnan(), plain_grad.isnan())


@pytest.mark.parametrize("alpha", [0.05, 0.3, 0.99])
def test_large_logits(device, alpha):
    z = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 1e4]], device=device)
    y = torch.tensor([1, 0], device=device)
    for dtype in (torch.float16, torch.float32):
        _, actual = gradients_of(cross_entropy, z.to(dtype), y, alpha=alpha)
        oracle = gradient_of_potential(z.to(dtype), y, alpha, torch.tensor(1.0))
        assert row_error(actual, oracle, 1) <= TOLERANCE[dtype][0]


def test_a_common_offset_changes_nothing(device, generator):
    # The logits are multiples of 1/1024, so that adding 1e4 is exact in float32.
    z = (logits(generator, 8, 5) * 1024).round().float().to(device) / 1024
    y = torch.zeros(8, dtype=torch.long, device=device)
    for alpha in (0.01, 0.3, 0.9):
        _, near = gradients_of(cross_entropy, z, y, alpha=alpha)
        _, far = gradients_of(cross_entropy, z + 1e4, y, alpha=alpha)
        assert row_error(far, near.double(), 1) <= 2e-7


@given(cases())
def test_the_callers_tensors_are_not_written_to(device, case):
    case = to(case, device)
    given_tensors = [case.logits, case.target, case.upstream]
    given_tensors += [v for v in (*case.options.values(), case.alpha) if isinstance(v, Tensor)]
    copies = [t.clone() for t in given_tensors]
    leaf = case.logits.detach().requires_grad_()  # shares its memory
    loss = cross_entropy(leaf, case.target, alpha=case.alpha, **case.options)
    loss.backward(case.upstream)
    for tensor, copied in zip(given_tensors, copies, strict=True):
        assert torch.equal(tensor, copied)


def test_bytes_as_labels(device, generator):
    z = logits(generator).to(device)
    for eps in (0.0, 0.1):
        weight = torch.arange(1.0, 6.0, dtype=torch.float64, device=device)
        a = cross_entropy(z, LABELS.byte().to(device), weight, alpha=0.3, label_smoothing=eps)
        b = cross_entropy(z, LABELS.to(device), weight, alpha=0.3, label_smoothing=eps)
        assert torch.equal(a, b)


# Multi-label --------------------------------------------------------------------------------------


@settings(max_examples=4 * settings().max_examples)
@given(
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from(list(TOLERANCE)),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    soft=st.booleans(),
    weighted=st.booleans(),
    positive=st.booleans(),
    form=st.sampled_from(["number", "0-d", "example", "element"]),
)
def test_binary_gradient_is_sigmoid_of_alpha_z(
    device, seed, dtype, reduction, soft, weighted, positive, form
):
    g = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=g, dtype=torch.float64).to(device)

    z = (40 * (rand(4, 3) - 0.5)).to(dtype)
    y = rand(4, 3) if soft else rand(4, 3).round()
    y = y.to(dtype)
    options = {
        "reduction": reduction,
        "weight": (rand(4, 1) + 0.5).to(dtype) if weighted else None,
        "pos_weight": (rand(3) + 0.5).to(dtype) if positive else None,
    }
    shape = {"number": (), "0-d": (), "example": (4,), "element": (4, 3)}[form]
    alpha = rand(*shape) * 0.99 + 0.005
    inner = alpha[:, None] if form == "example" else alpha

    leaf = z.clone().requires_grad_()
    value = binary_cross_entropy_with_logits(
        leaf, y, alpha=float(alpha) if form == "number" else alpha, **options
    )
    upstream = torch.full_like(value, 1.5)
    value.backward(upstream)

    wide = z.double().requires_grad_()
    double: dict[str, Any] = {
        k: v.double() if isinstance(v, Tensor) else v for k, v in options.items()
    }
    per_row = {**double, "reduction": "none"}
    losses = F.binary_cross_entropy_with_logits(inner * wide, y.double(), **per_row) / inner
    oracle_value = F.binary_cross_entropy_with_logits(z.double(), y.double(), **double)
    reduced = {"mean": losses.mean, "sum": losses.sum, "none": lambda: losses}[reduction]()
    (oracle,) = torch.autograd.grad(reduced, wide, upstream.double())
    assert leaf.grad is not None
    assert leaf.grad.dtype == dtype
    gradient_tolerance, value_tolerance = TOLERANCE[dtype]
    largest = 1.5 * 1.5 * 1.5  # upstream, weight, pos_weight
    assert (leaf.grad.double() - oracle).abs().max() <= 2 * gradient_tolerance * largest
    error = (value.double() - oracle_value).abs() / oracle_value.clamp(min=1)
    assert error.max() <= 2 * value_tolerance


def test_binary_at_alpha_one_is_pytorch_bit_for_bit(device, generator):
    z, y = logits(generator).float().to(device), logits(generator).float().sigmoid().to(device)
    ours = gradients_of(binary_cross_entropy_with_logits, z, y, alpha=1.0)
    plain = gradients_of(F.binary_cross_entropy_with_logits, z, y)
    assert torch.equal(ours[0], plain[0])
    assert torch.equal(ours[1], plain[1])


def test_binary_is_the_softmax_of_z_and_nothing(device, generator):
    z = logits(generator, 6).to(device)
    y = torch.tensor([0, 1, 1, 0, 1, 0], device=device)
    _, binary = gradients_of(
        binary_cross_entropy_with_logits, z, y.double(), alpha=0.3, reduction="sum"
    )
    pairs = torch.stack([torch.zeros_like(z), z], 1)
    _, softmax = gradients_of(cross_entropy, pairs, y, alpha=0.3, reduction="sum")
    assert (binary - softmax[:, 1]).abs().max() <= 1e-15


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"alpha": 1.3}, ValueError, "alpha"),
        ({"alpha": torch.zeros(5)}, ValueError, r"`alpha` to have shape .* got \(5,\)"),
        ({"input": Z.long()}, TypeError, "`input`"),
        ({"target": Z.long()}, TypeError, "`target`"),
        ({"target": Z[:1]}, ValueError, r"`target` to have the shape of `input`.* \(1, 5\)"),
        ({"reduction": "avg"}, ValueError, "`reduction`"),
        ({"weight": torch.ones(4)}, ValueError, "`weight` to broadcast"),
        ({"pos_weight": torch.ones(2, 4, 5)}, ValueError, "`pos_weight` to broadcast"),
    ],
)
def test_binary_bad_input_is_named(change, error, message):
    with pytest.raises(error, match=message):
        binary_cross_entropy_with_logits(**{"input": Z, "target": Z, "alpha": 0.3, **change})


# What calls in the field had wrong ----------------------------------------------------------------


@pytest.mark.parametrize("eps", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_an_ignored_row_adds_nothing_where_class_0_is_masked(dtype, weighted, eps, device):
    """Ignored labels are looked up as class 0, whose loss is infinite here."""
    z = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    z[:, 0] = -torch.inf if eps == 0 else -60
    z.requires_grad_()
    target = torch.tensor([1, -100, 2], device=device)
    weight = torch.tensor([1.0, 2, 3, 4], dtype=dtype, device=device) if weighted else None
    for reduction in ("mean", "sum", "none"):
        options = {"reduction": reduction, "label_smoothing": eps}
        loss = cross_entropy(z, target, weight, alpha=0.3, **options)
        exact = None if weight is None else weight.double()
        expected = F.cross_entropy(z.double(), target, exact, **options)
        torch.testing.assert_close(loss.double(), expected, rtol=TOLERANCE[dtype][1], atol=1e-7)
        (grad,) = torch.autograd.grad(loss.sum(), z)
        assert grad.isfinite().all()


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("given", [torch.float32, torch.float16])
def test_autocast_does_not_round_a_smoothed_and_weighted_loss(given, low, native, monkeypatch):
    """A product with the weights is one that autocast makes in 16 bits, where it overflows."""
    if not native:
        monkeypatch.setattr(_native, "cross_entropy", lambda *_, **__: None)
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(4, 32_000, generator=generator).to(given).requires_grad_()
    weight, target = torch.rand(32_000, generator=generator), torch.arange(4)
    options = {"label_smoothing": 0.1, "reduction": "none"}
    expected = F.cross_entropy(z.detach().float(), target, weight, **options)
    with torch.autocast("cpu", dtype=low):
        loss = cross_entropy(z, target, weight, alpha=0.3, **options)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_several_gradients_at_once(reduction):
    """What `is_grads_batched` and the vectorised jacobian of torch.autograd ask for."""
    z = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([1, 4, 0])

    def loss(z: Tensor) -> Tensor:
        return cross_entropy(z, target, alpha=0.3, reduction=reduction)

    jacobian = torch.autograd.functional.jacobian
    torch.testing.assert_close(jacobian(loss, z, vectorize=True), jacobian(loss, z))


def test_a_label_of_one_byte_is_not_taken_for_a_negative_ignore_index(device):
    """As one byte, -100 is 156."""
    z = torch.randn(4, 200, generator=torch.Generator().manual_seed(0)).to(device)
    labels = torch.tensor([156, 3, 199, 156], dtype=torch.uint8, device=device)
    for eps in (0.0, 0.1):
        expected = F.cross_entropy(z, labels.long(), label_smoothing=eps)
        leaf = z.clone().requires_grad_()
        for logits in (z, leaf):
            loss = cross_entropy(logits, labels, alpha=0.3, label_smoothing=eps)
            torch.testing.assert_close(loss, expected)
        grads = []
        for target in (labels, labels.long()):
            loss = cross_entropy(leaf, target, alpha=0.3, label_smoothing=eps)
            grads += torch.autograd.grad(loss, leaf, create_graph=True)
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_alpha_that_is_changed_in_place_takes_effect_when_compiled(dtype):
    alpha = torch.tensor(0.3, dtype=dtype)
    criterion = CrossEntropyLoss(alpha)
    compiled = torch.compile(criterion, backend="eager")
    z = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    target = torch.arange(4)
    for value in (0.3, 0.9):
        alpha.fill_(value)
        (actual,) = torch.autograd.grad(compiled(z, target), z)
        (expected,) = torch.autograd.grad(cross_entropy(z, target, alpha=value), z)
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)]
)
def test_a_binary_loss_has_the_dtype_of_pytorch_s(dtypes):
    z, y = torch.randn(4).to(dtypes[0]), torch.rand(4).to(dtypes[1])
    loss = binary_cross_entropy_with_logits(z, y, alpha=0.3)
    assert loss.dtype == F.binary_cross_entropy_with_logits(z, y).dtype


def test_the_default_device_does_not_matter():
    """Tensors on CPU, where another device is the one on which tensors are made."""
    z = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    target, labels = torch.tensor([[1, 2, 0], [4, 4, 3]]), torch.rand(2, 5, 3)

    def gradients() -> list[Tensor]:
        losses = [
            cross_entropy(z, target, alpha=0.3),
            binary_cross_entropy_with_logits(z, labels, alpha=0.3),
            torch.compile(CrossEntropyLoss(0.3), backend="eager")(z, target),
        ]
        return [torch.autograd.grad(loss, z)[0] for loss in losses]

    expected = gradients()
    with torch.device("meta"):
        actual = gradients()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("eps", [0.0, 0.1])
def test_weights_that_sum_to_zero_are_nan_as_in_pytorch(dtype, eps, generator):
    z = torch.randn(3, 4, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=dtype)
    for label, head in itertools.product((0, -100), (False, True)):
        y = torch.full((3,), label)
        expected = F.cross_entropy(z, y, weight, label_smoothing=eps)
        if head:
            eye = torch.eye(4, dtype=dtype)
            actual = linear_cross_entropy(z, eye, y, weight=weight, alpha=0.5, label_smoothing=eps)
        else:
            actual = cross_entropy(z, y, weight, alpha=0.5, label_smoothing=eps)
        assert actual.isnan()
        assert expected.isnan()
        gradients = [torch.autograd.grad(loss, z)[0] for loss in (actual, expected)]
        assert torch.equal(gradients[0].nan_to_num(7), gradients[1].nan_to_num(7))
        with torch.no_grad():
            assert cross_entropy(z, y, weight, alpha=0.5, label_smoothing=eps).isnan()
