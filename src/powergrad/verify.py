"""`verify`: is this training step really trained with PowerGrad Transform?

PGT does not change the value of the loss. What shows it is the gradient at the logits. A
`StepWatcher` collects logits and gradients while a step runs; `powergrad._slope` measures alpha on
them. The gradient comes from one of three places:

- a hook on the head, if its module is called: this sees the logits, and what arrives at them;
- the gradient of the head's weight, ``dW = G^T H``, if the weight is used without calling the
  module, as chunked losses do. With fewer rows than features it determines ``G``;
- the output of a compiled model, if the head inside cannot be seen.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from powergrad._check import is_plain, shape_of
from powergrad._head import find_head
from powergrad._slope import Rows, Verification, measure

__all__ = ["StepWatcher", "Verification", "verify"]

ELEMENTS = 1 << 18  # of logits that are measured, at most,
FEWEST, MOST = 4, 1024  # within these numbers of rows


def verify(
    step: Callable[[], Any],
    model: nn.Module,
    head: nn.Module | str | None = None,
    *,
    target: Tensor | None = None,
) -> Verification:
    r"""Run one training step and measure the alpha that its gradient at the logits shows.

    `step` is called once, as it is. Afterwards the following are as before: weights, buffers and
    gradients of `model`, training mode, the state of every ``torch.optim`` optimizer that stepped,
    random state (torch, ``random``, numpy), and hooks. This holds also if `step` raises. It needs
    the memory of a copy of all of these. What `step` advances by itself is not turned back: data
    iterators, learning-rate schedulers, a ``GradScaler``, counters.

    No labels are needed for class indices, with or without label smoothing and class weights, nor
    for mixup of two labels. For other soft targets pass `target`.

    Code that ``torch.compile`` has compiled is compiled again for this step, and again after it.
    Under data parallelism, call it on every rank; each answers for its own rows.

    Args:
        step: Runs one training step: forward pass, loss, ``backward()``, perhaps the optimizer.
        model: The network that `step` trains.
        head: The module whose outputs are the logits, or its name, where it cannot be found.
        target: The class probabilities, of the shape of the logits, if they are soft; or class
            indices.

    Returns:
        The :class:`powergrad.verify.Verification`, whose ``verdict`` is "pgt", "plain", "neither"
        or "cannot tell".

    Raises:
        TypeError: If an argument is of another type.
        ValueError: If the head is not found; pass `head`.

    Example:
        >>> import powergrad
        >>> model = nn.Linear(8, 10)
        >>> images, labels = torch.randn(64, 8), torch.randint(0, 10, (64,))
        >>> def step():
        ...     powergrad.cross_entropy(model(images), labels, alpha=0.3).backward()
        >>> verification = powergrad.verify(step, model)
        >>> verification.verdict, round(verification.alpha, 3)
        ('pgt', 0.3)
    """
    if not callable(step):
        raise TypeError(f"Expected `step` to be callable, but got {type(step).__name__}.")
    _check_model(model, target)
    find_head(_unwrapped(model), head)  # raises, where the watcher would answer "cannot tell"
    watcher = StepWatcher(model, head, target=target)
    if _compiler_loaded():  # compiled code ignores hooks that come later
        watcher._traceable = True
        torch.compiler.reset()
    with _restoring(model), watcher:
        step()
    return watcher.result()


class StepWatcher:
    r"""Context manager that watches one training step and changes nothing.

    It is the passive form of :func:`powergrad.verify`, for a step that happens anyway. Its hooks
    are removed when the block ends. Whatever goes wrong inside it becomes a "cannot tell" with the
    reason; it never raises in the step. It keeps the logits in memory until their gradient arrives.
    Code that is already compiled cannot be watched, except for the output of a compiled model.

    Args:
        model: The network.
        head: As in :func:`powergrad.verify`. A head that is not found is a "cannot tell".
        target: As in :func:`powergrad.verify`.

    Raises:
        TypeError: If an argument is of another type.

    Example:
        >>> import powergrad
        >>> model = nn.Linear(8, 10)
        >>> images, labels = torch.randn(64, 8), torch.randint(0, 10, (64,))
        >>> with StepWatcher(model) as watcher:
        ...     torch.nn.functional.cross_entropy(model(images), labels).backward()
        >>> watcher.result().verdict
        'plain'
    """

    def __init__(
        self,
        model: nn.Module,
        head: nn.Module | str | None = None,
        *,
        target: Tensor | None = None,
    ) -> None:
        _check_model(model, target)
        if head is not None and not isinstance(head, (nn.Module, str)):
            raise TypeError(
                f"Expected `head` to be a module, its name or None, but got {type(head).__name__}."
            )
        self._model, self._target = model, target
        self._traceable = False  # whether compiled code may be given an operator of ours
        self._failure = ""
        self._calls: list[_Call] = []
        self._outer: list[_Call] = []  # outputs of compiled models
        self._indirect: list[Rows] = []  # by the gradient of the weight
        self._why_not_indirect = ""
        self._without_grad = False
        self._features: Tensor | None = None
        self._features_in_16_bits = False
        self._undo: list[Callable[[], None]] = []
        self._tag = next(_TAGS)
        self._head: nn.Module | None = None
        self._result: Verification | None = None
        try:
            self._head = find_head(_unwrapped(model), head)
        except ValueError as error:
            self._failure = str(error)

    def __enter__(self) -> StepWatcher:
        if self._head is not None:
            self._guarded(self._attach)
        return self

    def __exit__(self, *exc: Any) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._features = None
        _WATCHERS.pop(self._tag, None)

    def result(self) -> Verification:
        """What the step showed. Call it after the block.

        Returns:
            The verification; the same object every time.
        """
        if self._undo:
            return Verification("cannot tell", reason="the watched step has not ended yet")
        if self._result is None:
            try:
                self._result = self._conclusion()
            except Exception as error:
                reason = f"measuring failed: {type(error).__name__}: {error}"
                self._result = Verification("cannot tell", reason=reason)
            self._calls, self._outer, self._indirect = [], [], []
        return self._result

    # Collecting ----------------------------------------------------------------------------------

    def _guarded(self, function: Callable[..., None], *args: Any) -> None:
        """Call `function`; note what it raises instead of breaking the user's step."""
        try:
            with torch.no_grad():
                function(*args)
        except Exception as error:
            self._failure = self._failure or f"watching failed: {type(error).__name__}: {error}"

    def _attach(self) -> None:
        head = self._head
        assert head is not None
        if self._traceable:
            _register_operators()
            _WATCHERS[self._tag] = self
        tag, traceable = self._tag, self._traceable

        def on_head(module: nn.Module, args: Any, output: Any) -> Any:
            if torch.compiler.is_compiling():
                if traceable and isinstance(output, Tensor):
                    return torch.ops.powergrad.watch_logits(output, tag)
                return None
            self._guarded(self._on_output, output, self._calls)
            return None

        # First of all hooks: what the others do to the gradient is then included.
        self._hook(head.register_forward_hook(on_head, prepend=True))
        compiled = [module for module in self._model.modules() if _is_compiled(module)]
        for module in compiled:
            self._watch_compiled(module)
        if isinstance(head, nn.Linear) and (traceable or not compiled):
            self._watch_weight(head)

    def _hook(self, handle: Any) -> None:
        self._undo.append(handle.remove)

    def _watch_compiled(self, module: nn.Module) -> None:
        def on_output(output: Any) -> None:
            if not torch.compiler.is_compiling():
                self._guarded(self._on_output, output, self._outer)

        if hasattr(module, "_orig_mod"):  # made by torch.compile: its own hooks run outside
            self._hook(module.register_forward_hook(lambda _, __, output: on_output(output)))
            return
        call = module._compiled_call_impl  # made by module.compile(), 2.13.0

        def watched(*args: Any, **kwargs: Any) -> Any:
            output = call(*args, **kwargs)  # pyright: ignore[reportOptionalCall]
            on_output(output)
            return output

        module._compiled_call_impl = watched
        self._undo.append(lambda: setattr(module, "_compiled_call_impl", call))

    def _watch_weight(self, head: nn.Linear) -> None:
        """Look at the gradient of the weight, and at the last hidden states before it."""
        if not head.weight.requires_grad:
            self._why_not_indirect = ", and its weight needs no gradient"
            return

        def on_features(module: nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling() or not isinstance(output, Tensor):
                return
            if output.dim() > 1 and output.shape[-1] == head.in_features and is_plain(output):
                self._features = output.detach()
                self._features_in_16_bits = output.dtype.itemsize < 4 or (
                    torch.is_autocast_enabled(output.device.type)
                )

        inside = {id(module) for module in head.modules()}
        for module in self._model.modules():
            if id(module) not in inside:
                self._hook(module.register_forward_hook(on_features))
        on_gradient = _uncompiled(lambda grad: self._guarded(self._on_weight_gradient, head, grad))
        self._hook(head.weight.register_hook(on_gradient))

    def _on_output(self, output: Any, calls: list[_Call]) -> None:
        logits = _logits_of(output)
        if logits is None:
            self._failure = self._failure or (
                f"the output of the head is a {type(output).__name__}, not a tensor of logits"
            )
            return
        if not is_plain(logits):
            self._failure = self._failure or (
                f"the logits are a {type(logits).__name__}, or in a torch.func transform, whose "
                "gradient cannot be watched"
            )
            return
        if not logits.requires_grad:
            self._without_grad = True
            return
        call = _Call(logits)
        calls.append(call)
        node, number = logits.grad_fn, logits.output_nr
        if node is None:
            on_gradient = _uncompiled(lambda grad: self._guarded(call.add, grad))
            self._hook(logits.register_hook(on_gradient))
            return
        # The hook of the node runs after all hooks of the tensor, which may alter the gradient.
        on_gradients = _uncompiled(lambda grads: self._guarded(call.add, grads[number]))
        self._hook(node.register_prehook(on_gradients))

    def _on_compiled(self, logits: Tensor, grad: Tensor) -> None:
        call = _Call(logits)
        self._calls.append(call)
        call.add(grad)

    def _on_weight_gradient(self, head: nn.Linear, grad: Tensor) -> None:
        if any(call.arrived for call in self._calls):
            return
        if self._features is None:
            self._why_not_indirect = (
                f", and no module before it returned hidden states of {head.in_features} features"
            )
            return
        hidden = self._features.reshape(-1, head.in_features)
        rows, self._why_not_indirect = _recovered(head, grad, hidden, self._features_in_16_bits)
        if rows is not None:
            self._indirect.append(rows)

    # Concluding ----------------------------------------------------------------------------------

    def _conclusion(self) -> Verification:
        calls = [call for call in self._calls if call.arrived]
        calls = calls or [call for call in self._outer if call.arrived]
        failure = self._failure or next((call.failure for call in calls if call.failure), "")
        if failure:
            return Verification("cannot tell", reason=failure)
        if not calls and not self._indirect:
            return Verification("cannot tell", reason=self._why_nothing())
        for call in calls:
            if call.not_zero_sum is not None:
                return call.not_cross_entropy()
        rows = [call.rows for call in calls if call.rows is not None] if calls else self._indirect
        if not rows:
            return Verification("cannot tell", reason="the gradient at the logits is zero")
        if len({part.logits.shape[1] for part in rows}) > 1:
            reason = "the calls of the head have different numbers of classes"
            return Verification("cannot tell", reason=reason)
        if self._target is not None:
            if not calls or len(rows) > 1:
                reason = (
                    "`target` can be compared only with one call of the head, but got "
                    f"{len(rows) if calls else 'none'}"
                )
                return Verification("cannot tell", reason=reason)
            call = next(call for call in calls if call.rows is not None)
            target, reason = call.rows_of_target(self._target)
            if target is None:
                return Verification("cannot tell", reason=reason)
            rows = [replace(rows[0], target=target)]
        return measure(_joined(rows))

    def _why_nothing(self) -> str:
        if self._calls or self._outer:
            return "no gradient reached the logits; does the step call `backward()`?"
        if self._without_grad:
            return "the head was called without gradients only (`torch.no_grad`, or all is frozen)"
        if any(_is_compiled(module) for module in self._model.modules()):
            return (
                "the head runs in compiled code, which ignores new hooks; use `powergrad.verify`, "
                "or call `torch.compiler.reset()` before"
            )
        return (
            f"the head, a {type(self._head).__name__}, was not called{self._why_not_indirect}; "
            "does the step use this model? Otherwise pass `head`, the module that makes the logits"
        )


def _check_model(model: Any, target: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected `model` to be a module, but got {type(model).__name__}.")
    if target is not None and not isinstance(target, Tensor):
        raise TypeError(f"Expected `target` to be a tensor, but got {type(target).__name__}.")


def _unwrapped(model: nn.Module) -> nn.Module:
    """The user's model inside DistributedDataParallel or what torch.compile returns."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _is_compiled(module: nn.Module) -> bool:
    # 2.13.0: what torch.compile(module) returns, and what module.compile() sets.
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def _logits_of(output: Any) -> Tensor | None:
    """The logits in the output of a module: itself, or `logits` of an object or a dictionary."""
    if isinstance(output, dict):
        output = output.get("logits")
    elif not isinstance(output, Tensor):
        output = getattr(output, "logits", None)
    usable = isinstance(output, Tensor) and output.is_floating_point() and output.dim() > 0
    return output if usable else None


# One call of the head ----------------------------------------------------------------------------


class _Call:
    """Logits of one call of the head, and the gradient that arrives at them.

    Of the rows that have a gradient some are copied when it arrives, for others may change logits
    and gradient in place later.
    """

    def __init__(self, logits: Tensor) -> None:
        self.shape, self.dtype = shape_of(logits), logits.dtype
        self.version = logits._version
        self.arrived = False
        self.failure = ""
        self.not_zero_sum: float | None = None  # the sum over the classes, relative
        self.rows: Rows | None = None
        self._logits: Tensor | None = logits.detach()
        self._dim = 0
        self._index: tuple[Tensor, ...] = ()

    def add(self, grad: Tensor | None) -> None:
        """Take a gradient. Several, as of losses with a `backward()` each, add up."""
        if grad is None:
            return
        if self.rows is not None:
            gradient = self.rows.gradient + _wide(self._classes_last(grad)[self._index])
            self.rows = replace(self.rows, gradient=gradient)
            _, self.not_zero_sum = _zero_sum_dim(gradient, [1], self.rows.logits)
            return
        self.arrived, logits = True, self._logits
        if logits is None:  # an earlier gradient has settled it
            return
        if logits._version != self.version:
            self.failure = "the logits were changed in place before their gradient arrived"
            return
        if not bool((grad != 0).any()):
            return
        self._logits = None
        if not bool(grad.isfinite().all()):
            self.failure = "the gradient at the logits has NaN or infinite entries"
            return
        dims = {1, len(self.shape) - 1} if len(self.shape) > 1 else {0}
        dim, self.not_zero_sum = _zero_sum_dim(grad, sorted(dims), logits)
        self._dim = dim or 0
        if self.not_zero_sum is not None:
            return
        if dim is None:
            self.failure = (
                f"the gradient of the logits, of shape {self.shape}, sums to zero over dimension 1 "
                "and over the last one: either may be the classes"
            )
            return
        gradient = self._classes_last(grad)
        present = (gradient != 0).any(-1).nonzero()
        classes = gradient.shape[-1]
        limit = min(max(FEWEST, ELEMENTS // classes), MOST, len(present))
        chosen = present[torch.linspace(0, len(present) - 1, limit).long().to(present.device)]
        self._index = tuple(chosen.t())
        z, g = _wide(self._classes_last(logits)[self._index]), _wide(gradient[self._index])
        if bool((z.isnan() | (z == torch.inf)).any()):
            self.failure = "the logits have NaN or infinite entries"
            return
        formats = [torch.finfo(dtype) for dtype in (logits.dtype, grad.dtype)]
        # Kernels flush probabilities below float32's normal numbers to 0, before or after scaling.
        flushed = 16 * torch.finfo(torch.float32).smallest_normal * max(1.0, float(g.abs().max()))
        self.rows = Rows(
            z,
            g,
            max(2.0**-24, *(info.eps / 2 for info in formats)),
            torch.full_like(g, formats[1].smallest_normal * formats[1].eps + flushed),
            call=torch.zeros(limit, dtype=torch.int64),
            example=chosen[:, 0].cpu(),
        )

    def _classes_last(self, tensor: Tensor) -> Tensor:
        tensor = tensor.movedim(self._dim, -1)
        return tensor.unsqueeze(0) if tensor.dim() == 1 else tensor

    def rows_of_target(self, target: Tensor) -> tuple[Tensor | None, str]:
        """The target of the rows, as probabilities; or None, and why."""
        index = tuple(part.to(target.device) for part in self._index)
        without = self.shape[: self._dim] + self.shape[self._dim + 1 :]
        if target.is_floating_point() and shape_of(target) == self.shape:
            return _wide(self._classes_last(target)[index]), ""
        if not target.is_floating_point() and shape_of(target) == without:
            labels = (target if without else target.unsqueeze(0))[index].long().clamp(min=0).cpu()
            if int(labels.max()) < self.shape[self._dim]:
                return nn.functional.one_hot(labels, self.shape[self._dim]).double(), ""
        return None, (
            f"`target` of shape {shape_of(target)} and {target.dtype} does not fit logits of shape "
            f"{self.shape}"
        )

    def not_cross_entropy(self) -> Verification:
        classes = self.shape[self._dim]
        return Verification(
            "neither",
            deviation=self.not_zero_sum,
            rows=math.prod(self.shape) // classes,
            classes=classes,
            reason=(
                "the gradient at the logits does not sum to zero over the classes, as that of "
                "every softmax cross-entropy does; the loss may be another one, or the logits may "
                "be changed after this module (then pass `head`, the module that makes them)"
            ),
        )


def _zero_sum_dim(
    grad: Tensor, dims: list[int], logits: Tensor | None = None
) -> tuple[int | None, float | None]:
    """Over which of `dims` the gradient sums to zero, None if over several; and None.

    If over none: where it is closest to it, and the sum relative to that of absolute values.

    Rows that are predicted with certainty are left out if there is none: ``p - 1`` may be 0 there,
    by rounding, while the gradients of the other classes are not.
    """
    limit = 0.05 if grad.dtype.itemsize < 4 else 0.02  # a loss in 16 bits errs by some percent
    wide = torch.promote_types(grad.dtype, torch.float32)

    def ratio(dim: int, *, certain: bool) -> float:
        total, size = grad.sum(dim, dtype=wide), grad.abs().sum(dim, dtype=wide)
        if not certain and logits is not None:
            doubt = 1 - logits.to(wide).softmax(dim).amax(dim)
            doubtful = doubt > 100 * torch.finfo(grad.dtype).eps
            total, size = total * doubtful, size * doubtful
        return float(total.norm() / size.norm())  # NaN: no row is left

    for certain in (True, False):
        ratios = {dim: ratio(dim, certain=certain) for dim in dims}
        below = [dim for dim, value in ratios.items() if not value > limit]
        if below:
            return (below[0] if len(below) == 1 else None), None
    closest = min(dims, key=lambda dim: ratios[dim])  # pyright: ignore[reportPossiblyUnbound]
    return closest, ratios[closest]  # pyright: ignore[reportPossiblyUnbound]


def _wide(tensor: Tensor) -> Tensor:
    """A copy in float64 on the CPU."""
    return tensor.detach().to("cpu", torch.float64, copy=True)


def _joined(parts: list[Rows]) -> Rows:
    """All rows, numbered by the call that they are of."""
    return Rows(
        torch.cat([part.logits for part in parts]),
        torch.cat([part.gradient for part in parts]),
        max(part.precision for part in parts),
        torch.cat([part.noise for part in parts]),
        torch.cat([part.call + number for number, part in enumerate(parts)]),
        torch.cat([part.example for part in parts]),
        parts[0].target,
        parts[0].indirect,
    )


# The gradient of the head's weight ---------------------------------------------------------------


def _recovered(
    head: nn.Linear, grad: Tensor, hidden: Tensor, in_16_bits: bool
) -> tuple[Rows | None, str]:
    """The gradient at the logits from that of the weight; or None, and why.

    ``dW = G^T H`` with hidden states ``H`` (n, F). If the rows of ``H`` are independent,
    ``G^T = dW H^+``. Fewer rows than features leave directions in which ``dW`` must be zero: they
    tell whether these are the hidden states that the loss has seen. An error of one rounding in
    ``dW`` makes one of ``|dW_c| * |H^+_i|`` in ``G_ic``.
    """
    count, features = hidden.shape
    if count >= features:
        return None, (
            f", and the gradient of its weight determines that of at most {features - 1} rows, one "
            f"less than features, but got {count}; use a smaller batch"
        )
    h = _wide(hidden)
    singular = torch.linalg.svdvals(h)
    precision = 2.0**-9 if in_16_bits or grad.dtype.itemsize < 4 else 2.0**-24
    if float(singular[-1]) < 64 * 2.0**-24 * float(singular[0]):
        return None, (
            ", and the gradient of its weight does not determine the rows: some of the "
            f"{count} hidden states are the same, or combinations of others"
        )
    inverse = torch.linalg.pinv(h)
    rows = torch.arange(count)
    most = max(FEWEST, (1 << 22) // head.out_features)
    if count > most:
        rows = torch.linspace(0, count - 1, most).long()
    g = torch.empty(len(rows), head.out_features, dtype=torch.float64)
    z, sizes = torch.empty_like(g), torch.empty(head.out_features, dtype=torch.float64)
    left = total = 0.0
    for part in torch.arange(head.out_features).split(max(1, (1 << 22) // features)):
        block = _wide(grad[part[0] : part[-1] + 1])
        whole = block @ inverse
        left += float((block - whole @ h).norm()) ** 2
        total += float(block.norm()) ** 2
        g[:, part] = whole[:, rows].t()
        z[:, part] = h[rows] @ _wide(head.weight[part[0] : part[-1] + 1]).t()
        sizes[part] = block.norm(dim=1)
    if head.bias is not None:
        z += _wide(head.bias)
    if not bool(g.isfinite().all()):
        return None, ", and the gradient of its weight has NaN or infinite entries"
    if total == 0:
        return None, ", and the gradient of its weight is zero"
    if left > (64 * precision) ** 2 * total:
        return None, (
            ", and the gradient of its weight is not made of the hidden states that the last "
            "module before it returned: they are changed between the two, or the weight is tied"
        )
    noise = 8 * precision * sizes * inverse[:, rows].norm(dim=0).unsqueeze(1)
    present = (g.abs() > 4 * noise).any(1)
    if not bool(present.any()):
        return None, ", and the gradient of its weight is too coarse"
    limit = min(max(FEWEST, ELEMENTS // head.out_features), MOST)
    present = present.nonzero().squeeze(1)[:limit]
    return Rows(
        z[present],
        g[present],
        precision,
        noise[present],
        call=torch.zeros(len(present), dtype=torch.int64),
        example=rows[present],
        indirect=True,
    ), ""


# Inside compiled code ----------------------------------------------------------------------------


def _compiler_loaded() -> bool:
    return "torch._dynamo" in sys.modules  # loading it takes seconds


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which a compiled step that calls `backward()` does not try to compile."""
    return torch.compiler.disable(function) if _compiler_loaded() else function


_TAGS = itertools.count()
_WATCHERS: dict[int, StepWatcher] = {}


@functools.cache
def _register_operators() -> None:
    """The identity as an operator, which compiled code keeps, and whose backward pass reports."""

    def watch(logits: Tensor, tag: int) -> Tensor:
        return logits.clone()

    def report(grad: Tensor, logits: Tensor, tag: int) -> Tensor:
        watcher = _WATCHERS.get(tag)
        if watcher is not None:
            watcher._guarded(watcher._on_compiled, logits, grad)
        return grad.clone()

    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        logits, ctx.tag = inputs
        ctx.save_for_backward(logits)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        return torch.ops.powergrad.watch_gradient(grad, logits, ctx.tag), None

    forward = torch.library.custom_op(
        "powergrad::watch_logits",
        watch,
        mutates_args=(),
        schema="(Tensor logits, int tag) -> Tensor",
    )
    forward.register_fake(lambda logits, tag: torch.empty_like(logits))
    forward.register_autograd(_uncompiled(backward), setup_context=setup_context)
    torch.library.custom_op(
        "powergrad::watch_gradient",
        report,
        mutates_args=(),
        schema="(Tensor grad, Tensor logits, int tag) -> Tensor",
    ).register_fake(lambda grad, logits, tag: torch.empty_like(grad))


# What a step changes, and its way back -----------------------------------------------------------


@contextmanager
def _restoring(model: nn.Module) -> Iterator[None]:
    """After the block, model, optimizers and random state are as they were before."""
    saved = _SavedModel(model)
    known = {id(tensor) for tensor in saved.tensors}
    optimizers: dict[Optimizer, _SavedOptimizer] = {}

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in optimizers:
            optimizers[optimizer] = _SavedOptimizer(optimizer, known)

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        optimizers[optimizer].note_groups()

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    random_state = _random_state()
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for optimizer in optimizers.values():
            optimizer.restore()
        saved.restore()
        _set_random_state(random_state)


class _SavedTensor:
    """A tensor and a copy of its values."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.copy = tensor, tensor.detach().clone()

    def restore(self) -> Tensor:
        """Write the values back if they have changed."""
        # Unchanged tensors are left alone: an earlier graph may need them, in this version.
        if not _same(self.tensor, self.copy):
            with torch.no_grad():
                if self.tensor.shape == self.copy.shape and self.tensor.dtype == self.copy.dtype:
                    self.tensor.copy_(self.copy)
                else:
                    self.tensor.data = self.copy
        return self.tensor


def _same(a: Tensor, b: Tensor) -> bool:
    try:
        return a.dtype == b.dtype and torch.equal(a.detach(), b)
    except (NotImplementedError, RuntimeError):  # such as of sparse tensors
        return False


class _SavedModel:
    """Parameters, buffers, gradients and the training mode of every module."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = [
            (module, dict(module._parameters), dict(module._buffers), module.training)
            for module in model.modules()
        ]
        owned = [t for _, p, b, _ in self.modules for t in (*p.values(), *b.values())]
        self.tensors = list({id(tensor): tensor for tensor in owned if tensor is not None}.values())
        for tensor in self.tensors:
            if nn.parameter.is_lazy(tensor):
                raise ValueError(
                    "Expected `model` to have been called once, but got parameters that are not "
                    "initialised."
                )
        self.values = [_SavedTensor(tensor) for tensor in self.tensors]
        self.grads = [
            (tensor, None if tensor.grad is None else _SavedTensor(tensor.grad))
            for tensor in self.tensors
            if tensor.is_leaf
        ]

    def restore(self) -> None:
        for module, parameters, buffers, training in self.modules:
            module._parameters.clear()
            module._parameters.update(parameters)
            module._buffers.clear()
            module._buffers.update(buffers)
            module.training = training
        for value in self.values:
            value.restore()
        for tensor, grad in self.grads:
            tensor.grad = None if grad is None else grad.restore()


class _SavedOptimizer:
    """The state of an optimizer before its first step, and its parameters outside of the model."""

    def __init__(self, optimizer: Optimizer, known: set[int]) -> None:
        self.optimizer = optimizer
        self.state = {
            key: {name: self._saved(value) for name, value in values.items()}
            if isinstance(values, dict)
            else self._saved(values)
            for key, values in optimizer.state.items()
        }
        self.groups = [self._options(group) for group in optimizer.param_groups]
        self.changed: list[set[str]] = [set() for _ in self.groups]
        self.others = [
            _SavedTensor(parameter)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) not in known
        ]

    @staticmethod
    def _saved(value: Any) -> Any:
        return _SavedTensor(value) if isinstance(value, Tensor) else copy.deepcopy(value)

    @staticmethod
    def _options(group: dict[str, Any]) -> dict[str, Any]:
        options = {key: value for key, value in group.items() if key != "params"}
        return {
            key: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
            for key, value in options.items()
        }

    def note_groups(self) -> None:
        """Note which options the step itself has changed; a scheduler's changes are not undone."""
        for changed, before, group in zip(
            self.changed, self.groups, self.optimizer.param_groups, strict=False
        ):
            for key, value in self._options(group).items():
                if key not in before:
                    continue
                tensors = isinstance(value, Tensor) and isinstance(before[key], Tensor)
                if not (_same(value, before[key]) if tensors else value == before[key]):
                    changed.add(key)

    def restore(self) -> None:
        def back(value: Any) -> Any:
            return value.restore() if isinstance(value, _SavedTensor) else value

        self.optimizer.state.clear()
        for key, values in self.state.items():
            restored = (
                {name: back(value) for name, value in values.items()}
                if isinstance(values, dict)
                else back(values)
            )
            self.optimizer.state[key] = restored
        for changed, before, group in zip(
            self.changed, self.groups, self.optimizer.param_groups, strict=False
        ):
            group.update({key: before[key] for key in changed})
        for other in self.others:
            other.restore()


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])
