"""The census: planted dead units are found, living ones are not accused."""

from __future__ import annotations

import argparse
import copy
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

from powergrad.monitor import Census, FilterMonitor, Unit, census
from powergrad.monitor.layers import model_weights, weight_of

Units = set[tuple[str, int]]  # names of layers, and places in them


def normalised() -> nn.Sequential:
    torch.manual_seed(1)
    first, second, third = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 8, 1), nn.Linear(8, 9)
    norms = nn.BatchNorm2d(6), nn.GroupNorm(2, 8), nn.LayerNorm(9)
    return nn.Sequential(first, norms[0], nn.ReLU(), second, norms[1], third, norms[2], plain())


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Conv1d(3, 6, 3), nn.ReLU(), nn.Linear(6, 4))


def transposed() -> nn.Sequential:
    torch.manual_seed(4)
    up, twice = nn.ConvTranspose2d(6, 8, 3, groups=2), nn.ConvTranspose2d(8, 5, 2)
    return nn.Sequential(nn.Conv2d(8, 6, 3, groups=2), up, nn.BatchNorm2d(8), twice, plain())


# Each with the names of the layers that a normalisation of their channels follows.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "plain": (plain, set()),
    "normalised": (normalised, {"0", "3", "5"}),
    "grouped and transposed": (transposed, {"1"}),
}
LAYER = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d)


def units_of(model: nn.Module) -> list[tuple[str, int]]:
    units = []
    for name, module in model.named_modules():
        if isinstance(module, LAYER):
            units += [(name, unit) for unit in range(len(module.get_parameter("bias")))]
    return units


def filter_of(model: nn.Module, name: str, unit: int) -> Tensor:
    """A view of the weights of one filter."""
    layer = model.get_submodule(name)
    weight: Any = layer.weight
    if isinstance(layer, nn.ConvTranspose2d):
        ins, outs = layer.in_channels // layer.groups, layer.out_channels // layer.groups
        group = unit // outs
        return weight[group * ins : (group + 1) * ins, unit % outs]
    return weight[unit]


@torch.no_grad()
def plant(model: nn.Module, name: str, unit: int, how: str) -> None:
    filter_of(model, name, unit).mul_({"zero": 0.0, "tiny": 1e-5}[how])


def places(units: Iterable[Unit]) -> Units:
    return {(unit.layer, unit.unit) for unit in units}


def filters(result: Census) -> Units:
    """The units of convolutions and linear layers that were found, in whatever state."""
    return places(unit for unit in result.units if unit.number is not None)


@pytest.mark.parametrize("network", NETWORKS)
@given(data=st.data())
def test_every_planted_filter_is_found_and_no_other(network: str, data: st.DataObject) -> None:
    """By its weights alone: in the model, against its start, and in its state dict."""
    start = NETWORKS[network][0]()
    model = copy.deepcopy(start)
    chosen = data.draw(st.sets(st.sampled_from(units_of(model)), max_size=12))
    tiny: Units = set()
    for name, unit in sorted(chosen):
        how = data.draw(st.sampled_from(["zero", "tiny"]))
        plant(model, name, unit, how)
        tiny |= {(name, unit)} if how == "tiny" else set()
    whole = all_of_a_layer(model, chosen)
    # Before a normalisation the scale of a filter is not seen: where no filter has kept its size,
    # the tiny ones are the layer, and do what they did (but for the normalisation's eps).
    dead = {u for u in chosen if u not in tiny or u[0] not in (whole & NETWORKS[network][1])}
    sources = [lambda **start: census(model, **start)]
    if "transposed" not in network:
        sources.append(lambda **start: census(model.state_dict(), **start))
    for run in sources:
        result = run(initial=start)
        assert places(result.units) == dead
        assert all(unit.how == ("weight",) and unit.state == "dead" for unit in result.units)
        assert set(result.whole_layers) == all_of_a_layer(model, dead)
        if not whole:  # alone, a layer that is all tiny may just be small
            assert places(run().units) == chosen


def all_of_a_layer(model: nn.Module, chosen: Units) -> set[str]:
    living = {name for name, unit in units_of(model) if (name, unit) not in chosen}
    return {name for name, _ in chosen} - living


@pytest.mark.parametrize("network", NETWORKS)
@given(data=st.data())
def test_revived_and_killed_again(network: str, data: st.DataObject, tmp_path_factory) -> None:
    """Every planted life is read back from the recording, death by death."""
    model = NETWORKS[network][0]()
    # 5 are less than a layer before a normalisation has, which would live if all were tiny.
    chosen = sorted(data.draw(st.sets(st.sampled_from(units_of(model)), max_size=5)))
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
    assert result.steps == (0, 10 * rows)


def scaled(factors: list[float], inputs: int = 50) -> nn.Linear:
    layer = nn.Linear(inputs, len(factors))
    directions = F.normalize(torch.randn(len(factors), inputs))
    layer.weight.data[:] = directions * torch.tensor(factors)[:, None]
    return layer


MIXED = [1.0, 0.3, 0.05, 0.01, 0.0011, 0.0009]
NORMALISED = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)]
FEW = {1: 1e-6, 2: 1e-3, 3: 1e-2, 9: 1e-2}  # the line of a filter of so few weights


@pytest.mark.parametrize(
    ("layers", "factors", "knows_start", "dead"),
    [
        # Without a start, 0.1% of the largest of the layer; a small layer may live.
        ([scaled(MIXED)], [1.0] * 6, False, {5}),
        ([scaled([1.0] * 9)], [1e-4] * 9, False, set()),
        ([scaled([1.0] * 9)], [1e-12] * 9, False, set(range(9))),
        ([scaled([1.0] * 9)], [0.0] * 9, False, set(range(9))),
        # With it, 1% of its own start; what was small from the beginning is not dead.
        ([scaled(MIXED)], [1.0] * 6, True, set()),
        ([scaled([1, 1, 100, 0.01])], [0.011, 0.009, 0.009, 0.5], True, {1, 2}),
        ([scaled([1.0] * 9)], [1e-4] * 9, True, set(range(9))),
        ([scaled([1.0] * 9)], [0.5] * 9, True, set()),
        # Filters of few weights pass near zero while they live.
        *(([scaled([1.0] * 4, d)], [1, 1.2 * x, 1, 1], True, set()) for d, x in FEW.items()),
        *(([scaled([1.0] * 4, d)], [1, 0.8 * x, 1, 1], True, {1}) for d, x in FEW.items()),
        *(([scaled([1.0] * 4, 1)], [1, x, 1, 1], False, set()) for x in (1.2e-6, -1.2e-6)),
        ([scaled([1.0] * 4, 1)], [1, 0.8e-6, 1, 1], False, {1}),
        # Before a normalisation, which undoes their common scale, filters live that shrink
        # together, or beside one that grew, and so does the last one.
        (NORMALISED, [1e-3, 1e-3, 1e-3, 1e-6, 1e-3, 1e-3, 1e-3, 1e-3], True, {3}),
        (NORMALISED, [1, 1, 1, 500, 1, 1, 1, 1], True, set()),
        (NORMALISED, [0, 0, 0, 1e-5, 0, 0, 0, 0], True, {0, 1, 2, 4, 5, 6, 7}),
        (NORMALISED[:1], [0, 0, 0, 1e-5, 0, 0, 0, 0], True, set(range(8))),
    ],
)
def test_where_the_line_is(layers, factors, knows_start, dead, tmp_path: Path) -> None:
    """Multiply the filters of the first layer: which of them are dead, and no other."""
    start = nn.Sequential(*layers, nn.Linear(len(factors), 3))
    now = copy.deepcopy(start)
    with FilterMonitor(now, tmp_path, every=1) as monitor, torch.no_grad():
        monitor.step(0)
        weight = now.get_parameter("0.weight")
        weight.mul_(torch.tensor(factors).view(-1, *[1] * (weight.dim() - 1)))
        monitor.step(1)
    results = [census(now, initial=start), census(tmp_path)] if knows_start else [census(now)]
    for result in results:
        assert filters(result) == {("0", unit) for unit in dead}
        assert result.whole_layers == (("0",) if len(dead) == len(factors) else ())


@pytest.mark.parametrize(("quantity", "line"), [("weight", 0.01), ("gain", 1e-6)])
@pytest.mark.parametrize(
    ("levels", "states"),
    [
        ([0, 0, None, 1e-5, 0, None], "uu.dd."),  # unborn until it lives
        ([None, 0.99, -1.01, 0.99, 1.9, 0.99, -2.1], ".ddddd."),  # on the line it dies once
    ],
)
def test_life_of_a_unit(quantity, line, levels, states, tmp_path: Path) -> None:
    """Levels in multiples of the line (None: as at the start), and the state after each record."""
    model = nn.Sequential(scaled([1.0] * 3), nn.BatchNorm1d(3))
    layer = "0" if quantity == "weight" else "1"
    weight = model.get_parameter(f"{layer}.weight")
    alive = weight.detach()[1].clone()
    events, since, result = [], 0, None
    with FilterMonitor(model, tmp_path, every=1, gains=True) as monitor:
        for step, (level, state) in enumerate(zip(levels, states, strict=True)):
            weight.data[1] = alive if level is None else level * line * alive
            monitor.step(step)
            change = states[max(step - 1, 0) : step + 1]
            if what := {"u.": "born", ".d": "died", "d.": "revived"}.get(change):
                events.append((step, layer, 1, quantity, what))
                since = step
            result = census(tmp_path)
            shown = [(u.layer, u.unit, u.how, u.state, u.since) for u in result.units]
            state = {"u": "unborn", "d": "dead"}.get(state)
            assert shown == ([(layer, 1, (quantity,), state, since)] if state else [])
            assert [(e.step, e.layer, e.unit, e.quantity, e.what) for e in result.events] == events
    births = int("u" in states)
    assert str(result).endswith(f"  {quantity}: 1 deaths, 1 revivals, {births} births.")


def test_vanished_gains_are_dead_and_gains_that_start_at_zero_unborn() -> None:
    model = normalised()
    start = copy.deepcopy(model)
    model.get_parameter("1.weight").data[1] = 0.0
    for result in (census(model), census(model.state_dict()), census(model, initial=start)):
        assert [(u.layer, u.unit, u.how) for u in result.units] == [("1", 1, ("gain",))]
    assert [unit.state for unit in census(model, initial=model).units] == ["unborn"]
    assert census(model, initial=model).dead == ()


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
    assert "feature: 2 deaths, 1 revivals, 0 births." in str(result)


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
    assert [(u.unit, u.state, u.how, u.since) for u in result.units] == [
        (0, "dead", ("gradient",), 1),
        (1, "recoverable", ("weight",), 4),
        (2, "dead", ("weight", "gradient"), 4),
    ]
    assert (result.layers[0].recoverable, result.layers[0].dead) == (1, 2)


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
def test_models_in_wrappers(wrap: Any) -> None:
    model = normalised()
    plant(model, "3", 2, "zero")
    expected = str(census(model))
    model.add_module("3", torch.compile(model[3]))  # type: ignore[arg-type]
    assert str(census(wrap(model))).splitlines()[1:] == expected.splitlines()[1:]


def test_default_device_does_not_matter(tmp_path: Path) -> None:
    model = normalised()
    with FilterMonitor(model, tmp_path, every=1) as monitor:
        monitor.step(1)
    expected = str(census(model)), str(census(tmp_path))
    with torch.device("meta"):
        assert (str(census(model)), str(census(tmp_path))) == expected


@pytest.fixture(scope="module")
def planted() -> dict[str, Tensor]:
    model = normalised()
    plant(model, "3", 2, "zero")
    model.get_parameter("1.weight").data[2] = 0
    return model.state_dict()


FORMS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "plain": lambda state: state,
    "parallel": lambda state: {"module." + key: value for key, value in state.items()},
    "compiled": lambda state: {"_orig_mod." + key: value for key, value in state.items()},
    "named": lambda state: {"epoch": 3, "state_dict": state, "ema": state},
    "only": lambda state: {"weights": state, "step": torch.tensor(3), "optimizer": {"lr": 0.1}},
    "half": lambda state: {key: value.half() for key, value in state.items()},
    "timm": lambda state: {
        "epoch": 99,
        "arch": "resnet18",
        "state_dict": {"module." + key: value for key, value in state.items()},
        "optimizer": {"state": {}, "param_groups": [{"lr": 0.4}]},
        "args": argparse.Namespace(lr=0.4, amp=True, img_size=None),
        "metric": 67.796,
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_checkpoint(form: str, planted: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save(FORMS[form](planted), tmp_path / "model.pt")
    result = census(tmp_path / "model.pt")
    assert places(result.dead) == {("3", 2), ("1", 2)}
    assert [layer.number for layer in result.layers if layer.number] == [1, 2, 3, 4, 5]


def test_safetensors_do_not_keep_the_order(planted: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    pytest.importorskip("safetensors.torch").save_file(planted, path)
    result = census(path)
    assert places(result.dead) == {("3", 2), ("1", 2)}
    assert {layer.number for layer in result.layers} == {None}
    path.write_bytes(b"12345678{}")
    with pytest.raises(ValueError, match="safetensors"):
        census(path)


NORMED: dict[str, Callable[[Any], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "pruned": lambda layer: prune.random_unstructured(layer, "weight", 0.5),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("name", NORMED)
def test_weights_that_are_computed_from_others(name: str) -> None:
    """A model may not have computed them yet; a state dict has only what they are computed from."""
    torch.manual_seed(0)
    layers = nn.Linear(7, 4), nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 6, 2), nn.Conv1d(6, 6, 3)
    model = nn.ModuleList(NORMED[name](layer) for layer in layers)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if tensor.dim() > 1 and not key.endswith("mask"):
                tensor.mul_(1 + torch.rand(tensor.shape))
    state = copy.deepcopy(model.state_dict())
    live = {column.layer: weight_of(module) for column, module in model_weights(model)}
    assert list(live) == ["0", "1", "2", "3"]
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[key])  # reading takes no step of the power iteration
    inputs = torch.randn(2, 7), *(torch.randn(2, c, *[5] * d) for c, d in ((3, 2), (4, 2), (6, 1)))
    for (key, layer), x in zip(model.eval().named_children(), inputs, strict=True):
        layer(x)
        torch.testing.assert_close(live[key], layer.weight)
    with pytest.raises(ValueError, match=r"'0\..*; pass the model"):
        census({"module." + key: value for key, value in state.items()})


UNCLEAR: dict[str, Callable[[], nn.Module]] = {
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
    "transposed": lambda: nn.ConvTranspose2d(4, 6, 2),
    "transposed grouped": lambda: nn.ConvTranspose2d(4, 2, 2, groups=2),
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_state_dict_that_does_not_show_the_units_raises(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 2), UNCLEAR[name]())
    assert census(model).units == ()
    with pytest.raises(ValueError, match=r"'1\..*; pass the model"):
        census(model.state_dict())


def test_slopes_of_a_prelu_are_not_gains() -> None:
    """Nor are those of a normalisation over several dimensions."""
    zero = nn.LayerNorm([2, 4])
    nn.init.zeros_(zero.weight)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.PReLU(4, init=0.0), zero)
    assert census(model).units == census(model.state_dict()).units == ()


def test_pickle_is_not_executed(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "executed",))

    (tmp_path / "trap.pt").write_bytes(pickle.dumps({"w": Trap()}, protocol=2))
    with pytest.raises(ValueError, match="weights_only"):
        census(tmp_path / "trap.pt")
    assert not (tmp_path / "executed").exists()


def test_table_of_the_affected_layers(tmp_path: Path) -> None:
    """In a run's folder: a unit of the last layer dies and revives, and one of the first dies."""
    model = plain()
    first, last = model.get_parameter("0.weight"), model.get_parameter("2.weight")
    with FilterMonitor(model, tmp_path / "norms", every=1) as monitor, torch.no_grad():
        monitor.step(0)
        assert str(census(tmp_path)).endswith("  nothing died, nothing came back.")
        row = last[1].clone()
        last[1] = 0
        monitor.step(1)
        last[1] = row
        first[3] = 0
        monitor.step(2)
    assert str(census(tmp_path)).splitlines()[1:] == [
        "#  layer  kind    units  dead  recoverable  unborn  weight  died  revived",
        "1  0      Conv1d      6     1            0       0       1     1        0",
        "2  2      Linear      4     0            0       0       0     1        1",
        "1 of 10 filters dead.",
        "Over steps 0 to 2:",
        "  weight: 2 deaths, 1 revivals, 0 births.",
    ]


@pytest.mark.parametrize(
    ("arguments", "error", "word"),
    [
        ({"source": 3}, TypeError, "`source`"),
        ({"initial": 3}, TypeError, "`initial`"),
        ({"source": nn.ReLU()}, ValueError, "none"),
        ({"initial": plain()}, ValueError, "`initial`.*'1'"),
        ({"source": "nowhere.pt"}, ValueError, "no such file"),
        ({"source": "folder"}, ValueError, "recording"),
        ({"source": "empty.pt"}, ValueError, "state dict"),
        ({"source": "text.pt"}, ValueError, "checkpoint"),
        ({"source": "norms"}, ValueError, "record"),
        ({"source": "norms", "initial": normalised()}, ValueError, "`initial`"),
    ],
)
def test_bad_arguments_raise(arguments, error, word, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    torch.save({"a": 1}, "empty.pt")
    Path("text.pt").write_text("not a checkpoint")
    FilterMonitor(normalised(), "norms").close()
    with pytest.raises(error, match=word):
        census(**{"source": normalised(), **arguments})
