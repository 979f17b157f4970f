"""Runs that train a recipe."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from typing_extensions import Self, override

from powergrad.lab.runs.jobs import Changes, Job, Program
from powergrad.lab.trainer.recipe import Recipe, RecipeError
from powergrad.lab.trainer.run_folder import Result, Run
from powergrad.lab.trainer.training import train
from powergrad.lab.words import slug


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
    def job(self, arm: str, changes: Changes, seed: int) -> Job:
        key = self.recipe(changes, seed).key
        data = f"-{self.fingerprint.partition(':')[2][:8]}" if self.fingerprint else ""
        return Job(f"{slug(arm)[:40]}-seed{seed}-{key}{data}", arm, seed, changes, self)

    @override
    def execute(self, job: Job, folder: Path) -> Result:
        result = train(self.recipe(job.changes, job.seed), folder / job.name).result()
        assert result is not None  # train returns finished runs
        return result

    @override
    def progress(self, job: Job, folder: Path) -> float:
        rows = Run(folder / job.name).metrics()
        epochs = job.changes.get("train.epochs", self.base.train.epochs)
        return (rows[-1]["epoch"] or 0) / epochs if rows else 0.0

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
    def public(self) -> RecipeProgram:
        return self.model_copy(update={"base": self.base.without_paths()})
