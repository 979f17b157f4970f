"""The decomposition of PGT into the parts of the equivalent two-group training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from powergrad.lab.data import load_data
from powergrad.lab.study.arms import decomposition
from powergrad.lab.study.results import Results
from powergrad.lab.trainer.recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor

ROUNDING = 1e-6  # a relative difference in float64 above this is not rounding
MARKS = (1, 10, 50, 200)  # steps at which the identity is checked


def check_identity(recipe: Recipe, alpha: float) -> dict[int, float]:
    """The difference between PGT and the equivalent two-group training over the first steps."""
    import torch  # slow to import

    from powergrad.head import find_head
    from powergrad.lab.trainer.processes import Processes
    from powergrad.lab.trainer.session import Session

    arms = decomposition(recipe, alpha)
    data = load_data(recipe.data, data_dir=recipe.machine.data_dir)
    passed: dict[int, dict[str, Tensor]] = {}
    gaps: dict[int, float] = {}
    for arm in ("PGT", "two-group CE"):
        chosen = recipe.override({**arms[arm], "train.precision": "float64"})
        session = Session(chosen, data, Processes(0, 1, torch.device("cpu")))
        head = set(find_head(session.model, None).parameters())
        in_head = {n for n, parameter in session.model.named_parameters() if parameter in head}
        while session.step < min(MARKS[-1], session.steps) and not session.diverged:
            for _ in session.run_epoch():
                if session.step in MARKS and arm == "PGT":
                    passed[session.step] = {
                        name: value.clone() * (alpha if name in in_head else 1)
                        for name, value in session.model.state_dict().items()
                        if value.is_floating_point()
                    }
                elif session.step in passed:
                    weights = session.model.state_dict()
                    gaps[session.step] = max(
                        float((weights[name] - value).abs().max() / value.abs().max().clamp(1e-30))
                        for name, value in passed[session.step].items()
                    )
                if session.step >= MARKS[-1]:
                    break
    return gaps


def describe_identity(gaps: Mapping[int, float]) -> str:
    """The result of :func:`check_identity` as a sentence."""
    early = max(step for step in gaps if step <= 10)
    last = max(gaps)
    text = (
        f"In float64, the weights of PGT and the two-group CE differ by {gaps[early]:.0e} after "
        f"{early} steps and by {gaps[last]:.0e} after {last}: "
    )
    if not gaps[early] < ROUNDING:
        return f"WARNING: {text}they are not the same training here."
    if not gaps[last] < ROUNDING:
        return f"{text}they are the same training, but it is unstable, so rounding errors grow."
    return f"{text}they are the same training."


def explain_decomposition(results: Results, alpha: float) -> str:
    """Whether PGT helps, and whether a single change would do the same."""
    by_arm = {comparison.arm: comparison for comparison in results.comparisons}
    single = [arm for arm in by_arm if "alpha" in arm and arm != "CE(alpha z)"]
    better = [arm for arm in single if by_arm[arm].verdict == "better"]
    if by_arm["PGT"].verdict != "better":
        conclusion = "PGT itself is not shown to help here, so there is no gain to decompose."
    elif better:
        best = max(better, key=lambda arm: abs(by_arm[arm].difference))
        conclusion = f"Instead of PGT, this single change could be used here: {best}."
    else:
        conclusion = "No single change does the same here: PGT or its two groups are needed."
    return f"PGT at alpha {alpha:g}: {by_arm['PGT'].sentence}\n{conclusion}"
