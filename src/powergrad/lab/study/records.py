"""What a study records beside its runs: how arms were tuned, a grid, a decomposition."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from typing_extensions import Self

from powergrad.lab.words import number, short_key

__all__ = ["Decomposition", "Grid", "TriedValue", "TunedArm", "Tuning"]


@dataclass(frozen=True)
class TriedValue:
    """A value that was tried for an arm, and the mean of the metric there."""

    value: Any
    mean: float


@dataclass(frozen=True)
class TunedArm:
    """What was chosen for one arm."""

    chosen: Any
    at_edge: bool
    means: tuple[TriedValue, ...]


@dataclass(frozen=True)
class Tuning:
    """How a key was tuned for every arm.

    Attributes:
        key: The dotted key.
        seeds: The seeds of every trial.
        hold_out: The fraction of the training data on which the arms were judged.
        arms: What was tried and chosen, by arm.
    """

    key: str
    seeds: tuple[int, ...]
    hold_out: float
    arms: Mapping[str, TunedArm]

    def describe(self, arm: str) -> str:
        """One arm's choice in a line."""
        tuned = self.arms[arm]
        means = ", ".join(f"{number(tried.value)}: {tried.mean:.2f}" for tried in tuned.means)
        edge = "; at the edge of the grid" if tuned.at_edge else ""
        return f"{arm}: {self.key} = {number(tuned.chosen)} ({means}{edge})"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What :meth:`to_dict` wrote."""
        arms = {
            arm: TunedArm(
                tuned["chosen"],
                tuned["at_edge"],
                tuple(TriedValue(tried["value"], tried["mean"]) for tried in tuned["means"]),
            )
            for arm, tuned in values["arms"].items()
        }
        return cls(values["key"], tuple(values["seeds"]), values["hold_out"], arms)


@dataclass(frozen=True)
class Grid:
    """Keys and the values that each takes."""

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
        """Whether the first key takes numbers only, so that it can be an axis."""
        return all(isinstance(value, (int, float)) for value in next(iter(self.values.values())))


@dataclass(frozen=True)
class Decomposition:
    """That PGT and the equal two-group training are the same, as far as was checked.

    Attributes:
        alpha: PGT's alpha.
        gaps: By the number of steps, how far the weights of the two are apart.
    """

    alpha: float
    gaps: Mapping[int, float]
