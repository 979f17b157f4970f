"""``powergrad plan``: how many seeds a claim needs."""

from __future__ import annotations

from pathlib import Path

from powergrad.lab.plan import KNOWN_NOISE, Noise, estimate_noise
from powergrad.lab.plan import plan as plan_seeds
from powergrad.lab.study import Results

__all__ = ["plan"]


def plan(
    *,
    delta: float,
    sigma: str | None = None,
    study: Path | None = None,
    metric: str | None = None,
    power: float = 0.8,
    level: float = 0.05,
    arms: int = 2,
    seconds: float | None = None,
    workers: int = 1,
) -> int:
    """How many seeds does a claim need?

    Args:
        delta: The difference that you want to be able to see, in the metric's unit.
        sigma: The noise of one run: a number, or the name of a known one.
        study: A finished study (its folder, or study.csv) to estimate the noise from.
        metric: The metric of that study; by default the one that it compares.
        power: The chance of seeing the difference if it is there.
        level: The chance of seeing one that is not there.
        arms: Arms, the baseline included.
        seconds: How long one run takes; by default as measured in --study.
        workers: Runs at a time.
    """
    if arms < 2:
        raise ValueError(f"Expected `arms` to be at least 2, but got {arms}.")
    noise: float | str | Noise
    if study is not None:
        noise, measured = _noise_of(Results.load(study, metric), metric, study)
        seconds = measured if seconds is None else seconds
    elif sigma is None:
        known = ", ".join(KNOWN_NOISE)
        raise ValueError(f"Expected --sigma (a number, or one of {known}), or --study.")
    else:
        try:
            noise = float(sigma)
        except ValueError:
            noise = sigma
    planned = plan_seeds(
        delta,
        noise,
        power=power,
        level=level,
        comparisons=arms - 1,
        seconds=seconds,
        workers=workers,
    )
    print(planned.sentence)
    return 0


def _noise_of(results: Results, metric: str | None, source: Path) -> tuple[Noise, float | None]:
    """The noise of a study's first two arms, or of its only one; the mean seconds of a run."""
    values = [results.values(arm, metric) for arm in results.arms[:2]]
    if not values or not values[0]:
        raise ValueError(f"Expected runs in {str(source)!r}, but got none.")
    noise = estimate_noise(*reversed(values))
    times = [time for row in results.rows if (time := row.value("seconds")) is not None]
    return noise, sum(times) / len(times) if times else None
