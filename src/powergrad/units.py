"""Units, the slices of a weight or gradient that belong to one output, and their norms."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer

Dims = tuple[int, ...]
HALF = (torch.float16, torch.bfloat16)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
WHOLE = (nn.LayerNorm, nn.RMSNorm)  # whose weight is one unit, of any dimension


class Parameter(NamedTuple):
    """A parameter and, in a model, the module that it belongs to."""

    name: str
    tensor: Tensor
    owner: nn.Module | None = None


class Gradient(NamedTuple):
    """The gradient of a parameter, by unit."""

    name: str
    parameter: Tensor
    weight: Tensor  # a view of the parameter by unit; of a sparse gradient, the rows that it has
    tensor: Tensor
    unit: Dims | None  # the dimensions of `tensor` that one unit spans; None: the whole tensor


def by_unit(tensor: Tensor, owner: object) -> tuple[Tensor, Dims]:
    """A view of a weight or its gradient, and the dimensions of that view that one unit spans."""
    if not isinstance(owner, TRANSPOSED):  # (out, in / groups, *kernel), or (out, in)
        return tensor, tuple(range(1, tensor.dim()))
    # A transposed convolution has (in, out / groups, *kernel), viewed as
    # (groups, in / groups, out / groups, *kernel): dimensions 0 and 2 index the outputs.
    tensor = tensor.unflatten(0, (owner.groups, -1))
    return tensor, (1, *range(3, tensor.dim()))


def unit_norms(tensor: Tensor, unit: Dims | None) -> Tensor:
    """The L2 norm of each unit in float32 or wider; `unit`, what it spans (None: all), is kept."""
    dtype = torch.float32 if tensor.dtype in HALF else None
    return vector_norm(tensor, dim=unit, keepdim=unit is not None, dtype=dtype)


def parameters_of(source: nn.Module | Optimizer | Tensor | Iterable[Tensor]) -> list[Parameter]:
    """The parameters of a model, of an optimizer, or of an iterable, without duplicates."""
    if isinstance(source, nn.Module):
        modules = dict(source.named_modules())
        found = [Parameter(n, p, _owner(n, modules)) for n, p in source.named_parameters()]
    elif isinstance(source, Optimizer):
        found = []
        for i, group in enumerate(source.param_groups):
            names = group.get("param_names") or [f"{i}.{j}" for j in range(len(group["params"]))]
            found += map(Parameter, names, group["params"])
    else:
        tensors = [source] if isinstance(source, Tensor) else source
        found = [Parameter(str(i), tensor) for i, tensor in enumerate(tensors)]
    once: dict[Tensor, Parameter] = {}
    for parameter in found:
        if not isinstance(parameter.tensor, Tensor):
            kind = type(parameter.tensor).__name__
            raise TypeError(f"Expected parameters to be tensors, but got {kind}.")
        once.setdefault(parameter.tensor, parameter)
    return list(once.values())


def _owner(name: str, modules: dict[str, nn.Module]) -> nn.Module:
    """The module of a parameter; of one under `weight_norm`, for example, the one it is for."""
    path = name.rpartition(".")[0]
    if isinstance(modules[path], ParametrizationList):
        path = path.rpartition("parametrizations.")[0].rstrip(".")
    return modules[path]


def gradients_of(parameters: Iterable[Parameter], *, whole: bool = False) -> list[Gradient]:
    """The existing gradients of `parameters`, by unit; with `whole`, each tensor is one unit."""
    gradients = []
    for name, parameter, owner in parameters:
        grad, weight = parameter.grad, parameter
        if grad is None:
            continue
        if hasattr(grad, "placements") or getattr(parameter, "_fsdp_flattened", False):
            raise TypeError(
                f"Expected the gradient of `{name}` to be a whole tensor, but got a DTensor or a "
                "shard of FullyShardedDataParallel; use torch.nn.utils.clip_grad_norm_, or the "
                "model's own."
            )
        if grad.layout is not torch.strided:
            rows = grad.layout is torch.sparse_coo and grad.sparse_dim() == 1 and grad.dense_dim()
            if not rows:
                raise ValueError(
                    f"Expected the gradient of `{name}` to be dense, or sparse by rows as for an "
                    f"embedding, but got {grad.layout} of shape {tuple(grad.shape)}."
                )
            parameter.grad = grad = grad.coalesce()  # a row may occur several times
            weight, grad = parameter[grad.indices()[0]], grad.values()
        unit = None
        if not (whole or weight.dim() < 2 or isinstance(owner, WHOLE)):
            (weight, unit), (grad, _) = by_unit(weight, owner), by_unit(grad, owner)
        if grad.numel() > 0:
            gradients.append(Gradient(name, parameter, weight, grad, unit))
    return gradients
