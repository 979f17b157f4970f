"""A study: arms x seeds, the runs of all of them, and what they say together.

study.yaml     what is studied: the base recipe, the arms, the metric, the margin
<run>/         every run (see `powergrad.lab.run`)
jobs.db        which runs are waiting, running, done
study.csv      a row a run: arm, seed, final metrics
study.json     what was studied, and the comparisons
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from powergrad.lab import stats
from powergrad.lab.config import Recipe, RecipeError
from powergrad.lab.jobs import Job, Snapshot, run_jobs
from powergrad.lab.plan import check_positive
from powergrad.lab.run import Run, describe_machine, plain_name, write_atomically
from powergrad.lab.session import right_answers

__all__ = ["MARGINS", "METRICS", "Results", "Study", "read_csv", "read_rows"]

FORMAT = 1
# The metrics that arms can be compared by: whether more is better, and its words.
METRICS = {
    "test_accuracy": (True, "points of test accuracy"),
    "train_accuracy": (True, "points of training accuracy"),
    "nll": (False, "of negative log-likelihood"),
    "nll_scaled": (False, "of negative log-likelihood at 1/alpha"),
    "ece": (False, "of calibration error"),
    "ece_scaled": (False, "of calibration error at 1/alpha"),
    "dead_units": (False, "dead units"),
}
# The largest difference that does not matter, unless the user says otherwise.
MARGINS = {
    "test_accuracy": 0.5,
    "train_accuracy": 0.5,
    "nll": 0.05,
    "nll_scaled": 0.05,
    "ece": 0.01,
    "ece_scaled": 0.01,
    "dead_units": 1.0,
}
# What study.csv has of each run, after arm, seed and run.
COLUMNS = (
    "train_loss",
    "train_accuracy",
    "test_accuracy",
    "test_top5",
    "nll",
    "nll_scaled",
    "ece",
    "ece_scaled",
    "logit_norm",
    "dead_units",
    "diverged",
    "steps",
    "seconds",
)


@dataclass(frozen=True)
class Study:
    """What is studied.

    Attributes:
        kind: ``compare``, ``sweep``, ``decompose`` or ``tune``.
        base: The recipe that every arm changes.
        arms: What each arm changes; the first is the one that the others are compared with.
        seeds: The seeds of every arm.
        metric: What is compared, at the last epoch.
        margin: The largest difference that does not matter.
    """

    kind: str
    base: Recipe
    arms: Mapping[str, Mapping[str, Any]]
    seeds: Sequence[int]
    metric: str = "test_accuracy"
    margin: float = 0.5

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise RecipeError(
                f"Expected `metric` to be one of {', '.join(METRICS)}, but got {self.metric!r}."
            )
        check_positive(self.margin, "margin")
        if len(set(self.seeds)) < len(self.seeds):
            raise RecipeError(f"Expected different seeds, but got {list(self.seeds)}.")
        keys: dict[str, str] = {}
        recipes = {arm: self.recipe(arm, 0) for arm in self.arms}
        for arm, recipe in recipes.items():
            key = recipe.key
            if key in keys:
                raise RecipeError(
                    f"Expected arms that differ, but {keys[key]!r} and {arm!r} are the same run."
                )
            keys[key] = arm
        if len({(each.data.name, each.data.hold_out) for each in recipes.values()}) > 1:
            raise RecipeError(
                "Expected all arms to be tested on the same examples, but got arms that differ in "
                "data.name or data.hold_out."
            )

    @property
    def baseline(self) -> str:
        """The arm that the others are compared with."""
        return next(iter(self.arms))

    @property
    def name(self) -> str:
        """A name that tells studies of other recipes apart."""
        what = f"{self.kind}:{self.base.override({'seed': 0}).key}"
        data = self.base.data.name.rpartition("/")[2].partition(":")[0]
        plain = "".join(c if c.isalnum() else "-" for c in data)
        return f"{self.kind}-{plain}-{hashlib.sha256(what.encode()).hexdigest()[:8]}"

    def recipe(self, arm: str, seed: int) -> Recipe:
        """The recipe of one run."""
        return self.base.override({**self.arms[arm], "seed": seed})

    def jobs(self) -> dict[tuple[str, int], Job]:
        """The run of every arm and seed; seeds outside, so that arms fill evenly."""
        found = {}
        for seed in self.seeds:
            for arm in self.arms:
                recipe = self.recipe(arm, seed)
                name = f"{plain_name(arm)[:40]}-seed{seed}-{recipe.key}"
                found[arm, seed] = Job(name, recipe)
        return found

    def run(
        self,
        folder: Path,
        *,
        workers: int,
        storage: str | None = None,
        watch: Callable[[Snapshot], None] = lambda snapshot: None,
    ) -> Results:
        """Do every run that is not done yet, in `folder`."""
        self.claim(folder)
        jobs = self.jobs()
        finished = run_jobs(
            list(jobs.values()),
            folder,
            study=f"{folder.name}-{self.name}",  # as a storage may hold studies of one name
            workers=workers,
            storage=storage,
            watch=watch,
        )
        rows = []
        for (arm, seed), job in jobs.items():
            rows.append({"arm": arm, "seed": seed, "run": job.name, **finished[job.name]})
        return Results(self.metric, self.margin, self.baseline, rows, study=self, folder=folder)

    def claim(self, folder: Path) -> None:
        """Write what is studied, or check that the folder has the same study.

        Arms and seeds may be added to a study; what is there already must agree.

        Raises:
            RecipeError: If the folder holds another study.
        """
        path = folder / "study.yaml"
        base = self.base.model_dump(mode="json", exclude={"machine", "seed"})
        arms = {arm: dict(changes) for arm, changes in self.arms.items()}
        if path.exists():
            try:
                found = yaml.safe_load(path.read_text(encoding="utf-8"))
                there = {"kind": found["kind"], "base": found["base"]}
                known = found["arms"]
            except (yaml.YAMLError, KeyError, TypeError):
                raise RecipeError(
                    f"Expected {str(path)!r} to be a study, but got another file."
                ) from None
            if there != {"kind": self.kind, "base": base}:
                raise RecipeError(
                    f"Expected {str(folder)!r} to hold this study, but got one of another recipe; "
                    "give another --name."
                )
            for arm in arms:
                if arm in known and known[arm] != arms[arm]:
                    raise RecipeError(
                        f"Expected the arm {arm!r} of {str(folder)!r} to change {arms[arm]}, but "
                        f"got {known[arm]}; give another --name."
                    )
            arms = {**known, **arms}
        folder.mkdir(parents=True, exist_ok=True)
        described = {"format": FORMAT, "kind": self.kind, "base": base, "arms": arms}
        text = yaml.safe_dump(described, sort_keys=False).encode()
        write_atomically(path, lambda file: file.write(text))


@dataclass
class Results:
    """The final metrics of every run, and the comparisons.

    Attributes:
        metric: What is compared.
        margin: The largest difference that does not matter.
        baseline: The arm that the others are compared with.
        rows: ``arm``, ``seed`` and metrics of each run.
        study: What was studied; None for runs made elsewhere.
        folder: Where the runs are.
        higher_is_better: Of the metric; by default as METRICS has it.
        extra: More that study.json tells: how arms were tuned, what a figure needs.
    """

    metric: str
    margin: float
    baseline: str
    rows: list[dict[str, Any]]
    study: Study | None = None
    folder: Path | None = None
    higher_is_better: bool | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    _compared: list[stats.Comparison] | None = field(default=None, repr=False)

    @property
    def arms(self) -> list[str]:
        """The arms, in order."""
        return list(dict.fromkeys(row["arm"] for row in self.rows))

    def of(self, arm: str, metric: str) -> list[float]:
        """A metric of every run of an arm, without those that lack it."""
        found = [row.get(metric) for row in self.rows if row["arm"] == arm]
        return [float(value) for value in found if value is not None]

    def mean(self, arm: str, metric: str) -> float:
        """The mean over an arm's seeds; NaN where a run has none."""
        values = self.of(arm, metric)
        return sum(values) / len(values) if values else math.nan

    def comparisons(self) -> list[stats.Comparison]:
        """Every arm against the baseline."""
        if self._compared is None:
            self._compared = self._compare()
        return self._compared

    def _compare(self) -> list[stats.Comparison]:
        higher, words = METRICS.get(self.metric, (True, self.metric))
        if self.higher_is_better is not None:
            higher = self.higher_is_better
        values = stats.by_arm_and_seed(
            (row["arm"], row["seed"], row[self.metric]) for row in self.rows
        )
        examples = self._examples()
        step = None
        if examples is not None:
            step = 100 / max(len(each) for of_arm in examples.values() for each in of_arm.values())
        return stats.compare(
            values,
            self.baseline,
            margin=self.margin,
            higher_is_better=higher,
            metric=words,
            step=step,
            examples=examples,
        )

    def _examples(self) -> dict[str, dict[int, Any]] | None:
        """Which test examples each run got right, where all runs kept their logits."""
        if self.folder is None or self.metric != "test_accuracy":
            return None
        found: dict[str, dict[int, Any]] = {}
        for row in self.rows:
            outputs = Run(self.folder / row["run"]).test_outputs()
            if outputs is None:
                return None
            right = right_answers(outputs["logits"], outputs["labels"])
            found.setdefault(row["arm"], {})[row["seed"]] = 100.0 * right.double().numpy()
        return found

    def verdict(self) -> str:
        """What it comes to, in one sentence."""
        by_verdict: dict[str, list[str]] = {}
        for each in self.comparisons():
            name = f'"{each.arm}"' if "," in each.arm else each.arm
            by_verdict.setdefault(each.verdict, []).append(name)
        phrases = []
        for verdict, words in (
            ("better", f"better than {self.baseline}"),
            ("worse", f"worse than {self.baseline}"),
            ("equivalent", f"as good as {self.baseline}, within {self.margin:g}"),
            ("underpowered", f"not told apart from {self.baseline} by so few seeds"),
        ):
            if arms := by_verdict.get(verdict):
                listed = arms[0] if len(arms) == 1 else f"{', '.join(arms[:-1])} and {arms[-1]}"
                phrases.append(f"{listed} {'is' if len(arms) == 1 else 'are'} {words}")
        return f"Here {'; '.join(phrases)}."

    def diverged(self) -> str:
        """Which arms lost runs, in a sentence; empty if none did."""
        lost = [row["arm"] for row in self.rows if row.get("diverged")]
        counts = [f"{lost.count(arm)} of {len(self.of(arm, 'diverged'))} runs of {arm}"
                  for arm in self.arms if arm in lost]  # fmt: skip
        return f"Diverged, which counts as no right answer: {', '.join(counts)}." if counts else ""

    def to_csv(self) -> str:
        """A row a run."""
        text = io.StringIO()
        known = [name for name in COLUMNS if any(name in row for row in self.rows)]
        if self.metric not in known:
            known.insert(0, self.metric)
        names = ["arm", "seed", *(["run"] if self.study else []), *known]
        writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return text.getvalue()

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        described: dict[str, Any] = {
            "format": FORMAT,
            "metric": self.metric,
            "margin": self.margin,
            "baseline": self.baseline,
            "arms": self.arms,
            "verdict": self.verdict(),
            "comparisons": [comparison.to_dict() for comparison in self.comparisons()],
            "rows": self.rows,
            "environment": describe_machine(),
            **self.extra,
        }
        if self.study is not None:
            described["kind"] = self.study.kind
            described["changes"] = {arm: dict(c) for arm, c in self.study.arms.items()}
            described["recipe"] = self.study.base.model_dump(mode="json")
        return described

    def save(self, folder: Path) -> None:
        """Write study.csv and study.json."""
        table = self.to_csv().encode()
        write_atomically(folder / "study.csv", lambda file: file.write(table))
        whole = json.dumps(_plain(self.to_dict()), indent=1, allow_nan=False).encode()
        write_atomically(folder / "study.json", lambda file: file.write(whole))


def _plain(value: Any) -> Any:
    """Without NaN and infinity, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_csv(
    path: Path,
    *,
    metric: str | None,
    baseline: str | None,
    margin: float | None,
    better: str | None = None,
) -> Results:
    """The results of runs made elsewhere: a CSV with columns arm, seed and a metric.

    Args:
        path: The file.
        metric: The column to compare; by default the only one beside arm and seed, or
            ``test_accuracy``, or ``metric``.
        baseline: The arm to compare with; ``baseline`` or the first one by default.
        margin: The largest difference that does not matter; by default that of the metric, or 0.5
            where it is a percentage.
        better: ``higher`` or ``lower``; by default as the metric's name has it.

    Raises:
        RecipeError: If columns are missing, a cell is not a number, or it cannot be known which is
            better, or what margin is meant.
    """
    metric, rows = read_rows(path, metric)
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    chosen = baseline or ("baseline" if "baseline" in arms or not arms else arms[0])
    if margin is None:
        margin = _usual_margin(metric, [row[metric] for row in rows])
    higher = _is_higher_better(metric) if better is None else better == "higher"
    results = Results(metric, margin, chosen, rows, higher_is_better=higher)
    results.comparisons()  # raises where they cannot be made
    return results


def _is_higher_better(metric: str) -> bool:
    """As the name has it."""
    if metric in METRICS:
        return METRICS[metric][0]
    name = metric.lower()
    if any(word in name for word in ("loss", "err", "nll", "perplexity", "ppl")):
        return False
    if name == "metric" or "acc" in name:
        return True
    raise RecipeError(
        f"Expected --better higher or --better lower, because that cannot be known of {metric!r}."
    )


def _usual_margin(metric: str, values: Sequence[float]) -> float:
    """Half a point of a percentage; none where the unit is not known."""
    is_percentage = _is_percentage(metric)
    if metric in MARGINS and not is_percentage:
        return MARGINS[metric]
    if is_percentage and any(abs(value) > 1 for value in values if value == value):
        return 0.5
    unit = "fractions, not per cent" if is_percentage else f"{metric!r}, of which none is usual"
    raise RecipeError(
        "Expected --margin, the largest difference that does not matter to you, because these are "
        f"{unit}."
    )


def _is_percentage(metric: str) -> bool:
    return metric == "metric" or "acc" in metric.lower()


def read_rows(path: Path, metric: str | None) -> tuple[str, list[dict[str, Any]]]:
    """The metric and the rows of such a CSV; see :func:`read_csv`."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"Expected to read {str(path)!r}, but got: {error}") from None
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        columns = list(reader.fieldnames or [])
        lines = list(reader)
    except csv.Error as error:
        raise RecipeError(f"Expected {str(path)!r} to be a CSV, but got: {error}") from None
    missing = [name for name in ("arm", "seed") if name not in columns]
    others = [name for name in columns if name not in ("arm", "seed")]
    if metric is None:
        metric = next((name for name in ("test_accuracy", "metric") if name in others), None)
        if metric is None and len(others) == 1:
            metric = others[0]
    if missing or metric not in others:
        wanted = metric if metric is not None else "a metric (name it with --metric)"
        raise RecipeError(
            f"Expected {str(path)!r} to have the columns arm, seed and {wanted}, but got "
            f"{', '.join(columns) or 'none'}."
        )
    rows: list[dict[str, Any]] = []
    for number, row in enumerate(lines, start=2):
        try:
            rows.append({"arm": row["arm"], "seed": int(row["seed"]), metric: float(row[metric])})
        except (TypeError, ValueError):
            raise RecipeError(
                f"Expected a whole number as seed and a number as {metric} in line {number} of "
                f"{str(path)!r}, but got {row['seed']!r} and {row[metric]!r}."
            ) from None
    return metric, rows
