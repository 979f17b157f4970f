"""What is in dist/ (see `make test-release`): its files, its metadata, and how it installs.

Installs go into an empty environment of their own, with nothing from this one, and are tried out
from a folder that is not the checkout.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = [  # in the wheel, below the place where packages are
    "powergrad_cli.py",
    "powergrad/*.py",
    "powergrad/py.typed",
    "powergrad/lab/trainer/recipes/*.yaml",
    "powergrad/lab/trainer/*.jinja",
    "powergrad/lab/report/*.css",
    "powergrad/lab/report/*.html",
    "powergrad/lab/report/*.js",
    "powergrad/lab/report/*.yaml",
]
EXAMPLE = "".join(
    re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)[:2]
)
CHECK = """
loss.backward()  # a second time: of the example's loss inside PowerGrad
p = torch.softmax(0.3 * logits.detach(), -1)
gradient = (p - F.one_hot(target, 10)) / 32
torch.testing.assert_close(logits.grad, 2 * gradient, atol=1e-6, rtol=1e-5)
print("native:", powergrad.native_available(), "from:", powergrad.__file__)
"""


def the_one(pattern: str) -> Path:
    found = sorted(ROOT.glob(f"dist/{pattern}"))
    if len(found) != 1:
        pytest.fail(f"Expected one dist/{pattern}, but got {len(found)}: run `make test-release`.")
    return found[0]


@pytest.fixture(scope="module")
def wheel() -> Path:
    return the_one("*.whl")


@pytest.fixture(scope="module")
def sdist() -> Path:
    return the_one("*.tar.gz")


@pytest.fixture(scope="module")
def contents(wheel: Path) -> dict[str, str]:
    """The wheel's files, and the text of those in its .dist-info."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: archive.read(name).decode() if ".dist-info/" in name else ""
            for name in archive.namelist()
            if not name.endswith("/")
        }


@pytest.fixture(scope="module")
def metadata(contents: dict[str, str]) -> Message:
    text = next(text for name, text in contents.items() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(text)


class Environment:
    """A new virtual environment that holds torch and what torch needs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder, folder / "venv" / "bin"
        subprocess.run([sys.executable, "-m", "venv", self.bin.parent], check=True)
        self.pip("install", "-c", ROOT / "constraints.txt", "torch")

    def run(self, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """A command of this environment, in its folder; of ours it knows how to reach an index."""
        known = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "POWERGRAD"))}
        program, *arguments = map(str, command)
        return subprocess.run(
            [self.bin / program, *arguments],
            cwd=self.folder,
            env={**known, **variables},
            capture_output=True,
            text=True,
        )

    def pip(self, *arguments: str | Path, **variables: str) -> str:
        done = self.run("python", "-m", "pip", *arguments, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def packages(self) -> set[str]:
        return {line.split("==")[0] for line in self.pip("list", "--format=freeze").splitlines()}

    def example(self) -> bool:
        """Run the README's example; returns whether the C kernel was there."""
        done = self.run("python", "-c", EXAMPLE + CHECK)
        assert done.returncode == 0, done.stderr
        native, place = re.findall(r"native: (\w+) from: (.*)", done.stdout)[0]
        assert Path(place).is_relative_to(self.bin.parent)
        return native == "True"


@pytest.fixture(scope="module")
def environment() -> Iterator[Environment]:
    with tempfile.TemporaryDirectory(prefix="powergrad-release-") as folder:
        start = time.perf_counter()
        made = Environment(Path(folder))
        print(f"\na new environment with torch: {time.perf_counter() - start:.1f} s")
        yield made


@pytest.fixture
def without_powergrad(environment: Environment) -> Iterator[Environment]:
    yield environment
    environment.pip("uninstall", "--yes", "powergrad")


def test_wheel_holds_the_package_and_nothing_else(contents):
    files = {name for name in contents if ".dist-info/" not in name}
    source = {p.relative_to(ROOT / "src").as_posix() for p in ROOT.glob("src/**/*")}
    expected = {name for name in source if any(fnmatch(name, each) for each in ALLOWED)}
    assert files == expected | {"powergrad/kernels/kernel.so"}


def test_wheel_is_for_any_python_3_on_this_platform(wheel, contents):
    _, _, python, abi, platform = wheel.stem.split("-")
    assert (python, abi) == ("py3", "none")
    assert not platform.startswith(("any", "linux"))  # an index takes no linux_*, only manylinux_*
    about = next(text for name, text in contents.items() if name.endswith(".dist-info/WHEEL"))
    assert f"Tag: py3-none-{platform}" in about
    assert "Root-Is-Purelib: false" in about


def test_sdist_holds_what_builds_the_package(sdist, contents):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    built = {f"src/{name}" for name in contents if ".dist-info/" not in name}
    kernel = {p.relative_to(ROOT).as_posix() for p in ROOT.glob("src/powergrad/kernels/*.[ch]")}
    others = {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "pyproject.toml", "setup.py"}
    assert built - {"src/powergrad/kernels/kernel.so"} | kernel | others <= names
    places = {name.split("/")[0] for name in names}
    assert places <= others | {"", "src", "MANIFEST.in", "PKG-INFO", "setup.cfg"}
    assert not [name for name in names if name.endswith((".so", ".pyc", ".o"))]


def test_metadata(metadata):
    needs = metadata.get_all("Requires-Dist", [])
    assert [each for each in needs if "extra ==" not in each] == ["torch>=2.6"]
    assert metadata["Name"] == "powergrad"
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Description-Content-Type"] == "text/markdown"
    minors = re.findall(r"Python :: 3\.(\d+)", "\n".join(metadata.get_all("Classifier", [])))
    assert minors == ["10", "11", "12", "13", "14"]


def test_wheel_and_example_run_with_torch_alone(without_powergrad, wheel):
    """``pip install dist/*.whl`` beside torch, then the README's example."""
    environment = without_powergrad
    before = environment.packages()
    start = time.perf_counter()
    environment.pip("install", wheel)
    installed = time.perf_counter()
    native = environment.example()
    end = time.perf_counter()
    print(f"\nwheel: {installed - start:.1f} s, the README's example: {end - installed:.1f} s")
    assert native
    assert environment.packages() - before == {"powergrad"}
    assert "No broken requirements" in environment.pip("check")


TRAIN = """
import torch
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    loss = torch.nn.functional.cross_entropy(model(torch.randn(64, 4)), torch.arange(64) % 3)
    loss.backward()
    optimizer.step()
"""


def test_commands_without_the_workbench(without_powergrad, wheel, tmp_path):
    """``powergrad run`` works with torch alone; the others name the extra."""
    without_powergrad.pip("install", wheel)
    done = without_powergrad.run("powergrad", "compare")
    assert done.returncode == 2
    assert "pip install 'powergrad[lab]'" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    (tmp_path / "train.py").write_text(TRAIN)
    done = without_powergrad.run("powergrad", "run", "--alpha", "0.3", tmp_path / "train.py")
    assert done.returncode == 0, done.stderr
    assert "altered 3 cross_entropy" in done.stderr


@pytest.mark.parametrize("compiler", [True, False])
def test_sdist_installs_with_and_without_a_compiler(without_powergrad, sdist, compiler, tmp_path):
    environment = without_powergrad
    none = {"PATH": str(tmp_path), "CC": "/bin/false"}
    start = time.perf_counter()
    environment.pip("install", sdist, **({} if compiler else none))
    print(f"\nsdist {'with' if compiler else 'without'}: {time.perf_counter() - start:.1f} s")
    assert environment.example() is compiler
