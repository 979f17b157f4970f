"""Advice on what to try next, from the results of a study."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from powergrad.lab.jobs import Changes, RecipeProgram
from powergrad.lab.stats import DEFAULT, Comparison
from powergrad.lab.study.definition import Study, StudyKind
from powergrad.lab.study.records import Tuning
from powergrad.lab.words import short_key

LINES = 2  # the maximal number of lines
WIDER = 4  # the factor by which a range is widened


def advise(
    study: Study | None,
    comparisons: Sequence[Comparison],
    tuning: Tuning | None,
    *,
    accuracy: float = math.nan,
) -> list[str]:
    """Advice on what to do next, the most important first."""
    better = [comparison.arm for comparison in comparisons if comparison.verdict == "better"]
    lines = [
        _at_an_edge(tuning),
        missing_control(study, better) if study else None,
        _untuned(study) if study else None,
        *_unsettled(study, comparisons, accuracy),
    ]
    return [line for line in lines if line][:LINES]


def _at_an_edge(tuning: Tuning | None) -> str | None:
    """Advice to widen a range, if a value at its edge was chosen."""
    if tuning is None:
        return None
    for arm in tuning.arms:
        for key in tuning.edges(arm):
            tried = [
                float(trial.point[key])
                for repeat in tuning.repeats
                if arm in repeat
                for trial in repeat[arm].trials
                if isinstance(trial.point.get(key), (int, float))
            ]
            chosen = tuning.repeats[0][arm].winner.point.get(key)
            if not tried or not isinstance(chosen, (int, float)) or min(tried) <= 0:
                continue
            low, high = min(tried), max(tried)
            is_upper = chosen * chosen > low * high
            low, high = (low, high * WIDER) if is_upper else (low / WIDER, high)
            return (
                f"Next: widen the tuning range. The chosen {short_key(key)} of {arm} is at the "
                "edge of the values that were tried, so the best value may lie beyond: --tune "
                f"{short_key(key)}={low:.2g}:{high:.2g}."
            )
    return None


def missing_control(study: Study, better: Collection[str]) -> str | None:
    """Advice to run a control, if PGT is better and no control was run."""
    if study.kind is not StudyKind.COMPARE or not isinstance(study.program, RecipeProgram):
        return None
    base = study.base

    def decay(changes: Changes) -> float:
        return base.override(changes).optimizer.backbone_decay

    with_pgt = [arm for arm, changes in study.arms.items() if changes.get("loss.alpha", 1) < 1]
    gained = [arm for arm in with_pgt if arm in better]
    others = [changes for arm, changes in study.arms.items() if arm not in with_pgt]
    if not gained:
        return None
    is_tuned = "optimizer.weight_decay" in study.tuned
    has_decay = base.optimizer.name != "adamw" and decay({}) > 0  # PGT does not affect AdamW's
    if has_decay and not is_tuned and not any(decay(c) < decay({}) for c in others):
        return (
            f"Before you keep {gained[0]}: PGT multiplies the weight decay of the backbone by "
            "alpha, and that alone may help as much. To find out, add less-decay to --arms, with "
            "--tune lr."
        )
    if not any("optimizer.head.lr" in changes for changes in others):
        return (
            f"Before you keep {gained[0]}: PGT lowers the learning rate of the last layer relative "
            "to the others, and that alone may help as much. To find out, add head-lr to --arms."
        )
    return None


def _untuned(study: Study) -> str | None:
    """Advice to tune the learning rate and the weight decay, if all arms used the same."""
    if study.kind is not StudyKind.COMPARE or not isinstance(study.program, RecipeProgram):
        return None
    alphas = [study.program.alpha(changes) for changes in study.arms.values()]
    if study.tuned or not 0 < min(alphas) < 1:
        return None
    alpha, options = min(alphas), study.base.optimizer
    values = {"lr": options.lr, "wd": options.weight_decay}
    ranges = [f"{key}={v * alpha:.2g}:{v / alpha:.2g}" for key, v in values.items() if v > 0]
    return (
        f"Next: tune the learning rate and the weight decay. All arms used those of the recipe, "
        f"{options.lr:g} and {options.weight_decay:g}, which may suit one arm better than another. "
        f"To tune them for each arm: --tune {' '.join(ranges)} --repeats 8."
    )


def _unsettled(
    study: Study | None, comparisons: Sequence[Comparison], accuracy: float
) -> Iterator[str]:
    """Advice on how to settle the open arms, after all planned runs."""
    unsettled = [
        comparison
        for comparison in comparisons
        if comparison.verdict == "not settled"
        and not (comparison.withheld or comparison.is_open)
        and math.isfinite(comparison.interval[0])
    ]
    if not unsettled:
        return
    worst = max(unsettled, key=lambda comparison: comparison.sd)
    needed, most = worst.runs_needed, DEFAULT.last
    what = "repeats" if study and study.finals else "seeds"
    if study is not None and study.design.is_fixed and worst.n < most and needed <= 2 * most:
        yield (
            f"Next: more {what}. About {needed} per arm would probably settle it; --{what} "
            f"{DEFAULT} --fresh starts a new study with as many as needed. Adding them to this "
            "study would increase the probability of a false verdict."
        )
        return
    if images := _images_needed(worst, needed, accuracy):
        now, more = images
        yield (
            f"Next: a larger test set. With {now} test images, the differences between runs are no "
            f"larger than chance; about {more} images would settle it with the same number of "
            f"{what}."
        )
    margin = worst.margin * math.sqrt(needed / max(worst.n, most))
    if margin > worst.margin:
        digits = 1 - math.floor(math.log10(margin))
        rounded = math.ceil(margin * 10**digits) / 10**digits
        yield (
            "Next: a larger margin, if you can accept it. The standard deviation of the runs of "
            f"one arm is {worst.sd:.2g}, so {max(worst.n, most)} {what} can settle a margin of "
            f"about {rounded:g} (--margin {rounded:g}), not {worst.margin:g}."
        )


def _images_needed(comparison: Comparison, needed: int, accuracy: float) -> tuple[int, int] | None:
    """The number of test images and a sufficient number, if the noise is due to too few images.

    If all predictions were independent, an accuracy p on N images would have the standard deviation
    sqrt(p (1 - p) / N). If runs vary no more than that, more images reduce the variation.
    """
    if not (comparison.step > 0 and 0 < accuracy < 100):
        return None
    images = round(100 / comparison.step)
    if abs(100 / comparison.step - images) > 0.01:  # the step is not one image
        return None
    by_chance = math.sqrt(accuracy * (100 - accuracy) / images)
    if comparison.sd > 1.25 * by_chance or needed <= comparison.n:
        return None
    return images, math.ceil(images * needed / comparison.n / 100) * 100
