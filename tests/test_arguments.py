"""One contract for every loss and equation: a bad argument raises, and the message names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import powergrad
from powergrad import CrossEntropyLoss, PowerGrad

Z, Y = torch.zeros(4, 5), torch.tensor([0, 1, 2, 3])
H, W = torch.zeros(4, 3), torch.zeros(5, 3)
P = torch.full((4, 5), 0.2)

# Valid arguments, one of which is changed.
FUNCTIONS: dict[str, dict[str, Any]] = {
    "cross_entropy": {"input": Z, "target": Y},
    "binary_cross_entropy_with_logits": {"input": Z, "target": Z},
    "linear_cross_entropy": {"input": H, "linear_weight": W, "target": Y},
    "log_softmax": {"input": Z},
    "power_transform": {"p": P},
    "stationary_threshold": {"p": P},
}
ALPHAS = [
    *((float("inf"), ValueError), (-0.1, ValueError), (float("nan"), ValueError)),
    *(("0.3", TypeError), (True, TypeError), (None, TypeError)),
    (torch.tensor(1), TypeError),
    (torch.tensor(-1.5), ValueError),
    (torch.tensor([0.1, 0.2, -2.0, 0.3]), ValueError),
    (torch.tensor(float("nan")), ValueError),
    (torch.tensor(0.3, requires_grad=True), ValueError),
]
SHAPES = [(torch.zeros(shape), ValueError) for shape in ((7,), (1,), (4, 1))]
BAD: dict[str, list[tuple[dict[str, Any], type[Exception]]]] = {
    "cross_entropy": [
        ({"input": Z.long()}, TypeError),
        ({"input": [[0.0]]}, TypeError),
        ({"input": torch.tensor(0.0)}, ValueError),
        ({"input": torch.zeros(4, 0)}, ValueError),
        ({"target": [0, 1, 2, 3]}, TypeError),
        ({"target": Y[:3]}, ValueError),
        ({"target": Y[:, None]}, ValueError),
        ({"target": Y.int()}, TypeError),
        ({"target": Y + 2}, ValueError),
        ({"target": Y - 1}, ValueError),
        ({"target": Z[:, :4]}, ValueError),
        ({"target": Z[:1]}, ValueError),
        ({"ignore_index": 1, "target": Z}, ValueError),
        ({"weight": torch.ones(4)}, ValueError),
        ({"weight": torch.ones(5).double()}, TypeError),
        ({"weight": torch.ones(5).long()}, TypeError),
        ({"reduction": "average"}, ValueError),
        ({"label_smoothing": 1.2}, ValueError),
        ({"softcap": 0.0}, ValueError),
        ({"logit_scale": -1.0}, ValueError),
        ({"z_loss": -1e-4}, ValueError),
        ({"token_weight": torch.ones(3)}, ValueError),
        ({"token_weight": Y}, TypeError),
    ],
    "binary_cross_entropy_with_logits": [
        ({"input": Z.long()}, TypeError),
        ({"target": Z.long()}, TypeError),
        ({"target": Z[:1]}, ValueError),
        ({"reduction": "avg"}, ValueError),
        ({"weight": torch.ones(4)}, ValueError),
        ({"pos_weight": torch.ones(2, 4, 5)}, ValueError),
    ],
    "linear_cross_entropy": [
        ({"input": H.long()}, TypeError),
        ({"input": torch.tensor(0.0)}, ValueError),
        ({"linear_weight": torch.zeros(5, 4)}, ValueError),
        ({"linear_weight": W.double()}, TypeError),
        ({"linear_bias": torch.zeros(4)}, ValueError),
        ({"target": Y[:2]}, ValueError),
        ({"target": torch.zeros(4, 4)}, ValueError),
        ({"target": Y + 3}, ValueError),
        ({"target": Y.int()}, TypeError),
        ({"weight": torch.ones(4)}, ValueError),
        ({"reduction": "avg"}, ValueError),
        ({"chunk_rows": 0}, ValueError),
    ],
    "log_softmax": [({"dim": 2}, ValueError), ({"input": Z.int()}, TypeError)],
    "power_transform": [
        ({"dim": 2}, ValueError),
        ({"p": -P}, ValueError),
        ({"p": P * float("nan")}, ValueError),
        ({"p": P.long()}, TypeError),
    ],
}
BAD["stationary_threshold"] = BAD["power_transform"]
CALLS = [
    pytest.param(name, change, error, id=f"{name}: {next(iter(change))} {i}")
    for name in FUNCTIONS
    for i, (change, error) in enumerate(
        [({"alpha": alpha}, error) for alpha, error in ALPHAS + SHAPES] + BAD[name]
    )
]


@pytest.mark.parametrize(("name", "change", "error"), CALLS)
def test_a_bad_argument_is_named(name: str, change: dict[str, Any], error: type[Exception]) -> None:
    arguments = {"alpha": 0.3, **FUNCTIONS[name], **change}
    for gradients in (False, True):
        if gradients and isinstance(first := arguments.get("input"), torch.Tensor):
            arguments["input"] = first.clone().requires_grad_(first.is_floating_point())
        with pytest.raises(error, match=f"`{next(iter(change))}`"):
            getattr(powergrad, name)(**arguments)


def test_the_message_has_the_values() -> None:
    with pytest.raises(ValueError, match=r"\[0, 4\] .* \(-100\), but got values from 2 to 5"):
        powergrad.cross_entropy(Z, Y + 2, alpha=0.3)


@pytest.mark.parametrize(
    ("kind", "alpha", "error"),
    [(PowerGrad, *bad) for bad in ALPHAS]
    # The module checks a tensor when it is called.
    + [(CrossEntropyLoss, *bad) for bad in ALPHAS if not isinstance(bad[0], torch.Tensor)],
)
def test_alpha_is_checked_where_it_is_given(
    kind: Callable[..., Any], alpha: Any, error: type[Exception]
) -> None:
    holder = kind(0.3)
    with pytest.raises(error, match="`alpha`"):
        kind(alpha)
    with pytest.raises(error, match="`alpha`"):
        holder.alpha = alpha
    assert holder.alpha == 0.3


@pytest.mark.parametrize("change", [{"reduction": "average"}, {"label_smoothing": -1.0}])
def test_the_module_checks_where_it_is_made(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"`{next(iter(change))}`"):
        CrossEntropyLoss(0.3, **change)
