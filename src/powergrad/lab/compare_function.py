"""The implementation of :func:`powergrad.compare`, and its return value."""

from __future__ import annotations

import html
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from powergrad.lab.figures import draw_study
from powergrad.lab.preflight import Plan, say
from powergrad.lab.report import write_report
from powergrad.lab.runs import FunctionProgram
from powergrad.lab.runs.devices import default_workers, visible_devices, worker_environments
from powergrad.lab.runs.pool import InlinePool, Pool
from powergrad.lab.signals import Interrupted
from powergrad.lab.stats import Comparison, Design, format_interval, format_signed, parse_runs
from powergrad.lab.study import Execution, Metric, Results, Study, run_study, save
from powergrad.lab.study.execute import run_first
from powergrad.lab.study.metrics import choose_metric
from powergrad.lab.study.notes import notes, verdict
from powergrad.lab.terminal import Watch, describe_results

WORKER = "POWERGRAD_WORKER"  # set in processes that import `train`


@dataclass(frozen=True)
class Compared:
    """The results of a comparison.

    Attributes:
        results: All runs, tests and notes, as the workbench stores them.
    """

    results: Results

    @property
    def verdict(self) -> str:
        """The conclusion, in one sentence."""
        return verdict(self.results)

    @property
    def comparisons(self) -> Sequence[Comparison]:
        """The comparison of each arm with the first: difference, interval, p-value, verdict."""
        return self.results.comparisons

    @override
    def __str__(self) -> str:
        return describe_results(self.results)

    def _repr_html_(self) -> str:
        """The table and the verdict, for notebooks."""
        results = self.results
        heads = ("arm", "runs", results.metric.name, "difference", "95% interval", "verdict")
        lines = ["".join(f"<th>{html.escape(head)}</th>" for head in heads)]
        for arm in results.arms:
            values = list(results.units(arm).values())
            spread = f" ± {statistics.stdev(values):.3g}" if len(values) > 1 else ""
            mean = results.mean(arm)
            cells = [arm, str(len(values)), "-" if math.isnan(mean) else f"{mean:.5g}{spread}"]
            if comparison := results.comparison(arm):
                cells += [
                    format_signed(comparison.difference, 3),
                    format_interval(comparison.interval, 3),
                ]
                cells.append(comparison.verdict)
            else:
                cells += ["", "", ""]
            lines.append("".join(f"<td>{html.escape(cell)}</td>" for cell in cells))
        table = "".join(f"<tr>{line}</tr>" for line in lines)
        texts = [self.verdict, *(c.sentence for c in self.comparisons), *notes(results)]
        paragraphs = "".join(f"<p>{html.escape(text)}</p>" for text in texts)
        return f"<table>{table}</table>{paragraphs}"

    def to_frame(self) -> Any:
        """A pandas DataFrame with one row per run: arm, seed and the final metrics."""
        import pandas as pd  # slow to import

        return pd.DataFrame([row.flat() for row in self.results.rows])

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write study.csv, study.json, study.png and report.html; return the path of the page."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        save(self.results, path)
        draw_study(self.results, path / "study.png", f"{path.name}: {len(self.results.rows)} runs")
        return write_report([self.results], path / "report.html")


def compare_function(
    train: Callable[..., Any],
    arms: Sequence[str] | Mapping[str, Mapping[str, Any]],
    seeds: str,
    *,
    metric: str | None,
    margin: float | None,
    better: str | None,
    workers: int | None,
    threads: int,
    first_seed: int,
    out: str | os.PathLike[str] | None,
    name: str | None,
) -> Compared:
    """See :func:`powergrad.compare`."""
    if os.environ.get(WORKER):
        raise RuntimeError(
            "Expected `powergrad.compare` to be called under `if __name__ == '__main__':`, but got "
            "a call while a worker process imports this script."
        )
    if not callable(train):
        raise TypeError(f"Expected `train` to be a function, but got {type(train).__name__}.")
    if better not in (None, "higher", "lower"):
        raise ValueError(f"Expected `better` to be 'higher' or 'lower', but got {better!r}.")
    for option, value in (("workers", workers), ("threads", threads)):
        if value is not None and value < 1:
            raise ValueError(f"Expected `{option}` to be at least 1, but got {value}.")
    if name is not None and out is None:
        raise ValueError(f"Expected `out` to be given with `name`, but got only {name!r}.")
    program = FunctionProgram.of(train, metric or "metric")
    study = Study(
        "compare",
        program,
        _settings(arms),
        Design(parse_runs(seeds)),
        Metric(name=metric or "metric", higher_is_better=True, unit="", margin=1.0),
        1.0,
        first_seed,
    )
    place = Path(tempfile.mkdtemp(prefix="powergrad-") if out is None else out)
    folder = place / (name or study.name)
    try:
        compared = Compared(_run(study, folder, metric, margin, better, workers, threads))
    except BaseException as error:
        if out is None:
            shutil.rmtree(place, ignore_errors=True)
        if isinstance(error, Interrupted):
            raise KeyboardInterrupt(str(error)) from None
        raise
    if out is None:  # the page can be saved as long as the object exists
        weakref.finalize(compared, shutil.rmtree, place, ignore_errors=True)
    else:
        compared.save(folder)
    return compared


def _settings(arms: Sequence[str] | Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The settings that each arm passes to the function, as plain values."""
    if isinstance(arms, str) or not isinstance(arms, (Sequence, Mapping)):
        raise TypeError(f"Expected `arms` to be a list or a mapping, but got {arms!r}.")
    named = arms if isinstance(arms, Mapping) else {arm: {} for arm in arms}
    if len(arms) < 2 or len(named) < len(arms):
        raise ValueError(f"Expected `arms` to have at least two different names, but got {arms!r}.")
    plain = {}
    for arm, settings in named.items():
        try:
            plain[str(arm)] = json.loads(json.dumps(dict(settings)))
        except (TypeError, ValueError):
            raise TypeError(
                f"Expected plain values (numbers, strings, lists) as settings of {arm!r}, but got "
                f"{settings!r}; `train` also gets the name of the arm and can use that instead."
            ) from None
        for key in ("seed", "arm"):
            if key in plain[str(arm)]:
                raise ValueError(
                    f"Expected the settings of {arm!r} not to contain {key!r}, which `train` gets "
                    "anyway, but got it."
                )
    return plain


def _run(
    study: Study,
    folder: Path,
    metric: str | None,
    margin: float | None,
    better: str | None,
    workers: int | None,
    threads: int,
) -> Results:
    devices = visible_devices()
    count = workers or default_workers(devices, threads)
    environments = [
        {**variables, WORKER: "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        for variables in worker_environments(count, devices, threads)
    ]
    assert isinstance(study.program, FunctionProgram)
    if study.program.function is not None:  # other processes cannot import it
        pool = InlinePool(folder)
    else:
        pool = Pool(folder, workers=count, environments=environments)
    with pool:
        execution = Execution(pool, Watch)
        first = run_first(study, None, execution)
        if metric is None and better is None and "metric" in first[0].metrics:
            raise ValueError(
                "Expected `metric`, the name of the number that `train` returns, such as "
                "'accuracy' or 'loss', but got none; the name shows whether higher is better."
            )
        runs = [row.metrics for row in first]
        chosen = choose_metric(runs, metric, margin=margin, better=better)
        study = replace(study, metric=chosen, margin=chosen.margin)
        seconds = max(run["seconds"] for run in runs)
        say(Plan.of(study, None, pool.workers).announce(seconds))
        return run_study(study, folder, execution, repeated=first)
