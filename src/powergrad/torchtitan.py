"""PowerGrad Transform for torchtitan: its loss is a configured class."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import (  # pyright: ignore[reportMissingImports]
    IGNORE_INDEX,
    CrossEntropyLoss,
)
from torchtitan.distributed.spmd_types import (  # pyright: ignore[reportMissingImports]
    current_spmd_mesh,
    spmd_mesh_size,
)
from torchtitan.distributed.utils import get_spmd_backend  # pyright: ignore[reportMissingImports]

from powergrad import cross_entropy, parallel
from powergrad.checks import check_number

__all__ = ["PowerGradLoss"]


class PowerGradLoss(CrossEntropyLoss):
    r"""torchtitan's ``CrossEntropyLoss`` with PowerGrad Transform.

    In a configuration, write ``loss=PowerGradLoss.Config(alpha=0.3)`` for
    ``loss=CrossEntropyLoss.Config()``, alone or as the ``loss_fn`` of a ``ChunkedLossWrapper``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CrossEntropyLoss.Config):
        """The options of ``CrossEntropyLoss``, and the exponent."""

        alpha: float

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        super().__init__(config)
        self.fn = partial(_loss, alpha=check_number(config.alpha))
        self._maybe_compile(compile_config)


def _loss(
    pred: Tensor, labels: Tensor, *, alpha: float, global_vocab_size: int | None = None
) -> Tensor:
    """Torchtitan's `cross_entropy_loss`."""
    options: Any = {"alpha": alpha, "reduction": "sum", "ignore_index": IGNORE_INDEX}
    if isinstance(pred, DTensor):
        loss: Any = cross_entropy(pred.movedim(-1, 1).float(), labels, **options)
        return loss if isinstance(labels, DTensor) else loss.to_local()
    rows, labels = pred.flatten(0, 1).float(), labels.flatten(0, 1)
    if get_spmd_backend() != "spmd_types" or spmd_mesh_size("tp") <= 1:
        return cross_entropy(rows, labels, **options)
    mesh, classes = cast(Any, current_spmd_mesh()), cast(int, global_vocab_size)
    group = mesh.get_group("tp")
    return parallel.cross_entropy(rows, labels, classes=classes, group=group, **options)
