"""The tuning runs of docs/protocol.md, point by point. Not part of its rule: this is exploratory.

Cross-entropy and PGT were tried at the same points, with the same seeds, and each point gives both
the same backbone. So every pair of tuning runs shows what PGT's head does there, not only at the
point that was chosen.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.lines import Line2D

from powergrad.lab.figures import save
from powergrad.lab.stats import format_signed
from reproduction.decisive.findings import AXES, Findings, chosen_settings
from reproduction.decisive.observed import REGIMES, Rows, chance
from reproduction.marks import markdown_table

RATES = AXES[0]
PARTS = 3  # of the range of the learning rate
SHOWN = 3.0  # points of accuracy; larger differences are drawn at the edge


class PointPair(NamedTuple):
    """The accuracies of cross-entropy and of another arm on held-out data, at one point."""

    lr: float  # of the backbone
    decay: float
    baseline: float | None  # in per cent; None if the run failed
    other: float | None

    @property
    def difference(self) -> float | None:
        """The other arm minus cross-entropy; None if a run failed."""
        if self.baseline is None or self.other is None:
            return None
        return self.other - self.baseline


def paired_points(rows: Rows, arm: str = "pgt") -> list[PointPair]:
    """The points that cross-entropy and `arm` have both tried, with the same seed."""
    tried: dict[str, dict[tuple[str, ...], float | None]] = {"baseline": {}, arm: {}}
    for row in rows:
        if row["phase"] == "tuning" and row["arm"] in tried:
            settings = chosen_settings(row)
            point = (settings["optimizer.lr"], settings["optimizer.weight_decay"])
            key = (row["seed"], *(f"{value:.5g}" for value in point))
            tried[row["arm"]][key] = _accuracy(row)
    both = [key for key in tried["baseline"] if key in tried[arm]]
    return sorted(
        PointPair(float(key[1]), float(key[2]), tried["baseline"][key], tried[arm][key])
        for key in both
    )


def _accuracy(row: dict[str, str]) -> float | None:
    """The accuracy of a run; None if it diverged or learned nothing (within a point of chance)."""
    if row["diverged"] == "True":
        return None
    accuracy = float(row["test_accuracy"])
    return accuracy if accuracy > chance(row) + 1 else None


def points_table(findings: Findings) -> str:
    """PGT against cross-entropy at the same points, by the learning rate."""
    bounds = [RATES.at(part / PARTS) for part in range(PARTS + 1)]
    lines = []
    for regime, title in REGIMES.items():
        pairs = paired_points(findings.rows[regime])
        for low, high in itertools.pairwise(bounds):
            part = [pair for pair in pairs if low <= pair.lr < high]
            gaps = [pair.difference for pair in part if pair.difference is not None]
            failed = [sum(pair[place] is None for pair in part) for place in (2, 3)]
            cells = (title, f"{low:.2g} to {high:.2g}", str(len(part)), _mean(gaps))
            ahead = f"{sum(gap > 0 for gap in gaps)} of {len(gaps)}"
            lines.append((*cells, ahead, *map(str, failed)))
    head = ("regime", "learning rate of the backbone", "points", "PGT2 - CE2")
    more = ("PGT2 ahead", "CE2 failed", "PGT2 failed")
    return markdown_table((*head, *more), lines)


def _mean(values: Sequence[float]) -> str:
    if len(values) < 2:
        return format_signed(values[0]) if values else ""
    error = float(np.std(values, ddof=1)) / len(values) ** 0.5
    return f"{format_signed(float(np.mean(values)))} ± {error:.2f}"


def draw_points(findings: Findings, path: Path) -> None:
    """The difference at every point against the learning rate, one panel per regime."""
    figure, panels = plt.subplots(
        1, len(REGIMES), figsize=(8.5, 3.6), sharey=True, layout="constrained"
    )
    decays = AXES[1]
    scale, colours = LogNorm(decays.low, decays.high), plt.get_cmap("viridis")
    shown: dict[str, Line2D] = {}
    for axes, (regime, title) in zip(panels, REGIMES.items(), strict=True):
        axes.axhline(0, color="0.5", linewidth=0.8)
        for pair in paired_points(findings.rows[regime]):
            marker, label, height = _mark(pair)
            look = {"marker": marker, "markersize": 6, "markeredgecolor": "0.3"}
            look |= {"markeredgewidth": 0.5, "linestyle": "none"}
            height = float(np.clip(height, -SHOWN, SHOWN))
            axes.plot(pair.lr, height, color=colours(scale(pair.decay)), **look)
            shown.setdefault(label, Line2D([], [], color="0.7", label=label, **look))
        axes.set_xscale("log")
        axes.set_xlim(RATES.low, RATES.high)
        axes.set_title(title, fontsize="medium")
        axes.set_xlabel("learning rate of the backbone")
    panels[0].set_ylabel("PGT - cross-entropy, points")
    panels[0].set_ylim(-SHOWN - 0.3, SHOWN + 0.3)
    figure.colorbar(ScalarMappable(scale, colours), ax=panels, label="weight decay of the backbone")
    figure.legend(handles=[*shown.values()], loc="outside lower center", ncols=4, frameon=False)
    save(figure, path)


def _mark(pair: PointPair) -> tuple[str, str, float]:
    """The marker of a pair, what it means, and how high it is drawn."""
    if pair.difference is not None:
        return "o", "both learned", pair.difference
    if pair.other is not None:
        return "^", "only PGT learned", SHOWN
    if pair.baseline is not None:
        return "v", "only cross-entropy learned", -SHOWN
    return "X", "both failed", 0.0
