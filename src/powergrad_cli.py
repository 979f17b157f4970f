"""The command `powergrad`: the table of its commands.

It stands outside the package so that ``powergrad --help`` need not import torch. What the commands
do is in the package :mod:`powergrad.lab.cli`, whose modules are imported when a command is called.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Sequence
from typing import TextIO, cast

# By command: the module of powergrad.lab.cli that has it, and its line in the help.
COMMANDS = {
    "compare": (
        "studies",
        "Does it help here? Baseline, PGT, AGC and combinations over seeds, with a verdict. Of "
        "your own program, unchanged: compare [OPTIONS] -- python train.py --seed {seed}.",
    ),
    "run": (
        "running",
        "One program, unchanged, with altered gradients: run --alpha 0.3 -- train.py.",
    ),
    "sweep": ("studies", "A grid over alpha, and any other key, over seeds."),
    "decompose": ("studies", "Which part of PGT helps here?"),
    "plan": ("planning", "How many seeds a claim needs."),
    "train": ("training", "One training run, from a recipe."),
    "paper": ("paper", "The paper: list, show, run and draw every row and figure."),
    "inspect": ("looking", "The census: which filters, features and layers are dead."),
    "export": (
        "training",
        "Deploy: a trained network, calibrated, as safetensors, torch.export and ONNX.",
    ),
    "report": ("looking", "The page: a run or a study as one HTML file."),
    "watch": ("looking", "The page of a study, live while it runs."),
    "bench": ("looking", "The benchmarks, in a checkout."),
}


def place_of(command: str) -> str:
    """Where a command's function is; that of a group of commands is its app."""
    return f"powergrad.lab.cli.{COMMANDS[command][0]}:{'app' if command == 'paper' else command}"


def separated(tokens: Sequence[str]) -> list[str]:
    """The tokens of `compare`, with each one after ``--`` as a value of the option ``--command``.

    So a program of the user's is not taken for a recipe and its changes.

    Example:
        >>> separated(["compare", "--seeds", "8", "--", "python", "--x"])
        ['compare', '--seeds', '8', '--command=python', '--command=--x']
    """
    if tokens[:1] != ["compare"] or "--" not in tokens:
        return list(tokens)
    place = tokens.index("--")
    return [*tokens[:place], *(f"--command={token}" for token in tokens[place + 1 :])]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 2 where the user must change something."""
    try:
        from cyclopts import App, CycloptsError
    except ImportError:
        words = "the command needs the workbench: pip install 'powergrad[lab]'"
        print(f"powergrad: {words}", file=sys.stderr)
        return 2
    app = App(
        name="powergrad",
        help="PowerGrad Transform: train, compare, inspect. Start with `powergrad compare`.",
        version=_version,
    )
    for number, (name, (_, line)) in enumerate(COMMANDS.items()):
        app.command(place_of(name), name=name, help=line, sort_key=number)
    tokens = separated(sys.argv[1:] if arguments is None else arguments)
    try:
        result = app(tokens, exit_on_error=False, result_action="return_value") or 0
        sys.stdout.flush()
    except CycloptsError:  # has been printed
        return 2
    except BrokenPipeError:
        if not _is_unread(sys.stdout):
            raise
        return 141  # what a shell says of a command whose reader, such as head, has gone
    except KeyboardInterrupt:
        print("powergrad: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        from powergrad.lab.cli.common import explain

        message = None if os.environ.get("POWERGRAD_DEBUG") else explain(error, tokens)
        if message is None:
            raise
        print(f"powergrad: {message}", file=sys.stderr)
        return 2
    # A program of the user's, whose errors are its own.
    return cast(int, result() if callable(result) else result)


def _is_unread(stream: TextIO) -> bool:
    """Whether a stream's reader has gone; if so, what is still to be written is thrown away."""
    poll = select.poll()
    poll.register(stream, select.POLLERR)
    if not poll.poll(0):
        return False
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
    return True


def _version() -> str:
    from importlib.metadata import version

    return version("powergrad")


if __name__ == "__main__":
    sys.exit(main())
