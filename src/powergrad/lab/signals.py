"""SIGINT and SIGTERM as a flag that a loop checks between two steps."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any


class Interrupted(Exception):  # noqa: N818 (it is not an error)
    """A run or a study was asked to stop; it is saved and can be resumed."""


@contextlib.contextmanager
def watching_signals(*, second_interrupts: bool) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether SIGINT or SIGTERM has arrived inside the context."""
    came = False

    def handle(number: int, frame: Any) -> None:
        nonlocal came
        if second_interrupts and came and number == signal.SIGINT:
            raise KeyboardInterrupt
        came = True

    before = {}
    with contextlib.suppress(ValueError):  # only the main thread can handle signals
        before = {n: signal.signal(n, handle) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
