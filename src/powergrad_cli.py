"""The command `powergrad`: ``powergrad run``, and the table of the workbench's commands.

This module is outside the package, because importing the package imports torch, and ``--help``
should be fast. ``powergrad run`` needs only torch. The other commands are in the package
:mod:`powergrad.lab.cli`; its modules are imported when a command is called.
"""

from __future__ import annotations

import difflib
import importlib.util
import math
import os
import select
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

# For each command: its module in powergrad.lab.cli (but `run` is here), and its line in the help.
COMMANDS = {
    "compare": ("compare", "Find out whether PGT helps your program or data, with a verdict."),
    "run": ("", "Run an unmodified program with altered gradients: run --alpha 0.3 -- train.py."),
    "doctor": ("", "Print versions, devices, and what computes a loss on each of them."),
    "sweep": ("presets", "Run a grid over alpha, or over any other key, with several seeds."),
    "decompose": ("presets", "Find out which part of PGT makes a difference."),
    "plan": ("planning", "Compute how many seeds a claim needs."),
    "train": ("train", "Train one network from a recipe."),
    "inspect": ("looking", "Count dead filters, features and layers (the census)."),
    "export": ("train", "Export a trained, calibrated network (safetensors, torch.export, ONNX)."),
    "report": ("looking", "Write the HTML page of a run or a study."),
    "watch": ("looking", "Serve the page of a study while it runs."),
}
USAGE = """powergrad [--help] [--version] COMMAND ...

PowerGrad Transform: train, compare, inspect. Start with `powergrad compare`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 2 where the user must change something."""
    tokens = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    try:
        result = _call(tokens)
        sys.stdout.flush()
    except BrokenPipeError:
        poll = select.poll()
        poll.register(sys.stdout, select.POLLERR)
        if not poll.poll(0):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as shells report a command whose reader, such as head, has exited
    except KeyboardInterrupt:
        print("powergrad: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        explained = _explain(error, tokens)
        if explained is None or (explained[1] == 2 and os.environ.get("POWERGRAD_DEBUG")):
            raise
        print(f"powergrad: {explained[0]}", file=sys.stderr)
        return explained[1]
    # Run the user's program outside of the error handling above.
    return result() if callable(result) else result


def _call(tokens: Sequence[str]) -> int | Callable[[], int]:
    """Execute a command; returns its exit code, or for ``run`` what executes the program."""
    name = tokens[0]
    if name == "run":
        options, command = parse_run(tokens[1:])
        if "help" not in options:
            from powergrad.run import Options, Program, launch

            return partial(launch, Program(command), Options(**options))
        rows = {f"{name} {value}": line for name, (value, line) in RUN_OPTIONS.items()}
        _print_help(RUN_USAGE, rows)
    elif name == "doctor":
        if tokens[1:]:
            _print_help("powergrad doctor", {"doctor": COMMANDS["doctor"][1]})
            return 0 if tokens[1:] in (["--help"], ["-h"]) else 2
        from powergrad.doctor import main as report

        return report()
    elif name in COMMANDS:
        return _call_lab(tokens)
    elif name == "--version":
        from importlib.metadata import version

        print(version("powergrad"))
    elif name in ("-h", "--help"):
        _print_help(USAGE, {command: line for command, (_, line) in COMMANDS.items()})
    else:
        raise ValueError(f"Expected a command, but got {name!r}.{_did_you_mean(name, COMMANDS)}")
    return 0


def _print_help(text: str, rows: Mapping[str, str]) -> None:
    width = max(map(len, rows)) + 2
    print(f"usage: {text}\n", *(f"  {name:{width}}{line}" for name, line in rows.items()), sep="\n")


# The command `run` --------------------------------------------------------------------------------


# For each option, which is a field of `powergrad.run.Options`: its value, and its line in the help.
RUN_OPTIONS = {
    "--alpha": ("FLOAT", "The alpha of PGT for all cross-entropies and log-softmaxes; 1 is plain."),
    "--agc": ("FLOAT", "Adaptive clipping: the largest ratio of gradient to weight norm per unit."),
    "--clip-norm": ("FLOAT", "Clip the norm of all gradients of an optimizer to this value."),
    "--clip-value": ("FLOAT", "Clip each element of the gradients to this value."),
    "--decay-scale": ("FLOAT", "Multiply the weight decay of every optimizer by this factor."),
    "--lr-scale": ("FLOAT", "Multiply the learning rate of every optimizer by this factor."),
    "--head-lr-scale": ("FLOAT", "Multiply the learning rate of the head by this factor."),
    "--head": ("NAME", "The name of the head in the model, if it cannot be found."),
    "--monitor": ("PATH", "Record the norm of every filter in this folder."),
    "--seed": (
        "INTEGER",
        "Seed torch, numpy and random, and add this to the program's own seeds.",
    ),
    "--strict": ("", "Stop at a step without an altered loss; fail unless a step has this alpha."),
    "--json": ("PATH", "Write a summary to this JSON file."),
    "--help": ("", "Show this message and exit."),
}
RUN_USAGE = """powergrad run [OPTIONS] -- SCRIPT ARGS
       powergrad run [OPTIONS] -- -m MODULE ARGS
       torchrun ... -m powergrad run [OPTIONS] -- SCRIPT ARGS

Run an unmodified PyTorch training program with altered gradients. After --, write the arguments
that you would pass to python. Without options, nothing is altered. The exit code is that of the
program, or 3 if a requested change did not happen."""


def parse_run(tokens: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The options of ``powergrad run``, up to ``--`` or what is none, and the program's arguments.

    Example:
        >>> parse_run(["--alpha", "0.3", "--", "train.py", "--alpha", "7"])
        ({'alpha': 0.3}, ['train.py', '--alpha', '7'])
    """
    options: dict[str, Any] = {}
    rest = list(tokens)
    while rest and rest[0].startswith("-"):
        name, is_given, text = rest.pop(0).partition("=")
        if name == "--":
            break
        name = "--help" if name == "-h" else name
        if name not in RUN_OPTIONS:
            raise ValueError(
                "Expected an option of `powergrad run`, or `--` before the program, but got "
                f"{name!r}.{_did_you_mean(name, RUN_OPTIONS)}"
            )
        kind = RUN_OPTIONS[name][0]
        if kind and not is_given and rest and not rest[0].startswith("--"):
            text = rest.pop(0)
        options[name[2:].replace("-", "_")] = _parse(name, kind, text)
    return options, rest


def _parse(option: str, kind: str, text: str) -> Any:
    """The value of an option; `text` is empty if there is none."""
    if kind == "FLOAT":
        from_0 = option in ("--alpha", "--decay-scale")
        expected = "a number of at least 0" if from_0 else "a positive number"
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if 0 < number < math.inf or (number == 0 and from_0):
            return number
    elif kind == "INTEGER":
        expected = "a whole number of at least 0"
        if text.isdecimal():
            return int(text)
    elif option == "--json" and not Path(text).parent.is_dir():
        expected = "a file in an existing folder"
    elif bool(text) == bool(kind):
        return {"": True, "NAME": text, "PATH": Path(text)}[kind]
    else:
        expected = "a value" if kind else "no value"
    got = repr(text) if text else "none"
    raise ValueError(f"Expected {expected} after `{option}`, but got {got}.")


# The commands of the workbench --------------------------------------------------------------------


def place_of(command: str) -> str:
    """The import path of a workbench command's function."""
    return f"powergrad.lab.cli.{COMMANDS[command][0]}:{command}"


def separated(tokens: Sequence[str]) -> list[str]:
    """Turn each token of `compare` after ``--`` into a value of the option ``--command``.

    Otherwise the user's program would be taken for a recipe and its overrides.

    Example:
        >>> separated(["compare", "--seeds", "8", "--", "python", "--x"])
        ['compare', '--seeds', '8', '--command=python', '--command=--x']
    """
    if tokens[:1] != ["compare"] or "--" not in tokens:
        return list(tokens)
    place = tokens.index("--")
    return [*tokens[:place], *(f"--command={token}" for token in tokens[place + 1 :])]


def _call_lab(tokens: Sequence[str]) -> int:
    from cyclopts import App, CycloptsError

    _postpone_core()
    name = tokens[0]
    app = App(name="powergrad")
    app.command(place_of(name), name=name, help=COMMANDS[name][1])
    try:
        return app(separated(tokens), exit_on_error=False, result_action="return_value") or 0
    except CycloptsError:  # already printed
        return 2


def _postpone_core() -> None:
    """Let `powergrad.lab` be imported without executing ``powergrad/__init__.py``.

    That imports torch, which takes seconds. It is executed as soon as one of its names is used, or
    a module of the core is imported.
    """
    spec = importlib.util.find_spec("powergrad")
    if "powergrad" in sys.modules or spec is None or spec.loader is None:
        return
    loader, package = spec.loader, importlib.util.module_from_spec(spec)
    sys.modules["powergrad"] = package
    for name in ("lab", "reporting", "_version"):
        importlib.import_module(f"powergrad.{name}")
    folders = package.__path__
    del package.__path__  # which the import of another module needs

    def load(name: str) -> Any:
        if name.startswith("__") and name not in ("__path__", "__version__"):
            raise AttributeError(name)
        del package.__getattr__
        package.__path__ = folders
        loader.exec_module(package)
        return getattr(package, name)

    package.__getattr__ = load


def _explain(error: Exception, tokens: Sequence[str]) -> tuple[str, int] | None:
    """The message for an error that the user can fix, and the exit code; None for another error."""
    if tokens[0] in ("run", "doctor") or tokens[0] not in COMMANDS:
        return (str(error), 2) if isinstance(error, (ValueError, OSError)) else None
    if isinstance(error, ModuleNotFoundError) and error.name:
        needed = "needs the workbench: pip install 'powergrad[lab]'"
        return f"`powergrad {tokens[0]}` {needed} ({error})", 2
    from powergrad.lab.cli.common import explain

    return explain(error)


def _did_you_mean(typed: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(typed.partition("=")[0], known, n=1)
    return f' Did you mean "{near[0]}"?' if near else ""
