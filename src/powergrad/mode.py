"""Alters the losses of other people's code: `enable` in the whole process, `PowerGrad` in a block.

`enable` replaces PyTorch's functions by ordinary Python functions, so that whatever calls, traces,
compiles or recomputes them sees ordinary operations. `PowerGrad` is a mode that PyTorch asks before
each call; it belongs to one thread and one block of code, and refuses what outlives the block.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import threading
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from powergrad import compat
from powergrad.checks import Call, check_alpha, check_number, is_one
from powergrad.linear import linear_cross_entropy
from powergrad.loss import cross_entropy, loss_of
from powergrad.transform import LISTENERS, Notice, log_softmax

__all__ = ["Enabled", "PowerGrad", "disable", "enable"]

_Callable = TypeVar("_Callable", bound=Callable[..., Any])
_REMEDY = (
    " Use `powergrad.enable(alpha)`, which alters the losses of the whole process, or call "
    "`powergrad.cross_entropy` there."
)


# The whole process --------------------------------------------------------------------------------


@dataclass(eq=False)
class Enabled:
    """What :func:`enable` has altered.

    Attributes:
        alpha: The exponent.
        log_softmax: Whether ``log_softmax`` calls are altered too.
        altered: The altered calls that have a gradient, by kind.
        compiled: The altered calls in compiled code, by kind; each counts when it is traced.
        scripted: The functions that ``torch.jit.script`` has compiled, which are not altered.
    """

    alpha: float = 1.0
    log_softmax: bool = field(default=True, repr=False)
    altered: dict[str, int] = field(default_factory=dict)
    compiled: dict[str, int] = field(default_factory=dict)
    scripted: dict[str, int] = field(default_factory=dict, repr=False)

    @property
    def replaced(self) -> list[str]:
        """The functions that something else has replaced since :func:`enable`."""
        return [f.name for f in _FUNCTIONS if getattr(f.owner, f.kind) is not f.altered]


_enabled: Enabled | None = None
_lock = threading.RLock()


def enable(alpha: float, *, log_softmax: bool = True) -> Enabled:
    """From now on, the cross-entropies and log-softmaxes of this process use PowerGrad Transform.

    It replaces ``F.cross_entropy``, ``F.linear_cross_entropy``, ``F.log_softmax``,
    ``torch.log_softmax``, ``torch.special.log_softmax`` and ``Tensor.log_softmax`` in every thread
    until :func:`disable`, also where modules have imported them and where objects hold them, and in
    code that is compiled, checkpointed, transformed or exported. Values do not change.

    It does not reach TorchScript, kernels of other libraries, other processes, and functions stored
    elsewhere before the call, as in a ``functools.partial``: call it first in a program. Call it
    again to change alpha; compiled functions are then compiled again.

    Args:
        alpha: A number, at least 0; 1 is plain cross-entropy.
        log_softmax: Whether ``log_softmax`` calls are altered too, or only cross-entropies.

    Returns:
        An :class:`Enabled`, which counts the altered calls.

    Raises:
        ValueError: If ``alpha`` is negative.
        TypeError: If ``alpha`` is not a number.

    Example:
        >>> import powergrad
        >>> logits = torch.tensor([[2.0, 0.0, -1.0]], requires_grad=True)
        >>> _ = powergrad.enable(0.25)
        >>> torch.nn.functional.cross_entropy(logits, torch.tensor([1])).backward()
        >>> powergrad.disable()
        >>> logits.grad
        tensor([[ 0.4810, -0.7082,  0.2272]])
    """
    global _enabled
    alpha = check_number(alpha)
    with _lock:
        enabled = _enabled or Enabled()
        enabled.alpha, enabled.log_softmax = alpha, log_softmax
        if _enabled is None:
            _exchange({id(f.original): f.altered for f in _FUNCTIONS})
            for function in _FUNCTIONS:
                setattr(function.owner, function.kind, function.altered)
        _enabled = enabled
        _forget_compiled(f"powergrad {alpha} {log_softmax}")
    return enabled


def disable() -> None:
    """Undo :func:`enable`. Without it, nothing happens."""
    global _enabled
    with _lock:
        if _enabled is None:
            return
        _enabled = None
        for function in _FUNCTIONS:
            if getattr(function.owner, function.kind) is function.altered:
                setattr(function.owner, function.kind, function.original)
        _exchange({id(f.altered): f.original for f in _FUNCTIONS})
        _forget_compiled("")


def _exchange(new: dict[int, Callable[..., Any]]) -> None:
    """Exchange functions in the namespaces of modules and objects, except PyTorch's modules."""
    functions = [f for pair in _FUNCTIONS for f in (pair.original, pair.altered)]
    for holder in gc.get_referrers(*functions):
        names = holder if type(holder) is dict else getattr(holder, "__dict__", None)
        if type(names) is not dict or "__module__" in names or "__wrapped__" in names:
            continue  # not a namespace; that of a class; that of a wrapper
        module = names.get("__name__")
        if isinstance(module, str) and f"{module}.".startswith("torch."):
            continue
        for name, value in list(names.items()):
            if id(value) in new:
                names[name] = new[id(value)]


def _forget_compiled(key: str) -> None:
    """Compiled code has the losses of the time when it was compiled, in memory and on disk."""
    compat.set_cache_key(key)
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


# A block of eager code ----------------------------------------------------------------------------


class _Block(TorchFunctionMode):
    """One entry of a PowerGrad: the mode that PyTorch asks."""

    level = 2  # of the user's code, for warnings

    def __init__(self, owner: PowerGrad) -> None:
        super().__init__()
        self.owner, self.outer = owner, _context.get()
        self.closed = False
        self.altered = False  # a call was altered, here or in a nested block
        self.suspect = False  # gradients were computed
        self.hooks = compat.saved_tensor_hooks()
        self.enabled = self.seen = torch.is_grad_enabled()
        self.inside = False

    def heard(self, _: Notice) -> None:
        """Note that this thread has called a loss of this package."""
        self.altered |= self in _thread.blocks

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():
            _refuse_compiled(func)
            return func(*args, **kwargs)
        blocks = _thread.blocks
        if func in _KNOWN and blocks[-1:] == [self]:  # the innermost
            return self.alter(_KNOWN[func], args, kwargs)
        if func is Tensor.backward:  # what it recomputes was called elsewhere
            _thread.blocks = []
        if func is torch._C._set_grad_enabled:  # pyright: ignore[reportPrivateUsage]
            self.in_custom_function()
            self.seen = args[0]
        try:
            out = func(*args, **kwargs)
        finally:
            _thread.blocks = blocks
        if blocks and not (self.altered or self.suspect):
            self.saw(func, out)
        return out

    def in_custom_function(self) -> bool:
        """Whether gradients are disabled by PyTorch, for a custom function, and not by Python.

        A mode sees each change of the grad mode in Python. A custom function may disable gradients
        again by itself, so it lasts until they are enabled without a change in Python.
        """
        enabled = torch.is_grad_enabled()
        if torch.is_inference_mode_enabled():
            return False
        if enabled != self.seen:
            self.seen, self.inside = enabled, not enabled
        return self.inside and not enabled

    def saw(self, func: Any, out: Any) -> None:
        """Note a torch call that was not altered. This runs after every call: it must be cheap."""
        if func is Tensor.backward:
            self.suspect |= not self.owner.altered  # it may be of a loss of an earlier block
        elif torch.is_grad_enabled():
            self.suspect |= isinstance(out, Tensor) and out.requires_grad and not out.is_leaf
        else:
            self.suspect |= self.in_custom_function()

    def alter(self, function: _Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the altered `function`; raise if it does not belong here, or is repeated later."""
        owner = self.owner
        if function.kind == "log_softmax" and (not owner.log_softmax or "out" in kwargs):
            out = function.original(*args, **kwargs)
            self.saw(function.original, out)
            return out
        if _context.get() is not self:
            raise RuntimeError(
                f"`{function.name}` was called by another coroutine than the one that entered the "
                f"innermost PowerGrad of this thread. {_ABOUT_TASKS}"
            )
        hooks = compat.saved_tensor_hooks()
        if (compat.is_checkpoint_hook(hooks) and hooks != self.hooks) or self.in_custom_function():
            self.altered = True  # no warning, because the error says more
            raise RuntimeError(
                f"`{function.name}` was called inside a checkpoint or custom autograd function that"
                " was entered within PowerGrad. Its backward pass repeats or replaces the call "
                f"after PowerGrad has ended. Enter PowerGrad inside that function.{_REMEDY}"
            )
        if not (torch.is_grad_enabled() or compat.gradients_hidden()):
            for outer in _thread.blocks:  # a custom function may enter a block again later
                outer.altered |= outer.in_custom_function()
            return function.original(*args, **kwargs)
        out = function.alter(owner.alpha, *args, **kwargs)
        if hooks == () and not compat.gradients_hidden():
            for _ in range(9):  # a checkpoint refuses a recomputation that saves fewer tensors
                out = out * torch.ones_like(out)
        if out.requires_grad or compat.gradients_hidden():
            for outer in _thread.blocks:
                outer.altered = True
            if not is_one(owner.alpha):
                _count(owner.altered, function.kind)
        return out


class _Thread(threading.local):
    def __init__(self) -> None:
        self.blocks: list[_Block] = []


_thread = _Thread()
_open: list[_Block] = []  # the blocks of all threads
# The innermost block of a coroutine; its tasks inherit it. Modes belong to the thread.
_context: ContextVar[_Block | None] = ContextVar("PowerGrad", default=None)
_ABOUT_TASKS = (
    "The coroutines of a thread share its modes: use `with PowerGrad(...)` around code that does "
    f"not await.{_REMEDY}"
)


class PowerGrad:
    r"""Context manager and decorator: eager losses computed inside use PowerGrad Transform.

    It alters the functions that :func:`enable` alters, and so also ``F.nll_loss``, ``F.kl_div`` or
    ``F.ctc_loss`` of a log-softmax computed inside. Values do not change. The innermost context
    applies, also within :func:`enable`; ``PowerGrad(1.0)`` switches the transform off. Only the
    loss must be computed inside; ``backward()`` may run outside.

    It does **not** alter other losses, a softmax followed by a logarithm, calls of
    ``torch.ops.aten`` operators and of custom kernels, TorchScript, and calls from other threads.

    It raises an error at a loss that is compiled inside it, recomputed by a checkpoint or custom
    autograd function that was entered inside it, or called by another coroutine, because a block
    ends before such a recomputation. Use :func:`enable` there, or enter PowerGrad within the
    checkpointed function.

    ``altered`` counts the altered calls that have a gradient, by kind, over all blocks of this
    object: ``{"cross_entropy": 3}``. If gradients were computed in a block but nothing was altered,
    it ends with a warning. A ``strict`` block ends with an error if nothing was altered, unless
    alpha is 1 or it was entered with gradients disabled. Eager calls of this package's own
    functions, and of nested PowerGrads, count as altered.

    Every torch call inside takes about a microsecond longer, so put the context around the loss,
    not the model. Then a ``log_softmax`` inside the model is not altered either. If the model
    computes its own loss, use ``log_softmax=False`` for that.

    Args:
        alpha: As in :func:`powergrad.cross_entropy`. It may be set at any time.
        log_softmax: Whether ``log_softmax`` calls are altered too, or only cross-entropies.
        strict: Whether a block that altered nothing raises an error.

    Raises:
        ValueError: If ``alpha`` is negative or requires grad.
        RuntimeError: At a loss that PowerGrad cannot alter reliably; at the end of a ``strict``
            block that altered nothing, or of a block that is not the innermost.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0, -1.0]], requires_grad=True)
        >>> with PowerGrad(alpha=0.25) as mode:
        ...     loss = torch.nn.functional.cross_entropy(logits, torch.tensor([1]))
        >>> loss.backward()
        >>> logits.grad
        tensor([[ 0.4810, -0.7082,  0.2272]])
        >>> mode
        PowerGrad(alpha=0.25, altered={'cross_entropy': 1})
    """

    def __init__(
        self, alpha: float | Tensor, *, log_softmax: bool = True, strict: bool = False
    ) -> None:
        self.alpha = alpha
        self.log_softmax = log_softmax
        self.strict = strict
        self.altered: dict[str, int] = {}

    @property
    def alpha(self) -> float | Tensor:
        """The exponent; set it at any time."""
        return self._alpha

    @alpha.setter
    def alpha(self, value: float | Tensor) -> None:
        if isinstance(value, Tensor):
            check_alpha(value, value, None)
        self._alpha = value if isinstance(value, Tensor) else check_number(value)

    def __repr__(self) -> str:
        options = "" if self.log_softmax else ", log_softmax=False"
        options += ", strict=True" if self.strict else ""
        return f"PowerGrad(alpha={self._alpha}{options}, altered={self.altered})"

    def __enter__(self) -> PowerGrad:
        if torch.compiler.is_dynamo_compiling():
            _refuse_compiled("PowerGrad")
        block = _Block(self)
        _context.set(block)
        _thread.blocks.append(block)
        with _lock:
            _open.append(block)
            LISTENERS.append(block.heard)
            # TorchDynamo looks this up for `nn.CrossEntropyLoss()`, which no mode sees.
            if F.cross_entropy is _CROSS_ENTROPY.original:
                F.cross_entropy = _CROSS_ENTROPY.altered
        block.__enter__()
        return self

    def __exit__(self, exc_type: Any, exc: Any, traceback: Any) -> None:
        blocks = _thread.blocks
        mine = [b for b in blocks if b.owner is self and not b.closed][-1:]
        in_order = mine == blocks[-1:] and mine == [_context.get()]
        if in_order:
            _context.set(mine[0].outer)
        for block in mine:
            block.closed = True
            with _lock:
                _open.remove(block)
                LISTENERS.remove(block.heard)
                if not _open and _enabled is None and F.cross_entropy is _CROSS_ENTROPY.altered:
                    F.cross_entropy = _CROSS_ENTROPY.original
        while blocks and blocks[-1].closed:  # also those that were left too early
            blocks.pop().__exit__(exc_type, exc, traceback)
        if not in_order:
            raise RuntimeError(
                "PowerGrad was not left as the innermost mode of its thread, by the coroutine that "
                f"entered it. {_ABOUT_TASKS}"
            )
        block = mine[0]
        if exc_type or block.altered or not block.enabled or is_one(self._alpha):
            return
        message = (
            f"PowerGrad(alpha={self._alpha}) altered no cross-entropy or log-softmax with gradients"
            " in this block, so its gradients are plain. Put it around the code that computes the "
            "loss, or call `powergrad.cross_entropy` there. Losses in other threads and in compiled"
            " code need `powergrad.enable`. `strict=True` makes this an error."
        )
        if self.strict:
            raise RuntimeError(message)
        if block.suspect:
            warnings.warn(message, stacklevel=block.level)

    def __call__(self, function: _Callable) -> _Callable:
        """Decorate `function`: each call runs inside this context and is counted here.

        Raises:
            TypeError: If `function` is a class, or returns what computes later: an iterator, a
                coroutine.
        """
        if inspect.isclass(function) or not callable(function):
            raise TypeError(f"Expected `function` to be a function, but got {function!r}.")
        if inspect.ismethod(function):
            return cast(_Callable, MethodType(self(function.__func__), function.__self__))

        @functools.wraps(function)
        def decorated(*args: Any, **kwargs: Any) -> Any:
            with self:
                _thread.blocks[-1].level = 3
                result = function(*args, **kwargs)
                if isinstance(result, (Iterator, AsyncIterator, Awaitable)):
                    if isinstance(result, Coroutine):
                        result.close()  # otherwise Python warns that it was never awaited
                    raise TypeError(
                        "Expected a function that computes its result when it is called, but got "
                        f"one that returns a {type(result).__name__}; use `with PowerGrad(...)` "
                        "where the loss is computed."
                    )
            return result

        return cast(_Callable, decorated)


def _refuse_compiled(what: Any) -> None:
    """Raise at a loss that is compiled in a block, or at what may have one in its body."""
    if what == "PowerGrad" or what in _KNOWN or compat.is_higher_order(what):
        name = what if what == "PowerGrad" else getattr(what, "__name__", what)
        raise RuntimeError(
            f"`{name}` is compiled within PowerGrad or entered in compiled code. The compiled "
            f"function outlives the block, so PowerGrad is for eager code only.{_REMEDY}"
        )


# The functions ------------------------------------------------------------------------------------


class _Function(NamedTuple):
    """A function of PyTorch, and the one that replaces it."""

    owner: Any
    name: str
    kind: str  # the last part of the name
    original: Callable[..., Any]
    alter: Callable[..., Tensor]
    altered: Callable[..., Any]


def _count(counts: dict[str, int], kind: str) -> None:
    with _lock:
        counts[kind] = counts.get(kind, 0) + 1


def _replacement(original: Any, kind: str, alter: Callable[..., Tensor]) -> Callable[..., Any]:
    """A function like `original`: altered while `enable` or a hidden block says so."""

    @functools.wraps(original)
    def altered(*args: Any, **kwargs: Any) -> Any:
        arguments = (*args, *kwargs.values())
        if has_torch_function(arguments):
            return handle_torch_function(altered, arguments, *args, **kwargs)
        if _thread.blocks:  # a call that the mode does not see
            if torch.compiler.is_compiling():
                _refuse_compiled(altered)
            return _thread.blocks[-1].alter(_KNOWN[altered], args, kwargs)
        has_gradient, enabled = torch.is_grad_enabled() or compat.gradients_hidden(), _enabled
        if enabled is None or not _is_altered(kind, has_gradient, *kwargs):
            for block in tuple(_open):  # in other threads
                block.suspect |= enabled is None and has_gradient
            return original(*args, **kwargs)
        out = alter(enabled.alpha, *args, **kwargs)
        if type(out).__name__ in ("FakeTensor", "FunctionalTensor"):
            _count(enabled.compiled, kind)
        elif out.requires_grad or compat.gradients_hidden():
            _count(enabled.altered, kind)
        return out

    def traced(*args: Any, **kwargs: Any) -> Any:
        if has_torch_function((*args, *kwargs.values())):
            return handle_torch_function(altered, (*args, *kwargs.values()), *args, **kwargs)
        if _alters_traced(kind, torch.is_grad_enabled() or compat.in_transform(), *kwargs):
            return alter(cast(Enabled, _enabled).alpha, *args, **kwargs)
        return original(*args, **kwargs)

    def scripted() -> Any:
        if _enabled is not None:
            _count(_enabled.scripted, kind)
        return original if inspect.isfunction(original) else _scripted_log_softmax

    # TorchDynamo inlines the first, and otherwise may see `altered` as one operation, which is
    # right as well. TorchScript compiles what the second returns.
    vars(altered).update(_torchdynamo_inline=traced, __prepare_scriptable__=scripted)
    return altered


def _is_altered(kind: str, has_gradient: bool, *names: str) -> bool:
    """Whether `enable` alters a call with the keywords `names`."""
    if _enabled is None or (kind == "log_softmax" and (not _enabled.log_softmax or "out" in names)):
        return False
    return has_gradient and not ("torch.onnx" in sys.modules and torch.onnx.is_in_onnx_export())


def _alters_traced(kind: str, *arguments: Any) -> bool:
    """Whether to alter a call that TorchDynamo traces."""
    if _thread.blocks:
        _refuse_compiled(next(f.altered for f in _FUNCTIONS if f.kind == kind))
    if altered := _is_altered(kind, *arguments):
        _count(cast(Enabled, _enabled).compiled, kind)
    return altered


# TorchDynamo runs these functions instead of tracing them, and errors in them reach the user.
for _constant in (_refuse_compiled, _alters_traced):
    _constant._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _scripted_log_softmax(input: Tensor, dim: int, dtype: int | None = None) -> Tensor:
    return torch.ops.aten.log_softmax(input, dim, dtype)


# What they call instead: it takes alpha and the arguments of the original function ----------------


def _cross_entropy(
    alpha: float | Tensor,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    if size_average is not None or reduce is not None:  # with PyTorch's warning
        reduction = torch.nn.L1Loss(size_average, reduce).reduction
    return loss_of(input, Call(target, weight, alpha, ignore_index, label_smoothing, reduction))


def _linear_cross_entropy(
    alpha: float | Tensor, input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any
) -> Tensor:
    bias, blocks = options.pop("linear_bias", None), options.pop("options", None)
    if options.get("ignore_index", -100) is None:
        del options["ignore_index"]
    if blocks is not None and linear_weight.dim() == 2:  # the caller asks for blocks
        options.update(alpha=alpha, linear_bias=bias)
        return linear_cross_entropy(input, linear_weight, target, **options)
    # (..., in) times (C, d1, ..., in) to (..., C, d1, ...), as in PyTorch.
    bias = None if bias is None else bias.flatten()
    logits = F.linear(input, linear_weight.flatten(0, -2), bias)
    return cast(
        Tensor,
        cross_entropy(
            logits.unflatten(-1, linear_weight.shape[:-1]), target, alpha=alpha, **options
        ),
    )


def _log_softmax(
    alpha: float | Tensor, input: Tensor, dim: int, dtype: torch.dtype | None = None
) -> Tensor:
    if dtype is not None and not input.is_floating_point():  # PyTorch casts before it checks
        return log_softmax(input.to(dtype), dim, alpha=alpha)
    return log_softmax(input, dim, alpha=alpha, dtype=dtype)


def _functional_log_softmax(
    alpha: float | Tensor,
    input: Tensor,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
) -> Tensor:
    if dim is None:  # deprecated; this is PyTorch's choice
        dim = 0 if input.dim() in (0, 1, 3) else 1
    return _log_softmax(alpha, input, dim, dtype)


def _function(owner: Any, name: str, alter: Callable[..., Tensor]) -> _Function:
    original, kind = getattr(owner, name.split(".")[-1]), name.split(".")[-1]
    altered = _replacement(original, kind, alter)
    return _Function(owner, name, kind, original, alter, altered)


_FUNCTIONS = [
    _function(F, "F.cross_entropy", _cross_entropy),
    _function(F, "F.log_softmax", _functional_log_softmax),
    _function(torch, "torch.log_softmax", _log_softmax),
    _function(torch.special, "torch.special.log_softmax", _log_softmax),
    _function(Tensor, "Tensor.log_softmax", _log_softmax),
]
if hasattr(F, "linear_cross_entropy"):  # since 2.13
    _FUNCTIONS.append(_function(F, "F.linear_cross_entropy", _linear_cross_entropy))
_CROSS_ENTROPY = _FUNCTIONS[0]
_KNOWN = {f: function for function in _FUNCTIONS for f in (function.original, function.altered)}
