"""PowerGrad under transformers' Trainer, and around models that compute their own loss."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from references import potential
from torchvision_shim import declare_torchvision_schemas

from powergrad import PowerGrad, cross_entropy

declare_torchvision_schemas()
pytestmark = pytest.mark.filterwarnings("default")  # the library's own
transformers = pytest.importorskip("transformers", reason="needs it: make test-integrations")
pytest.importorskip("accelerate", reason="transformers' Trainer needs it: make test-integrations")
causal_loss = importlib.import_module("transformers.loss.loss_utils").ForCausalLMLoss

ALPHA, VOCABULARY, LENGTH = 0.3, 37, 12


def language_model():
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2,
            bos_token_id=0, eos_token_id=0, pad_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip
    # The class's name hides that its loss shifts the labels. The Trainer would count the first
    # token of each sentence too, with and without PGT (5.22.2).
    model.loss_type = "ForCausalLM"
    for parameter in model.parameters():  # confident enough for p and p' to differ
        parameter.data *= 4
    return model


def sentences():
    """Eight sentences of very different lengths, padded: a mean of means is another mean."""
    generator = torch.Generator().manual_seed(1)
    examples = []
    for length in (12, 2, 3, 12, 5, 2, 11, 4):
        tokens = torch.randint(1, VOCABULARY, (LENGTH,), generator=generator)
        mask = (torch.arange(LENGTH) < length).long()
        labels = torch.where(mask.bool(), tokens, -100)
        examples.append({"input_ids": tokens, "attention_mask": mask, "labels": labels})
    return examples


class Keep(transformers.TrainerCallback):
    """Keeps the gradients with which the optimizer steps."""

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.gradients = {
            n: p.grad.clone() for n, p in kwargs["model"].named_parameters() if p.grad is not None
        }


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


def trained(way, model, examples, batch_size, accumulation, tmp_path, **options):
    """The gradients of one step of the optimizer."""
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation, max_steps=1, max_grad_norm=0.0,
        save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, **options,
    )  # fmt: skip
    keep = Keep()
    trainer = way({"args": arguments, "train_dataset": examples, "callbacks": [keep]}, model)
    trainer.train()
    return keep.gradients


def by_hand(model, examples, label_smoothing=0.0):
    """The potential's gradients in float64: one batch, every token the same weight."""
    model = copy.deepcopy(model).double().train()
    batch = {key: torch.stack([e[key] for e in examples]) for key in examples[0]}
    labels = batch.pop("labels")[:, 1:].flatten()
    logits = model(**batch).logits[:, :-1].flatten(0, 1)
    potential(logits, labels, ALPHA, label_smoothing=label_smoothing).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def close(ours, expected, tolerance=1e-6):
    assert ours.keys() == expected.keys()
    scale = max(g.abs().max() for g in expected.values())
    for name, gradient in ours.items():
        assert (gradient - expected[name]).abs().max() < tolerance * scale, name


@pytest.mark.parametrize(
    "way",
    [compute_loss_func, loss_function, forward, checkpointed_forward, trainer_compute_loss],
)
@pytest.mark.parametrize(("batch_size", "accumulation"), [(8, 1), (2, 4), (1, 8)])
def test_tokens_are_averaged_over_all_accumulated_batches(way, batch_size, accumulation, tmp_path):
    model, examples = language_model(), sentences()
    expected = by_hand(model, examples)
    ours = trained(way, model, examples, batch_size, accumulation, tmp_path)
    close(ours, expected)


def test_the_trainers_own_label_smoothing(tmp_path):
    """Its LabelSmoother takes a log_softmax of its own, in Trainer.compute_loss."""
    model, examples = language_model(), sentences()
    expected = by_hand(model, examples, label_smoothing=0.1)
    options = {"label_smoothing_factor": 0.1}
    close(trained(trainer_compute_loss, model, examples, 2, 4, tmp_path, **options), expected)


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
    expected = {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}
    close({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, expected)
