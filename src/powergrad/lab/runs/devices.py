"""The workers of this machine, and the devices of each."""

from __future__ import annotations

import os

from powergrad.lab.environment import usable_cores


def visible_devices() -> list[str]:
    """The GPUs that this process may use, as in ``CUDA_VISIBLE_DEVICES``."""
    import torch  # slow to import

    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return named[:count] if named != [""] else [str(number) for number in range(count)]


def worker_environments(
    workers: int | None, threads: int, devices: list[str], usual: int | None = None
) -> list[dict[str, str]]:
    """The environment variables of each worker: its threads and, if there are GPUs, its GPU."""
    for name, value in (("workers", workers), ("threads", threads)):
        if value is not None and value < 1:
            raise ValueError(f"Expected `{name}` to be at least 1, but got {value}.")
    count = workers or usual or len(devices) or max(1, usable_cores() // threads)
    shared = {"OMP_NUM_THREADS": str(threads)}
    own = [{"CUDA_VISIBLE_DEVICES": device} for device in devices] or [{}]
    return [shared | own[i % len(own)] for i in range(count)]
