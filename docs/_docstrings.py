"""Docstrings as Markdown, for the API pages (`extensions` in mkdocs.yml)."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object


class PlainDocstrings(Extension):
    """The roles and tables of reStructuredText that docstrings use, as Markdown."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of `obj`."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Rewrite :func:`name` as `name`, a table as a block of code, "Example:" as the section."""
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
    text = re.sub(r":(?:class|func|meth|mod):`(?:~[\w.]+\.)?([\w.]+)`", r"`\1`", text)
    rule = r"=+(?:  +=+)+\n"
    return re.sub(rf"^{rule}.*?{rule}.*?{rule}", r"```text\n\g<0>```\n", text, flags=re.M | re.S)
