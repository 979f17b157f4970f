"""Section 4 of the paper as properties of random distributions, and the places where it stops.

`docs/theory.md` restates the section, with the name of a test beside each statement, and quotes the
sentences that do not hold in general; their counterexamples are here. The value of the transform
and of the threshold, the gradient and the second derivative are tested in `tests/`.

`P` is a distribution, `P'` its transform, `t` the stationary threshold, `y` the true class.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from test_identity import OPTIMIZERS, STEPS, batch, largest_difference, network
from torch import Tensor, nn

from powergrad import (
    cross_entropy,
    equivalent_training,
    log_softmax,
    power_transform,
    stationary_threshold,
)

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


def distributions(max_classes: int = 200, zeros: bool = True) -> st.SearchStrategy[Tensor]:
    drawn = logits(max_classes)
    return (drawn | logits(max_classes, zeros=True) if zeros else drawn).map(
        lambda z: z.softmax(-1)
    )


@st.composite
def examples(draw: st.DrawFn, max_classes: int = 200) -> tuple[Tensor, int]:
    """Logits and a true class."""
    z = draw(logits(max_classes))
    return z, draw(st.integers(0, len(z) - 1))


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
    return torch.autograd.grad(loss, z)[0]


# Section 4.1: lemma 1 and proposition 1 -----------------------------------------------------------


@given(distributions(), alphas)
def test_lemma_1(p, alpha):
    # In one line: p' = p^alpha t^(1 - alpha). So p' lies between p and t.
    t, moved = stationary_threshold(p, alpha), power_transform(p, alpha)
    torch.testing.assert_close(moved, p**alpha * t ** (1 - alpha), rtol=1e-12, atol=0)
    assert (torch.minimum(p, t) <= moved * (1 + 1e-12)).all()
    assert (moved * (1 - 1e-12) <= torch.maximum(p, t)).all()
    if alpha <= 0.99:
        below, above = sides(p, alpha)
        assert (moved < p)[above].all()
        assert (moved > p)[below & (p > 0)].all()


def test_lemma_1_is_not_strict_at_alpha_one_and_at_zero():
    # The exponent is 1/0. With its limit exp(-H) as the threshold, nothing moves.
    p = array(0.8, 0.2, 0.0)
    assert p[0] > stationary_threshold(p, 1.0)
    torch.testing.assert_close(power_transform(p, 1.0), p, rtol=1e-15, atol=0)
    assert power_transform(p, 0.5)[2] == p[2] == 0 < stationary_threshold(p, 0.5)


@given(distributions())
def test_proposition_1(p):
    uniform = torch.full_like(p, 1 / len(p))
    torch.testing.assert_close(power_transform(p, 0.0), uniform, rtol=1e-15, atol=0)
    torch.testing.assert_close(stationary_threshold(p, 0.0), uniform[0], rtol=1e-12, atol=0)


def test_proposition_1_is_a_jump_where_p_is_zero():
    p = array(0.8, 0.2, 0.0)
    torch.testing.assert_close(power_transform(p, 1e-13), array(0.5, 0.5, 0.0))
    torch.testing.assert_close(power_transform(p, 0.0), array(1, 1, 1) / 3)
    assert stationary_threshold(p, 1e-13).item() == pytest.approx(1 / 2)
    assert stationary_threshold(p, 0.0).item() == pytest.approx(1 / 3)
    # The backward pass takes the limit: a class masked with -inf keeps a gradient of 0.
    torch.testing.assert_close(gradient(p.log(), 0, 0.0), array(-0.5, 0.5, 0.0))


# Section 4.1: theorem 1, order, smoothing --------------------------------------------------------


@given(distributions(), alphas, alphas)
def test_theorem_1_and_the_range_of_the_threshold(p, one, other):
    low, high = sorted((one, other))
    t_low, t_high = stationary_threshold(p, low), stationary_threshold(p, high)
    assert 1 / len(p) * (1 - 1e-12) <= t_low <= t_high * (1 + 1e-12) <= p.max() * (1 + 2e-12)


def slopes(p: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """dt/dalpha, and what the paper's proof puts below it."""
    powered, t = p**alpha, stationary_threshold(p, alpha)
    total, flat = powered.sum(), powered / powered.sum()
    kl = (flat * (flat / p).log()).sum()
    claimed = ((1 - alpha) * math.log(len(p)) - total.log()) / alpha
    return t * kl / (1 - alpha) ** 2, t * claimed / (1 - alpha) ** 2


@given(distributions(max_classes=50, zeros=False), st.floats(0.05, 0.95))
def test_derivative_of_the_threshold(p, alpha):
    assume(p.min() > 1e-20)
    derivative, claimed = slopes(p, alpha)
    # It is not negative: a proof of theorem 1 in itself.
    h = 1e-6
    slope = (stationary_threshold(p, alpha + h) - stationary_threshold(p, alpha - h)) / (2 * h)
    # A central difference: h^2 times a third derivative, which grows as |log p|^3 <= 1e5.
    torch.testing.assert_close(slope, derivative, rtol=1e-5, atol=1e-7)
    assert slope <= claimed + 1e-7  # the bound of the proof is an upper one


def test_proof_of_theorem_1_turns_an_inequality_round():
    # The log-sum bound from below is multiplied by alpha - 1 < 0.
    slope, claimed = slopes(array(0.9, 0.1), 0.5)
    assert (round(slope.item(), 3), round(claimed.item(), 3)) == (0.231, 0.558)


@pytest.mark.parametrize("probabilities", [(0.9, 0.1), (0.5, 0.3, 0.2), (0.97, 0.01, 0.01, 0.01)])
def test_theorem_1_at_its_ends(probabilities):
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
def test_order_is_preserved(p, alpha):
    ordered = p.sort().values
    moved = power_transform(ordered, alpha)
    rounding = 1e-15 * moved[1:]  # pow differs by a unit between vector lanes and the rest
    assert (moved.diff() >= -rounding).all()
    assert (moved.diff() <= rounding)[ordered.diff() == 0].all()
    if alpha > 0.01:
        assert (moved.diff() > 0)[ordered[1:] > ordered[:-1] * (1 + 1e-9)].all()


def test_order_is_preserved_within_one_distribution_only():
    # The derivative by its own probability is not negative, those by the others' are. So the order
    # holds between the classes of one distribution, whose denominator is common.
    p, r = array(0.30, 0.70, 0.00), array(0.32, 0.34, 0.34)
    assert p[0] < r[0]
    assert power_transform(p, 0.5)[0] > power_transform(r, 0.5)[0]
    jacobian = torch.func.jacrev(lambda p: power_transform(p, 0.5))(r)
    assert (jacobian.diag() >= 0).all()
    assert (jacobian[~torch.eye(3, dtype=torch.bool)] < 0).all()


@given(distributions(), alphas, alphas)
def test_smaller_alpha_is_closer_to_uniform(p, one, other):
    flat, sharp = (power_transform(p, alpha) for alpha in sorted((one, other)))
    # Majorisation: the k likeliest classes together hold less. Every entropy then rises.
    held = [q.sort(descending=True).values.cumsum(0) for q in (flat, sharp)]
    assert (held[0] <= held[1] + 1e-12).all()
    assert torch.special.entr(flat).sum() >= torch.special.entr(sharp).sum() - 1e-12


def test_a_class_may_pass_uniform_on_its_way_there():
    # The distribution flattens steadily as alpha falls; a single class need not move steadily.
    p = array(0.899, 0.1, 0.001)
    path = [power_transform(p, alpha)[1].item() for alpha in (1.0, 0.4, 0.1, 0.0)]
    assert path[0] < path[1] < path[3] < path[2]


# Section 4.2: the derivative at each logit -------------------------------------------------------


def sizes(z: Tensor, y: int, alpha: float) -> tuple[Tensor, Tensor]:
    """|dL/dz| without and with PGT."""
    return gradient(z, y, 1.0).abs(), gradient(z, y, alpha).abs()


def test_range_does_not_shrink_at_both_ends():
    plain, pgt = sizes(array(0.8, 0.15, 0.05).log(), 0, 0.5)
    assert pgt.max() > plain.max()  # a correct prediction: the largest rises
    for p in (array(0.1, 0.9), array(0.01, 0.33, 0.33, 0.33)):
        plain, pgt = sizes(p.log(), 0, 0.5)
        assert pgt.min() < plain.min()  # all other classes are above the threshold


@given(examples(max_classes=10), st.floats(0.1, 1))
def test_range_over_all_logits_is_unchanged(example, alpha):
    # Each ordinary gradient is PGT's at other logits, z / alpha.
    z, y = example
    plain = gradient(z, y, 1.0)
    torch.testing.assert_close(plain, gradient(z / alpha, y, alpha), atol=1e-12, rtol=0)


def test_true_class_of_a_wrong_prediction_may_be_above_the_threshold():
    p, y, alpha = array(0.45, 0.44, 0.11), 1, 0.5
    assert p[y] > stationary_threshold(p, alpha)
    # Its derivative is the largest of all, and PGT makes it larger: the likeness to AdaGrad, which
    # damps the large ones (section 4.3), ends here.
    plain, pgt = sizes(p.log(), y, alpha)
    assert plain.argmax() == y
    assert pgt[y] > plain[y]
    # The case that the five leave out: that class if it is wrong, the prediction right or wrong.
    for other in (0, 2):
        plain, pgt = sizes(p.log(), other, alpha)
        assert pgt[y] < plain[y]


@pytest.mark.parametrize("p", [array(0.25, 0.25, 0.25, 0.25), array(0.5, 0.5, 0.0)])
def test_highest_class_is_not_above_the_threshold_when_all_tie(p):
    y = len(p) - 1
    torch.testing.assert_close(p[0], stationary_threshold(p, 0.5))
    torch.testing.assert_close(gradient(p.log(), y, 0.5), gradient(p.log(), y, 1.0))


@given(examples(), alphas)
def test_gradient_cannot_rise_in_all_classes(example, alpha):
    z, y = example
    change = gradient(z, y, alpha) - gradient(z, y, 1.0)
    assert abs(change.sum().item()) < 1e-13
    assert (change <= 1e-15).any()


# Section 4.3: the weights of the head ------------------------------------------------------------


def head_gradient(weight: Tensor, a: Tensor, y: int, alpha: float) -> Tensor:
    weight = weight.clone().requires_grad_()
    return torch.autograd.grad(-log_softmax(weight @ a, alpha=alpha)[y], weight)[0]


def head_for(z: Tensor, a: Tensor) -> Tensor:
    """A head with these logits at these features: `W a = z`."""
    return torch.outer(z, a) / (a @ a)


@given(alphas_below_one)
def test_worked_example_of_4_3(alpha):
    z, a = array(20, 30, 10), array(2.0, 0.0, -1.0, 0.5, 3.0)  # more features than classes
    plain, pgt = (head_gradient(head_for(z, a), a, 0, exponent) for exponent in (1.0, alpha))
    torch.testing.assert_close(pgt, torch.outer(gradient(z, 0, alpha), a))
    # For a_j > 0 the gradient of the true class is negative and PGT's the greater one, so both
    # signs in the sentence are the other way round; for a_j < 0 it turns, at 0 they are equal.
    assert (plain[0] < pgt[0])[a > 0].all()
    assert (pgt[0] < 0)[a > 0].all()
    assert (plain[2] < pgt[2])[a > 0].all()
    assert (plain[[0, 2]] > pgt[[0, 2]])[:, a < 0].all()
    assert (pgt == plain)[:, a == 0].all()


def c_pgt(z: Tensor, target: int | Tensor, alpha: float) -> Tensor:
    """The paper's C_PGT: one number per logit, `(p_i - q_i) / (p'_i - q_i)`."""
    return gradient(z, target, 1.0) / gradient(z, target, alpha)


@given(examples(), alphas_below_one)
def test_c_pgt(example, alpha):
    """Cases (i)a, b, c and (ii)a, b of section 4.2 as well: PGT's is larger where C_PGT < 1."""
    z, y = example
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
    differ = (power_transform(p, alpha) - p).abs() > 1e-14
    if below[y]:
        assert c[y] > 1 or (c[y] == 1 and not differ[y])
    if above[y]:
        assert c[y] < 1 or not differ[y]


def test_c_pgt_may_be_undefined_zero_or_negative():
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


def test_c_pgt_of_a_batch_differs_by_feature_and_may_be_negative():
    # Class 0 is true for both examples, one predicted rightly and one wrongly.
    zs, features = (array(2, 0, 0), array(0, 4, 0)), (array(1.0, 1.0), array(1.0, -0.3))
    weight = torch.linalg.solve(torch.stack(features), torch.stack(zs)).T
    plain, pgt = (
        torch.stack([head_gradient(weight, a, 0, alpha) for a in features]).sum(0)
        for alpha in (1.0, 0.3)
    )
    assert (plain / pgt > 0)[0].tolist() == [True, False]


# Section 4.4: class separation -------------------------------------------------------------------


def logits_after_step(z: Tensor, a: Tensor, y: int, alpha: float, lr: float = 1.0) -> Tensor:
    """Logits of the same features after one step of SGD on a head."""
    weight = head_for(z, a)
    return (weight - lr * head_gradient(weight, a, y, alpha)) @ a


@given(logits(), alphas_below_one, st.floats(1e-3, 10), st.booleans())
def test_class_separation_after_one_step(z, alpha, lr, right):
    # With a_j of any sign: the logits move by -lr |a|^2 dL/dz. For the predicted class y and any
    # other i the gap therefore grows by more with PGT, by lr |a|^2 (f(p_y) - f(p_i)), where
    # f(x) = x - x^alpha t^(1 - alpha) is at most 0 up to t, and from there rises at 1 - alpha or
    # faster. The target drops out.
    a, p = array(1.0, -2.0, 0.0, 0.5), z.softmax(-1)
    top = int(p.argmax())
    extra = p - power_transform(p, alpha)
    assert (extra[top] - extra >= -1e-15).all()
    lower = p < p[top] * (1 - 1e-9)
    assert (extra[top] - extra > 0)[lower & (p > 1e-12)].all()
    above = p > stationary_threshold(p, alpha)
    assert (extra[top] - extra >= (1 - alpha) * (p[top] - p) - 1e-14)[above].all()
    # The same through a step. Tolerance: logits up to 600 carry 1e-13.
    plain, pgt = (logits_after_step(z, a, top if right else 0, e, lr) for e in (1.0, alpha))
    growth = (pgt[top] - pgt) - (plain[top] - plain)
    torch.testing.assert_close(growth, lr * (a @ a) * (extra[top] - extra), rtol=1e-9, atol=1e-11)


def test_a_wrong_logit_above_the_threshold_falls_less():
    z, a = array(0.48, 0.44, 0.08).log(), array(1.0, 0.5)
    plain, pgt = (logits_after_step(z, a, 0, exponent) for exponent in (1.0, 0.5))
    assert z[1] > pgt[1] > plain[1]
    # The gap grows by more all the same: the true logit gains more than this one loses.
    assert pgt[0] - pgt[1] > plain[0] - plain[1]
    # Not between classes that tie.
    plain, pgt = (logits_after_step(array(2, 2, 0), a, 0, exponent) for exponent in (1.0, 0.3))
    torch.testing.assert_close(pgt[0] - pgt[1], plain[0] - plain[1])


@pytest.mark.parametrize(
    ("features", "head", "moving", "lr"),
    [
        # Another example shares features; its prediction is wrong.
        ([[1, 0], [1, 1]], [[1, -1], [0, 5], [0, 0]], False, 0.1),
        # The layers below the head move too, as they do in training.
        ([[1, 1]], [[0, 1], [-3, 3], [2, -3]], True, 0.01),
    ],
    ids=["batch", "backbone"],
)
def test_class_separation_may_fail_in_a_batch_or_a_network(features, head, moving, lr):
    gaps = []
    for alpha in (0.3, 1.0):
        weight = torch.tensor(head, dtype=torch.float64, requires_grad=True)
        a = torch.tensor(features, dtype=torch.float64, requires_grad=moving)
        (-log_softmax(a @ weight.T, alpha=alpha)[:, 0].sum()).backward()  # class 0 is true for all
        torch.optim.SGD([weight, a], lr=lr).step()
        after = a[0] @ weight.T
        gaps.append((after[0] - after[1]).item())
    assert gaps[0] < gaps[1]


# Around the identity -----------------------------------------------------------------------------
# test_identity.py trains both ways, with each optimizer and with clipping. Here: what else
# docs/theory.md says of the identity, with SGD and momentum, in float64.


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize(("factor", "equal"), [(0.3, True), (1.0, False)])
def test_other_loss_terms_must_be_multiplied_by_alpha(factor, equal):
    def penalty(net: nn.Sequential, head_scale: float) -> Tensor:
        first, *_, last = (p for p in net.parameters() if p.dim() == 2)
        return 0.02 * (first**4).sum() + 0.02 * ((last / head_scale) ** 4).sum()

    pgt, plain = network(), network()
    ours, twin = (OPTIMIZERS["Nesterov"](net.parameters()) for net in (pgt, plain))
    twin = equivalent_training(plain, twin, 0.3)
    for x, y in map(batch, range(STEPS)):
        update(ours, cross_entropy(pgt(x), y, alpha=0.3) + penalty(pgt, 1.0))
        update(twin, F.cross_entropy(plain(x), y) + factor * penalty(plain, 0.3))
    assert (largest_difference(pgt, plain, 0.3) < 1e-11) is equal


@pytest.mark.parametrize("rescaled", [True, False])
def test_a_schedule_of_alpha_needs_rescaling_at_each_change(rescaled):
    pgt, plain = network(), network()
    ours, twin = (OPTIMIZERS["Nesterov"](net.parameters()) for net in (pgt, plain))
    before = 1.0
    for step in range(STEPS):
        (x, y), alpha = batch(step), max(0.1, 1 - step / 150)
        if rescaled and alpha != before:  # the head, the groups and the momentum
            twin, before = equivalent_training(plain, twin, alpha / before), alpha
        update(ours, cross_entropy(pgt(x), y, alpha=alpha))
        update(twin, F.cross_entropy(plain(x), y))
    assert (largest_difference(pgt, plain, before) < 1e-11) is rescaled


def test_scale_invariant_backbone_feels_only_its_start():
    # Before a batch normalisation, (w, lr, wd) and (k w, k^2 lr, wd / k^2) are one trajectory. So
    # lr / alpha and wd * alpha from w are the same as lr and wd from sqrt(alpha) w.
    alpha, lr, decay = 0.3, 0.1, 1e-2
    norm = nn.BatchNorm1d(8, eps=1e-30, affine=False)
    pgt = nn.Sequential(nn.Linear(6, 8, bias=False), norm, nn.ReLU(), nn.Linear(8, 4)).double()
    plain = copy.deepcopy(pgt)
    backbone, *head = plain.parameters()
    with torch.no_grad():
        backbone *= math.sqrt(alpha)
        for parameter in head:
            parameter *= alpha
    group = {"params": head, "lr": lr * alpha, "weight_decay": decay / alpha}
    ours = torch.optim.SGD(pgt.parameters(), lr, momentum=0.9, weight_decay=decay)
    twin = torch.optim.SGD([{"params": backbone}, group], lr, momentum=0.9, weight_decay=decay)
    for x, y in map(batch, range(STEPS)):
        update(ours, cross_entropy(pgt(x), y, alpha=alpha))
        update(twin, F.cross_entropy(plain(x), y))
    with torch.no_grad():
        backbone /= math.sqrt(alpha)
    assert largest_difference(pgt, plain, alpha) < 1e-11
