"""The head: found where the model shows it, refused where it does not, proven by an example."""

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
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

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))


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


def after(function: Callable[[Tensor], Any]) -> Net:
    """A function of the logits after the head."""
    return Net(lambda net, x: function(net.fc(F.relu(net.body(x)))), body=(3, 8), fc=(8, 5))


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


AMBIGUOUS: dict[str, tuple[nn.Module, str, str]] = {  # candidates, and heads
    "head first": (Net(in_order, head=(8, 5), body=(3, 8)), "body head", "head"),
    "body named as a head": (Net(in_order, b=(8, 5), fc=(3, 8)), "b fc", "b"),
    "all of one width": (Net(in_order, b=(3, 3), a=(3, 3)), "a b", "b"),
    "two tasks": (Net(two_tasks, body=(3, 8), scores=(8, 5), fc=(8, 4)), "fc scores", "scores"),
    # As GoogLeNet's auxiliary classifiers, with as many classes as a layer has inputs.
    "of the width": (Net(two_tasks, body=(3, 8), scores=(8, 8), fc=(8, 8)), "fc scores", "scores"),
    "teacher": (teacher(5), TWO, TWO),
    "teacher, classes as wide as the body": (teacher(8), TWO, TWO),
}


def logits_of(model: nn.Module) -> Tensor:
    with torch.no_grad():
        output: Any = copy.deepcopy(model).eval()(X)
    return output[0] if isinstance(output, tuple) else getattr(output, "logits", output)


@both
@pytest.mark.parametrize("name", AMBIGUOUS)
def test_ambiguous_head_raises_and_an_example_finds_it(name: str, call, tmp_path) -> None:
    model, candidates, heads = copy.deepcopy(AMBIGUOUS[name])
    for candidate in candidates.split():
        assert_refused(call, model, rf"\b{candidate}\b.*`head`.*`example_inputs`")
    with pytest.raises(ValueError, match="`head=None`"):
        adaptive_clip_grad_(model)
    with pytest.raises(ValueError, match="`features`"):
        FilterMonitor(model, tmp_path, features=True)
    before, start = logits_of(model), copy.deepcopy(model.state_dict())
    call(model, example_inputs=X)
    torch.testing.assert_close(logits_of(model), 0.25 * before)
    for key, value in model.state_dict().items():
        factor = 0.25 if key.rpartition(".")[0] in heads.split() else 1
        assert torch.equal(value, factor * start[key]), key


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


NOT_SCALING: list[Callable[[Tensor], Tensor]] = [
    lambda z: 30 * torch.tanh(z / 30),
    lambda z: z.softmax(1),
    lambda z: z + torch.arange(5),
    lambda z: F.normalize(z, dim=1),
    torch.ones_like,
    torch.zeros_like,
    lambda z: z * torch.nan,
]


@both
@pytest.mark.parametrize("head", [None, "fc"])
@pytest.mark.parametrize("function", NOT_SCALING)
def test_example_shows_a_function_after_the_head(function, head: str | None, call) -> None:
    model = after(function)
    model.get_parameter("fc.weight").data *= 0.1  # small logits hardly feel a cap
    assert_refused(call, model, "scale.*fc", head, example_inputs=X)


SCALING: list[Callable[[Tensor], Tensor]] = [
    F.relu,
    lambda z: z.log_softmax(1),  # softmax ignores a constant per example
    lambda z: z.masked_fill(torch.arange(5) == 2, -torch.inf),
    lambda z: 3 * z[:, None, :],
]


@pytest.mark.parametrize("function", SCALING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_functions_that_scale_with_the_logits_are_allowed(function, dtype) -> None:
    model = after(function).to(dtype)
    start = model.get_parameter("fc.weight").clone()
    fold_alpha(None, 0.25, model=model, example_inputs=X.to(dtype))
    assert torch.equal(model.get_parameter("fc.weight"), 0.25 * start)


@pytest.mark.filterwarnings("ignore:Skipping serialization:UserWarning")  # in PyTorch 2.6
def test_an_example_goes_through_compiled_parts() -> None:
    model: Any = after(torch.clone)
    model.body, model.fc = map(torch.compile, model.children())
    before = logits_of(model)
    fold_alpha(None, 0.25, model=model, example_inputs=X)
    torch.testing.assert_close(logits_of(model), 0.25 * before)


def test_one_logit_per_example_scales() -> None:
    model = Net(lambda net, x: net.fc(x[:, :, None]).flatten(), fc=nn.Conv1d(3, 1, 1))
    fold_alpha("fc", 0.25, model=model, example_inputs=X)


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


TOKENS = torch.arange(7)


@both
@pytest.mark.parametrize("tie", [None, lambda w: w, lambda w: w[:4].t()])
@pytest.mark.parametrize(("head", "example"), [("head", None), ("head", TOKENS), (None, None)])
def test_tied_heads_raise(tie, head, example, call) -> None:
    """By being one parameter, or by sharing memory."""
    names = r"embedding\.weight and head\.weight"
    assert_refused(call, tied(tie), names, head, example_inputs=example)


def test_parts_of_one_buffer_are_not_tied() -> None:
    """As where all parameters are views of one flat tensor. A sparse buffer has no address."""
    model = tied(lambda w: w)
    model.register_buffer("graph", torch.eye(2).to_sparse())
    flat = torch.randn(56)
    model.embedding.weight.data, model.head.weight.data = flat[:28].view(7, 4), flat[28:].view(7, 4)
    fold_alpha(None, 0.5, model=model, example_inputs=TOKENS)
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
        ({"head": nn.Linear(3, 2), "model": None, "example_inputs": X}, TypeError, "`model`"),
        ({"head": network(), "model": None}, ValueError, "Sequential"),
        ({"head": nn.Linear(5, 4)}, ValueError, "`head`.*Linear"),
        ({"head": "9"}, ValueError, "'9'"),
        ({"head": 3}, ValueError, "`head`.*int"),
        ({"model": nn.ReLU()}, ValueError, "ReLU"),
        ({"model": after(lambda z: {"scores": z}), "example_inputs": X}, TypeError, "dict"),
    ],
)
def test_bad_arguments_raise(arguments: Any, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        fold_alpha(**{"head": None, "alpha": 0.5, "model": network(), **arguments})


def count(net: Any, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Random, and changes buffers: in place, and by assignment."""
    net.count = net.count + 1
    x = F.dropout(net.body(net.norm(x)), training=True)
    return scale * net.head(x), x


@pytest.mark.parametrize("example", [X, (X, 2.0), {"x": X, "scale": 2.0}, {"y": X}])
def test_example_leaves_the_model_as_it_was(example: Any) -> None:
    model: Any = Net(count, norm=nn.BatchNorm1d(3), head=(8, 4), body=(3, 8))
    model.register_buffer("count", torch.zeros(()))
    model.norm.eval()
    count_, state, random = model.count, copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with (
        pytest.raises(TypeError) if isinstance(example, dict) and "y" in example else nullcontext()
    ):
        fold_alpha(None, 1.0, model=model, example_inputs=example)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert model.count is count_
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training
    assert not model.norm.training
