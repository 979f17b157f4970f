"""The private parts of PyTorch that the core uses, each with the reason and the version checked."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# 2.13.0: no public function tells what is traced, and by what: a `torch.func` transform, a dispatch
# mode (also that of `make_fx`), `torch.jit.trace`, or `make_fx(pre_dispatch=True)`.
from torch._C import (  # pyright: ignore
    DispatchKey,
    _are_functorch_transforms_active,
    _dispatch_tls_is_dispatch_key_included,
    _is_tracing,
    _len_torch_dispatch_stack,
)

# 2.13.0: no public function tells whether a tensor has values to read, or stands for several
# gradients (`is_grads_batched`).
from torch._C._functorch import (  # pyright: ignore[reportMissingImports]
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
    peek_interpreter_stack,
)
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode

# 2.13.0: what the deprecated `size_average` and `reduce` mean, with PyTorch's own warning.
from torch.nn._reduction import legacy_get_string as legacy_reduction

# 2.13.0: the tensors of any nested output; `optree`, its public form, is not a requirement.
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

__all__ = [
    "FakeTensor",
    "anything_traced",
    "direct_apply",
    "foreach_mul_",
    "graph_recorded",
    "in_loss_parallel",
    "in_transform",
    "is_functorch_wrapped_tensor",
    "is_legacy_batchedtensor",
    "legacy_reduction",
    "legacy_softmax_dim",
    "let_dynamo_see_module_losses",
    "operators_traced",
    "recomputed_later",
    "tree_map",
    "unaltered_log_softmax",
]

# 2.13.0: multiplies many tensors by one factor in one kernel, as `clip_grad_norm_` does.
foreach_mul_ = torch._foreach_mul_  # pyright: ignore[reportPrivateImportUsage]

# 2.13.0: a log-softmax that `PowerGrad` does not alter; calling `torch.ops.aten`'s takes twice the
# time.
unaltered_log_softmax = torch._log_softmax  # pyright: ignore[reportPrivateImportUsage]


_PRE_DISPATCH = DispatchKey.PreDispatch


def operators_traced() -> bool:
    """Whether something records, or replaces, the operators that are called."""
    return bool(
        _len_torch_dispatch_stack()
        or _is_tracing()
        or _dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH)
    )


def anything_traced() -> bool:
    """Whether a transform, forward-mode AD or a tracer sees operators; not ``torch.compile``."""
    return (
        forward_ad._current_level >= 0 or _are_functorch_transforms_active() or operators_traced()
    )


def in_transform() -> bool:
    """Whether the caller, which may be traced by TorchDynamo, is inside ``torch.func``."""
    # 2.13.0: TorchDynamo enters the transforms that it traces.
    return peek_interpreter_stack() is not None


def graph_recorded() -> bool:
    """Whether ``make_fx`` or ``torch.jit.trace`` records the operators in a graph."""
    return get_proxy_mode() is not None or _is_tracing()


def in_loss_parallel() -> bool:
    """Whether the caller is inside ``torch.distributed.tensor.parallel.loss_parallel()``."""
    # 2.13.0: it registers handlers, which compute the gradient of the logits in `nll_loss`.
    if "torch.distributed.tensor.parallel.loss" not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    handlers = DTensor._op_dispatcher._custom_op_handlers  # pyright: ignore
    return torch.ops.aten.nll_loss_forward.default in handlers


# 2.13.0: what `torch.compiler.assume_constant_result` sets, without loading TorchDynamo here:
# TorchDynamo runs the function instead of tracing it. Its graphs are guarded by the transforms.
in_transform._dynamo_marked_constant = True  # pyright: ignore
in_loss_parallel._dynamo_marked_constant = True  # pyright: ignore


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` where no transform is active."""
    # 2.13.0: without a layer of Python that serves the transforms, 5% of the time of a small loss.
    return super(torch.autograd.Function, function).apply  # pyright: ignore


def legacy_softmax_dim(ndim: int, stacklevel: int) -> int:
    """The dimension of a log-softmax that was given none."""
    # 2.13.0: with PyTorch's own warning.
    return F._get_softmax_dim("log_softmax", ndim, stacklevel + 1)  # pyright: ignore


# 2.13.0: the frames of these two mark a computation that the backward pass will run again.
_CHECKPOINT = inspect.unwrap(checkpoint).__code__
_APPLY = torch.autograd.Function.apply.__func__.__code__  # pyright: ignore


def recomputed_later() -> Iterator[FrameType]:
    """The callers of this one whose backward pass will run it again, or something in its place.

    With gradients on, that is a non-reentrant checkpoint. In the forward of a custom autograd
    function, such as the reentrant checkpoint, they are off; there it is one whose arguments need a
    gradient, so that it has a backward pass at all.
    """
    grad_enabled = torch.is_grad_enabled()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if grad_enabled:
            if frame.f_code is _CHECKPOINT:
                yield frame
        elif frame.f_code is _APPLY:
            arguments = frame.f_locals["args"]
            if any(isinstance(a, Tensor) and a.requires_grad for a in arguments):
                yield frame
        frame = frame.f_back


def let_dynamo_see_module_losses() -> None:
    """Make an ``nn.CrossEntropyLoss()`` that a compiled function constructs call `F.cross_entropy`.

    Nothing happens before TorchDynamo is loaded.
    """
    # 2.13.0: TorchDynamo traces modes, with one exception: that constructor is replaced by a graph
    # node that no mode sees. Here the node is made by an ordinary call, which gives the same graph
    # where no mode is active.
    if "torch._dynamo.variables.user_defined" not in sys.modules:
        return
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.misc import LambdaVariable
    from torch._dynamo.variables.user_defined import UserDefinedClassVariable

    def ordinary_call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        names = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
        options = {**dict(zip(names, args, strict=False)), **kwargs}
        function = VariableTracker.build(tx, F.cross_entropy)

        def call(input: Any, target: Any) -> Any:
            return function.call_function(tx, [input, target], options)

        return LambdaVariable(call)

    if hasattr(UserDefinedClassVariable, "_call_cross_entropy_loss"):
        UserDefinedClassVariable._call_cross_entropy_loss = ordinary_call


# 2.13.0: what `torch.compiler.assume_constant_result` sets, without loading TorchDynamo here: where
# the `with` block itself is compiled, TorchDynamo runs the function instead of tracing it.
let_dynamo_see_module_losses._dynamo_marked_constant = True  # pyright: ignore
