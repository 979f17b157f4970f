"""``python -m reproduction.decisive``: what the rule of docs/protocol.md says of the rows so far.

python -m reproduction.decisive collect     copies the rows of finished runs to results/
python -m reproduction.decisive power       simulates what the rule can find, from the pilot's noise
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from reproduction.decisive.data import REGIMES, collect, differences, read, units
from reproduction.decisive.rule import decide, holm, interval, power, sign_flip

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
RUN_NOISE = {"norm": 0.30, "plain": 0.35}  # points; see `noise`


def noise(regime: str) -> tuple[float, float, int]:
    """The spread of a unit, and what the tuning adds to it, from the pilot of CE2 alone.

    The tuning's part is the spread of the best of 6 points drawn from the pilot's, judged by one
    seed each: it contains the noise of judging, so it is rather too large. A unit averages 3 runs,
    whose noise is that of tuned arms in earlier studies (compare_fashion_decay_normalised.csv 0.19
    to 0.37; compare_fashion_decay.csv 0.25 to 0.49).
    """
    rows = [row for row in read(RESULTS, f"pilot_{regime}") if row["phase"] == "tuning"]
    values = np.array([float(row["test_accuracy"]) for row in rows])
    rng = np.random.default_rng(0)
    best = [rng.choice(values, 6, replace=False).max() for _ in range(20_000)]
    tuning = float(np.std(best))
    return float(np.hypot(tuning, RUN_NOISE[regime] / np.sqrt(3))), tuning, len(rows)


def power_table(studies: int = 1000) -> str:
    """What the rule can find, as Markdown."""
    lines = [
        "The noise of a unit, from a pilot of CE2 alone (`results/decisive_pilot_*.csv`), which"
    ]
    lines += ["the protocol does not govern:", ""]
    spreads = []
    for regime, title in REGIMES.items():
        unit, tuning, points = noise(regime)
        spreads.append(float(np.sqrt(2)) * unit)
        lines.append(
            f"- {title}: tuning {tuning:.2f} (best of 6 of {points} points), runs "
            f"{RUN_NOISE[regime]:.2f} / sqrt(3), together {unit:.2f}; a difference of two "
            f"independent units {spreads[-1]:.2f} points."
        )
    lines += [
        "",
        "Simulated verdicts over both looks, with the same true difference in both regimes. Units "
        "are taken as independent; the points that all arms share make pairs rather more alike. "
        f"({studies} experiments each, `python -m reproduction.decisive power`):",
        "",
        "| true difference | helps | hurts | makes no difference that matters | not settled |",
        "|---|---|---|---|---|",
    ]
    for effect in (0.0, 0.1, 0.2, 0.3, 0.5):
        found = power(effect, spreads, studies)
        names = ("helps", "hurts", "makes no difference that matters", "not settled")
        cells = " | ".join(f"{100 * found.get(name, 0):.0f}%" for name in names)
        lines.append(f"| {effect:g} | {cells} |")
    return "\n".join(lines)


def report() -> str:
    """What the rows say so far."""
    lines = []
    rows = {regime: read(RESULTS, regime) for regime in REGIMES}
    for regime, title in REGIMES.items():
        lines.append(f"{regime} ({title}):")
        arms = dict.fromkeys(row["arm"] for row in rows[regime] if row["phase"] == "final")
        for arm in arms:
            values = list(units(rows[regime], arm).values())
            if values:
                lines.append(f"  {arm}: {len(values)} repeats, mean {np.mean(values):.2f}")
    primary = {regime: differences(rows[regime], "pgt", "baseline") for regime in REGIMES}
    if min(map(len, primary.values())) < 8:
        counts = ", ".join(f"{len(d)} of {regime}" for regime, d in primary.items())
        return "\n".join([*lines, f"No verdict before 8 repeats per regime: {counts}."])
    size = 16 if min(map(len, primary.values())) >= 16 else 8
    decision = decide({regime: d[:size] for regime, d in primary.items()})
    lines.append(f"PGT2 - CE2 after {size} repeats: {decision.verdict} (p = {decision.p:.4f})")
    for regime in REGIMES:
        low, high = decision.intervals[regime]
        lines.append(f"  {regime}: {decision.means[regime]:+.2f}, 90% {low:+.2f} to {high:+.2f}")
    others = {
        "PGT2 - CE3": [differences(rows[r], "pgt", "ce3")[:size] for r in REGIMES],
        "AGC+PGT2 - CE2": [differences(rows["plain"], "agc+pgt", "baseline")[:size]],
    }
    p_values = {name: sign_flip(strata)[0] for name, strata in others.items() if all(strata)}
    for name, p in holm(p_values).items():
        means = ", ".join(f"{np.mean(stratum):+.2f}" for stratum in others[name])
        lines.append(f"{name}: {means}, p = {p:.4f} after Holm's correction")
    again = units(read(RESULTS, "null"), "baseline")
    first = units(rows["norm"], "baseline")
    null = [again[n] - first[n] for n in again if n in first]
    if len(null) >= 8:
        low, high = interval(null)
        lines.append(
            f"Null, CE2 against CE2: p = {sign_flip([null])[0]:.3f}, 90% {low:+.2f} to {high:+.2f}"
        )
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Collect rows, simulate the rule, or print what it says."""
    if arguments == ["collect"]:
        for path in collect(ROOT / "runs", RESULTS):
            print(f"wrote {path.relative_to(ROOT)}")
    elif arguments == ["power"]:
        print(power_table())
    else:
        print(report())


if __name__ == "__main__":
    main(sys.argv[1:])
