r"""PowerGrad Transform for JAX: the primitive, and losses with the names and shapes of optax.

The primitive is the one of :mod:`powergrad.transform`, as a ``jax.custom_vjp``: its value is
``jax.nn.log_softmax``, and for ``u = dL / dlog p`` its gradient is ``u - p' * sum(u)`` with
``p' = softmax(alpha * z)``. It works under ``jit``, ``vmap`` and ``grad``, also nested: second
derivatives are those of the potential ``CE(alpha z, q) / alpha``. JAX does not support forward-mode
differentiation of a ``custom_vjp`` function (``jax.hessian``, forward over reverse, works).

For adaptive gradient clipping, use ``optax.adaptive_grad_clip``.
"""

from __future__ import annotations

import functools
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

__all__ = ["log_softmax", "softmax_cross_entropy", "softmax_cross_entropy_with_integer_labels"]


def log_softmax(
    x: ArrayLike, axis: int = -1, *, alpha: ArrayLike, where: ArrayLike | None = None
) -> Array:
    r"""``jax.nn.log_softmax`` with the backward pass of PowerGrad Transform.

    Args:
        x: Logits, of any shape.
        axis: The class axis.
        alpha: A number in [0, 1]; or an array of them: 0-d, of the shape of ``x`` without ``axis``,
            or one per example (the first axis of ``x``). Its own gradient is 0. The number 1 calls
            JAX's own function.
        where: The elements to include: of the shape of ``x``, or of that without ``axis``. The
            others get ``-inf`` and no gradient.

    Returns:
        Log-probabilities, of the shape of ``x``.

    Raises:
        ValueError: If ``axis``, ``alpha`` or ``where`` is not as above.
        TypeError: If ``x`` is not floating-point, or ``alpha`` not real.

    Example:
        >>> z = jnp.array([2.0, 0.0, -1.0])
        >>> gradient = jax.grad(lambda z: -log_softmax(z, alpha=0.25)[0])(z)
        >>> print(np.asarray(gradient).round(4))  # softmax(0.25 * z) - [1, 0, 0]
        [-0.519   0.2918  0.2272]
    """
    x, axis = _check_logits(x, axis, "x")
    exponent, where = _check_alpha(alpha, x, axis), _check_where(where, x, axis)
    if isinstance(alpha, numbers.Real) and alpha == 1:
        return jax.nn.log_softmax(x, axis, where)
    return _log_softmax(axis, x, exponent, where)


def softmax_cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    alpha: ArrayLike,
    axis: int = -1,
    where: ArrayLike | None = None,
) -> Array:
    r"""``optax.softmax_cross_entropy`` with the gradient ``sum(q) * p' - q`` at the logits.

    Args:
        logits: Logits, of any shape.
        labels: Class probabilities ``q``, of the shape of ``logits`` or broadcastable to it.
        alpha: As in :func:`log_softmax`.
        axis: The class axis.
        where: As in :func:`log_softmax`. A position without included elements has loss 0.

    Returns:
        One loss per position: the shape of ``logits`` without ``axis``, and their dtype.

    Raises:
        ValueError: If ``axis``, ``alpha`` or ``where`` is not as above.
        TypeError: If ``logits`` are not floating-point, or ``alpha`` not real.

    Example:
        >>> logits, labels = jnp.array([[2.0, 0.0, -1.0]]), jnp.array([[0.5, 0.5, 0.0]])
        >>> loss = lambda z: softmax_cross_entropy(z, labels, alpha=0.25).mean()
        >>> print(np.asarray(jax.grad(loss)(logits)).round(4))
        [[-0.019  -0.2082  0.2272]]
    """
    logits, axis = _check_logits(logits, axis, "logits")
    where = _check_where(where, logits, axis)
    log_p = log_softmax(_widened(logits), axis, alpha=alpha, where=where)
    return -jnp.sum(labels * log_p, axis, where=where).astype(logits.dtype)


def softmax_cross_entropy_with_integer_labels(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    alpha: ArrayLike,
    axis: int = -1,
    where: ArrayLike | None = None,
) -> Array:
    r"""``optax.softmax_cross_entropy_with_integer_labels`` with the gradient ``p' - q``.

    Args:
        logits: Logits, of any shape.
        labels: Class indices, of the shape of ``logits`` without ``axis``. As in optax, their
            values are not checked; at positions that ``where`` excludes, any value is allowed.
        alpha: As in :func:`log_softmax`.
        axis: The class axis.
        where: As in :func:`log_softmax`. A position without included elements has loss 0. If the
            class of a label is excluded, the loss is infinite (in optax it is finite).

    Returns:
        One loss per position: the shape of ``labels``, and the dtype of ``logits``.

    Raises:
        ValueError: If a shape, ``axis``, ``alpha`` or ``where`` is not as above.
        TypeError: If a dtype is not as above.

    Example:
        >>> logits, labels = jnp.array([[2.0, 0.0, -1.0]]), jnp.array([1])
        >>> loss = lambda z: softmax_cross_entropy_with_integer_labels(z, labels, alpha=0.25).mean()
        >>> print(np.asarray(jax.grad(loss)(logits)).round(4))
        [[ 0.481  -0.7082  0.2272]]
    """
    logits, axis = _check_logits(logits, axis, "logits")
    labels, where = _check_labels(labels, logits, axis), _check_where(where, logits, axis)
    log_p = log_softmax(_widened(logits), axis, alpha=alpha, where=where)
    loss = -jnp.take_along_axis(log_p, jnp.expand_dims(labels, axis), axis).squeeze(axis)
    if where is not None:
        loss = jnp.where(where.any(axis), loss, 0)
    return loss.astype(logits.dtype)


# The primitive ------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _log_softmax(axis: int, x: Array, alpha: Array, where: Array | None) -> Array:
    return jax.nn.log_softmax(x, axis, where)


def _forward(
    axis: int, x: Array, alpha: Array, where: Array | None
) -> tuple[Array, tuple[Array, Array, Array | None]]:
    return jax.nn.log_softmax(x, axis, where), (x, alpha, where)


def _backward(axis: int, saved: tuple[Array, Array, Array | None], u: Array) -> tuple[Any, ...]:
    x, alpha, where = saved
    scores = _widened(x)
    u = u.astype(scores.dtype)
    if where is not None:
        scores, u = jnp.where(where, scores, -jnp.inf), jnp.where(where, u, 0)
    p = _flattened(scores, alpha, axis)
    gradient = u - p * u.sum(axis, keepdims=True)
    # At the most likely class p' may round to 1, and u - p' u to 0. There, 1 - p' is computed as
    # the sum of the other classes' p', and sum(u) - u as the sum of their u.
    top = jnp.arange(x.shape[axis]) == jnp.moveaxis(scores.argmax(axis, keepdims=True), axis, -1)
    top = jnp.moveaxis(top, -1, axis)
    others_p = jnp.where(top, 0, p).sum(axis, keepdims=True)
    others_u = jnp.where(top, 0, u).sum(axis, keepdims=True)
    gradient = jnp.where(top, u * others_p - p * others_u, gradient)
    return gradient.astype(x.dtype), None, None


_log_softmax.defvjp(_forward, _backward)


def _flattened(scores: Array, alpha: Array, axis: int) -> Array:
    """``p' = softmax(alpha * (z - max z))``; 0 for classes at ``-inf``, also at alpha 0."""
    largest = jax.lax.stop_gradient(scores.max(axis, keepdims=True))
    shifted = scores - jnp.where(largest == -jnp.inf, 0, largest)
    masked = shifted == -jnp.inf
    # `where` inside and outside: the derivative of the branch not taken must not be NaN either.
    exps = jnp.where(masked, 0, jnp.exp(alpha * jnp.where(masked, 0, shifted)))
    total = exps.sum(axis, keepdims=True)
    return (exps / jnp.where(total == 0, 1, total)).astype(scores.dtype)


def _widened(x: Array) -> Array:
    """`x` in float32 or wider: 16 bits are not precise enough for p' and the loss."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


# Checks of shapes, dtypes and numbers; array values are checked unless they are traced. ----------


def _check_logits(x: ArrayLike, axis: int, name: str) -> tuple[Array, int]:
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"Expected `{name}` to be floating-point, but got {x.dtype}.")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"Expected `axis` to be an axis of `{name}` of shape {x.shape}, but got {axis}."
        )
    return x, axis % x.ndim


def _check_labels(labels: ArrayLike, logits: Array, axis: int) -> Array:
    labels = jnp.asarray(labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"Expected `labels` to be integers, but got {labels.dtype}.")
    positions = _without(logits.shape, axis)
    if labels.shape != positions:
        raise ValueError(
            f"Expected `labels` to have shape {positions} for `logits` of shape {logits.shape}, "
            f"but got {labels.shape}."
        )
    return labels


def _check_where(where: ArrayLike | None, x: Array, axis: int) -> Array | None:
    """`where` as booleans of the shape of `x`."""
    if where is None:
        return None
    where = jnp.asarray(where, bool)
    if where.shape == _without(x.shape, axis):
        where = jnp.expand_dims(where, axis)
    elif where.shape != x.shape:
        raise ValueError(
            f"Expected `where` to have shape {x.shape} or {_without(x.shape, axis)}, "
            f"but got {where.shape}."
        )
    return jnp.broadcast_to(where, x.shape)


def _check_alpha(alpha: ArrayLike, x: Array, axis: int) -> Array:
    """`alpha` as an array that broadcasts over `x` and is constant along `axis`."""
    if not isinstance(alpha, Tracer):
        values = np.asarray(alpha)
        if values.dtype.kind not in "fiuV":  # V: bfloat16 and its like
            raise TypeError(f"Expected `alpha` to be real numbers, but got {values.dtype}.")
        if not ((values >= 0) & (values <= 1)).all():
            raise ValueError(f"Expected `alpha` to be in [0, 1], but got {values}.")
    alpha = jnp.asarray(alpha, jnp.promote_types(x.dtype, jnp.float32))
    positions, examples = _without(x.shape, axis), x.shape[:1] if axis != 0 else ()
    if alpha.ndim == 0:
        return alpha
    if alpha.shape == positions:
        return jnp.expand_dims(alpha, axis)
    if alpha.shape == examples:
        return alpha.reshape(-1, *[1] * (x.ndim - 1))
    allowed = " or ".join(str(s) for s in dict.fromkeys([(), examples, positions]))
    raise ValueError(f"Expected `alpha` to have shape {allowed}, but got {alpha.shape}.")


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]
