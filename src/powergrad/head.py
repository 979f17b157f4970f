"""Finds the classifier head, the layer whose outputs are the logits, and checks that it scales.

The head is what the model declares (timm's ``get_classifier``, transformers'
``get_output_embeddings``), or its last layer. If another layer could be the head, an error asks
for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

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


def find_heads(model: nn.Module) -> Sequence[nn.Module]:
    """All heads that `model` declares, otherwise its last layer, if no other could be the head."""
    *others, heads = _last_layers(model)
    head, ends = heads[-1], [layers[-1] for layers in others]
    if not isinstance(head, LINEAR_LAYERS):
        raise ValueError(
            "Expected the last layer of `model` to be linear or a convolution, but got a "
            f"{type(head).__name__}; {HEAD_REMEDY}."
        )
    rivals = [m for m in ends if isinstance(m, LINEAR_LAYERS) and not _takers(m, model)]
    if ends and not rivals:
        rivals = _takers(head, model)
    if rivals:
        raise ValueError(
            "Expected one layer of `model` that could be its head, but got several "
            f"({_names([head, *rivals], model)}); {HEAD_REMEDY}."
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


def _takers(layer: Any, model: nn.Module) -> list[nn.Module]:
    """The modules whose input size fits the outputs of `layer`; a linear layer may flatten them."""
    if isinstance(layer, nn.Linear):
        size, flattened, apart = layer.out_features, (), LINEAR_LAYERS[1:]  # which take images
    else:
        size, flattened, apart = layer.out_channels, nn.Linear, ()
    pairs = [(m, p) for m in model.modules() for p in m.parameters(recurse=False) if p.dim() > 1]
    # Tokens and positions, (1, length, size), are added to the inputs and do not multiply them.
    pairs = [(m, p) for m, p in pairs if p.shape[0] > 1 or isinstance(m, LINEAR_LAYERS)]
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


def scalable_heads(model: nn.Module, head: nn.Module | str | None) -> Sequence[nn.Module]:
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
    heads = find_heads(model) if head is None else [find_head(model, head)]
    for layer in heads:
        names = sorted(name for name, _ in layer.named_parameters())
        if not isinstance(layer, LINEAR_LAYERS) or names not in (["weight"], ["bias", "weight"]):
            raise ValueError(
                "Expected `head` to be a linear layer or a convolution with a plain weight and "
                f"bias, but got a {type(layer).__name__} with {', '.join(names[:6]) or 'none'}. If "
                "it is parametrised, first call `parametrize.remove_parametrizations` on it."
            )
        check_untied(layer, model)
    declared = _declared_heads(unwrap(model))
    if len(heads) < len(declared) and heads[0] in declared:
        raise ValueError(
            "Expected `head` to be the only head, but got one of several "
            f"({_names(declared, model)}); pass None to scale all of them."
        )
    if type(unwrap(model)).forward is nn.Sequential.forward:
        modules = list(model.modules())
        _check_last(modules[modules.index(heads[-1]) + 1 :])
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


def _check_last(after: Sequence[nn.Module]) -> None:
    """Refuse modules `after` the head of a Sequential that may change how the logits scale."""
    for module in after:
        is_activation = type(module).__module__ == nn.ReLU.__module__
        scales = isinstance(module, (nn.ReLU, nn.LeakyReLU, nn.LogSoftmax))
        if (is_activation and not scales) or any(True for _ in module.parameters()):
            raise ValueError(
                f"Expected `head` to be the last layer, but got a {type(module).__name__} after it."
            )


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
