"""Calibration: metrics, temperature fitting, and folding the temperature into the head.

Training with PGT at ``alpha`` fits ``softmax(alpha z)``, so the network is calibrated about as well
at temperature ``1 / alpha`` as after plain training at 1. Metrics are computed from logits, in
float64. For probabilities, pass ``p.log()``; for segmentation,
``logits.movedim(1, -1).flatten(0, -2)`` and ``labels.flatten()``.

References: Guo et al., *On Calibration of Modern Neural Networks*, 2017. Nixon et al., *Measuring
Calibration in Deep Learning*, 2019. Brier, *Verification of Forecasts Expressed in Terms of
Probability*, 1950.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from powergrad.checks import check_floating, check_number, extremes, shape_of
from powergrad.head import scalable_heads, scale

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
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def negative_log_likelihood(logits: Tensor, labels: Tensor, *, temperature: float = 1.0) -> float:
    r"""The mean of ``-log p[label]`` with ``p = softmax(logits / temperature)``, in nats.

    Args:
        logits: ``(N, C)``. Classes may be masked with ``-inf``.
        labels: Class indices, ``(N,)``.
        temperature: The divisor of the logits, above 0.

    Raises:
        ValueError, TypeError: If a shape, value or type is wrong, or there are no examples.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
        >>> round(negative_log_likelihood(logits, torch.tensor([0, 0])), 4)
        0.7201
    """
    z, labels, _ = _prepare(logits, labels, temperature)
    return float(F.cross_entropy(z, labels))


def brier_score(logits: Tensor, labels: Tensor, *, temperature: float = 1.0) -> float:
    r"""The mean squared distance from ``p = softmax(logits / temperature)`` to the label.

    The score of an example is ``sum_c (p_c - [c is the label])^2``, from 0 to 2 (not half of it, as
    in some definitions for two classes). The rest is as in :func:`negative_log_likelihood`.

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
    r"""The mean of ``|accuracy - confidence|`` over the bins of :func:`reliability`.

    Bins are weighted by their numbers of examples. With few examples per bin, the error is above 0
    even for a calibrated classifier.

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
    """Bins in the order of confidence: means (NaN without examples) and numbers of examples."""

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

    The confidence of an example is its largest probability. Bins of equal ``"width"`` (Guo et al.)
    are ``[k / bins, (k + 1) / bins)``; the last one includes 1. Bins of equal ``"mass"`` (Nixon et
    al.) hold the same number of examples, plus or minus one; equal confidences share a bin. The
    rest is as in :func:`negative_log_likelihood`.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
        >>> reliability(logits, torch.tensor([0, 0]), bins=4).accuracy
        tensor([nan, nan, 0., 1.], dtype=torch.float64)
    """
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
        raise ValueError(f"Expected `bins` to be a positive integer, but got {bins!r}.")
    z, labels, predicted = _prepare(logits, labels, temperature)
    confidence = z.exp().sum(1).reciprocal().cpu()  # of the largest logit, which is 0 in z
    right = (predicted == labels).double().cpu()
    if binning not in ("width", "mass"):
        raise ValueError(f"Expected `binning` to be 'width' or 'mass', but got {binning!r}.")
    if binning == "width":
        edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device="cpu")[1:-1]
        place = torch.bucketize(confidence, edges, right=True)
    else:
        # Bin k ends with the ceil(k N / bins)-th example, and with all of the same confidence.
        ends = (torch.arange(1, bins, device="cpu") * len(z) + bins - 1) // bins - 1
        place = torch.bucketize(confidence, confidence.sort().values[ends])
    count = place.bincount(minlength=bins)
    means = [place.bincount(x, minlength=bins) / count for x in (confidence, right)]
    return Reliability(means[0], means[1], count)


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    r"""The temperature that minimises the negative log-likelihood.

    Fit it on examples that were not used for training, and evaluate it on others. After training
    with PGT, compare it with ``1 / alpha``. The rest is as in :func:`negative_log_likelihood`.

    Raises:
        ValueError: Also if every prediction is correct (the lower the temperature, the better), or
            the labels' logits are on average no larger than the mean logit (the higher).

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
    mask = z.masked_fill(z.isfinite(), 0.0)
    z = z.nan_to_num(neginf=0.0)
    scale = float(z.abs().mean()) or 1.0
    z = z / scale
    at_label = (z + mask).gather(1, labels[:, None])
    if at_label.isinf().any():
        raise ValueError("Expected `logits` of the labels to be finite, but got -inf.")

    def derivatives(beta: float) -> tuple[float, float]:
        p = (beta * z + mask).softmax(1)
        mean = (p * z).sum(1, keepdim=True)
        return float((mean - at_label).mean()), float((p * (z - mean).square()).sum(1).mean())

    only_right = float(at_label.mean()) >= 0
    if only_right or derivatives(0.0)[0] >= 0:
        got = "only right ones: every lower" if only_right else "worse than uniform: every higher"
        raise ValueError(f"Expected predictions with a best temperature, but got {got} is better.")
    low, high, beta = 0.0, math.inf, 1.0
    for _ in range(200):
        slope, curvature = derivatives(beta)
        low, high = (beta, high) if slope < 0 else (low, beta)
        # A Newton step, at most by a factor of 8; if it leaves the bracket, the bracket's middle.
        newton = min(max(beta - slope / max(curvature, 1e-300), beta / 8), beta * 8)
        if abs(newton - beta) <= 1e-13 * beta:
            break
        beta = newton if low < newton < high else math.sqrt(low * high)
    return scale / beta


def fold_alpha(
    head: nn.Module | str | None, alpha: float, *, model: nn.Module | None = None
) -> nn.Module:
    r"""Scale a trained head by alpha, in place: the network's softmax becomes ``softmax(alpha z)``.

    Weight and bias are multiplied by alpha; predicted classes do not change. Call it once, after
    training with PGT at ``alpha``: the network is then calibrated about as well as one trained
    without PGT. To fold in another temperature ``T``, pass ``1 / T``. The ``softcap`` of a
    :class:`CrossEntropyLoss` that is a module of `model` is multiplied too; elsewhere, do it.

    Args:
        head: The last layer, linear or a convolution; with `model`, its name, or None to find it.
        alpha: The factor, above 0.
        model: The network that `head` belongs to; without it, a tied head cannot be seen.

    Returns:
        The head; a ``ModuleList`` if the model has several, which are scaled together.

    Raises:
        ValueError: If alpha is out of range; or the head is not found, not linear, tied,
            parametrised or followed by another layer or a cap.
        TypeError: If alpha is not a number, or `head` is not a module and there is no `model`.

    Example:
        >>> head = nn.Linear(4, 3)
        >>> features = torch.randn(5, 4)
        >>> p = (0.25 * head(features)).softmax(1)
        >>> torch.equal(fold_alpha(head, 0.25)(features).softmax(1), p)
        True
    """
    factor = check_number(alpha, positive=True)
    whole = head if model is None else model
    if not isinstance(whole, nn.Module):
        got = type(whole).__name__
        raise TypeError(f"Expected `model`, or else `head`, to be a module, but got {got}.")
    heads = scalable_heads(whole, head)
    scale(heads, factor, model)
    return heads[0] if len(heads) == 1 else nn.ModuleList(heads)


def _prepare(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Check the arguments; return ``(z - max z) / T`` in float64, labels and predictions."""
    divisor = check_number(temperature, "temperature", positive=True)
    logits = check_floating(logits, "logits").detach()
    if logits.dim() != 2 or not logits.numel():
        got = shape_of(logits)
        raise ValueError(f"Expected `logits` to have shape (examples, classes), but got {got}.")
    if not isinstance(labels, Tensor) or labels.dtype not in _INTEGERS:
        got = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise TypeError(f"Expected `labels` to be a tensor of class indices, but got {got}.")
    examples, classes = logits.shape
    matched = shape_of(labels) == (examples,)
    if not matched or labels.min() < 0 or labels.max() >= classes:
        got = extremes(labels) if matched else f"shape {shape_of(labels)}"
        wanted = f"{examples} class indices in [0, {classes - 1}]"
        raise ValueError(f"Expected `labels` to hold {wanted}, but got {got}.")
    top, predicted = logits.max(1, keepdim=True)
    if not top.isfinite().all():
        raise ValueError("Expected `logits` to be finite or -inf for some classes, but got others.")
    # The maximum is subtracted first, so that no temperature can cause an overflow.
    z = (logits.double() - top.double()) / divisor
    return z, labels.to(z.device, torch.int64), predicted.squeeze(1)
