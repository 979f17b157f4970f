"""Lets torchvision, and so timm, be imported beside a CPU-only torch."""

from __future__ import annotations

import functools
import importlib

import torch


@functools.cache
def declare_torchvision_schemas() -> None:
    """Declare the operators that ``import torchvision`` looks up, if it fails to find them.

    The wheel on the package index is built for CUDA, and its compiled operators do not load beside
    a CPU-only torch. Their schemas are enough to import it; nothing here calls them.
    """
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _keep.append(library)


_keep: list[torch.library.Library] = []  # a library's definitions last as long as it does
