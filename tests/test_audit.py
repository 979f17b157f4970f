"""The paper's listing against its equation: each sentence of docs/audit.md, as a test.

The listing receives ``S/N * (p - q)`` and takes ``r * (p - q) + q`` for ``p``; ``r = S / N^2``.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import mpmath
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from powergrad import cross_entropy


def load_benchmark() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "benchmarks" / "audit.py"
    spec = importlib.util.spec_from_file_location("audit_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


audit = load_benchmark()

# p_y between about 0.002 and 0.998: no cancellation in 1 + (p_y - 1) worth a tolerance.
moderate = st.floats(-2, 2)
alphas = st.floats(0.05, 0.95)


@st.composite
def distributions(draw: st.DrawFn) -> Tensor:
    """A float64 distribution over 2 to 8 classes; class 0 is the true one."""
    logits = draw(st.lists(moderate, min_size=2, max_size=8))
    return torch.tensor(logits, dtype=torch.float64).softmax(0)


def hook_at(p: Tensor, n: int, scale: float, alpha: float) -> Tensor:
    """What the hook returns for one of `n` rows that all predict `p`, with true class 0."""
    labels = F.one_hot(torch.zeros(n, dtype=torch.long), len(p))
    grad = scale / n * (p - labels)
    return audit.listing_hook(grad.to(p.dtype), labels, alpha)[0]


def wanted_at(p: Tensor, n: int, scale: float, alpha: float) -> Tensor:
    powered = p.double() ** alpha
    return scale / n * (powered / powered.sum() - F.one_hot(torch.tensor(0), len(p)))


# Where it is right -------------------------------------------------------------------------------


@given(
    weights=st.lists(st.integers(1, 10**6), min_size=2, max_size=6),
    n=st.integers(1, 1000),
    alpha=alphas,
)
def test_exact_at_n_squared_in_real_arithmetic(weights: list[int], n: int, alpha: float) -> None:
    """Any N, a power of two or not: at S = N^2 the listing is the equation to 50 digits."""
    with mpmath.workdps(60):
        p = [mpmath.mpf(w) / sum(weights) for w in weights]
        q = [1, *[0] * (len(p) - 1)]
        a = mpmath.mpf(alpha)
        received = [mpmath.mpf(n**2) / n * (p_i - q_i) for p_i, q_i in zip(p, q, strict=True)]
        # The listing, line by line.
        pred = [(g / n + q_i) ** a for g, q_i in zip(received, q, strict=True)]
        pred = [v / mpmath.fsum(pred) for v in pred]
        returned = [(v - q_i) * n for v, q_i in zip(pred, q, strict=True)]
        # The equation.
        total = mpmath.fsum(mpmath.power(v, a) for v in p)
        for i, value in enumerate(returned):
            want = mpmath.mpf(n**2) / n * (mpmath.power(p[i], a) / total - q[i])
            assert abs(value - want) < n * mpmath.mpf(10) ** -50


@pytest.mark.parametrize("n", [1, 2, 48, 64, 100, 256])
def test_exact_at_n_squared_through_autograd(n: int) -> None:
    logits, target = audit.batch(n, 10, seed=1)
    got = audit.listing(logits, target, 0.3, n**2)
    want = audit.equation(logits, target, 0.3, n**2)
    # 1 + (p_y - 1) keeps p_y to 1e-16 absolute; here p_y is above 1e-4.
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12 * n)


@pytest.mark.parametrize("k", [1, 3, 4])
@pytest.mark.parametrize(("reduction", "right"), [("mean", 48**2), ("sum", 48)])
def test_the_right_scale_depends_on_the_reduction_and_on_accumulation(
    reduction: str, right: int, k: int
) -> None:
    """N^2 for a mean, N for a sum; k times that if the loss is divided by k."""
    logits, target = audit.batch(48, 10, seed=2)
    labels = F.one_hot(target, 10)
    for scale in (right * k, right * k / 2):
        got = audit.listing_hook(audit.plain(logits, target, reduction, scale / k), labels, 0.3)
        rows = 48 if reduction == "mean" else 1
        want = scale / k / rows * ((0.3 * logits).softmax(-1) - labels)
        assert torch.allclose(got, want, rtol=0, atol=1e-10) == (scale == right * k)


def test_data_parallel_needs_another_scale_than_distributed_data_parallel() -> None:
    """4 devices, 16 rows each. DDP averages a device: 16^2. DataParallel averages all: 64 * 16."""
    logits, target = audit.batch(64, 10, seed=3)
    labels = F.one_hot(target, 10)
    want = (0.3 * logits).softmax(-1) - labels

    def on_one_device(mean_over: int, scale: float) -> Tensor:
        received = scale / mean_over * (logits.softmax(-1) - labels)[:16]
        return audit.listing_hook(received, labels[:16], 0.3) / (scale / mean_over)

    for mean_over, right in ((16, 16 * 16), (64, 64 * 16)):
        torch.testing.assert_close(on_one_device(mean_over, right), want[:16])
        assert not torch.allclose(on_one_device(mean_over, right / 2), want[:16], rtol=0.1)


@given(p=distributions(), n=st.integers(1, 300), r=st.floats(1e-5, 100))
def test_alpha_1_is_right_at_every_scale_so_it_proves_nothing(p: Tensor, n: int, r: float) -> None:
    got, want = hook_at(p, n, r * n**2, 1.0), wanted_at(p, n, r * n**2, 1.0)
    # pred has entries of size r and a sum of 1, and near q it keeps 1e-16 of 1, not of r.
    atol = 1e-14 * n * max(1, r**2)
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


def test_a_scaler_starts_where_256_rows_are_right() -> None:
    assert torch.amp.GradScaler("cpu").get_scale() == 256**2


# What is wrong elsewhere -------------------------------------------------------------------------


@given(p=distributions(), n=st.integers(1, 300), r=st.floats(1e-5, 100), alpha=alphas)
def test_a_row_keeps_its_direction(p: Tensor, n: int, r: float, alpha: float) -> None:
    assume(p[0].item() > 1 - 1 / r + 1e-6)
    got, want = hook_at(p, n, r * n**2, alpha), wanted_at(p, n, r * n**2, alpha)
    torch.testing.assert_close(got / got.norm(), want / want.norm(), rtol=0, atol=1e-9)


def test_the_gradient_does_not_double_with_the_loss() -> None:
    logits, target = audit.batch(64, 10, seed=6)
    once, twice = (audit.listing(logits, target, 0.3, scale).norm() for scale in (1, 2))
    assert 1 < twice / once < 1.25


# Above N^2 ---------------------------------------------------------------------------------------


@given(p=distributions(), n=st.integers(1, 300), r=st.floats(1.01, 100), alpha=alphas)
def test_nan_exactly_when_a_true_class_is_under_1_minus_n_squared_over_s(
    p: Tensor, n: int, r: float, alpha: float
) -> None:
    p_true = p[0].item()
    assume(abs(p_true - (1 - 1 / r)) > 1e-9)
    out = hook_at(p, n, r * n**2, alpha)
    assert out.isnan().any() == out.isnan().all() == (p_true < 1 - 1 / r)


@given(
    rest=distributions(),
    margin=st.floats(0.01, 0.99),
    n=st.integers(1, 300),
    r=st.floats(2, 100),
    alpha=alphas,
)
def test_from_twice_n_squared_what_is_not_nan_is_too_small(
    rest: Tensor, margin: float, n: int, r: float, alpha: float
) -> None:
    """By N^2 / S at the worst, and silently. The proof is in docs/audit.md."""
    wrong = margin / r
    p = torch.cat([torch.tensor([1 - wrong], dtype=torch.float64), wrong * rest])
    got, want = hook_at(p, n, r * n**2, alpha), wanted_at(p, n, r * n**2, alpha)
    ratio = (got[0] / want[0]).item()
    assert (1 - 1e-9) / r <= ratio <= 1 + 1e-9


# Below N^2 ---------------------------------------------------------------------------------------


@given(p=distributions(), n=st.integers(1, 300), r=st.floats(1e-5, 0.5), alpha=alphas)
def test_up_to_half_of_n_squared_too_large_by_up_to_n_squared_over_s(
    p: Tensor, n: int, r: float, alpha: float
) -> None:
    """The proof is in docs/audit.md."""
    got, want = hook_at(p, n, r * n**2, alpha), wanted_at(p, n, r * n**2, alpha)
    ratio = (got[0] / want[0]).item()
    assert 1 - 1e-9 <= ratio <= (1 + 1e-9) / r


@pytest.mark.parametrize(("r", "p_true", "ratio"), [(0.8, 1e-6, 0.766), (1.25, 0.201, 1.171)])
def test_between_half_and_twice_n_squared_there_are_exceptions(
    r: float, p_true: float, ratio: float
) -> None:
    """Two classes: too small below N^2, too large above it, where S is near N^2."""
    p = torch.tensor([p_true, 1 - p_true], dtype=torch.float64)
    got, want = hook_at(p, 64, r * 64**2, 0.3), wanted_at(p, 64, r * 64**2, 0.3)
    assert (got[0] / want[0]).item() == pytest.approx(ratio, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_thousands_of_times_too_large_without_a_scaler(dtype: torch.dtype) -> None:
    logits, target = audit.batch(256, 1000, seed=0)
    logits = logits.to(dtype)
    found = audit.compare(
        audit.listing(logits, target, 0.3, 1), audit.equation(logits, target, 0.3, 1)
    )
    assert 1e4 < found["size"] < 256**2


# Batches that are not a power of two -------------------------------------------------------------


def test_a_power_of_two_is_a_square_of_powers_of_two_only() -> None:
    for n in range(1, 4097):
        assert math.log2(n**2).is_integer() == math.log2(n).is_integer()


@pytest.mark.parametrize(("n", "exact"), [(32, True), (256, True), (48, False), (100, False)])
def test_only_a_power_of_two_recovers_wrong_classes_bit_for_bit(n: int, exact: bool) -> None:
    """With S = N^2 set by hand. The loss of other batches is rounding: 2 half-ulps at the most."""
    logits, target = audit.batch(n, 1000, seed=4)
    wrong = F.one_hot(target, 1000) == 0
    p = audit.plain(logits.float(), target, "sum", 1)[wrong]
    recovered = audit.plain(logits.float(), target, "mean", n**2)[wrong] / n
    assert torch.equal(recovered, p) == exact
    torch.testing.assert_close(recovered, p, rtol=2 * 2.0**-24 * 1.001, atol=0)


# Sixteen bits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [4, 32, 256, 2048])
def test_float16_takes_wrong_classes_under_2_to_the_minus_25_for_0(n: int) -> None:
    """N * p is rounded to a multiple of 2^-24 and divided by N: 0 up to 2^-25 * (1 + 1/N)."""
    found = audit.largest_vanishing(torch.float16, n, true_class=False)
    assert found == pytest.approx(2**-25 * (1 + 1 / n), rel=1e-5)


def test_float16_without_a_scaler_loses_every_class_under_a_500th() -> None:
    found = audit.largest_vanishing(torch.float16, 256, true_class=False, r=256**-2)
    assert found == pytest.approx(2**-25 * 256**2 * (1 + 1 / 256), rel=1e-5)
    assert 0.0019 < found < 0.002


@pytest.mark.parametrize(
    ("dtype", "threshold"),
    [(torch.float16, 2**-12), (torch.bfloat16, 2**-9), (torch.float32, 2**-25)],
)
@pytest.mark.parametrize("n", [32, 256])
def test_true_classes_vanish_sooner(dtype: torch.dtype, threshold: float, n: int) -> None:
    """1 - p_y is rounded to 1 up to half of the spacing of numbers under 1."""
    found = audit.largest_vanishing(dtype, n, true_class=True)
    # The gradient is rounded to float32 on its way, which moves the edge by up to 2^-25.
    assert found == pytest.approx(threshold, rel=1e-5 if dtype == torch.float32 else 2**-13)


@pytest.mark.parametrize("alpha", [0.05, 0.3])
def test_a_class_that_vanished_from_the_listing_is_still_there_in_the_equation(
    alpha: float,
) -> None:
    logits = torch.tensor([0.0, -26 * math.log(2)], dtype=torch.float64).expand(256, -1)
    target = torch.zeros(256, dtype=torch.long)
    want = audit.equation(logits, target, alpha, 256**2)[0, 1].item() / 256
    assert want == pytest.approx(2 ** (-26 * alpha) / (1 + 2 ** (-26 * alpha)))
    assert audit.push_at_gap(alpha, 26 * math.log(2), 256, 2)["listing"] == 0


@pytest.mark.parametrize("alpha", [0.05, 0.25, 0.3])
def test_an_example_won_by_17_4_gets_no_gradient_at_all_in_float16(alpha: float) -> None:
    logits = torch.full((256, 1000), -17.4)
    logits[:, 0] = 0
    target = torch.zeros(256, dtype=torch.long)
    received = audit.plain(logits, target, "mean", 256**2).half()
    assert (audit.listing_hook(received, F.one_hot(target, 1000), alpha) == 0).all()
    share = 999 * math.exp(-17.4 * alpha)
    want = audit.push_at_gap(alpha, 17.4, 256, 1000)["equation"]
    assert want == pytest.approx(share / (1 + share))
    assert want > 0.8


def test_float16_logits_refuse_float32_labels_so_the_hook_ran_in_float16() -> None:
    logits = torch.zeros(4, 3, dtype=torch.float16, requires_grad=True)
    labels = F.one_hot(torch.tensor([0, 1, 2, 0]), 3)
    for allowed in (labels, labels.half()):
        handle = logits.register_hook(lambda g, q=allowed: audit.listing_hook(g, q, 0.3))
        logits.float().logsumexp(-1).sum().backward()
        handle.remove()
    logits.register_hook(lambda g: audit.listing_hook(g, labels.float(), 0.3))
    with pytest.raises(RuntimeError, match="changed the type of value"):
        logits.float().logsumexp(-1).sum().backward()


# A real scaler -----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [32, 64])
def test_the_scale_settles_at_n_squared_by_itself(n: int) -> None:
    scales = audit.train("listing", n=n, seed=0, steps=250).scales
    assert scales[0] == 65536
    assert scales.count(n**2) / len(scales) > 0.95
    assert min(scales) == n**2  # nothing is NaN there, so it never goes lower


def test_the_scale_settles_at_the_power_of_two_below_otherwise() -> None:
    scales = audit.train("listing", n=48, seed=0, steps=250).scales
    assert Counter(scales).most_common(1)[0][0] == min(scales) == 2048 < 48**2


def test_the_scale_leaves_n_squared_once_every_example_is_learnt() -> None:
    run = audit.train("listing", n=32, seed=0, steps=250, distance=4.0)
    assert run.scales[-1] > 4 * 32**2
    assert run.accuracy > 0.99


def test_the_equation_leaves_the_scaler_alone() -> None:
    run = audit.train("equation", n=64, seed=0, steps=120, growth_interval=2000)
    assert set(run.scales) == {65536}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sgd_without_a_scaler_diverges(dtype: torch.dtype) -> None:
    run = audit.train("listing", n=64, seed=0, steps=100, dtype=dtype, lr=0.01)
    assert not run.loss < 1e6  # or NaN, a little later
    assert audit.train("equation", n=64, seed=0, steps=100, dtype=dtype, lr=0.01).accuracy > 0.9


# What to use instead -----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [32, 100, 256])
@pytest.mark.parametrize("scale", [1, 1024, 65536, 2 * 256**2])
def test_cross_entropy_of_this_package_is_right_at_every_scale(n: int, scale: int) -> None:
    logits, target = audit.batch(n, 1000, seed=5)
    logits = logits.float().requires_grad_()
    (cross_entropy(logits, target, alpha=0.3) * scale).backward()
    assert logits.grad is not None
    found = audit.compare(logits.grad, audit.equation(logits.detach(), target, 0.3, scale))
    assert found["nan_rows"] == 0
    assert found["worst_row"] < 1e-6


# The page ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alpha", "low", "high"),
    [(0.05, 0.3, 0.36), (0.25, 0.88, 0.92), (0.3, 0.93, 0.95), (0.92, 0.99, 1.0)],
)
def test_the_shortfalls_that_the_page_quotes(alpha: float, low: float, high: float) -> None:
    """About a third; 10% short; 6% short; nothing."""
    results = audit.Results(audit.read_results())
    got, want = (
        results.values("gap", experiment="gap", alpha=alpha, setting=f"{m} sgd lr=0.01 steps=2000")
        for m in ("listing", "equation")
    )
    assert len(got) == len(want) == 3
    assert low < sum(got) / sum(want) < high


def test_every_result_has_its_conditions() -> None:
    results = audit.read_results()
    assert list(results[0]) == audit.FIELDS
    for row in results:
        assert row["torch"].startswith("2.")
        assert all(row[key] for key in ("experiment", "dtype", "N", "C", "S", "alpha", "metric"))
        assert row["seed"] or row["experiment"] in ("flush", "push")
    keys = [tuple(row[key] for key in audit.FIELDS[:-1]) for row in results]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("experiment", ["scale", "powers", "flush", "push"])
def test_the_quick_results_are_what_the_benchmark_measures_today(experiment: str) -> None:
    """Of the trainings only the claims are tested, above: other machines round them otherwise."""
    at_rounding = ("worst_row", "worst_relative", "bit_for_bit")

    def values(results: list[dict[str, str]]) -> dict[tuple[str, ...], float]:
        return {
            tuple(row[key] for key in audit.FIELDS if key not in ("torch", "value")): float(
                row["value"]
            )
            for row in results
            if row["experiment"] == experiment and row["metric"] not in at_rounding
        }

    measured = values(list(getattr(audit, f"measure_{experiment}")()))
    assert measured == pytest.approx(values(audit.read_results()), rel=1e-3)
