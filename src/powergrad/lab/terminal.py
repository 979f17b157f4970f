"""A study in the terminal: how far it is, its table, its chart."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from powergrad.lab.jobs import Job, Snapshot
from powergrad.lab.progress import duration
from powergrad.lab.stats import Comparison, signed, span
from powergrad.lab.study import METRICS, Results

__all__ = ["Watch", "chart", "result_tables"]


class Watch:
    """Shows the arms while their runs go on: a live table, or a line now and then.

    Args:
        title: What is being done.
        jobs: The run of each arm and seed.
        metric: The metric that is shown.
    """

    def __init__(self, title: str, jobs: Mapping[tuple[str, int], Job], metric: str) -> None:
        self.title, self.jobs, self.metric = title, jobs, metric
        self.console = Console(stderr=True)
        self.live = Live(console=self.console, transient=True, auto_refresh=False)
        self.finished = -1
        self.said = 0.0

    def __enter__(self) -> Watch:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.live.stop()

    def __call__(self, snapshot: Snapshot) -> None:
        """Show `snapshot`."""
        if self.console.is_terminal:
            self.live.update(self._table(snapshot), refresh=True)
            return
        now = time.monotonic()
        if len(snapshot.results) == self.finished or now - self.said < 5:
            return
        self.finished, self.said = len(snapshot.results), now
        print(f"{self.title}: {self._progress(snapshot)}", file=sys.stderr, flush=True)

    def _progress(self, snapshot: Snapshot) -> str:
        left = "" if snapshot.left is None else f", {duration(snapshot.left)} left"
        runs = f"{len(snapshot.results)} of {len(self.jobs)} runs"
        return f"{runs}, {duration(snapshot.seconds)}{left}"

    def _table(self, snapshot: Snapshot) -> Table:
        table = Table(title=f"{self.title}: {self._progress(snapshot)}", title_justify="left")
        table.add_column("arm")
        table.add_column("runs", justify="right")
        table.add_column("")
        table.add_column(self.metric.replace("_", " "), justify="right")
        for arm in dict.fromkeys(arm for arm, _ in self.jobs):
            names = [job.name for (each, _), job in self.jobs.items() if each == arm]
            done = [snapshot.results[name] for name in names if name in snapshot.results]
            values = [result[self.metric] for result in done if self.metric in result]
            mean = f"{sum(values) / len(values):.2f}" if values else ""
            part = sum(snapshot.done[name] for name in names) / len(names)
            bar = "━" * round(20 * part) + "╌" * (20 - round(20 * part))
            table.add_row(Text(arm), f"{len(done)}/{len(names)}", bar, mean)
        return table


def result_tables(results: Results) -> list[Table]:
    """The final tables, an arm a row: what is compared, and what else was measured."""
    by_arm = {comparison.arm: comparison for comparison in results.comparisons()}
    whole = results.study is not None
    name = "test" if results.metric == "test_accuracy" else results.metric
    compared = _table("arm", "n", *(["train"] if whole else []), name,
                      "difference", "95% interval", "p")  # fmt: skip
    for arm in results.arms:
        values = results.of(arm, results.metric)
        spread = (
            f"{_number(results.mean(arm, results.metric), 2)} ± {_number(_deviation(values), 2)}"
        )
        train = [_number(results.mean(arm, "train_accuracy"), 2)] if whole else []
        cells = [str(len(values)), *train, spread, *_difference(by_arm.get(arm))]
        compared.add_row(Text(arm), *cells)
    if not whole:
        return [compared]
    measured = _table("arm", *(heading for heading, _, _ in MEASURED))
    for arm in results.arms:
        cells = [_number(results.mean(arm, metric), digits) for _, metric, digits in MEASURED]
        measured.add_row(Text(arm), *cells)
    return [compared, measured]


MEASURED = (
    ("NLL", "nll", 3),
    ("at 1/α", "nll_scaled", 3),
    ("ECE", "ece", 3),
    ("at 1/α", "ece_scaled", 3),
    ("dead units", "dead_units", 1),
    ("seconds", "seconds", 1),
)


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _difference(comparison: Comparison | None) -> list[str]:
    if comparison is None:
        return ["", "", ""]
    p = comparison.p_adjusted
    return [
        signed(comparison.difference),
        span(comparison.interval),
        f"{p:.3f}" if p >= 0.0005 else "<0.001",
    ]


def _number(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def _deviation(values: list[float]) -> float:
    if len(values) < 2:
        return math.nan
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def chart(results: Results, width: int = 60) -> str:
    """The differences from the baseline: the mean and its interval on one line an arm."""
    comparisons = results.comparisons()
    ends = [end for c in comparisons for end in c.interval if math.isfinite(end)]
    low, high = min([0.0, *ends]), max([0.0, *ends])
    room = (high - low) * 0.05 or 1.0
    low, high = low - room, high + room

    def at(value: float) -> int:
        return round((min(max(value, low), high) - low) / (high - low) * (width - 1))

    names = max(len(c.arm) for c in comparisons)
    unit = METRICS.get(results.metric, (True, results.metric))[1]
    lines = [f"difference from {results.baseline}, {unit} (● mean, ━ 95% interval)"]
    for comparison in comparisons:
        cells = [" "] * width
        cells[at(0)] = "│"
        first, last = (at(end) for end in comparison.interval)
        for place in range(first, last + 1):
            cells[place] = "┿" if place == at(0) else "━"
        cells[at(comparison.difference)] = "●"
        line = "".join(cells)
        lines.append(f"{comparison.arm:>{names}} {line} {signed(comparison.difference)}")
    scale = [" "] * width
    zero = at(0)
    scale[zero] = "0"
    lines.append(" " * (names + 1) + "".join(scale).rstrip())
    return "\n".join(lines)
