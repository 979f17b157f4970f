"""The command `powergrad`: the table of its subcommands.

It is outside the package so that ``powergrad --help`` need not import torch. The subcommands are in
the package :mod:`powergrad.lab.cli`, whose modules are imported when a subcommand is called.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Sequence
from typing import TextIO, cast

# For each command: its module in powergrad.lab.cli, and its line in the help.
COMMANDS = {
    "compare": (
        "studies",
        "Find out whether PGT helps: baseline, PGT, AGC and combinations over seeds, with a "
        "verdict. For your own program: compare [OPTIONS] -- python train.py --seed {seed}.",
    ),
    "run": (
        "running",
        "Run an unmodified training program with altered gradients: run --alpha 0.3 -- train.py.",
    ),
    "sweep": ("studies", "Run a grid over alpha, or over any other key, with several seeds."),
    "decompose": ("studies", "Find out which part of PGT makes a difference."),
    "plan": ("planning", "Compute how many seeds a claim needs."),
    "train": ("training", "Train one network from a recipe."),
    "inspect": ("looking", "Count dead filters, features and layers (the census)."),
    "export": (
        "training",
        "Export a trained, calibrated network to safetensors, torch.export and ONNX.",
    ),
    "report": ("looking", "Write the HTML page of a run or a study."),
    "watch": ("looking", "Serve the page of a study while it runs."),
    "bench": ("looking", "Run the benchmarks (in a checkout)."),
}


def place_of(command: str) -> str:
    """The import path of a command's function."""
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 2 where the user must change something."""
    try:
        from cyclopts import App, CycloptsError
    except ImportError:
        message = "this command needs the workbench: pip install 'powergrad[lab]'"
        print(f"powergrad: {message}", file=sys.stderr)
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
    except CycloptsError:  # already printed
        return 2
    except BrokenPipeError:
        if not _is_unread(sys.stdout):
            raise
        return 141  # as shells report a command whose reader, such as head, has exited
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
    # Run the user's program outside of the error handling above.
    return cast(int, result() if callable(result) else result)


def _is_unread(stream: TextIO) -> bool:
    """Whether a stream's reader has exited; if so, the remaining output is discarded."""
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
