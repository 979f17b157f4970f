"""One training run, from a recipe to a finished run folder.

All randomness is a pure function of the seed and the position in the run: initialisation depends on
the seed, the data order on (seed, epoch), augmentation on (seed, epoch, index), dropout on (seed,
rank, step). So a checkpoint needs no generator state, and a run that was killed and resumed has
bitwise the same weights as one that was not.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import powergrad
from powergrad.lab.environment import free_cores
from powergrad.lab.signals import Interrupted, watching_signals
from powergrad.lab.trainer.processes import Processes, join_processes
from powergrad.lab.trainer.progress import Progress, Row
from powergrad.lab.trainer.recipe import Recipe
from powergrad.lab.trainer.run_folder import Result, Run, RunError
from powergrad.lab.trainer.session import Session

ABOUT = ("epoch", "lr", "alpha", "loss_scale")  # the columns of metrics.csv that are no metrics
KEPT_LOGITS = 5_000_000  # the outputs of the last test are kept up to this many numbers
SKIPPED = 5  # the maximal number of unreadable images to name


def train(recipe: Recipe, folder: str | Path, *, progress: Progress | None = None) -> Run:
    """Start or resume the run of `recipe` in `folder`, or return it if it is finished."""
    run = Run(folder)
    use_threads(recipe.machine.threads or run.environment().get("threads"))
    with join_processes(recipe.machine.device) as processes, contextlib.ExitStack() as stack:
        if processes.first:
            stack.enter_context(run.open(recipe, recipe.folder_fingerprint()))
        processes.wait()  # for the first one, which holds the folder and shows progress
        if run.result() is None:
            shown = progress if processes.first else None
            _train(recipe, run, processes, shown or Progress(quiet=True))
    return run


def use_threads(threads: int | None = None) -> None:
    """Compute with `threads`; by default one per free core, or OMP_NUM_THREADS."""
    if threads or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads or free_cores())
    with contextlib.suppress(RuntimeError):  # it is too late after the first parallel work
        torch.set_num_interop_threads(1)


def _train(recipe: Recipe, run: Run, processes: Processes, progress: Progress) -> None:
    data = recipe.load_data()
    session = Session(recipe, data, processes)
    state = run.load_checkpoint()
    if state is not None:
        session.restore(state)
        if state["model"] is None:
            session.load_shards(run.shards(session.step))
    if not (processes.concatenate(torch.tensor([session.step])) == session.step).all():
        raise RunError(f"All machines must share the folder {str(run.checkpoints)!r}.")
    if processes.first:
        run.cut_metrics(session.step)

    row: Row = run.metrics()[-1] if session.done else {}
    outputs = None
    with (
        watching_signals(second_interrupts=True) as stopping,
        _filter_monitor(recipe, run, session) as record,
        _tensorboard(recipe, run, session) as write_to_board,
    ):
        progress.begin(recipe, session.step, session.steps, run.folder)
        checkpoints = _Checkpoints(run, session)
        while not session.done:
            for loss in session.run_epoch():
                record(session.step)
                progress.step(session.step, loss, session.lr)
                if not session.at_end_of_epoch:
                    checkpoints.save_if_due(stopping())
            row, outputs = session.finish_epoch()
            if processes.first:
                run.add_metrics(row)
                write_to_board(row)
                progress.epoch(row)
            if not session.done:
                checkpoints.save_if_due(stopping())
        checkpoints.save()

    outputs, weights = outputs or session.test(), session.weights()
    if processes.first:
        run.save_weights("model.safetensors", weights)
        if outputs["logits"].numel() <= KEPT_LOGITS:
            run.save_weights("test.safetensors", outputs)
        about = {"diverged": session.diverged, "steps": session.step, "classes": len(data.classes)}
        about |= {name: row.get(name) for name in ABOUT}
        about |= {"images": [len(data.train), len(data.test)]}
        if skipped := sorted({**data.train.unreadable, **data.test.unreadable}):
            names = ["/".join(Path(path).parts[-3:]) for path in skipped[:SKIPPED]]
            about["unreadable"] = {"count": len(skipped), "such as": names}
        metrics = {name: row[name] for name in row if name not in (*ABOUT, "step")}
        run.finish(Result(metrics=metrics, about=about))
        progress.end(row)


class _Checkpoints:
    """Writes checkpoints. All processes must call it, because the state sums over all of them."""

    def __init__(self, run: Run, session: Session) -> None:
        self.run, self.session = run, session
        self.saved_at = time.monotonic()

    def save(self) -> None:
        state = self.session.state()
        if self.session.shards:  # first, since a checkpoint counts once its last file is written
            self.session.save_shards(self.run.shards(self.session.step))
        if self.session.processes.first:
            self.run.save_checkpoint(state, step=self.session.step)
        self.saved_at = time.monotonic()

    def save_if_due(self, stopping: bool) -> None:
        """Save if due; if the run is to stop, save and raise :class:`Interrupted`."""
        machine, session = self.session.recipe.machine, self.session
        if session.any_process(stopping):
            self.save()
            raise Interrupted(f"stopped at step {session.step} of {session.steps}")
        by_step = machine.checkpoint_steps and session.step % machine.checkpoint_steps == 0
        by_time = time.monotonic() - self.saved_at >= machine.checkpoint_seconds
        if by_step or session.any_process(by_time):
            self.save()


@contextlib.contextmanager
def _filter_monitor(recipe: Recipe, run: Run, session: Session) -> Iterator[Callable[[int], None]]:
    """Yield a function that records the filters at a step, if the recipe enables it."""
    folder = run.folder / "norms"
    if not recipe.monitor.every or not (session.processes.first or session.sharded):
        yield lambda step: None
        return
    if (
        session.step == 0 and session.processes.first and folder.exists()
    ):  # from a run that was killed before it was saved
        shutil.rmtree(folder)
    options = {**recipe.monitor.model_dump(), "resume": session.step or None}
    with powergrad.FilterMonitor(session.model, folder, **options) as monitor:
        if session.step == 0:
            monitor.step(0)
        else:
            monitor.load_state_dict(session.monitor_state)
        session.monitor = monitor
        yield monitor.step


@contextlib.contextmanager
def _tensorboard(recipe: Recipe, run: Run, session: Session) -> Iterator[Callable[[Row], None]]:
    """Yield a function that writes the metrics of an epoch to TensorBoard, if enabled."""
    if not recipe.machine.tensorboard or not session.processes.first:
        yield lambda row: None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("`machine.tensorboard` needs `pip install tensorboard`.") from error
    with SummaryWriter(str(run.folder / "tensorboard"), purge_step=session.step + 1) as writer:

        def write(row: Row) -> None:
            for name, value in row.items():
                if value is not None and name not in ("epoch", "step"):
                    writer.add_scalar(name, value, int(row["step"] or 0))

        yield write
