r"""Losses of logits whose classes are split over processes, as in vocabulary-parallel training.

The steps are those of `powergrad.rows`, with one exchange between them. Each process reduces its
classes to a few numbers per row, relative to its own largest logit m:

    sum exp(z - m)
    sum exp(alpha (z - m))      without the label: 1 - p'_y would be lost where p'_y rounds to 1
    z_y                         in the process that has the label; elsewhere -inf
    sum u (z - m), sum u        u: class weights, with smoothing; or the soft target

One all-gather shows all processes the numbers of all. Each adds them in the same order, and so gets
the same bits. The backward pass exchanges nothing.

An all-gather of unequal sizes is no error with gloo: one process is aborted, another goes on with
wrong numbers. So a message of fixed size goes first (`agreement`). What would be costly to compare
there (labels, alpha, weights of rows) is compared in the exchange.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from powergrad.checks import Call, check_call, check_floating, check_labels, shape_of
from powergrad.linear import InBlocks, checked_head, refuse_second_derivatives
from powergrad.loss import LossOptions, as_rows, call_for_rows, gated, in_dtype
from powergrad.rows import (
    BLOCK,
    Coefficients,
    RowStatistics,
    coefficients,
    column,
    mapped,
    power,
    reduced,
    target_mass,
    write,
)
from powergrad.transform import OF_DTENSORS, tell

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import Unpack

__all__ = ["cross_entropy"]


# What processes tell each other -------------------------------------------------------------------


def gathered(mine: Tensor, group: Any) -> Tensor:
    """The tensors of all processes of `group`, in a new first dimension."""
    if group is None:
        return mine.unsqueeze(0)
    out = mine.new_empty(dist.get_world_size(group), *mine.shape)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before 2.13
    gather(out.flatten(), mine.flatten(), group=group)
    return out


_calls: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


@contextmanager
def agreement(split: Split, device: torch.device, always: bool = False) -> Iterator[dict[str, Any]]:
    """Raise in every process if the block raises in one, or if processes disagree.

    The block fills the dictionary with what must agree; "rows" only where rows are the same. On an
    accelerator, where reading an answer means to wait, processes are asked at calls 1, 2, 4, 8, ...
    of a group, or always, if the environment says so.
    """
    facts: dict[str, Any] = {"classes": split.total}
    problem: Exception | None = None
    try:
        yield facts
    except Exception as error:
        problem = error
    always = always or device.type == "cpu" or os.environ.get("POWERGRAD_CHECK_PROCESSES") == "1"
    for group in (split.group, *split.row_groups):
        if group is not None:
            _calls[group] = calls = _calls.get(group, 0) + 1
            if always or not calls & (calls - 1):
                of_rows = group is split.group
                told = facts if of_rows else {**facts, "rows": "any"}
                crc = zlib.crc32(repr(told).encode())
                message = (problem is not None, crc, split.first, split.size)
                table = gathered(torch.tensor(message, device=device), group).tolist()
                problem = problem or _disagreement(table, told, of_rows)
    if problem is not None:
        raise problem


def _disagreement(table: list[list[int]], facts: Any, parts_of_all: bool) -> Exception | None:
    """The error that the messages of a group amount to."""
    failed, crcs, firsts, sizes = zip(*table, strict=True)
    if any(failed):
        rank = failed.index(1)
        return RuntimeError(f"The arguments of the loss raised an error on rank {rank}.")
    if len(set(crcs)) > 1:
        named = ", ".join(f"{name} {value}" for name, value in facts.items())
        return ValueError(
            f"Expected every process of the group to pass the same {', '.join(facts)}, but they "
            f"differ; here: {named}."
        )
    total = facts["classes"]
    parts = sorted((first, first + n) for first, n in zip(firsts, sizes, strict=True) if n)
    if parts_of_all and [0, *(end for _, end in parts)] != [*(at for at, _ in parts), total]:
        named = ", ".join(f"[{first}, {end})" for first, end in parts)
        return ValueError(f"Expected parts that are all {total} classes, but got {named}.")
    return None


def _options(call: Call) -> tuple[Any, ...]:
    given = [value is not None for value in (call.weight, call.gate, call.token_weight)]
    return (call.target.dtype, *call[3:10], *given)


ALIKE = ("alpha", "weight", "label", "weight of the label")  # in all processes, for each row


def check_equal(parts: dict[str, Tensor]) -> Tensor:
    """Whether processes differ in what is `ALIKE`; where that can be read, it raises."""
    alike = torch.stack([parts[name] for name in ALIKE if name in parts])
    # The weight of a row has the divisor of a mean, a sum that processes may round differently.
    differ = ~torch.isclose(alike, alike[:, :1], 1e-6, 0.0, equal_nan=True).all()
    if differ.is_cpu and bool(differ):
        raise ValueError(
            "Expected every process of the group to pass the same labels, alpha and weights, but "
            "they differ."
        )
    return differ


def _exchange(mine: dict[str, Tensor], alpha: float | Tensor, group: Any) -> dict[str, Tensor]:
    """The columns of all processes, and those of all classes that follow from them.

    "below" is how far the largest logits of the processes are below that of all.
    """
    columns = gathered(torch.stack([x.to(mine["top"]) for x in mine.values()]), group).unbind(1)
    parts = dict(zip(mine, columns, strict=True))
    parts["all top"] = parts["top"].amax(0).masked_fill(check_equal(parts), math.nan)
    parts["below"] = below = parts["top"] - parts["all top"]
    parts["all p"] = (parts["p"] * below.exp()).sum(0)
    parts["all e"] = (parts["e"] * (alpha * below).exp()).sum(0).to(below)
    return parts


# Statistics, exchange, coefficients, gradient -----------------------------------------------------


def _blocks(logits: Tensor) -> list[slice]:
    """The rows in blocks that stay in the cache; at least one block."""
    size = max(1, BLOCK // max(1, logits.shape[1]))
    return [slice(start, start + size) for start in range(0, max(1, len(logits)), size)]


def _below_top(z: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row, finite; and the logits below it, behind them a masked class.

    It stands for the labels of other processes, and for all classes of an empty part.
    """
    z = F.pad(z, (0, 1), value=-math.inf)
    top = z.amax(1, keepdim=True).clamp(min=torch.finfo(z.dtype).min)
    return top, z.sub_(top)


def _weight_of(labels: Tensor, call: Call) -> float | Tensor:
    return 1.0 if call.weight is None else call.weight[labels].unsqueeze(1)


class Split(NamedTuple):
    """Which classes this process has, and with whom it shares rows and means."""

    group: Any  # of the processes that have the classes of the same rows; None: all are here
    first: int
    size: int
    total: int
    row_groups: tuple[Any, ...] = ()  # of those that have further rows of the same mean

    @classmethod
    def even(cls, group: Any, place: int, total: int, row_groups: tuple[Any, ...] = ()) -> Split:
        """The part of the process in this place, where classes are split as by `torch.chunk`."""
        largest = cls(group, 0, 0, total).largest
        first = min(total, largest * place)
        return cls(group, first, min(largest, total - first), total, row_groups)

    @property
    def largest(self) -> int:
        """The number of classes of the largest part, where they are split evenly."""
        return -(-self.total // (1 if self.group is None else dist.get_world_size(self.group)))

    def sum_over_rows(self, number: Tensor) -> Tensor:
        number = number.clone()
        for group in self.row_groups:
            dist.all_reduce(number, group=group)
        return number

    def exchange(
        self, logits: Tensor, call: Call, block: Coefficients, stats: bool = False
    ) -> tuple[Tensor, RowStatistics | None]:
        """What :meth:`gradient` needs to know of all classes, and perhaps the statistics.

        That is, for a block of rows and g = 1: the loss, the largest logit, the factor of e, and
        the gradient at the label (4, N).
        """
        wide, found = torch.promote_types(logits.dtype, torch.float32), []
        for rows in _blocks(logits):
            z = mapped(logits[rows].to(wide), call)
            found.append(self._statistics(z, call, block.of(rows), stats))
        mine = {name: torch.cat([columns[name] for columns in found]) for name in found[0]}
        alpha, label = column(block.alpha, mine["top"]), block.labels
        alike = {"alpha": alpha, "weight": block.g}
        if not call.soft():
            alike |= {"label": label.unsqueeze(1), "weight of the label": _weight_of(label, call)}
            outside = ((label < 0) | (label >= self.total)).any()
            mine["top"] = mine["top"].masked_fill(outside, math.nan)
        mine |= {name: torch.zeros_like(mine["top"]) + value for name, value in alike.items()}
        parts = _exchange(mine, alpha, self.group)
        return self._kept(parts, call, block), _row_statistics(parts, call) if stats else None

    def gradient(
        self, kept: Tensor, z: Tensor, call: Call, block: Coefficients, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The losses, and the gradients of the classes of this process: for `rows.write`."""
        g, (top, scale, at_label) = block.g, kept[1:].unsqueeze(2)
        e = power(torch.sub(z, top, out=out), column(block.alpha, z)).mul_(scale * g)
        weight = self._own_weight(call, e)
        if call.soft():
            return kept[0], e.sub_(target_mass(block.labels.to(e), call, self.total, weight) * g)
        if call.label_smoothing:
            e.sub_(g * (call.label_smoothing / self.total) * (1.0 if weight is None else weight))
        if self.size:
            at = self._at(block.labels)
            here, at = at < self.size, at.clamp(max=self.size - 1)
            e.scatter_(1, at, torch.where(here, (at_label * g).to(e), e.gather(1, at)))
        return kept[0], e

    def _at(self, labels: Tensor) -> Tensor:
        """The labels among the classes of this process, as a column; or the place behind them."""
        at = labels.unsqueeze(1) - self.first
        return at.where((at >= 0) & (at < self.size), self.size)

    def _own_weight(self, call: Call, like: Tensor) -> Tensor | None:
        weight = call.weight
        return None if weight is None else weight[self.first : self.first + self.size].to(like)

    def _statistics(
        self, z: Tensor, call: Call, block: Coefficients, stats: bool
    ) -> dict[str, Tensor]:
        """What this process tells of rows, as columns; t is the target, weighted and smoothed."""
        weight, (top, d) = self._own_weight(call, z), _below_top(z)
        p, own = d.exp(), d[:, : self.size]
        found, sums = {"top": top}, {"p": p}
        if stats:
            found["class"] = self.first + d.argmax(1, keepdim=True)
            sums["entropy"] = torch.special.entr(p)
        if call.soft():
            q = block.labels.to(z)
            t = target_mass(q, call, self.total, weight)
            sums |= {"t": t, "t d": t * own}
            if stats:
                found["q"], at = F.pad(q, (0, 1), value=-1.0).max(1, keepdim=True)
                found["class of q"] = self.first + at
                sums |= {"sum q": q, "q p": q * p[:, : self.size], "q d": q * own}
        else:
            at, eps = self._at(block.labels), call.label_smoothing
            here, found["own"] = at < self.size, d.gather(1, at)
            found["t"] = here.to(z) * (1 - eps) * _weight_of(block.labels, call)
            found["t d"] = torch.where(here, found["t"] * found["own"], 0)
            if eps:
                u = (z.new_ones(self.size) if weight is None else weight) * (eps / self.total)
                found["t"] = found["t"] + u.sum()
                found["t d"] = found["t d"] + (u * own).sum(1, keepdim=True)
            d.scatter_(1, at, -math.inf)
        sums["e"] = power(d, column(block.alpha, d))
        return found | {name: values.sum(1, keepdim=True) for name, values in sums.items()}

    def _kept(self, parts: dict[str, Tensor], call: Call, block: Coefficients) -> Tensor:
        """Losses and coefficients, from the columns of all processes.

        The gradient at the label is computed as in `rows.label_coefficients`.
        """
        top, below, rest = parts["all top"], parts["below"], parts["all e"]
        alpha, log_sum, mass = column(block.alpha, top), parts["all p"].log(), parts["t"].sum(0)
        losses = log_sum * mass - (parts["t d"] + parts["t"] * below).sum(0)
        own = at_label = extra = torch.zeros_like(top)
        if not call.soft():
            d = (parts["own"] + below).amax(0)
            own = (alpha * d).exp().to(top).masked_fill(d == -math.inf, 0)
        e = own + rest
        if call.z_loss:
            losses = losses + block.z_loss * (top + log_sum).square()
            extra = 2 * block.z_loss * (alpha * top + e.log())
        scale = (mass + extra) / e
        if not call.soft():
            t = parts["weight of the label"][0]
            t = t * (1 - call.label_smoothing) + t * (call.label_smoothing / self.total)
            precise = (extra * own - mass * rest) / e + (mass - t)
            at_label = torch.where(own < rest, scale * own - t, precise)
        return torch.cat([x.to(top) for x in (losses, top, scale, at_label)], 1).t()


def _row_statistics(parts: dict[str, Tensor], call: Call) -> RowStatistics:
    """The statistics of rows, from the columns of all processes."""

    def class_of_largest(values: str, classes: str) -> Tensor:
        return parts[classes].gather(0, parts[values].argmax(0, keepdim=True))[0].long()

    top, below, p = parts["all top"], parts["below"], parts["all p"]
    entropy = ((parts["entropy"] - parts["p"] * below) * below.exp()).sum(0)
    found = {"lse": top + p.log(), "entropy": p.log() + entropy / p}
    found["prediction"] = class_of_largest("top", "class")
    if call.soft():
        q_d = (parts["q d"] + parts["sum q"] * below).sum(0)
        found["loss"] = p.log() * parts["sum q"].sum(0) - q_d
        found["p_target"] = (parts["q p"] * below.exp()).sum(0) / p
        found["correct"] = found["prediction"] == class_of_largest("q", "class of q")
        found["counted"] = torch.ones_like(found["correct"])
    else:
        counted, loss = call.target != call.ignore_index, p.log() - (parts["own"] + below).amax(0)
        found["loss"] = loss.masked_fill(~counted.unsqueeze(1), 0)
    rows = RowStatistics(top.new_empty(0), call)
    vars(rows).update({name: value.squeeze(1) for name, value in found.items()})
    return rows


# The loss -----------------------------------------------------------------------------------------


def _loss_of_rows(
    logits: Tensor, call: Call, split: Split, stats: bool
) -> tuple[Tensor, RowStatistics | None]:
    """The loss of rows of logits, checked, and perhaps their statistics."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    common = coefficients(call, wide, False, split.sum_over_rows)
    with torch.no_grad():
        stats = stats or call.gate is not None
        kept, rows = split.exchange(logits, call, common, stats)
    losses = _Losses.apply(logits, kept, call.replace(gate=None), common, split)
    if common.ignored is not None:
        losses = losses.masked_fill(common.ignored, 0)
    losses = losses * (common.g.squeeze(1) if isinstance(common.g, Tensor) else common.g)
    if call.gate is not None:
        losses = losses * gated(call.replace(token_weight=None), rows).to(wide)  # pyright: ignore
    return reduced(losses, call, common), rows


class _Losses(torch.autograd.Function):
    """The losses of rows for g = 1; their gradients need no exchange."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, kept: Tensor, call: Call, common: Any, split: Any) -> Any:
        tensors, ctx.options = call.replace(target=common.labels, alpha=common.alpha).split()
        ctx.save_for_backward(logits, kept, *tensors)
        ctx.split = split
        return kept[0].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        logits, kept, *tensors = ctx.saved_tensors
        call = Call.joined(tensors, ctx.options)
        common = Coefficients(call.target, call.alpha, grads[0].unsqueeze(1), None, 0.0, False)
        gradient = logits.new_empty(logits.shape)
        for part in _blocks(logits):
            compute = partial(ctx.split.gradient, kept[:, part])
            write(logits[part], call, common, part, gradient[part], compute=compute)
        return gradient, *[None] * 4


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    alpha: float | Tensor,
    classes: int,
    first_class: int | None = None,
    group: dist.ProcessGroup | None = None,
    return_stats: bool = False,
    **options: Unpack[LossOptions],
) -> Any:
    r""":func:`powergrad.cross_entropy` of logits whose classes are split over processes.

    Each process of ``group`` has the logits of some classes, perhaps none, for the same rows. All
    call this function, get the same value, and differentiate it with respect to their own logits.
    The forward pass exchanges a few numbers per row, the backward pass nothing.

    On CPU, the processes compare their arguments at every call; on accelerators, at calls 1, 2, 4,
    8, ... of a group, or at every call if ``POWERGRAD_CHECK_PROCESSES=1`` is in the environment.
    Labels, alpha and weights that differ are an error on CPU, and make the loss NaN elsewhere.

    Args:
        input: The logits of this process's classes, of shape (C_r), (N, C_r) or (N, C_r, d1, ...).
        target: Class indices; or the probabilities of this process's classes.
        weight: One weight for each of all classes, of shape (classes).
        alpha: As in :func:`powergrad.cross_entropy`.
        classes: The number of all classes.
        first_class: The first class of this process. By default, the classes are split as
            ``torch.chunk`` splits them: ``ceil(classes / processes)`` to each, in order of rank.
        group: The processes; by default all.
        return_stats: As in :func:`powergrad.cross_entropy`; they are those of all classes.
        **options: As in :func:`powergrad.cross_entropy`.

    Returns:
        What :func:`powergrad.cross_entropy` returns.

    Raises:
        ValueError: If an argument is not as described above, if processes disagree, or if this
            process is not in ``group``.
        TypeError: If a dtype is not as described above.
        RuntimeError: If another process raised an error; and at second derivatives.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> logits = torch.tensor([[2.0, 0.0, -1.0]], requires_grad=True)
        >>> cross_entropy(logits, torch.tensor([1]), alpha=0.25, classes=3).backward()
        >>> logits.grad
        tensor([[ 0.4810, -0.7082,  0.2272]])
        >>> dist.destroy_process_group()
    """
    if not dist.is_initialized() or dist.get_rank(group) < 0:
        raise ValueError("Expected this process to be in `group`, after `init_process_group`.")
    group = dist.group.WORLD if group is None else group
    shape, device = getattr(input, "shape", ()), getattr(input, "device", torch.device("cpu"))
    split = Split.even(group, dist.get_rank(group), classes)._replace(
        size=(*shape, 0)[len(shape) > 1]
    )
    split = split if first_class is None else split._replace(first=first_class)
    with agreement(split, device) as facts:
        check_floating(input, "input")
        call = _checked(input, Call(target, weight, alpha, **options), split)
        rows, call = as_rows(input, call)
        facts.update(function="cross_entropy", dtype=input.dtype, rows=len(rows))
        facts.update(options=(*_options(call), return_stats))
    tell("powergrad.parallel.cross_entropy", input, alpha)
    loss, found = _loss_of_rows(rows, call, split, return_stats)
    positions = (*input.shape[: input.dim() > 1], *input.shape[2:])
    loss = in_dtype(loss.reshape(positions) if call.reduction == "none" else loss, input, call)
    return (loss, found.reshape(positions)) if return_stats and found is not None else loss


def _checked(input: Tensor, call: Call, split: Split) -> Call:
    """The checked call of a part of the logits."""
    shape, given = list(shape_of(input)), call.target
    class_dim = int(len(shape) > 1)
    shape[class_dim : class_dim + 1] = [split.total] if shape else []
    whole = input.new_empty(()).expand(shape)
    soft = isinstance(given, Tensor) and call.soft() and given.shape == input.shape
    _, call = check_call(whole, call.replace(target=whole.to(given) if soft else given), class_dim)
    return _checked_constants(call.replace(target=given) if soft else call, split.total)


def _checked_constants(call: Call, total: int) -> Call:
    for name in ("target", "weight", "token_weight"):
        value = getattr(call, name)
        if value is not None and value.requires_grad:
            raise ValueError(f"Expected `{name}` not to require grad where classes are split.")
    check_labels(call.target, total, call.ignore_index)
    return call


# DTensors -----------------------------------------------------------------------------------------


class Layout:
    """How logits, of which perhaps only the shape exists, lie on a mesh of processes."""

    def __init__(self, mesh: Any, placements: Sequence[Any], class_dim: int, shape: Any) -> None:
        from torch.distributed.tensor import Replicate, Shard

        self.mesh, self.class_dim, self.shape = mesh, class_dim, tuple(shape)
        self.everywhere = [Replicate()] * mesh.ndim
        self.placements = [Replicate() if p.is_partial() else p for p in placements]
        across = [i for i, p in enumerate(self.placements) if p.is_shard(class_dim)]
        if len(across) > 1 or not all(type(p) in (Replicate, Shard) for p in self.placements):
            raise ValueError(
                "Expected the placements Shard or Replicate, and the classes split over one "
                f"dimension of the mesh, but got {tuple(placements)}: gather them over another, by "
                "`redistribute`."
            )
        if mesh.get_coordinate() is None:
            raise ValueError("Expected this process to be in the mesh of the DTensor.")
        # Of what has the shape of the logits without the classes.
        self.positions = [
            Shard(p.dim - (p.dim > class_dim)) if p.is_shard() and i not in across else Replicate()
            for i, p in enumerate(self.placements)
        ]
        of_rows = tuple(mesh.get_group(i) for i, p in enumerate(self.positions) if p.is_shard())
        group, place = None, 0
        if across:
            group, place = mesh.get_group(across[0]), mesh.get_local_rank(across[0])
        self.split = Split.even(group, place, self.shape[class_dim], of_rows)

    def local(self, value: Any, placements: Sequence[Any], of_gradient: Any = None) -> Any:
        """This process's part of a tensor, which is the same in all processes unless a DTensor.

        Dimensions that it does not have are not split.
        """
        from torch.distributed.tensor import DTensor, Replicate

        if not isinstance(value, Tensor):
            return value
        if not isinstance(value, DTensor):
            value = DTensor.from_local(value, self.mesh, self.everywhere, run_check=False)
        dims = value.dim()
        where = [Replicate() if p.is_shard() and p.dim >= dims else p for p in placements]
        return value.redistribute(self.mesh, where).to_local(grad_placements=of_gradient)

    def local_call(self, call: Call) -> Call:
        """The call for the rows and, if it holds probabilities, the classes of this process."""
        call = call.replace(
            target=self.local(call.target, self.placements if call.soft() else self.positions),
            weight=self.local(call.weight, self.everywhere),
            alpha=self.local(call.alpha, self.positions),
            token_weight=self.local(call.token_weight, self.positions),
        )
        return _checked_constants(call, self.shape[self.class_dim])

    def result(
        self, loss: Tensor, rows: RowStatistics | None, call: Call, local: tuple[int, ...]
    ) -> tuple[DTensor, RowStatistics | None]:
        """Loss and statistics as DTensors, from those of this process, of the shape `local`."""
        from torch.distributed.tensor import DTensor, Partial

        shape = self.shape[: self.class_dim] + self.shape[self.class_dim + 1 :]
        size = {"shape": shape, "stride": torch.empty(shape, device="meta").stride()}

        def whole(values: Tensor) -> DTensor:
            values = values.reshape(local)
            return DTensor.from_local(values, self.mesh, self.positions, run_check=False, **size)

        if rows is not None:
            rows = rows.reshape(local)
            vars(rows).update({name: whole(getattr(rows, name)) for name in rows.NAMES})
        if call.reduction == "none":
            return whole(loss), rows
        where = [Partial() if p.is_shard() else p for p in self.positions]
        return DTensor.from_local(loss, self.mesh, where, run_check=False), rows


def _cross_entropy(input: DTensor, call: Call, stats: bool) -> tuple[DTensor, Any]:
    """:func:`powergrad.cross_entropy` of a DTensor, and perhaps the statistics of its rows."""
    class_dim = 0 if input.dim() == 1 else 1
    layout = Layout(input.device_mesh, input.placements, class_dim, input.shape)
    with agreement(layout.split, input.device) as facts:
        own = layout.local_call(check_call(input, call)[1])
        z = layout.local(input, layout.placements)
        rows, own = as_rows(z, own)
        facts.update(function="cross_entropy", dtype=z.dtype, rows=len(rows))
        facts.update(options=(*_options(own), stats))
    tell("powergrad.cross_entropy", input, call.alpha, call)
    loss, found = _loss_of_rows(rows, own, layout.split, stats)
    positions = shape_of(z)[:class_dim] + shape_of(z)[class_dim + 1 :]
    return layout.result(in_dtype(loss, z, own), found, own, positions)


class _LogSoftmax(torch.autograd.Function):
    """The log-softmax of rows of a part of the classes; one all-reduce in the backward pass."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, alpha: Tensor, dtype: torch.dtype, group: Any) -> Tensor:
        z = input.to(torch.promote_types(dtype, torch.float32))
        top, d = _below_top(z)
        p, e = d.exp().sum(1, keepdim=True), power(d, alpha).sum(1, keepdim=True)
        mine = {"top": top, "alpha": torch.zeros_like(top) + alpha, "p": p, "e": e}
        parts = _exchange(mine, alpha, group)
        check_equal(parts)
        ctx.save_for_backward(input, alpha, parts["all top"], parts["all e"])
        ctx.group = group
        return (z - parts["all top"] - parts["all p"].log()).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        logits, alpha, top, e = ctx.saved_tensors
        u = grads[0].to(top)
        total = u.sum(1, keepdim=True)
        dist.all_reduce(total, group=ctx.group)
        gradient = u - power(logits.to(u) - top, alpha) * (total / e)
        return gradient.to(logits.dtype), None, None, None


def _log_softmax(input: DTensor, exponent: Tensor, dim: int, dtype: Any) -> DTensor:
    """:func:`powergrad.log_softmax` of a DTensor whose classes are split."""
    from torch.distributed.tensor import DTensor

    layout = Layout(input.device_mesh, input.placements, dim, input.shape)
    with agreement(layout.split, input.device) as facts:
        z, alpha = layout.local(input, layout.placements).movedim(dim, -1), exponent
        if exponent.dim():
            alpha = exponent.expand(*input.shape[:dim], 1, *input.shape[dim + 1 :]).select(dim, 0)
            alpha = layout.local(alpha, layout.positions).reshape(-1, 1)
        rows = z.unsqueeze(0).flatten(0, -2)
        facts.update(function="log_softmax", dtype=(z.dtype, dtype), rows=len(rows))
    values = _LogSoftmax.apply(rows, alpha, dtype or input.dtype, layout.split.group)
    values = values.reshape(z.shape).movedim(-1, dim)
    size = {"shape": input.shape, "stride": input.stride()}
    return DTensor.from_local(values, layout.mesh, layout.placements, run_check=False, **size)


def _linear_cross_entropy(
    layer: Sequence[Any], call: Call, shift: bool, chunk_rows: int | None, stats: bool
) -> tuple[DTensor, Any]:
    """:func:`powergrad.linear_cross_entropy` of DTensors: hidden states, head, and bias or None."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    (states, head, _), last = layer, layer[0].dim() - 1
    mesh = states.device_mesh
    if head.device_mesh != mesh:
        raise ValueError(
            f"Expected `linear_weight` to be on the mesh of `input`, {mesh}, but got "
            f"{head.device_mesh}."
        )

    def along(of_states: Any, of_head: Any) -> tuple[Any, ...]:
        """Placements of hidden states, head, logits, and the gradients of the first two."""
        if of_states.is_shard() and of_states.dim != last:  # rows are split: the head is gathered
            return of_states, Replicate(), of_states, of_states, Partial()
        if of_head == Shard(0):  # classes are split
            return Replicate(), of_head, Shard(last), Partial(), of_head
        return (Replicate(),) * 5

    pairs = zip(states.placements, head.placements, strict=True)
    of_states, of_head, of_logits, *of_gradients = zip(
        *(along(*pair) for pair in pairs), strict=True
    )
    layout = Layout(mesh, of_logits, last, (*states.shape[:-1], head.shape[0]))
    with agreement(layout.split, states.device, always=True) as facts:
        whole, call = checked_head(layer, call, shift, chunk_rows)
        hidden = layout.local(whole[0], of_states, of_gradients[0])
        own = [layout.local(t, of_head, of_gradients[1]) for t in whole[1:]]
        logits = hidden.new_empty(()).expand(*hidden.shape[:-1], layout.split.size)  # their shape
        by_row = call_for_rows(logits, layout.local_call(call), last)
        kept = None if call.soft() else int((by_row.target != call.ignore_index).sum())
        facts.update(function="linear_cross_entropy", dtype=hidden.dtype)
        facts.update(rows=(len(by_row.target), kept))
        facts.update(options=(*_options(by_row), stats, chunk_rows, hidden.requires_grad))
    tell("powergrad.linear_cross_entropy", states, call.alpha, None, head)
    found = None
    if stats:
        found = RowStatistics.zeros(by_row, torch.promote_types(hidden.dtype, torch.float32))
    rows_of_hidden = hidden.unsqueeze(0).flatten(0, -2)
    loss = InBlocks.apply(rows_of_hidden, *own, by_row, chunk_rows, found, layout.split)
    return layout.result(in_dtype(loss, states, call), found, by_row, shape_of(hidden)[:-1])


OF_DTENSORS["cross_entropy"] = _cross_entropy
OF_DTENSORS["log_softmax"] = _log_softmax
OF_DTENSORS["linear_cross_entropy"] = _linear_cross_entropy
