"""The page: one HTML file that shows the results of studies and runs in any browser.

It is created from results and run folders, and works offline: style, script and data are in the
file, and its content security policy forbids every request. Our own script draws with SVG and
canvas, because a plotting library would be larger than all the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from powergrad.lab.files import write_text
from powergrad.lab.report.content import describe_sources
from powergrad.lab.report.page import make_data, make_page
from powergrad.lab.study import Results

__all__ = ["write_report"]


def write_report(sources: Sequence[Path | Results], out: Path) -> Path:
    """Write the page of studies and runs, which may be unfinished; return its path."""
    page = make_page(make_data(describe_sources(sources)))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, page)
    return out
