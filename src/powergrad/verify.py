"""`verify`: does this training step really use PowerGrad Transform?

PGT does not change the value of the loss, only the gradient at the logits. A `StepWatcher` collects
logits and gradients while a step runs; `powergrad._slope` measures alpha on them. The gradient
comes from one of three places:

- a hook on the head, if its module is called: it sees the logits and their gradient;
- the gradient of the head's weight, ``dW = G^T H``, if the weight is used without calling the
  module, as chunked losses do. With fewer rows than features it determines ``G``;
- the output of a compiled model, if the head inside cannot be observed.
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
from powergrad._slope import Rows, Verification, measure
from powergrad.compat import hook_compiled, is_compiled, run_eagerly, tree_map
from powergrad.head import find_head, unwrap

__all__ = ["StepWatcher", "Verification", "verify"]

ELEMENTS = 1 << 18  # the maximal number of logits that are measured
FEWEST, MOST = 4, 1024  # limits of the number of rows


def verify(
    step: Callable[[], Any],
    model: nn.Module,
    head: nn.Module | str | None = None,
    *,
    target: Tensor | None = None,
) -> Verification:
    r"""Run one training step and measure the effective alpha from its gradient at the logits.

    `step` is called once. Afterwards the following are restored, even if `step` raises: weights,
    buffers and gradients of `model`, training mode, the state of every ``torch.optim`` optimizer
    that stepped, random state (torch, ``random``, numpy), and hooks. This needs memory for a copy
    of all of these. Other state that `step` advances is not restored: data iterators, learning-rate
    schedulers, a ``GradScaler``, counters.

    With class indices, labels are not needed, also with label smoothing or class weights. For both
    together, and for soft targets such as those of mixup, pass `target`.

    Code compiled by ``torch.compile`` is recompiled for this step, and again after it. Under data
    parallelism, call it on every rank; each rank reports on its own rows.

    Args:
        step: Runs one training step: forward pass, loss, ``backward()``, and optionally the
            optimizer.
        model: The network that `step` trains.
        head: The module whose outputs are the logits, or its name, if it cannot be found.
        target: Class indices; or class probabilities, of the shape of the logits.

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
    watcher = StepWatcher(model, head, target=target)
    find_head(unwrap(model), head)  # raises, where the watcher would answer "cannot tell"
    if "torch._dynamo" in sys.modules:  # compiled code ignores hooks that are added later
        watcher._traceable = True
        torch.compiler.reset()
    with _restoring(model), watcher:
        step()
    return watcher.result()


class StepWatcher:
    r"""Context manager that observes one training step without changing it.

    It is the passive form of :func:`powergrad.verify`, for a step that runs anyway. Its hooks are
    removed when the block ends. If anything goes wrong inside the watcher, the verdict is "cannot
    tell" with the reason; it never raises in the step. It keeps the logits in memory until their
    gradient arrives. Code that is already compiled cannot be observed, except for the output of a
    compiled model.

    Args:
        model: The network.
        head: As in :func:`powergrad.verify`. If it is not found, the verdict is "cannot tell".
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
        for name, value, expected, kinds in (
            ("model", model, "a module", nn.Module),
            ("target", target, "a tensor", (Tensor, type(None))),
            ("head", head, "a module, its name or None", (nn.Module, str, type(None))),
        ):
            if not isinstance(value, kinds):
                raise TypeError(
                    f"Expected `{name}` to be {expected}, but got {type(value).__name__}."
                )
        self._model, self._target = model, target
        self._traceable = False  # whether our operator may be inserted into compiled code
        self._failure = ""
        self._calls: list[_Call] = []
        self._outer: list[_Call] = []  # outputs of compiled models
        self._indirect: list[Rows] = []  # from the gradient of the weight
        self._why_not_indirect = ""
        self._without_grad = False
        self._features: tuple[Tensor, bool] | None = None  # and whether they are in 16 bits
        self._undo: list[Callable[[], None]] = []
        self._head: nn.Module | None = None
        self._result: Verification | None = None
        try:
            self._head = find_head(unwrap(model), head)
        except ValueError as error:
            self._failure = str(error)

    def __enter__(self) -> StepWatcher:
        if self._head is not None:
            self._guarded(self._attach, self._head)
        return self

    def __exit__(self, *exc: Any) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._features = None

    def result(self) -> Verification:
        """Return the verification of the step; call it after the block.

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
        """Call `function`, and record an exception instead of breaking the user's step."""
        try:
            with torch.no_grad():
                function(*args)
        except Exception as error:
            self._fail(f"watching failed: {type(error).__name__}: {error}")

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason

    def _attach(self, head: nn.Module) -> None:
        tag, traceable = next(_TAGS), self._traceable
        _REPORTS[tag] = functools.partial(self._guarded, self._on_compiled)
        self._undo.append(lambda: _REPORTS.pop(tag, None) and None)

        def on_head(module: nn.Module, args: Any, output: Any) -> Any:
            if not torch.compiler.is_compiling():
                self._guarded(self._on_output, output, self._calls)
            elif traceable and isinstance(output, Tensor):
                return torch.ops.powergrad.watch_logits(output, tag)
            return None

        def on_outer(output: Any) -> None:
            if not torch.compiler.is_compiling():
                self._guarded(self._on_output, output, self._outer)

        # As the first hook, it sees the gradient after any changes by other hooks.
        self._undo.append(head.register_forward_hook(on_head, prepend=True).remove)
        compiled = [module for module in self._model.modules() if is_compiled(module)]
        self._undo += [hook_compiled(module, on_outer) for module in compiled]
        if isinstance(head, nn.Linear) and (traceable or not compiled):
            self._watch_weight(head)

    def _watch_weight(self, head: nn.Linear) -> None:
        """Observe the gradient of the weight, and the last hidden states before the head."""
        if not head.weight.requires_grad:
            self._why_not_indirect = ", and its weight does not require grad"
            return

        def on_features(module: nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling() or not isinstance(output, Tensor):
                return
            if output.dim() > 1 and output.shape[-1] == head.in_features and is_plain(output):
                autocast = torch.is_autocast_enabled(output.device.type)
                self._features = output.detach(), autocast or output.dtype.itemsize < 4

        inside = set(head.modules())
        for module in self._model.modules():
            if module not in inside:
                self._undo.append(module.register_forward_hook(on_features).remove)
        on_gradient = functools.partial(self._guarded, self._on_weight_gradient, head)
        self._undo.append(head.weight.register_hook(on_gradient).remove)

    def _on_output(self, output: Any, calls: list[_Call]) -> None:
        logits = _logits_of(output)
        if logits is None:
            kind = type(output).__name__
            self._fail(f"the output of the head is a {kind}, not a tensor of logits")
        elif not is_plain(logits):
            self._fail(
                f"the logits are a {type(logits).__name__}, or inside a torch.func transform, "
                "where their gradient cannot be observed"
            )
        elif not logits.requires_grad:
            self._without_grad = True
        else:
            call = _Call(logits)
            calls.append(call)
            node, number = logits.grad_fn, logits.output_nr
            if node is None:
                on_gradient = functools.partial(self._guarded, call.add)
                self._undo.append(logits.register_hook(on_gradient).remove)
            else:  # its hook runs after all hooks of the tensor, which may alter the gradient
                on_gradients = functools.partial(self._guarded, call.add_one, number)
                self._undo.append(node.register_prehook(on_gradients).remove)

    def _on_compiled(self, logits: Tensor, grad: Tensor) -> None:
        self._calls.append(_Call(logits))
        self._calls[-1].add(grad)

    def _on_weight_gradient(self, head: nn.Linear, grad: Tensor) -> None:
        if any(call.arrived for call in self._calls):
            return
        if self._features is None:
            self._why_not_indirect = (
                f", and no module before it returned hidden states of {head.in_features} features"
            )
            return
        hidden, in_16_bits = self._features
        try:
            hidden = hidden.reshape(-1, head.in_features)
            self._indirect.append(_recovered(head, grad, hidden, in_16_bits))
        except _UndeterminedError as error:
            self._why_not_indirect = f", and the gradient of its weight {error}"

    # Concluding ----------------------------------------------------------------------------------

    def _conclusion(self) -> Verification:
        calls = [call for call in self._calls if call.arrived]
        calls = calls or [call for call in self._outer if call.arrived]
        for failure in (self._failure, *(call.failure for call in calls)):
            if failure:
                return Verification("cannot tell", reason=failure)
        if not calls and not self._indirect:
            return Verification("cannot tell", reason=self._why_nothing())
        for call in calls:
            if call.neither is not None:
                return call.neither
        calls = [call for call in calls if call.rows is not None]
        rows = [call.rows for call in calls if call.rows is not None] or self._indirect
        reason = ""
        if not rows:
            reason = "the gradient at the logits is zero"
        elif len({part.logits.shape[1] for part in rows}) > 1:
            reason = "the calls of the head have different numbers of classes"
        elif self._target is not None and len(calls) != 1:
            reason = "`target` needs exactly one call of the head, but got "
            reason += str(len(calls) or "none")
        elif self._target is not None:
            target = calls[0].rows_of(self._target)
            rows = [replace(rows[0], target=target)]
            if target is None:
                reason = f"`target` of shape {shape_of(self._target)} and {self._target.dtype} "
                reason += f"does not fit logits of shape {calls[0].shape}"
        if reason:
            return Verification("cannot tell", reason=reason)
        return measure(_joined(rows))

    def _why_nothing(self) -> str:
        if self._calls or self._outer:
            return "no gradient reached the logits; does the step call `backward()`?"
        if self._without_grad:
            return "the head was only called without gradients (`torch.no_grad`, or all is frozen)"
        if any(is_compiled(module) for module in self._model.modules()):
            return (
                "the head runs in compiled code, which ignores new hooks; use `powergrad.verify`, "
                "or call `torch.compiler.reset()` before"
            )
        return (
            f"the head, a {type(self._head).__name__}, was not called{self._why_not_indirect}; "
            "check that the step uses this model, or pass `head`, the module that computes the "
            "logits"
        )


run_eagerly(StepWatcher)  # for compiled steps that call `backward()`

_TAGS = itertools.count()
_REPORTS: dict[int, Callable[[Tensor, Tensor], None]] = {}


def report(logits: Tensor, grad: Tensor, tag: int) -> None:
    """Pass logits and gradient from ``torch.ops.powergrad.watch_logits`` to the watcher `tag`."""
    if tag in _REPORTS:
        _REPORTS[tag](logits, grad)


def _logits_of(output: Any) -> Tensor | None:
    """The logits in a module's output: the tensor itself, or its attribute or item `logits`."""
    if isinstance(output, dict):
        output = output.get("logits")
    elif not isinstance(output, Tensor):
        output = getattr(output, "logits", None)
    usable = isinstance(output, Tensor) and output.is_floating_point() and output.dim() > 0
    return output if usable else None


# One call of the head ----------------------------------------------------------------------------


class _Call:
    """The logits of one call of the head, and their gradient.

    A sample of the rows is copied when the gradient arrives, because other code may change logits
    and gradient in place later.
    """

    def __init__(self, logits: Tensor) -> None:
        self.shape, self.version = shape_of(logits), logits._version
        self.arrived = False
        self.failure = ""
        self.neither: Verification | None = None
        self.rows: Rows | None = None
        self._logits: Tensor | None = logits.detach()
        self._dim = 0
        self._index: tuple[Tensor, ...] = ()

    def add_one(self, number: int, grads: tuple[Tensor | None, ...]) -> None:
        """Add gradient number `number` of an autograd node."""
        if grads[number] is not None:
            self.add(grads[number])

    def add(self, grad: Any) -> None:
        """Add a gradient. Several, such as from losses with separate `backward()` calls, sum up."""
        self.arrived, logits = True, self._logits
        if self.rows is not None:
            gradient = self.rows.gradient + _wide(self._classes_last(grad)[self._index])
            self.rows = replace(self.rows, gradient=gradient)
            self._check_sum(_zero_sum_dim(gradient, [1], self.rows.logits)[1])
        elif logits is None or not bool((grad != 0).any()):
            return  # the verdict is already known, or the gradient is zero
        elif logits._version != self.version:
            self.failure = "the logits were changed in place before their gradient arrived"
        elif not bool(grad.isfinite().all()):
            self.failure = "the gradient at the logits has NaN or infinite entries"
        else:
            dims = {1, len(self.shape) - 1} if len(self.shape) > 1 else {0}
            dim, excess = _zero_sum_dim(grad, sorted(dims), logits)
            self._dim = dim or 0
            self._check_sum(excess)
            if dim is None:
                self.failure = (
                    f"the gradient of the logits, of shape {self.shape}, sums to zero over both "
                    "dimension 1 and the last dimension, so either may be the class dimension"
                )
            elif self.neither is None:
                self.rows = self._sampled(logits, grad)
        self._logits = None

    def _sampled(self, logits: Tensor, grad: Tensor) -> Rows:
        gradient = self._classes_last(grad)
        present = (gradient != 0).any(-1).nonzero()
        limit = min(max(FEWEST, ELEMENTS // gradient.shape[-1]), MOST, len(present))
        chosen = present[torch.linspace(0, len(present) - 1, limit).long().to(present.device)]
        self._index = tuple(chosen.t())
        z, g = _wide(self._classes_last(logits)[self._index]), _wide(gradient[self._index])
        if bool((z.isnan() | (z == torch.inf)).any()):
            self.failure = "the logits have NaN or infinite entries"
        formats = [torch.finfo(dtype) for dtype in (logits.dtype, grad.dtype)]
        # Kernels flush probabilities below float32's normal numbers to 0, before or after scaling.
        flushed = 16 * torch.finfo(torch.float32).smallest_normal * max(1.0, float(g.abs().max()))
        return Rows(
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

    def _check_sum(self, excess: float | None) -> None:
        """Set `neither` if `excess`, the relative sum over the classes, is not None."""
        if excess is None:
            self.neither = None
            return
        reason = (
            "the gradient at the logits does not sum to zero over the classes, as it does for "
            "every softmax cross-entropy; this may be another loss, or the logits may be changed "
            "after this module (then pass `head`, the module that computes the final logits)"
        )
        classes = self.shape[self._dim]
        rows = math.prod(self.shape) // classes
        self.neither = Verification("neither", None, None, excess, rows, classes, reason=reason)

    def rows_of(self, target: Tensor) -> Tensor | None:
        """The target of the rows as probabilities; None if its shape or values do not fit."""
        index = tuple(part.to(target.device) for part in self._index)
        without = self.shape[: self._dim] + self.shape[self._dim + 1 :]
        if target.is_floating_point() and shape_of(target) == self.shape:
            return _wide(self._classes_last(target)[index])
        if not target.is_floating_point() and shape_of(target) == without:
            labels = (target if without else target.unsqueeze(0))[index].long().clamp(min=0).cpu()
            if int(labels.max()) < self.shape[self._dim]:
                return nn.functional.one_hot(labels, self.shape[self._dim]).double()
        return None


def _zero_sum_dim(grad: Tensor, dims: list[int], logits: Tensor) -> tuple[int | None, float | None]:
    """Find the dimension in `dims` over which the gradient sums to zero.

    Returns ``(dim, None)``, ``(None, None)`` if there are several, or if there is none, the closest
    dimension and its sum relative to the sum of absolute values. If there is none at first, rows
    that are predicted with certainty are excluded: ``p - 1`` may round to 0 there, while the
    gradients of the other classes do not.
    """
    info = torch.finfo(grad.dtype)
    limit = 0.05 if info.bits < 32 else 0.02  # a 16-bit loss has an error of a few percent
    wide = torch.promote_types(grad.dtype, torch.float32)
    ratios: dict[int, float] = {}
    for leave_out in (False, True):
        for dim in dims:
            total, size = grad.sum(dim, dtype=wide), grad.abs().sum(dim, dtype=wide)
            size += grad.shape[dim] * info.smallest_normal * info.eps / limit  # what underflows
            if leave_out:
                doubt = 1 - logits.to(wide).softmax(dim).amax(dim) > 100 * info.eps
                total, size = total * doubt, size * doubt
            ratios[dim] = float(total.norm() / size.norm())  # NaN: no row is left
        below = [dim for dim in dims if not ratios[dim] > limit]
        if below:
            return (below[0] if len(below) == 1 else None), None
    closest = min(dims, key=lambda dim: ratios[dim])
    return closest, ratios[closest]


def _wide(tensor: Tensor) -> Tensor:
    """A copy in float64 on the CPU."""
    return tensor.detach().to("cpu", torch.float64, copy=True)


def _joined(parts: list[Rows]) -> Rows:
    """Concatenate all rows; `call` numbers the call that each row is from."""
    numbered = [replace(part, call=part.call + number) for number, part in enumerate(parts)]
    names = ("logits", "gradient", "noise", "call", "example")
    tensors = {name: torch.cat([getattr(part, name) for part in numbered]) for name in names}
    return replace(parts[0], precision=max(part.precision for part in parts), **tensors)


# The gradient of the head's weight ---------------------------------------------------------------


class _UndeterminedError(Exception):
    """Why the gradient of the weight does not determine the gradient at the logits."""


def _recovered(head: nn.Linear, grad: Tensor, hidden: Tensor, in_16_bits: bool) -> Rows:
    """Recover the gradient at the logits from the gradient of the weight.

    ``dW = G^T H`` with hidden states ``H`` (n, F). If the rows of ``H`` are independent,
    ``G^T = dW H^+``. With fewer rows than features, ``dW`` must be zero in some directions, which
    checks that the loss was computed from these hidden states. A relative rounding error ``r`` in
    ``dW`` causes an error of ``r * |dW_c| * |H^+_i|`` in ``G_ic``.
    """
    count, features = hidden.shape
    if count >= features:
        raise _UndeterminedError(
            f"determines the gradient of at most {features - 1} rows (one less than the features), "
            f"but got {count}; use a smaller batch"
        )
    h = _wide(hidden)
    singular = torch.linalg.svdvals(h)
    if float(singular[-1]) < 64 * 2.0**-24 * float(singular[0]):
        raise _UndeterminedError(
            f"does not determine the rows: the {count} hidden states are linearly dependent"
        )
    inverse = torch.linalg.pinv(h)
    limit = min(max(FEWEST, ELEMENTS // head.out_features), MOST)
    rows = torch.linspace(0, count - 1, min(2 * limit, count)).long()  # some may be ignored
    g, z, sizes, left = [], [], [], 0.0
    some = max(1, (1 << 22) // features)  # classes at a time, as copies are in float64
    for dw, w in zip(
        map(_wide, grad.split(some)), map(_wide, head.weight.split(some)), strict=True
    ):
        whole = dw @ inverse
        left += float((dw - whole @ h).square().sum())
        g.append(whole[:, rows].t())
        z.append(h[rows] @ w.t())
        sizes.append(dw.norm(dim=1))
    g, z, sizes = torch.cat(g, 1), torch.cat(z, 1), torch.cat(sizes)
    if head.bias is not None:
        z += _wide(head.bias)
    precision = 2.0**-9 if in_16_bits or grad.dtype.itemsize < 4 else 2.0**-24
    noise = 8 * precision * sizes * inverse[:, rows].norm(dim=0).unsqueeze(1)
    present = (g.abs() > 4 * noise).any(1).nonzero().squeeze(1)[:limit]
    if not bool(g.isfinite().all()):
        raise _UndeterminedError("has NaN or infinite entries")
    if left > float((64 * precision * sizes).square().sum()):
        raise _UndeterminedError(
            "does not match the hidden states that the last module before it returned: they are "
            "changed in between, or the weight is tied"
        )
    if not len(present):
        raise _UndeterminedError("is zero, or not precise enough")
    return Rows(
        z[present],
        g[present],
        precision,
        noise[present],
        call=torch.zeros(len(present), dtype=torch.int64),
        example=rows[present],
        indirect=True,
    )


# Restoring the state that a step changes ---------------------------------------------------------


@contextmanager
def _restoring(model: nn.Module) -> Iterator[None]:
    """Restore model, optimizers and random state after the block."""
    undo: list[Callable[[], Any]] = [_saved_random_state()]
    tensors: dict[int, Tensor] = {}
    options: dict[Optimizer, list[dict[str, Any]]] = {}  # before the first step
    for module in model.modules():
        undo.append(functools.partial(setattr, module, "training", module.training))
        for members in (module._parameters, module._buffers):
            undo += [functools.partial(members.update, dict(members)), members.clear]
            tensors.update({id(t): t for t in members.values() if t is not None})
    for tensor in tensors.values():
        if nn.parameter.is_lazy(tensor):
            raise ValueError(
                "Expected the parameters of `model` to be initialised, but got lazy ones; call the "
                "model once first."
            )
        undo.append(_saved(tensor))
        if tensor.is_leaf:
            undo.append(functools.partial(setattr, tensor, "grad", tensor.grad))
            undo += [] if tensor.grad is None else [_saved(tensor.grad)]

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        groups = optimizer.param_groups
        if optimizer not in options:
            undo.append(_saved_state(optimizer))
            parameters = [parameter for group in groups for parameter in group["params"]]
            undo.extend(_saved(p) for p in parameters if id(p) not in tensors)
            kept = [{key: group[key] for key in group if key != "params"} for group in groups]
            options[optimizer] = copy.deepcopy(kept)

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # Only what the step itself has changed: a scheduler's changes are not undone.
        for group, previous in zip(optimizer.param_groups, options[optimizer], strict=False):
            changed = [key for key in previous if not _same(group.get(key), previous[key])]
            undo.extend(functools.partial(group.__setitem__, k, previous[k]) for k in changed)

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for action in reversed(undo):
            action()


def _saved(tensor: Tensor) -> functools.partial[Tensor]:
    """A function that restores the current values of `tensor`, and returns it."""
    return functools.partial(_give_back, tensor, tensor.detach().clone())


def _give_back(tensor: Tensor, values: Tensor) -> Tensor:
    if not _same(tensor, values):  # an unneeded copy would invalidate graphs that saved the tensor
        with torch.no_grad():
            tensor.copy_(values)
    return tensor


def _same(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return a is b or bool(a == b)
    try:
        return a.dtype == b.dtype and torch.equal(a.detach(), b)
    except (NotImplementedError, RuntimeError):  # such as of sparse tensors
        return False


def _saved_state(optimizer: Optimizer) -> Callable[[], None]:
    def saved(value: Any) -> Any:
        return _saved(value) if isinstance(value, Tensor) else copy.deepcopy(value)

    state = tree_map(saved, dict(optimizer.state))

    def restore() -> None:
        optimizer.state.clear()
        back = tree_map(lambda v: v() if isinstance(v, functools.partial) else v, state)
        optimizer.state.update(back)

    return restore


def _saved_random_state() -> Callable[[], None]:
    pairs = [(torch.get_rng_state, torch.set_rng_state), (random.getstate, random.setstate)]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        pairs.append((torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all))
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        pairs.append((numpy.get_state, numpy.set_state))
    states = [(set_state, get_state()) for get_state, set_state in pairs]

    def restore() -> None:
        for set_state, state in states:
            set_state(state)

    return restore
