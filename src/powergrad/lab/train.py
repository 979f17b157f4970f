"""One training run, from a recipe to a finished run folder.

Everything random is a pure function of the seed and of where the run is: initialisation of the
seed, order of (seed, epoch), augmentation of (seed, epoch, index), dropout of (seed, rank, step).
So a checkpoint needs no generator's state, and a run that was killed and resumed has the weights of
one that was not, bit for bit.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import powergrad
from powergrad.lab.config import Recipe
from powergrad.lab.data import load_data
from powergrad.lab.distributed import Processes, join_processes
from powergrad.lab.progress import Progress, Silent
from powergrad.lab.run import Run, RunError
from powergrad.lab.session import Session
from powergrad.lab.signals import Interrupted, watching_signals

__all__ = ["train"]

KEPT_LOGITS = 5_000_000  # so many numbers of the last test are kept


def train(recipe: Recipe, folder: str | Path, *, progress: Progress | None = None) -> Run:
    """Do the run of `recipe` in `folder`; go on where it stopped; return it if it is finished.

    Args:
        recipe: What to do.
        folder: The run's folder, made if missing.
        progress: Who is told how far it is; nobody by default.

    Returns:
        The run, finished.

    Raises:
        Interrupted: If SIGINT or SIGTERM came: the run is saved.
        RunError: If the folder cannot be used.
        ValueError: If the recipe asks for what is not there: data, a device, a network.
    """
    run = Run(folder)
    if recipe.machine.threads is not None:
        torch.set_num_threads(recipe.machine.threads)
    with join_processes(recipe.machine.device) as processes:
        if not processes.first:
            processes.wait()  # until the first one has the folder
            _train(recipe, run, processes, Silent())
            return run
        with run.open(recipe):
            processes.wait()
            if run.result() is None:
                _train(recipe, run, processes, progress or Silent())
    return run


def _train(recipe: Recipe, run: Run, processes: Processes, progress: Progress) -> None:
    if run.result() is not None:
        return
    data = load_data(
        recipe.data,
        data_dir=recipe.machine.data_dir,
        workers=recipe.machine.workers,
    )
    session = Session(recipe, data, processes)
    state = run.load_checkpoint()
    if state is not None:
        session.restore(state)
    if not processes.agree(session.step):
        raise RunError(
            f"Expected every process to see the checkpoints in {str(run.checkpoints)!r}, but they "
            "start from different steps: the folder must be shared by all machines."
        )
    if processes.first:
        run.cut_metrics(session.step)
        run.save_classes(data.classes)
    row: dict[str, float | None] = run.metrics()[-1] if session.done else {}
    outputs = None
    with (
        watching_signals(second_interrupts=True) as stopping,
        _monitor(recipe, run, session) as record,
        _board(recipe, run, session) as write_to_board,
    ):
        progress.begin(recipe, session.step, session.steps, run.folder)
        save = _Saver(run, session)
        while not session.done:
            for loss in session.run_epoch():
                record(session.step)
                progress.step(session.step, loss, session.lr)
                if not session.at_end_of_epoch:
                    save.if_due(stopping())
            row, outputs = session.finish_epoch()
            if processes.first:
                run.add_metrics(row)
                write_to_board(row)
                progress.epoch(row)
                if recipe.machine.keep_best and session.is_best:
                    run.save_weights("checkpoint/best.safetensors", session.weights())
            if not session.done:
                save.if_due(stopping())
        save()
    outputs = outputs or session.test(data.test)
    if processes.first:
        run.save_weights("model.safetensors", session.weights())
        if outputs["logits"].numel() <= KEPT_LOGITS:
            run.save_weights("test.safetensors", outputs)
        run.finish({"diverged": session.diverged, "steps": session.step, **row})
        progress.end(row)


class _Saver:
    """Writes checkpoints: now, or if the time or the step has come. All processes call it."""

    def __init__(self, run: Run, session: Session) -> None:
        self.run, self.session = run, session
        self.last = time.monotonic()

    def __call__(self) -> None:
        state = self.session.state()
        if self.session.processes.first:
            self.run.save_checkpoint(state, step=self.session.step)
        self.last = time.monotonic()

    def if_due(self, stopping: bool) -> None:
        """Save if it is time to; save and raise :class:`Interrupted` if the run is to stop."""
        options, session = self.session.recipe.machine, self.session
        if session.all_agree(stopping):
            self()
            raise Interrupted(f"stopped at step {session.step} of {session.steps}")
        every, seconds = options.checkpoint_steps, time.monotonic() - self.last
        by_step = every is not None and session.step % every == 0
        if by_step or session.all_agree(seconds >= options.checkpoint_seconds):
            self()


# What goes on beside the training -----------------------------------------------------------------


@contextlib.contextmanager
def _monitor(recipe: Recipe, run: Run, session: Session) -> Iterator[Callable[[int], None]]:
    options, folder = recipe.monitor, run.folder / "norms"
    if options.every == 0 or not session.processes.first:
        yield lambda step: None
        return
    if session.step == 0 and folder.exists():  # of a run that was killed before it saved anything
        shutil.rmtree(folder)
    with powergrad.FilterMonitor(
        session.model,
        folder,
        every=options.every,
        gradients=options.gradients,
        features=options.features,
        gains=options.gains,
        resume=session.step or None,
    ) as monitor:
        if session.step == 0:
            monitor.step(0)
        else:
            monitor.load_state_dict(session.monitor_state)
        session.monitor = monitor
        yield monitor.step


@contextlib.contextmanager
def _board(recipe: Recipe, run: Run, session: Session) -> Iterator[Callable[[Any], None]]:
    """TensorBoard's files, if asked for."""
    if not recipe.machine.tensorboard or not session.processes.first:
        yield lambda row: None
        return
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(run.folder / "tensorboard"), purge_step=session.step + 1) as writer:

        def write(row: dict[str, float | None]) -> None:
            for name, value in row.items():
                if value is not None and name not in ("epoch", "step"):
                    writer.add_scalar(name, value, int(row["step"] or 0))

        yield write
