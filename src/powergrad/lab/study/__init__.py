"""Studies: the runs of several arms over several seeds, and their comparison."""

from powergrad.lab.study.definition import Study as Study
from powergrad.lab.study.definition import StudyKind as StudyKind
from powergrad.lab.study.execute import Execution as Execution
from powergrad.lab.study.execute import run_study as run_study
from powergrad.lab.study.metrics import METRICS as METRICS
from powergrad.lab.study.metrics import Metric as Metric
from powergrad.lab.study.metrics import metric_named as metric_named
from powergrad.lab.study.records import Grid as Grid
from powergrad.lab.study.records import IdentityCheck as IdentityCheck
from powergrad.lab.study.records import RunRow as RunRow
from powergrad.lab.study.records import Tuning as Tuning
from powergrad.lab.study.results import Results as Results
from powergrad.lab.study.saving import load as load
from powergrad.lab.study.saving import load_study as load_study
from powergrad.lab.study.saving import save as save
