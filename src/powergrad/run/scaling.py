"""Scales learning rates and weight decays for the duration of a step.

The values of each group are multiplied just before ``optimizer.step()`` and restored right after
it, so schedulers, checkpoints and logs see the original ones. If the head and other parameters
share a group, the head gets its own for the step. The state of an optimizer belongs to the
parameters, so the step is the same as with two groups defined in the program.
"""

from __future__ import annotations

import copy
import math
from itertools import compress
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

__all__ = ["ScaledStep"]

Group = dict[str, Any]
LISTS = {"params", "param_names"}  # what differs between the parts of a group


class ScaledStep:
    """The scaled groups of `optimizer`: `apply`, step, `restore`; a TypeError if it is not exact.

    `scales` are the factors ``lr``, ``weight_decay`` and ``head_lr``, an additional one for the
    learning rate of the parameters `head`; `scaled` are those that have changed a value.
    """

    def __init__(
        self, optimizer: Optimizer, scales: dict[str, float], head: set[nn.Parameter]
    ) -> None:
        if isinstance(optimizer, LBFGS):
            raise TypeError(
                "Expected an optimizer whose step is proportional to its learning rate, but got "
                "LBFGS, which uses it as the start of a line search."
            )
        self.optimizer, self.scales, self.head = optimizer, scales, head
        self.scaled: set[str] = set()
        self._values: list[tuple[Group, str, Any, Any]] = []  # before, and during the step
        self._parts: list[tuple[Group, Group]] = []  # of a group that was split: the head's

    def apply(self) -> None:
        """Split and scale the groups."""
        groups = self.optimizer.param_groups
        for group in list(groups):
            inside = [parameter in self.head for parameter in group["params"]]
            if any(inside) and not all(inside):
                groups.append(self._split(group, inside))
        for group in groups:
            is_head = any(parameter in self.head for parameter in group["params"])
            rates = ("lr", "head_lr") if is_head else ("lr",)
            for key, factors in (("lr", rates), ("weight_decay", ("weight_decay",))):
                if self.scales.keys() & factors:
                    self._scale(group, key, factors)

    def restore(self) -> None:
        """Restore the groups; a TypeError if the step itself has changed them."""
        changed = [key for group, key, _, during in self._values if group.get(key) is not during]
        for group, key, before, _ in self._values:
            group[key] = before
        for group, part in self._parts:
            others = (group.keys() | part.keys()) - LISTS
            changed += [key for key in others if not _same(group.get(key), part.get(key))]
        parts = [id(part) for _, part in self._parts]
        groups = self.optimizer.param_groups
        groups[:] = [group for group in groups if id(group) not in parts]
        self._values, self._parts = [], []
        if changed:
            raise TypeError(
                "Expected an optimizer that does not change the values of its groups, but got "
                f"{type(self.optimizer).__name__}, which changes {changed[0]} in its step, so they "
                "cannot be scaled."
            )

    def _scale(self, group: Group, key: str, factors: tuple[str, ...]) -> None:
        value = group.get(key)
        if value is None and key == "lr":
            raise TypeError(
                "Expected an optimizer whose groups have an `lr`, but got "
                f"{type(self.optimizer).__name__}, whose learning rate cannot be scaled."
            )
        if value is not None and (isinstance(value, Tensor) or value != 0):
            self._set(group, key, value * math.prod(self.scales.get(name, 1) for name in factors))
            self.scaled.update(factors)

    def _split(self, group: Group, inside: list[bool]) -> Group:
        """Leave to `group` what is not `inside`; return a group of the rest."""
        kind = type(self.optimizer)
        if not f"{kind.__module__}.".startswith(("torch.optim.", "timm.optim.")):
            raise TypeError(
                f"Expected {kind.__name__} to have a separate group for the head, but got one with "
                "other parameters, which can be split only for optimizers of torch.optim and timm; "
                "put the head into its own group."
            )
        part = copy.deepcopy({key: value for key, value in group.items() if key not in LISTS})
        for key in group.keys() & LISTS:
            part[key] = list(compress(group[key], inside))
            self._set(group, key, list(compress(group[key], [not chosen for chosen in inside])))
        self._parts.append((group, part))
        return part

    def _set(self, group: Group, key: str, value: Any) -> None:
        self._values.append((group, key, group[key], value))
        group[key] = value


def _same(a: Any, b: Any) -> bool:
    return a is b or (
        type(a) is type(b) and bool((a == b).all() if isinstance(a, Tensor) else a == b)
    )
