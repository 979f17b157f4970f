"""powergrad.jax against powergrad itself, against optax, and against autodiff of the potential."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from references import row_error

import powergrad

jax = pytest.importorskip("jax", reason="needs jax: pip install powergrad[jax]")
optax = pytest.importorskip("optax", reason="compares with optax: pip install optax")
pgt = pytest.importorskip("powergrad.jax")
jnp = jax.numpy

INTEGER = pgt.softmax_cross_entropy_with_integer_labels
LOSSES = {
    "integer": (INTEGER, optax.softmax_cross_entropy_with_integer_labels),
    "soft": (pgt.softmax_cross_entropy, optax.softmax_cross_entropy),
}
TOLERANCE = {"float32": 1e-6, "float64": 1e-12}
ALPHAS = [0.0, 0.05, 0.3, 1.0]


@pytest.fixture(params=TOLERANCE)
def dtype(request):
    with jax.enable_x64(request.param == "float64"):
        yield request.param


def batch(dtype="float32", shape=(6, 5)):
    """Logits, upstream gradient, and the targets of each loss; classes last."""
    random = np.random.default_rng(0)
    logits = (3 * random.standard_normal(shape)).astype(dtype)
    upstream = random.uniform(-2, 2, shape[:-1]).astype(dtype)
    labels = random.integers(0, shape[-1], shape[:-1])
    soft = random.dirichlet(np.ones(shape[-1]), shape[:-1]).astype(dtype)
    return logits, upstream, {"integer": labels, "soft": soft}


def by_torch(logits, target, alpha, upstream):
    """Value and gradient of `powergrad.cross_entropy`, classes last."""
    leaf = torch.tensor(logits, requires_grad=True)
    target = torch.as_tensor(target)
    losses = powergrad.cross_entropy(
        leaf.movedim(-1, 1),
        target.movedim(-1, 1) if target.is_floating_point() else target,
        alpha=torch.as_tensor(alpha) if isinstance(alpha, np.ndarray) else alpha,
        reduction="none",
    )
    losses.backward(torch.as_tensor(upstream))
    assert leaf.grad is not None
    return losses.detach().numpy(), leaf.grad.numpy()


def close(gradient, expected, tolerance):
    expected = torch.tensor(np.array(expected)).double()
    assert row_error(torch.tensor(np.array(gradient)), expected, -1) <= tolerance


@functools.partial(jax.jit, static_argnames=("loss", "axis"))
def loss_and_gradient(loss, logits, target, alpha, upstream, where=None, axis=-1):
    """One compilation for all the alphas, which are traced."""
    losses, pull = jax.vjp(lambda z: loss(z, target, alpha=alpha, axis=axis, where=where), logits)
    return losses, pull(upstream)[0]


@functools.partial(jax.jit, static_argnames="loss")
def hessian(loss, logits, target, alpha, where=None):
    return jax.hessian(lambda z: loss(z, target, alpha=alpha, where=where).sum())(logits)


# Value and gradient -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize(
    ("shape", "axis"), [((6, 5), -1), ((4, 3, 5), -1), ((4, 3, 5), 0), ((4, 3, 5), -2)]
)
def test_equals_torch_and_optax(kind, shape, axis, dtype):
    logits, upstream, targets = batch(dtype, shape)
    target, (ours, plain) = targets[kind], LOSSES[kind]
    given = np.moveaxis(logits, -1, axis), np.moveaxis(target, -1, axis)
    given = given if kind == "soft" else (given[0], target)
    of_examples = np.random.default_rng(1).uniform(0, 1, shape[0]).astype(dtype)
    for alpha in [*ALPHAS, *([of_examples] if axis == -1 else [])]:
        losses, gradient = loss_and_gradient(ours, *given, alpha, upstream, axis=axis)
        assert losses.dtype == gradient.dtype == dtype
        expected, by_hand = by_torch(logits, target, alpha, upstream)
        for value in (expected, plain(logits, target)):
            np.testing.assert_allclose(losses, value, rtol=0, atol=10 * TOLERANCE[dtype])
        close(np.moveaxis(gradient, axis, -1), by_hand, TOLERANCE[dtype])


@jax.jit
def primitive(logits, alpha, upstream):
    log_p, pull = jax.vjp(lambda z: pgt.log_softmax(z, alpha=alpha), logits)
    return log_p, pull(upstream)[0]


@given(
    shape=st.sampled_from([(1, 1), (6, 5), (2, 300)]),  # each is compiled once
    alpha=st.floats(0, 1),
    scale=st.sampled_from([0.1, 3.0, 10.0]),
    offset=st.sampled_from([0.0, 100.0, -1e4]),
    seed=st.integers(0, 9),
)
def test_any_loss_of_log_p_equals_torch(shape, alpha, scale, offset, seed):
    """The primitive, with any upstream gradient at every class."""
    random = np.random.default_rng(seed)
    logits = scale * random.standard_normal(shape) + offset
    upstream = random.standard_normal(shape)
    leaf = torch.tensor(logits, requires_grad=True)
    log_p = powergrad.log_softmax(leaf, alpha=alpha)
    log_p.backward(torch.tensor(upstream))
    assert leaf.grad is not None
    with jax.enable_x64(True):
        ours, gradient = primitive(logits, alpha, upstream)
    np.testing.assert_allclose(ours, log_p.detach(), rtol=0, atol=1e-11)
    # u - p' sum(u) may cancel, so the error is relative to the terms.
    error = np.abs(np.asarray(gradient) - leaf.grad.numpy()).max()
    assert error <= 1e-12 * np.abs(upstream).sum(1).max()


def test_a_confident_label_keeps_its_gradient():
    """p' rounds to 1 in float32, and its distance from 1 is not lost."""
    logits, label, one = np.array([[60.0, 0.0, 1.0]]), np.array([0]), np.ones(1)
    _, gradient = loss_and_gradient(INTEGER, jnp.asarray(logits), label, 0.9, jnp.ones(1))
    close(gradient, by_torch(logits, label, 0.9, one)[1], 2e-6)
    assert gradient[0, 0] < 0


@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
def test_16_bits_are_as_exact_as_they_can_be(narrow):
    """p' and the loss are formed in float32."""
    logits, _, targets = batch(shape=(8, 1000))
    z, labels = jnp.asarray(logits, narrow), targets["integer"]
    eighths = jnp.full(8, 1 / 8, narrow)  # the upstream gradient of a mean
    losses, gradient = loss_and_gradient(INTEGER, z, labels, 0.1, eighths)
    assert losses.dtype == gradient.dtype == narrow
    wide = np.asarray(z, "float32")
    expected = by_torch(wide, labels, 0.1, np.full(8, 1 / 8, "float32"))[1]
    close(np.asarray(gradient, "float32"), expected, float(jnp.finfo(narrow).eps))


# Masks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "mask"), [("integer", "where"), ("soft", "where"), ("integer", "minus infinity")]
)
def test_masked_classes_might_as_well_not_be_there(kind, mask):
    logits, upstream, targets = batch()
    ours, plain = LOSSES[kind]
    target = targets[kind] % 3 if kind == "integer" else targets[kind]
    part = target if kind == "integer" else target[:, :3]
    where = jnp.broadcast_to(jnp.arange(5) < 3, (6, 5)) if mask == "where" else None
    if where is None:
        logits[:, 3:] = -np.inf
    for alpha in ALPHAS:
        losses, gradient = loss_and_gradient(ours, logits, target, alpha, upstream, where)
        np.testing.assert_allclose(losses, plain(logits, target, where=where), rtol=2e-6)
        fewer, expected = loss_and_gradient(ours, logits[:, :3], part, alpha, upstream)
        np.testing.assert_allclose(losses, fewer, rtol=1e-6)
        close(gradient[:, :3], expected, 1e-6)
        assert not np.asarray(gradient)[:, 3:].any()


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_where_leaves_positions_out(kind, alpha):
    """Padding: no loss and no gradient of any order, whatever stands there."""
    logits, _, targets = batch()
    kept = np.array([True, False, True, True, False, True])
    logits[1], targets["integer"][1], targets["integer"][4] = np.inf, -100, 77
    ours, target = LOSSES[kind][0], targets[kind]
    losses, gradient = loss_and_gradient(ours, logits, target, alpha, np.ones(6, "f"), kept)
    alone, expected = loss_and_gradient(ours, logits[kept], target[kept], alpha, np.ones(4, "f"))
    assert not np.asarray(losses)[~kept].any()
    assert not np.asarray(gradient)[~kept].any()
    np.testing.assert_allclose(losses[kept], alone, rtol=1e-6)
    close(gradient[kept], expected, 1e-6)
    assert np.isfinite(hessian(ours, logits, target, alpha, kept)).all()


def test_gradients_of_excluded_classes_do_not_count():
    """A loss may have any gradient at log p of a class that `where` excludes."""
    logits, _, targets = batch()
    kept = np.arange(5) < 3
    where, upstream = jnp.broadcast_to(kept, (6, 5)), jnp.asarray(targets["soft"])
    _, pull = jax.vjp(lambda z: pgt.log_softmax(z, alpha=0.3, where=where), jnp.asarray(logits))
    (gradient,) = pull(upstream)
    np.testing.assert_allclose(
        gradient[:, :3], primitive(logits[:, :3], 0.3, upstream[:, :3])[1], rtol=0, atol=1e-6
    )
    assert not np.asarray(gradient)[:, 3:].any()


def test_a_label_left_out_is_infinite():
    where = jnp.array([[True, True, False]])
    loss = INTEGER(jnp.zeros((1, 3)), jnp.array([2]), alpha=0.3, where=where)
    assert np.isposinf(loss).all()


# Transformations ----------------------------------------------------------------------------------


def test_vmap_over_examples_and_their_alphas(dtype):
    logits, upstream, targets = batch(dtype)
    alpha, labels = np.linspace(0, 1, 6).astype(dtype), targets["integer"]
    one = jax.vmap(jax.grad(lambda z, y, a: INTEGER(z, y, alpha=a)))
    gradient = one(jnp.asarray(logits), labels, jnp.asarray(alpha)) * upstream[:, None]
    close(gradient, by_torch(logits, labels, alpha, upstream)[1], TOLERANCE[dtype])


@pytest.mark.parametrize("kind", LOSSES)
def test_second_derivatives_are_the_potentials(kind):
    logits, upstream, targets = batch("float64", (3, 4))
    ours, plain = LOSSES[kind]

    def total(z, alpha):
        return (ours(z, targets[kind], alpha=alpha) * upstream).sum()

    def potential(z, alpha):
        return (plain(alpha * z, targets[kind]) * upstream).sum() / alpha

    @jax.jit
    def derivatives(z, alpha):
        second, third = jax.hessian(potential), jax.jacrev(jax.hessian(potential))
        forward_over_reverse, reverse_over_reverse = jax.hessian(total), jax.jacrev(jax.grad(total))
        pairs = [(forward_over_reverse, second), (reverse_over_reverse, second)]
        pairs.append((jax.jacrev(forward_over_reverse), third))
        return [(f(z, alpha), g(z, alpha)) for f, g in pairs]

    with jax.enable_x64(True):
        for alpha in (0.05, 0.3, 1.0):
            for derivative, expected in derivatives(logits, alpha):
                np.testing.assert_allclose(derivative, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_second_derivatives_with_masked_classes_are_finite(alpha):
    """Also reverse over reverse, where 0 times a NaN of the branch not taken would be NaN."""
    logits, label = jnp.array([[1.0, -jnp.inf, 2.0]]), jnp.array([2])
    part = hessian(INTEGER, logits[:, ::2], jnp.array([1]), alpha)
    assert bool(np.asarray(part).any()) == (alpha > 0)
    backward = jax.jit(jax.jacrev(jax.grad(lambda z: INTEGER(z, label, alpha=alpha).sum())))
    for whole in (hessian(INTEGER, logits, label, alpha), backward(logits)):
        np.testing.assert_allclose(whole[:, ::2, :, ::2], part, rtol=1e-6)
        assert np.isfinite(whole).all()


def test_forward_mode_is_refused_and_alpha_has_no_gradient():
    z = jnp.array([1.0, 2.0])
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda z: pgt.log_softmax(z, alpha=0.3), (z,), (z,))
    assert jax.grad(lambda a: pgt.log_softmax(z, alpha=a)[0])(0.3) == 0


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"alpha": float("nan")}, ValueError),
        ({"alpha": np.array([0.1, -0.2])}, ValueError),
        ({"alpha": "0.3"}, TypeError),
        ({"alpha": np.ones(3)}, ValueError),
        ({"axis": 2}, ValueError),
        ({"where": np.ones(3)}, ValueError),
        ({"labels": np.zeros((2, 3), int)}, ValueError),
        ({"labels": np.zeros(2)}, TypeError),
        ({"logits": np.zeros((2, 3), int)}, TypeError),
    ],
)
def test_errors_name_the_argument(arguments, error):
    usual = {"logits": np.zeros((2, 3), "float32"), "labels": np.zeros(2, int), "alpha": 0.3}
    with pytest.raises(error, match=f"`{next(iter(arguments))}`"):
        INTEGER(**{**usual, **arguments})
