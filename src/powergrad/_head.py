"""Finding the classifier head: the layer whose outputs are the logits."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

LINEAR_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def find_head(model: nn.Module, head: nn.Module | str | None = None) -> nn.Module:
    """The module of `model` that makes the logits: `head`, the module of that name, or found.

    Without `head`, it is what timm's ``get_classifier()`` or transformers'
    ``get_output_embeddings()`` return, else the last module with parameters of its own, if that is
    a linear layer or a convolution.
    """
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
        names = ", ".join(name for name, module in model.named_modules() if module in heads)
        raise ValueError(
            f"Expected `model` to have one head, but got {len(heads)} ({names}); pass `head`, the "
            "module that makes the logits or its name."
        )
    return heads[0]


def find_heads(model: nn.Module) -> Sequence[nn.Module]:
    """All heads of `model`; timm's distilled transformers have two."""
    for method in ("get_classifier", "get_output_embeddings"):
        result = getattr(model, method, lambda: None)()
        modules = result if isinstance(result, (tuple, list)) else [result]
        heads = [module for module in modules if isinstance(module, LINEAR_LAYERS)]
        if heads:
            return heads
    owners = [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))]
    if owners and isinstance(owners[-1], LINEAR_LAYERS):
        return [owners[-1]]
    last = f"a {type(owners[-1]).__name__}" if owners else "nothing"
    raise ValueError(
        "Expected the last layer of `model` to be linear or a convolution, but got "
        f"{last}; pass `head`, the module that makes the logits or its name."
    )
