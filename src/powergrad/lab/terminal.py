"""A study in the terminal: progress and tables."""

from __future__ import annotations

import io
import math
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from powergrad.lab.runs import Job
from powergrad.lab.runs.pool import Snapshot
from powergrad.lab.stats import Plan, format_interval, format_signed
from powergrad.lab.study import Results, load_study
from powergrad.lab.study.metrics import metric_names
from powergrad.lab.study.notes import MORE_SEEDS, advice, describe_failed, notes, verdict
from powergrad.lab.words import duration


class Watch:
    """Shows the progress of the arms: live bars in a terminal, otherwise occasional lines."""

    def __init__(self, title: str, jobs: Mapping[tuple[str, int], Job], metric: str) -> None:
        self.title, self.jobs, self.metric = title, jobs, metric
        self.console = Console(stderr=True)
        self.live = Live(console=self.console, transient=True, auto_refresh=False)
        self.finished, self.printed_at = -1, 0.0
        self.failed: set[str] = set()  # the reasons that were printed, without names of runs

    def __enter__(self) -> Watch:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.live.stop()

    def __call__(self, snapshot: Snapshot) -> None:
        """Show `snapshot`."""
        # As long as every run has failed, the error that ends the study says why.
        for name, reason in snapshot.failed.items() if snapshot.results else ():
            cause = reason.replace(name, "")
            if cause not in self.failed:
                self.failed.add(cause)
                self.console.print(f"{name}: {reason}", markup=False, highlight=False)
        left = "" if snapshot.left is None else f", {duration(snapshot.left)} left"
        runs = f"{len(snapshot.results)} of {len(self.jobs)} runs"
        title = f"{self.title}: {runs}, {duration(snapshot.seconds)}{left}"
        if self.console.is_terminal:
            self.live.update(self._table(title, snapshot), refresh=True)
        elif len(snapshot.results) != self.finished and time.monotonic() - self.printed_at > 5:
            self.finished, self.printed_at = len(snapshot.results), time.monotonic()
            print(title, file=sys.stderr, flush=True)

    def _table(self, title: str, snapshot: Snapshot) -> Table:
        table = _table("arm", "runs", "", self.metric.replace("_", " "))
        table.title, table.title_justify = Text(title), "left"
        for arm in dict.fromkeys(arm for arm, _ in self.jobs):
            names = [job.name for (job_arm, _), job in self.jobs.items() if job_arm == arm]
            done = [snapshot.results[name] for name in names if name in snapshot.results]
            values = [r.metrics[self.metric] for r in done if self.metric in r.metrics]
            mean = f"{sum(values) / len(values):.4g}" if values else ""
            part = sum(snapshot.done[name] for name in names) / len(names)
            bar = "━" * round(20 * part) + "╌" * (20 - round(20 * part))
            table.add_row(Text(arm), f"{len(done)}/{len(names)}", bar, mean)
        return table


def show_results(results: Results) -> None:
    """Print tables, verdict and one sentence per comparison."""
    print(describe_results(results, _console()))


def describe_results(results: Results, console: Console | None = None) -> str:
    """The output of :func:`show_results`, for the width and the styles of `console`."""
    lines = [f"{verdict(results)}\n"]
    lines += [f"- {comparison.sentence}" for comparison in results.comparisons]
    lines += [f"\n{note}" for note in (*notes(results), *advice(results))]
    console = console or Console(width=120, file=io.StringIO())
    with console.capture() as captured:
        console.print(*result_tables(results), sep="")
    return captured.get() + "\n".join(lines)


def show_runs(results: Results) -> None:
    """Print the result of each arm, for a study with nothing to compare."""
    table = _table("arm", "n", results.metric.title)
    for arm in results.arms:
        table.add_row(Text(arm), *_spread(results, arm))
    _console().print(table)
    reason = "Nothing is compared: a comparison needs two arms with two runs each."
    more = [MORE_SEEDS] if results.study is not None and results.study.design.last < 2 else []
    print(reason, *results.remarks, *describe_failed(results), *more)


def show_study(folder: Path) -> None:
    """Print the results of a study so far."""
    results = load_study(folder)
    study, compared = results.study, results.comparable()
    if study is not None:
        print(f"{folder}: {study.kind} of {study.program.title}, {study.design} seeds per arm")
    if compared is None:
        show_runs(results)
    else:
        show_results(compared)
    if study is not None:
        print("For the census of a run layer by layer, call `powergrad inspect` with its folder.")


def show_plan(plan: Plan) -> None:
    """Print the number of runs that a claim needs, with a fixed number and with looks."""
    print(plan.sentence)
    design = plan.design
    table = _table("true difference", "found", "equivalent", "not settled", "runs per arm")
    for outcome in plan.sequential:
        shares = (outcome.found, outcome.equivalent, 1 - outcome.found - outcome.equivalent)
        cells = [f"{100 * share:.0f}%" for share in shares]
        table.add_row(f"{outcome.effect:g}", *cells, f"{outcome.runs:.1f}")
    looks = f"{', '.join(map(str, design.looks))} runs per arm (--seeds {design})"
    stops = f"an arm stops once it is settled. For a margin of {plan.margin:g}:"
    print(f"\nWith looks at {looks}, {stops}")
    _console().print(table)


def compared_cells(results: Results) -> list[list[str]]:
    """The headings and, per arm, the number of units, the mean, and the comparison."""
    is_ours = results.study is not None and not results.study.program.is_foreign
    name, digits = results.metric.name, _digits(results)
    name = "test" if name == "test_accuracy" else name
    train = ["train"] if is_ours else []
    rows = [["arm", "n", *train, name, "difference", "95% interval", "p", "verdict"]]
    for arm in results.arms:
        count, spread = _spread(results, arm)
        train = [_number(results.mean(arm, "train_accuracy"), 2)] if is_ours else []
        cells = [""] * 4
        if comparison := results.comparison(arm):
            p = f"{comparison.p:.3f}" if comparison.p >= 0.0005 else "<0.001"
            p = p if all(map(math.isfinite, comparison.interval)) else "-"
            cells = [format_signed(comparison.difference, digits)]
            cells += [format_interval(comparison.interval, digits), p, comparison.verdict]
        rows.append([arm, count, *train, spread, *cells])
    return rows


def result_tables(results: Results) -> list[Table]:
    """The final tables, one row per arm: the compared metric, and all other metrics."""
    heads, *rows = compared_cells(results)
    compared = _table(*heads)
    for arm, *cells in rows:
        compared.add_row(Text(arm), *cells)
    others = [name for name in results.columns if name != results.metric.name]
    if results.source is not None and others:  # one row per column of the table
        table = _table("mean of", *(arm.replace("[", r"\[") for arm in results.arms))
        for name in others:
            table.add_row(Text(name), *(f"{results.mean(arm, name):.4g}" for arm in results.arms))
        return [compared, table]
    if results.study is None:
        return [compared]
    columns = MEASURED
    if results.study.program.is_foreign:
        names = metric_names([row.metrics for row in results.rows], results.metric.name)[1:]
        columns = [(name, name, 1 if name == "seconds" else 3) for name in names]
    measured = _table("arm", *(heading for heading, _, _ in columns))
    for arm in results.arms:
        cells = [_number(results.mean(arm, key), places) for _, key, places in columns]
        measured.add_row(Text(arm), *cells)
    return [compared, measured]


def _spread(results: Results, arm: str) -> tuple[str, str]:
    """The number of units of an arm; their mean and standard deviation."""
    values, digits = list(results.units(arm).values()), _digits(results)
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    mean = _number(results.mean(arm), digits)
    spread = f" ± {_number(deviation, digits)}" if len(values) > 1 else ""
    return str(len(values)), mean + spread


def _digits(results: Results) -> int:
    """The number of decimals that shows two digits of the margin, at least two."""
    return max(2, 1 - math.floor(math.log10(results.margin)))


MEASURED = (
    ("NLL", "nll", 3),
    ("at 1/α", "nll_scaled", 3),
    ("ECE", "ece", 3),
    ("at 1/α", "ece_scaled", 3),
    ("dead units", "dead_units", 1),
    ("seconds", "seconds", 1),
)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120)


def _table(first: str, *others: str) -> Table:
    # Narrow, so that the verdict fits into a terminal with 80 columns.
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _number(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"
