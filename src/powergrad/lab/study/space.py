"""The search space of a tuning: keys, and a list or a logarithmic range of values for each.

All commands use the same grammar: ``lr=0.1,0.2,0.4`` is a list, ``lr=0.006:0.4`` is a range on a
logarithmic scale, and ``lr`` alone means five values around that of the recipe. ``ARM: key=...``
adds a key for one arm only.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from powergrad.lab.study.arms import expand_key, parse_values
from powergrad.lab.trainer.recipe import RecipeError, parse_overrides, suggest_key
from powergrad.lab.words import did_you_mean

OUTER = 0.1  # the fraction at either end of a range that counts as its edge
TRIALS = 6  # the default number of points per arm if a range is tuned

Point = dict[str, Any]


@dataclass(frozen=True)
class Axis:
    """A dotted key and the values to try for it: a list, or a range from `low` to `high`."""

    key: str
    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0

    @classmethod
    def parse(cls, text: str, own: Any = None, expand: Callable[[str], str] = expand_key) -> Axis:
        """Parse an axis such as ``lr=0.006:0.4``, ``lr=0.1,0.2`` or ``lr``."""
        name, equals, given = text.partition("=")
        key = expand(name.strip())
        if not equals:
            if not isinstance(own, (int, float)) or isinstance(own, bool) or own == 0:
                raise RecipeError(
                    f"Expected the values to try for {key!r}, such as {key}=0.1,0.2 or "
                    f"{key}=0.01:1, because its default is {own!r}, but got none."
                )
            return cls(key, tuple(own * factor for factor in (0.25, 0.5, 1, 2, 4)))
        first, colon, last = given.partition(":")
        if not colon:
            if not given:
                raise RecipeError(f"Expected values such as {name}=0.1,0.2, but got {text!r}.")
            return cls(key, parse_values(name.strip(), given))
        try:
            low, high = float(first), float(last)
        except ValueError:
            low = high = math.nan
        if not 0 < low < high < math.inf:
            raise RecipeError(f"Expected {name}=low:high with 0 < low < high, but got {given!r}.")
        return cls(key, (), low, high)

    @property
    def is_range(self) -> bool:
        return not self.values

    def at(self, place: float) -> Any:
        """The value at a position from 0 to 1."""
        if self.values:
            return self.values[min(int(place * len(self.values)), len(self.values) - 1)]
        exact = math.exp(math.log(self.low) + place * math.log(self.high / self.low))
        return float(f"{exact:.6g}")  # rounded, so that it can be typed

    def is_edge(self, value: Any) -> bool:
        """Whether a value is an end of the list, or in the outer tenth of the range."""
        if self.is_range:
            place = math.log(value / self.low) / math.log(self.high / self.low)
            return not OUTER <= place <= 1 - OUTER
        numbers = [v for v in self.values if isinstance(v, (int, float))]
        return len(numbers) > 1 and value in (min(numbers), max(numbers))


@dataclass(frozen=True)
class Space:
    """The keys that are tuned for every arm, and those for single arms."""

    shared: tuple[Axis, ...]
    own: Mapping[str, tuple[Axis, ...]]
    trials: int | None  # points per arm and repeat; None for all combinations of lists
    seed: int = 0  # of the random points

    @classmethod
    def parse(
        cls,
        texts: Sequence[str],
        values: Mapping[str, Any],
        arms: Sequence[str],
        trials: int | None = None,
        seed: int = 0,
        expand: Callable[[str], str] = expand_key,
    ) -> Space:
        """Parse the values of ``--tune``."""
        shared: list[Axis] = []
        own: dict[str, list[Axis]] = {}
        for text in texts:
            arm, colon, rest = text.partition(": ")
            for part in (rest if colon else text).split():
                key = expand(part.partition("=")[0])
                if key not in values:
                    near = suggest_key(key) if "loss.alpha" in values else did_you_mean(key, values)
                    raise RecipeError(f"Expected --tune with a known key, but got {key!r}{near}")
                target = own.setdefault(arm.strip(), []) if colon else shared
                target.append(Axis.parse(part, values[key], expand))
        for arm in own.keys() - set(arms):
            listed = ", ".join(arms)
            raise RecipeError(f"Expected --tune with an arm of {listed}, but got {arm!r}.")
        space = cls(tuple(shared), {arm: tuple(axes) for arm, axes in own.items()}, trials, seed)
        for arm in arms:
            keys = [axis.key for axis in space.axes(arm)]
            if not keys:
                raise RecipeError(f"Expected --tune keys for every arm, but got none for {arm}.")
            if len(set(keys)) < len(keys):
                raise RecipeError(f"Expected each key of --tune once, but got {', '.join(keys)}.")
        if trials is not None and trials < 2:
            raise RecipeError(f"Expected --trials to be at least 2, but got {trials}.")
        has_range = any(axis.is_range for axis in space._all_axes())
        return replace(space, trials=TRIALS) if has_range and trials is None else space

    def axes(self, arm: str) -> tuple[Axis, ...]:
        """The axes of an arm, the shared ones first."""
        return (*self.shared, *self.own.get(arm, ()))

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(axis.key for axis in self._all_axes()))

    def points(self, arm: str, repeat: int) -> list[Point]:
        """The points to try for an arm in a repeat, without duplicates.

        All arms have the same points in the keys that are tuned for all arms. A key that is tuned
        for some arms has values of its own for each of them. Random points are a Sobol sequence
        with another scrambling per repeat, so each repeat covers the whole space with different
        points.
        """
        axes = self.axes(arm)
        if self.trials is None:
            rows = itertools.product(*(axis.values for axis in axes))
        else:
            columns = {id(axis): place for place, axis in enumerate(self._all_axes())}
            places = _sobol(len(columns), self.trials, [self.seed, repeat])
            rows = ([axis.at(row[columns[id(axis)]]) for axis in axes] for row in places)
        points = [{a.key: v for a, v in zip(axes, values, strict=True)} for values in rows]
        return [point for i, point in enumerate(points) if point not in points[:i]]

    def _all_axes(self) -> Iterator[Axis]:
        """Every axis, the shared ones first; each is a dimension of the Sobol sequence."""
        return itertools.chain(self.shared, *self.own.values())

    def edges(self, arm: str, point: Mapping[str, Any]) -> tuple[str, ...]:
        """The keys whose value in `point` is at the edge of the values to try."""
        return tuple(axis.key for axis in self.axes(arm) if axis.is_edge(point[axis.key]))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for study.yaml."""

        def described(axes: Sequence[Axis]) -> dict[str, Any]:
            return {a.key: f"{a.low:g}:{a.high:g}" if a.is_range else list(a.values) for a in axes}

        own = {arm: described(axes) for arm, axes in self.own.items()}
        return {"keys": described(self.shared), "own": own, "trials": self.trials}


def _sobol(dimensions: int, trials: int, seed: Sequence[int]) -> list[list[float]]:
    from scipy.stats import qmc  # slow to import

    with warnings.catch_warnings():  # about a number of points that is not a power of two
        warnings.simplefilter("ignore", UserWarning)
        sampler = qmc.Sobol(dimensions, scramble=True, rng=np.random.default_rng(seed))
        return sampler.random(trials).tolist()


def split_overrides(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate the values of ``--tune`` from overrides (single values) that follow it."""
    tuned, changes = [], []
    for text in texts:
        name, equals, given = text.partition("=")
        is_change = equals and ": " not in name and not {",", ":"} & set(given)
        if is_change:
            parse_overrides([text])  # raises if it is not an override
        (changes if is_change else tuned).append(text)
    return tuned, changes
