"""The statistics of a comparison: tests, sequential looks, verdicts and power.

tests      tests for two samples of runs: Welch's t test, and checks of its assumptions
looks      designs: the numbers of runs at which a study is tested, and the error per look
verdict    better, worse, equivalent or not settled, with one interval and one p-value
power      simulated studies, noise, and plans
"""

from powergrad.lab.stats.looks import DEFAULT, LEAST, Design, error_of_looks, parse_runs
from powergrad.lab.stats.power import KNOWN_NOISE, Noise, Plan, estimate_noise, plan
from powergrad.lab.stats.tests import check_positive, t_interval
from powergrad.lab.stats.verdict import (
    VERDICTS,
    Comparison,
    compare,
    format_interval,
    format_signed,
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
    "check_positive",
    "compare",
    "error_of_looks",
    "estimate_noise",
    "format_interval",
    "format_signed",
    "parse_runs",
    "plan",
    "t_interval",
]
