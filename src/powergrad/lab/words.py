"""Formatting of times, sizes, numbers and tables."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any


def duration(seconds: float) -> str:
    """A duration in readable form.

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


def parse_duration(text: str) -> float:
    """Seconds from ``90s``, ``10m``, ``2h`` or ``1h30m``.

    Example:
        >>> parse_duration("90s"), parse_duration("10m"), parse_duration("1h30m")
        (90.0, 600.0, 5400.0)
    """
    match = re.fullmatch(r"(?:([\d.]+)h)?(?:([\d.]+)m)?(?:([\d.]+)s)?", text.replace(" ", ""))
    try:
        parts = [float(part or 0) for part in match.groups()] if match else []
    except ValueError:
        parts = []
    seconds = sum(part * unit for part, unit in zip(parts, (3600, 60, 1), strict=False))
    if not seconds > 0:
        raise ValueError(f"Expected a time such as 90s, 10m, 2h or 1h30m, but got {text!r}.")
    return seconds


def bytes_in_words(count: float) -> str:
    """A number of bytes in readable form.

    Example:
        >>> bytes_in_words(900), bytes_in_words(2_500_000), bytes_in_words(3.2e9)
        ('900 B', '2.5 MB', '3.2 GB')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def spans(numbers: Iterable[int]) -> str:
    """Integers, with consecutive ones as ranges.

    Example:
        >>> spans([0, 1, 2, 3, 7, 9, 10])
        '0-3, 7, 9-10'
    """
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)


def hide_folders(text: str) -> str:
    """Shorten every absolute path in `text` to its last name, for files that are shared.

    Example:
        >>> hide_folders("--data.name folder:/home/ann/photos --out='/home/ann/my runs'")
        "--data.name folder:photos --out='my runs'"
    """
    prefix = r"(?:[\w.-]+[=:])*"
    quoted = rf"(?<=')(?={prefix}[/~]){prefix}[^']*(?=')"
    plain = rf"(?<![^\s(\"]){prefix}[/~][^\s'\",;)]*"
    return re.sub(f"{quoted}|{plain}", _last_name, text)


def _last_name(match: re.Match[str]) -> str:
    path = match[0].rstrip("/")
    prefix = re.match(r"(?:[\w.-]+[=:])*", path)
    name = path.rpartition("/")[2]
    return (prefix[0] if prefix else "") + name if "/" in path else match[0]


def did_you_mean(word: str, known: Iterable[str], *, most: int = 1) -> str:
    """The end of an error message: a suggestion of up to `most` similar words, or a full stop.

    Example:
        >>> did_you_mean("digit", ["digits", "cifar10"]), did_you_mean("x", ["digits"])
        ("; did you mean 'digits'?", '.')
    """
    near = difflib.get_close_matches(word, list(known), n=most, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else "."


def slug(text: str) -> str:
    """`text` for a file name: characters except letters, digits and ``-_.`` become ``-``.

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
    """Format a value of a recipe: numbers without trailing zeros, others unchanged.

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
