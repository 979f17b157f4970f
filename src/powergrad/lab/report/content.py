"""The content of the page, one dictionary per study: from its results and its run folders."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from powergrad.lab import stats
from powergrad.lab.report.curves import (
    describe_environments,
    describe_outputs,
    read_classes,
    read_curve,
    try_read,
)
from powergrad.lab.report.filters import encode_norms
from powergrad.lab.runs import RecipeProgram
from powergrad.lab.study import METRICS, Results, RunRow, load_study
from powergrad.lab.study.decompose import describe_identity, explain_decomposition
from powergrad.lab.study.metrics import metric_names
from powergrad.lab.study.saving import FILE, conclude, find_jobs
from powergrad.lab.trainer.recipe import Recipe, flatten
from powergrad.lab.trainer.run_folder import Run, RunError
from powergrad.lab.words import hide_folders, short_key

LISTED = 8  # the maximal number of runs that a note lists
NO_VERDICT = {"verdict": "No verdict yet: too few runs are finished.", "notes": [], "advice": []}


def describe_sources(sources: Sequence[Path | Results]) -> list[dict[str, Any]]:
    """The studies of the page: results, folders of studies, and single runs together."""
    studies: list[Results] = []
    folders: dict[Path, None] = {}
    for source in sources:
        if isinstance(source, Results):
            studies.append(source)
            continue
        found = _find(source) or [f for child in _children(source) for f in _find(child)]
        if not found:
            raise RunError(
                f"Expected {str(source)!r} to be the folder of a run or a study, but got neither."
            )
        folders |= dict.fromkeys(found)
    runs = [folder for folder in folders if not (folder / FILE).is_file()]
    studies += [load_study(folder) for folder in folders if folder not in runs]
    return [*map(describe_study, studies), *([_describe_single_runs(runs)] if runs else [])]


def _find(path: Path) -> list[Path]:
    is_source = (path / FILE).is_file() or (path / "config.yaml").is_file()
    return [path] if is_source else []


def _children(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() else []


# Studies ------------------------------------------------------------------------------------------


def describe_study(results: Results, states: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The content for a study, or for runs of a table; `states` are those of runs in progress."""
    study, source, usable = results.study, results.source, results.comparable()
    notes: list[str] = []
    content = _describe_results(results, states, notes)
    if study is not None and states is None:
        few = [arm for arm in study.arms if len(results.units(arm)) < 2]
        notes += [f"Too few finished runs to compare: {', '.join(few)}."] if few else []
    conclusions = conclude(usable) if usable else {**NO_VERDICT, "comparisons": []}
    if usable and study and usable.identity and set(usable.arms) == set(study.arms):
        content["decomposition"] = {
            "identity": describe_identity(usable.identity.gaps),
            "explanation": explain_decomposition(usable, usable.identity.alpha),
        }
    if source is not None:
        content |= {"source": {"file": source.file, **source.columns}}
    if study is not None:
        what, kind = study.program.title, study.kind
    else:
        what, kind = f"{len(results.rows)} runs{f' of {source.file}' if source else ''}", "compare"
    name = results.folder.resolve().name if results.folder else source.file if source else "runs"
    return {
        **content,
        **{key: conclusions[key] for key in ("comparisons", "advice")},
        "headline": conclusions["verdict"],
        "notes": [hide_folders(note) for note in (*notes, *conclusions["notes"])],
        "name": name,
        "kind": kind,
        "what": what,
        "recipe": _describe_program(results),
    }


def _describe_program(results: Results) -> str:
    """The recipe or the program of a study, as YAML."""
    if results.study is None:
        return ""
    program = results.study.program.public()
    values = program.model_dump(mode="json", exclude={"fingerprint"})
    if isinstance(program, RecipeProgram):
        values = program.base.model_dump(mode="json", exclude={"seed"})
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _describe_results(
    results: Results, states: Mapping[str, str] | None, notes: list[str]
) -> dict[str, Any]:
    """The arms and runs, and what is known without a verdict; appends to `notes`."""
    study, folder, rows = results.study, results.folder, _all_rows(results)
    program = study.program if study else None
    is_recipe = isinstance(program, RecipeProgram)
    columns = list(results.columns)
    if program is not None and not is_recipe:
        columns = metric_names([row.metrics for row in rows], results.metric.name)
    arms = {arm: results.settings(arm) for arm in (study.arms if study else results.arms)}
    paths = [_folder_of(row, folder) for row in rows]
    started = [path for path in paths if path is not None]
    norms, faults = encode_norms(started)
    runs: list[dict[str, Any]] = []
    for row, path in zip(rows, paths, strict=True):
        curve, last = read_curve(path, notes) if path else ({}, {})
        status, note = _status(row, results.metric.name, last, path, states)
        if status == "unfinished" and path:
            try_read(Run(path).result, None, notes)  # it may be damaged
        alpha = row.about.get("alpha")
        if alpha is None and program is not None:
            alpha = program.alpha(arms[row.arm])
        final = {**row.about, **row.metrics} if row.metrics else last
        runs.append(
            {
                "arm": list(arms).index(row.arm),
                "seed": row.seed,
                "name": path.name if path else "",
                "alpha": alpha,
                "status": status,
                "note": note,
                "final": {name: final.get(name) for name in columns},
                "curve": curve,
                "norms": norms.get(path) if path else None,
            }
        )
    notes += [*_count_states(runs, list(arms)), *faults]
    outputs = [
        describe_outputs(
            [
                (path, run["alpha"])
                for run, path in zip(runs, paths, strict=True)
                if path and run["arm"] == place and run["status"] == "finished"
            ],
            notes,
        )
        for place in range(len(arms))
    ]
    return {
        "metric": results.metric.name,
        "words": results.metric.unit,
        "higher": results.metric.higher_is_better,
        "margin": results.margin,
        "baseline": results.baseline,
        "foreign": not is_recipe if study else results.source is not None,
        "arms": [
            {
                "name": arm,
                "changes": changes,
                "alpha": next((run["alpha"] for run in runs if run["arm"] == place), None),
                "summary": _summarise([run for run in runs if run["arm"] == place], columns),
                "reliability": outputs[place][0],
            }
            for place, (arm, changes) in enumerate(arms.items())
        ],
        "runs": runs,
        "units": {arm: list(results.units(arm).values()) for arm in results.arms},
        "examples": [
            {"arm": arm, **example}
            for arm, (_, examples) in zip(arms, outputs, strict=True)
            for example in examples
        ],
        "classes": read_classes(started, notes),
        "environments": describe_environments(started, notes),
        "command": hide_folders(results.environment.get("command") or "") or None,
        "grid": results.grid.values if results.grid else None,
        "tuning": results.tuning.model_dump() if results.tuning else None,
        **dict.fromkeys(("decomposition", "source", "provisional")),
    }


def _all_rows(results: Results) -> list[RunRow]:
    """All runs by arm and seed, with those that are planned and those left out of a table."""
    study, source, rows = results.study, results.source, list(results.rows)
    if study is not None and results.folder is not None:
        known = {(row.arm, row.seed) for row in rows}
        unfinished = results.unfinished_arms()
        if unfinished == [study.baseline] and len(study.arms) > 1:  # all others are settled
            unfinished = []
        rows += [
            RunRow(arm=arm, seed=seed, run=job.name)
            for (arm, seed), job in find_jobs(study, results.folder).items()
            if arm in unfinished and (arm, seed) not in known
        ]
    for run in source.left_out if source else ():
        if run.arm in results.arms:
            rows.append(RunRow(arm=run.arm, seed=run.seed, about={"left_out": run.reason}))
    order = list(study.arms) if study else results.arms
    return sorted(rows, key=lambda row: (order.index(row.arm), row.seed))


def _folder_of(row: RunRow, folder: Path | None) -> Path | None:
    """The folder of a run, if it exists here."""
    path = folder / row.run if folder is not None and row.run else None
    return path if path is not None and path.is_dir() else None


def _status(
    row: RunRow,
    metric: str,
    last: Mapping[str, Any],
    path: Path | None,
    states: Mapping[str, str] | None,
) -> tuple[str, str]:
    """The status of a run, and the reason for it."""
    if reason := row.about.get("left_out"):
        return "left out", reason
    if row.failed:
        return "failed", row.failed.splitlines()[0]
    if row.is_lost(metric):
        return "diverged", "its loss or its metric is not finite"
    if row.metrics:
        return "finished", ""
    if states is not None:
        return states.get(row.run, "planned"), ""
    if path is None:
        return "missing", "not started"
    return "unfinished", f"at epoch {last['epoch']:g}" if last.get("epoch") else "no result"


def _count_states(runs: Sequence[Mapping[str, Any]], arms: Sequence[str]) -> list[str]:
    """Notes about runs without a result."""
    notes = []
    for status in ("missing", "unfinished"):
        if affected := [run for run in runs if run["status"] == status]:
            listed = ", ".join(
                f"{arms[run['arm']]} seed {run['seed']} ({run['note']})"
                for run in affected[:LISTED]
            )
            more = f" and {len(affected) - LISTED} more" if len(affected) > LISTED else ""
            count = "1 run is" if len(affected) == 1 else f"{len(affected)} runs are"
            notes.append(f"{count} {status}: {listed}{more}.")
    return notes


def _summarise(runs: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> dict[str, Any]:
    """The mean, the standard deviation and the interval of each metric of an arm."""
    summary = {}
    for name in columns:
        finals = [run["final"][name] for run in runs if run["status"] == "finished"]
        values = [float(v) for v in finals if isinstance(v, (int, float)) and math.isfinite(v)]
        if not values or name == "diverged":
            continue
        low, high = stats.t_interval(values) if len(values) > 1 else (None, None)
        deviation = statistics.stdev(values) if len(values) > 1 else None
        mean = sum(values) / len(values)
        summary[name] = {"mean": mean, "sd": deviation, "low": low, "high": high, "n": len(values)}
    return summary


# Runs without a study -----------------------------------------------------------------------------


def _describe_single_runs(folders: Sequence[Path]) -> dict[str, Any]:
    """The content for runs without a study; runs that differ only in their seed form one arm."""
    notes: list[str] = []
    found = {folder: try_read(Run(folder).recipe, None, notes) for folder in folders}
    recipes = {folder: recipe for folder, recipe in found.items() if recipe is not None}
    if not recipes:
        raise RunError(" ".join(notes))
    rows = []
    for folder, (arm, changes) in zip(recipes, _name_arms([*recipes.values()]), strict=True):
        result = try_read(Run(folder).result, None, notes)
        metrics, about = (result.metrics, result.about) if result else ({}, {})
        recipe = recipes[folder]
        row = RunRow(arm=arm, seed=recipe.seed, settings=changes, run=str(folder.resolve()))
        about = {**about, "alpha": about.get("alpha", recipe.loss.alpha)}
        rows.append(RunRow.model_validate({**dict(row), "metrics": metrics, "about": about}))
    first = next(iter(recipes))
    results = replace(
        Results(METRICS["test_accuracy"], 0.5, rows[0].arm, rows, folder=Path()),
        environment=try_read(Run(first).environment, {}, notes),
    )
    content = _describe_results(results, None, notes)
    is_alone = len(rows) == 1
    headline = "These runs do not belong to one study, so they are shown without a verdict."
    return {
        **content,
        "name": first.resolve().name if is_alone else f"{len(rows)} runs",
        "kind": "run" if is_alone else "runs",
        "what": RecipeProgram(base=recipes[first]).title,
        "headline": _describe_run(content["runs"][0], rows[0]) if is_alone else headline,
        "recipe": recipes[first].without_paths().to_yaml(),
        "notes": [hide_folders(note) for note in notes],
        **{key: [] for key in ("comparisons", "advice")},
    }


def _name_arms(recipes: Sequence[Recipe]) -> list[tuple[str, dict[str, Any]]]:
    """For each recipe the name of its arm, and the values in which it differs from the others."""
    values = [
        dict(flatten(recipe.model_dump(mode="json", exclude={"machine", "seed"})))
        for recipe in recipes
    ]
    varied = [key for key in values[0] if len({repr(value[key]) for value in values}) > 1]
    changes = [{key: value[key] for key in varied} for value in values]
    return [
        (", ".join(f"{short_key(k)}={v}" for k, v in c.items()) or recipe.model.name, c)
        for recipe, c in zip(recipes, changes, strict=True)
    ]


def _describe_run(run: Mapping[str, Any], row: RunRow) -> str:
    accuracy = row.value("test_accuracy")
    if run["status"] != "finished" or accuracy is None:
        return f"The run is {run['status']}: {run['note'] or 'it was not tested'}."
    epochs = row.about.get("epoch") or 0
    return f"Test accuracy {accuracy:.2f}% after {epochs:g} epochs at alpha {run['alpha']:g}."
