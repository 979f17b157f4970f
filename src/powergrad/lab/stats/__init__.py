"""The statistics of a comparison: what decides, when to look, and how many runs it takes.

tests      two samples of runs: Welch's t test, and what checks its assumptions
looks      designs: at how many runs a study looks, and the error each look may spend
verdict    better, worse, equivalent or not settled, with one interval and one p-value
power      simulated studies, noise, and plans
"""

from powergrad.lab.stats.looks import DEFAULT, LEAST, Design, error_of_looks, parse_runs
from powergrad.lab.stats.power import KNOWN_NOISE, Noise, Plan, estimate_noise, plan
from powergrad.lab.stats.tests import check_positive, t_interval
from powergrad.lab.stats.verdict import (
    VERDICTS,
    Comparison,
    by_arm_and_seed,
    compare,
    signed,
    span,
)

__all__ = [
    "DEFAULT",
    "KNOWN_NOISE",
    "LEAST",
    "VERDICTS",
    "Comparison",
    "Design",
    "Noise",
    "Plan",
    "by_arm_and_seed",
    "check_positive",
    "compare",
    "error_of_looks",
    "estimate_noise",
    "parse_runs",
    "plan",
    "signed",
    "span",
    "t_interval",
]
