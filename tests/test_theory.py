"""Section 4 of the paper as properties of random distributions, and the places where it stops.

First what holds, as hypothesis properties in float64. A sentence of the paper that does not hold in
general has a counterexample next to it, under a comment that quotes it. `docs/theory.md` restates
the section and lists those sentences.

`P` is a distribution, `P'` its transform, `t` the stationary threshold, `y` the true class.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mpmath
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from mpmath import mp
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from powergrad import log_softmax, power_transform, stationary_threshold

# What is drawn -----------------------------------------------------------------------------------


def array(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@st.composite
def logits(draw: st.DrawFn, max_classes: int = 200, zeros: bool = False) -> Tensor:
    """Logits from uniform to nearly one-hot, with ties; with `zeros`, some classes at -inf.

    Finite ones span 600 at most, so that every probability is a normal float64.
    """
    classes = draw(st.integers(2, max_classes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    z = torch.randn(classes, generator=generator, dtype=torch.float64)
    z = z * draw(st.sampled_from([0.0, 1e-9, 0.1, 1.0, 5.0, 100.0]))
    if draw(st.booleans()):
        z = z.round()  # ties
    z[draw(st.integers(0, classes - 1))] += draw(st.sampled_from([0.0, 0.0, 3.0, 30.0, 300.0]))
    z = (z - z.max()).clamp(min=-600)
    if zeros:
        masked = torch.rand(classes, generator=generator) < draw(st.sampled_from([0.2, 0.8, 1.0]))
        masked[draw(st.integers(0, classes - 1))] = False
        z = z.masked_fill(masked, -torch.inf)
    return z


def distributions(max_classes: int = 200, zeros: bool = False) -> st.SearchStrategy[Tensor]:
    drawn = logits(max_classes)
    return (drawn | logits(max_classes, zeros=True) if zeros else drawn).map(
        lambda z: z.softmax(-1)
    )


alphas = st.sampled_from([0.0, 0.05, 0.3, 1.0]) | st.floats(0, 1)
# Where a strict inequality is meant, alpha stays away from 1 by more than rounding.
alphas_below_one = st.sampled_from([0.0, 0.05, 0.3]) | st.floats(0, 0.99)
alphas_inside = st.floats(0.01, 0.99)


def sides(p: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Masks of the classes below and above the threshold, by more than rounding."""
    t = stationary_threshold(p, alpha)
    return p < t * (1 - 1e-9), p > t * (1 + 1e-9)


def gradient(z: Tensor, target: int | Tensor, alpha: float) -> Tensor:
    """dL/dz of cross-entropy through the library; target a class or probabilities."""
    z = z.clone().requires_grad_()
    log_p = log_softmax(z, alpha=alpha)
    loss = -log_p[target] if isinstance(target, int) else -(target * log_p).sum()
    (doubled,) = torch.autograd.grad(2 * loss, z)  # an upstream gradient that is not 1
    return doubled / 2


def hessian(function: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    return torch.func.jacrev(torch.func.grad(function))(z)


def strictly_between(p: Tensor) -> bool:
    """Neither flat nor one-hot on its support, by more than rounding."""
    support = p[p > 0]
    return bool(support.min() > 1e-6 and support.max() > 1.01 * support.min())


def escort(p: list[Any], alpha: Any) -> tuple[Any, Any]:
    """`sum p^alpha` and `P'` in mpmath, with 0^alpha = 0 for alpha > 0."""
    powered = [x**alpha for x in p]
    return mpmath.fsum(powered), [x / mpmath.fsum(powered) for x in powered]


# Section 3: the transform, its primitive, its potential ------------------------------------------


@given(logits() | logits(zeros=True), st.floats(1e-6, 1))
def test_transform_is_the_softmax_of_scaled_logits(z: Tensor, alpha: float) -> None:
    # rtol: alpha * z rounds at up to 600 * 1.1e-16.
    expected = torch.softmax(alpha * z, -1)
    torch.testing.assert_close(power_transform(z.softmax(-1), alpha), expected, rtol=1e-12, atol=0)


@given(logits(), alphas, st.data())
def test_gradient_is_transform_minus_target(z: Tensor, alpha: float, data: st.DataObject) -> None:
    y = data.draw(st.integers(0, len(z) - 1))
    expected = power_transform(z.softmax(-1), alpha) - F.one_hot(torch.tensor(y), len(z))
    torch.testing.assert_close(gradient(z, y, alpha), expected, rtol=0, atol=1e-12)


@given(logits(max_classes=12), st.floats(0.01, 0.99), st.data())
def test_second_derivative_is_that_of_the_potential(
    z: Tensor, alpha: float, data: st.DataObject
) -> None:
    # Of (1 / alpha) CE(alpha z, q): alpha (diag p' - p' p'^T), positive semi-definite.
    y = data.draw(st.integers(0, len(z) - 1))
    actual = hessian(lambda z: -log_softmax(z, alpha=alpha)[y], z)
    p = torch.softmax(alpha * z, -1)
    torch.testing.assert_close(actual, alpha * (p.diag() - p.outer(p)), rtol=0, atol=1e-12)


@given(logits(max_classes=20), st.data())
def test_at_alpha_zero_the_potential_is_linear(z: Tensor, data: st.DataObject) -> None:
    # (1 / alpha) (CE(alpha z, q) - log C) tends to mean(z) - z_y: no stationary point.
    y = data.draw(st.integers(0, len(z) - 1))
    linear = z.clone().requires_grad_()
    (linear.mean() - linear[y]).backward()
    torch.testing.assert_close(gradient(z, y, 0.0), linear.grad, rtol=0, atol=1e-14)
    assert (hessian(lambda z: -log_softmax(z, alpha=0.0)[y], z) == 0).all()


# Section 4.1: lemma 1 ----------------------------------------------------------------------------


@given(distributions(max_classes=20, zeros=True), alphas)
def test_threshold_is_exp_of_minus_renyi_entropy(p: Tensor, alpha: float) -> None:
    assume(alpha > 1e-300)  # p^alpha of a subnormal alpha is 1 to rounding, but 0^alpha is not
    with mp.workdps(60):
        support = [mpmath.mpf(x) for x in p.tolist() if x > 0]
        order = mpmath.mpf(alpha)
        entropy = (
            -mpmath.fsum(x * mpmath.log(x) for x in support)
            if alpha == 1
            else mpmath.log(mpmath.fsum(x**order for x in support) / sum(support)) / (1 - order)
        )
        expected = float(mpmath.exp(-entropy))
    assert stationary_threshold(p, alpha).item() == pytest.approx(expected, rel=1e-11)


@given(distributions(zeros=True), alphas_below_one)
def test_lemma_1(p: Tensor, alpha: float) -> None:
    moved = power_transform(p, alpha)
    below, above = sides(p, alpha)
    assert (moved < p)[above].all()
    assert (moved > p)[below & (p > 0)].all()
    assert (moved >= p)[below].all()


@given(distributions(zeros=True), alphas)
def test_transform_is_a_geometric_mean_with_the_threshold(p: Tensor, alpha: float) -> None:
    # p' = p^alpha t^(1 - alpha): lemma 1 in one line, and p' never passes t.
    t = stationary_threshold(p, alpha)
    moved = power_transform(p, alpha)
    torch.testing.assert_close(moved, p**alpha * t ** (1 - alpha), rtol=1e-12, atol=0)
    rounding = 1e-12 * moved
    assert (torch.minimum(p, t) <= moved + rounding).all()
    assert (moved - rounding <= torch.maximum(p, t)).all()


@given(distributions(), st.floats(0, 0.99))
def test_a_class_at_the_threshold_does_not_move(rest: Tensor, alpha: float) -> None:
    # A class whose odds are the threshold of all others sits at the threshold of the whole.
    odds = stationary_threshold(rest, alpha)
    at = odds / (1 + odds)
    p = torch.cat([at[None], (1 - at) * rest])
    torch.testing.assert_close(stationary_threshold(p, alpha), at, rtol=1e-11, atol=0)
    torch.testing.assert_close(power_transform(p, alpha)[0], at, rtol=1e-12, atol=0)


@given(distributions(zeros=True), alphas)
def test_threshold_lies_between_1_over_c_and_the_highest(p: Tensor, alpha: float) -> None:
    t = stationary_threshold(p, alpha).item()
    assert 1 / len(p) * (1 - 1e-12) <= t <= p.max().item() * (1 + 1e-12)
    if alpha > 0.01 and strictly_between(p):
        assert 1 / len(p) < t < p.max()


# "p_i' < p_i, if p_i > (sum p_j^alpha)^(1 / (alpha - 1))", for 0 <= alpha <= 1.
def test_lemma_1_is_not_strict_at_alpha_one() -> None:
    # The exponent is 1/0. With its limit exp(-H) as the threshold, nothing moves.
    p = array(0.7, 0.2, 0.1)
    assert p[0] > stationary_threshold(p, 1.0)
    torch.testing.assert_close(power_transform(p, 1.0), p, rtol=1e-15, atol=0)


# "The stationary threshold is that value of p_i that does not change after the transformation."
def test_zero_does_not_change_either() -> None:
    p = array(0.8, 0.2, 0.0)
    assert power_transform(p, 0.5)[2] == p[2] == 0 < stationary_threshold(p, 0.5)


def test_uniform_and_one_hot_do_not_change() -> None:
    uniform, one_hot, half = torch.full((7,), 1 / 7).double(), array(0, 1, 0), array(0.5, 0.5, 0)
    for p in (uniform, one_hot, half):
        torch.testing.assert_close(power_transform(p, 0.3), p)
        torch.testing.assert_close(stationary_threshold(p, 0.3), p.max())


# Section 4.1: proposition 1 ----------------------------------------------------------------------


@given(distributions(zeros=True))
def test_proposition_1(p: Tensor) -> None:
    uniform = torch.full_like(p, 1 / len(p))
    torch.testing.assert_close(power_transform(p, 0.0), uniform, rtol=1e-15, atol=0)
    torch.testing.assert_close(stationary_threshold(p, 0.0), uniform[0], rtol=1e-12, atol=0)


@given(distributions())
def test_limits_of_alpha(p: Tensor) -> None:
    near_zero, near_one = 1e-13, 1 - 1e-13
    # |log p| is at most 605 here, so p^alpha is within 605e-13 of its limit.
    uniform = torch.full_like(p, 1 / len(p))
    torch.testing.assert_close(power_transform(p, near_zero), uniform, rtol=1e-9, atol=0)
    torch.testing.assert_close(power_transform(p, near_one), p, rtol=1e-9, atol=0)
    entropy = torch.special.entr(p).sum()
    for alpha in (near_one, 1.0):
        torch.testing.assert_close(stationary_threshold(p, alpha), (-entropy).exp())
    assert stationary_threshold(p, near_zero).item() == pytest.approx(1 / len(p), rel=1e-9)


# "if alpha=0, then all values of p_i' are 1/C" takes 0^0 as 1; it is not the limit of alpha to 0.
def test_proposition_1_is_a_jump_where_p_is_zero() -> None:
    p = array(0.8, 0.2, 0.0)
    torch.testing.assert_close(power_transform(p, 1e-13), array(0.5, 0.5, 0.0))
    torch.testing.assert_close(power_transform(p, 0.0), array(1, 1, 1) / 3)
    assert stationary_threshold(p, 1e-13).item() == pytest.approx(1 / 2)
    assert stationary_threshold(p, 0.0).item() == pytest.approx(1 / 3)
    # The backward pass takes the limit: a class masked with -inf keeps a gradient of 0.
    torch.testing.assert_close(gradient(p.log(), 0, 0.0), array(-0.5, 0.5, 0.0))


# Section 4.1: theorem 1 --------------------------------------------------------------------------


@given(distributions(zeros=True), alphas, alphas)
def test_theorem_1(p: Tensor, one: float, other: float) -> None:
    low, high = sorted((one, other))
    t_low, t_high = stationary_threshold(p, low), stationary_threshold(p, high)
    assert t_low <= t_high * (1 + 1e-12)
    if high - low > 0.01 and strictly_between(p):
        assert t_low < t_high


def normalised(p: Tensor) -> list[Any]:
    exact = [mpmath.mpf(x) for x in p.tolist()]
    return [x / mpmath.fsum(exact) for x in exact]


def paper_derivative(p: list[Any], alpha: Any) -> tuple[Any, Any]:
    """Both lines of the paper's dt/dalpha, for alpha inside (0, 1)."""
    total, log = mpmath.fsum(x**alpha for x in p), mpmath.log
    t = total ** (1 / (alpha - 1))
    first = mpmath.fsum(x**alpha * log(x) for x in p) / ((alpha - 1) * total)
    inner = (alpha - 1) * mpmath.fsum(x**alpha * log(x**alpha) for x in p) / total
    return (
        t * (first - log(total) / (alpha - 1) ** 2),
        t * (inner - alpha * log(total)) / (alpha * (alpha - 1) ** 2),
    )


@given(distributions(max_classes=8), alphas_inside)
def test_derivative_of_the_threshold(p: Tensor, alpha: float) -> None:
    with mp.workdps(50):
        exact, order = normalised(p), mpmath.mpf(alpha)
        slope = mpmath.diff(lambda a: escort(exact, a)[0] ** (1 / (a - 1)), order)
        first, second = paper_derivative(exact, order)
        total, flat = escort(exact, order)
        # Ours: dt/dalpha = t KL(P' || P) / (1 - alpha)^2, a proof of theorem 1 in itself.
        kl = mpmath.fsum(x * mpmath.log(x / y) for x, y in zip(flat, exact, strict=True))
        ours = total ** (1 / (order - 1)) * kl / (1 - order) ** 2
        for derivative in (first, second, ours):
            assert mpmath.almosteq(derivative, slope, rel_eps=1e-15, abs_eps=1e-20)


@given(distributions(max_classes=50), st.floats(0.05, 0.95))
def test_derivative_of_the_library_threshold(p: Tensor, alpha: float) -> None:
    assume(p.min() > 1e-20)
    h = 1e-6
    slope = (stationary_threshold(p, alpha + h) - stationary_threshold(p, alpha - h)) / (2 * h)
    flat = power_transform(p, alpha)
    kl = torch.special.xlogy(flat, flat / p).sum()
    expected = stationary_threshold(p, alpha) * kl / (1 - alpha) ** 2
    # A central difference: h^2 times a third derivative, which grows as |log p|^3 <= 1e5.
    torch.testing.assert_close(slope, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("probabilities", [(0.9, 0.1), (0.5, 0.3, 0.2), (0.97, 0.01, 0.01, 0.01)])
def test_theorem_1_at_its_ends(probabilities: tuple[float, ...]) -> None:
    # The proof divides by alpha and by alpha - 1. At the ends the slope is KL(U || P) / C and
    # exp(-H) Var(log p) / 2.
    p, h = array(*probabilities), 1e-6
    at_zero = (stationary_threshold(p, h) - stationary_threshold(p, 0.0)) / h
    kl = (1 / len(p) * (1 / (len(p) * p)).log()).sum()
    torch.testing.assert_close(at_zero, kl / len(p), rtol=1e-4, atol=0)
    at_one = (stationary_threshold(p, 1.0) - stationary_threshold(p, 1 - h)) / h
    mean = (p * p.log()).sum()
    variance = (p * (p.log() - mean) ** 2).sum()
    torch.testing.assert_close(at_one, mean.exp() * variance / 2, rtol=1e-4, atol=0)


@given(distributions(), alphas)
def test_log_sum_and_jensen_bounds(p: Tensor, alpha: float) -> None:
    powered = p**alpha
    total = powered.sum()
    left = torch.special.xlogy(powered, powered).sum()
    assert left >= total * (total / len(p)).log() - 1e-12 * total
    assert total.log() <= (1 - alpha) * math.log(len(p)) + 1e-12


def slope_and_claimed_bound(p: Tensor, alpha: float) -> tuple[Any, Any]:
    """dt/dalpha, and what the paper's proof puts below it."""
    exact, order = normalised(p), mpmath.mpf(alpha)
    total, _ = escort(exact, order)
    gap = (1 - order) * mpmath.log(len(exact)) - mpmath.log(total)
    return (
        paper_derivative(exact, order)[0],
        total ** (1 / (order - 1)) * gap / (order * (1 - order) ** 2),
    )


# "Substituting (lower_bound1) in (derivative), we get: dt/dalpha >= [...]"
def test_proof_of_theorem_1_turns_an_inequality_round() -> None:
    # The log-sum bound from below is multiplied by alpha - 1 < 0.
    slope, claimed = slope_and_claimed_bound(array(0.9, 0.1), 0.5)
    assert 0.23 < slope < 0.24
    assert 0.55 < claimed < 0.56


@given(distributions(max_classes=8), alphas_inside)
def test_the_bound_of_that_proof_is_an_upper_one(p: Tensor, alpha: float) -> None:
    with mp.workdps(50):
        slope, claimed = slope_and_claimed_bound(p, alpha)
        rounding = mpmath.mpf(10) ** -40
        assert -rounding <= slope <= claimed + rounding


# Section 4.1: order, and smoothing ---------------------------------------------------------------


@given(distributions(zeros=True), alphas)
def test_order_is_preserved(p: Tensor, alpha: float) -> None:
    ordered = p.sort().values
    moved = power_transform(ordered, alpha)
    rounding = 1e-15 * moved[1:]  # pow differs by a unit between vector lanes and the rest
    assert (moved.diff() >= -rounding).all()
    assert (moved.diff() <= rounding)[ordered.diff() == 0].all()
    if alpha > 0.01:
        assert (moved.diff() > 0)[ordered[1:] > ordered[:-1] * (1 + 1e-9)].all()


@given(distributions(max_classes=12), alphas_inside)
def test_jacobian_of_the_transform(p: Tensor, alpha: float) -> None:
    assume(p.min() > 1e-100)  # 1 / p below overflows no float
    actual = torch.func.jacrev(lambda p: power_transform(p, alpha))(p)
    flat = power_transform(p, alpha)
    expected = alpha * flat[:, None] * (torch.eye(len(p)) - flat) / p
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
    assert (actual.diag() >= 0).all()


# "the derivative of PGT function with respect to the true probabilities is non-negative which in
# turn means that the transformation is an order-preserving map"
def test_order_is_preserved_within_one_distribution_only() -> None:
    # Non-negative by its own probability, negative by the others'. So the order holds between
    # the classes of one distribution, where the denominator is common, and not between two.
    p, r = array(0.30, 0.70, 0.00), array(0.32, 0.34, 0.34)
    assert p[0] < r[0]
    assert power_transform(p, 0.5)[0] > power_transform(r, 0.5)[0]
    jacobian = torch.func.jacrev(lambda p: power_transform(p, 0.5))(r)
    assert (jacobian[~torch.eye(3, dtype=torch.bool)] < 0).all()


def test_order_collapses_at_alpha_zero() -> None:
    assert power_transform(array(0.7, 0.2, 0.1), 0.0).unique().numel() == 1


@given(distributions(zeros=True), alphas, alphas)
def test_smaller_alpha_is_closer_to_uniform(p: Tensor, one: float, other: float) -> None:
    low, high = sorted((one, other))
    flat, sharp = power_transform(p, low), power_transform(p, high)
    # Majorisation: the k likeliest classes together hold less. Every entropy then rises.
    held = [q.sort(descending=True).values.cumsum(0) for q in (flat, sharp)]
    assert (held[0] <= held[1] + 1e-12).all()
    assert torch.special.entr(flat).sum() >= torch.special.entr(sharp).sum() - 1e-12
    # The other reading of theorem 1: the threshold of P' itself, at any order.
    for order in (0.3, 1.0):
        assert stationary_threshold(flat, order) <= stationary_threshold(sharp, order) + 1e-12


def test_a_class_may_pass_uniform_on_its_way_there() -> None:
    # The distribution flattens steadily as alpha falls; a single class need not move steadily.
    p = array(0.899, 0.1, 0.001)
    path = [power_transform(p, alpha)[1].item() for alpha in (1.0, 0.4, 0.1, 0.0)]
    assert path[0] < path[1] < path[3] < path[2]


# Section 4.2: the derivative at each logit -------------------------------------------------------


def weigh(z: Tensor, y: int, alpha: float) -> tuple[Tensor, Tensor, Tensor]:
    """|dL/dz| without and with PGT, and whether they differ by more than rounding near 1."""
    plain, pgt = gradient(z, y, 1.0), gradient(z, y, alpha)
    p = z.softmax(-1)
    return plain.abs(), pgt.abs(), (power_transform(p, alpha) - p).abs() > 1e-14


@given(logits(), alphas_below_one, st.data())
def test_wrong_class_predicted(z: Tensor, alpha: float, data: st.DataObject) -> None:
    p = z.softmax(-1)
    below, above = sides(p, alpha)
    assume(below.any())
    y = data.draw(st.sampled_from(below.nonzero().flatten().tolist()))
    j = int(p.argmax())
    plain, pgt, differ = weigh(z, y, alpha)
    assert pgt[y] <= plain[y]  # (i)a
    assert pgt[y] < plain[y] or not differ[y]
    assert pgt[j] <= plain[j] + 1e-15  # (i)b
    assert pgt[j] < plain[j] or not (above[j] and differ[j])
    below[y] = False
    assert (pgt > plain)[below].all()  # (i)c


@given(logits(), alphas_below_one)
def test_correct_class_predicted(z: Tensor, alpha: float) -> None:
    p = z.softmax(-1)
    y = int(p.argmax())
    below, above = sides(p, alpha)
    plain, pgt, differ = weigh(z, y, alpha)
    assert pgt[y] >= plain[y] - 1e-15  # (ii)a
    assert pgt[y] > plain[y] or not (above[y] and differ[y])
    assert (pgt > plain)[below].all()  # (ii)b


@given(logits(), alphas, st.data())
def test_range_of_the_derivatives(z: Tensor, alpha: float, data: st.DataObject) -> None:
    # For one example with a hard target: [min over i != y of p'_i, 1 - p'_y], and the absolute
    # values sum to 2 (1 - p'_y).
    y = data.draw(st.integers(0, len(z) - 1))
    size = gradient(z, y, alpha).abs()
    p = power_transform(z.softmax(-1), alpha)
    others = p[torch.arange(len(p)) != y]
    assert size.min().item() == pytest.approx(others.min().item(), rel=1e-11, abs=1e-15)
    assert size.max().item() == pytest.approx(others.sum().item(), rel=1e-11, abs=1e-14)
    assert size.sum().item() == pytest.approx(2 * others.sum().item(), rel=1e-11, abs=1e-14)


# "With inclusion of PGT in the last layer, the range of |dL/dz_i| becomes [delta+, epsilon-] where,
# delta+ > delta and epsilon- < epsilon"
def test_range_does_not_shrink_at_both_ends() -> None:
    # A correct prediction: the largest rises.
    size = {alpha: gradient(array(0.8, 0.15, 0.05).log(), 0, alpha).abs() for alpha in (1.0, 0.5)}
    assert size[0.5].max() > size[1.0].max()
    # A wrong one whose other classes are all above the threshold: the smallest falls.
    for p, y in ((array(0.1, 0.9), 0), (array(0.01, 0.33, 0.33, 0.33), 0)):
        size = {alpha: gradient(p.log(), y, alpha).abs() for alpha in (1.0, 0.5)}
        assert size[0.5].min() < size[1.0].min()


@given(logits(max_classes=10), st.floats(0.1, 1), st.data())
def test_range_over_all_logits_is_unchanged(z: Tensor, alpha: float, data: st.DataObject) -> None:
    # Each ordinary gradient is PGT's at other logits, z / alpha, so for alpha > 0 the values that
    # |dL/dz_i| can take are the same.
    y = data.draw(st.integers(0, len(z) - 1))
    torch.testing.assert_close(
        gradient(z, y, 1.0), gradient(z / alpha, y, alpha), atol=1e-12, rtol=0
    )


# "(i)(a) Let, i-th class be the class for which the network assigns low probability, but it is the
# true class, then p_i < p_th"
def test_true_class_of_a_wrong_prediction_may_be_above_the_threshold() -> None:
    p, y, alpha = array(0.45, 0.44, 0.11), 1, 0.5
    assert p.argmax() != y
    assert p[y] > stationary_threshold(p, alpha)
    # Its derivative is the largest of all, and PGT makes it larger: the likeness to AdaGrad, which
    # damps the large ones (section 4.3), ends here.
    plain, pgt = gradient(p.log(), y, 1.0), gradient(p.log(), y, alpha)
    assert plain.abs().argmax() == y
    assert pgt[y].abs() > plain[y].abs()


# "(i)(b) [...] the network assigns the highest probability, then p_j > p_th", "(ii)(a) [...]"
@pytest.mark.parametrize("p", [array(0.25, 0.25, 0.25, 0.25), array(0.5, 0.5, 0.0)])
def test_highest_class_is_not_above_the_threshold_when_all_tie(p: Tensor) -> None:
    y = len(p) - 1
    torch.testing.assert_close(p[0], stationary_threshold(p, 0.5))
    torch.testing.assert_close(gradient(p.log(), y, 0.5), gradient(p.log(), y, 1.0))


# "After analyzing all these cases ((i)a,b,c & (ii)a,b)": they leave out a wrong class that is above
# the threshold and not the highest.
def test_five_cases_leave_one_out() -> None:
    p, alpha = array(0.45, 0.44, 0.11), 0.5
    for y in (0, 2):  # right and wrong predictions
        assert gradient(p.log(), y, 1.0)[1].item() == pytest.approx(0.44)
        assert gradient(p.log(), y, alpha)[1].item() == pytest.approx(0.3982, abs=1e-4)


# Section 5, on logits: "Gradient rises in all classes."
@given(logits(), alphas, st.data())
def test_gradient_cannot_rise_in_all_classes(z: Tensor, alpha: float, data: st.DataObject) -> None:
    y = data.draw(st.integers(0, len(z) - 1))
    change = gradient(z, y, alpha) - gradient(z, y, 1.0)
    assert abs(change.sum().item()) < 1e-13
    assert (change <= 1e-15).any()


# Section 4.3: the weights of the head ------------------------------------------------------------


def head_gradient(weight: Tensor, a: Tensor, y: int, alpha: float) -> Tensor:
    weight = weight.clone().requires_grad_()
    (grad,) = torch.autograd.grad(-log_softmax(weight @ a, alpha=alpha)[y], weight)
    return grad


def head_for(z: Tensor, a: Tensor) -> Tensor:
    """A head with these logits at these features: `W a = z`."""
    return torch.outer(z, a) / (a @ a)


# "z_i = sum_{j=1}^{C} w_ij a_j" and "for all j in (1, 2, ..., C)": j runs over the features, whose
# number has nothing to do with C. "similar relationship for a_j < 0": there it turns round.
@given(alphas_below_one)
def test_weight_gradient_is_feature_times_logit_gradient(alpha: float) -> None:
    z, a = array(20, 30, 10), array(2.0, 0.0, -1.0, 0.5, 3.0)
    plain, pgt = (head_gradient(head_for(z, a), a, 0, exponent) for exponent in (1.0, alpha))
    torch.testing.assert_close(pgt, torch.outer(gradient(z, 0, alpha), a))
    rising = gradient(z, 0, alpha) > gradient(z, 0, 1.0)
    assert rising.tolist() == [True, False, True]
    assert (pgt > plain)[rising][:, a > 0].all()
    assert (pgt == plain)[:, a == 0].all()
    assert (pgt < plain)[rising][:, a < 0].all()


# "if z is [20, 30, 10] [...] dL/dw_1j = epsilon a_j > 0 => hat dL/dw_1j < dL/dw_1j => C_PGT > 1"
@given(alphas_below_one)
def test_worked_example_of_4_3(alpha: float) -> None:
    z, a = array(20, 30, 10), array(0.5, 2.0, 1.0, 3.0)
    torch.testing.assert_close(
        z.softmax(-1), array(4.54e-5, 0.9999546, 2.06e-9), rtol=1e-3, atol=0
    )  # the paper cuts 4.54e-5 to 4e-5
    plain, pgt = (head_gradient(head_for(z, a), a, 0, exponent) for exponent in (1.0, alpha))
    # The true class: both are negative, so both signs in the sentence are the other way round. It
    # holds for absolute values, and C_PGT > 1 stands.
    assert (plain[0] < 0).all()
    assert (pgt[0] > plain[0]).all()
    assert (pgt[0].abs() < plain[0].abs()).all()
    assert (plain[0] / pgt[0] > 1).all()
    # The third class, as written.
    assert (pgt[2] > plain[2]).all()
    assert (plain[2] / pgt[2] < 1).all()
    # The second, which the paper leaves out: damped.
    assert (plain[1] / pgt[1] > 1).all()


def c_pgt(z: Tensor, target: int | Tensor, alpha: float) -> Tensor:
    """The paper's C_PGT: one number a logit, `(p_i - q_i) / (p'_i - q_i)`."""
    return gradient(z, target, 1.0) / gradient(z, target, alpha)


@given(logits(), alphas_below_one, st.data())
def test_c_pgt(z: Tensor, alpha: float, data: st.DataObject) -> None:
    y = data.draw(st.integers(0, len(z) - 1))
    p, wrong = z.softmax(-1), torch.arange(len(z)) != y
    assume(p.max() < 1 - 1e-6)  # PyTorch's own p - 1 has no digits left beyond
    c = c_pgt(z, y, alpha)
    below, above = sides(p, alpha)
    assert (c > 0).all()
    # A wrong class: (p / t)^(1 - alpha), under 1 below the threshold.
    expected = (p / stationary_threshold(p, alpha)) ** (1 - alpha)
    torch.testing.assert_close(c[wrong], expected[wrong], rtol=1e-9, atol=0)
    assert (c < 1)[wrong & below].all()
    assert (c > 1)[wrong & above].all()
    # The true class: the other way round.
    _, _, differ = weigh(z, y, alpha)
    if below[y]:
        assert c[y] >= 1
        assert c[y] > 1 or not differ[y]
    if above[y]:
        assert c[y] < 1 or not differ[y]


# "The weight update equation using PGT, can also be viewed [...] w - (eta / C_PGT) dL/dw"
def test_c_pgt_may_be_undefined_zero_or_negative() -> None:
    # A masked class, or features of 0: 0 / 0.
    assert c_pgt(array(1, 0, -math.inf), 0, 0.5)[2].isnan()
    weight, a = head_for(array(20, 30, 10), array(1.0, 0.0)), array(1.0, 0.0)
    assert (head_gradient(weight, a, 0, 1.0) / head_gradient(weight, a, 0, 0.5))[:, 1].isnan().all()
    # A soft target between p' and p: the step with PGT goes the other way.
    z = array(3, 0, 0)
    assert power_transform(z.softmax(-1), 0.5)[0] < 0.8 < z.softmax(-1)[0]
    assert (c_pgt(z, array(0.8, 0.1, 0.1), 0.5) < 0).all()
    # A target equal to p: only PGT moves. Equal to p': only plain cross-entropy does.
    assert c_pgt(z, z.softmax(-1), 0.5).abs().max() < 1e-14
    assert c_pgt(z, (0.5 * z).softmax(-1), 0.5).abs().min() > 1e14


# "C_PGT > 1 for all j": for one example it does not depend on j; for a batch it depends on i and j.
def test_c_pgt_of_a_batch_differs_by_feature_and_may_be_negative() -> None:
    # Class 0 is true for both examples, one predicted rightly and one wrongly.
    zs, features = (array(2, 0, 0), array(0, 4, 0)), (array(1.0, 1.0), array(1.0, -0.3))
    weight = torch.linalg.solve(torch.stack(features), torch.stack(zs)).T
    plain, pgt = (
        torch.stack([head_gradient(weight, a, 0, alpha) for a in features]).sum(0)
        for alpha in (1.0, 0.3)
    )
    c = plain / pgt
    assert (c[0] > 0).tolist() == [True, False]


# Section 4.4: class separation -------------------------------------------------------------------


def logits_after_step(weight: Tensor, a: Tensor, y: int, alpha: float, lr: float) -> Tensor:
    """Logits of the same features after one step of SGD on the head."""
    head = nn.Linear(len(a), len(weight), bias=False, dtype=torch.float64)
    head.weight.data.copy_(weight)
    (-log_softmax(head(a), alpha=alpha)[y]).backward()
    torch.optim.SGD(head.parameters(), lr=lr).step()
    return head(a).detach()


# "if z is [30, 20, 10] [...] the distance between correct and incorrect class logits increases"
@given(alphas_below_one)
def test_worked_example_of_4_4(alpha: float) -> None:
    z, a, y = array(30, 20, 10), array(0.5, 2.0, 1.0, 0.0), 0
    weight = head_for(z, a)
    plain, pgt = (head_gradient(weight, a, y, exponent) for exponent in (1.0, alpha))
    assert (pgt.abs() > plain.abs())[:, a > 0].all()
    assert (pgt == plain)[:, a == 0].all()  # so not "for all j", which the paper says of w_1j
    after_plain, after_pgt = (
        logits_after_step(weight, a, y, exponent, 0.5) for exponent in (1.0, alpha)
    )
    assert after_pgt[0] > after_plain[0] > z[0]
    # The third logit falls by lr |a|^2 p = 5e-9.
    assert (after_pgt < after_plain)[1:].all()
    assert (after_plain < z)[1:].all()
    assert (after_pgt[0] - after_pgt[1:] > after_plain[0] - after_plain[1:]).all()


@given(logits(), alphas_below_one, st.floats(1e-3, 10), st.data())
def test_class_separation_after_one_step(
    z: Tensor, alpha: float, lr: float, data: st.DataObject
) -> None:
    # With a_j of any sign: the logits move by -lr |a|^2 dL/dz. For the predicted class y and any
    # other i the gap therefore grows by more with PGT, by lr |a|^2 (f(p_y) - f(p_i)), where
    # f(x) = x - x^alpha t^(1 - alpha) is at most 0 up to t, and from there rises at 1 - alpha or
    # faster. The target drops out.
    a = array(1.0, -2.0, 0.0, 0.5)
    p = z.softmax(-1)
    top = int(p.argmax())
    y = data.draw(st.sampled_from([top, 0]))
    extra = p - power_transform(p, alpha)
    assert (extra[top] - extra >= -1e-15).all()
    lower = p < p[top] * (1 - 1e-9)
    assert (extra[top] - extra > 0)[lower & (p > 1e-12)].all()
    above = p > stationary_threshold(p, alpha)
    assert (extra[top] - extra >= (1 - alpha) * (p[top] - p) - 1e-14)[above].all()
    # The same through a step. Tolerance: logits up to 600 carry 1e-13.
    weight = head_for(z, a)
    plain, pgt = (logits_after_step(weight, a, y, exponent, lr) for exponent in (1.0, alpha))
    growth = (pgt[top] - pgt) - (plain[top] - plain)
    torch.testing.assert_close(growth, lr * (a @ a) * (extra[top] - extra), rtol=1e-9, atol=1e-11)


# "for the non-true classes hat w_ij < w_ij when i != 1", "hat z_i < z_i when i != 1"
def test_a_wrong_logit_above_the_threshold_falls_less() -> None:
    z, a, y, alpha = array(0.48, 0.44, 0.08).log(), array(1.0, 0.5), 0, 0.5
    assert z.argmax() == y
    plain, pgt = (
        logits_after_step(head_for(z, a), a, y, exponent, 1.0) for exponent in (1.0, alpha)
    )
    assert z[1] > pgt[1] > plain[1]
    # The gap grows by more all the same: the true logit gains more than this one loses.
    assert pgt[0] - pgt[1] > plain[0] - plain[1]


# "dist(hat z_1, hat z_i) > dist(z_1, z_i)": not if they tie,
def test_class_separation_is_the_same_for_ties() -> None:
    z, a = array(2, 2, 0), array(1.0, 1.0)
    plain, pgt = (logits_after_step(head_for(z, a), a, 0, exponent, 1.0) for exponent in (1.0, 0.3))
    torch.testing.assert_close(pgt[0] - pgt[1], plain[0] - plain[1])


# nor if the prediction is wrong (the paper does not claim it),
def test_class_separation_from_a_wrong_winner_is_slower() -> None:
    z, a = array(20, 30, 10), array(1.0, 1.0)
    plain, pgt = (logits_after_step(head_for(z, a), a, 0, exponent, 1.0) for exponent in (1.0, 0.3))
    assert z[0] - z[1] < pgt[0] - pgt[1] < plain[0] - plain[1]


# nor in a batch with another example that shares features,
def test_class_separation_may_fail_in_a_batch() -> None:
    features = torch.stack([array(1, 0), array(1, 1)])
    z = torch.stack([array(1, 0, 0), array(0, 5, 0)])
    gaps = {}
    for alpha in (1.0, 0.3):
        weight = torch.linalg.solve(features, z).T.clone().requires_grad_()
        (-log_softmax(features @ weight.T, alpha=alpha)[:, 0].sum()).backward()
        torch.optim.SGD([weight], lr=0.1).step()
        after = features[0] @ weight.T
        gaps[alpha] = after[0] - after[1]
    assert gaps[0.3] < gaps[1.0]


# nor if the layers below the head move too, as they do in training.
def test_class_separation_may_fail_when_the_backbone_moves() -> None:
    gaps = {}
    for alpha in (1.0, 0.3):
        head = torch.tensor([[0.0, 1], [-3, 3], [2, -3]], dtype=torch.float64, requires_grad=True)
        backbone = array(1, 1)[:, None].requires_grad_()  # features of the input x = 1
        z = (head @ backbone)[:, 0]
        assert z.tolist() == [1, 0, -1]
        (-log_softmax(z, alpha=alpha)[0]).backward()
        torch.optim.SGD([head, backbone], lr=0.01).step()
        after = (head @ backbone)[:, 0]
        gaps[alpha] = after[0] - after[1]
    assert gaps[0.3] < gaps[1.0]


# Around the identity -----------------------------------------------------------------------------
# tests/test_identity.py trains both ways, with each optimizer. Here: what else docs/theory.md says
# of the identity, all with SGD and momentum, 200 steps, in float64.

ALPHA, LR, DECAY, STEPS = 0.3, 0.1, 1e-2, 200


def network(normalised: bool = False) -> nn.Sequential:
    generator = torch.Generator().manual_seed(1)
    norm = [nn.BatchNorm1d(8, eps=1e-30, affine=False)] if normalised else []
    net = nn.Sequential(nn.Linear(6, 8, bias=not normalised), *norm, nn.ReLU(), nn.Linear(8, 4))
    for p in net.parameters():
        p.data = 0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return net.double()


def train(
    net: nn.Sequential,
    loss: Callable[[Tensor, Tensor, int], Tensor],
    body: dict[str, float],
    head: dict[str, float],
    clip: Callable[[nn.Sequential], object] = lambda net: None,
    before: Callable[[torch.optim.Optimizer, int], object] = lambda optimizer, step: None,
) -> None:
    generator = torch.Generator().manual_seed(2)
    groups = [
        {"params": list(net[:-1].parameters()), **body},
        {"params": list(net[-1].parameters()), **head},
    ]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    for step in range(STEPS):
        before(optimizer, step)
        x = torch.randn(16, 6, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 4, (16,), generator=generator)
        optimizer.zero_grad()
        loss(net(x), y, step).backward()
        clip(net)
        optimizer.step()


def pgt_loss(z: Tensor, y: Tensor, step: int) -> Tensor:
    return F.nll_loss(log_softmax(z, alpha=ALPHA), y)


def plain_loss(z: Tensor, y: Tensor, step: int) -> Tensor:
    return F.cross_entropy(z, y)


def scale(module: nn.Module, factor: float) -> None:
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(factor)


def groups_of(alpha: float) -> tuple[dict[str, float], dict[str, float]]:
    """The table's row for SGD: backbone, head."""
    return (
        {"lr": LR / alpha, "weight_decay": DECAY * alpha},
        {"lr": LR * alpha, "weight_decay": DECAY / alpha},
    )


PAPER = ({"lr": LR, "weight_decay": DECAY}, {"lr": LR, "weight_decay": DECAY})


def distance(pgt: nn.Sequential, plain: nn.Sequential, alpha: float = ALPHA) -> float:
    """The largest difference of a weight, the plain head divided by alpha."""
    scale(plain[-1], 1 / alpha)
    pairs = zip(pgt.parameters(), plain.parameters(), strict=True)
    return max((p - q).abs().max().item() for p, q in pairs)


def clipped_apart(clip: Callable[[list[Tensor], float], object], body: float, head: float) -> Any:
    def apply(net: nn.Sequential) -> None:
        for p in net[:-1].parameters():
            clip([p], body)
        for p in net[-1].parameters():
            clip([p], head)

    return apply


def clip_norm(parameters: list[Tensor], most: float) -> None:
    # torch's clip_grad_norm_ divides by norm + 1e-6, and that 1e-6 does not scale with alpha.
    for p in parameters:
        assert p.grad is not None
        p.grad *= (most / p.grad.norm()).clamp(max=1)


def clip_adaptive(net: nn.Sequential, body: float, head: float, head_floor: float) -> None:
    """AGC, on every layer: a unit is a row, or a whole bias."""
    for layer, clip, floor in ((net[0], body, 1e-3), (net[-1], head, head_floor)):
        for p in layer.parameters():
            assert p.grad is not None
            norm, size = (
                torch.linalg.vector_norm(x, dim=-1, keepdim=True) for x in (p.grad, p.detach())
            )
            p.grad *= (clip * size.clamp(min=floor) / norm).clamp(max=1)


@pytest.mark.parametrize(
    ("with_pgt", "with_plain"),
    [
        pytest.param(
            clipped_apart(clip_norm, 0.05, 0.05),
            clipped_apart(clip_norm, 0.05 * ALPHA, 0.05),
            id="norm of a tensor",
        ),
        pytest.param(
            clipped_apart(clip_grad_value_, 0.02, 0.02),
            clipped_apart(clip_grad_value_, 0.02 * ALPHA, 0.02),
            id="value",
        ),
        pytest.param(
            lambda net: clip_adaptive(net, 0.01, 0.01, 1e-3),
            lambda net: clip_adaptive(net, 0.01 * ALPHA, 0.01 / ALPHA, 1e-3 * ALPHA),
            id="adaptive",
        ),
    ],
)
def test_clipping_apart_fits_the_identity(with_pgt: Any, with_plain: Any) -> None:
    pgt, plain, careless = network(), network(), network()
    train(pgt, pgt_loss, *PAPER, clip=with_pgt)
    scale(plain[-1], ALPHA)
    train(plain, plain_loss, *groups_of(ALPHA), clip=with_plain)
    assert distance(pgt, plain) < 1e-11
    # The clipping bites: with the same thresholds on both sides the two part.
    scale(careless[-1], ALPHA)
    train(careless, plain_loss, *groups_of(ALPHA), clip=with_pgt)
    assert distance(pgt, careless) > 1e-3


def test_global_norm_clipping_breaks_the_identity() -> None:
    pgt, plain = network(), network()
    scale(plain[-1], ALPHA)
    train(pgt, pgt_loss, *PAPER, clip=lambda net: clip_grad_norm_(net.parameters(), 0.05))
    both = groups_of(ALPHA)
    train(plain, plain_loss, *both, clip=lambda net: clip_grad_norm_(net.parameters(), 0.05))
    assert distance(pgt, plain) > 1e-3


@pytest.mark.parametrize(("factor", "equal"), [(ALPHA, True), (1.0, False)])
def test_other_loss_terms_must_be_multiplied_by_alpha(factor: float, equal: bool) -> None:
    pgt, plain = network(), network()
    scale(plain[-1], ALPHA)

    def penalty(net: nn.Sequential, head_scale: float) -> Tensor:
        weights = [p for p in net.parameters() if p.dim() == 2]
        return 0.02 * (weights[0] ** 4).sum() + 0.02 * ((weights[1] / head_scale) ** 4).sum()

    train(pgt, lambda *args: pgt_loss(*args) + penalty(pgt, 1.0), *PAPER)
    train(
        plain,
        lambda *args: plain_loss(*args) + factor * penalty(plain, ALPHA),
        *groups_of(ALPHA),
    )
    assert (distance(pgt, plain) < 1e-11) is equal


@pytest.mark.parametrize("rescaled", [True, False])
def test_a_schedule_of_alpha_needs_rescaling_at_each_change(rescaled: bool) -> None:
    pgt, plain = network(), network()

    def alpha_at(step: int) -> float:
        return max(0.1, 1 - step / 150)

    def follow(optimizer: torch.optim.Optimizer, step: int) -> None:
        ratio = alpha_at(step) / alpha_at(max(step - 1, 0))
        for group, settings in zip(optimizer.param_groups, groups_of(alpha_at(step)), strict=True):
            group.update(settings)
        if rescaled:
            scale(plain[-1], ratio)
            for p in optimizer.param_groups[0]["params"]:
                if p in optimizer.state:
                    optimizer.state[p]["momentum_buffer"] *= ratio

    train(pgt, lambda z, y, step: F.nll_loss(log_softmax(z, alpha=alpha_at(step)), y), *PAPER)
    train(plain, plain_loss, *groups_of(1.0), before=follow)
    assert (distance(pgt, plain, alpha_at(STEPS - 1)) < 1e-11) is rescaled


def test_scale_invariant_backbone_feels_only_its_start() -> None:
    # Before a batch normalisation, (w, lr, wd) and (k w, k^2 lr, wd / k^2) are one trajectory. So
    # lr / alpha and wd * alpha from w are the same as lr and wd from sqrt(alpha) w.
    pgt, plain = network(normalised=True), network(normalised=True)
    train(pgt, pgt_loss, *PAPER)
    scale(plain[0], math.sqrt(ALPHA))
    scale(plain[-1], ALPHA)
    train(plain, plain_loss, PAPER[0], groups_of(ALPHA)[1])
    scale(plain[0], 1 / math.sqrt(ALPHA))
    assert distance(pgt, plain) < 1e-11
