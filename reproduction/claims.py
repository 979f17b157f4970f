"""What became of the paper's claims: all that was measured of each, in one place.

Headings and explanations are in docs/reproduction.md; here are the tables and counts below them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy.stats import linregress

from powergrad.lab.paper.evidence import MARGIN, Evidence, KeptRun, Measurement
from powergrad.lab.paper.rows import Row, changes_of, load_paper
from powergrad.lab.words import markdown_table
from reproduction.marks import Regions
from reproduction.studies import Arm, Contrast, Trial, compare_arms, contrasts_of, methods_of

__all__ = [
    "CLAIMS",
    "PGT",
    "SHORTER",
    "against_controls",
    "claim_regions",
    "contrast_table",
    "published_gains",
]

VERDICTS = ("better", "equivalent", "worse", "not settled", "too few seeds")
DEEPER = "Networks deeper than ResNet-18 cannot be trained without normalisation"
ZEROED = "Fewer filters die with PGT, hardly any with AGC, none with both"
ENOUGH = 4.6  # the decay exponent at which a filter without gradient falls to 1% of its start
NOT_MEASURED = "Not measured here."

Methods = frozenset[str]
PGT, AGC, GC, LS = (frozenset({name}) for name in ("PGT", "AGC", "GC", "LS"))
SHORTER, LESS, DEEP, LARGE = (
    frozenset({name}) for name in ("fewer epochs", "less decay", "deeper network", "larger batch")
)


@dataclass(frozen=True)
class Claim:
    """That an arm with some methods does better than one with others.

    Attributes:
        id: The name of its region.
        title: The claim, as its heading has it.
        methods: What the arm does.
        norm: The normalisation of the networks; None for all.
        against: What the other arm does; nothing for the baseline.
        alpha: The arm's alpha, where the claim is about one.
        holds: The verdicts that confirm it.
        metric: ``test``, ``train`` or ``gap``, the second less the first.
        published: What the paper has on it, if that is no difference within a part of a table.
        control: What an arm without PGT does that may explain the gain: shown beside it, with PGT
            against it, and not counted.
    """

    id: str
    title: str
    methods: Methods
    norm: str | None = None
    against: Methods = frozenset()
    alpha: float | None = None
    holds: frozenset[str] = frozenset({"better"})
    metric: str = "test"
    published: str = ""
    control: Methods | None = None


WORSE = frozenset({"worse"})
CLAIMS = (
    Claim("pgt-bn", "PGT raises accuracy with batch normalisation", PGT, "batch", control=LESS),
    Claim("pgt", "PGT raises accuracy without normalisation", PGT, "none", control=LESS),
    Claim("agc", "AGC raises accuracy without normalisation", AGC, "none"),
    Claim("pgt-over-agc", "PGT does better than AGC", PGT, "none", AGC),
    Claim("agc-pgt", "AGC with PGT raises accuracy without normalisation", AGC | PGT, "none"),
    Claim("agc-pgt-over-pgt", "AGC with PGT does better than PGT alone", AGC | PGT, "none", PGT),
    Claim("gc", "GC raises accuracy without normalisation", GC, "none"),
    Claim("pgt-over-gc", "PGT does better than GC", PGT, "none", GC),
    Claim("gc-pgt", "GC with PGT raises accuracy without normalisation", GC | PGT, "none"),
    Claim("ls", "Label smoothing raises accuracy", LS),
    Claim("ls-0.3", "Label smoothing improves PGT at alpha 0.3", LS | PGT, None, PGT, 0.3),
    Claim("ls-0.05", "Label smoothing hurts PGT at alpha 0.05", LS | PGT, None, PGT, 0.05, WORSE),
    Claim("train", "Training accuracy rises too", PGT, metric="train"),
    Claim("gap", "The gap between training and test accuracy grows", PGT, metric="gap"),
    Claim(
        "epochs",
        "PGT reaches in 60% of the epochs what cross-entropy reaches in all",
        PGT | SHORTER,
        holds=frozenset({"better", "equivalent"}),
        control=SHORTER,
    ),
    Claim(
        "batch",
        "Without normalisation large batches cost accuracy",
        LARGE,
        "none",
        holds=WORSE,
        published="-1.98 at batch 1024 (T2.1) and -0.244 at 512 (T2.3), against 256 (T2.5)",
    ),
)


def claim_regions(evidence: Evidence, trials: Sequence[Trial]) -> Regions:
    """The regions below the heading of each claim, and the table of all of them."""
    return {
        "claims": partial(_at_a_glance, trials),
        **{f"claim-{claim.id}": partial(_claim, claim, trials) for claim in CLAIMS},
        "depth": partial(_depth, trials),
        "alphas": partial(_alphas, evidence, trials),
        "logits": partial(_logits, evidence),
        "dead-filters": partial(_dead, trials),
        "layers": partial(_layers, evidence),
        "recovery": partial(_recovery, evidence),
    }


@dataclass(frozen=True)
class Judged:
    """All that was measured of a claim.

    Attributes:
        claim: What the paper says.
        measured: The comparisons that the claim is about.
        control: The simpler control against the baseline.
        instead: PGT against the control.
        on_top: PGT together with the control against the control alone.
    """

    claim: Claim
    measured: tuple[Contrast, ...]
    control: tuple[Contrast, ...] = ()
    instead: tuple[Contrast, ...] = ()
    on_top: tuple[Contrast, ...] = ()

    @classmethod
    def by(cls, claim: Claim, trials: Sequence[Trial]) -> Judged:
        """What the studies have on a claim."""
        control = claim.control
        if control is None:
            return cls(claim, tuple(_contrasts(claim, trials)))
        alone = replace(claim, methods=control)
        instead = replace(claim, against=control)
        on_top = replace(claim, methods=claim.methods | control, against=control)
        is_part = control <= claim.methods
        parts = (claim, alone, None if is_part else instead, on_top)
        return cls(claim, *(tuple(_contrasts(part, trials)) if part else () for part in parts))


def _claim(claim: Claim, trials: Sequence[Trial]) -> str:
    """What was published for a claim, and all that was measured of it."""
    judged = Judged.by(claim, trials)
    counts = f"Measured: {_verdicts(judged.measured)}." if judged.measured else NOT_MEASURED
    sentence = f"Published: {_published(claim)}. {counts}"
    rows = [*judged.measured, *judged.control, *judged.instead, *judged.on_top]
    return f"{sentence}\n\n{contrast_table(rows)}" if rows else sentence


def _at_a_glance(trials: Sequence[Trial]) -> str:
    lines = []
    for claim in CLAIMS:
        judged = Judged.by(claim, trials)
        opposite = "better" if claim.holds == WORSE else "worse"
        columns = (claim.holds, {"equivalent"} - claim.holds, {opposite})
        against_control = {"PGT alone": judged.instead, "PGT with it": judged.on_top}
        controls = (
            f"{how}: {_verdicts(contrasts)}{_lost(contrasts)}"
            for how, contrasts in against_control.items()
            if contrasts
        )
        verdicts = [contrast.verdict for contrast in counted(judged.measured)]
        cells = _columns(verdicts, columns)
        lines.append((_link(claim.title), _published(claim), *cells, "; ".join(controls)))
    outcomes = [depth.outcome for depth in _depths(trials)]
    cells = _columns(outcomes, ({"all failed"}, set(), {"none failed"}))
    lines.append((_link(DEEPER), "text", *cells, ""))
    counts = [count for count in _dead_filters(trials) if count.contrast.trial.counts]
    for methods in (PGT, AGC, AGC | PGT):
        outcomes = [count.verdict for count in counts if count.contrast.arm.methods == methods]
        cells = _columns(outcomes, ({"fewer"}, {"as many"}, {"more"}))
        title = f"With {' + '.join(sorted(methods))} fewer filters die"
        lines.append((_link(title, ZEROED), "figures", *cells, ""))
    head = ("claim", "published", "confirmed", f"within {MARGIN:g}", "contradicted", "not settled")
    return markdown_table((*head, "against a simpler control"), lines)


def _columns(outcomes: Sequence[str], columns: Iterable[AbstractSet[str]]) -> list[str]:
    """How many of the outcomes fall into each column, and how many into none."""
    if not outcomes:
        return ["", "", "", "not measured"]
    counts = [sum(outcome in column for outcome in outcomes) for column in columns]
    return [str(count or "") for count in (*counts, len(outcomes) - sum(counts))]


def _lost(contrasts: Sequence[Contrast]) -> str:
    lost = sum(contrast.arm.diverged + contrast.against.diverged > 0 for contrast in contrasts)
    return f" ({lost} of them with runs that diverged)" if lost else ""


def _link(words: str, heading: str | None = None) -> str:
    """A link to a heading, by its address as mkdocs and GitHub have it."""
    anchor = re.sub(r"[^\w-]", "", (heading or words).lower().replace(" ", "-"))
    return f"[{words}](#{anchor})"


def against_controls(trials: Sequence[Trial]) -> list[Contrast]:
    """PGT against plain cross-entropy with the control of a claim, such as less decay."""
    judged = [Judged.by(claim, trials) for claim in CLAIMS if claim.control is not None]
    return [contrast for claim in judged for contrast in (*claim.instead, *claim.on_top)]


def _contrasts(claim: Claim, trials: Sequence[Trial]) -> Iterator[Contrast]:
    for trial in trials:
        if trial.is_grid or claim.norm not in (None, trial.norm):
            continue
        # Without a method of its own the other arm is the study's first, of whatever rate.
        others = trial.arms if claim.against else trial.arms[:1]
        for against in others:
            for arm in trial.arms:
                is_pair = (arm.methods, against.methods) == (claim.methods, claim.against)
                is_asked = claim.alpha in (None, arm.changes.get("loss.alpha"))
                if is_pair and is_asked and arm.agrees_with(against):
                    yield from _compare(claim, trial, arm, against)


def _compare(claim: Claim, trial: Trial, arm: Arm, against: Arm) -> Iterator[Contrast]:
    if claim.metric == "test" and not claim.against:
        yield from (contrast for contrast in contrasts_of(trial) if contrast.arm is arm)
        return
    values = {
        arm.name: _metric(arm, claim.metric),
        against.name: _metric(against, claim.metric),
    }
    is_doubtful = claim.metric == "test" and (arm.at_edge or against.at_edge)
    withhold = {arm.name: "A rate was chosen at the edge."} if is_doubtful else {}
    yield from compare_arms(trial, arm, against, values, withhold=withhold)


def _metric(arm: Arm, metric: str) -> Mapping[int, float]:
    if metric == "gap":
        return {unit: value - arm.test[unit] for unit, value in arm.train.items()}
    return arm.train if metric == "train" else arm.test


def contrast_table(contrasts: Iterable[Contrast]) -> str:
    """A table with one line per comparison."""
    head = ("study", "arm", "measured on", "learning rate: arm; other", "decay / paper's", "n")
    lines = [contrast.cells for contrast in contrasts]
    return markdown_table((*head, "difference (95% interval)", "verdict"), lines)


def _published(claim: Claim) -> str:
    """The smallest and the largest difference that the paper's tables have for a claim."""
    if claim.published:
        return claim.published
    gains = published_gains(claim)
    words = [f"{gain + 0.0:+g} ({name})" for gain, name in gains]
    return words[0] if len(words) == 1 else f"{words[0]} to {words[-1]}"


def published_gains(claim: Claim) -> list[tuple[float, str]]:
    """The differences that the paper's tables have for a claim, rising, with their rows."""
    return sorted(
        (round(_printed(row, claim.metric) - _printed(other, claim.metric), 3), row.id)
        for row, other in _published_pairs(claim)
    )


def _published_pairs(claim: Claim) -> Iterator[tuple[Row, Row]]:
    """The rows of one experiment that differ as a claim says, and have its metric."""
    for experiment in load_paper().experiments:
        first = experiment.baseline.recipe
        if experiment.grid or claim.norm not in (None, first.model.norm):
            continue
        methods = {
            row.arm: methods_of(changes_of(row.recipe, first), first) for row in experiment.rows
        }
        for row in experiment.rows:
            for other in experiment.rows:
                is_pair = (methods[row.arm], methods[other.arm]) == (claim.methods, claim.against)
                alpha, other_alpha = row.recipe.loss.alpha, other.recipe.loss.alpha
                is_asked = claim.alpha in (None, alpha) and other_alpha in (alpha, 1)
                is_printed = claim.metric == "test" or "train" in row.published
                if is_pair and is_asked and is_printed:
                    yield row, other


def _printed(row: Row, metric: str) -> float:
    if metric == "gap":
        return row.published["train"] - row.published["test"]
    return row.published[metric]


def counted(contrasts: Iterable[Contrast]) -> list[Contrast]:
    """Those of studies that are not withdrawn, and whose runs no larger study has."""
    return [contrast for contrast in contrasts if contrast.trial.counts]


def _verdicts(contrasts: Iterable[Contrast]) -> str:
    counts = Counter(contrast.verdict for contrast in counted(contrasts))
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return markdown_table(head, lines) if lines else NOT_MEASURED


# Depth --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Depth:
    """What became of a deeper network without normalisation."""

    outcome: str
    cells: tuple[str, ...]


def _depths(trials: Sequence[Trial]) -> Iterator[Depth]:
    for trial in trials:
        first = trial.arms[0]
        for arm in trial.arms[1:]:
            if trial.norm != "none" or arm.methods != DEEP:
                continue
            level = _mean(first.test)
            ended = sorted(arm.test.values())
            failed = sum(accuracy < level / 2 for accuracy in ended)  # as a run that diverged
            outcome = {0: "none failed", len(ended): "all failed"}.get(failed, f"{failed} failed")
            accuracies = f"{_mean(arm.test):.2f} ({ended[0]:.2f} to {ended[-1]:.2f})"
            study = (f"`{trial.name}`", arm.label, arm.measured_on)
            settings = (f"{arm.rate}; {first.rate}", arm.decay)
            numbers = (str(len(ended)), accuracies, f"{level:.2f}")
            yield Depth(outcome, (*study, *settings, *numbers, outcome))


def _mean(values: Mapping[int, float]) -> float:
    return sum(values.values()) / len(values)


def _depth(trials: Sequence[Trial]) -> str:
    head = ("study", "network", "measured on", "learning rate: deep; shallow", "decay / paper's")
    more = ("n", "test accuracy (min to max)", "shallow network's", "runs")
    return _table((*head, *more), [depth.cells for depth in _depths(trials)])


# Grids over alpha ---------------------------------------------------------------------------------


def _grids(evidence: Evidence) -> list[Measurement]:
    return [
        study
        for study in evidence.measurements
        if study.experiment.grid and len(study.results.arms) > 1
    ]


def _alphas(evidence: Evidence, trials: Sequence[Trial]) -> str:
    lines = []
    grids = {trial.name: trial for trial in trials}
    for study in _grids(evidence):
        results = study.results
        first, best = results.arms[0], max(results.arms, key=results.mean)
        lines.append(
            (
                f"`{study.name}`",
                study.describe(),
                grids[study.name].arms[0].decay,
                str(len(results.values(first))),
                _verdicts(contrasts_of(grids[study.name])) or "too few seeds",
                f"{results.mean(best):.2f} at {study.alpha(best):g}",
                f"{results.mean(first):.2f}",
            )
        )
    head = ("grid", "measured on", "decay / paper's", "n", "alphas below 1", "best", "at alpha 1")
    return _table(head, lines)


def _logits(evidence: Evidence) -> str:
    lines = []
    for study in _grids(evidence):
        results = study.results
        one, least = results.arms[0], results.arms[-1]
        norms = [results.mean(arm, "logit_norm") for arm in (one, least)]
        losses = {arm: results.mean(arm, "nll") for arm in results.arms}
        lowest = min(losses, key=lambda arm: losses[arm])
        alpha = study.alpha(least)
        slope, _, r, *_ = linregress(*study.pairs("logit_norm", "nll"))
        lines.append(
            (
                f"`{study.name}`",
                f"{norms[0]:.1f} to {norms[1]:.1f} at {alpha:g}",
                f"{norms[1] / norms[0]:.1f} ({1 / alpha:.0f})",
                f"{losses[one]:.3f} to {losses[least]:.3f}",
                f"{losses[lowest]:.3f} at {study.alpha(lowest):g}",
                f"{slope:.5f}, r = {r:.2f}",
            )
        )
    head = ("grid", "logit norm, alpha 1 to the smallest", "ratio (1/alpha)")
    more = ("NLL of the test set", "lowest NLL", "slope of NLL over logit norm")
    return _table((*head, *more), lines)


# Filters ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeadFilters:
    """The dead filters of an arm against those of its baseline."""

    contrast: Contrast
    verdict: str
    cells: tuple[str, ...]


def _dead_filters(trials: Sequence[Trial]) -> Iterator[DeadFilters]:
    words = {"better": "fewer", "worse": "more", "equivalent": "as many"}
    for trial in trials:
        first = trial.arms[0]
        if trial.norm != "none":
            continue
        for arm in trial.arms[1:]:
            if not (arm.methods or frozenset()) & (PGT | AGC):
                continue
            values = {arm.name: arm.dead, first.name: first.dead}
            options = {"margin": 1.0, "higher_is_better": False}
            for contrast in compare_arms(trial, arm, first, values, **options):
                exponents = [round(exponent, 1) for exponent in (arm.exponent, first.exponent)]
                verdict = words.get(contrast.verdict, contrast.verdict)
                if min(exponents) < ENOUGH:
                    verdict = "too little decay"
                decay = f"{exponents[0]:.1f}; {exponents[1]:.1f}"
                cells = (f"`{trial.name}`", arm.label, arm.measured_on, decay)
                means = (f"{_mean(arm.dead):.1f}", f"{_mean(first.dead):.1f}")
                n = str(contrast.comparison.n)
                yield DeadFilters(contrast, verdict, (*cells, n, *means, verdict))


def _dead(trials: Sequence[Trial]) -> str:
    head = ("study", "arm", "measured on", "decay exponent: arm; baseline", "n", "dead")
    lines = [count.cells for count in _dead_filters(trials)]
    return _table((*head, "dead in the baseline", "verdict"), lines)


def _layers(evidence: Evidence) -> str:
    """The single runs whose norms were kept."""
    runs = [KeptRun(study, arm) for study in evidence.measurements for arm in study.results.arms]
    head = ("study", "run", "measured on", "entirely dead layers", "layer with the most dead")
    lines = [_layers_of(run) for run in runs if run.file(".npz").exists()]
    return _table((*head, "dead features"), lines)


def _layers_of(run: KeptRun) -> tuple[str, ...]:
    norms = run.norms()
    dead = {layer: died for layer in norms.layers if (died := norms.dead(layer)) is not None}
    features = None if norms.features is None else norms.dead(None)
    whole = [str(layer) for layer, died in dead.items() if died.all()]
    most = max(dead, key=lambda layer: dead[layer].mean(), default=None)
    return (
        f"`{run.study.name}`",
        run.caption,
        run.measured_on,
        ", ".join(whole) or ("none" if dead else "diverged"),
        "" if most is None else f"{most}: {_share(dead[most])}",
        "" if features is None else _share(features),
    )


def _share(dead: NDArray[np.bool_]) -> str:
    return f"{int(dead.sum())} of {dead.size}"


def _recovery(evidence: Evidence) -> str:
    """All replicas that followed their filters together, by arm."""
    counts: dict[str, list[tuple[float, float]]] = {}
    for study in evidence.measurements:
        for row in study.results.rows:
            died, back = row.value("died"), row.value("came_back")
            if died is not None and back is not None:
                counts.setdefault(row.arm, []).append((died, back))
    lines = []
    for arm, pairs in counts.items():
        died, back = (sum(column) for column in zip(*pairs, strict=True))
        share = f"{100 * back / died:.1f}" if died else ""
        lines.append((arm, str(len(pairs)), f"{died:,.0f}", f"{back:,.0f}", share))
    return _table(("arm", "runs", "filters that died", "came back", "%"), lines)
