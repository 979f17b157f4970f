"""Every implementation of PGT's loss x every option, against one reference (`references.py`).

Value and gradient are compared, the latter for an incoming gradient that is not 1, and once more by
a second backward pass. The rule by which an implementation lacks an option stands in its row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from cases import OPTIONS, Case, Form, build, check_gradient, check_value, forms
from hypothesis import example, given, settings
from hypothesis import strategies as st
from references import literal_gradient, potential, row_error
from torch import Tensor, nn

import powergrad
from powergrad import PowerGrad, kernels, rows, transform
from powergrad import loss as loss_module

OPERATORS = torch.ops.powergrad


def everything(form: Form) -> bool:
    return True


def what_pytorch_takes(form: Form) -> bool:
    return not form.extended


def rows_of_logits(form: Form) -> bool:
    """(N, C), as `torch.ops.powergrad.cross_entropy` takes them."""
    return len(form.shape) == 2 and form.target == "labels" and not form.extended


def what_a_head_computes(form: Form) -> bool:
    """(..., C), and finite: the tests' head is the identity, and 0 * -inf is NaN."""
    return len(form.shape) <= 2 and not form.masked


def what_nll_loss_takes(form: Form) -> bool:
    return not form.soft and not form.label_smoothing and not form.extended


@contextlib.contextmanager
def without_kernel() -> Iterator[None]:
    with patch.object(kernels, "library", lambda: None):
        yield


@contextlib.contextmanager
def in_blocks() -> Iterator[None]:
    """As large logits are worked on where there is no kernel."""
    blocks = patch.multiple(rows, LARGE=0, BLOCK=80)
    with without_kernel(), blocks:
        yield


@dataclass(frozen=True)
class Implementation:
    name: str
    loss: Callable[[Tensor, Case], Tensor]
    takes: Callable[[Form], bool] = everything
    around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    cancels: bool = False  # it forms p' - 1 at the label, as PyTorch does

    def __call__(self, logits: Tensor, case: Case) -> Tensor:
        with self.around():
            return self.loss(logits, case)


def definition(z: Tensor, case: Case) -> Tensor:
    """What every tracer sees."""
    with (
        patch.multiple(
            loss_module, way_of=lambda *_: "definition", _is_common_case=lambda *_: False
        ),
        patch.object(transform, "is_plain", lambda *_: False),
    ):
        return cross_entropy(z, case)


def cross_entropy(z: Tensor, case: Case) -> Tensor:
    return powergrad.cross_entropy(z, case.target, alpha=case.alpha, **case.options, **case.extra)


def module(z: Tensor, case: Case) -> Tensor:
    extra = dict(case.extra)
    tokens = extra.pop("token_weight", None)
    return powergrad.CrossEntropyLoss(case.alpha, **case.options, **extra)(z, case.target, tokens)


def of_log_p(log_p: Tensor, case: Case) -> Tensor:
    weight = case.options["weight"]
    options = {
        "ignore_index": case.options.get("ignore_index", -100),
        "reduction": case.options["reduction"],
        "weight": None if weight is None else weight.to(log_p.dtype),
    }
    return F.nll_loss(log_p, case.target, **options).to(case.logits.dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def log_softmax(z: Tensor, case: Case) -> Tensor:
    log_p = powergrad.log_softmax(z, case.class_dim, alpha=case.alpha, dtype=wide(z.dtype))
    return of_log_p(log_p, case)


def linear(z: Tensor, case: Case) -> Tensor:
    head = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device)
    return powergrad.linear_cross_entropy(
        z, head, case.target, alpha=case.alpha, chunk_rows=2, **case.options, **case.extra
    )


def column(case: Case) -> Tensor:
    """alpha as the operators take it: 0-d, or with the dimensions of the logits."""
    alpha = torch.as_tensor(case.alpha, dtype=torch.float64)
    if not alpha.dim():
        return alpha
    alpha = alpha.reshape(alpha.shape + (1,) * (case.logits.dim() - 1 - alpha.dim()))
    return alpha.unsqueeze(case.class_dim)


def operator(z: Tensor, case: Case) -> Tensor:
    o = case.options
    loss, _ = OPERATORS.cross_entropy(
        z,
        case.target,
        o["weight"],
        column(case),
        o.get("ignore_index", -100),
        o["label_smoothing"],
        o["reduction"],
    )
    return loss.to(z.dtype)


def primitive_operator(z: Tensor, case: Case) -> Tensor:
    log_p = OPERATORS.log_softmax(z, column(case), case.class_dim, wide(z.dtype))
    return of_log_p(log_p, case)


def mode(function: Callable[[Tensor, Case], Tensor]) -> Callable[[Tensor, Case], Tensor]:
    def inside(z: Tensor, case: Case) -> Tensor:
        with PowerGrad(case.alpha):
            return function(z, case)

    return inside


def torch_log_softmax(z: Tensor, case: Case) -> Tensor:
    return of_log_p(torch.log_softmax(z, case.class_dim, wide(z.dtype)), case)


def torch_linear(z: Tensor, case: Case) -> Tensor:
    head = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device)
    return F.linear_cross_entropy(z, head, case.target, **case.options)


IMPLEMENTATIONS = [
    Implementation("cross_entropy", cross_entropy),
    Implementation("cross_entropy, no kernel", cross_entropy, around=without_kernel),
    Implementation("cross_entropy, in blocks", cross_entropy, around=in_blocks),
    Implementation("definition", definition, cancels=True),
    Implementation("CrossEntropyLoss", module),
    Implementation("log_softmax", log_softmax, what_nll_loss_takes),
    Implementation("linear_cross_entropy", linear, what_a_head_computes),
    Implementation("linear_cross_entropy, no kernel", linear, what_a_head_computes, without_kernel),
    Implementation("operator", operator, rows_of_logits),
    Implementation("operator, no kernel", operator, rows_of_logits, without_kernel),
    Implementation("operator of log_softmax", primitive_operator, what_nll_loss_takes),
    Implementation(
        "PowerGrad, F.cross_entropy",
        mode(lambda z, case: F.cross_entropy(z, case.target, **case.options)),
        what_pytorch_takes,
    ),
    Implementation(
        "PowerGrad, nn.CrossEntropyLoss",
        mode(lambda z, case: nn.CrossEntropyLoss(**case.options)(z, case.target)),
        what_pytorch_takes,
    ),
    Implementation("PowerGrad, log_softmax", mode(torch_log_softmax), what_nll_loss_takes),
]
if hasattr(F, "linear_cross_entropy"):
    IMPLEMENTATIONS += [
        Implementation(
            "PowerGrad, F.linear_cross_entropy",
            mode(torch_linear),
            lambda form: what_a_head_computes(form) and not form.extended,
        )
    ]
every_implementation = pytest.mark.parametrize("of", IMPLEMENTATIONS, ids=lambda of: of.name)


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ROUNDS_OFTEN = torch.__version__ < "2.8"  # PyTorch's own float16 loss, which alpha 1 calls
TABLE = [
    pytest.param(of, replace(form, dtype=dtype), id=f"{of.name}: {name} [{str(dtype)[6:]}]")
    for of in IMPLEMENTATIONS
    for name, form in OPTIONS.items()
    for dtype in DTYPES
    if of.takes(form)
    and not (ROUNDS_OFTEN and dtype == torch.float16 and (form.alpha, form.alphas) == (1, "number"))
]


def compare(of: Implementation, case: Case) -> None:
    """Value and gradient, twice, with the arguments left as they were."""
    copies = [tensor.clone() for tensor in case.tensors]
    leaf = case.logits.detach().requires_grad_()  # shares its memory
    with of.around():  # the backward pass may compute the loss again
        value = of(leaf, case)
        first = torch.autograd.grad(value, leaf, case.upstream, retain_graph=True)
        second = torch.autograd.grad(value, leaf, case.upstream)
        with torch.no_grad():
            again = of(case.logits, case)
    check_value(case, value.detach())
    if not of.name.startswith("PowerGrad"):  # without gradients it calls PyTorch's own function
        check_value(case, again)
    for gradient in (*first, *second):
        check_gradient(case, gradient, cancels=of.cancels)
    for tensor, copied in zip(case.tensors, copies, strict=True):
        assert torch.equal(tensor.nan_to_num(7), copied.nan_to_num(7))


@pytest.mark.parametrize(("of", "form"), TABLE)
def test_value_and_gradient(of: Implementation, form: Form, device: torch.device) -> None:
    compare(of, build(form, device))


@every_implementation
@settings(max_examples=3 * settings().max_examples)
@given(st.data())
def test_random_combinations(of: Implementation, device: torch.device, data: st.DataObject) -> None:
    compare(of, build(data.draw(forms().filter(of.takes)), device))


@every_implementation
@given(
    st.lists(st.floats(-60, 60), min_size=2, max_size=6), st.floats(0.0, 0.99), st.integers(0, 5)
)
@example([-58.0, 35.0], 0.96875, 1)
@example([-60.0, 60.0], 0.99, 1)
def test_gradient_is_the_papers_equation(
    of: Implementation, logits: list[float], alpha: float, label: int
) -> None:
    """Also where ``p' - q`` is 1e-40, far below what float64 holds beside 1."""
    label %= len(logits)
    case = build(Form(shape=(1, len(logits)), dtype=torch.float64))
    case.alpha, case.target = alpha, torch.tensor([label])
    z = torch.tensor([logits], dtype=torch.float64, requires_grad=True)
    (actual,) = torch.autograd.grad(of(z, case), z)
    q = [float(i == label) for i in range(len(logits))]
    expected = torch.tensor([literal_gradient(logits, q, alpha)], dtype=torch.float64)
    scale = torch.ones(1, 1) if of.cancels else None
    assert row_error(actual, expected, 1, scale) <= 1e-12


SOME = [
    *("none", "weights", "smoothing, weights", "a class ignored, sum", "images, none"),
    *("a class ignored, smoothing, weights", "probabilities, weights, sum"),
    *("alpha of each example", "alpha of each position"),
]
EACH_WITH_SOME = [
    pytest.param(of, replace(OPTIONS[name], dtype=torch.float64), id=f"{of.name}: {name}")
    for of in IMPLEMENTATIONS
    for name in SOME
    if of.takes(OPTIONS[name])
]


@pytest.mark.parametrize(("of", "form"), EACH_WITH_SOME)
def test_second_derivative_is_that_of_the_potential(of: Implementation, form: Form) -> None:
    case = build(form)
    if isinstance(case.alpha, Tensor):
        case.alpha = case.alpha.clamp(min=0.1)  # there is none at 0
    z = case.logits.requires_grad_()
    direction = torch.randn(z.shape, generator=torch.Generator().manual_seed(1)).double()

    def twice(loss: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(loss, z, case.upstream, create_graph=True)
        return torch.autograd.grad(first, z, direction)[0]

    expected = twice(potential(z, case.target, case.alpha, **case.options))
    assert (twice(of(z, case)) - expected).abs().max() <= 1e-13


@pytest.mark.parametrize(("of", "form"), EACH_WITH_SOME)
def test_several_gradients_at_once(of: Implementation, form: Form) -> None:
    """What `is_grads_batched` and the vectorised jacobian of torch.autograd ask for."""
    case = build(form)
    z = case.logits.requires_grad_()
    upstream = torch.stack([case.upstream, -2 * case.upstream])
    actual = torch.autograd.grad(of(z, case), z, upstream, is_grads_batched=True)[0]
    for one, incoming in zip(actual, upstream, strict=True):
        case.upstream = incoming
        check_gradient(case, one, cancels=of.cancels)


@pytest.mark.parametrize("name", SOME)
def test_functional_transforms(name: str) -> None:
    """`torch.func.grad` and others are with the eager contexts of `test_never_plain`."""
    case = build(replace(OPTIONS[name], dtype=torch.float64))
    if isinstance(case.alpha, Tensor):
        case.alpha = case.alpha.clamp(min=0.1)
    functions = [
        lambda z: (cross_entropy(z, case) * case.upstream).sum(),
        lambda z: (potential(z, case.target, case.alpha, **case.options) * case.upstream).sum(),
    ]
    for derive in (torch.func.grad, torch.func.hessian, torch.func.jacfwd):
        actual, expected = (derive(function)(case.logits) for function in functions)
        assert (actual - expected).abs().max() <= 1e-13


@pytest.mark.parametrize("name", [*SOME, "probabilities, smoothing, none", "a tensor of 0"])
def test_compiled_whole(name: str, device: torch.device) -> None:
    case = build(replace(OPTIONS[name], dtype=torch.float64), device)
    z = case.logits.requires_grad_()
    torch.compiler.reset()
    compiled = torch.compile(lambda z: cross_entropy(z, case), fullgraph=True, backend="aot_eager")
    value = compiled(z)
    check_value(case, value.detach())
    (gradient,) = torch.autograd.grad(value, z, case.upstream)
    check_gradient(case, gradient)


@pytest.mark.parametrize("name", SOME)
def test_no_value_is_read_where_there_is_none(name: str) -> None:
    """Meta tensors have no values: what works on them synchronises with no accelerator."""
    case = build(OPTIONS[name], "meta")
    z = case.logits.requires_grad_()
    (gradient,) = torch.autograd.grad(cross_entropy(z, case), z, case.upstream)
    assert gradient.shape == z.shape


FUNCTIONS = IMPLEMENTATIONS[:3]


@pytest.mark.parametrize("of", FUNCTIONS, ids=lambda of: of.name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["defaults", *SOME[1:4], "probabilities", "smoothing"])
def test_what_arrives_multiplies_the_gradient(
    of: Implementation, name: str, dtype: torch.dtype, device: torch.device
) -> None:
    """To the bit for a power of 2, and also where it is 1 and nothing is multiplied."""
    case = build(replace(OPTIONS[name], dtype=dtype), device)
    z = case.logits.requires_grad_()
    unscaled, by_four, by_minus_one = (
        torch.autograd.grad(of(z, case) * scale if scale else of(z, case), z)[0]
        for scale in (None, 4.0, -1.0)
    )
    assert torch.equal(by_four, 4 * unscaled)
    assert torch.equal(by_minus_one, -unscaled)


@pytest.mark.parametrize(
    "of",
    [of for of in IMPLEMENTATIONS if "cross_entropy" in of.name and of.takes(OPTIONS["images"])],
    ids=lambda of: of.name,
)
@given(forms())
def test_alpha_one_is_pytorch_bit_for_bit(
    of: Implementation, device: torch.device, form: Form
) -> None:
    plain = replace(form, softcap=None, logit_scale=1.0, z_loss=0.0, tokens=False)
    case = build(replace(plain, alpha=1.0, alphas="number"), device)
    results = []
    for function in (of, lambda z, case: F.cross_entropy(z, case.target, **case.options)):
        z = case.logits.clone().requires_grad_()
        value = function(z, case)
        results.append((value.detach(), *torch.autograd.grad(value, z, case.upstream)))
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(not kernels.available(), reason="needs the C kernel")
@every_implementation
def test_the_kernel_serves_where_it_is_not_switched_off(of: Implementation, monkeypatch) -> None:
    results = []
    kernel = kernels.cross_entropy
    monkeypatch.setattr(
        kernels, "cross_entropy", lambda *a, **k: results.append(kernel(*a, **k)) or results[-1]
    )
    case = build(Form())
    of(case.logits.requires_grad_(), case)
    served = any(result is not None for result in results)
    fused = of.around is contextlib.nullcontext and "log_softmax" not in of.name
    assert served == (fused and of.name != "definition")
