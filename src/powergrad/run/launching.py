"""Runs one program from start to end: attaches the changes, and reports what was altered."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from powergrad._version import __version__
from powergrad.compat import on_first_backward
from powergrad.head import HEAD_REMEDY
from powergrad.mode import Enabled, disable, enable
from powergrad.reporting import write_json
from powergrad.run.optimizers import Optimizers
from powergrad.run.options import Options
from powergrad.run.program import Program
from powergrad.run.seeding import Seeding
from powergrad.verify import counted

__all__ = ["NOT_ALTERED", "launch"]

NOT_ALTERED = 3  # the exit code if the program was not altered as requested
FORMAT = 1


def launch(program: Program, options: Options) -> int:
    """Execute a program in this process, with altered gradients.

    Args:
        program: The program.
        options: The changes.

    Returns:
        The exit code of the program; or `NOT_ALTERED` if that is 0, but a requested change did not
        happen.

    Raises:
        KeyboardInterrupt: If the program was interrupted; its traceback has been printed.
    """
    if options.json is not None:
        options.json.unlink(missing_ok=True)  # from an earlier run
    session = _Session(options)
    session.install()
    process = os.getpid()
    ending = program.execute()
    code = ending.code
    if os.getpid() == process:  # otherwise this is a fork of the program
        code = session.finish(code, program)
    if ending.interrupted:
        sys.excepthook = lambda *_: None
        raise KeyboardInterrupt
    return code


class _Refused(SystemExit):
    """Ends a program that cannot be altered as requested, past any ``except Exception``."""


@dataclass
class _Session:
    options: Options
    refusals: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    first_loss: Tensor | None = None
    seeding: Seeding | None = None
    graph: list[str] = field(default_factory=list)  # the first nodes of the first backward pass

    def __post_init__(self) -> None:
        self.losses = Enabled()
        self.optimizers = Optimizers(self.options, self._altered, self._refuse)

    def install(self) -> None:
        if self.options.alpha != 1:
            self.losses = enable(self.options.alpha)
        if self.options.seed is not None:
            self.seeding = Seeding(self.options.seed)
        self.optimizers.install()
        on_first_backward(self._note_backward)

    def finish(self, code: int, program: Program) -> int:
        """Print what was altered; return the exit code."""
        self.optimizers.close()
        self.problems = self.refusals or ([] if code else self._problems())
        code = NOT_ALTERED if self.problems and not code else code
        rank = os.environ.get("RANK", "0")
        lines = [f"powergrad run: {self._line()}"] if rank == "0" else []
        lines += [f"powergrad run: error: {problem}" for problem in self.problems]
        print(*lines, sep="\n", end="\n" if lines else "", file=sys.__stderr__, flush=True)
        if self.options.json is not None and rank == "0":
            write_json(self.options.json, self._summary(code, program))
        disable()
        return code

    def _altered(self) -> int | None:
        return None if self.losses.compiled else sum(self.losses.altered.values())

    def _refuse(self, message: str) -> NoReturn:
        message = message.replace(HEAD_REMEDY, "name it with `--head NAME`")
        message = message.removesuffix(" Pass `head=None` to clip every layer.")
        self.refusals.append(message)
        raise _Refused(NOT_ALTERED)

    def _note_backward(self, roots: Sequence[Any]) -> None:
        root = roots[0] if roots else None
        if not isinstance(root, Tensor):
            return
        if root.numel() == 1:
            self.first_loss = root.detach().clone()
        node = root.grad_fn
        while node is not None and len(self.graph) < 4:
            self.graph.append(node.name())
            node = next((n for n, _ in node.next_functions if n is not None), None)

    # Problems -------------------------------------------------------------------------------------

    def _problems(self) -> list[str]:
        """The requested changes that did not happen."""
        options, optimizers = self.options, self.optimizers
        problems = self._problems_of_alpha() if options.alpha != 1 else []
        steps = sum(seen.steps for seen in optimizers.seen)
        for option in self._asked_of_optimizers():
            why = ""
            if not steps:
                why = "no torch.optim.Optimizer has taken a step"
            elif option in _CLIPPING and not int(optimizers.clipped[_CLIPPING[option]].clipped):
                why = f"no gradient was above the threshold in {counted(steps, 'step')}"
            elif option in _SCALING and _SCALING[option] not in optimizers.scaled:
                why = {
                    "--lr-scale": "every learning rate was 0",
                    "--decay-scale": "no optimizer has a weight decay",
                    "--head-lr-scale": "no optimizer that has taken a step holds the head",
                }[option]
            if why:
                problems.append(f"{option} changed nothing: {why}.")
        return problems

    def _problems_of_alpha(self) -> list[str]:
        option = f"--alpha {self.options.alpha:g}"
        if not self.losses.altered and not self.losses.compiled:
            began = f" Its first backward pass began at {', '.join(self.graph)}."
            return [
                f"{option} altered nothing: no cross-entropy or log-softmax of PyTorch with a "
                f"gradient was called in this process.{began if self.graph else ''} Kernels of "
                "other libraries, TorchScript, and processes that the program starts itself cannot "
                "be altered: use PyTorch's loss, or start the processes with torchrun."
            ]
        measured = self.optimizers.verification
        if measured is not None and measured.verdict == "plain":
            return [f"{option} did not reach the model: the gradient of its head is {measured}."]
        if self.options.strict and not self._is_proved():
            why = "there was no second step" if measured is None else str(measured)
            return [f"{option} was not confirmed: {why}."]
        return []

    def _is_proved(self) -> bool:
        measured = self.optimizers.verification
        if measured is None or measured.verdict != "pgt" or measured.alpha is None:
            return False
        return abs(measured.alpha - self.options.alpha) <= 1e-3 + (measured.uncertainty or 0)

    def _asked_of_optimizers(self) -> list[str]:
        options = self.options
        asked = [option for option, method in _CLIPPING.items() if method in options.thresholds]
        scales = asdict(options.scales)
        asked += [option for option, name in _SCALING.items() if scales[name] != 1]
        return asked + ["--monitor"] * (options.monitor is not None)

    # Summary --------------------------------------------------------------------------------------

    def _line(self) -> str:
        """The summary as one line."""
        options, losses, optimizers = self.options, self.losses, self.optimizers
        parts = [] if self.seeding is None else [str(self.seeding)]
        if options.alpha != 1:
            kinds = [f"{count:,} {kind}" for kind, count in losses.altered.items()]
            kinds += [
                f"{count:,} {kind} in compiled code" for kind, count in losses.compiled.items()
            ]
            parts.append(f"alpha {options.alpha:g} altered {', '.join(kinds) or 'nothing'}")
            if losses.scripted:
                parts.append("scripted code is not altered")
            if losses.replaced:
                parts.append(f"the program has replaced {', '.join(losses.replaced)}")
            if optimizers.verification is not None:
                parts.append(f"step {optimizers.verified_step}: {optimizers.verification}")
        for name, total in optimizers.clipped.items():
            parts.append(f"{name} clipped {int(total.clipped):,} of {total.units:,} units")
        for option, name in _SCALING.items():
            scale = asdict(options.scales)[name]
            if scale != 1:
                done = "" if name in optimizers.scaled else " (not applied)"
                parts.append(f"{option.removeprefix('--')} {scale:g}{done}")
        steps = [f"{counted(seen.steps, 'step')} of {seen.kind}" for seen in optimizers.seen]
        return "; ".join([*(parts or ["no change requested"]), ", ".join(steps) or "no steps"])

    def _summary(self, code: int, program: Program) -> dict[str, Any]:
        """The summary as JSON values."""
        options, optimizers = self.options, self.optimizers
        loss = None if self.first_loss is None else float(self.first_loss)
        measured = optimizers.verification
        return {
            "format": FORMAT,
            "powergrad": __version__,
            "command": program.command,
            "options": {
                k: str(v) if isinstance(v, Path) else v for k, v in asdict(options).items()
            },
            "exit_code": code,
            "problems": self.problems,
            "altered": self.losses.altered,
            "altered_in_compiled_code": self.losses.compiled,
            "scripted": self.losses.scripted,
            "replaced": self.losses.replaced if options.alpha != 1 else [],
            "optimizers": [{"class": seen.kind, "steps": seen.steps} for seen in optimizers.seen],
            "steps": sum(seen.steps for seen in optimizers.seen),
            "clipped": {
                name: {"units": total.units, "clipped": int(total.clipped)}
                for name, total in optimizers.clipped.items()
            },
            "scaled": sorted(optimizers.scaled),
            "first_loss": loss if loss is not None and math.isfinite(loss) else None,
            "verification": None
            if measured is None
            else {**asdict(measured), "step": optimizers.verified_step, "text": str(measured)},
        }


# The clipping method, or the scaled value of a group, for each option.
_CLIPPING = {"--agc": "agc", "--clip-norm": "norm", "--clip-value": "value"}
_SCALING = {"--lr-scale": "lr", "--head-lr-scale": "head_lr", "--decay-scale": "weight_decay"}
