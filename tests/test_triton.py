"""The Triton kernels under Triton's interpreter, against float64: `make test-triton`."""

# pyright: reportMissingImports=false

from __future__ import annotations

import csv
import math
import os
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

if os.environ.get("POWERGRAD_TRITON") != "interpret":
    pytest.skip("left to make test-triton", allow_module_level=True)

import interpreter

from powergrad.kernels import gpu

pytestmark = pytest.mark.triton

INF = math.inf
ALPHAS = [0.0, 1e-3, 0.05, 0.25, 0.3, 0.5, 1.0, 1.5]
CASES, PARTS = 500, 20


@dataclass
class Case:
    """Arguments of the kernels. `up` is the incoming gradient."""

    logits: Tensor
    target: Tensor
    up: Tensor
    weight: Tensor | None = None
    alphas: Tensor | None = None
    g: Tensor | None = None
    z_factor: Tensor | None = None
    options: gpu.Options = field(default_factory=lambda: gpu.Options(0.3))
    in_place: bool = False
    stats: bool = False

    @property
    def tensors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.weight, self.alphas, self.g

    @property
    def z_loss(self) -> float:
        return self.options.z_loss * (1.0 if self.z_factor is None else float(self.z_factor))

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        """Losses, gradients and statistics, with every address checked."""
        x = self.logits.clone() if self.in_place else self.logits
        with interpreter.watched() as moved:
            losses, kept, stats = gpu.row_losses(
                x, self.target, *self.tensors, self.z_factor, *self.options, stats=self.stats
            )
            grads = gpu.row_gradients(
                x,
                self.target,
                *self.tensors,
                kept,
                self.up,
                *self.options,
                out=x if self.in_place else None,
            )
        self.moved = moved
        return losses, grads, stats


@dataclass
class Expected:
    """In float64. `size` is the largest term of a row's gradient; terms may cancel."""

    losses: Tensor
    gradients: Tensor
    stats: Tensor
    size: Tensor
    reach: Tensor  # largest |z| of a row
    kept: Tensor


def expected(case: Case) -> Expected:
    """The formulas as sums over classes; the entry at the label is minus the sum of the others."""
    options, x = case.options, case.logits.double()
    classes, soft = x.shape[1], case.target.is_floating_point()
    cap, scale, eps = options.softcap, options.logit_scale, options.label_smoothing
    z = x * scale if cap is None else cap * torch.tanh(x * scale / cap)
    slope = scale if cap is None else scale / torch.cosh(x * scale / cap) ** 2
    w = torch.ones(classes).double() if case.weight is None else case.weight.double()
    kept = torch.ones(len(x)).bool() if soft else case.target != options.ignore_index
    label = torch.zeros(len(x), 1).long() if soft else case.target.where(kept, 0)[:, None]
    q = case.target.double() if soft else torch.zeros_like(z).scatter(1, label, 1.0)
    t = w * ((1 - eps) * q + eps / classes)
    alpha = options.alpha if case.alphas is None else case.alphas.double().reshape(-1, 1)
    alpha = torch.as_tensor(alpha).double().expand(len(x), 1)
    top = z.amax(1, keepdim=True)
    d = z - top
    log_s = d.exp().sum(1).log()
    if soft:
        plain = (torch.where(q == 0, 0, q * (log_s[:, None] - d))).sum(1)
    else:  # log(1 + others), without losing small ones
        others = (z - z.gather(1, label)).scatter(1, label, -INF).logsumexp(1)
        plain = torch.where(others > 20, others + (-others).exp().log1p(), others.exp().log1p())
    if soft or eps:
        losses = torch.where(t == 0, 0, t * (log_s[:, None] - d)).sum(1)
    else:
        losses = w[label[:, 0]] * plain
    lse = top[:, 0] + log_s
    lam = case.z_loss
    losses = losses + lam * lse**2
    scaled = torch.where(z == -INF, -INF, alpha * d)
    p_flat, lse_a = scaled.softmax(1), scaled.logsumexp(1) + (alpha * top)[:, 0]
    term = 2 * lam * lse_a
    mass = t.sum(1)
    dz = (mass + term)[:, None] * p_flat - t
    largest = 2 * abs(lam) * ((alpha * top)[:, 0].abs() + (lse_a - (alpha * top)[:, 0]).abs())
    size = torch.maximum((mass + largest) * p_flat.amax(1), t.amax(1))
    if not soft:
        rest = dz.scatter(1, label, 0.0)
        dz = rest.scatter(1, label, (term - rest.sum(1))[:, None])
        if not (eps or lam):  # no cancellation
            size = torch.where(dz.abs().amax(1) < 1e-6, 10 * dz.abs().amax(1), size)
    p = d.exp() / d.exp().sum(1, keepdim=True)
    entropy = torch.special.entr(p).sum(1)
    p_target = (p * q).sum(1)
    stats = torch.stack([lse, plain, p_target, entropy, z.argmax(1).double()])
    g = 1.0 if case.g is None else case.g.double()
    factor = (case.up.double() * g).expand(len(x))
    return Expected(
        torch.where(kept, losses * g, 0),
        torch.where(kept[:, None], dz * slope * factor[:, None], 0),
        stats,
        size * factor.abs() * abs(scale),
        alpha[:, 0] * z.masked_fill(~z.isfinite(), 0).abs().amax(1),
        kept,
    )


def check(case: Case, bound: float = 1e-6) -> None:
    """Compare all results of a case, which has no NaN."""
    losses, grads, stats = case.run()
    want, dtype = expected(case), case.logits.dtype
    half_ulp, tiny = {
        torch.bfloat16: (2.0**-8, 2.0**-134),
        torch.float16: (2.0**-11, 2.0**-25),
        torch.float32: (0.0, 2.0**-126),
    }[dtype]
    mapped = case.options.softcap is not None or case.options.logit_scale != 1
    rounding = want.reach * 2.0**-23 if mapped else torch.zeros(())
    allowed = (want.size * (bound + rounding))[:, None] + want.gradients.abs() * half_ulp + tiny
    error = (grads.double() - want.gradients).abs()
    # float16 overflows, as in PyTorch.
    error = error.masked_fill(want.gradients.abs() > torch.finfo(dtype).max, 0)
    assert (error <= allowed).all(), (case, float((error / allowed).max()))
    rounding = torch.zeros(())
    if mapped:  # z is rounded to float32
        largest = case.logits.double().abs().masked_fill(~case.logits.isfinite(), 0).amax(1)
        rounding = largest * abs(case.options.logit_scale) * 2.0**-22
        rounding = rounding * (1 + 2 * case.z_loss * want.stats[0].abs())
    g = 1.0 if case.g is None else case.g.double()
    weight = 1.0 if case.weight is None else max(1.0, float(case.weight.max()))
    off = (losses.double() - want.losses).abs() - rounding * g * weight
    close = off <= (want.losses.abs() * 3 * bound).clamp(min=bound)
    assert (close | (losses == want.losses)).all(), (case, losses, want.losses)
    if case.stats:
        numbers = torch.where(want.kept, stats.double() - want.stats, 0)[:4].abs() - rounding
        close = numbers <= (want.stats[:4].abs() * 3 * bound).clamp(min=3 * bound)
        assert (close | (stats[:4] == want.stats[:4])).all(), (case, stats, want.stats)
        chosen = stats[4].long()[:, None]
        if not mapped:
            best = case.logits.amax(1)
            assert (case.logits.gather(1, chosen)[:, 0] == best)[want.kept].all(), case


def random_case(rng: random.Random) -> Case:
    gen = torch.Generator().manual_seed(rng.randrange(2**31))

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=gen)

    n = rng.choice([1, 2, 3, 5, 16, 17, 33])
    c = rng.choice([1, 2, 3, 7, 10, 16, 17, 100, 257, 1000, 1025, 4097, 5000])
    dtype = rng.choice(gpu.DTYPES)
    offset = rng.choice([0.0, 0.0, 100.0, -100.0 if dtype == torch.float16 else -1e4])
    spread = rng.choice([0.0, 1.0, 5.0, 30.0])
    x = (torch.randn(n, c, generator=gen) * spread + offset).to(dtype)
    soft, eps = rng.random() < 0.25, rng.choice([0.0, 0.0, 0.1, 1.0])
    likely = rng.random() < 0.4
    y = x.float().argmax(1) if likely else torch.randint(c, (n,), generator=gen)
    ignored = rng.choice([-100, -100, 0])
    y[1:][uniform(n - 1) < 0.2] = ignored
    if not eps and not soft and rng.random() < 0.4:  # all but the label may be masked
        x[(uniform(n, c) < 0.5).scatter(1, y.clamp(min=0)[:, None], False)] = -INF
    if soft:
        kind = rng.choice([torch.float32, dtype])
        y = (torch.randn(n, c, generator=gen) * 2).softmax(1).to(kind)
    layout = rng.choice(["contiguous", "contiguous", "padded", "every second", "transposed"])
    if layout == "transposed":
        x = x.t().contiguous().t()
    elif layout != "contiguous":  # rows, and sometimes classes, that are not contiguous
        step = 1 if layout == "padded" else 2
        wide = torch.full((n, step * c + 3), math.nan, dtype=dtype)
        wide[:, : step * c : step] = x
        x = wide[:, : step * c : step]
    several = torch.tensor(ALPHAS)[torch.randint(len(ALPHAS), (n,), generator=gen)]
    g = rng.choice([None, None, uniform(n), uniform(1)])
    options = gpu.Options(
        rng.choice(ALPHAS),
        ignored,
        eps,
        rng.choice([None, None, 30.0, 5.0]),
        rng.choice([1.0, 1.0, 0.125, 3.0]),
        rng.choice([0.0, 0.0, 1e-4, 1e-2]),
    )
    return Case(
        x,
        y,
        rng.choice([uniform(n) + 0.5, torch.tensor([1024.0]).expand(n)]),
        weight=(uniform(c) + 0.01).to(rng.choice([torch.float32, dtype]))
        if rng.random() < 0.4
        else None,
        alphas=rng.choice([None, None, several, several[:1]]),
        g=g,
        z_factor=uniform(1) + 0.5 if rng.random() < 0.3 else None,
        options=options,
        in_place=layout == "contiguous" and rng.random() < 0.3,
        stats=rng.random() < 0.4,
    )


# Random cases -------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", range(PARTS))
def test_random_cases(part):
    rng = random.Random(part)
    for _ in range(CASES // PARTS):
        check(random_case(rng))


@pytest.mark.parametrize("part", range(PARTS))
def test_random_cases_with_rough_exponentials(part):
    rng = random.Random(100 + part)
    with interpreter.rough_exponentials(part):
        for _ in range(CASES // PARTS):
            check(random_case(rng), 3e-6)


# Sizes, layouts and values at the edges -----------------------------------------------------------


def drawn(n: int, c: int, dtype: torch.dtype = torch.float32, soft: bool = False) -> Case:
    gen = torch.Generator().manual_seed(n + c)
    x = (torch.randn(n, c, generator=gen) * 4).to(dtype)
    y = torch.randint(c, (n,), generator=gen)
    if soft:
        y = torch.randn(n, c, generator=gen).softmax(1)
    return Case(x, y, torch.rand(n, generator=gen) + 0.5)


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("classes", [1, 2, 15, 16, 17, 2047, 2048, 4097, 16385, 50257, 130000])
def test_any_number_of_classes(classes, soft):
    for n, dtype in ((1, torch.float32), (3, torch.bfloat16)):
        case = drawn(n, classes, dtype, soft)
        case.stats = True
        check(case)


def test_no_rows():
    losses, grads, _ = drawn(0, 7).run()
    assert losses.shape == (0,)
    assert grads.shape == (0, 7)


def test_rows_and_classes_that_are_far_apart():
    """More than 2^31 elements; only the pages that are used take memory."""
    far = 2**31 + 24
    memory = torch.empty(far + 3000, dtype=torch.bfloat16)
    for shape, stride in (((2, 1000), (far, 1)), ((1000, 2), (1, far))):
        case = drawn(*shape, torch.bfloat16)
        expectation = expected(case)
        x = memory.as_strided(shape, stride)
        x.copy_(case.logits)
        case.logits = x
        check(case)
    with interpreter.watched():  # the gradient, written over logits that are far apart
        x = memory.as_strided((2, 1000), (far, 1))
        case = drawn(2, 1000, torch.bfloat16)
        x.copy_(case.logits)
        _, kept, _ = gpu.row_losses(x, case.target, *case.tensors, None, *case.options)
        grads = gpu.row_gradients(
            x, case.target, *case.tensors, kept, case.up, *case.options, out=x
        )
    assert grads.data_ptr() == x.data_ptr()
    expectation = expected(case)
    torch.testing.assert_close(grads.double(), expectation.gradients, rtol=2**-7, atol=1e-6)


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
        check(Case(x, torch.full((len(rows),), label), torch.ones(1).expand(7), stats=True,
                   options=gpu.Options(alpha)))  # fmt: skip
    # z - m overflows; the gradients are still right.
    x = torch.tensor([[largest, -largest, 1.0]]).to(dtype)
    case = Case(x, torch.tensor([0]), torch.ones(1), options=gpu.Options(alpha))
    torch.testing.assert_close(
        case.run()[1].double(), expected(case).gradients, rtol=2**-7, atol=1e-7
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["labels", "probabilities"])
@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_nan_and_infinities_as_in_pytorch(alpha, kind, smoothing):
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    x[0, 1] = math.nan
    x[1, 1] = INF
    x[2] = -INF
    x[3, 2] = x[4, 0] = -INF
    x[5, 2] = math.nan
    y = torch.full((7,), 2)
    if kind == "probabilities":
        y = torch.randn(7, 5, generator=torch.Generator().manual_seed(1)).softmax(1)
    options = gpu.Options(alpha, label_smoothing=smoothing)
    losses, grads, _ = Case(x, y, torch.ones(7), options=options).run()
    leaf = x.clone().requires_grad_()
    scaled = F.cross_entropy(alpha * leaf, y, reduction="none", label_smoothing=smoothing) / alpha
    (want,) = torch.autograd.grad(scaled, leaf, torch.ones(7))
    plain = F.cross_entropy(x, y, reduction="none", label_smoothing=smoothing)
    torch.testing.assert_close(losses, plain, equal_nan=True)
    torch.testing.assert_close(grads, want, equal_nan=True)


def test_a_label_that_is_no_class_is_nan():
    case = drawn(4, 9)
    case.target = torch.tensor([3, 9, -1, -100])
    losses, grads, _ = case.run()
    assert losses.isnan().tolist() == [False, True, True, False]
    assert grads.isnan().all(1).tolist() == [False, True, True, False]
    assert not grads[3].any()


# Bytes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", gpu.DTYPES)
@pytest.mark.parametrize(("soft", "passes"), [(False, 3), (True, 5)])
def test_bytes_moved(dtype, soft, passes):
    case = drawn(32, 5000, dtype, soft)
    case.target = case.target.to(dtype) if soft else case.target
    case.run()
    moved = sum(case.moved.values()) / (case.logits.numel() * case.logits.element_size())
    assert passes <= moved <= passes + 0.02
    key = str(dtype)[6:], "probabilities" if soft else "labels"
    with (Path(__file__).parents[1] / "results" / "gpu_bytes.csv").open() as file:
        (row,) = [row for row in csv.DictReader(file) if (row["dtype"], row["target"]) == key]
    assert (int(row["loaded"]), int(row["stored"])) == (case.moved["load"], case.moved["store"])
    assert row["passes"] == f"{moved:.4f}"
    assert row["expected_ratio"] == f"{moved / int(row['pytorch_passes']):.3f}"


def test_ignored_rows_are_not_read():
    case = drawn(32, 5000)
    case.target[::2] = -100
    case.run()
    assert sum(case.moved.values()) / (case.logits.numel() * 4) <= 2.02
