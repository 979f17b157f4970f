"""Fixtures of the tests of the workbench."""

from pathlib import Path

import pytest
from photos import write_photos
from studies import in_process, made_up
from tiny import TINY

from powergrad.lab.trainer.run_folder import Run
from powergrad.lab.trainer.training import train

__all__ = ["in_process", "made_up"]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_photos(tmp_path / "photos", train=12, val=4)


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The finished run of `TINY`, which no test changes."""
    return train(TINY, tmp_path_factory.mktemp("tiny") / "run")
