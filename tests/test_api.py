"""The public names and signatures: none changes unannounced. Also: one version everywhere.

``tests/api.txt`` holds them as they were last announced. It is written by ``python
tests/test_api.py``, which first asks for a line in CHANGELOG.md. The sources are read, not
imported, so that Lightning and JAX need not be there.
"""

from __future__ import annotations

import difflib
import functools
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import griffe
import yaml

import powergrad
import powergrad_cli

ROOT = Path(__file__).parents[1]
RECORD, CHANGELOG = ROOT / "tests" / "api.txt", ROOT / "CHANGELOG.md"
MODULES = [
    *("", "alter", "calibration", "clip", "identity", "monitor", "parallel", "verify"),
    *("jax", "lightning", "transformers", "trl", "torchtitan", "axolotl"),
]
SPECIAL = {"__init__", "__call__", "__enter__", "__exit__"}
HOW_TO_ANNOUNCE = """
The public API is not what tests/api.txt says:

{difference}

If that was not meant, mend it. If it was, announce it:
  1. Say so in CHANGELOG.md under "Unreleased", with the name in backquotes. What is removed or
     renamed is deprecated first: see "Deprecation" in CONTRIBUTING.md.
  2. .venv/bin/python tests/test_api.py
"""


@functools.cache
def public_api(source: Path = ROOT / "src") -> list[str]:
    """A line for every public function, class, method, attribute and command."""
    package = griffe.load("powergrad", search_paths=[source], allow_inspection=False)
    lines: list[str] = []
    seen: dict[str, str] = {}
    for name in MODULES:
        module = package[name] if name else package
        for exported in sorted(map(str, module.exports or [])):
            path, member = f"{module.path}.{exported}", module[exported]
            if member.is_module:  # of the same name as the function that is imported from it
                member = member[exported]
            first = seen.setdefault(member.canonical_path, path)
            lines += _described(path, member) if first == path else [f"{path} is {first}"]
    return [*lines, *_commands(package)]


def _described(path: str, member: Any) -> list[str]:
    if member.is_function:
        return [_signature(path, member)]
    if member.is_attribute:
        annotation = f": {member.annotation}" if member.annotation else ""
        return [path + annotation + _labelled(member)]
    lines = [f"class {path}({', '.join(map(str, member.bases))})"]
    # Attributes as they are written, for their order may matter (in a NamedTuple), then methods.
    inside = sorted(member.members.items(), key=lambda item: item[0] if item[1].is_function else "")
    for name, inner in inside:
        if not name.startswith("_") or name in SPECIAL:
            lines += _described(f"{path}.{name}", inner)
    return lines


def _signature(path: str, function: Any) -> str:
    return function.signature(return_type=True, name=path) + _labelled(function)


def _labelled(member: Any) -> str:
    labels = sorted(member.labels & {"property", "writable", "classmethod", "staticmethod"})
    return f"  # {', '.join(labels)}" if labels else ""


def _commands(package: Any) -> list[str]:
    """The commands with their options, which are the parameters of the functions behind them."""
    options = (f"{name} {value}".strip() for name, (value, _) in powergrad_cli.RUN_OPTIONS.items())
    lines = [f"$ powergrad run({', '.join(options)})"]
    for name in [name for name, (module, _) in powergrad_cli.COMMANDS.items() if module]:
        module, function = powergrad_cli.place_of(name).removeprefix("powergrad.").split(":")
        if function != "app":
            lines.append(_signature(f"$ powergrad {name}", package[f"{module}.{function}"]))
            continue
        for inner in package[module].functions.values():
            for decorator in inner.decorators:
                if decorator.callable_path.endswith("app.command"):
                    given = re.search(r"name='([\w-]+)'", str(decorator.value))
                    command = given[1] if given else inner.name
                    lines.append(_signature(f"$ powergrad {name} {command}", inner))
    return lines + [
        line
        for module in package["lab.cli"].modules.values()
        for group in module.classes.values()
        if group.name in ("StudyOptions", "TableOptions") and not group.is_alias
        for name, option in group.members.items()
        if option.is_attribute
        for line in _described(f"$ {group.name}.{name}", option)
    ]


def difference(recorded: list[str], current: list[str]) -> list[str]:
    """The lines that went (-) and came (+)."""
    changes = difflib.ndiff(recorded, current)
    return [line for line in changes if line.startswith(("-", "+"))]


def unannounced(changes: list[str], changelog: str) -> list[str]:
    """Those of `changes` whose name the changelog's newest section does not have in backquotes."""
    newest = re.split(r"^## ", changelog, flags=re.MULTILINE)[1]
    quoted = " ".join(re.findall(r"`([^`]+)`", newest))
    modules = set(MODULES) - set(powergrad.__all__)  # `verify` is also a function
    told = set(re.findall(r"\w+", quoted)) - {"powergrad", *modules}
    return [line for line in changes if not told & set(re.findall(r"\w+", _name(line)))]


def _name(line: str) -> str:
    """What a line is about: all before the first bracket, colon or comment."""
    return re.split(r"\(|:|  #| is ", line[2:])[0]


def announce() -> int:
    """Write tests/api.txt anew, if the changelog speaks of all that changed."""
    current = public_api()
    changes = difference(RECORD.read_text().splitlines(), current)
    missing = unannounced(changes, CHANGELOG.read_text())
    if missing:
        print(
            "CHANGELOG.md says nothing of these; its newest section must name them:",
            *missing,
            sep="\n",
        )
        return 1
    RECORD.write_text("\n".join([*current, ""]))
    print(*changes or ["Nothing has changed."], sep="\n")
    return 0


def test_api_is_as_announced():
    changes = difference(RECORD.read_text().splitlines(), public_api())
    assert not changes, HOW_TO_ANNOUNCE.format(difference="\n".join(changes))


CHANGES = [
    ("loss.py", 'str = "mean",', 'str = "sum",', "cross_entropy"),
    ("alter.py", "(tensor: Tensor, fn:", "(tensor: Tensor, function:", "alter_gradient"),
    ("transform.py", "(p: Tensor, alpha:", "(p: Tensor, *, alpha:", "power_transform"),
    ("identity.py", ") -> Optimizer:", ") -> Any:", "equivalent_training"),
    ("monitor/__init__.py", '    "Recording",\n', "", "monitor.Recording"),
    ("monitor/recording.py", "def close(self)", "def finish(self)", "FilterMonitor.finish"),
    ("clip.py", "def units(self) -> int:", "def units(self) -> float:", "clip.ClipReport.units"),
    ("jax.py", "axis: int = -1, *, alpha", "axis: int = 0, *, alpha", "jax.log_softmax"),
    ("lightning.py", "every: int = 10", "every: int = 1", "lightning.PowerGradCallback.__init__"),
    ("lab/cli/planning.py", "    delta: float,", "    gap: float,", "$ powergrad plan"),
]


def test_changes_are_seen(tmp_path):
    """Of a parameter, its kind, default or annotation; of a name; in what is not imported here."""
    copy = shutil.copytree(ROOT / "src", tmp_path / "src")
    for file, old, new, _ in CHANGES:
        path = copy / "powergrad" / file
        text = path.read_text()
        assert old in text, file
        path.write_text(text.replace(old, new, 1))
    with (copy / "powergrad" / "loss.py").open("a") as file:  # what is private may change
        file.write("\n\ndef _private(): ...\n\n\ndef unlisted(): ...\n")
    changes = difference(public_api(), public_api(copy))
    names = {_name(line).removeprefix("class ").removeprefix("powergrad.") for line in changes}
    assert {name for *_, name in CHANGES} <= names
    parts = tuple(name for *_, name in CHANGES)
    assert {name for name in names if not name.startswith(parts)} == {"FilterMonitor.close"}


def test_changes_are_asked_to_be_announced():
    changes = ["- powergrad.census(a: int) -> Census", "+ powergrad.census(b: int) -> Census"]
    older = "## 0.1.0 - 2027-01-01\n\n- `census`\n"
    assert unannounced(changes, f"# Changes\n\n## Unreleased\n\n- `monitor`\n\n{older}") == changes
    assert not unannounced(changes, f"# Changes\n\n## Unreleased\n\n- `census(b)`\n\n{older}")


def test_one_version_everywhere():
    """`_version.py`, CITATION.cff and the changelog agree on what this is a version of."""
    version = powergrad.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    sections = re.findall(r"^## (.+)$", CHANGELOG.read_text(), re.MULTILINE)
    released = dict(s.split(" - ") for s in sections if s != "Unreleased")
    numbers = [tuple(map(int, each.split("."))) for each in released]
    assert numbers == sorted(set(numbers), reverse=True)
    assert citation["version"] == version
    if re.fullmatch(r"\d+\.\d+\.\d+", version):
        assert next(iter(released), None) == version
        assert str(citation["date-released"]) == released[version]
    else:
        assert re.fullmatch(r"\d+\.\d+\.\d+\.dev\d+", version)
        assert sections[0] == "Unreleased"
        assert version.rpartition(".dev")[0] not in released
        assert "date-released" not in citation


if __name__ == "__main__":
    sys.exit(announce())
