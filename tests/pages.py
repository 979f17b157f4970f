"""The code in the pages, run as a reader would run it: from top to bottom.

A ```python block is run. If an output, a block without a language, follows it at once, what it
prints must be that; ``...`` stands for anything. Under ``<!-- needs: NAME -->`` it is run by
tests/integrations only, where that library is.
"""

import contextlib
import doctest
import io
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import powergrad

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]

FENCE = re.compile(
    r"^(?:<!-- needs: (?P<needs>\w+) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$"
    r"(?=(?:\n+```(?:text)?\n(?P<output>.*?)^```$)?)",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    code: str
    line: int  # its first line in the page, from 0
    needs: str | None  # the library that it needs beyond those of `make test`
    output: str | None  # what it prints, if the page says so


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks_of(text: str) -> list[Block]:
    return [
        Block(
            match["language"],
            match["code"],
            text.count("\n", 0, match.start("code")),
            match["needs"],
            match["output"],
        )
        for match in FENCE.finditer(text)
    ]


# Each page, with each library that some of its code needs.
NEEDED = [
    (page, library)
    for page in PAGES
    for library in sorted({block.needs for block in blocks_of(page.read_text()) if block.needs})
]


def run(text: str, name: str, needs: str | None = None, **given: Any) -> int:
    """Run the blocks of a page that need a library, or none, in one namespace; count them."""
    namespace = {**a_training(), **given}
    chosen = [b for b in blocks_of(text) if b.language == "python" and b.needs == needs]
    for block in chosen:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * block.line + block.code, name, "exec"), namespace)
        check = doctest.OutputChecker().check_output
        if block.output and not check(block.output, printed.getvalue(), doctest.ELLIPSIS):
            raise AssertionError(
                f"{name}, line {block.line}: the page says\n{block.output}but it prints\n"
                f"{printed.getvalue()}"
            )
    return len(chosen)


def a_training() -> dict[str, Any]:
    """What a reader has, and a page may use without making it: a small training."""
    torch.manual_seed(0)
    model = nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(1, 4, 3), relu=nn.ReLU(), flat=nn.Flatten(), fc=nn.Linear(144, 10)
        )
    )
    return {
        "torch": torch,
        "powergrad": powergrad,
        "logits": torch.randn(8, 10, requires_grad=True),
        "target": torch.arange(8),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "criterion": nn.CrossEntropyLoss(),
        "loader": [(torch.randn(8, 1, 8, 8), torch.arange(8))] * 20,
    }
