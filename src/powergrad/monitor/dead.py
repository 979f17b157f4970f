r"""The census: which units of a network are dead, how, since when, and whether they came back.

A unit is an output channel of a convolution or a linear layer, a gain of a normalisation, or a
feature that enters the classifier. There are six ways to be dead:

    weight      the norm of its filter has vanished
    gain        the gain of its normalisation has vanished; a remaining bias is shown
    silent      it is zero after the rectifier that follows, for all the given data
    gradient    its filter gets no gradient from any of the given data
    feature     it is a channel before the classifier that is zero for all the given data
    nonfinite   its weights are NaN or infinite

A norm or a gain has *vanished* if it is at most

    start * s       if its initial value `s` is known: 1% of it
    layer * m       if it is not (or is zero): 0.1% of the largest value `m` of its layer
    zero            in any case: 1e-8, which also detects a layer that vanished as a whole

with smaller fractions for gains and filters of one or two weights (`chance`). If a normalisation
follows a layer, the common scale of its filters is divided out first. docs/dead-filters.md gives
the reasons.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from powergrad.head import unwrap
from powergrad.monitor.activity import Activity, observe
from powergrad.monitor.checkpoint import load_checkpoint, state_weights
from powergrad.monitor.counts import Census, LayerState, count
from powergrad.monitor.history import follow
from powergrad.monitor.layers import Layer, Weight, describe_layers, model_weights, on_host
from powergrad.monitor.recording import Recording
from powergrad.monitor.thresholds import DeathLine, Thresholds

__all__ = ["census"]


def census(
    source: nn.Module | Mapping[str, Any] | str | os.PathLike[str],
    data: Iterable[Any] | None = None,
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    initial: nn.Module | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    head: nn.Module | str | None = None,
    thresholds: Thresholds | None = None,
) -> Census:
    r"""Find the dead units in a model, a checkpoint or a recording.

    Weights and gains are always examined. With `data`, the model is also run in evaluation mode to
    find units that never fire and features that are zero; with `loss`, also units that get no
    gradient. The model is not changed. In a recording, each unit is followed from the first row
    (its initial value) to the last.

    Args:
        source: A model; a state dict; the path of a checkpoint (safetensors, or ``torch.save``
            read with ``weights_only=True``); or the folder of a :class:`FilterMonitor`, or of a run
            with such a folder named ``norms``.
        data: Batches for the model, each a tensor or a tuple ``(input, target)``; they are moved
            to the model's device.
        loss: ``loss(output, target)``, which returns a scalar; any cross-entropy is suitable.
        initial: The model, state dict or checkpoint at the start of training, with which each norm
            is compared. Not for a recording.
        head: The classifier or its name; by default it is searched. If several layers could be the
            classifier, features are not examined without `head`.
        thresholds: See :class:`Thresholds`.

    Returns:
        The dead units, the counts per layer, and the events of a recording.

    Raises:
        ValueError: If a path holds nothing that can be read, `initial` does not fit, `data` is
            empty or given for anything but a model, or `loss` is given without `data`.
        TypeError: If `source` or a batch has another type.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU())
        >>> with torch.no_grad():
        ...     _ = model[0].weight[2].zero_()
        >>> [(unit.layer, unit.unit, unit.how) for unit in census(model).dead]
        [('0', 2, ('weight',))]
    """
    thresholds = Thresholds() if thresholds is None else thresholds
    if data is not None and not isinstance(source, nn.Module):
        got = type(source).__name__
        raise ValueError(f"Expected `source` to be a model if `data` is given, but got {got}.")
    if loss is not None and data is None:
        raise ValueError("Expected `data` to be given with `loss`, but got none.")
    if isinstance(source, (str, os.PathLike)) and Path(source).is_dir():
        if not Recording.exists(source):
            raise ValueError(f"Expected {os.fspath(source)!r} to hold a recording, but got none.")
        if initial is not None:
            raise ValueError(
                "Expected no `initial` for a recording, but got one; the first row of a recording "
                "is its initial state."
            )
        return follow(Recording(source), thresholds)
    layers = _read(source, "source")
    starts = {}
    if initial is not None:
        starts = {layer.name: weight.values() for layer, weight in _read(initial, "initial")}
        _check_starts(starts, [layer for layer, _ in layers])
    activity = Activity()
    if isinstance(source, nn.Module) and data is not None:
        activity = observe(source, data, loss, head)
    states = [_judge(*pair, starts.get(pair[0].name), activity, thresholds) for pair in layers]
    _excuse_layers_behind_gates(states)
    if (features := activity.features) is not None:
        layer = Layer(None, f"input of {activity.classifier}", "features", len(features))
        zero = features <= thresholds.output * _largest(features)
        states.append(LayerState(layer, {"feature": zero}, features))
    if isinstance(source, nn.Module):
        source = unwrap(source)
    name = str(source) if isinstance(source, (str, os.PathLike)) else type(source).__name__
    return count(name, states, examples=activity.examples)


def _read(source: Any, argument: str) -> list[tuple[Layer, Weight]]:
    """The layers and normalisations in a model, a state dict or a checkpoint."""
    if isinstance(source, (str, os.PathLike)):
        if not Path(source).is_file():
            raise ValueError(f"Expected {os.fspath(source)!r} to exist, but got no such file.")
        source = load_checkpoint(source)
    if isinstance(source, nn.Module):
        weights, ordered = [weight for weight, _ in model_weights(source)], True
    elif isinstance(source, Mapping):
        weights, ordered = state_weights(source)
    else:
        raise TypeError(
            f"Expected `{argument}` to be a model, a state dict or a path, but got "
            f"{type(source).__name__}."
        )
    if all(weight.is_gain for weight in weights):
        raise ValueError(
            "Expected a model or a state dict with a convolution or a linear layer, but got none."
        )
    layers = zip(describe_layers(weights, ordered), weights, strict=True)
    return sorted(layers, key=lambda pair: pair[1].is_gain)


def _check_starts(starts: dict[str, Tensor], layers: list[Layer]) -> None:
    for layer in layers:
        got = len(starts[layer.name]) if layer.name in starts else "none"
        if got != layer.units:
            raise ValueError(
                f"Expected `initial` to have {layer.units} units in {layer.name!r}, but got {got}."
            )


def _judge(
    layer: Layer, weight: Weight, start: Tensor | None, activity: Activity, thresholds: Thresholds
) -> LayerState:
    """The state of one layer, from its weights and the activity of its units on the data."""
    values = weight.values()
    state = LayerState(layer, {}, values, gradients=activity.gradients.get(layer.name))
    vanished = values <= DeathLine([layer], thresholds)(values, start)
    state.how["gain" if weight.is_gain else "weight"] = vanished
    state.how["nonfinite"] = ~values.isfinite()
    if start is not None:
        state.unborn = vanished & (start <= thresholds.zero)
    if layer.name in activity.fired:
        state.how["silent"] = ~activity.fired[layer.name]
    if state.gradients is not None:
        none = state.gradients <= thresholds.gradient * _largest(state.gradients)
        state.learns = ~none  # a NaN gradient counts as a gradient
        if not weight.is_gain:
            state.how["gradient"] = none
    if weight.is_gain:
        state.biases = None if weight.bias is None else on_host(weight.bias)
        if weight.batches is not None and int(weight.batches) == 0:
            state.unborn = vanished  # as initialised
    return state


def _largest(values: Tensor) -> Tensor:
    return values.nan_to_num(0, 0).max()


def _excuse_layers_behind_gates(states: list[LayerState]) -> None:
    """Do not count layers without gradient as dead if a layer that is zero but learns blocks them.

    An example of such a gate is the last gain of a residual branch that is initialised to zero: it
    lets no gradient into its branch before the first step.
    """
    measured = [(state, state.learns) for state in states if state.learns is not None]
    gates = any(
        learns.any() and bool(state.how[way].all())
        for state, learns in measured
        for way in ("weight", "gain")
        if way in state.how
    )
    for state, learns in measured:
        if gates and not learns.any():
            state.how.pop("gradient", None)
