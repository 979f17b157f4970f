"""Arms of a comparison: names for what they change in a recipe."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from powergrad.lab.config import Recipe, RecipeError, parse_overrides
from powergrad.lab.jobs.command import FLAGS
from powergrad.lab.study.records import Grid
from powergrad.lab.words import did_you_mean

__all__ = [
    "SHORT",
    "arms_of",
    "command_arms",
    "decomposition",
    "expand_key",
    "head_exponent",
    "parse_arm",
    "parse_grid",
    "parse_values",
]

Changes = dict[str, Any]
AGC = 0.01  # the threshold of Brock et al.

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
    """The dotted key that a short one stands for.

    Example:
        >>> expand_key("lr"), expand_key("clip.agc")
        ('optimizer.lr', 'clip.agc')
    """
    return SHORT.get(key, key)


def _agc(recipe: Recipe, alpha: float) -> Changes:
    # The paper states no threshold; Brock et al.'s is 0.01. AGC keeps a unit's gradient under
    # `clip` times its weight, while decay takes `weight_decay` times its weight, so with a clip
    # below the decay every weight would vanish. Eight times the decay leaves room: 0.16, the
    # largest clip that Brock et al. tried, is eight times 0.02.
    return {"clip.agc": max(AGC, 8 * recipe.optimizer.weight_decay)}


def _less_decay(recipe: Recipe, alpha: float) -> Changes:
    # By the identity, PGT leaves the backbone alpha times the decay (not with AdamW).
    if recipe.optimizer.weight_decay == 0:
        raise RecipeError("Expected optimizer.weight_decay above 0 for less-decay, but got 0.")
    return {"optimizer.weight_decay": alpha * recipe.optimizer.weight_decay}


# By the identity, PGT is plain cross-entropy with two groups. SGD: the head's rate is lr * alpha,
# the backbone's lr / alpha, a ratio of alpha^2. Adam and AdamW: the head's is lr * alpha, the
# backbone's lr, because a factor of the gradient does not change the step; a ratio of alpha.
HEAD_RATE_EXPONENT = {"sgd": 2, "adam": 1, "adamw": 1}


def _head_lr(recipe: Recipe, alpha: float) -> Changes:
    if recipe.optimizer.name not in HEAD_RATE_EXPONENT:
        raise RecipeError(
            f"Expected optimizer.name to be one of {', '.join(HEAD_RATE_EXPONENT)} for head-lr, "
            f"but got {recipe.optimizer.name!r}, for which PGT's ratio of rates is not known."
        )
    ratio = alpha ** HEAD_RATE_EXPONENT[recipe.optimizer.name]
    return {"optimizer.head.lr": ratio * recipe.optimizer.head.lr}


# By name: what an arm changes in a recipe, given alpha. The paper's methods, and PGT's controls.
METHODS: dict[str, Callable[[Recipe, float], Changes]] = {
    "baseline": lambda recipe, alpha: {},
    "pgt": lambda recipe, alpha: {"loss.alpha": alpha},
    "gc": lambda recipe, alpha: {"clip.norm": 1.0},  # the usual one: the paper states none
    "agc": _agc,
    "label-smoothing": lambda recipe, alpha: {"loss.label_smoothing": 0.1},
    "less-decay": _less_decay,
    "head-lr": _head_lr,
}
OF_ALPHA = {"pgt", "less-decay", "head-lr"}  # those that depend on alpha


def parse_arm(text: str, recipe: Recipe, alpha: float) -> tuple[str, Changes]:
    """An arm's name and what it changes.

    Args:
        text: Methods joined by ``+`` (``agc+pgt``), or ``key=value,key=value``, with ``NAME:``
            before it if it is to be called otherwise.
        recipe: The recipe that it changes.
        alpha: The alpha of the methods that depend on it.

    Raises:
        RecipeError: If a part is neither a method nor a change.

    Example:
        >>> parse_arm("agc+pgt", Recipe(), 0.3)
        ('agc+pgt', {'clip.agc': 0.01, 'loss.alpha': 0.3})
        >>> parse_arm("fast: lr=0.4, wd=0", Recipe(), 0.3)
        ('fast', {'optimizer.lr': 0.4, 'optimizer.weight_decay': 0})
    """
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
                f"Expected an arm of {', '.join(METHODS)}, joined by +, or key=value, but got "
                f"{part!r}{did_you_mean(part, METHODS)}"
            )
    name = name.strip()
    if not name:
        raise RecipeError(f"Expected a name before the colon of an arm, but got {text!r}.")
    return name, changes


def arms_of(texts: Sequence[str], recipe: Recipe, alphas: Sequence[float]) -> dict[str, Changes]:
    """The arms of a comparison; with several alphas, one that depends on alpha once for each.

    Example:
        >>> list(arms_of(["baseline", "agc+pgt"], Recipe(), [0.1, 0.3]))
        ['baseline', 'agc+pgt(0.1)', 'agc+pgt(0.3)']
    """
    arms: dict[str, Changes] = {}
    for text in texts:
        parts = {part.strip() for part in text.rpartition(":")[2].split("+")}
        for alpha in alphas if parts & OF_ALPHA else alphas[:1]:
            name, changes = parse_arm(text, recipe, alpha)
            if parts & OF_ALPHA and len(alphas) > 1:
                name = f"{name}({alpha:g})"
            if name in arms:
                raise RecipeError(f"Expected arms of different names, but got {name!r} twice.")
            arms[name] = changes
    return arms


# Arms of somebody's own program ------------------------------------------------------------------


class Given(NamedTuple):
    """What the options of ``powergrad run`` depend on.

    Attributes:
        alpha: PGT's.
        exponent: PGT's ratio of the head's learning rate to the backbone's is alpha to this power.
        agc: The threshold of adaptive gradient clipping.
    """

    alpha: float
    exponent: int
    agc: float


# By name: the options of `powergrad run`.
RUN_METHODS: dict[str, Callable[[Given], Changes]] = {
    "baseline": lambda given: {},
    "pgt": lambda given: {"--alpha": given.alpha},
    "gc": lambda given: {"--clip-norm": 1.0},
    "agc": lambda given: {"--agc": given.agc},
    "less-decay": lambda given: {"--decay-scale": given.alpha},
    "head-lr": lambda given: {"--head-lr-scale": given.alpha**given.exponent},
}


def command_arms(
    texts: Sequence[str], alphas: Sequence[float], *, exponent: int = 2, agc: float | None = None
) -> dict[str, Changes]:
    """The arms of a comparison of somebody's own program.

    Args:
        texts: Methods joined by ``+``; or ``NAME: METHODS FLAGS``, of which the flags are added to
            the command, and the methods may be missing.
        alphas: The alphas of the methods that depend on it; with several, one arm for each.
        exponent: PGT's ratio of the head's learning rate to the backbone's is alpha to this power.
        agc: The threshold of agc; by default 0.01.

    Raises:
        RecipeError: If a part is not a method, no arm has the threshold, or a name occurs twice.

    Example:
        >>> command_arms(["baseline", "agc+pgt", "wide: pgt --width '6 4'"], [0.5])["wide"]
        {'--alpha': 0.5, 'flags': ['--width', '6 4']}
    """
    arms: dict[str, Changes] = {}
    for text in texts:
        name, colon, rest = (part.strip() for part in text.partition(":"))
        try:
            words = shlex.split(rest) if colon else [name]
        except ValueError as error:
            raise RecipeError(
                f"Expected --arm as a shell takes it, but got {text!r}: {error}."
            ) from None
        if not name or not words:
            raise RecipeError(f'Expected an arm as "name: --flag value", but got {text!r}.')
        methods = [part.strip() for part in words[0].split("+")]
        flags = words[1:]
        if colon and not set(methods) <= RUN_METHODS.keys():
            methods, flags = [], words
        for method in methods:
            if method not in RUN_METHODS:
                raise RecipeError(
                    f"Expected an arm of {', '.join(RUN_METHODS)}, joined by +, but got {method!r}"
                    f"{did_you_mean(method, RUN_METHODS)} Flags of your own program are given as "
                    '--arm "name: --flag value".'
                )
        depends = bool(OF_ALPHA & set(methods))
        for alpha in alphas if depends else alphas[:1]:
            changes: Changes = {}
            for method in methods:
                changes |= RUN_METHODS[method](Given(alpha, exponent, AGC if agc is None else agc))
            full = f"{name}({alpha:g})" if depends and len(alphas) > 1 else name
            if full in arms:
                raise RecipeError(f"Expected arms of different names, but got {full!r} twice.")
            arms[full] = {**changes, **({FLAGS: flags} if flags else {})}
    if agc is not None and not any("--agc" in changes for changes in arms.values()):
        raise RecipeError(f"Expected --agc with an arm that has agc, but got {', '.join(arms)}.")
    return arms


def head_exponent(optimizers: Iterable[str]) -> int:
    """The power of alpha that is PGT's ratio of rates, for the optimizers of a program.

    Raises:
        RecipeError: If it is not known for one of them, or differs between them.
    """
    names = list(dict.fromkeys(optimizers))
    found = {HEAD_RATE_EXPONENT.get(name.lower()) for name in names}
    exponent = found.pop() if len(found) == 1 else None
    if exponent is None:
        known = ", ".join(HEAD_RATE_EXPONENT)
        raise RecipeError(
            f"Expected a program that trains with one of {known} for head-lr, but got "
            f"{', '.join(names) or 'no optimizer'}, for which PGT's ratio of rates is not known."
        )
    return exponent


def parse_grid(texts: Iterable[str]) -> Grid:
    """Keys and the values each takes.

    Example:
        >>> parse_grid(["alpha=0.1,0.3", "lr=0.1"])
        Grid(values={'loss.alpha': (0.1, 0.3), 'optimizer.lr': (0.1,)})
    """
    grid: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        if not equals or not values:
            raise RecipeError(f"Expected a grid as key=value,value,..., but got {text!r}.")
        items = parse_values(key, values)
        dotted = expand_key(key.strip())
        if dotted in grid:
            raise RecipeError(f"Expected each key of a grid once, but got {key.strip()!r} again.")
        grid[dotted] = items
    return Grid(grid)


def parse_values(key: str, text: str) -> tuple[Any, ...]:
    """Different values of a key, separated by commas."""
    items = [parse_overrides([f"x={value.strip()}"])["x"] for value in text.split(",")]
    if len(set(map(repr, items))) < len(items):
        raise RecipeError(f"Expected different values of {key!r}, but got {text!r}.")
    return tuple(items)


def decomposition(recipe: Recipe, alpha: float) -> dict[str, Changes]:
    """The arms that take PGT apart, by the identity of `powergrad.equivalent_training`.

    Args:
        recipe: Cross-entropy, as tuned.
        alpha: PGT's alpha, above 0 and below 1.

    Returns:
        Cross-entropy; PGT; the equal training with two groups; each factor of it alone;
        cross-entropy of alpha times the logits; and cross-entropy at ``lr / alpha``.
    """
    if not 0 < alpha < 1:
        raise RecipeError(f"Expected `alpha` to be above 0 and below 1, but got {alpha:g}.")
    backbone: Changes = {"optimizer.backbone.lr": 1 / alpha}
    if recipe.optimizer.name != "sgd":
        backbone = {"optimizer.backbone.eps": alpha}
    if recipe.optimizer.name != "adamw":
        backbone["optimizer.backbone.weight_decay"] = alpha
    factors = {
        **backbone,
        "optimizer.head.lr": alpha,
        "optimizer.head.weight_decay": 1 / alpha,
        "model.head_scale": alpha,
    }
    words = {
        "optimizer.backbone.lr": "backbone lr / alpha",
        "optimizer.backbone.eps": "backbone eps * alpha",
        "optimizer.backbone.weight_decay": "backbone decay * alpha",
        "optimizer.head.lr": "head lr * alpha",
        "optimizer.head.weight_decay": "head decay / alpha",
        "model.head_scale": "head start * alpha",
    }
    faster = {
        "optimizer.lr": recipe.optimizer.lr / alpha,
        "schedule.warmup_start": recipe.schedule.warmup_start / alpha,
        "schedule.floor": recipe.schedule.floor / alpha,
    }
    return {
        "CE": {},
        "PGT": {"loss.alpha": alpha},
        "two-group CE": factors,
        **{words[key]: {key: value} for key, value in factors.items()},
        "CE(alpha z)": {"loss.logit_scale": alpha},
        "CE at lr / alpha": faster,
    }
