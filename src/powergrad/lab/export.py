r"""A trained network in the files that others load, its head calibrated, with a card that says so.

Training with PGT at ``alpha`` fits ``softmax(alpha z)``. An export multiplies the head by ``alpha``
(or divides it by a temperature that is fitted), so that the softmax of what the files give is the
calibrated one, and the predicted class that of the trained network:

    model.safetensors   the weights of the network, for normalised images
    model.pt2           torch.export's program: pixels from 0 to 255 in, logits out, any batch
    model.onnx          the same for ONNX, checked by onnxruntime
    README.md           the card: recipe, data, results, how each file is loaded

The folder is written under another name, read back, compared with the network, and renamed: it is
there whole, or not at all.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from powergrad import __version__, calibration, fold_alpha
from powergrad.lab.config import Recipe, did_you_mean
from powergrad.lab.data import Datasets, Split, load_data
from powergrad.lab.data.memory import MemorySplit
from powergrad.lab.data.streams import held_out
from powergrad.lab.models import create_model
from powergrad.lab.run import Run, RunError, describe_machine, open_run
from powergrad.lab.session import right_answers
from powergrad.monitor.layers import load_checkpoint

__all__ = ["Exported", "answers", "export_run", "measures", "open_trained"]

FILES = {"safetensors": "model.safetensors", "torch": "model.pt2", "onnx": "model.onnx"}
CARD = "README.md"
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-5  # of the largest logit, and of 1 where that is less
TRACED = 2  # images that graphs are traced with; they are checked with other numbers
BINS = 15
FOLDED = "temperature_folded"  # in the metadata of an export


@dataclass(frozen=True)
class Exported:
    """What an export wrote.

    Attributes:
        folder: Where.
        files: The names of the files, the card last.
        temperature: What is folded into the head: logits are the trained ones divided by it.
        results: What was measured, by the name of the reading, as in the card.
    """

    folder: Path
    files: list[str]
    temperature: float
    results: dict[str, dict[str, float]]


def export_run(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    formats: Sequence[str] = tuple(FILES),
    temperature: str | float = "alpha",
    force: bool = False,
    data_dir: str | None = None,
) -> Exported:
    """Write the network of a run as files to deploy, calibrated, with a card.

    Args:
        source: The folder of a finished run; or a file of weights in a run's folder.
        out: The folder to write, by default ``export`` in the run's.
        formats: Of ``safetensors``, ``torch`` (torch.export) and ``onnx``.
        temperature: What the head is divided by: ``"alpha"`` for ``1 / alpha``; ``"fitted"`` for
            the one of least NLL on images that were not trained on; ``"none"``; or a number.
        force: Replace an export that is there.
        data_dir: Where the data files are, if not where the recipe says.

    Returns:
        What was written.

    Raises:
        RunError: If `source` is no run or an unfinished one, `out` cannot be written, or a file
            does not give what the network gives; nothing is written then.
        ValueError: If an argument is not one of those above, alpha is 0 and asked for, or the head
            cannot be scaled.
        ImportError: If the packages for ONNX are missing.
    """
    chosen = _check_formats(formats)
    trained = open_trained(Path(source), data_dir)
    wanted = _check_temperature(temperature, trained)
    place = trained.run.folder / "export" if out is None else Path(out)
    _check_place(place, force)

    data = trained.data()
    network = trained.network(data)
    before = answers(network, trained.recipe, data)
    fitted, unfitted = _fit(before)
    if wanted == "fitted" and fitted is None:
        raise RunError(unfitted)
    temperatures = {"1": 1.0}
    if trained.factor:
        temperatures[trained.factor_name] = 1 / trained.factor
    if fitted is not None:
        temperatures["fitted"] = fitted
    names = {"alpha": trained.factor_name, "none": "1"}
    divisor = temperatures[names.get(wanted, wanted)] if isinstance(wanted, str) else wanted
    results = {
        name: {"temperature": t, **measures(before.report, temperature=t)}
        for name, t in temperatures.items()
    }

    if divisor != 1:
        fold_alpha(None, 1 / divisor, model=network)
    deployed = Deployed(network, *normalisation(data.test))
    after = answers(lambda images: deployed(deployed.pixels(images)), trained.recipe, data)
    results["exported"] = {"temperature": divisor, **measures(after.report)}
    metadata = _metadata(trained, data, deployed, divisor)
    card = _card(trained, data, before, metadata, results, chosen, unfitted)
    with _made_whole(place) as fresh:
        _write(fresh, chosen, deployed, metadata, data)
        (fresh / CARD).write_text(card, encoding="utf-8")
    return Exported(place, [*(FILES[each] for each in chosen), CARD], divisor, results)


# What is exported ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """The weights of a run, and what is known of them.

    Attributes:
        run: The run that made them.
        path: The file.
        recipe: The run's.
        alpha: At which it was trained, at the end; None for a checkpoint under a schedule.
    """

    run: Run
    path: Path
    recipe: Recipe
    alpha: float | None

    @property
    def factor(self) -> float | None:
        """What training fits is the softmax of so many times the logits."""
        return None if self.alpha is None else self.alpha * self.recipe.loss.logit_scale

    @property
    def factor_name(self) -> str:
        """The temperature that this factor is, in words."""
        return "1/alpha" if self.recipe.loss.logit_scale == 1 else "1/(alpha * logit_scale)"

    def data(self) -> Datasets:
        """The examples of the run."""
        return _load(self.recipe)

    def options(self, data: Datasets) -> dict[str, Any]:
        """The arguments of `create_model`."""
        shape = {"num_classes": len(data.classes), "in_channels": data.channels}
        return {**self.recipe.model.model_dump(exclude={"head_scale"}), **shape}

    def network(self, data: Datasets) -> nn.Module:
        """The network with its weights, in float32, for testing."""
        network = create_model(**self.options(data))
        weights = load_checkpoint(self.path)
        if self.path.suffix == ".safetensors":
            with safe_open(self.path, "pt") as file:
                if FOLDED in (file.metadata() or {}):
                    raise RunError(
                        f"Expected the weights of a training, but got {str(self.path)!r}, which is "
                        "an export: its head would be scaled twice."
                    )
        try:
            network.load_state_dict(weights)
        except RuntimeError as error:
            raise RunError(
                f"Expected {str(self.path)!r} to hold the weights of {self.recipe.model.name}, but "
                f"got: {str(error).splitlines()[-1].strip()}"
            ) from None
        return network.eval()


def open_trained(source: Path, data_dir: str | None = None) -> Trained:
    """The weights in a finished run's folder, or in a file of a run's.

    Args:
        source: The folder, or the file.
        data_dir: Where the data files are, if not where the recipe says.

    Returns:
        The weights, and the run that they are of.

    Raises:
        RunError: If there is no run, it is not finished, or has diverged.
    """
    if not source.exists():
        raise RunError(f"Expected a run's folder or its weights, but got no {str(source)!r}.")
    places = [source] if source.is_dir() else [source.parent, source.parent.parent]
    run = open_run(next((each for each in places if Run(each).exists()), places[0]))
    recipe, result = run.recipe(), run.result()
    if data_dir is not None:
        recipe = recipe.override({"machine.data_dir": data_dir})
    path = run.folder / "model.safetensors" if source.is_dir() else source
    if result is None and source.is_dir():
        raise RunError(
            f"Expected {str(source)!r} to be a finished run, but it is not: `powergrad train "
            f"{source}` goes on with it; or export one of its checkpoint/ files."
        )
    if result is not None and result["diverged"]:
        raise RunError(f"Expected a run that converged, but {str(run.folder)!r} has diverged.")
    if path.suffix == ".pt" and recipe.train.ema is not None:
        raise RunError(
            "Expected safetensors of a run with `train.ema`, whose checkpoints hold two sets of "
            f"weights, but got {str(path)!r}."
        )
    alpha: float | None = recipe.loss.alpha
    if recipe.loss.alpha_schedule != "constant":
        is_final = path.name == "model.safetensors"
        alpha = result["alpha"] if is_final and result is not None else None
    return Trained(run, path, recipe, alpha)


class Deployed(nn.Module):
    """The network from pixels on: what the graphs hold.

    Args:
        network: From normalised images to logits.
        mean: Of the pixels, a channel, (C, 1, 1).
        scale: What they are multiplied by after that, (C, 1, 1).
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, network: nn.Module, mean: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", mean)
        self.register_buffer("scale", scale)
        self.eval()

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels from 0 to 255, ``(batch, C, H, W)``, to logits."""
        return self.network((pixels - self.mean) * self.scale)

    def pixels(self, images: Tensor) -> Tensor:
        """The pixels that normalised images were: whole numbers, so exactly."""
        return (images / self.scale + self.mean).round()


def normalisation(split: Split) -> tuple[Tensor, Tensor]:
    """The mean that a split subtracts from its pixels, and what it then multiplies them by."""
    if isinstance(split, MemorySplit):
        return split.mean, split.scale
    from powergrad.lab.data.folder import MEAN, STD

    mean, std = (255 * torch.tensor(each).view(3, 1, 1) for each in (MEAN, STD))
    return mean, 1 / std


# What is measured ---------------------------------------------------------------------------------


class Answers(NamedTuple):
    """The logits and labels of some images."""

    logits: Tensor
    labels: Tensor


@dataclass(frozen=True)
class HeldOut:
    """Answers on images that were not trained on: some to fit a temperature, others to report."""

    fit: Answers
    report: Answers
    fit_on: str
    report_on: str


def answers(forward: Callable[[Tensor], Tensor], recipe: Recipe, data: Datasets) -> HeldOut:
    """What the network says of images to fit on, and of others to report on.

    Where the run held out a part of its training data, that is fitted on, and the test set reported
    on. Where it trained on all, a fixed half of each class of the test set is fitted on, and the
    other half reported on.

    Args:
        forward: From normalised images to logits.
        recipe: The run's recipe.
        data: Its examples.

    Returns:
        Both, with words for each.
    """
    size = recipe.train.test_batch_size or recipe.train.batch_size
    tested = _run_over(forward, data.test, size)
    if recipe.data.hold_out:
        test = _load(recipe.override({"data.hold_out": 0.0})).test
        return HeldOut(
            tested,
            _run_over(forward, test, size),
            f"the {len(tested.labels):,} training images that the run held out "
            f"(`data.hold_out` {recipe.data.hold_out:g})",
            f"the test set, {len(test):,} images that were neither trained nor fitted on",
        )
    half = torch.from_numpy(held_out(tested.labels.numpy(), 0.5))
    fit, report = (Answers(*(each[part] for each in tested)) for part in (half, ~half))
    return HeldOut(
        fit,
        report,
        f"the other half of the test set, {len(fit.labels):,} images, since the run trained on all "
        "of its training data",
        f"a fixed half of the test set, {len(report.labels):,} images that were neither trained "
        "nor fitted on",
    )


def _load(recipe: Recipe) -> Datasets:
    machine = recipe.machine
    return load_data(recipe.data, data_dir=machine.data_dir, workers=machine.workers)


@torch.no_grad()
def _run_over(forward: Callable[[Tensor], Tensor], split: Split, size: int) -> Answers:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    batches = track(
        split.test_batches(size),
        "measuring",
        total=math.ceil(len(split) / size),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    found = [(forward(images), labels) for (images, labels), _ in batches]
    return Answers(*(torch.cat(part) for part in zip(*found, strict=True)))


def measures(found: Answers, *, temperature: float = 1.0) -> dict[str, float]:
    """Accuracy in percent, and how far the softmax at a temperature can be trusted."""
    logits, labels = found
    at: dict[str, Any] = {"logits": logits, "labels": labels, "temperature": temperature}
    return {
        "accuracy": 100 * right_answers(logits, labels).double().mean().item(),
        "nll": calibration.negative_log_likelihood(**at),
        "brier": calibration.brier_score(**at),
        "ece_width": calibration.expected_calibration_error(**at, bins=BINS),
        "ece_mass": calibration.expected_calibration_error(**at, bins=BINS, binning="mass"),
    }


def _fit(found: HeldOut) -> tuple[float | None, str]:
    """The fitted temperature; or None, and why there is none."""
    try:
        return calibration.fit_temperature(*found.fit), ""
    except ValueError as error:
        return None, f"No temperature could be fitted on {found.fit_on}. {error}"


# What is asked for --------------------------------------------------------------------------------


def _check_formats(formats: Sequence[str]) -> list[str]:
    for each in formats:
        if each not in FILES:
            raise ValueError(
                f"Expected `format` to be of {', '.join(FILES)}, but got {each!r}"
                f"{did_you_mean(each, FILES)}"
            )
    if not formats:
        raise ValueError(f"Expected `format` to be of {', '.join(FILES)}, but got none.")
    missing = [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]
    if "onnx" in formats and missing:
        raise ImportError(
            f"Expected {', '.join(missing)} to be installed for the format onnx, but got none: "
            "`pip install 'powergrad[export]'`; or choose `--format safetensors,torch`."
        )
    return [each for each in FILES if each in formats]


def _check_temperature(wanted: str | float, trained: Trained) -> str | float:
    others = "choose the temperature fitted, none or a number"
    if wanted == "alpha":
        if trained.factor is None:
            raise ValueError(
                "Expected alpha to be constant to fold that of a checkpoint, but it changes with "
                f"`loss.alpha_schedule` {trained.recipe.loss.alpha_schedule}: {others}."
            )
        if trained.factor == 0:
            raise ValueError(
                "Expected alpha to be above 0 to fold it into the head, but the run was trained at "
                f"0: {others}."
            )
        return wanted
    if wanted in ("fitted", "none"):
        return wanted
    try:
        number = float(wanted)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(
            "Expected `temperature` to be alpha, fitted, none or a number above 0, but got "
            f"{wanted!r}."
        )
    return number


def _check_place(place: Path, force: bool) -> None:
    if place.exists() and not place.is_dir():
        raise RunError(f"Expected {str(place)!r} to be a folder, but got a file.")
    there = {each.name for each in place.iterdir()} if place.exists() else set()
    strange = sorted(there - {*FILES.values(), CARD})
    if strange:
        raise RunError(
            f"Expected {str(place)!r} to be new, or an export to replace, but got a folder with "
            f"{strange[0]!r} in it."
        )
    if there and not force:
        raise RunError(
            f"Expected {str(place)!r} to be new, but got an export that is there: choose another "
            "`--out`, or replace it with `--force`."
        )


# What is written ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _made_whole(place: Path) -> Iterator[Path]:
    """A fresh folder that becomes `place` if all goes well, and is removed if not."""
    place = place.resolve()
    fresh, old = (place.with_name(f".{place.name}.{word}") for word in ("partial", "old"))
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        yield fresh
        for path in fresh.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        if place.exists():
            os.replace(place, old)
        try:
            os.replace(fresh, place)
        except OSError:
            if old.exists():
                os.replace(old, place)
            raise
    except OSError as error:
        raise RunError(
            f"Expected to write {str(place)!r}, but got: {error}; nothing was written."
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _write(
    place: Path, formats: list[str], deployed: Deployed, metadata: dict[str, str], data: Datasets
) -> None:
    """Write the files, read each back, and compare what it gives for real images."""
    (images, _), _ = next(data.test.test_batches(64))
    pixels = deployed.pixels(images)
    with torch.no_grad():
        expected = deployed(pixels)
    if "safetensors" in formats:
        path = place / FILES["safetensors"]
        weights = {key: value.contiguous() for key, value in deployed.network.state_dict().items()}
        path.write_bytes(save(weights, {"format": "pt", **metadata}))
        again = copy.deepcopy(deployed)
        again.network.load_state_dict(load_file(path))
        _check(path.name, again, pixels, expected)
    if formats == ["safetensors"]:
        return
    with warnings.catch_warnings():
        # PyTorch 2.13's own use of what it deprecates.
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)", FutureWarning)
        program = torch.export.export(
            deployed,
            (torch.zeros(TRACED, *pixels.shape[1:]),),
            dynamic_shapes={"pixels": {0: torch.export.Dim("batch")}},
        )
        if "torch" in formats:
            path = place / FILES["torch"]
            extra = {"metadata.json": json.dumps(metadata)}
            torch.export.save(program, path, extra_files=extra)
            _check(path.name, torch.export.load(path).module(), pixels, expected)
        if "onnx" in formats:
            path = place / FILES["onnx"]
            _write_onnx(path, program, metadata)
            _check(path.name, _onnx_runner(path), pixels, expected)


def _write_onnx(
    path: Path, program: torch.export.ExportedProgram, metadata: dict[str, str]
) -> None:
    made: Any = torch.onnx.export(
        program,
        dynamo=True,
        input_names=["pixels"],
        output_names=["logits"],
        dynamic_shapes={"pixels": {0: "batch"}},
        verbose=False,
    )
    made.model.metadata_props.update(metadata)
    made.save(path)


def _onnx_runner(path: Path) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda pixels: torch.from_numpy(session.run(None, {"pixels": pixels.numpy()})[0])


def _check(name: str, run: Callable[[Tensor], Tensor], pixels: Tensor, expected: Tensor) -> None:
    """Refuse a file that does not give the network's logits, for any size of batch."""
    bound = TOLERANCE * max(1.0, expected.abs().max().item())
    for count in (1, 3, len(pixels)):
        with torch.no_grad():
            found = run(pixels[:count])
        error = (found - expected[:count]).abs().max().item()
        if not error <= bound:
            raise RunError(
                f"Expected {name} to give the network's logits to {bound:.1e}, but got a "
                f"difference of {error:.1e} in a batch of {count}; nothing was written."
            )


# What is said of it -------------------------------------------------------------------------------


def _metadata(
    trained: Trained, data: Datasets, deployed: Deployed, temperature: float
) -> dict[str, str]:
    """What every file says of itself: text only, lists as JSON."""
    mean, std = deployed.mean.flatten(), 1 / deployed.scale.flatten()
    return {
        "powergrad_version": __version__,
        "recipe_key": trained.recipe.key,
        "model": trained.recipe.model.name,
        "alpha": "" if trained.alpha is None else repr(trained.alpha),
        FOLDED: repr(temperature),
        "classes": json.dumps(data.classes),
        "mean": json.dumps([float(f"{each:.8g}") for each in mean.tolist()]),
        "std": json.dumps([float(f"{each:.8g}") for each in std.tolist()]),
    }


def _card(
    trained: Trained,
    data: Datasets,
    found: HeldOut,
    metadata: dict[str, str],
    results: dict[str, dict[str, float]],
    formats: list[str],
    unfitted: str,
) -> str:
    """The model card, as model hubs read it."""
    recipe, exported = trained.recipe, results["exported"]
    name = f"{recipe.model.name} on {_dataset(recipe)}"
    sections = [
        f"---\n{_front_matter(name, recipe, formats, exported)}---",
        f"# {name}",
        f"A classifier of {len(data.classes)} classes, trained with {_loss(recipe)}. "
        + _folding(exported["temperature"]),
        _provenance(trained),
        "## Input and output",
        f"Images of shape (batch, {data.channels}, {data.size}, {data.size}), float32. "
        "`model.pt2` and `model.onnx` take pixels from 0 to 255, and normalise them themselves. "
        "`model.safetensors` holds the weights alone, for images that are normalised: of pixels "
        f"from 0 to 255 subtract the mean {metadata['mean']}, and divide by the standard deviation "
        f"{metadata['std']}, a channel. What comes out is a logit a class; probabilities are their "
        "softmax. The classes, in order:",
        f"```json\n{metadata['classes']}\n```",
        "## Results",
        f"Measured on {found.report_on}. "
        + (unfitted or f"The fitted temperature has the least NLL on {found.fit_on}."),
        _results_table(results),
        "NLL is in nats; the Brier score is summed over the classes; the calibration errors (ECE) "
        f"are over {BINS} bins of equal width, and of equal mass. The last row is the exported "
        "network's, by its own softmax; those above are the trained network's at a temperature.",
        "## Loading",
        *_snippets(trained, data, metadata, formats),
        "## Recipe",
        f"{len(data.train):,} training images. The key of the recipe is `{recipe.key}`; this is "
        "all of it:",
        f"```yaml\n{_recipe_text(recipe)}```",
    ]
    return "\n\n".join(sections) + "\n"


def _recipe_text(recipe: Recipe) -> str:
    return yaml.safe_dump(recipe.model_dump(mode="json", exclude={"machine"}), sort_keys=False)


def _dataset(recipe: Recipe) -> str:
    return recipe.data.name.removeprefix("folder:").rstrip("/").rpartition("/")[2]


def _front_matter(name: str, recipe: Recipe, formats: list[str], exported: dict[str, float]) -> str:
    dataset = {"name": _dataset(recipe), "type": _dataset(recipe)}
    measured = [
        {"type": "accuracy", "value": exported["accuracy"] / 100},
        {"type": "nll", "name": "negative log-likelihood", "value": exported["nll"]},
        {"type": "brier_score", "value": exported["brier"]},
        {"type": "ece", "name": "ECE, bins of equal width", "value": exported["ece_width"]},
        {"type": "ece", "name": "ECE, bins of equal mass", "value": exported["ece_mass"]},
    ]
    task = {"type": "image-classification"}
    result = {"task": task, "dataset": dataset, "metrics": measured}
    values = {
        "library_name": "pytorch",
        "pipeline_tag": "image-classification",
        "tags": ["powergrad", recipe.model.name, *(each for each in formats if each != "torch")],
        "model-index": [{"name": name, "results": [result]}],
    }
    return yaml.safe_dump(values, sort_keys=False)


def _loss(recipe: Recipe) -> str:
    loss = recipe.loss
    if loss.alpha == 1:
        return "cross-entropy"
    changing = "" if loss.alpha_schedule == "constant" else f" ({loss.alpha_schedule} to 1)"
    return f"cross-entropy under PowerGrad Transform at alpha {loss.alpha:g}{changing}"


def _folding(temperature: float) -> str:
    if temperature == 1:
        return "Nothing was folded into its head: logits are those of the trained network."
    return (
        f"Its head was divided by the temperature {temperature:.6g}, so that the softmax of its "
        "logits is that of the trained network at this temperature; the predicted class stays."
    )


def _provenance(trained: Trained) -> str:
    def told(machine: dict[str, Any]) -> str:
        versions = ", ".join(f"{each} {machine.get(each)}" for each in ("powergrad", "torch"))
        return f"{str(machine.get('time'))[:10]} with {versions}, commit {machine.get('commit')}"

    trained_with = told(trained.run.environment())
    text = f"Trained on {trained_with}; exported on {told(describe_machine())}."
    if trained.path.name == "best.safetensors":
        text += (
            " These are not the weights that the run ended with, but those with the best accuracy "
            "on its test images: figures on the same images look better than they are."
        )
    elif trained.path.name != "model.safetensors":
        text += f" These are the weights of the checkpoint {trained.path.name}."
    return text


def _results_table(results: dict[str, dict[str, float]]) -> str:
    lines = [
        "| temperature | | accuracy % | NLL | Brier | ECE, width | ECE, mass |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in results.items():
        errors = [f"{row[key]:.4f}" for key in ("nll", "brier", "ece_width", "ece_mass")]
        cells = [name, f"{row['temperature']:.4g}", f"{row['accuracy']:.2f}", *errors]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _snippets(
    trained: Trained, data: Datasets, metadata: dict[str, str], formats: list[str]
) -> Iterator[str]:
    """Code that loads each file, beside which it runs."""

    def block(code: str) -> str:
        return f"```python\n{code}\n```"

    options = trained.options(data)
    arguments = ", ".join(f"{key}={value!r}" for key, value in options.items())
    shape = f"4, {data.channels}, {data.size}, {data.size}"
    yield block(f"import torch\n\npixels = 255 * torch.rand({shape})  # your images")
    if "safetensors" in formats:
        yield block(
            "from safetensors.torch import load_file\n"
            "from powergrad.lab.models import create_model\n\n"
            f"network = create_model({arguments})\n"
            'network.load_state_dict(load_file("model.safetensors"))\n'
            f"mean, std = torch.tensor([{metadata['mean']}, {metadata['std']}])[..., None, None]\n"
            "logits = network.eval()((pixels - mean) / std)"
        )
    if "torch" in formats:
        yield block('logits = torch.export.load("model.pt2").module()(pixels)')
    if "onnx" in formats:
        yield block(
            "import onnxruntime\n\n"
            'session = onnxruntime.InferenceSession("model.onnx")\n'
            'logits = torch.from_numpy(session.run(["logits"], {"pixels": pixels.numpy()})[0])'
        )
    yield block("probabilities = logits.softmax(1)")
