"""The metrics of a user's program: from its output, its files and its reports."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from typing_extensions import Self

from powergrad.lab.runs.jobs import Record
from powergrad.lab.runs.process import lines_of
from powergrad.lab.trainer.recipe import RecipeError

MEASURED = ("seconds", "memory")  # the metrics that every run of a command has

# A minus after a letter or a digit is a hyphen, and commas separate groups of three digits.
SIGN = r"(?:(?<!\w)[+\-\N{MINUS SIGN}])?"
EXPONENT = r"(?:[eE][+-]?\d+)?"
GROUPED = rf"[1-9]\d{{0,2}}(?:,\d{{3}})+(?!,?\d)(?:\.\d*)?{EXPONENT}"
NOT_FINITE = r"(?<![^\W_])(?i:nan|inf(?:inity)?)(?![^\W_])"
PLAIN = rf"(?:\d+(?:_\d+)*\.?\d*|\.\d+){EXPONENT}"
NUMBER = re.compile(f"{SIGN}(?:{GROUPED}|{PLAIN}|{NOT_FINITE})")
# What opens or closes a group in a regular expression, and what may contain parentheses.
PARENTHESES = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?P<\w+>|\(\??|\)", re.DOTALL)


class Missing(Exception):  # noqa: N818
    """A metric was not found."""


class Sources(Record):
    """The sources of metrics, in addition to ``powergrad.report``.

    A regular expression is applied to the lines of the output, and its last match counts; its name
    is that of the metric if it has no named groups. Its groups also match signs, exponents, commas
    between thousands, NaN and infinity: otherwise the value of an earlier epoch would count. A file
    is the name of a metric, a path, and a dotted key in JSON or a column of a CSV, whose last row
    counts.
    """

    regexes: tuple[tuple[str, str], ...] = ()
    files: tuple[tuple[str, str, str], ...] = ()
    wanted: tuple[str, ...] = ()  # the metrics that every run must have

    @classmethod
    def parse(
        cls,
        regexes: Sequence[str],
        files: Sequence[str],
        metric: str | None = None,
        tune_metric: str | None = None,
    ) -> Self:
        """Parse ``--metric-regex`` and ``--metric-file``."""
        compiled = [(text, _compile(text)) for text in regexes]
        is_single = len(regexes) + len(files) == 1 and not tune_metric and metric not in MEASURED
        named = [(_name_of(regex, metric if is_single else None), text) for text, regex in compiled]
        placed = []
        for text in files:
            path, colon, key = text.rpartition(":")
            if not colon or not path or not key:
                wanted = "Expected --metric-file to be FILE:KEY, such as results.json:val.acc"
                raise RecipeError(f"{wanted}, but got {text!r}.")
            placed.append((metric if metric and is_single else key, path, key))
        wanted = tuple(dict.fromkeys(name for name in (metric, tune_metric) if name))
        sources = cls(regexes=tuple(named), files=tuple(placed), wanted=wanted)
        for name in sources.names:
            if sources.names.count(name) > 1:
                raise RecipeError(f"Expected each metric once, but got {name!r} from two sources.")
        return sources

    @property
    def names(self) -> list[str]:
        """The metrics known before the first run, which does not include those of `report`."""
        names = [name for name, _ in self.regexes if name]
        names += [name for _, text in self.regexes for name in re.compile(text).groupindex]
        return names + [name for name, _, _ in self.files]

    def read(
        self,
        output: Path,
        report: Path,
        out: Path,
        placeholders: Mapping[str, str],
        measured: Mapping[str, float] = {},
    ) -> dict[str, float]:
        """The metrics of a run that has ended, in addition to those that were measured."""
        metrics = json.loads(report.read_text()) if report.is_file() else {}
        metrics |= self._matched(output)
        for name, path, key in self.files:
            metrics[name] = _of_file(out / path.format(**placeholders), key)
        missing = [name for name in self.wanted if name not in {**measured, **metrics}]
        if missing or not (metrics or self.wanted):
            wanted = f"the metric {missing[0]!r}" if missing else "a metric"
            listed = ", ".join(map(repr, metrics)) or "none"
            places = [f"--metric-regex {text!r}" for _, text in self.regexes]
            places += [f"--metric-file {path}:{key}" for _, path, key in self.files]
            searched = ", ".join([*places, "powergrad.report(...)"])
            raise Missing(f"Expected {wanted}, but got {listed}. Searched: {searched}.")
        return {**measured, **metrics}

    def _matched(self, output: Path) -> dict[str, float]:
        """The last matches in the output, which may have any size."""
        compiled = [(name, _widened(text)) for name, text in self.regexes]
        last: list[re.Match[str] | None] = [None] * len(compiled)
        for line in lines_of(output) if compiled else ():
            for place, (_, regex) in enumerate(compiled):
                for match in regex.finditer(line):
                    last[place] = match
        metrics = {}
        for (name, pattern), match in zip(self.regexes, last, strict=True):
            where = f"--metric-regex {pattern!r}"
            if match is None:
                raise Missing(f"The output has no match of {where}.")
            for group in match.re.groupindex or (1,):
                if match[group] is not None:
                    metrics[name if group == 1 else group] = _number(match, group, where)
        return metrics


def _widened(pattern: str) -> re.Pattern[str]:
    """A pattern whose groups also match the forms of a number that ``[0-9.]+`` does not match."""
    captures: list[bool] = []

    def widen(token: re.Match[str]) -> str:
        text = token[0]
        if text.startswith("("):
            captures.append(text != "(?")
            return f"{text}{SIGN}(?:" if captures[-1] else text
        is_end = text == ")" and captures.pop()
        return f"){EXPONENT}|{SIGN}(?:{GROUPED}|{NOT_FINITE}))" if is_end else text

    return re.compile(PARENTHESES.sub(widen, pattern))


def _number(match: re.Match[str], group: int | str, where: str) -> float:
    """The whole number of which a group has a part; a comma outside may separate two."""
    line, (start, end) = match.string, match.span(group)
    found = [m for m in NUMBER.finditer(line) if m.start() < end and m.end() > start]
    if len(found) == 1:
        first, last = found[0].span()
        before, after = line[first:start], line[end:last]
        rest = line[start:first] + line[last:end]
        if not re.search(r"\w", rest) and "," not in before + after:
            text = line[start:last] if re.fullmatch("\\W", before.strip(".")) else found[0][0]
            return float(text.replace(",", "").replace("\N{MINUS SIGN}", "-"))
    shown = line.strip() if len(line) < 300 else f"...{line[max(0, start - 100) : end + 100]}..."
    reason = f"the match {match[group]!r} in the line {shown!r}"
    raise Missing(f"Expected exactly one number from {where}, but got {reason}.")


def _compile(text: str) -> re.Pattern[str]:
    try:
        regex = re.compile(text)
        _widened(text)
    except re.error as error:
        wanted = "Expected --metric-regex to be a regular expression"
        raise RecipeError(f"{wanted}, but got {text!r}: {error}.") from None
    if regex.groups != (len(regex.groupindex) or 1):
        wanted = "one group in parentheses, such as 'acc (\\S+)', or with named groups only"
        raise RecipeError(f"Expected --metric-regex with {wanted}, but got {text!r}.")
    return regex


def _name_of(regex: re.Pattern[str], metric: str | None) -> str:
    """The name of an unnamed group, which is the word before it; empty if groups have names."""
    if regex.groupindex:
        return ""
    plain = re.sub(r"\(\?:|\)\?", "", re.sub(r"\\.", " ", regex.pattern))
    word = re.search(r"([A-Za-z][\w@]*)[^A-Za-z(]*\((?!\?)", plain)
    name = metric or (word[1] if word else None)
    if name is None:
        raise RecipeError(
            "Expected a name for the metric of --metric-regex (--metric NAME, or a named group "
            f"such as (?P<accuracy>...)), but got {regex.pattern!r}."
        )
    return name


def _of_file(path: Path, key: str) -> float:
    """A number in a JSON file, or in the last row of a CSV."""
    where = f"--metric-file {path}:{key}"
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() == ".csv":
            return float(list(csv.DictReader(text.splitlines()))[-1][key])
        value = json.loads(text)
        is_whole = isinstance(value, dict) and key in value
        for part in [key] if is_whole else key.split("."):
            value = value[int(part)] if isinstance(value, list) else value[part]
        return float(str(value))  # not the 1 of true
    except OSError as error:
        raise Missing(f"Expected {where}, but got: {error.strerror}.") from None
    except (IndexError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise Missing(f"Expected {where}, but got: {type(error).__name__}: {error}.") from None
