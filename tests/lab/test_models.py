"""The networks: against timm and torchvision with the same weights, and by their definition."""

from __future__ import annotations

import copy
import random
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torchvision_shim import declare_torchvision_schemas

import powergrad
from powergrad.lab.trainer import networks as models
from powergrad.lab.trainer.networks import create_model, model_names
from powergrad.monitor.layers import named_units

IMAGENET = [f"{se}resnet{n}" for se in ("", "se") for n in (18, 34, 50, 101, 152)]
BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


@pytest.fixture(scope="module")
def timm() -> Any:
    declare_torchvision_schemas()
    return pytest.importorskip("timm")


@pytest.fixture(scope="module")
def torchvision() -> Any:
    declare_torchvision_schemas()
    return pytest.importorskip("torchvision")


# timm's networks at any width, stem and normalisation ---------------------------------------------


class PaddedShortcut(nn.Module):
    """Option A in other words: pooling over single pixels, and zeros concatenated."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(x, 1, stride=2)
        return torch.cat([x, torch.zeros_like(x)], 1)


def from_timm(
    timm: Any, name: str, *, width: int, channels: int, classes: int, norm: str, stem: str
) -> nn.Module:
    """timm's own blocks, with the stem, the norms and CIFAR's shortcuts exchanged afterwards."""
    resnet = timm.models.resnet
    depth = int(name.split("resnet")[1])
    cifar = depth not in (18, 34, 50, 101, 152)
    blocks = ((depth - 2) // 6,) * 3 if cifar else BLOCKS[depth]
    se = {"block_args": {"attn_layer": "se"}} if name.startswith("se") else {}
    model = resnet.ResNet(
        resnet.Bottleneck if depth in (50, 101) else resnet.BasicBlock,
        blocks,
        num_classes=classes,
        channels=tuple(width * 2**i for i in range(len(blocks))),
        stem_type="deep",  # the only one whose width can be chosen; the convolution is replaced
        stem_width=width // 2,
        **se,
    )
    kernel, stride = (7, 2) if stem == "imagenet" else (3, 1)
    model.conv1 = nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, bias=False)
    if stem == "small":
        model.maxpool = nn.Identity()
    if cifar:
        model.layer4 = nn.Identity()
    for parent in list(model.modules()):
        for child, module in list(parent.named_children()):
            if cifar and child == "downsample":
                parent.downsample = PaddedShortcut()
            elif isinstance(module, nn.BatchNorm2d) and norm == "none":
                setattr(parent, child, nn.Identity())
            elif isinstance(module, nn.BatchNorm2d) and norm == "group":
                groups = max(g for g in range(1, 33) if module.num_features % g == 0)
                setattr(parent, child, nn.GroupNorm(groups, module.num_features))
    return model


def randomise(model: nn.Module) -> None:
    """Every parameter and statistic at random, so that none goes unseen."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point() and tensor.dim() == 1:
                positive = name.endswith(("running_var", "weight"))
                tensor.uniform_(0.5, 1.5) if positive else tensor.normal_(0, 0.3)


def assert_equal_networks(
    ours: nn.Module, theirs: nn.Module, x: Tensor, tolerance: float, *, gradients: bool = True
) -> None:
    """The same weights load both ways; values, gradients and statistics agree, in both modes.

    Tolerances are relative to the largest value of a tensor.
    """
    randomise(theirs)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    assert {k for k, _ in ours.named_parameters()} == {k for k, _ in theirs.named_parameters()}
    upstream = torch.randn(len(x), ours.get_submodule("fc").out_features, dtype=x.dtype)  # pyright: ignore
    for training in (True, False):
        output, expected = ours.train(training)(x), theirs.train(training)(x)
        assert_close(output, expected, tolerance, "output")
        assert expected.std() > 0
        if gradients:
            ours.zero_grad()
            theirs.zero_grad()
            (output * upstream).sum().backward()
            (expected * upstream).sum().backward()
            grads = dict(theirs.named_parameters())
            for name, parameter in ours.named_parameters():
                assert_close(parameter.grad, grads[name].grad, tolerance, name)
    theirs.load_state_dict(ours.state_dict(), strict=True)


def assert_close(
    actual: Tensor | None, expected: Tensor | None, tolerance: float, name: str
) -> None:
    assert actual is not None
    assert expected is not None
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max(), name


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
@pytest.mark.parametrize("stem", ["imagenet", "small"])
@pytest.mark.parametrize("name", ["resnet18", "resnet50", "seresnet18", "seresnet50"])
def test_narrow_networks_are_timms(name, stem, norm, timm) -> None:
    torch.manual_seed(0)
    common = {"width": 12, "norm": norm, "stem": stem}
    ours = create_model(name, num_classes=7, in_channels=2, **common).double()
    theirs = from_timm(timm, name, classes=7, channels=2, **common).double()
    x = torch.randn(3, 2, *((70, 45) if stem == "imagenet" else (18, 11)), dtype=torch.float64)
    assert_equal_networks(ours, theirs, x, 1e-11)


@pytest.mark.parametrize("name", ["resnet34", "resnet101", "seresnet34", "seresnet101"])
def test_deep_networks_are_timms(name, timm) -> None:
    torch.manual_seed(0)
    ours = create_model(name, num_classes=5, width=8).double()
    theirs = from_timm(timm, name, width=8, channels=3, classes=5, norm="batch", stem="imagenet")
    x = torch.randn(4, 3, 64, 64, dtype=torch.float64)
    # A hundred layers of batch statistics over few pixels magnify rounding.
    assert_equal_networks(ours, theirs.double(), x, 1e-9)


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
@pytest.mark.parametrize("name", ["resnet8", "resnet20", "resnet26", "seresnet20"])
def test_cifar_networks_are_timms_blocks_with_padded_shortcuts(name, norm, timm) -> None:
    torch.manual_seed(0)
    ours = create_model(name, num_classes=10, in_channels=1, norm=norm).double()
    theirs = from_timm(
        timm, name, width=16, channels=1, classes=10, norm=norm, stem="small"
    ).double()
    x = torch.randn(3, 1, 17, 10, dtype=torch.float64)
    assert_equal_networks(ours, theirs, x, 1e-11)


@pytest.mark.parametrize("name", ["resnet18", "seresnet50"])
def test_whole_networks_are_timms_in_float32(name, timm) -> None:
    torch.manual_seed(0)
    ours = create_model(name, num_classes=1000)
    theirs = timm.create_model(name)
    assert_equal_networks(ours, theirs, torch.randn(2, 3, 96, 96), 1e-5, gradients=False)


@pytest.mark.parametrize("name", IMAGENET)
def test_parameters_are_named_ordered_and_shaped_as_in_timm(name, timm) -> None:
    with torch.device("meta"):
        ours, theirs = create_model(name, num_classes=1000), timm.create_model(name)
    shapes = [[(k, v.shape) for k, v in m.state_dict().items()] for m in (ours, theirs)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("name", [n for n in IMAGENET if not n.startswith("se")])
def test_parameters_are_named_and_shaped_as_in_torchvision(name, torchvision) -> None:
    with torch.device("meta"):
        ours = create_model(name, num_classes=1000)
        theirs = torchvision.models.get_model(name)
    shapes = [{k: v.shape for k, v in m.state_dict().items()} for m in (ours, theirs)]
    assert shapes[0] == shapes[1]


def test_resnet50_is_torchvisions(torchvision) -> None:
    torch.manual_seed(0)
    theirs = torchvision.models.resnet50(num_classes=10).double()
    ours = create_model("resnet50", num_classes=10).double()
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    assert_equal_networks(ours, theirs, x, 1e-10, gradients=False)


# What the names mean -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*model_names(), "resnet26", "seresnet38"])
def test_a_network_has_as_many_layers_as_its_name_says(name) -> None:
    with torch.device("meta"):
        model = create_model(name, num_classes=10, width=1)
    layers = [n for n, m in model.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    counted = [n for n in layers if "downsample" not in n and ".se." not in n]
    assert len(counted) == int(name.split("resnet")[1])
    assert any(".se." in n for n in layers) == name.startswith("se")


@pytest.mark.parametrize(
    ("name", "classes", "millions"),
    [  # torchvision's table of models; He et al., table 6, for the CIFAR family
        ("resnet18", 1000, 11.689512),
        ("resnet34", 1000, 21.797672),
        ("resnet50", 1000, 25.557032),
        ("resnet101", 1000, 44.549160),
        ("resnet152", 1000, 60.192808),
        ("resnet20", 10, 0.27),
        ("resnet32", 10, 0.46),
        ("resnet44", 10, 0.66),
        ("resnet56", 10, 0.85),
        ("resnet110", 10, 1.7),
    ],
)
def test_published_numbers_of_parameters(name, classes, millions) -> None:
    with torch.device("meta"):
        model = create_model(name, num_classes=classes)
    count = sum(p.numel() for p in model.parameters())
    digits = len(str(millions).split(".")[1])
    assert round(count / 1e6, digits) == millions


def test_layers_of_resnet18_are_numbered_as_in_the_paper() -> None:
    model = create_model("resnet18", num_classes=1000, norm="none")
    layers = {layer.number: layer for layer, _ in named_units(model)}
    assert sorted(n for n in layers if n) == list(range(1, 22))
    assert layers[11].units == 256
    assert layers[8].name == "layer2.0.downsample.0"
    assert layers[21].name == "fc"
    assert powergrad.census(model).units == ()


@given(channels=st.integers(1, 600))
def test_group_norm_has_the_most_groups_up_to_32_that_divide_the_channels(channels: int) -> None:
    groups = models._group_norm(channels).num_groups
    assert channels % groups == 0
    assert groups <= 32
    assert not any(channels % g == 0 for g in range(groups + 1, 33))


def test_stems_keep_and_quarter_the_size() -> None:
    seen = []
    for stem in ("small", "imagenet"):
        model = create_model("resnet18", num_classes=2, width=2, stem=stem)
        first = model.get_submodule("layer1")
        first.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape)))
        model(torch.randn(2, 3, 32, 40))
    assert seen == [(2, 2, 32, 40), (2, 2, 8, 10)]


# Initialisation ----------------------------------------------------------------------------------


def test_convolutions_start_as_he_has_it_and_gains_at_one() -> None:
    torch.manual_seed(0)
    model = create_model("seresnet18", num_classes=10)
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * module.kernel_size[0] * module.kernel_size[1]
            ratio = module.weight.std() / (2 / fan_out) ** 0.5
            # Five standard errors of an estimate from so many weights.
            assert abs(ratio - 1) < 5 / (2 * module.weight.numel()) ** 0.5, name
        elif isinstance(module, nn.BatchNorm2d):
            assert (module.weight == 1).all(), name
            assert (module.bias == 0).all(), name


def test_weights_come_from_the_default_generator_alone() -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        random.seed()
        states.append(create_model("seresnet20", num_classes=3).state_dict())
    assert all(torch.equal(a, b) for a, b in zip(*(s.values() for s in states), strict=True))
    other = create_model("seresnet20", num_classes=3).state_dict()
    assert not torch.equal(other["conv1.weight"], states[0]["conv1.weight"])


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("name", ["resnet50", "seresnet20"])
def test_zero_init_residual_makes_each_block_its_shortcut(name, norm) -> None:
    model = create_model(name, num_classes=3, width=4, norm=norm, zero_init_residual=True)
    plain = create_model(name, num_classes=3, width=4, norm=norm)

    def is_shortcut(net: nn.Module) -> bool:
        block = net.get_submodule("layer1.1")
        channels = block.get_submodule("conv1").get_parameter("weight").shape[1]
        x = torch.rand(2, channels, 6, 6)
        return torch.equal(block(x), x)

    assert is_shortcut(model)
    assert not is_shortcut(plain)
    zero = [n for n, p in model.named_parameters() if n.endswith("weight") and not p.any()]
    blocks = [n for n, m in model.named_modules() if isinstance(m, models.Block)]
    last = "bn3" if name == "resnet50" else "bn2"
    assert zero == [f"{block}.{last}.weight" for block in blocks]


# At home in the package --------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["batch", "none"])
def test_gradients_can_be_altered_at_every_module(norm) -> None:
    """Rectifying a module's output in place would make autograd refuse."""
    model = create_model("seresnet8", num_classes=3, width=4, norm=norm)
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    for name, module in model.named_modules():
        module.register_full_backward_hook(lambda *_: None)
        with powergrad.alter_output(model, name, lambda grad: 0 * grad):
            model(x).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_copies_stand_alone() -> None:
    model = create_model("resnet8", num_classes=3, width=4).eval()
    x = torch.randn(2, 3, 8, 8)
    before = model(x)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(model(x), before)
    assert not twin(x).any()


# What is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("resnet19", "'resnet18'"),
        ("reznet50", "'resnet50'"),
        ("resnet-18", "'resnet18'"),
        ("ResNet18", "'resnet18'"),
        ("resnet2", "'resnet20'"),
        ("resnet21", "'resnet20'"),
        ("resnet020", "'resnet20'"),
        ("vgg", None),
        ("", None),
    ],
)
def test_unknown_names(name, suggestion) -> None:
    with pytest.raises(ValueError, match="Expected `name`") as error:
        create_model(name, num_classes=10)
    assert repr(name) in str(error.value)
    assert ("did you mean" in str(error.value)) == (suggestion is not None)
    assert suggestion is None or suggestion in str(error.value)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("num_classes", 0),
        ("num_classes", 2.0),
        ("in_channels", -1),
        ("width", 0),
        ("width", True),
        ("norm", "layer"),
        ("norm", None),
        ("stem", "large"),
    ],
)
def test_arguments_out_of_range(argument, value) -> None:
    with pytest.raises(ValueError, match=f"Expected `{argument}`.*{value!r}"):
        create_model("resnet18", **{"num_classes": 10, argument: value})


def test_arguments_that_do_not_apply() -> None:
    with pytest.raises(ValueError, match="`stem` to be 'small' for resnet20"):
        create_model("resnet20", num_classes=10, stem="imagenet")
    with pytest.raises(ValueError, match="`zero_init_residual`"):
        create_model("resnet20", num_classes=10, norm="none", zero_init_residual=True)


# timm by name ------------------------------------------------------------------------------------


def test_any_network_of_timm(timm) -> None:
    torch.manual_seed(0)
    network = create_model("timm:mobilenetv3_small_050", num_classes=4, in_channels=1)
    torch.manual_seed(0)
    expected = timm.create_model("mobilenetv3_small_050", num_classes=4, in_chans=1)
    x = torch.randn(2, 1, 32, 32)
    assert torch.equal(network.eval()(x), expected.eval()(x))


def test_names_that_timm_does_not_have(timm) -> None:
    with pytest.raises(ValueError, match=r"did you mean.*'convnext_tiny'"):
        create_model("timm:convnext_tinny", num_classes=4)


@pytest.mark.parametrize(
    ("argument", "value"),
    [("width", 8), ("norm", "none"), ("stem", "imagenet"), ("zero_init_residual", True)],
)
def test_arguments_that_are_timms_own(argument, value) -> None:
    with pytest.raises(ValueError, match=f"Expected `{argument}` to be .*{value!r}"):
        create_model("timm:resnet18", **{"num_classes": 4, argument: value})


def test_timm_missing_or_broken(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match="pip install timm"):
        create_model("timm:resnet18", num_classes=4)

    def fail(name: str) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(models.importlib, "import_module", fail)
    with pytest.raises(ImportError, match=r"importable.*torchvision::nms"):
        create_model("timm:resnet18", num_classes=4)
