"""PowerGrad Transform for torchtitan: its loss is a configured class."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch import Tensor
from torchtitan.components.loss import (  # pyright: ignore[reportMissingImports]
    IGNORE_INDEX,
    CrossEntropyLoss,
)
from torchtitan.distributed.spmd_types import (  # pyright: ignore[reportMissingImports]
    current_spmd_mesh,
    spmd_mesh_size,
)
from torchtitan.distributed.utils import get_spmd_backend  # pyright: ignore[reportMissingImports]

import powergrad
from powergrad.checks import check_number, is_dtensor

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
    if is_dtensor(pred) and is_dtensor(labels):
        return powergrad.cross_entropy(pred.movedim(-1, 1).float(), labels, **options)
    mesh, local, sharded, vocabulary = None, pred, cast(Any, pred), cast(Any, global_vocab_size)
    if is_dtensor(pred):
        mesh, vocabulary, local = sharded.device_mesh, pred.shape[-1], sharded.to_local()
    elif get_spmd_backend() == "spmd_types" and spmd_mesh_size("tp") > 1:
        mesh = current_spmd_mesh()
    rows, labels = local.flatten(0, 1).float(), labels.flatten(0, 1)
    if mesh is None:
        return powergrad.cross_entropy(rows, labels, **options)
    from powergrad import parallel

    group = mesh.get_group("tp")
    return parallel.cross_entropy(rows, labels, classes=vocabulary, group=group, **options)
