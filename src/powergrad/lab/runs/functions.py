"""Runs of a Python function: a user's training, called with a seed and an arm."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import numbers
import operator
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from typing_extensions import Self

from powergrad.lab.environment import describe_machine
from powergrad.lab.files import write_json
from powergrad.lab.runs.jobs import Changes, ForeignProgram, Job, RunFailed, digest
from powergrad.lab.trainer.run_folder import Result, Run

Train = Callable[..., Any]
LINES = 20  # the number of lines of a traceback to show


class FunctionProgram(ForeignProgram):
    """A function that is called with the settings of each arm; the fingerprint is its source's."""

    kind: Literal["function"] = "function"
    place: str  # see `place_of`
    metric: str  # the name of the returned value, if it is a number
    function: Any = Field(default=None, exclude=True, repr=False)  # if it cannot be imported

    @classmethod
    def of(cls, function: Train, metric: str) -> Self:
        """The program of a function, with the current fingerprint of its source."""
        name = getattr(function, "__qualname__", type(function).__qualname__)
        place = place_of(function)
        where = place or f"{getattr(function, '__module__', '')}:{name}"
        fingerprint, kept = "", None if place else function
        with contextlib.suppress(OSError, TypeError):  # there is no source
            fingerprint = f"sha256:{digest(inspect.getsource(function))}"
        return cls(place=where, metric=metric, fingerprint=fingerprint, function=kept)

    @property
    def key(self) -> str:
        return digest(f"{self.place} {self.metric}")

    @property
    def data_name(self) -> str:
        return self.place.rpartition(":")[2].rpartition(".")[2].strip("<>")

    @property
    def title(self) -> str:
        return f"{self.place.rpartition(':')[2]}(seed, arm)"

    def identity(self, arm: str, changes: Changes, seed: int) -> str:
        values = [arm, self.place, self.metric, dict(changes), self.fingerprint]
        return digest(json.dumps(values, default=repr))[:10]

    def perform(self, job: Job, run: Run) -> Result:
        run.clear()
        write_json(run.folder / "environment.json", describe_machine())
        function = self.function or _load(self.place)
        began = time.monotonic()
        try:
            returned = function(job.seed, job.arm, **job.changes)
        except Exception as error:
            trace = error.__traceback__.tb_next if error.__traceback__ else None
            lines = "".join(traceback.format_exception(type(error), error, trace)).splitlines()
            shown = "\n".join(f"    {line}" for line in lines[-LINES:])
            raise RunFailed(f"{type(error).__name__}: {error}\n{shown}") from None
        seconds = round(time.monotonic() - began, 3)
        given = returned if isinstance(returned, Mapping) else {self.metric: returned}
        metrics = {str(name): _number(name, value) for name, value in given.items()}
        return Result(metrics={"seconds": seconds, **metrics})

    def alpha(self, changes: Changes) -> float:
        alpha = changes.get("alpha", 1.0)
        return float(alpha) if isinstance(alpha, (int, float)) else 1.0


def _number(name: Any, value: Any) -> float:
    """A metric as a number; 0-d tensors and numpy scalars are converted."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number and not (hasattr(value, "item") and getattr(value, "ndim", 1) == 0):
        wanted = "Expected `train` to return a number or a mapping of numbers"
        raise RunFailed(f"{wanted}, but got {type(value).__name__} as {name!r}.", stops=True)
    return float(value)


def place_of(function: Train) -> str | None:
    """``module:name`` or ``file.py:name``; None if other processes cannot import the function."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    name = getattr(function, "__qualname__", "")
    if module is None or not inspect.isfunction(function):
        return None
    try:
        if operator.attrgetter(name)(module) is not function:
            return None
    except AttributeError:
        return None
    if module.__name__ != "__main__":
        return f"{module.__name__}:{name}"
    file = getattr(module, "__file__", None)
    is_interactive = hasattr(sys, "ps1") or "ipykernel" in sys.modules
    return f"{Path(file).resolve()}:{name}" if file and not is_interactive else None


@functools.cache
def _load(place: str) -> Train:
    """Import the function at a location."""
    where, _, name = place.rpartition(":")
    if where.endswith(".py"):
        scope = runpy.run_path(where, run_name="__mp_main__")
        first, _, rest = name.partition(".")
        return operator.attrgetter(rest)(scope[first]) if rest else scope[first]
    return operator.attrgetter(name)(importlib.import_module(where))
