"""Runs one program from start to end: attaches the changes, and reports what was altered."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from powergrad._version import __version__
from powergrad.compat import run_eagerly
from powergrad.mode import Enabled, disable, enable
from powergrad.reporting import write_json
from powergrad.run.optimizers import NOT_ALTERED, Optimizers
from powergrad.run.program import CLIPPED, SCALED, Options, Program
from powergrad.run.seeding import Seeding
from powergrad.verify import counted

__all__ = ["launch"]

BACKWARD = torch.autograd.backward

UNSCALED = {  # why a factor has changed nothing
    "lr": "every learning rate was 0",
    "head_lr": "no optimizer that has taken a step holds the head",
    "weight_decay": "no optimizer has a weight decay",
}


def launch(program: Program, options: Options) -> int:
    """Execute a program with altered gradients; return its exit code; 3 if not all was altered."""
    if options.json is not None:
        options.json.unlink(missing_ok=True)  # from an earlier run
    session, process = _Session(options), os.getpid()
    code, interrupted = 0, False
    try:
        program.execute()
    except SystemExit as error:
        code = error.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        _print(error)
        interrupted = isinstance(error, KeyboardInterrupt)
        code = 130 if interrupted else 1
    if os.getpid() == process:  # otherwise this is a fork of the program
        code = session.finish(code, program)
    if interrupted:
        sys.excepthook = lambda *_: None
        raise KeyboardInterrupt
    return code


def _print(error: BaseException) -> None:
    """Print an error as Python would, without the frames of this package."""
    trace, here = error.__traceback__, os.path.dirname(__file__)
    while trace is not None and os.path.dirname(trace.tb_frame.f_code.co_filename) == here:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


class _Session:
    """What is altered from now on, and what has become of it."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.losses = enable(options.alpha) if options.alpha != 1 else Enabled()
        self.optimizers = Optimizers(options, self.losses)
        self.seeding = None if options.seed is None else Seeding(options.seed)
        self.optimizers.install()
        self.first_loss: Tensor | None = None
        self.graph: list[str] = []  # the first nodes of the first backward pass
        torch.autograd.backward = self._first_backward  # also `Tensor.backward` calls it

    def finish(self, code: int, program: Program) -> int:
        """Print what was altered; return the exit code."""
        self.optimizers.close()
        problems = self.optimizers.refusals or ([] if code else self._problems())
        code = NOT_ALTERED if problems and not code else code
        is_reported = os.environ.get("RANK", "0") == "0"
        lines = [self._line()] * is_reported + [f"error: {problem}" for problem in problems]
        text = "".join(f"powergrad run: {line}\n" for line in lines)
        print(text, end="", file=sys.__stderr__, flush=True)
        if self.options.json is not None and is_reported:
            known = {"command": program.command, "exit_code": code, "problems": problems}
            write_json(self.options.json, known | self._summary())
        disable()
        return code

    def _first_backward(self, tensors: Any, *args: Any, **kwargs: Any) -> None:
        torch.autograd.backward = BACKWARD
        root = tensors if isinstance(tensors, Tensor) else next(iter(tensors), None)
        if isinstance(root, Tensor) and root.numel() == 1:
            self.first_loss = root.detach().clone()
        node = getattr(root, "grad_fn", None)
        while node is not None and len(self.graph) < 4:
            self.graph.append(node.name())
            node = next((n for n, _ in node.next_functions if n is not None), None)
        BACKWARD(tensors, *args, **kwargs)

    def _problems(self) -> list[str]:
        """The requested changes that did not happen."""
        options, optimizers = self.options, self.optimizers
        problem = self._problem_of_alpha() if options.alpha != 1 else ""
        problems = [f"--alpha {options.alpha:g} {problem}."] if problem else []
        steps = sum(seen.steps for seen in optimizers.seen)
        done = {method for method, (_, clipped) in optimizers.clipped.items() if int(clipped)}
        done |= optimizers.scaled | {"monitor"}
        asked = {**CLIPPED, **SCALED, "monitor": "monitor"}
        for name in options.given(asked):
            why = "no torch.optim.Optimizer has taken a step"
            if steps:
                above = f"no gradient was above the threshold in {counted(steps, 'step')}"
                why = "" if name in done else UNSCALED.get(name, above)
            if why:
                problems.append(f"--{asked[name].replace('_', '-')} changed nothing: {why}.")
        return problems

    def _problem_of_alpha(self) -> str:
        if not self.losses.altered and not self.losses.compiled:
            began = f" Its first backward pass began at {', '.join(self.graph)}."
            return (
                "altered nothing: no cross-entropy or log-softmax of PyTorch with a gradient was "
                f"called in this process.{began if self.graph else ''} Kernels of other libraries, "
                "TorchScript, and processes that the program starts itself cannot be altered: use "
                "PyTorch's loss, or start the processes with torchrun"
            )
        measured = self.optimizers.verification
        if measured is None:
            return "was not confirmed: there was no second step" if self.options.strict else ""
        if measured.verdict == "plain":
            return f"did not reach the model: the gradient of its head is {measured}"
        if self.options.strict:
            error = abs((measured.alpha or 0) - self.options.alpha)
            if measured.verdict != "pgt" or error > 1e-3 + (measured.uncertainty or 0):
                return f"was not confirmed: {measured}"
        return ""

    def _line(self) -> str:
        """The summary as one line."""
        options, losses, optimizers = self.options, self.losses, self.optimizers
        parts = [] if self.seeding is None else [str(self.seeding)]
        if options.alpha != 1:
            kinds = [f"{n:,} {kind}" for kind, n in losses.altered.items()]
            kinds += [f"{n:,} {kind} in compiled code" for kind, n in losses.compiled.items()]
            parts.append(f"alpha {options.alpha:g} altered {', '.join(kinds) or 'nothing'}")
            if losses.scripted:
                parts.append("scripted code is not altered")
            if losses.replaced:
                parts.append(f"the program has replaced {', '.join(losses.replaced)}")
            if optimizers.verification is not None:
                parts.append(f"step {optimizers.verified_step}: {optimizers.verification}")
        for method, (units, clipped) in optimizers.clipped.items():
            parts.append(f"{method} clipped {int(clipped):,} of {units:,} units")
        for name, scale in options.given(SCALED).items():
            done = "" if name in optimizers.scaled else " (not applied)"
            parts.append(f"{SCALED[name].replace('_', '-')} {scale:g}{done}")
        steps = [f"{counted(seen.steps, 'step')} of {seen.kind}" for seen in optimizers.seen]
        return "; ".join([*(parts or ["no change requested"]), ", ".join(steps) or "no steps"])

    def _summary(self) -> dict[str, Any]:
        """The rest of the summary as JSON values."""
        optimizers, measured = self.optimizers, self.optimizers.verification
        loss = math.nan if self.first_loss is None else float(self.first_loss)
        step = {"step": optimizers.verified_step, "text": str(measured)}
        return {
            "powergrad": __version__,
            "summary": self._line(),
            "altered": self.losses.altered,
            "optimizers": [{"class": seen.kind, "steps": seen.steps} for seen in optimizers.seen],
            "steps": sum(seen.steps for seen in optimizers.seen),
            "first_loss": loss if math.isfinite(loss) else None,
            "verification": asdict(measured) | step if measured is not None else None,
        }


run_eagerly(_Session._first_backward)
