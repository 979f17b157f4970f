"""A user's program as a process: started, watched, and ended with all its children."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from powergrad.lab.runs.jobs import RunFailed
from powergrad.lab.signals import Interrupted, watching_signals

PATIENCE = 8  # seconds from SIGTERM to SIGKILL
LONGEST = 1 << 20  # the maximal length of a line; longer lines are split


def run_process(
    command: Sequence[str],
    output: Path,
    environment: Mapping[str, str],
    directory: Path | None = None,
    timeout: float | None = None,  # seconds
) -> tuple[int, float]:
    """Run a command without a shell until it ends; return its exit code and its memory in MiB.

    The memory is the largest sum of the peaks of processes that were alive at the same time. The
    list of processes is renewed so rarely that this takes 2% of the time.
    """
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    with open(output, "wb") as file, watching_signals(second_interrupts=False) as stopped:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                cwd=directory,
                start_new_session=True,
            )
        except OSError as error:
            raise RunFailed(f"the program cannot be started: {error}") from None
        memory, pause, due, processes = 0, 0.002, 0.0, [psutil.Process(process.pid)]
        while True:
            if (began := time.monotonic()) > due:
                with contextlib.suppress(psutil.Error):
                    processes[1:] = processes[0].children(recursive=True)
                due = time.monotonic() + 50 * (time.monotonic() - began)
            memory = max(memory, sum(map(_peak_memory, processes)))
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=pause), memory / 2**20
            pause = min(0.1, 1.5 * pause)
            if stopped():
                _end(process)
                raise Interrupted("the run was stopped and will be repeated")
            if time.monotonic() > deadline:
                _end(process)
                raise RunFailed(f"it was ended after --timeout {timeout:g}s")


def _peak_memory(process: psutil.Process) -> int:
    """The peak resident memory of a process in bytes; without ``/proc``, the current one."""
    with contextlib.suppress(OSError, TypeError):  # it has ended
        status = Path(f"/proc/{process.pid}/status").read_text()
        return 1024 * int(re.search(r"VmHWM:\s*(\d+)", status)[1])  # pyright: ignore[reportOptionalSubscript]
    with contextlib.suppress(psutil.Error):
        return process.memory_info().rss
    return 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its process group."""
    for number, seconds in ((signal.SIGTERM, PATIENCE), (signal.SIGKILL, 0)):
        deadline = time.monotonic() + seconds
        with contextlib.suppress(ProcessLookupError):  # the group has ended
            os.killpg(process.pid, number)
            while time.monotonic() < deadline:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.05)
    process.wait()


def end_leftovers(name: str, value: str) -> None:
    """Kill the processes whose environment has the variable `name` with this value.

    A worker that was killed leaves its program running. The next worker with the same run must end
    that program before it empties the folder. Without ``/proc``, nothing is found.
    """
    wanted = os.fsencode(f"{name}={value}")
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"ended by {signal.Signals(-code).name}"
    return f"ended by signal {-code}"


def lines_of(path: Path) -> Iterator[str]:
    """The lines of an output of any size, including lines that a progress bar overwrites."""
    with open(path, encoding="utf-8", errors="replace", newline=None) as file:
        while line := file.readline(LONGEST):
            yield line.rstrip("\n")


def last_lines(path: Path, count: int = 20, width: int = 400) -> str:
    """The last non-empty lines of an output, indented."""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 2 * count * width))
        text = file.read().decode("utf-8", "replace")
    lines = [line.rstrip() for line in text.replace("\r", "\n").split("\n") if line.strip()]
    return "\n".join(f"    {line[:width]}" for line in lines[-count:]) or "    (no output)"
