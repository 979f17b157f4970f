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
import warnings
from contextlib import nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from powergrad._version import __version__
from powergrad.checks import Call

__all__ = ["arguments", "cross_entropy", "row_gradients", "row_losses", "runs_on", "usable"]

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


class Tensors(NamedTuple):
    """What both kernels read, beside the logits (N, C) of any strides."""

    target: Tensor  # int64 labels (N), or class probabilities (N, C)
    weight: Tensor | None = None  # one per class, contiguous
    alphas: Tensor | None = None  # one or N, instead of that of the options
    g: Tensor | None = None  # row weights: one or N


class Options(NamedTuple):
    """The numbers that the operators take, in the order of their schemas."""

    alpha: float = 1.0
    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    z_loss: float = 0.0


def arguments(call: Call) -> tuple[Tensors, Options]:
    """Those of a call for rows of logits."""
    alpha, alphas, g = call.alpha, None, call.token_weight
    if isinstance(alpha, Tensor):
        alpha, alphas = 1.0, alpha.to(call.target.device, torch.float32).reshape(-1)
    weight = None if call.weight is None else call.weight.contiguous()
    numbers = (call.label_smoothing, call.softcap, call.logit_scale, call.z_loss)
    tensors = Tensors(call.target, weight, alphas, None if g is None else g.reshape(-1))
    return tensors, Options(alpha, call.ignore_index, *numbers)


def cross_entropy(logits: Tensor, call: Call, out: Tensor) -> tuple[Tensor, Tensor] | None:
    """The losses of a block of rows and their gradient, written to `out`, perhaps the logits.

    None if the kernels cannot be used. The z-loss of the call may be a tensor.
    """
    if not usable(logits, call):
        return None
    z_factor = call.z_loss if isinstance(call.z_loss, Tensor) else None
    tensors, options = arguments(call if z_factor is None else call.replace(z_loss=1.0))
    tensors = Tensors(*(t if t is None else t.resolve_neg() for t in tensors))  # pyright: ignore
    losses, kept, _ = row_losses(logits, tensors, z_factor, options)
    one = losses.new_ones(1).expand(losses.shape)
    return losses, row_gradients(logits, tensors, kept, one, options, out)


def results_for(logits: Tensor, stats: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the results of `row_losses`."""
    empty, rows = functools.partial(logits.new_empty, dtype=torch.float32), logits.shape[0]
    return empty(rows), empty(3, rows), empty(5 if stats else 0, rows)


def row_losses(
    logits: Tensor, tensors: Tensors, z_factor: Tensor | None, options: Options, stats: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The losses of rows of logits, what `row_gradients` needs of them, and statistics.

    `z_factor` is a factor of the z-loss, of one element. The statistics are lse, cross-entropy,
    p_target, entropy and the largest class (5, N), or empty.
    """
    losses, kept, found = results_for(logits, stats)
    _launch(
        "statistics", logits, tensors, options, z_loss=float(options.z_loss),
        z_factor=kept if z_factor is None else z_factor, Z_FACTOR=z_factor is not None,
        losses=losses, kept=kept, stats=found if stats else kept, STATS=stats,
    )  # fmt: skip
    return losses, kept, found


def row_gradients(
    logits: Tensor,
    tensors: Tensors,
    kept: Tensor,
    up: Tensor,
    options: Options,
    out: Tensor | None = None,
) -> Tensor:
    """The gradient at logits, for the gradient `up` (N) of the losses; `out` may be the logits."""
    gradient = logits.new_empty(logits.shape) if out is None else out
    _launch(
        "write", logits, tensors, options, kept=kept,
        up=up, stride_up=up.stride(0), grad=gradient, stride_grad=gradient.stride(0),
    )  # fmt: skip
    return gradient


def _launch(kernel: str, logits: Tensor, tensors: Tensors, options: Options, **others: Any) -> None:
    """Run a kernel, with what both have in common and with `others`, which may be flags."""
    (rows, classes), soft = logits.shape, tensors.target.is_floating_point()
    if not rows:
        return
    target, weight, alphas, g = tensors
    flags = {
        "SOFT": soft,
        "SMOOTH": options.label_smoothing > 0,
        "WEIGHT": weight is not None,
        "CAP": options.softcap is not None,
        "ALPHAS": alphas is not None,
        "G": g is not None,
    }
    live, cuda = live_values({**flags, **others}, kernel == "write"), logits.is_cuda
    lanes = torch.cuda.get_device_properties(logits.device).warp_size if cuda else 32
    shape = tile(classes, logits.element_size(), live, lanes)
    with torch.cuda.device(logits.device) if cuda else nullcontext():
        getattr(kernels(), kernel)[(-(-rows // shape.rows),)](
            x=logits, y=target, N=rows, C=classes, R=shape.rows, BLOCK=shape.classes,
            w=logits if weight is None else weight,  # a pointer that is not read
            alphas=logits if alphas is None else alphas,
            g=logits if g is None else g,
            stride_n=logits.stride(0), stride_c=logits.stride(1),
            stride_y=target.stride(0), stride_yc=target.stride(1) if soft else 0,
            stride_a=_stride(alphas), stride_g=_stride(g),
            ignore_index=options.ignore_index, alpha=float(options.alpha),
            scale=float(options.logit_scale), cap=float(options.softcap or 1),
            smoothing=float(options.label_smoothing), share=options.label_smoothing / classes,
            **compiler_options(shape, nvidia=not torch.version.hip), **flags, **others,
        )  # fmt: skip


def _stride(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.numel() == 1 else tensor.stride(0)


# The check before first use -----------------------------------------------------------------------

CHECKED: dict[tuple[Any, ...], str | None] = {}  # by variant: what was wrong, if anything
BROKEN: dict[torch.device, str] = {}  # where the kernels are switched off, and why
LARGEST_CHECK = 1 << 15  # classes; tiles for more are no larger


class Flags(NamedTuple):
    """What a variant of the kernels takes into account."""

    weight: bool = False
    alphas: bool = False
    g: bool = False
    z_factor: bool = False
    smoothing: bool = False
    softcap: bool = False
    stats: bool = False


def runs_on(device: torch.device) -> bool:
    """Whether the kernels are made for tensors on `device`, and are not switched off there."""
    chosen = {"0": None, "1": "cuda", "interpret": "cpu"}[setting()]
    return device.type == chosen and device not in BROKEN


def usable(input: Tensor, call: Call, stats: bool = False) -> bool:
    """Whether the kernels can compute the loss of `input`; at first use, they are checked."""
    soft = call.soft()
    if not runs_on(input.device) or not (soft or call.target.dtype == torch.int64):
        return False
    by_weight = call.weight is not None and call.reduction == "mean" and not soft
    flags = Flags(
        call.weight is not None,
        isinstance(call.alpha, Tensor),
        call.token_weight is not None,
        isinstance(call.z_loss, Tensor) or (by_weight and call.z_loss != 0),
        call.label_smoothing > 0,
        call.softcap is not None,
        stats,
    )
    # A traced number of classes may be symbolic; it is only that of the check.
    classes = 1000 if torch.compiler.is_compiling() else input.shape[min(1, input.dim() - 1)]
    return passes(input.device, input.dtype, call.target.dtype, classes, *flags)


def passes(
    device: torch.device, dtype: torch.dtype, target: torch.dtype, classes: int, *flags: bool
) -> bool:
    """Whether the kernels can be used for tensors like these, and for such :class:`Flags`.

    At the first use of a variant, it is compared with PyTorch's operations on a small random batch.
    If they differ, or if a kernel does not compile, the kernels are switched off on this device.
    """
    if not runs_on(device) or dtype not in DTYPES:
        return False
    classes = min(classes, LARGEST_CHECK)
    variant = (device, dtype, target, classes.bit_length(), *flags)
    if variant in CHECKED:
        return CHECKED[variant] is None
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False  # nothing can be compared while a CUDA graph is captured
    chosen = Flags(*flags)
    problem = CHECKED[variant] = _problem(device, dtype, target, classes, chosen)
    if problem is not None:
        BROKEN[device] = problem
        on = ", ".join(name for name, flag in chosen._asdict().items() if flag)
        warnings.warn(
            "powergrad has switched off its Triton kernels on this device and uses PyTorch's "
            "operations: the same gradients in more time. POWERGRAD_TRITON=0 silences this. "
            f"Please report: {problem} [{dtype}, target {target}, {classes} classes, with {on or 0}"
            f"; {versions()}; {describe_device(device)}]",
            RuntimeWarning,
            stacklevel=3,
        )
    return problem is None


for _function in (runs_on, passes):
    _function._dynamo_marked_constant = True  # pyright: ignore  # see powergrad.compat


def _problem(
    device: torch.device, dtype: torch.dtype, target_dtype: torch.dtype, classes: int, flags: Flags
) -> str | None:
    """How a variant differs from PyTorch's operations in float64, or None."""
    rows, generator = 6, torch.Generator().manual_seed(0)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device="cpu", dtype=torch.float32).to(device)

    x, q = (uniform(rows, classes) * 20 - 10).to(dtype), (uniform(rows, classes) * 5).softmax(1)
    if target_dtype.is_floating_point:
        target = q.to(target_dtype)
        q = target.double()
    else:
        target = q.argmax(1)
        q = torch.zeros_like(q, dtype=torch.float64).scatter_(1, target.unsqueeze(1), 1.0)
    given = [uniform(size) + 0.5 for size in (classes, rows, rows, 1)]
    weight, alphas, g, factor = (t if flag else None for t, flag in zip(given, flags, strict=False))
    smoothing, cap = 0.1 * flags.smoothing, 8.0 if flags.softcap else None
    options, up = Options(0.3, -100, smoothing, cap, 1.5, 0.01), uniform(rows)
    tensors = Tensors(target, weight, alphas, g)
    try:
        losses, kept, _ = row_losses(x, tensors, factor, options, flags.stats)
        grads = row_gradients(x, tensors, kept, up, options)
        results = losses.double(), grads.double()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    # Without autograd, which a checkpoint around the first use would notice.
    t = (q * (1 - smoothing) + smoothing / classes) * (1 if weight is None else weight)
    lam = options.z_loss * (1 if factor is None else factor)
    z, slope = x.double() * options.logit_scale, options.logit_scale
    if cap is not None:
        z, slope = cap * torch.tanh(z / cap), slope / torch.cosh(z / cap) ** 2
    flat = z * (options.alpha if alphas is None else alphas.double().unsqueeze(1))
    lse, flat_lse = z.logsumexp(1, keepdim=True), flat.logsumexp(1, keepdim=True)
    value = (t * (lse - z)).sum(1, keepdim=True) + lam * lse**2
    dz = (t.sum(1, keepdim=True) + 2 * lam * flat_lse) * (flat - flat_lse).exp() - t
    row = torch.ones_like(up) if g is None else g
    expected = value.squeeze(1) * row, dz * slope * (up * row).unsqueeze(1)
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
    named |= {"torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
    if importlib.util.find_spec("triton"):
        named["triton"] = importlib.metadata.version("triton")
    return ", ".join(f"{name} {number}" for name, number in named.items() if number)


def describe_device(device: torch.device) -> str:
    """The name of a device and its architecture."""
    if device.type != "cuda":
        return f"{device.type}, {platform.machine()}"
    properties = torch.cuda.get_device_properties(device)
    kind = getattr(properties, "gcnArchName", f"sm_{properties.major}{properties.minor}")
    return f"{device}, {properties.name}, {kind}"
