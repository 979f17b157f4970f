"""PowerGrad for every loss of a process, also those of other people's code.

A :class:`powergrad.PowerGrad` block around a whole program would slow down every torch call in it,
by a microsecond or more. So the functions that it alters are replaced by ones that enter a block
for their own duration: in every thread, at no cost to other calls. Compiled code is different:
TorchDynamo knows these functions by identity, and traces the modes that are active. From the first
``torch.compile`` on, the functions are PyTorch's own again, and one block is around everything.
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
        """The altered calls in compiled code, by kind: each counts when it is compiled only."""
        return {kind: count for kind, count in _traced_calls.items() if kind not in ("", "off")}

    def install(self) -> None:
        """Replace the functions."""
        for owner, name in _PLACES:
            if not hasattr(owner, name):  # an older PyTorch
                continue
            original = getattr(owner, name)
            altered = self._altered(original)
            _KNOWN[altered] = _KNOWN[original]  # what PyTorch shows to a PowerGrad of the program's
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
        """Give back PyTorch's functions."""
        for undo in self._undo:
            undo()
        self._undo = []

    def _altered(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(original)
        def altered(*args: Any, **kwargs: Any) -> Tensor:
            # Inside of a PowerGrad, that one decides.
            if is_compiling() or _CURRENT.get() is not None or not _has_gradient():
                return original(*args, **kwargs)
            return _Block(self._mode).call(original, args, kwargs)

        return altered

    def _surround(self) -> None:
        """Put one block around everything that this thread does from now on."""
        if not self._undo:
            return
        self.remove()
        forget_functions()
        # Below the modes that the program is inside of, which leave in their own order.
        modes = function_modes()
        for _ in modes:
            pop_mode()
        block = _Block(self._mode).__enter__()
        block.watch = None  # what was not altered is judged at the end of the program
        for mode in modes:
            push_mode(mode)


def _has_gradient() -> bool:
    """Whether the call may have a gradient, now or when a checkpoint of PyTorch's repeats it.

    A custom autograd function computes a gradient of its own, or calls the loss again.
    """
    if torch.is_grad_enabled() or gradients_hidden():
        return True
    return any(custom_function(frame) is None for frame in recomputed_later())
