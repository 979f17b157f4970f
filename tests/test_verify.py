"""`verify`: the alpha that it measures, what it refuses to answer, and that it leaves no trace.

The gradients here are not only those of this library: where it matters they are made by PyTorch's
own autograd of ``CE(alpha z, q) / alpha``, or written down.
"""

from __future__ import annotations

import copy
import importlib
import math
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from references import potential
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import powergrad
from powergrad import PowerGrad, cross_entropy, verify
from powergrad.lab.trainer.objectives import as_published_cross_entropy
from powergrad.verify import StepWatcher, Verification

ALPHAS = [0.0, 0.05, 0.3, 0.7, 1.0]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ALPHA_WITHIN = {
    torch.float64: 1e-6,
    torch.float32: 1e-6,
    torch.bfloat16: 1e-2,  # 8 bits of gradient
    torch.float16: 1e-3,  # 11 bits
}


class Net(nn.Module):
    """Hidden layers with batch normalisation and dropout, then a head with spread logits."""

    def __init__(self, classes: int = 10, width: int = 32, spread: float = 6.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.1))
        self.head = nn.Linear(width, classes)
        with torch.no_grad():
            self.head.weight.mul_(spread)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def batch(rows: int = 48, classes: int = 10, dtype: torch.dtype = torch.float32):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 8, generator=g, dtype=torch.float64).to(dtype)
    return x, torch.randint(0, classes, (rows,), generator=g)


def measured(
    loss: Callable[[Tensor, Tensor], Tensor],
    rows: int = 48,
    classes: int = 10,
    dtype: torch.dtype = torch.float32,
    spread: float = 6.0,
    target: Tensor | None = None,
) -> Verification:
    torch.manual_seed(0)
    model = Net(classes, spread=spread).to(dtype)
    x, y = batch(rows, classes, dtype)
    return verify(lambda: loss(model(x), y).backward(), model, target=target)


def assert_alpha(verification: Verification, alpha: float, within: float = 1e-6) -> None:
    assert verification.verdict == ("plain" if alpha == 1 else "pgt"), str(verification)
    assert verification.alpha is not None
    assert abs(verification.alpha - alpha) <= within, str(verification)
    assert verification.uncertainty is not None
    assert abs(verification.alpha - alpha) <= verification.uncertainty + 1e-9


# Cross-entropies --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_alpha_is_measured(alpha, smoothing, dtype):
    verification = measured(
        lambda z, y: cross_entropy(z, y, alpha=alpha, label_smoothing=smoothing), dtype=dtype
    )
    assert_alpha(verification, alpha, ALPHA_WITHIN[dtype])
    assert (verification.rows, verification.classes) == (48, 10)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("alpha", [0.05, 0.3, 1.0])
def test_against_autograd_of_the_potential(alpha, smoothing):
    """A gradient that none of our own backward passes made."""
    verification = measured(
        lambda z, y: potential(z, y, alpha, label_smoothing=smoothing), dtype=torch.float64
    )
    assert_alpha(verification, alpha)
    assert verification.deviation is not None
    assert verification.deviation < 1e-12


WEIGHT = torch.linspace(0.5, 3, 10)
IGNORED = torch.arange(48) % 3 == 0
LOSSES: dict[str, Callable[..., Tensor]] = {
    "mean": lambda z, y, ce: ce(z, y),
    "sum": lambda z, y, ce: ce(z, y, reduction="sum"),
    "none": lambda z, y, ce: ce(z, y, reduction="none").sum() / 7,
    "loss scale": lambda z, y, ce: 65536 * ce(z, y),
    "tiny": lambda z, y, ce: 1e-6 * ce(z, y),
    "class weights": lambda z, y, ce: ce(z, y, weight=WEIGHT),
    "class weights, smoothing": lambda z, y, ce: ce(z, y, weight=WEIGHT, label_smoothing=0.1),
    "ignored rows": lambda z, y, ce: ce(z, y.masked_fill(IGNORED, -100)),
    "confident, smoothing": lambda z, y, ce: ce(z, z.argmax(1), label_smoothing=0.2),
    "mixup": lambda z, y, ce: 0.6 * ce(z, y) + 0.4 * ce(z, y.flip(0)),
    "mixup with soft targets": lambda z, y, ce: ce(z, mixed(y, 0.97)),
    "some classes only": lambda z, y, ce: ce(z[:, :7], y % 7),
    "masked classes": lambda z, y, ce: ce(
        z.masked_fill(torch.arange(10) == 9, -torch.inf), y.clamp(max=8)
    ),
    "underflow": lambda z, y, ce: ce(z, y),
    "saturated": lambda z, y, ce: ce(z, torch.where(IGNORED, y, z.argmax(1))),
}


def mixed(y: Tensor, share: float) -> Tensor:
    return share * F.one_hot(y, 10) + (1 - share) * F.one_hot(y.flip(0), 10).float()


# Without their target these cannot be told from a loss with other soft targets.
TARGETS: dict[str, Callable[[Tensor], Tensor]] = {
    "class weights, smoothing": lambda y: y,
    "mixup": lambda y: mixed(y, 0.6),
    "mixup with soft targets": lambda y: mixed(y, 0.97),
}


@pytest.mark.parametrize("alpha", [0.3, 1.0])
@pytest.mark.parametrize("name", LOSSES)
def test_options_of_the_loss(name, alpha):
    def ce(z: Tensor, y: Tensor, **options: Any) -> Tensor:
        return cross_entropy(z, y, alpha=alpha, **options)

    # Gaps of logits at which p is 0 in float32, or p - 1.
    spread = {"underflow": 150.0, "saturated": 40.0}.get(name, 6.0)
    loss = lambda z, y: LOSSES[name](z, y, ce)  # noqa: E731
    verification = measured(loss, spread=spread)
    if name in TARGETS:
        assert verification.verdict == "cannot tell", str(verification)
        assert "pass `target`" in verification.reason
        verification = measured(loss, spread=spread, target=TARGETS[name](batch()[1]))
    assert_alpha(verification, alpha)
    if name == "ignored rows":
        assert verification.rows == 32
    if name in ("some classes only", "masked classes"):
        assert verification.classes == (7 if name == "some classes only" else 9)


@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_the_mode_around_anyones_loss(alpha):
    def loss(z: Tensor, y: Tensor) -> Tensor:
        with PowerGrad(alpha):
            return F.nll_loss(F.log_softmax(z, 1), y)

    assert_alpha(measured(loss), alpha)
    assert_alpha(measured(lambda z, y: F.cross_entropy(z, y)), 1.0)
    with PowerGrad(alpha):  # around the whole step
        assert_alpha(measured(lambda z, y: F.cross_entropy(z, y)), alpha)


@pytest.mark.parametrize("alpha", [0.3, 1.0])
@pytest.mark.parametrize(
    ("kind", "shape", "loss"),
    [
        ("Linear", (4, 7, 6), lambda z, y, a: cross_entropy(z.flatten(0, 1), y[:28], alpha=a)),
        (
            "Linear",
            (4, 7, 6),
            lambda z, y, a: cross_entropy(z.transpose(1, 2), y[:28].view(4, 7), alpha=a),
        ),
        ("Conv2d", (2, 6, 3, 5), lambda z, y, a: cross_entropy(z, y.view(2, 3, 5), alpha=a)),
        ("Conv1d", (2, 6, 9), lambda z, y, a: cross_entropy(z, y[:18].view(2, 9), alpha=a)),
        ("Linear", (6,), lambda z, y, a: cross_entropy(z, y[0], alpha=a)),
    ],
    ids=["tokens", "tokens, classes second", "pixels", "as many pixels as classes", "one row"],
)
def test_shapes(kind, shape, loss, alpha):
    torch.manual_seed(0)
    head = nn.Linear(6, 9) if kind == "Linear" else getattr(nn, kind)(6, 9, 1)
    head.weight.data.mul_(4)
    x, y = torch.randn(shape), torch.randint(0, 9, (30,))
    verification = verify(lambda: loss(head(x), y, alpha).backward(), head)
    assert_alpha(verification, alpha, 1e-5)  # few rows: a single row has nine classes
    assert verification.classes == 9


def test_pixels_of_another_loss():
    torch.manual_seed(0)
    head = nn.Conv2d(6, 9, 1)
    x = torch.randn(2, 6, 3, 5)
    verification = verify(lambda: head(x).sigmoid().sum().backward(), head)
    assert verification.verdict == "neither"
    assert verification.rows * verification.classes == 2 * 9 * 3 * 5


def test_accumulation_and_factors_of_the_examples():
    torch.manual_seed(0)
    model = Net()
    x, y = batch()

    def accumulated() -> None:
        for rows in torch.arange(48).split([8, 30, 10]):
            (cross_entropy(model(x[rows]), y[rows], alpha=0.3) / 3).backward()

    verification = verify(accumulated, model)
    assert_alpha(verification, 0.3)
    assert verification.rows == 48

    def averaged_by_sentence() -> None:
        loss = cross_entropy(model(x), y, alpha=0.3, reduction="none").view(6, 8)
        (loss.mean(1) * torch.arange(1, 7)).mean().backward()

    assert_alpha(verify(averaged_by_sentence, model), 0.3)

    importance = torch.rand(48, generator=torch.Generator().manual_seed(3))
    weighted = measured(
        lambda z, y: (importance * cross_entropy(z, y, alpha=0.3, reduction="none")).mean()
    )
    assert_alpha(weighted, 0.3)
    assert "as with example weights" in weighted.reason


@given(
    alpha=st.floats(0, 0.99),
    rows=st.integers(6, 30),
    classes=st.integers(3, 12),
    smoothing=st.sampled_from([0.0, 0.05, 0.2]),
    scale=st.floats(-12, 12),
    seed=st.integers(0, 99),
)
def test_never_wrong(alpha, rows, classes, smoothing, scale, seed):
    """A random alpha, written down in float64 without this library: measured, or cannot tell."""
    torch.manual_seed(seed)
    head = nn.Linear(5, classes, dtype=torch.float64)
    head.weight.data.mul_(3)
    x, y = torch.randn(rows, 5, dtype=torch.float64), torch.randint(0, classes, (rows,))

    def step() -> None:
        z = head(x)
        q = F.one_hot(y, classes) * (1 - smoothing) + smoothing / classes
        g = math.exp(scale) * (torch.softmax(alpha * z.detach(), 1) - q)
        z.backward(g)

    verification = verify(step, head)
    if classes > 3:  # else two points a row, and smoothing takes one
        assert verification.verdict == ("plain" if alpha > 0.999 else "pgt"), str(verification)
    if verification.alpha is not None:
        assert abs(verification.alpha - alpha) <= max(verification.uncertainty or 0, 1e-6)


# Soft targets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight": WEIGHT},
        {"label_smoothing": 0.1},
        {"weight": WEIGHT, "label_smoothing": 0.1},
    ],
    ids=["plain", "class weights", "smoothing", "both"],
)
def test_soft_targets_need_the_target(alpha, options):
    q = torch.randn(48, 10, generator=torch.Generator().manual_seed(5)).mul(2).softmax(1)

    def loss(z: Tensor, _: Tensor) -> Tensor:
        return cross_entropy(z, q, alpha=alpha, **options)

    unknown = measured(loss)
    assert unknown.verdict == "cannot tell"
    assert "pass `target`" in unknown.reason
    assert_alpha(measured(loss, target=q), alpha)
    assert measured(loss, target=q.roll(1, 0)).verdict == "neither"


def test_labels_as_target():
    _, y = batch()
    assert_alpha(measured(lambda z, y: cross_entropy(z, y, alpha=0.3), target=y), 0.3)
    one_hot = F.one_hot(y, 10).double()
    assert_alpha(measured(lambda z, y: cross_entropy(z, y, alpha=0.3), target=one_hot), 0.3)
    wrong = measured(lambda z, y: cross_entropy(z, y, alpha=0.3), target=torch.ones(3, 4))
    assert wrong.verdict == "cannot tell"
    assert "of shape (3, 4)" in wrong.reason


def test_two_classes():
    _, y = batch(classes=2)
    loss = lambda z, y: cross_entropy(z, y, alpha=0.3)  # noqa: E731
    assert measured(loss, classes=2).verdict == "cannot tell"
    assert_alpha(measured(loss, classes=2, target=y), 0.3, 1e-5)


# Neither ------------------------------------------------------------------------------------------


def focal(z: Tensor, y: Tensor) -> Tensor:
    log_p = F.log_softmax(z, 1).gather(1, y[:, None])
    return -((1 - log_p.exp()) ** 2 * log_p).mean()


NEITHER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "noise": lambda z, y: (z * torch.randn(z.shape)).sum(),
    "squared error": lambda z, y: F.mse_loss(z, F.one_hot(y, 10).float()),
    "binary": lambda z, y: F.binary_cross_entropy_with_logits(z, F.one_hot(y, 10).float()),
    "focal": focal,
    "margin": lambda z, y: F.multi_margin_loss(z, y),
    "sharpened": lambda z, y: F.cross_entropy(20 * z, y),
    "capped": lambda z, y: F.cross_entropy(3 * torch.tanh(z / 3), y),
    "two alphas": lambda z, y: cross_entropy(z, y, alpha=0.2) + F.cross_entropy(z, y),
    "half plain": lambda z, y: (
        F.cross_entropy(z[:20], y[:20]) + cross_entropy(z[20:], y[20:], alpha=0.3)
    ),
    "a further term": lambda z, y: F.cross_entropy(z, y) + 1e-2 * (z**2).mean(),
    "poly-1": lambda z, y: F.cross_entropy(z, y) - z.softmax(1).gather(1, y[:, None]).mean(),
}


# Soft targets could explain these: it is the labels that rule them out.
NEEDS_LABELS = {"margin", "two alphas", "a further term"}


@pytest.mark.parametrize("name", NEITHER)
def test_neither(name):
    _, y = batch(64)
    verification = measured(NEITHER[name], rows=64, target=y)
    assert verification.verdict == "neither", str(verification)
    assert verification.alpha is None
    without = measured(NEITHER[name], rows=64)
    assert without.verdict == ("cannot tell" if name in NEEDS_LABELS else "neither"), str(without)
    assert ("pass `target`" in without.reason) == (name in NEEDS_LABELS)


@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize("alpha", [0.05, 0.3, 0.7])
@pytest.mark.parametrize("scale", ["1", "N", "N^2 / 2", "N^2"])
def test_the_papers_listing(rows, alpha, scale):
    """It is PGT at the loss scale N^2 alone."""
    factor = {"1": 1, "N": rows, "N^2 / 2": rows**2 / 2, "N^2": rows**2}[scale]
    verification = measured(
        lambda z, y: factor * as_published_cross_entropy(z, y, alpha=alpha),
        rows=rows,
        dtype=torch.float64,
    )
    if scale == "N^2":
        assert_alpha(verification, alpha, 1e-5)
    else:
        assert verification.verdict == "neither", str(verification)
        assert "the paper's listing" in verification.reason


@pytest.mark.parametrize("smoothing", [0.05, 0.1])
def test_the_papers_listing_with_smoothing(smoothing):
    def loss(z: Tensor, y: Tensor) -> Tensor:
        return as_published_cross_entropy(z, y, alpha=0.3, label_smoothing=smoothing)

    verification = measured(loss, rows=64, target=batch(64)[1])
    assert verification.verdict == "neither", str(verification)
    assert measured(loss, rows=64).verdict == "cannot tell"


def test_alphas_of_examples():
    alpha = torch.linspace(0.1, 0.8, 48)
    verification = measured(lambda z, y: cross_entropy(z, y, alpha=alpha))
    assert verification.verdict == "pgt"
    assert verification.lowest == pytest.approx(0.1, abs=1e-5)
    assert verification.highest == pytest.approx(0.8, abs=1e-5)
    assert "alphas from 0.100 to 0.800, one per row" in str(verification)


# Cannot tell --------------------------------------------------------------------------------------


def test_cannot_tell():
    x, y = batch()

    def reason(step: Callable[[nn.Module], Any], model: nn.Module | None = None, **options) -> str:
        torch.manual_seed(0)
        model = model or Net()
        verification = verify(lambda: step(model), model, **options)
        assert verification.verdict == "cannot tell", str(verification)
        assert verification.alpha is None
        return verification.reason

    zero = Net()
    nn.init.zeros_(zero.head.weight)
    nn.init.zeros_(zero.head.bias)
    assert "the logits of each row are all equal" in reason(
        lambda m: F.cross_entropy(m(x), y).backward(), zero
    )
    assert "no gradient reached" in reason(lambda m: m(x))
    assert "no gradient reached" in reason(lambda m: F.cross_entropy(m(x).detach(), y))
    assert "was not called" in reason(lambda m: None)
    assert "is zero" in reason(lambda m: (0 * F.cross_entropy(m(x), y)).backward())
    assert "NaN" in reason(lambda m: (math.nan * F.cross_entropy(m(x), y)).backward())
    assert "infinite" in reason(lambda m: (math.inf * m(x).exp().sum()).backward())
    assert "without gradients" in reason(lambda m: torch.no_grad()(m)(x))
    assert "too few" in reason(
        lambda m: F.cross_entropy(m.get_submodule("body.0")(x[:1])[:, :4], y[:1] % 4).backward(),
        head="body.0",
    )

    def in_place(m: nn.Module) -> None:
        z = m(x)
        z /= 2
        F.cross_entropy(z, y).backward()

    assert "in place" in reason(in_place)

    def by_torch_func(m: nn.Module) -> None:
        def loss(parameters: dict[str, Tensor]) -> Tensor:
            return F.cross_entropy(torch.func.functional_call(m, parameters, (x,)), y)

        torch.func.grad(loss)(dict(m.named_parameters()))

    assert "torch.func" in reason(by_torch_func, Net().eval())
    focal_on_few = reason(lambda m: focal(m(x[:8]), y[:8]).backward())
    assert "the factors of the rows differ" in focal_on_few


def test_too_little_precision():
    """Logits that hardly differ, in bfloat16: no alpha can be told from another."""
    verification = measured(
        lambda z, y: cross_entropy(z, y, alpha=0.3), rows=16, dtype=torch.bfloat16, spread=0.1
    )
    assert verification.verdict == "cannot tell"
    assert "do not determine alpha" in verification.reason
    wide = measured(lambda z, y: cross_entropy(z, y, alpha=0.3), rows=16, spread=0.1)
    assert_alpha(wide, 0.3, 1e-2)  # in float32 they do differ enough


def test_a_loss_in_16_bits_of_logits_in_32():
    verification = measured(
        lambda z, y: cross_entropy(z.bfloat16(), y, alpha=0.3), target=batch()[1]
    )
    assert verification.verdict == "cannot tell"
    assert "16 bits" in verification.reason
    assert "close to that of alpha 0.3" in verification.reason


# Where the logits are -----------------------------------------------------------------------------


def test_hooks_on_the_logits_are_included():
    """The gradient is taken where it has passed everything that may alter it."""
    torch.manual_seed(0)
    model = Net()
    x, y = batch()

    def altered(grad: Tensor) -> Tensor:
        return torch.softmax(0.3 * logits[-1], 1) - F.one_hot(y, 10)

    logits: list[Tensor] = []

    def by_tensor_hook() -> None:
        z = model(x)
        logits.append(z.detach())
        z.register_hook(altered)
        F.cross_entropy(z, y).backward()

    assert_alpha(verify(by_tensor_hook, model), 0.3)

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        logits.append(output.detach())

    def step() -> None:
        F.cross_entropy(model(x), y).backward()

    handle = model.head.register_forward_hook(keep)
    with powergrad.alter_output(model, "head", altered):
        assert_alpha(verify(step, model), 0.3)
    handle.remove()
    assert_alpha(verify(step, model), 1.0)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_a_head_inside_a_checkpoint(alpha, use_reentrant):
    torch.manual_seed(0)
    model = Net()
    x, y = batch()

    def step() -> None:
        hidden = model.body(x)
        z = checkpoint(model.head, hidden, use_reentrant=use_reentrant)
        cross_entropy(z, y, alpha=alpha).backward()

    verification = verify(step, model)
    assert_alpha(verification, alpha)
    assert verification.rows == 48


def test_gradients_of_several_backward_passes_add_up():
    torch.manual_seed(0)
    model = Net()
    x, y = batch()

    def step(first: float, second: float) -> None:
        z = model(x)
        cross_entropy(z, y, alpha=first).backward(retain_graph=True)
        cross_entropy(z, y, alpha=second).backward()

    assert_alpha(verify(lambda: step(0.3, 0.3), model), 0.3)

    def zeros_first() -> None:
        z = model(x)
        (0 * z).sum().backward(retain_graph=True)
        cross_entropy(z, y, alpha=0.3).backward()

    assert_alpha(verify(zeros_first, model), 0.3)
    assert verify(lambda: step(0.1, 1.0), model, target=y).verdict == "neither"


def test_a_named_module():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 10), nn.Identity(), nn.BatchNorm1d(4))
    nn.init.normal_(model[0].weight)  # pyright: ignore[reportArgumentType]
    x, y = batch()

    def step() -> None:
        z = model[1](3 * model[0](x))
        cross_entropy(z, y, alpha=0.2).backward()

    assert_alpha(verify(step, model, "1"), 0.2)
    assert_alpha(verify(step, model, model[0]), 0.6)  # logits are scaled after it: 3 * 0.2
    with pytest.raises(ValueError, match="pass `head`"):
        verify(step, model)
    with StepWatcher(model) as watcher:
        step()
    assert watcher.result().verdict == "cannot tell"
    assert "pass `head`" in watcher.result().reason


def test_an_output_with_logits():
    class Output(dict):
        pass

    class Model(nn.Module):
        def __init__(self, kind: type) -> None:
            super().__init__()
            self.inner, self.kind = Net(), kind

        def forward(self, x: Tensor) -> Any:
            return self.kind(logits=self.inner(x))

    class Holder(nn.Module):
        def __init__(self, kind: type) -> None:
            super().__init__()
            self.model = Model(kind)

    from types import SimpleNamespace

    x, y = batch()
    for kind in (dict, SimpleNamespace):
        torch.manual_seed(0)
        holder = Holder(kind)

        def step(holder: Holder = holder) -> None:
            output = holder.model(x)
            z = output["logits"] if isinstance(output, dict) else output.logits
            cross_entropy(z, y, alpha=0.3).backward()

        assert_alpha(verify(step, holder, "model"), 0.3)


# Heads that are not called ------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_chunked_head(alpha, bias):
    torch.manual_seed(0)
    model = Net(width=64, spread=4.0)
    if not bias:
        model.head.register_parameter("bias", None)
    x, y = batch(40)
    y[3] = -100

    def step(rows: int = 40) -> None:
        hidden = model.body(x[:rows])
        loss = powergrad.linear_cross_entropy(
            hidden,
            model.head.weight,
            y[:rows],
            alpha=alpha,
            linear_bias=model.head.bias,
            chunk_rows=16,
        )
        (5 * loss).backward()  # pyright: ignore[reportAttributeAccessIssue]

    verification = verify(step, model)
    assert_alpha(verification, alpha, 1e-3)  # a linear system of 40 rows loses digits
    assert verification.rows == 39


def test_a_weight_that_is_used_without_its_module():
    torch.manual_seed(0)
    model = Net(width=64, spread=4.0)
    x, y = batch(40)

    def loss(hidden: Tensor, z: Tensor | None = None) -> Tensor:
        z = F.linear(hidden, model.head.weight, model.head.bias)
        return cross_entropy(z, y[: len(z)], alpha=0.3)

    assert_alpha(verify(lambda: loss(model.body(x)).backward(), model), 0.3, 1e-3)
    changed = verify(lambda: loss(torch.tanh(model.body(x))).backward(), model)
    assert changed.verdict == "cannot tell"
    assert "changed in between, or the weight is tied" in changed.reason
    repeated = verify(lambda: loss(model.body(x[:1].expand(8, 8))).backward(), model.eval())
    assert repeated.verdict == "cannot tell"
    assert "the 8 hidden states are linearly dependent" in repeated.reason
    with torch.no_grad():
        x, y = x.repeat(2, 1), y.repeat(2)
    many = verify(lambda: loss(model.body(x)).backward(), model.train())
    assert many.verdict == "cannot tell"
    assert "at most 63 rows" in many.reason
    assert "smaller batch" in many.reason


def test_a_weight_that_is_tied():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(20, 32)
            self.norm = nn.LayerNorm(32)
            self.head = nn.Linear(32, 20, bias=False)
            self.head.weight = self.embedding.weight

    torch.manual_seed(0)
    model, tokens = Tied(), torch.arange(16)

    def step(called: bool) -> None:
        hidden = model.norm(model.embedding(tokens))
        target = tokens.flip(0)
        if called:
            cross_entropy(model.head(hidden), target, alpha=0.3).backward()
        else:
            loss = powergrad.linear_cross_entropy(hidden, model.head.weight, target, alpha=0.3)
            loss.backward()  # pyright: ignore[reportAttributeAccessIssue]

    assert_alpha(verify(lambda: step(True), model), 0.3)
    assert verify(lambda: step(False), model).verdict == "cannot tell"


# Compiled code ------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_compile(alpha, backend):
    """The model, its loss, or the whole step compiled, and called before hooks were there."""
    x, y = batch()

    def fresh() -> Net:
        torch.manual_seed(0)
        return Net()

    def step(model: Callable[..., Tensor]) -> None:
        cross_entropy(model(x), y, alpha=alpha).backward()

    torch.compiler.reset()
    model = fresh()
    compiled = torch.compile(model, backend=backend)
    step(compiled)
    assert_alpha(verify(lambda: step(compiled), model), alpha)
    assert_alpha(verify(lambda: step(compiled), compiled), alpha)  # pyright: ignore
    with StepWatcher(compiled) as watcher:  # pyright: ignore[reportArgumentType]
        step(compiled)
    assert_alpha(watcher.result(), alpha)
    with StepWatcher(model) as watcher:
        step(compiled)
    assert watcher.result().verdict == "cannot tell"

    model = fresh()
    model.compile(backend=backend)
    step(model)
    with StepWatcher(model) as watcher:
        step(model)
    assert_alpha(watcher.result(), alpha)
    assert_alpha(verify(lambda: step(model), model), alpha)

    model = fresh()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(x: Tensor) -> Tensor:
        return cross_entropy(model(x), y, alpha=alpha)

    whole = torch.compile(loss_of, backend=backend, fullgraph=True)

    def training() -> None:
        optimizer.zero_grad()
        whole(x).backward()
        optimizer.step()

    training()
    assert_alpha(verify(training, model), alpha)
    assert_alpha(verify(torch.compile(training, backend=backend), model), alpha)
    with StepWatcher(model) as watcher:
        training()
    assert watcher.result().verdict in ("cannot tell", "plain" if alpha == 1 else "pgt")
    training()  # nothing of the watchers is left
    assert not model.head._forward_hooks
    torch.compiler.reset()


# Nothing is left behind ---------------------------------------------------------------------------


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return copy.deepcopy(
        {
            "model": model.state_dict(),
            "grads": {n: p.grad for n, p in model.named_parameters()},
            "optimizer": optimizer.state_dict(),
            "training": [m.training for m in model.modules()],
            "hooks": [[len(getattr(m, name)) for name in HOOKS] for m in model.modules()],
            "tensor hooks": [len(p._backward_hooks or ()) for p in model.parameters()],
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=True)[1],  # noqa: NPY002 # pyright: ignore
        }
    )


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("earlier_steps", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_everything_is_as_before(name, earlier_steps, fails):
    torch.manual_seed(0)
    model = Net()
    optimizer = OPTIMIZERS[name](model.parameters())
    x, y = batch()

    def step(fails: bool = False) -> None:
        optimizer.zero_grad()
        model.train()
        cross_entropy(model(x), y, alpha=0.3).backward()
        optimizer.step()
        random.random()
        np.random.rand()  # noqa: NPY002
        model.register_buffer("late", torch.ones(1), persistent=True)
        if fails:
            raise KeyError("the user's own")

    for _ in range(earlier_steps):
        step()
    if earlier_steps == 0:
        model.body.eval()
    grads = [p.grad for p in model.parameters()]
    before = state_of(model, optimizer)
    moments = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    if fails:
        with pytest.raises(KeyError, match="own"):
            verify(lambda: step(True), model)
    else:
        assert_alpha(verify(step, model), 0.3)
    assert equal(state_of(model, optimizer), before)
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    kept = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    assert all(map(lambda a, b: a is b, kept, moments))
    assert len(kept) == len(moments)
    twin, other = copy.deepcopy((model, optimizer))
    assert (len(optimizer.state) > 0) == (earlier_steps > 0)
    assert not other.state or twin is not model


def test_a_training_that_is_verified_is_the_same_training():
    """Weights after four steps, bit for bit, with and without a verification before each."""
    x, y = batch()

    def trained(verified: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Net()
        temperature = nn.Parameter(torch.ones(()))  # trained, and not in the model
        optimizer = torch.optim.AdamW([*model.parameters(), temperature], lr=0.05)

        def step() -> None:
            optimizer.zero_grad()
            cross_entropy(model(x) * temperature, y, alpha=0.3).backward()
            optimizer.step()

        for _ in range(4):
            if verified:
                assert verify(step, model).verdict == "pgt"
            step()
        return [*model.state_dict().values(), temperature.detach()]

    assert equal(trained(True), trained(False))


def test_schedulers_are_the_callers():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    x, y = batch()

    def step() -> None:
        cross_entropy(model(x), y, alpha=0.3).backward()
        optimizer.step()
        scheduler.step()

    verify(step, model)
    assert optimizer.param_groups[0]["lr"] == 0.5  # in step with the scheduler
    assert scheduler.last_epoch == 1


def test_options_that_an_optimizer_changes_itself_are_restored():
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1
            return super().step(closure)

    torch.manual_seed(0)
    model = Net()
    optimizer = Counting(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["count"] = 4
    x, y = batch()

    def step() -> None:
        cross_entropy(model(x), y, alpha=0.3).backward()
        optimizer.step()

    verify(step, model)
    assert optimizer.param_groups[0]["count"] == 4


def test_an_earlier_graph_is_still_usable():
    """A step without an optimizer leaves the weights alone, as gradient accumulation needs."""
    torch.manual_seed(0)
    model = Net().eval()
    x, y = batch()
    earlier = cross_entropy(model(x), y, alpha=0.3)
    verify(lambda: cross_entropy(model(x), y, alpha=0.3).backward(), model)
    earlier.backward()


def test_a_watched_step_is_the_same_step():
    x, y = batch()

    def gradients(watched: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Net()
        hooks = [len(m._forward_hooks) for m in model.modules()]
        if watched:
            with StepWatcher(model) as watcher:
                assert "has not ended" in watcher.result().reason
                cross_entropy(model(x), y, alpha=0.3).backward()
            assert_alpha(watcher.result(), 0.3)
            assert watcher.result() is watcher.result()
        else:
            cross_entropy(model(x), y, alpha=0.3).backward()
        assert [len(m._forward_hooks) for m in model.modules()] == hooks
        return [p.grad for p in model.parameters() if p.grad is not None] + [torch.get_rng_state()]

    assert equal(gradients(True), gradients(False))


def test_a_failing_watcher_does_not_break_the_step(monkeypatch):
    torch.manual_seed(0)
    model = Net()
    x, y = batch()
    module = importlib.import_module("powergrad.verify")

    def broken(*args: Any) -> None:
        raise RuntimeError("bad luck")

    for name in ("_zero_sum_dim", "_logits_of", "measure"):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, broken)
            with StepWatcher(model) as watcher:
                F.cross_entropy(model(x), y).backward()
            assert watcher.result().verdict == "cannot tell"
            assert "bad luck" in watcher.result().reason
    with pytest.raises(KeyError), StepWatcher(model) as watcher:
        raise KeyError("the user's own")
    assert watcher.result().verdict == "cannot tell"


# Arguments and answers ----------------------------------------------------------------------------


def test_arguments():
    model = nn.Linear(2, 3)
    with pytest.raises(TypeError, match=r"Expected `step` to be callable, but got int\."):
        verify(3, model)  # pyright: ignore[reportArgumentType]
    for call in (lambda m: verify(print, m), StepWatcher):
        with pytest.raises(TypeError, match=r"Expected `model` to be a module, but got str\."):
            call("model")  # pyright: ignore[reportArgumentType]
    for call in (lambda h: verify(print, model, h), lambda h: StepWatcher(model, h)):
        with pytest.raises(TypeError, match=r"Expected `head` to be a module, its name or None"):
            call(1)
    with pytest.raises(TypeError, match=r"Expected `target` to be a tensor, but got list\."):
        verify(print, model, target=[1])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="`head` to name a module"):
        verify(print, model, "lost")
    with pytest.raises(ValueError, match="call the model once"):
        verify(print, nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3)))


def test_answers_are_sentences():
    verification = measured(lambda z, y: cross_entropy(z, y, alpha=0.3))
    assert re.fullmatch(
        r"PGT at alpha 0\.300 \(measured on 48 rows of 10 classes; largest deviation \de-\d\d\)",
        str(verification),
    )
    plain = measured(lambda z, y: F.cross_entropy(z, y))
    assert str(plain).startswith("plain cross-entropy, alpha 1 (measured on 48 rows")
    noise = measured(NEITHER["noise"])
    assert str(noise).startswith("neither PGT nor plain cross-entropy: the gradient")
    assert str(measured(lambda z, y: 0 * z.sum())) == (
        "cannot tell: the gradient at the logits is zero"
    )
    coarse = measured(lambda z, y: cross_entropy(z, y, alpha=0.05), dtype=torch.bfloat16)
    assert re.match(r"PGT at alpha 0\.0\d\d ± 0\.00\d \(", str(coarse))
    for answer in (verification, noise):
        with pytest.raises(TypeError, match="Expected a comparison of `verdict`"):
            bool(answer)
    with pytest.raises(AttributeError):
        verification.alpha = 1.0  # pyright: ignore[reportAttributeAccessIssue]


def test_large_outputs_are_sampled():
    torch.manual_seed(0)
    head = nn.Linear(4, 40_000)
    head.weight.data.mul_(4)
    x, y = torch.randn(12, 4), torch.randint(0, 40_000, (12,))
    verification = verify(lambda: cross_entropy(head(x), y, alpha=0.3).backward(), head)
    assert_alpha(verification, 0.3)
    assert (verification.rows, verification.classes) == (6, 40_000)
