"""The cost of a row at full scale, from published training speeds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from powergrad.lab.paper.rows import load_paper
from powergrad.lab.trainer.recipe import Recipe


def examples_of(recipe: Recipe) -> int:
    """The number of training images of a row at full scale."""
    return 50_000 if recipe.data.name == "cifar10" else 1_281_167


@dataclass(frozen=True)
class Cost:
    """The training time of a recipe on one kind of GPU.

    Attributes:
        gpu: The GPU.
        hours: GPU hours; four GPUs use the same number in a quarter of the time.
        images_per_second: The training speed from which the hours are computed.
        how: How that speed was measured, and what was estimated.
        source: The source of the speed.
    """

    gpu: str
    hours: float
    images_per_second: float
    how: str
    source: str


def cost(recipe: Recipe) -> list[Cost]:
    """GPU hours of training for every GPU with a source, without tests and image loading.

    If a source has only ResNet-50, the speed of another network is estimated by its ratio to
    ResNet-50 in the table that has both. Networks without normalisation are assumed to be as fast
    as those with it, which gives an upper bound of their cost.

    Example:
        >>> recipe = load_paper().find("T1.2").baseline.recipe
        >>> [f"{part.gpu}: {part.hours:.1f}" for part in cost(recipe)]
        ['V100 16GB: 34.2', 'A100 80GB: 17.1', 'RTX 3090: 43.1']
    """
    network = recipe.model.name
    data = "imagenet" if recipe.data.name.startswith("folder:") else recipe.data.name
    tables = [table for table in load_paper().throughput if table.data == data]
    largest = max((table.networks for table in tables), key=len, default={})
    costs = []
    for table in tables:
        speed, how = table.networks.get(network), table.how
        if speed is None and network in largest:
            speed = table.networks["resnet50"] * largest[network] / largest["resnet50"]
            how += f"; {network} estimated by its ratio to resnet50 on the RTX 3090"
        if speed is None:
            continue
        if recipe.model.norm == "none":
            how += "; with normalisation, so an upper bound"
        hours = recipe.train.epochs * examples_of(recipe) / speed / 3600
        costs.append(Cost(table.gpu, hours, speed, how, table.source))
    return costs


def total_hours(recipes: Iterable[Recipe]) -> dict[str, float]:
    """GPU hours of several recipes by GPU; a recipe that occurs twice is counted once."""
    hours: dict[str, float] = {}
    for recipe in {recipe.key: recipe for recipe in recipes}.values():
        for part in cost(recipe):
            hours[part.gpu] = hours.get(part.gpu, 0.0) + part.hours
    return hours
