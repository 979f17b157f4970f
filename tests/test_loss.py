"""What is particular to `cross_entropy`, its module and the binary loss: edges, errors, training.

Values and gradients with every option are in test_gradients.py.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import TOLERANCE
from hypothesis import given, settings
from hypothesis import strategies as st
from references import gradient_of_potential, row_error
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from powergrad import CrossEntropyLoss, _native, binary_cross_entropy_with_logits, cross_entropy

# Sizes and precisions ----------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["kernel", "no kernel"])
def native(request, monkeypatch) -> bool:
    """With and without the C kernel."""
    if request.param and not _native.available():
        pytest.skip("needs the C kernel")
    if not request.param:
        monkeypatch.setattr(_native, "library", lambda: None)
    return request.param


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}])
def test_a_vocabulary_of_128_000(device, generator, native, options):
    """A sum that adds one class after the other would be off by 2e-6."""
    z = torch.randn(3, 128_000, generator=generator).to(device)
    y = torch.tensor([0, 5, 127_999], device=device)
    _, actual = gradients_of(cross_entropy, z, y, alpha=0.3, **options)
    oracle = gradient_of_potential(z, y, 0.3, torch.tensor(1.0), **options)
    assert row_error(actual, oracle, 1) <= 2e-7


# Derivatives of other kinds -----------------------------------------------------------------------

LABELS = torch.tensor([0, 2, 4, 1])


def logits(generator, *shape: int) -> Tensor:
    return 3 * torch.randn(shape or (4, 5), generator=generator, dtype=torch.float64)


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


def test_compiled_with_two_alphas_of_the_same_logits(generator):
    z = logits(generator).requires_grad_()

    def losses(z: Tensor) -> list[Tensor]:
        return [cross_entropy(z, LABELS, alpha=alpha) for alpha in (0.1, 0.9)]

    torch.compiler.reset()
    compiled = torch.compile(losses, backend="aot_eager")(z)
    for value, expected in zip(compiled, losses(z), strict=True):
        (actual,) = torch.autograd.grad(value, z, retain_graph=True)
        assert (actual - torch.autograd.grad(expected, z)[0]).abs().max() <= 1e-14


def test_module_alpha_changes_without_recompilation(device, generator):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    criterion = CrossEntropyLoss(0.3)
    compiled = torch.compile(criterion, fullgraph=True, backend=counter)
    z, y = logits(generator).to(device).requires_grad_(), LABELS.to(device)
    for alpha in (0.3, 0.5, 0.0, 1.0, 0.05):
        criterion.alpha = alpha
        (actual,) = torch.autograd.grad(compiled(z, y), z)
        (expected,) = torch.autograd.grad(cross_entropy(z, y, alpha=alpha), z)
        assert (actual - expected).abs().max() <= 1e-15
    assert counter.frame_count == 1


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
@pytest.mark.parametrize("scaled", [True, False])
def test_under_autocast_with_a_gradient_scaler(device, dtype, scaled):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 10)).to(device)
    x, y = torch.randn(64, 16, device=device), torch.randint(0, 10, (64,), device=device)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(cross_entropy(model(x), y, alpha=0.1), parameters)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**12, enabled=scaled)
    with torch.autocast(device.type, dtype=dtype):
        out = model(x)
        loss = cross_entropy(out, y, alpha=0.1)
    assert (out.dtype, loss.dtype) == (dtype, torch.float32)
    scaler.scale(loss).backward()
    scaler.unscale_(torch.optim.SGD(parameters, lr=0.0))
    for p, grad in zip(parameters, expected, strict=True):
        assert p.grad is not None
        # 16-bit activations and weights: about 8 bits of the largest entry survive.
        assert (p.grad - grad).abs().max() <= 0.02 * grad.abs().max()


def test_the_module_can_be_copied_pickled_and_cast(device, generator):
    weight = torch.arange(1.0, 6.0, dtype=torch.float64)
    module = CrossEntropyLoss(0.3, weight, ignore_index=2).to(device)
    z, y = logits(generator).to(device), LABELS.to(device)
    expected = cross_entropy(z, y, weight.to(device), alpha=0.3, ignore_index=2)
    for copied in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(copied(z, y), expected)
        assert copied.alpha == 0.3
    assert isinstance(module, nn.CrossEntropyLoss)
    assert set(module.state_dict()) == set(nn.CrossEntropyLoss(weight).state_dict())
    assert module.half().alpha == 0.3
    assert "alpha=0.3" in repr(module)


# Edges --------------------------------------------------------------------------------------------


def gradients_of(function, z: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
    leaf = z.clone().requires_grad_()
    value = function(leaf, *args, **kwargs)
    value.sum().backward()
    assert leaf.grad is not None
    return value.detach(), leaf.grad


@pytest.mark.parametrize("alpha", [0.0, 0.3, torch.tensor(0.0), torch.tensor([0.0, 0.3])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_target_mass_on_a_masked_class_and_rows_of_masked_classes_are_as_in_pytorch(
    device, alpha, dtype, native
):
    inf = float("inf")
    z = torch.tensor([[1.0, -inf, 0.0, -inf], [-inf, -inf, 2.0, -inf]], device=device).to(dtype)
    y = torch.tensor([1, 2], device=device)
    alpha = alpha.to(device) if isinstance(alpha, Tensor) else alpha
    value, grad = gradients_of(cross_entropy, z, y, alpha=alpha, reduction="sum")
    plain, plain_grad = gradients_of(F.cross_entropy, z, y, reduction="sum")
    assert value == plain == inf
    assert torch.equal(grad.isfinite(), plain_grad.isfinite())
    value, grad = gradients_of(cross_entropy, torch.full_like(z, -inf), y, alpha=alpha)
    plain, plain_grad = gradients_of(F.cross_entropy, torch.full_like(z, -inf), y)
    assert value.isnan()
    assert torch.equal(grad.isnan(), plain_grad.isnan())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_stay_in_their_row(device, native, bad):
    z = torch.zeros(2, 3, device=device)
    z[0, 1] = bad
    y = torch.tensor([0, 1], device=device)
    value, grad = gradients_of(cross_entropy, z, y, alpha=0.3, reduction="none")
    plain, plain_grad = gradients_of(F.cross_entropy, z, y, reduction="none")
    assert torch.equal(value.isnan(), plain.isnan())
    assert grad[0].isnan().all()
    assert grad[1].tolist() == pytest.approx([1 / 3, -2 / 3, 1 / 3], rel=1e-6)
    assert plain_grad[0].isnan().all()


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
    assert all(map(torch.equal, ours, plain))


# What calls in the field had wrong ----------------------------------------------------------------


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("given", [torch.float32, torch.float16])
def test_autocast_does_not_round_a_smoothed_and_weighted_loss(given, low, native):
    """A product with the weights is one that autocast makes in 16 bits, where it overflows."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(4, 32_000, generator=generator).to(given).requires_grad_()
    weight, target = torch.rand(32_000, generator=generator), torch.arange(4)
    options = {"label_smoothing": 0.1, "reduction": "none"}
    expected = F.cross_entropy(z.detach().float(), target, weight, **options)
    with torch.autocast("cpu", dtype=low):
        loss = cross_entropy(z, target, weight, alpha=0.3, **options)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("eps", [0.0, 0.1])
def test_a_label_of_one_byte_is_not_taken_for_a_negative_ignore_index(device, eps):
    """As one byte, -100 is 156."""
    z = torch.randn(4, 200, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    labels = torch.tensor([156, 3, 199, 156], dtype=torch.uint8, device=device)
    for create_graph in (False, True):
        results = []
        for target in (labels, labels.long()):
            loss = cross_entropy(z, target, alpha=0.3, label_smoothing=eps)
            results.append([loss, *torch.autograd.grad(loss, z, create_graph=create_graph)])
        torch.testing.assert_close(*results)


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
