"""What the results of a study mean, in sentences: the verdict, notes and advice."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence

from powergrad.lab.runs import RecipeProgram
from powergrad.lab.stats import DEFAULT, VERDICTS, Comparison, error_of_looks, least_runs
from powergrad.lab.study.definition import Study
from powergrad.lab.study.records import LeftOut, Source, Tuning
from powergrad.lab.study.results import Results
from powergrad.lab.words import short_key

MOST_ADVICE = 2
CLIPPED = 0.9  # the share of clipped units above which the reader is told
MOST_ARMS = 4  # that the title and the headline of the page name
MORE_SEEDS = f"Next: --seeds {DEFAULT} instead. It continues from the runs that are finished."
WIDER = 4  # the factor by which advice widens a range


def verdict(results: Results, *, with_numbers: bool = False) -> str:
    """The conclusion, in one sentence; for the page with the differences."""
    groups: dict[str, list[str]] = {}
    for comparison in sorted(results.comparisons, key=lambda c: VERDICTS.index(c.verdict)):
        arm = f'"{comparison.arm}"' if "," in comparison.arm else comparison.arm
        ending = comparison.ending
        if with_numbers and comparison.second is None and math.isfinite(comparison.difference):
            unit = "" if groups else f" {comparison.unit}"
            arm += f" ({comparison.signed.replace('-', '−')}{unit})"
            if ending == "not settled" and comparison.by == "mean" and not comparison.withheld:
                runs = f"{comparison.n} {comparison.counted} per arm"
                ending = f"without a verdict, because {runs} are too few"
                if math.isfinite(comparison.interval[0]):
                    ending = f"not distinguishable from {comparison.baseline} with {runs}"
        groups.setdefault(ending, []).append(arm)
    phrases = []
    for ending, arms in groups.items():
        is_long = with_numbers and len(arms) > MOST_ARMS
        listed = [arms[0], f"{len(arms) - 1} others"] if is_long else arms
        phrases.append(f"{_join(listed)} {'are' if arms[1:] else 'is'} {ending}")
    return f"Here {'; '.join(phrases)}."


def _join(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def describe_title(results: Results) -> str:
    """What was compared, and on what: the title of the page."""
    study, arms = results.study, [*(results.study.arms if results.study else results.arms)]
    others = [arm for arm in arms if arm != results.baseline] or arms
    names = [re.sub(r"\b(agc|gc|pgt)\b", lambda name: name[0].upper(), arm) for arm in others]
    title = _join(names) if len(names) <= MOST_ARMS else f"{len(names)} arms"
    if results.grid is not None:
        title = f"Values of {_join([*map(short_key, results.grid.values)])}"
    if study is None or study.program.is_foreign:
        place = study.program.title if study else results.source and results.source.file
        return f"{title} in {place}" if place else title
    about = next((row.about for row in results.rows if row.about.get("classes")), {})
    counts = [f"{sum(about['images']):,} images"] if "images" in about else []
    counts += [f"{about['classes']} classes"] if about else []
    title = "The parts of PGT" if study.kind == "decompose" else title
    return f"{title} on {study.program.data_name}{': ' * bool(counts)}{', '.join(counts)}"


def describe_scale(results: Results) -> list[str]:
    """What the baseline's value is to be compared with: guessing, and what can be seen."""
    name, parts, compared = results.metric.name, [], results.comparable()
    if (chance := results.chance(name)) is not None:
        parts.append(f"guessing: {chance:.3g}{'%' * name.endswith('accuracy')}")
    images = next((row.about["images"] for row in results.rows if "images" in row.about), None)
    parts += [f"{images[1]:,} test images"] if images else []
    ends = [c.interval for c in compared.comparisons] if compared else []
    if widths := [high - low for low, high in ends if math.isfinite(high - low)]:
        parts.append(f"differences below {min(widths) / 2:.2g} cannot be seen")
    return parts


def describe_tuning(results: Results) -> str:
    """What was tuned before the arms were compared; empty if a remark says it."""
    study, tuning = results.study, results.tuning
    if tuning is not None and tuning.repeats:
        points = len(next(iter(tuning.arms.values())).trials)
        who = "Every arm" if len(tuning.arms) > 1 else "Plain cross-entropy"
        return f"{who} was tuned: {_join([*map(short_key, tuning.keys)])}, {points} points each."
    is_told = any("tuned" in remark for remark in results.remarks)
    if study is None or study.program.is_foreign or study.kind != "compare" or is_told:
        return ""
    lr, decay = study.base.optimizer.lr, study.base.optimizer.weight_decay
    values = f"the learning rate {lr:g} and the weight decay {decay:g}"
    return f"Nothing was tuned: every arm uses {values}, unless it changes them."


def notes(results: Results) -> list[str]:
    """Notes for the reader; they are shown wherever the verdict is shown."""
    found = [*results.remarks, *(_about_source(results.source) if results.source else ())]
    found += [*_about_images(results), describe_diverged(results), *_about_runs(results)]
    found += [*_about_clipping(results), *_about_design(results)]
    return [note for note in [*found, *_about_tuning(results)] if note]


def advice(results: Results) -> list[str]:
    """Advice on what to do next, the most important first."""
    study, lines = results.study, [_widen_range(results.tuning) if results.tuning else None]
    if study is not None:
        better = [c.arm for c in results.comparisons if c.verdict == "better"]
        lines += [missing_control(study, better), _tune_first(study)]
    return [line for line in (*lines, *_settle(results)) if line][:MOST_ADVICE]


# Notes --------------------------------------------------------------------------------------------


def _about_source(source: Source) -> Iterator[str]:
    if source.guessed:
        listed = ", ".join(f"{role} = {column!r}" for role, column in source.columns.items())
        yield (
            f"The columns of {source.file} were guessed: {listed}. To choose others, use "
            "--columns arm=COLUMN seed=COLUMN and --metric COLUMN."
        )
    groups: dict[tuple[str, str], list[LeftOut]] = {}
    for run in source.left_out:
        groups.setdefault((run.arm, run.reason), []).append(run)
    counts = []
    for (arm, reason), runs in groups.items():
        s, what = "s" if len(runs) > 1 else "", "seed" if arm else "line"
        places = ", ".join(str(getattr(run, what)) for run in runs)
        whose = f" of {arm}" if arm else ""
        counts.append(f"{len(runs)} run{s}{whose} {reason} ({what}{s} {places})")
    if counts:
        yield (
            f"Left out: {'; '.join(counts)}. If such a run diverged, write nan as its "
            f"{source.columns['metric']}, so that it counts."
        )


def _about_images(results: Results) -> Iterator[str]:
    """A note about the images that a run could not read."""
    for found in (row.about["unreadable"] for row in results.rows if "unreadable" in row.about):
        names = ", ".join(map(repr, found["such as"]))
        yield f"Unreadable images, which were skipped: {found['count']}, such as {names}."
        break


def describe_diverged(results: Results) -> str:
    """A sentence about runs that count as guessing; empty if there are none."""
    name, counts = results.metric.name, []
    chance = results.chance(name)
    for arm in results.arms:
        runs = results.of_arm(arm)
        if chance is not None and (lost := sum(row.is_lost(name) for row in runs)):
            counts.append(f"{lost} of {len(runs)} runs of {arm}")
    if not counts:
        return ""
    return f"Diverged: {', '.join(counts)}. A run that diverged counts as {chance:.4g}."


def describe_failed(results: Results) -> Iterator[str]:
    """Notes about the arms with failed runs."""
    for arm in results.arms:
        runs = results.of_arm(arm)
        if failed := {row.seed: why for row in runs if (why := results.why_failed(row))}:
            seeds = ", ".join(map(str, [*failed][:6])) + (", ..." if len(failed) > 6 else "")
            reason = next(iter(failed.values())).splitlines()[0]
            yield f"{len(failed)} of {len(runs)} runs of {arm} failed (seed {seeds}): {reason}"


def _about_question(results: Results) -> Iterator[str]:
    """Notes about the noise: known, missing, or shared by runs of the same seed."""
    name, noise = results.metric.name, results.question.noise
    if constant := {name: None for c in results.comparisons for name in c.constant}:
        why = "other arms vary, so these may be stuck, for example at chance level"
        if len(constant) == len(results.arms):
            why = "the program does not use its seed"
        yield f"All runs of {' and of '.join(constant)} give the same number: {why}."
    if noise is not None:
        source = noise.source or "as given with --sigma"
        yield f"The noise of {name} is not estimated: {noise.sigma:g}, {source}."
    found = [c for c in results.comparisons if c.correlation is not None and not c.constant]
    listed = [f"{c.arm} {c.correlation:.2f}{' (in pairs)' if c.pairs else ''}" for c in found]
    if listed:
        baseline = results.baseline
        yield f"Correlation of the runs with the same seed as {baseline}'s: {', '.join(listed)}."


def _about_runs(results: Results) -> Iterator[str]:
    """Notes about the runs of a user's program."""
    name = results.metric.name
    yield from describe_failed(results)
    yield from _about_question(results)
    if results.study is None or not results.study.program.is_foreign:
        return
    repeated = [row.value(name) for row in results.repeated]
    is_seeded = not getattr(results.study.program, "unseeded", False)
    if is_seeded and len(repeated) == 2 and repeated[0] != repeated[1]:
        yield (
            f"Runs are not repeatable: the first run gave {name} {repeated[0]}, and the same run "
            f"again {repeated[1]}. So the noise between runs is not only due to the seeds."
        )


def _about_clipping(results: Results) -> Iterator[str]:
    """A note about arms whose gradients are nearly always clipped."""
    for arm in results.arms:
        rates = [r for row in results.of_arm(arm) if (r := row.value("clip_rate")) is not None]
        if rates and (rate := sum(rates) / len(rates)) > CLIPPED:
            yield (
                f"{arm} clips {100 * rate:.0f}% of the units (at the last step), so the threshold "
                "sets the size of its steps: a result of the threshold more than of the method. "
                "Tune it (--tune), or raise it (clip.agc)."
            )


def _about_design(results: Results) -> Iterator[str]:
    study, what = results.study, results.counted
    if study is None:
        if results.source is not None and results.source.earlier:
            yield _describe_unplanned(results, {*results.source.earlier, results.size})
        return
    if study.earlier:
        note = _describe_unplanned(results, {*study.earlier, study.design.last})
        yield f"{note} To plan the looks, use --{what} 8..24."
    if not study.design.is_fixed and results.arms:
        settled = [c for c in results.comparisons if c.verdict != "not settled"]
        most = max((comparison.n for comparison in results.comparisons), default=0)
        if stopped := [f"{c.arm} after {c.n}" for c in settled if c.n < most and c.target is None]:
            yield (
                f"An arm stops once it is settled: {', '.join(stopped)} {what}. It is compared "
                f"with as many {what} of {results.baseline}."
            )


def _describe_unplanned(results: Results, sizes: Collection[int]) -> str:
    looks, design = sorted(sizes), results.study.design if results.study else None
    if design is None or design.is_fixed:
        chance = f"{100 * error_of_looks(looks, max(1, len(results.arms) - 1)):.1f}%"
    else:
        chance = f"up to {100 * design.level * len(looks):g}%"
    return (
        f"The results were looked at with {' and '.join(map(str, looks))} {results.counted} "
        f"without planning it, so the probability of any false verdict is {chance}, not 5%."
    )


def _about_tuning(results: Results) -> Iterator[str]:
    tuning = results.tuning
    if tuning is None or not tuning.repeats:
        return
    keys = " and ".join(map(short_key, tuning.keys))
    if not tuning.is_unit:
        yield (
            f"Every arm was tuned once, so the verdict holds for the chosen values of {keys}, "
            "not for the methods: another tuning may choose other values. To compare the "
            "methods, use --repeats 8."
        )
        return
    edges = {arm: sum(bool(c.edges) for c in tuning.choices(arm)) for arm in tuning.arms}
    listed = ", ".join(f"{arm} {count}" for arm, count in edges.items())
    yield (
        f"Every repeat tuned {keys} independently. Choices at the edge of the range, out of "
        f"{len(tuning.repeats)}: {listed}."
    )


# Advice -------------------------------------------------------------------------------------------


def _widen_range(tuning: Tuning) -> str | None:
    """Advice to widen a range, if a value at its edge was chosen."""
    for arm in tuning.arms:
        for key in tuning.edges(arm):
            choices = tuning.choices(arm)
            values = [trial.point.get(key) for choice in choices for trial in choice.trials]
            tried = [float(value) for value in values if isinstance(value, (int, float))]
            chosen = choices[0].winner.point.get(key)
            if not tried or not isinstance(chosen, (int, float)) or min(tried) <= 0:
                continue
            low, high = min(tried), max(tried)
            is_upper = chosen * chosen > low * high
            low, high = (low, high * WIDER) if is_upper else (low / WIDER, high)
            return (
                f"Next: widen the tuning range. The chosen {short_key(key)} of {arm} is at the "
                "edge of the values that were tried, so the best value may lie beyond: --tune "
                f"{short_key(key)}={low:.2g}:{high:.2g}."
            )
    return None


def missing_control(study: Study, better: Collection[str]) -> str | None:
    """Advice to run a control, if PGT is among the `better` arms and no control was run."""
    if study.kind != "compare" or not isinstance(study.program, RecipeProgram):
        return None
    with_pgt = [arm for arm, changes in study.arms.items() if changes.get("loss.alpha", 1) < 1]
    gained = [arm for arm in with_pgt if arm in better]
    others = [changes for arm, changes in study.arms.items() if arm not in with_pgt]
    if not gained:
        return None
    optimizer, is_tuned = study.base.optimizer, "optimizer.weight_decay" in study.tuned
    own = optimizer.backbone_decay
    decays = (study.base.override(changes).optimizer.backbone_decay for changes in others)
    has_decay = optimizer.name != "adamw" and own > 0  # PGT does not affect AdamW's
    if has_decay and not is_tuned and not any(decay < own for decay in decays):
        return (
            f"Before you keep {gained[0]}: PGT multiplies the weight decay of the backbone by "
            "alpha, and that alone may help as much. To find out, add less-decay to --arms, with "
            "--tune lr."
        )
    if not any("optimizer.head.lr" in changes for changes in others):
        return (
            f"Before you keep {gained[0]}: PGT lowers the learning rate of the last layer relative "
            "to the others, and that alone may help as much. To find out, add head-lr to --arms."
        )
    return None


def _tune_first(study: Study) -> str | None:
    """Advice to tune the learning rate and the weight decay, if all arms used the same."""
    if study.kind != "compare" or study.tuned or not isinstance(study.program, RecipeProgram):
        return None
    if "optimizer.lr" in study.arms[study.baseline]:  # tuned for each arm before
        return None
    alpha = min(study.program.alpha(changes) for changes in study.arms.values())
    if not 0 < alpha < 1:
        return None
    options = study.base.optimizer
    values = {"lr": options.lr, "wd": options.weight_decay}
    ranges = [f"{key}={v * alpha:.2g}:{v / alpha:.2g}" for key, v in values.items() if v > 0]
    image = options.weight_decay / alpha  # see `Fair`
    is_image = any(c.get("optimizer.weight_decay") == image for c in study.arms.values())
    used = "Those of all arms follow from" if is_image else "All arms used those of"
    return (
        f"Next: tune the learning rate and the weight decay. {used} the recipe, {options.lr:g} and "
        f"{options.weight_decay:g}, which may suit one arm better than another. To tune them for "
        f"each arm: --tune {' '.join(ranges)} --repeats 8."
    )


def _settle(results: Results) -> Iterator[str]:
    """Advice on how to settle the open arms, after all planned runs."""
    if results.question.target is not None or results.question.second is not None:
        return  # neither the margin nor the noise of one metric decides
    if results.study is not None and results.study.design.last < least_runs(results.question.noise):
        yield MORE_SEEDS
    ended = [c for c in results.comparisons if not (c.withheld or c.is_open or c.by == "failures")]
    unsettled = [c for c in ended if c.verdict == "not settled" and math.isfinite(c.interval[0])]
    if not unsettled:
        return
    worst = max(unsettled, key=lambda comparison: comparison.sd)
    needed, most, study, what = worst.runs_needed, DEFAULT.last, results.study, results.counted
    if study is not None and study.design.is_fixed and worst.n < most and needed <= 2 * most:
        yield (
            f"Next: more {what}. About {needed} per arm would probably settle it; --{what} "
            f"{DEFAULT} --fresh starts a new study with as many as needed. Adding them to this "
            "study would increase the probability of a false verdict."
        )
        return
    is_accuracy = results.metric.name in ("test_accuracy", "train_accuracy")
    if is_accuracy and (images := _images_needed(worst, needed, results.mean(results.baseline))):
        now, more = images
        yield (
            f"Next: a larger test set. With {now} test images, the differences between runs are no "
            f"larger than chance; about {more} images would settle it with the same number of "
            f"{what}."
        )
    margin = worst.margin * math.sqrt(needed / max(worst.n, most))
    if margin > worst.margin:
        digits = 1 - math.floor(math.log10(margin))
        rounded = math.ceil(margin * 10**digits) / 10**digits
        yield (
            "Next: a larger margin, if you can accept it. The standard deviation of the runs of "
            f"one arm is {worst.sd:.2g}, so {max(worst.n, most)} {what} can settle a margin of "
            f"about {rounded:g} (--margin {rounded:g}), not {worst.margin:g}."
        )


def _images_needed(comparison: Comparison, needed: int, accuracy: float) -> tuple[int, int] | None:
    """The number of test images and a sufficient number, if the noise is due to too few images.

    If all predictions were independent, an accuracy p on N images would have the standard deviation
    sqrt(p (1 - p) / N). If runs vary no more than that, more images reduce the variation.
    """
    if not (comparison.step > 0 and 0 < accuracy < 100):
        return None
    images = round(100 / comparison.step)
    is_one_image = abs(100 / comparison.step - images) <= 0.01
    by_chance = math.sqrt(accuracy * (100 - accuracy) / images) if is_one_image else 0.0
    if not is_one_image or comparison.sd > 1.25 * by_chance or needed <= comparison.n:
        return None
    return images, math.ceil(images * needed / comparison.n / 100) * 100
