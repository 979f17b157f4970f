"""The census: planted dead units are found, living ones are not accused.

Two oracles are independent of the code. What was planted is known. And a unit is dead over some
data if putting a constant in the place of its channel changes no output (`ablation`).
"""

from __future__ import annotations

import copy
import csv
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torchvision_shim import declare_torchvision_schemas

from powergrad.monitor import Census, FilterMonitor, Recording, Thresholds, Unit, census
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
        self.downsample = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1), norm(outputs))
            if inputs != outputs
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module] = lambda channels: nn.Identity()) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1)
        self.bn1 = norm(6)
        self.layer1 = Block(6, 6, norm)
        self.layer2 = Block(6, 8, norm)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        return self.fc(self.layer2(self.layer1(x)).mean((2, 3)))


def resnet(norm: Callable[[int], nn.Module] | None = None) -> ResNet:
    torch.manual_seed(1)
    return ResNet() if norm is None else ResNet(norm)


def batch_normalised() -> ResNet:
    model = resnet(nn.BatchNorm2d)
    for _ in range(10):
        model(torch.randn(16, 3, 8, 8))
    return model


def mobile() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU6(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.ReLU6(),
        nn.Conv2d(8, 6, 3, padding=1, groups=2),
        nn.Hardswish(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 4),
    )


def transposed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2),
        nn.ReLU(),
        nn.ConvTranspose2d(6, 8, 3, groups=2),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 5, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(180, 4),
    )


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(192, 10),
        nn.ReLU(),
        nn.Linear(10, 9),
        nn.BatchNorm1d(9),
        nn.ReLU(),
        nn.Linear(9, 4),
    )


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "un-normalised resnet": resnet,
    "batch-normalised resnet": batch_normalised,
    "depthwise and grouped": mobile,
    "transposed": transposed,
    "mlp": mlp,
}


made = functools.cache(lambda network: NETWORKS[network]())


def build(network: str) -> nn.Module:
    return copy.deepcopy(made(network))


LAYER = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)
NORM = (nn.BatchNorm2d, nn.BatchNorm1d, nn.GroupNorm)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(2, 8, 3, 8, 8, generator=generator)
    return [(batch, torch.arange(8) % 4) for batch in inputs]


def units_of(model: nn.Module, kinds: tuple[type, ...]) -> list[tuple[str, int]]:
    units = []
    for name, module in model.named_modules():
        if isinstance(module, kinds):
            weight: Any = module.weight
            count = module.out_channels if isinstance(module, nn.ConvTranspose2d) else len(weight)
            units += [(name, unit) for unit in range(count)]
    return units


def filter_of(model: nn.Module, name: str, unit: int) -> tuple[Tensor, Tensor]:
    """A view of the weights of one filter, and the bias of its layer."""
    layer = model.get_submodule(name)
    weight, bias = layer.get_parameter("weight"), layer.get_parameter("bias")
    if isinstance(layer, nn.ConvTranspose2d):
        ins, outs = layer.in_channels // layer.groups, layer.out_channels // layer.groups
        group = unit // outs
        return weight[group * ins : (group + 1) * ins, unit % outs], bias
    return weight[unit], bias


@torch.no_grad()
def plant(model: nn.Module, name: str, unit: int, how: str) -> None:
    weight, bias = filter_of(model, name, unit)
    if how == "zero":
        weight.zero_()
    elif how == "tiny":
        weight.mul_(1e-5)
    elif how == "silent":
        bias[unit] = -30.0


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
    model = copy.deepcopy(model).eval()
    living: Units = set()
    for inputs, target in data:
        twin = copy.deepcopy(model)
        F.cross_entropy(twin(inputs), target).backward()
        for parameter in twin.parameters():
            assert parameter.grad is not None
            parameter.data = parameter.grad  # so that filter_of reads gradients
        living |= {unit for unit in units_of(twin, LAYER) if filter_of(twin, *unit)[0].any()}
    return {*units_of(model, LAYER)} - living


def places(units: Iterable[Unit]) -> Units:
    return {(unit.layer, unit.unit) for unit in units}


def filters(result: Census) -> Units:
    """The units of convolutions and linear layers that were found, in whatever state."""
    return places(unit for unit in result.units if unit.number is not None)


def ways_of(result: Census, layer: str) -> Mapping[str, int]:
    """The ways in which a layer was judged."""
    return next(count.how for count in result.layers if count.layer == layer)


# Planted units ------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", NETWORKS)
def test_a_living_network_is_not_accused(network: str) -> None:
    model = build(network)
    assert census(model).units == ()
    assert census(model, initial=model).units == ()
    assert census(model.state_dict()).units == ()
    dead = ablation(model, batches())
    assert filters(census(model, batches(), loss=F.cross_entropy)) == dead
    assert len(dead) <= 1  # or the tests below would show little


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
    dead = {u for u in chosen if u not in tiny or u[0] not in whole & before_norms(model)}
    for result in (census(model, initial=start), census(model.state_dict(), initial=start)):
        assert filters(result) == dead
        assert all(unit.how == ("weight",) and unit.state == "dead" for unit in result.units)
        assert set(result.whole_layers) == all_of_a_layer(model, dead)
    if not whole:  # alone, a layer that is all tiny may just be small
        assert filters(census(model)) == chosen


def before_norms(model: nn.Module) -> set[str]:
    """The layers whose next module of either kind is a normalisation of their channels."""
    both = [(name, m) for name, m in model.named_modules() if isinstance(m, (*LAYER, *NORM))]
    return {
        name
        for (name, layer), (_, after) in itertools.pairwise(both)
        if isinstance(layer, LAYER)
        and isinstance(after, NORM)
        and layer.get_parameter("bias").shape == after.get_parameter("weight").shape
    }


def all_of_a_layer(model: nn.Module, chosen: Units) -> set[str]:
    units = units_of(model, LAYER)
    return {
        name
        for name in {name for name, _ in chosen}
        if all((name, unit) in chosen for other, unit in units if other == name)
    }


@pytest.mark.parametrize("network", NETWORKS)
@given(data=st.data())
def test_what_the_census_finds_over_data_is_what_ablation_finds(
    network: str, data: st.DataObject
) -> None:
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
            module: Any = model.get_submodule(name)
            with torch.no_grad():
                module.weight[unit] = 0
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
def test_revived_and_killed_again(
    network: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every planted life is read back from the recording, death by death."""
    model = build(network)
    # 5 are less than a layer before a normalisation has, which would live if all were tiny.
    chosen = sorted(data.draw(st.sets(st.sampled_from(units_of(model, LAYER)), max_size=5)))
    rows = data.draw(st.integers(1, 8))
    lives = {
        unit: [True, *data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows))]
        for unit in chosen
    }
    folder = tmp_path_factory.mktemp("lives")
    alive = {unit: filter_of(model, *unit)[0].detach().clone() for unit in chosen}
    with FilterMonitor(model, folder, every=1) as monitor:
        for row in range(rows + 1):
            for unit, life in lives.items():
                with torch.no_grad():
                    filter_of(model, *unit)[0].copy_(alive[unit] * (1.0 if life[row] else 1e-4))
            monitor.step(10 * row)
    result = census(folder)

    deaths, revivals = [], []
    for (name, unit), life in lives.items():
        for row in range(1, rows + 1):
            if life[row - 1] and not life[row]:
                deaths.append((10 * row, name, unit))
            if not life[row - 1] and life[row]:
                revivals.append((10 * row, name, unit))
    happened = [(e.what, (e.step, e.layer, e.unit)) for e in result.events]
    assert sorted(e for what, e in happened if what == "died") == sorted(deaths)
    assert sorted(e for what, e in happened if what == "revived") == sorted(revivals)
    assert [e.step for e in result.events] == sorted(e.step for e in result.events)
    assert filters(result) == {unit for unit, life in lives.items() if not life[-1]}
    for unit in result.units:
        assert unit.since == max(at for at, *which in deaths if which == [unit.layer, unit.unit])
        assert unit.revivals == sum(which == [unit.layer, unit.unit] for _, *which in revivals)
    assert sum(layer.died for layer in result.layers) == len({e[1:] for e in deaths})
    assert sum(layer.revived for layer in result.layers) == len({e[1:] for e in revivals})
    assert result.steps == (0, 10 * rows)


def test_gains_that_die_return_and_are_born(tmp_path: Path) -> None:
    model = build("batch-normalised resnet")
    names = [name for name, module in model.named_modules() if isinstance(module, NORM)]
    last = names[-1]
    # What becomes of four gains, row by row.
    lives = {
        (names[0], 1): [1.0, -1.0, 0.0, 0.0, 0.0],
        (names[0], 2): [1.0, 0.0, -1.0, 1.0, 1.0],
        (last, 0): [0.0, 0.0, 0.0, 1.0, 0.0],
        (last, 3): [0.0, 0.0, 0.0, 0.0, 0.0],
    }
    with FilterMonitor(model, tmp_path, every=1, gains=True) as monitor:
        for row in range(5):
            for (name, unit), life in lives.items():
                with torch.no_grad():
                    model.get_submodule(name).get_parameter("weight")[unit] = life[row]
            monitor.step(10 * row)
    result = census(tmp_path)
    happened = {(e.step, e.layer, e.unit, e.what) for e in result.events if e.quantity == "gain"}
    assert happened == {
        (20, names[0], 1, "died"),
        (10, names[0], 2, "died"),
        (20, names[0], 2, "revived"),
        (30, last, 0, "born"),
        (40, last, 0, "died"),
    }
    assert len(result.events) == len(happened)
    units = {(u.layer, u.unit): (u.how, u.state, u.since) for u in result.units}
    assert units == {
        (names[0], 1): (("gain",), "dead", 20),
        (last, 0): (("gain",), "dead", 40),
        (last, 3): (("gain",), "unborn", 0),
    }
    lines = str(result).splitlines()
    gains = len(units_of(model, NORM))
    assert f"2 of {gains} gains dead, 1 unborn." in lines
    assert "  gain: 3 died, 1 of these came back, 2 dead at the end; 1 born." in lines


def test_a_filter_without_gradient_dies_when_decay_says(tmp_path: Path) -> None:
    """Its norm falls as (1 - lr * decay)^t, so it passes 1% of its start at a known step."""
    torch.manual_seed(0)
    layer = nn.Linear(6, 5)
    rate, decay = 0.05, 2.0
    optimizer = torch.optim.SGD(layer.parameters(), lr=rate, weight_decay=decay)
    alive = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
    with FilterMonitor(layer, tmp_path, every=1, gradients=True) as monitor:
        monitor.step(0)
        for step in range(1, 61):
            optimizer.zero_grad()
            # The others are held up against the decay.
            ((layer.weight.square().sum(1) - 1).square() * alive).sum().backward()
            optimizer.step()
            monitor.step(step)
    step = next(t for t in range(1000) if (1 - rate * decay) ** t <= 0.01)
    result = census(tmp_path)
    assert filters(result) == {("(model)", 2)}
    (unit,) = result.dead
    assert (unit.how, unit.since, unit.gradient) == (("weight", "gradient"), step, 0.0)
    died = {event.quantity: event.step for event in result.events}
    assert died == {"gradient": 1, "weight": step}


def test_a_training_that_kills(tmp_path: Path) -> None:
    """Un-normalised, at a rate too high for it, with much decay: many die, and none is invented."""
    model = resnet()
    start = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    classes = torch.randn(4, 3, 8, 8, generator=generator)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        target = torch.arange(count) % 4
        return classes[target] + torch.randn(count, 3, 8, 8, generator=generator), target

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.06)
    with FilterMonitor(model, tmp_path, every=5) as monitor:
        monitor.step(0)
        for step in range(1, 201):
            optimizer.zero_grad()
            inputs, target = draw(12)
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            monitor.step(step)

    def norm(of: nn.Module, unit: tuple[str, int]) -> float:
        return filter_of(of, *unit)[0].detach().square().sum().sqrt().item()

    units = units_of(model, LAYER)
    expected = {unit for unit in units if norm(model, unit) <= 0.01 * norm(start, unit)}
    assert len(expected) > 5
    assert places(census(model, initial=start).dead) == expected
    recorded = places(census(tmp_path).dead)
    # A norm that rose over the line, but not over twice it, has not come back.
    line = {unit for unit in units if norm(model, unit) <= 0.02 * norm(start, unit)}
    assert expected <= recorded <= line
    data = [draw(40)]
    result = census(model, data, loss=F.cross_entropy)
    accused = places(u for u in result.units if {"silent", "gradient"} & {*u.how})
    assert accused <= ablation(model, data) | without_gradient(model, data)
    silent = places(u for u in result.units if "silent" in u.how)
    assert silent <= ablation(model, data)
    assert len(accused) > 5


@pytest.mark.parametrize("seed", range(3))
def test_units_planted_in_a_real_resnet18(seed: int) -> None:
    """Against what the activations themselves say, read by plain hooks."""
    declare_torchvision_schemas()
    timm = pytest.importorskip("timm")
    torch.manual_seed(seed)
    model = timm.create_model("resnet18", num_classes=10, zero_init_last=False)
    chosen = {
        (f"layer{1 + int(stage)}.{int(block)}.conv1", int(unit))
        for stage, block, unit in zip(
            torch.randint(4, (30,)), torch.randint(2, (30,)), torch.randint(64, (30,)), strict=True
        )
    }
    with torch.no_grad():
        for name, unit in chosen:
            model.get_submodule(name.replace("conv1", "bn1")).bias[unit] = -50.0
    data = [torch.randn(4, 3, 32, 32) for _ in range(2)]
    fired: dict[str, Tensor] = {}

    def look(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            now = (output > 0).any(0).any(1).any(1)
            fired[name] = now | fired.get(name, now)

        return hook

    handles = [
        module.register_forward_hook(look(name.replace("act1", "conv1")))
        for name, module in model.named_modules()
        if name.endswith("act1")
    ]
    result = census(model, data)
    for handle in handles:
        handle.remove()
    expected = {(name, u) for name, on in fired.items() for u in (~on).nonzero().flatten().tolist()}
    assert chosen <= expected
    assert places(u for u in result.dead if u.how == ("silent",)) == expected
    layers = [layer for layer in result.layers if layer.number is not None]
    assert (layers[10].layer, layers[10].units, len(layers)) == ("layer3.0.conv1", 256, 21)


# Where the line is --------------------------------------------------------------------------------


def scaled(factors: list[float], inputs: int = 50) -> nn.Linear:
    layer = nn.Linear(inputs, len(factors))
    with torch.no_grad():
        layer.weight[:] = (
            F.normalize(torch.randn(len(factors), inputs)) * torch.tensor(factors)[:, None]
        )
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
        ([scaled([1.0, 1.0, 100.0, 0.01])], [0.011, 0.009, 0.009, 0.5], True, {}, {1, 2}),
        (
            [scaled([1.0, 1.0, 100.0, 0.01])],
            [0.011, 0.009, 0.009, 0.5],
            True,
            {"start": 0.001},
            set(),
        ),
        ([scaled([1.0] * 9)], [1e-4] * 9, True, {}, set(range(9))),
        ([scaled([1.0] * 9)], [0.5] * 9, True, {}, set()),
        # Filters of few weights pass near zero while they live.
        *(
            ([scaled([1.0] * 4, d)], [1, 1.2 * line, 1, 1], True, {}, set())
            for d, line in FEW.items()
        ),
        *(
            ([scaled([1.0] * 4, d)], [1, 0.8 * line, 1, 1], True, {}, {1})
            for d, line in FEW.items()
        ),
        # Before a normalisation, filters beside one that grew live, and so does the last one.
        (NORMALISED, [1, 1, 1, 500, 1, 1, 1, 1], True, {}, set()),
        (NORMALISED, [0, 0, 0, 1e-5, 0, 0, 0, 0], True, {}, {0, 1, 2, 4, 5, 6, 7}),
        (NORMALISED[:1], [0, 0, 0, 1e-5, 0, 0, 0, 0], True, {}, set(range(8))),
    ],
)
def test_where_the_line_is(
    layers: list[nn.Module],
    factors: list[float],
    knows_start: bool,
    limits: dict[str, float],
    dead: set[int],
) -> None:
    """Multiply the filters of the first layer: which of them are dead, and no other."""
    start = nn.Sequential(*layers, nn.Linear(len(factors), 3))
    now = copy.deepcopy(start)
    with torch.no_grad():
        weight = now.get_parameter("0.weight")
        weight.mul_(torch.tensor(factors).view(-1, *[1] * (weight.dim() - 1)))
    initial = start if knows_start else None
    result = census(now, initial=initial, thresholds=Thresholds(**limits))  # pyright: ignore
    assert filters(result) == {("0", unit) for unit in dead}
    assert result.whole_layers == (("0",) if len(dead) == len(factors) else ())


def test_filters_that_shrink_together_before_a_normalisation_live(tmp_path: Path) -> None:
    """A hundredth of the start, but the normalisation undoes it: the output is the same."""
    start = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    now = copy.deepcopy(start)
    with FilterMonitor(now, tmp_path, every=1) as monitor:
        monitor.step(0)
        with torch.no_grad():
            now.get_parameter("0.weight").mul_(1e-3)
            now.get_parameter("0.weight")[3] *= 1e-3
            now.get_parameter("3.weight").mul_(1e-3)
        monitor.step(1)
    expected = {("0", 3)} | {("3", unit) for unit in range(4)}
    assert filters(census(now, initial=start)) == expected
    assert filters(census(tmp_path)) == expected
    assert census(tmp_path).whole_layers == ("3",)


@given(st.integers(0, 2**31))
def test_gains_near_zero_by_chance_are_not_accused(seed: int) -> None:
    """As after the first steps from gains initialised to zero: they spread around it."""
    norm = nn.BatchNorm2d(64)
    generator = torch.Generator().manual_seed(seed)
    spread = torch.empty(64).uniform_(-1e-2, 1e-2, generator=generator)
    with torch.no_grad():
        norm.weight[:] = torch.where(spread.abs() < 1e-7, 1e-7, spread)
    assert census(nn.Sequential(nn.Conv2d(3, 64, 1), norm)).units == ()


# Gains, and units that have not lived yet ---------------------------------------------------------


def test_a_vanished_gain_is_found_with_its_bias_apart() -> None:
    model = batch_normalised()
    bn: Any = model.layer1.bn1
    with torch.no_grad():
        bn.weight[1], bn.bias[1] = 0.0, 0.5
        bn.weight[4], bn.bias[4] = 0.0, 0.0
    result = census(model)
    assert [(u.layer, u.unit, u.how, u.bias) for u in result.dead] == [
        ("layer1.bn1", 1, ("gain",), 0.5),
        ("layer1.bn1", 4, ("gain",), 0.0),
    ]
    assert "1 channels with a vanished gain output a constant" in str(result)
    # In front of it the filters get no gradient; the gain itself does, where its channel fires.
    result = census(model, batches(), loss=F.cross_entropy)
    assert filters(result) == {("layer1.conv1", 1), ("layer1.conv1", 4)}
    assert {(u.unit, u.state) for u in result.units if u.layer == "layer1.bn1"} == {
        (1, "recoverable"),
        (4, "dead"),
    }


def zero_last_gains(model: ResNet) -> ResNet:
    for block in (model.layer1, model.layer2):
        nn.init.zeros_(block.bn2.weight)  # type: ignore[arg-type]
    return model


def test_gains_initialised_to_zero_are_not_dead() -> None:
    fresh = zero_last_gains(resnet(nn.BatchNorm2d))
    result = census(fresh)
    assert result.dead == result.recoverable == ()
    assert {unit.layer for unit in result.unborn} == {"layer1.bn2", "layer2.bn2"}
    assert len(result.unborn) == 6 + 8
    # Behind a zero gain nothing gets a gradient before the first step: nobody is accused of that.
    result = census(fresh, batches(), loss=F.cross_entropy)
    behind = [f"layer{block}.conv{conv}" for block in (1, 2) for conv in (1, 2)]
    assert all("gradient" not in unit.how for unit in result.units if unit.layer in behind)
    assert {unit.layer for unit in result.unborn} == {"layer1.bn2", "layer2.bn2"}
    assert result.whole_layers == ()


def test_gains_initialised_to_zero_without_running_statistics() -> None:
    """Without data nothing tells how they came to be zero; with a start, or a gradient, it does."""
    fresh = zero_last_gains(resnet(lambda channels: nn.GroupNorm(2, channels)))
    assert {unit.layer for unit in census(fresh).dead} == {"layer1.bn2", "layer2.bn2"}
    assert census(fresh, initial=fresh).dead == ()
    result = census(fresh, batches(), loss=F.cross_entropy)
    assert result.dead == ()
    assert {unit.layer for unit in result.recoverable} == {"layer1.bn2", "layer2.bn2"}
    assert result.whole_layers == ("layer1.bn2", "layer2.bn2")


def test_training_from_zero_gains_accuses_nobody() -> None:
    model = zero_last_gains(resnet(nn.BatchNorm2d))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, target in batches() * 3:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), target).backward()
        optimizer.step()
        result = census(model)
        assert result.units == ()


ON_THE_LINE = [1, 0.0099, 0.0101, 0.0099, 0.019, 0.0099, 0.021]


@pytest.mark.parametrize(
    ("factors", "revival", "states", "events"),
    [
        # Weights that start at zero are unborn until they live.
        (
            [0, 0, 1, 1e-5, 0, 1],
            2.0,
            [("unborn", 0, 0), ("unborn", 0, 0), None, ("dead", 3, 0), ("dead", 3, 0), None],
            {2: "born", 3: "died", 5: "revived"},
        ),
        # A norm on the line is counted once, unless there is no margin for revivals.
        (ON_THE_LINE, 2.0, [None, *[("dead", 1, 0)] * 5, None], {1: "died", 6: "revived"}),
        (
            ON_THE_LINE,
            1.0,
            [None, ("dead", 1, 0), None, ("dead", 3, 1), None, ("dead", 5, 2), None],
            {1: "died", 2: "revived", 3: "died", 4: "revived", 5: "died", 6: "revived"},
        ),
    ],
)
def test_the_life_of_a_filter(
    factors: list[float], revival: float, states: list[Any], events: Any, tmp_path: Path
) -> None:
    """After each record: its state, the step since which it holds, and how often it came back."""
    model, thresholds = scaled([1.0, 1.0, 1.0]), Thresholds(revival=revival)
    with FilterMonitor(model, tmp_path, every=1) as monitor, torch.no_grad():
        row = model.weight[1].clone()
        for step, (factor, state) in enumerate(zip(factors, states, strict=True)):
            model.weight[1] = factor * row
            monitor.step(step)
            units = census(tmp_path, thresholds=thresholds).units
            shown = [(u.unit, u.how, (u.state, u.since, u.revivals)) for u in units]
            assert shown == ([] if state is None else [(1, ("weight",), state)])
    result = census(tmp_path, thresholds=thresholds)
    assert [(e.step, e.unit, e.what) for e in result.events] == [
        (s, 1, w) for s, w in events.items()
    ]
    born = "; 1 born." if "born" in events.values() else "."
    assert f"weight: 1 died, 1 of these came back, 0 dead at the end{born}" in str(result)


# What units do over data --------------------------------------------------------------------------


def test_the_sum_of_two_branches_is_nobodys() -> None:
    """A second convolution that is always negative lowers the skip connection: it lives."""
    model = resnet()
    with torch.no_grad():
        model.layer1.conv2.weight[2].abs_().neg_()
        model.layer1.conv2.bias[2] = -0.05  # type: ignore[index]
    result = census(model, batches())
    assert ("layer1.conv2", 2) not in filters(result)
    assert "silent" not in ways_of(result, "layer1.conv2")
    assert "silent" in ways_of(result, "layer1.conv1")


def test_a_tensor_in_the_place_of_one_that_is_gone_is_not_taken_for_it() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv1d(3, 6, 1), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = x
            for _ in range(20):
                self.conv(x)  # is freed at once, and the next object often takes its address
                y = F.relu(torch.full((len(x), 6, 8), -1.0))
            return self.head(y.mean(2))

    result = census(Model(), [torch.randn(5, 3, 8)])
    assert filters(result) == set()
    assert "silent" not in result.layers[0].how


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


@pytest.mark.parametrize("rectifier", RECTIFIERS)
@pytest.mark.parametrize("before", ["", "batch norm", "instance norm", "dropout", "pool"])
def test_silence_is_seen_through_any_rectifier(rectifier: str, before: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(3, 6, 1)
            kind = nn.BatchNorm1d if before == "batch norm" else nn.InstanceNorm1d
            self.norm = kind(6, affine=True)
            self.head = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            if before.endswith("norm"):
                x = self.norm(x)
            elif before == "dropout":
                x = F.dropout(x, training=self.training)
            elif before == "pool":
                x = F.max_pool1d(x, 2)
            return self.head(RECTIFIERS[rectifier](x).mean(2))

    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        target: Any = model.norm if before.endswith("norm") else model.conv
        target.bias[4] = -100.0
    result = census(model, [torch.randn(40, 3, 8)])
    assert filters(result) == {("conv", 4)}
    assert [u.how for u in result.units if u.number] == [("silent",)]


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 6), nn.LayerNorm(6), nn.RMSNorm(6)])
def test_silence_after_a_normalisation_over_channels_is_its_own(norm: nn.Module) -> None:
    """The filter still counts in the statistics of the other channels: it is not accused."""
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 6, 1) if isinstance(norm, nn.GroupNorm) else nn.Linear(3, 6)
    model = nn.Sequential(layer, norm, nn.ReLU(), nn.Flatten(), nn.Linear(6 * 4, 2))
    shape = (40, 3, 2, 2) if isinstance(norm, nn.GroupNorm) else (40, 4, 3)
    with torch.no_grad():
        norm.get_parameter("weight")[4] = 0
    data = [(torch.randn(shape), torch.arange(40) % 2)]
    result = census(model, data, loss=F.cross_entropy)
    assert [(u.layer, u.unit, u.how) for u in result.units if "feature" not in u.how] == [
        ("1", 4, ("gain", "silent"))
    ]
    assert ("0", 4) not in ablation(model, data)


def test_firing_once_in_any_batch_is_living() -> None:
    model = nn.Sequential(layer := nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2))
    with torch.no_grad():
        layer.weight[:] = torch.eye(2)
    rare = [torch.tensor([[1.0, -1.0]])] * 5 + [torch.tensor([[1.0, 1.0]])]
    assert filters(census(model, rare[:5])) == {("0", 1)}
    assert filters(census(model, rare)) == set()
    assert census(model, rare).examples == 6


def test_zero_features_before_the_classifier() -> None:
    model = resnet()
    with torch.no_grad():
        for conv in (model.layer2.conv2, model.layer2.downsample[0]):  # type: ignore[index]
            conv.weight[5] = 0  # type: ignore[union-attr]
            conv.bias[5] = -0.1  # type: ignore[union-attr]
    for head in (None, "fc", model.fc):
        result = census(model, batches(), head=head)
        features = [u for u in result.dead if "feature" in u.how]
        assert [(u.layer, u.unit, u.value) for u in features] == [("input of fc", 5, 0.0)]
    assert "1 of 8 features dead." in str(result)
    # At another layer's input, if it is named.
    result = census(model, batches(), head="layer2.conv1")
    assert {u.layer for u in result.units if "feature" in u.how} <= {"input of layer2.conv1"}


def test_zero_features_and_gradients_of_a_recording(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(first := nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    with FilterMonitor(model, tmp_path, every=2, gradients=True, features=True) as monitor:
        monitor.step(0)
        for step in range(1, 71):
            with torch.no_grad():
                # Unit 1 is silent from step 11 to 40, unit 3 from 51 on, unit 4 a moment only.
                first.bias[1] = -100.0 if 11 <= step <= 40 else 0.0
                first.bias[3] = -100.0 if step >= 51 else 0.0
                first.bias[4] = -100.0 if 20 < step < 30 else 0.0
            model.zero_grad()
            model(torch.randn(16, 4)).square().sum().backward()
            monitor.step(step)
    result = census(tmp_path)
    for quantity, layer in (("feature", "2"), ("gradient", "0")):
        assert [
            (e.step, e.layer, e.unit, e.what) for e in result.events if e.quantity == quantity
        ] == [(12, layer, 1, "died"), (42, layer, 1, "revived"), (52, layer, 3, "died")]
    assert [event.step for event in result.events] == [12, 12, 42, 42, 52, 52]
    assert [(u.layer, u.unit, u.how, u.since, u.state) for u in result.units] == [
        ("0", 3, ("gradient",), 52, "dead"),
        ("input of 2", 3, ("feature",), 52, "dead"),
    ]
    assert "feature: 2 died, 1 of these came back, 1 dead at the end." in str(result)
    assert len(census(tmp_path, thresholds=Thresholds(patience=3)).events) == 10


def test_weights_that_are_not_numbers_are_reported(tmp_path: Path) -> None:
    model = scaled([1.0, 1.0, 1.0, 1.0])
    with FilterMonitor(model, tmp_path, every=1) as monitor, torch.no_grad():
        monitor.step(0)
        model.weight[0, 3] = torch.nan
        model.weight[1] = 0
        model.weight[2, 3] = torch.inf
        monitor.step(1)
    for result in (census(model), census(tmp_path)):
        assert [(unit.unit, unit.how) for unit in result.dead] == [
            (0, ("nonfinite",)),
            (1, ("weight",)),
            (2, ("nonfinite",)),
        ]


def test_zero_weights_with_a_gradient_are_recoverable_in_a_recording(tmp_path: Path) -> None:
    model = scaled([1.0, 1.0, 1.0])
    with FilterMonitor(model, tmp_path, every=1, gradients=True) as monitor:
        monitor.step(0)
        with torch.no_grad():
            model.weight[1:] = 0
        model.weight.grad = torch.ones_like(model.weight)
        model.weight.grad[2] = 0
        monitor.step(1)
    result = census(tmp_path)
    assert [(u.unit, u.state, u.how) for u in result.units] == [
        (1, "recoverable", ("weight",)),
        (2, "dead", ("weight",)),
    ]
    assert result.layers[0].recoverable == result.layers[0].dead == 1


def test_a_row_without_gradient_is_no_evidence(tmp_path: Path) -> None:
    """Ten zeros in a row, counted over records in which there was nothing to measure."""
    model = nn.Sequential(first := nn.Linear(3, 2), last := nn.Linear(2, 2))
    last.weight.grad = torch.ones_like(last.weight)
    with FilterMonitor(model, tmp_path, every=1, gradients=True) as monitor:
        for step in range(13):
            measured = step not in (0, 5, 6)
            first.weight.grad = torch.tensor([[0.0] * 3, [1.0] * 3]) if measured else None
            monitor.step(step)
            dead = [(u.layer, u.unit, u.since) for u in census(tmp_path).dead]
            assert dead == ([("0", 0, 1)] if step == 12 else [])


def test_a_layer_that_the_data_do_not_reach_is_not_judged_by_them() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    result = census(Spare(), [(torch.randn(9, 4), torch.arange(9) % 4)], loss=F.cross_entropy)
    assert result.units == ()


def test_frozen_layers_are_not_accused_of_having_no_gradient() -> None:
    model = resnet()
    model.layer1.requires_grad_(False)
    result = census(model, batches(), loss=F.cross_entropy)
    assert "gradient" not in ways_of(result, "layer1.conv1")


def test_a_gradient_that_is_not_a_number_is_not_none() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model.get_parameter("0.bias")[1] = -100.0
    data = [(torch.randn(20, 3), torch.tensor(torch.nan))]
    result = census(model, data, loss=lambda output, target: output[:, 0].sum() * target)
    assert filters(result) == {("0", 1), ("2", 1)}  # the silent one, and the logit that is not used


def test_the_model_is_left_as_it_was() -> None:
    model = batch_normalised()
    model.layer1.eval()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    state = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    census(model, batches(), loss=F.cross_entropy)
    with pytest.raises(ZeroDivisionError):
        census(model, batches(), loss=lambda output, target: 1 / 0)  # type: ignore[arg-type]
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert modes == [module.training for module in model.modules()]
    assert all((p.grad == 3).all() for p in model.parameters() if p.grad is not None)
    assert torch.equal(torch.get_rng_state(), random)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


class Counting(nn.Module):
    """Counts its calls, also in evaluation mode."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x)


def test_buffers_are_left_as_they_were() -> None:
    model = Counting()
    census(model, [(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))], loss=F.cross_entropy)
    assert model.calls == 0


def test_models_in_wrappers() -> None:
    model = resnet()
    plant(model, "layer1.conv1", 3, "silent")
    expected = census(model, batches(), loss=F.cross_entropy)
    assert ("layer1.conv1", 3) in filters(expected)
    model.layer2.add_module("conv1", torch.compile(model.layer2.conv1))  # type: ignore[arg-type]
    for wrapped in (nn.DataParallel(model), torch.compile(model)):
        assert str(census(wrapped, batches(), loss=F.cross_entropy)) == str(expected)  # type: ignore[arg-type]


# Checkpoints --------------------------------------------------------------------------------------


def planted() -> ResNet:
    model = batch_normalised()
    plant(model, "layer1.conv1", 3, "zero")
    bn: Any = model.bn1
    with torch.no_grad():
        bn.weight[2] = 0
    return model


def test_every_form_of_a_checkpoint(tmp_path: Path) -> None:
    model = planted()
    state = model.state_dict()
    expected = {("layer1.conv1", 3), ("bn1", 2)}
    forms: dict[str, Any] = {
        "plain": state,
        "parallel": {"module." + key: value for key, value in state.items()},
        "compiled": {"_orig_mod." + key: value for key, value in state.items()},
        "named": {"epoch": 3, "state_dict": state, "ema": state},
        "only": {"weights": state, "step": torch.tensor(3), "optimizer": {"lr": 0.1}},
        "half": {key: value.half() for key, value in state.items()},
    }
    for name, form in forms.items():
        path = tmp_path / f"{name}.pt"
        torch.save(form, path)
        result = census(path)
        assert places(result.dead) == expected, name
        assert [layer.number for layer in result.layers if layer.number] == list(range(1, 8))


def test_safetensors_which_do_not_keep_the_order(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model = planted()
    safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    result = census(tmp_path / "model.safetensors")
    assert places(result.dead) == {("layer1.conv1", 3), ("bn1", 2)}
    assert {layer.number for layer in result.layers} == {None}
    (tmp_path / "broken.safetensors").write_bytes(b"12345678{}")
    with pytest.raises(ValueError, match="to hold safetensors"):
        census(tmp_path / "broken.safetensors")


def test_a_state_dict_tells_transposed_convolutions_where_sizes_do() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(6, 9, 3, groups=3), nn.ConvTranspose2d(9, 4, 2))
    plant(model, "0", 7, "zero")
    plant(model, "1", 2, "zero")
    result = census(model.state_dict())
    assert places(result.dead) == {("0", 7), ("1", 2)}
    assert [layer.kind for layer in result.layers] == ["transposed conv2d"] * 2


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
    read = {weight.name: weight.tensor for weight in state_weights(state)[0]}
    live = {weight.name: weight.tensor for weight, _ in model_weights(model)}
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[key])  # reading takes no step of the power iteration
    inputs = torch.randn(2, 7), *(torch.randn(2, c, *[5] * d) for c, d in ((3, 2), (4, 2), (6, 1)))
    for (key, layer), x in zip(model.eval().named_children(), inputs, strict=True):
        layer(x)
        torch.testing.assert_close(read[key], layer.weight)
        torch.testing.assert_close(live[key], layer.weight)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, parametrizations.weight_norm])
def test_filters_that_died_under_weight_norm(norm, tmp_path: Path) -> None:
    model = nn.Sequential(norm(nn.Conv2d(3, 4, 3)), nn.ReLU(), norm(nn.Conv2d(4, 5, 1)))
    model(torch.randn(1, 3, 4, 4))
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if key in ("0.weight_g", "0.parametrizations.weight.original0"):
                tensor[2] = 0
    torch.save(
        {"module." + key: value for key, value in model.state_dict().items()}, tmp_path / "a"
    )
    for source in (model, model.state_dict(), tmp_path / "a"):
        result = census(source)
        assert [(u.layer, u.unit, u.how) for u in result.dead] == [("0", 2, ("weight",))]
        assert [(layer.layer, layer.units) for layer in result.layers] == [("0", 4), ("2", 5)]


def test_a_parametrisation_that_a_state_dict_does_not_show_is_refused() -> None:
    model = nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Linear(4, 2))
    assert census(model).units == ()
    with pytest.raises(ValueError, match=r"unknown parametrisation of '0'.*pass the model"):
        census(model.state_dict())


def test_slopes_of_a_prelu_are_not_gains() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.PReLU(4, init=0.0))
    assert census(model).units == census(model.state_dict()).units == ()


def test_a_pickle_is_not_executed(tmp_path: Path) -> None:
    import pickle

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "executed",))

    (tmp_path / "trap.pt").write_bytes(pickle.dumps({"w": Trap()}, protocol=2))
    with pytest.raises(ValueError, match="weights_only=True"):
        census(tmp_path / "trap.pt")
    assert not (tmp_path / "executed").exists()


# What comes out -----------------------------------------------------------------------------------


@contextmanager
def recorded(tmp_path: Path) -> Iterator[Path]:
    """A run's folder in which layer1.conv1's unit 3 dies, and one of fc dies and comes back."""
    model = resnet()
    with FilterMonitor(model, tmp_path / "norms", every=1) as monitor, torch.no_grad():
        monitor.step(0)
        row = model.fc.weight[1].clone()
        model.fc.weight[1] = 0
        monitor.step(1)
        model.fc.weight[1] = row
        model.layer1.conv1.weight[3] = 0
        monitor.step(2)
        yield tmp_path


def test_table_csv_and_objects_agree(tmp_path: Path) -> None:
    with recorded(tmp_path) as folder:
        result = census(folder)
    for rows, objects in (
        ("units", result.units),
        ("events", result.events),
        ("layers", result.layers),
    ):
        path = tmp_path / f"{rows}.csv"
        result.to_csv(path, rows)  # type: ignore[arg-type]
        with open(path, newline="") as file:
            read = list(csv.DictReader(file))
        assert len(read) == len(objects)
        assert [(r["layer"], r["number"]) for r in read] == [
            (o.layer, str(o.number)) for o in objects
        ]
    with open(tmp_path / "units.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["layer"] == "layer1.conv1"
    assert (row["unit"], row["how"], row["state"], row["since"]) == ("3", "weight", "dead", "2")
    assert str(result).splitlines() == [
        str(tmp_path / "norms"),
        "#  layer         kind    units  dead  recoverable  unborn  weight  died  revived",
        "2  layer1.conv1  Conv2d      6     1            0       0       1     1        0",
        "7  fc            Linear      4     0            0       0       0     1        1",
        "1 of 46 filters dead.",
        "Over steps 0 to 2:",
        "  weight: 2 died, 1 of these came back, 1 dead at the end.",
    ]
    with pytest.raises(ValueError, match="`rows` to be one of units, layers, events"):
        result.to_csv(tmp_path / "x.csv", "people")  # type: ignore[arg-type]


def test_nothing_dead_is_reported(tmp_path: Path) -> None:
    with FilterMonitor(resnet(), tmp_path) as monitor:
        monitor.step(0)
    assert str(census(tmp_path)).splitlines()[1:] == [
        "0 of 46 filters dead.",
        "Over steps 0 to 0:",
        "  nothing died, nothing came back.",
    ]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"source": 3}, TypeError, "`source` to be a model, a state dict or a path, but got int"),
        ({"initial": 3}, TypeError, "`initial` to be a model"),
        ({"source": {}, "data": batches()}, ValueError, "`source` to be a model .* but got dict"),
        ({"loss": F.cross_entropy}, ValueError, "`data` to be given with `loss`"),
        ({"data": []}, ValueError, "at least one example"),
        (
            {"data": [torch.zeros(1, 3, 8, 8)], "loss": F.cross_entropy},
            ValueError,
            r"\(input, target\) if `loss` is given",
        ),
        ({"data": [{"x": 1}]}, TypeError, "each batch of `data` to be a tensor or a tuple"),
        (
            {"data": batches(), "loss": functools.partial(F.cross_entropy, reduction="none")},
            ValueError,
            r"scalar that depends on the weights, but got shape \(8,\)",
        ),
        ({"data": batches(), "loss": lambda output, target: 1.0}, ValueError, "but got float"),
        ({"source": nn.ReLU()}, ValueError, "a convolution or a linear layer, but got none"),
        ({"initial": mlp()}, ValueError, "`initial` to have 6 units in 'conv1', but got none"),
        ({"data": batches(), "head": "classifier"}, ValueError, "name a module"),
    ],
)
def test_errors(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        census(**{"source": resnet(), **arguments})


def test_errors_of_files(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "empty.pt")
    (tmp_path / "text.pt").write_text("not a checkpoint")
    for name, message in (
        ("nowhere.pt", "got no such file"),
        ("", "to hold a recording, but got none"),
        ("empty.pt", "to hold one state dict"),
        ("text.pt", "to be a checkpoint"),
    ):
        with pytest.raises(ValueError, match=message):
            census(tmp_path / name)
    with pytest.raises(ValueError, match="got no such file"):
        census(scaled([1.0]), initial=tmp_path / "nowhere.pt")


def test_errors_of_recordings(tmp_path: Path) -> None:
    FilterMonitor(resnet(), tmp_path).close()
    with pytest.raises(ValueError, match="to hold a record, but got none"):
        census(tmp_path)
    with pytest.raises(ValueError, match="no `initial` for a recording"):
        census(tmp_path, initial=resnet())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("start", 1.0),
        ("layer", -0.1),
        ("chance", 2.0),
        ("gradient", float("nan")),
        ("output", 1.5),
        ("zero", float("inf")),
        ("revival", 0.5),
        ("patience", 0),
    ],
)
def test_thresholds_are_checked(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`{name}`"):
        Thresholds(**{name: value})


def test_thresholds_of_gradients_and_outputs() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    with torch.no_grad():
        model.get_parameter("0.weight")[:] = torch.tensor([[1.0, 0.0], [0.0, 1e-2]])
        model.get_parameter("1.weight")[:] = torch.tensor([[1.0, 1e-5], [-1.0, -1e-5]])
    data = [(torch.ones(1, 2), torch.zeros(1, dtype=torch.int64))]
    assert census(model, data, loss=F.cross_entropy).units == ()
    loose = census(model, data, loss=lambda o, t: o[0, 0], thresholds=Thresholds(gradient=1e-4))
    assert {(u.layer, u.unit, u.how) for u in loose.units} == {
        ("0", 1, ("gradient",)),
        ("1", 1, ("gradient",)),
    }
    loose = census(model, data, thresholds=Thresholds(output=0.1))
    assert [(u.layer, u.unit) for u in loose.units] == [("input of 1", 1)]


def test_a_recording_can_be_counted_while_it_grows(tmp_path: Path) -> None:
    model = resnet()
    with FilterMonitor(model, tmp_path, every=1) as monitor, torch.no_grad():
        for step in range(4):
            monitor.step(step)
            assert census(tmp_path).steps == (0, step)
            assert filters(census(tmp_path)) == {("fc", unit) for unit in range(step)}
            model.fc.weight[step] = 0
    assert len(Recording(tmp_path)) == 4


class ByName(nn.Module):
    """Calls its classifier by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(input=F.relu(self.body(x)))


def test_a_census_where_gradients_are_off_and_another_device_is_the_default(tmp_path):
    model = ByName()
    data = [(torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1]))]
    wanted = census(model, data=data, loss=F.cross_entropy)
    with torch.no_grad(), torch.device("meta"):
        result = census(model, data=data, loss=F.cross_entropy)
    assert str(result) == str(wanted)
    with FilterMonitor(model, tmp_path / "norms", every=1) as monitor:
        monitor.step(1)
    with torch.device("meta"):
        assert str(census(tmp_path / "norms")) == str(census(tmp_path / "norms"))
