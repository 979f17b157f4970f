"""Generated regions of pages that are otherwise written by hand.

A region is all that stands between two marks, each on a line of its own:

    <!-- table NAME -->

    what is generated: a table, or sentences with numbers

    <!-- end table NAME -->
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

REGION = re.compile(r"<!-- table ([\w.-]+) -->\n.*?<!-- end table \1 -->", re.DOTALL)

Regions = Mapping[str, Callable[[], str]]  # what makes the content of a region, by its name


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return "\n".join([lines[0], "|---" * len(header) + "|", *lines[1:]])


def region_names(page: str) -> list[str]:
    r"""The names of a page's regions.

    Raises:
        ValueError: If a mark has no partner.

    Example:
        >>> region_names("<!-- table a -->\n\n1\n\n<!-- end table a -->")
        ['a']
    """
    names = REGION.findall(page)
    for mark in ("<!-- table ", "<!-- end table "):
        if page.count(mark) != len(names):
            raise ValueError(f"Expected every mark `{mark}NAME -->` to have its partner.")
    return names


def fill(page: str, regions: Regions) -> str:
    """`page` with all its regions made anew.

    Raises:
        ValueError: If nothing makes one of its regions, or a mark has no partner.
    """
    if unknown := set(region_names(page)) - set(regions):
        raise ValueError(f"Expected regions that can be generated, but got {sorted(unknown)}.")

    def fresh(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- table {name} -->\n\n{regions[name]()}\n\n<!-- end table {name} -->"

    return REGION.sub(fresh, page)
