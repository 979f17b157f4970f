"""The arms of a comparison: their names, and their changes of a recipe or command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from powergrad.lab.runs.commands import COMMAND, FLAGS, REF, VARIABLES
from powergrad.lab.study.records import Grid
from powergrad.lab.trainer.recipe import Recipe, RecipeError, Tuned, flatten, parse_overrides
from powergrad.lab.words import did_you_mean

Changes = dict[str, Any]
AGC = 0.01  # the threshold of Brock et al.
# In capitals, because programs have flags such as lr=0.1.
VARIABLE = re.compile(r"([A-Z_][A-Z0-9_]*)=(.*)", re.DOTALL)

SHORT = {
    "lr": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "head.lr": "optimizer.head.lr",
    "wd": "optimizer.weight_decay",
    "decay": "optimizer.weight_decay",
    "alpha": "loss.alpha",
    "epochs": "train.epochs",
    "batch": "train.batch_size",
    "width": "model.width",
    "norm": "model.norm",
    "smoothing": "loss.label_smoothing",
    "gc": "clip.norm",
    "agc": "clip.agc",
}


def expand_key(key: str) -> str:
    return SHORT.get(key, key)


# Methods ------------------------------------------------------------------------------------------


def _agc(recipe: Recipe, alpha: float) -> Changes:
    # The paper states no threshold; Brock et al. use 0.01. AGC limits the gradient of a unit to
    # `clip` times its weight, while decay subtracts `weight_decay` times its weight, so with a clip
    # below the decay every weight would vanish. Eight times the decay is enough: 0.16, the largest
    # clip that Brock et al. tried, is eight times 0.02.
    return {"clip.agc": max(AGC, 8 * recipe.optimizer.weight_decay)}


def _less_decay(recipe: Recipe, alpha: float) -> Changes:
    # By the identity, PGT multiplies the decay of the backbone by alpha (not with AdamW).
    if recipe.optimizer.weight_decay == 0:
        raise RecipeError("Expected optimizer.weight_decay above 0 for less-decay, but got 0.")
    return {"optimizer.weight_decay": alpha * recipe.optimizer.weight_decay}


# By the identity, PGT is plain cross-entropy with two parameter groups. With SGD, the learning rate
# of the head is lr * alpha and that of the backbone lr / alpha, a ratio of alpha^2. With Adam and
# AdamW they are lr * alpha and lr (a factor of the gradient does not change the step), a ratio of
# alpha.
HEAD_RATE_EXPONENT = {"sgd": 2, "adam": 1, "adamw": 1}


def head_exponent(optimizers: Iterable[str]) -> int:
    """The exponent of alpha in the ratio of learning rates, for the optimizers of a training."""
    names = list(dict.fromkeys(optimizers))
    exponents = {HEAD_RATE_EXPONENT.get(name.lower()) for name in names}
    exponent = exponents.pop() if len(exponents) == 1 else None
    if exponent is None:
        got = ", ".join(map(repr, names)) or "no optimizer"
        raise RecipeError(
            f"Expected training with one of {', '.join(HEAD_RATE_EXPONENT)} for head-lr, but got "
            f"{got}, for which the ratio of learning rates is unknown."
        )
    return exponent


def _head_lr(recipe: Recipe, alpha: float) -> Changes:
    ratio = alpha ** head_exponent([recipe.optimizer.name])
    return {"optimizer.head.lr": ratio * recipe.optimizer.head.lr}


def identity_image(values: Mapping[str, Any], alpha: float) -> Changes:
    """The settings with PGT that train the backbone like `values` without PGT.

    By the identity, SGD with PGT at (lr, wd) updates the backbone like plain cross-entropy at
    (lr / alpha, wd * alpha). Adam: (lr, wd * alpha); AdamW: (lr, wd).
    """
    name, image = values["optimizer.name"], {}
    if alpha == 0:
        raise RecipeError("Expected alpha above 0 for settings by the identity, but got 0.")
    if name == "sgd":
        for key in ("optimizer.lr", "schedule.warmup_start", "schedule.floor"):
            image[key] = values[key] * alpha
        if values["clip.agc"] is not None:  # the backbone's gradients are 1 / alpha times as large
            image["clip.agc"] = values["clip.agc"] / alpha
    if name in ("sgd", "adam"):
        image["optimizer.weight_decay"] = values["optimizer.weight_decay"] / alpha
    return image


# The paper's methods, and PGT's controls: their changes of a recipe.
METHODS: dict[str, Callable[[Recipe, float], Changes]] = {
    "baseline": lambda recipe, alpha: {},
    "pgt": lambda recipe, alpha: {"loss.alpha": alpha},  # and the settings of `Fair`
    "pgt-same-rate": lambda recipe, alpha: {"loss.alpha": alpha},
    "gc": lambda recipe, alpha: {"clip.norm": 1.0},  # a common threshold; the paper states none
    "agc": _agc,
    "label-smoothing": lambda recipe, alpha: {"loss.label_smoothing": 0.1},
    "less-decay": _less_decay,
    "head-lr": _head_lr,
}
DEPEND_ON_ALPHA = {"pgt", "pgt-same-rate", "less-decay", "head-lr"}
# Their options of ``powergrad run``, from alpha, the exponent of head-lr and the threshold of AGC.
OF_PROGRAMS: dict[str, Callable[[float, int, float], Changes]] = {
    "baseline": lambda alpha, exponent, agc: {},
    "pgt": lambda alpha, exponent, agc: {"--alpha": alpha},
    "gc": lambda alpha, exponent, agc: {"--clip-norm": 1.0},
    "agc": lambda alpha, exponent, agc: {"--agc": agc},
    "less-decay": lambda alpha, exponent, agc: {"--decay-scale": alpha},
    "head-lr": lambda alpha, exponent, agc: {"--head-lr-scale": alpha**exponent},
}


# Arms of a recipe ---------------------------------------------------------------------------------


def parse_arm(text: str, recipe: Recipe, alpha: float) -> tuple[str, Changes]:
    """The name and the changes of an arm: ``agc+pgt``, or ``name: lr=0.4, wd=0``."""
    name, colon, rest = text.partition(":")
    if not colon or "=" in name:
        name, rest = text, text
    changes: Changes = {}
    for part in rest.split("+") if "=" not in rest else [rest]:
        part = part.strip()
        if "=" in part:
            items = parse_overrides([item.strip() for item in part.split(",")])
            changes |= {expand_key(key): value for key, value in items.items()}
        elif part in METHODS:
            changes |= METHODS[part](recipe, alpha)
        else:
            raise RecipeError(
                f"Expected an arm made of {', '.join(METHODS)}, joined by +, or key=value, but got "
                f"{part!r}{did_you_mean(part, METHODS)}"
            )
    if not name.strip():
        raise RecipeError(f"Expected a name before the colon in --arm, but got {text!r}.")
    return name.strip(), changes


def arms_of(
    texts: Sequence[str], recipe: Recipe, alphas: Sequence[float], fair: Fair | None = None
) -> dict[str, Changes]:
    """The arms of a comparison; with several alphas, an arm that depends on it once for each.

    All arms have the settings of the recipe, or those that are `fair` to each.
    """
    arms: dict[str, Changes] = {}
    for text in texts:
        methods = [part.strip() for part in text.rpartition(":")[2].split("+")]
        for alpha, ending in _alphas_of(methods, alphas):
            name, changes = parse_arm(text, recipe, alpha)
            if fair is not None:
                changes |= fair.settings(f"{name}{ending}", methods, recipe, changes, alpha)
            _add(arms, f"{name}{ending}", changes)
    return arms


@dataclass
class Fair:
    """The settings of each arm that are fair to it.

    Those that were tuned for it; otherwise PGT trains the backbone as the baseline does, and other
    arms have the settings of the recipe.
    """

    tuned: Tuned | None
    at: dict[str, list[str]] = field(default_factory=dict)  # the arms by their kind of settings

    def settings(
        self, name: str, methods: Sequence[str], recipe: Recipe, changes: Changes, alpha: float
    ) -> Changes:
        """The settings of an arm that is made of `methods`, besides its `changes`."""
        is_alpha = self.tuned and (alpha == self.tuned.alpha or DEPEND_ON_ALPHA.isdisjoint(methods))
        if self.tuned and is_alpha and name == "+".join(methods) and name in self.tuned.arms:
            self.at.setdefault("tuned", []).append(name)
            return self.tuned.arms[name]
        is_image = "pgt" in methods
        self.at.setdefault("image" if is_image else "own", []).append(name)
        own = dict(flatten(recipe.model_dump()))
        return identity_image({**own, **changes}, alpha) if is_image else {}

    def sentence(self, arms: Collection[str]) -> str:
        """Which settings these arms have; empty if all have those of the recipe."""
        kinds = ("tuned", "image", "own")
        tuned, image, own = ([a for a in self.at.get(kind, []) if a in arms] for kind in kinds)
        points = f"{self.tuned.trials} points each" if self.tuned else ""
        if tuned and not (image or own):
            return (
                f"Every arm is at settings tuned for it, {points}. That was done once, so the "
                "verdict holds for these settings, not for the methods (--tune with --repeats)."
            )
        parts = [f"{', '.join(tuned)} at settings tuned for each, {points}"] if tuned else []
        if image:
            parts.append(
                f"{', '.join(image)} at lr * alpha and weight decay / alpha, which train the "
                "backbone as without PGT (by the identity; pgt-same-rate keeps the recipe's)"
            )
        parts += [f"{', '.join(own)} at those of the recipe"] if own else []
        return f"Settings: {'; '.join(parts)}." if tuned or image else ""


def _alphas_of(methods: Iterable[str], alphas: Sequence[float]) -> list[tuple[float, str]]:
    """The alphas of an arm, each with what it adds to the arm's name."""
    if DEPEND_ON_ALPHA.isdisjoint(methods) or len(alphas) == 1:
        return [(alphas[0], "")]
    return [(alpha, f"({alpha:g})") for alpha in alphas]


def _add(arms: dict[str, Changes], name: str, changes: Changes) -> None:
    if name in arms:
        raise RecipeError(f"Expected arms with different names, but got {name!r} twice.")
    arms[name] = changes


# Arms of a user's program -------------------------------------------------------------------------


def command_arms(
    texts: Sequence[str], alphas: Sequence[float], *, exponent: int = 2, agc: float | None = None
) -> dict[str, Changes]:
    """The arms of a comparison of a user's program.

    An arm is made of methods joined by ``+``, or ``NAME: METHODS @REF VARIABLE=VALUE FLAGS``, with
    any of these parts in this order. Instead of flags, ``-- COMMAND`` is another command.
    """
    arms: dict[str, Changes] = {}
    for text in texts:
        name, colon, rest = (part.strip() for part in text.partition(":"))
        try:
            words = shlex.split(rest) if colon else [name]
        except ValueError as error:
            raise RecipeError(
                f"Expected --arm to be quoted as in a shell, but got {text!r}: {error}."
            ) from None
        if not name or not words:
            raise RecipeError(f'Expected an arm such as "name: --flag value", but got {text!r}.')
        methods, own = [part.strip() for part in words[0].split("+")], words[1:]
        if colon and not set(methods) <= OF_PROGRAMS.keys():
            methods, own = [], words
        for method in (method for method in methods if method not in OF_PROGRAMS):
            raise RecipeError(
                f"Expected an arm made of {', '.join(OF_PROGRAMS)}, joined by +, but got "
                f"{method!r}{did_you_mean(method, OF_PROGRAMS)} To pass flags to your own "
                'program, use --arm "name: --flag value".'
            )
        for alpha, ending in _alphas_of(methods, alphas):
            changes: Changes = {}
            for method in methods:
                changes |= OF_PROGRAMS[method](alpha, exponent, AGC if agc is None else agc)
            _add(arms, f"{name}{ending}", {**changes, **_own_changes(own)})
    if agc is not None and not any("--agc" in changes for changes in arms.values()):
        raise RecipeError(f"Expected --agc only with an agc arm, but got {', '.join(arms)}.")
    return arms


def _own_changes(words: list[str]) -> Changes:
    """The git ref, environment variables, and flags or another command of an arm."""
    changes: Changes = {}
    while words:
        variable = VARIABLE.fullmatch(words[0])
        if words[0].startswith("@") and REF not in changes:
            changes[REF] = words[0][1:]
        elif variable:
            changes.setdefault(VARIABLES, {})[variable[1]] = variable[2]
        else:
            break
        words = words[1:]
    if words == ["--"]:
        raise RecipeError('Expected an arm such as "name: -- COMMAND", but got no command.')
    if words:
        changes |= {COMMAND: words[1:]} if words[0] == "--" else {FLAGS: words}
    return changes


def parse_grid(texts: Iterable[str]) -> Grid:
    """Parse the keys of a grid and their values, such as ``alpha=0.1,0.3``."""
    grid: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        key, _, values = text.partition("=")
        if not values:
            raise RecipeError(f"Expected a grid such as key=value,value,..., but got {text!r}.")
        dotted, items = expand_key(key.strip()), parse_values(key, values)
        if dotted in grid:
            raise RecipeError(f"Expected each key of a grid once, but got {key.strip()!r} again.")
        grid[dotted] = items
    return Grid(values=grid)


def parse_values(key: str, text: str) -> tuple[Any, ...]:
    """Parse distinct values of a key, separated by commas."""
    items = [parse_overrides([f"x={value.strip()}"])["x"] for value in text.split(",")]
    if len(set(map(repr, items))) < len(items):
        raise RecipeError(f"Expected different values of {key!r}, but got {text!r}.")
    return tuple(items)


def decomposition(recipe: Recipe, alpha: float) -> dict[str, Changes]:
    """The arms that decompose PGT, by the identity of `powergrad.equivalent_training`."""
    if not 0 < alpha < 1:
        raise RecipeError(f"Expected `alpha` to be above 0 and below 1, but got {alpha:g}.")
    parts: dict[str, Changes] = {
        "backbone lr / alpha": {"optimizer.backbone.lr": 1 / alpha},
        "backbone eps * alpha": {"optimizer.backbone.eps": alpha},
        "backbone decay * alpha": {"optimizer.backbone.weight_decay": alpha},
        "head lr * alpha": {"optimizer.head.lr": alpha},
        "head decay / alpha": {"optimizer.head.weight_decay": 1 / alpha},
        "head start * alpha": {"model.head_scale": alpha},
    }
    del parts["backbone eps * alpha" if recipe.optimizer.name == "sgd" else "backbone lr / alpha"]
    if recipe.optimizer.name == "adamw":
        del parts["backbone decay * alpha"]
    faster = {
        "optimizer.lr": recipe.optimizer.lr / alpha,
        "schedule.warmup_start": recipe.schedule.warmup_start / alpha,
        "schedule.floor": recipe.schedule.floor / alpha,
    }
    return {
        "CE": {},
        "PGT": {"loss.alpha": alpha},
        "two-group CE": {key: value for part in parts.values() for key, value in part.items()},
        **parts,
        "CE(alpha z)": {"loss.logit_scale": alpha},
        "CE at lr / alpha": faster,
    }
