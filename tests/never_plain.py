"""Every way to ask for PGT, in every context that may lose it: what the gradient is there.

A way computes a loss of logits. A context runs it under something that traces, transforms or
recomputes programs, and returns the gradient at the logits. The outcome of a cell is "right",
"plain", "wrong", or the error that was raised. ``python tests/never_plain.py`` prints the outcomes
and records them in results/; `tests/test_never_plain.py` tests each cell.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import io
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.distributed.tensor.parallel.loss import _disable_custom_loss_ops
from torch.func import (
    functional_call,
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    vjp,
    vmap,
)
from torch.fx import symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.spawn import start_processes
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import powergrad
from powergrad import PowerGrad

ALPHA = 0.3
ROWS, CLASSES = 8, 10
TOLERANCE = 1e-10

Loss = Callable[[Tensor, Tensor], Tensor]
Gradient = Callable[[Loss, Tensor, Tensor], Tensor]


def logits() -> Tensor:
    return 3 * torch.randn(
        ROWS, CLASSES, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )


def labels() -> Tensor:
    return torch.arange(ROWS) * 3 % CLASSES


def onehot() -> Tensor:
    return F.one_hot(labels(), CLASSES).double()


def softmax_gradient(alpha: float, z: Tensor) -> Tensor:
    """The equation of the paper."""
    powered = torch.softmax(z, 1) ** alpha
    return (powered / powered.sum(1, keepdim=True) - onehot()) / ROWS


def sigmoid_gradient(alpha: float, z: Tensor) -> Tensor:
    p = torch.sigmoid(z)
    powered = p**alpha
    return (powered / (powered + (1 - p) ** alpha) - onehot()) / (ROWS * CLASSES)


def doubled_gradient(alpha: float, z: Tensor) -> Tensor:
    return (1 if alpha == 1 else 2) * softmax_gradient(1.0, z)


@dataclass(frozen=True)
class Way:
    """A loss of (logits, labels), perhaps altered from outside, and its gradient."""

    name: str
    loss: Loss
    by: str = ""  # "PowerGrad" around the loss, or "enable"
    gradient: Callable[[float, Tensor], Tensor] = softmax_gradient

    def around(self) -> contextlib.AbstractContextManager[Any]:
        if self.by == "PowerGrad":
            return PowerGrad(ALPHA, strict=True)
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def enabled(self) -> Iterator[None]:
        """Around everything, the backward pass too."""
        if self.by == "enable":
            powergrad.enable(ALPHA)
        try:
            yield
        finally:
            powergrad.disable()


def _probabilities(z: Tensor, y: Tensor) -> Tensor:
    return torch.zeros_like(z.detach()).scatter(1, y.unsqueeze(1), 1)  # vmap refuses `one_hot`


def _alphas(z: Tensor) -> Tensor:
    return torch.full(z.shape[:1], ALPHA, dtype=z.dtype)  # an ordinary tensor beside a DTensor


def _identity(z: Tensor) -> Tensor:
    eye = torch.eye(CLASSES, dtype=z.dtype)
    return distribute_tensor(eye, z.device_mesh, [Shard(0)]) if isinstance(z, DTensor) else eye


def _by_entering(z: Tensor, y: Tensor) -> Tensor:
    with PowerGrad(ALPHA):
        return F.cross_entropy(z, y)


OTHERS: dict[str, Loss] = {
    "F.cross_entropy": lambda z, y: F.cross_entropy(z, y),
    "nn.CrossEntropyLoss": lambda z, y: nn.CrossEntropyLoss()(z, y),
    "log_softmax": lambda z, y: F.nll_loss(z.log_softmax(1), y),
    "F.linear_cross_entropy": lambda z, y: F.linear_cross_entropy(z, _identity(z), y),
}

WAYS = [
    Way("cross_entropy", lambda z, y: powergrad.cross_entropy(z, y, alpha=ALPHA)),
    Way(
        "cross_entropy, tensor alpha",
        lambda z, y: powergrad.cross_entropy(z, y, alpha=_alphas(z)),
    ),
    Way(
        "cross_entropy, probabilities",
        lambda z, y: powergrad.cross_entropy(z, _probabilities(z, y), alpha=ALPHA),
    ),
    Way("CrossEntropyLoss", powergrad.CrossEntropyLoss(ALPHA)),
    Way("log_softmax", lambda z, y: F.nll_loss(powergrad.log_softmax(z, 1, alpha=ALPHA), y)),
    Way(
        "linear_cross_entropy",
        lambda z, y: powergrad.linear_cross_entropy(z, _identity(z), y, alpha=ALPHA),
    ),
    Way(
        "binary_cross_entropy_with_logits",
        lambda z, y: powergrad.binary_cross_entropy_with_logits(
            z, _probabilities(z, y), alpha=ALPHA
        ),
        gradient=sigmoid_gradient,
    ),
    Way(
        "alter_gradient",
        lambda z, y: F.cross_entropy(powergrad.alter_gradient(z, lambda g: 2 * g), y),
        gradient=doubled_gradient,
    ),
    *(
        Way(f"{by}: {name}", loss, by)
        for by in ("PowerGrad", "enable")
        for name, loss in OTHERS.items()
    ),
    Way("PowerGrad, entered inside", _by_entering),
]


@dataclass(frozen=True)
class Context:
    """Either `prepare`, after which the loss is called and `backward` too; or the gradient."""

    name: str
    group: str
    prepare: Callable[[Loss], Loss] | None = None
    gradient: Gradient | None = None
    backward: Callable[[Tensor], object] = Tensor.backward

    @property
    def key(self) -> str:
        return self.name if self.group in ("eager", "export") else f"{self.name} [{self.group}]"

    def run(self, way: Way) -> Tensor:
        """The gradient at the logits. `backward` is called after PowerGrad has ended."""
        z, y = logits(), labels()
        with way.around():
            if self.gradient is not None:
                return self.gradient(way.loss, z, y)
            assert self.prepare is not None
            z.requires_grad_()
            loss = self.prepare(way.loss)(z, y)
        self.backward(loss)
        assert z.grad is not None
        return z.grad


def _once_more(function: Loss) -> Loss:
    """An autograd function of the user's own that computes its forward again in its backward."""

    class Recomputing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, z: Tensor, y: Tensor) -> Tensor:
            ctx.save_for_backward(z, y)
            return function(z, y)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            z, y = ctx.saved_tensors
            with torch.enable_grad():
                leaf = z.detach().requires_grad_()
                return *torch.autograd.grad(function(leaf, y), leaf, grads[0]), None

    return Recomputing.apply


def _checkpointed(**options: Any) -> Callable[[Loss], Loss]:
    """The loss is within a checkpoint, after something to recompute."""

    def prepare(loss: Loss) -> Loss:
        inner = lambda z, y: loss(z * 1, y)  # noqa: E731
        return lambda z, y: checkpoint(inner, z, y, **options)

    return prepare


CHECKPOINTS = {
    "reentrant": _checkpointed(use_reentrant=True),
    "non-reentrant": _checkpointed(use_reentrant=False),
}
_selectively = _checkpointed(
    use_reentrant=False,
    context_fn=lambda: create_selective_checkpoint_contexts([torch.ops.aten.mul.Tensor]),
)


def _in_a_branch(loss: Loss) -> Loss:
    branches = lambda z, y: loss(z, y) * 1, lambda z, y: z.sum()
    return lambda z, y: torch.cond(z.sum() < 1e9, *branches, (z, y))


def _in_a_region(loss: Loss) -> Loss:
    region: Any = torch.compiler.nested_compile_region(lambda z, y: loss(z, y) * 1)
    return lambda z, y: region(z * 1, y)


def _broken(loss: Loss) -> Loss:
    def prepared(z: Tensor, y: Tensor) -> Tensor:
        z = z * 1
        torch._dynamo.graph_break()
        value = loss(z, y)
        torch._dynamo.graph_break()
        return value * 1

    return prepared


def _counted(loss: Loss) -> Loss:
    def prepared(z: Tensor, y: Tensor) -> Tensor:
        with FlopCounterMode(display=False):
            return loss(z, y)

    return prepared


def _each_entry(derivative: Callable[[Tensor, Tensor], Tensor], z: Tensor) -> Tensor:
    """The gradient from the derivatives at `z` along each of its entries."""
    tangents = torch.eye(z.numel(), dtype=z.dtype).reshape(-1, *z.shape)
    return torch.stack([derivative(z, tangent) for tangent in tangents]).reshape(z.shape)


def _pushed(loss: Loss, y: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda z, tangent: jvp(lambda z: loss(z, y), (z,), (tangent,))[1]


def _in_forward_mode(loss: Loss, z: Tensor, y: Tensor) -> Tensor:
    def derivative(z: Tensor, tangent: Tensor) -> Any:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(loss(forward_ad.make_dual(z, tangent), y)).tangent

    return _each_entry(derivative, z)


def _per_example(loss: Loss, z: Tensor, y: Tensor) -> Tensor:
    one = lambda z, y: loss(z.unsqueeze(0), y.unsqueeze(0))  # noqa: E731
    return vmap(grad(one))(z, y) / ROWS  # as the mean divides


def _linearized(loss: Loss, z: Tensor, y: Tensor) -> Tensor:
    _, derivative = linearize(lambda z: loss(z, y), z)
    return _each_entry(lambda _, tangent: derivative(tangent), z)


def _in_forward_mode_counted(loss: Loss, z: Tensor, y: Tensor) -> Tensor:
    with FlopCounterMode(display=False):
        return _in_forward_mode(loss, z, y)


def _batched(loss: Loss, z: Tensor, y: Tensor) -> Tensor:
    z.requires_grad_()
    factors = torch.tensor([1.0, 2.0], dtype=z.dtype)
    gradients = torch.autograd.grad(loss(z, y), z, factors, is_grads_batched=True)[0]
    return gradients.sum(0) / 3


def _again(loss: Tensor) -> None:
    """Two backward passes in compiled autograd, which keeps what the first has compiled."""
    with compiled_autograd._enable(functools.partial(torch.compile, backend="eager")):
        loss.div(2).backward(retain_graph=True)
        loss.div(2).backward()


def _by_autograd(loss: Loss, z: Tensor, y: Tensor) -> Tensor:
    """Second derivatives by a second backward pass."""
    z.requires_grad_()
    (first,) = torch.autograd.grad(loss(z, y), z, create_graph=True)
    rows = [torch.autograd.grad(entry, z, retain_graph=True)[0] for entry in first.flatten()]
    return torch.stack(rows).reshape(*z.shape, *z.shape)


class Subclass(Tensor):
    """With PyTorch's own ``__torch_function__``."""


def _as_subclass(loss: Loss) -> Loss:
    return lambda z, y: loss(z.as_subclass(Subclass), y).as_subclass(Tensor)


def _recorded_subclass(loss: Loss) -> Any:
    return make_fx(loss)(TwoTensor(logits(), logits()).requires_grad_(), labels())


def _in_threads(loss: Loss) -> Loss:
    """Each of two threads has half of the rows, as in ``nn.DataParallel``."""

    def prepared(z: Tensor, y: Tensor) -> Tensor:
        with ThreadPoolExecutor(2) as pool:
            return sum(pool.map(loss, z.chunk(2), y.chunk(2))) / 2  # pyright: ignore

    return prepared


def _in_scripted_program(loss: Loss) -> Any:
    """A scripted program that calls the loss in Python."""

    class Program(nn.Module):
        @torch.jit.ignore  # pyright: ignore
        def compute(self, z, y):
            return loss(z, y)

        def forward(self, z, y):
            return self.compute(z * 1, y)

    return torch.jit.script(Program())


SECOND: dict[str, Gradient] = {
    "hessian": lambda loss, z, y: hessian(loss)(z, y),
    "jacfwd(jacrev)": lambda loss, z, y: jacfwd(jacrev(loss))(z, y),
    "jacfwd(jacfwd)": lambda loss, z, y: jacfwd(jacfwd(loss))(z, y),
    "jacrev(jacrev)": lambda loss, z, y: jacrev(jacrev(loss))(z, y),
    "autograd, twice": _by_autograd,
}

TRANSFORMS: dict[str, Gradient] = {
    "grad": lambda loss, z, y: grad(loss)(z, y),
    "grad_and_value": lambda loss, z, y: grad_and_value(loss)(z, y)[0],
    "vmap(grad)": _per_example,
    "vjp": lambda loss, z, y: vjp(lambda z: loss(z, y), z)[1](torch.ones((), dtype=z.dtype))[0],
    "jacrev": lambda loss, z, y: jacrev(loss)(z, y),
    "jvp": lambda loss, z, y: _each_entry(_pushed(loss, y), z),
}


class _Program(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss
        self.shift = nn.Parameter(torch.zeros(CLASSES, dtype=torch.float64))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return self.loss(z + self.shift, y)


def _exported(strict: bool, then: Callable[[Any], Any]) -> Callable[[Loss], Loss]:
    def prepare(loss: Loss) -> Loss:
        program = torch.export.export(_Program(loss), (logits(), labels()), strict=strict)
        return then(program).module()

    return prepare


def _reloaded(program: Any) -> Any:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


def _recorded(**options: Any) -> Callable[[Loss], Loss]:
    return lambda loss: make_fx(loss, **options)(logits().requires_grad_(), labels())


def _functionally(loss: Loss, z: Tensor, y: Tensor) -> Tensor:
    program = _Program(loss)
    shift = {"shift": program.shift.detach()}
    return grad(lambda z: functional_call(program, shift, (z, y)))(z)


def _scripted(loss: Loss) -> Any:
    example = (logits().requires_grad_(), labels())
    return torch.jit.trace(lambda z, y: loss(z, y), example, check_trace=False)


EAGER = [
    Context("eager", "eager", lambda loss: loss),
    *(Context(f"torch.func.{name}", "eager", gradient=t) for name, t in TRANSFORMS.items()),
    Context("forward-mode AD", "eager", gradient=_in_forward_mode),
    Context("functional_call", "eager", gradient=_functionally),
    *(Context(f"checkpoint, {form}", "eager", prepare) for form, prepare in CHECKPOINTS.items()),
    Context("selective checkpoint", "eager", _selectively),
    Context("recomputing autograd function", "eager", _once_more),
    Context("dispatch mode", "eager", _counted),
    Context("torch.func.linearize", "eager", gradient=_linearized),
    *(Context(f"second derivatives, {n}", "eager", gradient=t) for n, t in SECOND.items()),
    Context("batched gradients", "eager", gradient=_batched),
    Context("forward-mode AD, dispatch mode", "eager", gradient=_in_forward_mode_counted),
    Context("torch.func.functionalize", "eager", lambda loss: functionalize(loss)),
    Context("functionalize(grad)", "eager", gradient=lambda f, z, y: functionalize(grad(f))(z, y)),
    Context("tensor subclass", "eager", _as_subclass),
    Context("make_fx, tensor subclass", "eager", _recorded_subclass),
    Context("negated view", "eager", lambda f: lambda z, y: f(torch.ops.aten._neg_view(-z), y)),
    Context("threads", "eager", _in_threads),
    Context("scripted program", "eager", _in_scripted_program),
    Context("torch.fx.symbolic_trace", "eager", lambda loss: symbolic_trace(_Program(loss))),
    Context("compiled autograd", "eager", lambda loss: loss, backward=_again),
    Context("make_fx", "eager", _recorded()),
    Context("make_fx, fake", "eager", _recorded(tracing_mode="fake")),
    Context("make_fx, symbolic", "eager", _recorded(tracing_mode="symbolic")),
    Context("make_fx, pre-dispatch", "eager", _recorded(pre_dispatch=True)),
    Context("make_fx of grad", "eager", gradient=lambda f, z, y: make_fx(grad(f))(z, y)(z, y)),
    Context("torch.jit.trace", "eager", _scripted),
]


def _compiled_contexts(backend: str) -> Iterator[Context]:
    group = f"compile, {backend}"

    def compiled(function: Any, **options: Any) -> Any:
        return torch.compile(function, backend=backend, **options)

    def whole(function: Any) -> Any:
        return compiled(function, fullgraph=True)

    def at_once(transform: Gradient) -> Gradient:
        return lambda loss, z, y: whole(lambda z, y: transform(loss, z, y))(z, y)

    yield Context("compile", group, whole)
    yield Context("compile, graph breaks", group, lambda loss: compiled(_broken(loss)))
    repeated = CHECKPOINTS["non-reentrant"]
    yield Context("compile(checkpoint), non-reentrant", group, lambda f: whole(repeated(f)))
    yield Context("compile(torch.func.grad)", group, gradient=at_once(TRANSFORMS["grad"]))
    if backend != "aot_eager":  # the others differ from it in the last step only
        return
    yield Context("compile, dynamic", group, lambda loss: compiled(loss, dynamic=True))
    for name in ("vmap(grad)", "vjp", "jacrev"):
        yield Context(f"compile(torch.func.{name})", group, gradient=at_once(TRANSFORMS[name]))
    yield Context(
        "compile(torch.func.jvp)",
        group,
        gradient=lambda loss, z, y: _each_entry(whole(_pushed(loss, y)), z),
    )
    for form, inner in CHECKPOINTS.items():
        if form != "non-reentrant":
            yield Context(f"compile(checkpoint), {form}", group, lambda f, i=inner: whole(i(f)))
        yield Context(f"checkpoint(compile), {form}", group, lambda f, i=inner: i(compiled(f)))
    yield Context("compile(torch.cond)", group, lambda loss: whole(_in_a_branch(loss)))
    yield Context("compile(nested region)", group, lambda loss: whole(_in_a_region(loss)))
    yield Context("compile(autograd function)", group, lambda loss: compiled(_once_more(loss)))
    yield Context("autograd function(compile)", group, lambda loss: _once_more(compiled(loss)))


THEN: dict[str, Callable[[Any], Any]] = {
    "": lambda program: program,
    ", reloaded": _reloaded,
    ", decomposed": lambda program: program.run_decompositions(),
}


CONTEXTS = [
    *EAGER,
    *(c for backend in ("eager", "aot_eager", "inductor") for c in _compiled_contexts(backend)),
    *(
        Context(f"export{', strict' * strict}{name}", "export", _exported(strict, then))
        for strict in (False, True)
        for name, then in THEN.items()
    ),
]


def judge(gradient: Tensor, way: Way) -> str:
    """ "right", "plain" or "wrong", for a gradient or for second derivatives."""
    for outcome, alpha in (("right", ALPHA), ("plain", 1.0)):
        expected = way.gradient(alpha, logits())
        if gradient.dim() == 4:
            expected = jacobian(functools.partial(way.gradient, alpha), logits())
            if way.gradient is doubled_gradient and alpha != 1:
                expected = 2 * expected  # `fn` is applied to the second gradient as well
        if (gradient - expected).abs().max() <= TOLERANCE:
            return outcome
    return "wrong"


def outcome(run: Callable[[Way], Tensor], way: Way) -> str:
    """What `judge` says of the gradient, or the error."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with way.enabled():
                return judge(run(way), way)
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def kind(text: str) -> str:
    """ "right", "plain", "wrong", "raises" (an error of ours), or "PyTorch raises"."""
    if text in ("right", "plain", "wrong"):
        return text
    ours = "Expected `" in text or "PowerGrad" in text
    return "raises" if ours else "PyTorch raises"


def _in_half(wrap: Callable[[nn.Module], Any]) -> Callable[[Way], Tensor]:
    """Each process has half of the rows; the gradients of the parameters are averaged."""

    def run(way: Way) -> Tensor:
        half = slice(dist.get_rank() * ROWS // 2, (dist.get_rank() + 1) * ROWS // 2)
        model = wrap(_Program(way.loss))
        z = logits()[half].requires_grad_()
        with way.around():
            loss = model(z, labels()[half])
        loss.backward()
        assert z.grad is not None
        shift: Any = next(model.parameters()).grad
        shift = shift.full_tensor() if isinstance(shift, DTensor) else shift
        gathered = [torch.empty_like(z.grad) for _ in range(2)]
        dist.all_gather(gathered, z.grad)
        gradient = torch.cat(gathered) / 2
        assert (shift - gradient.sum(0)).abs().max() <= TOLERANCE
        return gradient

    return run


def _distributed(
    *placements: Any, parallel: bool = False, compiled: bool = False
) -> Callable[[Way], Tensor]:
    def run(way: Way) -> Tensor:
        mesh = init_device_mesh("cpu", (2,))
        z = distribute_tensor(logits(), mesh, placements).requires_grad_()
        rows = [p if p == Shard(0) else Replicate() for p in placements]
        y = distribute_tensor(labels(), mesh, rows)
        loss = torch.compile(way.loss, backend="aot_eager") if compiled else way.loss
        try:
            with loss_parallel() if parallel else contextlib.nullcontext():
                with way.around():
                    value = loss(z, y)
                value.backward()
        except Exception:
            if parallel:  # an error leaves it on
                _disable_custom_loss_ops()
            raise
        assert isinstance(z.grad, DTensor)
        return z.grad.full_tensor()

    return run


DISTRIBUTED: dict[str, Callable[[Way], Tensor]] = {
    "DistributedDataParallel": _in_half(nn.parallel.DistributedDataParallel),
    "FSDP2": _in_half(lambda module: fully_shard(module)),
    "DTensor, replicated": _distributed(Replicate()),
    "DTensor, rows sharded": _distributed(Shard(0)),
    "DTensor, classes sharded": _distributed(Shard(1)),
    "DTensor, classes sharded, loss_parallel": _distributed(Shard(1), parallel=True),
    "DTensor, classes sharded, loss_parallel, compiled": _distributed(
        Shard(1), parallel=True, compiled=True
    ),
}


def _worker(rank: int, file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}.store", rank=rank, world_size=2)
    outcomes = {}
    for name, run in DISTRIBUTED.items():
        for way in WAYS:
            outcomes[f"{name}|{way.name}"] = outcome(run, way)
            dist.barrier()
    if rank == 0:
        Path(file).write_text(json.dumps(outcomes))
    dist.destroy_process_group()


def distributed_outcomes(folder: Path) -> dict[tuple[str, str], str]:
    """The outcomes on two processes, by the names of context and way."""
    file = folder / "outcomes.json"
    start_processes(_worker, (str(file),), 2, start_method="spawn")
    found = json.loads(file.read_text())
    return {tuple(key.split("|")): value for key, value in found.items()}  # pyright: ignore


RECORD = Path(__file__).parents[1] / "results" / "what_works_where.json"


def main(words: list[str]) -> None:
    """Find the outcomes of the contexts that have one of `words`, or of all; and record them."""
    record = json.loads(RECORD.read_text())["outcomes"] if words else {}

    def note(name: str, found: dict[str, str]) -> None:
        record[name] = {way: kind(text) for way, text in found.items()}
        rest = {way: text for way, text in found.items() if text != "right"}
        print(f"{name}: {len(found) - len(rest)} right", flush=True)
        for way, text in rest.items():
            print(f"    {way}: {kind(text)}: {' '.join(text.split())[:200]}", flush=True)

    for context in CONTEXTS:
        if not words or any(word in context.key for word in words):
            note(context.key, {way.name: outcome(context.run, way) for way in WAYS})
    if not words or "distributed" in words:
        with tempfile.TemporaryDirectory() as folder:
            found = distributed_outcomes(Path(folder))
        for name in DISTRIBUTED:
            note(f"{name} [two processes]", {way.name: found[name, way.name] for way in WAYS})
    conditions = {"torch": torch.__version__, "date": f"{datetime.date.today()}"}
    RECORD.write_text(json.dumps({**conditions, "outcomes": record}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
