"""The paper's rows and figures, from ``published.yaml``, and the recipe of each row."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import yaml

from powergrad.lab.config import Recipe, RecipeError, did_you_mean, flatten

__all__ = ["Experiment", "Figure", "Paper", "Row", "Unstated", "changes_of", "load_paper"]


@dataclass(frozen=True)
class Unstated:
    """What the paper does not say.

    Attributes:
        what: What is missing.
        choice: What the recipe has for it, as dotted keys; empty where that is a default.
        reason: Why.
        about: Ids that it concerns.
    """

    what: str
    reason: str
    about: tuple[str, ...]
    choice: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Note:
    """Where the paper disagrees with itself, or with the authors' code."""

    id: str
    text: str
    about: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One training of the paper.

    Attributes:
        id: The id of its table row, or of its experiment.
        arm: Its name among those that it is compared with.
        stated: What the paper says of it, as dotted keys, the common recipe included.
        chosen: What the paper does not say of it.
        published: ``train``, ``test`` and ``gap``, as far as they were printed.
    """

    id: str
    arm: str
    stated: Mapping[str, Any]
    chosen: Mapping[str, Any]
    published: Mapping[str, float]

    @property
    def recipe(self) -> Recipe:
        """The recipe of the row, at full scale."""
        return Recipe().override({**self.chosen, **self.stated})


@dataclass(frozen=True)
class Experiment:
    """Rows that are compared with each other; the first is what the others are held to."""

    id: str
    where: str
    title: str
    rows: tuple[Row, ...]
    grid: tuple[float, ...] = ()

    def row(self, arm: str) -> Row:
        """The row of an arm."""
        for row in self.rows:
            if row.arm == arm:
                return row
        arms = [row.arm for row in self.rows]
        raise RecipeError(
            f"Expected an arm of {self.id} ({', '.join(arms)}), but got {arm!r}"
            f"{did_you_mean(arm, arms)}"
        )

    def pick(self, item: str) -> tuple[Row, ...]:
        """The rows of an id, after the row that they are held to."""
        return tuple(row for row in self.rows if row is self.rows[0] or item in (row.id, self.id))


@dataclass(frozen=True)
class Figure:
    """A figure of the paper.

    Attributes:
        id: ``F1`` to ``F17``, by its place.
        name: Its label in the source, or ours where it has none.
        title: What it shows.
        uses: The experiments (``G18``) or arms (``T2-256/PGT``) whose runs it draws.
    """

    id: str
    name: str
    title: str
    uses: tuple[str, ...]


@dataclass(frozen=True)
class Paper:
    """Everything in ``published.yaml``."""

    title: str
    code: str
    common: Mapping[str, Any]
    experiments: tuple[Experiment, ...]
    figures: tuple[Figure, ...]
    unstated: tuple[Unstated, ...]
    notes: tuple[Note, ...]
    claims: tuple[Mapping[str, Any], ...]
    throughput: tuple[Mapping[str, Any], ...]

    def items(self) -> list[tuple[str, Experiment]]:
        """The id of every row, pair, run and grid, with its experiment, in printed order."""
        found: dict[str, Experiment] = {}
        for experiment in self.experiments:
            for row in experiment.rows:
                found.setdefault(row.id, experiment)
        return list(found.items())

    def ids(self) -> list[str]:
        """What can be asked for: items, then figures."""
        return [*(item for item, _ in self.items()), *(figure.id for figure in self.figures)]

    def find(self, item: str) -> Experiment:
        """The experiment of an item, or of its own id.

        Raises:
            RecipeError: If there is none.
        """
        for experiment in self.experiments:
            if item == experiment.id or any(item == row.id for row in experiment.rows):
                return experiment
        if self.figure(item) is not None:
            raise RecipeError(
                f"Expected an item of `powergrad paper list` that trains, but got {item!r}, a "
                f"figure: `powergrad paper figure {item} --out DIR` draws it."
            )
        known = [item for item, _ in self.items()]
        known += [experiment.id for experiment in self.experiments]
        raise RecipeError(
            f"Expected an item of `powergrad paper list` that trains, but got {item!r}"
            f"{did_you_mean(item, known)}"
        )

    def figure(self, item: str) -> Figure | None:
        """The figure of an id or a name; None where it is neither."""
        return next((each for each in self.figures if item in (each.id, each.name)), None)

    def about(self, item: str) -> tuple[list[Note], list[Unstated]]:
        """The notes on an item or a figure, and what is unstated of it."""
        figure = self.figure(item)
        if figure is not None:
            names = {figure.id, figure.name}
        else:
            experiment = self.find(item)
            names = {"all", item, experiment.id, *(r.id for r in experiment.pick(item)[1:])}
            names |= {f"{experiment.id}/{row.arm}" for row in experiment.pick(item)}
        return (
            [note for note in self.notes if names & set(note.about)],
            [each for each in self.unstated if names & set(each.about)],
        )


@functools.cache
def load_paper() -> Paper:
    """The paper.

    Example:
        >>> paper = load_paper()
        >>> row = paper.find("T2.10").row("AGC + PGT")
        >>> row.published["test"], row.recipe.loss.alpha, row.recipe.train.batch_size
        (68.856, 0.25, 256)
        >>> len(paper.figures)
        17
    """
    text = resources.files("powergrad.lab.paper").joinpath("published.yaml").read_text("utf-8")
    raw = yaml.safe_load(text)
    unstated = tuple(
        Unstated(each["what"], each["reason"], tuple(each["about"]), each.get("choice", {}))
        for each in raw["unstated"]
    )
    return Paper(
        title=raw["title"],
        code=raw["code"],
        common=raw["common"],
        experiments=tuple(
            _experiment(each, raw["common"], unstated) for each in raw["experiments"]
        ),
        figures=tuple(Figure(**{**each, "uses": tuple(each["uses"])}) for each in raw["figures"]),
        unstated=unstated,
        notes=tuple(Note(each["id"], each["text"], tuple(each["about"])) for each in raw["notes"]),
        claims=tuple(raw["claims"]),
        throughput=tuple(raw["throughput"]),
    )


def _experiment(
    raw: Mapping[str, Any], common: Mapping[str, Any], unstated: Iterable[Unstated]
) -> Experiment:
    grid = tuple(raw.get("grid", ()))
    listed = raw.get("rows") or [
        {"arm": f"alpha={alpha:g}", "recipe": {"loss.alpha": alpha}} for alpha in grid
    ]
    rows = []
    for each in listed:
        item = each.get("id", raw["id"])
        names = {"all", raw["id"], item, f"{raw['id']}/{each['arm']}"}
        chosen: dict[str, Any] = {}
        for missing in unstated:
            if names & set(missing.about):
                chosen |= missing.choice
        stated = {**common, **raw["recipe"], **each.get("recipe", {})}
        for key in chosen:  # what the common recipe says is not said of these
            stated.pop(key, None)
        published = {key: each[key] for key in ("train", "test", "gap") if key in each}
        rows.append(Row(item, each["arm"], stated, chosen, published))
    return Experiment(raw["id"], raw["where"], raw["title"], tuple(rows), grid)


def changes_of(recipe: Recipe, base: Recipe | None = None) -> dict[str, Any]:
    """The dotted keys in which `recipe` differs from `base`, the defaults by default.

    Example:
        >>> changes_of(Recipe().override({"loss.alpha": 0.3, "seed": 4}))
        {'loss.alpha': 0.3, 'seed': 4}
    """
    before = dict(flatten((base or Recipe()).model_dump(mode="json")))
    after = dict(flatten(recipe.model_dump(mode="json")))
    return {key: value for key, value in after.items() if value != before[key]}
