"""Write the tables of the README and docs/benchmarks.md from results/bench_*.csv.

python benchmarks/tables.py
"""

from __future__ import annotations

import csv
import functools
import json
import statistics

import harness
from loss import exponent

from powergrad.lab.stats import sign_flip_test, signed, span, t_interval

PAGES = {
    "README.md": ["compare", "loss"],
    "docs/benchmarks.md": ["loss", "all", "growth", "linear", "others"],
    "docs/methods/altering.md": ["altering"],
    "docs/methods/agc.md": ["agc"],
    "docs/dead-filters.md": ["monitor"],
    "docs/integrations.md": ["examples"],
    "docs/calibration.md": ["calibration"],
    "docs/choosing-alpha.md": ["compare"],
}


def size(row: dict[str, str]) -> str:
    return f"{int(row['n']):,} x {int(row['c']):,}"


def by_size(rows: list[dict[str, str]]) -> dict[tuple[str, str, str], dict[str, dict[str, str]]]:
    grouped: dict[tuple[str, str, str], dict[str, dict[str, str]]] = {}
    for row in rows:
        grouped.setdefault((row["case"], row["dtype"], size(row)), {})[row["variant"]] = row
    return grouped


def conditions(row: dict[str, str]) -> str:
    return (
        f"{row['cpu']}, {row['threads']} thread, torch {row['torch']}, {row['date']}, "
        f"commit {row['commit']}"
    )


def loss() -> str:
    """Float32 and class indices: the short table."""
    rows = harness.load("loss")
    lines = []
    for (case, dtype, name), variants in by_size(rows).items():
        if case == "labels" and dtype == "float32":
            native = variants.get("native", {"ratio": "-", "cold_ratio": "-"})
            lines.append(
                [
                    name,
                    variants["eager"]["ratio"],
                    native["ratio"],
                    f"{variants['eager']['cold_ratio']} / {native['cold_ratio']}",
                    variants["hook"]["ratio"],
                    f"{variants['plain']['peak_units']} / {variants['eager']['peak_units']}",
                ]
            )
    header = ["rows x classes", "eager", "C kernel", "both with cold caches", "the paper's hook",
              "memory, PyTorch / ours"]  # fmt: skip
    text = (
        "Time of forward and backward over that of `F.cross_entropy`, float32, and peak memory in "
        f"copies of the logits ({conditions(rows[0])}; `benchmarks/loss.py`)."
    )
    return f"{text}\n\n{harness.table(header, lines)}"


def every_case() -> str:
    rows = [r for r in harness.load("loss") if not r["case"].startswith("growth")]
    keys = ["variant", "us", "ratio", "cold_ratio", "peak_units", "error"]
    lines = [
        [case, dtype, name, *(v[key] for key in keys)]
        for (case, dtype, name), variants in by_size(rows).items()
        for v in variants.values()
    ]
    header = ["case", "dtype", "size", "variant", "us", "ratio", "cold ratio", "memory",
              "gradient's error"]  # fmt: skip
    return harness.table(header, lines)


def growth() -> str:
    rows = [r for r in harness.load("loss") if r["case"].startswith("growth")]
    lines = []
    for case in dict.fromkeys(r["case"] for r in rows):
        for variant in dict.fromkeys(r["variant"] for r in rows):
            points = [r for r in rows if (r["case"], r["variant"]) == (case, variant)]
            elements = [int(r["n"]) * int(r["c"]) for r in points]
            time = exponent(list(zip(elements, (float(r["us"]) for r in points), strict=True)))
            memory = exponent(
                [(e, e * float(r["peak_units"])) for e, r in zip(elements, points, strict=True)]
            )
            ratios = " ".join(r["ratio"] for r in points)
            lines.append([case, variant, f"{time:.3f}", f"{memory:.3f}", ratios])
    header = ["case", "variant", "exponent of time", "of memory", "ratio at 1M, 4M, 16M, 64M"]
    return harness.table(header, lines)


def linear() -> str:
    rows = harness.load("linear")
    keys = ["variant", "median_s", "ratio", "peak_mb", "peak_to_gradients", "rss_mb"]
    header = ["variant", "s", "ratio", "peak MB", "peak / (dW + dh)", "growth of resident set, MB"]
    return harness.table(header, [[row[key] for key in keys] for row in rows])


def whole(name: str) -> str:
    """All rows of a result, without what they have in common."""
    rows = harness.load(name)
    shared = {key for key in harness.conditions() if key in rows[0]}
    keys = [key for key in rows[0] if key not in shared]
    body = harness.table(keys, [[row[key] for key in keys] for row in rows])
    return f"{body}\n\n({conditions(rows[0])})"


def others() -> str:
    names = ("agc", "altering", "monitor", "imports", "train", "decode")
    return "\n\n".join(f"### `benchmarks/{name}.py`\n\n{whole(name)}" for name in names)


def compare() -> str:
    """The default comparison, as it is and with the learning rate tuned for every arm."""
    return "\n\n".join(study(name) for name in ("compare_digits", "compare_digits_tuned_lr"))


def study(name: str) -> str:
    """A finished study, from its study.json."""
    told = json.loads((harness.RESULTS / f"{name}.json").read_text())
    tuned = told.get("tuning")
    compared = {each["arm"]: each for each in told["comparisons"]}
    lines = []
    for arm in told["arms"]:
        rows = [row for row in told["rows"] if row["arm"] == arm]

        def mean(metric: str, rows: list[dict[str, float]] = rows) -> float:
            return statistics.fmean(row[metric] for row in rows)

        spread = statistics.stdev(row["test_accuracy"] for row in rows)
        cells = [arm]
        if tuned:
            cells.append(f"{tuned['arms'][arm]['chosen']:g}")
        cells += [f"{mean('train_accuracy'):.2f}", f"{mean('test_accuracy'):.2f} ± {spread:.2f}"]
        if arm in compared:
            found = compared[arm]
            gap = f"{signed(found['difference'])} ({span(found['interval'])})"
            cells += [gap, f"{found['p_adjusted']:.3f}", found["verdict"]]
        else:
            cells += ["", "", ""]
        cells += [
            f"{mean('nll'):.3f} / {mean('nll_scaled'):.3f}",
            f"{mean('ece'):.3f} / {mean('ece_scaled'):.3f}",
            f"{mean('dead_units'):.1f}",
        ]
        lines.append(cells)
    header = ["arm", "train %", "test %", "difference (95% interval)", "p", "verdict",
              "NLL at 1 / at 1/alpha", "ECE", "dead filters"]  # fmt: skip
    if tuned:
        header.insert(1, "lr")
    seeds = len({row["seed"] for row in told["rows"]})
    made = told["environment"]
    text = (
        f"`{made['command']}`: {seeds} seeds an arm, torch {made['torch']}, {made['time'][:10]}, "
        f"commit {made['commit']} (`results/{name}.json`). **{told['verdict']}**"
    )
    return f"{text}\n\n{harness.table(header, lines)}"


def examples() -> str:
    """The comparisons of examples/: fresh seeds, the learning rate tuned for both arms."""
    lines = []
    for task in ("segmentation", "language_model"):
        with open(harness.RESULTS / f"example_{task}.csv", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["split"] == "test"]
        known = ("arm", "alpha", "rate", "seed", "split", "command", "threads", "python", "torch")
        for metric in [key for key in rows[0] if key not in (*known, "date")]:
            arms = [
                {int(row["seed"]): float(row[metric]) for row in rows if row["arm"] == arm}
                for arm in ("CE", "PGT")
            ]
            gaps = [arms[1][seed] - arms[0][seed] for seed in arms[0]]
            values = [list(arm.values()) for arm in arms] + [gaps]
            cells = [f"{statistics.fmean(v):.3f} ± {statistics.stdev(v):.3f}" for v in values]
            p = float(sign_flip_test(gaps))
            lines.append([task.replace("_", " "), metric, *cells, f"{p:.3f}"])
    header = ["task", "measure", "cross-entropy", "PGT, alpha 0.3", "difference", "p"]
    return harness.table(header, lines)


def calibration() -> str:
    """Networks trained with PGT and with cross-entropy, read at several temperatures."""
    with open(harness.RESULTS / "calibration_digits.csv", newline="") as file:
        rows = list(csv.DictReader(file))

    def values(arm: str, reading: str, metric: str) -> list[float]:
        chosen = [row for row in rows if (row["arm"], row["reading"]) == (arm, reading)]
        return [float(row[metric]) for row in sorted(chosen, key=lambda row: int(row["seed"]))]

    def spread(found: list[float], places: int) -> str:
        return f"{statistics.fmean(found):.{places}f} ± {statistics.stdev(found):.{places}f}"

    readings = [("CE", each) for each in ("T = 1", "T fitted")]
    readings += [("PGT", each) for each in ("T = 1", "T = 1/alpha", "T fitted", "fold_alpha")]
    errors = {"nll": "NLL", "brier": "Brier", "ece_width": "ECE, width", "ece_mass": "ECE, mass"}
    decimals = {"temperature": 2, "accuracy": 2, "confidence": 2, **dict.fromkeys(errors, 4)}
    measured = harness.table(
        ["arm", "read at", "T", "accuracy %", "confidence %", *errors.values()],
        [
            [*each, *(spread(values(*each, metric), places) for metric, places in decimals.items())]
            for each in readings
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
    for one, other in pairs:
        cells = [f"{', '.join(one)} less {', '.join(other)}"]
        for metric in errors:
            both = zip(values(*one, metric), values(*other, metric), strict=True)
            gaps = [a - b for a, b in both]
            low, high = t_interval(gaps)
            cells.append(f"{statistics.fmean(gaps):+.4f} ({low:+.4f} to {high:+.4f})")
        lines.append(cells)
    differences = harness.table(["difference", *errors.values()], lines)
    first, seeds = rows[0], len({row["seed"] for row in rows})
    text = (
        f"`{first['command']}`: {seeds} seeds an arm, means ± standard deviations over them; "
        f"{first['test_images']} test images, temperatures fitted on {first['fitted_on']} held-out "
        f"training images ({conditions(first)}; `results/calibration_digits.csv`)."
    )
    paired = "Differences, paired by seed, with 95% t intervals:"
    return f"{text}\n\n{measured}\n\n{paired}\n\n{differences}"


TABLES = {
    "calibration": calibration,
    "compare": compare,
    "examples": examples,
    "loss": loss,
    "all": every_case,
    "growth": growth,
    "linear": linear,
    "others": others,
    **{name: functools.partial(whole, name) for name in ("altering", "agc", "monitor")},
}


def page(text: str, marks: list[str]) -> str:
    for mark in marks:
        text = harness.put_between_marks(text, f"table {mark}", TABLES[mark]())
    return text


def main() -> None:
    for name, marks in PAGES.items():
        path = harness.ROOT / name
        path.write_text(page(path.read_text(), marks))
        print(f"wrote {name}")


if __name__ == "__main__":
    main()
