"""The identity: PGT's trajectory is that of plain cross-entropy with two parameter groups."""

import copy
import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from powergrad import clip_grads_before_step, cross_entropy, equivalent_training

STEPS = 220
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, lr=0.05, weight_decay=1e-2),
    "momentum": lambda p: optim.SGD(p, lr=0.02, momentum=0.9, dampening=0.1),
    "Nesterov": lambda p: optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=5e-3, nesterov=True),
    "Adam": lambda p: optim.Adam(p, lr=2e-3, weight_decay=1e-2, eps=1e-3),
    "amsgrad": lambda p: optim.Adam(p, lr=2e-3, amsgrad=True, eps=1e-3),
    "decoupled": lambda p: optim.Adam(p, lr=2e-3, weight_decay=0.1, decoupled_weight_decay=True),
    "AdamW": lambda p: optim.AdamW(p, lr=2e-3, weight_decay=0.1, eps=1e-3),
}
if torch.__version__ < "2.7":
    del OPTIMIZERS["decoupled"]


class Pointwise(nn.Conv1d):
    """Logits by a 1x1 convolution, as in segmentation."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.unsqueeze(-1)).squeeze(-1)


def network(normalised: bool = False, head: str = "linear") -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(12) if normalised else nn.Identity()
    # A bias before batch normalisation has a gradient of 0; Adam would amplify its rounding errors.
    first = nn.Linear(6, 12, bias=not normalised)
    last = Pointwise(12, 4, 1) if head == "convolution" else nn.Linear(12, 4, bias=head != "bare")
    last.requires_grad_(head != "frozen")
    return nn.Sequential(first, norm, nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), last).double()


def sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=0.05)


@functools.cache
def batch(step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    x = torch.randn(16, 6, generator=g, dtype=torch.float64)
    return x, (x[:, :4] + 0.5 * torch.randn(16, 4, generator=g, dtype=torch.float64)).argmax(1)


def train(model: nn.Module, optimizer, alpha=1.0, steps=range(STEPS), cap=None, schedule=None):
    for step in steps:
        x, y = batch(step)
        optimizer.zero_grad()
        z = model(x)
        if alpha == 1:
            F.cross_entropy(z if cap is None else cap * torch.tanh(z / cap), y).backward()
        else:
            cross_entropy(z, y, alpha=alpha, softcap=cap).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()


def largest_difference(pgt: nn.Module, plain: nn.Sequential, alpha: float) -> float:
    """Over every weight, relative to the tensor's largest; the head's must be alpha times PGT's."""
    factors = [1 / alpha if p in set(plain[-1].parameters()) else 1 for p in plain.parameters()]
    triples = zip(pgt.parameters(), plain.parameters(), factors, strict=True)
    return max(((a - f * b).abs().max() / a.abs().max()).item() for a, b, f in triples)


@pytest.mark.parametrize(("alpha", "normalised"), [(0.3, False), (0.25, True), (1.7, False)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_two_trajectories_are_one(name, alpha, normalised):
    pgt, plain = network(normalised), network(normalised)
    train(pgt, OPTIMIZERS[name](pgt.parameters()), alpha)
    train(plain, equivalent_training(plain, OPTIMIZERS[name](plain.parameters()), alpha))
    assert largest_difference(pgt, plain, alpha) <= 1e-11


def test_a_soft_cap_is_scaled_with_the_head():
    pgt, plain = network(), network()
    train(pgt, sgd(pgt), 0.3, cap=2.0)
    train(plain, equivalent_training(plain, sgd(plain), 0.3), cap=0.3 * 2.0)
    assert largest_difference(pgt, plain, 0.3) <= 1e-11


@pytest.mark.parametrize("name", ["Nesterov", "Adam", "amsgrad", "AdamW"])
def test_from_the_middle_of_a_training(name):
    """The optimizer's state is carried over: momentum and second moments in the new units."""
    half = STEPS // 2
    pgt = network()
    optimizer = OPTIMIZERS[name](pgt.parameters())
    train(pgt, optimizer, 0.3, range(half))
    plain, twin = copy.deepcopy((pgt, optimizer))
    train(pgt, optimizer, 0.3, range(half, STEPS))
    train(plain, equivalent_training(plain, twin, 0.3), steps=range(half, STEPS))
    assert largest_difference(pgt, plain, 0.3) <= 1e-11


def test_a_schedule_and_several_groups():
    """Each group keeps its own options; the schedule scales all of them."""

    def make(model: nn.Sequential) -> optim.Optimizer:
        decayed = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.02}, {"params": rest, "lr": 0.01}]
        return optim.SGD(groups, lr=0.03, momentum=0.9)

    pgt, plain = network(True), network(True)
    optimizer = make(pgt)
    train(pgt, optimizer, 0.25, schedule=optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS))
    optimizer = equivalent_training(plain, make(plain), 0.25)
    assert [len(g["params"]) for g in optimizer.param_groups] == [2, 1, 3, 1]
    train(plain, optimizer, schedule=optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS))
    assert largest_difference(pgt, plain, 0.25) <= 1e-11


@pytest.mark.parametrize("head", ["bare", "convolution", "frozen"])
def test_other_heads(head):
    pgt, plain = network(head=head), network(head=head)
    trained = slice(0, -1) if head == "frozen" else slice(None)
    train(pgt, sgd(pgt[trained]), 0.5)
    x, _ = batch(0)
    logits = plain(x)
    optimizer = equivalent_training(plain, sgd(plain[trained]), 0.5)
    torch.testing.assert_close(plain(x), 0.5 * logits, rtol=1e-14, atol=0)
    assert len(optimizer.param_groups) == (1 if head == "frozen" else 2)
    train(plain, optimizer)
    assert largest_difference(pgt, plain, 0.5) <= 1e-12


def test_gradients_that_are_there_become_those_of_plain_training():
    """In the middle of an accumulation: the backbone's are alpha times what they were."""
    pgt, plain = network(), network()
    optimizers = [OPTIMIZERS["momentum"](model.parameters()) for model in (pgt, plain)]
    for model in (pgt, plain):
        cross_entropy(model(batch(0)[0]), batch(0)[1], alpha=0.3).backward()
    optimizers[1] = equivalent_training(plain, optimizers[1], 0.3)
    cross_entropy(pgt(batch(1)[0]), batch(1)[1], alpha=0.3).backward()
    F.cross_entropy(plain(batch(1)[0]), batch(1)[1]).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert largest_difference(pgt, plain, 0.3) <= 1e-12


@pytest.mark.parametrize("eps", [1e-3, 4.0])  # some weights are below it, or all
@pytest.mark.parametrize("name", ["momentum", "AdamW"])
def test_agc_with_alpha_times_the_threshold(name, eps):
    """It clips and reports as with PGT."""
    handles, models = [], (network(), network())
    for model, alpha in zip(models, (0.3, 1.0), strict=True):
        optimizer = OPTIMIZERS[name](model.parameters())
        if alpha == 1:
            optimizer = equivalent_training(model, optimizer, 0.3)
        clip = 0.02 if alpha < 1 else 0.3 * 0.02
        handles.append(clip_grads_before_step(optimizer, model, agc=clip, eps=eps))
        train(model, optimizer, alpha)
    assert largest_difference(*models, 0.3) <= 1e-11
    ours, theirs = (handle.last_report["agc"] for handle in handles)
    assert ours.clipped == theirs.clipped > 0
    assert 0.3 * float(ours.largest) == pytest.approx(float(theirs.largest), rel=1e-9)


def test_the_given_optimizer_is_unchanged_and_names_go_with_their_parameters():
    model = network()
    given = optim.AdamW(model.named_parameters(), lr=0.1, weight_decay=0.2)
    before = copy.deepcopy(given.state_dict())
    optimizer = equivalent_training(model, given, alpha=0.5)
    assert given.state_dict() == before
    named, names = dict(model.named_parameters()), []
    for group in optimizer.param_groups:
        assert all(map(operator.is_, map(named.get, group["param_names"]), group["params"]))
        assert len(group["param_names"]) == len(group["params"])
        names += group["param_names"]
    assert sorted(names) == sorted(named)
    with clip_grads_before_step(optimizer, norm=1.0):
        train(model, optimizer, steps=range(1))


class Mine(optim.SGD):
    pass


def hooked(attach: Callable[[Any], object]) -> Callable[[nn.Module], optim.Optimizer]:
    return lambda model: (optimizer := sgd(model), attach(optimizer))[0]


PRINTS = ValueError, "no step hooks, .*print"
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "alpha": ({"alpha": 0.0}, ValueError, "`alpha`"),
    "head": ({"head": "1"}, ValueError, "Identity"),
    "RMSprop": (lambda m: optim.RMSprop(m.parameters()), TypeError, "RMSprop"),
    "subclass": (lambda m: Mine(m.parameters(), lr=0.1), TypeError, "Mine"),
    "other model": (lambda m: sgd(nn.Linear(7, 1)), ValueError, "parameters of `model`"),
    "clipping": (hooked(lambda o: clip_grads_before_step(o, value=1)), ValueError, "attach clip"),
    "before": (hooked(lambda o: o.register_step_pre_hook(print)), *PRINTS),
    "after": (hooked(lambda o: o.register_step_post_hook(print)), *PRINTS),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_changes_nothing(name):
    change, error, message = REFUSED[name]
    model = network()
    before = copy.deepcopy(model.state_dict())
    make, arguments = (sgd, change) if isinstance(change, dict) else (change, {})
    with pytest.raises(error, match=message):
        equivalent_training(**{"model": model, "optimizer": make(model), "alpha": 0.3, **arguments})
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
