"""Learning rates and decays that are scaled for one step: any optimizer and wrapper, or a refusal.

The reference is the same optimizer with the scaled values written into its groups.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.swa_utils import AveragedModel

from powergrad import clip_grads_before_step
from powergrad.mode import Enabled
from powergrad.run import Options
from powergrad.run.optimizers import Optimizers, RefusedExit, find_model

SCALES = {"lr_scale": 0.5, "head_lr_scale": 0.25, "decay_scale": 4.0}


@contextmanager
def attached(**options: Any):
    optimizers = Optimizers(Options(**options), Enabled())
    optimizers.install()
    try:
        yield optimizers
    finally:
        optimizers.close()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)).double()


def groups_of(model: nn.Sequential) -> list[dict[str, Any]]:
    return [{"params": list(layer.parameters())} for layer in (model[0], model[2])]


def groups_by_hand(model: nn.Sequential, lr: float, decay: float | None) -> list[dict[str, Any]]:
    """The groups with the values that `SCALES` makes of them."""
    options = {} if decay is None else {"weight_decay": 4 * decay}
    body, head = groups_of(model)
    return [{**body, "lr": 0.5 * lr, **options}, {**head, "lr": 0.125 * lr, **options}]


def train(model: nn.Module, optimizer: Any, after: Callable[[], object] = lambda: None) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        x = torch.randn(12, 6, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 4, (12,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        after()


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


KINDS = [
    kind
    for name, kind in vars(optim).items()
    if inspect.isclass(kind) and name not in ("Optimizer", "LBFGS", "SparseAdam", "Muon")
]
CASES = [
    pytest.param(kind, form, id=f"{kind.__name__} {form}")
    for kind in KINDS
    for form in ({}, {"foreach": True}, {"fused": True})
    if form.keys() <= inspect.signature(kind).parameters.keys()
]


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_a_shared_group_is_split_for_the_step(kind, form):
    accepted = inspect.signature(kind).parameters
    decay = 0.01 if "weight_decay" in accepted else None
    options = {**form, **({"momentum": 0.9} if "momentum" in accepted else {})}
    ours, theirs = network(), network()
    given = {} if decay is None else {"weight_decay": decay}
    optimizer = kind(ours.parameters(), lr=0.02, **given, **options)
    before = copy.deepcopy(optimizer.state_dict()["param_groups"])
    with attached(**SCALES):
        train(ours, optimizer)
    train(theirs, kind(groups_by_hand(theirs, 0.02, decay), **options))
    assert_equal(ours, theirs)
    assert optimizer.state_dict()["param_groups"] == before
    assert len(optimizer.state) == 4  # of the user's own optimizer, by parameter


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_a_learning_rate_in_a_tensor_stays_that_tensor(factor):
    ours, theirs = network(), network()
    rate = torch.tensor(0.02)
    optimizer = optim.AdamW(ours.parameters(), lr=rate, weight_decay=0.01, foreach=False)
    with attached(**SCALES):
        train(ours, optimizer, lambda: rate.mul_(factor))
    assert optimizer.param_groups[0]["lr"] is rate
    groups = groups_by_hand(theirs, 0.02, 0.01)
    rates = [torch.tensor(group["lr"]) for group in groups]
    groups = [{**group, "lr": rate} for group, rate in zip(groups, rates, strict=True)]
    train(theirs, optim.AdamW(groups, foreach=False), lambda: [lr.mul_(factor) for lr in rates])
    assert_equal(ours, theirs)


def test_a_closure_sees_the_values_of_the_program():
    ours, theirs = network(), network()
    x, y = torch.randn(12, 6, dtype=torch.float64), torch.arange(12) % 4
    optimizer, seen = optim.AdamW(ours.parameters(), lr=0.02, weight_decay=0.01), []

    def closure() -> torch.Tensor:
        seen.append([(len(group["params"]), group["lr"]) for group in optimizer.param_groups])
        optimizer.zero_grad()
        loss = F.cross_entropy(ours(x), y)
        loss.backward()
        return loss

    with attached(**SCALES, clip_norm=0.1):
        for _ in range(5):
            optimizer.step(closure)
    assert seen == [[(4, 0.02)]] * 5
    reference = optim.AdamW(groups_by_hand(theirs, 0.02, 0.01))
    for _ in range(5):
        reference.zero_grad()
        F.cross_entropy(theirs(x), y).backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        reference.step()
    assert_equal(ours, theirs)


def test_a_step_that_raises_does_not_affect_the_next():
    ours, theirs = network(), network()
    optimizer = optim.SGD(ours.parameters(), lr=0.5, weight_decay=0.01)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with attached(**SCALES):
        handle = optimizer.register_step_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        handle.remove()
        train(ours, optimizer)
    train(theirs, optim.SGD(groups_by_hand(theirs, 0.5, 0.01)))
    assert_equal(ours, theirs)
    assert optimizer.param_groups[0]["lr"] == 0.5


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
        self.zero_grad, self.step = self.optimizer.zero_grad, self.optimizer.step


class Calling(optim.SGD):
    """A class over one of PyTorch's; both run the hooks."""

    def step(self, closure: Any = None) -> Any:
        super().step()


class Deciding(optim.SGD):
    """An optimizer that sets its own learning rate."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        for group in self.param_groups:
            group["lr"] *= 0.9


class Nameless(optim.Optimizer):
    """An optimizer without an `lr`."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"rate": lr})

    def step(self, closure: Any = None) -> Any:
        pass


@pytest.mark.parametrize("kind", [Sharing, Silent, Calling])
def test_wrappers_are_scaled_once(kind):
    """Also a class of the user's, whose groups need no splitting."""
    ours, theirs = network(), network()
    with attached(**SCALES, agc=0.01) as optimizers:
        train(ours, kind(groups_of(ours), lr=0.5, weight_decay=0.01))
    reference = (Calling if kind is Calling else optim.SGD)(groups_by_hand(theirs, 0.5, 0.01))
    name = type(reference).__name__
    assert [(seen.kind, seen.steps) for seen in optimizers.seen] == [(name, 5)]
    clip_grads_before_step(reference, theirs, agc=0.01)
    train(theirs, reference)
    assert_equal(ours, theirs)


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Copying, "SGD with its own groups"), (Deciding, "Deciding"), (Nameless, "Nameless")],
)
def test_an_optimizer_that_cannot_be_scaled_is_refused(kind, message):
    model = network()
    with attached(lr_scale=0.5) as optimizers, pytest.raises(RefusedExit):
        train(model, kind(model.parameters(), lr=0.5))
    (refusal,) = optimizers.refusals
    assert message in refusal


def test_the_model_is_the_outermost_module_around_the_parameters():
    def found(module: nn.Module) -> nn.Module:
        return find_model(optim.SGD(module.parameters(), lr=1))

    model, other = network(), network()
    averaged = AveragedModel(model)
    assert found(model) is found(model[0]) is model
    assert found(other) is other
    assert found(averaged.module) is averaged
    task = nn.ModuleList([model, nn.CrossEntropyLoss()])
    assert found(model) is task
    compiled = torch.compile(other, backend="eager")
    pair = nn.ModuleList([other, network()])
    assert found(pair) is pair
    assert found(other) is compiled  # the smaller of two


class Selecting(nn.ModuleList):
    """A model whose `parameters` are those to train, as in some adapters."""

    def parameters(self, recurse: bool = True) -> Any:
        return self[0].parameters(recurse)


def test_a_model_may_override_its_parameters():
    model = Selecting([network(), network()])
    assert find_model(optim.SGD(nn.Module.parameters(model), lr=1)) is model


def test_parameters_without_a_module_have_no_model():
    with pytest.raises(ValueError, match="but got no module"):
        find_model(optim.Adam([nn.Parameter(torch.ones(2))]))
