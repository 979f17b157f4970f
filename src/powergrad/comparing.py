"""`compare`: compare variants of a training that is written as a Python function."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from powergrad.lab.compare_function import Compared

__all__ = ["compare"]


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
    try:
        lab = importlib.import_module("powergrad.lab.compare_function")  # the core needs no lab
    except ImportError as error:
        raise ImportError(
            "Expected the workbench to be installed for `powergrad.compare` (pip install "
            f"'powergrad[lab]'), but got: {error}."
        ) from error
    return lab.compare_function(
        train,
        arms,
        str(seeds),
        metric=metric,
        margin=margin,
        better=better,
        workers=workers,
        threads=threads,
        first_seed=first_seed,
        out=out,
        name=name,
    )
