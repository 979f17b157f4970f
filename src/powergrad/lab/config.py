"""What a run is: a typed, closed recipe, from YAML and dotted overrides.

A recipe file holds only what it changes, below a header that says its command, its hardware and
what to expect. ``base: NAME`` starts from another recipe. Every other key is a field of
:class:`Recipe`; an unknown one is refused with the nearest known one, and all errors of a file come
at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from powergrad.lab.words import did_you_mean

__all__ = ["Recipe", "RecipeError", "flatten", "load_recipe", "nest", "recipe_names"]

FORMAT = 1

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Unit = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]


class RecipeError(ValueError):
    """A recipe or an override that cannot be used; the message names every fault."""


class Section(BaseModel):
    """A closed part of a recipe: it has no other keys, and does not change once made."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class Data(Section):
    """Which examples, and how they are augmented."""

    name: str = Field(default="digits", description="digits, fashion-mnist, cifar10 or folder:PATH")
    size: Count | None = Field(
        default=None, description="side of an image (default: as stored; 224)"
    )
    crop_padding: int = Field(
        default=0, ge=0, description="random crop after padding by so many pixels"
    )
    flip: bool = Field(default=False, description="mirror at random")
    scale: tuple[Positive, Positive] = Field(
        default=(0.08, 1.0),
        description="folders: area of the random crop, as fractions of the image",
    )
    ratio: tuple[Positive, Positive] = Field(
        default=(3 / 4, 4 / 3), description="folders: aspect of the random crop"
    )
    test_crop: float = Field(
        default=0.875, gt=0, le=1, description="folders: centre crop in testing"
    )
    mixup: NotNegative = Field(default=0.0, description="mixup's Beta parameter; 0 is off")
    cutmix: NotNegative = Field(default=0.0, description="cutmix's Beta parameter; 0 is off")
    bad_images: Literal["refuse", "skip"] = Field(
        default="refuse", description="what to do with an image that cannot be read"
    )
    hold_out: float = Field(
        default=0.0, ge=0, lt=1, description="test on this fraction of the training data instead"
    )
    limit: Count | None = Field(default=None, description="use only so many training examples")


class Model(Section):
    """Which network."""

    name: str = Field(
        default="resnet8", description="resnet18, seresnet50, resnet20, timm:NAME, ..."
    )
    width: Count | None = Field(default=None, description="channels of the first stage")
    norm: Literal["batch", "group", "none"] = Field(default="batch", description="normalisation")
    stem: Literal["imagenet", "small"] | None = Field(
        default=None, description="first layers (default: as the family has them)"
    )
    zero_init_residual: bool = Field(default=False, description="branches begin at zero")
    head_scale: Positive = Field(
        default=1.0, description="multiplies the classifier's first weights"
    )


class Factors(Section):
    """What a parameter group's settings are multiplied by."""

    lr: Positive = Field(default=1.0, description="factor of the learning rate")
    weight_decay: NotNegative = Field(default=1.0, description="factor of the weight decay")
    eps: Positive = Field(default=1.0, description="factor of Adam's eps")


class Optimizer(Section):
    """How weights move."""

    name: Literal["sgd", "adam", "adamw"] = Field(default="sgd", description="which optimizer")
    lr: Positive = Field(default=0.4, description="peak learning rate")
    weight_decay: NotNegative = Field(default=5e-4, description="weight decay")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="SGD's momentum")
    nesterov: bool = Field(default=True, description="Nesterov's form of momentum")
    betas: tuple[Unit, Unit] = Field(default=(0.9, 0.999), description="Adam's betas")
    eps: Positive = Field(default=1e-8, description="Adam's eps")
    decay_all: bool = Field(default=True, description="decay biases and normalisations too")
    backbone: Factors = Field(default=Factors(), description="factors for all layers but the last")
    head: Factors = Field(default=Factors(), description="factors for the last layer")

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
    """How the learning rate goes over the epochs; it changes at every step."""

    name: Literal["cosine", "step", "constant"] = Field(default="cosine", description="its shape")
    warmup_epochs: NotNegative = Field(default=5.0, description="linear warm-up")
    warmup_start: NotNegative = Field(default=4e-4, description="learning rate at the first step")
    milestones: tuple[Positive, ...] = Field(
        default=(30, 60, 90), description="epochs of the steps"
    )
    gamma: Positive = Field(default=0.1, description="factor at each step")
    floor: NotNegative = Field(default=0.0, description="cosine: where the learning rate ends")


class Loss(Section):
    """Cross-entropy, and what is altered in its backward pass."""

    alpha: Unit = Field(default=1.0, description="PGT's alpha; 1 is plain cross-entropy")
    alpha_schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="how alpha goes to 1 over the epochs, if it does"
    )
    label_smoothing: float = Field(default=0.0, ge=0, lt=1, description="mass taken from the label")
    smoothing: Literal["pytorch", "paper"] = Field(
        default="pytorch", description="spread over all classes, or over the wrong ones"
    )
    form: Literal["exact", "as_published"] = Field(
        default="exact", description="the equation, or the authors' hook (needs float16)"
    )
    logit_scale: Positive = Field(
        default=1.0, description="the loss is of so many times the logits"
    )


class Clip(Section):
    """What is done to gradients before a step, in this order; nothing by default."""

    value: Positive | None = Field(default=None, description="largest entry")
    tensor_norm: Positive | None = Field(default=None, description="largest norm of each tensor")
    norm: Positive | None = Field(
        default=None, description="largest norm of all gradients together"
    )
    agc: Positive | None = Field(
        default=None, description="adaptive: largest ratio to the weight's norm"
    )
    agc_eps: NotNegative = Field(default=1e-3, description="AGC's floor of the weight's norm")


class Train(Section):
    """How long, in what batches, in which precision."""

    epochs: Count = Field(default=100, description="passes over the training data")
    batch_size: Count = Field(default=1024, description="examples a step, over all processes")
    accumulate: Count = Field(default=1, description="backward passes a step")
    precision: Literal["float64", "float32", "bfloat16", "float16"] = Field(
        default="float32", description="of the forward pass; float16 with a GradScaler"
    )
    ema: float | None = Field(default=None, gt=0, lt=1, description="decay of averaged weights")
    channels_last: bool = Field(default=False, description="memory format of images and weights")
    compile: bool = Field(default=False, description="torch.compile")
    test_every: Count = Field(
        default=1, description="epochs between tests; the last is always tested"
    )
    test_batch_size: Count | None = Field(default=None, description="default: batch_size")


class Monitor(Section):
    """What is recorded of the filters."""

    every: int = Field(
        default=0, ge=0, description="steps between records of filter norms; 0 is off"
    )
    gradients: bool = Field(default=False, description="also the norms of gradients")
    features: bool = Field(default=False, description="also the features before the classifier")
    gains: bool = Field(default=False, description="also the gains of normalisations")


class Machine(Section):
    """Where it runs: nothing here changes what a run is, so it is not part of its name."""

    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1, ...")
    threads: Count | None = Field(default=None, description="threads of each process")
    workers: int = Field(
        default=0, ge=0, description="processes that decode images, for each process"
    )
    data_dir: str | None = Field(default=None, description="where the data files are")
    checkpoint_seconds: NotNegative = Field(default=60.0, description="time between checkpoints")
    checkpoint_steps: Count | None = Field(default=None, description="steps between checkpoints")
    keep_best: bool = Field(default=True, description="keep the weights of the best test accuracy")
    tensorboard: bool = Field(default=False, description="also write TensorBoard's files")


class Recipe(Section):
    """Everything that decides what a run does. The defaults are the paper's common recipe.

    Example:
        >>> recipe = Recipe.model_validate({"loss": {"alpha": 0.3}, "seed": 4})
        >>> recipe.loss.alpha, recipe.optimizer.lr
        (0.3, 0.4)
        >>> recipe.override({"optimizer.lr": 0.1}).optimizer.lr
        0.1
    """

    data: Data = Field(default=Data(), description="examples")
    model: Model = Field(default=Model(), description="network")
    optimizer: Optimizer = Field(default=Optimizer(), description="optimizer")
    schedule: Schedule = Field(default=Schedule(), description="learning rate over time")
    loss: Loss = Field(default=Loss(), description="loss")
    clip: Clip = Field(default=Clip(), description="clipping")
    train: Train = Field(default=Train(), description="training")
    monitor: Monitor = Field(default=Monitor(), description="records of filters")
    machine: Machine = Field(default=Machine(), description="machine")
    seed: int = Field(default=0, ge=0, lt=2**31, description="initialisation, order, augmentation")

    @model_validator(mode="after")
    def _parts_agree(self) -> Recipe:
        faults = []
        if self.schedule.warmup_epochs >= self.train.epochs and self.schedule.warmup_epochs > 0:
            faults.append(
                f"schedule.warmup_epochs: expected less than train.epochs, {self.train.epochs}, "
                f"but got {self.schedule.warmup_epochs:g}"
            )
        if self.train.batch_size % self.train.accumulate:
            faults.append(
                f"train.accumulate: expected a divisor of train.batch_size, "
                f"{self.train.batch_size}, but got {self.train.accumulate}"
            )
        if self.data.mixup and self.data.cutmix:
            faults.append("data.cutmix: expected 0 where data.mixup is given, but got both")
        if self.model.name.startswith("timm:") and self.model.norm != "batch":
            faults.append("model.norm: expected no norm for a timm model, which has its own")
        if self.loss.form == "as_published" and self.train.precision != "float16":
            faults.append(
                "loss.form: expected train.precision float16 with as_published, which is right at "
                f"one loss scale only, but got {self.train.precision}"
            )
        decay, clip = self.optimizer.backbone_decay, self.clip.agc
        if clip is not None and clip <= decay and self.optimizer.name == "sgd":
            faults.append(
                f"clip.agc: expected more than optimizer.weight_decay of the backbone, {decay:g}, "
                "which otherwise outweighs every gradient until all weights vanish, but got "
                f"{clip:g}"
            )
        if faults:
            raise ValueError("\n".join(faults))
        return self

    @property
    def key(self) -> str:
        """The name of the run that this recipe makes: a hash of what is not a default.

        `machine` is left out. A new key with a neutral default leaves the names of older runs as
        they are; a default that changes needs a new `FORMAT`.
        """
        described = self.model_dump(mode="json", exclude={"machine"}, exclude_defaults=True)
        canonical = json.dumps(described, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(f"{FORMAT}:{canonical}".encode()).hexdigest()[:12]

    def value(self, key: str) -> Any:
        """The value of a dotted key.

        Raises:
            RecipeError: If there is no such key.
        """
        values = dict(flatten(self.model_dump()))
        if key not in values:
            raise RecipeError(f"Expected a known key, but got {key!r}{did_you_mean(key, values)}")
        return values[key]

    def override(self, changes: Mapping[str, Any]) -> Recipe:
        """This recipe with dotted keys changed: ``{"loss.alpha": 0.3}``."""
        return _validate(_merge(self.model_dump(), nest(changes)), "the overrides")

    def to_yaml(self) -> str:
        """The recipe, complete."""
        return yaml.safe_dump({"format": FORMAT, **self.model_dump(mode="json")}, sort_keys=False)

    @classmethod
    def from_yaml(cls, text: str, source: str) -> Recipe:
        """The complete recipe that :meth:`to_yaml` wrote."""
        values = _parse(text, source)
        written = values.pop("format", FORMAT)
        if not isinstance(written, int) or written > FORMAT:
            raise RecipeError(
                f"Expected {source} to be of format {FORMAT} or earlier, but got {written}; a "
                "newer powergrad reads it."
            )
        return _validate(values, source)


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(path.name.removesuffix(".yaml") for path in _shipped() if path.is_file())


def load_recipe(source: str | Path, changes: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe of a name or a YAML file, with dotted `changes`.

    Args:
        source: The name of a recipe that comes with the package, or the path of a file.
        changes: Dotted keys and their values.

    Returns:
        The recipe.

    Raises:
        RecipeError: If there is no such recipe, or anything in it or in `changes` is not right.

    Example:
        >>> load_recipe("digits", {"loss.alpha": 0.5}).loss.alpha
        0.5
    """
    values = _merge(_read(str(source), ()), nest(changes or {}))
    return _validate(values, f"recipe {str(source)!r}")


def header(name: str) -> str:
    """The comment at the top of a recipe that comes with the package."""
    lines = _find(name).read_text().splitlines()
    comment = []
    for line in lines:
        if not line.startswith("#"):
            break
        comment.append(line.removeprefix("#").strip())
    return "\n".join(comment)


def parse_overrides(tokens: Sequence[str]) -> dict[str, Any]:
    """Dotted keys from a command line: ``--loss.alpha 0.3``, ``--loss.alpha=0.3``, ``seed=1``.

    Example:
        >>> parse_overrides(["--loss.alpha", "0.3", "train.compile=true", "--seed=4"])
        {'loss.alpha': 0.3, 'train.compile': True, 'seed': 4}
    """
    changes: dict[str, Any] = {}
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        name, equals, value = token.removeprefix("--").partition("=")
        if not equals:
            if not token.startswith("--") or not rest:
                raise RecipeError(
                    f"Expected overrides as `--key value` or `key=value`, but got {token!r}."
                )
            value = rest.pop(0)
        try:
            changes[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            changes[name] = value
        if isinstance(changes[name], str):
            changes[name] = _number(changes[name])
    return changes


def describe_keys() -> Iterator[tuple[str, str, Any]]:
    """Every dotted key, what it means, and its default."""
    yield from _describe(Recipe, "")


def _describe(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, Any]]:
    for name, field in section.model_fields.items():
        if isinstance(field.default, Section):
            yield from _describe(type(field.default), f"{prefix}{name}.")
        else:
            yield prefix + name, field.description or "", field.default


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

    Raises:
        RecipeError: If a key is both a value and a section.

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


def _shipped() -> Iterator[Any]:
    yield from resources.files("powergrad.lab").joinpath("recipes").iterdir()


def _find(source: str) -> Any:
    path = Path(source)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        if not path.is_file():
            raise RecipeError(f"Expected a recipe at {source!r}, but got no such file.")
        return path
    for shipped in _shipped():
        if shipped.name == f"{source}.yaml":
            return shipped
    raise RecipeError(
        f"Expected a recipe's name or a YAML file, but got {source!r}"
        f"{did_you_mean(source, recipe_names())}"
    )


def _read(source: str, readers: tuple[str, ...]) -> dict[str, Any]:
    """The values of a recipe file over those of its base."""
    path = _find(source)
    name = str(path)
    if name in readers:
        raise RecipeError(f"Expected `base` to end somewhere, but got a circle through {source!r}.")
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
        raise RecipeError(
            f"Expected {source} to hold keys and values, but got {type(values).__name__}."
        )
    return values


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = (
            _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
        )
    return merged


def _validate(values: Mapping[str, Any], source: str) -> Recipe:
    try:
        return Recipe.model_validate(_numbers(values))
    except ValidationError as error:
        faults = [fault for each in error.errors() for fault in _explain(each)]
        listed = "\n".join(f"  {fault}" for fault in faults)
        many = f"{len(faults)} faults" if len(faults) > 1 else "a fault"
        raise RecipeError(f"Found {many} in {source}:\n{listed}") from None


def _explain(error: Any) -> Iterable[str]:
    """A pydantic error as: dotted key: what was expected, and what came."""
    key = ".".join(str(part) for part in error["loc"])
    came = error["input"]
    if error["type"] == "extra_forbidden":
        known = [name for name, *_ in describe_keys()]
        yield f"{key}: expected a known key, but got this one{did_you_mean(key, known)}"
    elif error["type"] == "value_error":
        for line in str(error["ctx"]["error"]).splitlines():
            yield line if not key else f"{key}: {line}"
    else:
        wanted = error["msg"].removeprefix("Input should be ").removeprefix("a valid ")
        yield f"{key}: expected {wanted}, but got {came!r}"


def _numbers(values: Any) -> Any:
    """YAML 1.1 reads 1e-3 as text: read it as the number that was meant."""
    if isinstance(values, Mapping):
        return {key: _numbers(value) for key, value in values.items()}
    if isinstance(values, list):
        return [_numbers(value) for value in values]
    return _number(values) if isinstance(values, str) else values


def _number(text: str) -> Any:
    try:
        return float(text) if any(c.isdigit() for c in text) else text
    except ValueError:
        return text
