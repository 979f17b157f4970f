"""Runs a study and shows its results; the same for a table of runs."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from powergrad.lab.cli.study_options import StudyOptions, TableOptions
from powergrad.lab.environment import describe_machine
from powergrad.lab.preflight import say
from powergrad.lab.report import write_report
from powergrad.lab.runs import JobError
from powergrad.lab.stats import LEAST
from powergrad.lab.study import Execution, Results, Study, load, run_study
from powergrad.lab.study.decompose import explain_decomposition
from powergrad.lab.study.execute import tune_once
from powergrad.lab.study.saving import FILE, claim, compare_rows
from powergrad.lab.study.tables import parse_columns
from powergrad.lab.study.tuning import Tuner
from powergrad.lab.terminal import show_results, show_runs
from powergrad.lab.trainer.recipe import RecipeError
from powergrad.lab.trainer.run_folder import RunError


def tune_and_run(
    study: Study, tuner: Tuner | None, folder: Path, execution: Execution, **records: Any
) -> Results:
    """Run a comparison (tuned once, tuned in every repeat, or not tuned), and report it."""
    if tuner is not None:
        tuner = replace(tuner, study=claim(study, folder))
        study = tuner.study
        if not study.finals:
            study, results = tune_once(tuner, execution)
            show_tuning(results)
            records |= {"tuning": results.tuning, "trials": results.trials}
            tuner = None
    return run_and_report(study, folder, execution, tuner=tuner, **records)


def run_and_report(
    study: Study, folder: Path, execution: Execution, *, tuner: Tuner | None = None, **records: Any
) -> Results:
    """Run a study, save it and write its page after every look, and print its verdict."""

    def write_page(results: Results) -> None:
        if results.comparable() is results:
            write_report([results], folder / "report.html")

    execution = replace(execution, seen=write_page)
    results = run_study(study, folder, execution, tuner=tuner, **records)
    compared = results.comparable()
    found = [c for c in compared.comparisons if c.by == "failures" or c.n] if compared else []
    if not found and all(map(results.has_ended, results.rows)):  # one arm, or one run each
        show_tuning(results)
        show_runs(results)
        if failed := next(filter(None, map(results.why_failed, results.rows)), ""):
            reason = failed.splitlines()[0]
            raise JobError(f"Nothing can be compared, because runs failed: {reason}")
        return results
    if results.has_repeats:
        show_tuning(results)
    show(results, folder, ", study.png and the runs")
    if results.identity is not None:
        print(explain_decomposition(results, results.identity.alpha))
    return results


def show(results: Results, folder: Path, others: str = " and study.png") -> None:
    """Save the results, draw them, write their page, and print them."""
    from powergrad.lab.compare_function import Compared  # slow to import, because it draws

    page = Compared(results).save(folder)
    show_results(results)
    print(f"\nThe page is {page}; study.csv, study.json{others} are in the same folder.")


def show_tuning(results: Results) -> None:
    """Print the chosen values of each arm."""
    if results.tuning is not None:
        for arm in results.tuning.arms:
            print(results.tuning.describe(arm))


# A table of runs ----------------------------------------------------------------------------------


def compare_table(table: TableOptions, options: StudyOptions) -> Results:
    """Compare the runs of a table, with the same files, figure, page and output as a study."""
    path = table.from_
    assert path is not None
    folder = options.out / (options.name or path.stem)
    earlier = _earlier_table(folder)
    wanted = {"metric": options.metric, "margin": options.usual_margin, "better": table.better}
    given: dict[str, Any] = {**wanted, "baseline": table.baseline, "question": options.question()}
    results = compare_rows(path, columns=parse_columns(table.columns), **given)
    assert results.source is not None
    if earlier is not None and earlier.source is not None:
        if earlier.source.digest != results.source.digest:
            say(f"{path} has changed since {folder} was written; the folder is rewritten.")
        before, now = ({(row.arm, row.seed) for row in r.rows} for r in (earlier, results))
        if earlier.metric.name == results.metric.name and before <= now:
            looks = {*earlier.source.earlier, earlier.size} - {results.size}
            looks = tuple(sorted(size for size in looks if size >= LEAST))
            source = results.source.model_copy(update={"earlier": looks})
            results = replace(results, source=source)
    results = replace(results, folder=folder, environment=describe_machine())
    show(results, folder)
    return results


def _earlier_table(folder: Path) -> Results | None:
    """The results of an earlier start in `folder`, if any; other files are not overwritten."""
    written = (FILE, "config.yaml", "study.csv", "study.png", "report.html")
    there = [file for file in written if (folder / file).exists()]
    if not there:
        return None
    earlier = None
    with contextlib.suppress(RunError):
        earlier = load(folder) if there[0] == FILE else None
    if earlier is None or earlier.source is None:
        wanted = f"Expected {str(folder)!r} to be unused or to hold the results of a table"
        got = f"another {there[0]} in it; choose another --name or --out"
        raise RecipeError(f"{wanted}, but got {got}.")
    return earlier
