"""Units, the slices of a weight or gradient that belong to one output, and their norms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer

from powergrad._native import norms as native

Dims = tuple[int, ...]
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


# Units --------------------------------------------------------------------------------------------


def transposed_groups(module: nn.Module | None) -> int | None:
    """The number of groups of a transposed convolution; None for any other module."""
    return module.groups if isinstance(module, TRANSPOSED) else None


def by_unit(tensor: Tensor, groups: int | None = None) -> tuple[Tensor, Dims]:
    """A view of a weight or its gradient, and the dimensions of that view that one unit spans."""
    if groups is None:  # (out, in / groups, *kernel), or (out, in)
        return tensor, tuple(range(1, tensor.dim()))
    # A transposed convolution has (in, out / groups, *kernel), viewed as
    # (groups, in / groups, out / groups, *kernel): dimensions 0 and 2 index the outputs.
    tensor = tensor.unflatten(0, (groups, -1))
    return tensor, (1, *range(3, tensor.dim()))


def in_rows(unit: Dims | None, *tensors: Tensor) -> bool:
    """Whether the C kernel supports `tensors`: each is one unit (None) or has one unit per row."""
    return (unit is None or len(unit) == tensors[0].dim() - 1) and native.serves(*tensors)


def unit_norms(
    tensors: Sequence[Tensor],
    units: Sequence[Dims | None],
    dtype: torch.dtype | None = None,
    *,
    rows: bool = False,
) -> Tensor:
    """The L2 norms of all units of the tensors, as one vector.

    A unit spans the dimensions in `units`; None means the whole tensor. With `rows` the C kernel
    computes the norms, see :func:`in_rows`.
    """
    pairs = list(zip(tensors, units, strict=True))
    if rows:
        counts = [1 if unit is None else len(tensor) for tensor, unit in pairs]
        return native.unit_norms(tensors, counts)
    return torch.cat([vector_norm(x, dim=unit, dtype=dtype).flatten() for x, unit in pairs])


# Parameters and their gradients -------------------------------------------------------------------


class Parameter(NamedTuple):
    """A parameter and, in a model, the module that it belongs to."""

    name: str
    tensor: Tensor
    owner: nn.Module | None = None


class Gradient(NamedTuple):
    """The gradient of a parameter, by unit."""

    name: str
    weight: Tensor
    tensor: Tensor
    unit: Dims | None  # the dimensions that one unit spans; None: the whole tensor
    rows: bool  # whether the C kernel supports it
    # The gradient and the weight are divided by these before they are compared.
    scale: float = 1.0
    weight_scale: float = 1.0

    @property
    def unit_shape(self) -> list[int]:
        """The shape in which one number per unit broadcasts over the gradient."""
        if self.unit is None:
            return []
        return [1 if dim in self.unit else size for dim, size in enumerate(self.tensor.shape)]


def parameters_of(source: nn.Module | Optimizer | Tensor | Iterable[Tensor]) -> list[Parameter]:
    """The parameters of a model, of an optimizer, or of an iterable, without duplicates."""
    if isinstance(source, nn.Module):
        return list(_module_parameters(source))
    if isinstance(source, Optimizer):
        parameters = [
            Parameter(name, tensor)
            for i, group in enumerate(source.param_groups)
            for name, tensor in zip(
                group.get("param_names") or [f"{i}.{j}" for j in range(len(group["params"]))],
                group["params"],
                strict=True,
            )
        ]
    else:
        tensors = [source] if isinstance(source, Tensor) else source
        parameters = [Parameter(str(i), tensor) for i, tensor in enumerate(tensors)]
    once: dict[Tensor, Parameter] = {}
    for parameter in parameters:
        if not isinstance(parameter.tensor, Tensor):
            kind = type(parameter.tensor).__name__
            raise TypeError(f"Expected parameters to be tensors, but got {kind}.")
        once.setdefault(parameter.tensor, parameter)
    return list(once.values())


def _module_parameters(model: nn.Module) -> Iterator[Parameter]:
    modules = dict(model.named_modules())
    for name, tensor in model.named_parameters():
        path = name.rpartition(".")[0]
        if isinstance(modules[path], ParametrizationList):  # of weight_norm, for example
            path = path.rpartition("parametrizations.")[0].rstrip(".")
        yield Parameter(name, tensor, modules[path])


def gradients_of(parameters: Iterable[Parameter], *, whole: bool = False) -> list[Gradient]:
    """The existing gradients of `parameters`, by unit; with `whole`, each tensor is one unit."""
    gradients = []
    for name, weight, owner in parameters:
        grad = weight.grad
        if grad is None:
            continue
        if hasattr(grad, "placements"):  # a DTensor's units may be spread over processes
            raise TypeError(
                f"Expected the gradient of `{name}` to be a whole tensor, but got a DTensor; use "
                "`torch.nn.utils.clip_grad_norm_`, which supports DTensors."
            )
        if getattr(weight, "_fsdp_flattened", False):  # by FullyShardedDataParallel
            raise TypeError(
                f"Expected the gradient of `{name}` to be a whole tensor, but got a shard of a "
                "parameter that FullyShardedDataParallel flattened; use its own `clip_grad_norm_`."
            )
        if grad.layout is not torch.strided:
            weight, grad = _sparse_rows(name, weight, grad)
        if grad.numel() == 0:
            continue
        unit = None
        if not (whole or weight.dim() < 2 or isinstance(owner, (nn.LayerNorm, nn.RMSNorm))):
            groups = transposed_groups(owner)
            (weight, unit), (grad, _) = by_unit(weight, groups), by_unit(grad, groups)
        gradients.append(Gradient(name, weight, grad, unit, in_rows(unit, grad, weight)))
    return gradients


def _sparse_rows(name: str, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of the weight that a sparse gradient has, and the gradient's own rows (a view)."""
    if grad.layout is not torch.sparse_coo or grad.sparse_dim() != 1 or grad.dense_dim() == 0:
        raise ValueError(
            f"Expected the gradient of `{name}` to be dense, or sparse by rows as for an "
            f"embedding, but got {grad.layout} of shape {tuple(grad.shape)}."
        )
    weight.grad = grad = grad.coalesce()  # a row may occur several times
    return weight[grad.indices()[0]], grad.values()
