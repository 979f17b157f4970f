"""`PowerGrad`: what it reaches, counts and refuses, and that nothing is ever silently plain."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import pickle
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    set_checkpoint_early_stop,
)

import powergrad
from powergrad import (
    CrossEntropyLoss,
    PowerGrad,
    compat,
    cross_entropy,
    linear_cross_entropy,
    log_softmax,
)

Y = torch.tensor([0, 2, 4, 1])
F_CROSS_ENTROPY = F.cross_entropy
NOTHING = "altered no cross-entropy or log-softmax"


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


@pytest.fixture
def z(device) -> Tensor:
    g = torch.Generator().manual_seed(0)
    z = 3 * torch.randn(4, 5, generator=g, dtype=torch.float64)
    return z.to(device).requires_grad_()


@pytest.fixture
def y(device) -> Tensor:
    return Y.to(device)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    yield
    assert _get_current_function_mode_stack() == []
    assert F.cross_entropy is F_CROSS_ENTROPY


def close(loss: Any, z: Tensor, alpha: float | Tensor, of: Any = torch.clone) -> bool:
    """Whether its gradient is PGT's. By `backward`: a reentrant checkpoint refuses `grad`."""
    z.grad = None
    loss.backward(retain_graph=True)
    (expected,) = torch.autograd.grad(cross_entropy(of(z), Y.to(z.device), alpha=alpha), z)
    assert z.grad is not None
    return bool((z.grad - expected).abs().max() <= 1e-14)


@pytest.mark.parametrize("way", ["PowerGrad", "enable"])
@pytest.mark.parametrize("name", CALLS)
def test_reaches_every_form_and_ends(z, name, way):
    call = CALLS[name]
    value = call(z)
    if way == "enable":
        powergrad.enable(0.3)
        loss = call(z)
        powergrad.disable()
    else:
        with PowerGrad(alpha=0.3):
            loss = call(z)
        assert close(PowerGrad(0.3)(call)(z), z, 0.3)
    assert torch.allclose(loss, value, rtol=1e-14)
    assert close(loss, z, 0.3)
    assert not close(loss, z, 1.0)
    assert close(call(z), z, 1.0)


def test_the_innermost_applies(z, y):
    with PowerGrad(0.5):
        with PowerGrad(0.3):
            inner = plain(z)
        outer = plain(z)
        with PowerGrad(1.0):
            off = plain(z)
        explicit = cross_entropy(z, y, alpha=0.8)
        module = CrossEntropyLoss(1.0)(z, y)
    with PowerGrad(0.7) as mode, mode:  # one object may be entered twice
        mode.alpha = 0.6
        twice = plain(z)
    losses = {0.3: [inner], 0.5: [outer], 1.0: [off, module], 0.8: [explicit], 0.6: [twice]}
    assert all(close(loss, z, alpha) for alpha, several in losses.items() for loss in several)


def test_positional_and_old_options_pass_through(z, y):
    w = torch.rand(5, dtype=z.dtype, device=z.device)
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
    options: dict[str, Any] = {"options": blocks} if len(rows) == 1 else {"ignore_index": None}
    with PowerGrad(0.3):
        loss = F.linear_cross_entropy(x, weight, y, linear_bias=bias, **options)
    logits = F.linear(x, weight.flatten(0, -2), bias.flatten()).unflatten(-1, bias.shape)
    losses = (loss, cross_entropy(logits, y, alpha=0.3))
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(v, weight)[0] for v in losses))


@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 4), (2, 3, 4, 5)])
def test_an_implicit_dimension_is_pytorchs(shape, generator):
    z = torch.randn(shape, generator=generator, requires_grad=True)
    with pytest.warns(UserWarning, match="Implicit"):
        expected = F.log_softmax(z)
    with PowerGrad(0.3):
        torch.testing.assert_close(F.log_softmax(z), expected)


def test_a_log_softmax_in_the_model_can_be_left_out(z, y):
    def model(z: Tensor) -> Tensor:  # attention over the classes, then a loss of its own
        return z * torch.log_softmax(z, 1)

    (plain_inside,) = torch.autograd.grad(cross_entropy(model(z), y, alpha=0.3), z)
    with PowerGrad(0.3, log_softmax=False):
        loss = F.cross_entropy(model(z), y)
    assert torch.equal(torch.autograd.grad(loss, z)[0], plain_inside)
    with PowerGrad(0.3):
        loss = F.cross_entropy(model(z), y)
    assert not torch.allclose(torch.autograd.grad(loss, z)[0], plain_inside)


def test_integers_are_cast_before_the_log_softmax():
    scores = torch.tensor([[3, 1, 2]])
    with PowerGrad(0.3):
        for call in (F.log_softmax, torch.log_softmax, torch.special.log_softmax):
            actual = call(scores, 1, dtype=torch.float32)
            assert torch.equal(actual, torch.ops.aten.log_softmax.int(scores.float(), 1))


def test_a_loss_within_the_function_of_a_subclass_is_altered(z, y):
    """PyTorch hides the mode from what `__torch_function__` of a tensor calls."""

    class Own(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is F.mse_loss:
                return F.cross_entropy(args[0].as_subclass(Tensor), y)
            return super().__torch_function__(func, types, args, kwargs or {})

    with PowerGrad(0.3):
        loss = F.mse_loss(z.as_subclass(Own), y)
    assert close(loss.as_subclass(Tensor), z, 0.3)


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
    assert list(inspect.signature(second.forward).parameters) == ["x", "target"]
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    second(x, target=Y).backward()
    assert first.fc.weight.grad is None
    loss = cross_entropy(first.fc(x), Y, alpha=0.3)
    (expected,) = torch.autograd.grad(loss, first.fc.weight)
    torch.testing.assert_close(second.fc.weight.grad, expected)


def test_counts_by_kind_over_blocks_and_shows_it(z, y):
    with PowerGrad(0.3) as mode:
        for _ in range(3):
            F.cross_entropy(z, y)
        nn.LogSoftmax(1)(z)
    with mode:
        z.log_softmax(1)
    assert repr(mode) == "PowerGrad(alpha=0.3, altered={'cross_entropy': 3, 'log_softmax': 2})"
    strict = PowerGrad(0.0, log_softmax=False, strict=True)
    assert repr(strict) == "PowerGrad(alpha=0.0, log_softmax=False, strict=True, altered={})"


def without_gradients_too(z: Tensor, y: Tensor) -> None:
    F.cross_entropy(z.detach(), y)
    torch.no_grad()(F.cross_entropy)(z, y)
    torch.inference_mode()(F.cross_entropy)(z, y)
    F.cross_entropy(z, y)


def transformed(z: Tensor, y: Tensor) -> None:
    torch.func.grad(lambda z: F.cross_entropy(z, y))(z.detach())
    torch.func.vmap(torch.func.grad(F.cross_entropy))(z.detach(), y)
    torch.func.grad(lambda z: torch.func.vmap(F.cross_entropy)(z, y).sum())(z.detach())


@pytest.mark.parametrize(
    ("call", "counted"),
    [
        (without_gradients_too, {"cross_entropy": 1}),
        (transformed, {"cross_entropy": 3}),
        (PowerGrad(1.0)(F.cross_entropy), {}),
    ],
)
def test_counts_only_what_is_altered(call, counted, z, y):
    with PowerGrad(0.3) as mode:
        call(z, y)
    assert mode.altered == counted


def test_a_decorator_counts_in_recursions_and_threads(z, y):
    mode = PowerGrad(0.3, strict=True)

    @mode
    def loss(depth: int) -> Tensor:
        return F.cross_entropy(z, y) + (loss(depth - 1) if depth else 0)

    threads = [threading.Thread(target=loss, args=(99,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    with mode:
        F.cross_entropy(z, y)
    for thread in threads:
        thread.join()
    assert mode.altered == {"cross_entropy": 401}
    mode.alpha = 1.0
    loss(3)
    assert mode.altered == {"cross_entropy": 401}


def test_a_copy_and_a_pickle_keep_their_own_count(z, y):
    with PowerGrad(0.3, strict=True) as mode:
        F.cross_entropy(z, y)
    for other in (copy.deepcopy(mode), pickle.loads(pickle.dumps(mode))):
        with other:
            F.cross_entropy(z, y)
        assert (other.alpha, other.strict, other.altered) == (0.3, True, {"cross_entropy": 2})
    assert mode.altered == {"cross_entropy": 1}


class Chunked(torch.autograd.Function):
    """A loss that computes its gradient in the forward pass, as fused ones do."""

    @staticmethod
    def forward(ctx, z, y):
        p = torch.softmax(z, 1)
        ctx.gradient = p - F.one_hot(y, 5)
        return -p.gather(1, y[:, None]).log().sum()

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore
        return grad * ctx.gradient, None


def in_a_thread(z: Tensor, y: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(F.cross_entropy, z, y).result()


def scripted(z: Tensor, y: Tensor) -> Tensor:
    return torch.jit.script(nn.CrossEntropyLoss())(z * 2, y)


INSTEAD: dict[str, Callable[[Tensor, Tensor], object]] = {
    "a softmax": lambda z, y: F.nll_loss(z.softmax(1).log(), y),
    "logsumexp": lambda z, y: (z.logsumexp(1) - z.gather(1, y[:, None])[:, 0]).sum(),
    "squares": lambda z, y: F.mse_loss(z, F.one_hot(y, 5).to(z)),
    "an operator": lambda z, y: torch.ops.aten.cross_entropy_loss(z, y),
    "a custom function": lambda z, y: Chunked.apply(z, y),
    "another thread": in_a_thread,
    "TorchScript": scripted,
}


@pytest.mark.parametrize("name", INSTEAD)
def test_warns_or_raises_if_nothing_was_altered(z, y, name):
    loss = INSTEAD[name]

    def in_block(mode: PowerGrad) -> None:
        with mode:
            loss(z, y)

    for run in (in_block, lambda mode: mode(loss)(z, y)):
        with pytest.warns(UserWarning, match=NOTHING) as record:
            run(PowerGrad(0.3))
        record = [r for r in record if r.category is not DeprecationWarning]
        assert [warning.filename for warning in record] == [__file__]
        with pytest.raises(RuntimeError, match=NOTHING):
            run(PowerGrad(0.3, strict=True))


def test_log_softmax_that_is_left_alone_warns(z):
    with pytest.warns(UserWarning, match=NOTHING):
        PowerGrad(0.3, log_softmax=False)(F.log_softmax)(z, 1)


def test_a_loss_outside_the_block_warns(z, y):
    loss = F.cross_entropy(z, y)
    with pytest.warns(UserWarning, match=NOTHING), PowerGrad(0.3):
        loss.backward()
    with pytest.warns(UserWarning, match=NOTHING), PowerGrad(0.3):
        logits = nn.Identity()(z) * 2
    F.cross_entropy(logits, y)
    with PowerGrad(0.3) as mode:
        loss = F.cross_entropy(z, y)
    with mode:  # this object has altered the loss
        loss.backward()


QUIET: dict[str, Callable[[Tensor, Tensor], object]] = {
    "an empty block": lambda z, y: None,
    "validation": lambda z, y: torch.no_grad()(lambda: F.mse_loss(z * 2, z))(),
    "validation with a custom function": lambda z, y: torch.no_grad()(Chunked.apply)(z, y),
    "inference": lambda z, y: torch.inference_mode()(lambda: F.cross_entropy(z * 2, y))(),
    "a model is made": lambda z, y: nn.Linear(3, 3),
    "an optimizer steps": lambda z, y: torch.optim.SGD([z], 0.1).step(),
}
INTENDED: dict[str, Callable[[Tensor, Tensor], object]] = {
    "ours": lambda z, y: cross_entropy(z * 2, y, alpha=0.5),
    "ours, smoothed": lambda z, y: cross_entropy(z * 2, y, alpha=0.5, label_smoothing=0.1),
    "our primitive": lambda z, y: log_softmax(z * 2, alpha=0.5),
    "our linear": lambda z, y: linear_cross_entropy(z * 2, torch.eye(5).to(z), y, alpha=0.5),
    "a nested block": lambda z, y: PowerGrad(0.5)(F.cross_entropy)(z * 2, y),
    "switched off": lambda z, y: PowerGrad(1.0)(F.cross_entropy)(z * 2, y),
}


@pytest.mark.parametrize("name", [*QUIET, *INTENDED])
def test_stays_quiet(z, y, name):
    with PowerGrad(0.3, strict=name in INTENDED):
        {**QUIET, **INTENDED}[name](z, y)


def test_an_own_loss_in_another_thread_is_not_in_the_block(z, y):
    strict = PowerGrad(0.3, strict=True)
    with pytest.raises(RuntimeError, match=NOTHING), strict, ThreadPoolExecutor(1) as pool:
        pool.submit(cross_entropy, z, y, alpha=0.5).result()


def test_strict_is_quiet_without_gradients_at_alpha_1_and_after_an_error(z):
    with torch.no_grad(), PowerGrad(0.3, strict=True):
        plain(z)
    PowerGrad(1.0, strict=True)(F.mse_loss)(z, z.detach())
    with pytest.raises(ZeroDivisionError):
        PowerGrad(0.3, strict=True)(lambda: F.mse_loss(z, z.detach()) / (1 / 0))()


async def coroutine(z: Tensor) -> Tensor:
    return plain(z)


async def batches(z: Tensor) -> AsyncIterator[Tensor]:
    yield plain(z)


@pytest.mark.parametrize(("function", "message"), [(Wrapped, "Wrapped"), (3, "3")])
def test_what_cannot_be_decorated_is_refused(function, message):
    with pytest.raises(TypeError, match=message):
        PowerGrad(0.3)(function)


@pytest.mark.parametrize("lazy", [lambda z: map(plain, [z]), coroutine, batches])
def test_what_computes_later_is_refused_when_it_returns(z, lazy):
    with pytest.raises(TypeError, match="computed"):
        PowerGrad(0.3)(lazy)(z)


def test_other_results_pass(z):
    for result in ((z, 1), {"loss": z}, [z], None, range(3), Wrapped()):
        assert PowerGrad(0.3)(lambda result=result: result)() is result


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
    with pytest.raises(RuntimeError, match="innermost"):
        second.__exit__(None, None, None)


reentrant = functools.partial(checkpoint, use_reentrant=True)
non_reentrant = functools.partial(checkpoint, use_reentrant=False)


def without_early_stop(f: Callable[[Tensor], Any], z: Tensor) -> Any:
    with set_checkpoint_early_stop(False):
        return non_reentrant(f, z)


# PyTorch 2.6 does not show a mode that it is inside a checkpoint; the backward pass then raises.
sees_checkpoints = pytest.mark.skipif(
    compat._top_hooks is None, reason="this version of PyTorch raises in the backward pass"
)
FORMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "reentrant": reentrant,
    "non-reentrant": non_reentrant,
    "without early stop": without_early_stop,
    "nested": lambda f, z: non_reentrant(lambda z: non_reentrant(f, z), z),
    "nested, both reentrant": lambda f, z: reentrant(lambda z: reentrant(f, z), z),
    "sequential": lambda f, z: checkpoint_sequential([f, torch.clone], 2, z, use_reentrant=False),
}


@sees_checkpoints
@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_within_a_block_raises_and_a_block_within_a_checkpoint_works(z, form):
    with pytest.raises(RuntimeError, match=r"checkpoint.*powergrad\.enable"), PowerGrad(0.3):
        FORMS[form](doubled, z)
    for outer in (0.6, 1.0):
        with PowerGrad(outer, strict=True):
            loss = FORMS[form](PowerGrad(0.3)(doubled), z)
        assert close(loss, z, 0.3, lambda z: 2 * z.sin())


@pytest.mark.parametrize("form", [reentrant, non_reentrant])
def test_what_a_backward_pass_in_a_block_recomputes_is_not_inside(z, form):
    loss = form(doubled, z)
    with PowerGrad(0.3):
        plain(z)
        assert close(loss, z, 1.0, lambda z: 2 * z.sin())


def on_cpu(z: Tensor) -> Tensor:
    with save_on_cpu():
        return doubled(z)


@sees_checkpoints
def test_other_hooks_of_saved_tensors_are_no_checkpoint(z):
    for loss in (on_cpu, lambda z: non_reentrant(on_cpu, z)):
        with PowerGrad(0.3):
            value = loss(z)
        assert close(value, z, 0.3, lambda z: 2 * z.sin())


def test_a_checkpoint_that_is_not_seen_is_refused_by_pytorch(z, monkeypatch):
    monkeypatch.setattr("powergrad.compat._top_hooks", None)
    with PowerGrad(0.3):
        loss: Any = non_reentrant(doubled, z, determinism_check="none")
    with pytest.raises(RuntimeError, match=r"torch\.utils\.checkpoint"):
        loss.backward()


@pytest.mark.parametrize("form", [reentrant, non_reentrant])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_evaluation_inside_a_checkpoint_does_not_raise(z, form):
    with torch.no_grad(), PowerGrad(0.3):
        value = form(plain, z.detach())
    assert torch.equal(value, plain(z.detach()))


class Recomputing(torch.autograd.Function):
    """It enables and disables gradients itself, too."""

    @staticmethod
    def forward(ctx, z, enabled):
        with torch.no_grad():
            z = z * 1
        with torch.set_grad_enabled(enabled):
            ctx.loss = plain(z.requires_grad_())
        with torch.no_grad():
            return ctx.loss + 0 * plain(z)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore
        raise AssertionError


def test_a_loss_inside_another_custom_function_raises(z):
    for enabled in (True, False):
        with PowerGrad(0.3), pytest.raises(RuntimeError, match="custom"):
            Recomputing.apply(z, enabled)
    with PowerGrad(0.3) as mode:
        with torch.no_grad():  # nothing to recompute
            Recomputing.apply(z, False)
            plain(z)
        loss = plain(z)
    assert close(loss, z, 0.3)
    assert mode.altered == {"cross_entropy": 1}
