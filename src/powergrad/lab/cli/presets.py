"""``powergrad sweep`` and ``decompose``: comparisons with given arms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from powergrad.lab.cli.common import Overrides, RecipeName, Words, recipe_and_overrides
from powergrad.lab.cli.conclude import run_and_report, show_tuning
from powergrad.lab.cli.study_options import StudyOptions, TuneOptions, answering, prepare
from powergrad.lab.runs import RecipeProgram
from powergrad.lab.study import IdentityCheck, Results
from powergrad.lab.study.arms import decomposition, parse_grid
from powergrad.lab.study.decompose import check_identity, describe_identity
from powergrad.lab.study.execute import tune_once
from powergrad.lab.study.saving import FILE, claim, load
from powergrad.lab.trainer.recipe import parse_overrides

_OPTIONS = StudyOptions()
_TUNE = TuneOptions()


@answering
def sweep(
    recipe: RecipeName = None,
    *overrides: Overrides,
    grid: Words = ("alpha=1,0.75,0.5,0.25,0.1,0.05",),
    options: StudyOptions = _OPTIONS,
) -> Results:
    """Run a grid over alpha, or over any other key, with several seeds.

    Args:
        recipe: The name of a recipe, or a YAML file.
        overrides: Overrides of the recipe.
        grid: A key and its values, such as alpha=1,0.5,0.25; may be repeated. All other points
            are compared with the first.
        options: The options of every study; --seeds is 8 by default.
    """
    name, typed = recipe_and_overrides(recipe, overrides, sweep)
    points = parse_grid(grid)
    program = RecipeProgram.of(options.base(name, typed, is_plain=False))
    study = options.study("sweep", program, points.arms())
    given = {*parse_overrides(typed), *points.values, "arms"}
    with prepare(study, None, options, given) as ready:
        records = {"grid": points, "remarks": ready.remarks}
        return run_and_report(ready.study, ready.folder, ready.execution, **records)


@answering
def decompose(
    recipe: RecipeName = None,
    *overrides: Overrides,
    alpha: float = 0.25,
    tuning: TuneOptions = _TUNE,
    options: StudyOptions = _OPTIONS,
) -> Results:
    """Find out which part of PGT makes a difference, by the equivalent two-group training.

    Cross-entropy is tuned once, and its settings are used for every arm.

    Args:
        recipe: The name of a recipe, or a YAML file.
        overrides: Overrides of the recipe.
        alpha: The alpha of PGT.
        tuning: The tuning of cross-entropy; lr by default, `--tune none` for no tuning.
        options: The options of every study.
    """
    name, typed = recipe_and_overrides(recipe, overrides, decompose)
    texts = tuning.tune or ("lr",)
    tuning = replace(tuning, tune=() if texts == ("none",) else texts)
    if tuning.repeats is not None:
        wanted = "Expected no --repeats, because decompose tunes cross-entropy once"
        raise ValueError(f"{wanted}, but got {tuning.repeats!r}.")
    tuned, changes = tuning.split()
    program = RecipeProgram.of(options.base(name, [*typed, *changes]))
    study = options.study("decompose", program, decomposition(program.base, alpha))
    tuner = None
    if tuned:
        tuner = tuning.tuner(options.study("tune", program, {}), {"CE": {}}, tuned)
    given = {*parse_overrides([*typed, *changes]), *(tuner.space.keys if tuner else ()), "arms"}
    with prepare(study, tuner, options, given) as ready:
        study, base = ready.study, ready.study.base
        records: dict[str, Any] = {"remarks": ready.remarks}
        if ready.tuner is not None:
            file = ready.folder / FILE  # until cross-entropy is tuned, that of the tuning
            if not file.exists():
                claim(ready.tuner.study, ready.folder)
            chosen, results = tune_once(ready.tuner, ready.execution)
            if (earlier := load(ready.folder).study) and earlier.kind == "tune":
                file.unlink()
            show_tuning(results)
            records |= {"tuning": results.tuning, "trials": results.trials}
            base = base.override(chosen.settings("CE"))
            program = RecipeProgram.of(base)
            study = replace(study, program=program, arms=decomposition(base, alpha))
        gaps = check_identity(base, alpha)
        print(describe_identity(gaps))
        records["identity"] = IdentityCheck(alpha=alpha, gaps=gaps)
        return run_and_report(study, ready.folder, ready.execution, **records)
