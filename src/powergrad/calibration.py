r"""Calibration: measures of predicted probabilities, the temperature, and folding it into the head.

Training with PGT at ``alpha`` fits ``softmax(alpha z)`` to the labels, as plain training fits
``softmax(z)``. So the softmax of the network itself, at temperature 1, is overconfident, and the
calibrated one is at temperature ``1 / alpha``: every measure here takes a temperature ``T`` and
measures ``softmax(z / T)``. :func:`fold_alpha` scales the head so that no temperature is needed.

Measures take logits, and are computed in float64. Log-probabilities are logits: for probabilities
``p`` pass ``p.log()``. For a segmentation, of shape ``(N, C, d1, ...)``, pass
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
from powergrad._head import LINEAR_LAYERS, check_linear, scalable_heads, scale

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


# Measures ----------------------------------------------------------------------------------------


def negative_log_likelihood(logits: Tensor, labels: Tensor, *, temperature: float = 1.0) -> float:
    r"""The mean of ``-log p[label]`` with ``p = softmax(logits / temperature)``.

    Args:
        logits: ``(N, C)``. A class may be masked with ``-inf``.
        labels: Class indices, ``(N,)``.
        temperature: What logits are divided by, above 0.

    Returns:
        The mean over the examples, in nats.

    Raises:
        ValueError: If shapes or values are out of range, or there are no examples.
        TypeError: If logits are not floating-point, labels not integers, or the temperature not a
            number.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
        >>> round(negative_log_likelihood(logits, torch.tensor([0, 0])), 4)
        0.7201
    """
    z, labels, _ = _prepare(logits, labels, temperature)
    return float(F.cross_entropy(z, labels))


def brier_score(logits: Tensor, labels: Tensor, *, temperature: float = 1.0) -> float:
    r"""The mean squared distance from ``p = softmax(logits / temperature)`` to the label.

    For an example, ``sum_c (p_c - [c is the label])^2``: 0 at best, 2 at worst, as Brier defines
    it. (For two classes some count one only, which is half of this.)

    Args:
        logits: As in :func:`negative_log_likelihood`, and so are the arguments that follow.
        labels: Class indices, ``(N,)``.
        temperature: What logits are divided by, above 0.

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
    r"""The mean over bins of ``|accuracy - confidence|``, weighted by their numbers of examples.

    The confidence of an example is its largest probability. The error is 0 for a classifier that is
    right as often as it predicts; with few examples per bin it is larger even for a calibrated one.

    Args:
        logits: As in :func:`negative_log_likelihood`.
        labels: Class indices, ``(N,)``.
        bins: How many bins.
        temperature: What logits are divided by, above 0.
        binning: ``"width"`` divides [0, 1] equally (Guo et al.); ``"mass"`` divides the examples
            equally, in the order of their confidence (Nixon et al.'s adaptive error).

    Returns:
        The error, in [0, 1].

    Raises:
        ValueError: As :func:`negative_log_likelihood`; if `bins` or `binning` are out of range.
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
    """A reliability diagram, each ``(bins,)`` on the CPU in the order of confidence.

    Attributes:
        confidence: The mean confidence of a bin's examples; NaN where there are none.
        accuracy: The fraction of them that is classified correctly; NaN where there are none.
        count: How many there are.
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
    r"""The reliability diagram: how often predictions of each confidence are right.

    Bins of equal width are ``[k / bins, (k + 1) / bins)``, the last one closed. Bins of equal mass
    hold the same number of examples, give or take one; examples of equal confidence share a bin,
    so that the order of the examples does not matter.

    Args:
        logits: As in :func:`expected_calibration_error`, and so are the arguments that follow.
        labels: Class indices, ``(N,)``.
        bins: How many bins.
        temperature: What logits are divided by, above 0.
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
    r"""The temperature at which the negative log-likelihood is least.

    Fit it on examples that were not trained on, and measure on yet others. After training with PGT,
    compare it with ``1 / alpha``.

    Args:
        logits: ``(N, C)``.
        labels: Class indices, ``(N,)``.

    Returns:
        The temperature, to about 12 digits.

    Raises:
        ValueError: As :func:`negative_log_likelihood`; also where no temperature is best: every
            label has the largest logit (the lower, the better), or labels have on average no larger
            logit than the other classes (the higher, the better).
        TypeError: As :func:`negative_log_likelihood`.

    Example:
        >>> logits = torch.tensor([[3.0, 0.0], [3.0, 0.0], [0.0, 3.0]])
        >>> labels = torch.tensor([0, 1, 1])  # two of three right: softmax(3 / T, 0) = 2 / 3
        >>> round(fit_temperature(logits, labels), 6)
        4.328085
    """
    # In beta = 1 / T the objective f(beta) = mean(log sum exp(beta z) - beta z_label) is convex:
    #     f'  = mean(E[z] - z_label),     f'' = mean(Var[z])      under softmax(beta z),
    # so f' grows from its value at beta = 0, where the softmax is uniform, to that at infinity,
    # where E[z] is the largest z. Between lies one root if those have opposite signs.
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
            "Expected some label not to have the largest of `logits`, but got all of them right: "
            "any lower temperature is better."
        )
    if derivatives(0.0)[0] >= 0:
        raise ValueError(
            "Expected labels to have larger `logits` than the mean class, but got smaller or equal "
            "ones: any higher temperature is better."
        )
    low, high, beta = 0.0, math.inf, 1.0
    for _ in range(200):
        slope, curvature = derivatives(beta)
        low, high = (beta, high) if slope < 0 else (low, beta)
        # Newton's step, at most eightfold; where it leaves the bracket, the middle of that.
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

    Weight and bias are multiplied, and so the logits; the predicted class stays (except where
    logits are equal up to rounding). After training with PGT at ``alpha`` the network is then about
    as calibrated as one trained without it. Any other temperature ``T`` is folded in as ``1 / T``.
    Do it once, when training is over: training on from there is another training.

    Args:
        head: The last layer, linear or a convolution; with `model`, its name, or None to find it.
        alpha: The factor, above 0.
        model: The network that `head` belongs to. Give it wherever the head might be shared, which
            the head alone does not show.
        example_inputs: What `model` is called with: a tensor, a tuple of arguments, or a dict of
            keyword arguments. The model is run in evaluation mode, and left as it was, to check
            that its logits scale with the head (a constant per example may be added, as by a
            log-softmax). With `head` None, the head is found by that.

    Returns:
        The head; a ``ModuleList`` where the logits are made by several, which are scaled together.

    Raises:
        ValueError: If alpha is out of range; if the head is not linear, or its weight is
            parametrised; if several layers of `model` might be the head; if `model` uses its
            parameters elsewhere too (a tied head), or caps its logits
            (``config.final_logit_softcapping`` and the like), or if the example shows that scaling
            the head does not scale the logits.
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
        raise TypeError("Expected `model` where `example_inputs` is given, but got None.")
    elif not isinstance(head, nn.Module):
        raise TypeError(
            "Expected `head` to be a module where `model` is not given, but got "
            f"{type(head).__name__}."
        )
    elif not isinstance(head, LINEAR_LAYERS):
        raise ValueError(
            "Expected `head` to be a linear layer or a convolution, but got a "
            f"{type(head).__name__}; for a whole network, pass `None, alpha, model=network`."
        )
    else:
        check_linear(head)
        heads = [head]
    scale(heads, factor)
    return heads[0] if len(heads) == 1 else nn.ModuleList(heads)


# Checks ------------------------------------------------------------------------------------------


def _prepare(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """``(z - max z) / T`` in float64, the labels and the predicted classes, once checked."""
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
            "NaN, inf, or -inf for all of them."
        )
    # The maximum goes first, so that no temperature can overflow.
    z = (logits.double() - top.double()) / divisor
    return z, labels.to(z.device, torch.int64), predicted.squeeze(1)


def _positive(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"Expected `{name}` to be a number, but got {type(value).__name__}.")
    number = float(value)
    if not 0 < number < math.inf:
        raise ValueError(f"Expected `{name}` to be positive and finite, but got {value}.")
    return number
