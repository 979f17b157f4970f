"""PowerGrad Transform in JAX on scikit-learn's digits: optax's optimizer and AGC with our loss.

    python examples/jax_train.py

Needs ``pip install "powergrad[jax]" optax scikit-learn``.
"""

from __future__ import annotations

import argparse
import itertools

import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

from powergrad.jax import softmax_cross_entropy_with_integer_labels

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--alpha", type=float, default=0.3)
parser.add_argument("--steps", type=int, default=300)
args = parser.parse_args()

digits = load_digits()
x, y = jnp.asarray(digits.data / 16, jnp.float32), jnp.asarray(digits.target)
keys = iter(jax.random.split(jax.random.key(0), 3 + args.steps))
sizes = [64, 64, 64, 10]
parameters = [
    {"w": jax.random.normal(next(keys), (m, n)) * (2 / m) ** 0.5, "b": jnp.zeros(n)}
    for m, n in itertools.pairwise(sizes)
]
optimizer = optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.05, momentum=0.9))


def network(parameters, x):
    """A multilayer perceptron."""
    *hidden, head = parameters
    for layer in hidden:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ head["w"] + head["b"]


def loss(parameters, x, y):
    """The loss of optax.softmax_cross_entropy_with_integer_labels, with PGT's gradient."""
    logits = network(parameters, x)
    return softmax_cross_entropy_with_integer_labels(logits, y, alpha=args.alpha).mean()


@jax.jit
def step(parameters, state, rows):
    """One step of the optimizer."""
    value, gradients = jax.value_and_grad(loss)(parameters, x[rows], y[rows])
    updates, state = optimizer.update(gradients, state, parameters)
    return optax.apply_updates(parameters, updates), state, value


state = optimizer.init(parameters)
for i in range(args.steps):
    rows = jax.random.randint(next(keys), (64,), 0, 1400)
    parameters, state, value = step(parameters, state, rows)
    if (i + 1) % (args.steps // 3) == 0:
        accuracy = (network(parameters, x[1400:]).argmax(1) == y[1400:]).mean()
        print(f"step {i + 1}: loss {value:.3f}, test accuracy {accuracy:.1%}")
