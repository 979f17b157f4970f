"""How often a verdict is wrong, and how often there is one: simulated studies.

python benchmarks/verdicts.py                 every table: results/bench_verdicts.csv
python benchmarks/verdicts.py --choice        only the table by which the test was chosen
python benchmarks/verdicts.py --kinds         only the last table; a second start continues it

*Error*: studies in which no arm differs from the baseline. Counted is the share with any arm called
better or worse; and, where every arm truly differs by exactly the margin, the share with any arm
called equivalent. *Power*: the share of arms that are settled, and their runs, for true differences
of 0, the margin and twice the margin.

*Choice*: four tests that share one spending of the error over the looks. "intervals" is the one
that powergrad uses; "pooled" is the same with one variance for all arms, as in Dunnett's test;
"sign-flip" flips the signs of differences between runs of the same seed; "permutation" exchanges
runs of the two arms. The last two are corrected by Holm's method, and call equivalent by two
one-sided t tests.

*Kinds*: the error of the other kinds of verdicts, each study judged by `settle` of
`powergrad.lab.stats`: pairs by the rule of the first look, known noise, a target, two metrics, and
runs that fail.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import harness
import numpy as np
from numpy.typing import NDArray
from scipy import stats

from powergrad.lab.files import csv_text, write_text
from powergrad.lab.stats.looks import DEFAULT, Design
from powergrad.lab.stats.power import judge
from powergrad.lab.stats.settle import Arm, Rule, settle
from powergrad.lab.stats.tests import Noise

Array = NDArray[np.float64]

MARGIN = 0.5
SIGMA = 0.4
FIXED = Design((8,))
RESAMPLES = 999


# Noise -------------------------------------------------------------------------------------------


def measured() -> Array:
    """What earlier digits studies leave of the accuracies once each arm's mean is taken off."""
    residuals: list[float] = []
    for path in sorted(harness.RESULTS.glob("compare_digits_*.csv")):
        arms: dict[str, list[float]] = {}
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if row.get("diverged") != "True":
                    arms.setdefault(row["arm"], []).append(float(row["test_accuracy"]))
        for values in arms.values():
            scale = math.sqrt(len(values) / (len(values) - 1))
            residuals += [scale * (value - np.mean(values)) for value in values]
    return np.array(residuals) / np.std(residuals)


def draw(kind: str, shape: tuple[int, int, int], rng: np.random.Generator) -> Array:
    """Noise of (studies, arms, runs) with mean 0; the first arm is the baseline."""
    noise = rng.standard_normal(shape) * SIGMA
    if kind == "heavy tails":
        noise = rng.standard_t(3, shape) / math.sqrt(3) * SIGMA
    elif kind == "binomial, 360 images":
        noise = 100 * (rng.binomial(360, 0.985, shape) / 360 - 0.985)
    elif kind == "one arm varies thrice":
        noise[:, 1] *= 3
    elif kind == "baseline varies thrice":
        noise[:, 0] *= 3
    elif kind == "as measured":
        noise = rng.choice(measured(), shape) * SIGMA
    elif kind == "one arm is skewed":
        noise[:, 1] = (1 - rng.exponential(1.0, noise[:, 1].shape)) * SIGMA
    return noise


KINDS = (
    "normal",
    "heavy tails",
    "binomial, 360 images",
    "one arm varies thrice",
    "baseline varies thrice",
    "as measured",
    "one arm is skewed",
)


# Tests: (studies, arms, runs) and a design to the sign and the equivalence of each arm ------------

Verdicts = tuple[
    Array, NDArray[np.bool_], Array
]  # sign, equivalent, runs; each (studies, arms - 1)


def intervals(values: Array, design: Design) -> Verdicts:
    m = values.shape[1] - 1
    judged = [
        judge(values[:, arm], values[:, 0], design, margin=MARGIN, comparisons=m)
        for arm in range(1, m + 1)
    ]
    return tuple(np.stack([getattr(j, name) for j in judged], 1) for name in judged[0]._fields)  # type: ignore[return-value]


def pooled(values: Array, design: Design) -> Verdicts:
    studies, arms, _ = values.shape
    sign, equal = np.zeros((studies, arms - 1)), np.zeros((studies, arms - 1), bool)
    n = np.full(sign.shape, float(design.last))
    is_open = np.ones(sign.shape, bool)
    for look, size in enumerate(design.looks):
        x = values[:, :, :size]
        error = np.sqrt(x.var(-1, ddof=1).mean(1) * 2 / size)[:, None]
        level = design.nominal(look, arms - 1)
        reach = stats.t.isf(level / 2, arms * (size - 1)) * error
        difference = x[:, 1:].mean(-1) - x[:, :1].mean(-1)
        differs = is_open & (np.abs(difference) > reach)
        same = is_open & ~differs & (np.abs(difference) + reach < MARGIN)
        sign[differs] = np.sign(difference[differs])
        equal |= same
        n[differs | same] = size
        is_open &= ~(differs | same)
    return sign, equal, n


def resampled(values: Array, design: Design, statistics: Callable[[Array], Array]) -> Verdicts:
    """Holm's step-down over nested resampling tests; `statistics` has the observed sum first."""
    studies, arms, _ = values.shape
    m = arms - 1
    sign, equal = np.zeros((studies, m)), np.zeros((studies, m), bool)
    n = np.full((studies, m), float(design.last))
    for study in range(studies):
        sums = [statistics(values[study, [arm, 0]]) for arm in range(1, arms)]
        is_open, rejected = set(range(m)), 0
        for look, size in enumerate(design.looks):
            while True:
                crossed = [
                    a for a in is_open if _crosses(sums[a], design, look, 0.05 / (m - rejected))
                ]
                if not crossed:
                    break
                for arm in crossed:
                    sign[study, arm], n[study, arm] = np.sign(sums[arm][look, 0]), size
                    rejected += 1
                is_open -= set(crossed)
            share = (size - (design.looks[look - 1] if look else 0)) / design.last
            for arm in list(is_open):
                d = values[study, arm + 1, :size] - values[study, 0, :size]
                t = (MARGIN - abs(d.mean())) / (d.std(ddof=1) / math.sqrt(size))
                if stats.t.sf(t, size - 1) < 0.05 * share / m:
                    equal[study, arm], n[study, arm] = True, size
                    is_open.discard(arm)
    return sign, equal, n


def _crosses(sums: Array, design: Design, look: int, level: float) -> bool:
    alive, spent = np.ones(sums.shape[1], bool), 0
    for k, size in enumerate(design.looks[: look + 1]):
        room = math.floor(level * size / design.last * sums.shape[1] + 1e-9) - spent
        if room <= 0:
            continue
        t = np.where(alive, np.abs(sums[k]), -1.0)
        ordered = -np.sort(-t)
        bound = ordered[room - 1]
        if (t >= bound - 1e-9).sum() > room:  # ties: only those above
            above = ordered[ordered > bound + 1e-9]
            if not len(above):
                continue
            bound = above[-1]
        beyond = alive & (np.abs(sums[k]) >= bound - 1e-9)
        if beyond[0]:
            return True
        spent += int(beyond.sum())
        alive &= ~beyond
    return False


def sign_flip(values: Array, design: Design) -> Verdicts:
    signs = np.random.default_rng(1).choice([-1.0, 1.0], (RESAMPLES + 1, values.shape[2]))
    signs[0] = 1

    def sums(pair: Array) -> Array:
        d = pair[0] - pair[1]
        return np.stack([signs[:, :n] @ d[:n] for n in design.looks])

    return resampled(values, design, sums)


def permutation(values: Array, design: Design) -> Verdicts:
    rng = np.random.default_rng(1)
    bounds = [0, *design.looks]
    blocks = []
    for begin, end in itertools.pairwise(bounds):
        half = np.repeat([1.0, -1.0], end - begin)
        block = rng.permuted(np.tile(half, (RESAMPLES + 1, 1)), axis=1)
        block[0] = half
        blocks.append(block)

    def sums(pair: Array) -> Array:
        parts = [
            block @ np.concatenate([pair[0, begin:end], pair[1, begin:end]])
            for block, begin, end in zip(blocks, bounds[:-1], bounds[1:], strict=True)
        ]
        return np.cumsum(parts, axis=0)

    return resampled(values, design, sums)


TESTS = {
    "intervals": intervals,
    "pooled": pooled,
    "sign-flip": sign_flip,
    "permutation": permutation,
}


# Other kinds of verdicts --------------------------------------------------------------------------


def correlated(shape: tuple[int, ...], correlation: float, rng: np.random.Generator) -> Array:
    """Normal noise of (studies, metrics, arms, runs), correlated between arms at the same seed."""
    shared = rng.standard_normal((*shape[:2], 1, shape[3]))
    own = rng.standard_normal(shape)
    return SIGMA * (math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * own)


PAIRS = Rule(MARGIN, pairs=True)
BOTH = (Rule(MARGIN, claim="not worse", pairs=True), Rule(0.0, claim="better", pairs=True))
FEW = Design((2, 3, 4))
# The rules, the correlation, the rate of failures and, where it is not that of the table, the
# design. "earlier runs" is a sigma with 8 degrees of freedom, drawn for every study.
OTHER_KINDS: dict[str, tuple[tuple[Rule, ...], float, float, Design | None]] = {
    **{
        f"pairs, correlation {r}": ((PAIRS,), r, 0.0, None) for r in (0.0, 0.3, 0.5, 0.7, 0.9, 0.99)
    },
    "known noise": ((Rule(MARGIN, noise=Noise(SIGMA, 0)),), 0.0, 0.0, None),
    "known noise, few runs": ((Rule(MARGIN, noise=Noise(SIGMA, 0)),), 0.0, 0.0, FEW),
    "noise of earlier runs": ((Rule(MARGIN, noise=Noise(SIGMA, 9, 8)),), 0.0, 0.0, None),
    "target": ((Rule(MARGIN, target=0.0),), 0.0, 0.0, None),
    "two metrics": (BOTH, 0.0, 0.0, None),
    "two metrics, correlation 0.9": (BOTH, 0.9, 0.0, None),
    "failures, 5%": ((PAIRS,), 0.0, 0.05, None),
    "failures, 30%": ((PAIRS,), 0.0, 0.3, None),
    "failures, 30%, correlation 0.9": ((PAIRS,), 0.9, 0.3, None),
}

WITH_EFFECT = ("pairs, correlation 0.7", "known noise", "two metrics", "failures, 30%")


def simulate_kind(
    kind: str, arms: int, design: Design, effect: float, studies: int
) -> dict[str, Any]:
    """Studies without a difference; with an `effect`, every arm differs by it in the first metric.

    Without an effect, the margin is too small for "equivalent", so that no study ends early by it.
    With two metrics, an effect of minus the margin makes the arms worse in the first, and they are
    much better in the second: "better" is then false.
    """
    rules, correlation, failures, own = OTHER_KINDS[kind]
    metrics = len(rules)
    design, begin, rng = own or design, time.process_time(), np.random.default_rng(7)
    noise = correlated((studies, metrics, arms + 1, design.last), correlation, rng)
    noise[:, 0, 1:] += effect
    if metrics == 1 and not effect:
        rules = (replace(rules[0], margin=SIGMA / 100),)
    if metrics > 1 and effect:
        noise[:, 1, 1:] += 10
    failed = rng.random((studies, arms + 1, design.last)) < failures
    counts = dict.fromkeys(("better", "worse", "equivalent", "not settled", "n"), 0.0)
    different = false_better = equivalent = 0
    for study in range(studies):
        if rules[0].noise is not None and rules[0].noise.df:
            sigma = SIGMA * math.sqrt(rng.chisquare(8) / 8)
            rules = (replace(rules[0], noise=Noise(sigma, 9, 8)),)
        runs = [
            [
                Arm(
                    str(arm),
                    {s: v for s, v in enumerate(values[arm].tolist()) if not failed[study, arm, s]},
                    failed[study, arm].nonzero()[0].tolist(),
                )
                for values in noise[study]
            ]
            for arm in range(arms + 1)
        ]
        settled = [settle(arm, runs[0], rules, design, arms) for arm in runs[1:]]
        for one in settled:
            counts[one.verdict] += 1
            counts["n"] += len(one.arm.seeds)
        verdicts = {one.verdict for one in settled}
        different += bool(verdicts & {"better", "worse"})
        false_better += "better" in verdicts
        equivalent += "equivalent" in verdicts
    is_wrong_claim = metrics > 1 and effect != 0
    return {
        "test": kind,
        "noise": "normal",
        "arms": arms,
        "runs": str(design),
        "effect": effect,
        "studies": studies,
        "any_called_different": (false_better if is_wrong_claim else different) / studies,
        "any_called_equivalent": equivalent / studies,
        "called_different": (counts["better"] + counts["worse"]) / studies / arms,
        "called_equivalent": counts["equivalent"] / studies / arms,
        "mean_runs": counts["n"] / studies / arms,
        "seconds": time.process_time() - begin,
    }


def run_kinds() -> None:
    """Add the rows that are missing at this commit to the file."""
    path, shared = harness.RESULTS / "bench_verdicts.csv", harness.conditions()
    with path.open(newline="") as file:
        rows: list[dict[str, Any]] = [*csv.DictReader(file)]
    rows = [r for r in rows if r["table"] != "kinds" or r["commit"] == shared["commit"]]
    done = {(r["test"], r["arms"], r["effect"]) for r in rows if r["table"] == "kinds"}
    for kind, (rules, *_) in OTHER_KINDS.items():
        cases = [(1, DEFAULT, 0.0), (3, FIXED, 0.0)]
        if kind in WITH_EFFECT:
            cases.append((1, DEFAULT, -MARGIN if len(rules) > 1 else MARGIN))
        for arms, design, effect in cases:
            if (kind, str(arms), str(effect)) not in done:
                row = simulate_kind(kind, arms, design, effect, 10_000)
                rows.append({"table": "kinds", **row, **shared})
                write_text(path, csv_text([*rows[0]], rows))
                print(kind, arms, effect, row["any_called_different"], flush=True)


# Tables ------------------------------------------------------------------------------------------


def simulate(
    test: str, kind: str, arms: int, design: Design, effect: float, studies: int
) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    values = 98 + draw(kind, (studies, arms + 1, design.last), rng)
    values[:, 1:] += effect
    begin = time.process_time()
    sign, equal, n = TESTS[test](values, design)
    return {
        "test": test,
        "noise": kind,
        "arms": arms,
        "runs": str(design),
        "effect": effect,
        "studies": studies,
        "any_called_different": (sign != 0).any(1).mean(),
        "any_called_equivalent": equal.any(1).mean(),
        "called_different": (sign != 0).mean(),
        "called_equivalent": equal.mean(),
        "mean_runs": n.mean(),
        "seconds": time.process_time() - begin,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--choice", action="store_true", help="only the table of the choice")
    parser.add_argument("--kinds", action="store_true", help="only the table of other kinds")
    given = parser.parse_args()
    if given.kinds:
        run_kinds()
        return
    rows = []
    for test in TESTS:
        for kind in ("normal", "one arm varies thrice", "baseline varies thrice", "as measured"):
            rows.append(simulate(test, kind, 3, DEFAULT, 0.0, 1_000))
        rows.append(simulate(test, "as measured", 3, FIXED, 0.0, 1_000))
        for effect in (MARGIN, 2 * MARGIN):
            for design in (FIXED, DEFAULT):
                rows.append(simulate(test, "as measured", 3, design, effect, 1_000))
    rows = [{"table": "choice", **row} for row in rows]
    if not given.choice:
        for kind in KINDS:
            for arms in (1, 3, 8):
                for design in (FIXED, DEFAULT):
                    for effect in (0.0, MARGIN):
                        row = simulate("intervals", kind, arms, design, effect, 10_000)
                        rows.append({"table": "error", **row})
        for kind in ("normal", "as measured"):
            for arms in (1, 3, 8):
                for design in (FIXED, DEFAULT):
                    for effect in (0.0, MARGIN, 2 * MARGIN):
                        row = simulate("intervals", kind, arms, design, effect, 4_000)
                        rows.append({"table": "power", **row})
    for row in rows:
        print(
            {key: round(v, 4) if isinstance(v, float) else v for key, v in row.items()}, flush=True
        )
    harness.save("verdicts", rows)
    if not given.choice:
        run_kinds()


if __name__ == "__main__":
    main()
