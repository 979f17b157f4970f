"""The tables of benchmarks, audit, default comparison, calibration and examples."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from benchmarks import audit
from powergrad.lab.paper.evidence import Outcome
from powergrad.lab.stats import sign_flip_test, t_interval
from powergrad.lab.study import Results
from powergrad.lab.words import markdown_table, number
from reproduction.marks import Regions

__all__ = ["benchmark_regions"]

RESULTS = Path(__file__).parents[1] / "results"
CONDITIONS = ("threads", "device", "cpu", "python", "torch", "commit", "date")  # of a benchmark

Line = dict[str, str]


def benchmark_regions() -> Regions:
    """The regions that are made from results/*.csv and from the default comparison."""
    return {
        "calibration": _calibration,
        "compare": _compare,
        "examples": _examples,
        "loss": _loss,
        "all": _every_case,
        "growth": _growth,
        "linear": _linear,
        "compiled": _compiled,
        "works": _what_works_where,
        "others": _others,
        **{name: partial(_whole, name) for name in ("altering", "agc", "monitor")},
        **{f"audit-{name}": partial(_audit, name) for name in audit.TABLES},
    }


def _load(name: str) -> list[Line]:
    with open(RESULTS / f"{name}.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _conditions(row: Line) -> str:
    return (
        f"{row['cpu']}, {row['threads']} thread, torch {row['torch']}, {row['date']}, "
        f"commit {row['commit']}"
    )


def _by_size(rows: list[Line]) -> dict[tuple[str, str, str], dict[str, Line]]:
    """The variants of every case, dtype and size."""
    grouped: dict[tuple[str, str, str], dict[str, Line]] = {}
    for row in rows:
        size = f"{int(row['n']):,} x {int(row['c']):,}"
        grouped.setdefault((row["case"], row["dtype"], size), {})[row["variant"]] = row
    return grouped


def _loss() -> str:
    """Float32 and class indices: the short table."""
    rows = _load("bench_loss")
    lines = []
    for (case, dtype, size), variants in _by_size(rows).items():
        if (case, dtype) == ("labels", "float32"):
            plain, eager, hook = (variants[name] for name in ("plain", "eager", "hook"))
            native = variants.get("native", {"ratio": "-", "cold_ratio": "-"})
            cold = f"{eager['cold_ratio']} / {native['cold_ratio']}"
            memory = f"{plain['peak_units']} / {eager['peak_units']}"
            lines.append([size, eager["ratio"], native["ratio"], cold, hook["ratio"], memory])
    head = ("rows x classes", "eager", "C kernel", "both with cold caches", "the paper's hook")
    return (
        "Time of forward and backward over that of `F.cross_entropy`, float32, and peak memory in "
        f"copies of the logits ({_conditions(rows[0])}; `benchmarks/loss.py`).\n\n"
        f"{markdown_table((*head, 'memory, PyTorch / ours'), lines)}"
    )


def _every_case() -> str:
    rows = [row for row in _load("bench_loss") if not row["case"].startswith("growth")]
    keys = ("variant", "us", "ratio", "cold_ratio", "peak_units", "error")
    lines = [
        [*group, *(row[key] for key in keys)]
        for group, variants in _by_size(rows).items()
        for row in variants.values()
    ]
    head = ("case", "dtype", "size", "variant", "us", "ratio", "cold ratio", "memory")
    return markdown_table((*head, "gradient's error"), lines)


def _growth() -> str:
    rows = [row for row in _load("bench_loss") if row["case"].startswith("growth")]
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        for variant in dict.fromkeys(row["variant"] for row in rows):
            points = [row for row in rows if (row["case"], row["variant"]) == (case, variant)]
            elements = np.array([int(row["n"]) * int(row["c"]) for row in points])
            times = np.array([float(row["us"]) for row in points])
            memory = elements * np.array([float(row["peak_units"]) for row in points])
            exponents = (
                np.polyfit(np.log(elements), np.log(values), 1)[0] for values in (times, memory)
            )
            ratios = " ".join(row["ratio"] for row in points)
            lines.append([case, variant, *(f"{exponent:.3f}" for exponent in exponents), ratios])
    head = ("case", "variant", "exponent of time", "of memory", "ratio at 1M, 4M, 16M, 64M")
    return markdown_table(head, lines)


def _linear() -> str:
    keys = ("variant", "median_s", "ratio", "peak_mb", "peak_to_gradients", "rss_mb")
    head = ("variant", "s", "ratio", "peak MB", "peak / (dW + dh)", "growth of resident set, MB")
    return markdown_table(head, [[row[key] for key in keys] for row in _load("bench_linear")])


def _compiled() -> str:
    rows = _load("bench_compiled")
    names = list(dict.fromkeys(row["variant"] for row in rows if row["variant"] != "plain"))
    by_size = _by_size([{"case": "", **row} for row in rows])
    lines = [
        [size, dtype, *(variants[name]["ratio"] for name in names)]
        for (_, dtype, size), variants in by_size.items()
    ]
    return (
        "Time of forward and backward over that of eager `F.cross_entropy` "
        f"({_conditions(rows[0])}; `benchmarks/compiled.py`).\n\n"
        f"{markdown_table(('rows x classes', 'dtype', *names), lines)}"
    )


def _what_works_where() -> str:
    """One row per context; the three backends of `torch.compile` share one where they agree."""
    record = json.loads((RESULTS / "what_works_where.json").read_text("utf-8"))
    contexts: dict[str, list[dict[str, str]]] = {}
    for name, outcomes in record["outcomes"].items():
        contexts.setdefault(name.replace(" [two processes]", ""), []).append(outcomes)
    merged: dict[str, list[str]] = {}
    for name, (outcomes,) in contexts.items():
        context, _, backend = name.partition(" [compile, ")
        cells = _cells(outcomes)
        if backend and merged.get(context, cells) != cells:
            context = f"{context}, backend {backend.rstrip(']')}"
        merged[context] = cells
    head = ("context", "functions and modules", "`alter_gradient`", "`PowerGrad` around")
    lines = [[context, *cells] for context, cells in merged.items()]
    return (
        f"{markdown_table((*head, '`PowerGrad` inside'), lines)}\n\n"
        f"({sum(len(o) for o in record['outcomes'].values()):,} combinations, none of them plain; "
        f"torch {record['torch']}, {record['date']}; `python tests/never_plain.py`)"
    )


def _cells(outcomes: Mapping[str, str]) -> list[str]:
    """The columns, each of several ways to ask for PGT."""
    columns: dict[str, dict[str, str]] = {"": {}, "alter": {}, "around": {}, "inside": {}}
    for way, outcome in outcomes.items():
        if way.startswith("PowerGrad: "):
            columns["around"][way.removeprefix("PowerGrad: ")] = outcome
        else:
            column = {"alter_gradient": "alter", "PowerGrad, entered inside": "inside"}.get(way, "")
            columns[column][way] = outcome
    return [_cell(ways) for ways in columns.values()]


def _cell(ways: Mapping[str, str]) -> str:
    refused = [way for way, outcome in ways.items() if outcome != "right"]
    right = [way for way in ways if way not in refused]
    if not refused:
        return "yes"
    if len(refused) < len(right):
        return f"yes; raises: {_listed(refused)}"
    if right:
        return f"raises; yes: {_listed(right)}"
    ours = all(ways[way] == "raises" for way in refused)
    return "raises" if ours else "PyTorch raises"


def _listed(ways: list[str]) -> str:
    return "; ".join(f"`{way}`" for way in ways)


def _whole(name: str) -> str:
    """All rows of a benchmark, without what they have in common."""
    rows = _load(f"bench_{name}")
    keys = [key for key in rows[0] if key not in CONDITIONS]
    body = markdown_table(keys, [[row[key] for key in keys] for row in rows])
    return f"{body}\n\n({_conditions(rows[0])})"


def _others() -> str:
    names = ("agc", "altering", "monitor", "imports", "train", "decode")
    return "\n\n".join(f"### `benchmarks/{name}.py`\n\n{_whole(name)}" for name in names)


def _audit(name: str) -> str:
    return audit.TABLES[name](audit.Results(audit.read_results()))


# Studies ------------------------------------------------------------------------------------------


def _spread(values: list[float], places: int) -> str:
    return f"{fmean(values):.{places}f} ± {stdev(values):.{places}f}"


def _compare() -> str:
    """The default comparison, as it is and with the learning rate tuned for every arm."""
    return "\n\n".join(_study(name) for name in ("compare_digits", "compare_digits_tuned_lr"))


def _study(name: str) -> str:
    """A finished study."""
    results = Results.load(RESULTS / f"{name}.json")
    tuning = results.tuning
    lines = []
    for arm in results.arms:
        means = {
            metric: results.mean(arm, metric)
            for metric in ("train_accuracy", "nll", "nll_scaled", "ece", "ece_scaled", "dead_units")
        }
        comparison = results.comparison(arm)
        outcome = Outcome.of(comparison) if comparison else None
        lines.append(
            [
                arm,
                *([number(tuning.arms[arm].chosen)] if tuning else []),
                f"{means['train_accuracy']:.2f}",
                _spread([*results.values(arm).values()], 2),
                *([outcome.with_interval, outcome.p, outcome.verdict] if outcome else [""] * 3),
                f"{means['nll']:.3f} / {means['nll_scaled']:.3f}",
                f"{means['ece']:.3f} / {means['ece_scaled']:.3f}",
                f"{means['dead_units']:.1f}",
            ]
        )
    rate = ["lr"] if tuning else []
    head = ("arm", *rate, "train %", "test %", "difference (95% interval)", "p", "verdict")
    table = markdown_table((*head, "NLL at 1 / at 1/alpha", "ECE", "dead filters"), lines)
    seeds = len({row.seed for row in results.rows})
    made = results.environment
    return (
        f"`{made['command']}`: {seeds} seeds per arm, torch {made['torch']}, {made['time'][:10]}, "
        f"commit {made['commit']} (`results/{name}.json`). **{results.verdict()}**\n\n{table}"
    )


def _examples() -> str:
    """The comparisons of examples/: fresh seeds, the learning rate tuned for both arms."""
    known = {"arm", "alpha", "rate", "seed", "split", "command", "threads", "python", "torch"}
    lines = []
    for task in ("segmentation", "language_model"):
        rows = [row for row in _load(f"example_{task}") if row["split"] == "test"]
        for metric in [key for key in rows[0] if key not in {*known, "date"}]:
            plain, pgt = (
                {int(row["seed"]): float(row[metric]) for row in rows if row["arm"] == arm}
                for arm in ("CE", "PGT")
            )
            gaps = [pgt[seed] - value for seed, value in plain.items()]
            cells = [_spread([*values], 3) for values in (plain.values(), pgt.values(), gaps)]
            p = float(sign_flip_test(gaps))
            lines.append([task.replace("_", " "), metric, *cells, f"{p:.3f}"])
    head = ("task", "measure", "cross-entropy", "PGT, alpha 0.3", "difference", "p")
    return markdown_table(head, lines)


ERRORS = {"nll": "NLL", "brier": "Brier", "ece_width": "ECE, width", "ece_mass": "ECE, mass"}


def _calibration() -> str:
    """Networks trained with PGT and with cross-entropy, read at several temperatures."""
    rows = _load("calibration_digits")

    def values(arm: str, reading: str, metric: str) -> list[float]:
        chosen = [row for row in rows if (row["arm"], row["reading"]) == (arm, reading)]
        return [float(row[metric]) for row in sorted(chosen, key=lambda row: int(row["seed"]))]

    readings = [("CE", reading) for reading in ("T = 1", "T fitted")]
    readings += [("PGT", reading) for reading in ("T = 1", "T = 1/alpha", "T fitted", "fold_alpha")]
    decimals = {"temperature": 2, "accuracy": 2, "confidence": 2, **dict.fromkeys(ERRORS, 4)}
    measured = markdown_table(
        ["arm", "read at", "T", "accuracy %", "confidence %", *ERRORS.values()],
        [
            [*place, *(_spread(values(*place, metric), n) for metric, n in decimals.items())]
            for place in readings
        ],
    )
    pairs = [
        (("PGT", "T = 1"), ("PGT", "T = 1/alpha")),
        (("PGT", "T = 1/alpha"), ("PGT", "T fitted")),
        (("PGT", "fold_alpha"), ("PGT", "T = 1/alpha")),
        (("PGT", "T = 1/alpha"), ("CE", "T = 1")),
        (("PGT", "T fitted"), ("CE", "T fitted")),
    ]
    lines = []
    for first, second in pairs:
        cells = [f"{', '.join(first)} less {', '.join(second)}"]
        for metric in ERRORS:
            gaps = np.subtract(values(*first, metric), values(*second, metric)).tolist()
            low, high = t_interval(gaps)
            cells.append(f"{fmean(gaps):+.4f} ({low:+.4f} to {high:+.4f})")
        lines.append(cells)
    differences = markdown_table(["difference", *ERRORS.values()], lines)
    one, seeds = rows[0], len({row["seed"] for row in rows})
    return (
        f"`{one['command']}`: {seeds} seeds per arm, means ± standard deviations over them; "
        f"{one['test_images']} test images, temperatures fitted on {one['fitted_on']} held-out "
        f"training images ({_conditions(one)}; `results/calibration_digits.csv`).\n\n{measured}\n\n"
        f"Differences, paired by seed, with 95% t intervals:\n\n{differences}"
    )
