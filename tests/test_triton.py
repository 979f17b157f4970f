"""The Triton kernels under Triton's interpreter, through the public functions: `make test-triton`.

The table of test_gradients.py goes this way, too, and so do test_loss.py and test_linear.py.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import ast
import csv
import math
import os
import random
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from cases import OPTIONS, Case, Form, build, check_gradient, size_of_terms
from references import by_position, gradient_of_potential, mapped, plain_loss
from torch import Tensor
from torch.utils.checkpoint import checkpoint

if os.environ.get("POWERGRAD_TRITON") != "interpret":
    pytest.skip("left to make test-triton", allow_module_level=True)

import interpreter
from functorch.compile import make_boxed_func  # pyright: ignore[reportPrivateImportUsage]
from torch._dynamo.backends.common import aot_autograd
from triton.compiler.errors import CompilationError

import powergrad
from powergrad import doctor
from powergrad import loss as loss_module
from powergrad.checks import Call
from powergrad.kernels import gpu

pytestmark = pytest.mark.triton

ROOT, INF = Path(__file__).parents[1], math.inf
CASES, PARTS = 500, 20
ALPHAS = [0.0, 1e-3, 0.05, 0.25, 0.3, 0.5, 1.0, 1.5]
# Half an ulp, and half of the smallest number.
ROUNDING = {
    torch.bfloat16: (2.0**-8, 2.0**-134),
    torch.float16: (2.0**-11, 2.0**-25),
    torch.float32: (0.0, 2.0**-126),
}


def cross_entropy(z: Tensor, case: Case, **options: Any) -> Any:
    options = {**case.options, **case.extra, **options}
    return powergrad.cross_entropy(z, case.target, alpha=case.alpha, **options)


def gradient(case: Case, function: Any = cross_entropy) -> Tensor:
    z = case.logits.detach().requires_grad_()
    return torch.autograd.grad(function(z, case), z, case.upstream)[0]


def run(case: Case, stats: bool = False) -> tuple[Tensor, Any, Tensor, Counter[str]]:
    """Loss, statistics, gradient, and the bytes that were moved; every address is checked.

    The loss is in float32, before it is rounded to the dtype of the logits.
    """
    z, found = case.logits.detach().requires_grad_(), None
    exact = patch.object(loss_module, "in_dtype", lambda loss, *_: loss)
    unchecked = patch.object(gpu, "_problem", lambda *_: None)  # it would take half of the time
    with exact, unchecked, interpreter.watched() as moved:
        loss = cross_entropy(z, case, return_stats=stats)
        if stats:
            loss, found = loss
        (grad,) = torch.autograd.grad(loss, z, case.upstream.to(loss.dtype))
    assert moved or not z.numel()
    return loss.detach(), found, grad, moved


def check(case: Case, rough: bool = False, stats: bool = False) -> None:
    """Compare with float64: gradients by the largest term of their row, since terms may cancel.

    With `rough` exponentials, what is below 2^-126 is 0.
    """
    bound, flushed = (3e-6, 2.0**-124) if rough else (1e-6, 0.0)
    loss, found, grad, _ = run(case, stats)
    logits, options, extra = case.logits, case.options, case.extra
    z = mapped(logits, extra)
    reach = z.where(z.isfinite(), 0).abs().amax(1, keepdim=True)
    rounded = bool(extra.keys() & {"softcap", "logit_scale"})  # z is rounded to float32
    arguments = (case.target, case.alpha, case.upstream)
    want = gradient_of_potential(logits, *arguments, extra=extra, **options)
    size = terms = size_of_terms(case)
    if not (case.target.is_floating_point() or options["label_smoothing"] or extra.get("z_loss")):
        unmapped = {k: v for k, v in extra.items() if k == "token_weight"}
        largest = gradient_of_potential(z, *arguments, extra=unmapped, **options).abs()
        largest = largest.amax(1, keepdim=True) * extra.get("logit_scale", 1.0)
        size = torch.where(largest < 1e-6 * size, 10 * largest, size)  # nothing cancels
    half_ulp, tiny = ROUNDING[logits.dtype]
    allowed = size * (bound + rounded * by_position(case.alpha, z) * reach * 2.0**-23)
    allowed = allowed + want.abs() * half_ulp + tiny + flushed * terms
    error = (grad.double() - want).abs()
    # float16 overflows, as in PyTorch.
    error = error.masked_fill(want.abs() > torch.finfo(logits.dtype).max, 0)
    assert grad.dtype == logits.dtype
    assert (error <= allowed).all(), (case, float((error / allowed).max()))

    off = rounded * 2.0**-22 * logits.double().where(logits.isfinite(), 0).abs().amax(1)
    off = off * extra.get("logit_scale", 1.0)
    lse = z.logsumexp(1)
    if found is not None:
        soft, counted = case.target.is_floating_point(), found.counted
        label = None if soft else case.target.where(counted, 0).unsqueeze(1)
        p = z.softmax(1)
        p_target = (p * case.target).sum(1) if label is None else p.gather(1, label).squeeze(1)
        no_weights = {k: v for k, v in options.items() if k == "ignore_index"}
        losses = plain_loss(z, case.target, reduction="none", **no_weights)
        expected = {"lse": lse, "p_target": p_target, "entropy": torch.special.entr(p).sum(1)}
        for name, values in {**expected, "loss": losses}.items():
            got, values = getattr(found, name).double(), values * counted
            close = (got - values).abs() - off <= (3 * bound * values.abs()).clamp(min=3 * bound)
            assert (close | (got == values)).all(), (name, case)
        likely = case.target.argmax(1) if soft else case.target
        assert found.correct.equal((found.prediction == likely) & counted)
        best = z.gather(1, found.prediction.unsqueeze(1)).squeeze(1)
        assert (best >= z.amax(1) - off)[counted].all()
    value = plain_loss(z, case.target, extra=extra, **options)
    off = off * (1 + 2 * extra.get("z_loss", 0.0) * lse.abs())
    off = off * extra.get("token_weight", torch.ones(1)).double()
    if options["reduction"] != "mean" and options["weight"] is not None:
        off = off * options["weight"].double().max().clamp(min=1)
    if options["reduction"] != "none":
        off = off.sum() if options["reduction"] == "sum" else off.max()
    close = (loss - value).abs() - off <= (3 * bound * value.abs()).clamp(min=bound)
    assert (close | (loss == value) | (loss.isnan() & value.isnan())).all(), (case, loss, value)


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same numbers, with other strides."""
    if layout == "transposed":
        return tensor.t().contiguous().t()
    n, c = tensor.shape
    step = {"contiguous": 0, "padded": 1, "every second": 2}[layout]
    if not step:
        return tensor
    wide = torch.full((n, step * c + 3), math.nan, dtype=tensor.dtype)
    wide[:, : step * c : step] = tensor
    return wide[:, : step * c : step]


def random_case(rng: random.Random) -> Case:
    while True:
        soft = rng.random() < 0.25
        form = Form(
            shape=(
                rng.choice([1, 2, 3, 5, 16, 17, 33]),
                rng.choice([1, 2, 3, 7, 10, 16, 17, 100, 257, 1000, 1025, 4097, 5000]),
            ),
            dtype=rng.choice(gpu.DTYPES),
            target="probabilities" if soft else "labels",
            alpha=rng.choice(ALPHAS),
            alphas=rng.choice(["number", "0-d", "example"]),
            weight=rng.choice(["", "", "random", "some zero"]),
            ignore_index=None if soft else rng.choice([-100, -100, 0]),
            ignored=0.2,
            reduction=rng.choice(["none", "mean", "sum"]),
            label_smoothing=rng.choice([0.0, 0.0, 0.1, 1.0]),
            masked=rng.random() < 0.3,
            spread=rng.choice([0.0, 1.0, 5.0, 30.0]),
            offset=rng.choice([0.0, 0.0, 100.0, -100.0, -1e4]),
            softcap=rng.choice([None, None, 30.0, 5.0]),
            logit_scale=rng.choice([1.0, 1.0, 0.125, 3.0]),
            z_loss=rng.choice([0.0, 0.0, 1e-4, 1e-2]),
            tokens=rng.random() < 0.3,
            seed=rng.randrange(2**31),
        )
        if (form.alphas, form.alpha) == ("number", 1.0) and not form.extended:
            continue  # PyTorch's own function is called
        mean_of_0 = (form.reduction, form.weight) == ("mean", "some zero")
        overflows = form.dtype == torch.float16 and form.offset == -1e4
        if form.possible and not mean_of_0 and not overflows:
            break
    case = build(form)
    if not soft and rng.random() < 0.4:  # the label is the likeliest class
        ignored = case.target == form.ignore_index
        case.target = case.target.where(ignored, case.logits.float().argmax(1))
    elif soft and rng.random() < 0.5:
        case.target = laid_out(case.target.float(), rng.choice(["padded", "transposed"]))
    layouts = ["contiguous", "contiguous", "padded", "every second", "transposed"]
    case.logits = laid_out(case.logits, rng.choice(layouts))
    return case


@pytest.fixture
def unchecked(monkeypatch):
    monkeypatch.setattr(gpu, "CHECKED", {})
    monkeypatch.setattr(gpu, "BROKEN", {})


# Random cases -------------------------------------------------------------------------------------


def check_in_place(case: Case) -> None:
    """The same gradient, to the bit, is written over the logits, as in a head."""
    rows = {"upstream": torch.ones(len(case.logits))}
    case = replace(case, options={**case.options, "reduction": "none"}, **rows)
    z = case.logits.clone(memory_format=torch.contiguous_format)
    call = Call(case.target, alpha=case.alpha, **case.options, **case.extra)
    with interpreter.watched():
        assert gpu.cross_entropy(z, call, z) is not None
    assert torch.equal(z, run(case)[2])


@pytest.mark.parametrize("rough", [False, True])
@pytest.mark.parametrize("part", range(PARTS))
def test_random_cases(part, rough, monkeypatch):
    rng, tile = random.Random(100 * rough + part), gpu.tile
    with interpreter.rough_exponentials(part) if rough else nullcontext():
        for number in range(CASES // PARTS):
            case, lanes = random_case(rng), 32 if number % 2 else 64  # NVIDIA's or AMD's tile
            monkeypatch.setattr(gpu, "tile", lambda c, i, v, _, lanes=lanes: tile(c, i, v, lanes))
            check(case, rough, stats=rng.random() < 0.4)
            if not rough and number % 5 == 0:
                check_in_place(case)


# Sizes, layouts and values at the edges -----------------------------------------------------------


def drawn(n: int, c: int, dtype: torch.dtype = torch.float32, soft: bool = False) -> Case:
    target = "probabilities" if soft else "labels"
    return build(Form(shape=(n, c), dtype=dtype, target=target, reduction="none"))


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("classes", [1, 2, 15, 16, 17, 2047, 2048, 4097, 16385, 50257, 130000])
def test_any_number_of_classes(classes, soft):
    for n, dtype in ((1, torch.float32), (3, torch.bfloat16)):
        check(drawn(n, classes, dtype, soft), stats=True)


def test_rows_and_classes_that_are_far_apart():
    """More than 2^31 elements; only the pages that are used take memory."""
    far = 2**31 + 24
    memory = torch.empty(far + 3000, dtype=torch.bfloat16)
    for shape, stride in (((2, 1000), (far, 1)), ((1000, 2), (1, far))):
        case = drawn(*shape, torch.bfloat16)
        case.logits = memory.as_strided(shape, stride).copy_(case.logits)
        check(case)
    case = drawn(2, 1000, torch.bfloat16)
    case.upstream = torch.ones(2)
    want, x = run(case)[2], memory.as_strided((2, 1000), (far, 1)).copy_(case.logits)
    call = Call(case.target, alpha=case.alpha, **case.options)
    with interpreter.watched():  # the gradient is written over logits that are far apart
        assert gpu.cross_entropy(x, call, x) is not None
    assert torch.equal(x, want)


def given(x: Tensor, y: Tensor, alpha: float = 0.3, **options: Any) -> Case:
    """Losses without reduction, also at alpha 1."""
    options = {"reduction": "none", "weight": None, "label_smoothing": 0.0, **options}
    return Case(x, y, torch.tensor(alpha).double(), options, torch.ones(len(x)))


@pytest.mark.parametrize("alpha", [0.0, 1e-3, 0.3, 1.0])
@pytest.mark.parametrize("dtype", gpu.DTYPES)
def test_extreme_logits(dtype, alpha):
    largest = torch.finfo(dtype).max
    size = min(largest, 1e38)
    rows = [
        [size, -size, 0.0],
        [-size, -size, -size],
        [size, size, -size],
        [0.0, 2.0**-24, -(2.0**-24)],
        [88.0, -104.0, 0.0],
        [0.0, 200.0, -INF],
        [1e4, 1e4 + 8, 1e4 - 16],
    ]
    for label in range(3):
        x = torch.tensor(rows).to(dtype)
        x = x.where(torch.arange(3) != label, x.clamp(min=-size))
        check(given(x, torch.full((len(rows),), label), alpha), stats=True)
    # z - m overflows; the gradients are still right.
    case = given(torch.tensor([[largest, -largest, 1.0]]).to(dtype), torch.tensor([0]), alpha)
    want = gradient_of_potential(case.logits, case.target, alpha, case.upstream, **case.options)
    torch.testing.assert_close(gradient(case).double(), want, rtol=2**-7, atol=1e-7)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["labels", "probabilities"])
@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_nan_and_infinities_as_in_pytorch(alpha, kind, smoothing):
    case = drawn(7, 5, soft=kind == "probabilities")
    case = given(case.logits, case.target, alpha, label_smoothing=smoothing)
    x = case.logits
    x[0, 1] = math.nan
    x[1, 1] = INF
    x[2] = -INF
    x[3, 2] = x[4, 0] = -INF
    x[5, 2] = math.nan
    if kind == "labels":
        case.target.fill_(2)

    def scaled(z: Tensor, case: Case) -> Tensor:
        return F.cross_entropy(alpha * z, case.target, **case.options) / alpha

    losses, _, grads, _ = run(case)
    torch.testing.assert_close(
        losses, F.cross_entropy(x, case.target, **case.options), equal_nan=True
    )
    torch.testing.assert_close(grads, gradient(case, scaled), equal_nan=True)


def test_a_label_that_is_no_class_is_nan():
    case = given(drawn(4, 9).logits, torch.tensor([3, 9, -1, -100]))
    losses, _, grads, _ = run(case)
    assert losses.isnan().tolist() == [False, True, True, False]
    assert grads.isnan().all(1).tolist() == [False, True, True, False]
    assert not grads[3].any()


# Bytes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", gpu.DTYPES)
@pytest.mark.parametrize(("soft", "passes"), [(False, 3), (True, 5)])
def test_bytes_moved(dtype, soft, passes):
    case = drawn(32, 5000, dtype, soft)
    bytes_moved = run(case)[3]
    moved = sum(bytes_moved.values()) / (case.logits.numel() * case.logits.element_size())
    assert passes <= moved <= passes + 0.02
    kind, target = str(dtype)[6:], "probabilities" if soft else "labels"
    with (ROOT / "results" / "gpu_bytes.csv").open() as file:
        (row,) = [row for row in csv.DictReader(file) if [*row.values()][:2] == [kind, target]]
    assert (int(row["loaded"]), int(row["stored"])) == (bytes_moved["load"], bytes_moved["store"])
    assert row["passes"] == f"{moved:.4f}"
    of_pytorch = int(row["pytorch_passes"])
    assert row["expected_ratio"] == f"{moved / of_pytorch:.3f}"
    cells = (f"{target}, {'16 bits' if dtype.itemsize == 2 else kind}", f"{moved:.3f}", of_pytorch)
    line = " | ".join(map(str, (*cells, row["expected_ratio"])))
    assert f"| {line} |" in (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")


def test_ignored_rows_are_not_read():
    case = drawn(32, 5000)
    case.target[::2] = -100
    assert sum(run(case)[3].values()) / (case.logits.numel() * 4) <= 2.02


# In graphs ----------------------------------------------------------------------------------------


def example(**changes: Any) -> Case:
    return build(Form(shape=(6, 9), ignore_index=-100, **changes))


@pytest.mark.parametrize("name", ["ignored", "all of it", "probabilities, weights, sum"])
def test_one_node_each_and_no_value_is_read(name):
    case = build(OPTIONS[name])
    gradient(case)  # with the check before first use
    with torch.profiler.profile() as profile:
        gradient(case)
    count = Counter(event.name for event in profile.events() or ())
    assert count["powergrad::row_losses"] == count["powergrad::row_gradients"] == 1
    assert count["aten::_local_scalar_dense"] == 0


@pytest.mark.parametrize("soft", [False, True])
def test_the_operators_pass_opcheck(soft):
    case, row, kept = example(), torch.rand(6), torch.rand(3, 6)
    x, y = case.logits, case.logits.softmax(1) if soft else case.target
    options = (0.3, -100, 0.1, 5.0, 2.0, 0.01)
    tensors = (y, torch.rand(9), row, row)
    operators = torch.ops.powergrad
    given = (x.detach().requires_grad_(), *tensors, torch.rand(1), *options, True)
    torch.library.opcheck(operators.row_losses.default, given)
    torch.library.opcheck(operators.row_gradients.default, (x, *tensors, kept, row, *options))


def test_a_compiled_graph_has_one_node_each(unchecked):
    case, nodes = example(), []

    def record(graph: torch.fx.GraphModule, _: Any) -> Any:
        names = (str(node.target) for node in graph.graph.nodes)
        nodes.append([name for name in names if "powergrad" in name])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=record, bw_compiler=record)
    compiled = torch.compile(lambda z: cross_entropy(z, case), backend=backend, fullgraph=True)
    check_gradient(case, gradient(case, lambda z, case: compiled(z)))
    assert nodes == [["powergrad.row_losses.default"], ["powergrad.row_gradients.default"]]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_with_every_kind_of_alpha(backend):
    case = example(label_smoothing=0.1)
    criterion = powergrad.CrossEntropyLoss(alpha=0.3, label_smoothing=0.1)
    compiled = torch.compile(criterion, backend=backend)
    for alpha in (0.3, 0.7, torch.rand(6) + 0.1)[: 2 if backend == "inductor" else 3]:
        criterion.alpha = case.alpha = alpha
        check_gradient(case, gradient(case, lambda z, case: compiled(z, case.target)))


@pytest.mark.parametrize("how", ["exported", "checkpointed", "checkpointed, reentrant"])
def test_recorded_programs_have_the_gradient(how, unchecked):
    """Also if they are the first that use the kernels."""
    case = example()

    class Step(torch.nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            return cross_entropy(z, case)

    def step(z: Tensor) -> Any:
        if how == "exported":
            return torch.export.export(Step(), (z,)).module()(z)
        return checkpoint(Step(), z, use_reentrant="reentrant" in how)

    z = case.logits.requires_grad_()
    step(z).backward(case.upstream)
    assert z.grad is not None
    check_gradient(case, z.grad)


@pytest.mark.parametrize("name", ["all of it", "probabilities, weights, sum", "smoothing"])
def test_a_second_backward_pass_and_second_derivatives(name):
    """Float64 takes no kernel; test_gradients.py has its derivatives."""
    second = {}
    for dtype in (torch.float32, torch.float64):
        case = build(replace(OPTIONS[name], dtype=dtype))
        z = case.logits.requires_grad_()
        loss, incoming = cross_entropy(z, case), case.upstream
        first = torch.autograd.grad(loss, z, incoming, retain_graph=True)[0]
        assert torch.autograd.grad(loss, z, incoming, retain_graph=True)[0].equal(first)
        (grad,) = torch.autograd.grad(loss, z, incoming, create_graph=True)
        direction = torch.randn(z.shape, generator=torch.Generator().manual_seed(0))
        (second[dtype],) = torch.autograd.grad(grad, z, direction.to(dtype))
    actual, want = second[torch.float32].double(), second[torch.float64]
    torch.testing.assert_close(actual, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"gate": lambda rows: torch.ones_like(rows.loss)}])
def test_16_bit_losses_have_their_dtype_and_one_rounding(dtype, options):
    case = example(dtype=dtype)
    case.upstream = torch.tensor(1024.0, dtype=dtype)
    z = case.logits.requires_grad_()
    loss = cross_entropy(z, case, **options)
    assert loss.dtype == dtype
    (grad,) = torch.autograd.grad(loss, z, case.upstream)
    want = gradient_of_potential(z, case.target, case.alpha, case.upstream, **case.options)
    torch.testing.assert_close(grad.double(), want, rtol=torch.finfo(dtype).eps / 1.9, atol=0)


def test_gates():
    """Their weights are constants; statistics are compared with the random cases."""
    case = example(reduction="sum")
    with powergrad.PowerGrad(0.3) as mode:  # a gated loss is noticed
        dft = gradient(case, lambda z, case: cross_entropy(z, case, gate=lambda r: r.p_target))
    assert not mode.altered
    own = case.logits.double().softmax(1).gather(1, case.target.clamp(min=0)[:, None])[:, 0]
    case.extra = {"token_weight": own}
    check_gradient(case, dft)


def test_the_head_works_in_blocks_of_the_kernels(monkeypatch):
    """The table has its gradients."""
    calls, launch = [], gpu._launch
    monkeypatch.setattr(gpu, "_launch", lambda *a, **k: (calls.append(a[0]), launch(*a, **k)))
    hidden, head = torch.randn(10, 4).requires_grad_(), torch.randn(21, 4).requires_grad_()
    options = {"alpha": 0.3, "chunk_rows": 4, "z_loss": 0.1, "weight": torch.rand(21)}
    loss = powergrad.linear_cross_entropy(hidden, head, torch.arange(10), **options)
    torch.autograd.grad(loss, (hidden, head))
    assert calls.count("statistics") == calls.count("write") >= 3


# The check before first use -----------------------------------------------------------------------


class Broken:
    """A kernel whose launch does something else."""

    def __init__(self, kernel: Any, change: Any) -> None:
        self.kernel, self.change = kernel, change

    def __getitem__(self, grid: Any) -> Any:
        return lambda **arguments: self.change(self.kernel[grid], arguments)


def fail(kernel: Any, arguments: dict[str, Any]) -> None:
    raise CompilationError("x = y", ast.parse("x = y").body[0], "y is not defined")


def scale_gradient(kernel: Any, arguments: dict[str, Any]) -> None:
    kernel(**arguments)
    arguments["grad"].mul_(1.001)


def forget_a_row(kernel: Any, arguments: dict[str, Any]) -> None:
    kernel(**arguments)
    arguments["losses"][-1] = float("nan")


@pytest.mark.parametrize(
    ("kernel", "change", "message"),
    [
        ("statistics", fail, "y is not defined"),
        ("write", fail, "CompilationError"),
        ("statistics", forget_a_row, "The losses differ"),
        ("write", scale_gradient, "The gradients differ"),
    ],
)
def test_a_broken_kernel_is_switched_off_with_one_warning(
    kernel, change, message, monkeypatch, unchecked, capsys
):
    module, case = gpu.kernels(), example()
    monkeypatch.setattr(module, kernel, Broken(getattr(module, kernel), change))
    with pytest.warns(RuntimeWarning) as warned:
        check_gradient(case, gradient(case))
    case.extra = {"softcap": 5.0}
    check_gradient(case, gradient(case))  # no further warning
    (text,) = [str(w.message) for w in warned]
    for part in (message, "POWERGRAD_TRITON=0", "torch 2", "triton 3", "float32", "cpu"):
        assert part in text
    assert not gpu.usable(case.logits, Call(case.target, None, 0.3))
    assert doctor.main() == 1
    assert message in capsys.readouterr().out


def test_each_variant_is_checked_once(unchecked, capsys):
    for count, form in enumerate([Form(), Form(softcap=5.0), Form(shape=(3, 70))], 1):
        for _ in range(2):
            gradient(build(form))
            assert list(gpu.CHECKED.values()) == [None] * count
    assert doctor.main() == 0
    assert "Triton kernels, checked" in capsys.readouterr().out


def test_the_default_device_does_not_matter(unchecked):
    case = example()
    with torch.device("meta"):
        found = gradient(case)
    check_gradient(case, found)
    assert list(gpu.CHECKED.values()) == [None]


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
