"""The statistics of a comparison: tests, sequential looks, verdicts and power.

tests      tests for two samples of runs: Welch's t test, and checks of its assumptions
looks      designs: the numbers of runs at which a study is tested, and the error per look
settle     how one arm is judged, look by look
verdict    better, worse, equivalent or not settled, with one interval and one p-value
power      simulated studies, noise, and plans
"""

from powergrad.lab.stats.looks import DEFAULT as DEFAULT
from powergrad.lab.stats.looks import LEAST as LEAST
from powergrad.lab.stats.looks import Design as Design
from powergrad.lab.stats.looks import error_of_looks as error_of_looks
from powergrad.lab.stats.looks import least_runs as least_runs
from powergrad.lab.stats.looks import parse_runs as parse_runs
from powergrad.lab.stats.power import KNOWN_NOISE as KNOWN_NOISE
from powergrad.lab.stats.power import Plan as Plan
from powergrad.lab.stats.power import estimate_noise as estimate_noise
from powergrad.lab.stats.power import plan as plan
from powergrad.lab.stats.power import smallest_difference as smallest_difference
from powergrad.lab.stats.settle import VERDICTS as VERDICTS
from powergrad.lab.stats.settle import Claim as Claim
from powergrad.lab.stats.tests import Noise as Noise
from powergrad.lab.stats.tests import check_positive as check_positive
from powergrad.lab.stats.tests import t_interval as t_interval
from powergrad.lab.stats.verdict import Comparison as Comparison
from powergrad.lab.stats.verdict import Second as Second
from powergrad.lab.stats.verdict import compare as compare
from powergrad.lab.stats.verdict import format_interval as format_interval
from powergrad.lab.stats.verdict import format_p as format_p
from powergrad.lab.stats.verdict import format_signed as format_signed
