"""Sharded parameters: real processes (gloo) against one process with the whole batch, in float64.

With 2 and 3 processes FSDP2, with 4 FSDP2 over tensor parallelism.
"""

# Sharded modules have DTensors, and methods, that their types do not show.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Processes
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import powergrad
import powergrad.clip
from powergrad.monitor import Recording, census

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed, gloo"
)
CPU = torch.device("cpu")
ALPHA, ROWS, CLASSES, LENGTH = 0.3, 12, 11, 8


class Network(nn.Module):
    """Layers whose units, gains and biases are divisible by neither two nor three."""

    def __init__(self, loss: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Conv2d(1, 5, 3, padding=1), nn.GroupNorm(1, 5), nn.Tanh())
        self.up = nn.ConvTranspose2d(5, 2, 3)
        self.norm = nn.LayerNorm((6, 6))
        self.wide, self.narrow = nn.Linear(72, 8), nn.Linear(8, 7)
        self.loss = loss or powergrad.LinearCrossEntropyLoss(7, CLASSES, alpha=ALPHA, bias=True)
        self.double()

    def hidden(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(self.norm(self.up(self.first(x))).flatten(1)).tanh())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return 40 * self.loss(self.hidden(x), y)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 1, 4, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (ROWS,), generator=generator)


def sharded(model: nn.Module) -> tuple[nn.Module, DeviceMesh]:
    """FSDP2; with four processes, over tensor parallelism. The second is the mesh of the batch."""
    if dist.get_world_size() < 4:
        mesh = data = init_device_mesh("cpu", (dist.get_world_size(),))
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        plan = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], plan)
        data = mesh["data"]
    for part in (model.first, model.up, model.wide, model.loss, model):
        fully_shard(part, mesh=data)  # type: ignore[arg-type]
    return model, data


def part(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    return tensor.chunk(mesh.size())[mesh.get_local_rank()]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def close(ours: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    ours, expected = whole(ours.detach()), expected.detach()
    error = float((ours - expected).abs().max() / expected.abs().max().clamp(min=1))
    assert error <= tolerance, error


def same_weights(ours: nn.Module, expected: nn.Module) -> None:
    for p, q in zip(ours.parameters(), expected.parameters(), strict=True):
        close(p, q)


def train(model: nn.Module, mesh: DeviceMesh | None, folder: Any, **clips: float) -> list[Any]:
    """Twenty steps, recorded; the totals of the last reports."""
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)
    handle = powergrad.clip_grads_before_step(optimizer, model, **clips)  # type: ignore[arg-type]
    with powergrad.FilterMonitor(model, folder, every=5, gradients=True, gains=True) as monitor:
        for step in range(20):
            x, y = batch(step)
            if mesh is not None:
                x, y = part(x, mesh), part(y, mesh)
            optimizer.zero_grad()
            model(x, y).backward()
            optimizer.step()
            monitor.step(step)
    reports = handle.last_report.values()
    return [*map(expected_total, reports)] if mesh is None else [tuple(r.total()) for r in reports]


def expected_total(report: powergrad.clip.ClipReport) -> tuple[int, int, float]:
    """With four processes, there are two meshes of what is not under tensor parallelism."""
    clipped = units = 0
    for name, ratios in report.ratios.items():
        split = name.startswith(("wide", "narrow", "total"))
        meshes = 2 if dist.get_world_size() == 4 and not split else 1
        clipped += meshes * int((ratios > report.threshold).sum())
        units += meshes * len(ratios)
    return clipped, units, float(report.largest)


def trains_like_one_process(folder: Path, **clips: float) -> None:
    one, expected = Network(), None
    model, mesh = sharded(copy.deepcopy(one))
    expected = train(one, None, folder / f"one-{dist.get_rank()}", **clips)
    totals = train(model, mesh, folder / "sharded", **clips)
    same_weights(model, one)
    for (clipped, units, largest), total in zip(expected, totals, strict=True):
        assert total[:2] == (clipped, units)
        assert abs(total[2] - largest) <= 1e-12 * largest
        assert 0 < clipped <= units
    if dist.get_rank() == 0:
        (_, a), (_, b) = Recording(folder / "one-0").load(), Recording(folder / "sharded").load()
        assert a.shape == b.shape
        torch.testing.assert_close(b, a, rtol=1e-6, atol=0, equal_nan=True)  # stored in float32


def agc(folder: Path) -> None:
    trains_like_one_process(folder, agc=0.02)


def other_clipping(folder: Path) -> None:
    trains_like_one_process(folder, tensor_norm=4.0, value=1.0, norm=5.0)


def collectives(folder: Path) -> None:
    """One all-reduce per mesh dimension, and no other communication."""
    model, _ = sharded(Network())
    x, y = batch(0)
    model(x, y).backward()
    model.up.weight.grad = None  # a transposed convolution is gathered
    with CommDebugMode() as sent:
        report = powergrad.adaptive_clip_grad_(model)
    counts = {str(name): count for name, count in sent.get_comm_counts().items() if count}
    assert counts == {"c10d.allreduce_": 2 if dist.get_world_size() == 4 else 1}, counts
    with CommDebugMode() as sent:
        repr((report, report.ratios))
    assert sent.get_total_counts() == 0


def nonfinite(folder: Path) -> None:
    """An infinite gradient in one process keeps all of them from clipping."""
    for clips in ({"agc": 1e-4}, {"norm": 1e-4}, {"value": 1e-4}):
        model, _ = sharded(Network())
        optimizer = SGD(model.parameters(), lr=0.0)
        handle = powergrad.clip_grads_before_step(optimizer, model, **clips)
        x, y = batch(0)
        model(x, y).backward()
        if dist.get_rank() == dist.get_world_size() - 1:
            model.wide.weight.grad.to_local()[0, 0] = torch.inf
        before = [p.grad.to_local().clone() for p in model.parameters()]
        optimizer.step()
        (report,) = handle.last_report.values()
        assert not report.finite
        assert report.total().clipped == 0
        for p, grad in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(p.grad.to_local(), grad, rtol=0, atol=0)


def scaled(folder: Path) -> None:
    """A GradScaler's step is that of one process without it; an overflow in one skips all."""
    one = Network()
    model, mesh = sharded(copy.deepcopy(one))
    optimizers = [SGD(m.parameters(), lr=0.02, momentum=0.9) for m in (one, model)]
    for optimizer, m in zip(optimizers, (one, model), strict=True):
        powergrad.clip_grads_before_step(optimizer, m, agc=0.02, norm=5.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    for step in range(4):
        overflows = step == 2
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(model(*(part(t, mesh) for t in batch(step)))).backward()
        if overflows and dist.get_rank() == dist.get_world_size() - 1:
            model.wide.weight.grad.to_local()[0, 0] = torch.inf
        scaler.unscale_(optimizers[1])
        (found,) = scaler._found_inf_per_device(optimizers[1]).values()
        answers = [torch.zeros(1) for _ in range(dist.get_world_size())]
        dist.all_gather(answers, found.reshape(1))
        if overflows and dist.get_world_size() == 4:
            # PyTorch shares it over the mesh of the first gradient only: see docs/distributed.md.
            assert 0 < sum(answers) < 4
            return
        assert sum(answers) == overflows * len(answers)
        scaler.step(optimizers[1])
        scaler.update()
        assert scaler.get_scale() == (512.0 if step >= 2 else 1024.0)
        if not overflows:
            one(*batch(step)).backward()
            optimizers[0].step()
        same_weights(model, one)


def census_of_shards(folder: Path) -> None:
    """All processes get the census of the whole model, and of its state dict."""
    one = Network()
    with torch.no_grad():
        one.first[0].weight[4] = one.wide.weight[5] = one.narrow.weight[6] = one.first[1].weight[
            2
        ] = 0
        one.up.weight[:, 1] = 0
    model, _ = sharded(copy.deepcopy(one))
    expected = census(one)
    found = census(model)
    assert len(expected.dead) == 5
    assert found.units == expected.units
    assert found.layers == tuple(expected.layers)
    state = {k: v for k, v in model.state_dict().items() if not k.startswith("up")}
    assert {(u.layer, u.unit) for u in census(state).dead} == {
        (u.layer, u.unit) for u in expected.dead if u.layer != "up"
    }


def monitor_refusals(folder: Path) -> None:
    """A folder that cannot be used is an error in every process, not a hang."""
    model, _ = sharded(Network())
    powergrad.FilterMonitor(model, folder / "refused").close()
    with pytest.raises(ValueError, match="holds one"):
        powergrad.FilterMonitor(model, folder / "refused")
    powergrad.FilterMonitor(model, folder / "refused", resume=0).close()


def folding(folder: Path) -> None:
    """`fold_alpha` before and after sharding, `equivalent_training` after it."""
    one = Network()
    before, after = copy.deepcopy(one), copy.deepcopy(one)
    powergrad.fold_alpha("loss.linear", ALPHA, model=one)
    powergrad.fold_alpha("loss.linear", ALPHA, model=before)
    for model in (before, after):
        sharded(model)
    powergrad.fold_alpha("loss.linear", ALPHA, model=after)
    same_weights(before, one)
    same_weights(after, one)


def equivalence(folder: Path) -> None:
    """Plain training of a sharded model, converted after some steps, follows PGT's."""
    model, mesh = sharded(Network())
    pgt, _ = sharded(Network())
    optimizers = [SGD(m.parameters(), lr=0.02, momentum=0.9) for m in (pgt, model)]
    for step in range(10):
        if step == 4:
            optimizers[1] = powergrad.equivalent_training(model, optimizers[1], ALPHA)
            model.loss.alpha = 1.0
        for m, optimizer in zip((pgt, model), optimizers, strict=True):
            optimizer.zero_grad()
            m(*(part(t, mesh) for t in batch(step))).backward()
            optimizer.step()
    for (name, p), q in zip(model.named_parameters(), pgt.parameters(), strict=True):
        close(p, whole(q) * (ALPHA if name.startswith("loss") else 1))


def head_ways(folder: Path) -> None:
    """Every way to a sharded head that is not refused; none of them gathers it by full_tensor()."""
    world, mesh = dist.get_world_size(), init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    x = torch.randn(4 * world, 7, dtype=torch.float64)
    y = torch.randint(CLASSES, (4 * world,))
    y[:world] = -100
    y[0] = 1
    options = {"ignore_index": -100, "label_smoothing": 0.1, "reduction": "sum"}
    loss = powergrad.LinearCrossEntropyLoss(7, CLASSES, alpha=ALPHA, bias=True, **options).double()
    theirs = nn.LinearCrossEntropyLoss(7, CLASSES, bias=True, dtype=torch.float64, **options)
    theirs.load_state_dict(loss.state_dict())
    hidden = x.clone().requires_grad_()
    logits = nn.functional.linear(hidden, loss.linear.weight, loss.linear.bias)
    (
        nn.functional.cross_entropy(ALPHA * logits, y, **options) / ALPHA / world
    ).backward()  # averaged
    expected = [p.grad.clone() for p in loss.parameters()]

    def check(module: nn.Module, gradient: Tensor, factor: float = 1.0) -> None:
        for p, e in zip(module.parameters(), expected, strict=True):
            close(p.grad, factor * e)
            p.grad = None
        close(gradient, world * part(hidden.grad, mesh))

    def inputs() -> tuple[Tensor, Tensor]:
        return part(x, mesh).clone().requires_grad_(), part(y, mesh)

    loss.zero_grad()
    for module in (loss, theirs):
        fully_shard(module, mesh=mesh)
    original = DTensor.full_tensor
    DTensor.full_tensor = None  # type: ignore[assignment]
    results = []
    h, t = inputs()
    loss(h, t).backward()
    results.append((loss, h.grad, 1.0))
    h, t = inputs()
    with powergrad.PowerGrad(ALPHA):
        theirs(h, t).backward()
    results.append((theirs, h.grad, 1.0))
    DTensor.full_tensor = original  # type: ignore[method-assign]
    for result in results:
        check(*result)

    # A head that is used without its forward, in a sharded model whose forward ran.
    head = nn.Linear(7, CLASSES).double()
    model = nn.Identity()
    model.head = head
    fully_shard(head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with torch.no_grad():
        for p, q in zip(head.parameters(), loss.parameters(), strict=True):
            p.copy_(q)
    leaf, t = inputs()
    h = model(leaf)
    call = functools.partial(powergrad.linear_cross_entropy, alpha=ALPHA, **options)
    with pytest.raises(TypeError, match=r"LinearCrossEntropyLoss.*unshard\(\).*full_tensor\(\)"):
        call(h, head.weight, t)
    plain = head.weight.full_tensor()
    rows = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(y, mesh, [Shard(0)])
    with pytest.raises(TypeError, match="got Tensor and DTensor"):
        call(rows[0], plain, rows[1])
    head.unshard()
    call(h, head.weight, t, linear_bias=head.bias).backward()
    check(head, leaf.grad)
    # Both DTensors: the rows of all processes, and so a sum over them instead of an average.
    w, b = (nn.Parameter(p.detach().clone()) for p in loss.parameters())
    h = rows[0].requires_grad_()
    call(h, w, rows[1], linear_bias=b).backward()
    check(nn.ParameterList([w, b]), h.grad.to_local(), float(world))


def older_class(folder: Path, *, use_orig_params: bool = False) -> None:
    """FullyShardedDataParallel is refused by name, also if it keeps the original parameters."""
    layers = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model = FullyShardedDataParallel(layers, use_orig_params=use_orig_params, device_id=CPU)
    model(torch.ones(1, 4)).sum().backward()
    optimizer = SGD(model.parameters(), lr=0.1)
    for call in (
        lambda: powergrad.adaptive_clip_grad_(model.parameters()),
        lambda: powergrad.FilterMonitor(model, folder / "older"),
        lambda: census(model),
        lambda: powergrad.fold_alpha(None, ALPHA, model=model),
        lambda: powergrad.equivalent_training(model, optimizer, ALPHA),
    ):
        with pytest.raises(TypeError, match="FullyShardedDataParallel, the older class"):
            call()
    if not use_orig_params:
        older_class(folder, use_orig_params=True)


def pipeline(folder: Path) -> None:
    """Stages with parameters of their own: one norm, and no clipping if one stage overflows."""
    rank, group = dist.get_rank(), dist.group.WORLD
    torch.manual_seed(0)
    stages = [nn.Linear(3 + i, 2).double() for i in range(dist.get_world_size())]
    grads = [[torch.randn_like(p) for p in stage.parameters()] for stage in stages]

    def step(modules: list[nn.Module], given: list[Any], group: Any) -> Any:
        parameters = [p for module in modules for p in module.parameters()]
        for p, grad in zip(parameters, [g for gs in given for g in gs], strict=True):
            p.grad = grad.clone()
        optimizer = SGD(parameters, lr=0.0)
        handle = powergrad.clip_grads_before_step(optimizer, norm=0.7, group=group)
        optimizer.step()
        return handle.last_report["norm"]

    report = step([stages[rank]], [grads[rank]], group)
    own = [p.grad.clone() for p in stages[rank].parameters()]
    expected = step(stages, grads, None)  # type: ignore[arg-type]
    assert abs(float(report.largest - expected.largest)) < 1e-12
    for p, grad in zip(stages[rank].parameters(), own, strict=True):
        close(grad, p.grad)
    grads[0][0][0, 0] = torch.nan
    report = step([stages[rank]], [grads[rank]], group)
    assert not report.finite
    for p, grad in zip(stages[rank].parameters(), grads[rank], strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=0, atol=0, equal_nan=True)


def verified(folder: Path) -> None:
    """`verify` of a step of AdamW answers for the rows of its process, and all is back."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    torch.manual_seed(dist.get_rank())
    x, y = torch.randn(6, 6, dtype=torch.float64), torch.randint(5, (6,))
    model = DistributedDataParallel(network, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        powergrad.cross_entropy(model(x), y, alpha=ALPHA).backward()
        optimizer.step()

    step()
    before = copy.deepcopy([(p, p.grad) for p in model.parameters()])
    found = powergrad.verify(step, model)
    assert (found.verdict, found.rows) == ("pgt", 6)
    assert found.alpha is not None
    assert abs(found.alpha - ALPHA) <= 1e-5  # small logits, six rows
    for p, (weight, grad) in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close((p, p.grad), (weight, grad), rtol=0, atol=0)
    step()


CASES: list[Callable[[Path], None]] = [
    agc, other_clipping, collectives, nonfinite, scaled, census_of_shards, monitor_refusals,
    folding, equivalence, head_ways, pipeline, older_class, verified,
]  # fmt: skip
WORLDS = {2: CASES, 3: CASES, 4: CASES[:6] + CASES[7:9]}


def run(rank: int, group: Any, case: str, folder: str) -> None:
    globals()[case](Path(folder))


@pytest.fixture(scope="module")
def processes() -> Iterator[Callable[[int], Processes]]:
    """One start of processes, of each number, for all cases."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def start(world: int) -> Processes:
            pool = Processes(world, __name__)
            stack.callback(pool.close)
            return pool

        yield start


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("world", "case"), [(world, c.__name__) for world, cases in WORLDS.items() for c in cases]
)
def test_sharded(
    processes: Callable[[int], Processes], world: int, case: str, tmp_path: Path
) -> None:
    processes(world).run(world, run, case, str(tmp_path))


def test_the_page_lists_every_case_with_its_processes() -> None:
    page = (Path(__file__).parents[1] / "docs" / "distributed.md").read_text("utf-8")
    listed = re.findall(r"\| ([\d, ]+) \| `(\w+)` \|$", page, re.MULTILINE)
    tested = {
        case.__name__: ", ".join(str(world) for world in WORLDS if case in WORLDS[world])
        for case in CASES
    }
    assert {case: processes for processes, case in listed} == tested
