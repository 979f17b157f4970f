"""PowerGrad under transformers' Trainer, and around models that compute their own loss."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from torchvision_shim import declare_torchvision_schemas

from powergrad import PowerGrad, cross_entropy

declare_torchvision_schemas()
pytestmark = pytest.mark.filterwarnings("default")  # the library's own
transformers = pytest.importorskip("transformers", reason="needs it: make test-integrations")
pytest.importorskip("accelerate", reason="transformers' Trainer needs it: make test-integrations")
causal_loss = importlib.import_module("transformers.loss.loss_utils").ForCausalLMLoss

from test_language_models import (  # noqa: E402
    ALPHA,
    VOCABULARY,
    Keep,
    by_hand,
    close,
    gradients,
    language_model,
    one_step,
    sentences,
)


def compute_loss_func(options, model):
    @PowerGrad(ALPHA)
    def compute_loss(outputs, labels, num_items_in_batch=None):
        return causal_loss(outputs.logits, labels, VOCABULARY, num_items_in_batch)

    return transformers.Trainer(model, compute_loss_func=compute_loss, **options)


def loss_function(options, model):
    model.loss_function = PowerGrad(ALPHA)(model.loss_function)
    return transformers.Trainer(model, **options)


def forward(options, model):
    model.forward = PowerGrad(ALPHA, log_softmax=False)(model.forward)
    return transformers.Trainer(model, **options)


def checkpointed_forward(options, model):
    model.gradient_checkpointing_enable()
    return forward(options, model)


def trainer_compute_loss(options, model):
    trainer = transformers.Trainer(model, **options)
    trainer.compute_loss = PowerGrad(ALPHA)(trainer.compute_loss)
    return trainer


def trained(way, model, folder, batch_size, accumulation, **options):
    """The gradients of one step of the optimizer."""
    arguments, keep = one_step(folder, batch_size, accumulation, **options), Keep()
    way({"args": arguments, "train_dataset": sentences(), "callbacks": [keep]}, model).train()
    return keep.gradients


@pytest.mark.parametrize(
    "way",
    [compute_loss_func, loss_function, forward, checkpointed_forward, trainer_compute_loss],
)
@pytest.mark.parametrize(("batch_size", "accumulation"), [(8, 1), (2, 4), (1, 8)])
def test_tokens_are_averaged_over_all_accumulated_batches(way, batch_size, accumulation, tmp_path):
    model = language_model("GPT2")
    expected = by_hand(model, sentences())
    close(trained(way, model, tmp_path, batch_size, accumulation), expected)


def test_the_trainers_own_label_smoothing(tmp_path):
    """Its LabelSmoother takes a log_softmax of its own, in Trainer.compute_loss."""
    model = language_model("GPT2")
    expected = by_hand(model, sentences(), label_smoothing=0.1)
    options = {"label_smoothing_factor": 0.1}
    close(trained(trainer_compute_loss, model, tmp_path, 2, 4, **options), expected)


def test_a_model_that_computes_its_own_loss():
    """BERT's classifier constructs a CrossEntropyLoss in its forward."""
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=32, num_labels=5, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip
    model.classifier.weight.data *= 50
    twin = copy.deepcopy(model)
    tokens, labels = torch.randint(1, VOCABULARY, (6, 9)), torch.arange(6) % 5
    with PowerGrad(ALPHA, log_softmax=False):
        output = model(input_ids=tokens, labels=labels)
    (2.5 * output.loss).backward()
    (2.5 * cross_entropy(twin(input_ids=tokens).logits, labels, alpha=ALPHA)).backward()
    close(gradients(model), gradients(twin))
