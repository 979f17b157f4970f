"""The metrics of runs, by which arms are compared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from powergrad.lab.trainer.recipe import RecipeError


@dataclass(frozen=True)
class Metric:
    """A metric by which arms are compared.

    Attributes:
        name: Its name in results and files.
        higher_is_better: Whether a larger value is better.
        unit: The unit of a difference, such as "points of test accuracy".
        margin: The default of the largest difference that does not matter.
    """

    name: str
    higher_is_better: bool
    unit: str
    margin: float

    @property
    def title(self) -> str:
        """The name for axes and table headings."""
        return self.name.replace("_", " ")

    @property
    def better(self) -> Literal["higher", "lower"]:
        """Whether a higher or a lower value is better."""
        return "higher" if self.higher_is_better else "lower"


METRICS = {
    metric.name: metric
    for metric in (
        Metric("test_accuracy", True, "points of test accuracy", 0.5),
        Metric("train_accuracy", True, "points of training accuracy", 0.5),
        Metric("nll", False, "of negative log-likelihood", 0.05),
        Metric("nll_scaled", False, "of negative log-likelihood at 1/alpha", 0.05),
        Metric("ece", False, "of calibration error", 0.01),
        Metric("ece_scaled", False, "of calibration error at 1/alpha", 0.01),
        Metric("dead_units", False, "dead units", 1.0),
    )
}
# The columns of study.csv after arm, seed and run.
COLUMNS = (
    "train_loss",
    "train_accuracy",
    "test_accuracy",
    "test_top5",
    "nll",
    "nll_scaled",
    "ece",
    "ece_scaled",
    "logit_norm",
    "dead_units",
    "diverged",
    "classes",
    "steps",
    "seconds",
)


def metric_names(runs: Iterable[Mapping[str, object]], first: str) -> list[str]:
    """The names of the metrics of some runs, starting with `first`.

    Example:
        >>> metric_names([{"seconds": 1, "loss": 2, "acc": 3}], "acc")
        ['acc', 'loss', 'diverged', 'seconds']
    """
    named = dict.fromkeys(name for run in runs for name in run if name not in ("format", "failed"))
    others = [name for name in named if name not in COLUMNS and name != first]
    usual = ["diverged", *(name for name in COLUMNS if name in named)]
    return list(dict.fromkeys([first, *others, *usual]))


def chance_of(metric: str, classes: int) -> float | None:
    """The value of random guessing, for runs that diverged; None if it is not known.

    Example:
        >>> chance_of("test_accuracy", 10), chance_of("dead_units", 10)
        (10.0, None)
    """
    if metric.endswith("accuracy"):
        return 100 / classes
    return {"test_top5": min(100.0, 500 / classes), "nll": math.log(classes)}.get(
        metric.removesuffix("_scaled")
    )


def metric_named(name: str) -> Metric:
    """The known metric with a name."""
    if name not in METRICS:
        raise RecipeError(f"Expected `metric` to be one of {', '.join(METRICS)}, but got {name!r}.")
    return METRICS[name]


def saved_metric(name: str, better: str | None, margin: float) -> Metric:
    """The metric of a saved study; files of earlier formats have no `better`."""
    known = METRICS.get(name)
    if known is not None and better in (None, known.better):
        return known
    return Metric(name, better != "lower", known.unit if known else name, margin)


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
    elif any(word in lower_name for word in ("loss", "err", "nll", "perplexity", "ppl")):
        higher = False
    elif is_percentage:
        higher = True
    else:
        raise RecipeError(
            f"Expected --better higher or --better lower, because the name {name!r} does not show "
            "which is better, but got none."
        )
    if margin is None:
        if is_percentage and any(abs(value) > 1 for value in values if value == value):
            margin = 0.5
        elif known is not None and not is_percentage:
            margin = known.margin
        else:
            reason = (
                "the values are fractions, not percentages"
                if is_percentage
                else f"{name!r} has no default"
            )
            raise RecipeError(
                "Expected --margin, the largest difference that does not matter to you, because "
                f"{reason}, but got none."
            )
    return Metric(name, higher, known.unit if known else name, margin)
