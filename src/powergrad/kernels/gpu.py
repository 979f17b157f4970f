"""The Triton kernels from Python: launches, the choice of tile, and a check before first use.

They serve tensors on CUDA and ROCm devices where Triton is installed. ``POWERGRAD_TRITON=0``
switches them off; ``POWERGRAD_TRITON=interpret`` sends CPU tensors through them, by Triton's
interpreter, for tests. Triton is not imported before a tensor needs it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
import warnings
from contextlib import nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from powergrad._version import __version__

__all__ = ["Options", "Tile", "row_gradients", "row_losses", "tile", "usable"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def setting() -> str:
    """``POWERGRAD_TRITON``: "0", "interpret", or "1" if Triton is installed."""
    chosen = os.environ.get("POWERGRAD_TRITON", "1")
    if chosen not in ("0", "1", "interpret"):
        raise ValueError(
            "Expected the environment variable POWERGRAD_TRITON to be 0, 1 or interpret, but got "
            f"{chosen!r}."
        )
    return chosen if importlib.util.find_spec("triton") else "0"


@functools.cache
def kernels() -> ModuleType:
    """The module with the kernels, which imports Triton."""
    if setting() == "interpret":
        if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
            raise RuntimeError(
                "Triton was imported before its interpreter was chosen: set TRITON_INTERPRET=1 "
                "beside POWERGRAD_TRITON=interpret."
            )
        os.environ["TRITON_INTERPRET"] = "1"
    return importlib.import_module("powergrad.kernels.triton")


# The tile -----------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """What one program of a kernel works on at a time."""

    rows: int
    classes: int
    warps: int


THREAD_REGISTERS = 128  # with which 512 threads fit into the 65,536 registers of a multiprocessor
OTHER_REGISTERS = 40  # of addresses, and of what belongs to a row


def tile(classes: int, itemsize: int, live: int, lanes: int = 32) -> Tile:
    """The tile for rows of so many classes, by a model of bytes, exponentials and registers.

    - Bytes: a multiprocessor reaches its share of the memory's bandwidth (25 to 54 GB/s) if 16 to
      40 KB of loads are under way, at a latency of 700 ns. So each thread should load much at once,
      and at least the 16 bytes of one instruction.
    - Exponentials: `statistics` needs two per element, at 16 per clock, which is about the rate at
      which 16-bit logits arrive. Every thread also computes the two that rescale the sums of its
      row, once per tile: a share of 1 / elements per thread.
    - Registers: a thread holds `live` float32 values per element. Above 128 registers, too few
      threads are left to hide the reductions. AMD (64 lanes) keeps masks in 102 scalar registers,
      two per element and mask; several rows per thread would spill them.

    So: as many elements per thread, up to 16, as fit into 128 registers, but on AMD one load's
    where rows share a tile. More warps share a row only where it is many tiles long.
    """
    elements = 16
    while elements * itemsize > 16 and OTHER_REGISTERS + live * elements > THREAD_REGISTERS:
        elements //= 2
    block = max(16, 1 << (classes - 1).bit_length())
    if lanes == 64 and block < 4 * elements * lanes:
        elements = 16 // itemsize
    warps = 8 if block > 16 * elements * lanes else 4
    size = elements * lanes * warps
    return Tile(max(1, size // block), min(block, size), warps)


def compiler_options(shape: Tile, nvidia: bool) -> dict[str, Any]:
    """No FP fusion, see triton.py; and no spills for more threads than the tile was made for."""
    options = {"num_warps": shape.warps, "enable_fp_fusion": False}
    return {**options, "maxnreg": THREAD_REGISTERS} if nvidia else options


def live_values(flags: dict[str, bool], gradient: bool) -> int:
    """How many float32 values per element a kernel holds: z, and exponentials with their sums."""
    targets = 2 * flags["SOFT"] or flags["SMOOTH"]
    return (3 if gradient else 5) + targets + 2 * flags["CAP"] + 2 * flags.get("STATS", False)


# The launches -------------------------------------------------------------------------------------


class Options(NamedTuple):
    """The numbers that the operators take, in the order of their schemas."""

    alpha: float = 1.0  # where no tensor of alphas is given
    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    z_loss: float = 0.0


def _launch(
    kernel: str,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    alphas: Tensor | None,
    g: Tensor | None,
    options: Options,
    **others: Any,
) -> None:
    """Run a kernel, with what both have in common and with `others`, which may be flags."""
    (rows, classes), soft = logits.shape, target.is_floating_point()
    if not rows:
        return
    flags = {
        "SOFT": soft,
        "SMOOTH": options.label_smoothing > 0,
        "WEIGHT": weight is not None,
        "CAP": options.softcap is not None,
        "ALPHAS": alphas is not None,
        "G": g is not None,
        **{name: value for name, value in others.items() if name.isupper()},
    }
    lanes = 32
    if logits.is_cuda:
        lanes = torch.cuda.get_device_properties(logits.device).warp_size
    live = live_values(flags, kernel == "write")
    shape = tile(classes, logits.element_size(), live, lanes)
    with torch.cuda.device(logits.device) if logits.is_cuda else nullcontext():
        getattr(kernels(), kernel)[(-(-rows // shape.rows),)](
            x=logits,
            y=target,
            w=logits if weight is None else weight,  # a pointer that is not read
            alphas=logits if alphas is None else alphas,
            g=logits if g is None else g,
            N=rows,
            C=classes,
            stride_n=logits.stride(0),
            stride_c=logits.stride(1),
            stride_y=target.stride(0),
            stride_yc=target.stride(1) if soft else 0,
            stride_a=_stride(alphas),
            stride_g=_stride(g),
            ignore_index=options.ignore_index,
            alpha=float(options.alpha),
            scale=float(options.logit_scale),
            cap=float(options.softcap or 1),
            smoothing=float(options.label_smoothing),
            share=options.label_smoothing / classes,
            R=shape.rows,
            BLOCK=shape.classes,
            **compiler_options(shape, nvidia=not torch.version.hip),
            **{**flags, **others},
        )


def _stride(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.numel() == 1 else tensor.stride(0)


def row_losses(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    alphas: Tensor | None,
    g: Tensor | None,
    z_factor: Tensor | None,
    *options: Any,
    stats: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The losses of rows of logits (N, C), what `row_gradients` needs of them, and statistics.

    Args:
        logits: float32, bfloat16 or float16, of any strides.
        target: int64 labels (N), or class probabilities (N, C).
        weight: One weight per class, contiguous.
        alphas: One alpha or N, instead of that of the options.
        g: One weight for all rows, or N.
        z_factor: A factor of the z-loss, of one element.
        options: The fields of :class:`Options`.
        stats: Whether to compute lse, cross-entropy, p_target, entropy and the largest class
            (5, N); otherwise they are empty.
    """
    empty, rows = functools.partial(logits.new_empty, dtype=torch.float32), logits.shape[0]
    losses, kept, found = empty(rows), empty(3, rows), empty(5 if stats else 0, rows)
    chosen = Options(*options)
    _launch(
        "statistics", logits, target, weight, alphas, g, chosen,
        z_factor=kept if z_factor is None else z_factor, z_loss=float(chosen.z_loss),
        losses=losses, kept=kept, stats=found if stats else kept,
        STATS=stats, Z_FACTOR=z_factor is not None,
    )  # fmt: skip
    return losses, kept, found


def row_gradients(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    alphas: Tensor | None,
    g: Tensor | None,
    kept: Tensor,
    up: Tensor,
    *options: Any,
    out: Tensor | None = None,
) -> Tensor:
    """The gradient at logits, for the gradient `up` (N) of the losses; `out` may be the logits."""
    gradient = logits.new_empty(logits.shape) if out is None else out
    strides = {"stride_up": up.stride(0), "stride_grad": gradient.stride(0)}
    _launch(
        "write", logits, target, weight, alphas, g, Options(*options),
        kept=kept, up=up, grad=gradient, **strides,
    )  # fmt: skip
    return gradient


# The check before first use -----------------------------------------------------------------------

CHECKED: dict[tuple[Any, ...], str | None] = {}  # by variant: what was wrong, if anything
BROKEN: dict[torch.device, str] = {}  # where the kernels are switched off, and why
FLAGS = ("weight", "alphas", "g", "z_factor", "smoothing", "softcap", "stats")
LARGEST_CHECK = 1 << 15  # classes


def runs_on(device: torch.device) -> bool:
    """Whether the kernels are made for tensors on `device`, and are not switched off there."""
    chosen = {"0": None, "1": "cuda", "interpret": "cpu"}[setting()]
    return device.type == chosen and device not in BROKEN


def usable(
    device: torch.device, dtype: torch.dtype, target: torch.dtype, classes: int, *flags: bool
) -> bool:
    """Whether the kernels can be used for tensors like these, and for such `FLAGS`.

    At the first use of a variant, it is compared with PyTorch's operations on a small random batch.
    If they differ, or if a kernel does not compile, the kernels are switched off on this device.
    """
    if not runs_on(device) or dtype not in DTYPES:
        return False
    variant = (device, dtype, target, *flags)
    if variant in CHECKED:
        return CHECKED[variant] is None
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False  # nothing can be compared while a CUDA graph is captured
    classes = min(classes, LARGEST_CHECK)
    problem = CHECKED[variant] = _problem(device, dtype, target, classes, flags)
    if problem is not None:
        BROKEN[device] = problem
        on = ", ".join(name for name, flag in zip(FLAGS, flags, strict=True) if flag)
        warnings.warn(
            "powergrad has switched off its Triton kernels on this device and uses PyTorch's "
            "operations: the same gradients in more time. POWERGRAD_TRITON=0 silences this. "
            f"Please report: {problem} [{dtype}, target {target}, {classes} classes, with {on or 0}"
            f"; {versions()}; {describe_device(device)}]",
            RuntimeWarning,
            stacklevel=3,
        )
    return problem is None


usable._dynamo_marked_constant = True  # pyright: ignore  # see powergrad.compat


def _problem(
    device: torch.device,
    dtype: torch.dtype,
    target_dtype: torch.dtype,
    classes: int,
    flags: tuple[bool, ...],
) -> str | None:
    """How a variant differs from PyTorch's operations in float64, or None."""
    rows, generator = 6, torch.Generator().manual_seed(0)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator).to(device)

    x = (uniform(rows, classes) * 20 - 10).to(dtype)
    if target_dtype.is_floating_point:
        target = (uniform(rows, classes) * 5).softmax(1).to(target_dtype)
        q = target.double()
    else:
        target = torch.randint(classes, (rows,), generator=generator).to(device)
        q = torch.zeros_like(x, dtype=torch.float64).scatter_(1, target.unsqueeze(1), 1.0)
    given = [uniform(size) + 0.5 for size in (classes, rows, rows, 1)]
    weight, alphas, g, factor = (t if flag else None for t, flag in zip(given, flags, strict=False))
    smoothing, cap = 0.1 if flags[4] else 0.0, 8.0 if flags[5] else None
    options, up = Options(0.3, -100, smoothing, cap, 1.5, 0.01), uniform(rows)
    tensors = (target, weight, alphas, g)
    try:
        losses, kept, _ = row_losses(x, *tensors, factor, *options, stats=flags[6])
        grads = row_gradients(x, *tensors, kept, up, *options)
        results = losses.double(), grads.double()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    t = q * (1 - smoothing) + smoothing / classes
    t = t if weight is None else t * weight
    lam = options.z_loss * (1 if factor is None else factor)
    with torch.enable_grad():
        leaf = x.double().requires_grad_()
        z = leaf * options.logit_scale
        z = z if cap is None else cap * torch.tanh(z / cap)

        def potential(alpha: Any) -> Tensor:
            """The loss of alpha z, over alpha: the value is at 1, the gradient at alpha."""
            column = alpha if alphas is None or alpha == 1 else alphas.double().unsqueeze(1)
            lse = (column * z).logsumexp(1, keepdim=True)
            loss = (t * (lse - column * z)).sum(1, keepdim=True) + lam * lse**2
            return (loss / column).squeeze(1) * (1 if g is None else g)

        expected = potential(1), *torch.autograd.grad(potential(0.3), leaf, up.double())
    for name, got, want in zip(("losses", "gradients"), results, expected, strict=True):
        eps = torch.finfo(dtype).eps if name == "gradients" else 0.0
        off = (got - want).abs() - want.abs() * eps - 2e-5 * want.abs().max()
        if not bool((off <= 0).all()):
            worst = int(off.nan_to_num(torch.inf).argmax())
            numbers = f"{want.flatten()[worst]:.9g}, but got {got.flatten()[worst]:.9g}"
            return f"The {name} differ: expected {numbers}."
    return None


def versions() -> str:
    """The versions that a report of a bug needs."""
    named = {"powergrad": __version__, "python": platform.python_version()}
    named["torch"] = torch.__version__
    if importlib.util.find_spec("triton"):
        named["triton"] = importlib.metadata.version("triton")
    for name in ("cuda", "hip"):
        if getattr(torch.version, name, None):
            named[name] = getattr(torch.version, name)
    return ", ".join(f"{name} {number}" for name, number in named.items())


def describe_device(device: torch.device) -> str:
    """The name of a device and its architecture."""
    if device.type != "cuda":
        return f"{device.type}, {platform.machine()}"
    properties = torch.cuda.get_device_properties(device)
    kind = getattr(properties, "gcnArchName", f"sm_{properties.major}{properties.minor}")
    return f"{device}, {properties.name}, {kind}"
