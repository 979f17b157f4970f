"""Finds the classifier head, the layer whose outputs are the logits, and checks that it scales.

The head is what the model declares (timm's ``get_classifier``, transformers'
``get_output_embeddings``), or its last layer. If another layer could be the head, an error asks
for it. With an example the head is found by trial: scaling it must scale the logits.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from powergrad.loss import CrossEntropyLoss

LINEAR_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
HEAD_REMEDY = "pass `head`, the module that computes the logits or its name"
_HEAD_NAMES = {"fc", "head", "heads", "classifier", "lm_head", "logits", "score"}


def find_head(model: nn.Module, head: nn.Module | str | None = None) -> nn.Module:
    """The module of `model` that computes the logits: `head`, the module of that name, or found."""
    if head is None:
        heads = find_heads(model)
        if len(heads) > 1:
            raise ValueError(
                f"Expected `model` to have one head, but got {_names(heads, model)}; {HEAD_REMEDY}."
            )
        return heads[0]
    modules = dict(model.named_modules())
    found = modules.get(head) if isinstance(head, str) else head
    if found is None or found not in modules.values():
        last = ", ".join(list(modules)[-3:])
        raise ValueError(
            "Expected `head` to be a module of `model` or its name, but got "
            f"{repr(head) if isinstance(head, str) else type(head)} (the last are: {last})."
        )
    return found


def find_heads(model: nn.Module) -> Sequence[nn.Module]:
    """All heads that `model` declares, otherwise its last layer, if no other could be the head."""
    heads, others = _last_layers(model)
    head = heads[-1]
    if not isinstance(head, LINEAR_LAYERS):
        raise ValueError(
            "Expected the last layer of `model` to be linear or a convolution, but got a "
            f"{type(head).__name__}; {HEAD_REMEDY}."
        )
    twin = type(head), _outputs(head)
    ends = [layer for layer in others if isinstance(layer, LINEAR_LAYERS)]
    rivals = [m for m in ends if (type(m), _outputs(m)) == twin or not _takers(m, model)]
    # The number of classes may equal a number of features, so the name counts as well.
    named = not _HEAD_NAMES.isdisjoint(_names([head], model).split("."))
    if others and not rivals and not named:
        rivals = _takers(head, model)
    if rivals:
        raise ValueError(
            "Expected one layer of `model` that could be its head, but got several "
            f"({_names([head, *rivals], model)}); {HEAD_REMEDY}."
        )
    return heads


def _last_layers(model: nn.Module) -> tuple[Sequence[nn.Module], Sequence[nn.Module]]:
    """The declared heads or the last layer; and the last layers of parts that may be branches."""
    model = unwrap(model)
    if declared := _declared_heads(model):
        return declared, []
    children = [child for child in model.children() if any(True for _ in child.parameters())]
    if not children or isinstance(model, LINEAR_LAYERS):
        return [model], []
    heads, others = _last_layers(children[-1])
    if not _is_sequential(model):
        others = [*(_last_layers(child)[0][-1] for child in children[:-1]), *others]
    return heads, others


def _declared_heads(model: nn.Module) -> Sequence[nn.Module]:
    """The heads that timm's or transformers' method returns (two for timm's distilled models)."""
    for method in ("get_classifier", "get_output_embeddings"):
        result = getattr(model, method, lambda: None)()
        modules = result if isinstance(result, (tuple, list)) else [result]
        if heads := [module for module in modules if isinstance(module, LINEAR_LAYERS)]:
            return [*heads]
    return []


def _outputs(layer: Any) -> int:
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels


def _takers(layer: nn.Module, model: nn.Module) -> Sequence[nn.Module]:
    """The modules whose input size fits the outputs of `layer`, perhaps after flattening them."""
    size = _outputs(layer)
    fitting = []
    for module in model.modules():
        sizes = {p.shape[1] for p in module.parameters(recurse=False) if p.dim() > 1}
        if isinstance(module, nn.Linear) and not isinstance(layer, nn.Linear):
            sizes.add(size if module.in_features % size == 0 else 0)
        if size in sizes and module is not layer:
            fitting.append(module)
    return fitting


def _is_sequential(module: nn.Module) -> bool:
    """Whether the children of `module` run in the order of registration."""
    return type(module).forward is nn.Sequential.forward


def _names(modules: Sequence[nn.Module], model: nn.Module) -> str:
    return _some([name for name, module in model.named_modules() if module in modules])


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return (", ".join(names[:6]) or "nothing") + more


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, DataParallel and ``torch.compile``."""
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    inner = model.module if isinstance(model, wrappers) else getattr(model, "_orig_mod", None)
    return unwrap(inner) if isinstance(inner, nn.Module) else model


# Scaling the head ---------------------------------------------------------------------------------


def scalable_heads(
    model: nn.Module, head: nn.Module | str | None, example_inputs: Any = None
) -> Sequence[nn.Module]:
    """The heads of `model`; an error if scaling them by alpha may not scale the logits by alpha."""
    # The names in transformers are final_logit_softcapping, logits_soft_cap and
    # output_logit_soft_cap. Caps on the logits of attention and of routers do not matter here.
    for config in (getattr(module, "config", None) for module in model.modules()):
        for name, value in getattr(config, "__dict__", {}).items():
            if value and re.search(r"^(?!.*(att|router)).*logit.*cap", name):
                raise ValueError(
                    f"Expected `model` not to cap its logits, but got `config.{name}` = {value}: "
                    "the cap comes after the head and does not scale with it."
                )
    trial = None if example_inputs is None else _Trial(model, example_inputs)
    if head is not None:
        heads = [find_head(model, head)]
    elif trial is not None:
        heads = trial.find()
    else:
        try:
            heads = find_heads(model)
        except ValueError as error:
            raise ValueError(f"{error} Or pass `example_inputs`, which show it.") from None
    for layer in heads:
        check_linear(layer)
        check_untied(layer, model)
    if trial is not None:
        trial.check(heads)
    else:
        _check_nothing_beside_or_after(heads, unwrap(model))
    return heads


@torch.no_grad()
def scale(heads: Sequence[nn.Module], factor: float, model: nn.Module | None = None) -> None:
    """Multiply the parameters of `heads`, and the soft caps of losses in `model`, in place."""
    for parameter in (p for layer in heads for p in layer.parameters()):
        parameter.mul_(factor)
    for module in model.modules() if model is not None else ():
        if isinstance(module, CrossEntropyLoss) and module.options["softcap"] is not None:
            module.options["softcap"] *= factor


def check_linear(head: nn.Module) -> None:
    """Refuse a layer whose outputs do not scale with its weight and bias."""
    names = sorted(name for name, _ in head.named_parameters())
    if not isinstance(head, LINEAR_LAYERS) or names not in (["weight"], ["bias", "weight"]):
        raise ValueError(
            "Expected `head` to be a linear layer or a convolution with a plain weight and bias, "
            f"but got a {type(head).__name__} with {_some(names)}. If it is parametrised (as by "
            "weight_norm), first call `torch.nn.utils.parametrize.remove_parametrizations`."
        )


def check_untied(head: nn.Module, model: nn.Module) -> None:
    """Refuse a parameter that `model` uses twice, as the same object or over the same memory."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    tensors = [(name, tensor) for name, tensor in tensors if tensor.layout is torch.strided]
    for parameter in head.parameters():
        address = parameter.data_ptr() or None  # 0 on the meta device
        names = [name for name, t in tensors if t is parameter or t.data_ptr() == address]
        if len(names) > 1:
            raise ValueError(
                "Expected `head` to have parameters of its own, but got one shared by "
                f"{' and '.join(names)}: a tied head cannot be scaled alone."
            )


def _check_nothing_beside_or_after(heads: Sequence[nn.Module], model: nn.Module) -> None:
    """Refuse one of several declared heads, and a head in a Sequential that does not end it."""
    declared = _declared_heads(model)
    if len(heads) < len(declared) and heads[0] in declared:
        raise ValueError(
            "Expected `head` to be the only head, but got one of several "
            f"({_names(declared, model)}); pass None to scale all of them."
        )
    modules = list(model.modules())
    for module in modules[modules.index(heads[-1]) + 1 :] if _is_sequential(model) else ():
        is_activation = type(module).__module__ == nn.ReLU.__module__
        scales = isinstance(module, (nn.ReLU, nn.LeakyReLU, nn.LogSoftmax))
        if (is_activation and not scales) or any(True for _ in module.parameters()):
            raise ValueError(
                f"Expected `head` to compute the logits, but got a {type(module).__name__} after "
                "it, which does not scale with them."
            )


class _Trial:
    """Runs a model on an example, with some of its layers scaled."""

    # A power of two is exact in every dtype. It is so large that a soft cap of 30 changes even
    # logits of 0.1.
    FACTOR = 64.0

    def __init__(self, model: nn.Module, example_inputs: Any) -> None:
        self.model = unwrap(model)
        self.args, self.kwargs = (example_inputs,), {}
        if isinstance(example_inputs, Mapping):
            self.args, self.kwargs = (), dict(example_inputs)
        elif isinstance(example_inputs, tuple):
            self.args = example_inputs
        self.calls: list[nn.Module] = []
        layers = [m for m in self.model.modules() if isinstance(m, LINEAR_LAYERS)]
        with ExitStack() as hooks:
            for layer in layers:
                note = layer.register_forward_hook(lambda layer, *_: self.calls.append(layer))
                hooks.enter_context(note)
            self.logits = self.run([])

    def find(self) -> Sequence[nn.Module]:
        """The last layer that scales the logits, or the last few that scale them together."""
        sizes = (self.logits.shape[-1], *self.logits.shape[1:2])
        called = dict.fromkeys(reversed(self.calls))
        last = [layer for layer in called if _outputs(layer) in sizes]
        together = (last[:count] for count in range(2, len(last) + 1))
        return next(filter(self.scales, [*([layer] for layer in last), *together]), last)

    def check(self, heads: Sequence[nn.Module]) -> None:
        if not heads or not self.scales(heads):
            got = _names(heads, self.model)
            raise ValueError(
                "Expected the logits of `example_inputs` to scale with the head, but got "
                f"{got} as head, and logits of shape {tuple(self.logits.shape)} that do not. "
                "Another layer or a soft cap may follow, or all logits are 0. If another layer is "
                "the head, pass its name as `head`."
            )

    def scales(self, heads: Sequence[nn.Module]) -> bool:
        """Whether the logits become `FACTOR` times as large, except for a constant per example."""
        after = self.run([parameter for layer in heads for parameter in layer.parameters()])
        wanted = self.FACTOR * self.logits
        if after.shape != wanted.shape or not torch.equal(after.isfinite(), wanted.isfinite()):
            return False
        dim = 1 if wanted.dim() > 1 and not isinstance(heads[0], nn.Linear) else -1
        if wanted.shape[dim] > 1:  # softmax ignores the constant, which a log-softmax adds
            after, wanted = (z - z.amax(dim, keepdim=True) for z in (after, wanted))
        difference = (after - wanted)[wanted.isfinite()].abs()
        largest = wanted[wanted.isfinite()].abs()
        return bool(largest.any() and difference.max() <= self.tolerance * largest.max())

    def run(self, scaled: list[nn.Parameter]) -> Tensor:
        """The logits in float64, where the parameters `scaled` are `FACTOR` times as large."""
        parameters = dict(self.model.named_parameters())
        changed = {n: self.FACTOR * p for n, p in parameters.items() if any(p is q for q in scaled)}
        devices = {p.device for p in parameters.values() if p.is_cuda}
        with torch.no_grad(), evaluating(self.model), torch.random.fork_rng(list(devices)):
            output = functional_call(self.model, changed, self.args, self.kwargs)
        logits = output
        if isinstance(output, Mapping):
            logits = output.get("logits", output.get("out"))
        elif isinstance(output, (tuple, list)) and output:
            logits = output[0]
        logits = getattr(logits, "logits", logits)
        if not isinstance(logits, Tensor) or not logits.is_floating_point() or not logits.dim():
            raise TypeError(
                "Expected `model` to return logits (a tensor, the first item of a tuple, or "
                f"`logits` or `out`), but got a {type(output).__name__}."
            )
        self.tolerance = max(1e-3, 4 * torch.finfo(logits.dtype).eps)
        return logits.double()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, eager even if compiled; modes and buffers are restored afterwards."""
    modules = list(model.modules())
    modes = [module.training for module in modules]
    named = [(module, *item) for module in modules for item in module.named_buffers(recurse=False)]
    values = [buffer.clone() for _, _, buffer in named]
    # If dynamo was never loaded, nothing is compiled; loading it takes seconds.
    loaded = "torch._dynamo" in sys.modules
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager") if loaded else nullcontext():
            yield
    finally:
        for module, training in zip(modules, modes, strict=True):
            module.training = training
        with torch.no_grad():
            for (module, name, buffer), value in zip(named, values, strict=True):
                setattr(module, name, buffer.copy_(value))
