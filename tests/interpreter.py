"""What Triton's interpreter lacks for a test that can be trusted.

It truncates float32 to bfloat16 where hardware rounds to nearest; it reads and writes outside
tensors without a word; and its exponentials are numpy's, exact to an ulp. Written for Triton 3.9.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

LOG2E = np.float32(1.4426950408889634)

np.seterr(all="ignore")  # infinities and NaN are what they are


def round_to_nearest() -> None:
    """Convert float32 to bfloat16 as hardware does, and back, denormals included."""
    original = interpreter._convert_float

    def convert(value: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) == (tl.float32, tl.bfloat16):
            bits = np.ascontiguousarray(value, dtype=np.float32).view(np.uint32)
            nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
            rounded = np.where(np.isnan(bits.view(np.float32)), 0x7FC0, nearest)
            return rounded.astype(np.uint16).reshape(value.shape)
        if (source, target) == (tl.bfloat16, tl.float32):
            return (np.ascontiguousarray(value).astype(np.uint32) << 16).reshape(value.shape)
        return original(value, source, target, mode)

    interpreter._convert_float = convert


@contextlib.contextmanager
def replaced(owner: type, **functions: Any) -> Iterator[None]:
    saved = {name: getattr(owner, name) for name in functions}
    for name, function in functions.items():
        setattr(owner, name, function)
    try:
        yield
    finally:
        for name, function in saved.items():
            setattr(owner, name, function)


@contextlib.contextmanager
def watched() -> Iterator[Counter[str]]:
    """Count the bytes loaded and stored; raise if an address is in no argument's memory."""
    spans: list[tuple[int, int]] = []
    moved: Counter[str] = Counter()
    call = GridExecutor.__call__
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [a for a in (*args, *kwargs.values()) if hasattr(a, "untyped_storage")]
        spans[:] = [_addresses(tensor) for tensor in tensors if tensor.numel()]
        return call(self, *args, **kwargs)

    def note(kind: str, pointers: Any, mask: Any) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        used = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
        moved[kind] += used.size * size
        inside = np.zeros(used.shape, bool)
        for begin, end in spans:
            inside |= (used >= begin) & (used + size <= end)
        if not inside.all():
            raise IndexError(f"A {kind} reaches {used[~inside][0]:#x}, outside the tensors.")

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        note("load", pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        note("store", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    with (
        replaced(GridExecutor, __call__=launch),
        replaced(
            InterpreterBuilder, create_masked_load=checked_load, create_masked_store=checked_store
        ),
    ):
        yield moved


def _addresses(tensor: Any) -> tuple[int, int]:
    """The first address of a tensor's elements, and the one after the last."""
    begin, item = tensor.data_ptr(), tensor.element_size()
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (reach + 1) * item


@contextlib.contextmanager
def rough_exponentials(seed: int) -> Iterator[None]:
    """Exponentials as inexact as hardware's: 2 ulp, a rounded product, denormals flushed to 0.

    The logarithm is exact only absolutely. 2^0 is 1 on hardware, too.
    """
    rng = np.random.default_rng(seed)

    def power(y: Any) -> Any:
        value = np.exp2(y) * np.where(y == 0, 1, 1 + rng.uniform(-2, 2, np.shape(y)) * 2.0**-23)
        return np.where(np.abs(value) < 2.0**-126, 0, value).astype(np.float32)

    def exp(self: Any, x: Any) -> Any:
        return TensorHandle(power((x.data * LOG2E).astype(np.float32)), x.dtype.scalar)

    def exp2(self: Any, x: Any) -> Any:
        return TensorHandle(power(x.data), x.dtype.scalar)

    def log(self: Any, x: Any) -> Any:
        error = rng.uniform(-1, 1, np.shape(x.data)) * 2.0**-22
        return TensorHandle((np.log(x.data) + error).astype(np.float32), x.dtype.scalar)

    with replaced(InterpreterBuilder, create_exp=exp, create_exp2=exp2, create_log=log):
        yield
