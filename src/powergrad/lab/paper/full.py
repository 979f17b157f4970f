"""Rows at full scale: trained once, as in the paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from powergrad.lab.data import load_data
from powergrad.lab.paper.cost import examples_of
from powergrad.lab.paper.evidence import Conditions
from powergrad.lab.paper.rows import Row, changes_of
from powergrad.lab.paper.small import decay_exponent
from powergrad.lab.trainer.recipe import Recipe

# Keys that may differ from the paper without being a departure from it.
FREE = ("data.name", "seed", "machine.", "monitor.", "train.accumulate")


def full_recipes(
    rows: Sequence[Row], data: str | None, changes: Mapping[str, Any], seed: int
) -> dict[str, Recipe]:
    """The recipe of every arm, at full scale."""
    given: dict[str, Any] = {} if data is None else {"data.name": data}
    if rows[0].recipe.model.norm == "none":  # for the figures of zeroing out
        given |= {"monitor.every": 1000, "monitor.features": True}
    return {row.arm: row.recipe.override({**given, "seed": seed, **changes}) for row in rows}


def full_conditions(rows: Sequence[Row], recipes: Mapping[str, Recipe], command: str) -> Conditions:
    """The conditions of these runs; the data are loaded to count them."""
    first = recipes[rows[0].arm]
    examples = len(load_data(first.data, data_dir=first.machine.data_dir).train)
    return Conditions(
        first.data.name,
        examples,
        "full",
        {arm: decay_exponent(recipe, examples) for arm, recipe in recipes.items()},
        _departures(rows[0].recipe, first, examples),
        [command],
    )


def _departures(stated: Recipe, recipe: Recipe, examples: int) -> list[str]:
    """The departures of a run from its row: its data and overrides."""
    changes = changes_of(recipe, stated)
    lost = [f"{key}: {value}" for key, value in changes.items() if not key.startswith(FREE)]
    if examples != examples_of(stated):
        lost.insert(0, f"the data: {examples:,} examples ({recipe.data.name})")
    return lost
