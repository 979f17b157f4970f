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
from powergrad.units import refuse_flat

LINEAR_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
HEAD_REMEDY = "pass `head`, the module that computes the logits or its name"


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


def find_heads(model: nn.Module, remedy: str = HEAD_REMEDY) -> Sequence[nn.Module]:
    """All heads that `model` declares, otherwise its last layer, if no other could be the head."""
    *others, heads = _last_layers(model)
    head, ends = heads[-1], [layers[-1] for layers in others]
    if not isinstance(head, LINEAR_LAYERS):
        raise ValueError(
            "Expected the last layer of `model` to be linear or a convolution, but got a "
            f"{type(head).__name__}; {remedy}."
        )
    rivals = [m for m in ends if isinstance(m, LINEAR_LAYERS) and not _takers(m, model)]
    if ends and not rivals:
        rivals = _takers(head, model)
    if rivals:
        raise ValueError(
            "Expected one layer of `model` that could be its head, but got several "
            f"({_names([head, *rivals], model)}); {remedy}."
        )
    return heads


def _last_layers(model: nn.Module) -> list[list[nn.Module]]:
    """The declared heads or the last layer of each part that may be a branch; the model's last."""
    model = unwrap(model)
    if declared := _declared_heads(model):
        return [declared]
    children = [child for child in model.children() if any(True for _ in child.parameters())]
    if not children or isinstance(model, LINEAR_LAYERS):
        return [[model]]
    before = [] if type(model).forward is nn.Sequential.forward else children[:-1]
    return [*(_last_layers(child)[-1] for child in before), *_last_layers(children[-1])]


def _declared_heads(model: nn.Module) -> list[nn.Module]:
    """The heads that timm's or transformers' method returns (two for timm's distilled models)."""
    for method in ("get_classifier", "get_output_embeddings"):
        result = getattr(model, method, lambda: None)()
        modules = result if isinstance(result, (tuple, list)) else [result]
        if any(isinstance(module, LINEAR_LAYERS) for module in modules):
            return [module for module in modules if isinstance(module, LINEAR_LAYERS)]
    return []


def _outputs(layer: Any) -> int:
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels


def _takers(layer: nn.Module, model: nn.Module) -> list[nn.Module]:
    """The modules whose input size fits the outputs of `layer`; a linear layer may flatten them."""
    size, flattened = _outputs(layer), () if isinstance(layer, nn.Linear) else nn.Linear
    apart = LINEAR_LAYERS[1:] if isinstance(layer, nn.Linear) else ()  # convolutions take images
    pairs = [(m, p) for m in model.modules() for p in m.parameters(recurse=False) if p.dim() > 1]
    pairs = [(m, p.shape[1]) for m, p in pairs if m is not layer and not isinstance(m, apart)]
    return [m for m, n in pairs if n == size or (isinstance(m, flattened) and n % size == 0)]


def _names(modules: Sequence[nn.Module], model: nn.Module) -> str:
    names = [name for name, module in model.named_modules() if module in modules]
    return (", ".join(names[:6]) or "nothing") + ", ..." * (len(names) > 6)


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
    refuse_flat(model.parameters(), "model")
    trial = None if example_inputs is None else _Trial(model, example_inputs)
    if head is not None:
        heads = [find_head(model, head)]
    elif trial is not None:
        heads = trial.find()
    else:
        heads = find_heads(model, f"{HEAD_REMEDY}, or `example_inputs`, which show it")
    for layer in heads:
        names = sorted(name for name, _ in layer.named_parameters())
        if not isinstance(layer, LINEAR_LAYERS) or names not in (["weight"], ["bias", "weight"]):
            raise ValueError(
                "Expected `head` to be a linear layer or a convolution with a plain weight and "
                f"bias, but got a {type(layer).__name__} with {', '.join(names[:6]) or 'none'}. If "
                "it is parametrised, first call `parametrize.remove_parametrizations` on it."
            )
        check_untied(layer, model)
    if trial is None:
        _check_alone_and_last(heads, unwrap(model))
    elif not heads or not trial.scales(heads):
        raise ValueError(
            "Expected the logits of `example_inputs` to scale with the head, but got logits that "
            f"do not, and as head {_names(heads, trial.model)}. Another layer or a soft cap may "
            "follow, or all logits are 0. If another layer is the head, pass its name as `head`."
        )
    return heads


@torch.no_grad()
def scale(heads: Sequence[nn.Module], factor: float, model: nn.Module | None = None) -> None:
    """Multiply the parameters of `heads`, and the soft caps of losses in `model`, in place."""
    for parameter in (p for layer in heads for p in layer.parameters()):
        parameter.mul_(factor)
    for module in model.modules() if model is not None else ():
        if isinstance(module, CrossEntropyLoss) and module.options["softcap"] is not None:
            module.options["softcap"] *= factor


def check_untied(head: nn.Module, model: nn.Module) -> None:
    """Refuse a parameter that `model` uses twice, as the same object or over the same memory."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    places = [(n, t.data_ptr()) for n, t in tensors if t.layout is torch.strided]
    for parameter in head.parameters():
        names = [name for name, tensor in tensors if tensor is parameter]
        names = [n for n, place in places if place == parameter.data_ptr() != 0] or names  # 0: meta
        if len(names) > 1:
            raise ValueError(
                "Expected `head` to have parameters of its own, but got one shared by "
                f"{' and '.join(names)}: a tied head cannot be scaled alone."
            )


def _check_alone_and_last(heads: Sequence[nn.Module], model: nn.Module) -> None:
    """Refuse one of several declared heads, and a head in a Sequential that does not end it."""
    declared, modules = _declared_heads(model), list(model.modules())
    if len(heads) < len(declared) and heads[0] in declared:
        raise ValueError(
            "Expected `head` to be the only head, but got one of several "
            f"({_names(declared, model)}); pass None to scale all of them."
        )
    if type(model).forward is not nn.Sequential.forward:
        return
    for module in modules[modules.index(heads[-1]) + 1 :]:
        is_activation = type(module).__module__ == nn.ReLU.__module__
        scales = isinstance(module, (nn.ReLU, nn.LeakyReLU, nn.LogSoftmax))
        if (is_activation and not scales) or any(True for _ in module.parameters()):
            raise ValueError(
                f"Expected `head` to be the last layer, but got a {type(module).__name__} after it."
            )


class _Trial:
    """Runs a model on an example, with some of its layers scaled."""

    FACTOR = 64.0  # exact in every dtype, and so large that a soft cap of 30 changes logits of 0.1

    def __init__(self, model: nn.Module, example_inputs: Any) -> None:
        self.model, self.example = unwrap(model), example_inputs
        self.calls: list[nn.Module] = []
        with ExitStack() as hooks:
            for layer in (m for m in self.model.modules() if isinstance(m, LINEAR_LAYERS)):
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

    def scales(self, heads: Sequence[nn.Module]) -> bool:
        """Whether the logits become `FACTOR` times as large, except for a constant per example."""
        after = self.run([parameter for layer in heads for parameter in layer.parameters()])
        wanted = self.FACTOR * self.logits
        if after.shape != wanted.shape or not wanted.numel():
            return False
        dim = 1 if wanted.dim() > 1 and not isinstance(heads[0], nn.Linear) else -1
        if wanted.shape[dim] > 1:  # softmax ignores the constant, which a log-softmax adds
            after, wanted = (z - z.amax(dim, keepdim=True) for z in (after, wanted))
        largest = float(wanted.masked_fill(wanted.isinf(), 0).abs().max())
        return largest > 0 and torch.allclose(after, wanted, 0, self.tolerance * largest)

    def run(self, scaled: list[nn.Parameter]) -> Tensor:
        """The logits in float64, where the parameters `scaled` are `FACTOR` times as large."""
        parameters = dict(self.model.named_parameters())
        state = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        state |= {n: self.FACTOR * p for n, p in parameters.items() if any(p is q for q in scaled)}
        devices = {p.device for p in parameters.values() if p.is_cuda}
        # If dynamo was never loaded, nothing is compiled; loading it takes seconds.
        loaded = "torch._dynamo" in sys.modules
        eager = torch.compiler.set_stance("force_eager") if loaded else nullcontext()
        is_named = isinstance(self.example, Mapping)
        args, kwargs = ((), dict(self.example)) if is_named else (self.example, None)
        with torch.no_grad(), evaluating(self.model), torch.random.fork_rng(list(devices)), eager:
            output = functional_call(self.model, state, args, kwargs)
        logits = output.get("logits", output.get("out")) if isinstance(output, Mapping) else output
        logits = logits[0] if isinstance(logits, (tuple, list)) and logits else logits
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
    """Evaluation mode; the modes are restored afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
