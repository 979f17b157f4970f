"""The figure of docs/does-it-help.md: what was measured, beside what the paper reports."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from powergrad.lab.figures import COLOURS, save
from reproduction.claims import CLAIMS, published_gains
from reproduction.decisive.findings import Findings
from reproduction.decisive.rule import MARGIN, interval

# The lines of the figure, by regime and arm: a title, and the claim with the published gains.
LINES = {
    ("norm", "pgt"): ("PGT, with batch normalisation", "pgt-bn"),
    ("plain", "pgt"): ("PGT, without normalisation", "pgt"),
    ("plain", "agc+pgt"): ("AGC + PGT, without normalisation", "agc-pgt"),
}


def draw(findings: Findings, path: Path) -> None:
    """Every difference from CE2 with its 90% interval, and the published gains."""
    claims = {claim.id: claim for claim in CLAIMS}
    lines = [line for line in LINES if findings.pairs(line[1])[line[0]]]
    figure, axes = plt.subplots(figsize=(8, 1.5 + 0.6 * len(lines)), layout="constrained")
    axes.axvspan(-MARGIN, MARGIN, color="0.93", label=f"within {MARGIN:g} points")
    axes.axvline(0, color="0.5", linewidth=0.8)
    for place, (regime, arm) in enumerate(lines):
        pairs = findings.pairs(arm)[regime]
        named = ("one repeat", "Fashion-MNIST, 90% interval", "the paper, ImageNet")
        labels = named if place == 0 else (None,) * 3
        dots = {"alpha": 0.3, "mec": "none", "color": COLOURS[0]}
        axes.plot(pairs, [place] * len(pairs), "o", label=labels[0], **dots)
        if len(pairs) > 1:
            mean, (low, high) = float(np.mean(pairs)), interval(pairs)
            bars = {"fmt": "o", "capsize": 4, "color": COLOURS[0], "label": labels[1]}
            axes.errorbar(mean, place, xerr=[[mean - low], [high - mean]], **bars)
        gains = [gain for gain, _ in published_gains(claims[LINES[regime, arm][1]])]
        diamonds = {"color": COLOURS[4], "markersize": 5, "label": labels[2]}
        axes.plot(gains, [place + 0.25] * len(gains), "D", **diamonds)
    axes.set_yticks(range(len(lines)), [LINES[line][0] for line in lines])
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.set_xlabel("difference from tuned cross-entropy, points of test accuracy")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    save(figure, path)
