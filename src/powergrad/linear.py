r"""The classifier head and its loss in blocks of rows, without holding all logits in memory.

For hidden states ``h`` (N, H) and a head ``W`` (C, H), ``b`` (C), one block of rows at a time:

    z = h W^T + b                            a block of logits, in one buffer
    z <- m p' - w q                          overwritten with their gradient (`powergrad._rows`)
    dh = z W,   dW += z^T h,   db += sum z

So the forward pass computes the gradients, up to the incoming gradient of the backward pass. It
needs memory for dW and dh, which are needed anyway, and for one block.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from powergrad import _native
from powergrad._check import (
    Arguments,
    autocasting,
    check_cross_entropy,
    check_floating,
    check_labels,
    is_batched,
    is_plain,
    shape_of,
    without_autocast,
)
from powergrad._rows import divisors_of_mean, loss_and_gradient
from powergrad.loss import loss_of

__all__ = ["linear_cross_entropy"]

BLOCK_BYTES = 22 << 20  # the largest block of logits
LEAST_ROWS = 128  # the fewest rows in a block, because each block rewrites dW
MULTIPLE = 16  # the rows in a block are a multiple of this, for which matrix products are tuned


@overload
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
    chunk_rows: int | None = None,
    return_accuracy: Literal[False] = False,
) -> Tensor: ...


@overload
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
    chunk_rows: int | None = None,
    return_accuracy: Literal[True],
) -> tuple[Tensor, Tensor]: ...


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
    chunk_rows: int | None = None,
    return_accuracy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""``cross_entropy(F.linear(input, linear_weight, linear_bias), target)`` in blocks of logits.

    It is made for large vocabularies: the time is that of the matrix products, and the memory is
    that of the gradients of head and input plus one block of logits. With ``reduction="none"`` the
    backward pass recomputes the logits. Higher derivatives, ``torch.func`` transforms and
    ``torch.compile`` work, but hold all logits in memory.

    Args:
        input: Hidden states, of shape (..., H).
        linear_weight: The head, of shape (C, H).
        target: Class indices, of shape (...); or class probabilities, of shape (..., C).
        alpha: A number in [0, 1]; or a tensor of them: 0-d, or of shape (...).
        linear_bias: The bias of the head, of shape (C).
        weight: One weight per class, of shape (C).
        ignore_index: Positions with this class index contribute to neither value nor gradient.
        reduction: "mean", "sum" or "none".
        label_smoothing: The probability mass that is spread evenly over all classes.
        chunk_rows: Rows per block. By default 22 MB of logits, but at least 128 rows.
        return_accuracy: Whether to also return the top-1 accuracy over non-ignored rows, which
            needs one more pass over each block of logits.

    Returns:
        The loss: 0-d, or of shape (...) for "none". With `return_accuracy`, also the accuracy, 0-d.

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
    hidden = input.reshape(-1, input.shape[-1])
    if autocasting(input):
        dtype = torch.get_autocast_dtype(input.device.type)
        hidden, linear_weight = hidden.to(dtype), linear_weight.to(dtype)
        linear_bias = None if linear_bias is None else linear_bias.to(dtype)
    rows = hidden.shape[0]
    target = target.reshape(rows, classes) if soft else target.reshape(rows)
    if isinstance(alpha, Tensor) and alpha.dim():
        if shape_of(alpha) != leading:
            raise ValueError(
                f"Expected `alpha` to have shape () or {leading}, but got {shape_of(alpha)}."
            )
        alpha = alpha.reshape(rows)
    arguments = Arguments(target, weight, alpha, ignore_index, label_smoothing, reduction)
    logits_like = hidden.new_empty(1, 1).expand(rows, classes)
    _, arguments = check_cross_entropy(logits_like, arguments)
    all_valid = check_labels(arguments.target, classes, ignore_index)

    fitting = BLOCK_BYTES // (classes * hidden.dtype.itemsize)
    block_rows = chunk_rows or max(LEAST_ROWS, fitting // MULTIPLE * MULTIPLE)
    with_gradients = reduction != "none" and torch.is_grad_enabled()
    plan = Plan(block_rows, all_valid, return_accuracy, with_gradients)
    layer = (hidden, linear_weight, linear_bias)
    constants = [t for t in (target, weight) if t is not None]
    tensors = [*constants, *(t for t in layer if t is not None)]
    if any(t.requires_grad for t in constants) or not is_plain(*tensors):
        loss, accuracy = _whole(layer, arguments, return_accuracy)
    else:
        loss, accuracy = _InBlocks.apply(*layer, arguments, plan)
    if reduction == "none":
        loss = loss.reshape(leading)
    if not autocasting(input):
        loss = loss.to(input.dtype)
    return loss if accuracy is None else (loss, accuracy)


class Plan(NamedTuple):
    """Options of the pass over the blocks."""

    rows: int  # per block
    all_valid: bool  # whether it is known that no label is `ignore_index`
    with_accuracy: bool
    with_gradients: bool  # in the forward pass


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
        if tensor is not None and tensor.dtype != input.dtype and not autocasting(input):
            raise TypeError(
                f"Expected `{name}` to have the dtype of `input`, {input.dtype}, "
                f"but got {tensor.dtype}."
            )
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"Expected `chunk_rows` to be at least 1, but got {chunk_rows}.")
    return shape_of(input)[:-1]


def _whole(
    layer: Layer, arguments: Arguments, with_accuracy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The reference: all logits at once."""
    logits = F.linear(*layer)
    loss = loss_of(logits, arguments)
    if not with_accuracy:
        return loss, None
    correct, counted = _correct(logits, arguments.target, arguments.ignore_index)
    return loss, correct / counted


def _correct(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The number of correctly classified rows, and the number of rows not ignored."""
    if target.is_floating_point():
        correct = logits.argmax(1) == target.argmax(1)
        return correct.sum(), torch.ones_like(correct).sum()
    counted = target != ignore_index
    return ((logits.argmax(1) == target) & counted).sum(), counted.sum()


class _InBlocks(torch.autograd.Function):
    """Computes the gradients in the forward pass, except for "none", where each row is scaled.

    The buffers are used once, as in `powergrad.loss`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        bias: Tensor | None,
        arguments: Arguments,
        plan: Plan,
    ) -> tuple[Tensor, Tensor | None]:
        reduction = arguments.reduction
        in_forward = plan.with_gradients and any(ctx.needs_input_grad[:3])
        needed = ctx.needs_input_grad[:3] if in_forward else (False,) * 3
        with without_autocast(hidden):
            losses, accuracy, gradients = _over_blocks(
                (hidden, head, bias), arguments, plan, needed
            )
        ctx.save_for_backward(hidden, head, bias, arguments.target, arguments.weight)
        ctx.options, ctx.plan = arguments[2:], plan
        ctx.gradients = gradients if in_forward else None
        if accuracy is not None:
            ctx.mark_non_differentiable(accuracy)
        if reduction == "none":
            return losses, accuracy
        if reduction == "mean":
            divisor, ctx.divisor = divisors_of_mean(arguments, plan.all_valid)
            return losses.sum() / divisor, accuracy
        return losses.sum(), accuracy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        grad, needed = grads[0], ctx.needs_input_grad[:3]
        saved = ctx.saved_tensors  # read once, because a checkpoint recomputes them at each access
        layer, arguments = saved[:3], Arguments(*saved[3:], *ctx.options)
        if torch.is_grad_enabled() or is_batched(grad):
            results = iter(_gradients_of_whole(layer, arguments, needed, grad))
            return *(next(results) if need else None for need in needed), None, None
        gradients, ctx.gradients = ctx.gradients, None
        if arguments.reduction == "mean":
            grad = grad / ctx.divisor
        if gradients is None:
            plan = ctx.plan._replace(with_accuracy=False)
            with without_autocast(grad):
                _, _, gradients = _over_blocks(layer, arguments, plan, needed, grad)
        else:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(grad)
        dtype = layer[0].dtype
        return *(None if tensor is None else tensor.to(dtype) for tensor in gradients), None, None


def _gradients_of_whole(
    layer: Layer, arguments: Arguments, needed: tuple[bool, ...], grad: Tensor
) -> tuple[Tensor, ...]:
    """The gradients from all logits at once, for higher derivatives and batched gradients."""
    differentiated = torch.is_grad_enabled()
    with torch.enable_grad():
        if not differentiated:
            leaves = (
                None if tensor is None else tensor.detach().requires_grad_(need)
                for tensor, need in zip(layer, needed, strict=True)
            )
            layer = cast(Layer, tuple(leaves))
        wanted = [t for t, need in zip(layer, needed, strict=True) if need and t is not None]
        loss, _ = _whole(layer, arguments)
        return torch.autograd.grad(loss, wanted, grad, create_graph=differentiated)


def _over_blocks(
    layer: Layer,
    arguments: Arguments,
    plan: Plan,
    needed: tuple[bool, ...],
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
    """One pass over the blocks: losses, accuracy, and the gradients that are `needed`.

    `scale` is the incoming gradient, one per row or one for all; None means 1.
    """
    hidden, head, bias = layer
    target, alpha, ignore_index = arguments.target, arguments.alpha, arguments.ignore_index
    # Small p' would underflow in float16, so it is widened; bfloat16 is not.
    dtype = torch.float32 if hidden.dtype == torch.float16 else hidden.dtype
    hidden, head = hidden.to(dtype), head.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    # The gradients of the head are accumulated in float32 or wider.
    wide = torch.promote_types(dtype, torch.float32)
    d_hidden = torch.empty_like(hidden) if needed[0] else None
    d_head = torch.zeros_like(head, dtype=wide) if needed[1] else None
    d_bias = torch.zeros_like(bias, dtype=wide) if needed[2] and bias is not None else None
    losses = hidden.new_empty(hidden.shape[0], dtype=wide)
    block = hidden.new_empty(min(plan.rows, hidden.shape[0]), head.shape[0])
    correct = counted = torch.zeros((), dtype=torch.int64, device=hidden.device)
    for start in range(0, hidden.shape[0], plan.rows):
        part = slice(start, start + plan.rows)
        h, y = hidden[part], target[part]
        z = block[: h.shape[0]]
        if bias is None:
            torch.mm(h, head.t(), out=z)
        else:
            torch.addmm(bias, h, head.t(), out=z)
        if plan.with_accuracy:
            block_correct, block_counted = _correct(z, y, ignore_index)
            correct, counted = correct + block_correct, counted + block_counted
        a = alpha[part] if isinstance(alpha, Tensor) and alpha.dim() else alpha
        block_arguments = arguments._replace(target=y, alpha=a, reduction="none")
        losses[part], factor = _block(z, block_arguments, plan.all_valid)
        if not any(needed):
            continue
        if scale is not None:
            row_scale = scale[part].unsqueeze(1) if scale.dim() else scale.expand(h.shape[0], 1)
            factor = row_scale if factor is None else row_scale * factor
        factor = None if factor is None else factor.to(dtype)
        if d_hidden is not None:
            torch.mm(z, head, out=d_hidden[part])
            if factor is not None:
                d_hidden[part].mul_(factor)
        if d_head is not None:
            weighted = h if factor is None else h * factor
            if d_head.dtype == dtype:
                d_head.addmm_(z.t(), weighted)
            else:
                d_head.add_(z.t() @ weighted)
        if d_bias is not None:
            ones = z.new_ones(h.shape[0], 1) if factor is None else factor
            d_bias.add_((z.t() @ ones).squeeze(1))
    accuracy = correct / counted if plan.with_accuracy else None
    return losses, accuracy, [d_hidden, d_head, d_bias]


def _block(z: Tensor, arguments: Arguments, all_valid: bool) -> tuple[Tensor, Tensor | None]:
    """The losses of the rows and the factors of their gradients, which overwrite the logits `z`."""
    native = _native.cross_entropy(z, *arguments, out=z)
    if native is not None:
        return native[0], None
    losses, _, factor, _ = loss_and_gradient(z, arguments, out=z, all_valid=all_valid)
    return losses, factor
