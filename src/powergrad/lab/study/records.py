"""The records of a study: final metrics of runs, tuning, grid, decomposition."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from typing_extensions import Self

from powergrad.lab.words import number, short_key


@dataclass(frozen=True)
class RunRow:
    """The final metrics of one run.

    Attributes:
        arm: Its arm.
        seed: Its seed.
        metrics: The final metrics.
        run: The name of its folder; empty for runs made elsewhere.
        commit: The commit of the code, if known.
        unit: The number of its repeat; None if the study has no repeats.
        is_elsewhere: Whether its folder is on another machine, or was not kept.
    """

    arm: str
    seed: int
    metrics: Mapping[str, Any]
    run: str = ""
    commit: str = ""
    unit: int | None = None
    is_elsewhere: bool = False

    def value(self, metric: str) -> float | None:
        """A metric as a number; None if the run does not have it, or if it is NaN."""
        value = self.metrics.get(metric)
        return float(value) if isinstance(value, (int, float)) and value == value else None

    @property
    def diverged(self) -> bool:
        """Whether its loss became infinite or NaN."""
        return bool(self.metrics.get("diverged"))

    @property
    def failed(self) -> str:
        """Why the run of a user's program failed; empty if it did not. It then has no metrics."""
        return str(self.metrics.get("failed") or "")

    def is_lost(self, metric: str) -> bool:
        """Whether it diverged, or its metric is infinite."""
        value = self.value(metric)
        return self.diverged or (value is not None and math.isinf(value))

    def to_dict(self) -> dict[str, Any]:
        """One flat mapping, as in study.json and study.csv."""
        kept = {
            "run": self.run,
            "commit": self.commit,
            "repeat": self.unit,
            "elsewhere": self.is_elsewhere,
        }
        about = {k: v for k, v in kept.items() if v != "" and v is not None and v is not False}
        return {"arm": self.arm, "seed": self.seed, **about, **self.metrics}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunRow:
        """The inverse of :meth:`to_dict`."""
        names = {"arm": "arm", "seed": "seed", "run": "run", "commit": "commit"}
        names |= {"repeat": "unit", "elsewhere": "is_elsewhere"}
        about = {name: values[key] for key, name in names.items() if key in values}
        metrics = {key: value for key, value in values.items() if key not in names}
        return cls(metrics=metrics, **about)


@dataclass(frozen=True)
class Trial:
    """A point that was tried for an arm.

    Attributes:
        point: The values of the tuned keys, before they are mapped to those of the arm.
        changes: The changes of the arm at this point.
        mean: The mean of the metric on the held-out data; NaN if it cannot be used.
        note: Why it cannot be used; empty if it can.
    """

    point: Mapping[str, Any]
    changes: Mapping[str, Any]
    mean: float
    note: str = ""


@dataclass(frozen=True)
class Choice:
    """The choice for an arm in one tuning.

    Attributes:
        trials: The points that were tried.
        chosen: The index of the best trial.
        edges: The tuned keys whose chosen value is the smallest or largest that was tried.
    """

    trials: tuple[Trial, ...]
    chosen: int
    edges: tuple[str, ...] = ()

    @property
    def winner(self) -> Trial:
        """The best trial."""
        return self.trials[self.chosen]

    @property
    def at_edge(self) -> bool:
        """Whether any value is at the edge."""
        return bool(self.edges)

    @property
    def lead(self) -> float:
        """The difference between the best and the second-best trial; NaN without a second."""
        others = [t.mean for i, t in enumerate(self.trials) if i != self.chosen]
        usable = [mean for mean in others if mean == mean]
        return min((abs(self.winner.mean - mean) for mean in usable), default=math.nan)


@dataclass(frozen=True)
class Tuning:
    """The tuning of keys for every arm.

    Attributes:
        keys: The dotted keys.
        seeds: The number of seeds per point.
        hold_out: The fraction of the training data on which the points were tested.
        repeats: The independent tunings: for each, the choice of each arm.
        is_unit: Whether the best settings of each repeat are one unit of the comparison. If not,
            there is one tuning, and the comparison holds only for the chosen values.
        metric: The metric of a user's program by which points were chosen; empty if it is the
            compared metric on held-out data.
    """

    keys: tuple[str, ...]
    seeds: int
    hold_out: float
    repeats: tuple[Mapping[str, Choice], ...]
    is_unit: bool = False
    metric: str = ""

    @property
    def arms(self) -> Mapping[str, Choice]:
        """The choice for every arm in the first tuning."""
        return self.repeats[0] if self.repeats else {}

    def describe(self, arm: str) -> str:
        """The choices for an arm in one line."""
        choices = [repeat[arm] for repeat in self.repeats if arm in repeat]
        if len(choices) == 1:
            digits = ".4g" if self.metric else ".2f"
            trials = ", ".join(
                f"{describe_point(t.point)}: {t.mean:{digits}}" for t in choices[0].trials
            )
            edges = ", ".join(map(short_key, choices[0].edges))
            edge = f"; {edges} at the edge" if edges else ""
            return f"{arm}: {describe_point(choices[0].winner.changes, self.keys)} ({trials}{edge})"
        points = "; ".join(describe_point(choice.winner.point) for choice in choices)
        edges = sum(choice.at_edge for choice in choices)
        return f"{arm}: {points} ({edges} of {len(choices)} at an edge)"

    def doubts(self, baseline: str) -> dict[str, str]:
        """For some arms, the reason why they cannot be called better than the baseline yet.

        If a chosen value is at the edge of the values that were tried, the best value may lie
        beyond. With one tuning per repeat, this counts if it holds for more than half of an arm's
        choices.
        """
        edges = {arm: self.edges(arm) for arm in self.arms}
        doubts = {}
        for arm in self.arms:
            for name in (arm, baseline):
                if edges.get(name) and arm != baseline:
                    key = short_key(edges[name][0])
                    doubts[arm] = (
                        f"Not called better, because the chosen {key} of {name} is at the edge of "
                        f"the values that were tried: widen the range of --tune {key}."
                    )
        return doubts

    def edges(self, arm: str) -> list[str]:
        """The keys whose chosen value is at the edge in more than half of an arm's tunings."""
        choices = [repeat[arm] for repeat in self.repeats if arm in repeat]
        return [key for key in self.keys if 2 * sum(key in c.edges for c in choices) > len(choices)]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_dict`; it also reads earlier formats."""
        if "key" in values:
            return cls._from_one_key(values)
        repeats = tuple(
            {
                arm: Choice(
                    tuple(
                        Trial(t["point"], t["changes"], _number(t["mean"]), t["note"])
                        for t in choice["trials"]
                    ),
                    choice["chosen"],
                    tuple(choice["edges"]),
                )
                for arm, choice in repeat.items()
            }
            for repeat in values["repeats"]
        )
        keys, seeds, metric = tuple(values["keys"]), values["seeds"], values.get("metric", "")
        return cls(keys, seeds, values["hold_out"], repeats, values["is_unit"], metric)

    @classmethod
    def _from_one_key(cls, values: Mapping[str, Any]) -> Self:
        """Formats 1 and 2: one key, one tuning."""
        key = values["key"]
        arms = {}
        for arm, tuned in values["arms"].items():
            points = [{key: tried["value"]} for tried in tuned["means"]]
            trials = tuple(
                Trial(point, point, _number(tried["mean"]))
                for point, tried in zip(points, tuned["means"], strict=True)
            )
            chosen = points.index({key: tuned["chosen"]})
            arms[arm] = Choice(trials, chosen, (key,) if tuned["at_edge"] else ())
        return cls((key,), len(values["seeds"]), values["hold_out"], (arms,))


def describe_point(point: Mapping[str, Any], keys: Sequence[str] | None = None) -> str:
    """Format the values of some keys, by short names.

    Example:
        >>> describe_point({"optimizer.lr": 0.1, "optimizer.weight_decay": 0.0005})
        'lr 0.1, weight_decay 0.0005'
    """
    chosen = point if keys is None else [key for key in keys if key in point]
    return ", ".join(f"{short_key(key)} {_rounded(point[key])}" for key in chosen)


def _rounded(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else number(value)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


@dataclass(frozen=True)
class Grid:
    """Keys and their values."""

    values: Mapping[str, tuple[Any, ...]]

    def arms(self) -> dict[str, dict[str, Any]]:
        """Every point as an arm.

        Example:
            >>> Grid({"loss.alpha": (1.0, 0.3), "seed": (1,)}).arms()["alpha=0.3, seed=1"]
            {'loss.alpha': 0.3, 'seed': 1}
        """
        points = (
            dict(zip(self.values, point, strict=True))
            for point in itertools.product(*self.values.values())
        )
        return {
            ", ".join(f"{short_key(key)}={value}" for key, value in point.items()): point
            for point in points
        }

    @property
    def is_numeric(self) -> bool:
        """Whether all values of the first key are numbers, so that it can be an axis."""
        return all(isinstance(value, (int, float)) for value in next(iter(self.values.values())))


@dataclass(frozen=True)
class Decomposition:
    """The check that PGT and the equivalent two-group training agree.

    Attributes:
        alpha: The alpha of PGT.
        gaps: For each number of steps, the relative difference of the weights.
    """

    alpha: float
    gaps: Mapping[int, float]
