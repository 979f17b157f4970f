"""The way of a GPU through the whole library, on CPU tensors: `make test-triton`."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

if os.environ.get("POWERGRAD_TRITON") != "interpret":
    pytest.skip("left to make test-triton", allow_module_level=True)

from functorch.compile import make_boxed_func  # pyright: ignore[reportPrivateImportUsage]
from torch._dynamo.backends.common import aot_autograd

import powergrad
from powergrad import doctor
from powergrad.checks import Call
from powergrad.kernels import gpu
from powergrad.loss import way_of

pytestmark = pytest.mark.triton
CPU = torch.device("cpu")


def mean_of(losses: Tensor, z_losses: Tensor, call: dict[str, Any], x: Tensor, y: Tensor) -> Tensor:
    """The reduction, in ordinary operations."""
    tokens, reduction = call.get("token_weight"), call["reduction"]
    kept = torch.ones_like(losses, dtype=torch.bool) if y.is_floating_point() else y != -100
    mass = count = kept.sum()
    if "weight" in call and not y.is_floating_point():
        mass = call["weight"].double()[y.where(kept, 0)].mul(kept).sum()
    if reduction == "mean":
        losses, z_losses = losses / mass, z_losses / count
    total = torch.where(kept, losses + z_losses, 0)
    total = total if tokens is None else total * tokens.double()
    return total if reduction == "none" else total.sum()


def potential(x: Tensor, y: Tensor, alpha: Any, **call: Any) -> Tensor:
    """The plain loss of alpha z, over alpha, for logits x in float64."""
    z, cap = x * call.get("logit_scale", 1.0), call.get("softcap")
    z = z if cap is None else cap * torch.tanh(z / cap)
    a = torch.as_tensor(alpha).double()
    spread = a.reshape(a.shape + (1,) * (z.dim() - a.dim())) if a.dim() == 1 else a
    spread = a.unsqueeze(1) if a.dim() > 1 else spread
    weight = call.get("weight")
    losses = F.cross_entropy(
        spread * z,
        y.double() if y.is_floating_point() else y,
        None if weight is None else weight.double(),
        label_smoothing=call.get("label_smoothing", 0.0),
        reduction="none",
    )
    row = spread.reshape(spread.shape[:1] + spread.shape[2:]) if spread.dim() else spread
    z_losses = call.get("z_loss", 0.0) * (spread * z).logsumexp(1).square()
    return mean_of(losses / row, z_losses / row, call, x, y)


def draw(rng: random.Random) -> tuple[Tensor, Tensor, Any, dict[str, Any]]:
    gen = torch.Generator().manual_seed(rng.randrange(2**31))
    n, c, extra = rng.choice([1, 5]), rng.choice([3, 17, 40]), rng.choice([(), (), (2, 3)])
    x = torch.randn(n, c, *extra, generator=gen) * 3
    y = torch.randint(c, (n, *extra), generator=gen)
    if rng.random() < 0.25:
        y = torch.randn(n, c, *extra, generator=gen).softmax(1)
    elif n > 1:
        y[0] = -100
    per_row = torch.rand(n, *extra, generator=gen) + 0.05
    call: dict[str, Any] = {"reduction": rng.choice(["none", "mean", "sum"])}
    options = {
        "weight": torch.rand(c, generator=gen) + 0.1,
        "label_smoothing": 0.1,
        "softcap": 4.0,
        "logit_scale": 0.5,
        "z_loss": 1e-2,
        "token_weight": torch.rand(n, *extra, generator=gen),
    }
    call |= {name: value for name, value in options.items() if rng.random() < 0.4}
    return x, y, rng.choice([0.05, 0.3, 1.0, 1.5, torch.tensor(0.3), per_row, per_row[:n]]), call


@pytest.mark.parametrize("seed", range(60))
def test_every_option_against_autograd_of_the_potential(seed):
    x, y, alpha, call = draw(random.Random(seed))
    leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    loss = powergrad.cross_entropy(leaf, y, alpha=alpha, **call)
    value, phi = potential(exact, y, 1.0, **call), potential(exact, y, alpha, **call)
    torch.testing.assert_close(loss.detach().double(), value.detach(), rtol=3e-6, atol=1e-6)
    up = torch.rand_like(loss) + 0.5
    (grad,) = torch.autograd.grad(loss, leaf, up)
    (want,) = torch.autograd.grad(phi, exact, up.double())
    torch.testing.assert_close(grad.double(), want, rtol=1e-6, atol=2e-6 * float(want.abs().max()))


def example() -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(6, 9, generator=gen).mul_(3).requires_grad_()
    return x, torch.tensor([0, 8, 3, -100, 5, 3])


def oracle(x: Tensor, y: Tensor, alpha: float = 0.3) -> Tensor:
    exact = x.detach().double().requires_grad_()
    loss = F.cross_entropy(alpha * exact, y) / alpha
    return torch.autograd.grad(loss, exact)[0].float()


def test_one_node_each_and_no_value_is_read():
    x, y = example()
    powergrad.cross_entropy(x, y, alpha=0.3).backward()  # with the check before first use
    with torch.profiler.profile() as profile:
        loss = powergrad.cross_entropy(x, y, alpha=0.3)
        loss.backward()
    count = Counter(event.name for event in profile.events() or ())
    assert count["powergrad::row_losses"] == count["powergrad::row_gradients"] == 1
    assert count["aten::_local_scalar_dense"] == 0


@pytest.mark.parametrize("soft", [False, True])
def test_the_operators_pass_opcheck(soft):
    x, y = example()
    target = x.detach().softmax(1) if soft else y
    row = torch.rand(6)
    options = (0.3, -100, 0.1, 5.0, 2.0, 0.01)
    tensors = (torch.rand(9), row, row)
    arguments = (x, target, *tensors, torch.rand(1), *options, True)
    torch.library.opcheck(torch.ops.powergrad.row_losses.default, arguments)
    _, kept, _ = torch.ops.powergrad.row_losses(*arguments)
    arguments = (x.detach(), target, *tensors, kept, row, *options)
    torch.library.opcheck(torch.ops.powergrad.row_gradients.default, arguments)


def test_a_compiled_graph_has_one_node_each():
    x, y = example()
    nodes: list[Counter[str]] = []

    def record(graph: torch.fx.GraphModule, _: Any) -> Any:
        nodes.append(Counter(str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    compiled = torch.compile(
        lambda x: powergrad.cross_entropy(x, y, alpha=0.3),
        backend=aot_autograd(fw_compiler=record, bw_compiler=record),
        fullgraph=True,
    )
    (grad,) = torch.autograd.grad(compiled(x), x)
    torch.testing.assert_close(grad, oracle(x, y))
    forward, backward = nodes
    assert sum(n for name, n in forward.items() if "powergrad" in name) == 1
    assert forward["powergrad.row_losses.default"] == 1
    assert sum(n for name, n in backward.items() if "powergrad" in name) == 1
    assert backward["powergrad.row_gradients.default"] == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_with_every_kind_of_alpha(backend):
    x, y = example()
    criterion = powergrad.CrossEntropyLoss(alpha=0.3, label_smoothing=0.1)
    compiled = torch.compile(criterion, backend=backend)
    for alpha in (0.3, 0.7, torch.rand(6) + 0.1)[: 2 if backend == "inductor" else 3]:
        criterion.alpha = alpha
        (grad,) = torch.autograd.grad(compiled(x, y), x)
        (want,) = torch.autograd.grad(criterion(x, y), x)
        torch.testing.assert_close(grad, want)


def test_exported_programs_have_the_gradient():
    x, y = example()

    class Step(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return powergrad.cross_entropy(x, y, alpha=0.3)

    program = torch.export.export(Step(), (x,)).module()
    (grad,) = torch.autograd.grad(program(x), x)
    torch.testing.assert_close(grad, oracle(x, y))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed(use_reentrant):
    x, y = example()
    loss = checkpoint(
        lambda x: powergrad.cross_entropy(x, y, alpha=0.3), x, use_reentrant=use_reentrant
    )
    assert isinstance(loss, Tensor)
    loss.backward()
    torch.testing.assert_close(x.grad, oracle(x, y))


def test_a_second_backward_pass_and_second_derivatives():
    x, y = example()
    loss = powergrad.cross_entropy(x, y, alpha=0.3, z_loss=0.01, token_weight=torch.rand(6))
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    assert torch.autograd.grad(loss, x, retain_graph=True)[0].equal(first)
    direction = torch.randn(6, 9)
    loss = powergrad.cross_entropy(x, y, alpha=0.3, label_smoothing=0.1)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(grad, x, direction)
    exact = x.detach().double().requires_grad_()
    phi = F.cross_entropy(0.3 * exact, y, label_smoothing=0.1) / 0.3
    (grad,) = torch.autograd.grad(phi, exact, create_graph=True)
    (want,) = torch.autograd.grad(grad, exact, direction.double())
    torch.testing.assert_close(second.double(), want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_losses_have_their_dtype_and_one_rounding(dtype):
    x, y = example()
    x = x.detach().to(dtype).requires_grad_()
    gated: dict[str, Any] = {"gate": lambda rows: torch.ones_like(rows.loss)}
    for options in ({}, gated):
        loss = powergrad.cross_entropy(x, y, alpha=0.3, **options)
        assert loss.dtype == dtype
        (grad,) = torch.autograd.grad(loss * 1024, x)
        exact = x.detach().double().requires_grad_()
        (want,) = torch.autograd.grad(F.cross_entropy(0.3 * exact, y) / 0.3 * 1024, exact)
        torch.testing.assert_close(grad.double(), want, rtol=torch.finfo(dtype).eps / 1.9, atol=0)


def test_a_gated_loss_is_noticed():
    x, y = example()
    with powergrad.PowerGrad(0.3) as mode:
        powergrad.cross_entropy(x, y, alpha=0.3, gate=lambda rows: rows.p_target).backward()
    assert not mode.altered


def test_statistics_and_gates():
    x, y = example()
    gate = powergrad.cross_entropy(
        x, y, alpha=0.3, gate=lambda rows: rows.p_target, reduction="sum", return_stats=True
    )
    loss, rows = gate
    p = x.detach().double().softmax(1)
    kept = y != -100
    own = p.gather(1, y.clamp(min=0)[:, None])[:, 0] * kept
    torch.testing.assert_close(rows.p_target.double(), own, rtol=3e-6, atol=1e-7)
    entropy = torch.special.entr(p).sum(1) * kept
    torch.testing.assert_close(rows.entropy.double(), entropy, rtol=3e-6, atol=1e-6)
    assert rows.prediction[kept].equal(p.argmax(1)[kept])
    assert rows.correct.equal((p.argmax(1) == y) & kept)
    exact = x.detach().double().requires_grad_()
    losses = F.cross_entropy(0.3 * exact, y, reduction="none") / 0.3
    (want,) = torch.autograd.grad((losses * own).sum(), exact)
    (grad,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(grad.double(), want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("extra", [{}, {"z_loss": 0.01, "weight": torch.rand(21) + 0.5}])
def test_the_head_works_in_blocks_of_the_kernels(dtype, extra, monkeypatch):
    calls = []
    launch = gpu._launch
    monkeypatch.setattr(gpu, "_launch", lambda *a, **k: (calls.append(a[0]), launch(*a, **k)))
    gen = torch.Generator().manual_seed(0)
    h = torch.randn(10, 4, generator=gen).to(dtype).requires_grad_()
    w = torch.randn(21, 4, generator=gen).to(dtype).requires_grad_()
    y = torch.randint(21, (10,), generator=gen)
    y[3] = -100
    if "weight" in extra:
        extra = {**extra, "weight": extra["weight"].to(dtype)}
    loss = powergrad.linear_cross_entropy(h, w, y, alpha=0.3, chunk_rows=4, **extra)
    grads = torch.autograd.grad(loss, (h, w))
    assert calls.count("statistics") == calls.count("write") >= 3
    assert set(calls) == {"statistics", "write"}
    exact = [t.detach().double().requires_grad_() for t in (h, w)]
    call = {"reduction": "mean", **extra}
    phi = potential(F.linear(*exact), y, 0.3, **call)
    for grad, want in zip(grads, torch.autograd.grad(phi, exact), strict=True):
        scale = float(want.abs().max())
        bound = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(grad.double(), want, rtol=bound, atol=bound * scale)


# The check before first use -----------------------------------------------------------------------


@pytest.fixture
def unchecked(monkeypatch):
    monkeypatch.setattr(gpu, "CHECKED", {})
    monkeypatch.setattr(gpu, "BROKEN", {})


class Broken:
    """A kernel whose launch does something else."""

    def __init__(self, kernel: Any, change: Any) -> None:
        self.kernel, self.change = kernel, change

    def __getitem__(self, grid: Any) -> Any:
        return lambda **arguments: self.change(self.kernel[grid], arguments)


def fail(kernel: Any, arguments: dict[str, Any]) -> None:
    raise RuntimeError("PTX was not accepted")


def scale_gradient(kernel: Any, arguments: dict[str, Any]) -> None:
    kernel(**arguments)
    arguments["grad"].mul_(1.001)


def forget_a_row(kernel: Any, arguments: dict[str, Any]) -> None:
    kernel(**arguments)
    arguments["losses"][-1] = float("nan")


@pytest.mark.parametrize(
    ("kernel", "change", "message"),
    [
        ("statistics", fail, "PTX was not accepted"),
        ("write", fail, "PTX was not accepted"),
        ("statistics", forget_a_row, "The losses differ"),
        ("write", scale_gradient, "The gradients differ"),
    ],
)
def test_a_broken_kernel_is_switched_off_with_one_warning(
    kernel, change, message, monkeypatch, unchecked
):
    module = gpu.kernels()
    monkeypatch.setattr(module, kernel, Broken(getattr(module, kernel), change))
    x, y = example()
    with pytest.warns(RuntimeWarning) as warned:
        loss = powergrad.cross_entropy(x, y, alpha=0.3)
    torch.testing.assert_close(torch.autograd.grad(loss, x)[0], oracle(x, y))
    powergrad.cross_entropy(x, y, alpha=0.3, softcap=5.0)  # no further warning
    (text,) = [str(w.message) for w in warned]
    for part in (message, "POWERGRAD_TRITON=0", "torch 2", "triton 3", "float32", "cpu"):
        assert part in text
    assert way_of(x, Call(y, None, 0.3)) != "kernels"


def test_each_variant_is_checked_once(unchecked):
    x, y = example()
    for _ in range(2):
        powergrad.cross_entropy(x, y, alpha=0.3)
    assert list(gpu.CHECKED.values()) == [None]
    powergrad.cross_entropy(x, y, alpha=0.3, softcap=5.0)
    assert list(gpu.CHECKED.values()) == [None, None]


def test_the_doctor_reports_the_check(capsys, unchecked, monkeypatch):
    assert doctor.main() == 0
    assert "Triton kernels, checked" in capsys.readouterr().out
    monkeypatch.setattr(gpu, "CHECKED", {})
    module = gpu.kernels()
    monkeypatch.setattr(module, "write", Broken(module.write, scale_gradient))
    with pytest.warns(RuntimeWarning):
        assert doctor.main() == 1
    assert "The gradients differ" in capsys.readouterr().out


@pytest.mark.parametrize("setting", ["0", "1"])
def test_triton_is_not_imported_without_need(setting):
    code = (
        "import sys, torch, powergrad; x = torch.zeros(2, 3, requires_grad=True); "
        "powergrad.cross_entropy(x, torch.tensor([0, 1]), alpha=0.3).backward(); "
        "assert not {'triton', 'powergrad.kernels.triton'} & set(sys.modules)"
    )
    environment = {**os.environ, "POWERGRAD_TRITON": setting}
    environment.pop("TRITON_INTERPRET", None)
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=300)
