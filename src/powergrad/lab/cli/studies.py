"""``powergrad compare``, ``sweep`` and ``decompose``: arms over seeds, and a verdict."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from powergrad.lab.cli.common import Overrides, stopped
from powergrad.lab.config import Recipe, load_recipe, parse_overrides
from powergrad.lab.jobs import RecipeProgram
from powergrad.lab.plan import least_seeds
from powergrad.lab.report import write_report
from powergrad.lab.signals import Interrupted
from powergrad.lab.study import (
    Decomposition,
    Metric,
    Results,
    Study,
    StudyKind,
    Tuning,
    metric_named,
    run_study,
)
from powergrad.lab.study.advice import missing_control
from powergrad.lab.study.arms import arms_of, decomposition, parse_grid
from powergrad.lab.study.decompose import (
    check_identity,
    describe_identity,
    explain_decomposition,
)
from powergrad.lab.study.tuning import Space
from powergrad.lab.study.tuning import tune as tune_study
from powergrad.lab.terminal import Watch, show_results

__all__ = ["StudyOptions", "compare", "decompose", "run_and_report", "sweep", "tune_arms"]


@Parameter(name="*")
@dataclass(frozen=True)
class StudyOptions:
    """What every study takes.

    Attributes:
        seeds: How many seeds each arm has; by default 8, or as many as the verdict on so many arms
            needs at least.
        first_seed: The first of them.
        metric: What is compared, at the last epoch; test_accuracy by default.
        margin: The largest difference that does not matter to you; by default 0.5 points of an
            accuracy, 0.05 of NLL, 0.01 of ECE, 1 dead unit.
        workers: Runs at a time on this machine; by default as many as there are cores.
        threads: Threads of each run.
        out: Where the study's folder is made.
        name: The name of the study's folder; by default it is named by its recipe.
        storage: The URL of a database through which several machines share the runs.
    """

    seeds: int | None = None
    first_seed: int = 0
    metric: str | None = None
    margin: float | None = None
    workers: int | None = None
    threads: int = 1
    out: Path = Path("runs")
    name: str | None = None
    storage: str | None = None

    def seed_list(self, arms: int) -> list[int]:
        """The seeds of a study of so many arms."""
        seeds = max(8, least_seeds(max(arms - 1, 1))) if self.seeds is None else self.seeds
        if seeds < 1:
            raise ValueError(f"Expected `seeds` to be at least 1, but got {seeds}.")
        return [*range(self.first_seed, self.first_seed + seeds)]

    def compared(self) -> tuple[Metric, float]:
        """What is compared, and the margin."""
        metric = metric_named(self.metric or "test_accuracy")
        return metric, metric.margin if self.margin is None else self.margin

    def crew(self) -> int:
        """How many runs at a time."""
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"Expected `workers` to be at least 1, but got {self.workers}.")
        return self.workers or max(1, (os.cpu_count() or 1) // self.threads)

    def folder(self, study: Study) -> Path:
        """The study's folder."""
        return self.out / (self.name or study.name)

    def study(self, kind: StudyKind, base: Recipe, arms: dict[str, dict[str, Any]]) -> Study:
        """A study of a recipe, with the seeds and the metric of these options."""
        seeds = self.seed_list(len(arms))
        return Study(kind, RecipeProgram(base), arms, seeds, *self.compared())

    def base(self, recipe: str, overrides: Sequence[str]) -> Recipe:
        """The recipe of every run: it writes no more than a study reads."""
        given = parse_overrides(overrides)
        if "seed" in given:
            raise ValueError(
                f"Expected --seeds and --first-seed, but got seed = {given['seed']!r}, which every "
                "run has its own of."
            )
        changes = {"machine.threads": self.threads, "machine.keep_best": False, **given}
        return load_recipe(recipe, changes)

    def plain_base(self, recipe: str, overrides: Sequence[str]) -> Recipe:
        """The same for a study whose arms set alpha themselves."""
        base = self.base(recipe, overrides)
        if base.loss.alpha != 1:
            raise ValueError(
                "Expected loss.alpha to be 1 in the recipe, because the arms set it (--alpha), but "
                f"got {base.loss.alpha:g}: the baseline would have PGT."
            )
        return base


_OPTIONS = StudyOptions()


def compare(
    recipe: str = "digits",
    *overrides: Overrides,
    arms: str = "baseline,pgt,agc,agc+pgt",
    arm: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    alpha: str = "0.25",
    tune: str | None = None,
    tune_seeds: int = 2,
    from_: Annotated[Path | None, Parameter(name="--from")] = None,
    baseline: str | None = None,
    better: Literal["higher", "lower"] | None = None,
    options: StudyOptions = _OPTIONS,
) -> int:
    """Does it help here? Every arm over the same seeds, and a verdict.

    Starting the same comparison again does only what is missing.

    Args:
        recipe: The name of a recipe, or a YAML file.
        overrides: Changes of the recipe, for all arms.
        arms: Arms, separated by commas: baseline, pgt, gc, agc, label-smoothing, less-decay
            (alpha times the weight decay, without PGT), head-lr (PGT's ratio of the head's
            learning rate to the backbone's, without PGT), joined by +. The first is the one that
            the others are compared with.
        arm: One more arm, as "name: key=value, key=value"; may be given several times.
        alpha: The alpha of pgt, less-decay and head-lr; several, separated by commas, make one
            arm each.
        tune: A key to tune for every arm alike, as lr or lr=0.1,0.2,0.4, on held-out training data.
        tune_seeds: Seeds of each value that is tried.
        from_: Compare the runs of a CSV instead, which has the columns arm, seed and a metric.
        baseline: With --from: the arm to compare with.
        better: With --from: whether a higher or a lower metric is better, where its name does not
            tell.
        options: What every study takes.
    """
    if from_ is not None:
        results = Results.from_csv(
            from_,
            metric=options.metric,
            baseline=baseline,
            margin=options.margin,
            better=better,
        )
        show_results(results)
        return 0
    alphas = [float(value) for value in parse_grid([f"alpha={alpha}"]).values["loss.alpha"]]
    names = [name.strip() for name in arms.split(",") if name.strip()]
    base = options.plain_base(recipe, overrides)
    study = options.study(StudyKind.COMPARE, base, arms_of([*names, *arm], base, alphas))
    _check_comparable(study)
    tuning = None
    try:
        if tune is not None:
            space = Space.parse(tune, base)
            study = replace(study, tuned=(space.key,))
            folder = options.folder(study)
            study, tuning = tune_arms(study, space, tune_seeds, folder, options)
        else:
            folder = options.folder(study)
        run_and_report(study, folder, options, tuning=tuning)
    except Interrupted as reason:
        return stopped(reason)
    return 0


def sweep(
    recipe: str = "digits",
    *overrides: Overrides,
    grid: Annotated[tuple[str, ...], Parameter(negative="")] = ("alpha=1,0.75,0.5,0.25,0.1,0.05",),
    options: StudyOptions = _OPTIONS,
) -> int:
    """A grid over alpha, and any other key, over seeds.

    Args:
        recipe: The name of a recipe, or a YAML file.
        overrides: Changes of the recipe, for all points.
        grid: A key and its values, as alpha=1,0.5,0.25; may be given several times. The first
            point is the one that the others are compared with.
        options: What every study takes.
    """
    points = parse_grid(grid)
    study = options.study(StudyKind.SWEEP, options.base(recipe, overrides), points.arms())
    _check_comparable(study)
    try:
        run_and_report(study, options.folder(study), options, grid=points)
    except Interrupted as reason:
        return stopped(reason)
    return 0


def decompose(
    recipe: str = "digits",
    *overrides: Overrides,
    alpha: float = 0.25,
    tune: str = "lr",
    tune_seeds: int = 2,
    options: StudyOptions = _OPTIONS,
) -> int:
    """Which part of PGT helps here? Its identity with a two-group training, one factor at a time.

    Cross-entropy is tuned once, and its setting is used for every arm.

    Args:
        recipe: The name of a recipe, or a YAML file.
        overrides: Changes of the recipe, for all arms.
        alpha: PGT's alpha.
        tune: The key that is tuned for cross-entropy, as lr or lr=0.1,0.2; none to tune nothing.
        tune_seeds: Seeds of each value that is tried.
        options: What every study takes.
    """
    base = options.plain_base(recipe, overrides)
    study = options.study(StudyKind.DECOMPOSE, base, decomposition(base, alpha))
    _check_comparable(study)
    folder = options.folder(study)
    tuning = None
    try:
        if tune != "none":
            alone = replace(study, kind=StudyKind.TUNE, arms={"CE": {}})
            tuned, tuning = tune_arms(alone, Space.parse(tune, base), tune_seeds, folder, options)
            base = base.override(tuned.arms["CE"])
            study = options.study(StudyKind.DECOMPOSE, base, decomposition(base, alpha))
            folder = folder / "arms"
        gaps = check_identity(base, alpha)
        print(describe_identity(gaps))
        checked = Decomposition(alpha, gaps)
        run_and_report(study, folder, options, tuning=tuning, decomposition=checked)
    except Interrupted as reason:
        return stopped(reason)
    return 0


def _check_comparable(study: Study) -> None:
    if len(study.arms) < 2:
        raise ValueError(f"Expected at least 2 arms, but got {len(study.arms)}.")
    if len(study.seeds) < 2:
        raise ValueError(
            f"Expected at least 2 seeds, because one run says nothing of the noise, but got "
            f"{len(study.seeds)}."
        )


def tune_arms(
    study: Study, space: Space, seeds: int, folder: Path, options: StudyOptions
) -> tuple[Study, Tuning]:
    """The study with a key tuned for every arm alike, and how; printed as well."""
    study, tuning = tune_study(
        study,
        space,
        folder,
        seeds=seeds,
        workers=options.crew(),
        storage=options.storage,
        show=Watch,
    )
    for arm in tuning.arms:
        print(tuning.describe(arm))
    return study, tuning


def run_and_report(study: Study, folder: Path, options: StudyOptions, **records: Any) -> Results:
    """Run a study, save and draw it, write its page, and print its verdict.

    Args:
        study: What is studied.
        folder: Where the runs and everything else go.
        options: How many runs at a time, and where the queue is.
        records: ``tuning``, ``grid`` and ``decomposition``, as :class:`Results` has them.
    """
    from powergrad.lab.figures import draw_study

    with Watch(study.program.title, study.jobs(), study.metric.name) as watch:
        results = run_study(
            study, folder, workers=options.crew(), storage=options.storage, watch=watch
        )
    results = replace(results, **records)
    if len(study.arms) < 2 or len(study.seeds) < 2:
        return results  # nothing to compare: rows of the paper can be trained one by one
    page = folder / "report.html"
    try:
        results.save(folder)
    except ValueError:  # a run has no such metric: the page says which
        write_report([results], page)
        raise
    draw_study(results, folder / "study.png", f"{folder.name}: {len(results.rows)} runs")
    write_report([results], page)
    show_results(results)
    if results.decomposition is not None:
        print(explain_decomposition(results, results.decomposition.alpha))
    if control := missing_control(study, results.with_verdict("better")):
        print(f"\n{control}")
    print(f"\nLook at {page}; beside it study.csv, study.json, study.png, the runs.")
    return results
