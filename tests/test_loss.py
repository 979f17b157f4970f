"""What is particular to `cross_entropy`, its module and the binary loss: edges, errors, training.

Values and gradients with every option are in test_gradients.py.
"""

from __future__ import annotations

import copy
import gc
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
from torch.utils.checkpoint import checkpoint

from powergrad import (
    CrossEntropyLoss,
    binary_cross_entropy_with_logits,
    cross_entropy,
    kernels,
    log_softmax,
)


@pytest.fixture(params=[True, False], ids=["kernel", "no kernel"])
def native(request, monkeypatch) -> bool:
    """With and without the C kernel."""
    if request.param and not kernels.available():
        pytest.skip("needs the C kernel")
    if not request.param:
        monkeypatch.setattr(kernels, "library", lambda: None)
    return request.param


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}])
def test_a_vocabulary_of_128_000(device, generator, native, options):
    """A sum that adds one class after the other would be off by 2e-6."""
    z = torch.randn(3, 128_000, generator=generator).to(device)
    y = torch.tensor([0, 5, 127_999], device=device)
    _, actual = gradients_of(cross_entropy, z, y, alpha=0.3, **options)
    oracle = gradient_of_potential(z, y, 0.3, torch.tensor(1.0), **options)
    assert row_error(actual, oracle, 1) <= 2e-7


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


@pytest.mark.parametrize("sign", [1, -1])
def test_a_soft_cap_is_relatively_exact(native, sign):
    # The loss of (x, 0) with the less likely class as its target is |z|, where that is above 20.
    x = sign * torch.logspace(1.5, 7.5, 3000, dtype=torch.float64).float()
    z = torch.stack([x, torch.zeros_like(x)], 1).requires_grad_()
    loss = cross_entropy(z, (x > 0).long(), alpha=0.3, softcap=1e6, reduction="none")
    expected = 1e6 * torch.tanh(x.double().abs() / 1e6)
    torch.testing.assert_close(loss.double(), expected, rtol=3e-7, atol=0)


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


def method(generator, n: int = 12, c: int = 7) -> tuple[Tensor, Tensor]:
    target = torch.randint(0, c, (n,), generator=generator)
    return logits(generator, n, c).requires_grad_(), target


def same_training(z: Tensor, ours: Tensor, theirs: Tensor, value: bool = True) -> None:
    """The same value, unless it is not meant to be, and the same gradient."""
    if value:
        torch.testing.assert_close(ours, theirs)
    actual, expected = (
        torch.autograd.grad(loss, z, retain_graph=True)[0] for loss in (ours, theirs)
    )
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("beta", [0.5, 0.7, 2.0])
def test_gem_with_its_linear_h_is_pgt_at_alpha_1_over_beta(generator, beta):
    """Li et al., arXiv 2408.16673: the gap of log f between the data and q = softmax(z / beta)."""
    z, y = method(generator)
    log_f = z.log_softmax(1)
    q = (z / beta).softmax(1).detach()
    gaps = log_f.gather(1, y[:, None]) - log_f
    same_training(z, cross_entropy(z, y, alpha=1 / beta), -(q * gaps).sum(1).mean(), value=False)


@pytest.mark.parametrize("alpha", [1.0, 0.3])
def test_dynamic_fine_tuning_is_a_gate(generator, alpha):
    """Wu et al., arXiv 2508.05629: each token's loss times its own probability, held constant."""
    z, y = method(generator)
    p = z.softmax(1).gather(1, y[:, None]).squeeze(1).detach()
    ours = cross_entropy(z, y, alpha=alpha, gate=lambda rows: rows.p_target)
    same_training(z, ours, (p * cross_entropy(z, y, alpha=alpha, reduction="none")).mean())
    if alpha == 1:
        same_training(z, ours, -(p * z.log_softmax(1).gather(1, y[:, None]).squeeze(1)).mean())


def test_the_weights_of_a_focal_loss_are_a_gate(generator):
    """Lin et al., arXiv 1708.02002, with its modulating factor held constant."""
    z, y = method(generator)
    log_p = z.log_softmax(1).gather(1, y[:, None]).squeeze(1)
    focal = -((1 - log_p.exp()) ** 2).detach() * log_p
    gate = lambda rows: (1 - rows.p_target) ** 2  # noqa: E731
    same_training(z, cross_entropy(z, y, alpha=1.0, gate=gate, reduction="sum"), focal.sum())


def test_label_smoothing_is_that_of_its_paper(generator):
    """Szegedy et al., arXiv 1512.00567: q = (1 - eps) onehot + eps / K; the gradient is p' - q."""
    z, y = method(generator)
    q = 0.9 * F.one_hot(y, 7) + 0.1 / 7
    loss = cross_entropy(z, y, alpha=0.4, label_smoothing=0.1, reduction="sum")
    expected = (0.4 * z).softmax(1) - q
    torch.testing.assert_close(torch.autograd.grad(loss, z)[0], expected.detach())


@pytest.mark.parametrize("weighted", [False, True])
def test_z_loss_is_that_of_its_papers(generator, weighted):
    """Zoph et al., arXiv 2202.08906; Chowdhery et al., arXiv 2204.02311: lambda log^2 Z, a mean."""
    z, y = method(generator)
    w = torch.rand(7, generator=generator, dtype=torch.float64) + 0.5 if weighted else None
    by_hand = F.cross_entropy(z, y, w) + 1e-2 * z.logsumexp(1).square().mean()
    same_training(z, cross_entropy(z, y, w, alpha=1.0, z_loss=1e-2), by_hand)
    # At another alpha, the gradient is the plain one at alpha z, as for every other term.
    u = (0.25 * z).detach().requires_grad_()
    plain = F.cross_entropy(u, y, w) + 1e-2 * u.logsumexp(1).square().mean()
    (expected,) = torch.autograd.grad(plain, u)
    (actual,) = torch.autograd.grad(cross_entropy(z, y, w, alpha=0.25, z_loss=1e-2), z)
    torch.testing.assert_close(actual, expected)


def test_statistics_of_rows_add_up(generator):
    z, y = method(generator)
    y[3] = -100
    _, rows = cross_entropy(z, y, alpha=0.3, return_stats=True)
    p = z.detach().softmax(1)
    expected = {
        "loss": F.cross_entropy(z, y, reduction="none"),
        "lse": z.logsumexp(1),
        "entropy": torch.distributions.Categorical(p).entropy(),
        "prediction": z.argmax(1),
        "correct": z.argmax(1) == y,
        "counted": y != -100,
        "p_target": p.gather(1, y.clamp(min=0)[:, None]).squeeze(1) * (y != -100),
    }
    assert set(expected) == set(rows.NAMES)
    for name, values in expected.items():
        assert not getattr(rows, name).requires_grad
        torch.testing.assert_close(getattr(rows, name), values.detach())
    halves = [
        cross_entropy(z[k], y[k], alpha=0.3, return_stats=True)[1] for k in (slice(5), slice(5, 12))
    ]
    assert sum(half.correct.sum() for half in halves) == rows.correct.sum()
    assert "12" in repr(rows)


@pytest.mark.parametrize("weight", [None, torch.ones(5, dtype=torch.float64)])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_a_mean_of_no_rows_may_be_zero(generator, native, weight, z_loss):
    """PyTorch's is NaN. Either way it is connected to the graph, and the gradients are 0."""
    ignored = torch.full((4,), -100)
    for dtype in (torch.float64, torch.float32):
        z = logits(generator).to(dtype).requires_grad_()
        w = None if weight is None else weight.to(dtype)
        for zero_empty in (False, True):
            options: Any = {"alpha": 0.3, "zero_empty": zero_empty, "z_loss": z_loss}
            loss = cross_entropy(z, ignored, w, **options)
            assert loss == 0 if zero_empty else loss.isnan()
            assert not torch.autograd.grad(loss, z)[0].any()


def test_bad_options_raise(generator):
    z, y = logits(generator), LABELS
    for name, value in (
        ("softcap", 0.0),
        ("logit_scale", -1.0),
        ("z_loss", -0.1),
        ("token_weight", torch.ones(3)),
        ("gate", lambda rows: torch.ones(3)),
        ("gate", lambda rows: 1.0),
    ):
        with pytest.raises(ValueError, match=name):
            cross_entropy(z, y, alpha=0.3, **dict[str, Any]({name: value}))
    with pytest.raises(ValueError, match="alpha"):
        cross_entropy(z, y, alpha=0.0, z_loss=0.1)
    with pytest.raises(ValueError, match="softcap"):
        CrossEntropyLoss(0.3, softcap=-1.0)


def test_the_module_takes_every_option(generator):
    z, y = method(generator)
    options = {
        "softcap": 5.0,
        "logit_scale": 2.0,
        "z_loss": 0.1,
        "gate": lambda rows: rows.p_target,
    }
    tokens = torch.rand(12, generator=generator)
    module = CrossEntropyLoss(0.3, **options, zero_empty=True)
    expected = cross_entropy(z, y, alpha=0.3, **options, token_weight=tokens)
    same_training(z, module(z, y, tokens), expected)
    assert "softcap=5.0" in repr(module)


def test_lazily_negated_logits_and_weights(generator, native):
    z = logits(generator, 4, 5).float()
    lazy = torch.ops.aten._neg_view(-z).requires_grad_()
    assert lazy.is_neg()
    weight = torch.rand(5, generator=generator)
    for w, lazy_w in ((None, None), (weight, torch.ops.aten._neg_view(-weight))):
        actual, expected = (
            torch.autograd.grad(cross_entropy(leaf, LABELS, given, alpha=0.3), leaf)[0]
            for leaf, given in ((lazy, lazy_w), (z.clone().requires_grad_(), w))
        )
        torch.testing.assert_close(actual, expected)


def test_an_alpha_that_changes_before_the_backward_pass_is_noticed(generator):
    z = logits(generator).requires_grad_()
    for many in (False, True):
        alpha = torch.full((4,), 0.3) if many else torch.tensor(0.3)
        for loss in (cross_entropy(z, LABELS, alpha=alpha), -log_softmax(z, alpha=alpha).sum()):
            alpha.fill_(1.0)
            with pytest.raises(RuntimeError, match="inplace"):
                loss.backward(create_graph=True)
            alpha.fill_(0.3)


def test_checkpointed_losses_keep_no_memory(generator):
    z = torch.randn(64, 1000, generator=generator, requires_grad=True)
    y = torch.randint(0, 1000, (64,), generator=generator)

    def large() -> int:
        """The tensors in memory that are as large as the logits, also those kept on a `ctx`."""
        gc.collect()
        return sum(type(o) is Tensor and o.numel() >= z.numel() for o in gc.get_objects())

    for loss in (cross_entropy, lambda z, y, alpha: log_softmax(z, alpha=alpha).sum()):
        before = large()
        value = checkpoint(loss, z, y, alpha=0.3, use_reentrant=False)
        assert large() == before
        (actual,) = torch.autograd.grad(value, z)
        expected = torch.autograd.grad(loss(z, y, alpha=0.3), z)[0]
        torch.testing.assert_close(actual, expected)


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
