"""The first run of a user's program: its metrics, its duration, and whether it is repeatable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powergrad.lab.jobs import JobError, RunsFailed
from powergrad.lab.jobs.sources import RESERVED
from powergrad.lab.study.definition import Study, again
from powergrad.lab.study.execute import Execution
from powergrad.lab.study.metrics import Metric, guess_metric
from powergrad.lab.study.tuning import Tuner
from powergrad.lab.trainer.recipe import RecipeError
from powergrad.lab.words import duration


@dataclass(frozen=True)
class FirstRun:
    """The first run, which is executed twice.

    Attributes:
        repeated: The final metrics of both runs, or of the one that did not fail.
    """

    repeated: Sequence[Mapping[str, Any]]

    @property
    def seconds(self) -> float:
        """The time of a run."""
        return max(float(metrics.get("seconds", 0.0)) for metrics in self.repeated)

    @property
    def optimizers(self) -> list[str]:
        """The classes of the optimizers that ``powergrad run`` has seen."""
        return self.repeated[0].get("optimizers", [])

    def metric(
        self,
        name: str | None,
        *,
        usual: Sequence[str] = (),
        margin: float | None,
        better: str | None,
    ) -> Metric:
        """The metric to compare."""
        names = [
            key
            for key, value in self.repeated[0].items()
            if isinstance(value, (int, float)) and key not in RESERVED
        ]
        candidates = [name] if name else names if len(names) == 1 else list(usual)
        if len(candidates) != 1 or candidates[0] not in names:
            raise RecipeError(
                f"Expected --metric, one of {', '.join(names) or 'none'}, but got "
                f"{name if name else 'none'}."
            )
        values = [float(metrics[candidates[0]]) for metrics in self.repeated]
        return guess_metric(candidates[0], values, margin=margin, better=better)


def run_first(study: Study, tuner: Tuner | None, folder: Path, execution: Execution) -> FirstRun:
    """Execute the first run of the baseline twice; if arms are tuned, its first trial."""
    if tuner is None:
        job = study.program.job(study.baseline, study.settings(study.baseline), study.first_seed)
    else:
        job = next(iter(tuner.jobs(0).values()))
    jobs = {(study.baseline, 0): job, (study.baseline, 1): again(job)}
    metric = study.metric.name
    with execution.queue(folder, study) as queue:
        try:
            with execution.watching("the first run, twice", jobs, metric) as watch:
                done = queue.run(list(jobs.values()), watch)
        except RunsFailed as error:
            if not error.results:
                reason = next(iter(error.failed.values()))
                raise JobError(f"the first run failed: {reason}") from None
            done = error.results
    return FirstRun([done[job.name] for job in jobs.values() if job.name in done])


def announce(study: Study, tuner: Tuner | None, seconds: float, workers: int) -> str:
    """A sentence with the number of runs and their expected time."""
    finals = len(study.arms) * (study.finals or 1)
    fixed, per_unit = 0, finals
    if tuner is not None:
        trials = tuner.seeds * sum(len(tuner.space.points(arm, 0)) for arm in study.arms)
        fixed, per_unit = (0, finals + trials) if study.finals else (trials, finals)
    looks = study.design.looks
    counts = list(dict.fromkeys(fixed + per_unit * units for units in (looks[0], looks[-1])))
    runs = " to ".join(map(str, counts))
    times = " to ".join(duration(seconds * -(-count // workers)) for count in counts)
    return f"{runs} runs, about {times} with {workers} at a time; Ctrl-C stops and saves."
