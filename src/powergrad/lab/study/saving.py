"""The files of a study: study.json is the study, study.csv its rows for people.

study.json     the definition, all rows, and what follows from them: verdict, notes, comparisons
study.csv      one row per run, including the tuning: arm, seed, final metrics
progress.json  the state of every run while the study runs
<run>/         one folder per run (see `powergrad.lab.trainer.run_folder`)
tuning/        the runs of the tuning
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import stdev
from typing import Any

from pydantic import TypeAdapter, ValidationError

from powergrad.lab.environment import describe_machine
from powergrad.lab.files import csv_text, json_safe, write_json, write_text
from powergrad.lab.runs import Job, Program
from powergrad.lab.stats import least_runs
from powergrad.lab.study.definition import Study
from powergrad.lab.study.metrics import COLUMNS, METRICS, Metric, guess_metric, metric_names
from powergrad.lab.study.notes import advice, notes, verdict
from powergrad.lab.study.records import USUAL, Question, RunRow
from powergrad.lab.study.results import Results, usual_baseline
from powergrad.lab.study.tables import read_table
from powergrad.lab.trainer.recipe import RecipeError
from powergrad.lab.trainer.run_folder import Result, Run, RunError
from powergrad.lab.words import portable

FORMAT = 4
FILE = "study.json"

_adapter = TypeAdapter(Results)


def save(results: Results, folder: Path, *, is_partial: bool = False) -> None:
    """Write both files; while runs are executed, without what follows from the rows."""
    write_text(folder / "study.csv", to_csv(results))
    write_json(folder / FILE, to_json(results, is_partial=is_partial))


def to_json(results: Results, *, is_partial: bool = False) -> dict[str, Any]:
    """The content of study.json; paths are shortened to names, because the file is shared."""
    study = results.study
    if study is not None:
        study = replace(study, program=study.program.public())
    environment = dict(results.environment or describe_machine())
    environment["command"] = portable(environment.get("command") or "")
    stored = replace(results, study=study, environment=environment, folder=None)
    compared = None if is_partial else results.comparable()
    values = _adapter.dump_python(stored, mode="json")
    for name in ("rows", "trials", "repeated"):
        values[name] = [_without_empty(row) for row in values[name]]
    kept = {**_without_empty(values), "rows": values["rows"]}
    return json_safe({"format": FORMAT, **(conclude(compared) if compared else {}), **kept})


def _without_empty(values: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in values.items() if value is not False}
    return {name: value for name, value in kept.items() if value not in (None, "", {}, [])}


def conclude(compared: Results) -> dict[str, Any]:
    """What follows from the rows: verdict, notes, advice and comparisons."""
    return {
        "verdict": verdict(compared),
        "notes": notes(compared),
        "advice": advice(compared),
        "comparisons": [comparison.to_dict() for comparison in compared.comparisons],
    }


def summarise(results: Results) -> dict[str, Any]:
    """The object that ``--json`` prints; docs/programs.md describes it."""
    metric, compared, arms = results.metric, results.comparable(), []
    for arm in results.arms:
        rows, units = results.of_arm(arm), list(results.units(arm).values())
        failed = [row for row in rows if results.why_failed(row)]
        lost = sum(row.is_lost(metric.name) for row in rows if row not in failed)
        counts = {"n": len(units), "failed": len(failed), "diverged": lost}
        spread = {"mean": results.mean(arm), "sd": stdev(units) if len(units) > 1 else None}
        arms.append({"arm": arm, **counts, **spread})
    measure = {"metric": metric.name, "unit": metric.unit, "better": metric.better}
    measure |= {"margin": results.margin, "baseline": results.baseline}
    concluded = conclude(compared) if compared else {"verdict": None, "comparisons": []}
    command = (results.environment or describe_machine()).get("command")
    names = (FILE, "study.csv", "study.png", "report.html") if results.folder else ()
    paths = {name: results.folder / name for name in names if results.folder}
    files = {name: str(path) for name, path in paths.items() if path.exists()}
    whole = {"format": 1, **measure, "arms": arms, **concluded, "command": command, "files": files}
    return json_safe(whole)


def to_csv(results: Results) -> str:
    """A CSV with one row per run; the runs of the tuning have the phase ``tuning``."""
    keys = list(results.tuning.keys) if results.trials and results.tuning else []
    finished = [row for row in results.rows if not row.failed]
    lines = [{**row.flat(), **_tuned(results, row, keys), "phase": "final"} for row in finished]
    lines += [{**row.flat(), "phase": "tuning"} for row in results.trials]
    left_out = results.source.left_out if results.source else ()
    lines += [{"arm": run.arm, "seed": run.seed} for run in left_out]
    about = ["arm", "seed", "run", "repeat", "commit", "phase", *keys]
    hidden = {"optimizers", "first_loss"} | (set() if results.trials else {"phase"})
    named = metric_names(lines, results.metric.name)
    if results.study is not None and not results.study.program.is_foreign:
        named = [name for name in named if name in (results.metric.name, *COLUMNS)]
    columns = dict.fromkeys([*about, *named])
    there = {name for line in lines for name in line} - hidden
    return csv_text([name for name in columns if name in there], lines)


def _tuned(results: Results, row: RunRow, keys: Sequence[str]) -> dict[str, Any]:
    """The values of the tuned keys in a run."""
    repeats = results.tuning.repeats if results.tuning else ()
    repeat = row.unit if row.unit is not None else 0
    choice = repeats[repeat].get(row.arm) if keys and repeat < len(repeats) else None
    changes = choice.winner.changes if choice else {}
    return {key: changes[key] for key in keys if key in changes}


def load(path: Path, metric: str | None = None) -> Results:
    """The results in the folder of a study, in a study.json, or in a CSV."""
    if path.is_dir() and (path / FILE).is_file():
        results = replace(_from_json(path / FILE), folder=path)
        return replace(results, rows=[row for row in results.rows if _is_kept(row, path)])
    if path.suffix == ".json":
        return _from_json(path)
    table = read_table(path / "study.csv" if path.is_dir() else path, metric)
    name = table.metric
    known = METRICS.get(name) or Metric(name=name, higher_is_better=True, unit=name, margin=0.5)
    return Results(known, known.margin, usual_baseline(r.arm for r in table.rows), table.rows)


def compare_rows(
    path: Path,
    *,
    metric: str | None = None,
    columns: Mapping[str, str] | None = None,
    baseline: str | None = None,
    margin: float | None = None,
    better: str | None = None,
    question: Question = USUAL,
) -> Results:
    """The results of runs made elsewhere, from a table with one line per run."""
    table = read_table(path, metric, columns=columns)
    values = [value for row in table.rows if (value := row.value(table.metric)) is not None]
    chosen = guess_metric(table.metric, values, margin=margin, better=better)
    arm = baseline or usual_baseline(row.arm for row in table.rows)
    source = table.source.model_copy(update={"question": question})
    results = Results(chosen, chosen.margin, arm, table.rows, source=source)
    _ = results.comparisons  # raises if there is nothing to compare
    return results


def load_study(folder: Path) -> Results:
    """The results in the folder of a study, with the runs that finished after it was saved."""
    if not (folder / FILE).is_file():
        raise RunError(
            f"Expected {str(folder)!r} to be the folder of a study, but got no {FILE} in it."
        )
    results = load(folder)
    if results.study is None:
        return results
    study, rows = results.study, list(results.rows)
    known = {(row.arm, row.seed) for row in rows}
    for job in planned_jobs(study).values():
        with contextlib.suppress(RunError, ValueError):  # the page lists unreadable runs
            is_known = (job.arm, job.seed) in known
            if not is_known and (result := job.result(folder)) is not None:
                rows.append(study.row(job, result, folder))
    return replace(results, rows=rows)


def planned_jobs(study: Study) -> dict[tuple[str, int], Job]:
    """The runs of a study; those of repeats are not known before they are tuned."""
    return {} if study.finals or study.kind == "tune" else study.jobs()


def _is_kept(row: RunRow, folder: Path) -> bool:
    """Whether a row is still valid: its folder exists, unless it never was here."""
    if not row.run or row.is_elsewhere or row.failed:
        return True
    with contextlib.suppress(RunError):  # the page lists unreadable runs
        return Run(folder / row.run).result() is not None
    return False


def _from_json(path: Path) -> Results:
    try:
        values = json.loads(path.read_bytes())
        written = values.pop("format", 0)
        if written != FORMAT:
            version = "a newer" if written > FORMAT else "an earlier"
            raise ValueError(f"format {written}, of {version} version of powergrad")
        for name in ("verdict", "notes", "advice", "comparisons"):  # they follow from the rows
            values.pop(name, None)
        return _adapter.validate_python(values)
    except (OSError, ValidationError, AttributeError, TypeError, ValueError) as error:
        raise RunError(f"Expected {str(path)!r} to hold a study, but got: {error}") from None


def claim(study: Study, folder: Path) -> Study:
    """Write the definition of a study to `folder`, or continue the study in it."""
    earlier = check_folder(study, folder)
    results = Results.of(study) if earlier is None else _continue_study(study, earlier, folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / FILE, to_json(results, is_partial=True))
    return results.study or study


def check_folder(study: Study, folder: Path) -> tuple[Results, Study, Program] | None:
    """An earlier start: its results and study, and the program with all arms; else RecipeError."""
    if not (folder / FILE).exists():
        return None
    results = load(folder)
    earlier = results.study
    if earlier is None:
        raise RecipeError(f"Expected {str(folder / FILE)!r} to hold runs, but got a table.")
    pairs = {"pairs": earlier.question.pairs}  # the rule of the first start
    study = replace(study, question=study.question.model_copy(update=pairs))
    before, now = (
        (s.kind, s.tuned, s.finals, s.question, s.program.public().key) for s in (earlier, study)
    )
    if before != now or (earlier.tuning and earlier.tuning != json_safe(study.tuning)):
        raise RecipeError(
            f"Expected {str(folder)!r} to hold this study, but got one of another program, metric "
            "pattern or tuning, or another --target, --and or --sigma; choose another --name."
        )
    for arm, changes in study.arms.items():
        if arm in earlier.arms and earlier.arms[arm] != json_safe(changes):
            raise RecipeError(
                f"Expected the arm {arm!r} of {str(folder)!r} to change {dict(changes)}, but "
                f"got {dict(earlier.arms[arm])}; choose another --name."
            )
    return results, earlier, study.program.with_arms({**earlier.arms, **study.arms})


def _continue_study(study: Study, started: tuple[Results, Study, Program], folder: Path) -> Results:
    results, earlier, program = started
    looked, design = set(earlier.earlier), study.design
    if changed := program.changed_since(earlier.program):
        for name in (FILE, "study.csv"):
            path, digest = folder / name, earlier.program.fingerprint.partition(":")[2][:8]
            if path.exists():
                path.rename(path.with_stem(f"study-{digest}"))
        print(f"Earlier runs in {folder} are not used: {changed}.", file=sys.stderr)
        looked, results = set(), Results.of(study)
    elif earlier.design.last == design.last:  # keep earlier looks, such as at a time limit
        design = replace(design, looks=tuple(sorted({*earlier.design.looks, *design.looks})))
    elif results.size >= max(earlier.design.looks[0], least_runs(study.question.noise)):
        looked.add(earlier.design.last)  # a verdict was shown
    merged = replace(
        study,
        program=program,
        design=design,
        arms={**earlier.arms, **study.arms},
        chosen={**earlier.chosen, **study.chosen},
        earlier=tuple(sorted(looked - {study.design.last})),
    )
    return replace(results, study=merged, metric=merged.metric, margin=merged.margin)


def reuse_anyway(study: Study, folder: Path) -> tuple[dict[str, Result], list[str]]:
    """Finished runs in `folder`, by the names that they have with the current code; a remark."""
    if (started := check_folder(study, folder)) is None:
        return {}, []
    _, earlier, program = started
    changed, known, rows = program.changed_since(earlier.program), {}, []
    results, now = load_study(folder), replace(earlier, program=program)
    for row in (row for row in results.rows if not row.failed):
        name = now.job(row.arm, row.seed).name
        if name != row.run:
            about = {**row.about, "old_code": changed or "the code has changed"}
            new = {"run": name, "about": about, "is_elsewhere": True}
            row = row.model_copy(update=new)
        known[name] = row.result
        rows.append(row)
    write_json(folder / FILE, to_json(replace(results, rows=rows, study=now), is_partial=True))
    reasons = [str(row.about["old_code"]) for row in rows if "old_code" in row.about]
    why = "; ".join(dict.fromkeys(reasons))
    remark = f"{len(reasons)} runs of earlier code are reused (--reuse-anyway): {why}."
    return known, [remark] if reasons else []
