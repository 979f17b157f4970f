"""Hooks at the steps of every optimizer of a process: clipping, scaling, monitor, verification."""

from __future__ import annotations

import gc
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from traceback import walk_stack
from types import FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.fx import GraphModule
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from powergrad.clip import ClipHandle, clip_grads_before_step, closure_of, stepping_optimizer
from powergrad.compat import run_eagerly
from powergrad.head import HEAD_REMEDY, check_untied, find_head, unwrap
from powergrad.mode import Enabled
from powergrad.monitor import FilterMonitor
from powergrad.run.program import CLIPPED, SCALED, Options
from powergrad.run.scaling import ScaledStep
from powergrad.verify import StepWatcher, Verification

__all__ = ["NOT_ALTERED", "Optimizers", "RefusedExit", "Seen", "find_model"]

NOT_ALTERED = 3  # the exit code if the program was not altered as requested
ATTEMPTS = 3  # the maximal number of steps to watch until one shows its alpha


class RefusedExit(SystemExit):
    """Ends a program that cannot be altered as requested, past any ``except Exception``."""


@dataclass
class Seen:
    """An optimizer that has stepped: its class, its steps, and how they are changed."""

    kind: str
    is_first: bool = False  # its model is monitored and watched
    steps: int = 0
    altered: int = -1  # losses, until its last step
    clip: ClipHandle | None = None
    scaled: ScaledStep | None = None


class _Stepping(NamedTuple):
    """An optimizer whose step is running, in `frame`; `scaled`, if it is scaled by this step."""

    frame: FrameType
    optimizer: Optimizer
    scaled: ScaledStep | None = None


@dataclass
class Optimizers:
    """Attaches to every optimizer of this process, from `install` to `close`."""

    options: Options
    losses: Enabled
    refusals: list[str] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    # By method: the number of units, and of clipped ones, which stays on the device until the end.
    clipped: dict[str, tuple[int, Tensor | int]] = field(default_factory=dict)
    scaled: set[str] = field(default_factory=set)
    verification: Verification | None = None
    verified_step: int = 0
    _known: WeakKeyDictionary[Optimizer, Seen] = field(default_factory=WeakKeyDictionary)
    # By thread: the optimizers whose step is running, the outermost first.
    _running: defaultdict[int, list[_Stepping]] = field(default_factory=lambda: defaultdict(list))
    _monitor: FilterMonitor | None = None
    _watcher: StepWatcher | None = None
    _attached: ExitStack = field(default_factory=ExitStack)

    def install(self) -> None:
        """Attach the hooks."""
        self._attached.enter_context(register_optimizer_step_pre_hook(self._before))
        self._attached.enter_context(register_optimizer_step_post_hook(self._after))

    def close(self) -> None:
        """Detach the hooks, and close the files."""
        self._attached.close()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        running, frame = self._running[get_ident()], sys._getframe(1)
        with _refusing(self.refusals):
            callers = {caller for caller, _ in walk_stack(frame)} if running else set()
            for failed in [step for step in running if step.frame not in callers]:
                running.remove(failed)  # its step has raised
                if failed.scaled is not None:
                    failed.scaled.restore()
            if any(outer.optimizer is optimizer for outer in running):
                running.append(_Stepping(frame, optimizer))  # it calls `super().step()`
                return None
            if optimizer not in self._known:
                self._known[optimizer] = self._meet(optimizer)
            seen, closure = self._known[optimizer], closure_of(args, kwargs)
            if closure is None:
                self._judge(seen)
            scaled = None if _is_scaled_outside(optimizer, running) else seen.scaled
            running.append(_Stepping(frame, optimizer, scaled))
            if scaled is None:
                return None
            if closure is None:
                return scaled.apply()

        def closure_then_scale() -> Any:
            with _refusing(self.refusals):
                scaled.restore()
            loss = closure()
            with _refusing(self.refusals):
                scaled.apply()
            return loss

        return args[:1], {**kwargs, "closure": closure_then_scale}

    def _meet(self, optimizer: Optimizer) -> Seen:
        """Attach to an optimizer at its first step."""
        options, seen = self.options, Seen(type(optimizer).__name__)
        thresholds, scales = options.given(CLIPPED), options.given(SCALED)
        if stepping_optimizer(optimizer) is optimizer:
            seen.is_first = not self.seen
            self.seen.append(seen)
            if thresholds:
                model = unwrap(find_model(optimizer)) if "agc" in thresholds else None
                head = (options.head or "auto") if model is not None else None
                seen.clip = clip_grads_before_step(optimizer, model, head=head, **thresholds)
                self._attached.enter_context(seen.clip)
            if seen.is_first and options.monitor is not None:
                monitor = FilterMonitor(find_model(optimizer), options.monitor)
                self._monitor = self._attached.enter_context(monitor)
                self._monitor.step(0)
        if scales:
            head_alone: set[nn.Parameter] = set()
            if "head_lr" in scales:
                model = unwrap(find_model(optimizer))
                layer = find_head(model, options.head)
                check_untied(layer, model)
                head_alone = set(layer.parameters())
            seen.scaled = ScaledStep(optimizer, scales, head_alone)
        return seen

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        running = self._running[get_ident()]
        step = running.pop()
        if any(outer.optimizer is optimizer for outer in running):
            return
        seen = self._known[optimizer]
        with _refusing(self.refusals):
            if closure_of(args, kwargs) is not None:  # it has computed the loss
                self._judge(seen)
            seen.steps += 1
            if step.scaled is not None:
                step.scaled.restore()
                self.scaled |= step.scaled.scaled
            for method, report in seen.clip.last_report.items() if seen.clip else ():
                units, clipped = self.clipped.get(method, (0, 0))
                self.clipped[method] = units + report.units, clipped + report.clipped
            if not seen.is_first:
                return
            if self._monitor is not None:
                self._monitor.step(seen.steps)
            known = self.verification is not None and self.verification.verdict != "cannot tell"
            if self.options.alpha == 1 or known or seen.steps > ATTEMPTS:
                return
            try:
                watcher = StepWatcher(find_model(optimizer), self.options.head)
                self._watcher = self._attached.enter_context(watcher)
            except ValueError as error:
                self.verification = Verification("cannot tell", reason=str(error))

    def _judge(self, seen: Seen) -> None:
        """Check the backward pass before step ``seen.steps + 1``."""
        if self._watcher is not None and seen.is_first:
            self._watcher.__exit__()
            self.verification, self.verified_step = self._watcher.result(), seen.steps + 1
            self._watcher = None
        if self.options.strict and self.options.alpha != 1 and not self.losses.compiled:
            altered = sum(self.losses.altered.values())
            if altered in (0, seen.altered):
                raise ValueError(
                    "Expected a loss to be altered before every step, but got none before step "
                    f"{seen.steps + 1} of {seen.kind}."
                )
            seen.altered = altered


@contextmanager
def _refusing(refusals: list[str]) -> Iterator[None]:
    """End the program if a requested change is not possible."""
    try:
        yield
    except (TypeError, ValueError) as error:
        message = str(error).replace(HEAD_REMEDY, "name it with `--head NAME`")
        refusals.append(message.removesuffix(" Pass `head=None` to clip every layer."))
        raise RefusedExit(NOT_ALTERED) from None


def find_model(optimizer: Optimizer) -> nn.Module:
    """The outermost module that holds all parameters of `optimizer`; a ValueError if none does."""
    wanted = {p for group in optimizer.param_groups for p in group["params"]}
    modules = [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]
    modules = [module for module in modules if "_modules" in vars(module)]  # initialised

    def held(module: nn.Module) -> set[nn.Parameter | None]:  # some classes override `parameters`
        return {p for part in module.modules() for p in part._parameters.values()} - {None}

    holders = [module for module in modules if wanted <= held(module)]
    holders = [m for m in holders if not isinstance(m, GraphModule)] or holders  # torch.compile's
    if not holders or not wanted:
        owners = [m for m in modules if not wanted.isdisjoint(m._parameters.values())]
        names = ", ".join(dict.fromkeys(type(module).__name__ for module in owners))
        raise ValueError(
            f"Expected one model that holds all parameters of {type(optimizer).__name__}, but got "
            f"{f'several modules ({names})' if names else 'no module'}."
        )
    inside = {id(child) for module in holders for child in module.children()}
    outermost = [module for module in holders if id(module) not in inside]
    return min(outermost, key=lambda module: len(held(module)))


def _is_scaled_outside(optimizer: Optimizer, running: list[_Stepping]) -> bool:
    """Whether a wrapper whose step is running has already scaled these groups."""
    wrappers = [outer.optimizer for outer in running if outer.scaled is not None]
    inside = any(wrapper.param_groups is optimizer.param_groups for wrapper in wrappers)
    if wrappers and not inside:
        raise TypeError(
            "Expected an optimizer inside another one to share its groups, but got "
            f"{type(optimizer).__name__} with its own groups, which cannot be scaled."
        )
    return inside


run_eagerly(Optimizers, ScaledStep)  # also for compiled functions that call `step()`
