"""`verify`: the alpha that it measures, what it refuses to answer, and what it leaves as it was.

The gradients here are not only those of this library: `test_never_wrong` writes them down.
"""

from __future__ import annotations

import copy
import importlib
import math
import random
import re
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from powergrad import alter_output, cross_entropy, linear_cross_entropy, verify
from powergrad.lab.trainer.objectives import as_published_cross_entropy
from powergrad.verify import StepWatcher, Verification

Loss = Callable[[Tensor, Tensor], Tensor]
WITHIN = {
    torch.float64: 1e-6,
    torch.float32: 1e-6,
    torch.bfloat16: 1e-2,  # 8 bits of gradient
    torch.float16: 1e-3,  # 11 bits
}


class Net(nn.Module):
    """Hidden layers with batch normalisation and dropout, then a head with spread logits."""

    def __init__(self, classes: int = 10, width: int = 32, spread: float = 6.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.1))
        self.head = nn.Linear(width, classes)
        with torch.no_grad():
            self.head.weight.mul_(spread)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def batch(rows: int = 48, classes: int = 10) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(rows, 8, generator=g), torch.randint(0, classes, (rows,), generator=g)


X, Y = batch()


def measured(
    loss: Loss,
    rows: int = 48,
    classes: int = 10,
    dtype: torch.dtype = torch.float32,
    spread: float = 6.0,
    target: Tensor | None = None,
) -> Verification:
    model = Net(classes, spread=spread).to(dtype)
    x, y = batch(rows, classes)
    return verify(lambda: loss(model(x.to(dtype)), y).backward(), model, target=target)


def pgt(z: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(z, y, alpha=0.3)


def assert_alpha(verification: Verification, alpha: float, within: float = 1e-6) -> None:
    assert verification.verdict == ("plain" if alpha == 1 else "pgt"), str(verification)
    assert verification.alpha is not None
    assert abs(verification.alpha - alpha) <= within, str(verification)
    assert verification.uncertainty is not None
    assert abs(verification.alpha - alpha) <= verification.uncertainty + 1e-9


def assert_cannot_tell(verification: Verification, reason: str) -> None:
    assert verification.verdict == "cannot tell", str(verification)
    assert verification.alpha is None
    assert reason in verification.reason


# Cross-entropies ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", WITHIN, ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("alpha", [0.0, 0.05, 0.3, 0.7, 1.0])
def test_alpha_is_measured(alpha, smoothing, dtype):
    options = {"alpha": alpha, "label_smoothing": smoothing}
    verification = measured(lambda z, y: cross_entropy(z, y, **options), dtype=dtype)
    assert_alpha(verification, alpha, WITHIN[dtype])
    assert (verification.rows, verification.classes) == (48, 10)
    if dtype is torch.float64:
        assert verification.deviation is not None
        assert verification.deviation < 1e-12


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
        z.backward(math.exp(scale) * (torch.softmax(alpha * z.detach(), 1) - q))

    verification = verify(step, head)
    if classes > 3:  # otherwise a row has two points, and smoothing takes one
        assert verification.verdict == "pgt", str(verification)
    if verification.alpha is not None:
        assert abs(verification.alpha - alpha) <= max(verification.uncertainty or 0, 1e-6)


WEIGHT = torch.linspace(0.5, 3, 10)
IMPORTANCE = torch.rand(48, generator=torch.Generator().manual_seed(3))
IGNORED = torch.arange(48) % 3 == 0
LAST = torch.arange(10) == 9
SOFT = torch.randn(48, 10, generator=torch.Generator().manual_seed(5)).mul(2).softmax(1)


def mixed(share: float) -> Tensor:
    return share * F.one_hot(Y, 10) + (1 - share) * F.one_hot(Y.flip(0), 10).float()


LOSSES: dict[str, Callable[..., Tensor]] = {
    "sum": lambda z, y, ce: ce(z, y, reduction="sum"),
    "none": lambda z, y, ce: ce(z, y, reduction="none").sum() / 7,
    "loss scale": lambda z, y, ce: 65536 * ce(z, y),
    "tiny": lambda z, y, ce: 1e-6 * ce(z, y),
    "class weights": lambda z, y, ce: ce(z, y, weight=WEIGHT),
    "example weights": lambda z, y, ce: (IMPORTANCE * ce(z, y, reduction="none")).mean(),
    "sentences": lambda z, y, ce: ce(z, y, reduction="none").view(6, 8).mean(1) @ WEIGHT[:6],
    "ignored rows": lambda z, y, ce: ce(z, y.masked_fill(IGNORED, -100)),
    "confident, smoothing": lambda z, y, ce: ce(z, z.argmax(1), label_smoothing=0.2),
    "some classes only": lambda z, y, ce: ce(z[:, :7], y % 7),
    "masked classes": lambda z, y, ce: ce(z.masked_fill(LAST, -torch.inf), y.clamp(max=8)),
    "underflow": lambda z, y, ce: ce(z, y),
    "saturated": lambda z, y, ce: ce(z, torch.where(IGNORED, y, z.argmax(1))),
}
# Without their target these cannot be told from a loss with other soft targets.
SOFT_LOSSES: dict[str, tuple[Callable[..., Tensor], Tensor]] = {
    "weights, smoothing": (lambda z, y, ce: ce(z, y, weight=WEIGHT, label_smoothing=0.1), Y),
    "mixup": (lambda z, y, ce: 0.6 * ce(z, y) + 0.4 * ce(z, y.flip(0)), mixed(0.6)),
    "mixup as probabilities": (lambda z, y, ce: ce(z, mixed(0.97)), mixed(0.97)),
    "soft": (lambda z, y, ce: ce(z, SOFT), SOFT),
    "soft, weights": (lambda z, y, ce: ce(z, SOFT, weight=WEIGHT), SOFT),
    "soft, smoothing": (lambda z, y, ce: ce(z, SOFT, label_smoothing=0.1), SOFT),
    "soft, both": (lambda z, y, ce: ce(z, SOFT, weight=WEIGHT, label_smoothing=0.1), SOFT),
}


def at(alpha: float, loss: Callable[..., Tensor]) -> Loss:
    return lambda z, y: loss(z, y, lambda *args, **kw: cross_entropy(*args, alpha=alpha, **kw))


@pytest.mark.parametrize("alpha", [0.3, 1.0])
@pytest.mark.parametrize("name", LOSSES)
def test_options_of_the_loss(name, alpha):
    # Gaps of logits at which p is 0 in float32, or p - 1.
    spread = {"underflow": 150.0, "saturated": 40.0}.get(name, 6.0)
    verification = measured(at(alpha, LOSSES[name]), spread=spread)
    assert_alpha(verification, alpha)
    if name == "ignored rows":
        assert verification.rows == 32
    assert verification.classes == {"some classes only": 7, "masked classes": 9}.get(name, 10)
    weighted = name in ("example weights", "sentences")
    assert ("as with example weights" in verification.reason) == weighted


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", SOFT_LOSSES)
def test_soft_targets_need_the_target(name, alpha):
    loss, target = SOFT_LOSSES[name]
    assert_cannot_tell(measured(at(alpha, loss)), "pass `target`")
    assert_alpha(measured(at(alpha, loss), target=target), alpha)
    assert measured(at(alpha, loss), target=target.roll(1, 0)).verdict == "neither"


def test_other_targets():
    for target in (Y, F.one_hot(Y, 10).double()):
        assert_alpha(measured(pgt, target=target), 0.3)
    assert_cannot_tell(measured(pgt, target=torch.ones(3, 4)), "of shape (3, 4)")
    assert measured(pgt, classes=2).verdict == "cannot tell"
    assert_alpha(measured(pgt, classes=2, target=batch(classes=2)[1]), 0.3, 1e-5)


@pytest.mark.parametrize("alpha", [0.3, 1.0])
@pytest.mark.parametrize(
    ("head", "shape", "loss"),
    [
        (nn.Linear(6, 9), (4, 7, 6), lambda z, y, ce: ce(z.flatten(0, 1), y[:28])),
        (nn.Linear(6, 9), (4, 7, 6), lambda z, y, ce: ce(z.transpose(1, 2), y[:28].view(4, 7))),
        (nn.Conv2d(6, 9, 1), (2, 6, 3, 5), lambda z, y, ce: ce(z, y[:30].view(2, 3, 5))),
        (nn.Conv1d(6, 9, 1), (2, 6, 9), lambda z, y, ce: ce(z, y[:18].view(2, 9))),
        (nn.Linear(6, 9), (6,), lambda z, y, ce: ce(z, y[0])),
    ],
    ids=["tokens", "tokens, classes second", "pixels", "as many pixels as classes", "one row"],
)
def test_shapes(head, shape, loss, alpha):
    torch.manual_seed(0)
    nn.init.normal_(head.weight)
    x, y = torch.randn(shape), torch.randint(0, 9, (30,))
    verification = verify(lambda: at(alpha, loss)(head(x), y).backward(), head)
    assert_alpha(verification, alpha, 1e-5)  # few rows: a single row has nine classes
    assert verification.classes == 9
    other = verify(lambda: head(x).sigmoid().sum().backward(), head)
    assert other.verdict == "neither"
    assert other.rows * other.classes == head(x).numel()


def test_alphas_of_examples():
    alpha = torch.linspace(0.1, 0.8, 48)
    verification = measured(lambda z, y: cross_entropy(z, y, alpha=alpha))
    assert verification.verdict == "pgt"
    assert (verification.lowest, verification.highest) == pytest.approx((0.1, 0.8), abs=1e-5)
    assert "alphas from 0.100 to 0.800, one per row" in str(verification)


# Neither ------------------------------------------------------------------------------------------


def focal(z: Tensor, y: Tensor) -> Tensor:
    log_p = F.log_softmax(z, 1).gather(1, y[:, None])
    return -((1 - log_p.exp()) ** 2 * log_p).mean()


NEITHER: dict[str, Loss] = {
    "noise": lambda z, y: (z * torch.randn(z.shape)).sum(),
    "squared error": lambda z, y: F.mse_loss(z, F.one_hot(y, 10).float()),
    "binary": lambda z, y: F.binary_cross_entropy_with_logits(z, F.one_hot(y, 10).float()),
    "focal": focal,
    "margin": F.multi_margin_loss,
    "sharpened": lambda z, y: F.cross_entropy(20 * z, y),
    "capped": lambda z, y: F.cross_entropy(3 * torch.tanh(z / 3), y),
    "two alphas": lambda z, y: cross_entropy(z, y, alpha=0.2) + F.cross_entropy(z, y),
    "half plain": lambda z, y: F.cross_entropy(z[:20], y[:20]) + pgt(z[20:], y[20:]),
    "a further term": lambda z, y: F.cross_entropy(z, y) + 1e-2 * (z**2).mean(),
    "poly-1": lambda z, y: F.cross_entropy(z, y) - z.softmax(1).gather(1, y[:, None]).mean(),
    "the paper's listing, smoothing": lambda z, y: as_published_cross_entropy(
        z, y, alpha=0.3, label_smoothing=0.1
    ),
}
# Soft targets could explain these: only the labels rule them out.
NEEDS_LABELS = {"margin", "two alphas", "a further term", "the paper's listing, smoothing"}


@pytest.mark.parametrize("name", NEITHER)
def test_neither(name):
    verification = measured(NEITHER[name], rows=64, target=batch(64)[1])
    assert verification.verdict == "neither", str(verification)
    assert verification.alpha is None
    without = measured(NEITHER[name], rows=64)
    if name in NEEDS_LABELS:
        assert_cannot_tell(without, "pass `target`")
    else:
        assert without.verdict == "neither", str(without)


@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize("alpha", [0.05, 0.7])
@pytest.mark.parametrize("scale", ["1", "N", "N^2 / 2", "N^2"])
def test_the_papers_listing_is_pgt_at_the_loss_scale_n_squared_alone(rows, alpha, scale):
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


# Cannot tell --------------------------------------------------------------------------------------


def in_place(model: nn.Module) -> None:
    z = model(X)
    z /= 2
    F.cross_entropy(z, Y).backward()


def by_torch_func(model: nn.Module) -> None:
    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, parameters, (X,)), Y)

    torch.func.grad(loss)(dict(model.eval().named_parameters()))


def equal_logits(model: nn.Module) -> None:
    for parameter in model.get_submodule("head").parameters():
        nn.init.zeros_(parameter)
    F.cross_entropy(model(X), Y).backward()


CANNOT_TELL: dict[str, Callable[[nn.Module], object]] = {
    "the logits of each row are all equal": equal_logits,
    "no gradient reached": lambda m: F.cross_entropy(m(X).detach(), Y),
    "was not called": lambda m: None,
    "is zero": lambda m: (0 * F.cross_entropy(m(X), Y)).backward(),
    "NaN": lambda m: (math.nan * F.cross_entropy(m(X), Y)).backward(),
    "infinite": lambda m: (math.inf * m(X).exp().sum()).backward(),
    "without gradients": lambda m: torch.no_grad()(m)(X),
    "in place": in_place,
    "torch.func": by_torch_func,
    "the factors of the rows differ": lambda m: focal(m(X[:8]), Y[:8]).backward(),
}


@pytest.mark.parametrize("reason", CANNOT_TELL)
def test_cannot_tell(reason):
    model = Net()
    assert_cannot_tell(verify(lambda: CANNOT_TELL[reason](model), model), reason)


def test_one_row_of_four_classes_is_too_few():
    head = nn.Linear(8, 4)
    step = lambda: F.cross_entropy(head(X[:1]), Y[:1] % 4).backward()  # noqa: E731
    assert_cannot_tell(verify(step, head), "too few")


def test_too_little_precision():
    """Logits that hardly differ: in bfloat16 they determine no alpha, in float32 they do."""
    coarse = measured(pgt, rows=16, dtype=torch.bfloat16, spread=0.1)
    assert_cannot_tell(coarse, "do not determine alpha")
    assert_alpha(measured(pgt, rows=16, spread=0.1), 0.3, 1e-2)


def test_a_loss_in_16_bits_of_logits_in_32():
    verification = measured(lambda z, y: pgt(z.bfloat16(), y), target=Y)
    assert_cannot_tell(verification, "16 bits")
    assert "close to that of alpha 0.3" in verification.reason


# Where the logits are -----------------------------------------------------------------------------


def test_hooks_on_the_logits_are_included():
    """The gradient is taken where it has passed everything that may alter it."""
    model, logits = Net(), []

    def altered(grad: Tensor) -> Tensor:
        return torch.softmax(0.3 * logits[-1], 1) - F.one_hot(Y, 10)

    def step(hook: bool = False) -> None:
        z = model(X)
        if hook:
            z.register_hook(altered)
        F.cross_entropy(z, Y).backward()

    handle = model.head.register_forward_hook(lambda *args: logits.append(args[-1].detach()))
    assert_alpha(verify(lambda: step(hook=True), model), 0.3)
    with alter_output(model, "head", altered):
        assert_alpha(verify(step, model), 0.3)
    handle.remove()
    assert_alpha(verify(step, model), 1.0)


def accumulated(model: Net, loss: Loss) -> None:
    for rows in torch.arange(48).split([8, 30, 10]):
        (loss(model(X[rows]), Y[rows]) / 3).backward()


def checkpointed(reentrant: bool) -> Callable[[Net, Loss], None]:
    return lambda model, loss: loss(
        checkpoint(model.head, model.body(X), use_reentrant=reentrant), Y
    ).backward()


def backward_twice(model: Net, *losses: Loss) -> None:
    z = model(X)
    for loss in losses:
        loss(z, Y).backward(retain_graph=True)


STEPS: dict[str, Callable[[Net, Loss], None]] = {
    "accumulated batches": accumulated,
    "the head in a checkpoint": checkpointed(False),
    "the head in a reentrant checkpoint": checkpointed(True),
    "two backward passes": lambda model, loss: backward_twice(model, loss, loss),
    "one of them zero": lambda model, loss: backward_twice(model, lambda z, y: 0 * z.sum(), loss),
}


@pytest.mark.parametrize("alpha", [0.3, 1.0])
@pytest.mark.parametrize("name", STEPS)
def test_every_row_of_the_step_is_measured_once(name, alpha):
    model, loss = Net(), at(alpha, lambda z, y, ce: ce(z, y))
    verification = verify(lambda: STEPS[name](model, loss), model)
    assert_alpha(verification, alpha)
    assert verification.rows == 48
    if name == "two backward passes":
        other = verify(lambda: backward_twice(model, loss, focal), model, target=Y)
        assert other.verdict == "neither"


def test_the_head_can_be_named():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 10), nn.Identity(), nn.BatchNorm1d(4))
    nn.init.normal_(model[0].weight)  # pyright: ignore[reportArgumentType]

    def step() -> None:
        cross_entropy(model[1](3 * model[0](X)), Y, alpha=0.2).backward()

    assert_alpha(verify(step, model, "1"), 0.2)
    assert_alpha(verify(step, model, model[0]), 0.6)  # logits are scaled after it: 3 * 0.2
    with pytest.raises(ValueError, match="`head`"):
        verify(step, model)
    with StepWatcher(model) as watcher:
        step()
    assert_cannot_tell(watcher.result(), "pass `head`")


@pytest.mark.parametrize("kind", [dict, SimpleNamespace])
def test_an_output_with_logits(kind):
    class Model(Net):
        def forward(self, x: Tensor) -> Any:
            return kind(logits=super().forward(x))

    holder = nn.ModuleDict({"model": Model()})

    def step() -> None:
        output = holder["model"](X)
        pgt(output["logits"] if kind is dict else output.logits, Y).backward()

    assert_alpha(verify(step, holder, "model"), 0.3)


# Heads that are not called ------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("alpha", [0.0, 0.05, 0.3, 1.0])
def test_a_chunked_head(alpha, bias):
    model = Net(width=64, spread=4.0)
    if not bias:
        model.head.register_parameter("bias", None)
    head = {"linear_weight": model.head.weight, "linear_bias": model.head.bias}
    y = torch.where(torch.arange(40) == 3, -100, Y[:40])

    def step() -> None:
        hidden: Any = model.body(X[:40])
        loss: Any = linear_cross_entropy(hidden, target=y, alpha=alpha, chunk_rows=16, **head)
        (5 * loss).backward()

    verification = verify(step, model)
    assert_alpha(verification, alpha, 1e-3)  # a linear system of 40 rows loses digits
    assert verification.rows == 39


def test_a_weight_that_is_used_without_its_module():
    model = Net(width=64, spread=4.0)

    def step(x: Tensor, change: Callable[[Tensor], Tensor] = lambda hidden: hidden) -> None:
        z = F.linear(change(model.body(x)), model.head.weight, model.head.bias)
        pgt(z, Y.repeat(2)[: len(z)]).backward()

    assert_alpha(verify(lambda: step(X[:40]), model), 0.3, 1e-3)
    many = verify(lambda: step(X.repeat(2, 1)), model)
    assert_cannot_tell(many, "at most 63 rows")
    assert "smaller batch" in many.reason
    changed = verify(lambda: step(X[:40], torch.tanh), model)
    assert_cannot_tell(changed, "changed in between, or the weight is tied")
    repeated = verify(lambda: step(X[:1].expand(8, 8)), model.eval())
    assert_cannot_tell(repeated, "the 8 hidden states are linearly dependent")


@pytest.mark.parametrize("called", [True, False])
def test_a_tied_weight_can_be_measured_only_if_the_head_is_called(called):
    torch.manual_seed(0)
    embedding, norm, head = nn.Embedding(20, 32), nn.LayerNorm(32), nn.Linear(32, 20, bias=False)
    head.weight = embedding.weight
    model = nn.ModuleDict({"embedding": embedding, "norm": norm, "head": head})
    tokens = torch.arange(16)
    target = tokens.flip(0)

    def step() -> None:
        hidden = norm(embedding(tokens))
        loss: Any = (
            pgt(head(hidden), target)
            if called
            else linear_cross_entropy(hidden, head.weight, target, alpha=0.3)
        )
        loss.backward()

    assert verify(step, model).verdict == ("pgt" if called else "cannot tell")


# Compiled code ------------------------------------------------------------------------------------


def watched(step: Callable[..., None], model: Any, *args: Any) -> Verification:
    with StepWatcher(model) as watcher:
        step(*args)
    return watcher.result()


@pytest.mark.matrix
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_compile(alpha, backend):
    """The model, its loss, or the whole step compiled, and called before hooks were there."""

    def step(model: Callable[..., Tensor]) -> None:
        cross_entropy(model(X), Y, alpha=alpha).backward()

    torch.compiler.reset()
    model, own = Net(), Net()
    compiled: Any = torch.compile(model, backend=backend)
    own.compile(backend=backend)
    for called, passed in ((compiled, model), (compiled, compiled), (own, own)):
        step(called)
        assert_alpha(verify(lambda called=called: step(called), passed), alpha)
        if passed is not model:
            assert_alpha(watched(step, passed, called), alpha)
    assert watched(step, model, compiled).verdict == "cannot tell"

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = torch.compile(
        lambda x: cross_entropy(model(x), Y, alpha=alpha), backend=backend, fullgraph=True
    )

    def training() -> None:
        optimizer.zero_grad()
        whole(X).backward()
        optimizer.step()

    training()
    assert_alpha(verify(training, model), alpha)
    assert_alpha(verify(torch.compile(training, backend=backend), model), alpha)
    expected = ("cannot tell", "plain" if alpha == 1 else "pgt")
    assert watched(training, model).verdict in expected
    training()  # nothing of the watchers is left
    assert not model.head._forward_hooks
    torch.compiler.reset()


# Nothing is left behind ---------------------------------------------------------------------------

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    state = [
        dict(model.state_dict()),
        [p.grad for p in model.parameters()],
        optimizer.state_dict(),
        [m.training for m in model.modules()],
        [[len(getattr(m, name)) for name in HOOKS] for m in model.modules()],
        [len(p._backward_hooks or ()) for p in model.parameters()],
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state(legacy=True)[1].tolist(),  # noqa: NPY002 # pyright: ignore
    ]
    return copy.deepcopy(state)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("earlier_steps", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_everything_is_as_before(name, earlier_steps, fails):
    model = Net()
    temperature = nn.Parameter(torch.ones(()))  # trained, and not in the model
    optimizer = OPTIMIZERS[name]([*model.parameters(), temperature])

    def step(fails: bool = False) -> None:
        optimizer.zero_grad()
        model.train()
        pgt(model(X) * temperature, Y).backward()
        optimizer.step()
        random.random()
        np.random.rand()  # noqa: NPY002
        model.register_buffer("late", torch.ones(1), persistent=True)
        if fails:
            raise KeyError("the user's own")

    def tensors() -> list[Any]:
        moments = [value for state in optimizer.state.values() for value in state.values()]
        return [*(p.grad for p in model.parameters()), *moments]

    for _ in range(earlier_steps):
        step()
    if earlier_steps == 0:
        model.body.eval()
    kept, before, value = tensors(), state_of(model, optimizer), temperature.item()
    if fails:
        with pytest.raises(KeyError, match="own"):
            verify(lambda: step(True), model)
    else:
        assert verify(step, model).verdict == "pgt"
    torch.testing.assert_close(state_of(model, optimizer), before, rtol=0, atol=0)
    assert all(a is b for a, b in zip(tensors(), kept, strict=True))  # in place
    assert temperature.item() == value


def test_options_of_the_optimizer_are_restored_unless_a_scheduler_changed_them():
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.param_groups[0]["count"] += 1
            return super().step(closure)

    model = Net()
    optimizer = Counting(model.parameters(), lr=1.0)
    optimizer.param_groups[0]["count"] = 4
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def step() -> None:
        pgt(model(X), Y).backward()
        optimizer.step()
        scheduler.step()

    verify(step, model)
    assert optimizer.param_groups[0]["count"] == 4
    assert optimizer.param_groups[0]["lr"] == 0.5  # the scheduler is not restored either
    assert scheduler.last_epoch == 1


def test_an_earlier_graph_is_still_usable():
    """A step without an optimizer leaves the weights alone, as gradient accumulation needs."""
    model = Net().eval()
    earlier = pgt(model(X), Y)
    verify(lambda: pgt(model(X), Y).backward(), model)
    earlier.backward()


def test_a_watched_step_is_the_same_step():
    gradients = []
    for watched in (True, False):
        model = Net()
        hooks = [len(m._forward_hooks) for m in model.modules()]
        with StepWatcher(model) if watched else nullcontext() as watcher:
            pgt(model(X), Y).backward()
            if watcher is not None:
                assert "has not ended" in watcher.result().reason
        assert [len(m._forward_hooks) for m in model.modules()] == hooks
        gradients.append([*(p.grad for p in model.parameters()), torch.get_rng_state()])
        if watcher is not None:
            assert_alpha(watcher.result(), 0.3)
            assert watcher.result() is watcher.result()
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["_zero_sum_dim", "_logits_of", "measure"])
def test_a_failing_watcher_does_not_break_the_step(name, monkeypatch):
    def broken(*args: Any) -> None:
        raise RuntimeError("bad luck")

    model = Net()
    monkeypatch.setattr(importlib.import_module("powergrad.verify"), name, broken)
    with StepWatcher(model) as watcher:
        F.cross_entropy(model(X), Y).backward()
    assert_cannot_tell(watcher.result(), "bad luck")
    with pytest.raises(KeyError), StepWatcher(model):
        raise KeyError


# Arguments and answers ----------------------------------------------------------------------------

LAZY = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3))
BAD: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (lambda m: verify(3, m), TypeError, "`step`"),  # pyright: ignore[reportArgumentType]
    (lambda m: verify(print, "model"), TypeError, "`model`"),  # pyright: ignore
    (lambda m: verify(print, m, 1), TypeError, "`head`"),  # pyright: ignore
    (lambda m: verify(print, m, "lost"), ValueError, "`head`"),
    (lambda m: verify(print, m, target=[1]), TypeError, "`target`"),  # pyright: ignore
    (lambda m: verify(print, LAZY), ValueError, "call the model once"),
]


@pytest.mark.parametrize(("call", "error", "named"), BAD)
def test_bad_arguments_raise(call, error, named):
    with pytest.raises(error, match=named):
        call(nn.Linear(2, 3))


def test_answers_are_sentences():
    verification, noise = measured(pgt), measured(NEITHER["noise"])
    assert re.fullmatch(
        r"PGT at alpha 0\.300 \(measured on 48 rows of 10 classes; largest deviation \de-\d\d\)",
        str(verification),
    )
    plain = str(measured(F.cross_entropy))
    assert plain.startswith("plain cross-entropy, alpha 1 (measured on 48 rows")
    assert str(noise).startswith("neither PGT nor plain cross-entropy: the gradient")
    zero = measured(lambda z, y: 0 * z.sum())
    assert str(zero) == "cannot tell: the gradient at the logits is zero"
    coarse = measured(lambda z, y: cross_entropy(z, y, alpha=0.05), dtype=torch.bfloat16)
    assert re.match(r"PGT at alpha 0\.0\d\d ± 0\.00\d \(", str(coarse))
    for answer in (verification, noise):
        with pytest.raises(TypeError, match="`verdict`"):
            bool(answer)
    with pytest.raises(AttributeError):
        verification.alpha = 1.0  # pyright: ignore[reportAttributeAccessIssue]


def test_large_outputs_are_sampled():
    torch.manual_seed(0)
    head = nn.Linear(4, 40_000)
    head.weight.data.mul_(4)
    x, y = torch.randn(12, 4), torch.randint(0, 40_000, (12,))
    verification = verify(lambda: pgt(head(x), y).backward(), head)
    assert_alpha(verification, 0.3)
    assert (verification.rows, verification.classes) == (6, 40_000)
