"""Runs that train a recipe."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from typing_extensions import Self

from powergrad.lab.runs.jobs import Changes, Job, Program, check_distinct
from powergrad.lab.trainer.recipe import Recipe, RecipeError
from powergrad.lab.trainer.run_folder import Result, Run


class RecipeProgram(Program):
    """A recipe that every arm changes; the fingerprint is that of a folder of images."""

    hold_out: ClassVar[float] = 0.2
    kind: Literal["recipe"] = "recipe"
    base: Recipe

    @classmethod
    def of(cls, base: Recipe) -> Self:
        """The program of a recipe, with the current fingerprint of its data."""
        return cls(base=base, fingerprint=base.folder_fingerprint())

    @property
    def key(self) -> str:
        return self.base.override({"seed": 0}).key

    @property
    def data_name(self) -> str:
        return self.base.data.title

    @property
    def title(self) -> str:
        return f"{self.base.model.name} on {self.base.data.title}"

    def changed_since(self, earlier: Program) -> str:
        return super().changed_since(earlier) and f"The images of {self.title} have changed"

    def recipe(self, changes: Changes, seed: int) -> Recipe:
        """The recipe of one run."""
        return self.base.override({**changes, "seed": seed})

    def identity(self, arm: str, changes: Changes, seed: int) -> str:
        recipe = self.recipe(changes, seed)
        if not self.fingerprint:
            return recipe.key
        # The fingerprint identifies the images, so the name does not depend on their path, which
        # study.json does not have.
        return f"{recipe.without_paths().key}-{self.fingerprint.partition(':')[2][:8]}"

    def execute(self, job: Job, folder: Path) -> Result:
        from powergrad.lab.trainer.training import train  # imports torch, which is slow

        result = train(self.recipe(job.changes, job.seed), folder / job.name).result()
        assert result is not None  # train returns finished runs
        return result

    def progress(self, job: Job, folder: Path) -> float:
        rows = Run(folder / job.name).metrics()
        epochs = job.changes.get("train.epochs", self.base.train.epochs)
        return (rows[-1]["epoch"] or 0) / epochs if rows else 0.0

    def alpha(self, changes: Changes) -> float:
        return changes.get("loss.alpha", self.base.loss.alpha)

    def check_arms(self, arms: Mapping[str, Changes]) -> None:
        recipes = {arm: self.recipe(changes, 0) for arm, changes in arms.items()}
        check_distinct({arm: recipe.key for arm, recipe in recipes.items()})
        tested_on = {(recipe.data.name, recipe.data.hold_out) for recipe in recipes.values()}
        if len(tested_on) > 1:
            wanted = "Expected all arms to be tested on the same examples"
            raise RecipeError(f"{wanted}, but got arms with other data.name or data.hold_out.")

    def check_tuning(self, *, by_identity: bool) -> None:
        clip = self.base.clip
        if by_identity and (clip.norm is not None or clip.value is not None):
            wanted = "Expected no clipping by norm or value with --tune-map identity"
            reason = "because it does not preserve the training of the backbone"
            raise RecipeError(f"{wanted}, {reason}, but got some.")
        if self.base.data.hold_out:
            wanted = "Expected data.hold_out to be 0 with --tune, which holds out its own data"
            raise RecipeError(f"{wanted}, but got {self.base.data.hold_out:g}.")

    def at_point(self, changes: Changes, point: Changes, shared: Collection[str]) -> dict[str, Any]:
        # If an arm sets a shared key itself, such as less-decay the decay, its value is scaled by
        # the same factor as that of the recipe.
        chosen: dict[str, Any] = {}
        for key, value in point.items():
            own = self.base.value(key)
            is_scaled = key in shared and key in changes and isinstance(own, (int, float)) and own
            chosen[key] = changes[key] * value / own if is_scaled else value
        return chosen

    def in_trial(self, changes: Changes) -> Changes:
        return {**changes, "data.hold_out": self.hold_out}

    def public(self) -> RecipeProgram:
        return self.model_copy(update={"base": self.base.without_paths()})
