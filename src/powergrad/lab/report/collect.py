"""Collects the data of the page from results and run folders."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import yaml

from powergrad import __version__
from powergrad.lab.glossary import TERMS
from powergrad.lab.jobs import RecipeProgram
from powergrad.lab.report.arms import describe_arms
from powergrad.lab.report.runs import UNREADABLE, ShownRun, try_read
from powergrad.lab.stats import Comparison
from powergrad.lab.study import METRICS, Metric, Results, RunRow, Study
from powergrad.lab.study.decompose import describe_identity, explain_decomposition
from powergrad.lab.study.metrics import COLUMNS, metric_names
from powergrad.lab.trainer.recipe import Recipe, flatten
from powergrad.lab.trainer.run_folder import Run, RunError
from powergrad.lab.words import hide_folders, short_key, slug

FORMAT = 1
NO_VERDICT = "No verdict yet: too few runs are finished."
# Defaults of the optional fields of a study.
NOT_KNOWN: dict[str, Any] = {
    **dict.fromkeys(("grid", "tuning", "decomposition", "source", "provisional")),
    "columns": [],
    "foreign": False,
    "recipe": "",
}


def collect(
    sources: Sequence[Path | Results], states: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The data of the page of some runs and studies."""
    studies: list[dict[str, Any]] = []
    folders: dict[Path, None] = {}
    for source in sources:
        if isinstance(source, Results):
            studies.append(_study(source, [], states))
            continue
        below = _find(Path(source))
        if not below:
            raise RunError(
                f"Expected {str(source)!r} to be the folder of a run or a study, but got neither."
            )
        folders |= dict.fromkeys(below)
    runs = [folder for folder in folders if (folder / "config.yaml").is_file()]
    for folder in folders:
        if folder not in runs:
            results, notes = _load(folder, is_running=states is not None)
            studies.append(_study(results, notes, states))
    if runs:
        studies.append(_loose_runs(runs))
    return {
        "format": FORMAT,
        "version": __version__,
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "studies": studies,
        "glossary": [term._asdict() for term in TERMS],
    }


def _find(path: Path, deeper: bool = True) -> list[Path]:
    """The run or study at `path`; if it is neither, those directly below it.

    The runs of a tuning are included only if `path` is the folder of the tuning.
    """
    if (path / "study.yaml").is_file() or (path / "config.yaml").is_file() or _is_table(path):
        return [path]
    if not deeper or not path.is_dir():
        return []
    below = [folder for child in sorted(path.iterdir()) for folder in _find(child, deeper=False)]
    return [folder for folder in below if folder.name != "tuning"] or below


def _is_table(folder: Path) -> bool:
    """Whether `folder` contains the results of a table."""
    try:
        return (folder / "study.json").is_file() and Results.load(folder).source is not None
    except UNREADABLE:
        return False


# Studies ------------------------------------------------------------------------------------------


def _load(folder: Path, *, is_running: bool) -> tuple[Results, list[str]]:
    """The results in the folder of a study, and notes about them."""
    notes: list[str] = []
    if not (folder / "study.yaml").exists():
        return Results.load(folder), notes
    if not is_running and not (folder / "study.json").exists():
        notes.append("The study is not finished: there is no study.json yet.")
    try:
        results = Results.load(folder)
    except UNREADABLE as error:
        study = Study.load(folder)  # raises if there is no study at all
        notes.append(f"A file could not be read: {error}")
        results = Results.of_runs(study, folder)
    assert results.study is not None
    names = {job.name for job in results.study.jobs().values()}
    names |= {row.run for row in results.rows}
    for config in sorted(folder.glob("*/config.yaml")):
        if config.parent.name not in names:
            notes.append(f"{config.parent.name} belongs to none of the arms and is left out.")
    return results, notes


def _study(results: Results, notes: list[str], states: Mapping[str, str] | None) -> dict[str, Any]:
    if results.source is not None:
        return _table(results, notes)
    study, folder = results.study, results.folder
    assert study is not None
    assert folder is not None
    runs = _runs(results, study, folder, notes)
    if states is not None:
        for run in runs:
            if run.status in ("missing", "unfinished"):
                state = states.get(run.folder.name, "planned")
                run.status = "waiting" if state == "finished" else state
    usable = _usable(results, runs, notes if states is None else [])
    if usable:
        notes += usable.notes()
    decomposed = None
    if usable and usable.decomposition and set(usable.arms) == set(study.arms):
        decomposed = {
            "identity": describe_identity(usable.decomposition.gaps),
            "explanation": explain_decomposition(usable, usable.decomposition.alpha),
        }
    place = folder.resolve()
    name = place.parent.name if place.name == "arms" else place.name
    if isinstance(study.program, RecipeProgram):
        described = study.base.without_paths()
        values, metrics = described.model_dump(mode="json", exclude={"seed"}), list(COLUMNS)
    else:
        values = study.program.to_dict()
        metrics = metric_names([run.final for run in runs], study.metric.name)
    recipe = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    settings = {arm: study.settings(arm) for arm in study.arms}
    return {
        **describe_arms(runs, settings, notes, metrics),
        **_heading(name, study.kind.value, study.program.title, study.metric),
        **_verdict(results, usable),
        "foreign": study.program.is_foreign,
        "grid": results.grid.values if results.grid else None,
        "tuning": results.tuning.to_dict() if results.tuning else None,
        "decomposition": decomposed,
        "recipe": recipe,
        "notes": [hide_folders(note) for note in notes],
    }


def _table(results: Results, notes: list[str]) -> dict[str, Any]:
    """The data of runs made elsewhere, for which only the table is known."""
    source, folder = results.source, results.folder
    assert source is not None
    place = folder or Path()
    runs = [
        ShownRun(
            place / f"{slug(row.arm)}-seed{row.seed}",
            row.arm,
            row.seed,
            math.nan,
            *(("diverged", "its metric is not finite") if row.diverged else ()),
            final=dict(row.metrics),
        )
        for row in results.rows
    ]
    runs += [
        ShownRun(place, run.arm, run.seed, math.nan, "left out", run.reason)
        for run in source.left_out
        if run.arm in results.arms
    ]
    order = results.arms
    runs.sort(key=lambda run: (order.index(run.arm), run.seed))
    name = folder.resolve().name if folder else source.file
    what = f"{len(results.rows)} runs of {source.file}"
    return {
        **describe_arms(runs, {arm: results.settings(arm) for arm in order}, [], results.columns),
        **_heading(name, "compare", what, results.metric),
        **_verdict(results, results),
        "columns": [column for column in results.columns if column not in COLUMNS],
        "source": {"file": source.file, **source.columns},
        "notes": [hide_folders(note) for note in (*notes, *results.notes())],
    }


def _verdict(results: Results, usable: Results | None) -> dict[str, Any]:
    return {
        "margin": results.margin,
        "baseline": results.baseline,
        "headline": usable.verdict() if usable else NO_VERDICT,
        "comparisons": [c.to_dict() for c in usable.comparisons] if usable else [],
        "units": {arm: list(results.units(arm).values()) for arm in results.arms},
        "command": hide_folders(results.environment.get("command") or "") or None,
        "advice": usable.advice() if usable else [],
        **NOT_KNOWN,
    }


def _heading(name: str, kind: str, what: str, metric: Metric) -> dict[str, Any]:
    return {
        "name": name,
        "kind": kind,
        "what": what,
        "metric": metric.name,
        "words": metric.unit,
        "higher": metric.higher_is_better,
    }


def _runs(results: Results, study: Study, folder: Path, notes: list[str]) -> list[ShownRun]:
    """Every run of the study by arm, including missing ones."""
    names = {(row.arm, row.seed): row.run for row in results.rows}
    jobs = {} if results.has_repeats else study.jobs()
    settled = {c.arm: c for c in _comparisons(results) if not c.is_open}
    for (arm, seed), job in jobs.items():
        is_wanted = study.unit_of(seed) < study.first_seed + _size(arm, settled, study)
        if is_wanted or (folder / job.name).is_dir():
            names.setdefault((arm, seed), job.name)
    elsewhere = {(row.arm, row.seed): row for row in results.rows if row.is_elsewhere}
    runs = []
    rows = {(row.arm, row.seed): row for row in results.rows}
    for (arm, seed), name in names.items():
        path = folder / name
        if study.program.is_foreign:
            alpha = study.program.alpha(study.settings(arm))
            runs.append(_foreign_run(path, arm, seed, alpha, rows.get((arm, seed))))
            continue
        recipe = try_read(Run(path).recipe, None, notes) if Run(path).exists() else None
        alpha = study.program.alpha(study.arms[arm])
        if recipe is not None:
            runs.append(ShownRun.read(path, arm, recipe, notes))
        elif (arm, seed) in elsewhere:
            metrics = dict(elsewhere[arm, seed].metrics)
            runs.append(ShownRun(path, arm, seed, alpha, final=metrics))
        else:
            runs.append(ShownRun.missing(path, arm, seed, alpha))
    order = list(study.arms)
    return sorted(runs, key=lambda run: (order.index(run.arm), run.seed))


def _foreign_run(path: Path, arm: str, seed: int, alpha: float, row: RunRow | None) -> ShownRun:
    """The run of a user's program, for which only the final metrics are known."""
    if row is None:
        if not path.is_dir():
            return ShownRun.missing(path, arm, seed, alpha)
        return ShownRun(path, arm, seed, alpha, "unfinished", "it has no result")
    final = {key: value for key, value in row.metrics.items() if key != "failed"}
    if row.failed:
        return ShownRun(path, arm, seed, alpha, "failed", row.failed.splitlines()[0])
    if row.diverged:
        note = "its metric is not finite"
        return ShownRun(path, arm, seed, alpha, "diverged", note, final)
    return ShownRun(path, arm, seed, alpha, final=final)


def _comparisons(results: Results) -> list[Comparison]:
    usable = results.comparable()
    return usable.comparisons if usable else []


def _size(arm: str, settled: Mapping[str, Comparison], study: Study) -> int:
    """The planned number of runs of an arm; a settled arm gets no more."""
    if arm in settled:
        return settled[arm].done
    others = [other for other in study.arms if other != study.baseline]
    if arm == study.baseline and others and all(other in settled for other in others):
        return max(settled[other].done for other in others)
    return study.design.last


def _usable(results: Results, runs: Sequence[ShownRun], notes: list[str]) -> Results | None:
    """The results that can be compared; exclusions are appended to `notes`."""
    counted = [row.arm for row in results.rows if not row.failed]
    if len(counted) < len(runs):
        notes.append(f"Only {len(counted)} of {len(runs)} runs count: the others have no result.")
    few = [arm for arm in dict.fromkeys(run.arm for run in runs) if len(results.units(arm)) < 2]
    if few:
        notes.append(f"Too few finished runs to compare: {', '.join(few)}.")
    return results.comparable()


# Runs without a study -----------------------------------------------------------------------------


def _loose_runs(folders: list[Path]) -> dict[str, Any]:
    """The data of runs without a study; runs that differ only in their seed form one arm."""
    notes: list[str] = []
    recipes: dict[Path, Recipe] = {}
    for folder in folders:
        recipe = try_read(Run(folder).recipe, None, notes)
        if recipe is not None:
            recipes[folder] = recipe
    if not recipes:
        raise RunError(" ".join(notes))
    alike = {folder: recipe.override({"seed": 0}) for folder, recipe in recipes.items()}
    values = {
        recipe.key: dict(flatten(recipe.model_dump(mode="json", exclude={"machine"})))
        for recipe in alike.values()
    }
    first = next(iter(values.values()))
    varied = [key for key in first if len({repr(arm[key]) for arm in values.values()}) > 1]
    names, arms = {}, {}
    for recipe in alike.values():
        changes = {key: values[recipe.key][key] for key in varied}
        name = ", ".join(f"{short_key(key)}={value}" for key, value in changes.items())
        names[recipe.key] = name or recipe.model.name
        arms[names[recipe.key]] = changes
    runs = [
        ShownRun.read(folder, names[alike[folder].key], recipe, notes)
        for folder, recipe in recipes.items()
    ]
    order = list(arms)
    runs.sort(key=lambda run: (order.index(run.arm), run.seed))
    is_alone = len(runs) == 1
    recipe = recipes[runs[0].folder]
    headline = "These runs do not belong to one study, so they are shown without a verdict."
    return {
        **describe_arms(runs, arms, notes, COLUMNS),
        **_heading(
            runs[0].folder.resolve().name if is_alone else f"{len(runs)} runs",
            "run" if is_alone else "runs",
            RecipeProgram(recipe).title,
            METRICS["test_accuracy"],
        ),
        **NOT_KNOWN,
        "margin": None,
        "baseline": order[0],
        "headline": _run_headline(runs[0]) if is_alone else headline,
        "comparisons": [],
        "units": {},
        "recipe": recipe.without_paths().to_yaml(),
        "command": hide_folders(
            try_read(Run(runs[0].folder).environment, {}, notes).get("command") or ""
        )
        or None,
        "notes": [hide_folders(note) for note in notes],
        "advice": [],
    }


def _run_headline(run: ShownRun) -> str:
    accuracy = run.final.get("test_accuracy")
    if run.status != "finished" or accuracy is None:
        return f"The run is {run.status}: {run.note or 'it was not tested'}."
    return (
        f"Test accuracy {accuracy:.2f}% after {run.final.get('epoch', 0):g} epochs at alpha "
        f"{run.alpha:g}."
    )
