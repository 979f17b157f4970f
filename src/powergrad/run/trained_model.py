"""The model that an optimizer trains, found by its parameters."""

from __future__ import annotations

import gc
from collections.abc import Iterable

from torch import nn
from torch.fx import GraphModule
from torch.optim import Optimizer

from powergrad.head import check_untied, find_head, unwrap

__all__ = ["find_model", "head_parameters"]


def find_model(optimizer: Optimizer) -> nn.Module:
    """The outermost module that holds all parameters of `optimizer`.

    Graph modules, which ``torch.compile`` creates from a model, are considered last.

    Raises:
        ValueError: If no single module holds all of them.
    """
    wanted = {p for group in optimizer.param_groups for p in group["params"]}
    modules = [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]
    modules = [module for module in modules if "_modules" in vars(module)]  # initialised
    written = [module for module in modules if not isinstance(module, GraphModule)]
    roots = _common_roots(wanted, written) or _common_roots(wanted, modules)
    if not roots:
        owners = {type(m).__name__: None for m in modules if any(p in wanted for p in _own(m))}
        raise ValueError(
            f"Expected one model that holds all parameters of {type(optimizer).__name__}, but got "
            f"{'several modules (' + ', '.join(owners) + ')' if owners else 'no module'}."
        )
    return min(roots, key=lambda module: sum(1 for _ in module.parameters()))


def _common_roots(wanted: set[nn.Parameter], modules: list[nn.Module]) -> list[nn.Module]:
    """The outermost of `modules` that contain all owners of the parameters."""
    parents: dict[int, list[nn.Module]] = {}
    for module in modules:
        for child in module._modules.values():
            parents.setdefault(id(child), []).append(module)
    owners = [m for m in modules if any(p in wanted for p in _own(m))]
    roots = [{id(root): root for root in _roots(owner, parents)} for owner in owners]
    return [root for key, root in roots[0].items() if all(key in r for r in roots)] if roots else []


def head_parameters(model: nn.Module, name: str | None) -> set[nn.Parameter]:
    """The parameters of the head of `model`, which must not be tied to others.

    Raises:
        ValueError: If there is not exactly one head, or it shares a parameter.
    """
    model = unwrap(model)
    head = find_head(model, name)
    check_untied(head, model)
    return set(head.parameters())


def _own(module: nn.Module) -> Iterable[nn.Parameter]:
    return (p for p in module._parameters.values() if p is not None)


def _roots(module: nn.Module, parents: dict[int, list[nn.Module]]) -> Iterable[nn.Module]:
    """The outermost modules that contain `module`."""
    todo, seen = [module], {id(module)}
    while todo:
        current = todo.pop()
        around = parents.get(id(current), [])
        if not around:
            yield current
        for parent in around:
            if id(parent) not in seen:
                seen.add(id(parent))
                todo.append(parent)
