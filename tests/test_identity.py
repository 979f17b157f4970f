"""The identity: PGT's trajectory is that of plain cross-entropy with two parameter groups."""

from __future__ import annotations

import copy
import functools
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from powergrad import clip_grads_before_step, cross_entropy, equivalent_training

STEPS = 220
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, dampening=0.1),
    "Nesterov": lambda p: torch.optim.SGD(
        p, lr=0.02, momentum=0.9, weight_decay=5e-3, nesterov=True
    ),
    "Adam": lambda p: torch.optim.Adam(p, lr=2e-3, weight_decay=1e-2, eps=1e-3),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=2e-3, amsgrad=True, eps=1e-3),
    "Adam decoupled": lambda p: torch.optim.Adam(
        p, lr=2e-3, weight_decay=0.1, decoupled_weight_decay=True
    ),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=2e-3, weight_decay=0.1, eps=1e-3),
}


def network(normalised: bool, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(12) if normalised else nn.Identity()
    # A bias before batch normalisation has a gradient of 0; Adam would amplify its rounding errors.
    return nn.Sequential(
        nn.Linear(6, 12, bias=not normalised),
        norm,
        nn.ReLU(),
        nn.Linear(12, 12),
        nn.ReLU(),
        nn.Linear(12, 4, bias=bias),
    ).double()


@functools.cache
def batch(step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    x = torch.randn(16, 6, generator=g, dtype=torch.float64)
    return x, (x[:, :4] + 0.5 * torch.randn(16, 4, generator=g, dtype=torch.float64)).argmax(1)


def train(model: nn.Module, optimizer, loss, steps=range(STEPS), schedule=None) -> None:
    for step in steps:
        x, y = batch(step)
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()


def largest_difference(pgt: nn.Module, plain: nn.Module, head: nn.Module, alpha: float) -> float:
    """Over every weight, relative to the tensor's largest; the head's must be alpha times PGT's."""
    own = {id(p) for p in head.parameters()}
    differences = []
    for a, b in zip(pgt.parameters(), plain.parameters(), strict=True):
        b = b / alpha if id(b) in own else b
        differences.append(((a - b).abs().max() / a.abs().max()).item())
    return max(differences)


@pytest.mark.parametrize("normalised", [False, True], ids=["plain", "batch-norm"])
@pytest.mark.parametrize("alpha", [0.25, 0.3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_two_trajectories_are_one(name, alpha, normalised):
    pgt, plain = network(normalised), network(normalised)
    train(pgt, OPTIMIZERS[name](pgt.parameters()), lambda z, y: cross_entropy(z, y, alpha=alpha))
    optimizer = equivalent_training(plain, OPTIMIZERS[name](plain.parameters()), alpha)
    train(plain, optimizer, F.cross_entropy)
    assert largest_difference(pgt, plain, plain[-1], alpha) <= 1e-11


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_without_the_rescaling_they_part(name):
    """The comparison above can fail: each of the two changes is needed."""
    pgt = network(False)
    train(pgt, OPTIMIZERS[name](pgt.parameters()), lambda z, y: cross_entropy(z, y, alpha=0.3))
    plain = network(False)
    optimizer = OPTIMIZERS[name](plain.parameters())
    train(plain, optimizer, F.cross_entropy)
    assert largest_difference(pgt, plain, nn.Identity(), 0.3) > 1e-2
    plain = network(False)
    optimizer = equivalent_training(plain, OPTIMIZERS[name](plain.parameters()), 0.3)
    optimizer.param_groups[1]["lr"] /= 0.3
    train(plain, optimizer, F.cross_entropy)
    assert largest_difference(pgt, plain, plain[-1], 0.3) > 1e-2


@pytest.mark.parametrize("name", ["Nesterov", "Adam", "Adam amsgrad", "AdamW"])
def test_from_the_middle_of_a_training(name):
    """The optimizer's state is carried over: momentum and second moments in the new units."""
    alpha, half = 0.3, STEPS // 2

    def pgt_loss(z: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(z, y, alpha=alpha)

    pgt = network(False)
    optimizer = OPTIMIZERS[name](pgt.parameters())
    train(pgt, optimizer, pgt_loss, range(half))
    plain, twin = copy.deepcopy((pgt, optimizer))
    train(pgt, optimizer, pgt_loss, range(half, STEPS))
    train(plain, equivalent_training(plain, twin, alpha), F.cross_entropy, range(half, STEPS))
    assert largest_difference(pgt, plain, plain[-1], alpha) <= 1e-11


def test_with_a_schedule_and_several_groups():
    """Each group keeps its own options; the schedule scales all of them."""
    alpha = 0.25

    def make(model: nn.Sequential) -> torch.optim.Optimizer:
        decayed = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.02}, {"params": rest, "lr": 0.01}]
        return torch.optim.SGD(groups, lr=0.03, momentum=0.9)

    def cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    pgt, plain = network(True), network(True)
    optimizer = make(pgt)
    train(pgt, optimizer, lambda z, y: cross_entropy(z, y, alpha=alpha), schedule=cosine(optimizer))
    optimizer = equivalent_training(plain, make(plain), alpha)
    assert [len(g["params"]) for g in optimizer.param_groups] == [2, 1, 3, 1]
    train(plain, optimizer, F.cross_entropy, schedule=cosine(optimizer))
    assert largest_difference(pgt, plain, plain[-1], alpha) <= 1e-11


def test_gradients_that_are_there_are_those_of_plain_training():
    """In the middle of an accumulation: the backbone's are alpha times what they were."""
    pgt, plain = network(False), network(False)
    optimizers = [OPTIMIZERS["momentum"](model.parameters()) for model in (pgt, plain)]
    for model in (pgt, plain):
        cross_entropy(model(batch(0)[0]), batch(0)[1], alpha=0.3).backward()
    optimizers[1] = equivalent_training(plain, optimizers[1], 0.3)
    cross_entropy(pgt(batch(1)[0]), batch(1)[1], alpha=0.3).backward()
    F.cross_entropy(plain(batch(1)[0]), batch(1)[1]).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert largest_difference(pgt, plain, plain[-1], 0.3) <= 1e-12


def test_logits_and_values_are_those_of_alpha_z():
    model = network(False)
    x, _ = batch(0)
    z = model(x).detach()
    equivalent_training(model, torch.optim.SGD(model.parameters(), lr=0.1), 0.3)
    assert torch.allclose(model(x), 0.3 * z, rtol=1e-14)


def test_a_head_without_bias_or_frozen_and_a_convolution():
    def loss(z: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(z, y, alpha=0.5)

    for make in (lambda: network(False, bias=False), convolution):
        pgt, plain = make(), make()
        head = plain[-1]
        train(pgt, torch.optim.SGD(pgt.parameters(), lr=0.05), loss)
        optimizer = equivalent_training(plain, torch.optim.SGD(plain.parameters(), lr=0.05), 0.5)
        train(plain, optimizer, F.cross_entropy)
        assert largest_difference(pgt, plain, head, 0.5) <= 1e-12

    pgt, plain = network(False), network(False)
    for model in (pgt, plain):
        model[-1].requires_grad_(False)
    train(pgt, torch.optim.SGD(pgt[:-1].parameters(), lr=0.05), loss)
    optimizer = equivalent_training(plain, torch.optim.SGD(plain[:-1].parameters(), lr=0.05), 0.5)
    assert len(optimizer.param_groups) == 1
    train(plain, optimizer, F.cross_entropy)
    assert largest_difference(pgt, plain, plain[-1], 0.5) <= 1e-12


class Pointwise(nn.Conv1d):
    """Logits by a 1x1 convolution, as in segmentation."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.unsqueeze(-1)).squeeze(-1)


def convolution() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), Pointwise(12, 4, 1)).double()


# Clipping -----------------------------------------------------------------------------------------

CLIPPING = {
    "agc": {"agc": 0.02},
    "agc, head too": {"agc": 0.02, "head": None},
    "agc, weights below eps": {"agc": 0.005, "head": None, "eps": 4.0},
    "tensor_norm": {"tensor_norm": 0.05},
    "value": {"value": 0.01},
    "two": {"agc": 0.02, "tensor_norm": 0.02},
}


@pytest.mark.parametrize("name", ["momentum", "AdamW"])
@pytest.mark.parametrize("clipping", CLIPPING)
def test_attached_clipping_goes_with_the_optimizer(clipping, name):
    """It is attached before; what it does after is what it does with PGT, and so it reports."""
    alpha, options = 0.3, CLIPPING[clipping]
    pgt, plain = network(False), network(False)
    optimizer = OPTIMIZERS[name](pgt.parameters())
    wanted = clip_grads_before_step(optimizer, pgt, **options)
    train(pgt, optimizer, lambda z, y: cross_entropy(z, y, alpha=alpha))
    optimizer = OPTIMIZERS[name](plain.parameters())
    handle = clip_grads_before_step(optimizer, plain, **options)
    train(plain, equivalent_training(plain, optimizer, alpha), F.cross_entropy)
    assert largest_difference(pgt, plain, plain[-1], alpha) <= 1e-11
    for method, report in wanted.last_report.items():
        ours = handle.last_report[method]
        assert report.clipped > 0 or clipping == "two"
        assert [layer[:2] for layer in ours.values()] == [layer[:2] for layer in report.values()]
        assert ours.largest == pytest.approx(report.largest, rel=1e-9)


def test_a_handle_of_clipping_follows_it():
    model = network(False)
    first = sgd(model)
    with clip_grads_before_step(first, tensor_norm=1e-9) as handle:
        second = equivalent_training(model, first, 0.5)
        third = equivalent_training(model, second, 0.5)  # as at alpha 0.25
        train(model, third, F.cross_entropy, range(1))
        assert handle.last_report["tensor_norm"].clipped == 6
        norms = [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]
        assert norms == pytest.approx([0.25e-9] * 4 + [1e-9] * 2)
    handle.last_report.clear()
    for optimizer in (first, second, third):
        optimizer.step()
    assert not handle.last_report


def test_what_breaks_the_identity_at_the_step_is_refused():
    model = network(False)
    start = copy.deepcopy(model.state_dict())
    optimizer = sgd(model)
    with (
        clip_grads_before_step(optimizer, value=1.0, norm=1.0),
        pytest.raises(ValueError, match="clipping by the norm of all gradients"),
    ):
        equivalent_training(model, optimizer, 0.5)
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):

        def mine(*_: object) -> None: ...

        hook = register(mine)
        with pytest.raises(ValueError, match=r"no hooks .* but got .*mine"):
            equivalent_training(model, optimizer, 0.5)
        hook.remove()
    assert all(torch.equal(value, start[key]) for key, value in model.state_dict().items())


# Finding and refusing -----------------------------------------------------------------------------


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_the_head_is_found_by_name_module_or_habit():
    class Timm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)
            self.body = nn.Linear(4, 4)

        def get_classifier(self) -> nn.Module:
            return self.fc

    model = Timm()
    start = copy.deepcopy(model.state_dict())
    equivalent_training(model, sgd(model), 0.5)
    assert torch.equal(model.fc.weight, 0.5 * start["fc.weight"])
    assert torch.equal(model.body.weight, start["body.weight"])
    for head in ("fc", model.fc):
        equivalent_training(model, sgd(model), 0.5, head=head)
    assert torch.equal(model.fc.weight, 0.125 * start["fc.weight"])


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(4, 12), nn.Linear(12, 4, bias=False))
    model[1].weight = model[0].weight
    return model


BAD = [
    (lambda: network(False), {"alpha": 0.0}, ValueError, r"`alpha` to be in \(0, 1\], but got 0"),
    (lambda: network(False), {"alpha": 1.5}, ValueError, "`alpha`"),
    (lambda: network(False), {"head": "fc"}, ValueError, "`head` to name a module .* got 'fc'"),
    (lambda: network(False), {"head": nn.Linear(2, 2)}, ValueError, "not in this Sequential"),
    (lambda: network(False), {"head": 3}, TypeError, "`head` to be a module, .* got int"),
    (lambda: network(True), {"head": "1"}, ValueError, "a linear layer .* got a BatchNorm1d"),
    (lambda: nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), {}, ValueError, "got a LayerNorm"),
    (
        lambda: nn.Sequential(weight_norm(nn.Linear(2, 2))),
        {"head": "0"},
        ValueError,
        "parametrised",
    ),
    (tied, {}, ValueError, "shared by 0.weight and 1.weight: a tied head"),
]


@pytest.mark.parametrize(("make", "arguments", "error", "message"), BAD)
def test_refuses(make, arguments, error, message):
    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=message):
        equivalent_training(**{"model": model, "optimizer": sgd(model), "alpha": 0.3, **arguments})
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


def test_refuses_optimizers_that_it_does_not_know():
    model = network(False)
    for optimizer in (
        torch.optim.RMSprop(model.parameters()),
        torch.optim.NAdam(model.parameters()),
    ):
        with pytest.raises(TypeError, match=r"SGD, Adam or AdamW, but got (RMSprop|NAdam)"):
            equivalent_training(model, optimizer, 0.3)

    class Mine(torch.optim.SGD):
        pass

    with pytest.raises(TypeError, match="but got Mine"):
        equivalent_training(model, Mine(model.parameters(), lr=0.1), 0.3)
    foreign = torch.optim.SGD([nn.Parameter(torch.zeros(7))], lr=0.1)
    with pytest.raises(ValueError, match=r"only parameters of `model`, .* shape \(7,\)"):
        equivalent_training(model, foreign, 0.3)


def test_the_optimizer_that_was_given_is_not_changed():
    model = network(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.2)
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    equivalent_training(model, optimizer, 0.3)
    after = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    assert after == groups


def test_names_of_parameters_go_with_them():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    optimizer = equivalent_training(model, optimizer, alpha=0.5)
    named = dict(model.named_parameters())
    for group in optimizer.param_groups:
        assert all(map(operator.is_, map(named.get, group["param_names"]), group["params"]))
        assert len(group["param_names"]) == len(group["params"])
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert sorted(names) == sorted(named)
    with clip_grads_before_step(optimizer, norm=1.0):
        F.cross_entropy(model(torch.ones(2, 3)), torch.tensor([0, 1])).backward()
        optimizer.step()
