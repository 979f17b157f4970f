r"""Calibration: metrics, temperature fitting, and folding the temperature into the head.

Training with PGT at ``alpha`` fits ``softmax(alpha z)``, so the network is calibrated about as well
at temperature ``1 / alpha`` as after plain training at 1. Every metric takes a temperature ``T``
and evaluates ``softmax(z / T)``; :func:`fold_alpha` scales the head so that none is needed.

Metrics are computed from logits, in float64. For probabilities ``p`` pass ``p.log()``. For
segmentation, pass ``logits.movedim(1, -1).flatten(0, -2)`` and ``labels.flatten()``.

References: Guo et al., *On Calibration of Modern Neural Networks*, 2017. Nixon et al., *Measuring
Calibration in Deep Learning*, 2019. Brier, *Verification of Forecasts Expressed in Terms of
Probability*, 1950.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from powergrad.checks import check_floating, check_number, extremes, shape_of
from powergrad.head import check_linear, scalable_heads, scale

__all__ = [
    "Reliability",
    "brier_score",
    "expected_calibration_error",
    "fit_temperature",
    "fold_alpha",
    "negative_log_likelihood",
    "reliability",
]

Binning = Literal["width", "mass"]


def negative_log_likelihood(logits: Tensor, labels: Tensor, *, temperature: float = 1.0) -> float:
    r"""The mean of ``-log p[label]`` with ``p = softmax(logits / temperature)``.

    Args:
        logits: ``(N, C)``. Classes may be masked with ``-inf``.
        labels: Class indices, ``(N,)``.
        temperature: The divisor of the logits, above 0.

    Returns:
        The mean over the examples, in nats.

    Raises:
        ValueError: If a shape or value is out of range, or there are no examples.
        TypeError: If the logits are not floating-point, the labels not integers, or the temperature
            not a number.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
        >>> round(negative_log_likelihood(logits, torch.tensor([0, 0])), 4)
        0.7201
    """
    z, labels, _ = _prepare(logits, labels, temperature)
    return float(F.cross_entropy(z, labels))


def brier_score(logits: Tensor, labels: Tensor, *, temperature: float = 1.0) -> float:
    r"""The mean squared distance from ``p = softmax(logits / temperature)`` to the label.

    The score of an example is ``sum_c (p_c - [c is the label])^2``, from 0 to 2 as Brier defines
    it. (For two classes, some definitions use one class only, which gives half of this.)

    Args:
        logits: ``(N, C)``, as in :func:`negative_log_likelihood`.
        labels: Class indices, ``(N,)``.
        temperature: The divisor of the logits, above 0.

    Returns:
        The mean over the examples.

    Raises:
        ValueError: As :func:`negative_log_likelihood`.
        TypeError: As :func:`negative_log_likelihood`.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
        >>> round(brier_score(logits, torch.tensor([0, 0])), 4)
        0.5487
    """
    z, labels, _ = _prepare(logits, labels, temperature)
    return float((z.softmax(1) - F.one_hot(labels, z.shape[1])).square().sum(1).mean())


def expected_calibration_error(
    logits: Tensor,
    labels: Tensor,
    *,
    bins: int = 15,
    temperature: float = 1.0,
    binning: Binning = "width",
) -> float:
    r"""The mean of ``|accuracy - confidence|`` over bins, weighted by their numbers of examples.

    The confidence of an example is its largest probability. With few examples per bin, the error is
    above 0 even for a calibrated classifier.

    Args:
        logits: ``(N, C)``, as in :func:`negative_log_likelihood`.
        labels: Class indices, ``(N,)``.
        bins: The number of bins.
        temperature: The divisor of the logits, above 0.
        binning: ``"width"`` splits [0, 1] into bins of equal width (Guo et al.); ``"mass"`` sorts
            the examples by confidence and puts the same number into each bin (the adaptive error of
            Nixon et al.).

    Returns:
        The error, in [0, 1].

    Raises:
        ValueError: As :func:`negative_log_likelihood`; also if `bins` or `binning` is invalid.
        TypeError: As :func:`negative_log_likelihood`.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
        >>> round(expected_calibration_error(logits, torch.tensor([0, 0])), 4)
        0.4251
    """
    diagram = reliability(logits, labels, bins=bins, temperature=temperature, binning=binning)
    gaps = (diagram.accuracy - diagram.confidence).abs().nan_to_num()
    return float((gaps * diagram.count).sum() / diagram.count.sum())


@dataclass(frozen=True)
class Reliability:
    """A reliability diagram: tensors of shape ``(bins,)`` on the CPU, in the order of confidence.

    Attributes:
        confidence: The mean confidence of the examples in each bin; NaN for an empty bin.
        accuracy: The fraction of correctly classified examples in each bin; NaN for an empty bin.
        count: The number of examples in each bin.
    """

    confidence: Tensor
    accuracy: Tensor
    count: Tensor


def reliability(
    logits: Tensor,
    labels: Tensor,
    *,
    bins: int = 15,
    temperature: float = 1.0,
    binning: Binning = "width",
) -> Reliability:
    r"""The reliability diagram: how often predictions of each confidence are correct.

    Bins of equal width are ``[k / bins, (k + 1) / bins)``; the last one includes 1. Bins of equal
    mass hold the same number of examples, plus or minus one; equal confidences share a bin.

    Args:
        logits: ``(N, C)``, as in :func:`expected_calibration_error`.
        labels: Class indices, ``(N,)``.
        bins: As in :func:`expected_calibration_error`.
        temperature: The divisor of the logits, above 0.
        binning: As in :func:`expected_calibration_error`.

    Returns:
        Mean confidence, accuracy and number of examples per bin.

    Raises:
        ValueError: As :func:`expected_calibration_error`.
        TypeError: As :func:`expected_calibration_error`.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
        >>> diagram = reliability(logits, torch.tensor([0, 0]), bins=4)
        >>> diagram.count
        tensor([0, 0, 1, 1])
        >>> diagram.accuracy
        tensor([nan, nan, 0., 1.], dtype=torch.float64)
    """
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
        raise ValueError(f"Expected `bins` to be a positive integer, but got {bins!r}.")
    z, labels, predicted = _prepare(logits, labels, temperature)
    confidence = z.exp().sum(1).reciprocal().cpu()  # of the largest logit, which is 0 in z
    right = (predicted == labels).double().cpu()
    if binning == "width":
        edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device="cpu")[1:-1]
        place = torch.bucketize(confidence, edges, right=True)
    elif binning == "mass":
        # Bin k ends with the ceil(k N / bins)-th example, and with all of the same confidence.
        ends = (torch.arange(1, bins, device="cpu") * len(z) + bins - 1) // bins - 1
        place = torch.bucketize(confidence, confidence.sort().values[ends])
    else:
        raise ValueError(f"Expected `binning` to be 'width' or 'mass', but got {binning!r}.")
    count = place.bincount(minlength=bins)
    return Reliability(
        confidence=place.bincount(confidence, minlength=bins) / count,
        accuracy=place.bincount(right, minlength=bins) / count,
        count=count,
    )


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    r"""The temperature that minimises the negative log-likelihood.

    Fit it on examples that were not used for training, and evaluate it on others. After training
    with PGT, compare it with ``1 / alpha``.

    Args:
        logits: ``(N, C)``.
        labels: Class indices, ``(N,)``.

    Returns:
        The temperature, to about 12 digits.

    Raises:
        ValueError: As :func:`negative_log_likelihood`; also if there is no best temperature: if
            every prediction is correct (the lower, the better), or if the labels' logits are on
            average no larger than the mean logit (the higher, the better).
        TypeError: As :func:`negative_log_likelihood`.

    Example:
        >>> logits = torch.tensor([[3.0, 0.0], [3.0, 0.0], [0.0, 3.0]])
        >>> labels = torch.tensor([0, 1, 1])  # two of three right: softmax(3 / T, 0) = 2 / 3
        >>> round(fit_temperature(logits, labels), 6)
        4.328085
    """
    # In beta = 1 / T the objective f(beta) = mean(log sum exp(beta z) - beta z_label) is convex, so
    # f' = mean(E[z] - z_label) under softmax(beta z) increases, from its value at 0 to its limit at
    # infinity, where E[z] is the largest z, here 0. Its derivative is mean(Var[z]).
    z, labels, _ = _prepare(logits, labels, 1.0)
    at_label = z.gather(1, labels[:, None]).squeeze(1)
    if at_label.isinf().any():
        raise ValueError("Expected `logits` of the labels to be finite, but got -inf.")
    masked = z.isinf()
    z = z.masked_fill(masked, 0.0)
    scale = float(z.abs().mean()) or 1.0
    z, at_label = z / scale, at_label / scale

    def derivatives(beta: float) -> tuple[float, float]:
        p = (beta * z).masked_fill(masked, -torch.inf).softmax(1)
        mean = (p * z).sum(1)
        variance = (p * (z - mean[:, None]).square()).sum(1)
        return float((mean - at_label).mean()), float(variance.mean())

    if float(at_label.mean()) >= 0:
        raise ValueError(
            "Expected at least one wrong prediction in `logits`, but got only correct ones: every "
            "lower temperature is better."
        )
    if derivatives(0.0)[0] >= 0:
        raise ValueError(
            "Expected the `logits` of the labels to be larger than the mean logit, but got smaller "
            "or equal ones: every higher temperature is better."
        )
    low, high, beta = 0.0, math.inf, 1.0
    for _ in range(200):
        slope, curvature = derivatives(beta)
        low, high = (beta, high) if slope < 0 else (low, beta)
        # A Newton step, at most by a factor of 8; if it leaves the bracket, the bracket's middle.
        newton = beta - slope / curvature if curvature > 0 else beta * (8 if slope < 0 else 0)
        newton = min(max(newton, beta / 8), beta * 8)
        if abs(newton - beta) <= 1e-13 * beta:
            break
        beta = newton if low < newton < high else math.sqrt(low * high)
    return scale / beta


def fold_alpha(
    head: nn.Module | str | None,
    alpha: float,
    *,
    model: nn.Module | None = None,
    example_inputs: Any = None,
) -> nn.Module:
    r"""Scale a trained head by alpha, in place: the network's softmax becomes ``softmax(alpha z)``.

    Weight and bias are multiplied by alpha, and so are the logits; predicted classes do not change
    (except for ties up to rounding). After training with PGT at ``alpha``, the network is then
    calibrated about as well as one trained without PGT. To fold in any other temperature ``T``,
    pass ``1 / T``. Call it once, after training.

    A ``softcap`` of the loss must be multiplied by alpha too: this is done for each
    :class:`CrossEntropyLoss` that is a module of `model`, and left to you elsewhere.

    Args:
        head: The last layer, linear or a convolution; with `model`, its name, or None to find it.
        alpha: The factor, above 0.
        model: The network that `head` belongs to. Pass it if the head might be tied: this cannot be
            seen from the head alone.
        example_inputs: The arguments of `model`: a tensor, a tuple of positional arguments, or a
            dict of keyword arguments. `model` is run in evaluation mode to find the head (if it is
            None), or to check that the logits scale with it (up to a constant per example, such as
            a log-softmax adds), and restored.

    Returns:
        The head; a ``ModuleList`` if the model has several, which are scaled together.

    Raises:
        ValueError: If alpha is out of range; if the head is not linear, or its weight is
            parametrised; if several layers of `model` could be the head; if `model` also uses the
            head's parameters elsewhere (a tied head), or caps its logits (for example by
            ``config.final_logit_softcapping``); or if the example shows that scaling the head does
            not scale the logits.
        TypeError: If alpha is not a number; if `head` is not a module and there is no `model`.

    Example:
        >>> head = nn.Linear(4, 3)
        >>> features = torch.randn(5, 4)
        >>> p = (0.25 * head(features)).softmax(1)
        >>> torch.equal(fold_alpha(head, 0.25)(features).softmax(1), p)
        True
    """
    factor = _positive(alpha, "alpha")
    if model is not None:
        heads = scalable_heads(model, head, example_inputs)
    elif isinstance(head, nn.Module) and example_inputs is None:
        check_linear(head)
        heads = [head]
    else:
        raise TypeError(
            "Expected `model` to be given with `example_inputs`, or if `head` is not a module, but "
            f"got None, with a {type(head).__name__} as `head`."
        )
    scale(heads, factor, model)
    return heads[0] if len(heads) == 1 else nn.ModuleList(heads)


def _prepare(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Check the arguments; return ``(z - max z) / T`` in float64, labels and predictions."""
    divisor = _positive(temperature, "temperature")
    logits = check_floating(logits, "logits").detach()
    if logits.dim() != 2 or not logits.numel():
        raise ValueError(
            "Expected `logits` to have shape (examples, classes), at least one of each, but got "
            f"{shape_of(logits)}."
        )
    got = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
    if isinstance(got, str) or got.is_floating_point or got.is_complex or got == torch.bool:
        raise TypeError(f"Expected `labels` to be a tensor of class indices, but got {got}.")
    if shape_of(labels) != shape_of(logits)[:1]:
        raise ValueError(
            f"Expected `labels` to have shape {shape_of(logits)[:1]}, but got {shape_of(labels)}."
        )
    if labels.min() < 0 or labels.max() >= logits.shape[1]:
        raise ValueError(
            f"Expected `labels` to be in [0, {logits.shape[1] - 1}], but got {extremes(labels)}."
        )
    top, predicted = logits.max(1, keepdim=True)
    if not top.isfinite().all():
        raise ValueError(
            "Expected `logits` to be finite, or -inf for some classes of an example, but got "
            "NaN, inf, or -inf for all classes of an example."
        )
    # The maximum is subtracted first, so that no temperature can cause an overflow.
    z = (logits.double() - top.double()) / divisor
    return z, labels.to(z.device, torch.int64), predicted.squeeze(1)


def _positive(value: Any, name: str) -> float:
    if (number := check_number(value, name)) == 0:
        raise ValueError(f"Expected `{name}` to be above 0, but got 0.")
    return number
