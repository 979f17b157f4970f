"""The common parts of all commands: recipes, overrides, flags and error messages."""

from __future__ import annotations

import errno
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import is_dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from cyclopts import Parameter

from powergrad.lab.files import FileError, explain_os_error, is_disk_full
from powergrad.lab.preflight import say
from powergrad.lab.signals import Interrupted
from powergrad.lab.trainer.recipe import (
    Recipe,
    RecipeError,
    default_recipe,
    describe_keys,
    parse_overrides,
    suggest_key,
)
from powergrad.lab.words import hide_password

RecipeName = Annotated[
    str | None,
    Parameter(
        allow_leading_hyphen=True,  # `recipe_and_overrides` treats it as an override
        help=(
            "The name of a recipe, or a YAML file. The default depends on data.name: images for "
            "folder:PATH, otherwise the recipe with the name of the data, or noisy-digits."
        ),
    ),
]
Overrides = Annotated[
    str,
    Parameter(
        allow_leading_hyphen=True,
        help="Overrides of the recipe: --dotted.key value, dotted.key=value (see `train --keys`).",
    ),
]
Flag = Parameter(negative="")
Words = Annotated[tuple[str, ...], Flag]


def recipe_and_overrides(
    recipe: str | None, overrides: Sequence[str], command: Callable[..., Any]
) -> tuple[str, list[str]]:
    """The name of the recipe, and its overrides, which may be given without a name.

    An option that is neither an option of `command` nor a key of a recipe is refused.
    """
    named, changes = None, []
    remaining = iter([*([] if recipe is None else [recipe]), *overrides])
    for token in remaining:
        if token.startswith("--") and "=" not in token:
            changes += [token, *([value] if (value := next(remaining, None)) is not None else [])]
        elif token.startswith("--") or ("=" in token and not Path(token).is_file()):
            changes.append(token)
        elif named is None:
            named = token
        else:
            wanted = "Expected one recipe, and overrides as `--key value` or `key=value`"
            raise RecipeError(f"{wanted}, but got {named!r} and {token!r}.")
    others = [*_option_names(command)]
    known = {*(f"--{key}" for key, *_ in describe_keys()), *others}
    for option in (token.partition("=")[0] for token in changes if token.startswith("--")):
        if option not in known and "." not in option:
            wanted = "Expected an option of this command or a key of a recipe (see `train --keys`)"
            raise RecipeError(f"{wanted}, but got {option!r}{suggest_key(option, *others)}")
    return named or default_recipe(parse_overrides(changes)), changes


def _option_names(command: Callable[..., Any]) -> Iterator[str]:
    """The options of a command, as typed: the name in the annotation, or that of the argument."""
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        hints = {parameter.name: parameter.annotation}
        if is_dataclass(parameter.default):
            hints = get_type_hints(type(parameter.default), include_extras=True)
        elif parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        for name, annotation in hints.items():
            notes = [n for n in getattr(annotation, "__metadata__", ()) if isinstance(n, Parameter)]
            names = [next(iter(note.name)) for note in notes if note.name]
            yield names[0] if names else f"--{name.replace('_', '-')}"


def refuse(options: Any, names: Iterable[str], where: str) -> None:
    """Raise ValueError if one of some options was given, which are only for `where`."""
    for name in names:
        if (value := getattr(options, name)) not in (None, (), "none", False):
            got = " ".join(value) if isinstance(value, tuple) else value
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"Expected {option} only with {where}, but got {got!r}.")


def show_keys(recipe: Recipe) -> int:
    """Print every key of a recipe with its meaning, allowed values, and value in `recipe`."""
    for key, meaning, allowed, default in describe_keys():
        own = recipe.value(key)
        value = f"default: {default}" if own == default else f"here: {own}, default: {default}"
        print(f"--{key:28} {meaning}; {allowed} [{value}]")
    return 0


def put_aside(folder: Path, reason: str = "--fresh") -> None:
    """Rename the folder of an earlier start, and tell the user."""
    if folder.exists():
        moved = folder.with_name(f"{folder.name}-{datetime.now():%Y%m%d-%H%M%S}")
        folder.rename(moved)
        say(f"{reason}: {folder} was moved to {moved} and is not used.")


def explain(error: Exception) -> tuple[str, int] | None:
    """The message and the exit code of a command that ended early; None for an internal error."""
    if isinstance(error, Interrupted):
        return f"{error}; the same command continues from there.", 130
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.strerror}: {str(error.filename)!r}"
        if error.errno == errno.EROFS or is_disk_full(error):
            text = explain_os_error(error, Path(error.filename))
        return text, 2
    if isinstance(error, (ValueError, FileError, OSError, ImportError)):
        return hide_password(str(error)), 2
    return None
