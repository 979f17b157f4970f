"""The page that sets what was published beside what was measured here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from powergrad.lab.paper.cost import cost, total_hours
from powergrad.lab.paper.evidence import MARGIN, Evidence, Measurement
from powergrad.lab.paper.rows import Experiment, Row, load_paper
from powergrad.lab.run import write_atomically

__all__ = ["published_words", "write_page"]


def write_page(results: Path, path: Path) -> None:
    """Write the page from the results; the same results give the same bytes.

    Args:
        results: The folder ``results``.
        path: The file, as ``docs/reproduction.md``.
    """
    text = "\n".join(_page(Evidence(results))) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def published_words(row: Row) -> str:
    """What was printed of a row."""
    words = [f"{key} {row.published[key]:g}" for key in ("train", "test") if key in row.published]
    return ", ".join(words) or "no number printed"


def _page(evidence: Evidence) -> Iterator[str]:
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
        f"a 95% t interval; *equivalent* means within {MARGIN:g} points. "
        "A verdict of *underpowered* says that nothing was shown, in either direction.",
        "",
        f"At full scale every run of the paper once needs, in GPU hours: {needs} "
        "(from published training speeds; the runs on CIFAR-10 are not in it; "
        "`powergrad paper show ID` has the sources). "
        "`powergrad paper show ID` also has a row's recipe, the commands, where the paper "
        "disagrees with itself, and what it leaves open.",
        "",
        "This page is generated: `powergrad paper page` writes it from `results/paper/`.",
        "",
    )
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
    yield from _elsewhere(evidence)
    yield from ("## Figures", "", "| figure | shows | drawn from |", "|---|---|---|")
    for figure in paper.figures:
        source = _drawn_from(evidence, figure.uses)
        yield f"| {figure.id} `{figure.name}` | {figure.title} | {source} |"
    yield from ("", "`powergrad paper figure all --out DIR` draws them.", "")
    yield from ("## Numbers of the text", "", "| where | what | published |", "|---|---|---|")
    for claim in paper.claims:
        yield f"| {claim['where']} | {claim['what']} | {claim['value']} |"
    yield from ("", "## Where the paper disagrees with itself, or with its code", "")
    for note in paper.notes:
        yield f"- ({', '.join(note.about)}) {note.text}"
    yield from ("", "## What the paper does not say", "")
    for each in paper.unstated:
        chosen = ", ".join(f"`{key}: {value}`" for key, value in each.choice.items())
        yield f"- **{each.what}** ({', '.join(each.about)}): {each.reason}" + (
            f" Chosen: {chosen}." if chosen else ""
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
        cells = [row.id, row.arm]
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
    low, high = compared.interval
    cells.append(f"{compared.difference:+.2f} ({low:+.2f} to {high:+.2f})")
    return [*cells, f"{compared.p_adjusted:.3f}", compared.verdict]


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
    yield (
        f"**Measured ({about['label']})**: {study.describe()}; decay exponent {exponent:.1f} or "
        f"more; `results/paper/{study.stem.name}.csv`, torch {about['machine']['torch']}, "
        f"commit {', '.join(commits) or 'not known'}."
    )
    yield ""
    if "tuning" in about:
        chosen = about["tuning"]["arms"].items()
        values = ", ".join(f"{arm} {found['chosen']:g}" for arm, found in chosen)
        key = about["tuning"]["key"]
        yield f"- `{key}` tuned for every arm alike, on held-out training data: {values}."
    if about["lost"]:
        yield f"- Not as in the paper: {'; '.join(about['lost'])}."
    yield from (f"- Command: `{command}`" for command in about["commands"])
    yield ""


def _elsewhere(evidence: Evidence) -> Iterator[str]:
    """Every comparison with PGT that is not better."""
    yield from ("## Where PGT did not help here", "")
    found = False
    for study in evidence.measurements:
        for arm in study.arms:
            compared = study.comparison(arm)
            pgt = study.experiment.row(arm).recipe.loss.alpha < 1
            if compared is not None and pgt and compared.verdict != "better":
                found = True
                low, high = compared.interval
                yield (
                    f"- {study.experiment.row(arm).id} {arm} ({study.describe()}): "
                    f"{compared.difference:+.2f} ({low:+.2f} to {high:+.2f}), {compared.verdict}"
                )
    if not found:
        yield (
            "Every comparison measured was better."
            if evidence.measurements
            else "Nothing was measured yet."
        )
    yield ""


def _drawn_from(evidence: Evidence, uses: tuple[str, ...]) -> str:
    if not uses:
        return "the equations and the networks themselves"
    missing = []
    found = []
    for use in uses:
        experiment, _, arm = use.partition("/")
        studies = [each for each in evidence.of(experiment) if not arm or arm in each.arms]
        if studies:
            found.append(f"`{studies[0].stem.name}`")
        else:
            missing.append(use)
    if missing:
        return f"not measured: {', '.join(missing)}"
    return ", ".join(dict.fromkeys(found))
