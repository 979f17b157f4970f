"""``powergrad run`` behaves as ``python`` does: the same script under both."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
import torch
from launching import Ended, Launcher, in_new_process

FOREIGN = Path(__file__).with_name("foreign_train.py")
WHO_AM_I = """
import inspect, pickle, sys

class Local:
    pass

main = sys.modules["__main__"]
for name in ("__name__", "__file__", "__package__", "__doc__", "__cached__"):
    print(name, repr(getattr(main, name, "missing")))
print(type(main.__loader__).__name__, getattr(main.__spec__, "name", None), main.__builtins__)
print(main.Local is Local, pickle.loads(pickle.dumps(Local())).__class__ is Local)
print(sys.argv, sys.path[0], inspect.getsource(Local))
"""


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    launcher = Launcher(tmp_path_factory.mktemp("launch"))
    yield launcher
    launcher.close()


def without_summary(run: Ended) -> str:
    """Standard error, without what powergrad adds to it."""
    lines = run.err.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("powergrad run: "))


def test_a_script_finds_what_python_gives_it(launcher, tmp_path):
    folder = tmp_path / "ünï code"
    folder.mkdir()
    script = folder / "my script.py"
    script.write_text(WHO_AM_I)
    (tmp_path / "link.py").symlink_to(script)
    arguments = ["--alpha", "a b", "ü", "", "'", '"', "$HOME", "--", "-m", "*"]
    for path in (script, tmp_path / "link.py"):
        ours = launcher.powergrad("run", "--", path, *arguments)
        theirs = in_new_process(path, *arguments)
        assert (ours.code, ours.out) == (0, theirs.out), ours.err


def test_a_module_finds_what_python_gives_it(tmp_path):
    """Also relative imports, `python -m package`, and the folder of the call in the path."""
    package = tmp_path / "package" / "inner"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("")
    (package / "constant.py").write_text("VALUE = 5")
    text = "from .constant import VALUE; from . import constant; print(VALUE)" + WHO_AM_I
    (package / "__main__.py").write_text(text)
    arguments = ["-m", "package.inner", "--x", "a b"]
    ours = in_new_process("-m", "powergrad", "run", "--", *arguments, cwd=tmp_path)
    theirs = in_new_process(*arguments, cwd=tmp_path)
    assert (ours.code, ours.out) == (0, theirs.out), ours.err


@pytest.mark.parametrize(
    ("ending", "code", "err"),
    [
        ("sys.exit()", 0, ""),
        ("sys.exit(0)", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("sys.exit('no data')", 1, "no data\n"),
        ("raise SystemExit(True)", 1, ""),
        ("pass", 0, ""),
    ],
)
def test_exit_codes(ending, code, err, launcher, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"import sys\nprint('here')\n{ending}\n")
    run = launcher.powergrad("run", "--", script)
    assert (run.code, run.out, without_summary(run)) == (code, "here\n", err)
    assert run.err.endswith("powergrad run: no change requested; no steps\n")


def test_tracebacks_are_pythons(launcher, tmp_path):
    failures = {
        "raises.py": "def f():\n    raise ValueError('mine')\n\nf()\n",
        "causes.py": "try:\n    1 / 0\nexcept Exception as e:\n    raise KeyError(1) from e\n",
        "syntax.py": "x = (\n",
        "imports.py": "import raises\n",
        "hook.py": "import sys\nsys.excepthook = lambda *a: print('mine', a[1])\n1 / 0\n",
    }
    for name, text in failures.items():
        (tmp_path / name).write_text(text)
    for name in failures:
        ours = launcher.powergrad("run", "--", tmp_path / name)
        theirs = in_new_process(tmp_path / name)
        assert (ours.code, ours.out, without_summary(ours)) == (1, theirs.out, theirs.err), name


def test_an_interrupted_script_dies_as_in_python(tmp_path):
    script = tmp_path / "script.py"
    text = "import atexit, os, signal\natexit.register(print, 'atexit')\n"
    script.write_text(text + "os.kill(os.getpid(), signal.SIGINT)\nprint('not here')\n")
    ours = in_new_process("-m", "powergrad", "run", "--", script)
    theirs = in_new_process(script)
    assert ours.code == theirs.code == -signal.SIGINT
    assert (ours.out, without_summary(ours)) == (theirs.out, theirs.err)
    assert "powergrad run: " in ours.err


def test_missing_programs_are_said(launcher, tmp_path):
    for command, message in (
        (("--", tmp_path / "lost.py"), "lost.py', which is not a file"),
        (("--", "python", "x.py"), "'python', which is not a file; leave out `python`."),
        (("--alpha", "0.3"), "Expected `-- SCRIPT ARGS` or `-- -m MODULE ARGS`, but got nothing"),
        (("--", "-m"), "but got nothing to run"),
    ):
        run = launcher.powergrad("run", *command)
        assert run.code == 2
        assert message in run.err
    run = launcher.powergrad("run", "--", "-m", "no.such.module")
    assert (run.code, without_summary(run)) == (
        1,
        f"{sys.executable}: No module named no.such.module\n",
    )


@pytest.mark.studies
def test_spawned_workers_find_the_script(launcher, tmp_path):
    """The data set is a class of the script; spawned workers load it from there."""
    ours, without = tmp_path / "ours.pt", tmp_path / "without.pt"
    options = ("run", "--alpha", 0.3, "--", FOREIGN, "--save")
    run = in_new_process("-m", "powergrad", *options, ours, "--workers", 1)
    assert run.code == 0, run.err
    assert launcher.powergrad(*options, without).code == 0
    a, b = (torch.load(file, weights_only=True) for file in (ours, without))
    assert all(torch.equal(a[name], b[name]) for name in b)


PARALLEL = """
import sys, torch, torch.nn.functional as F
import torch.distributed as dist
from torch import nn
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()
parallel = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
x, y = torch.randn(8, 4).double(), torch.arange(8) % 3
mine = slice(dist.get_rank(), None, 2)
for _ in range(3):
    optimizer.zero_grad()
    F.cross_entropy(parallel(x[mine]), y[mine]).backward()
    optimizer.step()
if dist.get_rank() == 0:
    torch.save(model.state_dict(), sys.argv[1])
dist.destroy_process_group()
"""


@pytest.mark.studies
def test_under_torchrun(tmp_path):
    """Two processes with half of the batch each take the steps of one with all of it."""
    script, file, json = tmp_path / "script.py", tmp_path / "ours.pt", tmp_path / "summary.json"
    script.write_text(PARALLEL)
    options = ("--alpha", "0.3", "--head-lr-scale", "0.5", "--clip-norm", "0.2", "--json", json)
    run = in_new_process(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2),
        *("-m", "powergrad", "run", *options, "--", script, file),
    )
    assert run.code == 0, run.err
    assert run.err.count("powergrad run: alpha 0.3 altered 3 cross_entropy") == 1  # by rank 0

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    model.double()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.25}]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    x, y = torch.randn(8, 4).double(), torch.arange(8) % 3
    for _ in range(3):
        optimizer.zero_grad()
        potential = torch.nn.functional.cross_entropy(0.3 * model(x), y) / 0.3
        potential.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
    ours = torch.load(file, weights_only=True)
    for name, weight in model.state_dict().items():
        assert (ours[name] - weight).abs().max() < 1e-12


COMPILED = """
import sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()
x, y = torch.randn(8, 4).double(), torch.arange(8) % 3
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
criterion = nn.CrossEntropyLoss()
def loss():
    return ALPHA * criterion(model(x) / ALPHA, y)
loss = torch.compile(loss, backend="aot_eager", fullgraph=True)
for _ in range(3):
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()
torch.save(model.state_dict(), sys.argv[1])
"""


@pytest.mark.matrix
def test_a_compiled_loss(launcher, tmp_path):
    """In a process where TorchDynamo is loaded after `powergrad run` has begun, as in any."""
    files = [tmp_path / "ours.pt", tmp_path / "potential.pt"]
    for name, alpha in (("ours.py", "1.0"), ("potential.py", "4.0")):  # CE(z / 4) * 4 at alpha 1/4
        (tmp_path / name).write_text(COMPILED.replace("ALPHA", alpha))
    options = ("run", "--alpha", 0.25, "--", tmp_path / "ours.py", files[0])
    run = in_new_process("-m", "powergrad", *options)
    assert run.code == 0, run.err
    assert "cross_entropy in compiled code" in run.err
    assert launcher.python(tmp_path / "potential.py", files[1]).code == 0
    a, b = (torch.load(file, weights_only=True) for file in files)
    assert max(float((a[name] - b[name]).abs().max()) for name in b) < 1e-12
