"""The definition of a study: a program, arms, seeds and a metric."""

from __future__ import annotations

import enum
import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from powergrad.lab.files import write_text
from powergrad.lab.jobs import Changes, Job, Program, RecipeProgram, program_from_dict
from powergrad.lab.stats import Design, check_positive, parse_runs
from powergrad.lab.study.metrics import METRICS, Metric, saved_metric
from powergrad.lab.trainer.recipe import Recipe, RecipeError
from powergrad.lab.trainer.run_folder import Run, RunError
from powergrad.lab.words import short_key

FORMAT = 3
FILE = "study.yaml"


class StudyKind(str, enum.Enum):
    """The kind of a study."""

    COMPARE = "compare"
    SWEEP = "sweep"
    DECOMPOSE = "decompose"
    TUNE = "tune"


def again(job: Job) -> Job:
    """The same run in another folder."""
    return replace(job, name=f"again/{job.name}")


def read_kind(values: Mapping[str, Any]) -> tuple[StudyKind, tuple[str, ...]]:
    """The kind and the tuned keys in the file of a study; format 1 had both in one string."""
    kind, _, tuned = str(values["kind"]).partition("-tuned-")
    return StudyKind(kind), (tuned,) if tuned else tuple(values.get("tuned", ()))


@dataclass(frozen=True)
class Study:
    """The definition of a study.

    A unit of the comparison is a run with one seed. With `finals`, it is a repeat: one independent
    tuning, whose best settings are then run with `finals` new seeds.

    Attributes:
        kind: The kind of study.
        program: The program of every run.
        arms: The changes of each arm; the first is the baseline.
        design: The numbers of units per arm at which the results are tested.
        metric: The metric that is compared at the end of each run.
        margin: The largest difference that does not matter.
        first_seed: The first seed.
        finals: The number of seeds per repeat; 0 if a unit is a run.
        tuned: The keys that are tuned for every arm.
        tuning: The settings of the tuning, as plain values. A study cannot be continued with
            another tuning.
        chosen: The values that a single tuning chose for each arm.
        earlier: The sizes at which the results were looked at before without planning it.
    """

    kind: StudyKind
    program: Program
    arms: Mapping[str, Changes]
    design: Design
    metric: Metric = METRICS["test_accuracy"]
    margin: float = 0.5
    first_seed: int = 0
    finals: int = 0
    tuned: tuple[str, ...] = ()
    tuning: Mapping[str, Any] = field(default_factory=dict)
    chosen: Mapping[str, Changes] = field(default_factory=dict)
    earlier: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_positive(self.margin, "margin")
        # Arms with their own tuned keys may have equal changes.
        own = self.tuning.get("own", {})
        self.program.check_arms({arm: c for arm, c in self.arms.items() if arm not in own})

    @property
    def baseline(self) -> str:
        """The arm with which the others are compared."""
        return next(iter(self.arms))

    @property
    def base(self) -> Recipe:
        """The recipe that every arm changes."""
        if not isinstance(self.program, RecipeProgram):
            raise TypeError(f"Expected a study of a recipe, but got {self.program.title}.")
        return self.program.base

    @property
    def name(self) -> str:
        """A folder name that depends on the kind and the program."""
        parts = [self.kind.value, *(["tuned", *map(short_key, self.tuned)] if self.tuned else [])]
        parts += ["repeats"] if self.finals else []
        kind = "-".join(parts)
        digest = hashlib.sha256(f"{kind}:{self.program.key}".encode()).hexdigest()[:8]
        data = "".join(c if c.isalnum() else "-" for c in self.program.data_name)
        return f"{kind}-{data}-{digest}"

    @property
    def seeds(self) -> range:
        """Every seed that the study may need."""
        return self.seeds_of(range(self.design.last))

    def seeds_of(self, units: range) -> range:
        """The seeds of some units."""
        size = self.finals or 1
        return range(self.first_seed + size * units.start, self.first_seed + size * units.stop)

    def unit_of(self, seed: int) -> int:
        """The unit that a seed belongs to: the seed itself, or the number of its repeat."""
        return (seed - self.first_seed) // self.finals if self.finals else seed

    def settings(self, arm: str) -> dict[str, Any]:
        """The changes of an arm, with the values that were chosen for it."""
        return {**self.arms[arm], **self.chosen.get(arm, {})}

    def jobs(self, units: range | None = None) -> dict[tuple[str, int], Job]:
        """The runs of every arm; seeds are the outer loop, so that all arms advance together."""
        return {
            (arm, seed): self.program.job(arm, self.settings(arm), seed)
            for seed in (self.seeds if units is None else self.seeds_of(units))
            for arm in self.arms
        }

    def claim(self, folder: Path) -> Study:
        """Write the definition to `folder`, or continue the study in it.

        Arms may be added; they are then compared together with the earlier ones. The number of
        seeds may change too; the notes of the results state how this affects the error.
        """
        study = self
        if (folder / FILE).exists():
            study = self._continuing(folder)
        folder.mkdir(parents=True, exist_ok=True)
        values = {
            "format": FORMAT,
            "kind": study.kind.value,
            "tuned": list(study.tuned),
            **study.program.to_dict(),
            "arms": {arm: dict(changes) for arm, changes in study.arms.items()},
            "seeds": str(study.design),
            "first_seed": study.first_seed,
            "seeds_per_repeat": study.finals,
            "tuning": dict(study.tuning),
            "chosen": {arm: dict(changes) for arm, changes in study.chosen.items()},
            "looked_at": list(study.earlier),
            "metric": study.metric.name,
            "better": study.metric.better,
            "margin": study.margin,
        }
        write_text(folder / FILE, yaml.safe_dump(values, sort_keys=False))
        return study

    def _continuing(self, folder: Path) -> Study:
        path = folder / FILE
        try:
            earlier = Study.load(folder)
        except RunError:
            raise RecipeError(
                f"Expected {str(path)!r} to be a study, but got another file."
            ) from None
        is_same = (earlier.kind, earlier.tuned, earlier.finals) == (
            self.kind,
            self.tuned,
            self.finals,
        )
        is_same = is_same and (not earlier.tuning or dict(earlier.tuning) == dict(self.tuning))
        before, now = earlier.program.to_dict(), self.program.to_dict()
        data_before, data_now = (p.pop("data_fingerprint", "") for p in (before, now))
        if not is_same or before != now:
            raise RecipeError(
                f"Expected {str(folder)!r} to hold this study, but got one of another program "
                "or tuning; choose another --name."
            )
        for arm, changes in self.arms.items():
            if arm in earlier.arms and dict(earlier.arms[arm]) != dict(changes):
                raise RecipeError(
                    f"Expected the arm {arm!r} of {str(folder)!r} to change {dict(changes)}, but "
                    f"got {dict(earlier.arms[arm])}; choose another --name."
                )
        looked, design = set(earlier.earlier), self.design
        was_shown = (folder / "study.json").exists()
        if data_before and data_before != data_now:  # there are no results for these data yet
            self._put_aside(folder, data_before)
            looked = set()
        elif earlier.design.last == design.last:  # keep earlier looks, such as at a time limit
            looks = tuple(sorted({*earlier.design.looks, *design.looks}))
            design = replace(design, looks=looks)
        elif was_shown:
            looked.add(earlier.design.last)
        return replace(
            self,
            design=design,
            arms={**earlier.arms, **self.arms},
            chosen={**earlier.chosen, **self.chosen},
            earlier=tuple(sorted(looked - {self.design.last})),
        )

    def _put_aside(self, folder: Path, earlier: str) -> None:
        """Rename the results of data that have changed since, and tell the user."""
        for name in ("study.json", "study.csv"):
            path = folder / name
            if path.exists():
                path.rename(path.with_stem(f"study-{earlier.partition(':')[2][:8]}"))
        print(
            f"{self.program.changing} since the runs in {folder} were made: all runs are repeated, "
            "and the earlier ones are not used.",
            file=sys.stderr,
        )

    @classmethod
    def load(cls, folder: Path) -> Study:
        """Load the study in `folder`."""
        try:
            values = yaml.safe_load((folder / FILE).read_text(encoding="utf-8"))
            if values.get("format", 1) > FORMAT:
                raise ValueError(
                    f"format {values['format']}, which needs a newer version of powergrad"
                )
            kind, tuned = read_kind(values)
            name = values.get("metric", "test_accuracy")
            margin = values.get("margin", METRICS[name].margin if name in METRICS else None)
            metric = saved_metric(name, values.get("better"), margin)
            if isinstance(values.get("seeds"), str):
                first, design = values["first_seed"], Design(parse_runs(values["seeds"]))
            else:  # formats 1 and 2: a fixed number of seeds, in format 1 those of the runs
                seeds = values["seeds"] if "seeds" in values else _seeds_of_runs(folder)
                first, design = min(seeds, default=0), Design((max(2, len(seeds)),))
            arms, chosen = values["arms"], values.get("chosen", {})
            if "chosen" not in values:  # formats 1 and 2: among the changes of the arm
                chosen = {a: {key: c[key] for key in tuned if key in c} for a, c in arms.items()}
                arms = {a: {k: v for k, v in c.items() if k not in tuned} for a, c in arms.items()}
            return cls(
                kind,
                program_from_dict(values),
                arms,
                design,
                metric,
                margin,
                first,
                values.get("seeds_per_repeat", 0),
                tuned,
                values.get("tuning", {}),
                chosen,
                tuple(values.get("looked_at", ())),
            )
        except (OSError, yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise RunError(f"Expected {str(folder)!r} to hold a study, but got: {error}") from None


def _seeds_of_runs(folder: Path) -> list[int]:
    seeds = set()
    for config in folder.glob("*/config.yaml"):
        try:
            seeds.add(Run(config.parent).recipe().seed)
        except (RunError, RecipeError):
            continue  # the page lists unreadable runs
    return sorted(seeds)
