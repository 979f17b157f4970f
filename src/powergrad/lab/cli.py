"""What the commands do: thin, over the modules that do the work."""

from __future__ import annotations

import csv as csv_module
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from powergrad.lab.arms import arms_of, decomposition, parse_grid
from powergrad.lab.compare import explain_decomposition, in_words, missing_control
from powergrad.lab.config import Recipe, load_recipe, parse_overrides
from powergrad.lab.plan import least_seeds
from powergrad.lab.study import MARGINS, Results, Study, read_csv, read_rows
from powergrad.lab.train import Interrupted
from powergrad.monitor import Recording, Thresholds, census

Overrides = Annotated[
    str,
    Parameter(
        allow_leading_hyphen=True,
        help="changes of the recipe: --dotted.key value, or dotted.key=value (see --keys)",
    ),
]
Flag = Parameter(negative="")

STOPPED = 130
_DEFAULT = Thresholds()


def explain(error: Exception) -> str | None:
    """What to tell the user of an error that is theirs to mend; None for one that is ours."""
    from powergrad.lab.run import RunError

    if isinstance(error, (ValueError, RunError, OSError, ImportError)):
        return str(error)
    return None


def train(
    recipe: str | None = None,
    *overrides: Overrides,
    out: Path = Path("runs"),
    folder: Path | None = None,
    resume: Annotated[bool, Flag] = False,
    processes: int = 1,
    list: Annotated[bool, Flag] = False,
    keys: Annotated[bool, Flag] = False,
) -> int:
    """Train one network as a recipe says.

    The run's folder is named by its recipe, so the same command goes on where an interrupted run
    stopped, and does nothing where it is finished.

    Args:
        recipe: The name of a recipe (see --list), a YAML file, or the folder of a run.
        overrides: Changes of the recipe.
        out: Where the run's folder is made.
        folder: The run's folder itself.
        resume: Only go on with a run that is there; fail if there is none.
        processes: Train in so many processes on this machine, by torchrun.
        list: Show the recipes, and what each is for.
        keys: Show every key of a recipe.
    """
    from powergrad.lab import config
    from powergrad.lab.progress import for_terminal
    from powergrad.lab.run import Run, open_run
    from powergrad.lab.train import train as run_recipe

    if list:
        return _list_recipes()
    if keys:
        return _list_keys()
    if recipe is None:
        raise ValueError("Expected a recipe: its name (see --list), or a YAML file.")
    changes = config.parse_overrides(overrides)
    if (Path(recipe) / "config.yaml").is_file():
        run = open_run(recipe)
        chosen, place = run.recipe().override(changes), run.folder
    else:
        chosen = config.load_recipe(recipe, changes)
        place = folder or out / run_name(chosen)
    if resume and not Run(place).exists():
        raise ValueError(f"Expected a run to resume at {str(place)!r}, but got none.")
    if processes > 1:
        return _launch(processes, sys.argv[1:])
    if Run(place).result() is not None:
        Run(place).check_recipe(chosen)
        print(f"{place} is finished.")
        return 0
    progress = for_terminal()
    try:
        run_recipe(chosen, place, progress=progress)
    except Interrupted as reason:
        progress.close()
        print(f"powergrad: {reason}; the same command goes on from there.", file=sys.stderr)
        return STOPPED
    finally:
        progress.close()
    return 0


def run_name(recipe: Recipe) -> str:
    """The folder's name of a recipe's run: readable, and ending in its key."""
    from powergrad.lab.run import plain_name

    words = f"{recipe.data.name.rpartition('/')[2]}-{recipe.model.name}-seed{recipe.seed}"
    return f"{plain_name(words)}-{recipe.key}"


def _launch(processes: int, arguments: list[str]) -> int:
    """The same command in several processes of torchrun."""
    rest = []
    tokens = iter(arguments)
    for token in tokens:
        if token == "--processes":
            next(tokens, None)
        elif not token.startswith("--processes="):
            rest.append(token)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", "-m", "powergrad", *rest]
    return subprocess.run(command).returncode


def _list_recipes() -> int:
    from powergrad.lab.config import header, recipe_names

    for name in recipe_names():
        print(name)
        for line in header(name).splitlines():
            print(f"    {line}")
    return 0


def _list_keys() -> int:
    from powergrad.lab.config import describe_keys

    for key, meaning, default in describe_keys():
        print(f"{key:28} {meaning} [{default}]")
    return 0


# Studies ------------------------------------------------------------------------------------------


@Parameter(name="*")
@dataclass(frozen=True)
class StudyOptions:
    """What every study takes.

    Attributes:
        seeds: How many seeds each arm has; by default 8, or as many as the verdict on so many arms
            needs at the least.
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

    def compared(self) -> tuple[str, float]:
        """What is compared, and the margin."""
        metric = self.metric or "test_accuracy"
        usual = MARGINS.get(metric, 0.5)  # an unknown metric is refused by the study
        return metric, usual if self.margin is None else self.margin

    def crew(self) -> int:
        """How many runs at a time."""
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"Expected `workers` to be at least 1, but got {self.workers}.")
        return self.workers or max(1, (os.cpu_count() or 1) // self.threads)

    def folder(self, study: Study) -> Path:
        """The study's folder."""
        return self.out / (self.name or study.name)

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
        """The same, of a study whose arms have or have not PGT."""
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
            (alpha times the weight decay, without PGT), joined by +. The first is the one that
            the others are compared with.
        arm: One more arm, as "name: key=value, key=value"; may be given several times.
        alpha: PGT's alpha, and less-decay's; several, separated by commas, make an arm each.
        tune: A key to tune for every arm alike, as lr or lr=0.1,0.2,0.4, on held-out training data.
        tune_seeds: Seeds of each value that is tried.
        from_: Compare the runs of a CSV instead, which has the columns arm, seed and a metric.
        baseline: With --from: the arm to compare with.
        better: With --from: whether a higher or a lower metric is better, where its name does not
            tell.
        options: What every study takes.
    """
    from powergrad.lab.compare import tuned_key

    if from_ is not None:
        results = read_csv(
            from_,
            metric=options.metric,
            baseline=baseline,
            margin=options.margin,
            better=better,
        )
        _show(results)
        return 0
    alphas = [float(each) for each in parse_grid([f"alpha={alpha}"])["loss.alpha"]]
    wanted = [each.strip() for each in arms.split(",") if each.strip()]
    base = options.plain_base(recipe, overrides)
    chosen = arms_of([*wanted, *arm], base, alphas)
    study = Study(
        "compare",
        base,
        chosen,
        options.seed_list(len(chosen)),
        *options.compared(),
    )
    _check_comparable(study)
    folder = options.folder(study)
    told: dict[str, Any] = {}
    try:
        if tune is not None:
            study = replace(study, kind=f"compare-tuned-{tuned_key(tune)}")
            folder = options.folder(study)
            study, told["tuning"] = tune_arms(study, tune, tune_seeds, folder, options)
        return _run_study(study, folder, options, told)
    except Interrupted as reason:
        return stopped(reason)


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
    from powergrad.lab.compare import sweep_arms

    points = parse_grid(grid)
    arms = sweep_arms(points)
    study = Study(
        "sweep",
        options.base(recipe, overrides),
        arms,
        options.seed_list(len(arms)),
        *options.compared(),
    )
    _check_comparable(study)
    try:
        return _run_study(study, options.folder(study), options, {"grid": points})
    except Interrupted as reason:
        return stopped(reason)


def decompose(
    recipe: str = "digits",
    *overrides: Overrides,
    alpha: float = 0.25,
    tune: str = "lr",
    tune_seeds: int = 2,
    options: StudyOptions = _OPTIONS,
) -> int:
    """Which part of PGT helps here? Its identity with a two-group training, a factor at a time.

    Cross-entropy is tuned once, and its setting is used for every arm.

    Args:
        recipe: The name of a recipe, or a YAML file.
        overrides: Changes of the recipe, for all arms.
        alpha: PGT's alpha.
        tune: The key that is tuned for cross-entropy, as lr or lr=0.1,0.2; none to tune nothing.
        tune_seeds: Seeds of each value that is tried.
        options: What every study takes.
    """
    from powergrad.lab import compare as studies

    base = options.plain_base(recipe, overrides)
    metric, margin = options.compared()
    chosen: dict[str, Any] = {"metric": metric, "margin": margin}
    told: dict[str, Any] = {"alpha": alpha}
    seeds = options.seed_list(len(decomposition(base, alpha)))
    study = studies.decompose(base, alpha, seeds, **chosen)
    _check_comparable(study)
    folder = options.folder(study)
    try:
        if tune != "none":
            alone = Study("tune", base, {"CE": {}}, seeds, **chosen)
            tuned, told["tuning"] = tune_arms(alone, tune, tune_seeds, folder, options)
            base = base.override(tuned.arms["CE"])
            study = studies.decompose(base, alpha, seeds, **chosen)
            folder = folder / "arms"
        told["identity_gaps"] = studies.check_identity(base, alpha)
        print(studies.describe_identity(told["identity_gaps"]))
        return _run_study(study, folder, options, told)
    except Interrupted as reason:
        return stopped(reason)


def plan(
    *,
    delta: float,
    sigma: str | None = None,
    study: Path | None = None,
    metric: str | None = None,
    power: float = 0.8,
    level: float = 0.05,
    arms: int = 2,
    seconds: float | None = None,
    workers: int = 1,
) -> int:
    """How many seeds does a claim need?

    Args:
        delta: The difference that you want to be able to see, in the metric's unit.
        sigma: The noise of one run: a number, or the name of a known one.
        study: A finished study (its folder, or study.csv) to estimate the noise from.
        metric: The metric of that study; by default the one that it compares.
        power: The chance of seeing the difference if it is there.
        level: The chance of seeing one that is not there.
        arms: Arms, the baseline included.
        seconds: How long one run takes; by default as measured in --study.
        workers: Runs at a time.
    """
    from powergrad.lab import plan as planning

    if arms < 2:
        raise ValueError(f"Expected `arms` to be at least 2, but got {arms}.")
    noise: Any = sigma
    if study is not None:
        noise, measured = _noise_of(study, metric)
        seconds = measured if seconds is None else seconds
    elif sigma is None:
        known = ", ".join(planning.KNOWN_NOISE)
        raise ValueError(f"Expected --sigma (a number, or one of {known}), or --study.")
    else:
        try:
            noise = float(sigma)
        except ValueError:
            noise = sigma
    made = planning.plan(
        delta,
        noise,
        power=power,
        level=level,
        comparisons=arms - 1,
        seconds=seconds,
        workers=workers,
    )
    print(made.sentence)
    return 0


def _noise_of(path: Path, metric: str | None) -> tuple[Any, float | None]:
    """The noise of a finished study's first two arms, or of its only one; how long a run took."""
    from powergrad.lab.plan import estimate_noise
    from powergrad.lab.stats import by_arm_and_seed

    file = path / "study.csv" if path.is_dir() else path
    if metric is None and (file.parent / "study.json").is_file():
        metric = json.loads((file.parent / "study.json").read_text(encoding="utf-8")).get("metric")
    metric, rows = read_rows(file, metric)
    values = by_arm_and_seed((row["arm"], row["seed"], row[metric]) for row in rows)
    if not values:
        raise ValueError(f"Expected runs in {str(file)!r}, but got none.")
    first, *others = values
    noise = (
        estimate_noise(values[others[0]], values[first])
        if others
        else estimate_noise(values[first])
    )
    with open(file, encoding="utf-8-sig", newline="") as text:
        times = [float(row["seconds"]) for row in csv_module.DictReader(text) if row.get("seconds")]
    return noise, sum(times) / len(times) if times else None


def _check_comparable(study: Study) -> None:
    if len(study.arms) < 2:
        raise ValueError(f"Expected at least 2 arms, but got {len(study.arms)}.")
    if len(study.seeds) < 2:
        raise ValueError(
            f"Expected at least 2 seeds, because one run says nothing of the noise, but got "
            f"{len(study.seeds)}."
        )


def _run_study(study: Study, folder: Path, options: StudyOptions, told: dict[str, Any]) -> int:
    from powergrad.lab.report import write_report
    from powergrad.lab.terminal import Watch

    title = f"{study.base.model.name} on {study.base.data.name}"
    with Watch(title, study.jobs(), study.metric) as watch:
        results = study.run(folder, workers=options.crew(), storage=options.storage, watch=watch)
    results.extra.update(told)
    try:
        results.save(folder)
    except ValueError:  # say that a run has no such metric
        write_report([folder], folder / "report.html")
        raise
    _draw(results, folder)
    write_report([folder], folder / "report.html")
    _show(results)
    if "identity_gaps" in told:
        print(explain_decomposition(results, told["alpha"]))
    better = [each.arm for each in results.comparisons() if each.verdict == "better"]
    if control := missing_control(study.kind, study.base, study.arms, better):
        print(f"\n{control}")
    print(
        f"\nLook at {folder / 'report.html'}; beside it study.csv, study.json, study.png, the runs."
    )
    return 0


def _draw(results: Results, folder: Path) -> None:
    from powergrad.lab import figures

    note = f"{folder.name}: {len(results.rows)} runs"
    grid = results.extra.get("grid")
    if grid and all(isinstance(value, (int, float)) for value in next(iter(grid.values()))):
        figure = figures.sweep_figure(results, grid, note)
    else:
        figure = figures.study_figure(results, note)
    figures.save(figure, folder / "study.png")


def _show(results: Results) -> None:
    from rich.console import Console

    from powergrad.lab.terminal import chart, result_tables

    comparisons = results.comparisons()  # before anything is printed: it may refuse
    console = Console(width=None if sys.stdout.isatty() else 120)
    for table in result_tables(results):
        console.print(table)
    print(chart(results))
    if lost := results.diverged():
        print(f"\n{lost}")
    print(f"\n{results.verdict()}\n")
    for comparison in comparisons:
        print(f"- {comparison.sentence}")


def tune_arms(
    study: Study, wanted: str, seeds: int, folder: Path, options: StudyOptions
) -> tuple[Study, dict[str, Any]]:
    """The study with a key tuned for every arm alike, and how; shown as well."""
    from powergrad.lab.compare import tune
    from powergrad.lab.terminal import Watch

    study, tuning = tune(
        study,
        wanted,
        folder,
        seeds=seeds,
        workers=options.crew(),
        storage=options.storage,
        show=Watch,
    )
    for arm, found in tuning["arms"].items():
        edge = "; at the edge of the grid" if found["at_edge"] else ""
        tried = ((in_words(each["value"]), each["mean"]) for each in found["means"])
        means = ", ".join(f"{value}: {mean:.2f}" for value, mean in tried)
        print(f"{arm}: {tuning['key']} = {in_words(found['chosen'])} ({means}{edge})")
    return study, tuning


def stopped(reason: Exception) -> int:
    """Say that a command was interrupted; its exit code."""
    print(f"powergrad: stopped, {reason}; the same command goes on from there.", file=sys.stderr)
    return STOPPED


# Looking at what is there -------------------------------------------------------------------------


def inspect(
    source: Path,
    *,
    initial: Path | None = None,
    csv: Path | None = None,
    layers_csv: Path | None = None,
    events_csv: Path | None = None,
    thresholds: Annotated[Thresholds, Parameter(name="*", group="Thresholds")] = _DEFAULT,
) -> int:
    """Show which filters, features and layers of a network are dead.

    Args:
        source: The folder of a run or of a recording, or a checkpoint.
        initial: The weights at the start of the training, to compare with.
        csv: Write the units found to this file, one a row.
        layers_csv: Write the counts of every layer to this file.
        events_csv: Write deaths, revivals and births to this file.
        thresholds: Where dead begins; see powergrad.monitor.Thresholds.
    """
    path = source
    if source.is_dir() and not Recording.exists(source):
        path = source / "model.safetensors"
        if not path.is_file():
            raise ValueError(
                f"Expected {str(source)!r} to hold a recording (norms/) or model.safetensors, but "
                "got neither."
            )
    found = census(path, initial=initial, thresholds=thresholds)
    print(found)
    if csv is not None:
        found.to_csv(csv)
    if layers_csv is not None:
        found.to_csv(layers_csv, "layers")
    if events_csv is not None:
        found.to_csv(events_csv, "events")
    return 0


def export(
    source: Path,
    *,
    out: Path | None = None,
    format: str = "safetensors,torch,onnx",
    temperature: str = "alpha",
    data_dir: str | None = None,
    force: Annotated[bool, Flag] = False,
) -> int:
    """Write a trained network for deployment: its head calibrated, with a model card.

    Args:
        source: The folder of a finished run, or one of its files of weights.
        out: The folder to write; by default export/ in the run's folder.
        format: Files to write, separated by commas: safetensors, torch (torch.export), onnx.
        temperature: What is folded into the head: alpha (the temperature 1/alpha), fitted (on
            images that were not trained on), none, or a number.
        data_dir: Where the data files are, if not where the recipe says.
        force: Replace an export that is there.
    """
    from powergrad.lab.export import export_run

    formats = [each.strip() for each in format.split(",") if each.strip()]
    made = export_run(
        source, out, formats=formats, temperature=temperature, force=force, data_dir=data_dir
    )
    before, after = made.results["1"], made.results["exported"]
    print(
        f"{made.folder}: {', '.join(made.files)}\n"
        f"Temperature {made.temperature:.4g} is folded into the head: by its own softmax, NLL "
        f"{after['nll']:.4f} and ECE {after['ece_width']:.4f} (as trained, {before['nll']:.4f} and "
        f"{before['ece_width']:.4f})."
    )
    return 0


def report(*paths: Path, out: Path | None = None) -> int:
    """Write the page of runs and studies: one HTML file that needs no network.

    Args:
        paths: Folders of runs or of studies.
        out: The file; by default report.html in the folder, or here if there are several.
    """
    from powergrad.lab.report import write_report

    if not paths:
        raise ValueError("Expected the folder of a run or of a study, but got none.")
    print(write_report(paths, out or (paths[0] if len(paths) == 1 else Path()) / "report.html"))
    return 0


def bench(*names: str) -> int:
    """Run the benchmarks of a checkout; each writes its figures to results/.

    Args:
        names: Which of them; all by default.
    """
    scripts = Path("benchmarks")
    known = sorted(
        path.stem
        for path in scripts.glob("*.py")
        if path.stem not in ("harness", "tables", "audit")
    )
    if not known:
        raise ValueError(
            "Expected to be in a checkout of powergrad, which has the folder benchmarks/, but got "
            f"{str(Path.cwd())!r}."
        )
    for name in names:
        if name not in known:
            raise ValueError(f"Expected a benchmark of {', '.join(known)}, but got {name!r}.")
    for name in names or known:
        print(f"benchmarks/{name}.py", file=sys.stderr, flush=True)
        status = subprocess.run([sys.executable, str(scripts / f"{name}.py")]).returncode
        if status:
            return status
    return subprocess.run([sys.executable, str(scripts / "tables.py")]).returncode
