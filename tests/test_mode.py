"""`PowerGrad`: what it reaches, what it leaves alone, and that nothing is ever silently plain."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from powergrad import CrossEntropyLoss, PowerGrad, cross_entropy

Y = torch.tensor([0, 2, 4, 1])


def plain(z: Tensor) -> Tensor:
    return F.cross_entropy(z, Y.to(z.device))


def doubled(z: Tensor) -> Tensor:
    """A loss with something before it to recompute."""
    return plain(2 * z.sin())


class Wrapped(nn.Module):
    """A model that computes its own loss, and makes the criterion there, as many do."""

    def forward(self, z: Tensor) -> Tensor:
        return nn.CrossEntropyLoss()(z, Y.to(z.device))


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "F.cross_entropy": plain,
    "nn.CrossEntropyLoss": Wrapped(),
    "F.log_softmax": lambda z: F.nll_loss(F.log_softmax(z, dim=1), Y.to(z.device)),
    "nn.LogSoftmax": lambda z: F.nll_loss(nn.LogSoftmax(dim=-1)(z), Y.to(z.device)),
    "torch.log_softmax": lambda z: F.nll_loss(torch.log_softmax(z, 1), Y.to(z.device)),
    "torch.special": lambda z: F.nll_loss(torch.special.log_softmax(z, 1), Y.to(z.device)),
    "Tensor.log_softmax": lambda z: F.nll_loss(z.log_softmax(dim=1), Y.to(z.device)),
    "written out": lambda z: -z.log_softmax(1).gather(1, Y.to(z.device)[:, None]).mean(),
}
if hasattr(F, "linear_cross_entropy"):
    CALLS["F.linear_cross_entropy"] = lambda z: F.linear_cross_entropy(
        z, torch.eye(5, dtype=z.dtype, device=z.device), Y.to(z.device)
    )


pytestmark = pytest.mark.usefixtures("nothing_traced")


@pytest.fixture
def z(device) -> Tensor:
    g = torch.Generator().manual_seed(0)
    z = 3 * torch.randn(4, 5, generator=g, dtype=torch.float64)
    return z.to(device).requires_grad_()


def close(loss: Any, z: Tensor, alpha: float | Tensor, of: Any = torch.clone) -> bool:
    """Whether its gradient is PGT's. By `backward`: a reentrant checkpoint refuses `grad`."""
    z.grad = None
    loss.backward(retain_graph=True)
    (expected,) = torch.autograd.grad(cross_entropy(of(z), Y.to(z.device), alpha=alpha), z)
    assert z.grad is not None
    return bool((z.grad - expected).abs().max() <= 1e-14)


def close_doubled(loss: Any, z: Tensor, alpha: float | Tensor) -> bool:
    return close(loss, z, alpha, lambda z: 2 * z.sin())


@pytest.mark.parametrize("name", CALLS)
def test_reaches_and_leaves_nothing_behind(z, name):
    call = CALLS[name]
    plain = call(z)
    with PowerGrad(alpha=0.3):
        loss = call(z)
    assert torch.allclose(loss, plain, rtol=1e-14)
    assert close(loss, z, 0.3)
    assert not close(loss, z, 1.0)
    assert close(PowerGrad(0.3)(call)(z), z, 0.3)
    assert close(call(z), z, 1.0)
    assert _get_current_function_mode_stack() == []


def test_the_innermost_holds(z):
    with PowerGrad(0.5):
        with PowerGrad(0.3):
            inner = plain(z)
        outer = plain(z)
        with PowerGrad(1.0):
            off = plain(z)
        explicit = cross_entropy(z, Y.to(z.device), alpha=0.8)
        module = CrossEntropyLoss(1.0)(z, Y.to(z.device))
    with PowerGrad(0.7) as mode, mode:  # one object may be entered twice
        mode.alpha = 0.6
        twice = plain(z)
    losses = {0.3: [inner], 0.5: [outer], 1.0: [off, module], 0.8: [explicit], 0.6: [twice]}
    assert all(close(loss, z, alpha) for alpha, several in losses.items() for loss in several)


def test_positional_and_old_options_pass_through(z):
    y, w = Y.to(z.device), torch.rand(5, dtype=z.dtype, device=z.device)
    with PowerGrad(0.3):
        positional = F.cross_entropy(z, y, w, None, 2, None, "sum", 0.1)
        with pytest.warns(UserWarning, match="size_average"):
            old = F.cross_entropy(z, y, size_average=False)
    options: dict[str, Any] = {"weight": w, "ignore_index": 2, "label_smoothing": 0.1}
    for loss, given in ((positional, options), (old, {})):
        reference = cross_entropy(z, y, alpha=0.3, reduction="sum", **given)
        (actual,) = torch.autograd.grad(loss, z)
        assert torch.equal(actual, torch.autograd.grad(reference, z)[0])


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="needs a newer torch")
@pytest.mark.parametrize("rows", [(4, 2), (4,), ()], ids=["positions", "blocks", "one example"])
def test_heads_of_other_shapes_and_blocks(device, rows):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(*rows[:1], 3, generator=g, dtype=torch.float64).to(device)
    weight = torch.randn(5, *rows[1:], 3, generator=g, dtype=torch.float64).to(device)
    bias = torch.randn(5, *rows[1:], generator=g, dtype=torch.float64).to(device)
    y = torch.randint(0, 5, rows, generator=g).to(device)
    blocks = nn.LinearCrossEntropyOptions(batch_chunk_size=2, chunking_method=None)
    weight.requires_grad_()
    with PowerGrad(0.3):
        loss = F.linear_cross_entropy(
            x, weight, y, linear_bias=bias, options=blocks if len(rows) == 1 else None
        )
    logits = F.linear(x, weight.flatten(0, -2), bias.flatten()).unflatten(-1, bias.shape)
    losses = (loss, cross_entropy(logits, y, alpha=0.3))
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(v, weight)[0] for v in losses))


def test_an_implicit_dimension_warns_as_pytorch_does(z):
    with pytest.warns(UserWarning, match="Implicit"), PowerGrad(0.3):
        log_p = F.log_softmax(z)
    assert close(F.nll_loss(log_p, Y.to(z.device)), z, 0.3)


def test_a_log_softmax_in_the_model_can_be_left_out(z):
    def model(z: Tensor) -> Tensor:  # attention over the classes, then a loss of its own
        return z * torch.log_softmax(z, 1)

    y = Y.to(z.device)
    (plain_inside,) = torch.autograd.grad(cross_entropy(model(z), y, alpha=0.3), z)
    with PowerGrad(0.3, log_softmax=False):
        loss = F.cross_entropy(model(z), y)
    assert torch.equal(torch.autograd.grad(loss, z)[0], plain_inside)
    with PowerGrad(0.3):
        with PowerGrad(1.0):
            out = model(z)
        loss = F.cross_entropy(out, y)
    assert torch.equal(torch.autograd.grad(loss, z)[0], plain_inside)
    with PowerGrad(0.3):
        loss = F.cross_entropy(model(z), y)
    assert not torch.allclose(torch.autograd.grad(loss, z)[0], plain_inside)


def test_an_exception_leaves_nothing_behind(z):
    with pytest.raises(ZeroDivisionError), PowerGrad(0.3), PowerGrad(0.5):
        _ = 1 / 0
    assert _get_current_function_mode_stack() == []
    assert close(plain(z), z, 1.0)
    with PowerGrad(0.3), pytest.raises(ValueError, match="`target`"):
        F.cross_entropy(z, Y.to(z.device)[:2])


def test_threads_do_not_see_each_other(z):
    losses = {}

    def work(place: int) -> None:
        losses[place] = plain(z)

    with PowerGrad(0.3):
        for function in (work, PowerGrad(0.3)(work)):
            thread = threading.Thread(target=function, args=(len(losses),))
            thread.start()
            thread.join()
    assert close(losses[0], z, 1.0)  # as documented
    assert close(losses[1], z, 0.3)


def test_integers_are_cast_before_the_log_softmax():
    scores = torch.tensor([[3, 1, 2]])
    with PowerGrad(0.3):
        for call in (F.log_softmax, torch.log_softmax, torch.special.log_softmax):
            actual = call(scores, 1, dtype=torch.float32)
            assert torch.equal(actual, torch.ops.aten.log_softmax.int(scores.float(), 1))


# What a decorator cannot reach --------------------------------------------------------------------


class Asynchronous:
    async def __call__(self) -> None:
        pass


def batches() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (Wrapped, "class"),
        (batches, "generator"),
        (Asynchronous(), "coroutine"),
        (Asynchronous.__call__, "coroutine"),
        (functools.partial(Asynchronous().__call__), "coroutine"),
        (3, "int"),
    ],
)
def test_what_cannot_be_decorated_is_refused(function, message):
    with pytest.raises(TypeError, match=message):
        PowerGrad(0.3)(function)


LAZY: dict[str, Callable[[Tensor], object]] = {
    "generator": lambda z: (F.cross_entropy(r, Y[0]) for r in z),
    "coroutine": lambda z: Asynchronous()(),
    "map": lambda z: map(F.cross_entropy, z, Y),
    "filter": lambda z: filter(lambda r: r.log_softmax(0).sum(), z),
    "zip": lambda z: zip(map(F.cross_entropy, z, Y), strict=False),
    "starmap": lambda z: itertools.starmap(F.cross_entropy, zip(z, Y, strict=False)),
}


@pytest.mark.parametrize("name", LAZY)
def test_what_computes_later_is_refused_when_it_returns(z, name):
    with pytest.raises(TypeError, match="computed"):
        PowerGrad(0.3)(LAZY[name])(z)
    assert _get_current_function_mode_stack() == []


def test_other_results_pass(z):
    for result in ((z, 1), {"loss": z}, [z], None, iter([z]), range(3), Wrapped()):
        assert PowerGrad(0.3)(lambda result=result: result)() is result


# Coroutines ---------------------------------------------------------------------------------------


def test_coroutines_with_alphas_of_their_own_are_refused(z):
    """They take turns in one thread, whose modes they share."""

    async def main() -> tuple[Tensor | BaseException, ...]:
        entered = asyncio.Event()

        async def first() -> Tensor:
            with PowerGrad(0.3):
                await entered.wait()
                return plain(z)  # while the other's block is the innermost

        async def second() -> Tensor:
            with PowerGrad(0.6):
                entered.set()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                return plain(z)

        return await asyncio.gather(first(), second(), return_exceptions=True)

    refused, loss = asyncio.run(main())
    assert isinstance(refused, RuntimeError)
    assert "coroutine" in str(refused)
    assert isinstance(loss, Tensor)
    assert close(loss, z, 0.6)
    assert _get_current_function_mode_stack() == []


def test_tasks_that_a_block_starts_are_inside(z):
    async def loss() -> Tensor:
        await asyncio.sleep(0)
        return plain(z)

    async def main() -> list[Tensor]:
        with PowerGrad(0.3):
            return list(await asyncio.gather(loss(), loss()))

    assert all(close(value, z, 0.3) for value in asyncio.run(main()))


def test_a_block_that_ends_out_of_order_raises_and_leaves_nothing_behind(z):
    first, second = PowerGrad(0.3), PowerGrad(0.6)
    first.__enter__()
    second.__enter__()
    with pytest.raises(RuntimeError, match="innermost"):
        first.__exit__(None, None, None)
    assert close(plain(z), z, 0.6)
    second.__exit__(None, None, None)
    assert _get_current_function_mode_stack() == []
    with pytest.raises(RuntimeError, match="innermost"):
        second.__exit__(None, None, None)


# Compiled functions -------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["around", "within", "decorated", "another object"])
def test_alpha_changes_without_another_compilation(z, way):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    mode = PowerGrad(0.5)

    def within(z: Tensor) -> Tensor:
        with mode:
            return doubled(z)

    functions = {"within": within, "decorated": mode(doubled)}
    compiled = torch.compile(functions.get(way, doubled), backend=counter, fullgraph=True)

    def check(alpha: float) -> None:
        mode.alpha = alpha
        around = {"around": mode, "another object": PowerGrad(alpha)}.get(way, nullcontext())
        with around:
            loss = compiled(z)
        assert close_doubled(loss, z, alpha)

    for step in range(20):
        check(step / 20)
    assert counter.frame_count == 1
    for alpha in (1.0, 0.5, 1.0, 0.0):  # PyTorch's own function is another graph
        check(alpha)
    assert counter.frame_count <= 3


@pytest.mark.filterwarnings(r"ignore:The \.grad attribute:UserWarning")  # TorchDynamo reads it
def test_a_graph_break_inside_the_block(z):
    torch.compiler.reset()
    log: Any = torch.compiler.disable(lambda loss: None)

    def broken(z: Tensor) -> Tensor:
        loss = plain(z)
        log(loss)
        return loss + plain(z)

    compiled = torch.compile(PowerGrad(0.3)(broken), backend="aot_eager")
    for _ in range(2):
        assert close(compiled(z) / 2, z, 0.3)
        assert _get_current_function_mode_stack() == []


def test_a_criterion_made_in_a_function_that_is_compiled_first_inside_the_block():
    """In a process in which nothing has loaded TorchDynamo before."""
    program = """
import sys
import torch
from torch import nn
from powergrad import PowerGrad, cross_entropy

z = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
y = torch.arange(4)
with PowerGrad(0.3):
    assert "torch._dynamo" not in sys.modules
    loss = torch.compile(lambda z: nn.CrossEntropyLoss()(z, y), backend="eager")(z)
(actual,) = torch.autograd.grad(loss, z)
(expected,) = torch.autograd.grad(cross_entropy(z, y, alpha=0.3), z)
assert (actual - expected).abs().max() < 1e-14, (actual - expected).abs().max()
"""
    subprocess.run([sys.executable, "-c", program], check=True)


# Recomputation ------------------------------------------------------------------------------------


def composed(z: Tensor) -> Tensor:
    """PyTorch's composable checkpoint, which no call of `checkpoint` marks."""

    class Loss(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            return doubled(z)

    from torch.distributed._composable.checkpoint_activation import checkpoint as composable

    return composable(Loss())(z)


def saved(context, operator, *args, **kwargs) -> CheckpointPolicy:
    cheap = operator is torch.ops.aten.sin.default
    return CheckpointPolicy.MUST_SAVE if cheap else CheckpointPolicy.PREFER_RECOMPUTE


selective = functools.partial(create_selective_checkpoint_contexts, saved)
reentrant = functools.partial(checkpoint, use_reentrant=True)
non_reentrant = functools.partial(checkpoint, use_reentrant=False)

CHECKPOINTS: dict[str, Callable[[Tensor], object]] = {
    "reentrant": lambda z: reentrant(doubled, z),
    "non-reentrant": lambda z: non_reentrant(doubled, z),
    "without early stop": lambda z: non_reentrant(doubled, z, early_stop=False),
    "selective": lambda z: non_reentrant(doubled, z, context_fn=selective),
    "nested": lambda z: non_reentrant(lambda z: non_reentrant(doubled, z), z),
    "nested, both reentrant": lambda z: reentrant(lambda z: reentrant(doubled, z), z),
    "sequential, a segment each": lambda z: checkpoint_sequential(
        [torch.sin, lambda z: 2 * z, lambda z: plain(z), torch.clone],
        4,
        z,
        use_reentrant=False,
    ),
    "composable": composed,
}


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_form_of_checkpoint(z, name, inside):
    call, alphas = CHECKPOINTS[name], (0.3, 0.7, 0.0, 1.0, torch.tensor(0.4))
    for alpha in alphas:
        with PowerGrad(alpha) as mode:
            loss = call(z)
            assert not inside or close_doubled(loss, z, alpha)
            mode.alpha = 0.9  # the recomputation has the alpha of its forward pass
        assert inside or close_doubled(loss, z, alpha)
        assert mode.altered == ({} if alpha == 1 else {"cross_entropy": 1})
    assert close_doubled(call(z), z, 1.0)
    with PowerGrad(0.3):  # another alpha at the time of the backward pass
        loss = call(z)
    with PowerGrad(0.8):
        other = doubled(z)
        assert close_doubled(loss, z, 0.3)
    assert close_doubled(other, z, 0.8)
    assert _get_current_function_mode_stack() == []


@pytest.mark.parametrize("form", [reentrant, non_reentrant])
def test_the_innermost_holds_in_a_checkpoint_too(z, form):
    for inner in (0.6, 1.0):
        for outer in (nullcontext(), PowerGrad(0.3)):
            with outer:
                loss = form(PowerGrad(inner)(doubled), z)
            assert close_doubled(loss, z, inner)
        with PowerGrad(0.3), PowerGrad(inner):
            loss = form(doubled, z)
        assert close_doubled(loss, z, inner)
    with PowerGrad(0.3), PowerGrad(0.6, log_softmax=False):
        loss = form(lambda z: CALLS["F.log_softmax"](2 * z.sin()), z)
    assert close_doubled(loss, z, 0.3)
    with PowerGrad(alpha := torch.tensor(0.3)):  # is captured by its value
        loss = form(doubled, z)
    alpha.fill_(0.9)
    assert close_doubled(loss, z, torch.tensor(0.3))


@pytest.mark.parametrize("form", [reentrant, non_reentrant])
def test_an_error_in_a_checkpoint_leaves_nothing_behind(z, form):
    """In the forward pass, and in the recomputation."""
    for good in (0, 1):
        calls = [doubled] * good
        with pytest.raises(IndexError), PowerGrad(0.3):
            form(lambda z, calls=calls: calls.pop()(z), z).backward()
        assert _get_current_function_mode_stack() == []


def test_where_checkpoints_cannot_be_captured_the_error_stays(z, monkeypatch):
    monkeypatch.setattr("powergrad._compat._captured", False)
    for form in (reentrant, non_reentrant):
        with PowerGrad(0.3), pytest.raises(RuntimeError, match="checkpoints"):
            form(doubled, z)


@pytest.mark.parametrize("form", [reentrant, non_reentrant])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_evaluation_inside_a_checkpoint_does_not_raise(z, form):
    with torch.no_grad(), PowerGrad(0.3):
        value = form(plain, z.detach())
    assert torch.equal(value, plain(z.detach()))


def test_a_loss_inside_another_custom_function_raises(z):
    class Mine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z):
            return plain(z)

    with PowerGrad(0.3), pytest.raises(RuntimeError, match="custom"):
        Mine.apply(z)
    with PowerGrad(0.3):  # nothing to alter
        assert Mine.apply(z.detach()) == plain(z)
    assert Mine.apply(z) == plain(z)


def test_a_copy_of_a_model_whose_forward_is_decorated_is_a_model_of_its_own():
    """As an average of weights is: the method must be that of the copy."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 5)

        def forward(self, x: Tensor, *, target: Tensor) -> Tensor:
            return F.cross_entropy(self.fc(x), target)

    first = Model()
    first.forward = PowerGrad(0.3)(first.forward)
    second = copy.deepcopy(first)
    assert second.forward.__name__ == "forward"
    assert list(inspect.signature(second.forward).parameters) == ["x", "target"]
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    second(x, target=Y).backward()
    assert first.fc.weight.grad is None
    loss = cross_entropy(first.fc(x), Y, alpha=0.3)
    (expected,) = torch.autograd.grad(loss, first.fc.weight)
    torch.testing.assert_close(second.fc.weight.grad, expected)


def test_a_compiled_criterion_takes_names(z):
    """Also outside of PowerGrad, after it was entered once."""

    def function(z: Tensor) -> Tensor:
        return nn.CrossEntropyLoss(label_smoothing=0.1)(input=z, target=Y.to(z.device))

    torch.compile(lambda z: z + 1, backend="eager")(z)  # loads TorchDynamo
    with PowerGrad(0.3):
        pass
    torch.testing.assert_close(torch.compile(function, backend="eager")(z), function(z))
