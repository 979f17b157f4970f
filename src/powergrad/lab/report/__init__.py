"""The page: one HTML file, for anyone with a browser, that shows what studies and runs came to.

It is made from what run and study folders hold, and asks nothing of any network: style, script and
data are in the file, and its content security policy forbids every request. The drawing is a
script of our own over SVG and canvas: a plotting library would weigh more than all the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from powergrad.lab.report.collect import collect
from powergrad.lab.report.page import make_page
from powergrad.lab.run import write_atomically

__all__ = ["write_report"]


def write_report(paths: Sequence[Path], out: Path) -> Path:
    """Write the page of runs and studies.

    A study that is not finished, or whose runs diverged, has a page that says so. Runs that are not
    of a study are shown together, without a verdict.

    Args:
        paths: Folders of runs, of studies, or that hold some.
        out: The file to write; its folder is made if missing.

    Returns:
        `out`.

    Raises:
        RunError: If a path holds neither a run nor a study, or `out` cannot be written.
    """
    page = make_page(collect(paths)).encode("utf-8", "replace")  # a file's name may not be UTF-8
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, lambda file: file.write(page))
    return out
