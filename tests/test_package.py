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

import powergrad

ROOT = Path(__file__).parents[1]
MODULES = [  # the kernel is a library for ctypes, `__main__` a command
    name
    for _, name, _ in pkgutil.walk_packages(powergrad.__path__, "powergrad.")
    if not name.endswith(("._native.kernel", ".__main__"))
    and name != "powergrad.lightning"  # tested with Lightning, in tests/integrations
]
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


def test_names_are_sorted_and_documented():
    public = sorted(n for n in powergrad.__all__ if n != "__version__")
    assert sorted(powergrad.__all__) == list(powergrad.__all__)
    for name in public:
        member = getattr(powergrad, name)
        assert inspect.getdoc(member), name
        for section in ("Args:", "Example:"):
            if inspect.signature(member).parameters:
                assert section in inspect.getdoc(member), f"{name}: {section}"  # pyright: ignore


@pytest.mark.parametrize("name", CALLABLES)
def test_docstrings_name_every_argument(name):
    """One contract for every public callable: each argument is documented, none is invented."""
    member = getattr(powergrad, name)
    documented = inspect.getdoc(member) or ""
    parameters = [p for p in inspect.signature(member).parameters if not p.startswith("_")]
    if not parameters:
        return
    section = re.split(r"\n\w+:\n", documented.split("Args:\n", 1)[1], maxsplit=1)[0]
    named = re.findall(r"^    \*{0,2}(\w+):", section, re.MULTILINE)
    assert named == parameters


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings_run(module):
    loaded = importlib.import_module(module)
    result = doctest.testmod(loaded, extraglobs={"torch": torch})
    assert result.failed == 0
