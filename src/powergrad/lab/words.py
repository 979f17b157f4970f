"""Small pieces of text that several modules print."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["did_you_mean", "duration", "markdown_table", "number", "short_key", "slug"]


def duration(seconds: float) -> str:
    """A time for people.

    Example:
        >>> duration(4.2), duration(200), duration(7500)
        ('4 s', '3 min 20 s', '2 h 05 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def did_you_mean(word: str, known: Iterable[str], *, most: int = 1) -> str:
    """The end of an error's sentence: the nearest known words, at most `most`, if any is near.

    Example:
        >>> did_you_mean("digit", ["digits", "cifar10"]), did_you_mean("x", ["digits"])
        ("; did you mean 'digits'?", '.')
    """
    near = difflib.get_close_matches(word, list(known), n=most, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else "."


def slug(text: str) -> str:
    """`text` as part of a file's name: other characters than letters, digits and ``-_.`` are ``-``.

    Example:
        >>> slug("alpha=0.3")
        'alpha-0.3'
    """
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in text)


def short_key(key: str) -> str:
    """A dotted key without its section.

    Example:
        >>> short_key("optimizer.lr"), short_key("optimizer.head.lr"), short_key("seed")
        ('lr', 'head.lr', 'seed')
    """
    return key.partition(".")[2] or key


def number(value: Any) -> str:
    """A value of a recipe: numbers without trailing zeros, everything else as it is.

    Example:
        >>> number(0.10000), number("batch")
        ('0.1', 'batch')
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f"{value:g}" if is_number else str(value)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table.

    Example:
        >>> print(markdown_table(["arm", "n"], [["pgt", "8"]]))
        | arm | n |
        |---|---|
        | pgt | 8 |
    """
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return "\n".join([lines[0], "|---" * len(header) + "|", *lines[1:]])
