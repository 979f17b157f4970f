"""The figure of README.md and docs/does-it-help.md: the paper's gains, and what was measured."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from powergrad.lab.figures import COLOURS, save
from powergrad.lab.stats import format_interval, format_signed
from reproduction.claims import CLAIMS, published_gains
from reproduction.decisive.findings import Findings
from reproduction.decisive.observed import REGIMES
from reproduction.decisive.rule import interval
from reproduction.diagrams import note, plain

# The rows of the figure: a regime, and the claim with the published gains.
ROWS = {"norm": "pgt-bn", "plain": "pgt"}


def draw(findings: Findings, path: Path) -> None:
    """PGT minus tuned cross-entropy in each repeat, with 90% intervals, below the paper's gains."""
    claims = {claim.id: claim for claim in CLAIMS}
    differences = findings.pairs("pgt")
    figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
    axes.axvline(0, color="0.5", linewidth=0.8)
    ours, paper = COLOURS[0], COLOURS[4]
    for place, (regime, claim) in enumerate(ROWS.items()):
        pairs = differences[regime]
        gains = [gain for gain, _ in published_gains(claims[claim])]
        words = f"the paper, ImageNet: {min(gains):+.2f} to {max(gains):+.2f}"
        axes.plot(gains, [place - 0.12] * len(gains), "D", color=paper, markersize=5)
        axes.text(max(gains) + 0.06, place - 0.12, words, color=paper, fontsize=9, va="center")
        mean, (low, high) = float(np.mean(pairs)), interval(pairs)
        dots = {"alpha": 0.3, "mec": "none", "color": ours}
        axes.plot(pairs, [place + 0.14] * len(pairs), "o", **dots)
        bars = {"fmt": "o", "capsize": 4, "color": ours}
        axes.errorbar(mean, place + 0.14, xerr=[[mean - low], [high - mean]], **bars)
        words = f"here: {format_signed(mean)} ({format_interval((low, high))})"
        axes.text(max(pairs) + 0.06, place + 0.14, words, color=ours, fontsize=9, va="center")
    axes.set_yticks(range(len(ROWS)), [REGIMES[regime].replace(" ", "\n", 1) for regime in ROWS])
    axes.tick_params(left=False)
    axes.set_ylim(len(ROWS) - 0.6, -0.4)
    axes.set_xlim(right=2.4)
    axes.set_xlabel("← cross-entropy better        points of test accuracy        PGT better →")
    axes.set_title("PGT minus cross-entropy", fontsize=11, loc="left")
    words = (
        "here: Fashion-MNIST, learning rate and weight decay tuned for both; small dots: "
        f"{len(differences['norm'])} independent tunings; in brackets: the 90% interval"
    )
    note(figure, [words])
    plain(axes)
    save(figure, path)
