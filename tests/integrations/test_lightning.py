"""PowerGradCallback under Lightning's Trainer."""

from __future__ import annotations

import doctest
import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack as modes
from torch.utils.data import DataLoader, TensorDataset
from torchvision_shim import declare_torchvision_schemas

from powergrad import clip_grads_before_step, cross_entropy

declare_torchvision_schemas()
pytestmark = pytest.mark.filterwarnings("default")  # the library's own
lightning = pytest.importorskip("lightning", reason="needs lightning: make test-integrations")
PowerGradCallback = importlib.import_module("powergrad.lightning").PowerGradCallback
Recording = importlib.import_module("powergrad.monitor").Recording

torch.manual_seed(0)
DATA = TensorDataset(torch.randn(24, 6), torch.randint(0, 4, (24,)))


class Module(lightning.LightningModule):
    """An ordinary module: it does not know of powergrad."""

    def __init__(self, fail_at=None):
        super().__init__()
        torch.manual_seed(1)
        self.network = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
        self.fail_at = fail_at
        self.seen = []

    def training_step(self, batch, batch_idx):
        if self.global_step == self.fail_at:
            raise RuntimeError("on purpose")
        self.seen.append([m.owner.alpha for m in modes() if hasattr(m, "owner")])
        return F.cross_entropy(3 * self.network(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.seen.append(("validation", len(modes())))
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


def fit(module, *callbacks, epochs=2, ckpt_path=None, val=False, **options):
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, callbacks=list(callbacks), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **options,
    )  # fmt: skip
    loader = DataLoader(DATA, batch_size=4)
    trainer.fit(module, loader, loader if val else None, ckpt_path=ckpt_path)
    return trainer


def by_hand(alpha, agc=None, accumulate=1, dtype=None):
    module = Module()
    optimizer = module.configure_optimizers()
    if agc:
        clip_grads_before_step(optimizer, module, agc=agc)
    for _ in range(2):
        for i, (x, y) in enumerate(DataLoader(DATA, batch_size=4)):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                loss = cross_entropy(3 * module.network(x), y, alpha=alpha)
            (loss / accumulate).backward()
            if (i + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    return module


def assert_same(one, other, tolerance=1e-6):
    for a, b in zip(one.network.parameters(), other.network.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def norms_of(module):
    return next(module.network.parameters()).detach().norm(dim=1)


def assert_nothing_left(module, trainer):
    assert "training_step" not in module.__dict__
    assert not any(o._optimizer_step_pre_hooks for o in trainer.optimizers)
    assert modes() == []


@pytest.mark.parametrize("agc", [None, 0.02])
@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({}, {}),
        ({"accumulate_grad_batches": 3}, {"accumulate": 3}),
        ({"precision": "bf16-mixed"}, {"dtype": torch.bfloat16}),
        ({"precision": "16-mixed"}, {"dtype": torch.bfloat16}),  # what Lightning takes on a CPU
    ],
)
def test_trains_as_by_hand(agc, options, same):
    module = Module()
    trainer = fit(module, PowerGradCallback(0.3, agc=agc), **options)
    assert_same(module, by_hand(0.3, agc, **same))
    for other in [by_hand(1.0, agc, **same)] + [by_hand(0.3, **same)] * (agc is not None):
        with pytest.raises(AssertionError):
            assert_same(module, other, 1e-3)
    assert_nothing_left(module, trainer)


def test_only_training_is_inside():
    module, callback = Module(), PowerGradCallback(0.3, agc=0.02)
    fit(module, callback, val=True, epochs=1)
    trainer = fit(module, callback, val=True, epochs=1)  # once more
    validations = [entry for entry in module.seen if isinstance(entry, tuple)]
    trainings = [entry for entry in module.seen if isinstance(entry, list)]
    assert set(validations) == {("validation", 0)}
    assert trainings == [[0.3]] * 12
    assert_nothing_left(module, trainer)


def test_alpha_may_change_while_training():
    class Schedule(lightning.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            callback.alpha = [1.0, 0.2][trainer.current_epoch]

    callback, module = PowerGradCallback(1.0), Module()
    fit(module, callback, Schedule())
    assert module.seen == [[1.0]] * 6 + [[0.2]] * 6


@pytest.mark.parametrize("accumulate", [1, 2])
def test_monitor(tmp_path, accumulate):
    module = Module()
    start = norms_of(module)
    callback = PowerGradCallback(0.3, monitor=tmp_path / "norms", every=3)
    fit(module, callback, accumulate_grad_batches=accumulate)
    steps, norms = Recording(tmp_path / "norms").read("network.0")
    assert steps.tolist() == list(range(0, 12 // accumulate + 1, 3))
    torch.testing.assert_close(norms[0], start)
    torch.testing.assert_close(norms[-1], norms_of(module))


def test_monitor_continues_after_a_checkpoint(tmp_path):
    module = Module()
    trainer = fit(module, PowerGradCallback(0.3, monitor=tmp_path / "norms", every=2), epochs=1)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = Module()
    callback = PowerGradCallback(0.3, monitor=tmp_path / "norms", every=2)
    fit(again, callback, epochs=2, ckpt_path=tmp_path / "last.ckpt")
    assert Recording(tmp_path / "norms").read(1)[0].tolist() == list(range(0, 13, 2))
    assert_same(again, by_hand(0.3))


def test_an_error_leaves_nothing_behind(tmp_path):
    module = Module(fail_at=5)
    callback = PowerGradCallback(0.3, agc=0.02, monitor=tmp_path / "norms", every=1)
    kept = {}

    class Keep(lightning.Callback):
        def on_train_start(self, trainer, pl_module):
            kept["trainer"] = trainer

    with pytest.raises(RuntimeError, match="on purpose"):
        fit(module, Keep(), callback)
    assert_nothing_left(module, kept["trainer"])
    assert Recording(tmp_path / "norms").read(1)[0].tolist() == list(range(6))
    module.fail_at = None  # and the module trains on, without PGT
    module.seen.clear()
    fit(module, epochs=1)
    assert module.seen == [[]] * 6


@pytest.mark.parametrize("options", [{"alpha": -0.1}, {"alpha": 0.3, "agc": 0.0}])
def test_ranges_are_checked_at_once(options):
    with pytest.raises(ValueError, match="Expected `a"):
        PowerGradCallback(**options)


def test_the_example_in_the_docstring_runs():
    assert doctest.testmod(importlib.import_module("powergrad.lightning")).failed == 0
