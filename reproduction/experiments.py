"""One table per experiment of docs/reproduction.md: published beside measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from statistics import fmean, stdev

from scipy.stats import linregress

from powergrad.lab.study import load
from powergrad.lab.study.notes import verdict
from reproduction.claims import count_verdicts
from reproduction.evidence import RESULTS, Evidence, csv_rows
from reproduction.marks import Regions, markdown_table
from reproduction.published import gpu_hours, load_paper
from reproduction.trials import (
    Arm,
    Trial,
    contrasts_of,
    difference_in_words,
    fingerprint,
    load_study,
    mean,
)

TABLES = {"table-1": "Table 1", "table-2": "Table 2", "table-3": "Table 3", "epochs": "Section 5.1"}


def experiment_regions(evidence: Evidence) -> Regions:
    """The regions of the page beside the claims."""
    replicas = {
        name: [t for t in evidence.replicas if t.experiment and t.experiment.where.startswith(part)]
        for name, part in TABLES.items()
    }
    return {
        **{name: partial(_table, trials) for name, trials in replicas.items()},
        "grids": partial(_grids, evidence),
        "beyond": partial(_table, evidence.others),
        "hours": _hours,
        "runs": partial(_runs, evidence),
        "compare-short": _default_comparison,
        "thresholds": lambda: _table([load_study(RESULTS / "clipping_thresholds.json")]),
        "agc-norms": _agc_norms,
    }


def _table(trials: Sequence[Trial]) -> str:
    """One row per arm and study, compared with the study's first arm."""
    lines = [line for trial in trials for line in _lines(trial)]
    used = [name for name in lines[0] if any(line[name] for line in lines)] if lines else []
    return markdown_table(used, [[line[name] for name in used] for line in lines])


def _lines(trial: Trial) -> Iterator[dict[str, str]]:
    contrasts = {contrast.arm.name: contrast for contrast in contrasts_of(trial)}
    for arm in trial.arms[1:] or trial.arms:
        contrast = contrasts.get(arm.name)
        yield {
            "study": _study(trial) if arm in trial.arms[:2] else "",
            "arm": arm.label,
            "published": _published(trial, arm),
            "n": str(len(arm.rows)),
            "difference (95% interval)": difference_in_words(contrast.comparison)
            if contrast
            else "",
            "verdict": contrast.limited_verdict if contrast else "",
            "dead filters (baseline's)": _dead(trial, arm),
        }


def _study(trial: Trial) -> str:
    """What a study was measured on, its baseline, and why it is not counted, if it is not."""
    first = trial.arms[0]
    on = first.measured_on.replace(" of width 8", "")  # as the page says of all of them
    words = (
        f"`{trial.name}`: {on}; decay {first.decay}; {first.name} {mean(first.test.values()):.2f}%"
    )
    return f"{words}; {trial.not_counted}" if trial.not_counted else words


def _published(trial: Trial, arm: Arm) -> str:
    if trial.experiment is None:
        return ""
    row, first = trial.experiment.row(arm.name), trial.experiment.baseline
    return f"{row.published['test'] - first.published['test']:+.3f}"


def _dead(trial: Trial, arm: Arm) -> str:
    if trial.recipe.model.norm != "none" or trial.experiment is None:
        return ""
    counts = [mean(one.values("dead_units").values()) for one in (arm, trial.arms[0])]
    return f"{counts[0]:.0f} ({counts[1]:.0f})"


def _grids(evidence: Evidence) -> str:
    """The best alpha of every grid, and what became of logits and loss."""
    lines = []
    for trial in evidence.trials:
        if not trial.is_grid:
            continue
        results = trial.results
        one, least = results.arms[0], results.arms[-1]
        best = max(results.arms, key=results.mean)
        norms = [results.mean(arm, "logit_norm") for arm in (one, least)]
        losses = {arm: results.mean(arm, "nll") for arm in results.arms}
        lowest = min(losses, key=lambda arm: losses[arm])
        slope, _, r, *_ = linregress(*trial.pairs("logit_norm", "nll"))
        lines.append(
            (
                _study(trial),
                str(len(results.values(one))),
                count_verdicts(contrasts_of(trial)) or "too few seeds",
                f"{results.mean(one):.2f}; {results.mean(best):.2f} at {trial.alpha(best):g}",
                f"{norms[1] / norms[0]:.1f} ({1 / trial.alpha(least):.0f})",
                f"{losses[one]:.3f}; {losses[least]:.3f}; {losses[lowest]:.3f} at "
                f"{trial.alpha(lowest):g}",
                f"{slope:.5f} (r = {r:.2f})",
            )
        )
    head = ("grid", "n", "alphas below 1", "test %: alpha 1; best", "logit norm ratio (1/alpha)")
    more = ("NLL: alpha 1; smallest alpha; lowest", "slope of NLL over logit norm")
    return markdown_table((*head, *more), lines)


def _agc_norms() -> str:
    """What `powergrad inspect --layers-csv` counts in one run with AGC and one without."""
    lines = []
    for arm in ("baseline", "AGC"):
        rows = csv_rows(RESULTS / f"agc_norms_{arm.lower()}.csv")
        layers = [row for row in rows if row["kind"] == "Conv2d"]
        dead, units = (sum(int(row[key]) for row in layers) for key in ("dead", "units"))
        whole = [row["number"] for row in layers if row["dead"] == row["units"]]
        lines.append((arm, f"{dead} of {units}", ", ".join(whole) or "none"))
    return markdown_table(("run", "dead filters", "entirely dead layers"), lines)


def _hours() -> str:
    rows = [row for experiment in load_paper().experiments for row in experiment.rows]
    hours = gpu_hours(row.recipe for row in rows)
    words = ", ".join(f"{value:,.0f} on {gpu}" for gpu, value in hours.items())
    return (
        "To run every experiment of the paper once at full scale would take, in GPU hours: "
        f"{words}. The last number is for CIFAR-10, and each of the others for ImageNet "
        "on that type of GPU. They are estimated from published training speeds."
    )


def _runs(evidence: Evidence) -> str:
    trials = [*evidence.replicas, *evidence.others]
    rows = [row for trial in trials for row in trial.results.rows]
    seconds = {fingerprint(row): row.metrics["seconds"] for row in rows}
    hours = sum(seconds.values()) / 3600
    return f"The {len(seconds):,} runs behind this page took {hours:.1f} core-hours."


def _default_comparison() -> str:
    """The default comparison, for the README."""
    results, lines = load(RESULTS / "compare_digits.json"), []
    for arm in results.arms:
        comparison = results.comparison(arm)
        cells = ["", ""]
        if comparison:
            cells = [difference_in_words(comparison), comparison.verdict]
        values = [*results.units(arm).values()]
        spread = f"{fmean(values):.2f} ± {stdev(values):.2f}"
        lines.append([arm, str(len(values)), spread, *cells])
    table = markdown_table(("arm", "seeds", "test %", "difference (95%)", "verdict"), lines)
    return f"{table}\n\n**{verdict(results)}** (`results/compare_digits.json`)"
