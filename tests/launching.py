"""Runs many programs, each in its own process, without importing torch again for each of them.

A `Launcher` starts one process that has imported torch, and forks it for every program.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple


class Ended(NamedTuple):
    """A program that has ended."""

    code: int
    out: str
    err: str


class Launcher:
    """Executes programs, one at a time, in `folder`."""

    def __init__(self, folder: Path, server: subprocess.Popen[str]) -> None:
        self.folder, self.server = folder, server

    @classmethod
    @contextmanager
    def started(cls, folder: Path, prepare: str = "") -> Iterator[Launcher]:
        """A launcher whose programs start after the Python code `prepare`."""
        pipe = subprocess.PIPE
        command = [sys.executable, __file__, prepare]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, cwd=folder, env=environment
        ) as server:
            yield cls(folder, server)

    def powergrad(self, *tokens: object) -> Ended:
        """``powergrad TOKENS``."""
        return self._start("powergrad", tokens)

    def python(self, *tokens: object) -> Ended:
        """``python TOKENS``: the same program, without powergrad."""
        return self._start("python", tokens)

    def _start(self, kind: str, tokens: tuple[object, ...]) -> Ended:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        print(json.dumps([kind, *map(str, tokens)]), file=self.server.stdin, flush=True)
        code = int(self.server.stdout.readline())
        return Ended(code, *((self.folder / name).read_text() for name in ("stdout", "stderr")))


def serve(prepare: str) -> None:
    import atexit
    import gc
    import runpy

    import torch
    import torch._dynamo  # which every optimizer loads

    import powergrad.run  # noqa: F401
    import powergrad_cli

    torch.set_num_threads(1)
    exec(prepare, {})
    gc.freeze()
    atexit.register(gc.unfreeze)  # otherwise Triton, if installed, reports leaks
    for line in sys.stdin:
        kind, *sys.argv = json.loads(line)
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(name, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), number)
        if kind == "powergrad":
            sys.exit(powergrad_cli.main(sys.argv))
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
        return


def in_new_process(*command: object, cwd: Path | None = None) -> Ended:
    """``python COMMAND`` from the beginning; SIGINT interrupts it, even if it is ignored here."""
    ended = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        cwd=cwd,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


if __name__ == "__main__":
    serve(sys.argv[1])
