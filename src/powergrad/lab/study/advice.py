"""What to try next, from the numbers of a study."""

from __future__ import annotations

from collections.abc import Collection

from powergrad.lab.jobs import Changes, RecipeProgram
from powergrad.lab.study.definition import Study, StudyKind

__all__ = ["missing_control"]


def missing_control(study: Study, better: Collection[str]) -> str | None:
    """What to try before PGT is kept, if it came out better and less decay was not tried.

    Args:
        study: What was studied.
        better: The arms that came out better than the baseline.
    """
    if study.kind is not StudyKind.COMPARE or not isinstance(study.program, RecipeProgram):
        return None
    base = study.base
    is_tuned = "optimizer.weight_decay" in study.tuned
    if is_tuned or base.optimizer.name == "adamw":  # AdamW's decay PGT leaves alone
        return None

    def decay(changes: Changes) -> float:
        return base.override(changes).optimizer.backbone_decay

    with_pgt = [arm for arm, changes in study.arms.items() if changes.get("loss.alpha", 1) < 1]
    gained = [arm for arm in with_pgt if arm in better]
    others = [changes for arm, changes in study.arms.items() if arm not in with_pgt]
    is_tried = any(decay(changes) < decay({}) for changes in others)
    if not gained or is_tried or decay({}) == 0:
        return None
    return (
        f"Before you keep {gained[0]}: PGT leaves the backbone alpha times its weight decay, and "
        "that alone may gain as much. Add less-decay to --arms, with --tune lr, to tell."
    )
