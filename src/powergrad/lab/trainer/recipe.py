"""The recipe: a typed description of a run, from YAML and dotted overrides.

A recipe file contains only the values that it changes, below a header with its command, hardware
and expected result. ``base: NAME`` starts from another recipe. Every other key is a field of
:class:`Recipe`. Unknown keys are rejected with a suggestion; all errors are reported together.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from powergrad.lab.words import did_you_mean

FORMAT = 1
RECIPES = resources.files("powergrad.lab.trainer") / "recipes"

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Unit = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Natural = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Range = tuple[Positive, Positive]


class RecipeError(ValueError):
    """An invalid recipe or override; the message lists all errors."""


# The keys of a recipe -----------------------------------------------------------------------------
# `powergrad train --keys` prints the text in the annotation of each field.


class Section(BaseModel):
    """A part of a recipe: immutable, and without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class Data(Section):
    """The data and their augmentation."""

    name: Annotated[str, "digits, fashion-mnist, cifar10 or folder:PATH"] = "digits"
    size: Annotated[Count | None, "side of an image (default: as stored; folders: 224)"] = None
    crop_padding: Annotated[Natural, "pad by this many pixels, then crop at random"] = 0
    flip: Annotated[bool, "mirror at random"] = False
    scale: Annotated[Range, "folders: range of the random crop's area, as fractions"] = (0.08, 1.0)
    ratio: Annotated[Range, "folders: range of the random crop's aspect ratio"] = (3 / 4, 4 / 3)
    test_crop: Annotated[Share, "folders: side of the centre crop in tests, as a fraction"] = 0.875
    mixup: Annotated[NotNegative, "mixup's Beta parameter; 0 is off"] = 0.0
    cutmix: Annotated[NotNegative, "cutmix's Beta parameter; 0 is off"] = 0.0
    bad_images: Annotated[Literal["refuse", "skip"], "what to do with unreadable images"] = "refuse"
    hold_out: Annotated[BelowOne, "test on this fraction of the training data instead"] = 0.0
    groups: Annotated[
        str | None,
        "folders: regular expression; images whose paths have the same match (of its first group, "
        "if any) are held out together; no effect if hold_out is 0",
    ] = None
    limit: Annotated[Count | None, "use only this many training examples"] = None

    @model_validator(mode="before")
    @classmethod
    def _made_for(cls, values: Any) -> Any:
        """Check ``only``, with which a recipe file names the data that it is made for.

        `data.name` must start with it, unless it is ``any``. It is not stored: a run does not
        depend on it.
        """
        if not isinstance(values, Mapping) or "only" not in values:
            return values
        rest = {key: value for key, value in values.items() if key != "only"}
        only, name = str(values["only"]), str(rest.get("name", ""))
        if only == "any" or name.startswith(only):
            return rest
        if not name:
            raise ValueError(
                f"expected the data that this recipe is made for, `--data.name {only}"
                f"{'PATH' if only.endswith(':') else ''}`, but got none"
            )
        other = "; for photographs, use the recipe `images`" if ":" in name else ""
        raise ValueError(
            f"expected {only}{'PATH' if only.endswith(':') else ''}, for which this recipe is "
            f"made, but got {name!r}{other}; to use this recipe anyway, add `--data.only any`"
        )

    @property
    def title(self) -> str:
        """The name of the data for display; for a folder, its name without the path.

        Example:
            >>> Data(name="folder:/home/ann/photos/").title, Data(name="digits").title
            ('photos', 'digits')
        """
        if not self.name.startswith("folder:"):
            return self.name
        path = Path(self.name.removeprefix("folder:")).expanduser()
        return path.name if path.name not in ("", "..") else path.resolve().name

    @field_validator("groups")
    @classmethod
    def _groups_are_a_pattern(cls, groups: str | None) -> str | None:
        try:
            re.compile(groups or "")
        except re.error as error:
            raise ValueError(
                f"expected a regular expression, but got {groups!r}: {error}"
            ) from None
        return groups

    @model_validator(mode="after")
    def _groups_need_names(self) -> Data:
        if self.groups is not None and not self.name.startswith("folder:"):
            raise ValueError(
                f"expected no groups for {self.name}, whose images have no names, but got "
                f"{self.groups!r}"
            )
        return self


class Model(Section):
    """The network."""

    name: Annotated[str, "resnet18, seresnet50, resnet20, timm:NAME, ..."] = "resnet8"
    width: Annotated[Count | None, "channels of the first stage"] = None
    norm: Annotated[Literal["batch", "group", "none"], "normalisation"] = "batch"
    stem: Annotated[
        Literal["imagenet", "small"] | None, "first layers (default: depends on the network)"
    ] = None
    zero_init_residual: Annotated[bool, "initialise the last gain of each block to zero"] = False
    head_scale: Annotated[Positive, "factor of the classifier's initial weights"] = 1.0


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
    alpha_schedule: Annotated[
        Literal["constant", "linear", "cosine"], "constant alpha, or its way to 1 over the epochs"
    ] = "constant"
    label_smoothing: Annotated[BelowOne, "label smoothing"] = 0.0
    smoothing: Annotated[
        Literal["pytorch", "paper"], "smooth over all classes, or over the wrong ones only"
    ] = "pytorch"
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
    """Epochs, batches and precision."""

    epochs: Annotated[Count, "passes over the training data"] = 100
    batch_size: Annotated[Count, "examples per step, over all processes"] = 1024
    accumulate: Annotated[Count, "backward passes per step"] = 1
    precision: Annotated[
        Literal["float64", "float32", "bfloat16", "float16"],
        "precision of the forward pass; float16 with a GradScaler",
    ] = "float32"
    ema: Annotated[float | None, Field(gt=0, lt=1), "decay of averaged weights"] = None
    channels_last: Annotated[bool, "memory format of images and weights"] = False
    compile: Annotated[bool, "use torch.compile"] = False
    test_every: Annotated[Count, "epochs between tests; the last epoch is always tested"] = 1
    test_batch_size: Annotated[Count | None, "default: batch_size"] = None


class Monitor(Section):
    """The recording of filter norms."""

    every: Annotated[Natural, "steps between records of filter norms; 0 is off"] = 0
    gradients: Annotated[bool, "also record the norms of gradients"] = False
    features: Annotated[bool, "also record the features before the classifier"] = False
    gains: Annotated[bool, "also record the gains of normalisations"] = False


class Machine(Section):
    """The machine. Nothing here changes the result, so it is not part of the run's key."""

    device: Annotated[str, "auto, cpu, cuda, cuda:1, ..."] = "auto"
    threads: Annotated[Count | None, "threads per process"] = None
    workers: Annotated[Natural, "image decoding processes per process"] = 0
    data_dir: Annotated[str | None, "folder of the data files"] = None
    fingerprint: Annotated[
        Literal["times", "sizes", "contents"],
        "folders: detect changed data by name, size and time, by name and size, or by content",
    ] = "times"
    checkpoint_seconds: Annotated[NotNegative, "seconds between checkpoints"] = 60.0
    checkpoint_steps: Annotated[Count | None, "steps between checkpoints"] = None
    keep_best: Annotated[bool, "keep the weights with the best test accuracy"] = True
    tensorboard: Annotated[bool, "also write TensorBoard files"] = False


class Recipe(Section):
    """The complete description of a run. The defaults are the paper's common recipe.

    Example:
        >>> recipe = Recipe.model_validate({"loss": {"alpha": 0.3}, "seed": 4})
        >>> recipe.loss.alpha, recipe.optimizer.lr
        (0.3, 0.4)
        >>> recipe.override({"optimizer.lr": 0.1}).optimizer.lr
        0.1
    """

    data: Data = Data()
    model: Model = Model()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    loss: Loss = Loss()
    clip: Clip = Clip()
    train: Train = Train()
    monitor: Monitor = Monitor()
    machine: Machine = Machine()
    seed: Annotated[
        int, Field(ge=0, lt=2**31), "seed of initialisation, data order and augmentation"
    ] = 0

    @model_validator(mode="after")
    def _sections_agree(self) -> Recipe:
        data, model, train, warmup = self.data, self.model, self.train, self.schedule.warmup_epochs
        decay, agc = self.optimizer.backbone_decay, self.clip.agc
        checks = [
            (
                0 < warmup >= train.epochs,
                f"schedule.warmup_epochs: expected less than train.epochs, {train.epochs}, but got "
                f"{warmup:g}",
            ),
            (
                train.batch_size % train.accumulate,
                f"train.accumulate: expected a divisor of train.batch_size, {train.batch_size}, "
                f"but got {train.accumulate}",
            ),
            (
                data.mixup and data.cutmix,
                "data.cutmix: expected 0 if data.mixup is given, but got both",
            ),
            (
                model.name.startswith("timm:") and model.norm != "batch",
                "model.norm: expected the default for a timm model, which has its own "
                f"normalisation, but got {model.norm}",
            ),
            (
                self.loss.form == "as_published" and train.precision != "float16",
                "loss.form: expected train.precision float16 with as_published, which is correct "
                f"at one loss scale only, but got {train.precision}",
            ),
            (
                agc is not None and agc <= decay and self.optimizer.name == "sgd",
                f"clip.agc: expected more than optimizer.weight_decay of the backbone, {decay:g}, "
                "which would otherwise outweigh every gradient until all weights vanish, but got "
                f"{agc}",
            ),
        ]
        if faults := [fault for is_wrong, fault in checks if is_wrong]:
            raise ValueError("\n".join(faults))
        return self

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
        """The value of a dotted key."""
        values = dict(flatten(self.model_dump()))
        if key not in values:
            raise RecipeError(f"Expected a known key, but got {key!r}{did_you_mean(key, values)}")
        return values[key]

    def override(self, changes: Mapping[str, Any]) -> Recipe:
        """A copy of this recipe with dotted keys changed, such as ``{"loss.alpha": 0.3}``."""
        return _validate(_merge(self.model_dump(), nest(changes)), "the overrides")

    def without_paths(self) -> Recipe:
        """A copy of this recipe with folder names instead of paths, for files that are shared."""
        folder = f"folder:{self.data.title}" if self.data.name.startswith("folder:") else None
        data = self.data.model_copy(update={"name": folder or self.data.name})
        machine = self.machine.model_copy(update={"data_dir": None})
        return self.model_copy(update={"data": data, "machine": machine})

    def to_yaml(self) -> str:
        """The complete recipe as YAML."""
        return yaml.safe_dump({"format": FORMAT, **self.model_dump(mode="json")}, sort_keys=False)

    @classmethod
    def from_yaml(cls, text: str, source: str) -> Recipe:
        """Read a complete recipe that :meth:`to_yaml` wrote."""
        values = _parse(text, source)
        written = values.pop("format", FORMAT)
        if not isinstance(written, int) or written > FORMAT:
            raise RecipeError(
                f"Expected {source} to have format {FORMAT} or earlier, but got {written}; a "
                "newer version of powergrad can read it."
            )
        return _validate(values, source)


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


def _allowed(schema: Mapping[str, Any]) -> str:
    """The values that a JSON schema allows, in words."""
    if "anyOf" in schema:
        parts = [_allowed(part) for part in schema["anyOf"]]
        return " or ".join(dict.fromkeys(parts))
    if "enum" in schema:
        return " or ".join(map(str, schema["enum"]))
    if schema["type"] == "array":
        items = schema.get("prefixItems") or [schema["items"]]
        count = f"{len(items)} of" if "prefixItems" in schema else "a list of"
        return f"{count}: {_allowed(items[0])}"
    words = {
        "boolean": "true or false",
        "integer": "a whole number",
        "number": "a number",
        "string": "text",
        "null": "null",
    }[schema["type"]]
    limits = {
        "minimum": "from",
        "exclusiveMinimum": "above",
        "maximum": "up to",
        "exclusiveMaximum": "below",
    }
    bounds = [f"{limits[key]} {schema[key]:g}" for key in limits if key in schema]
    return " ".join([words, *bounds])


# Recipes from files and command lines -------------------------------------------------------------


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(file.name.removesuffix(".yaml") for file in RECIPES.iterdir() if file.is_file())


def load_recipe(source: str | Path, changes: Mapping[str, Any] | None = None) -> Recipe:
    """Load a recipe by name or from a YAML file, with dotted `changes`.

    Example:
        >>> load_recipe("digits", {"loss.alpha": 0.5}).loss.alpha
        0.5
    """
    values = _merge(_read(str(source), ()), nest(changes or {}))
    return _validate(values, f"recipe {str(source)!r}")


def default_recipe(changes: Mapping[str, Any]) -> str:
    """The name of the recipe for ``data.name`` in `changes`, if no recipe was given.

    Example:
        >>> default_recipe({"data.name": "folder:photos"}), default_recipe({"data.name": "cifar10"})
        ('images', 'cifar10')
        >>> default_recipe({})
        'digits'
    """
    name = str(changes.get("data.name", ""))
    if name.startswith("folder:"):
        return "images"
    return name if name in recipe_names() else "digits"


def header(name: str) -> str:
    """The comment at the top of a recipe that comes with the package."""
    lines = _find(name).read_text().splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    return "\n".join(line.removeprefix("#").strip() for line in comment)


def parse_overrides(tokens: Sequence[str]) -> dict[str, Any]:
    """Dotted keys from a command line: ``--loss.alpha 0.3``, ``--loss.alpha=0.3``, ``seed=1``.

    Example:
        >>> parse_overrides(["--loss.alpha", "0.3", "train.compile=true", "--seed=4"])
        {'loss.alpha': 0.3, 'train.compile': True, 'seed': 4}
    """
    changes: dict[str, Any] = {}
    remaining = iter(tokens)
    for token in remaining:
        key, equals, text = token.removeprefix("--").partition("=")
        if not equals:
            value = next(remaining, None) if token.startswith("--") else None
            if value is None:
                raise RecipeError(
                    f"Expected overrides as `--key value` or `key=value`, but got {token!r}."
                )
            text = value
        try:
            changes[key] = _with_numbers(yaml.safe_load(text))
        except yaml.YAMLError:
            changes[key] = text
    return changes


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted keys of nested values.

    Example:
        >>> dict(flatten({"loss": {"alpha": 0.3}, "seed": 1}))
        {'loss.alpha': 0.3, 'seed': 1}
    """
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values from dotted keys: the inverse of :func:`flatten`.

    Example:
        >>> nest({"loss.alpha": 0.3, "seed": 1})
        {'loss': {'alpha': 0.3}, 'seed': 1}
    """
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        section = nested
        for name in path:
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                raise RecipeError(
                    f"Expected either {name!r} or keys in it, but got {name!r} and {key!r}."
                )
        section[last] = value
    return nested


def _find(source: str) -> Any:
    """The file of a recipe that comes with the package, or the user's file."""
    path = Path(source)
    if path.is_file():
        return path
    if path.suffix in (".yaml", ".yml"):
        raise RecipeError(f"Expected a recipe at {source!r}, but got no such file.")
    if source not in recipe_names():
        raise RecipeError(
            f"Expected the name of a recipe or a YAML file, but got {source!r}"
            f"{did_you_mean(source, recipe_names())}"
        )
    return RECIPES / f"{source}.yaml"


def _read(source: str, readers: tuple[str, ...]) -> dict[str, Any]:
    """The values of a recipe file, merged into those of its base."""
    path = _find(source)
    name = str(path)
    if name in readers:
        raise RecipeError(f"Expected no cycle of `base`, but got one through {source!r}.")
    values = _parse(path.read_text(encoding="utf-8"), name)
    values.pop("format", None)
    base = values.pop("base", None)
    if base is None:
        return values
    if isinstance(path, Path) and (path.parent / str(base)).is_file():
        base = path.parent / str(base)
    return _merge(_read(str(base), (*readers, name)), values)


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"Expected {source} to be YAML, but got: {error}") from None
    if not isinstance(values, dict):
        kind = type(values).__name__
        raise RecipeError(f"Expected {source} to hold keys and values, but got {kind}.")
    return values


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`under`, updated with the values of `over` section by section."""
    sections = {
        key: _merge(under[key], value)
        for key, value in over.items()
        if isinstance(value, Mapping) and isinstance(under.get(key), Mapping)
    }
    return {**under, **over, **sections}


def _validate(values: Mapping[str, Any], source: str) -> Recipe:
    try:
        return Recipe.model_validate(_with_numbers(values))
    except ValidationError as invalid:
        faults = [fault for error in invalid.errors() for fault in _explain(error)]
        count = f"{len(faults)} errors" if len(faults) > 1 else "an error"
        raise RecipeError("\n  ".join([f"Found {count} in {source}:", *faults])) from None


def _explain(error: Any) -> Iterable[str]:
    """A pydantic error as lines: the dotted key, what was expected, and what was given."""
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        known = [name for name, *_ in describe_keys()]
        yield f"{key}: unknown key{did_you_mean(key, known)}"
    elif error["type"] == "value_error":
        for line in str(error["ctx"]["error"]).splitlines():
            yield f"{key}: {line}" if key else line
    else:
        wanted = error["msg"].removeprefix("Input should be ").removeprefix("a valid ")
        yield f"{key}: expected {wanted}, but got {error['input']!r}"


def _with_numbers(values: Any) -> Any:
    """Convert strings such as ``1e-3``, which YAML 1.1 does not parse as numbers."""
    if isinstance(values, Mapping):
        return {key: _with_numbers(value) for key, value in values.items()}
    if isinstance(values, list):
        return [_with_numbers(value) for value in values]
    if isinstance(values, str) and any(character.isdigit() for character in values):
        with contextlib.suppress(ValueError):
            return float(values)
    return values
