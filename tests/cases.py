"""Calls of cross-entropy, by named options or at random, and the check of what they return."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from references import (
    by_position,
    gradient_of_potential,
    mapped,
    plain_loss,
    row_error,
    scaled,
)
from torch import Tensor

# The error of a gradient relative to its row (see `_allowance`), and that of a value. bfloat16 has
# 8 bits and may be rounded twice: where it is kept, and where it is scaled. float16 has 11 bits and
# is rounded once.
TOLERANCE = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (1e-6, 1e-6),
    torch.bfloat16: (2**-7, 2**-8),
    torch.float16: (2**-11, 2**-10),
}


@dataclass(frozen=True)
class Form:
    """What a call is like. The numbers in its tensors come from `seed`."""

    shape: tuple[int, ...] = (6, 5)
    dtype: torch.dtype = torch.float32
    target: str = "labels"  # or "bytes" or "probabilities"
    alpha: float = 0.3
    alphas: str = "number"  # or "0-d", "example", "position": a tensor, whose values are random
    weight: str = ""  # or "random", "some zero", "all zero"
    ignore_index: int | None = None
    ignored: float = 0.3  # this share of the labels is `ignore_index`
    reduction: str = "mean"
    label_smoothing: float = 0.0
    masked: bool = False  # some logits are -inf
    spread: float = 3.0
    offset: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    z_loss: float = 0.0
    tokens: bool = False  # one weight per row
    seed: int = 0

    @property
    def extended(self) -> bool:
        """Whether it has an option that PyTorch's function does not have."""
        return bool(self.softcap or self.logit_scale != 1 or self.z_loss or self.tokens)

    @property
    def soft(self) -> bool:
        return self.target == "probabilities"

    @property
    def possible(self) -> bool:
        """Whether PyTorch takes it, and its loss is finite."""
        per_row = len(self.shape) > 1 or self.alphas in ("number", "0-d")
        if self.z_loss and self.alpha == 0:
            return False
        if self.soft:
            return per_row and not self.masked and self.ignore_index is None
        if self.target == "bytes" and (self.ignore_index or 0) < 0:
            return False
        return per_row and not (self.masked and self.label_smoothing)


@dataclass
class Case:
    """The arguments of a call, and the gradient that arrives in its backward pass."""

    logits: Tensor
    target: Tensor
    alpha: float | Tensor
    options: dict[str, Any]  # those of F.cross_entropy
    upstream: Tensor
    extra: dict[str, Any] = field(default_factory=dict)  # and ours

    @property
    def class_dim(self) -> int:
        return 0 if self.logits.dim() == 1 else 1

    @property
    def tensors(self) -> list[Tensor]:
        options = (*self.options.values(), *self.extra.values())
        given = (self.logits, self.target, self.upstream, self.alpha, *options)
        return [value for value in given if isinstance(value, Tensor)]


def build(form: Form, device: torch.device | str = "cpu") -> Case:
    """The call that `form` describes."""
    assert form.possible
    g = torch.Generator().manual_seed(form.seed)

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=g, dtype=torch.float64)

    shape, dim = form.shape, 0 if len(form.shape) == 1 else 1
    classes, positions = shape[dim], shape[:dim] + shape[dim + 1 :]
    logits = torch.randn(shape, generator=g, dtype=torch.float64) * form.spread + form.offset
    options: dict[str, Any] = {
        "reduction": form.reduction,
        "label_smoothing": form.label_smoothing,
        "weight": None,
    }
    if form.weight:
        weight = rand(classes) + 0.1
        zero = {"random": 0.0, "some zero": 0.5, "all zero": 1.1}[form.weight]
        options["weight"] = weight.masked_fill(rand(classes) < zero, 0).to(device, form.dtype)
    if form.soft:
        target = (rand(*shape) * 5).softmax(dim).to(form.dtype)
    else:
        target = (rand(*positions) * classes).long()
        if form.masked and classes > 1:
            # Class 0 is masked in ignored rows, too, where its infinite loss must not count.
            mask = rand(*shape).lt(0.5)
            mask.select(dim, 0).fill_(True)
            mask.scatter_(dim, target.unsqueeze(dim), False)
            logits[mask] = -math.inf
        if form.ignore_index is not None:
            options["ignore_index"] = form.ignore_index
            target[rand(*positions) < form.ignored] = form.ignore_index
        target = target.byte() if form.target == "bytes" else target
    alpha: float | Tensor = form.alpha
    if form.alphas == "0-d":
        alpha = torch.tensor(form.alpha, dtype=torch.float64)
    elif form.alphas != "number":
        alpha = rand(*(shape[:1] if form.alphas == "example" else positions))
        alpha = alpha.masked_fill(alpha < 0.1, 0.1 if form.z_loss else 0.0).to(device)
    # Not 1, and not the same for every row.
    upstream = 1.5 * 2.0 ** torch.randint(
        -3, 4, positions if form.reduction == "none" else (), generator=g
    )
    extra: dict[str, Any] = {}
    if form.softcap:
        extra["softcap"] = form.softcap
    if form.logit_scale != 1:
        extra["logit_scale"] = form.logit_scale
    if form.z_loss:
        extra["z_loss"] = form.z_loss
    if form.tokens:
        extra["token_weight"] = (rand(*positions) * 2).to(device, torch.float32)
    return Case(
        logits.to(device, form.dtype),
        target.to(device),
        alpha,
        options,
        upstream.to(device, form.dtype),
        extra,
    )


OPTIONS = {
    "defaults": Form(),
    "sum": Form(reduction="sum"),
    "none": Form(reduction="none"),
    "weights": Form(weight="random"),
    "weights, sum": Form(weight="some zero", reduction="sum"),
    "weights, none": Form(weight="random", reduction="none"),
    "weights of 0 only": Form(weight="all zero"),
    "smoothing": Form(label_smoothing=0.1),
    "smoothing, weights": Form(label_smoothing=0.1, weight="random"),
    "smoothing of 1, none": Form(label_smoothing=1.0, reduction="none"),
    "ignored": Form(ignore_index=-100),
    "a class ignored, sum": Form(ignore_index=2, reduction="sum"),
    "a class ignored, smoothing, weights": Form(
        ignore_index=2, label_smoothing=0.2, weight="random"
    ),
    "all ignored": Form(ignore_index=-1, ignored=1.0),
    "all ignored, smoothing": Form(ignore_index=-1, ignored=1.0, label_smoothing=0.1),
    "probabilities": Form(target="probabilities"),
    "probabilities, weights, sum": Form(target="probabilities", weight="random", reduction="sum"),
    "probabilities, smoothing, none": Form(
        target="probabilities", label_smoothing=0.1, reduction="none"
    ),
    "bytes as labels": Form(target="bytes", weight="random"),
    "alpha 0": Form(alpha=0.0),
    "alpha 0, smoothing": Form(alpha=0.0, label_smoothing=0.1),
    "alpha 1": Form(alpha=1.0, label_smoothing=0.1),
    "a tensor of 0": Form(alpha=0.0, alphas="0-d"),
    "a tensor of 1": Form(alpha=1.0, alphas="0-d"),
    "alpha of each example": Form(alphas="example"),
    "alpha of each example, probabilities": Form(alphas="example", target="probabilities"),
    "alpha of each position": Form(shape=(3, 5, 4), alphas="position", label_smoothing=0.1),
    "one example": Form(shape=(5,)),
    "one example, probabilities": Form(shape=(5,), target="probabilities"),
    "images": Form(shape=(2, 5, 3, 4), weight="random", ignore_index=-100),
    "images, none": Form(shape=(2, 5, 3, 4), reduction="none", alphas="example"),
    "one class": Form(shape=(4, 1)),
    "no examples": Form(shape=(0, 5)),
    "no examples, sum": Form(shape=(0, 5), reduction="sum", label_smoothing=0.1),
    "masked": Form(masked=True),
    "masked, alpha 0": Form(masked=True, alpha=0.0),
    "masked, ignored, alphas": Form(
        masked=True, ignore_index=-100, alphas="example", weight="random"
    ),
    "confident": Form(spread=60.0, alpha=0.9),
    "very large": Form(spread=1e4, alpha=0.05),
    "far from 0": Form(offset=1e4, spread=10.0, alpha=0.05),
    "1000 classes": Form(shape=(7, 1000), label_smoothing=0.1),
    "sharpened": Form(alpha=2.5, weight="random"),
    "cap": Form(softcap=5.0),
    "cap, images, smoothing": Form(shape=(2, 5, 3, 4), softcap=5.0, label_smoothing=0.1),
    "scale, sum": Form(logit_scale=0.5, reduction="sum", ignore_index=-100),
    "cap, scale, probabilities": Form(softcap=4.0, logit_scale=2.0, target="probabilities"),
    "z-loss": Form(z_loss=0.1),
    "z-loss, weights, ignored": Form(z_loss=0.1, weight="random", ignore_index=-100),
    "z-loss, smoothing, none": Form(z_loss=0.1, label_smoothing=0.1, reduction="none"),
    "z-loss, probabilities, alphas": Form(z_loss=0.1, target="probabilities", alphas="example"),
    "z-loss far from 0": Form(z_loss=0.01, offset=100.0, weight="random", label_smoothing=0.2),
    "tokens": Form(tokens=True, ignore_index=-100),
    "tokens, images, none": Form(shape=(2, 5, 3, 4), tokens=True, reduction="none"),
    "all of it": Form(
        softcap=5.0,
        logit_scale=2.0,
        z_loss=0.1,
        tokens=True,
        weight="random",
        label_smoothing=0.1,
        ignore_index=2,
        alphas="example",
    ),
    "all of it, one example": Form(
        shape=(5,), softcap=5.0, logit_scale=2.0, z_loss=0.1, tokens=True
    ),
}


@st.composite
def forms(draw: st.DrawFn) -> Form:
    """Every combination of options that is possible."""
    c = draw(st.integers(1, 40) | st.sampled_from([127, 1000]))
    n, d, e = (draw(st.integers(1, 6)) for _ in range(3))
    soft = draw(st.booleans())
    smoothing = draw(st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0]))
    shape = draw(st.sampled_from([(c,), (n, c), (n, c), (n, c), (n, c, d), (n, c, d, e)]))
    tensors = ["0-d", "example", "position"] if len(shape) > 1 else ["0-d"]
    reduction = draw(st.sampled_from(["mean", "sum", "none"]))
    # A mean over weights of 0 is NaN: a row of the table has it.
    weights = ["", "random"] if reduction == "mean" else ["", "random", "some zero"]
    kind = draw(st.sampled_from(["number", *tensors]))
    ends = [0.0] if kind == "number" else [0.0, 1.0]  # at the number 1 it is PyTorch to the bit
    alphas = st.sampled_from([*ends, 0.05, 0.25, 0.999, 2.0]) | st.floats(1e-3, 0.999)
    alpha = draw(alphas)
    masked = not soft and not smoothing and draw(st.booleans())
    extended = draw(st.booleans())
    takes_z_loss = extended and alpha and not masked
    z_loss = draw(st.sampled_from([0.0, 1e-4, 0.3])) if takes_z_loss else 0.0
    return Form(
        shape=shape,
        dtype=draw(st.sampled_from(list(TOLERANCE))),
        target="probabilities" if soft else "labels",
        alpha=alpha,
        alphas=kind,
        weight=draw(st.sampled_from(weights)),
        ignore_index=None if soft else draw(st.sampled_from([None, -100, -1, 0])),
        reduction=reduction,
        label_smoothing=smoothing,
        masked=masked,
        spread=draw(st.sampled_from([0.1, 1.0, 10.0, 60.0])),
        offset=draw(st.sampled_from([0.0, -100.0] if z_loss else [0.0, -100.0, 1e4])),
        softcap=draw(st.sampled_from([None, 3.0, 30.0])) if extended else None,
        logit_scale=draw(st.sampled_from([1.0, 0.5, 3.0])) if extended else 1.0,
        z_loss=z_loss,
        tokens=extended and draw(st.booleans()),
        seed=draw(st.integers(0, 2**32)),
    )


def check_value(case: Case, value: Tensor) -> None:
    """It is that of plain cross-entropy."""
    logits, dtype = case.logits.detach(), case.logits.dtype
    z = mapped(logits, case.extra)
    expected = plain_loss(z, case.target, extra=case.extra, **case.options)
    assert (value.dtype, value.shape) == (dtype, expected.shape)
    assert torch.equal(value.isnan(), expected.isnan())
    too_large = expected.abs() > torch.finfo(dtype).max
    assert torch.equal(value.isinf(), too_large)
    value, expected = value.masked_fill(too_large, 0), expected.masked_fill(too_large, 0)
    # Logits of 1e4 in 32 bits leave a loss of the size of their spread, with their rounding.
    scale = expected.abs().clamp(min=1)
    if dtype == torch.float32:
        finite = logits[logits.isfinite()].double()
        scale = scale.clamp(min=0.1 * float(finite.abs().max()) if finite.numel() else 1)
    error = ((value.double() - expected).abs() / scale).nan_to_num(0)
    assert error.numel() == 0 or error.max() <= 2 * TOLERANCE[dtype][1]


def check_gradient(case: Case, gradient: Tensor, *, cancels: bool = False) -> None:
    """It is PGT's; `cancels` allows for ``p' - 1`` at the label, as PyTorch forms it."""
    oracle = gradient_of_potential(
        case.logits, case.target, case.alpha, case.upstream, extra=case.extra, **case.options
    )
    assert (gradient.dtype, gradient.shape) == (case.logits.dtype, oracle.shape)
    assert torch.equal(gradient.isnan(), oracle.isnan())
    oracle, gradient = oracle.nan_to_num(), gradient.nan_to_num()
    error = row_error(gradient, oracle, case.class_dim, _allowance(case, oracle, cancels))
    assert error <= TOLERANCE[case.logits.dtype][0]


def _allowance(case: Case, oracle: Tensor, cancels: bool) -> Tensor:
    """What the error of a row is relative to: its largest entry, with four exceptions.

    1. ``A p' - t`` of soft targets or with a z-loss may cancel. What is rounded is then each term,
       not the difference.
    2. In a confident row, right to e^-x, even the largest entry is some ``exp(-x)``. An exponent of
       size x that is rounded to float32, four times, is off by 4 * x * 2^-24, and so is its
       exponential. Up to x = 4 that is below 1e-6. Mapped logits z are rounded themselves: there,
       x is at least alpha |z|.
    3. The slope ``1 - tanh^2`` of a soft cap is rounded as a number of size 1.
    4. What is below the smallest number of the dtype (2^-24 in float16) is 0.
    """
    if oracle.numel() == 0:
        return oracle
    dim, extra = case.class_dim, case.extra
    largest = oracle.abs().amax(dim, keepdim=True)
    terms = size_of_terms(case)
    if (
        case.target.is_floating_point()
        or case.options["label_smoothing"]
        or cancels
        or extra.get("z_loss")
        or extra.get("softcap")
    ):
        largest = torch.maximum(largest, terms)
    x = -(largest / terms.clamp(min=1e-300)).clamp(min=1e-300).log()
    if extra.get("softcap") or extra.get("logit_scale"):
        z = mapped(case.logits.detach(), extra)
        x = x.maximum(
            z.where(z.isfinite(), 0).abs().amax(dim, keepdim=True) * by_position(case.alpha, z)
        )
    largest = largest * (x / 4).clamp(min=1)
    dtype = case.logits.dtype
    smallest = 2**-24 if dtype == torch.float16 else torch.finfo(dtype).smallest_normal
    return largest.clamp(min=smallest / TOLERANCE[dtype][0])


def size_of_terms(case: Case) -> Tensor:
    """The largest of ``g A p'`` and ``g t`` in each row, whose difference is the gradient."""
    dim, target, options, extra = case.class_dim, case.target, case.options, case.extra
    classes, eps = case.logits.shape[dim], options["label_smoothing"]
    if target.is_floating_point():
        q, kept = target.double(), torch.ones_like(target.select(dim, 0), dtype=torch.bool)
    else:
        kept = target.long() != options.get("ignore_index", -100)
        q = F.one_hot(target.long() * kept, classes).movedim(-1, dim).double()
    w = torch.ones(classes) if options["weight"] is None else options["weight"]
    w = w.to(q).reshape(-1, *[1] * (q.dim() - dim - 1))
    g = case.upstream.double().abs() * extra.get("token_weight", 1.0) * kept
    of_z_loss = g
    if options["reduction"] == "mean":
        mass = torch.ones_like(q.sum(dim)) if target.is_floating_point() else (w * q).sum(dim)
        g, of_z_loss = g / (mass * kept).sum(), g / kept.sum()
    t = g.unsqueeze(dim) * w * ((1 - eps) * q + eps / classes)
    z = mapped(case.logits.detach(), extra)
    p = scaled(z, case.alpha).softmax(dim)
    level = (by_position(case.alpha, z) * z).logsumexp(dim, keepdim=True).abs()
    further = 2 * extra.get("z_loss", 0.0) * (of_z_loss.unsqueeze(dim) * level).nan_to_num(0, 0, 0)
    terms = torch.maximum((t.sum(dim, keepdim=True) + further) * p, t).amax(dim, keepdim=True)
    return terms.nan_to_num(0, posinf=0) * extra.get("logit_scale", 1.0)
