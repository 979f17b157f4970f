"""The recipe: a typed description of a run, from YAML and dotted overrides.

A recipe file contains only the values that it changes, below a header with its command, hardware
and expected result. ``base: NAME`` starts from another recipe. Every other key is a field of
:class:`Recipe`. Unknown keys are rejected with a suggestion; all errors are reported together.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from powergrad.lab.data import Datasets, fingerprint, load_data
from powergrad.lab.data.data_options import (
    BelowOne,
    Count,
    Data,
    Natural,
    NotNegative,
    Positive,
    Section,
)
from powergrad.lab.words import did_you_mean

Unit = Annotated[float, Field(ge=0, le=1)]

FORMAT = 1
RECIPES = resources.files("powergrad.lab.trainer") / "recipes"


class RecipeError(ValueError):
    """An invalid recipe or override; the message lists all errors."""


class Model(Section):
    name: Annotated[str, "resnet18, seresnet50, resnet20, timm:NAME, ..."] = "resnet8"
    width: Annotated[Count | None, "channels of the first stage"] = None
    norm: Annotated[Literal["batch", "group", "none"], "normalisation"] = "batch"
    stem: Annotated[Literal["imagenet", "small"] | None, "first layers (default: by network)"] = (
        None
    )
    head_scale: Annotated[Positive, "factor of the classifier's initial weights"] = 1.0

    def arguments(self, data: Datasets) -> dict[str, Any]:
        """The arguments of `create_model`."""
        shape = {"num_classes": len(data.classes), "in_channels": data.channels}
        return {**self.model_dump(exclude={"head_scale"}), **shape}


class Factors(Section):
    """Factors for the settings of a parameter group."""

    lr: Annotated[Positive, "factor of the learning rate"] = 1.0
    weight_decay: Annotated[NotNegative, "factor of the weight decay"] = 1.0
    eps: Annotated[Positive, "factor of Adam's eps"] = 1.0


class Optimizer(Section):
    """The optimizer; `backbone` and `head` have factors for the two parameter groups."""

    name: Annotated[Literal["sgd", "adam", "adamw"], "which optimizer"] = "sgd"
    lr: Annotated[Positive, "peak learning rate"] = 0.4
    weight_decay: Annotated[NotNegative, "weight decay"] = 5e-4
    momentum: Annotated[BelowOne, "SGD's momentum"] = 0.9
    nesterov: Annotated[bool, "Nesterov momentum"] = True
    betas: Annotated[tuple[Unit, Unit], "Adam's betas"] = (0.9, 0.999)
    eps: Annotated[Positive, "Adam's eps"] = 1e-8
    decay_all: Annotated[bool, "decay biases and normalisations too"] = True
    backbone: Factors = Factors()
    head: Factors = Factors()

    @property
    def backbone_decay(self) -> float:
        """The weight decay of all layers but the last."""
        return self.weight_decay * self.backbone.weight_decay

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> Optimizer:
        if self.name == "sgd" and self.nesterov and self.momentum == 0:
            raise ValueError("expected momentum above 0 with nesterov, but got 0")
        return self


class Schedule(Section):
    """The learning rate schedule; the rate is updated at every step."""

    name: Annotated[Literal["cosine", "step", "constant"], "its shape"] = "cosine"
    warmup_epochs: Annotated[NotNegative, "epochs of linear warm-up"] = 5.0
    warmup_start: Annotated[NotNegative, "learning rate at the first step"] = 4e-4
    milestones: Annotated[tuple[Positive, ...], "step: epochs at which it drops"] = (30, 60, 90)
    gamma: Annotated[Positive, "step: factor at each drop"] = 0.1
    floor: Annotated[NotNegative, "cosine: final learning rate"] = 0.0


class Loss(Section):
    """Cross-entropy, and the change of its backward pass."""

    alpha: Annotated[Unit, "PGT's alpha; 1 is plain cross-entropy"] = 1.0
    label_smoothing: Annotated[BelowOne, "label smoothing"] = 0.0
    smoothing: Annotated[Literal["pytorch", "paper"], "over all or the wrong classes"] = "pytorch"
    form: Annotated[
        Literal["exact", "as_published"], "the equation, or the authors' hook (needs float16)"
    ] = "exact"
    logit_scale: Annotated[Positive, "factor of the logits in the loss"] = 1.0


class Clip(Section):
    """Gradient clipping before each step, in this order; off by default."""

    value: Annotated[Positive | None, "largest absolute value of an element"] = None
    tensor_norm: Annotated[Positive | None, "largest norm of each tensor"] = None
    norm: Annotated[Positive | None, "largest norm of all gradients together"] = None
    agc: Annotated[Positive | None, "adaptive: largest ratio of gradient to weight norm"] = None
    agc_eps: Annotated[NotNegative, "AGC: lower bound of the weight norm"] = 1e-3


class Train(Section):
    epochs: Annotated[Count, "passes over the training data"] = 100
    batch_size: Annotated[Count, "examples per step, over all processes"] = 1024
    accumulate: Annotated[Count, "backward passes per step"] = 1
    precision: Annotated[
        Literal["float64", "float32", "bfloat16", "float16"],
        "precision of the forward pass; float16 with a GradScaler",
    ] = "float32"
    channels_last: Annotated[bool, "memory format of images and weights"] = False
    compile: Annotated[bool, "use torch.compile"] = False
    test_every: Annotated[Count, "epochs between tests; the last epoch is always tested"] = 1
    test_batch_size: Annotated[Count | None, "default: batch_size"] = None


class Monitor(Section):
    every: Annotated[Natural, "steps between records of filter norms; 0 is off"] = 0
    gradients: Annotated[bool, "also record the norms of gradients"] = False
    features: Annotated[bool, "also record the features before the classifier"] = False
    gains: Annotated[bool, "also record the gains of normalisations"] = False


class Machine(Section):
    """The machine. Nothing here changes the result, so it is not part of the run's key."""

    device: Annotated[str, "auto, cpu, cuda, cuda:1, ..."] = "auto"
    parallel: Annotated[
        Literal["ddp", "fsdp"], "several processes: copies of the network, or shards of it (FSDP2)"
    ] = "ddp"
    threads: Annotated[Count | None, "threads per process (default: the free cores)"] = None
    workers: Annotated[Natural, "image decoding threads per process"] = 0
    data_dir: Annotated[str | None, "folder of the data files"] = None
    fingerprint: Annotated[
        Literal["times", "sizes"],
        "folders: changed data differ in name, size or time (or size)",
    ] = "times"
    checkpoint_seconds: Annotated[NotNegative, "seconds between checkpoints"] = 60.0
    checkpoint_steps: Annotated[Count | None, "steps between checkpoints"] = None
    tensorboard: Annotated[bool, "also write TensorBoard files"] = False


class Recipe(Section):
    """The complete description of a run. The defaults are the paper's common recipe."""

    data: Data = Data()
    model: Model = Model()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    loss: Loss = Loss()
    clip: Clip = Clip()
    train: Train = Train()
    monitor: Monitor = Monitor()
    machine: Machine = Machine()
    seed: Annotated[int, Field(ge=0, lt=2**31), "seed of weights, data order and augmentation"] = 0

    @model_validator(mode="after")
    def _check_sections(self) -> Recipe:
        if faults := list(self._faults()):
            raise ValueError("\n".join(faults))
        return self

    def _faults(self) -> Iterator[str]:
        """The contradictions between sections."""
        train, warmup = self.train, self.schedule.warmup_epochs
        whole = {"compile": train.compile, "channels_last": train.channels_last}
        whole |= {"precision": train.precision == "float16"}
        if self.machine.parallel == "fsdp" and any(whole.values()):
            got = ", ".join(f"`train.{key}`" for key, used in whole.items() if used)
            yield f"Expected a recipe without {got} for `machine.parallel` fsdp, but got it."
        decay, agc = self.optimizer.backbone_decay, self.clip.agc
        if 0 < warmup >= train.epochs:
            wanted = f"less than train.epochs, {train.epochs}"
            yield f"schedule.warmup_epochs: expected {wanted}, but got {warmup:g}"
        if train.batch_size % train.accumulate:
            wanted = f"a divisor of train.batch_size, {train.batch_size}"
            yield f"train.accumulate: expected {wanted}, but got {train.accumulate}"
        if self.loss.form == "as_published" and train.precision != "float16":
            wanted = "train.precision float16 with as_published"
            yield f"loss.form: expected {wanted}, but got {train.precision}"
        if agc is not None and agc <= decay and self.optimizer.name == "sgd":
            wanted = f"more than the weight decay of the backbone, {decay:g}, which outweighs it"
            yield f"clip.agc: expected {wanted}, but got {agc}"

    @property
    def key(self) -> str:
        """The name of the run of this recipe: a hash of all values that are not defaults.

        `machine` is excluded. A new key with a neutral default does not change the names of older
        runs; a changed default needs a new `FORMAT`.
        """
        described = self.model_dump(mode="json", exclude={"machine"}, exclude_defaults=True)
        canonical = json.dumps(described, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(f"{FORMAT}:{canonical}".encode()).hexdigest()[:12]

    def value(self, key: str) -> Any:
        return dict(flatten(self.model_dump()))[key]

    def override(self, changes: Mapping[str, Any]) -> Recipe:
        """A copy of this recipe with dotted keys changed, such as ``{"loss.alpha": 0.3}``."""
        values = dict(flatten(self.model_dump())) | dict(flatten(changes))
        return _validate(values, "the overrides")

    def load_data(self) -> Datasets:
        machine = self.machine
        return load_data(self.data, data_dir=machine.data_dir, workers=machine.workers)

    def folder_fingerprint(self) -> str:
        """The fingerprint of a folder of images; empty for other data."""
        place, kind = self.machine.data_dir, self.machine.fingerprint
        return fingerprint(self.data, place, kind=kind) if self.data.is_folder else ""

    def without_paths(self) -> Recipe:
        """A copy of this recipe with folder names instead of paths, for files that are shared."""
        name = f"folder:{self.data.title}" if self.data.is_folder else self.data.name
        data = self.data.model_copy(update={"name": name})
        machine = self.machine.model_copy(update={"data_dir": None})
        return self.model_copy(update={"data": data, "machine": machine})

    def to_yaml(self) -> str:
        return yaml.safe_dump({"format": FORMAT, **self.model_dump(mode="json")}, sort_keys=False)

    @classmethod
    def from_yaml(cls, text: str, source: str) -> Recipe:
        """Read a complete recipe that :meth:`to_yaml` wrote."""
        values = _parse(text, source)
        written = values.pop("format", FORMAT)
        if written != FORMAT:
            raise RecipeError(f"{source} has format {written}; this version reads {FORMAT}.")
        return _validate(values, source)


class Tuned(Section):
    """The key `tuned` of a recipe file: settings of arms, tuned for each with the same budget."""

    alpha: Unit  # of the arms with PGT
    keys: tuple[str, ...]  # as for ``--tune``
    trials: Count  # points per arm
    seeds: Count  # per point
    arms: Mapping[str, dict[str, Any]] = Field({})
    margin: Positive | None = None  # of the accuracy, instead of the usual one


def tuned_settings(source: str) -> Tuned | None:
    """The key `tuned` of a recipe file itself, without its base."""
    values = _parse(_find(source).read_text(encoding="utf-8"), source).get("tuned")
    return None if values is None else Tuned.model_validate(values)


def describe_keys(section: type[Section] = Recipe) -> Iterator[tuple[str, str, str, Any]]:
    """Every dotted key, its meaning, its allowed values in words, and its default."""
    properties = section.model_json_schema()["properties"]
    for name, field in section.model_fields.items():
        if isinstance(field.default, Section):
            for key, meaning, allowed, default in describe_keys(type(field.default)):
                yield f"{name}.{key}", meaning, allowed, default
        else:
            meaning = next(text for text in field.metadata if isinstance(text, str))
            yield name, meaning, _allowed(properties[name]), field.default


def suggest_key(typed: str, *options: str) -> str:
    """The end of an error message about an unknown key, or option: what was meant."""
    meanings = {f"{'--' * bool(options)}{key}": text for key, text, *_ in describe_keys()}
    near = did_you_mean(typed, options)
    return near if near != "." else did_you_mean(typed, meanings, meanings=meanings)


def _allowed(schema: Mapping[str, Any]) -> str:
    """The values that a JSON schema allows, in words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_allowed, schema["anyOf"])))
    if "enum" in schema:
        return " or ".join(map(str, schema["enum"]))
    if schema["type"] == "array":
        items = schema.get("prefixItems") or [schema["items"]]
        count = f"{len(items)} of" if "prefixItems" in schema else "a list of"
        return f"{count}: {_allowed(items[0])}"
    bounds = [f"{word} {schema[key]:g}" for key, word in BOUNDS.items() if key in schema]
    return " ".join([TYPES[schema["type"]], *bounds])


TYPES = {"boolean": "true or false", "integer": "a whole number", "number": "a number"}
TYPES |= {"string": "text", "null": "null"}
BOUNDS = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "up to"}
BOUNDS |= {"exclusiveMaximum": "below"}


class _Loader(yaml.SafeLoader):
    """Also reads ``1e-3`` as a number, as YAML 1.2 does."""


_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def recipe_names() -> list[str]:
    return sorted(file.name.removesuffix(".yaml") for file in RECIPES.iterdir() if file.is_file())


def load_recipe(source: str | Path, changes: Mapping[str, Any] | None = None) -> Recipe:
    """Load a recipe by name or from a YAML file, with dotted `changes`.

    Example:
        >>> load_recipe("digits", {"loss.alpha": 0.5}).loss.alpha
        0.5
    """
    own, given = _read(str(source)), dict(flatten(changes or {}))
    values = own | given
    epochs, warmup = values.get("train.epochs"), values.get("schedule.warmup_epochs", 5.0)
    if isinstance(epochs, int) and "schedule.warmup_epochs" not in given and 0 < epochs <= warmup:
        part = warmup / own.get("train.epochs", 100)
        values["schedule.warmup_epochs"] = round(min(part, 0.5) * epochs, 6)
        shorter = f"{values['schedule.warmup_epochs']:g} epochs, as {epochs} are trained"
        print(f"The warm-up is shortened from {warmup:g} to {shorter}.", file=sys.stderr)
    return _validate(values, f"recipe {str(source)!r}")


def default_recipe(changes: Mapping[str, Any]) -> str:
    """The name of the recipe for ``data.name`` in `changes`, if no recipe was given."""
    name = str(changes.get("data.name", ""))
    if name.startswith("folder:"):
        return "images"
    return name if name in recipe_names() else "noisy-digits"


def header(name: str) -> str:
    """The comment at the top of a recipe that comes with the package."""
    lines = _find(name).read_text().splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    return "\n".join(line.removeprefix("#").strip() for line in comment)


def parse_overrides(tokens: Sequence[str]) -> dict[str, Any]:
    """Dotted keys from a command line: ``--loss.alpha 0.3``, ``--loss.alpha=0.3``, ``seed=1``."""
    changes: dict[str, Any] = {}
    remaining = iter(tokens)
    for token in remaining:
        key, equals, text = token.removeprefix("--").partition("=")
        if not equals:
            text = next(remaining, None) if token.startswith("--") else None
        if text is None:
            wanted = "overrides as `--key value` or `key=value`"
            raise RecipeError(f"Expected {wanted}, but got {token!r}.")
        try:
            changes[key] = yaml.load(text, _Loader)
        except yaml.YAMLError:
            changes[key] = text
    return changes


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted keys of nested values: ``{"loss": {"alpha": 1}}`` has ``loss.alpha``."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values from dotted keys: the inverse of :func:`flatten`."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        section = nested
        for name in path:
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                raise RecipeError(f"Expected {name!r} or keys in it, but got both: {key!r}.")
        section[last] = value
    return nested


def _find(source: str) -> Any:
    """The file of a recipe that comes with the package, or the user's file."""
    path = Path(source)
    if path.is_file():
        return path
    if source not in recipe_names():
        got = f"{source!r}{did_you_mean(source, recipe_names())}"
        if path.is_dir():
            got = f"the folder {source!r}; for its images, use --data.name folder:{source}"
        raise RecipeError(f"Expected the name of a recipe or a YAML file, but got {got}")
    return RECIPES / f"{source}.yaml"


def _read(source: str, readers: tuple[str, ...] = ()) -> dict[str, Any]:
    """The dotted values of a recipe file, after those of its base."""
    path = _find(source)
    name = str(path)
    if name in readers:
        raise RecipeError(f"The recipe {source!r} is its own `base`.")
    values = _parse(path.read_text(encoding="utf-8"), name)
    base, *_ = (values.pop(key, None) for key in ("base", "format", "tuned"))
    if isinstance(path, Path) and (path.parent / str(base)).is_file():
        base = path.parent / str(base)
    inherited = {} if base is None else _read(str(base), (*readers, name))
    return inherited | dict(flatten(values))


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        values = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise RecipeError(f"{source} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise RecipeError(f"{source} has no keys and values.")
    return values


def _validate(values: Mapping[str, Any], source: str) -> Recipe:
    """The recipe of dotted or nested values; all errors are reported together."""
    try:
        return Recipe.model_validate(nest(values))
    except ValidationError as invalid:
        faults = [fault for error in invalid.errors() for fault in _explain(error)]
        count = f"{len(faults)} errors" if len(faults) > 1 else "an error"
        raise RecipeError("\n  ".join([f"Found {count} in {source}:", *faults])) from None


def _explain(error: Any) -> Iterable[str]:
    """A pydantic error as lines: the dotted key, what was expected, and what was given."""
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        inside = flatten(error["input"], f"{key}.") if isinstance(error["input"], dict) else ()
        for name in [name for name, _ in inside] or [key]:
            yield f"{name}: unknown key{suggest_key(name)}"
    elif error["type"] == "value_error":
        for line in str(error["ctx"]["error"]).splitlines():
            yield f"{key}: {line}" if key else line
    else:
        wanted = error["msg"].removeprefix("Input should be ").removeprefix("a valid ")
        yield f"{key}: expected {wanted}, but got {error['input']!r}"
