"""The private corners of PyTorch that the losses look at, each with its reason.

None is needed: where a name is missing, what depends on it is considered unsafe, and the definition
in ordinary operations is used (`powergrad.transform`), which is slower and right everywhere.
"""

from __future__ import annotations

import inspect
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
_KNOWN = None not in (
    _transforms_active,
    _dispatch_modes,
    _key_included,
    _pre_dispatch,
    is_wrapped,
    is_batched,
    getattr(forward_ad, "_current_level", None),
)
# `torch.compiler.is_exporting` does not exist in 2.6, and is true inside `torch.compile` of 2.8 to
# 2.10; of 2.11 and 2.12, nothing is known.
_TELLS_EXPORT = torch.__version__ >= "2.13"  # a TorchVersion
_log_softmax = _private("_log_softmax")
# Whether the backward pass that runs was called with `retain_graph=True`. 2.6 to 2.13.
_keep_graph = _private("_C._autograd._get_current_graph_task_keep_graph")


def nothing_traced() -> bool:
    """Whether no transform, forward-mode AD, dispatch mode or tracer sees operators.

    It does not look at ``torch.compile``, for which there is a public function.
    """
    return _KNOWN and not (
        forward_ad._current_level >= 0
        or _transforms_active()
        or _dispatch_modes()
        or _key_included(_pre_dispatch)
        or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    )


def keeps_graph() -> bool:
    """Whether there may be another backward pass through the graph of the one that runs."""
    return _keep_graph is None or _keep_graph()


def log_softmax_of_rows(z: Tensor) -> Tensor:
    """``log_softmax(z, 1)``, which an active `PowerGrad` does not alter."""
    if _log_softmax is None:  # takes 8 microseconds less
        return torch.ops.aten.log_softmax.int(z, 1, None)
    return _log_softmax(z, 1, False)


def in_transform() -> bool:
    """Whether the caller, which may be traced by TorchDynamo, is inside ``torch.func``."""
    return _transforms_active is None or _transforms_active()  # TorchDynamo enters what it traces


def gradients_hidden() -> bool:
    """Whether a tensor may have a gradient or a tangent that ``requires_grad`` does not show."""
    # Under `vmap` within `torch.func.grad`, and under forward-mode AD.
    return not _KNOWN or forward_ad._current_level >= 0 or _transforms_active()


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


def graph_recorded() -> bool:
    """Whether ``make_fx`` or ``torch.jit.trace`` records, or may record, operators in a graph."""
    proxies = _private("fx.experimental.proxy_tensor.get_proxy_mode")
    recorded = not nothing_traced() if proxies is None else proxies() is not None  # 2.6 to 2.13
    return recorded or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]


# PowerGrad and enable -----------------------------------------------------------------------------

# A checkpoint that recomputes its function later installs hooks. 2.8 to 2.13; without the name,
# PyTorch refuses the recomputation, see `mode`.
_top_hooks = _private("_C._autograd._top_saved_tensors_default_hooks")


def saved_tensor_hooks() -> tuple[Any, ...] | None:
    """The innermost hooks of saved tensors, or None; () if that is not known."""
    return () if _top_hooks is None else _top_hooks(False)


def is_checkpoint_hook(hooks: tuple[Any, ...] | None) -> bool:
    """Whether ``torch.utils.checkpoint`` has installed `hooks`."""
    return bool(hooks) and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def is_higher_order(function: Any) -> bool:
    """Whether TorchDynamo shows `function` to a mode as one call, whose body the mode misses."""
    return type(function).__module__.startswith("torch._higher_order_ops")  # 2.6 to 2.13


def set_cache_key(key: str) -> None:
    """Add `key` to the keys of compiled code on disk, where functions are known by name only."""
    config: Any = getattr(torch.compiler, "config", None)  # public, since 2.7
    tag = getattr(config, "cache_key_tag", None)
    if tag is not None:
        config.cache_key_tag = tag.split("|powergrad")[0] + (key and f"|powergrad {key}")


# Maps over a nested output; `torch.utils.pytree` is public only in later versions. 2.6 to 2.13.
tree_map: Callable[..., Any] = _private("utils._pytree.tree_map")


# Only for run/ ----------------------------------------------------------------------------------


def run_eagerly(*owners: Any) -> None:
    """Keep TorchDynamo from compiling functions, or the methods of a class, on their own."""
    # `torch.compiler.disable` would turn every call into a graph break. 2.6 to 2.13.
    c: Any = _private("_C._dynamo.eval_frame")
    if not all(hasattr(c, name) for name in ("_FrameExecStrategy", "set_code_exec_strategy")):
        return
    skip = c._FrameExecStrategy(c._FrameAction.SKIP, c._FrameAction.SKIP)  # also what they call
    for owner in owners:
        for function in vars(owner).values() if isinstance(owner, type) else (owner,):
            if inspect.isfunction(function):
                c.set_code_exec_strategy(function.__code__, skip)
