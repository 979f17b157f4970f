"""The tables of benchmarks, audit, default comparison, calibration and examples."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
from numpy.typing import NDArray
from scipy.stats import permutation_test

from benchmarks import audit
from powergrad.lab.stats import VERDICTS, t_interval
from powergrad.lab.study import Results
from powergrad.lab.words import markdown_table, number, short_key
from reproduction.marks import Regions
from reproduction.trials import Outcome, verdict_in_words

__all__ = ["benchmark_regions"]

RESULTS = Path(__file__).parents[1] / "results"
CONDITIONS = ("threads", "device", "cpu", "python", "torch", "commit", "date")  # of a benchmark

Line = dict[str, str]


def benchmark_regions() -> Regions:
    """The regions that are made from results/*.csv and from the default comparison."""
    return {
        "calibration": _calibration,
        "compare": lambda: _study("compare_digits"),
        "compare-short": _compare_short,
        "examples": _examples,
        "loss": _loss,
        "all": _every_case,
        "growth": _growth,
        "linear": _linear,
        "compiled": _compiled,
        "works": _what_works_where,
        "others": _others,
        "verdicts": _simulated_verdicts,
        "self-comparison": _self_comparison,
        **{name: partial(_whole, name) for name in ("altering", "agc", "monitor")},
        **{f"audit-{name}": partial(_audit, name) for name in audit.TABLES},
    }


def _load(name: str) -> list[Line]:
    with open(RESULTS / f"{name}.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


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
    head = (
        "rows x classes",
        "eager",
        "C kernel",
        "cold caches: eager / C kernel",
        "paper's listing",
    )
    return (
        "Time of forward and backward pass relative to `F.cross_entropy`, in float32, and peak "
        f"memory in copies of the logits ({_conditions(rows[0])}; `benchmarks/loss.py`).\n\n"
        f"{markdown_table((*head, 'memory: PyTorch / eager'), lines)}"
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
    return markdown_table((*head, "gradient error"), lines)


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
    head = ("case", "variant", "exponent of time", "exponent of memory")
    return markdown_table((*head, "ratio at 1M, 4M, 16M, 64M"), lines)


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
        "Time of forward and backward pass relative to eager `F.cross_entropy` "
        f"({_conditions(rows[0])}; `benchmarks/compiled.py`). `pgt` is eager "
        "`powergrad.cross_entropy` with the C kernel. `compiled plain` and `compiled pgt` are "
        "`F.cross_entropy` and `powergrad.cross_entropy` under `torch.compile`, `compiled module` "
        "is `powergrad.CrossEntropyLoss`, and `compiled mode` is `F.cross_entropy` inside "
        "`PowerGrad`.\n\n"
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
        f"({sum(len(o) for o in record['outcomes'].values()):,} combinations, none with the plain "
        f"gradient; torch {record['torch']}, {record['date']}; `python tests/never_plain.py`)"
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
    head = [key.replace("_an_", "_per_") for key in keys]
    body = markdown_table(head, [[row[key] for key in keys] for row in rows])
    return f"{body}\n\n({_conditions(rows[0])})"


OTHERS = {
    "agc": "Adaptive gradient clipping of a ResNet-50, compared with timm's.",
    "altering": "What each way to alter gradients adds to a training step of a ResNet-18.",
    "monitor": "What `FilterMonitor` adds to a training step of a ResNet-18.",
    "imports": "What `import powergrad` adds to `import torch`.",
    "train": "The workbench's training loop, compared with a plain PyTorch loop.",
    "decode": "Decoding and augmenting JPEG files, compared with timm's transforms.",
    "run": "What `powergrad run --alpha 0.3` adds to a training step, compared with a call of "
    "`powergrad.cross_entropy` in the script (`hand`).",
}


def _others() -> str:
    return "\n\n".join(
        f"### `benchmarks/{name}.py`\n\n{about}\n\n{_whole(name)}" for name, about in OTHERS.items()
    )


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
    """How the test was chosen, how often it errs, and how often it settles an arm."""
    rows = _load("bench_verdicts")

    def share(column: str, **wanted: str) -> str:
        row = next(row for row in rows if wanted.items() <= row.items())
        return f"{100 * float(row[column]):.1f}%"

    def settled(**wanted: str) -> str:
        row = next(row for row in rows if wanted.items() <= row.items())
        both = float(row["called_different"]) + float(row["called_equivalent"])
        return f"{100 * both:.0f}% ({float(row['mean_runs']):.1f})"

    def values(column: str, table: str) -> list[str]:
        return list(dict.fromkeys(row[column] for row in rows if row["table"] == table))

    def studies(table: str) -> str:
        counts = sorted(map(int, values("studies", table)))
        return " or ".join(f"{count:,}" for count in counts)

    uneven = ("normal", "one arm varies thrice", "baseline varies thrice", "as measured")
    effects, runs = ("0.0", "0.5", "1.0"), ("8", "8..24")
    chosen = markdown_table(
        (
            "test",
            *(f"false, {NOISE.get(noise, noise)}" for noise in uneven),
            *(f"settled, {effect}" for effect in effects),
        ),
        [
            (
                test,
                *(
                    share(
                        "any_called_different",
                        table="choice", test=test, noise=noise, runs="8..24", effect="0.0",
                    )
                    for noise in uneven
                ),
                *(
                    settled(
                        table="choice", test=test, noise="as measured", runs="8..24", effect=effect
                    )
                    for effect in effects
                ),
            )
            for test in values("test", "choice")
        ],
    )  # fmt: skip
    errors = markdown_table(
        (
            "noise", "arms",
            *(f"false difference, {n} runs" for n in runs),
            *(f"false equivalence, {n} runs" for n in runs),
        ),
        [
            (
                NOISE.get(noise, noise),
                arms,
                *(
                    share(column, table="error", noise=noise, arms=arms, runs=n, effect=effect)
                    for column, effect in (
                        ("any_called_different", "0.0"), ("any_called_equivalent", "0.5")
                    )
                    for n in runs
                ),
            )
            for noise in values("noise", "error")
            for arms in values("arms", "error")
        ],
    )  # fmt: skip
    power = markdown_table(
        ("noise", "arms", "runs", *(f"settled, {effect}" for effect in effects)),
        [
            (
                NOISE.get(noise, noise),
                arms,
                n,
                *(
                    settled(table="power", noise=noise, arms=arms, runs=n, effect=effect)
                    for effect in effects
                ),
            )
            for noise in values("noise", "power")
            for arms in values("arms", "power")
            for n in runs
        ],
    )
    return (
        "The simulations use a standard deviation of 0.4 and a margin of 0.5 (`python "
        f"benchmarks/verdicts.py`; {_conditions(rows[0])}; `results/bench_verdicts.csv`). The "
        "number of arms does not include the baseline. *8..24 runs* means looks at 8, 12, 16, 20 "
        "and 24 runs per arm.\n\n"
        f"**Choice of the test**: 3 arms, 8..24 runs, {studies('choice')} simulated studies per "
        "cell. *False* is the share of studies without any true difference in which some arm is "
        "called better or worse. *Settled* is the share of arms that are settled if the true "
        "difference is 0, the margin, or twice the margin; the mean number of runs per arm is in "
        f"brackets.\n\n{chosen}\n\n"
        f"**False verdicts of the intervals**: {studies('error')} studies per cell. *False "
        "difference* is the same as *false* above. *False equivalence* is the share of studies in "
        "which some arm is called equivalent although every arm differs by the margin.\n\n"
        f"{errors}\n\n"
        f"**How often an arm is settled**: {studies('power')} studies per cell.\n\n{power}"
    )


# Studies ------------------------------------------------------------------------------------------


def _spread(values: list[float], places: int) -> str:
    return f"{fmean(values):.{places}f} ± {stdev(values):.{places}f}"


def _compare_short() -> str:
    """The default comparison, in a table for the README."""
    results = Results.load(RESULTS / "compare_digits.json")
    lines = []
    for arm in results.arms:
        comparison = results.comparison(arm)
        outcome = Outcome.of(comparison) if comparison else None
        cells = [outcome.with_interval, comparison.verdict] if outcome and comparison else ["", ""]
        values = [*results.units(arm).values()]
        lines.append([arm, str(len(values)), _spread(values, 2), *cells])
    table = markdown_table(("arm", "seeds", "test %", "difference (95%)", "verdict"), lines)
    return f"{table}\n\n**{results.verdict()}** (`results/compare_digits.json`)"


def _study(name: str) -> str:
    """A finished study."""
    results = Results.load(RESULTS / f"{name}.json")
    tuning = results.tuning
    keys = tuning.keys if tuning and not tuning.is_unit else ()
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
                *(number(tuning.arms[arm].winner.point[key]) for key in keys if tuning),
                f"{means['train_accuracy']:.2f}",
                _spread([*results.units(arm).values()], 2),
                *(
                    [outcome.with_interval, outcome.p, verdict_in_words(comparison)]
                    if outcome and comparison
                    else [""] * 3
                ),
                f"{means['nll']:.3f} / {means['nll_scaled']:.3f}",
                f"{means['ece']:.3f} / {means['ece_scaled']:.3f}",
                f"{means['dead_units']:.1f}",
            ]
        )
    head = (
        "arm",
        *map(short_key, keys),
        "train %",
        "test %",
        "difference (95% interval)",
        "p",
        "verdict",
    )
    table = markdown_table((*head, "NLL at 1 / at 1/alpha", "ECE", "dead filters"), lines)
    counts = sorted({len(results.of_arm(arm)) for arm in results.arms})
    seeds = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    made = results.environment
    notes = "".join(f"\n\n{note}" for note in results.notes())
    return (
        f"`{made['command']}`: {seeds} seeds per arm, torch {made['torch']}, {made['time'][:10]}, "
        f"commit {made['commit']} (`results/{name}.json`). **{results.verdict()}**\n\n"
        f"{table}{notes}"
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
            # The exact sign-flip test, as examples/comparison.py prints it.
            flips = permutation_test((gaps,), _size, permutation_type="samples", alternative="less")
            p = float(flips.pvalue)
            lines.append([task.replace("_", " "), metric, *cells, f"{p:.3f}"])
    head = ("task", "measure", "cross-entropy", "PGT, alpha 0.3", "difference", "p")
    return markdown_table(head, lines)


def _size(gaps: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    return -np.abs(np.mean(gaps, axis=axis))


ERRORS = {
    "nll": "NLL",
    "brier": "Brier",
    "ece_width": "ECE, equal width",
    "ece_mass": "ECE, equal mass",
}


def _calibration() -> str:
    """Networks trained with PGT and with cross-entropy, evaluated at several temperatures."""
    rows = _load("calibration_digits")

    def values(arm: str, reading: str, metric: str) -> list[float]:
        chosen = [row for row in rows if (row["arm"], row["reading"]) == (arm, reading)]
        return [float(row[metric]) for row in sorted(chosen, key=lambda row: int(row["seed"]))]

    readings = [("CE", reading) for reading in ("T = 1", "T fitted")]
    readings += [("PGT", reading) for reading in ("T = 1", "T = 1/alpha", "T fitted", "fold_alpha")]
    decimals = {"temperature": 2, "accuracy": 2, "confidence": 2, **dict.fromkeys(ERRORS, 4)}
    measured = markdown_table(
        ["arm", "temperature", "T", "accuracy %", "confidence %", *ERRORS.values()],
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
        cells = [f"({', '.join(first)}) minus ({', '.join(second)})"]
        for metric in ERRORS:
            gaps = np.subtract(values(*first, metric), values(*second, metric)).tolist()
            low, high = t_interval(gaps)
            cells.append(f"{fmean(gaps):+.4f} ({low:+.4f} to {high:+.4f})")
        lines.append(cells)
    differences = markdown_table(["difference", *ERRORS.values()], lines)
    one, seeds = rows[0], len({row["seed"] for row in rows})
    return (
        f"Means ± standard deviations over {seeds} seeds, on {one['test_images']} test images. "
        f"Temperatures are fitted on {one['fitted_on']} held-out training images "
        f"(`{one['command']}`; {_conditions(one)}; `results/calibration_digits.csv`).\n\n"
        f"{measured}\n\nMean differences, paired by seed, with 95% t intervals:\n\n{differences}"
    )
