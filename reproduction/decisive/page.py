"""What docs/does-it-help.md shows of the findings: its generated regions and its figures."""

from __future__ import annotations

from pathlib import Path

from reproduction.decisive.figure import draw
from reproduction.decisive.findings import Findings
from reproduction.decisive.points import draw_points, points_table
from reproduction.marks import Regions

__all__ = ["decisive_regions", "draw_figures"]


def decisive_regions(results: Path) -> Regions:
    """The regions, from a folder ``results``."""
    findings = Findings.read(results)
    return {
        "decisive-answer": findings.answer,
        "decisive-figure": findings.figure_line,
        "decisive-arms": findings.table,
        "decisive-choices": findings.choices_table,
        "decisive-null": findings.null_sentence,
        "decisive-points": lambda: points_table(findings),
    }


def draw_figures(results: Path, images: Path) -> None:
    """Draw the figures into the folder `images`."""
    findings = Findings.read(results)
    if findings.look is not None:
        draw(findings, images / "decisive.png")
    draw_points(findings, images / "decisive_points.png")
