"""`import powergrad` and an eager gradient do not depend on a private name of PyTorch."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).parents[1] / "src" / "powergrad"
# `torch.no_grad()`, `backward()` and `import torch._dynamo` need these.
NEEDED_BY_PYTORCH = {
    "_C",
    "_C._set_grad_enabled",
    "utils._pytree.tree_map",
}


def private_names() -> list[str]:
    """The attributes of torch with a private part that the core uses."""
    names = set()
    for file in SOURCE.rglob("*.py"):
        if "lab" in file.relative_to(SOURCE).parts:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "_private":
                names.add(ast.literal_eval(node.args[0]))
            if re.fullmatch(r"torch(\.\w+)+", ast.unparse(node) if _is_attribute(node) else ""):
                names.add(ast.unparse(node).removeprefix("torch."))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch."):
                path = f"{node.module}.".removeprefix("torch.")
                names.update(path + alias.name for alias in node.names)
    private = {name for name in names if re.search(r"(^|\.)_[A-Za-z]", name)}
    return sorted(private - NEEDED_BY_PYTORCH)


def _is_attribute(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute)


PROGRAM = """
import os, sys
import torch
import torch.nn.functional as F

def check(path):
    if path.startswith("distributed.tensor"):
        __import__("torch.distributed.tensor")
    owner = torch
    *owners, last = path.split(".")
    for name in owners:
        owner = getattr(owner, name)
    delattr(owner, last)
    import powergrad
    z = torch.tensor([[2.0, 0.0, -1.0]], requires_grad=True)
    y = torch.tensor([1])
    def grad(loss):
        return torch.autograd.grad(loss, z)[0]
    expected = torch.softmax(0.25 * z.detach(), 1) - torch.tensor([[0.0, 1.0, 0.0]])
    torch.testing.assert_close(grad(powergrad.cross_entropy(z, y, alpha=0.25)), expected)
    with powergrad.PowerGrad(0.25):
        loss = F.cross_entropy(z, y)
    torch.testing.assert_close(grad(loss), expected)

for path in sys.argv[1:]:
    if os.fork() == 0:
        try:
            check(path)
        except BaseException as error:
            print(f"{path}: {type(error).__name__}: {error}", flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_each_private_name_may_be_missing():
    names = private_names()
    assert "_C._len_torch_dispatch_stack" in names
    there = [name for name in names if _exists(name)]
    run = [sys.executable, "-c", PROGRAM, *there]
    assert subprocess.run(run, check=True, capture_output=True, text=True).stdout == ""


def _exists(path: str) -> bool:
    value = torch
    for name in path.split("."):
        value = getattr(value, name, None)
    return value is not None
