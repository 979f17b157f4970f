"""Studies: the runs of several arms over several seeds, and their comparison."""

from powergrad.lab.study.definition import Study, StudyKind
from powergrad.lab.study.execute import Execution, run_study
from powergrad.lab.study.metrics import METRICS, Metric, metric_named
from powergrad.lab.study.records import Decomposition, Grid, RunRow, Tuning
from powergrad.lab.study.results import Results

__all__ = [
    "METRICS",
    "Decomposition",
    "Execution",
    "Grid",
    "Metric",
    "Results",
    "RunRow",
    "Study",
    "StudyKind",
    "Tuning",
    "metric_named",
    "run_study",
]
