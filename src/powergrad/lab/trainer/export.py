r"""Exports a trained network with a calibrated head to common file formats, with a model card.

Training with PGT at ``alpha`` fits ``softmax(alpha z)``. An export multiplies the head by ``alpha``
(or divides it by a fitted temperature), so that the softmax of the exported logits is calibrated.
The predicted classes do not change. The files are:

    model.safetensors   the weights of the network, for normalised images
    model.pt2           the torch.export program: from pixels (0 to 255) to logits, any batch size
    model.onnx          the same for ONNX, checked with onnxruntime
    preprocessing.json  the preparation of images: crop, size, filter, range, mean and deviation
    README.md           the card: recipe, data, results, image preparation, code to load the files

The folder is written under another name, read back, compared and renamed: complete, or absent.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import torch
import yaml
from rich.console import Console
from rich.progress import track
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.export import ExportedProgram

from powergrad import __version__, calibration, fold_alpha
from powergrad.lab.data import Datasets
from powergrad.lab.data.split import Split
from powergrad.lab.data.streams import held_out
from powergrad.lab.environment import describe_machine
from powergrad.lab.trainer.networks import create_model
from powergrad.lab.trainer.recipe import Recipe
from powergrad.lab.trainer.run_folder import Run, RunError
from powergrad.lab.trainer.session import right_answers
from powergrad.lab.words import did_you_mean
from powergrad.monitor.layers import load_checkpoint

FILES = {"safetensors": "model.safetensors", "torch": "model.pt2", "onnx": "model.onnx"}
CARD, PREPROCESSING = "README.md", "preprocessing.json"
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-5  # relative to the largest logit, or to 1 if that is smaller
BINS = 15  # of the calibration errors
FOLDED = "temperature_folded"  # in the metadata of an export
TRACED = 2  # the batch size for tracing; the graphs are checked with other batch sizes

Metadata = dict[str, str]
Forward = Callable[[Tensor], Tensor]


class Exported(NamedTuple):
    folder: Path
    files: list[str]
    temperature: float  # the divisor of the logits, which is folded into the head
    results: dict[str, dict[str, float]]  # the metrics of each row of the card's table


def export_run(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    formats: Sequence[str] = tuple(FILES),
    temperature: str | float = "alpha",
    force: bool = False,
    data_dir: str | None = None,
) -> Exported:
    """Export the network of a run, calibrated, with a model card."""
    formats = _check_formats(formats)
    trained = open_trained(Path(source), data_dir)
    wanted = _check_temperature(temperature, trained)
    place = trained.run.folder / "export" if out is None else Path(out)
    _check_place(place, force)

    data = trained.recipe.load_data()
    network = trained.network(data)
    outputs = answers(network, trained, data)
    scale = trained.recipe.loss.logit_scale
    rows = {"none": "1", "alpha": "1/alpha" if scale == 1 else "1/(alpha * logit_scale)"}
    factor, temperatures, unfitted = trained.factor, {"1": 1.0}, ""
    temperatures |= {rows["alpha"]: 1 / factor} if factor else {}
    try:
        temperatures["fitted"] = calibration.fit_temperature(*outputs.fit)
    except ValueError as error:
        unfitted = f"No temperature could be fitted on {outputs.fit_on}. {error}"
        if wanted == "fitted":
            raise RunError(unfitted) from None
    results = {name: measures(outputs.report, temperature=t) for name, t in temperatures.items()}
    divisor = temperatures[rows.get(wanted, wanted)] if isinstance(wanted, str) else wanted
    if divisor != 1:
        fold_alpha(None, 1 / divisor, model=network)
    deployed = Deployed(network, data.test.mean, data.test.scale)
    after = answers(lambda images: deployed(deployed.pixels(images)), trained, data)
    results["exported"] = {**measures(after.report), "temperature": divisor}
    metadata = _metadata(trained, data, deployed, divisor)
    context = {"recipe": trained.recipe, "data": data, "metadata": metadata}
    prepared = _render("preprocessing.json", **context)
    metadata["preprocessing"] = json.dumps(json.loads(prepared))
    context |= {"outputs": outputs, "results": results, "unfitted": unfitted, "bins": BINS}
    context |= {"trained": trained, "formats": formats, "exported_on": describe_machine()}
    card = _render("model_card.md", **context)
    with _written_whole(place) as folder:
        _write(folder, formats, deployed, metadata, data)
        (folder / PREPROCESSING).write_text(prepared, encoding="utf-8")
        (folder / CARD).write_text(card, encoding="utf-8")
    files = [*(FILES[name] for name in formats), PREPROCESSING, CARD]
    return Exported(place, files, divisor, results)


class Deployed(nn.Module):
    """A network that takes pixels: ``network((pixels - mean) * scale)``, both ``(C, 1, 1)``."""

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
        """The pixels of normalised images; rounding to integers makes them exact."""
        return (images / self.scale + self.mean).round()


def _metadata(trained: Trained, data: Datasets, deployed: Deployed, temperature: float) -> Metadata:
    """The metadata of every file: strings only, lists as JSON."""
    mean, std = deployed.mean.flatten().tolist(), (1 / deployed.scale.flatten()).tolist()
    return {
        "powergrad_version": __version__,
        "recipe_key": trained.recipe.key,
        "model": trained.recipe.model.name,
        "alpha": repr(trained.recipe.loss.alpha),
        FOLDED: repr(temperature),
        "classes": json.dumps(data.classes),
        "mean": json.dumps([float(f"{value:.8g}") for value in mean]),
        "std": json.dumps([float(f"{value:.8g}") for value in std]),
    }


def _check_formats(formats: Sequence[str]) -> list[str]:
    for name in formats or [""]:
        if name not in FILES:
            got = f"{name!r}{did_you_mean(name, FILES)}" if name else "none."
            raise ValueError(f"Expected `format` to be among {', '.join(FILES)}, but got {got}")
    missing = [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]
    if "onnx" in formats and missing:
        remedy = "`pip install 'powergrad[export]'`, or choose `--format safetensors,torch`"
        raise ImportError(f"The format onnx needs {', '.join(missing)}; {remedy}.")
    return [name for name in FILES if name in formats]


def _check_temperature(wanted: str | float, trained: Trained) -> str | float:
    if wanted in ("fitted", "none") or (wanted == "alpha" and trained.factor):
        return wanted
    if wanted == "alpha":
        got = "0; choose the temperature fitted, none or a number"
        raise ValueError(f"Expected an alpha above 0 to fold into the head, but got {got}.")
    with contextlib.suppress(ValueError):
        if 0 < float(wanted) < math.inf:
            return float(wanted)
    names = "alpha, fitted, none or a number above 0"
    raise ValueError(f"Expected `temperature` to be {names}, but got {wanted!r}.")


def _check_place(place: Path, force: bool) -> None:
    if place.exists() and not place.is_dir():
        raise RunError(f"{str(place)!r} is a file, not a folder.")
    names = {path.name for path in place.iterdir()} if place.exists() else set()
    if foreign := sorted(names - {*FILES.values(), PREPROCESSING, CARD}):
        raise RunError(f"{str(place)!r} is not an export to replace: it contains {foreign[0]!r}.")
    if names and not force:
        raise RunError(f"{str(place)!r} exists; choose another `--out`, or use `--force`.")


@contextlib.contextmanager
def _written_whole(place: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `place` on success and is removed on failure."""
    place = place.resolve()
    fresh = place.with_name(f".{place.name}.partial")
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        yield fresh
        for path in fresh.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        if place.exists():
            shutil.rmtree(place)
        os.replace(fresh, place)
    except OSError as error:
        raise RunError(f"Could not write {str(place)!r}: {error}.") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _write(
    folder: Path, formats: list[str], deployed: Deployed, metadata: Metadata, data: Datasets
) -> None:
    """Write the files, read each back, and compare its logits on real images."""
    (images, _), _ = next(data.test.test_batches(64))
    pixels = deployed.pixels(images)
    with torch.no_grad():
        expected = deployed(pixels)
    with warnings.catch_warnings():
        # PyTorch 2.13 itself uses an API that it deprecates.
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)", FutureWarning)
        program: Any = None
        if formats != ["safetensors"]:
            inputs = torch.zeros(TRACED, *pixels.shape[1:])
            shapes = {"pixels": {0: torch.export.Dim("batch")}}
            program = torch.export.export(deployed, (inputs,), dynamic_shapes=shapes)
        for name in formats:
            source = deployed if name == "safetensors" else program
            forward = WRITERS[name](folder / FILES[name], source, metadata)
            _check_logits(FILES[name], forward, pixels, expected)


def _write_weights(path: Path, deployed: Deployed, metadata: Metadata) -> Forward:
    """Write the file, load it, and return its forward function; as do the next functions."""
    weights = {key: value.contiguous() for key, value in deployed.network.state_dict().items()}
    path.write_bytes(save(weights, {"format": "pt", **metadata}))
    again = copy.deepcopy(deployed)
    again.network.load_state_dict(load_file(path))
    return again


def _write_program(path: Path, program: ExportedProgram, metadata: Metadata) -> Forward:
    torch.export.save(program, path, extra_files={"metadata.json": json.dumps(metadata)})
    return torch.export.load(path).module()


def _write_onnx(path: Path, program: ExportedProgram, metadata: Metadata) -> Forward:
    import onnxruntime

    options: Any = {"input_names": ["pixels"], "output_names": ["logits"], "verbose": False}
    shapes = {"pixels": {0: "batch"}}
    model: Any = torch.onnx.export(program, dynamo=True, dynamic_shapes=shapes, **options)
    model.model.metadata_props.update(metadata)
    model.save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda pixels: torch.from_numpy(session.run(None, {"pixels": pixels.numpy()})[0])


WRITERS: dict[str, Callable[[Path, Any, Metadata], Forward]] = {
    "safetensors": _write_weights,
    "torch": _write_program,
    "onnx": _write_onnx,
}


def _check_logits(name: str, forward: Forward, pixels: Tensor, expected: Tensor) -> None:
    """Refuse a file whose logits differ from those of the network, for several batch sizes."""
    bound = TOLERANCE * max(1.0, expected.abs().max().item())
    for count in (1, 3, len(pixels)):
        with torch.no_grad():
            error = (forward(pixels[:count]) - expected[:count]).abs().max().item()
        if not error <= bound:
            size = f"{error:.1e}, more than {bound:.1e}, in a batch of {count}"
            raise RunError(f"The logits of {name} are wrong by {size}; nothing was written.")


def _render(name: str, **context: Any) -> str:
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.filters["repr"] = repr
    environment.filters["yaml"] = functools.partial(yaml.safe_dump, sort_keys=False)
    template = resources.files("powergrad.lab.trainer") / f"{name}.jinja"
    return environment.from_string(template.read_text(encoding="utf-8")).render(context)


# Trained networks ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """The weights of a run, in the file `path`."""

    run: Run
    path: Path
    recipe: Recipe

    @property
    def factor(self) -> float:
        """Training fits ``softmax(factor * logits)``."""
        return self.recipe.loss.alpha * self.recipe.loss.logit_scale

    def network(self, data: Datasets) -> nn.Module:
        """The network with its weights, in float32 and in evaluation mode."""
        network = create_model(**self.recipe.model.arguments(data))
        weights = load_checkpoint(self.path)
        if self.path.suffix == ".safetensors":
            with safe_open(self.path, "pt") as file:
                if FOLDED in (file.metadata() or {}):
                    reason = "not the weights of a run; its head would be scaled twice"
                    raise RunError(f"{str(self.path)!r} is an export, {reason}.")
        try:
            network.load_state_dict(weights)
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip()
            wanted = f"the weights of {self.recipe.model.name}"
            raise RunError(f"{str(self.path)!r} does not hold {wanted}: {reason}") from None
        return network.eval()


def open_trained(source: Path, data_dir: str | None = None) -> Trained:
    """Open the weights of a finished run, or a file of weights in the folder of a run."""
    if not source.exists():
        raise RunError(f"{str(source)!r} does not exist.")
    folders = [source] if source.is_dir() else [source.parent, source.parent.parent]
    run = Run(next((folder for folder in folders if Run(folder).exists()), folders[0]))
    recipe, result = run.recipe(), run.result()
    if data_dir is not None:
        recipe = recipe.override({"machine.data_dir": data_dir})
    path = run.folder / "model.safetensors" if source.is_dir() else source
    if result is None and source.is_dir():
        remedy = f"continue it with `powergrad train {source}`, or export a file of checkpoint/"
        raise RunError(f"The run in {str(source)!r} is not finished; {remedy}.")
    if result is not None and result.about["diverged"]:
        raise RunError(f"The run in {str(run.folder)!r} diverged.")
    return Trained(run, path, recipe)


class Answers(NamedTuple):
    logits: Tensor
    labels: Tensor


class HeldOut(NamedTuple):
    """Outputs on images not used for training: some to fit a temperature, others to report on."""

    fit: Answers
    report: Answers
    fit_on: str  # the images in words
    report_on: str


def answers(forward: Forward, trained: Trained, data: Datasets) -> HeldOut:
    """The outputs of a network on images to fit a temperature on, and on others to report on.

    If the run held out part of its training data, the temperature is fitted on that part and
    reported on the test set. If there is no such part, or no test set, the available images are
    split: a fixed half of each class is used for fitting, the other half for reporting.
    """
    train, hold_out = trained.recipe.train, trained.recipe.data.hold_out
    size = train.test_batch_size or train.batch_size
    tested = _run_over(forward, data.test, size)
    kept_back = f"training images that the run held out (`data.hold_out` {hold_out:g})"
    unused = "images not used for training or fitting"
    if hold_out and data.has_test:
        tests = trained.recipe.override({"data.hold_out": 0.0}).load_data().test
        reported = _run_over(forward, tests, size)
        fitted_on = f"the {len(tested.labels):,} {kept_back}"
        reported_on = f"the test set, {len(reported.labels):,} {unused}"
        return HeldOut(tested, reported, fitted_on, reported_on)
    half = torch.from_numpy(held_out(tested.labels.numpy(), 0.5))
    fit, report = (Answers(*(tensor[part] for tensor in tested)) for part in (half, ~half))
    name, reason = "test set", "because the run used all of its training data"
    if hold_out:
        name, reason = kept_back, "because the data have no test set"
    fitted_on = f"the other half of the {name}, {len(fit.labels):,} images, {reason}"
    reported_on = f"a fixed half of the {name}, {len(report.labels):,} {unused}"
    return HeldOut(fit, report, fitted_on, reported_on)


@torch.no_grad()
def _run_over(forward: Forward, split: Split, size: int) -> Answers:
    console, count = Console(stderr=True), math.ceil(len(split) / size)
    options: Any = {"console": console, "disable": not console.is_terminal, "transient": True}
    batches = track(split.test_batches(size), "measuring", count, **options)
    outputs = [(forward(images), labels) for (images, labels), _ in batches]
    return Answers(*(torch.cat(part) for part in zip(*outputs, strict=True)))


def measures(given: Answers, *, temperature: float = 1.0) -> dict[str, float]:
    """Top-1 accuracy in percent, and the calibration of the softmax at a temperature."""
    error = functools.partial(calibration.expected_calibration_error, *given, bins=BINS)
    return {
        "temperature": temperature,
        "accuracy": 100 * right_answers(*given).double().mean().item(),
        "nll": calibration.negative_log_likelihood(*given, temperature=temperature),
        "brier": calibration.brier_score(*given, temperature=temperature),
        "ece_width": error(temperature=temperature),
        "ece_mass": error(temperature=temperature, binning="mass"),
    }
