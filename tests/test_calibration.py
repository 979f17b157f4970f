"""Calibration: against NumPy, scikit-learn and SciPy, and exact cases."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import logsumexp, softmax
from sklearn.metrics import brier_score_loss
from torch import Tensor, nn

import powergrad
from powergrad.calibration import (
    brier_score,
    expected_calibration_error,
    fit_temperature,
    fold_alpha,
    negative_log_likelihood,
    reliability,
)

MEASURES = [negative_log_likelihood, brier_score, expected_calibration_error]
SEEDS = st.integers(0, 2**32 - 1)
TEMPERATURES = st.sampled_from([0.05, 0.7, 1.0, 4.0, 100.0])


def draw(seed: int, examples: int, classes: int, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    """Logits, and labels of which about half are the largest."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(examples, classes, generator=generator, dtype=torch.float64)
    others = torch.randint(classes, (examples,), generator=generator)
    right = torch.rand(examples, generator=generator) < 0.5
    return logits, torch.where(right, logits.argmax(1), others)


@given(SEEDS, st.integers(1, 80), st.integers(2, 12), TEMPERATURES)
def test_likelihood_and_brier_score_are_scipys_and_sklearns(
    seed, examples, classes, temperature
) -> None:
    logits, labels = draw(seed, examples, classes)
    scores = (logits / temperature).numpy()
    options: Any = {"labels": list(range(classes)), "scale_by_half": False}
    expected = brier_score_loss(labels.numpy(), softmax(scores, axis=1), **options)
    ours = brier_score(logits, labels, temperature=temperature)
    assert ours == pytest.approx(expected, abs=1e-12)
    expected = (logsumexp(scores, axis=1) - scores[np.arange(examples), labels]).mean()
    ours = negative_log_likelihood(logits, labels, temperature=temperature)
    assert ours == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("binning", ["width", "mass"])
@given(SEEDS, st.integers(1, 60), st.integers(1, 20), TEMPERATURES)
def test_diagram_by_numpy(binning, seed, examples, bins, temperature) -> None:
    logits, labels = draw(seed, examples, 5)
    p = softmax(logits.numpy() / temperature, axis=1)
    confidence, right = p.max(1), (logits.argmax(1) == labels).numpy()
    order = confidence.argsort()
    # Nearly equal confidences may round to either order.
    assume(binning == "width" or np.diff(confidence[order]).min(initial=1) > 1e-12)
    cuts = np.arange(1, bins) / bins
    if binning == "width":
        cuts = np.searchsorted(confidence[order], cuts)
    else:
        cuts = -(-np.arange(1, bins) * examples // bins)
    groups = np.split(order, cuts)
    options: Any = {"bins": bins, "temperature": temperature, "binning": binning}
    ours = reliability(logits, labels, **options)
    assert ours.count.tolist() == [len(group) for group in groups]
    for actual, values in ((ours.confidence, confidence), (ours.accuracy, right)):
        means = [values[group].mean() if len(group) else math.nan for group in groups]
        np.testing.assert_allclose(actual, means, rtol=0, atol=1e-13)
    error = sum(abs(confidence[group].sum() - right[group].sum()) for group in groups) / examples
    ours = expected_calibration_error(logits, labels, **options)
    assert ours == pytest.approx(error, abs=1e-13)


@given(SEEDS)
def test_order_of_examples_does_not_matter_even_among_equals(seed) -> None:
    logits, labels = draw(seed, 40, 3)
    logits = logits.round().clamp(-1, 1)  # many examples of one confidence
    order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
    ours = [
        expected_calibration_error(z, y, bins=7, binning="mass")
        for z, y in ((logits, labels), (logits[order], labels[order]))
    ]
    assert ours[0] == pytest.approx(ours[1], abs=1e-14)


@pytest.mark.parametrize(
    ("p", "bins", "count"),
    [
        ([[0.5, 0.5, 0.0, 0.0], [0.25] * 4], 4, [0, 1, 1, 0]),  # edges belong above
        ([[1.0, 0.0], [0.95, 0.05]], 10, [0] * 9 + [2]),  # 1 belongs to the last bin
    ],
)
def test_confidence_on_an_edge(p, bins, count) -> None:
    logits = torch.tensor(p, dtype=torch.float64).log()
    assert reliability(logits, torch.tensor([0, 0]), bins=bins).count.tolist() == count


@pytest.mark.parametrize("measure", MEASURES)
@given(SEEDS, st.floats(-1e4, 1e4), TEMPERATURES)
def test_invariances(measure, seed, offset, temperature) -> None:
    logits, labels = draw(seed, 30, 6)
    expected = measure(logits, labels, temperature=temperature)
    # The offset rounds logits to 1e-12, which a temperature of 0.05 makes 2e-11.
    moved = measure(logits + offset, labels, temperature=temperature)
    assert moved == pytest.approx(expected, abs=1e-8)
    masked = torch.cat([logits, torch.full((30, 2), -torch.inf)], 1)
    assert measure(masked, labels, temperature=temperature) == pytest.approx(expected, abs=1e-13)


def test_no_temperature_overflows() -> None:
    logits, labels = draw(0, 30, 6)
    accuracy = float((logits.argmax(1) == labels).double().mean())
    hot = [math.log(6), 5 / 6, accuracy - 1 / 6]  # every probability is 1 / 6
    for measure, expected in zip(MEASURES, hot, strict=True):
        assert math.isfinite(measure(logits, labels, temperature=1e-300))
        assert measure(logits, labels, temperature=1e300) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("measure", [*MEASURES, fit_temperature])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_precision_is_measured_in_double(measure, dtype) -> None:
    logits, labels = draw(0, 50, 4)
    logits = logits.to(dtype).requires_grad_()
    before = logits.detach().clone()
    assert measure(logits, labels.int()) == measure(logits.detach().double(), labels)
    assert torch.equal(logits, before)


@given(SEEDS, st.integers(20, 60), st.integers(2, 8), st.floats(-5, 5))
def test_temperature_is_scipys(seed, examples, classes, magnitude) -> None:
    logits, labels = draw(seed, examples, classes, scale=10**magnitude)

    def slope(log_beta: float) -> float:
        p = softmax(math.exp(log_beta) * logits.numpy() / 10**magnitude, axis=1)
        at_label = logits.gather(1, labels[:, None]).squeeze(1)
        return float(((torch.from_numpy(p) * logits).sum(1) - at_label).mean())

    assume(slope(-9) < 0 < slope(9))
    log_beta: Any = brentq(slope, -9, 9, xtol=1e-13)
    expected = 10**magnitude / math.exp(log_beta)
    assert fit_temperature(logits, labels) == pytest.approx(expected, rel=1e-9)


@given(SEEDS, st.sampled_from([1e-6, 0.05, 3.0, 1e8]), st.floats(-10, 10))
def test_temperature_scales_with_logits(seed, factor, offset) -> None:
    logits, labels = draw(seed, 60, 4)
    logits = torch.cat([logits, torch.full((60, 1), -torch.inf)], 1)  # a masked class
    expected = fit_temperature(logits[:, :4], labels)
    assert fit_temperature(factor * logits, labels) == pytest.approx(factor * expected, rel=1e-9)
    assert fit_temperature(logits + offset, labels) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("alpha", [0.05, 0.3, 1.0])
def test_best_temperature_after_pgt_is_one_over_alpha(alpha) -> None:
    """Exactly so on its own examples, for a linear classifier trained to the end."""
    x = torch.randn(80, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    _, labels = draw(1, 80, 3)
    labels = torch.where(torch.arange(80) % 3 > 0, x.argmax(1), labels)
    model = nn.Linear(3, 3).double()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=500, tolerance_change=0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = powergrad.cross_entropy(model(x), labels, alpha=alpha)
        loss.backward()
        return loss.detach()

    optimizer.step(closure)
    assert fit_temperature(model(x), labels) == pytest.approx(1 / alpha, rel=1e-4)
    fold_alpha(model, alpha)
    assert fit_temperature(model(x), labels) == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize(
    ("logits", "labels", "word"),
    [
        ([[2.0, 1.0], [0.0, 3.0]], [0, 1], "lower"),
        ([[2.0, 1.0], [0.0, 3.0]], [1, 0], "higher"),
        ([[2.0, 1.0], [2.0, 1.0]], [1, 0], "higher"),
        ([[1.0, 1.0]], [0], "lower"),
        ([[0.0, -math.inf], [1.0, 0.0]], [1, 1], "-inf"),
    ],
)
def test_no_best_temperature_raises(logits, labels, word) -> None:
    with pytest.raises(ValueError, match=word):
        fit_temperature(torch.tensor(logits), torch.tensor(labels))


Z, Y = torch.zeros(2, 3), torch.zeros(2).long()
BAD_LOGITS = [
    *(torch.zeros(shape) for shape in ((0, 3), (2, 0), (3,), (2, 3, 4))),
    *(torch.tensor([[0.0, x], [0.0, 1.0]]) for x in (math.nan, math.inf)),
    torch.tensor([[0.0, 1.0], [-math.inf, -math.inf]]),
]
BAD_LABELS = [torch.zeros(3).long(), torch.zeros(2, 3).long(), Y + 3, Y - 1]
BINNED = [expected_calibration_error, reliability]


@pytest.mark.parametrize(
    ("name", "values", "error", "calls"),
    [
        ("logits", BAD_LOGITS, ValueError, [*MEASURES, reliability, fit_temperature]),
        ("logits", [Z.long()], TypeError, [*MEASURES, reliability, fit_temperature]),
        ("labels", BAD_LABELS, ValueError, [*MEASURES, reliability, fit_temperature]),
        ("labels", [Y.float(), Y.bool(), [0, 1]], TypeError, [*MEASURES, fit_temperature]),
        ("temperature", [0, -1.0, math.nan, math.inf], ValueError, [*MEASURES, reliability]),
        ("temperature", ["1", True, torch.tensor(1.0)], TypeError, [*MEASURES, reliability]),
        ("bins", [0, -1, 2.0, True], ValueError, BINNED),
        ("binning", ["quantile"], ValueError, BINNED),
    ],
)
def test_bad_arguments_raise(name, values, error, calls) -> None:
    for call, value in itertools.product(calls, values):
        with pytest.raises(error, match=f"Expected `{name}`"):
            call(**{"logits": Z, "labels": Y, name: value})
