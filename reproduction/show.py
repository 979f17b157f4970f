"""The paper in the terminal: the list of all items, and one item in full."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from rich.table import Table
from rich.text import Text

from powergrad.lab.stats import format_signed
from powergrad.lab.trainer.recipe import nest
from reproduction.evidence import Evidence, small_command
from reproduction.published import Experiment, Figure, Row, Use, changes_of, gpu_hours, load_paper
from reproduction.trials import Trial, verdict_of


def paper_table(evidence: Evidence) -> Table:
    """A table of every table row and figure: id, published numbers, measured results."""
    paper = load_paper()
    head = ("id", "what", "arm", "published (%)", "measured here (decay / paper's): test (%)")
    table = Table(*head, title=paper.title, title_justify="left")
    for item, experiment in paper.items().items():
        trials = evidence.of(Use(experiment.id))
        group = "" if item == experiment.id else f" ({experiment.id})"
        cells = (item, experiment.title + group)
        if experiment.grid:
            counts = [f"{trial.label}: {len(trial.results.rows)} runs" for trial in trials]
            published = experiment.baseline.published_text
            lines = [(f"{len(experiment.grid)} alphas", published, counts)]
        else:
            rows = [row for row in experiment.rows if row.id == item]
            lines = [(row.arm, row.published_text, _measured(trials, row)) for row in rows]
        for arm, published, measured in lines:
            words = (*cells, arm, published, "\n".join(measured) or "-")
            table.add_row(*map(Text, words))
            cells = ("", "")
    for figure in paper.figures:
        missing = ", ".join(map(str, evidence.missing(figure.uses)))
        state = f"needs {missing}" if missing else "can be drawn" if figure.uses else "needs no run"
        table.add_row(figure.id, Text(figure.title), figure.name, "figure", Text(state))
    return table


def _measured(trials: Sequence[Trial], row: Row) -> list[str]:
    """The result of each replica for a row, as short text."""
    lines = []
    for trial in trials:
        if values := trial.results.values(row.arm):
            mean = trial.results.mean(row.arm)
            decay = trial.recipe.optimizer.weight_decay / row.recipe.optimizer.weight_decay
            words = f"{trial.label} ({decay:.2g}x): {mean:.2f} (n = {len(values)})"
            if comparison := trial.comparisons.get(row.arm):
                words += f", {format_signed(comparison.difference)}, {verdict_of(comparison)}"
            lines.append(words)
    return lines


def item_in_words(item: str, evidence: Evidence) -> str:
    """A description of an item: recipe, published numbers, commands, cost, open questions."""
    paper = load_paper()
    figure = paper.figure(item)
    if figure is not None:
        lines = [*_figure(figure, evidence)]
    else:
        lines = [*_rows(item, paper.find(item), evidence)]
    notes, unstated = paper.about(item)
    if notes:
        lines.append("\nWhere the paper disagrees with itself or its code, or leaves a doubt:")
        lines += [f"  - {note.text}" for note in notes]
    if unstated:
        lines.append("\nUnstated in the paper:")
    for choice in unstated:
        chosen = f" [{_pairs(choice.choice)}]" if choice.choice else ""
        lines.append(f"  - {choice.what}. {choice.reason}{chosen}")
    return "\n".join(lines)


def _figure(figure: Figure, evidence: Evidence) -> Iterator[str]:
    yield f"{figure.id} {figure.name}: {figure.title}\n"
    yield f"Draw it:\n  python -m reproduction figure {figure.name} --out figures"
    if figure.uses:
        yield f"\nIt shows runs of {', '.join(map(str, figure.uses))}."
    for use in evidence.missing(figure.uses):
        yield f"  missing: {use}\n    {small_command(use)}"


def _rows(item: str, experiment: Experiment, evidence: Evidence) -> Iterator[str]:
    rows = experiment.own_rows(item)
    first, others = rows[0], rows[1:]
    base = first.recipe
    yield f"{item} ({experiment.where}): {experiment.title}\n\nPublished (%):"
    if experiment.grid:
        yield f"  all: {first.published_text}"
    else:
        yield from (f"  {row.arm}: {row.published_text}" for row in rows)
    first_arm = f", of {first.arm}" if others else ""
    yield f"\nRecipe, as the paper states it{first_arm}:\n{_indented(first.stated)}"
    if first.chosen:
        yield f"Chosen here, because the paper does not state it:\n{_indented(first.chosen)}"
    if others:
        yield "Changes of the others:"
        yield from (f"  {row.arm}: {_pairs(changes_of(row.recipe, base))}" for row in others)
    hours = gpu_hours(row.recipe for row in rows)
    yield f"\nGPU hours of training ({len(rows)} run{'s' if others else ''}), by published speeds:"
    yield from (f"  {gpu}: {value:.1f}" for gpu, value in hours.items())
    where = "" if base.data.name == "cifar10" else " --data folder:/path/to/imagenet"
    parts = base.train.batch_size // 256
    spread = f" --train.accumulate {parts}" if parts > 1 else ""
    yield "\nOn one machine with one GPU:"
    yield f"  python -m reproduction run {item}{where}{spread} --machine.workers 8"
    yield "\nOn four GPUs, one arm at a time:"
    for row in rows:
        arm = f" --arm {shlex.quote(row.arm)}" if others else ""
        yield (
            "  torchrun --standalone --nproc-per-node=4 -m reproduction run "
            f"{item}{arm}{where} --machine.workers 8"
        )
    yield f"\nScaled down, on this machine:\n  python -m reproduction run {item} --scale small"
    for trial in evidence.of(Use(experiment.id)):
        yield f"\nMeasured: {trial.arms[0].measured_on}"
        yield from (f"  {row.arm}: {words}" for row in rows for words in _measured([trial], row))


def _pairs(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in changes.items())


def _indented(changes: Mapping[str, Any]) -> str:
    text = yaml.safe_dump(nest(changes), sort_keys=False)
    return "\n".join(f"  {line}" for line in text.splitlines())
