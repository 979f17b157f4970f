"""What all commands share: overrides, flags, and what the user is told of errors."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from powergrad.lab.files import FileError

__all__ = ["STOPPED", "Flag", "Overrides", "explain", "stopped"]

Overrides = Annotated[
    str,
    Parameter(
        allow_leading_hyphen=True,
        help="changes of the recipe: --dotted.key value, or dotted.key=value (see --keys)",
    ),
]
Flag = Parameter(negative="")

STOPPED = 130


def explain(error: Exception) -> str | None:
    """The message for an error that is the user's to mend; None for a bug of ours."""
    if isinstance(error, (ValueError, FileError, OSError, ImportError)):
        return str(error)
    return None


def stopped(reason: Exception) -> int:
    """Say that a command was interrupted; returns its exit code."""
    print(f"powergrad: {reason}; the same command goes on from there.", file=sys.stderr)
    return STOPPED
