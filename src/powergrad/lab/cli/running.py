"""``powergrad run``: a program of the user's, unchanged."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from powergrad.launch import Options, Program, launch

__all__ = ["run"]


def run(
    *command: str,
    alpha: float = 1.0,
    agc: float | None = None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    decay_scale: float = 1.0,
    lr_scale: float = 1.0,
    head_lr_scale: float = 1.0,
    head: str | None = None,
    monitor: Path | None = None,
    strict: Annotated[bool, Parameter(negative="")] = False,
    json: Path | None = None,
) -> Callable[[], int]:
    """Execute an unmodified PyTorch training program with altered gradients.

    Write `powergrad run --alpha 0.3 -- train.py ARGS`, or `-- -m package.train ARGS`: after `--`
    comes what would follow `python`. Under torchrun: `torchrun ... -m powergrad run ...`. The exit
    code is that of the program, or 3 if something that was asked for did not happen.

    Args:
        command: The script and its arguments.
        alpha: PGT's exponent for every cross-entropy and log-softmax; 1 is plain.
        agc: Clip the gradient of each unit to so many times its weight's norm (adaptive clipping).
        clip_norm: Clip the norm of all gradients of an optimizer.
        clip_value: Clip each entry of the gradients.
        decay_scale: Multiply the weight decay of every optimizer.
        lr_scale: Multiply the learning rate of every optimizer, scheduled or not.
        head_lr_scale: Multiply the learning rate of the classifier head.
        head: The name of the head in the model, where it is not found.
        monitor: Record the norm of every filter into this folder.
        strict: Stop at the first step without an altered loss, and fail unless the alpha measured
            on a step is the one asked for.
        json: Write a summary to this file.
    """
    options = Options(
        alpha,
        agc,
        clip_norm,
        clip_value,
        decay_scale,
        lr_scale,
        head_lr_scale,
        head,
        monitor,
        strict,
        json,
    )
    return partial(launch, Program(command), options)
