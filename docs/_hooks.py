"""What the site needs beyond its pages: the examples beside them, and docstrings as Markdown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from griffe import Extension, Object
from mkdocs.structure.files import File, Files

EXAMPLES = Path(__file__).parents[1] / "examples"


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Copy the examples, which lie outside docs/, into the site."""
    for path in sorted(EXAMPLES.glob("*.py")):
        name = f"examples/{path.name}"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point links to the examples, as they are in a checkout, to those of the site."""
    return markdown.replace("](../examples/", "](examples/")


class PlainDocstrings(Extension):
    """The roles and tables of reStructuredText that docstrings use, as Markdown."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of `obj`."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Rewrite :func:`name` as `name`, a table as a block of code, "Example:" as the section."""
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
    text = re.sub(r":(?:class|func|meth|mod):(`[\w.]+`)", r"\1", text)
    rule = r"=+(?:  +=+)+\n"
    return re.sub(rf"^{rule}.*?{rule}.*?{rule}", r"```text\n\g<0>```\n", text, flags=re.M | re.S)
