"""Executes a Python program in this process, as ``python PROGRAM ARGS`` would."""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import NamedTuple

__all__ = ["Ending", "Program"]

FORMS = "`-- SCRIPT ARGS` or `-- -m MODULE ARGS`"


class Ending(NamedTuple):
    """How a program ended: its exit code, and whether it was interrupted (Ctrl-C)."""

    code: int
    interrupted: bool = False


class Program:
    """A script or a module with its arguments.

    Args:
        command: The arguments of ``python``: a script, or ``-m`` and a module, then its arguments.

    Raises:
        ValueError: If there is no such program.
    """

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

    def execute(self) -> Ending:
        """Run the program. An error is printed with the program's own traceback, as by Python."""
        main = ModuleType("__main__")
        main.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = main  # used by pickle and spawned processes
        try:
            code = self._load_module(main) if self.is_module else self._load_script(main)
            exec(code, main.__dict__)
        except SystemExit as error:
            return Ending(_exit_code(error.code))
        except BaseException as error:
            _print(error)
            interrupted = isinstance(error, KeyboardInterrupt)
            return Ending(130 if interrupted else 1, interrupted)
        return Ending(0)

    def _load_script(self, main: ModuleType) -> CodeType:
        path = os.path.abspath(self.name)
        sys.argv = [self.name, *self.arguments]
        _replace_first_path(os.path.dirname(os.path.realpath(path)))
        main.__file__ = path
        main.__loader__ = SourceFileLoader("__main__", path)
        main.__dict__["__cached__"] = None
        with io.open_code(path) as file:
            return compile(file.read(), path, "exec", dont_inherit=True)

    def _load_module(self, main: ModuleType) -> CodeType:
        sys.argv = ["-m", *self.arguments]  # as in Python while parent packages are imported
        _replace_first_path(os.getcwd())
        spec = self._find_spec()
        code: CodeType = spec.loader.get_code(spec.name)  # type: ignore[union-attr]
        sys.argv[0] = main.__file__ = spec.origin or ""
        main.__spec__, main.__loader__ = spec, spec.loader
        main.__package__, main.__dict__["__cached__"] = spec.parent, spec.cached
        return code

    def _find_spec(self) -> ModuleSpec:
        spec = None
        for name in (self.name, f"{self.name}.__main__"):
            try:
                spec = importlib.util.find_spec(name)
            except ModuleNotFoundError as error:
                if not error.name or not f"{name}.".startswith(f"{error.name}."):
                    raise  # an import of the program itself failed
                spec = None
            if spec is None or spec.submodule_search_locations is None:
                break
        if spec is None or not hasattr(spec.loader, "get_code"):
            sys.exit(f"{sys.executable}: No module named {self.name}")
        return spec


def _replace_first_path(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11's -P
        sys.path[0] = folder


def _exit_code(code: object) -> int:
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    return 1


def _print(error: BaseException) -> None:
    """Print an error as Python would, without the frames of this package."""
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file != __file__ and not file.startswith("<frozen "):
            break
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)
