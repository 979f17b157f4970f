"""The private corners of PyTorch that the losses look at, each with its reason.

None is needed: where a name is missing, what depends on it is considered unsafe, and the definition
in ordinary operations is used (`powergrad.transform`), which is slower and right everywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def _private(path: str) -> Any:
    """``torch.<path>``, or None if this version of PyTorch does not have it."""
    value: Any = torch
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


# No public function tells whether a `torch.func` transform, a dispatch mode (`make_fx` uses one) or
# `make_fx(pre_dispatch=True)` sees the operators that are called. 2.6 to 2.13.
_transforms_active = _private("_C._are_functorch_transforms_active")
_dispatch_modes = _private("_C._len_torch_dispatch_stack")
_key_included = _private("_C._dispatch_tls_is_dispatch_key_included")
_pre_dispatch = _private("_C.DispatchKey.PreDispatch")
# Whether a tensor belongs to a transform, or is a batch of gradients (`is_grads_batched`), and so
# has no values that could be read. 2.6 to 2.13.
is_wrapped = _private("_C._functorch.is_functorch_wrapped_tensor")
is_batched = _private("_C._functorch.is_legacy_batchedtensor")
_is_tracing = _private("_C._is_tracing") or torch.jit.is_tracing  # pyright: ignore  # faster
_log_softmax = _private("_log_softmax")
# TorchDynamo enters the transforms that it traces. 2.6 to 2.13.
_interpreters = _private("_C._functorch.peek_interpreter_stack")
# `torch.compiler.is_exporting` does not exist in 2.6, and is true inside `torch.compile` up to 2.9.
_TELLS_EXPORT = torch.__version__ >= "2.10"  # a TorchVersion
_KNOWN = None not in (
    _transforms_active,
    _dispatch_modes,
    _key_included,
    _pre_dispatch,
    is_wrapped,
    is_batched,
    getattr(forward_ad, "_current_level", None),
)


def nothing_traced() -> bool:
    """Whether no transform, forward-mode AD, dispatch mode or tracer sees operators.

    It does not look at ``torch.compile``, for which there is a public function.
    """
    return _KNOWN and not (
        forward_ad._current_level >= 0
        or _transforms_active()
        or _dispatch_modes()
        or _key_included(_pre_dispatch)
        or _is_tracing()
    )


def log_softmax_of_rows(z: Tensor) -> Tensor:
    """``log_softmax(z, 1)``, which an active `PowerGrad` does not alter."""
    if _log_softmax is None:  # takes 8 microseconds less
        return torch.ops.aten.log_softmax.int(z, 1, None)
    return _log_softmax(z, 1, False)


def in_transform() -> bool:
    """Whether the caller, which may be traced by TorchDynamo, is inside ``torch.func``."""
    return _interpreters is None or _interpreters() is not None


def is_exporting() -> bool | None:
    """Whether ``torch.export`` traces the caller; None if it may be ``torch.compile``."""
    if not torch.compiler.is_compiling():
        return False
    if not torch.compiler.is_dynamo_compiling():  # `strict=False`
        return True
    return torch.compiler.is_exporting() if _TELLS_EXPORT else None


def in_loss_parallel() -> bool:
    """Whether the caller is, or may be, inside ``loss_parallel()`` of tensor parallelism."""
    # It registers handlers that compute the gradient of the logits in `nll_loss`. 2.6 to 2.13.
    if "torch.distributed.tensor.parallel.loss" not in sys.modules:
        return False
    handlers = _private("distributed.tensor.DTensor._op_dispatcher._custom_op_handlers")
    return handlers is None or torch.ops.aten.nll_loss_forward.default in handlers


def is_autocasting(device: str) -> bool:
    """Whether autocast is enabled for a type of device."""
    try:
        return torch.is_autocast_enabled(device)
    except RuntimeError:  # a device that has none
        return False


# What `torch.compiler.assume_constant_result` sets, without loading TorchDynamo here.
for _function in (in_transform, in_loss_parallel):
    _function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` where no transform is active.

    This skips a Python layer for transforms, which takes 5% of the time of a small loss.
    """
    apply = getattr(super(torch.autograd.Function, function), "apply", None)
    return function.apply if apply is None else apply
