"""Learning rates and decays that are scaled for the duration of a step.

Just before ``optimizer.step()`` the values of each group are multiplied, and right after it they
are what they were. So a scheduler, a checkpoint or a log sees only its own values. Where the head
and other parameters share a group, the group is split in two for the step; the state of an
optimizer belongs to the parameters, so the step is the one that two groups written by hand take.
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
    """What the values of every group are multiplied by.

    Attributes:
        lr: The learning rate.
        head_lr: The learning rate of the head, in addition.
        weight_decay: The weight decay.
    """

    lr: float = 1.0
    head_lr: float = 1.0
    weight_decay: float = 1.0

    def factors(self, head: bool) -> dict[str, float]:
        """The factors by key of a group, those of 1 left out."""
        lr = self.lr * self.head_lr if head else self.lr
        return {k: f for k, f in (("lr", lr), ("weight_decay", self.weight_decay)) if f != 1}


@dataclass
class ScaledStep:
    """The scaled groups of `optimizer`: :meth:`apply`, step, :meth:`restore`.

    Attributes:
        scaled: The options that have changed a value: ``lr``, ``head_lr``, ``weight_decay``.

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
                "LBFGS, for which it is where a line search starts."
            )

    def apply(self) -> None:
        """Scale."""
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
        """Give back what was there, with what the step itself has changed."""
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
                "Expected an optimizer that leaves the values of its groups alone, but "
                f"{type(self.optimizer).__name__} changes {changed[0]} in its step: they cannot "
                "be scaled."
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
                f"Expected {kind.__name__} to have a group for the head alone, but got one with "
                "other parameters too, which is split only for optimizers of torch.optim and timm; "
                "give the head a group of its own."
            )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.shape == b.shape and bool((a == b).all()))
    return a is b or (type(a) is type(b) and bool(a == b))
