"""What became of the paper's claims, over all studies."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import partial

import numpy as np

from powergrad.lab.stats import format_signed
from reproduction.evidence import Evidence, KeptRun
from reproduction.marks import Regions, markdown_table
from reproduction.published import Claim, Row, changes_of, load_paper
from reproduction.trials import (
    MARGIN,
    Arm,
    Contrast,
    Trial,
    compare_arms,
    contrasts_of,
    mean,
    methods_of,
)

VERDICTS = ("better", "equivalent", "worse", "not settled", "too few seeds")
ENOUGH = 4.6  # the decay exponent at which a filter without gradient falls to 1% of its start
LEFT_OUT = "T1.4-fashion-mnist"  # ResNet-101, which 936 steps leave behind ResNet-50

Methods = frozenset[str]
PGT, AGC, SHORTER, DEEP = (
    frozenset({name}) for name in ("PGT", "AGC", "fewer epochs", "deeper network")
)


CLAIMS = load_paper().claims


def claim_regions(evidence: Evidence) -> Regions:
    """The table of all claims, and what concerns filters."""
    return {
        "claims": partial(_claims, evidence.trials),
        "layers": partial(_layers, evidence),
        "recovery": partial(_recovery, evidence),
        "pooled": partial(pooled_sentence, evidence.trials),
    }


def _claims(trials: Sequence[Trial]) -> str:
    lines = []
    for claim in CLAIMS:
        opposite = "better" if claim.holds == {"worse"} else "worse"
        columns = (claim.holds, {"equivalent"} - claim.holds, {opposite})
        verdicts = [contrast.verdict for contrast in counted(_contrasts(claim, trials))]
        cells = _columns(verdicts, columns)
        lines.append((claim.title, _published(claim), *cells, _controls(claim, trials)))
    cells = _columns(_depths(trials), ({"all failed"}, set(), {"none failed"}))
    deeper = "Networks deeper than ResNet-18 cannot be trained without normalisation"
    lines.append((deeper, "text", *cells, ""))
    cells = _columns(_schedules(trials), ({"better"}, {"equivalent"}, {"worse"}))
    cosine = "The cosine schedule does better than the step schedule"
    lines.append((cosine, "+0.59 (T3.3 against T3.1)", *cells, ""))
    dead = [*_dead_filters(trials)]
    for methods in (PGT, AGC, AGC | PGT):
        outcomes = [outcome for found, outcome in dead if found == methods]
        cells = _columns(outcomes, ({"fewer"}, {"as many"}, {"more"}))
        title = f"With {' + '.join(sorted(methods))} fewer filters die"
        lines.append((title, "figures", *cells, ""))
    head = ("claim", "published", "confirmed", f"within {MARGIN:g}", "contradicted", "not settled")
    return markdown_table((*head, "against a simpler control"), lines)


def _columns(outcomes: Sequence[str], columns: Iterable[AbstractSet[str]]) -> list[str]:
    """How many of the outcomes fall into each column, and how many into none."""
    if not outcomes:
        return ["", "", "", "not measured"]
    counts = [sum(outcome in column for outcome in outcomes) for column in columns]
    return [str(count or "") for count in (*counts, len(outcomes) - sum(counts))]


# Comparisons --------------------------------------------------------------------------------------


def _against_control(claim: Claim, trials: Sequence[Trial]) -> tuple[list[Contrast], ...]:
    """PGT in place of the control of a claim, and PGT together with it against it alone."""
    control = claim.control
    if not control:
        return [], []
    instead = claim.model_copy(update={"against": control})
    on_top = instead.model_copy(update={"methods": claim.methods | control})
    is_part = control <= claim.methods
    parts = (None if is_part else instead, on_top)
    return tuple(_contrasts(part, trials) if part else [] for part in parts)


def _controls(claim: Claim, trials: Sequence[Trial]) -> str:
    names = ("PGT alone", "PGT with it")
    words = []
    for name, contrasts in zip(names, _against_control(claim, trials), strict=True):
        if contrasts:
            lost = sum(c.arm.diverged + c.against.diverged > 0 for c in contrasts)
            some = f" ({lost} of them with runs that diverged)" if lost else ""
            words.append(f"{name}: {count_verdicts(contrasts)}{some}")
    return "; ".join(words)


def against_controls(trials: Sequence[Trial]) -> list[Contrast]:
    """PGT against plain cross-entropy with the control of a claim, such as less decay."""
    found = [_against_control(claim, trials) for claim in CLAIMS]
    return [contrast for instead, on_top in found for contrast in (*instead, *on_top)]


def _contrasts(claim: Claim, trials: Sequence[Trial]) -> list[Contrast]:
    return [
        contrast
        for trial in trials
        if not trial.is_grid and claim.norm in (None, trial.recipe.model.norm)
        # Without a method of its own the other arm is the study's first, of whatever rate.
        for against in (trial.arms if claim.against else trial.arms[:1])
        for arm in trial.arms
        if (arm.methods, against.methods) == (claim.methods, claim.against)
        and claim.alpha in (None, arm.changes.get("loss.alpha"))
        and arm.agrees_with(against)
        for contrast in _compare(claim, arm, against)
    ]


def _compare(claim: Claim, arm: Arm, against: Arm) -> Iterable[Contrast]:
    if claim.metric == "test" and not claim.against:  # corrected for the arms of the study
        return (contrast for contrast in contrasts_of(arm.trial) if contrast.arm is arm)
    return compare_arms(arm, against, claim.metric)


def counted(contrasts: Iterable[Contrast]) -> list[Contrast]:
    """Those of studies whose comparisons are counted."""
    return [contrast for contrast in contrasts if not contrast.trial.not_counted]


def count_verdicts(contrasts: Iterable[Contrast]) -> str:
    """How many of the counted comparisons have each verdict."""
    counts = Counter(contrast.verdict for contrast in counted(contrasts))
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])


def pooled_sentence(trials: Sequence[Trial]) -> str:
    """PGT less its baseline, over distinct baselines on Fashion-MNIST with batch normalisation."""
    chosen: dict[object, Contrast] = {}
    for trial in trials:
        if trial.recipe.model.norm != "batch" or trial.is_grid or trial.name == LEFT_OUT:
            continue
        for contrast in contrasts_of(trial):
            if contrast.arm.methods == PGT and "fashion-mnist" in contrast.arm.measured_on:
                chosen.setdefault(contrast.against.runs, contrast)  # the first of each baseline
    means, weights = [], []
    for contrast in chosen.values():
        arm, base = (np.array([*a.test.values()]) for a in (contrast.arm, contrast.against))
        means.append(arm.mean() - base.mean())
        weights.append(1 / (arm.var(ddof=1) / len(arm) + base.var(ddof=1) / len(base)))
    pooled = float(np.average(means, weights=weights))
    reach = 1.96 / math.sqrt(sum(weights))
    return (
        f"The mean difference of PGT from cross-entropy is {format_signed(pooled)} ± {reach:.2f} "
        f"points (95% interval; {len(means)} studies with distinct baselines, weighted by the "
        "inverse of their variance; the learning rate of each arm was tuned once). A study with "
        "ResNet-101 is left out, because in so few steps it does not reach the accuracy of "
        "ResNet-50."
    )


# What was published -------------------------------------------------------------------------------


def _published(claim: Claim) -> str:
    """The smallest and the largest difference that the paper's tables have for a claim."""
    if claim.published:
        return claim.published
    words = [f"{gain + 0.0:+g} ({name})" for gain, name in published_gains(claim)]
    return words[0] if len(words) == 1 else f"{words[0]} to {words[-1]}"


def published_gains(claim: Claim) -> list[tuple[float, str]]:
    """The differences that the paper's tables have for a claim, rising, with their rows."""
    gains = []
    for experiment in load_paper().experiments:
        first = experiment.baseline.recipe
        if experiment.grid or claim.norm not in (None, first.model.norm):
            continue
        methods = {
            row.arm: methods_of(changes_of(row.recipe, first), first) for row in experiment.rows
        }
        for row, other in itertools.permutations(experiment.rows, 2):
            is_pair = (methods[row.arm], methods[other.arm]) == (claim.methods, claim.against)
            alpha, other_alpha = row.recipe.loss.alpha, other.recipe.loss.alpha
            is_asked = claim.alpha in (None, alpha) and other_alpha in (alpha, 1)
            if is_pair and is_asked and (claim.metric == "test" or "train" in row.published):
                gain = _printed(row, claim.metric) - _printed(other, claim.metric)
                gains.append((round(gain, 3), row.id))
    return sorted(gains)


def _printed(row: Row, metric: str) -> float:
    if metric == "gap":
        return row.published["train"] - row.published["test"]
    return row.published[metric]


# Depth and filters --------------------------------------------------------------------------------


def _depths(trials: Sequence[Trial]) -> list[str]:
    """How many runs of each deeper network without normalisation failed."""
    outcomes = []
    for trial in trials:
        for arm in trial.arms[1:]:
            if trial.recipe.model.norm == "none" and arm.methods == DEEP:
                half = mean(trial.arms[0].test.values()) / 2
                failed = sum(accuracy < half for accuracy in arm.test.values())
                words = {0: "none failed", len(arm.test): "all failed"}
                outcomes.append(words.get(failed, f"{failed} failed"))
    return outcomes


def _schedules(trials: Sequence[Trial]) -> list[str]:
    """The baselines of studies that differ in the schedule only, and in the tuned rates."""
    counts = [trial for trial in trials if not (trial.not_counted or trial.is_grid)]
    firsts = {trial.arms[0].runs: trial for trial in counts}
    outcomes = []
    for trial, other in itertools.permutations(firsts.values(), 2):
        changed = {"schedule.name": "cosine", "optimizer.lr": trial.recipe.optimizer.lr}
        is_pair = other.recipe.override(changed) == trial.recipe != other.recipe
        if is_pair and other.recipe.schedule.name == "step":
            outcomes += [c.verdict for c in compare_arms(trial.arms[0], other.arms[0], "test")]
    return outcomes


def _dead_filters(trials: Sequence[Trial]) -> Iterator[tuple[Methods | None, str]]:
    """Methods of an arm, and whether more or fewer filters are dead than in its baseline."""
    words = {"better": "fewer", "worse": "more", "equivalent": "as many"}
    options = {"margin": 1.0, "higher_is_better": False}
    for trial in trials:
        if trial.recipe.model.norm != "none" or trial.not_counted:
            continue
        first, *others = trial.arms
        for arm in others:
            for contrast in compare_arms(arm, first, "dead_units", **options):
                is_short = round(min(arm.exponent, first.exponent), 1) < ENOUGH
                verdict = words.get(contrast.verdict, contrast.verdict)
                yield arm.methods, "too little decay" if is_short else verdict


def _layers(evidence: Evidence) -> str:
    """The single runs whose norms were kept."""
    lines = []
    for trial in evidence.replicas:
        for run in (KeptRun(trial, arm) for arm in trial.results.arms):
            if run.file(".npz").exists():
                norms = run.norms()
                layers = [layer for layer in norms.layers if layer is not None]
                whole = ", ".join(str(layer) for layer in layers if norms.is_all_dead(layer))
                features = norms.dead_in_words(None)
                lines.append((f"`{trial.name}`", run.name, whole or "none", features))
    return markdown_table(("study", "run", "entirely dead layers", "dead features"), lines)


def _recovery(evidence: Evidence) -> str:
    """All replicas that followed their filters together, by arm."""
    counts: dict[str, list[tuple[float, float]]] = {}
    for trial in evidence.replicas:
        for row in trial.results.rows:
            died, back = row.value("died"), row.value("came_back")
            if died is not None and back is not None:
                counts.setdefault(row.arm, []).append((died, back))
    lines = []
    for arm, pairs in counts.items():
        died, back = (sum(column) for column in zip(*pairs, strict=True))
        share = f"{100 * back / died:.1f}" if died else ""
        lines.append((arm, str(len(pairs)), f"{died:,.0f}", f"{back:,.0f}", share))
    return markdown_table(("arm", "runs", "filters that died", "came back", "%"), lines)
