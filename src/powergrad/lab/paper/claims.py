"""What became of the paper's claims: all that was measured of each, in one place."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from powergrad.lab.paper.evidence import MARGIN, Evidence, Measurement
from powergrad.lab.paper.rows import changes_of, load_paper
from powergrad.lab.paper.studies import (
    Arm,
    Finding,
    Trial,
    contrast,
    found_in,
    methods_of,
)

__all__ = [
    "CONDITIONS",
    "ENOUGH",
    "PGT",
    "SHORTER",
    "against_controls",
    "claim_by_claim",
    "counted",
    "table_of",
]

VERDICTS = ("better", "equivalent", "worse", "underpowered", "too few seeds")
DEEPER = "Networks deeper than ResNet-18 cannot be trained without normalisation"
ZEROED = "Fewer filters die with PGT, hardly any with AGC, none with both"
CONDITIONS = "under-what-conditions"  # the address of a heading of the page
ENOUGH = 4.6  # the decay exponent at which a filter without gradient falls to 1% of its start


def _set(*names: str) -> frozenset[str]:
    return frozenset(names)


@dataclass(frozen=True)
class _Claim:
    """That an arm with some methods does better than one with others.

    Attributes:
        says: The claim.
        methods: What the arm does.
        norm: The normalisation of the networks; None for all.
        against: What the other arm does; nothing for the baseline.
        alpha: The arm's alpha, where the claim is of one.
        holds: The verdicts that bear it out.
        metric: ``test``, ``train`` or ``gap``, the second less the first.
        published: What the paper has on it, if that is no difference within a part of a table.
        control: What an arm without PGT does that may explain the gain: shown beside it, with PGT
            against it, and not counted.
        more: What else is to be said of the claim.
        reading: How to read what was measured.
    """

    says: str
    methods: frozenset[str]
    norm: str | None = None
    against: frozenset[str] = frozenset()
    alpha: float | None = None
    holds: frozenset[str] = frozenset({"better"})
    metric: str = "test"
    published: str = ""
    control: frozenset[str] | None = None
    more: str = ""
    reading: str = ""


PGT, AGC, GC, LS = (_set(name) for name in ("PGT", "AGC", "GC", "LS"))
SHORTER, LESS = _set("fewer epochs"), _set("less decay")
MOVED = (
    "By the [identity](theory.md) PGT leaves the backbone alpha times its decay. Where "
    "cross-entropy with less decay was measured beside it, that stands below as the control, with "
    "PGT against it."
)
CLAIMS = (
    _Claim(
        "PGT raises accuracy with batch normalisation", PGT, "batch", control=LESS, reading=MOVED
    ),
    _Claim("PGT raises accuracy without normalisation", PGT, "none", control=LESS, reading=MOVED),
    _Claim("AGC raises accuracy without normalisation", AGC, "none"),
    _Claim("PGT does better than AGC", PGT, "none", AGC),
    _Claim("AGC with PGT raises accuracy without normalisation", AGC | PGT, "none"),
    _Claim("AGC with PGT does better than PGT alone", AGC | PGT, "none", PGT),
    _Claim("GC raises accuracy without normalisation", GC, "none"),
    _Claim("PGT does better than GC", PGT, "none", GC),
    _Claim(
        "GC with PGT raises accuracy without normalisation",
        GC | PGT,
        "none",
        more='The text calls its advantage "not very significant".',
    ),
    _Claim("Label smoothing raises accuracy", LS),
    _Claim("Label smoothing improves PGT at alpha 0.3", LS | PGT, against=PGT, alpha=0.3),
    _Claim(
        "Label smoothing hurts PGT at alpha 0.05",
        LS | PGT,
        against=PGT,
        alpha=0.05,
        holds=_set("worse"),
        reading="Here *worse* is what the claim says.",
    ),
    _Claim("Training accuracy rises too", PGT, metric="train"),
    _Claim(
        "The gap between training and test accuracy grows",
        PGT,
        metric="gap",
        more="The paper's tables disagree among themselves (see the notes below).",
    ),
    _Claim(
        "PGT reaches in 60% of the epochs what cross-entropy reaches in all",
        PGT | SHORTER,
        holds=_set("better", "equivalent"),
        control=SHORTER,
        more="The paper has no run of cross-entropy with 60 epochs.",
        reading="Here *equivalent* is what the claim says; where cross-entropy with as few epochs "
        "was measured, that stands below as the control, with PGT against it.",
    ),
    _Claim(
        "Without normalisation large batches cost accuracy",
        _set("larger batch"),
        "none",
        holds=_set("worse"),
        published="-1.98 at batch 1024 (T2.1) and -0.244 at 512 (T2.3), against 256 (T2.5)",
        reading="Here *worse* is what the claim says. At as many epochs a larger batch has fewer "
        "steps. Dead filters stand in [the study's table](#beyond-the-tables), beside the decay "
        f"exponent: at less than {ENOUGH} none can have died by decay.",
    ),
)


@dataclass(frozen=True)
class _Judged:
    """A claim with all that was measured of it.

    Attributes:
        claim: What the paper says.
        published: What it has to show for it.
        findings: What was measured of it.
        control: The simpler control against the baseline.
        instead: PGT against the control.
        on_top: PGT together with the control against the control alone.
    """

    claim: _Claim
    published: str
    findings: tuple[Finding, ...]
    control: tuple[Finding, ...]
    instead: tuple[Finding, ...]
    on_top: tuple[Finding, ...]

    @classmethod
    def by(cls, claim: _Claim, found: Sequence[Trial]) -> _Judged:
        """What the studies have on a claim."""
        published, findings = _published(claim), tuple(_findings(claim, found))
        if claim.control is None:
            return cls(claim, published, findings, (), (), ())
        is_part = claim.control <= claim.methods
        control, instead, on_top = (
            replace(claim, methods=claim.control),
            replace(claim, against=claim.control),
            replace(claim, methods=claim.methods | claim.control, against=claim.control),
        )
        return cls(
            claim,
            published,
            findings,
            tuple(_findings(control, found)),
            () if is_part else tuple(_findings(instead, found)),
            tuple(_findings(on_top, found)),
        )


def claim_by_claim(evidence: Evidence, found: Sequence[Trial]) -> Iterator[str]:
    """The section of the page: a claim, what was published for it, all that was measured of it."""
    judged = [_Judged.by(claim, found) for claim in CLAIMS]
    depths, dead = list(_depths(found)), list(_dead_filters(found))
    yield from _at_a_glance(judged, depths, dead)
    for each in judged:
        words = [f"Published: {each.published}.", _count(each.findings), each.claim.more]
        words += [each.claim.reading] if each.findings else []
        yield from (f"### {each.claim.says}", "", " ".join(filter(None, words)), "")
        if rows := [*each.findings, *each.control, *each.instead, *each.on_top]:
            yield from (*table_of(rows), "")
    yield from _depth(depths)
    yield from _alpha(evidence, found)
    yield from _logits(evidence)
    yield from _dead(dead)
    yield from _whole_layers(evidence)
    yield from _recovery(evidence)
    yield from (
        "### It costs next to nothing",
        "",
        "Measured: [benchmarks](benchmarks.md) has time and memory of the loss beside PyTorch's "
        "and the authors' hook, [altering](methods/altering.md) those of a step.",
        "",
    )


def _at_a_glance(
    judged: Sequence[_Judged],
    depths: Sequence[_Depth],
    dead: Sequence[_Dead],
) -> Iterator[str]:
    lines = []
    for each in judged:
        holds = each.claim.holds
        opposite = "better" if holds == {"worse"} else "worse"
        columns = (holds, {"equivalent"} - holds, {opposite})
        controls = (
            f"{how}: {_verdicts(findings)}{_lost(findings)}"
            for how, findings in (("in its place", each.instead), ("on top of it", each.on_top))
            if findings
        )
        cells = _columns([finding.verdict for finding in counted(each.findings)], columns)
        lines.append((_link(each.claim.says), each.published, *cells, "; ".join(controls)))
    cells = _columns([each.outcome for each in depths], ({"all failed"}, set(), {"none failed"}))
    lines.append((_link(DEEPER), "text", *cells, ""))
    for methods in (PGT, AGC, AGC | PGT):
        outcomes = [
            each.verdict
            for each in dead
            if each.finding.arm.methods == methods and not each.finding.trial.within
        ]
        cells = _columns(outcomes, ({"fewer"}, {"as many"}, {"more"}))
        title = f"[With {' + '.join(sorted(methods))} fewer filters die](#{_anchor(ZEROED)})"
        lines.append((title, "figures", *cells, ""))
    head = ("claim", "published", "borne out", f"within {MARGIN:g}", "contrary", "not told apart")
    yield from (*_table((*head, "PGT against a simpler control"), lines), "")


def _columns(outcomes: Sequence[str], columns: Iterable[AbstractSet[str]]) -> list[str]:
    """How many of the outcomes fall into each column, and how many into none."""
    if not outcomes:
        return ["", "", "", "not measured"]
    counts = [sum(each in column for each in outcomes) for column in columns]
    return [str(count or "") for count in (*counts, len(outcomes) - sum(counts))]


def _lost(findings: Sequence[Finding]) -> str:
    lost = sum(each.arm.diverged + each.against.diverged > 0 for each in findings)
    return f" ({lost} of them with runs that diverged)" if lost else ""


def _link(title: str) -> str:
    return f"[{title}](#{_anchor(title)})"


def _anchor(title: str) -> str:
    """The address of a heading, as mkdocs and GitHub have it."""
    return re.sub(r"[^\w-]", "", title.lower().replace(" ", "-"))


def against_controls(found: Sequence[Trial]) -> list[Finding]:
    """PGT against plain cross-entropy with the control of a claim, such as less decay."""
    judged = [_Judged.by(claim, found) for claim in CLAIMS if claim.control is not None]
    return [finding for each in judged for finding in (*each.instead, *each.on_top)]


def _findings(claim: _Claim, found: Sequence[Trial]) -> Iterator[Finding]:
    for trial in found:
        if trial.is_grid or claim.norm not in (None, trial.norm):
            continue
        # Without a method of its own the other arm is the study's first, of whatever rate.
        arms = trial.arms if claim.against else trial.arms[:1]
        for against in (each for each in arms if each.methods == claim.against):
            for arm in trial.arms:
                is_asked = claim.alpha in (None, arm.changes.get("loss.alpha"))
                if arm.methods == claim.methods and is_asked and arm.agrees_with(against):
                    yield from _compare(claim, trial, arm, against)


def _compare(claim: _Claim, trial: Trial, arm: Arm, against: Arm) -> Iterator[Finding]:
    if claim.metric == "test" and not claim.against:
        if arm.name in trial.found:
            yield Finding(trial, arm, against, trial.found[arm.name])
        return
    values: dict[str, Mapping[int, float]] = {}
    for each in (arm, against):
        if claim.metric == "gap":
            values[each.name] = {s: value - each.test[s] for s, value in each.train.items()}
        else:
            values[each.name] = each.train if claim.metric == "train" else each.test
    yield from contrast(trial, arm, against, values)


def table_of(findings: Sequence[Finding]) -> Iterator[str]:
    """A table with a line a finding."""
    head = ("study", "arm", "measured on", "its rate; the other's", "n")
    yield from _table((*head, "difference (95% interval)", "verdict"), (f.cells for f in findings))


def _published(claim: _Claim) -> str:
    if claim.published:
        return claim.published
    gains = []
    for experiment in load_paper().experiments:
        if experiment.grid or claim.norm not in (None, experiment.rows[0].recipe.model.norm):
            continue
        first = experiment.rows[0].recipe
        methods = {
            row.arm: methods_of(changes_of(row.recipe, first), first) for row in experiment.rows
        }
        for row in experiment.rows:
            for other in experiment.rows:
                is_pair = (methods[row.arm], methods[other.arm]) == (claim.methods, claim.against)
                alphas = (row.recipe.loss.alpha, other.recipe.loss.alpha)
                is_asked = claim.alpha in (None, alphas[0])
                if is_pair and is_asked and (alphas[0] == alphas[1] or alphas[1] == 1):
                    gain = _printed(row.published, claim.metric)
                    before = _printed(other.published, claim.metric)
                    if gain is not None and before is not None:
                        gains.append((round(gain - before, 3), row.id))
    gains.sort()
    words = [f"{gain + 0.0:+g} ({name})" for gain, name in gains]
    return words[0] if len(words) == 1 else f"{words[0]} to {words[-1]}"


def _printed(published: Mapping[str, float], metric: str) -> float | None:
    if metric != "gap":
        return published.get(metric)
    return published["train"] - published["test"] if "train" in published else None


def counted(findings: Iterable[Finding]) -> list[Finding]:
    """Those of studies whose runs no larger study has."""
    return [each for each in findings if not each.trial.within]


def _count(findings: Sequence[Finding]) -> str:
    if not findings:
        return "Not measured here."
    return f"Measured: {_verdicts(findings)}."


def _verdicts(findings: Sequence[Finding]) -> str:
    counts = Counter(each.verdict for each in counted(findings))
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])


def _section(published: str, head: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"Published: {published}" + ("" if lines else " Not measured here.")
    yield ""
    if lines:
        yield from (*_table(head, lines), "")


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    yield from (f"| {' | '.join(line)} |" for line in lines)


# Depth --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Depth:
    """What became of a deeper network without normalisation."""

    outcome: str
    cells: tuple[str, ...]


def _depths(found: Sequence[Trial]) -> Iterator[_Depth]:
    for trial in found:
        first = trial.arms[0]
        for arm in trial.arms[1:]:
            if trial.norm != "none" or arm.methods != _set("deeper network"):
                continue
            level = sum(first.test.values()) / len(first.test)
            ended = sorted(arm.test.values())
            failed = sum(each < level / 2 for each in ended)  # 0 where a run diverged
            outcome = {0: "none failed", len(ended): "all failed"}.get(failed, f"{failed} failed")
            mean = f"{sum(ended) / len(ended):.2f} ({ended[0]:.2f} to {ended[-1]:.2f})"
            rates = f"{arm.rate}; {first.rate}"
            cells = (f"`{trial.name}`", arm.label, arm.on, rates, str(len(ended)))
            yield _Depth(outcome, (*cells, mean, f"{level:.2f}", outcome))


def _depth(depths: Sequence[_Depth]) -> Iterator[str]:
    yield from (f"### {DEEPER}", "")
    yield from _section(
        "the text has it of ResNet-34 and ResNet-50. Here a run counts as failed if it diverged or "
        "ended below half of what the shallower network reaches; that it is not as good is not "
        "what the claim says.",
        (
            *("study", "network", "measured on", "its rate; the shallower's", "n"),
            *("test accuracy (least to most)", "the shallower's", "runs"),
        ),
        [each.cells for each in depths],
    )


# Grids over alpha ---------------------------------------------------------------------------------


def _alpha(evidence: Evidence, found: Sequence[Trial]) -> Iterator[str]:
    yield from ("### A good alpha lies well below 1", "")
    lines = []
    grids = {trial.name: trial for trial in found}
    for study in _grids(evidence):
        first = study.arms[0]
        best = max(study.arms, key=study.mean)
        told = _verdicts(found_in(grids[study.stem.name])) or "too few seeds"
        cells = (study.describe(), str(len(study.values(first))), told)
        top = f"{study.mean(best):.2f} at {best.removeprefix('alpha=')}"
        lines.append((f"`{study.stem.name}`", *cells, top, f"{study.mean(first):.2f}"))
    yield from _section(
        "0.25 and 0.05 (also 0.3) are good choices for ResNet-18 and ResNet-50; no effect on "
        "CIFAR-10. Without normalisation at the large batch it is 0.92.",
        ("grid", "measured on", "n", "alphas below 1", "best", "at alpha 1"),
        lines,
    )


def _logits(evidence: Evidence) -> Iterator[str]:
    published = {each["id"]: each["value"] for each in load_paper().claims}
    yield from ("### Logits grow as alpha falls, and the loss with them", "")
    lines = []
    for study in _grids(evidence):
        one, least = study.arms[0], study.arms[-1]
        norms = [study.mean(arm, "logit_norm") for arm in (one, least)]
        losses = {arm: study.mean(arm, "nll") for arm in study.arms}
        lowest = min(losses, key=lambda arm: losses[arm])
        alpha = float(least.removeprefix("alpha="))
        pairs = np.array([(row["logit_norm"], row["nll"]) for row in study.rows])
        slope, _ = np.polyfit(pairs[:, 0], pairs[:, 1], 1)
        r = np.corrcoef(pairs.T)[0, 1]
        lines.append(
            (
                f"`{study.stem.name}`",
                f"{norms[0]:.1f} to {norms[1]:.1f} at {alpha:g}",
                f"{norms[1] / norms[0]:.1f} ({1 / alpha:.0f})",
                f"{losses[one]:.3f} to {losses[least]:.3f}",
                f"{losses[lowest]:.3f} at {lowest.removeprefix('alpha=')}",
                f"{slope:.5f}, r = {r:.2f}",
            )
        )
    yield from _section(
        f"the loss of ResNet-50 is {published['loss-baseline']} without PGT and "
        f"{published['loss-pgt']} at alpha 0.05; for ResNet-18 it rises with the logit norm along "
        f"a line of slope {published['regression-slope']}. (The [identity](theory.md) has logits "
        "grow towards 1/alpha times.)",
        (
            *("grid", "logit norm, alpha 1 to the least", "times (1/alpha)"),
            *("NLL of the test set", "least NLL", "slope of NLL over logit norm"),
        ),
        lines,
    )


def _grids(evidence: Evidence) -> list[Measurement]:
    return [each for each in evidence.measurements if each.experiment.grid and len(each.arms) > 1]


# Filters ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Dead:
    """The dead filters of an arm against those of its baseline."""

    finding: Finding
    verdict: str
    cells: tuple[str, ...]


def _dead_filters(found: Sequence[Trial]) -> Iterator[_Dead]:
    for trial in found:
        first = trial.arms[0]
        if trial.norm != "none":
            continue
        for arm in trial.arms[1:]:
            if not (arm.methods or _set()) & (PGT | AGC):
                continue
            values = {each.name: each.dead for each in (arm, first)}
            for each in contrast(trial, arm, first, values, margin=1.0, higher_is_better=False):
                words = {"better": "fewer", "worse": "more", "equivalent": "as many"}
                verdict = words.get(each.verdict, each.verdict)
                exponents = [round(of.exponent, 1) for of in (arm, first)]
                if min(exponents) < ENOUGH:
                    verdict = "too little decay"
                means = (f"{sum(of.values()) / len(of):.1f}" for of in values.values())
                decay = f"{exponents[0]:.1f}; {exponents[1]:.1f}"
                cells = (f"`{trial.name}`", arm.label, arm.on, decay, str(each.found.n), *means)
                yield _Dead(each, verdict, (*cells, verdict))


def _dead(dead: Sequence[_Dead]) -> Iterator[str]:
    yield from (f"### {ZEROED}", "")
    yield from _section(
        "pictures of norms. The text has fewer zeroed filters with PGT in most layers (more in "
        "layer 2), calls AGC excellent at it, and finds none with AGC + PGT. Below, dead filters "
        "at the end of runs without normalisation that did not diverge; *as many* is within one. "
        f"A filter without gradient needs a [decay exponent](#{CONDITIONS}) of {ENOUGH} "
        "to fall to 1% of its start: "
        "where one arm has less, its count says nothing, and where the two differ, part of the "
        "difference is the decay's.",
        (
            *("study", "arm", "measured on", "decay exponent; baseline's", "n", "dead"),
            *("baseline's", "verdict"),
        ),
        [each.cells for each in dead],
    )


def _whole_layers(evidence: Evidence) -> Iterator[str]:
    yield from ("### With large batches whole layers zero out; with PGT no feature does", "")
    lines = []
    for study, arm, norms in evidence.recordings():
        dead = {key: found for key in norms.values if (found := norms.dead(key)) is not None}
        feature = dead.pop("feature", None)
        whole = [key.removeprefix("layer") for key, found in dead.items() if found.all()]
        most = max(dead, key=lambda key: dead[key].mean(), default=None)
        lines.append(
            (
                f"`{study.stem.name}`",
                norms.caption,
                study.describe(arm),
                ", ".join(whole) or ("none" if dead else "diverged"),
                f"{most.removeprefix('layer')}: {_share(dead[most])}" if most else "",
                "" if feature is None else _share(feature),
            )
        )
    yield from _section(
        "a picture of layer 5, all of whose filters vanish at batch 1024; the text has zeroing out "
        "as particularly common at large batches, several features after pooling at zero without "
        "PGT, and none with it. Below, the single runs whose norms were kept; a feature is dead "
        "when it ended at 0.",
        (
            *("study", "run", "measured on", "layers that died whole", "layer with the most dead"),
            "dead features",
        ),
        lines,
    )


def _share(dead: NDArray[np.bool_]) -> str:
    return f"{int(dead.sum())} of {dead.size}"


def _recovery(evidence: Evidence) -> Iterator[str]:
    yield from ("### A filter that was zeroed out does not recover", "")
    counts: dict[str, list[tuple[float, float]]] = {}
    for study in evidence.measurements:
        for row in study.rows:
            if isfinite(row["died"]):
                counts.setdefault(row["arm"], []).append((row["died"], row["came_back"]))
    lines = []
    for arm, pairs in counts.items():
        died, back = (sum(column) for column in zip(*pairs, strict=True))
        share = f"{100 * back / died:.1f}" if died else ""
        lines.append((arm, str(len(pairs)), f"{died:,.0f}", f"{back:,.0f}", share))
    yield from _section(
        "the text says so. Below, all replicas without normalisation together; each "
        "[by itself](#zeroing-out-do-filters-that-died-come-back).",
        ("arm", "runs", "filters that died", "came back", "%"),
        lines,
    )
