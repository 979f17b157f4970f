"""What ``powergrad run`` executes, and with which changes."""

from __future__ import annotations

import builtins
import io
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from powergrad.monitor import Recording

__all__ = ["CLIPPED", "SCALED", "Options", "Program"]

FORMS = "`-- SCRIPT ARGS` or `-- -m MODULE ARGS`"
# The fields of `Options` that ask for a method of clipping, or scale a value of a group.
CLIPPED = {"agc": "agc", "norm": "clip_norm", "value": "clip_value"}
SCALED = {"lr": "lr_scale", "head_lr": "head_lr_scale", "weight_decay": "decay_scale"}


@dataclass(frozen=True)
class Options:
    """The options of ``powergrad run``, which checks their ranges; the defaults change nothing."""

    alpha: float = 1.0
    agc: float | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    decay_scale: float = 1.0
    lr_scale: float = 1.0
    head_lr_scale: float = 1.0
    head: str | None = None
    monitor: Path | None = None
    seed: int | None = None
    strict: bool = False
    json: Path | None = None

    def __post_init__(self) -> None:
        if self.monitor is not None and Recording.exists(self.monitor):
            raise ValueError(
                "Expected `--monitor` to be a folder without a recording, but got "
                f"{str(self.monitor)!r}, which holds one."
            )

    def given(self, fields: dict[str, str]) -> dict[str, Any]:
        """The values of `fields` by their keys, without defaults."""
        values = {name: getattr(self, field) for name, field in fields.items()}
        return {k: v for k, v in values.items() if v != getattr(Options, fields[k])}


class Program:
    """A script, or ``-m`` and a module, with its arguments; a ValueError if there is no script."""

    def __init__(self, command: Sequence[str]) -> None:
        name, *arguments = command or [""]
        self.is_module = name == "-m"
        if self.is_module:
            name, *arguments = arguments or [""]
        if not name:
            raise ValueError(f"Expected {FORMS}, but got nothing to run.")
        if not self.is_module and not os.path.isfile(name):
            remedy = "; leave out `python`" if os.path.basename(name).startswith("python") else ""
            raise ValueError(f"Expected {FORMS}, but got {name!r}, which is not a file{remedy}.")
        self.name, self.arguments, self.command = name, arguments, list(command)

    def execute(self) -> None:
        """Execute the program in this process, as ``python`` does."""
        main = sys.modules["__main__"] = ModuleType("__main__")  # pickle and spawned processes
        folder = os.getcwd() if self.is_module else os.path.dirname(os.path.realpath(self.name))
        if not getattr(sys.flags, "safe_path", False):  # Python 3.11's -P
            sys.path[0] = folder
        sys.argv = ["-m" if self.is_module else self.name, *self.arguments]
        vars(main)["__builtins__"] = builtins
        if self.is_module:
            runpy._run_module_as_main(self.name)  # pyright: ignore # which `python -m` calls
            return
        path = os.path.abspath(self.name)
        loader = SourceFileLoader("__main__", path)
        vars(main).update(__file__=path, __loader__=loader, __cached__=None)
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, vars(main))
