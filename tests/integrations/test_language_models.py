"""Causal language models: `powergrad.transformers.apply`, and the trainers that use them."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import Processes
from references import potential
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torchvision_shim import declare_torchvision_schemas

declare_torchvision_schemas()
pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own
transformers = pytest.importorskip("transformers", reason="needs it: make test-integrations")
pytest.importorskip("accelerate", reason="transformers' Trainer needs it: make test-integrations")

import powergrad.transformers as ours  # noqa: E402
from powergrad import PowerGrad  # noqa: E402

ALPHA, VOCABULARY, LENGTH = 0.3, 37, 12
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 8,
}  # fmt: skip
ARCHITECTURES = {
    "Llama": {},
    "Mistral": {},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {},
    "Gemma2": {"final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    "Granite": {"logits_scaling": 0.5},
    "Cohere": {"logit_scale": 0.25},
    "Olmo2": {},
    "Mixtral": {"num_local_experts": 2, "output_router_logits": True},
    "GPTNeoX": {},
    "GPT2": {
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 32,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
}
NAMES = {"GPT2": "GPT2LMHeadModel"}


def language_model(name: str = "Llama") -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **ARCHITECTURES[name]})
    model = getattr(transformers, NAMES.get(name, f"{name}ForCausalLM"))(config)
    if name == "Mixtral":
        model.set_experts_implementation("eager")  # the other does not take float64
    with torch.no_grad():  # confident enough for p and p' to differ
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    model.loss_type = "ForCausalLM"
    return model


def sentences(count: int = 8) -> list[dict[str, torch.Tensor]]:
    """Sentences of very different lengths, padded."""
    generator = torch.Generator().manual_seed(1)
    examples = []
    for length in (12, 2, 3, 12, 5, 2, 11, 4)[:count]:
        tokens = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator)
        mask = (torch.arange(LENGTH) < length).long()
        labels = torch.where(mask.bool(), tokens, -100)
        examples.append({"input_ids": tokens, "attention_mask": mask, "labels": labels})
    return examples


def batch_of(examples):
    return {key: torch.stack([e[key] for e in examples]) for key in examples[0]}


def by_hand(model: nn.Module, examples, **options) -> dict[str, torch.Tensor]:
    """The potential's gradients in float64, from the model's own logits."""
    model, batch = copy.deepcopy(model).double().train(), batch_of(examples)
    labels = batch.pop("labels")[:, 1:].flatten()
    output = model(**batch)
    loss = potential(output.logits[:, :-1].flatten(0, 1), labels, ALPHA, **options)
    if getattr(output, "aux_loss", None) is not None:
        loss = loss + model.router_aux_loss_coef * output.aux_loss
    loss.backward()
    return gradients(model)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}


def close(found, expected, tolerance: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    scale = max(g.abs().max() for g in expected.values())
    for name, gradient in found.items():
        assert (gradient - expected[name]).abs().max() < tolerance * scale, name


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_apply(name: str) -> None:
    """Value and gradients; evaluation and a copy are as before; the map is the configured one."""
    model, batch = language_model(name), batch_of(sentences())
    before = model.eval()(**batch)
    expected = by_hand(model, sentences())
    applied = ours.apply(model, ALPHA)
    options = ARCHITECTURES[name]
    scale = options.get("logit_scale", 1 / options.get("logits_scaling", 1.0))
    cap = options.get("final_logit_softcapping")
    assert abs(applied.logit_scale - scale) < 1e-5
    assert applied.softcap == (None if cap is None else pytest.approx(cap, rel=1e-5))
    torch.testing.assert_close(model(**batch).logits, before.logits, rtol=0, atol=0)
    for network in (model, copy.deepcopy(model)):
        network.train().zero_grad()
        output = network(**batch)
        assert output.logits is None
        torch.testing.assert_close(output.loss, before.loss, rtol=1e-5, atol=1e-6)
        output.loss.backward()
        close(gradients(network), expected)
    applied.remove()
    assert model.train()(**batch).logits is not None


class Twice(transformers.LlamaForCausalLM):
    """Its loss is not the one of its head's logits alone."""

    def forward(self, input_ids=None, labels=None, **kwargs):  # type: ignore[override]
        output = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        if labels is not None:
            output.loss = 2 * output.loss
            output.loss = output.loss + output.logits.square().mean()
        return output


class Own(transformers.LlamaForCausalLM):
    """It computes its loss itself."""

    def forward(self, input_ids=None, labels=None, **kwargs):  # type: ignore[override]
        output = super().forward(input_ids=input_ids, **kwargs)
        if labels is not None:
            output.loss = F.cross_entropy(
                output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            )
        return output


class Bent(transformers.LlamaForCausalLM):
    """Something else than a cap comes after the head."""

    def __init__(self, config):
        super().__init__(config)
        self.loss_function = lambda logits, labels, vocab_size, **_: F.cross_entropy(
            logits[:, :-1].flatten(0, 1).sinh(), labels[:, 1:].flatten()
        )


@pytest.mark.parametrize("kind", [Twice, Own, Bent])
def test_what_cannot_be_verified_is_refused(kind: type) -> None:
    model = kind(transformers.LlamaConfig(**SIZES))
    with pytest.raises((ValueError, RuntimeError, IndexError)):
        ours.apply(model, ALPHA)
    assert "forward" not in vars(model)
    assert "forward" not in vars(model.lm_head)


def test_other_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="linear head"):
        ours.apply(nn.Linear(3, 2), ALPHA)
    model = language_model()
    ours.apply(model, ALPHA)
    with pytest.raises(ValueError, match="`forward`"):
        ours.apply(model, ALPHA)


class Keep(transformers.TrainerCallback):
    """Keeps the gradients with which the optimizer steps."""

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.gradients = gradients(kwargs["model"])


def one_step(folder: Path, batch_size: int, accumulation: int, kind: Any = None, **options) -> Any:
    """The arguments of a Trainer."""
    return (kind or transformers.TrainingArguments)(
        output_dir=str(folder), per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation, max_steps=1, max_grad_norm=0.0,
        save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize(("batch_size", "accumulation"), [(8, 1), (2, 4)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer(batch_size: int, accumulation: int, checkpointing: bool, tmp_path: Path) -> None:
    """Tokens are averaged over all accumulated batches."""
    model, examples, keep = language_model(), sentences(), Keep()
    expected = by_hand(model, examples)
    ours.apply(model, ALPHA)
    options = {"gradient_checkpointing": checkpointing}
    arguments = one_step(tmp_path, batch_size, accumulation, **options)
    transformers.Trainer(model, arguments, train_dataset=examples, callbacks=[keep]).train()
    close(keep.gradients, expected)


FSDP = """
import sys, torch
sys.path[:0] = {paths!r}
from torchvision_shim import declare_torchvision_schemas
declare_torchvision_schemas()
import accelerate
import transformers
from test_language_models import ALPHA, by_hand, language_model, one_step, sentences
import powergrad.transformers

model, examples = language_model(), sentences()
expected = by_hand(model, examples)
powergrad.transformers.apply(model, ALPHA)

class Check(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        parameters = dict(kwargs["model"].named_parameters())
        assert all(hasattr(p, "placements") for p in parameters.values()), "not sharded"
        found = {{n: p.grad.full_tensor() for n, p in parameters.items()}}
        scale = max(g.abs().max() for g in expected.values())
        error = max(float((found[n] - expected[n]).abs().max() / scale) for n in expected)
        open(f"{{args.output_dir}}/error-{{args.process_index}}", "w").write(str(error))

arguments = one_step(
    sys.argv[1], 2, 2, gradient_checkpointing=True, fsdp=True,
    fsdp_config={{"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                 "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}},
)
# On CPU, accelerate leaves FSDP out without a word (1.15.0). Its own code for GPUs runs here.
accelerate.PartialState().distributed_type = accelerate.DistributedType.MULTI_GPU
transformers.Trainer(model, arguments, train_dataset=examples, callbacks=[Check()]).train()
"""


def test_trainer_with_fsdp2(tmp_path: Path) -> None:
    """Two processes, sharded by accelerate: one step, accumulated over two batches."""
    here = Path(__file__).parent
    script = tmp_path / "train.py"
    script.write_text(FSDP.format(paths=[str(here), str(here.parent)]))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    ended = subprocess.run(
        [*command, str(script), str(tmp_path)], capture_output=True, text=True, env=environment
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    errors = [float((tmp_path / f"error-{rank}").read_text()) for rank in (0, 1)]
    assert max(errors) < 1e-6


# TRL ----------------------------------------------------------------------------------------------


@pytest.fixture
def trl(monkeypatch):
    module = pytest.importorskip("trl", reason="needs it: make test-integrations")
    utils = importlib.import_module("trl.trainer.utils")
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", utils._ChunkedLogProbFunction)
    return module


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Cohere"])
def test_sft_trainer(trl, name: str, tmp_path: Path) -> None:
    """One step of SGD: the trainer's metrics are those of TRL, its gradients the potential's."""
    from datasets import Dataset  # pyright: ignore[reportMissingImports]

    from powergrad.trl import apply

    tokens = [e["input_ids"][: int(e["attention_mask"].sum())].tolist() for e in sentences()]
    data = Dataset.from_dict({"input_ids": tokens})
    logs = []
    for alpha in (None, ALPHA):
        model, keep = language_model(name), Keep()
        expected = by_hand(model, sentences())
        if alpha is not None:
            apply(alpha)
        arguments = one_step(
            tmp_path, 4, 2, trl.SFTConfig, logging_steps=1, bf16=False,
            gradient_checkpointing=True, max_length=None,
        )  # fmt: skip
        trainer = trl.SFTTrainer(
            model, arguments, train_dataset=data, callbacks=[keep], processing_class=tokenizer()
        )
        trainer.train()
        logs.append(trainer.state.log_history[0])
    close(keep.gradients, expected)
    for key in ("loss", "entropy", "mean_token_accuracy"):
        assert logs[0][key] == pytest.approx(logs[1][key], rel=1e-4), key


def tokenizer():
    from tokenizers import Tokenizer  # pyright: ignore[reportMissingImports]
    from tokenizers.models import WordLevel  # pyright: ignore[reportMissingImports]

    words = {f"w{i}": i for i in range(VOCABULARY)}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w1")), pad_token="w0", eos_token="w2"
    )


def test_trl_without_its_function_is_refused(trl, monkeypatch) -> None:
    from powergrad.trl import apply

    monkeypatch.delattr("trl.trainer.utils._ChunkedLogProbFunction")
    with pytest.raises(ImportError, match=r"1\.16\.0"):
        apply(ALPHA)


def test_what_other_trainers_of_trl_ask_for_is_refused(trl) -> None:
    import trl.trainer.utils as utils  # pyright: ignore[reportMissingImports]

    from powergrad.trl import apply

    apply(ALPHA)
    model = language_model()
    utils.add_fused_lm_head(model, outputs=("log_probs", "mean_logits"))
    with pytest.raises(NotImplementedError, match="mean_logits"):
        model(**batch_of(sentences()), fused_lm_head=True)


# torchtitan ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [None, 3])
def test_torchtitan(chunks: int | None) -> None:
    pytest.importorskip("torchtitan", reason="needs it: make test-integrations")
    from torchtitan.components.loss import (  # pyright: ignore[reportMissingImports]
        ChunkedLossWrapper,
        CrossEntropyLoss,
    )

    from powergrad.torchtitan import PowerGradLoss

    torch.manual_seed(0)
    head, hidden = nn.Linear(5, 7), torch.randn(2, 6, 5)
    labels = torch.randint(7, (2, 6))
    labels[0, 0] = -100
    count = (labels != -100).sum()
    results = []
    for loss in (PowerGradLoss.Config(alpha=ALPHA), CrossEntropyLoss.Config()):
        h = hidden.clone().requires_grad_()
        head.zero_grad()
        if chunks is None:
            value, _ = loss.build()(head(h), labels, count)
        else:
            wrapper = ChunkedLossWrapper.Config(num_chunks=chunks, loss_fn=loss).build()
            wrapper.set_lm_head(head)
            value, _ = wrapper(h, labels, count)
        value.backward()
        results.append((value.detach(), {"h": h.grad, **gradients(head)}))
    h = hidden.double().requires_grad_()
    twin = copy.deepcopy(head).double()
    twin.zero_grad()
    potential(twin(h).flatten(0, 1), labels.flatten(), ALPHA).backward()
    close(results[0][1], {"h": h.grad, **gradients(twin)})
    torch.testing.assert_close(results[0][0], results[1][0])


def tensor_parallel(rank: int, group: Any) -> None:
    from powergrad.torchtitan import PowerGradLoss

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    z, y = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    y[0, 0] = -100
    wide = z.double().requires_grad_()
    potential(wide.flatten(0, 1), y.flatten(), ALPHA, reduction="sum").backward()
    loss = PowerGradLoss.Config(alpha=ALPHA).build()
    for labels in (y, distribute_tensor(y, mesh, [Replicate()])):
        logits: Any = distribute_tensor(z, mesh, [Shard(2)]).requires_grad_()
        value, _ = loss(logits, labels)
        value.backward()
        assert (logits.grad.full_tensor() - wide.grad).abs().max() < 1e-6


def test_torchtitan_with_split_classes() -> None:
    """Tensor parallelism in two processes; the labels are plain, or a DTensor."""
    pytest.importorskip("torchtitan", reason="needs it: make test-integrations")
    pool = Processes(2, __name__)
    try:
        pool.run(2, tensor_parallel)
    finally:
        pool.close()


# Axolotl ------------------------------------------------------------------------------------------


def test_axolotl(tmp_path: Path) -> None:
    """It needs older versions of the libraries above, and so an environment of its own."""
    pytest.importorskip("axolotl", reason="needs it, in an environment of its own")
    model, data = language_model(), tmp_path / "data.jsonl"
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    shortened = [
        {n: v[e["attention_mask"] > 0].tolist() for n, v in e.items()} for e in sentences()
    ]
    data.write_text("\n".join(map(json.dumps, shortened)))
    options = {
        "base_model": str(tmp_path / "model"), "output_dir": str(tmp_path / "trained"),
        "datasets": [{"path": str(data), "ds_type": "json"}], "sequence_len": LENGTH,
        "dataset_prepared_path": str(tmp_path / "prepared"), "micro_batch_size": 8,
        "gradient_accumulation_steps": 1, "max_steps": 1, "max_grad_norm": 0.0,
        "learning_rate": 10.0, "optimizer": "sgd", "lr_scheduler": "constant",
        "bf16": False, "tf32": False, "save_strategy": "no",
        "plugins": ["powergrad.axolotl.PowerGradPlugin"], "powergrad_alpha": ALPHA,
    }  # fmt: skip
    (tmp_path / "train.yml").write_text(json.dumps(options))
    on_cpu = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "no"}
    ended = subprocess.run(
        [sys.executable, "-m", "axolotl.cli.train", str(tmp_path / "train.yml")],
        capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, **on_cpu, "HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    trained = type(model).from_pretrained(tmp_path / "trained")
    pairs = zip(model.named_parameters(), trained.parameters(), strict=True)
    close({n: ((p - q) / 10).detach() for (n, p), q in pairs}, by_hand(model, sentences()))


# Keras --------------------------------------------------------------------------------------------

KERAS = """
import os, sys
os.environ["KERAS_BACKEND"] = sys.argv[1]
import keras, numpy as np
rng = np.random.default_rng(0)
x, y = rng.normal(size=(6, 4)).astype("float32"), rng.integers(0, 3, 6)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
if sys.argv[1] == "torch":
    import powergrad
    loss = lambda y, z: powergrad.cross_entropy(z, y.long().flatten(), alpha=0.3, reduction="none")
else:
    from powergrad.jax import softmax_cross_entropy_with_integer_labels as f
    loss = lambda y, z: f(z, y.astype(int).ravel(), alpha=0.3)
w, b = model.get_weights()
w = w * 5
model.set_weights([w, b])
model.compile(keras.optimizers.SGD(1.0), loss)
value = model.train_on_batch(x, y)
z = x.astype("float64") @ w
p = lambda s: np.exp(s) / np.exp(s).sum(1, keepdims=True)
d = (p(0.3 * z) - np.eye(3)[y]) / 6
after, _ = model.get_weights()
assert abs(float(value) + np.log(p(z)[range(6), y]).mean()) < 1e-5, value
assert np.abs(w - after - x.T @ d).max() < 1e-6
"""


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_keras(backend: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("keras") is None:  # importing it would choose a backend
        pytest.skip("needs Keras: make test-integrations")
    ended = subprocess.run(
        [sys.executable, "-c", KERAS, backend], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "KERAS_HOME": str(tmp_path)},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]


def test_decorated_loss_function_is_an_alternative() -> None:
    """What the error of `apply` recommends."""
    model, batch = language_model("Gemma2").train(), batch_of(sentences())
    expected = by_hand(model, sentences())
    model.loss_function = PowerGrad(ALPHA)(model.loss_function)
    model(**batch).loss.backward()
    close(gradients(model), expected)
