r"""The paper's networks: ResNets, with and without squeeze-and-excitation or normalisation.

There are two families. The **ImageNet** family (He et al., 2015, table 1) has four stages, 18 to
152 layers, and a projection in shortcuts that change the shape. The **CIFAR** family (section 4.2
there) has three stages of ``n`` basic blocks, ``6 n + 2`` layers, and shortcuts without parameters:
option A, which takes every other pixel and fills the new channels with zeros.

Parameters are named as in timm and torchvision, so that their weights can be loaded. Modules are
registered in timm's order; `powergrad.census` numbers layers in it, as the paper does.

References: He, Zhang, Ren, Sun, *Deep Residual Learning for Image Recognition*, 2015. Hu, Shen,
Sun, *Squeeze-and-Excitation Networks*, 2018. Wu, He, *Group Normalization*, 2018.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from powergrad.lab.words import did_you_mean

Norm = Literal["batch", "group", "none"]
Stem = Literal["imagenet", "small"]
Layer = tuple[int, int, int]  # output channels, kernel and stride of a convolution

IMAGENET_LAYOUTS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}  # blocks per stage
IMAGENET_LAYOUTS |= {101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
BOTTLENECKS = (50, 101, 152)
CIFAR_DEPTHS = (8, 14, 20, 32, 44, 56, 110)  # listed by name; any other 6 n + 2 works as well


def model_names() -> list[str]:
    """The names of the networks of `create_model`, without other depths and those of timm."""
    depths = (*IMAGENET_LAYOUTS, *CIFAR_DEPTHS)
    return [f"{prefix}resnet{depth}" for prefix in ("", "se") for depth in depths]


def create_model(
    name: str,
    *,
    num_classes: int,
    in_channels: int = 3,
    width: int | None = None,
    norm: Norm = "batch",
    stem: Stem | None = None,
) -> nn.Module:
    """Create a network by name; the weights are drawn from PyTorch's default generator.

    The arguments are the keys of the section `model` of a recipe, which checks their types.
    """
    if name.startswith("timm:"):
        own = {"width": width, "stem": stem, "norm": None if norm == "batch" else norm}
        for argument, value in own.items():
            if value is not None:
                raise ValueError(f"Expected no `model.{argument}` for {name!r}, but got {value!r}.")
        return _from_timm(name.removeprefix("timm:"), num_classes, in_channels)

    match = re.fullmatch(r"(se)?resnet([1-9]\d*)", name)
    depth = int(match[2]) if match else 0
    is_cifar = depth not in IMAGENET_LAYOUTS
    if not match or (is_cifar and (depth < 8 or depth % 6 != 2)):
        raise ValueError(
            f"Expected `model.name` to be one of {', '.join(model_names())}, (se)resnetN with N = "
            f"6 n + 2, or timm:NAME, but got {name!r}{did_you_mean(name, model_names(), most=3)}"
        )
    if is_cifar and stem == "imagenet":
        raise ValueError(f"Expected `model.stem` to be small for {name}, but got 'imagenet'.")
    return ResNet(
        IMAGENET_LAYOUTS.get(depth, ((depth - 2) // 6,) * 3),
        layers=bottleneck_layers if depth in BOTTLENECKS else basic_layers,
        style=Style(NORMS[norm], se=match[1] is not None, project=not is_cifar),
        num_classes=num_classes,
        in_channels=in_channels,
        width=width or (16 if is_cifar else 64),
        stem=stem or ("small" if is_cifar else "imagenet"),
    )


def _from_timm(name: str, num_classes: int, in_channels: int) -> nn.Module:
    try:
        timm = importlib.import_module("timm")
    except (ImportError, RuntimeError) as error:  # missing, or torchvision does not match torch
        reason = f"timm, which cannot be imported (`pip install timm`): {error}"
        raise ImportError(f"timm:{name} needs {reason}") from error
    if not timm.is_model(name):
        got = f"{name!r}{did_you_mean(name, timm.list_models(), most=3)}"
        raise ValueError(f"Expected a model of timm {timm.__version__} after timm:, but got {got}")
    return timm.create_model(name, num_classes=num_classes, in_chans=in_channels)


class ResNet(nn.Module):
    """A stem, stages of residual blocks (``layer1``, ``layer2``, ...) and a classifier (``fc``).

    `layers` returns the convolutions of a block for its width and stride, and `blocks` is the
    number of blocks per stage.
    """

    def __init__(
        self,
        blocks: Sequence[int],
        *,
        layers: Callable[[int, int], list[Layer]],
        style: Style,
        num_classes: int,
        in_channels: int,
        width: int,
        stem: Stem,
    ) -> None:
        super().__init__()
        self.is_large_stem = stem == "imagenet"
        self.conv1 = _conv(in_channels, width, *((7, 2) if self.is_large_stem else (3, 1)))
        self.bn1 = style.normalise(width)
        channels = width
        self.stages = tuple(f"layer{stage + 1}" for stage in range(len(blocks)))
        for stage, count in enumerate(blocks):
            sequence = nn.Sequential()
            for number in range(count):
                convolutions = layers(width << stage, 2 if stage > 0 and number == 0 else 1)
                sequence.append(Block(channels, convolutions, style))
                channels, _, _ = convolutions[-1]
            self.add_module(self.stages[stage], sequence)
        self.fc = nn.Linear(channels, num_classes)
        # He's normal initialisation over the fan-out, as in timm and torchvision. Without
        # normalisation, the mean square of the activations nearly doubles with each block: for
        # 64x64 noise it is 5 in the last stage of ResNet-18, 300 in ResNet-34, 1e8 in ResNet-101.
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Images, ``(batch, in_channels, height, width)``, to logits, ``(batch, num_classes)``."""
        x = F.relu(self.bn1(self.conv1(x)))
        if self.is_large_stem:
            x = F.max_pool2d(x, 3, stride=2, padding=1)
        for stage in self.stages:
            x = getattr(self, stage)(x)
        return self.fc(x.mean((2, 3)))


class Style(NamedTuple):
    """The properties that all blocks of a network share."""

    normalise: Callable[[int], nn.Module]
    se: bool  # squeeze-and-excitation
    project: bool  # whether shortcuts that change the shape are convolutions or pad with zeros


class Block(nn.Module):
    """A branch of convolutions (``conv1``, ``bn1``, ``conv2``, ...) plus its input."""

    def __init__(self, channels: int, layers: Sequence[Layer], style: Style) -> None:
        super().__init__()
        self.depth, out = len(layers), channels
        for number, (width, kernel, stride) in enumerate(layers, start=1):
            self.add_module(f"conv{number}", _conv(out, width, kernel, stride))
            self.add_module(f"bn{number}", style.normalise(width))
            out = width
        self.se = SqueezeExcite(out) if style.se else None
        self.downsample = None
        stride = max(stride for _, _, stride in layers)
        if stride > 1 or channels != out:
            self.downsample = (
                nn.Sequential(_conv(channels, out, 1, stride), style.normalise(out))
                if style.project
                else ZeroPad(out - channels, stride)
            )

    def forward(self, x: Tensor) -> Tensor:
        # Only the sum is rectified in place: autograd does not allow in-place operations on the
        # output of a module with hooks (`powergrad.alter_gradient`, full backward hooks).
        y = x
        for number in range(1, self.depth + 1):
            y = F.relu(y) if number > 1 else y
            y = getattr(self, f"bn{number}")(getattr(self, f"conv{number}")(y))
        if self.se is not None:
            y = self.se(y)
        return F.relu(y + (x if self.downsample is None else self.downsample(x)), inplace=True)


def basic_layers(width: int, stride: int) -> list[Layer]:
    return [(width, 3, stride), (width, 3, 1)]


def bottleneck_layers(width: int, stride: int) -> list[Layer]:
    """A 3x3 convolution, with the stride ("ResNet v1.5"), between 1x1 ones, the last 4x as wide."""
    return [(width, 1, 1), (width, 3, stride), (4 * width, 1, 1)]


class SqueezeExcite(nn.Module):
    """Multiplies each channel by a gate in (0, 1), computed from the means of all channels.

    The hidden layer has a sixteenth of the channels, rounded to a multiple of 8, and at least 8.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        squeezed = max(8, (channels // 16 + 4) // 8 * 8)
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.fc2(F.relu(self.fc1(x.mean((2, 3), keepdim=True))))
        return x * gate.sigmoid()


class ZeroPad(nn.Module):
    """He's option A, a shortcut without parameters: subsampled pixels, new channels of zeros."""

    def __init__(self, new_channels: int, stride: int) -> None:
        super().__init__()
        self.new_channels, self.stride = new_channels, stride

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, 0, self.new_channels))


def _conv(channels: int, out: int, kernel: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2, bias=False)


def _group_norm(channels: int) -> nn.GroupNorm:
    groups = next(g for g in range(min(32, channels), 0, -1) if channels % g == 0)
    return nn.GroupNorm(groups, channels)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "group": _group_norm,
    "none": lambda channels: nn.Identity(),
}
