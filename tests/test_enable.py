"""`enable`: the losses of the whole process, until `disable`."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.fx import symbolic_trace

import powergrad
from powergrad import PowerGrad, cross_entropy

Y = torch.tensor([0, 2, 4, 1])
ORIGINALS = [F.cross_entropy, F.log_softmax, torch.log_softmax, Tensor.log_softmax]


@pytest.fixture
def z() -> Tensor:
    g = torch.Generator().manual_seed(0)
    return (3 * torch.randn(4, 5, generator=g, dtype=torch.float64)).requires_grad_()


@pytest.fixture(autouse=True)
def disabled_afterwards() -> Iterator[None]:
    yield
    powergrad.disable()
    assert [F.cross_entropy, F.log_softmax, torch.log_softmax, Tensor.log_softmax] == ORIGINALS


def loss(z: Tensor) -> Tensor:
    return F.cross_entropy(z, Y)


def criterion(z: Tensor) -> Tensor:
    return nn.CrossEntropyLoss()(z, Y)


def alpha_of(loss: Tensor, z: Tensor) -> float:
    """The alpha whose gradient `loss` has."""
    (actual,) = torch.autograd.grad(loss, z)
    for alpha in (0.3, 0.5, 1.0):
        (expected,) = torch.autograd.grad(cross_entropy(z, Y, alpha=alpha), z)
        if torch.allclose(actual, expected, rtol=1e-12, atol=1e-13):
            return alpha
    return -1.0


def test_counts_by_kind_and_changes_alpha(z):
    enabled = powergrad.enable(0.3)
    assert alpha_of(loss(z), z) == 0.3
    torch.no_grad()(loss)(z)
    assert powergrad.enable(0.5) is enabled
    assert alpha_of(F.nll_loss(z.log_softmax(1), Y), z) == 0.5
    assert enabled.altered == {"cross_entropy": 1, "log_softmax": 1}
    powergrad.enable(0.5, log_softmax=False)
    assert alpha_of(F.nll_loss(F.log_softmax(z, 1), Y), z) == 1.0
    powergrad.disable()
    powergrad.disable()
    assert alpha_of(loss(z), z) == 1.0
    assert powergrad.enable(0.3) is not enabled


@pytest.mark.parametrize(("alpha", "error"), [(-1, ValueError), (torch.tensor(0.3), TypeError)])
def test_checks_alpha(alpha, error):
    with pytest.raises(error, match="`alpha`"):
        powergrad.enable(alpha)


def test_names_that_others_hold_are_altered_until_the_end(z, monkeypatch):
    module: Any = ModuleType("someones")
    exec("from torch.nn.functional import cross_entropy", module.__dict__)
    monkeypatch.setitem(sys.modules, "someones", module)
    model = SimpleNamespace(loss=F.cross_entropy, losses={"ce": F.cross_entropy})
    powergrad.enable(0.3)
    holders: list[Callable[[], Any]] = [
        lambda: module.cross_entropy,
        lambda: model.loss,
        lambda: model.losses["ce"],
    ]
    assert [alpha_of(holder()(z, Y), z) for holder in holders] == [0.3] * 3
    taken = F.cross_entropy
    powergrad.disable()
    assert all(holder() is F.cross_entropy for holder in holders)
    assert alpha_of(taken(z, Y), z) == 1.0


def test_a_name_that_something_else_replaces_is_reported_and_left(z, monkeypatch):
    enabled = powergrad.enable(0.3)
    assert enabled.replaced == []
    with monkeypatch.context() as patch:
        patch.setattr(F, "cross_entropy", lambda z, y: z.sum())
        assert enabled.replaced == ["F.cross_entropy"]
        powergrad.disable()
        assert F.cross_entropy(z, Y) == z.sum()
    F.cross_entropy = ORIGINALS[0]  # the patch has restored ours


def test_the_innermost_powergrad_applies(z):
    powergrad.enable(0.3)
    with PowerGrad(0.5, strict=True):
        inner = loss(z)
    with PowerGrad(1.0):
        off = loss(z)
    with PowerGrad(0.5, log_softmax=False):
        left_alone = F.nll_loss(F.log_softmax(z, 1), Y)
        loss(z)
    assert [alpha_of(x, z) for x in (inner, off, left_alone, loss(z))] == [0.5, 1.0, 1.0, 0.3]


def test_other_threads_are_altered_also_while_another_compiles(z):
    """`powergrad run` once stopped altering when a thread called a compiled function."""
    powergrad.enable(0.3)
    losses: list[Tensor] = []

    def work() -> None:
        torch.compile(lambda z: z.sin(), backend="eager")(z)
        losses.append(loss(z))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [alpha_of(x, z) for x in (*losses, loss(z))] == [0.3, 0.3]


@pytest.mark.parametrize("function", [loss, criterion], ids=["function", "module made inside"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_is_never_stale(z, function, backend):
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    assert alpha_of(compiled(z), z) == 1.0
    enabled = powergrad.enable(0.3)
    assert alpha_of(compiled(z), z) == 0.3
    powergrad.enable(0.5)
    assert alpha_of(compiled(z), z) == 0.5
    assert sum((enabled.compiled or enabled.altered).values()) >= 2
    powergrad.disable()
    assert alpha_of(compiled(z), z) == 1.0


def test_one_compilation_per_alpha(z):
    counter = CompileCounter()
    powergrad.enable(0.3)
    compiled = torch.compile(loss, backend=counter, fullgraph=True)
    for _ in range(3):
        compiled(z)
    assert counter.frame_count == 1


PROGRAM = """
import sys, torch
from torch import nn
import powergrad
if sys.argv[1] != "1.0":
    powergrad.enable(float(sys.argv[1]))
z = torch.arange(20.0).reshape(4, 5).sin().requires_grad_()
y = torch.arange(4)
torch.compile(lambda z, y: nn.CrossEntropyLoss()(z, y))(z, y).backward()
powergrad.disable()
loss = powergrad.cross_entropy(z, y, alpha=float(sys.argv[1]))
torch.testing.assert_close(z.grad, torch.autograd.grad(loss, z)[0])
"""


@pytest.mark.matrix
def test_compiled_code_on_disk_is_not_mixed_up(tmp_path, monkeypatch):
    """PyTorch's cache knows a function of a graph by its name."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for alpha in ("1.0", "0.3", "1.0"):
        subprocess.run([sys.executable, "-c", PROGRAM, alpha], check=True)


@pytest.mark.parametrize("function", [loss, criterion], ids=["function", "module made inside"])
def test_a_powergrad_around_compiled_code_raises(z, function):
    torch.compiler.reset()
    compiled = torch.compile(function, backend="aot_eager")
    assert alpha_of(compiled(z), z) == 1.0
    if torch.__version__ >= "2.13" or function is loss:
        with PowerGrad(0.3), pytest.raises(Exception, match=r"powergrad\.enable"):
            compiled(z)
    else:  # earlier versions leave the compiled code for a call of such a module
        with PowerGrad(0.3):
            value = compiled(z)
        assert alpha_of(value, z) == 0.3
    assert alpha_of(compiled(z), z) == 1.0
    within = torch.compile(PowerGrad(0.3)(function), backend="aot_eager")
    with pytest.raises(Exception, match=r"powergrad\.enable"):
        within(z)


def test_compiled_code_without_a_loss_works_within_a_powergrad(z):
    torch.compiler.reset()
    model = torch.compile(lambda z: z * 1, backend="aot_eager", fullgraph=True)
    with PowerGrad(0.3, strict=True):
        value = loss(model(z))
    assert alpha_of(value, z) == 0.3


class Model(nn.Module):
    def forward(self, z, y):
        return (
            F.cross_entropy(z, y) + 0 * torch.log_softmax(z, 1).sum() + 0 * z.log_softmax(1).sum()
        )


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("model", [Model(), nn.CrossEntropyLoss(), F.cross_entropy])
def test_scripted_code_works_and_is_reported(z, model):
    enabled = powergrad.enable(0.3)
    assert enabled.scripted == {}
    if model is ORIGINALS[0]:
        model = F.cross_entropy
    value = torch.jit.script(model)(z, Y)
    assert alpha_of(value, z) == 1.0
    # PyTorch compiles a module's code once per process.
    assert enabled.scripted or isinstance(model, nn.CrossEntropyLoss)


@pytest.mark.parametrize("enabled", [True, False])
def test_fx_records_the_loss_by_name(z, enabled):
    if enabled:
        powergrad.enable(0.3)
    graph = symbolic_trace(lambda z: F.cross_entropy(z, Y))
    assert "torch.nn.functional.cross_entropy" in graph.code
    assert F.cross_entropy in [node.target for node in graph.graph.nodes]
    assert alpha_of(graph(z), z) == (0.3 if enabled else 1.0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_traces_and_exports_to_onnx(z):
    powergrad.enable(0.3)
    traced: Any = torch.jit.trace(loss, z, check_trace=False)
    assert alpha_of(traced(z), z) == 0.3
    pytest.importorskip("onnx")
    file = io.BytesIO()
    torch.onnx.export(nn.LogSoftmax(1), (z.detach().float(),), file, dynamo=False)  # pyright: ignore
    assert b"LogSoftmax" in file.getvalue()


def test_functions_are_pickled_by_name():
    powergrad.enable(0.3)
    assert pickle.loads(pickle.dumps(F.cross_entropy)) is F.cross_entropy


def test_modes_and_devices_see_the_function(z):
    powergrad.enable(0.3)
    with torch.device("cpu"):
        assert alpha_of(loss(z), z) == 0.3
    seen = []

    class Recorder(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Recorder():
        assert alpha_of(loss(z), z) == 0.3
    assert F.cross_entropy in seen
