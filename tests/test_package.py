"""The package as a whole: its names, its weight, and the examples that it prints."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import powergrad

ROOT = Path(__file__).parents[1]
MODULES = [  # the kernel is a library for ctypes, `__main__` a command
    name
    for _, name, _ in pkgutil.walk_packages(powergrad.__path__, "powergrad.")
    if not name.endswith(("._native.kernel", ".__main__"))
    and name != "powergrad.lightning"  # tested with Lightning, in tests/integrations
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


def rooms(title: str) -> list[set[str]]:
    """The modules in each row of a table of docs/architecture.md."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition(f"### {title}")[2].partition("\n#")[0]
    first_cells = re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
    return [set(re.findall(r"`([^`]+)`", cell)) for cell in first_cells]


@pytest.mark.parametrize(
    ("title", "folder", "identifier"),
    [("The core", ".", "core"), ("The workbench", "lab", "lab")],
)
def test_the_architecture_page_has_every_module_and_the_enforced_layers(title, folder, identifier):
    paths = [*(ROOT / "src" / "powergrad" / folder).iterdir()]
    modules = {path.name for path in paths if path.suffix == ".py" and path.stem != "__init__"}
    modules |= {f"{path.name}/" for path in paths if (path / "__init__.py").is_file()}
    rows = rooms(title)
    assert sorted(name for row in rows for name in row) == sorted(modules)

    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    contracts = {contract["id"]: contract for contract in settings["contracts"]}
    layers = [{*layer.split(" | ")} for layer in contracts[identifier]["layers"]]
    assert [{name.rstrip("/").removesuffix(".py") for name in row} for row in rows] == layers


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
