"""Finds the classifier head, the layer whose outputs are the logits, and checks that it scales.

If the model declares its heads (timm's ``get_classifier``, transformers'
``get_output_embeddings``), these are used. Otherwise the head is the last registered layer, unless
another layer could be the head as well, because layers need not run in the order of registration.
An example input decides without doubt: scaling the head must scale the logits.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

LINEAR_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_HEAD_NAMES = {"fc", "head", "heads", "classifier", "lm_head", "logits", "score"}
HEAD_REMEDY = "pass `head`, the module that computes the logits or its name"


# Finding the head ---------------------------------------------------------------------------------


def find_head(model: nn.Module, head: nn.Module | str | None = None) -> nn.Module:
    """The module of `model` that computes the logits: `head`, the module of that name, or found."""
    if isinstance(head, nn.Module):
        if not any(module is head for module in model.modules()):
            raise ValueError(
                f"Expected `head` to be a module of `model`, but got a {type(head).__name__} that "
                f"is not in this {type(model).__name__}."
            )
        return head
    if isinstance(head, str):
        names = dict(model.named_modules())
        if head not in names or not head:
            last = ", ".join(list(names)[-3:]) or "none"
            raise ValueError(
                f"Expected `head` to name a module of `model`, but got {head!r} "
                f"(the last modules are: {last})."
            )
        return names[head]
    if head is not None:
        raise TypeError(
            f"Expected `head` to be a module, its name or None, but got {type(head).__name__}."
        )
    heads = find_heads(model)
    if len(heads) > 1:
        raise ValueError(
            f"Expected `model` to have one head, but got {len(heads)} ({_names(heads, model)}); "
            f"{HEAD_REMEDY}."
        )
    return heads[0]


def find_heads(model: nn.Module) -> Sequence[nn.Module]:
    """All heads of `model`: those that it declares, otherwise its last layer.

    Raises:
        ValueError: If the last layer is not linear, or another layer could be the head.
    """
    heads, rivals = _search(model)
    if not isinstance(heads[0], LINEAR_LAYERS):
        owns = any(True for _ in heads[0].parameters())
        raise ValueError(
            "Expected the last layer of `model` to be linear or a convolution, but got "
            f"{f'a {type(heads[0]).__name__}' if owns else 'nothing'}; {HEAD_REMEDY}."
        )
    if rivals:
        raise ValueError(
            "Expected one layer of `model` that could be its head, but got several "
            f"({_names([*heads, *rivals], model)}); {HEAD_REMEDY}."
        )
    return heads


def _search(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """The heads, or the last module with parameters; and other layers that could be the head."""
    model = unwrap(model)
    if declared := _declared_heads(model):
        return declared, []
    children = [(n, c) for n, c in model.named_children() if any(True for _ in c.parameters())]
    if not children or isinstance(model, LINEAR_LAYERS):
        return [model], []
    *others, (name, last) = children
    heads, rivals = _search(last)
    if not others or _is_sequential(model):
        return heads, rivals
    linear = isinstance(heads[0], LINEAR_LAYERS)
    for other, child in others:
        layer = _last_owner(child)
        if not isinstance(layer, LINEAR_LAYERS):
            continue
        # The number of classes may equal the number of features, so the name counts as well.
        named_head = not _HEAD_NAMES.isdisjoint(other.lower().split("_"))
        same_size = linear and _outputs(layer) == _outputs(heads[0])
        if (named_head and same_size) or next(_takers(layer, model), None) is None:
            rivals.append(layer)
    if linear and name not in _HEAD_NAMES:
        takers = list(_takers(heads[0], model))
        rivals += [m for m in takers if isinstance(m, LINEAR_LAYERS)] or takers
    return heads, rivals


def _declared_heads(model: nn.Module) -> list[nn.Module]:
    """The heads that timm's or transformers' method returns (two for timm's distilled models)."""
    for method in ("get_classifier", "get_output_embeddings"):
        result = getattr(model, method, lambda: None)()
        modules = result if isinstance(result, (tuple, list)) else [result]
        heads: list[nn.Module] = [m for m in modules if isinstance(m, LINEAR_LAYERS)]
        if heads:
            return heads
    return []


def _last_owner(module: nn.Module) -> nn.Module:
    """The last module with parameters of its own."""
    owners = [m for m in module.modules() if any(p is not None for p in m._parameters.values())]
    return owners[-1]


def _outputs(layer: nn.Module) -> int:
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels  # type: ignore[return-value]


def _takers(layer: nn.Module, model: nn.Module) -> Iterator[nn.Module]:
    """The modules whose input size fits the output of `layer`."""
    size = _outputs(layer)
    return (m for m in model.modules() if m is not layer and _takes(m, size, layer))


def _takes(module: nn.Module, size: int, layer: nn.Module) -> bool:
    if isinstance(module, nn.Linear):  # a convolution's outputs may have been flattened
        flattened = isinstance(layer, _ConvNd) and module.in_features % size == 0
        return flattened or module.in_features == size
    if isinstance(module, _ConvNd):
        return module.in_channels == size
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return False
    own = [p for p in module._parameters.values() if p is not None]
    return size > 1 and any(size in parameter.shape for parameter in own)


def _is_sequential(module: nn.Module) -> bool:
    """Whether the children of `module` run in the order of registration."""
    return type(module).forward is nn.Sequential.forward


def _names(modules: Sequence[nn.Module], model: nn.Module) -> str:
    names = [name for name, module in model.named_modules() if any(m is module for m in modules)]
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(names[:6]) + more


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, DataParallel and ``torch.compile``."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


# Scaling the head ---------------------------------------------------------------------------------


def scalable_heads(
    model: nn.Module, head: nn.Module | str | None, example_inputs: Any = None
) -> Sequence[nn.Module]:
    """The heads of `model`, after checking that scaling them by alpha scales the logits by alpha.

    Raises:
        ValueError: If the head is not found, is not linear, or shares a parameter; or if the model,
            its configuration or the example shows that something after it does not scale.
    """
    _check_no_cap(model)
    if head is not None:
        heads = [find_head(model, head)]
        _check_not_one_of_several(heads[0], model, example_inputs)
    elif example_inputs is None:
        try:
            heads = find_heads(model)
        except ValueError as error:
            remedy = f"{HEAD_REMEDY}, or `example_inputs`, from which it can be found"
            raise ValueError(str(error).replace(HEAD_REMEDY, remedy)) from None
    else:
        return _Trial(model, example_inputs).find()
    for layer in heads:
        check_linear(layer)
        check_untied(layer, model)
        _check_nothing_after(layer, model)
    if example_inputs is not None:
        _Trial(model, example_inputs).check(heads)
    return heads


@torch.no_grad()
def scale(heads: Sequence[nn.Module], factor: float) -> None:
    """Multiply the weights and biases of `heads` by `factor`, in place."""
    for layer in heads:
        for parameter in layer.parameters():
            parameter.mul_(factor)


def check_linear(head: nn.Module) -> None:
    """Refuse a layer whose outputs do not scale with its weight and bias."""
    if not isinstance(head, LINEAR_LAYERS):
        raise ValueError(
            "Expected `head` to be a linear layer or a convolution, but got a "
            f"{type(head).__name__}."
        )
    if parametrize.is_parametrized(head) or "weight" not in head._parameters:
        raise ValueError(
            "Expected `head` to have a plain weight, but got a parametrised one (such as "
            "weight_norm); first call `torch.nn.utils.parametrize.remove_parametrizations`."
        )
    if more := [name for name, _ in head.named_parameters() if name not in ("weight", "bias")]:
        raise ValueError(
            f"Expected `head` to have only a weight and a bias, but got also {', '.join(more)}."
        )


def check_untied(head: nn.Module, model: nn.Module) -> None:
    """Refuse a parameter that `model` uses twice, as the same object or over the same memory."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    for parameter in head.parameters():
        names = [
            name for name, other in tensors if other is parameter or _overlap(other, parameter)
        ]
        if len(names) > 1:
            raise ValueError(
                "Expected `head` to have parameters of its own, but got one shared by "
                f"{' and '.join(names)}: a tied head cannot be scaled alone."
            )


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether `a` and `b` share memory; False for tensors without memory."""
    (a_start, a_end), (b_start, b_end) = _extent(a), _extent(b)
    return a.device == b.device and max(a_start, b_start) < min(a_end, b_end)


def _extent(tensor: Tensor) -> tuple[int, int]:
    start = 0 if tensor.layout is not torch.strided else tensor.data_ptr()
    if start == 0 or tensor.numel() == 0:  # as on the meta device
        return 0, 0
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _check_no_cap(model: nn.Module) -> None:
    """Refuse a model whose configuration caps the logits with a tanh."""
    # The names in transformers are final_logit_softcapping, logits_soft_cap and
    # output_logit_soft_cap. Caps on the logits of attention and of routers do not matter here.
    for module in model.modules():
        config = getattr(module, "config", None)
        for name, value in getattr(config, "__dict__", {}).items():
            if value and re.search(r"^(?!.*(att|router)).*logit.*cap", name):
                raise ValueError(
                    f"Expected `model` not to cap its logits, but got `config.{name}` = {value}: "
                    "the cap comes after the head and does not scale with it."
                )


def _check_not_one_of_several(head: nn.Module, model: nn.Module, example_inputs: Any) -> None:
    """Refuse one of several declared heads, unless there is an example to check it with."""
    declared = _declared_heads(unwrap(model))
    if example_inputs is None and len(declared) > 1 and any(head is other for other in declared):
        raise ValueError(
            "Expected `head` to be the only head, but got one of several "
            f"({_names(declared, model)}); pass None to scale all of them."
        )


def _check_nothing_after(head: nn.Module, model: nn.Module) -> None:
    """Refuse modules after `head` in an ``nn.Sequential`` that have weights or do not scale."""
    model = unwrap(model)
    while _is_sequential(model):
        children = list(model.children())
        holds = [any(module is head for module in child.modules()) for child in children]
        place = holds.index(True)
        for module in (module for child in children[place + 1 :] for module in child.modules()):
            if module._parameters or (
                type(module).__module__ == nn.ReLU.__module__
                and not isinstance(module, (nn.ReLU, nn.LeakyReLU, nn.LogSoftmax))
            ):
                raise ValueError(
                    f"Expected `head` to compute the logits, but got a {type(module).__name__} "
                    "after it, which does not scale with them."
                )
        model = unwrap(children[place])


class _Trial:
    """Runs a model on an example with some of its layers scaled, and restores it afterwards."""

    # A power of two is exact in every dtype. It is so large that a soft cap of 30 changes even
    # logits of 0.1.
    FACTOR = 64.0

    def __init__(self, model: nn.Module, example_inputs: Any) -> None:
        self.model = model
        if isinstance(example_inputs, Mapping):
            self.args, self.kwargs = (), dict(example_inputs)
        elif isinstance(example_inputs, (Tensor, tuple)):
            is_tuple = isinstance(example_inputs, tuple)
            self.args, self.kwargs = example_inputs if is_tuple else (example_inputs,), {}
        else:
            raise TypeError(
                "Expected `example_inputs` to be a tensor, a tuple or a dict of the arguments of "
                f"`model`, but got {type(example_inputs).__name__}."
            )
        self.called: dict[nn.Module, None] = {}  # linear layers, in the order of their last calls
        self.logits = self.run()
        if not self.logits.any():
            raise ValueError(
                "Expected `example_inputs` to give logits that are not all 0, but got zeros, which "
                "cannot show whether the logits scale."
            )

    def find(self) -> Sequence[nn.Module]:
        """The last layer that scales the logits, or the last few that scale them together."""
        last = [layer for layer in reversed(self.called) if self.class_dim(layer) is not None]
        together = (last[:count] for count in range(2, len(last) + 1))
        heads = next(filter(self.scales, [*([layer] for layer in last), *together]), last)
        for layer in heads:
            check_linear(layer)
            check_untied(layer, self.model)
        if heads is last:
            self.check(heads)
        return heads

    def check(self, heads: Sequence[nn.Module]) -> None:
        if not heads or not self.scales(heads):
            shape = tuple(self.logits.shape)
            got = _names(heads, self.model) or f"no layer with outputs of shape {shape}"
            raise ValueError(
                "Expected the logits of `example_inputs` to scale with the head, but got "
                f"{got}, with which they do not scale: another layer, or a soft cap, may follow; "
                "if another layer is the head, pass its name as `head`."
            )

    def scales(self, heads: Sequence[nn.Module]) -> bool:
        saved = [(p, p.detach().clone()) for layer in heads for p in layer.parameters()]
        try:
            scale(heads, self.FACTOR)
            after = self.run()
        finally:
            with torch.no_grad():
                for parameter, value in saved:
                    parameter.copy_(value)
        wanted, after = (self.centred(z, heads[0]) for z in (self.FACTOR * self.logits, after))
        finite = wanted.isfinite()
        if after.shape != wanted.shape or not torch.equal(finite, after.isfinite()):
            return False
        wanted, after = wanted[finite], after[finite]
        largest = wanted.abs().max() if len(wanted) else 0
        return bool(largest > 0 and (after - wanted).abs().max() <= self.tolerance * largest)

    def class_dim(self, layer: nn.Module) -> int | None:
        """The dimension of the logits that has the size of a layer's output."""
        dims = (-1, 1) if isinstance(layer, nn.Linear) else (1,)
        shape, size = self.logits.shape, _outputs(layer)
        return next((d for d in dims if d < len(shape) and shape and shape[d] == size), None)

    def centred(self, logits: Tensor, head: nn.Module) -> Tensor:
        """Remove a constant per example, such as a log-softmax adds: it does not affect softmax."""
        dim = self.class_dim(head)
        if dim is None or logits.shape[dim] == 1:
            return logits
        return logits - logits.amax(dim, keepdim=True)

    def run(self) -> Tensor:
        """The logits, in float64."""
        note = [
            module.register_forward_hook(self.note)
            for module in self.model.modules()
            if isinstance(module, LINEAR_LAYERS)
        ]
        devices = {p.device for p in self.model.parameters() if p.is_cuda}
        try:
            with (
                torch.no_grad(),
                evaluating(self.model),
                torch.random.fork_rng(list(devices)),
            ):
                logits = _logits_of(self.model(*self.args, **self.kwargs))
        finally:
            for hook in note:
                hook.remove()
        self.tolerance = max(1e-3, 4 * torch.finfo(logits.dtype).eps)
        return logits.double()

    def note(self, module: nn.Module, *_: object) -> None:
        self.called.pop(module, None)
        self.called[module] = None


def _logits_of(output: Any) -> Tensor:
    """The logits in a model's output: ``logits``, ``out`` (torchvision), the first item, or all."""
    logits = getattr(output, "logits", None)
    if logits is None and isinstance(output, Mapping):
        logits = output.get("logits", output.get("out"))
    elif logits is None:
        logits = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        raise TypeError(
            "Expected `model` to return logits (a tensor, the first item of a tuple, or `logits` "
            f"or `out`), but got a {type(output).__name__}."
        )
    return logits.detach()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A block in which `model` is in evaluation mode and runs eagerly, even if it is compiled.

    Modes and buffers are restored afterwards.
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module._buffers, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    # If dynamo was never loaded, nothing is compiled; loading it takes seconds.
    loaded = "torch._dynamo" in sys.modules
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager") if loaded else nullcontext():
            yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for owner, name, buffer, value in buffers:
                owner[name] = buffer.copy_(value)
