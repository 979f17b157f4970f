"""Runs many programs as processes of their own, of which each begins with torch imported.

``Launcher`` starts one process, which forks for every program: importing torch takes seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Ended(NamedTuple):
    """A program that has ended."""

    code: int
    out: str
    err: str


class Launcher:
    """Executes programs, one at a time, in `folder`."""

    def __init__(self, folder: Path, prepare: str = "") -> None:
        self.folder = folder
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "POWERGRAD_PREPARE": prepare}
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=environment,
        )

    def close(self) -> None:
        self.process.communicate(timeout=60)

    def powergrad(self, *tokens: object) -> Ended:
        """``powergrad TOKENS``."""
        return self._start(["powergrad", *tokens])

    def python(self, *tokens: object) -> Ended:
        """``python TOKENS``: the same program, without powergrad."""
        return self._start(["python", *tokens])

    def _start(self, command: Sequence[object]) -> Ended:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([str(token) for token in command]), file=self.process.stdin, flush=True)
        code = int(self.process.stdout.readline())
        texts = [(self.folder / name).read_text() for name in ("stdout", "stderr")]
        return Ended(code, *texts)


def serve() -> None:
    import gc
    import runpy

    import torch
    import torch._dynamo  # which every optimizer loads

    import powergrad.run  # noqa: F401
    import powergrad_cli

    torch.set_num_threads(1)
    exec(os.environ.pop("POWERGRAD_PREPARE"), {})
    gc.freeze()
    for line in sys.stdin:
        kind, *tokens = json.loads(line)
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(name, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), number)
        if kind == "powergrad":
            sys.argv = ["powergrad", *tokens]
            sys.exit(powergrad_cli.main())
        sys.argv = tokens
        sys.path[0] = os.path.dirname(os.path.abspath(tokens[0]))
        runpy.run_path(tokens[0], run_name="__main__")
        return


def in_new_process(*command: object, **options: Any) -> Ended:
    """``python COMMAND`` from the beginning."""
    whole = [sys.executable, *map(str, command)]
    ended = subprocess.run(whole, capture_output=True, text=True, timeout=120, **options)
    return Ended(ended.returncode, ended.stdout, ended.stderr)


if __name__ == "__main__":
    serve()
