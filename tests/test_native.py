"""The C kernel: its precision, special values, memory and threads; the loader."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Case, Form, build, check_gradient, check_value, forms, size_of_terms
from hypothesis import given
from hypothesis import strategies as st
from references import gradient_of_potential
from torch import Tensor

from powergrad import kernels
from powergrad.checks import Call

pytestmark = pytest.mark.skipif(not kernels.available(), reason="needs the C kernel")

INF, NAN = float("inf"), float("nan")
LEVELS = range(kernels.best_level() + 1)
SIZES = [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 100, 1000, 5000]
ALPHAS = [0.0, 1e-3, 0.05, 0.25, 0.3, 0.5, 1.0]

# Relative errors; bfloat16's gradients are rounded to 8 bits, once.
TOLERANCE = 1e-6
HALF_ULP = {torch.float32: 0.0, torch.bfloat16: 2.0**-8}
# Below 2^-125 the kernel's exponentials are 0.
TINY = 1e-37


def serve(z: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor] | None:
    return kernels.cross_entropy(z, Call(*arguments), **options)


def kernel(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """The kernel where it has to serve."""
    result = serve(*arguments, **options)
    assert result is not None
    return result


def oracle_losses(z: Tensor, y: Tensor, w: Tensor, eps: float) -> Tensor:
    """-sum(w q log p) in float64, from the margins: -log p_y = softplus(log sum exp(z_c - z_y))."""
    margins = z - z.gather(1, y[:, None])
    others = margins.scatter(1, y[:, None], -INF).logsumexp(1)
    hard = w[y] * torch.where(others > 20, others + (-others).exp().log1p(), others.exp().log1p())
    smooth = (w * -torch.log_softmax(z, 1)).mean(1) if eps else 0.0
    return (1 - eps) * hard + eps * smooth


def check(
    z: Tensor,
    y: Tensor,
    w: Tensor | None = None,
    alpha: float | Tensor = 0.3,
    eps: float = 0.0,
    reduction: str = "none",
    **options: int,
) -> None:
    """Value and gradient of the kernel, which are more precise than those of PyTorch.

    Hard labels are judged by the largest entry of a row, which may be 1e-30; smoothed ones by the
    larger of their two terms.
    """
    value, grad = kernel(z, y, w, alpha, -100, eps, reduction, **options)
    assert (value.dtype, grad.dtype, grad.shape) == (torch.float32, z.dtype, z.shape)

    keep = y != -100
    wide, kept = z[keep].double(), y[keep]
    wide_w = torch.ones(z.shape[1]).double() if w is None else w.double()
    losses = torch.zeros(len(z), dtype=torch.float64)
    losses[keep] = oracle_losses(wide, kept, wide_w, eps)
    divisor = wide_w[kept].sum() if reduction == "mean" else torch.ones(()).double()
    # A mean over weights of 0 is NaN, as in PyTorch.
    expected = losses if reduction == "none" else losses.sum() / divisor.where(divisor > 0, NAN)
    # With smoothing the value may be all log p of a class that is likely and not the target (whose
    # weight is 0): that is good to 1e-7 absolutely, as in PyTorch.
    atol = TINY + 1e-7 * eps * float(wide_w.mean())
    if reduction != "none" and divisor > 0:
        atol *= len(kept) / float(divisor)
    torch.testing.assert_close(value.double(), expected, rtol=TOLERANCE, atol=atol, equal_nan=True)
    assert not grad[~keep].any()
    if divisor == 0 or len(kept) == 0:
        return
    case = Case(z, y, alpha, {"weight": w, "label_smoothing": eps, "reduction": reduction}, value)
    case.upstream = torch.ones_like(value)
    oracle = gradient_of_potential(z, y, alpha, case.upstream, **case.options)
    size = size_of_terms(case) if eps else oracle.abs().amax(1, keepdim=True)
    # From 4096 up z - max is rounded, to 2^-24 of at most 87 / alpha: that shows where alpha is so
    # small that z and max need not be close.
    alphas = torch.as_tensor(alpha, dtype=torch.float64).reshape(-1).expand(len(z))
    rounded = (z.double().amax(1).abs() >= 4096) & (alphas < 0.05)
    size = size * (TOLERANCE + rounded[:, None] * 87 * 2.0**-24)
    error = (grad.double() - oracle).abs()[keep]
    bound = (HALF_ULP[z.dtype] * oracle.abs() + size + TINY / divisor)[keep]
    assert bool((error <= bound).all())


PLAIN = {"target": "labels", "softcap": None, "logit_scale": 1.0, "z_loss": 0.0, "tokens": False}


@given(
    form=forms(),
    shape=st.tuples(st.sampled_from([0, 1, 2, 3, 15, 16, 17, 33]), st.sampled_from(SIZES)),
    dtype=st.sampled_from(list(HALF_ULP)),
    alpha=st.sampled_from(ALPHAS),
    spread=st.sampled_from([0.0, 1.0, 5.0, 30.0, 1e4]),
    offset=st.sampled_from([0.0, 1e4, -1e4, 32_768.0, -1e6]),
    weight=st.sampled_from(["", "some zero"]),
    likely=st.booleans(),  # the target is the likeliest class
)
def test_matches_oracles(form, shape, dtype, alpha, spread, offset, weight, likely):
    drawn = {"shape": shape, "dtype": dtype, "alpha": alpha, "spread": spread, "offset": offset}
    case = build(replace(form, **PLAIN, **drawn, weight=weight, ignore_index=-100, ignored=0.2))
    y, w = case.target, case.options["weight"]
    if likely and shape[0]:
        y = y.where(y == -100, case.logits.argmax(1))
    w = None if w is None else w.float()
    eps, reduction = case.options["label_smoothing"], case.options["reduction"]
    for level in LEVELS:
        check(case.logits, y, w, case.alpha, eps, reduction, level=level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("classes", SIZES)
def test_every_target(classes, level):
    # Each lane of a vector, the first and the last vector, the padding beside the target.
    z = torch.randn(min(classes, 200), classes)
    for first in (0, max(0, classes - 200)):
        check(z, torch.arange(first, first + len(z)), level=level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("classes", [257, 1000, 128_000])
def test_long_sums_of_equal_terms(classes, level):
    # Rounding errors of equal terms all point one way.
    z = torch.linspace(-20, -0.01, 500 if classes < 10_000 else 5)[:, None].repeat(1, classes)
    z[:, 5] = 0
    check(z, torch.full((len(z),), 5), level=level)
    check(z, torch.full((len(z),), 7), level=level)


@pytest.mark.parametrize("level", LEVELS)
def test_confident_rows_keep_their_gradient(level):
    # 1 - p'_y is far below the resolution of p'_y; z - max and alpha z are not float32 numbers.
    y = torch.zeros(500, dtype=torch.int64)
    for centre in ([60.1, -10.3, -20.7], [10.1, -60.3, -60.7]):
        z = torch.randn(500, 3) + torch.tensor(centre)
        check(z, y, alpha=0.5, level=level)
        _, grad = kernel(z, y, None, 0.5, -100, 0.0, "none", level=level)
        assert bool((grad[:, 0] < 0).all())
        assert bool((grad[:, 0] > -1e-13).all())


def test_bfloat16_is_rounded_to_nearest_even():
    """Between two bfloat16 numbers: the gradient at alpha 0 is half the weight."""
    z, y = torch.randn(1, 2, dtype=torch.bfloat16), torch.zeros(1).long()
    for weight in 2 + torch.arange(1, 64, 2) / 128:
        _, grad = kernel(z, y, weight.expand(2), 0.0, -100, 0.0, "none")
        assert grad[0, 1] == (weight / 2).to(torch.bfloat16)


MAPS = {
    "cap": Form(softcap=5.0),
    "cap, scale, masked": Form(softcap=4.0, logit_scale=2.0, masked=True),
    "scale, masked": Form(logit_scale=0.3, masked=True, weight="random"),
    "scale, smoothing": Form(logit_scale=3.0, label_smoothing=0.1, ignore_index=-100),
    "cap, smoothing, weights": Form(softcap=30.0, label_smoothing=0.1, weight="random"),
    "all of it": Form(
        softcap=3.0, z_loss=0.1, tokens=True, label_smoothing=0.2, alphas="example", ignore_index=1
    ),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", [(5, 3), (40, 31), (6, 1000), (2, 5000)])
@pytest.mark.parametrize("dtype", list(HALF_ULP))
@pytest.mark.parametrize("name", MAPS)
def test_maps_logits(name, dtype, shape, level):
    case = build(replace(MAPS[name], shape=shape, dtype=dtype))
    options = {"ignore_index": -100, **case.options, **case.extra}
    call = Call(case.target, alpha=case.alpha, **options)
    result = kernels.cross_entropy(case.logits, call, level=level)
    assert result is not None
    check_value(case, result[0].to(dtype))
    check_gradient(case, (result[1] * case.upstream).to(dtype))
    again = kernels.cross_entropy(case.logits, call, level=level, out=case.logits)
    assert same(again, result)


@pytest.mark.parametrize("level", LEVELS)
def test_soft_cap_is_relatively_exact(level):
    # The loss of (x, 0) with the less likely class as its target is |z|, where that is above 20.
    x = torch.logspace(1.5, 7.5, 3000, dtype=torch.float64).float()
    z = torch.stack([torch.cat([x, -x]), torch.zeros(2 * len(x))], 1)
    call = Call((z[:, 0] > 0).long(), None, 0.3, -100, 0.0, "none", softcap=1e6)
    result = kernels.cross_entropy(z, call, level=level)
    assert result is not None
    expected = 1e6 * torch.tanh(z[:, 0].double().abs() / 1e6)
    torch.testing.assert_close(result[0].double(), expected, rtol=3e-7, atol=0)


@pytest.mark.parametrize("level", LEVELS)
def test_soft_cap_of_special_values_is_tanhs(level):
    z = torch.tensor([[INF, -INF, 0.0], [1e-40, -1e-40, -0.0], [3.4e38, 1.0, -3.4e38]])
    z = torch.cat([z, torch.tensor([[NAN, 0.0, 1.0]])])
    call = Call(torch.tensor([1, 1, 2, 1]), None, 0.3, -100, 0.0, "none", softcap=2.0)
    result = kernels.cross_entropy(z, call, level=level)
    assert result is not None
    capped = 2 * torch.tanh(z / 2)
    slope = 1 - (capped / 2).square()
    q = F.one_hot(call.target, 3)
    expected = F.cross_entropy(capped, call.target, reduction="none")
    torch.testing.assert_close(result[0], expected, equal_nan=True)
    expected = ((0.3 * capped).softmax(1) - q) * slope
    torch.testing.assert_close(result[1], expected, equal_nan=True)


ROWS = {
    "masked": [1.0, -INF, 2.0, 0.0],
    "one class left": [-INF, -INF, 3.0, -INF],
    "all masked": [-INF] * 4,
    "infinite": [1.0, INF, 0.0, 0.0],
    "two infinite": [INF, INF, 0.0, 0.0],
    "nan": [1.0, NAN, 0.0, 0.0],
    "nan and infinite": [NAN, INF, -INF, 0.0],
    "largest float": [3.4e38, -3.4e38, 0.0, -INF],
    "float min as a mask": [1.0, torch.finfo(torch.float32).min, 2.0, 0.0],
    "subnormal": [1e-40, 0.0, -1e-40, -0.0],
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("eps", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("dtype", list(HALF_ULP))
def test_special_values_are_pytorchs(dtype, name, eps, weighted, level):
    # In the one row of a short vector, and at the head of a longer row that is masked.
    for others in (0, 37):
        row = torch.tensor(ROWS[name] + [-INF] * others).to(dtype)
        w = torch.tensor([1.0, 0.75, 0.5, 0.0] + [1.0] * others) if weighted else None
        for target in range(4):
            y = torch.tensor([target])
            z = row[None].float().requires_grad_()
            expected = F.cross_entropy(z, y, w, reduction="none", label_smoothing=eps)
            (expected_grad,) = torch.autograd.grad(expected.sum(), z)
            value, grad = kernel(row[None], y, w, 1.0, -100, eps, "none", level=level)
            close = {"rtol": max(2e-6, HALF_ULP[dtype]), "atol": 1e-7, "equal_nan": True}
            torch.testing.assert_close(value, expected.detach(), **close)
            torch.testing.assert_close(grad.float(), expected_grad, **close)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("payload", [0x7F800001, 0x7FFFFFFF, 0xFF800001 - 2**32, -1])
def test_any_nan_is_a_nan(payload, level):
    nan = torch.tensor(payload, dtype=torch.int32).view(torch.float32)
    z, w = torch.zeros(2, 20), torch.ones(20)
    z[0, 4] = nan
    y = torch.tensor([4, 4])
    for dtype in HALF_ULP:
        value, grad = kernel(z.to(dtype), y, w, 0.3, -100, 0.1, "none", level=level)
        assert value.isnan().tolist() == [True, False]
        assert grad.isnan().all(1).tolist() == [True, False]
        assert not grad[1].isnan().any()
        value, grad = kernel(z[1:].to(dtype), y[1:], w * nan, 0.3, -100, 0.0, "none", level=level)
        assert bool(value.isnan().all())
        assert bool(grad.isnan().all())


def test_ignored_rows_are_zero_whatever_they_hold():
    # PyTorch gives NaN gradients here: 0 * NaN. Nothing of an ignored row should reach a gradient.
    z = torch.tensor([[NAN, 1.0], [-INF, -INF], [0.0, 0.0]])
    value, grad = kernel(z, torch.tensor([7, 7, 1]), None, 0.5, 7, 0.0, "mean")
    torch.testing.assert_close(value, torch.tensor(2.0).log())
    torch.testing.assert_close(grad, torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.5, -0.5]]))


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", list(HALF_ULP))
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("shape", [(4099, 257), (130_001, 10), (9, 128_000)])
def test_threads_change_nothing(dtype, reduction, shape):
    z, y = torch.randn(shape).to(dtype), torch.randint(shape[1], shape[:1])
    y[::5] = -100
    expected = kernel(z, y, None, 0.3, -100, 0.1, reduction, threads=1)
    for threads in (2, 3, 7):
        assert same(kernel(z, y, None, 0.3, -100, 0.1, reduction, threads=threads), expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("classes", SIZES)
@pytest.mark.parametrize("dtype", list(HALF_ULP))
@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_stays_within_its_buffers(cap, dtype, classes, level):
    # What surrounds the logits is NaN, and would show; what surrounds the outputs is a mark.
    rows, mark, margin = 5, 777.0, 64
    y = torch.tensor([classes - 1, 0, -100, classes // 2, classes - 1])
    z = torch.full((rows * classes + 2 * margin,), NAN, dtype=dtype)
    z[margin:-margin] = torch.randn(rows * classes)
    before = z.clone()
    value, grad = torch.full((rows + 2 * margin,), mark), torch.full_like(z, mark)

    def call(y: Tensor) -> int:
        at = [t.data_ptr() + margin * t.element_size() for t in (z, value, grad)]
        kind = int(dtype == torch.bfloat16)
        library = kernels.library()
        assert library is not None
        return library.powergrad_cross_entropy(
            kernels._CALL.pack(
                *(rows, classes, at[0], classes, kind, y.data_ptr(), -100, 0),
                *(0.1, 0, 0.3, 0, at[1], at[2], 0, 0.0, cap, 1.0, 1, level),
            )
        )

    assert call(torch.tensor([0, 0, 0, classes, -1])) == 4
    assert bool((value == mark).all())
    assert bool((grad == mark).all())
    assert call(y) == 0
    assert torch.equal(z.nan_to_num(mark), before.nan_to_num(mark))
    for tensor in (value, grad):
        assert bool((tensor[:margin] == mark).all())
        assert bool((tensor[-margin:] == mark).all())
        assert not tensor.isnan().any()
        assert not (tensor[margin:-margin] == mark).any()


@pytest.mark.parametrize("dtype", list(HALF_ULP))
def test_strided_arguments(dtype):
    wide = torch.full((12, 40), NAN, dtype=dtype)
    z = wide[::2, 3:36]
    z.copy_(torch.randn(6, 33))
    arguments = z, torch.randint(33, (6, 2))[:, 0], torch.rand(33, 2)[:, 0], torch.rand(6, 2)[:, 0]
    expected = kernel(*(tensor.contiguous() for tensor in arguments), -100, 0.1, "none")
    assert same(kernel(*arguments, -100, 0.1, "none"), expected)
    check(z[:1].expand(6, 33), arguments[1])


@pytest.mark.parametrize("dtype", list(HALF_ULP))
@pytest.mark.parametrize("eps", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(40, 30), (3, 5000), (3000, 400)])
def test_gradient_in_place_of_the_logits(shape, eps, dtype):
    z, y, w = torch.randn(shape).to(dtype), torch.randint(shape[1], shape[:1]), torch.rand(shape[1])
    y[::5] = -100
    expected = kernel(z, y, w, 0.3, -100, eps, "none", threads=3)
    value, grad = kernel(z, y, w, 0.3, -100, eps, "none", out=z, threads=3)
    assert grad is z
    assert same((value, grad), expected)
    for out in (z[1:], z[:, 1:], z.double(), z.T.contiguous().T):
        assert serve(z, y, w, 0.3, -100, eps, "none", out=out) is None


@pytest.mark.parametrize("wrong", [-1, 10, 11, 2**40, -(2**40)])
@pytest.mark.parametrize("threads", [1, 4])
def test_targets_out_of_range(wrong, threads):
    z, y = torch.randn(200_000, 10), torch.zeros(200_000).long()
    y[70_001] = wrong
    y[150_000] = 99
    y[3] = -100
    got = f"from {min(wrong, 0):g} to {max(wrong, 99):g}."
    with pytest.raises(ValueError, match=rf"`target`.*{re.escape(got)}"):
        serve(z, y, None, 0.3, -100, 0.0, "mean", threads=threads)


def test_serves_or_says_not():
    z, y, w = torch.randn(6, 5), torch.zeros(6).long(), torch.ones(5)

    def serves(z: Tensor, y: Tensor = y, w: Tensor | None = None, alpha: Any = 0.3) -> bool:
        return serve(z, y, w, alpha, -100, 0.0, "mean") is not None

    for served in [(z, y, w), (torch.nn.Parameter(z), y, w.double()), (z[:, :1],)]:
        assert serves(*served)
    for refused in [
        *((z.double(),), (z.half(),), (z.to("meta"), y.to("meta")), (z.T, y[:5]), (z[:, ::2],)),
        *((z[:, :0],), (z[None], y[None]), (z[0], y[0]), (z, y.int()), (z, y[:5])),
        *((z, torch.rand(6, 5)), (z, y, torch.ones(6)), (z, y, None, torch.rand(5))),
    ]:
        assert not serves(*refused)
    with pytest.raises(RuntimeError, match="storage"):  # callers ask `is_plain` first
        torch.vmap(lambda z: torch.full((), serves(z)))(z[None])


def run(script: str, **environment: str) -> None:
    subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        env={**os.environ, **environment},
        check=True,
    )


def test_can_be_turned_off_and_is_loaded_late():
    run(
        """
        import torch
        from powergrad import kernels
        from powergrad.checks import Call
        assert kernels.library.cache_info().currsize == 0
        assert not kernels.available()
        assert kernels.best_level() == 0
        z, y = torch.randn(2, 3), torch.tensor([0, 1])
        assert kernels.cross_entropy(z, Call(y, None, 0.3)) is None
        """,
        POWERGRAD_NATIVE="0",
    )


def test_survives_a_fork():
    z, y = torch.randn(3000, 400), torch.randint(400, (3000,))
    expected = kernel(z, y, None, 0.3, -100, 0.0, "mean", threads=4)
    child = os.fork()
    if child == 0:
        try:
            os._exit(not same(kernel(z, y, None, 0.3, -100, 0.0, "mean", threads=4), expected))
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


def test_a_foreign_or_stale_library_is_left_alone(tmp_path, monkeypatch):
    text = tmp_path / "kernel.so"
    text.write_text("not a library")
    for path in (tmp_path / "absent.so", text, Path(torch._C.__file__)):
        assert kernels.load(path) is None
    ours = Path(getattr(kernels.library(), "_name"))  # noqa: B009
    assert kernels.load(ours) is not None
    monkeypatch.setattr(kernels, "ABI", kernels.ABI + 1)
    assert kernels.load(ours) is None
