"""Losses of classes that are split over processes: as one process computes them, or an error."""

from __future__ import annotations

import contextlib
import functools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import loss_parallel
from torch.distributed.tensor.parallel.loss import _disable_custom_loss_ops
from cases import OPTIONS, Form, build, check_gradient, check_value
from processes import Processes
from torch import Tensor

import powergrad
from powergrad import parallel

CASES = 300


@pytest.fixture(scope="module")
def processes():
    pool = Processes(4, __name__)
    yield pool
    pool.close()


def random_case(seed: int) -> tuple[Any, list[int]]:
    """A call with random options, and where three parts of its classes end."""
    draw = random.Random(seed)
    form = Form()
    while True:
        c, n, d = draw.choice([1, 2, 3, 7, 40, 127]), draw.randint(1, 6), draw.randint(1, 4)
        dtype = draw.choice([torch.float64, torch.float64, torch.float32])
        alphas = draw.choice(["number", "number", "0-d", "example", "position"])
        form = Form(
            shape=draw.choice([(c,), (n, c), (n, c), (n, c), (n, c, d)]),
            dtype=dtype,
            target=draw.choice(["labels", "labels", "bytes", "probabilities"]),
            alpha=draw.choice([0.0, 0.05, 0.3, 0.999, 2.0]),
            alphas=alphas,
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
            seed=seed,
        )
        if form.target == "bytes" and c > 200:
            continue
        if form.possible:
            break
    inner = sorted(draw.randint(0, c) for _ in range(2))
    return build(form), [0, *inner, c]


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
            z, target, alpha=case.alpha, classes=classes, first_class=first, group=group,
            **case.options, **case.extra,
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


@functools.cache
def square() -> Any:
    return init_device_mesh("cpu", (2, 2))


def on_a_mesh(rank: int, group: Any, pairs: list[Any], seeds: range, inside: bool) -> Any:
    """Random cases as DTensors with these placements; what differs from one process, by name."""
    failures = []
    for number, pair in enumerate(pairs):
        for seed in seeds:
            case, _ = random_case(1000 * number + seed)
            if case.logits.dim() < 2:
                continue
            z = distribute_tensor(case.logits, square(), pair).requires_grad_()
            try:
                with loss_parallel() if inside else contextlib.nullcontext():
                    loss = powergrad.cross_entropy(
                        z, case.target, alpha=case.alpha, **case.options, **case.extra
                    )
                    up = distribute_tensor(case.upstream, square(), [Replicate()] * 2)
                    loss.backward(up)
                check_value(case, loss.full_tensor())
                check_gradient(case, z.grad.full_tensor())
            except Exception as error:
                if inside:
                    _disable_custom_loss_ops()
                failures.append((pair, seed, f"{type(error).__name__}: {error}"[:300]))
    return failures


@pytest.mark.parametrize("inside", [False, True])
def test_every_placement_on_a_mesh(processes, inside):
    pairs = [(a, b) for a in PLACEMENTS for b in PLACEMENTS if (a, b) != (Shard(1), Shard(1))]
    assert processes.run(4, on_a_mesh, pairs, range(10), inside) == [[]] * 4
