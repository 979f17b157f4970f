"""``python -m reproduction.decisive``: what the rule of docs/protocol.md says.

python -m reproduction.decisive collect [RUNS]  copies the rows of finished runs to results/
python -m reproduction.decisive power           simulates what the rule can find
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from reproduction.decisive.findings import ANSWERS, Findings
from reproduction.decisive.observed import REGIMES, collect, read
from reproduction.decisive.rule import power
from reproduction.evidence import RESULTS
from reproduction.marks import markdown_table

ROOT = RESULTS.parent
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
    """The noise of each regime, and how often the rule reaches each verdict, over both looks.

    Both regimes have the same true difference. Units are taken as independent; the points that all
    arms share make pairs rather more alike.
    """
    lines, spreads = [], []
    for regime, title in REGIMES.items():
        unit, tuning, points = noise(regime)
        spreads.append(float(np.sqrt(2)) * unit)
        lines.append(
            f"- {title}: tuning {tuning:.2f} (best of 6 of {points} points), runs "
            f"{RUN_NOISE[regime]:.2f} / sqrt(3), together {unit:.2f}; a difference of two "
            f"independent units {spreads[-1]:.2f} points."
        )
    cells = []
    for effect in (0.0, 0.1, 0.2, 0.3, 0.5):
        found = power(effect, spreads, studies)
        cells.append([f"{effect:g}", *(f"{100 * found.get(name, 0):.0f}%" for name in ANSWERS)])
    return "\n".join([*lines, "", markdown_table(("true difference", *ANSWERS), cells)])


def main(arguments: list[str]) -> None:
    """Collect rows, simulate the rule, or print what it says."""
    if arguments[:1] == ["collect"]:
        runs = Path(arguments[1]) if arguments[1:] else ROOT / "runs"
        for path in collect(runs, RESULTS):
            print(f"wrote {path.relative_to(ROOT)}")
    elif arguments == ["power"]:
        print(power_table())
    else:
        found = Findings.read(RESULTS)
        parts = (found.answer, found.secondary_sentence, found.table, found.choices_table)
        print("\n\n".join(part() for part in (*parts, found.null_sentence)))


if __name__ == "__main__":
    main(sys.argv[1:])
