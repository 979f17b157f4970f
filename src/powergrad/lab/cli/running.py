"""``powergrad run``: runs an unmodified program of the user."""

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
    """Run an unmodified PyTorch training program with altered gradients.

    Usage: `powergrad run --alpha 0.3 -- train.py ARGS`, or `-- -m package.train ARGS`. After `--`,
    write the arguments that you would pass to `python`. With torchrun: `torchrun ... -m powergrad
    run ...`. The exit code is that of the program, or 3 if a requested change did not happen.

    Args:
        command: The script and its arguments.
        alpha: The alpha of PGT, for every cross-entropy and log-softmax; 1 is plain cross-entropy.
        agc: Adaptive clipping: the largest ratio of gradient norm to weight norm of each unit.
        clip_norm: Clip the norm of all gradients of an optimizer to this value.
        clip_value: Clip each element of the gradients to this value.
        decay_scale: Multiply the weight decay of every optimizer by this factor.
        lr_scale: Multiply the learning rate of every optimizer by this factor, with or without a
            scheduler.
        head_lr_scale: Multiply the learning rate of the classifier head by this factor.
        head: The name of the head in the model, if it cannot be found.
        monitor: Record the norm of every filter in this folder.
        strict: Stop at the first step without an altered loss, and fail unless the alpha measured
            on a step equals --alpha.
        json: Write a summary to this JSON file.
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
