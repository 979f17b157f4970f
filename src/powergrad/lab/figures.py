"""Plots of finished studies and run folders."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from powergrad.lab.files import write_atomically
from powergrad.lab.stats import t_interval
from powergrad.lab.study import Metric, Results
from powergrad.lab.words import short_key

# The palette of Okabe and Ito, which is safe for common colour blindness.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442", "#000000")


def save(figure: Any, path: Path) -> None:
    """Write a figure atomically, in the format of the suffix of `path`."""
    kind = path.suffix.removeprefix(".")
    write_atomically(path, lambda file: figure.savefig(file, format=kind, dpi=150))
    plt.close(figure)


def draw_study(results: Results, path: Path, note: str = "") -> None:
    """Draw a study: a sweep over numbers as lines, any other study with one row per arm."""
    keys = results.grid.values.keys() if results.grid else ()
    arms = results.study.arms.values() if results.study else ()
    is_whole = all(changes.keys() >= set(keys) for changes in arms)  # a single grid
    is_line = results.grid is not None and results.grid.is_numeric and is_whole
    figure = (sweep_figure if is_line else study_figure)(results)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    if note:
        figure.supxlabel(_literal(note), fontsize=7, color="0.4")
    save(figure, path)


def _label(metric: Metric) -> str:
    return metric.title + (" (%)" if metric.name.endswith("accuracy") else "")


def _literal(text: str) -> str:
    """Escape dollar signs, which matplotlib would interpret as mathematics."""
    return text.replace("$", r"\$")


def study_figure(results: Results) -> Any:
    """The runs of each arm, and the differences from the baseline with their intervals."""
    arms = results.arms
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9.5, 1.4 + 0.45 * len(arms)), sharey=True, layout="constrained"
    )
    for place, arm in enumerate(arms):
        values = list(results.units(arm).values())
        colour = COLOURS[place % len(COLOURS)]
        left.plot(values, [place] * len(values), "o", color=colour, alpha=0.4, mec="none")
        left.plot([results.mean(arm)], [place], "|", color=colour, ms=18, mew=3)
        if comparison := results.comparison(arm):
            low, high = comparison.interval
            right.plot([low, high], [place, place], color=colour, lw=2.5)
            right.plot([comparison.difference], [place], "o", color=colour)
            end = high if math.isfinite(high) else comparison.difference
            right.annotate(f" {comparison.verdict}", (end, place), va="center", fontsize=8)
    right.axvline(0, color="0.4", lw=1)
    right.axvspan(-results.margin, results.margin, color="0.9", zorder=0)
    left.set_yticks(range(len(arms)), [_literal(arm) for arm in arms])
    left.set_xlabel(_label(results.metric))
    left.set_title("every run, and the mean", fontsize=10)
    right.set_xlabel(f"difference from {_literal(results.baseline)}")
    right.set_title("mean and 95% interval; grey: the margin", fontsize=10)
    right.margins(x=0.25)
    left.set_ylim(len(arms) - 0.5, -0.5)
    return figure


def sweep_figure(results: Results) -> Any:
    """The metric over the first key of a grid, with one line per combination of the other keys."""
    assert results.study is not None
    assert results.grid is not None
    key, *others = list(results.grid.values)
    lines: dict[str, list[tuple[float, float, float, float]]] = {}
    for arm, changes in results.study.arms.items():
        values = list(results.values(arm).values())
        mean = results.mean(arm)
        low, high = t_interval(values) if len(values) > 1 else (mean, mean)
        name = ", ".join(f"{short_key(other)} {changes[other]}" for other in others)
        lines.setdefault(name, []).append((float(changes[key]), mean, low, high))
    figure, axes = plt.subplots(figsize=(6.5, 4), layout="constrained")
    for number, (name, points) in enumerate(lines.items()):
        x, mean, low, high = zip(*sorted(points), strict=True)
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(x, mean, "o-", color=colour, label=name or None)
        axes.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)
    axes.set_xlabel(short_key(key))
    axes.set_ylabel(_label(results.metric))
    axes.set_title(f"mean and 95% interval; {results.metric.better} is better", fontsize=10)
    if others:
        axes.legend(frameon=False)
    return figure
