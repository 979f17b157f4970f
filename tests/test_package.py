"""The package as a whole: its names, its weight, and the examples that it prints."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml

import powergrad

ROOT = Path(__file__).parents[1]
MODULES = [  # the kernel is a library for ctypes, `__main__` a command
    name
    for _, name, _ in pkgutil.walk_packages(powergrad.__path__, "powergrad.")
    if not name.endswith((".kernels.kernel", ".__main__"))
    # With their libraries in tests/integrations; with Triton in tests/test_triton.py.
    and not name.endswith((".axolotl", ".lightning", ".torchtitan", ".kernels.triton"))
] + ["powergrad_cli"]
CALLABLES = [n for n in powergrad.__all__ if callable(getattr(powergrad, n))]


def test_importing_brings_torch_and_nothing_else():
    code = (
        "import sys, torch; before = set(sys.modules); import powergrad;"
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}));"
        "print(*[m for m in set(sys.modules) - before if m.startswith('torch.')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    packages, parts_of_torch = run.stdout.split("\n")[:2]
    heavy = set(packages.split()) - set(sys.stdlib_module_names)
    assert heavy == {"powergrad"}
    assert not parts_of_torch


@pytest.mark.parametrize("name", CALLABLES)
def test_docstrings_name_every_argument(name):
    """One contract for every public callable: each argument is documented, none is invented."""
    member = getattr(powergrad, name)
    documented = inspect.getdoc(member) or ""
    assert documented
    parameters = [p for p in inspect.signature(member).parameters if not p.startswith("_")]
    if parameters:
        assert "Example:" in documented
        section = re.split(r"\n\w+:\n", documented.split("Args:\n", 1)[1], maxsplit=1)[0]
        assert re.findall(r"^    \*{0,2}(\w+):", section, re.MULTILINE) == parameters


def test_public_names_are_sorted():
    assert sorted(powergrad.__all__) == list(powergrad.__all__)


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings_run(module):
    loaded = importlib.import_module(module)
    result = doctest.testmod(loaded, extraglobs={"torch": torch})
    assert result.failed == 0


def package_of(module: str) -> str:
    """The core is one package; the workbench is one per folder."""
    parts = module.split(".")[:-1]
    return ".".join(parts) if parts[1:2] == ["lab"] else "powergrad"


def test_modules_have_names_of_their_own_and_keep_private_names():
    source = ROOT / "src"
    paths = [*source.glob("powergrad/**/*.py")]
    names = Counter(path.name for path in paths)
    assert {name for name, count in names.items() if count > 1} == {"__init__.py"}
    private = []
    for path in paths:
        module = ".".join(path.relative_to(source).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and f"{node.module}".startswith("powergrad"):
                is_ours = package_of(f"{node.module}") == package_of(module)
                imported = [alias.name for alias in node.names if re.match("_[^_]", alias.name)]
                private += [] if is_ours else [f"{module}: {name}" for name in imported]
    assert private == []


def test_the_workflow_covers_every_declared_python_and_calls_targets_of_the_makefile():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    cells = workflow["jobs"]["make"]["strategy"]["matrix"]["include"]
    declared = re.findall(r'Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert [cell["python"] for cell in cells if cell["target"] == "test-core"] == declared
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {cell["target"] for cell in cells} <= {*targets}


def test_the_files_that_the_guides_name_exist():
    guides = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:src|tests|docs|benchmarks|reproduction)/[\w./]*)`", guides)
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).exists()] == []
