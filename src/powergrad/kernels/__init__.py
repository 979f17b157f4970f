"""The optional C kernel: on CPU, cross-entropy and PowerGrad Transform's gradient in one pass.

``kernel.c`` is compiled to a library when the package is installed, if there is a compiler. The
library is loaded at its first use, unless ``POWERGRAD_NATIVE=0`` is in the environment.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import os
import struct
from pathlib import Path

import torch
from torch import Tensor

from powergrad.checks import REDUCTIONS, Call, check_labels, values_readable

__all__ = ["available", "best_level", "cross_entropy"]

ABI = 4  # as in kernel.c; a library with another number is not used

# The arguments in the order of kernel.c, as one struct: passing twenty by ctypes takes longer.
_CALL = struct.Struct("=qqqqqqqqdqdqqqqdddqq40x")
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def load(path: Path) -> ctypes.CDLL | None:
    """The library at `path`, ready to be called; None if it cannot be loaded or has another ABI."""
    try:
        library = ctypes.CDLL(str(path))
        if library.powergrad_abi() != ABI:
            return None
        function = library.powergrad_cross_entropy
        function.restype, function.argtypes = ctypes.c_int64, (ctypes.c_char_p,)
    except (OSError, AttributeError):
        return None
    return library


@functools.cache
def library() -> ctypes.CDLL | None:
    if os.environ.get("POWERGRAD_NATIVE") == "0":
        return None
    here = Path(__file__).parent
    built = [here / f"kernel{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    return next((kernel for path in built if path.exists() and (kernel := load(path))), None)


def available() -> bool:
    """Whether the C kernel was built for this machine and is not disabled."""
    return library() is not None


available._dynamo_marked_constant = True  # pyright: ignore  # see powergrad.compat


def best_level() -> int:
    """The best instruction set of this CPU: 0 the baseline; on x86-64 also 1 AVX2, 2 AVX-512."""
    kernel = library()
    return 0 if kernel is None else kernel.powergrad_best_level()


def cross_entropy(
    input: Tensor,
    call: Call,
    *,
    out: Tensor | None = None,
    threads: int | None = None,
    level: int = 9,
) -> tuple[Tensor, Tensor] | None:
    """The value of the loss and its gradient at the logits, as :mod:`powergrad.rows` defines them.

    `input` (N, C) and the target, class indices, must be plain (``checks.is_plain``), which is not
    checked again here. The gradient is written to `out`, which may be `input` itself. `threads`, by
    default PyTorch's, do not affect the result; `level` is the best instruction set to use. Returns
    None if the kernel is not available or does not support these tensors. Raises ValueError for a
    target that is neither a class nor ``ignore_index``, and MemoryError.
    """
    kernel = library()
    if kernel is None:
        return None
    target, weight, alpha, ignore_index, smoothing, reduction = call[:6]
    softcap, logit_scale, z_loss, zero_empty, _, tokens = call[6:]
    dtype = _DTYPES.get(input.dtype)
    if dtype is None or target.dtype != torch.int64 or not (input.is_cpu and target.is_cpu):
        return None
    shape, strides = input.shape, input.stride()
    if len(shape) != 2 or shape[1] == 0 or target.numel() != shape[0] or input.is_neg():
        return None
    rows, classes = shape
    if strides[1] != 1 and classes != 1:
        return None
    if out is not None and not (
        out.is_contiguous() and out.shape == input.shape and out.dtype == input.dtype
    ):
        return None
    alphas = alpha if isinstance(alpha, Tensor) else None
    if weight is not None and (weight := _vector(weight, classes, torch.float32)) is None:
        return None
    if tokens is not None and (tokens := _vector(tokens, rows, torch.float32)) is None:
        return None
    if alphas is not None and (alphas := _vector(alphas, rows, torch.float64)) is None:
        return None
    target = target.contiguous()
    value = input.new_empty(shape[:1] if reduction == "none" else (), dtype=torch.float32)
    grad = input.new_empty(rows, classes) if out is None else out
    arguments = _CALL.pack(
        rows,
        classes,
        input.data_ptr(),
        strides[0],
        dtype,
        target.data_ptr(),
        ignore_index,
        0 if weight is None else weight.data_ptr(),
        smoothing,
        0 if alphas is None else alphas.data_ptr(),
        alpha if alphas is None else 1.0,
        REDUCTIONS[reduction],
        value.data_ptr(),
        grad.data_ptr(),
        0 if tokens is None else tokens.data_ptr(),
        z_loss,
        softcap or 0.0,
        logit_scale,
        torch.get_num_threads() if threads is None else threads,
        level,
    )
    status = kernel.powergrad_cross_entropy(arguments)
    if status > 0:
        check_labels(target, classes, ignore_index)  # raises
    if status < 0:
        raise MemoryError(f"Could not allocate memory for a copy of a row of {classes} logits.")
    if zero_empty and value.isnan().all() and not (target != ignore_index).any():
        value.zero_()
    return value, grad


def _vector(values: Tensor, count: int, dtype: torch.dtype) -> Tensor | None:
    """One value per row or class for the library; None if it cannot read them."""
    if values.numel() not in (1, count) or not values_readable(values):
        return None
    as_needed = values.numel() == count and values.dtype == dtype and values.is_contiguous()
    if as_needed and not values.is_neg():  # the operations below take 2 microseconds
        return values
    return values.to(dtype).resolve_neg().reshape(-1).expand(count).contiguous()
