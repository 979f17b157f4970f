"""``powergrad run`` on the scripts of docs/your-script.md, against changes written in by hand."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex

import pytest
import torch
from pages import ROOT, blocks_of

PAGE = (ROOT / "docs" / "your-script.md").read_text()
SCRIPTS: dict[str | None, str] = {}  # the first of each library, in the order of the page
for block in blocks_of(PAGE):
    if block.language == "python":
        SCRIPTS.setdefault(block.needs, block.code)
PREPARE = f"""
import importlib, sys
sys.path.append({str(ROOT / "tests")!r})
from torchvision_shim import declare_torchvision_schemas
declare_torchvision_schemas()
for name in ("timm", "transformers.trainer", "lightning"):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        pass
"""
# The head's learning rate halved in each group of an optimizer, by hand.
SPLIT = """
def split(optimizer, head, key="lr"):
    head = set(head.parameters())
    groups = [
        {**group, "params": [p for p in group["params"] if (p in head) == inside],
         key: group.get(key, 1) * (0.5 if inside else 1)}
        for group in optimizer.param_groups for inside in (False, True)
    ]
    return type(optimizer)([g for g in groups if g["params"]])
"""
CHANGES: dict[str | None, list[tuple[str, str]]] = {
    None: [
        ("F.cross_entropy(model(images), labels)", "CE(model(images), labels, alpha=0.3)"),
        ("schedule = ", "optimizer = split(optimizer, model[2])\nschedule = "),
    ],
    "timm": [
        ("loss_fn(model(mixed), targets)", "CE(model(mixed), targets, alpha=0.3)"),
        (  # by timm's own factor for a group, which its schedules know, also their warm-up
            "schedule = ",
            "optimizer = split(optimizer, model.get_classifier(), 'lr_scale')\nschedule = ",
        ),
    ],
    "transformers": [
        (
            "trainer.train()",
            "trainer.compute_loss = powergrad.PowerGrad(0.3)(trainer.compute_loss)\n"
            "trainer.create_optimizer()\n"
            "trainer.optimizer = split(trainer.optimizer, model.classifier)\n"
            "trainer.train()",
        )
    ],
    "lightning": [
        (
            "F.cross_entropy(self.network(batch[0]), batch[1])",
            "CE(self.network(batch[0]), batch[1], alpha=0.3)",
        ),
        ("return torch.optim.AdamW(", "return split(torch.optim.AdamW("),
        ("weight_decay=0.01)\n\nlight", "weight_decay=0.01), self.network[2])\n\nlight"),
    ],
}
STEPS = {None: 20, "timm": 4, "transformers": 6, "lightning": 8}


@pytest.fixture(params=SCRIPTS, ids=str)
def library(request) -> str | None:
    if request.param and importlib.util.find_spec(request.param) is None:
        pytest.skip(f"needs {request.param}: make test-integrations")
    return request.param


def test_a_run_equals_the_change_written_by_hand(library, launcher, tmp_path):
    text = by_hand = SCRIPTS[library]
    for old, new in CHANGES[library]:
        assert by_hand.count(old) == 1, old
        by_hand = by_hand.replace(old, new)
    start = "import numpy, powergrad, torch\nfrom powergrad import cross_entropy as CE\n"
    start += "torch.set_default_dtype(torch.float64)\nnumpy.random.seed(0)\n"
    weights, file = {}, tmp_path / "summary.json"
    for name, code in (("plain", text), ("ours", text), ("by_hand", SPLIT + by_hand)):
        script, saved = tmp_path / f"{name}.py", tmp_path / f"{name}.pt"
        script.write_text(f"{start}{code}import sys\ntorch.save(model.state_dict(), sys.argv[1])\n")
        options = ("run", "--alpha", 0.3, "--head-lr-scale", 0.5, "--json", file, "--")
        if name == "ours":
            run = launcher.powergrad(*options, script, saved)
        else:
            run = launcher.python(script, saved)
        assert run.code == 0, run.err
        weights[name] = torch.load(saved, weights_only=True)
    assert distance(weights["ours"], weights["by_hand"]) < 1e-10  # Adam divides by gradients near 0
    assert distance(weights["ours"], weights["plain"]) > 1e-4
    found = json.loads(file.read_text())
    assert found["steps"] == sum(found["altered"].values()) == STEPS[library]
    measured = found["verification"]["text"]
    assert ("cannot tell" if library == "timm" else "PGT at alpha 0.300") in measured


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def test_the_page_shows_what_is_printed(library, launcher, tmp_path):
    place = list(SCRIPTS).index(library)
    command = re.findall(r"^powergrad (run --alpha 0\.3 -- .*)", PAGE, re.MULTILINE)[place]
    line = re.findall(r"^powergrad run: .*", PAGE, re.MULTILINE)[place]
    *tokens, script = shlex.split(command)
    (tmp_path / script).write_text(SCRIPTS[library])
    run = launcher.powergrad(*tokens, tmp_path / script)
    assert run.code == 0, run.err
    assert rounded(run.err.splitlines()[-1]) == rounded(line)


def rounded(line: str) -> str:
    """A line without what another processor computes otherwise: deviation and uncertainty."""
    return re.sub(r"± 0\.00\d|\de-0\d", "_", line)
