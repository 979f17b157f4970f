"""The content of the page, one dictionary per study: from its results and its run folders."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from powergrad.lab import stats
from powergrad.lab.report.curves import describe_outputs, read_curve, try_read
from powergrad.lab.report.filters import encode_norms
from powergrad.lab.runs import RecipeProgram
from powergrad.lab.study import METRICS, Results, RunRow, load_study
from powergrad.lab.study.decompose import describe_identity, explain_decomposition
from powergrad.lab.study.metrics import metric_names
from powergrad.lab.study.notes import describe_scale, describe_title, describe_tuning, verdict
from powergrad.lab.study.saving import FILE, conclude, planned_jobs
from powergrad.lab.trainer.recipe import Recipe, flatten
from powergrad.lab.trainer.run_folder import Run, RunError
from powergrad.lab.words import hide_folders, portable, short_key

NO_VERDICT = {"verdict": "No verdict yet: too few runs are finished.", "notes": [], "advice": []}


def describe_sources(sources: Sequence[Path | Results]) -> list[dict[str, Any]]:
    """The studies of the page: results, folders of studies, and single runs together."""
    studies = [source for source in sources if isinstance(source, Results)]
    folders = [folder for s in sources if not isinstance(s, Results) for folder in _find(s)]
    studies += [load_study(folder) for folder in folders if (folder / FILE).is_file()]
    runs = [*dict.fromkeys(folder for folder in folders if not (folder / FILE).is_file())]
    return [*map(describe_study, studies), *([_describe_single_runs(runs)] if runs else [])]


def _find(path: Path) -> list[Path]:
    """The run or study in the folder `path`, or those directly below it."""
    files = (FILE, "config.yaml")
    for folders in ([path], sorted(path.iterdir()) if path.is_dir() else []):
        if found := [f for f in folders if any((f / file).is_file() for file in files)]:
            return found
    raise RunError(f"Expected {str(path)!r} to be the folder of a run or a study, but got neither.")


# Studies ------------------------------------------------------------------------------------------


def describe_study(results: Results, states: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The content for a study or a table; `states` has the runs in progress, by name."""
    study, source, usable = results.study, results.source, results.comparable()
    notes: list[str] = []
    content = _describe_results(results, states, notes)
    if study is not None and states is None:
        few = [arm for arm in study.arms if usable is None or arm not in usable.arms]
        notes += [f"Too few finished runs to compare: {', '.join(few)}."] if few else []
    conclusions = conclude(usable) if usable else NO_VERDICT
    parts = None
    if usable and study and usable.identity and set(usable.arms) == set(study.arms):
        parts = {
            "identity": describe_identity(usable.identity.gaps),
            "explanation": explain_decomposition(usable, usable.identity.alpha),
        }
    runs = f"{len(results.rows)} runs{f' of {source.file}' if source else ''}"
    name = source.file if source else "runs"
    recipe = ""
    if study is not None:
        hidden = {"fingerprint": True, "code": True, "base": {"seed"}}
        program = study.program.public().model_dump(mode="json", exclude=hidden)
        recipe = yaml.safe_dump(program.get("base", program), sort_keys=False, allow_unicode=True)
    return {
        **content,
        "name": results.folder.resolve().name if results.folder else name,
        "kind": study.kind if study else "compare",
        "what": study.program.title if study else runs,
        "title": describe_title(results),
        "verdict": conclusions["verdict"],
        "headline": verdict(usable, with_numbers=True) if usable else NO_VERDICT["verdict"],
        "scale": describe_scale(results),
        "tuned": describe_tuning(results),
        "comparisons": conclusions.get("comparisons", []),
        "advice": conclusions["advice"],
        "notes": [hide_folders(note) for note in (*notes, *conclusions["notes"])],
        "decomposition": parts,
        "source": {"file": source.file, **source.columns} if source else None,
        "recipe": recipe,
    }


def _describe_results(
    results: Results, states: Mapping[str, str] | None, notes: list[str]
) -> dict[str, Any]:
    """The arms and runs; appends to `notes`."""
    study, columns = results.study, list(results.columns)
    if study is not None and study.program.is_foreign:
        columns = metric_names([row.metrics for row in results.rows], results.metric.name)
    arms = {arm: results.settings(arm) for arm in (study.arms if study else results.arms)}
    rows = [*results.rows, *planned_runs(results)]
    for run in results.source.left_out if results.source else ():
        if run.arm in arms:
            rows.append(RunRow(arm=run.arm, seed=run.seed, about={"left_out": run.reason}))
    rows.sort(key=lambda row: ([*arms].index(row.arm), row.seed))
    places = [results.folder / row.run if results.folder and row.run else None for row in rows]
    paths = [path if path and path.is_dir() else None for path in places]  # those that exist here
    norms, faults = encode_norms([path for path in paths if path])
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    finished: dict[str, list[tuple[Path, float]]] = {arm: [] for arm in arms}
    for row, path in zip(rows, paths, strict=True):
        curve = read_curve(path, notes) if path else {}
        status, note = _outcome(row, results.metric.name)
        if not status:
            status = "unfinished" if path else "missing"
            status = status if states is None else states.get(row.run, "planned")
            note = f"at epoch {curve['epoch'][-1]:g}" if "epoch" in curve else "no result"
        usual = study.program.alpha(arms[row.arm]) if study else None
        alpha = usual if row.about.get("alpha") is None else row.about["alpha"]
        if alpha is not None and path and status == "finished":
            finished[row.arm].append((path, alpha))
        if path and status == "unfinished":
            try_read(Run(path).result, None, notes)  # says if it is damaged
        final = {**row.about, **row.metrics}
        runs[row.arm].append(
            {
                "arm": [*arms].index(row.arm),
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
    outputs = {arm: describe_outputs(finished[arm], notes) for arm in arms}
    no_result = ("missing", "unfinished")
    lacking = {arm: [r["seed"] for r in runs[arm] if r["status"] in no_result] for arm in arms}
    listed = [f"{arm} (seed {', '.join(map(str, s))})" for arm, s in lacking.items() if s]
    notes += [*([f"Runs without a result: {', '.join(listed)}."] if listed else []), *faults]
    hidden = ("format", "seed", "time", "command", "resumed")
    return {
        "metric": results.metric.name,
        "words": results.metric.unit,
        "higher": results.metric.higher_is_better,
        "margin": results.margin,
        "baseline": results.baseline,
        "foreign": study.program.is_foreign if study else results.source is not None,
        "arms": [
            {
                "name": arm,
                "changes": changes,
                "alpha": runs[arm][0]["alpha"] if runs[arm] else None,
                "summary": _summarise(runs[arm], columns),
                "reliability": outputs[arm],
            }
            for arm, changes in arms.items()
        ],
        "runs": [run for arm in arms for run in runs[arm]],
        "units": {arm: list(results.units(arm).values()) for arm in results.arms},
        "environment": {k: v for k, v in results.environment.items() if k not in hidden},
        "command": portable(results.environment.get("command") or "") or None,
        "grid": results.grid.values if results.grid else None,
        "tuning": results.tuning.model_dump() if results.tuning else None,
        "provisional": None,
    }


def planned_runs(results: Results) -> list[RunRow]:
    """The runs that the arms still need; arms that are settled get no more."""
    study = results.study
    if study is None or results.folder is None:
        return []
    arms, known = open_arms(results), {(row.arm, row.seed) for row in results.rows}
    return [
        RunRow(arm=arm, seed=seed, run=job.name)
        for (arm, seed), job in planned_jobs(study).items()
        if arm in arms and (arm, seed) not in known
    ]


def open_arms(results: Results) -> list[str]:
    """The arms that are not settled; the baseline is needed as long as another one is not."""
    arms = results.unfinished_arms()
    return [] if arms == [results.baseline] and len(results.arms) > 1 else arms


def _outcome(row: RunRow, metric: str) -> tuple[str, str]:
    """The status of a run that has ended, and the reason for it; empty if it has not."""
    if reason := row.about.get("left_out"):
        return "left out", reason
    if row.failed:
        return "failed", row.failed.splitlines()[0]
    if row.is_lost(metric):
        return "diverged", "its loss or its metric is not finite"
    return ("finished", "") if row.metrics else ("", "")


def _summarise(runs: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> dict[str, Any]:
    """The mean, the standard deviation and the interval of each metric of an arm."""
    summary = {}
    for name in columns:
        finals = [run["final"][name] for run in runs if run["status"] == "finished"]
        values = [float(v) for v in finals if isinstance(v, (int, float)) and math.isfinite(v)]
        if values and name != "diverged":
            low, high = stats.t_interval(values) if len(values) >= stats.LEAST else (None, None)
            deviation = statistics.stdev(values) if len(values) > 1 else None
            summary[name] = {"mean": statistics.fmean(values), "sd": deviation}
            summary[name] |= {"low": low, "high": high, "n": len(values)}
    return summary


# Runs without a study -----------------------------------------------------------------------------


def _describe_single_runs(folders: Sequence[Path]) -> dict[str, Any]:
    """The content for runs without a study; runs that differ only in their seed form one arm."""
    notes: list[str] = []
    read = {folder: try_read(Run(folder).recipe, None, notes) for folder in folders}
    recipes = {folder: recipe for folder, recipe in read.items() if recipe is not None}
    if not recipes:
        raise RunError(" ".join(notes))
    (first, recipe), *others = recipes.items()
    rows = []
    for folder, changes in zip(recipes, _differences([*recipes.values()]), strict=True):
        result = try_read(Run(folder).result, None, notes)
        row: dict[str, Any] = result.model_dump() if result else {"about": {}}
        row["about"].setdefault("alpha", recipes[folder].loss.alpha)
        arm = ", ".join(f"{short_key(k)}={v}" for k, v in changes.items()) or recipe.model.name
        row |= {"arm": arm, "seed": recipes[folder].seed, "settings": changes}
        rows.append(RunRow.model_validate({**row, "run": str(folder.resolve())}))
    found = {"folder": Path(), "environment": try_read(Run(first).environment, {}, notes)}
    results = Results(METRICS["test_accuracy"], 0.5, rows[0].arm, rows, **found)
    content = _describe_results(results, None, notes)
    headline = "These runs do not belong to one study, so they are shown without a verdict."
    return {
        **content,
        "name": (name := f"{len(rows)} runs" if others else first.resolve().name),
        "title": f"{name} of {RecipeProgram(base=recipe).title}" if others else name,
        "kind": "runs" if others else "run",
        "what": RecipeProgram(base=recipe).title,
        "headline": headline if others else _describe_run(content["runs"][0], rows[0]),
        "recipe": recipe.without_paths().to_yaml(),
        "notes": [hide_folders(note) for note in notes],
        "tuned": "",
        "verdict": "",
        **{key: [] for key in ("comparisons", "advice", "scale")},
    }


def _differences(recipes: Sequence[Recipe]) -> list[dict[str, Any]]:
    """For each recipe, the values in which it differs from others."""
    hidden = {"machine", "seed"}
    values = [dict(flatten(r.model_dump(mode="json", exclude=hidden))) for r in recipes]
    varied = [key for key in values[0] if len({repr(value[key]) for value in values}) > 1]
    return [{key: value[key] for key in varied} for value in values]


def _describe_run(run: Mapping[str, Any], row: RunRow) -> str:
    accuracy = row.value("test_accuracy")
    if run["status"] != "finished" or accuracy is None:
        return f"The run is {run['status']}: {run['note'] or 'it was not tested'}."
    epochs = row.about.get("epoch") or 0
    return f"Test accuracy {accuracy:.2f}% after {epochs:g} epochs at alpha {run['alpha']:g}."
