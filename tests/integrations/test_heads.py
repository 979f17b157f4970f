"""The heads of other people's models, and their optimizers under clipping."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn
from torchvision_shim import declare_torchvision_schemas

from powergrad import clip_grads_before_step, equivalent_training, fold_alpha
from powergrad.head import find_heads

declare_torchvision_schemas()
pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own
timm = pytest.importorskip("timm", reason="needs timm: make test-integrations")
transformers = pytest.importorskip("transformers", reason="needs it: make test-integrations")
torchvision = importlib.import_module("torchvision.models")
segmentation = torchvision.segmentation

SMALL = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
}  # fmt: skip
IMAGES = {**SMALL, "image_size": 32, "patch_size": 16, "num_labels": 5}
WORDS = {**SMALL, "vocab_size": 37, "max_position_embeddings": 16, "num_labels": 3}
GPT2 = {
    "vocab_size": 37, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
GEMMA = {
    **SMALL, "vocab_size": 37, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip
NO_WEIGHTS = {"weights": None, "weights_backbone": None, "num_classes": 7}


def of_transformers(name: str, config: str, **options):
    """Makes a model of transformers, by the name of its class and of its configuration."""
    return lambda: getattr(transformers, name)(getattr(transformers, config)(**options))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def names(heads, model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if any(m is head for head in heads)]


FOUND = {
    "torchvision resnet18": (lambda: torchvision.resnet18(num_classes=64), ["fc"]),
    "torchvision vgg11": (lambda: torchvision.vgg11(num_classes=7), ["classifier.6"]),
    "torchvision vit_b_32": (lambda: torchvision.vit_b_32(num_classes=7), ["heads.head"]),
    "torchvision squeezenet": (lambda: torchvision.squeezenet1_1(num_classes=7), ["classifier.1"]),
    "torchvision fcn": (lambda: segmentation.fcn_resnet50(**NO_WEIGHTS), ["classifier.4"]),
    "timm resnet18": (lambda: timm.create_model("resnet18"), ["fc"]),
    "timm vit": (lambda: timm.create_model("vit_tiny_patch16_224"), ["head"]),
    "timm deit": (
        lambda: timm.create_model("deit_tiny_distilled_patch16_224"),
        ["head", "head_dist"],
    ),
    "ViT": (of_transformers("ViTForImageClassification", "ViTConfig", **IMAGES), ["classifier"]),
    "BERT": (
        of_transformers("BertForSequenceClassification", "BertConfig", **WORDS),
        ["classifier"],
    ),
    "RoBERTa": (
        of_transformers("RobertaForSequenceClassification", "RobertaConfig", **WORDS),
        ["classifier.out_proj"],
    ),
    "DistilBERT": (
        of_transformers(
            "DistilBertForSequenceClassification", "DistilBertConfig",
            vocab_size=37, dim=16, n_layers=1, n_heads=2, hidden_dim=32,
        ),
        ["classifier"],
    ),
    "GPT-2": (of_transformers("GPT2LMHeadModel", "GPT2Config", **GPT2), ["lm_head"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_found(name):
    make, expected = FOUND[name]
    model = make()
    assert names(find_heads(model), model) == expected


AMBIGUOUS = {
    "fcn": (lambda: segmentation.fcn_resnet50(aux_loss=True, **NO_WEIGHTS), "classifier.4"),
    "lraspp": (lambda: segmentation.lraspp_mobilenet_v3_large(**NO_WEIGHTS), "low_classifier"),
    "DeiT": (
        of_transformers("DeiTForImageClassificationWithTeacher", "DeiTConfig", **IMAGES),
        "cls_classifier",
    ),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_several_candidates_are_named(name):
    make, candidate = AMBIGUOUS[name]
    with pytest.raises(ValueError, match=candidate):
        fold_alpha(None, 0.25, model=make())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (of_transformers("GPT2LMHeadModel", "GPT2Config", **GPT2), "a tied head"),
        (of_transformers("Gemma2ForCausalLM", "Gemma2Config", **GEMMA), "softcapping` = 30"),
    ],
)
def test_tied_and_capped_language_models_are_refused(make, message):
    model = make()
    with pytest.raises(ValueError, match=message):
        fold_alpha(None, 0.5, model=model)
    with pytest.raises(ValueError, match=message):
        equivalent_training(model, sgd(model), 0.5)


# Optimizers ---------------------------------------------------------------------------------------


def lookahead(optimizer):
    return importlib.import_module("timm.optim").Lookahead(optimizer)


def accelerated(optimizer):
    accelerate = pytest.importorskip("accelerate", reason="needs it: make test-integrations")
    return accelerate.Accelerator(cpu=True).prepare_optimizer(optimizer)


def lightning(optimizer):
    fabric = pytest.importorskip("lightning.fabric", reason="needs it: make test-integrations")
    return fabric.wrappers._FabricOptimizer(optimizer, fabric.strategies.SingleDeviceStrategy())


@pytest.mark.parametrize("wrap", [lookahead, accelerated, lightning])
def test_what_steps_in_a_wrapper_is_clipped(wrap):
    w = nn.Parameter(torch.zeros(4))
    optimizer = wrap(torch.optim.SGD([w], lr=1.0))
    with clip_grads_before_step(optimizer, norm=1.0) as handle:
        w.grad = torch.full_like(w, 100.0)
        optimizer.step()
        assert handle.last_report["norm"].clipped == 1
    torch.testing.assert_close(w.detach(), torch.full((4,), -0.5))
