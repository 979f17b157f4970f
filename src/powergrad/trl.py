"""PowerGrad Transform for TRL's trainers, whose loss is an autograd function of their own."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import torch
from torch import Tensor

from powergrad.checks import check_number
from powergrad.linear import linear_cross_entropy

__all__ = ["apply"]

NAME = "_ChunkedLogProbFunction"  # in trl.trainer.utils of 1.16.0; `SFTTrainer` takes its loss here


def apply(alpha: float) -> None:
    r"""Train with PowerGrad Transform in TRL's ``SFTTrainer``, for the rest of the process.

    Entropy and accuracy, which the trainer logs, are computed as well; they have no gradient. What
    other trainers of TRL ask for beyond them is refused.

    Args:
        alpha: The exponent, at least 0. Call it again to change it.

    Raises:
        ImportError: If this version of TRL does not have the function that is replaced.

    Example:
        >>> # powergrad.trl.apply(alpha=0.3)
        >>> # trl.SFTTrainer(model, ...).train()
    """
    check_number(alpha)
    import trl  # pyright: ignore[reportMissingImports]
    import trl.trainer.utils as utils  # pyright: ignore[reportMissingImports]

    if not hasattr(utils, NAME):
        raise ImportError(
            f"Expected `trl` to have trl.trainer.utils.{NAME}, as version 1.16.0, but got version "
            f"{trl.__version__} without it."
        )
    setattr(utils, NAME, SimpleNamespace(apply=functools.partial(_log_probs, alpha)))


def _log_probs(
    alpha: float,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk_size: int,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    outputs: tuple[str, ...] = ("log_probs",),
) -> tuple[Tensor, Tensor | None, None, None, Tensor | None]:
    """What TRL's autograd function computes, with its arguments and its five results."""
    more = {"log_sum_sq_probs", "mean_logits"}.intersection(outputs)
    if more:
        raise NotImplementedError(
            f"Expected `outputs` that SFTTrainer asks for, but got {', '.join(sorted(more))}."
        )
    # c tanh(s x / c) / T, as the map with the cap c / T and the scale s / T.
    losses, rows = linear_cross_entropy(
        hidden,
        weight,
        targets,
        alpha=alpha,
        linear_bias=bias,
        softcap=None if softcap is None else softcap / temperature,
        logit_scale=logit_scale / temperature,
        reduction="none",
        return_stats=True,
    )
    entropy = rows.entropy if "entropy" in outputs else None
    correct = rows.correct if "is_top1" in outputs else None
    wide = torch.promote_types(losses.dtype, torch.float32)
    return -losses.to(wide), entropy, None, None, correct
