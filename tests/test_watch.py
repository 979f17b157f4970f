"""What a `PowerGrad` counts, and that a block in which it altered nothing says so."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from powergrad import PowerGrad, cross_entropy, linear_cross_entropy, log_softmax

NOTHING = "to alter a cross-entropy or log-softmax with gradients, but got none"
pytestmark = pytest.mark.usefixtures("nothing_traced")


@pytest.fixture
def z(device) -> Tensor:
    g = torch.Generator().manual_seed(0)
    return (3 * torch.randn(4, 5, generator=g)).to(device).requires_grad_()


@pytest.fixture
def y(device) -> Tensor:
    return torch.tensor([0, 2, 4, 1], device=device)


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


# Counting -----------------------------------------------------------------------------------------


def test_counts_by_kind_and_shows_it(z, y):
    mode = PowerGrad(0.3)
    assert mode.altered == {}
    with mode:
        for _ in range(3):
            F.cross_entropy(z, y)
        nn.LogSoftmax(1)(z)
    assert mode.altered == {"cross_entropy": 3, "log_softmax": 1}
    assert repr(mode) == "PowerGrad(alpha=0.3, altered={'cross_entropy': 3, 'log_softmax': 1})"
    with mode:
        z.log_softmax(1)
    assert mode.altered["log_softmax"] == 2
    strict = PowerGrad(0.0, log_softmax=False, strict=True)
    assert repr(strict) == "PowerGrad(alpha=0.0, log_softmax=False, strict=True, altered={})"


def detached_too(z: Tensor, y: Tensor) -> None:
    F.cross_entropy(z.detach(), y)
    torch.no_grad()(F.cross_entropy)(z, y)
    F.cross_entropy(z, y)


def transformed(z: Tensor, y: Tensor) -> None:
    torch.func.grad(lambda z: F.cross_entropy(z, y))(z.detach())
    torch.func.vmap(torch.func.grad(F.cross_entropy))(z.detach(), y)
    torch.func.grad(lambda z: torch.func.vmap(F.cross_entropy)(z, y).sum())(z.detach())


COUNTED: dict[str, tuple[Callable[[Tensor, Tensor], object], dict[str, int]]] = {
    "calls without a gradient": (detached_too, {"cross_entropy": 1}),
    "functional transforms": (transformed, {"cross_entropy": 3}),
    "alpha 1": (PowerGrad(1.0)(F.cross_entropy), {}),
}
if hasattr(F, "linear_cross_entropy"):  # of a newer torch
    COUNTED["linear cross-entropy"] = (
        lambda z, y: F.linear_cross_entropy(z, torch.eye(5, device=z.device), y),
        {"linear_cross_entropy": 1},
    )


@pytest.mark.parametrize("name", COUNTED)
def test_counts_only_what_is_altered(name, z, y):
    call, counted = COUNTED[name]
    with PowerGrad(0.3) as mode:
        call(z, y)
    assert mode.altered == counted


def test_a_decorator_counts_in_recursions_and_threads(z, y):
    mode = PowerGrad(0.3, strict=True)

    @mode
    def loss(depth: int) -> Tensor:
        inner = loss(depth - 1) if depth else 0
        return F.cross_entropy(z, y) + inner

    loss(3)
    assert mode.altered == {"cross_entropy": 4}
    threads = [threading.Thread(target=loss, args=(99,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    with mode:
        F.cross_entropy(z, y)
    for thread in threads:
        thread.join()
    assert mode.altered == {"cross_entropy": 405}
    mode.alpha = 1.0
    loss(3)
    assert mode.altered == {"cross_entropy": 405}


def test_a_copy_and_a_pickle_keep_their_own_count(z, y):
    with PowerGrad(0.3, strict=True) as mode:
        F.cross_entropy(z, y)
    for other in (copy.deepcopy(mode), pickle.loads(pickle.dumps(mode))):
        with other:
            F.cross_entropy(z, y)
        assert (other.alpha, other.strict, other.altered) == (0.3, True, {"cross_entropy": 2})
    assert mode.altered == {"cross_entropy": 1}


# A block in which nothing was altered -------------------------------------------------------------


def metrics_too(z: Tensor, y: Tensor) -> None:
    Chunked.apply(z * 2, y)
    F.cross_entropy(z.detach(), y)
    torch.no_grad()(F.cross_entropy)(z, y)


INSTEAD: dict[str, tuple[str, Callable[[Tensor, Tensor], object]]] = {
    "a softmax": ("softmax, F.nll_loss", lambda z, y: F.nll_loss(z.softmax(1).log(), y)),
    "logsumexp": ("logsumexp", lambda z, y: (z.logsumexp(1) - z.gather(1, y[:, None])[:, 0]).sum()),
    "binary": (
        "F.binary_cross_entropy_with_logits",
        lambda z, y: nn.BCEWithLogitsLoss()(z, F.one_hot(y, 5).to(z)),
    ),
    "squares": ("F.mse_loss", lambda z, y: F.mse_loss(z, F.one_hot(y, 5).to(z))),
    "an operator": (
        "torch.ops.aten.cross_entropy_loss",
        lambda z, y: torch.ops.aten.cross_entropy_loss(z, y),
    ),
    "a custom function": ("Chunked.apply", lambda z, y: Chunked.apply(z, y)),
    "a custom function after a layer": ("Chunked.apply", lambda z, y: Chunked.apply(z * 2, y)),
    "and among others": (
        "Chunked.apply, F.mse_loss",
        lambda z, y: 0.1 * Chunked.apply(z * 2, y) + F.mse_loss(z, z.detach()),
    ),
    "metrics without gradients": ("Chunked.apply", metrics_too),
}


@pytest.mark.parametrize("name", INSTEAD)
def test_warns_or_raises_and_names_what_was_called(z, y, name):
    called, loss = INSTEAD[name]

    def in_block(mode: PowerGrad) -> None:
        with mode:
            loss(z, y)

    for run in (in_block, lambda mode: mode(loss)(z, y)):
        with pytest.warns(UserWarning, match=NOTHING) as record:
            run(PowerGrad(0.3))
        assert [warning.filename for warning in record] == [__file__]
        assert f"The block called {called}, which PowerGrad does not" in str(record[0].message)
        with pytest.raises(RuntimeError, match=NOTHING):
            run(PowerGrad(0.3, strict=True))


def test_log_softmax_that_is_left_alone_is_named(z):
    with pytest.warns(UserWarning, match=r"called F\.log_softmax, which PowerGrad does not alter"):
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


def test_warns_once_per_place(z):
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("default")
        for _ in range(3):
            with PowerGrad(0.3):
                F.mse_loss(z, z.detach())
        with ExitStack() as stack:
            stack.enter_context(PowerGrad(0.3))
            F.mse_loss(z, z.detach())
    assert [warning.filename for warning in record] == [__file__] * 2


QUIET: dict[str, Callable[[Tensor, Tensor], object]] = {
    "an empty block": lambda z, y: None,
    "no tensor": lambda z, y: torch.zeros(3) + 1,
    "validation": lambda z, y: torch.no_grad()(lambda: F.mse_loss(z * 2, z))(),
    "validation with a custom function": lambda z, y: torch.no_grad()(Chunked.apply)(z, y),
    "inference": lambda z, y: torch.inference_mode()(lambda: F.mse_loss(z * 2, z))(),
    "a model is made": lambda z, y: nn.Linear(3, 3),
    "an optimizer steps": lambda z, y: torch.optim.SGD([z], 0.1).step(),
    "ours": lambda z, y: cross_entropy(z * 2, y, alpha=0.5),
    "ours in float64": lambda z, y: cross_entropy(z.double(), y, alpha=0.5, label_smoothing=0.1),
    "our primitive": lambda z, y: log_softmax(z * 2, alpha=0.5),
    "our linear": lambda z, y: linear_cross_entropy(z * 2, torch.eye(5), y, alpha=0.5),
    "a nested block": lambda z, y: PowerGrad(0.5)(F.cross_entropy)(z * 2, y),
    "switched off": lambda z, y: PowerGrad(1.0)(F.cross_entropy)(z * 2, y),
    "switched off, another loss": lambda z, y: PowerGrad(1.0, strict=True)(F.mse_loss)(z, z),
}


@pytest.mark.parametrize("name", QUIET)
def test_stays_quiet(z, y, name):
    with PowerGrad(1.0 if "another" in name else 0.3, strict=True):
        QUIET[name](z, y)


def test_an_exception_is_not_replaced(z):
    with pytest.raises(ZeroDivisionError):
        PowerGrad(0.3, strict=True)(lambda: F.mse_loss(z, z.detach()) / (1 / 0))()


# Checkpoints and compiled code --------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputation_is_not_counted_and_does_not_warn(z, y, reentrant):
    def repeated(function: Callable[[Tensor], Tensor]) -> Tensor:
        loss = checkpoint(function, z, use_reentrant=reentrant)
        assert isinstance(loss, Tensor)
        return loss

    mode = PowerGrad(0.3, strict=True)
    repeated(mode(lambda z: F.cross_entropy(z * 2, y))).backward()
    assert mode.altered == {"cross_entropy": 1}  # for a block: test_every_form_of_checkpoint
    with pytest.warns(UserWarning, match=NOTHING), PowerGrad(0.3):
        hidden = repeated(lambda z: F.mse_loss(z * 2, z))
    hidden.backward()  # warnings are errors here


def test_a_block_around_compiled_code_is_strict_until_compiled_code_was_altered(z, y):
    """Compiled code does not report its calls."""
    torch.compiler.reset()
    other = torch.compile(lambda z: F.mse_loss(z * 2, z.detach()), backend="aot_eager")
    loss = torch.compile(lambda z: F.cross_entropy(z * 2, y), backend="aot_eager")
    with pytest.raises(RuntimeError, match=NOTHING), PowerGrad(0.3, strict=True):
        other(z).mul(2)
    with PowerGrad(0.3, strict=True) as mode:
        loss(z).mul(2)
    assert mode.altered == {}
    with PowerGrad(0.3, strict=True):  # from here on nothing is known
        other(z).mul(2)


def test_a_block_in_compiled_code_is_judged_when_it_is_traced(z, y):
    torch.compiler.reset()

    def plain(z: Tensor) -> Tensor:
        return F.mse_loss(z * 2, z.detach())

    def compiled(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return torch.compile(function, backend="eager", fullgraph=True)

    warned = compiled(PowerGrad(0.3)(plain))
    with pytest.warns(UserWarning, match=NOTHING):
        warned(z)
    warned(z)
    with pytest.raises(Exception, match="to alter a cross-entropy"):
        compiled(PowerGrad(0.3, strict=True)(plain))(z)
    compiled(PowerGrad(0.3, strict=True)(lambda z: F.cross_entropy(z * 2, y)))(z)
    compiled(PowerGrad(1.0)(plain))(z)
    with torch.no_grad():
        compiled(PowerGrad(0.3)(plain))(z)
