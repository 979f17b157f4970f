"""PowerGrad Transform for transformers: a causal language model's head and loss in blocks."""

from __future__ import annotations

import functools
import inspect
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powergrad.checks import check_number, is_dtensor
from powergrad.head import evaluating
from powergrad.linear import linear_cross_entropy
from powergrad.loss import cross_entropy
from powergrad.verify import StepWatcher

__all__ = ["ChunkedHead", "apply"]


def apply(model: nn.Module, alpha: float) -> ChunkedHead:
    r"""Train a causal language model with PowerGrad Transform, without holding its logits.

    While `model` is in training mode and gets ``labels``, its head computes the loss by
    :func:`powergrad.linear_cross_entropy`, and the output has no logits. Everything else, such as
    evaluation and generation, is unchanged. Call it before the model is compiled or wrapped (PEFT,
    accelerate, the Trainer) or sharded (FSDP2).

    A soft cap or a scale between head and loss is measured. Then, for a small batch of random
    tokens, the loss is compared with the model's own, the gradient at the head's input with that of
    :func:`powergrad.cross_entropy` on the model's logits, and alpha with what
    :class:`~powergrad.verify.StepWatcher` sees. If anything differs, this raises, and the model is
    left as it was.

    Args:
        model: A model of transformers with a linear ``get_output_embeddings()`` and the usual loss,
            ``model.loss_function``.
        alpha: The exponent, at least 0.

    Returns:
        What was applied. Set its ``alpha`` at any time; ``remove()`` restores the model.

    Raises:
        ValueError: If the model has no such head or loss, or the comparison fails.
        RuntimeError: In a later step, if the model does not use its head and loss once.

    Example:
        >>> # model = transformers.AutoModelForCausalLM.from_pretrained(...)
        >>> # powergrad.transformers.apply(model, alpha=0.3)
    """
    applied = ChunkedHead(check_number(alpha))
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if getattr(type(head), "forward", None) is not nn.Linear.forward or is_dtensor(head.weight):
        raise ValueError(
            "Expected `model` to have a linear head (`get_output_embeddings()`), not sharded yet, "
            f"but got {type(head).__name__}."
        )
    for module in (model, head):
        if "forward" in vars(module):
            raise ValueError(
                f"Expected {type(module).__name__} to have its own `forward`, but got another one; "
                "call this before other wrappers, and once."
            )

    @functools.wraps(type(model).forward)  # its signature decides on what the Trainer passes
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._powergrad._call(self, args, kwargs)

    for module in (model, head):
        vars(module)["_powergrad"] = applied
    head.forward = MethodType(_forward_of_head, head)
    model.forward = MethodType(forward, model)  # methods are copied with the model
    applied._owners = (model, head)
    try:
        _measure_and_verify(model, head, applied)
    except BaseException:
        applied.remove()
        raise
    return applied


class ChunkedHead:
    """The loss of a model that :func:`apply` has changed.

    Attributes:
        alpha: The exponent; set it at any time.
        softcap: The soft cap that was measured, or None.
        logit_scale: The scale that was measured.
    """

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self.softcap: float | None = None
        self.logit_scale = 1.0
        self._owners: tuple[nn.Module, ...] = ()
        self._probe: Tensor | None = None  # returned as logits, to see what is done to them
        self._checking = False
        self._arguments: dict[str, Any] | None = None  # of the model, while it is in training
        self._loss: Tensor | None = None

    def remove(self) -> None:
        """Restore the model."""
        for module in self._owners:
            for name in ("forward", "_powergrad"):
                vars(module).pop(name, None)
        self._owners = ()

    def _call(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's forward."""
        own = type(model).forward
        given = inspect.signature(own).bind(model, *args, **kwargs).arguments
        given = {**given.get("kwargs", {}), **given}
        labelled = given.get("labels") is not None or given.get("shift_labels") is not None
        if not (labelled and (model.training or self._checking)):
            return own(model, *args, **kwargs)
        before = vars(model).get("_loss_function")
        self._arguments, self._loss = given, None
        model.loss_function = self._take
        try:
            output = own(model, *args, **kwargs)
            if self._loss is not None:
                raise RuntimeError(f"{type(model).__name__} does not use `model.loss_function`.")
        finally:
            self._arguments = self._loss = None
            del model._loss_function
            if before is not None:
                model.loss_function = before
        if not hasattr(output, "logits"):
            raise RuntimeError("Expected the model to return an object (`return_dict=True`).")
        output.logits = None
        return output

    def _loss_of(self, hidden: Tensor, head: Any) -> Tensor:
        """The loss, from the head's input."""
        given: Any = self._arguments
        target = given.get("shift_labels")
        shift = target is None
        count = given.get("num_items_in_batch")
        loss = linear_cross_entropy(
            hidden,
            head.weight,
            (given["labels"] if shift else target).to(hidden.device),
            alpha=self.alpha,
            linear_bias=head.bias,
            shift=shift,
            ignore_index=given.get("ignore_index", -100),
            softcap=self.softcap,
            logit_scale=self.logit_scale,
            reduction="mean" if count is None else "sum",
        ).float()
        return loss if count is None else loss / torch.as_tensor(count, device=loss.device)

    def _take(self, *args: Any, **kwargs: Any) -> Tensor:
        """In place of the model's loss function."""
        if self._probe is not None:
            logits: Tensor = kwargs["logits"] if "logits" in kwargs else args[0]
            self._probe = logits
            return logits.sum()
        loss, self._loss = self._loss, None
        if loss is None:
            raise RuntimeError("Expected the model to call its head and its loss once per step.")
        return loss


def _forward_of_head(self: Any, input: Tensor) -> Tensor:
    applied: ChunkedHead = self._powergrad
    if applied._probe is not None:
        return applied._probe
    if applied._arguments is None:
        return type(self).forward(self, input)
    if applied._loss is not None:
        raise RuntimeError("Expected the model to call its head once per step, but it does twice.")
    applied._loss = applied._loss_of(input, self)
    return input.new_zeros(*input.shape[:-1], 1)  # for what the model does to its logits


def _measure_and_verify(model: Any, head: Any, applied: ChunkedHead) -> None:
    known = min(head.out_features, model.get_input_embeddings().num_embeddings)
    tokens = torch.randint(known, (2, 8), generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(head.weight.device)
    labels = tokens.clone()
    labels[0, 3] = -100
    inputs: list[Tensor] = []

    def cut(_: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
        """Logits that differ enough, also in an untrained model; and no gradient before them."""
        hidden = args[0].detach()
        spread = applied.logit_scale * F.linear(hidden, head.weight).float().std()
        inputs.append((hidden * (3 / spread)).to(hidden.dtype).requires_grad_())
        return inputs[-1]

    hook = head.register_forward_pre_hook(cut)
    try:
        with evaluating(model), torch.enable_grad():
            applied._checking = True
            _measure_map(model, head, applied, {"input_ids": tokens, "labels": labels})
            applied._checking = False
            plain = model(input_ids=tokens, labels=labels)
            expected = cross_entropy(
                plain.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), alpha=applied.alpha
            )
            (wanted,) = torch.autograd.grad(expected, inputs[-1])
            applied._checking = True
            with StepWatcher(model, head) as watcher:
                loss = model(input_ids=tokens, labels=labels).loss
                (got,) = torch.autograd.grad(loss, inputs[-1])
    finally:
        applied._checking, applied._probe = False, None
        hook.remove()
    tolerance = max(1e-5, 4 * torch.finfo(head.weight.dtype).eps)
    seen, value = watcher.result(), plain.loss.detach()
    found = (loss.detach() - value).abs() / value.abs()
    off = (got - wanted).abs().max() / wanted.abs().max()
    alpha = torch.tensor(-1.0 if seen.alpha is None else seen.alpha)
    if not (found <= tolerance and off <= tolerance and (alpha - applied.alpha).abs() <= 1e-3):
        raise ValueError(
            "Expected the loss of a small batch to equal the model's own, and its gradient that of "
            f"PGT, but got a loss that differs by {float(found):.1e}, a gradient that differs by "
            f"{float(off):.1e}, and by `verify`: {seen}. Decorate the model's loss instead: "
            "`model.loss_function = PowerGrad(alpha)(model.loss_function)`."
        )


def _measure_map(model: Any, head: Any, applied: ChunkedHead, batch: dict[str, Tensor]) -> None:
    """Find the scale s and the soft cap c with which the model computes ``c tanh(s x / c)``."""
    shape = (*batch["labels"].shape, head.out_features)
    count = batch["labels"].numel() * head.out_features
    x = torch.logspace(-4, 4, count, dtype=torch.float64, device=head.weight.device)
    x[1::2] *= -1
    applied._probe = x = x.reshape(shape)
    model(**batch)
    y, applied._probe = applied._probe.double(), None
    if y.shape != shape:
        raise ValueError(f"Expected logits of shape {shape} at the loss, but got {tuple(y.shape)}.")
    first, last = (0,) * len(shape), (-1,) * len(shape)
    scale, cap = float(y[first] / x[first]), float(y[last].abs())
    scale = 1.0 if abs(scale - 1) < 1e-6 else scale
    cap = None if cap > 0.99 * scale * float(x[last].abs()) else cap
    expected = x * scale if cap is None else cap * torch.tanh(x * (scale / cap))
    if not (scale > 0 and torch.allclose(y, expected, 1e-5, 1e-9)):
        raise ValueError(
            "Expected at most a scale and a soft cap between head and loss, but got another "
            "function of the logits."
        )
    applied.logit_scale, applied.softcap = scale, cap
