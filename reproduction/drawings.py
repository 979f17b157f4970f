"""The paper's figures: those of ``results/paper``, and the diagrams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.collections import LineCollection
from scipy.stats import linregress

from powergrad.lab.figures import COLOURS, save
from reproduction import diagrams
from reproduction.claims import PGT, SHORTER
from reproduction.diagrams import note, panel, plain
from reproduction.evidence import Evidence, Norms
from reproduction.published import Figure, Use, load_paper
from reproduction.trials import Trial, contrasts_of

FORMATS = ("png", "svg", "pdf")
BLUE, ORANGE, GREEN, _, RED = COLOURS[:5]
DEAD = "dead: a filter that ended under 1% of its own start, a feature that ended at 0"

Uses = tuple[Use, ...]
Panel = tuple[Use, int | None, str | None]


def draw(
    figure: Figure, evidence: Evidence, out: Path, formats: Sequence[str] = FORMATS
) -> list[Path]:
    """Draw a figure as PNG, SVG and PDF."""
    drawn = plot(figure, evidence)
    drawn.get_layout_engine().execute(drawn)
    drawn.set_layout_engine(None)  # do not repeat the layout for every format
    out.mkdir(parents=True, exist_ok=True)
    files = [out / f"{figure.name}.{kind}" for kind in formats]
    for file in files:
        save(drawn, file)
    return files


def plot(figure: Figure, evidence: Evidence) -> Any:
    """The matplotlib figure of a figure of the paper."""
    evidence.require(figure.uses)
    if figure.uses:
        return MEASURED[figure.name](evidence, figure.uses)
    return getattr(diagrams, figure.name)()


# Curves -------------------------------------------------------------------------------------------


def _metrics(evidence: Evidence, uses: Uses) -> Any:
    """Accuracy over epochs for two networks, and a shorter training against a longer one."""
    figure, panels = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    notes = []
    titles = ("ResNet-18", "ResNet-50")
    pairs = zip(uses[:4:2], uses[1:4:2], strict=True)
    for axes, letter, title, pair in zip(panels, "ab", titles, pairs, strict=False):
        runs = [evidence.most_tested(use) for use in pair]
        trial = runs[0].trial
        ours = trial.recipe.model.name
        assert trial.experiment is not None
        if ours != trial.experiment.baseline.recipe.model.name:
            title += f" in the paper, {ours} here"
        for run, colour in zip(runs, (BLUE, RED), strict=True):
            curve = run.curve()
            epochs, train, test = (curve[k] for k in ("epoch", "train_accuracy", "test_accuracy"))
            axes.plot(epochs, train, "--", color=colour, lw=1.2, label=f"{run.arm}: train")
            axes.plot(epochs, test, color=colour, lw=1.5, label=f"{run.arm}: test")
        notes.append(f"({letter}) {'; '.join(run.caption for run in runs)}")
        axes.set(xscale="log", yscale="log", xlabel="epoch", ylabel="accuracy (%)")
        _log_percent(axes)
        axes.legend(fontsize=8, loc="lower right", edgecolor="none", framealpha=0.8)
        panel(axes, letter, title)
    _fewer_epochs(panels[2], evidence)
    notes.append("(c) 95% intervals over the seeds of each study; the paper claims 0")
    note(figure, notes)
    return figure


def _fewer_epochs(axes: Any, evidence: Evidence) -> None:
    """60% of the epochs, with and without PGT, against cross-entropy with all of them."""
    contrasts = [
        contrast
        for trial in evidence.trials
        for contrast in contrasts_of(trial)
        if contrast.arm.methods in (SHORTER, PGT | SHORTER)
    ]
    labels = []
    for place, contrast in enumerate(contrasts):
        compared, has_pgt = contrast.comparison, contrast.arm.methods != SHORTER
        low, high = compared.interval
        middle = compared.difference
        bars = {"fmt": "o", "capsize": 3, "color": RED if has_pgt else BLUE}
        axes.errorbar(middle, place, xerr=[[middle - low], [high - middle]], **bars)
        network, _, rest = contrast.arm.measured_on.partition(" of width 8 on ")
        name = "PGT" if has_pgt else "cross-entropy"
        data = rest.partition(",")[0]
        labels.append(f"{name}: {network},\n{data}, n = {compared.n}")
    axes.axvline(0, color="0.5", lw=0.8)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlabel("difference, points of test accuracy")
    axes.locator_params(axis="x", nbins=5)
    panel(axes, "c", "60% of the epochs, against 100%")


def _log_percent(axes: Any) -> None:
    """Plain numbers as ticks of a logarithmic axis of accuracies, as many as fit."""
    low, high = np.log(axes.get_ylim())
    ticks: list[int] = []
    for tick in (100, 95, 90, 80, 70, 60, 50, 40, 30, 20, 10, 5, 2, 1):
        place = np.log(tick)
        has_room = not ticks or np.log(ticks[-1]) - place > 0.06 * (high - low)
        if low <= place <= high and has_room:
            ticks.append(tick)
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.yaxis.set_minor_formatter(lambda value, place: "")


# Norms --------------------------------------------------------------------------------------------


def _filters(axes: Any, norms: Norms, layer: int | None, title: str, size: int = 9) -> None:
    """One line per filter, each in its own colour."""
    values = norms.layers[layer]
    colours = plt.get_cmap("hsv")(np.random.default_rng(7).random(values.shape[1]))
    lines = [np.column_stack([norms.steps, unit]) for unit in values.T]
    # Rasterised also in SVG and PDF, because a page has thousands of lines.
    axes.add_collection(LineCollection(lines, colors=colours, linewidths=0.6, rasterized=True))
    shown = values[np.isfinite(values)]
    axes.set_ylim(0, 1.05 * shown.max() if shown.size else 1)
    axes.set_xlim(norms.steps[0], norms.steps[-1])
    axes.set_title(title, fontsize=size)
    axes.ticklabel_format(axis="x", style="sci", scilimits=(-3, 4))
    plain(axes)


def _norm_panels(evidence: Evidence, columns: int, panels: Sequence[Panel]) -> Any:
    """Panels of filter norms, given the run, the layer and the name of the method."""
    runs = {use: evidence.kept_run(use) for use, _, _ in panels}
    norms = {use: run.norms() for use, run in runs.items()}
    rows = len(panels) // columns
    size = (4.1 * columns, 2.9 * rows + 0.5)
    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for place, (axes, (use, layer, method)) in enumerate(zip(grid.flat, panels, strict=True)):
        what = "features after pooling" if layer is None else f"layer {layer}"
        letter = f"({'abcdef'[place]}) " if len(panels) > 1 else ""
        dead = norms[use].dead_in_words(layer)
        _filters(axes, norms[use], layer, f"{letter}{what}, {method}\ndead: {dead}")
        axes.set_ylabel("RMS of the feature" if layer is None else "norm of the filter")
        if place >= len(panels) - columns:
            axes.set_xlabel("iteration")
    note(figure, [DEAD, *(run.caption for run in runs.values())])
    return figure


def _norm_plots(evidence: Evidence, uses: Uses) -> Any:
    methods = zip(uses, ("without PGT", "with PGT"), strict=True)
    panels = [(use, layer, method) for use, method in methods for layer in (11, 20, None)]
    return _norm_panels(evidence, 3, panels)


def _high_bs(evidence: Evidence, uses: Uses) -> Any:
    return _norm_panels(evidence, 1, [(uses[0], 5, "large batch")])


def _agc_pgt(evidence: Evidence, uses: Uses) -> Any:
    return _norm_panels(evidence, 3, [(use, layer, use.arm) for layer in (15, 2) for use in uses])


def _norm_page(evidence: Evidence, uses: Uses) -> Any:
    """The filter norms of every layer of one run."""
    run = evidence.kept_run(uses[0])
    norms = run.norms()
    figure, grid = plt.subplots(5, 4, figsize=(10, 12), sharex=True, layout="constrained")
    layers = [layer for layer in norms.layers if layer is not None][:20]
    for axes, layer in zip(grid.flat, layers, strict=False):
        _filters(axes, norms, layer, f"layer {layer}, dead: {norms.dead_in_words(layer)}", 8)
        axes.tick_params(labelsize=7)
        axes.locator_params(nbins=4)
    for axes in grid.flat[len(layers) :]:
        axes.axis("off")
    figure.supylabel("norm of each filter", fontsize=9)
    figure.suptitle(f"{run.name}: filter norms over iterations", fontsize=10)
    note(figure, [DEAD, run.caption])
    return figure


# Grids --------------------------------------------------------------------------------------------


def _over_alpha(trial: Trial, metric: str) -> list[tuple[float, list[float]]]:
    """The metric of the seeds for each alpha."""
    values = {arm: list(trial.results.values(arm, metric).values()) for arm in trial.results.arms}
    return sorted((trial.alpha(arm), seeds) for arm, seeds in values.items() if seeds)


def _seeds(axes: Any, trial: Trial, metric: str, colour: str) -> None:
    points = _over_alpha(trial, metric)
    for alpha, values in points:
        axes.plot([alpha] * len(values), values, "o", color=colour, alpha=0.3, ms=4, mec="none")
    means = [sum(values) / len(values) for _, values in points]
    axes.plot([alpha for alpha, _ in points], means, "o-", color=colour, ms=5)


def _grid_note(trial: Trial) -> list[str]:
    return [f"{trial.arms[0].measured_on}; the run of every point: {trial.name}.csv"]


def _grid(evidence: Evidence, uses: Uses) -> Any:
    """Test and training accuracy against alpha."""
    trial = evidence.best(uses[0])
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axes, metric, words, colour in (
        (left, "test_accuracy", "test accuracy (%)", BLUE),
        (right, "train_accuracy", "training accuracy (%)", ORANGE),
    ):
        _seeds(axes, trial, metric, colour)
        baseline = trial.results.mean(trial.results.baseline, metric)
        axes.axhline(baseline, color="0.5", lw=0.8, ls="--")
        axes.set(xlabel="α", ylabel=words)
        plain(axes)
    seeds = max(len(values) for _, values in _over_alpha(trial, "test_accuracy"))
    words = f"every run, and the mean of {seeds} seeds" if seeds > 1 else "one run per α"
    left.set_title(words, fontsize=9, loc="left")
    right.set_title("dashed: α = 1", fontsize=9, loc="left")
    note(figure, _grid_note(trial))
    return figure


def _stats(evidence: Evidence, uses: Uses) -> Any:
    """Logit norm and loss against alpha, and against each other."""
    trial = evidence.best(uses[0])
    figure, (first, second, third) = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    _seeds(first, trial, "logit_norm", BLUE)
    first.set(xlabel="α", ylabel="mean norm of the logits, test set", yscale="log")
    _seeds(second, trial, "nll", ORANGE)
    second.set(xlabel="α", ylabel="cross-entropy, test set", yscale="log")
    norms, losses = trial.pairs("logit_norm", "nll")
    slope, intercept, r, *_ = linregress(norms, losses)
    third.plot(norms, losses, "o", color=GREEN, alpha=0.5, mec="none")
    ends = np.array([norms.min(), norms.max()])
    third.plot(ends, slope * ends + intercept, color="0.3", lw=1)
    third.set(xlabel="mean norm of the logits", ylabel="cross-entropy")
    paper = load_paper().numbers
    words = (
        f"here: {slope:.5f} x {intercept:+.5f}  (r = {r:.2f})\n"
        f"paper: {paper['regression-slope']} x +{paper['regression-intercept']}"
    )
    third.text(0.03, 0.97, words, transform=third.transAxes, va="top", fontsize=8)
    third.margins(y=0.15)
    titles = ("logit norm against α", "loss against α", "loss against logit norm")
    for axes, letter, title in zip((first, second, third), "abc", titles, strict=True):
        panel(axes, letter, title)
    note(figure, _grid_note(trial))
    return figure


MEASURED: dict[str, Callable[[Evidence, Uses], Any]] = {
    "metrics": _metrics,
    "norm_plots": _norm_plots,
    "high_bs": _high_bs,
    "agc_pgt": _agc_pgt,
    "stats": _stats,
    **dict.fromkeys(("grid_searcha", "grid_searchb", "grid_searchc"), _grid),
    **dict.fromkeys(("norms_baseline", "norms_large_batch"), _norm_page),
    **dict.fromkeys(("norms_pgt", "norms_agc_pgt"), _norm_page),
}
