"""Tables of runs in CSV files: our own study.csv, and exports of other tools.

A table has one line per run and three essential columns: the arm, the seed and the metric. If they
have other names, they are guessed, as for the exports of W&B (``Name``, ``Group``, ``seed`` or
``config.seed``, summary metrics by name) and of MLflow (``Name``, ``params.seed``,
``metrics.accuracy``). Guessed columns are reported; if a column is ambiguous, an error asks for it.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powergrad.lab.study.records import LeftOut, RunRow, Source
from powergrad.lab.trainer.recipe import RecipeError
from powergrad.lab.words import did_you_mean

ROLES = ("arm", "seed")  # the columns that --columns can name; --metric names the metric
USUAL = ("test_accuracy", "metric")  # default metrics
# The last part of a column's name, after a dot or a slash, in lower case.
NAMES = {
    "arm": ("arm", "group", "method", "variant"),
    "seed": ("seed", "random_seed", "manual_seed"),
}
RUN_NAMES = ("name", "run name", "run_name", "runname", "run")
STATES = ("state", "status")
NOT_FINISHED = (
    *("crashed", "failed", "killed", "running", "pending", "scheduled", "preempted", "preempting"),
    *("queued", "aborted", "canceled", "cancelled", "unfinished", "missing", "waiting"),
)
OURS = ("arm", "seed", "run", "commit", "repeat", "phase")  # columns of study.csv, except metrics
ABOUT = ("diverged", "classes", "steps")
SEED_IN_NAME = re.compile(r"[\s_./,:-]*(?<![a-z])seed[\s_=:-]*(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Table:
    """The runs of a file that have the metric, and a description of the file."""

    metric: str
    rows: list[RunRow]
    source: Source


def parse_columns(texts: Iterable[str]) -> dict[str, str]:
    """Parse the values of ``--columns arm=group seed=config.seed``."""
    columns: dict[str, str] = {}
    for text in texts:
        role, _, column = text.partition("=")
        if role == "metric":
            raise RecipeError(f"Expected --metric {column or 'COLUMN'}, but got --columns {text}.")
        if role not in ROLES or not column or role in columns:
            raise RecipeError(f"Expected --columns arm=COLUMN seed=COLUMN, but got {text!r}.")
        columns[role] = column
    return columns


def read_rows(path: Path) -> list[RunRow]:
    """The runs of a study.csv, with those of the tuning; every run must have a number."""
    table = read_table(path, all_phases=True)
    for run in table.source.left_out:
        place = f"line {run.line} of {str(path)!r}"
        raise RecipeError(f"Expected {table.metric} in {place}, but got a run {run.reason}.")
    return table.rows


def read_table(
    path: Path,
    metric: str | None = None,
    *,
    columns: Mapping[str, str] | None = None,
    all_phases: bool = False,
) -> Table:
    """Read a CSV file with one line per run.

    Cells are separated by commas, semicolons or tabs. With semicolons or tabs, numbers may have a
    decimal comma. A metric of NaN or infinity means that the run diverged. Runs without a metric,
    and runs that another tool marks as unfinished, are left out.
    """
    return _Reader(path, all_phases).table(metric, columns or {})


class _Reader:
    """A file and its cells, as text."""

    def __init__(self, path: Path, all_phases: bool) -> None:
        import pandas as pd  # slow to import

        self.path = path
        try:
            data = path.read_bytes()
            is_wide = data[:2] in (b"\xff\xfe", b"\xfe\xff")  # UTF-16, from some spreadsheets
            text = data.decode("utf-16" if is_wide else "utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise self._error("to be readable", str(error)) from None
        self.digest = hashlib.sha256(data).hexdigest()
        header = text.partition("\n")[0]
        self.delimiter = max(",;\t", key=header.count)
        if header.startswith("sep="):  # declares the delimiter for spreadsheets
            self.delimiter, text = header[4:5], text.partition("\n")[2]
        try:
            frame = pd.read_csv(
                io.StringIO(text),
                sep=self.delimiter,
                header=None,
                dtype=str,
                na_filter=False,
                skipinitialspace=True,
                skip_blank_lines=False,
            )
        except pd.errors.EmptyDataError:
            frame = pd.DataFrame([[]])
        except (pd.errors.ParserError, ValueError) as error:
            raise self._error("to be a CSV", str(error).strip()) from None
        cells = [[str(cell).strip() for cell in line] for line in frame.fillna("").values.tolist()]
        self.columns = [name for name in cells[0] if name]
        for name, count in Counter(self.columns).items():
            if count > 1:
                raise self._error("to have columns with different names", f"{name!r} twice")
        lines = [dict(zip(cells[0], line, strict=True)) for line in cells[1:]]
        self.lines = {  # by number
            number: line
            for number, line in enumerate(lines, 2)
            if any(line.values()) and (all_phases or line.get("phase") != "tuning")
        }

    def _error(self, expected: str, got: str) -> RecipeError:
        return RecipeError(f"Expected {str(self.path)!r} {expected}, but got {got}.")

    def _cells(self, column: str) -> list[str]:
        return [line[column] for line in self.lines.values()]

    def table(self, metric: str | None, given: Mapping[str, str]) -> Table:
        for role, column in given.items():
            if column not in self.columns:
                near = did_you_mean(column, self.columns).rstrip(".")
                wanted = f"to have a column for --columns {role}={column}"
                raise self._error(wanted, f"{_listed(self.columns)}{near}")
        roles = {role: given.get(role) or self._find(role) for role in ROLES}
        measured = self._metric(metric, roles)
        guessed = [role for role in ROLES if role not in given and roles[role] != role]
        if metric is None and measured not in USUAL and guessed:
            guessed.append("metric")
        columns = {**roles, "metric": measured}
        kept = [self._row(number, columns) for number in self.lines]
        rows = [row for row in kept if isinstance(row, RunRow)]
        source = Source(
            file=self.path.name,
            digest=self.digest,
            columns=columns,
            guessed=tuple(guessed),
            left_out=tuple(row for row in kept if isinstance(row, LeftOut)),
        )
        return Table(measured, rows, source)

    # Finding the columns -------------------------------------------------------------------------

    def _find(self, role: str) -> str:
        """The column of a role: by the name of the role, by a common name, or the run names."""
        if role in self.columns:
            return role
        usual, named = (
            [c for c in self.columns if _last_part(c) in names and self._is_usable(role, c)]
            for names in (NAMES[role], RUN_NAMES)
        )
        candidates = usual or named
        distinct = {tuple(self._cells(c)): c for c in candidates[::-1]}
        if len(distinct) == 1:
            return candidates[0]
        wanted = f"to have one column for the {role} (choose it with --columns {role}=COLUMN)"
        raise self._error(wanted, _listed(candidates or self.columns))

    def _is_usable(self, role: str, column: str) -> bool:
        """Whether the content of a column fits the role."""
        cells = self._cells(column)
        if role == "seed":
            return bool(cells) and all(_seed(cell, column) is not None for cell in cells)
        arms = [_arm(cell, column) for cell in cells if cell]
        is_repeated = len(set(arms)) < len(arms) or not _is_run_name(column)
        return len(set(arms)) > 1 and is_repeated

    def _metric(self, name: str | None, roles: Mapping[str, str]) -> str:
        others = [c for c in self.columns if c not in roles.values() and c not in OURS]
        candidates = [name] if name in others else []
        if name is None:
            numeric = [c for c in others if all(map(self._is_number, self._cells(c)))]
            candidates = [usual for usual in USUAL if usual in others][:1] or numeric
        if len(candidates) != 1:
            wanted = name or "a metric (choose it with --metric)"
            wanted = f"to have the columns arm, seed and {wanted}"
            raise self._error(wanted, _listed(candidates or others))
        return candidates[0]

    def _is_number(self, cell: str) -> bool:
        return not cell or self._number(cell) is not None

    # Reading a line ------------------------------------------------------------------------------

    def _row(self, number: int, columns: Mapping[str, str]) -> RunRow | LeftOut:
        line = self.lines[number]
        arm = _arm(line[columns["arm"]], columns["arm"])
        cell, text = (line[columns[role]] for role in ("seed", "metric"))
        seed, value = _seed(cell, columns["seed"]), self._number(text)
        if seed is None or (text and value is None):
            raise RecipeError(
                f"Expected an integer as the seed and a number as {columns['metric']} in line "
                f"{number} of {str(self.path)!r}, but got {cell!r} and {text!r}."
            )
        states = (c.lower() for name, c in line.items() if name.lower() in STATES)
        unfinished = [state for state in states if state in NOT_FINISHED]
        if not arm or value is None:
            reason = f"without {columns['metric' if arm else 'arm']}"
            return LeftOut(line=number, arm=arm, seed=seed, reason=reason)
        if unfinished and math.isfinite(value):
            return LeftOut(line=number, arm=arm, seed=seed, reason=f"marked as {unfinished[0]}")
        named = {columns["arm"], columns["seed"], *OURS}
        numbers = {c: self._number(line[c]) for c in self.columns if c not in named}
        found = {name: value for name, value in numbers.items() if value is not None}
        about: dict[str, Any] = {name: found.pop(name) for name in ABOUT if name in found}
        if not math.isfinite(value) or line.get("diverged") == "True":
            about["diverged"] = True
        repeat = line.get("repeat", "")
        return RunRow(
            arm=arm,
            seed=seed,
            metrics={columns["metric"]: value, **found},
            about=about,
            run=line.get("run", ""),
            commit=line.get("commit", ""),
            unit=int(repeat) if repeat.isdigit() else None,
        )

    def _number(self, text: str) -> float | None:
        if self.delimiter != "," and "." not in text:
            text = text.replace(",", ".", 1)
        try:
            return float(text)
        except ValueError:
            return None


def _listed(columns: Iterable[str]) -> str:
    return ", ".join(columns) or "none"


def _last_part(column: str) -> str:
    return re.split(r"[./]", column.lower())[-1]


def _is_run_name(column: str) -> bool:
    return _last_part(column) in RUN_NAMES


def _arm(cell: str, column: str) -> str:
    """The arm in a cell; for the name of a run, without its seed."""
    return SEED_IN_NAME.sub("", cell).strip(" _./,:-") if _is_run_name(column) else cell


def _seed(cell: str, column: str) -> int | None:
    """The integer in a cell, or after "seed" in the name of a run; None if there is none."""
    match = SEED_IN_NAME.search(cell) if _is_run_name(column) else None
    whole = re.fullmatch(r"([+-]?\d+)(?:\.0*)?", match[1] if match else cell)
    return int(whole[1]) if whole else None
