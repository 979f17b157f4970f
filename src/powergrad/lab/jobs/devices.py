"""The devices of each worker, for a user's program."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch


def visible_devices() -> list[str]:
    """The GPUs that this process may use, as in ``CUDA_VISIBLE_DEVICES``."""
    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return named[:count] if named != [""] else [str(number) for number in range(count)]


def default_workers(devices: Sequence[str], threads: int) -> int:
    """One worker per GPU; without GPUs, as many as the cores allow."""
    return len(devices) or max(1, (os.cpu_count() or 1) // threads)


def worker_environments(workers: int, devices: Sequence[str], threads: int) -> list[dict[str, str]]:
    """The environment variables of each worker: its threads and, if there are GPUs, its GPU.

    Example:
        >>> worker_environments(3, ["0", "1"], 4)[2]
        {'OMP_NUM_THREADS': '4', 'CUDA_VISIBLE_DEVICES': '0'}
    """
    shared = {"OMP_NUM_THREADS": str(threads)}
    if not devices:
        return [shared] * workers
    return [
        {**shared, "CUDA_VISIBLE_DEVICES": devices[place % len(devices)]}
        for place in range(workers)
    ]
