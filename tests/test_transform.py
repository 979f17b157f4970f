"""The paper's equations, and the primitive for any loss of log p."""

from __future__ import annotations

import mpmath
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from powergrad import log_softmax, paper_smoothing, power_transform, stationary_threshold

ALPHAS = st.one_of(st.sampled_from([0.0, 0.05, 0.3, 1.0]), st.floats(0, 1))


@st.composite
def distributions(draw) -> Tensor:
    seed, size = draw(st.integers(0, 2**32)), draw(st.integers(1, 30))
    spread = draw(st.sampled_from([0.0, 1.0, 10.0, 300.0]))
    z = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.softmax(spread * z, 0)


def by_mpmath(p: Tensor, alpha: float) -> tuple[list[float], float]:
    """The transform and the threshold as printed, in 60 digits. 0^0 is 1, as the paper needs."""
    with mpmath.workdps(60):
        values = [mpmath.mpf(x) for x in p.tolist()]
        total = mpmath.fsum(values)  # the last digits of float64 do not sum to 1
        values = [x / total for x in values]
        powered = [x ** mpmath.mpf(alpha) for x in values]
        norm = mpmath.fsum(powered)
        if alpha == 1:
            entropy = -mpmath.fsum(x * mpmath.log(x) for x in values if x > 0)
            threshold = mpmath.exp(-entropy)
        else:
            threshold = norm ** (1 / (mpmath.mpf(alpha) - 1))
        return [float(x / norm) for x in powered], float(threshold)


@given(distributions(), ALPHAS)
def test_equations_against_mpmath(p, alpha):
    transformed, threshold = by_mpmath(p, alpha)
    assert power_transform(p, alpha).tolist() == pytest.approx(transformed, rel=1e-12, abs=1e-300)
    # (sum p - 1) / (1 - alpha) is the error that float64's p brings in as alpha tends to 1.
    slack = 1e-12 + 1e-15 * len(p) / max(1 - alpha, 1e-6) * (alpha != 1)
    assert float(stationary_threshold(p, alpha)) == pytest.approx(threshold, rel=slack)


def test_threshold_near_alpha_one_is_continuous():
    p = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    near = stationary_threshold(p, 1 - 1e-9)
    assert float(near) == pytest.approx(float(stationary_threshold(p, 1.0)), rel=1e-8)
    half = stationary_threshold(p.float(), 1 - 1e-4)
    assert float(half) == pytest.approx(by_mpmath(p, 1 - 1e-4)[1], rel=1e-3)


def test_equations_along_a_dimension_with_one_alpha_an_example():
    p = torch.rand(3, 4, 5, dtype=torch.float64).softmax(1)
    alpha = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    transformed, threshold = power_transform(p, alpha, 1), stationary_threshold(p, alpha, 1)
    assert threshold.shape == (3, 5)
    for i in range(3):
        for j in range(5):
            row, value = by_mpmath(p[i, :, j], float(alpha[i]))
            assert transformed[i, :, j].tolist() == pytest.approx(row, rel=1e-12)
            assert float(threshold[i, j]) == pytest.approx(value, rel=1e-9)
    per_position = alpha[:, None].expand(3, 5)
    assert torch.equal(transformed, power_transform(p, per_position, 1))
    assert transformed.dtype == p.dtype
    assert power_transform(p.half(), alpha, 1).dtype == torch.float16


def test_paper_smoothing_spreads_over_the_wrong_classes():
    k, eps = 7, 0.1
    z = torch.randn(k, dtype=torch.float64)
    q = torch.full((k,), eps / (k - 1), dtype=torch.float64)
    q[2] = 1 - eps
    ours = F.cross_entropy(z, torch.tensor(2), label_smoothing=paper_smoothing(eps, k))
    assert float(ours) == pytest.approx(float(F.cross_entropy(z, q)), rel=1e-14)
    assert paper_smoothing((k - 1) / k, k) == pytest.approx(1)
    for bad in ({"eps": 0.9}, {"eps": -0.1}, {"num_classes": 1}, {"eps": float("nan")}):
        with pytest.raises(ValueError, match=f"`{next(iter(bad))}`"):
            paper_smoothing(**{"eps": 0.1, "num_classes": 7, **bad})


@given(
    seed=st.integers(0, 2**32),
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    dim=st.integers(-4, 3),
    alpha=st.floats(1e-3, 1),
    per_position=st.booleans(),
)
def test_any_loss_of_log_p(device, seed, shape, dim, alpha, per_position):
    """u - p' sum(u), where u is anything, against the Jacobian of log_softmax(alpha z) / alpha."""
    dim = dim % len(shape)
    g = torch.Generator().manual_seed(seed)
    z = (5 * torch.randn(shape, generator=g, dtype=torch.float64)).to(device).requires_grad_()
    u = torch.randn(shape, generator=g, dtype=torch.float64).to(device)
    exponent = torch.tensor(alpha, dtype=torch.float64)
    if per_position:
        rest = shape[:dim] + shape[dim + 1 :]
        exponent = torch.rand(rest, generator=g, dtype=torch.float64).to(device) * 0.99 + 0.01
    (actual,) = torch.autograd.grad(log_softmax(z, dim, alpha=exponent), z, u)
    inner = exponent.unsqueeze(dim) if per_position else exponent
    (expected,) = torch.autograd.grad(torch.log_softmax(inner * z, dim) / inner, z, u)
    assert (actual - expected).abs().max() <= 1e-13


def test_values_and_options_are_pytorchs(device):
    z = torch.randn(3, 4, device=device)
    for dim, dtype in [(0, None), (1, None), (-1, torch.float64), (0, torch.float64)]:
        ours = log_softmax(z, dim, alpha=0.3, dtype=dtype)
        assert torch.equal(ours, torch.log_softmax(z, dim, dtype))
    half = z.half().requires_grad_()
    wide = log_softmax(half, alpha=0.3, dtype=torch.float32)
    assert wide.dtype == torch.float32
    wide[:, 0].sum().backward()
    assert half.grad is not None
    assert half.grad.dtype == torch.float16
    assert log_softmax(torch.tensor(2.0), alpha=0.3) == 0
    empty = torch.zeros(2, 0, requires_grad=True)
    log_softmax(empty, alpha=0.3).sum().backward()
    assert empty.grad is not None
    assert empty.grad.shape == (2, 0)


def test_sixteen_bits_go_through_the_logits_not_through_rounded_log_p(device):
    # log p near -90 is rounded to 0.5 in bfloat16: p' would be off by some percent.
    z = torch.tensor([[60.0, -30.0, -31.0]], device=device, dtype=torch.bfloat16).requires_grad_()
    log_softmax(z, alpha=0.05)[0, 0].backward()
    expected = -torch.softmax(0.05 * z.detach().double(), -1)
    expected[0, 0] += 1
    assert z.grad is not None
    assert ((z.grad.double() - expected).abs() / expected.abs()).max() <= 2**-8


def test_a_sum_over_many_classes_does_not_overflow():
    p = torch.full((70_000,), 1 / 70_000, dtype=torch.float16)
    actual = power_transform(p, 0.0)
    assert actual.dtype == torch.float16
    torch.testing.assert_close(actual, p, rtol=1e-2, atol=0)
