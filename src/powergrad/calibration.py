r"""Calibration: metrics, temperature fitting, and folding the temperature into the head.

Training with PGT at ``alpha`` fits ``softmax(alpha z)`` to the labels, as plain training fits
``softmax(z)``. So the softmax of the network itself, at temperature 1, is overconfident; at
temperature ``1 / alpha`` it is calibrated about as well as after plain training. Every metric here
takes a temperature ``T`` and evaluates ``softmax(z / T)``. :func:`fold_alpha` scales the head so
that no temperature is needed.

Metrics take logits and are computed in float64. Log-probabilities are valid logits: for
probabilities ``p`` pass ``p.log()``. For segmentation, with shape ``(N, C, d1, ...)``, pass
``logits.movedim(1, -1).flatten(0, -2)`` and ``labels.flatten()``.

References: Guo, Pleiss, Sun, Weinberger, *On Calibration of Modern Neural Networks*, 2017. Nixon,
Dusenberry, Jerfel, Nguyen, Liu, Zhang, Tran, *Measuring Calibration in Deep Learning*, 2019. Brier,
*Verification of Forecasts Expressed in Terms of Probability*, 1950.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from powergrad._check import check_floating, extremes, shape_of
from powergrad.head import LINEAR_LAYERS, check_linear, scalable_heads, scale

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


# Metrics -----------------------------------------------------------------------------------------


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

    The score of an example is ``sum_c (p_c - [c is the label])^2``: 0 at best, 2 at worst, as Brier
    defines it. (For two classes, some definitions use one class only, which gives half of this.)

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

    The confidence of an example is its largest probability. The error is 0 if predictions of every
    confidence are correct that often. With few examples per bin, it is above 0 even for a
    calibrated classifier.

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
    mass hold the same number of examples, plus or minus one. Examples of equal confidence share a
    bin, so the order of the examples does not matter.

    Args:
        logits: ``(N, C)``, as in :func:`expected_calibration_error`.
        labels: Class indices, ``(N,)``.
        bins: The number of bins.
        temperature: The divisor of the logits, above 0.
        binning: ``"width"`` or ``"mass"``.

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


# The temperature ---------------------------------------------------------------------------------


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
    # In beta = 1 / T the objective f(beta) = mean(log sum exp(beta z) - beta z_label) is convex:
    #     f'  = mean(E[z] - z_label),     f'' = mean(Var[z])      under softmax(beta z),
    # so f' increases from its value at beta = 0, where the softmax is uniform, to its limit at
    # infinity, where E[z] is the largest z. If these have opposite signs, one root lies between.
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


# The head ----------------------------------------------------------------------------------------


def fold_alpha(
    head: nn.Module | str | None,
    alpha: float,
    *,
    model: nn.Module | None = None,
    example_inputs: Any = None,
) -> nn.Module:
    r"""Scale a trained head by alpha, in place: the network's softmax becomes ``softmax(alpha z)``.

    Weight and bias are multiplied by alpha, and so are the logits. The predicted class does not
    change (except for ties up to rounding). After training with PGT at ``alpha``, the network is
    then calibrated about as well as one trained without PGT. To fold in any other temperature
    ``T``, pass ``1 / T``. Call it once, after training: continuing to train from there is not the
    same training.

    Args:
        head: The last layer, linear or a convolution; with `model`, its name, or None to find it.
        alpha: The factor, above 0.
        model: The network that `head` belongs to. Pass it if the head might be tied: this cannot be
            seen from the head alone.
        example_inputs: The arguments of `model`: a tensor, a tuple of positional arguments, or a
            dict of keyword arguments. The model is run in evaluation mode to check that its logits
            scale with the head (up to a constant per example, such as a log-softmax adds), and then
            restored. If `head` is None, the head is found in this way.

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
    elif example_inputs is not None:
        raise TypeError("Expected `model` to be given with `example_inputs`, but got None.")
    elif not isinstance(head, nn.Module):
        raise TypeError(
            "Expected `head` to be a module if `model` is not given, but got "
            f"{type(head).__name__}."
        )
    elif not isinstance(head, LINEAR_LAYERS):
        raise ValueError(
            "Expected `head` to be a linear layer or a convolution, but got a "
            f"{type(head).__name__}; for a whole network, call `fold_alpha(None, alpha, "
            "model=network)`."
        )
    else:
        check_linear(head)
        heads = [head]
    scale(heads, factor)
    return heads[0] if len(heads) == 1 else nn.ModuleList(heads)


# Checks ------------------------------------------------------------------------------------------


def _prepare(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Check the arguments; return ``(z - max z) / T`` in float64, labels and predictions."""
    divisor = _positive(temperature, "temperature")
    logits = check_floating(logits, "logits").detach()
    if logits.dim() != 2 or not logits.numel():
        raise ValueError(
            f"Expected `logits` to have shape (examples, classes), at least one of each, but got "
            f"{shape_of(logits)}."
        )
    got = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
    if isinstance(got, str) or got.is_floating_point or got.is_complex or got == torch.bool:
        raise TypeError(f"Expected `labels` to be a tensor of class indices, but got {got}.")
    examples, classes = logits.shape
    if shape_of(labels) != (examples,):
        raise ValueError(
            f"Expected `labels` to have shape ({examples},), one per example, but got "
            f"{shape_of(labels)}."
        )
    if labels.min() < 0 or labels.max() >= classes:
        raise ValueError(
            f"Expected `labels` to be in [0, {classes - 1}], but got {extremes(labels)}."
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
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"Expected `{name}` to be a number, but got {type(value).__name__}.")
    number = float(value)
    if not 0 < number < math.inf:
        raise ValueError(f"Expected `{name}` to be positive and finite, but got {value}.")
    return number
