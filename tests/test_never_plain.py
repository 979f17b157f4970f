"""No way to ask for PGT is silently plain: each cell of the matrix is right, or raises.

The eager contexts of most ways run in `make test`; the other cells, of which many compile, export
or start processes, run in `make test-matrix`. What each cell does is recorded in
results/what_works_where.json, from which the table in docs/what-works-where.md is made.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

import never_plain
import pytest
import torch
from never_plain import ALPHA, CONTEXTS, DISTRIBUTED, WAYS, Context, Way, kind, outcome
from torch import nn

import powergrad
from powergrad import verify

PLAIN = Way("plain", lambda z, y: nn.functional.cross_entropy(z, y))
RECORD = json.loads(never_plain.RECORD.read_text())
RECORDED = RECORD["outcomes"]
IS_RECORDED = torch.__version__.split("+")[0] == RECORD["torch"].split("+")[0]


def cells(ways: list[Way], contexts: list[Context]) -> list:
    def quick(way: Way, context: Context) -> bool:
        return context.group == "eager" and (not way.by or way.name.endswith(": F.cross_entropy"))

    return [
        pytest.param(
            way,
            context,
            id=f"{context.key}: {way.name}",
            marks=[] if quick(way, context) else pytest.mark.matrix,
        )
        for context in contexts
        for way in ways
    ]


def check(text: str, recorded: str) -> None:
    assert kind(text) in ("right", "raises", "PyTorch raises"), text
    if IS_RECORDED:  # other versions of PyTorch may raise elsewhere, or with other messages
        assert kind(text) == recorded, text


@pytest.mark.parametrize(("way", "context"), cells(WAYS, CONTEXTS))
def test_each_cell(way: Way, context: Context, record_property: Any) -> None:
    text = outcome(context.run, way)
    record_property("cell", kind(text))  # into the file of `--junitxml`
    check(text, RECORDED[context.key][way.name])


@pytest.mark.matrix
def test_two_processes(tmp_path) -> None:
    for (name, way), text in never_plain.distributed_outcomes(tmp_path).items():
        check(text, RECORDED[f"{name} [two processes]"][way])


def test_the_record_has_every_cell() -> None:
    names = [context.key for context in CONTEXTS]
    names += [f"{name} [two processes]" for name in DISTRIBUTED]
    assert list(RECORDED) == names
    for outcomes in RECORDED.values():
        assert list(outcomes) == [way.name for way in WAYS]


def test_the_matrix_sees_plain_and_wrong_gradients() -> None:
    wrong = Way("wrong", lambda z, y: 2 * nn.functional.cross_entropy(z, y))
    assert outcome(CONTEXTS[0].run, PLAIN) == "plain"
    assert outcome(CONTEXTS[0].run, wrong) == "wrong"


SOFTMAX = [way for way in WAYS if way.gradient is never_plain.softmax_gradient]


def verified(way: Way, context: Context) -> str:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, never_plain.CLASSES)).double()
    x = torch.randn(never_plain.ROWS, 6, dtype=torch.float64)
    prepare = context.prepare
    assert prepare is not None

    def step() -> None:
        with way.around():
            loss = prepare(way.loss)(model(x), never_plain.labels())
        loss.backward()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what PyTorch's tracers say
        with way.enabled():
            result = verify(step, model)
    if result.verdict == "pgt":
        assert result.alpha == pytest.approx(ALPHA, abs=1e-6)
    return result.verdict


WITH_A_STEP = [context for context in CONTEXTS if context.prepare is not None]


@pytest.mark.matrix
@pytest.mark.parametrize(("way", "context"), cells(SOFTMAX, WITH_A_STEP))
def test_verify_knows_what_each_cell_does(way: Way, context: Context) -> None:
    if not IS_RECORDED:
        pytest.skip("what works was recorded with another version of PyTorch")
    if RECORDED[context.key][way.name] != "right":
        pytest.skip("raises")
    # One alpha per row is confirmed for the logits of the head as a whole, not for parts of them.
    in_parts = context.name == "threads" and "tensor alpha" in way.name
    assert verified(way, context) == ("cannot tell" if in_parts else "pgt")


def test_verify_knows_a_plain_loss() -> None:
    assert verified(PLAIN, CONTEXTS[0]) == "plain"


def tensors_in(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(tensors_in, value))
    return isinstance(value, torch.Tensor)


@pytest.mark.parametrize("way", [way for way in WAYS if not way.by])
def test_a_loss_keeps_tensors_only_where_checkpoints_can_drop_them(way: Way) -> None:
    nodes = [way.loss(never_plain.logits().requires_grad_(), never_plain.labels()).grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None:
            assert not tensors_in(list(getattr(node, "__dict__", {}).values()))
            try:
                nodes.extend(following for following, _ in node.next_functions)
            except RuntimeError:
                pytest.skip("this version of PyTorch does not show what follows a custom function")


def test_a_tensor_alpha_that_changes_before_the_backward_pass_raises() -> None:
    alpha = torch.full((never_plain.ROWS,), ALPHA, dtype=torch.float64)
    z = never_plain.logits().requires_grad_()
    losses: Any = (powergrad.cross_entropy, powergrad.linear_cross_entropy)
    for loss in losses:
        head = [torch.eye(never_plain.CLASSES).double()] * (loss is powergrad.linear_cross_entropy)
        value = loss(z, *head, never_plain.labels(), alpha=alpha, reduction="none").sum()
        alpha.fill_(1.0)
        with pytest.raises(RuntimeError, match="inplace operation"):
            value.backward()
