"""Runs of a Python function: a user's training, called with a seed and an arm."""

from __future__ import annotations

import functools
import hashlib
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import Self, override

from powergrad.lab.environment import describe_machine
from powergrad.lab.files import write_json
from powergrad.lab.jobs.job import Changes, Job, Program, RunFailed, merge_result, split_result
from powergrad.lab.jobs.sources import check_metrics
from powergrad.lab.trainer.recipe import RecipeError
from powergrad.lab.trainer.run_folder import Run
from powergrad.lab.words import slug

Train = Callable[..., Any]
LINES = 20  # the number of lines of a traceback to show


@dataclass(frozen=True)
class FunctionJob(Job):
    """One call of a function.

    Attributes:
        place: The import location of the function, see :func:`place_of`.
        arm: The name of the arm.
        seed: The seed.
        settings: Its other arguments.
        metric: The name of the returned value, if it is a number.
        function: The function itself, in the process of the caller.
    """

    is_foreign: ClassVar[bool] = True
    place: str
    arm: str
    seed: int
    settings: Mapping[str, Any]
    metric: str
    function: Train | None = field(default=None, compare=False)

    @override
    def execute(self, folder: Path) -> dict[str, Any]:
        run = Run(folder / self.name)
        with run.hold():
            finished = run.result()
            result = {} if finished is None else merge_result(finished)
            if finished is None:
                run.clear()
                write_json(run.folder / "environment.json", describe_machine())
                result = self._call()
                run.finish(split_result(result))
        return result

    def _call(self) -> dict[str, Any]:
        function = self.function or _load(self.place)
        began = time.monotonic()
        try:
            returned = function(self.seed, self.arm, **self.settings)
        except Exception as error:
            trace = error.__traceback__.tb_next if error.__traceback__ else None
            lines = "".join(traceback.format_exception(type(error), error, trace)).splitlines()
            shown = "\n".join(f"    {line}" for line in lines[-LINES:])
            raise RunFailed(f"{type(error).__name__}: {error}\n{shown}") from None
        metrics = returned if isinstance(returned, Mapping) else {self.metric: returned}
        try:
            check_metrics(metrics)
        except RecipeError as error:
            raise RunFailed(str(error), stops=True) from None
        return {
            **{str(name): _number(name, value) for name, value in metrics.items()},
            "seconds": round(time.monotonic() - began, 3),
        }

    @override
    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": "function",
            "name": self.name,
            "place": self.place,
            "arm": self.arm,
            "seed": self.seed,
            "settings": dict(self.settings),
            "metric": self.metric,
        }

    @classmethod
    @override
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        names = ("name", "place", "arm", "seed", "settings", "metric")
        return cls(**{name: values[name] for name in names})


def _number(name: Any, value: Any) -> float:
    """A metric as a number; 0-d tensors and numpy scalars are converted."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number and not (hasattr(value, "item") and getattr(value, "ndim", 1) == 0):
        raise RunFailed(
            f"Expected `train` to return a number or a mapping of numbers, but got "
            f"{type(value).__name__} as {name!r}.",
            stops=True,
        )
    return float(value)


@dataclass(frozen=True)
class FunctionProgram(Program):
    """A function that is called with the settings of each arm.

    Attributes:
        place: See :func:`place_of`.
        metric: The name of the returned value, if it is a number.
        fingerprint: The fingerprint of its source; runs of a changed function are not reused.
        function: The function itself, in the process of the caller.
    """

    is_foreign: ClassVar[bool] = True

    place: str
    metric: str
    fingerprint: str = ""
    function: Train | None = field(default=None, compare=False)

    @classmethod
    def of(cls, function: Train, metric: str) -> Self:
        """The program of a function, with the current fingerprint of its source."""
        name = getattr(function, "__qualname__", type(function).__qualname__)
        place = place_of(function) or f"{getattr(function, '__module__', '')}:{name}"
        return cls(place, metric, _fingerprint(function), function)

    @property
    @override
    def key(self) -> str:
        return hashlib.sha256(f"{self.place} {self.metric}".encode()).hexdigest()

    @property
    @override
    def data_name(self) -> str:
        return self.place.rpartition(":")[2].rpartition(".")[2].strip("<>")

    @property
    @override
    def title(self) -> str:
        return f"{self.place.rpartition(':')[2]}(seed, arm)"

    @property
    @override
    def changing(self) -> str:
        return f"{self.title} has changed"

    @override
    def job(self, arm: str, changes: Changes, seed: int) -> FunctionJob:
        identity = json.dumps(
            [arm, self.place, self.metric, dict(changes), self.fingerprint], default=repr
        )
        digest = hashlib.sha256(identity.encode()).hexdigest()[:10]
        name = f"{slug(arm)[:40]}-seed{seed}-{digest}"
        return FunctionJob(name, self.place, arm, seed, changes, self.metric, self.function)

    @override
    def alpha(self, changes: Changes) -> float:
        alpha = changes.get("alpha", 1.0)
        return float(alpha) if isinstance(alpha, (int, float)) else 1.0

    @override
    def check_arms(self, arms: Mapping[str, Changes]) -> None:
        pass  # the arms have different names, which the function gets

    @override
    def to_dict(self) -> dict[str, Any]:
        values = {"program": "function", "function": self.place, "returns": self.metric}
        return values | ({"data_fingerprint": self.fingerprint} if self.fingerprint else {})

    @classmethod
    @override
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(values["function"], values["returns"], values.get("data_fingerprint", ""))


def place_of(function: Train) -> str | None:
    """The import location of a function, ``module:name`` or ``file.py:name``.

    None for functions that other processes cannot import: lambdas, nested functions, methods, and
    functions of an interactive session such as a notebook.
    """
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


def _fingerprint(function: Train) -> str:
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return ""
    return f"sha256:{hashlib.sha256(source.encode()).hexdigest()}"
