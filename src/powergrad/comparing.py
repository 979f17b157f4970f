"""`compare`: whether something helps in a training that is a Python function."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from powergrad.lab.comparing import Compared

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
    """Compare arms of a training over seeds, until each is better, worse or equivalent.

    It needs the workbench: ``pip install 'powergrad[lab]'``. ``train(seed, arm, **settings)`` is
    called once for each arm and seed. A function that another process can import runs in worker
    processes; others, such as those of a notebook, run in this process, one after another. In a
    script, the call belongs under ``if __name__ == "__main__":``, because workers import it.

    Args:
        train: Returns a number, or a mapping with several metrics. An exception makes the run a
            failed one; NaN and infinity count as diverged.
        arms: The names of the arms, or their settings (plain values) by name. The first is the one
            that the others are compared with.
        seeds: Runs per arm: ``"8..24"`` looks at 8, 12, 16, 20 and 24 and stops an arm once it is
            settled; 12 is a fixed number; ``"8,16,24"`` names the looks.
        metric: The name of the number that is returned, or of the metric that is compared.
        margin: The largest difference that does not matter to you; by default 0.5 for an accuracy
            in per cent.
        better: Whether a higher or a lower metric is better, where its name does not tell.
        workers: Runs at a time; by default one per GPU, or as many as the cores allow.
        threads: Threads of each worker.
        first_seed: The first seed.
        out: Where the study's folder is made. The same call again then does only what is missing,
            unless `train` itself was changed; what it reads from elsewhere is not looked at. By
            default nothing is kept.
        name: The name of the study's folder.

    Returns:
        The results: they print as a table with a verdict, show as HTML in notebooks, and have
        ``to_frame()`` for pandas and ``save(folder)`` for the page.

    Raises:
        ImportError: If the workbench is not installed.
        ValueError: If an argument is wrong, or the first run lacks the metric.

    Example:
        >>> def train(seed, arm, bonus=0.0):  # in your code: a training
        ...     return 90 + seed % 3 + bonus
        >>> arms = {"baseline": {}, "other": {"bonus": 4.0}}
        >>> results = compare(train, arms, seeds=8, metric="accuracy")
        >>> results.verdict
        'Here other is better than baseline.'
    """
    try:
        # By its name: the core imports the workbench nowhere.
        module = importlib.import_module("powergrad.lab.comparing")
    except ImportError as error:
        raise ImportError(
            "Expected the workbench for `powergrad.compare` (pip install 'powergrad[lab]'), but "
            f"got: {error}."
        ) from error
    return module.compare_function(
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
