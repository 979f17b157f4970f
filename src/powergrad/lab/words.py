"""Formatting of times, numbers and texts."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

CLOSE = 0.65  # how alike a typed word and a suggestion are at least


def duration(seconds: float) -> str:
    """A duration in readable form."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def parse_duration(text: str, option: str = "--budget") -> float:
    """The seconds of an option: ``90s``, ``10m``, ``2h`` or ``1h30m``."""
    number = r"(\d+\.?\d*|\.\d+)"
    match = re.fullmatch(f"(?:{number}h)?(?:{number}m)?(?:{number}s)?", text.replace(" ", ""))
    hours, minutes, rest = (float(part or 0) for part in match.groups()) if match else (0, 0, 0)
    seconds = 3600 * hours + 60 * minutes + rest
    if not seconds > 0:
        wanted = f"{option} to be a time such as 90s, 10m, 2h or 1h30m"
        raise ValueError(f"Expected {wanted}, but got {text!r}.")
    return seconds


def hide_folders(text: str, place: str = "") -> str:
    """Shorten every absolute path in `text` to `place` and its name, for files that are shared."""
    prefix = r"(?:[\w.-]+[=:])*"
    quoted = rf"(?<=')(?={prefix}[/~]){prefix}[^']*(?=')"
    plain = rf"(?<![^\s(\"]){prefix}[/~][^\s'\",;)]*"

    def shorten_path(match: re.Match[str]) -> str:
        path = match[0].rstrip("/")
        start = re.match(r"(?:[\w.-]+[=:])*", path)
        name = path.rpartition("/")[2]
        return f"{start[0] if start else ''}{place}{name}" if "/" in path else match[0]

    return re.sub(f"{quoted}|{plain}", shorten_path, text)


def portable(command: str) -> str:
    """A command line for shared files: it runs in the same folder, or says what to replace."""
    return hide_folders(command.replace(f"{Path.cwd()}/", ""), "/path/to/")


def hide_password(text: str) -> str:
    """`text` without the user and password of every address in it."""
    return re.sub(r"(?<=://)[^/@\s]*@|[^\s/@:'\"]+:[^\s/@'\"]+@", "", text)


def did_you_mean(
    word: str, known: Iterable[str], *, most: int = 1, meanings: Mapping[str, str] = {}
) -> str:
    """The end of an error message: a suggestion of up to `most` similar words, or a full stop.

    A dotted key is also compared by its end, and by its meaning, if `meanings` has it.
    """
    typed = word.lstrip("-").split(".")

    def likeness(name: str) -> float:
        parts = name.lstrip("-").split(".")
        ends = [(typed, parts), (typed, parts[-len(typed) :]), (typed[-1:], parts[-1:])]
        ratios = [difflib.SequenceMatcher(None, ".".join(a), ".".join(b)).ratio() for a, b in ends]
        is_meant = len(typed[-1]) > 3 and typed[-1].replace("_", " ") in meanings.get(name, "")
        return max(ratios[0], ratios[1], 0.9 * ratios[2], 0.9 * is_meant)

    near = [name for name in sorted(known, key=likeness, reverse=True) if likeness(name) > CLOSE]
    return f"; did you mean {' or '.join(map(repr, near[:most]))}?" if near else "."


def slug(text: str) -> str:
    """`text` for a file name: characters except letters, digits and ``-_.`` become ``-``."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in text)


def shorten(text: str, most: int = 80) -> str:
    """`text` without its middle if it is long."""
    half = (most - 5) // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"


def short_key(key: str) -> str:
    """A dotted key without its section."""
    return key.partition(".")[2] or key
