r"""The classifier head and its loss in blocks of rows, without holding all logits in memory.

For hidden states ``h`` (N, H) and a head ``W`` (C, H), ``b`` (C), one block of rows at a time:

    z = h W^T + b                            a block of logits, in one buffer
    z <- g (A p' - t)                        overwritten with their gradient (`powergrad.rows`)
    dh = z W,   dW += z^T h,   db += sum z

So the forward pass computes the gradients, up to the incoming gradient of the backward pass. It
needs memory for dW and dh, which are needed anyway, and for one block. Ignored rows take no part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powergrad.checks import (
    Call,
    check_call,
    check_dtype,
    check_floating,
    check_labels,
    is_dtensor,
    is_plain,
    shape_of,
    without_autocast,
)
from powergrad.compat import is_autocasting
from powergrad.loss import (
    CrossEntropyLoss,
    LossOptions,
    call_for_rows,
    gated,
    loss_and_statistics,
    loss_by_definition,
    multiplied,
    statistics,
)
from powergrad.rows import RowStatistics, coefficients, reduced, write
from powergrad.transform import OF_DTENSORS, tell

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["LinearCrossEntropyLoss", "linear_cross_entropy"]

BLOCK_BYTES = 22 << 20  # the largest block of logits
LEAST_ROWS = 128  # the fewest rows in a block, because each block rewrites dW
MULTIPLE = 16  # the rows in a block are a multiple of this, for which matrix products are tuned


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    alpha: float | Tensor,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    shift: bool = False,
    chunk_rows: int | None = None,
    return_stats: bool = False,
    **options: Unpack[LossOptions],
) -> Any:
    r"""``cross_entropy(F.linear(input, linear_weight, linear_bias), target)`` in blocks of logits.

    It is made for large vocabularies: the time is that of the matrix products, and the memory is
    that of the gradients of head and input plus one block of logits. Rows that are ignored cost
    nothing. With ``reduction="none"`` the backward pass recomputes the logits. Higher derivatives,
    ``torch.func`` transforms and ``torch.compile`` work, but hold all logits in memory.

    Args:
        input: Hidden states, of shape (..., H).
        linear_weight: The head, of shape (C, H).
        target: Class indices, of shape (...); or class probabilities, of shape (..., C).
        alpha: As in :func:`powergrad.cross_entropy`, with logits of shape (..., C).
        linear_bias: The bias of the head, of shape (C).
        weight: One weight per class, of shape (C).
        shift: Whether the logits of a position predict the target of the next one, as in causal
            language models; the last position is ignored. Target and token weights are shifted
            here, the hidden states are not copied.
        chunk_rows: Rows per block. By default 22 MB of logits, but at least 128 rows.
        return_stats: Whether to also return the :class:`~powergrad.rows.RowStatistics`, which needs
            some more passes over each block of logits.
        **options: Those of :func:`powergrad.cross_entropy`: ``ignore_index``, ``reduction``,
            ``label_smoothing``, ``softcap``, ``logit_scale``, ``z_loss``, ``token_weight``,
            ``gate``, which is called for each block of rows, and ``zero_empty``.

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
    layer: Layer = [input, linear_weight, linear_bias]
    call = Call(target, weight, alpha, **options)
    if is_dtensor(input) and is_dtensor(linear_weight):
        of_dtensors = OF_DTENSORS["linear_cross_entropy"]
        loss, rows = of_dtensors(layer, call, shift, chunk_rows, return_stats)
        return (loss, rows) if return_stats else loss
    layer, call = checked_head(layer, call, shift, chunk_rows)
    leading, width = shape_of(input)[:-1], input.shape[-1]
    logits = layer[0].new_empty(()).expand(*leading, linear_weight.shape[0])  # their shape
    layer = [layer[0].reshape(-1, width), *layer[1:]]
    call = call_for_rows(logits, call, len(leading))
    constants = [t for t in (call.target, weight, call.token_weight) if t is not None]
    rows = None
    if any(t.requires_grad for t in constants) or not is_plain(
        *constants, *(t for t in layer if t is not None)
    ):
        loss, rows = loss_and_statistics(F.linear(*layer), call)
    else:
        tell("powergrad.linear_cross_entropy", input, call.alpha, None, linear_weight)
        wide = torch.promote_types(logits.dtype, torch.float32)
        rows = RowStatistics.zeros(call, wide) if return_stats else None
        loss = InBlocks.apply(*layer, call, chunk_rows, rows, None)
    if call.reduction == "none":
        loss = loss.reshape(leading)
    loss = loss if is_autocasting(input.device.type) else loss.to(input.dtype)
    return (loss, rows.reshape(leading)) if return_stats and rows is not None else loss


def checked_head(
    layer: Layer, call: Call, shift: bool, chunk_rows: int | None
) -> tuple[Layer, Call]:
    """The tensors of the layer, as autocast converts them, and the call for its logits."""
    hidden, linear_weight, linear_bias = layer
    check_floating(hidden, "input")
    if hidden.dim() == 0:
        raise ValueError("Expected `input` to have shape (..., H), but got ().")
    leading, width = shape_of(hidden)[:-1], hidden.shape[-1]
    check_floating(linear_weight, "linear_weight")
    if linear_weight.dim() != 2 or linear_weight.shape[1] != width:
        raise ValueError(
            f"Expected `linear_weight` to have shape (C, {width}) for `input` of shape "
            f"{shape_of(hidden)}, but got {shape_of(linear_weight)}."
        )
    classes = linear_weight.shape[0]
    if linear_bias is not None:
        check_floating(linear_bias, "linear_bias", (classes,))
        check_dtype(linear_bias, hidden, "linear_bias")
    check_dtype(linear_weight, hidden, "linear_weight")
    if is_dtensor(hidden) != is_dtensor(linear_weight):  # whose gradients have to be added up?
        raise TypeError(
            "Expected `linear_weight` and `input` to be both plain tensors or both DTensors, but "
            f"got {type(linear_weight).__name__} and {type(hidden).__name__}. If FSDP2 has sharded "
            "the head, compute the loss in a module that FSDP2 gathers, such as "
            "`powergrad.LinearCrossEntropyLoss`; or, after the forward pass of the sharded model "
            "that the head is a part of, call `head.unshard()`. Do not pass "
            "`head.weight.full_tensor()`: the gradients of the processes would not be added up."
        )
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"Expected `chunk_rows` to be at least 1, but got {chunk_rows}.")
    if is_autocasting(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        layer = [None if t is None else t.to(dtype) for t in layer]
    logits = layer[0].new_empty(()).expand(*leading, classes)  # their shape
    _, call = check_call(logits, call, len(leading))
    if shift:
        if call.soft() or not leading:
            raise ValueError("Expected `target` of shape (..., T) with class indices for `shift`.")
        tokens = call.token_weight
        call = call.replace(
            target=_shifted(call.target, call.ignore_index),
            token_weight=None if tokens is None else _shifted(tokens, 0),
        )
    return layer, call


def _shifted(values: Tensor, last: float) -> Tensor:
    return torch.cat([values[..., 1:], torch.full_like(values[..., :1], last)], -1)


class LinearCrossEntropyLoss(CrossEntropyLoss):
    r"""``nn.LinearCrossEntropyLoss`` with PowerGrad Transform: head and loss as one module.

    It computes :func:`linear_cross_entropy` of its submodule ``linear``, the head, whose parameters
    have the names of PyTorch's module. ``fully_shard(loss)`` (FSDP2) shards them: the hooks of the
    module gather the head before the loss, and add up its gradients over the processes.

    Args:
        in_features: The size H of the hidden states.
        num_classes: The number of classes C.
        alpha: As in :func:`cross_entropy`; it can be set at any time.
        bias: Whether the head has a bias.
        device: The device of the head.
        dtype: The dtype of the head.
        weight: One weight per class; a buffer, as in PyTorch.
        shift: As in :func:`linear_cross_entropy`.
        chunk_rows: As in :func:`linear_cross_entropy`.
        **options: As in :class:`CrossEntropyLoss`.

    Raises:
        ValueError: If ``alpha``, ``reduction`` or another option is out of range.

    Example:
        >>> criterion = LinearCrossEntropyLoss(8, 1000, alpha=0.3)
        >>> criterion(torch.randn(6, 8), torch.arange(6)).backward()
        >>> criterion.linear.weight.grad.shape
        torch.Size([1000, 8])
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        alpha: float | Tensor,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weight: Tensor | None = None,
        shift: bool = False,
        chunk_rows: int | None = None,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(alpha, weight, **options)
        self.linear = nn.Linear(in_features, num_classes, bias, device, dtype)
        self.options |= {"shift": shift, "chunk_rows": chunk_rows}

    def forward(
        self,
        input: Tensor,
        target: Tensor,
        token_weight: Tensor | None = None,
        *,
        return_stats: bool = False,
    ) -> Any:
        """The loss of `input` for `target`, see :func:`linear_cross_entropy`."""
        weight, bias = self.linear.weight, self.linear.bias
        more = {"linear_bias": bias, "return_stats": return_stats}
        return linear_cross_entropy(input, weight, target, **more, **self._arguments(token_weight))


Layer = Sequence[Any]  # hidden states, head, bias or None


class InBlocks(torch.autograd.Function):
    """Computes the gradients in the forward pass, except for "none", where each row is scaled.

    With a split of the classes over processes, those of the hidden states are this process's part
    of a sum; for "none", what the processes exchanged is kept.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *layer, call, chunk_rows, found, split = arguments
        later = call.reduction == "none"
        needed = (False,) * 3 if later else ctx.needs_input_grad[:3]
        with without_autocast(layer[0]):
            loss, gradients, call, exchanged = _over_blocks(
                layer, call, chunk_rows, needed, split, found
            )
        tensors, ctx.options = call.split()
        ctx.save_for_backward(*layer, *gradients, exchanged, *tensors)
        ctx.chunk_rows, ctx.later, ctx.split = chunk_rows, later, split
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        grad, needed = grads[0], ctx.needs_input_grad[:3]
        saved = ctx.saved_tensors  # read once: a checkpoint refuses to unpack a tensor again
        layer, gradients, call = saved[:3], saved[3:6], Call.joined(saved[7:], ctx.options)
        if ctx.split is not None:
            refuse_second_derivatives()
        elif torch.is_grad_enabled() or (ctx.later and not is_plain(grad)):
            return *_by_definition(layer, call, needed, grad), *[None] * 4
        if ctx.later:
            with without_autocast(grad):
                _, gradients, *_ = _over_blocks(
                    layer, call, ctx.chunk_rows, needed, ctx.split, scale=grad, exchanged=saved[6]
                )
        else:
            gradients = [None if g is None else multiplied(g, grad, True) for g in gradients]
        dtype = layer[0].dtype
        return *(None if g is None else g.to(dtype) for g in gradients), *[None] * 4


def refuse_second_derivatives() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "Second derivatives (`create_graph=True`) of a DTensor's loss, or of classes that are "
            "split over processes, are not supported. Use `logits.full_tensor()`."
        )


def _by_definition(
    layer: Layer, call: Call, needed: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """The gradients from all logits at once, for higher derivatives and batched gradients."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        layer = [None if t is None else t.view_as(t) for t in layer]  # one may depend on another
        loss = loss_by_definition(F.linear(*layer), call)
        wanted = [t for t, need in zip(layer, needed, strict=True) if need and t is not None]
        results = torch.autograd.grad(loss, wanted, grad.to(loss.dtype), create_graph=create_graph)
    return [results[sum(needed[:i])] if need else None for i, need in enumerate(needed)]


def _over_blocks(
    layer: Layer,
    call: Call,
    chunk_rows: int | None,
    needed: Sequence[bool],
    split: Any,
    found: RowStatistics | None = None,
    scale: Tensor | None = None,
    exchanged: Any = None,
) -> tuple[Tensor, list[Tensor | None], Call, Any]:
    """One pass over the blocks: the loss; the gradients that are `needed`; the call without gate.

    Ignored rows are left out, before the matrix product. `found` is filled. `split` is a
    `powergrad.parallel.Split` of the classes, or None; what processes have `exchanged` is returned.
    For "none", a second pass takes it, and `scale`, the incoming gradient of each row.
    """
    given = layer[0].dtype
    # Small p' would underflow in float16, so it is widened; bfloat16 is not.
    dtype = torch.float32 if given == torch.float16 else given
    widened: Layer = [None if t is None else t.to(dtype) for t in layer]
    hidden, head, bias = widened
    # The gradients of the head are accumulated in float32 or wider.
    wide = torch.promote_types(dtype, torch.float32)
    rows, classes = hidden.shape[0], head.shape[0] if split is None else split.total
    d_hidden = torch.zeros_like(hidden) if needed[0] else None
    d_head = torch.zeros_like(head, dtype=wide) if needed[1] else None
    d_bias = torch.zeros_like(bias, dtype=wide) if needed[2] else None
    kept, count = None, rows
    if not check_labels(call.target, classes, call.ignore_index) and not call.soft():
        kept = (call.target != call.ignore_index).nonzero().squeeze(1)
        count = len(kept)
    common = coefficients(call, wide, kept is None, None if split is None else split.sum_over_rows)
    if not isinstance(common.g, Tensor):
        common = replace(common, g=hidden.new_full((rows, 1), common.g, dtype=wide))
    gates = None if call.gate is None else hidden.new_zeros(rows, dtype=wide)
    losses = hidden.new_zeros(rows, dtype=wide)
    if split is not None and exchanged is None:
        exchanged = hidden.new_zeros(4, rows, dtype=wide)
    stats = gates is not None or found is not None
    largest = classes if split is None else split.largest
    fitting = BLOCK_BYTES // (largest * given.itemsize)
    block_rows = chunk_rows or max(LEAST_ROWS, fitting // MULTIPLE * MULTIPLE)
    buffer = hidden.new_empty(min(block_rows, count), head.shape[0])
    for start in range(0, count, block_rows):
        part: slice | Tensor = slice(start, min(start + block_rows, count))
        z = buffer[: part.stop - start]
        if kept is not None:
            part = kept[part]
        h, factor, compute = hidden[part], None, None
        block: Any = None
        if bias is None:
            torch.mm(h, head.t(), out=z)
        else:
            torch.addmm(bias, h, head.t(), out=z)
        own = call.replace(target=call.target[part], token_weight=None)
        if split is not None:
            if scale is None:
                exchanged[:, part], block = split.exchange(z, own, common.of(part), stats)
            compute = partial(split.gradient, exchanged[:, part])
        elif stats:
            block = statistics(z, own, 1)
        if gates is not None:
            factor = gates[part] = gated(own, block).to(wide)
        if found is not None:
            found.store(part, block)
        if scale is not None:
            factor = scale[part]
        losses[part], _ = write(z, call, common, part, z, factor, compute)
        if d_hidden is not None:
            d_hidden[part] = z @ head
        if d_head is not None:
            if d_head.dtype == dtype:
                d_head.addmm_(z.t(), h)
            else:
                d_head.add_(z.t() @ h)
        if d_bias is not None:
            d_bias.add_(z.sum(0, dtype=wide))
    if gates is not None:
        tokens = gates if call.token_weight is None else gates * call.token_weight
        call = call.replace(token_weight=tokens, gate=None)
    return reduced(losses, call, common), [d_hidden, d_head, d_bias], call, exchanged
