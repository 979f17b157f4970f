"""Losses of classes that are split over processes: as one process computes them, or an error."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import Case, Form, build, check_gradient, check_value
from processes import Processes
from references import gradient_of_potential
from torch import Tensor
from torch.distributed import tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import loss_parallel
from torch.distributed.tensor.parallel.loss import _disable_custom_loss_ops

import powergrad
from benchmarks.harness import peak_bytes
from powergrad import parallel

CASES = 300
distribute_tensor: Any = tensor.distribute_tensor
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo"),
]


@functools.cache
def square() -> Any:
    return init_device_mesh("cpu", (2, 2))


def ready(rank: int, group: Any) -> None:
    square()


@pytest.fixture(scope="module")
def processes():
    pool = Processes(4, __name__)
    pool.run(4, ready)
    yield pool
    pool.close()


def random_form(draw: random.Random, shape: tuple[int, ...]) -> Form:
    """A possible combination of options for logits of this shape."""
    while True:
        form = Form(
            shape=shape,
            dtype=draw.choice(
                [torch.float64] * 4 + [torch.float32] * 2 + [torch.half, torch.bfloat16]
            ),
            target=draw.choice(["labels", "labels", "bytes", "probabilities"]),
            alpha=draw.choice([0.0, 0.05, 0.3, 0.999, 2.0]),
            alphas=draw.choice(["number", "number", "0-d", "example", "position"]),
            weight=draw.choice(["", "", "random"]),
            ignore_index=draw.choice([None, -100, 0]),
            reduction=draw.choice(["mean", "sum", "none"]),
            label_smoothing=draw.choice([0.0, 0.0, 0.1, 1.0]),
            masked=draw.random() < 0.2,
            spread=draw.choice([0.1, 3.0, 60.0]),
            offset=draw.choice([0.0, 0.0, -100.0]),
            softcap=draw.choice([None, None, 5.0]),
            logit_scale=draw.choice([1.0, 1.0, 0.5]),
            z_loss=draw.choice([0.0, 0.0, 0.1]),
            tokens=draw.random() < 0.3,
            seed=draw.randrange(2**32),
        )
        if form.possible:
            return form


def random_case(seed: int) -> tuple[Case, list[int]]:
    """A call with random options, and where three parts of its classes end."""
    draw = random.Random(seed)
    c, n, d = draw.choice([1, 2, 3, 7, 40, 127]), draw.randint(1, 6), draw.randint(1, 4)
    shape = draw.choice([(c,), (n, c), (n, c), (n, c), (n, c, d)])
    inner = sorted(draw.randint(0, c) for _ in range(2))
    return build(random_form(draw, shape)), [0, *inner, c]


def part(case: Any, first: int, last: int) -> Tensor:
    return case.logits.narrow(case.class_dim, first, last - first).clone().requires_grad_()


def random_parts(rank: int, group: Any, seeds: range) -> list[tuple[Tensor, Tensor]]:
    found = []
    size = dist.get_world_size(group)
    for seed in seeds:
        case, ends = random_case(seed)
        ends = ends if size == 3 else [ends[0], ends[1], ends[3]]
        first, last = ends[rank], ends[rank + 1]
        z = part(case, first, last)
        target = case.target
        if target.is_floating_point():
            target = target.narrow(case.class_dim, first, last - first)
        classes = case.logits.shape[case.class_dim]
        loss = parallel.cross_entropy(
            z,
            target,
            alpha=case.alpha,
            classes=classes,
            first_class=first,
            group=group,
            **case.options,
            **case.extra,
        )
        loss.backward(case.upstream)
        found.append((loss.detach(), z.grad))
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_random_parts(processes, size):
    found = processes.run(size, random_parts, range(CASES))
    for seed, answers in enumerate(zip(*found, strict=True)):
        case, _ = random_case(seed)
        for value, _ in answers:
            assert torch.equal(value, answers[0][0]) or value.isnan().all()
        check_value(case, answers[0][0])
        check_gradient(case, torch.cat([grad for _, grad in answers], case.class_dim))


PLACEMENTS = [Replicate(), Shard(0), Shard(1)]
PAIRS = [(a, b) for a in PLACEMENTS for b in PLACEMENTS if (a, b) != (Shard(1), Shard(1))]


def on_a_mesh(rank: int, group: Any, pair: Any, inside: bool) -> None:
    for seed in range(25):
        case, _ = random_case(1000 * PAIRS.index(pair) + seed)
        if case.logits.dim() < 2:
            continue
        z = distribute_tensor(case.logits, square(), pair).requires_grad_()
        with loss_parallel() if inside else contextlib.nullcontext():
            loss: Any = powergrad.cross_entropy(
                z, case.target, alpha=case.alpha, **case.options, **case.extra
            )
            loss.backward(distribute_tensor(case.upstream, square(), [Replicate()] * 2))
        check_value(case, loss.full_tensor())
        check_gradient(case, z.grad.full_tensor())


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_every_placement_on_a_mesh(processes, pair, inside):
    processes.run(4, on_a_mesh, pair, inside)


# Other ways to ask for it -------------------------------------------------------------------------

ALPHA = 0.3


def line(group: Any) -> Any:
    """The mesh of a group."""
    return DeviceMesh.from_group(group, "cpu")


def split_logits(group: Any, rows: int, classes: int) -> tuple[Any, Any, Any]:
    g = torch.Generator().manual_seed(classes)
    z = 3 * torch.randn(rows, classes, generator=g, dtype=torch.float64)
    y = torch.randint(classes, (rows,), generator=g)
    return z, y, distribute_tensor(z, line(group), [Shard(1)]).requires_grad_()


def focal(log_p: Tensor) -> Tensor:
    """A loss that is not linear in log p, so that only the definition says its gradient."""
    return ((1 - log_p.exp()) ** 2 * log_p / torch.arange(1.0, 1 + log_p.shape[1])).sum()


WAYS = {
    "function": lambda z, y: powergrad.cross_entropy(z, y, alpha=ALPHA),
    "module": lambda z, y: powergrad.CrossEntropyLoss(ALPHA)(z, y),
    "log_softmax": lambda z, y: F.nll_loss(powergrad.log_softmax(z, 1, alpha=ALPHA), y),
}


def by_each_way(rank: int, group: Any, classes: int) -> None:
    z, y, _ = split_logits(group, 5, classes)
    p = (ALPHA * z).softmax(1)
    expected = (p - F.one_hot(y, classes)) / 5

    def check(loss: Any, inside: bool = False) -> None:
        x = split_logits(group, 5, classes)[2]
        with loss_parallel() if inside else contextlib.nullcontext():
            value = loss(x, distribute_tensor(y, line(group), [Replicate()]))
            value.backward()
        torch.testing.assert_close(x.grad.full_tensor(), expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(value.full_tensor(), F.cross_entropy(z, y), rtol=0, atol=1e-12)

    def by_context(x: Any, y: Any) -> Any:
        with powergrad.PowerGrad(ALPHA, strict=True):
            return F.cross_entropy(x, y)

    for name, way in {**WAYS, "PowerGrad": by_context}.items():
        check(way)
        if name != "log_softmax":
            check(way, inside=True)
    powergrad.enable(ALPHA)
    check(F.cross_entropy, inside=True)
    powergrad.disable()
    try:
        with loss_parallel():
            x = split_logits(group, 5, classes)[2]
            with pytest.raises(RuntimeError, match="outside `loss_parallel"):
                powergrad.log_softmax(x, 1, alpha=ALPHA)
            raise KeyError
    except KeyError:
        check(WAYS["function"])  # PyTorch's handlers are still there
        _disable_custom_loss_ops()
    # Any loss of log p, and one alpha per row.
    for alpha in (0.0, ALPHA, torch.linspace(0, 1.5, 5, dtype=torch.float64)):
        x = split_logits(group, 5, classes)[2]
        log_p: Any = powergrad.log_softmax(x, 1, alpha=alpha)
        focal(log_p.full_tensor()).backward()
        leaf = z.log_softmax(1).requires_grad_()
        (u,) = torch.autograd.grad(focal(leaf), leaf)
        column = torch.as_tensor(alpha, dtype=torch.float64).reshape(-1, 1)
        oracle = u - (column * z).softmax(1) * u.sum(1, keepdim=True)
        torch.testing.assert_close(log_p.full_tensor(), z.log_softmax(1), rtol=0, atol=1e-12)
        torch.testing.assert_close(x.grad.full_tensor(), oracle, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("size", "classes"), [(2, 5), (2, 1000), (3, 1000), (3, 2)])
def test_each_way(processes, size, classes):
    processes.run(size, by_each_way, classes)


HEADS = {  # placements of hidden states and head on the square
    "tensor parallel": ((Replicate(), Replicate()), (Replicate(), Shard(0))),
    "data and tensor parallel": ((Shard(0), Replicate()), (Replicate(), Shard(0))),
    "sharded over both": ((Shard(0), Replicate()), (Shard(0), Shard(0))),
    "sequence": ((Replicate(), Shard(1)), (Replicate(), Shard(0))),
    "width": ((Replicate(), Shard(2)), (Shard(1), Shard(0))),
    "sums": ((Replicate(), Partial()), (Replicate(), Shard(0))),
    "data parallel": ((Shard(0), Shard(1)), (Replicate(), Replicate())),
}


def in_sentences(batch: int, values: Tensor) -> Tensor:
    return values.unflatten(0, (batch, -1)) if values.dim() else values


def head_on_a_mesh(rank: int, group: Any, name: str) -> None:
    """The gradients of split heads against those of the logits' oracle, by the chain rule."""
    (of_hidden, of_head), mesh = HEADS[name], square()
    for seed in range(12):
        draw = random.Random(seed)
        batch, length, width = draw.randint(1, 3), draw.randint(1, 5), draw.randint(1, 4)
        form = replace(
            random_form(draw, (batch * length, draw.choice([1, 3, 40]))),
            masked=False, alphas=draw.choice(["number", "0-d"]), dtype=torch.float64,
        )  # fmt: skip
        case = build(form)
        g = torch.Generator().manual_seed(seed)
        classes = case.logits.shape[1]
        shapes = (batch, length, width), (classes, width), (classes,)
        h, w, b = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes)
        case.logits, up = F.linear(h.flatten(0, 1), w, b), case.upstream
        dz = gradient_of_potential(
            case.logits, case.target, case.alpha, up, extra=case.extra, **case.options
        )
        expected = [(dz @ w).view_as(h), dz.T @ h.flatten(0, 1), dz.sum(0)]
        if Partial() in of_hidden:
            x: Any = DTensor.from_local(h / 2, mesh, of_hidden)
        else:
            x = distribute_tensor(h, mesh, of_hidden)
        of_bias = [p if p == Shard(0) else Replicate() for p in of_head]
        head = distribute_tensor(w, mesh, of_head), distribute_tensor(b, mesh, of_bias)
        leaves: Any = [t.detach().requires_grad_() for t in (x, *head)]
        rows = functools.partial(in_sentences, batch)
        extra = {n: rows(v) if n == "token_weight" else v for n, v in case.extra.items()}
        loss: Any = powergrad.linear_cross_entropy(
            *leaves[:2], rows(case.target), alpha=case.alpha, linear_bias=leaves[2], chunk_rows=2,
            **case.options, **extra,
        )  # fmt: skip
        loss.backward(distribute_tensor(rows(up), mesh, [Replicate()] * 2))
        check_value(case, loss.full_tensor().reshape(case.upstream.shape))
        for leaf, want in zip(leaves, expected, strict=True):
            scale = want.abs().max().clamp(min=1.0).item() if want.numel() else 1.0
            got = leaf.grad.full_tensor()
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12 * scale, equal_nan=True)


@pytest.mark.parametrize("name", HEADS)
def test_heads_on_a_mesh(processes, name):
    processes.run(4, head_on_a_mesh, name)


def shifted_and_told(rank: int, group: Any) -> None:
    """Shifted labels, statistics and gates of split heads and logits are those of whole ones."""
    mesh, g = line(group), torch.Generator().manual_seed(0)
    h = torch.randn(2, 6, 4, generator=g, dtype=torch.float64)
    w = torch.randn(11, 4, generator=g, dtype=torch.float64)
    y = torch.randint(11, (2, 6), generator=g)
    y[0, 2] = -100
    gate = lambda rows: rows.p_target * rows.entropy  # noqa: E731
    options: Any = {"alpha": ALPHA, "gate": gate, "label_smoothing": 0.1, "return_stats": True}
    head = functools.partial(powergrad.linear_cross_entropy, chunk_rows=5, **options)
    for target in (y, torch.rand(2, 6, 11, generator=g, dtype=torch.float64)):
        results: list[list[Any]] = [[], []]
        for split, found in enumerate(results):
            x, v, z = (
                (distribute_tensor(t, mesh, [where]) if split else t).detach().requires_grad_()
                for t, where in (
                    (h, Replicate()), (w, Shard(0)), (F.linear(h, w).movedim(-1, 1), Shard(1)),
                )
            )  # fmt: skip
            by_class = target if target is y else target.movedim(-1, 1)
            for leaves, (loss, rows) in (
                ([x, v], head(x, v, target, shift=target is y)),
                ([z], powergrad.cross_entropy(z, by_class, **options)),
            ):
                loss.backward()
                numbers = [loss, *(t.grad for t in leaves), *(getattr(rows, n) for n in rows.NAMES)]
                found += [t.full_tensor() if split else t.detach() for t in numbers]
        for whole, split in zip(*results, strict=True):
            torch.testing.assert_close(split, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3])
def test_statistics_gates_and_shifts(processes, size):
    processes.run(size, shifted_and_told)


# What is sent, and the memory ---------------------------------------------------------------------


def counted(rank: int, group: Any) -> None:
    """The collectives of forward pass (with the message before it) and backward pass."""
    mesh = line(group)
    z, y, x = split_logits(group, 7, 20)
    h = distribute_tensor(torch.randn(7, 4), mesh, [Replicate()]).requires_grad_()
    w = distribute_tensor(torch.randn(20, 4), mesh, [Shard(0)]).requires_grad_()
    head = functools.partial(powergrad.linear_cross_entropy, h, w, y, alpha=ALPHA, chunk_rows=3)
    local = z.chunk(dist.get_world_size(group), 1)[rank].clone().requires_grad_()
    whole = lambda values: values.to_local().sum()  # noqa: E731
    plain = functools.partial(parallel.cross_entropy, alpha=ALPHA, classes=20, group=group)
    calls: list[tuple[Any, int, int]] = [
        (lambda: plain(local, y), 2, 0),
        (lambda: powergrad.cross_entropy(x, y, alpha=ALPHA), 2, 0),
        (lambda: whole(powergrad.log_softmax(x, 1, alpha=ALPHA)), 2, 1),
        (head, 4, 1),
        (lambda: whole(head(reduction="none")), 4, 1),
    ]
    for call, gathers, reduces in calls:
        with CommDebugMode() as forward:
            loss = call()
        with CommDebugMode() as backward:
            loss.backward()
        for sent, kind, expected in ((forward, "gather", gathers), (backward, "reduce", reduces)):
            counts = {str(operation): n for operation, n in sent.get_comm_counts().items()}
            assert sum(counts.values()) == expected, counts
            assert all(kind in operation for operation in counts), counts


def test_collectives(processes):
    processes.run(2, counted)


def messages(rank: int, group: Any) -> list[int]:
    """The calls of 9 on an accelerator, for which the meta device stands, that send a message."""
    sent: list[int] = []
    fresh, send = dist.new_group([rank], use_local_synchronization=True), parallel.gathered
    for call in range(1, 10):

        def note(mine: Tensor, group: Any, call: int = call) -> Tensor:
            sent.append(call)
            return torch.tensor([[0, 7, 0, 5]])

        parallel.gathered = note
        with parallel.agreement(parallel.Split(fresh, 0, 5, 5), torch.device("meta")):
            pass
    parallel.gathered = send
    return sent


def test_accelerators_compare_arguments_at_some_calls(processes):
    assert processes.run(2, messages) == [[1, 2, 4, 8]] * 2


def peak(rank: int, group: Any) -> float:
    """Peak memory of a split head, without one block of logits, in units of its gradients."""
    mesh, (n, width, classes, rows) = line(group), (512, 512, 16384, 128)
    h = distribute_tensor(torch.randn(n, width), mesh, [Replicate()]).requires_grad_()
    w = distribute_tensor(torch.randn(classes, width) / 16, mesh, [Shard(0)]).requires_grad_()
    y = torch.randint(classes, (n,), generator=torch.Generator().manual_seed(0))

    def run() -> None:
        powergrad.linear_cross_entropy(h, w, y, alpha=ALPHA, chunk_rows=rows).backward()

    def clear() -> None:
        h.grad = w.grad = None

    share = classes // dist.get_world_size(group)
    return (peak_bytes(run, clear) / 4 - rows * share) / (n * width + share * width)


def test_memory_of_the_head(processes):
    found = processes.run(2, peak)
    print(found)
    assert 1 <= min(found) <= max(found) <= 1.4


# Processes that disagree --------------------------------------------------------------------------


Z, Y, SIX = torch.zeros(4, 3, dtype=torch.bfloat16), torch.tensor([0, 1, 4, 5]), torch.arange(6.0)
RIGHT: dict[str, Any] = {
    "input": Z,
    "target": Y,
    "alpha": ALPHA,
    "classes": 6,
    "weight": torch.ones(6).bfloat16(),
    "token_weight": torch.ones(4),
}
SAME = "the same labels, alpha and weights"
WRONG: dict[str, tuple[dict[str, Any], str, str]] = {  # what rank 1 passes, and what both raise
    "rows": (
        {"input": Z[:3], "target": Y[:3], "token_weight": SIX[:3]}, "rows 4", "rows 3",
    ),
    "dtype": ({"input": Z.float(), "weight": SIX}, "dtype torch.bfloat16", "dtype torch.float32"),
    "dtype of the same size": (
        {"input": Z.half(), "weight": SIX.half()}, "dtype torch.bfloat16", "dtype torch.float16",
    ),
    "smoothing": ({"label_smoothing": 0.1}, "-100, 0.0, 'mean'", "-100, 0.1, 'mean'"),
    "reduction": ({"reduction": "sum"}, "-100, 0.0, 'mean'", "-100, 0.0, 'sum'"),
    "alpha": ({"alpha": 0.4}, SAME, SAME),
    "labels": ({"target": Y.flip(0)}, SAME, SAME),
    "weights": ({"weight": SIX.bfloat16()}, SAME, SAME),
    "token weights": ({"token_weight": SIX[:4]}, SAME, SAME),
    "missing": ({"first_class": 4, "input": Z[:, :2]}, "got [0, 3), [4, 6)", "got [0, 3), [4, 6)"),
    "overlapping": ({"first_class": 2}, "got [0, 3), [2, 5)", "got [0, 3), [2, 5)"),
    "classes": ({"classes": 7, "weight": torch.ones(7).bfloat16()}, "classes 6", "classes 7"),
    "outside": ({"target": Y + 2}, "an error on rank 1", "Expected labels in `target`"),
    "shape": ({"target": Y[:3]}, "an error on rank 1", "Expected `target` to have shape"),
    "type": ({"input": [1, 2]}, "an error on rank 1", "Expected `input` to be a tensor"),
    "negative": ({"alpha": -1.0}, "an error on rank 1", "Expected `alpha` to be finite"),
}  # fmt: skip


def wrong(rank: int, group: Any, name: str) -> str:
    """What a call raises of which rank 1 passes other arguments."""
    given, start = {**RIGHT, **(WRONG[name][0] if rank else {})}, time.monotonic()
    with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
        parallel.cross_entropy(group=group, **given)
    assert time.monotonic() - start < 10
    return str(error.value)


@pytest.mark.parametrize("name", WRONG)
def test_disagreement_raises_in_every_process(processes, name):
    for found, expected in zip(processes.run(2, wrong, name), WRONG[name][1:], strict=True):
        assert expected in found


def alone(rank: int, group: Any, why: str) -> str | None:
    """Rank 0 calls the loss; rank 1 has died, or does something else."""
    if rank == 1:
        return os._exit(1) if why == "died" else time.sleep(8)
    start = time.monotonic()
    z = torch.zeros(4, 3, requires_grad=True)
    with pytest.raises(RuntimeError) as error:
        parallel.cross_entropy(z, torch.arange(4), alpha=ALPHA, classes=6, group=group)
    return f"{time.monotonic() - start:.1f} s: {error.value}"


@pytest.mark.parametrize("why", ["died", "elsewhere"])
def test_a_process_that_does_not_call_ends_the_others(why):
    pool = Processes(2, __name__, timeout=5.0)
    try:
        found, _ = pool.answers(2, alone, why, timeout=30)
    finally:
        pool.close()
    assert float(found.split()[0]) < 10


def apart(rank: int, group: Any) -> None:
    z, y = torch.zeros(4, 6, requires_grad=True), torch.arange(4)
    outside: Any = dist.GroupMember.NON_GROUP_MEMBER
    with pytest.raises(ValueError, match="Expected this process to be in `group`"):
        parallel.cross_entropy(z, y, alpha=ALPHA, classes=6, group=outside)
    loss = parallel.cross_entropy(
        z[:, 3 * rank : 3 * rank + 3], y, alpha=ALPHA, classes=6, group=group
    )
    with pytest.raises(RuntimeError, match="Second derivatives"):
        torch.autograd.grad(loss, z, create_graph=True)
    twice = DTensor.from_local(z.detach(), square(), [Shard(1)] * 2, run_check=False)
    with pytest.raises(ValueError, match="one dimension of the mesh"):
        powergrad.cross_entropy(twice, y, alpha=ALPHA)
    # As on an accelerator, where labels are not read.
    checks = parallel.check_equal, parallel.check_labels
    parallel.check_equal = lambda parts: (parts["label"] != parts["label"][0]).any()
    parallel.check_labels = lambda *_: False
    for target in (y + rank, y.where(y < 3, 6)):
        x: Any = z[:, 3 * rank : 3 * rank + 3].detach().requires_grad_()
        loss = parallel.cross_entropy(x, target, alpha=ALPHA, classes=6, group=group)
        loss.backward()
        assert torch.cat([loss.reshape(1), x.grad.flatten()]).isnan().all()
    parallel.check_equal, parallel.check_labels = checks


def test_what_cannot_be_computed(processes):
    processes.run(2, apart)
