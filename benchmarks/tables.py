"""The tables of README.md, docs/ and results/ that show what benchmarks and examples measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import partial
from statistics import fmean, stdev

import numpy as np
from numpy.typing import NDArray

from benchmarks import audit
from powergrad.lab.stats import VERDICTS, t_interval
from reproduction.decisive.rule import sign_flip
from reproduction.evidence import RESULTS, csv_rows
from reproduction.marks import Regions, markdown_table

Line = dict[str, str]


def benchmark_regions() -> Regions:
    """The tables, by the names of their regions."""
    return {
        "calibration": _calibration,
        "examples": _examples,
        "loss": _loss,
        "growth": _growth,
        "linear": _linear,
        "compiled": _compiled,
        "works": _what_works_where,
        "others": _others,
        "verdicts": _simulated_verdicts,
        "self-comparison": _self_comparison,
        **{name: partial(_benchmark, name) for name in COLUMNS},
        **{f"audit-{name}": partial(_audit, name) for name in audit.TABLES},
    }


def _load(name: str) -> list[Line]:
    return csv_rows(RESULTS / f"{name}.csv")


def _columns(rows: Iterable[Line], *names: str) -> NDArray[np.float64]:
    """The numbers of some columns: ``(columns, rows)``."""
    return np.array([[float(row[name]) for name in names] for row in rows]).T


def _conditions(row: Line) -> str:
    threads = "1 thread" if row["threads"] == "1" else f"{row['threads']} threads"
    return f"{row['cpu']}, {threads}, torch {row['torch']}, {row['date']}, commit {row['commit']}"


def _by_size(rows: list[Line]) -> dict[tuple[str, str, str], dict[str, Line]]:
    """The variants of every case, dtype and size."""
    grouped: dict[tuple[str, str, str], dict[str, Line]] = {}
    for row in rows:
        size = f"{int(row['n']):,} x {int(row['c']):,}"
        grouped.setdefault((row["case"], row["dtype"], size), {})[row["variant"]] = row
    return grouped


SHOWN = ("256 x 10", "1,024 x 1,000", "128 x 128,000")  # sizes at which every case is shown


def _loss() -> str:
    """Class indices in float32 at every size, and the other cases at some."""
    rows = [row for row in _load("bench_loss") if not row["case"].startswith("growth")]
    lines = []
    for (case, dtype, size), variants in _by_size(rows).items():
        if (case, dtype) == ("labels", "float32") or size in SHOWN:
            eager, native, hook = (
                variants.get(name, dict.fromkeys(rows[0], "-"))
                for name in ("eager", "native", "hook")
            )
            cold = f"{eager['cold_ratio']} / {native['cold_ratio']}"
            measured = (eager["ratio"], native["ratio"], cold, hook["ratio"], eager["peak_units"])
            lines.append([case, dtype, size, *measured])
    ours = [row for row in rows if row["variant"] in ("eager", "native")]
    worst = {row["dtype"]: 0.0 for row in ours}
    for row in ours:
        worst[row["dtype"]] = max(worst[row["dtype"]], float(row["error"]))
    head = ("case", "dtype", "rows x classes", "eager", "C kernel", "cold: eager / C kernel")
    return (
        f"{markdown_table((*head, 'listing', 'memory'), lines)}\n\n"
        f"({_conditions(rows[0])}; `benchmarks/loss.py`, `results/bench_loss.csv`. The largest "
        "error of a gradient, relative to float64 and to the largest entry of its row, is "
        f"{worst['float32']:.0e} in float32 and {worst['bfloat16']:.0e} in bfloat16.)"
    )


def _growth() -> str:
    """The exponents of time and memory, and the ratios to PyTorch, from 1 to 64 million logits."""
    rows = [row for row in _load("bench_loss") if row["case"].startswith("growth")]
    lines = []
    names = {"plain": "`F.cross_entropy`", "eager": "eager", "native": "C kernel"}
    for variant, name in names.items():
        times, memories, ratios = [], [], []
        for case in dict.fromkeys(row["case"] for row in rows):
            points = [row for row in rows if (row["case"], row["variant"]) == (case, variant)]
            sizes = np.array([int(row["n"]) * int(row["c"]) for row in points])
            us, units, ratio = _columns(points, "us", "peak_units", "ratio")
            times.append(np.polyfit(np.log(sizes), np.log(us), 1)[0])
            memories.append(np.polyfit(np.log(sizes), np.log(sizes * units), 1)[0])
            ratios.extend(ratio)
        ends = ((f"{min(found):.2f}", f"{max(found):.2f}") for found in (times, memories, ratios))
        lines.append([name, *(" to ".join(dict.fromkeys(pair)) for pair in ends)])
    return markdown_table(("variant", "exponent of time", "exponent of memory", "ratio"), lines)


def _linear() -> str:
    keys = ("variant", "median_s", "ratio", "peak_mb", "peak_to_gradients", "rss_mb")
    head = ("variant", "s", "ratio", "peak MB", "peak / (dW + dh)", "growth of resident set, MB")
    return markdown_table(head, [[row[key] for key in keys] for row in _load("bench_linear")])


def _compiled() -> str:
    rows = _load("bench_compiled")
    names = ("pgt", "compiled plain", "compiled pgt")
    by_size = _by_size([{"case": "", **row} for row in rows])
    lines = [
        [size, dtype, *(variants[name]["ratio"] for name in names)]
        for (_, dtype, size), variants in by_size.items()
    ]
    return (
        f"{markdown_table(('rows x classes', 'dtype', *names), lines)}\n\n"
        f"({_conditions(rows[0])}; `benchmarks/compiled.py`)"
    )


def _what_works_where() -> str:
    """One row per outcome; the three backends of `torch.compile` share a name where they agree."""
    record = json.loads((RESULTS / "what_works_where.json").read_text("utf-8"))
    merged: dict[str, tuple[str, ...]] = {}
    for name, outcomes in record["outcomes"].items():
        context, _, backend = name.replace(" [two processes]", "").partition(" [compile, ")
        cells = _cells(outcomes)
        if backend and merged.get(context, cells) != cells:
            context = f"{context}, backend {backend.rstrip(']')}"
        merged[context] = cells
    contexts: dict[tuple[str, ...], list[str]] = {}
    for context, cells in merged.items():
        contexts.setdefault(cells, []).append(context)
    head = ("context", "functions and modules", "`alter_gradient`", "`enable`")
    lines = [["; ".join(names), *cells] for cells, names in contexts.items()]
    return (
        f"{markdown_table((*head, '`PowerGrad` around', '`PowerGrad` inside'), lines)}\n\n"
        f"({sum(len(o) for o in record['outcomes'].values()):,} combinations, none with the plain "
        f"gradient; torch {record['torch']}, {record['date']}; `python tests/never_plain.py`)"
    )


COLUMN = {"alter_gradient": "alter", "PowerGrad, entered inside": "inside"}  # by the way


def _cells(outcomes: Mapping[str, str]) -> tuple[str, ...]:
    """The columns, each of several ways to ask for PGT."""
    columns: dict[str, dict[str, str]] = {
        column: {} for column in ("", "alter", "enable", "PowerGrad", "inside")
    }
    for way, outcome in outcomes.items():
        prefix, colon, name = way.partition(": ")
        columns[prefix if colon else COLUMN.get(way, "")][name or way] = outcome
    return tuple(_cell(ways) for ways in columns.values())


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


COLUMNS = {  # of a benchmark, and how its table names them
    "agc": {
        "case": "clipped units",
        "variant": "variant",
        "median_ms": "ms",
        "ratio_to_timm": "ratio to timm",
    },
    "altering": {"method": "method", "type": "type", "added_ms": "added ms", "share": "share"},
    "monitor": {
        "every": "every",
        "gradients": "gradients and features",
        "record_ms": "ms per record",
        "share": "share",
    },
}


def _benchmark(name: str) -> str:
    """The columns of a benchmark that a reader needs."""
    rows, columns = _load(f"bench_{name}"), COLUMNS[name]
    body = markdown_table([*columns.values()], [[row[key] for key in columns] for row in rows])
    return f"{body}\n\n({_conditions(rows[0])}; `results/bench_{name}.csv`)"


def _others() -> str:
    """What has no page of its own: one ratio per line."""
    (imports,) = _load("bench_imports")
    lines = [["`imports.py`", "time of `import powergrad` to `import torch`", imports["ratio"]]]
    for row in _load("bench_train"):
        what = f"throughput of the workbench to that of a plain PyTorch loop, {row['what']}"
        lines.append(["`train.py`", what, row["throughput_ratio"]])
    for row in _load("bench_decode")[1:]:
        name = row["variant"].replace("timm, ", "timm's ")
        what = f"time of {name} transforms to ours, decoding and augmenting JPEG files"
        lines.append(["`decode.py`", what, row["ratio_to_ours"]])
    for row in _load("bench_run"):
        what = f"time of a step under `powergrad run` to a plain step, {row['model']}"
        lines.append(["`run.py`", what, row["ratio_run"]])
    return markdown_table(("benchmark", "measured", "ratio"), lines)


def _audit(name: str) -> str:
    return audit.TABLES[name](audit.Results(audit.read_results()))


# Simulated studies --------------------------------------------------------------------------------


def _self_comparison() -> str:
    """How often real trainings of cross-entropy are called better or worse than others of it."""
    repeats, *once = _load("bench_self_comparison")
    share = {name: f"{100 * float(repeats[name]):.1f}%" for name in VERDICTS}
    one_tuning = " and ".join(f"**{_false(row)}** with {row['seeds']} final seeds" for row in once)
    return (
        "We checked this with real trainings, comparing cross-entropy with itself (`python "
        f"benchmarks/self_comparison.py`; {_conditions(repeats)}). {int(repeats['runs']):,} runs "
        f"on digits were trained, and {int(repeats['studies']):,} studies of each kind were drawn "
        f"from them. Both sides choose among the same {repeats['trials']} random points of "
        "learning rate and weight decay.\n\n"
        f"- **One tuning** with {once[0]['tuning_seeds']} runs per point: one side was called "
        f"better or worse in {one_tuning}. More seeds make it worse. (The final runs are simulated "
        "with the mean and the residuals of the runs at each point.)\n"
        f"- **{repeats['repeats']} repeats** with {repeats['seeds']} final seeds per winner: in "
        f"**{_false(repeats)}**; {share['equivalent']} were called equivalent, and "
        f"{share['not settled']} were not settled."
    )


def _false(row: Mapping[str, str]) -> str:
    """The share of studies that called one of two equal sides better or worse."""
    return f"{100 * (float(row['better']) + float(row['worse'])):.1f}%"


NOISE = {  # as results/bench_verdicts.csv names it, and as the page does
    "one arm varies thrice": "one arm with 3 times the SD",
    "baseline varies thrice": "baseline with 3 times the SD",
    "as measured": "noise of measured runs",
    "one arm is skewed": "one skewed arm",
}


def _simulated_verdicts() -> str:
    """How often the intervals err: the largest share over the numbers of arms."""
    rows = [row for row in _load("bench_verdicts") if row["table"] == "error"]
    runs = ("8", "8..24")

    def share(noise: str, n: str, column: str, effect: str) -> str:
        wanted = {"noise": noise, "runs": n, "effect": effect}
        shares = [float(row[column]) for row in rows if wanted.items() <= row.items()]
        return f"{100 * max(shares):.1f}%"

    lines = [
        [NOISE.get(noise, noise)]
        + [share(noise, n, "any_called_different", "0.0") for n in runs]
        + [share(noise, n, "any_called_equivalent", "0.5") for n in runs]
        for noise in dict.fromkeys(row["noise"] for row in rows)
    ]
    head = [f"false {what}, {n} runs" for what in ("difference", "equivalence") for n in runs]
    return (
        f"{markdown_table(['noise', *head], lines)}\n\n"
        f"(`python benchmarks/verdicts.py`; {_conditions(rows[0])}; `results/bench_verdicts.csv`)"
    )


# Studies ------------------------------------------------------------------------------------------


def _spread(values: list[float], places: int) -> str:
    return f"{fmean(values):.{places}f} ± {stdev(values):.{places}f}"


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
            p, _ = sign_flip([gaps])  # as examples/comparison.py prints it
            lines.append([task.replace("_", " "), metric, *cells, f"{p:.3f}"])
    head = ("task", "measure", "cross-entropy", "PGT, alpha 0.3", "difference", "p")
    return markdown_table(head, lines)


ERRORS = {"nll": "NLL", "brier": "Brier", "ece_mass": "ECE, equal mass"}


def _calibration() -> str:
    """Networks trained with PGT and with cross-entropy, evaluated at several temperatures."""
    rows = _load("calibration_digits")

    def values(arm: str, reading: str, metric: str) -> list[float]:
        chosen = [row for row in rows if (row["arm"], row["reading"]) == (arm, reading)]
        return [float(row[metric]) for row in sorted(chosen, key=lambda row: int(row["seed"]))]

    readings = [("CE", reading) for reading in ("T = 1", "T fitted")]
    readings += [("PGT", reading) for reading in ("T = 1", "T = 1/alpha", "T fitted")]
    decimals = {"accuracy": 2, "confidence": 2, **dict.fromkeys(ERRORS, 3)}
    measured = markdown_table(
        ["arm", "temperature", "T", "accuracy %", "confidence %", *ERRORS.values()],
        [
            [
                *place,
                f"{fmean(values(*place, 'temperature')):.2f}",
                *(_spread(values(*place, metric), n) for metric, n in decimals.items()),
            ]
            for place in readings
        ],
    )
    gaps = {
        metric: np.subtract(values("PGT", "T = 1", metric), values("PGT", "T = 1/alpha", metric))
        for metric in ERRORS
    }
    spans = {metric: t_interval(differences.tolist()) for metric, differences in gaps.items()}
    words = ", ".join(
        f"{differences.mean():+.3f} ({spans[metric][0]:+.3f} to {spans[metric][1]:+.3f}) in "
        f"{ERRORS[metric]}"
        for metric, differences in gaps.items()
    )
    one, seeds = rows[0], len({row["seed"] for row in rows})
    return (
        f"Means ± standard deviations over {seeds} seeds, on {one['test_images']} test images. "
        f"Temperatures are fitted on {one['fitted_on']} held-out training images "
        f"(`{one['command']}`; {_conditions(one)}; `results/calibration_digits.csv`).\n\n"
        f"{measured}\n\nPGT at T = 1 minus PGT at T = 1/alpha, paired by seed, with 95% t "
        f"intervals: {words}."
    )
