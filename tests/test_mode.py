"""`PowerGrad`: what it reaches, what it leaves alone, and that nothing is ever silently plain."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from powergrad import CrossEntropyLoss, PowerGrad, cross_entropy, log_softmax

Y = torch.tensor([0, 2, 4, 1])


class Wrapped(nn.Module):
    """A model that computes its own loss, and makes the criterion there, as many do."""

    def forward(self, z: Tensor) -> Tensor:
        return nn.CrossEntropyLoss()(z, Y.to(z.device))


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "F.cross_entropy": lambda z: F.cross_entropy(z, Y.to(z.device)),
    "nn.CrossEntropyLoss": lambda z: nn.CrossEntropyLoss()(z, Y.to(z.device)),
    "a model with its own loss": Wrapped(),
    "F.log_softmax": lambda z: F.nll_loss(F.log_softmax(z, dim=1), Y.to(z.device)),
    "F.log_softmax positional": lambda z: F.nll_loss(F.log_softmax(z, 1), Y.to(z.device)),
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


def expected(z: Tensor, alpha: float | Tensor) -> Tensor:
    return torch.autograd.grad(cross_entropy(z, Y.to(z.device), alpha=alpha), z)[0]


def close(loss: Tensor, z: Tensor, alpha: float | Tensor) -> bool:
    (actual,) = torch.autograd.grad(loss, z, retain_graph=True)
    return bool((actual - expected(z, alpha)).abs().max() <= 1e-14)


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


@pytest.mark.parametrize("name", CALLS)
def test_the_innermost_holds(z, name):
    call = CALLS[name]
    with PowerGrad(0.5):
        with PowerGrad(0.3):
            inner = call(z)
        outer = call(z)
        with PowerGrad(1.0):
            off = call(z)
        explicit = cross_entropy(z, Y.to(z.device), alpha=0.8)
        module = CrossEntropyLoss(1.0)(z, Y.to(z.device))
    assert close(inner, z, 0.3)
    assert close(outer, z, 0.5)
    assert close(off, z, 1.0)
    assert close(explicit, z, 0.8)
    assert close(module, z, 1.0)


@pytest.mark.parametrize("name", CALLS)
def test_under_compile(z, name):
    """Around a compiled function, within one, and as a decorator; then plain again."""
    call = CALLS[name]
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert close(compiled(z), z, 1.0)
    with PowerGrad(0.3):
        loss = compiled(z)
    assert close(loss, z, 0.3)
    assert close(compiled(z), z, 1.0)

    def within(z: Tensor) -> Tensor:
        with PowerGrad(0.3):
            return call(z)

    # AOTAutograd, which takes most of the time, sees the same operators as above.
    for function in (within, PowerGrad(0.3)(call)):
        assert close(torch.compile(function, fullgraph=True, backend="eager")(z), z, 0.3)


def test_every_option_passes_through(z):
    y, w = Y.to(z.device), torch.rand(5, dtype=z.dtype, device=z.device)
    options = {"weight": w, "ignore_index": 2, "reduction": "sum", "label_smoothing": 0.1}
    with PowerGrad(0.3):
        functional = F.cross_entropy(z, y, **options)  # pyright: ignore
        module = nn.CrossEntropyLoss(**options)(z, y)  # pyright: ignore
        positional = F.cross_entropy(z, y, w, None, 2, None, "sum", 0.1)
    (reference,) = torch.autograd.grad(cross_entropy(z, y, alpha=0.3, **options), z)  # pyright: ignore
    for loss in (functional, module, positional):
        assert torch.equal(torch.autograd.grad(loss, z)[0], reference)
    with PowerGrad(0.3), pytest.warns(UserWarning, match="size_average and reduce"):
        old = F.cross_entropy(z, y, size_average=False)
    (reference,) = torch.autograd.grad(cross_entropy(z, y, alpha=0.3, reduction="sum"), z)
    assert torch.equal(torch.autograd.grad(old, z)[0], reference)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="needs a newer torch")
def test_linear_cross_entropy_with_every_option(device):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, generator=g, dtype=torch.float64, device="cpu").to(device)
    weight = torch.randn(5, 2, 3, generator=g, dtype=torch.float64).to(device).requires_grad_()
    bias = torch.randn(5, 2, generator=g, dtype=torch.float64).to(device)
    y = torch.randint(0, 5, (4, 2), generator=g).to(device)
    options = {"linear_bias": bias, "label_smoothing": 0.1, "reduction": "sum", "ignore_index": 1}
    with PowerGrad(0.3):
        loss = F.linear_cross_entropy(x, weight, y, **options)  # pyright: ignore
    assert torch.allclose(loss, F.linear_cross_entropy(x, weight, y, **options))  # pyright: ignore
    logits = torch.einsum("ni,coi->nco", x, weight) + bias
    ours = cross_entropy(logits, y, alpha=0.3, label_smoothing=0.1, reduction="sum", ignore_index=1)
    actual, reference = (torch.autograd.grad(v, weight)[0] for v in (loss, ours))
    assert (actual - reference).abs().max() <= 1e-13
    with PowerGrad(0.3):
        single = F.linear_cross_entropy(x[0], weight[:, 0], y[0, 0])
    assert torch.allclose(single, F.cross_entropy(F.linear(x[0], weight[:, 0]), y[0, 0]))


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="needs a newer torch")
def test_linear_cross_entropy_in_blocks(device):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(300, 3, generator=g, dtype=torch.float64).to(device).requires_grad_()
    head = torch.randn(5, 3, generator=g, dtype=torch.float64).to(device)
    y = torch.randint(0, 5, (300,), generator=g).to(device)
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=64, chunking_method=None)
    with PowerGrad(0.3):
        loss = F.linear_cross_entropy(x, head, y, options=options)
    ours = cross_entropy(F.linear(x, head), y, alpha=0.3)
    actual, reference = (torch.autograd.grad(v, x)[0] for v in (loss, ours))
    assert torch.allclose(loss, ours)
    assert (actual - reference).abs().max() <= 1e-14


def test_an_implicit_dimension_warns_as_pytorch_does(z):
    with pytest.warns(UserWarning, match="Implicit dimension choice"), PowerGrad(0.3):
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


def test_what_the_documentation_says_is_not_altered(z):
    y = Y.to(z.device)
    with PowerGrad(0.3):
        by_softmax = F.nll_loss(torch.softmax(z, 1).log(), y)
        by_logsumexp = (z.logsumexp(1) - z.gather(1, y[:, None])[:, 0]).mean()
        by_operator = torch.ops.aten.cross_entropy_loss(z, y)
    for loss in (by_softmax, by_logsumexp, by_operator):
        assert close(loss, z, 1.0)


def test_kl_and_ctc_of_a_log_softmax(z):
    q = torch.softmax(torch.randn(4, 5, dtype=z.dtype), 1).to(z.device)
    with PowerGrad(0.3):
        kl = F.kl_div(F.log_softmax(z, 1), q, reduction="batchmean")
        ctc = F.ctc_loss(
            z[:, None].log_softmax(2), torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2])
        )
    ours = cross_entropy(z, q, alpha=0.3)
    actual, reference = (torch.autograd.grad(v, z)[0] for v in (kl, ours))
    assert (actual - reference).abs().max() <= 1e-14
    log_p = log_softmax(z[:, None], 2, alpha=0.3)
    same = F.ctc_loss(log_p, torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2]))
    assert torch.equal(torch.autograd.grad(ctc, z)[0], torch.autograd.grad(same, z)[0])


def test_with_one_alpha_an_example(z):
    alpha = torch.tensor([0.1, 0.4, 0.7, 1.0], device=z.device)
    with PowerGrad(alpha):
        assert close(F.cross_entropy(z, Y.to(z.device)), z, alpha)


def test_an_exception_leaves_nothing_behind(z):
    with pytest.raises(ZeroDivisionError), PowerGrad(0.3), PowerGrad(0.5):
        _ = 1 / 0
    assert _get_current_function_mode_stack() == []
    assert close(F.cross_entropy(z, Y.to(z.device)), z, 1.0)
    with PowerGrad(0.3), pytest.raises(ValueError, match="`target`"):
        F.cross_entropy(z, Y.to(z.device)[:2])


def test_one_instance_serves_again_and_nested(z):
    mode = PowerGrad(0.3)
    for _ in range(2):
        with mode, mode:
            loss = F.cross_entropy(z, Y.to(z.device))
        assert close(loss, z, 0.3)
    mode.alpha = 0.6
    with mode:
        loss = F.cross_entropy(z, Y.to(z.device))
    assert close(loss, z, 0.6)


def test_threads_do_not_see_each_other(z):
    losses = {}

    def work(name: str) -> None:
        losses[name] = F.cross_entropy(z, Y.to(z.device))

    with PowerGrad(0.3):
        thread = threading.Thread(target=work, args=("thread",))
        thread.start()
        thread.join()
    inside = threading.Thread(target=PowerGrad(0.3)(work), args=("inside",))
    inside.start()
    inside.join()
    assert close(losses["thread"], z, 1.0)  # as documented
    assert close(losses["inside"], z, 0.3)


def test_decorated_functions_keep_their_name_and_generators_are_refused():
    @PowerGrad(0.3)
    def step(z: Tensor) -> Tensor:
        """Doc."""
        return z

    assert step.__name__ == "step"
    assert step.__doc__ == "Doc."
    with pytest.raises(TypeError, match="generator or coroutine"):

        @PowerGrad(0.3)
        def batches():
            yield 1

    with pytest.raises(TypeError, match="generator or coroutine"):

        @PowerGrad(0.3)
        async def later():
            pass


@pytest.mark.parametrize(("alpha", "error"), [(1.5, ValueError), ("0.3", TypeError)])
def test_bad_alpha_is_named(alpha, error):
    with pytest.raises(error, match="`alpha`"):
        PowerGrad(alpha)


# Recomputation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["F.cross_entropy", "nn.CrossEntropyLoss", "F.log_softmax"])
def test_a_loss_inside_a_checkpoint_is_right_or_raises(z, reentrant, name):
    call = CALLS[name]

    def loss(x: Tensor) -> Tensor:
        return call(x * 1)

    with PowerGrad(0.3), pytest.raises(RuntimeError, match="called outside checkpoints"):
        checkpoint(loss, z, use_reentrant=reentrant)
    # The remedies that the message names.
    for remedy in (
        lambda: checkpoint(PowerGrad(0.3)(loss), z, use_reentrant=reentrant),
        lambda: checkpoint(
            lambda x: cross_entropy(x * 1, Y.to(z.device), alpha=0.3), z, use_reentrant=reentrant
        ),
    ):
        for outer in (None, 0.5):
            z.grad = None
            if outer is None:
                value = remedy()
            else:
                with PowerGrad(outer):
                    value = remedy()
            assert isinstance(value, Tensor)
            value.backward()
            assert z.grad is not None
            assert (z.grad - expected(z, 0.3)).abs().max() <= 1e-14


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_before_the_loss_is_fine(z, reentrant):
    with PowerGrad(0.3):
        hidden = checkpoint(torch.sin, z, use_reentrant=reentrant)
        assert isinstance(hidden, Tensor)
        loss = F.cross_entropy(hidden, Y.to(z.device))
    loss.backward()
    (reference,) = torch.autograd.grad(cross_entropy(z.sin(), Y.to(z.device), alpha=0.3), z)
    assert z.grad is not None
    assert (z.grad - reference).abs().max() <= 1e-15


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_evaluation_inside_a_checkpoint_does_not_raise(z, reentrant):
    call = CALLS["F.cross_entropy"]
    with torch.no_grad(), PowerGrad(0.3):
        value = checkpoint(call, z.detach(), use_reentrant=reentrant)
    assert isinstance(value, Tensor)
    assert torch.equal(value, call(z.detach()))


def test_a_loss_inside_another_custom_function_raises(z):
    class Mine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z):
            return F.cross_entropy(z, Y.to(z.device))

        @staticmethod
        def backward(ctx, grad):  # pyright: ignore
            return None

    with PowerGrad(0.3), pytest.raises(RuntimeError, match="custom autograd functions"):
        Mine.apply(z)
    with PowerGrad(0.3):  # nothing to alter
        assert Mine.apply(z.detach()) == F.cross_entropy(z.detach(), Y.to(z.device))
    assert Mine.apply(z) == F.cross_entropy(z, Y.to(z.device))


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


def test_a_compiled_criterion_takes_names():
    """Also outside of PowerGrad, after it was entered once."""

    def function(z: Tensor) -> Tensor:
        return nn.CrossEntropyLoss(label_smoothing=0.1)(input=z, target=Y)

    z = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    torch.compile(lambda z: z + 1, backend="eager")(z)  # loads TorchDynamo
    with PowerGrad(0.3):
        pass
    torch.testing.assert_close(torch.compile(function, backend="eager")(z), function(z))
