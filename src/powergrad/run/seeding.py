"""Seeds a program that has no option for its seed; generators of its own are not changed."""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
from collections.abc import Callable
from typing import Any

__all__ = ["Seeding"]


PLACES = (
    *("torch.manual_seed", "torch.random.manual_seed"),
    *("torch.cuda.manual_seed", "torch.cuda.manual_seed_all"),
    *("random.seed", "numpy.random.seed"),
)


class Seeding:
    """Seeds torch, numpy and random, and adds `seed` to the integers with which a program does."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.added: dict[str, None] = {}  # the calls of the program that were changed
        self._is_inside = False  # of such a call: torch.manual_seed calls those of CUDA
        for path in PLACES:
            module, _, name = path.rpartition(".")
            with contextlib.suppress(ImportError):  # numpy may be missing
                owner = importlib.import_module(module)
                plain = getattr(owner, name)
                plain(seed % 2**32)
                setattr(owner, name, self._adding(plain, path))

    def _adding(self, plain: Callable[..., Any], title: str) -> Callable[..., Any]:
        @functools.wraps(plain)
        def add(*arguments: Any, **named: Any) -> Any:
            place = next((name for name in ("seed", "a") if name in named), None)
            given: Any = named[place] if place else next(iter(arguments), None)
            if self._is_inside or not hasattr(given, "__index__"):
                return plain(*arguments, **named)
            self.added[f"{title}({given})"] = None
            named.pop(place or "", None)
            self._is_inside = True
            try:
                return plain((operator.index(given) + self.seed) % 2**32, *arguments[1:], **named)
            finally:
                self._is_inside = False

        return add

    def __str__(self) -> str:
        return f"seed {self.seed}{', added to ' * bool(self.added)}{', '.join(self.added)}"
