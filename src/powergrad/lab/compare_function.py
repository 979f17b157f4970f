"""`powergrad.compare` compares variants of a training that is written as a Python function."""

from __future__ import annotations

import html
import json
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from powergrad.lab.environment import visible_devices, worker_environments
from powergrad.lab.figures import draw_study
from powergrad.lab.preflight import Plan, say
from powergrad.lab.report import write_report
from powergrad.lab.runs import FunctionProgram
from powergrad.lab.runs.pool import InlinePool, Pool
from powergrad.lab.runs.worker import MARK
from powergrad.lab.signals import Interrupted
from powergrad.lab.stats import Comparison, Design, parse_runs
from powergrad.lab.study import Execution, Metric, Results, Study, run_study, save
from powergrad.lab.study.execute import run_first
from powergrad.lab.study.metrics import choose_metric
from powergrad.lab.study.notes import notes, verdict
from powergrad.lab.study.records import USUAL
from powergrad.lab.terminal import Watch, compared_cells, describe_results


@dataclass(frozen=True)
class Compared:
    """The results of a comparison."""

    results: Results  # all runs, tests and notes, as the workbench stores them

    @property
    def verdict(self) -> str:
        """The conclusion, in one sentence."""
        return verdict(self.results)

    @property
    def comparisons(self) -> Sequence[Comparison]:
        """The comparison of each arm with the first: difference, interval, p-value, verdict."""
        return self.results.comparisons

    def __str__(self) -> str:
        return describe_results(self.results)

    def _repr_html_(self) -> str:
        """The table and the verdict, for notebooks."""
        heads, *rows = compared_cells(self.results)
        lines = ["".join(f"<th>{html.escape(head)}</th>" for head in heads)]
        lines += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
        table = "".join(f"<tr>{line}</tr>" for line in lines)
        texts = [self.verdict, *(c.sentence for c in self.comparisons), *notes(self.results)]
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
        page = write_report([self.results], path / "report.html")
        _ = self.comparisons  # raises if a run does not have the metric; the page shows which
        draw_study(self.results, path / "study.png", f"{path.name}: {len(self.results.rows)} runs")
        return page


def compare(
    train: Callable[..., Any],
    arms: Sequence[str] | Mapping[str, Mapping[str, Any]],
    seeds: str | int = "8..24",
    *,
    metric: str | None = None,
    margin: float | None = None,
    better: Literal["higher", "lower"] | None = None,
    workers: int | None = None,
    threads: int = 1,
    first_seed: int = 0,
    out: str | os.PathLike[str] | None = None,
    name: str | None = None,
) -> Compared:
    """Compare the arms (variants) of a training over seeds, with tests and a verdict.

    This needs the workbench: ``pip install 'powergrad[lab]'``. ``train(seed, arm, **settings)`` is
    called once per arm and seed: in worker processes if they can import it, otherwise, for example
    in a notebook, in this process. In a script, put the call under ``if __name__ == "__main__":``,
    because the workers import the script.

    Args:
        train: Returns a number, or a mapping with several metrics. A run that raises counts as
            failed; NaN and infinity count as diverged.
        arms: The names of the arms, or a mapping from names to their settings (plain values). All
            others are compared with the first.
        seeds: Runs per arm. ``"8..24"`` tests after 8, 12, 16, 20 and 24 seeds and stops an arm
            once it is better, worse or equivalent; 12 is a fixed number; ``"8,16,24"`` lists the
            seed counts at which to test.
        metric: The name of the returned number, or the metric to compare.
        margin: The largest difference that does not matter to you; by default 0.5 for an accuracy
            in percent.
        better: Whether a higher or a lower metric is better, if its name does not show it.
        workers: The number of runs at a time; by default one per GPU, or what the cores allow.
        threads: The number of threads per worker.
        first_seed: The first seed.
        out: The folder in which the study's folder is created; by default nothing is kept. Calling
            again with the same arguments then runs only what is missing, unless the source of
            `train` has changed; changes in code and files that it uses are not detected.
        name: The name of the study's folder.

    Returns:
        The results. They print as a table with a verdict, display as HTML in notebooks, and have
        ``to_frame()`` for pandas and ``save(folder)`` for the HTML page.

    Raises:
        ImportError: If the workbench is not installed.
        ValueError: If an argument is invalid, or the first run does not return the metric.

    Example:
        >>> def train(seed, arm, bonus=0.0):  # in your code: a training
        ...     return 90 + seed % 3 + bonus
        >>> arms = {"baseline": {}, "other": {"bonus": 4.0}}
        >>> results = compare(train, arms, seeds=8, metric="accuracy")
        >>> results.verdict
        'Here other is better than baseline.'
    """
    if os.environ.get(MARK):  # set in worker processes
        wanted = "Expected `powergrad.compare` to be called under `if __name__ == '__main__':`"
        raise RuntimeError(f"{wanted}, but got a call while a worker process imports this script.")
    if not callable(train):
        raise TypeError(f"Expected `train` to be a function, but got {type(train).__name__}.")
    if better not in (None, "higher", "lower"):
        raise ValueError(f"Expected `better` to be 'higher' or 'lower', but got {better!r}.")
    if name is not None and out is None:
        raise ValueError(f"Expected `out` to be given with `name`, but got only {name!r}.")
    environments = [
        {**variables, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        for variables in worker_environments(workers, threads, visible_devices())
    ]
    program = FunctionProgram.of(train, metric or "metric")
    unknown = Metric(name=metric or "metric", higher_is_better=True, unit="", margin=1.0)
    settings, design = _settings(arms), Design(parse_runs(str(seeds)))
    study = Study("compare", program, settings, design, unknown, unknown.margin, first_seed)
    study = replace(study, question=USUAL)
    place = Path(tempfile.mkdtemp(prefix="powergrad-") if out is None else out)
    folder = place / (name or study.name)
    pool = Pool(folder, workers=len(environments), environments=environments)
    if program.function is not None:  # other processes cannot import it
        pool = InlinePool(folder)
    try:
        compared = Compared(_run(study, folder, pool, metric, margin=margin, better=better))
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
        if clash := plain[str(arm)].keys() & {"seed", "arm"}:
            wanted = f"Expected the settings of {arm!r} without {min(clash)!r}"
            raise ValueError(f"{wanted}, which `train` gets anyway, but got it.")
    return plain


def _run(study: Study, folder: Path, pool: Pool, metric: str | None, **wanted: Any) -> Results:
    with pool:
        execution = Execution(pool, Watch)
        first = run_first(study, None, execution)
        if metric is None and wanted["better"] is None and "metric" in first[0].metrics:
            raise ValueError(
                "Expected `metric`, the name of the number that `train` returns, such as "
                "'accuracy' or 'loss', but got none; the name shows whether higher is better."
            )
        runs = [row.metrics for row in first]
        chosen = choose_metric(runs, metric, **wanted)
        study = replace(study, metric=chosen, margin=chosen.margin)
        plan = Plan.of(study, None, pool.workers)
        say(plan.announce(max(run["seconds"] for run in runs)))
        return run_study(study, folder, execution, repeated=first)
