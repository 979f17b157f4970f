"""PowerGrad Transform for Lightning: a callback that enables PGT, AGC and the filter monitor."""

from __future__ import annotations

import functools
import os
from typing import Any

try:
    from lightning.pytorch.callbacks import Callback  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "powergrad.lightning needs Lightning: pip install lightning.", name=error.name
    ) from error
from torch import Tensor

from powergrad.checks import check_number, check_threshold
from powergrad.clip import ClipHandle, clip_grads_before_step
from powergrad.mode import PowerGrad
from powergrad.monitor import FilterMonitor

__all__ = ["PowerGradCallback"]


class PowerGradCallback(Callback):
    r"""Train any unchanged ``LightningModule`` with PowerGrad Transform.

    During ``fit``, ``training_step`` runs inside :class:`powergrad.PowerGrad`; validation, test and
    prediction do not (loss values are the same there). When training ends, or stops with an error,
    everything is removed again.

    Args:
        alpha: As in :func:`powergrad.cross_entropy`. For a schedule, set ``callback.alpha`` during
            training.
        agc: If given, also clip the gradients of every optimizer with this AGC threshold, see
            :func:`powergrad.clip_grads_before_step`.
        monitor: If given, also record the filter norms in this folder, see
            :class:`powergrad.FilterMonitor`: at the start and every `every` optimizer steps. A run
            that resumes from a checkpoint continues the record.
        every: The number of steps between two records.
        log_softmax: Whether ``log_softmax`` calls in ``training_step`` are altered too, or only
            cross-entropies, as in :class:`powergrad.PowerGrad`.

    Raises:
        ValueError: If ``alpha`` or ``agc`` is out of range.

    Example:
        >>> callback = PowerGradCallback(alpha=0.3, agc=0.01)
        >>> # trainer = lightning.Trainer(callbacks=[callback], ...)
    """

    def __init__(
        self,
        alpha: float | Tensor,
        *,
        agc: float | None = None,
        monitor: str | os.PathLike[str] | None = None,
        every: int = 10,
        log_softmax: bool = True,
    ) -> None:
        super().__init__()
        self.alpha = alpha if isinstance(alpha, Tensor) else check_number(alpha)
        self.agc = None if agc is None else check_threshold(agc, "agc")
        self.monitor = monitor
        self.every = every
        self.log_softmax = log_softmax
        self._clips: list[ClipHandle] = []
        self._monitor: FilterMonitor | None = None
        self._recorded = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Wrap the training step, attach AGC to the optimizers, record the first norms."""
        training_step = pl_module.training_step

        @functools.wraps(training_step)
        def with_powergrad(*args: Any, **kwargs: Any) -> Any:
            with PowerGrad(self.alpha, log_softmax=self.log_softmax):
                return training_step(*args, **kwargs)

        pl_module.training_step = with_powergrad
        if self.agc is not None:
            self._clips = [
                clip_grads_before_step(optimizer, pl_module, agc=self.agc)
                for optimizer in trainer.optimizers
            ]
        if self.monitor is not None:
            step = self._recorded = trainer.global_step
            self._monitor = FilterMonitor(
                pl_module, self.monitor, every=self.every, resume=step or None
            )
            if not step:
                self._monitor.step(0)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the norms, unless this batch only accumulated gradients."""
        if self._monitor is not None and trainer.global_step > self._recorded:
            self._recorded = trainer.global_step
            self._monitor.step(self._recorded)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Remove everything."""
        pl_module.__dict__.pop("training_step", None)
        for clip in self._clips:
            clip.remove()
        self._clips = []
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Remove everything."""
        self.on_train_end(trainer, pl_module)
