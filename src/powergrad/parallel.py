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
from powergrad.linear import InBlocks, checked_call
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

INF = math.inf


# What processes tell each other -------------------------------------------------------------------


class Split(NamedTuple):
    """Which classes this process has, and with whom it shares rows and means."""

    group: Any  # of the processes that have the classes of the same rows; None: all are here
    first: int
    count: int
    total: int
    row_groups: tuple[Any, ...] = ()  # of those that have further rows of the same mean

    @property
    def largest(self) -> int:
        """The number of classes of the largest part, where they are split evenly."""
        return -(-self.total // (1 if self.group is None else dist.get_world_size(self.group)))

    def over_rows(self) -> Callable[[Tensor], Tensor] | None:
        """What sums a number over the processes with further rows, if there are any."""

        def summed(number: Tensor) -> Tensor:
            number = number.clone()
            for group in self.row_groups:
                dist.all_reduce(number, group=group)
            return number

        return summed if self.row_groups else None

    def mine(self, weight: Tensor | None, like: Tensor) -> Tensor | None:
        """The weights of the classes of this process."""
        return None if weight is None else weight[self.first : self.first + self.count].to(like)

    def own(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Whether the label is a class of this process, and which; as columns."""
        at = labels.unsqueeze(1) - self.first
        here = (at >= 0) & (at < self.count)
        return here, at.where(here, 0)

    def exchange(self, call: Call, common: Coefficients) -> Exchange:
        return Exchange(self, call, common)

    @staticmethod
    def refuse_second_derivatives() -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "Second derivatives (`create_graph=True`) of a DTensor's loss, or of classes that "
                "are split over processes, are not supported. Use `logits.full_tensor()`."
            )


def gathered(mine: Tensor, group: Any) -> Tensor:
    """The tensors of all processes of `group`, in a new first dimension."""
    if group is None:
        return mine.unsqueeze(0)
    out = mine.new_empty(dist.get_world_size(group), *mine.shape)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before 2.13
    gather(out.flatten(), mine.flatten(), group=group)
    return out


_calls: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_FACTS = ("function", "dtype", "options", "number of classes", "number of rows")
_Prepared = tuple[Split, tuple[Any, ...], Any]


def agree(
    prepare: Callable[[], _Prepared],
    group: Any,
    row_groups: Sequence[Any],
    device: torch.device,
    always: bool = False,
) -> tuple[Split, Any]:
    """What `prepare` returns besides `_FACTS`; or, if it fails or facts differ, errors everywhere.

    On an accelerator, where reading an answer means to wait, processes are asked at calls 1, 2, 4,
    8, ... of a group, or always, if the environment says so.
    """
    problem: Exception | None = None
    split, facts, prepared = Split(group, 0, 0, 0), (None,) * len(_FACTS), None
    try:
        split, facts, prepared = prepare()
    except Exception as error:
        problem = error
    always = always or device.type == "cpu" or os.environ.get("POWERGRAD_CHECK_PROCESSES") == "1"
    for asked in (group, *row_groups):
        if asked is None:
            continue
        _calls[asked] = calls = _calls.get(asked, 0) + 1
        if always or not calls & (calls - 1):
            shared = facts if asked is group else (*facts[:-1], None)
            hashed = [zlib.crc32(repr(fact).encode()) for fact in shared]
            mine = torch.tensor([problem is not None, split.first, split.count, *hashed])
            table = gathered(mine.to(device), asked).tolist()
            problem = problem or _disagreement(table, shared, split if asked is group else None)
    if problem is not None:
        raise problem
    return split, prepared


def _disagreement(
    table: list[list[int]], facts: tuple[Any, ...], split: Split | None
) -> Exception | None:
    """The error that the messages of a group, by rank, amount to."""
    failed = [rank for rank, row in enumerate(table) if row[0]]
    if failed:
        return RuntimeError(f"The arguments of the loss raised an error on rank {failed[0]}.")
    for i, (name, fact) in enumerate(zip(_FACTS, facts, strict=True), 3):
        for rank, row in enumerate(table):
            if row[i] != table[0][i]:
                return ValueError(
                    f"Expected every process of the group to pass the same {name}, but rank {rank} "
                    f"differs from rank 0; here it is {fact}."
                )
    parts = sorted((first, first + count) for _, first, count, *_ in table if count)
    bounds = [bound for part in parts for bound in part]
    if split is not None and [0, *bounds[1::2]] != [*bounds[::2], split.total]:
        named = ", ".join(f"[{first}, {end})" for first, end in parts)
        return ValueError(f"Expected parts that are all {split.total} classes, but got {named}.")
    return None


def _options(call: Call, *more: Any) -> tuple[Any, ...]:
    """The options of which processes compare the values, or only whether they are given."""
    given = [value is not None for value in (call.weight, call.gate, call.token_weight)]
    return (call.target.dtype, *call[3:10], *given, *more)


def hashes(rows: int, dtype: torch.dtype, *values: Any, weight: Tensor | None = None) -> Tensor:
    """24 bits for each row, of what must be equal in all processes of a group; as a column."""
    found: Any = 0
    for value in (*values, weight):
        if value is not None:
            bits = torch.as_tensor(value).flatten()
            bits = bits.double().view(torch.int64) if bits.is_floating_point() else bits
            if value is weight:
                bits = (bits * (2 * torch.arange(len(bits), device=bits.device) + 1)).sum()
            found = (found ^ bits) * 0x5851F42D4C957F2D  # modulo 2^64
    return (found >> 40).to(dtype).expand(rows).unsqueeze(1)


def check_equal(hashed: Tensor) -> Tensor:
    """Whether the hashes of processes differ; where that can be read, it raises."""
    differ = (hashed != hashed[0]).any()
    if differ.is_cpu and bool(differ):
        raise ValueError(
            "Expected every process of the group to pass the same labels, alpha and weights, but "
            "they differ."
        )
    return differ


# Statistics, exchange, coefficients, gradient -----------------------------------------------------


class Summary(NamedTuple):
    """What `powergrad.rows.write` needs of a block of rows, which concerns all classes."""

    split: Split
    kept: Tensor  # (4, N): loss, largest logit, factor of e, gradient at the label; for g = 1
    rows: RowStatistics | None = None

    def __call__(
        self, z: Tensor, call: Call, block: Coefficients, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The losses, and the gradients of the classes of this process."""
        split, g, (top, scale, at_label) = self.split, block.g, self.kept[1:].unsqueeze(2)
        e = power(torch.sub(z, top, out=out), column(block.alpha, z)).mul_(scale * g)
        weight = split.mine(call.weight, e)
        if call.soft():
            e.sub_(target_mass(block.labels.to(e), call, split.total, weight) * g)
            return self.kept[0], e
        if call.label_smoothing:
            share = call.label_smoothing / split.total
            e.sub_(g * share * (1.0 if weight is None else weight))
        return self.kept[0], _replaced(e, *split.own(block.labels), (at_label * g).to(e))


def _replaced(e: Tensor, here: Tensor, at: Tensor, value: float | Tensor) -> Tensor:
    """Overwrite e in the column `at`, where it is `here`."""
    return e.scatter_(1, at, torch.where(here, value, e.gather(1, at))) if e.shape[1] else e


def _largest(values: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """The largest value of this process in each row, and its class; as columns."""
    if not values.shape[1]:
        return values.new_full((len(values), 1), -INF), values.new_zeros(len(values), 1)
    most, at = values.max(1, keepdim=True)
    return most, (at + first).to(values.dtype)


class Exchange(NamedTuple):
    """The summaries of blocks of rows of a call."""

    split: Split
    call: Call
    common: Coefficients

    def __call__(
        self,
        logits: Tensor,
        part: slice | Tensor | None = None,
        stats: bool = False,
        known: Tensor | None = None,
    ) -> Summary:
        """The summary of a block of rows, by one exchange, unless it is `known`."""
        if known is not None:
            return Summary(self.split, known)
        block, call = self.common.of(part), self.call
        wide = torch.promote_types(logits.dtype, torch.float32)
        if part is not None:
            tokens = None if call.token_weight is None else call.token_weight[part]
            call = call.replace(target=call.target[part], alpha=block.alpha, token_weight=tokens)
        size = max(1, BLOCK // max(1, logits.shape[1]))
        found = []
        for start in range(0, max(1, len(logits)), size):
            rows = slice(start, start + size)
            z = mapped(logits[rows].to(wide), call)
            found.append(self._statistics(z, call, block.of(rows), stats))
        mine = {name: torch.cat([one[name] for one in found]).to(wide) for name in found[0]}
        shared = (None if call.soft() else call.target, call.alpha, call.token_weight)
        mine["hash"] = hashes(len(logits), wide, *shared, weight=call.weight)
        parts = gathered(torch.stack(list(mine.values())), self.split.group).unbind(1)
        return self._summary(dict(zip(mine, parts, strict=True)), call, block)

    def _statistics(
        self, z: Tensor, call: Call, block: Coefficients, stats: bool
    ) -> dict[str, Tensor]:
        """What this process tells of rows; as columns."""
        split = self.split
        top, at_top = _largest(z, split.first)
        d = z - top.masked_fill(top == -INF, 0)
        p, found, columns = d.exp(), {"top": top}, {}
        if stats:
            columns = {"p log p": p * d.masked_fill(d == -INF, 0), "all p": p}
            found["class"] = at_top
        weight = split.mine(call.weight, z)
        if call.soft():
            q = block.labels.to(z)
            t = target_mass(q, call, split.total, weight)
            columns |= {"t": t, "t d": t * d}
            if stats:
                columns |= {"q": q, "q p": q * p, "q d": q * d}
                found["most"], found["target"] = _largest(q, split.first)
        else:
            here, at = split.own(block.labels)
            found["own"] = top if not z.shape[1] else z.gather(1, at).masked_fill(~here, -INF)
            if call.label_smoothing:
                u = torch.ones_like(d) if weight is None else weight.expand_as(d)
                columns |= {"t": u, "t d": u * d}
        found |= {name: values.sum(1, keepdim=True) for name, values in columns.items()}
        for name, e in (("p", p), ("e", power(d, column(block.alpha, d)))):
            e = e if call.soft() else _replaced(e, here, at, 0.0)
            found[name] = e.sum(1, keepdim=True)
        return found

    def _summary(self, parts: dict[str, Tensor], call: Call, block: Coefficients) -> Summary:
        """Losses and coefficients, from the columns of all processes."""
        split, tops, eps, z_loss = self.split, parts["top"], call.label_smoothing, block.z_loss
        top = tops.amax(0)
        top = top.masked_fill(top == -INF, 0)
        lower = (tops - top).masked_fill(tops == -INF, 0)
        alpha, bad = column(block.alpha, top), check_equal(parts["hash"])
        p = (parts["p"] * lower.exp()).sum(0)
        e = (parts["e"] * (alpha * lower).exp()).sum(0).to(p)
        mass = t_d = p
        if "t" in parts:
            mass, t_d = parts["t"].sum(0), (parts["t d"] + parts["t"] * lower).sum(0)
        if call.soft():
            log_sum = p.log()
            losses = log_sum * mass - t_d
            if call.z_loss:
                mass = mass + 2 * z_loss * (alpha * top + e.log())
            scale = at_label = mass / e
        else:
            d = parts["own"].amax(0) - top
            own = (alpha * d).exp().to(p).masked_fill(d == -INF, 0)
            log_sum = (p + d.exp()).log()
            weight, own_w, total, share = call.weight, 1.0, float(split.total), eps / split.total
            if weight is not None:
                own_w, total = weight.to(p)[block.labels].unsqueeze(1), weight.to(p).sum()
            losses = own_w * (1 - eps) * (log_sum - d)
            losses = losses + share * (log_sum * mass - t_d) if eps else losses
            level = alpha * top + (own + e).log() if call.z_loss else None
            weights = (own_w, total, share)
            scale, at_label = label_coefficients(call, own, e, weights, 1.0, z_loss, level)
            outside = (call.target < 0) | (call.target >= split.total)
            bad = bad | (outside & (call.target != call.ignore_index)).any()
        if call.z_loss:
            losses = losses + z_loss * (top + log_sum).square()
        kept = torch.cat([x.to(p).expand_as(p) for x in (losses, top, scale, at_label)], 1).t()
        rows = _row_statistics(parts, call, top, lower, log_sum) if "class" in parts else None
        return Summary(split, kept.masked_fill(bad, math.nan), rows)


def _row_statistics(
    parts: dict[str, Tensor], call: Call, top: Tensor, lower: Tensor, log_sum: Tensor
) -> RowStatistics:
    def of_largest(most: str, named: str) -> Tensor:
        return parts[named].gather(0, parts[most].argmax(0, keepdim=True))[0].long()

    rows = RowStatistics(top.new_empty(0), call)
    p_log_p = ((parts["p log p"] + parts["all p"] * lower) * lower.exp()).sum(0)
    found = {
        "lse": top + log_sum,
        "entropy": log_sum - p_log_p / log_sum.exp(),
        "prediction": of_largest("top", "class"),
    }
    if call.soft():
        q_d = (parts["q d"] + parts["q"] * lower).sum(0)
        found["loss"] = log_sum * parts["q"].sum(0) - q_d
        found["p_target"] = (parts["q p"] * lower.exp()).sum(0) / log_sum.exp()
        found["correct"] = found["prediction"] == of_largest("most", "target")
        found["counted"] = torch.ones_like(found["correct"])
    else:
        loss = top + log_sum - parts["own"].amax(0)
        found["loss"] = loss.masked_fill(~rows.counted.unsqueeze(1), 0)
    vars(rows).update({name: value.squeeze(1) for name, value in found.items()})
    return rows


# The loss -----------------------------------------------------------------------------------------


def loss_of_rows(
    logits: Tensor, call: Call, split: Split, stats: bool
) -> tuple[Tensor, RowStatistics | None]:
    """The loss of rows of logits, checked, and perhaps their statistics."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    common = coefficients(call, wide, False, split.over_rows())
    g = torch.as_tensor(common.g, dtype=wide, device=logits.device).expand(len(logits), 1)
    with torch.no_grad():
        stats = stats or call.gate is not None
        summary = split.exchange(call, common)(logits.detach(), stats=stats)
        if call.gate is not None:
            weights = gated(call.replace(token_weight=None), summary.rows)  # pyright: ignore
            g = g * weights.reshape(-1, 1).to(wide)
    loss = _Loss.apply(logits, summary, call.replace(gate=None), replace(common, g=g))
    return loss, summary.rows


class _Loss(torch.autograd.Function):
    """The value; and in the backward pass the gradient, without an exchange."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, summary: Summary, call: Call, common: Any) -> Tensor:
        losses, labels = summary.kept[0], common.labels
        if common.ignored is not None:
            losses = losses.masked_fill(common.ignored, 0)
        tensors, ctx.options = call.replace(target=labels, token_weight=None).split()
        ctx.save_for_backward(logits, summary.kept, common.g, *tensors)
        ctx.split = summary.split
        return reduced(losses * common.g.squeeze(1), call, common)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.split.refuse_second_derivatives()
        logits, kept, g, *tensors = ctx.saved_tensors
        call = Call.joined(tensors, ctx.options)
        alpha = call.alpha.reshape(-1) if isinstance(call.alpha, Tensor) else call.alpha
        common = Coefficients(call.target, alpha, g, None, 0.0, False)
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
) -> Tensor | tuple[Tensor, RowStatistics]:
    r""":func:`powergrad.cross_entropy` of logits whose classes are split over processes.

    Each process of ``group`` has the logits of some classes, perhaps none, for the same rows. All
    call this function, get the same value, and differentiate it with respect to their own logits.
    The forward pass exchanges a few numbers per row, the backward pass nothing. A ``DTensor`` is
    passed to :func:`powergrad.cross_entropy` itself.

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
        The loss: 0-d, or of the shape of ``input`` without classes for "none".

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
        class_dim = 0 if input.dim() == 1 else 1
        split = _split(input, class_dim, classes, first_class, group)
        call = _checked(input, Call(target, weight, alpha, **options), class_dim, classes)
        rows, call = as_rows(input, call)
        facts = (input.dtype, _options(call, return_stats), classes, len(rows))
        return split, ("cross_entropy", *facts), (rows, call)

    split, (rows, call) = agree(prepare, group, (), device)
    tell("powergrad.parallel.cross_entropy", input, alpha)
    loss, found = loss_of_rows(rows, call, split, return_stats)
    positions = (*input.shape[: input.dim() > 1], *input.shape[2:])
    loss = in_dtype(loss.reshape(positions) if call.reduction == "none" else loss, input, call)
    return (loss, found.reshape(positions)) if return_stats and found is not None else loss


def _split(input: Tensor, class_dim: int, total: int, first: int | None, group: Any) -> Split:
    if isinstance(total, bool) or not isinstance(total, int) or total < 1:
        raise ValueError(f"Expected `classes` to be a positive integer, but got {total}.")
    split = Split(group, 0, input.shape[class_dim] if input.dim() else 0, total)
    if first is None:
        first = min(total, split.largest * dist.get_rank(group))
    if not 0 <= first <= total - split.count:
        raise ValueError(
            f"Expected `first_class` to be in [0, {total - split.count}] for {split.count} of "
            f"{total} classes, but got {first}."
        )
    return split._replace(first=first)


def _checked(input: Tensor, call: Call, class_dim: int, total: int) -> Call:
    """The checked call of a part of the logits."""
    shape, given = list(shape_of(input)), call.target
    shape[class_dim : class_dim + 1] = [total] if shape else []
    whole = input.new_empty(()).expand(shape)
    soft = isinstance(given, Tensor) and call.soft() and given.shape == input.shape
    _, call = check_call(whole, call.replace(target=whole.to(given) if soft else given), class_dim)
    _check_constants(call.replace(target=given))
    if soft:
        return call.replace(target=given)
    check_labels(call.target, total, call.ignore_index)
    return call


def _check_constants(call: Call) -> None:
    for name in ("target", "weight", "token_weight"):
        value = getattr(call, name)
        if value is not None and value.requires_grad:
            raise ValueError(f"Expected `{name}` not to require grad where classes are split.")


# DTensors -----------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """How logits, of which perhaps only the shape exists, lie on a mesh of devices."""

    mesh: Any
    placements: list[Any]
    class_dim: int
    shape: tuple[int, ...]

    def groups(self) -> tuple[Any, tuple[Any, ...]]:
        """The group that the classes are split over, if they are; and those of the rows."""
        across = [i for i, p in enumerate(self.placements) if p.is_shard(self.class_dim)]
        if len(across) > 1:
            raise ValueError(
                "Expected the classes to be split over one dimension of the mesh, but got "
                f"{tuple(self.placements)}: gather them over another, by `redistribute`."
            )
        of_rows = [i for i, p in enumerate(self.placements) if p.is_shard() and i not in across]
        group = self.mesh.get_group(across[0]) if across else None
        return group, tuple(self.mesh.get_group(i) for i in of_rows)

    def split(self, count: int) -> Split:
        """The split, if this process has so many classes."""
        (group, row_groups), total = self.groups(), self.shape[self.class_dim]
        places = zip(self.placements, self.mesh.get_coordinate(), strict=True)
        place = next((place for p, place in places if p.is_shard(self.class_dim)), 0)
        split = Split(group, 0, count, total, row_groups)
        return split._replace(first=min(total, split.largest * place))

    def of_positions(self) -> list[Any]:
        """The placements of what has the shape of the logits without the classes."""
        from torch.distributed.tensor import Replicate, Shard

        dim = self.class_dim
        return [
            Shard(p.dim - (p.dim > dim)) if p.is_shard() and p.dim != dim else Replicate()
            for p in self.placements
        ]

    def local(self, value: Any, placements: Sequence[Any]) -> Any:
        """This process's part of a tensor, which is the same in all processes unless a DTensor."""
        from torch.distributed.tensor import DTensor, Replicate

        if not isinstance(value, Tensor):
            return value
        if not isinstance(value, DTensor):
            every = [Replicate()] * self.mesh.ndim
            value = DTensor.from_local(value, self.mesh, every, run_check=False)
        return value.redistribute(self.mesh, placements).to_local()

    def local_alpha(self, alpha: Any) -> Any:
        """Alpha for the rows of this process: a number, or for all, each example or each position."""
        from torch.distributed.tensor import Replicate

        dims = alpha.dim() if isinstance(alpha, Tensor) else 0
        where = [p if p.is_shard() and p.dim < dims else Replicate() for p in self.of_positions()]
        return self.local(alpha, where)

    def local_call(self, call: Call) -> Call:
        """The call for the rows and, if it holds probabilities, the classes of this process."""
        from torch.distributed.tensor import Replicate

        _check_constants(call)
        positions = self.of_positions()
        call = call.replace(
            target=self.local(call.target, self.placements if call.soft() else positions),
            weight=self.local(call.weight, [Replicate()] * self.mesh.ndim),
            alpha=self.local_alpha(call.alpha),
            token_weight=self.local(call.token_weight, positions),
        )
        check_labels(call.target, self.shape[self.class_dim], call.ignore_index)
        return call

    def whole(self, values: Tensor) -> DTensor:
        """The DTensor of values of the rows of this process."""
        from torch.distributed.tensor import DTensor

        shape = self.shape[: self.class_dim] + self.shape[self.class_dim + 1 :]
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            values, self.mesh, self.of_positions(), run_check=False, shape=shape, stride=stride
        )

    def result(
        self, loss: Tensor, rows: RowStatistics | None, call: Call, positions: tuple[int, ...]
    ) -> tuple[DTensor, RowStatistics | None]:
        """Loss and statistics as DTensors, from those of this process, which has these positions."""
        from torch.distributed.tensor import DTensor, Partial, Replicate

        found = None
        if rows is not None:
            found = RowStatistics(torch.empty(0), call)
            for name in RowStatistics.NAMES:
                vars(found)[name] = self.whole(getattr(rows, name).reshape(positions))
        if call.reduction == "none":
            return self.whole(loss.reshape(positions)), found
        where = [Partial() if p.is_shard() else Replicate() for p in self.of_positions()]
        return DTensor.from_local(loss, self.mesh, where, run_check=False), found


def _layout(tensor: DTensor, class_dim: int) -> Layout:
    """The layout of a tensor, of which partial sums are to be replicated."""
    from torch.distributed.tensor import Replicate, Shard

    placements = [Replicate() if p.is_partial() else p for p in tensor.placements]
    if not all(type(p) in (Replicate, Shard) for p in placements):
        raise ValueError(f"Expected the placements Shard or Replicate, but got {placements}.")
    if tensor.device_mesh.get_coordinate() is None:
        raise ValueError("Expected this process to be in the mesh of the DTensor.")
    return Layout(tensor.device_mesh, placements, class_dim, shape_of(tensor))


def _cross_entropy(input: DTensor, call: Call, stats: bool) -> tuple[DTensor, Any]:
    """:func:`powergrad.cross_entropy` of a DTensor, and perhaps the statistics of its rows."""
    class_dim = 0 if input.dim() == 1 else 1
    layout = _layout(input, class_dim)

    def prepare() -> _Prepared:
        own = layout.local_call(check_call(input, call)[1])
        z = input.redistribute(layout.mesh, layout.placements)
        z = z.to_local(grad_placements=layout.placements)
        rows, own = as_rows(z, own)
        split = layout.split(z.shape[class_dim])
        facts = (input.dtype, _options(own, stats), split.total, len(rows))
        return split, ("cross_entropy", *facts), (z, rows, own)

    split, (z, rows, own) = agree(prepare, *layout.groups(), input.device)
    tell("powergrad.cross_entropy", input, call.alpha, call)
    loss, found = loss_of_rows(rows, own, split, stats)
    positions = shape_of(z)[:class_dim] + shape_of(z)[class_dim + 1 :]
    return layout.result(in_dtype(loss, z, own), found, own, positions)


class _LogSoftmax(torch.autograd.Function):
    """The log-softmax of rows of a part of the classes; one all-reduce in the backward pass.

    The largest logit of all is treated as that of the label is in the loss.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, alpha: Tensor, dtype: torch.dtype, split: Split) -> Tensor:
        z = input.to(torch.promote_types(dtype, torch.float32))
        top, at = _largest(z, 0)
        at, exists = at.long(), top > -INF
        d = z - top.where(exists, 0)
        p = _replaced(d.exp(), exists, at, 0.0).sum(1, keepdim=True)
        e = _replaced(power(d, alpha), exists, at, 0.0).sum(1, keepdim=True).to(p)
        mine = torch.stack([top, p, e, exists.to(p), hashes(len(z), p.dtype, alpha)])
        tops, p, e, others, hashed = gathered(mine, split.group).unbind(1)
        check_equal(hashed)
        top, owner = tops.amax(0), tops.argmax(0, keepdim=True)
        lower, others = (tops - top).where(others > 0, 0), others.scatter(0, owner, 0.0)
        p = ((p + others) * lower.exp()).sum(0)
        e = ((e + others) * (alpha * lower).exp()).sum(0).to(p)
        here = owner[0] == dist.get_rank(split.group)
        ctx.save_for_backward(input, alpha, top, e, here, at)
        ctx.split = split
        return (z - top - p.log1p()).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.split.refuse_second_derivatives()
        input, alpha, top, e, here, at = ctx.saved_tensors
        u = grads[0].to(top)
        at_top = u.gather(1, at).where(here, 0) if u.shape[1] else torch.zeros_like(top)
        sums = torch.stack([_replaced(u.clone(), here, at, 0.0).sum(1, keepdim=True), at_top])
        dist.all_reduce(sums, group=ctx.split.group)
        others, at_top = sums
        gradient = u - power(input.to(u) - top, alpha) * ((others + at_top) / (1 + e))
        gradient = _replaced(gradient, here, at, (at_top * e - others) / (1 + e))
        return gradient.to(input.dtype), None, None, None


def _log_softmax(input: DTensor, exponent: Tensor, dim: int, dtype: Any) -> DTensor:
    """:func:`powergrad.log_softmax` of a DTensor whose classes are split."""
    from torch.distributed.tensor import DTensor

    layout = _layout(input, dim)

    def prepare() -> _Prepared:
        z = input.redistribute(layout.mesh, layout.placements)
        z = z.to_local(grad_placements=layout.placements).movedim(dim, -1)
        rows, alpha = z.unsqueeze(0).flatten(0, -2), exponent
        if exponent.dim():
            alpha = exponent.expand(*input.shape[:dim], 1, *input.shape[dim + 1 :]).select(dim, 0)
            alpha = layout.local_alpha(alpha).reshape(-1, 1)
        split = layout.split(z.shape[-1])
        return split, ("log_softmax", input.dtype, dtype, split.total, len(rows)), (z, rows, alpha)

    group, _ = layout.groups()  # rows have no mean
    split, (z, rows, alpha) = agree(prepare, group, (), input.device)
    values = _LogSoftmax.apply(rows, alpha, dtype or input.dtype, split)
    values = values.reshape(z.shape).movedim(-1, dim)
    given = {"shape": input.shape, "stride": input.stride(), "run_check": False}
    return DTensor.from_local(values, layout.mesh, layout.placements, **given)


def _linear_cross_entropy(
    input: DTensor, linear_weight: DTensor, target: Tensor, stats: bool, **options: Any
) -> tuple[DTensor, Any]:
    """:func:`powergrad.linear_cross_entropy` of DTensors.

    The head is gathered over a dimension of the mesh that splits rows.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    mesh, last = input.device_mesh, input.dim() - 1
    if linear_weight.device_mesh != mesh:
        raise ValueError(
            f"Expected `linear_weight` to be on the mesh of `input`, {mesh}, but got "
            f"{linear_weight.device_mesh}."
        )
    rows = [Replicate() if p.is_shard(last) else p for p in _layout(input, last).placements]
    pairs = list(zip(rows, linear_weight.placements, strict=True))
    heads = [Shard(0) if p.is_shard(0) and not row.is_shard() else Replicate() for row, p in pairs]
    pairs = list(zip(rows, heads, strict=True))
    logits = [Shard(last) if head.is_shard() else row for row, head in pairs]
    layout = Layout(mesh, logits, last, (*shape_of(input)[:-1], linear_weight.shape[0]))
    # A process has the part of the gradient that its classes, or its rows, give.
    gradients = [Partial() if head.is_shard() else row for row, head in pairs]
    of_head = [Partial() if row.is_shard() else head for row, head in pairs]

    def prepare() -> _Prepared:
        whole, call = checked_call(input, linear_weight, target, **options)
        ways = ((rows, gradients), (heads, of_head), (heads, of_head))
        layer = [
            None if t is None else t.redistribute(mesh, where).to_local(grad_placements=of)
            for t, (where, of) in zip(whole, ways, strict=True)
        ]
        call, split = layout.local_call(call), layout.split(layer[1].shape[0])
        shape = (*layer[0].shape[:-1], split.count)
        call = call_for_rows(layer[0].new_empty(()).expand(shape), call, last)
        kept = 0 if call.soft() else int((call.target != call.ignore_index).sum())
        more = _options(call, stats, options["chunk_rows"], layer[0].requires_grad)
        facts = (input.dtype, more, split.total, (len(call.target), kept))
        return split, ("linear_cross_entropy", *facts), (layer, call)

    split, (layer, call) = agree(prepare, *layout.groups(), input.device, always=True)
    tell("powergrad.linear_cross_entropy", input, call.alpha, None, linear_weight)
    positions, wide = shape_of(layer[0])[:-1], torch.promote_types(layer[0].dtype, torch.float32)
    layer[0] = layer[0].unsqueeze(0).flatten(0, -2)
    found = RowStatistics.zeros(call, wide) if stats else None
    loss = InBlocks.apply(*layer, call, options["chunk_rows"], found, split)
    return layout.result(in_dtype(loss, input, call), found, call, positions)


OF_DTENSORS.update(
    cross_entropy=_cross_entropy,
    log_softmax=_log_softmax,
    linear_cross_entropy=_linear_cross_entropy,
)
