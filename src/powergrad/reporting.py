"""`report`: a training script reports its metrics to the command that started it."""

from __future__ import annotations

import json
import numbers
import os
from pathlib import Path
from typing import Any

__all__ = ["report"]

VARIABLE = "POWERGRAD_REPORT"


def report(**metrics: float) -> None:
    """Report the metrics of this training to the command that started it, such as a comparison.

    The command sets ``POWERGRAD_REPORT`` to the path of a JSON file, into which metrics are merged;
    the last value of each name counts. Elsewhere nothing is written, so the call can stay in the
    script. Under torchrun, only rank 0 writes.

    Args:
        metrics: Numbers by name: Python or numpy scalars, not tensors or strings.

    Raises:
        TypeError: If a metric is not a number, even if nothing is written.

    Example:
        >>> report(accuracy=97.5, test_loss=0.11)
    """
    for name, value in metrics.items():
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            remedy = f"; pass `{name}.item()`" if callable(getattr(value, "item", None)) else ""
            raise TypeError(
                f"Expected `{name}` to be a number, but got {type(value).__name__}{remedy}."
            )
    file = os.environ.get(VARIABLE)
    if not file or os.environ.get("RANK", "0") != "0":
        return
    path = Path(file)
    known: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    write_json(path, known | {name: float(value) for name, value in metrics.items()})


def write_json(path: Path, value: Any) -> None:
    """Replace the file `path` atomically."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fresh.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(fresh, path)
