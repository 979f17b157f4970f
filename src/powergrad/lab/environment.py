"""The environment of a run: versions, commit, hardware and command."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from powergrad._version import __version__
from powergrad.lab.words import hide_password


def describe_machine() -> dict[str, Any]:
    """Versions, commit, hardware and command."""
    import torch  # slow to import

    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "powergrad": __version__,
        "commit": commit_of(Path(__file__)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "command": command_line(),
    }


def usable_cores() -> int:
    """The number of cores that this process may use."""
    can_tell = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if can_tell else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # the limit of a container, if it has one
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def free_cores() -> int:
    """The number of usable cores on which nothing else runs, at least 1."""
    return max(1, usable_cores() - round(os.getloadavg()[0]))


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


def command_line() -> str:
    """The command line of this process, quoted for a shell."""
    name = Path(sys.argv[0]).name
    command = ["powergrad" if name == "__main__.py" else name, *sys.argv[1:]]
    return hide_password(shlex.join(command))


def git(*arguments: str, cwd: Path | None = None, index: Path | None = None) -> str | None:
    """The output of git, with an index of its own or the usual one; None if it fails."""
    own = {} if index is None else {"GIT_INDEX_FILE": str(index)}
    options: dict[str, Any] = {"cwd": cwd, "env": {**os.environ, **own}, "timeout": 600}
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, errors="replace", **options
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit_of(file: Path) -> str | None:
    """The commit of the checkout that tracks `file`, perhaps with ``-dirty``; None without one."""
    described = ("describe", "--always", "--dirty", "--exclude=*", "--abbrev=12")
    tracked = git("ls-files", "--error-unmatch", file.name, cwd=file.parent)
    return git(*described, cwd=file.parent) if tracked is not None else None


def processor_name() -> str:
    """The name of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
