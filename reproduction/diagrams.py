"""The paper's figures that need no runs, from its equations and networks."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.patches import Circle, Rectangle

from powergrad import power_transform, stationary_threshold
from powergrad.lab.figures import COLOURS
from powergrad.lab.trainer.networks import create_model
from powergrad.lab.trainer.objectives import published_hook
from powergrad.monitor.layers import model_weights

ORANGE, GREEN, PURPLE, RED = COLOURS[1:5]
# The colours of the paper's Figure 1, from a palette that is safe for colour blindness.
FORWARD, BACKWARD, TRANSFORM, ALTERED = "#9CC9E8", "#F5CE85", "#8FD6BD", "#EFA07A"
EDGE = {"edgecolor": "0.2", "lw": 0.8}

GREY = "0.35"

Point = tuple[float, float]


def plain(axes: Any) -> None:
    """Remove the frame at the top and on the right."""
    axes.spines[["top", "right"]].set_visible(False)


def panel(axes: Any, letter: str, text: str) -> None:
    """Give a plain panel its letter and title."""
    axes.set_title(f"({letter}) {text}", fontsize=10, loc="left")
    plain(axes)


def note(figure: Any, lines: Sequence[str]) -> None:
    """Add a note below the figure about its data."""
    width = int(figure.get_figwidth() * 18)  # characters of this size per inch
    wrapped = [part for line in dict.fromkeys(lines) for part in textwrap.wrap(line, width)]
    figure.supxlabel("\n".join(wrapped), fontsize=7, color=GREY)


def _text(axes: Any, x: float, y: float, text: str, size: float = 8, **style: Any) -> None:
    axes.text(x, y, text, **{"ha": "center", "fontsize": size, **style})


def _box(
    axes: Any, x: float, y: float, text: str, colour: str, width: float = 0.8, height: float = 0.5
) -> None:
    """A labelled box with its middle at (x, y)."""
    corner = (x - width / 2, y - height / 2)
    axes.add_patch(Rectangle(corner, width, height, facecolor=colour, **EDGE))
    _text(axes, x, y, text, va="center")


def _arrow(axes: Any, start: Point, end: Point, **style: Any) -> None:
    style = {"arrowstyle": "-|>", "color": "0.2", "lw": 0.9, "shrinkA": 0, "shrinkB": 0, **style}
    axes.annotate("", end, start, arrowprops=style)


def gradient_altering() -> Any:
    """Three types of altering gradients."""
    depths = (1.55, 2.5, 1.55)  # below the forward pass: type I has two rows more
    figure, panels = plt.subplots(
        3, 1, figsize=(8, 7.8), height_ratios=[0.45 + depth for depth in depths],
        layout="constrained",
    )  # fmt: skip
    titles = (
        "Type 0: gradients as they are",
        "Type I: every gradient altered after all are computed (GC, AGC)",
        "Type II: altered once, early; all others follow by the chain rule (PGT)",
    )
    layers = ("conv 1", "conv 2", "...", "conv D-1", "linear D")
    gradients = (r"$\nabla W_1$", r"$\nabla W_2$", "...", r"$\nabla W_{D-1}$", r"$\nabla W_D$")
    places = [1.15 * place for place in range(len(layers))]
    softmax, loss = places[-1] + 1.15, places[-1] + 2.2
    for kind, (axes, title) in enumerate(zip(panels, titles, strict=True)):
        panel(axes, "abc"[kind], title)
        axes.set(xlim=(-0.7, 7.3), ylim=(-depths[kind], 0.45), aspect="equal")
        axes.axis("off")
        for x, layer in zip([*places, softmax], [*layers, "softmax"], strict=True):
            _box(axes, x, 0, layer, FORWARD, 0.85)
            end = loss - 0.3 if layer == "softmax" else x + 0.725
            _arrow(axes, (x + 0.425, 0), (end, 0))
        _box(axes, loss, 0, "loss", "white", 0.6)
        axes.plot([loss, loss], [-0.25, -1], color="0.2", lw=0.9)
        if kind == 2:
            _box(axes, softmax, -1, "f", TRANSFORM, 0.5)
            _arrow(axes, (loss, -1), (softmax + 0.25, -1))
            _arrow(axes, (softmax - 0.25, -1), (places[-1] + 0.425, -1))
            _text(axes, softmax, -1.42, r"$p - q \to p\,' - q$")
        else:
            _arrow(axes, (loss, -1), (places[-1] + 0.425, -1))
            _text(axes, softmax, -0.88, r"$p - q$")
        for x, gradient in zip(places, gradients, strict=True):
            star = "*" if kind == 2 and gradient != "..." else ""
            _box(axes, x, -1, gradient + star, ALTERED if kind == 2 else BACKWARD, 0.85)
            if x:
                _arrow(axes, (x - 0.425, -1), (x - 0.725, -1))
            if kind == 1 and gradient != "...":
                _arrow(axes, (x, -1.25), (x, -1.45))
                _box(axes, x, -1.63, "f", TRANSFORM, 0.5, 0.34)
                _arrow(axes, (x, -1.8), (x, -1.98))
                _box(axes, x, -2.2, f"f({gradient})", ALTERED, 0.95, 0.42)
    legend = {
        "forward": FORWARD,
        "gradient, unaltered": BACKWARD,
        "transformation f": TRANSFORM,
        "gradient, altered": ALTERED,
    }
    swatches = [Rectangle((0, 0), 1, 1, facecolor=colour, **EDGE) for colour in legend.values()]
    place = {"loc": "outside lower center", "ncols": 4}
    figure.legend(swatches, legend, **place, frameon=False, fontsize=8)
    return figure


def prob_plots() -> Any:
    """The effect of alpha on a distribution."""
    classes = 10
    p = torch.from_numpy(np.random.default_rng(4).normal(0, 1.6, classes)).softmax(0)
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
    alphas = (1.0, 0.75, 0.5, 0.25, 0.1, 0.0)
    shades = plt.get_cmap("viridis")(np.linspace(0, 0.85, len(alphas)))
    orders = (
        ("a", "unordered", "class", torch.arange(classes)),
        ("b", "ordered by rank", "rank", p.argsort(descending=True)),
    )
    for axes, (letter, title, label, order) in zip(panels, orders, strict=True):
        for alpha, shade in zip(alphas, shades, strict=True):
            values = power_transform(p, alpha)[order]
            words = f"{alpha:g}" + (" (unaltered)" if alpha == 1 else "")
            axes.plot(range(1, classes + 1), values, "o-", color=shade, ms=4, label=words)
        panel(axes, letter, title)
        axes.axhline(1 / classes, color="0.6", lw=0.8, ls=":")
        axes.set_xticks(range(1, classes + 1))
        axes.set_xlabel(label)
    left, right = panels
    threshold = float(stationary_threshold(p, 0.5))
    right.axhline(threshold, color=RED, lw=0.8, ls="--")
    words = f"stationary threshold at α = 0.5: {threshold:.3f}"
    offset = {"xytext": (0, 3), "textcoords": "offset points"}
    right.annotate(words, (10, threshold), **offset, ha="right", fontsize=8, color=RED)
    right.legend(title="α", frameon=False)
    left.set_xlim(0.5, 10.9)
    left.text(10.3, 1 / classes, "1/C", va="center", fontsize=8, color=GREY)
    left.set_ylabel(r"$p_i\,'$")
    note(figure, [f"C = {classes}; logits drawn from a normal distribution, seed 4"])
    return figure


def simplenn() -> Any:
    """The fully connected head."""
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    axes.set(xlim=(-1.4, 7.6), ylim=(-3.1, 2.6), aspect="equal")
    axes.axis("off")
    _box(axes, 0, 0, "convolutional\nlayers,\nReLU,\npooling", FORWARD, 1.5, 2.6)
    _arrow(axes, (-1.3, 0), (-0.75, 0))
    _text(axes, -1.1, 0.15, r"$\mathbf{x}$", 12)
    rows = (1.6, 0.55, -1.6)

    def nodes(x: float, names: Sequence[str], colour: str, below: str) -> None:
        for y, name in zip(rows, names, strict=True):
            axes.add_patch(Circle((x, y), 0.36, facecolor=colour, edgecolor="0.2", zorder=3))
            _text(axes, x, y, name, 10, va="center", zorder=4)
        _text(axes, x, -0.5, "⋮", 14, va="center")
        _text(axes, x, -2.15, below, 11)

    features, logits, probabilities = 2.1, 4.5, 6.9
    for y in rows:
        _arrow(axes, (0.75, y * 0.6), (features - 0.36, y))
        for other in rows:
            axes.plot([features, logits], [y, other], color="0.7", lw=0.8, zorder=1)
        _arrow(axes, (logits + 0.36, y), (5.45, y * 0.8))
        _arrow(axes, (6.0, y * 0.8), (probabilities - 0.36, y))
    nodes(features, (r"$a_1$", r"$a_2$", r"$a_m$"), FORWARD, r"$\mathbf{a} \geq 0$")
    nodes(logits, (r"$z_1$", r"$z_2$", r"$z_C$"), FORWARD, r"$\mathbf{z}$")
    nodes(probabilities, (r"$p_1$", r"$p_2$", r"$p_C$"), "white", r"$\mathbf{p}$")
    _box(axes, 5.72, 0, "soft-\nmax", BACKWARD, 0.56, 3.4)
    _text(axes, 3.3, 2.1, r"$z_i = \sum_{j=1}^{m} w_{ij}\, a_j$", 11)
    _arrow(axes, (6.9, -2.85), (0, -2.85), color=RED)
    backward = (
        r"backward: $\partial L/\partial z_i = p_i\,' - q_i$,   "
        r"$\partial L/\partial w_{ij} = a_j\,(p_i\,' - q_i)$"
    )
    _text(axes, 3.5, -2.77, backward, 10, va="bottom", color=RED)
    return figure


def resnet18() -> Any:
    """The layers with the numbers of the package, read from the network itself."""
    weights = model_weights(create_model("resnet18", num_classes=1000, norm="none"))
    columns = [column for column, _ in weights]
    numbers = {column.layer: (column.number, column.units) for column in columns}
    figure, axes = plt.subplots(figsize=(11, 2.9), layout="constrained")
    axes.set(xlim=(-1.5, 21.4), ylim=(-0.9, 2.1))
    axes.axis("off")

    def layer(x: float, name: str, colour: str, kernel: str = "3×3") -> None:
        number, units = numbers[name]
        _box(axes, x, 0, f"{number}", colour, 0.72)
        _text(axes, x, -0.33, f"{kernel}\n{units}", 7, va="top")

    _text(axes, -1.15, 0, "image", va="center")
    _arrow(axes, (-0.75, 0), (-0.36, 0))
    layer(0, "conv1", ORANGE, "7×7")
    x, previous = 1.15, 0.36
    for stage, shade in enumerate(("#CFE5F3", "#A9D0EA", "#7DB6DC", "#4F9BCB"), start=1):
        begin = x
        for name in (f"layer{stage}.0", f"layer{stage}.1"):
            _arrow(axes, (previous, 0), (x - 0.36, 0))
            layer(x, f"{name}.conv1", shade)
            _arrow(axes, (x + 0.36, 0), (x + 0.69, 0))
            layer(x + 1.05, f"{name}.conv2", shade)
            # The skip connection, from before the block to after it.
            left, right, height = x - 0.47, x + 1.6, 0.75
            path = [0, height, height, 0.1]
            axes.plot([left, left, right, right], path, color="0.4", lw=0.9, zorder=0)
            _arrow(axes, (right, 0.25), (right, 0.1), color="0.4")
            if f"{name}.downsample.0" in numbers:
                number, units = numbers[f"{name}.downsample.0"]
                _box(axes, x + 0.52, height, f"{number}", GREEN, 0.72)
                _text(axes, x + 0.52, height + 0.3, f"1×1\n{units}", 7, va="bottom")
            axes.plot([x + 1.41, right - 0.1], [0, 0], color="0.2", lw=0.9)
            axes.plot([right], [0], "o", ms=9, mfc="white", mec="0.2", mew=0.8)
            axes.plot([right], [0], "+", ms=6, color="0.2", mew=0.8)
            previous = right + 0.1
            x += 2.25
        _text(axes, (begin + x - 1.2) / 2, 1.85, f"stage {stage}", 9)
        x += 0.12
    _arrow(axes, (previous, 0), (x - 0.3, 0))
    _box(axes, x + 0.05, 0, "pool", "white", 0.7)
    _arrow(axes, (x + 0.4, 0), (x + 0.7, 0))
    number, units = numbers["fc"]
    _box(axes, x + 1.06, 0, "FC", PURPLE, 0.72)
    _text(axes, x + 1.06, -0.33, f"({number})\n{units}", 7, va="top")
    note(figure, ["above: index of each convolution; below: its kernel and number of filters"])
    return figure


def code() -> Any:
    """The ratio of the listing's gradient to that of the equation, by loss scale."""
    rows, classes = 256, 1000
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    labels = torch.randint(classes, (rows,), generator=generator)
    one_hot = torch.nn.functional.one_hot(labels, classes).double()
    logits += one_hot * (np.log(classes) + 2)
    p = logits.softmax(-1)
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    scales = 2.0 ** np.arange(0, 17, 4)
    for alpha, colour in zip((0.05, 0.25, 0.3, 0.92), COLOURS, strict=False):
        ratios = []
        for scale in scales:
            listing = published_hook(scale / rows * (p - one_hot), one_hot, alpha)
            equation = scale / rows * ((alpha * logits).softmax(-1) - one_hot)
            ratios.append(float(listing.norm() / equation.norm()))
        axes.plot(scales, ratios, "o-", color=colour, ms=3, label=f"α = {alpha:g}")
    right = rows**2
    axes.axvspan(right * 1.15, 4 * right, color="0.9")
    words = "NaN: a true class\nunder $1 - N^2/S$"
    _text(axes, 2.1 * right, 40, words, rotation=90, va="bottom")
    axes.axhline(1, color="0.6", lw=0.8)
    arrow = {"arrowstyle": "->", "color": "0.3"}
    place = {"xytext": (0.9 * right, 60), "ha": "right", "fontsize": 9}
    axes.annotate("right, at $S = N^2$", (right, 1), **place, arrowprops=arrow)
    offset = {"xytext": (4, 0), "textcoords": "offset points"}
    axes.annotate("no scaler", (1, 1.3), **offset, fontsize=9, color=GREY)
    axes.set(xscale="log", yscale="log", xlim=(0.8, 4 * right))
    axes.set_xlabel(f"loss scale S, at N = {rows} rows")
    axes.set_ylabel("gradient: listing / equation")
    axes.set_title("The paper's listing against its equation", fontsize=10, loc="left")
    axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(0.88, 1))
    plain(axes)
    note(figure, [f"{classes} classes, float64, one random batch; see docs/audit.md"])
    return figure
