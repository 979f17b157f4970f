"""``powergrad doctor``: versions, devices, and which path a loss takes on each of them."""

from __future__ import annotations

import torch

from powergrad import kernels
from powergrad.kernels import gpu

__all__ = ["main"]


def _path(device: torch.device, dtype: torch.dtype, target: torch.dtype) -> str:
    """What computes a loss of plain tensors; on a GPU, after the check before first use."""
    simplest, largest = gpu.Flags(), [True] * len(gpu.Flags._fields)
    if all(gpu.passes(device, dtype, target, 1000, *flags) for flags in (simplest, largest)):
        return "Triton kernels, checked"
    if device in gpu.BROKEN:
        return f"PyTorch operations: the Triton kernels failed their check. {gpu.BROKEN[device]}"
    labels = target == torch.int64
    if device.type == "cpu" and kernels.available() and labels and dtype != torch.float16:
        return "C kernel"
    return "PyTorch operations"


def main() -> int:
    """Print the report."""
    print(gpu.versions())
    print(f"C kernel: {'built' if kernels.available() else 'not built, or POWERGRAD_NATIVE=0'}")
    reason = {"0": "not installed, or POWERGRAD_TRITON=0", "1": "installed"}
    print(f"Triton: {reason.get(gpu.setting(), 'interpreter, on CPU')}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    failed = False
    for device in (torch.device("cpu"), *(torch.device("cuda", k) for k in range(count))):
        print(f"\n{gpu.describe_device(device)}")
        for target, name in ((torch.int64, "labels"), (torch.float32, "class probabilities")):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                path = _path(device, dtype, target)
                print(f"  {name}, {str(dtype)[6:]}: {path}")
        failed = failed or device in gpu.BROKEN
    if not count:
        print("\nNo GPU was found: nothing of this was checked on one.")
    return 1 if failed else 0
