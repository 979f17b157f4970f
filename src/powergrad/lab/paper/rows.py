"""The paper's rows and figures, from ``published.yaml``, and the recipe of each row."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import yaml

from powergrad.lab.trainer.recipe import Recipe, RecipeError, flatten
from powergrad.lab.words import did_you_mean


@dataclass(frozen=True)
class Unstated:
    """A detail that the paper does not state, and the choice made here."""

    what: str
    reason: str
    about: tuple[str, ...]
    choice: Mapping[str, Any] = field(default_factory=dict)  # empty if it is a default


@dataclass(frozen=True)
class Note:
    """A contradiction in the paper, or between the paper and the authors' code."""

    id: str
    text: str
    about: tuple[str, ...]


@dataclass(frozen=True)
class PrintedNumber:
    """A number that the paper prints outside its tables."""

    id: str
    where: str
    what: str
    value: float


@dataclass(frozen=True)
class Throughput:
    """Published training speeds on one kind of GPU, in images per second by network."""

    gpu: str
    source: str
    how: str
    networks: Mapping[str, float]
    data: str = "imagenet"


@dataclass(frozen=True)
class Use:
    """The runs in a figure: those of one arm, or of a whole experiment.

    Example:
        >>> Use.parse("T2-256/AGC + PGT")
        Use(experiment='T2-256', arm='AGC + PGT')
        >>> str(Use("G18"))
        'G18'
    """

    experiment: str
    arm: str | None = None

    @classmethod
    def parse(cls, text: str) -> Use:
        """Parse a use as in ``published.yaml``."""
        experiment, _, arm = text.partition("/")
        return cls(experiment, arm or None)

    def __str__(self) -> str:
        return self.experiment if self.arm is None else f"{self.experiment}/{self.arm}"


@dataclass(frozen=True)
class Row:
    """One training of the paper.

    Attributes:
        id: The id of its table row, or of its experiment.
        arm: Its name among the compared rows.
        stated: The values stated in the paper, as dotted keys, including the common recipe.
        chosen: The values that the paper does not state.
        published: ``train``, ``test`` and ``gap``, if printed.
    """

    id: str
    arm: str
    stated: Mapping[str, Any]
    chosen: Mapping[str, Any]
    published: Mapping[str, float]

    @functools.cached_property
    def recipe(self) -> Recipe:
        """The recipe of the row, at full scale."""
        return Recipe().override({**self.chosen, **self.stated})

    @property
    def published_text(self) -> str:
        """The printed numbers as text."""
        numbers = [f"{key} {value:g}" for key, value in self.published.items()]
        return ", ".join(numbers) or "no number printed"


@dataclass(frozen=True)
class Experiment:
    """Rows that are compared with each other; the first is the baseline."""

    id: str
    where: str
    title: str
    rows: tuple[Row, ...]
    grid: tuple[float, ...] = ()

    @property
    def baseline(self) -> Row:
        """The row with which the others are compared."""
        return self.rows[0]

    def row(self, arm: str) -> Row:
        """The row of an arm."""
        rows = {row.arm: row for row in self.rows}
        if arm not in rows:
            raise RecipeError(
                f"Expected an arm of {self.id} ({', '.join(rows)}), but got {arm!r}"
                f"{did_you_mean(arm, rows)}"
            )
        return rows[arm]

    def own_rows(self, item: str) -> list[Row]:
        """The rows of an id, without the baseline unless it is one of them."""
        return [row for row in self.rows if item in (row.id, self.id)]

    def with_baseline(self, item: str) -> list[Row]:
        """The rows of an id, after the baseline."""
        return [row for row in self.rows if row is self.baseline or item in (row.id, self.id)]


@dataclass(frozen=True)
class Figure:
    """A figure of the paper."""

    id: str  # F1 to F17, by its place
    name: str  # its label in the source, or ours if it has none
    title: str
    uses: tuple[Use, ...]  # the runs that it shows


@dataclass(frozen=True)
class Paper:
    """Everything in ``published.yaml``."""

    title: str
    experiments: tuple[Experiment, ...]
    figures: tuple[Figure, ...]
    unstated: tuple[Unstated, ...]
    notes: tuple[Note, ...]
    numbers: tuple[PrintedNumber, ...]
    throughput: tuple[Throughput, ...]

    @property
    def rows(self) -> list[Row]:
        """Every row of every experiment."""
        return [row for experiment in self.experiments for row in experiment.rows]

    def items(self) -> list[tuple[str, Experiment]]:
        """The id of every row, pair, run and grid, with its experiment, in printed order."""
        items: dict[str, Experiment] = {}
        for experiment in self.experiments:
            for row in experiment.rows:
                items.setdefault(row.id, experiment)
        return list(items.items())

    def find(self, item: str) -> Experiment:
        """The experiment of an item, or of its own id."""
        for experiment in self.experiments:
            if experiment.own_rows(item):
                return experiment
        wrong = f"Expected a trainable item of `powergrad paper list`, but got {item!r}"
        if self.figure(item) is not None:
            raise RecipeError(
                f"{wrong}, a figure; draw it with `powergrad paper figure {item} --out DIR`."
            )
        known = [name for item, experiment in self.items() for name in (item, experiment.id)]
        raise RecipeError(f"{wrong}{did_you_mean(item, known)}")

    def figure(self, item: str) -> Figure | None:
        """The figure of an id or a name; None if there is none."""
        return next((figure for figure in self.figures if item in (figure.id, figure.name)), None)

    def about(self, item: str) -> tuple[list[Note], list[Unstated]]:
        """The notes on an item or a figure, and its unstated details."""
        figure = self.figure(item)
        if figure is not None:
            names = {figure.id, figure.name}
        else:
            experiment = self.find(item)
            rows = experiment.with_baseline(item)
            names = {item, *(row.id for row in rows[1:])}
            names = names.union(*(_names(experiment.id, item, row.arm) for row in rows))
        return (
            [note for note in self.notes if names & set(note.about)],
            [unstated for unstated in self.unstated if names & set(unstated.about)],
        )

    def number(self, name: str) -> float:
        """A number that is printed outside the tables."""
        return next(number.value for number in self.numbers if number.id == name)


def _names(experiment: str, row: str, arm: str) -> set[str]:
    """The names of a row in the field `about` of ``published.yaml``."""
    return {"all", experiment, row, str(Use(experiment, arm))}


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
        Unstated(**{**values, "about": tuple(values["about"])}) for values in raw["unstated"]
    )
    return Paper(
        title=raw["title"],
        experiments=tuple(
            _experiment(values, raw["common"], unstated) for values in raw["experiments"]
        ),
        figures=tuple(
            Figure(**{**values, "uses": tuple(map(Use.parse, values["uses"]))})
            for values in raw["figures"]
        ),
        unstated=unstated,
        notes=tuple(Note(**{**values, "about": tuple(values["about"])}) for values in raw["notes"]),
        numbers=tuple(PrintedNumber(**values) for values in raw["numbers"]),
        throughput=tuple(Throughput(**values) for values in raw["throughput"]),
    )


def _experiment(
    raw: Mapping[str, Any], common: Mapping[str, Any], unstated: Iterable[Unstated]
) -> Experiment:
    grid = tuple(raw.get("grid", ()))
    listed = raw.get("rows") or [
        {"arm": f"alpha={alpha:g}", "recipe": {"loss.alpha": alpha}} for alpha in grid
    ]
    rows = []
    for values in listed:
        item, arm = values.get("id", raw["id"]), values["arm"]
        names = _names(raw["id"], item, arm)
        choices = [missing.choice for missing in unstated if names & set(missing.about)]
        chosen = {key: value for choice in choices for key, value in choice.items()}
        recipe = {**common, **raw["recipe"], **values.get("recipe", {})}
        stated = {key: value for key, value in recipe.items() if key not in chosen}
        published = {key: values[key] for key in ("train", "test", "gap") if key in values}
        rows.append(Row(item, arm, stated, chosen, published))
    return Experiment(raw["id"], raw["where"], raw["title"], tuple(rows), grid)


def changes_of(recipe: Recipe, base: Recipe) -> dict[str, Any]:
    """The dotted keys in which `recipe` differs from `base`.

    Example:
        >>> changes_of(Recipe().override({"loss.alpha": 0.3, "seed": 4}), Recipe())
        {'loss.alpha': 0.3, 'seed': 4}
    """
    before = dict(flatten(base.model_dump(mode="json")))
    after = dict(flatten(recipe.model_dump(mode="json")))
    return {key: value for key, value in after.items() if value != before[key]}
