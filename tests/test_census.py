"""The census: planted dead units are found, living ones are not accused.

Two oracles are independent of the code. What was planted is known. And a unit is dead over some
data if putting a constant in the place of its channel changes no output (`ablation`).
"""

from __future__ import annotations

import copy
import csv
import functools
import itertools
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from powergrad.monitor import Census, FilterMonitor, Thresholds, Unit, census
from powergrad.monitor.checkpoint import state_weights
from powergrad.monitor.layers import model_weights

Units = set[tuple[str, int]]  # names of layers, and places in them


# Small networks of every kind ---------------------------------------------------------------------


class Block(nn.Module):
    """A residual block that adds in place, as the common implementations do."""

    def __init__(self, inputs: int, outputs: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.bn1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.bn2 = norm(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Identity()
        if inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module] = nn.Identity) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1)
        self.bn1 = norm(6)
        self.layer1 = Block(6, 6, norm)
        self.layer2 = Block(6, 8, norm)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        return self.fc(self.layer2(self.layer1(x)).mean((2, 3)))


def batch_normalised() -> ResNet:
    model = ResNet(nn.BatchNorm2d)
    for _ in range(10):
        model(torch.randn(16, 3, 8, 8))
    return model


def grouped() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU6(),
        nn.Conv2d(8, 8, 3, stride=2, groups=8),
        nn.ReLU6(),
        nn.Conv2d(8, 6, 3, padding=1, groups=2),
        nn.Hardswish(),
        nn.ConvTranspose2d(6, 8, 3, groups=2),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 5, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(180, 4),
    )


def mlp() -> nn.Module:
    first, second, last = nn.Linear(192, 10), nn.Linear(10, 9), nn.Linear(9, 4)
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), second, nn.BatchNorm1d(9), nn.ReLU(), last)


CONVOLUTIONS = [f"layer{i}.conv{j}" for i in (1, 2) for j in (1, 2)]
# Each with the names of the layers that a normalisation of their channels follows.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "un-normalised resnet": (ResNet, []),
    "batch-normalised resnet": (batch_normalised, ["conv1", "layer2.downsample.0", *CONVOLUTIONS]),
    "depthwise, grouped and transposed": (grouped, ["0"]),
    "mlp": (mlp, ["3"]),
}
LAYER = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)
NORM = (nn.BatchNorm2d, nn.BatchNorm1d, nn.GroupNorm)


@functools.cache
def made(network: str) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[network][0]()


def build(network: str) -> nn.Module:
    return copy.deepcopy(made(network))


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(2, 8, 3, 8, 8, generator=generator)
    return [(batch, torch.arange(8) % 4) for batch in inputs]


def units_of(model: nn.Module, kinds: tuple[type, ...]) -> list[tuple[str, int]]:
    units = []
    for name, module in model.named_modules():
        if isinstance(module, kinds):
            units += [(name, unit) for unit in range(len(module.get_parameter("bias")))]
    return units


def filter_of(model: nn.Module, name: str, unit: int, gradient: bool = False) -> Tensor:
    """A view of the weights of one filter, or of their gradients."""
    layer = model.get_submodule(name)
    weight: Any = layer.weight.grad if gradient else layer.weight
    if isinstance(layer, nn.ConvTranspose2d):
        ins, outs = layer.in_channels // layer.groups, layer.out_channels // layer.groups
        group = unit // outs
        return weight[group * ins : (group + 1) * ins, unit % outs]
    return weight[unit]


@torch.no_grad()
def plant(model: nn.Module, name: str, unit: int, how: str) -> None:
    if how == "silent":
        model.get_submodule(name).get_parameter("bias")[unit] = -30.0
    else:
        filter_of(model, name, unit).mul_({"zero": 0.0, "tiny": 1e-5}[how])


@torch.no_grad()
def ablation(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> Units:
    """The units whose channel can be made constant without any change of any output.

    The constant is its smallest value, so that a channel which stays under a rectifier's zero, by
    itself or in a sum, stays there. The logits are left out: they are the output. All units are
    tried in one pass, each on a copy of the data.
    """
    model = copy.deepcopy(model).eval()
    units = units_of(model, LAYER)[:-4]
    inputs = torch.cat([x for x, _ in data])
    copies = inputs.repeat(len(units), *[1] * (inputs.dim() - 1))
    expected = model(copies)

    def hold_constant(rows: slice, unit: int, module: nn.Module, args: Any, output: Tensor) -> None:
        channel = output[rows].select(-1 if isinstance(module, nn.Linear) else 1, unit)
        channel.fill_(channel.min().item())

    for place, (name, unit) in enumerate(units):
        rows = slice(place * len(inputs), (place + 1) * len(inputs))
        hook = functools.partial(hold_constant, rows, unit)
        model.get_submodule(name).register_forward_hook(hook)
    changed = (model(copies) != expected).unflatten(0, (len(units), -1)).flatten(1).any(1)
    return {unit for unit, change in zip(units, changed.tolist(), strict=True) if not change}


def without_gradient(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> Units:
    """The units whose filters have a gradient of exactly zero on each batch, by plain backward."""
    dead = {*units_of(model, LAYER)}
    for inputs, target in data:
        twin = copy.deepcopy(model).eval()
        F.cross_entropy(twin(inputs), target).backward()
        dead = {unit for unit in dead if not filter_of(twin, *unit, gradient=True).any()}
    return dead


def places(units: Iterable[Unit]) -> Units:
    return {(unit.layer, unit.unit) for unit in units}


def filters(result: Census) -> Units:
    """The units of convolutions and linear layers that were found, in whatever state."""
    return places(unit for unit in result.units if unit.number is not None)


def ways_of(result: Census, layer: str) -> list[str]:
    """The ways in which a layer was judged."""
    return [way for count in result.layers if count.layer == layer for way in count.how]


# Planted units ------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", NETWORKS)
@given(data=st.data())
def test_every_planted_filter_is_found_and_no_other(network: str, data: st.DataObject) -> None:
    """By its weights alone: in the model, against its start, and in its state dict."""
    start = build(network)
    model = copy.deepcopy(start)
    chosen = data.draw(st.sets(st.sampled_from(units_of(model, LAYER)), max_size=12))
    tiny: Units = set()
    for name, unit in sorted(chosen):
        how = data.draw(st.sampled_from(["zero", "tiny"]))
        plant(model, name, unit, how)
        tiny |= {(name, unit)} if how == "tiny" else set()
    whole = all_of_a_layer(model, chosen)
    # Before a normalisation the scale of a filter is not seen: where no filter has kept its size,
    # the tiny ones are the layer, and do what they did (but for the normalisation's eps).
    dead = {
        u for u in chosen if u not in tiny or u[0] not in whole.intersection(NETWORKS[network][1])
    }
    for result in (census(model, initial=start), census(model.state_dict(), initial=start)):
        assert places(result.units) == dead
        assert all(unit.how == ("weight",) and unit.state == "dead" for unit in result.units)
        assert set(result.whole_layers) == all_of_a_layer(model, dead)
    if not whole:  # alone, a layer that is all tiny may just be small
        assert places(census(model).units) == places(census(model.state_dict()).units) == chosen


def all_of_a_layer(model: nn.Module, chosen: Units) -> set[str]:
    living = {name for name, unit in units_of(model, LAYER) if (name, unit) not in chosen}
    return {name for name, _ in chosen} - living


@pytest.mark.parametrize("network", NETWORKS)
@given(data=st.data())
def test_census_over_data_finds_what_ablation_finds(network: str, data: st.DataObject) -> None:
    """Zero filters, silent units and gains, and what is cut off by them: all, and nothing else."""
    model = build(network)
    chosen = data.draw(st.sets(st.sampled_from(units_of(model, LAYER)[:-4]), max_size=6))
    zero: Units = set()
    for name, unit in sorted(chosen):
        how = data.draw(st.sampled_from(["zero", "silent"]))
        plant(model, name, unit, how)
        zero |= {(name, unit)} if how == "zero" else set()
    if gains := units_of(model, NORM):
        for name, unit in sorted(data.draw(st.sets(st.sampled_from(gains), max_size=3))):
            with torch.no_grad():
                model.get_parameter(f"{name}.weight")[unit] = 0
    result = census(model, batches(), loss=F.cross_entropy)
    dead = ablation(model, batches())
    if gates := all_of_a_layer(model, zero):
        # A whole layer that is zero and learns is a gate: what gets no gradient behind it will once
        # it has learnt.
        cut_off = all_of_a_layer(model, without_gradient(model, batches()))
        if gates - cut_off:
            dead = {(name, unit) for name, unit in dead if name not in cut_off}
    assert dead <= filters(result)
    # A unit that fires only where all after it is off keeps it off, and gets no gradient.
    rest = [u for u in result.units if u.number and (u.layer, u.unit) not in dead]
    assert all(u.how == ("gradient",) for u in rest)
    if rest:
        assert places(rest) <= without_gradient(model, batches())


@pytest.mark.parametrize("network", NETWORKS)
@given(data=st.data())
def test_revived_and_killed_again(network: str, data: st.DataObject, tmp_path_factory) -> None:
    """Every planted life is read back from the recording, death by death."""
    model = build(network)
    # 5 are less than a layer before a normalisation has, which would live if all were tiny.
    chosen = sorted(data.draw(st.sets(st.sampled_from(units_of(model, LAYER)), max_size=5)))
    rows = data.draw(st.integers(1, 8))
    rest_of_life = st.lists(st.booleans(), min_size=rows, max_size=rows)
    lives = {unit: [True, *data.draw(rest_of_life)] for unit in chosen}
    folder = tmp_path_factory.mktemp("lives")
    alive = {unit: filter_of(model, *unit).detach().clone() for unit in chosen}
    with FilterMonitor(model, folder, every=1) as monitor:
        for row in range(rows + 1):
            for unit, life in lives.items():
                with torch.no_grad():
                    filter_of(model, *unit).copy_(alive[unit] * (1.0 if life[row] else 1e-4))
            monitor.step(10 * row)
    result = census(folder)

    changes = [
        (10 * row, *unit, "revived" if now else "died")
        for unit, life in lives.items()
        for row, (before, now) in enumerate(itertools.pairwise(life), start=1)
        if before != now
    ]
    assert sorted((e.step, e.layer, e.unit, e.what) for e in result.events) == sorted(changes)
    assert [e.step for e in result.events] == sorted(e.step for e in result.events)
    for what in ("died", "revived"):
        units = {(name, unit) for _, name, unit, change in changes if change == what}
        assert sum(getattr(layer, what) for layer in result.layers) == len(units)
    assert filters(result) == {unit for unit, life in lives.items() if not life[-1]}
    for unit in result.units:
        own = [(step, what) for step, *which, what in changes if which == [unit.layer, unit.unit]]
        assert unit.since == own[-1][0]
        assert unit.revivals == sum(what == "revived" for _, what in own)
    assert result.steps == (0, 10 * rows)


# Where the line is --------------------------------------------------------------------------------


def scaled(factors: list[float], inputs: int = 50) -> nn.Linear:
    layer = nn.Linear(inputs, len(factors))
    directions = F.normalize(torch.randn(len(factors), inputs))
    layer.weight.data[:] = directions * torch.tensor(factors)[:, None]
    return layer


MIXED = [1.0, 0.3, 0.05, 0.01, 0.0011, 0.0009]
NORMALISED = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)]
FEW = {1: 1e-6, 2: 1e-3, 3: 1e-2, 9: 1e-2}  # the line of a filter of so few weights


@pytest.mark.parametrize(
    ("layers", "factors", "knows_start", "limits", "dead"),
    [
        # Without a start, 0.1% of the largest of the layer; a small layer may live.
        ([scaled(MIXED)], [1.0] * 6, False, {}, {5}),
        ([scaled(MIXED)], [1.0] * 6, False, {"layer": 0.02}, {3, 4, 5}),
        ([scaled([1.0] * 9)], [1e-4] * 9, False, {}, set()),
        ([scaled([1.0] * 9)], [1e-12] * 9, False, {}, set(range(9))),
        ([scaled([1.0] * 9)], [0.0] * 9, False, {}, set(range(9))),
        # With it, 1% of its own start; what was small from the beginning is not dead.
        ([scaled(MIXED)], [1.0] * 6, True, {}, set()),
        ([scaled([1, 1, 100, 0.01])], [0.011, 0.009, 0.009, 0.5], True, {}, {1, 2}),
        ([scaled([1, 1, 100, 0.01])], [0.011, 0.009, 0.009, 0.5], True, {"start": 1e-3}, set()),
        ([scaled([1.0] * 9)], [1e-4] * 9, True, {}, set(range(9))),
        ([scaled([1.0] * 9)], [0.5] * 9, True, {}, set()),
        # Filters of few weights pass near zero while they live.
        *(([scaled([1.0] * 4, d)], [1, 1.2 * x, 1, 1], True, {}, set()) for d, x in FEW.items()),
        *(([scaled([1.0] * 4, d)], [1, 0.8 * x, 1, 1], True, {}, {1}) for d, x in FEW.items()),
        *(([scaled([1.0] * 4, 1)], [1, x, 1, 1], False, {}, set()) for x in (1.2e-6, -1.2e-6)),
        ([scaled([1.0] * 4, 1)], [1, 0.8e-6, 1, 1], False, {}, {1}),
        # Before a normalisation, which undoes their common scale, filters live that shrink
        # together, or beside one that grew, and so does the last one.
        (NORMALISED, [1e-3, 1e-3, 1e-3, 1e-6, 1e-3, 1e-3, 1e-3, 1e-3], True, {}, {3}),
        (NORMALISED, [1, 1, 1, 500, 1, 1, 1, 1], True, {}, set()),
        (NORMALISED, [0, 0, 0, 1e-5, 0, 0, 0, 0], True, {}, {0, 1, 2, 4, 5, 6, 7}),
        (NORMALISED[:1], [0, 0, 0, 1e-5, 0, 0, 0, 0], True, {}, set(range(8))),
    ],
)
def test_where_the_line_is(layers, factors, knows_start, limits, dead, tmp_path: Path) -> None:
    """Multiply the filters of the first layer: which of them are dead, and no other."""
    start = nn.Sequential(*layers, nn.Linear(len(factors), 3))
    now, thresholds = copy.deepcopy(start), Thresholds(**limits)
    with FilterMonitor(now, tmp_path, every=1) as monitor, torch.no_grad():
        monitor.step(0)
        weight = now.get_parameter("0.weight")
        weight.mul_(torch.tensor(factors).view(-1, *[1] * (weight.dim() - 1)))
        monitor.step(1)
    if knows_start:
        results = [census(now, initial=start, thresholds=thresholds)]
        results.append(census(tmp_path, thresholds=thresholds))
    else:
        results = [census(now, thresholds=thresholds)]
    for result in results:
        assert filters(result) == {("0", unit) for unit in dead}
        assert result.whole_layers == (("0",) if len(dead) == len(factors) else ())


@pytest.mark.parametrize(("quantity", "line"), [("weight", 0.01), ("gain", 1e-6)])
@pytest.mark.parametrize(
    ("levels", "revival", "states"),
    [
        ([0, 0, None, 1e-5, 0, None], 2.0, "uu.dd."),  # unborn until it lives
        # On the line it dies once, unless there is no margin for revivals.
        ([None, 0.99, -1.01, 0.99, 1.9, 0.99, -2.1], 2.0, ".ddddd."),
        ([None, 0.99, -1.01, 0.99, 1.9, 0.99, -2.1], 1.0, ".d.d.d."),
    ],
)
def test_life_of_a_unit(quantity, line, levels, revival, states, tmp_path: Path) -> None:
    """Levels in multiples of the line (None: as at the start), and the state after each record."""
    model = nn.Sequential(scaled([1.0] * 3), nn.BatchNorm1d(3))
    layer = "0" if quantity == "weight" else "1"
    weight = model.get_parameter(f"{layer}.weight")
    alive = weight.detach()[1].clone()
    events, since, revivals, result = [], 0, 0, None
    with FilterMonitor(model, tmp_path, every=1, gains=True) as monitor:
        for step, (level, state) in enumerate(zip(levels, states, strict=True)):
            weight.data[1] = alive if level is None else level * line * alive
            monitor.step(step)
            change = states[max(step - 1, 0) : step + 1]
            if what := {"u.": "born", ".d": "died", "d.": "revived"}.get(change):
                events.append((step, layer, 1, quantity, what))
                since, revivals = step, revivals + (what == "revived")
            result = census(tmp_path, thresholds=Thresholds(revival=revival))
            shown = [(u.layer, u.unit, u.how, u.state, u.since, u.revivals) for u in result.units]
            state = {"u": "unborn", "d": "dead"}.get(state)
            assert shown == ([(layer, 1, (quantity,), state, since, revivals)] if state else [])
            assert [(e.step, e.layer, e.unit, e.quantity, e.what) for e in result.events] == events
    born = "; 1 born." if "u" in states else "."
    assert f"{quantity}: 1 died, 1 of these came back, 0 dead at the end{born}" in str(result)


def test_vanished_gain_and_its_bias() -> None:
    model = batch_normalised()
    bn: Any = model.layer1.bn1
    with torch.no_grad():
        bn.weight[1], bn.bias[1] = 0.0, 0.5
        bn.weight[4], bn.bias[4] = 0.0, 0.0
    result = census(model)
    shown = [(u.layer, u.unit, u.how, u.bias) for u in result.dead]
    assert shown == [("layer1.bn1", 1, ("gain",), 0.5), ("layer1.bn1", 4, ("gain",), 0.0)]
    assert "1 channels with a vanished gain output a constant" in str(result)
    # In front of it the filters get no gradient; the gain itself does, where its channel fires.
    result = census(model, batches(), loss=F.cross_entropy)
    assert filters(result) == {("layer1.conv1", 1), ("layer1.conv1", 4)}
    states = {(u.unit, u.state) for u in result.units if u.layer == "layer1.bn1"}
    assert states == {(1, "recoverable"), (4, "dead")}


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, functools.partial(nn.GroupNorm, 2)])
def test_gains_initialised_to_zero_are_not_dead(norm: Any) -> None:
    fresh, zero = ResNet(norm), {"layer1.bn2", "layer2.bn2"}
    for name in zero:
        nn.init.zeros_(fresh.get_parameter(f"{name}.weight"))
    counts_batches = norm is nn.BatchNorm2d  # so that it is seen that training has not begun
    result = census(fresh)
    assert {unit.layer for unit in result.units} == zero
    assert len(result.unborn if counts_batches else result.dead) == 6 + 8 == len(result.units)
    assert census(fresh, initial=fresh).dead == ()
    # Behind a zero gain nothing gets a gradient before the first step: nobody is accused of that.
    result = census(fresh, batches(), loss=F.cross_entropy)
    assert {unit.layer for unit in result.units if "gain" in unit.how} == zero
    assert all("gradient" not in unit.how for unit in result.units if ".conv" in unit.layer)
    assert all(unit.state != "dead" for unit in result.units if unit.layer in zero)
    assert result.whole_layers == (() if counts_batches else tuple(sorted(zero)))


# What units do over data --------------------------------------------------------------------------


def test_sum_of_two_branches_belongs_to_neither() -> None:
    """A second convolution that is always negative lowers the skip connection: it lives."""
    model = ResNet()
    with torch.no_grad():
        model.layer1.conv2.weight[2].abs_().neg_()
        model.layer1.conv2.get_parameter("bias")[2] = -0.05
    result = census(model, batches())
    assert ("layer1.conv2", 2) not in filters(result)
    assert "silent" not in ways_of(result, "layer1.conv2")
    assert "silent" in ways_of(result, "layer1.conv1")


class Custom(nn.Module):
    """A convolution of 6 filters, a function of its output, and a classifier."""

    def __init__(self, function: Callable[[Tensor], Tensor], norm: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.conv, self.norm, self.head = nn.Conv1d(3, 6, 1), norm, nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = self.function(x if self.norm is None else self.norm(x))
        return self.head(input=x.mean(2))


def test_tensor_at_the_address_of_one_that_is_gone_is_not_taken_for_it() -> None:
    def function(x: Tensor) -> Tensor:
        for _ in range(20):
            model.conv(torch.zeros(5, 3, 8))  # is freed at once; the next often has its address
            x = F.relu(torch.full((5, 6, 8), -1.0))
        return x

    model = Custom(function)
    assert "silent" not in ways_of(census(model, [torch.randn(5, 3, 8)]), "conv")


RECTIFIERS: dict[str, Callable[[Tensor], Tensor]] = {
    "F.relu": F.relu,
    "F.relu in place": lambda x: F.relu(x, inplace=True),
    "F.relu by keyword": lambda x: F.relu(input=x),
    "torch.relu": torch.relu,
    "torch.relu_": torch.relu_,
    "method": lambda x: x.relu(),
    "method in place": lambda x: x.relu_(),
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "module": nn.ReLU(),
    "threshold": nn.Threshold(0, 0),
}
BEFORE: dict[str, Any] = {
    "nothing": None,
    "batch norm": nn.BatchNorm1d(6),
    "instance norm": nn.InstanceNorm1d(6, affine=True),
    "dropout": nn.Dropout(),
    "pool": nn.MaxPool1d(2),
}


@pytest.mark.parametrize("rectifier", RECTIFIERS)
@pytest.mark.parametrize("before", BEFORE)
def test_silence_is_seen_through_any_rectifier(rectifier: str, before: str) -> None:
    model = Custom(RECTIFIERS[rectifier], copy.deepcopy(BEFORE[before]))
    model.get_parameter("norm.bias" if "norm" in before else "conv.bias").data[4] = -100.0
    result = census(model, [torch.randn(40, 3, 8)])
    assert filters(result) == {("conv", 4)}
    assert [u.how for u in result.units if u.number] == [("silent",)]


@pytest.mark.parametrize("norm", [nn.LayerNorm(6), nn.RMSNorm(6)])
def test_silence_after_a_normalisation_over_channels_is_its_own(norm: nn.Module) -> None:
    """The filter still counts in the statistics of the other channels: it is not accused."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), norm, nn.ReLU(), nn.Linear(6, 2))
    norm.get_parameter("weight").data[4] = 0
    data = [(torch.randn(40, 3), torch.arange(40) % 2)]
    result = census(model, data, loss=F.cross_entropy)
    shown = [(u.layer, u.unit, u.how) for u in result.units if "feature" not in u.how]
    assert shown == [("1", 4, ("gain", "silent"))]
    assert ("0", 4) not in ablation(model, data)


def test_firing_once_in_any_batch_is_living() -> None:
    model = nn.Sequential(layer := nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2))
    layer.weight.data[:] = torch.eye(2)
    rare, once = [torch.tensor([[1.0, -1.0]])] * 5, [torch.tensor([[1.0, 1.0]])]
    assert filters(census(model, rare)) == {("0", 1)}
    for data in (rare + once, once + rare):
        assert census(model, data).units == ()
    assert census(model, rare + once).examples == 6


def test_zero_features_before_the_classifier() -> None:
    model = ResNet()
    for name in ("layer2.conv2", "layer2.downsample.0"):
        model.get_parameter(f"{name}.weight").data[5] = 0
        model.get_parameter(f"{name}.bias").data[5] = -0.1
    for head in (None, "fc", model.fc):
        result = census(model, batches(), head=head)
        features = [u for u in result.dead if "feature" in u.how]
        assert [(u.layer, u.unit, u.value) for u in features] == [("input of fc", 5, 0.0)]
    assert "1 of 8 features dead." in str(result)
    # At another layer's input, if it is named.
    result = census(model, batches(), head="layer2.conv1")
    assert result.layers[-1].layer == "input of layer2.conv1"


def test_zero_features_and_gradients_of_a_recording(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(first := nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    with FilterMonitor(model, tmp_path, every=2, gradients=True, features=True) as monitor:
        monitor.step(0)
        for step in range(1, 71):
            # Unit 1 is silent from step 11 to 40, unit 3 from 51 on, unit 4 a moment only.
            first.bias.data[1] = -100.0 if 11 <= step <= 40 else 0.0
            first.bias.data[3] = -100.0 if step >= 51 else 0.0
            first.bias.data[4] = -100.0 if 20 < step < 30 else 0.0
            model.zero_grad()
            model(torch.randn(16, 4)).square().sum().backward()
            monitor.step(step)
    result = census(tmp_path)
    for place in (("feature", "2"), ("gradient", "0")):
        events = [e for e in result.events if (e.quantity, e.layer) == place]
        expected = [(12, 1, "died"), (42, 1, "revived"), (52, 3, "died")]
        assert [(e.step, e.unit, e.what) for e in events] == expected
    assert [event.step for event in result.events] == [12, 12, 42, 42, 52, 52]
    assert [(u.layer, u.unit, u.how, u.since, u.state) for u in result.units] == [
        ("0", 3, ("gradient",), 52, "dead"),
        ("input of 2", 3, ("feature",), 52, "dead"),
    ]
    assert "feature: 2 died, 1 of these came back, 1 dead at the end." in str(result)
    assert len(census(tmp_path, thresholds=Thresholds(patience=3)).events) == 10


def test_weights_that_are_not_finite_are_reported(tmp_path: Path) -> None:
    model = scaled([1.0] * 4)
    with FilterMonitor(model, tmp_path, every=1) as monitor:
        monitor.step(0)
        for unit, value in enumerate((torch.nan, 0.0, torch.inf)):
            model.weight.data[unit] *= value
        monitor.step(1)
    for result in (census(model), census(tmp_path)):
        shown = [(unit.unit, unit.how) for unit in result.dead]
        assert shown == [(0, ("nonfinite",)), (1, ("weight",)), (2, ("nonfinite",))]


def test_gradients_beside_dead_weights_in_a_recording(tmp_path: Path) -> None:
    """Zero weights that get a gradient can recover; records without one are no evidence."""
    model = nn.Sequential(first := nn.Linear(3, 4), last := nn.Linear(4, 2))
    last.weight.grad = torch.ones_like(last.weight)
    with FilterMonitor(model, tmp_path, every=1, gradients=True) as monitor:
        for step in range(13):
            if step == 4:
                first.weight.data[1:3] = 0
            gradient = torch.tensor([0.0, 1.0, 0.0, 1.0])[:, None].expand(4, 3).clone()
            first.weight.grad = None if step in (0, 5, 6) else gradient
            monitor.step(step)
            dead = [(u.unit, u.how, u.since) for u in census(tmp_path).units if u.unit == 0]
            assert dead == ([(0, ("gradient",), 1)] if step == 12 else [])
    result = census(tmp_path)
    assert [(u.unit, u.state, u.how, u.since, u.gradient) for u in result.units] == [
        (0, "dead", ("gradient",), 1, 0.0),
        (1, "recoverable", ("weight",), 4, pytest.approx(3**0.5)),
        (2, "dead", ("weight", "gradient"), 4, 0.0),
    ]
    assert (result.layers[0].recoverable, result.layers[0].dead) == (1, 2)


def test_missing_gradients_are_no_evidence() -> None:
    """Of layers that are not used, that are frozen, and that are not a number."""
    model: Any = Custom(F.relu)
    model.spare = nn.Linear(4, 4)
    assert filters(census(model, CUSTOM_DATA, loss=F.cross_entropy)) == set()
    nans = census(model, CUSTOM_DATA, loss=lambda output, target: output[:, 0].sum() * torch.nan)
    assert filters(nans) == {("head", 1)}  # the logit that is not used
    model.conv.requires_grad_(False)
    result = census(model, CUSTOM_DATA, loss=F.cross_entropy)
    assert "gradient" not in ways_of(result, "conv")
    assert "gradient" in ways_of(result, "head")


CUSTOM_DATA = [(torch.randn(9, 3, 8), torch.arange(9) % 2)]


def test_model_is_left_as_it_was() -> None:
    model = Custom(F.relu, nn.BatchNorm1d(6))
    norm = model.get_submodule("norm").eval()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    census(model, CUSTOM_DATA, loss=F.cross_entropy)
    with pytest.raises(ZeroDivisionError):
        census(model, CUSTOM_DATA, loss=lambda output, target: 1 / 0)  # type: ignore[arg-type]
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert all((p.grad == 3).all() for p in model.parameters() if p.grad is not None)
    assert torch.equal(torch.get_rng_state(), random)
    for module in model.modules():
        assert module.training == (module is not norm)
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_models_in_wrappers() -> None:
    model = ResNet()
    plant(model, "layer1.conv1", 3, "silent")
    expected = census(model, batches(), loss=F.cross_entropy)
    assert ("layer1.conv1", 3) in filters(expected)
    model.layer2.add_module("conv1", torch.compile(model.layer2.conv1))  # type: ignore[arg-type]
    for wrapped in (nn.DataParallel(model), torch.compile(model)):
        assert str(census(wrapped, batches(), loss=F.cross_entropy)) == str(expected)  # type: ignore[arg-type]


def test_default_device_and_disabled_gradients_do_not_matter(tmp_path: Path) -> None:
    model = Custom(F.relu)
    with FilterMonitor(model, tmp_path, every=1) as monitor:
        monitor.step(1)
    expected = str(census(model, CUSTOM_DATA, loss=F.cross_entropy)), str(census(tmp_path))
    with torch.no_grad(), torch.device("meta"):
        assert str(census(model, CUSTOM_DATA, loss=F.cross_entropy)) == expected[0]
        assert str(census(tmp_path)) == expected[1]


# Checkpoints --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def planted() -> dict[str, Tensor]:
    model = batch_normalised()
    plant(model, "layer1.conv1", 3, "zero")
    model.get_parameter("bn1.weight").data[2] = 0
    return model.state_dict()


FORMS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "plain": lambda state: state,
    "parallel": lambda state: {"module." + key: value for key, value in state.items()},
    "compiled": lambda state: {"_orig_mod." + key: value for key, value in state.items()},
    "named": lambda state: {"epoch": 3, "state_dict": state, "ema": state},
    "only": lambda state: {"weights": state, "step": torch.tensor(3), "optimizer": {"lr": 0.1}},
    "half": lambda state: {key: value.half() for key, value in state.items()},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_checkpoint(form: str, planted: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save(FORMS[form](planted), tmp_path / "model.pt")
    result = census(tmp_path / "model.pt")
    assert places(result.dead) == {("layer1.conv1", 3), ("bn1", 2)}
    assert [layer.number for layer in result.layers if layer.number] == list(range(1, 8))


def test_safetensors_do_not_keep_the_order(planted: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    pytest.importorskip("safetensors.torch").save_file(planted, path)
    result = census(path)
    assert places(result.dead) == {("layer1.conv1", 3), ("bn1", 2)}
    assert {layer.number for layer in result.layers} == {None}
    path.write_bytes(b"12345678{}")
    with pytest.raises(ValueError, match="safetensors"):
        census(path)


NORMED: dict[str, Callable[[Any], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "weight_norm as a whole": lambda layer: parametrizations.weight_norm(layer, dim=None),  # type: ignore
    "weight_norm by input": lambda layer: parametrizations.weight_norm(layer, dim=1),
    "spectral_norm": parametrizations.spectral_norm,
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "pruned": lambda layer: prune.random_unstructured(layer, "weight", 0.5),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("name", NORMED)
def test_weights_that_are_computed_from_others(name: str) -> None:
    """A state dict has what they are computed from, and a model may not have computed them yet."""
    torch.manual_seed(0)
    layers = nn.Linear(7, 4), nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 6, 2), nn.Conv1d(6, 6, 3)
    model = nn.ModuleList(NORMED[name](layer) for layer in layers)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if tensor.dim() > 1 and not key.endswith("mask"):
                tensor.mul_(1 + torch.rand(tensor.shape))
    state = copy.deepcopy(model.state_dict())
    stored = {"module." + key: value for key, value in state.items()}
    read = {weight.name: weight.tensor for weight in state_weights(stored)[0]}
    live = {weight.name: weight.tensor for weight, _ in model_weights(model)}
    assert list(read) == list(live) == ["0", "1", "2", "3"]
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[key])  # reading takes no step of the power iteration
    inputs = torch.randn(2, 7), *(torch.randn(2, c, *[5] * d) for c, d in ((3, 2), (4, 2), (6, 1)))
    for (key, layer), x in zip(model.eval().named_children(), inputs, strict=True):
        layer(x)
        torch.testing.assert_close(read[key], layer.weight)
        torch.testing.assert_close(live[key], layer.weight)


def test_parametrisation_that_a_state_dict_does_not_show_raises() -> None:
    model = nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Linear(4, 2))
    assert census(model).units == ()
    with pytest.raises(ValueError, match="parametrisation of '0'"):
        census(model.state_dict())


def test_slopes_of_a_prelu_are_not_gains() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.PReLU(4, init=0.0))
    assert census(model).units == census(model.state_dict()).units == ()


def test_pickle_is_not_executed(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "executed",))

    (tmp_path / "trap.pt").write_bytes(pickle.dumps({"w": Trap()}, protocol=2))
    with pytest.raises(ValueError, match="weights_only=True"):
        census(tmp_path / "trap.pt")
    assert not (tmp_path / "executed").exists()


# What comes out -----------------------------------------------------------------------------------


def test_table_csv_and_objects_agree(tmp_path: Path) -> None:
    """In a run's folder: one unit of fc dies and comes back, and layer1.conv1's unit 3 dies."""
    model = ResNet()
    with FilterMonitor(model, tmp_path / "norms", every=1) as monitor, torch.no_grad():
        monitor.step(0)
        assert str(census(tmp_path)).endswith("  nothing died, nothing came back.")
        row = model.fc.weight[1].clone()
        model.fc.weight[1] = 0
        monitor.step(1)
        model.fc.weight[1] = row
        model.layer1.conv1.weight[3] = 0
        monitor.step(2)
    result = census(tmp_path)
    tables = {}
    for rows in ("units", "events", "layers"):
        result.to_csv(tmp_path / rows, rows)
        with open(tmp_path / rows, newline="") as file:
            tables[rows] = list(csv.DictReader(file))
        objects = [(o.layer, str(o.number)) for o in getattr(result, rows)]
        assert [(r["layer"], r["number"]) for r in tables[rows]] == objects
    (unit,) = tables["units"]
    shown = [unit[name] for name in ("layer", "unit", "how", "state", "since", "bias")]
    assert shown == ["layer1.conv1", "3", "weight", "dead", "2", ""]
    _, *table, dead, steps, _ = str(result).splitlines()
    assert (dead, steps) == ("1 of 46 filters dead.", "Over steps 0 to 2:")
    assert [row.split()[:5] for row in table[1:]] == [
        ["2", "layer1.conv1", "Conv2d", "6", "1"],
        ["7", "fc", "Linear", "4", "0"],
    ]
    with pytest.raises(ValueError, match="`rows`"):
        result.to_csv(tmp_path / "x.csv", "people")  # type: ignore[arg-type]


# Errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "word"),
    [
        ({"source": 3}, TypeError, "`source`"),
        ({"initial": 3}, TypeError, "`initial`"),
        ({"source": {}, "data": batches()}, ValueError, "`source`"),
        ({"loss": F.cross_entropy}, ValueError, "`data`"),
        ({"data": []}, ValueError, "`data`"),
        ({"data": [torch.zeros(1, 3, 8, 8)], "loss": F.cross_entropy}, ValueError, "`data`"),
        ({"data": [{"x": 1}]}, TypeError, "`data`"),
        ({"data": batches(), "loss": lambda output, target: output}, ValueError, "`loss`"),
        ({"data": batches(), "loss": lambda output, target: 1.0}, ValueError, "`loss`"),
        ({"source": nn.ReLU()}, ValueError, "none"),
        ({"initial": mlp()}, ValueError, "`initial`.*'conv1'"),
        ({"data": batches(), "head": "classifier"}, ValueError, "'classifier'"),
        ({"source": "nowhere.pt"}, ValueError, "no such file"),
        ({"source": "folder"}, ValueError, "recording"),
        ({"source": "empty.pt"}, ValueError, "state dict"),
        ({"source": "text.pt"}, ValueError, "checkpoint"),
        ({"source": "norms"}, ValueError, "record"),
        ({"source": "norms", "initial": ResNet()}, ValueError, "`initial`"),
    ],
)
def test_bad_arguments_raise(arguments, error, word, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    torch.save({"a": 1}, "empty.pt")
    Path("text.pt").write_text("not a checkpoint")
    FilterMonitor(ResNet(), "norms").close()
    with pytest.raises(error, match=word):
        census(**{"source": ResNet(), **arguments})


BAD: dict[str, Any] = {"start": 1.0, "layer": -0.1, "chance": 2.0, "gradient": float("nan")}
BAD |= {"output": 1.5, "zero": float("inf"), "revival": 0.5, "patience": 0}


@pytest.mark.parametrize("name", BAD)
def test_bad_thresholds_raise(name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}`"):
        Thresholds(**{name: BAD[name]})


def test_thresholds_of_gradients_and_outputs() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    model.get_parameter("0.weight").data[:] = torch.tensor([[1.0, 0.0], [0.0, 1e-2]])
    model.get_parameter("1.weight").data[:] = torch.tensor([[1.0, 1e-5], [-1.0, -1e-5]])
    data = [(torch.ones(1, 2), torch.zeros(1, dtype=torch.int64))]
    assert census(model, data, loss=F.cross_entropy).units == ()
    loose = census(model, data, loss=lambda o, t: o[0, 0], thresholds=Thresholds(gradient=1e-4))
    shown = {(u.layer, u.unit, u.how) for u in loose.units}
    assert shown == {("0", 1, ("gradient",)), ("1", 1, ("gradient",))}
    loose = census(model, data, thresholds=Thresholds(output=0.1))
    assert [(u.layer, u.unit) for u in loose.units] == [("input of 1", 1)]
