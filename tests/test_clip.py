"""Clipping: against float64 loops and timm, on an optimizer and under a scaler."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from powergrad.clip import (
    ClipHandle,
    adaptive_clip_grad_,
    clip_grads_before_step,
)

METHODS = {"agc": 0.01, "norm": 0.5, "tensor_norm": 0.05, "value": 0.01}
SEVERAL = [*([m] for m in METHODS), ["agc", "norm"], ["value", "tensor_norm", "agc", "norm"]]


def grad_of(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def assert_same(a: Iterable[Tensor], b: Iterable[Tensor]) -> None:
    """Bit for bit, NaN included."""
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def with_grad(grad: Tensor, weight: float = 1.0, **attributes: Any) -> nn.Parameter:
    p = nn.Parameter(torch.full(grad.shape, weight, dtype=grad.dtype, device=grad.device))
    p.grad = grad
    for name, value in attributes.items():
        setattr(p, name, value)
    return p


def give_gradients(module: nn.Module, dim: int = 0) -> None:
    """Random gradients: by turns 10 times under and over the 1% of the weight where AGC begins to
    act, entry by entry along `dim`, and parameter by parameter for vectors and scalars.
    """
    generator = torch.Generator().manual_seed(0)
    for i, p in enumerate(module.parameters()):
        turns = (-1.0) ** (torch.arange(p.shape[dim]) if p.dim() > 1 else torch.tensor(i))
        if p.dim() > 1:
            turns = turns.view([-1 if d == dim else 1 for d in range(p.dim())])
        typical = p.detach().float().square().mean().sqrt().clamp(min=1e-3 / p.numel() ** 0.5)
        grad = 0.01 * typical * 10 ** turns.to(p.device)
        grad = grad * torch.randn(p.shape, generator=generator).to(p.device)
        p.grad = torch.empty_like(p).copy_(grad)


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    convolution = nn.Conv2d(1, 4, 3, padding=1)
    body = [convolution, nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 8)]
    return nn.Sequential(*body, nn.Tanh(), nn.Linear(8, 3))


def small_loss(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(6, 1, 4, 4, generator=generator)
    target = torch.randint(3, (6,), generator=generator)
    return 30 * nn.functional.cross_entropy(model(x), target)


def attach(optimizer: Any, methods: Iterable[str], model: nn.Module | None = None) -> ClipHandle:
    """Clip before each step with the thresholds of METHODS; without a model, also the head."""
    thresholds: Any = {method: METHODS[method] for method in methods}
    return clip_grads_before_step(optimizer, model, head=model and "auto", **thresholds)


def clip_once(parameters: Any, method: str, threshold: float, eps: float = 1e-3) -> Any:
    """The report of one step."""
    optimizer, more = torch.optim.SGD(parameters, lr=0.0), {method: threshold}
    with clip_grads_before_step(optimizer, head=None, eps=eps, **more) as handle:  # type: ignore
        optimizer.step()
    return handle.last_report[method]


def norm_of(x: Tensor) -> float:
    return math.sqrt(sum(value * value for value in x.flatten().tolist()))


def reference(
    method: str, grads: Sequence[Tensor], weights: Sequence[Tensor], threshold: float, eps: float
) -> tuple[list[Tensor], dict[str, list[float]]]:
    """The clipped gradients in float64; by name, what is compared with the threshold."""
    if method == "norm":
        total = math.hypot(*map(norm_of, grads))
        factor = min(1.0, threshold / (total + 1e-6))  # as torch.nn.utils.clip_grad_norm_
        return [factor * g.double() for g in grads], {"total": [total]}
    clipped, values = [], {}
    for i, (g, w) in enumerate(zip(grads, weights, strict=True)):
        if method == "value":
            values[f"0.{i}"] = [float(g.abs().max())]
            clipped.append(g.double().clamp(-threshold, threshold))
            continue
        rows = method == "agc" and w.dim() > 1
        units = list(zip(g, w, strict=True)) if rows else [(g, w)]
        floors = [max(norm_of(w), eps) if method == "agc" else 1.0 for _, w in units]
        values[f"0.{i}"] = [norm_of(u) / to for (u, _), to in zip(units, floors, strict=True)]
        factors = [min(1.0, threshold / ratio) if ratio else 1.0 for ratio in values[f"0.{i}"]]
        parts = [factor * u.double() for factor, (u, _) in zip(factors, units, strict=True)]
        clipped.append(torch.stack(parts) if rows else parts[0])
    return clipped, values


sizes = st.floats(-6, 6).map(lambda x: 10**x) | st.just(0.0)
dtypes = st.sampled_from([torch.float64, torch.float32])


@pytest.mark.parametrize("method", METHODS)
@given(
    shapes=st.lists(
        st.tuples(st.lists(st.integers(1, 5), max_size=4), dtypes), min_size=1, max_size=3
    ),
    weight=sizes,
    grad=sizes,
    threshold=st.floats(-8, 2).map(lambda x: 10**x),
    eps=st.sampled_from([1e-9, 1e-3, 1.0]),
    seed=st.integers(0, 1000),
)
@example([([2, 3], torch.float32)], 0.0, 1e-7, 1e-5, 1e-3, 0)  # where timm clips too much
def test_every_method_follows_its_equation_and_reports_it(
    method, shapes, weight, grad, threshold, eps, seed
) -> None:
    # In float32 a norm sums up to 625 squares.
    rtol = 1e-12 if all(dtype is torch.float64 for _, dtype in shapes) else 2e-6
    generator = torch.Generator().manual_seed(seed)
    parameters = []
    for shape, dtype in shapes:
        w, g = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        parameters.append(nn.Parameter((weight * w).to(dtype)))
        parameters[-1].grad = (grad * g).to(dtype)
    before = [grad_of(p).clone() for p in parameters]
    report = clip_once(parameters, method, threshold, eps)
    expected, values = reference(method, before, [p.detach() for p in parameters], threshold, eps)
    for p, wanted in zip(parameters, expected, strict=True):
        torch.testing.assert_close(grad_of(p).double(), wanted, rtol=rtol, atol=0)
    once = [grad_of(p).clone() for p in parameters]
    clip_once(parameters, method, threshold, eps)
    if method != "norm":  # clip_grad_norm_ adds 1e-6 to the norm
        for p, g in zip(parameters, once, strict=True):  # twice is once
            torch.testing.assert_close(grad_of(p), g, rtol=rtol, atol=0)
    assert sorted(report.ratios) == sorted(values)
    for name, ratios in values.items():
        assert report.ratios[name].tolist() == pytest.approx(ratios, rel=rtol, abs=0)
    every = [ratio for ratios in values.values() for ratio in ratios]
    assert (report.threshold, report.units) == (threshold, len(every))
    assert float(report.largest) == pytest.approx(max(every), rel=rtol, abs=0)
    if all(abs(ratio / threshold - 1) > rtol for ratio in every):
        assert report.clipped == sum(ratio > threshold for ratio in every)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("infinite", [False, True])
def test_norms_that_overflow_and_infinite_thresholds(method, infinite, device) -> None:
    before = torch.tensor([[1e30, -1e30], [1.0, 1.0]], device=device)
    w = with_grad(before.clone())
    report = clip_once([w], method, math.inf if infinite else METHODS[method])
    assert report.finite
    assert report.largest > 0
    assert (report.clipped == 0) == infinite
    assert torch.equal(grad_of(w), before) if infinite else float(grad_of(w).abs().max()) <= 1


def test_without_eps_weights_at_zero_do_not_change() -> None:
    w = with_grad(torch.tensor([[1e6, 1.0], [0.0, 0.0]]), weight=0.0)
    assert clip_once([w], "agc", 0.01, eps=0.0).clipped == 1
    assert float(grad_of(w).abs().max()) < 1e-37


OUTPUTS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 4), (3, 5)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3), (2, 4, 7)),
    "conv2d": (lambda: nn.Conv2d(3, 4, (3, 2)), (1, 3, 5, 5)),
    "conv2d depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4), (1, 4, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (1, 2, 3, 3, 3)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(3, 5, 3), (1, 3, 4)),
    "transposed 2d grouped": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), (1, 4, 3, 3)),
    "transposed 3d grouped": (lambda: nn.ConvTranspose3d(6, 6, 2, groups=3), (1, 6, 2, 2, 2)),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_unit_is_what_one_output_depends_on(name: str) -> None:
    """By differentiation: which entries of the weight each output channel depends on."""
    make, shape = OUTPUTS[name]
    torch.manual_seed(0)
    layer = make().double()
    weight = layer.get_parameter("weight")
    outputs = layer(torch.ones(shape).double()).movedim(-1 if name == "linear" else 1, 0)
    masks = [torch.autograd.grad(y.sum(), weight, retain_graph=True)[0] != 0 for y in outputs]
    assert torch.stack(masks).sum(0).eq(1).all()  # each entry of the weight is in one unit
    give_gradients(layer, dim=1 if "transposed" in name else 0)
    before = grad_of(weight).clone()
    report = adaptive_clip_grad_(layer, head=None)
    for mask in masks:
        (expected,), _ = reference("agc", [before[mask]], [weight.detach()[mask]], 0.01, 1e-3)
        torch.testing.assert_close(grad_of(weight)[mask], expected, rtol=1e-12, atol=0)
    assert len(report.ratios["weight"]) == len(masks)
    assert 0 < (report.ratios["weight"] > 0.01).sum() < len(masks)


class AdaptiveNorm(nn.LayerNorm):
    """Has a layer inside, whose units are its own."""

    def __init__(self) -> None:
        super().__init__(4)
        self.shift = nn.Linear(3, 4)


def weight_normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.ConvTranspose2d(4, 6, 3, groups=2))


@pytest.mark.parametrize(
    ("make", "units"),
    [
        (
            lambda: nn.MultiheadAttention(6, 2, add_bias_kv=True),
            {"in_proj_weight": 18, "in_proj_bias": 1, "out_proj.weight": 6, "bias_k": 1},
        ),
        (lambda: nn.BatchNorm1d(5), {"weight": 1, "bias": 1}),
        (lambda: nn.LayerNorm([2, 3]), {"weight": 1, "bias": 1}),
        (lambda: nn.RMSNorm([2, 3]), {"weight": 1}),
        (AdaptiveNorm, {"weight": 1, "shift.weight": 4}),
        (lambda: nn.ParameterDict({"t": torch.tensor(2.0)}), {"t": 1}),
        (weight_normed, {"parametrizations.weight.original1": 6}),
        (lambda: nn.Sequential(weight_normed()), {"0.parametrizations.weight.original1": 6}),
    ],
)
def test_units_of_other_parameters(make, units) -> None:
    module = make()
    give_gradients(module)
    report = adaptive_clip_grad_(module, head=None)
    assert {name: len(report.ratios[name]) for name in units} == units


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_clipped_as_dense_ones(kind: Any, method: str) -> None:
    rows = torch.tensor([[1, 4, 4], [1, 1, 7]])
    grads, reports = [], []
    for sparse in (False, True):
        torch.manual_seed(0)
        layer = kind(9, 3, sparse=sparse)
        output = layer(rows)
        (output * torch.randn(output.shape)).sum().backward()
        assert grad_of(layer.weight).is_sparse == sparse
        reports.append(clip_once(layer.parameters(), method, METHODS[method]))
        grads.append(grad_of(layer.weight).to_dense())
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-6, atol=0)
    assert reports[0].clipped == reports[1].clipped > 0
    assert [report.units for report in reports] == ([9, 3] if method == "agc" else [1, 1])


def two_heads() -> nn.Module:
    """As timm's distilled transformers."""
    model: Any = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("body", "head", "head_dist")})
    model.get_classifier = lambda: (model["head"], model["head_dist"])
    return model


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False))
    model[2].weight = model[0].get_parameter("weight")
    return model


@pytest.mark.parametrize(
    ("make", "source_and_head", "clipped"),
    [
        (small_net, lambda m: (m, "auto"), "0 1 4"),
        (small_net, lambda m: (m, "6"), "0 1 4"),
        (small_net, lambda m: (m, m[6]), "0 1 4"),
        (small_net, lambda m: (m.parameters(), m[6]), "0 1 4"),
        (small_net, lambda m: (m, None), "0 1 4 6"),
        (two_heads, lambda m: (m, "auto"), "body"),
        (tied, lambda m: (m, "auto"), "1"),
        (tied, lambda m: (m, None), "0 1"),
    ],
)
def test_head_is_not_clipped(make, source_and_head, clipped) -> None:
    model = make()
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e6)
    source, head = source_and_head(model)
    report = adaptive_clip_grad_(source, head=head)
    changed = {n for n, p in model.named_parameters() if not (grad_of(p) == 1e6).all()}
    assert {name.rpartition(".")[0] for name in changed} == set(clipped.split())
    assert len(report.ratios) == len(changed)


def test_reports_on_nothing_are_empty() -> None:
    empty, frozen = with_grad(torch.zeros(0, 3)), nn.Parameter(torch.ones(2))
    reports = [clip_once([empty, frozen], method, 1.0) for method in METHODS]
    for parameters in ([], [empty, frozen], (p for p in ()), nn.ReLU()):
        reports.append(adaptive_clip_grad_(parameters, head=None))
    for report in reports:
        assert report.ratios == {}
        assert (report.units, report.clipped, report.largest) == (0, 0, 0.0)


def test_parameter_given_twice_is_clipped_once() -> None:
    for wrap in (lambda p: p, lambda p: [p], lambda p: [p, p]):
        w = with_grad(torch.full((2, 2), 5.0))
        assert adaptive_clip_grad_(wrap(w)).units == 2
        torch.testing.assert_close(grad_of(w), torch.full((2, 2), 0.01))


W = nn.Parameter(torch.ones(2))
OPTIMIZER = torch.optim.SGD([W], lr=0.1)
FLATTENED = with_grad(torch.ones(4), _fsdp_flattened=True)
HEADLESS = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))


def attach_any(**options: Any) -> ClipHandle:
    return clip_grads_before_step(OPTIMIZER, head=None, **options)


BAD: list[Any] = [0, -1, math.nan, -math.inf]


@pytest.mark.parametrize(
    ("error", "word", "call"),
    [
        *((ValueError, f"`{m}`", lambda m=m: attach_any(**{m: -1})) for m in METHODS),
        *((ValueError, "`clip`", lambda t=t: adaptive_clip_grad_([W], t)) for t in BAD),
        (ValueError, "`eps`", lambda: adaptive_clip_grad_([W], eps=-1e-3)),
        (ValueError, "`eps`", lambda: attach_any(norm=1.0, eps=math.inf)),
        (TypeError, "`clip`", lambda: adaptive_clip_grad_([W], "0.01")),  # type: ignore
        (TypeError, "tuple", lambda: adaptive_clip_grad_(small_net().named_parameters())),  # type: ignore[arg-type]
        (ValueError, "sparse", lambda: adaptive_clip_grad_(with_grad(torch.eye(3).to_sparse()))),
        (TypeError, "FullyShardedDataParallel", lambda: adaptive_clip_grad_(FLATTENED)),
        (ValueError, "`head=None`", lambda: adaptive_clip_grad_(HEADLESS)),
        (ValueError, "`head`", lambda: adaptive_clip_grad_(HEADLESS.parameters(), head="fc")),
        (ValueError, "`module`", lambda: clip_grads_before_step(OPTIMIZER, agc=0.01)),
        (ValueError, "`module`", lambda: clip_grads_before_step(OPTIMIZER, small_net(), agc=0.01)),
        (TypeError, "thresholds", lambda: attach_any()),
        (TypeError, "`nrom`", lambda: attach_any(nrom=1.0)),
    ],
)
def test_bad_arguments_raise(error: type[Exception], word: str, call: Callable[[], object]) -> None:
    with pytest.raises(error, match=word):
        call()


LAYERS: dict[str, Callable[[], nn.Module]] = {
    **{name: make for name, (make, _) in OUTPUTS.items() if "transposed" not in name},
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "bilinear": lambda: nn.Bilinear(3, 4, 5),
    "scalars": lambda: nn.Sequential(*(nn.PReLU() for _ in range(20))),
    "large": lambda: nn.Sequential(nn.Conv2d(40, 99, 3), nn.Linear(70_000, 2)),
    "channels last": lambda: nn.Conv2d(40, 99, 3).to(memory_format=torch.channels_last),  # type: ignore
}


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_clipped_as_by_timm(name: str, timm, device: torch.device) -> None:
    """Bit for bit, but in half precision, where our norms are float32."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        torch.manual_seed(1)
        layer = LAYERS[name]().to(device, dtype)
        bare, theirs = copy.deepcopy(layer), copy.deepcopy(layer)
        for model in (layer, bare, theirs):
            give_gradients(model)
        before = [g.clone() for g in gradients(theirs)]
        timm.utils.adaptive_clip_grad(theirs.parameters(), 0.01, 1e-3)
        adaptive_clip_grad_(layer, head=None)
        adaptive_clip_grad_(bare.parameters())
        assert_same(gradients(bare), gradients(layer))
        half = dtype.itemsize == 2
        for ours, other in zip(gradients(layer), gradients(theirs), strict=True):
            torch.testing.assert_close(ours, other, rtol=2e-2 * half, atol=1e-7 * half)
        assert not all(map(torch.equal, gradients(theirs), before))


@torch.no_grad()
def clip_each(model: nn.Module, threshold: float) -> None:
    for g in gradients(model):
        g *= torch.clamp(torch.tensor(threshold) / g.norm(), max=1)


BY_HAND: dict[str, Callable[[nn.Module], object]] = {
    "agc": lambda model: adaptive_clip_grad_(model, METHODS["agc"]),
    "norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), METHODS["norm"]),
    "tensor_norm": lambda model: clip_each(model, METHODS["tensor_norm"]),
    "value": lambda model: nn.utils.clip_grad_value_(model.parameters(), METHODS["value"]),
}


def train(fused: bool, methods=(), hand=(), scale=0.0, unscale=False) -> list[Tensor]:
    """A short training with two backward passes per step, clipped by the hook or by `hand`."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2, enabled=scale > 0)
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=fused)
    if methods:
        attach(optimizer, methods, model)
    for step in range(4):
        optimizer.zero_grad()
        for part in range(2):
            scaler.scale(small_loss(model, 2 * step + part)).backward()
        for method in hand:
            BY_HAND[method](model)
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == (4 * scale or 1)  # no step was skipped
    return list(model.parameters())


@pytest.mark.parametrize(("scale", "unscale"), [(0.0, False), (1024.0, False), (1024.0, True)])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("methods", SEVERAL, ids="+".join)
def test_hook_does_what_a_call_before_the_step_does(methods, fused, scale, unscale) -> None:
    hooked = train(fused, methods, scale=scale, unscale=unscale)
    assert_same(hooked, train(fused, hand=methods))
    with pytest.raises(AssertionError):
        assert_same(hooked, train(fused))


def run_hook(optimizer: Any, scale: Any = None, found_inf: Any = None, **kwargs: Any) -> None:
    """What the hook does in a step of a fused optimizer under a scaler, without the step."""
    if scale is not None:
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(found_inf)
    hook = list(optimizer._optimizer_step_pre_hooks.values())[-1]
    hook(optimizer, (optimizer,), kwargs)


@pytest.mark.parametrize("method", METHODS)
def test_float16_gradients_at_a_scale_where_their_norm_overflows(method: str) -> None:
    grads = []
    for scale in (1.0, 2.0**14):
        torch.manual_seed(0)
        # Elements up to 2^15.2, rows with norms up to 2^18: past float16's 65504.
        w = nn.Parameter(torch.randn(4, 64).half())
        w.grad = (scale * torch.randn(4, 64).clamp(-2.3, 2.3)).half()
        optimizer = torch.optim.SGD([w], lr=0.1, fused=True)
        attach(optimizer, [method])
        run_hook(optimizer, scale, 0.0)
        grads.append(grad_of(w).double() / scale)
    # At scale 1 the small results are subnormal in float16.
    torch.testing.assert_close(grads[1], grads[0], rtol=2e-3, atol=2**-24)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("where", ["0.weight", "6.weight"])  # a filter, and the head
@pytest.mark.parametrize("methods", SEVERAL, ids="+".join)
@pytest.mark.parametrize("scaled", [False, True])
def test_non_finite_gradients_are_left_as_they_are(scaled, methods, where, bad) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaled)
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=scaled)
    handle = attach(optimizer, methods, model)
    seen: list[Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(g.clone() for g in gradients(model)))
    scaler.scale(small_loss(model, 0)).backward()
    grad_of(model.get_parameter(where)).view(-1)[5] = bad
    before = [g.clone() for g in gradients(model)]
    scaler.step(optimizer)
    assert_same(seen, before)
    assert not any(report.finite for report in handle.last_report.values())
    assert sum(report.clipped for report in handle.last_report.values()) == 0


def test_found_inf_of_the_scaler_decides() -> None:
    w = with_grad(torch.full((2,), 5.0))
    optimizer = torch.optim.SGD([w], lr=0.1, fused=True)
    handle = clip_grads_before_step(optimizer, norm=1.0)
    run_hook(optimizer, 1.0, 1.0)
    assert not handle.last_report["norm"].finite
    assert torch.equal(grad_of(w), torch.full((2,), 5.0))
    run_hook(optimizer, 1.0, 0.0)
    assert handle.last_report["norm"].finite


def test_total_norm_that_stands_for_no_clipping() -> None:
    """Where a non-finite norm is not read, -1e-6 is put in its place; PyTorch adds 1e-6 to it."""
    for dtype in (torch.float32, torch.float64):
        w = with_grad(torch.full((2,), 5.0))
        nn.utils.clip_grads_with_norm_([w], 1e-9, torch.tensor(-1e-6, dtype=dtype))
        assert torch.equal(grad_of(w), torch.full((2,), 5.0))


def test_optimizer_that_takes_the_scaler_itself_raises() -> None:
    with attach_any(norm=1.0), pytest.raises(RuntimeError, match="`grad_scaler`"):
        run_hook(OPTIMIZER, grad_scaler=torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize("as_keyword", [False, True])
def test_closure_is_clipped_after_it_is_evaluated(as_keyword: bool) -> None:
    w = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([w], lr=1.0)

    def closure() -> Tensor:
        w.grad = torch.full((4,), 100.0)
        return torch.tensor(7.0)

    with clip_grads_before_step(optimizer, norm=1.0):
        call: Any = {"closure": closure} if as_keyword else closure
        loss = optimizer.step(**call) if as_keyword else optimizer.step(call)
    assert loss == 7
    torch.testing.assert_close(w.detach(), torch.full((4,), -0.5))


@pytest.mark.parametrize("named", [False, True])
def test_names_without_a_model(named: bool) -> None:
    model = small_net()
    give_gradients(model)
    parameters: Any = list(model.named_parameters() if named else model.parameters())
    optimizer = torch.optim.SGD(parameters[:2], lr=0.1)
    handle = attach(optimizer, ["agc"])
    optimizer.add_param_group({"params": parameters[2:]})  # is clipped, too
    optimizer.step()
    numbers = ["0.0", "0.1", *(f"1.{i}" for i in range(6))]
    assert list(handle.last_report["agc"].ratios) == (list(dict(parameters)) if named else numbers)


def test_parameters_of_one_name_are_clipped_each_by_its_own_norm() -> None:
    """The model's "0.0" and the optimizer's first parameter, which is not in the model."""
    w, alone = with_grad(torch.ones(2, 2)), with_grad(torch.full((3,), 100.0))
    model = nn.Sequential(nn.ParameterList([w]))
    optimizer = torch.optim.SGD([alone, w], lr=0.1)
    handle = clip_grads_before_step(optimizer, model, head=None, tensor_norm=1.0)
    run_hook(optimizer)
    assert handle.last_report["tensor_norm"].units == 2
    assert [float(grad_of(p).norm()) for p in (w, alone)] == pytest.approx([1, 1])


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("devices", [("cuda:0",), ("cuda:0", "cuda:1")], ids=len)
def test_host_never_waits_for_an_accelerator(devices: tuple[str, ...], scaled: bool) -> None:
    # Fake tensors have a device and no values: to read one raises an error.
    with FakeTensorMode(allow_non_fake_inputs=True):
        parameters = []
        for i, shape in enumerate([(), (3,), (4, 3), (4, 3, 3, 3)] * 2):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                device = devices[i % len(devices)]
                grad = torch.empty(shape, device=device, dtype=dtype)
                parameters.append(with_grad(grad))
        adaptive_clip_grad_(parameters)
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        handle = attach(optimizer, METHODS)
        if scaled:
            optimizer.grad_scale = optimizer.found_inf = torch.empty((), device=devices[0])  # type: ignore
        run_hook(optimizer)
        counts = [x for r in handle.last_report.values() for x in (r.clipped, r.largest)]
        for value in (*counts, grad_of(parameters[0])):
            with pytest.raises(Exception, match="_local_scalar_dense"):
                bool(value)


def test_default_device_does_not_matter() -> None:
    model = nn.Linear(4, 3)
    give_gradients(model)
    with torch.device("meta"):
        report = adaptive_clip_grad_(model, 0.01, head=None)
        assert adaptive_clip_grad_([]).units == 0
    assert grad_of(model.weight).is_cpu
    assert report.clipped > 0


class Unhooked(torch.optim.Optimizer):
    """Does not call ``super().__init__``, so that nothing runs the hooks of its step."""

    def __init__(self, **inner: Any) -> None:
        self._optimizer_step_pre_hooks = OrderedDict()
        self.__dict__.update(inner)
        ((_, wrapped),) = inner.items()
        self.param_groups, self.step = wrapped.param_groups, wrapped.step


def hooked(inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """As SAM: runs hooks before a step of its own, after which the gradients are others."""
    outer: Any = torch.optim.SGD(inner.param_groups, lr=0.0)
    outer.base_optimizer, outer.step = inner, inner.step
    return outer


NAMES = ("optimizer", "base_optimizer", "_optimizer", "_base_optimizer")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda o: o,
        *(lambda o, name=name: Unhooked(**{name: o}) for name in NAMES),
        hooked,
        lambda o: Unhooked(optimizer=Unhooked(_base_optimizer=o)),
    ],
)
def test_inner_optimizer_is_clipped_until_the_handle_is_removed(wrap: Any) -> None:
    w = with_grad(torch.full((4,), 100.0), weight=0.0)
    optimizer = wrap(torch.optim.SGD([w], lr=1.0))
    with clip_grads_before_step(optimizer, norm=1.0) as handle:
        optimizer.step()
        assert handle.last_report["norm"].clipped == 1
    torch.testing.assert_close(w.detach(), torch.full((4,), -0.5))
    handle.remove()  # twice is once
    w.grad = torch.full_like(w, 100.0)
    optimizer.step()
    torch.testing.assert_close(w.detach(), torch.full((4,), -100.5))


def foreign(inner: torch.optim.Optimizer) -> Any:
    """As apex's and DeepSpeed's: has an optimizer, and is none."""
    return SimpleNamespace(optimizer=inner, param_groups=inner.param_groups, step=inner.step)


class Overlapped(torch.optim.SGD):
    """As ZeroRedundancyOptimizer, which then steps while the gradients are reduced."""

    _overlap_with_ddp = True


REFUSED: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "list": lambda o: [o],
    "SimpleNamespace": lambda o: Unhooked(optimizer=foreign(o)),
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 1),
    "Unhooked": lambda o: Unhooked(other=o),
    "Overlapped": lambda o: Overlapped(o.param_groups[0]["params"], lr=1.0),
    "GradScaler": lambda o: torch.amp.GradScaler("cpu"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_not_be_clipped_raises(name: str) -> None:
    with pytest.raises(TypeError, match=f"`optimizer`.* {name}"):
        clip_grads_before_step(REFUSED[name](torch.optim.SGD([W], lr=1.0)), norm=1.0)
