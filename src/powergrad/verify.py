r"""`verify`: does this training step really use PowerGrad Transform?

The gradient at the logits must be a multiple of that of the losses of powergrad that were called.
Otherwise it must be ``g = m (p' - t)`` up to rounding, with ``p' = softmax(alpha z)`` and the
target ``t = (1 - e) q + e / C``, for the same alpha, smoothing e and factor m in all rows of a
call: in a focal loss, or in the paper's listing, only the factors are wrong.
"""

from __future__ import annotations

import copy
import math
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from powergrad.checks import Call, is_plain, shape_of
from powergrad.compat import tree_map
from powergrad.head import find_head, unwrap
from powergrad.loss import as_rows, loss_by_definition
from powergrad.transform import LISTENERS, TRACED, Notice

__all__ = ["StepWatcher", "Verification", "verify"]

Verdict = Literal["pgt", "plain", "neither", "cannot tell"]

STORED = 1 << 22  # logits that are compared per call; of more, a random sample of rows
FITTED = 1 << 16  # logits to which alpha is fitted first
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
        alpha: The effective alpha if the verdict is "pgt" or "plain" (the mean, if rows differ).
        uncertainty: How far `alpha` may be from the true value; None if it was not measured.
        rows: The number of rows of logits that were measured.
        rows_in_all: The number of rows that had a gradient.
        reason: Why the verdict is not "pgt" or "plain", or a remark.
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
    step: Callable[[], Any], model: nn.Module, head: nn.Module | str | None = None
) -> Verification:
    r"""Run one training step and measure the effective alpha from its gradient at the logits.

    `step` is called once. Afterwards weights, buffers, gradients, hooks and training mode of
    `model`, the state of each ``torch.optim`` optimizer that stepped, and the random state (torch,
    ``random``, numpy) are restored, even if `step` raises. This needs memory for a copy of them.
    Other state is not restored: data iterators, schedulers, a ``GradScaler``. Under data
    parallelism, call it on every rank; each rank reports on its own rows.

    Args:
        step: Runs one training step: forward pass, loss, ``backward()``, and optionally the
            optimizer.
        model: The network that `step` trains. If it is compiled, what ``torch.compile`` returned.
        head: The module whose outputs are the logits, or its name, if it cannot be found.

    Returns:
        What was measured; compare its ``verdict`` with the one that you expect.

    Raises:
        TypeError: If `step` or `model` is of another type.
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
    watcher = StepWatcher(model, head)
    find_head(unwrap(model), head)  # raises, where the watcher would answer "cannot tell"
    with _restoring(model), watcher:
        step()
    return watcher.result()


class StepWatcher:
    r"""Context manager that observes one training step without changing it.

    It is :func:`powergrad.verify` for a step that runs anyway. It never raises in the step: if the
    measurement fails, the verdict is "cannot tell".

    Args:
        model: The network.
        head: As in :func:`powergrad.verify`.

    Raises:
        TypeError: If `model` is not a module.
    """

    def __init__(self, model: nn.Module, head: nn.Module | str | None = None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"Expected `model` to be a module, but got {type(model).__name__}.")
        self._model, self._name = model, head
        self._reason = ""  # why nothing can be told
        self._notices: list[Notice] = []
        self._calls: tuple[list[_Logits], ...] = ([], [], [])  # of head, compiled model and loss
        self._undo: list[Callable[[], Any]] = []
        self._result = Verification("cannot tell", reason="the watched step has not ended yet")

    def __enter__(self) -> StepWatcher:
        self._guarded(self._attach)
        return self

    def __exit__(self, *exc: Any) -> None:
        while self._undo:
            self._undo.pop()()
        self._guarded(self._conclude)
        if self._reason:
            self._result = Verification("cannot tell", reason=self._reason)
        self._calls, self._notices = ([], [], []), []

    def result(self) -> Verification:
        """Return the verification of the step, after the block."""
        return self._result

    def _guarded(self, function: Callable[..., None], *args: Any) -> None:
        """Call `function`; an exception ends the watch instead of breaking the user's step."""
        if torch.compiler.is_compiling() or self._reason:
            return
        try:
            with torch.no_grad():
                function(*args)
        except Exception as error:
            failed = f"watching failed: {type(error).__name__}: {error}"
            self._reason = str(error) if isinstance(error, _UnclearError) else failed

    def _attach(self) -> None:
        self._head = find_head(unwrap(self._model), self._name)
        watched = [(self._head, self._calls[0])]
        for module in self._model.modules():  # compiled code ignores hooks on what is inside
            if "_orig_mod" in module._modules and self._head in set(module.modules()):
                watched.append((module, self._calls[1]))
        for module, calls in watched:
            hook = partial(self._guarded, self._on_output, calls)
            # As the first hook, it sees the gradient after any changes by other hooks.
            self._undo.append(module.register_forward_hook(hook, prepend=True).remove)
        listener = partial(self._guarded, self._on_loss)
        LISTENERS.append(listener)
        self._undo.append(partial(LISTENERS.remove, listener))

    def _on_output(self, calls: list[_Logits], _: nn.Module, args: Any, output: Any) -> None:
        logits = getattr(output, "logits", output)
        logits = logits.get("logits") if isinstance(logits, dict) else logits
        if isinstance(logits, Tensor) and logits.is_floating_point() and logits.dim():
            self._observe(logits, calls)
        elif calls is self._calls[0]:
            raise _UnclearError(f"the output of the head is a {type(output).__name__}, not logits")

    def _on_loss(self, notice: Notice) -> None:
        if not is_plain(notice.input):
            return
        self._notices.append(notice)
        logits, classes = notice.input, getattr(self._head, "out_features", None)
        fits = logits.dim() and classes in (None, logits.shape[min(1, logits.dim() - 1)])
        if notice.call is not None and logits.requires_grad and fits and not any(self._calls[:2]):
            self._observe(logits, self._calls[2])

    def _observe(self, logits: Tensor, calls: list[_Logits]) -> None:
        if not is_plain(logits):
            raise _UnclearError(
                f"the logits are a {type(logits).__name__}, or inside a transform of torch.func"
            )
        calls.append(seen := _Logits(logits.detach(), logits._version))
        if (node := logits.grad_fn) is None:
            return

        def on_gradient(grads: tuple[Tensor | None, ...]) -> None:
            if (grad := grads[number]) is not None:
                known = list(self._notices)
                self._guarded(seen.add, grad, known)
                self._notices = known  # without the losses that were called to compare with

        number, arrived = logits.output_nr, cast(Any, on_gradient)
        if "torch._dynamo" in sys.modules:  # it would compile what runs during a compiled step
            arrived = torch.compiler.disable(on_gradient)
        # This hook runs after all hooks of the tensor, which may alter the gradient.
        self._undo.append(node.register_prehook(arrived).remove)

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
                "pass the model that the step uses, as `torch.compile` returned it, or its `head`"
            )


class _UnclearError(Exception):
    """Why the verdict is "cannot tell"."""


def _verdict(alpha: float, tolerance: float = 0.0) -> Verdict:
    return "plain" if abs(alpha - 1) <= tolerance else "pgt"


# The logits of one call ---------------------------------------------------------------------------


@dataclass
class _Logits:
    """The logits of one call, and what is kept of them when their gradient arrives."""

    logits: Tensor
    version: int
    arrived: bool = False
    told: Verification | None = None  # by losses of powergrad, and confirmed
    count: int = 0  # rows with a gradient
    z: Any = None  # these rows (n, C), or a sample, on the CPU
    g: Any = None

    def add(self, grad: Tensor, notices: list[Notice]) -> None:
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
        dims = sorted({min(1, grad.dim() - 1), grad.dim() - 1})
        sums = [float(grad.sum(dim).norm() / grad.abs().sum(dim).norm()) for dim in dims]
        if len(sums) > 1 and max(sums) < 1e-3:  # the gradient sums to zero over the classes
            raise _UnclearError(f"logits of {shape_of(logits)} have two possible class dimensions")
        dim = dims[sums.index(min(sums))]
        z, g = (x.movedim(dim, -1).reshape(-1, x.shape[dim]) for x in (logits, grad))
        rows = (g != 0).any(1).nonzero().squeeze(1)
        self.count, limit = len(rows), max(8, STORED // z.shape[1])
        if limit < len(rows):  # with a generator of its own, to leave the user's alone
            order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
            rows = rows[order[:limit].sort().values.to(rows.device)]
        self.z, self.g = z[rows].cpu(), g[rows].cpu()
        known = [as_rows(notice.input, notice.call) for notice in notices if notice.call]
        calls = [
            _part(call, rows.cpu())
            for logits, call in known
            if logits.shape == z.shape and torch.equal(logits.to(z.dtype), z)
        ]
        self.told = _told(calls, self.z, self.g) if calls else None


def _part(call: Call, rows: Tensor) -> Call:
    """The call for some rows, on the CPU."""
    alpha, weight, tokens = torch.as_tensor(call.alpha).cpu(), call.weight, call.token_weight
    return call.replace(
        target=call.target.cpu()[rows],
        weight=None if weight is None else weight.cpu(),
        alpha=(alpha[rows] if alpha.numel() > 1 else alpha).double(),
        token_weight=None if tokens is None else tokens.cpu()[rows],
    )


def _told(calls: list[Call], z: Tensor, g: Tensor) -> Verification | None:
    """The verdict, if g is a sum of multiples of the gradients of these losses of z."""
    own, more = (
        torch.stack([_gradient(z, call.replace(alpha=call.alpha + off)) for call in calls], 1)
        for off in (0, WIDEST)
    )
    alphas, unit = [call.alpha.reshape(-1) for call in calls], _unit(z, g)  # pyright: ignore
    depth = -z.double().log_softmax(1).clamp(min=-1e4).flatten()
    error = unit * (1 + max(float(a.max()) for a in alphas) * depth) * float(g.abs().max())
    fit = _fit(own, (more - own) / WIDEST, g.double().flatten(), error, unit)
    m, uncertainty = fit.factors, fit.uncertainty
    fits = fit.residual <= _roundoffs(unit) and abs(fit.step) <= uncertainty
    if not fits or float(m.min()) < -1e-3 * float(m.max()):
        return None
    used = [alpha for alpha, factor in zip(alphas, m, strict=True) if factor > 16 * unit * m.max()]
    alpha = torch.cat(used)
    low, high = float(alpha.min()), float(alpha.max())
    _check_determined(math.inf if 0 < abs(low - 1) < uncertainty else uncertainty / 5)
    span = f"alphas from {low:.3f} to {high:.3f}" if low < high else ""
    if low < high and (len(used) > 1 or bool((alpha == 1).any())):
        return Verification("neither", reason=f"losses at {span} were added or mixed")
    return Verification(_verdict(low), float(alpha.mean()), uncertainty, reason=span)


def _gradient(z: Tensor, call: Call) -> Tensor:
    """The gradient of a loss of powergrad, by its definition in float64."""
    with torch.enable_grad():
        x = z.detach().double().requires_grad_()
        return torch.autograd.grad(loss_by_definition(x, call).sum(), x)[0].flatten()


class _Fit(NamedTuple):
    factors: Tensor
    residual: float  # the largest, in rounding errors
    step: float  # by which alpha is off
    uncertainty: float  # of alpha


def _fit(x: Tensor, slopes: Tensor, wanted: Tensor, error: Tensor, unit: float) -> _Fit:
    """The factors of the columns of x that give what is wanted, and how far alpha is off.

    `slopes` are the derivatives of the columns by alpha, `error` is a rounding error per element.
    """
    x, slopes, wanted = (part / error[:, None] for part in (x, slopes, wanted[:, None]))
    scale = x.norm(dim=0).clamp(min=1e-300)
    m = torch.linalg.lstsq(x / scale, wanted, driver="gelsd").solution / scale[:, None]
    r, slope = wanted - x @ m, slopes @ m
    slope -= x / scale @ torch.linalg.lstsq(x / scale, slope, driver="gelsd").solution
    steepness = slope.square().sum().clamp(min=1e-300)
    step, scatter = float((slope * r).sum() / steepness), float(r.square().mean().clamp(min=0.01))
    uncertainty = max(SIGMAS * (scatter / float(steepness)) ** 0.5, unit, 1e-6)
    return _Fit(m.flatten(), float(r.abs().max()), step, uncertainty)


def _unit(*tensors: Tensor) -> float:
    """The roundoff of tensors, which are not trusted further than float32."""
    return max(2.0**-24, *(torch.finfo(tensor.dtype).eps / 2 for tensor in tensors))


def _roundoffs(unit: float) -> int:
    """How many roundoffs a residual may have: fewer in 16 bits, where only one or two are made."""
    return 4 if unit > COARSE else 16


def _check_determined(uncertainty: float) -> None:
    if not uncertainty <= WIDEST:
        raise _UnclearError(
            "the rows do not determine alpha: their logits differ too little for the precision of "
            "the gradient; measure later in training, in float32, or on a larger batch"
        )


# Other losses -------------------------------------------------------------------------------------


def _measured(calls: list[_Logits], notices: list[Notice]) -> Verification:
    if not calls:
        raise _UnclearError("the gradient at the logits is zero")
    fit = partial(_compared, number=len(calls), notices=notices)
    found = [fit(call) if call.told is None else call.told for call in calls]
    total = sum(call.count for call in calls)
    worst = max(found, key=lambda one: (one.alpha is None, one.uncertainty or 0.0))
    if worst.alpha is not None:
        alphas = [one.alpha or 0.0 for one in found]
        if max(alphas) - min(alphas) > max(2 * (worst.uncertainty or 0.0), SAME):
            worst = Verification("neither", reason="the calls of the head have different losses")
        evident = sum(c.count for c in calls if c.told is not None or _is_evident(c))
        if worst.alpha is not None and 2 * evident < total:
            raise _UnclearError(
                f"each row fits alpha {worst.alpha:.3f}, but too few rows of a call of the head "
                "differ, so this may be another loss"
            )
    return replace(worst, rows=sum(len(call.z) for call in calls), rows_in_all=total)


def _labels(z: Tensor, g: Tensor) -> Tensor:
    """The labels that the gradient shows; with smoothing, a confident row may have none below 0."""
    lowest, label = g.min(1)
    return label.where(lowest < 0.5 * g.clamp(max=0).sum(1), z.argmax(1))


def _is_evident(seen: _Logits) -> bool:
    """Whether the rows would show that their factors depend on the probability of the label."""
    p = seen.z.double().softmax(1).gather(1, _labels(seen.z, seen.g)[:, None])
    p, unit = p[p < 0.5], _unit(seen.z, seen.g)
    enough = 10 * _roundoffs(unit) * unit * (1 + _sums(seen.z, unit))
    return len(p) > 1 and float(p.max() - p.min()) > enough


def _sums(z: Tensor, unit: float) -> float:
    """The roundoffs that a sum over the classes makes, which is in float32 or wider."""
    return z.shape[1] ** 0.5 / 4 * 2.0**-24 / unit


def _compared(seen: _Logits, number: int, notices: list[Notice]) -> Verification:
    """The verdict on one of `number` calls, if the losses of powergrad do not explain it."""
    if TRACED or any(notice.special for notice in notices):
        raise _UnclearError(
            "the gradient is not that of the losses of powergrad that were called or traced, with "
            "`softcap`, `logit_scale`, `z_loss`, one alpha per row, split classes, or for two"
        )
    used, unit = (seen.g != 0).any(0), _unit(seen.z, seen.g)  # other classes pad the head
    z, g = seen.z[:, used].double(), seen.g[:, used].double()
    count, classes = z.shape
    if int(z.isfinite().sum()) - 2 * count - 2 < (10 if unit > COARSE else 3):
        raise _UnclearError(f"{counted(count, 'row')} of {classes} classes are too few")
    # What is lost below the smallest numbers, and the least error that makes a difference.
    lost = torch.finfo(seen.g.dtype).tiny * 2 * unit + 1e-6 * unit * float(g.abs().max())

    def refined(rows: Any, alpha: float, steps: int) -> tuple[float, _Fit]:
        while True:
            fit = _fit(*_terms(z[rows], g[rows], alpha, unit, lost), unit)
            alpha, steps = alpha + min(max(fit.step, -0.5), 0.5), steps - 1
            if steps == 0 or abs(fit.step) < 1e-9:
                return alpha, fit

    few = torch.linspace(0, count - 1, max(4, FITTED // classes)).long().unique()
    starts = [refined(few, start, 40) for start in (1.0, 0.3, 3.0)]
    alpha, _ = min(starts, key=lambda pair: pair[1].residual)
    alpha, fit = refined(slice(None), alpha, 3)
    m, part = fit.factors.tolist()
    if fit.residual > _roundoffs(unit):
        return _not_fitted(z, g, unit)
    _check_determined(fit.uncertainty)
    if m <= 0 or not -0.01 <= part / m <= 0.9:
        return _not_fitted(z, g, unit)
    tolerance = max(fit.uncertainty, SAME)
    if alpha < -tolerance:
        return Verification("neither", reason=f"the effective alpha is {alpha:.3f}")
    told = [float(torch.as_tensor(notice.alpha)) for notice in notices]
    if abs(alpha - 1) > tolerance and all(abs(alpha - other) > tolerance for other in told):
        sizes = m * torch.tensor([1.0, seen.count, seen.count * number])
        if told or not _is_usual(sizes, alpha, 8 * (unit + fit.uncertainty)):
            raise _UnclearError(
                f"alpha {alpha:.3f} fits, but not the size of the gradient: the logits may be "
                "scaled after this module (then pass the last one as `head`), or the loss"
            )
    return Verification(_verdict(alpha, tolerance), max(alpha, 0.0), fit.uncertainty)


def _terms(
    z: Tensor, g: Tensor, alpha: float, unit: float, lost: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `_fit` takes for ``g = m (p' - q) + m e (q - 1 / C)`` with the labels q."""
    q, depth = one_hot(_labels(z, g), z.shape[1]).double(), -z.log_softmax(1)
    masked, sums = depth == math.inf, _sums(z, unit)
    depth = depth.masked_fill(masked, 0)
    p = (-alpha * depth).masked_fill(masked, -math.inf).softmax(1)
    m = float(g.abs().sum() / (p - q).abs().sum().clamp(min=1e-300))
    # exp(x) has a relative error of |x|, and the sum over the classes adds to it.
    error = g.abs() * (1 + sums) + m * p * (1 + max(1.0, alpha) * depth + 8 * sums)
    by_alpha = p * ((p * depth).sum(1, keepdim=True) - depth)
    x = torch.stack([p - q, q - 1 / z.shape[1]], 2).flatten(0, 1)
    slopes = torch.stack([by_alpha, torch.zeros_like(p)], 2).flatten(0, 1)
    return x, slopes, g.flatten(), (unit * error + lost).flatten()


def _is_usual(sizes: Tensor, alpha: float, tolerance: float) -> bool:
    """Whether the size is that of a sum or a mean, times a loss scale (a power of two).

    Plain cross-entropy of logits that are scaled by alpha has alpha times such a size.
    """

    def near(distances: Tensor) -> bool:
        return bool((distances.abs() <= tolerance).any())

    sizes = sizes.log2()
    scaled = sizes - math.log2(max(alpha, 1e-30))
    if near(sizes):
        return not near(scaled)
    parts = scaled.unsqueeze(1) + torch.arange(1, 9).log2()  # of so many micro-batches
    return near(sizes - sizes.round()) and not near(parts - parts.round())


def _not_fitted(z: Tensor, g: Tensor, unit: float) -> Verification:
    """The verdict on rows that no alpha and factor explain."""
    clear = 1 - z.softmax(1).amax(1) > 1e3 * unit  # elsewhere p - 1 may round to 0
    total, size = g.sum(1)[clear].norm(), g.abs().sum(1)[clear].norm()
    if float(total) > (0.05 if unit > COARSE else 0.02) * float(size):
        reason = "the gradient does not sum to zero over the classes: this is no cross-entropy, or "
        reason += "the logits are changed after this module (then pass the last one as `head`)"
        return Verification("neither", reason=reason)
    raise _UnclearError(
        "no alpha explains the gradient of all rows: this may be a loss with weights or soft "
        "targets, several losses, or another loss (as a focal loss, or the paper's listing)"
    )


# Restoring the state that a step changes ----------------------------------------------------------


@contextmanager
def _restoring(model: nn.Module) -> Iterator[None]:
    """Restore model, optimizers and random state after the block; tensors stay the same objects."""
    clones: dict[Tensor, Tensor] = {}
    undo: list[Callable[[], Any]] = [partial(random.setstate, random.getstate())]
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        undo.append(partial(numpy.set_state, numpy.get_state()))
    stepped: set[Optimizer] = set()

    def keep(value: Any) -> Any:
        """Remember the values and the gradient of a tensor; copy anything else."""
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        if value not in clones:
            clones[value] = value.detach().clone()
            if value.is_leaf:
                undo.append(partial(setattr, value, "grad", keep(value.grad)))
        return value

    def keep_items(items: dict[Any, Any]) -> None:
        undo.extend([items.clear, partial(items.update, tree_map(keep, items))])

    def before(optimizer: Optimizer, *_: Any) -> None:
        if optimizer in stepped:
            return
        stepped.add(optimizer)
        keep_items(optimizer.state)
        for group in optimizer.param_groups:
            tree_map(keep, group["params"])
            kept = {key: value for key, value in group.items() if key not in SCHEDULED}
            undo.append(partial(group.update, tree_map(keep, kept)))

    for module in model.modules():
        undo.append(partial(setattr, module, "training", module.training))
        keep_items(module._parameters)
        keep_items(module._buffers)
    hook = register_optimizer_step_pre_hook(before)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        hook.remove()
        for action in undo:
            action()
        for tensor, clone in clones.items():
            # An unneeded copy would invalidate graphs that saved the tensor.
            if tensor.layout is not torch.strided or not torch.equal(tensor.detach(), clone):
                tensor.detach().copy_(clone)
