"""Clipping: against equations written another way, against timm and optax, and under a scaler."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torchvision_shim import declare_torchvision_schemas

from powergrad._head import find_head
from powergrad._native import norms
from powergrad._units import in_rows
from powergrad.clipping import (
    LayerClip,
    adaptive_clip_grad_,
    clip_grad_norm_per_tensor_,
    clip_grads_before_step,
)

METHODS = {"agc": 0.01, "norm": 0.5, "tensor_norm": 0.05, "value": 0.01}


# Helpers ------------------------------------------------------------------------------------------


def bits(tensor: Tensor) -> Tensor:
    """The tensor's memory, by which NaNs and signed zeros can be compared."""
    return tensor.detach().contiguous().view(torch.uint8).clone()


def grad_of(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad


def give_gradients(module: nn.Module, spread: float = 1, dim: int = 0, seed: int = 0) -> None:
    """Random gradients: by turns 10**spread times under and over the 1% of the weight where AGC
    begins to act, entry by entry along `dim`, and parameter by parameter for vectors and scalars.
    """
    generator = torch.Generator().manual_seed(seed)
    for i, p in enumerate(module.parameters()):
        direction = torch.randn(p.shape, generator=generator).to(p.device)
        turns = (-1.0) ** (torch.arange(p.shape[dim]) if p.dim() > 1 else torch.tensor(i))
        if p.dim() > 1:
            turns = turns.view([-1 if d == dim else 1 for d in range(p.dim())])
        turns = turns.to(p.device)
        typical = p.detach().float().square().mean().sqrt().clamp(min=1e-3 / p.numel() ** 0.5)
        grad = 0.01 * typical * 10 ** (spread * turns) * direction
        p.grad = torch.empty_like(p).copy_(grad)


def clipped_unit(g: Tensor, w: Tensor, clip: float, eps: float) -> Tensor:
    """The paper's equation for one unit, in float64."""
    g, w = g.double(), w.double()
    norm = math.sqrt(sum(x * x for x in g.flatten().tolist()))
    limit = clip * max(math.sqrt(sum(x * x for x in w.flatten().tolist())), eps)
    return g * limit / norm if norm > limit else g


def units_by_output(layer: nn.Module, weight: Tensor, x: Tensor, channel: int) -> list[Tensor]:
    """For each output channel, which entries of the weight it depends on, by differentiation."""
    masks = []
    y = layer(x).movedim(channel, 0)
    for out in y:
        (dependence,) = torch.autograd.grad(out.sum(), weight, retain_graph=True)
        masks.append(dependence != 0)
    return masks


def small_net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 16, 8),
        nn.Tanh(),
        nn.Linear(8, 3),
    )


def small_loss(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(6, 1, 4, 4, generator=generator).to(next(model.parameters()).dtype)
    target = torch.randint(3, (6,), generator=generator)
    return 30 * nn.functional.cross_entropy(model(x), target)


def gradients(module: nn.Module) -> list[Tensor]:
    return [grad_of(p) for p in module.parameters() if p.grad is not None]


@pytest.fixture(scope="module")
def timm():
    declare_torchvision_schemas()
    return pytest.importorskip("timm")


@pytest.fixture(scope="module")
def timm_agc(timm) -> Callable[..., None]:
    return pytest.importorskip("timm.utils.agc").adaptive_clip_grad


# With and without the C kernel --------------------------------------------------------------------


def mixed_net() -> nn.Sequential:
    """Layers that the kernel serves beside some that it does not."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 9, 7),
        nn.BatchNorm2d(9),
        nn.Conv2d(9, 6, 3),
        nn.ConvTranspose2d(6, 4, 3, groups=2),
        nn.LayerNorm([4, 5, 5]),
        nn.Linear(37, 1),
        nn.Linear(5, 70).double(),
        nn.Embedding(30, 15),
        nn.PReLU(),
    )
    weight = model[2].get_parameter("weight")
    weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    return model


@pytest.mark.skipif(not in_rows(None, torch.ones(1)), reason="the C kernel does not serve")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("spread", [-3.0, 1.0, 3.0])
@pytest.mark.parametrize("broken", [None, math.nan, math.inf, 1e38])
def test_the_kernel_changes_no_bit(
    method: str, spread: float, broken: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients and reports, where none, some and all are clipped; NaN, inf, a norm that is inf."""
    results = []
    for native in (True, False):
        model = mixed_net()
        give_gradients(model, spread=spread)
        if broken is not None:
            grad_of(model[5].get_parameter("weight"))[0, :5] = broken
        if not native:
            monkeypatch.setattr("powergrad._units.in_rows", lambda *_: False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with clip_grads_before_step(optimizer, model, head=None, **{method: METHODS[method]}) as h:
            optimizer.step()
        report = h.last_report[method]
        results.append(([bits(g) for g in gradients(model)], repr(dict(report)), report.skipped))
    (grads, *report), (expected, *expected_report) = results
    assert all(map(torch.equal, grads, expected))
    assert report == expected_report
    assert report[1] == (broken is not None and not math.isfinite(broken))


# What a unit is -----------------------------------------------------------------------------------

OUTPUTS = {
    "linear": (lambda: nn.Linear(5, 4), (3, 5)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3), (2, 4, 7)),
    "conv2d": (lambda: nn.Conv2d(3, 4, (3, 2)), (1, 3, 5, 5)),
    "conv2d grouped": (lambda: nn.Conv2d(6, 4, 3, groups=2), (1, 6, 5, 5)),
    "conv2d depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4), (1, 4, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (1, 2, 3, 3, 3)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(3, 5, 3), (1, 3, 4)),
    "transposed 2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), (1, 4, 3, 3)),
    "transposed 2d grouped": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), (1, 4, 3, 3)),
    "transposed 3d grouped": (lambda: nn.ConvTranspose3d(6, 6, 2, groups=3), (1, 6, 2, 2, 2)),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_unit_is_what_one_output_depends_on(name: str) -> None:
    make, shape = OUTPUTS[name]
    torch.manual_seed(0)
    layer = make().double()
    assert isinstance(layer.weight, Tensor)
    channel = -1 if name == "linear" else 1
    masks = units_by_output(layer, layer.weight, torch.ones(shape).double(), channel)
    assert torch.stack(masks).sum(0).eq(1).all()  # each entry of the weight is in one unit
    give_gradients(layer, spread=2, dim=1 if "transposed" in name else 0)
    before = grad_of(layer.weight).clone()
    report = adaptive_clip_grad_(layer, head=None)
    for mask in masks:
        expected = clipped_unit(before[mask], layer.weight.detach()[mask], 0.01, 1e-3)
        torch.testing.assert_close(grad_of(layer.weight)[mask], expected, rtol=1e-12, atol=0)
    assert report["weight"].units == len(masks)
    assert 0 < report["weight"].clipped < len(masks)


def test_attention_projections_have_a_unit_a_row() -> None:
    torch.manual_seed(0)
    one = nn.MultiheadAttention(6, 2, add_bias_kv=True).double()
    three = nn.MultiheadAttention(6, 2, kdim=4, vdim=5).double()
    for attention, names in (
        (one, ["in_proj_weight", "out_proj.weight"]),
        (three, ["q_proj_weight", "k_proj_weight", "v_proj_weight"]),
    ):
        give_gradients(attention)
        before = {name: grad_of(p).clone() for name, p in attention.named_parameters()}
        report = adaptive_clip_grad_(attention, head=None)
        parameters = dict(attention.named_parameters())
        for name in names:
            p = parameters[name]
            assert report[name].units == len(p)
            for row, g, w in zip(grad_of(p), before[name], p.detach(), strict=True):
                expected = clipped_unit(g, w, 0.01, 1e-3)
                torch.testing.assert_close(row, expected, rtol=1e-12, atol=0)
        assert report["in_proj_bias"].units == 1
    assert adaptive_clip_grad_(one, head=None)["bias_k"].units == 1


def test_gains_biases_and_scalars_are_one_unit_each() -> None:
    torch.manual_seed(0)
    module = nn.ModuleDict(
        {
            "norm": nn.BatchNorm1d(5),
            "image_norm": nn.LayerNorm([2, 3]),
            "rms": nn.RMSNorm([2, 3]),
            "prelu": nn.PReLU(4),
            "linear": nn.Linear(3, 4),
        }
    ).double()
    module.register_parameter("temperature", nn.Parameter(torch.tensor(2.0).double()))
    for p in module.parameters():
        p.grad = torch.randn_like(p)
    before = {name: grad_of(p).clone() for name, p in module.named_parameters()}
    report = adaptive_clip_grad_(module, head="linear")
    assert set(report) == {name for name in before if not name.startswith("linear")}
    for name, p in module.named_parameters():
        if name in report:
            assert report[name].units == 1
            expected = clipped_unit(before[name], p.detach(), 0.01, 1e-3)
            torch.testing.assert_close(grad_of(p), expected, rtol=1e-12, atol=0)
        else:
            assert torch.equal(grad_of(p), before[name])


def test_weight_normalised_layers_keep_the_units_of_what_they_normalise() -> None:
    torch.manual_seed(0)
    layer = nn.ConvTranspose2d(4, 6, 3, groups=2).double()
    layer = nn.utils.parametrizations.weight_norm(layer)
    model = nn.Sequential(layer)
    give_gradients(model)
    report = adaptive_clip_grad_(model, head=None)
    assert report["0.parametrizations.weight.original1"].units == 6
    assert adaptive_clip_grad_(layer, head=None)["parametrizations.weight.original1"].units == 6


def test_embeddings_have_a_unit_a_row_dense_or_sparse() -> None:
    rows = torch.tensor([1, 4, 4, 1, 1, 7])
    for kind in (nn.Embedding, nn.EmbeddingBag):
        torch.manual_seed(0)
        dense = kind(9, 3)
        sparse = kind(9, 3, sparse=True)
        sparse.load_state_dict(dense.state_dict())
        upstream = torch.randn(2, 3, 3) if kind is nn.Embedding else torch.randn(2, 3)
        for layer in (dense, sparse):
            (layer(rows.view(2, 3)) * upstream).sum().backward()
        before = grad_of(dense.weight).clone()
        assert grad_of(sparse.weight).is_sparse
        reports = [adaptive_clip_grad_(x, 0.5, head=None) for x in (dense, sparse)]
        torch.testing.assert_close(
            grad_of(sparse.weight).to_dense(), grad_of(dense.weight), rtol=1e-6, atol=0
        )
        for got, g, w in zip(grad_of(dense.weight), before, dense.weight.detach(), strict=True):
            expected = clipped_unit(g, w, 0.5, 1e-3)
            torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=0)
        assert reports[0]["weight"].clipped == reports[1]["weight"].clipped > 0
        assert (reports[0]["weight"].units, reports[1]["weight"].units) == (9, 3)


def test_every_method_takes_sparse_gradients() -> None:
    rows = torch.tensor([1, 4, 4, 1, 1, 7])
    for method, threshold in METHODS.items():
        grads = []
        for sparse in (False, True):
            torch.manual_seed(0)
            layer = nn.Embedding(9, 3, sparse=sparse)
            (layer(rows) * torch.randn(6, 3)).sum().backward()
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
            clip_grads_before_step(optimizer, head=None, **{method: threshold})  # type: ignore[arg-type]
            optimizer.step()
            grads.append(grad_of(layer.weight).to_dense())
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-6, atol=0)


def test_other_sparse_gradients_are_refused() -> None:
    w = nn.Parameter(torch.ones(3, 3))
    w.grad = torch.eye(3).to_sparse()
    with pytest.raises(ValueError, match="gradient of `0` to be dense, or sparse by rows"):
        adaptive_clip_grad_([w])


# The head -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["auto", "6", "module"])
def test_the_head_is_left_alone(head: str) -> None:
    model = small_net()
    give_gradients(model, spread=0)
    for p in model.parameters():
        grad_of(p).mul_(1e6)
    before = [grad_of(p).clone() for p in model.parameters()]
    report = adaptive_clip_grad_(model, head=model[6] if head == "module" else head)
    changed = [
        not torch.equal(grad_of(p), g) for p, g in zip(model.parameters(), before, strict=True)
    ]
    assert changed == [True] * 6 + [False] * 2
    assert [name for name in report if name.startswith("6.")] == []


def test_the_head_can_be_clipped_too() -> None:
    model = small_net()
    give_gradients(model)
    assert "6.weight" in adaptive_clip_grad_(model, head=None)
    assert "7" not in adaptive_clip_grad_(list(model.parameters()), head=model[6])


def test_without_a_head_the_error_says_what_to_do() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    with pytest.raises(ValueError, match="Pass `head=None` to clip every layer"):
        adaptive_clip_grad_(model)
    with pytest.raises(ValueError, match="Expected a module in which to find `head` 'fc'"):
        adaptive_clip_grad_(model.parameters(), head="fc")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="Expected `module`"):
        clip_grads_before_step(optimizer, agc=0.01)


# The equation -------------------------------------------------------------------------------------

sizes = st.floats(-6, 6).map(lambda x: 10**x)


@given(
    shape=st.lists(st.integers(1, 5), max_size=4),
    weight=sizes,
    grad=sizes,
    clip=st.floats(-3, 1).map(lambda x: 10**x),
    eps=st.sampled_from([0.0, 1e-3, 1.0]),
    seed=st.integers(0, 1000),
)
def test_the_equation(
    shape: list[int], weight: float, grad: float, clip: float, eps: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    w = nn.Parameter(weight * torch.randn(shape, generator=generator, dtype=torch.float64))
    w.grad = grad * torch.randn(shape, generator=generator, dtype=torch.float64)
    before = grad_of(w).clone()
    report = adaptive_clip_grad_([w], clip, eps)["0"]
    units = list(zip(grad_of(w), before, w.detach(), strict=True)) if w.dim() > 1 else []
    units = units or [(grad_of(w), before, w.detach())]
    ratios = []
    for got, g, unit in units:
        expected = clipped_unit(g, unit, clip, eps)
        # Where clip * eps is under 1e-6, timm's floor on |g| may make the result smaller.
        if g.norm() >= 1e-6:
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
        ratios.append(float(g.norm()) / max(float(unit.norm()), eps))
    assert report.units == len(units)
    assert report.largest == pytest.approx(max(ratios), rel=1e-12)
    clear = [r for r in ratios if abs(r / clip - 1) > 1e-12]
    assert len(clear) < len(ratios) or report.clipped == sum(r > clip for r in ratios)


@given(clip=st.sampled_from([1e-3, 0.01, 0.3]), seed=st.integers(0, 1000))
def test_clipping_twice_is_clipping_once(clip: float, seed: int) -> None:
    model = small_net(seed).double()
    give_gradients(model, seed=seed)
    adaptive_clip_grad_(model, clip)
    once = [g.clone() for g in gradients(model)]
    adaptive_clip_grad_(model, clip)
    for g, expected in zip(gradients(model), once, strict=True):
        torch.testing.assert_close(g, expected, rtol=1e-14, atol=0)


def test_infinity_changes_nothing() -> None:
    for method in METHODS:
        model = small_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0)
        handle = clip_grads_before_step(optimizer, model, **{method: math.inf})  # type: ignore[arg-type]
        for size in (1.0, 1e30):  # of which the second makes the norms overflow
            give_gradients(model)
            for g in gradients(model):
                g.mul_(size)
            before = [bits(g) for g in gradients(model)]
            optimizer.step()
            after = [bits(g) for g in gradients(model)]
            assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
            assert handle.last_report[method].clipped == 0
            assert handle.last_report[method].largest > 0


def test_eps_lets_zero_weights_move() -> None:
    for eps, expected in ((1e-3, 0.01 * 1e-3), (0.0, 0.0)):
        w = nn.Parameter(torch.zeros(2, 3))
        w.grad = torch.ones(2, 3)
        adaptive_clip_grad_([w], eps=eps)
        torch.testing.assert_close(grad_of(w).norm(dim=1), torch.full((2,), expected))


@given(max_norm=sizes, grad=sizes, seed=st.integers(0, 1000))
@example(max_norm=1e-8, grad=1e-7, seed=0)
def test_each_tensor_by_its_own_norm(max_norm: float, grad: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parameters = [nn.Parameter(torch.zeros(s).double()) for s in ((), (3,), (2, 3), (2, 1, 4))]
    for p in parameters:
        p.grad = grad * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    before = [grad_of(p).clone() for p in parameters]
    report = clip_grad_norm_per_tensor_(parameters, max_norm)
    for i, (p, g) in enumerate(zip(parameters, before, strict=True)):
        norm = math.sqrt(sum(x * x for x in g.flatten().tolist()))
        expected = max_norm * g / norm if norm > max_norm else g
        torch.testing.assert_close(grad_of(p), expected, rtol=1e-12, atol=0)
        assert report[str(i)].largest == pytest.approx(norm, rel=1e-12)


# Odd arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [0, 0.0, -1, math.nan, -math.inf])
def test_thresholds_out_of_range_are_refused(clip: float) -> None:
    w = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([w], lr=0.1)
    with pytest.raises(ValueError, match="Expected `clip` to be positive"):
        adaptive_clip_grad_([w], clip)
    with pytest.raises(ValueError, match="Expected `max_norm` to be positive"):
        clip_grad_norm_per_tensor_([w], clip)
    for method in METHODS:
        with pytest.raises(ValueError, match=f"Expected `{method}` to be positive"):
            clip_grads_before_step(optimizer, head=None, **{method: clip})  # type: ignore[arg-type]


def test_other_arguments_out_of_range_are_refused() -> None:
    w = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([w], lr=0.1)
    for eps in (-1e-3, math.nan, math.inf):
        with pytest.raises(ValueError, match="Expected `eps` to be finite and at least 0"):
            adaptive_clip_grad_([w], eps=eps)
        with pytest.raises(ValueError, match="Expected `eps` to be finite and at least 0"):
            clip_grads_before_step(optimizer, head=None, agc=0.01, eps=eps)
    for clip in (True, "0.01", None):
        with pytest.raises(TypeError, match="Expected `clip` to be a number"):
            adaptive_clip_grad_([w], clip)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Expected parameters to be tensors, but got tuple"):
        adaptive_clip_grad_(small_net().named_parameters())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Expected `optimizer` to be a torch.optim.Optimizer"):
        clip_grads_before_step([w], norm=1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="one or more thresholds for agc, norm, tensor_norm, value"):
        clip_grads_before_step(optimizer)
    with pytest.raises(TypeError, match="but got `nrom`"):
        clip_grads_before_step(optimizer, nrom=1.0)  # type: ignore[call-arg]


def test_gradients_spread_over_processes_are_refused(tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        w = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Replicate()]))
        w.grad = DTensor.from_local(torch.ones(2, 2), mesh, [Replicate()])
        with pytest.raises(TypeError, match="gradient of `0` to be a whole tensor"):
            adaptive_clip_grad_([w])
    finally:
        torch.distributed.destroy_process_group()


def test_nothing_to_clip() -> None:
    empty = nn.Parameter(torch.zeros(0, 3))
    empty.grad = torch.zeros(0, 3)
    frozen = nn.Parameter(torch.ones(2))
    for parameters in ([], [empty, frozen], (p for p in ()), nn.ReLU()):
        for report in (
            adaptive_clip_grad_(parameters, head=None),
            clip_grad_norm_per_tensor_(parameters, 1.0),
        ):
            assert dict(report) == {}
            assert (report.units, report.clipped, report.largest) == (0, 0, 0.0)
    for method, threshold in METHODS.items():
        optimizer = torch.optim.SGD([empty, frozen], lr=0.1)
        handle = clip_grads_before_step(optimizer, head=None, **{method: threshold})  # type: ignore[arg-type]
        frozen.grad = None
        optimizer.step()
        assert dict(handle.last_report[method]) == {}


def test_one_tensor_and_a_parameter_given_twice() -> None:
    results = []
    for wrap in (lambda p: p, lambda p: [p], lambda p: [p, p]):
        w = nn.Parameter(torch.ones(2, 2))
        w.grad = torch.full((2, 2), 5.0)
        assert len(adaptive_clip_grad_(wrap(w))) == 1
        results.append(grad_of(w))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_tied_weights_are_clipped_once_and_spared_with_the_head() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 3)
            self.body = nn.Linear(3, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embedding.weight

    model = Tied()
    give_gradients(model)
    assert set(adaptive_clip_grad_(model)) == {"body.weight", "body.bias"}
    names = {"embedding.weight", "body.weight", "body.bias"}
    assert set(adaptive_clip_grad_(model, head=None)) == names


def test_mixed_dtypes_are_each_clipped_in_their_own() -> None:
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    mixed = nn.ModuleList(
        nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).to(dtype) for dtype in dtypes
    )
    give_gradients(mixed)
    alone = copy.deepcopy(mixed)
    for p, q in zip(mixed.parameters(), alone.parameters(), strict=True):
        q.grad = grad_of(p).clone()
    adaptive_clip_grad_(mixed, head=None)
    for module in alone:
        adaptive_clip_grad_(module, head=None)
    for p, q in zip(mixed.parameters(), alone.parameters(), strict=True):
        assert grad_of(p).dtype == p.dtype
        assert torch.equal(grad_of(p), grad_of(q))


# timm and optax -----------------------------------------------------------------------------------


def assert_as_timm(
    model: nn.Module,
    timm_agc: Callable[..., None],
    clip: float = 0.01,
    eps: float = 1e-3,
    head: str | None = None,
    bare: bool = False,
) -> None:
    theirs = copy.deepcopy(model)
    for p, q in zip(model.parameters(), theirs.parameters(), strict=True):
        q.grad = torch.empty_like(p).copy_(grad_of(p))
    spared = set() if head is None else set(theirs.get_submodule(head).parameters())
    timm_agc([p for p in theirs.parameters() if p not in spared], clip, eps)
    report = adaptive_clip_grad_(
        list(model.parameters()) if bare else model, clip, eps, head=None if bare else head
    )
    assert 0 < report.clipped < report.units
    for (name, p), q in zip(model.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(bits(grad_of(p)), bits(grad_of(q))), name


LAYERS = {
    "linear": lambda: nn.Linear(7, 5),
    "conv1d": lambda: nn.Conv1d(4, 6, 3),
    "conv2d": lambda: nn.Conv2d(9, 8, 3),
    "conv2d grouped": lambda: nn.Conv2d(6, 4, 3, groups=2),
    "conv3d": lambda: nn.Conv3d(2, 5, 3),
    "embedding": lambda: nn.Embedding(11, 6),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "lstm": lambda: nn.LSTM(4, 3, num_layers=2),
    "bilinear": lambda: nn.Bilinear(3, 4, 5),
    "norms": lambda: nn.Sequential(*(nn.BatchNorm2d(2 + i) for i in range(40))),
    "scalars": lambda: nn.Sequential(*(nn.PReLU() for _ in range(20))),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LAYERS)
def test_bit_for_bit_as_timm(name: str, dtype: torch.dtype, timm_agc, device: torch.device) -> None:
    torch.manual_seed(1)
    for bare in (False, True):
        layer = LAYERS[name]().to(device, dtype)
        give_gradients(layer)
        assert_as_timm(layer, timm_agc, bare=bare)


@given(
    clip=st.floats(-6, 1).map(lambda x: 10**x),
    eps=st.sampled_from([0.0, 1e-6, 1e-3, 1.0]),
    weight=sizes,
    grad=sizes,
    shape=st.lists(st.integers(1, 40), max_size=4),
    seed=st.integers(0, 1000),
)
@example(clip=1e-5, eps=1e-3, weight=0.0, grad=1e-7, shape=[2, 3], seed=0)  # its floor on |g|
def test_bit_for_bit_as_timm_at_any_size(
    clip: float, eps: float, weight: float, grad: float, shape: list[int], seed: int, timm_agc
) -> None:
    generator = torch.Generator().manual_seed(seed)
    w = nn.Parameter(weight * torch.randn(shape, generator=generator))
    v = nn.Parameter(w.detach().clone())
    w.grad = grad * torch.randn(shape, generator=generator)
    v.grad = grad_of(w).clone()
    timm_agc([v], clip, eps)
    adaptive_clip_grad_([w], clip, eps)
    assert torch.equal(grad_of(w), grad_of(v))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_bit_for_bit_as_timm_with_any_threads_and_memory_format(threads: int, timm_agc) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(40, 300, 3), nn.BatchNorm2d(100_000), nn.Linear(70_000, 2), nn.Linear(2, 2)
        )
        give_gradients(model, spread=1)
        assert_as_timm(model, timm_agc)
        model = nn.Sequential(nn.Conv2d(40, 300, 3))
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        give_gradients(model, spread=1)
        assert not gradients(model)[0].is_contiguous()
        assert_as_timm(model, timm_agc)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "name", ["test_resnet", "test_nfnet", "test_vit", "test_convnext", "test_mambaout"]
)
def test_bit_for_bit_as_timm_on_its_models(name: str, timm, timm_agc) -> None:
    torch.manual_seed(0)
    model = timm.create_model(name)
    give_gradients(model)
    (head,) = (n for n, m in model.named_modules() if m is model.get_classifier())
    untouched = [grad_of(p).clone() for p in model.get_classifier().parameters()]
    theirs = copy.deepcopy(model)
    for p, q in zip(model.parameters(), theirs.parameters(), strict=True):
        q.grad = grad_of(p).clone()
    adaptive_clip_grad_(theirs)
    assert_as_timm(model, timm_agc, head=head)
    for p, q in zip(model.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(grad_of(p), grad_of(q))  # the head that is found is timm's
    for p, g in zip(model.get_classifier().parameters(), untouched, strict=True):
        assert torch.equal(grad_of(p), g)


def test_transposed_convolutions_differ_from_timm(timm_agc) -> None:
    torch.manual_seed(0)
    layer = nn.ConvTranspose2d(3, 5, 3)
    give_gradients(layer)
    w = nn.Parameter(layer.weight.detach().clone())
    w.grad = grad_of(layer.weight).clone()
    timm_agc([w])
    adaptive_clip_grad_(layer, head=None)
    assert not torch.allclose(grad_of(w), grad_of(layer.weight))


# Where the axes agree: optax has outputs last, so the layout is permuted there and back.
OPTAX_LAYOUTS = {
    (7, 5): (1, 0),  # linear: (out, in) to (in, out)
    (4, 3, 3, 3): (2, 3, 1, 0),  # conv2d: OIHW to HWIO
    (4, 2, 3, 2, 3): (2, 3, 4, 1, 0),  # conv3d: OIDHW to DHWIO
    (6,): (0,),
    (): (),
}


@pytest.mark.parametrize("shape", OPTAX_LAYOUTS, ids=str)
@pytest.mark.parametrize("grad", [1e-4, 1e-2, 1.0])
def test_as_optax_where_the_axes_agree(shape: tuple[int, ...], grad: float) -> None:
    optax = pytest.importorskip("optax")
    order = OPTAX_LAYOUTS[shape]
    back = [order.index(i) for i in range(len(order))]
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(shape))
    w.grad = grad * torch.randn(shape) * (torch.rand(shape[:1] + (1,) * (len(shape) - 1)) + 0.1)
    clip = optax.adaptive_grad_clip(0.01, 1e-3)
    params = w.detach().permute(order).numpy()
    theirs, _ = clip.update(grad_of(w).permute(order).numpy(), clip.init(params), params)
    adaptive_clip_grad_([w], 0.01, 1e-3)
    expected = torch.tensor(theirs.__array__()).permute(back)
    # The sums of squares are taken in another order, so not bit for bit.
    torch.testing.assert_close(grad_of(w), expected, rtol=1e-6, atol=0)


# Attached to an optimizer -------------------------------------------------------------------------


def by_hand(method: str, model: nn.Module) -> None:
    if method == "agc":
        adaptive_clip_grad_(model, METHODS["agc"])
    elif method == "norm":
        nn.utils.clip_grad_norm_(model.parameters(), METHODS["norm"])
    elif method == "tensor_norm":
        clip_grad_norm_per_tensor_(model.parameters(), METHODS["tensor_norm"])
    else:
        nn.utils.clip_grad_value_(model.parameters(), METHODS["value"])


def train(
    make: Callable[..., torch.optim.Optimizer],
    methods: Iterable[str] = (),
    *,
    hand: Iterable[str] = (),
    scaler: torch.amp.GradScaler | None = None,
    unscale: bool = False,
    steps: int = 5,
    accumulate: int = 1,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """A short training; clipped by the hook with `methods`, or by `hand`."""
    model = small_net().to(dtype)
    optimizer = make(model.parameters())
    if methods:
        thresholds = {method: METHODS[method] for method in methods}
        clip_grads_before_step(optimizer, model, **thresholds)  # type: ignore[arg-type]
    for step in range(steps):
        optimizer.zero_grad()
        for i in range(accumulate):
            loss = small_loss(model, 100 * step + i)
            (loss if scaler is None else scaler.scale(loss)).backward()
        for method in hand:
            by_hand(method, model)
        if scaler is None:
            optimizer.step()
        else:
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    return model


def assert_same(a: nn.Module, b: nn.Module) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(bits(p), bits(q)), name


def sgd(parameters: Iterable[nn.Parameter], fused: bool = False) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=fused)


def adam(parameters: Iterable[nn.Parameter], fused: bool = False) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, fused=fused)


def adamw(parameters: Iterable[nn.Parameter], fused: bool = False) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=fused)


def adagrad(parameters: Iterable[nn.Parameter], fused: bool = False) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.05, fused=fused)


OPTIMIZERS = [sgd, adam, adamw, adagrad]
several = [*([m] for m in METHODS), ["agc", "norm"], ["value", "tensor_norm", "agc", "norm"]]


@pytest.mark.parametrize("methods", several, ids="+".join)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_the_hook_does_what_a_call_before_the_step_does(make, methods: list[str]) -> None:
    hooked = train(make, methods)
    assert_same(hooked, train(make, hand=methods))
    with pytest.raises(AssertionError):
        assert_same(hooked, train(make))


def test_several_methods_act_in_the_order_written() -> None:
    with pytest.raises(AssertionError):
        assert_same(train(sgd, ["agc", "value"]), train(sgd, ["value", "agc"]))


@pytest.mark.parametrize("methods", several, ids="+".join)
def test_gradient_accumulation_clips_once_a_step(methods: list[str]) -> None:
    assert_same(train(sgd, methods, accumulate=3), train(sgd, hand=methods, accumulate=3))


@pytest.mark.parametrize("named", [False, True])
def test_names_without_a_model(named: bool) -> None:
    model = small_net()
    give_gradients(model)
    parameters = list(model.named_parameters()) if named else list(model.parameters())
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)  # type: ignore[arg-type]
    with clip_grads_before_step(optimizer, agc=0.01, head=None) as handle:
        optimizer.step()
    names = list(handle.last_report["agc"])
    if named:
        assert set(names) == {name for name, _ in model.named_parameters()}
    else:
        assert set(names) == {"0.0", "0.1", *(f"1.{i}" for i in range(6))}


def test_the_report_says_what_was_done() -> None:
    w = nn.Parameter(torch.ones(3, 4))
    w.grad = torch.tensor([[0.001] * 4, [1.0] * 4, [2.0] * 4])
    b = nn.Parameter(torch.zeros(3))
    b.grad = torch.tensor([3.0, 0.0, 4.0])
    report = adaptive_clip_grad_([w, b])
    assert report["0"] == LayerClip(3, 2, 2.0)
    assert report["1"][:2] == (1, 1)
    assert report["1"].largest == pytest.approx(5.0 / 1e-3)
    assert (report.units, report.clipped) == (4, 3)
    assert report.largest == pytest.approx(5000)
    assert not report.skipped
    text = "ClipReport(3 of 4 units clipped at 0.01, largest 5e+03, in 2 layers)"
    assert repr(report) == text


def test_the_reports_of_the_other_methods() -> None:
    w = nn.Parameter(torch.ones(3, 4))
    b = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([w, b], lr=0.0)
    for method, expected in (
        ("norm", {"total": LayerClip(1, 1, 13.0)}),
        ("tensor_norm", {"0.0": LayerClip(1, 1, 12.0), "0.1": LayerClip(1, 0, 5.0)}),
        ("value", {"0.0": LayerClip(1, 1, 12.0), "0.1": LayerClip(1, 0, 5.0)}),
    ):
        w.grad = torch.zeros(3, 4)
        grad_of(w)[1, 2] = -12.0
        b.grad = torch.tensor([0.0, 5.0, 0.0])
        with clip_grads_before_step(optimizer, **{method: 6.0}) as handle:  # type: ignore[arg-type]
            optimizer.step()
        assert dict(handle.last_report[method]) == expected
        largest = 6.0 * 12 / 13 if method == "norm" else 6.0
        torch.testing.assert_close(-grad_of(w).min(), torch.tensor(largest), rtol=1e-6, atol=0)


def test_the_report_of_a_unit_without_weight_or_gradient() -> None:
    w = nn.Parameter(torch.zeros(2, 2))
    w.grad = torch.zeros(2, 2)
    assert adaptive_clip_grad_([w], eps=0.0)["0"] == LayerClip(2, 0, 0.0)


def test_a_report_keeps_no_gradient_alive() -> None:
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = clip_grads_before_step(optimizer, model, agc=0.01, norm=1.0, value=1.0)
    give_gradients(model)
    optimizer.step()
    held = {g.untyped_storage().data_ptr() for g in gradients(model)}
    for report in handle.last_report.values():
        for part in report._parts:
            assert part.norms.untyped_storage().data_ptr() not in held
            assert part.floors.untyped_storage().data_ptr() not in held


def test_removing_the_handle_stops_the_clipping() -> None:
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handle = clip_grads_before_step(optimizer, model, value=1e-9)
    give_gradients(model)
    optimizer.step()
    assert max(float(g.abs().max()) for g in gradients(model)) <= 1e-9
    handle.remove()
    handle.remove()
    with clip_grads_before_step(optimizer, model, value=1e-9) as handle:
        pass
    give_gradients(model)
    before = [bits(g) for g in gradients(model)]
    optimizer.step()
    assert all(torch.equal(bits(g), b) for g, b in zip(gradients(model), before, strict=True))
    assert handle.last_report == {}


def test_parameters_added_later_are_clipped() -> None:
    model = small_net()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.0)
    handle = clip_grads_before_step(optimizer, model, agc=0.01)
    optimizer.add_param_group({"params": model[4].parameters()})
    give_gradients(model)
    optimizer.step()
    assert list(handle.last_report["agc"]) == ["0.weight", "0.bias", "4.weight", "4.bias"]


@pytest.mark.parametrize("as_keyword", [False, True])
def test_a_closure_is_clipped_after_it_is_evaluated(as_keyword: bool) -> None:
    models = []
    for hooked in (True, False):
        model = small_net()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
        if hooked:
            clip_grads_before_step(optimizer, model, agc=0.01)

        def closure(
            model: nn.Module = model,
            optimizer: torch.optim.Optimizer = optimizer,
            hooked: bool = hooked,
        ) -> Tensor:
            optimizer.zero_grad()
            loss = small_loss(model, 0)
            loss.backward()
            if not hooked:
                adaptive_clip_grad_(model)
            return loss

        for _ in range(3):
            optimizer.step(closure=closure) if as_keyword else optimizer.step(closure)  # type: ignore[arg-type]
        models.append(model)
    assert_same(*models)


# Under a scaler -----------------------------------------------------------------------------------


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("methods", several, ids="+".join)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_scaler_changes_nothing(make, methods: list[str], fused: bool, unscale: bool) -> None:
    def make_it(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return make(parameters, fused=fused)

    assert hasattr(make_it([nn.Parameter(torch.ones(1))]), "_step_supports_amp_scaling") == fused
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scaled = train(make_it, methods, scaler=scaler, unscale=unscale)
    assert_same(scaled, train(make_it, methods))
    assert scaler.get_scale() == 2.0**12


@pytest.mark.parametrize("methods", several, ids="+".join)
def test_a_scale_that_is_no_power_of_two(methods: list[str]) -> None:
    def fused_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return sgd(parameters, fused=True)

    scaler = torch.amp.GradScaler("cpu", init_scale=1000.3, growth_interval=1000)
    scaled = train(fused_sgd, methods, scaler=scaler, dtype=torch.float64)
    plain = train(fused_sgd, methods, dtype=torch.float64)
    for p, q in zip(scaled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_float16_gradients_at_a_scale_where_their_norm_overflows(method: str) -> None:
    grads = []
    for scale in (1.0, 2.0**14):
        torch.manual_seed(0)
        w = nn.Parameter(torch.randn(4, 64).half())
        optimizer = torch.optim.SGD([w], lr=0.1, fused=True)
        clip_grads_before_step(optimizer, head=None, **{method: METHODS[method]})  # type: ignore[arg-type]
        # Elements up to 2^15.2, rows with norms up to 2^18: past float16's 65504.
        w.grad = (scale * torch.randn(4, 64).clamp(-2.3, 2.3)).half()
        optimizer.grad_scale = torch.tensor(scale)  # type: ignore[attr-defined]
        optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
        hook = next(iter(optimizer._optimizer_step_pre_hooks.values()))
        hook(optimizer, (optimizer,), {})
        grads.append(grad_of(w).double() / scale)
    # At scale 1 the small results are subnormal in float16.
    torch.testing.assert_close(grads[1], grads[0], rtol=2e-3, atol=2**-24)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", ["0.weight", "6.weight"])
@pytest.mark.parametrize("methods", several, ids="+".join)
@pytest.mark.parametrize("fused", [False, True])
def test_non_finite_gradients_are_left_as_they_are(
    fused: bool, methods: list[str], where: str, bad: float
) -> None:
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=4.0)):
        model = small_net()
        optimizer = sgd(model.parameters(), fused=fused)
        handle = clip_grads_before_step(
            optimizer,
            model,
            **{m: METHODS[m] for m in methods},  # type: ignore[arg-type]
        )
        seen = []
        optimizer.register_step_pre_hook(
            lambda *_, seen=seen, model=model: seen.extend(bits(g) for g in gradients(model))
        )
        loss = small_loss(model, 0)
        (loss if scaler is None else scaler.scale(loss)).backward()
        grad_of(model.get_parameter(where)).view(-1)[5] = bad
        before = [bits(g) for g in gradients(model)]
        weights = [bits(p) for p in model.parameters()]
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == 2.0
            for p, w in zip(model.parameters(), weights, strict=True):
                assert torch.equal(bits(p), w)
        if scaler is None or fused:
            assert len(seen) == len(before)
            assert all(torch.equal(a, b) for a, b in zip(seen, before, strict=True))
            assert all(report.skipped for report in handle.last_report.values())
            assert sum(report.clipped for report in handle.last_report.values()) == 0
        else:
            assert seen == []  # the scaler skipped the step, and the hook with it


@pytest.mark.parametrize("method", METHODS)
def test_a_norm_that_overflows_is_not_taken_for_infinity(method: str, device: torch.device) -> None:
    w = nn.Parameter(torch.ones(2, 2, device=device))
    w.grad = torch.tensor([[1e30, -1e30], [1.0, 1.0]], device=device)
    optimizer = torch.optim.SGD([w], lr=0.0)
    handle = clip_grads_before_step(optimizer, head=None, **{method: METHODS[method]})  # type: ignore[arg-type]
    optimizer.step()
    assert not handle.last_report[method].skipped
    assert handle.last_report[method].clipped > 0
    assert float(grad_of(w).abs().max()) <= 1


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_the_functions_leave_non_finite_gradients_too(bad: float, device: torch.device) -> None:
    for clip in (adaptive_clip_grad_, lambda ps: clip_grad_norm_per_tensor_(ps, 0.01)):
        parameters = [nn.Parameter(torch.ones(s, device=device)) for s in ((4, 2), (3,))]
        for p in parameters:
            p.grad = torch.ones_like(p)
        grad_of(parameters[0])[2, 1] = bad
        before = [bits(grad_of(p)) for p in parameters]
        report = clip(parameters)
        assert report.skipped
        assert report.clipped == 0
        assert all(
            torch.equal(bits(grad_of(p)), b) for p, b in zip(parameters, before, strict=True)
        )


def test_what_the_scaler_found_decides() -> None:
    w = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([w], lr=0.1, fused=True)
    handle = clip_grads_before_step(optimizer, norm=1.0)
    for found_inf in (0.0, 1.0):
        w.grad = torch.full((2,), 5.0)
        optimizer.grad_scale = torch.tensor(1.0)  # type: ignore[attr-defined]
        optimizer.found_inf = torch.tensor(found_inf)  # type: ignore[attr-defined]
        optimizer.step()
        assert handle.last_report["norm"].skipped == bool(found_inf)
    assert torch.equal(w.grad, torch.full((2,), 5.0))


def test_an_optimizer_that_takes_the_scaler_itself_is_refused() -> None:
    class Old(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, *, grad_scaler=None):  # type: ignore[override]
            raise AssertionError("not reached")

    w = nn.Parameter(torch.ones(2))
    optimizer = Old([w], lr=0.1)
    clip_grads_before_step(optimizer, norm=1.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(w.sum()).backward()
    with (
        pytest.warns(FutureWarning, match="GradScaler is going to stop passing itself"),
        pytest.raises(RuntimeError, match="scale of its gradients is unknown"),
    ):
        scaler.step(optimizer)


# Accelerators -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("devices", [("cuda:0",), ("cuda:0", "cuda:1")], ids=len)
def test_the_host_never_waits_for_an_accelerator(devices: tuple[str, ...], scaled: bool) -> None:
    # Fake tensors have a device and no values: to read one raises an error.
    with FakeTensorMode(allow_non_fake_inputs=True):
        parameters = []
        for i, shape in enumerate([(), (3,), (4, 3), (4, 3, 3, 3)] * 2):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                device = devices[i % len(devices)]
                p = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
                p.grad = torch.empty(shape, device=device, dtype=dtype)
                parameters.append(p)
        adaptive_clip_grad_(parameters)
        clip_grad_norm_per_tensor_(parameters, 1.0)
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        clip_grads_before_step(optimizer, head=None, agc=0.01, norm=1.0, tensor_norm=1.0, value=1.0)
        if scaled:
            optimizer.grad_scale = torch.empty((), device=devices[0])  # type: ignore[attr-defined]
            optimizer.found_inf = torch.empty((), device=devices[0])  # type: ignore[attr-defined]
        hook = next(iter(optimizer._optimizer_step_pre_hooks.values()))
        hook(optimizer, (optimizer,), {})
        with pytest.raises(Exception, match="_local_scalar_dense"):
            bool(grad_of(parameters[0]))


def test_the_default_device_does_not_matter():
    """Nor when the kernel is compared with PyTorch, which happens at the first call."""
    model = nn.Linear(4, 3)
    model(torch.ones(2, 4)).sum().backward()
    served = norms.serves(torch.ones(1))
    norms._order.cache_clear()
    with torch.device("meta"):
        report = adaptive_clip_grad_(model, 0.01, head=None)
    assert grad_of(model.weight).is_cpu
    assert report.clipped > 0
    assert norms.serves(torch.ones(1)) == served


def test_both_heads_of_a_network_are_spared():
    """As timm's distilled transformers have them."""

    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head, self.head_dist = (nn.Linear(4, 4) for _ in range(3))

        def get_classifier(self) -> tuple[nn.Module, nn.Module]:
            return self.head, self.head_dist

    model = TwoHeads()
    for p in model.parameters():
        p.grad = torch.full_like(p, 100.0)
    adaptive_clip_grad_(model, 0.01)
    clipped = {n: bool((p.grad != 100).all()) for n, p in model.named_parameters()}
    assert [name for name, is_clipped in clipped.items() if is_clipped] == [
        "body.weight",
        "body.bias",
    ]
    with pytest.raises(ValueError, match=r"one head, but got 2 \(head, head_dist\); pass `head`"):
        find_head(model)
    assert find_head(model, "head") is model.head


# Optimizers in wrappers ---------------------------------------------------------------------------


class Unhooked(torch.optim.Optimizer):
    """Does not call ``super().__init__``, so that nothing runs the hooks of its step."""

    def __init__(self, **inner: Any) -> None:
        self._optimizer_step_pre_hooks = OrderedDict()
        self.__dict__.update(inner)
        ((_, wrapped),) = inner.items()
        self.param_groups = wrapped.param_groups
        self.wrapped = lambda: wrapped

    def step(self, closure: Any = None) -> Any:
        return self.wrapped().step(closure)


class Proxy(torch.optim.Optimizer):
    """As accelerate's: has the attributes of an optimizer only through the one inside."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Guise:
    """As Lightning's: takes the class of the optimizer inside."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        kind = type(optimizer)
        self.__class__ = type("Guise" + kind.__name__, (type(self), kind), {})  # type: ignore

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)


class Sharpness(torch.optim.Optimizer):
    """As SAM: a step of its own, then that of the base optimizer with other gradients."""

    def __init__(self, base_optimizer: torch.optim.Optimizer) -> None:
        super().__init__(base_optimizer.param_groups, {})
        self.base_optimizer = base_optimizer

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            p.grad = torch.full_like(p, 100.0)
        return self.base_optimizer.step(closure)


WRAPPERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "optimizer": lambda o: Unhooked(optimizer=o),
    "base_optimizer": lambda o: Unhooked(base_optimizer=o),
    "_optimizer": lambda o: Unhooked(_optimizer=o),
    "_base_optimizer": lambda o: Unhooked(_base_optimizer=o),
    "proxy": Proxy,
    "guise": Guise,
    "sharpness": Sharpness,
    "two": lambda o: Proxy(Unhooked(_base_optimizer=o)),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_optimizer_in_a_wrapper_is_clipped(name: str) -> None:
    w = nn.Parameter(torch.zeros(4))
    optimizer = WRAPPERS[name](torch.optim.SGD([w], lr=1.0))
    with clip_grads_before_step(optimizer, norm=1.0) as handle:
        w.grad = torch.full_like(w, 100.0)
        optimizer.step()
        assert handle.last_report["norm"].clipped == 1
    torch.testing.assert_close(w.detach(), torch.full((4,), -0.5))
    w.grad = torch.full_like(w, 100.0)
    optimizer.step()
    torch.testing.assert_close(w.detach(), torch.full((4,), -100.5))


class Foreign:
    """As apex's and DeepSpeed's: has an optimizer, and is none."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    def zero_grad(self) -> None: ...

    def step(self) -> None: ...


class Overlapped(torch.optim.SGD):
    """As ZeroRedundancyOptimizer, which then steps while the gradients are reduced."""

    _overlap_with_ddp = True


REFUSED: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "Foreign": Foreign,
    "Foreign in": lambda o: Proxy(Foreign(o)),
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 1),
    "ReduceLROnPlateau": torch.optim.lr_scheduler.ReduceLROnPlateau,
    "Unhooked": lambda o: Unhooked(other=o),
    "Overlapped": lambda o: Overlapped(o.param_groups[0]["params"], lr=1.0),
    "GradScaler": lambda o: torch.amp.GradScaler("cpu"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_not_be_clipped_is_refused_by_name(name: str) -> None:
    w = nn.Parameter(torch.zeros(4))
    with pytest.raises(TypeError, match=f"Expected `optimizer` .* but got {name.split()[0]}"):
        clip_grads_before_step(REFUSED[name](torch.optim.SGD([w], lr=1.0)), norm=1.0)


def test_another_model_is_refused() -> None:
    """Its head, and its units, are not those of the parameters that are trained."""
    model = small_net()
    optimizer = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"parameters of `module`, but got none of them"):
        clip_grads_before_step(optimizer, model, agc=0.01)


def test_parts_of_flattened_parameters_are_refused() -> None:
    """As FullyShardedDataParallel marks them: their norms are those of a part."""
    w = nn.Parameter(torch.zeros(4))
    w._fsdp_flattened = True  # type: ignore[attr-defined]
    w.grad = torch.ones(4)
    optimizer = torch.optim.SGD([w], lr=1.0)
    clip_grads_before_step(optimizer, norm=1.0)
    with pytest.raises(TypeError, match="whole tensor, but got a shard"):
        optimizer.step()
