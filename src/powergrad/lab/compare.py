"""The studies that the commands run: compare, sweep, decompose; and tuning for all arms alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from powergrad._head import find_head
from powergrad.lab.arms import decomposition, expand_key, parse_grid
from powergrad.lab.config import Recipe, RecipeError
from powergrad.lab.data import load_data
from powergrad.lab.distributed import Processes
from powergrad.lab.jobs import Job, Snapshot
from powergrad.lab.session import Session
from powergrad.lab.study import METRICS, Results, Study

__all__ = [
    "check_identity",
    "check_tune_seeds",
    "decompose",
    "describe_identity",
    "explain_decomposition",
    "in_words",
    "missing_control",
    "sweep_arms",
    "tune",
    "tuning_grid",
]

HOLD_OUT = 0.2  # of the training data, on which arms are tuned
FRESH = 1000  # the first of the seeds that tune, so that the study's are fresh; or later

Show = Callable[
    [str, Mapping[tuple[str, int], Job], str], AbstractContextManager[Callable[[Snapshot], None]]
]


def default_grid(recipe: Recipe, key: str) -> list[float]:
    """Around the recipe's own value: a quarter, half, once, twice and four times."""
    value = recipe.value(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value == 0:
        raise RecipeError(
            f"Expected the values to try for {key!r}, as {key}=value,value, because the recipe's "
            f"own is {value!r}."
        )
    return [value * factor for factor in (0.25, 0.5, 1, 2, 4)]


def tuned_key(wanted: str) -> str:
    """The dotted key of ``lr`` or ``lr=0.1,0.2``.

    Example:
        >>> tuned_key("lr=0.1,0.2")
        'optimizer.lr'
    """
    return expand_key(wanted.partition("=")[0].strip())


def tuning_grid(recipe: Recipe, wanted: str) -> tuple[str, list[Any]]:
    """The key to tune, and the values to try.

    Args:
        recipe: The recipe.
        wanted: ``lr`` (a grid around the recipe's value) or ``lr=0.1,0.2``.

    Raises:
        RecipeError: If there is no such key, or no values.

    Example:
        >>> tuning_grid(Recipe(), "lr=0.1,0.2")
        ('optimizer.lr', [0.1, 0.2])
    """
    key = tuned_key(wanted)
    recipe.value(key)
    return key, parse_grid([wanted])[key] if "=" in wanted else default_grid(recipe, key)


def in_words(value: Any) -> str:
    """A value that was tried.

    Example:
        >>> in_words(0.10000), in_words("batch")
        ('0.1', 'batch')
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f"{value:g}" if is_number else str(value)


def check_tune_seeds(seeds: int) -> None:
    """Refuse a tuning without seeds."""
    if seeds < 1:
        raise ValueError(f"Expected --tune-seeds to be at least 1, but got {seeds}.")


def tune(
    study: Study,
    wanted: str,
    folder: Path,
    *,
    seeds: int,
    workers: int,
    storage: str | None,
    show: Show,
) -> tuple[Study, dict[str, Any]]:
    """Choose a value of a key for every arm, the same grid for all, on held-out training data.

    An arm that sets the key itself has its own value multiplied as the recipe's is.

    Args:
        study: What is studied.
        wanted: The key, as ``lr`` (a grid around the recipe's value) or ``lr=0.1,0.2``.
        folder: The study's folder.
        seeds: Seeds of each value.
        workers: Runs at a time.
        storage: See :func:`powergrad.lab.jobs.run_jobs`.
        show: Makes what shows how far it is.

    Returns:
        The study with the arms' choices, and what led to them.
    """
    check_tune_seeds(seeds)
    if study.base.data.hold_out:
        raise RecipeError(
            "Expected data.hold_out to be 0 where arms are tuned, which holds out data of its own, "
            f"but got {study.base.data.hold_out:g}."
        )
    key, values = tuning_grid(study.base, wanted)
    first = max(FRESH, max(study.seeds) + 1)
    own = study.base.value(key)
    trials: dict[str, dict[str, Any]] = {}
    places: dict[str, tuple[str, Any]] = {}
    for arm, changes in study.arms.items():
        for value in values:
            chosen = value
            if key in changes and isinstance(own, (int, float)) and own:
                chosen = changes[key] * value / own
            name = f"{arm} {key.rpartition('.')[2]}={in_words(value)}"
            trials[name] = {**changes, key: chosen, "data.hold_out": HOLD_OUT}
            places[name] = arm, chosen
    trial = Study(
        "tune",
        study.base,
        trials,
        [first + seed for seed in range(seeds)],
        study.metric,
        study.margin,
    )
    with show(f"tuning {key}", trial.jobs(), study.metric) as watch:
        results = trial.run(folder / "tuning", workers=workers, storage=storage, watch=watch)
    higher, _ = METRICS[study.metric]
    found: dict[str, Any] = {}
    arms: dict[str, dict[str, Any]] = {}
    for arm, changes in study.arms.items():
        means = {
            chosen: results.mean(name, study.metric)
            for name, (each, chosen) in places.items()
            if each == arm
        }
        usable = {value: mean for value, mean in means.items() if mean == mean}
        if not usable:
            raise RecipeError(f"Expected a value of {key!r} at which {arm!r} trains, but got none.")
        best = (max if higher else min)(usable, key=lambda value: usable[value])
        numbers = [value for value in means if isinstance(value, (int, float))]
        found[arm] = {
            "chosen": best,
            "at_edge": len(numbers) > 1 and best in (min(numbers), max(numbers)),
            "means": [{"value": value, "mean": mean} for value, mean in means.items()],
        }
        arms[arm] = {**changes, key: best}
    told = {"key": key, "seeds": list(trial.seeds), "hold_out": HOLD_OUT, "arms": found}
    return replace(study, arms=arms), told


def sweep_arms(grid: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, Any]]:
    """Every point of a grid as an arm.

    Example:
        >>> sweep_arms({"loss.alpha": [1.0, 0.3], "seed": [1]})["alpha=0.3, seed=1"]
        {'loss.alpha': 0.3, 'seed': 1}
    """
    arms = {}
    for point in itertools.product(*grid.values()):
        changes = dict(zip(grid, point, strict=True))
        name = ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in changes.items())
        arms[name] = changes
    return arms


def decompose(recipe: Recipe, alpha: float, seeds: Sequence[int], **options: Any) -> Study:
    """The study that takes PGT apart."""
    return Study("decompose", recipe, decomposition(recipe, alpha), seeds, **options)


ROUNDING = 1e-6  # a relative difference of float64 that has other causes
MARKS = (1, 10, 50, 200)  # steps at which the identity is looked at


def check_identity(recipe: Recipe, alpha: float) -> dict[int, float]:
    """How far PGT and the equal two-group training are apart over their first steps, in float64.

    Returns:
        By the number of steps: the largest difference of a weight (the head's times alpha), over
        the largest weight of its tensor. It is rounding, about 1e-15, which then grows: slowly in
        a stable training, by a factor at each step in one that is not.
    """
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
                        for name, value in session.weights().items()
                        if value.is_floating_point()
                    }
                elif session.step in passed:
                    weights = session.weights()
                    gaps[session.step] = max(
                        float((weights[name] - value).abs().max() / value.abs().max().clamp(1e-30))
                        for name, value in passed[session.step].items()
                    )
                if session.step >= MARKS[-1]:
                    break
    return gaps


def describe_identity(gaps: Mapping[int, float]) -> str:
    """What :func:`check_identity` found, in a sentence."""
    early = max(step for step in gaps if step <= 10)
    last = max(gaps)
    words = (
        f"In float64, PGT and the two-group CE are {gaps[early]:.0e} apart after {early} steps and "
        f"{gaps[last]:.0e} after {last}: "
    )
    if not gaps[early] < ROUNDING:
        return f"WARNING: {words}they are not the same training here."
    if not gaps[last] < ROUNDING:
        return f"{words}the same training, though one so unstable that rounding grows."
    return f"{words}they are the same training."


def missing_control(
    kind: str, base: Recipe, arms: Mapping[str, Mapping[str, Any]], better: Collection[str]
) -> str | None:
    """What to try before PGT is kept, if it came out better and less decay was not tried.

    Args:
        kind: The study's kind.
        base: Its recipe.
        arms: What its arms change.
        better: Those that came out better than the baseline.
    """
    is_tuned = kind.endswith("optimizer.weight_decay")
    if not kind.startswith("compare") or is_tuned or base.optimizer.name == "adamw":
        return None  # AdamW's decay PGT leaves alone

    def decay(changes: Mapping[str, Any]) -> float:
        return base.override(changes).optimizer.backbone_decay

    with_pgt = [arm for arm, changes in arms.items() if changes.get("loss.alpha", 1) < 1]
    gained = [arm for arm in with_pgt if arm in better]
    others = [changes for arm, changes in arms.items() if arm not in with_pgt]
    is_tried = any(decay(changes) < decay({}) for changes in others)
    if not gained or is_tried or decay({}) == 0:
        return None
    return (
        f"Before you keep {gained[0]}: PGT leaves the backbone alpha times its weight decay, and "
        "that alone may gain as much. Add less-decay to --arms, with --tune lr, to tell."
    )


def explain_decomposition(results: Results, alpha: float) -> str:
    """What PGT's gain is made of, in a paragraph from the numbers."""
    found = {each.arm: each for each in results.comparisons()}
    pgt, same = found["PGT"], found["two-group CE"]

    def said(arm: str) -> str:
        low, high = found[arm].interval
        return f"{arm} {found[arm].difference:+.2f} ({low:+.2f} to {high:+.2f})"

    parts = [arm for arm in found if "alpha" in arm and not arm.startswith("CE")]
    better = [arm for arm in parts if found[arm].verdict == "better"]
    worse = [arm for arm in parts if found[arm].verdict == "worse"]
    lines = [
        f"At alpha {alpha:g}, {said('PGT')}: {pgt.verdict}. The equal two-group CE, the same "
        f"training up to rounding: {same.difference:+.2f}, {same.verdict}."
    ]
    if better:
        lines.append("Alone, these parts of it help: " + "; ".join(map(said, better)) + ".")
    if worse:
        lines.append("These do harm: " + "; ".join(map(said, worse)) + ".")
    if not better and not worse:
        largest = max(parts, key=lambda arm: abs(found[arm].difference))
        lines.append(f"No part alone is better or worse; the largest is {said(largest)}.")
    faster = found["CE at lr / alpha"]
    lines.append(
        f"Without PGT, at the learning rate divided by alpha: {said('CE at lr / alpha')}, "
        f"{faster.verdict}. The loss of alpha times the logits: {said('CE(alpha z)')}."
    )
    if pgt.verdict == "better":
        simpler = [arm for arm in (*better, "CE at lr / alpha") if found[arm].verdict == "better"]
        if simpler:
            best = max(simpler, key=lambda arm: found[arm].difference)
            lines.append(f"Instead of PGT one could change this here: {best}.")
        else:
            lines.append("No single change does the same here: PGT, or its two groups, are needed.")
    else:
        lines.append("PGT itself is not shown to help here, so there is no gain to take apart.")
    return "\n".join(lines)
