"""The networks: against timm and torchvision with the same weights, and by their definition."""

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import powergrad
from powergrad.lab.trainer import networks
from powergrad.lab.trainer.networks import create_model

IMAGENET = [f"{se}resnet{n}" for se in ("", "se") for n in (18, 34, 50, 101, 152)]
BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


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


def assert_equal_networks(ours: nn.Module, theirs: nn.Module, x: Tensor, tolerance: float) -> None:
    """The same weights load both ways; values, gradients and statistics agree, in both modes.

    Tolerances are relative to the largest value of a tensor.
    """
    with torch.no_grad():  # every parameter and statistic at random, so that none goes unseen
        for name, tensor in [*theirs.named_parameters(), *theirs.named_buffers()]:
            if tensor.is_floating_point() and tensor.dim() == 1:
                is_positive = name.endswith(("running_var", "weight"))
                tensor.uniform_(0.5, 1.5) if is_positive else tensor.normal_(0, 0.3)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    assert {k for k, _ in ours.named_parameters()} == {k for k, _ in theirs.named_parameters()}
    upstream = torch.randn(theirs.eval()(x).shape, dtype=x.dtype)
    for training in (True, False):
        output, expected = ours.train(training)(x), theirs.train(training)(x)
        assert expected.std() > 0
        for model, result in ((ours, output), (theirs, expected)):
            model.zero_grad()
            (result * upstream).sum().backward()
        parameters = dict(theirs.named_parameters())
        pairs: dict[str, Any] = {"output": (output, expected)}
        pairs |= {k: (p.grad, parameters[k].grad) for k, p in ours.named_parameters()}
        for name, (a, b) in pairs.items():
            assert (a - b).abs().max() <= tolerance * b.abs().max(), name


NARROW = ("resnet18", "resnet50", "seresnet18", "seresnet50")
DEEP = ("resnet34", "resnet101", "seresnet34", "seresnet101")
CIFAR = ("resnet8", "resnet20", "resnet26", "seresnet20")
NORMS = ("batch", "group", "none")
CASES = [
    # A hundred layers of batch statistics over few pixels magnify rounding.
    *((name, "batch", "imagenet", 8, (64, 64), 1e-9) for name in DEEP),
    *((name, norm, "imagenet", 12, (70, 45), 1e-11) for name in NARROW for norm in NORMS),
    *((name, norm, "small", 12, (18, 11), 1e-11) for name in NARROW for norm in NORMS),
    *((name, norm, "small", 16, (17, 10), 1e-11) for name in CIFAR for norm in NORMS),
]


@pytest.mark.parametrize(("name", "norm", "stem", "width", "size", "tolerance"), CASES)
def test_networks_equal_those_of_timm(name, norm, stem, width, size, tolerance, timm):
    torch.manual_seed(0)
    common = {"width": width, "norm": norm, "stem": stem}
    ours = create_model(name, num_classes=7, in_channels=2, **common).double()
    theirs = from_timm(timm, name, classes=7, channels=2, **common).double()
    x = torch.randn(4, 2, *size, dtype=torch.float64)
    assert_equal_networks(ours, theirs, x, tolerance)


@pytest.mark.parametrize("name", IMAGENET)
def test_parameters_have_the_names_and_shapes_of_timm(name, timm):
    with torch.device("meta"):
        networks = create_model(name, num_classes=1000), timm.create_model(name)
    ours, theirs = ([(k, v.shape) for k, v in m.state_dict().items()] for m in networks)
    assert ours == theirs


def test_convolutions_start_with_the_deviation_of_he_and_gains_at_one():
    torch.manual_seed(0)
    model = create_model("seresnet18", num_classes=10)
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * module.kernel_size[0] * module.kernel_size[1]
            ratio = module.weight.std() / (2 / fan_out) ** 0.5
            # Five standard errors of an estimate from so many weights.
            assert abs(ratio - 1) < 5 / (2 * module.weight.numel()) ** 0.5, name
        elif isinstance(module, nn.BatchNorm2d):
            assert ((module.weight == 1) & (module.bias == 0)).all(), name


@pytest.mark.parametrize("norm", ["batch", "none"])
def test_gradients_can_be_altered_at_every_module(norm):
    """Rectifying a module's output in place would make autograd refuse."""
    model = create_model("seresnet8", num_classes=3, width=4, norm=norm)
    x = torch.randn(2, 3, 8, 8, requires_grad=True)

    def altered(module, args, output):
        return powergrad.alter_gradient(output, torch.zeros_like)

    for module in model.modules():
        module.register_full_backward_hook(lambda *_: None)
        with module.register_forward_hook(altered):
            model(x).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        *((name, "resnet18") for name in ("resnet19", "resnet-18", "ResNet18")),
        *((name, "resnet20") for name in ("resnet2", "resnet21", "resnet020")),
        *(("reznet50", "resnet50"), ("vgg", None), ("", None)),
    ],
)
def test_unknown_name_raises_with_a_suggestion(name, suggestion):
    end = rf"'{name}'; did you mean .*'{suggestion}'" if suggestion else rf"'{name}'\.$"
    with pytest.raises(ValueError, match=rf"`model\.name`.*{end}"):
        create_model(name, num_classes=10)


@pytest.mark.parametrize(
    ("name", "argument", "options"),
    [
        ("resnet20", "stem", {"stem": "imagenet"}),
        ("timm:resnet18", "width", {"width": 8}),
        ("timm:resnet18", "norm", {"norm": "none"}),
        ("timm:resnet18", "stem", {"stem": "imagenet"}),
    ],
)
def test_arguments_that_do_not_apply_raise(name, argument, options):
    with pytest.raises(ValueError, match=f"`model.{argument}`"):
        create_model(name, num_classes=10, **options)


def test_any_network_of_timm(timm):
    torch.manual_seed(0)
    network = create_model("timm:mobilenetv3_small_050", num_classes=4, in_channels=1)
    torch.manual_seed(0)
    expected = timm.create_model("mobilenetv3_small_050", num_classes=4, in_chans=1)
    x = torch.randn(2, 1, 32, 32)
    assert torch.equal(network.eval()(x), expected.eval()(x))
    with pytest.raises(ValueError, match=r"did you mean.*'convnext_tiny'"):
        create_model("timm:convnext_tinny", num_classes=4)


def test_missing_or_broken_timm_raises(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match="pip install timm"):
        create_model("timm:resnet18", num_classes=4)

    def fail(name: str) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(networks.importlib, "import_module", fail)
    with pytest.raises(ImportError, match="torchvision::nms"):
        create_model("timm:resnet18", num_classes=4)
