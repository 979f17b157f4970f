"""Studies: the runs of several arms over several seeds, and their comparison."""

from powergrad.lab.study.definition import Study, StudyKind
from powergrad.lab.study.execute import Execution, run_study
from powergrad.lab.study.metrics import METRICS, Metric, metric_named
from powergrad.lab.study.records import Grid, IdentityCheck, RunRow, Tuning
from powergrad.lab.study.results import Results
from powergrad.lab.study.saving import load, load_study, save

__all__ = [
    "METRICS",
    "Execution",
    "Grid",
    "IdentityCheck",
    "Metric",
    "Results",
    "RunRow",
    "Study",
    "StudyKind",
    "Tuning",
    "load",
    "load_study",
    "metric_named",
    "run_study",
    "save",
]
