"""What became of the paper's claims: all that was measured of each, in one place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from powergrad.lab import stats
from powergrad.lab.paper.evidence import Evidence, Measurement
from powergrad.lab.paper.rows import changes_of, load_paper
from powergrad.lab.paper.studies import Finding, Study, find_all, methods_of, rates_of

__all__ = ["claim_by_claim", "table_of"]

VERDICTS = ("better", "equivalent", "worse", "underpowered")


@dataclass(frozen=True)
class _Claim:
    """That some methods together raise the accuracy of some networks."""

    says: str
    methods: frozenset[str]
    norm: str | None = None


CLAIMS = (
    _Claim("PGT raises accuracy with batch normalisation", frozenset({"PGT"}), "batch"),
    _Claim("PGT raises accuracy without normalisation", frozenset({"PGT"}), "none"),
    _Claim("AGC raises it too", frozenset({"AGC"}), "none"),
    _Claim("AGC and PGT together raise it most", frozenset({"AGC", "PGT"}), "none"),
    _Claim("Clipping by norm (GC) raises it a little", frozenset({"GC"}), "none"),
    _Claim("GC and PGT together raise it less than PGT alone", frozenset({"GC", "PGT"}), "none"),
    _Claim("Label smoothing raises accuracy", frozenset({"LS"})),
    _Claim("Label smoothing and PGT add up at alpha 0.3, not at 0.05", frozenset({"LS", "PGT"})),
    _Claim(
        "PGT reaches in 60% of the epochs what cross-entropy reaches in all",
        frozenset({"PGT", "other length"}),
    ),
)


def claim_by_claim(evidence: Evidence, studies: Sequence[Study]) -> Iterator[str]:
    """The section of the page: a claim, what was published for it, all that was measured of it."""
    found = find_all(evidence, studies)
    for claim in CLAIMS:
        mine = [
            each
            for each in found
            if each.methods == claim.methods
            and claim.norm in (None, each.norm)
            and not each.is_grid
        ]
        yield from (f"### {claim.says}", "", f"Published: {_published(claim)}. {_count(mine)}", "")
        if mine:
            yield from table_of(mine)
            yield ""
    yield from _alpha(evidence, found)
    yield from _logits(evidence)
    yield from _dead(evidence, studies)
    yield from _recovery(evidence)


def table_of(findings: Sequence[Finding]) -> Iterator[str]:
    """A table with a line a finding."""
    head = ("study", "arm", "measured on", "rates", "n", "difference (95% interval)", "verdict")
    yield from _table(head, (each.cells for each in findings))


def _section(published: str, head: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"Published: {published}." + ("" if lines else " Not measured here.")
    yield ""
    if lines:
        yield from (*_table(head, lines), "")


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    yield from (f"| {' | '.join(line)} |" for line in lines)


def _published(claim: _Claim) -> str:
    gains = []
    for experiment in load_paper().experiments:
        first = experiment.rows[0]
        for row in experiment.rows[1:]:
            has = (row.recipe.model.norm, methods_of(changes_of(row.recipe, first.recipe)))
            if not experiment.grid and has[1] == claim.methods and claim.norm in (None, has[0]):
                gains.append((row.published["test"] - first.published["test"], row.id))
    gains.sort()
    words = [f"{gain:+.3f} ({name})" for gain, name in gains]
    return words[0] if len(words) == 1 else f"{words[0]} to {words[-1]}"


def _count(findings: Sequence[Finding]) -> str:
    if not findings:
        return "Not measured here."
    counts = Counter(each.found["verdict"] for each in findings)
    words = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    return f"Measured: {words}."


def _alpha(evidence: Evidence, found: Sequence[Finding]) -> Iterator[str]:
    yield from ("### The best alpha lies well below 1", "")
    published = "0.25 for ResNet-18, peaks at 0.3 and 0.05 for ResNet-50, none on CIFAR-10"
    lines = []
    for study in _grids(evidence):
        first = study.arms[0]
        mine = [each for each in found if each.study == study.stem.name]
        best = max(study.arms, key=study.mean)
        told = _count(mine).removeprefix("Measured: ").rstrip(".") if mine else "too few seeds"
        cells = (study.describe(), str(len(study.values(first))), told)
        top = f"{study.mean(best):.2f} at {best.removeprefix('alpha=')}"
        lines.append((f"`{study.stem.name}`", *cells, top, f"{study.mean(first):.2f}"))
    head = ("grid", "measured on", "n", "alphas below 1", "best mean", "at alpha 1")
    yield from _section(published, head, lines)


def _logits(evidence: Evidence) -> Iterator[str]:
    published = {each["id"]: each["value"] for each in load_paper().claims}
    yield from ("### Logits grow as alpha falls, and the loss with them", "")
    words = (
        f"a loss of {published['loss-baseline']} without PGT and of {published['loss-pgt']} at "
        "alpha 0.05, and a rising line through loss over logit norm; by the [identity](theory.md) "
        "logits grow towards 1/alpha times"
    )
    lines = []
    for study in _grids(evidence):
        one, least = study.arms[0], study.arms[-1]
        norms = [study.mean(arm, "logit_norm") for arm in (one, least)]
        losses = [study.mean(arm, "nll") for arm in (one, least)]
        alpha = float(least.removeprefix("alpha="))
        cells = (f"{alpha:g}", f"{1 / alpha:.0f}", f"{norms[0]:.1f} to {norms[1]:.1f}")
        more = (f"{norms[1] / norms[0]:.1f}", f"{losses[0]:.3f} to {losses[1]:.3f}")
        lines.append((f"`{study.stem.name}`", *cells, *more))
    head = ("grid", "least alpha", "1/alpha", "logit norm", "times", "NLL of the test set")
    yield from _section(words, head, lines)


def _grids(evidence: Evidence) -> list[Measurement]:
    return [each for each in evidence.measurements if each.experiment.grid and len(each.arms) > 1]


def _dead(evidence: Evidence, studies: Sequence[Study]) -> Iterator[str]:
    yield from ("### Fewer filters die with PGT", "")
    words = (
        "pictures of norms, no number. Below, dead filters at the end of runs without "
        "normalisation; the verdict is of the same tests as for accuracy"
    )
    lines = []
    for each, values in _dead_counts(evidence, studies):
        baseline, *arms = values
        if not arms or min(map(len, values.values())) < 2:
            continue
        for compared in stats.compare(values, baseline, margin=1.0, higher_is_better=False):
            told = {"better": "fewer", "worse": "more"}.get(compared.verdict, "not told apart")
            counts = [values[arm].values() for arm in (compared.arm, baseline)]
            dead = (f"{sum(of) / len(of):.1f}" for of in counts)
            on = (each.describe(), rates_of(each.about), str(compared.n))
            lines.append((f"`{each.stem.name}`", compared.arm, *on, *dead, told))
    head = ("study", "arm", "measured on", "rates", "n", "dead", "baseline's", "verdict")
    yield from _section(words, head, lines)


def _dead_counts(
    evidence: Evidence, studies: Sequence[Study]
) -> Iterator[tuple[Measurement | Study, Mapping[str, Mapping[int, float]]]]:
    """The dead filters of every seed: the baseline's first, then those of the arms with PGT."""
    for study in evidence.measurements:
        if study.follows_filters:
            first = study.experiment.rows[0]
            changes = {
                arm: changes_of(study.experiment.row(arm).recipe, first.recipe)
                for arm in study.arms
            }
            yield study, _with_pgt(study, changes, first.arm)
    for study in studies:
        yield study, _with_pgt(study, study.about["changes"], study.about["baseline"])


def _with_pgt(
    study: Measurement | Study, changes: Mapping[str, Mapping[str, Any]], baseline: str
) -> Mapping[str, Mapping[int, float]]:
    methods = {arm: methods_of(changed) for arm, changed in changes.items()}
    if methods.get(baseline) != frozenset() or study.about["recipe"]["model"]["norm"] != "none":
        return {baseline: {}}
    arms = [arm for arm, found in methods.items() if found and "PGT" in found]
    return {arm: study.values(arm, "dead_units") for arm in (baseline, *arms)}


def _recovery(evidence: Evidence) -> Iterator[str]:
    rows = [row for study in evidence.measurements for row in study.rows if isfinite(row["died"])]
    yield from ("### A filter that was zeroed out does not recover", "")
    if not rows:
        yield from ("Published: the text says so. Not measured here.", "")
        return
    died, back = (sum(row[key] for row in rows) for key in ("died", "came_back"))
    share = f", {100 * back / died:.1f}%" if died else ""
    yield (
        f"Published: the text says so. Measured: of {died:,.0f} filters that died at some time in "
        f"{len(rows)} runs, {back:,.0f} came back{share} (a row a study "
        "[below](#zeroing-out-do-filters-that-died-come-back))."
    )
    yield ""
