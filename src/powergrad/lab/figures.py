"""The figure of a finished study."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.colors import hsv_to_rgb

from powergrad.lab.files import write_atomically
from powergrad.lab.study import Results

# The palette of Okabe and Ito, which is safe for common colour blindness.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442", "#000000")


def save(figure: Any, path: Path) -> None:
    """Write a figure atomically, in the format of the suffix of `path`."""
    kind = path.suffix.removeprefix(".")
    write_atomically(path, lambda file: figure.savefig(file, format=kind, dpi=150))
    plt.close(figure)


def draw_study(results: Results, path: Path, note: str = "") -> None:
    """Draw the runs of each arm, and the differences from the baseline with their intervals."""
    arms = results.arms
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9.5, 1.4 + 0.45 * len(arms)), sharey=True, layout="constrained"
    )
    for place, arm in enumerate(arms):
        values = list(results.units(arm).values())
        colour: Any = place * 0.382 % 1, 0.6, 0.7  # the golden angle
        colour = COLOURS[place] if place < len(COLOURS) else hsv_to_rgb(colour)
        left.plot(values, [place] * len(values), "o", color=colour, alpha=0.4, mec="none")
        left.plot([results.mean(arm)], [place], "|", color=colour, ms=18, mew=3)
        if comparison := results.comparison(arm):
            low, high = comparison.interval
            if math.isfinite(high - low):
                right.plot([low, high], [place, place], color=colour, lw=2.5)
            right.plot([comparison.difference], [place], "o", color=colour)
            end = high if math.isfinite(high) else comparison.difference
            right.annotate(f" {comparison.verdict}", (end, place), va="center", fontsize=8)
    right.axvline(0, color="0.4", lw=1)
    right.axvspan(-results.margin, results.margin, color="0.9", zorder=0)
    left.set_yticks(range(len(arms)), [_literal(arm) for arm in arms])
    unit = " (%)" if results.metric.name.endswith("accuracy") else ""
    left.set_xlabel(results.metric.title + unit)
    left.set_title("every run, and the mean", fontsize=10)
    against = next((c.baseline for c in results.comparisons), results.baseline)
    right.set_xlabel(f"difference from {_literal(against)}")
    has_interval = any(math.isfinite(c.interval[1]) for c in results.comparisons)
    shown = "mean and 95% interval" if has_interval else "mean, without an interval"
    right.set_title(f"{shown}; grey: the margin", fontsize=10)
    right.margins(x=0.25)
    left.set_ylim(len(arms) - 0.5, -0.5)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    if note:
        figure.supxlabel(_literal(note), fontsize=7, color="0.4")
    save(figure, path)


def _literal(text: str) -> str:
    """Escape dollar signs, which matplotlib would interpret as mathematics."""
    return text.replace("$", r"\$")
