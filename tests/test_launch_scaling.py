"""Rates and decays that are scaled for one step: any optimizer, any wrapper, or a refusal."""

from __future__ import annotations

import copy
import inspect
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.swa_utils import AveragedModel

from powergrad import clip_grads_before_step
from powergrad.run import Options
from powergrad.run.optimizers import Optimizers
from powergrad.run.trained_model import find_model

SCALES = Options(lr_scale=0.5, head_lr_scale=0.25, decay_scale=4.0)


class RefusedError(Exception):
    pass


@contextmanager
def attached(options: Options = SCALES):
    def refuse(message: str) -> NoReturn:
        raise RefusedError(message)

    optimizers = Optimizers(options, lambda: 1, refuse)
    optimizers.install()
    try:
        yield optimizers
    finally:
        optimizers.close()


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)).double()


def batches(count: int = 5):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(12, 6, generator=generator, dtype=torch.float64)
        yield x, torch.randint(0, 4, (12,), generator=generator)


def train(model: nn.Module, optimizer: Any, after=lambda: None, closure: bool = False) -> None:
    for x, y in batches():

        def evaluate(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        if closure:
            optimizer.step(evaluate)
        else:
            evaluate()
            optimizer.step()
        after()


def by_hand(model: nn.Sequential, lr: float, decay: float | None) -> list[dict[str, Any]]:
    """The groups with their values, as one would write them."""
    options = {} if decay is None else {"weight_decay": 4 * decay}
    return [
        {"params": list(model[0].parameters()), "lr": 0.5 * lr, **options},
        {"params": list(model[2].parameters()), "lr": 0.125 * lr, **options},
    ]


def check_equal(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


KINDS = [
    kind
    for name, kind in vars(optim).items()
    if inspect.isclass(kind) and name not in ("Optimizer", "LBFGS", "SparseAdam", "Muon")
]
FORMS: list[dict[str, Any]] = [{}, {"foreach": True}, {"fused": True}]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_shared_group_is_split_for_the_step(kind, form):
    accepted = inspect.signature(kind).parameters
    if any(key not in accepted for key in form):
        return
    options = {key: 0.01 for key in ("weight_decay",) if key in accepted} | form
    options |= {"momentum": 0.9} if "momentum" in accepted else {}
    ours, theirs = network(), network()
    optimizer = kind(ours.parameters(), lr=0.02, **options)
    before = copy.deepcopy(optimizer.state_dict()["param_groups"])
    with attached():
        train(ours, optimizer)
    decay = options.pop("weight_decay", None)
    train(theirs, kind(by_hand(theirs, 0.02, decay), **options))
    check_equal(ours, theirs)
    assert optimizer.state_dict()["param_groups"] == before
    assert len(optimizer.state) == 4  # by the parameters, of the user's own optimizer


def test_sparse_adam():
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Embedding(5, 3, sparse=True)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    with attached(Options(lr_scale=0.5)):
        ours = optim.SparseAdam(models[0].parameters(), lr=0.02)
        models[0](torch.tensor([1, 2])).sum().backward()
        ours.step()
    models[1](torch.tensor([1, 2])).sum().backward()
    optim.SparseAdam(models[1].parameters(), lr=0.01).step()
    check_equal(*models)


@pytest.mark.parametrize("capturable", [False, True])
def test_a_rate_in_a_tensor_stays_that_tensor(capturable):
    ours, theirs = network(), network()
    rate = torch.tensor(0.02)
    optimizer = optim.AdamW(ours.parameters(), lr=rate, weight_decay=0.01, foreach=False)
    with attached():
        train(ours, optimizer, after=lambda: rate.mul_(0.5) if capturable else None)
    assert optimizer.param_groups[0]["lr"] is rate
    groups = by_hand(theirs, 0.02, 0.01)
    for group in groups:
        group["lr"] = torch.tensor(group["lr"])
    reference = optim.AdamW(groups, foreach=False)

    def halve() -> None:
        for group in reference.param_groups:
            group["lr"].mul_(0.5)

    train(theirs, reference, after=halve if capturable else lambda: None)
    check_equal(ours, theirs)


def test_schedulers_see_their_own_values():
    def schedules(optimizer):
        warm = optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=2)
        return warm, optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    ours, theirs = network(), network()
    optimizer = optim.SGD(ours.parameters(), lr=0.5, momentum=0.9, weight_decay=0.01)
    seen, own = [], schedules(optimizer)

    def advance():
        for schedule in own:
            schedule.step()
        seen.append(optimizer.param_groups[0]["lr"])

    with attached():
        train(ours, optimizer, after=advance)
    reference = optim.SGD(by_hand(theirs, 0.5, 0.01), momentum=0.9)
    expected, pair = [], schedules(reference)

    def advance_reference():
        for schedule in pair:
            schedule.step()
        expected.append(reference.param_groups[0]["lr"])

    train(theirs, reference, after=advance_reference)
    check_equal(ours, theirs)
    assert seen == [2 * rate for rate in expected]


def test_a_closure_runs_with_the_values_of_the_program():
    ours, theirs = network(), network()
    optimizer = optim.AdamW(ours.parameters(), lr=0.02, weight_decay=0.01)
    seen = []
    with attached(Options(lr_scale=0.5, head_lr_scale=0.25, decay_scale=4.0, clip_norm=0.1)):
        for x, y in batches():

            def closure(x=x, y=y):
                seen.append([(len(g["params"]), g["lr"]) for g in optimizer.param_groups])
                optimizer.zero_grad()
                loss = F.cross_entropy(ours(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
    assert seen == [[(4, 0.02)]] * 5
    reference = optim.AdamW(by_hand(theirs, 0.02, 0.01))
    for x, y in batches():
        reference.zero_grad()
        F.cross_entropy(theirs(x), y).backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        reference.step()
    check_equal(ours, theirs)


def test_a_step_that_raises_leaves_no_trace_on_the_next():
    ours, theirs = network(), network()
    optimizer = optim.SGD(ours.parameters(), lr=0.5, weight_decay=0.01)

    def fail(*_: object) -> None:
        raise ValueError("on purpose")

    with attached():
        handle = optimizer.register_step_pre_hook(fail)
        with pytest.raises(ValueError, match="on purpose"):
            optimizer.step()
        handle.remove()
        train(ours, optimizer)
    train(theirs, optim.SGD(by_hand(theirs, 0.5, 0.01)))
    check_equal(ours, theirs)
    assert optimizer.param_groups[0]["lr"] == 0.5


# Optimizers inside of others ----------------------------------------------------------------------


class Sharing(optim.Optimizer):
    """Like SAM: a wrapper with hooks of its own, over the groups of the optimizer inside."""

    def __init__(self, groups: Any, **options: Any) -> None:
        super().__init__(groups, options)
        self.base_optimizer = optim.SGD(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        self.base_optimizer.step()


class Copying(Sharing):
    """Like ZeroRedundancyOptimizer: the optimizer inside has copies of the groups."""

    def __init__(self, groups: Any, **options: Any) -> None:
        super().__init__(groups, **options)
        self.param_groups = [dict(group) for group in self.param_groups]


class Silent:
    """Like accelerate's and timm's: a wrapper without hooks."""

    def __init__(self, groups: Any, **options: Any) -> None:
        self.optimizer = optim.SGD(groups, **options)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.optimizer.step()


class Calling(optim.SGD):
    """A class over one of PyTorch's, which both run the hooks."""

    def step(self, closure: Any = None) -> Any:
        super().step()


@pytest.mark.parametrize("kind", [Sharing, Silent, Calling])
def test_wrappers_are_scaled_once(kind):
    ours, theirs = network(), network()
    with attached(Options(lr_scale=0.5, head_lr_scale=0.25, decay_scale=4.0, agc=0.01)) as seen:
        groups = [{"params": ours[0].parameters()}, {"params": ours[2].parameters()}]
        train(ours, kind(groups, lr=0.5, weight_decay=0.01))
    name = "Calling" if kind is Calling else "SGD"
    assert [(each.kind, each.steps) for each in seen.seen] == [(name, 5)]
    reference = (Calling if kind is Calling else optim.SGD)(by_hand(theirs, 0.5, 0.01))
    clip_grads_before_step(reference, theirs, agc=0.01)
    train(theirs, reference)
    check_equal(ours, theirs)


class Deciding(optim.SGD):
    """An optimizer that sets its own rate."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        for group in self.param_groups:
            group["lr"] *= 0.9


class Nameless(optim.Optimizer):
    """An optimizer that knows no `lr`."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rate": 0.1})

    def step(self, closure: Any = None) -> Any:
        pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: Copying(m.parameters(), lr=0.5), "SGD with its own groups"),
        (lambda m: Deciding(m.parameters(), lr=0.5), "Deciding, which changes lr in its step"),
        (lambda m: Nameless(m.parameters()), "Nameless, whose learning rate cannot be scaled"),
    ],
)
def test_what_cannot_be_scaled_is_refused_by_name(make, message):
    model = network()
    with attached(Options(lr_scale=0.5)), pytest.raises(RefusedError, match=message):
        train(model, make(model))


def test_a_head_in_a_group_of_its_own_needs_no_splitting():
    class Mine(optim.SGD):
        pass

    ours, theirs = network(), network()
    groups = [{"params": ours[0].parameters()}, {"params": ours[2].parameters()}]
    with attached():
        train(ours, Mine(groups, lr=0.5))
    train(theirs, optim.SGD(by_hand(theirs, 0.5, 0.0)))
    check_equal(ours, theirs)


# The model ----------------------------------------------------------------------------------------


class Task(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.criterion = model, nn.CrossEntropyLoss()


def test_the_model_is_the_outermost_module_around_the_parameters():
    model = network()
    other, averaged = network(), AveragedModel(model)
    assert find_model(optim.SGD(model.parameters(), lr=1)) is model
    assert find_model(optim.SGD(model[0].parameters(), lr=1)) is model
    assert find_model(optim.SGD(other.parameters(), lr=1)) is other
    assert find_model(optim.SGD(averaged.module.parameters(), lr=1)) is averaged
    task = Task(model)
    assert find_model(optim.SGD(model.parameters(), lr=1)) is task
    compiled = torch.compile(other, backend="eager")
    assert find_model(optim.SGD(other.parameters(), lr=1)) is compiled


def test_parameters_without_a_module_have_no_model():
    with pytest.raises(ValueError, match="holds all parameters of Adam, but got no module"):
        find_model(optim.Adam([nn.Parameter(torch.ones(2))]))
