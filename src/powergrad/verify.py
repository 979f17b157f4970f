r"""`verify`: does this training step really use PowerGrad Transform?

PGT does not change the value of the loss, only the gradient at the logits, so this is measured. If
losses of powergrad were called with these logits, it must be a multiple of their gradient. For
other losses, in a row of logits z with the target ``t = (1 - e) q + e / C``, it must be

    g = m (p' - t),      p' = softmax(alpha z),

up to a few roundoffs of the two terms, for the same alpha and smoothing e in all rows, and with
equal factors m, or equal for equal labels (class weights): in a focal loss, or in the paper's
listing, only the factors are wrong.
"""

from __future__ import annotations

import copy
import functools
import math
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from powergrad.checks import Call, is_plain, shape_of
from powergrad.head import find_head, unwrap
from powergrad.loss import as_rows, loss_by_definition
from powergrad.transform import LISTENERS, TRACED, Notice

__all__ = ["StepWatcher", "Verification", "verify"]

Verdict = Literal["pgt", "plain", "neither", "cannot tell"]

STORED = 1 << 26  # logits that are kept per call; of more, a random sample of rows
BLOCK = 1 << 18  # logits that are compared at a time
FITTED = 1 << 16  # logits that alpha is fitted to
WIDEST = 0.02  # above this uncertainty of alpha the verdict is "cannot tell"
SAME = 1e-3  # alphas closer than this count as equal
SCHEDULED = {"params", "lr", "momentum", "betas"}  # what a scheduler changes is not restored
COARSE = 2.0**-20  # the roundoff of 16 bits is above it
SIGMAS = 10.0  # standard errors per uncertainty: rounding errors are correlated


@dataclass(frozen=True)
class Verification:
    r"""The result of :func:`powergrad.verify`. ``str()`` of it is one sentence.

    It has no truth value; compare ``verdict`` with the one that you expect.

    Args:
        verdict: "pgt"; "plain", cross-entropy without PGT; "neither", some other gradient; or
            "cannot tell", if the data do not determine the answer.
        alpha: The effective alpha if the verdict is "pgt" or "plain"; the mean over the rows if
            each row has its own.
        uncertainty: How far `alpha` may be from the true value; None if it was not measured.
        rows: The number of rows of logits that were measured.
        rows_in_all: The number of rows that had a gradient.
        reason: Why the verdict is not "pgt" or "plain"; for these, a remark, if there is one.

    Example:
        >>> print(Verification("pgt", 0.3, 1e-6, 64, 64))
        PGT at alpha 0.300 (64 of 64 rows)
    """

    verdict: Verdict
    alpha: float | None = None
    uncertainty: float | None = None
    rows: int = 0
    rows_in_all: int = 0
    reason: str = ""

    def __bool__(self) -> bool:
        raise TypeError(
            "Expected a comparison of `verdict`, such as `verification.verdict == 'pgt'`, but got "
            f"a Verification used as a bool: {self}"
        )

    def __str__(self) -> str:
        if self.alpha is None:
            return f"{self.verdict}: {self.reason}"
        text = (
            "plain cross-entropy" if self.verdict == "plain" else f"PGT at alpha {self.alpha:.3f}"
        )
        if self.uncertainty is not None and self.uncertainty > SAME / 2:
            text += f" ± {self.uncertainty:.3f}"
        remark = f"; {self.reason}" if self.reason else ""
        return f"{text} ({self.rows:,} of {counted(self.rows_in_all, 'row')}{remark})"


def counted(number: int, noun: str) -> str:
    """Such as "1 row" or "2,000 rows"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


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
    schedulers, a ``GradScaler``, counters. Under data parallelism, call it on every rank; each rank
    reports on its own rows.

    Args:
        step: Runs one training step: forward pass, loss, ``backward()``, and optionally the
            optimizer.
        model: The network that `step` trains. If it is compiled, what ``torch.compile`` returned.
        head: The module whose outputs are the logits, or its name, if it cannot be found.
        target: Class indices, or class probabilities of the shape of the logits. It is only needed
            for probabilities (such as mixup) in a loss that is not powergrad's.

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
    with _restoring(model), watcher:
        step()
    return watcher.result()


class StepWatcher:
    r"""Context manager that observes one training step without changing it.

    It is the passive form of :func:`powergrad.verify`, for a step that runs anyway. Its hooks are
    removed when the block ends. If anything goes wrong inside the watcher, the verdict is "cannot
    tell" with the reason; it never raises in the step. It copies the logits and their gradient to
    the CPU when the gradient arrives.

    Args:
        model: The network.
        head: As in :func:`powergrad.verify`. If it is not found, the verdict is "cannot tell".
        target: As in :func:`powergrad.verify`.

    Raises:
        TypeError: If an argument is of another type.

    Example:
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
                got = type(value).__name__
                raise TypeError(f"Expected `{name}` to be {expected}, but got {got}.")
        self._model, self._target = model, target
        self._reason = ""  # why nothing can be told
        self._notices: list[Notice] = []
        self._calls: tuple[list[_Logits], ...] = ([], [], [])  # of head, compiled model and loss
        self._undo: list[Callable[[], Any]] = []
        self._result: Verification | None = None
        try:
            self._head = find_head(unwrap(model), head)
        except ValueError as error:
            self._reason = str(error)

    def __enter__(self) -> StepWatcher:
        if not self._reason:
            self._guarded(self._attach)
        return self

    def __exit__(self, *exc: Any) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def result(self) -> Verification:
        """Return the verification of the step; call it after the block.

        Returns:
            The verification; the same object every time.
        """
        if self._undo:
            return Verification("cannot tell", reason="the watched step has not ended yet")
        if self._result is None:
            if not self._reason:
                self._guarded(self._conclude)
            if self._result is None:
                self._result = Verification("cannot tell", reason=self._reason)
            self._calls, self._notices = ([], [], []), []
        return self._result

    def _guarded(self, function: Callable[..., None], *args: Any) -> None:
        """Call `function`, and record an exception instead of breaking the user's step."""
        try:
            with torch.no_grad():
                function(*args)
        except _UnclearError as error:
            self._reason = self._reason or str(error)
        except Exception as error:
            self._reason = self._reason or f"watching failed: {type(error).__name__}: {error}"

    def _attach(self) -> None:
        def watch(module: nn.Module, calls: list[_Logits]) -> None:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                if not torch.compiler.is_compiling():
                    self._guarded(self._on_output, output, calls)

            # As the first hook, it sees the gradient after any changes by other hooks.
            self._undo.append(module.register_forward_hook(hook, prepend=True).remove)

        watch(self._head, self._calls[0])
        for module in self._model.modules():  # compiled code ignores hooks on what is inside
            if "_orig_mod" in module._modules and self._head in set(module.modules()):
                watch(module, self._calls[1])
        listener = functools.partial(self._guarded, self._on_loss)
        LISTENERS.append(listener)
        self._undo.append(lambda: LISTENERS.remove(listener))

    def _on_output(self, output: Any, calls: list[_Logits]) -> None:
        logits = output.get("logits") if isinstance(output, dict) else output
        logits = getattr(logits, "logits", logits)
        if isinstance(logits, Tensor) and logits.is_floating_point() and logits.dim():
            linear = isinstance(self._head, nn.Linear) and calls is self._calls[0]
            dims = [logits.dim() - 1] if linear or logits.dim() < 3 else [1, logits.dim() - 1]
            self._observe(_Logits(logits, dims), logits, calls)
        elif calls is self._calls[0]:
            raise _UnclearError(f"the output of the head is a {type(output).__name__}, not logits")

    def _on_loss(self, notice: Notice) -> None:
        if not is_plain(notice.input):
            return
        self._notices.append(notice)
        logits, classes = notice.input, getattr(self._head, "out_features", None)
        fits = logits.dim() and classes in (None, logits.shape[min(1, logits.dim() - 1)])
        if notice.call is not None and logits.requires_grad and fits and not any(self._calls[:2]):
            self._observe(_Logits(logits, [min(1, logits.dim() - 1)]), logits, self._calls[2])

    def _observe(self, seen: _Logits, logits: Tensor, calls: list[_Logits]) -> None:
        if not is_plain(logits):
            raise _UnclearError(
                f"the logits are a {type(logits).__name__}, or inside a torch.func transform, "
                "where their gradient cannot be observed"
            )
        calls.append(seen)
        if not logits.requires_grad:
            return

        def on_gradient(grad: Tensor | None) -> None:
            if grad is not None:
                self._guarded(seen.add, grad, self._notices, self._target)

        arrived: Any = on_gradient
        if "torch._dynamo" in sys.modules:  # it would compile what runs during a compiled step
            arrived = torch.compiler.disable(on_gradient)
        if (node := logits.grad_fn) is None:
            self._undo.append(logits.register_hook(arrived).remove)
        else:  # its hook runs after all hooks of the tensor, which may alter the gradient
            number = logits.output_nr
            prehook = node.register_prehook(lambda grads: arrived(grads[number]))
            self._undo.append(prehook.remove)

    def _conclude(self) -> None:
        weight = getattr(self._head, "weight", self)
        own = [n for n in self._notices if n.weight is weight or n.name.startswith("torch.ops")]
        alphas = torch.tensor([float(torch.as_tensor(n.alpha).double().mean()) for n in own])
        for calls in self._calls:
            if any(seen.arrived for seen in calls):
                result = _measured([seen for seen in calls if seen.count], self._notices)
                if result.alpha is not None and bool(((alphas - result.alpha).abs() > SAME).any()):
                    raise _UnclearError("the head is used in two ways, at different alphas")
                self._result = result
                return
        if own and bool((alphas == alphas[0]).all()):
            alpha, rows = float(alphas[0]), sum(notice.rows for notice in own)
            reason = f"as reported by {own[0].name}"
            self._result = Verification(_verdict(alpha), alpha, None, rows, rows, reason)
        elif any(self._calls):
            raise _UnclearError("no gradient reached the logits; does the step call `backward()`?")
        else:
            raise _UnclearError(
                f"the head, a {type(self._head).__name__}, was not called outside compiled code; "
                "pass the model that the step uses, as `torch.compile` returned it if it is "
                "compiled; or pass `head`, the module that computes the logits"
            )


class _UnclearError(Exception):
    """Why the verdict is "cannot tell"."""


def _verdict(alpha: float, tolerance: float = 0.0) -> Verdict:
    return "plain" if abs(alpha - 1) <= tolerance else "pgt"


# The logits of one call ---------------------------------------------------------------------------


class _Logits:
    """The logits of one call, and what is kept of them when their gradient arrives."""

    def __init__(self, logits: Tensor, dims: list[int]) -> None:
        self.logits, self.dims, self.version = logits.detach(), dims, logits._version
        self.arrived = False
        self.told: Verification | None = None  # by losses of powergrad, and confirmed
        self.count = 0  # rows with a gradient
        self.z = self.g = torch.empty(0)  # these rows (n, C), or a sample, on the CPU
        self.t: Tensor | None = None

    def add(self, grad: Tensor, notices: list[Notice], target: Tensor | None) -> None:
        """Copy the rows that have a gradient: other code may change them in place later."""
        self.arrived, logits = True, self.logits
        if not bool((grad != 0).any()):
            return
        if self.count:
            raise _UnclearError("several backward passes reached the same logits")
        if logits._version != self.version:
            raise _UnclearError("the logits were changed in place before their gradient arrived")
        if not bool(grad.isfinite().all()) or not bool((logits < math.inf).all()):
            raise _UnclearError("logits or gradient have NaN or infinite entries")
        sums = [float(grad.sum(dim).norm() / grad.abs().sum(dim).norm()) for dim in self.dims]
        if len(sums) > 1 and max(sums) < 1e-3:  # the gradient sums to zero over the classes
            raise _UnclearError(f"logits of {shape_of(logits)} have two possible class dimensions")
        dim = self.dims[sums.index(min(sums))]
        z, g = (x.movedim(dim, -1).reshape(-1, x.shape[dim]) for x in (logits, grad))
        rows = (g != 0).any(1).nonzero().squeeze(1)
        self.count, limit = len(rows), max(8, STORED // z.shape[1])
        if z.numel() <= STORED >> 3:
            self.told = _told(notices, z, g)
        if limit < len(rows):  # with a generator of its own, to leave the user's alone
            order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
            rows = rows[order[:limit].sort().values.to(rows.device)]
        self.z, self.g = z[rows].cpu(), g[rows].cpu()
        if target is not None:
            self.t = _probabilities(target, logits, dim)[rows.to(target.device)].cpu()


def _probabilities(target: Tensor, logits: Tensor, dim: int) -> Tensor:
    """`target` as rows (N, C)."""
    shape, classes = shape_of(logits), logits.shape[dim]
    if target.is_floating_point() and shape_of(target) == shape:
        return target.movedim(dim, -1).reshape(-1, classes)
    if not target.is_floating_point() and shape_of(target) == shape[:dim] + shape[dim + 1 :]:
        return one_hot(target.reshape(-1).clamp(min=0), classes)
    raise _UnclearError(
        f"`target` of shape {shape_of(target)} and {target.dtype} does not fit logits of {shape}"
    )


def _told(notices: list[Notice], z: Tensor, g: Tensor) -> Verification | None:
    """The verdict, if g is a sum of multiples of the gradients of powergrad's losses of z."""
    columns, slopes, alphas = [], [], []
    for notice in notices:
        if notice.call is None:
            continue
        logits, call = as_rows(notice.input, notice.call)
        if logits.shape == z.shape and torch.equal(logits.to(z.dtype), z):
            alpha = torch.as_tensor(call.alpha).double()
            own, more = (_gradient(z, call.replace(alpha=a)) for a in (alpha, alpha + WIDEST))
            columns.append(own)
            slopes.append((more - own) / WIDEST)
            alphas.append(alpha.reshape(-1))
    if not columns:
        return None
    wanted, x = g.cpu().double().reshape(-1, 1), torch.stack(columns, 1)
    m = torch.linalg.lstsq(x, wanted, driver="gelsd").solution
    slope, unit = torch.stack(slopes, 1) @ m, _unit(z, g)
    slope -= x @ torch.linalg.lstsq(x, slope, driver="gelsd").solution
    depth = -z.cpu().double().log_softmax(1).clamp(min=-1e4).reshape(-1, 1)
    error = unit * (1 + max(float(a.max()) for a in alphas) * depth) * float(wanted.abs().max())
    r, slope = (wanted - x @ m) / error, slope / error
    # How far alpha may be from what was told, and how far it is.
    uncertainty = max(SIGMAS * float(1 / slope.norm().clamp(min=1e-300)), unit, 1e-6)
    apart = float((slope * r).sum().abs() / slope.square().sum().clamp(min=1e-300))
    fits = float(r.abs().max()) <= (4 if unit > COARSE else 16) and apart <= uncertainty
    if not fits or float(m.min()) < -1e-3 * float(m.max()):
        return None
    _check_determined(uncertainty / 5)
    used = [alpha for alpha, factor in zip(alphas, m, strict=True) if factor > 16 * unit * m.max()]
    alpha = torch.cat(used)
    low, high = float(alpha.min()), float(alpha.max())
    span = f"alphas from {low:.3f} to {high:.3f}" if low < high else ""
    if low < high and (len(used) > 1 or bool((alpha == 1).any())):
        return Verification("neither", reason=f"losses at {span} were added or mixed")
    return Verification(_verdict(low), float(alpha.mean()), uncertainty, reason=span)


def _gradient(z: Tensor, call: Call) -> Tensor:
    """The gradient of a loss of powergrad, by its definition in float64."""
    tensors, rest = call.split()
    call = Call.joined([None if tensor is None else tensor.cpu() for tensor in tensors], rest)
    with torch.enable_grad():
        x = z.detach().cpu().double().requires_grad_()
        return torch.autograd.grad(loss_by_definition(x, call).sum(), x)[0].flatten()


def _unit(*tensors: Tensor) -> float:
    """The roundoff of tensors, which are not trusted further than float32."""
    return max(2.0**-24, *(torch.finfo(tensor.dtype).eps / 2 for tensor in tensors))


def _check_determined(uncertainty: float) -> None:
    if not uncertainty <= WIDEST:
        raise _UnclearError(
            "the rows do not determine alpha: their logits differ too little for the precision of "
            "the gradient (all are equal if the head starts at zero), or there are too few rows; "
            "measure later in training, in float32, or on a larger batch"
        )


# Other losses -------------------------------------------------------------------------------------


class _Data(NamedTuple):
    """The rows of all calls, and the precision of their gradient."""

    z: Tensor  # (n, C)
    g: Tensor
    t: Tensor | None  # the target, if the user passed one
    call: Tensor  # (n, 1), the call that each row is from
    counts: Tensor  # (n, 1), the rows of that call
    unit: float  # roundoff
    lost: float  # underflow

    def part(self, rows: Any) -> _Data:
        z, g, t, call, counts = (None if x is None else x[rows].double() for x in self[:5])
        return self._replace(z=z, g=g, t=t, call=call, counts=counts)

    def sample(self) -> _Data:
        rows = max(4, FITTED // self.z.shape[1])
        return self.part(torch.linspace(0, len(self.z) - 1, rows).long().unique())

    @property
    def coarse(self) -> bool:
        """Whether logits or gradient are in 16 bits."""
        return self.unit > COARSE


def _measured(calls: list[_Logits], notices: list[Notice]) -> Verification:
    if not calls:
        raise _UnclearError("the gradient at the logits is zero")
    counts = torch.tensor([call.count for call in calls])
    rows = {"rows": sum(len(call.z) for call in calls), "rows_in_all": int(counts.sum())}
    told = [call.told for call in calls if call.told is not None]
    if len(told) == len(calls):
        result = max(told, key=lambda one: one.uncertainty or math.inf)
        if len({(one.verdict, one.alpha) for one in told}) > 1:
            result = Verification("neither", reason="the calls of the head have different losses")
        return replace(result, **rows)
    if TRACED or any(notice.special for notice in notices):
        raise _UnclearError(
            "a loss of powergrad with `softcap`, `logit_scale`, `z_loss` or one alpha per row, or "
            "for two classes, was called or traced, and the gradient is not that of eager calls "
            "with these logits alone"
        )
    if len({call.z.shape[1] for call in calls}) > 1 or (len(calls) > 1 and calls[0].t is not None):
        raise _UnclearError("the calls of the head differ in their classes, or `target` is for one")
    z, g = torch.cat([call.z for call in calls]), torch.cat([call.g for call in calls])
    call = torch.repeat_interleave(torch.tensor([len(call.z) for call in calls])).unsqueeze(1)
    # Kernels flush what is below the normal numbers of float32, before or after they scale it.
    info, flushed = torch.finfo(g.dtype), 16 * torch.finfo(torch.float32).smallest_normal
    lost = info.smallest_normal * info.eps + flushed * max(1.0, float(g.abs().max()))
    used = (g != 0).any(0)  # the other classes are padding of the head
    t = None if calls[0].t is None else calls[0].t[:, used]
    data = _Data(z[:, used], g[:, used], t, call, counts[call], _unit(z, g), lost)
    alphas = [float(torch.as_tensor(notice.alpha).mean()) for notice in notices]
    return replace(_judged(data, alphas), **rows)


def _judged(data: _Data, told: list[float]) -> Verification:
    """The verdict on rows, if losses of powergrad were called with the alphas `told`."""
    count, classes = data.z.shape
    if float(data.g.abs().max()) < 1e3 * data.lost:
        raise _UnclearError("the gradient at the logits underflows in its dtype; use a loss scale")
    if int(data.z.isfinite().sum()) - 2 * count - 2 < (10 if data.coarse else 3):
        reason = f"{counted(count, 'row')} of {classes} classes are too few; use a larger batch"
        raise _UnclearError(reason)
    fit = _fitted(data.sample())
    rows = _compared(data, fit)
    if bool((rows.miss > 1).any()):
        return _not_fitted(data, fit, rows)
    _check_determined(fit.uncertainty)
    alpha, tolerance = fit.alpha, max(fit.uncertainty, SAME)
    if alpha < -tolerance:
        return Verification("neither", reason=f"the effective alpha is {alpha:.3f}")
    # The factors may be equal, those of a mean over each call, equal in each call, or for labels.
    call, one = data.call.squeeze(1), torch.zeros_like(rows.label)
    mean = rows._replace(factor=rows.factor + data.counts.squeeze(1).log())
    by_label = call * classes + rows.label
    ways = ((rows, one), (mean, one), (rows, call), (rows, by_label))
    if not any(equal := [_are_equal(found, groups) for found, groups in ways]):
        reason = "the factors of the rows differ, as with weights of examples, or in a loss that "
        reason += "is not a cross-entropy (a focal loss, or the paper's listing)"
        sizes, error = _sizes(data, rows)
        if None in equal[:2] and not data.coarse and bool((sizes.abs() <= error).any()):
            reason = ""  # as large as it should be
        elif None in equal:
            reason = "there are too few different rows to tell a cross-entropy from another loss"
        if reason:
            raise _UnclearError(f"each row fits alpha {alpha:.3f}, but {reason}")
    if abs(alpha - 1) > tolerance and all(abs(alpha - other) > tolerance for other in told):
        _check_size(data, max(alpha, 0.0), rows)
    return Verification(_verdict(alpha, tolerance), max(alpha, 0.0), fit.uncertainty)


def _are_equal(rows: _Compared, groups: Tensor) -> bool | None:
    """Whether the factors in each group are equal; None if that is no evidence.

    It is evidence among rows that differ in the probability of their label, on which the factors
    of other losses depend.
    """
    groups = groups.unique(return_inverse=True)[1]

    def largest(values: Tensor) -> Tensor:
        start = torch.full((int(groups.max()) + 1,), -math.inf).double()
        return start.scatter_reduce(0, groups, values, "amax")

    if bool((largest(rows.factor - rows.doubt) + largest(-rows.factor - rows.doubt) > 0).any()):
        return False
    sharp = rows.doubt < 0.1
    low, high = (largest((sign * rows.p).where(sharp, -math.inf)) for sign in (-1, 1))
    shown = high + low > 5 * largest(rows.doubt.where(sharp, 0.0))
    return True if 2 * int((shown[groups] & sharp).sum()) >= int(sharp.sum()) > 0 else None


def _sizes(data: _Data, rows: _Compared) -> tuple[Tensor, float]:
    """The binary logarithms of m relative to a sum and to means, and their uncertainty."""
    m = rows.factor.exp()
    mean = float(m.mean()) * float(data.counts[0])  # over the rows of a call, or of all calls
    sizes = torch.tensor([float(m[0]), mean, mean * float(data.call.max() + 1)])
    return sizes.log2(), 2 * float(rows.doubt.median())


def _check_size(data: _Data, alpha: float, rows: _Compared) -> None:
    """Refuse the size of the paper's listing, and of plain cross-entropy of scaled logits."""
    sizes, tolerance = _sizes(data, rows)
    scaled = sizes - math.log2(max(alpha, 1e-30))

    def usual(sizes: Tensor) -> bool:
        """Whether a size is a loss scale (a power of two) over a number of micro-batches."""
        exponents = sizes.unsqueeze(1) + torch.arange(1, 9).log2()
        return bool(((exponents - exponents.round()).abs() <= tolerance).any())

    is_one, is_alpha = (bool((x.abs() <= tolerance).any()) for x in (sizes, scaled))
    if is_alpha or (not is_one and usual(scaled)):
        raise _UnclearError(
            f"alpha {alpha:.3f} fits, but so does plain cross-entropy of logits that are scaled by "
            "it after this module; pass the module that returns the final logits as `head`"
        )
    if not is_one and not usual(sizes):
        raise _UnclearError(
            f"alpha {alpha:.3f} fits, but the gradient is {2 ** float(sizes[1]):.4g} times that of "
            "a mean over the rows, which is no usual loss scale (as with the paper's listing)"
        )


def _not_fitted(data: _Data, fit: _Fit, rows: _Compared) -> Verification:
    """The verdict on rows that no single alpha explains."""
    few = data.sample()
    clear = 1 - few.z.softmax(1).amax(1) > 1e3 * data.unit  # elsewhere p - 1 may round to 0
    total, size = few.g.sum(1)[clear].norm(), few.g.abs().sum(1)[clear].norm()
    if float(total) > (0.05 if data.coarse else 0.02) * float(size):
        reason = "the gradient at the logits does not sum to zero over the classes, as it does for "
        reason += "every softmax cross-entropy: this is another loss, or the logits are changed "
        reason += "after this module (then pass `head`, the module that computes the final logits)"
        return Verification("neither", reason=reason)
    plain = _compared(data, _Fit(1.0, 0.0)).miss <= 1
    if bool(plain.any()) and not bool(plain.all()):
        other = _fitted(data.part(~plain).sample())
        fits = _compared(data, other).miss <= 1
        if other.uncertainty <= WIDEST and bool((plain & ~fits).any() and (plain | fits).all()):
            number = f"{int(plain.sum()):,} of {counted(len(plain), 'row')}"
            reason = f"{number} are plain cross-entropy, the others PGT at alpha {other.alpha:.3f}"
            return Verification("neither", reason=reason)
    reason = "no alpha explains the gradient for labels that are class indices; pass `target`"
    if data.t is not None:
        reason = "no alpha explains the gradient for this target without class weights"
    if float(rows.miss.max()) * 16 * data.unit <= 4 * 2.0**-9:
        reason = f"the gradient is close to that of alpha {fit.alpha:.3f}, but deviates by more "
        reason += "than its dtype explains: the loss may be computed in 16 bits"
    raise _UnclearError(reason)


# The fit of alpha and smoothing -------------------------------------------------------------------


class _Fit(NamedTuple):
    alpha: float
    smoothing: float
    uncertainty: float = 0.0
    scatter: float = 0.0  # the mean squared residual, in rounding errors


class _Terms(NamedTuple):
    """``d = p' - t``, its derivatives, its rounding error in roundoffs, and t."""

    d: Tensor
    by_alpha: Tensor
    by_smoothing: Tensor
    size: Tensor
    t: Tensor


class _Compared(NamedTuple):
    """What a fit leaves of each row (n)."""

    miss: Tensor  # the largest residual, relative to what rounding explains
    factor: Tensor  # log m
    doubt: Tensor  # how uncertain that is
    label: Tensor
    p: Tensor  # the probability of the label


def _terms(data: _Data, fit: _Fit, q: Tensor) -> _Terms:
    z, classes = data.z, data.z.shape[1]
    t = (1 - fit.smoothing) * q + fit.smoothing / classes
    finite = z.isfinite()
    shifted = (z - z.amax(1, keepdim=True)).masked_fill_(~finite, 0.0)
    p = (fit.alpha * shifted).masked_fill_(~finite, -math.inf).softmax(1)
    by_alpha = p * (shifted - _dot(p, shifted))
    # exp(x) has a relative error of |x|. Sums over the classes, of exp(x) and of t, add to it.
    depth = z.logsumexp(1, keepdim=True) - z.amax(1, keepdim=True) - shifted
    sums = (classes**0.5 / 4 + fit.smoothing * classes / 64) * 2.0**-24 / data.unit
    size = p * (max(1.0, fit.alpha) * depth + 1 + 8 * sums) + t * (1 + sums)
    return _Terms(p - t, by_alpha, q - 1 / classes, size, t)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("ic,ic->i", a, b).unsqueeze(1)


def _factors(data: _Data, terms: _Terms) -> tuple[Tensor, Tensor]:
    """The factor m of each row by least squares, and the rounding errors of its entries."""
    g, d, error = data.g, terms.d, data.g
    m = g.abs().sum(1, keepdim=True) / d.abs().sum(1, keepdim=True).clamp(min=1e-300)
    for _ in range(3):
        error = (data.unit * m.abs()) * terms.size + data.lost
        x = d / error
        m = _dot(x, g / error) / _dot(x, x)
    return m, error


def _explained(data: _Data, fit: _Fit) -> tuple[_Terms, Tensor, Tensor]:
    """The terms, factors and errors, with the labels that fit best if the target is unknown."""
    z, g, q = data[:3]
    if q is None:
        lowest, label = g.min(1)
        q = one_hot(label, z.shape[1]).double()
        if bool((lowest >= 0.5 * g.clamp(max=0).sum(1)).any()):
            # With smoothing, the gradient of a confident row may be positive at its label.
            choices, misses = (q, one_hot(z.argmax(1), z.shape[1]).double()), []
            for choice in choices:
                terms = _terms(data, fit, choice)
                m, error = _factors(data, terms)
                miss = ((g - m * terms.d) / error).square().sum(1, keepdim=True)
                misses.append(miss.where(m > 0, math.inf))
            q = torch.where(misses[1] < misses[0], choices[1], q)
    terms = _terms(data, fit, q)
    return terms, *_factors(data, terms)


def _fitted(data: _Data) -> _Fit:
    """The best of several descents."""
    fits = []
    for start in ((1, 0), (0.3, 0), (1, 0.1), (0.3, 0.1), (3, 0), (1, 0.3), (3, 0.1)):
        fits.append(_descended(data, _Fit(*start)))
        if fits[-1].scatter < 4:
            break
    return min(fits, key=lambda fit: fit.scatter)


def _descended(data: _Data, fit: _Fit) -> _Fit:
    """Gauss-Newton steps for alpha and smoothing; linear least squares eliminates the factors."""
    for _ in range(40):
        terms, m, error = _explained(data, fit)
        error = error + data.unit * data.g.abs()  # bounds the residuals while alpha is far off
        d, g = terms.d / error, data.g / error
        norm = d.square().sum(1, keepdim=True)
        m = (d * g).sum(1, keepdim=True) / norm
        x = m * torch.stack([terms.by_alpha, terms.by_smoothing]) / error
        x = x - d * (x * d).sum(2, keepdim=True) / norm
        r = g - m * d
        normal = torch.einsum("kic,lic->kl", x, x)
        normal += torch.diag(torch.tensor([1e-9, SIGMAS**2]).double())  # e is about 0 to 0.1
        step = torch.linalg.solve(normal, torch.einsum("kic,ic->k", x, r)).tolist()
        alpha = fit.alpha + min(max(step[0], -0.5), 0.5)
        smoothing = min(max(fit.smoothing + step[1], 0.0), 0.9)
        change = abs(alpha - fit.alpha) + abs(smoothing - fit.smoothing)
        scatter = max(float(r.square().mean()), 0.01)
        sigma = (scatter * float(torch.linalg.inv(normal)[0, 0])) ** 0.5
        floor = max(data.unit, 1e-6 * (1 + abs(alpha)))
        fit = _Fit(alpha, smoothing, max(SIGMAS * sigma, floor), scatter)
        if change < 1e-9:
            break
    return fit


def _compared(data: _Data, fit: _Fit) -> _Compared:
    """All rows, in blocks."""
    found, size = [], max(1, BLOCK // data.z.shape[1])
    for start in range(0, len(data.z), size):
        block = data.part(slice(start, start + size))
        terms, m, error = _explained(block, fit)
        miss = ((block.g - m * terms.d).abs() / error).amax(1) / (4 if data.coarse else 16)
        m, precision = m.squeeze(1), (terms.d / error).norm(dim=1)
        doubt = 4 / (precision * m.abs()) + 4 * data.unit + 4 * fit.uncertainty
        doubt += 2.0**-24 * block.z.shape[1] ** 0.5
        p = (terms.t * block.z.softmax(1)).sum(1)
        factor, label = m.clamp(min=1e-300).log(), terms.t.argmax(1)
        found.append(_Compared(miss.where(m > 0, math.inf), factor, doubt, label, p))
    return _Compared(*map(torch.cat, zip(*found, strict=True)))


# Restoring the state that a step changes ---------------------------------------------------------


@contextmanager
def _restoring(model: nn.Module) -> Iterator[None]:
    """Restore model, optimizers and random state after the block."""
    undo: list[Callable[[], Any]] = []
    tensors: dict[int, Tensor] = {}
    stepped: set[Optimizer] = set()
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
            undo += [functools.partial(setattr, tensor, "grad", tensor.grad), _saved(tensor.grad)]

    def before(optimizer: Optimizer, *_: Any) -> None:
        if optimizer in stepped:
            return
        stepped.add(optimizer)
        for group in optimizer.param_groups:
            undo.extend(_saved(p) for p in group["params"] if id(p) not in tensors)
            kept = {key: value for key, value in group.items() if key not in SCHEDULED}
            undo.append(functools.partial(group.update, copy.deepcopy(kept)))
        state = {
            key: {name: _saved(value) for name, value in values.items()}
            for key, values in optimizer.state.items()
        }

        def restore() -> None:
            optimizer.state.clear()
            for key, values in state.items():
                optimizer.state[key] = {name: value() for name, value in values.items()}

        undo.append(restore)

    hook = register_optimizer_step_pre_hook(before)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    python = random.getstate()
    numpy = sys.modules["numpy"].random if "numpy" in sys.modules else None
    numbers = None if numpy is None else numpy.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        hook.remove()
        for action in reversed(undo):
            action()
        random.setstate(python)
        if numpy is not None:
            numpy.set_state(numbers)


def _saved(value: Any) -> Callable[[], Any]:
    """A function that returns `value` as it is now; a tensor is the same one, restored."""
    if not isinstance(value, Tensor):
        kept = copy.deepcopy(value)
        return lambda: kept
    kept = value.detach().clone()

    def restore() -> Tensor:
        # An unneeded copy would invalidate graphs that saved the tensor.
        if value.layout is not torch.strided or not torch.equal(value.detach(), kept):
            value.detach().copy_(kept)
        return value

    return restore
