"""``powergrad compare --from``: compares runs from a table."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from powergrad.lab.environment import describe_machine
from powergrad.lab.report import write_report
from powergrad.lab.stats import LEAST
from powergrad.lab.study import Results
from powergrad.lab.study.tables import parse_columns
from powergrad.lab.terminal import show_results
from powergrad.lab.trainer.recipe import RecipeError
from powergrad.lab.trainer.run_folder import RunError

__all__ = ["TableOptions", "compare_table"]

WRITTEN = ("study.json", "study.csv", "study.png", "report.html")


@Parameter(name="*")
@dataclass(frozen=True)
class TableOptions:
    """Options for the comparison of runs made elsewhere.

    Attributes:
        from_: Compare the runs of this CSV file (one line per run) instead of training. Exports of
            W&B and MLflow are supported.
        columns: With --from: the columns of arm and seed, such as arm=group seed=config.seed, if
            they are not found. The column of the metric is --metric.
        baseline: With --from: the arm to compare with.
        better: With --from, or for your own program: whether a higher or a lower metric is better,
            if its name does not show it.
    """

    from_: Annotated[Path | None, Parameter(name="--from")] = None
    columns: Annotated[tuple[str, ...], Parameter(negative="", consume_multiple=True)] = ()
    baseline: str | None = None
    better: Literal["higher", "lower"] | None = None

    def refuse(self, *, has_program: bool) -> None:
        """Raise ValueError for options that need --from or a program."""
        for name in ("columns", "baseline", *(() if has_program else ("better",))):
            if value := getattr(self, name):
                shown = " ".join(value) if name == "columns" else value
                where = "--from or your own program" if name == "better" else "--from"
                raise ValueError(f"Expected --{name} only with {where}, but got {shown!r}.")


def compare_table(
    table: TableOptions, out: Path, name: str | None, metric: str | None, margin: float | None
) -> int:
    """Compare the runs of a table, with the same files, figure, page and output as a study."""
    path = table.from_
    assert path is not None
    folder = out / (name or path.stem)
    earlier = _earlier(folder)
    results = Results.from_csv(
        path,
        metric=metric,
        columns=parse_columns(table.columns),
        baseline=table.baseline,
        margin=margin,
        better=table.better,
    )
    results = _continued(results, earlier)
    results = replace(results, folder=folder, environment=describe_machine())
    assert results.source is not None
    if earlier and earlier.source and earlier.source.digest != results.source.digest:
        message = f"{path} has changed since {folder} was written; the folder is rewritten."
        print(message, file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    results.save(folder)
    from powergrad.lab.figures import draw_study

    draw_study(results, folder / "study.png", f"{path.name}: {len(results.rows)} runs")
    page = write_report([results], folder / "report.html")
    show_results(results)
    print(f"\nThe page is {page}; study.csv, study.json and study.png are in the same folder.")
    return 0


def _earlier(folder: Path) -> Results | None:
    """The results of an earlier start in `folder`, if any.

    Raises:
        RecipeError: If the folder has other files that would be overwritten.
    """
    there = [file for file in ("study.yaml", "config.yaml", *WRITTEN) if (folder / file).exists()]
    if not there:
        return None
    try:
        earlier = None if there[0] in ("study.yaml", "config.yaml") else Results.load(folder)
    except (RunError, ValueError, KeyError, TypeError):
        earlier = None
    if earlier is None or earlier.source is None:
        raise RecipeError(
            f"Expected {str(folder)!r} to be unused or to hold the results of a table, but got "
            f"another {there[0]} in it; choose another --name or --out."
        )
    return earlier


def _continued(results: Results, earlier: Results | None) -> Results:
    """The results, with the sizes at which their runs were looked at before."""
    source = results.source
    assert source is not None
    if earlier is None or earlier.source is None or earlier.metric.name != results.metric.name:
        return results
    before, now = ({(row.arm, row.seed) for row in r.rows} for r in (earlier, results))
    if not before <= now:
        return results
    looks = {*earlier.source.earlier, earlier.size} - {results.size}
    looks = {size for size in looks if size >= LEAST}  # fewer runs have no verdict
    return replace(results, source=replace(source, earlier=tuple(sorted(looks))))
