"""Tables of runs in CSV files: our own study.csv, and exports of other tools.

A table has one line per run and three essential columns: the arm, the seed and the metric. If they
have other names, they are guessed, as for the exports of W&B (``Name``, ``Group``, ``seed`` or
``config.seed``, summary metrics by name) and of MLflow (``Name``, ``params.seed``,
``metrics.accuracy``). Guessed columns are reported; if a column is ambiguous, an error asks for it.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import Self

from powergrad.lab.study.records import RunRow
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
TIMES = ("runtime", "duration", "start_time", "end_time", "start time", "end time")
PREFIXES = ("metrics.", "summary.")
OURS = ("arm", "seed", "run", "commit", "repeat", "phase")  # columns of study.csv, except metrics
SEED_IN_NAME = re.compile(r"[\s_./,:-]*(?<![a-z])seed[\s_=:-]*(\d+)", re.IGNORECASE)

Lines = list[tuple[int, dict[str, str]]]  # the number of each line, and its cells


@dataclass(frozen=True)
class LeftOut:
    """A run of a table that is not compared.

    Attributes:
        line: Its line in the file.
        arm: Its arm; empty if it has none.
        seed: Its seed.
        reason: Why it is not compared, such as "without accuracy".
    """

    line: int
    arm: str
    seed: int
    reason: str


@dataclass(frozen=True)
class Source:
    """The table from which results were read.

    Attributes:
        file: The name of the file.
        digest: The SHA-256 of its content.
        columns: The columns of ``arm``, ``seed`` and ``metric``.
        guessed: Which of these three were guessed.
        left_out: The runs that are not compared.
        earlier: The numbers of runs per arm at which the same file was analysed before.
    """

    file: str
    digest: str
    columns: Mapping[str, str]
    guessed: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    earlier: tuple[int, ...] = ()

    def notes(self) -> list[str]:
        """Notes for the reader: guessed columns, and runs that are not compared."""
        notes = []
        if self.guessed:
            listed = ", ".join(f"{role} = {column!r}" for role, column in self.columns.items())
            notes.append(
                f"The columns of {self.file} were guessed: {listed}. To choose others, use "
                "--columns arm=COLUMN seed=COLUMN and --metric COLUMN."
            )
        if self.left_out:
            groups: dict[tuple[str, str], list[LeftOut]] = {}
            for run in self.left_out:
                groups.setdefault((run.arm, run.reason), []).append(run)
            counts = []
            for (arm, reason), runs in groups.items():
                number = f"{len(runs)} run{'s' if len(runs) > 1 else ''}"
                places = ", ".join(str(run.seed if arm else run.line) for run in runs)
                what = ("seed" if arm else "line") + ("s" if len(runs) > 1 else "")
                counts.append(f"{number}{f' of {arm}' if arm else ''} {reason} ({what} {places})")
            notes.append(
                f"Left out: {'; '.join(counts)}. If such a run diverged, write nan as its "
                f"{self.columns['metric']}, so that it counts."
            )
        return notes

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_dict`."""
        left_out = tuple(LeftOut(**run) for run in values["left_out"])
        lists = {name: tuple(values[name]) for name in ("guessed", "earlier")}
        return cls(**{**values, **lists, "left_out": left_out})


@dataclass(frozen=True)
class Table:
    """The content of a file.

    Attributes:
        metric: The name of the metric.
        rows: The runs that have the metric.
        source: The description of the file.
    """

    metric: str
    rows: list[RunRow]
    source: Source


def parse_columns(texts: Iterable[str]) -> dict[str, str]:
    """Parse the values of ``--columns arm=group seed=config.seed``.

    Example:
        >>> parse_columns(["arm=run group", "seed=config.seed"])
        {'arm': 'run group', 'seed': 'config.seed'}
    """
    columns: dict[str, str] = {}
    for text in texts:
        role, _, column = text.partition("=")
        if role == "metric":
            raise RecipeError(f"Expected --metric {column or 'COLUMN'}, but got --columns {text}.")
        if role not in ROLES or not column or role in columns:
            raise RecipeError(
                f"Expected --columns arm=COLUMN seed=COLUMN, each at most once, but got {text!r}."
            )
        columns[role] = column
    return columns


def read_rows(
    path: Path, metric: str | None = None, *, all_phases: bool = False
) -> tuple[str, list[RunRow]]:
    """The name of the metric, and the runs of a file in which every run must have a number."""
    table = read_table(path, metric, all_phases=all_phases)
    for run in table.source.left_out:
        raise RecipeError(
            f"Expected {table.metric} in line {run.line} of {str(path)!r} to be a number, but got "
            f"a run {run.reason}."
        )
    return table.metric, table.rows


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
    return _Reader(path, all_phases).table(metric, dict(columns or {}))


@dataclass
class _Reader:
    """A file and its parsed content."""

    path: Path
    all_phases: bool
    digest: str = ""
    delimiter: str = ","
    columns: list[str] = field(default_factory=list)
    lines: Lines = field(default_factory=list)

    def __post_init__(self) -> None:
        try:
            data = self.path.read_bytes()
            is_wide = data[:2] in (b"\xff\xfe", b"\xfe\xff")  # UTF-16, from some spreadsheets
            text = data.decode("utf-16" if is_wide else "utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"Expected to read {str(self.path)!r}, but got: {error}") from None
        self.digest = hashlib.sha256(data).hexdigest()
        header = text.partition("\n")[0]
        if header.startswith("sep="):  # declares the delimiter for spreadsheets
            self.delimiter, text = header[4:5], text.partition("\n")[2]
        else:
            self.delimiter = max(",;\t", key=header.count)
        try:
            self._parse(text)
        except csv.Error as error:
            raise self._error("to be a CSV", str(error)) from None

    def _parse(self, text: str) -> None:
        reader = csv.reader(
            io.StringIO(text, newline=""), delimiter=self.delimiter, skipinitialspace=True
        )
        self.columns = [name.strip() for name in next(reader, [])]
        twice = [name for name, count in Counter(self.columns).items() if count > 1 and name]
        if twice:
            raise self._error("to have columns with different names", f"{twice[0]!r} twice")
        for cells in reader:
            if len(cells) > len(self.columns):
                raise self._error(
                    f"to have {len(self.columns)} cells in line {reader.line_num}", str(len(cells))
                )
            line = {
                name: cell.strip() for name, cell in zip(self.columns, cells, strict=False) if name
            }
            is_wanted = self.all_phases or line.get("phase") != "tuning"
            if is_wanted and any(line.values()):
                self.lines.append((reader.line_num, line))

    def _error(self, expected: str, got: str) -> RecipeError:
        return RecipeError(f"Expected {str(self.path)!r} {expected}, but got {got}.")

    def table(self, metric: str | None, given: dict[str, str]) -> Table:
        for role, column in given.items():
            if column not in self.columns:
                near = did_you_mean(column, self.columns)
                raise RecipeError(
                    f"Expected --columns {role}={column} to name a column of {str(self.path)!r}, "
                    f"but got {self._listed(self.columns)}{near}"
                )
        roles = {role: given.get(role) or self._find(role) for role in ROLES}
        measured = self._metric(metric, roles)
        guessed = [role for role in ROLES if role not in given and roles[role] != role]
        if metric is None and measured not in USUAL and guessed:
            guessed.append("metric")
        columns = {**roles, "metric": measured}
        names = self._kept_names(columns)
        rows, left_out = [], []
        for number, line in self.lines:
            row = self._row(number, line, columns, names)
            (left_out if isinstance(row, LeftOut) else rows).append(row)
        source = Source(self.path.name, self.digest, columns, tuple(guessed), tuple(left_out))
        return Table(names[measured], rows, source)

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
        distinct = {tuple(line.get(c, "") for _, line in self.lines): c for c in candidates[::-1]}
        if len(distinct) == 1:
            return candidates[0]
        if not self.columns:
            raise self._error("to have the columns arm, seed and a metric", "none")
        ask = f"choose it with --columns {role}=COLUMN."
        if distinct:
            raise RecipeError(
                f"Expected one column of {str(self.path)!r} to be the {role}, but got "
                f"{self._listed(candidates)}; {ask}"
            )
        raise RecipeError(
            f"Expected {str(self.path)!r} to have the columns arm, seed and a metric, but got "
            f"{self._listed(self.columns)}, none of which is clearly the {role}; {ask}"
        )

    def _is_usable(self, role: str, column: str) -> bool:
        """Whether the content of a column fits the role."""
        cells = [line.get(column, "") for _, line in self.lines]
        if role == "seed":
            return bool(cells) and all(_seed(cell, column) is not None for cell in cells)
        arms = [_arm(cell, column) for cell in cells if cell]
        is_repeated = len(set(arms)) < len(arms) or not _is_run_name(column)
        return len(set(arms)) > 1 and is_repeated

    def _metric(self, name: str | None, roles: Mapping[str, str]) -> str:
        others = [c for c in self.columns if c and c not in roles.values() and c not in OURS]
        if name is not None:
            named = [c for c in others if c == name] or [c for c in others if _plain(c) == name]
            if len(named) != 1:
                raise self._error(
                    f"to have the columns arm, seed and {name}", self._listed(self.columns)
                )
            return named[0]
        candidates = [c for usual in USUAL for c in others if _plain(c) == usual][:1]
        candidates = candidates or (others if len(others) == 1 else self._measured(others, roles))
        if len(candidates) != 1:
            listed = self._listed(candidates or others)
            raise self._error(
                "to have the columns arm, seed and a metric (choose it with --metric)", listed
            )
        return candidates[0]

    def _measured(self, others: Sequence[str], roles: Mapping[str, str]) -> list[str]:
        """The columns that may be the metric: numbers that vary between the runs of an arm."""
        arms = [_arm(line.get(roles["arm"], ""), roles["arm"]) for _, line in self.lines]
        marked = [c for c in others if c.startswith(PREFIXES)]
        measured = []
        for column in marked or others:
            cells = [line.get(column, "") for _, line in self.lines]
            name = _last_part(column)
            if column.startswith("_") or name in (*TIMES, *NAMES["seed"]):
                continue
            is_numeric = any(cells) and all(self._number(c) is not None for c in cells if c)
            if is_numeric and len({*zip(arms, cells, strict=True)}) > len({*arms}):
                measured.append(column)
        return measured

    def _kept_names(self, columns: Mapping[str, str]) -> dict[str, str]:
        """The name of each column among the metrics of a run."""
        roles = [columns[role] for role in ROLES]
        kept = [c for c in self.columns if c and c not in roles and c not in OURS]
        kept += [c for c in OURS[:2] if c in self.columns and c not in roles]
        plain = Counter(_plain(c) for c in kept)
        names = {c: _plain(c) if plain[_plain(c)] == 1 else c for c in kept}
        return {
            c: f"{name} (column)" if name in (*OURS, "elsewhere") else name
            for c, name in names.items()
        }

    def _listed(self, columns: Iterable[str]) -> str:
        return ", ".join(filter(None, columns)) or "none"

    # Reading a line ------------------------------------------------------------------------------

    def _row(
        self,
        number: int,
        line: Mapping[str, str],
        columns: Mapping[str, str],
        names: Mapping[str, str],
    ) -> RunRow | LeftOut:
        arm = _arm(line.get(columns["arm"], ""), columns["arm"])
        cell, text = (line.get(columns[role], "") for role in ("seed", "metric"))
        seed, value = _seed(cell, columns["seed"]), self._number(text)
        if seed is None or (text and value is None):
            raise RecipeError(
                f"Expected an integer as the seed and a number as {columns['metric']} in line "
                f"{number} of {str(self.path)!r}, but got {cell!r} and {text!r}."
            )
        if not arm:
            return LeftOut(number, "", seed, f"without {columns['arm']}")
        if value is None:
            return LeftOut(number, arm, seed, f"without {columns['metric']}")
        state = self._state(line)
        if state and math.isfinite(value):
            return LeftOut(number, arm, seed, f"marked as {state}")
        metrics = {name: self._cell(line.get(column, "")) for column, name in names.items()}
        metrics[names[columns["metric"]]] = value
        if not math.isfinite(value):
            metrics["diverged"] = True
        unit = int(line["repeat"]) if line.get("repeat", "").isdigit() else None
        return RunRow(arm, seed, metrics, line.get("run", ""), line.get("commit", ""), unit)

    def _state(self, line: Mapping[str, str]) -> str:
        """The state of a run in another tool, if it is not finished."""
        for column, cell in line.items():
            if column.lower() in STATES and cell.lower() in NOT_FINISHED:
                return cell.lower()
        return ""

    def _number(self, text: str) -> float | None:
        if self.delimiter != "," and "." not in text:
            text = text.replace(",", ".", 1)
        try:
            return float(text)
        except ValueError:
            return None

    def _cell(self, text: str) -> float | bool | str | None:
        """The value of a cell: a number, True, False, text, or None if it is empty."""
        if text in ("True", "False", ""):
            return text == "True" if text else None
        number = self._number(text)
        return text if number is None else number


def _last_part(column: str) -> str:
    return re.split(r"[./]", column.lower())[-1]


def _is_run_name(column: str) -> bool:
    return _last_part(column) in RUN_NAMES


def _plain(column: str) -> str:
    """The name of a column without a prefix such as ``metrics.``."""
    prefix = next((prefix for prefix in PREFIXES if column.startswith(prefix)), "")
    return column[len(prefix) :] or column


def _arm(cell: str, column: str) -> str:
    """The arm in a cell; for the name of a run, without its seed."""
    return SEED_IN_NAME.sub("", cell).strip(" _./,:-") if _is_run_name(column) else cell


def _seed(cell: str, column: str) -> int | None:
    """The integer in a cell, or after "seed" in the name of a run; None if there is none."""
    match = SEED_IN_NAME.search(cell) if _is_run_name(column) else None
    whole = re.fullmatch(r"([+-]?\d+)(?:\.0*)?", match[1] if match else cell)
    return int(whole[1]) if whole else None
