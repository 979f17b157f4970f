"""What the words of results mean: the one source of the page's explanations and of the docs' page.

``python -m powergrad.lab.glossary > docs/glossary.md`` writes the page; a test compares the two.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["TERMS", "Term", "markdown"]


class Term(NamedTuple):
    """A term: its name, its meaning, and the other words by which texts call it."""

    name: str
    meaning: str
    words: tuple[str, ...] = ()


TERMS = (
    Term(
        "alpha",
        "The exponent of PGT, from 0 to 1. 1 is plain cross-entropy; the smaller alpha is, the "
        "flatter is the softmax that the backward pass uses.",
        ("α",),
    ),
    Term(
        "PGT",
        "PowerGrad Transform: cross-entropy whose gradient is computed with softmax(alpha z) in "
        "place of softmax(z). The value of the loss stays the same.",
    ),
    Term(
        "AGC",
        "Adaptive gradient clipping: limits each filter's gradient to a fraction of its weight's "
        "norm.",
    ),
    Term(
        "arm",
        "One of the trainings that are compared: the recipe with a named change.",
        ("arms",),
    ),
    Term("baseline", "The arm that all others are compared with."),
    Term(
        "seed",
        "The number that decides a run's initial weights, order of images and augmentation. Runs "
        "that differ only in the seed show how much results vary by chance.",
        ("seeds",),
    ),
    Term(
        "control",
        "An arm that has one part of PGT's effect without PGT, such as less-decay or head-lr. If "
        "it gains as much, that part explains the gain.",
        ("controls",),
    ),
    Term(
        "margin",
        "The largest difference that does not matter to you. It decides when two arms are called "
        "equivalent.",
    ),
    Term(
        "95% interval",
        "The differences that the runs leave plausible. It is corrected for all arms and looks: "
        "with 95% confidence, all intervals of the study contain the true differences.",
        ("interval", "intervals"),
    ),
    Term(
        "p-value",
        "How often chance alone would make a difference at least this large, if there were none; "
        "corrected for all arms and looks. Below 0.05 the interval excludes 0.",
        ("p =", "p <"),
    ),
    Term("better", "The whole interval is on the better side of 0."),
    Term("worse", "The whole interval is on the worse side of 0."),
    Term(
        "equivalent",
        "The whole interval is within the margin: if there is a difference, it is too small to "
        "matter.",
    ),
    Term(
        "not settled",
        "The interval contains 0 and reaches beyond the margin: these runs cannot tell. It is no "
        "evidence that the arms are equal.",
    ),
    Term(
        "look",
        "A point at which results are judged, such as after 8, 12 and 16 seeds. Looks are planned "
        "in advance, because every look is one more chance to be wrong.",
        ("looks",),
    ),
    Term(
        "standard deviation",
        "How much single runs scatter around their mean.",
        ("±",),
    ),
    Term(
        "held out",
        "Training images that are kept aside to choose settings, so that the test images decide "
        "nothing.",
        ("held-out",),
    ),
    Term(
        "repeat",
        "One independent tuning of every arm, and its winner run on fresh seeds.",
        ("repeats",),
    ),
    Term(
        "at the edge",
        "The best value that was tried is the smallest or the largest one, so a better one may lie "
        "beyond.",
        ("at an edge",),
    ),
    Term(
        "diverged",
        "The loss became infinite or not a number. Such a run counts as guessing.",
    ),
    Term("top 5", "How often the right class is among the five likeliest."),
    Term(
        "NLL",
        "Negative log-likelihood: the mean cross-entropy on the test images. Smaller is better.",
    ),
    Term(
        "ECE",
        "Expected calibration error: how far confidence and accuracy are apart, on average. 0 is "
        "perfect.",
    ),
    Term(
        "at 1/α",
        "Computed with logits multiplied by alpha (temperature 1/alpha), where networks trained "
        "with PGT are calibrated.",
        ("at 1/alpha", "temperature 1/α"),
    ),
    Term("logit norm", "The mean length of the vector of logits. PGT makes logits grow."),
    Term(
        "dead units",
        "Filters or features that have vanished: their weights are near zero or they are never "
        "active.",
        ("dead", "dead filters"),
    ),
    Term("census", "The count of dead units, by layer."),
)


def markdown() -> str:
    """The page of the docs."""
    lines = [
        "# Glossary",
        "",
        "The words of verdicts, tables and pages. On the page of a study each of them has the same",
        "explanation, shown when the pointer or the keyboard's focus is on it.",
        "",
    ]
    lines += [f"- **{term.name}**: {term.meaning}" for term in TERMS]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
