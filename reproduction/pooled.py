"""The studies on Fashion-MNIST with batch normalisation, taken together."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from powergrad.lab.stats import format_signed
from reproduction.studies import Contrast, Trial, contrasts_of

__all__ = ["pooled_sentence"]

LEFT_OUT = "T1.4-fashion-mnist"  # ResNet-101, which 936 steps leave behind ResNet-50


def pooled_sentence(trials: Sequence[Trial]) -> str:
    """PGT less its baseline, over distinct baselines, weighted by the inverse of the variance."""
    chosen: dict[frozenset[tuple[object, ...]], Contrast] = {}
    for trial in trials:
        if trial.norm != "batch" or trial.is_grid or trial.name == LEFT_OUT:
            continue
        for contrast in contrasts_of(trial):
            is_pgt = contrast.arm.methods == {"PGT"} and "fashion-mnist" in contrast.arm.measured_on
            if is_pgt:  # the first with PGT of each baseline
                chosen.setdefault(contrast.against.runs, contrast)
    means, weights = [], []
    for contrast in chosen.values():
        arm, base = (np.array([*a.test.values()]) for a in (contrast.arm, contrast.against))
        means.append(arm.mean() - base.mean())
        weights.append(1 / (arm.var(ddof=1) / len(arm) + base.var(ddof=1) / len(base)))
    mean = float(np.average(means, weights=weights))
    reach = 1.96 / math.sqrt(sum(weights))
    return (
        f"The mean difference of PGT from cross-entropy is {format_signed(mean)} ± {reach:.2f} "
        f"points (95% interval; {len(means)} studies with distinct baselines, weighted by the "
        "inverse of their variance; the learning rate of each arm was tuned once). A study with "
        "ResNet-101 is left out, because in so few steps it does not reach the accuracy of "
        "ResNet-50."
    )
