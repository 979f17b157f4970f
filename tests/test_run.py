"""``powergrad run``: a program under it equals the same program with the change written in by hand.

The reference is always the program itself with some lines replaced, run without ``powergrad run``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

FOREIGN = Path(__file__).with_name("foreign_train.py")


@pytest.fixture(scope="module")
def plain(launcher, tmp_path_factory) -> Path:
    """The folder of the script's weights and summary, with no change requested."""
    folder = tmp_path_factory.mktemp("plain")
    files = ("--json", folder / "summary.json", "--", FOREIGN, "--save", folder / "weights.pt")
    assert launcher.powergrad("run", *files).code == 0
    return folder


def write_by_hand(folder: Path, *changes: tuple[str, str], imports: str = "") -> Path:
    """The foreign script with lines replaced."""
    text = FOREIGN.read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / "by hand.py"
    path.write_text(text.replace("import torch\n", f"import torch\n{imports}\n", 1))
    return path


def difference(one: Path, other: Path) -> float:
    a, b = (torch.load(file, weights_only=True) for file in (one, other))
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def summary(file: Path) -> dict:
    return json.loads(file.read_text())


STEP = "scaler.step(optimizer)"
LOSS = "F.cross_entropy(network(x.double()), y)"
PGT = (LOSS, "powergrad.cross_entropy(network(x.double()), y, alpha=0.3)")
UNSCALED = "scaler.unscale_(optimizer); "
AGC = (STEP, f"{UNSCALED}powergrad.adaptive_clip_grad_(model, 0.01); {STEP}")
NORM = (STEP, f"{UNSCALED}nn.utils.clip_grad_norm_(model.parameters(), 0.1); {STEP}")
VALUE = (STEP, f"{UNSCALED}nn.utils.clip_grad_value_(model.parameters(), 0.01); {STEP}")


def rate(scale: float) -> tuple[str, str]:
    return ("default=0.2", f"default={0.2 * scale}")


def decay(scale: float) -> tuple[str, str]:
    return ("default=0.01", f"default={0.01 * scale}")


def head(scale: float) -> tuple[str, str]:
    groups = '{"params": model.body.parameters()}, {"params": model.fc.parameters(), "lr": '
    return ("model.parameters(), lr", f"[{groups}args.lr * {scale}}}], lr")


CASES = {  # the options of `run`, those of the script, and the lines that are replaced
    "alpha": ("--alpha 0.3", "", [PGT]),
    "alpha, compiled": ("--alpha 0.3", "--compile", [PGT]),
    "alpha, scaler": ("--alpha 0.3", "--amp", [PGT]),
    "alpha 1": ("--alpha 1", "", []),
    "agc": ("--agc 0.01", "", [AGC]),
    "agc, scaler": ("--agc 0.01", "--amp", [AGC]),
    "norm, scaler": ("--clip-norm 0.1", "--amp", [NORM]),
    "value": ("--clip-value 0.01", "", [VALUE]),
    "decay": ("--decay-scale 0.25", "", [decay(0.25)]),
    "decay, AdamW": ("--decay-scale 0.25", "--optimizer AdamW", [decay(0.25)]),
    "rate": ("--lr-scale 0.5", "", [rate(0.5)]),
    "head": ("--head-lr-scale 0.5", "", [head(0.5)]),
    "head, by its name": ("--head-lr-scale 0.5 --head fc", "", [head(0.5)]),
    "head, Adam": ("--head-lr-scale 0.5", "--optimizer Adam --lr 0.01", [head(0.5)]),
    "rounded": (
        "--lr-scale 0.3 --decay-scale 3.3 --head-lr-scale 0.7",
        "",
        [rate(0.3), decay(3.3), head(0.7)],
    ),
    "all": (
        "--alpha 0.3 --agc 0.01 --decay-scale 0.25 --lr-scale 0.5 --head-lr-scale 0.5 --strict",
        "--amp",
        [PGT, AGC, decay(0.25), rate(0.5), head(0.5)],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_equals_the_change_written_by_hand(case, launcher, plain, tmp_path):
    options, arguments, changes = CASES[case]
    ours, hand, file = (tmp_path / name for name in ("ours.pt", "hand.pt", "summary.json"))
    run = launcher.powergrad(
        "run", *options.split(), "--json", file, "--", FOREIGN, *arguments.split(), "--save", ours
    )
    assert run.code == 0, run.err
    script = write_by_hand(tmp_path, *changes, imports="import powergrad")
    by_hand = launcher.python(script, *arguments.split(), "--save", hand)
    assert by_hand.code == 0, by_hand.err
    # The same operations in the same order, except that a compiler reorders them, and that 0.3 of
    # a scheduled rate is not the schedule of 0.3 of the rate.
    assert difference(ours, hand) <= (1e-12 if case in ("alpha, compiled", "rounded") else 0)
    # The schedule has seen its own rates only.
    scale = {"rate": 0.5, "all": 0.5, "rounded": 0.3}.get(case, 1)
    seen, expected = (float(run.out.split()[1].rstrip(",")) for run in (run, by_hand))
    assert expected == pytest.approx(scale * seen, abs=1e-6)  # printed with 6 decimals
    assert run.out == by_hand.out or scale != 1
    assert run.err.startswith("powergrad run: ")
    assert run.err.count("\n") == 1 + ("Warning" in run.err)
    found = summary(file)
    assert (found["exit_code"], found["problems"], found["steps"]) == (0, [], 12)
    if not arguments:  # a change begins with the same loss as the baseline, rounded elsewhere
        first = summary(plain / "summary.json")["first_loss"]
        assert found["first_loss"] == pytest.approx(first, rel=1e-15)
    if "--alpha 0.3" in options:
        assert found["altered"] == {"cross_entropy": 12}
        assert found["verification"]["verdict"] == "pgt"
        assert found["verification"]["alpha"] == pytest.approx(0.3, abs=1e-6)
    assert (difference(ours, plain / "weights.pt") > 1e-3) == (case != "alpha 1")


def test_monitor_records_the_trained_model_and_overwrites_nothing(launcher, tmp_path):
    ours, hand = tmp_path / "ours", tmp_path / "hand"
    run = launcher.powergrad("run", "--monitor", ours, "--", FOREIGN)
    assert run.code == 0, run.err
    made = "monitor = FilterMonitor(model, sys.argv.pop()); monitor.step(0)\n    "
    script = write_by_hand(
        tmp_path,
        ("for _ in range(4)", f"{made}for _ in range(4)"),
        ("scaler.update()", "monitor.step(schedule.last_epoch * 3 + 1 + taken)"),
        ("for x, y in loader", "for taken, (x, y) in enumerate(loader)"),
        ("args = parser.parse_args()", "args = parser.parse_args(sys.argv[1:-1])"),
        imports="import sys\nfrom powergrad import FilterMonitor",
    )
    by_hand = launcher.python(script, hand)
    assert by_hand.code == 0, by_hand.err
    assert sorted(path.name for path in ours.iterdir()) == ["index.json", "records.npy"]
    for path in ours.iterdir():
        assert path.read_bytes() == (hand / path.name).read_bytes()
    again = launcher.powergrad("run", "--monitor", ours, "--", FOREIGN)
    assert (again.code, again.out) == (2, "")
    assert "`--monitor`" in again.err


START = """
import torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
x, y = torch.randn(8, 4), torch.arange(8) % 3
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
OWN = """
class OwnCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, y):
        ctx.save_for_backward(z.softmax(1) - F.one_hot(y, 3))
        return F.cross_entropy(z, y)
    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0] / len(ctx.saved_tensors[0]), None
"""
ASIDE = """
for _ in range(3):
    aside = F.cross_entropy(nn.Parameter(torch.ones(1, 3)), y[:1])
    step(OwnCrossEntropy.apply(model(x), y) + 0 * aside)
"""
TWO = """
body, top = nn.Linear(4, 8), nn.Linear(8, 3)
optimizer = torch.optim.SGD([*body.parameters(), *top.parameters()], lr=0.1)
step(F.cross_entropy(top(body(x)), y))
"""
TIED = """
model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
model[1].weight = model[0].weight
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step(F.cross_entropy(model(x[:, :3]), y))
"""
SWALLOWED = """
class Mine(torch.optim.SGD):
    pass
optimizer = Mine(model.parameters(), lr=0.1)
try:
    step(F.cross_entropy(model(x), y))
except Exception:
    print("not here")
"""
CE = "step(F.cross_entropy(model(x), y))\n"
CLOSURE = """
def closure():
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss
torch.optim.LBFGS(model.parameters()).step(closure)
"""
SPAWNED = """
import torch.multiprocessing as mp
def train(rank):
    step(F.cross_entropy(model(x), y))
mp.start_processes(train, nprocs=1, start_method="fork")
"""
SQUARES = "step(F.mse_loss(model(x), F.one_hot(y, 3).float()))"
NO_GRADIENT = "with torch.no_grad():\n    F.cross_entropy(model(x), y)"
PART = f"optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)\n{CE}"
SCALED = "for _ in range(3):\n    step(F.cross_entropy(2 * model(5 * x), y))"
UNALTERED = {  # the options, the script, and a part of the message
    "no loss": ("--alpha 0.3", "", "--alpha 0.3 altered nothing"),
    "another loss": ("--alpha 0.3", SQUARES, "began at MseLossBackward0, AddmmBackward0"),
    "own kernel": ("--alpha 0.3", f"{OWN}step(OwnCrossEntropy.apply(model(x), y))", "OwnCross"),
    "own kernel at the head": ("--alpha 0.3", OWN + ASIDE, "the gradient of its head is plain"),
    "no gradient": ("--alpha 0.3", NO_GRADIENT, "--alpha 0.3 altered nothing"),
    "another process": ("--alpha 0.3", SPAWNED, "start the processes with torchrun"),
    "no step": ("--lr-scale 0.5", "", "--lr-scale changed nothing: no torch.optim.Optimizer"),
    "no step to clip": ("--agc 0.1", "", "--agc changed nothing"),
    "no step to monitor": ("--monitor norms", "", "--monitor changed nothing"),
    "norm below": ("--clip-norm 1e9", CE, "--clip-norm changed nothing: no gradient was above"),
    "value below": ("--clip-value 1e9", CE, "--clip-value changed nothing: no gradient was above"),
    "no decay": ("--decay-scale 0.5", CE, "--decay-scale changed nothing: no optimizer has a w"),
    "head elsewhere": ("--head-lr-scale 0.5", PART, "--head-lr-scale changed nothing"),
    "line search": ("--lr-scale 0.5", CLOSURE, "but got LBFGS"),
    "own optimizer": ("--head-lr-scale 0.5", SWALLOWED, "Mine to have a separate group"),
    "several models": ("--agc 0.1", TWO, "but got several modules (Linear)"),
    "tied head": ("--head-lr-scale 0.5", TIED, "a tied head cannot be scaled alone"),
    "no such head": ("--agc 0.1 --head lost", CE, "but got 'lost'"),
    "a plain step": (
        "--alpha 0.3 --strict",
        f"{CE}step(model(x).sum())\nprint('not here')",
        "but got none before step 2 of SGD",
    ),
    "not measured": ("--alpha 0.3 --strict", CE, "not confirmed: there was no second step"),
    "another alpha": ("--alpha 0.3 --strict", SCALED, "not confirmed: cannot tell: alpha 0.600"),
}


@pytest.mark.parametrize("case", UNALTERED)
def test_a_change_that_did_not_happen_is_an_error(case, launcher, tmp_path):
    options, text, message = UNALTERED[case]
    script, file = tmp_path / "script.py", tmp_path / "summary.json"
    script.write_text(f"{START}{text}\n")
    run = launcher.powergrad("run", *options.split(), "--json", file, "--", script)
    assert run.code == 3, run.err
    (line,) = (line for line in run.err.splitlines() if line.startswith("powergrad run: error:"))
    assert message in line
    assert "Traceback" not in run.err
    assert "not here" not in run.out
    assert [f"powergrad run: error: {problem}" for problem in summary(file)["problems"]] == [line]
    assert summary(file)["exit_code"] == 3


TWO_OPTIMIZERS = """
one = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
for i in range(4):
    if i == 1:  # late
        two = torch.optim.SGD(model[2].parameters(), lr=0.1 * HEAD)
    model.zero_grad()
    LOSS.backward()
    one.step()
    if i:
        two.step()
import sys; torch.save(model.state_dict(), sys.argv[1])
"""


def test_two_optimizers(launcher, tmp_path):
    """The reference is the potential, and another rate of the head."""
    text = f"{START}model, x = model.double(), x.double()\n{TWO_OPTIMIZERS}"
    files = []
    for name, loss, scale in (
        ("ours", "F.cross_entropy(model(x), y)", "1"),
        ("by hand", "(F.cross_entropy(0.25 * model(x), y) / 0.25)", "0.5"),
    ):
        script = tmp_path / f"{name}.py"
        script.write_text(text.replace("LOSS", loss).replace("HEAD", scale))
        files.append(tmp_path / f"{name}.pt")
        if name == "ours":
            options = ("--alpha", 0.25, "--head-lr-scale", 0.5, "--")
            run = launcher.powergrad("run", *options, script, files[-1])
        else:
            run = launcher.python(script, files[-1])
        assert run.code == 0, run.err
    assert difference(*files) < 1e-12
