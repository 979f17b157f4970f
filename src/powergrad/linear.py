r"""The classifier head and its loss in blocks of rows, without holding all logits in memory.

For hidden states ``h`` (N, H) and a head ``W`` (C, H), ``b`` (C), one block of rows at a time:

    z = h W^T + b                            a block of logits, in one buffer
    z <- g (A p' - t)                        overwritten with their gradient (`powergrad.rows`)
    dh = z W,   dW += z^T h,   db += sum z

So the forward pass computes the gradients, up to the incoming gradient of the backward pass. It
needs memory for dW and dh, which are needed anyway, and for one block. Ignored rows take no part.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from powergrad.checks import (
    Call,
    check_call,
    check_floating,
    check_labels,
    is_plain,
    shape_of,
    values_readable,
    without_autocast,
)
from powergrad.compat import is_autocasting
from powergrad.loss import (
    Gate,
    LossOptions,
    cross_entropy,
    gated,
    loss_by_definition,
    statistics,
)
from powergrad.rows import RowStatistics, coefficients, reduced, write
from powergrad.transform import tell

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["linear_cross_entropy"]

BLOCK_BYTES = 22 << 20  # the largest block of logits
LEAST_ROWS = 128  # the fewest rows in a block, because each block rewrites dW
MULTIPLE = 16  # the rows in a block are a multiple of this, for which matrix products are tuned


class HeadOptions(LossOptions, total=False):
    linear_bias: Tensor | None
    weight: Tensor | None
    shift: bool
    chunk_rows: int | None


@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    alpha: float | Tensor,
    return_stats: Literal[False] = False,
    **options: Unpack[HeadOptions],
) -> Tensor: ...


@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    alpha: float | Tensor,
    return_stats: Literal[True],
    **options: Unpack[HeadOptions],
) -> tuple[Tensor, RowStatistics]: ...


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    alpha: float | Tensor,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,
    gate: Gate | None = None,
    zero_empty: bool = False,
    shift: bool = False,
    chunk_rows: int | None = None,
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, RowStatistics]:
    r"""``cross_entropy(F.linear(input, linear_weight, linear_bias), target)`` in blocks of logits.

    It is made for large vocabularies: the time is that of the matrix products, and the memory is
    that of the gradients of head and input plus one block of logits. Rows that are ignored cost
    nothing. With ``reduction="none"`` the backward pass recomputes the logits. Higher derivatives,
    ``torch.func`` transforms and ``torch.compile`` work, but hold all logits in memory.

    Args:
        input: Hidden states, of shape (..., H).
        linear_weight: The head, of shape (C, H).
        target: Class indices, of shape (...); or class probabilities, of shape (..., C).
        alpha: A number, at least 0; or a tensor of them: 0-d, or of shape (...).
        linear_bias: The bias of the head, of shape (C).
        weight: One weight per class, of shape (C).
        ignore_index: Positions with this class index contribute to neither value nor gradient.
        reduction: "mean", "sum" or "none".
        label_smoothing: The probability mass that is spread evenly over all classes.
        softcap: As in :func:`powergrad.cross_entropy`, and so are the next five.
        logit_scale: A factor of the logits.
        z_loss: The factor of the squared logsumexp of the logits.
        token_weight: One factor per row, of the shape of a ``target`` of class indices.
        gate: A function of the statistics of a block of rows that returns such factors.
        zero_empty: Whether a mean of no rows is 0 instead of NaN.
        shift: Whether the logits of a position predict the target of the next one, as in causal
            language models; the last position is ignored. Target and token weights are shifted
            here, the hidden states are not copied.
        chunk_rows: Rows per block. By default 22 MB of logits, but at least 128 rows.
        return_stats: Whether to also return the :class:`~powergrad.rows.RowStatistics`, which needs
            some more passes over each block of logits.

    Returns:
        The loss: 0-d, or of shape (...) for "none".

    Raises:
        ValueError: If a shape, range, label or option is not as described above.
        TypeError: If a dtype is not as described above.

    Example:
        >>> hidden = torch.randn(6, 8, requires_grad=True)
        >>> head = torch.nn.Linear(8, 1000)
        >>> target = torch.arange(6)
        >>> loss = linear_cross_entropy(
        ...     hidden, head.weight, target, alpha=0.3, linear_bias=head.bias
        ... )
        >>> loss.backward()
        >>> hidden.grad.shape, head.weight.grad.shape
        (torch.Size([6, 8]), torch.Size([1000, 8]))
    """
    leading = _check_head(input, linear_weight, linear_bias, chunk_rows)
    classes = linear_weight.shape[0]
    soft = isinstance(target, Tensor) and target.is_floating_point()
    if isinstance(target, Tensor) and shape_of(target) != leading + ((classes,) if soft else ()):
        raise ValueError(
            f"Expected `target` to have shape {leading}, or {(*leading, classes)} with class "
            f"probabilities, but got {shape_of(target)}."
        )
    for name, tensor in (("alpha", alpha), ("token_weight", token_weight)):
        if isinstance(tensor, Tensor) and tensor.dim() and shape_of(tensor) != leading:
            allowed = f"() or {leading}" if name == "alpha" else f"{leading}"
            raise ValueError(
                f"Expected `{name}` to have shape {allowed}, but got {shape_of(tensor)}."
            )
    if shift:
        if soft or not leading:
            raise ValueError("Expected `target` of shape (..., T) with class indices for `shift`.")
        target = _shifted(target, ignore_index)
        token_weight = None if token_weight is None else _shifted(token_weight, 0)
    hidden, head = input.reshape(-1, input.shape[-1]), linear_weight
    autocasting = is_autocasting(input.device.type)
    if autocasting:
        dtype = torch.get_autocast_dtype(input.device.type)
        hidden, linear_weight = hidden.to(dtype), linear_weight.to(dtype)
        linear_bias = None if linear_bias is None else linear_bias.to(dtype)
    rows = hidden.shape[0]
    call = Call(
        target.reshape(rows, classes) if soft else target.reshape(rows),
        weight,
        alpha.reshape(rows) if isinstance(alpha, Tensor) and alpha.dim() else alpha,
        ignore_index,
        label_smoothing,
        reduction,
        softcap,
        logit_scale,
        z_loss,
        None if token_weight is None else token_weight.reshape(rows),
        zero_empty,
    )
    _, call = check_call(hidden.new_empty(1, 1).expand(rows, classes), call)
    layer = (hidden, linear_weight, linear_bias)
    constants = [t for t in (call.target, weight, call.token_weight) if t is not None]
    tensors = [*constants, *(t for t in layer if t is not None)]
    found = None
    if any(t.requires_grad for t in constants) or not is_plain(*tensors):
        names = ("target", "weight", "alpha", *Call._fields[3:])
        options: Any = dict(zip(names, call, strict=True), gate=gate)
        loss, found = cross_entropy(F.linear(*layer), **options, return_stats=True)
    else:
        tell("powergrad.linear_cross_entropy", input, call.alpha, None, head)
        plan = _plan(call, classes, hidden.dtype, chunk_rows)
        found = RowStatistics.empty(call) if return_stats else None
        loss = _InBlocks.apply(*layer, call, plan, gate, found)
    if reduction == "none":
        loss = loss.reshape(leading)
    loss = loss if autocasting else loss.to(input.dtype)
    return loss if not return_stats or found is None else (loss, found.reshape(leading))


def _shifted(values: Tensor, last: float) -> Tensor:
    return torch.cat([values[..., 1:], torch.full_like(values[..., :1], last)], -1)


class Plan(NamedTuple):
    """Which rows are computed, and how many at a time."""

    rows: Tensor | None  # indices; None for all
    block_rows: int


def _plan(call: Call, classes: int, dtype: torch.dtype, chunk_rows: int | None) -> Plan:
    """Ignored rows are left out, before the matrix product."""
    rows = None
    if not check_labels(call.target, classes, call.ignore_index) and not call.soft:
        rows = (call.target != call.ignore_index).nonzero().squeeze(1)
    fitting = BLOCK_BYTES // (classes * dtype.itemsize)
    return Plan(rows, chunk_rows or max(LEAST_ROWS, fitting // MULTIPLE * MULTIPLE))


Layer = tuple[Tensor, Tensor, "Tensor | None"]  # hidden states, head, bias


def _check_head(
    input: Tensor, weight: Tensor, bias: Tensor | None, chunk_rows: int | None
) -> tuple[int, ...]:
    check_floating(input, "input")
    check_floating(weight, "linear_weight")
    if input.dim() == 0:
        raise ValueError("Expected `input` to have shape (..., H), but got ().")
    width = input.shape[-1]
    if weight.dim() != 2 or weight.shape[1] != width:
        raise ValueError(
            f"Expected `linear_weight` to have shape (C, {width}) for `input` of shape "
            f"{shape_of(input)}, but got {shape_of(weight)}."
        )
    if bias is not None:
        check_floating(bias, "linear_bias")
        if shape_of(bias) != (weight.shape[0],):
            raise ValueError(
                f"Expected `linear_bias` to have shape ({weight.shape[0]},), "
                f"but got {shape_of(bias)}."
            )
    for name, tensor in (("linear_weight", weight), ("linear_bias", bias)):
        if (
            tensor is not None
            and tensor.dtype != input.dtype
            and not is_autocasting(input.device.type)
        ):
            raise TypeError(
                f"Expected `{name}` to have the dtype of `input`, {input.dtype}, "
                f"but got {tensor.dtype}."
            )
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"Expected `chunk_rows` to be at least 1, but got {chunk_rows}.")
    return shape_of(input)[:-1]


class _InBlocks(torch.autograd.Function):
    """Computes the gradients in the forward pass, except for "none", where each row is scaled."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        bias: Tensor | None,
        call: Call,
        plan: Plan,
        gate: Gate | None,
        found: RowStatistics | None,
    ) -> Tensor:
        needed = ctx.needs_input_grad[:3]
        later = call.reduction == "none"
        wide = torch.promote_types(hidden.dtype, torch.float32)
        weights = None if gate is None else hidden.new_zeros(hidden.shape[0], dtype=wide)
        with without_autocast(hidden):
            loss, gradients = _over_blocks(
                (hidden, head, bias),
                call,
                plan,
                (False,) * 3 if later else needed,
                gate=gate,
                gate_weights=weights,
                found=found,
            )
        if weights is not None:
            tokens = weights if call.token_weight is None else weights * call.token_weight
            call = call.replace(token_weight=tokens)
        tensors, ctx.options = call.split()
        ctx.save_for_backward(hidden, head, bias, *gradients, *tensors)
        ctx.plan, ctx.later = plan, later
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (grad,), needed = grads, ctx.needs_input_grad[:3]
        saved = ctx.saved_tensors  # read once: a checkpoint refuses to unpack a tensor again
        (hidden, head, bias), gradients = saved[:3], saved[3:6]
        call, layer = Call.joined(saved[6:], ctx.options), (hidden, head, bias)
        if torch.is_grad_enabled() or (ctx.later and not is_plain(grad)):
            return *_by_definition(layer, call, needed, grad), *[None] * 4
        if ctx.later:
            with without_autocast(grad):
                _, gradients = _over_blocks(layer, call, ctx.plan, needed, scale=grad)
        elif not (values_readable(grad) and grad.item() == 1):
            gradients = [None if g is None else g * grad for g in gradients]
        dtype = hidden.dtype
        return *(None if g is None else g.to(dtype) for g in gradients), *[None] * 4


def _by_definition(
    layer: Layer, call: Call, needed: tuple[bool, ...], grad: Tensor
) -> list[Tensor | None]:
    """The gradients from all logits at once, for higher derivatives and batched gradients."""
    differentiated = torch.is_grad_enabled()
    with torch.enable_grad():
        if not differentiated:
            layer = tuple(  # pyright: ignore[reportAssignmentType]
                None if tensor is None else tensor.detach().requires_grad_(need)
                for tensor, need in zip(layer, needed, strict=True)
            )
        wanted = [t for t, need in zip(layer, needed, strict=True) if need and t is not None]
        loss = loss_by_definition(F.linear(*layer), call)
        results = iter(
            torch.autograd.grad(loss, wanted, grad.to(loss.dtype), create_graph=differentiated)
        )
    return [next(results) if need else None for need in needed]


def _over_blocks(
    layer: Layer,
    call: Call,
    plan: Plan,
    needed: tuple[bool, ...],
    *,
    scale: Tensor | None = None,
    gate: Gate | None = None,
    gate_weights: Tensor | None = None,
    found: RowStatistics | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """One pass over the blocks: the loss, and the gradients that are `needed`.

    `scale` is the incoming gradient of "none", one per row. `gate_weights` and `found` are filled.
    """
    hidden, head, bias = layer
    # Small p' would underflow in float16, so it is widened; bfloat16 is not.
    dtype = torch.float32 if hidden.dtype == torch.float16 else hidden.dtype
    hidden, head = hidden.to(dtype), head.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    # The gradients of the head are accumulated in float32 or wider.
    wide = torch.promote_types(dtype, torch.float32)
    rows = hidden.shape[0]
    d_hidden = torch.zeros_like(hidden) if needed[0] else None
    d_head = torch.zeros_like(head, dtype=wide) if needed[1] else None
    d_bias = torch.zeros_like(bias, dtype=wide) if needed[2] and bias is not None else None
    common = coefficients(call, wide, plan.rows is None)
    if not isinstance(common.g, Tensor):
        common = replace(common, g=hidden.new_full((rows, 1), common.g, dtype=wide))
    losses = hidden.new_zeros(rows, dtype=wide)
    count = rows if plan.rows is None else plan.rows.shape[0]
    buffer = hidden.new_empty(min(plan.block_rows, count), head.shape[0])
    for start in range(0, count, plan.block_rows):
        part: slice | Tensor = slice(start, min(start + plan.block_rows, count))
        z = buffer[: part.stop - start]
        if plan.rows is not None:
            part = plan.rows[part]
        h = hidden[part]
        if bias is None:
            torch.mm(h, head.t(), out=z)
        else:
            torch.addmm(bias, h, head.t(), out=z)
        factor = None if scale is None else scale[part]
        if gate is not None or found is not None:
            block = statistics(z, call.replace(target=call.target[part], token_weight=None))
            if gate is not None and gate_weights is not None:
                factor = gated(block.call, block, gate).token_weight
                gate_weights[part] = factor.to(gate_weights.dtype)  # pyright: ignore
            if found is not None:
                found.store(part, block)
        losses[part], _ = write(z, call, common, part, z, factor)
        if d_hidden is not None:
            d_hidden[part] = z @ head
        if d_head is not None:
            if d_head.dtype == dtype:
                d_head.addmm_(z.t(), h)
            else:
                d_head.add_(z.t() @ h)
        if d_bias is not None:
            d_bias.add_(z.sum(0, dtype=wide))
    return reduced(losses, call, common), [d_hidden, d_head, d_bias]
