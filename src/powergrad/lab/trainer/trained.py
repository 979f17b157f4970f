"""A trained network: the weights of a run, and its outputs on images it was not trained on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from safetensors import safe_open
from torch import Tensor, nn

from powergrad import calibration
from powergrad.lab.data import Datasets, Split
from powergrad.lab.data.streams import held_out
from powergrad.lab.trainer.networks import create_model
from powergrad.lab.trainer.recipe import Recipe
from powergrad.lab.trainer.run_folder import Run, RunError
from powergrad.lab.trainer.session import right_answers
from powergrad.monitor.checkpoint import load_checkpoint

BINS = 15  # of the calibration errors
FOLDED = "temperature_folded"  # in the metadata of an export


@dataclass(frozen=True)
class Trained:
    """The weights of a run, in the file `path`.

    `alpha` is that at the end of training; it is None for a checkpoint under a schedule.
    """

    run: Run
    path: Path
    recipe: Recipe
    alpha: float | None

    @property
    def factor(self) -> float | None:
        """Training fits ``softmax(factor * logits)``."""
        return None if self.alpha is None else self.alpha * self.recipe.loss.logit_scale

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
    if path.suffix == ".pt" and recipe.train.ema is not None:
        why = "holds two sets of weights, because the run uses `train.ema`"
        raise RunError(f"{str(path)!r} {why}; choose a safetensors file.")
    alpha: float | None = recipe.loss.alpha
    if recipe.loss.alpha_schedule != "constant":
        is_final = path.name == "model.safetensors"
        alpha = result.about["alpha"] if is_final and result is not None else None
    return Trained(run, path, recipe, alpha)


class Answers(NamedTuple):
    logits: Tensor
    labels: Tensor


class HeldOut(NamedTuple):
    """Outputs on images not used for training: some to fit a temperature, others to report on."""

    fit: Answers
    report: Answers
    fit_on: str  # the images in words
    report_on: str


def answers(forward: Callable[[Tensor], Tensor], trained: Trained, data: Datasets) -> HeldOut:
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
def _run_over(forward: Callable[[Tensor], Tensor], split: Split, size: int) -> Answers:
    console = Console(stderr=True)
    options = {"console": console, "transient": True, "disable": not console.is_terminal}
    total = math.ceil(len(split) / size)
    batches = track(split.test_batches(size), "measuring", total=total, **options)
    outputs = [(forward(images), labels) for (images, labels), _ in batches]
    return Answers(*(torch.cat(part) for part in zip(*outputs, strict=True)))


def measures(given: Answers, *, temperature: float = 1.0) -> dict[str, float]:
    """Top-1 accuracy in percent, and the calibration of the softmax at a temperature."""
    error = partial(calibration.expected_calibration_error, *given, bins=BINS)
    return {
        "temperature": temperature,
        "accuracy": 100 * right_answers(*given).double().mean().item(),
        "nll": calibration.negative_log_likelihood(*given, temperature=temperature),
        "brier": calibration.brier_score(*given, temperature=temperature),
        "ece_width": error(temperature=temperature),
        "ece_mass": error(temperature=temperature, binning="mass"),
    }
