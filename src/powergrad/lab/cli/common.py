"""The common parts of all commands: recipes, overrides, flags and error messages."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from cyclopts import Parameter

from powergrad.lab.files import FileError
from powergrad.lab.trainer.recipe import (
    Recipe,
    RecipeError,
    default_recipe,
    describe_keys,
    parse_overrides,
)
from powergrad.lab.words import did_you_mean

__all__ = [
    "STOPPED",
    "Declined",
    "Flag",
    "Overrides",
    "RecipeName",
    "check_options",
    "explain",
    "option_names",
    "put_aside",
    "recipe_and_overrides",
    "show_keys",
    "stopped",
]

RecipeName = Annotated[
    str | None,
    Parameter(
        allow_leading_hyphen=True,  # `recipe_and_overrides` treats it as an override
        help=(
            "The name of a recipe, or a YAML file. The default depends on data.name: images for "
            "folder:PATH, otherwise the recipe with the name of the data, or digits."
        ),
    ),
]
Overrides = Annotated[
    str,
    Parameter(
        allow_leading_hyphen=True,
        help="Overrides of the recipe: --dotted.key value, or dotted.key=value (see --keys).",
    ),
]
Flag = Parameter(negative="")

STOPPED = 130


class Declined(Exception):  # noqa: N818 (it is not an error)
    """The user was asked and declined to start."""


def recipe_and_overrides(recipe: str | None, overrides: Sequence[str]) -> tuple[str, list[str]]:
    """The name of the recipe, and its overrides, which may be given without a name.

    Args:
        recipe: The first argument of the command.
        overrides: The other arguments.
    """
    tokens = [*([] if recipe is None else [recipe]), *overrides]
    named, changes = None, []
    remaining = iter(tokens)
    for token in remaining:
        if token.startswith("--") and "=" not in token:
            changes += [token, *([value] if (value := next(remaining, None)) is not None else [])]
        elif token.startswith("--") or ("=" in token and not Path(token).is_file()):
            changes.append(token)
        elif named is None:
            named = token
        else:
            raise RecipeError(
                f"Expected one recipe, and overrides as `--key value` or `key=value`, but got "
                f"{named!r} and {token!r}."
            )
    return named or default_recipe(parse_overrides(changes)), changes


def check_options(overrides: Sequence[str], options: Iterable[str]) -> None:
    """Refuse an option that is neither an option of the command nor a key of a recipe.

    Args:
        overrides: The overrides of a recipe, as typed.
        options: The names of the command's options, with hyphens.

    Raises:
        RecipeError: With similar known names.
    """
    keys = {key: f"--{key}" for key, *_ in describe_keys()}
    known = {*keys.values(), *options, "--data.only"}
    for token in overrides:
        name, _, _ = token.partition("=")
        if token.startswith("--") and name not in known and "." not in name:
            raise RecipeError(
                f"Expected an option of this command or a key of a recipe (see --keys), but got "
                f"{name!r}{did_you_mean(name, known)}"
            )


def option_names(command: Callable[..., Any]) -> Iterator[str]:
    """The options of a command, as typed."""
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if is_dataclass(parameter.default):
            hints = get_type_hints(type(parameter.default), include_extras=True)
            yield from (
                _option_name(field.name, hints[field.name]) for field in fields(parameter.default)
            )
        elif parameter.kind is parameter.KEYWORD_ONLY:
            yield _option_name(parameter.name, parameter.annotation)


def _option_name(name: str, annotation: Any) -> str:
    """The option of an argument: the name in its annotation, or that of the argument itself."""
    for note in getattr(annotation, "__metadata__", ()):
        if isinstance(note, Parameter) and note.name:
            return next(iter(note.name))
    return f"--{name.replace('_', '-')}"


def show_keys(recipe: Recipe) -> int:
    """Print every key of a recipe with its meaning, allowed values, and value in `recipe`."""
    for key, meaning, allowed, default in describe_keys():
        own = recipe.value(key)
        value = f"default: {default}" if own == default else f"here: {own}, default: {default}"
        print(f"--{key:28} {meaning}; {allowed} [{value}]")
    return 0


def put_aside(folder: Path) -> None:
    """Rename the folder of an earlier start, and tell the user."""
    if not folder.exists():
        return
    moved = folder.with_name(f"{folder.name}-{datetime.now():%Y%m%d-%H%M%S}")
    folder.rename(moved)
    print(f"--fresh: {folder} was moved to {moved} and is not used.", file=sys.stderr)


def explain(error: Exception, tokens: Sequence[str] = ()) -> str | None:
    """The message for an error that the user can fix; None for an internal error.

    Args:
        error: The error.
        tokens: The command line, so that the message names the option that was typed.
    """
    if not isinstance(error, (ValueError, FileError, OSError, ImportError)):
        return None
    message = str(error)
    for token in tokens:
        if match := re.match(r"--([A-Za-z][\w.-]*)", token):
            name = match[1]
            message = message.replace(f"`{name.replace('-', '_')}`", f"`--{name}`")
            if "." in name:
                message = re.sub(rf"(?<![\w.-]){re.escape(name)}(?=: )", f"--{name}", message)
    return message


def stopped(reason: Exception) -> int:
    """Print that a command was interrupted or not started; return its exit code."""
    if isinstance(reason, Declined):
        print("powergrad: nothing was started; --yes skips the question.", file=sys.stderr)
        return 1
    print(f"powergrad: {reason}; the same command continues from there.", file=sys.stderr)
    return STOPPED
