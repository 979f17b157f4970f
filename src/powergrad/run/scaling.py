"""Scales learning rates and weight decays for the duration of a step.

The values of each group are multiplied just before ``optimizer.step()`` and restored right after
it. So schedulers, checkpoints and logs see the original values. If the head and other parameters
share a group, the group is split in two for the step. The state of an optimizer belongs to the
parameters, so the step is the same as with two groups defined in the program.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

__all__ = ["ScaledStep", "Scales"]

Group = dict[str, Any]
_OF_PARAMETERS = ("params", "param_names")


@dataclass(frozen=True)
class Scales:
    """The factors of the values of every group.

    Attributes:
        lr: The factor of the learning rate.
        head_lr: An additional factor of the learning rate of the head.
        weight_decay: The factor of the weight decay.
    """

    lr: float = 1.0
    head_lr: float = 1.0
    weight_decay: float = 1.0

    def factors(self, head: bool) -> dict[str, float]:
        """The factors by key of a group, without factors of 1."""
        lr = self.lr * self.head_lr if head else self.lr
        return {k: f for k, f in (("lr", lr), ("weight_decay", self.weight_decay)) if f != 1}


@dataclass
class ScaledStep:
    """The scaled groups of `optimizer`: :meth:`apply`, step, :meth:`restore`.

    Attributes:
        scaled: The factors that have changed a value: ``lr``, ``head_lr``, ``weight_decay``.

    Raises:
        TypeError: If the optimizer cannot be scaled exactly.
    """

    optimizer: Optimizer
    scales: Scales
    head: set[nn.Parameter]
    scaled: set[str] = field(default_factory=set)
    _before: list[Group] = field(default_factory=list)
    _values: list[tuple[Group, str, Any, Any]] = field(default_factory=list)
    _parts: list[tuple[Group, list[Group]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if isinstance(self.optimizer, LBFGS):
            raise TypeError(
                "Expected an optimizer whose step is proportional to its learning rate, but got "
                "LBFGS, which uses it as the start of a line search."
            )

    def apply(self) -> None:
        """Scale the values of the groups."""
        groups = self.optimizer.param_groups
        self._before = list(groups)
        during: list[Group] = []
        for group in self._before:
            inside = [parameter in self.head for parameter in group["params"]]
            if self.scales.head_lr != 1 and any(inside) and not all(inside):
                self._check_splittable()
                parts = [self._part(group, [i == head for i in inside]) for head in (False, True)]
                self._parts.append((group, parts))
                for part, head in zip(parts, (False, True), strict=True):
                    self._scale(part, head)
                during += parts
            else:
                self._scale(group, all(inside) and bool(inside))
                during.append(group)
        groups[:] = during

    def restore(self) -> None:
        """Restore the values, except for changes by the step itself."""
        if not self._before:
            return
        changed = [key for group, key, _, scaled in self._values if group[key] is not scaled]
        for group, key, value, _ in self._values:
            group[key] = value
        for group, parts in self._parts:
            options = [{k: v for k, v in p.items() if k not in _OF_PARAMETERS} for p in parts]
            one, other = ({**o, "lr": group.get("lr")} for o in options)
            if one.keys() != other.keys() or not all(_same(one[k], other[k]) for k in one):
                changed.append("other options")
            group.update({k: v for k, v in one.items() if not _same(group.get(k), v)})
        self.optimizer.param_groups[:] = self._before
        self._before, self._values, self._parts = [], [], []
        if changed:
            raise TypeError(
                "Expected an optimizer that does not change the values of its groups, but got "
                f"{type(self.optimizer).__name__}, which changes {changed[0]} in its step, so they "
                "cannot be scaled."
            )

    def _scale(self, group: Group, head: bool) -> None:
        for key, factor in self.scales.factors(head).items():
            value = group.get(key)
            if value is None and key == "lr":
                raise TypeError(
                    "Expected an optimizer whose groups have an `lr`, but got "
                    f"{type(self.optimizer).__name__}, whose learning rate cannot be scaled."
                )
            if value is None or (not isinstance(value, Tensor) and value == 0):
                continue
            group[key] = value * factor
            self._values.append((group, key, value, group[key]))
            if key == "weight_decay":
                self.scaled.add("weight_decay")
            else:
                self.scaled |= {"lr", "head_lr"} if head else {"lr"}

    def _part(self, group: Group, chosen: list[bool]) -> Group:
        part = copy.deepcopy({k: v for k, v in group.items() if k not in _OF_PARAMETERS})
        for key in group.keys() & set(_OF_PARAMETERS):
            part[key] = list(compress(group[key], chosen))
        return part

    def _check_splittable(self) -> None:
        kind = type(self.optimizer)
        if not f"{kind.__module__}.".startswith(("torch.optim.", "timm.optim.")):
            raise TypeError(
                f"Expected {kind.__name__} to have a separate group for the head, but got one with "
                "other parameters, which can be split only for optimizers of torch.optim and timm; "
                "put the head into its own group."
            )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.shape == b.shape and bool((a == b).all()))
    return a is b or (type(a) is type(b) and bool(a == b))
