"""The paper's figures, drawn from the mathematics, the networks, and ``results/paper``."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.collections import LineCollection
from matplotlib.patches import Circle, Rectangle

from powergrad import power_transform, stationary_threshold
from powergrad.lab.figures import COLOURS, save
from powergrad.lab.models import create_model
from powergrad.lab.paper.as_published import published_hook
from powergrad.lab.paper.evidence import Evidence, Measurement, Norms
from powergrad.lab.paper.rows import load_paper
from powergrad.monitor.layers import named_units

__all__ = ["FORMATS", "draw"]

FORMATS = ("png", "svg", "pdf")
BLUE, ORANGE, GREEN, PURPLE, RED = COLOURS[:5]
GREY = "0.35"
DEAD = "dead: a filter that ended under 1% of its own start, a feature that ended at 0"
# The paper's colours of Figure 1, from the palette that colour-blind people can tell apart.
FORWARD, BACKWARD, TRANSFORM, ALTERED = "#9CC9E8", "#F5CE85", "#8FD6BD", "#EFA07A"


def draw(name: str, evidence: Evidence, out: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Draw a figure as PNG, SVG and PDF.

    Args:
        name: Its name in ``published.yaml``.
        evidence: What was measured.
        out: The folder that the files go to, made if missing.
        formats: Which of the three.

    Returns:
        The files.

    Raises:
        MissingRunsError: If it needs runs that were not made.
    """
    figure = _DRAWERS[name](evidence)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # it is laid out now, and need not be for every format
    out.mkdir(parents=True, exist_ok=True)
    files = [out / f"{name}.{kind}" for kind in formats]
    for file in files:
        save(figure, file)
    return files


def _panel_title(axes: Any, letter: str, text: str) -> None:
    axes.set_title(f"({letter}) {text}", fontsize=10, loc="left")


def _plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def _note(figure: Any, lines: Sequence[str]) -> None:
    """What the figure was drawn from, below it."""
    width = int(figure.get_figwidth() * 18)  # characters of this size in an inch
    wrapped = [part for line in dict.fromkeys(lines) for part in textwrap.wrap(line, width)]
    figure.supxlabel("\n".join(wrapped), fontsize=7, color=GREY)


# Diagrams -----------------------------------------------------------------------------------------


def _box(
    axes: Any, x: float, y: float, text: str, colour: str, width: float = 0.8, height: float = 0.5
) -> None:
    """A labelled box with its middle at (x, y)."""
    patch = Rectangle(
        (x - width / 2, y - height / 2), width, height, facecolor=colour, edgecolor="0.2", lw=0.8
    )
    axes.add_patch(patch)
    axes.text(x, y, text, ha="center", va="center", fontsize=8)


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], **style: Any) -> None:
    style = {"arrowstyle": "-|>", "color": "0.2", "lw": 0.9, "shrinkA": 0, "shrinkB": 0, **style}
    axes.annotate("", end, start, arrowprops=style)


def _gradient_altering(evidence: Evidence) -> Any:
    depths = (1.55, 2.5, 1.55)  # below the forward pass: type I has two rows more
    figure, panels = plt.subplots(
        3, 1, figsize=(8, 7.8), height_ratios=[0.45 + each for each in depths], layout="constrained"
    )
    titles = (
        "Type 0: gradients as they are",
        "Type I: every gradient altered after all are computed (GC, AGC)",
        "Type II: altered once, early; all others follow by the chain rule (PGT)",
    )
    layers = ("conv 1", "conv 2", "...", "conv D-1", "linear D")
    for kind, (axes, title) in enumerate(zip(panels, titles, strict=True)):
        _panel_title(axes, "abc"[kind], title)
        axes.set(xlim=(-0.7, 7.3), ylim=(-depths[kind], 0.45), aspect="equal")
        axes.axis("off")
        places = [1.15 * place for place in range(len(layers))]
        softmax, loss = places[-1] + 1.15, places[-1] + 2.2
        for x, layer in zip(places, layers, strict=True):
            _box(axes, x, 0, layer, FORWARD, 0.85)
            _arrow(axes, (x + 0.425, 0), (x + 0.725, 0))
        _box(axes, softmax, 0, "softmax", FORWARD, 0.85)
        _arrow(axes, (softmax + 0.425, 0), (loss - 0.3, 0))
        _box(axes, loss, 0, "loss", "white", 0.6)
        axes.plot([loss, loss], [-0.25, -1], color="0.2", lw=0.9)
        altered = ALTERED if kind == 2 else BACKWARD
        start = (loss, -1.0)
        if kind == 2:
            _box(axes, softmax, -1, "f", TRANSFORM, 0.5)
            _arrow(axes, start, (softmax + 0.25, -1))
            _arrow(axes, (softmax - 0.25, -1), (places[-1] + 0.425, -1))
            axes.text(softmax, -1.42, r"$p - q \to p\,' - q$", ha="center", fontsize=8)
        else:
            _arrow(axes, start, (places[-1] + 0.425, -1))
            axes.text(softmax, -0.88, r"$p - q$", ha="center", fontsize=8)
        names = (r"$\nabla W_1$", r"$\nabla W_2$", "...", r"$\nabla W_{D-1}$", r"$\nabla W_D$")
        for i, (x, name) in enumerate(zip(places, names, strict=True)):
            star = "*" if kind == 2 and name != "..." else ""
            _box(axes, x, -1, name + star, altered, 0.85)
            if i:
                _arrow(axes, (x - 0.425, -1), (x - 0.725, -1))
            if kind == 1 and name != "...":
                _arrow(axes, (x, -1.25), (x, -1.45))
                _box(axes, x, -1.63, "f", TRANSFORM, 0.5, 0.34)
                _arrow(axes, (x, -1.8), (x, -1.98))
                _box(axes, x, -2.2, f"f({name})", ALTERED, 0.95, 0.42)
    swatches = [
        Rectangle((0, 0), 1, 1, facecolor=colour, edgecolor="0.2", lw=0.8)
        for colour in (FORWARD, BACKWARD, TRANSFORM, ALTERED)
    ]
    words = ("forward", "gradient, unaltered", "transformation f", "gradient, altered")
    figure.legend(swatches, words, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def _prob_plots(evidence: Evidence) -> Any:
    classes = 10
    logits = torch.from_numpy(np.random.default_rng(4).normal(0, 1.6, classes))
    p = logits.softmax(0)
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
    alphas = (1.0, 0.75, 0.5, 0.25, 0.1, 0.0)
    shades = plt.get_cmap("viridis")(np.linspace(0, 0.85, len(alphas)))
    order = p.argsort(descending=True)
    for axes, letter, title, places in zip(
        panels, "ab", ("unordered", "ordered by rank"), (torch.arange(classes), order), strict=True
    ):
        for alpha, shade in zip(alphas, shades, strict=True):
            values = power_transform(p, alpha)[places]
            label = f"{alpha:g}" + (" (unaltered)" if alpha == 1 else "")
            axes.plot(range(1, classes + 1), values, "o-", color=shade, ms=4, label=label)
        _panel_title(axes, letter, title)
        axes.axhline(1 / classes, color="0.6", lw=0.8, ls=":")
        axes.set_xticks(range(1, classes + 1))
        axes.set_xlabel("class" if letter == "a" else "rank")
        _plain(axes)
    threshold = float(stationary_threshold(p, 0.5))
    panels[1].axhline(threshold, color=RED, lw=0.8, ls="--")
    panels[1].annotate(
        f"stationary threshold at α = 0.5: {threshold:.3f}",
        (10, threshold),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color=RED,
    )
    panels[0].set_xlim(0.5, 10.9)
    panels[0].text(10.3, 1 / classes, "1/C", va="center", fontsize=8, color=GREY)
    panels[0].set_ylabel(r"$p_i\,'$")
    panels[1].legend(title="α", frameon=False)
    _note(figure, [f"C = {classes}; logits drawn from a normal distribution, seed 4"])
    return figure


def _simplenn(evidence: Evidence) -> Any:
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    axes.set(xlim=(-1.4, 7.6), ylim=(-3.1, 2.6), aspect="equal")
    axes.axis("off")
    _box(axes, 0, 0, "convolutional\nlayers,\nReLU,\npooling", FORWARD, 1.5, 2.6)
    _arrow(axes, (-1.3, 0), (-0.75, 0))
    axes.text(-1.1, 0.15, r"$\mathbf{x}$", fontsize=12, ha="center")
    rows = (1.6, 0.55, -1.6)

    def nodes(x: float, names: Sequence[str], colour: str) -> None:
        for y, name in zip(rows, names, strict=True):
            axes.add_patch(Circle((x, y), 0.36, facecolor=colour, edgecolor="0.2", zorder=3))
            axes.text(x, y, name, ha="center", va="center", fontsize=10, zorder=4)
        axes.text(x, -0.5, "⋮", ha="center", va="center", fontsize=14)

    features, logits, probabilities = 2.1, 4.5, 6.9
    for y in rows:
        _arrow(axes, (0.75, y * 0.6), (features - 0.36, y))
        for other in rows:
            axes.plot([features, logits], [y, other], color="0.7", lw=0.8, zorder=1)
        _arrow(axes, (logits + 0.36, y), (5.45, y * 0.8))
        _arrow(axes, (6.0, y * 0.8), (probabilities - 0.36, y))
    nodes(features, (r"$a_1$", r"$a_2$", r"$a_m$"), FORWARD)
    nodes(logits, (r"$z_1$", r"$z_2$", r"$z_C$"), FORWARD)
    nodes(probabilities, (r"$p_1$", r"$p_2$", r"$p_C$"), "white")
    _box(axes, 5.72, 0, "soft-\nmax", BACKWARD, 0.56, 3.4)
    axes.text(3.3, 2.1, r"$z_i = \sum_{j=1}^{m} w_{ij}\, a_j$", ha="center", fontsize=11)
    for x, text in ((features, r"$\mathbf{a} \geq 0$"), (logits, r"$\mathbf{z}$")):
        axes.text(x, -2.15, text, ha="center", fontsize=11)
    axes.text(probabilities, -2.15, r"$\mathbf{p}$", ha="center", fontsize=11)
    _arrow(axes, (6.9, -2.85), (0, -2.85), color=RED)
    axes.text(
        3.5,
        -2.77,
        r"backward: $\partial L/\partial z_i = p_i\,' - q_i$,   "
        r"$\partial L/\partial w_{ij} = a_j\,(p_i\,' - q_i)$",
        ha="center",
        va="bottom",
        fontsize=10,
        color=RED,
    )
    return figure


def _resnet18(evidence: Evidence) -> Any:
    """The layers as the package numbers them, read off the network itself."""
    units_of = named_units(create_model("resnet18", num_classes=1000, norm="none"))
    numbers = {layer.name: (layer.number, layer.units) for layer, _ in units_of}
    figure, axes = plt.subplots(figsize=(11, 2.9), layout="constrained")
    axes.set(xlim=(-1.5, 21.4), ylim=(-0.9, 2.1))
    axes.axis("off")

    def layer(x: float, name: str, colour: str, y: float = 0.0, kernel: str = "3×3") -> None:
        number, units = numbers[name]
        _box(axes, x, y, f"{number}", colour, 0.72, 0.5)
        axes.text(x, y - 0.33, f"{kernel}\n{units}", ha="center", va="top", fontsize=7)

    axes.text(-1.15, 0, "image", ha="center", va="center", fontsize=8)
    _arrow(axes, (-0.75, 0), (-0.36, 0))
    layer(0, "conv1", ORANGE, kernel="7×7")
    x = 1.15
    previous = 0.36
    shades = ("#CFE5F3", "#A9D0EA", "#7DB6DC", "#4F9BCB")
    for stage in range(4):
        begin = x
        for block in range(2):
            name = f"layer{stage + 1}.{block}"
            _arrow(axes, (previous, 0), (x - 0.36, 0))
            layer(x, f"{name}.conv1", shades[stage])
            _arrow(axes, (x + 0.36, 0), (x + 0.69, 0))
            layer(x + 1.05, f"{name}.conv2", shades[stage])
            # The skip connection, from before the block to after it.
            left, right, height = x - 0.47, x + 1.6, 0.75
            path = [0, height, height, 0.1]
            axes.plot([left, left, right, right], path, color="0.4", lw=0.9, zorder=0)
            _arrow(axes, (right, 0.25), (right, 0.1), color="0.4")
            down = f"{name}.downsample.0"
            if down in numbers:
                number, units = numbers[down]
                _box(axes, x + 0.52, height, f"{number}", GREEN, 0.72, 0.5)
                axes.text(
                    x + 0.52, height + 0.3, f"1×1\n{units}", ha="center", va="bottom", fontsize=7
                )
            axes.plot([x + 1.41, right - 0.1], [0, 0], color="0.2", lw=0.9)
            axes.plot([right], [0], "o", ms=9, mfc="white", mec="0.2", mew=0.8)
            axes.plot([right], [0], "+", ms=6, color="0.2", mew=0.8)
            previous = right + 0.1
            x += 2.25
        axes.text((begin + x - 1.2) / 2, 1.85, f"stage {stage + 1}", ha="center", fontsize=9)
        x += 0.12
    _arrow(axes, (previous, 0), (x - 0.3, 0))
    _box(axes, x + 0.05, 0, "pool", "white", 0.7, 0.5)
    _arrow(axes, (x + 0.4, 0), (x + 0.7, 0))
    number, units = numbers["fc"]
    _box(axes, x + 1.06, 0, "FC", PURPLE, 0.72, 0.5)
    axes.text(x + 1.06, -0.33, f"({number})\n{units}", ha="center", va="top", fontsize=7)
    _note(figure, ["above: index of each convolution; below: its kernel and number of filters"])
    return figure


def _code(evidence: Evidence) -> Any:
    """What the listing computes: its gradient's size over the equation's, by the loss scale."""
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
            got = published_hook(scale / rows * (p - one_hot), one_hot, alpha)
            want = scale / rows * ((alpha * logits).softmax(-1) - one_hot)
            ratios.append(float(got.norm() / want.norm()))
        axes.plot(scales, ratios, "o-", color=colour, ms=3, label=f"α = {alpha:g}")
    right = rows**2
    axes.axvspan(right * 1.15, 4 * right, color="0.9")
    axes.text(2.1 * right, 40, "NaN: a true class\nunder $1 - N^2/S$", fontsize=8, ha="center",
              rotation=90, va="bottom")  # fmt: skip
    axes.axhline(1, color="0.6", lw=0.8)
    axes.annotate(
        "right, at $S = N^2$",
        (right, 1),
        xytext=(0.9 * right, 60),
        ha="right",
        fontsize=9,
        arrowprops={"arrowstyle": "->", "color": "0.3"},
    )
    axes.annotate(
        "no scaler", (1, 1.3), xytext=(4, 0), textcoords="offset points", fontsize=9, color=GREY
    )
    axes.set(xscale="log", yscale="log", xlim=(0.8, 4 * right))
    axes.set_xlabel(f"loss scale S, at N = {rows} rows")
    axes.set_ylabel("gradient: listing / equation")
    axes.set_title("The paper's listing against its equation", fontsize=10, loc="left")
    axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(0.88, 1))
    _plain(axes)
    _note(figure, [f"{classes} classes, float64, one random batch; see docs/audit.md"])
    return figure


# Runs ---------------------------------------------------------------------------------------------


def _metrics(evidence: Evidence) -> Any:
    pairs = (
        ("T1.7/baseline", "T1.7/PGT"),
        ("T3-cosine/baseline", "T3-cosine/PGT 0.3"),
        ("E60/baseline", "E60/PGT"),
    )
    curves = [[evidence.curve(use) for use in pair] for pair in pairs]
    figure, panels = plt.subplots(1, 3, figsize=(12, 4.2), layout="constrained")
    notes = []
    titles = ("ResNet-18", "ResNet-50", "60% of the epochs against 100%")
    for axes, letter, title, pair in zip(panels, "abc", titles, curves, strict=True):
        captions = []
        ours = pair[0][1].about["recipe"]["model"]["name"]
        theirs = pair[0][1].experiment.rows[0].recipe.model.name
        if letter != "c" and ours != theirs:
            title += f" in the paper, {ours} here"
        for (curve, study, caption), colour in zip(pair, (BLUE, RED), strict=True):
            arm = caption.partition(",")[0].partition(" ")[2]
            epochs, test = curve["epoch"], curve["test_accuracy"]
            label = f"{arm}: test"
            if letter == "c":
                label = f"{arm}: {test[-1]:.1f}% after {epochs[-1]:g} epochs"
                axes.plot(epochs[-1:], test[-1:], "o", color=colour)
            else:
                train = curve["train_accuracy"]
                axes.plot(epochs, train, "--", color=colour, lw=1.2, label=f"{arm}: train")
            axes.plot(epochs, test, color=colour, lw=1.5, label=label)
            captions.append(f"{caption} ({study.describe(arm)})")
        notes.append(f"({letter}) {'; '.join(captions)}")
        axes.set(xscale="log", yscale="log", xlabel="epoch", ylabel="accuracy (%)")
        _log_percent(axes)
        axes.legend(fontsize=8, loc="lower right", edgecolor="none", framealpha=0.8)
        _panel_title(axes, letter, title)
        _plain(axes)
    _note(figure, notes)
    return figure


def _log_percent(axes: Any) -> None:
    """Ticks of a logarithmic axis of accuracies as plain numbers, as many as have room."""
    low, high = np.log(axes.get_ylim())
    ticks: list[int] = []
    for tick in (100, 95, 90, 80, 70, 60, 50, 40, 30, 20, 10, 5, 2, 1):
        place = np.log(tick)
        room = not ticks or np.log(ticks[-1]) - place > 0.06 * (high - low)
        if low <= place <= high and room:
            ticks.append(tick)
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.yaxis.set_minor_formatter(lambda value, place: "")


def _filters(axes: Any, norms: Norms, key: str, title: str, size: int = 9) -> None:
    """A line a filter, each in a colour of its own."""
    values = norms.values[key]
    colours = plt.get_cmap("hsv")(np.random.default_rng(7).random(values.shape[1]))
    lines = [np.column_stack([norms.steps, unit]) for unit in values.T]
    # As pixels also in SVG and PDF: a page has thousands of lines.
    axes.add_collection(LineCollection(lines, colors=colours, linewidths=0.6, rasterized=True))
    shown = values[np.isfinite(values)]
    axes.set_ylim(0, 1.05 * shown.max() if shown.size else 1)
    axes.set_xlim(norms.steps[0], norms.steps[-1])
    axes.set_title(title, fontsize=size)
    axes.ticklabel_format(axis="x", style="sci", scilimits=(-3, 4))
    _plain(axes)


def _dead(norms: Norms, key: str) -> str:
    """How many units are dead at the end."""
    dead = norms.dead(key)
    return "diverged" if dead is None else f"{int(dead.sum())} of {dead.size} dead"


def _norm_figure(evidence: Evidence, panels: Sequence[tuple[str, str, str]], columns: int) -> Any:
    """Panels of filter norms: which run, which layer, and the method's name."""
    found = {use: evidence.norms(use) for use in dict.fromkeys(use for use, _, _ in panels)}
    lines = len(panels) // columns
    figure, grid = plt.subplots(
        lines, columns, figsize=(4.1 * columns, 2.9 * lines + 0.5), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for place, (axes, (use, key, method)) in enumerate(zip(grid.flat, panels, strict=True)):
        norms = found[use]
        what = "features after pooling" if key == "feature" else f"layer {key[5:]}"
        title = f"({'abcdef'[place]}) {what}, {method}" if len(panels) > 1 else f"{what}, {method}"
        _filters(axes, norms, key, f"{title}\n{_dead(norms, key)}")
        axes.set_ylabel("RMS of the feature" if key == "feature" else "norm of the filter")
        if place >= len(panels) - columns:
            axes.set_xlabel("iteration")
    _note(figure, [DEAD, *_sources(evidence, found)])
    return figure


def _sources(evidence: Evidence, found: dict[str, Norms]) -> list[str]:
    return [
        f"{norms.caption}: {evidence.best(use).describe(use.partition('/')[2])}"
        for use, norms in found.items()
    ]


def _norm_plots(evidence: Evidence) -> Any:
    keys = ("layer11", "layer20", "feature")
    return _norm_figure(
        evidence,
        [("T2-256/baseline", key, "without PGT") for key in keys]
        + [("T2-256/PGT", key, "with PGT") for key in keys],
        3,
    )


def _high_bs(evidence: Evidence) -> Any:
    return _norm_figure(evidence, [("T2-1024/baseline", "layer5", "large batch")], 1)


def _agc_pgt(evidence: Evidence) -> Any:
    arms = (
        ("T2-256/baseline", "baseline"),
        ("T2-256/PGT", "PGT"),
        ("T2-256/AGC + PGT", "AGC + PGT"),
    )
    panels = [(use, key, words) for key in ("layer15", "layer2") for use, words in arms]
    return _norm_figure(evidence, panels, 3)


def _norm_page(use: str) -> Callable[[Evidence], Any]:
    def page(evidence: Evidence) -> Any:
        norms = evidence.norms(use)
        figure, grid = plt.subplots(5, 4, figsize=(10, 12), sharex=True, layout="constrained")
        layers = [key for key in norms.values if key != "feature"][:20]
        for axes, key in zip(grid.flat, layers, strict=False):
            _filters(axes, norms, key, f"layer {key[5:]}: {_dead(norms, key)}", 8)
            axes.tick_params(labelsize=7)
            axes.locator_params(nbins=4)
        for axes in grid.flat[len(layers) :]:
            axes.axis("off")
        figure.supylabel("norm of each filter", fontsize=9)
        row = norms.caption.partition(",")[0]
        figure.suptitle(f"{row}: filter norms over iterations", fontsize=10)
        _note(figure, [DEAD, *_sources(evidence, {use: norms})])
        return figure

    return page


# Grids --------------------------------------------------------------------------------------------


def _over_alpha(study: Measurement, metric: str) -> list[tuple[float, list[float]]]:
    """Each alpha with the metric of its seeds."""
    alphas = {row.arm: row.recipe.loss.alpha for row in study.experiment.rows}
    found = [(alphas[arm], list(study.values(arm, metric).values())) for arm in study.arms]
    return sorted((alpha, values) for alpha, values in found if values)


def _seeds(axes: Any, study: Measurement, metric: str, colour: str, label: str) -> None:
    points = _over_alpha(study, metric)
    for alpha, values in points:
        axes.plot([alpha] * len(values), values, "o", color=colour, alpha=0.3, ms=4, mec="none")
    means = [sum(values) / len(values) for _, values in points]
    axes.plot([alpha for alpha, _ in points], means, "o-", color=colour, ms=5, label=label)


def _grid(experiment: str) -> Callable[[Evidence], Any]:
    def grid(evidence: Evidence) -> Any:
        study = evidence.best(experiment)
        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
        for axes, metric, words, colour in (
            (left, "test_accuracy", "test accuracy (%)", BLUE),
            (right, "train_accuracy", "training accuracy (%)", ORANGE),
        ):
            _seeds(axes, study, metric, colour, "mean")
            baseline = study.mean(study.experiment.rows[0].arm, metric)
            axes.axhline(baseline, color="0.5", lw=0.8, ls="--")
            axes.set_xlabel("α")
            axes.set_ylabel(words)
            _plain(axes)
        seeds = max(len(values) for _, values in _over_alpha(study, "test_accuracy"))
        words = f"every run, and the mean of {seeds} seeds" if seeds > 1 else "one run an α"
        left.set_title(words, fontsize=9, loc="left")
        right.set_title("dashed: α = 1", fontsize=9, loc="left")
        _note(figure, [f"{study.describe()}; the run of every point: {study.stem.name}.csv"])
        return figure

    return grid


def _stats(evidence: Evidence) -> Any:
    study = evidence.best("G18")
    figure, (first, second, third) = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    _seeds(first, study, "logit_norm", BLUE, "")
    first.set(xlabel="α", ylabel="mean norm of the logits, test set", yscale="log")
    _seeds(second, study, "nll", ORANGE, "")
    second.set(xlabel="α", ylabel="cross-entropy, test set", yscale="log")
    _panel_title(first, "a", "logit norm against α")
    _panel_title(second, "b", "loss against α")
    pairs = np.array([(row["logit_norm"], row["nll"]) for row in study.rows])
    norms, losses = pairs[np.isfinite(pairs).all(1)].T
    slope, intercept = np.polyfit(norms, losses, 1)
    r = np.corrcoef(norms, losses)[0, 1]
    third.plot(norms, losses, "o", color=GREEN, alpha=0.5, mec="none")
    ends = np.array([norms.min(), norms.max()])
    third.plot(ends, slope * ends + intercept, color="0.3", lw=1)
    third.set(xlabel="mean norm of the logits", ylabel="cross-entropy")
    published = {claim["id"]: claim["value"] for claim in load_paper().claims}
    third.text(
        0.03,
        0.97,
        f"here: {slope:.5f} x {intercept:+.5f}  (r = {r:.2f})\n"
        f"paper: {published['regression-slope']} x +{published['regression-intercept']}",
        transform=third.transAxes,
        va="top",
        fontsize=8,
    )
    third.margins(y=0.15)
    _panel_title(third, "c", "loss against logit norm")
    for axes in (first, second, third):
        _plain(axes)
    _note(figure, [f"{study.describe()}; the run of every point: {study.stem.name}.csv"])
    return figure


_DRAWERS: dict[str, Callable[[Evidence], Any]] = {
    "gradient_altering": _gradient_altering,
    "prob_plots": _prob_plots,
    "simplenn": _simplenn,
    "metrics": _metrics,
    "norm_plots": _norm_plots,
    "high_bs": _high_bs,
    "agc_pgt": _agc_pgt,
    "stats": _stats,
    "code": _code,
    "grid_searcha": _grid("G18"),
    "grid_searchb": _grid("G50"),
    "grid_searchc": _grid("G20"),
    "norms_baseline": _norm_page("T2-256/baseline"),
    "norms_large_batch": _norm_page("T2-1024/baseline"),
    "norms_pgt": _norm_page("T2-256/PGT"),
    "norms_agc_pgt": _norm_page("T2-256/AGC + PGT"),
    "resnet18": _resnet18,
}
