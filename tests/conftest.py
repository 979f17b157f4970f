"""What all tests share: the device, the size of a run, and random tensors that repeat."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from launching import Launcher
from torchvision_shim import declare_torchvision_schemas

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tests run one process a core
torch.set_num_threads(1)

# `make test` and `make test-deep`. A test may ask for more than its share: see `cases`.
_common = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    "print_blob": True,
}
settings.register_profile("quick", max_examples=50, derandomize=True, **_common)
settings.register_profile("deep", max_examples=1000, **_common)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


if os.environ.get("POWERGRAD_TRITON") == "interpret":
    import interpreter

    interpreter.round_to_nearest()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device under test: CPU, or what `make test-gpu` asks for."""
    return torch.device(os.environ.get("POWERGRAD_TEST_DEVICE", "cpu"))


@pytest.fixture(scope="session")
def timm() -> Any:
    declare_torchvision_schemas()
    return pytest.importorskip("timm")


@pytest.fixture(scope="module")
def launcher(request: pytest.FixtureRequest, tmp_path_factory) -> Iterator[Launcher]:
    """Its programs start after the module's code `PREPARE`, if there is such."""
    folder, prepare = tmp_path_factory.mktemp("run"), getattr(request.module, "PREPARE", "")
    with Launcher.started(folder, prepare) as launcher:
        yield launcher


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
