"""powergrad.jax against powergrad itself, against optax, and against autodiff of the potential."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from references import literal_gradient, row_error

import powergrad

jax = pytest.importorskip("jax", reason="needs jax: pip install powergrad[jax]")
optax = pytest.importorskip("optax", reason="compares with optax: pip install optax")

jnp = jax.numpy
pgt = pytest.importorskip("powergrad.jax")

LOSSES = {
    "integer": (
        pgt.softmax_cross_entropy_with_integer_labels,
        optax.softmax_cross_entropy_with_integer_labels,
    ),
    "soft": (pgt.softmax_cross_entropy, optax.softmax_cross_entropy),
}
TOLERANCE = {"float32": 1e-6, "float64": 1e-12}


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    with jax.enable_x64(request.param == "float64"):
        yield request.param


def batch(dtype="float32", shape=(6, 5), seed=0, scale=3.0):
    """Logits, upstream gradient, integer and soft labels; classes last."""
    random = np.random.default_rng(seed)
    logits = (scale * random.standard_normal(shape)).astype(dtype)
    upstream = random.uniform(-2, 2, shape[:-1]).astype(dtype)
    labels = random.integers(0, shape[-1], shape[:-1])
    soft = random.dirichlet(np.ones(shape[-1]), shape[:-1]).astype(dtype)
    return logits, upstream, labels, soft


def by_torch(logits, target, alpha, upstream):
    """Value and gradient of `powergrad.cross_entropy`, classes last."""
    leaf = torch.tensor(logits, requires_grad=True)
    target = torch.as_tensor(target)
    soft = target.is_floating_point()
    losses = powergrad.cross_entropy(
        leaf.movedim(-1, 1) if leaf.dim() > 1 else leaf,
        target.movedim(-1, 1) if soft and leaf.dim() > 1 else target,
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

ALPHAS = [0.0, 0.05, 0.3, 1.0]


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("alpha", [*ALPHAS, "an example"])
@pytest.mark.parametrize("shape", [(6, 5), (4, 3, 5)], ids=str)
def test_equals_torch_and_optax(kind, alpha, shape, dtype):
    logits, upstream, labels, soft = batch(dtype, shape)
    if alpha == "an example":
        alpha = np.random.default_rng(1).uniform(0, 1, shape[:-1][:1]).astype(dtype)
    target = labels if kind == "integer" else soft
    ours, plain = LOSSES[kind]
    losses, by_jax = loss_and_gradient(ours, logits, target, alpha, upstream)
    assert losses.dtype == by_jax.dtype == dtype
    expected, gradient = by_torch(logits, target, alpha, upstream)
    np.testing.assert_allclose(losses, expected, rtol=0, atol=10 * TOLERANCE[dtype])
    np.testing.assert_allclose(losses, plain(logits, target), rtol=0, atol=10 * TOLERANCE[dtype])
    close(by_jax, gradient, TOLERANCE[dtype])


@pytest.mark.parametrize("alpha", ALPHAS)
def test_equals_the_literal_equation(alpha):
    """One row at a time, without a batch axis."""
    logits, _, labels, soft = batch("float64")
    with jax.enable_x64(True):
        for row, label, q in zip(logits, labels, soft, strict=True):
            for loss, target, mass in (
                (LOSSES["soft"][0], q, q),
                (LOSSES["integer"][0], label, np.eye(5)[label]),
            ):
                _, gradient = loss_and_gradient(loss, row, target, alpha, np.float64(1.0))
                close(gradient, literal_gradient(list(row), list(mass), alpha), 1e-12)


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
    logits = jnp.array([[60.0, 0.0, 1.0]])
    loss = LOSSES["integer"][0]
    ones = jnp.ones(1)
    _, gradient = loss_and_gradient(loss, logits, jnp.array([0]), 0.9, ones)
    close(gradient, by_torch(np.array([[60.0, 0.0, 1.0]]), np.array([0]), 0.9, np.ones(1))[1], 2e-6)
    assert gradient[0, 0] < 0


@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
def test_16_bits(narrow):
    """As exact as 16 bits hold: p' and the loss are formed in float32."""
    logits, _, labels, _ = batch(shape=(8, 1000))
    z = jnp.asarray(logits, narrow)
    eighths = jnp.full(8, 1 / 8, narrow)  # the upstream gradient of a mean
    losses, gradient = loss_and_gradient(LOSSES["integer"][0], z, labels, 0.1, eighths)
    assert losses.dtype == gradient.dtype == narrow
    wide = np.asarray(z, "float32")
    expected = by_torch(wide, labels, 0.1, np.full(8, 1 / 8, "float32"))[1]
    close(np.asarray(gradient, "float32"), expected, float(jnp.finfo(narrow).eps))


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("traced", [False, True])
def test_alpha_one_is_optax(kind, traced):
    logits, upstream, labels, soft = batch()
    target = labels if kind == "integer" else soft
    ours, plain = LOSSES[kind]
    if traced:
        _, gradient = loss_and_gradient(ours, logits, target, 1.0, upstream)
    else:  # JAX's own function
        _, pull = jax.vjp(lambda z: ours(z, target, alpha=1), jnp.asarray(logits))
        (gradient,) = pull(jnp.asarray(upstream))
    _, pull = jax.vjp(lambda z: plain(z, target), jnp.asarray(logits))
    # optax forms p - 1 at the label: relative to the terms, not to what is left of them.
    expected = pull(jnp.asarray(upstream))[0]
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-6)


# Masks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", ALPHAS)
def test_classes_at_minus_infinity(alpha):
    logits, upstream, labels, _ = batch()
    logits[np.arange(6), (labels + 1) % 5] = -np.inf
    loss = LOSSES["integer"][0]
    losses, ours = loss_and_gradient(loss, logits, labels, alpha, upstream)
    expected, gradient = by_torch(logits, labels, alpha, upstream)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    close(ours, gradient, 1e-6)
    assert (np.asarray(ours)[np.isneginf(logits)] == 0).all()


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_where_leaves_classes_out(kind, alpha):
    """The excluded classes might as well not be there; their gradient is 0."""
    logits, upstream, labels, soft = batch()
    labels = labels % 3
    where = np.broadcast_to(np.arange(5) < 3, (6, 5))
    target, part = (labels, labels) if kind == "integer" else (soft, soft[:, :3])
    ours, plain = LOSSES[kind]
    losses, gradient = loss_and_gradient(ours, logits, target, alpha, upstream, where)
    np.testing.assert_allclose(losses, plain(logits, target, where=jnp.asarray(where)), rtol=2e-6)
    fewer, expected = loss_and_gradient(ours, logits[:, :3], part, alpha, upstream)
    np.testing.assert_allclose(losses, fewer, rtol=1e-6)
    close(gradient[:, :3], expected, 1e-6)
    assert not np.asarray(gradient)[:, 3:].any()


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_where_leaves_positions_out(kind, alpha):
    """Padding: no loss and no gradient of any order, whatever stands there."""
    logits, _, labels, soft = batch()
    kept = np.array([True, False, True, True, False, True])
    logits[1], labels[1], labels[4] = np.inf, -100, 77
    ours = LOSSES[kind][0]
    target = labels if kind == "integer" else soft

    losses, gradient = loss_and_gradient(ours, logits, target, alpha, np.ones(6, "f"), kept)
    alone, expected = loss_and_gradient(ours, logits[kept], target[kept], alpha, np.ones(4, "f"))
    assert not np.asarray(losses)[~kept].any()
    assert not np.asarray(gradient)[~kept].any()
    np.testing.assert_allclose(losses[kept], alone, rtol=1e-6)
    close(gradient[kept], expected, 1e-6)
    assert np.isfinite(hessian(ours, logits, target, alpha, kept)).all()


def test_a_label_left_out_is_infinite():
    where = jnp.array([[True, True, False]])
    loss = LOSSES["integer"][0](jnp.zeros((1, 3)), jnp.array([2]), alpha=0.3, where=where)
    assert np.isposinf(loss).all()


@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_axis(axis):
    logits, upstream, labels, soft = batch(shape=(4, 3, 5))
    z = np.moveaxis(logits, -1, axis)
    for ours, target, moved in (
        (LOSSES["integer"][0], labels, labels),
        (LOSSES["soft"][0], soft, np.moveaxis(soft, -1, axis)),
    ):
        losses, by_jax = loss_and_gradient(ours, z, moved, 0.3, upstream, axis=axis)
        expected, gradient = by_torch(logits, target, 0.3, upstream)
        np.testing.assert_allclose(losses, expected, rtol=2e-6)
        close(np.moveaxis(by_jax, axis, -1), gradient, 1e-6)


# Transformations ----------------------------------------------------------------------------------


def test_jit_and_a_traced_alpha(dtype):
    logits, upstream, labels, _ = batch(dtype)
    loss = LOSSES["integer"][0]

    @jax.jit
    def gradient(z, alpha):
        return jax.grad(lambda z: (loss(z, labels, alpha=alpha) * upstream).sum())(z)

    for alpha in (0.0, 0.3, 1.0):
        close(
            gradient(logits, alpha),
            by_torch(logits, labels, alpha, upstream)[1],
            TOLERANCE[dtype],
        )
    assert gradient._cache_size() == 1  # a schedule does not compile again


def test_vmap_over_examples_and_their_alphas(dtype):
    logits, upstream, labels, _ = batch(dtype)
    alpha = np.linspace(0, 1, 6).astype(dtype)
    loss = LOSSES["integer"][0]
    one = jax.vmap(jax.grad(lambda z, y, a: loss(z, y, alpha=a)))
    gradient = one(jnp.asarray(logits), labels, jnp.asarray(alpha)) * upstream[:, None]
    close(gradient, by_torch(logits, labels, alpha, upstream)[1], TOLERANCE[dtype])


@pytest.mark.parametrize("kind", LOSSES)
def test_second_derivatives_are_the_potentials(kind):
    logits, upstream, labels, soft = batch("float64", (3, 4))
    target = labels if kind == "integer" else soft
    ours, plain = LOSSES[kind]

    def total(z, alpha):
        return (ours(z, target, alpha=alpha) * upstream).sum()

    def potential(z, alpha):
        return (plain(alpha * z, target) * upstream).sum() / alpha

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


def test_second_derivatives_at_alpha_zero_are_none():
    logits, _, labels, _ = batch()
    loss = LOSSES["integer"][0]
    assert not np.asarray(hessian(loss, logits, labels, 0)).any()


@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_second_derivatives_with_masked_classes_are_finite(alpha):
    """Also reverse over reverse, where 0 times a NaN of the branch not taken would be NaN."""
    logits = jnp.array([[1.0, -jnp.inf, 2.0]])
    loss = LOSSES["integer"][0]
    part = hessian(loss, logits[:, ::2], jnp.array([1]), alpha)
    backward = jax.jit(jax.jacrev(jax.grad(lambda z: loss(z, jnp.array([2]), alpha=alpha).sum())))
    for whole in (hessian(loss, logits, jnp.array([2]), alpha), backward(logits)):
        np.testing.assert_allclose(whole[:, ::2, :, ::2], part, rtol=1e-6)
        assert np.isfinite(whole).all()


def test_forward_mode_is_refused():
    z = jnp.ones((1, 3))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda z: pgt.log_softmax(z, alpha=0.3), (z,), (z,))


def test_alpha_has_no_gradient():
    z = jnp.array([1.0, 2.0])
    assert jax.grad(lambda a: pgt.log_softmax(z, alpha=a)[0])(0.3) == 0


# Checks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"alpha": 1.3}, ValueError, r"Expected `alpha` to be in \[0, 1\], but got 1.3"),
        ({"alpha": float("nan")}, ValueError, r"Expected `alpha` to be in \[0, 1\]"),
        ({"alpha": np.array([0.1, -0.2])}, ValueError, r"Expected `alpha` to be in \[0, 1\]"),
        ({"alpha": "0.3"}, TypeError, "Expected `alpha` to be real numbers"),
        ({"alpha": True}, TypeError, "Expected `alpha` to be real numbers"),
        ({"alpha": np.ones(3)}, ValueError, r"shape \(\) or \(2,\), but got \(3,\)"),
        ({"axis": 2}, ValueError, r"Expected `axis` .* shape \(2, 3\), but got 2"),
        ({"where": np.ones(3)}, ValueError, r"shape \(2, 3\) or \(2,\), but got \(3,\)"),
        ({"labels": np.zeros((2, 3), int)}, ValueError, r"shape \(2,\) .* but got \(2, 3\)"),
        ({"labels": np.zeros(2)}, TypeError, "Expected `labels` to be integers"),
        ({"logits": np.zeros((2, 3), int)}, TypeError, "Expected `logits` to be floating-point"),
    ],
)
def test_errors_name_the_argument(arguments, error, message):
    usual = {"logits": np.zeros((2, 3), "float32"), "labels": np.zeros(2, int), "alpha": 0.3}
    given_arguments = {**usual, **arguments}
    with pytest.raises(error, match=message):
        pgt.softmax_cross_entropy_with_integer_labels(**given_arguments)
