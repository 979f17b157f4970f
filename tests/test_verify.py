"""`verify`: the alpha that it measures, what it refuses to answer, and what it leaves as it was.

Some losses are powergrad's, which say what they did; the others are written down here, so that only
the gradient can tell.
"""

from __future__ import annotations

import copy
import importlib
import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import build, forms
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import powergrad
from powergrad import PowerGrad, alter_gradient, cross_entropy, linear_cross_entropy, verify
from powergrad.lab.trainer.objectives import as_published_cross_entropy
from powergrad.verify import StepWatcher, Verification

Loss = Callable[[Tensor, Tensor], Any]


class Net(nn.Module):
    """Hidden layers with batch normalisation and dropout, then a head with spread logits."""

    def __init__(self, classes: int = 10, spread: float = 6.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.1))
        self.head = nn.Linear(32, classes)
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
) -> Verification:
    model = Net(classes, spread).to(dtype)
    x, y = batch(rows, classes)
    return verify(lambda: loss(model(x.to(dtype)), y).backward(), model)


def foreign(z: Tensor, y: Tensor, alpha: float = 0.3, **options: Any) -> Tensor:
    """PGT that powergrad does not know of: its potential, in float32 or wider."""
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    return F.cross_entropy(alpha * z, y, **options) / alpha


def focal(z: Tensor, y: Tensor) -> Tensor:
    log_p = F.log_softmax(z, 1).gather(1, y[:, None])
    return -((1 - log_p.exp()) ** 2 * log_p).mean()


def listing(z: Tensor, y: Tensor) -> Tensor:
    return as_published_cross_entropy(z, y, alpha=0.3)


def assert_alpha(verification: Verification, alpha: float, within: float = 2e-2) -> None:
    assert verification.verdict == ("plain" if alpha == 1 else "pgt"), str(verification)
    assert verification.alpha is not None
    assert abs(verification.alpha - alpha) <= min(within, verification.uncertainty or within)


def assert_cannot_tell(verification: Verification, reason: str = "") -> None:
    assert verification.verdict == "cannot tell", str(verification)
    assert verification.alpha is None
    assert reason in verification.reason, str(verification)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("alpha", [0.05, 0.3, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("loss", [foreign, cross_entropy])
def test_alpha_is_measured(loss, alpha, smoothing, dtype):
    verification = measured(
        lambda z, y: loss(z, y, alpha=alpha, label_smoothing=smoothing), dtype=dtype
    )
    if alpha == 2 and dtype is torch.bfloat16:  # may be too coarse
        assert verification.verdict in ("pgt", "cannot tell")
    else:
        assert_alpha(verification, alpha, 2e-2 if dtype.itemsize < 4 else 1e-5)


@given(
    alpha=st.floats(0, 3).filter(lambda alpha: abs(alpha - 1) > 0.01),
    rows=st.integers(2, 30),
    classes=st.integers(3, 12),
    smoothing=st.sampled_from([0.0, 0.05, 0.2]),
    exponent=st.integers(-12, 12),
    seed=st.integers(0, 99),
)
def test_a_gradient_without_a_loss(alpha, rows, classes, smoothing, exponent, seed):
    """A random alpha, written down in float64 without this library: measured, or cannot tell."""
    torch.manual_seed(seed)
    head = nn.Linear(5, classes, dtype=torch.float64)
    head.weight.data.mul_(3)
    x, y = torch.randn(rows, 5, dtype=torch.float64), torch.randint(0, classes, (rows,))

    def step() -> None:
        z = head(x)
        q = F.one_hot(y, classes) * (1 - smoothing) + smoothing / classes
        z.backward(2.0**exponent * (torch.softmax(alpha * z.detach(), 1) - q) / rows)

    verification = verify(step, head)
    if verification.verdict != "cannot tell":
        assert_alpha(verification, alpha)


@given(form=forms(), added=st.sampled_from(["", "", "", "plain", "focal"]))
def test_no_mixture_of_options_gets_a_wrong_answer(form, added):
    case = build(replace(form, shape=(12, 7), masked=False))
    head, x = nn.Linear(12, 7, bias=False).to(form.dtype), torch.eye(12, dtype=form.dtype)
    head.weight.data.copy_(case.logits.T)

    def step() -> None:
        z = head(x)
        loss = cross_entropy(z, case.target, alpha=case.alpha, **case.options, **case.extra)
        total = (case.upstream * loss).sum()
        if added:
            total = total + (F.cross_entropy if added == "plain" else focal)(z, Y[:12] % 7)
        total.backward()

    verification, alpha = verify(step, head), torch.as_tensor(case.alpha)
    if added and not (alpha == 1).all():
        assert verification.verdict in ("neither", "cannot tell"), str(verification)
    elif added:
        assert verification.verdict != "pgt", str(verification)
    elif verification.verdict != "cannot tell":
        assert_alpha(verification, float(alpha.double().mean()))


WEIGHT, IMPORTANCE = torch.linspace(0.5, 3, 10), torch.linspace(0.1, 1, 48)
IGNORED, LAST = torch.arange(48) % 3 == 0, torch.arange(10) == 9
SOFT = torch.randn(48, 10, generator=torch.Generator().manual_seed(5)).mul(2).softmax(1)
LOSSES: dict[str, tuple[Loss, str]] = {
    "sum": (lambda z, y: foreign(z, y, reduction="sum"), "pgt"),
    "loss scale": (lambda z, y: 65536 * foreign(z, y), "pgt"),
    "no usual scale": (lambda z, y: 29.18 * foreign(z, y), "cannot tell"),
    "no usual scale, plain": (lambda z, y: 29.18 * F.cross_entropy(z, y), "plain"),
    "class weights": (lambda z, y: cross_entropy(z, y, WEIGHT, alpha=0.3), "pgt"),
    "class weights, ignored rows": (
        lambda z, y: cross_entropy(z, y.masked_fill(IGNORED, -100), WEIGHT, alpha=0.3),
        "pgt",
    ),
    "class weights, not ours": (lambda z, y: F.cross_entropy(z, y, weight=WEIGHT), "cannot tell"),
    "ignored rows": (lambda z, y: foreign(z, y.masked_fill(IGNORED, -100)), "pgt"),
    "confident": (lambda z, y: F.cross_entropy(z, z.argmax(1), label_smoothing=0.2), "plain"),
    "some classes": (lambda z, y: F.cross_entropy(z[:, :7], y % 7), "plain"),
    "masked": (lambda z, y: foreign(z.masked_fill(LAST, -torch.inf), y.clamp(max=8)), "pgt"),
    "log_softmax": (lambda z, y: F.nll_loss(powergrad.log_softmax(z, 1, alpha=0.3), y), "pgt"),
    "mixup": (
        lambda z, y: cross_entropy(z, y, alpha=0.3) + 0.4 * cross_entropy(z, y.flip(0), alpha=0.3),
        "pgt",
    ),
    "near an alpha that was told": (
        lambda z, y: 29.18 * foreign(z, y, 0.32) + 0 * cross_entropy(z, y, alpha=0.3),
        "cannot tell",
    ),
    "two alphas": (
        lambda z, y: cross_entropy(z, y, alpha=0.6) + cross_entropy(z, y, alpha=0.4),
        "neither",
    ),
    "some rows plain": (lambda z, y: cross_entropy(z, y, alpha=IMPORTANCE), "neither"),
    "one alpha per row": (lambda z, y: cross_entropy(z, y, alpha=IMPORTANCE / 2), "pgt"),
    "example weights": (
        lambda z, y: (IMPORTANCE * F.cross_entropy(z, y, reduction="none")).mean(),
        "cannot tell",
    ),
    "focal": (focal, "cannot tell"),
    "poly-1": (
        lambda z, y: F.cross_entropy(z, y) - z.softmax(1).gather(1, y[:, None]).mean(),
        "cannot tell",
    ),
    "the paper's listing": (listing, "cannot tell"),
    "scaled logits": (lambda z, y: F.cross_entropy(z / 2, y), "cannot tell"),
    "soft": (lambda z, y: F.cross_entropy(z, SOFT), "cannot tell"),
    "in 16 bits": (lambda z, y: foreign(z.bfloat16(), y), "cannot tell"),
    "margin": (F.multi_margin_loss, "cannot tell"),
    "plus plain": (
        lambda z, y: cross_entropy(z, y, alpha=0.2) + F.cross_entropy(z, y),
        "cannot tell",
    ),
    "half plain": (
        lambda z, y: F.cross_entropy(z[:20], y[:20]) + foreign(z[20:], y[20:]),
        "cannot tell",
    ),
    "noise": (lambda z, y: (z * torch.randn(z.shape)).sum(), "neither"),
    "squared error": (lambda z, y: F.mse_loss(z, F.one_hot(y, 10).float()), "neither"),
    "capped": (lambda z, y: F.cross_entropy(3 * torch.tanh(z / 3), y), "neither"),
    "constant": (lambda z, y: 0 * z.sum(), "cannot tell"),
    "NaN": (lambda z, y: math.nan * z.sum(), "cannot tell"),
    "sigmoids": (
        lambda z, y: powergrad.binary_cross_entropy_with_logits(z, SOFT, alpha=0.3),
        "cannot tell",
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_verdict_on_a_loss(name):
    loss, verdict = LOSSES[name]
    verification = measured(loss)
    assert verification.verdict == verdict, str(verification)
    if verdict == "pgt" and name != "one alpha per row":
        assert_alpha(verification, 0.3, 1e-5)
    if "ignored rows" in name:
        assert verification.rows_in_all == 32
    if name == "one alpha per row":
        assert "alphas from 0.050 to 0.500" in str(verification)


DATA = [  # the alpha that is measured there, or why none is
    *((foreign, {"spread": spread}, 0.3) for spread in (0.05, 15.0, 40.0)),  # p - 1 may round to 0
    *((F.cross_entropy, {"spread": spread}, 1.0) for spread in (15.0, 40.0)),
    (foreign, {"spread": 0.05, "dtype": torch.bfloat16}, "do not determine"),
    (lambda z, y: cross_entropy(z, y, alpha=0.3), {"classes": 2}, 0.3),  # it says its target
    (foreign, {"classes": 2}, "too few"),
    *(
        (listing, {"rows": rows, "classes": 1000, "spread": spread}, "")
        for rows in (32, 256)
        for spread in (0.1, 1.0)
    ),
]


@pytest.mark.parametrize(("loss", "data", "answer"), DATA)
def test_extreme_data(loss, data, answer):
    check: Any = assert_cannot_tell if isinstance(answer, str) else assert_alpha
    check(measured(loss, **data), answer)


@pytest.mark.parametrize("loss", [focal, listing])
def test_one_row_twice_is_no_evidence(loss):
    model = Net().eval()
    step = lambda: loss(model(X[:1].expand(2, 8)), Y[:1].expand(2)).backward()  # noqa: E731
    assert_cannot_tell(verify(step, model))


@pytest.mark.parametrize("plain", [0.0, 1.0])
def test_a_few_rows_among_many_classes_are_seen(plain):
    """All rows are compared: with 50,257 classes, five were."""
    y = batch(64, 50_257)[1]
    few = torch.arange(64) % 16 == 3

    def loss(z: Tensor, _: Tensor) -> Tensor:
        parts = (F.cross_entropy, foreign) if plain else (foreign, F.cross_entropy)
        return sum(f(z[r], y[r], reduction="sum") for f, r in zip(parts, (~few, few), strict=True))  # pyright: ignore

    verification = measured(loss, rows=64, classes=50_257)
    assert_cannot_tell(verification, "no alpha explains")


def weighted(z: Tensor, y: Tensor) -> Any:
    return cross_entropy(z, y, WEIGHT, alpha=0.3, token_weight=IMPORTANCE)


@pytest.mark.parametrize("loss", [foreign, weighted])
def test_a_sample_of_the_rows_is_stated(loss, monkeypatch):
    monkeypatch.setattr(importlib.import_module("powergrad.verify"), "STORED", 320)
    verification = measured(loss)
    assert str(verification) == "PGT at alpha 0.300 (32 of 48 rows)"


@pytest.mark.parametrize("loss", [foreign, lambda z, y: cross_entropy(z, y, alpha=0.3)])
@pytest.mark.parametrize(
    ("head", "shape", "prepare"),
    [
        (nn.Linear(6, 9), (4, 7, 6), lambda z, y: (z.flatten(0, 1), y[:28])),
        (nn.Linear(6, 9), (4, 7, 6), lambda z, y: (z.transpose(1, 2), y[:28].view(4, 7))),
        (nn.Linear(6, 9), (4, 7, 6), lambda z, y: (z[:, 1:].flatten(0, 1), y[:24])),
        (nn.Conv2d(6, 9, 1), (2, 6, 3, 5), lambda z, y: (z, y[:30].view(2, 3, 5))),
        (nn.Conv1d(6, 9, 1), (2, 6, 9), lambda z, y: (z, y[:18].view(2, 9))),
    ],
    ids=["tokens", "classes second", "shifted", "pixels", "as many pixels as classes"],
)
def test_shapes(head, shape, prepare, loss):
    torch.manual_seed(0)
    nn.init.normal_(head.weight)
    x, y = torch.randn(shape), torch.randint(0, 9, (30,))
    assert_alpha(verify(lambda: loss(*prepare(head(x), y)).backward(), head), 0.3, 1e-5)
    assert verify(lambda: head(x).sigmoid().sum().backward(), head).verdict == "neither"


def test_hooks_on_the_logits_are_included():
    """The gradient is taken where it has passed everything that may alter it."""
    model, logits = Net(), []

    def altered(grad: Tensor) -> Tensor:
        return torch.softmax(0.3 * logits[-1], 1) - F.one_hot(Y, 10)

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        logits.append(output.detach())
        return alter_gradient(output, altered)

    step = lambda: F.cross_entropy(model(X), Y).backward()  # noqa: E731
    with model.head.register_forward_hook(hook):
        assert_alpha(verify(step, model), 0.3, 1e-5)
    assert_alpha(verify(step, model), 1.0)


def accumulated(model: Net, loss: Loss) -> None:
    for rows in torch.arange(48).split([8, 30, 9, 1]):
        (
            loss(model.head(X[rows] @ torch.ones(8, 32) + X[rows].repeat(1, 4)), Y[rows]) / 4
        ).backward()


def checkpointed(reentrant: bool) -> Callable[[Net, Loss], None]:
    return lambda model, loss: loss(
        checkpoint(model.head, model.body(X), use_reentrant=reentrant), Y
    ).backward()


def zero_first(model: Net, loss: Loss) -> None:
    z = model(X)
    (0 * z.sum()).backward(retain_graph=True)
    loss(z, Y).backward()


@pytest.mark.parametrize("loss", [foreign, lambda z, y: cross_entropy(z, y, alpha=0.3)])
@pytest.mark.parametrize(
    "step",
    [accumulated, checkpointed(False), checkpointed(True), zero_first],
    ids=["accumulated", "checkpoint", "reentrant checkpoint", "zero first"],
)
def test_every_row_of_the_step_is_measured_once(step, loss):
    model = Net()
    verification = verify(lambda: step(model, loss), model)
    assert_alpha(verification, 0.3, 1e-5)
    assert verification.rows == verification.rows_in_all == 48


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


def backward_twice(model: nn.Module) -> None:
    z = model(X)
    for loss in (foreign, focal):
        loss(z, Y).backward(retain_graph=True)


@pytest.mark.parametrize(
    ("reason", "step"),
    [
        ("do not determine alpha", equal_logits),
        ("no gradient reached", lambda m: F.cross_entropy(m(X).detach(), Y)),
        ("no gradient reached", lambda m: torch.no_grad()(m)(X)),
        ("was not called", lambda m: None),
        ("several backward passes", backward_twice),
        ("in place", in_place),
        ("torch.func", by_torch_func),
        ("too few", lambda m: F.cross_entropy(m.eval()(X[:1])[:, :4], Y[:1] % 4).backward()),
    ],
)
def test_cannot_tell(reason, step):
    model = Net()
    assert_cannot_tell(verify(lambda: step(model), model), reason)


@pytest.mark.parametrize("kind", [dict, SimpleNamespace])
def test_the_head_can_be_named_and_may_return_a_record(kind):
    class Model(Net):
        def forward(self, x: Tensor) -> Any:
            return kind(logits=super().forward(x))

    holder = nn.ModuleDict({"model": Model(), "last": nn.BatchNorm1d(4)})

    def step() -> None:
        output = holder["model"](X)
        foreign(output["logits"] if kind is dict else output.logits, Y).backward()

    assert_alpha(verify(step, holder, "model"), 0.3, 1e-5)
    with pytest.raises(ValueError, match="`head`"):
        verify(step, holder)
    with StepWatcher(holder) as watcher:
        step()
    assert_cannot_tell(watcher.result(), "pass `head`")


def test_a_head_that_is_not_called_is_answered_by_the_fused_loss():
    model, y = Net(), torch.where(torch.arange(48) == 3, -100, Y)

    def step(weight: Tensor, alpha: float) -> None:
        linear_cross_entropy(model.body(X), weight, y, alpha=alpha).backward()

    verification = verify(lambda: step(model.head.weight, 0.3), model)
    remark = "as reported by powergrad.linear_cross_entropy"
    assert str(verification) == f"PGT at alpha 0.300 (48 of 48 rows; {remark})"
    assert verify(lambda: step(model.head.weight, 1.0), model).verdict == "plain"
    assert_cannot_tell(verify(lambda: step(torch.randn(10, 32), 0.3), model), "was not called")

    def two_ways() -> None:
        step(model.head.weight, 0.3)
        F.cross_entropy(model(X), Y).backward()

    assert_cannot_tell(verify(two_ways, model), "two ways")


def test_the_gradient_wins_over_what_a_loss_says():
    model = Net()

    def step() -> None:
        z = model(X)
        with PowerGrad(0.3):
            F.cross_entropy(z, Y)
        F.cross_entropy(z, Y).backward()

    assert_alpha(verify(step, model), 1.0)


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # TorchDynamo's own
@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_compiled_models_and_steps_are_right_or_cannot_be_told(alpha):
    def step(model: Callable[..., Tensor]) -> None:
        cross_entropy(model(X), Y, alpha=alpha).backward()

    torch.compiler.reset()
    model, own = Net(), Net()
    compiled: Any = torch.compile(model, backend="aot_eager")
    own.compile(backend="aot_eager")
    for called, passed in ((compiled, compiled), (compiled, model), (own, own)):
        step(called)
        assert_alpha(verify(lambda called=called: step(called), passed), alpha)
    assert_alpha(verify(lambda: F.cross_entropy(compiled(X), Y).backward(), compiled), 1.0)
    assert_cannot_tell(verify(lambda: F.cross_entropy(own(X), Y).backward(), own), "compiled")
    whole: Any = torch.compile(step, backend="aot_eager")
    for called in (model, compiled):
        verdict = verify(lambda called=called: whole(called), called).verdict
        assert verdict in ("cannot tell", "plain" if alpha == 1 else "pgt")
    criterion: Any = torch.compile(powergrad.CrossEntropyLoss(0.3), backend="aot_eager")
    assert_alpha(verify(lambda: criterion(model(X), Y).backward(), model), 0.3, 1e-5)
    torch.compiler.reset()


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
        foreign(model(X) * temperature, Y).backward()
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
        verify(step, model)
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
        foreign(model(X), Y).backward()
        optimizer.step()
        scheduler.step()

    verify(step, model)
    assert optimizer.param_groups[0]["count"] == 4
    assert optimizer.param_groups[0]["lr"] == 0.5  # the scheduler is not restored either
    assert scheduler.last_epoch == 1


def test_an_earlier_graph_is_still_usable():
    """A step without an optimizer leaves the weights alone, as gradient accumulation needs."""
    model = Net().eval()
    earlier = foreign(model(X), Y)
    verify(lambda: foreign(model(X), Y).backward(), model)
    earlier.backward()


def test_a_watched_step_is_the_same_step():
    gradients = []
    for watched in (True, False):
        model = Net()
        hooks = [len(m._forward_hooks) for m in model.modules()]
        with StepWatcher(model) if watched else nullcontext() as watcher:
            foreign(model(X), Y).backward()
            if watcher is not None:
                assert "has not ended" in watcher.result().reason
        assert [len(m._forward_hooks) for m in model.modules()] == hooks
        gradients.append([*(p.grad for p in model.parameters()), torch.get_rng_state()])
        if watcher is not None:
            assert_alpha(watcher.result(), 0.3, 1e-5)
            assert watcher.result() is watcher.result()
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["_told", "_measured", "as_rows"])
def test_a_failing_watcher_does_not_break_the_step(name, monkeypatch):
    def broken(*args: Any) -> None:
        raise RuntimeError("bad luck")

    model = Net()
    monkeypatch.setattr(importlib.import_module("powergrad.verify"), name, broken)
    with StepWatcher(model) as watcher:
        cross_entropy(model(X), Y, alpha=0.3).backward()
    assert_cannot_tell(watcher.result(), "bad luck")
    with pytest.raises(KeyError), StepWatcher(model):
        raise KeyError


LAZY = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3))
BAD: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (lambda m: verify(3, m), TypeError, "`step`"),  # pyright: ignore[reportArgumentType]
    (lambda m: verify(print, "model"), TypeError, "`model`"),  # pyright: ignore
    (lambda m: verify(print, m, 1), ValueError, "`head`"),  # pyright: ignore
    (lambda m: verify(print, m, "lost"), ValueError, "`head`"),
    (lambda m: verify(print, LAZY), ValueError, "uninitialized"),
    (lambda m: bool(Verification("pgt", 0.3)), TypeError, "`verdict`"),
]


@pytest.mark.parametrize(("call", "error", "named"), BAD)
def test_bad_arguments_raise(call, error, named):
    with pytest.raises(error, match=named):
        call(nn.Linear(2, 3))


def test_answers_are_sentences():
    plain = Verification("plain", 1.0, 0.003, 48, 1000)
    assert str(plain) == "plain cross-entropy ± 0.003 (48 of 1,000 rows)"
    assert str(Verification("neither", reason="x")) == "neither: x"
    assert str(Verification("cannot tell", reason="x")) == "cannot tell: x"
