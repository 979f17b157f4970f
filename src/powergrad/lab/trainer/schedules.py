"""The learning rate and alpha as functions of the (fractional) epoch."""

from __future__ import annotations

import bisect
import math

from powergrad.lab.trainer.recipe import Loss, Schedule


def learning_rate_at(epoch: float, schedule: Schedule, peak: float, epochs: int) -> float:
    """The learning rate: a linear warm-up to `peak`, then the schedule."""
    warmup = schedule.warmup_epochs
    if epoch < warmup:
        return schedule.warmup_start + (peak - schedule.warmup_start) * epoch / warmup
    if schedule.name == "constant":
        return peak
    if schedule.name == "step":
        return peak * schedule.gamma ** bisect.bisect_right(schedule.milestones, epoch)
    done = (epoch - warmup) / (epochs - warmup)
    return schedule.floor + (peak - schedule.floor) * (1 + math.cos(math.pi * done)) / 2


def alpha_at(epoch: float, loss: Loss, epochs: int) -> float:
    """Alpha: constant, or from ``loss.alpha`` to 1."""
    if loss.alpha_schedule == "constant":
        return loss.alpha
    done = epoch / epochs
    if loss.alpha_schedule == "cosine":
        done = (1 - math.cos(math.pi * done)) / 2
    return loss.alpha + (1 - loss.alpha) * done
