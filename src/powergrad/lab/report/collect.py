"""What the page shows, read from run and study folders. Nothing here trains."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from powergrad import __version__, calibration
from powergrad.lab import stats
from powergrad.lab.compare import describe_identity, explain_decomposition, missing_control
from powergrad.lab.config import Recipe, flatten
from powergrad.lab.report.norms import encode_norms, spread_over
from powergrad.lab.run import COLUMNS as CURVES
from powergrad.lab.run import Run, RunError
from powergrad.lab.study import COLUMNS, METRICS, Results

__all__ = ["collect"]

FORMAT = 1
ROWS = 400  # of metrics.csv that are shown of a run, at the most
BINS = 15  # of a reliability diagram
EXAMPLE_ARMS = 6  # whose test examples the playground offers
UNREADABLE = (RunError, ValueError, TypeError, KeyError, OSError, SafetensorError, yaml.YAMLError)

T = TypeVar("T")
Array = NDArray[np.float64]


@dataclass
class Shown:
    """A run as the page shows it.

    Attributes:
        folder: Where it is.
        recipe: What it does.
        arm: The arm that it is of.
        status: ``finished``, ``unfinished``, ``diverged`` or ``missing``.
        note: What there is to say of that.
        final: Its last metrics.
        rows: Its metrics, a row an epoch.
        has_ended: Whether it has a result.
    """

    folder: Path
    recipe: Recipe
    arm: str = ""
    status: str = "finished"
    note: str = ""
    final: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, float | None]] = field(default_factory=list)
    has_ended: bool = True

    @property
    def alpha(self) -> float:
        """The alpha that it ended with."""
        found = self.final.get("alpha")
        return self.recipe.loss.alpha if found is None else float(found)

    def outputs(self, notes: list[str]) -> tuple[Tensor, Tensor] | None:
        """Logits and labels of the test set, if they were kept, are finite and can be read."""
        found = _try(Run(self.folder).test_outputs, None, notes)
        if found is None or not bool(found["logits"].isfinite().all()):
            return None
        return found["logits"], found["labels"]


def collect(paths: Sequence[Path]) -> dict[str, Any]:
    """The data of the page of some runs and studies.

    Args:
        paths: Folders of runs, of studies, or that hold some.

    Returns:
        Plain values, for JSON.

    Raises:
        RunError: If a path holds neither a run nor a study.
    """
    studies: list[Path] = []
    runs: list[Path] = []
    for path in map(Path, paths):
        found = _find(path)
        if not found:
            raise RunError(
                f"Expected {str(path)!r} to be the folder of a run or of a study, but got neither."
            )
        for each in found:
            (runs if (each / "config.yaml").is_file() else studies).append(each)
    shown = [_study(folder) for folder in dict.fromkeys(studies)]
    if runs:
        shown.append(_loose(list(dict.fromkeys(runs))))
    return {
        "format": FORMAT,
        "version": __version__,
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "studies": shown,
    }


def _find(path: Path, deeper: bool = True) -> list[Path]:
    """The runs and studies at `path`; where it is neither, those right below it.

    The runs of a study's tuning are not among them, unless `path` is that of the tuning.
    """
    if (path / "study.yaml").is_file() or (path / "config.yaml").is_file():
        return [path]
    if not deeper or not path.is_dir():
        return []
    below = [found for child in sorted(path.iterdir()) for found in _find(child, deeper=False)]
    return [each for each in below if each.name != "tuning"] or below


# Studies ------------------------------------------------------------------------------------------


def _study(folder: Path) -> dict[str, Any]:
    notes: list[str] = []
    try:
        described = yaml.safe_load((folder / "study.yaml").read_text(encoding="utf-8"))
        base = Recipe.model_validate(described["base"])
        arms: dict[str, dict[str, Any]] = described["arms"]
        kind = str(described["kind"])
    except UNREADABLE as error:
        raise RunError(f"Expected {str(folder)!r} to hold a study, but got: {error}") from None
    saved: dict[str, Any] = {}
    if (folder / "study.json").exists():
        saved = _try(lambda: dict(json.loads((folder / "study.json").read_bytes())), {}, notes)
    else:
        notes.append("The study is not finished: there is no study.json yet.")
    runs = _runs(sorted(folder.glob("*/config.yaml")), notes)
    seeds = sorted({run.recipe.seed for run in runs})
    names: dict[str, str] = {}
    for arm, changes in arms.items():
        for seed in seeds:
            names[base.override({**changes, "seed": seed}).key] = arm
    for run in runs:
        run.arm = names.get(run.recipe.key, "")
    for run in [run for run in runs if not run.arm]:
        notes.append(f"{run.folder.name} is of none of the arms, and is left out.")
    runs = [run for run in runs if run.arm]
    there = {(run.arm, run.recipe.seed) for run in runs}
    for arm in arms:
        for seed in seeds:
            if (arm, seed) not in there:
                recipe = base.override({**arms[arm], "seed": seed})
                runs.append(Shown(folder, recipe, arm, "missing", "not started", has_ended=False))
    order = list(arms)
    runs.sort(key=lambda run: (order.index(run.arm), run.recipe.seed))
    metric = saved.get("metric", "test_accuracy")
    results = Results(
        metric,
        saved.get("margin", 0.5),
        saved.get("baseline", order[0]),
        _rows(runs, metric),
    )
    comparisons, headline = _comparisons(results, runs, saved, notes)
    better = [each["arm"] for each in comparisons if each["verdict"] == "better"]
    if control := missing_control(kind, base, arms, better):
        notes.append(control)
    decomposed = None
    if "identity_gaps" in saved and len(comparisons) == len(arms) - 1:
        gaps = {int(step): gap for step, gap in saved["identity_gaps"].items()}
        decomposed = {
            "identity": describe_identity(gaps),
            "explanation": explain_decomposition(results, saved["alpha"]),
        }
    place = folder.resolve()
    higher, words = METRICS.get(metric, (True, metric))
    return {
        **_common(runs, arms, notes),
        "name": place.parent.name if place.name == "arms" else place.name,
        "kind": kind,
        "what": f"{base.model.name} on {base.data.name}",
        "metric": metric,
        "words": words,
        "higher": higher,
        "margin": results.margin,
        "baseline": results.baseline,
        "headline": headline,
        "comparisons": comparisons,
        "grid": saved.get("grid"),
        "tuning": saved.get("tuning"),
        "decomposition": decomposed,
        "recipe": yaml.safe_dump(base.model_dump(mode="json", exclude={"seed"}), sort_keys=False),
        "command": saved.get("environment", {}).get("command"),
        "notes": notes,
    }


def _loose(folders: list[Path]) -> dict[str, Any]:
    """Runs that are not of a study: those that differ in their seed only are one arm."""
    notes: list[str] = []
    runs = _runs([folder / "config.yaml" for folder in folders], notes)
    if not runs:
        raise RunError(" ".join(notes))
    kinds: dict[str, Recipe] = {}
    for run in runs:
        alike = run.recipe.override({"seed": 0})
        kinds.setdefault(alike.key, alike)
        run.arm = alike.key
    flat = {key: dict(flatten(each.model_dump(mode="json"))) for key, each in kinds.items()}
    first = next(iter(flat.values()))
    varied = [
        name
        for name in first
        if not name.startswith("machine.") and len({repr(each[name]) for each in flat.values()}) > 1
    ]
    arms: dict[str, dict[str, Any]] = {}
    called: dict[str, str] = {}
    for key, values in flat.items():
        changes = {name: values[name] for name in varied}
        words = ", ".join(f"{name.rpartition('.')[2]}={each}" for name, each in changes.items())
        called[key] = words or kinds[key].model.name
        arms[called[key]] = changes
    for run in runs:
        run.arm = called[run.arm]
    order = list(arms)
    runs.sort(key=lambda run: (order.index(run.arm), run.recipe.seed))
    alone = len(runs) == 1
    recipe = runs[0].recipe
    headline = "These runs are not of one study: they are shown together, without a verdict."
    return {
        **_common(runs, arms, notes),
        "name": runs[0].folder.resolve().name if alone else f"{len(runs)} runs",
        "kind": "run" if alone else "runs",
        "what": f"{recipe.model.name} on {recipe.data.name}",
        "metric": "test_accuracy",
        "words": METRICS["test_accuracy"][1],
        "higher": True,
        "margin": None,
        "baseline": order[0],
        "headline": _said_of_run(runs[0]) if alone else headline,
        "comparisons": [],
        "grid": None,
        "tuning": None,
        "decomposition": None,
        "recipe": recipe.to_yaml(),
        "command": _try(Run(runs[0].folder).environment, {}, notes).get("command"),
        "notes": notes,
    }


def _said_of_run(run: Shown) -> str:
    accuracy = run.final.get("test_accuracy")
    if run.status != "finished" or accuracy is None:
        return f"The run is {run.status}: {run.note or 'it was not tested'}."
    return (
        f"Test accuracy {accuracy:.2f}% after {run.final.get('epoch', 0):g} epochs at alpha "
        f"{run.alpha:g}."
    )


def _runs(configs: Iterable[Path], notes: list[str]) -> list[Shown]:
    """The runs that can be read; `notes` tells of the others."""
    found = []
    for config in configs:
        folder = config.parent
        run = Run(folder)
        recipe = _try(run.recipe, None, notes)
        if recipe is None:
            continue
        shown = Shown(folder, recipe, rows=_try(run.metrics, [], notes))
        shown.final = dict(shown.rows[-1]) if shown.rows else {}
        result = _try(run.result, None, notes)
        if result is None:
            epoch = shown.final.get("epoch") or 0
            shown.status, shown.note = "unfinished", f"at epoch {epoch:g} of {recipe.train.epochs}"
            shown.has_ended = False
        else:
            shown.final = result
        if shown.final.get("diverged") or not _is_finite(shown.final.get("train_loss", 0.0)):
            epoch = shown.final.get("epoch") or 0
            shown.status, shown.note = "diverged", f"its loss is not finite at epoch {epoch:g}"
        found.append(shown)
    return found


def _rows(runs: list[Shown], metric: str) -> list[dict[str, Any]]:
    """The runs that ended and whose metric is a number, as a study's results have them.

    One that diverged has ended, too: it has no right answer.
    """
    return [
        {"arm": run.arm, "seed": run.recipe.seed, "run": run.folder.name, **run.final}
        for run in runs
        if run.has_ended and _is_finite(run.final.get(metric))
    ]


def _comparisons(
    results: Results, runs: list[Shown], saved: Mapping[str, Any], notes: list[str]
) -> tuple[list[dict[str, Any]], str]:
    """The study's own comparisons and verdict, if they are of these runs; else new ones."""
    done = {row["run"] for row in results.rows}
    if "comparisons" in saved and done == {row.get("run") for row in saved.get("rows", [])}:
        return saved["comparisons"], saved["verdict"]
    if len(done) < len(runs):
        notes.append(f"Only {len(done)} of {len(runs)} runs count: the others have no result.")
    enough = [arm for arm in results.arms if len(results.of(arm, results.metric)) > 1]
    few = [arm for arm in dict.fromkeys(run.arm for run in runs) if arm not in enough]
    if few:
        notes.append(f"Too few finished seeds to compare: {', '.join(few)}.")
    if results.baseline not in enough or len(enough) < 2:
        return [], "No verdict yet: too few runs are finished."
    rows = [row for row in results.rows if row["arm"] in enough]
    usable = Results(results.metric, results.margin, results.baseline, rows)
    return [each.to_dict() for each in usable.comparisons()], usable.verdict()


# Arms and runs ------------------------------------------------------------------------------------


def _common(
    runs: list[Shown], arms: Mapping[str, Mapping[str, Any]], notes: list[str]
) -> dict[str, Any]:
    order = list(arms)
    for status in ("missing", "unfinished", "diverged"):
        of = [run for run in runs if run.status == status]
        if of:
            listed = ", ".join(f"{run.arm} seed {run.recipe.seed} ({run.note})" for run in of[:8])
            more = f" and {len(of) - 8} more" if len(of) > 8 else ""
            count = "1 run is" if len(of) == 1 else f"{len(of)} runs are"
            notes.append(f"{count} {status}: {listed}{more}.")
    recorded = [run.folder for run in runs if run.status != "missing"]
    norms, faults = encode_norms(recorded)
    notes += faults
    thinned = any(len(run.rows) > ROWS for run in runs)
    if thinned:
        notes.append(f"Curves show {ROWS} of each run's epochs.")
    return {
        "arms": [
            _arm(name, arms[name], [run for run in runs if run.arm == name], notes)
            for name in order
        ],
        "runs": [
            {
                "arm": order.index(run.arm),
                "seed": run.recipe.seed,
                "name": run.folder.name if run.status != "missing" else "",
                "alpha": run.alpha,
                "status": run.status,
                "note": run.note,
                "final": {name: run.final.get(name) for name in COLUMNS},
                "curve": _curve(run.rows),
                "norms": norms.get(run.folder) if run.status != "missing" else None,
            }
            for run in runs
        ],
        "examples": _examples(runs, order),
        "classes": _classes(runs, notes),
        "environments": _environments(runs, notes),
    }


def _arm(
    name: str, changes: Mapping[str, Any], runs: list[Shown], notes: list[str]
) -> dict[str, Any]:
    finished = [run for run in runs if run.status == "finished"]
    summary = {}
    for metric in COLUMNS:
        values = [run.final.get(metric) for run in finished]
        numbers = [float(v) for v in values if isinstance(v, (int, float)) and math.isfinite(v)]
        if not numbers or metric == "diverged":
            continue
        mean = sum(numbers) / len(numbers)
        low = high = spread = None
        if len(numbers) > 1:
            low, high = stats.t_interval(numbers)
            spread = float(np.std(numbers, ddof=1))
        summary[metric] = {
            "mean": mean,
            "sd": spread,
            "low": low,
            "high": high,
            "n": len(numbers),
        }
    return {
        "name": name,
        "changes": dict(changes),
        "alpha": runs[0].alpha if runs else None,
        "summary": summary,
        "reliability": _reliability(finished, notes),
    }


def _curve(rows: list[dict[str, float | None]]) -> dict[str, list[float | None]]:
    """The columns of metrics.csv that have something in them, thinned, with six digits."""
    kept = [rows[i] for i in spread_over(len(rows), ROWS)]
    return {
        name: [_short(row.get(name)) for row in kept]
        for name in CURVES
        if any(row.get(name) is not None for row in kept)
    }


def _reliability(runs: list[Shown], notes: list[str]) -> dict[str, Any] | None:
    """The reliability diagrams of an arm's test examples, all seeds together."""
    sums = {"plain": np.zeros((3, BINS)), "scaled": np.zeros((3, BINS))}
    for run in runs:
        outputs = run.outputs(notes)
        if outputs is None:
            continue
        for name, factor in (("plain", 1.0), ("scaled", run.alpha)):
            if factor == 0:  # every prediction would be as sure as any other
                continue
            found = calibration.reliability(*outputs, bins=BINS, temperature=1 / factor)
            sums[name] += [
                found.count.numpy(),
                (found.count * found.confidence.nan_to_num()).numpy(),
                (found.count * found.accuracy.nan_to_num()).numpy(),
            ]
    return {name: _diagram(*of) for name, of in sums.items() if of.any()} or None


def _diagram(count: Array, confidence: Array, accuracy: Array) -> dict[str, Any]:
    """A reliability diagram from what its bins sum up to."""
    some = np.maximum(count, 1)
    return {
        "count": count.astype(int).tolist(),
        "confidence": [_short(value) for value in confidence / some],
        "accuracy": [_short(value) for value in accuracy / some],
        "ece": float(np.abs(confidence - accuracy).sum() / count.sum()),
    }


def _examples(runs: list[Shown], order: list[str]) -> list[dict[str, Any]]:
    """A few test examples of each arm's first run: from surely right to surely wrong."""
    found = []
    for arm in order[:EXAMPLE_ARMS]:
        run = next((run for run in runs if run.arm == arm and run.status == "finished"), None)
        outputs = run.outputs([]) if run is not None else None
        if run is None or outputs is None:
            continue
        logits, labels = outputs[0].double(), outputs[1]
        confidence, answer = logits.softmax(1).max(1)
        ranked = confidence.argsort(stable=True)
        right = ranked[(answer == labels)[ranked]].tolist()
        wrong = ranked[(answer != labels)[ranked]].tolist()
        picks = {
            "typical, right": right[len(right) // 2 : len(right) // 2 + 1],
            "barely right": right[:1],
            "barely wrong": wrong[:1],
            "surely wrong": wrong[-1:],
        }
        for words, places in picks.items():
            for place in places:
                found.append(
                    {
                        "arm": arm,
                        "words": words,
                        "index": place,
                        "label": int(labels[place]),
                        "alpha": run.alpha,
                        "logits": [_short(value) for value in logits[place].tolist()],
                    }
                )
    return found


def _classes(runs: list[Shown], notes: list[str]) -> list[str] | None:
    """The names of the classes, where a run has kept them."""
    for run in runs:
        path = run.folder / "classes.json"
        if run.status != "missing" and path.is_file():
            names = _try(lambda path=path: json.loads(path.read_text("utf-8")), None, notes)
            return None if names is None else [str(name) for name in names]
    return None


def _environments(runs: list[Shown], notes: list[str]) -> list[dict[str, Any]]:
    """On what the runs were done, each machine and set of versions once."""
    seen: Counter[str] = Counter()
    for run in runs:
        if run.status != "missing":
            told = _try(Run(run.folder).environment, {}, notes)
            for name in ("format", "seed", "time", "command", "resumed"):
                told.pop(name, None)
            seen[json.dumps(told)] += 1
    return [{"runs": count, **json.loads(told)} for told, count in seen.most_common()]


# Small things -------------------------------------------------------------------------------------


def _try(read: Callable[[], T], otherwise: T, notes: list[str]) -> T:
    """What `read` gives; where the file cannot be read, a note of why, and `otherwise`."""
    try:
        return read()
    except UNREADABLE as error:
        notes.append(f"Something could not be read: {error}")
        return otherwise


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _short(value: float | None) -> float | None:
    """`value` in six digits: the page is smaller, and no eye sees more."""
    return None if value is None else float(f"{value:.6g}")
