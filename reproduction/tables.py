"""The tables of docs/where-pgt-does-not-help.md and results/not_better.md."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial

from powergrad.lab.stats import format_signed
from reproduction.claims import PGT, SHORTER, against_controls, counted
from reproduction.marks import Regions, markdown_table
from reproduction.trials import Contrast, Trial, contrasts_of

__all__ = ["table_regions"]


def table_regions(trials: Sequence[Trial]) -> Regions:
    """The regions of the page."""
    return {
        "not-better": partial(_not_better, trials),
        "not-better-table": partial(_not_better_table, trials),
        "fewer-epochs": partial(_fewer_epochs, trials),
        "simpler": partial(_simpler, trials),
    }


# Where it did not help ----------------------------------------------------------------------------


def _not_better(trials: Sequence[Trial]) -> str:
    rows = counted(row for trial in trials for row in contrasts_of(trial) if _is_pgt(row))
    better = [contrast for contrast in rows if contrast.verdict == "better"]
    inflated = sum(contrast.arm.is_inflated for contrast in better)
    share = "all" if inflated == len(better) else inflated
    words = f", {share} of them at a weight decay that was not tuned and is larger than the paper's"
    grid = sum(contrast.trial.is_grid for contrast in rows)
    withheld = sum(bool(contrast.comparison.withheld) for contrast in rows)
    return (
        f"Of {len(rows)} comparisons ({grid} of them points of grids over alpha), PGT was better "
        f"in {len(better)}{words if inflated else ''}. In {withheld} more, *better* was withheld "
        "because a learning rate was chosen at the edge of the tried values."
    )


def _not_better_table(trials: Sequence[Trial]) -> str:
    rows = [row for trial in trials for row in contrasts_of(trial) if _is_pgt(row)]
    return _short_table(row for row in rows if row.verdict != "better")


def _is_pgt(contrast: Contrast) -> bool:
    """Whether it is PGT, with other methods of the paper or not, and nothing else is changed."""
    methods = contrast.arm.methods or frozenset()
    return "PGT" in methods and methods <= {"PGT", "AGC", "GC", "LS"}


def _short_table(contrasts: Iterable[Contrast]) -> str:
    """A line per comparison, or per grid over alpha, under the name of its study."""
    lines = []
    studies = itertools.groupby(contrasts, lambda contrast: contrast.trial.name)
    for name, rows in ((name, [*rows]) for name, rows in studies):
        network, _, data = rows[0].arm.measured_on.partition(", batch")[0].partition(" on ")
        network = re.sub(r" of width \d+", "", network)
        is_named = data.replace("-", "_") in name.replace("-", "_")
        where = [f"`{name}`", network if is_named else f"{network} on {data}"]
        for row in [_grid_cells(rows)] if rows[0].trial.is_grid else map(_short_cells, rows):
            lines.append([*where, *row])
            where = ["", ""]
    head = ("study", "measured on", "arm", "decay / paper's", "n")
    return markdown_table((*head, "difference (95% interval)", "verdict"), lines)


def _short_cells(contrast: Contrast) -> list[str]:
    *cells, verdict = contrast.cells
    return [*cells, verdict.replace("not settled; better withheld", "better withheld")]


def _grid_cells(rows: Sequence[Contrast]) -> list[str]:
    """The cells of a whole grid: the range of the differences, and how often each verdict is."""
    differences = [row.comparison.difference for row in rows]
    alphas = [row.arm.changes["loss.alpha"] for row in rows]
    verdicts = Counter(row.verdict for row in rows)
    return [
        f"{len(rows)} alphas from {min(alphas):g} to {max(alphas):g}",
        rows[0].arm.decay,
        str(len(rows[0].arm.rows)),
        f"from {format_signed(min(differences))} to {format_signed(max(differences))}",
        ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()),
    ]


def _fewer_epochs(trials: Sequence[Trial]) -> str:
    contrasts = [contrast for trial in trials for contrast in contrasts_of(trial)]
    return _short_table(c for c in contrasts if c.arm.methods == PGT | SHORTER)


def _simpler(trials: Sequence[Trial]) -> str:
    contrasts = [c for c in against_controls(trials) if c.verdict != "better"]
    return _short_table(sorted(contrasts, key=lambda contrast: contrast.trial.name))
