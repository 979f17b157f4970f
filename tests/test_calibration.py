"""Calibration: against torchmetrics, scikit-learn and SciPy, plain loops, and exact cases."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss, log_loss
from torch import Tensor, nn
from torchvision_shim import declare_torchvision_schemas

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


@pytest.fixture(scope="module")
def torchmetrics_ece() -> Any:
    declare_torchvision_schemas()
    classification = pytest.importorskip("torchmetrics.functional.classification")
    return classification.multiclass_calibration_error


# Measures ----------------------------------------------------------------------------------------


@given(SEEDS, st.integers(1, 80), st.integers(2, 12), TEMPERATURES)
def test_likelihood_and_brier_score_are_sklearns(seed, examples, classes, temperature) -> None:
    logits, labels = draw(seed, examples, classes)
    p = (logits / temperature).softmax(1).numpy()
    names = list(range(classes))
    options: Any = {"labels": names, "scale_by_half": False}
    expected = brier_score_loss(labels.numpy(), p, **options)
    assert brier_score(logits, labels, temperature=temperature) == pytest.approx(
        expected, abs=1e-12
    )
    ours = negative_log_likelihood(logits, labels, temperature=temperature)
    scores = (logits / temperature).numpy()
    expected = (logsumexp(scores, axis=1) - scores[np.arange(examples), labels]).mean()
    assert ours == pytest.approx(expected, rel=1e-12)
    if temperature >= 0.7:  # scikit-learn bounds probabilities by the rounding of 1
        assert ours == pytest.approx(log_loss(labels.numpy(), p, labels=names), rel=1e-9)


def far_from_edges(p: Tensor, bins: int) -> bool:
    """torchmetrics measures in float32, and gives a confidence of just 1 a bin of its own."""
    place = bins * p.amax(1)
    return bool(((place - place.round()).abs() > 1e-5).all())


@given(
    seed=SEEDS,
    examples=st.integers(1, 200),
    classes=st.integers(2, 12),
    bins=st.integers(1, 20),
    temperature=TEMPERATURES,
)
def test_calibration_error_is_torchmetrics(
    seed, examples, classes, bins, temperature, torchmetrics_ece
) -> None:
    logits, labels = draw(seed, examples, classes)
    p = (logits / temperature).softmax(1)
    assume(far_from_edges(p, bins))
    expected = torchmetrics_ece(p, labels, num_classes=classes, n_bins=bins, norm="l1")
    ours = expected_calibration_error(logits, labels, bins=bins, temperature=temperature)
    assert ours == pytest.approx(float(expected), abs=1e-6)


def test_calibration_error_of_a_segmentation_is_torchmetrics(torchmetrics_ece) -> None:
    flat, labels = draw(0, 6 * 5 * 4, 3)
    logits, labels = flat.reshape(6, 5, 4, 3).movedim(-1, 1), labels.reshape(6, 5, 4)
    assert far_from_edges(flat.softmax(1), 15)
    expected = torchmetrics_ece(logits.softmax(1), labels, num_classes=3, n_bins=15, norm="l1")
    flat = logits.movedim(1, -1).flatten(0, -2)
    ours = expected_calibration_error(flat, labels.flatten(), bins=15)
    assert ours == pytest.approx(float(expected), abs=1e-6)


def by_hand(
    logits: Tensor, labels: Tensor, bins: int, temperature: float, binning: str
) -> tuple[list[list[float]], list[list[bool]]]:
    """The confidences and the hits of each bin, sorted example by example."""
    p = np.exp((logits - logits.amax(1, keepdim=True)).numpy() / temperature)
    p = p / p.sum(1, keepdims=True)
    confidence = p.max(1).tolist()
    order = sorted(confidence)
    confidences: list[list[float]] = [[] for _ in range(bins)]
    hits: list[list[bool]] = [[] for _ in range(bins)]
    for i, c in enumerate(confidence):
        if binning == "width":
            place = sum(c >= k / bins for k in range(1, bins))
        else:  # after every bin whose last example is below
            place = sum(c > order[math.ceil(k * len(order) / bins) - 1] for k in range(1, bins))
        confidences[place].append(c)
        hits[place].append(bool(p[i].argmax() == labels[i]))
    return confidences, hits


@pytest.mark.parametrize("binning", ["width", "mass"])
@given(SEEDS, st.integers(1, 60), st.integers(1, 20), TEMPERATURES)
def test_diagram_and_error_by_hand(binning, seed, examples, bins, temperature) -> None:
    logits, labels = draw(seed, examples, 5)
    confidences, hits = by_hand(logits, labels, bins, temperature, binning)
    if binning == "mass":  # nearly equal confidences may round to either order
        assume(np.diff(sorted(itertools.chain(*confidences))).min(initial=1) > 1e-12)
    ours = reliability(logits, labels, bins=bins, temperature=temperature, binning=binning)
    assert ours.count.tolist() == [len(h) for h in hits]
    error = 0.0
    for c, h, confidence, accuracy in zip(
        confidences, hits, ours.confidence.tolist(), ours.accuracy.tolist(), strict=True
    ):
        if h:
            assert confidence == pytest.approx(np.mean(c), abs=1e-13)
            assert accuracy == pytest.approx(np.mean(h), abs=1e-13)
            error += len(h) / examples * abs(float(np.mean(h) - np.mean(c)))
        else:
            assert math.isnan(confidence)
            assert math.isnan(accuracy)
    measured = expected_calibration_error(
        logits, labels, bins=bins, temperature=temperature, binning=binning
    )
    assert measured == pytest.approx(error, abs=1e-13)


@pytest.mark.parametrize(("binning", "strategy"), [("width", "uniform"), ("mass", "quantile")])
@given(SEEDS, st.integers(1, 12), st.integers(1, 12))
def test_diagram_is_sklearns(binning, strategy, seed, bins, share) -> None:
    logits, labels = draw(seed, bins * share, 4)  # quantiles part equal shares as we do
    confidence, predicted = logits.softmax(1).max(1)
    accuracy, mean = calibration_curve(
        (predicted == labels).numpy(),
        confidence.numpy(),
        n_bins=bins,
        strategy=strategy,
        pos_label=1,
    )
    ours = reliability(logits, labels, bins=bins, binning=binning)
    filled = ours.count > 0
    np.testing.assert_allclose(ours.accuracy[filled], accuracy, atol=1e-12)
    np.testing.assert_allclose(ours.confidence[filled], mean, atol=1e-12)


@given(SEEDS, st.integers(15, 100), st.integers(1, 15))
def test_bins_of_equal_mass_are_equal(seed, examples, bins) -> None:
    count = reliability(*draw(seed, examples, 4), bins=bins, binning="mass").count
    assert count.max() - count.min() <= 1


@pytest.mark.parametrize("binning", ["width", "mass"])
@given(SEEDS)
def test_order_of_examples_does_not_matter_even_among_equals(binning, seed) -> None:
    logits, labels = draw(seed, 40, 3)
    logits = logits.round().clamp(-1, 1)  # many examples of one confidence
    order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
    ours = [
        expected_calibration_error(z, y, bins=7, binning=binning)
        for z, y in ((logits, labels), (logits[order], labels[order]))
    ]
    assert ours[0] == pytest.approx(ours[1], abs=1e-14)


def test_a_confidence_on_an_edge_belongs_above_it() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf, -torch.inf], [0.0, 0.0, 0.0, 0.0]])  # 1/2, 1/4
    assert reliability(logits, torch.tensor([0, 0]), bins=4).count.tolist() == [0, 1, 1, 0]


def test_certainty_belongs_to_the_last_bin() -> None:
    logits = torch.tensor([[1e4, 0.0], [math.log(19), 0.0]])  # confidences 1 and 0.95
    diagram = reliability(logits, torch.tensor([1, 0]), bins=10)
    assert diagram.count.tolist() == [0] * 9 + [2]
    assert diagram.accuracy[-1] == 0.5
    assert float(diagram.confidence[-1]) == pytest.approx(0.975, abs=1e-7)  # log 19 in float32


def test_calibrated_predictions_have_no_error() -> None:
    """Ten predictions of 0.8, eight of them right, and four of 1/2."""
    p = torch.tensor([[0.8, 0.2]] * 10 + [[0.5, 0.5]] * 4, dtype=torch.float64)
    labels = torch.tensor([0] * 8 + [1] * 2 + [0, 0, 1, 1])
    for binning in ("width", "mass"):
        error = expected_calibration_error(p.log(), labels, bins=5, binning=binning)
        assert error == pytest.approx(0, abs=1e-15)
    assert brier_score(p.log(), labels) == pytest.approx((10 * 0.32 + 4 * 0.5) / 14, abs=1e-15)


@pytest.mark.parametrize("measure", MEASURES)
@given(SEEDS, st.floats(-1e4, 1e4), TEMPERATURES)
def test_invariances(measure, seed, offset, temperature) -> None:
    logits, labels = draw(seed, 30, 6)
    expected = measure(logits, labels, temperature=temperature)
    # The offset rounds logits to 1e-12, which a temperature of 0.05 makes 2e-11.
    moved = measure(logits + offset, labels, temperature=temperature)
    assert moved == pytest.approx(expected, abs=1e-8)
    scaled = measure(logits / temperature, labels)
    assert scaled == pytest.approx(expected, abs=1e-12)
    masked = torch.cat([logits, torch.full((30, 2), -torch.inf)], 1)
    assert measure(masked, labels, temperature=temperature) == pytest.approx(expected, abs=1e-13)


@pytest.mark.parametrize("measure", MEASURES)
def test_no_temperature_overflows(measure) -> None:
    logits, labels = draw(0, 30, 6)
    for temperature in (1e-300, 1e300):
        assert math.isfinite(measure(logits, labels, temperature=temperature))
    uniform = {negative_log_likelihood: math.log(6), brier_score: 5 / 6}
    if measure in uniform:
        hot = measure(logits, labels, temperature=1e300)
        assert hot == pytest.approx(uniform[measure], rel=1e-12)


@pytest.mark.parametrize("measure", [*MEASURES, fit_temperature])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_any_precision_is_measured_in_double(measure, dtype) -> None:
    logits, labels = draw(0, 50, 4)
    logits = logits.to(dtype).requires_grad_()
    before = logits.detach().clone()
    assert measure(logits, labels.int()) == measure(logits.detach().double(), labels)
    assert torch.equal(logits, before)


# The temperature ---------------------------------------------------------------------------------


@given(SEEDS, st.integers(5, 60), st.integers(2, 8), st.floats(-5, 5))
def test_temperature_is_scipys(seed, examples, classes, magnitude) -> None:
    logits, labels = draw(seed, examples, classes, scale=10**magnitude)
    try:
        ours = fit_temperature(logits, labels)
    except ValueError:
        assume(False)
        raise
    result: Any = minimize_scalar(
        lambda log_t: negative_log_likelihood(logits, labels, temperature=ours * math.exp(log_t)),
        bounds=(-3, 3),
        method="bounded",
        options={"xatol": 1e-10},
    )
    # A minimum is known to the root of the rounding, where it is flat less well.
    assert result.fun >= negative_log_likelihood(logits, labels, temperature=ours) - 1e-14
    beta = torch.tensor(1 / ours, dtype=torch.float64, requires_grad=True)
    F.cross_entropy(beta * logits, labels).backward()
    assert abs(float(beta.grad)) <= 1e-11 * float(logits.abs().max())  # pyright: ignore


def test_temperature_of_two_classes_has_a_closed_form() -> None:
    """Three of four right at a difference of 6: sigmoid(6 / T) = 3 / 4."""
    logits = torch.tensor([[6.0, 0.0]] * 4)
    ours = fit_temperature(logits, torch.tensor([0, 0, 0, 1]))
    assert ours == pytest.approx(6 / math.log(3), rel=1e-12)


@given(SEEDS, st.sampled_from([1e-6, 0.05, 3.0, 1e8]), st.floats(-10, 10))
def test_temperature_scales_with_logits(seed, factor, offset) -> None:
    logits, labels = draw(seed, 60, 4)
    logits = torch.cat([logits, torch.full((60, 1), -torch.inf)], 1)  # a masked class
    expected = fit_temperature(logits[:, :4], labels)
    assert fit_temperature(factor * logits, labels) == pytest.approx(factor * expected, rel=1e-9)
    assert fit_temperature(logits + offset, labels) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("alpha", [0.05, 0.3, 1.0])
def test_trained_with_pgt_the_best_temperature_is_one_over_alpha(alpha) -> None:
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
        return loss

    optimizer.step(closure)
    logits = model(x)
    assert fit_temperature(logits, labels) == pytest.approx(1 / alpha, rel=1e-4)
    fold_alpha(model, alpha)
    assert fit_temperature(model(x), labels) == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        ([[2.0, 1.0], [0.0, 3.0]], [0, 1], "every lower temperature"),
        ([[2.0, 1.0], [0.0, 3.0]], [1, 0], "every higher temperature"),
        ([[2.0, 1.0], [2.0, 1.0]], [1, 0], "every higher temperature"),
        ([[1.0, 1.0]], [0], "every lower temperature"),
        ([[0.0, -math.inf], [1.0, 0.0]], [1, 1], "finite, but got -inf"),
    ],
)
def test_where_no_temperature_is_best(logits, labels, message) -> None:
    with pytest.raises(ValueError, match=message):
        fit_temperature(torch.tensor(logits), torch.tensor(labels))


# What is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", [*MEASURES, fit_temperature, reliability])
@pytest.mark.parametrize(
    ("logits", "labels", "error", "message"),
    [
        (torch.zeros(0, 3), torch.zeros(0).long(), ValueError, r"`logits`.*\(0, 3\)"),
        (torch.zeros(2, 0), torch.zeros(2).long(), ValueError, r"`logits`.*\(2, 0\)"),
        (torch.zeros(3), torch.zeros(3).long(), ValueError, r"`logits`.*\(3,\)"),
        (torch.zeros(2, 3, 4), torch.zeros(2, 4).long(), ValueError, r"`logits`.*\(2, 3, 4\)"),
        (torch.zeros(2, 3), torch.zeros(3).long(), ValueError, r"`labels`.*\(2,\).*\(3,\)"),
        (torch.zeros(2, 3), torch.zeros(2, 3).long(), ValueError, r"`labels`.*\(2, 3\)"),
        (torch.zeros(2, 3), torch.tensor([0, 3]), ValueError, r"`labels`.*\[0, 2\].*from 0 to 3"),
        (torch.zeros(2, 3), torch.tensor([0, -1]), ValueError, r"`labels`.*from -1 to 0"),
        (torch.zeros(2, 3), torch.zeros(2), TypeError, r"`labels`.*float32"),
        (torch.zeros(2, 3), torch.zeros(2).bool(), TypeError, r"`labels`.*bool"),
        (torch.zeros(2, 3), [0, 1], TypeError, r"`labels`.*list"),
        (torch.zeros(2, 3).long(), torch.zeros(2).long(), TypeError, r"`logits`.*int64"),
        (torch.tensor([[0.0, math.nan]]), torch.tensor([0]), ValueError, r"`logits`.*NaN"),
        (torch.tensor([[0.0, math.inf]]), torch.tensor([0]), ValueError, r"`logits`.*inf"),
        (torch.full((1, 2), -math.inf), torch.tensor([0]), ValueError, r"`logits`.*-inf for all"),
    ],
)
def test_bad_examples(measure, logits, labels, error, message) -> None:
    with pytest.raises(error, match=f"Expected {message}"):
        measure(logits, labels)


@pytest.mark.parametrize("measure", [*MEASURES, reliability])
@pytest.mark.parametrize("temperature", [0, 0.0, -1.0, math.nan, math.inf])
def test_temperatures_out_of_range(measure, temperature) -> None:
    with pytest.raises(ValueError, match=f"Expected `temperature`.*{temperature}"):
        measure(torch.zeros(2, 3), torch.tensor([0, 1]), temperature=temperature)


@pytest.mark.parametrize("measure", [expected_calibration_error, reliability])
def test_other_arguments_out_of_range(measure) -> None:
    examples = torch.zeros(2, 3), torch.tensor([0, 1])
    for bins in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match=f"Expected `bins`.*{bins}"):
            measure(*examples, bins=bins)
    with pytest.raises(ValueError, match=r"Expected `binning`.*'quantile'"):
        measure(*examples, binning="quantile")
    for temperature in ("1", True, torch.tensor(1.0)):
        with pytest.raises(TypeError, match="Expected `temperature`"):
            measure(*examples, temperature=temperature)


# The head ----------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self, by_memory: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        if by_memory:
            self.head.weight.data = self.embedding.weight.data
        else:
            self.head.weight = self.embedding.weight


def network(**config: Any) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    if config:
        model.config = SimpleNamespace(**config)  # pyright: ignore[reportArgumentType]
    return model


@pytest.mark.parametrize("alpha", [0.05, 0.3, 1, 2.5, np.float32(0.25)])
@pytest.mark.parametrize(
    ("head", "shape"),
    [
        (lambda: nn.Linear(5, 4), (9, 5)),
        (lambda: nn.Linear(5, 4, bias=False), (9, 5)),
        (lambda: nn.Conv2d(5, 4, 3), (2, 5, 6, 6)),
        (lambda: nn.Conv1d(6, 4, 1, groups=2), (2, 6, 6)),
    ],
)
def test_logits_are_scaled_and_classes_stay(head, shape, alpha) -> None:
    torch.manual_seed(0)
    layer, x = head().double(), torch.randn(shape, dtype=torch.float64)
    before = layer(x)
    assert fold_alpha(layer, alpha) is layer
    after = layer(x)
    torch.testing.assert_close(after, alpha * before, rtol=1e-12, atol=1e-14)
    assert torch.equal(after.argmax(1), before.argmax(1))
    assert all(p.requires_grad and p.grad_fn is None for p in layer.parameters())


def test_folding_is_reading_at_the_temperature() -> None:
    torch.manual_seed(0)
    model = network().double()
    x, labels = 20 * torch.randn(50, 6, dtype=torch.float64), torch.randint(4, (50,))
    expected = [measure(model(x), labels, temperature=1 / 0.2) for measure in MEASURES]
    fold_alpha(None, 0.2, model=model)
    ours = [measure(model(x), labels) for measure in MEASURES]
    assert ours == pytest.approx(expected, abs=1e-12)


def test_head_is_found_in_the_model() -> None:
    for which in ("the module", "its name", "none"):
        model = network(attn_logit_softcapping=50.0, final_logit_softcapping=None)
        body, head = (
            model.get_parameter("0.weight").clone(),
            model.get_parameter("2.weight").clone(),
        )
        chosen = {"the module": model[2], "its name": "2", "none": None}[which]
        assert fold_alpha(chosen, 0.5, model=model) is model[2]
        assert torch.equal(model.get_parameter("2.weight"), 0.5 * head)
        assert torch.equal(model.get_parameter("0.weight"), body)


@pytest.mark.parametrize("by_memory", [False, True])
def test_tied_heads_are_refused(by_memory) -> None:
    model = Tied(by_memory)
    before = model.head.weight.clone()
    with pytest.raises(ValueError, match=r"shared by embedding\.weight and head\.weight"):
        fold_alpha(model.head, 0.5, model=model)
    assert torch.equal(model.head.weight, before)


@pytest.mark.parametrize(
    "name", ["final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"]
)
def test_capped_logits_are_refused(name) -> None:
    outer = nn.Sequential(network(**{name: 30.0}))  # the part that has the head says so
    before = outer.get_parameter("0.2.weight").clone()
    with pytest.raises(ValueError, match=rf"`config\.{name}` = 30\.0"):
        fold_alpha(None, 0.5, model=outer)
    assert torch.equal(outer.get_parameter("0.2.weight"), before)


def test_caps_elsewhere_are_not() -> None:
    model = network(attn_logit_softcapping=50.0, router_logit_softcapping=30.0, vocab_size=3)
    before = model.get_parameter("2.weight").clone()
    fold_alpha(None, 0.5, model=model)
    assert torch.equal(model.get_parameter("2.weight"), before * 0.5)


def test_parametrised_heads_are_refused() -> None:
    new = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    with pytest.warns(FutureWarning, match="weight_norm"):
        old = nn.utils.weight_norm(nn.Linear(3, 2))
    for head in (new, old):
        with pytest.raises(ValueError, match="parametrised"):
            fold_alpha(head, 0.5)


@pytest.mark.parametrize("alpha", [0, 0.0, -0.5, math.nan, math.inf])
def test_alphas_out_of_range(alpha) -> None:
    with pytest.raises(ValueError, match=f"Expected `alpha`.*{alpha}"):
        fold_alpha(nn.Linear(3, 2), alpha)


def test_bad_heads() -> None:
    with pytest.raises(TypeError, match=r"Expected `alpha`.*Tensor"):
        fold_alpha(nn.Linear(3, 2), torch.tensor(0.5))  # pyright: ignore
    with pytest.raises(ValueError, match=r"linear layer or a convolution.*Sequential"):
        fold_alpha(network(), 0.5)
    with pytest.raises(TypeError, match=r"Expected `head` to be a module.*str"):
        fold_alpha("2", 0.5)
    with pytest.raises(TypeError, match=r"Expected `head` to be a module.*NoneType"):
        fold_alpha(None, 0.5)
    with pytest.raises(ValueError, match="to be a module of `model`"):
        fold_alpha(nn.Linear(5, 4), 0.5, model=network())
    with pytest.raises(ValueError, match="a ReLU"):
        fold_alpha("1", 0.5, model=network())
