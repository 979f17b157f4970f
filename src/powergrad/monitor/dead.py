r"""The census: which units of a network are dead, how, since when, and whether they came back.

A unit is an output channel of a convolution or a linear layer, a gain of a normalisation, or a
feature that enters the classifier. It can be found in six ways:

    weight      the norm of its filter has vanished
    gain        the gain of its normalisation has vanished; a bias that is left is shown
    silent      it is zero after the rectifier that follows, over all the given data
    gradient    its filter gets no gradient, over all the given data
    feature     it is a channel before the classifier that is zero over all the given data
    nonfinite   its weights are NaN or infinite

A norm or a gain has *vanished* if it is at most

    start * s       where its value `s` at the start is known: 1% of it
    layer * m       where it is not (or is zero): 0.1% of the largest of its layer, `m`
    zero            in any case: 1e-8, which also finds a layer that vanished as a whole

with smaller fractions for gains and filters of one or two weights, which pass near zero while they
live. A normalisation undoes the common scale of the filters before it, so there `s` is multiplied
by what the least shrunken filter of the layer has kept (if under 1): filters that shrink together
live.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from powergrad.monitor.activity import Activity, observe
from powergrad.monitor.history import follow
from powergrad.monitor.layers import Filters, Gains, Layer, load_checkpoint, read_units, unwrap
from powergrad.monitor.recording import Recording
from powergrad.monitor.results import Census, Finding, count
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
    r"""Find the units that are dead, in a model, a checkpoint or a recording.

    Weights and gains are always judged. With `data` a model is also run, in evaluation mode, to see
    which units never fire and which features are zero; with `loss` as well, which units get no
    gradient. Nothing of the model is changed. In a recording, each unit is followed from the first
    row, its start, to the last.

    Args:
        source: A model; a state dict; the path of a checkpoint (safetensors, or ``torch.save``
            read with ``weights_only=True``); or the folder of a :class:`FilterMonitor` or of a run
            that has it as ``norms``.
        data: Batches for the model, each a tensor or a tuple ``(input, target)``; they are moved
            to the model's device.
        loss: ``loss(output, target)``, a scalar: any cross-entropy will do.
        initial: The model, state dict or checkpoint at the start of the training, if `source` is
            not a recording: what each norm is compared with.
        head: The classifier or its name; found if not given.
        thresholds: See :class:`Thresholds`.

    Returns:
        The units found, the counts of every layer, and the events of a recording.

    Raises:
        ValueError: If a path holds nothing that can be read, `initial` does not fit, `data` is
            empty or given for anything but a model, or `loss` comes without `data`.
        TypeError: If `source` or a batch is of another type.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU())
        >>> with torch.no_grad():
        ...     _ = model[0].weight[2].zero_()
        >>> [(unit.layer, unit.unit, unit.how) for unit in census(model).dead]
        [('0', 2, ('weight',))]
    """
    thresholds = Thresholds() if thresholds is None else thresholds
    if data is not None and not isinstance(source, nn.Module):
        raise ValueError(
            "Expected `data` only where `source` is a model, which can be run on it, but got "
            f"{type(source).__name__}."
        )
    if loss is not None and data is None:
        raise ValueError("Expected `data` where `loss` is given, but got none.")
    if isinstance(source, (str, os.PathLike)) and Path(source).is_dir():
        if not Recording.exists(source):
            raise ValueError(f"Expected {os.fspath(source)!r} to hold a recording, but got none.")
        if initial is not None:
            raise ValueError("Expected no `initial` for a recording, whose first row is its start.")
        return follow(Recording(source), thresholds)
    filters, gains = read_units(_state_of(source, "source"))
    starts = {} if initial is None else _starts(filters, gains, _state_of(initial, "initial"))
    activity = Activity()
    if isinstance(source, nn.Module) and data is not None:
        activity = observe(source, data, loss, head)
    findings = _judge(filters, gains, starts, activity, thresholds)
    held = unwrap(source) if isinstance(source, nn.Module) else source
    name = str(held) if isinstance(held, (str, os.PathLike)) else type(held).__name__
    return count(name, findings, examples=activity.examples)


def _state_of(source: Any, name: str) -> nn.Module | Mapping[str, Any]:
    if isinstance(source, (nn.Module, Mapping)):
        return source
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            f"Expected `{name}` to be a model, a state dict or a path, but got "
            f"{type(source).__name__}."
        )
    if not Path(source).is_file():
        raise ValueError(f"Expected {os.fspath(source)!r} to be there, but got no such file.")
    return load_checkpoint(source)


def _starts(
    filters: list[Filters], gains: list[Gains], initial: nn.Module | Mapping[str, Any]
) -> dict[str, Tensor]:
    """The norms and gains at the start, by layer."""
    old_filters, old_gains = read_units(initial)
    starts = {old.layer.name: old.norms for old in old_filters}
    starts |= {old.layer.name: old.gains.abs() for old in old_gains}
    for layer in [each.layer for each in (*filters, *gains)]:
        found = starts.get(layer.name)
        if found is None or len(found) != layer.units:
            got = "none" if found is None else str(len(found))
            raise ValueError(
                f"Expected `initial` to have {layer.units} units in {layer.name!r}, but got {got}."
            )
    return starts


def _judge(
    filters: list[Filters],
    gains: list[Gains],
    starts: dict[str, Tensor],
    activity: Activity,
    thresholds: Thresholds,
) -> list[Finding]:
    findings = []
    for each in (*filters, *gains):
        layer = each.layer
        values = each.norms if isinstance(each, Filters) else each.gains.abs()
        start = starts.get(layer.name)
        finding = Finding(layer, {}, values, gradients=activity.gradients.get(layer.name))
        vanished = values <= DeathLine([layer], thresholds)(values, start)
        if start is not None:
            finding.unborn = vanished & (start <= thresholds.zero)
        if finding.gradients is not None:
            least = thresholds.gradient * _largest(finding.gradients)
            finding.learns = ~(finding.gradients <= least)  # NaN is a gradient, if a broken one
        if layer.name in activity.fired:
            finding.how["silent"] = ~activity.fired[layer.name]
        if isinstance(each, Filters):
            finding.how["weight"] = vanished
            if finding.learns is not None:
                finding.how["gradient"] = ~finding.learns
        else:
            finding.how["gain"] = vanished
            finding.biases = each.biases
            if each.untrained:
                finding.unborn = vanished
        finding.how["nonfinite"] = ~values.isfinite()
        findings.append(finding)
    _excuse_layers_behind_gates(findings)
    if activity.features is not None:
        layer = Layer(None, f"input of {activity.classifier}", "features", len(activity.features))
        least = thresholds.output * _largest(activity.features)
        findings.append(Finding(layer, {"feature": activity.features <= least}, activity.features))
    return findings


def _largest(values: Tensor) -> Tensor:
    return values.nan_to_num(0, 0).max()


def _excuse_layers_behind_gates(findings: list[Finding]) -> None:
    """Where a whole layer is zero but learns, the layers without any gradient may be behind it.

    The last gain of a residual branch that is initialised to zero is such a gate: it lets no
    gradient into its branch before its first step.
    """
    gates = any(
        finding.learns is not None and finding.learns.any() and bool(finding.how[way].all())
        for finding in findings
        for way in ("weight", "gain")
        if way in finding.how
    )
    for finding in findings:
        if gates and finding.learns is not None and not finding.learns.any():
            finding.how.pop("gradient", None)
