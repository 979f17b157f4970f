"""The head: found where the model shows it, refused where it does not, proven by an example."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powergrad import (
    FilterMonitor,
    adaptive_clip_grad_,
    clip_grads_before_step,
    equivalent_training,
    fold_alpha,
)
from powergrad._head import find_head, find_heads

CLASSES, X = 5, torch.randn(6, 3, generator=torch.Generator().manual_seed(0))


class HeadFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, CLASSES)
        self.body = nn.Sequential(nn.Linear(3, 8), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class NamelessHeadFirst(nn.Module):
    def __init__(self, width: int = 8, classes: int = CLASSES) -> None:
        super().__init__()
        self.b = nn.Linear(width, classes)
        self.a = nn.Linear(3, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(x)))


class Auxiliary(nn.Module):
    """As torchvision's segmentation networks: the auxiliary classifier is registered last."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.classifier = nn.Sequential(nn.Conv2d(8, 4, 1), nn.ReLU(), nn.Conv2d(4, CLASSES, 1))
        self.aux_classifier = nn.Sequential(nn.ReLU(), nn.Conv2d(8, CLASSES, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.backbone(x[:, :, None, None])
        return {"out": self.classifier(features), "aux": self.aux_classifier(features)}


class Teacher(nn.Module):
    """As transformers' DeiT with a teacher: the logits are the mean of two heads'."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.ReLU())
        self.cls_classifier = nn.Linear(8, classes)
        self.distillation_classifier = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> SimpleNamespace:
        x = self.body(x)
        logits = (self.cls_classifier(x) + self.distillation_classifier(x)) / 2
        return SimpleNamespace(loss=None, logits=logits)


class Distilled(Teacher):
    """As timm's."""

    def get_classifier(self) -> tuple[nn.Module, nn.Module]:
        return self.cls_classifier, self.distillation_classifier


class Sum(nn.Module):
    """As torchvision's LRASPP: two classifiers inside one part of the network."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.high = nn.Linear(3, CLASSES), nn.Linear(8, CLASSES)

        def forward(self, x: Tensor, features: Tensor) -> Tensor:
            return self.low(x) + self.high(features)

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classifier = nn.Linear(3, 8), self.Head()

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(x, F.relu(self.body(x)))


AMBIGUOUS = {
    "head first": (HeadFirst, ["body.0", "head"], ["head"]),
    "nameless head first": (NamelessHeadFirst, ["a", "b"], ["b"]),
    "all of one width": (lambda: NamelessHeadFirst(3, 3), ["a", "b"], ["b"]),
    "auxiliary": (Auxiliary, ["aux_classifier.1", "classifier.2"], ["classifier.2"]),
    "teacher": (
        Teacher,
        ["cls_classifier", "distillation_classifier"],
        ["cls_classifier", "distillation_classifier"],
    ),
    "teacher, classes as wide as the body": (
        lambda: Teacher(8),
        ["cls_classifier", "distillation_classifier"],
        ["cls_classifier", "distillation_classifier"],
    ),
    "head that nothing takes": (lambda: NamelessHeadFirst(7, 3), ["a", "b"], ["b"]),
    "sum": (Sum, ["classifier.high", "classifier.low"], ["classifier.high", "classifier.low"]),
}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def logits_of(model: nn.Module) -> Tensor:
    with torch.no_grad():
        output: Any = copy.deepcopy(model).eval()(X)
    if isinstance(output, Tensor):
        return output
    return output["out"] if isinstance(output, dict) else output.logits


CALLS = {
    "fold_alpha": lambda model, **more: fold_alpha(None, 0.25, model=model, **more),
    "equivalent_training": lambda model, **more: equivalent_training(
        model, sgd(model), 0.25, **more
    ),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", AMBIGUOUS)
def test_what_is_ambiguous_is_refused(name: str, call: str) -> None:
    make, candidates, _ = AMBIGUOUS[name]
    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"pass `head`.*`example_inputs`") as caught:
        CALLS[call](model)
    assert all(candidate in str(caught.value) for candidate in candidates)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_adaptive_clipping_and_monitors_refuse_it_too(name: str, tmp_path) -> None:
    model = AMBIGUOUS[name][0]()
    with pytest.raises(ValueError, match=r"pass `head`.*Pass `head=None` to clip every layer"):
        adaptive_clip_grad_(model)
    with pytest.raises(ValueError, match="pass `head`"):
        clip_grads_before_step(sgd(model), model, agc=0.01)
    with pytest.raises(ValueError, match="pass `features`"):
        FilterMonitor(model, tmp_path, features=True)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", AMBIGUOUS)
def test_an_example_shows_the_head(name: str, call: str) -> None:
    make, _, heads = AMBIGUOUS[name]
    torch.manual_seed(0)
    model = make()
    before, start = logits_of(model), copy.deepcopy(model.state_dict())
    CALLS[call](model, example_inputs=X)
    torch.testing.assert_close(logits_of(model), 0.25 * before)
    for key, value in model.state_dict().items():
        factor = 0.25 if key.rpartition(".")[0] in heads else 1
        assert torch.equal(value, factor * start[key]), key


def test_several_heads_are_scaled_together() -> None:
    torch.manual_seed(0)
    model = Distilled()
    before = logits_of(model)
    heads = fold_alpha(None, 0.25, model=model)  # `get_classifier` names both: no example is needed
    assert list(heads.children()) == [model.cls_classifier, model.distillation_classifier]
    torch.testing.assert_close(logits_of(model), 0.25 * before)
    for call in (
        lambda: fold_alpha("cls_classifier", 0.25, model=model),
        lambda: equivalent_training(model, sgd(model), 0.25, head="cls_classifier"),
    ):
        with pytest.raises(
            ValueError, match=r"one of several .*distillation_classifier.*None to scale all"
        ):
            call()


class Plain(nn.Module):
    """conv1, conv2, fc1, fc2, fc3, as in PyTorch's tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)


class Named(nn.Module):
    """Of one width everywhere: its name tells."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classifier = nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4))


class PreClassifier(nn.Module):
    """As transformers' DistilBERT."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.pre_classifier = nn.Linear(3, 4), nn.Linear(4, 4)
        self.classifier = nn.Linear(4, 2)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.rnn = nn.Embedding(9, 4), nn.LSTM(4, 6)
        self.decoder = nn.Linear(6, 9)


class Attention(nn.Module):
    """With attention heads that are called so, each a few linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 8)
        self.blocks = nn.Sequential(*(self.Block() for _ in range(2)))
        self.norm, self.lm_head = nn.LayerNorm(8), nn.Linear(8, 9)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(8, 4) for _ in range(2))
            self.qkv, self.projection = nn.Linear(8, 24), nn.Linear(8, 8)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Plain, "fc3"),
        (Named, "classifier.1"),
        (PreClassifier, "classifier"),
        (Recurrent, "decoder"),
        (Attention, "lm_head"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), "2"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(Plain(), nn.ReLU())), "1.0.fc3"),
        (lambda: nn.DataParallel(Distilled().body), "module.0"),
    ],
)
def test_common_models_need_no_example(make, name: str) -> None:
    model = make()
    assert find_head(model) is model.get_submodule(name)


def test_what_a_wrapper_holds_is_asked_for_its_heads() -> None:
    model = Distilled()
    wrapper = nn.Module()
    wrapper.model = model
    for outer in (wrapper, nn.DataParallel(model), torch.compile(model)):
        assert list(find_heads(outer)) == [model.cls_classifier, model.distillation_classifier]  # type: ignore[arg-type]


# Scaling the head must scale the logits -----------------------------------------------------------


class After(nn.Module):
    """A function of the logits after the head."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        self.body, self.fc = nn.Linear(3, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.fc(F.relu(self.body(x))))


NOT_LINEAR = {
    "cap": lambda z: 30 * torch.tanh(z / 30),
    "softmax": lambda z: z.softmax(1),
    "clamp": lambda z: z.clamp(-10, 10),
    "offset": lambda z: z + torch.arange(CLASSES),
    "normalised": lambda z: F.normalize(z, dim=1),
    "unchanged": torch.ones_like,
    "nan": lambda z: z * torch.nan,
}


@pytest.mark.parametrize("head", [None, "fc"])
@pytest.mark.parametrize("name", NOT_LINEAR)
def test_a_function_after_the_head_is_refused(name: str, head: str | None) -> None:
    torch.manual_seed(0)
    model = After(NOT_LINEAR[name])
    with torch.no_grad():
        model.fc.weight.mul_(0.1)  # small logits, as of a new network, hardly feel a cap
    before = copy.deepcopy(model.state_dict())
    for call in (
        lambda: fold_alpha(head, 0.25, model=model, example_inputs=X),
        lambda: equivalent_training(model, sgd(model), 0.25, head, example_inputs=X),
    ):
        with pytest.raises(ValueError, match=r"logits .* scale.*fc"):
            call()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


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
def test_what_scales_with_the_logits_is_not(function, dtype) -> None:
    torch.manual_seed(0)
    model = After(function).to(dtype)
    start = model.fc.weight.clone()
    fold_alpha(None, 0.25, model=model, example_inputs=X.to(dtype))
    assert torch.equal(model.fc.weight, 0.25 * start)


@pytest.mark.parametrize(
    ("after", "refused"),
    [
        (nn.Tanh(), True),
        (nn.Softmax(1), True),
        (nn.Linear(CLASSES, 2), True),
        (nn.Sequential(nn.Dropout(), nn.Sigmoid()), True),
        (nn.LogSoftmax(1), False),
        (nn.Sequential(nn.ReLU(), nn.Flatten()), False),
    ],
)
def test_a_sequential_shows_what_follows(after: nn.Module, refused: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, CLASSES), after)
    for call in (
        lambda: fold_alpha("2", 0.5, model=model),
        lambda: equivalent_training(model, sgd(model), 0.5, head="2"),
    ):
        if refused:
            with pytest.raises(ValueError, match=r"compute the logits, but got .* after it"):
                call()
        else:
            call()


def test_equivalent_training_refuses_a_cap_by_configuration() -> None:
    model: Any = After(lambda z: 30 * torch.tanh(z / 30))
    model.config = SimpleNamespace(final_logit_softcapping=30.0)
    with pytest.raises(ValueError, match=r"`config\.final_logit_softcapping` = 30\.0"):
        equivalent_training(model, sgd(model), 0.5)


class Tied(nn.Module):
    def __init__(self, tie) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight.data = tie(self.embedding.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x))


@pytest.mark.parametrize("example", [None, torch.arange(7)])
@pytest.mark.parametrize("tie", [lambda w: w, lambda w: w[1:6], lambda w: w[:4].t()])
def test_heads_tied_by_memory_are_refused(tie, example) -> None:
    model = Tied(tie)
    before = model.head.weight.clone()
    for call in (
        lambda: fold_alpha("head", 0.5, model=model, example_inputs=example),
        lambda: equivalent_training(model, sgd(model), 0.5, "head", example_inputs=example),
    ):
        with pytest.raises(ValueError, match=r"shared by embedding\.weight and head\.weight"):
            call()
    assert torch.equal(model.head.weight, before)


def test_parts_of_one_buffer_are_not_tied() -> None:
    """As where all parameters are views of one flat tensor."""
    model = Tied(lambda w: w)
    flat = torch.randn(56)
    model.embedding.weight.data, model.head.weight.data = flat[:28].view(7, 4), flat[28:].view(7, 4)
    fold_alpha(None, 0.5, model=model, example_inputs=torch.arange(7))
    assert not torch.equal(model.head.weight, model.embedding.weight)


def test_a_head_with_more_than_weight_and_bias_is_refused() -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, input: Tensor) -> Tensor:
            return self.scale * super().forward(input)

    for call in (
        lambda: fold_alpha(Scaled(), 0.5),
        lambda: equivalent_training(model := Scaled(), sgd(model), 0.5),
    ):
        with pytest.raises(ValueError, match=r"only a weight and a bias, but got also scale"):
            call()


# The example --------------------------------------------------------------------------------------


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


def test_an_example_leaves_the_model_as_it_was() -> None:
    model = Counting()
    model.norm.eval()
    count, state, random = model.count, copy.deepcopy(model.state_dict()), torch.get_rng_state()
    modes = [module.training for module in model.modules()]
    for example in (X, (X,), {"x": X, "scale": 2.0}):
        fold_alpha(None, 1.0, model=model, example_inputs=example)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert model.count is count
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == modes
    assert all(not module._forward_hooks for module in model.modules())
    with pytest.raises(TypeError, match="unexpected keyword"):
        fold_alpha(None, 0.5, model=model, example_inputs={"y": X})
    assert [module.training for module in model.modules()] == modes
    assert all(not module._forward_hooks for module in model.modules())


def test_bad_examples() -> None:
    model = After(lambda z: z)
    with pytest.raises(TypeError, match="`model` to be given with `example_inputs`"):
        fold_alpha(model.fc, 0.5, example_inputs=X)
    with pytest.raises(TypeError, match="`example_inputs` to be a tensor, a tuple or a dict"):
        fold_alpha(None, 0.5, model=model, example_inputs=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"to return logits .* but got a dict"):
        fold_alpha(None, 0.5, model=After(lambda z: {"scores": z}), example_inputs=X)
    with torch.no_grad():
        model.fc.weight.zero_()
        model.fc.bias.zero_()
    with pytest.raises(ValueError, match="logits that are not all 0"):
        fold_alpha(None, 0.5, model=model, example_inputs=X)
