"""The style of the paper's figures."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

GREY = "0.35"


def panel_title(axes: Any, letter: str, text: str) -> None:
    """The title of a panel, with its letter."""
    axes.set_title(f"({letter}) {text}", fontsize=10, loc="left")


def plain(axes: Any) -> None:
    """Remove the frame at the top and on the right."""
    axes.spines[["top", "right"]].set_visible(False)


def note(figure: Any, lines: Sequence[str]) -> None:
    """Add a note below the figure about its data."""
    width = int(figure.get_figwidth() * 18)  # characters of this size per inch
    wrapped = [part for line in dict.fromkeys(lines) for part in textwrap.wrap(line, width)]
    figure.supxlabel("\n".join(wrapped), fontsize=7, color=GREY)
