"""The pages' code that needs another library; the rest is run by tests/test_docs.py."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from pages import NEEDED, run
from torchvision_shim import declare_torchvision_schemas

declare_torchvision_schemas()
pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own


def what_a_reader_has(library: str, folder: Path) -> dict[str, Any]:
    """What the pages' blocks use without making it, beyond a training in PyTorch."""
    if library == "jax":
        jnp = importlib.import_module("jax.numpy")
        return {"logits": jnp.zeros((4, 10)), "labels": jnp.arange(4)}
    if library == "transformers":
        transformers = importlib.import_module("transformers")
        config = transformers.GPT2Config(
            vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=0,
            eos_token_id=0,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
        arguments = transformers.TrainingArguments(output_dir=str(folder), report_to="none")
        trainer = transformers.Trainer(model, arguments)
        given = {"model": model, "arguments": arguments, "trainer": trainer}
        return {**given, "dataset": [{"input_ids": [1, 2]}], "vocab_size": 16}
    return {}


@pytest.mark.parametrize(("page", "library"), NEEDED)
def test_examples_run(page, library, tmp_path, monkeypatch):
    pytest.importorskip(library, reason=f"needs {library}: make test-integrations")
    monkeypatch.chdir(tmp_path)
    assert run(page.read_text(), str(page), library, **what_a_reader_has(library, tmp_path)) > 0


def test_every_library_has_its_examples():
    assert {library for _, library in NEEDED} == {"jax", "lightning", "timm", "transformers"}
