"""The private PyTorch APIs that the core uses, each with its reason and the tested version."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# 2.13.0: no public function reports whether a `torch.func` transform, a dispatch mode (`make_fx`
# uses one), `torch.jit.trace` or `make_fx(pre_dispatch=True)` is tracing.
from torch._C import (  # pyright: ignore
    DispatchKey,
    _are_functorch_transforms_active,
    _dispatch_tls_is_dispatch_key_included,
    _is_tracing,
    _len_torch_dispatch_stack,
)

# 2.13.0: no public function reports whether a tensor has readable values, or is a batch of
# gradients (`is_grads_batched`).
from torch._C._functorch import (  # pyright: ignore[reportMissingImports]
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
    peek_interpreter_stack,
)
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode

# 2.13.0: translates the deprecated `size_average` and `reduce`, with PyTorch's own warning.
from torch.nn._reduction import legacy_get_string as legacy_reduction

# 2.13.0: the modes that are active in this thread; the public API can only enter a mode.
from torch.overrides import (
    _get_current_function_mode_stack,  # pyright: ignore[reportPrivateUsage]
    _pop_mode,  # pyright: ignore[reportPrivateUsage]
    _push_mode,  # pyright: ignore[reportPrivateUsage]
)
from torch.utils import checkpoint as checkpoints

# 2.13.0: maps over the tensors of a nested output; the public `optree` is not a dependency.
from torch.utils._pytree import tree_map

__all__ = [
    "OPERATORS",
    "FakeTensor",
    "anything_traced",
    "capture_in_checkpoints",
    "checkpoints_captured",
    "custom_function",
    "direct_apply",
    "foreach_mul_",
    "forget_functions",
    "frames_that_recompute",
    "function_modes",
    "functions_traced",
    "gradients_hidden",
    "graph_recorded",
    "in_loss_parallel",
    "in_transform",
    "is_functorch_wrapped_tensor",
    "is_legacy_batchedtensor",
    "legacy_reduction",
    "legacy_softmax_dim",
    "on_first_backward",
    "operators_traced",
    "own_modes",
    "pop_mode",
    "prepare_dynamo",
    "push_mode",
    "recomputed_later",
    "recomputes_now",
    "run_eagerly",
    "tree_map",
    "unaltered_log_softmax",
]

# 2.13.0: multiplies many tensors by one factor in one kernel, as `clip_grad_norm_` does.
foreach_mul_ = torch._foreach_mul_  # pyright: ignore[reportPrivateImportUsage]

# 2.13.0: a log-softmax that `PowerGrad` does not alter; `torch.ops.aten`'s is twice as slow.
unaltered_log_softmax = torch._log_softmax  # pyright: ignore[reportPrivateImportUsage]


_PRE_DISPATCH = DispatchKey.PreDispatch


def operators_traced() -> bool:
    """Whether something records or replaces the operators that are called."""
    return bool(
        _len_torch_dispatch_stack()
        or _is_tracing()
        or _dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH)
    )


def anything_traced() -> bool:
    """Whether a transform, forward-mode AD or a tracer sees operators; not ``torch.compile``."""
    return bool(
        forward_ad._current_level >= 0
        or _are_functorch_transforms_active()
        or _len_torch_dispatch_stack()  # as `operators_traced`, without another call
        or _is_tracing()
        or _dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH)
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
    # 2.13.0: it registers handlers that compute the gradient of the logits in `nll_loss`.
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
    """``function.apply``, for calls where no transform is active."""
    # 2.13.0: this skips a Python layer for transforms, which takes 5% of the time of a small loss.
    return super(torch.autograd.Function, function).apply  # pyright: ignore


def legacy_softmax_dim(ndim: int, stacklevel: int) -> int:
    """The dimension that PyTorch chooses if `dim` is None, with PyTorch's own warning."""
    # 2.13.0: there is no public function for it.
    return F._get_softmax_dim("log_softmax", ndim, stacklevel + 1)  # pyright: ignore


# 2.13.0: the types of the operators in `torch.ops`, which a mode sees as functions.
OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)  # pyright: ignore

function_modes = _get_current_function_mode_stack
pop_mode, push_mode = _pop_mode, _push_mode


def gradients_hidden() -> bool:
    """Whether a tensor may have a gradient or a tangent that ``requires_grad`` does not show."""
    # 2.13.0: under ``vmap`` within ``torch.func.grad``, and under forward-mode AD.
    return forward_ad._current_level >= 0 or _are_functorch_transforms_active()


# Computations that the backward pass repeats ------------------------------------------------------

# 2.13.0: a frame of the first two is a computation that the backward pass will repeat; a frame of
# `_RECOMPUTING` is a repetition in progress (reentrant or non-reentrant checkpoint).
_CHECKPOINT = inspect.unwrap(checkpoints.checkpoint).__code__
_APPLY = torch.autograd.Function.apply.__func__.__code__  # pyright: ignore
_REENTRANT = checkpoints.CheckpointFunction


def _recomputing_codes() -> tuple[CodeType, ...]:
    hooks = getattr(checkpoints, "_checkpoint_hook", None)
    inner = hooks.__init__.__code__.co_consts if hooks is not None else ()
    unpack = [c for c in inner if isinstance(c, CodeType) and c.co_name == "unpack_hook"]
    return (_REENTRANT.backward.__code__, *unpack)


_RECOMPUTING = _recomputing_codes()
_MARKS = {id(code) for code in (_CHECKPOINT, _APPLY, *_RECOMPUTING)}  # a code's own hash is slow


def frames_that_recompute() -> list[FrameType]:
    """The callers' frames that belong to a recomputation, present or future."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if id(frame.f_code) in _MARKS:
            frames.append(frame)
        frame = frame.f_back
    return frames


def recomputes_now(frame: FrameType) -> bool:
    """Whether `frame`, one of `frames_that_recompute`, is a backward pass of a checkpoint."""
    return frame.f_code in _RECOMPUTING


def recomputed_later() -> Iterator[FrameType]:
    """The callers' frames whose backward pass will repeat or replace the current computation.

    With gradients enabled, these are non-reentrant checkpoints. Gradients are disabled in the
    forward of a custom autograd function, such as the reentrant checkpoint; it has a backward pass
    only if one of its arguments requires grad.
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


def custom_function(frame: FrameType) -> type | None:
    """The autograd function that `frame`, one of `recomputed_later`, applies.

    None for PyTorch's checkpoints.
    """
    cls = frame.f_locals.get("cls") if frame.f_code is _APPLY else None
    return None if cls is _REENTRANT else cls


_captured: bool | None = None  # None: not tried yet


def checkpoints_captured() -> bool:
    """Whether :func:`capture_in_checkpoints` has taken effect."""
    return bool(_captured)


def capture_in_checkpoints(capture: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """From now on, make every checkpoint recompute ``capture(function)`` instead of its function.

    ``capture`` is called in the forward pass. If it returns its argument, nothing changes. This
    does nothing if PyTorch's checkpoints differ from what is expected here.
    """
    # 2.13.0: before it recomputes, a checkpoint restores autocast, the random state and, of all
    # function modes, only `DeviceContext`. These are the two places where it stores the function.
    global _captured
    if _captured is not None:
        return
    _captured = False
    frame = getattr(checkpoints, "_CheckpointFrame", None)
    if (
        frame is None
        or list(inspect.signature(frame).parameters)[:1] != ["recompute_fn"]
        or list(inspect.signature(_REENTRANT.forward).parameters)[:2] != ["ctx", "run_function"]
        or "run_function" not in _REENTRANT.backward.__code__.co_names
    ):
        return
    initialise, forward = frame.__init__, _REENTRANT.forward

    @functools.wraps(initialise)
    def capturing_initialise(self: Any, recompute_fn: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, capture(recompute_fn), *args, **kwargs)

    @functools.wraps(forward)
    def capturing_forward(ctx: Any, run_function: Any, *args: Any) -> Any:
        captured = capture(run_function)  # before the forward pass can change anything
        outputs = forward(ctx, run_function, *args)
        ctx.run_function = captured
        return outputs

    frame.__init__ = capturing_initialise
    _REENTRANT.forward = staticmethod(capturing_forward)  # pyright: ignore
    _captured = True


def on_first_backward(function: Callable[[Any], None]) -> None:
    """Call `function` with the root tensors of the first backward pass of the process."""
    # 2.13.0: `Tensor.backward`, `torch.autograd.backward` and `torch.autograd.grad` all call this.
    run: Any = getattr(torch.autograd, "_engine_run_backward", None)
    if run is None:
        return

    def first(roots: Any, *args: Any, **kwargs: Any) -> Any:
        torch.autograd._engine_run_backward = run  # pyright: ignore
        function(roots)
        return run(roots, *args, **kwargs)

    run_eagerly(first)
    torch.autograd._engine_run_backward = first  # pyright: ignore


# TorchDynamo --------------------------------------------------------------------------------------


def functions_traced() -> int:
    """The number of nested custom autograd functions that TorchDynamo is tracing."""
    # 2.13.0: TorchDynamo has one frame for each.
    module: Any = sys.modules.get("torch._dynamo.variables.higher_order_ops")
    variable = getattr(module, "AutogradFunctionApplyVariable", None)
    if variable is None:
        return 0
    code = inspect.unwrap(variable.call_function).__code__
    frame: FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None:
        count += frame.f_code is code
        frame = frame.f_back
    return count


functions_traced._dynamo_marked_constant = True  # pyright: ignore


def forget_functions() -> None:
    """Clear PyTorch's tables of its own functions, after some were replaced temporarily."""
    # 2.13.0: the tables are built once; TorchDynamo's is built when it is loaded.
    tables = {
        "torch.overrides": ("get_testing_overrides", "_get_overridable_functions"),
        "torch._dynamo.variables.torch": ("get_overridable_functions",),
        "torch._dynamo.trace_rules": ("get_torch_obj_rule_map", "get_tensor_method"),
    }
    for module, names in tables.items():
        for name in names:
            table = getattr(sys.modules.get(module), name, None)
            if hasattr(table, "cache_clear"):
                table.cache_clear()  # pyright: ignore[reportOptionalMemberAccess]


own_modes: set[type] = set()  # function modes that do not alter higher-order operators
_dynamo_prepared = False


def prepare_dynamo() -> None:
    """Make TorchDynamo show every loss in a compiled function to `own_modes`.

    Parts of TorchDynamo that are not loaded yet are patched when they are loaded.
    """
    global _dynamo_prepared
    if _dynamo_prepared:
        return
    _dynamo_prepared = True
    missing = {}
    for name, patch in _PATCHES.items():
        if name in sys.modules:
            patch(sys.modules[name])
        else:  # importing it takes seconds, and most programs never need it
            missing[name] = patch
    if missing:
        sys.meta_path.insert(0, _PatchWhenLoaded(missing))


# 2.13.0: what `torch.compiler.assume_constant_result` sets, without loading TorchDynamo here. If
# the `with` block itself is compiled, TorchDynamo runs the function instead of tracing it.
prepare_dynamo._dynamo_marked_constant = True  # pyright: ignore


def _show_module_losses(user_defined: ModuleType) -> None:
    # 2.13.0: TorchDynamo traces modes, with one exception: it replaces an `nn.CrossEntropyLoss()`
    # that a compiled function constructs by a graph node that no mode sees. Here an ordinary call
    # makes the node, which gives the same graph if no mode is active.
    def ordinary_call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        from torch._dynamo.variables.base import VariableTracker
        from torch._dynamo.variables.misc import LambdaVariable

        names = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
        options = {**dict(zip(names, args, strict=False)), **kwargs}
        function = VariableTracker.build(tx, F.cross_entropy)

        def call(input: Any, target: Any) -> Any:
            return function.call_function(tx, [input, target], options)

        return LambdaVariable(call)

    cls = user_defined.UserDefinedClassVariable
    if hasattr(cls, "_call_cross_entropy_loss"):
        cls._call_cross_entropy_loss = ordinary_call


def _show_bodies(torch_function: ModuleType) -> None:
    # 2.13.0: a mode sees a checkpoint, or any other higher-order operator, in a compiled function
    # as one call. The mode is inactive during that call, so it would miss the calls in the body.
    # Here such an operator is not shown to `own_modes`, and its body is traced inside them.
    dispatch = getattr(torch_function, "dispatch_torch_function", None)
    if dispatch is None:
        return

    @functools.wraps(dispatch)
    def dispatch_or_trace(tx: Any, fn: Any, args: Any, kwargs: Any) -> Any:
        from torch._dynamo.variables.higher_order_ops import TorchHigherOrderOperatorVariable
        from torch.utils._device import DeviceContext

        if isinstance(fn, TorchHigherOrderOperatorVariable) and hasattr(fn, "_call_function"):
            types = {mode.python_type() for mode in tx.symbolic_torch_function_state.mode_stack}
            if types & own_modes and types <= {*own_modes, DeviceContext}:
                if type(fn).__name__ == "InvokeSubgraphHigherOrderVariable":
                    # `nested_compile_region` reuses its graph and cannot guard on modes, so the
                    # body is traced as part of the surrounding graph.
                    return args[0].call_function(tx, list(args[1:]), kwargs)
                return fn._call_function(tx, args, kwargs)
        return dispatch(tx, fn, args, kwargs)

    torch_function.dispatch_torch_function = dispatch_or_trace  # pyright: ignore


_PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "torch._dynamo.variables.user_defined": _show_module_losses,
    "torch._dynamo.variables.torch_function": _show_bodies,
}


def run_eagerly(*owners: Any) -> None:
    """Keep TorchDynamo from compiling functions, or the methods of a class, on their own.

    After a graph break, TorchDynamo compiles the functions that are called next one by one, and
    compiled functions cannot count calls. Inside a compiled function they are still traced.
    """
    # 2.13.0: `torch.compiler.disable` would turn every call into a graph break.
    c: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if not all(hasattr(c, name) for name in ("_FrameExecStrategy", "set_code_exec_strategy")):
        return
    skip = c._FrameExecStrategy(c._FrameAction.SKIP, c._FrameAction.SKIP)  # also what they call
    for owner in owners:
        members = vars(owner).values() if isinstance(owner, type) else (owner,)
        for member in members:
            function = member.fset if isinstance(member, property) else member
            if inspect.isfunction(function):
                c.set_code_exec_strategy(function.__code__, skip)


class _PatchWhenLoaded(MetaPathFinder):
    """Import hook that patches some modules when they are loaded."""

    def __init__(self, patches: dict[str, Callable[[ModuleType], None]]) -> None:
        self.patches = patches

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        patch = self.patches.pop(fullname, None)
        spec = None if patch is None else importlib.util.find_spec(fullname)
        if patch is None or spec is None or spec.loader is None:
            return None
        spec.loader = _PatchingLoader(spec.loader, patch)
        return spec


class _PatchingLoader(Loader):
    def __init__(self, loader: Loader, patch: Callable[[ModuleType], None]) -> None:
        self.loader, self.patch = loader, patch

    def __getattr__(self, name: str) -> Any:  # `get_source` and others, which tracebacks use
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.patch(module)
