"""`PowerGrad`, a context in which PyTorch's own cross-entropies use PowerGrad Transform."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from powergrad._check import Arguments, check_number
from powergrad._compat import (
    legacy_reduction,
    legacy_softmax_dim,
    let_dynamo_see_module_losses,
    recomputed_later,
)
from powergrad.linear import linear_cross_entropy
from powergrad.loss import loss_of
from powergrad.transform import log_softmax

__all__ = ["PowerGrad"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


class PowerGrad(TorchFunctionMode):
    r"""Context manager and decorator: losses computed inside get PowerGrad Transform's gradient.

    It alters ``F.cross_entropy``, ``F.linear_cross_entropy``, and the log-softmax under its five
    names (``F.log_softmax``, ``torch.log_softmax``, ``torch.special.log_softmax``,
    ``Tensor.log_softmax``, and PyTorch's modules over them, such as ``nn.CrossEntropyLoss``),
    therefore also ``F.nll_loss``, ``F.kl_div`` or ``F.ctc_loss`` of a log-softmax taken inside.
    Values do not change. Of nested contexts the innermost decides; ``PowerGrad(1.0)`` switches the
    transform off inside it. Only the calls matter: ``backward()`` may run inside or outside.

    It does **not** alter: a softmax followed by a logarithm, ``logsumexp``,
    ``F.binary_cross_entropy_with_logits`` and other losses; calls of ``torch.ops.aten`` operators
    and of kernels that compute a loss of their own; TorchScript; and, since a mode belongs to its
    thread, calls from threads started inside (``nn.DataParallel`` on several GPUs). What a
    checkpoint recomputes after the block has ended cannot be altered: a loss inside
    ``torch.utils.checkpoint``, or in the forward of another custom autograd function, raises.

    Every torch call inside takes about a microsecond longer, so put it around the loss, not the
    model. That also leaves a ``log_softmax`` inside the model alone; ``log_softmax=False`` does so
    where the model computes its own loss.

    Args:
        alpha: As in :func:`powergrad.cross_entropy`.
        log_softmax: Whether a ``log_softmax`` is altered by itself, or cross-entropies only.

    Raises:
        ValueError: If ``alpha`` is outside [0, 1].
        RuntimeError: At a call whose recomputation would be plain cross-entropy (see above).

    Example:
        >>> logits = torch.tensor([[2.0, 0.0, -1.0]], requires_grad=True)
        >>> with PowerGrad(alpha=0.25):
        ...     loss = torch.nn.functional.cross_entropy(logits, torch.tensor([1]))
        >>> loss.backward()
        >>> logits.grad
        tensor([[ 0.4810, -0.7082,  0.2272]])
    """

    def __init__(self, alpha: float | Tensor, *, log_softmax: bool = True) -> None:
        super().__init__()
        self.alpha = alpha if isinstance(alpha, Tensor) else check_number(alpha)
        self.log_softmax = log_softmax
        self._outer: list[set[int]] = []  # for each entry, the recomputed frames around it

    def __enter__(self) -> PowerGrad:
        let_dynamo_see_module_losses()
        if not torch.compiler.is_compiling():
            self._outer.append({id(frame) for frame in recomputed_later()})
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        if not torch.compiler.is_compiling():
            self._outer.pop()
        super().__exit__(*exc)

    def __call__(self, function: _Function) -> _Function:
        """Decorate `function`: each call of it runs inside this context.

        A bound method stays one, so that a copy of its object has a method of its own. Unpickled,
        an object has its class's method: decorate it again.
        """
        if (
            inspect.isgeneratorfunction(function)
            or inspect.iscoroutinefunction(function)
            or inspect.isasyncgenfunction(function)
        ):
            raise TypeError(
                "Expected an ordinary function to decorate, but got a generator or coroutine, "
                "whose body would run outside; use `with PowerGrad(...)` within it."
            )

        if inspect.ismethod(function):
            return MethodType(self(function.__func__), function.__self__)  # pyright: ignore

        @functools.wraps(function)
        def decorated(*args: Any, **kwargs: Any) -> Any:
            with PowerGrad(self.alpha, log_softmax=self.log_softmax):
                return function(*args, **kwargs)

        return decorated  # pyright: ignore[reportReturnType]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        replacement = _CROSS_ENTROPIES.get(func)
        if replacement is None and self.log_softmax and "out" not in kwargs:
            replacement = _LOG_SOFTMAXES.get(func)
        if replacement is None:
            return func(*args, **kwargs)
        if not torch.compiler.is_compiling():
            self._refuse_recomputation(func)
        return replacement(self.alpha, *args, **kwargs)

    def _refuse_recomputation(self, func: Any) -> None:
        for frame in recomputed_later():
            if id(frame) not in self._outer[-1]:
                raise RuntimeError(
                    f"Expected `{func.__name__}` under PowerGrad to be called outside checkpoints "
                    "and custom autograd functions entered within it, but got a call inside one. "
                    "Its backward pass computes the call again, after PowerGrad has ended. Let the "
                    "function enter PowerGrad itself, `checkpoint(PowerGrad(alpha)(function), "
                    "...)`, or call `powergrad.cross_entropy` in it."
                )


# The replacement of each function takes alpha and the same arguments ------------------------------


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
    arguments = Arguments(target, weight, alpha, ignore_index, label_smoothing, reduction)
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
    arguments = Arguments(
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
    return log_softmax(input, dim, alpha=alpha, dtype=dtype)


_CROSS_ENTROPIES: dict[Any, Callable[..., Tensor]] = {F.cross_entropy: _cross_entropy}
if hasattr(F, "linear_cross_entropy"):  # later versions of PyTorch
    _CROSS_ENTROPIES[F.linear_cross_entropy] = _linear_cross_entropy
_LOG_SOFTMAXES: dict[Any, Callable[..., Tensor]] = {
    F.log_softmax: _functional_log_softmax,
    torch.log_softmax: _log_softmax,
    torch.special.log_softmax: _log_softmax,
    Tensor.log_softmax: _log_softmax,
}
