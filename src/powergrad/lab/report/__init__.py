"""The page: one HTML file for any browser that shows the results of studies and runs.

It is made from results and run folders, and needs no network: style, script and data are in the
file, and its content security policy forbids every request. The drawing is a script of our own over
SVG and canvas: a plotting library would weigh more than all the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from powergrad.lab.files import write_text
from powergrad.lab.report.collect import collect
from powergrad.lab.report.page import make_page
from powergrad.lab.study import Results

__all__ = ["write_report"]


def write_report(sources: Sequence[Path | Results], out: Path) -> Path:
    """Write the page of runs and studies.

    A study that is not finished, or whose runs diverged, has a page that says so. Runs that are not
    of a study are shown together, without a verdict.

    Args:
        sources: Results of studies; or folders of runs, of studies, or that hold some.
        out: The file to write; its folder is made if missing.

    Returns:
        `out`.

    Raises:
        RunError: If a path holds neither a run nor a study, or `out` cannot be written.
    """
    page = make_page(collect(sources))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, page)
    return out
