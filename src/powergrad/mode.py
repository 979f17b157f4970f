"""`PowerGrad`, a context in which PyTorch's cross-entropy functions use PowerGrad Transform."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from contextvars import ContextVar
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType, MethodType
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from powergrad._check import Call, check_alpha, check_number, is_one
from powergrad._compat import (
    capture_in_checkpoints,
    checkpoints_captured,
    custom_function,
    frames_that_recompute,
    function_modes,
    functions_traced,
    gradients_hidden,
    legacy_reduction,
    legacy_softmax_dim,
    own_modes,
    pop_mode,
    prepare_dynamo,
    push_mode,
    recomputed_later,
    recomputes_now,
    run_eagerly,
)
from powergrad._watch import OTHERS, Watch, complain
from powergrad.linear import linear_cross_entropy
from powergrad.loss import loss_of
from powergrad.transform import log_softmax

__all__ = ["PowerGrad"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


class PowerGrad(TorchFunctionMode):
    r"""Context manager and decorator: losses computed inside use PowerGrad Transform.

    It alters ``F.cross_entropy``, ``F.linear_cross_entropy``, all forms of log-softmax
    (``F.log_softmax``, ``torch.log_softmax``, ``torch.special.log_softmax``,
    ``Tensor.log_softmax``) and the modules that call them, such as ``nn.CrossEntropyLoss``. So it
    also alters ``F.nll_loss``, ``F.kl_div`` or ``F.ctc_loss`` of a log-softmax computed inside.
    Values do not change. If contexts are nested, the innermost applies; ``PowerGrad(1.0)`` switches
    the transform off. Only the loss must be computed inside; ``backward()`` may run outside.

    It does **not** alter: a softmax followed by a logarithm, ``logsumexp``,
    ``F.binary_cross_entropy_with_logits`` and other losses; calls of ``torch.ops.aten`` operators
    and of custom kernels that compute a loss; TorchScript; and, since modes are thread-local, calls
    from threads started inside (``nn.DataParallel`` on several GPUs).

    **Proof.** ``altered`` counts the altered calls that have a gradient, by kind, over all blocks
    of this object: ``{"cross_entropy": 3}``. If gradients were computed in a block but nothing was
    altered, the block ends with a warning that names the losses it called, or with an error if
    ``strict``. There is no warning for an empty block, a block without gradients (validation),
    ``PowerGrad(1.0)``, or a block that calls this package's own functions or contains a nested
    PowerGrad that altered something.

    **Under ``torch.compile``** calls are altered when the function is traced, and a compiled
    function does not count its calls in ``altered``. So once anything was altered while tracing, a
    block around compiled code cannot know whether that code ran in it, and warnings and errors are
    disabled for the rest of the process. A block *inside* a compiled function is checked once, when
    it is traced. Changing ``alpha`` does not cause a recompilation, except between 1.0 and other
    values.

    **Checkpoints.** A loss inside ``torch.utils.checkpoint`` is recomputed with the alpha that it
    had in the forward pass, and is counted once. A loss in the forward of any other custom autograd
    function raises an error, because its recomputation cannot be altered.

    **Coroutines** of one thread share its modes, so do not ``await`` inside the block. A loss that
    is called while another task's PowerGrad is the innermost raises an error, and so does leaving a
    block that is not the innermost.

    Every torch call inside takes about a microsecond longer, so put the context around the loss,
    not the model. Then a ``log_softmax`` inside the model is not altered either. If the model
    computes its own loss, use ``log_softmax=False`` for that.

    Args:
        alpha: As in :func:`powergrad.cross_entropy`. It may be set at any time.
        log_softmax: Whether ``log_softmax`` calls are altered too, or only cross-entropies.
        strict: Whether a block that altered nothing raises an error instead of warning.

    Raises:
        ValueError: If ``alpha`` is outside [0, 1] or requires grad.
        RuntimeError: At a call that would be recomputed as plain cross-entropy, or that belongs to
            another coroutine; at the end of a ``strict`` block that altered nothing.

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
        super().__init__()
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
        # In a compiled graph a number is a constant, and a tensor is an input. The number 1 stays a
        # number: for it PyTorch's own functions are called, in a separately compiled graph.
        if isinstance(value, Tensor):
            check_alpha(value, value, None)
            self._alpha = self._alpha_input = value
            return
        self._alpha = self._alpha_input = check_number(value)
        if not is_compiling() and not is_one(self._alpha):
            inference = torch.is_inference_mode_enabled()
            with torch.inference_mode(False) if inference else nullcontext():
                self._alpha_input = torch.tensor(self._alpha, dtype=torch.float64, device="cpu")

    def __repr__(self) -> str:
        options = "" if self.log_softmax else ", log_softmax=False"
        options += ", strict=True" if self.strict else ""
        return f"PowerGrad(alpha={self._alpha}{options}, altered={self.altered})"

    def __enter__(self) -> PowerGrad:
        _Block(self).__enter__()
        return self

    def __exit__(self, exc_type: Any, exc: Any, traceback: Any) -> None:
        if is_compiling():
            cast(_Block, pop_mode()).leave_traced(failed=exc_type is not None)
        else:
            _innermost_block(self).leave(failed=exc_type is not None)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # TorchDynamo pushes a mode from outside the compiled function without entering it.
        return _Block(self).__torch_function__(func, types, args, kwargs)

    def __call__(self, function: _Function) -> _Function:
        """Decorate `function`: each call runs inside this context and is counted here.

        A bound method stays bound. An unpickled object has the undecorated method of its class;
        decorate it again.

        Raises:
            TypeError: If `function` is a class, or if its body would run outside the context: a
                generator, a coroutine, a lazy iterator. Some of these are detected only when they
                return.
        """
        _refuse_what_runs_later(function)
        if inspect.ismethod(function):
            return MethodType(self(function.__func__), function.__self__)  # pyright: ignore

        @functools.wraps(function)
        def decorated(*args: Any, **kwargs: Any) -> Any:
            with _Block(self):
                result = function(*args, **kwargs)
                _refuse_lazy(result)
            return result

        return decorated  # pyright: ignore[reportReturnType]


# One entry of a PowerGrad -------------------------------------------------------------------------


class _Block(TorchFunctionMode):
    """The mode that is pushed onto PyTorch's mode stack.

    Each entry has its own block, so one PowerGrad may be entered recursively and in several
    threads. TorchDynamo guards on the attributes that it reads while tracing. So only `owner` and
    `traced` of a block around the compiled function are read then; the others change at every step.
    """

    def __init__(self, owner: PowerGrad) -> None:
        super().__init__()
        self.owner = owner
        self.traced = is_compiling()  # entered within a compiled function, while that is traced
        self.altered = False  # here or in a nested block
        self.watch: Watch | None = None
        self.counts = False  # False while a checkpoint recomputes calls that were counted before
        self.outer: set[int] = set()  # frames outside this block whose backward pass recomputes it
        self.entered = False
        self.parent: _Block | None = None
        self.before = _tracing_counts() if self.traced else (0, 0)
        self.functions = functions_traced() if self.traced else 0

    def __enter__(self) -> _Block:
        prepare_dynamo()
        if not self.traced:
            capture_in_checkpoints(_recomputed_alike)
            frames = frames_that_recompute()
            self.outer = {id(frame) for frame in frames}
            self.counts = not any(map(recomputes_now, frames))
            if self.counts and not is_one(self.owner.alpha):
                self.watch = Watch()
            self.parent, self.entered = _CURRENT.get(), True
            _CURRENT.set(self)
        push_mode(self)
        return self

    def __exit__(self, exc_type: Any, exc: Any, traceback: Any) -> None:
        self.owner.__exit__(exc_type, exc, traceback)

    def leave_traced(self, *, failed: bool) -> None:
        if not failed and not is_one(self.owner._alpha_input):
            _judge_while_tracing(self.before, self.owner.strict)

    def leave(self, *, failed: bool) -> None:
        _CURRENT.set(self.parent)
        if self.altered and self.parent is not None:
            self.parent.altered, self.parent.watch = True, None
        watch, owner = self.watch, self.owner
        if watch is None or failed or watch.ours or _traced_calls.keys() - {"", "off"}:
            return
        if watch.gradients or (watch.backward and not owner.altered):
            alpha = "..." if isinstance(owner.alpha, Tensor) else f"alpha={owner.alpha}"
            complain(f"PowerGrad({alpha})", watch.names, strict=owner.strict)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        known = _KNOWN.get(func)
        if is_compiling():
            return self._trace(known, func, args, kwargs or {})
        if known is None:
            out = func(*args, **kwargs) if kwargs else func(*args)
            if self.watch is not None:
                self.watch.saw(func, out)
            return out
        kind, replacement = known
        kwargs = kwargs or {}
        if replacement is not None and not self._leaves_alone(kind, kwargs):
            return self._alter(func, kind, replacement, args, kwargs)
        out = func(*args, **kwargs)
        if self.watch is not None:
            self.watch.saw_loss(func, out)
        return out

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `func`, a function that PowerGrad alters, as if inside this block.

        The block is not pushed onto PyTorch's mode stack, which would take longer than a small
        loss.
        """
        kind, replacement = _KNOWN[func]
        if replacement is None or self._leaves_alone(kind, kwargs):
            return func(*args, **kwargs)
        frames = frames_that_recompute()
        self.outer = {id(frame) for frame in frames}
        self.counts = not any(map(recomputes_now, frames))
        token = _CURRENT.set(self)
        try:
            return self._alter(func, kind, replacement, args, kwargs)
        finally:
            _CURRENT.reset(token)

    def _alter(
        self, func: Any, kind: str, replacement: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        self._refuse_other_tasks(func)
        recomputed = self._refuse_recomputation(func)
        alpha = self.owner.alpha
        out = replacement(alpha, *args, **kwargs)
        if self.counts and (recomputed or out.requires_grad or gradients_hidden()):
            block = _CURRENT.get()
            while block is not None and block is not self:  # inner blocks that did not alter it
                block.altered, block.watch = True, None
                block = block.parent
            self.altered, self.watch = True, None
            if not is_one(alpha):
                with _counting:
                    self.owner.altered[kind] = self.owner.altered.get(kind, 0) + 1
        return out

    def _trace(self, known: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind, replacement = known or ("", None)
        if replacement is None or self._leaves_alone(kind, kwargs):
            out = func(*args, **kwargs)
            if self.traced and isinstance(out, Tensor) and out.requires_grad:
                _note_while_tracing("")
            return out
        if functions_traced() > (self.functions if self.traced else 0) or (
            not self.traced and _recomputed_around_trace()
        ):
            raise RuntimeError(_about_recomputation(func, "custom autograd functions"))
        alpha = self.owner._alpha_input
        out = replacement(alpha, *args, **kwargs)
        _note_while_tracing("off" if is_one(alpha) else kind)
        return out

    def _leaves_alone(self, kind: str, kwargs: dict[str, Any]) -> bool:
        return kind == "log_softmax" and (not self.owner.log_softmax or "out" in kwargs)

    def _refuse_other_tasks(self, func: Any) -> None:
        block = _CURRENT.get()
        while block is not None and block is not self:
            block = block.parent
        if block is None and self.entered:
            raise RuntimeError(
                f"Expected `{func.__name__}` to be called by the coroutine that entered the "
                "innermost PowerGrad of this thread, but got a call by another coroutine. "
                + _ABOUT_TASKS
            )

    def _refuse_recomputation(self, func: Any) -> bool:
        """Return whether gradients are disabled only until a backward pass recomputes the call."""
        recomputed = False
        for frame in recomputed_later():
            if self._is_lost(frame):
                self.watch = None  # the error says more
                where = "" if checkpoints_captured() else "checkpoints and "
                raise RuntimeError(_about_recomputation(func, where + "custom autograd functions"))
            recomputed = not torch.is_grad_enabled()
        return recomputed

    def _is_lost(self, frame: FrameType) -> bool:
        """Whether `frame` was entered within this block and would recompute without PowerGrad."""
        captured = checkpoints_captured() and custom_function(frame) is None
        return id(frame) not in self.outer and not captured


def _about_recomputation(func: Any, where: str) -> str:
    return (
        f"Expected `{func.__name__}` under PowerGrad to be called outside {where} entered within "
        "it, but got a call inside one. Its backward pass recomputes the call after PowerGrad has "
        "ended. Decorate the function itself, `function = PowerGrad(alpha)(function)`, or call "
        "`powergrad.cross_entropy` in it."
    )


# The innermost block of the current context. Each task of an event loop has its own context, which
# it inherits from the block in which it is started; modes belong to the thread.
_CURRENT: ContextVar[_Block | None] = ContextVar("PowerGrad", default=None)
_ABOUT_TASKS = (
    "The coroutines of a thread share its modes: use `with PowerGrad(...)` around code that does "
    "not await."
)
_counting = threading.Lock()


def _innermost_block(owner: PowerGrad) -> _Block:
    """Pop the innermost block, which must belong to `owner`, off the mode stack."""
    modes, current = function_modes(), _CURRENT.get()
    top = modes[-1] if modes else None
    if isinstance(top, _Block) and top.owner is owner and (top is current or not top.entered):
        pop_mode()
        return top
    # Clean up both the chain of this context and the modes of this thread.
    inner: _Block | None = None
    while current is not None and current.owner is not owner:
        inner, current = current, current.parent
    if current is None:  # entered in another context
        current = top if isinstance(top, _Block) and top.owner is owner else None
    elif inner is None:
        _CURRENT.set(current.parent)
    else:
        inner.parent = current.parent
    if current in modes:
        position = modes.index(current)
        for _ in modes[position:]:
            pop_mode()
        for mode in modes[position + 1 :]:
            push_mode(mode)
    raise RuntimeError(
        "Expected PowerGrad to be left as the innermost mode of its thread, by the coroutine that "
        "entered it, but got another order. " + _ABOUT_TASKS
    )


def _recomputed_alike(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` in the PowerGrads that are active now, for a checkpoint to recompute."""
    if is_compiling():
        return function
    captured: list[PowerGrad] = []
    for mode in function_modes():
        owner = mode.owner if isinstance(mode, _Block) else mode
        if isinstance(owner, PowerGrad):
            alpha = owner.alpha
            alpha = alpha.detach().clone() if isinstance(alpha, Tensor) else alpha
            captured.append(PowerGrad(alpha, log_softmax=owner.log_softmax))
    if not captured:
        return function

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for mode in captured:
                stack.enter_context(mode)
            return function(*args, **kwargs)

    return recomputed


own_modes.update((PowerGrad, _Block))
run_eagerly(PowerGrad, _Block, Watch, _innermost_block, _recomputed_alike)


# TorchDynamo runs the following functions instead of tracing them. 2.13.0: the attribute is what
# `torch.compiler.assume_constant_result` sets, without loading TorchDynamo here. The counts are per
# process: counts per block would be a side effect, which a traced checkpoint must not have.

_traced_calls: dict[str, int] = {}  # by kind; "" are calls with gradients that were not altered


def _note_while_tracing(kind: str) -> None:
    _traced_calls[kind] = _traced_calls.get(kind, 0) + 1


def _tracing_counts() -> tuple[int, int]:
    plain = _traced_calls.get("", 0)
    return plain, sum(_traced_calls.values()) - plain


def _judge_while_tracing(before: tuple[int, int], strict: bool) -> None:
    plain, altered = _tracing_counts()
    if plain > before[0] and altered == before[1]:
        complain("PowerGrad in a compiled function", {}, strict=strict)


def _recomputed_around_trace() -> bool:
    """Whether the compiled function is called by a custom autograd function within the block."""
    block = _CURRENT.get()
    return block is not None and any(block._is_lost(frame) for frame in recomputed_later())


for _function in (
    _note_while_tracing,
    _tracing_counts,
    _judge_while_tracing,
    _recomputed_around_trace,
):
    _function._dynamo_marked_constant = True  # pyright: ignore


# Functions that cannot be decorated ---------------------------------------------------------------


def _refuse_what_runs_later(function: Any) -> None:
    """Raise if the body of `function` is known to run outside the context."""
    if inspect.isclass(function):
        raise TypeError(
            f"Expected a function to decorate, but got the class {function.__name__}, whose "
            "methods would run outside PowerGrad; decorate the method that computes the loss."
        )
    if not callable(function):
        raise TypeError(f"Expected a function to decorate, but got {type(function).__name__}.")
    for body in (function, type(function).__call__):
        if (
            inspect.isgeneratorfunction(body)
            or inspect.iscoroutinefunction(body)
            or inspect.isasyncgenfunction(body)
        ):
            raise TypeError(
                "Expected an ordinary function to decorate, but got a generator or coroutine, "
                "whose body would run outside PowerGrad; use `with PowerGrad(...)` inside it."
            )


_LAZY = (GeneratorType, CoroutineType, AsyncGeneratorType, map, filter, zip, enumerate)


def _refuse_lazy(result: Any) -> None:
    if isinstance(result, Tensor):
        return
    lazy = isinstance(result, _LAZY)
    if not lazy and not is_compiling():
        lazy = inspect.isawaitable(result) or type(result).__module__ == "itertools"
    if lazy:
        if isinstance(result, CoroutineType):
            result.close()  # otherwise Python warns that it was never awaited
        raise TypeError(
            "Expected a decorated function to return a computed value, but got an object of "
            f"type {type(result).__name__}, which is computed later, outside PowerGrad; use "
            "`with PowerGrad(...)` where it is computed."
        )


# Replacements: each takes alpha and the arguments of the original function -----------------------


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
    if size_average is not None or reduce is not None:
        reduction = legacy_reduction(size_average, reduce)
    arguments = Call(target, weight, alpha, ignore_index, label_smoothing, reduction)
    return loss_of(input, arguments)


def _linear_cross_entropy(
    alpha: float | Tensor,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
) -> Tensor:
    arguments = Call(
        target,
        weight,
        alpha,
        -100 if ignore_index is None else ignore_index,
        label_smoothing,
        reduction,
    )
    if options is not None and linear_weight.dim() == 2:  # the caller asks for blocks
        loss = linear_cross_entropy(
            input, linear_weight, linear_bias=linear_bias, **arguments._asdict()
        )
        return cast(Tensor, loss)
    # (..., in) times (C, d1, ..., in) to (..., C, d1, ...), as in PyTorch.
    bias = None if linear_bias is None else linear_bias.flatten()
    logits = F.linear(input, linear_weight.flatten(0, -2), bias)
    return loss_of(logits.unflatten(-1, linear_weight.shape[:-1]), arguments)


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
    if dim is None:  # deprecated; PyTorch warns
        dim = legacy_softmax_dim(input.dim(), _stacklevel + 1)
    return _log_softmax(alpha, input, dim, dtype)


# The kind and the replacement of each function, which `_Block` looks up at each call. Losses that
# PowerGrad does not alter have no replacement.
_KNOWN: dict[Any, tuple[str, Callable[..., Tensor] | None]] = {
    **dict.fromkeys(OTHERS, ("", None)),
    F.cross_entropy: ("cross_entropy", _cross_entropy),
    F.log_softmax: ("log_softmax", _functional_log_softmax),
    torch.log_softmax: ("log_softmax", _log_softmax),
    torch.special.log_softmax: ("log_softmax", _log_softmax),
    Tensor.log_softmax: ("log_softmax", _log_softmax),
}
if hasattr(F, "linear_cross_entropy"):  # later versions of PyTorch
    _KNOWN[F.linear_cross_entropy] = ("linear_cross_entropy", _linear_cross_entropy)
