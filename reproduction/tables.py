"""The tables of docs/where-pgt-does-not-help.md."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from reproduction.claims import PGT, SHORTER, against_controls, contrast_table, counted
from reproduction.marks import Regions
from reproduction.trials import Contrast, Trial, contrasts_of

__all__ = ["table_regions"]


def table_regions(trials: Sequence[Trial]) -> Regions:
    """The regions of the page."""
    return {
        "not-better": partial(_not_better, trials),
        "fewer-epochs": partial(_fewer_epochs, trials),
        "simpler": partial(_simpler, trials),
    }


# Where it did not help ----------------------------------------------------------------------------


def _not_better(trials: Sequence[Trial]) -> str:
    rows = [row for trial in trials for row in contrasts_of(trial) if _is_pgt(row)]
    if not rows:
        return "Nothing was measured yet."
    others = [contrast for contrast in rows if contrast.verdict != "better"]
    rows = counted(rows)
    better = [contrast for contrast in rows if contrast.verdict == "better"]
    inflated = sum(contrast.arm.decay.endswith("inflated") for contrast in better)
    at_decay = ""
    if inflated:
        share = "all" if inflated == len(better) else inflated
        at_decay = f", {share} of them at a weight decay that was not tuned and is larger than the "
        at_decay += "paper's"
    grid = sum(contrast.trial.is_grid for contrast in rows)
    withheld = sum(bool(contrast.comparison.withheld) for contrast in rows)
    return (
        f"Of {len(rows)} comparisons ({grid} of them points of grids over alpha), PGT was better "
        f"in {len(better)}{at_decay}. In {withheld} more, *better* was withheld because a learning "
        "rate was chosen at the edge of the tried values.\n\n"
        "- Intervals and p-values are corrected for the arms of a study, but not for the number "
        "of studies.\n"
        "- They do not include the noise of tuning: every arm was tuned once or not at all, so a "
        "verdict holds only for the chosen values.\n"
        "- Some studies share a baseline, so they are not independent. A study whose runs are all "
        "part of a larger study is not counted.\n\n"
        f"In these comparisons PGT was not better:\n\n{contrast_table(others)}"
    )


def _is_pgt(contrast: Contrast) -> bool:
    """Whether it is PGT, with other methods of the paper or not, and nothing else is changed."""
    methods = contrast.arm.methods or frozenset()
    return "PGT" in methods and methods <= {"PGT", "AGC", "GC", "LS"}


def _fewer_epochs(trials: Sequence[Trial]) -> str:
    contrasts = [contrast for trial in trials for contrast in contrasts_of(trial)]
    return contrast_table(c for c in contrasts if c.arm.methods == PGT | SHORTER)


def _simpler(trials: Sequence[Trial]) -> str:
    contrasts = against_controls(trials)
    return contrast_table(contrast for contrast in contrasts if contrast.verdict != "better")
