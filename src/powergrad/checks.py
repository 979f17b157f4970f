"""Argument checks of the public functions, with errors of the form "Expected ..., but got ...".

Shapes, dtypes and plain numbers are always checked. The values of a tensor are checked only on CPU
in eager mode: on an accelerator, reading them would force a synchronisation, and under
``torch.compile``, ``vmap`` or export there are no values to read.
"""

from __future__ import annotations

import math
import numbers
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from powergrad.compat import is_autocasting, is_batched, is_wrapped, nothing_traced

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}  # the numbers are PyTorch's


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


# With Triton's interpreter, CPU tensors go the way of a GPU's, whose values are never read.
INTERPRETED = os.environ.get("POWERGRAD_TRITON") == "interpret"
PLAIN = (Tensor, torch.nn.Parameter)


def is_plain(*tensors: Tensor) -> bool:
    """Whether `tensors` hold values and are traced by nothing but ordinary autograd."""
    if torch.compiler.is_compiling() or not nothing_traced():
        return False
    for tensor in tensors:  # a generator expression would cost as much as a small loss
        if type(tensor) not in PLAIN or is_wrapped(tensor) or is_batched(tensor):
            return False
    return True


def is_dtensor(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor, in eager code."""
    if type(tensor) in PLAIN or torch.compiler.is_compiling():
        return False
    module = sys.modules.get("torch.distributed.tensor")  # its import takes a second
    return module is not None and isinstance(tensor, module.DTensor)


def splits_classes(tensor: Any, dim: int) -> bool:
    """Whether `tensor` is a DTensor of which processes have parts of dimension `dim`."""
    return is_dtensor(tensor) and any(p.is_shard(dim) for p in tensor.placements)


def values_readable(tensor: Tensor) -> bool:
    """Whether reading the values of `tensor` needs no synchronisation and breaks no trace."""
    return tensor.is_cpu and not INTERPRETED and is_plain(tensor)


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """A context with autocast disabled: matrix products keep the dtype of their factors."""
    if not is_autocasting(tensor.device.type):
        return nullcontext()
    return torch.autocast(tensor.device.type, enabled=False)


def check_floating(tensor: Tensor, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"Expected `{name}` to be a tensor, but got {type(tensor).__name__}.")
    if not tensor.is_floating_point():
        raise TypeError(f"Expected `{name}` to be a floating-point tensor, but got {tensor.dtype}.")
    if shape is not None and tensor.shape != shape:
        raise ValueError(
            f"Expected `{name}` to have shape {tuple(shape)}, but got {shape_of(tensor)}."
        )
    return tensor


def check_dtype(tensor: Tensor | None, input: Tensor, name: str) -> None:
    """`tensor` has the dtype of `input`, unless autocast converts them."""
    if tensor is not None and tensor.dtype != input.dtype and not is_autocasting(input.device.type):
        raise TypeError(
            f"Expected `{name}` to have the dtype of `input`, {input.dtype}, "
            f"but got {tensor.dtype}."
        )


def check_dim(tensor: Tensor, dim: int, name: str) -> int:
    """Return `dim` as a non-negative index. A 0-d tensor counts as 1-d, as in PyTorch."""
    size = max(tensor.dim(), 1)
    if not -size <= dim < size:
        raise ValueError(
            f"Expected `dim` to be in [{-size}, {size - 1}] for `{name}` of shape "
            f"{shape_of(tensor)}, but got {dim}."
        )
    return dim % size


def check_probabilities(p: Tensor, name: str) -> Tensor:
    check_floating(p, name)
    if values_readable(p) and not bool((p >= 0).all()):
        raise ValueError(
            f"Expected `{name}` to hold probabilities, but got a negative or NaN value."
        )
    return p


def check_alpha(alpha: float | Tensor, tensor: Tensor, dim: int | None) -> Tensor:
    """`alpha` as a tensor that broadcasts over `tensor` and is constant along `dim`.

    With `dim` None there is no class dimension: one alpha per element is allowed.
    """
    if not isinstance(alpha, Tensor):
        return torch.tensor(check_number(alpha), dtype=torch.float64, device="cpu")
    if not alpha.is_floating_point():
        raise TypeError(f"Expected `alpha` to be floating-point, but got {alpha.dtype}.")
    if alpha.requires_grad:
        raise ValueError(
            "Expected `alpha` not to require grad, because no loss value depends on it; "
            "pass `alpha.detach()`."
        )
    if values_readable(alpha) and not bool(((alpha >= 0) & (alpha < math.inf)).all()):
        raise ValueError(
            f"Expected `alpha` to be finite and at least 0, but got {extremes(alpha)}."
        )
    if alpha.dim() == 0:
        return alpha
    if alpha.device != tensor.device:
        raise ValueError(f"Expected `alpha` to be on {tensor.device}, but got {alpha.device}.")
    shape = shape_of(tensor)
    per_position = shape if dim is None else shape[:dim] + shape[dim + 1 :]
    per_example = shape[:1] if dim != 0 else ()
    if shape_of(alpha) == per_position:
        return alpha if dim is None else alpha.unsqueeze(dim)
    if shape_of(alpha) == per_example:
        return alpha.reshape(-1, *[1] * (tensor.dim() - 1))
    shapes = dict.fromkeys([(), per_example, per_position])
    allowed = " or ".join(map(str, shapes))
    raise ValueError(f"Expected `alpha` to have shape {allowed}, but got {shape_of(alpha)}.")


def check_number(alpha: float, name: str = "alpha", positive: bool = False) -> float:
    number = alpha if type(alpha) is float else _real(alpha, name)
    if not 0 <= number < math.inf or (positive and number == 0):
        least = "positive" if positive else "at least 0"
        raise ValueError(f"Expected `{name}` to be finite and {least}, but got {alpha}.")
    return number


def check_threshold(value: object, name: str) -> float:
    threshold = _real(value, name)
    if not threshold > 0:  # NaN is not
        raise ValueError(
            f"Expected `{name}` to be positive (infinity clips nothing), but got {value}."
        )
    return threshold


def _real(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (numbers.Real, torch.SymFloat)):
        raise TypeError(f"Expected `{name}` to be a number, but got {type(value).__name__}.")
    return float(value)


def is_one(alpha: float | Tensor) -> bool:
    """Whether `alpha` is the number 1, at which PyTorch's own functions are called."""
    return not isinstance(alpha, Tensor) and alpha == 1


def extremes(tensor: Tensor) -> str:
    flat = tensor.detach().flatten()
    if flat.isnan().any():
        return "NaN"
    low, high = flat.min().item(), flat.max().item()
    return f"{low:g}" if low == high else f"values from {low:g} to {high:g}"


def check_reduction(reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"Expected `reduction` to be 'mean', 'sum' or 'none', but got {reduction!r}."
        )


def check_broadcasts(factor: Tensor, input: Tensor, name: str) -> None:
    shape, whole = shape_of(check_floating(factor, name)), shape_of(input)
    sizes = zip(reversed(shape), reversed(whole), strict=False)
    if len(shape) > len(whole) or any(size not in (1, most) for size, most in sizes):
        raise ValueError(
            f"Expected `{name}` to broadcast over `input` of shape {whole}, but got {shape}."
        )


class Call(NamedTuple):
    """The arguments of `cross_entropy` after the logits.

    It has no properties, and `replace` instead of `_replace`, for TorchDynamo of PyTorch 2.6.
    """

    target: Tensor
    weight: Tensor | None
    alpha: float | Tensor
    ignore_index: int = -100
    label_smoothing: float = 0.0
    reduction: str = "mean"
    softcap: float | None = None
    logit_scale: float = 1.0
    z_loss: float = 0.0
    zero_empty: bool = False
    gate: Callable[[Any], Tensor] | None = None
    token_weight: Tensor | None = None

    def soft(self) -> bool:
        """Whether `target` holds class probabilities."""
        return self.target.is_floating_point()

    def maps_logits(self) -> bool:
        return self.softcap is not None or self.logit_scale != 1

    def extended(self) -> bool:
        """Whether it uses an option that PyTorch's function does not have."""
        return bool(
            self.maps_logits() or self.z_loss or self.zero_empty or self.token_weight is not None
        )

    def replace(self, **changes: Any) -> Call:
        pairs = zip(_FIELDS, self, strict=True)
        return Call(*[changes.get(name, value) for name, value in pairs])

    def split(self) -> tuple[tuple[Tensor | None, ...], tuple[Any, ...]]:
        """The tensors, for ``ctx.save_for_backward``, and the rest."""
        alpha, rest = self.alpha, self[2:-1]
        if isinstance(alpha, Tensor):
            return (self.target, self.weight, self.token_weight, alpha), (None, *rest[1:])
        if self.weight is None and self.token_weight is None:
            return (self.target,), rest  # saving even None takes time
        return (self.target, self.weight, self.token_weight), rest

    @classmethod
    def joined(cls, tensors: Sequence[Tensor | None], rest: Sequence[Any]) -> Call:
        """The inverse of :meth:`split`."""
        target, weight, token_weight, alpha = (*tensors, None, None, None)[:4]
        alpha = rest[0] if alpha is None else alpha
        return cls(target, weight, alpha, *rest[1:], token_weight)  # pyright: ignore


_FIELDS = Call._fields


def check_call(input: Tensor, call: Call, class_dim: int | None = None) -> tuple[int, Call]:
    """Check everything except label values; return the class dimension and int64 labels."""
    check_floating(input, "input")
    check_options(call)
    shape, target, weight, alpha = input.shape, call.target, call.weight, call.alpha
    if not shape:
        raise ValueError("Expected `input` to have a class dimension, but got shape ().")
    if class_dim is None:
        class_dim = 0 if len(shape) == 1 else 1
    if shape[class_dim] == 0:
        raise ValueError(f"Expected `input` to have classes, but got shape {shape_of(input)}.")
    positions = shape[:class_dim] + shape[class_dim + 1 :]
    if not isinstance(target, Tensor):
        raise TypeError(f"Expected `target` to be a tensor, but got {type(target).__name__}.")
    soft = call.soft()
    if not soft and target.dtype not in (torch.int64, torch.uint8):
        raise TypeError(
            "Expected `target` to hold class indices (torch.int64 or torch.uint8) or class "
            f"probabilities (floating-point), but got {target.dtype}."
        )
    if target.shape != (shape if soft else positions):
        raise ValueError(
            f"Expected `target` to have shape {tuple(positions)} for class indices, or "
            f"{tuple(shape)} for class probabilities, but got {shape_of(target)}."
        )
    if soft and call.ignore_index >= 0:
        raise ValueError(
            "Expected `ignore_index` to be negative for a `target` of class probabilities, "
            f"but got {call.ignore_index}."
        )
    if weight is not None:
        check_floating(weight, "weight", (shape[class_dim],))
        if not soft:
            check_dtype(weight, input, "weight")
    if call.token_weight is not None:
        check_floating(call.token_weight, "token_weight", positions)
    if isinstance(alpha, Tensor):
        check_alpha(alpha, input, class_dim)
    elif type(alpha) is not float:
        call = call.replace(alpha=check_number(alpha))
    else:
        check_number(alpha)
    known = not isinstance(alpha, Tensor) or values_readable(alpha)
    if call.z_loss and known and not (alpha.all() if isinstance(alpha, Tensor) else alpha):
        raise ValueError("Expected `alpha` to be positive with `z_loss`, but got 0.")
    if target.dtype == torch.uint8:  # -100 would wrap to 156
        call = call.replace(target=target.long())
    return class_dim, call


def check_options(call: Call) -> None:
    """Check the numbers among the options, which a module knows before its first call."""
    check_reduction(call.reduction)
    check_number(call.z_loss, "z_loss")
    check_number(call.logit_scale, "logit_scale", positive=True)
    if call.softcap is not None:
        check_number(call.softcap, "softcap", positive=True)
    if not 0 <= (eps := call.label_smoothing) <= 1:
        raise ValueError(f"Expected `label_smoothing` to be in [0, 1], but got {eps}.")


def check_labels(target: Tensor, num_classes: int, ignore_index: int) -> bool:
    """Check the values of class indices where they can be read.

    Returns True if every label is known to differ from `ignore_index`.
    """
    if target.is_floating_point() or not values_readable(target) or not target.numel():
        return False
    low, high = target.aminmax()
    low, high = low.item(), high.item()
    if low >= 0 and high < num_classes:
        return not low <= ignore_index <= high
    labels = target[target != ignore_index]
    if labels.numel() and (labels.min() < 0 or labels.max() >= num_classes):
        raise ValueError(
            f"Expected labels in `target` to be in [0, {num_classes - 1}] or "
            f"`ignore_index` ({ignore_index}), but got {extremes(labels)}."
        )
    return False
