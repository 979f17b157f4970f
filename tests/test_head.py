"""The head: found where the model shows it, refused where it does not, proven by an example."""

from __future__ import annotations

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

from powergrad import FilterMonitor, adaptive_clip_grad_, equivalent_training, fold_alpha
from powergrad.head import find_head, find_heads

CLASSES, X = 5, torch.randn(6, 3, generator=torch.Generator().manual_seed(0))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


# Both scale the head of `model` by 0.25.
CALLS: dict[str, Callable[..., Any]] = {
    "fold_alpha": lambda model, head=None, **more: fold_alpha(head, 0.25, model=model, **more),
    "equivalent_training": lambda model, head=None, **more: equivalent_training(
        model, sgd(model), 0.25, head, **more
    ),
}
both = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def assert_refused(call: Any, model: nn.Module, match: str, head: Any = None, **more: Any) -> None:
    """A ValueError, and the model is as it was."""
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=match):
        call(model, head, **more)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


# Finding the head ---------------------------------------------------------------------------------


class Net(nn.Module):
    """Modules in this order (linear layers, where sizes are given), and how they are called."""

    def __init__(self, run: Callable[[Any, Tensor], Any] | None = None, **children: Any) -> None:
        super().__init__()
        self.run = run
        for name, child in children.items():
            self.add_module(name, nn.Linear(*child) if isinstance(child, tuple) else child)

    def forward(self, x: Tensor) -> Any:
        assert self.run is not None
        return self.run(self, x)


def reversed_net(width: int = 8, classes: int = CLASSES) -> Net:
    return Net(lambda net, x: net.b(F.relu(net.a(x))), b=(width, classes), a=(3, width))


def head_first() -> Net:
    body = nn.Sequential(nn.Linear(3, 8), nn.ReLU())
    return Net(lambda net, x: net.head(net.body(x)), head=(8, CLASSES), body=body)


def auxiliary() -> Net:
    """As torchvision's segmentation networks: the auxiliary classifier is registered last."""

    def run(net: Any, x: Tensor) -> dict[str, Tensor]:
        features = net.backbone(x[:, :, None, None])
        return {"out": net.classifier(features), "aux": net.aux_classifier(features)}

    return Net(
        run,
        backbone=nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU()),
        classifier=nn.Sequential(nn.Conv2d(8, 4, 1), nn.ReLU(), nn.Conv2d(4, CLASSES, 1)),
        aux_classifier=nn.Sequential(nn.ReLU(), nn.Conv2d(8, CLASSES, 1)),
    )


def teacher(classes: int = CLASSES) -> Net:
    """As transformers' DeiT with a teacher: the logits are the mean of two heads'."""

    def run(net: Any, x: Tensor) -> SimpleNamespace:
        x = net.body(x)
        logits = (net.cls_classifier(x) + net.distillation_classifier(x)) / 2
        return SimpleNamespace(loss=None, logits=logits)

    heads = {"cls_classifier": (8, classes), "distillation_classifier": (8, classes)}
    return Net(run, body=nn.Sequential(nn.Linear(3, 8), nn.ReLU()), **heads)


def two_inside() -> Net:
    """As torchvision's LRASPP: two classifiers inside one part of the network."""
    run = lambda net, x: net.low(x) + net.high(x.square())  # noqa: E731
    return after(torch.clone, Net(run, low=(8, CLASSES), high=(8, CLASSES)))


def after(function: Callable[[Tensor], Any], head: Any = (8, CLASSES)) -> Net:
    """A function of the logits after the head."""
    return Net(lambda net, x: function(net.fc(F.relu(net.body(x)))), body=(3, 8), fc=head)


TWO = "cls_classifier distillation_classifier"
AMBIGUOUS: dict[str, tuple[Callable[[], nn.Module], str, str]] = {  # candidates, and heads
    "head first": (head_first, "body.0 head", "head"),
    "nameless head first": (reversed_net, "a b", "b"),
    "all of one width": (lambda: reversed_net(3, 3), "a b", "b"),
    "head that nothing takes": (lambda: reversed_net(7, 3), "a b", "b"),
    "auxiliary": (auxiliary, "aux_classifier.1 classifier.2", "classifier.2"),
    "teacher": (teacher, TWO, TWO),
    "teacher, classes as wide as the body": (lambda: teacher(8), TWO, TWO),
    "two inside": (two_inside, "fc.high fc.low", "fc.high fc.low"),
}


def logits_of(model: nn.Module) -> Tensor:
    with torch.no_grad():
        output: Any = copy.deepcopy(model).eval()(X)
    if isinstance(output, Tensor):
        return output
    return output["out"] if isinstance(output, dict) else output.logits


@both
@pytest.mark.parametrize("name", AMBIGUOUS)
def test_ambiguous_head_raises_and_an_example_finds_it(name: str, call, tmp_path) -> None:
    make, candidates, heads = AMBIGUOUS[name]
    torch.manual_seed(0)
    model = make()
    for candidate in candidates.split():
        assert_refused(call, model, f"{candidate}.*`head`.*`example_inputs`")
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
    torch.manual_seed(0)
    model: Any = teacher()
    declared = [model.cls_classifier, model.distillation_classifier]
    model.get_classifier = lambda: tuple(declared)
    for outer in (Net(model=model), nn.DataParallel(model), torch.compile(model)):
        assert list(find_heads(outer)) == declared  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=TWO.replace(" ", ", ")):
        find_head(model)
    for call in CALLS.values():
        assert_refused(call, model, "one of several .*distillation_classifier", "cls_classifier")
    start = copy.deepcopy(model.state_dict())
    assert list(fold_alpha(None, 0.25, model=model).children()) == declared
    for key, value in model.state_dict().items():
        assert torch.equal(value, (1 if "body" in key else 0.25) * start[key])


CONVOLUTIONS = {"conv1": nn.Conv2d(3, 6, 5), "conv2": nn.Conv2d(6, 16, 5)}
TUTORIAL = Net(**CONVOLUTIONS, fc1=(400, 120), fc2=(120, 84), fc3=(84, 10))  # PyTorch's
BLOCK = Net(heads=Net(a=(8, 4), b=(8, 4)), qkv=(8, 24), projection=(8, 8))
ATTENTION = {"embedding": nn.Embedding(9, 8), "blocks": nn.Sequential(BLOCK, copy.deepcopy(BLOCK))}
RECURRENT = {"encoder": nn.Embedding(9, 4), "rnn": nn.LSTM(4, 6)}
FOUND: dict[str, tuple[nn.Module, str]] = {
    "tutorial": (TUTORIAL, "fc3"),
    "attention heads": (Net(**ATTENTION, norm=nn.LayerNorm(8), lm_head=(8, 9)), "lm_head"),
    "DistilBERT": (Net(body=(3, 4), pre_classifier=(4, 4), classifier=(4, 2)), "classifier"),
    "recurrent": (Net(**RECURRENT, decoder=(6, 9)), "decoder"),
    "named": (Net(body=(4, 4), classifier=nn.Sequential(nn.Linear(4, 4))), "classifier.0"),
    "sequential": (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), "2"),
    "nested": (nn.Sequential(nn.Linear(4, 4), nn.Sequential(TUTORIAL, nn.ReLU())), "1.0.fc3"),
    "parallel": (nn.DataParallel(nn.Sequential(nn.Linear(3, 8), nn.ReLU())), "module.0"),
}


@pytest.mark.parametrize("name", FOUND)
def test_head_of_common_models_is_found(name: str) -> None:
    model, head = FOUND[name]
    assert find_head(model) is model.get_submodule(head)


# Scaling the head must scale the logits -----------------------------------------------------------


def network(*after: nn.Module, **config: Any) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, CLASSES), *after)
    if config:
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
@pytest.mark.parametrize(
    "name", ["final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"]
)
def test_cap_in_a_configuration_raises(name: str, call) -> None:
    assert_refused(call, nn.Sequential(network(**{name: 30.0})), rf"`config\.{name}` = 30\.0")


NOT_LINEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "cap": lambda z: 30 * torch.tanh(z / 30),
    "softmax": lambda z: z.softmax(1),
    "clamp": lambda z: z.clamp(-10, 10),
    "offset": lambda z: z + torch.arange(CLASSES),
    "normalised": lambda z: F.normalize(z, dim=1),
    "unchanged": torch.ones_like,
    "nan": lambda z: z * torch.nan,
}


@both
@pytest.mark.parametrize("head", [None, "fc"])
@pytest.mark.parametrize("name", NOT_LINEAR)
def test_example_shows_a_function_after_the_head(name: str, head: str | None, call) -> None:
    torch.manual_seed(0)
    model = after(NOT_LINEAR[name])
    model.get_parameter("fc.weight").data *= 0.1  # small logits hardly feel a cap
    assert_refused(call, model, "scale.*fc", head, example_inputs=X)


@pytest.mark.parametrize(
    "function",
    [
        F.relu,
        lambda z: z.log_softmax(1),  # softmax ignores a constant per example
        lambda z: z.masked_fill(torch.arange(CLASSES) == 2, -torch.inf),
        lambda z: 3 * z[:, None, :],
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_functions_that_scale_with_the_logits_are_allowed(function, dtype) -> None:
    torch.manual_seed(0)
    model = after(function).to(dtype)
    start = model.get_parameter("fc.weight").clone()
    fold_alpha(None, 0.25, model=model, example_inputs=X.to(dtype))
    assert torch.equal(model.get_parameter("fc.weight"), 0.25 * start)


@both
@pytest.mark.parametrize(
    ("after", "refused"),
    [
        (nn.Tanh(), "Tanh"),
        (nn.Softmax(1), "Softmax"),
        (nn.Linear(CLASSES, 2), "Linear"),
        (nn.Sequential(nn.Dropout(), nn.Sigmoid()), "Dropout|Sigmoid"),
        (nn.LogSoftmax(1), ""),
        (nn.Sequential(nn.ReLU(), nn.Flatten()), ""),
    ],
)
def test_modules_after_the_head_of_a_sequential(after: nn.Module, refused: str, call) -> None:
    if refused:
        assert_refused(call, network(after), refused, "2")
        assert_refused(call, nn.Sequential(network(after)), refused, "0.2")
    else:
        call(network(after), "2")


def tied(tie: Callable[[Tensor], Tensor] | None) -> Any:
    model: Any = Net(lambda net, x: net.head(net.embedding(x)), embedding=nn.Embedding(7, 4))
    model.head = nn.Linear(4, 7, bias=False)
    if tie is None:
        model.head.weight = model.embedding.weight
    else:
        model.head.weight.data = tie(model.embedding.weight.data)
    return model


TOKENS = torch.arange(7)
TIES = [None, lambda w: w, lambda w: w[1:6], lambda w: w[:4].t()]


@both
@pytest.mark.parametrize(
    ("tie", "head", "example"),
    [
        *((tie, "head", example) for tie in TIES for example in (None, TOKENS)),
        *((tie, None, TOKENS) for tie in TIES[:2]),
    ],
)
def test_tied_heads_raise(tie, head, example, call) -> None:
    """By being one parameter, or by sharing memory."""
    names = r"embedding\.weight and head\.weight"
    assert_refused(call, tied(tie), names, head, example_inputs=example)


def test_parts_of_one_buffer_are_not_tied() -> None:
    """As where all parameters are views of one flat tensor."""
    model = tied(lambda w: w)
    flat = torch.randn(56)
    model.embedding.weight.data, model.head.weight.data = flat[:28].view(7, 4), flat[28:].view(7, 4)
    fold_alpha(None, 0.5, model=model, example_inputs=TOKENS)
    assert not torch.equal(model.head.weight, model.embedding.weight)


class Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)
        self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    ("make", "word"),
    [
        (Scaled, "scale"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), "parametrised"),
        (lambda: nn.utils.weight_norm(nn.Linear(3, 2)), "parametrised"),
    ],
)
def test_heads_with_other_parameters_raise(make, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        fold_alpha(make(), 0.5)
    for call in CALLS.values():
        assert_refused(call, nn.Sequential(make()), word)


@pytest.mark.parametrize(
    ("arguments", "error", "word"),
    [
        *(({"alpha": alpha}, ValueError, "`alpha`") for alpha in (0, -0.5, math.nan, math.inf)),
        ({"alpha": torch.tensor(0.5)}, TypeError, "`alpha`"),
        ({"head": "2", "model": None}, TypeError, "`head`.*str"),
        ({"model": None}, TypeError, "`head`.*NoneType"),
        ({"head": network(), "model": None}, ValueError, "Sequential"),
        ({"head": nn.Linear(5, 4)}, ValueError, "`head`"),
        ({"head": "1"}, ValueError, "ReLU"),
        ({"head": "9"}, ValueError, "'9'"),
        ({"head": 3}, TypeError, "`head`.*int"),
        ({"head": nn.Linear(3, 2), "model": None, "example_inputs": X}, TypeError, "`model`"),
        ({"example_inputs": 3}, TypeError, "`example_inputs`"),
        ({"model": after(lambda z: {"scores": z}), "example_inputs": X}, TypeError, "dict"),
        ({"model": after(torch.zeros_like), "example_inputs": X}, ValueError, "zeros"),
    ],
)
def test_bad_arguments_raise(arguments: Any, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        fold_alpha(**{"head": None, "alpha": 0.5, "model": network(), **arguments})


class Counting(nn.Module):
    """Random, and with buffers that each call changes, one of them by assignment."""

    count: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head, self.body = nn.BatchNorm1d(3), nn.Linear(8, 4), nn.Linear(3, 8)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        self.count = self.count + 1
        self.total += 1
        x = F.dropout(self.body(self.norm(x)), training=True)
        return scale * self.head(x), x


@pytest.mark.parametrize("example", [X, (X,), {"x": X, "scale": 2.0}, {"y": X}])
def test_example_leaves_the_model_as_it_was(example: Any) -> None:
    model = Counting()
    model.norm.eval()
    count, state, random = model.count, copy.deepcopy(model.state_dict()), torch.get_rng_state()
    modes = [module.training for module in model.modules()]
    wrong = isinstance(example, dict) and "y" in example
    with pytest.raises(TypeError, match="unexpected") if wrong else nullcontext():
        fold_alpha(None, 1.0, model=model, example_inputs=example)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert model.count is count
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == modes
    assert all(not module._forward_hooks for module in model.modules())
