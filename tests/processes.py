"""A pool of gloo processes that run functions together, so that many cases start them once."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def _serve(rank: int, world: int, folder: str, timeout: float, pipe: Any) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    file = f"file://{folder}/store"
    dist.init_process_group("gloo", file, rank=rank, world_size=world, timeout=limit)
    groups = {n: dist.new_group(list(range(n)), timeout=limit) for n in range(1, world + 1)}
    while (message := pipe.recv()) is not None:
        function, size, arguments = message
        try:
            pipe.send((True, function(rank, groups[size], *arguments)))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


class ProcessError(Exception):
    """What a process has raised, as text."""


class Processes:
    """`world` processes; each call runs a function of (rank, group, ...) in the first few."""

    def __init__(self, world: int, module: str, timeout: float = 60.0) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([module])  # imported once for all
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.started = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            arguments = (rank, world, self.folder.name, timeout, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.started.append(process)

    def answers(
        self, size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 120.0
    ) -> list[Any]:
        """What each process returns; or a ProcessError."""
        for pipe in self.pipes[:size]:
            pipe.send((function, size, arguments))
        found = []
        for pipe in self.pipes[:size]:
            try:
                done, value = pipe.recv() if pipe.poll(timeout) else (False, "no answer")
            except EOFError:
                done, value = False, "the process has died"
            found.append(value if done else ProcessError(value))
        return found

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What each process returns; raises what one has raised."""
        found = self.answers(size, function, *arguments)
        for value in found:
            if isinstance(value, ProcessError):
                raise value
        return found

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.join()
        self.folder.cleanup()
