"""The definitions of terms: for the tooltips of the HTML page and for docs/glossary.md.

``python -m powergrad.lab.glossary > docs/glossary.md`` writes the latter; a test compares the two.
"""

from __future__ import annotations

from typing import NamedTuple


class Term(NamedTuple):
    """A term.

    Attributes:
        name: Its name.
        meaning: Its definition.
        words: Other forms of it in texts.
        alone: Whether only a text that consists of the name is explained, because the name is also
            an everyday word.
    """

    name: str
    meaning: str
    words: tuple[str, ...] = ()
    alone: bool = False


TERMS = (
    Term(
        "alpha",
        "The exponent of PGT, from 0 to 1. At 1 it is plain cross-entropy. The smaller alpha is, "
        "the flatter is the softmax in the backward pass.",
        ("α",),
    ),
    Term(
        "PGT",
        "PowerGrad Transform: cross-entropy whose gradient is computed with softmax(alpha z) "
        "instead of softmax(z). The value of the loss does not change.",
    ),
    Term(
        "AGC",
        "Adaptive gradient clipping: limits the norm of each filter's gradient to a fraction of "
        "the norm of its weights.",
    ),
    Term(
        "arm",
        "One of the variants that are compared: the recipe with a named change.",
        ("arms",),
    ),
    Term("baseline", "The arm with which all others are compared."),
    Term(
        "seed",
        "The number that determines the initial weights, the order of the images and the "
        "augmentation of a run. Runs that differ only in the seed show how much results vary by "
        "chance.",
        ("seeds",),
    ),
    Term(
        "control",
        "An arm that has one part of PGT's effect without PGT, such as less-decay or head-lr. If "
        "it improves the metric as much, that part explains the improvement.",
        ("controls",),
    ),
    Term(
        "margin",
        "The largest difference that does not matter to you. Two arms are equivalent if their "
        "difference is certainly smaller.",
    ),
    Term(
        "95% interval",
        "The range of differences that are compatible with the runs. It is corrected for all arms "
        "and looks: with 95% confidence, all intervals of the study contain the true differences.",
        ("interval", "intervals"),
    ),
    Term(
        "p-value",
        "The probability of a difference at least this large by chance, if there is no true "
        "difference; corrected for all arms and looks. Below 0.05, the interval excludes 0.",
        ("p =", "p <"),
    ),
    Term(
        "better",
        "The whole interval is on the better side of 0.",
        ("is better than", "are better than"),
        alone=True,
    ),
    Term(
        "worse",
        "The whole interval is on the worse side of 0.",
        ("is worse than", "are worse than"),
        alone=True,
    ),
    Term(
        "equivalent",
        "The whole interval is within the margin: if there is a difference, it is too small to "
        "matter.",
    ),
    Term(
        "not settled",
        "The interval contains 0 and extends beyond the margin, so these runs do not decide. This "
        "is not evidence that the arms are equal.",
    ),
    Term(
        "look",
        "A point at which the results are tested, such as after 8, 12 and 16 seeds. Looks are "
        "planned in advance, because every look is one more chance of a false result.",
        ("looks",),
    ),
    Term(
        "standard deviation",
        "How much individual runs vary around their mean.",
        ("±",),
    ),
    Term(
        "held out",
        "Training images that are set aside to choose settings, so that the test images have no "
        "influence on the choice.",
        ("held-out",),
    ),
    Term(
        "repeat",
        "One independent tuning of every arm; its best settings are then run with new seeds.",
        ("repeats",),
    ),
    Term(
        "at the edge",
        "The best value is the smallest or the largest one that was tried, so a better one may lie "
        "beyond.",
        ("at an edge",),
    ),
    Term(
        "diverged",
        "The loss became infinite or NaN. Such a run counts as random guessing.",
    ),
    Term("top 5", "How often the correct class is among the five most likely ones."),
    Term(
        "NLL",
        "Negative log-likelihood: the mean cross-entropy on the test images. Smaller is better.",
    ),
    Term(
        "ECE",
        "Expected calibration error: the average difference between confidence and accuracy. 0 is "
        "perfect.",
    ),
    Term(
        "at 1/α",
        "Computed with the logits multiplied by alpha (temperature 1/alpha), at which networks "
        "trained with PGT are calibrated.",
        ("at 1/alpha", "temperature 1/α"),
    ),
    Term("logit norm", "The mean norm of the vector of logits. With PGT, logits become larger."),
    Term(
        "dead units",
        "Filters or features that have vanished: their weights are near zero, or they are never "
        "active.",
        ("dead", "dead filters"),
    ),
    Term("census", "The number of dead units per layer."),
)


def markdown() -> str:
    """The page of the docs."""
    lines = [
        "# Glossary",
        "",
        "The terms of verdicts, tables and pages. The page of a study shows the same definitions",
        "when the pointer or the keyboard focus is on a term.",
        "",
    ]
    lines += [f"- **{term.name}**: {term.meaning}" for term in TERMS]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
