"""What to try next, from the numbers of a study."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from powergrad.lab.jobs import Changes, RecipeProgram
from powergrad.lab.stats import DEFAULT, Comparison
from powergrad.lab.study.definition import Study, StudyKind
from powergrad.lab.study.records import Tuning
from powergrad.lab.words import short_key

__all__ = ["advise", "missing_control"]

LINES = 2  # of advice, at most
WIDER = 4  # times as far a range reaches that is to be widened


def advise(
    study: Study | None,
    comparisons: Sequence[Comparison],
    tuning: Tuning | None,
    *,
    accuracy: float = math.nan,
) -> list[str]:
    """What to do next, the most important first.

    Args:
        study: What was studied; None for runs made elsewhere.
        comparisons: Every arm against the baseline.
        tuning: How the arms were tuned.
        accuracy: The baseline's mean, if an accuracy in per cent is compared.
    """
    better = [comparison.arm for comparison in comparisons if comparison.verdict == "better"]
    lines = [
        _at_an_edge(tuning),
        missing_control(study, better) if study else None,
        _untuned(study) if study else None,
        *_unsettled(study, comparisons, accuracy),
    ]
    return [line for line in lines if line][:LINES]


def _at_an_edge(tuning: Tuning | None) -> str | None:
    """How to widen a range at whose edge a value was chosen."""
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
                f"Next: widen the tuning. {arm}'s {short_key(key)} was chosen at the edge of what "
                f"was tried, so the best value may lie beyond: --tune {short_key(key)}={low:.2g}:"
                f"{high:.2g}."
            )
    return None


def missing_control(study: Study, better: Collection[str]) -> str | None:
    """What to try before PGT is kept, if it came out better and its controls were not tried.

    Args:
        study: What was studied.
        better: The arms that came out better than the baseline.
    """
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
    has_decay = base.optimizer.name != "adamw" and decay({}) > 0  # AdamW's PGT leaves alone
    if has_decay and not is_tuned and not any(decay(c) < decay({}) for c in others):
        return (
            f"Before you keep {gained[0]}: PGT leaves the backbone alpha times its weight decay, "
            "and that alone may gain as much. Add less-decay to --arms, with --tune lr, to tell."
        )
    if not any("optimizer.head.lr" in changes for changes in others):
        return (
            f"Before you keep {gained[0]}: PGT lowers the learning rate of the last layer against "
            "that of the others, and that alone may gain as much. Add head-lr to --arms to tell."
        )
    return None


def _untuned(study: Study) -> str | None:
    """That all arms ran at one learning rate."""
    if study.kind is not StudyKind.COMPARE or not isinstance(study.program, RecipeProgram):
        return None
    alphas = [study.program.alpha(changes) for changes in study.arms.values()]
    if study.tuned or not 0 < min(alphas) < 1:
        return None
    rate, alpha = study.base.optimizer.lr, min(alphas)
    return (
        f"Next: tune the learning rate. All arms ran at the recipe's, {rate:g}, which may suit one "
        f"better than another: --tune lr={rate * alpha:.2g}:{rate / alpha:.2g} tunes it for each."
    )


def _unsettled(
    study: Study | None, comparisons: Sequence[Comparison], accuracy: float
) -> Iterator[str]:
    """What would settle the arms that are not settled, once all planned runs are done."""
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
            f"{DEFAULT} --fresh plans for as many as are needed. Adding them to this study would "
            "raise the chance of a false verdict."
        )
        return
    if images := _images_needed(worst, needed, accuracy):
        now, more = images
        yield (
            f"Next: a larger test set. With {now} test images, chance alone explains the "
            f"differences between runs; about {more} images would settle it with as many {what}."
        )
    margin = worst.margin * math.sqrt(needed / max(worst.n, most))
    if margin > worst.margin:
        digits = 1 - math.floor(math.log10(margin))
        rounded = math.ceil(margin * 10**digits) / 10**digits
        yield (
            "Next: a larger margin, if you can accept it. Runs of one arm scatter by "
            f"{worst.sd:.2g} (standard deviation), so {max(worst.n, most)} {what} can settle a "
            f"margin of about {rounded:g} (--margin {rounded:g}), not {worst.margin:g}."
        )


def _images_needed(comparison: Comparison, needed: int, accuracy: float) -> tuple[int, int] | None:
    """The number of test images, and a sufficient one, where too few images are the noise.

    If every answer were a toss of its own, an accuracy p on N images would scatter by
    sqrt(p (1 - p) / N). Where runs scatter no more than that, more images reduce it.
    """
    if not (comparison.step > 0 and 0 < accuracy < 100):
        return None
    images = round(100 / comparison.step)
    by_chance = math.sqrt(accuracy * (100 - accuracy) / images)
    if comparison.sd > 1.25 * by_chance or needed <= comparison.n:
        return None
    return images, math.ceil(images * needed / comparison.n / 100) * 100
