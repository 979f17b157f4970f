"""The pages that set what was published beside what was measured here.

``docs/reproduction.md`` has every table row and figure, and the studies that the paper does not
have; ``docs/where-pgt-does-not-help.md`` every comparison in which PGT was not better.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import Any

from powergrad.lab.compare import in_words
from powergrad.lab.paper.claims import (
    CONDITIONS,
    ENOUGH,
    PGT,
    SHORTER,
    against_controls,
    claim_by_claim,
    counted,
    table_of,
)
from powergrad.lab.paper.cost import cost, total_hours
from powergrad.lab.paper.evidence import MARGIN, Evidence, Measurement, MissingRunsError
from powergrad.lab.paper.rows import Experiment, Figure, Row, changes_of, load_paper
from powergrad.lab.paper.small import LEAST
from powergrad.lab.paper.studies import (
    Finding,
    Study,
    Trial,
    fingerprint,
    found_in,
    labelled,
    read_studies,
    told,
    trial_of,
    trials,
)
from powergrad.lab.run import write_atomically

__all__ = ["published_words", "write_pages"]


PAGE = "reproduction.md"
NO_HELP = "where-pgt-does-not-help.md"


def write_pages(results: Path, folder: Path) -> list[Path]:
    """Write both pages from the results; the same results give the same bytes.

    Args:
        results: The folder ``results``.
        folder: Where they go, as ``docs``.

    Returns:
        The files written.
    """
    evidence, studies = Evidence(results), read_studies(results)
    found = trials(evidence, studies)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, lines in ((PAGE, _page(evidence, studies, found)), (NO_HELP, _no_help(found))):
        text = ("\n".join(lines).rstrip("\n") + "\n").encode()
        write_atomically(folder / name, lambda file, text=text: file.write(text))
        written.append(folder / name)
    return written


def published_words(row: Row) -> str:
    """What was printed of a row."""
    keys = [key for key in ("train", "test", "gap") if key in row.published]
    words = [f"{key} {row.published[key]:g}" for key in keys]
    return ", ".join(words) or "no number printed"


def _page(evidence: Evidence, studies: Sequence[Study], found: Sequence[Trial]) -> Iterator[str]:
    paper = load_paper()
    hours = total_hours(row.recipe for each in paper.experiments for row in each.rows)
    needs = ", ".join(f"{value:,.0f} on {gpu}" for gpu, value in hours.items())
    yield from (
        "# The paper, reproduced: what was published, what was measured",
        "",
        f"Every table row and figure of *{paper.title}*. Published numbers are ImageNet's, in per "
        "cent, as printed. Measured ones are of **scaled-down replicas**, unless their line says "
        "otherwise: they test whether an effect is there in small, not the number. Differences are "
        f"in points of test accuracy from the baseline of the same table segment, over seeds, with "
        f"a 95% t interval; *better* and *worse* are of a sign-flip test at 5% with Holm's "
        f"correction for the arms of a study, *equivalent* means within {MARGIN:g} points. "
        "A verdict of *underpowered* says that nothing was shown, in either direction. "
        f"[Where PGT does not help]({NO_HELP}) has every comparison in which it was not better.",
        "",
        f"At full scale every run of the paper once needs, in GPU hours: {needs} "
        "(from published training speeds; the last is of the runs on CIFAR-10, the others of those "
        "on ImageNet; "
        "`powergrad paper show ID` has the sources). "
        "`powergrad paper show ID` also has a row's recipe, the commands, where the paper "
        "disagrees with itself, and what it leaves open.",
        "",
        "This page is generated: `powergrad paper page` writes it from `results/`.",
        "",
    )
    yield from (
        "## The claims, one by one",
        "",
        "Headings are the paper's claims, not ours. Below each stands what was published for it, "
        "and everything that was measured of it here. A rate is *tuned* if it was chosen on "
        "held-out training data, from the same grid for every arm; at the *edge* of that grid a "
        "better one may lie beyond. Comparisons of two methods with each other, of training "
        "accuracy, of gaps and of dead filters are not corrected for their number.",
        "",
        "At a glance, in numbers of comparisons (studies differ in what they can tell, and some "
        "share a baseline; one whose runs are all in a larger one is not counted):",
        "",
        "- *borne out*: a significant difference of the sign that the claim has, of whatever size; "
        "for the claim on 60% of the epochs *equivalent* will do;",
        f"- *within {MARGIN:g}*: no significant difference, and shown to be under {MARGIN:g} "
        "points (for filters, one). Where the published gain is smaller, this is no objection;",
        "- *contrary*: a significant difference of the other sign;",
        "- *not told apart*: nothing was shown, by too few seeds or too little decay among others;",
        "- *a simpler control*: plain cross-entropy with less weight decay, or with as few epochs.",
        "",
        "The test is exact and the interval Student's: where single runs diverge, a verdict may "
        "stand beside an interval that holds 0. Alphas, logits, recovery and cost, further down, "
        "cannot be counted so.",
        "",
    )
    yield from claim_by_claim(evidence, found)
    yield from _under_what_conditions(evidence, studies)
    for where, title in (
        ("Table 1", "Table 1: with batch normalisation"),
        ("Table 2", "Table 2: without normalisation"),
        ("Table 3", "Table 3: label smoothing"),
        ("Section", "60 epochs against 100"),
        ("Supplement", "Grids over alpha"),
    ):
        yield from (f"## {title}", "")
        for experiment in paper.experiments:
            if experiment.where.startswith(where):
                yield from _experiment(evidence, experiment)
        if where == "Table 2":
            yield from _zeroing_out(evidence)
    yield from _beyond(studies)
    yield from ("## Figures", "", "| figure | shows | drawn from |", "|---|---|---|")
    for figure in paper.figures:
        source = _drawn_from(evidence, figure)
        yield f"| {figure.id} `{figure.name}` | {figure.title} | {source} |"
    yield from ("", "`powergrad paper figure all --out DIR` draws them.", "")
    yield from ("## Numbers of the text", "", "| where | what | published |", "|---|---|---|")
    for claim in paper.claims:
        yield f"| {claim['where']} | {claim['what']} | {claim['value']} |"
    yield from (
        "",
        "## Where the paper disagrees with itself or with its code, or leaves a doubt",
        "",
    )
    for note in paper.notes:
        yield f"- ({', '.join(note.about)}) {note.text}"
    yield from ("", "## What the paper does not say", "")
    for each in paper.unstated:
        chosen = ", ".join(f"`{key}: {value}`" for key, value in each.choice.items())
        yield f"- **{each.what}** ({', '.join(each.about)}): {each.reason}" + (
            f" Chosen: {chosen}." if chosen else ""
        )


def _under_what_conditions(evidence: Evidence, studies: Sequence[Study]) -> Iterator[str]:
    rows = [row for study in evidence.measurements for row in study.rows]
    rows += [row for study in studies for row in study.about["rows"]]
    spent = {fingerprint(row): row["seconds"] for row in rows}
    hours = sum(spent.values()) / 3600
    yield from (
        "## Under what conditions",
        "",
        f"The {len(spent):,} runs behind this page took {hours:.1f} core-hours; tuning the rates, "
        "and studies that later ones replaced, bring that to about 20. Everything ran on the CPU "
        "of a machine with two cores, in float32 unless a command says otherwise.",
        "",
        "A filter whose gradient has stopped shrinks by weight decay alone, as exp(-x) with "
        "x = sum(rate x decay) / (1 - momentum) over the steps. This x is the **decay exponent**. "
        f"The paper's recipe takes it to 125. A run under {LEAST:g} says nothing of the "
        f"equilibrium of weight norms that long training reaches; under {ENOUGH:g} decay has not "
        "brought a filter to 1% of its start, so that none can be counted dead.",
        "",
        "| data | images | where from |",
        "|---|---|---|",
        "| digits | 1,797 of 8 pixels in 10 classes | inside scikit-learn |",
        "| fashion-mnist | 60,000 + 10,000 of 28 pixels in 10 classes | [its authors]"
        "(https://github.com/zalandoresearch/fashion-mnist) |",
        "| cifar10 | 50,000 + 10,000 of 32 pixels in 10 classes | [its authors]"
        "(https://www.cs.toronto.edu/~kriz/cifar.html) |",
        "| tiny-imagenet-100 | 30,000 + 5,000 of 64 pixels in 100 classes | half of Tiny-ImageNet: "
        "every second class, from the first, by WordNet id; of each the first 300 training images "
        "by file name and all 50 for validation, as folders `train/ID` and `val/ID` |",
        "",
        "[The workbench](lab.md) says where their files are looked for.",
        "",
    )


def _experiment(evidence: Evidence, experiment: Experiment) -> Iterator[str]:
    rows = experiment.rows
    ids = list(dict.fromkeys(row.id for row in rows))
    name = ids[0] if len(ids) == 1 else f"{ids[0]} to {ids[-1]}"
    yield from (f"### {name}: {experiment.title}", "")
    each = [(row, found[0].hours) for row in rows if (found := cost(row.recipe))]
    if each:
        total = sum(hours for _, hours in each)
        gpu = cost(rows[0].recipe)[0].gpu
        yield from (f"Full scale: {total:.0f} GPU hours on {gpu}.", "")
    studies = evidence.of(experiment.id)
    for study in studies:
        yield from _conditions(study)
        yield from _grid(study) if experiment.grid else _table(experiment, study)
    if not studies:
        yield from ("Not measured here.", "")
        if not experiment.grid:
            yield from _table(experiment, None)


def _table(experiment: Experiment, study: Measurement | None) -> Iterator[str]:
    """Published beside measured, a row an arm; published alone where nothing was measured."""
    head = "| row | arm | published: train | test | difference |"
    more = " n | measured: train | test | difference (95% interval) | p (Holm) | verdict |"
    yield head + (more if study else "")
    yield "|---" * (11 if study else 5) + "|"
    first = experiment.rows[0].published["test"]
    for row in experiment.rows:
        changes = changes_of(row.recipe, experiment.rows[0].recipe)
        said = {key: value for key, value in changes.items() if key in row.stated}
        cells = [row.id, labelled(row.arm, said)]
        cells += [f"{row.published[k]:g}" if k in row.published else "" for k in ("train", "test")]
        cells.append("" if row is experiment.rows[0] else f"{row.published['test'] - first:+.3f}")
        if study is not None and row.arm in study.arms:
            cells += _numbers(study, row.arm)
        elif study is not None:
            cells += ["", "", "", "", "", "not measured"]
        yield f"| {' | '.join(cells)} |"
    yield ""


def _numbers(study: Measurement, arm: str) -> list[str]:
    """n, train, test, difference, p and verdict."""
    cells = [
        str(len(study.values(arm))),
        f"{study.mean(arm, 'train_accuracy'):.2f}",
        f"{study.mean(arm):.2f}",
    ]
    if arm == study.experiment.rows[0].arm:
        return [*cells, "", "", ""]
    compared = study.comparison(arm)
    if compared is None:
        return [*cells, "", "", "too few seeds"]
    return [*cells, *told(compared)]


def _grid(study: Measurement) -> Iterator[str]:
    head = "| alpha | n | train | test | difference (95% interval) | p (Holm) | verdict "
    yield head + "| NLL | logit norm |"
    yield "|---" * 9 + "|"
    for arm in study.arms:
        cells = [arm.removeprefix("alpha="), *_numbers(study, arm)]
        cells += [f"{study.mean(arm, 'nll'):.3f}", f"{study.mean(arm, 'logit_norm'):.1f}"]
        yield f"| {' | '.join(cells)} |"
    yield ""


def _conditions(study: Measurement) -> Iterator[str]:
    about = study.about
    commits = sorted({row["commit"] for row in study.rows if row["commit"]})
    exponent = min(about["exponents"].values())
    least = f"{exponent:.1f} or more"
    if exponent < LEAST:
        least += f" (under {LEAST:g}, so nothing is said of the paper's equilibrium)"
    scale = " at full scale" if about["scale"] == "full" else ""
    yield (
        f"**Measured{scale} ({about['label']})**: {study.describe()}; [decay exponent]"
        f"(#{CONDITIONS}) {least}; `results/paper/{study.stem.name}.csv`, "
        f"torch {about['machine']['torch']}, commit {', '.join(commits) or 'not known'}."
    )
    yield ""
    if "tuning" in about:
        yield _tuned(about["tuning"])
    if not study.experiment.grid:
        labels = (labelled(arm, changes) for arm, changes in about.get("arms", {}).items())
        told_of = [label for label in labels if label.endswith(")")]
        if told_of:
            yield f"- What an arm has beside the baseline: {'; '.join(told_of)}."
    if about["lost"]:
        yield f"- Not as in the paper: {'; '.join(about['lost'])}."
    yield from (f"- Command: `{command}`" for command in about["commands"])
    yield ""


def _tuned(tuning: Mapping[str, Any]) -> str:
    words = ", ".join(
        f"{arm} {in_words(found['chosen'])}" + (" (edge of the grid)" if found["at_edge"] else "")
        for arm, found in tuning["arms"].items()
    )
    whom = "every arm alike" if len(tuning["arms"]) > 1 else "one arm, and the same in all"
    seeds = len(tuning["seeds"])
    how = f"on held-out training data ({seeds} seed{'s' if seeds > 1 else ''} a value)"
    return f"- `{tuning['key']}` tuned for {whom}, {how}: {words}."


def _zeroing_out(evidence: Evidence) -> Iterator[str]:
    """What became of the filters in the runs that recorded their norms."""
    studies = [each for each in evidence.measurements if each.follows_filters]
    if not studies:
        return
    yield from (
        "### Zeroing out: do filters that died come back?",
        "",
        "Means over the seeds of an arm, of the same runs; in brackets the least and the most. A "
        "filter is dead when its norm is under 1% of its own start "
        "([how that is judged](dead-filters.md)).",
        "",
        "| study | row | arm | n | filters | dead at the end | died at some time | came back |",
        "|---|---|---|---|---|---|---|---|",
    )
    for study in studies:
        for arm in study.arms:
            rows = [row for row in study.rows if row["arm"] == arm and not isnan(row["filters"])]
            cells = [study.stem.name, study.experiment.row(arm).id, arm, str(len(rows))]
            cells.append(f"{rows[0]['filters']:.0f}")
            for key in ("dead_units", "died", "came_back"):
                values = [row[key] for row in rows]
                mean = sum(values) / len(values)
                cells.append(f"{mean:.1f} ({min(values):.0f} to {max(values):.0f})")
            yield f"| {' | '.join(cells)} |"
    yield ""


# Studies that the paper does not have -------------------------------------------------------------


def _beyond(studies: Sequence[Study]) -> Iterator[str]:
    if not studies:
        return
    yield from (
        "## Beyond the tables",
        "",
        "Studies that the paper does not have: other data, equal tuning of the learning rate, and "
        "the parts of PGT one by one (`decompose`: by an exact identity PGT is a rate and a decay "
        "moved between backbone and head, see [theory](theory.md)).",
        "",
    )
    for study in studies:
        about = study.about
        yield from (f"### `{study.stem.name}`: {about['kind'].partition('-')[0]}", "")
        yield (
            f"{study.describe()}; torch {about['environment']['torch']}, commit "
            f"{about['environment']['commit']}; `results/{study.stem.name}.csv`."
        )
        yield ""
        if "tuning" in about:
            yield _tuned(about["tuning"])
        yield from (f"- Command: `{about['environment']['command']}`", "")
        head = "| arm | n | train | test | dead filters | decay exponent "
        yield head + "| difference (95% interval) | p (Holm) | verdict |"
        yield "|---" * 9 + "|"
        trial = trial_of(study)
        for arm in trial.arms:
            n = sum(row["arm"] == arm.name for row in about["rows"])
            keys = ("train_accuracy", "test_accuracy")
            dead = f"{sum(arm.dead.values()) / len(arm.dead):.1f}" if arm.dead else ""
            cells = [arm.label, str(n), *(f"{study.mean(arm.name, key):.2f}" for key in keys)]
            cells += [dead, f"{arm.exponent:.1f}"]
            each = trial.found.get(arm.name)
            cells += ("", "", "") if each is None else told(each)
            yield f"| {' | '.join(cells)} |"
        lost = Counter(row["arm"] for row in about["rows"] if row.get("diverged"))
        yield ""
        if lost:
            words = ", ".join(f"{count} of {arm}" for arm, count in lost.items())
            yield (
                "Diverged, which counts as no right answer; their filters are not counted: "
                f"{words}."
            )
            yield ""


# Where it did not help ----------------------------------------------------------------------------


def _no_help(found: Sequence[Trial]) -> Iterator[str]:
    yield from (
        "# Where PGT does not help",
        "",
        "Every comparison measured in this project of an arm with PGT, at as many epochs and the "
        "same decay, against its baseline that did not come out *better*; then PGT with fewer "
        "epochs, and PGT against something simpler. *Equivalent* means within the margin, "
        "*underpowered* that nothing was shown, *too few seeds* that nothing could be, *worse* "
        "what it says. "
        "Differences are in points of test accuracy, with a 95% t interval over seeds; conditions "
        f"and commands stand in [the reproduction]({PAGE}).",
        "",
        "The paper itself names three cases: data that a network fits to 100%, as CIFAR-10; label "
        "smoothing together with alpha 0.05; and the second layer of the network without "
        "normalisation, where more filters are zeroed out than without PGT.",
        "",
        "This page is generated: `powergrad paper page` writes it from `results/`.",
        "",
    )
    rows = [each for trial in found for each in found_in(trial) if _has_pgt(each)]
    others = [each for each in rows if each.verdict != "better"]
    if not rows:
        yield "Nothing was measured yet."
        return
    rows = counted(rows)
    better = sum(each.verdict == "better" for each in rows)
    grid = sum(each.trial.is_grid for each in rows)
    able = {each.trial.name for each in rows if each.verdict != "too few seeds"}
    yield (
        f"Of {len(rows)} comparisons ({grid} of them points of grids over alpha), "
        f"{better} came out better. Within a study p values are corrected for "
        f"its arms, but not for the number of studies: of {len(able)} that have enough seeds for a "
        f"verdict, at most {0.05 * len(able):.1f} are expected to have a false one, of either "
        "sign. Some studies share a baseline, so they are not independent; one whose runs are all "
        "in a larger one is not counted. These did not come out better:"
    )
    yield from ("", *table_of(others))
    shorter = [
        each for trial in found for each in found_in(trial) if each.arm.methods == PGT | SHORTER
    ]
    if shorter:
        yield from (
            "",
            "## With fewer epochs",
            "",
            "PGT with fewer epochs against cross-entropy with all of them, whatever came out; "
            "*equivalent* is what the paper has at 60%.",
            "",
            *table_of(shorter),
        )
    simpler = [each for each in against_controls(found) if each.verdict != "better"]
    if simpler:
        yield from (
            "",
            "## Against something simpler",
            "",
            "PGT against plain cross-entropy with less weight decay, or with as few epochs as PGT "
            "had, wherever it was not better than that. Not corrected for the number of "
            "comparisons.",
            "",
            *table_of(simpler),
        )
    yield from (
        "",
        "With AdamW, in segmentation and in a small language model, PGT did not help either: "
        "[two comparisons](integrations.md#two-comparisons).",
    )


def _has_pgt(finding: Finding) -> bool:
    """Whether it is PGT, with other methods of the paper or not, and nothing else is changed."""
    methods = finding.arm.methods or frozenset()
    return "PGT" in methods and methods <= {"PGT", "AGC", "GC", "LS"}


def _drawn_from(evidence: Evidence, figure: Figure) -> str:
    if not figure.uses:
        return "the equations and the networks themselves"
    missing, found = [], []
    for use in figure.uses:
        try:
            study = evidence.curve(use)[1] if figure.name == "metrics" else evidence.best(use)
        except MissingRunsError:
            missing.append(use)
        else:
            found.append(f"`{study.stem.name}`")
    if missing:
        return f"not measured: {', '.join(missing)}"
    return ", ".join(dict.fromkeys(found))
