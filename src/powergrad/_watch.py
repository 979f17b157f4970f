"""What a `PowerGrad` block knows of the calls that it did not alter.

The value of a loss does not show whether PowerGrad Transform acted. So a block records whether
gradients were computed, and which other losses were called, and warns when it ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Watch"]


class Watch:
    """Records the torch calls of one block until one of them is altered."""

    def __init__(self) -> None:
        self.gradients = False  # a call returned a tensor with a gradient
        self.backward = False  # a backward pass ran
        self.elsewhere = False  # another thread called F.cross_entropy
        self.names: dict[str, None] = {}  # losses that were called, in order
        self._enabled = self._seen = torch.is_grad_enabled()
        self._inside = False

    def in_custom_function(self) -> bool:
        """Whether gradients are disabled by PyTorch, for a custom function, and not by Python.

        A mode sees each change of the grad mode in Python. A custom function may disable gradients
        again by itself, so it lasts until they are enabled without a change in Python.
        """
        if torch.is_inference_mode_enabled():
            return False
        enabled = torch.is_grad_enabled()
        if enabled != self._seen:
            self._seen, self._inside = enabled, not enabled
        return self._inside and not enabled

    def saw_grad_mode(self, enabled: bool) -> None:
        """Note that Python is about to enable or disable gradients."""
        self.in_custom_function()
        self._seen = enabled

    def saw(self, func: Any, out: Any) -> None:
        """Note a torch call that was not altered. This runs after every call: it must be cheap."""
        if func is Tensor.backward:
            self.backward = True
        elif not torch.is_grad_enabled():
            self.gradients = self.gradients or self.in_custom_function()
        elif isinstance(out, Tensor) and out.requires_grad and not out.is_leaf:
            self.gradients = True
            if func in _OTHERS:
                self.names[_OTHERS[func]] = None
            elif type(func) in _OPERATORS:
                namespace, name, *_ = str(func).split(".")
                if namespace != "aten" or name in _ATEN:  # a custom kernel, or a loss
                    self.names[f"torch.ops.{namespace}.{name}"] = None

    def complain(self, name: str, strict: bool, backward_expected: bool) -> None:
        """Warn, or raise if `strict`, that the block `name` has altered nothing."""
        if not self._enabled:
            return
        backward = self.backward and not backward_expected
        if not (strict or self.gradients or self.elsewhere or backward):
            return
        message = (
            f"{name} altered no cross-entropy or log-softmax with gradients in this block, so its "
            "gradients are plain."
        )
        if self.names:  # the loss is among the last
            message += f" The block called {', '.join(list(self.names)[-5:])}, which PowerGrad "
            message += "does not alter."
        message += (
            " Put PowerGrad around the code that computes the loss, or call "
            "`powergrad.cross_entropy` there. Losses in other threads and in compiled code need "
            "`powergrad.enable`. The documentation of PowerGrad lists the functions that it alters."
        )
        if strict:
            raise RuntimeError(message)
        level, frame = 1, sys._getframe()  # warn at the first line outside of this package
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_INNER):
            level, frame = level + 1, frame.f_back
        warnings.warn(message, stacklevel=level)


_INNER = (os.path.dirname(__file__) + os.sep, contextlib.__file__)

_LOSSES = """
    nll_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div ctc_loss mse_loss l1_loss
    smooth_l1_loss huber_loss gaussian_nll_loss poisson_nll_loss hinge_embedding_loss
    cosine_embedding_loss margin_ranking_loss multi_margin_loss multilabel_margin_loss
    multilabel_soft_margin_loss soft_margin_loss triplet_margin_loss logsigmoid softmax log_softmax
"""
_OTHERS = {getattr(F, name): f"F.{name}" for name in _LOSSES.split() if hasattr(F, name)}
_OTHERS |= {
    getattr(owner, name): name
    for owner in (torch, torch.special, Tensor)
    for name in ("softmax", "logsumexp", "log_softmax")
}
_ATEN = {"cross_entropy_loss", "nll_loss", "nll_loss_forward", "log_softmax", "_log_softmax"}
_OPERATORS = (type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor))
