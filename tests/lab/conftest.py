"""Runs that several tests look at, and none changes."""

from __future__ import annotations

import pytest
from tiny import TINY

from powergrad.lab.trainer.run_folder import Run
from powergrad.lab.trainer.training import train


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The finished run of `TINY`."""
    return train(TINY, tmp_path_factory.mktemp("tiny") / "run")
