"""``powergrad plan``: how many seeds a claim needs."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from powergrad.lab.cli.common import Flag
from powergrad.lab.stats import KNOWN_NOISE, Design, Noise, estimate_noise, parse_runs
from powergrad.lab.stats import plan as plan_runs
from powergrad.lab.study import load
from powergrad.lab.terminal import show_plan


def plan(
    *,
    delta: float,
    sigma: str | None = None,
    study: Path | None = None,
    metric: str | None = None,
    images: int | None = None,
    margin: float | None = None,
    power: float = 0.8,
    level: float = 0.05,
    arms: int = 2,
    seeds: str = "8..24",
    seconds: float | None = None,
    workers: int = 1,
    known: Annotated[bool, Flag] = False,
) -> int:
    """Compute how many seeds a claim needs.

    Args:
        delta: The difference to detect, in the unit of the metric.
        sigma: The standard deviation of one run: a number, or the name of a published value.
        study: A finished study (its folder, or study.csv) from which to estimate the noise.
        metric: The metric of that study; by default the one that it compares.
        images: The number of test images, if the metric is an accuracy in percent. It then changes
            in steps of one image, which reduces the power.
        margin: The largest difference that does not matter; --delta by default.
        power: The probability of detecting the difference if it exists.
        level: The probability of any false verdict.
        arms: The number of arms, including the baseline.
        seeds: The looks of the sequential design, as in `powergrad compare --seeds`.
        seconds: The time of one run in seconds; by default as measured in --study.
        workers: The number of runs at a time.
        known: Plan a study whose verdict uses this sigma (`powergrad compare --sigma`), so that 2
            runs per arm are enough for one.
    """
    if arms < 2:
        raise ValueError(f"Expected `arms` to be at least 2, but got {arms}.")
    noise: float | str | Noise
    if study is not None:
        noise, measured = noise_of(study, metric)
        seconds = measured if seconds is None else seconds
    elif sigma is None:
        names = ", ".join(KNOWN_NOISE)
        raise ValueError(f"Expected --sigma (a number, or one of {names}) or --study.")
    else:
        noise = sigma
        with contextlib.suppress(ValueError):
            noise = float(sigma)
    claim = {"power": power, "level": level, "comparisons": arms - 1, "margin": margin}
    runs = {"design": Design(parse_runs(seeds)), "seconds": seconds, "workers": workers}
    show_plan(plan_runs(delta, noise, images=images, known=known, **claim, **runs))
    return 0


def noise_of(study: Path, metric: str | None) -> tuple[Noise, float | None]:
    """The noise within the arms of a study, and the mean time of a run."""
    results = load(study, metric)
    samples = [results.values(arm, metric) for arm in results.arms]
    if not any(samples):
        what = f"the metric {metric!r} in the runs" if metric else "runs"
        raise ValueError(f"Expected {what} of {str(study)!r}, but got none.")
    times = [time for row in results.rows if (time := row.value("seconds")) is not None]
    noise = estimate_noise(samples)
    source = f"estimated from {noise.runs} runs of {study.name}"
    return replace(noise, source=source), sum(times) / len(times) if times else None
