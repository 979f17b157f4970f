"""Executes a study: the runs of each look, until all arms are settled or the last look is made."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from powergrad.lab.environment import describe_machine
from powergrad.lab.jobs import Job, JobError, RunsFailed
from powergrad.lab.jobs.queue import JobQueue, Snapshot
from powergrad.lab.signals import Interrupted
from powergrad.lab.stats import LEAST
from powergrad.lab.study.definition import Study
from powergrad.lab.study.records import RunRow
from powergrad.lab.study.results import Results, judged
from powergrad.lab.study.tables import read_rows
from powergrad.lab.study.tuning import Tuner
from powergrad.lab.trainer.run_folder import Run
from powergrad.lab.words import short_key

# Creates the progress display of some jobs from a title, the jobs by arm and seed, and the metric.
Watching = Callable[
    [str, Mapping[tuple[str, int], Job], str], AbstractContextManager[Callable[[Snapshot], None]]
]


@dataclass(frozen=True)
class Execution:
    """Options for the execution of a study.

    Attributes:
        workers: The number of runs at a time on this machine.
        storage: See :class:`powergrad.lab.jobs.queue.JobQueue`.
        known: A study.csv of an earlier start, whose runs are not repeated.
        watching: Creates the progress display.
        saved: Called with the results after every look, and after every repeat.
        deadline: The time at which to finish, as of `time.monotonic`; see :class:`JobQueue`.
        run_seconds: The estimated time of a run, if known before one is finished.
        environments: See :class:`powergrad.lab.jobs.queue.JobQueue`.
        opened: An open queue to use instead of a new one; it stays open.
    """

    workers: int
    watching: Watching
    storage: str | None = None
    known: Path | None = None
    saved: Callable[[Results], None] = lambda results: None
    deadline: float = math.inf
    run_seconds: float = 0.0
    environments: Sequence[Mapping[str, str]] = ()
    opened: JobQueue | None = None

    def queue(self, folder: Path, study: Study) -> AbstractContextManager[JobQueue]:
        """The queue of the runs of a study in `folder`."""
        if self.opened is not None:
            return nullcontext(self.opened)
        return JobQueue(
            folder,
            study=queue_name(folder, study),
            workers=self.workers,
            storage=self.storage,
            known=self.known_runs,
            deadline=self.deadline,
            run_seconds=self.run_seconds,
            environments=self.environments,
        )

    @property
    def known_runs(self) -> dict[str, Mapping[str, Any]]:
        """The final metrics of the known runs, by name."""
        if self.known is None:
            return {}
        _, rows = read_rows(self.known, all_phases=True)
        return {row.run: {**row.metrics, "commit": row.commit} for row in rows if row.run}


def queue_name(folder: Path, study: Study) -> str:
    """The name of a study in a storage, unique even if several studies have the same name."""
    return f"{folder.name}-{study.name}"


def run_study(
    study: Study, folder: Path, execution: Execution, *, tuner: Tuner | None = None, **records: Any
) -> Results:
    """Execute the missing runs of a study in `folder`."""
    study = study.claim(folder)
    if tuner is not None:
        tuner = replace(tuner, study=study)  # includes the arms of an earlier start
    environment = describe_machine()
    results = Results(
        study.metric,
        study.margin,
        study.baseline,
        [],
        study,
        folder,
        environment=environment,
        **records,
    )
    with execution.queue(folder, study) as queue:
        done = 0
        for look in study.design.looks:
            steps = range(done, look) if tuner else [look - 1]
            if study.program.is_foreign and not done:
                steps = sorted({0, *steps})  # the first seed alone, to detect failures early
            for last in steps:
                if tuner is not None:
                    arms = {arm: study.arms[arm] for arm in _open_arms(results)}
                    still = replace(tuner, study=replace(study, arms=arms))
                    results = _tune_repeat(still, last, results, queue, execution)
                results = _run_units(results, range(done, last + 1), queue, execution)
                done = last + 1
                if all(row.failed for row in results.rows):
                    raise JobError(f"every run failed. {results.rows[0].failed}")
                if missing := _missing(results, done):
                    return _cut_short(results, missing)
                if not study.program.is_foreign or done >= study.design.looks[0]:
                    execution.saved(results)
            so_far = results.comparable()
            if so_far is not None and (so_far.is_settled or _is_constant(results)):
                break
    return results


def _run_units(results: Results, units: range, queue: JobQueue, execution: Execution) -> Results:
    """The results with the runs of additional units, for the arms that are still open."""
    study = results.study
    assert study is not None
    jobs: dict[tuple[str, int], Job] = {}
    arms = _open_arms(results)
    for seed in study.seeds_of(units):
        for arm in arms:
            chosen = _chosen(results, arm, study.unit_of(seed))
            jobs[arm, seed] = study.program.job(arm, {**study.settings(arm), **chosen}, seed)
    title = study.program.title
    if not study.design.is_fixed or study.finals:
        what = "repeats" if study.finals else "seeds"
        title += f", {what} up to {units.stop} of at most {study.design.last}"
    finished, failed = _do(title, jobs, study.metric.name, study, queue, execution)
    rows = []
    for (arm, seed), job in jobs.items():
        unit = study.unit_of(seed) if study.finals else None
        if job.name in failed:
            rows.append(RunRow(arm, seed, {"failed": failed[job.name]}, job.name, unit=unit))
        elif job.name in finished:  # otherwise there was no time left
            metrics = judged(finished[job.name], study)
            rows.append(_row(arm, seed, job, metrics, queue, unit))
    return replace(results, rows=[*results.rows, *rows])


def _missing(results: Results, units: int) -> dict[str, int]:
    """The number of units that each open arm lacks of `units`, if any."""
    finals = results.study.finals if results.study else 0
    counts = {arm: len(results.of_arm(arm)) // (finals or 1) for arm in _open_arms(results)}
    return {arm: units - count for arm, count in counts.items() if count < units}


def _cut_short(results: Results, missing: Mapping[str, int]) -> Results:
    """The results of a study whose time ran out before a look was complete.

    The runs that every open arm has are tested in one additional look. Its time does not depend on
    the results, and the error is spent in proportion to the runs (Lan and DeMets), so later looks
    remain valid if the study is continued.
    """
    study = results.study
    assert study is not None
    assert results.folder is not None
    what = "repeats" if study.finals else "seeds"
    listed = ", ".join(
        f"{count} {what[:-1] if count == 1 else what} of {arm}" for arm, count in missing.items()
    )
    least = min(len(results.units(arm)) for arm in _open_arms(results))
    looks = study.design.looks
    if least >= LEAST and least not in looks:
        design = replace(study.design, looks=tuple(sorted({*looks, least})))
        study = replace(study, design=design).claim(results.folder)
    remark = (
        f"The time ran out before all runs were finished: {listed} could not be run. The verdict "
        "uses the finished runs; the same command continues the study."
    )
    return replace(results, study=study, remarks=[*results.remarks, remark])


def _do(
    title: str,
    jobs: Mapping[tuple[str, int], Job],
    metric: str,
    study: Study,
    queue: JobQueue,
    execution: Execution,
) -> tuple[Mapping[str, Mapping[str, Any]], Mapping[str, str]]:
    """The final metrics of the finished runs, and the reasons of the failed ones, by name."""
    try:
        with execution.watching(title, jobs, metric) as watch:
            return queue.run(list(jobs.values()), watch), {}
    except RunsFailed as error:
        if not study.program.is_foreign:
            raise
        return error.results, error.failed


def _is_constant(results: Results) -> bool:
    """Whether a user's program gives the same number for all seeds of an arm."""
    assert results.study is not None
    values = [set(results.values(arm).values()) for arm in results.arms]
    return results.study.program.is_foreign and all(len(distinct) <= 1 for distinct in values)


def _open_arms(results: Results) -> list[str]:
    """The baseline, and the arms that are not settled yet."""
    assert results.study is not None
    so_far = results.comparable()
    settled = {c.arm for c in so_far.comparisons if not c.is_open} if so_far else set()
    for arm in results.arms if so_far else ():
        if all(row.failed for row in results.of_arm(arm)):
            settled.add(arm)
    return [arm for arm in results.study.arms if arm not in settled]


def _chosen(results: Results, arm: str, unit: int) -> Mapping[str, Any]:
    """The tuned values of an arm in a repeat."""
    if results.tuning is None or not results.tuning.is_unit:
        return {}
    return results.tuning.repeats[unit][arm].winner.changes


def _row(
    arm: str, seed: int, job: Job, metrics: Mapping[str, Any], queue: JobQueue, unit: int | None
) -> RunRow:
    """The row of a finished run; its commit is in its folder or among its metrics."""
    values = dict(metrics)
    commit = str(values.pop("commit", ""))
    is_here = (queue.folder / job.name).is_dir()
    if is_here:
        commit = str(Run(queue.folder / job.name).environment().get("commit") or "")
    return RunRow(arm, seed, values, job.name, commit, unit, is_elsewhere=not is_here)


# Tuning -------------------------------------------------------------------------------------------


def _tune_repeat(
    tuner: Tuner, repeat: int, results: Results, queue: JobQueue, execution: Execution
) -> Results:
    """The results with one more tuning: its trials and its choices."""
    study = tuner.study
    jobs = tuner.jobs(repeat)
    shown = {(arm, 1000 * place + seed): job for (arm, place, seed), job in jobs.items()}
    title = f"tuning {', '.join(map(short_key, tuner.space.keys))}"
    title += f", repeat {repeat + 1} of at most {study.design.last}" if study.finals else ""
    finished, failed = _do(title, shown, tuner.judging.name, study, queue, execution)
    if len(finished) + len(failed) < len(jobs):
        raise Interrupted(
            f"the time ran out with {len(finished)} of {len(jobs)} tuning runs finished"
        )
    rows = []
    for (arm, place, seed), job in jobs.items():
        if job.name in failed:
            continue  # `choose` reports it
        unit = repeat if study.finals else None
        row = _row(arm, seed, job, judged(finished[job.name], study), queue, unit)
        point = tuner.changes(arm, tuner.space.points(arm, repeat)[place])
        rows.append(replace(row, metrics={**row.metrics, **point}))
    by_place = {key: finished[job.name] for key, job in jobs.items() if job.name in finished}
    earlier = results.tuning.repeats if results.tuning else ()
    tuning = tuner.record([*earlier, tuner.choose(repeat, by_place)])
    return replace(results, tuning=tuning, trials=[*results.trials, *rows])


def tune_once(tuner: Tuner, folder: Path, execution: Execution) -> tuple[Study, Results]:
    """Tune every arm once; return the study with the choices, and results with the tuning only."""
    study = tuner.study
    empty = Results(study.metric, study.margin, study.baseline, [], study, folder)
    with execution.queue(folder, study) as queue:
        results = _tune_repeat(tuner, 0, empty, queue, execution)
    assert results.tuning is not None
    chosen = {arm: choice.winner.changes for arm, choice in results.tuning.arms.items()}
    return replace(study, chosen=chosen), results
