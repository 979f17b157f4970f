"""The command `powergrad`: ``powergrad run``, and the table of the workbench's commands.

This module is outside the package, because importing the package imports torch, and ``--help``
should be fast. ``powergrad run`` needs only torch. The other commands are in the package
:mod:`powergrad.lab.cli`; its modules are imported when a command is called.
"""

from __future__ import annotations

import argparse
import difflib
import os
import select
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

# For each command: its module in powergrad.lab.cli, and its line in the help.
COMMANDS = {
    "compare": (
        "compare",
        "Find out whether PGT helps: baseline, PGT, AGC and combinations over seeds, with a "
        "verdict. For your own program: compare [OPTIONS] -- python train.py --seed {seed}.",
    ),
    # in this module
    "run": ("", "Run an unmodified program with altered gradients: run --alpha 0.3 -- train.py."),
    "sweep": ("presets", "Run a grid over alpha, or over any other key, with several seeds."),
    "decompose": ("presets", "Find out which part of PGT makes a difference."),
    "plan": ("planning", "Compute how many seeds a claim needs."),
    "train": ("train", "Train one network from a recipe."),
    "inspect": ("looking", "Count dead filters, features and layers (the census)."),
    "export": ("train", "Export a trained, calibrated network (safetensors, torch.export, ONNX)."),
    "report": ("looking", "Write the HTML page of a run or a study."),
    "watch": ("looking", "Serve the page of a study while it runs."),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 2 where the user must change something."""
    tokens = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    try:
        result = _call(tokens)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _is_unread(sys.stdout):
            raise
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
        return _prepare_run(tokens[1:])
    if name in COMMANDS:
        return _call_lab(tokens)
    if name == "--version":
        from importlib.metadata import version

        print(version("powergrad"))
    elif name in ("-h", "--help"):
        print(_overview(), end="")
    else:
        raise ValueError(f"Expected a command, but got {name!r}.{_did_you_mean(name, COMMANDS)}")
    return 0


def _overview() -> str:
    """The help of ``powergrad``: all commands."""
    parser = argparse.ArgumentParser(
        prog="powergrad",
        description="PowerGrad Transform: train, compare, inspect. Start with `powergrad compare`.",
    )
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, (_, line) in COMMANDS.items():
        commands.add_parser(name, help=line)
    return parser.format_help()


# The command `run` --------------------------------------------------------------------------------


# For each option, which is a field of `powergrad.run.Options`: its value, and its line in the help.
RUN_OPTIONS = {
    "--alpha": (
        "FLOAT",
        "The alpha of PGT, for every cross-entropy and log-softmax; 1 is plain cross-entropy.",
    ),
    "--agc": (
        "FLOAT",
        "Adaptive clipping: the largest ratio of gradient norm to weight norm of each unit.",
    ),
    "--clip-norm": ("FLOAT", "Clip the norm of all gradients of an optimizer to this value."),
    "--clip-value": ("FLOAT", "Clip each element of the gradients to this value."),
    "--decay-scale": ("FLOAT", "Multiply the weight decay of every optimizer by this factor."),
    "--lr-scale": ("FLOAT", "Multiply the learning rate of every optimizer by this factor."),
    "--head-lr-scale": ("FLOAT", "Multiply the learning rate of the head by this factor."),
    "--head": ("NAME", "The name of the head in the model, if it cannot be found."),
    "--monitor": ("PATH", "Record the norm of every filter in this folder."),
    "--seed": (
        "INTEGER",
        "Seed torch, numpy and random before the program, and add this to the seeds that it sets.",
    ),
    "--strict": (
        "",
        "Stop at the first step without an altered loss, and fail unless the alpha measured on a "
        "step equals --alpha.",
    ),
    "--json": ("PATH", "Write a summary to this JSON file."),
    "--help": ("", "Show this message and exit."),
}


def _run_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="powergrad run",
        usage="powergrad run [OPTIONS] -- SCRIPT ARGS\n"
        "       powergrad run [OPTIONS] -- -m MODULE ARGS\n"
        "       torchrun ... -m powergrad run [OPTIONS] -- SCRIPT ARGS",
        description="Run an unmodified PyTorch training program with altered gradients. After --, "
        "write the arguments that you would pass to python. Without options, nothing is altered. "
        "The exit code is that of the program, or 3 if a requested change did not happen.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        exit_on_error=False,
        add_help=False,
    )
    kinds = {"FLOAT": _number, "INTEGER": int, "NAME": str, "PATH": Path}
    for option, (value, line) in RUN_OPTIONS.items():
        if value:
            parser.add_argument(option, type=kinds[value], metavar=value, help=line)
        else:
            short = ["-h"] * (option == "--help")
            parser.add_argument(*short, option, action="store_true", help=line)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def parse_run(tokens: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The options of ``powergrad run``, and the command line of the program.

    The options end at ``--`` or at the first token that is none; the rest belongs to the program.

    Raises:
        ValueError: If an option is unknown, or its value is missing or of another type.

    Example:
        >>> parse_run(["--alpha", "0.3", "--", "train.py", "--alpha", "7"])
        ({'alpha': 0.3}, ['train.py', '--alpha', '7'])
    """
    try:
        given, unknown = _run_parser().parse_known_args(tokens)
    except argparse.ArgumentError as error:
        detail = error.message.replace("expected one argument", "a value, but got none")
        detail = detail.replace("ignored explicit argument", "no value, but got")
        wanted, _, got = detail.partition(", ")
        raise ValueError(f"Expected {wanted} after `{error.argument_name}`, {got}.") from None
    if unknown:
        raise ValueError(
            "Expected an option of `powergrad run`, or `--` before the program, but got "
            f"{unknown[0]!r}.{_did_you_mean(unknown[0], RUN_OPTIONS)}"
        )
    options = vars(given)
    command: list[str] = options.pop("command")
    return options, command[1:] if command[:1] == ["--"] else command


def _prepare_run(tokens: Sequence[str]) -> int | Callable[[], int]:
    """Check the options and the program; returns what executes it."""
    options, command = parse_run(tokens)
    if options.pop("help", False):
        print(_run_parser().format_help(), end="")
        return 0
    from powergrad.run import Options, Program, launch

    return partial(launch, Program(command), Options(**options))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a number, but got {text!r}") from None


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

    name = tokens[0]
    app = App(name="powergrad")
    app.command(place_of(name), name=name, help=COMMANDS[name][1])
    try:
        return app(separated(tokens), exit_on_error=False, result_action="return_value") or 0
    except CycloptsError:  # already printed
        return 2


# Messages -----------------------------------------------------------------------------------------


def _explain(error: Exception, tokens: Sequence[str]) -> tuple[str, int] | None:
    """The message for an error that the user can fix, and the exit code; None for another error."""
    if tokens[0] == "run" or tokens[0] not in COMMANDS:
        return (str(error), 2) if isinstance(error, (ValueError, OSError)) else None
    if isinstance(error, ModuleNotFoundError) and error.name:
        needed = "needs the workbench: pip install 'powergrad[lab]'"
        return f"`powergrad {tokens[0]}` {needed} ({error})", 2
    from powergrad.lab.cli.common import explain

    return explain(error)


def _did_you_mean(typed: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(typed.partition("=")[0], known, n=1)
    return f' Did you mean "{near[0]}"?' if near else ""


def _is_unread(stream: TextIO) -> bool:
    """Whether a stream's reader has exited; if so, the remaining output is discarded."""
    poll = select.poll()
    poll.register(stream, select.POLLERR)
    if not poll.poll(0):
        return False
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
    return True


if __name__ == "__main__":
    sys.exit(main())
