"""Executes a study: the runs of each look, until all arms are settled or the last look is made."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from powergrad.lab.environment import describe_machine
from powergrad.lab.runs import Job, JobError
from powergrad.lab.runs.pool import Pool, RunsFailed, Snapshot
from powergrad.lab.signals import Interrupted
from powergrad.lab.stats import least_runs
from powergrad.lab.study.definition import Study
from powergrad.lab.study.records import RunRow
from powergrad.lab.study.results import Results
from powergrad.lab.study.saving import claim, save
from powergrad.lab.study.tables import read_rows
from powergrad.lab.study.tuning import Tuner
from powergrad.lab.trainer.run_folder import Result
from powergrad.lab.words import short_key, shorten

EVERY = 3.0  # seconds between two versions of study.json while runs are executed

# Creates the progress display of some jobs from a title, the jobs by arm and seed, and the metric.
Watching = Callable[
    [str, Mapping[tuple[str, int], Job], str], AbstractContextManager[Callable[[Snapshot], None]]
]


@dataclass(frozen=True)
class Execution:
    """Where a study is executed, and who sees its progress."""

    pool: Pool
    watching: Watching
    seen: Callable[[Results], None] = lambda results: None  # called after every look and repeat

    def run(
        self,
        title: str,
        jobs: Mapping[tuple[str, int], Job],
        study: Study,
        metric: str,
        keep: Callable[[Mapping[str, Result]], None] = lambda results: None,
    ) -> dict[str, Result]:
        """Execute some runs; return their results by name, with the reason of those that failed."""
        kept_at, kept = time.monotonic(), 0
        try:
            with self.watching(title, jobs, metric) as watch:

                def show(snapshot: Snapshot) -> None:
                    nonlocal kept_at, kept
                    watch(snapshot)
                    is_new = len(snapshot.results) > kept
                    if is_new and time.monotonic() - kept_at > EVERY:
                        kept_at, kept = time.monotonic(), len(snapshot.results)
                        keep(snapshot.results)

                return self.pool.run(list(jobs.values()), show)
        except RunsFailed as error:
            if not study.program.is_foreign:
                raise
            failed = {n: Result(metrics={}, about={"failed": r}) for n, r in error.failed.items()}
            return {**error.results, **failed}


def known_runs(path: Path | None) -> dict[str, Result]:
    """The results of the runs in a study.csv of an earlier start, by name."""
    return {row.run: row.result for row in (read_rows(path) if path else []) if row.run}


def run_study(
    study: Study, folder: Path, execution: Execution, *, tuner: Tuner | None = None, **records: Any
) -> Results:
    """Execute the missing runs of a study in `folder`."""
    study = claim(study, folder)
    if tuner is not None:
        tuner = replace(tuner, study=study)  # includes the arms of an earlier start
    results = Results.of(study, folder=folder, environment=describe_machine(), **records)
    done = 0
    for look in study.design.looks:
        steps = range(done, look) if tuner else [look - 1]
        if study.program.is_foreign and not done:
            steps = sorted({0, *steps})  # the first seed alone, to detect failures early
        for last in steps:
            if tuner is not None:
                arms = {arm: study.arms[arm] for arm in results.unfinished_arms()}
                still = replace(tuner, study=replace(study, arms=arms))
                results = _tune_repeat(still, last, results, execution)
            results = _run_units(results, study, range(done, last + 1), execution)
            done = last + 1
            if all(map(results.why_failed, results.rows)):
                raise JobError(f"every run failed. {results.why_failed(results.rows[0])}")
            counts = {arm: len(results.of_arm(arm)) for arm in results.unfinished_arms()}
            lacking = {arm: done - count // (study.finals or 1) for arm, count in counts.items()}
            if missing := {arm: count for arm, count in lacking.items() if count > 0}:
                return _cut_short(results, study, missing)
            save(results, folder)
            if not study.program.is_foreign or done >= study.design.looks[0]:
                execution.seen(results)
        so_far = results.comparable()
        if so_far and not any(c.is_open for c in so_far.comparisons):
            break
    return results


def _run_units(results: Results, study: Study, units: range, execution: Execution) -> Results:
    """The results with the runs of additional units, for the arms that are still open."""
    jobs: dict[tuple[str, int], Job] = {}
    arms, tuning = results.unfinished_arms(), results.tuning
    for seed in study.seeds_of(units):
        for arm in arms:
            chosen = {}
            if tuning is not None and tuning.is_unit:
                chosen = tuning.repeats[study.unit_of(seed)][arm].winner.changes
            jobs[arm, seed] = study.job(arm, seed, chosen)
    title = shorten(study.program.title)
    if not study.design.is_fixed or study.finals:
        what = "repeats" if study.finals else "seeds"
        title += f", {what} up to {units.stop} of at most {study.design.last}"

    rows: dict[str, RunRow] = {}

    def with_rows(done: Mapping[str, Result]) -> Results:
        for job in jobs.values():
            if job.name in done and job.name not in rows:
                rows[job.name] = study.row(job, done[job.name], execution.pool.folder)
        added = [rows[job.name] for job in jobs.values() if job.name in rows]
        return replace(results, rows=[*results.rows, *added])

    def keep(done: Mapping[str, Result]) -> None:
        save(with_rows(done), execution.pool.folder, is_partial=True)

    return with_rows(execution.run(title, jobs, study, study.metric.name, keep))


def _cut_short(results: Results, study: Study, missing: Mapping[str, int]) -> Results:
    """The results of a study whose time ran out before a look was complete.

    The runs that every open arm has are tested in one additional look. Its time does not depend on
    the results, and the error is spent in proportion to the runs (Lan and DeMets), so later looks
    remain valid if the study is continued.
    """
    assert results.folder is not None
    what = "repeats" if study.finals else "seeds"
    listed = ", ".join(
        f"{count} {what[:-1] if count == 1 else what} of {arm}" for arm, count in missing.items()
    )
    least, looks = min(len(results.units(a)) for a in results.unfinished_arms()), study.design.looks
    if least >= least_runs(study.question.noise) and least not in looks:
        design = replace(study.design, looks=tuple(sorted({*looks, least})))
        study = claim(replace(study, design=design), results.folder)
    remark = (
        f"The time ran out before all runs were finished: {listed} could not be run. The verdict "
        "uses the finished runs; the same command continues the study."
    )
    return replace(results, study=study, remarks=[*results.remarks, remark])


# Tuning -------------------------------------------------------------------------------------------


def _tune_repeat(tuner: Tuner, repeat: int, results: Results, execution: Execution) -> Results:
    """The results with one more tuning: its trials and its choices."""
    study, jobs = tuner.study, tuner.jobs(repeat)
    shown = {(arm, 1000 * place + seed): job for (arm, place, seed), job in jobs.items()}
    title = f"tuning {', '.join(map(short_key, tuner.space.keys))}"
    title += f", repeat {repeat + 1} of at most {study.design.last}" if study.finals else ""
    done = execution.run(title, shown, study, tuner.judging.name)
    if len(done) < len(jobs):
        raise Interrupted(f"the time ran out with {len(done)} of {len(jobs)} tuning runs finished")
    finished, rows = {}, []
    for (arm, place, seed), job in jobs.items():
        row = study.row(job, done[job.name], execution.pool.folder)
        if not row.failed:  # `choose` reports failed runs
            point = tuner.changes(arm, tuner.space.points(arm, repeat)[place])
            unit = {"unit": repeat} if study.finals else {}
            rows.append(row.model_copy(update={"settings": point, **unit}))
            finished[arm, place, seed] = done[job.name]
    earlier = results.tuning.repeats if results.tuning else ()
    tuning = tuner.record([*earlier, tuner.choose(repeat, finished)])
    return replace(results, tuning=tuning, trials=[*results.trials, *rows])


def tune_once(tuner: Tuner, execution: Execution) -> tuple[Study, Results]:
    """Tune every arm once; return the study with the choices, and results with the tuning only."""
    results = _tune_repeat(tuner, 0, Results.of(tuner.study), execution)
    assert results.tuning is not None
    chosen = {arm: dict(choice.winner.changes) for arm, choice in results.tuning.arms.items()}
    return replace(tuner.study, chosen=chosen), results


# The first run of a user's program ----------------------------------------------------------------


def run_first(study: Study, tuner: Tuner | None, execution: Execution) -> list[RunRow]:
    """Execute the first run of the baseline twice; if arms are tuned, its first trial."""
    first = study.baseline, study.first_seed
    job = next(iter(tuner.jobs(0).values())) if tuner else study.job(*first)
    jobs = {(study.baseline, 0): job, (study.baseline, 1): job.within("again")}
    done = execution.run("the first run, twice", jobs, study, study.metric.name)
    rows = [study.row(job, done[job.name], execution.pool.folder) for job in jobs.values()]
    if all(row.failed for row in rows):
        raise JobError(f"the first run failed: {rows[0].failed}")
    return [row for row in rows if not row.failed]
