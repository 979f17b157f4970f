"""The first run of somebody's own program: what it measures, how long it takes, if it repeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powergrad.lab.config import RecipeError
from powergrad.lab.jobs import JobError, RunsFailed
from powergrad.lab.jobs.sources import RESERVED
from powergrad.lab.study.definition import Study, again
from powergrad.lab.study.execute import Execution
from powergrad.lab.study.metrics import Metric, guess_metric
from powergrad.lab.study.tuning import Tuner
from powergrad.lab.words import duration

__all__ = ["FirstRun", "announce", "run_first"]


@dataclass(frozen=True)
class FirstRun:
    """The first run, which is done twice.

    Attributes:
        repeated: The final metrics of both, or of the one that did not fail.
    """

    repeated: Sequence[Mapping[str, Any]]

    @property
    def seconds(self) -> float:
        """How long a run takes."""
        return max(float(metrics.get("seconds", 0.0)) for metrics in self.repeated)

    @property
    def optimizers(self) -> list[str]:
        """The classes of the optimizers, as far as ``powergrad run`` has seen them."""
        return self.repeated[0].get("optimizers", [])

    def metric(
        self,
        name: str | None,
        *,
        usual: Sequence[str] = (),
        margin: float | None,
        better: str | None,
    ) -> Metric:
        """The metric to compare.

        Args:
            name: Its name, if it was given.
            usual: What is compared where no name is given and the run has several metrics.
            margin: See :func:`powergrad.lab.study.metrics.guess_metric`.
            better: The same.

        Raises:
            RecipeError: If there is none of that name, or none was named and there are several.
        """
        found = [
            key
            for key, value in self.repeated[0].items()
            if isinstance(value, (int, float)) and key not in RESERVED
        ]
        candidates = [name] if name else found if len(found) == 1 else list(usual)
        if len(candidates) != 1 or candidates[0] not in found:
            raise RecipeError(
                f"Expected --metric, one of {', '.join(found) or 'none'}, but got "
                f"{name if name else 'none'}."
            )
        values = [float(metrics[candidates[0]]) for metrics in self.repeated]
        return guess_metric(candidates[0], values, margin=margin, better=better)


def run_first(study: Study, tuner: Tuner | None, folder: Path, execution: Execution) -> FirstRun:
    """Do the first run of the baseline twice; where arms are tuned, its first trial.

    Raises:
        JobError: If both fail.
    """
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
    return FirstRun([done[each.name] for each in jobs.values() if each.name in done])


def announce(study: Study, tuner: Tuner | None, seconds: float, workers: int) -> str:
    """How many runs there are, and how long they will take.

    Args:
        study: What is studied.
        tuner: What tunes its arms.
        seconds: How long a run takes.
        workers: Runs at a time.
    """
    finals = len(study.arms) * (study.finals or 1)
    fixed, per_unit = 0, finals
    if tuner is not None:
        trials = tuner.seeds * sum(len(tuner.space.points(arm, 0)) for arm in study.arms)
        fixed, per_unit = (0, finals + trials) if study.finals else (trials, finals)
    looks = study.design.looks
    counts = list(dict.fromkeys(fixed + per_unit * units for units in (looks[0], looks[-1])))
    runs = " to ".join(map(str, counts))
    times = " to ".join(duration(seconds * -(-count // workers)) for count in counts)
    return f"{runs} runs, about {times} with {workers} at a time; Ctrl-C saves."
