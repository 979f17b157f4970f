"""PowerGrad for every loss of a process, including losses in libraries.

A :class:`powergrad.PowerGrad` block around a whole program would slow down every torch call by a
microsecond or more. So the functions that it alters are replaced by functions that enter a block
for their own duration, in every thread and without cost for other calls. Compiled code is
different: TorchDynamo recognises these functions by identity, and traces the active modes. From the
first ``torch.compile`` on, PyTorch's own functions are restored, and one block surrounds
everything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from powergrad._compat import (
    custom_function,
    forget_functions,
    function_modes,
    gradients_hidden,
    pop_mode,
    push_mode,
    recomputed_later,
)
from powergrad.mode import _CURRENT, _KNOWN, PowerGrad, _Block, _traced_calls

__all__ = ["Losses"]

_PLACES: list[tuple[Any, str]] = [
    *((F, name) for name in ("cross_entropy", "log_softmax", "linear_cross_entropy")),
    *((owner, "log_softmax") for owner in (torch, torch.special, Tensor)),
]


class Losses:
    """Alters the cross-entropies and log-softmaxes of this process from `install` on."""

    def __init__(self, alpha: float) -> None:
        self._mode = PowerGrad(alpha)
        self._undo: list[Callable[[], object]] = []

    @property
    def altered(self) -> dict[str, int]:
        """The altered calls that have a gradient, by kind."""
        return dict(self._mode.altered)

    @property
    def compiled(self) -> dict[str, int]:
        """The altered calls in compiled code, by kind; each is counted when it is compiled."""
        return {kind: count for kind, count in _traced_calls.items() if kind not in ("", "off")}

    def install(self) -> None:
        """Replace the functions."""
        for owner, name in _PLACES:
            if not hasattr(owner, name):  # an older PyTorch
                continue
            original = getattr(owner, name)
            altered = self._altered(original)
            _KNOWN[altered] = _KNOWN[original]  # for PowerGrad blocks in the program itself
            own = name in vars(owner)
            setattr(owner, name, altered)
            undo = functools.partial(setattr, owner, name, original)
            self._undo.append(undo if own else functools.partial(delattr, owner, name))
            self._undo.append(functools.partial(_KNOWN.pop, altered))
        compile_ = torch.compile

        @functools.wraps(compile_)
        def compile_inside(*args: Any, **kwargs: Any) -> Any:
            self._surround()
            return compile_(*args, **kwargs)

        torch.compile = compile_inside
        self._undo.append(functools.partial(setattr, torch, "compile", compile_))

    def remove(self) -> None:
        """Restore PyTorch's functions."""
        for undo in self._undo:
            undo()
        self._undo = []

    def _altered(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(original)
        def altered(*args: Any, **kwargs: Any) -> Tensor:
            # Inside a PowerGrad block, that block alters the call.
            if is_compiling() or _CURRENT.get() is not None or not _has_gradient():
                return original(*args, **kwargs)
            return _Block(self._mode).call(original, args, kwargs)

        return altered

    def _surround(self) -> None:
        """Surround everything that this thread does from now on by one block."""
        if not self._undo:
            return
        self.remove()
        forget_functions()
        # The block goes below the active modes of the program, so that they can be left in order.
        modes = function_modes()
        for _ in modes:
            pop_mode()
        block = _Block(self._mode).__enter__()
        block.watch = None  # unaltered losses are reported at the end of the program
        for mode in modes:
            push_mode(mode)


def _has_gradient() -> bool:
    """Whether the call may have a gradient, now or when a PyTorch checkpoint repeats it.

    A custom autograd function computes its own gradient, or calls the loss again.
    """
    if torch.is_grad_enabled() or gradients_hidden():
        return True
    return any(custom_function(frame) is None for frame in recomputed_later())
