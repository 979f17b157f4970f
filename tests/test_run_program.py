"""``powergrad run`` behaves as ``python`` does, needs only torch, and checks its command line."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from launching import Ended, in_new_process

import powergrad_cli
from powergrad.run import Options

FOREIGN = Path(__file__).with_name("foreign_train.py")
LAB = (  # what the workbench installs, and torch does not need
    "cyclopts matplotlib numpy optuna PIL pydantic rich safetensors scipy sklearn tensorboard yaml"
)


def without_summary(run: Ended) -> str:
    """Standard error, without what powergrad adds to it."""
    return re.sub(r"^powergrad run: .*\n", "", run.err, flags=re.MULTILINE)


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


def test_a_script_finds_what_python_gives_it(launcher, tmp_path):
    folder = tmp_path / "ünï code"
    folder.mkdir()
    script = folder / "my script.py"
    script.write_text(WHO_AM_I)
    (tmp_path / "link.py").symlink_to(script)
    arguments = ["--alpha", "a b", "ü", "", "'", '"', "$HOME", "--", "-m", "*"]
    for path, separator in ((script, ["--"]), (tmp_path / "link.py", [])):
        ours = launcher.powergrad("run", *separator, path, *arguments)
        theirs = in_new_process(path, *arguments)
        assert (ours.code, ours.out) == (0, theirs.out), ours.err


def test_a_module_finds_what_python_gives_it(tmp_path):
    """Also relative imports, `python -m package`, and the current folder in the path."""
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


ENDINGS = {
    "no exit": "pass",
    "exit": "sys.exit()",
    "exit 0": "sys.exit(0)",
    "exit 7": "sys.exit(7)",
    "exit with a message": "sys.exit('no data')",
    "exit True": "raise SystemExit(True)",
    "an error": "def f():\n    raise ValueError('mine')\n\nf()",
    "a cause": "try:\n    1 / 0\nexcept Exception as e:\n    raise KeyError(1) from e",
    "a syntax error": "x = (",
    "an import": "import failing",
    "a missing import": "import no.such.module",
    "a hook": "sys.excepthook = lambda *a: print('mine', a[1])\n1 / 0",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_ends_as_in_python(ending, launcher, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"import sys\nprint('here')\n{ENDINGS[ending]}\n")
    (tmp_path / "failing.py").write_text("1 / 0\n")
    ours, theirs = launcher.powergrad("run", "--", script), in_new_process(script)
    assert (ours.code, ours.out, without_summary(ours)) == theirs
    assert ours.err.endswith("powergrad run: no change requested; no steps\n")


def test_an_interrupted_script_ends_as_in_python(tmp_path):
    script = tmp_path / "script.py"
    text = "import atexit, os, signal\natexit.register(print, 'atexit')\n"
    script.write_text(text + "os.kill(os.getpid(), signal.SIGINT)\nprint('not here')\n")
    ours, theirs = in_new_process("-m", "powergrad", "run", "--", script), in_new_process(script)
    assert theirs.code == -signal.SIGINT
    assert (ours.code, ours.out, without_summary(ours)) == theirs
    assert "powergrad run: " in ours.err


@pytest.mark.parametrize("module", ["lost", "json", "failing"])
def test_a_module_that_cannot_run_ends_as_in_python(module, launcher):
    """Also a package without `__main__`, and an error in the module itself."""
    (launcher.folder / "failing.py").write_text("1 / 0\n")
    ours = launcher.powergrad("run", "--", "-m", module)
    theirs = in_new_process("-m", module, cwd=launcher.folder)
    assert (ours.code, without_summary(ours)) == (theirs.code, theirs.err)


def test_the_options_are_those_of_the_run():
    names = {name.removeprefix("--").replace("-", "_") for name in powergrad_cli.RUN_OPTIONS}
    assert names - {"help"} == {field.name for field in fields(Options)}


@pytest.mark.parametrize(
    ("tokens", "named"),
    [
        ("--alpha -0.1 -- {script}", "`--alpha`"),
        ("--alpha much -- {script}", "`--alpha`, but got 'much'"),
        ("--alpha -- {script}", "`--alpha`, but got none"),
        ("--agc 0 -- {script}", "`--agc`"),
        ("--clip-norm -1 -- {script}", "`--clip-norm`"),
        ("--clip-value nan -- {script}", "`--clip-value`"),
        ("--lr-scale 0 -- {script}", "`--lr-scale`"),
        ("--decay-scale -1 -- {script}", "`--decay-scale`"),
        ("--head-lr-scale nan -- {script}", "`--head-lr-scale`"),
        ("--json lost/x.json -- {script}", "`--json`"),
        ("--strict=no -- {script}", "`--strict`, but got 'no'"),
        ("--alhpa=0.3 -- {script}", 'Did you mean "--alpha"?'),
        ("--decay 0.3 -- {script}", "'--decay'"),  # no abbreviations
        ("-m package", "`--` before the program, but got '-m'"),
        ("-- lost.py", "'lost.py', which is not a file"),
        ("-- python {script}", "leave out `python`"),
        ("--alpha 0.3", "`-- SCRIPT ARGS`"),
        ("-- -m", "`-- SCRIPT ARGS`"),
    ],
)
def test_errors_of_the_command_line_start_nothing(tokens, named, capsys):
    command = tokens.format(script=FOREIGN).split()
    assert powergrad_cli.main(["run", *command]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert re.match("powergrad: Expected .*, but got ", said.err)
    assert named in said.err


def test_help_imports_no_torch():
    code = "import sys, powergrad_cli; powergrad_cli.main(sys.argv[1:]); print(*sys.modules)"
    for tokens in (["--help"], ["run", "--help"], ["--version"], ["run", "--alpha", "x"]):
        *_, modules = in_new_process("-c", code, *tokens).out.splitlines()
        assert not {"torch", "powergrad", "cyclopts"} & set(modules.split())


def test_a_run_needs_torch_only(tmp_path):
    """Where nothing of the workbench can be imported; its commands name what to install."""
    code = f"""
import sys
sys.modules.update(dict.fromkeys({LAB!r}.split()))  # importing these raises
import powergrad_cli
assert powergrad_cli.main(["compare", "--", "python", "train.py"]) == 2
code = powergrad_cli.main(["run", "--alpha", "0.3", "--strict", *sys.argv[1:]])
assert not [name for name in sys.modules if name.startswith("powergrad.lab")]
sys.exit(code)
"""
    run = in_new_process("-W", "ignore", "-c", code, "--json", tmp_path / "x.json", "--", FOREIGN)
    assert run.code == 0, run.err
    assert "`powergrad compare` needs the workbench: pip install 'powergrad[lab]'" in run.err
    assert json.loads((tmp_path / "x.json").read_text())["verification"]["verdict"] == "pgt"


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


def train(model: torch.nn.Module, alpha: float, head: float = 1.0, norm: float = 1e9) -> None:
    """Three steps on the potential, whose gradient is that of PGT."""
    x, y = torch.randn(8, 4).double(), torch.arange(8) % 3
    body, _, top = model.children()
    groups = [{"params": body.parameters()}, {"params": top.parameters(), "lr": 0.5 * head}]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        (F.cross_entropy(alpha * model(x), y) / alpha).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()


def assert_trained_as(file: Path, **options: float) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    train(model.double(), **options)
    ours = torch.load(file, weights_only=True)
    for name, weight in model.state_dict().items():
        assert (ours[name] - weight).abs().max() < 1e-12


START = """
import sys, torch, torch.nn.functional as F
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()
x, y = torch.randn(8, 4).double(), torch.arange(8) % 3
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
"""
PARALLEL = f"""
import gc, torch.distributed as dist
dist.init_process_group("gloo")
{START}
parallel = nn.parallel.DistributedDataParallel(model)
mine = slice(dist.get_rank(), None, 2)
for _ in range(3):
    optimizer.zero_grad()
    F.cross_entropy(parallel(x[mine]), y[mine]).backward()
    optimizer.step()
if dist.get_rank() == 0:
    torch.save(model.state_dict(), sys.argv[1])
del parallel
gc.collect()  # threads of the group that hold tensors while Python ends would abort it
dist.destroy_process_group()
"""


@pytest.mark.studies
def test_under_torchrun(tmp_path):
    """Two processes with half of the batch each take the steps of one with all of it."""
    script, file = tmp_path / "script.py", tmp_path / "ours.pt"
    script.write_text(PARALLEL)
    options = ("--alpha", "0.3", "--head-lr-scale", "0.5", "--clip-norm", "0.2")
    run = in_new_process(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2),
        *("-m", "powergrad", "run", *options, "--json", tmp_path / "x.json", "--", script, file),
    )
    assert run.code == 0, run.err
    assert run.err.count("powergrad run: alpha 0.3 altered 3 cross_entropy") == 1  # by rank 0
    assert_trained_as(file, alpha=0.3, head=0.5, norm=0.2)


SEEDED = """
import random, sys
import numpy as np
import torch
from torch import manual_seed
for way in sys.argv[1:]:
    exec(way)
print(random.random(), np.random.rand(), torch.rand(1).item(), np.random.default_rng(3).random())
"""


def test_seed_is_set_and_added_to_the_seeds_of_the_program(launcher, tmp_path):
    script = tmp_path / "seeded.py"
    script.write_text(SEEDED)

    def numbers(seed, *ways):
        option = [] if seed is None else ["--seed", seed]
        ended = launcher.powergrad("run", *option, "--", script, *ways)
        assert ended.code == 0, ended.err
        return ended.out.split(), ended.err

    def plain(seed):
        ways = [f"{name}({seed})" for name in ("random.seed", "np.random.seed", "manual_seed")]
        return numbers(None, *ways)[0]

    assert numbers(5)[0] == plain(5)
    ways = ("random.seed(a=30)", "np.random.seed(seed=30)", "manual_seed(30)")
    found, said = numbers(5, *ways)
    assert found == plain(35)  # 30 and 5; the own generator is as before
    assert "seed 5, added to random.seed(30), numpy.random.seed(30), torch.manual_seed(30)" in said
    assert numbers(0, *ways)[0] == plain(30)
    assert len({tuple(numbers(seed, *ways)[0]) for seed in range(3)}) == 3
    assert numbers(2, "random.seed('x')")[0][1:] == plain(2)[1:]
