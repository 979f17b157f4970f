"""``powergrad run``: a foreign program equals the same program with the change written in by hand.

The reference is always the program itself with some lines replaced, run without ``powergrad run``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from launching import Launcher

FOREIGN = Path(__file__).with_name("foreign_train.py")
STEP = "scaler.step(optimizer)"
LOSS = "F.cross_entropy(network(x.double()), y)"
GROUPS = "model.parameters(), lr"
TWO_GROUPS = (
    '[{"params": model.body.parameters()}, {"params": model.fc.parameters(), "lr": %s}], lr'
)
BY_HAND = f"import powergrad\n{LOSS.replace('F.', 'powergrad.')[:-1]}, alpha=0.3)"


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    launcher = Launcher(tmp_path_factory.mktemp("launch"))
    yield launcher
    launcher.close()


@pytest.fixture(scope="module")
def plain(launcher, tmp_path_factory) -> Path:
    """The weights of the script as it is."""
    file = tmp_path_factory.mktemp("plain") / "plain.pt"
    assert launcher.python(FOREIGN, "--save", file).code == 0
    return file


def written(folder: Path, *changes: tuple[str, str], imports: str = "") -> Path:
    """The foreign script with lines replaced."""
    text = FOREIGN.read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / "by hand.py"
    path.write_text(text.replace("import torch\n", f"import torch\n{imports}\n", 1))
    return path


def weights(file: Path) -> dict[str, torch.Tensor]:
    return torch.load(file, weights_only=True)


def difference(one: Path, other: Path) -> float:
    a, b = weights(one), weights(other)
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def summary(file: Path) -> dict:
    return json.loads(file.read_text())


# What is altered is what is written by hand -------------------------------------------------------

PGT = (LOSS, "powergrad.cross_entropy(network(x.double()), y, alpha=0.3)")
UNSCALED = "scaler.unscale_(optimizer); "
AGC = (STEP, f"{UNSCALED}powergrad.adaptive_clip_grad_(model, 0.01); {STEP}")
NORM = (STEP, f"{UNSCALED}nn.utils.clip_grad_norm_(model.parameters(), 0.1); {STEP}")
VALUE = (STEP, f"{UNSCALED}nn.utils.clip_grad_value_(model.parameters(), 0.01); {STEP}")
HEAD = (GROUPS, TWO_GROUPS % "args.lr * 0.5")
DECAY = ("default=0.01", "default=0.0025")
RATE = ("default=0.2", "default=0.1")
CASES = {
    "alpha": ("--alpha 0.3", "", [PGT]),
    "alpha, compiled": ("--alpha 0.3", "--compile", [PGT]),
    "alpha, scaler": ("--alpha 0.3", "--amp", [PGT]),
    "alpha 1": ("--alpha 1", "", []),
    "agc": ("--agc 0.01", "", [AGC]),
    "agc, scaler": ("--agc 0.01", "--amp", [AGC]),
    "norm, scaler": ("--clip-norm 0.1", "--amp", [NORM]),
    "value": ("--clip-value 0.01", "", [VALUE]),
    "decay": ("--decay-scale 0.25", "", [DECAY]),
    "decay, AdamW": ("--decay-scale 0.25", "--optimizer AdamW", [DECAY]),
    "rate": ("--lr-scale 0.5", "", [RATE]),
    "head": ("--head-lr-scale 0.5", "", [HEAD]),
    "head, by its name": ("--head-lr-scale 0.5 --head fc", "", [HEAD]),
    "head, Adam": ("--head-lr-scale 0.5", "--optimizer Adam --lr 0.01", [HEAD]),
    "all": (
        "--alpha 0.3 --agc 0.01 --decay-scale 0.25 --lr-scale 0.5 --head-lr-scale 0.5 --strict",
        "--amp",
        [PGT, AGC, DECAY, RATE, HEAD],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_the_script_with_the_change_written_in(case, launcher, plain, tmp_path):
    options, arguments, changes = CASES[case]
    ours, hand, file = (tmp_path / name for name in ("ours.pt", "hand.pt", "summary.json"))
    run = launcher.powergrad(
        "run", *options.split(), "--json", file, "--", FOREIGN, *arguments.split(), "--save", ours
    )
    assert run.code == 0, run.err
    script = written(tmp_path, *changes, imports="import powergrad")
    by_hand = launcher.python(script, *arguments.split(), "--save", hand)
    assert by_hand.code == 0, by_hand.err
    # The same operations in the same order: bit for bit, but where a compiler reorders them.
    assert difference(ours, hand) <= (1e-12 if "compile" in case else 0)
    # The schedule has seen its own rates only.
    scale = 0.5 if "--lr-scale" in options else 1
    rates = [float(re.search(r"rate ([\d.]+)", each.out)[1]) for each in (run, by_hand)]  # type: ignore[index]
    assert rates[1] == pytest.approx(scale * rates[0])
    if scale == 1:
        assert run.out == by_hand.out
    assert run.err.startswith("powergrad run: ")
    assert run.err.count("\n") == 1 + ("Warning" in run.err)
    found = summary(file)
    assert (found["exit_code"], found["problems"], found["steps"]) == (0, [], 12)
    if "--alpha 0.3" in options:
        assert found["altered"] == {"cross_entropy": 12}
        assert found["verification"]["verdict"] == "pgt"
        assert found["verification"]["alpha"] == pytest.approx(0.3, abs=1e-6)
        assert difference(ours, plain) > 1e-3  # plain would be equal to plain, too


def test_arms_begin_with_the_same_loss(launcher, tmp_path):
    losses = []
    for options in ("", "--alpha 0.3", "--agc 0.01 --head-lr-scale 0.5"):
        file = tmp_path / "summary.json"
        launcher.powergrad("run", *options.split(), "--json", file, "--", FOREIGN)
        losses.append(summary(file)["first_loss"])
    assert losses[0] > 1
    assert losses == [losses[0]] * 3


def test_the_model_that_is_trained_is_monitored(launcher, tmp_path):
    """As by a monitor written into the script; and a recording is not overwritten."""
    ours, hand = tmp_path / "ours", tmp_path / "hand"
    run = launcher.powergrad("run", "--monitor", ours, "--", FOREIGN)
    assert run.code == 0, run.err
    record = (
        "monitor = FilterMonitor(model, sys.argv.pop()); monitor.step(0)\n    for _ in range(4)"
    )
    script = written(
        tmp_path,
        ("for _ in range(4)", record),
        ("scaler.update()", "monitor.step(schedule.last_epoch * 3 + 1 + taken)"),
        ("for x, y in loader", "for taken, (x, y) in enumerate(loader)"),
        ("args = parser.parse_args()", "args = parser.parse_args(sys.argv[1:-1])"),
        imports="import sys\nfrom powergrad import FilterMonitor",
    )
    by_hand = launcher.python(script, hand)
    assert by_hand.code == 0, by_hand.err
    assert sorted(path.name for path in ours.iterdir()) == ["index.json", "records.bin"]
    for path in ours.iterdir():
        assert path.read_bytes() == (hand / path.name).read_bytes()
    again = launcher.powergrad("run", "--monitor", ours, "--", FOREIGN)
    assert (again.code, again.out) == (2, "")
    assert "Expected `--monitor` to be a folder without a recording" in again.err


def test_other_scales_are_right_to_rounding(launcher, tmp_path):
    ours, hand = tmp_path / "ours.pt", tmp_path / "hand.pt"
    options = ("--lr-scale", 0.3, "--decay-scale", 3.3, "--head-lr-scale", 0.7)
    launcher.powergrad("run", *options, "--", FOREIGN, "--save", ours)
    script = written(
        tmp_path,
        (GROUPS, TWO_GROUPS % "args.lr * 0.7"),
        ("default=0.2", "default=0.06"),
        ("default=0.01", "default=0.033"),
    )
    launcher.python(script, "--save", hand)
    assert 0 < difference(ours, hand) < 1e-12


# What was not altered is no result ----------------------------------------------------------------

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
TWO = """
body, top = nn.Linear(4, 8), nn.Linear(8, 3)
optimizer = torch.optim.SGD([*body.parameters(), *top.parameters()], lr=0.1)
step(F.cross_entropy(top(body(x)), y))
"""
TIED = """
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
        self.head.weight = self.first.weight
    def forward(self, x):
        return self.head(self.first(x))
model = Tied()
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
UNALTERED = {
    "no loss": ("--alpha 0.3", "", "--alpha 0.3 altered nothing"),
    "another loss": (
        "--alpha 0.3",
        "step(F.mse_loss(model(x), F.one_hot(y, 3).float()))",
        r"its first backward pass began at MseLossBackward0, AddmmBackward0",
    ),
    "own kernel": (
        "--alpha 0.3",
        f"{OWN}step(OwnCrossEntropy.apply(model(x), y))",
        r"altered nothing.*OwnCrossEntropyBackward",
    ),
    "without gradients": (
        "--alpha 0.3",
        "with torch.no_grad():\n    F.cross_entropy(model(x), y)",
        "altered nothing",
    ),
    "in another process": ("--alpha 0.3", SPAWNED, "start the processes with torchrun"),
    "no step": (
        "--lr-scale 0.5",
        "",
        "changed nothing: no .*Optimizer has taken a step",
    ),
    "no step to clip": ("--agc 0.1", "", "--agc changed nothing: no torch.optim.Optimizer"),
    "no step to monitor": (
        "--monitor norms",
        "",
        "changed nothing: no torch.optim.Optimizer",
    ),
    "never clipped": (
        "--clip-norm 1e9 --clip-value 1e9",
        CE,
        "--clip-norm changed nothing: no gradient was above .* in 1 step.*\n.*--clip-value",
    ),
    "no decay": (
        "--decay-scale 0.5",
        CE,
        "--decay-scale changed nothing: no torch.optim has a weight",
    ),
    "head elsewhere": (
        "--head-lr-scale 0.5",
        f"optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)\n{CE}",
        "--head-lr-scale changed nothing: no optimizer that has taken a step holds the head",
    ),
    "line search": ("--lr-scale 0.5", CLOSURE, "but got LBFGS"),
    "own optimizer": (
        "--head-lr-scale 0.5",
        SWALLOWED,
        "Expected Mine to have a separate group for the head",
    ),
    "several models": ("--agc 0.1", TWO, r"but got several modules \(Linear\)"),
    "tied head": ("--head-lr-scale 0.5", TIED, "a tied head cannot be scaled alone"),
    "no such head": ("--agc 0.1 --head lost", CE, "but got 'lost'"),
    "a step without": (
        "--alpha 0.3 --strict",
        f"{CE}step(model(x).sum())\nprint('not here')",
        "but got none before step 2 of SGD",
    ),
    "not proved": (
        "--alpha 0.3 --strict",
        CE,
        "was not confirmed: there was no second step",
    ),
    "another alpha": (
        "--alpha 0.3 --strict",
        "for _ in range(3):\n    step(F.cross_entropy(2 * model(5 * x), y))",
        "--alpha 0.3 was not confirmed: PGT at alpha 0.600",
    ),
}


@pytest.mark.parametrize("case", UNALTERED)
def test_what_was_not_altered_is_an_error(case, launcher, tmp_path):
    options, text, message = UNALTERED[case]
    script = tmp_path / "script.py"
    script.write_text(f"{START}{text}\n")
    file = tmp_path / "summary.json"
    run = launcher.powergrad("run", *options.split(), "--json", file, "--", script)
    assert run.code == 3, run.err
    assert re.search(rf"powergrad run: error: .*{message}", run.err, re.IGNORECASE), run.err
    assert "Traceback" not in run.err
    assert "not here" not in run.out
    assert summary(file)["problems"]
    assert summary(file)["exit_code"] == 3


def test_plain_gradients_at_the_head_are_an_error(launcher, tmp_path):
    """Some loss was altered, but not the one that trains the head."""
    script = tmp_path / "script.py"
    aside = "F.cross_entropy(nn.Parameter(torch.ones(1, 3)), y[:1])"
    loop = f"for _ in range(3):\n    step(OwnCrossEntropy.apply(model(x), y) + 0 * {aside})"
    script.write_text(f"{START}{OWN}{loop}\n")
    run = launcher.powergrad("run", "--alpha", 0.3, "--", script)
    assert run.code == 3
    assert "--alpha 0.3 did not reach the model: the gradient of its head is plain" in run.err


def test_bad_options_are_said_before_anything_runs(launcher, tmp_path):
    for options, message in (
        ("--alpha 1.3", "Expected `--alpha` to be in [0, 1], but got 1.3."),
        ("--agc 0", "Expected `--agc` to be positive"),
        ("--clip-norm -1", "Expected `--clip-norm` to be positive"),
        ("--lr-scale 0", "Expected `--lr-scale` to be positive, but got 0.0."),
        ("--decay-scale -1", "Expected `--decay-scale` to be at least 0, but got -1.0."),
        ("--head-lr-scale nan", "Expected `--head-lr-scale` to be positive, but got nan."),
        ("--json lost/x.json", "Expected `--json` to be a file in an existing folder"),
        ("--alhpa 0.3", "Did you mean --alpha?"),
    ):
        run = launcher.powergrad("run", *options.split(), "--", FOREIGN)
        assert (run.code, run.out) == (2, ""), options
        assert message in run.err


# Other programs -----------------------------------------------------------------------------------

OTHERS = {
    "two optimizers": """
one = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
for i in range(4):
    if i == 1:  # late
        two = torch.optim.SGD(model[2].parameters(), lr=0.1 * HEAD)
    one.zero_grad()
    model.zero_grad()
    LOSS.backward()
    one.step()
    if i:
        two.step()
""",
    "a thread": """
import threading
def train():
    for _ in range(3):
        step(LOSS)
optimizer = torch.optim.SGD([{"params": model[0].parameters()},
    {"params": model[2].parameters(), "lr": 0.1 * HEAD}], lr=0.1)
thread = threading.Thread(target=train)
thread.start()
thread.join()
""",
    "checkpoints": """
from torch.utils.checkpoint import checkpoint
optimizer = torch.optim.SGD([{"params": model[0].parameters()},
    {"params": model[2].parameters(), "lr": 0.1 * HEAD}], lr=0.1)
for reentrant in (True, False):
    x = x.requires_grad_()
    step(checkpoint(lambda x: LOSS, x, use_reentrant=reentrant))
""",
    "imported names": """
from torch.nn.functional import cross_entropy, log_softmax
optimizer = torch.optim.SGD([{"params": model[0].parameters()},
    {"params": model[2].parameters(), "lr": 0.1 * HEAD}], lr=0.1)
names = {"log_softmax": log_softmax, "torch": torch.log_softmax, "method": torch.Tensor.log_softmax,
         "special": torch.special.log_softmax}
for name in names:
    step(F.nll_loss(ALTERED(names[name]), y))
step(LOSS)
""",
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_programs(case, launcher, tmp_path):
    """With `LOSS` as PyTorch's cross-entropy, and as the potential's; and with another head."""
    start = START + "model, x = model.double(), x.double()\n"
    end = "\nimport sys; torch.save(model.state_dict(), sys.argv[1])\n"
    files = []
    for ours in (True, False):
        loss = "F.cross_entropy(model(x), y)"
        by_hand = "(F.cross_entropy(0.25 * model(x), y) / 0.25)"
        text = OTHERS[case].replace("LOSS", loss if ours else by_hand)
        altered = r"\1(model(x), 1)" if ours else "log_softmax(0.25 * model(x), 1) / 0.25"
        text = re.sub(r"ALTERED\((.*?\])\)", altered, text).replace("HEAD", "1" if ours else "0.5")
        script = tmp_path / f"{ours}.py"
        script.write_text(start + text + end)
        files.append(tmp_path / f"{ours}.pt")
        options = ("--alpha", 0.25, "--head-lr-scale", 0.5, "--")
        command = ("run", *options) if ours else ()
        start_it = launcher.powergrad if ours else launcher.python
        run = start_it(*command, script, files[-1])
        assert run.code == 0, run.err
    assert difference(*files) < 1e-12
