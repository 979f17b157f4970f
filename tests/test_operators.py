"""The registered operators, by PyTorch's own checks; their gradients are in test_gradients.py."""

from __future__ import annotations

import pytest
import torch
from cases import OPTIONS, build, check_gradient, check_value
from torch import Tensor
from torch._dynamo.testing import EagerAndRecordGraphs
from torch.library import opcheck

import powergrad
from powergrad import kernels
from powergrad import loss as loss_module

OPS = torch.ops.powergrad
LABELS = torch.tensor([0, 3, 1, -100, 2])


def alphas() -> list[Tensor]:
    per_row = torch.tensor([0.0, 0.3, 0.5, 1.0, 0.7], dtype=torch.float64).reshape(5, 1)
    return [torch.tensor(0.3, dtype=torch.float64), torch.tensor(0.0), per_row]


def logits(generator: torch.Generator, dtype: torch.dtype = torch.float64) -> Tensor:
    return (3 * torch.randn(5, 4, generator=generator, dtype=torch.float64)).to(dtype)


@pytest.mark.parametrize("alpha", alphas())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_log_softmax_passes_opcheck(alpha, dtype, generator):
    z = logits(generator, dtype).requires_grad_()
    for wider in (None, torch.float64):
        opcheck(OPS.log_softmax.default, (z, alpha, 1, wider))


@pytest.mark.parametrize(
    ("alpha", "reduction"), [*zip(alphas(), ["mean", "sum", "none"], strict=True)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("native", [True, False])
def test_cross_entropy_passes_opcheck(alpha, reduction, dtype, native, generator, monkeypatch):
    if not native:
        monkeypatch.setattr(kernels, "library", lambda: None)
    z = logits(generator, dtype).requires_grad_()
    weight = torch.rand(4, generator=generator).to(dtype)
    for w, eps in ((None, 0.0), (weight, 0.1)):
        opcheck(OPS.cross_entropy.default, (z, LABELS, w, alpha, -100, eps, reduction))


@pytest.mark.parametrize("alpha", alphas())
def test_second_and_third_derivatives_are_those_of_the_function(alpha, generator):
    z = logits(generator).requires_grad_()
    u, v, w = (torch.randn(z.shape, generator=generator, dtype=torch.float64) for _ in range(3))

    def derivatives(log_p: Tensor) -> list[Tensor]:
        (first,) = torch.autograd.grad((log_p**2).sum() + (log_p * u).sum(), z, create_graph=True)
        (second,) = torch.autograd.grad(first, z, v, create_graph=True)
        return [first, second, *torch.autograd.grad(second, z, w)]

    ours = derivatives(OPS.log_softmax(z, alpha, 1, None))
    public = alpha.squeeze() if alpha.dim() else alpha
    expected = derivatives(powergrad.log_softmax(z, 1, alpha=public))
    for a, b in zip(ours, expected, strict=True):
        assert (a - b).abs().max() <= 1e-12


def test_torch_func_refuses_the_operators(generator):
    z, alpha = logits(generator), torch.tensor(0.3)
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda z: OPS.log_softmax(z, alpha, 1, None)[0, 0])(z)


@pytest.mark.skipif(not powergrad.native_available(), reason="needs the C kernel")
@pytest.mark.parametrize(
    "name", ["defaults", "none", "smoothing, weights", "alpha of each example"]
)
def test_compiled_graphs_call_the_kernel_for_large_logits(name, monkeypatch):
    monkeypatch.setattr(loss_module, "OPERATOR", 0)
    case = build(OPTIONS[name])
    z = case.logits.requires_grad_()
    recorder = EagerAndRecordGraphs()

    def loss(z: Tensor) -> Tensor:
        return powergrad.cross_entropy(z, case.target, alpha=case.alpha, **case.options)

    torch.compiler.reset()
    compiled = torch.compile(loss, backend=recorder, fullgraph=True)
    value = compiled(z)
    assert any(n.target is OPS.cross_entropy for n in recorder.graphs[0].graph.nodes)
    check_value(case, value.detach())
    check_gradient(case, *torch.autograd.grad(value, z, case.upstream))
    case.target = torch.full_like(case.target, z.shape[1])
    with pytest.raises(ValueError, match="`target`"):
        compiled(z)
