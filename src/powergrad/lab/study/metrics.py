"""The metrics of runs, by which arms are compared."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, cast

from powergrad.lab.runs import Record
from powergrad.lab.runs.sources import MEASURED
from powergrad.lab.stats import Claim, check_positive
from powergrad.lab.trainer.recipe import RecipeError


class Metric(Record):
    """A metric by which arms are compared."""

    name: str
    higher_is_better: bool
    unit: str  # of a difference, such as "points of test accuracy"
    margin: float  # the default of the largest difference that does not matter

    @property
    def title(self) -> str:
        return self.name.replace("_", " ")

    @property
    def better(self) -> Literal["higher", "lower"]:
        return "higher" if self.higher_is_better else "lower"


METRICS = {
    name: Metric(name=name, higher_is_better=is_higher, unit=unit, margin=margin)
    for name, is_higher, unit, margin in (
        ("test_accuracy", True, "points of test accuracy", 0.5),
        ("train_accuracy", True, "points of training accuracy", 0.5),
        ("nll", False, "of negative log-likelihood", 0.05),
        ("nll_scaled", False, "of negative log-likelihood at 1/alpha", 0.05),
        ("ece", False, "of calibration error", 0.01),
        ("ece_scaled", False, "of calibration error at 1/alpha", 0.01),
        ("dead_units", False, "dead units", 1.0),
    )
}
# Parts of names that show that lower is better.
LOWER = ("loss", "err", "nll", "perplexity", "ppl", "time", "latency", *MEASURED)
# The columns of study.csv after arm, seed and run.
COLUMNS = (
    *("train_loss", "train_accuracy", "test_accuracy", "test_top5", "nll", "nll_scaled", "ece"),
    *("ece_scaled", "logit_norm", "dead_units", "diverged", "classes", "steps", "seconds"),
)


def metric_names(runs: Iterable[Iterable[str]], first: str) -> list[str]:
    """The names of the metrics of some runs: `first`, those of the user, our own."""
    named = dict.fromkeys(name for run in runs for name in run)
    others = [name for name in named if name not in COLUMNS]
    return list(dict.fromkeys([first, *others, *(name for name in COLUMNS if name in named)]))


def chance_of(metric: str, classes: int) -> float | None:
    """The value of random guessing, for runs that diverged; None if it is not known."""
    if metric.endswith("accuracy"):
        return 100 / classes
    known = {"test_top5": min(100.0, 500 / classes), "nll": math.log(classes)}
    return known.get(metric.removesuffix("_scaled"))


def metric_named(name: str, margin: float | None = None) -> Metric:
    """The metric of a recipe: one of METRICS, or the seconds of a run, which need a margin."""
    if name == "seconds":
        return guess_metric(name, [], margin=margin, better=None)
    if name not in METRICS:
        known = f"{', '.join(METRICS)}, seconds"
        raise RecipeError(f"Expected `metric` to be one of {known}, but got {name!r}.")
    return METRICS[name]


def parse_second(text: str) -> tuple[Metric, Claim]:
    """Parse a second metric and its claim, such as ``seconds: better`` or ``f1: not worse 0.5``."""
    name, _, rest = text.rpartition(":")
    claim, margin, better = "", "", None
    if match := re.fullmatch(r" *(better|not worse)( [\d.e+-]+)?(?: (higher|lower))? *", rest):
        claim, margin, better = match.groups()
    if not name or not (margin if claim == "not worse" else claim):
        raise RecipeError(
            'Expected --and with a metric and what must hold, such as "seconds: better" or '
            f'"memory: not worse 100" (the margin), but got {text!r}.'
        )
    metric = guess_metric(name.strip(), [], margin=1.0, better=better)
    own = check_positive(float(margin), "margin") if margin else 0.0
    return metric.model_copy(update={"margin": own}), cast("Claim", claim)


def guess_metric(
    name: str, values: Sequence[float], *, margin: float | None, better: str | None
) -> Metric:
    """The metric of a user-defined name."""
    known = METRICS.get(name)
    lower_name = name.lower()
    is_percentage = name == "metric" or "acc" in lower_name
    if better is not None:
        higher = better == "higher"
    elif known is not None:
        higher = known.higher_is_better
    elif any(word in lower_name for word in LOWER):
        higher = False
    elif is_percentage:
        higher = True
    else:
        raise RecipeError(
            f"Expected `better` to be higher or lower, because the name {name!r} does not show "
            "which is better, but got none."
        )
    if margin is None:
        if is_percentage and any(abs(value) > 1 for value in values if value == value):
            margin = 0.5
        elif known is not None and not is_percentage:
            margin = known.margin
        else:
            reason = "the values are fractions" if is_percentage else f"{name!r} has no default"
            raise RecipeError(
                "Expected `margin`, the largest difference that does not matter to you, because "
                f"{reason}, but got none."
            )
    unit = known.unit if known else "MiB of memory" if name == "memory" else name
    return Metric(name=name, higher_is_better=higher, unit=unit, margin=margin)


def choose_metric(
    runs: Sequence[Mapping[str, float]],
    name: str | None,
    usual: Sequence[str] = (),
    *,
    margin: float | None,
    better: str | None,
) -> Metric:
    """The metric to compare: the named one, the program's only one, or the only `usual` one."""
    names = list(runs[0])
    own = [key for key in names if key not in MEASURED]
    candidates = [name] if name else own if len(own) == 1 else list(usual)
    if len(candidates) != 1 or candidates[0] not in names:
        listed = ", ".join(own) or "none"
        raise RecipeError(f"Expected `metric`, one of {listed}, but got {name or 'none'}.")
    values = [run[candidates[0]] for run in runs]
    return guess_metric(candidates[0], values, margin=margin, better=better)
