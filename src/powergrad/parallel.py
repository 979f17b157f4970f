r"""Losses of logits whose classes are split over processes, as in vocabulary-parallel training.

The steps are those of `powergrad.rows`, with one exchange between them. Each process reduces its
classes to a few numbers per row, relative to its own largest logit m:

    sum exp(z - m), sum exp(alpha (z - m))   without the label, which one process adds: 1 - p'_y
                                             would be lost where p'_y rounds to 1
    z_y                                      in the process that has the label; elsewhere -inf
    sum u (z - m), sum u                     u: class weights, with smoothing; or the soft target

One all-gather shows all processes the numbers of all. Each adds them in the same order, and so gets
the same bits. The backward pass exchanges nothing.

An all-gather of unequal sizes is no error with gloo: one process is aborted, another goes on with
wrong numbers. So a message of fixed size goes first (`agree`). What would be costly to compare
there (labels, alpha, weights) is compared in the exchange, by a hash of each row.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
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
    label_coefficients,
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
_Prepared = tuple["Split", Any, dict[str, Any], Any]  # with rows and facts that must agree


def agree(
    prepare: Callable[[], _Prepared],
    group: Any,
    row_groups: Sequence[Any],
    device: torch.device,
    always: bool = False,
) -> tuple[Split, Any]:
    """What `prepare` returns besides what must agree; or errors everywhere, if it fails anywhere.

    The number of rows must agree in `group`, and the facts in `row_groups` too. On an accelerator,
    where reading an answer means to wait, processes are asked at calls 1, 2, 4, 8, ... of a group,
    or always, if the environment says so.
    """
    problem: Exception | None = None
    split, rows, facts, prepared = Split(group, 0, 0, 0), 0, {}, None
    try:
        split, rows, facts, prepared = prepare()
    except Exception as error:
        problem = error
    always = always or device.type == "cpu" or os.environ.get("POWERGRAD_CHECK_PROCESSES") == "1"
    for asked in (group, *row_groups):
        if asked is not None:
            _calls[asked] = calls = _calls.get(asked, 0) + 1
            if always or not calls & (calls - 1):
                given = {**facts, "rows": rows} if asked is group else facts
                message = (problem is not None, split.first, split.size, _crc(given))
                table = gathered(torch.tensor(message, device=device), asked).tolist()
                problem = problem or _disagreement(table, given, split if asked is group else None)
    if problem is not None:
        raise problem
    return split, prepared


def _crc(value: object) -> int:
    return zlib.crc32(repr(value).encode())


def _disagreement(table: list[list[int]], facts: Any, split: Split | None) -> Exception | None:
    """The error that the messages of a group amount to."""
    failed, firsts, counts, crcs = zip(*table, strict=True)
    if any(failed):
        rank = failed.index(1)
        return RuntimeError(f"The arguments of the loss raised an error on rank {rank}.")
    if len(set(crcs)) > 1:
        named = ", ".join(f"{name} {value}" for name, value in facts.items())
        return ValueError(
            f"Expected every process of the group to pass the same {', '.join(facts)}, but they "
            f"differ; here: {named}."
        )
    parts = sorted((first, first + n) for first, n in zip(firsts, counts, strict=True) if n)
    if split and [0, *(end for _, end in parts)] != [*(first for first, _ in parts), split.total]:
        named = ", ".join(f"[{first}, {end})" for first, end in parts)
        return ValueError(f"Expected parts that are all {split.total} classes, but got {named}.")
    return None


def _facts(name: str, input: Tensor, call: Call, split: Split, *more: Any) -> dict[str, Any]:
    """What processes compare before the exchange."""
    given = [value is not None for value in (call.weight, call.gate, call.token_weight)]
    options = (call.target.dtype, *call[3:10], *given, *more)
    return {"function": name, "dtype": input.dtype, "classes": split.total, "options": options}


def _hashes(like: Tensor, *values: Any, weight: Tensor | None = None) -> Tensor:
    """24 bits for each row, of what must be equal in all processes of a group; as a column."""
    found: Any = 0
    for value in (*values, weight):
        if value is not None:
            exact = torch.float64 if isinstance(value, float) else None
            bits = torch.as_tensor(value, dtype=exact, device=like.device).flatten()
            bits = bits.double().view(torch.int64) if bits.is_floating_point() else bits
            if value is weight:
                bits = (bits * (2 * torch.arange(len(bits), device=bits.device) + 1)).sum()
            found = (found ^ bits) * 0x5851F42D4C957F2D  # modulo 2^64
    return (found >> 40).to(like).expand(len(like)).unsqueeze(1)


def check_equal(hashes: Tensor) -> Tensor:
    """Whether the hashes of processes differ; where that can be read, it raises."""
    differ = (hashes != hashes[0]).any()
    if differ.is_cpu and bool(differ):
        raise ValueError(
            "Expected every process of the group to pass the same labels, alpha and weights, but "
            "they differ."
        )
    return differ


# Statistics, exchange, coefficients, gradient -----------------------------------------------------


class Summary(NamedTuple):
    """What `powergrad.rows.write` needs to know of all classes, for a block of rows."""

    split: Split
    kept: Tensor  # (4, N): loss, largest logit, factor of e, gradient at the label; for g = 1
    rows: RowStatistics | None = None

    def __call__(
        self, z: Tensor, call: Call, block: Coefficients, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The losses, and the gradients of the classes of this process."""
        split, g, (top, scale, at_label) = self.split, block.g, self.kept[1:].unsqueeze(2)
        e = power(torch.sub(z, top, out=out), column(block.alpha, z)).mul_(scale * g)
        weight = split.own_weight(call, e)
        if call.soft():
            e.sub_(target_mass(block.labels.to(e), call, split.total, weight) * g)
            return self.kept[0], e
        if call.label_smoothing:
            e.sub_(g * (call.label_smoothing / split.total) * (1.0 if weight is None else weight))
        return self.kept[0], _replaced(e, *split.own(block.labels), (at_label * g).to(e))


def _replaced(e: Tensor, here: Tensor, at: Tensor, value: float | Tensor) -> Tensor:
    """Overwrite e in the column `at`, where it is `here`."""
    return e.scatter_(1, at, torch.where(here, value, e.gather(1, at))) if e.shape[1] else e


def _largest(values: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """The largest value of this process in each row, and its class; as columns."""
    if not values.shape[1]:
        return values.new_full((len(values), 1), -math.inf), values.new_zeros(len(values), 1)
    most, at = values.max(1, keepdim=True)
    return most, (at + first).to(values.dtype)


def _below(tops: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logits of all processes, and how far those of each are below."""
    top = tops.amax(0)
    top = top.masked_fill(top == -math.inf, 0)
    return top, (tops - top).masked_fill(tops == -math.inf, 0)


class Split(NamedTuple):
    """Which classes this process has, and with whom it shares rows and means."""

    group: Any  # of the processes that have the classes of the same rows; None: all are here
    first: int
    size: int
    total: int
    row_groups: tuple[Any, ...] = ()  # of those that have further rows of the same mean

    @property
    def largest(self) -> int:
        """The number of classes of the largest part, where they are split evenly."""
        return -(-self.total // (1 if self.group is None else dist.get_world_size(self.group)))

    def sum_over_rows(self, number: Tensor) -> Tensor:
        number = number.clone()
        for group in self.row_groups:
            dist.all_reduce(number, group=group)
        return number

    def own_weight(self, call: Call, like: Tensor) -> Tensor | None:
        weight = call.weight
        return None if weight is None else weight[self.first : self.first + self.size].to(like)

    def own(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Whether the label is a class of this process, and which; as columns."""
        at = labels.unsqueeze(1) - self.first
        here = (at >= 0) & (at < self.size)
        return here, at.where(here, 0)

    def known(self, kept: Tensor) -> Summary:
        return Summary(self, kept)

    def summary(
        self,
        logits: Tensor,
        call: Call,
        common: Coefficients,
        part: Any = None,
        stats: bool = False,
    ) -> Summary:
        """The summary of a block of rows, by one exchange."""
        block, wide = common.of(part), torch.promote_types(logits.dtype, torch.float32)
        if part is not None:
            tokens = None if call.token_weight is None else call.token_weight[part]
            call = call.replace(target=call.target[part], alpha=block.alpha, token_weight=tokens)
        size, found = max(1, BLOCK // max(1, logits.shape[1])), []
        for start in range(0, max(1, len(logits)), size):
            rows = slice(start, start + size)
            z = mapped(logits[rows].to(wide), call)
            found.append(self._statistics(z, call, block.of(rows), stats))
        mine = {name: torch.cat([one[name] for one in found]).to(wide) for name in found[0]}
        shared = (None if call.soft() else call.target, call.alpha, call.token_weight)
        mine["hash"] = _hashes(mine["top"], *shared, weight=call.weight)
        parts = gathered(torch.stack(list(mine.values())), self.group).unbind(1)
        return self._summary(dict(zip(mine, parts, strict=True)), call, block)

    def _statistics(
        self, z: Tensor, call: Call, block: Coefficients, stats: bool
    ) -> dict[str, Tensor]:
        """What this process tells of rows; as columns."""
        top, at_top = _largest(z, self.first)
        d = z - top.masked_fill(top == -math.inf, 0)
        p, found, sums = d.exp(), {"top": top}, {}
        if stats:
            found["class"] = at_top
            sums = {"p log p": p * d.masked_fill(d == -math.inf, 0), "all p": p}
        weight = self.own_weight(call, z)
        here, at = (top, top) if call.soft() else self.own(block.labels)
        if call.soft():
            q = block.labels.to(z)
            u = target_mass(q, call, self.total, weight)
            if stats:
                sums |= {"q": q, "q p": q * p, "q d": q * d}
                found["most"], found["target"] = _largest(q, self.first)
        else:
            found["own"] = top if not z.shape[1] else z.gather(1, at).masked_fill(~here, -math.inf)
            u = 1.0 if weight is None else weight
        if call.soft() or call.label_smoothing:
            sums |= {"u": torch.zeros_like(d) + u, "u d": d * u}
        found |= {name: values.sum(1, keepdim=True) for name, values in sums.items()}
        for name, e in (("p", p), ("e", power(d, column(block.alpha, d)))):
            e = e if call.soft() else _replaced(e, here, at, 0.0)
            found[name] = e.sum(1, keepdim=True)
        return found

    def _summary(self, parts: dict[str, Tensor], call: Call, block: Coefficients) -> Summary:
        """Losses and coefficients, from the columns of all processes."""
        eps, z_loss, bad = call.label_smoothing, block.z_loss, check_equal(parts["hash"])
        top, below = _below(parts["top"])
        alpha = column(block.alpha, top)
        p = (parts["p"] * below.exp()).sum(0)
        e = (parts["e"] * (alpha * below).exp()).sum(0).to(p)
        mass = u_d = p
        if "u" in parts:
            mass, u_d = parts["u"].sum(0), (parts["u d"] + parts["u"] * below).sum(0)
        if call.soft():
            log_sum = p.log()
            losses = log_sum * mass - u_d
            if call.z_loss:
                mass = mass + 2 * z_loss * (alpha * top + e.log())
            scale = at_label = mass / e
        else:
            d = parts["own"].amax(0) - top
            own = (alpha * d).exp().to(p).masked_fill(d == -math.inf, 0)
            log_sum = (p + d.exp()).log()
            own_w, total, share = 1.0, float(self.total), eps / self.total
            if call.weight is not None:
                weight = call.weight.to(p)
                own_w, total = weight[block.labels].unsqueeze(1), weight.sum()
            losses = own_w * (1 - eps) * (log_sum - d)
            losses = losses + share * (log_sum * mass - u_d) if eps else losses
            level = alpha * top + (own + e).log() if call.z_loss else None
            weights = (own_w, total, share)
            scale, at_label = label_coefficients(call, own, e, weights, 1.0, z_loss, level)
            outside = (call.target < 0) | (call.target >= self.total)
            bad = bad | (outside & (call.target != call.ignore_index)).any()
        if call.z_loss:
            losses = losses + z_loss * (top + log_sum).square()
        kept = torch.cat([x.to(p).expand_as(p) for x in (losses, top, scale, at_label)], 1).t()
        rows = _row_statistics(parts, call, top, below, log_sum) if "class" in parts else None
        return Summary(self, kept.masked_fill(bad, math.nan), rows)


def _row_statistics(
    parts: dict[str, Tensor], call: Call, top: Tensor, below: Tensor, log_sum: Tensor
) -> RowStatistics:
    def of_largest(most: str, named: str) -> Tensor:
        return parts[named].gather(0, parts[most].argmax(0, keepdim=True))[0].long()

    rows, lse = RowStatistics(top.new_empty(0), call), top + log_sum
    p_log_p = ((parts["p log p"] + parts["all p"] * below) * below.exp()).sum(0)
    found = {"lse": lse, "entropy": log_sum - p_log_p / log_sum.exp()}
    found["prediction"] = of_largest("top", "class")
    if call.soft():
        q_d = (parts["q d"] + parts["q"] * below).sum(0)
        found["loss"] = log_sum * parts["q"].sum(0) - q_d
        found["p_target"] = (parts["q p"] * below.exp()).sum(0) / log_sum.exp()
        found["correct"] = found["prediction"] == of_largest("most", "target")
        found["counted"] = torch.ones_like(found["correct"])
    else:
        found["loss"] = (lse - parts["own"].amax(0)).masked_fill(~rows.counted.unsqueeze(1), 0)
    vars(rows).update({name: value.squeeze(1) for name, value in found.items()})
    return rows


# The loss -----------------------------------------------------------------------------------------


def _loss_of_rows(
    logits: Tensor, call: Call, split: Split, stats: bool
) -> tuple[Tensor, RowStatistics | None]:
    """The loss of rows of logits, checked, and perhaps their statistics."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    common = coefficients(call, wide, False, split.sum_over_rows if split.row_groups else None)
    g = torch.as_tensor(common.g, dtype=wide, device=logits.device).expand(len(logits), 1)
    with torch.no_grad():
        stats = stats or call.gate is not None
        summary = split.summary(logits.detach(), call, common, stats=stats)
        if call.gate is not None:
            weights = gated(call.replace(token_weight=None), summary.rows)  # pyright: ignore
            g = g * weights.reshape(-1, 1).to(wide)
    loss = _Loss.apply(logits, summary, call.replace(gate=None), replace(common, g=g))
    return loss, summary.rows


class _Loss(torch.autograd.Function):
    """The value; and in the backward pass the gradient, without an exchange."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, summary: Summary, call: Call, common: Any) -> Tensor:
        losses, ctx.split = summary.kept[0], summary.split
        if common.ignored is not None:
            losses = losses.masked_fill(common.ignored, 0)
        tensors, ctx.options = call.replace(target=common.labels, alpha=common.alpha).split()
        ctx.save_for_backward(logits, summary.kept, common.g, *tensors)
        return reduced(losses * common.g.squeeze(1), call, common)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        logits, kept, g, *tensors = ctx.saved_tensors
        call = Call.joined(tensors, ctx.options)
        common = Coefficients(call.target, call.alpha, g, None, 0.0, False)
        gradient, up = logits.new_empty(logits.shape), grads[0].expand(len(logits))
        size = max(1, BLOCK // max(1, logits.shape[1]))
        for start in range(0, len(logits), size):
            part = slice(start, start + size)
            summary = Summary(ctx.split, kept[:, part])
            write(logits[part], call, common, part, gradient[part], up[part], summary)
        return gradient, None, None, None


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
        target: Class indices, the same in each process; or the probabilities of this process's
            classes, of the shape of ``input``.
        weight: One weight for each of all classes, of shape (classes).
        alpha: As in :func:`powergrad.cross_entropy`, the same in each process.
        classes: The number of all classes.
        first_class: The first class of this process. By default, the classes are split as
            ``torch.chunk`` splits them: ``ceil(classes / processes)`` to each, in order of rank.
        group: The processes; by default all.
        return_stats: Whether to also return the :class:`~powergrad.rows.RowStatistics`, which are
            those of all classes.
        **options: Those of :func:`powergrad.cross_entropy`.

    Returns:
        The loss: 0-d, or of the shape of ``input`` without classes for "none"; perhaps in a tuple
        with the statistics.

    Raises:
        ValueError: If an argument is not as described above, if processes disagree, or if this
            process is not in ``group``.
        TypeError: If a dtype is not as described above.
        RuntimeError: If the arguments of another process raised an error there, and at second
            derivatives.

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
    device = input.device if isinstance(input, Tensor) else torch.device("cpu")

    def prepare() -> _Prepared:
        check_floating(input, "input")
        split = _split(input, classes, first_class, group)
        rows, call = as_rows(input, _checked(input, Call(target, weight, alpha, **options), split))
        facts = _facts("cross_entropy", input, call, split, return_stats)
        return split, len(rows), facts, (rows, call)

    split, (rows, call) = agree(prepare, group, (), device)
    tell("powergrad.parallel.cross_entropy", input, alpha)
    loss, found = _loss_of_rows(rows, call, split, return_stats)
    positions = (*input.shape[: input.dim() > 1], *input.shape[2:])
    loss = in_dtype(loss.reshape(positions) if call.reduction == "none" else loss, input, call)
    return (loss, found.reshape(positions)) if return_stats and found is not None else loss


def _split(input: Tensor, total: int, first: int | None, group: Any) -> Split:
    if isinstance(total, bool) or not isinstance(total, int) or total < 1:
        raise ValueError(f"Expected `classes` to be a positive integer, but got {total}.")
    count = (*input.shape, 0)[input.dim() > 1]
    split = Split(group, 0, count, total)
    first = min(total, split.largest * dist.get_rank(group)) if first is None else first
    if not 0 <= first <= total - count:
        raise ValueError(
            f"Expected `first_class` to be in [0, {total - count}] for {count} of {total} classes, "
            f"but got {first}."
        )
    return split._replace(first=first)


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
        self.all_here = [Replicate()] * mesh.ndim
        self.placements = [Replicate() if p.is_partial() else p for p in placements]
        if not all(type(p) in (Replicate, Shard) for p in self.placements):
            raise ValueError(f"Expected the placements Shard or Replicate, but got {placements}.")
        if mesh.get_coordinate() is None:
            raise ValueError("Expected this process to be in the mesh of the DTensor.")
        across = [i for i, p in enumerate(self.placements) if p.is_shard(class_dim)]
        if len(across) > 1:
            raise ValueError(
                "Expected the classes to be split over one dimension of the mesh, but got "
                f"{tuple(placements)}: gather them over another, by `redistribute`."
            )
        self.group = mesh.get_group(across[0]) if across else None
        self.place = mesh.get_coordinate()[across[0]] if across else 0
        # Of what has the shape of the logits without the classes.
        self.positions = [
            Shard(p.dim - (p.dim > class_dim)) if p.is_shard() and i not in across else Replicate()
            for i, p in enumerate(self.placements)
        ]
        of_rows = [i for i, p in enumerate(self.positions) if p.is_shard()]
        self.row_groups = tuple(mesh.get_group(i) for i in of_rows)

    def split(self, count: int) -> Split:
        """The split, if this process has so many classes."""
        total = self.shape[self.class_dim]
        split = Split(self.group, 0, count, total, self.row_groups)
        return split._replace(first=min(total, split.largest * self.place))

    def local(self, value: Any, placements: Sequence[Any]) -> Any:
        """This process's part of a tensor, which is the same in all processes unless a DTensor.

        Dimensions that it does not have are not split.
        """
        from torch.distributed.tensor import DTensor, Replicate

        if not isinstance(value, Tensor):
            return value
        if not isinstance(value, DTensor):
            value = DTensor.from_local(value, self.mesh, self.all_here, run_check=False)
        dims = value.dim()
        where = [Replicate() if p.is_shard() and p.dim >= dims else p for p in placements]
        return value.redistribute(self.mesh, where).to_local()

    def local_input(self, input: DTensor) -> Tensor:
        given = input.redistribute(self.mesh, self.placements)
        return given.to_local(grad_placements=self.placements)

    def local_call(self, call: Call) -> Call:
        """The call for the rows and, if it holds probabilities, the classes of this process."""
        call = call.replace(
            target=self.local(call.target, self.placements if call.soft() else self.positions),
            weight=self.local(call.weight, self.all_here),
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

        found = None
        if rows is not None:
            found = RowStatistics(torch.empty(0), call)
            vars(found).update({name: whole(getattr(rows, name)) for name in rows.NAMES})
        if call.reduction == "none":
            return whole(loss), found
        where = [Partial() if p.is_shard() else p for p in self.positions]
        return DTensor.from_local(loss, self.mesh, where, run_check=False), found


def _cross_entropy(input: DTensor, call: Call, stats: bool) -> tuple[DTensor, Any]:
    """:func:`powergrad.cross_entropy` of a DTensor, and perhaps the statistics of its rows."""
    class_dim = 0 if input.dim() == 1 else 1
    layout = Layout(input.device_mesh, input.placements, class_dim, input.shape)

    def prepare() -> _Prepared:
        own, z = layout.local_call(check_call(input, call)[1]), layout.local_input(input)
        (rows, own), split = as_rows(z, own), layout.split(z.shape[class_dim])
        return split, len(rows), _facts("cross_entropy", z, own, split, stats), (z, rows, own)

    split, (z, rows, own) = agree(prepare, layout.group, layout.row_groups, input.device)
    tell("powergrad.cross_entropy", input, call.alpha, call)
    loss, found = _loss_of_rows(rows, own, split, stats)
    positions = shape_of(z)[:class_dim] + shape_of(z)[class_dim + 1 :]
    return layout.result(in_dtype(loss, z, own), found, own, positions)


class _LogSoftmax(torch.autograd.Function):
    """The log-softmax of rows of a part of the classes; one all-reduce in the backward pass."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, alpha: Tensor, dtype: torch.dtype, split: Split) -> Tensor:
        z = input.to(torch.promote_types(dtype, torch.float32))
        top, _ = _largest(z)
        d = z - top.masked_fill(top == -math.inf, 0)
        sums = [d.exp().sum(1, keepdim=True), power(d, alpha).sum(1, keepdim=True)]
        mine = torch.stack([top, *(x.to(z) for x in sums), _hashes(z, alpha)])
        tops, p, e, hashes = gathered(mine, split.group).unbind(1)
        check_equal(hashes)
        top, below = _below(tops)
        e = (e * (alpha * below).exp()).sum(0).to(z)
        ctx.save_for_backward(input, alpha, top, e)
        ctx.split = split
        return (z - top - (p * below.exp()).sum(0).log()).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        logits, alpha, top, e = ctx.saved_tensors
        u = grads[0].to(top)
        total = u.sum(1, keepdim=True)
        dist.all_reduce(total, group=ctx.split.group)
        gradient = u - power(logits.to(u) - top, alpha) * (total / e)
        return gradient.to(logits.dtype), None, None, None


def _log_softmax(input: DTensor, exponent: Tensor, dim: int, dtype: Any) -> DTensor:
    """:func:`powergrad.log_softmax` of a DTensor whose classes are split."""
    from torch.distributed.tensor import DTensor

    layout = Layout(input.device_mesh, input.placements, dim, input.shape)

    def prepare() -> _Prepared:
        z, alpha = layout.local_input(input).movedim(dim, -1), exponent
        if exponent.dim():
            alpha = exponent.expand(*input.shape[:dim], 1, *input.shape[dim + 1 :]).select(dim, 0)
            alpha = layout.local(alpha, layout.positions).reshape(-1, 1)
        rows, split = z.unsqueeze(0).flatten(0, -2), layout.split(z.shape[-1])
        facts = {"function": "log_softmax", "dtype": (input.dtype, dtype), "classes": split.total}
        return split, len(rows), facts, (z, rows, alpha)

    split, (z, rows, alpha) = agree(prepare, layout.group, (), input.device)
    values = _LogSoftmax.apply(rows, alpha, dtype or input.dtype, split)
    values = values.reshape(z.shape).movedim(-1, dim)
    size = {"shape": input.shape, "stride": input.stride()}
    return DTensor.from_local(values, layout.mesh, layout.placements, run_check=False, **size)


def _linear_cross_entropy(
    layer: Sequence[Any], call: Call, shift: bool, chunk_rows: int | None, stats: bool
) -> tuple[DTensor, Any]:
    """:func:`powergrad.linear_cross_entropy` of DTensors: hidden states, head, and bias or None.

    The head is gathered over a dimension of the mesh that splits rows.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    (states, head, _), last = layer, layer[0].dim() - 1
    mesh = states.device_mesh
    if head.device_mesh != mesh:
        raise ValueError(
            f"Expected `linear_weight` to be on the mesh of `input`, {mesh}, but got "
            f"{head.device_mesh}."
        )
    rows = [p if p.is_shard() and p.dim != last else Replicate() for p in states.placements]
    pairs = zip(rows, head.placements, strict=True)
    heads = [p if p == Shard(0) and not row.is_shard() else Replicate() for row, p in pairs]
    pairs = list(zip(rows, heads, strict=True))
    logits = [Shard(last) if p.is_shard() else row for row, p in pairs]
    layout = Layout(mesh, logits, last, (*states.shape[:-1], head.shape[0]))
    # The gradients are parts of a sum: over the classes of hidden states, over the rows of a head.
    of_input = (rows, [Partial() if p.is_shard() else row for row, p in pairs])
    of_head = (heads, [Partial() if row.is_shard() else p for row, p in pairs])

    def prepare() -> _Prepared:
        whole, checked = checked_head(layer, call, shift, chunk_rows)
        local: list[Any] = [
            t if t is None else t.redistribute(mesh, where).to_local(grad_placements=grads)
            for t, (where, grads) in zip(whole, (of_input, of_head, of_head), strict=True)
        ]
        hidden, *own = local
        split, of_rows = layout.split(len(own[0])), layout.local_call(checked)
        shape = (*hidden.shape[:-1], split.size)
        of_rows = call_for_rows(hidden.new_empty(()).expand(shape), of_rows, last)
        kept = None if call.soft() else int((of_rows.target != call.ignore_index).sum())
        more = (stats, chunk_rows, hidden.requires_grad)
        facts = _facts("linear_cross_entropy", hidden, of_rows, split, *more)
        return split, (len(of_rows.target), kept), facts, (local, of_rows)

    given = (prepare, layout.group, layout.row_groups, states.device)
    split, ((hidden, *own), of_rows) = agree(*given, always=True)
    tell("powergrad.linear_cross_entropy", states, call.alpha, None, head)
    found = None
    if stats:
        found = RowStatistics.zeros(of_rows, torch.promote_types(hidden.dtype, torch.float32))
    rows_of_hidden = hidden.unsqueeze(0).flatten(0, -2)
    loss = InBlocks.apply(rows_of_hidden, *own, of_rows, chunk_rows, found, split)
    return layout.result(in_dtype(loss, states, call), found, of_rows, shape_of(hidden)[:-1])


OF_DTENSORS["cross_entropy"] = _cross_entropy
OF_DTENSORS["log_softmax"] = _log_softmax
OF_DTENSORS["linear_cross_entropy"] = _linear_cross_entropy
