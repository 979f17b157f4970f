"""The records of a study: final metrics of runs, tuning, grid, identity check."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from powergrad.lab.runs import Record
from powergrad.lab.stats import Claim, Noise
from powergrad.lab.study.metrics import Metric
from powergrad.lab.trainer.run_folder import Result
from powergrad.lab.words import short_key

# JSON has no NaN, which is stored as null.
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]


class Question(Record):
    """What is asked about the compared metric, apart from its margin."""

    noise: Noise | None = None  # of a run, if it is known
    target: float | None = None  # with which the arms are compared, instead of the baseline
    second: Metric | None = None  # a second metric; its margin is 0 if it has none
    claim: Claim = ""  # what must be shown of the second metric
    pairs: bool = False  # compare in pairs where that pays; not in studies of earlier versions


USUAL = Question(pairs=True)  # of every new study without further options


class RunRow(Record):
    """The final metrics of one run, and what else is known about it.

    `about` has facts that are not compared: ``diverged``, ``classes``, ``steps``, ``first_loss``,
    ``optimizers``, and ``failed``, the reason why the run of a user's program has no metrics.
    """

    arm: str
    seed: int
    metrics: dict[str, Any] = Field(default={})  # numbers, or None
    about: dict[str, Any] = Field(default={})
    settings: dict[str, Any] = Field(default={})  # tuned values; how recipes differ
    run: str = ""  # the name of its folder; empty for runs made elsewhere
    commit: str = ""
    unit: int | None = None  # the number of its repeat
    is_elsewhere: bool = False  # its folder is on another machine, or was not kept

    def value(self, metric: str) -> float | None:
        """A metric; None if the run does not have it, or if it is NaN."""
        value = self.metrics.get(metric)
        return value if value is not None and value == value else None

    @property
    def diverged(self) -> bool:
        return bool(self.about.get("diverged"))

    @property
    def failed(self) -> str:
        """Why the run of a user's program failed; empty if it did not."""
        return str(self.about.get("failed") or "")

    @property
    def result(self) -> Result:
        """What its folder has, or had."""
        return Result(metrics=dict(self.metrics), about={**self.about, "commit": self.commit})

    def is_lost(self, metric: str) -> bool:
        """Whether it diverged, or its metric is infinite."""
        return self.diverged or math.isinf(self.value(metric) or 0.0)

    def flat(self) -> dict[str, Any]:
        """One flat mapping, as in study.csv."""
        known = {"run": self.run, "commit": self.commit, "repeat": self.unit}
        kept = {key: value for key, value in known.items() if value not in ("", None)}
        whose = {"arm": self.arm, "seed": self.seed}
        return {**whose, **kept, **self.settings, **self.about, **self.metrics}


class Trial(Record):
    """A point that was tried for an arm."""

    point: dict[str, Any]  # the tuned values, before they are mapped to those of the arm
    changes: dict[str, Any]  # the changes of the arm at this point
    mean: Number  # the mean of the metric on the held-out data; NaN if it cannot be used
    note: str = ""  # why it cannot be used


class Choice(Record):
    """The choice for an arm in one tuning."""

    trials: tuple[Trial, ...]
    chosen: int  # the index of the best trial
    edges: tuple[str, ...] = ()  # the keys whose chosen value is at the edge of those tried

    @property
    def winner(self) -> Trial:
        return self.trials[self.chosen]


class Tuning(Record):
    """The tuning of keys for every arm."""

    keys: tuple[str, ...]
    seeds: int  # per point
    hold_out: float  # the fraction of the training data on which the points were tested
    repeats: tuple[dict[str, Choice], ...]  # the independent tunings: the choice of each arm
    is_unit: bool = False  # whether each repeat is a unit of the comparison
    metric: str = ""  # of a user's program, by which points were chosen

    @property
    def arms(self) -> Mapping[str, Choice]:
        """The choice for every arm in the first tuning."""
        return self.repeats[0] if self.repeats else {}

    def choices(self, arm: str) -> list[Choice]:
        """The choices for an arm in all tunings that it was part of."""
        return [repeat[arm] for repeat in self.repeats if arm in repeat]

    def describe(self, arm: str) -> str:
        """The choices for an arm in one line."""
        choices = self.choices(arm)
        if len(choices) == 1:
            choice, digits = choices[0], ".4g" if self.metric else ".2f"
            tried = [f"{describe_point(t.point)}: {t.mean:{digits}}" for t in choice.trials]
            edges = ", ".join(map(short_key, choice.edges))
            notes = ", ".join(tried) + (f"; {edges} at the edge" if edges else "")
            return f"{arm}: {describe_point(choice.winner.changes, self.keys)} ({notes})"
        points = "; ".join(describe_point(choice.winner.point) for choice in choices)
        edges = sum(bool(choice.edges) for choice in choices)
        return f"{arm}: {points} ({edges} of {len(choices)} at an edge)"

    def edges(self, arm: str) -> list[str]:
        """The keys whose chosen value is at the edge in more than half of an arm's tunings."""
        choices = self.choices(arm)
        return [key for key in self.keys if 2 * sum(key in c.edges for c in choices) > len(choices)]

    def doubts(self, baseline: str) -> dict[str, str]:
        """Why some arms cannot be called better: a chosen value is at the edge of those tried."""
        doubts = {}
        for arm in self.arms:
            for name in (arm, baseline):
                if arm != baseline and (edges := self.edges(name)):
                    key = short_key(edges[0])
                    doubts[arm] = (
                        f"Not called better, because the chosen {key} of {name} is at the edge of "
                        f"the values that were tried: widen the range of --tune {key}."
                    )
        return doubts


def describe_point(point: Mapping[str, Any], keys: Sequence[str] | None = None) -> str:
    """Format the values of some keys, by short names: ``lr 0.1, weight_decay 0.0005``."""
    chosen = point if keys is None else [key for key in keys if key in point]
    rounded = {k: f"{v:.3g}" if isinstance(v := point[k], float) else str(v) for k in chosen}
    return ", ".join(f"{short_key(key)} {value}" for key, value in rounded.items())


class Grid(Record):
    """Keys and their values."""

    values: dict[str, tuple[Any, ...]]

    def arms(self) -> dict[str, dict[str, Any]]:
        """Every point as an arm, such as ``alpha=0.3, lr=0.1``."""
        arms = {}
        for values in itertools.product(*self.values.values()):
            point = dict(zip(self.values, values, strict=True))
            arms[", ".join(f"{short_key(key)}={value}" for key, value in point.items())] = point
        return arms


class IdentityCheck(Record):
    """The check that PGT and the equivalent two-group training agree."""

    alpha: float
    gaps: dict[int, float]  # for each number of steps, the relative difference of the weights


class LeftOut(Record):
    """A run of a table that is not compared."""

    line: int
    arm: str  # empty if it has none
    seed: int
    reason: str  # such as "without accuracy"


class Source(Record):
    """The table from which results were read."""

    question: Question = USUAL
    file: str
    digest: str  # the SHA-256 of its content
    columns: dict[str, str]  # the columns of arm, seed and metric
    guessed: tuple[str, ...] = ()  # which of these three were guessed
    left_out: tuple[LeftOut, ...] = ()
    earlier: tuple[int, ...] = ()  # runs per arm of earlier analyses of the file
