"""The paper's rows and figures, from ``published.yaml``: recipes, printed numbers, cost."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict

from powergrad.lab.trainer.recipe import Recipe, RecipeError, flatten
from powergrad.lab.words import did_you_mean


class Entry(BaseModel):
    """An entry of ``published.yaml``."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Unstated(Entry):
    """A detail that the paper does not state, and the choice made here."""

    what: str
    reason: str
    about: Sequence[str]
    choice: Mapping[str, Any] = {}  # empty if it is a default


class Note(Entry):
    """A contradiction in the paper, or between the paper and the authors' code."""

    id: str
    about: Sequence[str]
    text: str


class Use(NamedTuple):
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
        experiment, _, arm = text.partition("/")
        return cls(experiment, arm or None)

    def __str__(self) -> str:
        return self.experiment if self.arm is None else f"{self.experiment}/{self.arm}"


@dataclass(frozen=True)
class Row:
    """One training of the paper."""

    id: str  # of its table row, or of its experiment
    arm: str  # its name among the compared rows
    stated: Mapping[str, Any]  # in the paper, as dotted keys, including the common recipe
    chosen: Mapping[str, Any]  # what the paper does not state
    published: Mapping[str, float]  # train, test and gap, if printed

    @functools.cached_property
    def recipe(self) -> Recipe:
        """The recipe of the row, at full scale."""
        return Recipe().override({**self.chosen, **self.stated})

    @property
    def published_text(self) -> str:
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
        return self.rows[0]

    def row(self, arm: str) -> Row:
        return next(row for row in self.rows if row.arm == arm)

    def own_rows(self, item: str) -> list[Row]:
        """The rows of an id, without the baseline unless it is one of them."""
        return [row for row in self.rows if item in (row.id, self.id)]

    def with_baseline(self, item: str) -> list[Row]:
        """The rows of an id, after the baseline."""
        return [row for row in self.rows if row is self.baseline or item in (row.id, self.id)]


class Figure(Entry):
    """A figure of the paper."""

    id: str  # F1 to F17, by its place
    name: str  # its label in the source, or ours if it has none
    title: str
    uses: tuple[Annotated[Use, BeforeValidator(Use.parse)], ...]  # the runs that it shows


Names = Annotated[frozenset[str], BeforeValidator(lambda text: text.split(" + "))]


class Claim(Entry):
    """That an arm with some methods does better than one with others.

    A control is what an arm without PGT does that may explain the gain. PGT is compared with it,
    too; these comparisons are not counted as confirmation.
    """

    id: str
    title: str
    methods: Names  # of the arm
    norm: str | None = None  # the normalisation of the networks; None for all
    against: Names = frozenset()  # of the other arm; none for the baseline
    alpha: float | None = None  # of the arm, where the claim is about one
    holds: Names = frozenset({"better"})  # the verdicts that confirm it
    metric: str = "test"  # or train, or gap: train minus test
    published: str = ""  # if it is no difference within a part of a table
    control: Names = frozenset()


class Throughput(Entry):
    """Published training speeds on one kind of GPU, in images per second by network."""

    gpu: str
    source: str
    how: str
    networks: Mapping[str, float]
    data: str = "imagenet"


@dataclass(frozen=True)
class Paper:
    """Everything in ``published.yaml``."""

    title: str
    experiments: tuple[Experiment, ...]
    figures: tuple[Figure, ...]
    unstated: tuple[Unstated, ...]
    notes: tuple[Note, ...]
    numbers: Mapping[str, float]  # printed outside the tables, by id
    throughput: tuple[Throughput, ...]
    claims: tuple[Claim, ...]

    def items(self) -> dict[str, Experiment]:
        """The id of every row, pair, run and grid, with its experiment, in printed order."""
        return {row.id: experiment for experiment in self.experiments for row in experiment.rows}

    def find(self, item: str) -> Experiment:
        """The experiment of an item, or of its own id."""
        for experiment in self.experiments:
            if experiment.own_rows(item):
                return experiment
        wrong = f"Expected a trainable item of `python -m reproduction list`, but got {item!r}"
        if self.figure(item) is not None:
            raise RecipeError(f"{wrong}, a figure; draw it with `figure {item} --out DIR`.")
        known = {*self.items(), *(experiment.id for experiment in self.experiments)}
        raise RecipeError(f"{wrong}{did_you_mean(item, sorted(known))}")

    def figure(self, item: str) -> Figure | None:
        """The figure of an id or a name; None if there is none."""
        return next((figure for figure in self.figures if item in (figure.id, figure.name)), None)

    def about(self, item: str) -> tuple[list[Note], list[Unstated]]:
        """The notes on an item or a figure, and its unstated details."""
        if figure := self.figure(item):
            names = {figure.id, figure.name}
        else:
            experiment = self.find(item)
            first, *others = experiment.with_baseline(item)
            names = _names(experiment.id, item, first.arm)
            names = names.union(*(_names(experiment.id, row.id, row.arm) for row in others))
        notes = [note for note in self.notes if names & set(note.about)]
        return notes, [missing for missing in self.unstated if names & set(missing.about)]


def _names(experiment: str, row: str, arm: str) -> set[str]:
    """The names of a row in the field `about` of ``published.yaml``."""
    return {"all", experiment, row, str(Use(experiment, arm))}


@functools.cache
def load_paper() -> Paper:
    """The paper.

    Example:
        >>> row = load_paper().find("T2.10").row("AGC + PGT")
        >>> row.published["test"], row.recipe.loss.alpha, row.recipe.train.batch_size
        (68.856, 0.25, 256)
    """
    raw = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text("utf-8"))
    unstated = tuple(Unstated(**values) for values in raw["unstated"])
    return Paper(
        raw["title"],
        tuple(_experiment(values, raw["common"], unstated) for values in raw["experiments"]),
        tuple(Figure(**values) for values in raw["figures"]),
        unstated,
        tuple(Note(**values) for values in raw["notes"]),
        {number["id"]: number["value"] for number in raw["numbers"]},
        tuple(Throughput(**values) for values in raw["throughput"]),
        tuple(Claim(**values) for values in raw["claims"]),
    )


def _experiment(
    raw: Mapping[str, Any], common: Mapping[str, Any], unstated: Iterable[Unstated]
) -> Experiment:
    grid = tuple(raw.get("grid", ()))
    points = [{"arm": f"alpha={alpha:g}", "recipe": {"loss.alpha": alpha}} for alpha in grid]
    rows = []
    for values in raw.get("rows", points):
        item, arm = values.get("id", raw["id"]), values["arm"]
        names = _names(raw["id"], item, arm)
        choices = [missing.choice for missing in unstated if names & set(missing.about)]
        chosen = {key: value for choice in choices for key, value in choice.items()}
        recipe = {**common, **raw["recipe"], **values.get("recipe", {})}
        stated = {key: value for key, value in recipe.items() if key not in chosen}
        printed = {key: values[key] for key in ("train", "test", "gap") if key in values}
        rows.append(Row(item, arm, stated, chosen, printed))
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


# Cost ---------------------------------------------------------------------------------------------


def examples_of(recipe: Recipe) -> int:
    """The number of training images of a row at full scale."""
    return 50_000 if recipe.data.name == "cifar10" else 1_281_167


def gpu_hours(recipes: Iterable[Recipe]) -> dict[str, float]:
    """Hours of training by GPU, without tests and image loading; equal recipes count once.

    If ``published.yaml`` has a GPU's speed for ResNet-50 only, that of another network is estimated
    by its ratio to ResNet-50 on the GPU that has both. Networks without normalisation are assumed
    to be as fast as those with it, which gives an upper bound.

    Example:
        >>> hours = gpu_hours([load_paper().find("T1.2").baseline.recipe])
        >>> [f"{gpu}: {value:.1f}" for gpu, value in hours.items()]
        ['V100 16GB: 34.2', 'A100 80GB: 17.1', 'RTX 3090: 43.1']
    """
    hours: dict[str, float] = {}
    for recipe in {recipe.key: recipe for recipe in recipes}.values():
        network, name = recipe.model.name, recipe.data.name
        data = "imagenet" if name.startswith("folder:") else name
        speeds = {t.gpu: t.networks for t in load_paper().throughput if t.data == data}
        largest = max(speeds.values(), key=len, default={})
        for gpu, known in speeds.items():
            if network not in largest:
                continue
            speed = known.get(network)
            if speed is None:
                speed = known["resnet50"] * largest[network] / largest["resnet50"]
            images = recipe.train.epochs * examples_of(recipe)
            hours[gpu] = hours.get(gpu, 0.0) + images / speed / 3600
    return hours
