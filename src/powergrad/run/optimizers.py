"""Hooks at the steps of every optimizer of a process: clipping, scaling, monitor, verification."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from powergrad.clip import ClipHandle, clip_grads_before_step, stepping_optimizer
from powergrad.compat import run_eagerly
from powergrad.head import unwrap
from powergrad.monitor import FilterMonitor
from powergrad.run.options import Options
from powergrad.run.scaling import ScaledStep
from powergrad.run.trained_model import find_model, head_parameters
from powergrad.verify import StepWatcher, Verification

__all__ = ["Clipped", "Optimizers", "Seen"]

Step = tuple[tuple[Any, ...], dict[str, Any]]
ATTEMPTS = 3  # the maximal number of steps to watch until one shows its alpha


@dataclass
class Seen:
    """An optimizer that has stepped.

    Attributes:
        kind: Its class.
        steps: The number of its steps.
        altered: The number of altered losses at its last step.
        clip: The handle of the gradient clipping.
        scaled: The scaled groups of its steps.
    """

    kind: str
    steps: int = 0
    altered: int = -1
    clip: ClipHandle | None = None
    scaled: ScaledStep | None = None


class _Stepping(NamedTuple):
    """An optimizer whose step is running."""

    frame: FrameType  # of its step
    optimizer: Optimizer
    scaled: ScaledStep | None = None


@dataclass
class Clipped:
    """The total and the clipped number of units, over all steps."""

    units: int = 0
    clipped: Tensor | int = 0  # on the device, to avoid a synchronisation


@dataclass
class Optimizers:
    """Attaches to every optimizer of this process, from `install` on.

    Args:
        options: The options.
        altered: Returns the number of losses altered so far; None if it is not known.
        refuse: Ends the program with a message.
    """

    options: Options
    altered: Callable[[], int | None]
    refuse: Callable[[str], NoReturn]
    seen: list[Seen] = field(default_factory=list)
    clipped: dict[str, Clipped] = field(default_factory=dict)
    scaled: set[str] = field(default_factory=set)
    verification: Verification | None = None
    verified_step: int = 0
    _by_optimizer: weakref.WeakKeyDictionary[Optimizer, Seen] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    _by_thread: dict[int, list[_Stepping]] = field(default_factory=dict)
    _monitor: FilterMonitor | None = None
    _first: Seen | None = None  # the optimizer whose model is monitored and watched
    _watcher: StepWatcher | None = None
    _hooks: list[RemovableHandle] = field(default_factory=list)

    def install(self) -> None:
        """Attach the hooks."""
        self._hooks = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def close(self) -> None:
        """Detach the hooks, and close the files."""
        for hook in self._hooks:
            hook.remove()
        for seen in self.seen:
            if seen.clip is not None:
                seen.clip.remove()
        if self._watcher is not None:
            self._watcher.__exit__()
        if self._monitor is not None:
            self._monitor.close()

    @property
    def _stepping(self) -> list[_Stepping]:
        """The optimizers whose step is running in this thread, the outermost first."""
        return self._by_thread.setdefault(threading.get_ident(), [])

    # Before a step --------------------------------------------------------------------------------

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Step | None:
        try:
            return self._begin(optimizer, args, kwargs, sys._getframe(1))
        except (TypeError, ValueError) as error:  # a requested change is not possible
            self.refuse(str(error))

    def _begin(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Step | None:
        stepping = self._stepping
        if stepping:
            self._forget_failed(frame)
            if any(outer.optimizer is optimizer for outer in stepping):
                stepping.append(_Stepping(frame, optimizer))  # it calls `super().step()`
                return None
        seen = self._by_optimizer.get(optimizer)
        if seen is None:
            seen = self._by_optimizer[optimizer] = self._meet(optimizer)
        if _closure_of(args, kwargs) is None:
            self._judge(seen)
        scaled = seen.scaled
        if scaled is not None and self._is_scaled_outside(optimizer):
            scaled = None
        stepping.append(_Stepping(frame, optimizer, scaled))
        return None if scaled is None else self._scale(scaled, args, kwargs)

    def _forget_failed(self, frame: FrameType | None) -> None:
        """Restore optimizers whose step has raised: its frame is not among the callers."""
        callers = []
        while frame is not None:
            callers.append(frame)
            frame = frame.f_back
        for failed in [step for step in self._stepping if step.frame not in callers]:
            self._stepping.remove(failed)
            if failed.scaled is not None:
                failed.scaled.restore()

    def _meet(self, optimizer: Optimizer) -> Seen:
        """Attach to an optimizer at its first step."""
        options, seen = self.options, Seen(type(optimizer).__name__)
        if stepping_optimizer(optimizer) is optimizer:
            self.seen.append(seen)
            if options.thresholds:
                module = unwrap(find_model(optimizer)) if options.agc is not None else None
                head = (options.head or "auto") if module is not None else None
                seen.clip = clip_grads_before_step(
                    optimizer, module, head=head, **options.thresholds
                )
            if self._first is None:
                self._first = seen
                if options.monitor is not None:
                    self._monitor = FilterMonitor(find_model(optimizer), options.monitor)
                    self._monitor.step(0)
        if options.scales.factors(head=True):
            head_alone: set[nn.Parameter] = set()
            if options.scales.head_lr != 1:
                head_alone = head_parameters(find_model(optimizer), options.head)
            seen.scaled = ScaledStep(optimizer, options.scales, head_alone)
        return seen

    def _is_scaled_outside(self, optimizer: Optimizer) -> bool:
        """Whether a wrapper whose step is running has already scaled these groups."""
        wrappers = [outer.optimizer for outer in self._stepping if outer.scaled is not None]
        outside = [group for wrapper in wrappers for group in wrapper.param_groups]
        groups = optimizer.param_groups
        if any(group is other for group in groups for other in outside):
            return True
        theirs = {parameter for group in outside for parameter in group["params"]}
        if any(parameter in theirs for group in groups for parameter in group["params"]):
            raise TypeError(
                "Expected an optimizer inside another one to share its groups, but got "
                f"{type(optimizer).__name__} with its own groups, which cannot be scaled."
            )
        return False

    def _scale(
        self, step: ScaledStep, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Step | None:
        closure = _closure_of(args, kwargs)
        if closure is None:
            return step.apply()

        def closure_then_scale() -> Any:
            step.restore()
            loss = closure()
            try:
                step.apply()
            except TypeError as error:
                self.refuse(str(error))
            return loss

        if len(args) > 1:
            return (args[0], closure_then_scale, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_then_scale}

    # After a step ---------------------------------------------------------------------------------

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        stepping = self._stepping
        step = stepping.pop()
        if stepping and any(outer.optimizer is optimizer for outer in stepping):
            return
        try:
            self._end(step, self._by_optimizer[optimizer], _closure_of(args, kwargs) is not None)
        except (TypeError, ValueError) as error:
            self.refuse(str(error))

    def _end(self, step: _Stepping, seen: Seen, closure: bool) -> None:
        if closure:  # the closure has computed the loss
            self._judge(seen)
        seen.steps += 1
        if step.scaled is not None:
            step.scaled.restore()
            self.scaled |= step.scaled.scaled
        if seen.clip is not None:
            for method, report in seen.clip.last_report.items():
                total = self.clipped.setdefault(method, Clipped())
                units, clipped = report._count()
                total.units, total.clipped = total.units + units, total.clipped + clipped
        if seen is self._first:
            if self._monitor is not None:
                self._monitor.step(seen.steps)
            self._begin_watch(step.optimizer, seen)

    # Verification ---------------------------------------------------------------------------------

    def _begin_watch(self, optimizer: Optimizer, seen: Seen) -> None:
        """Watch the next step, unless it is already known whether steps are altered."""
        known = self.verification is not None and self.verification.verdict != "cannot tell"
        if known or self.options.alpha == 1 or seen.steps > ATTEMPTS:
            return
        try:
            model = find_model(optimizer)
        except ValueError as error:
            self.verification = Verification("cannot tell", reason=str(error))
            return
        self._watcher = StepWatcher(model, self.options.head).__enter__()

    def _judge(self, seen: Seen) -> None:
        """Check the backward pass before step ``seen.steps + 1``."""
        if self._watcher is not None and seen is self._first:
            self._watcher.__exit__()
            self.verification, self.verified_step = self._watcher.result(), seen.steps + 1
            self._watcher = None
        altered = self.altered() if self.options.strict and self.options.alpha != 1 else None
        if altered is None:
            return
        if altered in (0, seen.altered):
            raise ValueError(
                f"Expected a loss to be altered before every step, but got none before step "
                f"{seen.steps + 1} of {seen.kind}."
            )
        seen.altered = altered


def _closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The closure of a step, if any."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


run_eagerly(Optimizers, ScaledStep)  # also for compiled functions that call `step()`
