"""Runs that train a recipe."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import Self, override

from powergrad.lab.jobs.job import Changes, Job, Program, merge_result
from powergrad.lab.trainer.recipe import Recipe, RecipeError
from powergrad.lab.trainer.run_folder import Run
from powergrad.lab.trainer.training import train
from powergrad.lab.words import slug


@dataclass(frozen=True)
class RecipeJob(Job):
    """The training of one recipe."""

    recipe: Recipe

    @override
    def execute(self, folder: Path) -> dict[str, Any]:
        result = train(self.recipe, folder / self.name).result()
        assert result is not None  # train returns finished runs
        return merge_result(result)

    @override
    def progress(self, folder: Path) -> float:
        rows = Run(folder / self.name).metrics()
        return (rows[-1]["epoch"] or 0) / self.recipe.train.epochs if rows else 0.0

    @override
    def to_dict(self) -> dict[str, Any]:
        recipe = self.recipe.model_dump(mode="json")
        return {"kind": "recipe", "name": self.name, "recipe": recipe}

    @classmethod
    @override
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(values["name"], Recipe.model_validate(values["recipe"]))


@dataclass(frozen=True)
class RecipeProgram(Program):
    """A recipe that every arm changes.

    Attributes:
        base: The recipe.
        fingerprint: The fingerprint of a folder of images; runs with changed data are not reused.
    """

    hold_out: ClassVar[float] = 0.2

    base: Recipe
    fingerprint: str = ""

    @classmethod
    def of(cls, base: Recipe) -> Self:
        """The program of a recipe, with the current fingerprint of its data."""
        return cls(base, base.folder_fingerprint())

    @property
    @override
    def key(self) -> str:
        return self.base.override({"seed": 0}).key

    @property
    @override
    def data_name(self) -> str:
        return self.base.data.title

    @property
    @override
    def title(self) -> str:
        return f"{self.base.model.name} on {self.base.data.title}"

    @property
    @override
    def changing(self) -> str:
        return f"The images of {self.title} have changed"

    def recipe(self, changes: Changes, seed: int) -> Recipe:
        """The recipe of one run."""
        return self.base.override({**changes, "seed": seed})

    @override
    def job(self, arm: str, changes: Changes, seed: int) -> RecipeJob:
        recipe = self.recipe(changes, seed)
        data = f"-{self.fingerprint.partition(':')[2][:8]}" if self.fingerprint else ""
        return RecipeJob(f"{slug(arm)[:40]}-seed{seed}-{recipe.key}{data}", recipe)

    @override
    def alpha(self, changes: Changes) -> float:
        return changes.get("loss.alpha", self.base.loss.alpha)

    @override
    def check_arms(self, arms: Mapping[str, Changes]) -> None:
        arm_by_key: dict[str, str] = {}
        tested_on = set()
        for arm, changes in arms.items():
            recipe = self.recipe(changes, 0)
            other = arm_by_key.setdefault(recipe.key, arm)
            if other != arm:
                raise RecipeError(
                    f"Expected arms that differ, but got {other!r} and {arm!r}, which are the same "
                    "run."
                )
            tested_on.add((recipe.data.name, recipe.data.hold_out))
        if len(tested_on) > 1:
            raise RecipeError(
                "Expected all arms to be tested on the same examples, but got arms that differ in "
                "data.name or data.hold_out."
            )

    @override
    def check_tuning(self, *, by_identity: bool) -> None:
        clip = self.base.clip
        if by_identity and (clip.norm is not None or clip.value is not None):
            raise RecipeError(
                "Expected no clipping by norm or value with --tune-map identity, because it does "
                "not preserve the training of the backbone, but got some."
            )
        if self.base.data.hold_out:
            raise RecipeError(
                "Expected data.hold_out to be 0 with --tune, which holds out its own data, but got "
                f"{self.base.data.hold_out:g}."
            )

    @override
    def at_point(self, changes: Changes, point: Changes, shared: Collection[str]) -> dict[str, Any]:
        # If an arm sets a shared key itself, such as less-decay the decay, its value is scaled by
        # the same factor as that of the recipe.
        chosen: dict[str, Any] = {}
        for key, value in point.items():
            own = self.base.value(key)
            is_scaled = key in shared and key in changes and isinstance(own, (int, float)) and own
            chosen[key] = changes[key] * value / own if is_scaled else value
        return chosen

    @override
    def in_trial(self, changes: Changes) -> Changes:
        return {**changes, "data.hold_out": self.hold_out}

    @override
    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = {
            "base": self.base.model_dump(mode="json", exclude={"machine", "seed"})
        }
        if self.fingerprint:
            values["data_fingerprint"] = self.fingerprint
        return values

    @classmethod
    @override
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(Recipe.model_validate(values["base"]), values.get("data_fingerprint", ""))
