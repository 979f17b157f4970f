"""Detects `PowerGrad` blocks that altered nothing, and names the losses that they called instead.

The value of a loss does not show whether PowerGrad Transform acted. So a block records whether
gradients were computed, and which other losses were called, and warns when it ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from types import CodeType, FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from powergrad._compat import OPERATORS, custom_function, recomputed_later

__all__ = ["OTHERS", "Watch", "complain"]

is_grad_enabled = torch.is_grad_enabled  # saves three lookups per call


class Watch:
    """Records the torch calls of one block until one of them is altered."""

    __slots__ = ("_no_grad", "_walked", "backward", "gradients", "names", "ours")

    def __init__(self) -> None:
        self.gradients = False  # a call returned a tensor with a gradient
        self.backward = False  # a backward pass ran
        self.ours = False  # one of this package's functions was called explicitly
        self.names: dict[str, None] = {}  # losses and functions that were called, in order
        self._no_grad = False  # the user disabled gradients
        self._walked: set[int] = set()  # callers already inspected with gradients disabled

    def saw(self, func: Any, out: Any) -> None:
        """Note a torch call that was not altered. This runs after every call: it must be cheap."""
        if is_grad_enabled():
            new = not self.gradients and isinstance(out, Tensor) and out.requires_grad
            if new or type(func) in OPERATORS:
                self.saw_loss(func, out)
        else:
            # This is the forward of a custom autograd function, or `torch.no_grad`. The callers
            # show which; each call site is inspected once.
            frame = sys._getframe(2)
            if id(frame.f_code) not in self._walked:
                self._walked.add(id(frame.f_code))
                self._look_around(frame)

    def saw_loss(self, func: Any, out: Any) -> None:
        """Note a call of one of `OTHERS`, or of an operator."""
        if func is Tensor.backward:
            self.backward = True
        if not isinstance(out, Tensor) or not out.requires_grad or not is_grad_enabled():
            return
        if out.is_leaf:  # a parameter, which in-place functions return
            return
        self.gradients = True
        if func in OTHERS:
            self.names[OTHERS[func]] = None
        elif type(func) in OPERATORS:
            namespace, name, *_ = str(func).split(".")
            self.ours = self.ours or namespace == "powergrad"
            if namespace != "aten" or name in _ATEN:  # a custom kernel, or a loss
                self.names[f"torch.ops.{namespace}.{name}"] = None

    def _look_around(self, frame: FrameType) -> None:
        functions = [custom_function(f) for f in recomputed_later()]
        # Arguments that require grad do not prove that gradients were enabled outside the function.
        # If anything else in this block ran without gradients, they were not.
        self._no_grad = self._no_grad or not functions
        self.gradients = self.gradients or not self._no_grad
        for function in functions:
            if function is not None and function.__module__ not in _OUR_LOSSES:
                self.names[f"{function.__name__}.apply"] = None
        caller: FrameType | None = frame
        while caller is not None and not self.ours:
            module = caller.f_globals.get("__name__", "")
            self.ours = caller.f_code.co_name == "forward" and module in _OUR_LOSSES
            caller = caller.f_back


_OUR_LOSSES = {f"powergrad.{name}" for name in ("loss", "linear", "transform", "operators")}


def complain(name: str, called: dict[str, None], *, strict: bool) -> None:
    """Warn, or raise if `strict`, that the block `name` has altered nothing.

    The warning is placed at the first line outside of this package.
    """
    message = (
        f"Expected {name} to alter a cross-entropy or log-softmax with gradients, but got none in "
        "this block, so its gradients are plain."
    )
    if called:  # the loss is among the last
        message += f" The block called {', '.join(list(called)[-5:])}, which PowerGrad does not "
        message += "alter."
    message += (
        " Put PowerGrad around the code that computes the loss, or call `powergrad.cross_entropy` "
        "there. The documentation of PowerGrad lists the functions that it alters."
    )
    if strict:
        raise RuntimeError(message)
    warnings.warn(message, stacklevel=_stacklevel())


_HERE = os.path.dirname(__file__) + os.sep


def _stacklevel() -> int:
    """The `stacklevel` of the first frame outside this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_inner(frame.f_code):
        level, frame = level + 1, frame.f_back
    return level


def _is_inner(code: CodeType) -> bool:
    return code.co_filename.startswith(_HERE) or code.co_filename == contextlib.__file__


# The losses that PowerGrad does not alter, as users call them -------------------------------------

_LOSSES = """
    nll_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div ctc_loss mse_loss l1_loss
    smooth_l1_loss huber_loss gaussian_nll_loss poisson_nll_loss hinge_embedding_loss
    cosine_embedding_loss margin_ranking_loss multi_margin_loss multilabel_margin_loss
    multilabel_soft_margin_loss soft_margin_loss triplet_margin_loss logsigmoid softmax log_softmax
"""
OTHERS: dict[Any, str] = {
    getattr(F, name): f"F.{name}" for name in _LOSSES.split() if hasattr(F, name)
}
for _name in ("softmax", "logsumexp", "log_softmax"):
    for _where in (torch, torch.special, Tensor):
        OTHERS[getattr(_where, _name)] = _name

OTHERS[Tensor.backward] = "Tensor.backward"

_ATEN = {"cross_entropy_loss", "nll_loss", "nll_loss_forward", "log_softmax", "_log_softmax"}
