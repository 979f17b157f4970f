"""The head: found where the model shows it, refused where it does not."""

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import powergrad
from powergrad import FilterMonitor, adaptive_clip_grad_, equivalent_training, fold_alpha
from powergrad.head import find_head, find_heads


def train_plainly(model: nn.Module, head: Any = None, **more: Any) -> object:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return equivalent_training(model, optimizer, 0.25, head, **more)


# Both scale the head of `model` by 0.25.
CALLS: dict[str, Callable[..., Any]] = {
    "fold_alpha": lambda model, head=None, **more: fold_alpha(head, 0.25, model=model, **more),
    "equivalent_training": train_plainly,
}
both = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def assert_refused(call: Any, model: nn.Module, match: str, head: Any = None, **more: Any) -> None:
    """A ValueError, and the model is as it was."""
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=match):
        call(model, head, **more)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


class Net(nn.Module):
    """Modules in this order (linear layers, where sizes are given), and how they are called."""

    def __init__(self, run: Callable[..., Any] = torch.add, **children: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.run = run
        for name, child in children.items():
            self.add_module(name, nn.Linear(*child) if isinstance(child, tuple) else child)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, x, *args, **kwargs)


TWO = "cls_classifier distillation_classifier"


def in_order(net: Any, x: Tensor) -> Tensor:
    """The first layer takes the outputs of the second."""
    head, body = net.children()
    return head(F.relu(body(x)))


def taught(net: Any, x: Tensor) -> SimpleNamespace:
    """As transformers' DeiT with a teacher: the logits are the mean of two heads'."""
    features = net.body(x).relu()
    logits = (net.cls_classifier(features) + net.distillation_classifier(features)) / 2
    return SimpleNamespace(loss=None, logits=logits)


def teacher(classes: int) -> Net:
    return Net(taught, body=(3, 8), **dict.fromkeys(TWO.split(), (8, classes)))


def two_tasks(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return net.scores(net.body(x)), net.fc(net.body(x))


AMBIGUOUS: dict[str, tuple[nn.Module, str, str]] = {  # candidates, and one of them
    "head first": (Net(in_order, head=(8, 5), body=(3, 8)), "body head", "head"),
    "body named as a head": (Net(in_order, b=(8, 5), fc=(3, 8)), "b fc", "b"),
    "all of one width": (Net(in_order, b=(3, 3), a=(3, 3)), "a b", "b"),
    "two tasks": (Net(two_tasks, body=(3, 8), scores=(8, 5), fc=(8, 4)), "fc scores", "scores"),
    # As GoogLeNet's auxiliary classifiers, with as many classes as a layer has inputs.
    "of the width": (Net(two_tasks, body=(3, 8), scores=(8, 8), fc=(8, 8)), "fc scores", "scores"),
    "teacher": (teacher(5), TWO, "cls_classifier"),
    "teacher, classes as wide as the body": (teacher(8), TWO, "cls_classifier"),
}


@both
@pytest.mark.parametrize("name", AMBIGUOUS)
def test_ambiguous_head_raises_and_a_named_one_is_scaled(name: str, call, tmp_path) -> None:
    model, candidates, head = copy.deepcopy(AMBIGUOUS[name])
    for candidate in candidates.split():
        assert_refused(call, model, rf"\b{candidate}\b.*`head`")
    with pytest.raises(ValueError, match="`head=None`"):
        adaptive_clip_grad_(model)
    with pytest.raises(ValueError, match="`features`"):
        FilterMonitor(model, tmp_path, features=True)
    start = copy.deepcopy(model.state_dict())
    call(model, head)
    for key, value in model.state_dict().items():
        assert torch.equal(value, (0.25 if key.startswith(f"{head}.") else 1) * start[key]), key


def test_declared_heads_are_scaled_together() -> None:
    """As timm's models declare them."""
    model: Any = teacher(5)
    declared = [model.cls_classifier, model.distillation_classifier]
    model.get_classifier = lambda: tuple(declared)
    for outer in (Net(model=model), nn.DataParallel(model), torch.compile(model)):
        assert list(find_heads(outer)) == declared  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=TWO.replace(" ", ", ")):
        find_head(model)
    assert_refused(CALLS["fold_alpha"], model, "one of several", "cls_classifier")
    start = copy.deepcopy(model.state_dict())
    assert list(fold_alpha(None, 0.25, model=model).children()) == declared
    for key, value in model.state_dict().items():
        assert torch.equal(value, (1 if "body" in key else 0.25) * start[key])


TUTORIAL = Net(  # PyTorch's
    a=nn.Conv2d(3, 6, 5), b=nn.Conv2d(6, 16, 5), fc1=(400, 120), fc2=(120, 84), fc3=(84, 10)
)
BLOCK = Net(heads=Net(a=(8, 4), b=(8, 4)), qkv=(8, 24), projection=(8, 8))
PARTS = {"embedding": nn.Embedding(9, 8), "blocks": nn.Sequential(BLOCK, copy.deepcopy(BLOCK))}
RECURRENT = {"encoder": nn.Embedding(9, 4), "inputs": (4, 3), "rnn": nn.LSTM(3, 6)}
FOUND: dict[str, tuple[nn.Module, str]] = {
    "tutorial": (TUTORIAL, "fc3"),
    "attention heads": (Net(**PARTS, norm=nn.LayerNorm(8), lm_head=(8, 9)), "lm_head"),
    "recurrent": (Net(**RECURRENT, decoder=(6, 9)), "decoder"),
    "named": (Net(body=nn.Conv2d(4, 4, 1), classifier=(4, 4)), "classifier"),
    "sequential": (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), "2"),
    "nested": (nn.Sequential(nn.Linear(4, 4), nn.Sequential(TUTORIAL, nn.ReLU())), "1.0.fc3"),
}


@pytest.mark.parametrize("name", FOUND)
def test_head_of_common_models_is_found(name: str) -> None:
    model, head = FOUND[name]
    assert find_head(model) is model.get_submodule(head)


def network(*after: nn.Module, **config: Any) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 5), *after)
    model.config = SimpleNamespace(**config)  # pyright: ignore[reportArgumentType]
    return model


@pytest.mark.parametrize("alpha", [0.5, 1, 2.5, np.float32(0.25)])
@pytest.mark.parametrize("head", [2, "2", None])
def test_only_the_head_is_scaled(head: Any, alpha: Any) -> None:
    # None of these caps the logits of the head.
    caps = {"attn_logit_softcapping": 50.0, "router_logit_softcapping": 30.0}
    model = network(**caps, final_logit_softcapping=None, vocab_size=3)
    start = copy.deepcopy(model.state_dict())
    assert fold_alpha(model[2] if head == 2 else head, alpha, model=model) is model[2]
    for key, value in model.state_dict().items():
        assert torch.equal(value, (float(alpha) if key.startswith("2.") else 1) * start[key])
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())


@both
def test_cap_of_a_loss_in_the_model_is_scaled(call) -> None:
    losses = [powergrad.CrossEntropyLoss(0.25, softcap=cap) for cap in (8.0, None)]
    call(Net(losses=nn.ModuleList(losses), body=(3, 8), fc=(8, 5)))
    assert [loss.options["softcap"] for loss in losses] == [2.0, None]


@both
@pytest.mark.parametrize("name", ["final_logit_softcapping", "logits_soft_cap"])
def test_cap_in_a_configuration_raises(name: str, call) -> None:
    assert_refused(call, nn.Sequential(network(**{name: 30.0})), rf"`config\.{name}` = 30\.0")


@pytest.mark.parametrize("last", [nn.Softmax(1), nn.Linear(5, 2), nn.LogSoftmax(1)])
def test_modules_after_the_head_of_a_sequential(last: nn.Module) -> None:
    model = nn.Sequential(network(nn.ReLU(), last))
    if isinstance(last, nn.LogSoftmax):
        fold_alpha("0.2", 0.25, model=model)
    else:
        assert_refused(CALLS["fold_alpha"], model, type(last).__name__, "0.2")


def tied(tie: Callable[[Tensor], Tensor] | None) -> Any:
    model: Any = Net(lambda net, x: net.head(net.embedding(x)), embedding=nn.Embedding(7, 4))
    model.head = nn.Linear(4, 7, bias=False)
    if tie is None:
        model.head.weight = model.embedding.weight
    else:
        model.head.weight.data = tie(model.embedding.weight.data)
    return model


@both
@pytest.mark.parametrize("tie", [None, lambda w: w, lambda w: w[:4].t()])
@pytest.mark.parametrize("head", ["head", None])
def test_tied_heads_raise(tie, head, call) -> None:
    """By being one parameter, or by sharing memory."""
    assert_refused(call, tied(tie), r"embedding\.weight and head\.weight", head)


def test_parts_of_one_buffer_are_not_tied() -> None:
    """As where all parameters are views of one flat tensor. A sparse buffer has no address."""
    model = tied(lambda w: w)
    model.register_buffer("graph", torch.eye(2).to_sparse())
    flat = torch.randn(56)
    model.embedding.weight.data, model.head.weight.data = flat[:28].view(7, 4), flat[28:].view(7, 4)
    fold_alpha(None, 0.5, model=model)
    assert not torch.equal(model.head.weight, model.embedding.weight)


def with_scale(layer: nn.Module) -> nn.Module:
    layer.scale = nn.Parameter(torch.ones(()))
    return layer


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    ("change", "word"),
    [
        (with_scale, "scale"),
        (nn.utils.parametrizations.weight_norm, "original0.*parametrised"),
        (nn.utils.weight_norm, "weight_g.*parametrised"),
    ],
)
def test_heads_with_other_parameters_raise(change, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        fold_alpha(change(nn.Linear(3, 2)), 0.5)
    assert_refused(CALLS["equivalent_training"], nn.Sequential(change(nn.Linear(3, 2))), word)


@pytest.mark.parametrize(
    ("arguments", "error", "word"),
    [
        *(({"alpha": alpha}, ValueError, "`alpha`") for alpha in (0, -0.5, math.nan, math.inf)),
        ({"alpha": torch.tensor(0.5)}, TypeError, "`alpha`"),
        ({"head": "2", "model": None}, TypeError, "`model`.*str"),
        ({"head": network(), "model": None}, ValueError, "Sequential"),
        ({"head": nn.Linear(5, 4)}, ValueError, "`head`.*Linear"),
        ({"head": "9"}, ValueError, "'9'"),
        ({"head": 3}, ValueError, "`head`.*int"),
        ({"model": nn.ReLU()}, ValueError, "ReLU"),
    ],
)
def test_bad_arguments_raise(arguments: Any, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        fold_alpha(**{"head": None, "alpha": 0.5, "model": network(), **arguments})
