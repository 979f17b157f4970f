"""The tables of docs/reproduction.md and docs/where-pgt-does-not-help.md beside the claims."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from powergrad.lab.paper.cost import cost
from powergrad.lab.paper.evidence import Evidence, Measurement, Outcome, describe_runs
from powergrad.lab.paper.rows import Experiment, Figure, Use, changes_of, load_paper
from powergrad.lab.paper.show import hours_in_words
from powergrad.lab.paper.small import LEAST
from powergrad.lab.stats import format_signed
from powergrad.lab.study import Results, Tuning
from powergrad.lab.study.records import Trial as TuningTrial
from powergrad.lab.study.records import describe_point
from powergrad.lab.words import markdown_table, number
from reproduction.claims import PGT, SHORTER, against_controls, counted
from reproduction.marks import Regions
from reproduction.studies import (
    Contrast,
    Trial,
    arm_label,
    contrasts_of,
    decay_in_words,
    fingerprint,
    other_settings,
    trial_of_study,
    verdict_in_words,
)

__all__ = ["table_regions"]

MEASURED = ("difference (95% interval)", "p", "verdict")


def table_regions(
    evidence: Evidence, studies: Mapping[str, Results], trials: Sequence[Trial]
) -> Regions:
    """The regions of both pages that are not below a claim."""
    return {
        "hours": _hours,
        "runs": partial(_runs, evidence, studies),
        **{
            experiment.id: partial(_experiment, evidence, experiment)
            for experiment in load_paper().experiments
        },
        "zeroing-out": partial(_zeroing_out, evidence),
        "beyond": partial(_beyond, studies, trials),
        "figures": partial(_figures, evidence),
        "numbers": _numbers,
        "notes": _notes,
        "unstated": _unstated,
        "not-better": partial(_not_better, trials),
        "fewer-epochs": partial(_fewer_epochs, trials),
        "simpler": partial(_simpler, trials),
    }


def _hours() -> str:
    return (
        "To run every experiment of the paper once at full scale would take, in GPU hours: "
        f"{hours_in_words()}. The last number is for CIFAR-10, and each of the others for ImageNet "
        "on that type of GPU. They are estimated from published training speeds (`powergrad paper "
        "show ID` names the sources)."
    )


def _runs(evidence: Evidence, studies: Mapping[str, Results]) -> str:
    results = [study.results for study in evidence.measurements] + [*studies.values()]
    rows = [row for study in results for row in study.rows]
    seconds = {fingerprint(row): row.metrics["seconds"] for row in rows}
    hours = sum(seconds.values()) / 3600
    return f"The {len(seconds):,} runs behind this page took {hours:.1f} core-hours."


# The paper's tables -------------------------------------------------------------------------------


def _experiment(evidence: Evidence, experiment: Experiment) -> str:
    """Cost, conditions and tables of an experiment, one per study."""
    parts = []
    costs = [by_gpu[0] for row in experiment.rows if (by_gpu := cost(row.recipe))]
    if costs:
        hours = sum(part.hours for part in costs)
        parts.append(f"Full scale: {hours:.0f} GPU hours on {costs[0].gpu}.")
    studies = evidence.of(Use(experiment.id))
    for study in studies:
        parts += _conditions(study)
        parts.append(_grid(study) if experiment.grid else _rows(experiment, study))
    if not studies:
        parts.append("Not measured here.")
        parts += [] if experiment.grid else [_rows(experiment, None)]
    return "\n\n".join(parts)


def _rows(experiment: Experiment, study: Measurement | None) -> str:
    """Published beside measured, one row per arm; published alone where nothing was measured."""
    first = experiment.baseline
    lines = []
    for row in experiment.rows:
        changes = changes_of(row.recipe, first.recipe)
        stated = {key: value for key, value in changes.items() if key in row.stated}
        cells = [row.id, arm_label(row.arm, stated)]
        cells += [f"{row.published[k]:g}" if k in row.published else "" for k in ("train", "test")]
        gain = row.published["test"] - first.published["test"]
        cells.append("" if row is first else f"{gain:+.3f}")
        if study is not None:
            is_measured = row.arm in study.results.arms
            cells += _cells(study, row.arm) if is_measured else [*[""] * 5, "not measured"]
        lines.append(cells)
    head = ("row", "arm", "published: train", "test", "difference")
    more = ("n", "measured: train", "test", *MEASURED)
    return markdown_table((*head, *more) if study else head, lines)


def _cells(study: Measurement, arm: str) -> list[str]:
    """n, train, test, difference, p and verdict."""
    results = study.results
    means = [f"{results.mean(arm, metric):.2f}" for metric in ("train_accuracy", "test_accuracy")]
    cells = [str(len(results.values(arm))), *means]
    if arm == results.baseline:
        return [*cells, "", "", ""]
    if arm not in study.comparisons:
        return [*cells, "", "", "too few seeds"]
    outcome = Outcome.of(study.comparisons[arm])
    verdict = verdict_in_words(study.comparisons[arm])
    return [*cells, outcome.with_interval, outcome.p, verdict]


def _grid(study: Measurement) -> str:
    lines = []
    for arm in study.results.arms:
        nll, norm = (study.results.mean(arm, metric) for metric in ("nll", "logit_norm"))
        lines.append([f"{study.alpha(arm):g}", *_cells(study, arm), f"{nll:.3f}", f"{norm:.1f}"])
    head = ("alpha", "n", "train", "test", *MEASURED, "NLL", "logit norm")
    return markdown_table(head, lines)


def _conditions(study: Measurement) -> Iterator[str]:
    """On what a study was measured, and a list of how."""
    conditions = study.conditions
    commits = sorted({row.commit for row in study.results.rows if row.commit})
    exponent = min(conditions.exponents.values())
    least = f"{exponent:.1f} or more"
    if exponent < LEAST:
        least += f" (under {LEAST:g}, so it says nothing about the paper's long training)"
    scale = " at full scale" if conditions.scale == "full" else ""
    yield (
        f"**Measured{scale} ({study.label})**: {study.describe()}; weight decay / paper's: "
        f"{decay_in_words({}, study.recipe, conditions.tuning)}; [decay exponent]"
        f"(#conditions-of-the-runs) {least}; `results/paper/{study.name}.csv`, "
        f"torch {study.torch}, commit {', '.join(commits) or 'not known'}."
    )
    bullets = [] if conditions.tuning is None else [_tuned(conditions.tuning)]
    if not study.experiment.grid:
        changed = [
            arm_label(arm, changes)
            for arm, changes in conditions.arms.items()
            if other_settings(arm, changes)
        ]
        if changed:
            bullets.append(f"Settings of the arms: {'; '.join(changed)}.")
    if conditions.lost:
        bullets.append(f"Differences from the paper: {'; '.join(conditions.lost)}.")
    bullets += [f"Command: `{command}`" for command in conditions.commands]
    yield "\n".join(f"- {bullet}" for bullet in bullets)


def _tuned(tuning: Tuning) -> str:
    keys = " and ".join(f"`{key}`" for key in tuning.keys)
    arms = "every arm separately" if len(tuning.arms) > 1 else "one arm and used in all arms"
    how = f"{tuning.seeds} seed{'s' if tuning.seeds > 1 else ''} per value"
    if tuning.is_unit:
        how += f", in each of {len(tuning.repeats)} repeats"
        words = "; ".join(map(tuning.describe, tuning.arms))
    else:
        words = ", ".join(
            f"{arm} {_point(choice.winner, tuning.keys)}"
            + (" (edge of the grid)" if choice.at_edge else "")
            for arm, choice in tuning.arms.items()
        )
    return f"{keys} tuned for {arms}, on held-out training data ({how}): {words}."


def _point(trial: TuningTrial, keys: Sequence[str]) -> str:
    """The values of a point: bare if one key was tuned."""
    if len(keys) == 1:
        return number(trial.point[keys[0]])
    return describe_point(trial.point, keys)


def _zeroing_out(evidence: Evidence) -> str:
    """What became of the filters in the runs that recorded their norms."""
    lines = []
    for study in evidence.measurements:
        for arm in study.results.arms:
            filters = study.results.values(arm, "filters")
            if not filters:
                continue
            count, *_ = filters.values()
            cells = [study.name, study.experiment.row(arm).id, arm, str(len(filters))]
            cells.append(f"{count:.0f}")
            for metric in ("dead_units", "died", "came_back"):
                values = [study.results.values(arm, metric)[seed] for seed in filters]
                mean = sum(values) / len(values)
                cells.append(f"{mean:.1f} ({min(values):.0f} to {max(values):.0f})")
            lines.append(cells)
    head = ("study", "row", "arm", "n", "filters")
    return markdown_table((*head, "dead at the end", "died at any time", "came back"), lines)


# Studies that the paper does not have -------------------------------------------------------------


def _beyond(studies: Mapping[str, Results], trials: Sequence[Trial]) -> str:
    known = {trial.name: trial for trial in trials}
    parts = []
    for name, results in studies.items():
        parts += _study(known.get(name) or trial_of_study(name, results), results)
    return "\n\n".join(parts)


def _study(trial: Trial, results: Results) -> Iterator[str]:
    """A study that the paper does not have, with its heading."""
    assert results.study is not None
    name = trial.name
    environment = results.environment
    yield f"### `{name}`: {results.study.kind.value}"
    steps = (row.metrics["steps"] for row in results.rows if not row.diverged)
    yield (
        f"{describe_runs(results.study.base, steps)}; torch {environment['torch']}, commit "
        f"{environment['commit']}; `results/{name}.csv`."
    )
    bullets = [] if results.tuning is None else [_tuned(results.tuning)]
    bullets.append(f"Command: `{environment['command']}`")
    yield "\n".join(f"- {bullet}" for bullet in bullets)
    lines = []
    contrasts = {contrast.arm.name: contrast for contrast in contrasts_of(trial)}
    for arm in trial.arms:
        means = [results.mean(arm.name, key) for key in ("train_accuracy", "test_accuracy")]
        cells = [arm.label, str(len(arm.rows)), *(f"{mean:.2f}" for mean in means)]
        dead = arm.dead.values()
        cells += [f"{sum(dead) / len(dead):.1f}" if dead else "", arm.decay, f"{arm.exponent:.1f}"]
        if contrast := contrasts.get(arm.name):
            outcome = Outcome.of(contrast.comparison)
            cells += [outcome.with_interval, outcome.p, contrast.words]
        else:
            cells += ["", "", ""]
        lines.append(cells)
    head = ("arm", "n", "train", "test", "dead filters", "decay / paper's", "decay exponent")
    yield markdown_table((*head, *MEASURED), lines)
    if lost := results.diverged():
        yield f"{lost} Its dead filters are not counted."


# The rest of the paper ----------------------------------------------------------------------------


def _figures(evidence: Evidence) -> str:
    lines = [
        (f"{figure.id} `{figure.name}`", figure.title, _drawn_from(evidence, figure))
        for figure in load_paper().figures
    ]
    return markdown_table(("figure", "shows", "drawn from"), lines)


def _drawn_from(evidence: Evidence, figure: Figure) -> str:
    if not figure.uses:
        return "equations and network definitions"
    if missing := evidence.missing(figure.uses):
        return f"not measured: {', '.join(map(str, missing))}"
    has_curves = figure.name == "metrics"
    studies = [
        evidence.most_tested(use).study if has_curves else evidence.best(use) for use in figure.uses
    ]
    return ", ".join(dict.fromkeys(f"`{study.name}`" for study in studies))


def _numbers() -> str:
    numbers = load_paper().numbers
    lines = [(printed.where, printed.what, str(printed.value)) for printed in numbers]
    return markdown_table(("where", "what", "published"), lines)


def _notes() -> str:
    return "\n".join(f"- ({', '.join(note.about)}) {note.text}" for note in load_paper().notes)


def _unstated() -> str:
    lines = []
    for unstated in load_paper().unstated:
        chosen = ", ".join(f"`{key}: {value}`" for key, value in unstated.choice.items())
        words = f"- **{unstated.what}** ({', '.join(unstated.about)}): {unstated.reason}"
        lines.append(words + (f" Chosen: {chosen}." if chosen else ""))
    return "\n".join(lines)


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
        "rate was chosen at the edge of the tried values. In these comparisons PGT was not better:"
        f"\n\n{_short_table(others)}"
    )


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
    _, arm, _, _, *rest = contrast.cells
    *cells, verdict = (cell.replace(", inflated", "") for cell in rest)
    return [arm, *cells, verdict.replace("not settled; better withheld", "better withheld")]


def _grid_cells(rows: Sequence[Contrast]) -> list[str]:
    """The cells of a whole grid: the range of the differences, and how often each verdict is."""
    differences = [row.comparison.difference for row in rows]
    alphas = [row.arm.changes["loss.alpha"] for row in rows]
    verdicts = Counter(row.verdict for row in rows)
    return [
        f"{len(rows)} alphas from {min(alphas):g} to {max(alphas):g}",
        rows[0].arm.decay.replace(", inflated", ""),
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
